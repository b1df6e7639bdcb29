"""The command that lists the modules of a model that block private training.

typer calls `doctor` for `privgrad doctor`; `doctor` calls `gradient.validation`. The privacy guarantee does not rest on
this file.
"""

import importlib
import os
import sys
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich.table import Table
from torch import nn

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.errors import expected
from privgrad.gradient.explanation import WAYS, Explanation, explain
from privgrad.gradient.validation import find_problems
from privgrad.types import LossFunction


def doctor(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function (or class) that returns the model.")
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns (loss_fn, batch) for public examples: the model is tried on these.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the modules that block private training, with a remedy for each. Exit code 1 if there are any.

    With --batch, also say which parameters the loss does not use, how each gradient is computed, what is slow, and what
    a step costs in time and memory.
    """
    model = _make(factory)
    problems = find_problems(model)
    found = _tried(model, batch) if batch is not None and not problems else None
    if as_json:
        more = {} if found is None else {"explanation": asdict(found)}
        print_json({"problems": [asdict(problem) for problem in problems], **more})
    elif not problems:
        STDOUT.print("Nothing in the structure of this model blocks private training.")
        if found is not None:
            _show(found)
        else:
            STDOUT.print("Whether examples stay apart, and what a step costs, is tried with --batch MODULE:FUNCTION.")
    else:
        table = Table(title=f"Problems that block private training: {len(problems)}")
        for name in ("module", "type", "problem", "remedy"):
            table.add_column(name, overflow="fold")
        for problem in problems:
            table.add_row(problem.path or "(the model)", problem.module, problem.what, problem.remedy)
        STDOUT.print(table)
    raise typer.Exit(1 if problems else 0)


def _tried(model: nn.Module, batch: str) -> Explanation:
    """Return how the gradients of a model are computed on public examples."""
    made = _imported("batch", batch)
    given: object = made() if callable(made) else made
    pair = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else ()
    loss_fn, examples = pair if len(pair) == 2 else (None, None)
    if not callable(loss_fn):
        remedy = "return (loss_fn, examples), with loss_fn(model, examples) -> losses of shape (B,)"
        raise expected("privgrad doctor", "batch", "to return (loss_fn, examples)", type(made).__name__, remedy)
    return explain(model, cast("LossFunction", loss_fn), examples)


def _show(found: Explanation) -> None:
    """Print an explanation: the slow parts as a table, the rest as lines."""
    if found.slow:
        table = Table(title="Parameters without a fast rule")
        for name in ("module", "type", "share", "computed", "why", "remedy"):
            table.add_column(name, overflow="fold")
        for part in found.slow:
            name, share = part.path or "(the model)", f"{part.share:.1%}"
            table.add_row(name, part.kind, share, WAYS[part.way], part.why, part.remedy or "none needed")
        STDOUT.print(table)
    for line in found.lines():
        STDOUT.print(line, highlight=False)


def _imported(name: str, given: str) -> Any:
    """Return MODULE:NAME, imported from the current folder, or raise PrivacyError."""
    module_name, separator, attribute = given.partition(":")
    remedy = "give package.module:function, importable from the current folder"
    if not separator or not attribute or not all(module_name.split(".")):
        raise expected("privgrad doctor", name, "to be MODULE:NAME", repr(given), remedy)
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise expected("privgrad doctor", name, "to be importable", error, remedy) from error


def _make(factory: str) -> nn.Module:
    """Import the factory from the current folder and return its model, or raise PrivacyError."""
    made = _imported("factory", factory)
    try:
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except TypeError as error:
        remedy = "give a function that needs no arguments"
        raise expected("privgrad doctor", "factory", "to return a model", error, remedy) from error
    if not isinstance(model, nn.Module):
        raise expected("privgrad doctor", "factory", "to return an nn.Module", type(model).__name__, "return the model")
    return model
