"""The command line: it parses the arguments, calls the library and prints the results.

The shell calls `main` as `privgrad`, and `__main__` calls it for `python -m privgrad`. typer then calls `privgrad` and
the function of the command. The privacy guarantee does not rest on this package.
"""

import sys
import warnings
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from privgrad.cli import audit, budget, data, doctor, privacy, reproduce, statement, train
from privgrad.cli.console import STDOUT, note_once, print_json, stoppable, tell
from privgrad.errors import PrivacyError, did_you_mean


class _Commands(TyperGroup):
    """The commands. An unknown one is an error that names the valid ones. Ctrl-C ends each of them in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, ...]:
        """Return what typer found for the arguments; click calls it. An unknown command ends in a usage error."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            remedy = did_you_mean(args[0], names, f"choose one of {', '.join(names)}")
            ctx.fail(f"No such command {args[0]!r}; {remedy}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; typer calls it."""
        with stoppable():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Differentially private training for PyTorch, with optimizers corrected for the privacy noise.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_COMMANDS = (
    train.train,
    train.compare,
    reproduce.reproduce,
    privacy.epsilon,
    privacy.calibrate,
    statement.statement,
    budget.budget,
    audit.audit,
    doctor.doctor,
)
app.add_typer(data.data, name="data")
for _command in _COMMANDS:
    app.command()(_command)


def _tell_version(wanted: bool) -> None:
    """Print the version and exit; typer calls it for --version."""
    if wanted:
        STDOUT.print(f"privgrad {metadata.version('privgrad')}", highlight=False)
        raise typer.Exit


@app.callback()
def privgrad(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before a command."""


def main() -> None:
    """Run the command line. Report bad input in one line, with --json also as an object, and exit with code 2."""
    warnings.showwarning = _show_warning
    note_once.cache_clear()
    try:
        app()
    except PrivacyError as error:
        tell("error", "red", error)
        if "--json" in sys.argv:
            print_json({"error": str(error)})
        sys.exit(2)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a note; Python calls it for each warning."""
    note_once(str(message))
