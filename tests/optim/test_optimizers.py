"""Every optimizer x every check. Adding one is a row in OPTIMIZERS."""

import copy
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan, using_threads
from privgrad.types import NoisyGradient

# ours, torch's own, options, torch's options where they differ
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "SGD": (pg.optim.SGD, torch.optim.SGD, {"lr": 0.1}, {}),
    "SGD momentum": (pg.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
    "Adam": (pg.optim.Adam, torch.optim.Adam, {"lr": 0.01}, {}),
    "NAdam": (pg.optim.NAdam, torch.optim.NAdam, {"lr": 0.01}, {}),
    "RMSprop": (pg.optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01}, {}),
    "Adagrad": (pg.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.01}, {}),
    "AdamW": (pg.optim.AdamW, torch.optim.AdamW, {"lr": 0.01}, {}),
    # torch adds eps outside the root, we floor inside it: with gradients far above both they agree.
    "AdamBC": (pg.optim.AdamBC, torch.optim.Adam, {"lr": 0.01}, {"eps": 1e-12}),
    "AdamWBC": (pg.optim.AdamWBC, torch.optim.AdamW, {"lr": 0.01}, {"eps": 1e-12}),
    "NAdamBC": (pg.optim.NAdamBC, torch.optim.NAdam, {"lr": 0.01}, {"eps": 1e-12}),
    "RMSpropBC": (pg.optim.RMSpropBC, torch.optim.RMSprop, {"lr": 0.01}, {"eps": 1e-12}),
    "AdagradBC": (pg.optim.AdagradBC, torch.optim.Adagrad, {"lr": 0.01}, {"eps": 1e-12}),
    # torch's momentum without the startup correction: not the same, and not compared.
    "MomentumSGD": (pg.optim.MomentumSGD, None, {"lr": 0.1}, {}),
    "Yogi": (pg.optim.Yogi, None, {"lr": 0.01}, {}),
    "Muon": (pg.optim.Muon, None, {"lr": 0.01}, {}),  # torch's computes in bfloat16: see the reference tests
    "MuonBC": (pg.optim.MuonBC, None, {"lr": 0.01}, {}),
    "MicroAdam": (pg.optim.MicroAdam, None, {"lr": 0.01, "density": 0.3}, {}),
}
DEBIASED = ["AdamBC", "AdamWBC", "NAdamBC", "RMSpropBC", "AdagradBC"]


@pytest.fixture(params=OPTIMIZERS)
def row(request: pytest.FixtureRequest) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    return OPTIMIZERS[request.param]


def noisy(model: nn.Module, noise_std: Any = 0.1, seed: int = 0) -> NoisyGradient:
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    return NoisyGradient(values, noise_std)


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_the_learning_rate_may_be_positional(row: Any):
    ours, _, options, _ = row
    others = {name: value for name, value in options.items() if name != "lr"}
    optimizer = ours(make_model().named_parameters(), options["lr"], **others)
    assert [group["lr"] for group in optimizer.param_groups] == [options["lr"]]


def test_without_noise_and_clipping_equals_torchs_own(row: Any):
    ours, theirs, options, torch_options = row
    if theirs is None:
        return
    plan = make_plan(sample_rate=1.0, expected_batch_size=32, steps=50, noise_multiplier=0.0, max_grad_norm=math.inf)
    data = make_data(dtype=torch.float64)
    private, ordinary = make_model(torch.float64), make_model(torch.float64)
    private_grad = pg.PrivateGradient(private, loss_fn, plan)
    optimizer = ours(private.named_parameters(), **options)
    reference = theirs(ordinary.parameters(), **(options | torch_options))
    for batch in plan.batches(data):
        optimizer.step(grad=private_grad(batch))
        reference.zero_grad()
        loss_fn(ordinary, data.tensors).mean().backward()  # pyright: ignore[reportArgumentType]
        reference.step()
        for mine, theirs_p in zip(private.parameters(), ordinary.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs_p, rtol=0, atol=1e-7)
    assert private_grad.ledger.epsilon(delta=1e-5) == math.inf


