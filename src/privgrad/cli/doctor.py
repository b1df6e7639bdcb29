"""The command `privgrad doctor`, which lists what blocks private training: modules of a model, or rows of a file."""

import importlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from torch import nn

from privgrad.checks.model_and_loss import Problem, find_problems
from privgrad.cli.console import STDOUT, AsJson, print_json, print_table
from privgrad.engine.explanation import REMEDY_OF_UNUSED, Explanation, explain
from privgrad.errors import expected, readable
from privgrad.plugins import from_lab

_SELF = "privgrad doctor"


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
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Print FILE.toml in the spelling of this version; check nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what blocks private training, in a model or in data.

    Each problem has a remedy. The exit code is 1 if anything blocks private training.

    For a model: its modules. With --batch, also list the parameters that the loss does not use, and say how each
    gradient is computed, what is slow, and what a step costs in time and memory, without noise and optimizer.

    For a TOML file: rows of its data that are missing, repeated, out of range or of the same person, and images that
    cannot be read; columns that are not declared; how much there is, and whether num_examples suits the training part;
    a delta above 1 / num_examples. Errors alone block a training; the rest is for you to judge. This is NOT private: do
    not publish it. A file with tables model and privacy is also checked with its data as `privgrad train` checks them
    before it makes the model.
    """
    if factory.endswith(".toml"):
        if batch is not None:
            raise expected(_SELF, "batch", "to be absent for a TOML file", repr(batch))
        raise typer.Exit(from_lab("examine")(Path(factory), as_json=as_json, rewrite=rewrite))
    if rewrite:
        raise expected(_SELF, "--rewrite", "to be given with a TOML file", repr(factory))
    model = _made("factory", factory)
    if not isinstance(model, nn.Module):
        raise expected(_SELF, "factory", "to return an nn.Module", type(model).__name__)
    problems = find_problems(model)
    found = _tried(model, batch, engine) if batch is not None and not problems else None
    if found is not None:
        unused = dict[str, list[str]]()  # by the path of the module that owns the parameters
        for path, _, name in (full.rpartition(".") for full in found.unused):
            unused.setdefault(path, []).append(name)
        what = "has parameters that the loss does not use: "
        kinds = {path: type(model.get_submodule(path)).__name__ for path in unused}
        problems = [Problem(at, kinds[at], what + ", ".join(own), REMEDY_OF_UNUSED) for at, own in unused.items()]
    if as_json:
        more = {} if found is None else {"explanation": asdict(found)}
        print_json({"problems": [asdict(problem) for problem in problems], **more})
        raise typer.Exit(1 if problems else 0)
    rows = [
        {"module": one.path or "(the model)", "type": one.module, "problem": one.what, "remedy": one.remedy}
        for one in problems
    ]
    if rows:
        print_table(rows, title=f"Problems that block private training: {len(rows)}")
    else:
        STDOUT.print("Nothing in the structure of this model blocks private training.")
    if found is not None:
        if slow := found.rows():
            print_table(slow, title="Parameters without a fast rule")
        for line in found.lines():
            STDOUT.print(line, highlight=False, soft_wrap=True)
    elif not problems:
        STDOUT.print("Whether examples stay apart, and what a step costs, is tried with --batch MODULE:FUNCTION.")
    raise typer.Exit(1 if problems else 0)


def _tried(model: nn.Module, batch: str, engine: str) -> Explanation:
    """Return how the gradients of a model are computed on public examples."""
    made = _made("batch", batch)
    kind = type(made).__name__
    pair = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else ()
    if len(pair) != 2 or not callable(pair[0]):
        remedy = "return (loss_fn, examples), with loss_fn(model, examples) -> losses of shape (B,)"
        raise expected(_SELF, "batch", "to return (loss_fn, examples)", kind, remedy)
    with readable(_SELF, "batch", "to return examples as the model and loss_fn take them", "return a batch of tensors"):
        return explain(model, *pair, engine=cast(Any, engine))


def _made(name: str, given: str) -> object:
    """Import MODULE:NAME from the current folder, and return what it makes."""
    module_name, _, attribute = given.partition(":")
    remedy = "give package.module:function, importable from the current folder"
    if Path(given).exists():
        remedy = "for data, give a TOML file whose table `data` names it (docs/own-data.md), else MODULE:FUNCTION"
    sys.path.insert(0, os.getcwd())
    with readable(_SELF, name, "to be an importable MODULE:NAME", remedy):
        found = getattr(importlib.import_module(module_name), attribute)
    with readable(_SELF, name, "to be a function without arguments that does not fail", ""):
        return found() if callable(found) and not isinstance(found, nn.Module) else found
