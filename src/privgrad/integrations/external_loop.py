"""The private step in a training loop that another framework runs; shared by the bridges to such frameworks.

The privacy guarantee rests on `PrivateGradient`, which this calls. When a run resumes, it also rests on
`ExternalLoopStep.load_state_dict`, which refuses a checkpoint with steps that its ledger has not charged.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from privgrad.checkpoint import OtherRunError, damage_refused, require_resumable, settings_of
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.optim import PrivateOptimizer
from privgrad.optim.public_data import require_named_source, require_separate
from privgrad.participations import first_step_of_new_groups
from privgrad.private_gradient import PrivateGradient
from privgrad.reading import Collate
from privgrad.types import Batch, NoisyGradient

_VERSION = 4
PRIVATE_OPTIONS = (
    *("perturb", "precondition", "clip", "engine", "microbatch_size", "memory_mb"),
    *("norm_bins", "adaptive_clip", "filter"),
)
_PATIENCE = 10  # updates until every parameter must have moved: a warm-up may start with a learning rate of zero


def require_private_options(function: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of PrivateGradient that a bridge passes on.

    `integrations.lightning` calls it.

    Raises:
        PrivacyError: the bridge itself decides an option, or PrivateGradient has no such option.
    """
    if unknown := unknown_options(options):
        condition, remedy = f"to be among {', '.join(PRIVATE_OPTIONS)}", "leave the others out"
        raise expected(function, "private_options", condition, ", ".join(unknown), remedy)
    return dict(options or {})


def unknown_options(options: Mapping[str, Any] | None) -> list[str]:
    """Return the names that are no options of PrivateGradient, or that a bridge itself decides.

    `integrations.huggingface_arguments` calls it.
    """
    return sorted((options or {}).keys() - set(PRIVATE_OPTIONS))


