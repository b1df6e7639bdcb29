"""Compute each example's Hessian-vector product, by a backward pass through the backward pass.

`passes.Passes` calls `backward` and `curvature` for `factored.Factored.moved` with `exact=True`, for BAM(mode="exact").
The vector is a displacement of the parameters, different for each example.

The privacy guarantee of the fast engine rests on this file: row i of each result must depend on example i only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from privgrad.gradient.autograd_graph import gradients_at
from privgrad.gradient.engines.taps import HvpTerms, Tap
from privgrad.gradient.factors.displacement import Displacements


@dataclass(frozen=True)
class Backward:
    """The result of a backward pass that can be differentiated again.

    Attributes:
        taps: the places in the graph at which gradients were computed.
        grads: the gradients at the taps; None for a tap that the losses do not reach.
        of_sources: the gradients of the taps' sources; None for a tap without a source, or a source not reached.
    """

    taps: Sequence[Tap]
    grads: Sequence[Tensor | None]
    of_sources: Sequence[Tensor | None]

    @property
    def detached(self) -> list[Tensor | None]:
        """The gradients at the taps, without their graph; `passes` reads it too."""
        return [None if grad is None else grad.detach() for grad in self.grads]


def backward(losses: Tensor, taps: Sequence[Tap]) -> Backward:
    """Compute the gradients of the summed losses at the taps and their sources, with a graph for a second pass."""
    edges = [tap.edge for tap in taps]
    sources = [get_gradient_edge(tap.source) for tap in taps if tap.source is not None]
    grads = gradients_at([*edges, *sources], [losses.sum()], create_graph=True)
    rest = iter(grads[len(taps) :])
    return Backward(taps, grads[: len(taps)], [next(rest) if tap.source is not None else None for tap in taps])


def curvature(first: Backward, displacements: Displacements) -> tuple[list[Tensor | None], list[HvpTerms | None]]:
    """Compute the gradients at the taps with the Hessian's terms added, and the other terms for the weight gradients.

    Computes: let b be the gradient at a tap's output, x its source and v_i the displacement of example i. Then
    phi = sum <b, delta(x)> equals <g_i, v_i> for each example, and its gradient is H_i v_i. A layer's weight enters phi
    twice: in the forward pass, which gives the pair (x, d phi / d output), and in the backward pass, which gives the
    pair (d phi / d (gradient of x), b).
    """
    total = first.detached
    # Only the gradient of phi is needed: <delta, d b> + <b, d delta>.
    ends: list[Tensor] = []
    others: list[Tensor] = []
    for tap, grad in zip(first.taps, first.grads, strict=True):
        delta = tap.delta(displacements) if tap.delta and grad is not None else None
        if delta is not None:
            pair = cast(Tensor, grad), delta.expand_as(cast(Tensor, grad))
            for end, other in (pair, pair[::-1]):
                if end.requires_grad:
                    ends.append(end)
                    others.append(other.detach().to(end.dtype))
    if not ends:  # the losses are linear in all outputs: only the computation of weights has curvature
        pairs = zip(first.taps, total, strict=True)
        return total, [
            HvpTerms(grad, None, displacements) if tap.curved and grad is not None else None for tap, grad in pairs
        ]
    inner = [get_gradient_edge(grad) for grad in first.of_sources if grad is not None and grad.requires_grad]
    added = gradients_at([*(tap.edge for tap in first.taps), *inner], ends, others)
    rest = iter(added[len(first.taps) :])
    terms: list[HvpTerms | None] = []
    for tap, grad, back in zip(first.taps, total, first.of_sources, strict=True):
        curved = next(rest) if back is not None and back.requires_grad else None
        terms.append(HvpTerms(grad, curved, displacements) if tap.curved and grad is not None else None)
    pairs = zip(total, added, strict=False)
    return [grad if grad is None or add is None else grad + add for grad, add in pairs], terms
