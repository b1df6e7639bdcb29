"""Commands on ledgers, budgets and plans: their cost, what they protect, and the noise for an epsilon."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from privgrad.accounting import accountant as accounting
from privgrad.accounting.accountant import Accountant, Release, rounded_up
from privgrad.accounting.calibration import one_of, steps_of
from privgrad.cli.console import STDOUT, AsJson, note, print_answer, print_json, print_table, tell
from privgrad.errors import expected, require_integer, require_rate
from privgrad.ledger.budget import Budget, is_budget
from privgrad.ledger.ledger import Ledger
from privgrad.plan import sample_rate_of
from privgrad.statement.facts import Facts, ledger_facts
from privgrad.statement.registry import UNKNOWN, registry_record
from privgrad.statement.saved import opened, statement_of
from privgrad.statement.text import About, written
from privgrad.types import SHUFFLED, SamplingScheme

Delta = Annotated[float, typer.Option(help="Delta, in (0, 1); choose at most 1 / num_examples.")]
SampleRate = Annotated[float | None, typer.Option(help="Sampling rate q, in (0, 1].")]
Steps = Annotated[int | None, typer.Option(help="Number of steps T.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise multiplier sigma.")]
Sampling = Annotated[Literal["poisson", "epochs"], typer.Option(help="How batches are drawn; see docs/sampling.md.")]
Participations = Annotated[int, typer.Option(help="For epochs: in how many steps, k, of an epoch an example is.")]


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
    sampling: Sampling = "poisson",
    participations: Participations = 1,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon that ledgers have cost, or that a plan costs.

    The cost of a ledger is recomputed from its file alone. A ledger that is part of a budget is refused: `privgrad
    budget` and `privgrad statement` give the epsilon of the whole.
    """
    function = "privgrad epsilon"
    options = {"--noise-multiplier": noise_multiplier, "--sample-rate": sample_rate, "--steps": steps}
    given = [name for name, value in options.items() if value is not None]
    if (ledger and given) or (not ledger and len(given) < len(options)):
        condition = f"to be either LEDGER or {', '.join(options)}"
        got = ", ".join(["LEDGER"] * bool(ledger) + given) or "no arguments"
        raise expected(function, "the arguments", condition, got)
    if not ledger:
        drawn = _drawn(function, sampling, participations, cast(float, sample_rate))
        plan: Any = {"noise_multiplier": noise_multiplier} | drawn
        cost = _epsilons_of([Release(**plan, scheme=sampling, count=cast(int, steps))], cast(float, delta))
        print_answer({"delta": delta, **plan, "steps": steps, **cost}, as_json=as_json)
        return
    for path in filter(is_budget, ledger):
        remedy = "run `privgrad budget` on it; epsilons of several budgets on the same people add up"
        raise expected(function, f"{path}", "to be a ledger", "a budget", remedy)
    records = [Ledger(path, read_only=True) for path in ledger]
    facts = ledger_facts(records, delta, function=function, bounds_attacks=False)
    rows = [{"ledger": f"{path}", **_row(one, facts.delta)} for path, one in zip(ledger, records, strict=True)]
    together = {"releases": facts.releases, "covered_by_accountant": facts.covered_by_accountant}
    together |= {"epsilon_pld": facts.epsilon, "epsilon_rdp": facts.epsilon_rdp}
    _note(facts, dict(zip(ledger, records, strict=True)))
    if not ledger[1:]:
        print_answer({"delta": facts.delta, **_row(records[0], facts.delta)}, as_json=as_json)
    elif as_json:
        print_json({"delta": facts.delta, "ledgers": rows, **together})
    else:
        columns = ("ledger", "releases", "epsilon_pld", "epsilon_rdp")
        print_table(
            [
                {name.replace("_", " "): row[name] for name in columns}
                for row in (*rows, {"ledger": "together"} | together)
            ],
            title=f"At delta = {rounded_up(facts.delta)}",
            caption="Together: all releases composed.",
        )


