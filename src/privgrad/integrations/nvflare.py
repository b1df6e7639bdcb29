"""A bridge to NVFlare: a workflow of private rounds, a filter that adds noise, and a site that trains privately."""
# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# NVFlare is not among the packages of the development environment.

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.accounting.accountant import rounded_up
from privgrad.errors import expected
from privgrad.gradient.transform import Preconditioner
from privgrad.ledger.ledger import Ledger
from privgrad.optim import OPTIMIZERS, PrivateOptimizer
from privgrad.perturb.local_training import LocalUpdate, ReportedUpdate, local_update
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.loading import Collate, Data
from privgrad.statement.saved import save
from privgrad.statement.text import statement
from privgrad.training.federated_rounds import SiteRounds, UserRounds, checked_update, misfit, no_loss
from privgrad.types import LossFunction

_POLL = 1.0  # seconds between queries for the connected sites
_NORM, _TRAINED = "max_update_norm", "trained"  # sent to a site with the model
_EPSILON = "epsilon"
_LEDGER, _CHECKPOINT, _ROUNDS, _RELEASED = "ledger.jsonl", "checkpoint.pt", "rounds.jsonl", "released"
_TYPES = "params_type=FULL is for w_last, and DIFF for w_last - w"


class PrivateController(ModelController):
    """A workflow of NVFlare under which every round is one noised, charged mean of clipped updates.

        job.to_server(PrivateController(Net(), plan, folder="/secure/consortium"))

    A round's sites are the plan's secret Poisson draw. Sites may send weights (FULL) or differences (DIFF), as any
    client of NVFlare does. Each update is clipped to max_update_norm, all have the same weight, and the sum is noised
    once and divided by the expected number. A site that is away, late, fails, or sends what is no finite update of this
    model counts nothing; the round is charged all the same. Metrics and numbers of examples are removed unread.

    The job ends when the plan's rounds are spent. After a crash, start the same job again: it resumes from the folder.

    Args:
        model: an instance of a module of yours; NVFlare makes it again on the server from its constructor's arguments.
        plan: from PrivacyPlan.for_users; one user is one site.
        folder: on the server; new, or of this run. It has ledger.jsonl, checkpoint.pt, rounds.jsonl (epsilon and the
            results of `evaluate`, by round) and, at the end, the released model with its statement.
        optimizer: a name of privgrad.optim, of the server's optimizer. SGD with lr 1 is DP-FedAvg.
        optimizer_args: its arguments.
        sites: the n names of the sites. None takes the n that are connected when the first round begins.
        num_rounds: the most rounds of this job, >= 1; None for all that the plan has left.
        timeout: how long a round waits for its sites, in seconds; 0 waits for all that are alive.
    Raises:
        PrivacyError: (in the job, which it ends) a plan for examples; sites that are not one per user; the ledger of
            another plan or in use by another server; ten rounds in a row without an update that counts.
    Privacy:
        That of PrivateGradient, for all data of a site: the ledger is charged before a new model is sent. The server
        and its log must be trusted, because they see who takes part, and each update.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PrivacyPlan,
        folder: str,
        optimizer: str = "SGD",
        optimizer_args: dict[str, Any] | None = None,
        sites: list[str] | None = None,
        num_rounds: int | None = None,
        timeout: int = 600,
    ) -> None:
        # NVFlare writes an object's arguments to the job from attributes of the same name.
        super().__init__(persistor_id="", ignore_result_error=True)
        if optimizer not in OPTIMIZERS:
            raise expected("PrivateController", "optimizer", f"to be one of {', '.join(OPTIMIZERS)}", optimizer)
        self._model, self._plan, self._folder, self._sites = model, plan, os.path.abspath(folder), sites
        self._optimizer, self._optimizer_args = optimizer, {"lr": 1.0} if optimizer_args is None else optimizer_args
        self._num_rounds, self._timeout = num_rounds, timeout

    def add_to_fed_job(self, job: Any, ctx: Any, **options: Any) -> Any:
        _keep_installed(job)
        return super().add_to_fed_job(job, ctx, **options)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return results on public data, to override: they stand next to epsilon in the log and in rounds.jsonl."""
        return {}

    def run(self) -> None:
        """Run the rounds that are left."""
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(folder / _LEDGER)
        try:
            optimizer = OPTIMIZERS[self._optimizer](self._model.named_parameters(), **self._optimizer_args)
            rounds = UserRounds(
                "PrivateController",
                self._model,
                optimizer,
                replace(self._plan, user="site"),
                ledger=ledger,
                ids=self._sites,
                places="sites",
                form=_TYPES,
            )
            rounds.resume(folder / _CHECKPOINT)
            for _ in range(self._num_rounds or self._plan.steps):
                if rounds.private_step.is_spent or self.abort_signal.triggered:
                    break
                self._play(rounds, folder)
            if rounds.private_step.is_spent:
                self.info(f"The plan's {self._plan.steps} rounds are spent.")
            if ledger.releases:
                save(self._model, folder / _RELEASED, ledger=ledger, overwrite=True)
        finally:
            ledger.close()

    def _play(self, rounds: UserRounds, folder: Path) -> None:
        """Send the model to the round's sites, release the mean of their updates, and record it."""
        sites = self._known(rounds)
        if sites is None:
            return
        batch, parameters = rounds.draw(), rounds.trained()
        number = batch.sampling.step + 1
        drawn = [sites[user] for user in sorted(batch.examples[0].tolist())]  # a sum's rounding depends on the order
        asked = [site for site in drawn if site in self._online()]
        told = {_NORM: self._plan.max_grad_norm, _TRAINED: [*parameters]}
        sent = FLModel(
            params=_arrays(self._model.state_dict()),
            current_round=batch.sampling.step,
            total_rounds=self._plan.steps,
            meta=told,
        )
        # To NVFlare, no targets are all sites.
        results = self.send_model_and_wait(data=sent, targets=asked, timeout=self._timeout) if asked else []
        if self.abort_signal.triggered:  # nothing was released or charged
            return
        answers: dict[str, FLModel] = {}
        for result in results:
            answers.setdefault(result.meta["client_name"], result)
        others = self._model.state_dict().keys() - parameters.keys()
        missing = {site: "no usable reply in time" if site in asked else "not connected" for site in drawn}
        found = [_update(answers[s], parameters, others) if s in answers else missing[s] for s in drawn]
        rounds.release(batch, found)
        rounds.write(folder / _CHECKPOINT)
        assert self._plan.delta is not None  # for_users asks for it
        epsilon = rounds.private_grad.ledger.epsilon(delta=self._plan.delta)
        public = dict(self.evaluate(self._model))
        numbers = {"round": number, _EPSILON: epsilon, "delta": self._plan.delta, **public}
        with (folder / _ROUNDS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(numbers)}\n")
        shown = [f"epsilon {rounded_up(epsilon, 4)} at delta {rounded_up(self._plan.delta)}"]
        shown += [f"{name} {value:g}" for name, value in public.items()]
        self.info(f"Round {number} of {self._plan.steps}: {', '.join(shown)}")
        result = FLModel(params={}, metrics={_EPSILON: epsilon, **public}, current_round=number)
        event = AppEventType.AFTER_AGGREGATION, self.fl_ctx, AppConstants.AGGREGATION_RESULT, result
        self.fire_event_with_data(*event)

    def _online(self) -> set[str]:
        return {client.name for client in self.engine.get_clients()}

    def _known(self, rounds: UserRounds) -> tuple[str, ...] | None:
        """Return the sites by user, None after an abort; the first round waits until there is one for each user."""
        while rounds.ids is None and len(self._online()) < self._plan.num_examples:
            if self.abort_signal.triggered:
                return None
            time.sleep(_POLL)
        return rounds.ids or rounds.settle([*self._online()])

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        """Remove all but the arrays of a result: model selectors and writers of metrics read it from the context."""
        with suppress(Exception):  # what is no DXO has no metrics, and is no update
            dxo = from_shareable(result)
            dxo.meta = {}
            dxo.update_shareable(result)
        return super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)


