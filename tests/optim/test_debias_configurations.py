"""What is subtracted is the noise that was really added, in every configuration x optimizer: E[v] - n = E[clean v].

Each configuration names the noise that a careless implementation would subtract; that twin must fail.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import seed_of
from privgrad.private_gradient import RawStep
from privgrad.types import NoisyGradient

SIGMA, C, B = 0.7, 1.0, 16
Wrong = Callable[[str, RawStep], float]


def realized(_: str, raw: RawStep) -> float:
    return B / max(len(raw.clipping.raw_norms), 1)


# options of the plan, of PrivateGradient, of the optimizer; wrong noise over right noise, by parameter
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Wrong]] = {
    "Poisson, other sizes than expected": ({}, {}, {}, realized),
    "epochs": ({"sampling": "epochs", "participations": 2}, {}, {}, realized),
    "full batch": ({"sample_rate": 1.0, "expected_batch_size": 64}, {}, {}, lambda *_: 64 / 63),
    "empty batches": ({"sample_rate": 1 / 64, "expected_batch_size": 1}, {}, {}, lambda _, raw: realized(_, raw) / B),
    "microbatches": (
        {},
        {"microbatch_size": 3},
        {},
        lambda _, raw: max(-(-len(raw.clipping.raw_norms) // 3), 1) ** 0.5,
    ),
    "groups": ({"group_size": 4}, {}, {}, lambda *_: 0.5),
    "little memory": ({}, {"memory_mb": 0.01}, {}, lambda _, raw: max(len(raw.clipping.raw_norms), 1) ** 0.5),
    "by layer": (
        {},
        {"clip": pg.clip.PerLayer({"0.weight": 0.3, "0.bias": 0.4, "2.weight": 0.5, "2.bias": 0.5**0.5})},
        {},
        lambda name, _: {"0.weight": 0.3, "0.bias": 0.4, "2.weight": 0.5, "2.bias": 0.5**0.5}[name],
    ),
    "normalized": ({}, {"clip": pg.clip.Automatic()}, {}, lambda *_: 1.01),
    "other C": ({"max_grad_norm": 3.0}, {}, {}, lambda *_: C / 3.0),
    "preconditioned": (
        {},
        {
            "precondition": pg.precondition.fixed(
                pg.Scales(
                    {"0.weight": torch.full((150, 60), 0.1), "2.weight": torch.tensor(5.0)},
                    provenance="common knowledge",
                    source="a test",
                )
            )
        },
        {},
        lambda name, _: {"0.weight": 0.1, "2.weight": 5.0}.get(name, 1.0),
    ),
    "vmap": ({}, {"engine": "vmap"}, {}, lambda *_: 2**0.5),
    "weight decay": ({}, {}, {"weight_decay": 0.5}, lambda *_: 1.5),
    "no noise": ({"noise_multiplier": 0.0}, {}, {}, lambda *_: 1.0),
}
# class, keep, add, names of the sums in its state
OPTIMIZERS: dict[str, tuple[Any, float, float, str, str, dict[str, Any]]] = {
    "AdamBC": (pg.optim.AdamBC, 0.95, 0.05, "exp_avg_sq", "exp_avg_noise_var", {"betas": (0.9, 0.95)}),
    "AdamWBC": (pg.optim.AdamWBC, 0.95, 0.05, "exp_avg_sq", "exp_avg_noise_var", {"betas": (0.9, 0.95)}),
    "NAdamBC": (pg.optim.NAdamBC, 0.95, 0.05, "exp_avg_sq", "exp_avg_noise_var", {"betas": (0.9, 0.95)}),
    "RMSpropBC": (pg.optim.RMSpropBC, 0.95, 0.05, "exp_avg_sq", "exp_avg_noise_var", {"alpha": 0.95}),
    "AdagradBC": (pg.optim.AdagradBC, 1.0, 1.0, "sum", "noise_var_sum", {}),
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def is_centered(values: Tensor) -> bool:
    return bool(values.mean().abs() <= 4 * values.std() / len(values) ** 0.5)


PLAIN = next(iter(CONFIGURATIONS))


@pytest.mark.filterwarnings("ignore:.*accountant", "ignore:.*noise_multiplier")
@pytest.mark.parametrize(
    ("configuration", "optimizer"),
    [  # by default each configuration and each optimizer; the slow tests have all pairs
        pytest.param(c, o, marks=[] if o == "AdamWBC" or c == PLAIN else [pytest.mark.slow])
        for c in CONFIGURATIONS
        for o in OPTIMIZERS
        if o == "AdamWBC" or c != "weight decay"
    ],
)
def test_debias_subtracts_the_noise_that_was_added(configuration: str, optimizer: str):
    plan_options, oracle_options, options, wrong = CONFIGURATIONS[configuration]
    kind, keep, add, square, noise, own = OPTIMIZERS[optimizer]
    torch.manual_seed(seed_of(0))
    model = nn.Sequential(nn.Linear(60, 150), nn.Tanh(), nn.Linear(150, 40))
    data = TensorDataset(torch.randn(64, 60), torch.randint(0, 40, (64,)))
    numbers: dict[str, Any] = {
        "sample_rate": 0.25,
        "expected_batch_size": B,
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
    }
    numbers |= {"steps": 40, "num_examples": 64, "seed": seed_of(0)} | plan_options
    plan = pg.PrivacyPlan(**numbers)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, **oracle_options)
    clean, twin = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))

    def observe(raw: RawStep) -> None:
        for name, mean in raw.raw_mean.items():
            clean[name].mul_(keep).addcmul_(mean, mean, value=add)
            twin[name].mul_(keep).add_(add * (wrong(name, raw) * raw.released.noise_std_of(name)) ** 2)

    private_grad.register_raw_observer(observe)
    debiased = kind(model.named_parameters(), lr=1e-3, **own, **options)
    for batch in plan.batches(data):
        debiased.step(grad=private_grad(batch))
    state = {name: debiased.state[parameter] for name, parameter in model.named_parameters()}

    def beyond_clean(subtracted: Callable[[str], Any]) -> Tensor:
        return torch.cat([(state[name][square] - subtracted(name) - clean[name]).flatten() for name in state])

    if plan.noise_multiplier == 0:
        assert beyond_clean(lambda _: 0.0).abs().max() == 0
        assert all(values[noise] == 0 for values in state.values())
        return
    assert is_centered(beyond_clean(lambda name: state[name][noise]))
    assert not is_centered(beyond_clean(lambda name: twin[name]))
    assert not is_centered(beyond_clean(lambda _: 0.0))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_noise_by_time_layer_and_coordinate_is_subtracted_where_it_was_added(optimizer: str):
    kind, keep, add, square, noise, own = OPTIMIZERS[optimizer]
    generator = torch.Generator().manual_seed(seed_of(0))
    parameters = {name: nn.Parameter(torch.zeros(20_000)) for name in ("head", "body")}
    debiased = kind(list(parameters.items()), lr=1e-3, **own)
    by_coordinate = torch.linspace(0.5, 2.0, 20_000)
    clean = 0.0
    for step in range(60):
        signal = 0.1 + 0.01 * step
        clean = keep * clean + add * signal**2
        stds = {"head": 0.1 + 0.02 * step, "body": (2.0 - 0.02 * step) * by_coordinate}
        values = {n: signal + std * torch.randn(20_000, generator=generator) for n, std in stds.items()}
        debiased.step(grad=NoisyGradient(values, stds))
    for parameter in parameters.values():
        state = debiased.state[parameter]
        assert is_centered(state[square] - state[noise] - clean)
        assert not is_centered(state[square] - 1.1 * state[noise] - clean)
    # Right on average is not enough: low and high noise each by themselves.
    state = debiased.state[parameters["body"]]
    for half in (slice(0, 10_000), slice(10_000, None)):
        assert is_centered((state[square] - state[noise] - clean)[half])
        assert not is_centered((state[square] - state[noise].mean() - clean)[half])
