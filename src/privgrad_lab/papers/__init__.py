"""The papers' tables and figures, reproduced. Only the command line imports this package."""
