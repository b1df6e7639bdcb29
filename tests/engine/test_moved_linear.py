"""Linear maps and convolutions at each example's own moved parameters: the ways to compute them are equal to a loop."""

from typing import Any

import pytest
import torch
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from privgrad.engine.factored import Factored
from privgrad.engine.factors.displacement import Displacement
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers.linear import Linear
from privgrad.gradient.factor import Dense
from privgrad.gradient.functional import gradients

LAYERS: dict[str, Any] = {
    "Linear": lambda: nn.Linear(4, 5),
    "Linear, no bias": lambda: nn.Linear(4, 5, bias=False),
    "Conv1D": lambda: Conv1D(5, 4),
}
EXAMPLES = 3


def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the parameters that are added to their displacements."""
    found: list[int] = []
    own = Displacement.added_to

    def added_to(self: Displacement, parameter: Tensor) -> Tensor:
        found.append(parameter.dim())
        return own(self, parameter)

    monkeypatch.setattr(Displacement, "added_to", added_to)
    return found


@pytest.mark.parametrize(("positions", "is_added"), [((), False), ((2,), False), ((9,), True), ((3, 4), True)])
@pytest.mark.parametrize("kind", LAYERS)
def test_along_gradients(kind: str, positions: tuple[int, ...], is_added: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), LAYERS[kind]()).double()
    x, found = torch.randn(EXAMPLES, *positions, 4, dtype=torch.float64), added(monkeypatch)
    factors = Factored(model, losses_of).moved(x, 0.3, exact=False)
    assert (2 in found) == is_added
    for name, rows in moved_one_by_one(model, x, 0.3, exact=False).items():
        assert_equal_to_loop(factors[name], rows, 1e-8)


@pytest.mark.parametrize("positions", [1, 9])
@pytest.mark.parametrize("kind", [*LAYERS, "Conv1d"])
def test_along_given_tensors(kind: str, positions: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    layer = nn.Conv1d(4, 5, 3, padding=1) if kind == "Conv1d" else LAYERS[kind]()
    shape = (4, positions) if kind == "Conv1d" else (positions, 4)
    model, x = nn.Sequential(layer).double(), torch.randn(EXAMPLES, *shape, dtype=torch.float64)
    moves = {name: torch.randn(EXAMPLES, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    found = added(monkeypatch)
    factors = Factored(model, losses_of).at(x, {name: Dense(move) for name, move in moves.items()}, 0.3)
    assert (max(found, default=0) >= 2) == (positions == 9)
    for index in range(EXAMPLES):
        along = {name: 0.3 * move[index] for name, move in moves.items()}
        for name, wanted in gradients(model, losses_of, x[index : index + 1], along=along).items():
            torch.testing.assert_close(factors[name].dense()[index], wanted, rtol=1e-8, atol=1e-10)


def test_a_displacement_in_half_precision_is_not_added_to_the_weight():
    """A displacement below the resolution of the weight would be lost."""
    torch.manual_seed(0)
    weight, a, b = torch.ones(5, 4, dtype=torch.bfloat16), torch.randn(2, 9, 4), torch.randn(2, 9, 5)
    x = torch.zeros(2, 9, 4, dtype=torch.bfloat16)
    x[..., :2] = torch.tensor([1.0, -1.0])  # the output of the weight itself is 0
    moved = {"weight": Displacement(Outer(a, b), torch.full((2,), 1e-5))}
    output = Linear().moved(None, {"weight": weight}, moved, x)
    wanted = x.float() @ (1e-5 * b.mT @ a).mT
    torch.testing.assert_close(output.float(), wanted, rtol=2e-2, atol=1e-7)


def test_gradients_that_were_kept_for_their_norms_are_not_computed_again():
    torch.manual_seed(0)
    factor = Outer(torch.randn(2, 9, 4), torch.randn(2, 9, 5))
    wanted = factor.dense()
    factor.keeps = True
    factor.norms()
    assert factor.dense() is factor.dense()
    torch.testing.assert_close(factor.dense(), wanted)
    torch.testing.assert_close(factor[1:].dense(), wanted[1:])
    masked = factor.mask(torch.tensor([True, False]))
    torch.testing.assert_close(masked.dense(), torch.stack([wanted[0], torch.zeros(5, 4)]))
    # Which examples are masked does not decide how the others are computed, and so rounded.
    assert masked.is_faster_written_out(3)
    assert not Outer(factor.a_BTI, factor.b_BTO).is_faster_written_out(3)
