"""AdaDPS: what a preconditioner does to each example's gradient before it is clipped.

The bound C holds for the transformed gradient. The transform itself must be public, or post-processing of released
values. `require_transform` checks the range of its values, so that float32 can hold the squares of what is clipped.

Shape suffixes: B examples, P the shape of one parameter.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected
from privgrad.gradient.contribution import MeanGradient
from privgrad.gradient.factor import Dense, Examples, Factor, at_least_float32, canceled, native_norms, term_bound_of

_ROUNDING = 1e-6  # relative rounding error of an inverse in float32
_SMALLEST = 1e-12  # float32 can hold the squares of all numbers from this to its inverse
_ROUNDED = 1.001  # room for the rounding of the powers of a matrix

Provenance = Literal["public data", "common knowledge", "private-derived"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Scales(Mapping[str, Tensor]):
    """A mapping from parameter name to scales A, with the provenance of the scales. It cannot be changed.

    `precondition.fixed` divides each gradient by A before clipping. It takes no plain dict, such as one that was made
    from Scales by `{**scales}`.

    Args:
        values: scales by parameter name; each broadcasts to its parameter.
    Attributes:
        provenance: "public data", which includes released values; "common knowledge" (anyone may assume it, for example
            the word frequencies of a language); or "private-derived": computed from the private data, so that no
            epsilon covers the scales.
        source: the exact source, in a few words.
    Raises:
        PrivacyError: the provenance is unknown, or the source is empty.
    Privacy:
        The provenance is a statement of the caller. No code can check it. Values that are computed from Scales and put
        into new Scales need the provenance of the old ones.
    """

    provenance: Provenance
    source: str
    _tensors: dict[str, Tensor]

    def __init__(self, values: Mapping[str, Tensor], *, provenance: Provenance, source: str) -> None:
        if f"{provenance}" not in get_args(Provenance) or not source:
            condition = f"to be one of {', '.join(get_args(Provenance))}, with a source"
            raise expected("Scales", "provenance", condition, f"provenance {provenance!r} and source {source!r}")
        # Copies, here and below: a tensor that is overwritten would change the scales, and not their provenance.
        tensors: dict[str, Tensor] = {name: torch.as_tensor(value).detach().clone() for name, value in values.items()}
        vars(self).update(provenance=provenance, source=source, _tensors=tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Scales({self._tensors!r}, provenance={self.provenance!r}, source={self.source!r})"

    # The entries of two tensors are compared one by one, which gives no single answer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __or__(self, other: "Scales") -> "Scales":
        """Return the union of both, with the less public provenance of the two and with both sources."""
        order = get_args(Provenance)
        provenance = cast(Provenance, max(self.provenance, other.provenance, key=order.index))
        source = "; ".join(dict.fromkeys((self.source, other.source)))
        return Scales({**self, **other}, provenance=provenance, source=source)


@dataclass(frozen=True)
class InputMap:
    """A public symmetric matrix U for the inputs of one layer: its weight's gradient g becomes g U."""

    # Mapped inputs give the same gradients, see docs/mathematics.md (2.6), and (2.7) with a bias.
    # U, shape (I, I), or its diagonal, shape (I,). With a bias, I counts one input more: the constant 1.
    matrix: Tensor
    # The bias that is mapped too. Its gradient must be the sum over positions of the gradients of the layer's outputs.
    bias: str | None = None
    transposed: bool = False  # whether the weight has shape (I, O) instead of (O, I, ...)

    @property
    def inner(self) -> Tensor:
        """The part of U for the layer's own inputs."""
        own = self.matrix.shape[0] - (self.bias is not None)
        return self.matrix[:own] if self.matrix.dim() == 1 else self.matrix[:own, :own]

    @property
    def constant(self) -> tuple[Tensor, Tensor]:
        """The vector that the constant 1 adds to the mapped inputs, shape (I,), and the factor of the constant."""
        if self.matrix.dim() == 1:
            return torch.zeros_like(self.matrix[:-1]), self.matrix[-1]
        return self.matrix[:-1, -1], self.matrix[-1, -1]

    @cached_property
    def bound(self) -> float:
        """A number that the spectral norm of U does not exceed: docs/mathematics.md (2.9)."""
        matrix = self.matrix.double()
        size = float(matrix.abs().max())
        if matrix.dim() == 1 or size == 0:
            return size
        matrix = matrix / size
        # The norm of (U^T U)^4 is at most its largest row sum, and the eighth root of this hardly above the norm of U.
        square = matrix.mT @ matrix
        fourth = square @ square
        return size * float((fourth @ fourth).abs().sum(1).max()) ** (1 / 8) * _ROUNDED

    def of_inputs(self, x: Tensor) -> Tensor:
        """Return U times the inputs, shape (..., I), with the constant 1 among them if there is a bias."""
        if self.bias is None or self.matrix.dim() == 1:
            return self.linear(x)
        rows = torch.addmm(self.constant[0].to(x), x.reshape(-1, x.shape[-1]), self.inner.to(x))
        return rows.view(x.shape)

    def linear(self, x: Tensor) -> Tensor:
        """Return `inner` times vectors, shape (..., I)."""
        inner = self.inner.to(x)
        return x * inner if inner.dim() == 1 else x @ inner

    def of_constant(self, x: Tensor) -> Tensor:
        """Return the mapped constant for inputs of shape (..., I): shape (...,)."""
        across, own = self.constant
        return x @ across.to(x) + own.to(x)

    def of_gradients(self, weight_BOI: Tensor, bias_BO: Tensor | None) -> Tensor:
        """Return the mapped gradients of a weight, from gradients of weight and bias that are written out."""
        mapped = self.linear(weight_BOI)
        return mapped if bias_BO is None else mapped.addcmul_(bias_BO[..., None], self.constant[0].to(mapped))


