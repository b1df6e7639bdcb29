"""Commands that compute with epsilon: the cost of ledgers or of a plan, and the noise for a budget."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Accountant, Release, rounded_up
from privgrad.accounting.calibration import steps_of
from privgrad.cli.console import AsJson, note, print_answer, print_table
from privgrad.errors import expected, require_integer, require_rate
from privgrad.ledger.budget import is_budget
from privgrad.ledger.combining import recorded_delta, require_no_budget, require_one_promise
from privgrad.ledger.ledger import Ledger
from privgrad.types import COVERED

Delta = Annotated[float, typer.Option(help="Delta, in (0, 1); choose at most 1 / num_examples.")]
SampleRate = Annotated[float | None, typer.Option(help="Poisson sampling rate q, in (0, 1].")]
Steps = Annotated[int | None, typer.Option(help="Number of steps T.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise multiplier sigma.")]


def epsilon(
    delta: Annotated[
        float | None,
        typer.Option(help="Delta, in (0, 1); choose at most 1 / num_examples. Default: the one in the ledgers."),
    ] = None,
    ledger: Annotated[
        list[Path] | None,
        typer.Argument(help="Ledger files; several are also composed. Or give the three numbers instead."),
    ] = None,
    noise_multiplier: NoiseMultiplier = None,
    sample_rate: SampleRate = None,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon that the releases in ledgers have cost, or that a plan would cost.

    The cost of a ledger is recomputed from its file alone. A ledger that is part of a budget is refused: `privgrad
    budget` and `privgrad statement` give the epsilon of the whole.
    """
    answer: dict[str, Any] = {}
    if ledger and noise_multiplier is sample_rate is steps is None:
        for path in filter(is_budget, ledger):
            remedy = "run `privgrad budget` on it; epsilons of several budgets on the same people add up"
            raise expected("privgrad epsilon", f"{path}", "to be a ledger", "a budget", remedy)
        records = {path: Ledger(path, read_only=True) for path in ledger}
        require_no_budget("privgrad epsilon", records.values())
        if delta is None:
            delta = recorded_delta("privgrad epsilon", records.values())
        answer["delta"] = delta
        found = {path: _cost(record, delta, f"{path}: " if ledger[1:] else "") for path, record in records.items()}
        answer |= _together(records, found, delta) if ledger[1:] else found[ledger[0]]
    elif not ledger and noise_multiplier is not None and sample_rate is not None and steps is not None:
        if delta is None:
            remedy = "give --delta, at most 1 / num_examples"
            raise expected("privgrad epsilon", "--delta", "to be given without a ledger", None, remedy)
        answer |= {"delta": delta, "noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
        answer |= _epsilons_of([Release(noise_multiplier, sample_rate, count=steps)], delta)
    else:
        options = {"--noise-multiplier": noise_multiplier, "--sample-rate": sample_rate, "--steps": steps}
        given = ["LEDGER"] * bool(ledger) + [name for name, value in options.items() if value is not None]
        condition = f"to be either LEDGER or {', '.join(options)}"
        remedy = "give a ledger, or --noise-multiplier, --sample-rate and --steps"
        raise expected("privgrad epsilon", "the arguments", condition, ", ".join(given) or "no arguments", remedy)
    if answer.get("covered_by_accountant") is False:
        note("batches of fixed size: epsilon is computed as if they were Poisson, and no accountant covers that")
    if "ledgers" not in answer or as_json:
        print_answer(answer, as_json=as_json)
        return
    together: dict[str, Any] = {"ledger": "together", **answer}
    costs = [f"epsilon {kind}" for kind in get_args(Accountant)]
    rows = [
        {"ledger": one["ledger"], "releases": one["releases"]}
        | {cost: rounded_up(one[cost.replace(" ", "_")]) for cost in costs}
        for one in (*answer["ledgers"], together)
    ]
    title, caption = f"At delta = {rounded_up(answer['delta'])}", "Together: all releases composed."
    print_table(title, rows, left=("ledger",), right=("releases", *costs), caption=caption)


def calibrate(
    target_epsilon: Annotated[float, typer.Option(help="The largest epsilon allowed.")],
    delta: Delta,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="Poisson sampling rate q, in (0, 1]: expected batch size / examples, or cohort / users."),
    ] = None,
    steps: Steps = None,
    noise_multiplier: NoiseMultiplier = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size, with --num-examples in place of --sample-rate.")
    ] = None,
    num_examples: Annotated[int | None, typer.Option(help="Public number of examples, with --batch-size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Number of epochs, in place of --steps.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the noise multiplier for a number of steps, or the number of steps for a noise multiplier."""
    function = "privgrad calibrate"
    if (sample_rate is None) == (batch_size is None) or (batch_size is None) != (num_examples is None):
        got = f"--sample-rate {sample_rate}, --batch-size {batch_size} and --num-examples {num_examples}"
        remedy = "give --sample-rate alone, or both of the others"
        raise expected(function, "either --sample-rate or --batch-size and --num-examples", "to be given", got, remedy)
    if batch_size is not None and num_examples is not None:
        require_integer(function, "--batch-size", batch_size, 1)
        require_integer(function, "--num-examples", num_examples, batch_size)
        sample_rate = batch_size / num_examples
    assert sample_rate is not None
    if epochs is not None:
        require_rate(function, sample_rate)
        steps = steps_of(function, steps, epochs, sample_rate)
    if (steps is None) == (noise_multiplier is None):
        got = f"--steps {steps} and --noise-multiplier {noise_multiplier}"
        remedy = "give the one that you know; the command computes the other"
        raise expected(function, "one of --steps and --noise-multiplier", "to be given", got, remedy)
    budget: dict[str, Any] = {"target_epsilon": target_epsilon, "delta": delta, "sample_rate": sample_rate}
    if noise_multiplier is None:
        assert steps is not None
        noise_multiplier = accounting.calibrate_noise_multiplier(**budget, steps=steps)
    else:
        steps = accounting.steps_for_budget(**budget, noise_multiplier=noise_multiplier)
    answer = budget | {"noise_multiplier": noise_multiplier, "steps": steps}
    answer |= _epsilons_of([Release(noise_multiplier, sample_rate, count=steps)], delta)
    print_answer(answer, as_json=as_json)


def _epsilons_of(releases: list[Release], delta: float, *, assume_poisson: bool = False) -> dict[str, float]:
    options: dict[str, Any] = {"delta": delta, "assume_poisson": assume_poisson}
    return {f"epsilon_{one}": accounting.epsilon(releases, accountant=one, **options) for one in get_args(Accountant)}


def _cost(ledger: Ledger, delta: float, place: str) -> dict[str, Any]:
    """Return the facts and the epsilons of one ledger, and print the notes on it."""
    facts = {name: value for name, value in ledger.plan_facts.items() if name != "delta"}  # the answer has the one used
    covered = facts["sampling"] in COVERED
    for one in _notes(ledger):
        note(place + one)
    if delta > 1 / facts["num_examples"]:
        whole = "user" if facts.get("privacy_unit") == "user" else "record"
        note(f"{place}delta is above 1 / num_examples: even publishing one whole {whole} would be allowed")
    costs = _epsilons_of(ledger.charged, delta, assume_poisson=not covered)
    return {"releases": ledger.releases, "covered_by_accountant": covered, **facts, **costs}


def _together(records: dict[Path, Ledger], found: dict[Path, dict[str, Any]], delta: float) -> dict[str, Any]:
    """Return the cost of each ledger, and of all releases composed, usually below the sum of the single ones."""
    require_one_promise("privgrad epsilon", records.values())
    note("epsilon holds if all plans were fixed before the first result; otherwise take a budget")
    covered = all(one["covered_by_accountant"] for one in found.values())
    charged = [release for ledger in records.values() for release in ledger.charged]
    return {
        "ledgers": [{"ledger": str(path), **one} for path, one in found.items()],
        "releases": sum(one["releases"] for one in found.values()),
        "covered_by_accountant": covered,
        **_epsilons_of(charged, delta, assume_poisson=not covered),
    }


def _notes(ledger: Ledger) -> Iterator[str]:
    """Yield the facts about a ledger that its numbers do not show."""
    if ledger.plan_facts.get("privacy_unit") == "user":
        yield "the privacy unit is a user with all their examples: read example as user, batch as cohort, step as round"
    if ledger.plan_facts.get("simulates") is not None:
        yield "the training simulates a plan in smaller batches (PrivacyPlan.scaled): its own epsilon is infinite"
    if ledger.plan_facts.get("noise_memory") is not None:
        most = ledger.participations
        yield f"noise with memory: a person took part in at most {most} releases, and epsilon counts these"
    if ledger.seeded_releases:
        yield f"{ledger.seeded_releases} releases were drawn under a research seed: predictable noise gives no privacy"
    if not ledger.releases:
        yield "nothing was charged to this ledger: if a model was trained in this folder, its ledger is missing"
    if ledger.was_cut_off:
        yield "the last line was cut off while it was written: nothing was released for it, so it is not counted"
