"""Choose the point at which gradients are computed: one point per example (BAM), or one point for all (SAT).

The privacy guarantee rests on this file: a point may depend on one example, on public numbers and on released
gradients only.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import described, expected
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.module_state import replaced
from privgrad.types import LossFunction, NoisyGradient, PrivacyUnit, count_examples, map_examples

Mode = Literal["sam", "exact"]
Radius = float | Callable[[int], float]
MeanGradient = Callable[[], Mapping[str, Tensor]]


class Engine(Protocol):
    """An engine that computes per-example gradients, at the weights or near them."""

    def __call__(self, examples: Any) -> Mapping[str, Factor]: ...

    def moved(self, examples: Any, radius: float, *, exact: bool) -> Mapping[str, Factor]: ...

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> Mapping[str, Factor]: ...

    def microbatch_size(self, examples: Any) -> int: ...

    def moved_size(self, size: int, *, exact: bool) -> int: ...


class Perturbation:
    """The base class for the point at which per-example gradients are computed; by default the current weights.

    PrivateGradient calls its methods in each step.

    Args:
        radius: >= 0, in parameter units: a number, or a function step -> number, with steps counted from 0. Public: a
            schedule may not depend on private data. It is called once per step.
    Attributes:
        is_public: False if the point depends on the whole private batch. Then nothing is private.
        privacy_unit: the unit in one row of the batch: an "example", or a "user" with all of their examples.
    Privacy:
        The library trusts a subclass of yours. Each row that `gradients` and `losses` return may depend on that row of
        the batch, on public numbers and on released gradients only; the point of `at` on the last two only. If the
        point follows the mean gradient of the batch, one example more or less changes the contributions of all others.
        Each contribution is still bounded, but the guarantee is void. Set is_public = False for such a point.
    """

    is_public = True
    privacy_unit: PrivacyUnit = "example"
    _called, _usual, _positive = "radius", "0.02 say; 0 is no perturbation", False

    def __init__(self, radius: Radius) -> None:
        self._radius = radius
        first = self.radius(0)
        if type(self) is Perturbation and (callable(radius) or first > 0):
            raise expected("Perturbation", "radius", "to be 0, for it moves nothing", radius, "use BAM or SAT")

    def __repr__(self) -> str:
        radius = self._radius
        return self._description(
            getattr(radius, "__qualname__", type(radius).__qualname__) if callable(radius) else f"{radius:g}"
        )

    def described(self, steps: int) -> str:
        """Return a text that identifies the radii of a run of `steps` steps, whatever function returns them."""
        if not callable(self._radius):
            return repr(self)
        radii = [self.radius(step) for step in range(steps)]
        digest = hashlib.sha256(repr(radii).encode()).hexdigest()[:8]
        return self._description(f"{radii[0]:g} to {radii[-1]:g} in {steps} steps, {digest}")

    def _description(self, radius: str) -> str:
        return f"{type(self).__name__}(radius={radius})"

    def radius(self, step: int) -> float:
        """Return the radius of a step.

        Raises:
            PrivacyError: it is not a finite number >= 0 (> 0 for a learning rate).
        """
        radius: object = self._radius
        if callable(self._radius):
            try:
                radius = self._radius(step)
            except Exception as error:  # whatever a schedule may raise
                radius = error
        number = isinstance(radius, int | float) and not isinstance(radius, bool) and 0 <= radius < math.inf
        if not number or (self._positive and radius == 0):
            remedy = f"give a Python number, {self._usual}"
            name = f"{self._called} at step {step}" if callable(self._radius) else self._called
            condition = f"to be a finite number {'>' if self._positive else '>='} 0"
            raise expected(type(self).__name__, name, condition, repr(radius), remedy)
        return float(cast(float, radius))

    def begun(self) -> "Perturbation":
        """Return a copy with fresh state for one PrivateGradient."""
        return self

    @contextmanager
    def at(self, radius: float, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        """Move the weights to the point of one step, for all examples, and restore them afterwards.

        Args:
            radius: the radius of the step.
            parameters: the trainable parameters, by name.
            raw_mean: returns the mean gradient of the private batch, not clipped, for research only. NOT private; it
                raises PrivacyError if is_public is True.
        """
        del radius, parameters, raw_mean
        yield

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Return a function (model, rows) -> one loss per row of the batch, made from one loss per example."""
        return loss_fn

    def microbatch_size(self, engine: Engine, examples: Any) -> int:
        """Return the number of rows to compute at once if the user gives none."""
        return engine.microbatch_size(examples)

    def chunks(
        self, engine: Engine, examples: Any, size: int, radius: float
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """Yield the `gradients` of the batch in chunks of at most `size` rows, each with its number of rows.

        Each row of the batch is in at most one chunk.
        """
        for start in range(0, count_examples(examples), size):
            part = map_examples(itemgetter(slice(start, start + size)), examples)
            yield count_examples(part), self.gradients(engine, part, radius)

    def divide(self, inverse_scales: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Receive the public scales of one step; return those by which PrivateGradient still has to divide."""
        return inverse_scales

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        """Return per-example gradients by parameter name; each row depends on that example alone."""
        del radius
        return engine(examples)

    def released(self, gradient: NoisyGradient) -> None:
        """Receive the released gradient of the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; post-processing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        del state


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
        if mode not in get_args(Mode):
            raise expected("BAM", "mode", "to be 'sam' or 'exact'", repr(mode), "choose one")
        super().__init__(radius)
        self.mode: Mode = mode

    def _description(self, radius: str) -> str:
        return f"BAM(radius={radius}, mode={self.mode!r})"

    def chunks(
        self, engine: Engine, examples: Any, size: int, radius: float
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        if radius > 0:
            size = engine.moved_size(size, exact=self.mode == "exact")
        return super().chunks(engine, examples, size, radius)

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        return engine.moved(examples, radius, exact=self.mode == "exact") if radius > 0 else engine(examples)


class SAT(Perturbation):
    """DP-SAT: all gradients are computed at one point, a small step along the last released gradient.

    Computes: the gradients at theta + radius p / |p|, with p the last released gradient; at theta in the first step,
    and if p is zero. The weights are always restored before anything is released.

    Args:
        radius: as in Perturbation; 0 is DP-SGD.
    Raises:
        PrivacyError: the radius is invalid; in use, the loaded state does not fit the model.
    Privacy:
        p was released before, so its use is post-processing and costs nothing.
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
    def at(self, radius: float, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        for name, value in self._direction.items():
            if name not in parameters or value.shape != parameters[name].shape:
                got, remedy = (
                    f"{name!r} of shape {tuple(value.shape)}",
                    "load the state into the same model, or freeze parameters before the first step",
                )
                raise expected("SAT", "its state", "to be of this model", got, remedy)
        with _moved(parameters, self._direction, radius, self._points):
            yield

    def released(self, gradient: NoisyGradient) -> None:
        # A copy, because the gradient may become a .grad and be overwritten.
        for name, value in gradient.items():
            if name in self._direction:
                self._direction[name].copy_(value)
            else:
                self._direction[name] = value.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"direction": {name: value.clone() for name, value in self._direction.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        held = state.get("direction")
        if not isinstance(held, Mapping) or not all(
            isinstance(value, Tensor) and bool(torch.isfinite(value).all())
            for value in cast("Mapping[str, object]", held).values()
        ):
            got = described(held) if not isinstance(held, Mapping) else "a direction with an entry that is not finite"
            raise expected("SAT", "its state", "to hold finite tensors", got, "load a whole, unchanged state")
        self._direction = {name: value.clone() for name, value in cast("Mapping[str, Tensor]", held).items()}


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
    def at(self, radius: float, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        with _moved(parameters, raw_mean(), radius, {}):
            yield


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