class PrivacyNoise(DXOFilter):
    """A filter of task results that clips each update and adds Gaussian noise, with an accountant over all rounds.

        plan = PrivacyPlan.for_users(num_users=1, expected_cohort_size=1, rounds=20, max_update_norm=1.0, delta=1e-5,
                                     noise_multiplier=2.4)
        job.to_clients(PrivacyNoise(plan, "/secure/noise"), tasks=["train"], filter_type=FilterType.TASK_RESULT)

    It works in any workflow, at a site or at the server. Each update of a site is one release: nobody else adds
    noise, so it needs much more of it than PrivateController. Results other than differences of weights are refused.

    Args:
        plan: for one user, as above; `rounds` is how often one site may send.
        folder: of the ledgers, `<site>.jsonl`. A later run counts on.
    Raises:
        PrivacyError: (in the round, whose result NVFlare then drops) the result is not WEIGHT_DIFF of floating-point
            arrays of the same shapes as before, or the plan is for several users.
        BudgetExceededError: the site has sent as often as the plan allows. Nothing leaves.
    Privacy:
        For all data of a site, against everybody who sees what leaves the filter. The ledger is charged first.
    """

    def __init__(self, plan: PrivacyPlan, folder: str) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        if plan.num_examples != 1 or plan.privacy_unit != "user":
            got, remedy = f"{plan.num_examples} of unit {plan.privacy_unit!r}", "make it by for_users(num_users=1, ...)"
            raise expected("PrivacyNoise", "plan", "to be for one user, the site", got, remedy)
        self._plan, self._folder = replace(plan, user="site"), os.path.abspath(folder)
        self._states: dict[str, tuple[PrivateGradient, list[str]]] = {}
        self._turn = threading.Lock()  # the server filters the results of several sites at once

    def add_to_fed_job(self, job: Any, ctx: Any, **options: Any) -> Any:
        _keep_installed(job)
        return super().add_to_fed_job(job, ctx, **options)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result with noise; an error without what came with it. NVFlare's filters let both pass."""
        if (code := shareable.get_return_code()) != ReturnCode.OK:
            return make_reply(code)
        kind = from_shareable(shareable).data_kind
        if kind != DataKind.WEIGHT_DIFF:
            remedy = "send differences: ScriptRunner(..., params_transfer_type=TransferType.DIFF)"
            raise expected("PrivacyNoise", "a task's result", "to be DataKind.WEIGHT_DIFF", kind, remedy)
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        update = {name: _tensor(value) for name, value in dxo.data.items()}
        peer = fl_ctx.get_peer_context()
        is_server = fl_ctx.get_process_type() in (ProcessType.SERVER_JOB, ProcessType.SERVER_PARENT)
        site = (peer if is_server and peer is not None else fl_ctx).get_identity_name()
        assert isinstance(site, str)  # NVFlare names its sites
        assert self._plan.delta is not None  # for_users asks for it
        with self._turn:
            released, epsilon = self._released(site, update)
        self.log_info(
            fl_ctx, f"{site}: noise added, epsilon {rounded_up(epsilon, 4)} at delta {rounded_up(self._plan.delta)}"
        )
        return DXO(DataKind.WEIGHT_DIFF, data=released)  # without metrics and numbers of examples

    def _released(self, site: str, update: Mapping[str, Tensor]) -> tuple[dict[str, np.ndarray], float]:
        if site not in self._states:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            # Names of parameters must not have dots: here they are numbers, in the order of the first update.
            held = nn.ParameterList([torch.zeros(value.shape) for value in update.values()])
            ledger = Path(self._folder) / f"{site}.jsonl"
            private_grad = PrivateGradient(held, no_loss, self._plan, perturb=ReportedUpdate(), ledger=ledger)
            self._states[site] = private_grad, [*update]
        private_grad, names = self._states[site]
        own = {names[int(place)]: p for place, p in private_grad.model.named_parameters()}
        if got := misfit({n: v.nan_to_num() for n, v in update.items()}, own):  # that it is not finite is private
            remedy = "send the same floating-point arrays in each round; leave counters of BatchNorm out"
            raise expected("PrivacyNoise", "an update", "to have the form of the site's first", got, remedy)
        ledger = private_grad.ledger
        data = TensorDataset(torch.zeros(1))
        batch = next(iter(self._plan.batches(data, start=min(ledger.next_step, self._plan.steps - 1))))
        # Values that are not finite count as zero, and get noise as well.
        examples = {f"{place}": update[name][None].float() for place, name in enumerate(names)}
        gradient = private_grad(replace(batch, examples=examples, size=1))
        noised = {name: gradient.tensors[f"{place}"].numpy() for place, name in enumerate(names)}
        assert self._plan.delta is not None  # for_users asks for it
        return noised, ledger.epsilon(delta=self._plan.delta)


