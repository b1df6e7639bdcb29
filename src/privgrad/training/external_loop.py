"""The private step in a training loop that another framework runs, and what no such framework may change of it."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from privgrad.checks.data import share_rows
from privgrad.errors import BudgetExceededError, expected
from privgrad.optim import PrivateOptimizer
from privgrad.optim.contrib import require_separate
from privgrad.parts import Parts
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.loading import Collate, Data
from privgrad.training.checkpoint import NEW_FOLDER, damage_refused, few, require_resumable, require_same, settings_of
from privgrad.training.run import StopData, first_step, require_optimizer, skip_lost_steps
from privgrad.types import Batch, NoisyGradient

_VERSION = 4
PRIVATE_OPTIONS = tuple(field.name for field in fields(Parts))  # of PrivateGradient, that a bridge passes on
_PATIENCE = 10  # updates until every parameter must have moved: a warm-up may start with a learning rate of zero
_FUTILE = 10  # steps in a row that add noise only, after which a run ends


class Conflict(NamedTuple):
    """A choice that would change the private step or reveal private numbers, and its remedy."""

    got: str
    remedy: str


def refuse(function: str, *conflicts: Iterable[Conflict]) -> None:
    """Raise one PrivacyError that names all conflicts and their remedies, if there are any."""
    if found := [one for some in conflicts for one in some]:
        got, between = ", ".join(one.got for one in found), "\n- " if len(found) > 1 else ""
        remedy = between + f";{between or ' '}".join(one.remedy for one in found)
        raise expected(function, "arguments", "to leave the private step to the plan", got, remedy)


def changed_values(given: object, planned: Mapping[str, tuple[Any, str]]) -> Iterator[Conflict]:
    """Yield the attributes of `given` that differ from their value in `planned`, which also has a reason for each."""
    for name, (value, reason) in planned.items():
        own = getattr(given, name, value)
        if own != value and (own or value):  # what is false is off
            yield Conflict(f"{name}={own!r}", f"set {name}={value!r}" + (f" ({reason})" if reason else ""))


def unknown_options(options: Mapping[str, Any] | None) -> Iterator[Conflict]:
    """Yield the options that PrivateGradient does not have, or that a bridge itself decides."""
    if unknown := sorted((options or {}).keys() - set(PRIVATE_OPTIONS)):
        remedy = f"give private_options among {', '.join(PRIVATE_OPTIONS)}"
        yield Conflict(f"private_options with {', '.join(unknown)}", remedy)


def undeclared_selection(selection_data: object, ways: Sequence[str], removable: str) -> Iterator[Conflict]:
    """Yield a conflict if the `ways` in use choose a model by evaluations of undeclared data."""
    if selection_data not in get_args(StopData) and (selection_data is not None or ways):
        remedy = "give selection_data='public' if the evaluation data hold nobody who needs protection, or 'released' "
        remedy += f"if their scores get noise; otherwise remove {removable} (see docs/before-training.md)"
        yield Conflict(f"selection_data={selection_data!r} with {' and '.join(ways) or 'no use for it'}", remedy)


def evaluated_rows(name: str, evaluated: Iterable[object], trained: Iterable[object]) -> Iterator[Conflict]:
    """Yield a conflict if data that are evaluated have rows of the training data: hosts log and keep exact results."""
    trained = list(trained)
    if any(share_rows(one, own) for one in evaluated for own in trained):
        yield Conflict(f"{name} with rows of the training data", "evaluate other data: results have no noise")


class ExternalLoopStep:
    """The part of a host framework's loop that touches private data. Its errors begin with the public `function`.

    Privacy:
        Releases only the gradients of private_grad. `load_state_dict` refuses a checkpoint with steps that the ledger
        has not charged. That a warning or an error tells of gradients that do not count is NOT private.
    """

    def __init__(self, function: str, model: nn.Module, private_grad: PrivateGradient, optimizer: object) -> None:
        self.optimizer: PrivateOptimizer = require_optimizer(function, private_grad, optimizer)
        self.model = model
        self.private_grad = private_grad
        self.epoch_steps = private_grad.plan.epoch_steps
        self._function = function
        of_optimizer = settings_of("optimizer", self.optimizer, self.optimizer.settings)
        self._settings = {"clip": private_grad.settings["clip"], **of_optimizer}
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._gradient: NoisyGradient | None = None
        self._batches: Iterator[Batch] = iter(())
        self._source: tuple[object, object] = (None, None)  # data set and collate of self._batches
        self._position = -1  # step of its next batch
        self._unmoved: dict[str, tuple[float, float]] | None = None
        self._looks = 0
        self._futile = 0  # steps in a row, up to now, of which no gradient counts
        self._was_told = False

    @property
    def is_spent(self) -> bool:  # every step of the plan was released; the host may have made fewer updates
        return self.private_grad.state_dict()["step"] >= self.private_grad.plan.steps

    def batches(self, dataset: Data, *, updates: int, collate: Collate | None, **loading: Any) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch of 1 / sample_rate steps, after `updates` of the host."""
        require_separate(self._function, dataset, self.optimizer, self.private_grad.precondition)
        start = self.private_grad.state_dict()["step"]
        left = self.epoch_steps - updates % self.epoch_steps
        if self._position != start or self._source[0] is not dataset or self._source[1] is not collate:
            if (first := first_step(self.private_grad, start)) > start:
                self.private_grad.load_state_dict(self.private_grad.state_dict() | {"step": first})
                start = first
            key = self.private_grad.ledger.epoch_key
            self._batches = self.private_grad.plan.batches(
                dataset, start=start, collate=collate, epoch_key=key, **loading
            )
            self._source = (dataset, collate)  # kept, because worker processes load batches of the next epoch
        for batch in islice(self._batches, left):
            self._position = batch.sampling.step + 1
            yield batch

    def release(self, batch: Batch) -> None:
        """Release the gradient of a batch, and keep it until `take`; PrivacyError if the last one was not taken."""
        require_optimizer(self._function, self.private_grad, self.optimizer)  # parameters may have been unfrozen since
        self._look()
        if self._futile >= _FUTILE:
            remedy = "find the overflow, log(0) or 0 / 0 in model or loss (NOT PRIVATE: do not publish this error)"
            raise expected(self._function, f"the last {_FUTILE} steps", "to have a gradient that counts", 0, remedy)
        before = self.private_grad.raw_nonfinite_examples
        self._gradient = self.private_grad(batch)
        nonfinite = self.private_grad.raw_nonfinite_examples - before
        if nonfinite and not self._was_told:
            self._was_told = True
            told = f"{self._function}: step {batch.sampling.step + 1}: gradients were not finite, and count as zero"
            warnings.warn(f"NOT PRIVATE: {told}; do not publish this warning", stacklevel=3)
        if batch.size:
            self._futile = self._futile + 1 if nonfinite >= batch.size else 0

    def take(self) -> NoisyGradient | None:
        """Return the released gradient, once. None, which the optimizer refuses: none was released since."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the host's checkpoint needs besides model and optimizer. It holds no keys."""
        return {
            **self._facts,
            "private_grad": self.private_grad.state_dict(),
            "ledger": self.private_grad.ledger.head,
            "trained": self._trained,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, updates: int) -> None:
        """Resume from a `state_dict`, and the host's number of updates then; refuse one of another run or ledger."""
        self._gradient = None  # left by an interrupted update
        with damage_refused(self._function, "the checkpoint"):
            own = self._function, "the checkpoint"
            require_resumable(*own, state, **self._facts, ledger=self.private_grad.ledger)
            require_same(*own, dict.fromkeys(state["trained"], "trained"), dict.fromkeys(self._trained, "trained"))
            self.private_grad.load_state_dict(state["private_grad"])
        skip_lost_steps(self.private_grad, updates)

    @property
    def _facts(self) -> dict[str, Any]:  # that a checkpoint and the run that resumes from it must share
        return {"version": _VERSION, "seed": self.private_grad.plan.seed, "settings": self._settings}

    def require_unspent(self, cost: str = "") -> None:
        """Raise BudgetExceededError, with what it cost, if a new training would continue a ledger with releases."""
        if spent := self.private_grad.ledger.releases:
            condition = "to be empty at the start of a training"
            got = f"{spent} releases in {self.private_grad.ledger.path}{cost}"
            remedy = f"resume from the last checkpoint, if one was written, or {NEW_FOLDER}"
            raise expected(self._function, "the ledger", condition, got, remedy, BudgetExceededError)

    def require_moved(self) -> None:
        """Raise PrivacyError if a parameter has not changed since this process' first step, or a gradient is unused."""
        self._look(last=True)

    def _look(self, *, last: bool = False) -> None:
        """Raise PrivacyError if a gradient moved nothing, or a parameter has not moved after _PATIENCE updates."""
        if self._gradient is not None:  # it was charged: gradients are accumulated, say
            remedy = "turn off gradient accumulation and skipped updates, and resume"
            raise expected(self._function, "each released gradient", "to be used by one update", 0, remedy)
        if self._unmoved == {} or (last and self._unmoved is None):
            return
        now = {name: _fingerprint(p) for name, p in self.model.named_parameters() if p.requires_grad}
        before = now if self._unmoved is None else self._unmoved
        self._unmoved = {name: mark for name, mark in before.items() if now.get(name) == mark}
        self._looks += 1
        if self._unmoved and (last or self._looks > _PATIENCE):
            got = f"{self._looks - 1} updates without effect on {few(list(self._unmoved))}"
            remedy = "raise the learning rate, keep parameters in float32, or freeze those that need no training"
            raise expected(self._function, "every trainable parameter", "to move", got, remedy)


def _fingerprint(parameter: nn.Parameter) -> tuple[float, float]:
    """Return two numbers that change with the parameter; a copy of a large model would not fit in memory."""
    value: Any = parameter.detach()
    return float(value.sum(dtype=torch.float64)), float(value.norm(dtype=torch.float64))
