"""Faults of privacy for users: what one of them contributes, who is drawn, and what a round costs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mutants.draws import by_batch, default_seed, one_step_for_ever, poisson, realized_divisor
from mutants.gradients import another_sum
from mutants.mutant import Mutant, Patch, everywhere, plant_sum
from privgrad import private_gradient
from privgrad.data import dataset as users
from privgrad.data import schema as units
from privgrad.data.schema import is_missing
from privgrad.gradient.factor import Dense, Factor
from privgrad.perturb.local_training import LocalUpdate
from privgrad.types import ClippedSum

Updates = Mapping[str, Tensor]


def cap_forgotten(patch: Patch) -> None:
    real = users.by_user
    everywhere(patch, real, lambda tensors, users, *, cap, minimum=1: real(tensors, users, cap=999, minimum=minimum))


def as_long_as_the_largest(patch: Patch) -> None:
    """Rows have the length of the user with the most examples."""
    real = users.by_user

    def wrong(*args: Any, **options: Any) -> TensorDataset:
        *tensors, counts = real(*args, **options).tensors
        return TensorDataset(*(tensor[:, : int(counts.max())] for tensor in tensors), counts)

    everywhere(patch, real, wrong)


def only_nan_is_nobody(patch: Patch) -> None:
    everywhere(patch, units.is_nobody, is_missing)


def names_as_they_are(patch: Patch) -> None:
    everywhere(patch, units.person_of, lambda text: text)


def unclipped(real: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> tuple[ClippedSum, Any]:
    total, raw = real(chunks, max_grad_norm=1e30, **options)
    return ClippedSum(total.values, max_grad_norm), raw


def devices_believed(patch: Patch) -> None:
    """The server adds up what devices say they have clipped."""
    plant_sum(patch, unclipped, private_gradient)


def another_update(planted: Callable[[Updates, Tensor], Updates]) -> Callable[[Patch], None]:
    """Plants other updates: (updates by parameter name, how many examples each user has) -> updates."""

    def plant(patch: Patch) -> None:
        real = LocalUpdate._trained

        def wrong(
            self: Any, engine: Any, tensors: Any, rows: Tensor, counts: Tensor, *rest: Any
        ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
            end = len(counts)  # those with the fewest mini-batches come out first
            for size, found in real(self, engine, tensors, rows, counts, *rest):
                updates = planted({name: f.dense() for name, f in found.items()}, counts[end - size : end])
                yield size, {name: Dense(values) for name, values in updates.items()}
                end -= size

        patch.setattr(LocalUpdate, "_trained", wrong)

    return plant


def weighed_by_examples(updates: Updates, counts: Tensor) -> Updates:
    return {name: value * counts.view(-1, *[1] * (value.dim() - 1)) / 5 for name, value in updates.items()}


def from_where_the_last_one_ended(updates: Updates, _: Tensor) -> Updates:
    return {name: value.cumsum(0) for name, value in updates.items()}


def padding_trained_on(patch: Patch) -> None:
    def losses(_: LocalUpdate, loss_fn: Any) -> Any:
        def of_users(model: nn.Module, users: Any) -> Tensor:
            shape, rows = users[0].shape[:2], tuple(tensor.flatten(0, 1) for tensor in users[:-1])
            return loss_fn(model, rows).view(shape).mean(1)

        return of_users

    patch.setattr(LocalUpdate, "losses", losses)


def each_adds_its_share(users: int, _: int, options: dict[str, Any]) -> None:
    """Each user of the cohort adds sigma C / sqrt(K), K the expected cohort: who is away takes noise along."""
    options["noise_multiplier"] *= (users / options["divisor"]) ** 0.5


def flowers(name: str, planted: Callable[..., Any]) -> Callable[[Patch], None]:
    """Plants another method of the Flower strategy: (the real one, the strategy, its arguments) -> what it returns."""

    def plant(patch: Patch) -> None:
        from privgrad.integrations.flower import PrivateStrategy  # Flower is an extra

        real = getattr(PrivateStrategy, name)
        patch.setattr(PrivateStrategy, name, lambda self, *given: planted(real, self, *given))

    return plant


def free_unless_all_answer(real: Any, strategy: Any, server_round: int, replies: Iterable[Any]) -> Any:
    replies = list(replies)
    if len(strategy._answers(replies)) < len(strategy._sent):
        strategy._drawn = None
        return strategy.arrays, None
    return real(strategy, server_round, replies)


def sender_believed(_: Any, strategy: Any, replies: Iterable[Any]) -> Any:
    users = {metadata.dst_node_id: user for user, metadata in strategy._sent.items()}
    answers = dict[int, Any]()
    for reply in replies:
        if reply.metadata.src_node_id in users and reply.has_content():
            answers.setdefault(users[reply.metadata.src_node_id], reply)
    return answers


def each_answer(real: Any, strategy: Any, replies: Iterable[Any]) -> Any:
    from flwr.app import ArrayRecord

    replies = list(replies)
    answers, times = real(strategy, replies), Counter(reply.metadata.reply_to_message_id for reply in replies)
    for reply in answers.values():
        for name, record in list(reply.content.array_records.items()) if reply.has_content() else ():
            several = times[reply.metadata.reply_to_message_id]
            sums = {key: several * torch.from_numpy(array.numpy()) for key, array in record.items()}
            reply.content[name] = ArrayRecord(sums)
    return answers


def earlier_rounds_too(_: Any, strategy: Any, replies: Iterable[Any]) -> Any:
    known = vars(strategy).setdefault("_known", {})
    known |= {metadata.message_id: user for user, metadata in strategy._sent.items()}
    answers = dict[int, Any]()
    for reply in replies:
        if (user := known.get(reply.metadata.reply_to_message_id)) is not None:
            answers.setdefault(user, reply)
    return answers


def everyone_asked(patch: Patch) -> None:
    from privgrad.training.federated_rounds import UserRounds

    real = UserRounds.draw

    def wrong(rounds: UserRounds) -> Any:
        users = torch.arange(rounds.plan.num_examples)
        return replace(real(rounds), examples=(users,), size=len(users))

    patch.setattr(UserRounds, "draw", wrong)


def weighed_by_reports(patch: Patch) -> None:
    from privgrad.integrations import flower

    real = flower._update

    def wrong(reply: Any, parameters: Any) -> Any:
        update = real(reply, parameters)
        examples = sum(record["num-examples"] for record in reply.content.metric_records.values())
        return update if isinstance(update, str) else {name: examples * value for name, value in update.items()}

    patch.setattr(flower, "_update", wrong)


_ALONE = {"name": "linear", "engine": "factored", "scaled": False}

USERS = [
    Mutant(
        "the cap on a user's examples dropped",
        cap_forgotten,
        "test_federated.test_users_are_rows_of_their_own_examples",
    ),
    Mutant(
        "rows as long as those of the user with the most examples",
        as_long_as_the_largest,
        "test_federated.test_users_are_rows_of_their_own_examples",
    ),
    Mutant(
        "people whose name is NA are one user",
        only_nan_is_nobody,
        "test_federated.test_people_without_a_name_are_never_one_user",
        {"mark": "NA"},
    ),
    Mutant(
        "one name in two spellings is two users",
        names_as_they_are,
        "test_federated.test_one_name_in_several_spellings_is_one_user_as_in_a_table",
    ),
    Mutant(
        "a user's update not clipped",
        another_sum(unclipped),
        "test_federated.test_updates_are_those_of_a_loop_over_users",
        _ALONE,
    ),
    Mutant(
        "devices believed to have clipped",
        devices_believed,
        "test_federated.test_reported_updates_are_clipped_again_and_nonsense_counts_as_nothing",
    ),
    Mutant(
        "users weighed by how many examples they have",
        another_update(weighed_by_examples),
        "test_federated.test_updates_are_those_of_a_loop_over_users",
        _ALONE,
    ),
    Mutant(
        "a user trains on from where the one before ended",
        another_update(from_where_the_last_one_ended),
        "test_federated.test_updates_are_those_of_a_loop_over_users",
        _ALONE,
    ),
    Mutant(
        "what fills users up is trained on",
        padding_trained_on,
        "test_federated.test_updates_are_those_of_a_loop_over_users",
        _ALONE,
    ),
    Mutant(
        "each user adds a share of the noise",
        by_batch(each_adds_its_share),
        "test_federated.test_the_noise_is_one_draw_of_its_own_whoever_took_part",
    ),
    Mutant(
        "the cohort that was drawn as divisor",
        by_batch(realized_divisor),
        "test_federated.test_the_noise_is_one_draw_of_its_own_whoever_took_part",
    ),
    Mutant(
        "the same noise in each round",
        by_batch(one_step_for_ever),
        "test_federated.test_the_noise_is_one_draw_of_its_own_whoever_took_part",
    ),
    Mutant(
        "cohorts drawn at twice the rate",
        poisson(lambda real, stream, step, rate, *rows: real(stream, step, 2 * rate, *rows)),
        "test_federated.test_the_divisor_and_the_noise_are_those_of_the_expected_cohort",
    ),
    Mutant(
        "cohorts and noise that follow from the round",
        default_seed,
        "test_federated.test_neither_cohorts_nor_noise_follow_from_the_round",
    ),
    Mutant(
        "Flower: all are asked, for the price of a cohort",
        everyone_asked,
        "test_flower.test_the_plan_draws_the_cohorts_and_each_node_is_one_user",
    ),
    Mutant(
        "Flower: a round is free where a device has gone",
        flowers("aggregate_train", free_unless_all_answer),
        "test_flower.test_who_is_away_or_late_contributes_nothing_and_an_answer_counts_once",
    ),
    Mutant(
        "Flower: devices weighed by the examples they report",
        weighed_by_reports,
        "test_flower.test_nonsense_contributes_nothing_and_costs_as_any_round",
        {"kind": "nan"},
    ),
    Mutant(
        "Flower: a second answer counts",
        flowers("_answers", each_answer),
        "test_flower.test_who_is_away_or_late_contributes_nothing_and_an_answer_counts_once",
    ),
    Mutant(
        "Flower: an answer to an earlier round counts",
        flowers("_answers", earlier_rounds_too),
        "test_flower.test_only_an_answer_to_this_round_counts",
    ),
    Mutant(
        "Flower: an answer counts for whom it names as its sender",
        flowers("_answers", sender_believed),
        "test_flower.test_nobody_answers_for_another",
        {"forged": "sender"},
    ),
]
