"""Bridges to other frameworks, one file each; ExternalLoopStep is the part that several share.

Users import these files. The rest of the library imports only `tensorboard`, in `experiments.runner`.
"""
