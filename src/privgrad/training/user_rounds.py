"""The private step of a server that a federated framework runs: which users a round has, and what they may send."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.errors import BudgetExceededError, expected
from privgrad.ledger.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.perturb.local_training import ReportedUpdate
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.training.external_loop import ExternalLoopStep
from privgrad.types import Batch

_PATIENCE = 10  # rounds in a row in which no user's update counts: they spend epsilon on noise alone


class UserRounds:
    """The rounds of a plan for users. The host sends the model to a round's users and brings their updates.

    `ids` are what the host calls the users: n different ones, the i-th of user i. Errors and warnings begin with the
    public `function` and call the ids `places`; `form` says what users send.

    Privacy:
        The guarantee of PrivateGradient, for users: a round is charged before its model is returned. An update counts
        at most once and is clipped; all else that users send is ignored. Warnings are for the server only.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        optimizer: PrivateOptimizer,
        plan: PrivacyPlan,
        *,
        ledger: Ledger | str | os.PathLike[str] | None,
        ids: Sequence[Any] | None,
        places: str,
        form: str = "send w - w_last, while FedAvg's clients send w_last",
    ) -> None:
        self.private_grad = PrivateGradient(model, no_loss, plan, perturb=ReportedUpdate(), ledger=ledger)
        self.private_step = ExternalLoopStep(function, model, self.private_grad, optimizer)
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self._function, self._places, self._form = function, places, form
        self.ids = None if ids is None else self._require_ids(ids)
        self.is_recalled = False  # whether the ids are those of an earlier run, which may be gone
        self._draws: Iterator[Batch] | None = None
        self._lost = list[str]()  # why no update counted, of each of the last rounds in a row
        self._warned = set[str]()

    def settle(self, ids: Sequence[Any]) -> tuple[Any, ...]:
        """Keep the users' ids for the whole run, if none were given, or those of an earlier run are gone."""
        if self.ids is None or self.is_recalled:
            self.ids, self.is_recalled = self._require_ids(sorted(ids)), False
        return self.ids

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters by name, whose updates users send."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def draw(self) -> Batch:
        """Draw the users of the next round; raise BudgetExceededError if all are done, or were not resumed."""
        if len(self._lost) >= _PATIENCE:
            got = f"{len(self._lost)} rounds in a row without one ({self._lost[-1]})"
            remedy = "repair this and resume from the last state, or begin again with a new ledger"
            raise expected(self._function, "users", "to send updates that count", got, remedy)
        if self._draws is None:
            self.private_step.require_unspent()
            self._draws = self._begin()
        for batch in self._draws:
            return batch
        condition, remedy = f"to be at most the plan's {self.plan.steps}", "start with num_rounds=plan.steps"
        raise expected(self._function, "rounds", condition, self.plan.steps + 1, remedy, BudgetExceededError)

    def release(self, batch: Batch, found: Sequence[dict[str, Tensor] | str]) -> None:
        """Release the round's mean update, and step with it.

        Args:
            batch: of `draw`, once.
            found: of each user drawn, in their order: the update that `checked` returned, or why there is none.
        """
        updates = [one for one in found if isinstance(one, dict)]
        self._suspect(updates, [one for one in found if isinstance(one, str)])
        rows = {
            name: torch.stack([update[name] for update in updates]) if updates else p.new_zeros(0, *p.shape)
            for name, p in self.trained().items()
        }
        self.private_step.release(replace(batch, examples=rows, size=len(updates)))
        self.optimizer.step(grad=self.private_step.take())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later run needs to resume, in addition to the ledger: post-processing, no keys."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "private_step": self.private_step.state_dict(),
            self._places: self.ids,  # in an epoch, a user with another number could be in two rounds
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of this run and ledger. Rounds that were charged after it stay spent."""
        self.private_step.load_state_dict(state["private_step"], updates=state["private_step"]["private_grad"]["step"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        ids = state.get(self._places) and tuple(state[self._places])  # a format of files may make it a list
        if self.plan.sampling == "epochs" and None not in (ids, self.ids) and ids != self.ids:
            got = f"{len(self.ids or ())} ids that differ, or in another order"
            raise expected(
                self._function, self._places, "to be those of the run that is resumed", got, "leave them out"
            )
        # Flower's simulation gives nodes new ids. A Poisson cohort does not depend on who had which number before.
        self.is_recalled = self.ids is None and ids is not None and self.plan.sampling != "epochs"
        self.ids = self.ids or ids
        self._draws, self._lost = self._begin(), []

    def warn_once(self, topic: str, told: str) -> None:
        """Warn, the first time of a topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"{self._function}: {told}", stacklevel=4)

    def _begin(self) -> Iterator[Batch]:
        """Return the plan's draws of users, from the next round on."""
        users = TensorDataset(torch.arange(self.plan.num_examples))
        key = self.private_grad.ledger.epoch_key
        return self.plan.batches(users, start=self.private_grad.state_dict()["step"], epoch_key=key)

    def _suspect(self, updates: Sequence[dict[str, Tensor]], reasons: Sequence[str]) -> None:
        """Warn once if no update of a round counts, and once if most look like weights, as FedAvg's clients send."""
        # A small cohort of users who are offline, or a local training that brings the weights near 0, warns wrongly.
        if updates:
            self._lost = []
        elif reasons:
            self._lost.append(", ".join(f"{number} x {reason}" for reason, number in Counter(reasons).most_common(3)))
            told = f"no user's update counts in this round, which adds noise only and is charged ({self._lost[-1]})"
            self.warn_once("none counts", told)
        # An update that would move the weights to less than half of their length may be weights.
        parameters = self.trained()
        near = sum(float(p.square().sum()) for p in parameters.values()) / 4
        left = [sum(float((p - one[name]).square().sum()) for name, p in parameters.items()) for one in updates]
        if 2 * sum(one < near for one in left) > len(updates):
            self.warn_once("weights", f"most updates are near the weights themselves; {self._form}")

    def _require_ids(self, ids: Sequence[Any]) -> tuple[Any, ...]:
        """Raise PrivacyError unless each user has one id: with two, a user would contribute twice what is charged."""
        if not len(set(ids)) == len(ids) == self.plan.num_examples:
            condition = f"to be {self.plan.num_examples} different ids, one for each user"
            got = f"{len(ids)} ids, {len(set(ids))} of them different"
            raise expected(self._function, self._places, condition, got, "give them in the order of the users")
        return tuple(ids)


def checked_update(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | str:
    """Return an update of just these parameters that a user sent, or why it does not count."""
    if values.keys() != parameters.keys():
        more, missing = sorted(values.keys() - parameters.keys()), sorted(parameters.keys() - values.keys())
        return f"names that the server does not train {more[:3]} and missing names {missing[:3]}"
    for name, p in parameters.items():
        if not values[name].is_floating_point() or values[name].shape != p.shape:
            got = f"{tuple(values[name].shape)} of {values[name].dtype}"
            return f"{name!r} of shape {got}, not {tuple(p.shape)} of floating-point numbers"
    if not all(bool(value.isfinite().all()) for value in values.values()):
        return "an update that is not finite"
    if not any(bool(value.any()) for value in values.values()):
        return "an update of zero, from no examples or a local training that diverged"
    return {name: values[name].to(p) for name, p in parameters.items()}  # PrivateGradient clips it


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    """Raise an error: ReportedUpdate computes no loss, and this one stands in its place."""
    raise NotImplementedError
