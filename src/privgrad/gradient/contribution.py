"""Contributions: what each privacy unit, an example or a user, adds to the sum."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_choice, require_integer
from privgrad.gradient.factor import Factors
from privgrad.types import LossFunction, NoisyGradient, PrivacyUnit, count_examples, leaves_of, map_examples, part_of

MeanGradient = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Use:
    """How the gradient of a parameter is computed."""

    way: str  # "rule"; "copies", from copies of the parameter; or "whole", with a module that is taken whole
    unit: str = ""  # the path of that module, or of the module that owns the parameter; empty for a rule
    why: str = ""  # the functions that need copies, why a module is taken whole, or why a rule is slow
    remedy: str = ""  # what would be faster; empty if nothing is known
    floats: int = 0  # the size of what each example has a copy of; 0 if there is none
    is_cheap: bool = False  # whether copies are a small part of what the engine holds for each example


class Engine(Protocol):
    """An engine that computes per-example gradients; the guarantee needs row i to depend on example i only."""

    batches_examples: bool  # whether examples share a forward pass, and the random numbers that it draws

    def __call__(self, examples: Any) -> Factors: ...
    def begin_step(self) -> None: ...
    def check_again(self, randomness: Any = None) -> None: ...
    def uses(self) -> Mapping[str, Use]: ...
    def moved(self, examples: Any, radius: float, *, exact: bool) -> Factors: ...
    def at(self, examples: Any, moved: Factors, share: float) -> Factors: ...
    def microbatch_size(self, examples: Any, usual_size: int) -> int: ...
    def moved_size(self, examples: Any, size: int, *, exact: bool) -> int: ...


class OwnExamples:
    """A loss_fn that gives the user's loss_fn copies of the examples if it writes to them, as `x.div_(255)` does."""

    def __init__(self, loss_fn: LossFunction, state: Any = None) -> None:
        self.plain, self._writes, self._tries = loss_fn, False, False
        self.state = state  # a `checks.State`, which undoes what a pass changes besides the modules; None: nothing does

    def __call__(self, model: nn.Module, examples: Any) -> Tensor:
        """Return the losses; raise PrivacyError if they wrote to the examples now, and not when they were tried."""
        with nullcontext() if self.state is None else self.state.kept():
            if self._writes:
                return self.plain(model, map_examples(torch.clone, examples))
            leaves = [leaf for leaf in leaves_of(examples) if isinstance(leaf, Tensor)]
            before = [0 if x.is_inference() else x._version for x in leaves]
            losses = self.plain(model, examples)
        if before != [0 if x.is_inference() else x._version for x in leaves]:
            self._writes = True
            if not self._tries:
                remedy = "write to a copy, such as x = x / 255 or labels = labels.clone()"
                raise expected("loss_fn", "examples", "to stay as they are", "a write in place", remedy)
        return losses

    def tried(self, model: nn.Module, examples: Any) -> Tensor:
        """Return the losses, and notice whether the loss writes to examples. `check_loss` gives it copies of a few."""
        self._tries = True
        try:
            return self(model, examples)
        finally:
            self._tries = False


class Contribution:
    """The base class of contributions; by default a contribution is the gradient of an example's loss at the weights.

    In each step PrivateGradient calls `at`, `microbatch_size`, `chunks` (with groups, `gradients`) and `released`; the
    other methods are for records and checkpoints. SampleGradient, perturb.BAM, perturb.SAT, perturb.RawSAM,
    federated.LocalUpdate and federated.ReportedUpdate are contributions.

    Attributes:
        is_public: False if a row depends on the whole private batch. Then nothing is private.
        privacy_unit: the unit in one row of the batch: an "example", or a "user" with all of their examples.
        applies_scales: True if `gradients` divides by the public scales itself. PrivateGradient divides otherwise.
        keeps_order: True if `chunks` yields the rows in the order of the batch, whose last rows may be padding.
        canaries: how many canaries of an audit may be among the rows. If any may be, the ledger and the statement say
            that the model must not be released.
        max_rows: how many rows of a person are used, for the ledger and the statement. None: not known, or no persons.
        rows_by: what names a person, such as a column, for the ledger. None: not known, or no persons.
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
    canaries = 0
    max_rows: int | None = None
    rows_by: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def described(self, steps: int) -> str:
        """Return a text that identifies what a run of `steps` steps computes; the ledger and checkpoints record it."""
        return repr(self)

    def begun(self) -> "Contribution":
        """Return a copy with fresh state for one PrivateGradient."""
        return self

    def losses(self, loss_fn: LossFunction) -> LossFunction:
        """Return a function (model, rows) -> one loss per row of the batch, made from one loss per example."""
        return loss_fn

    def at(
        self, step: int, parameters: Mapping[str, nn.Parameter], raw_mean: MeanGradient
    ) -> AbstractContextManager[None]:
        """Move the weights to the point of one step, for all examples, and restore them afterwards.

        Args:
            step: the index of the step.
            parameters: the trainable parameters, by name.
            raw_mean: returns the mean gradient of the private batch, not clipped, for research only. NOT private; it
                raises PrivacyError if is_public is True.
        """
        return nullcontext()

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
    ) -> Iterator[tuple[int, Factors]]:
        """Yield the `gradients` of the batch in chunks of at most `size` rows, each with its number of rows.

        Each row of the batch is in at most one chunk.
        """
        rows = count_examples(examples)
        for start in range(0, rows, size):
            part = part_of(examples, slice(start, start + size))
            yield min(size, rows - start), self.gradients(engine, part, step, inverse_scales)

    def gradients(self, engine: Engine, examples: Any, step: int, inverse_scales: Mapping[str, Tensor]) -> Factors:
        """Return the gradients of the rows by parameter name; each row depends on that example alone.

        Args:
            engine: computes per-example gradients.
            examples: rows of the batch, with leading dimension >= 1.
            step: the index of the step.
            inverse_scales: 1 / A by parameter name, public; for contributions that apply scales.
        """
        return engine(examples)

    def require_filter(self, chosen: object) -> None:
        """Raise PrivacyError unless PrivateGradient's filter of the released gradients suits this contribution."""

    def released(self, gradient: NoisyGradient) -> None:
        """Receive the released gradient of the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; post-processing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""


class SampleGradient(Contribution):
    """The gradient of each row's loss at the current weights: DP-SGD's contribution, and the default.

    Args:
        privacy_unit: "example"; or "user" for data whose every row holds all data of one person, as
            `data.table(unit=...)` makes them. The plan needs the same unit.
        max_rows: for "user", how many rows of a person are used; a public number for the statement. None: unsaid.
        rows_by: what names a person, such as a column; a resumed training needs the same. None: unsaid.
    Raises:
        PrivacyError: the unit is unknown, or max_rows is no integer >= 1.
    Privacy:
        "user" is a statement of the caller. It is true only if no person has data in two rows.
    """

    def __init__(
        self, privacy_unit: PrivacyUnit = "example", max_rows: int | None = None, rows_by: str | None = None
    ) -> None:
        require_choice("SampleGradient", "privacy_unit", privacy_unit, get_args(PrivacyUnit))
        require_integer("SampleGradient", "max_rows", 1 if max_rows is None else max_rows, 1)
        self.privacy_unit, self.max_rows, self.rows_by = privacy_unit, max_rows, rows_by

    def __repr__(self) -> str:
        return "SampleGradient()" if self.privacy_unit == "example" else f"SampleGradient({self.privacy_unit!r})"
