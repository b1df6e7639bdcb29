"""A bridge to Flower: a strategy whose round is one private step, and the client app that sends a user's update."""

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
from privgrad.gradient.transform import Preconditioner
from privgrad.ledger.ledger import Ledger
from privgrad.optim import PrivateOptimizer
from privgrad.perturb.local_training import LocalUpdate, ReportedUpdate, local_update
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.training.external_loop import ExternalLoopStep
from privgrad.types import Batch

_ARRAYS, _CONFIG = "arrays", "config"  # the records of a message, by Flower's usual names
_ROUND, _USER, _NORM, _NONCE = "round", "user", "max-update-norm", "nonce"
_POLL = 1.0  # seconds between queries for the connected nodes


class PrivateStrategy(Strategy):
    """A strategy for flwr.serverapp under which every round is one noised, charged mean of clipped updates.

        strategy = PrivateStrategy(model, pg.optim.SGD(model.named_parameters(), lr=1.0), plan, ledger="ledger.jsonl")
        strategy.start(grid, strategy.arrays, num_rounds=plan.steps, timeout=60)

    The cohort of a round is the plan's Poisson draw among n users; each user is one SuperNode. Each update is clipped
    to max_update_norm. The server ignores users who are offline or late, and replies that do not hold exactly one
    update of this model. A reply counts only if it answers the message that was sent to its user; nobody else is sent
    the message's id. The sum is noised once, on the server, and divided by the public expected cohort size, however
    many users reply. An empty cohort makes a normal round. Everything else that clients send (num-examples, losses,
    error reasons) is ignored.

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
        PrivacyError: a plan for examples, an optimizer of another model, or nodes that are not one per user. In the
            first round: a ledger that already holds releases and was not resumed.
        BudgetExceededError: (in start) more rounds than the plan allows.
    Privacy:
        The guarantee of PrivateGradient, for users: the ledger is charged before a new model is sent. The server, its
        SuperLink and the connections must be trusted: they see each clipped update (central privacy).
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
    ) -> None:
        self.private_grad = PrivateGradient(model, _no_loss, plan, perturb=ReportedUpdate(), ledger=ledger)
        self.private_step = ExternalLoopStep("PrivateStrategy", model, self.private_grad, optimizer)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._nodes = None if nodes is None else _require_nodes(nodes, plan)
        self._raw_metrics = tuple(raw_metrics)
        self._draws: Iterator[Batch] | None = None
        self._drawn: Batch | None = None
        self._sent = list[tuple[Metadata, int]]()  # metadata of this round's messages, each with its user

    @property
    def arrays(self) -> ArrayRecord:
        """The model's weights and buffers, in Flower's format."""
        return ArrayRecord(self._model.state_dict())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one message for each connected user in the plan's draw."""
        self._model.load_state_dict(arrays.to_torch_state_dict())
        if self._nodes is None:
            while len(nodes := sorted(grid.get_node_ids())) < self._plan.num_examples:
                time.sleep(_POLL)
            self._nodes = _require_nodes(nodes, self._plan)
        self._drawn = drawn = self._draw()
        self._sent = []
        online = set(grid.get_node_ids())
        # Flower counts rounds from each start; the plan counts them over the whole run.
        public = {**config, _ROUND: drawn.sampling.step, _NORM: self._plan.max_grad_norm}
        messages: list[Message] = []
        for user in cast("list[int]", drawn.examples[0].tolist()):
            if (node := self._nodes[user]) in online:
                # A message's id is a hash of its content: because of the nonce, only the receiver can compute it.
                own = ConfigRecord({**public, _USER: user, _NONCE: secrets.token_hex(16)})
                content = RecordDict({_ARRAYS: arrays, _CONFIG: own})
                messages.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
                self._sent.append((messages[-1].metadata, user))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Release the round's mean update and step with it; return metrics only if raw_metrics were requested."""
        if self._drawn is None:
            remedy = "let start() run the rounds"
            raise expected("PrivateStrategy", "each round", "to be configured first", f"round {server_round}", remedy)
        answers = self._answers(replies)
        parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        # Sorted by user, because a sum's rounding depends on the order.
        found = [_update(answers[user], parameters) for user in sorted(answers)]
        updates = [update for update in found if update is not None]
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
        """Return no messages: what clients measure is private. Evaluate on public data with start's `evaluate_fn`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """Print nothing: the plan holds all settings."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later run needs to resume, in addition to the ledger.

        Privacy:
            Post-processing of released values; it holds no key of the noise.
        """
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "private_step": self.private_step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. Rounds that were charged after it stay spent; see ExternalLoopStep.

        Raises:
            PrivacyError: the state belongs to another run, or to another ledger.
        """
        self.private_step.load_state_dict(state["private_step"], updates=state["private_step"]["private_grad"]["step"])
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._draws = self._begin()

    def _begin(self) -> Iterator[Batch]:
        """Return the plan's draws of users, from the next round on."""
        users = TensorDataset(torch.arange(self._plan.num_examples))
        return self._plan.batches(users, start=self.private_grad.state_dict()["step"])

    def _draw(self) -> Batch:
        """Draw the users of the next round; raise BudgetExceededError if all are done, or were not resumed."""
        if self._draws is None:
            self.private_step.require_unspent()
            self._draws = self._begin()
        for batch in self._draws:
            return batch
        condition, remedy = f"to be at most the plan's {self._plan.steps}", "start with num_rounds=plan.steps"
        raise expected("PrivateStrategy", "rounds", condition, self._plan.steps + 1, remedy, BudgetExceededError)

    def _answers(self, replies: Iterable[Message]) -> dict[int, Message]:
        """Return the first valid reply to each of this round's messages, by user."""
        # The bound on one user's contribution rests on this: each user counts at most once, and cannot reply for
        # another. The SuperLink does not check the sender that a message claims: the id of the answered one decides.
        sent = {metadata.message_id: (metadata.dst_node_id, user) for metadata, user in self._sent}
        if missing := sum(metadata.message_id == "" for metadata, _ in self._sent):
            got, remedy = f"{missing} without an id", "use Flower's own grids, which set the ids when they send"
            raise expected("PrivateStrategy", "messages", "to have ids once they are sent", got, remedy)
        answers: dict[int, Message] = {}
        for reply in replies:
            node, user = sent.get(reply.metadata.reply_to_message_id, (None, -1))
            if node == reply.metadata.src_node_id and reply.has_content():
                answers.setdefault(user, reply)
        return answers

    def _raw_means(self, answers: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of each of raw_metrics over the replies that report it. NOT private: no epsilon covers it."""
        reported = [record for reply in answers for record in reply.content.metric_records.values()]
        means: dict[str, float] = {}
        for name in self._raw_metrics:
            numbers = [value for record in reported if isinstance(value := record.get(name), int | float)]
            if numbers:
                means[f"raw_{name}"] = sum(numbers) / len(numbers)
        return MetricRecord(cast("dict[str, Any]", means)) if means else None


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
    """Raise PrivacyError unless each user has one node: with two, a user would contribute twice what is charged."""
    if len(set(nodes)) != len(nodes) or len(nodes) != plan.num_examples:
        condition = f"to be {plan.num_examples} different ids, one for each user"
        got = f"{len(nodes)} ids, {len(set(nodes))} of them different"
        remedy = "give each user's own SuperNode id, in the order of the users"
        raise expected("PrivateStrategy", "nodes", condition, got, remedy)
    return tuple(nodes)


def _update(reply: Message, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the one update of these parameters that a reply holds, or None for any other reply; never raise."""
    try:
        (record,) = reply.content.array_records.values()
        values = {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception:  # untrusted bytes may raise anything
        return None
    if values.keys() != parameters.keys():
        return None
    if any(not values[n].is_floating_point() or values[n].shape != p.shape for n, p in parameters.items()):
        return None
    return {name: values[name].to(p) for name, p in parameters.items()}  # PrivateGradient clips it


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise NotImplementedError  # never called: ReportedUpdate computes no loss
