"""AdaDPS with scales from the moments of a mean gradient: of public data, or, for research, of the private batch.

The scales of the public rules depend on public data and released weights only; for `raw_ideal_rmsprop` there is no
guarantee.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_choice, require_in, require_integer, require_positive
from privgrad.gradient.factor import at_least_float32
from privgrad.gradient.transform import MeanGradient, Preconditioner, Transform
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.processes import blocks

_NOISE_EPS = 10.0  # the default; docs/choosing-evidence.md reports how it was chosen
_EVERY = 4  # the default; docs/choosing-evidence.md reports how it was chosen
Rule = Literal["rmsprop", "adam", "adagrad"]
Schedule = Literal["step", "epoch"]


class Moments(Preconditioner):
    """A preconditioner with scales from moving averages of a mean gradient; see `public_rmsprop`."""

    def __init__(
        self,
        gradient: PublicGradient | None,
        rule: Rule,
        *,
        betas: tuple[float, float] = (0.9, 0.9),
        keep: float = 1.0,
        eps: float | None,
        noise_eps: float | None,
        schedule: Schedule,
        every: int | None,
    ) -> None:
        name = f"precondition.{'raw_ideal' if gradient is None else 'public'}_{rule}"
        if eps is not None and noise_eps is not None:
            raise expected(name, "eps", "to be absent next to noise_eps", eps)
        noise_eps = _NOISE_EPS if noise_eps is None else noise_eps
        require_positive(name, "noise_eps", noise_eps)
        if eps is not None:
            require_positive(name, "eps", eps)
        if rule == "rmsprop":
            require_in(name, "alpha", betas[1], "[0, 1)")
        else:
            require_in(name, "betas", betas, "[0, 1)", is_pair=True)
        require_in(name, "keep", keep, "(0, 1]")
        require_choice(name, "schedule", schedule, get_args(Schedule))
        if every is not None:
            require_integer(name, "every", every, 1)
            if schedule == "epoch":
                raise expected(name, "every", "to be absent with schedule='epoch'", every)
        self.public, self._rule, self._schedule = gradient, rule, schedule
        (self._beta1, self._beta2), self._keep = betas, keep
        self._eps, self._noise_eps = eps, noise_eps
        self._every = 1 if schedule == "epoch" else _EVERY if every is None else every
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
        """Return the text that checkpoints record; a resumed run must have the same."""
        options = {
            "betas": (self._beta1, self._beta2),
            "keep": self._keep,
            **({"noise_eps": self._noise_eps} if self._eps is None else {"eps": self._eps}),
            "eps_inside": False,  # once an option, which checkpoints name
            "schedule": self._schedule,
            # Left out for 1, so that checkpoints from before this option can be resumed.
            **({"every": self._every} if self._schedule == "step" and self._every > 1 else {}),
        }
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{self._rule}({self.public or self.source}; {shown})"

    def begun(self, model: nn.Module) -> "Moments":
        """Return a copy without moments; raise PrivacyError if the public gradient is of a different model."""
        if self.public is not None and self.public.model is not model:
            got = f"a gradient of a different {type(self.public.model).__name__}"
            raise expected("precondition", "gradient", "to be of the model object that is trained", got)
        twin = copy.copy(self)
        twin._begin()
        return twin

    def transform(
        self, step: int, *, epoch_steps: int, noise_std: float, parameters: Mapping[str, Tensor], raw_mean: MeanGradient
    ) -> Transform:
        """Return the transform of one step, and update the moments first if the schedule requires it."""
        if self._eps is None and noise_std == 0:
            remedy = "give eps in place of noise_eps: there is no noise to measure it by"
            raise expected("precondition", "noise_std", "to be positive for noise_eps", noise_std, remedy)
        every = self._every if self._schedule == "step" else epoch_steps
        for name, square in self._exp_avg_sq.items():
            if name in parameters and parameters[name].shape != square.shape:
                condition = f"to have the parameter's shape, {tuple(parameters[name].shape)}"
                raise expected("precondition", f"moments of {name!r}", condition, tuple(square.shape))
        unfrozen = not parameters.keys() <= self._exp_avg_sq.keys()
        if self._step < step or unfrozen:
            if unfrozen or step // every > self._step // every:  # -1 // every is -1, so the first step always updates
                self._update(step // every, raw_mean)
                self._made = None
            self._step = step
        if self._made is None:
            self._made = self._transform(parameters, noise_std)
        return self._made

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "exp_avg": _cloned(self._exp_avg), "exp_avg_sq": _cloned(self._exp_avg_sq)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._exp_avg, self._exp_avg_sq = _cloned(state["exp_avg"]), _cloned(state["exp_avg_sq"])
        self._made = None

    @torch.no_grad()
    def _update(self, time: int, raw_mean: MeanGradient) -> None:
        """Update the moments by the mean gradient of one batch (schedule "step"), or of all (schedule "epoch")."""
        # v = keep v + add h**2
        if self._rule == "adagrad":
            keep, add = 1.0, 1.0
        elif self._schedule == "step":
            keep, add = self._beta2, 1 - self._beta2
        else:  # the mean of h**2 over all batches takes the place of v
            keep, add = 0.0, 1.0
        squares: Mapping[str, Tensor] = {}
        if self._schedule == "epoch" and self.public is not None:
            mean, squares = _pass_moments(self.public, time)
        else:
            mean = raw_mean() if self.public is None else self.public(time)
        for name, value in mean.items():
            wide = at_least_float32(value)
            if name not in self._exp_avg_sq:
                self._exp_avg_sq[name] = torch.zeros_like(wide)
            for part, h, square in blocks(self._exp_avg_sq[name], wide, squares.get(name)):
                part.mul_(keep)
                part.addcmul_(h, h, value=add) if square is None else part.add_(square, alpha=add)
            if self._rule == "adam":  # M = beta1 M + (1 - beta1) h
                if name not in self._exp_avg:
                    self._exp_avg[name] = torch.zeros_like(wide)
                self._exp_avg[name].mul_(self._beta1).add_(value, alpha=1 - self._beta1)

    @torch.no_grad()
    def _transform(self, parameters: Mapping[str, Tensor], noise_std: float) -> Transform:
        """Return 1 / A, `keep` and the shift (1 - keep) M, from the moments."""
        unit = self._noise_eps * noise_std
        # Reuse the memory of the last step: to allocate it would take as long as to fill it.
        kept = self._inverse
        new = {n: torch.empty_like(at_least_float32(p.detach())) for n, p in parameters.items() if n not in kept}
        self._inverse = {n: new[n] if n in new else kept[n] for n in parameters}
        for name, scales in self._inverse.items():
            for square, part in blocks(self._exp_avg_sq[name].to(scales.dtype), scales):
                if self._eps is None:  # A = 1 + sqrt(v) / (noise_eps noise_std)
                    torch.sqrt(square, out=part).div_(unit).add_(1)
                else:  # A = sqrt(v) + eps
                    torch.sqrt(square, out=part).add_(self._eps)
                part.reciprocal_()
        shift = {name: (1 - self._keep) * average for name, average in self._exp_avg.items()} if self._keep < 1 else {}
        return Transform(self._inverse, self._keep, shift)


def public_rmsprop(
    gradient: PublicGradient,
    *,
    alpha: float = 0.9,
    noise_eps: float | None = None,
    eps: float | None = None,
    schedule: Schedule = "step",
    every: int | None = None,
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with RMSProp's scales, from public data.

    Computes, with h the mean gradient on a public batch: v = alpha v + (1 - alpha) h**2, where v is 0 at first and
        is updated before its use; A = 1 + sqrt(v) / (noise_eps noise_std), with the plan's noise_std; each example's
        g becomes g / A. With eps in place of noise_eps: A = sqrt(v) + eps. With the schedule "epoch", v is replaced at
        the start of each expected pass over the private data by the mean of h**2 over all public batches.

    Args:
        gradient: the gradient on public data, of the model that is trained.
        alpha: the decay rate of v, in [0, 1).
        noise_eps: > 0, in standard deviations of the noise; None: 10, unless eps is given. Where sqrt(v) is well below
            noise_eps * noise_std, gradients stay as they are; where it is well above, they are divided by it. So no
            coordinate is enlarged, and C keeps its unit.
        eps: > 0, in place of noise_eps, in gradient units. Coordinates that the public data do not reach are then
            divided by eps (1e-5 in the paper), and may take up all of C.
        schedule: "step" (the paper) or "epoch" (the authors' code).
        every: with the schedule "step", the number of steps for which scales are kept, >= 1; then v is updated by the
            next public batch. None: 4. The paper has 1, which takes longer.
    Raises:
        PrivacyError: a number is out of range.
    Privacy:
        This costs no privacy: it uses public data and released weights only. The sensitivity is C in the
        preconditioned space.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 1.
    """
    return Moments(
        gradient, "rmsprop", betas=(0.0, alpha), noise_eps=noise_eps, eps=eps, schedule=schedule, every=every
    )


