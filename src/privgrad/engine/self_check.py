"""Compare the fast engine's gradients of a few examples with the gradients of each example alone.

These comparisons would detect a model or a rule that mixes examples in the compared rows. They do not prove that it
never happens.
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

from privgrad.engine.factors.displacement import Displacements
from privgrad.engine.passes import Passes, Point
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import seeded, trainable
from privgrad.gradient.probes import gradients, norm_of, places_of, rare_rows
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, refused, written_to
from privgrad.types import LossFunction, count_examples, map_examples, part_of

_MEASURED = 16  # number of examples whose norms a check measures


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

    It needs `restored` around it, since a forward pass may write to the model's own parameters.

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
                remedy = (  # the losses are apart, so each example alone gives the right gradients
                    f"{REMEDY}; or keep examples in dimension 0 and in one order in every layer (two views of each as "
                    "torch.stack((a, b), 1).flatten(0, 1)), and correct a rule that you registered"
                )
                condition, got = "to match the gradients of single examples", f"a difference above {tolerance:g}"
                raise refused(f"the gradient of {name!r}", condition, f"{got}, relative", remedy, unit=suspect)


def rows_to_check(found: Mapping[str, Factor], examples: Any, salt: int) -> list[int]:
    """Return the first row, the last, a random one, one with a rare value, and that of the smallest norm of a sample.

    The smallest norm is included because a gradient with a wrongly small norm would stay unclipped.
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

    This runs in training mode on three examples, with the same random draws before and after; `require_single` runs
    without draws. The tolerance is relative to the norms of all gradients of the parameter.
    """
    calls = passes.layouts.current.calls  # _factors_of may learn others
    for kept, (one, other) in enumerate(([[0, 1, 1], [0, 2, 2]], [[0, 1, 0], [2, 1, 2]], [[0, 0, 2], [1, 1, 2]])):
        with_one, with_other = (
            _factors_of(passes, map_examples(itemgetter(order), few), seed) for order in (one, other)
        )
        for name in with_one.keys() & with_other.keys():
            first, second = with_one[name], with_other[name]
            difference = norm_of(first[kept : kept + 1].dense() - second[kept : kept + 1].dense())
            if difference > tolerance * float(first.norms().sum() + second.norms().sum()):
                remedy = (
                    "mix no examples in training mode: augment each item in __getitem__, or by "
                    "augmentation.multiplicity; take engine='vmap' only if rows merely change places, because it "
                    "leaves mixing out"
                )
                got = f"a difference above {tolerance:g}, relative"
                raise refused(f"the gradient of {name!r}", "not to depend on other examples", got, remedy)
    passes.layouts.current.calls = calls


def require_apart_from_infinite(passes: Passes, few: Any, tolerance: float, seed: int) -> None:
    """Raise UnsupportedModuleError if an example that is not finite changes the gradients of the others.

    Zero times such a number is not a number, so it can reach gradients that are right for all finite examples. The
    arguments are as in `require_apart_in_training`.
    """
    leaves = [leaf for leaf in tree_leaves(few) if isinstance(leaf, Tensor)]
    # On an accelerator, an assertion that fails ends the process.
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
                got = f"a change when one of them is {number}"
                remedy = "choose rows by indexing or torch.where, and not by products with zeros, such as one-hot rows"
                condition = "not to depend on other examples"
                raise refused(f"the gradient of {name!r}", condition, got, remedy, unit=suspect)


def _with_middle(leaf: Tensor, *, number: float) -> Tensor:
    # Of three examples, fill the second.
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
    checks the formula of BAM, not the isolation of examples.
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
    """Run a check; if it wrote to parameters, even unseen by autograd, put these back bit by bit and raise an error."""
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


def _bits(x: Tensor) -> Tensor:
    # As integers, so that NaN equals itself.
    return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
