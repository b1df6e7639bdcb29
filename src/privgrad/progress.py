"""Progress bars on standard error: how far, how long still, and what has been spent."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Speed is measured over the last thousand updates, however slow: by default rich forgets what is half a minute old,
# and then has no time left to tell of slow steps.
_REMEMBERED_SECONDS = 24 * 3600.0


def bars(*, shown: bool) -> Progress:
    """Bars of one layout; each task is made with a `note`, the rest of its line.

    Args:
        shown: whether to show them. Where standard error is no terminal, only their end is printed, once.
    """
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not shown, speed_estimate_period=_REMEMBERED_SECONDS)
