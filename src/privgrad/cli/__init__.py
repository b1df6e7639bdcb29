"""The command line: it parses the arguments, calls the library and prints the results."""

import sys
import warnings
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from privgrad.cli import doctor, predict, privacy
from privgrad.cli.console import STDOUT, note_once, print_json, stoppable, tell
from privgrad.errors import PrivacyError
from privgrad.plugins import from_lab


class _Commands(TyperGroup):
    """The commands. Ctrl-C ends each of them in one line."""

    def invoke(self, ctx: Any) -> Any:
        with stoppable():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Differentially private training for PyTorch, with optimizers corrected for the privacy noise.",
    epilog="""For example, train on images of digits, and say what is protected:

$ privgrad train examples/recipes/digits.toml

$ privgrad statement runs/digits/runs/*/ledger.jsonl

With --json, the last line of the output is one JSON object.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PANELS = {
    "Before a training": ("data", "doctor", "calibrate"),
    "Training": ("train", "compare", "reproduce"),
    "After a training": ("predict", "epsilon", "statement", "budget", "audit"),
}
_commands: dict[str, Any] = {
    one.__name__: one
    for one in (doctor.doctor, predict.predict, privacy.calibrate, privacy.epsilon, privacy.statement, privacy.budget)
}


def _refuse() -> None:
    """Run experiments. Needs the extra 'experiments' of privgrad."""
    from_lab("commands")
    from_lab("data-commands")


try:
    _commands |= {one.__name__: one for one in from_lab("commands")} | {"data": from_lab("data-commands")}
except PrivacyError:  # privgrad_lab cannot be imported
    _commands |= dict.fromkeys(("train", "compare", "reproduce", "audit", "data"), _refuse)
for _panel, _names in _PANELS.items():
    for _name in _names:
        if isinstance(_command := _commands[_name], typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:  # a command that only refuses takes all options
            _context = {"ignore_unknown_options": True, "allow_extra_args": True} if _command is _refuse else None
            _help = "\n\n".join(" ".join(part.split()) for part in f"{_command.__doc__}".split("\n\n"))
            app.command(_name, help=_help, rich_help_panel=_panel, context_settings=_context)(_command)


def _tell_version(wanted: bool) -> None:
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
    note_once(str(message))
