# pyright: reportIncompatibleMethodOverride=false
# In torch's types, an autograd Function's methods accept any arguments.
"""A forward of nn.LSTM, nn.GRU, nn.RNN and their cells that computes the same and exposes the gradients of the gates.

The per-example gradients of the weights follow from those of the pre-activations, which torch's fused kernels hide.
Here each layer and direction has two parts: one matrix product over all time, whose output goes through the tap, and
the recurrence. On other devices than the CPU, this is torch's kernel, where that is possible. Else it is an autograd
Function with a loop of few operations per time step. Parameters enter detached: their gradients come from the taps
alone. docs/mathematics.md (4.1) to (4.9) derive the gradients; docstrings and comments below cite these by number.

Shape suffixes: T time, B examples, I input, H hidden, P projected hidden (H without projection), G gates * H. The
tensors `hidden` and `cells` have T + 1 rows, the initial state first. The reverse direction, including its taps, runs
on flipped copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.backends import cudnn

from privgrad.engine.factors.displacement import Displacements, displacement_of
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers.base import (
    Tap,
    add_to,
    moved_linear,
    of_linear_maps,
    register_forward,
    require_unwritten,
    tapped,
    values_of,
)
from privgrad.errors import UnsupportedModuleError, expected
from privgrad.gradient.autograd_graph import gradients_at
from privgrad.gradient.factor import Factor, as_linear_map, examples_per_block
from privgrad.gradient.functional import version_of
from privgrad.processes import is_on_processor

Layers = nn.LSTM | nn.GRU | nn.RNN
Cell = nn.LSTMCell | nn.GRUCell | nn.RNNCell
State = Tensor | tuple[Tensor, Tensor]
Grads = tuple[Tensor | None, ...]


@register_forward(nn.LSTM, nn.GRU, nn.RNN)
def recurrent_forward(
    module: Layers, tap: Tap, inputs: Tensor, hx: State | None = None, *, displacements: Displacements | None = None
) -> tuple[Tensor, State]:
    """Compute module(inputs, hx) with taps at the pre-activations, in the dtype of the parameters also under autocast.

    NOT private: each example's gradients depend on that example, the weights and its own dropout draws alone.
    """
    if inputs.dim() != 3:
        name, got = type(module).__name__, f"a tensor of shape {tuple(inputs.shape)}"
        remedy = "give a batch, of size 1 for one sequence"
        raise expected(name, "inputs", "to be a tensor of 3 dimensions", got, remedy, UnsupportedModuleError)
    dtype = cast("Tensor", module.weight_ih_l0).dtype
    # Contiguous: torch would multiply a transposed input by one copy of the weight for each time step.
    layer_TBI = (inputs.transpose(0, 1) if module.batch_first else inputs).to(dtype).contiguous()
    directions = ("", "_reverse") if module.bidirectional else ("",)
    if hx is None:
        shape = (module.num_layers * len(directions), layer_TBI.shape[1])
        hidden = layer_TBI.new_zeros(*shape, module.proj_size or module.hidden_size)
        hx = (hidden, layer_TBI.new_zeros(*shape, module.hidden_size)) if isinstance(module, nn.LSTM) else hidden
    module.check_forward_args(inputs, cast("Any", hx), None)
    pair = cast("tuple[Tensor, Tensor]", hx if isinstance(module, nn.LSTM) else (hx, hx))
    states = [part.to(dtype).unbind() for part in pair]
    lasts: list[tuple[Tensor, Tensor]] = []
    with torch.autocast(inputs.device.type, enabled=False):
        for layer in range(module.num_layers):
            if layer > 0:
                layer_TBI = F.dropout(layer_TBI, module.dropout, module.training)
            firsts = zip(*(part[layer * len(directions) :] for part in states), strict=True)
            results = [
                _direction(module, f"_l{layer}{direction}", tap, displacements, layer_TBI, *first)
                for direction, first in zip(directions, firsts, strict=False)
            ]
            layer_TBI = torch.cat([result[0] for result in results], 2) if module.bidirectional else results[0][0]
            lasts += [result[1:] for result in results]
        hidden, cells = (torch.stack(part) for part in zip(*lasts, strict=True))
        last = (hidden, cells) if isinstance(module, nn.LSTM) else hidden
        return layer_TBI.transpose(0, 1) if module.batch_first else layer_TBI, last


@register_forward(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell_forward(
    module: Cell, tap: Tap, inputs: Tensor, hx: State | None = None, *, displacements: Displacements | None = None
) -> State:
    """Compute module(inputs, hx), one time step; inputs without a batch dimension are one row."""
    dtype = module.weight_ih.dtype
    if hx is None:
        zeros = inputs.new_zeros(*inputs.shape[:-1], module.hidden_size)
        hx = (zeros, zeros) if isinstance(module, nn.LSTMCell) else zeros
    pair = hx if isinstance(hx, tuple) else (hx, hx)
    hidden, cell = (part.to(dtype).view(-1, module.hidden_size) for part in pair)
    with torch.autocast(inputs.device.type, enabled=False):
        rows_1BI = inputs.to(dtype).reshape(1, -1, module.input_size)
        _, *last = _direction(module, "", tap, displacements, rows_1BI, hidden, cell)
    found = tuple(part.view(*inputs.shape[:-1], -1) for part in last)
    return cast("State", found if isinstance(module, nn.LSTMCell) else found[0])


def _direction(
    module: Any, suffix: str, tap: Tap, moves: Displacements | None, inputs: Tensor, hidden_BP: Tensor, cell_BH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one direction's outputs (T, B, P), last hidden state (B, P), and last cell (B, H) that an LSTM changes."""
    reverse = suffix.endswith("_reverse")
    inputs = inputs.flip(0) if reverse else inputs
    version = version_of(inputs)

    def parameter(name: str) -> Tensor:
        return getattr(module, name + suffix)

    def of_gates(grad_TBG: Tensor) -> dict[Tensor, Factor]:
        require_unwritten(type(module).__name__, inputs, version)
        inputs_BTI, before_BTP = inputs.detach().transpose(0, 1), before_TBP.transpose(0, 1)
        b_BTG = grad_TBG.transpose(0, 1)
        if not isinstance(module, nn.GRU | nn.GRUCell):
            maps = [(own_ih, own_bias_ih, inputs_BTI), (own_hh, own_bias_hh, before_BTP)]  # (4.2)
            return of_linear_maps(maps, b_BTG)
        # (4.9): n = tanh(input term + r * hidden term), so their gradients differ
        later_BTG = grad_TBG.clone().transpose(0, 1)
        later_BTG[:, :, 2 * module.hidden_size :] *= extra_TBH.transpose(0, 1)
        found = of_linear_maps([(own_ih, own_bias_ih, inputs_BTI)], b_BTG)
        return add_to(found, of_linear_maps([(own_hh, own_bias_hh, before_BTP)], later_BTG))

    def of_projection(grad_TBP: Tensor) -> dict[Tensor, Factor]:  # (4.6)
        return of_linear_maps([(parameter("weight_hr"), None, extra_TBH.transpose(0, 1))], grad_TBP.transpose(0, 1))

    own_ih, own_hh = parameter("weight_ih"), parameter("weight_hh")
    own_bias_ih, own_bias_hh = (parameter("bias_ih"), parameter("bias_hh")) if module.bias else (None, None)
    weight_hh, zero, extra_TBH = EachWeight.of(own_hh, moves), hidden_BP.new_zeros(()), cell_BH
    size = len(hidden_BP)
    bias_ih = None if own_bias_ih is None else values_of(own_bias_ih, moves, size)
    bias_hh = None if own_bias_hh is None else values_of(own_bias_hh, moves, size)
    if bias_ih is not None and bias_hh is not None and not isinstance(module, nn.GRU | nn.GRUCell):
        bias_ih = bias_ih + bias_hh
    pre_TBG = tapped(tap, moved_linear(inputs, own_ih, bias_ih, moves), of_gates)
    if moves is None and takes_kernel(module, pre_TBG):
        state = (hidden_BP, cell_BH) if isinstance(module, nn.LSTM) else (hidden_BP,)
        of_kernel = partial(
            run_kernel, cast(str, module.mode), weight_hh.weight, bias_hh if isinstance(module, nn.GRU) else None
        )
        hidden, *lasts = cast("Any", _Kernel).apply(of_kernel, pre_TBG, *state)
        if isinstance(module, nn.LSTM):
            (cell_BH,) = lasts
        elif isinstance(module, nn.GRU):
            width = module.hidden_size
            r_bias = None if bias_hh is None else bias_hh[:width]
            later_TBH = F.linear(hidden.detach()[:-1], weight_hh.weight[:width], r_bias)
            extra_TBH = later_TBH.add_(pre_TBG.detach()[:, :, :width]).sigmoid_()
    elif isinstance(module, nn.LSTM | nn.LSTMCell):
        weight_hr = nothing_TBP = None
        if getattr(module, "proj_size", 0):  # add zeros to each projected state: their gradient is the state's
            weight_hr = EachWeight.of(parameter("weight_hr"), moves)
            nothing_TBP = tapped(tap, zero.expand(len(inputs), *hidden_BP.shape), of_projection)
        arguments = (pre_TBG, weight_hh, hidden_BP, cell_BH, weight_hr, nothing_TBP)
        hidden, cell_BH, extra_TBH = cast("Any", _LSTM).apply(*arguments)
    elif isinstance(module, nn.GRU | nn.GRUCell):
        hidden, extra_TBH = cast("Any", _GRU).apply(pre_TBG, weight_hh, zero if bias_hh is None else bias_hh, hidden_BP)
    else:
        hidden = cast("Any", _RNN).apply(pre_TBG, weight_hh, hidden_BP, module.nonlinearity == "relu")
    before_TBP = hidden.detach()[:-1]
    return hidden[1:].flip(0) if reverse else hidden[1:], hidden[-1], cell_BH


