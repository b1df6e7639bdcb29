"""One file per torch layer type: its forward pass, and the factors of its parameters' gradients.

Importing this package registers all. Parameters that none covers are copied for each example, which is correct but
slow. A wrong rule breaks the guarantee: row i of a factor must depend on example i only. `tests/engine/test_rules.py`
compares all rules with the reference engine.
"""

from privgrad.engine.layers import attention, conv, embedding, experts, linear, normalization, recurrent, rms_norm

__all__ = ["attention", "conv", "embedding", "experts", "linear", "normalization", "recurrent", "rms_norm"]
