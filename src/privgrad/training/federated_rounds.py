"""The rounds that a federated framework runs: of a server for users, and of a site for its own records."""

import hashlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.errors import BudgetExceededError, expected, require_integer
from privgrad.ledger.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.perturb.local_training import ReportedUpdate
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.loading import Data
from privgrad.training.checkpoint import damage_refused, read_checkpoint, write_checkpoint
from privgrad.training.external_loop import ExternalLoopStep
from privgrad.types import Batch

_PATIENCE = 10  # rounds in a row in which no user's update counts: they spend epsilon on noise alone
_SHARE = 0.05  # of a site's time, that checkpoints within a round may take


class Rounds:
    """A run that a host drives: model, optimizer and private step, as a state that a later process resumes from."""

    private_step: ExternalLoopStep
    _function: str

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later run needs to resume, in addition to the ledger: post-processing, no keys."""
        step = self.private_step
        parts = {"model": step.model, "optimizer": step.optimizer, "private_step": step}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of this run and ledger. Steps that were charged after it stay spent."""
        step = self.private_step
        step.load_state_dict(state["private_step"], updates=state["private_step"]["private_grad"]["step"])
        step.model.load_state_dict(state["model"])
        step.optimizer.load_state_dict(state["optimizer"])

    def write(self, checkpoint: Path) -> None:
        """Write the state to a file, in the format that publishing reads."""
        write_checkpoint(self.state_dict() | {"averaged": None}, checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Load a checkpoint, or write the first one: a run that is killed in its first round resumes too."""
        if checkpoint.exists():
            with damage_refused(self._function, checkpoint):
                state = read_checkpoint(checkpoint)
            self.load_state_dict(state)
        else:
            self.private_step.require_unspent()
            self.write(checkpoint)


class UserRounds(Rounds):
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
        return super().state_dict() | {self._places: self.ids}  # in an epoch, another number could be in two rounds

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
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
        """Warn once if no update of a round counts, or not all of sites, and once if most look like weights."""
        # A small cohort of users who are offline, or a local training that brings the weights near 0, warns wrongly.
        said = ", ".join(f"{number} x {reason}" for reason, number in Counter(reasons).most_common(3))
        if updates:
            self._lost = []
            if reasons and self.plan.user == "site":  # of thousands of devices, some are always away
                self.warn_once(said, f"some updates do not count: {said} (NOT PRIVATE: do not publish this warning)")
        elif reasons:
            self._lost.append(said)
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


class SiteRounds(Rounds):
    """The rounds of a site: each begins at weights of the server, and makes the next private steps of the site's plan.

    A site that is killed resumes within its round, by a checkpoint next to its ledger. If the server sends the same
    weights again, the last answer stands, at no cost. Errors begin with the public `function`. `site` is what the host
    calls the site; "" if it has no name.
    """

    def __init__(
        self,
        function: str,
        private_grad: PrivateGradient,
        optimizer: Any,
        data: Data,
        steps: int,
        collate: Any = None,
        site: str = "",
    ) -> None:
        require_integer(function, "steps", steps, 1)
        if private_grad.ledger.path is None:
            raise expected(function, "the ledger", "to have a path, to last over rounds", None)
        self.private_step = ExternalLoopStep(function, private_grad.model, private_grad, optimizer)
        self._function, self._data, self._steps, self._collate, self._site = function, data, steps, collate, site
        self._asked, self._end = "", 0  # the digest of the round's weights, and the step at which it ends
        self._due = 0.0  # time of the next checkpoint within a round
        path = private_grad.ledger.path
        self._checkpoint = path.with_suffix(".pt") if path.suffix == ".jsonl" else path.with_name(f"{path.name}.pt")
        self.resume(self._checkpoint)

    def train(self, weights: Mapping[str, Tensor]) -> None:
        """Take a round's private steps from these weights; the model then has the answer."""
        if reason := misfit(weights, self.private_step.model.state_dict()):
            remedy = "send the weights of the site's model; if they are NaN, resume the server from an earlier round"
            raise expected(self._function, "the server's weights", "to fit the site's model", reason, remedy)
        asked = hashlib.sha256()
        for name, value in sorted(weights.items()):
            asked.update(name.encode() + value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        if asked.hexdigest() != self._asked:
            start, steps = self._taken, self.private_step.private_grad.plan.steps
            if start >= steps:
                remedy = "leave this site out; in a new folder, add up both epsilons and both deltas"
                got = f"{start} of {steps} taken"
                raise expected(self._function, "steps", "to be left in the plan", got, remedy, BudgetExceededError)
            self.private_step.model.load_state_dict(weights)
            self._asked, self._end = asked.hexdigest(), min(start + self._steps, steps)
            self.write(self._checkpoint)
        else:
            if self._taken >= self._end:
                told = "the server's weights are those of the last round: its answer stands; nothing is trained"
                warnings.warn(f"{self._function}: {told}", stacklevel=2)
            if self._kept[0] == self._taken:  # a host may have loaded the server's weights into the model, to evaluate
                self.private_step.model.load_state_dict(self._kept[1])
        while (taken := self._taken) < self._end:
            batches = self.private_step.batches(self._data, updates=taken, collate=self._collate)
            for batch in islice(batches, self._end - taken):
                self.private_step.release(batch)
                self.private_step.optimizer.step(grad=self.private_step.take())
                if self._taken == self._end or time.monotonic() > self._due:
                    self.write(self._checkpoint)
        if all(torch.equal(weights[name].to(own), own) for name, own in self._kept[1].items()):
            got, remedy = f"{self._taken} charged steps without one", "leave this site out of the round"
            raise expected(self._function, "a round", "to have an update", got, remedy)

    @property
    def _taken(self) -> int:
        return self.private_step.private_grad.state_dict()["step"]

    def write(self, checkpoint: Path) -> None:
        begun = time.monotonic()
        super().write(checkpoint)
        self._keep()
        self._due = time.monotonic() + (time.monotonic() - begun) / _SHARE

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"asked": self._asked, "end": self._end, "site": self._site}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["site"] != self._site:
            got, remedy = f"{self._site!r} and {state['site']!r}", "give the ledger of each site a path of its own"
            raise expected(self._function, "the ledger", "to be that of one site", got, remedy)
        super().load_state_dict(state)
        self._asked, self._end = state["asked"], state["end"]
        self._keep()

    def _keep(self) -> None:
        own = self.private_step.model.state_dict()
        self._kept = self._taken, {name: value.clone() for name, value in own.items()}


def checked_update(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | str:
    """Return an update of just these parameters that a user sent, or why it does not count."""
    if reason := misfit(values, parameters):
        return reason
    if not any(bool(value.any()) for value in values.values()):
        return "an update of zero, from no examples or a local training that diverged"
    return {name: values[name].to(p) for name, p in parameters.items()}  # PrivateGradient clips it


def misfit(values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return why received values have other names or forms than the model, or are not finite; "" if they fit."""
    if values.keys() != own.keys():
        more, missing = sorted(values.keys() - own.keys()), sorted(own.keys() - values.keys())
        return f"names that are not trained here {more[:3]} and missing names {missing[:3]}"
    for name, p in own.items():
        if p.is_floating_point() > values[name].is_floating_point() or values[name].shape != p.shape:
            got = f"{tuple(values[name].shape)} of {values[name].dtype}"
            return f"{name!r} of shape {got}, not {tuple(p.shape)} of {p.dtype}"
    return "" if all(bool(value.isfinite().all()) for value in values.values()) else "numbers that are not finite"


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    """Raise an error: ReportedUpdate computes no loss, and this one stands in its place."""
    raise NotImplementedError