@dataclass(frozen=True)
class EachWeight:
    """A weight that is applied to one position of each example after the other, moved for each example."""

    # D_i = share_i sum over positions of b a^T is applied in this form if that reads less memory than D_i itself:
    # memory, and not arithmetic, decides the time of a product with one vector.

    weight: Tensor  # shape (O, I), detached
    # An example's vector times these matrices, (B, I, ...), ..., (B, ..., O), is D_i x; none if it does not move.
    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()  # the same for D_i^T y, (B, O, ...), ..., (B, ..., I)

    @staticmethod
    def of(parameter: Tensor, displacements: Displacements | None) -> "EachWeight":
        weight, displacement = parameter.detach(), displacement_of(parameter, displacements)
        if displacement is None:
            return EachWeight(weight)
        factor, dtype = as_linear_map(displacement.factor), weight.dtype
        if isinstance(factor, Outer) and factor.has_few_positions:
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


_KERNEL_WIDTH = 512  # hidden numbers from which the product with the identity takes longer than a loop


def takes_kernel(module: Any, pre_TBG: Tensor) -> bool:
    """Return whether torch's kernel computes the recurrence: of few hidden numbers, not projected, over some time."""
    is_layer = isinstance(module, nn.LSTM | nn.GRU | nn.RNN) and not module.proj_size
    small = is_layer and module.hidden_size <= _KERNEL_WIDTH
    return small and not is_on_processor(pre_TBG) and len(pre_TBG) > 1 and pre_TBG.numel() > 0


