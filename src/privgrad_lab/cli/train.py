"""Commands that run trainings: one training, a comparison, or the table or figure of a paper."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from privgrad.accounting.accountant import rounded_up
from privgrad.cli.console import STDERR, STDOUT, AsJson, command_line, print_json, stoppable
from privgrad.errors import expected
from privgrad.ledger.file import is_in_use
from privgrad.progress import notes_only
from privgrad_lab import paid_runner, runner
from privgrad_lab.comparison import paid_report_of, report_of
from privgrad_lab.load_spec import load_spec
from privgrad_lab.paid_runner import largest_total, shared_budget
from privgrad_lab.prices import price, tunes_norm
from privgrad_lab.records import Record, in_phase, is_begun
from privgrad_lab.spec import Device, Spec
from privgrad_lab.trial import Estimate

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The experiment; examples/ has some.")]
OutFolder = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for report, ledgers and checkpoints. Default: runs/<name of SPEC or ITEM>."),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Move an existing folder aside and start again, instead of resuming. Its epsilon still counts.",
    ),
]


def train(
    spec: SpecPath,
    out: OutFolder = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Research seed: makes the run reproducible and NOT private. Default: the system's entropy."),
    ] = None,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Train one method privately, and write ledger and report.

    Run it again to resume. With --json, the last line of the output holds the metric by its name, epsilon and delta.
    """
    loaded, folder = load_spec(spec), out or Path("runs") / spec.stem
    if restart:
        move_aside(folder)
    with stoppable(lambda: resuming(folder)):
        records = runner.train(loaded, folder, seed=seed, progress=notes_only() if as_json else True)
    record = records[-1]
    score = {record["score"]: record["test_accuracy"]} if record["score"] else {}
    rest = {name: record[name] for name in ("epsilon", "delta", "head", "seconds") if record.get(name) is not None}
    headline = {**score, **record.get("metrics", {}), "loss": record["test_loss"], **rest}
    _report(loaded, records, folder, as_json=as_json, headline=headline)


