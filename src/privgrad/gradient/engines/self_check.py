"""Compare the fast engine's gradients of a few examples with the gradients of each example alone.

`factored.Factored` calls these functions when it learns a model, and on some rows of the 1st, 2nd, 4th, 8th ... batch.
The privacy guarantee of the fast engine rests on these comparisons: they would detect a model or a rule that mixes
examples in the compared rows. They do not prove that it never happens.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.engines.passes import Passes, Point
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, refused, written_to
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.module_state import named_parameters, restore, seeded, trainable
from privgrad.gradient.own_examples import version
from privgrad.gradient.probes import gradients, norm_of, places_of, rare_rows
from privgrad.types import LossFunction, count_examples, map_examples, part_of

_MEASURED = 16  # number of examples whose norms a check measures
_COMPARED = 2**17  # the largest size of a frozen parameter that is compared at each step


def require_single(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    found: Mapping[str, Factor],
    tolerance: float,
    moves: Displacements | None = None,
    *,
    rows: Sequence[int],
    exact: bool = False,
    suspect: str | None = None,
) -> None:
    """Raise UnsupportedModuleError if rows of the factors differ from the gradients of these examples alone.

    If the forward pass writes to parameters, it writes to the model's own. Callers therefore use `restored`.

    Args:
        model: the module.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: the examples of the factors, with leading dimension B.
        found: the factors to check, by parameter name.
        tolerance: the largest accepted difference, relative to the norm of the parameter's gradient plus a tenth of
            the norm over all parameters.
        moves: displacements of each example's parameters; None if they are not displaced.
        rows: the rows to check.
        exact: whether the gradients include the Hessian's product with the moves, instead of being displaced.
        suspect: the unit to blame for a difference, if its place in the model can be the cause.
    Raises:
        UnsupportedModuleError: some gradient differs by more than the tolerance; the message names the parameter.
    """
    parameters = trainable(model)
    for index in rows:
        row = slice(index, index + 1)
        along = {} if moves is None else {n: move[row].dense()[0] for n, move in moves.of(parameters).items()}
        alone = part_of(examples, row)
        single = gradients(model, loss_fn, alone, along=along, exact=exact, copied=False)
        whole = sum(norm_of(reference) ** 2 for reference in single.values()) ** 0.5
        for name, reference in single.items():
            value = found[name][row].dense()[0] if name in found else torch.zeros_like(reference)
            # The comparison is false if values are not finite: such an example contributes zero anyway.
            if norm_of(value - reference) > tolerance * (norm_of(reference) + 0.1 * whole):
                remedy = (
                    "keep examples apart, in dimension 0 (batch_first=True) and in one order in every layer; if you "
                    "registered a rule for this layer or the next, correct it; if the model changes the order of the "
                    f"rows, such as texts that are sorted by length, {REMEDY}; if loss_fn draws random numbers, "
                    "augment by augmentation.multiplicity with views >= 2, or in __getitem__, from that item alone"
                )
                condition, got = "to match the gradients of single examples", f"a difference above {tolerance:g}"
                raise refused(f"the gradient of {name!r}", condition, f"{got}, relative", remedy, unit=suspect)


def rows_to_check(found: Mapping[str, Factor], examples: Any, salt: int) -> list[int]:
    """Return the first row, the last, a random one, one with a rare value, and that of the smallest norm of a sample.

    The smallest norm is included because a gradient with a wrongly small norm would stay unclipped.

    Args:
        found: the factors by parameter name.
        examples: the examples of the factors.
        salt: as in `places_of`.
    """
    size = count_examples(examples)
    if not found:  # no example reaches a trainable parameter
        return sorted({0, size - 1})
    drawn = places_of(size, min(size, _MEASURED), salt)
    norms = torch.stack([factor[drawn].norms() for factor in found.values()])
    least = drawn[int(cast(Tensor, torch.linalg.vector_norm(norms, dim=0)).argmin())]
    between = 1 + places_of(size - 2, 1, salt) if size > 2 else drawn[:1]
    return sorted({0, size - 1, int(least), int(between), *rare_rows(examples)[:1]})


def require_apart_in_training(passes: Passes, few: Any, tolerance: float, seed: int) -> None:
    """Raise UnsupportedModuleError if an example's gradient changes when the other examples are replaced.

    This runs in training mode, with the same random draws before and after.

    Args:
        passes: the engine's passes. Their layouts are the same afterwards.
        few: three examples.
        tolerance: the largest accepted difference, relative to the norms of all gradients of the parameter.
        seed: seed of the random draws.
    """
    calls = passes.layouts.current.calls
    for kept, (one, other) in enumerate(([[0, 1, 1], [0, 2, 2]], [[0, 1, 0], [2, 1, 2]], [[0, 0, 2], [1, 1, 2]])):
        with_one, with_other = (
            _factors_of(passes, map_examples(itemgetter(order), few), seed) for order in (one, other)
        )
        for name in with_one.keys() & with_other.keys():
            first, second = with_one[name], with_other[name]
            difference = norm_of(first[kept : kept + 1].dense() - second[kept : kept + 1].dense())
            if difference > tolerance * float(first.norms().sum() + second.norms().sum()):
                condition, remedy = (
                    "not to depend on other examples",
                    f"keep examples apart in training mode too, or {REMEDY}",
                )
                got = f"a difference above {tolerance:g}, relative"
                raise refused(f"the gradient of {name!r}", condition, got, remedy)
    passes.layouts.current.calls = calls


def require_apart_from_infinite(passes: Passes, few: Any, tolerance: float, seed: int) -> None:
    """Raise UnsupportedModuleError if an example that is not finite changes the gradients of the others.

    Zero times such a number is not a number, so it can reach gradients that are right for all finite examples. An
    accelerator is left alone: an assertion that fails there ends the process.

    Args:
        passes: the engine's passes. Their layouts are the same afterwards.
        few: three examples.
        tolerance: the largest accepted difference, relative to the norms of all gradients of the parameter.
        seed: seed of the random draws.
    """
    leaves = [leaf for leaf in tree_leaves(few) if isinstance(leaf, Tensor)]
    if not any(leaf.is_floating_point() for leaf in leaves) or any(leaf.device.type != "cpu" for leaf in leaves):
        return
    calls = passes.layouts.current.calls
    wanted = dict[str, Factor]()
    for number in (0.0, math.inf, math.nan):
        try:
            found = _factors_of(passes, map_examples(partial(_with_middle, number=number), few), seed)
            suspect = passes.shared()  # rows that were chosen from the examples may pass for a value of all
        except Exception:  # the model does not take such an example
            continue
        finally:
            passes.layouts.current.calls = calls
        wanted = wanted or found
        for name in wanted.keys() & found.keys():
            # Row by row, so that no more than one dense gradient of each kind is held.
            rows = [slice(0, 1), slice(2, 3)]
            difference = math.hypot(*(norm_of(found[name][r].dense() - wanted[name][r].dense()) for r in rows))
            most = tolerance * sum(float(wanted[name][r].norms().sum()) for r in rows)
            if math.isfinite(most) and not difference <= most:
                condition, got = "not to depend on other examples", f"a change when one of them is {number}"
                remedy = f"keep examples apart, or {REMEDY}"
                raise refused(f"the gradient of {name!r}", condition, got, remedy, unit=suspect)


def _with_middle(leaf: Tensor, *, number: float) -> Tensor:
    """Return a tensor of three examples with the second filled with a number, if it has floating-point numbers."""
    return leaf.index_fill(0, torch.tensor(1), number) if leaf.is_floating_point() else leaf


def _factors_of(passes: Passes, few: Any, seed: int) -> dict[str, Factor]:
    """Return the factors of examples, for which the calls of layers may differ from the learned ones."""
    try:
        with seeded(seed):
            return passes.compute(few, Point())[0]
    except CallSequenceChangedError:
        passes.learn(few)
        with seeded(seed):
            return passes.compute(few, Point())[0]


def require_same_draws(passes: Passes, few: Any, tolerance: float, seed: int) -> None:
    """Raise UnsupportedModuleError if the second pass, with zero displacements, differs from the first.

    Both passes start from the same random state, so a difference means that they draw different random numbers. This
    checks the formula of BAM, not the isolation of examples, so the privacy guarantee does not rest on it.
    """
    with seeded(seed):
        first, _ = passes.compute(few, Point())
    with seeded(seed):
        second, _ = passes.compute(few, Point(radius=0.0))
    scale = tolerance * sum(float(factor.norms().sum()) for factor in first.values())
    rows = [slice(index, index + 1) for index in range(count_examples(few))]
    for name, factor in first.items():
        other = second.get(name)
        changes = [math.inf] if other is None else [norm_of(other[r].dense() - factor[r].dense()) for r in rows]
        if max(changes) > scale:
            remedy = f"use single layers with nn.Dropout between them, or {REMEDY}"
            got = f"gradients with a difference above {tolerance:g}, relative"
            got = "no gradient in the second pass" if other is None else got
            raise refused(f"the random draws before {name!r}", "to be the same in both passes", got, remedy)


@contextmanager
def restored(model: nn.Module) -> Generator[None]:
    """Run a check, and put the parameters back bit by bit if it wrote to any of them, also after an exception.

    Raises:
        UnsupportedModuleError: a parameter was written to, even if autograd's version counter missed it.
    """
    before = [(name, parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    refusal: UnsupportedModuleError | None = None
    try:
        yield
    except UnsupportedModuleError as error:  # the write may be its cause
        refusal = error
    finally:
        written = [name for name, parameter, held in before if not _bits(parameter).equal(_bits(held))]
        with torch.no_grad():
            for _, parameter, held in before if written else []:
                parameter.data.copy_(held)
    if written:
        raise written_to(", ".join(written)) from refusal
    if refusal is not None:
        raise refusal


@contextmanager
def parameters_kept(model: nn.Module) -> Generator[None]:
    """Undo what a step's passes leave on parameters and buffers: gradients, and writes to what is not trained.

    `PrivateGradient` calls it around each step and around the check of the loss. loss_fn may call backward itself,
    which leaves raw gradients in `.grad`. A write by `.data` or numpy leaves no trace that autograd counts, so the
    values of frozen parameters and of buffers are compared. The passes compute with copies of the buffers, but an
    object of the user may hold a buffer itself. This holds for tensors on the CPU with up to 131,072 numbers. For other
    frozen parameters, it holds at checked steps only (`restored`). Other buffers are refused after an in-place write
    that autograd counts, but they keep the written values.

    Raises:
        UnsupportedModuleError: such a tensor was written to. A compared one has its former values again.
    """
    named, buffers = list(named_parameters(model)), list(model.named_buffers())
    grads = [(x, x.grad) for _, x in (*named, *buffers) if x.is_leaf]
    held = [(name, x, _held(x)) for name, x in named if not x.requires_grad]
    own = [(name, x, _held(x), version(x)) for name, x in buffers]
    for x, _ in grads:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in grads:
            x.grad = grad
        written = [name for name, x, copy in held if copy is not None and restore(x, copy)]
        changed = [name for name, x, copy, then in own if (version(x) != then if copy is None else restore(x, copy))]
    if written:
        raise written_to(", ".join(written))
    if changed:
        raise written_to(", ".join(changed), "buffers")


def _held(x: Tensor) -> Tensor | None:
    """Return a copy of a tensor that each step compares; None for a large one or one that is not on the CPU."""
    return x.detach().clone() if x.is_cpu and x.numel() <= _COMPARED else None


def _bits(x: Tensor) -> Tensor:
    """Return the bits of the numbers as integers, so that NaN equals itself."""
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
