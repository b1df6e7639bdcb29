"""One file per torch layer type: its forward pass, and the factors of its parameters' gradients.

A rule (`base.Rule`) computes a layer's output, the per-example gradients of a parameter, and the change of the output
when each example's parameters move. Layers of several linear maps have a forward with taps instead
(`base.register_forward`). `functional` applies rules to calls of torch functions. Importing this package registers all.

Parameters that none of these covers are copied for each example, which is correct but slow. A wrong rule breaks the
guarantee: row i of a factor must depend on example i only. `tests/engine/test_rules.py` compares all rules with the
reference engine.
"""

from privgrad.engine.layers import attention, conv, embedding, experts, linear, normalization, recurrent

__all__ = ["attention", "conv", "embedding", "experts", "linear", "normalization", "recurrent"]
