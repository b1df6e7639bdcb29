"""Our optimizers under Opacus' engine: they know its noise, and train as under our own private_grad."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from conftest import account_by_rdp, first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import epsilon
from privgrad.statement import statement
from scripts import example

pytest.importorskip("opacus")
import opacus.optimizers.optimizer as opacus_optimizer
from opacus import GradSampleModule, PrivacyEngine, privacy_engine
from opacus.optimizers import DistributedDPOptimizer
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.testing._internal.distributed.fake_pg import FakeStore

from privgrad.integrations.opacus import connect, plan_of

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("Secure RNG turned off", "Full backward hook is firing", "Optimal order is the largest alpha")
]
SIGMA, C, BATCH = 2.0, 0.5, 8


def private(model: nn.Module, optimizer: Any, data: TensorDataset | None = None, **options: Any) -> tuple[Any, ...]:
    numbers: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
    loader = DataLoader(make_data() if data is None else data, batch_size=BATCH)
    return PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **(numbers | options))


def test_a_script_equals_our_own_run_on_the_same_batches_and_noise(monkeypatch: pytest.MonkeyPatch):
    data, theirs, ours = make_data(dtype=torch.float64), make_model(torch.float64), make_model(torch.float64)
    inner = pg.optim.AdamBC(theirs.named_parameters(), lr=0.02, debias_floor=0.041)
    model, optimizer, loader = private(theirs, inner, data)
    connect(optimizer)
    plan = plan_of(optimizer, loader, num_examples=32, epochs=5, delta=1e-3, seed=3)

    private_grad = pg.PrivateGradient(ours, loss_fn, plan)
    noise: list[Tensor] = []

    def note(step: Any) -> None:
        noise.extend((step.released[name] - step.raw_mean[name]) * BATCH for name in step.raw_mean)

    private_grad.register_raw_observer(note)
    own = pg.optim.AdamBC(ours.named_parameters(), lr=0.02, debias_floor=0.041)
    monkeypatch.setattr(opacus_optimizer, "_generate_noise", lambda **_: noise.pop(0))
    updates = 0
    for batch in plan.batches(data):
        own.step(grad=private_grad(batch))
        inputs, labels = batch.examples
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        updates += 1
        assert inner.param_groups[0]["noise_std"] == pytest.approx(own.param_groups[0]["noise_std"], rel=1e-12)
        for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert (one - other).abs().max() < 1e-6
    assert updates == plan.steps == 20
    assert noise == []
    assert own.fraction_floored() < 1
    start = make_model(torch.float64)
    assert (next(ours.parameters()) - next(start.parameters())).abs().max() > 0.01


class Indifferent(nn.Module):
    """Its gradients are zero, so that what is released is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4000)

    def forward(self, inputs: Tensor) -> Tensor:
        return 0.0 * self.layer(inputs)


def step_of(optimizer: Any, model: Any, *, batches: int = 1, criterion: Any = None) -> pg.NoisyGradient:
    """What the optimizer within is given when Opacus' steps after so many backward passes."""
    seen: list[pg.NoisyGradient] = []
    connect(optimizer).original_optimizer.register_step_pre_hook(lambda *given: seen.append(given[2]["grad"]))
    inputs, labels = make_data(BATCH).tensors
    optimizer.zero_grad()
    for _ in range(batches):
        (criterion or F.cross_entropy)(model(inputs), labels).backward()
    optimizer.step()
    (gradient,) = seen
    return gradient


def assert_noise_is_known(gradient: pg.NoisyGradient, expected_std: float) -> None:
    values = torch.cat([value.flatten() for value in gradient.values()])
    measured, error = values.std().item(), expected_std / math.sqrt(2 * len(values))
    assert gradient.noise_std == pytest.approx(expected_std)
    assert abs(measured - expected_std) < 4 * error < 0.1 * expected_std


