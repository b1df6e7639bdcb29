"""Ways in which the fast engine could be fooled, each tried: the bound holds, or the model is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_rules import losses_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

import privgrad as pg
from conftest import clipped_sum, first_batch, make_data, make_plan
from privgrad.checks.model_and_loss import check_loss
from privgrad.clip.clipping import Clipping
from privgrad.engine import factored
from privgrad.engine.factored import Factored
from privgrad.engine.factors.outer import Outer
from privgrad.engine.passes import Point
from privgrad.gradient.factor import Factor


class WritesToParameters(nn.Module):
    """Past autograd's count of writes, or in its sight."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.code, self.way = nn.Linear(4, 3), nn.Parameter(torch.zeros(3), requires_grad=False), way

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "data":
            self.code.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
        else:
            with torch.no_grad():
                self.code.add_(h.mean(0))
        return h + self.code.detach()


@pytest.mark.parametrize("way", ["data", "no_grad"])
def test_a_forward_pass_that_writes_to_parameters_is_refused(way: str):
    engine = Factored(WritesToParameters(way), losses_of)
    with pytest.raises(pg.UnsupportedModuleError, match="parameters"):
        engine(torch.randn(6, 4))


def test_embeddings_that_shorten_their_rows_in_place_are_refused():
    with pytest.raises(pg.UnsupportedModuleError, match="max_norm"):
        pg.PrivateGradient(nn.Embedding(10, 3, max_norm=1.0), losses_of, make_plan())


class MixesNowAndThen(nn.Linear):
    """Mixup of inputs with probability 0.4."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        mixed = 0.5 * (input + input.roll(1, 0)) if torch.rand(()) < 0.4 else input
        return super().forward(mixed)


@pytest.mark.parametrize("seed", range(3))
def test_mixing_now_and_then_is_caught_by_draws_that_differ(seed: int):
    torch.manual_seed(seed)
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        check_loss(MixesNowAndThen(4, 3), losses_of, torch.randn(6, 4))


class SortedByLength(nn.Module):
    """Sorts, works, sorts back: each example's output is its own, but rows change places inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        return self.second(torch.tanh(self.first(x[order])[order.argsort()]))


def test_rows_that_change_places_are_caught_when_examples_show_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(factored, "require_apart_from_infinite", lambda *_: None)  # it changes places too
    engine, x = Factored(SortedByLength().double(), losses_of), torch.randn(8, 3, dtype=torch.float64)
    alike = x.clone()
    alike[:, 0] = 1.0
    engine(alike)  # already in order: the first audit cannot see it
    x[:3, 0] = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    with pytest.raises(pg.UnsupportedModuleError, match="single examples"):
        engine(x)


class ShufflesInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        # By numpy: in place of torch's draws, the other checks put a constant.
        order = torch.from_numpy(np.random.permutation(len(x))) if self.training else torch.arange(len(x))
        return self.second(torch.tanh(self.first(x[order])[order.argsort()]))


class NormsGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and h.requires_grad:
            h.register_hook(lambda grad: grad / grad.norm())
        return self.second(torch.tanh(h))


@pytest.mark.parametrize("make", [ShufflesInTraining, NormsGradients])
def test_what_mixes_in_training_mode_only_is_caught(make: Callable[[], nn.Module]):
    x = torch.randn(8, 3, dtype=torch.float64)
    with pytest.raises(pg.UnsupportedModuleError, match=r"(other|single) examples"):
        Factored(make().double(), losses_of)(x)
    Factored(make().double().eval(), losses_of)(x)


def test_an_operation_in_place_on_a_layers_output_keeps_its_gradient():
    rows: list[Tensor] = []
    for inplace in (False, True):
        torch.manual_seed(0)
        dropout, relu = nn.Dropout(0.3, inplace=inplace), nn.ReLU(inplace=inplace)
        model = nn.Sequential(nn.Linear(4, 4), dropout, relu, nn.Linear(4, 2))
        engine, x = Factored(model, losses_of), torch.randn(6, 5, 4)
        engine.audit(x)
        torch.manual_seed(1)
        factors, _ = engine._passes.compute(x, Point())  # pyright: ignore[reportPrivateUsage]
        rows.append(factors["0.weight"].dense())
    torch.testing.assert_close(*rows)
    assert rows[0].abs().sum() > 0


