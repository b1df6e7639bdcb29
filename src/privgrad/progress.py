"""Progress bars on standard error: steps done, time left, the epsilon spent, and notes above them."""

from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Speed is measured over the last thousand updates. By default rich forgets updates older than half a minute, and then
# cannot estimate the remaining time of slow steps.
_REMEMBERED_SECONDS = 24 * 3600.0


class _Notes(Progress):
    """A Progress that shows no bars, and prints notes."""


def bars(*, shown: bool | Progress) -> Progress:
    """Return progress bars, or those that are given. Create each task with a field `note`, the end of its line."""
    if isinstance(shown, Progress):
        return shown
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not shown, speed_estimate_period=_REMEMBERED_SECONDS)


def notes_only() -> Progress:
    """Return a Progress that shows no bars, and prints notes on standard error."""
    return _Notes(console=Console(stderr=True), disable=True)


def waiting(text: str) -> AbstractContextManager[object]:
    """Show a text in a terminal while what is in the context lasts."""
    return Console(stderr=True).status(text)


def note(bar: Progress, text: str) -> None:
    """Print one line above the bars; nothing where neither they nor notes are shown."""
    if not bar.disable or isinstance(bar, _Notes):
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
