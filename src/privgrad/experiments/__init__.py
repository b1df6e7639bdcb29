"""Experiments from a TOML file: read the specification, build its parts, run them, and report the records.

The command line and `papers` call it. Trainings call `fit`, which keeps the privacy guarantee. The guarantee also rests
on parts of `build`, `load_spec`, `runner` and `spec`: each of these files names them.
"""
