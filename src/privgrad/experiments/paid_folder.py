"""The folder of a private comparison: its commitment, its ledgers, and what the published files must not show.

`paid_runner` makes a PaidFolder. The privacy guarantee of the total rests on this file: everything is committed to a
budget before the first training, and a folder that has lost a ledger does not train again.
"""

import math
import os
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from privgrad.accounting import epsilon
from privgrad.budget import Budget
from privgrad.errors import BudgetExceededError, PrivacyError, expected
from privgrad.experiments.prices import Price
from privgrad.experiments.spec import Spec
from privgrad.ledger import Ledger
from privgrad.mechanisms import Release, Selection, Split
from privgrad.rounding import rounded_up

NAME = "commitment.txt"  # the name of the folder's commitment, and the files of releases that were begun
_SELECTION = "selection.txt"  # in raw/: the secret choice of candidates, and the files of their releases
_MOST_NOISE = 100.0  # times the noise of the spec: a comparison with more would learn nothing


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
            raise _too_much(spec, cost, self.budget) from error

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


def require_room(spec: Spec, cost: Price) -> None:
    """Raise BudgetExceededError if the shared budget has no room for one more comparison. Nothing is committed.

    `paid_runner` calls it before it moves an old folder aside.
    """
    budget = shared_budget(spec)
    if budget is not None and budget.spent(besides=cost.releases) > budget.total_epsilon:
        raise _too_much(spec, cost, budget)


def largest_total(cost: Price, budget: Budget) -> float:
    """Return a total_epsilon that fits into a budget, close to the largest one; 0 if none fits.

    All releases of a comparison get more noise by the same factor, which is how its price falls with its total.
    `privgrad compare --dry-run` also calls it.
    """

    def noisier(factor: float) -> tuple[Release | Selection | Split, ...]:
        return tuple(_noisier(release, factor) for release in cost.releases)

    def fits(factor: float) -> bool:
        return budget.spent(besides=noisier(factor)) <= budget.total_epsilon

    if not fits(_MOST_NOISE):
        return 0.0
    low, high = 1.0, _MOST_NOISE
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    total = 0.99 * epsilon(noisier(high), delta=budget.delta)
    digits = 2 - math.floor(math.log10(total))
    return math.floor(total * 10**digits) / 10**digits


def _noisier(release: Release | Selection | Split, factor: float) -> Any:
    """Return a release with all noise multipliers times a factor."""
    if isinstance(release, Release):
        return replace(release, noise_multiplier=release.noise_multiplier * factor)
    if isinstance(release, Selection):
        return replace(release, releases=tuple(_noisier(one, factor) for one in release.releases))
    return replace(release, groups=tuple(tuple(_noisier(one, factor) for one in group) for group in release.groups))


def _too_much(spec: Spec, cost: Price, budget: Budget) -> PrivacyError:
    """Return the error for a comparison that does not fit into a shared budget."""
    spent, cap = rounded_up(budget.spent(), 4), rounded_up(budget.total_epsilon)
    condition = f"to fit into the budget: epsilon {spent} of {cap} is committed"
    most = largest_total(cost, budget)
    remedy = f"lower it to {most:g}" if most else "use new data: no training of these steps fits any more"
    if budget.commitments:
        remedy += "; a further commitment costs more than the difference, as docs/budget.md explains"
    got = spec.privacy.total_epsilon
    return expected("compare", "privacy.total_epsilon", condition, got, remedy, BudgetExceededError)


def _name_of(out: Path, title: str) -> str:
    """Return the name of the folder's commitment; the first call writes it to the folder."""
    path = out / NAME
    if not path.exists():
        complete = path.with_suffix(".new")
        complete.write_text(f"{' '.join(title.split())} (folder {out.name}, {secrets.token_hex(8)})\n")
        os.replace(complete, path)
    return path.read_text().splitlines()[0]
