"""The ways that are taken on other devices than the CPU, taken on the CPU: they hold what the usual ways hold.

`tests/engine/test_cuda.py` runs on a GPU.
"""

from typing import Any

import pytest
import test_experts
import test_factored
import test_numbers
import test_optimizers_reference
import test_recurrent
import test_rounding
import test_row_map
import torch
import torch.nn.functional as F
from test_rules import losses_of, one_by_one

import privgrad as pg
from conftest import make_model
from privgrad import processes
from privgrad.clip.clipping import ClippingAccumulator
from privgrad.engine import units
from privgrad.engine.factored import Factored
from privgrad.engine.factors import conv, routed
from privgrad.engine.factors.conv import Convolution, Geometry
from privgrad.engine.factors.embedding import Rows
from privgrad.engine.factors.outer import Outer, position_norms
from privgrad.engine.passes import MemoryPlan
from privgrad.gradient import factor as norms
from privgrad.gradient.factor import norms_of
from privgrad.gradient.functional import Structure
from privgrad.optim import debiased
from privgrad.types import NoisyGradient

SHARED = {
    test_experts: [
        "test_displaced_experts",
        "test_equal_to_single_examples",
        "test_factors_of_stacked_weights_are_exact",
        "test_norms_of_experts_whose_terms_cancel_or_underflow_are_computed_again",
    ],
    test_factored: [
        "test_a_non_finite_example_contributes_zero_and_is_counted",
        "test_engines_agree_on_whole_models",
        "test_microbatches_and_engines_give_the_same_release",
        "test_neighboring_batches_differ_by_at_most_c",
    ],
    test_numbers: [
        "test_an_example_of_any_size_moves_the_sum_by_at_most_c",
        "test_what_is_large_and_finite_contributes_c_and_what_is_not_nothing",
    ],
    test_optimizers_reference: ["test_fifty_steps_agree_with_the_plain_version"],
    test_recurrent: [
        "test_autocast_computes_in_the_parameters_dtype",
        "test_changes_in_place_are_refused_not_believed",
        "test_nothing_is_tapped_in_vain",
        "test_replaced_taps_are_what_goes_on",
        "test_rows_are_the_gradients_of_single_examples",
        "test_same_outputs_and_gradients",
    ],
    test_rounding: ["test_places_that_are_all_rounded_the_same_way_keep_the_bound"],
    test_row_map: ["test_layers_with_closed_forms_equal_a_loop_over_single_examples"],
}
for _module, _names in SHARED.items():
    globals().update({name: getattr(_module, name) for name in _names})


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no tensor to be on the CPU."""
    monkeypatch.setattr(processes, "_PROCESSORS", frozenset[str]())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("entries", [100, 5_000_000], ids=["few", "many"])
def test_norms_are_right_where_squares_are_lost(entries: int, size: float):
    rows_BP = torch.randn(2, entries, generator=torch.Generator().manual_seed(0)) * size
    expected_B = torch.linalg.vector_norm(rows_BP.double(), dim=1)
    torch.testing.assert_close(norms_of(rows_BP), expected_B, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(position_norms(rows_BP), expected_B, rtol=1e-3, atol=0.0)  # a bound only


@pytest.mark.parametrize(("of_a", "of_b"), [(1, 1), (1e-25, 1e25), (1e20, 1e-22), (0, 1), (1e-30, 1), (1e-18, 1e-18)])
@pytest.mark.parametrize("places", [1, 3], ids=["one position", "all positions"])
def test_inner_products_hide_no_position_whose_squares_are_lost(of_a: float, of_b: float, places: int):
    a, b = (torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size)) for size in (50, 40))
    a[1, :places] *= of_a
    b[1, :places] *= of_b
    wanted = torch.linalg.matrix_norm(b.double().mT @ a.double())
    torch.testing.assert_close(Outer(a, b).norms_by_inner_products(), wanted, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", test_row_map.LAYERS)
def test_closed_forms_of_large_weights_equal_a_loop_over_single_examples(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "SMALL", 0)
    test_row_map.test_layers_with_closed_forms_equal_a_loop_over_single_examples(name)


class Changing(torch.nn.Linear):
    """The Jacobian of its weight has a closed form until it is bent."""

    bent = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002, torch's name
        return F.linear(input, torch.tanh(self.weight) if self.bent else self.weight * 2, self.bias)


def test_a_closed_form_that_holds_no_more_is_dropped_before_anything_is_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "SMALL", 0)
    torch.manual_seed(0)
    layer = Changing(20, 6)
    model, x = torch.nn.Sequential(layer, torch.nn.Tanh()).double(), torch.randn(5, 3, 20, dtype=torch.float64)
    engine, like = Factored(model, test_row_map.losses_of), dict(model.named_parameters())
    for step in range(5):
        layer.bent = step in (2, 3)
        engine.begin_step()
        accumulator = ClippingAccumulator(like=like, clip=pg.clip.Flat(), max_grad_norm=0.5)
        accumulator.add(engine(x))
        rows = test_row_map.one_by_one(model, x)
        norm_B = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        for name, value in accumulator.result()[0].values.items():
            wanted = torch.einsum("b,b...->...", (0.5 / norm_B).clamp(max=1), rows[name])
            torch.testing.assert_close(value, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dilation", "groups"),
    [
        ((5, 4, 9), (3,), (2,), (1,), (1,), 1),
        ((6, 4, 9, 8), (3, 2), (1, 2), (1, 0), (2, 1), 1),
        ((6, 4, 9, 8), (3, 3), (1, 1), (1, 1), (1, 1), 2),
        ((4, 4, 5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 4),
        ((3, 2, 4, 5, 4), (2, 3, 2), (1, 1, 2), (1, 0, 1), (1, 2, 1), 1),
        ((6, 4, 9, 9), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_convolutions_equal_torchs_gradient_of_one_example(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    parts: int,
):
    generator, outputs = torch.Generator().manual_seed(0), 4
    x = torch.randn(shape, generator=generator, dtype=torch.float64)[: len(range(shape[0])) // parts * parts]
    weight = torch.randn(outputs, shape[1] // groups, *kernel, generator=generator, dtype=torch.float64)
    options = (None, stride, padding, dilation, False, [0] * len(kernel), groups)
    b = torch.randn_like(torch.convolution(x, weight, *options))
    factor = Convolution(x, b, Geometry(kernel, stride, padding, dilation, groups), parts=parts)
    for index in range(len(x) // parts):
        rows = slice(index * parts, (index + 1) * parts)
        own = weight.clone().requires_grad_()
        (torch.convolution(x[rows], own, *options) * b[rows]).sum().backward()
        assert own.grad is not None
        torch.testing.assert_close(factor.dense()[index], own.grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(factor.norms()[index], own.grad.norm(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 4, 40])
def test_a_table_waits_for_nothing(length: int):
    """Some words are read several times, and some texts are longer than the table."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(12, (length, 5), generator=generator).T
    r_BTD, scales = torch.randn(5, length, 3, generator=generator).double(), torch.rand(12, 3, generator=generator)
    factor = Rows(ids_BT, r_BTD, 12)
    with test_experts.Dispatched() as seen:
        norms = factor.norms(), factor.norms(scales.double())
        total = factor.sum_in_parts(torch.ones(5, dtype=torch.float64))
    assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2"} & seen.calls.keys()
    dense_BVD = F.one_hot(ids_BT, 12).double().mT @ r_BTD
    for found, wanted in zip(norms, (dense_BVD, dense_BVD * scales), strict=True):
        torch.testing.assert_close(found, wanted.flatten(1).norm(dim=1), rtol=1e-12, atol=0.0)
    for bound_B, r in ((factor.apart_bound(None), r_BTD), (factor.apart_bound(scales), r_BTD * scales[ids_BT])):
        by_word_BV = (F.one_hot(ids_BT, 12) * r.norm(dim=2, keepdim=True)).sum(1)
        torch.testing.assert_close(bound_B, by_word_BV.norm(dim=1), rtol=1e-12, atol=0.0)
        summed_BVD = F.one_hot(ids_BT, 12).double().mT @ r.abs()  # what rounding errors are a share of
        assert (bound_B * (1 + 1e-12) >= summed_BVD.flatten(1).norm(dim=1)).all()
    torch.testing.assert_close(total, dense_BVD.sum(0), rtol=1e-12, atol=1e-12)


