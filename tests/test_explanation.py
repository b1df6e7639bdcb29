"""explain() says how each gradient is computed, what the loss does not use, and what a step costs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from conftest import make_plan
from privgrad.gradient.engines.vmap import Vmap


class Net(nn.Module):
    """A rule, copies of a parameter, a part that is taken whole, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 8), nn.Parameter(torch.ones(8))
        self.repeated, self.unused = nn.Embedding(4, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        return x + torch.cat([self.repeated(torch.zeros(1, dtype=torch.long))] * len(x))


class Scaled(nn.Module):
    """A parameter that meets the examples in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().sum(1)


def dense_losses(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), torch.zeros(len(batch[0]), 8), reduction="none").sum(1)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_parts_reasons_and_costs():
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(16, 6),)
    with torch.no_grad():
        before = {name: p.clone() for name, p in model.named_parameters()}
    found = pg.explain(model, losses, batch)
    assert found.unused == ["unused.weight", "unused.bias"]
    assert all(p.requires_grad and p.equal(before[name]) for name, p in model.named_parameters())
    assert found.examples == 16
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert [part.path for part in found.slow] == [part.path for part in found.parts if part.way != "rule"]
    for cost in (found.seconds, found.peak_mb):
        assert cost.keys() == {"ordinary", "private"}
        assert min(cost.values()) > 0
    whole = [part for part in found.slow if part.way == "whole"]
    assert whole
    assert "to keep examples apart" in whole[0].why
    assert "by itself" in str(found)
    assert "unused.weight" in str(found)


def test_copies_name_their_functions():
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    found = pg.explain(model, dense_losses, (torch.randn(5, 6),))
    (slow,) = found.slow
    assert (slow.path, slow.way, slow.why) == ("1", "copies", "mul")
    assert "F.linear" in slow.remedy  # 8 of 64 values
    assert [part.way for part in found.parts] == ["copies", "rule"]
    assert found.unused == []


def test_a_training_explains_its_last_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    data = torch.utils.data.TensorDataset(torch.randn(8, 6))
    for engine in ("factored", "vmap"):
        plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
        private_grad = pg.PrivateGradient(model, dense_losses, plan, engine=engine)  # pyright: ignore[reportArgumentType]
        if engine == "factored":
            with pytest.raises(pg.PrivacyError, match=r"privgrad\.explain\(model"):
                private_grad.explain()
        private_grad(next(iter(plan.batches(data))))
        ways = {part.path: part.way for part in private_grad.explain().parts}
        assert ways == ({"0": "rule", "1": "copies"} if engine == "factored" else {"0": "whole", "1": "whole"})
        assert isinstance(private_grad._engine, Vmap) == (engine == "vmap")


def test_private_batches_and_refused_models():
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
    data = torch.utils.data.TensorDataset(torch.randn(8, 6))
    model = nn.Sequential(nn.Linear(6, 8), Scaled())
    with pytest.raises(pg.PrivacyError, match="to be public"):
        pg.explain(model, dense_losses, next(iter(plan.batches(data))))
    with pytest.raises(pg.UnsupportedModuleError, match="GroupNorm"):
        pg.explain(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), dense_losses, (torch.randn(5, 6),))
    with pytest.raises(pg.PrivacyError, match="own example"):
        pg.explain(model, lambda m, b: dense_losses(m, b) / dense_losses(m, b).sum(), (torch.randn(5, 6),))
    assert all(p.requires_grad for p in model.parameters())
