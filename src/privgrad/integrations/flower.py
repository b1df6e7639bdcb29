"""Flower: a strategy whose round is one private step, and the client app that answers it with a user's update."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad.errors import BudgetExceededError, expected
from privgrad.federated import LocalTraining, Reported, local_update
from privgrad.gradient.precondition import Preconditioner
from privgrad.integrations.external_loop import ExternalLoopStep
from privgrad.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.types import Batch

_ARRAYS, _CONFIG = "arrays", "config"  # the records of a message, by Flower's usual names
_ROUND, _USER, _NORM, _NONCE = "round", "user", "max-update-norm", "nonce"
_POLL = 1.0  # seconds between looks at who is connected


class PrivateStrategy(Strategy):
    """A strategy for flwr.serverapp under which every round is one noised, charged mean of clipped updates.

        strategy = PrivateStrategy(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan, ledger="ledger.jsonl")
        strategy.start(grid, strategy.arrays, num_rounds=plan.steps, timeout=60)

    The cohort of a round is the plan's Poisson draw among n users, each of them one SuperNode. What a user sends is cut
    to max_update_norm; nothing is taken of a user who is away, late, or sends what is not one update of this model. An
    answer has to be to the very message that its user was sent, whose id nobody else is told.
    The sum is noised here, once, and divided by the public expected cohort, however many answered: an empty cohort
    makes a round like any other. What else clients send (num-examples, losses, reasons of errors) is not read.

    Args:
        model: whose trainable parameters are trained; Flower's initial arrays are loaded into it.
        optimizer: from privgrad.optim, over the same model; SGD with lr 1 is DP-FedAvg.
        plan: the public numbers, of PrivacyPlan.for_users.
        ledger: path of the record, or a Ledger; None keeps it in memory.
        nodes: SuperNode id of each user, n of them: with Flower's SuperNode authentication these are stable. None
            takes the n that are connected when the first round begins, in the order of their ids, for the whole run.
        raw_metrics: names of numbers that clients report, whose plain means over a round's answers Flower is to log and
            keep, as raw_<name>. NOT private: no epsilon covers them.
    Raises:
        PrivacyError: a plan for examples, an optimizer of another model, nodes that are not one a user; in the first
            round, a ledger that is begun and was not resumed.
        BudgetExceededError: (in start) more rounds than the plan's.
    Privacy:
        As PrivateGradient, for users: the ledger is charged before a model leaves. The server, its SuperLink and the
        connections are trusted: they see each clipped update (central privacy).
    Attributes:
        private_grad: whose `ledger` is the record.
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
    ) -> None:
        self.private_grad = PrivateGradient(model, _no_loss, plan, perturb=Reported(), ledger=ledger)
        self.private_step = ExternalLoopStep("PrivateStrategy", model, self.private_grad, optimizer)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._nodes = None if nodes is None else _require_nodes(nodes, plan)
        self._raw_metrics = tuple(raw_metrics)
        self._draws: Iterator[Batch] | None = None
        self._drawn: Batch | None = None
        self._sent = list[tuple[Metadata, int]]()  # of this round's messages, and the user of each

    @property
    def arrays(self) -> ArrayRecord:
        """The model's weights and buffers, as Flower sends them."""
        return ArrayRecord(self._model.state_dict())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each user that the plan draws and that is connected."""
        self._model.load_state_dict(arrays.to_torch_state_dict())
        if self._nodes is None:
            self._nodes = self._await_nodes(grid)
        self._drawn, self._sent = (drawn := self._draw()), []
        online = set(grid.get_node_ids())
        # Flower counts the rounds of one start; the plan's go on after a resume.
        public = {**config, _ROUND: drawn.sampling.step, _NORM: self._plan.max_grad_norm}
        messages = list[Message]()
        for user in cast("list[int]", drawn.examples[0].tolist()):
            if (node := self._nodes[user]) in online:
                # A message's id is a hash of it: with the nonce, only its receiver can name it.
                own = ConfigRecord({**public, _USER: user, _NONCE: secrets.token_hex(16)})
                content = RecordDict({_ARRAYS: arrays, _CONFIG: own})
                messages.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
                self._sent.append((messages[-1].metadata, user))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Release the round's mean update, and step by it. Metrics only where raw ones were asked for."""
        if self._drawn is None:
            remedy = "let start() run the rounds"
            raise expected("PrivateStrategy", "a round", "to be configured first", f"round {server_round}", remedy)
        answers = self._answers(replies)
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        updates = [
            update
            for _, reply in sorted(answers.items())  # the order of the users: a sum's rounding depends on it
            if (update := _update(reply, parameters)) is not None
        ]
        batch, self._drawn = self._drawn, None
        rows = {
            name: torch.stack([update[name] for update in updates]) if updates else p.detach().new_zeros(0, *p.shape)
            for name, p in parameters.items()
        }
        self.private_step.release(replace(batch, examples=rows, size=len(updates)))
        self._optimizer.step(grad=self.private_step.take())
        return self.arrays, self._raw_means(answers.values())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: what clients measure on their data is private. Evaluate on public data, by start's evaluate_fn."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing; see configure_evaluate."""
        return None

    def summary(self) -> None:
        """Nothing: the plan says it."""

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on beside the ledger. Post-processing; no key."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "private_step": self.private_step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what was charged since stays spent, see ExternalLoopStep.

        Raises:
            PrivacyError: the state is another run's, or the ledger is not its own.
        """
        self.private_step.load_state_dict(state["private_step"], updates=state["private_step"]["private_grad"]["step"])
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._draws = self._begin()

    def _begin(self) -> Iterator[Batch]:
        users = TensorDataset(torch.arange(self._plan.num_examples))
        return self._plan.batches(users, start=self.private_grad.state_dict()["step"])

    def _draw(self) -> Batch:
        """The users of the next round.

        Raises:
            PrivacyError: the ledger holds rounds that this strategy does not continue.
            BudgetExceededError: the plan's rounds are over.
        """
        if self._draws is None:
            self.private_step.require_unspent()
            self._draws = self._begin()
        for batch in self._draws:
            return batch
        condition, remedy = f"to be at most the plan's {self._plan.steps}", "start with num_rounds=plan.steps"
        raise expected("PrivateStrategy", "rounds", condition, "one more", remedy, BudgetExceededError)

    def _await_nodes(self, grid: Grid) -> tuple[int, ...]:
        """The nodes that are connected, once there are as many as users."""
        while len(nodes := sorted(grid.get_node_ids())) < self._plan.num_examples:
            time.sleep(_POLL)
        return _require_nodes(nodes, self._plan)

    def _answers(self, replies: Iterable[Message]) -> dict[int, Message]:
        """The first answer to each of this round's messages, by user.

        The SuperLink tells who sends, but not whether the sender within the message is the same.

        Raises:
            PrivacyError: the grid gave the messages no ids, so that no answer can be told from another.
        """
        sent = {metadata.message_id: (metadata.dst_node_id, user) for metadata, user in self._sent}
        if "" in sent:
            remedy = "use Flower's own grids, which give them when they send"
            raise expected("PrivateStrategy", "messages", "to have ids once they are sent", "none", remedy)
        answers = dict[int, Message]()
        for reply in replies:
            node, user = sent.get(reply.metadata.reply_to_message_id, (None, -1))
            if node == reply.metadata.src_node_id and reply.has_content():
                answers.setdefault(user, reply)
        return answers

    def _raw_means(self, answers: Iterable[Message]) -> MetricRecord | None:
        """Means of what was asked for by name, over the answers that have it. NOT private."""
        reported = [record for reply in answers for record in reply.content.metric_records.values()]
        means = dict[str, float]()
        for name in self._raw_metrics:
            numbers = [value for record in reported if isinstance(value := record.get(name), int | float)]
            if numbers:
                means[f"raw_{name}"] = sum(numbers) / len(numbers)
        return MetricRecord(cast("dict[str, Any]", means)) if means else None


def client_app(
    make_model: Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    data_of: Callable[[Context, int], Any],
    local: LocalTraining,
    *,
    precondition: Preconditioner | None = None,
) -> ClientApp:
    """The app of a device that holds one user's data, for a server of PrivateStrategy.

    Args:
        make_model: the server's model; its weights are the server's in each round.
        loss_fn: (model, examples) -> losses, shape (B,).
        data_of: (context, user) -> that user's row, as data.by_user makes it, with leading dimension 1. A device that
            has its own user's data alone gives those, whatever the two say.
        local: how to train.
        precondition: public scales; see LocalTraining.
    Returns:
        An app that answers `train` with the clipped update, and with nothing else: no losses, no number of examples.
    Raises:
        PrivacyError: scales that say they are not public.
    Privacy:
        See local_update: NOT private before the server's noise.
    """
    if precondition is not None and not precondition.is_public:
        remedy = "use scales of public data: the server's ledger knows of no others"
        raise expected("client_app", "precondition", "to be public", repr(precondition), remedy)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        config = message.content.config_records[_CONFIG]
        model = make_model()
        model.load_state_dict(message.content.array_records[_ARRAYS].to_torch_state_dict())
        update = local_update(
            model,
            loss_fn,
            data_of(context, cast(int, config[_USER])),
            local,
            max_update_norm=cast(float, config[_NORM]),
            precondition=precondition,
            step=cast(int, config[_ROUND]),
        )
        return Message(RecordDict({_ARRAYS: ArrayRecord(update)}), reply_to=message)

    return app


def _require_nodes(nodes: Sequence[int], plan: PrivacyPlan) -> tuple[int, ...]:
    """Raise PrivacyError unless there is one node a user: one of two nodes would contribute twice what is charged."""
    if len(set(nodes)) != len(nodes) or len(nodes) != plan.num_examples:
        got = f"{len(nodes)} of them, {len(set(nodes))} different"
        remedy = "give each user's own SuperNode id, in the order of the users"
        raise expected("PrivateStrategy", "nodes", f"to be one for each of {plan.num_examples} users", got, remedy)
    return tuple(nodes)


def _update(reply: Message, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The one update of these parameters that an answer holds, or None: whatever was sent, the round goes on."""
    try:
        (record,) = reply.content.array_records.values()
        values = {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception:  # what a stranger's bytes may raise
        return None
    if values.keys() != parameters.keys():
        return None
    if any(not values[n].is_floating_point() or values[n].shape != p.shape for n, p in parameters.items()):
        return None
    return {name: values[name].to(p) for name, p in parameters.items()}


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise NotImplementedError  # Reported asks for none