def compare(
    spec: SpecPath,
    out: OutFolder = None,
    restart: Restart = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check SPEC and its data, show the price, commit nothing. Exit code 1 if it does not fit."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods, tuned on one grid.

    Run it again to resume. With privacy.total_epsilon the comparison is private: tuning and training together cost this
    total. Otherwise it is research: several seeds, which are public, and no privacy.
    """
    if dry_run:
        raise typer.Exit(_dry_run(load_spec(spec), as_json=as_json))
    loaded, folder = load_spec(spec), out or Path("runs") / spec.stem
    if loaded.privacy.total_epsilon is not None:
        _compare_privately(loaded, folder, restart=restart, as_json=as_json)
        return
    if restart:
        move_aside(folder)
    with stoppable(lambda: resuming(folder)):
        records = runner.compare(loaded, folder, progress=notes_only() if as_json else True)
    _report(loaded, records, folder, as_json=as_json)


def reproduce(
    item: Annotated[str | None, typer.Argument(metavar="PAPER/ITEM", help="The table or figure.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    out: OutFolder = None,
    data: Annotated[Path | None, typer.Option(help="The paper's own data, where the default is a stand-in.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a tiny version (seconds to minutes); its numbers mean nothing.")
    ] = False,
    so_far: Annotated[bool, typer.Option("--so-far", help="Run nothing; show the results so far.")] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="Run this method only; repeatable. Each choice needs its own --out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run nothing but a trial; show the hours, memory and cost.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of this machine, to show the cost in money before the start.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to train; auto takes a GPU if there is one.")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once; each takes the memory of the trial.")] = 1,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of a paper, or resume it."""
    from privgrad_lab.papers import reproduce as papers
    from privgrad_lab.papers.listing import listing, listing_table

    if as_list or item is None:
        if as_json:
            print_json({"items": papers.items(), "rows": listing()})
        else:
            STDOUT.print(listing_table())
        return
    folder = Path("runs") / item.replace("/", "-") if out is None else out
    if smoke and out is None:
        folder = folder.with_name(f"{folder.name}-smoke")
    if restart and so_far:
        raise expected("privgrad reproduce", "--so-far or --restart", "to be given alone", "--so-far and --restart")

    def announce(name: str, found: Estimate) -> None:
        STDERR.print(f"{name}: {found.text(price_per_hour)}", highlight=False, soft_wrap=True)

    if dry_run:
        foretold: dict[str, Estimate] = {}
        show = foretold.__setitem__
        papers.foretell(item, folder, show, data=data, methods=method or (), smoke=smoke, device=device)
        if as_json:
            print_json({name: found._asdict() for name, found in foretold.items()})
            return
        lines = [f"{name}: {found.text(price_per_hour)}" for name, found in foretold.items()]
        STDOUT.print("\n".join(lines or [f"{item}: no trainings are left, or none is foretold."]), soft_wrap=True)
        return
    if restart:
        move_aside(folder)
    with stoppable(lambda: resuming(folder)):
        found, table = papers.reproduce(
            item,
            folder,
            data=data,
            methods=method or (),
            smoke=smoke,
            so_far=so_far,
            device=device,
            jobs=jobs,
            progress=not as_json,
            announce=None if as_json or smoke else announce,
            command=command_line(),
        )
    if as_json:
        print_json(found)
        return
    STDOUT.print(table)
    STDOUT.print(f"Records: {folder}")


def move_aside(folder: Path) -> None:
    """Move an existing folder aside and print its new path. It keeps its ledgers, whose cost adds to the new one."""
    if not folder.exists():
        return
    ledgers = list(folder.rglob("ledger.jsonl"))
    for path in filter(is_in_use, ledgers):
        raise expected("experiments", f"{path}", "to be unlocked", "a lock of a running training", "stop it first")
    is_charged = any(path.stat().st_size for path in ledgers)
    aside = next(p for k in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}-{k}")).exists())
    shutil.move(folder, aside)
    more = ", whose releases still count: their epsilon adds to that of the new trainings on the same data"
    STDERR.print(f"moved {folder} to {aside}{more if is_charged else ''}")


def _dry_run(spec: Spec, *, as_json: bool) -> int:
    from privgrad_lab.report.paid import price_table

    if spec.privacy.total_epsilon is None:
        runner.checked_data(spec)
        answer: dict[str, Any] = {"suits": True}
    else:
        paid_runner.check(spec)
        cost, budget = price(spec), shared_budget(spec)
        spent = cost.epsilon if budget is None else budget.spent(besides=cost.releases)
        cap = spec.privacy.total_epsilon if budget is None else budget.total_epsilon
        answer = {"suits": spent <= cap, "way": cost.way, "epsilon": cost.epsilon, "spent_with_it": spent, "cap": cap}
        if budget is not None and not answer["suits"]:
            answer["largest_total"] = largest_total(cost, budget)
    if as_json:
        print_json(answer)
        return int(not answer["suits"])
    if "cap" in answer:
        STDOUT.print(price_table(spec))
        fits = "fits into" if answer["suits"] else "does NOT fit into"
        spent, cap = rounded_up(answer["spent_with_it"], 4), rounded_up(answer["cap"])
        STDOUT.print(f"It {fits} the budget: epsilon {spent} of {cap} with it.")
    if (largest := answer.get("largest_total")) is not None:
        STDOUT.print(f"The largest total_epsilon that fits is about {largest:g}. Nothing was written.")
        return 1
    STDOUT.print("Spec, data and models suit each other. Nothing was written.")
    return 0


def _compare_privately(spec: Spec, folder: Path, *, restart: bool, as_json: bool) -> None:
    from privgrad_lab.report.paid import price_table, result_text

    with stoppable(lambda: resuming(folder)):
        records = paid_runner.compare(
            spec,
            folder,
            progress=notes_only() if as_json else True,
            announce=None if as_json else lambda: STDOUT.print(price_table(spec)),
            restart=(lambda: move_aside(folder)) if restart else None,
        )
    outcome = paid_report_of(spec, records, folder, command=command_line())
    if as_json:
        print_json(outcome)
        return
    STDOUT.print(Text(result_text(outcome, records, with_norm=tunes_norm(spec))))
    head = f"Head: {outcome['head']} (pg.Head.load)\n" if outcome.get("head") else ""
    STDOUT.print(Text(f"Weights: {outcome['model']}\n{head}Report: {outcome['report']}"))


def _report(spec: Spec, records: list[Record], folder: Path, *, as_json: bool, headline: Record | None = None) -> None:
    from privgrad_lab.report.texts import summary_table, total_text

    answer, metadata = report_of(spec, records, folder, command=command_line())
    if as_json:
        print_json((headline or {}) | answer)
        return
    STDOUT.print(summary_table(records))
    if answer["research_seeds"]:
        STDOUT.print(
            "Research seeds: each ε would hold if nobody knew them. They are public, so the noise protects nobody."
        )
    if metadata["total_epsilon"] is not None:
        STDOUT.print(Text(total_text(metadata["total_epsilon"], tuned=bool(in_phase(records, "tuning")))))
    if metadata["model"] is not None:
        STDOUT.print(Text(f"Model: {metadata['model']}"), soft_wrap=True)
    STDOUT.print(f"Report: {answer['report']}")


def resuming(out: Path) -> str:
    """Return how to resume the trainings of a folder after an interruption."""
    if not is_begun(out):
        return "before the first training; nothing was spent. Run the same command again"
    return "the state is saved; run the same command again, without --restart, to resume"
