"""The parts that all commands share: their output, the notes on stderr, and the end of a training by a signal.

The other files of this package call it. The privacy guarantee does not rest on this file.
"""

import json
import math
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from privgrad.experiments.folder import is_begun
from privgrad.rounding import rounded_up

STDOUT = Console()
STDERR = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]


def command_line() -> str:
    """Return the command as the user typed it."""
    return "privgrad " + " ".join(sys.argv[1:])


def tell(kind: str, color: str, message: object) -> None:
    """Print one line on stderr. It is text, not markup, because messages quote user input."""
    STDERR.print(Text.assemble((f"{kind}: ", color), str(message)), soft_wrap=True)


@cache
def note_once(message: str) -> None:
    """Print a note once, although every training builds a plan and every plan warns. `cli.main` calls it."""
    tell("note", "yellow", message)


def print_answer(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print names and values as a table with two columns, or as one JSON object."""
    if as_json:
        print_json(answer)
        return
    table = Table(show_header=False)
    for name, value in answer.items():
        table.add_row(name.replace("_", " "), rounded_up(value) if isinstance(value, float) else str(value))
    STDOUT.print(table)


def print_json(answer: dict[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(to_json(answer))  # noqa: T201


def to_json(value: dict[str, Any]) -> str:
    """Return an object as JSON on one line; a number that is not finite becomes null, because JSON has none."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    """Replace each number that is not finite by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def resuming(out: Path) -> str:
    """Return how to resume the trainings of a folder after an interruption, for `stoppable`."""
    if not is_begun(out):
        return "before the first training; nothing was spent. Run the same command again"
    return "the state is saved; run the same command again, without --restart, to resume"


@contextmanager
def stoppable(remedy: Callable[[], str] = lambda: "run the same command again") -> Generator[None]:
    """Let SIGINT and SIGTERM end a training in order, and print how to resume.

    `fit` saves its state when it is interrupted. `cli.main` has one for all commands, and trainings have their own.

    Args:
        remedy: called after the interruption, for the text.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        tell("stopped", "yellow", remedy())
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
