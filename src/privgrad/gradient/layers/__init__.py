"""One file per torch layer type: its forward pass, and the factors of its parameters' gradients.

A rule (`base.Rule`) computes a layer's output and the per-example gradients of its parameters, as factors. Attention
and recurrent layers have a forward with taps instead (`base.register_forward`), because they compute several linear
maps. `functional` applies rules to calls of `F.linear` and `F.conv1d` to 3d. The engine in `privgrad.gradient.engines`
finds the rule of each layer. Importing this package registers all rules and forwards of the library.

Parameters that none of these covers are copied for each example, which is correct but slow. A rule only adds speed,
provided that it is correct: a wrong rule breaks the privacy guarantee. The self-check of the engine compares rules with
autograd, and `tests/contract/test_rules.py` compares them with the reference engine.
"""

from privgrad.gradient.layers import attention, conv, embedding, experts, linear, normalization, recurrent

__all__ = ["attention", "conv", "embedding", "experts", "linear", "normalization", "recurrent"]
