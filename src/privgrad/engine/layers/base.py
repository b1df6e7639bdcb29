"""The two ways to describe a layer: a rule, and a forward with taps.

A `Rule` is for a layer with one weight: its forward pass, and the per-example gradients of its parameters. A forward
with taps is for a layer that computes several linear maps, such as attention. It computes the same as the module, and
passes the output of each map through a tap, with a function from the gradient of that output to factors.

Shape suffixes: B examples, R rows of all examples, T positions of an example, I inputs, O outputs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.engine.factors.displacement import Displacement, Displacements, displacement_of
from privgrad.engine.factors.outer import Outer, sum_over
from privgrad.errors import expected
from privgrad.gradient.factor import Dense, Factor, at_least_float32
from privgrad.gradient.functional import own_parameters
from privgrad.gradient.refusals import refused

# (tensor of the graph, function from its gradient to factors by parameter) -> the tensor to use in its place
Tap = Callable[[Tensor, Callable[[Tensor], dict[Tensor, Factor]]], Tensor]
Weights = Mapping[str, Tensor]  # a layer's parameters by name
Moves = Mapping[str, Displacement]  # their displacements by name; parameters that do not move are missing


class Rule(ABC):
    """The forward pass of one layer type, and the factors of its parameters' gradients.

    Parameters are passed as tensors, because a parametrization may compute the layer's own from others. A rule must
    use these tensors, never the layer's own.

    Attributes:
        parameters: names of the layer's parameters that the rule knows.
        has_delta: whether the rule implements `delta`; if not, moved parameters are written out for every example.
        is_bilinear: whether the gradient of "weight" is bilinear in the input and the output gradient, and all other
            gradients depend on the output gradient alone. This must hold for the rule and the input that `bilinear`
            returns.
    Privacy:
        A wrong rule breaks the guarantee: see `register_rule`.
    """

    parameters: tuple[str, ...] = ("weight", "bias")
    has_delta = False
    is_bilinear = False

    @abstractmethod
    def forward(self, layer: Any, parameters: Weights, x: Tensor) -> Tensor:
        """Return layer(x), computed with these parameters.

        Examples are in dimension 0 of the input and of the output.
        """

    @abstractmethod
    def factor(self, layer: Any, name: str, parameters: Weights, x: Tensor, grad: Tensor) -> Factor:
        """Return the per-example gradients of the named parameter, one row per example; it runs without grad.

        A Hessian product calls it again for "weight", with other tensors as x and grad, so `is_bilinear` must hold.

        Args:
            layer: the module, or the options of a functional call.
            name: name of the parameter.
            parameters: all parameters of the layer, by name.
            x: input, shape (B, ...).
            grad: gradient of each example's loss with respect to the output, shape (B, ...).
        Privacy:
            Each row is clipped by the norm of this factor. Row i must depend on example i only.
        """

    def delta(self, layer: Any, displacements: Moves, x: Tensor) -> Tensor:
        """Return the change of the output when each example's parameters move.

        It is for layers whose output is affine in their parameters.

        Args:
            layer: the module.
            displacements: by parameter name; parameters that do not move are missing.
            x: input, shape (B parts, ...): an example may have several rows.
        Returns:
            A tensor that broadcasts to the output.
        """
        raise NotImplementedError

    def moved(self, layer: Any, parameters: Weights, displacements: Moves, x: Tensor) -> Tensor:
        """Return the layer's output at moved parameters; the arguments are as in `forward` and `delta`."""
        output = self.forward(layer, parameters, x)
        return output + self.delta(layer, displacements, x).to(output.dtype)

    def bilinear(self, layer: Any, x: Tensor) -> "tuple[Rule, Tensor]":
        """Return a bilinear rule for the parameters, and the input of that rule.

        A layer that first computes something else from x, such as a normalization, does so here. torch must be able to
        take second derivatives of this.
        """
        return self, x

    def supports(self, layer: Any) -> bool:
        """Return whether the rule is correct for this layer's options; if not, the layer has no rule."""
        return True


_LAYERS: dict[type[nn.Module] | str, Rule | Callable[..., Any]] = {}  # a rule, or a forward with taps

RuleType = TypeVar("RuleType", bound=Rule)
Forward = TypeVar("Forward", bound=Callable[..., Any])


