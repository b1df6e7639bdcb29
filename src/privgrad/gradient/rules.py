"""One small rule a layer type: its forward pass, and the per-example gradient of each parameter.

Shape suffixes: B examples, T places of an example, I inputs, O outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.errors import expected
from privgrad.gradient.bags import Bags
from privgrad.gradient.convolution import Convolution, Geometry, convolve
from privgrad.gradient.factors import Dense, Factor, Outer
from privgrad.gradient.moves import Move
from privgrad.gradient.norms import cached, sum_over, wide
from privgrad.gradient.standardize import standardized
from privgrad.gradient.tables import Rows


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

    def delta(self, layer: Any, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        """What moving the parameters adds to the output of a layer that is affine in them.

        Args:
            layer: the module.
            moves: by name; of parameters that do not move there is none.
            x: input, shape (B parts, ...): an example may have several rows.
        Returns:
            A tensor that broadcasts to the output.
        """
        raise NotImplementedError

    def moved(self, layer: Any, parameters: Mapping[str, Tensor], moves: Mapping[str, Move], x: Tensor) -> Tensor:
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


@register_rule(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
class Linear(Rule):
    has_delta = is_bilinear = True

    def forward(self, layer: nn.Linear, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, parameters["weight"], parameters.get("bias"))

    def factor(self, layer: nn.Linear, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(grad if grad.dim() == 2 else sum_over(wide(_places(grad)), 1))
        return Outer(_places(x), _places(grad))

    def delta(self, layer: Any, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        size = len(next(iter(moves.values())).share)
        moved = 0.0
        if "weight" in moves:
            moved = self.oriented(moves["weight"]).apply(wide(x).reshape(size, -1, x.shape[-1]))
        if "bias" in moves:
            moved = moved + moves["bias"].dense()[:, None].expand(-1, x.shape[:-1].numel() // size, -1)
        return _by_rows(cast(Tensor, moved), x.shape[:-1])

    def oriented(self, move: Move) -> Move:
        """Of a weight of shape (O, I)."""
        return move


@register_rule("transformers.pytorch_utils.Conv1D")
class _TransposedLinear(Linear):
    """Hugging Face's Conv1D: a Linear whose weight has shape (I, O)."""

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, parameters["weight"].T, parameters["bias"])

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        return super().factor(layer, name, parameters, x, grad) if name == "bias" else Outer(_places(grad), _places(x))

    def oriented(self, move: Move) -> Move:
        return move.transposed()


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class _Convolution(Rule):
    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return layer._conv_forward(x, parameters["weight"], parameters.get("bias"))

    def supports(self, layer: Any) -> bool:
        return hasattr(layer, "_reversed_padding_repeated_twice")

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(wide(grad).flatten(2), 2))
        x, geometry = self._padded(layer, x)
        return Convolution(x, grad, geometry)

    def delta(self, layer: Any, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        moved = moves["weight"].convolve(*self._padded(layer, wide(x))) if "weight" in moves else 0.0
        if "bias" in moves:
            moved = moved + _of_channels(moves["bias"], x)
        return cast(Tensor, moved)

    def moved(self, layer: Any, parameters: Mapping[str, Tensor], moves: Mapping[str, Move], x: Tensor) -> Tensor:
        padded, geometry = self._padded(layer, x)
        if "weight" not in moves or geometry.by_patches(geometry.places(padded.shape[2:])):
            return super().moved(layer, parameters, moves, x)
        # Where patches are too many, one convolution with the moved weights beats two.
        output = convolve(Dense(moves["weight"].added_to(parameters["weight"])), padded, geometry)
        if "bias" in parameters:
            output = output + parameters["bias"].view(-1, *[1] * (x.dim() - 2))
        return output + _of_channels(moves["bias"], x).to(output.dtype) if "bias" in moves else output

    def _padded(self, layer: Any, x: Tensor) -> tuple[Tensor, Geometry]:
        """The input with the padding that a geometry cannot say, and the geometry."""
        padding = layer.padding
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), (0,) * (x.dim() - 2)
        elif isinstance(padding, str):  # "same" may pad one side more
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice), (0,) * (x.dim() - 2)
        return x, _geometry(layer, padding)


class FunctionalConvolution(_Convolution):
    """A call of F.conv1d, 2d or 3d; the layer is its options."""

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class _TransposedConvolution(Rule):
    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        convolve = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(layer.kernel_size)]
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return convolve(x, parameters["weight"], parameters.get("bias"), *options)

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(sum_over(wide(grad).flatten(2), 2))
        # The weight's gradient is that of the convolution that goes back: from the outputs to the inputs.
        return Convolution(grad, x, _geometry(layer, layer.padding))


