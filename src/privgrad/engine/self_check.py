"""Compare the fast engine's gradients of a few examples with those of each example alone: a check, not a proof."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privgrad.engine.passes import Found, Passes, Point
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import gradients, seeded, trainable
from privgrad.gradient.novelty import CheckSchedule
from privgrad.gradient.probes import norms_of, places_of, rare_rows
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, refused, written_to
from privgrad.types import count_examples, map_examples, part_of

_AT_ONCE = 2**22  # numbers of written-out gradients that a comparison holds
_MEASURED = 16  # number of examples whose norms a check measures


def require_single(passes: Passes, examples: Any, point: Point, found: Found, rows: Sequence[int]) -> None:
    """Raise UnsupportedModuleError if rows of the factors differ from the gradients of these examples alone."""
    factors, moves = found
    model, loss_fn, tolerance = passes.model, passes.loss_fn, passes.tolerance
    parameters, differences, largest = trainable(model), list[tuple[str, float, float]](), 0.0
    for index in rows:
        row = slice(index, index + 1)
        along = {} if moves is None else {n: move[row].dense()[0] for n, move in moves.of(parameters).items()}
        single = gradients(model, loss_fn, part_of(examples, row), along=along, exact=point.exact, copied=False)
        measured = list(_compared(single, factors, row))
        whole = math.hypot(*(norm for _, norm, _ in measured))
        differences += [(name, change, tolerance * (norm + 0.1 * whole)) for name, norm, change in measured]
        largest = max(largest, whole if math.isfinite(whole) else 0.0)
    # Terms that cancel leave rounding errors where the gradient is zero; in double precision these are small.
    rounding = 64 * torch.finfo(torch.float64).eps * largest
    for name, change, allowed in differences:
        # The comparison is false if values are not finite: such an example contributes zero anyway.
        if change > allowed + rounding:
            remedy = (  # the losses are apart, so each example alone gives the right gradients
                f"{REMEDY}; or keep examples in dimension 0 and in one order in every layer (two views of each as "
                "torch.stack((a, b), 1).flatten(0, 1)), and correct a rule that you registered"
            )
            condition, got = "to match the gradients of single examples", f"a difference above {tolerance:g}"
            suspect = passes.shared()  # its place in the model can be the cause
            raise refused(f"the gradient of {name!r}", condition, f"{got}, relative", remedy, unit=suspect)


def _compared(
    wanted: Mapping[str, Tensor] | Mapping[str, Factor], found: Mapping[str, Factor], rows: slice | Tensor
) -> Iterator[tuple[str, float, float]]:
    """Yield the names of `wanted`, the norm of these rows, and of their change; about _AT_ONCE numbers by one read."""
    names, values, size = list[str](), list[Tensor](), 0
    for place, (name, value) in enumerate(wanted.items(), 1):
        own = value[rows].dense() if isinstance(value, Factor) else value
        names.append(name)
        values += (own, found[name][rows].dense() - own if name in found else own)
        size += own.numel()
        if size > _AT_ONCE or place == len(wanted):
            norms = norms_of(values)
            yield from zip(names, norms[::2], norms[1::2], strict=True)
            names, values, size = list[str](), list[Tensor](), 0


def rows_to_check(found: Mapping[str, Factor], examples: Any, schedule: CheckSchedule) -> list[int]:
    """Return a row with something new, and the last one, which it may change; else one with a rare value, or any."""
    # Unless the check is brief, also the first row, the last one, and the one of the smallest norm of a sample: a
    # gradient with a wrongly small norm would stay unclipped.
    size, salt = count_examples(examples), schedule.calls
    between = 1 + int(places_of(size - 2, 1, salt)) if size > 2 else 0
    row = next(iter((*schedule.novel, *rare_rows(examples))), between)
    if schedule.depth == 0 or not found:  # the latter: no example reaches a trainable parameter
        return sorted({row, size - 1} if schedule.novel else {row})
    drawn = places_of(size, min(size, _MEASURED), salt)
    norms = torch.stack([factor[drawn].norms() for factor in found.values()])
    least = drawn[int(cast(Tensor, torch.linalg.vector_norm(norms, dim=0)).argmin())]
    return sorted({0, row, size - 1, int(least)})


def require_apart_from_infinite(passes: Passes, few: Any, seed: int) -> None:
    """Raise UnsupportedModuleError if an example that is not finite changes the gradients of the others."""
    # Zero times such a number is not a number, so it can reach gradients that are right for all finite examples.
    leaves = [leaf for leaf in tree_leaves(few) if isinstance(leaf, Tensor)]
    # On an accelerator, an assertion that fails ends the process.
    if not any(leaf.is_floating_point() for leaf in leaves) or any(leaf.device.type != "cpu" for leaf in leaves):
        return
    calls, tolerance = passes.layouts.current.calls, passes.tolerance
    wanted = dict[str, Factor]()
    for number in (0.0, math.inf, math.nan):
        try:
            found = _factors_of(passes, map_examples(partial(_with_second, number), few), seed)
            suspect = passes.shared()  # rows that were chosen from the examples may pass for a value of all
        except Exception:  # the model does not take such an example
            continue
        finally:
            passes.layouts.current.calls = calls
        wanted = wanted or found
        both = {name: factor for name, factor in wanted.items() if name in found}
        for name, norm, change in _compared(both, found, torch.tensor([0, 2])):
            if math.isfinite(norm) and not change <= tolerance * norm:
                got = f"a change when one of them is {number}"
                remedy = "choose rows by indexing or torch.where, and not by products with zeros, such as one-hot rows"
                raise refused(f"the gradient of {name!r}", "not to depend on other examples", got, remedy, unit=suspect)


def _with_second(number: float, leaf: Tensor) -> Tensor:
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


def require_same_draws(passes: Passes, few: Any, seed: int) -> None:
    """Raise UnsupportedModuleError if BAM's second pass, with zero displacements, draws other numbers."""
    with seeded(seed):
        first, _ = passes.compute(few, Point())
    with seeded(seed):
        second, _ = passes.compute(few, Point(radius=0.0))
    compared = list(_compared(first, second, slice(None)))
    scale = passes.tolerance * sum(norm for _, norm, _ in compared)
    for name, _, change in compared:
        if name not in second or change > scale:
            got = "no gradient in the second pass"
            if name in second:
                got = f"gradients with a difference above {passes.tolerance:g}, relative"
            remedy = f"use single layers with nn.Dropout between them, or {REMEDY}"
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
        changed = torch.stack([(_bits(x) != _bits(held)).any().to(before[0][1].device) for _, x, held in before])
        written = [before[place][0] for place in cast("list[int]", changed.nonzero().flatten().tolist())]
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
