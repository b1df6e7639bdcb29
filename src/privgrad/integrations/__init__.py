"""Bridges to other frameworks, one file each; ExternalLoopStep is the part that several share."""
