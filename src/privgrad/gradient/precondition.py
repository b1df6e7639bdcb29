"""AdaDPS: divide each example's gradient by public scales before it is clipped.

PrivateGradient takes a Preconditioner as `precondition`, and calls its methods. `federated.local_update` calls `begun`
and `transform`. The privacy guarantee rests on two facts: the scales are public, or post-processing of released values;
and their values are in the range that `require_transform` checks. Scales that follow public gradients are in `moments`.
"""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from privgrad.errors import expected
from privgrad.gradient.factors.mapped import InputMap
from privgrad.gradient.module_state import trainable
from privgrad.types import Scales

MeanGradient = Callable[[], Mapping[str, Tensor]]

_ROUNDING = 1e-6  # relative rounding error of an inverse in float32
_SMALLEST = 1e-12  # float32 can hold the squares of all numbers from this to its inverse


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


def require_scales_only(transform: Transform) -> Mapping[str, Tensor]:
    """Return the inverse scales of a transform that only divides, for LocalUpdate.

    PrivateGradient and `federated.local_update` call it. The privacy guarantee does not rest on it.

    Raises:
        PrivacyError: the transform adds a public vector to the gradients.
    """
    if transform.shift or transform.keep < 1 or transform.input_maps:
        remedy = "use precondition.fixed, public_rmsprop or public_adagrad"
        got = f"keep = {transform.keep:g}, and {len(transform.shift)} shifts, {len(transform.input_maps)} input maps"
        raise expected("LocalUpdate", "precondition", "to divide only", got, remedy)
    return transform.inverse_scales


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
        del model
        return self

    @abstractmethod
    def transform(
        self,
        step: int,
        *,
        epoch_steps: int,
        noise_std: float,
        parameters: Mapping[str, Tensor],
        raw_mean: MeanGradient,
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


class Fixed(Preconditioner):
    """A preconditioner with given, constant scales: see `fixed`."""

    def __init__(self, scales: Mapping[str, Tensor], source: str, *, is_public: bool) -> None:
        self._scales, self.source, self.is_public = scales, source, is_public
        self._made = Transform()

    def __repr__(self) -> str:
        """Return the names of the scales, a hash of their shapes and values, and the source.

        PrivateGradient puts the text into checkpoints, and refuses to resume from a checkpoint with a different text.
        The ledger records `source` only. The privacy guarantee does not rest on the text.
        """
        state = hashlib.blake2b(digest_size=8)
        for _, scale in sorted(self._scales.items()):
            state.update(repr(tuple(scale.shape)).encode() + scale.detach().cpu().double().numpy().tobytes())
        return f"fixed({', '.join(sorted(self._scales))}; {state.hexdigest()}; {self.source})"

    def begun(self, model: nn.Module) -> "Fixed":
        """Return a copy that holds 1 / A for this model; raise PrivacyError if the scales do not fit it."""
        parameters, twin = trainable(model), copy.copy(self)
        unknown = sorted(set(self._scales) - set(parameters))
        if unknown:
            remedy = "name them as model.named_parameters() does"
            raise expected("precondition", "scales", "to be for trainable parameters", ", ".join(unknown), remedy)
        inverse = {name: _inverse(name, scale, parameters[name]) for name, scale in self._scales.items()}
        # Where A = 1, leave the division out: this is ordinary clipping, equal to the last bit.
        twin._made = Transform({name: value for name, value in inverse.items() if bool((value != 1).any())})
        return twin

    def transform(self, step: int, **_: Any) -> Transform:
        """Return the transform that `begun` made, the same in all steps."""
        return self._made


def fixed(scales: Scales, *, source: str | None = None) -> Preconditioner:
    """Return a preconditioner with constant scales A: each example's gradient g becomes g / A before it is clipped.

    Users call it through `privgrad.precondition`; `experiments.build`, `audit.methods` and `papers.toy_regression` call
    it too.

    Args:
        scales: Scales, with values from 1e-12 to 1e12, that broadcast to their parameters. Where a name is missing,
            A = 1. `privgrad.side_information` makes such Scales.
        source: more about where the scales come from, in a few words; recorded after their own source.
    Raises:
        PrivacyError: `scales` are not Scales, for instance a dict, which has no provenance; or, when PrivateGradient is
            constructed, a name, shape or value does not fit.
    Privacy:
        This function gives no guarantee of its own: the scales must be public, or post-processing of released values.
        The bound C then holds in the preconditioned space, and the released gradient stays in that space. If the
        scales have the provenance "private-derived", no epsilon covers them: every release is charged as one without
        noise.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 2.
    """
    if not isinstance(scales, Scales):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = (
            'give privgrad.Scales({"layer.weight": scale}, provenance="public data", source="..."), if that is true'
        )
        raise expected("precondition.fixed", "scales", "to be Scales, with a provenance", type(scales).__name__, remedy)
    # The text becomes a fact of the ledger, and a resumed run must have equal facts: do not change it.
    recorded = "; ".join(part for part in (f"{scales.provenance}: {scales.source}", source) if part)
    is_public = scales.provenance != "private-derived"
    return Fixed({name: torch.as_tensor(scale) for name, scale in scales.items()}, recorded, is_public=is_public)


def _inverse(name: str, scale: Tensor, parameter: Tensor) -> Tensor:
    """Return 1 / A with the parameter's shape and device, in float32 or wider."""
    try:
        real = torch.full_like(scale, math.nan).real if scale.is_complex() else scale.detach()
        whole = real.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)).expand(parameter.shape)
    except RuntimeError:
        condition = f"to broadcast to the parameter's shape, {tuple(parameter.shape)}"
        got, remedy = f"shape {tuple(scale.shape)}", "give one scale, or one per element of the parameter"
        raise expected("precondition", f"scales of {name!r}", condition, got, remedy) from None
    _require_scales(name, whole)
    return whole.reciprocal().contiguous()


