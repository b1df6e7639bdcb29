"""Everything that sees one example's gradient.

A privacy reviewer reads, in this order: `clipping` (norms to factors, and the clipped sum), `factors` (norms and sums
of gradients that are never written out), `validation` (what a model and a loss are checked for), `perturb`,
`precondition` and `local_training` (what is clipped), `example_groups`.

About speed only, for the self-check refuses what is wrong: `layers` and `engines`. `engines.vmap` is the reference.

A layer, or a kind of gradient, of your own is built from the names that are exported here.
"""

from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.conv import Convolution
from privgrad.gradient.factors.embedding import Rows
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.layers.base import Rule, register_rule

__all__ = ["Convolution", "Dense", "Factor", "Outer", "Rows", "Rule", "register_rule"]
