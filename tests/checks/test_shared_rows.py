"""A data set is known by its object and its memory, through wrappers; training refuses its own rows."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.checks.data import share_rows

ROWS, LABELS = torch.randn(20, 3), torch.arange(20) % 3
TENSORS = TensorDataset(ROWS, LABELS)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return ROWS[index], LABELS[index]


OWN = Rows()
LISTED: Any = [{"x": ROWS[0], "y": index} for index in range(20)]
SAME, FIXED = torch.zeros(1, 3).expand(20, 3), torch.arange(20)


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
        (TENSORS, TensorDataset(ROWS, LABELS.clone()), True),
        (None, OWN, False),
        (None, None, False),
        (ROWS[:0], ROWS[:0], False),
        (LISTED[:5], LISTED, True),
        (Subset(LISTED[:5], [4]), Subset(LISTED, [4]), True),
        (Subset(LISTED[:5], [4]), Subset(LISTED, [5]), False),
        (LISTED[:5], LISTED[5:], False),
        ([0, None, "", "a"], [0, None, "", "a"], False),  # Python keeps one object for all
        ([], LISTED, False),
        (TensorDataset(SAME[:10], ROWS[:10]), TensorDataset(SAME[10:], ROWS[10:]), False),
        (TensorDataset(SAME[:10], ROWS[:10]), TensorDataset(SAME[10:], ROWS[9:19]), True),
        (TensorDataset(SAME), TensorDataset(SAME), False),
        (TensorDataset(FIXED[:10], ROWS[:10]), TensorDataset(FIXED[:10], ROWS[10:]), False),
        (TensorDataset(FIXED[:10], ROWS[:10]), TensorDataset(FIXED[:10], ROWS[5:15]), True),
        (TensorDataset(LABELS, ROWS), TensorDataset(ROWS[5:]), True),
        ((ROWS.to_sparse(), LABELS), TENSORS, True),
    ],
)
def test_rows_are_known_by_object_and_memory(one: Any, other: Any, shared: bool):
    assert share_rows(one, other) == shared
    assert share_rows(other, one) == shared


def test_selections_of_a_table_are_known_by_its_memory(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    columns = {"text": [f"text {index}" for index in range(20)], "even": [index % 2 == 0 for index in range(20)]}
    own = datasets.Dataset.from_dict(columns)
    own.save_to_disk(tmp_path)
    for data in (own, own.with_format("torch"), datasets.load_from_disk(str(tmp_path))):
        parts = [data.select(range(5)), data.select([3, 1]), data.shard(4, 0), data.shuffle(seed=0), Subset(data, [7])]
        parts += [data.filter(lambda row: row["even"]), data.remove_columns("text"), data.rename_column("text", "x")]
        parts += [datasets.concatenate_datasets([datasets.Dataset.from_dict(columns), data.select([4])])]
        assert all(share_rows(part, data) and share_rows(data, part) for part in parts)
        for shuffle in (False, True):
            split = data.train_test_split(test_size=5, shuffle=shuffle, seed=0)
            assert not share_rows(split["train"], split["test"])
            assert share_rows(split["train"].shuffle(seed=1).select(range(9)), split["train"])
            assert not share_rows(split["train"].shuffle(seed=1), split["test"].shuffle(seed=1))
        assert not share_rows(data, datasets.Dataset.from_dict(columns))  # equal rows in other memory
        assert not share_rows(data.select([]), data)


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


REPEATED = Subset(TENSORS, [0, 1, 1, 2])


@pytest.mark.parametrize(
    ("data", "warned"),
    [
        (REPEATED, True),
        (Subset(REPEATED, [1, 2]), True),
        (Subset(REPEATED, [0, 2, 3]), False),
        (ConcatDataset([OWN, OWN]), True),
        (Subset(ConcatDataset([OWN, TENSORS, OWN]), [0, 40]), True),
        (Subset(ConcatDataset([OWN, TENSORS, OWN]), [0, 20, 41]), False),
        (ConcatDataset([Subset(OWN, range(12)), Subset(OWN, range(8, 20))]), True),
        (ConcatDataset([Subset(OWN, range(12)), Subset(OWN, range(12, 20))]), False),
        (ConcatDataset([OWN, TENSORS]), False),
        (pg.ClassRates(Subset(OWN, [3, 4, 3]), [0, 1, 0], [0.5, 1.0]), True),
        (OWN, False),
    ],
)
def test_rows_that_are_visibly_repeated_warn(data: Any, warned: bool):
    plan = make_plan(num_examples=2, expected_batch_size=1, sample_rate=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.sampler(data)
    assert any("holds some rows several times" in str(one.message) for one in caught) == warned
