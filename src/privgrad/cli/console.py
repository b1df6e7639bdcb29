"""The parts that all commands share: their output, the notes on stderr, and the end of a training by a signal."""

import json
import math
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from privgrad.accounting.accountant import rounded_up

STDOUT = Console()
STDERR = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]


def command_line() -> str:
    """Return the command as the user typed it."""
    return "privgrad " + " ".join(sys.argv[1:])


def tell(kind: str, color: str, message: object) -> None:
    """Print one line on stderr. It is text, not markup, because messages quote user input."""
    STDERR.print(Text.assemble((f"{kind}: ", color), str(message)), soft_wrap=True)


def note(message: str) -> None:
    """Print a note on stderr."""
    tell("note", "yellow", message)


note_once = cache(note)  # every training builds a plan, and every plan warns


def print_table(
    title: str,
    rows: Sequence[Mapping[str, object]],
    *,
    left: Sequence[str],
    right: Sequence[str] = (),
    caption: str | None = None,
) -> None:
    """Print rows as a table. Its columns are the keys `left`, whose long texts fold, and then the keys `right`."""
    table = Table(title=title, caption=caption)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(Text(f"{row[name]}") for name in (*left, *right)))
    STDOUT.print(table)


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
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_finite(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def stoppable(remedy: Callable[[], str] = lambda: "run the same command again") -> Generator[None]:
    """Let SIGINT and SIGTERM end a training in order, as `fit` then saves its state, and print how to resume."""

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
