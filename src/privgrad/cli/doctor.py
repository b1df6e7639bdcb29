"""The command that lists the modules of a model that block private training.

typer calls `doctor` for `privgrad doctor`; `doctor` calls `gradient.validation`. The privacy guarantee does not rest on
this file.
"""

import importlib
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from torch import nn

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.errors import expected
from privgrad.gradient.validation import find_problems


def doctor(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function (or class) that returns the model.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the modules that block private training, with a remedy for each. Exit code 1 if there are any."""
    problems = find_problems(_make(factory))
    if as_json:
        print_json({"problems": [asdict(problem) for problem in problems]})
    elif not problems:
        STDOUT.print("Nothing in the structure of this model blocks private training.")
    else:
        table = Table(title=f"Problems that block private training: {len(problems)}")
        for name in ("module", "type", "problem", "remedy"):
            table.add_column(name, overflow="fold")
        for problem in problems:
            table.add_row(problem.path or "(the model)", problem.module, problem.what, problem.remedy)
        STDOUT.print(table)
    raise typer.Exit(1 if problems else 0)


def _make(factory: str) -> nn.Module:
    """Import the factory from the current folder and return its model, or raise PrivacyError."""
    module_name, separator, name = factory.partition(":")
    remedy = "give package.module:function, importable from the current folder"
    if not separator or not name or not all(module_name.split(".")):
        raise expected("privgrad doctor", "factory", "to be MODULE:FACTORY", repr(factory), remedy)
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise expected("privgrad doctor", "factory", "to be importable", error, remedy) from error
    try:
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    except TypeError as error:
        remedy = "give a function that needs no arguments"
        raise expected("privgrad doctor", "factory", "to return a model", error, remedy) from error
    if not isinstance(model, nn.Module):
        raise expected("privgrad doctor", "factory", "to return an nn.Module", type(model).__name__, "return the model")
    return model
