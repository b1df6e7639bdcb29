"""Models, drawn at random from every layer rule and every way in which parameters are shared or computed.

Shapes are those of one example. Each part has a name: what was drawn is known by these, and tests ask for all.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as old_weight_norm
from transformers.pytorch_utils import Conv1D

from privgrad.engine.factors.weight_standardization import WeightStandardization
from privgrad.models import SparseLinear, ws_conv2d

Shape = tuple[int, ...]
Made = tuple[nn.Module, Shape]
WORDS = 7


@dataclass
class Draw:
    """The random choices of one case, and the names of the parts that were drawn.

    Attributes:
        rng: decides everything but the values of tensors, which come from torch's global stream.
        used: names of parts.
        small: keep to layers that a batch of thousands passes quickly.
    """

    rng: random.Random
    used: list[str] = field(default_factory=list)
    small: bool = False

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.rng.random() < probability

    def power(self, low: float, high: float) -> float:
        """Draw a number whose logarithm to base 10 is uniform."""
        return 10.0 ** self.rng.uniform(low, high)


class Wrapped(nn.Module):
    """A module that calls a function with its child and the input."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor], label: str) -> None:
        super().__init__()
        self.layer, self.call, self.label = layer, call, label

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)

    def extra_repr(self) -> str:
        return self.label


class Owner(nn.Module):
    """A module with a parameter beside its child: positions, a scale or a temperature."""

    def __init__(self, child: nn.Module, parameter: Tensor, way: str) -> None:
        super().__init__()
        self.child, self.own, self.way = child, nn.Parameter(parameter), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "positions":
            return self.child(x + self.own)
        if self.way == "layer scale":
            return x + self.child(x) * self.own
        if self.way == "temperature":
            return self.child(x) * self.own.exp()
        return self.child(x) * self.own

    def extra_repr(self) -> str:
        return self.way


