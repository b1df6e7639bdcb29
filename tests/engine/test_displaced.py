"""Layers at each example's own moved parameters equal a loop over single examples."""

from typing import Any

import pytest
import test_attention
import test_recurrent
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privgrad.engine.factored import Factored
from privgrad.engine.factors import embedding
from privgrad.gradient.factor import Dense
from privgrad.gradient.functional import gradients

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
SIZE, RADIUS = 3, 0.3
LENGTHS = {"as products of positions": 2, "written out": 9}  # of the displacements of a weight of a recurrence


class Net(nn.Module):
    """A layer before, so that gradients flow to the inputs, and one behind."""

    def __init__(self, inner: Any, roles: int = 0) -> None:
        super().__init__()
        width = inner.embed_dim if roles else 4
        self.first, self.inner, self.roles = nn.Linear(4, width).to(torch.float64), inner, roles

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h if self.inner.batch_first else h.transpose(0, 1)
        if self.roles:
            given = [h, h.flip(0 if not self.inner.batch_first else 1)][: self.roles]
            return self.batched(self.inner(given[0], given[-1], given[-1])[0])
        output, state = self.inner(h)
        states: tuple[Tensor, ...] = state if isinstance(state, tuple) else (state,)
        last = torch.stack([part.square().sum((0, 2)) for part in states]).sum(0)
        return self.batched(output).flatten(1).sin().sum(1, keepdim=True) + last[:, None]

    def batched(self, x: Tensor) -> Tensor:
        return x if self.inner.batch_first else x.transpose(0, 1)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


def assert_right(model: Net, length: int) -> None:
    """At points along the gradients, and along written-out tensors, as local training has them."""
    torch.manual_seed(1)
    x, engine = torch.randn(SIZE, length, 4, dtype=torch.float64), Factored(model, losses)
    moves = {name: torch.randn(SIZE, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    along_gradient = engine.moved(x, RADIUS, exact=False)
    along_moves = engine.at(x, {name: Dense(move) for name, move in moves.items()}, RADIUS)
    assert engine._layouts.current.displaced[False][1] == set()  # no module was computed by vmap
    for index in range(SIZE):
        row = x[index : index + 1]
        grads = gradients(model, losses, row)
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        points = [{name: RADIUS * grad / norm for name, grad in grads.items()}]
        points.append({name: RADIUS * move[index] for name, move in moves.items()})
        for found, point in zip((along_gradient, along_moves), points, strict=True):
            wanted = gradients(model, losses, row, along=point)
            for name, value in wanted.items():
                torch.testing.assert_close(found[name].dense()[index], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("option", test_recurrent.OPTIONS)
@pytest.mark.parametrize("kind", test_recurrent.KINDS)
def test_recurrent_layers(kind: str, option: str, length: str):
    assert_right(Net(test_recurrent.make(kind, option)), LENGTHS[length])


@pytest.mark.parametrize("roles", [1, 2])
@pytest.mark.parametrize("option", ["packed", "batch first", "no bias", "appended", "zero"])
def test_attention_layers(option: str, roles: int):
    assert_right(Net(test_attention.make(option), roles), 5)


@pytest.mark.parametrize("bags", [1, 3])
@pytest.mark.parametrize("few", [0, 1 << 16])
def test_rows_of_bags_are_those_of_the_gradients(bags: int, few: int, monkeypatch: pytest.MonkeyPatch):
    """By comparisons of words, or by a loop over the examples."""
    torch.manual_seed(0)
    monkeypatch.setattr(embedding, "_FEW", few)
    shape = (SIZE, bags, 4)
    ids, weight, r = torch.randint(0, 6, shape), torch.rand(shape).double(), torch.randn(SIZE, bags, 3).double()
    factor = embedding.Bags(ids, weight, r, 6)
    counts = (weight[..., None] * one_hot(ids, 6)).sum(2)
    rows = Dense(torch.einsum("ijv,ijd->ivd", counts, r))
    read, words, shares = torch.randint(0, 6, (SIZE, 9)), torch.randint(0, 6, (SIZE, 2, 5)), torch.rand(SIZE, 2, 5)
    torch.testing.assert_close(factor.dense(), rows.dense())
    torch.testing.assert_close(factor.read(read), rows.read(read))
    torch.testing.assert_close(factor.read_bags(words, shares), rows.read_bags(words, shares))
    torch.testing.assert_close(factor.norms(), rows.norms())
    assert factor._compares(9) == (bags == 1 and few > 0)
