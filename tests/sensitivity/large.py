"""Large batches of few kinds of rows, whose rounding errors may all have one direction.

One more row moves all later ones to other places of a matrix product. Each case is one pair of batches, of 1,000 to
20,000 rows, which differ by one row. A seed and a number determine it.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.clip.clipping import ClippingAccumulator, Flat
from privgrad.gradient.factor import Dense
from privgrad.gradient.functional import seeded, trainable
from privgrad.private_gradient import RawStep
from tests.sensitivity.search import quiet

ORDERS: dict[str, Callable[[int], Tensor]] = {
    "aligned": lambda size: torch.zeros(size, dtype=torch.long),
    "alternating": lambda size: torch.arange(size) % 2,
    "random": lambda size: torch.randint(2, (size,)),
    "all different": lambda size: torch.arange(size),
}
WAYS = {"factored": 5, "vmap": 1, "accumulator": 4}
MODELS = ("linear", "linear", "logistic", "MLP", "positions")


@dataclass(frozen=True)
class Large:
    """One pair and what came of it.

    Attributes:
        rows: of the smaller batch.
        expected: the public size.
        place: of the row that one of the two lacks.
        change: L2 norm of the change of the clipped sum, over C.
    """

    number: int
    way: str
    model: str
    order: str
    width: int
    outputs: int
    rows: int
    expected: int
    place: int
    bound: float
    change: float


def setting() -> str:
    """Return what decides how torch adds up, besides the data."""
    own = [f"{name}={os.environ[name]}" for name in ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR") if name in os.environ]
    return ", ".join([f"ATen {torch.backends.cpu.get_cpu_capability()}", *own, f"{torch.get_num_threads()} threads"])


def run_large(seed: int, number: int) -> Large:
    """Draw a pair of batches and compare their clipped sums."""
    rng = random.Random(f"large {seed} {number}")
    torch.manual_seed(rng.getrandbits(60))
    order, rows = rng.choice(list(ORDERS)), int(1000 * 20 ** rng.random())
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    model, width, outputs = rng.choice(MODELS), rng.choice((1, 2, 4, 16, 33, 64)), rng.choice((1, 1, 2, 10, 40))
    # A float64 sum shows nothing: fewer than 1e4 contributions are expected.
    expected = min(10_000, rng.choice((rows, rows, rows, rows - 1, rows // 2)))
    bound = rng.choice((1.0, 0.4556, 10.0 ** rng.uniform(-2, 2)))
    place = rng.choice((0, rows // 3, rows, rng.randrange(rows + 1)))
    kinds = torch.randn(rows if order == "all different" else 2, width)
    kinds = rng.choice((1.0, 1e3)) * (kinds + rng.choice((0.0, 1.0)))
    fewer = kinds[ORDERS[order](rows)]
    more = torch.cat([fewer[:place], kinds[:1] if rng.random() < 0.5 else torch.randn(1, width), fewer[place:]])
    with quiet(), seeded(0):
        if way == "accumulator":
            change = _of_accumulator(more, bound, expected) - _of_accumulator(fewer, bound, expected)
        else:
            net, loss = _model(model, width, outputs)
            one_pass = rng.random() < 0.5 and way == "factored"
            options: dict[str, Any] = {"engine": way, "microbatch_size": rows + 1 if one_pass else None}
            sums = [_of_private_gradient(net, loss, each, bound, expected, options) for each in (more, fewer)]
            change = sums[0] - sums[1]
    length = float(change.norm()) / bound
    return Large(number, way, model, order, width, outputs, rows, expected, place, bound, length)


def _of_accumulator(rows: Tensor, bound: float, expected: int) -> Tensor:
    accumulator = ClippingAccumulator(
        like={"p": torch.zeros(rows.shape[1])}, clip=Flat(), max_grad_norm=bound, expected_size=expected
    )
    accumulator.add({"p": Dense(rows)})
    return accumulator.result()[0].values["p"].double()


def _model(name: str, width: int, outputs: int) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    if name == "logistic":
        return nn.Linear(width, outputs + 1), lambda model, x: _classified(model(x[0]))
    if name == "MLP":
        net = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, outputs + 1))
        return net, lambda model, x: _classified(model(x[0]))
    if name == "positions":
        return nn.Linear(width, outputs), lambda model, x: model(x[0][:, None].expand(-1, 5, -1)).sum((1, 2))
    return nn.Linear(width, outputs, bias=False), lambda model, x: model(x[0]).sum(1)


def _classified(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="none")


def _of_private_gradient(
    model: nn.Module, loss: Any, rows: Tensor, bound: float, expected: int, options: dict[str, Any]
) -> Tensor:
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=1,
        expected_batch_size=expected,
        noise_multiplier=1.0,
        max_grad_norm=bound,
        num_examples=expected,
    )
    private_grad, seen = pg.PrivateGradient(model, loss, plan, **options), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    private_grad(next(iter(plan.batches(TensorDataset(rows)))))
    return torch.cat([seen[0].raw_mean[name].double().flatten() for name in trainable(model)]) * plan.divisor
