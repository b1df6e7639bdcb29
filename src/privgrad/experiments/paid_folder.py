"""The folder of a private comparison: its commitment, its ledgers, and what the published files must not show.

`paid_runner` makes a PaidFolder. The privacy guarantee of the total rests on this file: everything is committed to a
budget before the first training, and a folder that has lost a ledger does not train again.
"""

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from privgrad.budget import Budget
from privgrad.errors import BudgetExceededError, expected
from privgrad.experiments.prices import Price
from privgrad.experiments.spec import Spec
from privgrad.ledger import Ledger
from privgrad.mechanisms import Release

NAME = "commitment.txt"  # the name of the folder's commitment, and the files of releases that were begun
_SELECTION = "selection.txt"  # in raw/: the secret choice of candidates, and the files of their releases


class PaidFolder:
    """The folder of one private comparison, whose releases are committed.

    Args:
        spec: an experiment with privacy.total_epsilon.
        cost: its price.
        out: the folder.
    Raises:
        BudgetExceededError: the shared budget has less left than the total.
        PrivacyError: the budget is for other data, or holds the commitment of another folder.
    Attributes:
        out: the folder.
        budget: holds all releases of the comparison.
        name: of the commitment: title, folder and a random number, kept in the folder.
    Privacy:
        When the constructor returns, all releases are committed. A comparison that resumes has committed the same
        releases already; then nothing is written. One that begins again in a new folder pays again, and a copied
        folder is refused.
    """

    def __init__(self, spec: Spec, cost: Price, out: Path) -> None:
        table = spec.privacy
        self.out = out
        if (shared := shared_budget(spec)) is None:
            self.budget = Budget(
                out / "budget.jsonl",
                total_epsilon=table.total_epsilon,
                delta=table.delta,
                num_examples=table.num_examples,
                privacy_unit=table.privacy_unit,
            )
        else:
            self.budget = shared
        self.name = _name_of(out, spec.title)
        try:
            self.budget.commit(self.name, cost.releases, place=f"{out.absolute()}")
        except BudgetExceededError as error:
            spent, total = f"{self.budget.spent():.4g}", f"{self.budget.total_epsilon:g}"
            condition = f"to fit into the budget: epsilon {spent} of {total} is committed"
            remedy = f"lower it: epsilon {self.budget.left():.3g} is left for a single release, and less for a training"
            raise expected(
                "compare", "privacy.total_epsilon", condition, table.total_epsilon, remedy, BudgetExceededError
            ) from error

    @property
    def selection(self) -> Path:
        """The file of the secret choice of candidates. NOT private."""
        return self.out / "raw" / _SELECTION

    def ledger(self, path: Path, release: Release) -> Ledger:
        """Open the ledger of one training or score, which accepts the given releases only.

        Its first line names the commitment, so that `privgrad statement` refers to the budget.

        Raises:
            PrivacyError: the ledger was begun and is lost.
        """
        self.require_kept(path)
        ledger = Ledger(path)
        try:
            ledger.limit_to(release, self.name, self.budget.path.name)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def require_kept(self, path: Path) -> None:
        """Raise PrivacyError if a file whose releases were begun is lost or empty: they would be made again, uncharged.

        The marks are by `mark`.
        """
        is_there = path.exists() and path.stat().st_size > 0
        if not is_there and f"{path.relative_to(self.out)}" in self._marks(path):
            remedy = "restore it, or compare in a new folder, which is charged again"
            got = "an empty file" if path.exists() else "a missing file"
            raise expected("compare", f"{path}", "to be kept", got, remedy)

    def mark(self, path: Path) -> None:
        """Note durably that a file of this comparison has its first line, before its first release leaves.

        Privacy:
            The names of files in raw/ show how many trainings a selection has, so they are noted in raw/ too.
        """
        name = f"{path.relative_to(self.out)}"
        if name in self._marks(path):
            return
        with self._marked_in(path).open("a") as file:
            file.write(f"{name}\n")
            file.flush()
            os.fsync(file.fileno())

    def hide_times(self) -> None:
        """Give all files and folders outside of raw/ the time of midnight before the commitment.

        Privacy:
            The times of files would show the duration of the comparison, and with it the number of trainings of a
            selection. The day of the commitment is in the budget.
        """
        day = next(one.date for one in self.budget.commitments if one.name == self.name)
        then = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        for folder, folders, files in os.walk(self.out, topdown=True):
            folders[:] = [name for name in folders if Path(folder, name) != self.out / "raw"]
            for place in (folder, *(os.path.join(folder, name) for name in files)):
                os.utime(place, (then, then))

    def _marked_in(self, path: Path) -> Path:
        """Return the file that notes whether `path` was begun."""
        is_secret = path != self.selection and path.is_relative_to(self.out / "raw")
        return self.selection if is_secret else self.out / NAME

    def _marks(self, path: Path) -> list[str]:
        """Return the names that are noted where that of `path` would be."""
        return self._marked_in(path).read_text().splitlines()[1:]


def shared_budget(spec: Spec) -> Budget | None:
    """Return the budget that a spec shares with other releases; None if it has none. Nothing is committed.

    `privgrad compare --dry-run` also calls it.

    Raises:
        PrivacyError: the budget is absent, or is for other data.
    """
    table = spec.privacy
    if table.budget is None:
        return None
    path = spec.data.home / Path(table.budget).expanduser()
    found = Budget(path, delta=table.delta, privacy_unit=table.privacy_unit)
    found.require_covered("compare", table.num_examples, table.privacy_unit)
    return found


def _name_of(out: Path, title: str) -> str:
    """Return the name of the folder's commitment; the first call writes it to the folder."""
    path = out / NAME
    if not path.exists():
        complete = path.with_suffix(".new")
        complete.write_text(f"{' '.join(title.split())} (folder {out.name}, {secrets.token_hex(8)})\n")
        os.replace(complete, path)
    return path.read_text().splitlines()[0]
