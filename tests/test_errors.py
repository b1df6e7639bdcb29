"""Validators: what they let through, and that whatever else is given ends in the library's error."""

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad import errors
from privgrad.accounting import accountant as accounting
from privgrad.data.dataset import DataSet
from privgrad_lab.calls import SUCH_AS
from privgrad_lab.load_spec import check_spec, load_spec

HUGE = 10**400  # no float holds it
POSITIVE: Callable[..., None] = partial(errors.require_positive, "f", "x", remedy="give one")
NONNEGATIVE: Callable[..., None] = partial(errors.require_nonnegative, "f", "x", remedy="give one")
RATE: Callable[..., None] = partial(errors.require_rate, "f")
DELTA: Callable[..., None] = partial(errors.require_delta, "f")
DECAY: Callable[..., None] = partial(errors.require_in, "f", "x", interval="[0, 1)")
DECAYS: Callable[..., None] = partial(errors.require_in, "f", "x", interval="[0, 1)", is_pair=True)


@pytest.mark.parametrize("good", [1, 1.0, 1e308, 10**300, np.float32(1.0), Fraction(1, 3)])
def test_numbers_in_range_pass(good: Any):
    POSITIVE(value=good)
    NONNEGATIVE(value=good)


@pytest.mark.parametrize("check", [POSITIVE, NONNEGATIVE, RATE, DELTA, DECAY, DECAYS])
@pytest.mark.parametrize(
    "bad",
    [HUGE, -HUGE, Fraction(HUGE), math.inf, math.nan, -1.0, "1", None, 1j, [1.0]],
    ids=lambda bad: type(bad).__name__,
)
def test_whatever_else_is_refused(check: Callable[..., None], bad: Any):
    with pytest.raises(pg.PrivacyError, match=r"f: expected .*, got .*\."):
        check(value=bad)


def test_decays_are_one_number_or_two():
    DECAY(value=0.0)
    DECAYS(value=[0.9, np.float32(0.5)])
    for check, bad in ((DECAY, (0.9, 0.9)), (DECAY, 1.0), (DECAYS, 0.9), (DECAYS, (0.9,)), (DECAYS, (0.9, 1.0))):
        with pytest.raises(pg.PrivacyError, match=r"expected x to be (two numbers )?in \[0, 1\), got .*\."):
            check(value=bad)


def test_intervals_have_the_ends_that_their_brackets_say():
    for interval, passing in (("(0, 1)", [0.5]), ("[0, 1)", [0, 0.5]), ("(0, 1]", [0.5, 1]), ("[0, 1]", [0, 0.5, 1])):
        for value in (-1e-9, 0, 0.5, 1, 1 + 1e-9):
            with nullcontext() if value in passing else pytest.raises(pg.PrivacyError, match=re.escape(interval)):
                errors.require_in("f", "x", value, interval)
    errors.require_in("f", "x", 10**300, "[1, inf)")
    for value in (math.inf, math.nan, HUGE):
        with pytest.raises(pg.PrivacyError, match=r"in \[1, inf\)"):
            errors.require_in("f", "x", value, "[1, inf)")


def test_zero_is_nonnegative_and_not_positive():
    NONNEGATIVE(value=0)
    with pytest.raises(pg.PrivacyError, match="positive finite number, got 0"):
        POSITIVE(value=0)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "sample_rate"])
@pytest.mark.parametrize("number", [HUGE], ids=["huge"])
def test_a_plan_refuses_numbers_that_no_float_holds(name: str, number: int):
    with pytest.raises(pg.PrivacyError, match=rf"PrivacyPlan: expected {name} "):
        make_plan(**{name: number})


