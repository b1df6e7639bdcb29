"""One example more or fewer moves the clipped sum by at most C: batches built for known holes, and a short search."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad import precondition
from privgrad.private_gradient import RawStep
from tests.sensitivity.examples import PROFILES, TOUCHES
from tests.sensitivity.grammar import DETAILS, PARTS, ROOTS
from tests.sensitivity.large import ORDERS, WAYS, run_large
from tests.sensitivity.mixing import HOLDERS, KINDS, PLACES, run_mixed
from tests.sensitivity.search import LIMIT, Tally, run_case

Examples = tuple[Tensor, ...]
ENGINES, CONTRIBUTIONS = {"factored", "vmap"}, {"plain", "BAM sam", "BAM exact", "SAT"}
OPTIONS = {"Flat", "PerLayer", "Automatic", "none", "fixed", "public_adam", "inputs", "eps", "noise_eps"}


def search(cases: list[tuple[int, str | None]]) -> Tally:
    """Run cases, each given by its number and its model's first part; fail if one breaks the bound or crashes."""
    tally, found = Tally(), list[str]()
    for number, first in cases:
        outcome = run_case(0, number, first)
        tally.add(outcome)
        found += [f"{pair} in {outcome.case.describe()}" for pair in outcome.failures()]
    assert not found, "\n".join(found)
    return tally


def test_one_example_moves_the_sum_by_no_more_than_the_bound_for_every_part_of_the_grammar():
    names = [*PARTS, *ROOTS]
    # A few more of the layers that have options of their own.
    more = [name for name in ("Conv1d", "Conv2d", "WeightStandardization", "InstanceNorm1d") for _ in range(12)]
    tally = search(list(enumerate([*names, *names, *more])))
    assert set(names) | set(DETAILS) <= tally.parts


@pytest.mark.slow
def test_one_example_moves_the_sum_by_no_more_than_the_bound_in_a_short_search():
    tally = search([(1000 + index, None) for index in range(80)])
    assert ENGINES | CONTRIBUTIONS | OPTIONS | set(PROFILES) | set(TOUCHES) <= tally.parts
    assert tally.pairs > 80


def test_one_row_moves_the_sum_of_thousands_by_no_more_than_the_bound_in_a_short_search():
    found = [run_large(0, number) for number in range(40)]
    assert max(found, key=lambda one: one.change).change <= LIMIT
    assert {one.way for one in found} == set(WAYS)
    assert {one.order for one in found} == set(ORDERS)


def test_losses_that_mix_examples_are_refused_before_a_sum_moves_by_more_in_a_short_search():
    found = [run_mixed(0, number, kind) for kind in KINDS for number in range(20)]
    assert not [one for one in found if one.failed]
    assert sum(one.refused is not None for one in found) > 40  # the others hold by chance, such as with engine="vmap"


@pytest.mark.slow
def test_state_fitted_on_private_examples_is_refused_wherever_it_is_kept():
    found = [run_mixed(1, number, "fitted") for number in range(120)]
    assert not [one for one in found if one.failed]
    assert {one.parts[-1] for one in found} == {*HOLDERS, *PLACES}


def clipped_sum_of(
    model: nn.Module, loss_fn: Any, examples: Examples, count: int, bound: float, **options: Any
) -> Tensor:
    """Return the sum before its noise by the public API, as one vector in float64; `count` is the public size."""
    plan = pg.PrivacyPlan(
        sample_rate=1.0,
        steps=1,
        expected_batch_size=count,
        noise_multiplier=1.0,
        max_grad_norm=bound,
        num_examples=count,
    )
    private_grad, seen = pg.PrivateGradient(model, loss_fn, plan, **options), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    private_grad(next(iter(plan.batches(TensorDataset(*examples)))))
    return torch.cat([value.double().flatten() for value in seen[0].raw_mean.values()]) * plan.divisor


def change_over_bound(
    model: nn.Module, loss_fn: Any, examples: Examples, place: int, *, bound: float = 1.0, **options: Any
) -> float:
    """Return by how many C the sum moves without the example at a place. By default, a batch is one pass."""
    fewer = tuple(torch.cat([x[:place], x[place + 1 :]]) for x in examples)
    count = len(fewer[0])
    options.setdefault("microbatch_size", count + 1)
    sums = [clipped_sum_of(model, loss_fn, each, count, bound, **options) for each in (examples, fewer)]
    return float((sums[0] - sums[1]).norm()) / bound


