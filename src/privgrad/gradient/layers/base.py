"""The rule of a layer: its forward pass, and the per-example gradient of each parameter.

Shape suffixes: B examples, T positions of an example, I inputs, O outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.errors import expected
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacement


class Rule(ABC):
    """How one layer type computes, and what its parameters' gradients are made of.

    Parameters are given as tensors, for the layer's own may be computed from others (a parametrization).

    Attributes:
        parameters: names of the layer's parameters that the rule knows.
        has_delta: whether `delta` is there; if not, moved parameters are written out for every example.
        is_bilinear: whether the gradient of "weight" is bilinear in input and output gradient, and those of all others
            depend on the output gradient alone; for the rule and the input that `bilinear` returns.
    """

    parameters: tuple[str, ...] = ("weight", "bias")
    has_delta = False
    is_bilinear = False

    @abstractmethod
    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What layer(x) returns, with these parameters. Examples are in dimension 0 of both."""

    @abstractmethod
    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        """The gradients of the named parameter.

        Args:
            layer: the module.
            name: of the parameter.
            parameters: all of the layer's, by name.
            x: input, shape (B, ...).
            grad: gradient of each example's loss with respect to the output, shape (B, ...).
        """

    def delta(self, layer: Any, moves: Mapping[str, Displacement], x: Tensor) -> Tensor:
        """What moving the parameters adds to the output of a layer that is affine in them.

        Args:
            layer: the module.
            moves: by name; of parameters that do not move there is none.
            x: input, shape (B parts, ...): an example may have several rows.
        Returns:
            A tensor that broadcasts to the output.
        """
        raise NotImplementedError

    def moved(
        self, layer: Any, parameters: Mapping[str, Tensor], moves: Mapping[str, Displacement], x: Tensor
    ) -> Tensor:
        """What the layer returns at moved parameters; arguments as in forward and delta."""
        output = self.forward(layer, parameters, x)
        return output + self.delta(layer, moves, x).to(output.dtype)

    def bilinear(self, layer: Any, x: Tensor) -> "tuple[Rule, Tensor]":
        """What is left to do for a rule that is bilinear, and its input, of which torch can take second derivatives."""
        return self, x

    def supports(self, layer: Any) -> bool:
        """Whether the rule holds for this layer's options; if not, the layer is taken by vmap."""
        return True


_RULES: dict[type[nn.Module] | str, Rule] = {}


RuleType = TypeVar("RuleType", bound=Rule)


def register_rule(*layers: type[nn.Module] | str) -> Callable[[type[RuleType]], type[RuleType]]:
    """Class decorator: a Rule for layers of exactly these types (or, unimported, of these qualified names).

    Example:
        @register_rule(MyLinear)
        class MyLinearRule(Rule): ...

    Raises:
        PrivacyError: what is decorated is not a Rule, or a layer is neither a module class nor a qualified name.
    Privacy:
        A wrong rule breaks the guarantee. The first batch checks it on up to four examples, to half a percent (in
        half precision to five): test it yourself against `engine="vmap"`.
    """

    def register(rule: type[RuleType]) -> type[RuleType]:
        if not (isinstance(rule, type) and issubclass(rule, Rule)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise expected(
                "register_rule", "what is decorated", "to be a subclass of Rule", rule, "derive it from Rule"
            )
        for layer in layers:
            named = isinstance(layer, str) and "." in layer
            known = isinstance(layer, type) and issubclass(layer, nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not named and not known:
                remedy = "give the module class, or its name as 'package.module.Class'"
                raise expected("register_rule", "layers", "to be module classes or qualified names", layer, remedy)
            _RULES[layer] = rule()
        return rule

    return register


def find_rule(layer: nn.Module) -> Rule | None:
    """The rule for this layer, or None: subclasses and replaced forwards may compute anything."""
    kind = parametrize.type_before_parametrizations(layer)
    rule = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is None or "forward" in vars(layer) or not rule.supports(layer):
        return None
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    return rule if own <= set(rule.parameters) else None


def of_channels(move: Displacement, x: Tensor) -> Tensor:
    """A moved bias, to be broadcast over positions: (rows of x, C, 1, ...)."""
    rows = move.for_rows(x)
    return rows.view(*rows.shape, *[1] * (x.dim() - 2))


def in_positions(x: Tensor) -> Tensor:
    """(B, ..., width) -> (B, T, width)."""
    if x.dim() == 2:
        return x[:, None]
    return x.reshape(len(x), x[:1, ..., 0].numel(), x.shape[-1]) if len(x) else x.reshape(0, 1, x.shape[-1])


def by_rows(values_BTD: Tensor, shape: torch.Size) -> Tensor:
    """(B, T, D) -> (*shape, D), where shape has all rows of all examples."""
    return values_BTD.reshape(*shape, values_BTD.shape[-1])


def of_bags(move: Displacement, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a moved table's rows, (rows, T) -> (rows, D)."""
    shape = (len(move.share), -1, ids.shape[1])
    return by_rows(move.read_bags(ids.reshape(shape), weights.reshape(shape)), ids.shape[:1])