def test_no_number_of_examples_chooses_how_norms_and_bounds_are_computed():
    """If it did, one more example could change the rounding of all others. The sizes are on both sides of a block."""
    generator = torch.Generator().manual_seed(0)
    few, many = (torch.randn(300, 40, width, generator=generator) for width in (500, 400))
    images = torch.randn(300, 4, 30, 30, generator=generator)
    by_patches = Convolution(
        images, torch.randn(300, 6, 30, 30, generator=generator), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    )
    for factor in (Outer(few, many), Outer(few[:, :1], many[:, :1]), by_patches):
        norm_B, bound_B = factor.norms(), factor.term_bound()
        for size in (1, 2, 64, 209, 210, 211, 299):
            assert torch.equal(factor[:size].norms(), norm_B[:size])
            if bound_B is not None:
                bound = factor[:size].term_bound()
                assert bound is not None
                assert torch.equal(bound, bound_B[:size])


@pytest.mark.parametrize(("side", "most"), [(20, 40_000), (60, 0)])
def test_patches_are_written_out_for_a_few_examples_at_a_time(side: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """One example's patches take 14,400 floats, or 129,600, which are too many."""
    for module in (conv, norms):
        monkeypatch.setattr(module, "AT_ONCE", 40_000)
    sizes, real = [0], Geometry.patches

    def seen(self: Geometry, x: torch.Tensor) -> torch.Tensor:
        patches = real(self, x)
        sizes.append(patches.numel())
        return patches

    monkeypatch.setattr(Geometry, "patches", seen)
    x, b = torch.randn(9, 4, side, side), torch.randn(9, 5, side, side)
    assert Convolution(x, b, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)).dense().shape == (9, 5, 4, 3, 3)
    assert max(sizes) <= most


