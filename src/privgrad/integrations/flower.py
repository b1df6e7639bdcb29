"""A bridge to Flower: a strategy whose round is one private step, client apps for users and for records, accounting."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import ERROR
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from privgrad.errors import PrivacyError, did_you_mean, expected, require_integer
from privgrad.gradient.transform import Preconditioner
from privgrad.integrations.flower_accountant import LedgerAccountant as LedgerAccountant
from privgrad.ledger.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.perturb.local_training import LocalUpdate, local_update
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.sampling.loading import Data
from privgrad.training.external_loop import Conflict, refuse
from privgrad.training.federated_rounds import SiteRounds, UserRounds, checked_update
from privgrad.types import Batch

_ARRAYS, _CONFIG = "arrays", "config"  # the records of a message, by Flower's usual names
_ROUND, _USER, _NORM, _NONCE, _TRAINED = "round", "user", "max-update-norm", "nonce", "trained"
_POLL = 1.0  # seconds between queries for the connected nodes
_OPTIONS = ("ledger", "nodes", "raw_metrics")
_COHORT = "give the plan num_users and expected_cohort_size"
_EVALUATE = "evaluate on public data with start's evaluate_fn"
_INSTEAD = {  # of arguments of FedAvg, and of overrides that would go around the private step
    **dict.fromkeys(("fraction_train", "min_train_nodes", "min_available_nodes"), _COHORT),
    **dict.fromkeys(("fraction_evaluate", "min_evaluate_nodes", "evaluate_metrics_aggr_fn"), _EVALUATE),
    **dict.fromkeys(("configure_evaluate", "aggregate_evaluate"), _EVALUATE),
    "train_metrics_aggr_fn": "name the numbers in raw_metrics",
    "weighted_by_key": "leave it out: all users have the same weight",
    "arrayrecord_key": "leave it out: the record is 'arrays'",
    "configrecord_key": "leave it out: the record is 'config'",
    "aggregate_train": "use each round's weights in start's evaluate_fn",
}
_ERRORS = {code: name for name, code in vars(ErrorCode).items() if isinstance(code, int)}


class PrivateStrategy(Strategy):
    """A strategy for flwr.serverapp under which every round is one noised, charged mean of clipped updates.

        strategy = PrivateStrategy(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan, ledger="ledger.jsonl")
        strategy.start(grid, strategy.arrays, num_rounds=plan.steps, timeout=60)

    The cohort of a round is the plan's Poisson draw among n users; each user is one SuperNode. Each update is clipped
    to max_update_norm. The server ignores users who are offline or late, and replies that do not hold exactly one
    update of this model. A reply counts only if it answers the message that was sent to its user; nobody else is sent
    the message's id. The sum is noised once, on the server, and divided by the public expected cohort size, however
    many users reply. An empty cohort makes a normal round. Everything else that clients send (num-examples, losses,
    error texts) is ignored.

    Args:
        model: its trainable parameters are trained; Flower's initial arrays are loaded into it.
        optimizer: from privgrad.optim, over the same model; SGD with lr 1 is DP-FedAvg.
        plan: the public numbers, from PrivacyPlan.for_users.
        ledger: path of the ledger's file, or a Ledger; None keeps it in memory.
        nodes: the n SuperNode ids, one per user; Flower's SuperNode authentication keeps them stable. None takes the n
            nodes that are connected when the first round begins, sorted by id, for the whole run.
        raw_metrics: names of numbers that clients report. Flower logs and keeps their plain means over a round's
            replies as raw_<name>. NOT private: no epsilon covers them.
    Raises:
        PrivacyError: a plan for examples, an optimizer of another model, nodes that are not one per user, an argument
            of FedAvg, or a subclass that overrides aggregate_train or client-side evaluation. In the first round: a
            ledger that already holds releases and was not resumed. In start: ten rounds in a row without an update
            that counts; the first such round warns.
        BudgetExceededError: (in start) more rounds than the plan allows.
    Privacy:
        The guarantee of PrivateGradient, for users: the ledger is charged before a new model is sent. The server, its
        SuperLink and the connections must be trusted: they see each clipped update (central privacy). Warnings and
        errors about replies are for the server only. If results or replies decide when to stop, report plan.epsilon().
    Attributes:
        private_grad: the PrivateGradient; `private_grad.ledger` records all releases.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PrivateOptimizer,
        plan: PrivacyPlan,
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        nodes: Sequence[int] | None = None,
        raw_metrics: Sequence[str] = (),
        **others: Any,
    ) -> None:
        own = type(self)
        overridden = [name for name in _INSTEAD if getattr(own, name, None) is not getattr(PrivateStrategy, name, None)]
        ways = {name: _INSTEAD.get(name) or did_you_mean(name, _OPTIONS, "leave it out") for name in others}
        ways |= {name: _INSTEAD[name] for name in overridden}
        refuse("PrivateStrategy", [Conflict(name, f"for {name}, {way}") for name, way in ways.items()])
        self._rounds = UserRounds("PrivateStrategy", model, optimizer, plan, ledger=ledger, ids=nodes, places="nodes")
        self.private_grad = self._rounds.private_grad
        self._model, self._plan = model, plan
        self._raw_metrics = tuple(raw_metrics)
        self._drawn: Batch | None = None
        self._sent = dict[int, Metadata]()  # metadata of this round's messages, by user

    @property
    def arrays(self) -> ArrayRecord:
        """The model's weights and buffers, in Flower's format."""
        return ArrayRecord(self._model.state_dict())

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **options: Any) -> Result:
        """Run Flower's rounds; of a resumed run those that are left, if num_rounds is the plan's."""
        done = self.private_grad.state_dict()["step"]
        if num_rounds == self._plan.steps and done < num_rounds:
            num_rounds -= done
        return super().start(grid, initial_arrays, num_rounds, *args, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for each connected user in the plan's draw."""
        self._model.load_state_dict(arrays.to_torch_state_dict())
        nodes = self._rounds.ids
        while nodes is None or self._rounds.is_recalled:
            found = [*grid.get_node_ids()]
            if nodes is not None and not set(found).isdisjoint(nodes):
                self._rounds.is_recalled = False
            elif len(found) >= self._plan.num_examples:
                nodes = self._rounds.settle(found)
            else:
                time.sleep(_POLL)
        self._drawn = drawn = self._rounds.draw()
        self._sent = {}
        online = set(grid.get_node_ids())
        # Flower counts rounds from each start; the plan counts them over the whole run.
        public = {
            **config,
            _ROUND: drawn.sampling.step,
            _NORM: self._plan.max_grad_norm,
            _TRAINED: [*self._rounds.trained()],
        }
        messages: list[Message] = []
        users: list[int] = drawn.examples[0].tolist()
        for user in users:
            if (node := nodes[user]) in online:
                # A message's id is a hash of its content: because of the nonce, only the receiver can compute it.
                own = ConfigRecord({**public, _USER: user, _NONCE: secrets.token_hex(16)})
                content = RecordDict({_ARRAYS: arrays, _CONFIG: own})
                messages.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
                self._sent[user] = messages[-1].metadata
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Release the round's mean update and step with it; return the epsilon so far, and raw_metrics' means.

        Flower keeps them as the round's metrics. Epsilon is the ledger's, at the plan's delta; without one, it is left
        out.
        """
        if self._drawn is None:
            remedy = "let start() run the rounds, and call super().configure_train in an override of it"
            raise expected("PrivateStrategy", "each round", "to be configured first", f"round {server_round}", remedy)
        batch, self._drawn = self._drawn, None
        answers, parameters = self._answers(replies), self._rounds.trained()
        found: list[dict[str, Tensor] | str] = []
        for user in sorted(batch.examples[0].tolist()):  # a sum's rounding depends on the order
            away = "no reply in time" if user in self._sent else "not connected"
            found.append(_update(answers[user], parameters) if user in answers else away)
        self._rounds.release(batch, found)
        means = self._raw_means([reply for reply in answers.values() if reply.has_content()])
        return self.arrays, MetricRecord(_spent(self.private_grad) | means)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: what clients measure is private. Evaluate on public data with start's `evaluate_fn`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """Print nothing: the plan holds all settings."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later run needs to resume, in addition to the ledger: post-processing, no keys."""
        return self._rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of this run and ledger. Rounds that were charged after it stay spent."""
        self._rounds.load_state_dict(state)

    def _answers(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return the first reply to each of this round's messages, by user."""
        # The bound on one user's contribution rests on this: each user counts at most once, and cannot reply for
        # another. The SuperLink does not check the sender that a message claims: the id of the answered one decides.
        sent = {metadata.message_id: (metadata.dst_node_id, user) for user, metadata in self._sent.items()}
        if missing := sum(metadata.message_id == "" for metadata in self._sent.values()):
            got, remedy = f"{missing} without an id", "send all that configure_train returns, by a grid of Flower"
            raise expected("PrivateStrategy", "messages", "to have ids once they are sent", got, remedy)
        answers: dict[int, Message] = {}
        for reply in replies:
            node, user = sent.get(reply.metadata.reply_to_message_id, (None, -1))
            if node == reply.metadata.src_node_id:
                answers.setdefault(user, reply)
        return answers

    def _raw_means(self, answers: Sequence[Message]) -> dict[str, Any]:
        """Return the mean of each of raw_metrics over the replies that report it. NOT private: no epsilon covers it."""
        reported = [record for reply in answers for record in reply.content.metric_records.values()]
        means: dict[str, Any] = {}
        for name in self._raw_metrics:
            numbers = [value for record in reported if isinstance(value := record.get(name), int | float)]
            if numbers:
                means[f"raw_{name}"] = sum(numbers) / len(numbers)
            elif answers:
                told = f"no reply reports {name!r} of raw_metrics; client_app reports none, an app of your own can"
                self._rounds.warn_once(f"raw_{name}", told)
        return means


def client_app(
    make_model: Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    data_of: Callable[[Context, int], Any],
    local: LocalUpdate,
    *,
    precondition: Preconditioner | None = None,
) -> ClientApp:
    """Return the app of a device that holds one user's data, for a server that runs PrivateStrategy.

    Args:
        make_model: () -> the server's model; each round loads the server's weights into it.
        loss_fn: (model, examples) -> losses, shape (B,).
        data_of: (context, user) -> that user's row, in the format of data.by_user, with leading dimension 1. A device
            that holds only its own user's data returns those, whatever the arguments are.
        local: settings of the user's local training.
        precondition: public scales; see LocalUpdate.
    Returns:
        An app that answers `train` with the clipped update only: no losses, no number of examples.
    Raises:
        PrivacyError: precondition declares that it is not public.
    Privacy:
        NOT private before the server's noise; see local_update.
    """
    if precondition is not None and not precondition.is_public:
        remedy = "use scales of public data: the server's ledger does not record others"
        raise expected("client_app", "precondition", "to be public", repr(precondition), remedy)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        config: Any = message.content.config_records[_CONFIG]
        model = make_model()
        model.load_state_dict(message.content.array_records[_ARRAYS].to_torch_state_dict())
        for name, parameter in model.named_parameters():  # make_model may not freeze what the server does
            parameter.requires_grad_(name in config[_TRAINED])
        update = local_update(
            model,
            loss_fn,
            data_of(context, config[_USER]),
            local,
            max_update_norm=config[_NORM],
            precondition=precondition,
            step=config[_ROUND],
        )
        return Message(RecordDict({_ARRAYS: ArrayRecord(update)}), reply_to=message)

    return app


def record_client_app(
    make_model: Callable[[], nn.Module],
    make_private_grad: Callable[[Context, nn.Module], PrivateGradient],
    make_optimizer: Callable[[nn.Module], PrivateOptimizer],
    data_of: Callable[[Context], Data],
    *,
    steps: int,
) -> ClientApp:
    """Return the app of a site that protects its own records, such as a hospital its patients, from the server too.

        def make_private_grad(context, model):
            return pg.PrivateGradient(model, loss_fn, plan, ledger="ledger.jsonl")

    Each round begins at the server's weights and makes the next `steps` private steps of the site's plan. FedAvg gets
    the weights, with "num-examples" and "epsilon" as metrics. PrivateStrategy gets w - w_last alone, and protects the
    site as a whole.

    Args:
        make_model: () -> the server's model; each round loads the server's weights into it.
        make_private_grad: (context, model) -> PrivateGradient with the site's plan and the path of the site's ledger,
            which lasts over all rounds. Each site needs a path of its own.
        make_optimizer: (model) -> an optimizer from privgrad.optim, with the same settings in each round; it loads
            its state of the round before.
        data_of: (context) -> the site's data, as plan.batches takes them.
        steps: private steps per round, >= 1; the plan has those of all rounds.
    Returns:
        An app that answers `train`. After the last step of its plan, it answers with an error, and FedAvg
        continues without this site.
    Raises:
        BudgetExceededError: (in a round) the plan has no steps left.
        PrivacyError: (in a round, before a charge) another process holds the site's ledger, the ledger is in memory,
            or the server's weights do not fit the model.
    Privacy:
        All that the server sees of a site satisfies the differential privacy of the site's ledger, for its records. If
        the server repeats a round's weights, it gets the round's answer again, at no cost. num-examples is the plan's
        public number.
    """
    name = "record_client_app"
    require_integer(name, "steps", steps, 1)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        try:
            return answer(message, context)
        except Exception as error:  # Flower sends its text to the server
            if isinstance(error, PrivacyError) and "NOT PRIVATE" not in str(error):
                raise
            log(ERROR, "record_client_app (NOT PRIVATE: for this site only)", exc_info=True)
            raise expected(name, "a round", "to end", "an error of this site", "read its log") from None

    def answer(message: Message, context: Context) -> Message:
        config: Any = message.content.config_records.get(_CONFIG) or ConfigRecord()
        model, sent = make_model(), message.content.array_records[_ARRAYS].to_torch_state_dict()
        private_grad = make_private_grad(context, model)
        try:
            site = str(context.node_config.get("partition-id", ""))  # of a simulation; a deployed node may have none
            SiteRounds(name, private_grad, make_optimizer(model), data_of(context), steps, site=site).train(sent)
            spent = _spent(private_grad)
        finally:
            private_grad.ledger.close()
        after = model.state_dict()
        if names := config.get(_TRAINED):
            arrays = ArrayRecord({name: sent[name].to(after[name]) - after[name] for name in names})
            return Message(RecordDict({_ARRAYS: arrays}), reply_to=message)
        told = MetricRecord({"num-examples": private_grad.plan.num_examples} | spent)
        return Message(RecordDict({_ARRAYS: ArrayRecord(after), "metrics": told}), reply_to=message)

    return app


def _spent(private_grad: PrivateGradient) -> dict[str, Any]:
    """Return the epsilon of all releases so far by its name; nothing if the plan has no delta."""
    delta = private_grad.plan.delta
    return {} if delta is None else {"epsilon": private_grad.ledger.epsilon(delta=delta)}


def _update(reply: Message, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | str:
    """Return the one update of these parameters that a reply holds, or why it holds none; never raise."""
    if reply.has_error():  # its text may quote data
        return f"error {_ERRORS.get(reply.error.code, reply.error.code)}, which the device's log explains"
    try:
        (record,) = reply.content.array_records.values()
        values = {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception:  # untrusted bytes may raise anything
        return "not one readable ArrayRecord"
    return checked_update(values, parameters)
