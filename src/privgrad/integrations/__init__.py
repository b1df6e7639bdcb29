"""Bridges to other frameworks, one file each; `training.external_loop` is the part that several share."""
