"""Contributions: what each privacy unit, an example or a user, adds to the sum.

PrivateGradient asks its contribution for the gradients of each batch, clips them and adds them. The privacy guarantee
rests on this: each row that a contribution returns depends on one unit, public numbers and released gradients only.
It also rests on `microbatch_size`, which must be public. It does not rest on the texts of `described` and `__repr__`.
"""

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast, get_args

from torch import Tensor, nn

from privgrad.errors import expected, require_choice
from privgrad.gradient.factors.base import Factor
from privgrad.types import LossFunction, NoisyGradient, PrivacyUnit, count_examples, part_of

MeanGradient = Callable[[], Mapping[str, Tensor]]


class Engine(Protocol):
    """An engine that computes per-example gradients, at the weights or near them.

    `engines.factored.Factored` and `engines.vmap.Vmap` implement it. Contributions call it: `perturb.BAM` calls `moved`
    and `moved_size`, and `federated.LocalUpdate` calls `at`. The guarantee needs row i to depend on example i only.
    """

    def __call__(self, examples: Any) -> Mapping[str, Factor]: ...

    def moved(self, examples: Any, radius: float, *, exact: bool) -> Mapping[str, Factor]: ...

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> Mapping[str, Factor]: ...

    def microbatch_size(self, examples: Any, usual_size: int) -> int: ...

    def moved_size(self, examples: Any, size: int, *, exact: bool) -> int: ...


class Schedule:
    """A public number for each step: the radius of perturb.BAM, SAT or RawSAM, or LocalUpdate's learning rate.

    These classes call it in each step, and their `described` calls `described`.

    Args:
        function: the name of the class that takes the number, for errors.
        name: the name of the number, for errors.
        value: a finite number, or a function step -> number, with steps counted from 0. It may not depend on private
            data. It must always return the same number for the same step: `described` calls it for all steps again.
        usual: a usual value, for errors.
        positive: whether the number must be > 0; otherwise it must be >= 0.
    Raises:
        PrivacyError: the number of step 0 is invalid.
    """

    def __init__(self, function: str, name: str, value: object, *, usual: str, positive: bool = False) -> None:
        self._function, self._name, self._value = function, name, value
        self._usual, self._positive = usual, positive
        self._last: tuple[int, float] | None = None  # the last step and its number
        self(0)

    def __call__(self, step: int) -> float:
        """Return the number of a step.

        Raises:
            PrivacyError: it is not a finite number in its range.
        """
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        value = self._value
        if callable(value):
            try:
                value = value(step)
            except Exception as error:  # whatever a schedule may raise
                value = error
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not number or (self._positive and value == 0):
            remedy = f"give a Python number, {self._usual}"
            name = f"{self._name} at step {step}" if callable(self._value) else self._name
            condition = f"to be a finite number {'>' if self._positive else '>='} 0"
            raise expected(self._function, name, condition, repr(value), remedy)
        self._last = step, float(cast(float, value))
        return self._last[1]

    def __repr__(self) -> str:
        value = self._value
        return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else f"{value:g}"

    def described(self, steps: int) -> str:
        """Return a text that identifies the numbers of a run of `steps` steps, whatever function returns them."""
        if not callable(self._value):
            return repr(self)
        values = [self(step) for step in range(steps)]
        digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
        return f"{values[0]:g} to {values[-1]:g} in {steps} steps, {digest}"


