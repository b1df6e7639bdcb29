"""Progress bars on standard error: steps done, time left, and the epsilon spent.

`fit` and `experiments.runner` call it. The privacy guarantee does not rest on this file.
"""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Speed is measured over the last thousand updates. By default rich forgets updates older than half a minute, and then
# cannot estimate the remaining time of slow steps.
_REMEMBERED_SECONDS = 24 * 3600.0


def bars(*, shown: bool) -> Progress:
    """Return progress bars. Create each task with a field `note`, the text at the end of its line.

    Args:
        shown: whether to show them. If standard error is not a terminal, only the final state is printed.
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
