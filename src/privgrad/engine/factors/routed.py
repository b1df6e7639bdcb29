"""The factor of stacked weights of experts, of which each position of an example uses a few.

A slot is one use of an expert by a position. A position with K experts has K slots.

Shape suffixes: B examples, S slots of an example, M slots of all examples, E experts, I inputs, O outputs, P blocks.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from privgrad.engine.factors.outer import Outer, position_norms
from privgrad.gradient.factor import (
    CANCELED,
    FEW_TERMS,
    JOINED_PARTS,
    NARROW,
    TERMS,
    Examples,
    Factor,
    at_least_float32,
    examples_per_block,
    in_one,
    masked,
    once,
    spoiled,
    sum_of_products,
)
from privgrad.gradient.refusals import refused
from privgrad.processes import AT_ONCE, is_slow


class _Blocks(NamedTuple):
    """The slots of each example in blocks of equal size, each of one expert; the number of blocks is public."""

    slot: Tensor  # among those of all examples, shape (B, P, size)
    is_used: Tensor  # whether there is such a slot, shape (B, P, size, 1)
    expert: Tensor  # of each block, among those of all examples, shape (B P,)
    place: Tensor  # of each slot among the places of its example's blocks, shape (B, S)


class Routes:
    """The expert of each slot; what follows from it alone is computed once for all stacked weights."""

    def __init__(self, expert_BS: Tensor, experts: int, whole: "Routes | None" = None) -> None:
        self.expert_BS, self.experts, self._whole = expert_BS, experts, whole
        self._merged, self._blocks = dict[int, Routes](), dict[int, _Blocks]()

    def __getitem__(self, examples: Examples) -> "Routes":
        return Routes(self.expert_BS[examples], self.experts)

    def merge(self, parts: int) -> "Routes":
        if parts not in self._merged:
            expert_BS = self.expert_BS.reshape(len(self.expert_BS) // parts, -1)
            self._merged[parts] = Routes(expert_BS, self.experts, self.whole)
        return self._merged[parts]

    @cached_property
    def whole(self) -> "Routes":
        """The routes of all slots, in the same order, as of one example."""
        return Routes(self.expert_BS.reshape(1, -1), self.experts) if self._whole is None else self._whole

    def few_blocks(self, outputs: int, inputs: int) -> _Blocks | None:
        """Return all slots in blocks, each of one part of a sum at most; None where it is better to read their numbers.

        Products with weights need a copy of these for each block.
        """
        slots = self.expert_BS.numel()
        size = max(1, min(FEW_TERMS if min(outputs, inputs) <= NARROW else TERMS, -(-slots // self.experts)))
        small = (slots // size + self.experts) * outputs * inputs <= AT_ONCE
        return self.whole.blocks(size) if slots and small and not is_slow(self.expert_BS) else None

    @cached_property
    def by_expert(self) -> tuple[Tensor, Tensor, list[int]]:
        """All slots sorted by expert, shape (M,); the place of each slot in this order; the slots of each expert."""
        sorted_M, order_M = self.expert_BS.flatten().sort(stable=True)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        ends = torch.searchsorted(sorted_M, torch.arange(self.experts, device=order_M.device), right=True)
        counts = [end - start for start, end in pairwise([0, *cast("list[int]", ends.tolist())])]
        if sum(counts) < len(order_M):
            remedy = "compute all experts in one process"
            raise refused("a layer of experts", "to use its own", "a position that is routed to no expert", remedy)
        return order_M, place_M, counts

    def blocks(self, size: int | None = None) -> _Blocks:
        # With slots / experts slots in a block, all blocks have at most twice as many places as there are slots.
        (size_B, slots), experts = self.expert_BS.shape, self.experts
        size = max(1, -(-slots // experts)) if size is None else size
        if size not in self._blocks:
            self._blocks[size] = self._in_blocks(size_B, slots, experts, size)
        return self._blocks[size]

    def _in_blocks(self, size_B: int, slots: int, experts: int, size: int) -> _Blocks:
        most = (slots + experts * (size - 1)) // size
        sorted_BS, order_BS = self.expert_BS.sort(dim=1, stable=True)
        count_BE = sorted_BS.new_zeros(size_B, experts).scatter_add_(1, sorted_BS, torch.ones_like(sorted_BS))
        blocks_BE = (count_BE + (size - 1)) // size
        end_BE = blocks_BE.cumsum(1)
        shift_BE = (end_BE - blocks_BE) * size - (count_BE.cumsum(1) - count_BE)
        position_BS = shift_BE.gather(1, sorted_BS) + torch.arange(slots, device=sorted_BS.device)
        slot_B = sorted_BS.new_full((size_B, most * size), slots).scatter_(1, position_BS, order_BS)
        block_BP = torch.arange(most, device=sorted_BS.device).expand(size_B, most).contiguous()
        expert_BP = torch.searchsorted(end_BE, block_BP, right=True).clamp(max=experts - 1)
        example_B = torch.arange(size_B, device=sorted_BS.device)[:, None]
        slot_BPN = (slot_B.clamp(max=max(0, slots - 1)) + example_B * slots).view(size_B, most, size)
        is_used = (slot_B < slots).view(*slot_BPN.shape, 1)
        place_BS = torch.empty_like(order_BS).scatter_(1, order_BS, position_BS)
        return _Blocks(slot_BPN, is_used, (expert_BP + example_B * experts).flatten(), place_BS)


class Routed(Factor):
    """The gradients of stacked weights: g_i[e] = sum over the slots of example i that use expert e of b a^T."""

    # All sizes are public but those of the sum for each expert. To write gradients out takes memory for three.

    def __init__(self, routes: Routes, a_BSI: Tensor, b_BSO: Tensor) -> None:
        super().__init__(a_BSI.shape[0], torch.Size((routes.experts, b_BSO.shape[2], a_BSI.shape[2])))
        self.routes, self.a_BSI, self.b_BSO = routes, at_least_float32(a_BSI), at_least_float32(b_BSO)

    def __getitem__(self, examples: Examples) -> "Routed":
        return Routed(self.routes[examples], self.a_BSI[examples], self.b_BSO[examples])

    def dense(self) -> Tensor:
        experts, outputs, inputs = self.shape
        grads = self.a_BSI.new_zeros(self.examples * experts, outputs, inputs)
        return self._added(grads, self.routes.blocks(), self.b_BSO).view(self.examples, *self.shape)

    def _added(self, total: Tensor, blocks: _Blocks, b_BSO: Tensor) -> Tensor:
        """Add the products of each block to those of its expert in `total`, and return that."""
        a_BPNI, b_BPNO = (x.flatten(0, 1)[blocks.slot] for x in (self.a_BSI, b_BSO))
        products_BPOI = torch.where(blocks.is_used, b_BPNO, 0.0).mT @ a_BPNI.to(b_BPNO.dtype)
        return total.index_add_(0, blocks.expert, products_BPOI.flatten(0, 1).to(total.dtype))

    def weighted_sum(self, weight_B: Tensor) -> Tensor:
        return self._sum(weight_B.to(self.b_BSO.dtype), self.b_BSO.dtype, lambda b_NO, a_NI: b_NO.mT @ a_NI)

    def sum_in_parts(self, weight_B: Tensor) -> Tensor:
        return self._sum(weight_B.to(self.b_BSO.dtype), torch.float64, sum_of_products)

    def exact_sum(self, weight_B: Tensor) -> Tensor:
        return self._sum(weight_B.double(), torch.float64, lambda b_NO, a_NI: b_NO.double().mT @ a_NI.double())

    def _sum(self, weight_B: Tensor, dtype: torch.dtype, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        b_BSO = self.b_BSO * weight_B[:, None, None]
        if (blocks := self.routes.few_blocks(*self.shape[1:])) is not None:
            few = self.examples * self.positions <= JOINED_PARTS * blocks.slot.shape[2]
            few = few and min(self.shape[1:]) > NARROW  # as in `sum_of_products`
            return self._added(b_BSO.new_zeros(self.shape, dtype=None if few else dtype), blocks, b_BSO)
        total = b_BSO.new_zeros(self.shape, dtype=dtype)
        order_M, _, counts = self.routes.whole.by_expert
        b_MO, a_MI = (x.flatten(0, 1)[order_M] for x in (b_BSO, self.a_BSI))
        b_pieces, a_pieces = (cast("tuple[Tensor, ...]", x.split(counts)) for x in (b_MO, a_MI))
        for expert, (b_NO, a_NI) in enumerate(zip(b_pieces, a_pieces, strict=True)):
            total[expert] = product(b_NO, a_NI)
        return total

    def mask(self, kept_B: Tensor) -> "Routed":
        return Routed(self.routes, masked(self.a_BSI, kept_B), masked(self.b_BSO, kept_B))

    def merge(self, parts: int) -> "Routed":
        rows = self.examples // parts
        return Routed(
            self.routes.merge(parts),
            self.a_BSI.reshape(rows, -1, self.shape[2]),
            self.b_BSO.reshape(rows, -1, self.shape[1]),
        )

    def __add__(self, other: Factor) -> Factor:
        if not isinstance(other, Routed):
            return super().__add__(other)
        routes = Routes(torch.cat([self.routes.expert_BS, other.routes.expert_BS], 1), self.shape[0])
        return Routed(routes, torch.cat([self.a_BSI, other.a_BSI], 1), torch.cat([self.b_BSO, other.b_BSO], 1))

    def term_bound(self, inverse_scales: Tensor | None = None) -> Tensor | None:
        terms_BS = once(position_norms, self.a_BSI) * once(position_norms, self.b_BSO)
        if inverse_scales is not None:
            terms_BS = terms_BS * inverse_scales.flatten(1).amax(1)[self.routes.expert_BS]
        return terms_BS.sum(1)

    @property
    def positions(self) -> int:
        return self.a_BSI.shape[1]

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        # Inner products of slots, where these take fewer operations than the gradients, which have places for twice as
        # many: |g|^2 = sum over slots s, t of one expert of (a_s . a_t)(b_s . b_t), like docs/mathematics.md (1.2).
        _, outputs, inputs = self.shape
        if inverse_scales is None and self.positions * (inputs + outputs) < 2 * inputs * outputs:
            chunks = self._split(self._per_block(self.positions**2))
            return in_one([cast(Routed, part)._norms_by_inner_products() for part in chunks])
        return super().norms(inverse_scales)

    def _per_block(self, floats: int) -> int:
        return examples_per_block(floats, self.b_BSO)

    def _norms_by_inner_products(self) -> Tensor:
        """Return the norms from Gram matrices of slots, or from g_i itself where terms cancel or underflow."""
        a_BSI, b_BSO, expert_BS = self.a_BSI, self.b_BSO, self.routes.expert_BS
        a_BSS, b_BSS = a_BSI @ a_BSI.mT, b_BSO @ b_BSO.mT
        a_BS, b_BS = (gram.diagonal(dim1=1, dim2=2).sqrt() for gram in (a_BSS, b_BSS))
        same_BSS = expert_BS[:, :, None] == expert_BS[:, None]
        square_B = torch.where(same_BSS, a_BSS * b_BSS, 0.0).sum((1, 2), dtype=torch.float64)
        term_BS = a_BS * b_BS
        of_expert_BS = (same_BSS.to(term_BS.dtype) @ term_BS[:, :, None])[:, :, 0]
        # At least |g|^2, as each expert's (sum of |b||a|)^2.
        most_B = (of_expert_BS * term_BS).sum(1, dtype=torch.float64)
        lost_B = (square_B <= CANCELED * most_B) | Outer(a_BSI, b_BSO).underflowing(a_BS, b_BS)
        norm_B = square_B.sqrt()  # nan of a negative square, which is lost
        if (again := spoiled(lost_B)) is not None:
            norm_B[again] = Factor.norms(Routed(self.routes[again], a_BSI[again].double(), b_BSO[again].double()))
        return norm_B


def apply_routed(factor: Factor, x_BSI: Tensor, expert_BS: Tensor) -> Tensor:
    """Return g_i[e] x for every slot and its expert e, shape (B, S, O), computed for each example by itself."""
    experts, outputs, inputs = factor.shape
    if isinstance(factor, Routed) and factor.positions * (inputs + outputs) <= experts * inputs * outputs:
        same_BST = expert_BS[:, :, None] == factor.routes.expert_BS[:, None]
        return torch.where(same_BST, x_BSI @ factor.a_BSI.mT, 0.0) @ factor.b_BSO
    grads_BEOI = factor.dense()
    uses_BSE = expert_BS[:, :, None] == torch.arange(experts, device=expert_BS.device)
    each = (torch.where(uses_BSE[:, :, e, None], x_BSI, 0.0) @ grads_BEOI[:, e].mT for e in range(experts))
    return torch.stack(list(each)).sum(0)
