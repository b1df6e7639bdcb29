"""Every optimizer against the papers' formulas in plain float64: parameters and state, noise that changes over time."""

from typing import Any

import numpy as np
import optimizers as plain
import pytest
import torch
from torch import nn

import privgrad as pg
from privgrad.types import NoisyGradient

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
DEBIASED = MOMENTS | {"phi": "exp_avg_noise_var"}

# ours, its options, the plain version, its options, state: plain -> ours
ROWS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any], dict[str, str]]] = {
    "DP-SGD": (pg.optim.SGD, {}, plain.SGD, {}, {}),
    "DP-GDM": (pg.optim.SGD, {"momentum": 0.9}, plain.SGD, {"momentum": 0.9}, {"b": "momentum_buffer"}),
    "MomentumSGD": (
        pg.optim.MomentumSGD,
        {"momentum": 0.8},
        plain.MomentumSGD,
        {"momentum": 0.8},
        {"b": "momentum_buffer"},
    ),
    "Muon, vectors": (pg.optim.Muon, {"momentum": 0.8}, plain.Muon, {"momentum": 0.8}, {"m": "momentum_buffer"}),
    "MicroAdam": (
        pg.optim.MicroAdam,
        {"betas": (0.8, 0.9), "density": 0.3, "window": 4},
        plain.MicroAdam,
        {"beta1": 0.8, "beta2": 0.9, "density": 0.3, "window": 4},
        {"error": "error"},
    ),
    "Yogi": (pg.optim.Yogi, {"betas": (0.8, 0.9)}, plain.Yogi, {"beta1": 0.8, "beta2": 0.9}, MOMENTS),
    "DP-Adam": (pg.optim.Adam, {"betas": (0.8, 0.99)}, plain.Adam, {"beta1": 0.8, "beta2": 0.99}, MOMENTS),
    "DP-Adam, foreach": (
        pg.optim.Adam,
        {"betas": (0.8, 0.99), "foreach": True},
        plain.Adam,
        {"beta1": 0.8, "beta2": 0.99},
        MOMENTS,
    ),
    "DP-AdamW": (pg.optim.AdamW, {"weight_decay": 0.1}, plain.Adam, {"weight_decay": 0.1}, MOMENTS),
    "DP-NAdam": (pg.optim.NAdam, {}, plain.NAdam, {}, MOMENTS),
    "DP-RMSProp": (
        pg.optim.RMSprop,
        {"alpha": 0.9, "eps": 1e-5},
        plain.RMSprop,
        {"alpha": 0.9, "eps": 1e-5},
        {"v": "square_avg"},
    ),
    "DP-AdaGrad": (pg.optim.Adagrad, {}, plain.Adagrad, {}, {"v": "sum"}),
    "AdamBC": (pg.optim.AdamBC, {"betas": (0.8, 0.99)}, plain.AdamBC, {"beta1": 0.8, "beta2": 0.99}, DEBIASED),
    "AdamBC, floor": (pg.optim.AdamBC, {"debias_floor": 0.1}, plain.AdamBC, {"floor": 0.1}, DEBIASED),
    "AdamBC, gamma'": (pg.optim.AdamBC, {"gamma_prime": 0.3}, plain.AdamBC, {"gamma_prime": 0.3}, DEBIASED),
    "AdamBC, negative only": (
        pg.optim.AdamBC,
        {"floor_rule": "negative_only"},
        plain.AdamBC,
        {"rule": "negative_only"},
        DEBIASED,
    ),
    "AdamBC, moment": (pg.optim.AdamBC, {"floor_rule": "moment"}, plain.AdamBC, {"rule": "moment"}, DEBIASED),
    "AdamBC, add": (pg.optim.AdamBC, {"floor_rule": "add"}, plain.AdamBC, {"rule": "add"}, DEBIASED),
    "AdamWBC": (pg.optim.AdamWBC, {"weight_decay": 0.1}, plain.AdamBC, {"weight_decay": 0.1}, DEBIASED),
    "NAdamBC": (
        pg.optim.NAdamBC,
        {"momentum_decay": 0.01},
        plain.NAdam,
        {"momentum_decay": 0.01, "debiased": True},
        DEBIASED,
    ),
    "RMSpropBC": (
        pg.optim.RMSpropBC,
        {"alpha": 0.9},
        plain.RMSprop,
        {"alpha": 0.9, "debiased": True},
        {"v": "exp_avg_sq", "phi": "exp_avg_noise_var"},
    ),
    "AdagradBC": (pg.optim.AdagradBC, {}, plain.Adagrad, {"debiased": True}, {"v": "sum", "phi": "noise_var_sum"}),
}


