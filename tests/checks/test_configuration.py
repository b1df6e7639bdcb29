"""A model's configuration: what makes the checks run again at once, and what does not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad import checks
from privgrad.checks.model_and_loss import configuration

# The tests write to buffers between steps.
pytestmark = pytest.mark.filterwarnings("ignore:.* changed between two steps")


def mixing(x: Tensor, *_: Any) -> Tensor:
    """Subtract the mean over the examples."""
    return x - 5 * x.mean(0)


def of_the_hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return mixing(output)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mixing(x)


class Model(nn.Module):
    """Mixes examples once one of several things has changed."""

    gate: Tensor
    gates: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)
        self.function: Any = torch.tanh
        self.register_buffer("gate", torch.zeros(()))
        self.register_buffer("gates", torch.tensor([1.0, 0.0]))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.plain = torch.zeros(2, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(1))
        self.count = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        share = self.gate + self.gates[1] + self.frozen.sum() + self.plain.sum()
        mixed = torch.where(share == 0, 0.0, share * mixing(x))  # zero times infinity would be NaN
        return self.last(self.function(x + mixed))


def either(mixes: bool) -> Callable[[Tensor], Tensor]:
    """One code for two functions: only the closure differs."""
    return lambda x: mixing(x) if mixes else torch.tanh(x)


def chosen(x: Tensor, function: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    return function(x)


class Replaced(nn.Identity):
    """An Identity whose class is changed by a test."""


def set_attribute(name: str, value: Any) -> Callable[[Model], Any]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a scalar buffer": lambda model: model.gate.fill_(1),
    "an entry of a buffer": lambda model: model.gates.copy_(torch.tensor([1.0, 1.0])),
    "a buffer through .data": lambda model: model.gate.data.fill_(1),
    "a frozen parameter": lambda model: model.frozen.fill_(1),
    "a tensor attribute": set_attribute("plain", torch.tensor([0, 1], dtype=torch.bfloat16)),
    "a function": set_attribute("function", mixing),
    "a default argument": set_attribute("function", lambda x, function=mixing: function(x)),
    "a partial": set_attribute("function", partial(chosen, function=mixing)),
    "a method": set_attribute("function", Mixing().forward),
    "an object with __call__": set_attribute("function", type("Call", (), {"__call__": lambda _, x: mixing(x)})()),
    "a module": set_attribute("between", Mixing()),
    "a module's forward": lambda model: setattr(model.between, "forward", mixing),
    "a hook": lambda model: model.first.register_forward_hook(of_the_hook),
    "a parametrization": lambda model: parametrizations.weight_norm(model.first).register_forward_hook(of_the_hook),
}


def stops_at(model: Model, change: Callable[[Model], Any], at: int = 4) -> int:
    """Train; change the model before step `at`, where no check is due; return the step that is refused."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=12, num_examples=12, steps=7)
    private_grad = pg.PrivateGradient(model, lambda m, batch: m(batch[0]).square().mean(1), plan)
    for step, batch in enumerate(plan.batches(TensorDataset(torch.randn(12, 4)))):
        if step == at:
            with torch.no_grad():
                change(model)
            with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
                private_grad(batch)
            break
        private_grad(batch)
    return private_grad.ledger.releases


@pytest.mark.parametrize("change", CHANGES)
def test_mixing_that_begins_between_two_checks_is_refused_at_once(change: str):
    torch.manual_seed(0)
    assert stops_at(Model(), CHANGES[change]) == 4


def test_a_closure_that_begins_to_mix_is_refused_at_once():
    torch.manual_seed(0)
    model = Model()
    model.function = either(False)
    assert stops_at(model, set_attribute("function", either(True))) == 4


def test_a_class_that_is_changed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = Model()
    model.between = Replaced()
    assert stops_at(model, lambda _: monkeypatch.setattr(Replaced, "forward", Mixing.forward)) == 4


def methods_of_c(model: Model) -> None:
    model.function = Tensor.cumsum if model.function is Tensor.tanh else Tensor.tanh


def test_methods_of_c_are_told_apart():
    model = Model()
    methods_of_c(model)
    before = configuration(model)
    methods_of_c(model)
    assert configuration(model) != before


def counted(model: Any) -> None:
    """Count a step, and make functions and modules of the same kind anew."""
    model.steps.add_(1)
    model.gates[0] += 1
    model.count += 1
    model.between = nn.Identity()
    model.function = partial(chosen, function=lambda x, steps=model.count: torch.tanh(x) * (steps > 0))
    model.attend = either(False)
    model.method = model.between.forward
    model.append = [].append
    for handle in getattr(model, "handles", []):
        handle.remove()
    model.handles = [model.first.register_forward_hook(lambda *_: None)]


def test_a_step_that_counts_and_makes_functions_anew_changes_nothing():
    model = Model()
    counted(model)
    before = configuration(model)
    for _ in range(3):
        counted(model)
        assert configuration(model) == before


def test_the_loss_is_checked_once_in_a_training_that_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    checked: list[int] = []
    real = checks.check_loss
    monkeypatch.setattr(checks, "check_loss", lambda *given: checked.append(1) or real(*given))
    model = Model()
    counted(model)
    plan = make_plan(sample_rate=1.0, expected_batch_size=12, num_examples=12, steps=5)
    private_grad = pg.PrivateGradient(model, lambda m, batch: m(batch[0]).square().mean(1), plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    for batch in plan.batches(TensorDataset(torch.randn(12, 4))):
        optimizer.step(grad=private_grad(batch))
        with torch.no_grad():
            counted(model)
            model(torch.randn(3, 4))
    assert (private_grad.ledger.releases, checked) == (5, [1])


def test_a_class_of_the_same_name_is_another():
    seen = set[object]()
    for _ in range(3):
        seen.add(configuration(nn.Sequential(type("Same", (nn.Module,), {})())))
    assert len(seen) == 3  # each holds its class, so that no later one gets its memory


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["large", "sparse", "without memory", "quantized"])
def test_tensors_that_are_not_read_stop_no_training(kind: str):
    first, second = torch.zeros(2), torch.ones(2)
    made: dict[str, Callable[[Tensor], Tensor]] = {
        "large": lambda x: x.repeat(33),
        "sparse": lambda x: x.to_sparse(),
        "without memory": lambda x: x.to("meta"),
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    }
    model = Model()
    model.register_buffer("other", made[kind](first))
    before = configuration(model)
    model.other = made[kind](second)
    assert configuration(model) == before
    model.other = second
    assert configuration(model) != before