WAYS: dict[str, tuple[dict[str, Any], int, float]] = {
    "averaged": ({}, 1, SIGMA * C / BATCH),
    "summed": ({"loss_reduction": "sum"}, 1, SIGMA * C),
    "accumulated": ({"poisson_sampling": False}, 3, SIGMA * C / (3 * BATCH)),
    "accumulated and summed": ({"poisson_sampling": False, "loss_reduction": "sum"}, 3, SIGMA * C),
    "by layer": ({"clipping": "per_layer", "max_grad_norm": [0.3, 0.4]}, 1, SIGMA * 0.5 / BATCH),
}


@pytest.mark.parametrize(("options", "batches", "expected_std"), WAYS.values(), ids=WAYS)
def test_the_noise_is_known_however_opacus_divides(options: dict[str, Any], batches: int, expected_std: float):
    torch.manual_seed(0)
    inner = pg.optim.AdamBC((model := Indifferent()).named_parameters(), lr=1e-3)
    module, optimizer, _ = private(model, inner, **options)
    assert_noise_is_known(step_of(optimizer, module, batches=batches), expected_std)


def test_the_noise_is_known_under_ghost_clipping():
    torch.manual_seed(0)
    inner = pg.optim.AdamBC((model := Indifferent()).named_parameters(), lr=1e-3)
    module, optimizer, criterion, _ = private(model, inner, grad_sample_mode="ghost")
    assert_noise_is_known(step_of(optimizer, module, criterion=criterion), SIGMA * C / BATCH)


def test_the_noise_is_known_after_it_was_scheduled():
    torch.manual_seed(0)
    inner = pg.optim.AdamBC((model := Indifferent()).named_parameters(), lr=1e-3)
    module, optimizer, _ = private(model, inner)
    ExponentialNoise(optimizer, gamma=0.25).step()
    assert_noise_is_known(step_of(optimizer, module), 0.25 * SIGMA * C / BATCH)


def test_the_noise_is_known_in_several_processes():
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        inner = pg.optim.AdamBC((model := Indifferent()).named_parameters(), lr=1e-3)
        numbers: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": BATCH // 2}
        optimizer = DistributedDPOptimizer(inner, **numbers)
        assert_noise_is_known(step_of(optimizer, GradSampleModule(model)), SIGMA * C / BATCH)
    finally:
        dist.destroy_process_group()


def test_opacus_own_loop_trains_with_its_own_batches():
    """Poisson batches of Opacus, empty ones among them."""
    torch.manual_seed(0)
    model = make_model()
    inner = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    module, optimizer, loader = private(model, inner, data=make_data(40))
    connect(optimizer)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert inner.state[next(model.parameters())]["step"] == len(loader)


def test_batches_taken_in_parts_are_one_step():
    torch.manual_seed(0)
    model = Indifferent()
    inner = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    module, optimizer, loader = private(model, inner)
    seen: list[pg.NoisyGradient] = []
    connect(optimizer)
    inner.register_step_pre_hook(lambda *given: seen.append(given[2]["grad"]))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        for inputs, labels in parts:
            optimizer.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimizer.step()
    assert len(seen) == len(loader)
    for gradient in seen:
        assert_noise_is_known(gradient, SIGMA * C / BATCH)


def unwrapped(model: nn.Module, inner: Any) -> Any:
    return inner


def adaptive(model: nn.Module, inner: Any) -> Any:
    adapt: dict[str, Any] = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 2.0}
    further: dict[str, Any] = {"min_clipbound": 0.1, "unclipped_num_std": 3.0}
    return private(model, inner, clipping="adaptive", **adapt, **further)[1]


def ordinary(model: nn.Module, inner: Any) -> Any:
    return private(model, torch.optim.Adam(model.parameters()))[1]


@pytest.mark.parametrize(("make", "got"), [(unwrapped, "AdamBC"), (adaptive, "AdaClipDPOptimizer"), (ordinary, "Adam")])
def test_what_has_no_known_noise_is_refused(make: Callable[[nn.Module, Any], Any], got: str):
    model = make_model()
    with pytest.raises(pg.PrivacyError, match=rf"connect: expected .*, got {got};"):
        connect(make(model, pg.optim.AdamBC(model.named_parameters(), lr=1e-3)))


