"""Compare the fast engine's gradients of a few examples with those of each example alone: a check, not a proof."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from privgrad.engine.layers.base import Rule, find_rule, is_built_in
from privgrad.engine.passes import Found, Passes, Point
from privgrad.errors import PrivacyError
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import Bits, Structure, gradients, seeded
from privgrad.gradient.novelty import CheckSchedule
from privgrad.gradient.probes import each_gradient, norms_of, places_of, rare_rows, rows_of
from privgrad.gradient.refusals import REMEDY, CallSequenceChangedError, refused, written_to
from privgrad.processes import Gathered
from privgrad.types import count_examples, map_examples, part_of

Measured = tuple[str, list[float], list[float]]  # a name, and by row, the norm of a gradient and of its change
_AT_ONCE = 2**22  # numbers of written-out gradients that a comparison holds
_MEASURED = 16  # number of examples whose norms a check measures

_foreach_sub_: Any = torch._foreach_sub_  # pyright: ignore


def require_single(passes: Passes, examples: Any, point: Point, found: Found, rows: Sequence[int]) -> None:
    """Raise UnsupportedModuleError if rows of the factors differ from the gradients of these examples alone."""
    factors, moves = found
    structure, loss_fn, tolerance = passes.structure, passes.loss_fn, passes.tolerance
    parameters, differences, largest = structure.trained, list[tuple[str, float, float]](), 0.0
    is_sharded = any(isinstance(p, Gathered) for p in parameters.values())
    together = 1 if is_sharded else max(1, _AT_ONCE // sum(p.numel() for p in parameters.values()))
    for some in (rows[start : start + together] for start in range(0, len(rows), together)):
        measured, singles = list[Measured](), list[dict[str, Tensor]]()
        if is_sharded:  # no gradient of a whole model is held
            compare, own = partial(_compare, measured, factors, some), part_of(examples, slice(some[0], some[0] + 1))
            each_gradient(structure, loss_fn, own, compare, copied=False)
            for name in parameters.keys() - {name for name, *_ in measured}:
                compare(name, torch.zeros_like(parameters[name]))
        for index in () if is_sharded else some:
            row = slice(index, index + 1)
            along = {} if moves is None else {n: move[row].dense()[0] for n, move in moves.of(parameters).items()}
            own = part_of(examples, row)
            singles.append(gradients(structure, loss_fn, own, along=along, exact=point.exact, copied=False))
        if singles:
            wanted = {name: torch.stack([single.pop(name) for single in singles]) for name in parameters}
            measured += _compared(wanted, factors, some)
        for place in range(len(some)):
            whole = math.hypot(*(norms[place] for _, norms, _ in measured))
            found_now = ((name, changes[place], norms[place] + 0.1 * whole) for name, norms, changes in measured)
            differences += [(name, change, tolerance * scale) for name, change, scale in found_now]
            if math.isfinite(whole):
                largest = max(largest, whole)
                continue
            row = torch.tensor(some[place : place + 1])
            if all(factor[row].norms().isfinite().all() for factor in factors.values()):  # such as a mean of the batch
                differences.append((measured[0][0], math.inf, 0.0))  # that fills in what the example lacks
    # Terms that cancel leave rounding errors where the gradient is zero; in double precision these are small.
    rounding = 64 * torch.finfo(torch.float64).eps * largest
    for name, change, allowed in differences:
        # An example that is not finite alone contributes zero, if it is not finite among the others either.
        if change > allowed + rounding or (math.isnan(change) and math.isfinite(allowed)):
            remedy = (  # the losses are apart, so each example alone gives the right gradients
                f"{REMEDY}; or keep examples in dimension 0 and in one order in every layer (two views of each as "
                "torch.stack((a, b), 1).flatten(0, 1))"
            )
            rules = {type(find_rule(module)) for _, module in structure.modules}
            if own := [rule.__name__ for rule in rules if issubclass(rule, Rule) and not is_built_in(rule)]:
                remedy = f"correct the rule that you registered, {', '.join(sorted(own))}; if it is right, {remedy}"
            condition, got = "to match the gradients of single examples", f"a difference above {tolerance:g}"
            suspect = passes.shared()  # its place in the model can be the cause
            raise refused(f"the gradient of {name!r}", condition, f"{got}, relative", remedy, unit=suspect)


def _compared(
    wanted: Mapping[str, Tensor] | Mapping[str, Factor], found: Mapping[str, Factor], rows: Sequence[int]
) -> Iterator[Measured]:
    """Yield names, the norm of each row of `wanted`, and of its change; about _AT_ONCE numbers by one read."""
    # A factor has other rows than these; a tensor has these rows only.
    index, names, own, others = torch.tensor(rows), list[str](), list[Tensor](), list[Tensor]()
    for place, (name, value) in enumerate(wanted.items(), 1):
        names.append(name)
        own.append(value[index].dense() if isinstance(value, Factor) else value)
        others.append(found[name][index].dense() if name in found else torch.zeros_like(own[-1]))
        if place == len(wanted) or sum(x.numel() for x in own) > _AT_ONCE:
            _foreach_sub_(others, own)  # in place: all are copies
            norms = iter(norms_of([row for x in (*own, *others) for row in x.unbind()]))
            sizes = [[next(norms) for _ in rows] for _ in (*own, *others)]
            yield from zip(names, sizes[: len(names)], sizes[len(names) :], strict=True)
            names, own, others = list[str](), list[Tensor](), list[Tensor]()


def _compare(
    measured: list[Measured], found: Mapping[str, Factor], rows: Sequence[int], name: str, grad: Tensor
) -> None:
    """Measure the gradient of one example by one parameter, so that it need not be kept."""
    measured += _compared({name: grad[None]}, found, rows)


def rows_to_check(found: Mapping[str, Factor], examples: Any, schedule: CheckSchedule) -> list[int]:
    """Return a row with something new, and another one, which it may change; else one with a rare value, or any."""
    # Unless the check is brief, also the first row, the last one, and the one of the smallest norm of a sample: a
    # gradient with a wrongly small norm would stay unclipped.
    size, salt = count_examples(examples), schedule.calls
    between = 1 + int(places_of(size - 2, 1, salt)) if size > 2 else 0
    row = next(iter((*schedule.novel, *rare_rows(examples))), between)
    if schedule.depth == 0 or not found:  # the latter: no example reaches a trainable parameter
        return sorted({row, size - 1 if row < size - 1 else 0} if schedule.novel else {row})
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
    calls, few, wanted = passes.layouts.current.calls, rows_of(few, [0, 1, 1, 2]), dict[str, Factor]()
    pairs = [(0.0, 1.0), (math.inf, math.nan)]
    for pair in pairs:
        alone = [(number, 0.0) for number in pair if 0.0 not in pair]  # to try if both do harm, or cannot be computed
        try:
            found = _factors_of(passes, map_examples(partial(_with_middle, pair), few), seed)
            suspect = passes.shared()  # rows that were chosen from the examples may pass for a value of all
        except Exception:  # the model does not take such examples
            pairs += alone
            continue
        finally:
            passes.layouts.current.calls = calls
        wanted = wanted or found
        both = {name: factor for name, factor in wanted.items() if name in found}
        compared = _compared(both, found, (0, count_examples(few) - 1))
        changed = (name for name, norms, changes in compared if _differ(norms, changes, passes.tolerance))
        if (name := next(changed, None)) is None:
            continue
        pairs += alone
        if not alone:
            got = f"a change when one of them is {pair[0]}"
            remedy = "choose rows by indexing or torch.where, and not by products with zeros, such as one-hot rows"
            raise refused(f"the gradient of {name!r}", "not to depend on other examples", got, remedy, unit=suspect)


def _differ(norms: list[float], changes: list[float], tolerance: float) -> bool:
    return math.isfinite(sum(norms)) and not math.hypot(*changes) <= tolerance * sum(norms)


def _with_middle(pair: tuple[float, float], leaf: Tensor) -> Tensor:
    """Return four rows, the second and the third of which hold two numbers."""
    if not leaf.is_floating_point():
        return leaf
    return leaf.index_fill(0, torch.tensor(1), pair[0]).index_fill(0, torch.tensor(2), pair[1])


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
    compared = list(_compared(first, second, range(count_examples(few))))
    scale = passes.tolerance * sum(sum(norms) for _, norms, _ in compared)
    for name, _, changes in compared:
        if name not in second or max(changes) > scale:
            got = "no gradient in the second pass"
            if name in second:
                got = f"gradients with a difference above {passes.tolerance:g}, relative"
            remedy = f"use single layers with nn.Dropout between them, or {REMEDY}"
            raise refused(f"the random draws before {name!r}", "to be the same in both passes", got, remedy)


@contextmanager
def restored(structure: Structure) -> Generator[None]:
    """Run a check; if it wrote to parameters, even unseen by autograd, raise an error.

    It puts back trained and small ones bit by bit. Of large frozen ones, `Bits` compares sums.
    """
    # A gathered parameter loses with its memory what was written to it.
    before = Bits((own for own in structure.parameters if not isinstance(own[1], Gathered)), sums=True)
    refusal: PrivacyError | None = None
    try:
        yield
    except PrivacyError as error:  # the write may be its cause
        refusal = error
    finally:
        written = before.undo()
    if written:
        raise written_to(", ".join(written)) from refusal
    if refusal is not None:
        raise refusal