@register_rule(nn.Embedding)
class _Embedding(Rule):
    parameters = ("weight",)
    has_delta = is_bilinear = True

    def delta(self, layer: nn.Embedding, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        return _by_rows(moves["weight"].read(x.reshape(len(moves["weight"].share), -1)), x.shape)

    def supports(self, layer: nn.Embedding) -> bool:
        return layer.max_norm is None and not layer.scale_grad_by_freq

    def forward(self, layer: nn.Embedding, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.embedding(x, parameters["weight"], layer.padding_idx)

    def factor(
        self, layer: nn.Embedding, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor
    ) -> Factor:
        ids_BT, grad_BTD = x.reshape(len(x), -1), grad.reshape(len(grad), -1, layer.embedding_dim)
        return Rows(ids_BT, _without_padding(layer, ids_BT, grad_BTD), layer.num_embeddings)


@register_rule(nn.EmbeddingBag)
class _EmbeddingBag(Rule):
    """Bags of fixed length: input (B, T), output (B, D)."""

    parameters = ("weight",)
    has_delta = is_bilinear = True

    def supports(self, layer: nn.EmbeddingBag) -> bool:
        return layer.max_norm is None and not layer.scale_grad_by_freq and layer.mode in ("sum", "mean")

    def forward(self, layer: nn.EmbeddingBag, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.embedding_bag(x, parameters["weight"], mode=layer.mode, padding_idx=layer.padding_idx)

    def factor(
        self, layer: nn.EmbeddingBag, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor
    ) -> Factor:
        return Bags(x, self._weights(layer, x, wide(grad).dtype), grad, layer.num_embeddings)

    def delta(self, layer: nn.EmbeddingBag, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        return _of_bags(moves["weight"], x, self._weights(layer, x, moves["weight"].share.dtype))

    def _weights(self, layer: nn.EmbeddingBag, x: Tensor, dtype: torch.dtype) -> Tensor:
        weight_BT = torch.ones_like(x, dtype=dtype)
        if layer.padding_idx is not None:
            weight_BT = (x != layer.padding_idx).to(dtype)
        return weight_BT / weight_BT.sum(1, keepdim=True).clamp(min=1) if layer.mode == "mean" else weight_BT


@register_rule("privgrad.models.SparseLinear")
class _SparseLinear(Rule):
    """Packed rows (B, 2, L), output (B, O)."""

    has_delta = is_bilinear = True

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        weight, values = parameters["weight"], x[:, 1].to(parameters["weight"].dtype)
        return F.embedding_bag(x[:, 0].long(), weight, mode="sum", per_sample_weights=values) + parameters["bias"]

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        return Dense(grad) if name == "bias" else Bags(x[:, 0].long(), x[:, 1], grad, len(parameters["weight"]))

    def delta(self, layer: Any, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        moved = _of_bags(moves["weight"], x[:, 0].long(), x[:, 1]) if "weight" in moves else 0.0
        if "bias" in moves:
            moved = moved + moves["bias"].for_rows(x)
        return cast(Tensor, moved)


class _Normalization(Rule):
    """out = weight * normalized(x) + bias, elementwise."""

    has_delta = is_bilinear = True

    def bilinear(self, layer: Any, x: Tensor) -> tuple[Rule, Tensor]:
        return _ScaleAndShift(self), self.twice_differentiable(layer, x)

    def delta(self, layer: Any, moves: Mapping[str, Move], x: Tensor) -> Tensor:
        def at_places(name: str) -> Tensor:
            return self.at_places(layer, moves[name].for_rows(x), x)

        moved = self.normalized(layer, wide(x)) * at_places("weight") if "weight" in moves else 0.0
        return cast(Tensor, moved + at_places("bias") if "bias" in moves else moved)

    def moved(self, layer: Any, parameters: Mapping[str, Tensor], moves: Mapping[str, Move], x: Tensor) -> Tensor:
        """With one normalization, where forward and delta would have two."""
        output = self.normalized(layer, x)
        for name, combine in (("weight", torch.mul), ("bias", torch.add)):
            if name in parameters:
                own = parameters[name][None]
                rows = own + moves[name].for_rows(x).to(own.dtype) if name in moves else own
                output = combine(output, self.at_places(layer, rows, x).to(output.dtype))
        return output

    def at_places(self, layer: Any, values: Tensor, x: Tensor) -> Tensor:
        """Values of channels, shape (rows, C), to be broadcast over places."""
        return values.view(*values.shape, *[1] * (x.dim() - 2))

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        return self.forward(layer, {}, x)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        """As normalized."""
        return self.normalized(layer, x)

    def factor(self, layer: Any, name: str, parameters: Mapping[str, Tensor], x: Tensor, grad: Tensor) -> Factor:
        if name == "bias":
            return Dense(self.over_places(layer, wide(grad)))
        few = cached(int(x[:1].numel()))
        parts: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(x), few):
                scaled = self.normalized(layer, wide(x[start : start + few])) * grad[start : start + few]
                parts.append(self.over_places(layer, scaled))
        return Dense(torch.cat(parts))

    def over_places(self, layer: Any, grad: Tensor) -> Tensor:
        """Sum over everything but examples and channels: shape (B, C)."""
        return sum_over(grad.flatten(2), 2) if grad.dim() > 2 else grad


class _ScaleAndShift(_Normalization):
    """out = weight * x + bias: what is left of a normalization.

    Args:
        whole: knows which places the parameters are for.
    """

    def __init__(self, whole: _Normalization) -> None:
        self.at_places, self.over_places = whole.at_places, whole.over_places

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.moved(layer, parameters, {}, x)

    def normalized(self, layer: Any, x: Tensor) -> Tensor:
        return x


@register_rule(nn.LayerNorm)
class _LayerNorm(_Normalization):
    def forward(self, layer: nn.LayerNorm, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        shape = list(layer.normalized_shape)
        return F.layer_norm(x, shape, parameters.get("weight"), parameters.get("bias"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return standardized(x.reshape(-1, *layer.normalized_shape), layer.eps).view_as(x)

    def over_places(self, layer: Any, grad: Tensor) -> Tensor:
        shape = tuple(layer.normalized_shape)
        return sum_over(grad.reshape(len(grad), -1, *shape), 1)

    def at_places(self, layer: Any, values: Tensor, x: Tensor) -> Tensor:
        places = [1] * (x.dim() - values.dim())
        return values.view(len(values), *places, *values.shape[1:])


@register_rule(nn.RMSNorm)
class _RMSNorm(_LayerNorm):
    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.rms_norm(x, list(layer.normalized_shape), parameters.get("weight"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return self.normalized(layer, x)


@register_rule(nn.GroupNorm)
class _GroupNorm(_Normalization):
    def forward(self, layer: nn.GroupNorm, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.group_norm(x, layer.num_groups, parameters.get("weight"), parameters.get("bias"), layer.eps)

    def twice_differentiable(self, layer: Any, x: Tensor) -> Tensor:
        return standardized(x.reshape(len(x) * layer.num_groups, -1), layer.eps).view_as(x)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class _InstanceNorm(_Normalization):
    def supports(self, layer: Any) -> bool:
        return not layer.track_running_stats

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=parameters.get("weight"), bias=parameters.get("bias"), eps=layer.eps)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class _FrozenBatchNorm(_Normalization):
    """In evaluation mode only: the statistics are constants."""

    def supports(self, layer: Any) -> bool:
        return not layer.training and layer.running_mean is not None

    def forward(self, layer: Any, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        mean, var = layer.running_mean, layer.running_var
        return F.batch_norm(x, mean, var, parameters.get("weight"), parameters.get("bias"), False, 0.0, layer.eps)


def _geometry(layer: Any, padding: tuple[int, ...]) -> Geometry:
    return Geometry(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)


def _of_channels(move: Move, x: Tensor) -> Tensor:
    """A moved bias, to be broadcast over places: (rows of x, C, 1, ...)."""
    rows = move.for_rows(x)
    return rows.view(*rows.shape, *[1] * (x.dim() - 2))


def _places(x: Tensor) -> Tensor:
    """(B, ..., width) -> (B, T, width)."""
    if x.dim() == 2:
        return x[:, None]
    return x.reshape(len(x), x[:1, ..., 0].numel(), x.shape[-1]) if len(x) else x.reshape(0, 1, x.shape[-1])


def _by_rows(values_BTD: Tensor, shape: torch.Size) -> Tensor:
    """(B, T, D) -> (*shape, D), where shape has all rows of all examples."""
    return values_BTD.reshape(*shape, values_BTD.shape[-1])


def _of_bags(move: Move, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a moved table's rows, (rows, T) -> (rows, D)."""
    shape = (len(move.share), -1, ids.shape[1])
    return _by_rows(move.read_bags(ids.reshape(shape), weights.reshape(shape)), ids.shape[:1])


def _without_padding(layer: nn.Embedding | nn.EmbeddingBag, ids_BT: Tensor, grad_BTD: Tensor) -> Tensor:
    if layer.padding_idx is None:
        return grad_BTD
    return grad_BTD * (ids_BT != layer.padding_idx)[:, :, None]
