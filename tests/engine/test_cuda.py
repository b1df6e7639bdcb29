"""On a GPU: the gradients of the CPU, noise of the stated size, and trainings that resume. Skipped without one."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_noise_memory import expected_covariance
from test_optimizers import OPTIMIZERS, noisy
from torch import Tensor, nn

import privgrad as pg
from conftest import make_data, make_plan
from privgrad.noise.banded import Banded
from privgrad.types import NoisyGradient

DEVICE = "cuda"
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
COORDINATES = 400_000


def make_model() -> nn.Module:
    """Layers of several rules: embedding, convolution, norms, a recurrent layer, a shared weight, linear."""
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.conv = nn.Embedding(12, 6), nn.Conv1d(6, 8, 3, padding=1)
            self.norm, self.lstm = nn.GroupNorm(2, 8), nn.LSTM(8, 5, batch_first=True)
            self.scale, self.mix, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            ids = (x.abs() * 4).long() % 12
            h = torch.tanh(self.norm(self.conv(self.tokens(ids).transpose(1, 2)))).transpose(1, 2)
            h, _ = self.lstm(h)
            return self.head(F.layer_norm(self.mix(self.mix(h.mean(1) * self.scale)), (5,)))

    return Mixed().double()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    place = next(model.parameters()).device
    return F.cross_entropy(model(batch[0].to(place)), batch[1].to(place), reduction="none")


def scales(model: nn.Module) -> pg.Scales:
    found = {name: 0.5 + torch.rand(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    return pg.Scales(found, provenance="common knowledge", source="made up")


def public(model: nn.Module) -> Any:
    gradient = pg.PublicGradient(model, loss_fn, make_data(8, torch.float64).tensors, source="a test")
    return pg.precondition.public_rmsprop(gradient, eps=0.01)


OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "plain": lambda model: {},
    "by example": lambda model: {"engine": "vmap"},
    "microbatches": lambda model: {"microbatch_size": 3},
    "by layer": lambda model: {"clip": pg.clip.PerLayer({name: 0.1 for name, _ in model.named_parameters()})},
    "automatic": lambda model: {"clip": pg.clip.Automatic()},
    "preconditioned": lambda model: {"precondition": pg.precondition.fixed(scales(model))},
    "public RMSProp": lambda model: {"precondition": public(model)},
    "BAM": lambda model: {"perturb": pg.perturb.BAM(0.05)},
    "BAM, exact": lambda model: {"perturb": pg.perturb.BAM(0.05, mode="exact")},
    "SAT": lambda model: {"perturb": pg.perturb.SAT(0.05)},
    "DiSK": lambda model: {"perturb": pg.perturb.DiSK(0.7), "filter": pg.filters.EMA(0.7)},
    "DOPPLER": lambda model: {"filter": pg.filters.DOPPLER()},
}


def released(model: nn.Module, options: dict[str, Any], steps: int = 3, **changed: Any) -> list[NoisyGradient]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make_plan(seed=0, max_grad_norm=0.5, **changed)
        private_grad = pg.PrivateGradient(model, loss_fn, plan, **options)
        batches = plan.batches(make_data(32, torch.float64))
        return [private_grad(next(batches)) for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch):
    there = make_model()
    options = OPTIONS[name](there)
    expected = released(there, options, noise_multiplier=0.0)
    if name == "BAM, exact":  # torch's remedy: cuDNN's recurrent layers have no second derivative
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    here = make_model().to(DEVICE)
    found = released(
        here, OPTIONS[name](here) if name in ("by layer", "public RMSProp") else options, noise_multiplier=0.0
    )
    for wanted, gradient in zip(expected, found, strict=True):
        for parameter, value in wanted.items():
            assert gradient[parameter].device.type == DEVICE
            torch.testing.assert_close(gradient[parameter].cpu(), value, rtol=1e-9, atol=1e-11)


class Still(nn.Module):
    """A model whose gradients are all zero: its releases are the noise."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COORDINATES, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * (self.weight.sum() + x.sum(1))


def still_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0].to(DEVICE)).float()


def noises(steps: int, dtype: torch.dtype = torch.float32, seed: int | None = 0, **options: Any) -> list[NoisyGradient]:
    plan_options = {name: options.pop(name) for name in ("correlation",) if name in options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make_plan(seed=seed, noise_multiplier=1.5, **plan_options)
        private_grad = pg.PrivateGradient(Still(dtype).to(DEVICE), still_losses, plan, **options)
        batches = plan.batches(make_data())
        return [private_grad(next(batches)) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"filter": pg.filters.EMA(0.3)}, {"norm_bins": 16}], ids=str)