STRINGS: dict[str, Callable[[], object]] = {
    "target_epsilon": lambda: pg.PrivacyPlan.for_budget(
        target_epsilon="1",  # pyright: ignore[reportArgumentType]
        delta=1e-5,
        max_grad_norm=1.0,
        num_examples=32,
        expected_batch_size=8,
        steps=2,
    ),
    **{
        name: partial(make_plan, **{name: "1"})
        for name in ("sample_rate", "steps", "noise_multiplier", "max_grad_norm", "num_examples", "delta", "seed")
    },
    "lr": lambda: pg.optim.AdamBC(make_model().named_parameters(), lr="1"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize(("name", "call"), STRINGS.items(), ids=STRINGS)
def test_a_number_in_quotes_is_shown_in_quotes(name: str, call: Callable[[], object]):
    with pytest.raises(pg.PrivacyError, match=rf"expected {name} .*, got '1', a str[;.]"):
        call()


# Data


class Table:
    """What is used of a DataFrame of pandas, which need not be here."""

    def __init__(self, **columns: list[float]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> "Column":
        return Column(self._columns[name])

    def drop(self, *, columns: str) -> "Table":
        return Table(**{name: values for name, values in self._columns.items() if name != columns})

    def to_numpy(self) -> np.ndarray:
        return np.array(list(self._columns.values())).T


class Column:
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, name: str) -> float:
        raise KeyError(name)

    def to_numpy(self) -> np.ndarray:
        return np.array(self._values)


DataFrame = type("DataFrame", (Table,), {"__module__": "pandas.core.frame"})
Series = type("Series", (Column,), {"__module__": "pandas.core.series"})


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(32))

    def __len__(self) -> int:
        return 32


COUNT = list(map(float, range(32)))
DATA: dict[str, tuple[Any, str, str]] = {
    "frame": (DataFrame(age=COUNT, label=COUNT), "a pandas DataFrame", "torch.utils.data.TensorDataset("),
    "series": (Series(COUNT), "a pandas Series", "torch.utils.data.TensorDataset("),
    "columns": ({"age": COUNT, "label": COUNT}, "a dict", "torch.utils.data.TensorDataset("),
    "arrays": ([np.zeros((32, 2)), np.zeros(32)], "columns of a table", "torch.utils.data.TensorDataset("),
    "tensors": (make_data().tensors, "columns of a table", "torch.utils.data.TensorDataset("),
    "stream": (Numbers(), "an IterableDataset (Numbers)", "write __len__ and __getitem__"),
    "loader": (DataLoader(make_data()), "a DataLoader", "pass its .dataset"),
    "ours": (DataSet("own", make_data(), make_data(), make_data(), 2, (6,)), "DataSet", "wrap the data"),
    "generator": ((item for item in make_data()), "generator", "wrap the data in a map-style data set"),
    "parts": ({"train": make_data()}, "a dict", "take one of its data sets"),
    "path": ("train.csv", "'train.csv', a str", "read the file"),
    "nothing": (None, "NoneType", "wrap the data in a map-style data set"),
    "empty": ({}, "a dict", "pass torch"),
}


EXECUTED = {"frame", "series", "columns", "arrays", "tensors"}


@pytest.mark.parametrize("kind", DATA)
def test_data_of_another_kind_are_named_with_a_remedy_that_works(kind: str, tmp_path: Path):
    data, got, remedy = DATA[kind]
    model, ledger = make_model(), tmp_path / "ledger.jsonl"
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    for call in (
        make_plan().batches,
        lambda data: pg.fit(pg.PrivateGradient(model, loss_fn, make_plan()), optimizer, data, output_dir=tmp_path),
    ):
        with pytest.raises(pg.SamplingError, match=rf"expected dataset .*, got {re.escape(got)}.*; ") as caught:
            call(data)
        assert remedy in str(caught.value)
    assert pg.Ledger(ledger, read_only=True).releases == 0
    line = re.search(r"pass (torch\.utils\.data\.TensorDataset\(.*\))", str(caught.value))
    if kind in EXECUTED:
        assert line is not None
        made = eval(line[1], {"torch": torch, "data": data})  # what the message tells users to type
        assert len(made) == 32
        assert sum(1 for _ in make_plan().batches(made)) == 10


def test_arrays_of_numbers_are_data_as_they_are():
    assert all(batch.examples.shape[1:] == (5,) for batch in make_plan().batches(np.ones((32, 5))))  # pyright: ignore[reportArgumentType]


class Broken:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> float:
        raise KeyError(index)


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (Broken(), "KeyError: "),
        ([object()] * 32, "examples of type object: default_collate"),
        (np.zeros(32, dtype=[("age", "f4"), ("label", "i8")]), "examples of type void: default_collate"),
    ],
)
def test_items_that_cannot_be_had_or_batched_are_refused(data: Any, got: str):
    plans = [make_plan(sample_rate=1 / 32, expected_batch_size=1, seed=seed) for seed in range(8)]
    drawn = [len(next(plan.batches(make_data())).examples[0]) for plan in plans]
    assert 0 in drawn  # an empty batch takes its structure from an item, too
    assert max(drawn) > 0
    for plan in plans:
        with pytest.raises(pg.SamplingError, match=rf"expected dataset .*, got {got}.*; "):
            next(plan.batches(data))


