"""What clipping computes before it reads anything from the device equals the checked way, and takes one read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import privgrad as pg
from privgrad import processes
from privgrad.clip import clipping
from privgrad.clip.clipping import ClippingAccumulator, RawClipping
from privgrad.engine.factors import outer
from privgrad.engine.factors.conv import Convolution, Geometry
from privgrad.engine.factors.outer import Outer, RowRanges
from privgrad.engine.factors.parametrized import Jacobian, Pulled
from privgrad.gradient import factor as norms
from privgrad.gradient.factor import Dense, Factor, SideBySide, Sum, float64_norms, once, unread
from privgrad.types import ClippedSum

RULES: dict[str, Any] = {
    "flat": pg.clip.Flat(),
    "per layer": pg.clip.PerLayer({"a": 2.0, "b": 1.0}),
    "automatic": pg.clip.Automatic(),
}
SPOILED = ["not finite", "canceling", "heavy", "squares lost", "nothing"]
READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "equal", "is_nonzero", "masked_select"}
SIZE = 12


def chunk(kind: str = "light") -> dict[str, Factor]:
    """Gradients in factors of many kinds; the fourth example is spoiled or heavy in the given way."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(SIZE, *shape, generator=generator)

    # The terms of an example are alike, so that none is heavy.
    a, b, image, grads = 1 + 0.1 * drawn(7, 5), drawn(1, 4) * (1 + 0.1 * drawn(7, 1)), drawn(3, 8, 8), drawn(2, 8, 8)
    one, norm = drawn(1, 6), drawn(3)
    few = torch.cat([1 + 0.1 * drawn(3, 500), drawn(1, 400).expand(-1, 3, -1)], 2) / 500
    if kind == "not finite":
        norm[3, 1] = torch.inf
    elif kind == "canceling":
        a[3], b[3] = 1e5, torch.tensor([1.0, -1, 1, -1, 1, -1, 0])[:, None] * 1e5
    elif kind == "heavy":
        b[3] *= 10 * torch.tensor([1.0, -1, 1, -1, 1, -1, 1])[:, None]
    elif kind == "squares lost":
        few[3, :, :500] *= 1e-25
        few[3, :, 500:] *= 1e15
    elif kind == "nothing":
        for x in (a, b, image, one, norm, few):
            x[3] = 0.0
    weight = nn.Parameter(torch.rand(4, 5))
    return {
        "a.weight": Outer(a, b),
        "a.bias": Dense(b.sum(1)),
        "a.one": Outer(one, drawn(1, 3)),
        "a.norm": Dense(norm),
        "a.large": Dense(drawn(5000) / 50),
        "a.few": Outer(few[..., :500], few[..., 500:]),
        "b.conv": Convolution(image, 1e-3 * grads, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
        "b.rows": RowRanges([(2, Dense(drawn(3, 2)))], torch.Size((6, 2))),
        "b.bias": Dense(drawn(2)),
        "b.both": Sum([Dense(drawn(4, 5)), Outer(a, b / 9)]),
        "b.shift": Dense(drawn(2, 3)),
        "b.computed": Pulled(Outer(a, b), Jacobian(0.7 * weight, weight, 0.7), apart=False),
    }


def like() -> dict[str, Tensor]:
    return {name: torch.zeros(factor.shape) for name, factor in chunk().items()} | {"a.unused": torch.zeros(2)}


def scales() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.5 + torch.rand(p.shape, generator=generator) for name, p in like().items()}


def clipped(
    parts: Sequence[Mapping[str, Factor]], rule: str, *, padded: int | None = None, **options: Any
) -> tuple[ClippedSum, RawClipping]:
    accumulator = ClippingAccumulator(like=like(), clip=RULES[rule], max_grad_norm=3.0, **options)
    for part in parts:
        accumulator.add(part, padded)
    return accumulator.result()


def require_equal(one: tuple[ClippedSum, RawClipping], other: tuple[ClippedSum, RawClipping]) -> None:
    for (name, value), expected in zip(one[0].values.items(), other[0].values.values(), strict=True):
        assert torch.equal(value, expected), name
    for name in ("raw_norms", "raw_factors", "raw_lengths"):
        assert torch.equal(getattr(one[1], name), getattr(other[1], name)), name


