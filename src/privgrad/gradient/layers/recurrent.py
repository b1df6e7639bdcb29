# pyright: reportIncompatibleMethodOverride=false
# In torch's types, an autograd Function's methods accept any arguments.
"""A forward of nn.LSTM, nn.GRU and nn.RNN that computes the same and exposes the gradients of the gates.

The per-example gradients of the weights follow from the gradients of the pre-activations, which torch's fused kernels
hide. Here each layer and direction has two parts. The first is one matrix product over all time, whose output goes
through the tap. The second is an autograd Function with a loop of few operations per time step, as fast on CPU as
torch's own. Its backward pass computes all that does not depend on the incoming gradient before its loop, for all time
at once. Parameters enter detached: their gradients come from the factors of the taps alone. docs/mathematics.md (4.1)
to (4.9) derive the gradients; docstrings and comments below cite these by number.

`engines.capture` puts `recurrent_forward` in place of the module's forward. `engines.passes` calls the functions
`of_gates` and `of_projection` of the taps. torch calls `forward` and `backward` of the autograd Functions. The privacy
guarantee of the fast engine rests on this file: no example's output or factor may depend on another example.

Shape suffixes: T time, B examples, I input, H hidden, P projected hidden (H without projection), G gates * H. The
tensors `hidden` and `cells` have T + 1 rows, the initial state first. The reverse direction, including its taps, runs
on flipped copies.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from privgrad.errors import UnsupportedModuleError, expected
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.layers.base import (
    Tap,
    add_to,
    of_linear_map,
    of_linear_maps,
    register_forward,
    require_unwritten,
    tapped,
    version_of,
)
from privgrad.gradient.layers.displaced import EachWeight, moved_linear, values_of

State = Tensor | tuple[Tensor, Tensor]
Grads = tuple[Tensor | None, ...]


@register_forward(nn.LSTM, nn.GRU, nn.RNN)
def recurrent_forward(
    module: nn.LSTM | nn.GRU | nn.RNN,
    tap: Tap,
    inputs: Tensor,
    hx: State | None = None,
    *,
    displacements: Displacements | None = None,
) -> tuple[Tensor, State]:
    """Compute module(inputs, hx) with taps at the pre-activations.

    Computes: the module's own recurrence in the dtype of its parameters, with or without autocast (under autocast
    torch uses a narrower dtype).

    Args:
        module: the recurrent layer, with any of its options.
        tap: (tensor, factors) -> the tensor to use from then on. factors(gradient of the tensor), once the backward
            pass has run, returns factors by parameter.
        inputs: shape (B, T, I), or (T, B, I) without batch_first.
        hx: initial state as torch takes it, shape (layers * directions, B, P), with cells for an LSTM; None is zero.
        displacements: of each example's parameters; None if they do not move.
    Returns:
        The outputs and the last state (for an LSTM a pair), as torch returns them.
    Raises:
        UnsupportedModuleError: the inputs have no batch dimension.
        RuntimeError: hx has a wrong shape, or the gradient is differentiated again.
    Privacy:
        NOT private. Each example's gradients depend on that example, the weights and its own dropout draws alone.
    """
    if inputs.dim() != 3:
        got, remedy = f"a tensor of shape {tuple(inputs.shape)}", "give a batch, of size 1 for one sequence"
        name = type(module).__name__
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


def _direction(
    module: nn.RNNBase,
    suffix: str,
    tap: Tap,
    displacements: Displacements | None,
    inputs: Tensor,
    hidden_BP: Tensor,
    cell_BH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one layer in one direction.

    Returns:
        The outputs (T, B, P), the last hidden state (B, P), and the last cell (B, H), which only an LSTM changes.
    """
    reverse = suffix.endswith("_reverse")
    inputs = inputs.flip(0) if reverse else inputs
    version = version_of(inputs)

    def parameter(name: str) -> Tensor:
        return cast("Tensor", getattr(module, name + suffix))

    def of_gates(grad_TBG: Tensor) -> dict[Tensor, Factor]:
        require_unwritten(type(module).__name__, inputs, version)
        inputs_BTI, before_BTP = inputs.detach().transpose(0, 1), before_TBP.transpose(0, 1)
        b_BTG = grad_TBG.transpose(0, 1)
        if not isinstance(module, nn.GRU):
            maps = [(own_ih, own_bias_ih, inputs_BTI), (own_hh, own_bias_hh, before_BTP)]  # (4.2)
            return of_linear_maps(maps, b_BTG)
        # (4.9): n = tanh(input term + r * hidden term), so their gradients differ
        later_BTG = grad_TBG.clone().transpose(0, 1)
        later_BTG[:, :, 2 * module.hidden_size :] *= extra_TBH.transpose(0, 1)
        found = of_linear_map(own_ih, own_bias_ih, inputs_BTI, b_BTG)
        return add_to(found, of_linear_map(own_hh, own_bias_hh, before_BTP, later_BTG))

    def of_projection(grad_TBP: Tensor) -> dict[Tensor, Factor]:  # (4.6)
        return of_linear_map(parameter("weight_hr"), None, extra_TBH.transpose(0, 1), grad_TBP.transpose(0, 1))

    own_ih, own_hh = parameter("weight_ih"), parameter("weight_hh")
    own_bias_ih, own_bias_hh = (parameter("bias_ih"), parameter("bias_hh")) if module.bias else (None, None)
    weight_hh, zero, extra_TBH = EachWeight.of(own_hh, displacements), hidden_BP.new_zeros(()), cell_BH
    biases = (own_bias_ih, own_bias_hh)
    bias_ih, bias_hh = (None if b is None else values_of(b, displacements, len(hidden_BP)) for b in biases)
    if bias_ih is not None and bias_hh is not None and not isinstance(module, nn.GRU):
        bias_ih = bias_ih + bias_hh
    pre_TBG = tapped(tap, moved_linear(inputs, own_ih, bias_ih, displacements), of_gates)
    if isinstance(module, nn.LSTM):
        weight_hr = nothing_TBP = None
        if module.proj_size:  # zeros that are added to each projected state, since their gradient is the state's
            weight_hr = EachWeight.of(parameter("weight_hr"), displacements)
            nothing_TBP = tapped(tap, zero.expand(len(inputs), *hidden_BP.shape), of_projection)
        arguments = (pre_TBG, weight_hh, hidden_BP, cell_BH, weight_hr, nothing_TBP)
        hidden, cell_BH, extra_TBH = cast("Any", _LSTM).apply(*arguments)
    elif isinstance(module, nn.GRU):
        hidden, extra_TBH = cast("Any", _GRU).apply(pre_TBG, weight_hh, zero if bias_hh is None else bias_hh, hidden_BP)
    else:
        hidden = cast("Any", _RNN).apply(pre_TBG, weight_hh, hidden_BP, module.mode == "RNN_RELU")
    before_TBP = hidden.detach()[:-1]
    return hidden[1:].flip(0) if reverse else hidden[1:], hidden[-1], cell_BH