ROWS: dict[str, Any] = {
    "example['input_ids']": {"input_ids": [1, 2, 3], "labels": 1},
    "example[0]": ([0.5, 1.5], 1),
    "example['text']['spans'][0]": {"text": {"spans": [[1, 2], [3, 4]]}},
    "example['words']": {"words": [], "labels": 1},
}


@pytest.mark.parametrize("name", ROWS)
def test_lists_of_numbers_in_an_example_are_refused(name: str):
    """default_collate would turn the batch by ninety degrees, and drop an empty list."""
    match = rf"expected {re.escape(name)} to be a tensor or a number, got list; turn "
    with pytest.raises(pg.SamplingError, match=match):
        next(make_plan().batches([ROWS[name]] * 32))


def test_rows_of_tensors_and_numbers_in_lists_are_data():
    rows = [[torch.zeros(2), 1, [torch.ones(1), 0.5]]] * 32
    plan = make_plan(sample_rate=1.0, expected_batch_size=32)
    inputs, labels, (more, numbers) = next(plan.batches(rows)).examples
    assert [tuple(tensor.shape) for tensor in (inputs, labels, more, numbers)] == [(32, 2), (32,), (32, 1), (32,)]


# Files


def test_paths_where_nothing_is_are_told_apart(tmp_path: Path):
    (tmp_path / "empty").touch()
    for path, problem in ((tmp_path / "absent", "does not exist"), (tmp_path / "empty", "is empty")):
        with pytest.raises(pg.PrivacyError, match=rf"expected path to be a readable file, got .*, which {problem}; "):
            pg.Ledger(path, read_only=True)
    for path, problem in (("absent", "does not exist"), ("empty", "is empty"), (".", "is a folder")):
        with pytest.raises(
            pg.PrivacyError, match=rf"to be a readable TOML file, got .*, which {problem}.*; give the path"
        ):
            load_spec(tmp_path / path)
    (tmp_path / "empty").rename(tmp_path / "checkpoint.pt")
    (tmp_path / "ledger.jsonl").touch()
    model = make_model()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(
        pg.PrivacyError, match=r"checkpoint\.pt to be a complete checkpoint .* those that were written; "
    ):
        pg.fit(pg.PrivateGradient(model, loss_fn, make_plan()), optimizer, make_data(), output_dir=tmp_path)


def test_a_checkpoint_of_another_model_is_told_from_a_damaged_one(tmp_path: Path):
    for width in (4, 5):
        model = nn.Sequential(nn.Linear(make_data()[0][0].numel(), width), nn.Linear(width, 3))
        optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
        arguments = pg.PrivateGradient(model, loss_fn, make_plan()), optimizer, make_data()
        if width == 4:
            pg.fit(*arguments, output_dir=tmp_path)
            continue
        with pytest.raises(pg.PrivacyError, match=r"a checkpoint with shape of '0\.bias' \(4,\), now \(5,\), .*resume"):
            pg.fit(*arguments, output_dir=tmp_path)


# Objects


def test_a_class_or_a_number_for_a_clipping_rule_is_refused():
    rule: Any = pg.clip.Flat
    with pytest.raises(pg.PrivacyError, match=r"expected clip to be a clipping rule, got .*; give clip\.Flat\(\)"):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(), clip=rule)


