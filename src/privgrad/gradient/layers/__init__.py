"""One file a torch layer: its forward pass, and the factors of its parameters' gradients.

A layer without a rule is taken by vmap, which is right and slow. So a rule is about speed only, as long as it is
right: the self-check compares it with autograd, and `tests/contract/test_rules.py` with the reference engine.
Importing this package registers all rules of the library.
"""

from privgrad.gradient.layers import conv, embedding, linear, normalization

__all__ = ["conv", "embedding", "linear", "normalization"]
