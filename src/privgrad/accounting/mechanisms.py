"""Releases as the accountant knows them, and how often one person may take part in those of a training."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar, get_args

from privgrad.errors import described, expected, require_in, require_integer, require_nonnegative, require_rate
from privgrad.types import SamplingScheme

_MOST_GROUPS = 256  # combinations whose cost is computed one by one
M = TypeVar("M", "Release", "Selection")


@dataclass(frozen=True)
class Release:
    """A kind of release, and the number of times that it happened.

    Attributes:
        noise_multiplier: sigma, noise standard deviation over sensitivity. >= 0.
        sample_rate: q in (0, 1].
        scheme: how the batches were drawn. Batches that were drawn in another way cost infinitely much.
        count: number of releases, >= 0.
        max_batch_size: for scheme "truncated", the largest number of examples in a batch.
        num_examples: for scheme "truncated", the exact public size of the data set.
        epoch_steps: for scheme "epochs", t, the number of steps of an epoch. q = k / t, where each example is in k of
            them. An epoch that was begun costs as much as a whole one.
    """

    noise_multiplier: float
    sample_rate: float
    scheme: SamplingScheme | str = "poisson"
    count: int = 1
    max_batch_size: int | None = None
    num_examples: int | None = None
    epoch_steps: int | None = None


@dataclass(frozen=True)
class Selection:
    """The best of K runs, with a random and secret K; nothing of the other runs is released.

    `selection.draw_repetitions` draws K by the same mean and shape.

    Attributes:
        releases: all releases of ONE run. They include the score by which the best run is chosen.
        mean: of K, >= 1.
        shape: of K's law. 0: logarithmic; 1: geometric; another number > 0: truncated negative binomial; infinity:
            Poisson, with which K may be 0.
        count: number of such selections, >= 0.
    Privacy:
        Each run draws its settings independently from a public list. Every run costs at most `releases`. K, the scores
        and the times of the other runs stay secret.
    Reference:
        Papernot, Steinke 2022 (arXiv 2110.03620), theorems 2 and 6.
    """

    releases: tuple[Release, ...]
    mean: float
    shape: float
    count: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))  # a generator would be empty at its second use


@dataclass(frozen=True)
class Split:
    """Releases from groups of people that have no member in common, such as a training part and a held-out part.

    Attributes:
        groups: by group, all releases from the data of its members. A group with no releases is ().
    Privacy:
        Each person is in one group, with all data of this person. A rule about this person alone decides which, such as
        a coin or a keyed hash, so that nobody else moves if one person more or less is in the data. A person then
        pays for the releases of one group, and the cost of all is that of the group that costs the most.
    """

    groups: tuple[tuple[Release | Selection, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))


def each_group(function: str, releases: Iterable[Release | Selection | Split]) -> list[list[Release | Selection]]:
    """Return, for each combination of groups that a person may be in, the releases that concern this person."""
    found: list[list[Release | Selection]] = [[]]
    for release in releases:
        groups = release.groups if isinstance(release, Split) else ((release,),)
        found = [[*before, *group] for before in found for group in groups]
        if len(found) > _MOST_GROUPS:
            raise expected(function, "groups of people", f"to be at most {_MOST_GROUPS}", len(found))
    return found


Mechanism = Release | Selection  # in the form of `mechanisms_of`


def mechanisms_of(function: str, releases: Iterable[Release | Selection]) -> tuple[Mechanism, ...]:
    """Return releases in one form: checked, equal ones added up, in the order of `numbers_of`, Selections last.

    So releases that cost the same are equal, in whatever order and parts they were given.
    """
    plain: list[Release] = []
    counts: dict[Selection, int] = {}
    for release in releases:
        if isinstance(release, Selection):
            require_law(function, release.mean, release.shape)
            require_integer(function, "count", release.count, 0)
            own = _sums(function, release.releases)
            one = Selection(own, float(release.mean), float(release.shape))
            counts[one] = counts.get(one, 0) + release.count
        else:
            plain.append(release)
    return *_sums(function, plain), *_counted(counts)


def numbers_of(mechanism: Mechanism) -> tuple[Any, ...]:
    """Return a mechanism as numbers, by which mechanisms are sorted."""
    if isinstance(mechanism, Selection):
        return tuple(map(numbers_of, mechanism.releases)), mechanism.mean, mechanism.shape, mechanism.count
    truncation = (mechanism.max_batch_size, mechanism.num_examples) if mechanism.scheme == "truncated" else ()
    epochs = () if mechanism.epoch_steps is None else (mechanism.epoch_steps,)
    return mechanism.noise_multiplier, mechanism.sample_rate, *truncation, *epochs, mechanism.count


def require_law(function: str, mean: float, shape: float) -> None:
    """Raise PrivacyError unless the mean and the shape of a number of repetitions are in their ranges."""
    require_in(function, "mean", mean, "[1, inf)")
    if not (isinstance(shape, Real) and shape >= 0):
        raise expected(function, "shape", "to be a number >= 0, or infinity", described(shape))


def _sums(function: str, releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return plain releases as `mechanisms_of` does."""
    counts: dict[Release, int] = {}
    for release in releases:
        require_nonnegative(function, "noise_multiplier", release.noise_multiplier)
        require_rate(function, release.sample_rate)
        require_integer(function, "count", release.count, 0)
        # Shuffled batches, as in old ledgers and those of other libraries, cost as much as a release without noise.
        sigma = release.noise_multiplier if release.scheme in get_args(SamplingScheme) else 0.0
        one = Release(float(sigma), float(release.sample_rate))
        if release.scheme == "truncated":
            require_integer(function, "max_batch_size", release.max_batch_size, 1)
            require_integer(function, "num_examples", release.num_examples, 1)
            one = replace(release, noise_multiplier=one.noise_multiplier, sample_rate=one.sample_rate, count=1)
        count = release.count
        if release.scheme == "epochs":
            steps = require_epochs(function, release.sample_rate, release.epoch_steps)
            if one.sample_rate < 1:  # else each step has all examples
                one, count = replace(one, scheme="epochs", epoch_steps=steps), whole_epochs(count, steps)
        counts[one] = counts.get(one, 0) + count
    return _counted(counts)


