"""What a batch may be: mappings and dataclasses keep their type, and each refusal names the part and a remedy."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import privgrad as pg
from conftest import make_plan

INPUTS, LABELS = torch.randn(32, 6, dtype=torch.float64), torch.arange(32) % 3
ITEMS = [{"x": x, "y": y} for x, y in zip(INPUTS, LABELS, strict=True)]


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor


@dataclass
class Checked:
    """One that its constructor does not take back, as a tree's strings would not pass it."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        assert isinstance(self.x, Tensor)


class OwnDict(dict[str, Any]):
    """A subclass that torch's trees do not know."""

    @property
    def x(self) -> Tensor:
        return self["x"]

    @property
    def y(self) -> Tensor:
        return self["y"]


class ReadOnly(Mapping[str, Any]):
    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held = dict(held)

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def encoding(held: dict[str, Any]) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(held)


class Two(NamedTuple):
    x: Tensor
    y: Tensor


Engine = Literal["factored", "vmap"]
KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "UserDict": UserDict,
    "BatchEncoding": encoding,
    "a subclass of dict": OwnDict,
    "a read-only mapping": ReadOnly,
    "a dataclass": lambda held: Pair(**held),
    "a dataclass that checks": lambda held: Checked(**held),
    "OrderedDict": OrderedDict,
    "namedtuple": lambda held: Two(**held),
}


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, Mapping) else (batch.x, batch.y)


def released(data: Any, collate: Any = None, engine: Engine = "factored", **options: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    kinds = set[type]()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        kinds.add(type(batch))
        x, y = parts(batch) if not isinstance(batch, dict) else (batch["x"], batch["y"])
        return F.cross_entropy(model(x), y, reduction="none")

    plan = make_plan(steps=2, noise_multiplier=0.0, seed=1)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, engine=engine)
    found = [private_grad(batch.to("cpu"))["weight"] for batch in plan.batches(data, collate=collate, **options)]
    assert len(kinds) == 1
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_batches_keep_their_type_and_give_the_same_gradients(kind: str, engine: Engine):
    def collate(items: list[Any]) -> Any:
        return KINDS[kind]({name: torch.stack([item[name] for item in items]) for name in ("x", "y")})

    assert torch.allclose(released(ITEMS, collate, engine), released(ITEMS), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["UserDict", "BatchEncoding", "a dataclass", "OrderedDict"])
def test_items_may_be_mappings_and_dataclasses(kind: str):
    data = [KINDS[kind](item) for item in ITEMS]
    assert torch.allclose(released(data), released(ITEMS), rtol=0, atol=1e-8)


def in_a_pair(items: list[Any]) -> Pair:
    return Pair(torch.stack([item["x"] for item in items]), torch.stack([item["y"] for item in items]))


def test_workers_return_dataclasses():
    assert torch.allclose(released(ITEMS, in_a_pair, num_workers=1), released(ITEMS), rtol=0, atol=1e-8)
    batch = next(make_plan().batches(ITEMS, collate=in_a_pair))
    assert repr(batch).startswith("Batch(one example has shape Pair(x=(6,), y=())")


