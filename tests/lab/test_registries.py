"""A new loader, optimizer or model is one row of its registry: a TOML file can then name it, with its options."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import optim
from privgrad.data import LOADERS, DataSet
from privgrad.optim import OPTIMIZERS, PrivateOptimizer
from privgrad_lab.build import MODELS, make_data
from privgrad_lab.load_spec import load_spec
from privgrad_lab.runner import train

SPEC = """
title = "rows"
[data]
use = "rows"
examples = 40
order = "sorted"
validation = 4
[model]
use = "wide"
hidden = 5
[privacy]
noise_multiplier = 1.0
delta = 1e-3
max_grad_norm = 1.0
num_examples = 36
expected_batch_size = 18
steps = 2
[[methods]]
name = "signs"
optimizer = { use = "Signs", lr = 0.125, scale = 2.0 }
"""
STEPS: list[Tensor] = []
MADE: list[int] = []


def rows(
    path: str | None = None,
    *,
    examples: Annotated[int, Ge(1)] = 30,
    order: Literal["sorted", "random"] = "random",
    validation: int = 0,
) -> DataSet:
    inputs, labels = torch.linspace(-1, 1, 3 * examples).view(examples, 3), torch.arange(examples) % 2
    assert (path, order) == (None, "sorted")
    held_out = TensorDataset(inputs[:validation], labels[:validation])
    train_set = TensorDataset(inputs[validation:], labels[validation:])
    return DataSet("rows", train_set, held_out, train_set, 2, (3,))


class Signs(PrivateOptimizer):
    def __init__(self, params: Any, lr: float, *, scale: float = 1.0) -> None:
        super().__init__(params, defaults={"lr": lr, "scale": scale})

    @torch.no_grad()
    def _update(self, gradient: pg.NoisyGradient) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.add_(gradient[name].sign(), alpha=-group["lr"] * group["scale"])
                STEPS.append(gradient[name])


class WithPublic(Signs):
    def __init__(self, params: Any, lr: float, *, public: Any) -> None:
        super().__init__(params, lr)


def wide(*, in_features: int, num_classes: int, hidden: int = 3) -> nn.Module:
    MADE.append(hidden)
    return nn.Linear(in_features, num_classes)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "rows", rows)
    monkeypatch.setitem(OPTIMIZERS, "Signs", Signs)
    monkeypatch.setitem(OPTIMIZERS, "WithPublic", WithPublic)
    monkeypatch.setitem(MODELS, "wide", wide)
    STEPS.clear()
    MADE.clear()


def written(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in SPEC
    path = folder / "spec.toml"
    path.write_text(SPEC.replace(old, new) if old else SPEC)
    return path


@pytest.mark.usefixtures("registered")
def test_a_row_of_each_registry_is_enough_to_train(tmp_path: Path):
    (record,) = train(load_spec(written(tmp_path)), tmp_path / "out", seed=0, progress=False)
    assert record["updates"] == 2
    assert record["data"].startswith("rows: 36 training, 4 validation")
    assert len(STEPS) == 2 * 2  # weight and bias
    assert set(MADE) == {5}
    resumed = train(load_spec(written(tmp_path)), tmp_path / "out", seed=0, progress=False)
    assert resumed == [record]


WRONG = {
    "loader": ('"rows"', '"row"', "expected data.use to be one of adult, .*, rows, got 'row'; did you mean 'rows'"),
    "optimizer": ('"Signs"', '"Sings"', "methods.signs.optimizer.use to be one of SGD, .*; did you mean 'Signs'"),
    "model": ('"wide"', '"wid"', "model.use to be one of .*, wide, got 'wid'; did you mean 'wide'"),
    "option of the loader": ("examples = 40", "exampels = 40", "got 'data.exampels'; did you mean 'examples'"),
    "its type": ("examples = 40", "examples = 4.5", "data.examples to be valid .*integer.*, got 4.5"),
    "its range": ("examples = 40", "examples = 0", "data.examples to be valid .*greater than or equal to 1.*, got 0"),
    "its choices": ('"sorted"', '"sort"', "data.order to be one of sorted, random, got 'sort'; did you mean 'sorted'"),
    "option of the optimizer": ("scale = 2.0", "scael = 2.0", "optimizer.scael'; did you mean 'scale'"),
    "public data": ('use = "Signs"', 'use = "WithPublic"', "optimizer.scale'; choose one of lr"),
    "elsewhere": ("[model]", 'elsewhere = { use = "digits", sise = 28 }\n[model]', "data.elsewhere.sise'.*'size'"),
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("old", "new", "match"), WRONG.values(), ids=WRONG)
def test_errors_name_the_rows_and_their_options(old: str, new: str, match: str, tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match=match):
        load_spec(written(tmp_path, old, new))


@pytest.mark.usefixtures("registered")
def test_an_optimizer_that_takes_a_public_gradient_needs_public_examples(tmp_path: Path):
    changed = SPEC.replace('"Signs"', '"WithPublic"').replace(", scale = 2.0", "")
    (tmp_path / "spec.toml").write_text(changed)
    with pytest.raises(pg.PrivacyError, match=r"data.public to be given for 'signs'"):
        make_data(load_spec(tmp_path / "spec.toml"))


def test_every_exported_optimizer_has_a_row():
    exported = {name: getattr(optim, name) for name in optim.__all__}
    kinds = {name for name, kind in exported.items() if isinstance(kind, type) and issubclass(kind, PrivateOptimizer)}
    assert set(OPTIMIZERS) == kinds - {"PrivateOptimizer"}
    assert all(kind.__name__ == name for name, kind in OPTIMIZERS.items())
