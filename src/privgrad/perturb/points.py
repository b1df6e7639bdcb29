"""Contributions that compute gradients near the weights: one point per example (BAM), or one for all (SAT).

Where one is chosen, the guarantee rests on its point, which may follow public numbers and released gradients only.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_choice, require_in, require_nonnegative, require_positive
from privgrad.gradient.contribution import Contribution, Engine, MeanGradient
from privgrad.gradient.factor import Factors
from privgrad.gradient.functional import replaced
from privgrad.optim.filters import EMA
from privgrad.types import NoisyGradient

Mode = Literal["sam", "exact"]
Radius = float | Callable[[int], float]


class Perturbation(Contribution):
    """The base class of contributions whose gradients are computed at a distance `radius` from the weights.

    The radius is >= 0, in parameter units: a number, or a function step -> number, with steps counted from 0. Public: a
    schedule may not depend on private data, and must always return the same number for the same step.
    """

    def __init__(self, radius: Radius) -> None:
        self.radius = Schedule(type(self).__name__, "radius", radius)

    def __repr__(self) -> str:
        return self.described(0)

    def described(self, steps: int) -> str:
        return f"{type(self).__name__}(radius={self.radius.described(steps)})"


class Schedule:
    """A public number for each step: the radius of perturb.BAM, SAT or RawSAM, or LocalUpdate's learning rate.

    It may not depend on private data, and is always the same for the same step: `described` asks for all steps again.
    """

    def __init__(self, function: str, name: str, value: Radius, *, positive: bool = False) -> None:
        self._function, self._name, self._value = function, name, value
        self._require = require_positive if positive else require_nonnegative
        self._last: tuple[int, float] | None = None  # the last step and its number
        self(0)

    def __call__(self, step: int) -> float:
        """Return the number of a step; raise PrivacyError unless it is finite and in its range."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        value, name = self._value, self._name
        if callable(value):
            value, name = value(step), f"{name} at step {step}"
        self._require(self._function, name, value)
        self._last = step, float(value)
        return self._last[1]

    def described(self, steps: int) -> str:
        """Return a text that identifies the numbers of a run of `steps` steps; for 0 steps, the name of a function."""
        if not callable(self._value):
            return f"{float(self._value):g}"
        if steps == 0:
            return getattr(self._value, "__qualname__", type(self._value).__qualname__)
        values = [self(step) for step in range(steps)]
        digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        return f"{values[0]:g} to {values[-1]:g} in {steps} steps, {digest}"


class BAM(Perturbation):
    """Bias-aware minimization: each gradient is computed a small step up that example's own loss.

    Computes, with g_i the gradient of example i and |g_i| its norm over all parameters, in mode "sam":
        h_i = gradient of the loss of i at theta + radius g_i / |g_i|;
    in mode "exact": h_i = g_i + radius H_i g_i / |g_i|, H_i the Hessian of that loss. The modes differ by O(radius^2),
    and agree on a quadratic loss. h_i is then divided by scales, clipped and summed. It is the gradient of the loss
    plus radius |g_i|, which is lower where gradients are short, and clipping changes short gradients less.

    Args:
        radius: as in Perturbation; 0 is DP-SGD. The paper has 0.02 (CIFAR-10), 0.01 (CIFAR-100), 0.005 (ImageNet32).
        mode: "sam" costs a second forward and backward pass, "exact" a backward pass through the backward pass.
    Raises:
        PrivacyError: the radius or the mode is invalid.
    Privacy:
        h_i depends on example i and the released weights alone. The sensitivity is therefore C, and a step costs as
        much privacy as one of DP-SGD.
    Reference:
        "Bias-Aware Minimization: Understanding and Mitigating Estimator Bias in Private SGD" (BAM), equation 14 and
        algorithm 1. Deviation: their algorithm 2 differentiates the penalized loss at the moved point, which would
        count the penalty twice; and it adds noise to each example, l times the variance that the stated privacy needs.
    """

    def __init__(self, radius: Radius, mode: Mode = "sam") -> None:
        require_choice("BAM", "mode", mode, get_args(Mode))
        super().__init__(radius)
        self.mode: Mode = mode

    def described(self, steps: int) -> str:
        return f"BAM(radius={self.radius.described(steps)}, mode={self.mode!r})"

    def chunks(
        self, engine: Engine, examples: Any, size: int, step: int, inverse_scales: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Factors]]:
        """Yield the `gradients` in chunks, in smaller ones where the engine needs more memory at moved points."""
        if self.radius(step) > 0:
            size = engine.moved_size(examples, size, exact=self.mode == "exact")
        return super().chunks(engine, examples, size, step, inverse_scales)

    def gradients(self, engine: Engine, examples: Any, step: int, inverse_scales: Mapping[str, Tensor]) -> Factors:
        """Return h_i of each row."""
        radius = self.radius(step)
        return engine.moved(examples, radius, exact=self.mode == "exact") if radius > 0 else engine(examples)