@pytest.mark.parametrize("by_coordinate", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_fifty_steps_agree_with_the_plain_version(name: str, by_coordinate: bool):
    """Two parameter groups with learning rates of their own; noise by time, by parameter, by coordinate."""
    ours, options, reference, plain_options, state = ROWS[name]
    tolerance = 1e-6 if name == "DP-NAdam" else 1e-10  # torch keeps its momentum product in float32
    rng = np.random.default_rng(0)
    start = {"first": rng.normal(size=7), "second": rng.normal(size=11)}
    lrs = {"first": 0.02, "second": 0.005}
    parameters = {key: nn.Parameter(torch.from_numpy(value.copy())) for key, value in start.items()}
    groups = [{"params": [(key, p)], "lr": lrs[key]} for key, p in parameters.items()]
    optimizer = ours(groups, lr=1.0, **options)
    twins = {key: reference(lrs[key], **plain_options) for key in start}
    for t in range(50):
        signal = {key: 0.3 * np.sin(t / 5 + value) for key, value in start.items()}
        std = {"first": 0.5 / (1 + t / 10), "second": 0.2 + 0.1 * np.cos(t)}
        if by_coordinate:
            std = {key: s * np.linspace(0.5, 1.5, len(start[key])) for key, s in std.items()}
        gradient = {key: signal[key] + std[key] * rng.normal(size=len(start[key])) for key in start}
        given: Any = {k: torch.as_tensor(s) if by_coordinate else float(s) for k, s in std.items()}
        optimizer.step(grad=NoisyGradient({k: torch.from_numpy(g) for k, g in gradient.items()}, given))
        for key, twin in twins.items():
            start[key] = twin.step(start[key], gradient[key], std[key])
            np.testing.assert_allclose(parameters[key].detach().numpy(), start[key], rtol=tolerance, atol=1e-13)
            for theirs, mine in state.items():
                found = optimizer.state[parameters[key]][mine]
                np.testing.assert_allclose(np.asarray(found), getattr(twin, theirs), rtol=tolerance, atol=1e-14)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (3, 2, 2, 2), (5, 1), (3, 20), (20, 3), (1, 9)])
