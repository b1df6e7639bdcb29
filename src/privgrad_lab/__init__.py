"""Experiments from a TOML file: read the specification, build its parts, run them, and report the records."""
