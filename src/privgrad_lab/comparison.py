"""compare(): a comparison of methods from Python, with the options of the TOML file."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from privgrad.data import DataSet
from privgrad.errors import described, expected
from privgrad.statement.text import budget_statement
from privgrad_lab import paid_runner, runner
from privgrad_lab.load_spec import check_spec, read_tables
from privgrad_lab.paid_runner import PaidFolder
from privgrad_lab.prices import price
from privgrad_lab.records import Record, summarize
from privgrad_lab.spec import Spec


def report_of(spec: Spec, records: list[Record], out: Path, *, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the report of all trainings in a folder; return its numbers, and the facts of `metadata_of`."""
    # matplotlib is an optional extra and slow to import, so only what draws imports it.
    from privgrad_lab.report.metadata import metadata_of
    from privgrad_lab.report.page import write_report
    from privgrad_lab.report.texts import verdicts

    metadata = metadata_of(spec, records, out, command=command)
    index = write_report(records, metadata, out)
    grids = {name: verdict.text for name, verdict in verdicts(records).items()}
    rows = [row | {"grid": grids.get(row["method"])} for row in summarize(records)]
    seeds = sorted({record["seed"] for record in records if record["seed"] is not None})
    total = metadata["total_epsilon"] and metadata["total_epsilon"]["value"]
    return {"report": str(index), "methods": rows, "research_seeds": seeds, "total_epsilon": total}, metadata


def paid_report_of(spec: Spec, records: list[Record], out: Path, *, command: str) -> dict[str, Any]:
    """Write the report and the statement of a private comparison, and return its outcome."""
    from privgrad_lab.report.paid import write_page

    cost = price(spec)
    place = PaidFolder(spec, cost, out)
    outcome = paid_runner.outcome_of(spec, cost, records, place)
    written = budget_statement(place.budget)
    index = write_page(spec, cost, outcome, records, written, out, command=command)
    (out / "statement.html").write_text(written.to_html())
    place.hide_times()
    return outcome | {"report": str(index)}


def compare(
    spec: str | Path | Mapping[str, Any],
    *,
    out: str | Path,
    data: Callable[..., DataSet] | None = None,
    model: Callable[..., nn.Module] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Compare methods as `privgrad compare` does, and write the same folder. A second call resumes it.

    Args:
        spec: the path of a TOML file, or its tables as a mapping. docs/experiments.md lists the options.
        out: the folder of ledgers, records, weights and report.
        data: a function that returns a DataSet, in place of [data] use. It must be at the top level of a module.
            Other keys of [data] are its arguments.
        model: a function from the DataSet to a module, in place of [model] use; also at the top level of a module.
        progress: show progress bars.
    Returns:
        With privacy.total_epsilon: the outcome by name: "accuracy" or "r2", "interval", "epsilon" (the total), "model"
        (the path of the weights), "method", "max_grad_norm" and "noise_step". Otherwise, for research: "methods" (one
        row per method), "total_epsilon" and "research_seeds". In both cases "report" is the path of the page.
    Raises:
        PrivacyError: as `privgrad compare`.
        BudgetExceededError: a shared budget has less left than the total.
    Privacy:
        With privacy.total_epsilon everything is paid for before the first training. Without it, seeds are public, and
        nothing is private.
    """
    is_path = isinstance(spec, str | Path)
    tables, path = (read_tables(spec), Path(spec)) if is_path else (dict(spec), Path("spec.toml"))
    for name, function in (("data", data), ("model", model)):
        if function is not None:
            table = tables.get(name)  # a name in place of a table has no options
            tables[name] = {**(table if isinstance(table, Mapping) else {}), "use": _name_of(name, function)}
    checked, out = check_spec(tables, path), Path(out)
    if checked.privacy.total_epsilon is None:
        return report_of(checked, runner.compare(checked, out, progress=progress), out, command="")[0]
    return paid_report_of(checked, paid_runner.compare(checked, out, progress=progress), out, command="")


def _name_of(place: str, function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not function:
        remedy = "move it to the top level of a module: a resumed comparison finds it by its name"
        raise expected("compare", place, "to be a function that its module names", described(function), remedy)
    return f"{module}:{name}"
