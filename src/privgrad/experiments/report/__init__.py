"""Reports of experiments: a web page with figures, a table for the terminal, and the metadata of both.

The command line and `papers.reproduce` call it when trainings have ended.
"""