class OwnerOfTable(nn.Module):
    """A module with a parameter and a table: home-made text classifiers."""

    def __init__(self, table: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.table, self.positions = table, nn.Parameter(0.3 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table(x) + self.positions)


class Tied(nn.Module):
    """A table whose transpose is the last layer's weight."""

    def __init__(self, width: int, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width, padding_idx=padding)
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


class Scaled(nn.Linear):
    """A linear map whose weight is computed in its forward pass."""

    factor = 1.0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return F.linear(input, self.weight * self.factor, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, factor={self.factor:.3g}"


class Times(nn.Module):
    """A parametrization that multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:.3g}"


class TwoInputs(nn.Module):
    """Two maps, one an input each, joined by a product or a sum."""

    def __init__(self, one: nn.Module, other: nn.Module, way: str) -> None:
        super().__init__()
        self.one, self.other, self.way = one, other, way

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        one, other = self.one(x), self.other(z)
        return one * other if self.way == "product" else one + other

    def extra_repr(self) -> str:
        return self.way


class ByFunction(nn.Module):
    """Parameters that functions use, and values that are computed from them once for all examples."""

    def __init__(self, way: str, width: int, places: int) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Parameter(0.3 * torch.randn(_OWN[way][0](width, places)))
        self.second = nn.Parameter(0.3 * torch.randn(_OWN[way][1](width, places)))
        self.layer = nn.Linear(width, width) if way in ("mapped table", "generated weight") else None

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first, self.second
        if self.way == "matmul":
            return torch.tanh(x @ first) @ second.T
        if self.way == "norm by function":
            return F.layer_norm(x, first.shape, first, second)
        if self.way == "token":
            return torch.cat([first.expand(len(x), -1, -1), x + second], 1)
        if self.way == "written token":
            out = x.new_zeros(len(x), x.shape[1] + 1, x.shape[2])
            out[:, 1:], out[:, 0] = x, first
            return out.add_(second)
        if self.way == "relative places":
            bias = first[(torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()].permute(2, 0, 1)
            return (x @ x.mT + bias).softmax(-1) @ x * second
        assert self.layer is not None
        if self.way == "mapped table":
            return x * self.layer(torch.tanh(self.layer(first))) + second
        return F.linear(x, torch.tanh(self.layer(first)), second)

    def extra_repr(self) -> str:
        return self.way


# The shapes of the two parameters, by width and places.
_OWN: dict[str, tuple[Callable[[int, int], Shape], Callable[[int, int], Shape]]] = {
    "matmul": (lambda width, _: (width, 3), lambda width, _: (width, 3)),
    "norm by function": (lambda width, _: (width,), lambda width, _: (width,)),
    "token": (lambda width, _: (1, 1, width), lambda width, places: (1, places, width)),
    "written token": (lambda width, _: (width,), lambda width, places: (places + 1, width)),
    "relative places": (lambda _, places: (places, 1), lambda width, _: (width,)),
    "mapped table": (lambda width, places: (places, width), lambda width, _: (width,)),
    "generated weight": (lambda width, _: (2, width), lambda *_: (2,)),
}


class Scale(nn.Module):
    """A single module with a scale and nothing else."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


Builder = Callable[[Draw, Shape], Made]


def linear(draw: Draw, shape: Shape) -> Made:
    """Make a Linear on the last dimension."""
    wide = draw.rng.randint(1, 4)
    return nn.Linear(shape[-1], wide, bias=draw.chance(0.7)), (*shape[:-1], wide)


def hugging_face(draw: Draw, shape: Shape) -> Made:
    """Make a Conv1D of transformers, a Linear whose weight is stored transposed."""
    wide = draw.rng.randint(1, 4)
    layer = Conv1D(wide, shape[-1])  # it takes views of its input
    return Wrapped(layer, lambda layer, x: layer(x.contiguous()), "contiguous"), (*shape[:-1], wide)


def time_first(draw: Draw, shape: Shape) -> Made:
    """Make a Linear whose outputs are taken time first, so that their gradients are not contiguous."""
    layer, out = linear(draw, shape)
    return Wrapped(layer, _time_first, "time first"), out


def _time_first(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x).transpose(0, 1)
    return out.reshape(len(out), -1).view_as(out).transpose(0, 1).contiguous()


def convolution(draw: Draw, shape: Shape) -> Made:
    """Make a convolution with a few of its options."""
    dims, channels, rng = len(shape) - 1, shape[0], draw.rng
    groups = channels if draw.chance(0.3) else 1
    out = groups * rng.randint(1, 2)
    mode = rng.choice(("zeros", "zeros", "zeros", "circular", "reflect", "replicate"))
    if mode != "zeros":
        kernel, padding, stride, dilation = min(3, min(shape[1:])), 1, 1, 1
        if min(shape[1:]) < 2:
            mode, padding = "zeros", 0
    else:
        kernel, padding = rng.randint(1, min(3, min(shape[1:]))), rng.choice((0, 1))
        stride, dilation = rng.choice((1, 1, 2)), 1
        if (kernel - 1) * 2 + 1 <= min(shape[1:]) + 2 * padding and draw.chance(0.3):
            dilation = 2
    draw.used.append(f"padding mode {mode}")
    draw.used += [name for name, there in (("groups", groups > 1), ("stride", stride > 1)) if there]
    draw.used += ["dilation"] if dilation > 1 else []
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw.chance(0.6),
        padding_mode=mode,
    )
    return layer, (out, *((n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in shape[1:]))


def transposed(draw: Draw, shape: Shape) -> Made:
    """Make a transposed convolution."""
    dims, channels, rng = len(shape) - 1, shape[0], draw.rng
    kernel, stride, out = rng.randint(1, 2), rng.choice((1, 1, 2)), rng.randint(1, 2)
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](channels, out, kernel, stride=stride)
    return layer, (out, *((n - 1) * stride + kernel for n in shape[1:]))


def standardized(draw: Draw, shape: Shape) -> Made:
    """Make a convolution with standardized weights, with or without a gain; wide, so that closed forms are taken."""
    gain, wide = draw.chance(0.5), draw.rng.choice((2, 8))
    draw.used.append("weight standardization with gain" if gain else "weight standardization without gain")
    layer = ws_conv2d(shape[0], wide, 3, padding=1, gain=gain, bias=draw.chance(0.5))
    return layer, (wide, *shape[1:])


def standardized_linear(draw: Draw, shape: Shape) -> Made:
    """Make a convolution of one dimension with standardized weights."""
    layer = nn.Conv1d(shape[0], 2, min(2, shape[1]))
    made = parametrize.register_parametrization(layer, "weight", WeightStandardization(None))
    return made, (2, shape[1] - min(2, shape[1]) + 1)


def layer_norm(draw: Draw, shape: Shape) -> Made:
    """Make a LayerNorm on the last dimension."""
    return nn.LayerNorm(shape[-1]), shape


def rms_norm(draw: Draw, shape: Shape) -> Made:
    """Make an RMSNorm on the last dimension."""
    return nn.RMSNorm(shape[-1], eps=1e-5), shape


def group_norm(draw: Draw, shape: Shape) -> Made:
    """Make a GroupNorm, with more than one value a group: torch refuses to norm a single one in a batch of one."""
    groups = 2 if shape[0] % 2 == 0 and torch.Size(shape).numel() > 2 and draw.chance(0.5) else 1
    return nn.GroupNorm(groups, shape[0]), shape


def instance_norm(draw: Draw, shape: Shape) -> Made:
    """Make an InstanceNorm with parameters."""
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 2]
    return kind(shape[0], affine=True), shape