def test_no_step_without_the_bridge_or_without_noise():
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    inner = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    module, optimizer, _ = private(model, inner)
    inputs, labels = make_data(BATCH).tensors
    F.cross_entropy(module(inputs), labels).backward()
    with pytest.raises(pg.PrivacyError, match=r"one of grad and closure to be given, got 0; .*opacus\.connect"):
        optimizer.step()
    connect(optimizer)
    optimizer.zero_grad()
    F.cross_entropy(module(inputs), labels).backward()
    with pytest.raises(pg.PrivacyError, match="to hold Opacus' noise, got no sum of Opacus"):
        inner.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_opacus_has_noised_serves_once(rank: int):
    """After a step, a gradient without noise is not taken for the next one, whatever is cleared by hand."""
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        inner = pg.optim.AdamBC((model := make_model()).named_parameters(), lr=1e-3)
        numbers: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": BATCH}
        module, optimizer = cast(Any, GradSampleModule(model)), DistributedDPOptimizer(inner, **numbers)
        connect(connect(optimizer))  # a notebook's cell may be run again
        inputs, labels = make_data(BATCH).tensors
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in cast(Any, model.parameters()):
            parameter.grad_sample = parameter.grad = None
        F.cross_entropy(module(inputs), labels).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        with pytest.raises(pg.PrivacyError, match="to hold Opacus' noise, got a sum that an earlier step used"):
            inner.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    finally:
        dist.destroy_process_group()


def test_the_plan_of_a_script_has_its_numbers_and_its_epsilon():
    model, engine = make_model(), cast(Any, PrivacyEngine())
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(make_data(320), batch_size=BATCH),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
    )
    plan = plan_of(optimizer, loader, num_examples=320, epochs=3, delta=1e-3)
    assert (plan.sample_rate, plan.steps, plan.expected_batch_size) == (1 / 40, 120, BATCH)
    assert (plan.noise_multiplier, plan.max_grad_norm, plan.divisor) == (SIGMA, C, BATCH)
    engine.accountant.history = [(SIGMA, 1 / 40, 120)]
    assert plan.epsilon() == pytest.approx(engine.get_epsilon(1e-3), rel=0.05)
    with pytest.raises(pg.PrivacyError, match="expected_batch_size to be sample_rate"):
        plan_of(optimizer, loader, num_examples=400, epochs=3, delta=1e-3)


def test_scripts_that_no_plan_describes_are_refused():
    model = make_model()
    _, optimizer, loader = private(model, torch.optim.SGD(model.parameters()), poisson_sampling=False)
    with pytest.raises(pg.SamplingError, match='poisson_sampling=True, or plan sampling="epochs"'):
        plan_of(optimizer, loader, num_examples=32, epochs=1, delta=1e-3)
    model = make_model()
    _, optimizer, loader = private(model, torch.optim.SGD(model.parameters()), loss_reduction="sum")
    with pytest.raises(pg.PrivacyError, match="got DPOptimizer with loss_reduction 'sum'"):
        plan_of(optimizer, loader, num_examples=32, epochs=1, delta=1e-3)


def step(module: nn.Module, optimizer: Any, data: TensorDataset, times: int = 1) -> None:
    inputs, labels = data[:BATCH]
    for _ in range(times):
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("way", ["connect", "plan_of", "plan_of, and later steps", "both"])
def test_a_model_that_opacus_trained_is_known_as_trained(way: str, accountant: str):
    data, model = make_data(), make_model()
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if way != "plan_of" and not way.startswith("plan_of,"):
        inner = pg.optim.SGD(model.named_parameters(), lr=0.1)
    engine = PrivacyEngine(accountant=accountant)
    loader: Any = DataLoader(data, batch_size=BATCH)
    made: Any = engine.make_private(
        module=model, optimizer=inner, data_loader=loader, noise_multiplier=SIGMA, max_grad_norm=C
    )
    module, optimizer, loader = made
    if way in ("connect", "both"):
        connect(optimizer)
    step(module, optimizer, data, 3)
    if way != "connect":
        plan_of(optimizer, loader, num_examples=32, epochs=2, delta=1e-3)
    if way == "plan_of, and later steps":
        step(module, optimizer, data, 2)
    (ledger,) = pg.ledgers_of(module.to_standard_module())
    assert ledger.releases == (5 if "later" in way else 3)
    assert [(one.noise_multiplier, one.sample_rate, one.count) for one in ledger.charged] == engine.accountant.history
    assert ledger.plan_facts["num_examples"] == 32
    assert ledger.plan_facts["sampling"] == ("fixed" if way == "connect" else "poisson"), "only a loader shows it"
    assert ledger.plan_facts["delta"] == (None if way == "connect" else 1e-3)
    plan, wider = make_plan(sample_rate=1.0, expected_batch_size=32, num_examples=32), nn.Sequential(model)
    for later, before in ((wider, ledger.releases), (model, ledger.releases + 1)):  # the parameters decide
        with pytest.warns(UserWarning, match=f"trained before, with {before} releases"):
            pg.PrivateGradient(later, loss_fn, plan)(first_batch(plan, data))


