"""Which examples a step uses: each one independently with probability q, by a secret random word of its place.

The words of a step belong to the places of the data set, not to people. docs/mathematics.md, section 0, says why this
is as good as coins of each person's own. The record of a draw (`Sampling`) is public; which examples were drawn is not.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from privgrad.errors import require_integer
from privgrad.processes import ALONE, Processes, require_all_processes
from privgrad.rng import RandomSource, Stream
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.datasets import all_rows, ask_about_rows, content_of, other_container, warn_of_repeats
from privgrad.sampling.epochs import EpochKeys, rows_in_step
from privgrad.sampling.loading import Collate, Data, Draw, Examples, unusable
from privgrad.types import PrivacyUnit, Sampling, SamplingScheme

_BLOCK = 1 << 20  # rows that are drawn at once, which bounds the memory


class BatchSampler(Sampler[Draw]):
    """A torch sampler of the draws of steps start, start + 1, ..., steps - 1.

    For a DataLoader of the user's own: `DataLoader(sampler.dataset, sampler=sampler, batch_size=None, ...)`, whose
    items are batches.

    Args:
        dataset: a map-style data set, with len() and integer indexing. Each example is a tensor, or a tuple, list or
            dict of values that default_collate takes. A ClassRates has a rate for each class.
        scheme: "poisson": every example is in a batch with probability sample_rate, independently of all else; a
            batch may be empty. "truncated": of such a sample with more than max_batch_size examples, as many at random;
            each batch is padded to that size. "epochs": every example is in as many of the epoch_steps steps of each
            epoch, drawn uniformly, independently of all else; a batch may be empty.
        sample_rate: q in (0, 1]; with bands, of the people in the group of a step.
        expected_batch_size: B, public.
        num_examples: the public count. The data set may hold more or fewer, but see "truncated".
        steps: T.
        start: first step, for a resumed run. With bands and without a seed it is a multiple of them, because another
            sampler has other groups.
        source: the source of the random streams that draw the batches and seed random augmentation.
        collate: turns a non-empty list of examples into the batch's examples; default_collate if None. Each row must
            depend on its own example only: pad to a public length, not to the longest example of the batch. It must
            not be random.
        processes: the processes that train together. With several, process r of k draws among the examples r, r + k,
            r + 2k, ... or among its `rows`. Under a research seed, their batches together are the batch that a single
            process would draw. All processes must make this call, with the same data in the same order, or with parts.
            The call compares the length and a few random items, unless the items themselves are random.
        privacy_unit: the plan's. For "user", each item must hold all data of one person.
        bands: b, the number of groups that take turns: each example is in one of them, drawn at random, and step t
            draws from group t mod b; see noise.Banded. 1: all examples are one group.
        max_batch_size: for "truncated", the number of rows of each batch. The data set must then have
            num_examples examples, or one less: epsilon depends on how often a batch is truncated.
        epoch_steps: for "epochs", t. Each example is in sample_rate * t steps of an epoch.
        epoch_key: for "epochs", the file that keeps the key of the running epoch; see `EpochKeys`.
        rows: for data in parts, of which each process holds one: range(a, b), the numbers of its rows among all. Each
            row has one number, which it keeps for the whole training, and is in one part. None: the data set is whole,
            with rows 0 to n - 1.
    Raises:
        SamplingError: the data set has no length or no examples, or a number of them that the scheme does not admit;
            batches are not Poisson in several processes or with ClassRates; start is no multiple of bands; the data
            set differs from the one of the first process, or a part has rows of another one; or an epoch is resumed
            with other rows, or another number of them.
    Attributes:
        dataset: the data set of batches that a DataLoader needs.
        worker_seed: a seed for a DataLoader's worker processes.
        groups: with bands, the group of each example of the data set, shape (n,). PRIVATE: `audit.methods` reads it.
    Privacy:
        Under "poisson" the actual rate is never above sample_rate, and less than 2**-63 below it. With ClassRates it is
        never above the example's own rate times sample_rate. With bands, no example is in two batches that are fewer
        than b steps apart, and its group depends on no data. Draws come from a cryptographic stream. Without a seed
        each process has a stream of its own entropy. With a seed all processes share one stream, and each uses the
        words of its own examples; in epochs, the first process makes the keys. A second iteration makes the same
        draws, and the ledger refuses them.
    """

    def __init__(
        self,
        dataset: Data,
        *,
        scheme: SamplingScheme,
        sample_rate: float,
        expected_batch_size: int,
        num_examples: int,
        steps: int,
        start: int = 0,
        source: RandomSource,
        collate: Collate | None = None,
        processes: Processes = ALONE,
        privacy_unit: PrivacyUnit = "example",
        bands: int = 1,
        max_batch_size: int | None = None,
        epoch_steps: int | None = None,
        epoch_key: Path | None = None,
        rows: range | None = None,
    ) -> None:
        require_all_processes("plan.batches", processes)
        require_integer("plan.batches", "start", start, 0)
        if source.seed is None and start % bands and start < steps:
            # This sampler draws new groups. They may begin only where every person of the old ones had its turn.
            raise unusable("start", f"to be a multiple of {bands} with memory", start, "give start=ledger.next_step")
        with processes.all_succeed():
            _require_samplable(dataset, num_examples, scheme, processes, rows)
        held = dataset.dataset if isinstance(dataset, ClassRates) else dataset
        self._relative = dataset.relative if isinstance(dataset, ClassRates) else None
        self.dataset = Examples(held, collate)
        self._rows = range(len(cast("Sequence[Any]", dataset))) if rows is None else rows
        self._is_whole = rows is None
        ask_about_rows(dataset, num_examples, privacy_unit)
        warn_of_repeats(dataset)
        last = self._rows.stop
        if processes.count > 1:
            last = all_rows(self.dataset.take, self._rows, processes, is_whole=self._is_whole)
        self._epochs = None
        if epoch_steps is not None:
            content = partial(content_of, self.dataset.take, self._rows, last, processes)
            self._epochs = EpochKeys(source, epoch_key, processes, rows=last, content=content)
            start = self._epochs.first_step(start, epoch_steps)
        self._steps = range(start, steps)
        self._stream, self._keys = source.stream("sampling"), source.stream("augmentation")
        self._truncating = source.stream("truncation")
        self._drawn = Sampling(  # the public record of each draw, except for its step
            scheme=scheme,
            sample_rate=sample_rate,
            expected_batch_size=expected_batch_size,
            step=start,
            stream=self._stream.public_id,
            seed=source.seed,
            rank=processes.rank,
            processes=processes.count,
            bands=bands,
            max_batch_size=max_batch_size,
            num_examples=num_examples if scheme == "truncated" else None,
            epoch_steps=epoch_steps,
        )
        self._bands = bands
        # Their law need not be uniform: a person is charged for the steps of one whole group, whichever it is.
        own = len(self._rows), self._rows.start
        groups = source.stream("bands").uint64(0, *own) if bands > 1 else np.zeros(0, np.uint64)
        self.groups = (groups % np.uint64(bands)).astype(np.uint16)
        self.worker_seed = int(source.stream("workers").uint64(start, processes.count)[processes.rank])

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Draw]:
        yield from map(self._draw, self._steps)

    def members(self, step: int, first: int, last: int) -> np.ndarray:
        """Return which rows from `first` to `last` - 1 of the data set's `rows` a step uses; int64, sorted. PRIVATE.

        The draw of a row follows from its number, the step and the secret alone, except that a truncated sample is cut
        as a whole. So parts of the rows may be drawn alone, and in any process that has the secret.

        Raises:
            SamplingError: the numbers are not those of rows of the data set.
        """
        if not self._rows.start <= first <= last <= self._rows.stop:
            raise unusable("members", "to be asked for rows of the data set", f"{first} to {last}", "see rows")
        is_cut = self._drawn.scheme == "truncated"
        start, stop = (self._rows.start, self._rows.stop) if is_cut else (first, last)
        parts = [self._in_block(step, a, min(a + _BLOCK, stop)) for a in range(start, stop, _BLOCK)]
        chosen = np.concatenate([np.zeros(0, np.int64), *parts])
        if is_cut:
            # A uniform subset of the sample: its members in random order, cut off. Two words tie once in 2^64.
            order = np.argsort(self._truncating.uint64(step, len(chosen)), kind="stable")
            chosen = np.sort(chosen[order[: self._drawn.max_batch_size]])
            chosen = chosen[(first <= chosen) & (chosen < last)]
        return chosen

    def _in_block(self, step: int, first: int, last: int) -> np.ndarray:
        """Return the members of a step among a few rows, before a truncation."""
        drawn, own = self._drawn, slice(first - self._rows.start, last - self._rows.start)
        if self._epochs is not None and (steps := drawn.epoch_steps) is not None:
            epoch, position = divmod(step, steps)
            chosen = round(drawn.sample_rate * steps)
            return rows_in_step(self._epochs.stream(epoch), steps, chosen, position, first, last)
        relative = 1.0 if self._relative is None else self._relative[own]
        found = _poisson(self._stream, step, drawn.sample_rate * relative, last - first, first)
        return found if self._bands == 1 else found[self.groups[own][found - first] == step % self._bands]

    def _draw(self, step: int) -> Draw:
        drawn = replace(self._drawn, step=step)
        if self._epochs is not None and (steps := drawn.epoch_steps) is not None:
            self._epochs.keep(step // steps)
            drawn = replace(drawn, stream=self._epochs.stream(step // steps).public_id)
        chosen = self.members(step, self._rows.start, self._rows.stop) - self._rows.start
        if self._is_whole:
            chosen = chosen[chosen % drawn.processes == drawn.rank]
        key = self._keys.uint64(step, 4 * drawn.processes)[4 * drawn.rank : 4 * drawn.rank + 4].tobytes()
        return Draw(chosen, key, drawn)


def _require_samplable(
    dataset: Data, num_examples: int, scheme: SamplingScheme, processes: Processes, rows: range | None
) -> None:
    """Raise SamplingError unless the scheme can sample the data set; warn if it is far smaller than declared."""
    if problem := other_container(dataset):
        raise unusable("dataset", "to have a length, and an example at each index below it", *problem)
    data = cast(Sequence[Any], dataset)
    if len(data) == 0:
        raise unusable("dataset", "to hold at least one example", "0 examples")
    if rows is not None and (len(rows) != len(data) or rows.step != 1 or rows.start < 0):
        raise unusable("rows", "to be range(a, b), with a number for each row of the data set", "another range")
    # Under "poisson", the number of rows is no error: q is drawn and charged as planned, B only divides, and an example
    # is drawn with probability q whatever n is; so it is in "epochs". Truncation is charged for n or n - 1 rows. No
    # number of rows is shown: it is private.
    is_small = rows is None and 2 * len(data) < num_examples
    is_list = isinstance(dataset, tuple | list)
    if is_list and is_small and all(isinstance(one, Tensor | np.ndarray | list) for one in data):
        remedy = "pass torch.utils.data.TensorDataset(*map(torch.as_tensor, data))"
        raise unusable("dataset", "to be a data set of examples", "columns of a table", remedy)
    if is_small:
        warnings.warn(
            f"NOT PRIVATE: the plan declares num_examples = {num_examples:,}, and the data set has fewer than half as "
            "many. Epsilon holds, but sample rate, batch size and delta follow from num_examples: correct it, or "
            "simulate the plan on fewer public examples by plan.scaled(factor, num_examples=...)",
            stacklevel=1,
        )
    if (scheme != "poisson" and isinstance(dataset, ClassRates)) or (scheme == "truncated" and processes.count > 1):
        condition = "to be 'poisson' for ClassRates, and not 'truncated' in several processes"
        raise unusable("sampling", condition, repr(scheme))
    if scheme == "truncated" and not num_examples - 1 <= len(data) <= num_examples:
        condition = f"to hold num_examples = {num_examples} or one fewer for truncated batches"
        raise unusable("dataset", condition, "a different number", "draw Poisson batches")


def _poisson(stream: Stream, step: int, rates: float | np.ndarray, count: int, first: int = 0) -> np.ndarray:
    """Return which of `count` examples from `first` on are drawn, each with its rate: one, or shape (count,)."""
    # floor(q 2^64) of the 2^64 words are below the threshold: the rate is at most q, and less than 2^-64 below it. The
    # word of (step, place) is used for nothing else. A rate of 1 takes every word, because 2^64 is no uint64.
    thresholds = np.minimum(rates * 2.0**64, np.nextafter(2.0**64, 0)).astype(np.uint64)
    return first + np.flatnonzero((stream.uint64(step, count, first) < thresholds) | (rates == 1))
