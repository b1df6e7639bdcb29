"""The places in the graph of the losses where the fast engine computes gradients.

`capture` records them, `passes` makes factors from the gradients there, and `hvp` computes Hessian products from them.
The privacy guarantee rests on those files: this one only holds data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements


@dataclass
class Tap:
    """A place in the graph where a gradient is computed, with the function from it to gradients of parameters.

    Attributes:
        path: the unit's path, for messages.
        edge: the graph's edge whose gradient is computed.
        zeros: a gradient of zeros at the edge; it takes no memory.
        factors: gradient at the edge -> factors by parameter; if `curved`, HvpTerms are its second argument.
        inputs: the tensors that `factors` uses, with their versions at that time, to detect in-place writes.
        delta: displacements of the parameters -> their effect on this tensor, to first order; for Hessian products.
        source: the unit's input, if gradients flow to it; for Hessian products.
        curved: whether the parameters' Hessian product needs HvpTerms, besides the gradient at the edge.
        is_copy: whether the edge leads to copies of a parameter, whose gradients are zero if the losses do not use it.
        functions: the functions that need these copies, each with what would be faster; for `uses`.
    """

    path: str
    edge: GradientEdge
    zeros: Tensor
    factors: Callable[..., Mapping[Tensor, Factor]]
    inputs: list[tuple[Tensor, int]]
    delta: Callable[[Displacements], Tensor | None] | None = None
    source: Tensor | None = None
    curved: bool = False
    is_copy: bool = False
    functions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class HvpTerms:
    """The terms that a Hessian-vector product adds to a layer's gradients, besides the gradient at its output.

    Attributes:
        first: the gradient at the output, without the Hessian's part.
        source: the Hessian-vector term that multiplies `first` in the weight gradient, or None.
        displacements: the displacements of the parameters, the vectors of the product.
    """

    first: Tensor
    source: Tensor | None
    displacements: Displacements
