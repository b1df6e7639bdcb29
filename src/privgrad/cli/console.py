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
    rows: Sequence[Mapping[str, object]], *, title: str | None = None, caption: str | None = None, header: bool = True
) -> None:
    """Print rows as a table, with their keys as its header. No number is cut or wrapped; long texts fold."""
    table = Table(title=title, caption=caption, caption_justify="left", show_header=header)
    for name in rows[0] if rows else ():
        is_number = header and all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(value)) for value in row.values()))
    STDOUT.print(table)


def print_answer(answer: Mapping[str, object], *, as_json: bool) -> None:
    """Print names and values as a table with two columns, or as one JSON object. The table leaves None out."""
    if as_json:
        print_json(dict(answer))
        return
    known = {name.replace("_", " "): value for name, value in answer.items() if value is not None}
    print_table([{"name": name, "value": value} for name, value in known.items()], header=False)


def _shown(value: object) -> str:
    """Return a value for a person: a float as an upper bound, as epsilons are."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in cast("dict[str, object]", value).items())
    if isinstance(value, list):
        return " ".join(map(_shown, cast("list[object]", value)))
    return rounded_up(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


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