class ExternalLoopStep:
    """The part of a host framework's loop that touches private data.

    It draws the batches, and keeps each released gradient until the one update that uses it. It also adds the private
    state to the host's checkpoint, and checks that training moved every parameter. The bridges to Flower, Hugging Face
    and Lightning each hold one and call its methods.

    Args:
        function: name of the public class or function that error messages start with.
        model: the model that the host trains.
        private_grad: the PrivateGradient of that model; its ledger records the privacy spent.
        optimizer: from privgrad.optim, over the same model.
    Raises:
        PrivacyError: the optimizer is not from privgrad.optim, or does not hold every trainable parameter of the model.
    Privacy:
        Releases only the gradients of private_grad, on which the guarantee rests.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        private_grad: PrivateGradient,
        optimizer: object,
    ) -> None:
        if not isinstance(optimizer, PrivateOptimizer):
            remedy = "create it from privgrad.optim with model.named_parameters()"
            raise expected(function, "optimizer", "to take released gradients", type(optimizer).__name__, remedy)
        require_named_source(function, optimizer, private_grad.ledger.plan_facts["side_information"] or "")
        self.private_grad = private_grad
        self.optimizer = optimizer
        self.epoch_steps = private_grad.plan.epoch_steps
        self._function, self.model = function, model
        self._require_held()
        self._settings = {
            "clip": private_grad.settings["clip"],
            **settings_of("optimizer", optimizer, optimizer.settings),
        }
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._gradient: NoisyGradient | None = None
        self._batches: Iterator[Batch] = iter(())
        self._source: tuple[object, object] = (None, None)  # data set and collate of self._batches
        self._position = -1  # step of its next batch
        self._unmoved: dict[str, tuple[float, float]] | None = None
        self._looks = 0

    @property
    def is_spent(self) -> bool:
        """Return whether every step of the plan was released. The host may have made fewer updates."""
        return self.private_grad.state_dict()["step"] >= self.private_grad.plan.steps

    def batches(
        self, dataset: Dataset[Any] | Sequence[Any], *, updates: int, collate: Collate | None, **loading: Any
    ) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch of 1 / sample_rate steps, after `updates` updates.

        Worker processes live on between epochs, and load the first batches of the next one in advance.

        Args:
            dataset: as in plan.batches.
            updates: number of updates that the host has made.
            collate: as in plan.batches.
            loading: num_workers, prefetch_factor and pin_memory, as in plan.batches.
        """
        require_separate(self._function, dataset, self.optimizer, self.private_grad.precondition)
        start, left = self.private_grad.state_dict()["step"], self.epoch_steps - updates % self.epoch_steps
        if self._position != start or self._source[0] is not dataset or self._source[1] is not collate:
            plan = self.private_grad.plan
            if plan.seed is None:  # noise with memory begins again with another iterator
                start = min(plan.steps, first_step_of_new_groups(start, plan.bands))
            self._batches = plan.batches(dataset, start=start, collate=collate, **loading)
            self._source = (dataset, collate)
        for batch in islice(self._batches, left):
            self._position = batch.sampling.step + 1
            yield batch

    def release(self, batch: Batch) -> None:
        """Release the gradient of a batch, and keep it until `take`.

        Raises:
            PrivacyError: the previous gradient was not taken, for example because gradients are accumulated. It was
                already charged to the ledger.
        """
        if self._gradient is not None:
            condition, remedy = (
                "to be used by one update",
                "turn off gradient accumulation and skipped updates, and resume",
            )
            raise expected(self._function, "each released gradient", condition, 0, remedy)
        self._require_held()  # parameters may have been unfrozen since
        self._look()
        self._gradient = self.private_grad(batch)

    def take(self) -> NoisyGradient:
        """Return the released gradient, once.

        Raises:
            PrivacyError: no gradient was released since the last call.
        """
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            remedy = "let the framework run the step: one batch, one gradient, one update"
            raise expected(self._function, "each update", "to have a released gradient", None, remedy)
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the host's checkpoint needs in addition to model and optimizer.

        Privacy:
            Post-processing of released values; it holds no key of the noise.
        """
        private = {"private_grad": self.private_grad.state_dict(), "ledger": self.private_grad.ledger.head}
        return {**self._facts, **private, "trained": self._trained}

    def load_state_dict(self, state: Mapping[str, Any], *, updates: int) -> None:
        """Resume from a checkpoint.

        Steps that were released after the checkpoint stay spent. Under a research seed they are computed again.

        Args:
            state: what state_dict returned.
            updates: number of updates that the host had made at the checkpoint.
        Raises:
            PrivacyError: the state belongs to another run, or to another ledger.
        """
        plan, ledger = self.private_grad.plan, self.private_grad.ledger
        self._gradient = None  # left by an interrupted update
        with damage_refused(self._function, "the checkpoint"):
            require_resumable(state, **self._facts, ledger=ledger)
            self._require_trained(state["trained"])
            self.private_grad.load_state_dict(state["private_grad"])
        if plan.seed is None:
            spent = min(ledger.next_step, plan.steps)
            lost = spent - state["private_grad"]["step"]
            if lost:
                left = updates + plan.steps - spent
                advice = "More frequent checkpoints lose fewer"
                if spent >= plan.steps:
                    advice = "The plan has none left; an early stop charges those that it leaves unused"
                reason = "charged steps came after the checkpoint and stay spent"
                if plan.correlation is not None:
                    reason = "steps came after the checkpoint, or are left out because noise with memory begins again"
                warnings.warn(
                    f"{lost} {reason}: this run ends with {left} updates of {plan.steps}. {advice}",
                    stacklevel=3,
                )
            self.private_grad.load_state_dict(self.private_grad.state_dict() | {"step": spent})

    def _require_trained(self, before: Sequence[str]) -> None:
        """Raise OtherRunError unless the run began with the trainable parameters that it has now."""
        if changed := sorted({*before} ^ {*self._trained}):
            names = f"{', '.join(changed[:3])}{', ...' if changed[3:] else ''}"
            counts = f"{len(before)} trainable parameters, now {len(self._trained)}"
            raise OtherRunError(f"{counts}; these were frozen or unfrozen: {names}")

    @property
    def _facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint and the run that resumes from it must share."""
        return {"version": _VERSION, "seed": self.private_grad.plan.seed, "settings": self._settings}

    def require_unspent(self) -> None:
        """Raise BudgetExceededError if a new training would continue a ledger that already holds releases."""
        if spent := self.private_grad.ledger.releases:
            remedy = (
                "resume from a checkpoint, if one was written, or train in a new folder and add up both epsilons and "
                "both deltas"
            )
            condition, got = "to be empty at the start of a training", f"{spent} releases"
            raise expected(self._function, "the ledger", condition, got, remedy, BudgetExceededError)

    def require_moved(self) -> None:
        """Raise PrivacyError if a parameter has not changed since the first step of this process."""
        self._look(last=True)

    def _require_held(self) -> None:
        """Raise PrivacyError unless the optimizer holds every trainable parameter."""
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            remedy = "create the optimizer from this model, after adapters are added to it"
            got = f"an optimizer without {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            raise expected(self._function, "optimizer", "to hold every trainable parameter", got, remedy)

    def _look(self, *, last: bool = False) -> None:
        """Check which parameters have moved since the first step of this process.

        `release` calls this before each gradient, and `require_moved` at the end of training. It finds mistakes of the
        loop only; the guarantee does not rest on it.

        Args:
            last: whether training has ended. A parameter that has not moved is then an error at once.
        Raises:
            PrivacyError: a trainable parameter has not moved after _PATIENCE updates, or at the end.
        """
        if self._unmoved == {} or (last and self._unmoved is None):
            return
        now = {name: _fingerprint(p) for name, p in self.model.named_parameters() if p.requires_grad}
        before = now if self._unmoved is None else self._unmoved
        self._unmoved = {name: mark for name, mark in before.items() if now.get(name) == mark}
        self._looks += 1
        if self._unmoved and (last or self._looks > _PATIENCE):
            names = list(self._unmoved)
            got = f"{self._looks - 1} updates without effect on {', '.join(names[:3])}{', ...' if names[3:] else ''}"
            remedy = "raise the learning rate, keep parameters in float32, or freeze those that need no training"
            raise expected(self._function, "every trainable parameter", "to move", got, remedy, PrivacyError)


def _fingerprint(parameter: nn.Parameter) -> tuple[float, float]:
    """Return two numbers that change with the parameter; a copy of a large model would not fit in memory."""
    value: Any = parameter.detach()
    return float(value.sum(dtype=torch.float64)), float(value.norm(dtype=torch.float64))
