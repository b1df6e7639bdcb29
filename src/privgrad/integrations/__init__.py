"""Bridges to frameworks, one file each."""
