"""A forward of the routed experts of transformers that computes the same and exposes the outputs of their linear maps.

Each position goes to a few experts, and the weights of all experts are stacked in two parameters. Here each expert's
output goes through a tap, with the example of each of its rows. Parameters enter detached: their gradients come from
the factors of the taps alone.

`engines.capture` puts `experts_forward` in place of the module's forward. `engines.passes` calls the function `factors`
of each tap. The privacy guarantee of the fast engine rests on this file: no example's output or factor may depend on
another example, and row n of `hidden_states` must belong to the example at n / (rows per example).

Shape suffixes: N rows of all examples, M rows of one expert, K experts of a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.factors.routed import Routed, Routes
from privgrad.gradient.layers.base import Tap, is_trained, register_forward, require_unwritten, tapped, version_of


@register_forward(
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts",
    "transformers.models.olmoe.modeling_olmoe.OlmoeExperts",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
)
def experts_forward(module: Any, tap: Tap, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute module(hidden_states, ...) with a tap at the output of each linear map of each expert.

    Args:
        module: the experts.
        tap: as in `attention.attention_forward`.
        hidden_states: shape (N, width); the rows of an example are neighbors.
        top_k_index: the numbers of the experts of each row, shape (N, K).
        top_k_weights: the weights of their outputs, shape (N, K).
    Privacy:
        NOT private. Each row's gradients depend on that row and the weights alone.
    """
    total = torch.zeros_like(hidden_states)
    for expert in range(module.num_experts):
        row_M, place_M = torch.where(top_k_index == expert)
        if len(row_M) == 0:
            continue
        routing = expert, row_M, tuple(top_k_index.shape)
        gate, up = _linear(tap, hidden_states[row_M], module.gate_up_proj, routing).chunk(2, dim=-1)
        output = _linear(tap, module.act_fn(gate) * up, module.down_proj, routing)
        output = output * top_k_weights[row_M, place_M, None]
        total = total.index_add(0, row_M, output.to(total.dtype))
    return total


def _linear(tap: Tap, x: Tensor, weights: Tensor, routing: tuple[int, Tensor, tuple[int, ...]]) -> Tensor:
    """Return x times one expert's weight, passed through the tap.

    Args:
        tap: as in `experts_forward`.
        x: shape (M, I).
        weights: of all experts, shape (E, O, I).
        routing: the expert's number, the row of each input, and (N, K).
    """
    (expert, row_M, (rows, places)), version = routing, version_of(x)

    def factors(grad_MO: Tensor) -> dict[Tensor, Factor]:
        if not is_trained(weights):
            return {}
        require_unwritten("experts", x, version)
        routes = Routes(expert, row_M, at_least_float32(x.detach()), at_least_float32(grad_MO))
        return {weights: Routed([routes], rows, weights.shape, places)}

    return tapped(tap, F.linear(x, weights.detach()[expert]), factors)
