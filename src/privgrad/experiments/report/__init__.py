"""Reports of experiments: a web page with figures, a table for the terminal, and the metadata of both.

The command line and `papers.reproduce` call it when trainings have ended; other items of papers use its figures only.
The privacy guarantee does not rest on this package: it states the guarantee of finished trainings.
"""
