"""One interface for all samplers: which of the rows a to b a step uses, in whatever parts they are drawn."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan, seed_of
from privgrad.noise.banded import Banded
from privgrad.sampling import draws
from privgrad.sampling.draws import BatchSampler

ROWS = 41
SCHEMES: dict[str, dict[str, Any]] = {
    "poisson": {},
    "truncated": {"sampling": "truncated", "max_batch_size": 11},
    "epochs": {"sampling": "epochs", "steps": 12},
    "epochs, twice": {"sampling": "epochs", "sample_rate": 2 / 8, "participations": 2, "steps": 16},
    "bands": {"correlation": Banded(2)},
    "class rates": {},
}
pytestmark = pytest.mark.filterwarnings("ignore:a fixed seed")


def sampler_of(scheme: str, rows: range | None = None, seed: int | None = None) -> BatchSampler:
    plan = make_plan(**({"num_examples": ROWS, "expected_batch_size": 10, "seed": seed} | SCHEMES[scheme]))
    own = range(ROWS) if rows is None else rows
    data: Any = TensorDataset(torch.arange(own.start, own.stop))
    if scheme == "class rates":
        data = pg.ClassRates(data, torch.arange(own.start, own.stop) % 2, [1.0, 0.3])
    return plan.sampler(data, rows=rows)


def drawn(sampler: BatchSampler) -> list[list[int]]:
    return [sampler.dataset[draw].examples[0][: len(draw.indices)].tolist() for draw in sampler]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_any_part_of_the_rows_can_be_drawn_alone(scheme: str, block: int, monkeypatch: pytest.MonkeyPatch):
    sampler = sampler_of(scheme)
    wanted = drawn(sampler)
    monkeypatch.setattr(draws, "_BLOCK", block)
    for step, batch in enumerate(wanted):
        assert sampler.members(step, 0, ROWS).tolist() == batch
        parts = [sampler.members(step, *ends) for ends in ((0, 1), (1, 1), (1, 18), (18, ROWS))]
        assert np.concatenate(parts).tolist() == batch
    assert drawn(sampler) == wanted


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "truncated"])
def test_parts_with_one_secret_draw_what_the_whole_draws(scheme: str):
    whole = drawn(sampler_of(scheme, seed=seed_of(1)))
    parts = [drawn(sampler_of(scheme, rows, seed_of(1))) for rows in (range(17), range(17, ROWS))]
    assert [one + other for one, other in zip(*parts, strict=True)] == whole


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (0, ROWS + 1), (5, 4)])
def test_members_of_rows_that_are_not_there_are_refused(first: int, last: int):
    with pytest.raises(pg.PrivacyError, match="members to be asked for rows of the data set"):
        sampler_of("epochs").members(0, first, last)


@pytest.mark.parametrize("rows", [range(ROWS - 1), range(0, 2 * ROWS, 2), range(-1, ROWS - 1)])
def test_a_range_that_does_not_number_the_rows_is_refused(rows: range):
    with pytest.raises(pg.PrivacyError, match="rows to be range"):
        make_plan(num_examples=ROWS, expected_batch_size=10).batches(TensorDataset(torch.arange(ROWS)), rows=rows)
