"""A forward of the routed experts of transformers that computes the same and exposes the outputs of their linear maps.

Each position goes to a few experts, and the weights of all experts are stacked in two parameters, which enter detached:
their gradients come from the taps at each expert's output alone.

Shape suffixes: N rows of all examples, K experts of a row, M = N K slots, B examples, S slots of an example.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from privgrad.engine.factors.displacement import Displacements, displacement_of
from privgrad.engine.factors.routed import Routed, Routes, apply_routed
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
    """Compute module(hidden_states, ...) with a tap at the output of each linear map, for all experts together.

    The rows of an example are neighbors in `hidden_states`, shape (N, width); top_k_index and top_k_weights are (N, K).
    """
    routes = Routes(top_k_index, module.num_experts)
    x_MI = hidden_states.repeat_interleave(top_k_index.shape[1], 0)
    gate, up = _linear(tap, x_MI, module.gate_up_proj, routes, displacements).chunk(2, dim=-1)
    output = _linear(tap, module.act_fn(gate) * up, module.down_proj, routes, displacements)
    output = (output * top_k_weights.reshape(-1, 1)).to(hidden_states.dtype)
    return output.view(*top_k_index.shape, -1).sum(1)


def _linear(tap: Tap, x_MI: Tensor, weights: Tensor, routes: Routes, displacements: Displacements | None) -> Tensor:
    """Return each slot's input times its expert's part of stacked weights, displaced for each example, and tapped."""
    version, shape = version_of(x_MI), (*routes.expert_BS.shape, -1)

    def factors(grad_MO: Tensor) -> dict[Tensor, Factor]:
        if not is_trained(weights):
            return {}
        require_unwritten("experts", x_MI, version)
        return {weights: Routed(routes, x_MI.detach().view(shape), grad_MO.reshape(shape))}

    if (blocks := routes.few_blocks(*weights.shape[1:])) is not None:
        x_PNI = x_MI.index_select(0, blocks.slot.flatten()).view(*blocks.slot.shape[1:], -1)
        output_PNO = cast("Any", _InBlocks).apply(x_PNI, weights.detach(), blocks.expert)
        output_MO = output_PNO.flatten(0, 1).index_select(0, blocks.place[0])
    else:
        order_M, place_M, counts = routes.whole.by_expert
        inputs = cast("tuple[Tensor, ...]", x_MI.index_select(0, order_M).split(counts))
        pieces = zip(inputs, weights.detach().unbind(), strict=True)
        output_MO = torch.cat([F.linear(x_RI, weight) for x_RI, weight in pieces]).index_select(0, place_M)
    displacement = displacement_of(weights, displacements)
    if displacement is not None:
        size = len(displacement.share)
        with torch.autocast(x_MI.device.type, enabled=False):
            x_BSI, expert_BS = at_least_float32(x_MI).view(size, -1, x_MI.shape[1]), routes.expert_BS.view(size, -1)
            moved_BSO = apply_routed(displacement.factor, x_BSI, expert_BS) * displacement.share[:, None, None]
        output_MO = output_MO + moved_BSO.flatten(0, 1).to(output_MO.dtype)
    return tapped(tap, output_MO, factors)


class _InBlocks(torch.autograd.Function):
    """The product of each block with its expert's part of the weights; no copy of a part is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x_PNI: Tensor, weights: Tensor, expert_P: Tensor) -> Tensor:
        ctx.save_for_backward(weights, expert_P)
        return x_PNI @ weights.index_select(0, expert_P).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNO: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, expert_P = ctx.saved_tensors
        return grad_PNO @ weights.index_select(0, expert_P).to(grad_PNO.dtype), None, None