@dataclass(frozen=True)
class Transform:
    """A map that PrivateGradient applies to each example's gradient g before clipping: (keep g U + shift) / A.

    docs/mathematics.md (2.1) says why the bound C then holds for the result.

    Attributes:
        inverse_scales: 1 / A by parameter name, from 1e-12 to 1e12, with the parameter's shape; a missing name means
            1. Do not overwrite them in ways that torch cannot see (.data, numpy): their squares are cached for norms.
        keep: the share of the example's own gradient, in (0, 1].
        shift: the added public vector by parameter name, with the parameter's shape; a missing name means 0.
        input_maps: public symmetric matrices U for the inputs of layers, by the name of the layer's weight; a missing
            name means the identity.
    """

    inverse_scales: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    keep: float = 1.0
    shift: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    input_maps: Mapping[str, InputMap] = field(default_factory=dict[str, InputMap])


class Preconditioner(ABC):
    """Base class of the objects from which PrivateGradient gets a Transform at every step.

    Attributes:
        source: where the side information comes from; recorded with the run.
        is_public: False if the transform depends on the private batch: then nothing is private, and epsilon is
            infinite.
    """

    source: str
    is_public = True

    def __repr__(self) -> str:
        """Return a text that PrivateGradient puts into checkpoints; a resumed run must have the same."""
        return f"{type(self).__name__}({self.source})"

    def begun(self, model: nn.Module) -> "Preconditioner":
        """Return a copy with fresh state for one PrivateGradient; itself, if there is no state.

        Raises:
            PrivacyError: this preconditioner does not fit the model.
        """
        return self

    @abstractmethod
    def transform(
        self, step: int, *, epoch_steps: int, noise_std: float, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        """Return the transform of one step; a second call for the same step returns the same transform.

        Args:
            step: the index of the release, from 0.
            epoch_steps: the number of steps of one expected pass over the private data.
            noise_std: the plan's standard deviation of the noise in the released mean, a public number.
            parameters: the trainable parameters, by name.
            raw_mean: returns the mean gradient of the private batch, not clipped, for research only. NOT private; it
                raises an error if `is_public` is True.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; it is public, or post-processing of released values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint."""
        del state


def require_transform(transform: Transform, parameters: Mapping[str, Tensor]) -> None:
    """Raise PrivacyError unless the names, shapes and values of a transform are valid: the clipping bound needs it."""
    for kind, values in (("inverse_scales", transform.inverse_scales), ("shift", transform.shift)):
        for name, value in values.items():
            shape = tuple(parameters[name].shape) if name in parameters else None
            if tuple(value.shape) != shape:
                condition = f"to have a trainable parameter's shape, {shape}"
                raise expected("precondition", f"{kind} of {name!r}", condition, tuple(value.shape))
            if kind == "inverse_scales":
                require_scales(name, value)
            elif not all(map(math.isfinite, _ends(value))):
                raise expected("precondition", f"shift of {name!r}", "to be finite", "inf or nan")
    for name, own in transform.input_maps.items():
        _require_map(name, own, parameters)
    if not 0 < transform.keep <= 1:
        raise expected("precondition", "keep", "to be in (0, 1]", transform.keep)


def require_scales_only(transform: Transform) -> Mapping[str, Tensor]:
    """Return the inverse scales of a transform that only divides, for LocalUpdate; refuse any other."""
    if transform.shift or transform.keep < 1 or transform.input_maps:
        got = f"keep = {transform.keep:g}, and {len(transform.shift)} shifts, {len(transform.input_maps)} input maps"
        raise expected("LocalUpdate", "precondition", "to divide only, as precondition.fixed does", got)
    return transform.inverse_scales


def shifted(
    chunk: Mapping[str, Factor], keep: float, shift: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Factor]:
    """Return keep * g_i + shift for every example of a chunk; what is missing in either is 0."""
    examples = next(iter(chunk.values())).examples
    found: dict[str, Factor] = {name: factor * keep for name, factor in chunk.items()}
    for name, value in shift.items():
        if name not in found:
            p = parameters[name]
            found[name] = Dense(torch.zeros(examples, *p.shape, dtype=value.dtype, device=p.device))
        found[name] = Shifted(found[name], value)
    return found


class Shifted(Factor):
    """The gradients of another factor plus the same public tensor, for the examples that are kept: g_i + s.

    Computes: |g_i + s|^2 = |g_i|^2 + 2 <g_i, s> + |s|^2, see docs/mathematics.md (2.5). Where these terms cancel, the
    gradient is written out instead. The others are zero, without s.
    """

    def __init__(self, inner: Factor, shift: Tensor, kept_B: Tensor | None = None) -> None:
        super().__init__(inner.examples, inner.shape)
        self.inner, self.shift = inner, at_least_float32(shift)
        self.kept_B = torch.ones(inner.examples, dtype=torch.bool, device=shift.device) if kept_B is None else kept_B

    def __getitem__(self, examples: Examples) -> "Shifted":
        return Shifted(self.inner[examples], self.shift, self.kept_B[examples])

    def dense(self) -> Tensor:
        shift_BP = torch.where(self.kept_B.view(-1, *[1] * self.shift.dim()), self.shift, 0.0)
        return shift_BP.add_(self.inner.dense())

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.sum_and_rounding(weight_B)[0]

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float | Tensor]:
        total, rounded = self.inner.sum_and_rounding(weight_B, inverse_scales)
        return total.add_(self.shift, alpha=float((weight_B * self.kept_B).sum())), rounded

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        total = self.inner.exact_sum(weight_B)
        return total.add_(self.shift.double(), alpha=float((weight_B * self.kept_B).sum()))

    def mask(self, kept_B: Tensor) -> "Shifted":
        return Shifted(self.inner.mask(kept_B), self.shift, self.kept_B & kept_B)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor:
        bound_B = term_bound_of(self.inner, inverse_scales) + self._shift_norm(inverse_scales)
        return torch.where(self.kept_B, bound_B, 0.0)

    @property
    def positions(self) -> int:
        return self.inner.positions

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        inner_B, shift_norm = self.inner.norms(inverse_scales), self._shift_norm(inverse_scales)
        direction = self.shift if inverse_scales is None else self.shift * inverse_scales.square()
        cross_B = self.inner.inner_products(direction).double()
        square_B = inner_B.square() + 2 * cross_B + shift_norm**2
        norm_B = square_B.clamp(min=0).sqrt()
        again = canceled(square_B, inner_B + shift_norm) & self.kept_B
        for index in cast("list[int]", again.nonzero()[:, 0].tolist()):
            norm_B[index] = Factor.norms(self[index : index + 1], inverse_scales)[0]
        return torch.where(self.kept_B, norm_B, 0.0)

    def _shift_norm(self, inverse_scales: Tensor | None) -> float:
        shift = self.shift if inverse_scales is None else self.shift * inverse_scales
        return float(native_norms(shift.double().flatten()))


