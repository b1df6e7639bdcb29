"""Every numbered equation of docs/mathematics.md, in float64: against automatic differentiation, numpy and the code."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import privgrad as pg
from pages import ROOT
from privgrad.accounting.mechanisms import most_participations, rate_in_group
from privgrad.clip.clipping import Flat
from privgrad.engine.factors.displacement import Displacement
from privgrad.engine.factors.embedding import Bags, Rows, TiedTable
from privgrad.engine.factors.mapped import InputMap, with_mapped_inputs
from privgrad.engine.factors.outer import Outer
from privgrad.engine.factors.parametrized import RowMap
from privgrad.engine.factors.weight_standardization import WeightStandardization
from privgrad.gradient.factor import Dense
from privgrad.gradient.transform import shifted
from privgrad.noise.banded import Banded, Recursion, response, square_root, std_at
from privgrad.noise.gaussian import std_of_noise
from privgrad.precondition.input_maps import _inverse_power
from privgrad.types import NoisyGradient

PAGE = ROOT / "docs/mathematics.md"
TAGS = re.findall(r"\\tag\{([\d.]+)\}", PAGE.read_text())
CHECKED: set[str] = set()
T, INPUTS, OUTPUTS, WORDS = 4, 5, 3, 7


def checks(*numbers: str) -> Callable[[Any], Any]:
    """Say which equations a test checks."""
    CHECKED.update(numbers)
    return lambda test: test


def same(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found).double(), torch.as_tensor(expected).double(), rtol=rtol, atol=1e-12
    )


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_equations_are_numbered_in_order_and_all_are_checked():
    numbers = [tuple(map(int, tag.split("."))) for tag in TAGS]
    counts = {section: sum(number[0] == section for number in numbers) for section in range(1, 7)}
    assert numbers == [(section, k + 1) for section, count in counts.items() for k in range(count)]
    assert set(TAGS) == CHECKED


def test_the_code_cites_equations_that_exist_and_each_section():
    cited: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = " ".join(re.sub(r"\n\s*#?", "\n", path.read_text()).split())
        for run in re.findall(r"docs/mathematics\.md,? ((?:\(\d+\.\d+\)(?:, | and | to )?)+)", text):
            cited |= set(re.findall(r"\d+\.\d+", run))
    assert cited <= set(TAGS)
    assert {number.split(".")[0] for number in cited} == {str(section) for section in range(1, 7)}


# 1. Norms from factors


def outer(positions: int = T) -> tuple[Outer, Tensor, Tensor]:
    a, b = torch.randn(1, positions, INPUTS), torch.randn(1, positions, OUTPUTS)
    return Outer(a, b), a[0], b[0]


@checks("1.1", "1.2", "1.3", "1.4", "1.5", "1.8")
def test_gradients_of_a_linear_layer_are_sums_of_outer_products():
    layer, a = nn.Linear(INPUTS, OUTPUTS), torch.randn(T, INPUTS)
    y = layer(a)
    y.retain_grad()
    (torch.tanh(y).square() * torch.randn(T, OUTPUTS)).sum().backward()
    b, g, g_bias = y.grad, layer.weight.grad, layer.bias.grad
    assert b is not None
    assert g is not None
    same(sum(torch.outer(b[t], a[t]) for t in range(T)), g)
    same(b.sum(0), g_bias)
    factor = Outer(a[None], b[None])
    square = sum((a[s] @ a[t]) * (b[s] @ b[t]) for s in range(T) for t in range(T))
    same(square, g.square().sum())
    same(factor.norms_by_inner_products()[0].square(), square)
    same(Outer(a[None, :1], b[None, :1]).norms()[0], a[0].norm() * b[0].norm())
    bound = (a.norm(dim=1) * b.norm(dim=1)).sum()
    same(factor.term_bound(), bound[None])
    assert g.norm() <= bound
    x = torch.randn(INPUTS)
    same(sum(b[t] * (a[t] @ x) for t in range(T)), g @ x)
    same(Displacement(factor, torch.tensor([0.5])).apply(x[None, None])[0, 0], 0.5 * g @ x)
    many, weights = Outer(torch.randn(6, T, INPUTS), torch.randn(6, T, OUTPUTS)), torch.rand(6)
    same(many.weighted_sum(weights), torch.einsum("i,ito,itj->oj", weights, many.b_BTO, many.a_BTI))


@checks("1.6", "1.7")
def test_norms_of_embeddings_and_tied_tables():
    table, ids = torch.randn(WORDS, INPUTS, requires_grad=True), torch.tensor([2, 5, 2, 0])
    read = F.embedding(ids, table)
    read.retain_grad()
    out = torch.tanh(read) @ table.T
    out.retain_grad()
    hidden = torch.tanh(read).detach()
    out.square().sum().backward()
    r, b, g = read.grad, out.grad, table.grad
    assert r is not None
    assert b is not None
    assert g is not None
    rows, own = Rows(ids[None], r[None], WORDS), Outer(hidden[None], b[None])
    square = sum(r[ids == v].sum(0).square().sum() for v in range(WORDS))
    same(square, rows.dense().square().sum())
    same(rows.norms()[0].square(), square)
    cross = sum(b[t, ids[s]] * (hidden[t] @ r[s]) for s in range(T) for t in range(T))
    same(own.dense().square().sum() + square + 2 * cross, g.square().sum())
    tied = TiedTable(own, rows)
    same(tied.norms()[0], g.norm())
    bound, by_word = tied.term_bound(), torch.stack([r[ids == v].norm(dim=1).sum() for v in range(WORDS)])
    assert bound is not None
    same(bound[0], (hidden.norm(dim=1) * b.norm(dim=1)).sum() + by_word.norm())
    # Rounding errors are a share of the sum of absolute terms.
    absolute = b.abs().T @ hidden.abs() + F.one_hot(ids, WORDS).to(r.dtype).T @ r.abs()
    assert absolute.norm() <= bound[0]


@checks("1.9")
def test_clipped_gradients_have_at_most_norm_c():
    norms = {"a": torch.tensor([3.0, 0.1]), "b": torch.tensor([4.0, 0.2])}
    factors = Flat().factors(norms, 2.0)
    same(factors["a"], [2.0 / 5.0, 1.0])
    same(factors["a"] * (norms["a"].square() + norms["b"].square()).sqrt(), [2.0, math.sqrt(0.05)])


# 2. Preconditioned norms


@checks("2.1", "2.2", "2.3", "2.5")
def test_norms_with_scales_and_shifts():
    scales, shift, keep = torch.rand(OUTPUTS, INPUTS) + 0.1, torch.randn(OUTPUTS, INPUTS), 0.7
    parameters = {"w": torch.zeros(OUTPUTS, INPUTS)}
    matrix = torch.randn(INPUTS, INPUTS)
    own = InputMap(matrix + matrix.T)
    for positions in (1, T):
        factor, a, b = outer(positions)
        g = factor.dense()[0]
        mapped = shifted(with_mapped_inputs({"w": factor}, {"w": own}), keep, {"w": shift}, parameters)["w"]
        same(mapped.norms(scales)[0], ((keep * g @ own.matrix + shift) * scales).norm())
        if positions == 1:
            same(b[0].square() @ scales.square() @ a[0].square(), (g * scales).square().sum())
            same(factor.norms(scales)[0], (g * scales).norm())
        rho = scales.amax(1)
        gamma = (scales / rho[:, None]).amax(0)
        assert (scales <= rho[:, None] * gamma + 1e-15).all()
        bound = ((rho * b).norm(dim=1) * (gamma * a).norm(dim=1)).sum()
        assert (g * scales).norm() <= bound
        if positions > 1:
            same(factor.term_bound(scales), bound[None])
        square = (g * scales).square().sum() + 2 * (g * shift * scales.square()).sum() + (shift * scales).square().sum()
        same(square, ((g + shift) * scales).square().sum())


@checks("2.4")
def test_norms_of_bags_with_scales():
    ids, weights, r = torch.tensor([[1, 4, 1]]), torch.rand(1, 3), torch.randn(1, INPUTS)
    scales = torch.rand(WORDS, INPUTS) + 0.1
    bag = Bags(ids[None], weights[None], r[None], WORDS)
    c = torch.zeros(WORDS).index_add(0, ids[0], weights[0])
    same(bag.dense()[0], torch.outer(c, r[0]))
    same(bag.norms()[0], c.norm() * r.norm())
    same(c.square() @ scales.square() @ r[0].square(), (bag.dense()[0] * scales).square().sum())
    same(bag.norms(scales)[0], (bag.dense()[0] * scales).norm())


@checks("2.6", "2.7")
def test_mapped_inputs_keep_the_factors():
    factor, a, b = outer()
    whole = torch.randn(INPUTS + 1, INPUTS + 1)
    whole = whole + whole.T
    inner, u, nu = whole[:INPUTS, :INPUTS], whole[:INPUTS, INPUTS], whole[INPUTS, INPUTS]
    same(factor.dense()[0] @ inner, sum(torch.outer(b[t], inner @ a[t]) for t in range(T)))
    joined = torch.cat([a, torch.ones(T, 1)], 1)  # the constant 1 is an input
    both = (b.T @ joined) @ whole
    same(sum(torch.outer(b[t], inner @ a[t] + u) for t in range(T)), both[:, :INPUTS])
    same(sum(b[t] * (u @ a[t] + nu) for t in range(T)), both[:, INPUTS])
    bias = Dense(b.sum(0)[None])
    found = with_mapped_inputs({"w": factor, "b": bias}, {"w": InputMap(whole, "b")})
    same(found["w"].dense()[0], both[:, :INPUTS])
    same(found["b"].dense()[0], both[:, INPUTS])


@checks("2.8", "2.9")
def test_the_matrix_of_inputs_and_the_bound_of_its_norm():
    inputs, power, ridge = torch.randn(50, INPUTS) * torch.arange(1.0, INPUTS + 1), 0.35, 0.1
    moment = inputs.T @ inputs / 50
    values, vectors = torch.linalg.eigh(moment)
    scales = (values + ridge * values.mean()) ** -power
    expected = vectors @ torch.diag(scales / scales.mean()) @ vectors.T
    found = _inverse_power("w", moment, power, ridge, torch.float64)
    same(found, expected)
    same(torch.linalg.eigvalsh(found).mean(), 1.0)
    bound = torch.linalg.matrix_power(found.T @ found, 4).abs().sum(1).max() ** (1 / 8)
    norm = torch.linalg.matrix_norm(found, 2)
    assert norm <= bound <= 1.3 * norm
    same(InputMap(found).bound, bound, rtol=2e-3)


# 3. Weight standardization

FAN_IN = 20
ADDED = 1e-4 / FAN_IN


def standardized(v: Tensor) -> tuple[Tensor, Tensor]:
    """(3.1) for one row: y and r."""
    centered = v - v.mean()
    r = (centered.square().mean() + ADDED).rsqrt()
    return r * centered, r


class Row:
    """One row v with a small spread, so that the added constant counts; a gradient h, and what follows from them."""

    def __init__(self) -> None:
        self.v, self.gain, self.h = 2.0 + 3e-3 * torch.randn(FAN_IN), torch.tensor(1.7), torch.randn(FAN_IN)
        self.k = self.gain / FAN_IN**0.5
        self.y, self.r = standardized(self.v)
        self.q = self.h - self.h.mean() - self.y * self.along
        self.g = self.r * self.k * self.q

    @property
    def along(self) -> Tensor:
        return (self.y * self.h).mean()

    def derivative(self, u: Tensor) -> Tensor:
        """(3.3)."""
        return self.r * (u - u.mean() - self.y * (self.y * u).mean())


def gradient_of(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


@checks("3.1", "3.2", "3.3", "3.4")
def test_a_standardized_row_and_its_first_derivative():
    row, module = Row(), WeightStandardization(1)
    module.gain = nn.Parameter(row.gain.view(1, 1, 1, 1))
    v = row.v.view(1, FAN_IN, 1, 1).clone().requires_grad_()
    w = module(v)
    same(w.flatten(), row.k * row.y)
    same(row.y.mean(), 0.0)
    same(row.y.square().mean(), 1 - ADDED * row.r**2)
    u = torch.randn(FAN_IN)
    matrix = jacobian(lambda v: standardized(v)[0], row.v)
    same(matrix @ u, row.derivative(u), rtol=1e-8)
    same(matrix, matrix.T, rtol=1e-8)
    (w.flatten() @ row.h).backward()
    assert v.grad is not None
    assert module.gain.grad is not None
    same(v.grad.flatten(), row.g, rtol=1e-8)
    same(row.g, row.k * row.derivative(row.h))
    same(module.gain.grad.flatten()[0], FAN_IN**0.5 * row.along)


@checks("3.5", "3.6", "3.8")
def test_sums_over_rows():
    row, a, b = Row(), torch.randn(T, FAN_IN), torch.randn(T, OUTPUTS)
    y = row.y + 0.1  # of a mean that is not 0, as after rounding
    h = b.T @ a
    for o in range(OUTPUTS):
        q = h[o] - h[o].mean() - y * (y * h[o]).mean()
        mean, along, level, square = h[o].mean(), (y * h[o]).mean(), y.mean(), y.square().mean()
        taken = mean**2 + (2 - square) * along**2 - 2 * level * mean * along
        same(q.square().sum(), h[o].square().sum() - FAN_IN * taken)
        same((y * q).mean(), (1 - square) * along - level * mean)
        same(h[o].square().sum(), sum(b[s, o] * b[t, o] * (a[s] @ a[t]) for s in range(T) for t in range(T)))
        same(mean, sum(b[t, o] * a[t].mean() for t in range(T)))
        same(along, sum(b[t, o] * (y * a[t]).mean() for t in range(T)))


@checks("3.7", "3.9")
def test_moved_weights():
    row, share, of_k = Row(), 1e-6, 0.3
    same(row.g.mean() / row.g.norm(), 0.0)
    moved, moved_r = standardized(row.v + share * row.g)
    slope = (row.y * row.g).mean()
    same(moved_r**-2, row.r**-2 + 2 * share / row.r * slope + share**2 * row.g.square().mean(), rtol=1e-8)
    same(moved, moved_r / row.r * row.y + moved_r * share * row.g, rtol=1e-8)
    _, tangent = torch.autograd.functional.jvp(
        lambda v, k: k * standardized(v)[0], (row.v, row.k), (share * row.g, torch.tensor(of_k))
    )
    same(tangent, row.k * row.derivative(share * row.g) + of_k * row.y, rtol=1e-8)


@checks("3.10", "3.11", "3.12")
def test_the_second_derivative():
    row, s, m = Row(), 1e-3, 0.3
    h, g, k, y, r = row.h, row.g, row.k, row.y, row.r
    u = torch.randn(FAN_IN)

    def of_h_and(u: Tensor, v: Tensor) -> Tensor:
        y, r = standardized(v)
        return h @ (r * (u - u.mean() - y * (y * u).mean()))

    covariance = (h * u).mean() - h.mean() * u.mean()
    slope = (y * u).mean()
    expected = -(r**2) * (covariance - row.along * slope) * y
    expected -= r * (slope * row.derivative(h) + row.along * row.derivative(u))
    same(gradient_of(lambda v: of_h_and(u, v), row.v), expected, rtol=1e-7)

    of_y, slope = k * row.along, (y * g).mean()
    expected = -s * r * (r * of_y + slope) * g + s * r**2 * (of_y * slope - g.square().mean() / r) * y
    expected += m * row.derivative(h)
    found = gradient_of(lambda v: k * of_h_and(s * g, v) + m * (h @ standardized(v)[0]), row.v)
    same(found, expected, rtol=1e-7)

    of_gain = gradient_of(lambda gain: gain / FAN_IN**0.5 * of_h_and(s * g, row.v), row.gain)
    product = r * k * (row.q.square().sum() + FAN_IN * (1 - y.square().mean()) * row.along**2)
    same(h @ g, product)
    same(of_gain, s * r / FAN_IN**0.5 * (product - FAN_IN * row.along * slope), rtol=1e-8)


def weight_normalized(v: Tensor) -> Tensor:
    return 1.7 * v / v.norm()


@checks("3.13", "3.14", "3.15")
def test_jacobians_by_three_numbers():
    row = Row()
    scale = row.r * row.k
    numbers = {
        "standardized": (scale, -scale, -scale * row.y.square().mean()),
        "normalized": (1.7 / row.v.norm(), torch.tensor(0.0), -1.7 / row.v.norm()),
    }
    weights = {"standardized": lambda v: row.k * standardized(v)[0], "normalized": weight_normalized}
    for name, weight in weights.items():
        matrix, unit = jacobian(weight, row.v), weight(row.v) / weight(row.v).norm()
        sigma, level, along = numbers[name]
        mean, product = row.h.mean(), unit @ row.h
        pulled = sigma * row.h + level * mean + along * product * unit
        same(matrix.T @ row.h, pulled, rtol=1e-7)
        square = sigma**2 * row.h.square().sum() + (level + 2 * sigma) * level * FAN_IN * mean**2
        square += (along + 2 * sigma) * along * product**2 + 2 * level * along * FAN_IN * unit.mean() * mean * product
        same(square, pulled.square().sum(), rtol=1e-8)
        apart = (level - along) ** 2 + 4 * level * along * FAN_IN * unit.mean() ** 2
        in_plane = ((2 * sigma + level + along).abs() + apart.clamp(min=0).sqrt()) / 2
        norm = torch.maximum(sigma.abs(), in_plane)
        same(torch.linalg.matrix_norm(matrix, 2), norm, rtol=1e-7)
        found = RowMap(unit[None], tuple(number[None] for number in (sigma, level, along)), row.v[None].shape)
        same(found.spectral_norm, norm)
        same(found.pull(row.h[None, None])[0, 0], pulled)


# 4. Recurrent layers

HIDDEN = 3


def by_autograd(layer: nn.RNNBase, x: Tensor, e: Tensor) -> dict[str, Tensor]:
    out, _ = layer(x[:, None])
    (out[:, 0] * e).sum().backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


def weights_of(layer: nn.RNNBase) -> dict[str, Tensor]:
    return {name.removesuffix("_l0"): parameter.detach() for name, parameter in layer.named_parameters()}


def outer_sum(b: Tensor, a: Tensor) -> Tensor:
    return torch.einsum("to,ti->oi", b, a)


@checks("4.1", "4.2")
@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_gradients_of_an_rnn(kind: str):
    layer, x, e = nn.RNN(INPUTS, HIDDEN, nonlinearity=kind), torch.randn(T, INPUTS), torch.randn(T, HIDDEN)
    expected, own = by_autograd(layer, x, e), weights_of(layer)
    h, delta = [torch.zeros(HIDDEN)], torch.zeros(T + 1, HIDDEN)
    for t in range(T):
        p = own["weight_ih"] @ x[t] + own["bias_ih"] + own["bias_hh"]
        h.append((torch.tanh if kind == "tanh" else torch.relu)(p + own["weight_hh"] @ h[t]))
    for t in reversed(range(T)):
        slope = 1 - h[t + 1].square() if kind == "tanh" else (h[t + 1] > 0).double()
        delta[t] = slope * (e[t] + own["weight_hh"].T @ delta[t + 1])
    same(outer_sum(delta[:T], x), expected["weight_ih_l0"])
    same(outer_sum(delta[:T], torch.stack(h[:-1])), expected["weight_hh_l0"])
    same(delta.sum(0), expected["bias_ih_l0"])
    same(delta.sum(0), expected["bias_hh_l0"])


@checks("4.3", "4.4", "4.5", "4.6")
def test_gradients_of_an_lstm():
    layer, x, e = nn.LSTM(INPUTS, HIDDEN, proj_size=2), torch.randn(T, INPUTS), torch.randn(T, 2)
    expected, own = by_autograd(layer, x, e), weights_of(layer)
    h, c, m, gates = [torch.zeros(2)], [torch.zeros(HIDDEN)], list[Tensor](), list[tuple[Tensor, ...]]()
    for t in range(T):
        p = own["weight_ih"] @ x[t] + own["bias_ih"] + own["bias_hh"]
        i, f, n, o = (p + own["weight_hh"] @ h[t]).chunk(4)
        gates.append((i.sigmoid(), f.sigmoid(), n.tanh(), o.sigmoid()))
        iota, phi, eta, omega = gates[t]
        c.append(phi * c[t] + iota * eta)
        m.append(omega * c[t + 1].tanh())
        h.append(own["weight_hr"] @ m[t])
    delta, of_h, of_c = torch.zeros(T + 1, 4 * HIDDEN), torch.zeros(T, 2), torch.zeros(HIDDEN)
    for t in reversed(range(T)):
        iota, phi, eta, omega = gates[t]
        of_h[t] = e[t] + own["weight_hh"].T @ delta[t + 1]
        of_m = own["weight_hr"].T @ of_h[t]
        forgotten = gates[t + 1][1] if t + 1 < T else 0.0
        of_c = forgotten * of_c + of_m * omega * (1 - c[t + 1].tanh().square())
        parts = (
            of_c * eta * iota * (1 - iota),
            of_c * c[t] * phi * (1 - phi),
            of_c * iota * (1 - eta.square()),
            of_m * c[t + 1].tanh() * omega * (1 - omega),
        )
        delta[t] = torch.cat(parts)
    same(outer_sum(delta[:T], x), expected["weight_ih_l0"])
    same(outer_sum(delta[:T], torch.stack(h[:-1])), expected["weight_hh_l0"])
    same(delta.sum(0), expected["bias_hh_l0"])
    same(outer_sum(of_h, torch.stack(m)), expected["weight_hr_l0"])


@checks("4.7", "4.8", "4.9")
def test_gradients_of_a_gru():
    layer, x, e = nn.GRU(INPUTS, HIDDEN), torch.randn(T, INPUTS), torch.randn(T, HIDDEN)
    expected, own = by_autograd(layer, x, e), weights_of(layer)
    h, known = [torch.zeros(HIDDEN)], list[tuple[Tensor, ...]]()
    for t in range(T):
        p, s = own["weight_ih"] @ x[t] + own["bias_ih"], own["weight_hh"] @ h[t] + own["bias_hh"]
        rho, zeta = (p + s)[: 2 * HIDDEN].sigmoid().chunk(2)
        eta = torch.tanh(p[2 * HIDDEN :] + rho * s[2 * HIDDEN :])
        known.append((rho, zeta, eta, s[2 * HIDDEN :]))
        h.append(eta + zeta * (h[t] - eta))
    delta, theta, of_h = torch.zeros(T, 3 * HIDDEN), torch.zeros(T, 3 * HIDDEN), e[T - 1]
    for t in reversed(range(T)):
        rho, zeta, eta, part = known[t]
        of_n = of_h * (1 - zeta) * (1 - eta.square())
        of_r, of_z = of_n * part * rho * (1 - rho), of_h * (h[t] - eta) * zeta * (1 - zeta)
        delta[t], theta[t] = torch.cat([of_r, of_z, of_n]), torch.cat([of_r, of_z, rho * of_n])
        of_h = (e[t - 1] if t else 0.0) + own["weight_hh"].T @ theta[t] + zeta * of_h
    same(outer_sum(delta, x), expected["weight_ih_l0"])
    same(outer_sum(theta, torch.stack(h[:-1])), expected["weight_hh_l0"])
    same(delta.sum(0), expected["bias_ih_l0"])
    same(theta.sum(0), expected["bias_hh_l0"])


# 5. Debiasing and the noise step


@checks("5.1", "5.2", "5.3")
def test_the_bias_of_the_noise_is_what_is_subtracted():
    s = std_of_noise(2.0, 0.3, 40)
    assert s == pytest.approx(2.0 * 0.3 / 40)
    rng, beta, stds = np.random.default_rng(0), 0.9, np.array([1.0, 2.0, 0.5, 1.0, 1.5])
    clean, noise = rng.normal(size=5), rng.normal(size=(200_000, 5)) * stds
    v, n = np.zeros(len(noise)), 0.0
    for t in range(5):
        v, n = beta * v + (1 - beta) * (clean[t] + noise[:, t]) ** 2, beta * n + (1 - beta) * stds[t] ** 2
    expected = (1 - beta) * sum(beta ** (4 - t) * clean[t] ** 2 for t in range(5))
    assert abs((v - n).mean() - expected) < 5 * v.std() / len(v) ** 0.5

    weight, floor = nn.Parameter(torch.zeros(3)), 0.5
    optimizer = pg.optim.AdamBC([("w", weight)], lr=1.0, betas=(0.0, beta), debias_floor=floor)
    gradient, second = torch.tensor([3.0, 1.0, 0.2]), torch.zeros(3)
    bias = 0.0
    for t in range(3):
        std, before = float(stds[t]), weight.detach().clone()
        second, bias = beta * second + (1 - beta) * gradient.square(), beta * bias + (1 - beta) * std**2
        optimizer.step(grad=NoisyGradient({"w": gradient}, std))
        corrected = 1 - beta ** (t + 1)
        denominator = torch.maximum((second - bias) / corrected, torch.tensor(floor * bias / corrected))
        same(before - weight.detach(), gradient / denominator.sqrt())


@checks("5.4")
def test_the_spread_of_the_second_moment():
    beta = 0.999
    weights = (1 - beta) * beta ** np.arange(40_000)
    assert np.sqrt(2 * np.square(weights).sum()) == pytest.approx(math.sqrt(2 * (1 - beta) / (1 + beta)))
    squares = np.square(np.random.default_rng(0).normal(size=100_000))
    assert squares.var() == pytest.approx(2.0, rel=0.05)


@checks("5.5", "5.6")
def test_pure_noise_moves_a_weight_by_the_noise_step():
    rate, s, steps = 0.3, 0.02, 200_000
    for momentum, a, divisor in [(0.9, 1.0, 1.0), (0.9, 0.1, 2.0), (0.5, 0.25, 1.0)]:
        reach = a * np.cumsum(momentum ** np.arange(steps))  # how far each noise has moved the sum of all m by the end
        moved = rate / divisor * s * np.sqrt(np.square(reach).sum())
        assert moved / math.sqrt(steps) == pytest.approx(rate * s / divisor * a / (1 - momentum), rel=1e-3)
    eps, floor = 0.01, 4.0
    rows: list[tuple[Any, dict[str, Any], float]] = [
        (pg.optim.SGD, {"momentum": 0.9, "dampening": 0.4}, rate * s * 0.6 / 0.1),
        (pg.optim.MomentumSGD, {"momentum": 0.9}, rate * s / 0.1),
        (pg.optim.Adam, {"eps": eps}, rate * s / (s + eps)),
        (pg.optim.RMSprop, {"eps": eps, "momentum": 0.5}, rate * s / (s + eps) / 0.5),
        (pg.optim.AdamBC, {"debias_floor": floor}, rate / math.sqrt(floor)),
    ]
    for kind, options, expected in rows:
        optimizer = kind([("w", nn.Parameter(torch.zeros(2)))], lr=rate, **options)
        optimizer.step(grad=NoisyGradient({"w": torch.zeros(2)}, s))
        assert optimizer.noise_step == pytest.approx(expected)


@checks("5.7")
def test_the_rate_of_a_noise_step():
    weight, s, u, gain = nn.Parameter(torch.zeros(2)), 0.02, 0.1, 1.5
    optimizer = pg.optim.SGD([("w", weight)], noise_step=u, momentum=0.9)
    gradient = torch.tensor([1.0, -2.0])
    optimizer.step(grad=NoisyGradient({"w": gradient}, s, noise_gain=gain))
    same(weight.detach(), -u / (gain / (1 - 0.9)) * gradient / s)


# 6. Noise with memory

BANDS, STEPS = 4, 30


def banded() -> tuple[Banded, np.ndarray, np.ndarray]:
    """Coefficients, and the matrix F."""
    found = Banded(BANDS).for_steps(STEPS)
    c = np.array(found.chosen)
    return found, c, np.sum([value * np.eye(STEPS, k=-back) for back, value in enumerate(c)], axis=0)


@checks("6.1", "6.2")
def test_noise_with_memory_is_the_inverse_of_the_matrix():
    found, c, factor = banded()
    z = np.random.default_rng(0).normal(size=(STEPS, 5))
    recursion, w = Recursion(found, 0), z.copy()
    for t in range(STEPS):
        recursion.moved("place", w[t], t)
        before = sum((c[k] * w[t - k] for k in range(1, BANDS) if t >= k), np.zeros(5))
        np.testing.assert_allclose(w[t], (z[t] - before) / c[0])
    np.testing.assert_allclose(factor @ w, z, atol=1e-12)
    sums, sigma, bound = np.random.default_rng(1).normal(size=(STEPS, 5)), 1.3, 0.7
    released = sums + sigma * bound * w
    np.testing.assert_allclose(factor @ released / bound, factor @ sums / bound + sigma * z, atol=1e-10)


@checks("6.3", "6.4", "6.5")
def test_what_one_person_can_change():
    _, c, factor = banded()
    rng, bound = np.random.default_rng(0), 0.7
    for t in range(STEPS):
        square = np.square(c[: min(BANDS - 1, STEPS - 1 - t) + 1]).sum()
        assert np.square(factor[:, t]).sum() == pytest.approx(square)
        assert square <= 1
    for group in range(BANDS):
        moved, steps = np.zeros((STEPS, 5)), range(group, STEPS, BANDS)
        for t in steps:
            moved[t] = rng.normal(size=5)
            moved[t] *= bound * rng.random() / np.linalg.norm(moved[t])
        square = sum(np.square(factor[:, t]).sum() * np.square(moved[t]).sum() for t in steps)
        assert np.square(factor @ moved).sum() == pytest.approx(square)
        assert square <= len(steps) * bound**2
        assert len(steps) <= most_participations(STEPS, BANDS) == math.ceil(STEPS / BANDS)
    assert (rate_in_group(0.1, BANDS), rate_in_group(0.4, BANDS)) == (0.1 * BANDS, 1.0)


@checks("6.6", "6.7", "6.8")
def test_errors_of_sums():
    found, c, factor = banded()
    inverse = np.linalg.inv(factor)
    h = response(c, STEPS)
    for t in (0, 3, STEPS - 1):
        assert std_at(found.chosen, t) == pytest.approx(math.sqrt(np.square(h[: t + 1]).sum()))
        assert std_at(found.chosen, t) == pytest.approx(np.linalg.norm(inverse[t]))
    sums = np.cumsum(h)
    error = math.sqrt(sum((STEPS - k) * sums[k] ** 2 for k in range(STEPS)) / STEPS)
    prefix = np.tril(np.ones((STEPS, STEPS))) @ inverse
    assert error == pytest.approx(math.sqrt(np.square(prefix).sum() / STEPS))
    assert found.prefix_error(STEPS) == pytest.approx(error)
    assert sum(STEPS - k for k in range(STEPS)) / STEPS == (STEPS + 1) / 2
    long = np.cumsum(response(c, 20_000))
    assert math.sqrt(np.square(long).sum() / 20_000) == pytest.approx(1 / abs(c.sum()), rel=1e-2)
    assert found.sum_std == pytest.approx(1 / abs(c.sum()))


@checks("6.9", "6.10")
def test_coefficients_and_slopes():
    root = square_root(12)
    series = np.array([math.comb(2 * k, k) / 4**k for k in range(12)])
    np.testing.assert_allclose(root, series / np.linalg.norm(series))
    np.testing.assert_allclose(np.convolve(series, series)[:12], 1.0)  # its square is 1 / (1 - x)

    def error(c: np.ndarray) -> float:
        return float(np.arange(STEPS, 0, -1.0) @ np.square(np.cumsum(response(c, STEPS))))

    _, c, _ = banded()
    h = response(c, STEPS)
    sums = np.cumsum(h)
    both = np.convolve(h, sums)
    for j in range(1, BANDS):
        slope = -2 * sum((STEPS - k) * sums[k] * both[k - j] for k in range(j, STEPS))
        step = 1e-6 * np.eye(BANDS)[j]
        assert slope == pytest.approx((error(c + step) - error(c - step)) / 2e-6, rel=1e-6)