class Centered(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean((1, 2, 3), keepdim=True)


class OneRow(nn.Module):
    """One row of a table, looked up again and again and weighted by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.zeros_like(x, dtype=torch.long)) * x[..., None]


def canceling(kind: str, big: float) -> tuple[nn.Module, Tensor]:
    """A model, and eight examples of which the fourth has a small gradient made of large terms."""
    signs = (-1.0) ** torch.arange(81)
    if kind == "linear":
        x = torch.randn(8, 2, 6)
        x[3] = big * signs[:2, None]
        return nn.Linear(6, 4), x
    if kind == "embedding":
        x = torch.randn(8, 4)
        x[3] = big * signs[:4]
        return OneRow(), x
    model, x = nn.Conv2d(1, 3, 3), torch.randn(8, 1, 9, 9)
    if kind == "standardized":
        x[3] = big
        parametrize.register_parametrization(model, "weight", Centered())
    else:
        x[3] = big * signs.view(9, 9)
    return model, x


@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.Automatic()])
@pytest.mark.parametrize("big", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding", "standardized"])
def test_terms_that_cancel_within_an_example_do_not_pass_the_bound(kind: str, big: float, clip: Clipping):
    """Their sum is small and unclipped, but float32 rounds them by far more than C."""
    torch.manual_seed(0)
    model, x = canceling(kind, big)
    parameters = dict(model.named_parameters())
    factors = Factored(model, lambda m, x: m(x).flatten(1).mean(1))(x)
    sums: list[Tensor] = []
    for kept in (torch.ones(8, dtype=torch.bool), torch.arange(8) != 3):
        chunk: dict[str, Factor] = {name: factor.mask(kept) for name, factor in factors.items()}
        clipped, _ = clipped_sum([chunk], like=parameters, clip=clip, max_grad_norm=1.0)
        sums.append(torch.cat([clipped.values[name].flatten().double() for name in parameters]))
    assert (sums[0] - sums[1]).norm() <= 1.02


@pytest.mark.parametrize("clip", [pg.clip.Flat(), pg.clip.Automatic()])
@pytest.mark.parametrize(
    ("scale", "a", "b"), [(1e12, 1e15, 1e15), (1e12, 1e10, 1e10), (1e-12, 1e8, 1e-23), (1.0, 2e-23, 5e18)]
)
def test_squares_that_underflow_do_not_hide_a_gradient(scale: float, a: float, b: float, clip: Clipping):
    factor = Outer(torch.full((2, 1, 784), a), torch.full((2, 1, 3), b))
    clipped, _ = clipped_sum(
        [{"p": factor}],
        like={"p": torch.zeros(3, 784)},
        clip=clip,
        max_grad_norm=1e-3,
        inverse_scales={"p": torch.full((3, 784), 1 / scale)},
    )
    assert clipped.values["p"].double().norm() <= 2e-3 * (1 + 1e-4)


@pytest.mark.parametrize(("a", "b"), [(1e-23, 5e17), (5e17, 1e-23)])
def test_squares_that_underflow_do_not_hide_a_place_among_others(a: float, b: float):
    a_BTI, b_BTO = torch.zeros(2, 4, 784), torch.zeros(2, 4, 60)
    for place, (x, y) in enumerate([(a, b), (1e-8, 1.0), (2.0, 0.0), (0.0, 2.0)]):
        a_BTI[:, place], b_BTO[:, place] = x, y
    wanted_B = torch.full((2,), (a * b + 1e-8) * (784 * 60) ** 0.5, dtype=torch.float64)
    torch.testing.assert_close(Outer(a_BTI, b_BTO).norms(), wanted_B, rtol=1e-4, atol=0.0)


class Remembers(nn.Module):
    """Keeps private tensors in nested containers, and writes to a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(5, 3), torch.zeros(3)
        self.seen: dict[str, list[Tensor]] = {"outputs": []}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        self.seen["outputs"].append(h.detach())
        return h


def test_nothing_private_stays_in_attributes_however_deep():
    model = Remembers()
    private_grad = pg.PrivateGradient(model, lambda m, batch: losses_of(m, batch[0]), make_plan())
    with pytest.warns(UserWarning, match="mean, seen"):
        private_grad(first_batch(private_grad.plan, make_data()))
    assert model.mean.tolist() == [0, 0, 0]
    assert model.seen == {"outputs": []}


class WritesInto(nn.Module):
    """Counts rows in a tensor that it reaches through a container, or in a numpy array."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.scale, self.way = nn.Linear(5, 3), nn.Parameter(torch.zeros(3), requires_grad=False), way
        self.register_buffer("counts", torch.zeros(3))
        tensor = {"a buffer": self.counts, "a parameter": self.scale}.get(way, torch.zeros(3))
        held: dict[str, Any] = {"an array": np.zeros(3), "a dict": {"x": [tensor]}, "a tuple": ({"x": tensor},)}
        self.held = held.get(way, [tensor])

    @property
    def written(self) -> Any:
        """What the forward pass writes to."""
        if self.way == "an array":
            return self.held
        held = self.held[0] if self.way != "a dict" else self.held["x"][0]
        return held["x"] if self.way == "a tuple" else held

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) + self.scale
        if self.way == "a write that autograd sees":
            self.written.add_(h.mean(0))
        else:
            (self.written.data if isinstance(self.written, Tensor) else self.written)[:] += len(x)
        return h


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize(
    "way", ["a list", "a dict", "a tuple", "an array", "a buffer", "a parameter", "a write that autograd sees"]
)
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_nothing_private_stays_in_what_containers_hold(way: str, engine: Any):
    model, plan = WritesInto(way), make_plan()
    private_grad = pg.PrivateGradient(model, lambda m, batch: losses_of(m, batch[0]), plan, engine=engine)
    with pytest.warns(UserWarning, match="the forward pass changed held of the model"):
        private_grad(first_batch(plan, make_data()))
    assert model.written.tolist() == [0, 0, 0]
    assert not getattr(model.written, "requires_grad", False)