def products(model: nn.Module, examples: Examples) -> Tensor:
    """Return losses that are linear in the output: y is the output's gradient."""
    x, y = examples
    return (model(x) * y).flatten(1).sum(1)


class TimeFirst(nn.Module):
    """A layer whose output gradients lie time first in memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).transpose(0, 1)
        return out.reshape(len(out), -1).view_as(out).transpose(0, 1)


class Outputs(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def opposite_places(count: int, width: int, size: float) -> Examples:
    """Return examples of two places whose terms cancel, of that size each."""
    x = (torch.rand(count, 1, width) + 0.5).repeat(1, 2, 1)
    y = size * (torch.rand(count, 1, width) + 0.5)
    return x, torch.cat([y, -y], 1)


@pytest.mark.parametrize("kind", ["linear", "rnn"])
@pytest.mark.parametrize("count", [1024, 4096])
def test_terms_of_a_batch_that_round_together_stay_within_the_bound(kind: str, count: int):
    """Every contribution is zero; partial sums are not, if all first places are added up before the second."""
    torch.manual_seed(0)
    if kind == "linear":
        model: nn.Module = TimeFirst(nn.Linear(4, 4, bias=False))
    else:
        model = Outputs(nn.RNN(4, 4, batch_first=True, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    examples = opposite_places(count, 4, 5e3)
    change = change_over_bound(model, products, examples, count - 1)
    assert change <= LIMIT


def test_one_example_does_not_decide_the_precision_of_the_others():
    """Equal examples, whose terms add up to 1e4 C with the last one, and to less without it.

    All their rounding errors have the same direction, so a sum in float32 is far from one in float64. The direction
    depends on the examples and on the order of the additions, so several batches are tried.
    """
    count, width, changes = 4096, 8, list[float]()
    share = 0.5 * (1e4 / (count - 0.5) - 1)
    y = 3 * torch.cat([torch.full((count, 1, 1), 1 + share), torch.full((count, 1, 1), -share)], 1)
    for seed in range(8):
        torch.manual_seed(seed)
        x = (torch.rand(width) + 0.5).repeat(count, 2, 1)
        changes.append(change_over_bound(nn.Linear(width, 1, bias=False), products, (x, y), count - 1))
    assert max(changes) <= LIMIT


class Computed(nn.Linear):
    """A linear map whose forward pass multiplies its weight by a large number."""

    factor = 1e4

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return F.linear(input, self.weight * self.factor)


def test_terms_that_round_together_before_a_weight_is_pulled_back_keep_the_bound():
    """They come to less than float32 rounds to 1e-3 C; the weight's computation multiplies that by 1e8."""
    torch.manual_seed(0)
    examples, layer = opposite_places(2048, 4, 0.2), Computed(4, 4, bias=False)
    layer.factor = 1e8
    change = change_over_bound(TimeFirst(layer), products, examples, 2047)
    assert change <= LIMIT


def short_weight_norm(width: int, length: float) -> nn.Module:
    """Return a Linear under weight_norm with a direction of that length; its magnitude is frozen."""
    layer = parametrizations.weight_norm(nn.Linear(width, 1, bias=False))
    direction = layer.get_parameter("parametrizations.weight.original1")
    direction.data *= length / direction.data.norm()
    layer.get_parameter("parametrizations.weight.original0").requires_grad_(False)
    return layer


@pytest.mark.parametrize(("length", "size"), [(1e-2, 1e3), (1e-2, 1e4), (1e-4, 1e3), (1e-4, 1e4), (1e-5, 1e1)])
def test_a_parametrization_that_projects_what_is_large_keeps_the_bound(length: float, size: float):
    """The gradients of the weight lie along the direction, where weight_norm has no gradient."""
    torch.manual_seed(0)
    model = short_weight_norm(4, length)
    direction = model.get_parameter("parametrizations.weight.original1").detach()
    x = size * direction / direction.norm() * (1 + torch.rand(256, 1))
    change = change_over_bound(model, products, (x, 1 + torch.rand(256, 1)), 255)
    assert change <= LIMIT


