"""A few examples for checks of model and loss, and what these compute with them."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from privgrad.errors import expected
from privgrad.gradient.functional import BoundLoss, Model, losses_on_copies, structure_of, trainable
from privgrad.processes import Gathered
from privgrad.types import Batch, LossFunction, count_examples, map_examples

PROBED = 3  # number of examples on which a model is tried
FOUR = 4  # where losses are compared at one size: more than PROBED

COLUMNS = 16  # most numbers per example of a tensor in which rare values are looked for
_VALUES = 32  # most values of a column among which some may be rare
_HALF = frozenset({torch.float16, torch.bfloat16})

_foreach_norm: Any = torch._foreach_norm  # pyright: ignore
_SECRET = int.from_bytes(os.urandom(7))


def secret_seed(salt: int = 0) -> int:
    """Return a seed for a check, another one in each process, so that the code does not say what passes the check."""
    return _SECRET + salt


def few_of(examples: Any, *, salt: int = 0, fill: bool = True, novel: Sequence[int] = ()) -> Any:
    """Return PROBED examples: the first, some at random indices, and one with a rare value, or else the last.

    The last then often differs in its label from the first, so that their losses show weights of classes. One of the
    `novel` rows is among them if possible. `fill` adds examples of zeros if there are too few.
    """
    size = count_examples(examples)
    if size > PROBED:
        last = next((row for row in rare_rows(examples) if row > 0), size - 1)
        between = cast("list[int]", (1 + places_of(size - 2, PROBED - 2, salt)).tolist())
        between[:1] = [row for row in novel if row not in (0, last)][:1] or between[:1]
        return rows_of(examples, [0, *(size - 1 if row == last else row for row in between), last])
    missing = PROBED - size if fill else 0

    def filled(leaf: Tensor) -> Tensor:
        # A model may not take 0 as a length, or as a number of nodes.
        is_count = leaf.dim() == 1 and not leaf.is_floating_point() and size > 0
        return torch.cat([leaf, leaf[:1].expand(missing) if is_count else leaf.new_zeros(missing, *leaf.shape[1:])])

    return map_examples(filled, examples)


def four_of(few: Any) -> Any:
    """Return FOUR examples: those given, and copies of one between the first and the last, or examples of zeros."""
    few = few_of(few, fill=count_examples(few) == 1)
    size = count_examples(few)
    return rows_of(few, [*range(size - 1), *[size // 2] * (FOUR - size), size - 1])


def leading_of(examples: Any, most: int, novel: Sequence[int] = ()) -> Any:
    """Return the examples of `leading_rows`."""
    return rows_of(examples, leading_rows(examples, most, novel))


def leading_rows(examples: Any, most: int, novel: Sequence[int] = ()) -> list[int]:
    """Return at most `most` of the first rows; one of each rare value comes before them, the `novel` rows last."""
    # So the first half holds rare values, up to half of its examples, and most of the second half lacks them.
    size = min(count_examples(examples), most)
    rare, last = rare_rows(examples)[: (size + 1) // 4], list(novel)[: size // 2]
    rows = [row for row in (*rare, *(row for row in range(size) if row not in rare)) if row not in last]
    return [*rows[: size - len(last)], *last]


def rare_rows(examples: Any) -> list[int]:
    """Return the first row of each value of a label but the most frequent, and of missing numbers, the rarest first.

    A loss with weights of classes may mix the examples of a rare class only, so the checks need one of them. Labels are
    the columns of tensors of shape (n,) or (n, ...) with at most COLUMNS columns, which hold integers of any dtype. A
    column with more than _VALUES values, or with more than n / 2, has no rare ones. NOT private: the rows may decide
    only which examples a check compares.
    """
    size, found = count_examples(examples), list[tuple[int, int]]()
    for leaf in tree_leaves(examples):
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_complex():
            continue
        if not 0 < leaf.numel() <= COLUMNS * size:
            continue
        columns = leaf.detach().reshape(size, leaf.numel() // size).cpu()
        if columns.is_floating_point() and not columns.double().equal(columns.double().round()):
            lacking = (~columns.isfinite()).any(1).nonzero().flatten()
            found += [(len(lacking), int(lacking[0]))] if 0 < len(lacking) < size else []
            continue
        numbers = columns.long().numpy()
        order = numbers.argsort(0, kind="stable")
        ordered = np.take_along_axis(numbers, order, 0)
        begins = np.diff(ordered, axis=0, prepend=ordered[:1] - 1) != 0  # of a value; its first row stands there
        count = begins.sum(0)
        for column in ((count > 1) & (count <= min(_VALUES, size // 2))).nonzero()[0].tolist():
            places = begins[:, column].nonzero()[0]
            counts = np.diff(places, append=size)
            pairs = zip(counts.tolist(), order[places, column].tolist(), strict=True)
            most = int(counts.argmax())
            found += [pair for place, pair in enumerate(pairs) if place != most]
    return list(dict.fromkeys(row for _, row in sorted(found)))


def rows_of(examples: Any, rows: list[int]) -> Any:
    """Return copies of some rows of the examples, in the given order."""
    index = torch.tensor(rows)
    return map_examples(lambda leaf: leaf[index.to(leaf.device)], examples)


def places_of(size: int, chosen: int, salt: int) -> Tensor:
    """Return `chosen` distinct random indices below `size`, sorted; torch's seed and the salt determine them."""
    generator = torch.Generator().manual_seed((torch.initial_seed() + salt) % 2**63)
    return torch.randperm(size, generator=generator)[:chosen].sort().values


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the norm of all entries of each tensor, computed in float32 or wider, by one read of the device."""
    if not tensors:
        return []
    wide = [x if x.itemsize >= 4 else x.float() for x in tensors]
    norms = cast("list[Tensor]", _foreach_norm(wide))
    return cast("list[float]", torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist())


def doubled(leaf: Tensor) -> Tensor:
    """Return a floating-point tensor in double precision, and any other tensor unchanged."""
    return leaf.double() if leaf.is_floating_point() else leaf


class InDouble(TorchFunctionMode):
    """A mode in which casts to single precision give double precision, for a model in double precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(torch.dtype, lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*given[0], **given[1])


