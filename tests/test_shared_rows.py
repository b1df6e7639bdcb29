"""A data set is known by its object and its memory, through wrappers; training refuses its own rows."""

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.shared_rows import share_rows

ROWS, LABELS = torch.randn(20, 3), torch.arange(20) % 3
TENSORS = TensorDataset(ROWS, LABELS)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return ROWS[index], LABELS[index]


OWN = Rows()


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (TENSORS, TENSORS, True),
        (TENSORS, (ROWS, LABELS), True),
        ({"x": ROWS, "y": LABELS}, TENSORS, True),
        (ROWS[5:15], Subset(TENSORS, [0, 7]), True),
        (ROWS[:10], ROWS[9:], True),
        (ROWS[:10], TensorDataset(ROWS[10:], LABELS[10:]), False),
        (Subset(TENSORS, range(10)), Subset(TENSORS, range(10, 20)), False),
        (Subset(Subset(OWN, range(10, 20)), [3]), Subset(OWN, [13]), True),
        (Subset(Subset(OWN, range(10, 20)), [3]), Subset(OWN, [3]), False),
        (OWN, OWN, True),
        (OWN, Rows(), False),
        (pg.ClassRates(TENSORS, LABELS, [1.0, 1.0, 1.0]), TENSORS, True),
        (ConcatDataset([Rows(), Subset(OWN, [1])]), OWN, True),
        (Subset(OWN, [1]), ConcatDataset([Rows(), Subset(OWN, [2])]), False),
        (ROWS, ROWS.clone(), False),
        (None, OWN, False),
        (None, None, False),
        (ROWS[:0], ROWS[:0], False),
    ],
)
def test_rows_are_known_by_object_and_memory(one: Any, other: Any, shared: bool):
    assert share_rows(one, other) == shared
    assert share_rows(other, one) == shared


@pytest.mark.parametrize("holder", ["the optimizer", "the preconditioner"])
def test_fit_refuses_public_examples_that_are_the_private_ones(holder: str):
    model, data = make_model(), make_data()

    def train(given: Any) -> pg.PrivateGradient:
        public = pg.PublicGradient(model, loss_fn, given, source="volunteers")
        named = model.named_parameters()
        if holder == "the optimizer":
            private_grad = pg.PrivateGradient(model, loss_fn, make_plan(), side_information="volunteers")
            optimizer: Any = pg.optim.AdamPub(named, public=public, lr=0.1)
        else:
            scales = pg.precondition.public_rmsprop(public)
            private_grad = pg.PrivateGradient(model, loss_fn, make_plan(seed=1), precondition=scales)
            optimizer = pg.optim.SGD(named, lr=0.1)
        pg.fit(private_grad, optimizer, data, progress=False)
        return private_grad

    with pytest.raises(pg.PrivacyError, match=r"to have no row of the private examples, .*; split the public examples"):
        train(Subset(data, range(5)))
    assert train(make_data()).ledger.releases == 10  # equal rows in other memory: nobody can tell
