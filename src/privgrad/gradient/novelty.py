"""Notice what a batch holds that no earlier one held, because a loss may mix examples only then."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from privgrad.gradient.probes import COLUMNS
from privgrad.types import leaves_of

_EXTRA = 10
_STEPS = 64  # a row has more zeros than any before, or fewer, if a share of 1 / _STEPS of its numbers says so
_VALUES = 64  # a column with more different values has no new ones
_FEW = 8  # the same in a tensor whose columns together have more than _VALUES values
_READ, _MOST = 512, 2**14  # most numbers of a row, and of all wide rows, that are looked at
_RUN = 8  # columns in a run of a wide row; of the runs, every k-th is read, because memory comes in lines


class Novelty:
    """The largest number, the most and the fewest zeros of a row, and the values of narrow columns, so far.

    The faults that it finds, with a check of that batch: weights of a class that is rare; a text cut to the longest of
    the batch; a batch that is skipped if one text is empty. It does not see new values in tensors of more than COLUMNS
    columns, or in columns with more than _VALUES values or mostly new ones, and no new combination of known values.
    """

    def __init__(self) -> None:
        self._records = dict[int, list[float]]()  # by place among the tensors
        self._values = dict[tuple[int, int], _Values]()  # by place and number of columns

    def rows(self, examples: Any) -> list[int]:
        """Return some rows that hold what no earlier batch held: usually none. NOT private.

        They may decide only when a check runs, and which rows it compares. Cost: three small operations for each tensor
        and one transfer from a device.
        """
        found, measured, rows = list[tuple[int, Tensor, bool]](), list[Tensor](), list[int]()
        for place, leaf in enumerate(leaves_of(examples)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel() and not leaf.is_complex():
                columns = leaf.numel() // leaf.shape[0]
                x, known = leaf.detach().reshape(-1, columns), None
                if columns > _READ:
                    most = min(_READ, max(_MOST // leaf.shape[0], COLUMNS + 1))
                    x = x.unfold(1, _RUN, _RUN * -(-columns // most))
                elif columns <= COLUMNS:
                    x = x.float() if x.is_floating_point() else x
                    if (values := self._values.get((place, columns))) is not None:
                        known = values.known_in(x)
                    else:  # the first batch of this shape: all is new
                        self._values[place, columns] = _Values(x.float())
                if columns > 1 or known is None:  # of a single column, the known values say the same
                    x = x.float()
                    measured += x.aminmax()
                if columns > 1:
                    nonzeros_B = cast(Tensor, torch.linalg.vector_norm(x, 0, dim=tuple(range(1, x.dim()))))
                    measured += nonzeros_B.aminmax()
                measured += [] if known is None else [known]
                found.append((place, x, known is not None))
        together = [x.to(measured[0].device) for x in measured]
        numbers = iter(cast("list[float]", torch.stack(together).tolist() if together else []))
        for place, x, has_values in found:
            columns = x.shape[1:].numel()
            least, most = (next(numbers), next(numbers)) if columns > 1 or not has_values else (0.0, 0.0)
            fewest, nonzeros = (next(numbers), next(numbers)) if columns > 1 else (0.0, 0.0)
            now = [math.inf if math.isnan(least) else max(-least, most), columns - fewest, nonzeros - columns]
            records = self._records.setdefault(place, now)
            step = columns / _STEPS if columns > 1 else math.inf
            for record, limit in enumerate((2 * records[0], records[1] + step, records[2] + step)):
                if now[record] > limit:
                    records[record], row_BN = now[record], x.float().flatten(1)
                    zeros_B = (row_BN == 0).sum(1) * (3 - 2 * record)
                    rows.append(int((zeros_B if record else row_BN.abs().amax(1).nan_to_num(math.inf)).argmax()))
            if has_values and next(numbers) < (values := self._values[place, columns]).numbers(x):
                rows += values.learn(x.float())
        return list(dict.fromkeys(rows))


class _Values:
    """The values of each column of some tensors of shape (rows, columns), as far as they are few."""

    def __init__(self, x: Tensor) -> None:
        self._known = x.new_full((x.shape[1], _VALUES), math.nan)  # by column, and NaN where there are fewer
        self._counts = [0] * x.shape[1]  # above _VALUES for a column that is closed
        self._changes = [0] * x.shape[1]  # the calls in which it had a new value, and most rows had one
        self.learn(x)

    def known_in(self, x: Tensor) -> Tensor | None:
        """Return how many numbers of the open columns earlier tensors had; None if all columns are closed."""
        if min(self._counts) > _VALUES:
            return None
        self._known = self._known.to(x.device)
        is_open = [column for column, count in enumerate(self._counts) if count <= _VALUES]
        x, known = (x, self._known) if len(is_open) == len(self._counts) else (x[:, is_open], self._known[is_open])
        return (x[:, :, None] == known).sum(dtype=torch.float32)  # the known values of a column differ

    def numbers(self, x: Tensor) -> int:
        """Return how many numbers are in open columns."""
        return len(x) * sum(count <= _VALUES for count in self._counts)

    def learn(self, x: Tensor) -> list[int]:
        """Note the values of a tensor, and return the first row with a new one for each column."""
        is_new = ~(x[:, :, None] == self._known).any(2)
        is_new[:, [count > _VALUES for count in self._counts]] = False
        is_usual = bool(2 * is_new.any(1).sum() > len(x))
        rows = dict[int, int]()
        for column, count in enumerate(self._counts):
            if not bool(is_new[:, column].any()):
                continue
            self._changes[column] += is_usual
            new = cast(Tensor, x[is_new[:, column], column].unique())
            # Real numbers and ids are new in each batch.
            count = _VALUES + 1 if self._changes[column] > 2 else count + len(new)
            self._counts[column] = count
            if count <= _VALUES:
                self._known[column, count - len(new) : count] = new
                rows[column] = int(is_new[:, column].nonzero()[0])
        if len(cast(Tensor, self._known[~self._known.isnan()].unique())) > _VALUES:  # a sequence of ids
            self._counts = [count if count <= _FEW else _VALUES + 1 for count in self._counts]
        return [row for column, row in rows.items() if self._counts[column] <= _VALUES]


class CheckSchedule:
    """The schedule of the self-check."""

    def __init__(self) -> None:
        self.calls = self._steps = self._extra = 0
        self.is_due = False
        self.depth = 0  # 0 (2nd, 8th ... call): losses, one row or two; 1 (4th, 16th ...): more; 2 (on request): all
        self.novel = list[int]()  # rows of the current call with what no earlier one held; private
        self._sizes, self._seen = {0}, Novelty()

    def begin_step(self) -> None:
        """Count a step of the training, and forget the rows of the last one."""
        self._steps, self.novel = self._steps + 1, list[int]()

    def begin(self, examples: Any) -> None:
        """Count a call of the engine, and set `is_due` on the 1st, 2nd, 4th, 8th ... call, and where much is new."""
        self.calls += 1
        self.depth = 2 if self.is_due else self.calls.bit_length() % 2
        self.is_due |= self.calls & (self.calls - 1) == 0
        # Briefly, if its examples hold what no earlier ones held: at most _EXTRA times and once per 100 steps.
        may_check = self._extra < _EXTRA + self._steps // 100
        self.novel = self._seen.rows(examples) if self.is_due or may_check else []
        if self.novel and not self.is_due:
            self._extra, self.is_due, self.depth = self._extra + 1, True, 0

    def note_size(self, size: int) -> None:
        """Set `is_due` at the first batch of a size that some other dimension has too; else the size is 0."""
        # A model that uses other layouts for batches of this size would pass all comparisons of sizes.
        self.is_due |= size not in self._sizes
        self._sizes.add(size)