class PrivateSite:
    """A site that trains with record-level differential privacy, and never sends anything else.

        flare.init()
        site = PrivateSite(model, loss_fn, data, optimizer, plan, folder=folder / flare.get_site_name(), steps=50)
        while flare.is_running():
            flare.send(site.train(flare.receive()))

    It works with FedAvg and any other workflow: what the server does with the weights is post-processing. The server
    need not be trusted. The site stops by itself when its plan is spent. After a crash, start it again. If the server
    asks for the same round with the same model again, the site sends its last answer, at no cost.

    Args:
        model: with the names of the server's.
        loss_fn: (model, examples) -> losses, shape (B,).
        data: the site's own data.
        optimizer: from privgrad.optim, over the same model. Its state lasts over the rounds.
        plan: the site's own; a plan for examples.
        folder: the site's own: it has ledger.jsonl, ledger.pt and statement.txt.
        steps: private steps per round, >= 1. The last round has what is left.
        collate: as in plan.batches.
        private_options: more arguments of PrivateGradient, such as clip or precondition.
    Raises:
        PrivacyError: as PrivateGradient; or a checkpoint of another run. In train: a model with other names.
        BudgetExceededError: (in train) the plan is spent.
    Privacy:
        That of PrivateGradient, for the site's records, against the server and everybody else.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Data,
        optimizer: PrivateOptimizer,
        plan: PrivacyPlan,
        *,
        folder: str | os.PathLike[str],
        steps: int,
        collate: Collate | None = None,
        **private_options: Any,
    ) -> None:
        if plan.delta is None:
            raise expected(
                "PrivateSite", "plan", "to have a delta, for the statement", None, "give the plan delta=1e-5"
            )
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(self._folder / _LEDGER)
        self.private_grad = PrivateGradient(model, loss_fn, plan, ledger=ledger, **private_options)
        self._rounds = SiteRounds("PrivateSite", self.private_grad, optimizer, data, steps, collate)
        self._model, self._steps = model, steps

    def train(self, received: FLModel) -> FLModel:
        """Take this round's private steps from the received weights, and return the new ones."""
        self._rounds.train({name: _tensor(value) for name, value in received.params.items()})
        said = statement([self.private_grad.ledger])
        (self._folder / "statement.txt").write_text(f"{said}\n", encoding="utf-8")
        meta = {_EPSILON: said.numbers["epsilon"], MetaKey.NUM_STEPS_CURRENT_ROUND: self._steps}
        return FLModel(params_type=ParamsType.FULL, params=_as_received(received, self._model.state_dict()), meta=meta)