def _require_map(name: str, own: InputMap, parameters: Mapping[str, Tensor]) -> None:
    """Raise PrivacyError unless an input map fits its weight and bias, and its values are finite."""
    map_of = f"input map of {name!r}"
    if missing := {name, own.bias or name} - parameters.keys():
        raise expected("precondition", map_of, "to be for trainable parameters", ", ".join(map(repr, sorted(missing))))
    shape = parameters[name].shape
    inputs = (shape[0] if own.transposed else shape[1:].numel()) + (own.bias is not None)
    if tuple(own.matrix.shape) not in ((inputs,), (inputs, inputs)):
        condition = f"to have shape ({inputs}, {inputs}) or ({inputs},)"
        raise expected("precondition", map_of, condition, tuple(own.matrix.shape))
    if not all(abs(end) <= 1 / _SMALLEST for end in _ends(own.matrix)):
        raise expected("precondition", map_of, f"to be finite, and at most {1 / _SMALLEST:g}", "inf, nan or more")


def _ends(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value: nan if complex, 1 if there are no values."""
    if values.is_complex() or not values.numel():
        return (math.nan, math.nan) if values.is_complex() else (1.0, 1.0)
    smallest, largest = torch.aminmax(values)
    return float(smallest), float(largest)


def require_scales(name: str, scales: Tensor) -> None:
    """Raise PrivacyError if scales are out of bounds; scales and their inverses have the same bounds."""
    smallest, largest = _ends(scales)
    if not _SMALLEST * (1 - _ROUNDING) <= smallest <= largest <= (1 + _ROUNDING) / _SMALLEST:
        condition = f"to be from {_SMALLEST:g} to {1 / _SMALLEST:g}"
        got = f"values from {smallest:g} to {largest:g}"
        remedy = "add a small constant such as 1e-5, or multiply all by one number: if C is tuned, only ratios matter"
        raise expected("precondition", f"scales of {name!r}", condition, got, remedy)
