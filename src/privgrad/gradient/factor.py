"""The interface of factored per-example gradients, and the factors that fit any parameter.

Shape suffixes: B examples, T positions of an example (time, pixels), I inputs, O outputs, D width, P the shape of a
parameter. Everything here is computed in float32 or wider, and is NOT private.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from privgrad.processes import AT_ONCE, is_on_processor

Summand = TypeVar("Summand", Tensor, "Factor")
_norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)
_BLOCK = 1024  # float32 entries per block; the norms of blocks are joined in float64
_WIDENED, _WIDENED_ELSEWHERE = 64, 1 << 20  # entries of a gradient whose squares are added up in float64: on the CPU
_CACHED = 1 << 20  # floats of scratch memory that stay in a core's cache while they are scaled and summed
CANCELED = 1e-3  # a squared norm from inner products below this share of its terms is computed again, from dense g_i
TINY = 1e-15  # the square of a norm below this loses digits in float32

TERMS = 256  # in one part
FEW_TERMS = 32  # in one part of a narrow product
NARROW = 32  # outputs or inputs
JOINED_PARTS = 8  # parts of a large product that are joined in float32, which costs less than a sum in float64
_SMALL_PRODUCT = 1 << 15  # entries of a product of which all parts are computed at once on the CPU
_PRODUCT = AT_ONCE // JOINED_PARTS  # and elsewhere, where one large kernel takes less time than one for each part


def examples_per_block(floats: int, like: Tensor | None = None) -> int:
    """Return how many examples of `floats` numbers to write out together; on the CPU, they stay in a core's cache."""
    most = _CACHED if like is None or is_on_processor(like) else AT_ONCE
    return most // (floats or 1) or 1


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    wide_enough = tensor.dtype in (torch.float32, torch.float64)
    return tensor if wide_enough else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(x: Tensor, kept_B: Tensor) -> Tensor:
    """Return x with zeros for every example that is not kept."""
    return torch.where(kept_B.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def float64_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension, summed in float64: nothing overflows, underflows or is lost."""
    return _norm(x, dim=-1, dtype=torch.float64)


def native_norms(x: Tensor) -> Tensor:
    """Return the norm over the last dimension, in the precision of x."""
    return _norm(x, dim=-1)


def largest_entries(x: Tensor) -> Tensor:
    """Return the largest absolute value over the last dimension."""
    return x.abs().amax(-1)  # the maximum norm of torch takes 15 times as long on the CPU


class _Look(threading.local):
    """The masks, and the norms of tensors, that the `unread` of this thread keeps; None outside."""

    masks: list[Tensor] | None = None
    norms: dict[tuple[Any, int], tuple[Callable[[], Tensor | None], Tensor]] | None = None


_look = _Look()


class unread:  # noqa: N801, it is called as a function is
    """Take no norm to be spoiled, and give a list that gets the masks of those that may be: see `spoiled`."""

    def __enter__(self) -> list[Tensor]:
        masks: list[Tensor] = []
        self._outer, _look.masks, _look.norms = (_look.masks, _look.norms), masks, {}
        return masks

    def __exit__(self, *_: object) -> None:
        _look.masks, _look.norms = self._outer


def spoiled(mask_B: Tensor) -> Tensor | None:
    """Return the indices of norms that rounding may have spoiled, to be computed again; None if there are none.

    Within `unread` this reads nothing from the device. It returns None and keeps the mask, which clipping reads with
    its other questions. If a norm may be spoiled, clipping discards what it computed, and computes it again without
    `unread`.
    """
    if _look.masks is not None:
        _look.masks.append(mask_B)
        return None
    index = mask_B.nonzero()[:, 0]
    return index if index.shape[0] > 0 else None


def once(norms: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return norms(x). Within `unread`, factors of the same tensor compute them once."""
    if (known := _look.norms) is None:
        return norms(x)
    key = norms, id(x)
    if key not in known or known[key][0]() is not x:  # else another tensor had this id
        known[key] = ref(x), norms(x)
    return known[key][1]


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts in one tensor, along the first dimension; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def norms_of(grads_BP: Tensor, inverse_scales: Tensor | None = None) -> Tensor:
    """Return the norm of each example's gradient, times the inverse scales (None: 1), shape (B,), float64."""
    # Short sums are computed in float32 and joined in float64. One long float32 sum understates the norm of a gradient
    # with many small entries, by 2 % at 1e8 parameters. A float64 copy of large gradients would cost half as much time
    # as the gradients. A float64 copy of smaller ones costs less than a second kernel or a look at the norms.
    if inverse_scales is not None:
        grads_BP = grads_BP * inverse_scales
    grads_BP, on_processor = flattened(grads_BP), is_on_processor(grads_BP)
    if grads_BP.shape[1] <= (_WIDENED if on_processor else _WIDENED_ELSEWHERE):
        return float64_norms(grads_BP)
    count = grads_BP.shape[1] // _BLOCK
    if count == 0:
        norm_B = native_norms(grads_BP).double()
    elif count * _BLOCK == grads_BP.shape[1]:
        norm_B = float64_norms(native_norms(grads_BP.reshape(-1, count, _BLOCK)))
    else:
        blocks = grads_BP[:, : count * _BLOCK].reshape(-1, count, _BLOCK)
        parts = [native_norms(blocks), native_norms(grads_BP[:, count * _BLOCK :])[:, None]]
        norm_B = float64_norms(torch.cat(parts, dim=1))
    # Squares of entries below 1e-19 vanish in float32: compute the norms of such rows again.
    if on_processor:
        is_tiny = norm_B.shape[0] > 0 and norm_B.min().item() < TINY
        tiny = (norm_B < TINY).nonzero()[:, 0] if is_tiny else None
    else:
        tiny = spoiled((norm_B < TINY) & (largest_entries(grads_BP) > 0))
    if tiny is not None:
        norm_B[tiny] = float64_norms(grads_BP[tiny])
    return norm_B


def norms_of_parts(parts: Iterable[Tensor], inverse_scales: Tensor | None = None) -> Tensor:
    """Return `norms_of` for gradients that come in parts of the examples, none larger than the first."""
    # Products with the scales share memory, since new memory takes as long to allocate as to fill. The gradients may
    # belong to others and are never written to.
    if inverse_scales is None:
        return in_one([norms_of(grads_BP) for grads_BP in parts])
    found, scratch = list[Tensor](), None
    for grads_BP in parts:
        # Do not hold the product of a huge gradient while the next is computed. Elsewhere, new memory costs nothing.
        if grads_BP.numel() > _CACHED or not is_on_processor(grads_BP):
            found.append(norms_of(grads_BP, inverse_scales))
            continue
        if scratch is None:
            dtype = torch.result_type(grads_BP, inverse_scales)
            scratch = torch.empty(grads_BP.shape, dtype=dtype, device=grads_BP.device)
        with torch.no_grad():  # torch refuses to write into given memory where it records a graph
            scaled_BP = torch.mul(grads_BP, inverse_scales, out=scratch[: len(grads_BP)])
        found.append(norms_of(scaled_BP))
    return in_one(found)


def canceled(square_B: Tensor, terms_B: Tensor) -> Tensor:
    """Return whether each squared norm is so small a share of its terms that rounding may hide it, shape (B,)."""
    return torch.addcmul(square_B, terms_B, terms_B, value=-CANCELED) < 0


def flattened(grads_BP: Tensor) -> Tensor:
    """Return one row per example, shape (B, number of entries of P), also for parameters without dimensions."""
    return grads_BP.flatten(1) if grads_BP.dim() > 1 else grads_BP[:, None]


def sum_of_products(b_NO: Tensor, a_NI: Tensor) -> Tensor:
    """Return b^T a, shape (O, I), added in parts of at most 256 terms; in float64 if there are many parts.

    A kernel may add one term after the other, and rounds each time to the resolution of the total so far. With k terms
    in a part, the errors of all terms are at most 2^-24 (k + 7) of their summed norms. One more example moves all later
    terms to other places of their parts, so all of these errors may change.

    Parts of narrow products are shorter: libraries compute these as vector products, and add up a few terms first,
    which makes errors of repeated terms many times larger.
    """
    terms, outputs, inputs = a_NI.shape[0], b_NO.shape[1], a_NI.shape[1]
    narrow = outputs <= NARROW or inputs <= NARROW
    size = FEW_TERMS if narrow else TERMS
    if terms <= size or a_NI.dtype == torch.float64:
        return b_NO.mT @ a_NI
    on_processor = is_on_processor(a_NI)
    if narrow or outputs * inputs <= (_SMALL_PRODUCT if on_processor else _PRODUCT):
        few = not narrow and not on_processor and terms <= JOINED_PARTS * size
        whole, at_once = terms // size * size, (AT_ONCE // (outputs * inputs) or 1) * size
        b_MO, a_MI = (b_NO, a_NI) if whole == terms else (b_NO[:whole], a_NI[:whole])
        total = _sum_of_parts(b_MO[:at_once], a_MI[:at_once], size, few)
        for start in range(at_once, whole, at_once):
            part = slice(start, start + at_once)
            total += _sum_of_parts(b_MO[part], a_MI[part], size, few)
        return total if whole == terms else total.add_(b_NO[whole:].mT @ a_NI[whole:])
    total = _joined(b_NO[: JOINED_PARTS * size], a_NI[: JOINED_PARTS * size], size)
    rows = _CACHED // (8 * inputs) or 1  # a mixed addition in the cache takes a third of the time
    for start in range(JOINED_PARTS * size, terms, JOINED_PARTS * size):
        part = slice(start, start + JOINED_PARTS * size)
        total, more = total.double(), _joined(b_NO[part], a_NI[part], size)
        for row in range(0, outputs, rows):
            total[row : row + rows] += more[row : row + rows]
    return total


def _sum_of_parts(b_NO: Tensor, a_NI: Tensor, size: int, few: bool) -> Tensor:
    """Return the sum of the products of all parts of `size` terms: of few parts in float32, else in float64."""
    b_PKO, a_PKI = b_NO.reshape(-1, size, b_NO.shape[1]), a_NI.reshape(-1, size, a_NI.shape[1])
    return torch.bmm(b_PKO.mT, a_PKI).sum(0, dtype=None if few else torch.float64)


def _joined(b_NO: Tensor, a_NI: Tensor, size: int) -> Tensor:
    total = b_NO[:size].mT @ a_NI[:size]
    for start in range(size, b_NO.shape[0], size):
        total.addmm_(b_NO[start : start + size].mT, a_NI[start : start + size])
    return total


def sum_of_rows(weight_B: Tensor, rows_BI: Tensor) -> Tensor:
    """Return the weighted sum of rows, shape (I,), like `sum_of_products`."""
    return sum_of_products(weight_B.to(rows_BI.dtype)[:, None], rows_BI)[0]


def added_up(parts: list[Summand]) -> Summand:
    """Return the sum of tensors, or of factors of one parameter."""
    return reduce(lambda one, other: one + other, parts)


Examples = slice | Tensor  # a range of examples, or their indices


class Factor(ABC):
    """The gradients g_i of B examples with respect to one parameter.

    A subclass implements the abstract methods, and overrides others where it knows a cheaper way than `dense`.

    Attributes:
        examples: B.
        shape: P.
        usual_terms: what clipping expects of `term_bound` at most, in C; examples with more are summed in float64. It
            is infinite if all are: then `sum_in_parts` is `exact_sum`.
    """

    usual_terms: ClassVar[float] = 4.0
    _terms: ClassVar[int] = TERMS  # in one part of `sum_in_parts`

    def __init__(self, examples: int, shape: torch.Size) -> None:
        self.examples, self.shape = examples, shape

    @abstractmethod
    def __getitem__(self, examples: Examples) -> "Factor":
        """Return the gradients of some of the examples."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the gradients written out in full: grads_BP, shape (B, *P)."""

    @abstractmethod
    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        """Return the sum over i of weight_i * g_i, shape P.

        Every example's gradient must be finite.
        """

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        """Return the weighted sum, in parts of few terms (at least one example) that are added up in float64.

        The size of a part is public: it depends on the shapes of one example. `sum_of_products` says why parts are
        short. Errors of a part with one example do not depend on other examples.
        """
        if self.usual_terms == math.inf:
            return self.exact_sum(weight_B)
        most = max(1, self._terms // max(1, self.positions))
        if self.examples <= most:
            return self.weighted_sum(weight_B)
        total = self[:most].weighted_sum(weight_B[:most]).double()
        for start in range(most, self.examples, most):
            part = slice(start, start + most)
            total += self[part].weighted_sum(weight_B[part])
        return total

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        """Return the weighted sum in float64, without rounding errors that several examples share.

        Each gradient is written out by itself, and these are added up in float64. A subclass whose terms are cheap in
        float64 adds up the terms instead.
        """
        parts = self._split()
        weights = cast("tuple[Tensor, ...]", weight_B.double().split([part.examples for part in parts]))
        sums = [own_B @ flattened(part.dense()).double() for own_B, part in zip(weights, parts, strict=True)]
        return added_up(sums).view(self.shape)

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float | Tensor]:
        """Return the sum in parts, and an estimate of its further rounding errors: a number, or a tensor of one.

        The estimate covers errors that change with the batch and that neither `term_bound` nor the parts account for.
        It is the norm of such an error, times the inverse scales if there are any. Clipping switches to `exact_sum`
        where it is too large.
        """
        return self.sum_in_parts(weight_B), 0.0

    @abstractmethod
    def mask(self, kept_B: Tensor) -> "Factor":
        """Return the same gradients, with zeros for every example that is not kept; kept_B is bool."""

    @property
    def worth_keeping(self) -> bool:
        """Whether to keep the gradients written out for the norms, since this makes the weighted sum much cheaper."""
        return False

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        """Return a bound on the summed norms of the terms of each g_i, shape (B,), float64.

        The terms are those that `weighted_sum` adds up. Terms that are never added to each other, as those of two
        rows of a table, may count by the root of their squared sums. None means that g_i itself is the only term. If
        the bound is far above the norm, the terms cancel, and the norm does not bound their rounding errors. Clipping
        then writes the gradient out or sums in float64.
        """
        return None

    def term_norms(self, inverse_scales: Tensor | None = None) -> tuple[Tensor, ...] | None:
        """Return tensors of shape (B, T) whose product, summed over t, is at least `term_bound`, or None like it.

        A subclass overrides it if they take less time than the bound. Clipping multiplies and sums those of many
        parameters at once. It takes numbers in float32 to be at least 1e-14, since their squares may underflow. Only
        if the result is too large, it asks for the bound itself.
        """
        terms_B = self.term_bound(inverse_scales)
        return None if terms_B is None else (terms_B[:, None],)

    @property
    def positions(self) -> int:
        """The number of terms in the sum for one g_i; rounding errors grow with its square root."""
        return 1

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        """Return the L2 norm of each g_i, or of each g_i * inverse_scales: norms_B, shape (B,), float64.

        The privacy guarantee rests on these norms: clipping computes each example's clip factor from them.

        Args:
            inverse_scales: 1 / A, shape P; None is 1.
        """
        parts = self._split()
        if len(parts) == 1:
            return norms_of(parts[0].dense(), inverse_scales)
        return norms_of_parts((part.dense() for part in parts), inverse_scales)

    def written_out(self) -> "Dense":
        """Return the same gradients with all of them in memory."""
        parts = self._split()
        first = parts[0].dense()
        if len(parts) == 1:
            return Dense(first)
        # Filled in place: torch.cat would hold all gradients in memory twice.
        grads_BP, start = first.new_empty(self.examples, *self.shape), len(first)
        grads_BP[:start] = first
        for part in parts[1:]:
            grads_BP[start : start + part.examples] = part.dense()
            start += part.examples
        return Dense(grads_BP)

    def merge(self, parts: int) -> "Factor":
        """Add up the gradients of every `parts` neighboring rows, which belong to one example."""
        return Dense(self.dense().reshape(self.examples // parts, parts, *self.shape).sum(1))

    def __mul__(self, share: float) -> "Factor":
        """Return every gradient times a positive number."""
        return Scaled(self, share)

    def inner_products(self, direction: Tensor) -> Tensor:
        """Return the inner products <g_i, direction>, shape (B,).

        Computes: the derivative of <weighted sum, direction> with respect to each weight.
        """
        with torch.enable_grad():
            weight_B = direction.new_zeros(self.examples).requires_grad_()
            along = (self.weighted_sum(weight_B) * direction).sum()
        return torch.autograd.grad(along, weight_B)[0]

    def gram(self) -> Tensor:
        """Return the inner products of all pairs of examples' gradients, shape (B, B)."""
        rows_BP = flattened(self.dense())
        return rows_BP @ rows_BP.mT

    def __add__(self, other: "Factor") -> "Factor":
        """Add the gradients of a parameter that is used in two places of the model."""
        return Sum([self, other])

    def _split(self, few: int | None = None) -> "list[Factor]":
        """Split the factor into parts of `few` examples, by default as `_per_block` says: one part at least."""
        few = self._per_block(int(self.shape.numel())) if few is None else few
        if few >= self.examples:
            return [self]
        return [self[start : start + few] for start in range(0, self.examples, few) or [0]]

    def _per_block(self, floats: int) -> int:
        """Return `examples_per_block` on the device of the gradients, which is the CPU unless a subclass knows."""
        return examples_per_block(floats)


Factors = Mapping[str, Factor]  # by parameter name


class LinearMapFactor(Factor):
    """The gradients of a weight that BAM and local training also use as weights, a different one for each example.

    They compute gradients at moved parameters, and a layer's output is linear in its weight's displacement. A subclass
    overrides methods as for `Factor`.
    """

    def apply(self, x_BTI: Tensor) -> Tensor:
        """Return g_i x_it for every position t, shape (B, T, O).

        This is the output of a linear map with a different weight g_i, shape (O, I), for each example.
        """
        return x_BTI @ self.dense().mT

    def read(self, ids_BT: Tensor) -> Tensor:
        """Return rows ids_it of g_i, shape (B, T, D).

        This is the output of an embedding with a different table g_i, shape (V, D), for each example.
        """
        return self.dense().gather(1, ids_BT[:, :, None].expand(-1, -1, self.shape[1]))

    def read_bags(self, ids_BJT: Tensor, weight_BJT: Tensor) -> Tensor:
        """Return weighted sums of rows of g_i, shape (B, J, D).

        This is the output of an embedding bag with a different table g_i, shape (V, D), for each example. Each example
        has J bags of T rows.
        """
        read_BJTD = self.read(ids_BJT.flatten(1)).reshape(*ids_BJT.shape, -1)
        return (read_BJTD * weight_BJT.to(read_BJTD.dtype)[..., None]).sum(2)

    def of_patches(self) -> "LinearMapFactor":
        """Return the gradients of a convolution's weight as gradients of a linear map of patches.

        Their shape changes from (O, I, *kernel) to (O, I * kernel).
        """
        return Dense(self.dense().flatten(2))

    def scaled(self, scales: Tensor) -> "LinearMapFactor":
        """Return every gradient times the same scales, whose shape broadcasts to P."""
        return Dense(self.dense() * scales)

    def settled(self) -> "LinearMapFactor":
        """Return the same gradients in the form that is cheapest to use often and to add to."""
        return self.written_out()

    def transposed(self) -> "LinearMapFactor":
        """Return every gradient transposed, for a weight that is stored transposed."""
        return Dense(self.dense().mT)


def as_linear_map(factor: Factor) -> LinearMapFactor:
    """Return the factor itself if it is a LinearMapFactor, else its gradients written out in full."""
    return factor if isinstance(factor, LinearMapFactor) else factor.written_out()


class Scaled(Factor):
    """The gradients of another factor times a positive number, viewed with another shape P: share * g_i."""

    def __init__(self, inner: Factor, share: float, shape: torch.Size | None = None) -> None:
        super().__init__(inner.examples, inner.shape if shape is None else shape)
        self.inner, self.share = inner, share

    def __getitem__(self, examples: Examples) -> "Scaled":
        return Scaled(self.inner[examples], self.share, self.shape)

    def dense(self) -> Tensor:
        return self.share * self.inner.dense().view(self.examples, *self.shape)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.weighted_sum(self.share * weight_B).view(self.shape)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self.inner.sum_in_parts(self.share * weight_B).view(self.shape)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self.inner.exact_sum(self.share * weight_B).view(self.shape)

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float | Tensor]:
        total, rounded = self.inner.sum_and_rounding(self.share * weight_B, self._of_inner(inverse_scales))
        return total.view(self.shape), rounded

    def mask(self, kept_B: Tensor) -> "Scaled":
        return Scaled(self.inner.mask(kept_B), self.share, self.shape)

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        terms_B = self.inner.term_bound(self._of_inner(inverse_scales))
        return None if terms_B is None else self.share * terms_B

    @property
    def positions(self) -> int:
        return self.inner.positions

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return self.share * self.inner.norms(self._of_inner(inverse_scales))

    def inner_products(self, direction: Tensor) -> Tensor:
        return self.share * self.inner.inner_products(direction.view(self.inner.shape))

    def _of_inner(self, inverse_scales: Tensor | None) -> Tensor | None:
        if inverse_scales is None or self.shape == self.inner.shape:
            return inverse_scales  # itself: the squares of scales are cached by tensor
        return inverse_scales.reshape(self.inner.shape)


class Dense(LinearMapFactor):
    """A factor that stores every gradient in full, grads_BP of shape (B, *P), for small parameters."""

    def __init__(self, grads_BP: Tensor) -> None:
        super().__init__(grads_BP.shape[0], grads_BP.shape[1:])
        self.grads_BP = at_least_float32(grads_BP)

    def __getitem__(self, examples: Examples) -> "Dense":
        return Dense(self.grads_BP[examples])

    def dense(self) -> Tensor:
        return self.grads_BP

    def written_out(self) -> "Dense":
        return self

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats, self.grads_BP)

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return (weight_B.to(self.grads_BP.dtype) @ flattened(self.grads_BP)).view(self.shape)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return sum_of_rows(weight_B, flattened(self.grads_BP)).view(self.shape)

    def mask(self, kept_B: Tensor) -> "Dense":
        return Dense(masked(self.grads_BP, kept_B))

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is None and (is_on_processor(self.grads_BP) or self.grads_BP.numel() <= AT_ONCE):
            return once(norms_of, self.grads_BP)
        return super().norms(inverse_scales)

    def __add__(self, other: Factor) -> Factor:
        return Dense(self.grads_BP + other.grads_BP) if isinstance(other, Dense) else super().__add__(other)


class SideBySide(Dense):
    """The small gradients of several parameters as those of one vector, whose norms and sum are computed at once."""

    def __init__(self, grads_BP: Tensor, shapes: Mapping[str, torch.Size], sizes: Sequence[int]) -> None:
        super().__init__(grads_BP)
        self.shapes, self.sizes = shapes, sizes  # of the parameters, by name; and their entries

    @classmethod
    def of(cls, parts: Mapping[str, Dense]) -> "SideBySide":
        rows = [flattened(part.grads_BP) for part in parts.values()]
        shapes = {name: part.shape for name, part in parts.items()}
        return cls(torch.cat(rows, 1), shapes, [row.shape[1] for row in rows])

    def __getitem__(self, examples: Examples) -> "SideBySide":
        return SideBySide(self.grads_BP[examples], self.shapes, self.sizes)

    def mask(self, kept_B: Tensor) -> "SideBySide":
        return SideBySide(masked(self.grads_BP, kept_B), self.shapes, self.sizes)

    def apart(self, total: Tensor) -> dict[str, Tensor]:
        """Return the parts of a sum by name."""
        parts = cast("tuple[Tensor, ...]", total.split(self.sizes))
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class Sum(LinearMapFactor):
    """A sum of factors, for a parameter that is used in several places, in kinds that do not combine in closed form."""

    def __init__(self, parts: list[Factor]) -> None:
        super().__init__(parts[0].examples, parts[0].shape)
        self.parts = parts

    def __getitem__(self, examples: Examples) -> "Sum":
        return Sum([part[examples] for part in self.parts])

    def dense(self) -> Tensor:
        return added_up([part.dense() for part in self.parts])

    def apply(self, x_BTI: Tensor) -> Tensor:
        return added_up([as_linear_map(part).apply(x_BTI) for part in self.parts])

    def read(self, ids_BT: Tensor) -> Tensor:
        return added_up([as_linear_map(part).read(ids_BT) for part in self.parts])

    def inner_products(self, direction: Tensor) -> Tensor:
        return added_up([part.inner_products(direction) for part in self.parts])

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.weighted_sum(weight_B) for part in self.parts])

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return added_up([part.sum_in_parts(weight_B) for part in self.parts])

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return added_up([part.exact_sum(weight_B) for part in self.parts])

    def sum_and_rounding(self, weight_B: Tensor, inverse_scales: Tensor | None = None) -> tuple[Tensor, float | Tensor]:
        found = (part.sum_and_rounding(weight_B, inverse_scales) for part in self.parts)
        sums, rounded = zip(*found, strict=True)
        return added_up(list(sums)), sum(rounded)

    def mask(self, kept_B: Tensor) -> "Sum":
        return Sum([part.mask(kept_B) for part in self.parts])

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        return added_up([term_bound_of(part, inverse_scales) for part in self.parts])

    @property
    def positions(self) -> int:
        return sum(part.positions for part in self.parts)

    def __add__(self, other: Factor) -> Factor:
        for index, part in enumerate(self.parts):
            if type(part) is type(other):
                return Sum([*self.parts[:index], part + other, *self.parts[index + 1 :]])
        return Sum([*self.parts, other])


def term_bound_of(factor: Factor, inverse_scales: Tensor | None) -> Tensor:
    """Return the factor's term bound, or its norms if each gradient is a single term."""
    terms = factor.term_bound(inverse_scales)
    return factor.norms(inverse_scales) if terms is None else terms
