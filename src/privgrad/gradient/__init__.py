"""All code that computes with the gradients of single examples.

A privacy reviewer reads, in this order: `clipping` (norms, clip factors and the clipped sum), `factors` (norms and
sums of gradients that are never written out), `validation` (checks of the model and the loss, with `randomness` and
`probes`), `perturb`, `precondition`, `moments` and `local_training` (the vector that is clipped), `example_groups`.

`layers` and `engines` matter for speed only, provided that they are correct: a wrong one would break the privacy
guarantee. The self-check compares some of their results with autograd, and refuses wrong ones. `engines.vmap` is the
reference.

Use the names exported here to write a rule for your own layer, or your own kind of gradient.
"""

from privgrad.gradient.factors.base import Dense, Factor, LinearMapFactor
from privgrad.gradient.factors.conv import Convolution
from privgrad.gradient.factors.embedding import Rows
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.layers.base import Rule, register_rule

__all__ = ["Convolution", "Dense", "Factor", "LinearMapFactor", "Outer", "Rows", "Rule", "register_rule"]
