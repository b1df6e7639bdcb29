"""The matrix of docs/sampling.md, tried on plans of each scheme."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting import epsilon
from privgrad.noise.banded import Banded
from privgrad.processes import Processes

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
SCHEMES = ("poisson", "truncated", "epochs")


class Two(Processes):
    """The first of two processes; the other one has the same data."""

    count = 2

    def gather_objects(self, value: Any) -> list[Any]:
        start, stop, is_whole, digest = value
        return [value, value if is_whole else (start + 32, stop + 32, is_whole, digest + " of others")]


def plan_of(scheme: str, **changed: Any) -> pg.PrivacyPlan:
    own = {"truncated": {"max_batch_size": 20}}.get(scheme, {})
    return make_plan(**({"sampling": scheme, "steps": 4, "delta": 1e-3} | own | changed))


def accountants(scheme: str, _: Path) -> str:
    release = plan_of(scheme).release_of(4)
    by_rdp = math.isfinite(epsilon([release], delta=1e-5, accountant="rdp"))
    assert math.isfinite(epsilon([release], delta=1e-5))
    return "PLD and RDP, the smaller one" if by_rdp else {"truncated": "PLD"}.get(scheme, "PLD (random allocation)")


def classes(scheme: str, _: Path) -> None:
    plan_of(scheme).batches(pg.ClassRates(make_data(), torch.arange(32) % 2, [1.0, 0.1]))


def processes(scheme: str, _: Path) -> None:
    plan_of(scheme).batches(make_data(), processes=Two())


def parts(scheme: str, _: Path) -> None:
    plan_of(scheme, num_examples=64, expected_batch_size=16).batches(make_data(), rows=range(32), processes=Two())


def budget(scheme: str, folder: Path) -> None:
    held = pg.Budget(
        folder / f"{scheme}.jsonl", total_epsilon=50.0, delta=1e-3, num_examples=32, privacy_unit="example"
    )
    held.open_ledger(folder / scheme / "ledger.jsonl", plan_of(scheme))


def other_size(scheme: str, _: Path) -> str:
    try:
        plan_of(scheme).batches(TensorDataset(torch.zeros(28, 5)))
    except pg.PrivacyError:
        return "yes"
    return "no"


def fitted(scheme: str, _: Path) -> None:
    model = make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan_of(scheme))
    pg.fit(private_grad, pg.optim.SGD(model.named_parameters(), lr=0.1), make_data(), progress=False)


def planned(**changed: Any) -> Callable[[str, Path], None]:
    def make(scheme: str, _: Path) -> None:
        plan_of(scheme, **changed)

    return make


def several_rows(scheme: str, _: Path) -> None:
    plan_of(scheme, noise_multiplier=5.0).epsilon(rows_per_person=2)


ROWS: dict[str, Callable[[str, Path], Any]] = {
    "accountant": accountants,
    "users as the unit": planned(privacy_unit="user"),
    "`group_size` above 1": planned(group_size=2),
    "noise with memory (`Banded`)": planned(correlation=Banded(2)),
    "rates of classes (`ClassRates`)": classes,
    "several processes": processes,
    "data in parts (`rows`)": parts,
    "`Budget.open_ledger`, private tuning": budget,
    "a person with several rows (`rows_per_person`)": lambda scheme, _: (
        plan_of(scheme, noise_multiplier=5.0).epsilon(rows_per_person=2) * 0 and None
    ),
    "`num_examples` must be exact": other_size,
    "`fit`, heads, experiments, Trainer, Lightning, Flower": fitted,
}


def test_the_page_has_these_rows():
    assert set(matrix()) == set(ROWS)


def matrix() -> dict[str, list[str]]:
    rows = re.findall(r"^\| (.+) \|$", PAGE.read_text().split("## What goes with what")[1], re.MULTILINE)
    return {name: cells for name, *cells in (row.split(" | ") for row in rows[1:])}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_says_what_the_code_does(row: str, scheme: str, tmp_path: Path):
    said = matrix()[row][SCHEMES.index(scheme)]
    try:
        found = ROWS[row](scheme, tmp_path) or "yes"
    except pg.PrivacyError:
        found = "no"
    assert said.partition(":")[0] == found