def in_float32_too(compare: Callable[..., None]) -> Callable[..., None]:
    """Return a comparison of losses that runs again in float32 if it meets half precision, which hides differences."""

    @wraps(compare)
    def compared(model: nn.Module, loss_fn: LossFunction, examples: Any, *args: Any, **seen: Any) -> None:
        with Precision() as met:
            compare(model, loss_fn, examples, *args, **seen)
        if not met.half or any(isinstance(parameter, Gathered) for parameter in model.parameters()):
            return
        wide = Precision(widened_on=next(model.parameters()).device.type)

        def widened(model: nn.Module, examples: Any, *, graph: bool) -> Tensor:
            named = (*model.named_parameters(), *model.named_buffers())
            own = {f"model.{name}": x.float() for name, x in named if _is_half(x) and not _is_frozen(x)}
            examples = map_examples(lambda leaf: leaf.float() if _is_half(leaf) else leaf, examples)
            with wide, torch.set_grad_enabled(graph):
                return functional_call(BoundLoss(model, loss_fn), own, (examples,))

        for graph in (False, True):  # a graph would keep all frozen weights in float32; few losses need one
            loss = partial(widened, graph=graph)
            try:
                losses_on_copies(model, loss, examples)
            except Exception:  # for instance a loss that accepts half precision only
                continue
            if not wide.half:  # a loss that converts to half precision by itself is compared as it is only
                compare(model, loss, examples, *args)
            return

    return compared


class Precision(TorchFunctionMode):
    """A mode that notices half precision, and can compute in float32 instead; torch calls it for each function."""

    def __init__(self, *, widened_on: str | None = None) -> None:
        super().__init__()
        self._device = widened_on  # a type of device: there autocast is off, and float32 replaces given dtypes
        self.half = False  # whether some function returned a tensor in half precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device is None:
            result = func(*args, **(kwargs or {}))
        else:
            inputs = tree_map_only((torch.dtype, Tensor), _widened, (args, kwargs or {}))
            func = Tensor.float if func in (Tensor.half, Tensor.bfloat16) else func
            with torch.autocast(self._device, enabled=False):
                result = func(*inputs[0], **inputs[1])
        if not self.half:  # one tensor is the usual case, and faster to look at
            found = (result,) if type(result) is Tensor else tree_leaves(result)
            self.half = any(isinstance(x, Tensor) and _is_half(x) for x in found)
        return result


def _is_half(x: Tensor) -> bool:
    return x.is_floating_point() and x.itemsize < 4


