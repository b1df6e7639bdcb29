"""AdaDPS: divide each example's gradient by public scales before it is clipped.

PrivateGradient takes a Preconditioner as `precondition`. The privacy guarantee rests on two facts: the scales are
public, or post-processing of released values; and their values are in the range that `require_transform` checks.
"""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_decays, require_positive
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.module_state import trainable
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.threads import blocks
from privgrad.types import Scales

Rule = Literal["rmsprop", "adam", "adagrad"]
Schedule = Literal["step", "epoch"]
MeanGradient = Callable[[], Mapping[str, Tensor]]

_ROUNDING = 1e-6  # relative rounding error of an inverse in float32
_SMALLEST = 1e-12  # float32 can hold the squares of all numbers from this to its inverse


@dataclass(frozen=True)
class Transform:
    """A map that PrivateGradient applies to each example's gradient g before clipping: (keep g + shift) / A.

    Attributes:
        inverse_scales: 1 / A by parameter name, from 1e-12 to 1e12, with the parameter's shape; a missing name means
            1. Do not overwrite them in ways that torch cannot see (.data, numpy): their squares are cached for norms.
        keep: the share of the example's own gradient, in (0, 1].
        shift: the added public vector by parameter name, with the parameter's shape; a missing name means 0.
    """

    inverse_scales: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    keep: float = 1.0
    shift: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def require_scales_only(transform: Transform) -> Mapping[str, Tensor]:
    """Return the inverse scales of a transform that only divides, for LocalTraining.

    Raises:
        PrivacyError: the transform adds a public vector to the gradients.
    """
    if transform.shift or transform.keep < 1:
        remedy = "use precondition.fixed, public_rmsprop or public_adagrad"
        got = f"keep = {transform.keep:g} and a shift of {len(transform.shift)} parameters"
        raise expected("LocalTraining", "precondition", "to divide only", got, remedy)
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
        self, step: int, *, epoch_steps: int, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        """Return the transform of one step; a second call for the same step returns the same transform.

        Args:
            step: the index of the release, from 0.
            epoch_steps: the number of steps of one expected pass over the private data.
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

    def __init__(self, scales: Mapping[str, Tensor], source: str, *, is_public: bool = True) -> None:
        self.scales, self.source, self.is_public = scales, source, is_public
        self._made = Transform()

    def __repr__(self) -> str:
        """Return the names and a hash of the scales: equal for equal preconditioners, and short enough for a record."""
        state = hashlib.blake2b(digest_size=8)
        for scale in self.scales.values():
            state.update(repr(tuple(scale.shape)).encode() + scale.detach().cpu().double().numpy().tobytes())
        return f"fixed({', '.join(self.scales)}; {state.hexdigest()}; {self.source})"

    def begun(self, model: nn.Module) -> "Fixed":
        parameters, twin = trainable(model), copy.copy(self)
        unknown = sorted(set(self.scales) - set(parameters))
        if unknown:
            remedy = "name them as model.named_parameters() does"
            raise expected("precondition", "scales", "to be for trainable parameters", ", ".join(unknown), remedy)
        inverse = {name: _inverse(name, scale, parameters[name]) for name, scale in self.scales.items()}
        # Where A = 1, leave the division out: this is ordinary clipping, equal to the last bit.
        twin._made = Transform({name: value for name, value in inverse.items() if bool((value != 1).any())})
        return twin

    def transform(self, step: int, **_: Any) -> Transform:
        return self._made


class Moments(Preconditioner):
    """A preconditioner with scales from moving averages of a mean gradient.

    See `public_rmsprop`, `public_adam`, `public_adagrad` and `raw_ideal_rmsprop`, which construct it.
    """

    def __init__(
        self,
        gradient: PublicGradient | None,
        rule: Rule,
        *,
        betas: tuple[float, float] = (0.9, 0.9),
        keep: float = 1.0,
        eps: float,
        eps_inside: bool,
        schedule: Schedule,
    ) -> None:
        name = f"precondition.{'public' if gradient else 'raw_ideal'}_{rule}"
        if gradient is not None and not isinstance(gradient, PublicGradient):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "wrap the public examples: PublicGradient(model, loss_fn, examples, source=...)"
            raise expected(name, "gradient", "to be a PublicGradient", type(gradient).__name__, remedy)
        require_positive(name, "eps", eps, "1e-5 is the paper's")
        if rule == "rmsprop":
            require_decays(name, "alpha", betas[1], 0.9)
        else:
            require_decays(name, "betas", betas, (0.9, 0.9))
        if not 0 < keep <= 1:
            raise expected(name, "keep", "to be in (0, 1]", keep, "0.9 is the paper's")
        if schedule not in get_args(Schedule):
            raise expected(name, "schedule", "to be 'step' or 'epoch'", repr(schedule), "choose one")
        self._gradient, self._rule, self._schedule = gradient, rule, schedule
        (self._beta1, self._beta2), self._keep = betas, keep
        self._eps, self._eps_inside = eps, eps_inside
        self.is_public = gradient is not None
        self.source = gradient.source if gradient else "the private batch: NOT private"
        self._begin()

    def _begin(self) -> None:
        self._step = -1
        self._exp_avg: dict[str, Tensor] = {}
        self._exp_avg_sq: dict[str, Tensor] = {}
        self._made: Transform | None = None
        self._inverse: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        options = {
            "betas": (self._beta1, self._beta2),
            "keep": self._keep,
            "eps": self._eps,
            "eps_inside": self._eps_inside,
            "schedule": self._schedule,
        }
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{self._rule}({self._gradient or self.source}; {shown})"

    def begun(self, model: nn.Module) -> "Moments":
        if self._gradient is not None and self._gradient.model is not model:
            remedy = "construct PublicGradient and PrivateGradient with the same model object"
            got = f"a gradient of a different {type(self._gradient.model).__name__}"
            raise expected("precondition", "gradient", "to be of the model that is trained", got, remedy)
        twin = copy.copy(self)
        twin._begin()
        return twin

    def transform(
        self, step: int, *, epoch_steps: int, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        every = 1 if self._schedule == "step" else epoch_steps
        for name, square in self._exp_avg_sq.items():
            if name in parameters and parameters[name].shape != square.shape:
                remedy = "load the state into a run of the model that it was saved from"
                condition = f"to have the parameter's shape, {tuple(parameters[name].shape)}"
                raise expected("precondition", f"moments of {name!r}", condition, tuple(square.shape), remedy)
        unfrozen = not parameters.keys() <= self._exp_avg_sq.keys()
        if self._step < step or unfrozen:
            if unfrozen or step // every > self._step // every:  # -1 // every is -1, so the first step always updates
                self._update(step // every, raw_mean)
                self._made = None
            self._step = step
        if self._made is None:
            self._made = self._transform(parameters)
        return self._made

    def state_dict(self) -> dict[str, Any]:
        moments = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {"step": self._step} | {
            key: {name: value.clone() for name, value in values.items()} for key, values in moments.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._made = int(state["step"]), None
        self._exp_avg, self._exp_avg_sq = (
            {name: value.clone() for name, value in state[key].items()} for key in ("exp_avg", "exp_avg_sq")
        )

    @torch.no_grad()
    def _update(self, time: int, raw_mean: MeanGradient) -> None:
        """Update the moments by the mean gradient of one batch (schedule "step"), or of all (schedule "epoch")."""
        keep, add = {
            ("rmsprop", "step"): (self._beta2, 1 - self._beta2),
            ("adam", "step"): (self._beta2, 1 - self._beta2),
            ("adagrad", "step"): (1.0, 1.0),
            ("adagrad", "epoch"): (1.0, 1.0),
        }.get((self._rule, self._schedule), (0.0, 1.0))
        squares: Mapping[str, Tensor] = {}
        if self._schedule == "epoch" and self._gradient is not None:
            mean, squares = _pass_moments(self._gradient, time)
        else:
            mean = raw_mean() if self._gradient is None else self._gradient(time)
        for name, value in mean.items():
            if name not in self._exp_avg_sq:
                self._exp_avg_sq[name] = torch.zeros_like(at_least_float32(value))
            for part, h, square in blocks(self._exp_avg_sq[name], at_least_float32(value), squares.get(name)):
                part.mul_(keep)
                part.addcmul_(h, h, value=add) if square is None else part.add_(square, alpha=add)
        if self._rule == "adam":
            for name, value in mean.items():
                if name not in self._exp_avg:
                    self._exp_avg[name] = torch.zeros_like(at_least_float32(value))
                self._exp_avg[name].mul_(self._beta1).add_(value, alpha=1 - self._beta1)

    @torch.no_grad()
    def _transform(self, parameters: Mapping[str, Tensor]) -> Transform:
        # Reuse the memory of the last step: to allocate it would take as long as to fill it.
        kept = self._inverse
        self._inverse = {
            n: kept[n] if n in kept else torch.empty_like(at_least_float32(p.detach())) for n, p in parameters.items()
        }
        for name, scales in self._inverse.items():
            for square, part in blocks(self._exp_avg_sq[name].to(scales.dtype), scales):
                if self._eps_inside:
                    torch.add(square, self._eps, out=part).sqrt_()
                else:
                    torch.sqrt(square, out=part).add_(self._eps)
                part.reciprocal_()
        shift = {name: (1 - self._keep) * average for name, average in self._exp_avg.items()} if self._keep < 1 else {}
        return Transform(self._inverse, self._keep, shift)


def fixed(scales: Mapping[str, Tensor], *, source: str | None = None) -> Preconditioner:
    """Return a preconditioner with constant scales A: each example's gradient g becomes g / A before it is clipped.

    Args:
        scales: tensors by parameter name, with values from 1e-12 to 1e12, that broadcast to their parameters. Where a
            name is missing, A = 1. Scales from `privgrad.side_information` record their own source.
        source: where the scales come from, in a few words; recorded.
    Raises:
        PrivacyError: `scales` is not a mapping; or, when PrivateGradient is constructed, a name, shape or value does
            not fit.
    Privacy:
        This function gives no guarantee of its own: the scales must be public, or post-processing of released values.
        The bound C then holds in the preconditioned space, and the released gradient stays in that space. If the
        scales have the provenance "private-derived", no epsilon covers them: every release is charged as one without
        noise.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 2.
    """
    if not isinstance(scales, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        got, remedy = type(scales).__name__, 'give {"layer.weight": scale, ...}'
        raise expected("precondition.fixed", "scales", "to be a mapping by parameter name", got, remedy)
    known = f"{scales.provenance}: {scales.source}" if isinstance(scales, Scales) else None
    # The text becomes a fact of the ledger, and a resumed run must have equal facts: do not change it.
    recorded = "; ".join(part for part in (known, source) if part) or "given; source unknown"
    is_public = not (isinstance(scales, Scales) and scales.provenance == "private-derived")
    return Fixed({name: torch.as_tensor(scale) for name, scale in scales.items()}, recorded, is_public=is_public)


def public_rmsprop(
    gradient: PublicGradient,
    *,
    alpha: float = 0.9,
    eps: float = 1e-5,
    eps_inside: bool = False,
    schedule: Schedule = "step",
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with RMSProp's scales, from public data.

    Computes, with h the mean gradient on a public batch: v = alpha v + (1 - alpha) h**2, where v is 0 at first and
        is updated before its use; A = sqrt(v) + eps, or sqrt(v + eps) with eps_inside; each example's g becomes
        g / A. With the schedule "epoch", v is replaced at the start of each expected pass over the private
        data by the mean of h**2 over all public batches.

    Args:
        gradient: the gradient on public data, of the model that is trained.
        alpha: the decay rate of v, in [0, 1).
        eps: > 0; in gradient units outside of the root, in squared gradient units inside.
        eps_inside: whether eps is added inside the root (the authors' code) or outside (the paper).
        schedule: "step" (the paper) or "epoch" (the authors' code).
    Raises:
        PrivacyError: `gradient` is not a PublicGradient, or a number is out of range.
    Privacy:
        This costs no privacy: it uses public data and released weights only. The sensitivity is C in the
        preconditioned space.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 1.
    """
    return Moments(gradient, "rmsprop", betas=(0.0, alpha), eps=eps, eps_inside=eps_inside, schedule=schedule)