@pytest.mark.parametrize("at_once", [1, 20, 1000])
def test_lists_of_any_length_move_parameters_alike(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(debiased, "AT_ONCE", at_once)
    models = [make_model(), make_model()]
    for model, processors in zip(models, (frozenset({"cpu"}), frozenset[str]()), strict=True):
        monkeypatch.setattr(processes, "_PROCESSORS", processors)
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            values = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
            optimizer.step(grad=NoisyGradient(values, 0.1))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_pass_holds_more_examples_than_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(100, 100)
    assert MemoryPlan(Structure(model), None).examples(256, 100_000) == 256
    monkeypatch.setattr(processes, "_PROCESSORS", frozenset({"cpu"}))
    assert MemoryPlan(Structure(model), None).examples(256, 100_000) < 256


@pytest.mark.parametrize("few", [True, False])  # in blocks, or by the number of slots of each expert
def test_small_experts_are_computed_without_their_numbers_of_slots(few: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routed, "AT_ONCE", 1 << 24 if few else 0)
    asked = list[routed.Routes]()
    by_expert: Any = routed.Routes.by_expert
    monkeypatch.setattr(routed.Routes, "by_expert", property(lambda own: asked.append(own) or by_expert.func(own)))
    torch.manual_seed(0)
    model, x = test_experts.Mixture("Mixtral").double(), test_experts.texts(6)
    found = Factored(model, losses_of)(x)
    weights = torch.rand(6, dtype=torch.float64)
    for name, rows in one_by_one(model, x).items():
        total = torch.einsum("b,b...->...", weights, rows)
        for one in (found[name].weighted_sum, found[name].sum_in_parts, found[name].exact_sum):
            torch.testing.assert_close(one(weights), total, rtol=1e-10, atol=1e-12)
    assert bool(asked) == (not few)