def test_a_loss_module_is_not_taken_for_a_loss_function():
    loss: Any = nn.CrossEntropyLoss()
    plan = make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss, plan)
    with pytest.raises(TypeError) as caught:
        private_grad(next(plan.batches(make_data())))
    assert "PrivateGradient calls loss_fn(model, examples)" in " ".join(caught.value.__notes__)
    assert private_grad.ledger.releases == 0


@pytest.mark.parametrize("numbers", [{"noise_multiplier": 1e300}, {"max_grad_norm": 1e30}])
def test_noise_that_float32_does_not_hold_is_refused(numbers: dict[str, float]):
    with pytest.raises(pg.PrivacyError, match=r"noise_multiplier \* max_grad_norm to be in \[0, 1e\+15\], got .*"):
        make_plan(**numbers)


# Models


def test_a_frozen_model_is_told_to_be_one():
    model = make_model().requires_grad_(False)
    match = (
        r"model to have trainable parameters, got Sequential, which has no trainable parameter.*requires_grad_\(True\)"
    )
    with pytest.raises(pg.UnsupportedModuleError, match=match):
        pg.PrivateGradient(model, loss_fn, make_plan())
    with pytest.raises(pg.UnsupportedModuleError, match="got Tanh, which has no trainable parameter"):
        pg.PrivateGradient(nn.Tanh(), loss_fn, make_plan())


# Names

SPEC = """
title = "test"
[data]
use = "digits"
[model]
use = "mlp"
hidden = 64
[privacy]
target_epsilon = 1.0
delta = 1e-5
max_grad_norm = 1.0
num_examples = 1437
expected_batch_size = 120
steps = 6
[[methods]]
name = "first"
optimizer = { use = "AdamBC", lr = 0.01 }
perturb = { use = "BAM", radius = 0.1, mode = "sam" }
[run]
engine = "factored"
device = "cpu"
"""
NAMES: dict[str, tuple[str, str, str]] = {
    "optimizer": ('"AdamBC"', '"AdmaBC"', "methods.first.optimizer.use .*, got 'AdmaBC'; did you mean 'AdamBC'"),
    "case": ('"AdamBC"', '"adambc"', "did you mean 'AdamBC'"),
    "data": ('"digits"', '"digit"', "expected data.use .*, got 'digit'; did you mean 'digits'"),
    "model": ('"mlp"', '"mpl"', "expected model.use .*, got 'mpl'; did you mean 'mlp'"),
    "perturbation": ('"BAM"', '"BAN"', "expected methods.first.perturb.use .*; did you mean 'BAM'"),
    "mode": ('"sam"', '"exat"', "expected methods.first.perturb.mode .*; did you mean 'exact'"),
    "engine": ('"factored"', '"factor"', "expected run.engine .*; did you mean 'factored'"),
    "device": ('"cpu"', '"gpu"', "expected run.device .*; did you mean 'cuda'"),
    "sampling": ("steps = 6", 'steps = 6\nsampling = "poison"', "expected privacy.sampling .*; did you mean 'poisson'"),
    "far off": ('"digits"', '"mine.csv"', "expected data.use .*, got 'mine.csv'; choose one"),
    "option": ("lr = 0.01", "lrr = 0.01", r"got 'methods\.first\.optimizer\.lrr'; did you mean 'lr'"),
    "option of no name": (
        'name = "first"\noptimizer =',
        "optimiser =",
        r"got 'methods \(entry 1\)\.optimiser'; did you mean 'optimizer'",
    ),
    "option of an inner table": (
        "radius = 0.1",
        "radios = 0.1",
        r"got 'methods\.first\.perturb\.radios'; did you mean 'radius'",
    ),
    "learning_rate": (
        "lr = 0.01",
        "learning_rate = 0.01",
        r"'methods\.first\.optimizer\.learning_rate'; did you mean 'lr'\?",
    ),
    "learning-rate": ("lr = 0.01", "learning-rate = 0.01", "did you mean 'lr'"),
    "learningrate": ("lr = 0.01", "learningrate = 0.01", "did you mean 'lr'"),
    "LR": ("lr = 0.01", "LR = 0.01", "did you mean 'lr'"),
    "width": ("hidden = 64", "width = 3", r"got 'model\.width'; did you mean 'hidden'"),
    "units": ("hidden = 64", "units = 3", "did you mean 'hidden'"),
    "batchsize": ("expected_batch_size", "batchsize", "did you mean 'expected_batch_size'"),
    "epsilon": ("target_epsilon", "epsilon", "did you mean 'target_epsilon'"),
    "C": ("max_grad_norm", "C", "did you mean 'max_grad_norm'"),
    "clipping_norm": ("max_grad_norm", "clipping_norm", "did you mean 'max_grad_norm'"),
    "step": ("steps", "step", "did you mean 'steps'"),
    "non-private": ("[run]", "nonprivate = true\n[run]", "did you mean 'non_private'"),
    "private": ("[run]", "private = true\n[run]", r"got 'methods\.first\.private'; choose one of name, "),
    "nothing near": ("[run]", "xyz = 1\n[run]", r"'methods\.first\.xyz'; choose one of name, .*non_private"),
    "no name": ('name = "first"\n', "", r"expected methods \(entry 1\).name to be given, got None; add it"),
    "a string": ("target_epsilon = 1.0", 'target_epsilon = "1"', "expected privacy.target_epsilon .*, got '1'."),
}