def _row(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Return the facts of one ledger, and its epsilons."""
    facts = {name: fact for name, fact in ledger.plan_facts.items() if name != "delta"}  # it may be another one
    covered = facts["sampling"] != SHUFFLED
    return {
        "releases": ledger.releases,
        "covered_by_accountant": covered,
        **facts,
        **_epsilons_of(ledger.charged, delta),
    }


def _note(facts: Facts, records: Mapping[Path, Ledger]) -> None:
    """Print what the statement says of the epsilon besides the number, and on files that lack something."""
    said = written(facts)
    if facts.privacy_unit == "user":
        words = f"a {facts.one} with all of their data: num examples and batch sizes count {facts.many}"
        note(f"the privacy unit is {words}")
    for sentence in said.sections[0].sentences[said.is_guarantee :]:
        note(sentence)
    for path, record in records.items():
        if not record.releases:
            note(f"{path}: nothing was charged: if a model was trained in this folder, its ledger is missing")
        if record.was_cut_off:
            note(f"{path}: the last line was cut off while it was written: nothing was released for it")


def calibrate(
    target_epsilon: Annotated[float, typer.Option(help="The largest epsilon allowed.")],
    delta: Delta,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="Sampling rate q, in (0, 1]: expected batch size / examples, or cohort / users."),
    ] = None,
    steps: Steps = None,
    noise_multiplier: NoiseMultiplier = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size, with --num-examples in place of --sample-rate.")
    ] = None,
    num_examples: Annotated[int | None, typer.Option(help="Public number of examples, with --batch-size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Number of epochs, in place of --steps.")] = None,
    sampling: Sampling = "poisson",
    participations: Participations = 1,
    as_json: AsJson = False,
) -> None:
    """Compute the noise, or the number of steps, for an epsilon."""
    function = "privgrad calibrate"
    if (sample_rate is None) == (batch_size is None) or (batch_size is None) != (num_examples is None):
        got = f"--sample-rate {sample_rate}, --batch-size {batch_size} and --num-examples {num_examples}"
        raise expected(function, "either --sample-rate or --batch-size and --num-examples", "to be given", got)
    if batch_size is not None and num_examples is not None:
        require_integer(function, "--num-examples", num_examples, max(batch_size, 1))
        sample_rate = batch_size / num_examples
    assert sample_rate is not None
    drawn = _drawn(function, sampling, participations, sample_rate)
    if epochs is not None:
        steps = steps_of(function, steps, epochs, drawn["sample_rate"] / participations)
    one_of(function, **{"--steps": steps, "--noise-multiplier": noise_multiplier})  # the command computes the other
    budget: dict[str, Any] = {"target_epsilon": target_epsilon, "delta": delta} | drawn
    if steps is None:
        steps = accounting.steps_for_budget(**budget, noise_multiplier=cast(float, noise_multiplier))
    else:
        noise_multiplier = accounting.calibrate_noise_multiplier(**budget, steps=steps)
    cost = _epsilons_of([Release(cast(float, noise_multiplier), scheme=sampling, count=steps, **drawn)], delta)
    print_answer(budget | {"noise_multiplier": noise_multiplier, "steps": steps} | cost, as_json=as_json)


def _drawn(function: str, sampling: SamplingScheme, participations: int, sample_rate: float) -> dict[str, Any]:
    """Return the sample rate by name; for epochs the nearest one that they have, and their number of steps."""
    require_rate(function, sample_rate)
    require_integer(function, "--participations", participations, 1)
    if sampling == "epochs":
        rate = sample_rate_of(sample_rate, 1, sampling, participations)
        return {"sample_rate": rate, "epoch_steps": round(participations / rate)}
    if participations > 1:
        raise expected(function, "--participations", "to be 1 unless --sampling is epochs", participations)
    return {"sample_rate": sample_rate}


def _epsilons_of(releases: list[Release], delta: float) -> dict[str, float]:
    accountants = get_args(Accountant)
    return {f"epsilon_{one}": accounting.epsilon(releases, delta=delta, accountant=one) for one in accountants}


def budget(
    path: Annotated[Path, typer.Argument(help="File of the budget, such as budget.jsonl.")], as_json: AsJson = False
) -> None:
    """Show what a data set's budget was spent on, and by whom."""
    found = Budget(path)
    rows: list[dict[str, Any]] = [
        {"name": one.name, "by": one.by, "date": one.date, "releases": one.count}
        | {"epsilon": accounting.epsilon(one.releases, delta=found.delta)}
        for one in found.commitments
    ]
    answer: dict[str, Any] = {
        "total_epsilon": found.total_epsilon,
        "delta": found.delta,
        "num_examples": found.num_examples,
        "privacy_unit": found.privacy_unit,
        "spent": found.spent(),
        "left_for_one_release": found.left(),
    }
    if any(one.is_seeded for one in found.commitments):
        note("some commitments have a research seed: predictable noise gives no privacy")
    if as_json:
        print_json({**answer, "commitments": rows})
        return
    total = rounded_up(found.total_epsilon)
    title = f"Budget: epsilon {total} at delta = {rounded_up(found.delta)}"
    print_table(rows, title=title, caption="Epsilon is that of each commitment alone." if rows else None)
    lines = [f"spent: epsilon {rounded_up(answer['spent'], 4)} of {total}"]
    if len(rows) > 1:
        lines.append(
            "Later commitments may depend on results of earlier ones, so all of them are counted by a Renyi filter, "
            f"which is less tight. Quote epsilon {total}, the budget."
        )
    left = answer["left_for_one_release"]
    more = f"one more Gaussian release of epsilon about {left:.4g}. Epsilons do not simply add up."
    STDOUT.print("\n".join([*lines, f"left: {more if left else 'nothing'}"]), highlight=False)


def statement(
    ledger: Annotated[
        list[Path], typer.Argument(help="Ledger files of trainings on the same data set, or the file of its budget.")
    ],
    delta: Annotated[float | None, typer.Option(help="Delta, in (0, 1). Default: the one in the ledgers.")] = None,
    title: Annotated[str, typer.Option(help="Title of the statement.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "",
    purpose: Annotated[str, typer.Option(help="Purpose of the model.")] = "",
    data: Annotated[str, typer.Option(help="Name of the data set.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Also write the statement to this HTML file.")] = None,
    form: Annotated[
        Literal["nist", "registry"] | None,
        typer.Option(
            "--for",
            help="'nist' appends the questions of NIST SP 800-226, answered from the ledgers. 'registry' prints a "
            "record for the public registry of deployments, registry.opendp.org, in the place of the statement.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say in sentences what is protected, and what is not.

    The statement is for people who decide about data. Title, model, purpose and data set are printed as declared.
    """
    about = About(title, model, purpose, data)
    records = [opened(path) for path in ledger]
    found = statement_of("privgrad statement", records, delta, about, "nist" if form == "nist" else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.to_html(), encoding="utf-8")
        tell("page", "green", out)
    if form == "registry":
        note(f"a draft: complete what says {UNKNOWN!r}, and have it reviewed before you publish it")
        STDOUT.print_json(data=registry_record(found), indent=None if as_json else 1, highlight=False)
        return
    if as_json:
        sections = [{"heading": part.heading, "sentences": list(part.sentences)} for part in found.sections]
        print_json({"head": found.head, "statement": sections, **found.numbers})
        return
    # A file gets the lines as they are; a terminal breaks them between words.
    STDOUT.print(str(found), highlight=False, markup=False, soft_wrap=not STDOUT.is_terminal)
