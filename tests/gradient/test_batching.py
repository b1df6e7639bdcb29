"""torch's batching rules, as the library meets them: each operation under vmap against a loop over examples.

What layers and losses use with an index, a mask or a reduction is here, with weights of each example's own; forward
under vmap and gradient outside (units of the factored engine), and gradient inside vmap (the vmap engine); first and
second derivatives (BAM's mode "exact"); with each argument the same for all examples, and each alone another for each.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn
from torch.func import grad
from torch.utils._pytree import tree_leaves

import privgrad as pg
from conftest import clipped_sum
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import Mended, batched, differentiable
from privgrad.gradient.reference import Vmap

EXAMPLES = 4
_GENERATOR = torch.Generator().manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=_GENERATOR, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(EXAMPLES, *shape, generator=_GENERATOR, dtype=torch.float64) * 0.8 + 0.1


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, (EXAMPLES, *shape), generator=_GENERATOR)


def mask(*shape: int) -> Tensor:
    return torch.rand(EXAMPLES, *shape, generator=_GENERATOR) < 0.6


def places(size: int, count: int) -> Tensor:
    """Different ones for an example."""
    return torch.stack([torch.randperm(size, generator=_GENERATOR)[:count] for _ in range(EXAMPLES)])


PADDED = torch.tensor([[0, 1, 2, 0], [0, 3, 0, 3], [4, 0, 0, 1], [1, 2, 3, 0]])
PADDED_AT_THE_END = torch.where(PADDED == 0, 4, PADDED)
# name: (operation, its arguments: what has no floats is not differentiated)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {}
ALONE: dict[str, Callable[..., Any]] = {}  # what to compare with, for an operation that is wrong for one example too


def case(name: str, operation: Callable[..., Any], *arguments: Tensor) -> None:
    assert name not in CASES
    CASES[name] = (operation, arguments)


def assigned(x: Tensor, index: Any, value: Tensor) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


# Tables
TABLES: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -5},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 0},
    {"sparse": True},
    {"sparse": True, "padding_idx": 0},
    {"max_norm": 1.0},
]
for options in TABLES:
    at = PADDED_AT_THE_END if options.get("padding_idx") == -1 else PADDED
    case(f"embedding {options}", lambda w, i, o=options: F.embedding(i, w, **o), floats(5, 3), at)
case("embedding, one id", lambda w, i: F.embedding(i, w, padding_idx=0), floats(5, 3), torch.tensor([0, 0, 1, 0]))
case("torch.embedding", lambda w, i: torch.embedding(w, i, 0), floats(5, 3), PADDED)
case("torch.embedding, none", lambda w, i: torch.embedding(w, i), floats(5, 3), PADDED)
case("aten.embedding", lambda w, i: torch.ops.aten.embedding(w, i, 0), floats(5, 3), PADDED)
for mode in ("sum", "mean", "max"):
    for padding in (None, 0, -1):
        case(
            f"embedding_bag {mode} {padding}",
            lambda w, i, m=mode, p=padding: F.embedding_bag(i, w, mode=m, padding_idx=p),
            floats(5, 3),
            PADDED.view(EXAMPLES, 2, 2),
        )
    case(
        f"embedding_bag {mode} offsets",
        lambda w, i, m=mode: F.embedding_bag(i, w, torch.tensor([0, 1]), mode=m),
        floats(5, 3),
        PADDED,
    )
case(
    "embedding_bag weighted",
    lambda w, i, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
    floats(5, 3),
    PADDED.view(EXAMPLES, 2, 2),
    floats(2, 2),
)

# Losses
for r in ("none", "mean", "sum"):
    case(f"nll_loss {r}", lambda x, t, r=r: F.nll_loss(x, t, reduction=r), floats(6, 5), ids(5, 6))
    case(
        f"nll_loss ignore_index {r}",
        lambda x, t, r=r: F.nll_loss(x, t, reduction=r, ignore_index=0),
        floats(6, 5),
        ids(3, 6),
    )
    case(
        f"nll_loss weight {r}",
        lambda x, t, w, r=r: F.nll_loss(x, t, w.detach(), reduction=r, ignore_index=1),
        floats(6, 5),
        ids(3, 6),
        positive(5),
    )
    case(f"nll_loss one {r}", lambda x, t, r=r: F.nll_loss(x, t, reduction=r, ignore_index=1), floats(5), ids(3))
    case(
        f"nll_loss places {r}",
        lambda x, t, w, r=r: F.nll_loss(x, t, w.detach(), reduction=r, ignore_index=0),
        floats(2, 5, 3, 2),
        ids(3, 2, 3, 2),
        positive(5),
    )
    case(f"cross_entropy {r}", lambda x, t, r=r: F.cross_entropy(x, t, reduction=r), floats(6, 5), ids(5, 6))
    case(
        f"cross_entropy -100 {r}",
        lambda x, t, r=r: F.cross_entropy(x, t.masked_fill(t == 0, -100), reduction=r),
        floats(6, 5),
        ids(3, 6),
    )
    case(
        f"cross_entropy sequence {r}",
        lambda x, t, r=r: F.cross_entropy(x.transpose(1, 2), t, reduction=r, ignore_index=0),
        floats(2, 6, 5),
        ids(3, 2, 6),
    )
    case(
        f"cross_entropy weight, smoothing {r}",
        lambda x, t, w, r=r: F.cross_entropy(x, t, w.detach(), label_smoothing=0.1, ignore_index=0, reduction=r),
        floats(6, 5),
        ids(3, 6),
        positive(5),
    )
    case(
        f"cross_entropy probabilities {r}",
        lambda x, t, r=r: F.cross_entropy(x, t.softmax(-1), label_smoothing=0.1, reduction=r),
        floats(6, 5),
        floats(6, 5),
    )
    case(
        f"kl_div {r}",
        lambda x, t, r=r: F.kl_div(x.log_softmax(-1), t.softmax(-1), reduction=r),
        floats(6, 5),
        floats(6, 5),
    )
    case(
        f"kl_div log_target {r}",
        lambda x, t, r=r: F.kl_div(x.log_softmax(-1), t.log_softmax(-1), reduction=r, log_target=True),
        floats(6, 5),
        floats(6, 5),
    )
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        case(f"{name} {r}", lambda x, t, r=r, n=name: getattr(F, n)(x, t, reduction=r), floats(6, 5), floats(6, 5))
    case(
        f"soft_margin_loss {r}",
        lambda x, t, r=r: F.soft_margin_loss(x, t.detach(), reduction=r),
        floats(6, 5),
        floats(6, 5),
    )
    case(
        f"binary_cross_entropy {r}",
        lambda x, t, w, r=r: F.binary_cross_entropy(x, t, w.detach(), reduction=r),
        positive(6),
        positive(6),
        positive(6),
    )
    case(
        f"with_logits pos_weight {r}",
        lambda x, t, w, r=r: F.binary_cross_entropy_with_logits(x, t, pos_weight=w.detach(), reduction=r),
        floats(6, 2),
        positive(6, 2),
        positive(2),
    )
    case(
        f"with_logits weight {r}",
        lambda x, t, w, r=r: F.binary_cross_entropy_with_logits(x, t, w.detach(), reduction=r),
        floats(6, 2),
        positive(6, 2),
        positive(2),
    )
    case(
        f"poisson_nll_loss {r}",
        lambda x, t, r=r: F.poisson_nll_loss(x, t, full=True, reduction=r),
        floats(6),
        5 * positive(6),
    )
    case(
        f"gaussian_nll_loss {r}",
        lambda x, t, v, r=r: F.gaussian_nll_loss(x, t, v.exp(), reduction=r),
        floats(6),
        floats(6),
        floats(6),
    )
    case(
        f"hinge_embedding_loss {r}",
        lambda x, t, r=r: F.hinge_embedding_loss(x, 2 * t - 1, reduction=r),
        floats(6),
        ids(2, 6),
    )
    case(
        f"margin_ranking_loss {r}",
        lambda x, y, t, r=r: F.margin_ranking_loss(x, y, 2 * t - 1, margin=0.3, reduction=r),
        floats(6),
        floats(6),
        ids(2, 6),
    )
    case(
        f"multi_margin_loss {r}",
        lambda x, t, w, r=r: F.multi_margin_loss(x, t, weight=w.detach(), reduction=r),
        floats(6, 5),
        ids(5, 6),
        positive(5),
    )
    case(
        f"multilabel_margin_loss {r}",
        lambda x, t, r=r: F.multilabel_margin_loss(x, t - 1, reduction=r),
        floats(6, 5),
        ids(5, 6, 5),
    )
    case(
        f"multilabel_soft_margin_loss {r}",
        lambda x, t, w, r=r: F.multilabel_soft_margin_loss(x, t.double(), w, reduction=r),
        floats(6, 5),
        ids(2, 6, 5),
        positive(5),
    )
    case(
        f"cosine_embedding_loss {r}",
        lambda x, y, t, r=r: F.cosine_embedding_loss(x, y, 2 * t - 1, margin=0.1, reduction=r),
        floats(6, 5),
        floats(6, 5),
        ids(2, 6),
    )
    for swap in (False, True):
        case(
            f"triplet_margin_loss {swap} {r}",
            lambda x, y, z, r=r, s=swap: F.triplet_margin_loss(x, y, z, reduction=r, swap=s),
            *(floats(6, 5) for _ in range(3)),
        )
    case(
        f"ctc_loss {r}",
        lambda x, t, r=r: F.ctc_loss(x.log_softmax(-1), t, torch.tensor([7, 6]), torch.tensor([2, 3]), reduction=r),
        floats(7, 2, 5),
        ids(4, 2, 3) + 1,
    )
    case(
        f"ctc_loss lengths {r}",
        lambda x, t, n, r=r: F.ctc_loss(x.log_softmax(-1), t, n, torch.tensor([2, 3]), reduction=r),
        floats(7, 2, 5),
        ids(4, 2, 3) + 1,
        ids(2, 2) + 6,
    )
    if hasattr(F, "linear_cross_entropy"):
        case(
            f"linear_cross_entropy {r}",
            lambda x, w, t, r=r: F.linear_cross_entropy(
                x, w, t, reduction=r, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2)
            ),
            floats(6, 3),
            floats(5, 3),
            ids(5, 6),
        )

# By index
case("gather", lambda x, i: x.gather(1, i), floats(4, 6), ids(6, 4, 3))
case("gather, one dimension", lambda x, i: x.gather(0, i), floats(6), ids(6, 3))
case("gather, no dimension", lambda x, i: x.gather(0, i), floats(6), ids(6))
case("scatter", lambda x, i, s: x.scatter(1, i, s), floats(4, 6), places(6, 3)[:, None].repeat(1, 4, 1), floats(4, 3))
case("scatter, a number", lambda x, i: x.scatter(1, i, 2.0), floats(4, 6), ids(6, 4, 3))
case(
    "scatter_",
    lambda x, i, s: x.clone().scatter_(1, i, s),
    floats(4, 6),
    places(6, 3)[:, None].repeat(1, 4, 1),
    floats(4, 3),
)
case("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), floats(4, 6), ids(6, 4, 3), floats(4, 3))
for r in ("sum", "prod", "mean", "amax", "amin"):
    for whole in (True, False):
        case(
            f"scatter_reduce {r} {whole}",
            lambda x, i, s, r=r, w=whole: x.scatter_reduce(0, i, s, r, include_self=w),
            floats(6),
            ids(6, 5),
            floats(5),
        )
        if r != "sum":
            case(
                f"index_reduce {r} {whole}",
                lambda x, i, s, r=r, w=whole: x.index_reduce(0, i, s, r, include_self=w),
                floats(6, 2),
                ids(6, 5),
                floats(5, 2),
            )
for r in ("sum", "mean", "max", "min"):
    case(f"segment_reduce {r}", lambda x, r=r: torch.segment_reduce(x, r, lengths=torch.tensor([2, 3, 1])), floats(6))
case("index_select", lambda x, i: x.index_select(1, i), floats(4, 6), ids(6, 3))
case("index_select, one", lambda x, i: x.index_select(0, i), floats(4, 6), ids(4))
case("index_select, one, of the last", lambda x, i: torch.index_select(x, -1, i), floats(4, 6), ids(6))
case("index_add", lambda x, i, s: x.index_add(0, i, s), floats(4, 6), ids(4, 3), floats(3, 6))
case("index_add alpha", lambda x, i, s: x.index_add(1, i, s, alpha=2.0), floats(4, 6), ids(6, 3), floats(4, 3))
case("index_copy", lambda x, i, s: x.index_copy(1, i, s), floats(4, 6), places(6, 3), floats(4, 3))
case("index_fill, a number", lambda x, i: x.index_fill(1, i, 0.5), floats(4, 6), ids(6, 3))
case("index_fill", lambda x, i, v: x.index_fill(1, i, v), floats(4, 6), ids(6, 3), floats())
case("index_fill, from the end", lambda x, i, v: torch.index_fill(x, -1, i, v), floats(4, 6), ids(6, 3), floats())
case("index_fill_", lambda x, i, v: x.clone().index_fill_(0, i, v), floats(4, 6), ids(4, 3), floats())
case("index_put", lambda x, i, v: x.index_put((i,), v), floats(4, 6), places(4, 2), floats(2, 6))
case("index_put, added", lambda x, i, v: x.index_put((i,), v, True), floats(4, 6), ids(4, 5), floats(5, 6))
case("x[i]", lambda x, i: x[i], floats(4, 6), ids(4, 3))
case("x[i], one", lambda x, i: x[i], floats(4, 6), ids(4))
case("x[:, i]", lambda x, i: x[:, i], floats(4, 6), ids(6, 3))
case("x[i, j]", lambda x, i, j: x[i, j], floats(4, 6), ids(4, 3), ids(6, 3))
case("x[i, :, j]", lambda x, i, j: x[i, :, j], floats(4, 3, 6), ids(4, 3), ids(6, 3))
case("x[arange, i]", lambda x, i: x[torch.arange(4), i], floats(4, 6), ids(6, 4))
case("x[mask]", lambda x, m: x[m], floats(4, 6), mask(4, 6))
case("x[i] = v", assigned, floats(4, 6), places(4, 2), floats(2, 6))
case("x[mask] = v", assigned, floats(4, 6), mask(4, 6), floats())
case("x[:, 2] = v", lambda x, v: assigned(x, (slice(None), 2), v), floats(4, 6), floats(4))
case("take", lambda x, i: x.take(i), floats(4, 6), ids(24, 3))
case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), floats(4, 6), ids(6, 1, 3))
case("put", lambda x, i, s: x.put(i, s), floats(4, 6), places(24, 3), floats(3))
case("put, added", lambda x, i, s: x.put(i, s, accumulate=True), floats(4, 6), ids(24, 3), floats(3))
case("masked_fill", lambda x, m: x.masked_fill(m, 0.5), floats(4, 6), mask(6))
case("masked_fill, a tensor", lambda x, m, v: x.masked_fill(m, v), floats(4, 6), mask(4, 6), floats())
case("masked_fill_", lambda x, m: x.clone().masked_fill_(m, 0.5), floats(4, 6), mask(6))
case("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), floats(4, 6), mask(4, 6), floats(24))
case("masked_select", lambda x, m: x.masked_select(m), floats(4, 6), mask(4, 6))
case("where", torch.where, mask(4, 6), floats(4, 6), floats(6))
case("one_hot", lambda x, i: F.one_hot(i, 5).double() @ x, floats(5, 3), ids(5, 4))
case("bincount", lambda x, i: torch.bincount(i, minlength=5) * x, floats(5), ids(5, 7))
case("bucketize", lambda x, b: torch.bucketize(x, b.detach().sort()[0]) * x + b.sum(), floats(5), floats(3))
case("searchsorted", lambda x, b: torch.searchsorted(b.detach().sort()[0], x) * x + b.sum(), floats(5), floats(3))
case("isin", lambda x, i: torch.isin(i, torch.tensor([1, 2])) * x, floats(3), ids(4, 3))
case("select", lambda x: x.select(1, -2), floats(4, 6))
case("select_scatter", lambda x, s: x.select_scatter(s, 0, 1), floats(4, 6), floats(6))
case("select_scatter, from the end", lambda x, s: torch.select_scatter(x, s, -1, -2), floats(4, 6), floats(4))
case("diagonal_scatter", lambda x, s: x.diagonal_scatter(s), floats(4, 6), floats(4))
case("slice_scatter", lambda x, s: x.slice_scatter(s, 1, 1, 4), floats(4, 6), floats(4, 3))
case(
    "repeat_interleave",
    lambda x, n: x.repeat_interleave(n, 0, output_size=6),
    floats(3, 2),
    torch.tensor([[2, 2, 2], [1, 2, 3], [3, 3, 0], [4, 1, 1]]),
)
case("nonzero", lambda x: x.relu().nonzero().sum() * x, floats(3, 5))
case("unique", lambda x, i: i.unique().sum() * x, floats(3), ids(4, 3))
case("item", lambda x, i: x * int(i.sum()), floats(3), ids(4, 3))
case("if", lambda x: x if x.sum() > 0 else -x, floats(3))

# Places and channels
for d, size in ((1, (6,)), (2, (6, 6)), (3, (4, 4, 4))):
    for name, pool in (
        ("max_pool, padding", lambda x, d=d: getattr(F, f"max_pool{d}d")(x, 3, 2, 1)),
        ("max_pool, dilation", lambda x, d=d: getattr(F, f"max_pool{d}d")(x, 2, 2, 0, dilation=2, ceil_mode=True)),
        ("max_pool, indices", lambda x, d=d: getattr(F, f"max_pool{d}d")(x, 2, return_indices=True)),
        (
            "max_unpool",
            lambda x, d=d: getattr(F, f"max_unpool{d}d")(*getattr(F, f"max_pool{d}d")(x, 2, return_indices=True), 2),
        ),
        ("avg_pool", lambda x, d=d: getattr(F, f"avg_pool{d}d")(x, 3, 2, 1, count_include_pad=False)),
        ("lp_pool", lambda x, d=d: getattr(F, f"lp_pool{d}d")(x, 2.0, 2)),
        ("adaptive_avg_pool", lambda x, d=d: getattr(F, f"adaptive_avg_pool{d}d")(x, 3)),
        ("adaptive_max_pool", lambda x, d=d: getattr(F, f"adaptive_max_pool{d}d")(x, 3, return_indices=True)),
    ):
        case(f"{name}, {d}d", pool, floats(2, 3, *size))
    case(f"max_pool, unbatched, {d}d", lambda x, d=d: getattr(F, f"max_pool{d}d")(x, 2), floats(3, *size))
    for groups in (1, 2):
        for name, options in (("", {"stride": 2, "padding": 1}), (" same", {"padding": "same", "dilation": 2})):
            case(
                f"conv{d}d, {groups} groups{name}",
                lambda x, w, b, d=d, g=groups, o=options: getattr(F, f"conv{d}d")(x, w, b, groups=g, **o),
                floats(2, 4, *size),
                floats(6, 4 // groups, *(3,) * d),
                floats(6),
            )
        case(
            f"conv_transpose{d}d, {groups} groups",
            lambda x, w, b, d=d, g=groups: getattr(F, f"conv_transpose{d}d")(x, w, b, 2, 1, 1, groups=g),
            floats(2, 4, *size),
            floats(4, 6 // groups, *(3,) * d),
            floats(6),
        )
    for mode in ("constant", "reflect", "replicate", "circular"):
        case(
            f"pad {mode}, {d}d",
            lambda x, m=mode, d=d: F.pad(x, (2, 1, 1, 0, 1, 1)[: 2 * d], mode=m),
            floats(2, 3, *size),
        )
for mode, size in (
    ("nearest", (5, 4)),
    ("nearest-exact", (5, 4)),
    ("linear", (5,)),
    ("bilinear", (5, 4)),
    ("bicubic", (5, 4)),
    ("trilinear", (3, 4, 3)),
    ("area", (5, 4)),
):
    case(f"interpolate {mode}", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), floats(2, 3, *size))
for mode in ("bilinear", "nearest", "bicubic"):
    for padding in ("zeros", "border", "reflection"):
        case(
            f"grid_sample {mode} {padding}",
            lambda x, at, m=mode, p=padding: F.grid_sample(x, at, m, p, align_corners=False),
            floats(2, 3, 5, 4),
            floats(2, 3, 3, 2),
        )
case("affine_grid", lambda t: F.affine_grid(t, [2, 3, 4, 4], align_corners=False), floats(2, 2, 3))
case("unfold", lambda x: F.unfold(x, 3, 1, 1, 2), floats(2, 3, 6, 6))
case("fold", lambda x: F.fold(x, (6, 6), 3), floats(2, 27, 16))
case("Tensor.unfold", lambda x: x.unfold(1, 3, 2), floats(2, 7))
case("as_strided", lambda x: x.as_strided((2, 2), (1, 2)), floats(6))
case("as_strided of a product", lambda x, w: torch.mv(w, x).as_strided((2,), (1,)), floats(3), floats(3, 3))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), floats(2, 4, 3, 3))
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), floats(2, 1, 4, 4))
case("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), floats(2, 4, 3, 3))
case("roll", lambda x: x.roll((1, 2), (0, 1)), floats(3, 5))
case("roll, flat", lambda x: x.roll(1), floats(3, 5))
case("roll, a number", lambda x: x.roll(1), floats())
case("pad_sequence", lambda x: nn.utils.rnn.pad_sequence([x[:2], x]), floats(3, 4))

# Along dimensions
for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "softmax", "log_softmax", "logsumexp", "prod"):
    for dim, shape in ((0, (3, 5)), (-1, (3, 5)), (0, (5,))):
        case(f"{name} {dim} {shape}", lambda x, n=name, d=dim: getattr(torch, n)(x, d), floats(*shape))
for name in ("sort", "median", "nanmedian", "mode", "max", "min", "amax", "amin", "std", "var", "var_mean", "aminmax"):
    for dim, shape in ((0, (3, 5)), (-1, (3, 5)), (0, (5,))):
        case(f"{name} {dim} {shape}", lambda x, n=name, d=dim: getattr(torch, n)(x, dim=d), floats(*shape))
    if name not in ("sort", "mode"):
        case(f"{name}, whole", lambda x, n=name: getattr(torch, n)(x), floats(3, 5))
for name in ("argsort", "argmax", "argmin", "count_nonzero"):
    case(name, lambda x, n=name: getattr(torch, n)(x, dim=1).sum() * x, floats(3, 5))
for name in ("amax", "amin", "max", "min", "sort", "cummax"):
    case(f"{name}, ties", lambda x, n=name: getattr(torch, n)(x.relu(), dim=1), floats(3, 5))
case("topk", lambda x: x.topk(2, 1), floats(3, 5))
case("topk, ties", lambda x: x.relu().topk(3, 1), floats(3, 5))
case("kthvalue", lambda x: x.kthvalue(2, 1), floats(3, 5))
case("quantile", lambda x: x.quantile(0.3, 1), floats(3, 5))
case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), floats(3, 5))
case("flip", lambda x: x.flip(0), floats(3, 5))
case("diff", lambda x: x.diff(dim=0), floats(3, 5))

# Normalizations and activations
case("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), floats(3, 5), floats(5), floats(5))
case("layer_norm, two", lambda x, w, b: F.layer_norm(x, (3, 5), w, b), floats(2, 3, 5), floats(3, 5), floats(3, 5))
case("layer_norm, no bias", lambda x, w: F.layer_norm(x, (5,), w), floats(3, 5), floats(5))
case("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), floats(3, 5), floats(5))
case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), floats(2, 4, 5), floats(4), floats(4))
case("group_norm, no bias", lambda x, w: F.group_norm(x, 2, w), floats(2, 4, 5), floats(4))
case("instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), floats(2, 4, 5), floats(4), floats(4))
case(
    "instance_norm, given statistics",
    lambda x, m, v, w: F.instance_norm(x, m.detach(), v.detach().exp(), w, use_input_stats=False),
    floats(2, 4, 5),
    floats(4),
    floats(4),
    floats(4),
)
case(
    "batch_norm, given statistics",
    lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach().exp(), w, b),
    floats(2, 4, 5),
    floats(4),
    floats(4),
    floats(4),
    floats(4),
)
case("local_response_norm", lambda x: F.local_response_norm(x, 3), floats(2, 4, 5))
case("normalize", lambda x: F.normalize(x, dim=0), floats(3, 5))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return cast(Any, torch)._weight_norm(v, g, dim)


def weight_norm_alone(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """By its definition, because torch's second derivative is wrong."""
    others = tuple(other for other in range(v.dim()) if other != dim)
    squares = v.square().sum(others, keepdim=dim >= 0) if others else v.square()
    return v * g / squares.sqrt()