@pytest.mark.parametrize("kind", ["computed", "weight_norm"])
def test_terms_count_by_what_the_weights_own_computation_makes_of_them(kind: str):
    """Places that cancel, and a small one between them; the weight's computation multiplies all by 1e4."""
    torch.manual_seed(0)
    model = Computed(4, 1, bias=False) if kind == "computed" else short_weight_norm(4, 1e-4)
    x, y = opposite_places(256, 4, 1e4)
    x = torch.cat([x[:, :1], torch.randn(256, 1, 4), x[:, 1:]], 1)
    y = torch.cat([y[:, :1, :1], 1e-4 * torch.randn(256, 1, 1), y[:, 1:, :1]], 1)
    change = change_over_bound(model, products, (x, y), 255)
    assert change <= LIMIT


def test_a_weight_that_projects_everything_away_keeps_the_bound():
    """With one input, weight_norm leaves no gradient of its direction but rounding, of sums as of examples."""
    torch.manual_seed(0)
    model = short_weight_norm(1, 1e-6)
    x = 1 + torch.rand(4096, 1)
    change = change_over_bound(model, products, (x, 1 + torch.rand(4096, 1)), 4095)
    assert change <= LIMIT


class Difference(nn.Linear):
    """A linear map whose weight is a small difference of large numbers, and so is its Jacobian."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return F.linear(input, self.weight * (1e6 + 1) - self.weight * 1e6)


def test_a_weight_that_is_a_difference_of_large_terms_keeps_the_bound():
    """The product with its Jacobian rounds a sum of hundreds by more than C, and one example by less."""
    torch.manual_seed(0)
    x, y = 1 + torch.rand(512, 4), 1 + torch.rand(512, 1)
    change = change_over_bound(Difference(4, 1, bias=False), products, (x, y), 511)
    assert change <= LIMIT


def weighted(model: nn.Module, examples: Examples) -> Tensor:
    """Return (w x - y) c."""
    x, y, c = examples
    return ((model(x) - y) * c)[:, 0]


@pytest.mark.parametrize(("size", "bound", "scale"), [(3.74e16, 1.0, 1e-12), (1.18e18, 1e-9, 1.0)])
def test_clip_factors_that_float32_does_not_hold_keep_the_bound(size: float, bound: float, scale: float):
    """The factor is about half of the smallest number of float32, which it is rounded to."""
    torch.manual_seed(0)
    model, sizes = nn.Linear(1, 1), torch.full((3, 1), size)
    scales = {name: torch.full_like(parameter, scale) for name, parameter in model.named_parameters()}
    known = pg.Scales(scales, provenance="common knowledge", source="a test")
    options = {} if scale == 1 else {"precondition": precondition.fixed(known)}
    change = change_over_bound(model, weighted, (sizes, torch.randn(3, 1), sizes), 2, bound=bound, **options)
    assert change <= LIMIT


class Text(nn.Module):
    """A table with padding, below a module that owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(7, 3, padding_idx=0), nn.Parameter(0.1 * torch.randn(3, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.positions


@pytest.mark.parametrize("microbatch", [4, 8, 16])
def test_padding_below_a_module_that_owns_a_parameter_keeps_the_bound(microbatch: int):
    """Rows are padded, but for those that audits of the 1st, 2nd, 4th ... microbatch look at."""
    torch.manual_seed(0)
    ids = torch.zeros(64, 3, dtype=torch.long)
    for audited in (0, 1, 3, 7, 15):
        rows = slice(audited * microbatch, audited * microbatch + 4)
        ids[rows] = torch.randint(1, 7, ids[rows].shape)
    # The first row of each microbatch pulls one way, the second the other.
    sign = torch.where(torch.arange(64) % microbatch == 0, 1.0, -1.0)
    y = sign[:, None, None].expand(64, 3, 3)
    change = change_over_bound(Text(), products, (ids, y), 0, microbatch_size=microbatch)
    assert change <= LIMIT


def test_a_weight_that_is_not_finite_is_refused_or_counts_as_nothing():
    """A direction of length zero makes every loss NaN: examples count as nothing, whatever the weight is made of."""
    model = short_weight_norm(4, 0.0)
    try:
        change = change_over_bound(model, products, (torch.randn(3, 4), torch.ones(3, 1)), 0)
    except pg.PrivacyError:
        return
    assert change <= LIMIT