class Contribution:
    """The base class of contributions; by default a contribution is the gradient of an example's loss at the weights.

    PrivateGradient calls `begun` and `losses` at its construction. In each step it calls `at`, `microbatch_size`,
    `chunks` (with groups, `gradients`) and `released`. It calls the other methods for records and checkpoints.
    `diagnostics.raw_clipping_bias` calls `begun`, `released`, `at` and `gradients`. SampleGradient, perturb.BAM,
    perturb.SAT, perturb.RawSAM, federated.LocalUpdate and federated.ReportedUpdate are contributions.

    Attributes:
        is_public: False if a row depends on the whole private batch. Then nothing is private.
        privacy_unit: the unit in one row of the batch: an "example", or a "user" with all of their examples.
        applies_scales: True if `gradients` divides by the public scales itself. PrivateGradient divides otherwise.
        keeps_order: True if `chunks` yields the rows in the order of the batch, whose last rows may be padding.
    Privacy:
        The library trusts a subclass of yours. Each row that `gradients` and `losses` return may depend on that row of
        the batch, on public numbers and on released gradients only; the point of `at` on the last two only. If the
        point follows the mean gradient of the batch, one example more or less changes the contributions of all others.
        Each contribution is still bounded, but the guarantee is void. Set is_public = False for such a point.
    """

    is_public = True
    privacy_unit: PrivacyUnit = "example"
    applies_scales = False
    keeps_order = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def described(self, steps: int) -> str:
        """Return a text that identifies what a run of `steps` steps computes; the ledger and checkpoints record it."""
        del steps
        return repr(self)

    def begun(self) -> "Contribution":
        """Return a copy with fresh state for one PrivateGradient."""
        return self

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Return a function (model, rows) -> one loss per row of the batch, made from one loss per example."""
        return loss_fn

    @contextmanager
    def at(self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient) -> Generator[None]:
        """Move the weights to the point of one step, for all examples, and restore them afterwards.

        Args:
            step: the index of the step.
            parameters: the trainable parameters, by name.
            raw_mean: returns the mean gradient of the private batch, not clipped, for research only. NOT private; it
                raises PrivacyError if is_public is True.
        """
        del step, parameters, raw_mean
        yield

    def microbatch_size(self, engine: Engine, examples: Any, usual_size: int) -> int:
        """Return the number of rows to compute at once if the user gives none.

        Args:
            engine: computes per-example gradients.
            examples: the batch. The answer may depend on the shape of one row, but not on the number of rows.
            usual_size: a number of rows that batches rarely exceed. Public.
        Privacy:
            The bound on rounding rests on this. If the number of rows decided the split into chunks, one example could
            change how all others are rounded.
        """
        return engine.microbatch_size(examples, usual_size)

    def chunks(
        self, engine: Engine, examples: Any, size: int, step: int, inverse_scales: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """Yield the `gradients` of the batch in chunks of at most `size` rows, each with its number of rows.

        Each row of the batch is in at most one chunk.
        """
        for start in range(0, count_examples(examples), size):
            part = part_of(examples, slice(start, start + size))
            yield count_examples(part), self.gradients(engine, part, step, inverse_scales)

    def gradients(
        self, engine: Engine, examples: Any, step: int, inverse_scales: Mapping[str, Tensor]
    ) -> Mapping[str, Factor]:
        """Return the gradients of the rows by parameter name; each row depends on that example alone.

        Args:
            engine: computes per-example gradients.
            examples: rows of the batch, with leading dimension >= 1.
            step: the index of the step.
            inverse_scales: 1 / A by parameter name, public; for contributions that apply scales.
        """
        del step, inverse_scales
        return engine(examples)

    def released(self, gradient: NoisyGradient) -> None:
        """Receive the released gradient of the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; post-processing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        del state


class SampleGradient(Contribution):
    """The gradient of each row's loss at the current weights: DP-SGD's contribution, and the default.

    Args:
        privacy_unit: "example"; or "user" for data whose every row holds all data of one person, as
            `data.table(unit=...)` makes them. The plan needs the same unit.
    Raises:
        PrivacyError: the unit is unknown.
    Privacy:
        "user" is a statement of the caller. It is true only if no person has data in two rows.
    """

    def __init__(self, privacy_unit: PrivacyUnit = "example") -> None:
        require_choice("SampleGradient", "privacy_unit", privacy_unit, get_args(PrivacyUnit))
        self.privacy_unit = privacy_unit

    def __repr__(self) -> str:
        return "SampleGradient()" if self.privacy_unit == "example" else f"SampleGradient({self.privacy_unit!r})"