for dim, of_v, of_g in (
    (0, (4, 3), (4, 1)),
    (1, (4, 3), (1, 3)),
    (-1, (4, 3), ()),
    (2, (2, 3, 4), (1, 1, 4)),
    (0, (3,), (3,)),
):
    case(f"weight_norm {dim} {of_v}", partial(weight_norm, dim=dim), floats(*of_v), floats(*of_g))
    ALONE[f"weight_norm {dim} {of_v}"] = partial(weight_norm_alone, dim=dim)
for count, shape in ((3, (2, 3, 4)), (1, (2, 3, 4)), (3, (2, 3)), (1, (3,))):
    case(f"prelu {count} {shape}", lambda x, w: F.prelu(x, w), floats(*shape), floats(count))
for name in ("relu", "elu", "celu", "gelu", "silu", "mish", "softplus", "hardtanh", "hardswish", "leaky_relu", "rrelu"):
    case(name, lambda x, n=name: getattr(F, n)(x), floats(3, 4))
case("glu", lambda x: F.glu(x, 0), floats(4, 3))
case("clamp", lambda x, a: x.clamp(a), floats(3, 4), floats(4))

# Attention, products, distances
MASKS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}]
for options in MASKS:
    case(
        f"attention {options}",
        lambda q, k, v, o=options: F.scaled_dot_product_attention(q, k, v, **o),
        *(floats(2, 3, 4, 5) for _ in range(3)),
    )
