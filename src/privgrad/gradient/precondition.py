"""AdaDPS: divide each example's gradient by scales that are public, before it is clipped."""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_positive
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.module_state import trainable
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.threads import blocks
from privgrad.types import Scales

Rule = Literal["rmsprop", "adam", "adagrad"]
Schedule = Literal["step", "epoch"]
MeanGradient = Callable[[], Mapping[str, Tensor]]

_ROUNDING = 1e-6  # of an inverse in float32
_SMALLEST = 1e-12  # float32 holds the squares of all that lies between its inverse and this


@dataclass(frozen=True)
class Transform:
    """What becomes of each example's gradient g before it is clipped: (keep g + shift) / A.

    Attributes:
        inverse_scales: 1 / A by parameter name, from 1e-12 to 1e12, shaped like the parameter; missing names are 1. Not
            to be written over behind torch's back (through .data or numpy): norms keep their squares.
        keep: share of the example's own gradient, in (0, 1].
        shift: by parameter name, shaped like the parameter; missing names are 0.
    """

    inverse_scales: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    keep: float = 1.0
    shift: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def require_scales_only(transform: Transform) -> Mapping[str, Tensor]:
    """The inverse scales of a transform that does nothing else.

    Raises:
        PrivacyError: it mixes a public share into the gradients.
    """
    if transform.shift or transform.keep < 1:
        remedy = "take precondition.fixed, public_rmsprop or public_adagrad"
        raise expected("LocalTraining", "precondition", "to divide only", "one that adds a share", remedy)
    return transform.inverse_scales