def public_adam(
    gradient: PublicGradient,
    *,
    betas: tuple[float, float] = (0.9, 0.9),
    keep: float = 0.9,
    noise_eps: float | None = None,
    eps: float | None = None,
    schedule: Schedule = "step",
    every: int | None = None,
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with Adam's scales and a share of public momentum.

    Computes: v and A as in `public_rmsprop`, with alpha = beta2; M = beta1 M + (1 - beta1) h; each example's g becomes
        (keep g + (1 - keep) M) / A. Adam's bias correction is applied to neither v nor M.

    The sections Raises, Privacy and Reference of `public_rmsprop` hold here too, and the arguments are as there, except
    `betas`, the decays (beta1, beta2) of M and of v, each in [0, 1), and `keep`, the share of the private gradient, in
    (0, 1]. `every` holds for M too.
    """
    return Moments(
        gradient, "adam", betas=betas, keep=keep, noise_eps=noise_eps, eps=eps, schedule=schedule, every=every
    )


def public_adagrad(
    gradient: PublicGradient,
    *,
    noise_eps: float | None = None,
    eps: float | None = None,
    schedule: Schedule = "step",
    every: int | None = None,
) -> Preconditioner:
    """Return the preconditioner of AdaDPS with AdaGrad's scales: v = v + h**2, and A as in `public_rmsprop`.

    The arguments and the sections Raises, Privacy and Reference are as in `public_rmsprop`. The schedule "epoch" adds
    the mean of h**2 over all public batches once per pass.
    """
    return Moments(gradient, "adagrad", noise_eps=noise_eps, eps=eps, schedule=schedule, every=every)


def raw_ideal_rmsprop(
    *, alpha: float = 0.9, noise_eps: float | None = None, eps: float | None = None
) -> Preconditioner:
    """Return a preconditioner with RMSProp's scales from the private batch itself. NOT private, for research only.

    The scales are neither clipped nor noised. They show how much ideal scales could gain. The arguments are as in
    `public_rmsprop`.

    Privacy:
        There is none: every release is charged as one without noise, so epsilon is infinite.
    Reference:
        Li et al. 2022 (AdaDPS), their "ideal" rows.
    """
    return Moments(None, "rmsprop", betas=(0.0, alpha), noise_eps=noise_eps, eps=eps, schedule="step", every=1)


def _cloned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def _pass_moments(gradient: PublicGradient, time: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the means of h and of h**2 over all public batches."""
    mean: dict[str, Tensor] = {}
    square: dict[str, Tensor] = {}
    batches = 0
    for grads in gradient.one_pass(time):
        batches += 1
        for name, grad in grads.items():
            h = at_least_float32(grad)
            for sums in (mean, square):
                if name not in sums:
                    sums[name] = torch.zeros_like(h)
            mean[name].add_(h)
            square[name].addcmul_(h, h)
    for total in (*mean.values(), *square.values()):
        total.div_(batches)
    return mean, square
