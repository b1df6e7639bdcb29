"""Compare released gradients without noise with loops over single examples.

`test_zoo` bounds the differences, and `benchmarks.zoo` records them.
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

import privgrad as pg
from tests.zoo.architectures import Case

KINDS = ("plain", "preconditioned", "BAM")
RADIUS = 0.05


class Rows(Dataset[dict[str, Tensor]]):
    """The examples of a case as a data set."""

    def __init__(self, examples: dict[str, Tensor]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(next(iter(self._examples.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self._examples.items()}


def trainable(case: Case) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in case.model.named_parameters() if parameter.requires_grad}


def of_one(case: Case, index: int, at: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The gradient of one example's loss by autograd, at the weights or at other values."""
    named = trainable(case)
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
    return torch.stack([grad.double().norm() for grad in grads.values()]).norm()


def settle(case: Case) -> None:
    """Advance spectral norms by an ordinary forward pass, and stop them there: they advance once per step."""
    norms: list[Any] = [module for module in case.model.modules() if type(module) is parametrizations._SpectralNorm]
    if norms:
        case.losses(case.model, case.examples)
    for norm in norms:
        norm.n_power_iterations = 0


def clipped_mean(case: Case, kind: str, scales: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The median norm C, and the mean of the gradients, each divided by the scales and clipped to C."""
    settle(case)
    rows: list[dict[str, Tensor]] = []
    for index in range(len(Rows(case.examples))):
        row = of_one(case, index)
        if kind == "BAM":
            norm, weights = norm_of(row), trainable(case)
            row = of_one(case, index, {n: weights[n].detach() + (RADIUS * g / norm).to(g) for n, g in row.items()})
        rows.append({name: grad.double() / scales[name].double() for name, grad in row.items()})
    norms = torch.stack([norm_of(row) for row in rows])
    bound = float(norms.median())
    shares = (bound / norms).clamp(max=1.0)
    sums = {name: torch.stack([row[name] * s for row, s in zip(rows, shares, strict=True)]).sum(0) for name in rows[0]}
    return bound, {name: total / len(rows) for name, total in sums.items()}


def released(case: Case, bound: float, **options: Any) -> pg.NoisyGradient:
    """The gradient of one step, without noise."""
    rows = Rows(case.examples)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
        plan = pg.PrivacyPlan(
            sample_rate=1.0, steps=1, expected_batch_size=len(rows), num_examples=len(rows), noise_multiplier=0.0,
            max_grad_norm=bound, seed=0,
        )  # fmt: skip
    private_grad = pg.PrivateGradient(case.model, case.losses, plan, **options)
    return private_grad(next(iter(plan.batches(rows))))


def made_up_scales(case: Case, kind: str) -> dict[str, Tensor]:
    """Positive numbers that the gradients are divided by, in the model's precision; ones but for preconditioning."""
    generator = torch.Generator().manual_seed(7)
    if kind != "preconditioned":
        return {name: torch.ones_like(p) for name, p in trainable(case).items()}
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).exp().to(p)
        for name, p in trainable(case).items()
    }


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], least: float) -> dict[str, float]:
    """By parameter, the norm of the difference over the norm of what is expected.

    Args:
        found: one tensor for each parameter.
        expected: the same, right.
        least: the smallest norm that counts, as a share of the norm over all parameters.
    """
    whole = float(norm_of(dict(expected)))
    assert whole > 0
    return {
        name: float((found[name].double() - value).norm()) / max(float(value.norm()), least * whole)
        for name, value in expected.items()
    }


def differences(case: Case, loop: Case, kind: str, *, least: float = 0.01, **options: Any) -> dict[str, float]:
    """Compare a released gradient without noise with the loop, as `relative` does.

    Args:
        case: is released.
        loop: the same model again.
        kind: one of KINDS.
        least: see `relative`.
        **options: further arguments of PrivateGradient.
    """
    scales = made_up_scales(case, kind)
    if kind == "BAM":
        options["perturb"] = pg.perturb.BAM(RADIUS)
    if kind == "preconditioned":
        options["precondition"] = pg.precondition.fixed(pg.Scales(scales, provenance="public data", source="a test"))
    bound, expected = clipped_mean(loop, kind, scales)
    return relative(released(case, bound, **options), expected, least)


def rounding(loop: Case, kind: str) -> float:
    """The largest relative error of the loop itself, against the loop in double precision."""
    scales = made_up_scales(loop, kind)
    _, found = clipped_mean(loop, kind, scales)
    examples = {name: x.double() if x.is_floating_point() else x for name, x in loop.examples.items()}
    _, expected = clipped_mean(Case(loop.model.double(), examples, loop.losses), kind, scales)
    return max(relative(found, expected, 1.0).values())


def computed_by_example(case: Case) -> tuple[dict[str, int], float]:
    """How many modules of each class the engine computes for each example by itself, and their share of parameters."""
    from privgrad.engine.factored import Factored  # versions differ in where it is

    engine = Factored(case.model, case.losses)
    engine(case.examples)
    modules = [case.model.get_submodule(path) for path in engine._layouts.current.vmapped_units]
    inside = {p for module in modules for p in module.parameters() if p.requires_grad}
    total = sum(p.numel() for p in trainable(case).values())
    return dict(Counter(type(module).__name__ for module in modules)), sum(p.numel() for p in inside) / total
