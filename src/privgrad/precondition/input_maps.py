"""Precondition the inputs' side: multiply each layer's inputs by a matrix from public data before clipping.

The matrices depend on public data and released weights only, and clipping follows, so it bounds what is added.

Shape suffixes: N rows, I inputs of a layer with the constant 1 for a bias.
"""

import copy
import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.engine.factored import Factored
from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.mapped import InputMap
from privgrad.engine.factors.outer import Outer, RowRanges
from privgrad.errors import expected, require_in, require_integer, require_positive
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import evaluating, trainable
from privgrad.gradient.transform import Preconditioner, Transform
from privgrad.precondition.public_gradient import require_public
from privgrad.types import count_examples, map_examples

_WIDE = 4096  # most inputs of a layer for which the whole second moment is used
_ROWS = 2**13  # most rows of a layer's inputs for one moment: positions of sequences, patches of images
_ROUNDING = 3e-5  # bounds the errors of float32 eigenvalues: 100 times them, in mean eigenvalues per input
Forward = Callable[[nn.Module, Any], Tensor]

# In these layers, the gradient of a bias is the sum of the gradients of the outputs that its weight also gets.
_WITH_BIAS = (
    nn.Linear,
    nn.modules.conv._ConvNd,  # pyright: ignore[reportPrivateUsage]
    nn.MultiheadAttention,
    nn.RNNBase,
)