def require_transform(transform: Transform, parameters: Mapping[str, Tensor]) -> None:
    """Raise PrivacyError unless the names, shapes and values of a transform are valid.

    PrivateGradient calls it on every new transform, also those of classes outside of the library. The clipping bound
    rests on it.
    """
    for kind, values in (("inverse_scales", transform.inverse_scales), ("shift", transform.shift)):
        for name, value in values.items():
            shape = tuple(parameters[name].shape) if name in parameters else None
            if tuple(value.shape) != shape:
                remedy = "name and shape them as model.named_parameters() does"
                got, argument = tuple(value.shape), f"{kind} of {name!r}"
                condition = f"to have a trainable parameter's shape, {shape}"
                raise expected("precondition", argument, condition, got, remedy)
            if kind == "inverse_scales":
                _require_scales(name, value)
            elif not all(math.isfinite(end) for end in _ends(value)):
                remedy = "examine the public gradient"
                raise expected("precondition", f"shift of {name!r}", "to be finite", "inf or nan", remedy)
    for name, own in transform.input_maps.items():
        _require_map(name, own, parameters)
    if not 0 < transform.keep <= 1:
        raise expected("precondition", "keep", "to be in (0, 1]", transform.keep, "0.9 is the paper's")


def _require_map(name: str, own: InputMap, parameters: Mapping[str, Tensor]) -> None:
    """Raise PrivacyError unless an input map fits its weight and bias, and its values are finite."""
    remedy = "name weights and biases as model.named_parameters() does, with one row of U per input"
    for parameter in (name, *([] if own.bias is None else [own.bias])):
        if parameter not in parameters:
            raise expected("precondition", "input_maps", "to be for trainable parameters", repr(parameter), remedy)
    shape = parameters[name].shape
    inputs = (shape[0] if own.transposed else shape[1:].numel()) + (own.bias is not None)
    if tuple(own.matrix.shape) not in ((inputs,), (inputs, inputs)):
        condition = f"to have shape ({inputs}, {inputs}) or ({inputs},)"
        raise expected("precondition", f"input map of {name!r}", condition, tuple(own.matrix.shape), remedy)
    if not all(abs(end) <= 1 / _SMALLEST for end in _ends(own.matrix)):
        condition = f"to be finite, and at most {1 / _SMALLEST:g}"
        raise expected("precondition", f"input map of {name!r}", condition, "inf, nan or more", "examine public data")


def _ends(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value: nan if complex, 1 if there are no values."""
    if values.is_complex() or not values.numel():
        return (math.nan, math.nan) if values.is_complex() else (1.0, 1.0)
    smallest, largest = torch.aminmax(values)
    return float(smallest), float(largest)


def _require_scales(name: str, scales: Tensor) -> None:
    """Raise PrivacyError if scales are out of bounds; scales and their inverses have the same bounds."""
    smallest, largest = _ends(scales)
    if not _SMALLEST * (1 - _ROUNDING) <= smallest <= largest <= (1 + _ROUNDING) / _SMALLEST:
        got = f"values from {smallest:g} to {largest:g}"
        remedy = "add a small constant such as 1e-5, or multiply all by one number: if C is tuned, only ratios matter"
        condition = f"to be from {_SMALLEST:g} to {1 / _SMALLEST:g}"
        raise expected("precondition", f"scales of {name!r}", condition, got, remedy)
