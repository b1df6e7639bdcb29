"""EarlyStopping for `fit`, and the charge for the steps that an early stop leaves unused.

`fit` calls EarlyStopping; `fit`, `integrations.huggingface` and `integrations.lightning` call `charge_unused`. The
privacy guarantee rests on `charge_unused`: a stop that depends on results keeps the epsilon of all planned steps.
"""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from privgrad.errors import (
    BudgetExceededError,
    described,
    expected,
    require_choice,
    require_integer,
    require_nonnegative,
)
from privgrad.ledger_facts import release_of
from privgrad.private_gradient import PrivateGradient
from privgrad.types import Batch

StopData = Literal["public", "released"]
Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """A rule that ends `fit` once an evaluated number has stopped improving.

    It does not lower epsilon: `fit` charges the unused steps too. The noise was calibrated for all steps, and an early
    stop cannot exchange it for less noise. If fewer steps suffice, plan fewer: the same epsilon then has less noise.

    Args:
        monitor: the name of a number that `evaluate` returns.
        patience: >= 1, the evaluations in a row without an improvement after which training stops.
        mode: "min" if smaller numbers are better, "max" if larger ones are.
        data: where the number comes from. "public": from examples of people who need no protection, or synthetic ones.
            "released": from private examples with noise, by `release_mean` say, at a price in a ledger or budget of its
            own. There is no other choice: a stop by an exact score of private people would be a release without noise.
        min_delta: >= 0, the change that counts as an improvement.
    Raises:
        PrivacyError: an argument is out of its range.
    Privacy:
        The stop is post-processing of released gradients, and of public or released numbers. Anyone who knows the
        rule could apply it to the whole training afterwards, so the guarantee is that of all planned steps. It is not
        that of the steps taken, because their number depends on the releases. `data` is your statement; nothing can
        check it.
    Reference:
        Rogers, Roth, Ullman, Vadhan 2016 (arXiv 1605.08294): a cost that stops by results needs an odometer.
    """

    monitor: str
    patience: int
    mode: Mode
    data: StopData
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        require_integer("EarlyStopping", "patience", self.patience, 1)
        require_choice("EarlyStopping", "mode", self.mode, get_args(Mode))
        require_nonnegative("EarlyStopping", "min_delta", self.min_delta, "0 counts each improvement")
        if self.data not in get_args(StopData):
            remedy = (
                'evaluate on public examples; or release a noisy score (release_mean) and give data="released"; or pay '
                "for tuning (docs/private-tuning.md)"
            )
            raise expected("EarlyStopping", "data", "to be 'public' or 'released'", repr(self.data), remedy)
        if not isinstance(self.monitor, str) or self.monitor.startswith("raw_"):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "monitor a number of public examples: raw_ numbers are private"
            raise expected("EarlyStopping", "monitor", "to be the name of a number", repr(self.monitor), remedy)

    def is_due(self, curve: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the last `patience` evaluations of a curve have not improved on the best one before them.

        `fit` calls it after each evaluation, and at a resume.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        for row in curve:
            value = sign * float(row[self.monitor])
            since = 0 if value < best - self.min_delta else since + 1  # NaN is no improvement
            best = value if since == 0 else best
        return since >= self.patience

    def require(self, row: Mapping[str, Any] | None) -> None:
        """Raise PrivacyError unless an evaluation has the number. `fit` calls it before anything is spent.

        Args:
            row: what `evaluate` returned when it was tried; None without `evaluate`.
        """
        if row is None:
            raise expected("fit", "evaluate", "to be given for stop", None, "return the monitored number from it")
        value = row.get(self.monitor)
        if isinstance(value, bool) or not isinstance(value, int | float):
            names = ", ".join(name for name in row if name not in ("step", "epsilon"))
            remedy, got = f"return it, or monitor one of {names or 'its numbers'}", described(value)
            raise expected("fit", f"evaluate's {self.monitor!r}", "to be a number for stop", got, remedy)


def until(stop: EarlyStopping | None, batches: Iterator[Batch], curve: Sequence[Mapping[str, Any]]) -> Iterator[Batch]:
    """Yield batches until a rule ends the training. `fit` iterates over them and appends to the curve.

    Args:
        stop: the rule, or None.
        batches: the plan's.
        curve: the evaluations so far.
    """
    while stop is None or not stop.is_due(curve):
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def charge_unused(private_grad: PrivateGradient) -> None:
    """Charge all steps that the plan has left, without a release; the training is then complete.

    Under a research seed nothing is charged: such a run has no guarantee.

    Privacy:
        After this, every epsilon of the ledger is that of all planned steps, which covers a stop that depends on
        results.
    """
    plan, ledger = private_grad.plan, private_grad.ledger
    if plan.seed is not None:
        return
    if private_grad.processes.rank == 0:
        release, stream = release_of(ledger.plan_facts), secrets.token_hex(4)  # no two ledgers share a draw
        for step in range(ledger.next_step, plan.steps):
            try:
                ledger.charge(release, draw=f"unused {stream}:{step}", limit=plan.steps)
            except BudgetExceededError:  # more samplers than planned have used up what each person may cost
                return
    private_grad.load_state_dict(private_grad.state_dict() | {"step": plan.steps})