case("attention, 3 dimensions", F.scaled_dot_product_attention, floats(3, 4, 5), floats(3, 6, 5), floats(3, 6, 5))
case(
    "attention, boolean mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m | (torch.arange(6) == 0)),
    floats(2, 3, 4, 5),
    floats(2, 3, 6, 5),
    floats(2, 3, 6, 5),
    mask(2, 1, 4, 6),
)
case(
    "attention, mask of all",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m & (torch.arange(4) != 1)[:, None]).nan_to_num(),
    floats(2, 3, 4, 5),
    floats(2, 3, 6, 5),
    floats(2, 3, 6, 5),
    mask(4, 6),
)
case(
    "attention, learned mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    floats(2, 3, 4, 5),
    floats(2, 3, 6, 5),
    floats(2, 3, 6, 5),
    floats(4, 6),
)
case(
    "attention, groups",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    floats(2, 4, 4, 5),
    floats(2, 2, 6, 5),
    floats(2, 2, 6, 5),
)
for weights in (True, False):
    case(
        f"multi_head_attention_forward {weights}",
        lambda x, w, o, m, n=weights: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, w, None, None, None, False, 0.0, o, None),
            key_padding_mask=m & (torch.arange(3) > 0),
            need_weights=n,
        ),
        floats(3, 2, 4),
        floats(12, 4),
        floats(4, 4),
        mask(2, 3),
    )
