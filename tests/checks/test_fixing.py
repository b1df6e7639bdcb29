"""fix() replaces layers that mix examples in a copy, wherever they are, and refuses the others by name."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from conftest import make_plan
from privgrad.checks.model_and_loss import find_problems


class Block(nn.Module):
    """A residual block with one norm for both convolutions, and norms in a list, a dict and a tuple."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels, eps=1e-3)
        self.again = self.norm
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels)])
        self.by_name = nn.ModuleDict({"last": nn.BatchNorm2d(channels, affine=False)})
        self.plain = (self.norms[0], self.by_name["last"])  # not registered here

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(self.plain[1](self.plain[0](x + y)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.SyncBatchNorm(8), nn.ReLU())
        self.blocks, self.head = nn.Sequential(Block(8), Block(8)), nn.Linear(8, 3)
        self.features = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.blocks(self.stem(x)).mean((2, 3))))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


def kinds(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def test_a_residual_network_trains_after_fix(capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    model = ResNet()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.features.weight.uniform_()
    fixed = pg.fix(model)
    assert "BatchNorm2d by GroupNorm at blocks.0.norm, " in capsys.readouterr().err
    assert isinstance(fixed, ResNet)
    assert len(find_problems(model)) == 8
    assert find_problems(fixed) == []
    assert "BatchNorm2d" in kinds(model)
    assert not any("Batch" in kind for kind in kinds(fixed))
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before if name != "features.weight")
    assert torch.equal(fixed.features.weight, model.features.weight)
    assert fixed.features.weight is not model.features.weight
    for block in fixed.blocks:
        block = cast(Block, block)
        assert block.norm is block.again
        assert (block.norm.eps, cast(Any, block.norm).num_groups) == (1e-3, 4)
        assert block.plain == (block.norms[0], block.by_name["last"])
    assert cast(Any, fixed.features).num_groups == 1
    data = torch.utils.data.TensorDataset(torch.randn(8, 1, 6, 6))
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
    private_grad = pg.PrivateGradient(fixed, losses, plan)
    assert len(private_grad(next(iter(plan.batches(data)))).tensors) == len(list(fixed.parameters()))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("channels", [3, 5, 12, 30, 64, 100, 256])
def test_any_number_of_channels_and_a_model_that_is_the_layer(kind: Any, channels: int):
    norm = kind(channels).to(torch.float64)
    norm.bias.requires_grad_(False)
    fixed = pg.fix(norm)
    assert isinstance(fixed, nn.GroupNorm)
    assert channels // fixed.num_groups >= 2
    assert fixed.num_groups <= 8
    assert (fixed.weight.requires_grad, fixed.bias.requires_grad, fixed.weight.dtype) == (True, False, torch.float64)
    x = torch.randn(4, channels, *[5] * (int(kind.__name__[-2]) - 1 or 1), dtype=torch.float64)
    torch.testing.assert_close(fixed(x)[:1], fixed(x[:1]))
    if kind is nn.BatchNorm1d:  # as LayerNorm
        torch.testing.assert_close(fixed(x[..., 0]), F.layer_norm(x[..., 0], (channels,)))


def test_what_shares_a_parameter_still_shares_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    cast(Any, model[2]).weight = model[0].weight
    cast(Any, model[3]).weight = model[1].weight
    fixed = cast(Any, pg.fix(model))
    assert fixed[0].weight is fixed[2].weight
    assert fixed[1].weight is fixed[3].weight
    assert len(list(fixed.parameters())) == len(list(model.parameters())) == 6


def test_other_layers_and_modes():
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    model = nn.ModuleDict({"a": nn.Embedding(5, 4, max_norm=1.0), "b": norm, "c": nn.BatchNorm2d(4).eval()})
    fixed = cast(Any, pg.fix(model))
    assert (fixed["a"].max_norm, fixed["b"].running_mean, fixed["b"].track_running_stats) == (None, None, False)
    assert model["a"].max_norm == 1.0
    assert isinstance(fixed["c"], nn.BatchNorm2d)
    assert fixed["b"](torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
    evaluated = cast(Any, pg.fix(model.eval()))  # a model that was loaded
    assert (type(evaluated["c"]), evaluated["c"].training, evaluated.training) == (nn.GroupNorm, False, False)
    assert not model.training
    assert isinstance(model["c"], nn.BatchNorm2d)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x).relu()


def test_what_cannot_be_replaced_is_named():
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: grad)
    model = nn.Sequential(nn.BatchNorm1d(2), Activated(8), nn.LazyBatchNorm1d(), hooked, nn.BatchNorm2d(8))
    with pytest.raises(pg.UnsupportedModuleError) as error:
        pg.fix(model)
    for words in (
        "BatchNorm1d at '0', which normalizes 2 features",
        "Activated at '1', which computes more than BatchNorm (write it with GroupNorm or LayerNorm)",
        "LazyBatchNorm1d at '2', which has no number of channels yet",
        "Linear at '3', which has a hook on weight",
    ):
        assert words in str(error.value)
    assert "'4'" not in str(error.value)
    with pytest.raises(pg.PrivacyError, match=r"expected model to be a torch\.nn\.Module"):
        pg.fix(cast(Any, [nn.Linear(2, 2)]))
    model = nn.Linear(2, 2)
    cast(Any, model).kept = model.weight * 2
    with pytest.raises(pg.PrivacyError, match=r"to be copied by copy\.deepcopy"):
        pg.fix(model)


def test_the_copy_knows_the_trainings_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    plan = make_plan(sample_rate=1.0, expected_batch_size=8, num_examples=8)
    pg.PrivateGradient(model, losses, plan)(next(iter(plan.batches(data))))
    model.append(nn.BatchNorm1d(4))
    assert pg.ledgers_of(pg.fix(model)) == pg.ledgers_of(model)
    assert len(pg.ledgers_of(model)) == 1
