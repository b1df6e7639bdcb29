# pyright: reportIncompatibleMethodOverride=false
# In torch's types, an autograd Function's methods accept any arguments.
"""Linear maps whose parameters each example moves in its own way, for the forwards with taps.

`recurrent` and `attention` call these functions, and the autograd Functions of `recurrent` the methods of
`EachWeight`. `experts` calls the methods of `EachExpert`. The privacy guarantee of the fast engine rests on this file:
no example's output may depend on another example.

Shape suffixes: R rows, of which each example has the same number, as neighbors; M rows that use one expert; T
positions, I inputs, O outputs, B examples, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from privgrad.gradient.factors.base import Dense, as_linear_map
from privgrad.gradient.factors.displacement import Displacement, Displacements
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.factors.outer import Outer
from privgrad.gradient.factors.routed import Routed
from privgrad.gradient.layers.base import by_rows


@dataclass(frozen=True)
class EachWeight:
    """A weight that is applied to one position of each example after the other, moved for each example.

    The displacement of example i is D_i = share_i sum over positions of b a^T. It is applied in this form if that reads
    less memory than D_i itself: memory, and not arithmetic, decides the time of a product with one vector.

    Attributes:
        weight: shape (O, I), detached.
        forward: matrices (B, I, ...), ..., (B, ..., O); an example's vector times their product is D_i x. Empty if the
            weight does not move.
        backward: the same for D_i^T y, (B, O, ...), ..., (B, ..., I).
    """

    weight: Tensor
    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()

    @staticmethod
    def of(parameter: Tensor, displacements: Displacements | None) -> "EachWeight":
        """Return a parameter, displaced if it moves."""
        weight, displacement = parameter.detach(), displacement_of(parameter, displacements)
        if displacement is None:
            return EachWeight(weight)
        factor = as_linear_map(displacement.factor)
        (outputs, inputs), dtype = weight.shape, weight.dtype
        if isinstance(factor, Outer) and factor.positions * (inputs + outputs) < inputs * outputs:
            a_BTI = (factor.a_BTI * displacement.share[:, None, None]).to(dtype).contiguous()
            b_BTO = factor.b_BTO.to(dtype).contiguous()
            return EachWeight(weight, (a_BTI.mT, b_BTO), (b_BTO.mT, a_BTI))
        moved_BOI = displacement.dense().to(dtype)
        return EachWeight(weight, (moved_BOI.mT.contiguous(),), (moved_BOI,))

    def apply(self, x_RI: Tensor, added: Tensor, *, out: Tensor) -> Tensor:
        """Write added + (W + D_i) x to `out`, shape (R, O), and return it."""
        return _added(torch.addmm(added, x_RI, self.weight.t(), out=out), x_RI, self.forward)

    def pull(self, y_RO: Tensor, added: Tensor, *, out: Tensor) -> Tensor:
        """Write added + (W + D_i)^T y to `out`, shape (R, I), and return it."""
        return _added(torch.addmm(added, y_RO, self.weight, out=out), y_RO, self.backward)


def _added(out: Tensor, x: Tensor, matrices: tuple[Tensor, ...]) -> Tensor:
    """Add each example's vector times the product of its matrices to `out`, and return that."""
    if matrices:
        size = len(matrices[0])
        rows = x.view(size, -1, x.shape[1])  # on the left: torch.bmm is several times slower with a vector on the right
        for matrix in matrices[:-1]:
            rows = torch.bmm(rows, matrix)
        out.view(size, -1, out.shape[1]).baddbmm_(rows, matrices[-1])
    return out


class EachExpert:
    """The displacements of the stacked weights of experts, of shape (E, O, I), for each example.

    The displacement of expert e for example i is share_i sum of b a^T over those positions of i that used e. It is
    applied in this form if that takes fewer operations than the displacement itself.

    Args:
        displacement: of the stacked weights.
    """

    def __init__(self, displacement: Displacement) -> None:
        factor = displacement.factor
        self._share: list[float] = displacement.share.tolist()
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        if isinstance(factor, Routed):
            found = ((route.expert, route.by_example()) for route in factor.routes)
            self._pairs = {(expert, i): (a_TI, b_TO) for expert, pairs in found for i, a_TI, b_TO in pairs}
        else:
            self._dense_BEOI = factor.dense()

    @staticmethod
    def of(weights: Tensor, displacements: Displacements | None) -> "EachExpert | None":
        """Return the displacements of stacked weights; None if these do not move."""
        displacement = displacement_of(weights, displacements)
        return None if displacement is None else EachExpert(displacement)

    def moved(self, output_MO: Tensor, x_MI: Tensor, expert: int, counts: Sequence[int]) -> Tensor:
        """Return the output of one expert's weight, with the effect of each example's displacement added in place.

        Args:
            output_MO: the output at the weight itself.
            x_MI: the inputs, sorted by example.
            expert: its number.
            counts: the number of rows of each example.
        """
        moves, start = list[_Move](), 0
        for example, count in enumerate(counts):
            matrices = self._matrices(expert, example, count) if count else ()
            if matrices:
                own = tuple(matrix.to(torch.promote_types(x_MI.dtype, torch.float32)) for matrix in matrices)
                moves.append((slice(start, start + count), self._share[example], own))
            start += count
        return cast(Tensor, _AddMoved.apply(output_MO, at_least_float32(x_MI), moves)) if moves else output_MO

    def _matrices(self, expert: int, example: int, count: int) -> tuple[Tensor, ...]:
        """Return matrices (I, ...), ..., (..., O), whose product is D_i^T without the share; none if it is zero."""
        if self._pairs is None:
            return (self._dense_BEOI[example, expert].mT,)
        if (expert, example) not in self._pairs:
            return ()
        a_TI, b_TO = self._pairs[expert, example]
        (positions, inputs), outputs = a_TI.shape, b_TO.shape[1]
        if positions * count * (inputs + outputs) <= (positions + count) * inputs * outputs:
            return a_TI.mT, b_TO
        return (a_TI.mT @ b_TO,)