def batch_norm(draw: Draw, shape: Shape) -> Made:
    """Make a BatchNorm in evaluation mode, with statistics that are constants."""
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 1]
    layer = kind(shape[0])
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer.eval(), shape


def recurrent(kind: Any) -> Builder:
    """Return a builder of recurrent layers."""

    def build(draw: Draw, shape: Shape) -> Made:
        wide, both = draw.rng.randint(1, 3), not draw.small and draw.chance(0.3)
        layers = 1 if draw.small else draw.rng.choice((1, 1, 2))
        layer = kind(shape[-1], wide, num_layers=layers, batch_first=True, bidirectional=both, bias=draw.chance(0.7))
        return Wrapped(layer, lambda own, x: own(x)[0], "outputs"), (shape[0], wide * (1 + both))

    return build


def cell(kind: Any) -> Builder:
    """Return a builder of loops of recurrent cells."""

    def build(draw: Draw, shape: Shape) -> Made:
        wide = draw.rng.randint(1, 3)
        return Wrapped(kind(shape[-1], wide, bias=draw.chance(0.7)), _loop, "loop"), (shape[0], wide)

    return build


def _loop(layer: nn.Module, x: Tensor) -> Tensor:
    states, state = list[Tensor](), None
    for step in x.unbind(1):
        state = layer(step, state)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states, 1)


def two_views(draw: Draw, shape: Shape) -> Made:
    """Make a Linear that computes two views of each example, all first views before all second ones."""
    layer, out = linear(draw, shape)
    return Wrapped(layer, _two_views, "two views"), out


def _two_views(layer: nn.Module, x: Tensor) -> Tensor:
    one, other = layer(torch.cat([x, x.flip(-1) - 0.5])).chunk(2)
    return one * other.tanh()


def slope(draw: Draw, shape: Shape) -> Made:
    """Make a Linear whose squares are differentiated by its input."""
    layer, _ = linear(draw, shape)
    return Wrapped(layer, _slope, "slope"), shape


def _slope(layer: nn.Module, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)[0]


def attention(draw: Draw, shape: Shape) -> Made:
    """Make attention from the places to themselves."""
    layer = nn.MultiheadAttention(shape[-1], 1, batch_first=True, add_bias_kv=draw.chance(0.3))
    return Wrapped(layer, lambda own, x: own(x, x, x)[0], "self-attention"), shape