def public_adam(
    gradient: PublicGradient,
    *,
    betas: tuple[float, float] = (0.9, 0.9),
    keep: float = 0.9,
    eps: float = 1e-5,
    eps_inside: bool = False,
    schedule: Schedule = "step",
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with Adam's scales and a share of public momentum.

    Computes: v and A as in `public_rmsprop`, with alpha = beta2; M = beta1 M + (1 - beta1) h; each example's g becomes
        (keep g + (1 - keep) M) / A. Adam's bias correction is applied to neither v nor M.

    The sections Raises, Privacy and Reference of `public_rmsprop` hold here too.

    Args:
        gradient: as in `public_rmsprop`.
        betas: decays (beta1, beta2) of M and of v, each in [0, 1).
        keep: the share of the private gradient, in (0, 1].
        eps: as in `public_rmsprop`.
        eps_inside: as in `public_rmsprop`.
        schedule: as in `public_rmsprop`.
    """
    return Moments(
        gradient,
        "adam",
        betas=betas,
        keep=keep,
        eps=eps,
        eps_inside=eps_inside,
        schedule=schedule,
    )


def public_adagrad(
    gradient: PublicGradient, *, eps: float = 1e-5, eps_inside: bool = False, schedule: Schedule = "step"
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with AdaGrad's scales: v = v + h**2, and A as in `public_rmsprop`.

    The sections Raises, Privacy and Reference of `public_rmsprop` hold here too.

    Args:
        gradient: as in `public_rmsprop`.
        eps: as in `public_rmsprop`.
        eps_inside: as in `public_rmsprop`.
        schedule: as in `public_rmsprop`; "epoch" adds the mean of h**2 over all public batches once per pass.
    """
    return Moments(gradient, "adagrad", eps=eps, eps_inside=eps_inside, schedule=schedule)


def raw_ideal_rmsprop(*, alpha: float = 0.9, eps: float = 1e-5, eps_inside: bool = False) -> Preconditioner:
    """Return a preconditioner with RMSProp's scales from the private batch itself. NOT private, for research only.

    The scales are neither clipped nor noised. They show how much ideal scales could gain.

    Args:
        alpha: as in `public_rmsprop`.
        eps: as in `public_rmsprop`.
        eps_inside: as in `public_rmsprop`.
    Privacy:
        There is none: every release is charged as one without noise, so epsilon is infinite.
    Reference:
        Li et al. 2022 (AdaDPS), their "ideal" rows.
    """
    return Moments(None, "rmsprop", betas=(0.0, alpha), eps=eps, eps_inside=eps_inside, schedule="step")


def _pass_moments(gradient: PublicGradient, time: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the means of h and of h**2 over all public batches."""
    mean: dict[str, Tensor] = {}
    square: dict[str, Tensor] = {}
    share = 1 / gradient.batches
    for grads in gradient.one_pass(time):
        for name, grad in grads.items():
            h = at_least_float32(grad)
            for sums in (mean, square):
                if name not in sums:
                    sums[name] = torch.zeros_like(h)
            mean[name].add_(h, alpha=share)
            square[name].addcmul_(h, h, value=share)
    return mean, square


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
    if not 0 < transform.keep <= 1:
        raise expected("precondition", "keep", "to be in (0, 1]", transform.keep, "0.9 is the paper's")


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