@dataclass(eq=False, repr=False)
class Inputs(Preconditioner):
    """A preconditioner that multiplies the inputs of layers by matrices from public data: see `inputs`."""

    examples: Any
    source: str
    forward: Forward | None
    power: float
    ridge: float
    every: int
    batch_size: int
    wide: int
    seed: int
    # By parameter, how it is preconditioned: "inputs", "inputs, diagonal", "with" and the name of its weight, or
    # "unchanged". Empty before the first step.
    layers: dict[str, str] = field(default_factory=dict[str, str])
    _bound: Any = None  # the model and its engine, from `begun` on
    _step: int = -1
    _made: Transform = field(default_factory=Transform)

    def __post_init__(self) -> None:
        self._digest = _digest(self.examples)

    def __repr__(self) -> str:
        """Return the options and a hash of the public examples; a resumed run and all processes must have the same."""
        options = f"power={self.power:g}, ridge={self.ridge:g}, every={self.every}, batch_size={self.batch_size}"
        return f"inputs({self._digest}; {self.source}; {options}, wide={self.wide}, seed={self.seed})"

    def begun(self, model: nn.Module) -> "Inputs":
        """Return a copy without matrices, for this model."""
        twin = copy.copy(self)
        twin.layers, twin._step, twin._made = {}, -1, Transform()
        forward = self.forward

        def losses(module: nn.Module, examples: Any) -> Tensor:
            """Return the sum of each example's outputs; the engine needs losses, and here only the inputs matter."""
            size = count_examples(examples)
            outputs: Any = module(examples) if forward is None else forward(module, examples)
            if getattr(outputs, "shape", ())[:1] != (size,):
                got = getattr(outputs, "shape", type(outputs).__name__)
                remedy = "give forward = (model, examples) -> a tensor, for instance model(examples).logits"
                raise expected("precondition.inputs", "the outputs", f"to have leading dimension {size}", got, remedy)
            return outputs.reshape(size, -1).float().sum(1)

        twin._bound = model, Factored(model, losses)
        return twin

    def transform(self, step: int, *, parameters: Mapping[str, Tensor], **_: Any) -> Transform:
        """Return the matrices of one step; compute new ones first if the step begins an interval."""
        if self._step < step:
            if step // self.every > self._step // self.every:  # -1 // every is -1: the first step always computes
                self._made = Transform(input_maps=self._maps(step // self.every, parameters))
            self._step = step
        # Leave out the layers that have been frozen since: their parameters are trained no longer.
        frozen = {name for name, own in self._made.input_maps.items() if not {name, own.bias or name} <= {*parameters}}
        if frozen:
            kept = {name: own for name, own in self._made.input_maps.items() if name not in frozen}
            self._made = Transform(input_maps=kept)
        return self._made

    def state_dict(self) -> dict[str, Any]:
        maps = {name: vars(own) | {"matrix": own.matrix.clone()} for name, own in self._made.input_maps.items()}
        return {"step": self._step, "maps": maps, "layers": dict(self.layers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self.layers = int(state["step"]), dict(state["layers"])
        maps = {n: InputMap(own["matrix"].clone(), own["bias"], own["transposed"]) for n, own in state["maps"].items()}
        self._made = Transform(input_maps=_with_shared_matrices(maps))

    @torch.no_grad()
    def _maps(self, interval: int, parameters: Mapping[str, Tensor]) -> dict[str, InputMap]:
        """Return the matrices at the current weights, by weight; raise PrivacyError if no layer has inputs."""
        maps: dict[str, InputMap] = {}
        for name, (moment, bias) in self._moments(interval, parameters).items():
            dtype = torch.promote_types(parameters[name].dtype, torch.float32)
            matrix = _inverse_power(name, moment.total / moment.rows, self.power, self.ridge, dtype)
            maps[name] = InputMap(matrix.to(parameters[name].device), bias, moment.transposed)
        if not maps:
            condition = "to have a layer with inputs: a linear, convolutional, attention or recurrent one"
            raise expected("precondition.inputs", "the model", condition, f"{len(parameters)} parameters without")
        self.layers = dict.fromkeys(parameters, "unchanged")
        for name, own in maps.items():
            self.layers[name] = "inputs" if own.matrix.dim() == 2 else "inputs, diagonal"
            if own.bias is not None:
                self.layers[own.bias] = f"with {name}"
        return _with_shared_matrices(maps)

    def _moments(self, interval: int, parameters: Mapping[str, Tensor]) -> dict[str, tuple["_Moment", str | None]]:
        """Return the second moments of all layers' inputs on the public batch of an interval, with their biases."""
        model, engine = self._bound
        count = count_examples(self.examples)
        chosen = torch.arange(count)
        if self.batch_size < count:
            generator = torch.Generator().manual_seed(self.seed + interval)
            chosen = torch.randperm(count, generator=generator)[: self.batch_size]
        device = next(iter(trainable(model).values())).device
        found = dict[str, tuple[_Moment, str | None]]()

        def batch(part: Tensor) -> Any:
            return map_examples(lambda tensor: tensor[part].to(device), self.examples)

        with evaluating(model), torch.enable_grad():  # the loss may differentiate by its inputs
            biases = _biases(model)
            # In parts, as a private batch is, so that it takes no more memory.
            size = engine.microbatch_size(batch(chosen[:16]), len(chosen))
            for part in cast("tuple[Tensor, ...]", chosen.split(size)):
                factors = engine.inputs(batch(part))
                for name in factors.keys() & parameters.keys():
                    bias = biases.get(name) if biases.get(name) in parameters else None
                    rows = functools.partial(_rows, -(-_ROWS * len(part) // len(chosen)), self.seed)
                    moment = _second_moment(factors[name], constant=bias is not None, wide=self.wide, rows=rows)
                    if moment is not None:
                        found[name] = (moment + found[name][0] if name in found else moment), bias
        return found


def inputs(
    examples: Any,
    *,
    source: str,
    forward: Forward | None = None,
    power: float = 0.35,
    ridge: float = 0.1,
    every: int = 100,
    batch_size: int = 1024,
    wide: int = _WIDE,
    seed: int = 0,
) -> Preconditioner:
    """Return a preconditioner that multiplies the inputs of each layer by a matrix from public data.

    Computes, for each layer with inputs a (the constant 1 appended if it has a bias; patches for convolutions; all
        positions together, or 8,192 of them): A = mean of a a^T on public examples at the current weights; A = Q L Q^T;
        U = Q ((L + ridge mean(L)) ** -power) Q^T, times the number that makes its mean eigenvalue 1. Each example's
        gradient d a^T becomes d (U a)^T before it is clipped. No labels and no gradients of the examples are used.

    Args:
        examples: public examples, in the structure that `forward` takes; tensors with leading dimension N >= 1.
            Synthetic data serve well: privgrad.features.silhouettes, privgrad.features.pink_noise.
        source: where the examples come from, and why they are public; recorded.
        forward: (model, examples) -> the outputs, a tensor with leading dimension N. None: model(examples).
        power: in (0, 1]. 0.5 whitens the inputs; smaller numbers change less.
        ridge: > 0, in mean eigenvalues; larger numbers change less.
        every: the number of steps for which matrices are kept, >= 1.
        batch_size: the number of public examples for each computation, >= 1.
        wide: layers with more inputs use the diagonal of A only, since the time for Q grows with the cube.
        seed: >= 0; it decides which examples are taken.
    Raises:
        PrivacyError: `examples` is a private batch, or a number is out of range. At the first step: no layer of the
            model has inputs, or they are not finite.
    Privacy:
        This costs no privacy: it uses public data and released weights only. Clipping follows, so the sensitivity is C
        in the preconditioned space. The released gradient stays in that space.
    Reference:
        The inputs' half of DP-KFC (arXiv 2605.13418), applied once, before clipping.
    """
    name = "precondition.inputs"
    require_public(name, examples, source)
    require_in(name, "power", power, "(0, 1]")
    require_positive(name, "ridge", ridge)
    require_integer(name, "every", every, 1)
    require_integer(name, "batch_size", batch_size, 1)
    require_integer(name, "wide", wide, 0)
    require_integer(name, "seed", seed, 0)
    require_integer(name, "the number of examples", count_examples(examples), 1)
    return Inputs(examples, source, forward, power, ridge, every, batch_size, wide, seed)


def _digest(examples: Any) -> str:
    state = hashlib.blake2b(digest_size=8)

    def add(tensor: Tensor) -> Tensor:
        values = tensor.detach().cpu().contiguous()
        state.update(f"{tuple(values.shape)} {values.dtype}".encode())
        state.update(values.flatten().view(torch.uint8).numpy().data)
        return tensor

    map_examples(add, examples)
    return state.hexdigest()


def _biases(model: nn.Module) -> dict[str, str]:
    """Return the name of the bias that belongs to each weight, where neither is shared between layers."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    alone = {found[0] for found in names.values() if len(found) == 1}
    pairs: dict[str, str] = {}
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, _WITH_BIAS) or type(module).__name__ == "Conv1D":
            for own, parameter in module.named_parameters(recurse=False):
                name, bias = (f"{path}.{part}" if path else part for part in (own, own.replace("weight", "bias")))
                if parameter.dim() > 1 and {name, bias} <= alone and name != bias:
                    pairs[name] = bias
    return pairs


@dataclass(frozen=True)
class _Moment:
    """A sum of a a^T over rows of inputs, (I, I), or its diagonal, (I,), in float64."""

    total: Tensor
    rows: int
    transposed: bool = False  # whether the layer's weight has shape (I, O)

    def __add__(self, other: "_Moment") -> "_Moment":
        return _Moment(self.total + other.total, self.rows + other.rows, self.transposed)


def _rows(most: int, seed: int, count: int) -> Tensor:
    """Return at most so many of `count` rows, at random, the same for layers with equally many."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most]


@torch.no_grad()
def _second_moment(factor: Factor, *, constant: bool, wide: int, rows: Callable[[int], Tensor]) -> _Moment | None:
    """Return the second moment of a layer's inputs, with the constant 1 appended if asked; None without inputs."""
    if isinstance(factor, RowRanges):
        parts = [part for _, part in factor.parts]
        if not all(isinstance(part, Outer) for part in parts):
            return None
        found = [_second_moment(part, constant=constant, wide=wide, rows=rows) for part in parts]
        moments = [each for each in found if each is not None]
        return functools.reduce(operator.add, moments) if len(moments) == len(parts) else None
    if isinstance(factor, Outer):
        # The gradients of the outputs are zero, so the side that is not zero holds the inputs.
        transposed = bool(factor.b_BTO.any())
        inputs = (factor.b_BTO if transposed else factor.a_BTI).flatten(0, 1)
        places = rows(len(inputs))
        chosen = inputs if len(places) == len(inputs) else inputs[places.to(inputs.device)]
        return _Moment(_moment(chosen, wide, constant=constant), len(chosen), transposed)
    if isinstance(factor, Convolution) and bool(factor.x.any()):  # a transposed convolution has its inputs elsewhere
        geometry, x = factor.geometry, factor.x
        x = x.reshape(len(x) * geometry.groups, -1, *x.shape[2:])  # all groups share one matrix
        plain = replace(geometry, groups=1)
        places = rows(len(x) * torch.Size(plain.positions(x.shape[2:])).numel()).to(x.device)
        return _Moment(_moment(plain.patches_at(x, places), wide, constant=constant), len(places))
    return None


def _moment(rows_NI: Tensor, wide: int, *, constant: bool) -> Tensor:
    """Return the sum of a a^T over the rows, or its diagonal if there are more than `wide` inputs."""
    if rows_NI.shape[1] > wide:
        square = rows_NI.square().sum(0, dtype=torch.float64)
        return torch.cat([square, square.new_full((1,), len(rows_NI))]) if constant else square
    rows_NI = torch.cat([rows_NI, rows_NI.new_ones(len(rows_NI), 1)], 1) if constant else rows_NI
    return (rows_NI.mT @ rows_NI).double()


def _with_shared_matrices(maps: Mapping[str, InputMap]) -> dict[str, InputMap]:
    """Return the maps with one matrix in place of equal ones, so that layers with the same inputs map them once."""
    shared: dict[str, InputMap] = {}
    for name, own in maps.items():
        same = next((other.matrix for other in shared.values() if torch.equal(other.matrix, own.matrix)), own.matrix)
        shared[name] = replace(own, matrix=same)
    return shared


def _inverse_power(name: str, moment: Tensor, power: float, ridge: float, dtype: torch.dtype) -> Tensor:
    """Return U, the damped inverse power of a second moment, with mean eigenvalue 1: docs/mathematics.md (2.8)."""
    if not bool(torch.isfinite(moment).all()):
        raise expected("precondition.inputs", f"the inputs of {name!r}", "to be finite", "inf or nan")
    if moment.dim() == 1:
        scales = (moment + ridge * moment.mean()).pow(-power)
        return (scales / scales.mean()).nan_to_num(1.0).to(dtype)
    if _ROUNDING * len(moment) < ridge:  # float32 takes half the time
        moment = moment.to(dtype)
    eigenvalues, vectors = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(moment))
    eigenvalues = eigenvalues.clamp(min=0)
    scales = (eigenvalues + ridge * eigenvalues.mean()).pow(-power)
    scales, vectors = (scales / scales.mean()).to(dtype), vectors.to(dtype)
    return (vectors * scales) @ vectors.mT