@pytest.mark.parametrize(("old", "new", "match"), NAMES.values(), ids=NAMES)
def test_what_a_file_has_wrong_is_named_with_what_was_meant(old: str, new: str, match: str, tmp_path: Path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    load_spec(path)
    assert old in SPEC
    path.write_text(SPEC.replace(old, new))
    with pytest.raises(pg.PrivacyError, match=match):
        load_spec(path)


WITHOUT = {  # by the option that is missing: what the file has, and what remains of it
    "title": ('title = "test"\n', ""),
    "privacy.delta": ("delta = 1e-5\n", ""),
    "privacy.max_grad_norm": ("max_grad_norm = 1.0\n", ""),
    "privacy.expected_batch_size": ("expected_batch_size = 120\n", ""),
    "privacy.steps": ("steps = 6\n", ""),
    "methods.name": ('name = "first"\n', ""),
    "methods.optimizer": ('optimizer = { use = "AdamBC", lr = 0.01 }\n', ""),
    "tuning.seeds": ("[run]", "[tuning]\nlr = [0.1]\n[run]"),
}


def test_each_example_of_a_missing_value_is_tried():
    assert {option.rpartition(".")[2] for option in WITHOUT} == SUCH_AS.keys()


@pytest.mark.parametrize("option", WITHOUT)
def test_what_a_file_lacks_is_shown_with_a_value_that_works(option: str, tmp_path: Path):
    path = tmp_path / "spec.toml"
    assert WITHOUT[option][0] in SPEC
    path.write_text(SPEC.replace(*WITHOUT[option], 1))
    with pytest.raises(pg.PrivacyError, match=r"to be given, got None; add it.*, such as ") as caught:
        load_spec(path)
    place, (name, value) = option.split(".")[:-1], f"{caught.value}".rpartition(", such as ")[2][:-1].split(" = ")
    raw = tomllib.loads(path.read_text())
    table = raw
    for part in place:
        if isinstance(table[part], str):
            table[part] = {"use": table[part]}
        table = table[part][0] if part == "methods" else table[part]
    table[name] = tomllib.loads(f"value = {value}")["value"]
    assert option == ".".join([*place, name])
    said = ""
    try:
        check_spec(raw, path)
    except pg.PrivacyError as error:  # of a rule across tables: a file with this table needs more
        said = f"{error}"
    assert not re.search(rf"{name} to be|: expected {name}", said)


CHOICES: dict[str, Callable[[], object]] = {
    "factored": lambda: pg.PrivateGradient(make_model(), loss_fn, make_plan(), engine="factor"),  # pyright: ignore[reportArgumentType]
    "poisson": lambda: make_plan(sampling="Poison"),
    "user": lambda: make_plan(privacy_unit="users"),
    "rdp": lambda: make_plan().epsilon(delta=1e-5, accountant="RDP"),  # pyright: ignore[reportArgumentType]
    "AdamBC": lambda: pg.audit.rows(["AdmaBC"]),
}


@pytest.mark.parametrize(("meant", "call"), CHOICES.items(), ids=CHOICES)
def test_a_name_given_in_python_is_corrected(meant: str, call: Callable[[], object]):
    with pytest.raises(pg.PrivacyError, match=rf"got '.*'; did you mean '{meant}'\?"):
        call()


# Whatever else


def trained(**given: Any) -> object:
    model = make_model()
    usual: dict[str, Any] = {
        "private_grad": pg.PrivateGradient(model, loss_fn, make_plan(steps=2)),
        "optimizer": pg.optim.SGD(model.named_parameters(), lr=0.1),
        "train_set": make_data(),
        "evaluate": lambda _: {"a": 1.0},
        "progress": False,
    }
    return pg.fit(**(usual | given))


def private_gradient() -> pg.PrivateGradient:
    return pg.PrivateGradient(make_model(), loss_fn, make_plan())


def one_step(**given: Any) -> object:
    plan = make_plan(steps=2)
    usual: dict[str, Any] = {"model": make_model(), "loss_fn": loss_fn, "plan": plan}
    return pg.PrivateGradient(**(usual | given))(next(plan.batches(make_data())))


WRONG: list[tuple[Callable[..., object], str]] = [
    *((one_step, name) for name in ("model", "loss_fn", "plan", "perturb", "precondition", "clip", "engine", "ledger")),
    *((one_step, name) for name in ("microbatch_size", "memory_mb", "processes")),
    *((trained, name) for name in ("private_grad", "optimizer", "train_set", "scheduler", "collate", "ema_decay")),
    *((trained, name) for name in ("evaluate", "num_evaluations", "on_evaluate", "output_dir", "save_seconds")),
    (lambda observer: private_gradient().register_raw_observer(observer), "observer"),
    *(
        (lambda **given: list(make_plan(steps=2).batches(make_data(), **given)), n)
        for n in ("start", "collate", "processes")
    ),
    (lambda releases: accounting.epsilon(releases, delta=1e-5), "releases"),
    (lambda params: pg.optim.SGD(params, lr=0.1), "params"),
    (lambda params: pg.optim.AdamBC(params, lr=0.1), "params"),
    (lambda lr: pg.optim.SGD(make_model().named_parameters(), lr=lr), "lr"),
    (lambda lr: pg.optim.AdamBC(make_model().named_parameters(), lr=lr), "lr"),
    (lambda grad: pg.optim.SGD(make_model().named_parameters(), lr=0.1).step(grad=grad), "grad"),
    (lambda values: pg.Scales(values, provenance="public data", source="none"), "values"),
    (lambda model: pg.NoisyGradient({}, 0.1).assign(model), "model"),
    (lambda path: pg.Ledger(path), "path"),
    (lambda path: pg.Ledger(path, read_only=True), "path"),
    *(
        (partial(make_plan), name)
        for name in ("steps", "num_examples", "noise_multiplier", "delta", "seed", "sampling")
    ),
]


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")  # of one row
@pytest.mark.parametrize(
    "bad", [b"x", object(), [object()], -1.5, math.nan], ids=["bytes", "object", "list", "-1.5", "nan"]
)
@pytest.mark.parametrize(("call", "name"), WRONG, ids=[f"{index} {name}" for index, (_, name) in enumerate(WRONG)])
def test_a_wrong_argument_ends_in_an_error(call: Callable[..., object], name: str, bad: Any):
    """In the library's, unless Python's own names the mistake: a wrong type is not looked for where it cannot pass."""
    with pytest.raises((pg.PrivacyError, TypeError, AttributeError)) as caught:
        call(**{name: bad})
    if isinstance(caught.value, pg.PrivacyError):
        assert re.fullmatch(r"[^\n]*: expected .*, got .*[.?]", str(caught.value))