def test_refuses_anything_but_a_noisy_gradient(row: Any):
    ours, _, options, _ = row
    model = make_model()
    optimizer, before = ours(model.named_parameters(), **options), parameters(model)
    gradient = noisy(model)
    with pytest.raises(pg.PrivacyError, match="NoisyGradient"):
        optimizer.step(grad=dict(gradient))  # pyright: ignore[reportArgumentType]
    with pytest.raises(pg.PrivacyError, match="exactly one of grad and closure to be given, got 0"):
        optimizer.step()
    with pytest.raises(pg.PrivacyError, match="got 2"):
        optimizer.step(lambda: gradient, grad=gradient)
    missing = NoisyGradient({k: v for k, v in gradient.items() if k != "0.bias"}, 0.1)
    with pytest.raises(pg.PrivacyError, match=r"0\.bias"):
        optimizer.step(grad=missing)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))


def test_refuses_parameters_without_names(row: Any):
    ours, _, options, _ = row
    with pytest.raises(pg.PrivacyError, match="named_parameters"):
        ours(make_model().parameters(), **options)


def test_unknown_options_are_refused(row: Any):
    ours, _, options, _ = row
    with pytest.raises(TypeError, match="momentun"):
        ours(make_model().named_parameters(), momentun=0.9, **options)


def test_leaves_no_gradient_behind_and_closure_equals_grad(row: Any):
    ours, _, options, _ = row
    one, two = make_model(), make_model()
    first, second = ours(one.named_parameters(), **options), ours(two.named_parameters(), **options)
    for seed in range(3):
        gradient = noisy(one, seed=seed)
        first.step(grad=gradient)
        second.step(lambda gradient=gradient: gradient)
        assert all(parameter.grad is None for parameter in one.parameters())
    assert all(torch.equal(a, b) for a, b in zip(parameters(one), parameters(two), strict=True))