def register_rule(*layers: type[nn.Module] | str, replace: bool = False) -> Callable[[type[RuleType]], type[RuleType]]:
    """Register a Rule for layers of exactly these types, as a class decorator.

    A rule counts in the whole process.

    Args:
        layers: module classes, or qualified names ("package.module.Class") of classes that are not to be imported.
        replace: whether to replace the way in which privgrad itself computes such a layer.

    Example:
        @register_rule(MyLinear)
        class MyLinearRule(Rule): ...

    Raises:
        PrivacyError: a layer is given by a name that is not qualified; or privgrad computes the layer itself, and
            `replace` is not set.
    Privacy:
        A wrong rule breaks the guarantee. Microbatches 1, 2, 4, 8 ... of a run compare the gradients of up to four of
        their examples, to half a percent (in half precision to five), and no other row. docs/extending.md has the lines
        that compare all rows of a batch with `engine="vmap"`.
    """

    def register(rule: type[RuleType]) -> type[RuleType]:
        for layer in layers:
            if isinstance(layer, str) and "." not in layer:  # no layer would ever have this name
                raise expected("register_rule", "a layer", "to be a class or 'package.module.Class'", repr(layer))
            before = [key for key in _LAYERS if _name_of(key) == _name_of(layer)]
            if not replace and any(is_built_in(type(_LAYERS[key])) for key in before):
                remedy = "register it for a subclass of your own, or with replace=True for the whole process"
                raise expected("register_rule", "a layer", "without a rule of privgrad", _name_of(layer), remedy)
            for key in before:
                del _LAYERS[key]
            _LAYERS[layer] = rule()
        return rule

    return register


def _name_of(layer: type[nn.Module] | str) -> str:
    return layer if isinstance(layer, str) else f"{layer.__module__}.{layer.__qualname__}"


def code_of(forward: Any) -> str:
    """Return a key of all classes with the same forward, which models copy from each other; empty if it has none."""
    code = getattr(forward, "__code__", None)
    if code is None or forward.__closure__ or forward.__globals__.get("torch") is not torch:
        return ""
    return f"code.{code.co_argcount}{code.co_code.hex()}{code.co_names}{code.co_consts}"


@cache
def is_built_in(kind: type) -> bool:
    """Return whether a kind of rule is part of privgrad, as all forwards with taps are."""
    return not issubclass(kind, Rule) or kind.__module__.startswith("privgrad.")


def find_rule(layer: nn.Module) -> Rule | None:
    """Return the rule for this layer, or None."""
    # A subclass of a known type or a layer with a replaced forward has none, because it may compute anything.
    kind = parametrize.type_before_parametrizations(layer)
    rule = _LAYERS.get(kind) or _LAYERS.get(_name_of(kind)) or _LAYERS.get(code_of(getattr(kind, "forward", None)))
    if not isinstance(rule, Rule) or "forward" in vars(layer) or not rule.supports(layer):
        return None
    return rule if own_parameters(layer).keys() <= set(rule.parameters) else None


def register_forward(*layers: type[nn.Module] | str) -> Callable[[Forward], Forward]:
    """Register a forward (module, tap, *args, **kwargs) for layers of exactly these types, as a decorator.

    Without the keyword argument `displacements`, the layer is computed by vmap where parameters move.
    """

    def register(forward: Forward) -> Forward:
        _LAYERS.update(dict.fromkeys(layers, forward))
        return forward

    return register


