"""The command that lists what blocks private training: modules of a model, or rows of a data file.

typer calls `doctor` for `privgrad doctor`; `doctor` calls `gradient.validation` and `data.findings`. The privacy
guarantee does not rest on this file.
"""

import importlib
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Table
from torch import nn

from privgrad import data as loaders
from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.data.findings import RawFinding, raw_findings, raw_image_findings
from privgrad.data.raw_sizes import SPLIT, RawSize, raw_count_findings, raw_folder_size, raw_table_size
from privgrad.errors import PrivacyError, expected
from privgrad.experiments.load_spec import check_spec, read_tables
from privgrad.experiments.sources import find_loader
from privgrad.gradient.explanation import REMEDY_OF_UNUSED, Explanation, explain
from privgrad.gradient.validation import Problem, find_problems
from privgrad.rounding import rounded_up
from privgrad.types import LossFunction

_IMAGES = ("classes", "size", "channels", "unit", "max_rows")
_SCHEMA = ("columns", "label", "classes", "unit", "max_rows", "row_id", "table")


def doctor(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY | FILE.toml",
            help="A function or class that returns the model; or a TOML file whose table data names a file or folder.",
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns (loss_fn, batch) for public examples: the model is tried on these.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="The engine that --batch tries: factored or vmap.")] = "factored",
    as_json: AsJson = False,
) -> None:
    """List what blocks private training, with a remedy for each. Exit code 1 if anything blocks it.

    For a model: its modules. With --batch, also list the parameters that the loss does not use, and say how each
    gradient is computed, what is slow, and what a step costs in time and memory, without noise and optimizer.

    For a TOML file: rows of its data that are missing, repeated, out of range or of the same person, and images that
    cannot be read; columns that are not declared; how much there is, and whether num_examples suits the training part;
    a delta above 1 / num_examples. Errors alone block a training; the rest is for you to judge. This is NOT private: do
    not publish it. A file with tables model and privacy is also checked as `privgrad train` checks it before it loads
    the data.
    """
    if factory.endswith(".toml"):
        if batch is not None:
            remedy = "leave it out: it belongs to a model"
            raise expected("privgrad doctor", "batch", "to be absent for a TOML file", repr(batch), remedy)
        raise typer.Exit(_examine(Path(factory), as_json=as_json))
    model = _make(factory)
    problems = find_problems(model)
    found = _tried(model, batch, engine) if batch is not None and not problems else None
    if found is not None:
        problems = _of_unused(model, found.unused)
    if as_json:
        more = {} if found is None else {"explanation": asdict(found)}
        print_json({"problems": [asdict(problem) for problem in problems], **more})
        raise typer.Exit(1 if problems else 0)
    if problems:
        table = Table(title=f"Problems that block private training: {len(problems)}")
        for name in ("module", "type", "problem", "remedy"):
            table.add_column(name, overflow="fold")
        for problem in problems:
            table.add_row(problem.path or "(the model)", problem.module, problem.what, problem.remedy)
        STDOUT.print(table)
    else:
        STDOUT.print("Nothing in the structure of this model blocks private training.")
    if found is not None:
        _show(found)
    elif not problems:
        STDOUT.print("Whether examples stay apart, and what a step costs, is tried with --batch MODULE:FUNCTION.")
    raise typer.Exit(1 if problems else 0)


def _examine(path: Path, *, as_json: bool) -> int:
    """Print the findings in the data of a TOML file; return the exit code."""
    tables = read_tables(path)
    given: object = tables.get("data")
    if not isinstance(given, dict):
        remedy = "add it, as docs/own-data.md describes"
        raise expected("privgrad doctor", f"[data] of {path.name}", "to be a table", repr(given), remedy)
    data = cast("dict[str, Any]", given)
    if (loader := find_loader(data, "data")) not in (loaders.table, loaders.image_folder):
        remedy = "name a file or a folder; a function is checked by its author"
        got = data.get("name")
        raise expected("privgrad doctor", "data", "to be a file or a folder", repr(got), remedy)
    if {"model", "privacy"} <= tables.keys():  # it says what to train, and not only on what
        check_spec(tables, path)
    is_table, fits = loader is loaders.table, "each image can be read, and none is repeated"
    fits = "each row fits its declaration, and none is repeated" if is_table else fits
    declared = dict.fromkeys(("columns", "label", "classes", "unit") if is_table else _IMAGES)
    declared |= {key: data[key] for key in (_SCHEMA if is_table else _IMAGES) if key in data}
    split = {key: data[key] for key in SPLIT if key in data}
    privacy: object = tables.get("privacy")
    counted: object = cast("dict[str, Any]", privacy).get("num_examples") if isinstance(privacy, dict) else None
    found: dict[str, list[RawFinding]] = {}
    sizes: dict[str, RawSize] = {}
    for name, own in ((data.get("file") or data.get("folder"), split), (data.get("test"), None)):
        if name is not None:
            place = path.parent / Path(f"{name}").expanduser()
            several = (raw_findings if is_table else raw_image_findings)(place, **declared)
            size = (raw_table_size if is_table else raw_folder_size)(place, declared, own)
            found[place.name] = several + raw_count_findings(size, counted)
            sizes[place.name] = size
    if isinstance(privacy, dict) and (too_large := _of_delta(cast("dict[str, Any]", privacy))):
        found[path.name] = too_large
    blocked = any(one.blocks for several in found.values() for one in several)
    if as_json:
        findings = {name: [asdict(one) for one in several] for name, several in found.items()}
        raw = {"raw_findings": findings, "raw_sizes": {name: asdict(size) for name, size in sizes.items()}}
        print_json(raw | {"private": False})
        return int(blocked)
    for name, several in found.items():
        if name in sizes:
            STDOUT.print(f"{name}, NOT PRIVATE: {sizes[name].text()}.", highlight=False, soft_wrap=True)
            if note := sizes[name].note():
                STDOUT.print(escape(f"{name}: {note}."), highlight=False, soft_wrap=True)
        if several:
            STDOUT.print(_table(f"{name}: NOT PRIVATE" if name in sizes else name, several))
        else:
            STDOUT.print(f"{name}: {fits}.", highlight=False)
    if isinstance(counted, int):
        ill = [name for name, size in sizes.items() if raw_count_findings(size, counted)]
        verdict = f"does NOT suit the training part: see {', '.join(ill)}." if ill else "suits the training part."
        STDOUT.print(f"num_examples = {counted:,} {verdict}", highlight=False)
    else:
        STDOUT.print("privacy.num_examples is not given: nothing was compared with the training part.")
    STDOUT.print(
        "NOT PRIVATE: all of this is counted without noise. Do not publish it, nor decide by it what is public."
    )
    return int(blocked)