def test_releases_under_a_schedule_of_opacus_are_known():
    data, model = make_data(), make_model()
    module, optimizer, _ = private(model, pg.optim.SGD(model.named_parameters(), lr=0.1))
    connect(optimizer)
    schedule = ExponentialNoise(optimizer, gamma=0.5)
    for _ in range(3):
        step(module, optimizer, data)
        schedule.step()
    found = {ledger.plan_facts["noise_multiplier"]: ledger.releases for ledger in pg.ledgers_of(model)}
    assert found == {SIGMA: 1, SIGMA / 2: 1, SIGMA / 4: 1}
    assert statement(pg.ledgers_of(model), delta=1e-3).numbers["releases"] == 3


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(privacy_engine, "get_noise_multiplier", lambda **_: SIGMA)
    theirs, ours = example("opacus_bridge", monkeypatch)(epochs=1)
    assert 0 <= theirs <= 1
    assert 0 <= ours <= 1


def test_a_model_that_opacus_trained_counts_both_trainings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(privacy_engine, "get_noise_multiplier", lambda **_: SIGMA)
    model, data, engine = make_model(), make_data(200), cast(Any, PrivacyEngine())
    private_model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=pg.optim.AdamBC(model.named_parameters(), noise_step=0.005),
        data_loader=DataLoader(data, batch_size=20),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    connect(optimizer)
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(private_model(inputs), labels).backward()
            optimizer.step()
    plan = plan_of(optimizer, loader, num_examples=200, epochs=2, delta=1e-5)
    model = private_model.to_standard_module()
    own = pg.optim.AdamBC(model.named_parameters(), noise_step=0.005)
    ours = pg.fit(pg.PrivateGradient(model, loss_fn, plan), own, data, progress=False).ledger.epsilon(delta=1e-5)
    both = [release for ledger in pg.ledgers_of(model) for release in ledger.charged]
    assert [release.count for release in both] == [20, 20]
    together = statement(pg.ledgers_of(model)).numbers["epsilon"]
    assert together == pytest.approx(epsilon(both, delta=1e-5))
    assert together > 1.2 * ours
    assert ours == pytest.approx(engine.get_epsilon(1e-5), rel=0.05)
    assert plan.expected_batch_size == 20


def test_the_documents_script_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    account_by_rdp(monkeypatch)
    document = Path(__file__).parents[2] / "docs" / "migration.md"
    script = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)[0]
    text = "EPOCHS, BATCH_SIZE, STOP_AT = 20, 120, 3.0"
    assert text in script

    def ran(stop: float) -> tuple[list[str], dict[str, Any]]:
        names: dict[str, Any] = {}
        exec(script.replace(text, f"EPOCHS, BATCH_SIZE, STOP_AT = 3, 120, {stop}"), names)
        names["ledger"].close()
        return re.findall(r"^epoch (\d):", capsys.readouterr().out, re.MULTILINE), names

    epochs, before = ran(2.4)
    assert epochs == ["1"]
    plan = before["plan"]
    assert plan.epsilon(steps=12) < 2.4 < plan.epsilon(steps=24)  # it stops before it exceeds the number
    epochs, after = ran(3.0)
    assert epochs == ["2", "3"]
    assert after["statement"].numbers["releases"] == 36
    assert not torch.equal(before["model"][9].weight, after["model"][9].weight)