def test_muon_orthogonalizes_matrices_as_the_plain_version_does(shape: tuple[int, ...]):
    rng = np.random.default_rng(2)
    theta = rng.normal(size=shape)
    parameter = nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer, twin = pg.optim.Muon([("p", parameter)], 0.1), plain.Muon(0.1)
    for _ in range(10):
        gradient = rng.normal(size=shape)
        optimizer.step(grad=NoisyGradient({"p": torch.from_numpy(gradient)}, 0.1))
        matrix = twin.step(theta.reshape(shape[0], -1), gradient.reshape(shape[0], -1), 0.1)
        theta = matrix.reshape(shape)
        np.testing.assert_allclose(parameter.detach().numpy(), theta, rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_muons_step_is_that_of_torch():
    """torch.optim.Muon computes in bfloat16, so only about."""
    start = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = pg.optim.Muon([("p", ours)], 0.1, momentum=0.9)
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=False)
    for seed in range(3):
        gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed))
        mine.step(grad=NoisyGradient({"p": gradient}, 0.1))
        # torch's momentum has the factor 1 - momentum, which the normalization removes.
        theirs.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(6, 9), (40, 30), (3, 40), (8, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_in_bfloat16_is_close_to_its_own_precision(shape: tuple[int, ...], dtype: torch.dtype):
    moment = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    steps = []
    for bfloat16 in (False, True):
        for kind in (pg.optim.Muon, pg.optim.MuonBC):
            parameter = nn.Parameter(torch.zeros_like(moment))
            kind([("p", parameter)], 1.0, bfloat16=bfloat16).step(grad=NoisyGradient({"p": moment}, 0.1))
            steps.append(parameter.detach())
    is_wide = shape == (3, 40)
    for own, half, most in zip(steps[:2], steps[2:], (0.06, 0.13), strict=True):  # MuonBC adds three of them
        assert half.dtype == dtype
        assert torch.equal(own, half) == is_wide
        assert (own - half).norm() < most * own.norm()


def test_muonbc_removes_the_leading_bias_of_the_orthogonalization():
    """Over many draws of noise that is small beside the singular values; beside Muon, which keeps the bias."""
    generator = torch.Generator().manual_seed(0)
    signal, std, draws = torch.randn(4, 6, generator=generator, dtype=torch.float64), 0.15, 4000
    sums = {"Muon": torch.zeros_like(signal), "MuonBC": torch.zeros_like(signal)}
    for draw in range(draws):
        noise = std * torch.randn(4, 6, generator=generator, dtype=torch.float64)
        for kind, total in sums.items():
            parameter = nn.Parameter(torch.zeros_like(signal))
            optimizer = getattr(pg.optim, kind)([(f"p{draw}", parameter)], 1.0, momentum=0.0, iterations=2)
            optimizer.step(grad=NoisyGradient({f"p{draw}": signal + noise}, std))
            total -= parameter.detach()
    clean = torch.from_numpy(plain.orthogonal(signal.numpy(), 2))
    bias = {kind: float((total / draws - clean).norm()) for kind, total in sums.items()}
    assert bias["MuonBC"] < 0.4 * bias["Muon"]


def test_a_floor_that_decays_is_set_as_learning_rates_are():
    """gamma'_t = gamma' 0.9**(t - 1) (SPEC 4.2), by the param group."""
    rng = np.random.default_rng(1)
    theta, parameter = np.zeros(9), nn.Parameter(torch.zeros(9, dtype=torch.float64))
    optimizer = pg.optim.AdamBC([("p", parameter)], lr=0.1, gamma_prime=0.5)
    twin = plain.AdamBC(0.1, gamma_prime=0.5)
    for t in range(1, 21):
        gradient = 0.2 + 0.3 * rng.normal(size=9)
        optimizer.step(grad=NoisyGradient({"p": torch.from_numpy(gradient)}, 0.3))
        theta = twin.step(theta, gradient, 0.3)
        np.testing.assert_allclose(parameter.detach().numpy(), theta, rtol=1e-10, atol=1e-13)
        optimizer.param_groups[0]["gamma_prime"] *= 0.9
        twin.gamma_prime = 0.5 * 0.9**t


PUBLIC: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any], dict[str, str]]] = {
    "DP-R-Pub": (pg.optim.RMSpropPub, {"alpha": 0.8}, plain.RMSpropPub, {"alpha": 0.8}, {"v": "exp_avg_sq"}),
    "DP-Adam-Pub": (pg.optim.AdamPub, {"betas": (0.8, 0.95)}, plain.AdamPub, {"beta1": 0.8, "beta2": 0.95}, MOMENTS),
    "DP-Adam-Pub, uncorrected": (
        pg.optim.AdamPub,
        {"bias_correction": False},
        plain.AdamPub,
        {"corrected": False},
        MOMENTS,
    ),
    "DP-Adam-Pub, public numerator": (
        pg.optim.AdamPub,
        {"numerator": "public"},
        plain.AdamPub,
        {"numerator": "public"},
        {"m": "public_exp_avg", "v": "exp_avg_sq"},
    ),
    "PDA-DPMD": (pg.optim.MirrorDescent, {"horizon": 30}, plain.MirrorDescent, {"horizon": 30}, {}),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_fifty_steps_with_public_gradients_agree_with_the_plain_version(name: str):
    """Public gradients depend on the weights of the moment; two groups; stopped and restored half way."""
    ours, options, reference, plain_options, state = PUBLIC[name]
    rng = np.random.default_rng(0)
    start = {"first": rng.normal(size=7), "second": rng.normal(size=11)}
    lrs = {"first": 0.02, "second": 0.005}
    parameters = {key: nn.Parameter(torch.from_numpy(value.copy())) for key, value in start.items()}

    def public(step: int) -> dict[str, torch.Tensor]:
        return {key: torch.sin(p.detach()) + 0.1 * step for key, p in parameters.items()}

    def make() -> Any:
        groups = [{"params": [(key, p)], "lr": lrs[key]} for key, p in parameters.items()]
        return ours(groups, public=public, lr=1.0, **options)

    optimizer = make()
    twins = {key: reference(lrs[key], **plain_options) for key in start}
    for t in range(50):
        if t == 25:
            before, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(before)
        gradient = {key: rng.normal(size=len(value)) for key, value in start.items()}
        optimizer.step(grad=NoisyGradient({k: torch.from_numpy(g) for k, g in gradient.items()}, 0.1))
        for key, twin in twins.items():
            start[key] = twin.step(start[key], gradient[key], np.sin(start[key]) + 0.1 * t)
            np.testing.assert_allclose(parameters[key].detach().numpy(), start[key], rtol=1e-10, atol=1e-13)
            for theirs, mine in state.items():
                found = optimizer.state[parameters[key]][mine]
                np.testing.assert_allclose(np.asarray(found), getattr(twin, theirs), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (pg.optim.RMSpropPub, {"alpha": 1.0}),
        (pg.optim.RMSpropPub, {"eps": 0.0}),
        (pg.optim.AdamPub, {"betas": (0.9, 1.0)}),
        (pg.optim.AdamPub, {"numerator": "both"}),
        (pg.optim.AdamPub, {"keep": 0.0}),
        (pg.optim.AdamPub, {"lr": -1.0}),
        (pg.optim.MirrorDescent, {"horizon": 0}),
        (pg.optim.MirrorDescent, {"horizon": 3, "public": None}),
    ],
)
def test_public_updates_refuse_numbers_out_of_range(kind: Any, options: dict[str, Any]):
    named = [("p", nn.Parameter(torch.zeros(2)))]
    with pytest.raises(pg.PrivacyError, match=list(options)[-1]):
        kind(named, **({"lr": 0.1, "public": lambda step: {}} | options))


def test_a_public_gradient_of_another_model_is_refused():
    optimizer = pg.optim.RMSpropPub(
        [("p", nn.Parameter(torch.zeros(2)))], public=lambda step: {"p": torch.ones(1)}, lr=0.1
    )
    with pytest.raises(pg.PrivacyError, match="public gradient of 'p' to have shape"):
        optimizer.step(grad=NoisyGradient({"p": torch.ones(2)}, 0.1))