_Move = tuple[slice, float, tuple[Tensor, ...]]  # rows of one example, its share, and matrices


class _AddMoved(torch.autograd.Function):
    """Adds to the output of some rows, in place: share times the input times matrices.

    Each example is computed by itself, so that the number of rows of others does not change how it is rounded.
    """

    @staticmethod
    def forward(ctx: Any, output_MO: Tensor, x_MI: Tensor, moves: list[_Move]) -> Tensor:
        ctx.moves, ctx.shape, ctx.dtype = moves, x_MI.shape, x_MI.dtype
        ctx.mark_dirty(output_MO)
        with torch.autocast(x_MI.device.type, enabled=False):
            for rows, share, matrices in moves:
                product = x_MI[rows]
                for matrix in matrices:
                    product = product @ matrix
                output_MO[rows].add_(product, alpha=share)
        return output_MO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad_MO, None, None
        grad_MI = grad_MO.new_zeros(ctx.shape, dtype=ctx.dtype)
        for rows, share, matrices in ctx.moves:
            product = at_least_float32(grad_MO[rows])
            for matrix in reversed(matrices):
                product = product @ matrix.mT
            grad_MI[rows].add_(product, alpha=share)
        return grad_MO, grad_MI, None


def displacement_of(parameter: Tensor, displacements: Displacements | None) -> Displacement | None:
    """Return the displacement of a parameter; None if it does not move."""
    return None if displacements is None else displacements.of({"": parameter}).get("")


def values_of(parameter: Tensor, displacements: Displacements | None, rows: int) -> Tensor:
    """Return a parameter, shape P, or one for each row if it moves, shape (R, *P)."""
    displacement = displacement_of(parameter, displacements)
    if displacement is None:
        return parameter.detach()
    moved = displacement.added_to(parameter.detach())
    return moved.repeat_interleave(rows // len(moved), 0)


def moved_linear(x_TRI: Tensor, weight: Tensor, bias: Tensor | None, displacements: Displacements | None) -> Tensor:
    """Return (W + D_i) x + bias for every position, shape (T, R, O), with a graph to x.

    Args:
        x_TRI: inputs, time first.
        weight: a parameter, shape (O, I).
        bias: what `values_of` returns, or a sum of such tensors; None: there is none.
        displacements: as in `displacement_of`.
    """
    displacement = displacement_of(weight, displacements)
    output = F.linear(x_TRI, weight.detach(), bias if bias is not None and bias.dim() == 1 else None)
    if bias is not None and bias.dim() == 2:
        output = output + bias
    if displacement is not None:
        output = output + _applied(displacement, x_TRI.transpose(0, 1)).transpose(0, 1).to(output.dtype)
    return output


def moved_output(
    output_RTO: Tensor,
    x_RTI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    displacements: Displacements,
    *,
    rows: Mapping[Tensor, slice],
) -> Tensor:
    """Return the output of a linear map with the effect of its moved parameters added.

    Args:
        output_RTO: the output at the parameters themselves.
        x_RTI: the inputs.
        weight: a parameter, shape (O, I), or one that contains it.
        bias: the same, shape (O,); None: there is none.
        displacements: of the parameters.
        rows: the rows of such parameters that are used here.
    """
    of_weight = displacement_of(weight, displacements)
    if of_weight is not None:
        if weight in rows:
            of_weight = Displacement(Dense(of_weight.dense()[:, rows[weight]]), torch.ones_like(of_weight.share))
        output_RTO = output_RTO + _applied(of_weight, x_RTI).to(output_RTO.dtype)
    if bias is not None and (of_bias := displacement_of(bias, displacements)) is not None:
        moved_RO = of_bias.for_rows(x_RTI)[:, rows.get(bias, slice(None))]
        output_RTO = output_RTO + moved_RO[:, None].to(output_RTO.dtype)
    return output_RTO


def _applied(displacement: Displacement, x_RTI: Tensor) -> Tensor:
    """Return D_i x for every position, shape (R, T, O)."""
    x_BTI = at_least_float32(x_RTI).reshape(len(displacement.share), -1, x_RTI.shape[2])
    return by_rows(displacement.apply(x_BTI), x_RTI.shape[:2])
