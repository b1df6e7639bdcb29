"""A forward of the routed experts of transformers that computes the same and exposes the outputs of their linear maps.

Each position goes to a few experts, and the weights of all experts are stacked in two parameters, which enter detached:
their gradients come from the taps at each expert's output alone.

Shape suffixes: N rows of all examples, M rows of one expert, K experts of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from privgrad.engine.factors.displacement import Displacement, Displacements, displacement_of
from privgrad.engine.factors.routed import Routed, Routes
from privgrad.engine.layers.base import Tap, is_trained, register_forward, require_unwritten, tapped
from privgrad.gradient.factor import Factor, at_least_float32
from privgrad.gradient.functional import version_of


@register_forward(
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    "transformers.models.olmoe.modeling_olmoe.OlmoeExperts",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
)
def experts_forward(
    module: Any,
    tap: Tap,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    displacements: Displacements | None = None,
) -> Tensor:
    """Compute module(hidden_states, ...) with a tap at the output of each linear map of each expert.

    The rows of an example are neighbors in `hidden_states`, shape (N, width); top_k_index and top_k_weights are (N, K).
    """
    total = torch.zeros_like(hidden_states)
    both = {own: displacement_of(own, displacements) for own in (module.gate_up_proj, module.down_proj)}
    moves = {own: EachExpert(displacement) for own, displacement in both.items() if displacement is not None}
    for expert in range(module.num_experts):
        row_M, place_M = torch.where(top_k_index == expert)
        if len(row_M) == 0:
            continue
        counts = list[int]()
        if displacements is not None:
            size = len(displacements.share)
            counts = cast("list[int]", (row_M // (len(top_k_index) // size)).bincount(minlength=size).tolist())
        routing = _Routing(expert, row_M, top_k_index.shape, counts)
        gate, up = _linear(tap, hidden_states[row_M], module.gate_up_proj, moves, routing).chunk(2, dim=-1)
        output = _linear(tap, module.act_fn(gate) * up, module.down_proj, moves, routing)
        output = output * top_k_weights[row_M, place_M, None]
        total = total.index_add(0, row_M, output.to(total.dtype))
    return total


class _Routing(NamedTuple):
    """The rows that use one expert."""

    expert: int
    row: Tensor  # ascending, shape (M,)
    shape: torch.Size  # (N, K)
    counts: list[int]  # the number of rows of each example if parameters move; else empty


def _linear(tap: Tap, x: Tensor, weights: Tensor, moves: "Mapping[Tensor, EachExpert]", routing: _Routing) -> Tensor:
    """Return x times one expert's part of stacked weights, displaced for each example, passed through the tap."""
    version = version_of(x)

    def factors(grad_MO: Tensor) -> dict[Tensor, Factor]:
        if not is_trained(weights):
            return {}
        require_unwritten("experts", x, version)
        routes = Routes(routing.expert, routing.row, at_least_float32(x.detach()), at_least_float32(grad_MO))
        return {weights: Routed([routes], routing.shape[0], weights.shape, routing.shape[1])}

    output = F.linear(x, weights.detach()[routing.expert])
    if weights in moves:
        output = moves[weights].moved(output, x, routing.expert, routing.counts)
    return tapped(tap, output, factors)


class EachExpert:
    """The displacements of the stacked weights of experts, of shape (E, O, I), for each example."""

    def __init__(self, displacement: Displacement) -> None:
        factor = displacement.factor
        self._share: list[float] = displacement.share.tolist()
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        if isinstance(factor, Routed):
            found = ((route.expert, route.by_example()) for route in factor.routes)
            self._pairs = {(expert, i): (a_TI, b_TO) for expert, pairs in found for i, a_TI, b_TO in pairs}
        else:
            self._dense_BEOI = factor.dense()

    def moved(self, output_MO: Tensor, x_MI: Tensor, expert: int, counts: Sequence[int]) -> Tensor:
        """Add each example's displacement to one expert's output; the rows are in order, `counts` of each."""
        moves, start = list[_Move](), 0
        for example, count in enumerate(counts):
            matrices = self._matrices(expert, example, count) if count else ()
            if matrices:
                own = tuple(matrix.to(torch.promote_types(x_MI.dtype, torch.float32)) for matrix in matrices)
                moves.append((slice(start, start + count), self._share[example], own))
            start += count
        return cast(Tensor, _AddMoved.apply(output_MO, at_least_float32(x_MI), moves)) if moves else output_MO

    def _matrices(self, expert: int, example: int, count: int) -> tuple[Tensor, ...]:
        """Return matrices (I, ...), ..., (..., O), whose product is D_i^T without the share; none if it is zero."""
        if self._pairs is None:
            return (self._dense_BEOI[example, expert].mT,)
        if (expert, example) not in self._pairs:
            return ()
        a_TI, b_TO = self._pairs[expert, example]
        (positions, inputs), outputs = a_TI.shape, b_TO.shape[1]
        if positions * count * (inputs + outputs) <= (positions + count) * inputs * outputs:
            return a_TI.mT, b_TO
        return (a_TI.mT @ b_TO,)


_Move = tuple[slice, float, tuple[Tensor, ...]]  # rows of one example, its share, and matrices


class _AddMoved(torch.autograd.Function):
    """Adds to the output of some rows, in place: share times the input times matrices."""

    @staticmethod
    def forward(ctx: Any, output_MO: Tensor, x_MI: Tensor, moves: list[_Move]) -> Tensor:
        ctx.moves, ctx.shape, ctx.dtype = moves, x_MI.shape, x_MI.dtype
        ctx.mark_dirty(output_MO)
        with torch.autocast(x_MI.device.type, enabled=False):
            # Each example by itself, so that the number of rows of others does not change how it is rounded.
            for rows, share, matrices in moves:
                product = x_MI[rows]
                for matrix in matrices:
                    product = product @ matrix
                output_MO[rows].add_(product, alpha=share)
        return output_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.needs_input_grad[1]:
            return grad_MO, None, None
        grad_MI = grad_MO.new_zeros(ctx.shape, dtype=ctx.dtype)
        for rows, share, matrices in ctx.moves:
            product = at_least_float32(grad_MO[rows])
            for matrix in reversed(matrices):
                product = product @ matrix.mT
            grad_MI[rows].add_(product, alpha=share)
        return grad_MO, grad_MI, None