case("linear", F.linear, floats(2, 3), floats(4, 3), floats(4))
case("linear, one row", F.linear, floats(3), floats(4, 3), floats(4))
case("linear, places", F.linear, floats(2, 2, 3), floats(4, 3), floats(4))
case("bilinear", F.bilinear, floats(2, 3), floats(2, 4), floats(5, 3, 4), floats(5))
case("einsum", lambda x, w: torch.einsum("bi,oij->boj", x, w), floats(2, 3), floats(4, 3, 2))
case("einsum, diagonal", lambda x: torch.einsum("ii->i", x), floats(3, 3))
case("einsum, three", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), floats(2, 3), floats(3, 4), floats(4, 2))
case("tensordot", lambda x, w: torch.tensordot(x, w, cast(Any, ([0, 1], [1, 0]))), floats(2, 3, 4), floats(3, 2, 5))
for name, one, other in (
    ("mm", (2, 3), (3, 4)),
    ("bmm", (2, 2, 3), (2, 3, 4)),
    ("mv", (2, 3), (3,)),
    ("dot", (3,), (3,)),
    ("outer", (3,), (4,)),
    ("kron", (2, 3), (2, 2)),
    ("inner", (2, 3), (4, 3)),
    ("matmul", (2, 3), (3,)),
    ("cdist", (2, 4, 3), (2, 5, 3)),
):
    case(name, getattr(torch, name), floats(*one), floats(*other))