def encoder(draw: Draw, shape: Shape) -> Made:
    """Make a whole layer of a transformer."""
    first = draw.chance(0.5)
    return nn.TransformerEncoderLayer(
        shape[-1], 1, 4, dropout=0.0, activation="gelu", batch_first=True, norm_first=first
    ), shape


def owner(way: str) -> Builder:
    """Return a builder of modules that own a parameter beside a child, and so are taken by vmap."""

    def build(draw: Draw, shape: Shape) -> Made:
        if way == "layer scale":
            return Owner(nn.Linear(shape[-1], shape[-1]), 0.3 * torch.randn(shape[-1]), way), shape
        child, out = linear(draw, shape)
        own = {"positions": shape, "temperature": (), "scale": out[-1:]}[way]
        return Owner(child, 0.3 * torch.randn(own), way), out

    return build


def scale(draw: Draw, shape: Shape) -> Made:
    """Make a module that is one scale."""
    return Scale(shape[-1:]), shape


def shared(draw: Draw, shape: Shape) -> Made:
    """Make a layer that is used twice."""
    if len(shape) == 3 and draw.chance(0.5):
        return Wrapped(nn.Conv2d(shape[0], shape[0], 3, padding=1), lambda f, x: f(torch.tanh(f(x))), "twice"), shape
    return Wrapped(nn.Linear(shape[-1], shape[-1]), lambda f, x: f(torch.tanh(f(x))), "twice"), shape


def weight_norm(draw: Draw, shape: Shape) -> Made:
    """Make a layer with torch's parametrization by length and direction; often with a short direction."""
    layer, out = convolution(draw, shape) if len(shape) > 2 else linear(draw, shape)
    layer = parametrizations.weight_norm(layer)
    if draw.chance(0.5):
        parametrization: Any = layer.get_submodule("parametrizations.weight")
        parametrization.original1.data *= draw.power(-6, 2)
    return layer, out


def weight_norm_old(draw: Draw, shape: Shape) -> Made:
    """Make a layer with torch's older weight_norm, a hook."""
    layer, out = linear(draw, shape)
    layer = old_weight_norm(layer)
    if draw.chance(0.5):
        layer.get_parameter("weight_v").data *= draw.power(-6, 2)
    return layer, out


def orthogonal(draw: Draw, shape: Shape) -> Made:
    """Make a Linear whose weight is kept orthogonal."""
    return parametrizations.orthogonal(nn.Linear(shape[-1], shape[-1])), shape


def computed(draw: Draw, shape: Shape) -> Made:
    """Make a Linear whose forward pass computes its weight."""
    wide = draw.rng.randint(1, 3)
    layer = Scaled(shape[-1], wide)
    layer.factor = draw.power(-4, 6)
    layer.weight.data /= layer.factor
    return layer, (*shape[:-1], wide)


def constant(draw: Draw, shape: Shape) -> Made:
    """Make a Linear with a parametrization that multiplies."""
    layer, out = linear(draw, shape)
    return parametrize.register_parametrization(layer, "weight", Times(draw.power(-4, 6))), out


def frozen(draw: Draw, shape: Shape) -> Made:
    """Make a Linear with a frozen parameter."""
    layer, out = linear(draw, shape)
    if "bias" not in dict(layer.named_parameters()) or draw.chance(0.3):
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    else:
        layer.get_parameter(draw.rng.choice(("weight", "bias"))).requires_grad_(False)
    return layer, out


def by_function(way: str) -> Builder:
    """Return a builder of modules whose parameters are used by functions."""

    def build(draw: Draw, shape: Shape) -> Made:
        *outer, width = shape
        places = outer[-1] if outer else 1
        if "token" in way:
            outer[-1] += 1
        return ByFunction(way, width, places), (*outer, 2 if way == "generated weight" else width)

    return build


