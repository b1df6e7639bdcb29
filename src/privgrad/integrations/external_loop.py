"""The private step in a training loop that another framework owns: what the bridges to such loops share."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from privgrad.checkpoint import damage_refused, require_resumable
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.gradient.clipping import Clipping
from privgrad.optim import PrivateOptimizer
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling import Collate
from privgrad.types import Batch, NoisyGradient

_VERSION = 3
_PATIENCE = 10  # updates within which every parameter has to move: a warm-up may begin with a learning rate of zero


class ExternalLoopStep:
    """Batches, the gradient between its release and its one use, the checkpoint, and the proof that all was trained.

    Args:
        function: whose arguments these are, for errors.
        model: the model that the host trains.
        private_grad: of that model; its ledger says what is spent.
        optimizer: from privgrad.optim, over the same model.
        clip: private_grad's.
    Raises:
        PrivacyError: the optimizer is none of ours, or has other parameters than the model's trainable ones.
    Privacy:
        Adds nothing to what private_grad releases.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        private_grad: PrivateGradient,
        optimizer: object,
        *,
        clip: Clipping | None = None,
    ) -> None:
        if not isinstance(optimizer, PrivateOptimizer):
            remedy = "give one of privgrad.optim, made of model.named_parameters()"
            raise expected(function, "optimizer", "to be one for released gradients", type(optimizer).__name__, remedy)
        self.private_grad = private_grad
        self.optimizer = optimizer
        self.epoch_steps = max(1, round(1 / private_grad.plan.sample_rate))
        self._function, self.model = function, model
        self._require_held()
        self._settings = {
            "clip": repr(clip),
            "optimizer": type(optimizer).__name__,
            "options": repr(optimizer.defaults),
        }
        self._gradient: NoisyGradient | None = None
        self._unmoved: dict[str, tuple[float, float]] | None = None
        self._looks = 0

    def batches(
        self, dataset: Dataset[Any] | Sequence[Any], *, updates: int, collate: Collate | None
    ) -> Iterator[Batch]:
        """The batches that are left of an epoch of 1 / sample_rate steps, after so many updates in all."""
        start, left = self.private_grad.state_dict()["step"], self.epoch_steps - updates % self.epoch_steps
        return islice(self.private_grad.plan.batches(dataset, start=start, collate=collate), left)

    def release(self, batch: Batch) -> None:
        """Release the gradient of a batch, and keep it until `take`.

        Raises:
            PrivacyError: the last one has not been taken, as where gradients are accumulated: it was paid for.
        """
        if self._gradient is not None:
            remedy = "leave accumulation of gradients and skipping of updates off, and resume"
            raise expected(self._function, "each released gradient", "to make an update", "the next batch", remedy)
        self._require_held()  # what was unfrozen since
        self._look()
        self._gradient = self.private_grad(batch)

    def take(self) -> NoisyGradient:
        """The released gradient, once.

        Raises:
            PrivacyError: there is none.
        """
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            remedy = "let the framework run the step: one batch, one gradient, one update"
            raise expected(self._function, "a released gradient", "for each update", "none", remedy)
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """What the host's checkpoint needs beside model and optimizer. Post-processing; no key."""
        return {**self._facts, "private_grad": self.private_grad.state_dict(), "ledger": self.private_grad.ledger.head}

    def load_state_dict(self, state: Mapping[str, Any], *, updates: int) -> None:
        """Go on from a checkpoint. What was released since is spent; under a research seed it is computed again.

        Args:
            state: of state_dict.
            updates: the host had made by then.
        Raises:
            PrivacyError: the state is another run's, or its ledger is not this one.
        """
        plan, ledger = self.private_grad.plan, self.private_grad.ledger
        self._gradient = None  # of an update that was interrupted
        with damage_refused(self._function, "the checkpoint"):
            require_resumable(state, **self._facts, ledger=ledger)
            self.private_grad.load_state_dict(state["private_grad"])
        if plan.seed is None:
            lost = ledger.releases - state["private_grad"]["step"]
            if lost:
                left = updates + max(0, plan.steps - ledger.releases)
                warnings.warn(
                    f"{lost} charged steps came after the checkpoint, and stay spent: this run ends with {left} "
                    f"updates of {plan.steps}",
                    stacklevel=3,
                )
            self.private_grad.load_state_dict(self.private_grad.state_dict() | {"step": ledger.releases})

    @property
    def _facts(self) -> dict[str, Any]:
        """What a checkpoint and the run that goes on from it have in common."""
        return {"version": _VERSION, "seed": self.private_grad.plan.seed, "settings": self._settings}

    def require_unspent(self) -> None:
        """Raise BudgetExceededError if a run that starts anew would go on with a ledger that is begun."""
        if spent := self.private_grad.ledger.releases:
            remedy = "resume from a checkpoint, or train in a new folder and add the two epsilons up"
            condition, got = "to be new where training starts anew", f"one of {spent} releases"
            raise expected(self._function, "the ledger", condition, got, remedy, BudgetExceededError)

    def require_moved(self) -> None:
        """Raise PrivacyError if a parameter is as it was before the first step of this process."""
        self._look(last=True)

    def _require_held(self) -> None:
        """Raise PrivacyError unless the optimizer holds what is trainable."""
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            remedy = "make the optimizer of this very model, after adapters are added to it"
            got = f"not {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            raise expected(self._function, "optimizer", "to hold every trainable parameter", got, remedy)

    def _look(self, *, last: bool = False) -> None:
        """Drop what has moved by now from what has not; refuse what should have."""
        if self._unmoved == {} or (last and self._unmoved is None):
            return
        now = {name: _fingerprint(p) for name, p in self.model.named_parameters() if p.requires_grad}
        before = now if self._unmoved is None else self._unmoved
        self._unmoved = {name: mark for name, mark in before.items() if now.get(name) == mark}
        self._looks += 1
        if self._unmoved and (last or self._looks > _PATIENCE):
            names = list(self._unmoved)
            got = f"{self._looks - 1} updates without effect on {', '.join(names[:3])}{', ...' if names[3:] else ''}"
            remedy = "raise the learning rate, keep parameters in float32, or freeze what is not to be trained"
            raise expected(self._function, "every trainable parameter", "to move", got, remedy, PrivacyError)


def _fingerprint(parameter: nn.Parameter) -> tuple[float, float]:
    """Two numbers that change when a parameter does: copies of a large model would not fit."""
    value: Any = parameter.detach()
    return float(value.sum(dtype=torch.float64)), float(value.norm(dtype=torch.float64))
