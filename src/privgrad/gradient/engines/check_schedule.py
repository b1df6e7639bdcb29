"""When an engine compares gradients with those of single examples.

`factored` and `vmap` follow it. The privacy guarantee rests on these comparisons as on a check, not as on a proof.
"""


class CheckSchedule:
    """The schedule of the self-check: the 1st, 2nd, 4th, 8th ... call is checked, and any call on request.

    Later examples may reveal a problem that the first ones did not.

    Attributes:
        calls: the number of calls so far.
        is_due: whether the current call must be checked.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.is_due = False
        self._sizes = {0}

    def begin(self) -> None:
        """Count a call of the engine, and set `is_due` on the 1st, 2nd, 4th, 8th ... call."""
        self.calls += 1
        self.is_due |= self.calls & (self.calls - 1) == 0

    def note_size(self, size: int) -> None:
        """Set `is_due` at the first batch of a size that is also the size of another dimension.

        A model that uses other layouts for batches of this size would pass all comparisons of sizes.

        Args:
            size: `Passes.ambiguous`.
        """
        self.is_due |= size not in self._sizes
        self._sizes.add(size)