class Preconditioner(ABC):
    """What PrivateGradient asks for a Transform at every step.

    Attributes:
        source: where the side information comes from; recorded with the run.
        is_public: False if it is made of the private batch itself: then nothing is private, and epsilon is infinite.
    """

    source: str
    is_public = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source})"

    def begun(self, model: nn.Module) -> "Preconditioner":
        """What serves one PrivateGradient from its first step on: with state of its own, if there is any.

        Raises:
            PrivacyError: this cannot precondition the model's gradients.
        """
        del model
        return self

    @abstractmethod
    def transform(
        self, step: int, *, epoch_steps: int, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        """The transform of one step; asked twice for a step, the same.

        Args:
            step: index of the release, from 0.
            epoch_steps: steps of one expected pass over the private data.
            parameters: the trainable ones, by name.
            raw_mean: mean gradient of the private batch, not clipped, for research only. NOT private; refuses to be
                called by what says it is public.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; public, or post-processing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        del state


class Fixed(Preconditioner):
    """Scales that are given, and stay: see `fixed`."""

    def __init__(self, scales: Mapping[str, Tensor], source: str, *, is_public: bool = True) -> None:
        self.scales, self.source, self.is_public = scales, source, is_public
        self._made = Transform()

    def __repr__(self) -> str:
        """Names, and a hash of the scales: equal for equal preconditioners, and short enough for a record."""
        state = hashlib.blake2b(digest_size=8)
        for scale in self.scales.values():
            state.update(repr(tuple(scale.shape)).encode() + scale.detach().cpu().double().numpy().tobytes())
        return f"fixed({', '.join(self.scales)}; {state.hexdigest()}; {self.source})"

    def begun(self, model: nn.Module) -> "Fixed":
        parameters, twin = trainable(model), copy.copy(self)
        unknown = sorted(set(self.scales) - set(parameters))
        if unknown:
            remedy = "name them as model.named_parameters() does"
            raise expected("precondition", "scales", "for trainable parameters", ", ".join(unknown), remedy)
        inverse = {name: _inverse(name, scale, parameters[name]) for name, scale in self.scales.items()}
        # What is divided by one is not divided: A = 1 is ordinary clipping to the last bit.
        twin._made = Transform({name: value for name, value in inverse.items() if bool((value != 1).any())})
        return twin

    def transform(self, step: int, **_: Any) -> Transform:
        return self._made


class Moments(Preconditioner):
    """Scales from moving averages of a mean gradient: see `public_rmsprop`, `public_adam`, `public_adagrad`."""

    def __init__(
        self,
        gradient: PublicGradient | None,
        rule: Rule,
        *,
        beta: float = 0.9,
        beta1: float = 0.9,
        keep: float = 1.0,
        epsilon: float,
        epsilon_inside: bool,
        schedule: Schedule,
    ) -> None:
        name = f"precondition.{'public' if gradient else 'raw_ideal'}_{rule}"
        if gradient is not None and not isinstance(gradient, PublicGradient):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "wrap the public examples: PublicGradient(model, loss_fn, examples, source=...)"
            raise expected(name, "gradient", "to be a PublicGradient", type(gradient).__name__, remedy)
        require_positive(name, "epsilon", epsilon, "1e-5 is the paper's")
        for option, value in (("beta", beta), ("beta1", beta1)):
            if not 0 <= value < 1:
                raise expected(name, option, "to be in [0, 1)", value, "0.9 is the paper's")
        if not 0 < keep <= 1:
            raise expected(name, "keep", "to be in (0, 1]", keep, "0.9 is the paper's")
        if schedule not in get_args(Schedule):
            raise expected(name, "schedule", "to be 'step' or 'epoch'", repr(schedule), "choose one")
        self._gradient, self._rule, self._schedule = gradient, rule, schedule
        self._beta, self._beta1, self._keep = beta, beta1, keep
        self._epsilon, self._epsilon_inside = epsilon, epsilon_inside
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
            "beta": self._beta,
            "beta1": self._beta1,
            "keep": self._keep,
            "epsilon": self._epsilon,
            "epsilon_inside": self._epsilon_inside,
            "schedule": self._schedule,
        }
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{self._rule}({self._gradient or self.source}; {shown})"

    def begun(self, model: nn.Module) -> "Moments":
        if self._gradient is not None and self._gradient.model is not model:
            remedy = "give both the same model"
            raise expected("precondition", "gradient", "to be of the model that is trained", "another's", remedy)
        twin = copy.copy(self)
        twin._begin()
        return twin

    def transform(
        self, step: int, *, epoch_steps: int, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        every = 1 if self._schedule == "step" else epoch_steps
        for name, square in self._exp_avg_sq.items():
            if name in parameters and parameters[name].shape != square.shape:
                remedy = "go on with the model whose state this is"
                got = f"those of shape {tuple(square.shape)}"
                raise expected("precondition", f"moments of {name!r}", "to be its own", got, remedy)
        unfrozen = not parameters.keys() <= self._exp_avg_sq.keys()
        if self._step < step or unfrozen:
            if unfrozen or step // every > self._step // every:  # -1 // every is -1: the first step is always due
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
        """Take in the mean gradient of a batch (schedule "step"), or of all of them (schedule "epoch")."""
        keep, add = {
            ("rmsprop", "step"): (self._beta, 1 - self._beta),
            ("adam", "step"): (self._beta, 1 - self._beta),
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
        # Written over at every step: to find fresh memory would take as long as to fill it.
        kept = self._inverse
        self._inverse = {
            n: kept[n] if n in kept else torch.empty_like(at_least_float32(p.detach())) for n, p in parameters.items()
        }
        for name, scales in self._inverse.items():
            for square, part in blocks(self._exp_avg_sq[name].to(scales.dtype), scales):
                if self._epsilon_inside:
                    torch.add(square, self._epsilon, out=part).sqrt_()
                else:
                    torch.sqrt(square, out=part).add_(self._epsilon)
                part.reciprocal_()
        shift = {name: (1 - self._keep) * average for name, average in self._exp_avg.items()} if self._keep < 1 else {}
        return Transform(self._inverse, self._keep, shift)


def fixed(scales: Mapping[str, Tensor], *, source: str | None = None) -> Preconditioner:
    """Scales A that are given, and stay: each example's gradient g becomes g / A before it is clipped.

    Args:
        scales: tensors with values from 1e-12 to 1e12 that broadcast to their parameters; parameters without one keep
            A = 1. Those of `privgrad.side_information` know their source.
        source: where they come from, in a few words; recorded.
    Raises:
        PrivacyError: not a mapping; and (when PrivateGradient is constructed) a name, shape or value that does not fit.
    Privacy:
        None of its own: the scales must be public, or post-processing of what was released. The bound C then holds
        in the preconditioned space, and the released gradient stays there. Scales that say they are private-derived
        are covered by no epsilon: every release is charged as one without noise.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 2.
    """
    if not isinstance(scales, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        got, remedy = type(scales).__name__, 'give {"layer.weight": scale, ...}'
        raise expected("precondition.fixed", "scales", "to be a mapping by parameter name", got, remedy)
    known = f"{scales.provenance}: {scales.source}" if isinstance(scales, Scales) else None
    told = "; ".join(part for part in (known, source) if part) or "given; source not told"
    is_public = not (isinstance(scales, Scales) and scales.provenance == "private-derived")
    return Fixed({name: torch.as_tensor(scale) for name, scale in scales.items()}, told, is_public=is_public)


def public_rmsprop(
    gradient: PublicGradient,
    *,
    beta: float = 0.9,
    epsilon: float = 1e-5,
    epsilon_inside: bool = False,
    schedule: Schedule = "step",
) -> Preconditioner:
    """AdaDPS with RMSProp's scales, from public data.

    Computes, with h the mean gradient on a public batch: v = beta v + (1 - beta) h**2, v = 0 at first, updated before
        its use; A = sqrt(v) + epsilon, or sqrt(v + epsilon) with epsilon_inside; each example's g becomes g / A. With
        the schedule "epoch" v is made anew at the start of each expected pass over the private data, as the mean of
        h**2 over all public batches.

    Args:
        gradient: on public data, of the model that is trained.
        beta: in [0, 1).
        epsilon: > 0; outside in gradient units, inside in their square.
        epsilon_inside: under the root (the authors' code) or after it (the paper).
        schedule: "step" (the paper) or "epoch" (the authors' code).
    Raises:
        PrivacyError: no PublicGradient, or a number out of range.
    Privacy:
        Nothing is spent: public data and released weights only. The sensitivity is C in the preconditioned space.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 1.
    """
    return Moments(gradient, "rmsprop", beta=beta, epsilon=epsilon, epsilon_inside=epsilon_inside, schedule=schedule)


def public_adam(
    gradient: PublicGradient,
    *,
    beta: float = 0.9,
    beta1: float = 0.9,
    keep: float = 0.9,
    epsilon: float = 1e-5,
    epsilon_inside: bool = False,
    schedule: Schedule = "step",
) -> Preconditioner:
    """AdaDPS with Adam's scales and a share of public momentum.

    Computes: v and A as `public_rmsprop`; M = beta1 M + (1 - beta1) h; each example's g becomes
        (keep g + (1 - keep) M) / A. Neither is corrected for its start.

    Args:
        beta1: of M, in [0, 1).
        keep: share of the private gradient, in (0, 1].
        gradient, beta, epsilon, epsilon_inside, schedule, Raises, Privacy, Reference: as `public_rmsprop`.
    """
    return Moments(
        gradient,
        "adam",
        beta=beta,
        beta1=beta1,
        keep=keep,
        epsilon=epsilon,
        epsilon_inside=epsilon_inside,
        schedule=schedule,
    )


def public_adagrad(
    gradient: PublicGradient, *, epsilon: float = 1e-5, epsilon_inside: bool = False, schedule: Schedule = "step"
) -> Preconditioner:
    """AdaDPS with AdaGrad's scales: v = v + h**2, and A as `public_rmsprop`.

    Args:
        gradient, epsilon, epsilon_inside, schedule, Raises, Privacy, Reference: as `public_rmsprop`; with the
            schedule "epoch" the mean of h**2 over all public batches is added once a pass.
    """
    return Moments(gradient, "adagrad", epsilon=epsilon, epsilon_inside=epsilon_inside, schedule=schedule)


def raw_ideal_rmsprop(*, beta: float = 0.9, epsilon: float = 1e-5, epsilon_inside: bool = False) -> Preconditioner:
    """RMSProp's scales from the private batch itself, neither clipped nor noised: a bound for research. NOT private.

    Args:
        beta, epsilon, epsilon_inside: as `public_rmsprop`.
    Privacy:
        None: every release is charged as one without noise, so epsilon is infinite.
    Reference:
        Li et al. 2022 (AdaDPS), their "ideal" rows.
    """
    return Moments(None, "rmsprop", beta=beta, epsilon=epsilon, epsilon_inside=epsilon_inside, schedule="step")


def _pass_moments(gradient: PublicGradient, time: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean over all public batches of h, and of h**2."""
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
    """1 / A, shaped and placed like the parameter, float32 or wider."""
    try:
        real = torch.full_like(scale, math.nan).real if scale.is_complex() else scale.detach()
        whole = real.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)).expand(parameter.shape)
    except RuntimeError:
        got = f"shape {tuple(scale.shape)} for {tuple(parameter.shape)}"
        raise expected("precondition", f"scales of {name!r}", "to fit", got, "broadcast to the parameter") from None
    _require_scales(name, whole)
    return whole.reciprocal().contiguous()


def require_transform(transform: Transform, parameters: Mapping[str, Tensor]) -> None:
    """Raise PrivacyError unless a transform is one: whoever made it, clipping stands on it."""
    for kind, values in (("inverse_scales", transform.inverse_scales), ("shift", transform.shift)):
        for name, value in values.items():
            wanted = tuple(parameters[name].shape) if name in parameters else None
            if tuple(value.shape) != wanted:
                remedy = "name and shape them as model.named_parameters() does"
                got, what = tuple(value.shape), f"{kind} of {name!r}"
                raise expected("precondition", what, f"to have a trainable parameter's shape, {wanted}", got, remedy)
            if kind == "inverse_scales":
                _require_scales(name, value)
            elif not all(math.isfinite(end) for end in _ends(value)):
                remedy = "look at the public gradient"
                raise expected("precondition", f"shift of {name!r}", "to be finite", "inf or nan", remedy)
    if not 0 < transform.keep <= 1:
        raise expected("precondition", "keep", "to be in (0, 1]", transform.keep, "0.9 is the paper's")


def _ends(values: Tensor) -> tuple[float, float]:
    """Smallest and largest; 1 of nothing."""
    if values.is_complex() or not values.numel():
        return (math.nan, math.nan) if values.is_complex() else (1.0, 1.0)
    smallest, largest = torch.aminmax(values)
    return float(smallest), float(largest)


def _require_scales(name: str, scales: Tensor) -> None:
    """Scales or their inverses: the bounds are the same."""
    smallest, largest = _ends(scales)
    if not _SMALLEST * (1 - _ROUNDING) <= smallest <= largest <= (1 + _ROUNDING) / _SMALLEST:
        got = f"values from {smallest:g} to {largest:g}"
        remedy = "add a small constant, as 1e-5, or scale them together: only their ratios matter once C is tuned"
        condition = f"to be from {_SMALLEST:g} to {1 / _SMALLEST:g}"
        raise expected("precondition", f"scales of {name!r}", condition, got, remedy)
