"""What the key of a model's structure sees: after each change the model is read again, and without one it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad import checks
from privgrad.gradient.functional import Structure, parameters_kept, preserved


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4, bias=False))
        self.tied = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor
        self.power, self.notes, self.mixes = 1.0, [[1]], False
        self.kept = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.body(x)) * self.scale


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def hooked(kind: str) -> Callable[[Model], Any]:
    return lambda model: getattr(model.body[0], f"register_{kind}")(lambda *_: None)


def tie(model: Model) -> None:
    model.tied.weight = model.body[2].weight


def replace_class(model: Model) -> None:
    model.body[1].__class__ = nn.Identity


def halve(model: Model) -> None:
    model.body[0].weight.data = model.body[0].weight.data.half()


def replace_parameter(model: Model) -> None:
    model.tied.weight = nn.Parameter(torch.ones(4, 4))


def rename(model: Model) -> None:
    modules = model.body._modules
    modules["last"] = modules.pop("2")


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a submodule is swapped": lambda model: model.body.__setitem__(1, nn.Tanh()),
    "a submodule is added": lambda model: model.add_module("more", nn.Tanh()),
    "a submodule is renamed": rename,
    "a submodule has another class": replace_class,
    "a hook before": hooked("forward_pre_hook"),
    "a hook after": hooked("forward_hook"),
    "a hook of the backward pass": hooked("full_backward_hook"),
    "a mode": lambda model: model.body[1].eval(),
    "a parametrization": lambda model: parametrize.register_parametrization(model.tied, "weight", Double()),
    "a forward": lambda model: setattr(model.body[1], "forward", torch.tanh),
    "weights are tied": tie,
    "a parameter is frozen": lambda model: model.tied.weight.requires_grad_(False),
    "a parameter is replaced": replace_parameter,
    "a parameter has another type": halve,
    "a hook on a parameter": lambda model: model.tied.weight.register_hook(lambda grad: grad),
    "a hook after accumulation": lambda model: model.tied.weight.register_post_accumulate_grad_hook(lambda _: None),
    "a buffer is added": lambda model: model.register_buffer("more", torch.ones(1)),
    "a buffer is replaced": lambda model: setattr(model, "scale", torch.ones(())),
    "a number": lambda model: setattr(model, "power", 2.5),
    "a flag": lambda model: setattr(model, "mixes", True),
    "an attribute": lambda model: setattr(model, "other", None),
    "an entry of a list in a list": lambda model: model.notes[0].append(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_seen(change: str):
    model, computed = Model(), list[int]()
    structure = Structure(model)

    def found(_: Structure) -> int:
        computed.append(1)
        return len(computed)

    assert [structure.follow().once(found) for _ in range(3)] == [1, 1, 1]
    CHANGES[change](model)
    assert [structure.follow().once(found) for _ in range(3)] == [2, 2, 2]
    assert [path for path, _ in structure.modules] == [path for path, _ in model.named_modules()]
    assert structure.trained == {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = [(name, held[own]) for name, held, own in structure.buffers]
    assert [(name, id(buffer)) for name, buffer in buffers] == [(name, id(x)) for name, x in model.named_buffers()]


def test_the_code_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch):
    structure = Structure(Model())
    before = structure.once(lambda _: object())
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: 2 * x)
    assert structure.follow().once(lambda _: object()) is not before


def test_a_training_reads_the_model_once(monkeypatch: pytest.MonkeyPatch):
    read, real = list[int](), Structure._read
    model, examples = Model(), TensorDataset(torch.randn(12, 4))
    plan = make_plan(sample_rate=1.0, expected_batch_size=12, num_examples=12, steps=9)
    private_grad = pg.PrivateGradient(model, lambda m, batch: m(batch[0]).square().mean(1), plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    for step, batch in enumerate(plan.batches(examples)):
        optimizer.step(grad=private_grad(batch))
        model(torch.randn(3, 4)).sum().backward()
        optimizer.zero_grad()
        model.eval()
        model.train()
        if step == 7:  # the last of the checked steps
            monkeypatch.setattr(Structure, "_read", lambda self: read.append(1) or real(self))
    assert read == []


OF_PASSES = (
    "a submodule is swapped",
    "a submodule is added",
    "a submodule is renamed",
    "a hook before",
    "a mode",
    "a forward",
    "weights are tied",
    "a parameter is replaced",
    "a buffer is added",
    "a buffer is replaced",
    "a number",
    "an attribute",
    "an entry of a list in a list",
)


@pytest.mark.filterwarnings("ignore:the forward pass changed")
@pytest.mark.parametrize("change", OF_PASSES)
def test_after_a_pass_the_modules_hold_what_they_held(change: str):
    model = Model()
    structure, before = Structure(model), dict(model.state_dict(keep_vars=True))
    with preserved(structure), parameters_kept(structure):
        CHANGES[change](model)
    after = model.state_dict(keep_vars=True)
    assert structure.is_same()
    assert [(name, id(x)) for name, x in after.items()] == [(name, id(x)) for name, x in before.items()]


SEEN_BY_THE_CHECK: dict[str, Callable[[Model], Any]] = {
    name: CHANGES[name]
    for name in (
        "a submodule is swapped",
        "a hook before",
        "a hook after",
        "a mode",
        "a parametrization",
        "a forward",
        "a parameter is frozen",
        "a flag",
        "weights are tied",
    )
}


@pytest.mark.parametrize("change", [*SEEN_BY_THE_CHECK, "a number in a closure"])
def test_a_check_becomes_due(change: str, monkeypatch: pytest.MonkeyPatch):
    checked, real, factor = list[int](), checks.check_loss, 1.0

    def losses(m: nn.Module, batch: Any) -> Tensor:
        return factor * m(batch[0]).square().mean(1)

    monkeypatch.setattr(checks, "check_loss", lambda *given: checked.append(1) or real(*given))
    model = Model()
    plan = make_plan(sample_rate=1.0, expected_batch_size=12, num_examples=12, steps=4)
    private_grad = pg.PrivateGradient(model, losses, plan)
    counts = list[int]()
    for step, batch in enumerate(plan.batches(TensorDataset(torch.randn(12, 4)))):
        if step == 2 and change in SEEN_BY_THE_CHECK:
            SEEN_BY_THE_CHECK[change](model)
        elif step == 2:
            factor = 2.0
        private_grad(batch)
        counts.append(len(checked))
    assert counts == [1, 1, 2, 2]