class _LSTM(torch.autograd.Function):
    """The recurrence of an LSTM.

    Computes: c = f c + i n, h = o tanh(c), (i, f, n, o) = gates(pre + W_hh h), see (4.3). With a projection,
    h = W_hr o tanh(c) + nothing, where `nothing` is zero. The backward pass is (4.4) and (4.5).
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weight_hh: EachWeight, h: Tensor, c: Tensor, *projection: Any) -> Any:
        weight_hr, nothing = cast("tuple[EachWeight | None, Tensor]", projection)
        # Row 0 is the initial state; the loop overwrites the other rows.
        hidden, cells = h.repeat(len(pre) + 1, 1, 1), c.repeat(len(pre) + 1, 1, 1)
        news, tanhs, gates = torch.empty_like(cells[1:]), torch.empty_like(cells[1:]), pre.new_empty(pre.shape)
        unprojected = torch.empty_like(news) if weight_hr is not None else hidden[1:]
        for t in range(len(pre)):
            weight_hh.apply(hidden[t], pre[t], out=gates[t])
            i, f, n, o = gates[t].chunk(4, 1)
            news[t].copy_(n).tanh_()  # a copy: many times faster than on n, which is strided
            gates[t].sigmoid_()
            torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, news[t])
            torch.mul(o, torch.tanh(cells[t + 1], out=tanhs[t]), out=unprojected[t])
            if weight_hr is not None:
                weight_hr.apply(unprojected[t], nothing[t], out=hidden[t + 1])
        ctx.weights = weight_hh, weight_hr
        ctx.save_for_backward(hidden, cells, gates, news, tanhs)
        if weight_hr is not None:
            ctx.mark_non_differentiable(unprojected)
        return hidden, cells[-1].clone(), unprojected if weight_hr is not None else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor, grad_c: Tensor, *unused: Any) -> Grads:
        (weight_hh, weight_hr), (_, cells, gates, news, tanhs) = ctx.weights, ctx.saved_tensors
        i, f, _, o = gates.chunk(4, 2)
        grad_pre = torch.addcmul(gates, gates, gates, value=-1)  # the sigmoid's derivative s - s^2
        of_i, of_f, of_n, of_o = grad_pre.chunk(4, 2)
        of_i.mul_(news)
        of_f.mul_(cells[:-1])
        torch.addcmul(i, i, torch.mul(news, news, out=of_n), value=-1, out=of_n)
        of_o.mul_(tanhs)
        of_c = torch.addcmul(o, o, tanhs.square(), value=-1)
        of_ifn = grad_pre.view(*gates.shape[:2], 4, news.shape[2])[:, :, :3]
        grad_nothing = torch.empty_like(grad_hidden[1:]) if weight_hr is not None else None
        later, grad_h, grad_c = torch.zeros_like(gates[0]), torch.empty_like(grad_hidden[0]), grad_c.clone()
        no_grad = gates.new_zeros(())
        for t in reversed(range(len(gates))):
            grad_m = weight_hh.pull(later, grad_hidden[t + 1], out=grad_h)
            if grad_nothing is not None and weight_hr is not None:
                grad_m = weight_hr.pull(grad_nothing[t].copy_(grad_h), no_grad, out=torch.empty_like(news[0]))
            grad_c.addcmul_(grad_m, of_c[t])
            of_ifn[t].mul_(grad_c.unsqueeze(1))
            of_o[t].mul_(grad_m)
            grad_c.mul_(f[t])
            later = grad_pre[t]
        weight_hh.pull(later, grad_hidden[0], out=grad_h)
        return grad_pre, None, grad_h, grad_c, None, grad_nothing


class _GRU(torch.autograd.Function):
    """The recurrence of a GRU, which returns hidden and r.

    Computes: h = n + z (h - n), (r, z) = sigmoid(pre + s), n = tanh(pre + r s), s = W_hh h + b_hh, see (4.7). The
    backward pass is (4.8) and (4.9).
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, weight_hh: EachWeight, bias_hh: Tensor, h: Tensor) -> Any:
        hidden, gates = h.repeat(len(pre) + 1, 1, 1), pre.new_empty(pre.shape)  # r, z, and the part s of n
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
        hidden, activate_ = h.repeat(len(pre) + 1, 1, 1), torch.relu_ if relu else torch.tanh_
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