def test_a_model_of_transformers_gets_the_encoding_by_names():
    def collate(items: list[Any]) -> Any:
        return encoding({name: torch.stack([item[name] for item in items]) for name in ("x", "y")})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3).double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y, reduction="none")

    plan, model = make_plan(steps=2), Model()
    private_grad = pg.PrivateGradient(model, lambda model, batch: model(**batch), plan)
    for batch in plan.batches(ITEMS, collate=collate):
        private_grad(batch)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a scalar": ({"t": torch.tensor(0.5)}, r"examples\['t'\] to be a tensor .* got a tensor without dim"),
    "a sparse tensor": ({"s": torch.eye(8).to_sparse()}, r"examples\['s'\] to be a tensor .* got layout torch"),
    "a transposed sparse tensor": (
        {"s": torch.ones(8, 2).T.to_sparse()},
        r"examples\['s'\] to be a tensor .* got .*to_dense\(\)",
    ),
    "a text": ({"id": "a7"}, r"examples\['id'\] to be a tensor .*, got str; leave it out of the batch"),
    "None": ({"mask": None}, r"examples\['mask'\] to be a tensor .*, got NoneType; leave it out"),
    "nested": ({"more": ({"ids": [1]},)}, r"examples\['more'\]\[0\]\['ids'\]\[0\] to be a tensor .*, got int"),
    "a shared mask": ({"mask": torch.ones(77, 77)}, r"examples\['mask'\] .* got a length .* of examples\['x'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_row_is_refused_by_name(name: str):
    more, message = REFUSED[name]

    def collate(items: list[Any]) -> Any:
        return {"x": torch.stack([item["x"] for item in items]), **more}

    plan = make_plan(steps=2, sample_rate=0.25, expected_batch_size=8)
    with pytest.raises(pg.PrivacyError, match=message) as caught:
        list(plan.batches(ITEMS, collate=collate))
    assert "77" not in str(caught.value)


ITEMS_REFUSED: dict[str, tuple[Any, str]] = {
    "a text": ({"x": INPUTS[0], "id": "a7"}, r"example\['id'\] to be .* got str; turn example\['id'\] into a tensor"),
    "None": ({"x": {"deep": None}}, r"example\['x'\]\['deep'\] to be a tensor or a number, got NoneType; turn"),
    "a list": ({"ids": [1, 2]}, r"example\['ids'\] .* got list; .*with_format\(\"torch\"\)"),
    "a text alone": ("a7", "example to be a tensor or a number, got str"),
    "a text of numpy": (np.array(["7"])[0], "example to be a tensor or a number, got str_"),
}


@pytest.mark.parametrize("name", ITEMS_REFUSED)
def test_items_name_what_is_no_number(name: str):
    item, message = ITEMS_REFUSED[name]
    with pytest.raises(pg.SamplingError, match=message):
        next(make_plan().batches([item] * 32))


def test_examples_of_several_forms_name_the_part_and_show_no_length():
    data = [{"x": torch.zeros(17), "y": 1}] * 31 + [{"x": torch.zeros(19), "y": 1}]
    plan = make_plan(sample_rate=1.0, expected_batch_size=32)
    with pytest.raises(pg.SamplingError, match=r"got two kinds of example\['x'\]; convert all") as caught:
        next(plan.batches(data))
    assert not {"17", "19"} & set(str(caught.value).split())


def test_the_habits_of_a_dataloader_are_told_what_to_do():
    batch = next(make_plan().batches(ITEMS))
    with pytest.raises(TypeError, match=r"which is private, to go to private_grad; .*: loss_fn gets batch\.examples"):
        _x, _y = batch  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    with pytest.raises(TypeError, match=r"which is private, to go to private_grad; .*: loss_fn gets batch\.examples"):
        batch[0]
    with pytest.raises(TypeError, match=r"to stay private; divide by .*batch\.examples"):
        len(batch)
    assert batch


def test_collate_fn_is_collate_and_other_arguments_of_a_dataloader_are_unknown():
    assert torch.equal(released(ITEMS, in_a_pair), released(ITEMS, collate_fn=in_a_pair))
    with pytest.raises(pg.PrivacyError, match="exactly one of collate and collate_fn to be given"):
        make_plan().batches(ITEMS, collate=in_a_pair, collate_fn=in_a_pair)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shuffle'"):
        make_plan().batches(ITEMS, shuffle=True)  # pyright: ignore[reportCallIssue]


TEXTS = [(torch.arange(32 if index % 40 else 10), index % 3) for index in range(640)]
OWN_TEXTS = [{"ids": torch.arange(5 if index % 30 else 9)} for index in range(640)]


def to_the_longest(items: list[Any]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def with_a_mask(items: list[Any]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return {"ids": ids, "mask": ids > 0}


def to_a_public_length(items: list[Any]) -> Tensor:
    return torch.stack([F.pad(item["ids"], (0, 12 - len(item["ids"]))) for item in items])


@pytest.mark.parametrize(
    ("data", "collate"),
    [(TEXTS, to_the_longest), (OWN_TEXTS, with_a_mask), (OWN_TEXTS, None)],
    ids=["to the longest", "with a mask", "no collate"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_rare_lengths_are_refused_before_the_first_batch(data: Any, collate: Any, workers: int):
    if workers and collate is None:
        pytest.skip("one of them is enough")
    numbers: dict[str, Any] = {"num_examples": 640, "expected_batch_size": 1, "sample_rate": 1 / 640}
    with pytest.raises(pg.SamplingError, match=r"depend on other examples|two kinds of example\['?[a-z0]*'?\]"):
        next(make_plan(**numbers, steps=3).batches(data, collate=collate, num_workers=workers))
    next(make_plan(**numbers, steps=3).batches(OWN_TEXTS, collate=to_a_public_length, num_workers=workers))


def test_trying_a_collate_changes_no_draw_and_no_augmentation():
    class Noisy(Dataset[Tensor]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(3)

    before = torch.get_rng_state()
    first, second = (
        [batch.examples for batch in make_plan(seed=3, steps=3).batches(Noisy(), start=start)] for start in (0, 1)
    )
    assert torch.equal(torch.cat(first[1:]), torch.cat(second))
    assert torch.equal(before, torch.get_rng_state())


def test_one_rare_length_in_a_worker_data_set_that_fails_is_told_by_its_batch():
    class Failing(Dataset[Tensor]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Tensor:
            raise RuntimeError("no such row")

    plan = make_plan(sample_rate=1.0, expected_batch_size=32)
    with pytest.raises(pg.SamplingError, match="no such row; replace or remove this example"):
        next(plan.batches(Failing()))