def site_update(
    received: FLModel,
    model: nn.Module,
    loss_fn: LossFunction,
    user: Any,
    local: LocalUpdate,
    *,
    precondition: Preconditioner | None = None,
) -> FLModel:
    """Return a site's clipped update for PrivateController, which also takes those of any other client of NVFlare.

    Args:
        received: from flare.receive().
        model: the server's; it gets the received weights.
        loss_fn: (model, examples) -> losses, shape (B,).
        user: the site's data as one row of data.by_user, with leading dimension 1.
        local: settings of the local training.
        precondition: public scales (AdaDPS); see LocalUpdate.
    Privacy:
        NOT private before the server's noise; see local_update.
    """
    model.load_state_dict({name: _tensor(value) for name, value in received.params.items()})
    for name, parameter in model.named_parameters():  # the server's model decides what is frozen
        parameter.requires_grad_(name in received.meta[_TRAINED])
    norm, step = received.meta[_NORM], received.current_round
    update = local_update(model, loss_fn, user, local, max_update_norm=norm, precondition=precondition, step=step or 0)
    moved = {name: -value for name, value in update.items()}
    return FLModel(params_type=ParamsType.DIFF, params=_as_received(received, moved))


def _keep_installed(job: Any) -> None:
    """Leave this package out of the code that NVFlare copies into a job."""
    job.set_app_packages([*job.job.app_packages, "privgrad"])


def _tensor(value: Any) -> Tensor:
    return value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return copies as arrays: numpy has no bfloat16."""
    half = torch.bfloat16
    return {n: (t.float() if t.dtype == half else t).detach().cpu().numpy().copy() for n, t in tensors.items()}


def _as_received(received: FLModel, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return tensors or arrays, as received: NVFlare's executor drops those that are not of the script's framework."""
    if all(isinstance(value, Tensor) for value in received.params.values()):
        return {name: value.detach().cpu().clone() for name, value in tensors.items()}
    return dict(_arrays(tensors))


def _update(result: FLModel, parameters: Mapping[str, Tensor], others: set[str]) -> dict[str, Tensor] | str:
    """Return w - w_last as a site sent it, in either form, or why it does not count; never raise."""
    try:
        values = {name: _tensor(value) for name, value in result.params.items() if name not in others}
    except Exception:  # untrusted content may raise anything
        return "no readable arrays by name"
    sent = checked_update(values, parameters)
    if isinstance(sent, str):
        return sent
    is_full = result.params_type == ParamsType.FULL
    return checked_update({n: parameters[n] - v if is_full else -v for n, v in sent.items()}, parameters)
