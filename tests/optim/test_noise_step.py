"""The noise step of every optimizer: what it means, what it equals, where it is refused."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import privgrad as pg
from privgrad.optim.base import PrivateOptimizer
from privgrad.types import NoisyGradient

STD, STEP = 3e-4, 0.01
# class, options, updates of pure noise, and the learning rate at which the noise step is STEP
ROWS: dict[str, tuple[Any, dict[str, Any], int, float]] = {
    "SGD": (pg.optim.SGD, {}, 2000, STEP / STD),
    "SGD, momentum": (pg.optim.SGD, {"momentum": 0.9}, 2000, 0.1 * STEP / STD),
    "SGD, Nesterov": (pg.optim.SGD, {"momentum": 0.8, "nesterov": True}, 2000, 0.2 * STEP / STD),
    "SGD, dampening": (pg.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, 2000, 0.2 * STEP / STD),
    "MomentumSGD": (pg.optim.MomentumSGD, {"momentum": 0.8}, 2000, 0.2 * STEP / STD),
    "Adam": (pg.optim.Adam, {}, 2000, STEP),
    "Adam, short memory": (pg.optim.Adam, {"betas": (0.5, 0.99)}, 2000, STEP),
    "AdamW": (pg.optim.AdamW, {"weight_decay": 0.0}, 2000, STEP),
    "NAdam": (pg.optim.NAdam, {}, 2000, STEP),
    "RMSprop": (pg.optim.RMSprop, {}, 5000, STEP),
    "RMSprop, momentum": (pg.optim.RMSprop, {"momentum": 0.5}, 5000, 0.5 * STEP),
    "AdamBC": (pg.optim.AdamBC, {}, 2000, 2 * STEP),
    "AdamBC, floor 0.3": (pg.optim.AdamBC, {"debias_floor": 0.3}, 2000, STEP * 0.3**0.5),
    "AdamBC, floor 1": (pg.optim.AdamBC, {"debias_floor": 1.0}, 2000, STEP),
    "AdamWBC": (pg.optim.AdamWBC, {"weight_decay": 0.0, "debias_floor": 4.0}, 2000, 2 * STEP),
    "NAdamBC": (pg.optim.NAdamBC, {}, 2000, 2 * STEP),
    "RMSpropBC": (pg.optim.RMSpropBC, {"debias_floor": 2.0}, 5000, 2**0.5 * STEP),
}
WITHOUT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "Adagrad": (pg.optim.Adagrad, {}, "Adagrad"),
    "AdagradBC": (pg.optim.AdagradBC, {}, "AdagradBC"),
    "Yogi": (pg.optim.Yogi, {}, "Yogi"),
    "Muon": (pg.optim.Muon, {}, "Muon"),
    "MuonBC": (pg.optim.MuonBC, {}, "Muon"),
    "MicroAdam": (pg.optim.MicroAdam, {}, "MicroAdam"),
    "RMSpropPub": (pg.optim.RMSpropPub, {"public": dict}, "public gradients"),
    "AdamPub": (pg.optim.AdamPub, {"public": dict}, "public gradients"),
    "MirrorDescent": (pg.optim.MirrorDescent, {"public": dict, "horizon": 5}, "public gradients"),
    "momentum of one": (pg.optim.SGD, {"momentum": 1.0}, "momentum=1.0"),
    "dampened to nothing": (pg.optim.SGD, {"momentum": 0.5, "dampening": 1.0}, "dampening=1.0"),
    "RMSprop, momentum of one": (pg.optim.RMSprop, {"momentum": 1.0}, "momentum=1.0"),
    "amsgrad": (pg.optim.Adam, {"amsgrad": True}, "amsgrad"),
    "floor rule": (pg.optim.AdamBC, {"floor_rule": "add"}, "floor_rule"),
    "gamma'": (pg.optim.AdamBC, {"gamma_prime": 1e-8}, "debias_floor"),
}


def displacement(optimizer: PrivateOptimizer, parameter: nn.Parameter, stds: list[float], seed: int = 0) -> float:
    """Return the root mean square displacement by pure noise, divided by the root of the number of updates."""
    generator = torch.Generator().manual_seed(seed)
    start = parameter.detach().clone()
    for std in stds:
        noise = std * torch.randn(parameter.shape, generator=generator)
        optimizer.step(grad=NoisyGradient({"p": noise}, std))
    return float((parameter.detach() - start).double().square().mean()) ** 0.5 / len(stds) ** 0.5


def made(kind: Any, shape: int = 4, **options: Any) -> tuple[Any, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(shape))
    return kind([("p", parameter)], **options), parameter


@pytest.mark.parametrize("name", ROWS)
def test_pure_noise_moves_a_weight_by_the_noise_step(name: str):
    kind, options, steps, lr = ROWS[name]
    optimizer, parameter = made(kind, 10_000, noise_step=STEP, **options)
    assert displacement(optimizer, parameter, [STD] * steps) == pytest.approx(STEP, rel=0.05)
    twice, parameter = made(kind, 10_000, lr=1.5 * lr, **options)
    assert displacement(twice, parameter, [STD] * steps) != pytest.approx(STEP, rel=0.05)


@pytest.mark.parametrize("name", ROWS)
def test_it_equals_the_learning_rate_that_it_stands_for(name: str):
    """Under constant noise, and the noise step that is read back of this rate is the given one."""
    kind, options, _, lr = ROWS[name]
    by_step, first = made(kind, noise_step=STEP, **options)
    by_lr, second = made(kind, lr=lr, **options)
    if "eps" in by_lr.defaults:  # in units of the noise, and in those of the gradient
        by_step.param_groups[0]["eps"], by_lr.param_groups[0]["eps"] = 0.5, 0.5 * STD
        by_lr.param_groups[0]["lr"] *= 1.5
    generator = torch.Generator().manual_seed(0)
    assert by_step.noise_step == pytest.approx(STEP)
    assert math.isnan(by_lr.noise_step)
    for _ in range(20):
        gradient = NoisyGradient({"p": STD * torch.randn(4, generator=generator) + STD}, STD)
        by_step.step(grad=gradient)
        by_lr.step(grad=gradient)
        assert [group["lr"] for group in by_step.param_groups] == [STEP]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)
    assert by_lr.noise_step == pytest.approx(STEP, rel=1e-6)


@pytest.mark.parametrize("name", WITHOUT)
def test_an_optimizer_without_a_noise_step_refuses_it_by_name(name: str):
    kind, options, told = WITHOUT[name]
    with pytest.raises(pg.PrivacyError, match=f"noise_step to be absent.*{told}"):
        made(kind, noise_step=0.1, **options)
    optimizer, _ = made(kind, lr=0.1, **options)
    if name != "gamma'":
        assert math.isnan(optimizer.noise_step)
    with pytest.raises(pg.PrivacyError, match=f"noise_step to be absent.*{told}"):
        optimizer.add_param_group({"params": [("q", nn.Parameter(torch.zeros(1)))], "noise_step": 0.1})


def test_an_optimizer_that_does_not_say_its_noise_step_has_none():
    class Signs(PrivateOptimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, defaults={"lr": lr})

        def _update(self, gradient: NoisyGradient) -> None:
            for group in self.param_groups:
                for name, parameter in self._active(group):
                    parameter.data.add_(gradient[name].sign(), alpha=-group["lr"])

    assert not Signs.has_noise_step()
    told = r"got a class without _noise_step_per_lr; give lr in its place, or define _noise_step_per_lr\(self, group"
    with pytest.raises(pg.PrivacyError, match=rf"Signs: expected noise_step to be absent .*, {told}"):
        made(Signs, noise_step=0.1)
    optimizer, parameter = made(Signs, lr=0.5)
    optimizer.step(grad=NoisyGradient({"p": torch.ones(4)}, 1.0))
    assert math.isnan(optimizer.noise_step)
    assert parameter.tolist() == [-0.5] * 4
    with pytest.raises(pg.PrivacyError, match="noise_step to be absent"):
        optimizer.add_param_group({"params": [("q", nn.Parameter(torch.zeros(1)))], "noise_step": 0.1})


def test_without_noise_the_noise_step_of_a_rate_is_zero():
    rows: list[tuple[Any, dict[str, Any]]] = [(pg.optim.SGD, {}), (pg.optim.Adam, {}), (pg.optim.AdamBC, {})]
    rows.append((pg.optim.Adam, {"eps": 0.0}))
    for kind, options in rows:
        optimizer, _ = made(kind, lr=0.5, **options)
        optimizer.step(grad=NoisyGradient({"p": torch.ones(4)}, 0.0))
        assert optimizer.noise_step == 0.0


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "MomentumSGD", "AdamBC"])
def test_noise_that_changes_over_time_moves_a_weight_by_the_same_step(name: str):
    """Each release is divided by its own noise; a learning rate would move by the mean of the noise instead."""
    kind, options, _, lr = ROWS[name]
    stds = [STD * (10 if t % 3 else 1) for t in range(2000)]
    optimizer, parameter = made(kind, 10_000, noise_step=STEP, **options)
    assert displacement(optimizer, parameter, stds) == pytest.approx(STEP, rel=0.05)
    if name in ("SGD, momentum", "MomentumSGD"):
        plain, parameter = made(kind, 10_000, lr=lr, **options)
        assert displacement(plain, parameter, stds) > 2 * STEP


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "AdamBC"])
def test_noise_that_differs_by_parameter_and_coordinate_moves_each_by_the_same_step(name: str):
    kind, options, _, _ = ROWS[name]
    parameters = {key: nn.Parameter(torch.zeros(5_000)) for key in ("head", "body")}
    optimizer = kind(list(parameters.items()), noise_step=STEP, **options)
    stds = {"head": STD, "body": torch.linspace(1, 100, 5_000)}
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        values = {key: std * torch.randn(5_000, generator=generator) for key, std in stds.items()}
        optimizer.step(grad=NoisyGradient(values, stds))
    assert optimizer.noise_step == STEP
    parts = [parameters["head"], parameters["body"][:2000], parameters["body"][3000:]]
    for part in parts:
        assert float(part.detach().square().mean()) ** 0.5 / 1000**0.5 == pytest.approx(STEP, rel=0.06)


def test_a_scheduler_acts_on_the_noise_step():
    optimizer, parameter = made(pg.optim.SGD, 1, noise_step=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _ in range(2):
        optimizer.step(grad=NoisyGradient({"p": torch.ones(1)}, 2.0))
        scheduler.step()
    assert float(parameter.detach()) == pytest.approx(-0.5 / 2 - 0.05 / 2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        made(pg.optim.SGD, noise_step=0.1, momentum=0.9)[0], max_lr=0.2, total_steps=10
    )
    assert cycle.get_last_lr() == pytest.approx([0.2 / 25])


def test_groups_have_noise_steps_of_their_own_and_may_mix_with_learning_rates():
    parameters = {key: nn.Parameter(torch.zeros(1)) for key in "abc"}
    groups: list[dict[str, Any]] = [{"params": [(key, p)]} for key, p in parameters.items()]
    groups[1]["noise_step"], groups[2]["lr"] = 0.2, 0.3
    optimizer = pg.optim.SGD(groups, noise_step=0.1)
    optimizer.step(grad=NoisyGradient(dict.fromkeys("abc", torch.ones(1)), 4.0))
    moved = [float(p.detach()) for p in parameters.values()]
    assert moved == pytest.approx([-0.1 / 4, -0.2 / 4, -0.3])
    assert optimizer.noise_step == pytest.approx(((0.1**2 + 0.2**2 + 1.2**2) / 3) ** 0.5)


def test_its_state_resumes_and_is_not_taken_for_that_of_a_learning_rate():
    optimizer, parameter = made(pg.optim.AdamBC, noise_step=STEP)
    gradients = [NoisyGradient({"p": torch.full((4,), float(k))}, 0.5) for k in range(6)]
    for gradient in gradients[:3]:
        optimizer.step(grad=gradient)
    other, twin = made(pg.optim.AdamBC, noise_step=1.0)
    twin.data.copy_(parameter.data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    by_lr, _ = made(pg.optim.AdamBC, lr=1.0)
    with pytest.raises(pg.PrivacyError, match="the rate to be given as lr, got noise_step"):
        by_lr.load_state_dict(optimizer.state_dict())
    assert by_lr.param_groups[0]["lr"] == 1.0
    for gradient in gradients[3:]:
        optimizer.step(grad=gradient)
        other.step(grad=gradient)
    assert torch.equal(parameter, twin)


def test_one_of_both_is_taken_and_noise_is_needed():
    with pytest.raises(pg.PrivacyError, match=r"lr to be absent next to noise_step, got 0.1"):
        made(pg.optim.SGD, lr=0.1, noise_step=0.1)
    with pytest.raises(pg.PrivacyError, match=r"lr to be absent next to noise_step, got 0.1"):
        pg.optim.SGD([("p", nn.Parameter(torch.zeros(1)))], 0.1, noise_step=0.1)
    for kind in (pg.optim.Muon, pg.optim.MuonBC, pg.optim.MicroAdam):
        with pytest.raises(pg.PrivacyError, match=rf"{kind.__name__}: expected lr to be given, got None"):
            kind(nn.Linear(2, 2).named_parameters())
    with pytest.raises(pg.PrivacyError, match=r"lr or noise_step to be given, got None"):
        made(pg.optim.MomentumSGD)
    with pytest.raises(pg.PrivacyError, match="noise_step to be a finite number >= 0"):
        made(pg.optim.Adam, noise_step=-0.1)
    optimizer, parameter = made(pg.optim.Adam, noise_step=0.1)
    for std in (0.0, torch.tensor([1.0, 0.0, 1.0, 1.0])):
        given: Any = std if isinstance(std, float) else {"p": std}
        with pytest.raises(pg.PrivacyError, match="to be finite numbers > 0"):
            optimizer.step(grad=NoisyGradient({"p": torch.ones(4)}, given))
    assert not parameter.any()
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD, Nesterov", "Adam", "AdamW", "NAdam", "RMSprop, momentum", "AdamBC"])
def test_weights_in_half_precision_are_updated_in_float32_and_resume(name: str, dtype: torch.dtype):
    kind, options, _, _ = ROWS[name]
    generator = torch.Generator().manual_seed(0)
    gradients = [NoisyGradient({"p": STD * torch.randn(64, generator=generator)}, STD) for _ in range(8)]

    def stepped(parameter: nn.Parameter, saved: Any = None) -> PrivateOptimizer:
        optimizer = kind([("p", parameter)], noise_step=STEP, **options)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for gradient in gradients[:4] if saved is None else gradients[4:]:
            optimizer.step(grad=gradient)
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        return optimizer

    wide, narrow = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64, dtype=dtype))
    storage = narrow.data_ptr()
    of_wide, of_narrow = stepped(wide), stepped(narrow)
    assert narrow.dtype == dtype
    assert narrow.data_ptr() == storage
    for key, value in of_wide.state[wide].items():
        torch.testing.assert_close(of_narrow.state[narrow][key], value, rtol=0, atol=0)
    torch.testing.assert_close(narrow.float(), wide.detach(), rtol=0, atol=0)
    twin = nn.Parameter(narrow.detach().clone())
    stepped(twin, copy.deepcopy(of_narrow.state_dict()))
    stepped(wide, copy.deepcopy(of_wide.state_dict()))
    torch.testing.assert_close(twin.float(), wide.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_a_copy_knows_which_rate_was_given(copied: Any):
    for name in ("lr", "noise_step"):
        optimizer = copied(pg.optim.Adam([("p", nn.Parameter(torch.zeros(4)))], **{name: STEP}))
        optimizer.add_param_group({"params": [("q", nn.Parameter(torch.zeros(1)))]})
        assert [group["lr_is_noise_step"] for group in optimizer.param_groups] == [name == "noise_step"] * 2
        assert [group["lr"] for group in optimizer.param_groups] == [STEP] * 2


def test_an_option_that_rules_it_out_is_refused_when_it_is_set_later():
    optimizer, parameter = made(pg.optim.AdamBC, noise_step=STEP)
    optimizer.param_groups[0]["gamma_prime"] = 1e-8
    with pytest.raises(pg.PrivacyError, match="gamma_prime, which is in gradient units"):
        optimizer.step(grad=NoisyGradient({"p": torch.ones(4)}, STD))
    assert not parameter.any()


def test_it_can_be_read_after_a_parameter_became_trainable():
    weights = {"p": nn.Parameter(torch.zeros(2)), "q": nn.Parameter(torch.zeros(2), requires_grad=False)}
    by_step = pg.optim.SGD(list(weights.items()), noise_step=STEP)
    by_lr = pg.optim.SGD(list(weights.items()), lr=1.0)
    gradient = NoisyGradient({"p": torch.ones(2)}, {"p": STD})
    by_step.step(grad=gradient)
    by_lr.step(grad=gradient)
    weights["q"].requires_grad_(True)
    assert by_step.noise_step == STEP
    assert math.isnan(by_lr.noise_step)
