"""Releases as the accountant knows them: Gaussians, sampled Gaussians, and the best of a random number of repetitions.

Users, `Ledger`, `Budget` and `PrivacyPlan` make a Release or a Selection. `accounting` checks them by `mechanisms_of`
and computes their cost. The privacy guarantee rests on this file: what is left out here is not counted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from privgrad.errors import (
    SamplingError,
    described,
    expected,
    require_integer,
    require_nonnegative,
    require_rate,
)
from privgrad.types import COVERED, SamplingScheme

_MOST_GROUPS = 256  # combinations whose cost is computed one by one


@dataclass(frozen=True)
class Release:
    """A kind of release, and the number of times that it happened.

    `Ledger`, `PrivacyPlan`, audits, `cli.privacy` and users make it.

    Attributes:
        noise_multiplier: sigma, noise standard deviation over sensitivity. >= 0.
        sample_rate: q in (0, 1].
        scheme: how the batches were drawn.
        count: number of releases, >= 0.
        max_batch_size: for scheme "truncated", the largest number of examples in a batch.
        num_examples: for scheme "truncated", the exact public size of the data set.
    """

    noise_multiplier: float
    sample_rate: float
    scheme: SamplingScheme = "poisson"
    count: int = 1
    max_batch_size: int | None = None
    num_examples: int | None = None


@dataclass(frozen=True)
class Selection:
    """The best of K runs, with a random and secret K; nothing of the other runs is released.

    `repetitions.draw_repetitions` draws K by the same mean and shape.

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


@dataclass(frozen=True)
class Split:
    """Releases from groups of people that have no member in common, such as a training part and a held-out part.

    `experiments.prices` makes it; users can.

    Attributes:
        groups: by group, all releases from the data of its members. A group with no releases is ().
    Privacy:
        Each person is in one group, with all data of this person. A rule about this person alone decides which, such as
        a coin or a keyed hash, so that nobody else moves if one person more or less is in the data. A person then
        pays for the releases of one group, and the cost of all is that of the group that costs the most.
    """

    groups: tuple[tuple[Release | Selection, ...], ...]


def each_group(function: str, releases: Iterable[Release | Selection | Split]) -> list[list[Release | Selection]]:
    """Return, for each combination of groups that a person may be in, the releases that concern this person.

    `accounting` computes the cost of each, and takes the largest. `Budget` calls it to check a commitment.

    Raises:
        PrivacyError: there are too many combinations, or a Split has no group.
    """
    found: list[list[Release | Selection]] = [[]]
    for release in releases if isinstance(releases, Iterable) else [releases]:  # pyright: ignore[reportUnnecessaryIsInstance]
        groups = release.groups if isinstance(release, Split) else ((release,),)
        if not groups:
            remedy = "leave the Split out, or give the releases of each group"
            raise expected(function, "groups of a Split", "to be at least 1", 0, remedy)
        found = [[*before, *group] for before in found for group in groups]
        if len(found) > _MOST_GROUPS:
            remedy = "give fewer Splits: score on training people in place of held-out ones"
            raise expected(function, "groups of people", f"to be at most {_MOST_GROUPS}", len(found), remedy)
    return found


class Repeated(NamedTuple):
    """A Selection as `accounting` composes it."""

    mechanisms: "tuple[Plain, ...]"
    mean: float
    shape: float
    times: int


class Truncated(NamedTuple):
    """Releases from truncated Poisson samples as `accounting` composes them: PLD covers them, and RDP does not."""

    noise_multiplier: float
    sample_rate: float
    max_batch_size: int
    num_examples: int
    times: int

    @property
    def untruncated(self) -> tuple[float, float, int]:
        """The same releases without truncation, which cost a little less."""
        return self.noise_multiplier, self.sample_rate, self.times


Plain = tuple[float, float, int] | Truncated
Mechanism = Plain | Repeated


def mechanisms_of(
    function: str, releases: Iterable[Release | Selection], *, assume_poisson: bool | None = None
) -> tuple[Mechanism, ...]:
    """Return releases as (noise multiplier, sample rate, count), equal ones added up, in ascending order.

    Those of truncated samples are among them, each as a Truncated. Selections follow, each as a Repeated. `accounting`
    and `budget` call this.

    Args:
        function: name of the public function, for errors.
        releases: the releases; their order does not matter.
        assume_poisson: as in accounting.epsilon; None if the caller has no such argument.
    Raises:
        PrivacyError: a number is out of its range, or a value is neither a Release nor a Selection.
        SamplingError: a release is from fixed-size batches, which no accountant here covers.
    """
    plain: list[Release] = []
    repeated: dict[tuple[Any, float, float], int] = {}
    for release in releases if isinstance(releases, Iterable) else [releases]:  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(release, Selection):
            require_law(function, release.mean, release.shape)
            require_integer(function, "count", release.count, 0)
            key = _sums(function, release.releases, assume_poisson), float(release.mean), float(release.shape)
            repeated[key] = repeated.get(key, 0) + release.count
        else:
            plain.append(release)
    selections = sorted(Repeated(*key, count) for key, count in repeated.items() if count > 0)
    return *_sums(function, plain, assume_poisson), *selections


def require_law(function: str, mean: float, shape: float) -> None:
    """Raise PrivacyError unless the mean and the shape of a number of repetitions are in their ranges."""
    if not (isinstance(mean, Real) and 1 <= mean < math.inf):
        raise expected(function, "mean", "to be a finite number >= 1", described(mean), "give the mean number of runs")
    if not (isinstance(shape, Real) and shape >= 0):
        remedy = "give 0 (logarithmic), 1 (geometric) or math.inf (Poisson)"
        raise expected(function, "shape", "to be a number >= 0, or infinity", described(shape), remedy)


def _sums(function: str, releases: Iterable[Release], assume_poisson: bool | None) -> tuple[Plain, ...]:
    """Return plain releases as `mechanisms_of` does: equal ones added up, in ascending order."""
    counts: dict[tuple[Any, ...], int] = {}
    for release in releases:
        if not isinstance(release, Release):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give a list: [Release(noise_multiplier, sample_rate, count=steps)]"
            raise expected(function, "releases", "to be a list of Release", described(release), remedy)
        if release.scheme not in COVERED and not assume_poisson:
            got, remedy = f"scheme {release.scheme!r}, which is not covered by the accountant", "draw Poisson samples"
            if assume_poisson is not None:
                remedy += ", or pass assume_poisson=True for a number that is only a label"
            raise expected(function, "batches", "to be Poisson samples", got, remedy, SamplingError)
        require_nonnegative(function, "noise_multiplier", release.noise_multiplier, "give sigma")
        require_rate(function, release.sample_rate)
        require_integer(function, "count", release.count, 0)
        key: tuple[Any, ...] = (float(release.noise_multiplier), float(release.sample_rate))
        if release.scheme == "truncated":
            require_integer(function, "max_batch_size", release.max_batch_size, 1)
            require_integer(function, "num_examples", release.num_examples, 1)
            key += (release.max_batch_size, release.num_examples)
        counts[key] = counts.get(key, 0) + release.count
    found: list[Any] = sorted((*key, count) for key, count in counts.items() if count > 0)
    return tuple(Truncated(*one) if len(one) > 3 else one for one in found)
