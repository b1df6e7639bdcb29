from privgrad.engine.factors.conv import Convolution as Convolution
from privgrad.engine.factors.embedding import Rows as Rows
from privgrad.engine.factors.outer import Outer as Outer
from privgrad.engine.layers.base import Rule as Rule
from privgrad.engine.layers.base import register_rule as register_rule
from privgrad.gradient.factor import Dense as Dense
from privgrad.gradient.factor import Factor as Factor
from privgrad.gradient.factor import LinearMapFactor as LinearMapFactor

__all__ = ["Convolution", "Dense", "Factor", "LinearMapFactor", "Outer", "Rows", "Rule", "register_rule"]
