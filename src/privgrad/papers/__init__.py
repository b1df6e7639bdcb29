"""The papers' tables and figures, reproduced. Only the command line imports this package.

The privacy guarantee does not rest on this package.
"""
