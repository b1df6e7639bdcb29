"""Each name of hosts/opacus.py that a script may use with connect or plan_of is tried in one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import privgrad as pg
from conftest import make_data, make_model

pytest.importorskip("opacus")
import opacus.optimizers as optimizers
import opacus.schedulers as schedulers
from hosts.opacus import FATES
from opacus import PrivacyEngine

from privgrad.integrations.opacus import connect, plan_of

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in ("Secure RNG turned off", "Full backward hook is firing", "Optimal order is the largest alpha")
]
SIGMA, C, BATCH = 2.0, 0.5, 8


def script(**options: Any) -> tuple[Any, ...]:
    model = make_model()
    inner = pg.optim.SGD(model.named_parameters(), lr=0.1)
    numbers: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": C}
    loader = DataLoader(make_data(), batch_size=BATCH)
    module, optimizer, *criterion, loader = PrivacyEngine().make_private(
        module=model, optimizer=inner, data_loader=loader, **(numbers | options)
    )
    return (
        module if options.get("wrap_model", True) else model,
        connect(optimizer),
        (*criterion, F.cross_entropy)[0],
        loader,
    )


def step(module: Any, optimizer: Any, criterion: Any) -> Any:
    seen = list[Any]()
    inputs, labels = make_data()[:BATCH]
    watching = optimizer.original_optimizer.register_step_pre_hook(
        lambda one, args, kwargs: seen.append(kwargs["grad"])
    )
    optimizer.zero_grad()
    criterion(module(inputs), labels).backward()
    optimizer.step()
    watching.remove()
    return seen[0]


OPTIONS: dict[str, Any] = {
    "loss_reduction": "sum",
    "poisson_sampling": False,
    "clipping": "per_layer",
    "noise_generator": torch.Generator(),
    "grad_sample_mode": "functorch",
    "criterion": torch.nn.CrossEntropyLoss(),
    "wrap_model": False,
    "rand_on_empty": True,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_are_taken(name: str):
    options = {name: OPTIONS[name]}
    if name == "clipping":
        options["max_grad_norm"] = [C / 2] * len(list(make_model().parameters()))
    if name == "criterion":
        options["grad_sample_mode"] = "ghost"
    module, optimizer, criterion, loader = script(**options)
    released = step(module, optimizer, criterion)
    divisor = 1 if name == "loss_reduction" else BATCH
    assert released.noise_std == pytest.approx(SIGMA * optimizer.max_grad_norm / divisor)
    if name in ("loss_reduction", "poisson_sampling", "clipping"):
        with pytest.raises(pg.PrivacyError, match=r"PrivacyPlan by hand|poisson_sampling=True"):
            plan_of(optimizer, loader, num_examples=32, epochs=1, delta=1e-3)
    else:
        assert plan_of(optimizer, loader, num_examples=32, epochs=1, delta=1e-3).steps == 4


@pytest.mark.parametrize("name", optimizers.__all__)
def test_optimizers_are_taken_or_refused(name: str):
    kind = getattr(optimizers, name, None) or optimizers.DistributedDPOptimizerFastGradientClipping
    with pytest.raises((pg.PrivacyError, AttributeError)) as error:  # without what __init__ sets
        connect(object.__new__(kind))
    refused = isinstance(error.value, pg.PrivacyError)
    assert FATES[f"optimizers.{name}"].startswith("refused" if refused else "taken")


@pytest.mark.parametrize("name", [name for name in dir(schedulers) if name[0].isupper()])
def test_schedulers_are_followed(name: str):
    module, optimizer, criterion, _ = script()
    half: dict[str, Any] = {"gamma": 0.5}
    if name.startswith("Lambda"):
        half = {"noise_lambda" if "Noise" in name else "scheduler_function": lambda epoch: 0.5**epoch}
    schedule = getattr(schedulers, name)(optimizer, **half, **({"step_size": 1} if "Step" in name else {}))
    first = step(module, optimizer, criterion).noise_std
    schedule.step()
    assert step(module, optimizer, criterion).noise_std == pytest.approx(first / 2)
    assert sum(ledger.releases for ledger in pg.ledgers_of(module)) == 2