def find_forward(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the forward with taps; None for subclasses, parametrized modules and replaced forwards."""
    kind = type(layer)
    forward = _LAYERS.get(kind) or _LAYERS.get(_name_of(kind))
    own = "forward" in vars(layer) or any(map(parametrize.is_parametrized, layer.modules()))
    return None if isinstance(forward, Rule) or own else forward


def takes_displacements(layer: nn.Module) -> bool:
    """Return whether the layer's forward with taps has an argument `displacements`."""
    return "displacements" in (getattr(find_forward(layer), "__kwdefaults__", None) or {})


def tapped(tap: Tap, tensor: Tensor, factors: Callable[[Tensor], dict[Tensor, Factor]]) -> Tensor:
    """Pass a tensor through the tap, with a gradient also if its inputs have none."""
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor.requires_grad_()
    return tap(tensor, factors)


def of_linear_maps(maps: Iterable[tuple[Tensor, Tensor | None, Tensor]], b_BTO: Tensor) -> dict[Tensor, Factor]:
    """Return the factors of trained weights and biases of maps (weight, bias, inputs) with output gradients b."""
    found: dict[Tensor, Factor] = {}
    b_BTO = at_least_float32(b_BTO)  # the same tensor for all, so that its norms are computed once
    sum_BO: Tensor | None = None
    for weight, bias, a_BTI in maps:
        if is_trained(weight):
            add_to(found, {weight: Outer(a_BTI, b_BTO)})
        if is_trained(bias):  # several biases may share the sum, since no factor writes to its tensors
            sum_BO = sum_over(b_BTO, 1) if sum_BO is None else sum_BO
            add_to(found, {bias: Dense(sum_BO)})
    return found


def add_to(found: dict[Tensor, Factor], more: Mapping[Tensor, Factor]) -> dict[Tensor, Factor]:
    """Add factors to those of the same parameters in `found`, and return `found`."""
    for parameter, factor in more.items():
        found[parameter] = found[parameter] + factor if parameter in found else factor
    return found


def is_trained(tensor: Tensor | None) -> TypeGuard[nn.Parameter]:
    """Return whether a tensor is a parameter with gradients."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def require_unwritten(unit: str, inputs: Tensor, version: int) -> None:
    """Raise UnsupportedModuleError if inputs have another version than in the forward pass."""
    if (writes := inputs._version - version) != 0:  # pyright: ignore[reportPrivateUsage]
        remedy = "work on a copy, as ordinary training requires too"
        raise refused(f"the input of '{unit}'", "not to be changed in place", f"{writes} in-place writes", remedy)


def values_of(parameter: Tensor, displacements: Displacements | None, rows: int) -> Tensor:
    """Return a parameter, shape P, or one for each row if it moves, shape (R, *P)."""
    if (displacement := displacement_of(parameter, displacements)) is None:
        return parameter.detach()
    moved = displacement.added_to(parameter.detach())
    return moved.repeat_interleave(rows // len(moved), 0)


def moved_linear(x_TRI: Tensor, weight: Tensor, bias: Tensor | None, displacements: Displacements | None) -> Tensor:
    """Return (W + D_i) x + bias for every position, shape (T, R, O); the bias consists of what `values_of` returns."""
    output = F.linear(x_TRI, weight.detach(), bias if bias is not None and bias.dim() == 1 else None)
    if bias is not None and bias.dim() == 2:
        output = output + bias
    if (displacement := displacement_of(weight, displacements)) is not None:
        output = output + applied(displacement, x_TRI.transpose(0, 1)).transpose(0, 1).to(output.dtype)
    return output


def applied(displacement: Displacement, x_RTI: Tensor) -> Tensor:
    """Return D_i x for every position of every row; an example may have several rows."""
    x_BTI = at_least_float32(x_RTI).reshape(len(displacement.share), -1, x_RTI.shape[2])
    return by_rows(displacement.apply(x_BTI), x_RTI.shape[:2])


def of_channels(displacement: Displacement, x: Tensor) -> Tensor:
    """Return a bias's displacement for each row of x, shaped to broadcast over positions: (rows, C, 1, ...)."""
    rows = displacement.for_rows(x)
    return rows.view(*rows.shape, *[1] * (x.dim() - 2))


def is_half(weight: Tensor) -> bool:
    """Return whether products with a weight have half precision; a sum with a displacement would lose much of it."""
    return weight.itemsize < 4 or torch.is_autocast_enabled(weight.device.type)


def in_positions(x: Tensor) -> Tensor:
    """Reshape (B, ..., width) to (B, T, width)."""
    if (dims := x.dim()) <= 3:
        return x if dims == 3 else x[:, None]
    size, *positions, width = x.shape
    return x.reshape(size, math.prod(positions), width) if size else x.reshape(0, 1, width)


def by_rows(values_BTD: Tensor, shape: torch.Size) -> Tensor:
    """Reshape (B, T, D) to (*shape, D), where shape has all rows of all examples."""
    return values_BTD.reshape(*shape, values_BTD.shape[-1])


def of_bags(displacement: Displacement, ids: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of the rows of a table's displacement, for bags (rows, T): shape (rows, D)."""
    shape = (len(displacement.share), -1, ids.shape[1])
    return by_rows(displacement.read_bags(ids.reshape(shape), weights.reshape(shape)), ids.shape[:1])