case("addmm", lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), floats(4), floats(2, 3), floats(3, 4))
case("baddbmm", lambda b, x, w: torch.baddbmm(b, x, w, beta=0.5), floats(2, 2, 4), floats(2, 2, 3), floats(2, 3, 4))
case("addcmul", torch.addcmul, floats(3), floats(2, 3), floats(3))
case("lerp", torch.lerp, floats(3), floats(3), floats())
case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), floats(3, 4), floats(4))
case("cosine_similarity of zero", lambda x, y: F.cosine_similarity(0 * x, y, dim=-1), floats(3, 4), floats(4))
case("cdist, one norm", lambda x, y: torch.cdist(x, y, p=1), floats(4, 3), floats(5, 3))
case("cdist, large", torch.cdist, floats(30, 3), floats(30, 3))
case("pdist", F.pdist, floats(4, 3))
case("pairwise_distance", F.pairwise_distance, floats(4, 3), floats(4, 3))
for name in ("inv", "det", "slogdet", "cholesky", "matrix_exp", "pinv", "svdvals", "matrix_norm", "qr", "eigvalsh"):
    case(
        name,
        lambda x, n=name: getattr(torch.linalg, n)(x @ x.mT + torch.diag(torch.arange(3.0, 6.0).double())),
        floats(3, 3),
    )
