"""A forward of the routed experts of transformers that computes the same and exposes the outputs of their linear maps.

Each position goes to a few experts, and the weights of all experts are stacked in two parameters. Here each expert's
output goes through a tap, with the example of each of its rows. Parameters enter detached: their gradients come from
the factors of the taps alone.

`engines.capture` puts `experts_forward` in place of the module's forward. `engines.passes` calls the function `factors`
of each tap. The privacy guarantee of the fast engine rests on this file: no example's output or factor may depend on
another example, and row n of `hidden_states` must belong to the example at n / (rows per example).

Shape suffixes: N rows of all examples, M rows of one expert, K experts of a row.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.factors.routed import Routed, Routes
from privgrad.gradient.layers.base import Tap, is_trained, register_forward, require_unwritten, tapped, version_of
from privgrad.gradient.layers.displaced import EachExpert


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

    Args:
        module: the experts.
        tap: as in `attention.attention_forward`.
        hidden_states: shape (N, width); the rows of an example are neighbors.
        top_k_index: the numbers of the experts of each row, shape (N, K).
        top_k_weights: the weights of their outputs, shape (N, K).
        displacements: of each example's parameters; None if they do not move.
    Privacy:
        NOT private. Each row's gradients depend on that row and the weights alone.
    """
    total = torch.zeros_like(hidden_states)
    maps = [_Map(own, EachExpert.of(own, displacements)) for own in (module.gate_up_proj, module.down_proj)]
    examples = None if displacements is None else len(displacements.share)
    for expert in range(module.num_experts):
        row_M, place_M = torch.where(top_k_index == expert)
        if len(row_M) == 0:
            continue
        routing = _Routing.of(expert, row_M, top_k_index.shape, examples)
        gate, up = _linear(tap, hidden_states[row_M], maps[0], routing).chunk(2, dim=-1)
        output = _linear(tap, module.act_fn(gate) * up, maps[1], routing)
        output = output * top_k_weights[row_M, place_M, None]
        total = total.index_add(0, row_M, output.to(total.dtype))
    return total


class _Map(NamedTuple):
    """The stacked weights of all experts, shape (E, O, I), and their displacements; None if they do not move."""

    weights: Tensor
    displacements: EachExpert | None


class _Routing(NamedTuple):
    """The rows that use one expert.

    Attributes:
        expert: its number.
        row: ascending, shape (M,).
        shape: (N, K).
        counts: the number of rows of each example if parameters move; else empty.
    """

    expert: int
    row: Tensor
    shape: torch.Size
    counts: list[int]

    @staticmethod
    def of(expert: int, row_M: Tensor, shape: torch.Size, examples: int | None) -> "_Routing":
        """Return the routing of these rows; `examples` is the number of examples if parameters move."""
        if examples is None:
            return _Routing(expert, row_M, shape, [])
        counts_B = (row_M // (shape[0] // examples)).bincount(minlength=examples)
        return _Routing(expert, row_M, shape, cast("list[int]", counts_B.tolist()))


def _linear(tap: Tap, x: Tensor, own: _Map, routing: _Routing) -> Tensor:
    """Return x times one expert's weight, or each example's displaced weight, passed through the tap.

    Args:
        tap: as in `experts_forward`.
        x: shape (M, I).
        own: the weights.
        routing: of the rows of x.
    """
    version, weights = version_of(x), own.weights

    def factors(grad_MO: Tensor) -> dict[Tensor, Factor]:
        if not is_trained(weights):
            return {}
        require_unwritten("experts", x, version)
        routes = Routes(routing.expert, routing.row, at_least_float32(x.detach()), at_least_float32(grad_MO))
        return {weights: Routed([routes], routing.shape[0], weights.shape, routing.shape[1])}

    output = F.linear(x, weights.detach()[routing.expert])
    if own.displacements is not None:
        output = own.displacements.moved(output, x, routing.expert, routing.counts)
    return tapped(tap, output, factors)
