"""The command that reproduces tables and figures of papers.

typer calls `reproduce` for `privgrad reproduce`; it calls `papers.reproduce`. The privacy guarantee does not rest on
this file.
"""

from pathlib import Path
from typing import Annotated

import typer

from privgrad.cli.console import STDOUT, AsJson, command_line, print_json, resuming, stoppable
from privgrad.cli.train import OutFolder, Restart, move_aside
from privgrad.errors import expected


def reproduce(
    item: Annotated[str | None, typer.Argument(metavar="PAPER/ITEM", help="The table or figure.")] = None,
    as_list: Annotated[bool, typer.Option("--list", help="List all tables and figures.")] = False,
    out: OutFolder = None,
    data: Annotated[Path | None, typer.Option(help="The paper's own data, where the default is a stand-in.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a tiny version (seconds to minutes); its numbers mean nothing.")
    ] = False,
    so_far: Annotated[bool, typer.Option("--so-far", help="Run nothing; show the results so far.")] = False,
    method: Annotated[
        list[str] | None, typer.Option(help="Run this method only; repeatable. Each choice needs its own --out.")
    ] = None,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or figure of a paper and show it next to the paper's numbers. Run it again to resume."""
    from privgrad.papers import reproduce as papers

    if as_list and item is not None:
        remedy = "leave one out: --list lists all items, and PAPER/ITEM runs one"
        raise expected("privgrad reproduce", "--list or PAPER/ITEM", "to be given alone", f"--list and {item}", remedy)
    if item is None:
        if as_json:
            print_json({"items": papers.items()})
        else:
            STDOUT.print("\n".join(papers.items()))
        return
    folder = Path("runs") / item.replace("/", "-") if out is None else out
    if smoke and out is None:
        folder = folder.with_name(f"{folder.name}-smoke")
    if restart and so_far:
        remedy = "leave one out: --so-far shows the results so far, and --restart moves them aside"
        got = "--so-far and --restart"
        raise expected("privgrad reproduce", "--so-far or --restart", "to be given alone", got, remedy)
    if restart:
        move_aside(folder)
    with stoppable(lambda: resuming(folder)):
        found, table = papers.reproduce(
            item,
            folder,
            data=data,
            methods=method or (),
            smoke=smoke,
            so_far=so_far,
            progress=not as_json,
            command=command_line(),
        )
    if as_json:
        print_json(found)
        return
    STDOUT.print(table)
    STDOUT.print(f"Records: {folder}")
