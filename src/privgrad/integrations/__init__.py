"""Bridges to other frameworks, one file each; ExternalLoopStep is the part that several share.

Users import these files; the library does not, apart from TensorBoard.
"""
