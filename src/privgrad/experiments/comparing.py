"""Run a comparison, research or private, and write its report.

`privgrad compare` and `privgrad.compare` call it. The privacy guarantee does not rest on this file.
"""

from pathlib import Path
from typing import Any

from privgrad.experiments import paid_runner, runner
from privgrad.experiments.folder import Record
from privgrad.experiments.paid_folder import PaidFolder
from privgrad.experiments.prices import price
from privgrad.experiments.spec import Spec
from privgrad.statement import budget_statement


def compare_and_report(spec: Spec, out: Path, *, progress: bool, command: str = "") -> dict[str, Any]:
    """Compare the methods of a spec, and write the report; return the numbers of `--json`."""
    if spec.privacy.total_epsilon is None:
        return report_of(spec, runner.compare(spec, out, progress=progress), out, command=command)[0]
    return paid_report_of(spec, paid_runner.compare(spec, out, progress=progress), out, command=command)


def report_of(spec: Spec, records: list[Record], out: Path, *, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the report of all trainings in a folder; return its numbers, and the facts of `metadata_of`."""
    # matplotlib is an optional extra and slow to import, so only what draws imports it.
    from privgrad.experiments.records import summarize
    from privgrad.experiments.report.grids import verdicts, words
    from privgrad.experiments.report.metadata import metadata_of
    from privgrad.experiments.report.page import write_report

    metadata = metadata_of(spec, records, out, command=command)
    index = write_report(records, metadata, out)
    grids = {name: words(verdict) for name, verdict in verdicts(records).items()}
    rows = [row | {"grid": grids.get(row["method"])} for row in summarize(records)]
    seeds = sorted({record["seed"] for record in records if record["seed"] is not None})
    total = metadata["total_epsilon"] and metadata["total_epsilon"]["value"]
    return {"report": str(index), "methods": rows, "research_seeds": seeds, "total_epsilon": total}, metadata


def paid_report_of(spec: Spec, records: list[Record], out: Path, *, command: str) -> dict[str, Any]:
    """Write the report and the statement of a private comparison, and return its outcome."""
    from privgrad.experiments.report.paid import write_page

    cost = price(spec)
    place = PaidFolder(spec, cost, out)
    outcome = paid_runner.outcome_of(spec, cost, records, place)
    written = budget_statement(place.budget)
    index = write_page(spec, cost, outcome, records, written, out, command=command)
    (out / "statement.html").write_text(written.to_html())
    place.hide_times()
    return outcome | {"report": str(index)}