@pytest.fixture(params=["processor", "elsewhere"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the ways of the CPU, or of other devices."""
    if request.param == "elsewhere":
        monkeypatch.setattr(processes, "_PROCESSORS", frozenset[str]())
    return request.param


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("flags", [(True, True), (False, True)])
@pytest.mark.parametrize("padded", [None, 2])
@pytest.mark.parametrize("inverse_scales", [{}, scales()], ids=["plain", "scaled"])
def test_the_checked_way_has_the_same_result_bit_for_bit(
    rule: str,
    flags: tuple[bool, bool],
    padded: int | None,
    inverse_scales: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
):
    seen, real = list[tuple[bool, bool]](), clipping._Unread.flags

    def noted(found: clipping._Unread) -> tuple[bool, bool]:
        seen.append(real(found))
        return seen[-1]

    monkeypatch.setattr(clipping._Unread, "flags", noted)
    unread = clipped([chunk(), chunk()], rule, padded=padded, inverse_scales=inverse_scales)
    assert seen == [(False, False)] * 2
    monkeypatch.setattr(clipping._Unread, "flags", lambda _: flags)
    require_equal(unread, clipped([chunk(), chunk()], rule, padded=padded, inverse_scales=inverse_scales))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", SPOILED)
def test_an_example_that_is_spoiled_or_heavy_is_treated_as_by_the_checked_way(
    rule: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    found = clipped([chunk(kind)], rule)
    monkeypatch.setattr(clipping._Unread, "flags", lambda _: (True, True))
    require_equal(found, clipped([chunk(kind)], rule))
    alone = [{name: factor[index : index + 1] for name, factor in chunk(kind).items()} for index in range(SIZE)]
    apart = clipped(alone, rule)
    torch.testing.assert_close(found[1].raw_norms, apart[1].raw_norms, rtol=1e-5, atol=0.0)
    for name, value in found[0].values.items():
        torch.testing.assert_close(value, apart[0].values[name], rtol=1e-4, atol=1e-5)


def test_norms_are_computed_again_where_squares_are_lost():
    a_BTI, b_BTO = torch.zeros(2, 4, 784), torch.zeros(2, 4, 60)
    for place, (x, y) in enumerate([(1e-23, 5e17), (1e-8, 1.0), (2.0, 0.0), (0.0, 2.0)]):
        a_BTI[:, place], b_BTO[:, place] = x, y
    accumulator = ClippingAccumulator(like={"p": torch.zeros(60, 784)}, clip=RULES["flat"], max_grad_norm=3.0)
    accumulator.add({"p": Outer(a_BTI, b_BTO)})
    wanted_B = torch.full((2,), (5e-6 + 1e-8) * (784 * 60) ** 0.5, dtype=torch.float64)
    torch.testing.assert_close(accumulator.result()[1].raw_norms, wanted_B, rtol=1e-4, atol=0.0)


class Reads(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        is_mask = name.startswith("index") and any(x is not None and x.dtype == torch.bool for x in args[1:2][0])
        if name in READS or is_mask:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inverse_scales", [{}, scales()], ids=["plain", "scaled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_chunk_takes_one_read_from_the_device(
    rule: str, inverse_scales: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "_PROCESSORS", frozenset[str]())
    parts = [chunk(), chunk()]
    for part in parts:
        del part["b.computed"]  # its rounding is known after its sum, and takes a second read
    lists, real = Counter[torch.Size](), Tensor.tolist
    with Reads() as reads, monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda self: lists.update([self.shape]) or real(self))
        clipped(parts, rule, inverse_scales=inverse_scales)
    assert (lists.total(), reads.found) == (len(parts), {})


@pytest.mark.parametrize("rule", RULES)
def test_small_gradients_side_by_side_are_clipped_as_apart(rule: str, monkeypatch: pytest.MonkeyPatch):
    joined = list[SideBySide]()
    real = SideBySide.apart
    monkeypatch.setattr(SideBySide, "apart", lambda self, total: joined.append(self) or real(self, total))
    together = clipped([chunk(), chunk()], rule)
    assert {name for factor in joined for name in factor.shapes} == {"a.bias", "a.norm", "b.bias", "b.shift"}
    monkeypatch.setattr(clipping, "_SMALL", 0)
    apart = clipped([chunk(), chunk()], rule)
    torch.testing.assert_close(together[1].raw_norms, apart[1].raw_norms, rtol=1e-7, atol=0.0)
    for name, value in together[0].values.items():
        torch.testing.assert_close(value, apart[0].values[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padded", [None, 2])
@pytest.mark.parametrize("rule", RULES)
def test_examples_apart_that_reach_no_parameter_count_with_a_gradient_of_zero(rule: str, padded: int | None):
    kept_B = torch.arange(SIZE) != 3
    accumulator = ClippingAccumulator(like=like(), clip=RULES[rule], max_grad_norm=3.0)
    accumulator.add(chunk(), padded)
    tried = accumulator.tried(chunk(), accumulator.counted(SIZE, padded) & kept_B, {})
    accumulator.take(tried, padded, (torch.tensor([3]), {}))
    masked = {name: factor.mask(kept_B) for name, factor in chunk().items()}
    found, expected = accumulator.result(), clipped([chunk(), masked], rule, padded=padded)
    assert found[0].values.keys() == expected[0].values.keys()
    for name, value in found[0].values.items():
        torch.testing.assert_close(value, expected[0].values[name])
    for name in ("raw_norms", "raw_factors", "raw_lengths"):
        torch.testing.assert_close(getattr(found[1], name)[SIZE:], getattr(expected[1], name)[SIZE:])
        assert torch.equal(getattr(found[1], name)[:SIZE], getattr(expected[1], name)[:SIZE])


def test_it_is_one_function_of_tensors_that_torch_compile_traces(monkeypatch: pytest.MonkeyPatch):
    """A step could so be compiled, or captured, with the numbers of its flags among its results."""
    monkeypatch.setattr(processes, "_PROCESSORS", frozenset[str]())
    shapes = {"a": (7, 5), "b": (7, 4), "one": (1, 6), "grads": (1, 3), "bias": (4,), "norm": (3,), "large": (5000,)}
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(SIZE, *shape, generator=generator) for name, shape in shapes.items()}

    def unread(x: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        factors: dict[str, Factor] = {"a": Outer(x["a"], x["b"]), "one": Outer(x["one"], x["grads"])}
        factors |= {name: Dense(x[name]) for name in ("bias", "norm", "large")}
        sums = clipping._Sums(dict.fromkeys(factors, torch.empty(0)), pg.clip.Flat(), 1.0, {}, SIZE)
        joined, scales = clipping._side_by_side(sums, factors, {})
        found = clipping._norms_and_factors(sums, joined, scales)
        sums.add(joined, found.factors, None)
        return sums.values, found.norms.joint_B, found.lengths, found.numbers()

    compiled = torch.compile(unread, fullgraph=True, backend="eager")
    for one, other in zip(compiled(given), unread(given), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


def test_norms_are_computed_once_for_each_tensor_that_a_look_meets():
    """Not for its memory: another tensor may be there, and have its id, as soon as it is freed."""
    x = torch.rand(3, 4)
    assert once(float64_norms, x) is not once(float64_norms, x)
    with unread():
        found = once(float64_norms, x)
        assert once(float64_norms, x) is found
        with unread():
            assert once(float64_norms, x) is not found
        for _ in range(10):
            torch.testing.assert_close(once(float64_norms, other := torch.rand(3, 4)), other.double().norm(dim=1))
            del other
        assert once(float64_norms, x) is found


def test_the_gradient_of_a_bias_has_norms_with_its_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_PROCESSORS", frozenset[str]())
    x, grad, seen = torch.rand(3, 1, 4), torch.rand(3, 5), list[Any]()
    monkeypatch.setattr(norms, "norms_of", lambda x, real=norms.norms_of: seen.append(x.shape) or real(x))
    monkeypatch.setattr(outer, "norms_of", norms.norms_of)
    with unread():
        weight_B, bias_B = Outer(x, grad).norms(), Dense(grad).norms()
    assert seen == [x.shape, grad.shape]
    torch.testing.assert_close(bias_B, grad.double().norm(dim=1))
    torch.testing.assert_close(weight_B, (grad[:, :, None] * x).double().flatten(1).norm(dim=1))