def test_an_ordinary_backward_pass_moves_nothing(row: Any):
    """What it left in .grad, of a parameter that is frozen by now or not, is private perhaps, and stale."""
    kind, _, options, _ = row
    model = make_model()
    optimizer = kind(model.named_parameters(), **options)
    loss_fn(model, make_data().tensors).sum().backward()  # pyright: ignore[reportArgumentType]
    model[0].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(2):
        optimizer.step(grad=NoisyGradient(values, 0.1))
    assert all(torch.equal(now, then) for now, then in zip(model[0].parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_factored_run_once(row: Any):
    """Also when torch's own class has been used, which hangs hooks on its step."""
    kind, own, options, _ = row
    if own is not None:
        own([nn.Parameter(torch.zeros(1))], **options)
    optimizer = kind([("p", nn.Parameter(torch.zeros(2)))], **options)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step(grad=NoisyGradient({"p": torch.ones(2)}, 0.1))
    assert calls == ["before", "after"]


def test_a_released_gradient_is_only_read(row: Any):
    kind, _, options, _ = row
    more = [
        {"foreach": True},
        {"foreach": True, "nesterov": True, "momentum": 0.9},
        {"foreach": True, "maximize": True},
    ]
    for extra in [{}, *more]:
        try:
            optimizer = kind([("p", nn.Parameter(torch.ones(5)))], **options | extra)
        except TypeError:
            continue
        gradient = NoisyGradient({"p": torch.arange(5.0)}, 0.1)
        for _ in range(3):
            optimizer.step(grad=gradient)
        assert torch.equal(gradient["p"], torch.arange(5.0))


def test_state_of_other_parameters_or_another_optimizer_is_refused(row: Any):
    kind, _, options, _ = row

    def make(*names: str) -> Any:
        return kind([(name, nn.Parameter(torch.zeros(2))) for name in names], **options)

    optimizer = make("a", "b")
    optimizer.step(grad=NoisyGradient({"a": torch.ones(2), "b": torch.ones(2)}, 0.1))
    with pytest.raises(pg.PrivacyError, match="param_names"):
        make("b", "a").load_state_dict(optimizer.state_dict())
    with pytest.raises(pg.PrivacyError, match="param_names"):
        make("a").load_state_dict(optimizer.state_dict())
    for other, *_ in OPTIMIZERS.values():
        stranger = other([("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.zeros(2)))], lr=0.1)
        if stranger.defaults.keys() != optimizer.defaults.keys():
            with pytest.raises(pg.PrivacyError, match="options"):
                stranger.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "noise_std", [-0.1, math.nan, math.inf, None, {"a": 0.1}, {"a": 0.1, "b": torch.tensor([-1.0])}]
)
def test_noise_that_cannot_be_is_refused_before_anything_moves(row: Any, noise_std: Any):
    kind, _, options, _ = row
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
    optimizer = kind(list(parameters.items()), **options)
    with pytest.raises((pg.PrivacyError, TypeError, KeyError)):
        optimizer.step(grad=NoisyGradient(dict.fromkeys("ab", torch.ones(2)), noise_std))
    assert all(torch.equal(parameter, torch.zeros(2)) for parameter in parameters.values())


def test_options_of_a_group_are_checked_as_the_constructors(row: Any):
    kind, _, options, _ = row
    optimizer = kind([("a", nn.Parameter(torch.zeros(2)))], **options)

    def group(name: str, **wrong: Any) -> dict[str, Any]:
        return {"params": [(name, nn.Parameter(torch.zeros(2)))]} | wrong

    with pytest.raises(pg.PrivacyError, match="lr"):
        kind([group("a"), group("b", lr=-1.0)], **options)
    with pytest.raises(pg.PrivacyError, match="lr"):
        optimizer.add_param_group(group("b", lr=-1.0))
    with pytest.raises(pg.PrivacyError, match="learning_rate"):
        optimizer.add_param_group(group("b", learning_rate=1.0))
    with pytest.raises(pg.PrivacyError, match="names"):
        optimizer.add_param_group(group("a"))
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(group("b", lr=np.float64(0.5)))
    assert type(optimizer.param_groups[1]["lr"]) is float


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*DEBIASED, "MomentumSGD", "Yogi"])
def test_moments_of_half_precision_parameters_are_wide(name: str, dtype: torch.dtype, tmp_path: Any):
    """The same state as for float32 parameters, through a checkpoint too: squares of 1e-3 would underflow."""
    torch.manual_seed(0)
    kind, _, options, _ = OPTIMIZERS[name]
    narrow, wide = (nn.Parameter(torch.zeros(2000, dtype=d)) for d in (dtype, torch.float32))
    optimizers = [kind([("p", parameter)], **options) for parameter in (narrow, wide)]
    for step in range(20):
        gradient = NoisyGradient({"p": 1e-3 * torch.randn(2000)}, 1e-3)
        for optimizer in optimizers:
            optimizer.step(grad=gradient)
        if step == 10:
            torch.save(optimizers[0].state_dict(), tmp_path / "state.pt")
            optimizers[0] = kind([("p", narrow)], **options)
            optimizers[0].load_state_dict(torch.load(tmp_path / "state.pt"))
    assert narrow.dtype == dtype
    assert bool(torch.isfinite(narrow).all())
    for key, value in optimizers[1].state[wide].items():
        torch.testing.assert_close(optimizers[0].state[narrow][key], value)


def test_frozen_parameters_stay(row: Any):
    ours, _, options, _ = row
    model = make_model()
    model[0].requires_grad_(False)
    before = parameters(model)
    gradient = noisy(model)
    trained = {name: gradient[name] for name in ("2.weight", "2.bias")}
    ours(model.named_parameters(), **options).step(grad=NoisyGradient(trained, 0.1))
    moved = [not torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True)]
    assert moved == [False, False, True, True]


def test_state_dict_round_trip_continues_identically(row: Any, tmp_path: Any):
    ours, _, options, _ = row
    model = make_model()
    optimizer = ours(model.named_parameters(), **options)
    for seed in range(3):
        optimizer.step(grad=noisy(model, seed=seed))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    restored = ours(other.named_parameters(), **options)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(3, 6):
        optimizer.step(grad=noisy(model, seed=seed))
        restored.step(grad=noisy(other, seed=seed))
    assert all(torch.equal(a, b) for a, b in zip(parameters(model), parameters(other), strict=True))


def test_learning_rate_schedulers_and_groups_work(row: Any):
    ours, _, options, _ = row
    model = make_model()
    groups = [
        {"params": list(model[0].named_parameters(prefix="0"))},
        {"params": list(model[2].named_parameters(prefix="2")), "lr": 0.0},
    ]
    before = parameters(model)
    optimizer = ours(groups, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(grad=noisy(model))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(options["lr"] / 2)
    assert optimizer.param_groups[0]["noise_std"] == 0.1
    moved = [not torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True)]
    assert moved == [True, True, False, False]


def test_adambc_takes_noise_by_name_and_over_time():
    model = make_model(torch.float64)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.01)
    stds = [0.5, 0.1, 0.3]
    for seed, std in enumerate(stds):
        by_name: dict[str, Any] = {name: std for name, _ in model.named_parameters()}
        by_name["0.bias"] = torch.full((4,), 2 * std, dtype=torch.float64)
        optimizer.step(grad=noisy(model, by_name, seed=seed))
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    expected = 0.0
    for std in stds:
        expected = 0.999 * expected + 0.001 * std**2
    assert state["0.weight"]["exp_avg_noise_var"] == pytest.approx(expected)
    torch.testing.assert_close(
        state["0.bias"]["exp_avg_noise_var"], torch.full((4,), 4 * expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_adambc_in_blocks_equals_the_formula_on_whole_tensors(threads: int, by_tensor: bool):
    """Many blocks and a remainder, a layout that cannot be cut, a short one; float64, with and without threads."""
    torch.manual_seed(0)
    shapes = {"long": (1700, 1001), "turned": (300, 200), "short": (7,)}
    start = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    start["turned"] = start["turned"].t()
    ours = {name: nn.Parameter(value.clone(memory_format=torch.preserve_format)) for name, value in start.items()}
    assert not ours["turned"].is_contiguous()
    optimizer = pg.optim.AdamBC(ours.items(), lr=0.01, betas=(0.8, 0.95))
    zeros = {name: torch.zeros_like(value) for name, value in start.items()}
    p, m, v, n = start, zeros, zeros, zeros
    with using_threads(threads):
        for t in (1, 2, 3):
            grads = {name: torch.randn_like(value) for name, value in start.items()}
            std = {
                k: (0.5 + torch.rand_like(x)) / t if by_tensor else torch.full_like(x, 0.7 / t) for k, x in p.items()
            }
            optimizer.step(grad=NoisyGradient(grads, dict(std) if by_tensor else 0.7 / t))
            m = {k: 0.8 * m[k] + 0.2 * g for k, g in grads.items()}
            v = {k: 0.95 * v[k] + 0.05 * g**2 for k, g in grads.items()}
            n = {k: 0.95 * n[k] + 0.05 * s**2 for k, s in std.items()}
            hat = {k: n[k] / (1 - 0.95**t) for k in p}
            floor = {k: 4 * x for k, x in hat.items()}
            root = {k: torch.maximum(v[k] / (1 - 0.95**t) - hat[k], floor[k]).sqrt() for k in p}
            p = {k: p[k] - 0.01 * m[k] / (1 - 0.8**t) / root[k] for k in p}
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.detach(), p[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], v[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("noise_std", [0.3, {"long": 0.3, "other": 0.2, "short": 0.1}])
@pytest.mark.parametrize("name", DEBIASED)
def test_threads_move_parameters_alike_and_end(name: str, noise_std: Any):
    sizes, found, running = {"long": 1_100_000, "other": 200_000, "short": 7}, list[list[torch.Tensor]](), set[int]()
    gradients = [{key: torch.randn(size) for key, size in sizes.items()} for _ in range(2)]
    for threads in (1, 2):
        moved = {key: nn.Parameter(torch.zeros(size)) for key, size in sizes.items()}
        optimizer = OPTIMIZERS[name][0](moved.items(), lr=0.1)
        with using_threads(threads):
            for gradient in gradients:
                optimizer.step(grad=NoisyGradient(gradient, noise_std))
                running.add(threading.active_count())
            assert torch.get_num_threads() == threads
        states = [
            value for p in moved.values() for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)
        ]
        found.append([*moved.values(), *states])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert len(running) == 1


@pytest.mark.parametrize(("floor", "most"), [(0.041, 0.97), (4.0, 1.0)])
@pytest.mark.parametrize("name", DEBIASED)
def test_debiased_steps_are_a_bounded_number_of_learning_rates(name: str, floor: float, most: float):
    """Pure noise: with a floor on the noise's scale no coordinate flies off, whatever the noise's size."""
    for noise_std in (1e-6, 1e-3, 1.0):
        parameter = nn.Parameter(torch.zeros(50_000))
        optimizer = OPTIMIZERS[name][0]([("p", parameter)], lr=1.0, debias_floor=floor)
        generator, largest = torch.Generator().manual_seed(0), 0.0
        for _ in range(200):
            before = parameter.detach().clone()
            optimizer.step(grad=NoisyGradient({"p": noise_std * torch.randn(50_000, generator=generator)}, noise_std))
            largest = max(largest, float((parameter.detach() - before).abs().max()))
        # with 0.041: AdamBC 5.7, AdamWBC 5.3, NAdamBC 14.7, RMSpropBC 22.8; with 4: below 6
        assert largest < (25 if floor < 1 else 6)
        assert 0.5 < optimizer.fraction_floored() <= most


def test_adambc_fraction_floored_counts_coordinates_on_the_floor():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = pg.optim.AdamBC([("p", parameter)], lr=0.0, debias_floor=0.5)
    assert math.isnan(optimizer.fraction_floored())
    optimizer.step(grad=NoisyGradient({"p": torch.tensor([0.1, 1.0, 1.2, 3.0])}, noise_std=0.1))
    assert optimizer.fraction_floored() == 0.25


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"lr": -1.0}) for name in [*DEBIASED, "MomentumSGD", "Yogi"]),
        *((name, {"debias_floor": 0.0}) for name in DEBIASED),
        *((name, {"gamma_prime": 0.0}) for name in DEBIASED),
        *((name, {"betas": betas}) for name in DEBIASED[:3] for betas in ((1.0, 0.9), (0.9, -0.1))),
        *((name, {"floor_rule": "none"}) for name in DEBIASED[:3]),
        ("AdamWBC", {"weight_decay": -1.0}),
        ("NAdamBC", {"momentum_decay": -1.0}),
        ("RMSpropBC", {"alpha": 1.0}),
        ("MomentumSGD", {"momentum": 1.0}),
        ("Yogi", {"betas": (0.9, 1.0)}),
        ("Yogi", {"eps": 0.0}),
        ("Muon", {"momentum": 1.0}),
        ("Muon", {"iterations": 0}),
        ("MuonBC", {"probes": 0}),
        ("MicroAdam", {"betas": (1.0, 0.9)}),
        ("MicroAdam", {"eps": 0.0}),
        ("MicroAdam", {"density": 0.0}),
        ("MicroAdam", {"density": 1.5}),
        ("MicroAdam", {"window": 0}),
    ],
)
def test_refuses_numbers_out_of_range(name: str, options: dict[str, Any]):
    with pytest.raises(pg.PrivacyError, match=f"{name}: expected {next(iter(options))}"):
        OPTIMIZERS[name][0](make_model().named_parameters(), **{"lr": 0.1} | options)


