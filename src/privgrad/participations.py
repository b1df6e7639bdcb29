"""How often one person may take part in the releases of a training, and at which rate: docs/mathematics.md (6.5).

`Ledger` keeps one count and computes epsilon from it. `plan_base` and `band_choice` call these functions, and
`integrations.external_loop` calls one. The privacy guarantee rests on this file: what is calibrated, drawn and charged
are these numbers.
"""

from collections import defaultdict


def most_participations(steps: int, bands: int) -> int:
    """Return in how many of the steps one person may take part: those of one group, ceil(T / b)."""
    return -(-steps // bands)


def first_step_of_new_groups(step: int, bands: int) -> int:
    """Return the first step from `step` on at which new groups may begin: a multiple of b.

    `Ledger` and integrations call it for a resume: each group then has had equally many turns.
    """
    return most_participations(step, bands) * bands


def rate_in_group(sample_rate: float, bands: int) -> float:
    """Return the probability that a person of the group of a step is in its batch: b q, or 1 by rounding."""
    return min(1.0, sample_rate * bands)


class Participations:
    """A count of the releases in which one and the same person may have taken part, at most.

    With independent noise, these are all releases. With noise of b bands (`noise.Banded`), the draws of a stream at the
    steps t, t + b, t + 2b, ... take from one group, and each person is in one group. A new stream, as after a
    resume, has new groups: a person may have been in the fullest group of each.

    Args:
        bands: b; 1 for independent noise.
    Privacy:
        A release whose draw has no step counts for all groups.
    """

    def __init__(self, bands: int) -> None:
        self._bands = bands
        self._by_group: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._most: dict[str, int] = defaultdict(int)
        self._last = -1
        self.count = 0

    def add(self, draw: str) -> None:
        """Count a release, given the name of its draw, "stream:step". `Ledger` calls it for each of its lines."""
        self.count = self.after(draw)
        stream, step = self._parts(draw)
        groups = self._by_group[stream]
        groups[step % self._bands] += 1
        self._most[stream] = max(self._most[stream], groups[step % self._bands])
        self._last = max(self._last, step)

    def after(self, draw: str) -> int:
        """Return the count with one more release. `Ledger.admit` compares it with the plan's."""
        stream, step = self._parts(draw)
        groups = self._by_group.get(stream, {})
        return self.count + (groups.get(step % self._bands, 0) + 1 > self._most.get(stream, 0))

    @property
    def next_step(self) -> int:
        """The step at which new groups may begin without a loss for those who have taken part."""
        return first_step_of_new_groups(self._last + 1, self._bands)

    def _parts(self, draw: str) -> tuple[str, int]:
        """Return stream and step of a draw; one without a step is a stream of its own."""
        stream, _, step = draw.rpartition(":")
        return (stream, int(step)) if stream and step.isdecimal() else (draw, 0)
