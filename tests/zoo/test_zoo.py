"""The released gradient of many architectures equals a loop over single examples, by the default engine."""

import warnings
from typing import Any

import pytest
import torch
from architectures import COUPLED, HAND, SIZE, TRANSFORMERS, Case, make
from torch import Tensor
from torch.utils.data import Dataset

import privgrad as pg
from conftest import make_plan

QUICK = [*HAND, "bert", "swin"]
# Parts of these are computed for each example by itself, with a warning.
TAKEN_WHOLE = {"t5", "mpnet", "deberta_v2", "swin", "longformer", "perceiver", "yolos", "clip"} | (
    HAND.keys() - {"hand_root_param_padding_idx"}
)
KINDS = ["plain", "preconditioned", "BAM"]
pytestmark = pytest.mark.filterwarnings("ignore:PrivateGradient computes")


class Rows(Dataset[dict[str, Tensor]]):
    """The examples of a case as a data set."""

    def __init__(self, examples: dict[str, Tensor]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self._examples.items()}


def of_one(case: Case, index: int, at: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The gradient of one example's loss by autograd, at the weights or at other values."""
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    before = {name: p.data for name, p in named.items()}
    buffers = {name: b.clone() for name, b in case.model.named_buffers()}
    for name, value in (at or {}).items():
        named[name].data = value
    losses = case.losses(case.model, {name: value[index : index + 1] for name, value in case.examples.items()})
    grads = torch.autograd.grad(losses.sum(), list(named.values()), allow_unused=True, materialize_grads=True)
    for name, p in named.items():
        p.data = before[name]
    for name, buffer in case.model.named_buffers():
        buffer.data.copy_(buffers[name])
    return dict(zip(named, grads, strict=True))


def norm_of(grads: dict[str, Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads.values()]).norm()


def summed(case: Case, kind: str, scales: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The median norm C, and the mean of the gradients, each divided by the scales and clipped to C."""
    rows: list[dict[str, Tensor]] = []
    for index in range(SIZE):
        row = of_one(case, index)
        if kind == "BAM":
            norm, weights = norm_of(row), dict(case.model.named_parameters())
            row = of_one(case, index, {name: weights[name].detach() + 0.05 * g / norm for name, g in row.items()})
        rows.append({name: grad / scales[name] for name, grad in row.items()})
    norms = torch.stack([norm_of(row) for row in rows])
    bound = float(norms.median())
    shares = (bound / norms).clamp(max=1.0)
    sums = {name: torch.stack([row[name] * s for row, s in zip(rows, shares, strict=True)]).sum(0) for name in rows[0]}
    return bound, {name: total / SIZE for name, total in sums.items()}


def released(case: Case, bound: float, **options: Any) -> pg.NoisyGradient:
    """The gradient of one step, without noise."""
    numbers: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": SIZE, "num_examples": SIZE}
    plan = make_plan(**numbers, noise_multiplier=0.0, max_grad_norm=bound, seed=0)
    private_grad = pg.PrivateGradient(case.model, case.losses, plan, **options)
    return private_grad(next(iter(plan.batches(Rows(case.examples)))))


def compare(name: str, kind: str) -> None:
    """Hold a released gradient without noise to the loop."""
    case, loop = make(name), make(name)
    named = {n: p for n, p in case.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(7)
    scales = {n: torch.ones_like(p) for n, p in named.items()}
    if kind == "preconditioned":
        scales = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype).exp() for n, p in named.items()}
    bound, wanted = summed(loop, kind, scales)
    options: dict[str, Any] = {"perturb": pg.perturb.BAM(0.05)} if kind == "BAM" else {}
    if kind == "preconditioned":
        options["precondition"] = pg.precondition.fixed(pg.Scales(scales, provenance="public data", source="a test"))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = released(case, bound, **options)
    assert any("PrivateGradient computes" in str(warning.message) for warning in given) == (name in TAKEN_WHOLE)
    whole = norm_of(wanted)
    assert whole > 0
    for parameter, value in wanted.items():
        assert (found[parameter] - value).norm() <= 1e-8 * value.norm() + 1e-10 * whole, parameter


@pytest.mark.parametrize("name", QUICK)
def test_a_few_architectures(name: str):
    compare(name, "plain")


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_are_refused(name: str):
    with pytest.raises(pg.PrivacyError, match=r"depend on its own example only|keeps examples apart"):
        released(make(name), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*HAND, *TRANSFORMERS])
def test_all_architectures(name: str, kind: str):
    compare(name, kind)
