"""ClassRates: a data set whose classes are drawn at different public rates."""

import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from privgrad.errors import SamplingError, expected
from privgrad.sampling.loading import Data

_DIGITS = 3  # of a rate that a person may have chosen
_EQUAL = 1e-5  # relative difference of products that count as equal; rates may be float32
_POWERS = (1.0, 0.5)  # rates that are inversely proportional to the counts, or to their square roots


class ClassRates(Dataset[Any]):
    """A data set whose examples are drawn at rates of their class: each at `rates[label]` times the plan's rate.

    Give it to `plan.batches`, `fit`, PrivateTrainer and PrivateStrategy in place of the data set. A rare class at rate
    1 and frequent classes at lower rates make the rare class a larger part of each batch. Wrap the data last: a data
    set around this one hides the rates, and all classes are drawn at the plan's rate.

    Args:
        dataset: as in plan.batches.
        labels: the class of each example, integers, shape (len(dataset),). Each must follow from its example alone.
        rates: one public number per class, in [0, 1], the largest of them exactly 1.
    Raises:
        SamplingError: a number is out of its range.
        TypeError: labels are not integers.
    Privacy:
        The guarantee is the plan's, without a change, if the rates are public: known before and without the data.
        Proof: an example of class c is in a batch with probability q r_c, independently of all else. That is the plan's
        draw, with probability q, followed by a coin of the example's own, which keeps its clipped gradient with
        probability r_c and replaces it by zero otherwise. For each outcome of the coins, what the example adds to the
        sum still has norm at most C, as the plan's analysis requires; and a mixture over coins that do not depend on
        the data costs no more than the worst outcome. A rate of 1 attains it, so epsilon follows from the largest rate.
        The coin's rate depends on the label of its own example only. The proof therefore holds for adding, removing or
        zeroing out one example, and for replacing it by one of another class, whose label and rate differ too. The
        divisor of the mean stays the public B.
        Rates from the private counts of the classes are a release that nothing charges: one example more would change
        the rates of all others. Rates of many digits that equalize the classes exactly are warned of; others cannot be
        recognized. Take rates from public statistics, or from a count by `release_histogram`.
    Reference:
        Feldman, Zrnic 2021 (arXiv 2008.11193), on individual privacy costs, which would be lower for frequent classes.
    """

    def __init__(self, dataset: Data, labels: Tensor | np.ndarray | Sequence[int], rates: Sequence[float]) -> None:
        self.dataset = dataset
        self.rates = tuple(np.asarray(rates, dtype=float).flatten().tolist())
        if not all(0 <= rate <= 1 for rate in self.rates) or max(self.rates, default=0.0) != 1:
            condition = "to be in [0, 1], the largest of them 1"  # the plan's rate is paid for in any case
            raise expected("ClassRates", "rates", condition, list(self.rates), error=SamplingError)
        count, classes = len(cast("Sequence[Any]", dataset)), torch.as_tensor(labels).cpu().numpy()
        if classes.shape != (count,):
            # The numbers of examples and of labels are private.
            got = f"{classes.ndim} dimensions" if classes.ndim != 1 else "a different number of labels"
            remedy = "decide by counts instead: a person with several labels has no class" if classes.ndim > 1 else ""
            raise expected("ClassRates", "labels", "to be one for each example", got, remedy, SamplingError)
        if count and not (classes.min() >= 0 and classes.max() < len(self.rates)):
            condition = f"to be from 0 to {len(self.rates) - 1}, the places in rates"
            got = f"{classes.min()} to {classes.max()}"
            raise expected("ClassRates", "labels", condition, got, error=SamplingError)
        counts = np.bincount(classes, minlength=len(self.rates))
        if _seem_counted(self.rates, counts):
            warnings.warn(
                "NOT PRIVATE: ClassRates: rates: these make the classes of this data set equally frequent. If they "
                "come from its counts, choose public numbers of few digits, such as 0.1, or release the counts "
                "(release_histogram) first. If the data were collected by public numbers, they are right",
                stacklevel=2,
            )
        self.relative = np.array(self.rates)[classes]

    def __len__(self) -> int:
        return len(self.relative)

    def __getitem__(self, index: int) -> Any:
        return cast("Sequence[Any]", self.dataset)[index]


# Fault: rates such as counts.min() / counts, which are a release that nothing charges.
# Cost: one comparison of a number for each class.
# Warns wrongly: data collected by a design of round numbers, such as 3 controls for each case; so it does not refuse.
def _seem_counted(rates: Sequence[float], counts: np.ndarray) -> bool:
    """Return whether rates of many digits make the classes, or the square roots of their counts, equally frequent."""
    present = [(rate, int(count)) for rate, count in zip(rates, counts, strict=True) if count and rate]
    typed = all(abs(rate - float(f"{rate:.{_DIGITS}g}")) <= 1e-7 for rate, _ in present)
    below = [pair for pair in present if pair[0] < 1]
    for power in _POWERS:
        for group in (present, below):
            products = [rate * count**power for rate, count in group]
            even = all(abs(a - b) <= _EQUAL * max(a, b) for a, b in combinations(products, 2))
            if not typed and even and len({count for _, count in group}) > 1:
                return True
    return False