def require_epochs(function: str, sample_rate: float, epoch_steps: int | None) -> int:
    """Return t; raise PrivacyError unless an epoch has a whole number of steps, t, and each example is in k of them."""
    require_integer(function, "epoch_steps", epoch_steps, 1)
    assert epoch_steps is not None
    chosen = round(sample_rate * epoch_steps)
    if chosen < 1 or not math.isclose(sample_rate, chosen / epoch_steps, rel_tol=1e-12):
        condition = f"to be a whole number / {epoch_steps}, the number of steps of an epoch"
        raise expected(function, "sample_rate", condition, sample_rate)
    return epoch_steps


def require_whole_epochs(function: str, steps: int, epoch_steps: int) -> None:
    """Raise PrivacyError unless so many steps are whole epochs."""
    if steps % epoch_steps:
        most = whole_epochs(steps, epoch_steps)
        remedy = f"give {most}, or epochs = {most // epoch_steps}; an epoch that was begun costs as much as a whole one"
        raise expected(function, "steps", f"to be whole epochs of {epoch_steps} steps", steps, remedy)


def _counted(counts: dict[M, int]) -> tuple[M, ...]:
    """Return each mechanism with its count, in the order of `numbers_of`; those that never happened are left out."""
    found = [replace(one, count=count) for one, count in counts.items() if count > 0]
    return tuple(sorted(found, key=numbers_of))


# How often one person may take part in the releases of a training, and at which rate: docs/mathematics.md (6.5).
def most_participations(steps: int, bands: int) -> int:
    """Return in how many of the steps one person may take part: those of one group, ceil(T / b)."""
    return -(-steps // bands)


def first_step_of_new_groups(step: int, bands: int) -> int:
    """Return the first step from `step` on at which new groups may begin: a multiple of b."""
    return most_participations(step, bands) * bands


def whole_epochs(steps: int, epoch_steps: int) -> int:
    """Return the steps of all epochs that so many steps begin."""
    return -(-steps // epoch_steps) * epoch_steps


def rate_in_group(sample_rate: float, bands: int) -> float:
    """Return the probability that a person of the group of a step is in its batch: b q, or 1 by rounding."""
    return min(1.0, sample_rate * bands)


class Participations:
    """A count of the releases in which one and the same person may have taken part, at most.

    With independent noise, these are all releases. With noise of b bands (`noise.Banded`), the draws of a stream at the
    steps t, t + b, t + 2b, ... take from one group, and each person is in one group. A new stream, as after a
    resume, has new groups: a person may have been in the fullest group of each.

    A release whose draw has no step counts for all groups.
    """

    def __init__(self, bands: int) -> None:
        self._bands = bands
        self._by_group, self._most = Counter[tuple[str, int]](), Counter[str]()  # by stream and group, and by stream
        self._last = -1
        self.count = 0

    def add(self, draw: str) -> None:
        """Count a release, given the name of its draw, "stream:step"."""
        self.count = self.after(draw)
        stream, step = self._parts(draw)
        group = stream, step % self._bands
        self._by_group[group] += 1
        self._most[stream] = max(self._most[stream], self._by_group[group])
        self._last = max(self._last, step)

    def after(self, draw: str) -> int:
        """Return the count with one more release."""
        stream, step = self._parts(draw)
        # The count is the sum over streams of the fullest group. It grows where this release makes a new fullest one.
        return self.count + (self._by_group[stream, step % self._bands] + 1 > self._most[stream])

    def most(self, steps: int) -> int:
        """Return in how many of a plan's steps one person may take part."""
        return most_participations(steps, self._bands)

    @property
    def next_step(self) -> int:
        """The step at which new groups may begin without a loss for those who have taken part."""
        return first_step_of_new_groups(self._last + 1, self._bands)

    def _parts(self, draw: str) -> tuple[str, int]:
        """Return stream and step of a draw; one without a step is a stream of its own."""
        stream, _, step = draw.rpartition(":")
        return (stream, int(step)) if stream and step.isdecimal() else (draw, 0)


class BegunEpochs(Participations):
    """The same count for epochs: all steps of each epoch that was begun, because one person may be in any of them.

    An epoch of another stream, as after a resume without its key, is another one.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(bands=1)
        self._steps, self._begun = steps, set[tuple[str, int]]()

    def add(self, draw: str) -> None:
        self._begun.add(self._epoch(draw))
        self.count = self._steps * len(self._begun)
        self._last = max(self._last, self._parts(draw)[1])

    def after(self, draw: str) -> int:
        return self.count + (self._steps if self._epoch(draw) not in self._begun else 0)

    def most(self, steps: int) -> int:
        return whole_epochs(steps, self._steps)

    @property
    def next_step(self) -> int:
        """The step after the last one."""
        return self._last + 1

    def _epoch(self, draw: str) -> tuple[str, int]:
        stream, step = self._parts(draw)
        return stream, step // self._steps


def releases_in(mechanisms: Iterable[Mechanism]) -> Iterator[Release]:
    """Yield the releases, also those within Selections."""
    for mechanism in mechanisms:
        yield from mechanism.releases if isinstance(mechanism, Selection) else (mechanism,)
