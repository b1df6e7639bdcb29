"""Faults of a budget: its cap, its file, its filter, and the ledgers of its commitments."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere
from mutants.records import edited
from privgrad.accounting import accountant as accounting
from privgrad.accounting import accountant as privacy_filter
from privgrad.accounting.mechanisms import Release, Split
from privgrad.ledger import budget as budget_cost
from privgrad.ledger import budget as budget_file
from privgrad.ledger import file as ledger_file
from privgrad.statement import facts


def cost(planted: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Plants other commitments whose cost is computed in place of the true ones."""

    def plant(patch: Patch) -> None:
        real = budget_cost.cost_of
        everywhere(patch, real, lambda commitments, **cap: real(planted(commitments), **cap))

    return plant


def later_ones_fixed_beforehand(patch: Patch) -> None:
    def wrong(releases: Any, *, first: Any, delta: float, total_epsilon: float) -> float:
        return accounting.epsilon(releases, delta=delta)

    patch.setattr(budget_cost, "filter_epsilon", wrong)


def orders_by_results(patch: Patch) -> None:
    """The orders suit all releases so far, and so depend on results."""
    real = budget_cost.filter_epsilon

    def wrong(releases: Any, *, first: Any, **cap: float) -> float:
        return real(releases, first=releases, **cap)

    patch.setattr(budget_cost, "filter_epsilon", wrong)


def whole_delta_for_each_order(patch: Patch) -> None:
    real = privacy_filter._shares

    def wrong(costs: Any, delta: float, total: float) -> Any:
        return tuple((order, delta) for order, _ in real(costs, delta, total))

    patch.setattr(privacy_filter, "_shares", wrong)


def only_the_first_group_pays(patch: Patch) -> None:
    real = privacy_filter._costs

    def wrong(releases: Any) -> Any:
        given = [one.groups[0] if isinstance(one, Split) else (one,) for one in releases]
        return real([one for group in given for one in group])

    patch.setattr(privacy_filter, "_costs", wrong)


def read_as_less(patch: Patch) -> None:
    """A commitment is read with twice its noise."""
    real = budget_file._release_of

    def wrong(plain: Any) -> Any:
        found = real(plain)
        return replace(found, noise_multiplier=2 * found.noise_multiplier) if isinstance(found, Release) else found

    patch.setattr(budget_file, "_release_of", wrong)


def lines_unchecked(patch: Patch) -> None:
    patch.setattr(budget_file, "_require", lambda *_: None)


def every_ledger_unbegun(patch: Patch) -> None:
    patch.setattr(pg.Budget, "_note_begun", lambda *_: None)


def ledger_without_its_limit(patch: Patch) -> None:
    patch.setattr(pg.Ledger, "limit_to", lambda *_: None)


def files_without_locks(patch: Patch) -> None:
    """No locks, and writes that wait, so that other processes read the same end meanwhile, however busy the machine."""

    def write(descriptor: int, data: bytes) -> int:
        time.sleep(0.02)
        return os.write(descriptor, data)

    edited(ledger_file, "fcntl", flock=lambda descriptor, operation: None)(patch)
    edited(ledger_file, "os", write=write)(patch)


def any_place(patch: Patch) -> None:
    """The same name resumes from any folder."""
    real: Any = budget_file.Commitment.terms.fget

    def wrong(self: budget_file.Commitment) -> Any:
        return real(replace(self, ledger=None))

    patch.setattr(budget_file.Commitment, "terms", property(wrong))


def passes(owner: Any, name: str) -> Callable[[Patch], None]:
    """Plants a check that lets everything through."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: None)


_FAST: Mapping[str, Any] = {"fast": None}

BUDGET = [
    Mutant(
        "a commitment above the cap",
        cost(lambda commitments: commitments[:-1]),
        "test_budget.test_a_commitment_above_the_cap_writes_nothing",
    ),
    Mutant(
        "only the last commitment counts",
        cost(lambda commitments: commitments[-1:]),
        "test_budget.test_one_commitment_is_accounted_by_pld_and_several_by_the_filter",
    ),
    Mutant(
        "commitments that followed results accounted by PLD",
        later_ones_fixed_beforehand,
        "test_budget.test_one_commitment_is_accounted_by_pld_and_several_by_the_filter",
    ),
    Mutant(
        "orders of the filter chosen after results",
        orders_by_results,
        "test_budget.test_one_commitment_is_accounted_by_pld_and_several_by_the_filter",
    ),
    Mutant(
        "the whole delta for each order of the filter",
        whole_delta_for_each_order,
        "test_selection.test_the_orders_of_a_filter_share_delta",
        {"sigma": 5.0, "total": 3.0},
    ),
    Mutant(
        "scores are free for people who are held out",
        only_the_first_group_pays,
        "test_budget.test_splits_cost_at_least_as_much_as_every_combination_of_groups",
        {"count": 2},
    ),
    Mutant(
        "a commitment read with twice its noise",
        read_as_less,
        "test_budget.test_one_commitment_is_accounted_by_pld_and_several_by_the_filter",
    ),
    Mutant(
        "a second commitment of one name replaces the first",
        lines_unchecked,
        "test_budget.test_lines_that_no_budget_writes_are_refused_although_their_checksums_match",
        {"how": "the same name again, for less"},
    ),
    Mutant(
        "one name for different releases",
        lambda patch: patch.setattr(budget_file.Commitment, "terms", ()),
        "test_budget.test_the_same_commitment_again_costs_nothing",
    ),
    Mutant("one name for several folders", any_place, "test_budget.test_the_same_commitment_again_costs_nothing"),
    Mutant(
        "two processes that commit the same rest",
        files_without_locks,
        "test_budget.test_processes_at_once_do_not_overdraw",
    ),
    Mutant(
        "an empty file in place of a lost ledger",
        every_ledger_unbegun,
        "test_budget.test_an_empty_file_does_not_stand_for_a_lost_ledger",
        _FAST,
    ),
    Mutant(
        "more steps than were committed",
        ledger_without_its_limit,
        "test_budget.test_a_training_makes_the_committed_releases_and_no_more",
        _FAST,
    ),
    Mutant(
        "another unit than the budget's",
        passes(pg.Budget, "require_covered"),
        "test_budget.test_simulations_and_too_many_examples_are_refused",
    ),
    Mutant(
        "the epsilon of a chosen training as a guarantee",
        lambda patch: everywhere(patch, facts.require_no_budget, lambda *_: None),
        "test_budget.test_the_ledger_of_a_commitment_states_no_epsilon_of_its_own",
        _FAST,
    ),
]