case("solve", lambda x, y: torch.linalg.solve(x + 3 * torch.eye(3), y), floats(3, 3), floats(3, 2))
case("spectral norm", lambda x: torch.linalg.matrix_norm(x, 2), floats(3, 4))
case("vector_norm of zero", lambda x: torch.linalg.vector_norm(0 * x, dim=0), floats(3, 4))
case("householder_product", torch.linalg.householder_product, floats(4, 3), floats(3))
case("fft", lambda x: torch.fft.fft(x).abs(), floats(3, 5))
case("diag", torch.diag, floats(3))
case("tril", lambda x: x.tril(-1), floats(3, 4))

# Recurrent
for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    states = 2 if name == "lstm" else 1

    def cell(x: Tensor, h: Tensor, *weights: Tensor, n: str = name) -> Any:
        return getattr(torch, f"{n}_cell")(x, (h, h) if n == "lstm" else h, *weights)

    def sequence(x: Tensor, h: Tensor, *weights: Tensor, n: str = name) -> Any:
        return getattr(torch, n)(x, (h, h) if n == "lstm" else h, list(weights), True, 1, 0.0, False, False, True)

    weights = (floats(4 * gates, 3), floats(4 * gates, 4), floats(4 * gates), floats(4 * gates))
    case(f"{name}_cell", cell, floats(2, 3), floats(2, 4), *weights)
    case(name, sequence, floats(2, 5, 3), floats(1, 2, 4), *weights)

