"""Fuzzers of what reads files from elsewhere: `python -m tests.fuzz READER --seconds 600`.

Each takes valid files, changes them, and reads them. Allowed is to succeed, or to end in a PrivacyError that no lack of
memory caused; nothing else may come out, no code may run, and no file may take more than a GiB or a few seconds.
"""