class SAT(Perturbation):
    """DP-SAT: all gradients are computed at one point, a small step along the last released gradient.

    Computes: the gradients at theta + radius p / |p|, with p the last released gradient; at theta in the first step,
    and if p is zero. The weights are always restored before anything is released.

    Args:
        radius: as in Perturbation; 0 is DP-SGD.
    Raises:
        PrivacyError: the radius is invalid.
    Privacy:
        p was released before, so its use costs nothing. Other threads must not use the model during a step.
    Reference:
        Park et al. 2023 (DP-SAT). The point is computed once per step, for all microbatches.
    """

    def __init__(self, radius: Radius) -> None:
        super().__init__(radius)
        self._direction: dict[str, Tensor] = {}
        self._points: dict[str, Tensor] = {}  # room for the moved weights, kept from step to step

    def begun(self) -> "SAT":
        own = copy.copy(self)
        own._direction, own._points = {}, {}
        return own

    @contextmanager
    def at(self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        with _moved(parameters, self._direction, self.radius(step), self._points):
            yield

    def released(self, gradient: NoisyGradient) -> None:
        """Keep the released gradient as the direction of the next step."""
        # A copy, because the gradient may become a .grad and be overwritten.
        for name, value in gradient.items():
            if name in self._direction:
                self._direction[name].copy_(value)
            else:
                self._direction[name] = value.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"direction": _cloned(self._direction)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._direction = _cloned(state["direction"])


class DiSK(Contribution):
    """DiSK: all gradients are computed at one point, ahead of the weights by a multiple of their last update.

    Computes: the gradients at theta_t + (1 - weight) / weight (theta_t - theta_{t-1}); at theta_t in the first step. It
    is one half of the method. The other half averages the released gradients: PrivateGradient(...,
    perturb=DiSK(weight), filter=filters.EMA(weight)). PrivateGradient refuses one half without the other.

    Args:
        weight: kappa in (0, 1], the same as that of the filter; 1 is DP-SGD.
    Raises:
        PrivacyError: weight is out of its range.
    Privacy:
        The weights were computed from released gradients, so the use of their last update is post-processing.
    Reference:
        Zhang et al. 2024 (arXiv 2410.03883), with gamma = (1 - kappa) / kappa, where one gradient per example suffices.
    """

    def __init__(self, weight: float) -> None:
        require_in("DiSK", "weight", weight, "(0, 1]")
        self.weight = float(weight)
        self._now: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return f"DiSK({self.weight:g})"

    def require_filter(self, chosen: object) -> None:
        if self.weight < 1 and repr(chosen) != repr(EMA(self.weight)):
            condition, remedy = f"to be the other half of {self!r}", f"give filter=filters.EMA({self.weight:g})"
            raise expected("PrivateGradient", "filter", condition, repr(chosen), remedy)

    def begun(self) -> "DiSK":
        return DiSK(self.weight)

    @contextmanager
    def at(self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        self._now = _cloned(parameters)
        factor = (1 - self.weight) / self.weight
        # theta_{t-1} + (1 + factor) (theta_t - theta_{t-1}) = theta_t + factor (theta_t - theta_{t-1})
        points = {parameters[n]: torch.lerp(before, self._now[n], 1 + factor) for n, before in self._before.items()}
        with replaced(points):
            yield

    def released(self, gradient: NoisyGradient) -> None:
        """Keep the weights of this step for the next one."""
        self._before = self._now

    def state_dict(self) -> dict[str, Any]:
        return {"before": _cloned(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = _cloned(state["before"])


class RawSAM(Perturbation):
    """Sharpness-aware minimization: all gradients are computed a small step up the batch's mean loss. NOT private.

    A reference without privacy: the point depends on the private batch. Every release is therefore charged as one
    without noise, and epsilon is infinite.

    Args:
        radius: as in Perturbation; 0.05 is usual.
    Reference:
        Foret et al. 2021 (SAM).
    """

    is_public = False

    @contextmanager
    def at(self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        with _moved(parameters, raw_mean(), self.radius(step), {}):
            yield


def _cloned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


@contextmanager
def _moved(
    parameters: Mapping[str, nn.Parameter], direction: Mapping[str, Tensor], radius: float, room: dict[str, Tensor]
) -> Generator[None]:
    """Move the parameters by `radius` along a direction; `room` keeps the memory for the moved values."""
    norm = math.hypot(*(float(cast(Tensor, torch.linalg.vector_norm(value))) for value in direction.values()))
    if not 0 < norm < math.inf:
        yield
        return
    for name, value in direction.items():
        held = parameters[name].detach()
        if name not in room or room[name].shape != held.shape or room[name].dtype != held.dtype:
            room[name] = torch.empty_like(held)
        torch.add(held, value.to(held), alpha=radius / norm, out=room[name])
    with replaced({parameters[name]: room[name] for name in direction}):
        yield
