"""Reports of experiments: a web page with figures, a table for the terminal, and the metadata of both."""
