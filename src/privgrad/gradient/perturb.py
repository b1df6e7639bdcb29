"""Where gradients are taken: at a point of each example's own (BAM), or one step along what was released (SAT)."""

import copy
import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.module_state import replaced
from privgrad.types import LossFunction, NoisyGradient, PrivacyUnit, count_examples, map_examples

Mode = Literal["sam", "exact"]
Radius = float | Callable[[int], float]
MeanGradient = Callable[[], Mapping[str, Tensor]]


class Engine(Protocol):
    """Per-example gradients, at the weights or around them."""

    def __call__(self, examples: Any) -> Mapping[str, Factor]: ...

    def moved(self, examples: Any, radius: float, *, exact: bool) -> Mapping[str, Factor]: ...

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> Mapping[str, Factor]: ...

    def microbatch_size(self, examples: Any) -> int: ...

    def moved_size(self, size: int, *, exact: bool) -> int: ...


class Perturbation:
    """What PrivateGradient asks where to take the gradients of a step: at the weights, unless a subclass says else.

    Args:
        radius: >= 0, in parameter units: a number, or step -> number with steps counted from 0. Public: a schedule
            may not look at private data. It is asked once a step.
    Attributes:
        is_public: False if the point is made of the private batch as a whole: then nothing is private.
        privacy_unit: what a row of the batch is: an "example", or a "user" with all of their examples.
    Privacy:
        A subclass of yours is believed: each row that `gradients` and `losses` return has to be made of that row of the
        batch, public numbers and what was released, and `at` of the latter two. An ascent on the batch's mean moves the
        contributions of all when one example comes or goes: each is still bounded, and the guarantee is void. Say
        is_public = False of such a point.
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
        return self._told(
            getattr(radius, "__qualname__", type(radius).__qualname__) if callable(radius) else f"{radius:g}"
        )

    def described(self, steps: int) -> str:
        """What a run of so many steps is known by: the same for the same radii, whatever function gives them."""
        if not callable(self._radius):
            return repr(self)
        radii = [self.radius(step) for step in range(steps)]
        digest = hashlib.sha256(repr(radii).encode()).hexdigest()[:8]
        return self._told(f"{radii[0]:g} to {radii[-1]:g} in {steps} steps, {digest}")

    def _told(self, radius: str) -> str:
        return f"{type(self).__name__}(radius={radius})"

    def radius(self, step: int) -> float:
        """The radius of a step.

        Raises:
            PrivacyError: it is not a finite number >= 0, or > 0 where only that makes sense.
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
        """What serves one PrivateGradient from its first step on: with state of its own, if there is any."""
        return self

    @contextmanager
    def at(self, radius: float, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        """The weights of one step, for all its examples; afterwards they are as they were.

        Args:
            radius: of the step.
            parameters: the trainable ones, by name.
            raw_mean: mean gradient of the private batch, not clipped, for research only. NOT private; refuses to be
                called by what says it is public.
        """
        del radius, parameters, raw_mean
        yield

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """One loss a row of the batch, by what gives one an example."""
        return loss_fn

    def microbatch_size(self, engine: Engine, examples: Any) -> int:
        """How many rows of the batch to take at once, where nobody says."""
        return engine.microbatch_size(examples)

    def chunks(
        self, engine: Engine, examples: Any, size: int, radius: float
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """The batch's `gradients`, at most so many rows at once, each with the number of its rows; each row in at most
        one.
        """
        for start in range(0, count_examples(examples), size):
            part = map_examples(itemgetter(slice(start, start + size)), examples)
            yield count_examples(part), self.gradients(engine, part, radius)

    def divide(self, inverse_scales: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Take over, for one step, dividing by public scales; return those that are left to divide `gradients` by."""
        return inverse_scales

    def gradients(self, engine: Engine, examples: Any, radius: float) -> Mapping[str, Factor]:
        """Each example's gradient, by parameter name: one row an example, made of that example alone."""
        del radius
        return engine(examples)

    def released(self, gradient: NoisyGradient) -> None:
        """Take in what has left."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; post-processing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        del state


class BAM(Perturbation):
    """Bias-aware minimization: each example's gradient at a point that is a small step up its own loss.

    Computes, with g_i the gradient of example i and |g_i| its norm over all parameters, in mode "sam":
        h_i = gradient of the loss of i at theta + radius g_i / |g_i|;
    in mode "exact": h_i = g_i + radius H_i g_i / |g_i|, H_i the Hessian of that loss. They differ by O(radius^2), and
    not at all on a quadratic loss. h_i is what is then divided by scales, clipped and summed. It is the gradient of
    the loss plus radius |g_i|: small gradients lose less to clipping.

    Args:
        radius: as in Perturbation; 0 is DP-SGD. The paper has 0.02 (CIFAR-10), 0.01 (CIFAR-100), 0.005 (ImageNet32).
        mode: "sam" costs a second forward and backward pass, "exact" a backward pass through the backward pass.
    Raises:
        PrivacyError: a radius or mode that is none.
    Privacy:
        h_i depends on example i and the released weights alone, so the sensitivity stays C and the cost that of
        DP-SGD.
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

    def _told(self, radius: str) -> str:
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
    """DP-SAT: all gradients at one point, a small step along the last released gradient.

    Computes: the gradients at theta + radius p / |p|, with p the last released gradient; at theta in the first step,
    and where p is zero. The weights are put back, whatever happens, before anything is released.

    Args:
        radius: as in Perturbation; 0 is DP-SGD.
    Raises:
        PrivacyError: a radius that is none; in use, a state of another model.
    Privacy:
        p has been released: post-processing, at no further cost.
    Reference:
        Park et al. 2023 (DP-SAT). The point is taken once a step, however many microbatches follow.
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
                    "load the state into the private_grad it came from, or freeze parameters before the first step",
                )
                raise expected("SAT", "its state", "to be of this model", got, remedy)
        with _moved(parameters, self._direction, radius, self._points):
            yield

    def released(self, gradient: NoisyGradient) -> None:
        # A copy: it may become a .grad, and be written to.
        for name, value in gradient.values.items():
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
            raise expected("SAT", "its state", "to hold finite tensors", "another", "load a whole, unchanged state")
        self._direction = {name: value.clone() for name, value in cast("Mapping[str, Tensor]", held).items()}


class RawSAM(Perturbation):
    """Sharpness-aware minimization: all gradients a small step up the batch's own mean loss. NOT private.

    The reference without privacy: the point is made of private examples, so every release is charged as one without
    noise, and epsilon is infinite.

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
    """Parameters radius further along a direction, in room that is made where there is none."""
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