# By name: the ranks of the shapes that a part takes, and its builder.
PARTS: dict[str, tuple[tuple[int, ...], Builder]] = {
    "Linear": ((1, 2, 3), linear),
    "Linear time first": ((2,), time_first),
    "Conv1D of transformers": ((1, 2), hugging_face),
    "Conv1d": ((2,), convolution),
    "Conv2d": ((3,), convolution),
    "Conv3d": ((4,), convolution),
    "ConvTranspose1d": ((2,), transposed),
    "ConvTranspose2d": ((3,), transposed),
    "ConvTranspose3d": ((4,), transposed),
    "WeightStandardization": ((3,), standardized),
    "WeightStandardization 1d": ((2,), standardized_linear),
    "LayerNorm": ((1, 2, 3), layer_norm),
    "RMSNorm": ((1, 2, 3), rms_norm),
    "GroupNorm": ((1, 2, 3, 4), group_norm),
    "InstanceNorm1d": ((2,), instance_norm),
    "InstanceNorm2d": ((3,), instance_norm),
    "InstanceNorm3d": ((4,), instance_norm),
    "BatchNorm1d": ((1, 2), batch_norm),
    "BatchNorm2d": ((3,), batch_norm),
    "BatchNorm3d": ((4,), batch_norm),
    "RNN": ((2,), recurrent(nn.RNN)),
    "LSTM": ((2,), recurrent(nn.LSTM)),
    "GRU": ((2,), recurrent(nn.GRU)),
    "RNNCell": ((2,), cell(nn.RNNCell)),
    "LSTMCell": ((2,), cell(nn.LSTMCell)),
    "GRUCell": ((2,), cell(nn.GRUCell)),
    "two views": ((1, 2), two_views),
    "slope": ((1, 2), slope),
    "MultiheadAttention": ((2,), attention),
    "TransformerEncoderLayer": ((2,), encoder),
    "owner of positions": ((1, 2), owner("positions")),
    "owner of a scale": ((1, 2, 3), owner("scale")),
    "owner of a layer scale": ((1, 2), owner("layer scale")),
    "owner of a temperature": ((1, 2), owner("temperature")),
    "scale": ((1, 2, 3), scale),
    "shared": ((1, 2, 3), shared),
    "weight_norm": ((1, 2, 3), weight_norm),
    "old weight_norm": ((1, 2), weight_norm_old),
    "orthogonal": ((1, 2), orthogonal),
    "computed weight": ((1, 2), computed),
    "constant parametrization": ((1, 2), constant),
    "frozen": ((1, 2), frozen),
    "matmul": ((1, 2, 3), by_function("matmul")),
    "norm by function": ((1, 2), by_function("norm by function")),
    "generated weight": ((1, 2), by_function("generated weight")),
    **{way: ((2,), by_function(way)) for way in ("token", "written token", "relative places", "mapped table")},
}
# What takes something other than one tensor of floats stands first in a model.
ROOTS = (
    "Embedding",
    "Embedding with padding",
    "EmbeddingBag sum",
    "EmbeddingBag mean",
    "EmbeddingBag with padding",
    "SparseLinear",
    "tied weights",
    "owner of a table",
    "owner of a table with padding",
    "two inputs",
)
DETAILS = (
    "padding mode zeros",
    "padding mode circular",
    "padding mode reflect",
    "padding mode replicate",
    "groups",
    "stride",
    "dilation",
    "weight standardization with gain",
    "weight standardization without gain",
)
SMALL = ("Linear", "Linear time first", "LayerNorm", "RNN", "GRU", "LSTM", "weight_norm", "Conv1d", "scale")
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid)


@dataclass
class Drawn:
    """A model, and what it takes.

    Attributes:
        model: in training mode, but for BatchNorm.
        inputs: one (kind, shape) an input: "floats", "ids" or "sparse".
        output: shape of one example's output.
    """

    model: nn.Module
    inputs: list[tuple[str, Shape]]
    output: Shape