def test_noise_has_the_stated_size_and_is_new_in_each_step(dtype: torch.dtype, options: dict[str, Any]):
    first, second = noises(2, dtype, **options)
    for gradient in (first, second):
        value, std = gradient["weight"].double(), gradient.noise_std
        assert isinstance(std, float)
        assert value.device.type == DEVICE
        assert abs(float(value.std()) / std - 1) < 5 / math.sqrt(2 * COORDINATES)
        assert abs(float(value.mean())) < 5 * std / math.sqrt(COORDINATES)
        assert float(value.abs().max()) < 7 * std
        if options.get("norm_bins"):
            assert gradient.norm_distribution is not None
    if "filter" not in options:
        both = torch.stack([first["weight"].double(), second["weight"].double()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / math.sqrt(COORDINATES)


def test_noise_follows_its_seed_and_nothing_else():
    torch.cuda.manual_seed(1)
    first, again, fresh, other = noises(1), noises(1), noises(1, seed=None), noises(1, seed=None)
    assert torch.equal(first[0]["weight"], again[0]["weight"])
    assert not torch.equal(fresh[0]["weight"], other[0]["weight"])
    before = torch.cuda.get_rng_state()
    noises(1)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_noise_with_memory_has_its_covariance():
    steps, banded = 8, Banded(4).for_steps(10)
    found = noises(steps, correlation=banded)
    unit = make_plan(noise_multiplier=1.5).noise_std
    expected = torch.from_numpy(expected_covariance(banded, steps))
    values = torch.stack([gradient["weight"].double().cpu() for gradient in found]) / unit
    torch.testing.assert_close(values @ values.T / COORDINATES, expected, rtol=0, atol=0.02)
    for step, gradient in enumerate(found):
        assert gradient.noise_std == pytest.approx(unit * float(expected[step, step].sqrt()), rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_cpu(name: str):
    make, _, options, _ = OPTIMIZERS[name]
    models = [make_model(), make_model().to(DEVICE)]
    for model in models:
        optimizer = make(model.named_parameters(), **options)
        for step in range(5):
            gradient = noisy(make_model(), seed=step)
            place = next(model.parameters()).device
            optimizer.step(grad=NoisyGradient({n: g.to(place) for n, g in gradient.items()}, gradient.noise_std))
    for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-7, atol=1e-9)


def test_a_training_resumes_as_if_it_had_not_stopped(tmp_path: Path):
    def train(folder: Path, end: int | None = None) -> nn.Module:
        model = make_model().float().to(DEVICE)
        plan = make_plan(seed=3)
        private_grad = pg.PrivateGradient(
            model,
            loss_fn,
            plan,
            adaptive_clip=pg.clip.TargetFraction(),
            filter=pg.filters.EMA(0.5),
            ledger=folder / "l",
        )
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
        state = folder / "state.pt"
        if state.exists():
            held = torch.load(state, weights_only=True)
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            private_grad.load_state_dict(held["grad"])
        for batch in plan.batches(make_data(), start=private_grad.ledger.next_step):
            optimizer.step(grad=private_grad(batch.to(DEVICE)))
            if batch.sampling.step + 1 == end:
                kept = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "grad": private_grad.state_dict(),
                }
                torch.save(kept, state)
                private_grad.ledger.close()
                break
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        whole = train(tmp_path / "a")
        train(tmp_path / "b", end=4)
        resumed = train(tmp_path / "b")
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_fit_trains_a_model_on_the_gpu(tmp_path: Path):
    model = make_model().float().to(DEVICE)
    plan = make_plan(sample_rate=0.5, expected_batch_size=16)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    pg.fit(private_grad, optimizer, make_data(), output_dir=tmp_path / "run", progress=False)
    assert private_grad.ledger.releases == 10
    assert all(parameter.device.type == DEVICE for parameter in model.parameters())


def test_an_explanation_measures_a_model_where_it_is():
    batch = make_data(8, torch.float64).tensors
    for place in ("cpu", DEVICE):
        found = pg.explain(make_model().to(place), loss_fn, batch)
        assert min(found.peak_mb.values()) > 0
        assert "memory besides the model" in str(found)