def run_kernel(
    mode: str, weight_hh: Tensor, bias_hh: Tensor | None, pre_TBG: Tensor, *state: Tensor
) -> tuple[Tensor, ...]:
    """Return the hidden states, the first one included, and the last cell of an LSTM, by torch's kernel.

    The weight of the input is the identity, so that the gradient of the input is that of the pre-activations.
    """
    weights = [torch.eye(len(weight_hh), dtype=weight_hh.dtype, device=weight_hh.device), weight_hh.clone()]
    if bias_hh is not None:
        weights += [torch.zeros_like(bias_hh), bias_hh.clone()]
    if pre_TBG.is_cuda and cudnn.is_acceptable(pre_TBG):  # which wants them in one piece of memory
        sizes = len(weight_hh), cudnn.rnn.get_cudnn_mode(mode), weight_hh.shape[1], 0, 1
        cast(Any, torch)._cudnn_rnn_flatten_weight(weights, len(weights), *sizes, False, False)
    first = tuple(part[None].contiguous() for part in state)
    kernel, arguments = getattr(torch, mode.lower()), (weights, bias_hh is not None, 1, 0.0, True, False, False)
    outputs, _, *cells = kernel(pre_TBG, first if mode == "LSTM" else first[0], *arguments)
    return torch.cat([first[0], outputs]), *(cell[0] for cell in cells)