def root(draw: Draw, name: str) -> tuple[nn.Module, list[tuple[str, Shape]], Shape]:
    """Make the first part of a model, what it takes, and the shape of what it gives."""
    rng = draw.rng
    places, width = rng.randint(2, 5), rng.randint(1, 4)
    padding = 0 if "padding" in name else None
    if name in ("Embedding", "Embedding with padding"):
        return nn.Embedding(WORDS, width, padding_idx=padding), [("ids", (places,))], (places, width)
    if name.startswith("EmbeddingBag"):
        mode = "mean" if "mean" in name or draw.chance(0.5) else "sum"
        mode = "sum" if "sum" in name else mode
        bag = nn.EmbeddingBag(WORDS, width, mode=mode, padding_idx=padding)
        return bag, [("ids", (places,))], (width,)
    if name == "SparseLinear":
        return SparseLinear(WORDS, width), [("sparse", (2, places))], (width,)
    if name == "tied weights":
        return Tied(width, rng.choice((None, 0))), [("ids", (places,))], (places, WORDS)
    if name.startswith("owner of a table"):
        table = nn.Embedding(WORDS, width, padding_idx=padding)
        return OwnerOfTable(table, (places, width)), [("ids", (places,))], (places, width)
    one, other = (width,), (rng.randint(1, 4),)
    wide = rng.randint(1, 3)
    model = TwoInputs(nn.Linear(one[0], wide), nn.Linear(other[0], wide), rng.choice(("product", "sum")))
    return model, [("floats", one), ("floats", other)], (wide,)


class Model(nn.Module):
    """A sequence whose first part may take several inputs."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(str(index), part)

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *rest = self.children()
        x = first(*inputs)
        for part in rest:
            x = part(x)
        return x


def draw_model(draw: Draw, first: str | None = None, *, alone: bool = False) -> Drawn:
    """Draw a model of one to four parts, with smooth activations between them.

    Args:
        draw: the choices.
        first: name of the first part; None leaves it to chance.
        alone: stop after the first part.
    """
    rng, parts = draw.rng, list[nn.Module]()
    names = list(SMALL if draw.small else PARTS)
    if first is None:
        first = rng.choice(ROOTS) if not draw.small and draw.chance(0.25) else rng.choice(names)
    if first in ROOTS:
        draw.used.append(first)
        part, inputs, shape = root(draw, first)
        parts.append(part)
    else:
        sizes = (2, 3) if draw.small else (2, 4)
        shape = tuple(rng.randint(*sizes) for _ in range(rng.choice(PARTS[first][0])))
        if draw.small or draw.chance(0.1):
            shape = (*shape[:-1], rng.randint(1, 3))
        inputs, part = [("floats", shape)], None
    wanted = rng.choice((1, 1, 2)) if draw.small else rng.choice((0, 1, 1, 2, 3))
    wanted = min(wanted, first not in ROOTS) if alone else wanted
    chosen = [] if first in ROOTS else [first]
    while len(chosen) < max(1 if first not in ROOTS else 0, wanted):
        chosen.append(rng.choice(names))
    for name in chosen:
        ranks, build = PARTS[name]
        if len(shape) not in ranks or (min(shape) < 2 and "InstanceNorm" in name):
            continue
        if name in ("InstanceNorm1d", "LayerNorm", "RMSNorm", "GroupNorm") and shape[-1] < 2:
            continue
        if parts and draw.chance(0.6):
            parts.append(rng.choice(ACTIVATIONS)())
        draw.used.append(name)
        part, shape = build(draw, shape)
        parts.append(part)
    if not any(p.requires_grad for part in parts for p in part.parameters()):
        draw.used.append("Linear")
        part, shape = linear(draw, shape)
        parts.append(part)
    model = Model(*parts)
    if draw.chance(0.6 if alone else 0.25):
        _resize(draw, model)
    return Drawn(model, inputs, shape)


def _resize(draw: Draw, model: nn.Module) -> None:
    """Make one or all parameters tiny, huge or zero."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    chosen = parameters if draw.chance(0.7 if draw.small else 0.4) else [draw.rng.choice(parameters)]
    factor = draw.rng.choice((0.0, draw.power(-9, -1), draw.power(-4, 0), draw.power(0, 4)))
    with torch.no_grad():
        for parameter in chosen:
            parameter.mul_(factor)
