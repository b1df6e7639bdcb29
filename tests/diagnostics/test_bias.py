"""The bias of clipping, against the formulas on gradients written out; and what is true of it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import MODELS, loss_fn
from torch import Tensor, nn

import privgrad as pg
from privgrad.diagnostics import raw_clipping_bias
from privgrad.gradient.reference import per_sample_gradients


def rows_of(model: nn.Module, examples: Any) -> Tensor:
    rows = per_sample_gradients(model, loss_fn, examples)
    return torch.cat([row.flatten(1) for row in rows.values()], 1)


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_formulas_on_rows(name: str):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, examples = make().double(), (inputs, torch.arange(6) % 3)
    rows = rows_of(model, examples)
    max_norm = float(rows.norm(dim=1).median())
    released = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    found = raw_clipping_bias(
        model, loss_fn, examples, max_grad_norm=max_norm, released=pg.NoisyGradient(released, 0.1)
    )
    g = rows.mean(0)
    s = (rows / (rows.norm(dim=1, keepdim=True) / max_norm).clamp(min=1)).mean(0)
    direction = torch.cat([value.flatten() for value in released.values()])
    wanted = {
        "raw_norm": g.norm(),
        "raw_bias": (s - g).norm(),
        "raw_along": s @ g / (g @ g),
        "raw_cosine": torch.cosine_similarity(s, g, dim=0),
        "raw_ascent": torch.cosine_similarity(rows, g[None]).mean(),
        "raw_released": torch.cosine_similarity(direction, g, dim=0),
    }
    for key, value in wanted.items():
        assert found[key] == pytest.approx(float(value), rel=1e-9), key
    pythagoras = (found["raw_along"] - 1) ** 2 * found["raw_norm"] ** 2 + found["raw_across"] ** 2
    assert pythagoras == pytest.approx(found["raw_bias"] ** 2, rel=1e-6)
    assert found["raw_cosine"] == pytest.approx(
        found["raw_along"]
        * found["raw_norm"]
        / math.hypot(found["raw_along"] * found["raw_norm"], found["raw_across"]),
        rel=1e-6,
    )


def of_gradients(values: list[list[float]], max_norm: float) -> dict[str, float]:
    """Of gradients that are just these."""
    rows = torch.tensor(values, dtype=torch.float64)
    model = nn.Linear(rows.shape[1], 1, bias=False).double()
    return raw_clipping_bias(model, lambda m, x: m(x)[:, 0], rows, max_grad_norm=max_norm)


def test_shorter_gradients_can_mean_more_bias():
    """The paper's lemma 2 says otherwise."""
    assert of_gradients([[3.0], [-3.0]], 1.0)["raw_bias"] == pytest.approx(0.0)
    assert of_gradients([[3.0], [-1.5]], 1.0)["raw_bias"] == pytest.approx(0.75)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(0.1, 5))
def test_the_bias_never_exceeds_what_is_cut_off(values: list[list[float]], max_norm: float):
    found = of_gradients(values, max_norm)
    assert found["raw_bias"] <= found["raw_bound"] + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_mean_of_the_norms_is_at_least_the_norm_of_the_mean(values: list[list[float]]):
    """Claim D20: BAM's penalty bounds the penalty on the norm of the mean gradient, with equality for one direction."""
    norms = torch.tensor(values, dtype=torch.float64).norm(dim=1)
    assert of_gradients(values, 1.0)["raw_norm"] <= float(norms.mean()) + 1e-9
    aligned = (norms[:, None] * torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)).tolist()
    assert of_gradients(aligned, 1.0)["raw_norm"] == pytest.approx(float(norms.mean()), abs=1e-9)


def test_equal_norms_give_the_ascent_of_the_mean():
    """With |g_i| = r for all, the mean cosine is |g| / r."""
    angles = torch.linspace(0, 2, 7, dtype=torch.float64)
    found = of_gradients(torch.stack([2 * angles.cos(), 2 * angles.sin()], 1).tolist(), 1.0)
    assert found["raw_ascent"] == pytest.approx(found["raw_norm"] / 2)


def test_without_clipping_there_is_no_bias():
    found = of_gradients([[1.0, 2.0], [0.5, -1.0]], 100.0)
    assert found["raw_along"] == pytest.approx(1.0)
    assert found["raw_bias"] == found["raw_bound"] == pytest.approx(0.0)
    assert found["raw_across"] == pytest.approx(0.0)


def test_own_gradients_are_those_of_the_perturbation():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).double(), torch.randn(6, 5, dtype=torch.float64)
    examples = (x, torch.arange(6) % 3)
    plain, own, none = (
        raw_clipping_bias(model, loss_fn, examples, max_grad_norm=0.5, perturb=perturb)["raw_norm"]
        for perturb in (None, pg.perturb.BAM(0.3), pg.perturb.BAM(0.0))
    )
    assert plain == none != own


@pytest.mark.parametrize("perturb", [None, pg.perturb.BAM(0.3)])
def test_how_many_examples_are_taken_at_once_changes_nothing(perturb: Any, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).double(), torch.randn(7, 5, dtype=torch.float64)
    found: list[dict[str, float]] = []
    for size in (7, 3):
        monkeypatch.setattr("privgrad.engine.factored.Factored.microbatch_size", lambda *_, size=size: size)
        examples = (x, torch.arange(7) % 3)
        found.append(raw_clipping_bias(model, loss_fn, examples, max_grad_norm=0.5, perturb=perturb))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_norm_that_is_none_is_refused():
    with pytest.raises(pg.PrivacyError, match="max_grad_norm"):
        of_gradients([[1.0]], 0.0)


def test_sat_is_measured_along_what_was_released():
    torch.manual_seed(0)
    model, examples = nn.Linear(2, 2), (torch.randn(3, 2), torch.tensor([0, 1, 1]))
    along = pg.NoisyGradient({name: torch.ones_like(p) for name, p in model.named_parameters()}, 1.0)
    with pytest.raises(pg.PrivacyError, match="released to be given for SAT"):
        raw_clipping_bias(model, loss_fn, examples, max_grad_norm=0.1, perturb=pg.perturb.SAT(0.5))
    found = raw_clipping_bias(model, loss_fn, examples, max_grad_norm=0.1, perturb=pg.perturb.SAT(0.5), released=along)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5 / math.sqrt(6)
    there = raw_clipping_bias(model, loss_fn, examples, max_grad_norm=0.1)
    assert {name: pytest.approx(value, rel=1e-5) for name, value in there.items()}.items() <= found.items()
    with pytest.raises(pg.PrivacyError, match="the number of examples to be an integer >= 1"):
        raw_clipping_bias(model, loss_fn, (torch.zeros(0, 2), torch.zeros(0).long()), max_grad_norm=0.1)


def test_a_point_made_of_the_batch_itself_is_refused():
    examples = (torch.randn(3, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(pg.PrivacyError, match="perturb to be BAM or SAT"):
        raw_clipping_bias(nn.Linear(2, 2), loss_fn, examples, max_grad_norm=1.0, perturb=pg.perturb.RawSAM(1))
