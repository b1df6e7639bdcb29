"""Adapters: replaced forwards of attention and recurrent layers, which give the per-example gradients.

An adapter computes the same as the module, and passes some intermediate tensors through a tap. `engines.capture`
records these tensors. From the gradient of each, the adapter makes the factors of the parameters' gradients.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.gradient.factors.base import Dense, Factor, Placed
from privgrad.gradient.factors.norms import at_least_float32, sum_over
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.layers.attention import attention_forward
from privgrad.gradient.layers.recurrent import recurrent_forward

# (tensor of the graph, function from its gradient to factors by parameter) -> the tensor to use from then on
Tap = Callable[[Tensor, Callable[[Tensor], Mapping[Tensor, Factor]]], Tensor]
Adapter = Callable[..., Any]

_FORWARDS: dict[type[nn.Module], Adapter] = {
    nn.MultiheadAttention: attention_forward,
    nn.LSTM: recurrent_forward,
    nn.GRU: recurrent_forward,
    nn.RNN: recurrent_forward,
}


def find_adapter(module: nn.Module) -> Adapter | None:
    """Return a forward (module, tap, *args, **kwargs) that replaces the module's own, or None.

    There is none for subclasses, parametrized modules and modules whose forward has been replaced.
    """
    forward = _FORWARDS.get(type(module))
    if forward is None or "forward" in vars(module) or any(map(parametrize.is_parametrized, module.modules())):
        return None
    return partial(_adapted, forward)


def _adapted(forward: Adapter, module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def note(tensor: Tensor, contributions: Callable[[Tensor], list[Any]]) -> Tensor:
        return tap(tensor, lambda grad: _factors(parameters, contributions(grad)))

    return forward(module, note, *args, **kwargs)


def _factors(parameters: Mapping[str, nn.Parameter], contributions: list[Any]) -> dict[Tensor, Factor]:
    found: dict[Tensor, Factor] = {}
    for name, kind, a, b, *rows in contributions:
        if name not in parameters:
            continue
        factor = Outer(a, b) if kind == "outer" else Dense(sum_over(at_least_float32(b), 1) if kind == "bias" else b)
        if rows:
            factor = Placed([(rows[0].start, factor)], parameters[name].shape)
        parameter = parameters[name]
        found[parameter] = found[parameter] + factor if parameter in found else factor
    return found
