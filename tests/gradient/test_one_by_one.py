"""engine="vmap" where torch.func cannot differentiate a model: ordinary autograd on copies, one example at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_perturb import moved_one_by_one
from test_rules import losses_of, one_by_one
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_plan
from privgrad.engine.factored import Factored
from privgrad.gradient.contribution import SampleGradient
from privgrad.gradient.functional import gradients, parameters_kept
from privgrad.gradient.reference import Vmap

pytestmark = pytest.mark.filterwarnings("ignore:vmap cannot batch this model")


class WithoutContext(torch.autograd.Function):
    """x^3, as functions were written before setup_context; transformers' Bloom has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Dropout(0.0))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class Cubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(WithoutContext.apply(self.first(x)))


class SavesElsewhere(nn.Module):
    """By hooks on saved tensors, as activations are moved to another memory or packed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            return self.last(torch.tanh(self.first(x)))


MODELS: list[Callable[[], nn.Module]] = [Checkpointed, Cubes, SavesElsewhere]


@pytest.mark.parametrize("make", MODELS)
def test_what_torch_func_cannot_differentiate_is_right_by_vmap(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, 5, dtype=torch.float64)
    engine = Vmap(model, losses_of)
    for name, rows in one_by_one(model, x).items():
        torch.testing.assert_close(engine(x)[name].dense(), rows, rtol=1e-9, atol=1e-11)
    for exact in (False, True):
        found = engine.moved(x, 0.3, exact=exact)
        for index in range(len(x)):
            one = x[index : index + 1]
            first = gradients(model, losses_of, one)
            norm = torch.stack([value.norm() for value in first.values()]).norm()
            along = {name: 0.3 * value / norm for name, value in first.items()}
            for name, value in gradients(model, losses_of, one, along=along, exact=exact).items():
                torch.testing.assert_close(found[name].dense()[index], value, rtol=1e-9, atol=1e-11)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("exact", [False, True])
def test_its_curvature_is_that_of_autograd(exact: bool):
    """Against a loop that knows nothing of the library."""
    torch.manual_seed(0)
    model, x = Cubes().double(), torch.randn(4, 5, dtype=torch.float64)
    found = Vmap(model, losses_of).moved(x, 0.3, exact=exact)
    for name, rows in moved_one_by_one(model, x, 0.3, exact=exact).items():
        torch.testing.assert_close(found[name].dense(), rows, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("perturb", [None, pg.perturb.BAM(0.1), pg.perturb.BAM(0.1, "exact")])
def test_it_trains_by_both_engines(make: Callable[[], nn.Module], engine: Any, perturb: Any):
    data, results = make_data(), []
    for chosen in ("factored", engine):
        torch.manual_seed(0)
        plan = make_plan(noise_multiplier=0.0, seed=0)
        private_grad = pg.PrivateGradient(make(), loss_fn, plan, engine=chosen, perturb=perturb)
        results.append(private_grad(first_batch(plan, data)))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_reentrant_checkpointing_is_named_with_what_to_do(engine: Any):
    plan = make_plan()
    private_grad = pg.PrivateGradient(Checkpointed(reentrant=True), loss_fn, plan, engine=engine)
    with pytest.raises(pg.UnsupportedModuleError, match=r"gradient checkpointing.*use_reentrant=False"):
        private_grad(first_batch(plan, make_data()))
    assert private_grad.ledger.releases == 0
    with pytest.raises(pg.UnsupportedModuleError, match=r"gradient checkpointing.*use_reentrant=False"):
        Vmap(Checkpointed(reentrant=True), loss_fn)(make_data().tensors)


class Writes(Checkpointed):
    """To a buffer or a parameter, past torch.func's sight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.code = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        with torch.no_grad():
            if self.what == "first.bias":
                self.first.bias.add_(1.0)
            else:
                getattr(self, self.what).add_(output.mean(0))
        return output + self.code


@pytest.mark.parametrize("what", ["seen", "code", "first.bias"])
def test_a_write_to_a_copy_is_refused_by_name_and_leaves_nothing(what: str):
    model = Writes(what)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    refused = pytest.raises(pg.UnsupportedModuleError, match=f"not to be written by the forward pass, got {what};")
    with refused, parameters_kept(model):  # as in a step
        Vmap(model, loss_fn)(make_data().tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembers(Checkpointed):
    """Adds to each example what it saw of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.last_seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shift = 0.0 if self.last_seen is None else self.last_seen
        self.last_seen = x.detach().mean()
        return super().forward(x + shift)


@pytest.mark.filterwarnings("ignore:the forward pass changed")
def test_examples_do_not_meet_in_attributes():
    torch.manual_seed(0)
    model, x = Remembers().double(), torch.randn(6, 5, dtype=torch.float64)
    changed = x.clone()
    changed[:3] = 100.0
    one, other = (Vmap(model, losses_of)(z)["last.weight"].dense()[3:] for z in (x, changed))
    torch.testing.assert_close(one, other)
    assert model.last_seen is None


class ReadsMemory(nn.Module):
    """Two numbers of a row, by their places in memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.scale = how, nn.Linear(2, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":
            return self.first(x.as_strided((len(x), 2), (4, 1), 2)) * self.scale
        rows = self.first(x[:, 2:])
        return torch.stack([torch.mv(self.scale.diag(), row).as_strided((2,), (1,)) for row in rows])


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("how", ["input", "product"])
@pytest.mark.parametrize("engine", [Factored, Vmap])
def test_examples_do_not_meet_in_memory(engine: Any, how: str):
    torch.manual_seed(0)
    model, x = ReadsMemory(how).double(), torch.randn(6, 4, dtype=torch.float64)
    wanted = [one_by_one(model, row[None].clone()) for row in x]
    found = SampleGradient().chunks(engine(model, losses_of), x, 2, 0, {})  # parts of one batch in memory
    parts = [{name: factor.dense() for name, factor in part.items()} for _, part in found]
    for name in wanted[0]:
        rows = torch.cat([row[name] for row in wanted])
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), rows, rtol=1e-9, atol=1e-11)