def _is_frozen(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) and not x.requires_grad


def _widened(x: Any) -> Any:
    """Return float32 for a dtype of half precision, and a frozen weight in it, for one function; others unchanged."""
    if isinstance(x, torch.dtype):
        return torch.float32 if x in _HALF else x
    return x.float() if _is_half(x) and _is_frozen(x) else x


def freeze_unused(model: nn.Module, loss_fn: LossFunction, public_batch: Any) -> list[str]:
    """Set requires_grad to False for each parameter that the losses of some public examples do not reach.

    Args:
        model: the module, in the mode that it will be trained in.
        loss_fn: (model, examples) -> losses, shape (B,).
        public_batch: public examples, as loss_fn takes them, with leading dimension B >= 1. They should use all that
            the training will use: an expert to which none of them is routed is frozen, too.
    Returns:
        The names of the parameters that were frozen.
    Raises:
        PrivacyError: public_batch is a batch of a plan or holds no examples, the losses do not have shape (B,), or they
            reach no parameter.
    Privacy:
        It uses the model and public examples only.
    """
    unused = unused_parameters("freeze_unused", model, loss_fn, public_batch)
    own = trainable(model)
    for name in unused:
        own[name].requires_grad_(False)
    return unused


def unused_parameters(function: str, model: nn.Module, loss_fn: LossFunction, public_batch: Any) -> list[str]:
    """Return the names of the trainable parameters that the losses do not reach; `function` is named in errors."""
    if isinstance(public_batch, Batch):  # what is used, and at what cost, must not depend on private examples
        raise expected(function, "public_batch", "to be public", "a batch of a privacy plan")
    if (size := count_examples(public_batch)) == 0:
        raise expected(function, "public_batch", "to hold examples", size)
    own = {name: p.detach().requires_grad_() for name, p in trainable(model).items()}
    with torch.enable_grad():
        return losses_on_copies(model, loss_fn, public_batch, partial(unreached, parameters=own), own)


def unreached(losses: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters to which the losses give no gradient; refuse losses that have none."""
    if not losses.requires_grad:
        remedy = "compute the loss from the model's output, without no_grad or detach"
        if torch.is_inference_mode_enabled():
            remedy = "call private_grad outside of torch.inference_mode"
        raise expected("loss_fn", "losses", "to have a gradient", "requires_grad=False", remedy)
    if any(isinstance(leaf, Gathered) for leaf in parameters.values()):
        reached = set[str]()
        hand_over(losses, parameters, lambda name, _: reached.add(name))
        return [name for name in parameters if name not in reached]
    # torch types the result as if allow_unused did not exist.
    grads: tuple[Any, ...] = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    return [name for name, grad in zip(parameters, grads, strict=True) if grad is None]


def leaf_of(parameter: nn.Parameter, *, copied: bool) -> Tensor:
    """Return a leaf in place of a parameter; a sharded one is its own, because its values come and go."""
    if isinstance(parameter, Gathered):
        return parameter
    return (parameter.detach().clone() if copied else parameter.detach()).requires_grad_()


def each_gradient(
    model: Model, loss_fn: LossFunction, examples: Any, each: Callable[[str, Tensor], None], *, copied: bool = True
) -> None:
    """Call `each` with the gradient of the summed losses by each parameter that they reach, one after the other."""
    leaves = {name: leaf_of(p, copied=copied) for name, p in structure_of(model).trained.items()}
    reached = partial(hand_over, leaves=leaves, each=each)
    with torch.enable_grad():
        losses_on_copies(model, loss_fn, examples, reached, leaves, seed=0, copied=copied)


def hand_over(losses: Tensor, leaves: Mapping[str, Tensor], each: Callable[[str, Tensor], None]) -> None:
    """Call `each` with the gradient of the summed losses by each leaf, as soon as it is known, and forget it."""

    def take(name: str, leaf: Tensor) -> None:
        grad, leaf.grad = cast(Tensor, leaf.grad), None
        each(name, grad.to_dense())

    if not losses.requires_grad:  # no example reaches a trainable parameter, such as that of an expert
        return
    hooks: list[Any] = [leaf.register_post_accumulate_grad_hook(partial(take, name)) for name, leaf in leaves.items()]
    try:
        losses.sum().backward(inputs=[*leaves.values()])
    finally:
        for hook in hooks:
            hook.remove()
