"""The Hessian's product with each example's own move, by a backward pass through the backward pass."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from privgrad.gradient.capture import Tap
from privgrad.gradient.factors import Factor


def with_curvature(losses: Tensor, taps: Sequence[Tap]) -> tuple[list[Tensor | None], list[Mapping[Tensor, Factor]]]:
    """Gradients at the taps, with what curvature adds to them; and what it adds by way of the taps' sources.

    Computes: with b the gradient at a tap's output and x its source, phi = sum <b, delta(x)> is each example's
    <g_i, v_i>, v_i the move. Its gradient is H_i v_i; and a layer's weight takes part twice: in the forward pass, where
    it meets (x, d phi / d output), and in the backward pass, where it meets (d phi / d (gradient of x), b).
    """
    sources = [get_gradient_edge(tap.source) for tap in taps if tap.source is not None]
    edges = [tap.edge for tap in taps]
    grads = torch.autograd.grad(losses.sum(), [*edges, *sources], create_graph=True, allow_unused=True)
    first = cast("list[Tensor | None]", list(grads[: len(taps)]))
    of_sources = iter(cast("list[Tensor | None]", list(grads[len(taps) :])))
    backward = [next(of_sources) if tap.source is not None else None for tap in taps]
    parts = [
        (grad * tap.delta()).sum() for tap, grad in zip(taps, first, strict=True) if tap.delta and grad is not None
    ]
    phi = torch.stack(parts).sum() if parts else losses.new_zeros(())
    if not phi.requires_grad:
        return [None if grad is None else grad.detach() for grad in first], [{} for _ in taps]
    inner = [get_gradient_edge(grad) for grad in backward if grad is not None and grad.requires_grad]
    second = torch.autograd.grad(phi, [*edges, *inner], allow_unused=True)
    moved = cast("list[Tensor | None]", list(second[: len(taps)]))
    of_inner = iter(cast("list[Tensor | None]", list(second[len(taps) :])))
    more: list[Mapping[Tensor, Factor]] = []
    for tap, grad, back in zip(taps, first, backward, strict=True):
        curved = next(of_inner) if back is not None and back.requires_grad else None
        more.append({} if grad is None or curved is None else tap.factors(grad.detach(), curved))
    total = [
        None if grad is None else grad.detach() if add is None else grad.detach() + add
        for grad, add in zip(first, moved, strict=True)
    ]
    return total, more