# What vmap has no rule for, in some of the ways: the library takes the examples one by one.
OLDER = Version(torch.__version__) < Version("2.13")  # other operations have a gradient, and fall back
FALLS_BACK = {
    "embedding {'max_norm': 1.0}",
    *(
        f"{name} {r}"
        for name in ("cross_entropy weight, smoothing", "gaussian_nll_loss")
        for r in ("none", "mean", "sum")
    ),
    *(f"{name} prod {whole}" for name in ("scatter_reduce", "index_reduce") for whole in (True, False)),
    *("scatter_", "index_fill_", "x[i] = v", "x[mask] = v", "x[:, 2] = v", "masked_fill_"),  # into what all share
    *("x[mask]", "masked_select", "nonzero", "unique", "item", "if", "one_hot"),  # what depends on values
    *(f"grid_sample {m} {p}" for m in ("bilinear", "nearest", "bicubic") for p in ("zeros", "border", "reflection")),
    *("as_strided", "as_strided of a product"),  # memory holds several examples
    *("pad_sequence", "rrelu", "attention, learned mask"),
    *(f"{name}{cell}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")),
}


def kept(outputs: Any) -> list[Tensor]:
    return [x if x.is_floating_point() else x.double() for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def total(outputs: list[Tensor]) -> Tensor:
    """A number that bends with all of them."""
    parts = [torch.zeros((), dtype=torch.float64)]
    for x in outputs:
        weights = torch.linspace(0.3, 1.7, x.numel(), dtype=torch.float64).view(x.shape)
        parts.append(((x + 0.3 * x * x) * weights).sum())
    return torch.stack(parts).sum()


def derivatives(phi: Tensor, leaves: list[Tensor], *, again: bool = False) -> list[Tensor]:
    if not phi.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(phi, leaves, allow_unused=True, materialize_grads=True, create_graph=again)
    return [x.to_dense() for x in found]


def squares(grads: list[Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in grads]).sum()


def alone(operation: Callable[..., Any], arguments: list[Tensor], *, twice: bool) -> list[Tensor]:
    """Of one example: gradients, or those of their squares."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments]
    leaves = [x for x in inputs if x.requires_grad]
    grads = derivatives(total(kept(operation(*inputs))), leaves, again=twice)
    return derivatives(squares(grads), leaves) if twice else grads


def ways(count: int) -> list[tuple[tuple[int, ...], int]]:
    """(arguments that are another for each example, the dimension that they are in)."""
    everything = tuple(range(count))
    sets = [everything, *combinations(everything, 1), *combinations(everything, count - 1)]
    return [(chosen, 0) for chosen in dict.fromkeys(sets) if chosen] + [(everything, 1)]


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-7, atol=1e-8, equal_nan=True)


class NoRuleError(Exception):
    pass


def mapped(function: Callable[..., Any], dims: tuple[int | None, ...], inputs: list[Tensor]) -> Any:
    try:
        return batched(function, dims)(*inputs)
    except RuntimeError as error:
        raise NoRuleError from error


def compare(name: str, chosen: tuple[int, ...], place: int) -> None:
    operation, arguments = CASES[name]
    of_example = ALONE.get(name, operation)
    dims = tuple(min(place, x.dim() - 1) if i in chosen else None for i, x in enumerate(arguments))
    inputs = [x[0] if dim is None else x.movedim(0, dim).contiguous() for x, dim in zip(arguments, dims, strict=True)]
    rows = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims, strict=True)] for i in range(EXAMPLES)
    ]
    floating = [i for i, x in enumerate(arguments) if x.is_floating_point()]
    for twice in (False, True):
        try:
            single = [alone(of_example, row, twice=twice) for row in rows]
        except RuntimeError:
            assert twice or OLDER, "no gradient"
            return
        wanted = dict(zip(floating, map(torch.stack, zip(*single, strict=True)), strict=True))

        def of_one(*inputs: Tensor, twice: bool = twice) -> Any:
            def value(own: list[Tensor]) -> Tensor:
                given = dict(zip(floating, own, strict=True))
                return total(kept(operation(*(given.get(i, x) for i, x in enumerate(inputs)))))

            own = [inputs[i] for i in floating]
            return grad(lambda x: squares(grad(value)(x)))(own) if twice else grad(value)(own)

        missing: list[NoRuleError] = []
        try:
            inside = mapped(of_one, dims, inputs)
            assert all(same(x, wanted[i]) for i, x in zip(floating, inside, strict=True)), "gradient inside"
        except NoRuleError as error:
            missing.append(error)
        moving = [i for i in floating if i in chosen]
        if moving and (not twice or moving == floating):
            try:
                own = [x.detach().clone().requires_grad_(i in moving) for i, x in enumerate(inputs)]
                outputs = mapped(lambda *x: tuple(kept(operation(*x))), dims, own)
                for found, parts in zip(
                    outputs, zip(*(kept(of_example(*row)) for row in rows), strict=True), strict=True
                ):
                    assert same(found, torch.stack(parts)), "value"
                leaves = [own[i] for i in moving]
                losses = torch.stack([total([x[i] for x in outputs]) for i in range(EXAMPLES)])
                outside = derivatives(losses.sum(), leaves, again=twice)
                outside = derivatives(squares(outside), leaves) if twice else outside
                for i, x in zip(moving, outside, strict=True):
                    assert same(x.movedim(dims[i] or 0, 0), wanted[i]), "gradient outside"
            except NoRuleError as error:
                missing.append(error)
        if missing:
            raise missing[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_operation_under_vmap_is_that_of_each_example(name: str):
    falls_back = False
    for chosen, place in ways(len(CASES[name][1])):
        try:
            compare(name, chosen, place)
        except NoRuleError:
            falls_back = True
    assert OLDER or falls_back == (name in FALLS_BACK)


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_weight_norm_is_computed_for_all_examples_at_once():
    inputs = floats(4, 3), floats(4, 1)
    with Mended(several=True):
        torch.func.vmap(weight_norm)(*inputs)


def test_the_second_derivative_of_weight_norm_is_that_of_its_first():
    """Without `differentiable`, torch's is wrong; if this is mended, the mode can go."""
    inputs = floats(4, 3)[0].requires_grad_(), floats(4, 1)[0].requires_grad_()
    with differentiable(twice=True):
        assert torch.autograd.gradgradcheck(weight_norm, inputs)
    assert not torch.autograd.gradgradcheck(weight_norm, inputs, raise_exception=False)


class Titled(nn.Module):
    """A token of its own before a padded text: the module is taken whole, by vmap, with the table below it."""

    def __init__(
        self, *, padding_idx: int = 0, sparse: bool = False, looped: bool = False, scripted: bool = False
    ) -> None:
        super().__init__()
        self.title, self.looped = nn.Parameter(torch.randn(1, 1, 3)), looped
        self.table, self.head = nn.Embedding(5, 3, padding_idx=padding_idx, sparse=sparse), nn.Linear(3, 2)
        nn.init.normal_(self.table.weight)  # the padding row too
        if scripted:
            self.table: Any = torch.jit.script(self.table)

    def forward(self, x: Tensor) -> Tensor:
        if self.looped:
            assert x.unique().sum() >= 0  # vmap has no rule for it
        words = torch.cat([self.title.expand(len(x), -1, -1), self.table(x)], 1)
        return self.head(torch.tanh(words).cumsum(1).sin().sum(1))


TEXTS = torch.tensor([[1, 2, 3], [4, 1, 3], [2, 2, 4], [0, 1, 0], [0, 0, 0], [1, 0, 0], [3, 0, 2], [0, 4, 0]])


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is")
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": -1}, {"sparse": True}, {"looped": True, "sparse": True}, {"scripted": True}]
)
@pytest.mark.parametrize("engine", [Factored, Vmap])
def test_padding_rows_of_tables_in_units_by_vmap(engine: Any, options: dict[str, Any]):
    torch.manual_seed(0)
    model, texts = Titled(**options).double(), (TEXTS + options.get("padding_idx", 0)) % 5
    dense = Titled(padding_idx=options.get("padding_idx", 0)).double()
    dense.load_state_dict(model.state_dict())
    computed = engine(model, losses_of)
    for name, rows in one_by_one(dense, texts).items():
        assert_equal_to_loop(computed(texts)[name], rows, 1e-8)
    assert computed(texts)["table.weight"].dense()[:, options.get("padding_idx", 0)].abs().sum() == 0
    for exact in (False, True):
        for name, rows in moved_one_by_one(dense, texts, 0.1, exact=exact).items():
            assert_equal_to_loop(computed.moved(texts, 0.1, exact=exact)[name], rows, 1e-8)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("engine", [Factored, Vmap])
def test_one_padded_text_moves_the_sum_by_at_most_c(engine: Any, size: int):
    """Neighbors shift all later texts: whose row comes first in its part must not matter."""
    torch.manual_seed(0)
    model, texts = Titled().double(), TEXTS.repeat(2, 1)
    parameters = dict(model.named_parameters())
    sums: list[Tensor] = []
    for part in (texts, texts[1:]):
        computed = engine(model, losses_of)
        chunks = [computed(part[start : start + size]) for start in range(0, len(part), size)]
        clipped, _ = clipped_sum(chunks, like=parameters, clip=pg.clip.Flat(), max_grad_norm=0.1)
        sums.append(torch.cat([clipped.values[name].flatten() for name in parameters]))
    assert (sums[0] - sums[1]).norm() <= 0.1 * (1 + 1e-6)