def _of_delta(privacy: dict[str, Any]) -> list[RawFinding]:
    """Return a finding if delta is so large that `PrivacyPlan` warns of it. It depends on public numbers alone."""
    delta, count = privacy.get("delta"), privacy.get("num_examples")
    if "simulate" in privacy or not (isinstance(delta, float) and isinstance(count, int) and count > 0):
        return []
    what = f"delta = {rounded_up(delta)} is above 1 / num_examples = {1 / count:.3g}"
    remedy = "lower delta far below: such a delta allows a mechanism that publishes one whole record"
    return [RawFinding("", what, 1, (), remedy)] if delta > 1 / count else []


def _table(title: str, several: Sequence[RawFinding]) -> Table:
    """Return the findings of one file or folder as a table."""
    shown = Table(title=title)
    for column in ("column", "finding", "count", "first rows", "remedy"):
        shown.add_column(column, overflow="fold")
    for one in several:
        what = f"error: {one.what}" if one.blocks else one.what
        cells = (one.column, what, f"{one.count:,}", ", ".join(map(str, one.rows)), one.remedy)
        shown.add_row(*map(escape, cells), style="red" if one.blocks else None)
    return shown


def _of_unused(model: nn.Module, unused: Sequence[str]) -> list[Problem]:
    """Return a problem for each module that owns parameters that the loss does not use."""
    names = dict[str, list[str]]()
    for path, _, name in (full.rpartition(".") for full in unused):
        names.setdefault(path, []).append(name)
    return [
        Problem(
            path,
            type(model.get_submodule(path)).__name__,
            f"has parameters that the loss does not use: {', '.join(own)}",
            REMEDY_OF_UNUSED,
        )
        for path, own in names.items()
    ]


def _tried(model: nn.Module, batch: str, engine: str) -> Explanation:
    """Return how the gradients of a model are computed on public examples."""
    made = _imported("batch", batch)
    remedy = "return (loss_fn, examples), with loss_fn(model, examples) -> losses of shape (B,)"
    with _one_line("batch", "to be a function without arguments", remedy):
        given: object = made() if callable(made) else made
    kind, pair = type(given).__name__, cast("tuple[Any, ...]", given) if isinstance(given, tuple) else ()
    loss_fn, examples = pair if len(pair) == 2 else (None, None)
    if not callable(loss_fn):
        raise expected("privgrad doctor", "batch", "to return (loss_fn, examples)", kind, remedy)
    with _one_line("batch", "to return examples as the model and loss_fn take them", "return a batch of tensors"):
        return explain(model, cast("LossFunction", loss_fn), examples, engine=cast("Any", engine))


@contextmanager
def _one_line(name: str, condition: str, remedy: str) -> Generator[None]:
    """Report an exception in the user's code as a PrivacyError of one line."""
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(".: ")
        raise expected("privgrad doctor", name, condition, got, remedy) from error


def _show(found: Explanation) -> None:
    """Print an explanation: the slow parts as a table, the rest as lines."""
    if rows := found.rows():
        table = Table(title="Parameters without a fast rule")
        for name in rows[0]:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*row.values())
        STDOUT.print(table)
    for line in found.lines():
        STDOUT.print(line, highlight=False, soft_wrap=True)


def _imported(name: str, given: str) -> Any:
    """Return MODULE:NAME, imported from the current folder, or raise PrivacyError."""
    module_name, separator, attribute = given.partition(":")
    remedy = "give package.module:function, importable from the current folder"
    if Path(given).exists():
        remedy = (
            "for data, give a TOML file whose table `data` names it (docs/own-data.md); for a model, MODULE:FUNCTION"
        )
    if not separator or not attribute or not all(module_name.split(".")):
        raise expected("privgrad doctor", name, "to be MODULE:NAME", repr(given), remedy)
    sys.path.insert(0, os.getcwd())
    with _one_line(name, "to be importable", remedy):
        return getattr(importlib.import_module(module_name), attribute)


def _make(factory: str) -> nn.Module:
    """Import the factory from the current folder and return its model, or raise PrivacyError."""
    made = _imported("factory", factory)
    with _one_line("factory", "to return a model", "give a function that needs no arguments"):
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(model, nn.Module):
        raise expected("privgrad doctor", "factory", "to return an nn.Module", type(model).__name__, "return the model")
    return model
