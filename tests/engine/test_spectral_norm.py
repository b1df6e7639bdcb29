"""The vectors of spectral norms advance once per step, whatever the batch holds; nothing of an example stays there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rules import losses_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad import private_gradient
from privgrad.gradient.functional import gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
]
SIZE, RADIUS = 6, 0.1
X = torch.randn(SIZE, 3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
NORMS: dict[str, Any] = {"parametrization": parametrizations.spectral_norm, "old": nn.utils.spectral_norm}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in microbatches": {"microbatch_size": 2},
    "BAM": {"perturb": pg.perturb.BAM(RADIUS)},
    "exact BAM": {"perturb": pg.perturb.BAM(RADIUS, "exact")},
    "SAT": {"perturb": pg.perturb.SAT(RADIUS)},
    "vmap": {"engine": "vmap"},
    "vmap in microbatches": {"engine": "vmap", "microbatch_size": 2},
}


class Net(nn.Module):
    """A convolution and a linear layer of bounded norm, and one without a bound."""

    def __init__(self, norm: Callable[..., nn.Module], *, recomputed: bool = False) -> None:
        super().__init__()
        self.first = norm(nn.Conv2d(3, 4, 3), n_power_iterations=2)
        self.second, self.third = norm(nn.Linear(24, 5)), nn.Linear(5, 2)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().flatten(1)
        second: Any = checkpoint(self.second, h, use_reentrant=False) if self.recomputed else self.second(h)
        return self.third(second.tanh())


def new(norm: str, **options: Any) -> Net:
    torch.manual_seed(1)
    return Net(NORMS[norm], **options).double()


def plan_of(**numbers: Any) -> pg.PrivacyPlan:
    given = {"sample_rate": 1.0, "expected_batch_size": SIZE, "num_examples": SIZE, "noise_multiplier": 0.0, "seed": 0}
    return make_plan(**(given | {"max_grad_norm": 1e6, "steps": 5} | numbers))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, batch[0])


def vectors(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def moved(model: nn.Module, gradient: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.1 * gradient[name]


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert len(wanted) == 4
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_vectors_advance_as_in_an_ordinary_step(norm: str, options: str):
    """In checked steps (1, 2, 4) and in the others."""
    model, ordinary, plan = new(norm), new(norm), plan_of()
    private_grad = pg.PrivateGradient(model, losses, plan, **OPTIONS[options])
    for batch in plan.batches(TensorDataset(X)):
        gradient = private_grad(batch)
        losses(ordinary, batch.examples)
        assert_same_bits(vectors(model), vectors(ordinary))
        moved(model, gradient)
        moved(ordinary, gradient)


@pytest.mark.parametrize("norm", NORMS)
def test_vectors_advance_without_any_example(norm: str):
    """Vectors that stand still would show that a batch was empty."""
    model, ordinary, plan = new(norm), new(norm), plan_of(sample_rate=1 / SIZE, expected_batch_size=1, steps=9)
    private_grad, sizes = pg.PrivateGradient(model, losses, plan), list[int]()
    for batch in plan.batches(TensorDataset(X)):
        sizes.append(batch.size)
        private_grad(batch)
        losses(ordinary, [X])
        assert_same_bits(vectors(model), vectors(ordinary))
    assert 0 in sizes


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("exact", [None, False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_equal_a_loop(norm: str, exact: bool | None, recomputed: bool):
    """With the vectors of the step, which are constants for each example."""
    model, loop = new(norm, recomputed=recomputed), new(norm)
    losses(loop, [X])
    loop.eval()  # there is no dropout: it only holds the vectors
    total = {name: torch.zeros_like(p) for name, p in loop.named_parameters()}
    for row in X.split(1):
        grads = gradients(loop, losses, [row])
        if exact is not None:
            norms = torch.stack([grad.norm() for grad in grads.values()]).norm()
            along = {name: RADIUS * grad / norms for name, grad in grads.items()}
            grads = gradients(loop, losses, [row], along=along, exact=exact)
        total = {name: value + grads[name] / SIZE for name, value in total.items()}
    perturb = None if exact is None else pg.perturb.BAM(RADIUS, "exact" if exact else "sam")
    plan = plan_of()
    private_grad = pg.PrivateGradient(model, losses, plan, perturb=perturb)
    found = private_grad(next(iter(plan.batches(TensorDataset(X)))))
    for name, value in total.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("step", [0, 2])
def test_what_examples_write_into_the_vectors_is_refused(norm: str, engine: Any, step: int):
    """In a step without a check too; the vectors are as before that step."""
    model, plan, count = new(norm), plan_of(), 0

    def writing(model: Any, batch: Any) -> Tensor:
        found = losses(model, batch)
        if count == step:
            vector: Tensor = next(iter(model.second.buffers()))
            vector.copy_(batch[0].flatten()[:1].detach().expand_as(vector))
        return found

    private_grad = pg.PrivateGradient(model, writing, plan, engine=engine)
    for count, batch in enumerate(plan.batches(TensorDataset(X))):
        before = vectors(model)
        if count < step:
            private_grad(batch)
            continue
        with pytest.raises((pg.PrivacyError, RuntimeError)):
            private_grad(batch)
        assert_same_bits(vectors(model), before)
        break


class OwnIteration(nn.Module):
    """A power iteration of one's own, and a count of the passes: which depends on the size of the drawn batch."""

    def __init__(self, *, counting: bool) -> None:
        super().__init__()
        self.inner, self.counting = nn.Linear(4, 3), counting
        self.register_buffer("u", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            u, weight = self.get_buffer("u"), self.inner.weight
            u.copy_(u + 1 if self.counting else nn.functional.normalize(weight @ (weight.T @ u), dim=0))
        return self.inner(x)


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_other_buffers_are_refused_with_what_to_use(engine: Any, counting: bool):
    model, plan = OwnIteration(counting=counting).double(), plan_of()
    private_grad = pg.PrivateGradient(model, losses, plan, engine=engine)
    batch = next(iter(plan.batches(TensorDataset(X[:, 0, 0]))))
    with pytest.raises(pg.UnsupportedModuleError, match=r"got u; .*\.eval\(\).*torch's spectral_norm"):
        private_grad(batch)
    assert model.get_buffer("u").tolist() == [1.0, 1.0, 1.0]


def test_a_spectral_norm_of_a_computed_weight_is_refused():
    layer = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(4, 3)))
    private_grad = pg.PrivateGradient(layer.double(), losses, plan := plan_of())
    with pytest.raises(pg.UnsupportedModuleError, match="directly on a parameter"):
        private_grad(next(iter(plan.batches(TensorDataset(X[:, 0, 0])))))


def test_explain_leaves_the_vectors():
    model = new("parametrization")
    before = vectors(model)
    assert pg.explain(model, losses, [X]).slow == []
    assert_same_bits(vectors(model), before)
    losses(model, [X])
    assert not torch.equal(vectors(model)["second.parametrizations.weight.0._u"], next(iter(before.values())))


def test_vectors_in_evaluation_mode_stay():
    model, plan = new("parametrization").eval(), plan_of()
    before = vectors(model)
    pg.PrivateGradient(model, losses, plan)(next(iter(plan.batches(TensorDataset(X)))))
    assert_same_bits(vectors(model), before)


def test_a_step_that_fails_leaves_the_vectors(monkeypatch: pytest.MonkeyPatch):
    model, plan = new("parametrization"), plan_of()
    private_grad, before = pg.PrivateGradient(model, losses, plan), vectors(model)
    monkeypatch.setattr(private_gradient, "add_noise", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        private_grad(next(iter(plan.batches(TensorDataset(X)))))
    assert_same_bits(vectors(model), before)
