"""Experiments from a TOML file: read the specification, build its parts, run them, and report the records.

The command line and `papers` call it. The privacy guarantee does not rest on this package: trainings call `fit`.
"""