def test_debias_refuses_numbers_out_of_range():
    v = torch.ones(3)
    with pytest.raises(pg.PrivacyError, match="noise_std"):
        pg.optim.debias(v, -0.1, floor=1e-8)
    with pytest.raises(pg.PrivacyError, match="floor"):
        pg.optim.debias(v, 0.1, floor=torch.tensor([1e-8, 0.0, 1.0]))


def test_a_floor_of_041_noise_variances_is_the_papers_tuned_ones():
    # CIFAR-10: sigma C / B = 1/2048 with gamma' 1e-8; SNLI: .4 * .1 / 256 with 1e-9. SPEC 4.3.
    assert pg.optim.noise_floor(1 / 2048, 0.041) == pytest.approx(1e-8, rel=0.03)
    assert pg.optim.noise_floor(0.04 / 256, 0.041) == pytest.approx(1e-9, rel=0.03)
    by_tensor = pg.optim.noise_floor(torch.tensor([0.04 / 256, 0.0]), 0.041)
    torch.testing.assert_close(by_tensor, torch.tensor([1.001e-9, 1e-16]), rtol=1e-3, atol=0)


def test_an_optimizer_of_another_model_is_noticed():
    model, plan = make_model(), make_plan()
    before = pg.optim.SGD(model.named_parameters(), noise_step=0.1)
    copied = copy.deepcopy(model)  # as by pg.fix
    private_grad = pg.PrivateGradient(copied, loss_fn, plan)
    batches = iter(plan.batches(make_data()))
    with pytest.warns(UserWarning, match=r"SGD.step: no parameter of this optimizer belongs to the model"):
        before.step(grad=private_grad(next(batches)))
    pg.optim.SGD(copied.named_parameters(), noise_step=0.1).step(grad=private_grad(next(batches)))
