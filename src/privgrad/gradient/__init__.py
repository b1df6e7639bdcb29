"""The contribution of one example: the gradient, its interface `Factor`, and the reference engine.

`privgrad/__init__` lends them here, where users who write a rule for their own layer find them.
"""

from privgrad.gradient.factor import Dense, Factor, LinearMapFactor

__all__ = ["Convolution", "Dense", "Factor", "LinearMapFactor", "Outer", "Rows", "Rule", "register_rule"]  # pyright: ignore[reportUnsupportedDunderAll]