class _Kernel(torch.autograd.Function):
    """A recurrence that torch computes and differentiates, once."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Any:
        ctx.inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            ctx.found = run(*ctx.inputs)
        outputs = tuple(x.detach() for x in ctx.found)
        ctx.save_for_backward(*outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        _ = ctx.saved_tensors  # torch refuses if they were written to; the factors read them too
        return None, *gradients_at(ctx.inputs, ctx.found, grads, keep_graph=True)


class _LSTM(torch.autograd.Function):
    """The recurrence of an LSTM: c = f c + i n, h = o tanh(c), (i, f, n, o) = gates(pre + W_hh h), see (4.3)."""

    # With a projection, h = W_hr o tanh(c) + nothing, where `nothing` is zero. The backward pass is (4.4) and (4.5).

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weight_hh: EachWeight, h: Tensor, c: Tensor, *projection: Any) -> Any:
        weight_hr, nothing = cast("tuple[EachWeight | None, Tensor]", projection)
        hidden, cells = (_with_first(x, len(pre)) for x in (h, c))
        # Nobody else reads the pre-activations. `addmm` copies them first, unless it may overwrite them.
        news, tanhs, gates = torch.empty_like(cells[1:]), torch.empty_like(cells[1:]), pre.detach()
        unprojected = torch.empty_like(news) if weight_hr is not None else hidden[1:]
        hs, cs, all_gates, ns, ts, ms = map(_each, (hidden, cells, gates, news, tanhs, unprojected))
        for t, (i, f, n, o) in enumerate(zip(*map(_each, gates.chunk(4, 2)), strict=True)):
            weight_hh.apply(hs[t], all_gates[t], out=all_gates[t])
            ns[t].copy_(n).tanh_()  # a copy: many times faster than on n, which is strided
            all_gates[t].sigmoid_()
            torch.mul(f, cs[t], out=cs[t + 1]).addcmul_(i, ns[t])
            torch.mul(o, torch.tanh(cs[t + 1], out=ts[t]), out=ms[t])
            if weight_hr is not None:
                weight_hr.apply(ms[t], nothing[t], out=hs[t + 1])
        ctx.weights = weight_hh, weight_hr
        ctx.save_for_backward(hidden, cells, gates, news, tanhs)
        if weight_hr is not None:
            ctx.mark_non_differentiable(unprojected)
        return hidden, cells[-1].clone(), unprojected if weight_hr is not None else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor, grad_c: Tensor, *unused: Any) -> Grads:
        (weight_hh, weight_hr), (_, cells, gates, news, tanhs) = ctx.weights, ctx.saved_tensors
        grad_pre = torch.empty_like(gates)
        grad_nothing = torch.empty_like(grad_hidden[1:]) if weight_hr is not None else None
        later, grad_h, grad_c = torch.zeros_like(gates[0]), torch.empty_like(grad_hidden[0]), grad_c.clone()
        no_grad = gates.new_zeros(())
        few = examples_per_block(8 * gates[0].numel(), gates)  # steps, whose derivatives stay in the cache
        for start in reversed(range(0, len(gates), few)):
            rows = slice(start, min(start + few, len(gates)))
            of_gates = torch.addcmul(gates[rows], gates[rows], gates[rows], value=-1, out=grad_pre[rows])  # s - s^2
            of_c = _lstm_derivatives(of_gates, gates[rows], cells[rows], news[rows], tanhs[rows])
            of_ifn = of_gates.view(*of_gates.shape[:2], 4, news.shape[2])[:, :, :3]
            of_o, forgets = of_gates.chunk(4, 2)[3], gates[rows].chunk(4, 2)[1]
            every = map(_each, (grad_hidden[1:][rows], of_c, of_ifn, of_o, forgets, of_gates))
            for t, (grad, at_c, at_ifn, at_o, f, found) in reversed(list(enumerate(zip(*every, strict=True), start))):
                grad_m = weight_hh.pull(later, grad, out=grad_h)
                if grad_nothing is not None and weight_hr is not None:
                    grad_m = weight_hr.pull(grad_nothing[t].copy_(grad_h), no_grad, out=torch.empty_like(news[0]))
                grad_c.addcmul_(grad_m, at_c)
                at_ifn.mul_(grad_c.unsqueeze(1))
                at_o.mul_(grad_m)
                grad_c.mul_(f)
                later = found
        weight_hh.pull(later, grad_hidden[0], out=grad_h)
        return grad_pre, None, grad_h, grad_c, None, grad_nothing


def _each(x: Tensor) -> tuple[Tensor, ...]:
    """Return x at all time steps; to take each by itself takes as long as a small operation."""
    return x.unbind()


def _with_first(state: Tensor, steps: int) -> Tensor:
    """Return memory for all states, with the first one in row 0."""
    rows = state.new_empty(steps + 1, *state.shape)
    rows[0] = state
    return rows


def _lstm_derivatives(of_gates: Tensor, gates: Tensor, cells: Tensor, news: Tensor, tanhs: Tensor) -> Tensor:
    """Multiply derivatives of sigmoids, in place, to those of a cell and of the output; return d output / d cell."""
    i, _, _, o = gates.chunk(4, 2)
    of_i, of_f, of_n, of_o = of_gates.chunk(4, 2)
    of_i.mul_(news)
    of_f.mul_(cells)
    torch.addcmul(i, i, torch.mul(news, news, out=of_n), value=-1, out=of_n)
    of_o.mul_(tanhs)
    return torch.addcmul(o, o, tanhs.square(), value=-1)


class _GRU(torch.autograd.Function):
    """The recurrence of a GRU, which returns hidden and r. The backward pass is (4.8) and (4.9).

    Computes: h = n + z (h - n), (r, z) = sigmoid(pre + s), n = tanh(pre + r s), s = W_hh h + b_hh, see (4.7).
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weight_hh: EachWeight, bias_hh: Tensor, h: Tensor) -> Any:
        hidden, gates = _with_first(h, len(pre)), pre.new_empty(pre.shape)  # r, z, and the part s of n
        news, width = torch.empty_like(hidden[1:]), h.shape[1]
        for t in range(len(pre)):
            weight_hh.apply(hidden[t], bias_hh, out=gates[t])
            gates[t, :, : 2 * width].add_(pre[t, :, : 2 * width]).sigmoid_()
            r, z, part = gates[t].chunk(3, 1)
            torch.addcmul(pre[t, :, 2 * width :], r, part, out=news[t]).tanh_()
            torch.sub(hidden[t], news[t], out=hidden[t + 1]).mul_(z).add_(news[t])
        ctx.weight_hh = weight_hh
        ctx.save_for_backward(hidden, gates, news)
        resets = gates[:, :, :width].detach()
        ctx.mark_non_differentiable(resets)
        return hidden, resets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor, *unused: Any) -> Grads:
        weight_hh, (hidden, gates, news) = cast("EachWeight", ctx.weight_hh), ctx.saved_tensors
        (r, z, part), width = gates.chunk(3, 2), news.shape[2]
        grad_pre = torch.addcmul(gates, gates, gates, value=-1)
        of_r, of_z, of_n = grad_pre.chunk(3, 2)
        torch.mul(1 - z, 1 - news.square(), out=of_n)
        of_r.mul_(part).mul_(of_n)
        of_z.mul_(hidden[:-1] - news)
        of_gates, later = grad_pre.view(*gates.shape[:2], 3, width), torch.empty_like(gates[0])
        grad_h, carried, kept = torch.empty_like(news[0]), torch.zeros_like(news[0]), torch.empty_like(news[0])
        for t in reversed(range(len(gates))):
            torch.add(grad_hidden[t + 1], carried, out=grad_h)
            of_gates[t].mul_(grad_h.unsqueeze(1))
            later.copy_(grad_pre[t])[:, 2 * width :].mul_(r[t])
            weight_hh.pull(later, torch.mul(grad_h, z[t], out=kept), out=carried)
        return grad_pre, None, None, carried + grad_hidden[0]


class _RNN(torch.autograd.Function):
    """The recurrence of a plain RNN, h = tanh or relu of (pre + W_hh h), which returns hidden. Backward: (4.1)."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weight_hh: EachWeight, h: Tensor, relu: bool) -> Tensor:
        hidden, activate_ = _with_first(h, len(pre)), torch.relu_ if relu else torch.tanh_
        for t in range(len(pre)):
            activate_(weight_hh.apply(hidden[t], pre[t], out=hidden[t + 1]))
        ctx.save_for_backward(hidden)
        ctx.weight_hh, ctx.relu = weight_hh, relu
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor) -> Grads:
        weight_hh, (hidden,) = cast("EachWeight", ctx.weight_hh), ctx.saved_tensors
        grad_pre = (hidden[1:] > 0).to(hidden.dtype) if ctx.relu else 1 - hidden[1:].square()
        later, grad_h = torch.zeros_like(hidden[0]), torch.empty_like(hidden[0])
        for t in reversed(range(len(grad_pre))):
            later = grad_pre[t].mul_(weight_hh.pull(later, grad_hidden[t + 1], out=grad_h))
        weight_hh.pull(later, grad_hidden[0], out=grad_h)
        return grad_pre, None, grad_h, None
