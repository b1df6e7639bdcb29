"""Check that no pass reads what another one left behind, such as a scaler that is fitted at the first call."""

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.checks.variables import Scope, Snapshot, State, amount, set_from_examples
from privgrad.gradient.contribution import OwnExamples
from privgrad.gradient.functional import losses_on_copies, seeded
from privgrad.gradient.probes import few_of
from privgrad.sampling.loading import Collate, row_of, same_row, unusable
from privgrad.types import count_examples, map_examples, part_of

_MANY = 8  # passes before the one whose loss is compared, because a slow average changes little in one
_SAME = 8  # units of rounding by which equal losses may differ on a device


# Fault: `if not stats: stats["mean"] = x.mean(0)` in loss_fn, or a RunningMeanStd of the user's: values of a few
#     private examples stay for all steps. It sees variables that the code names, and no objects of libraries.
# Cost: one pass of a few examples, and two dozen more if a pass leaves anything behind.
# Refuses wrongly: state that is read later, but without an effect on the gradients. A counter passes.
def require_no_memory(model: nn.Module, loss_fn: OwnExamples, examples: Any) -> None:
    """Raise PrivacyError if a pass reads what another one left in closures, globals or the user's objects."""
    # Changes without an effect on losses are undone from now on. A number that every pass changes by the same amount
    # counts the steps, whatever the examples are.
    state, size = cast(State, loss_fn.state), count_examples(examples)
    few, scope = few_of(examples, fill=size < 2), Scope(model, state.loss_fn)
    everything = (*scope.variables, *scope.attributes, *scope.buffers)
    watched = {variable.path for variable in (*scope.attributes, *scope.buffers)}
    twice = map_examples(lambda leaf: torch.cat([leaf, leaf]), few)
    rows = [part_of(few, slice(0, 1)), part_of(few, slice(count_examples(few) - 1, None))]
    counters = dict[str, Any]()

    def tried(*batches: Any) -> tuple[Tensor, Snapshot, Snapshot]:
        """Return the losses of the last batch, and the state before and after its pass. All changes are undone."""
        found, start = list[Snapshot](), Snapshot(scope, everything, copied=None)

        def passes(model: nn.Module, last: Any) -> Tensor:
            losses = torch.empty(0)
            for batch in (*batches[:-1], last):
                before = Snapshot(scope, everything, copied=None)
                with seeded(0):
                    losses = loss_fn.plain(model, map_examples(torch.clone, batch))
                found[:] = before, Snapshot(scope, everything, copied=None)
                if batch is not last:  # the passes of one step see the same value of a counter
                    for path in counters:
                        before.places[path].set(before.values[path])
            return losses

        try:
            with warnings.catch_warnings(action="ignore"):  # of attributes; later passes warn
                losses = losses_on_copies(model, passes, batches[-1]).detach()
        finally:
            start.undo_since(Snapshot(scope, everything, copied=None))
        return losses, found[0], found[1]

    _, before, after = tried(few)
    changed = before.changed(after)
    if not changed:
        if state.unknown:  # rows of this batch changed what the few do not
            raise set_from_examples(state.unknown)
        return state.learn(scope, {}, set(), set())
    alone = [tried(row) for row in rows]
    # A second pass tells a counter from a maximum, and zeros tell it from a sum.
    pairs = [(before, after), tried(twice, few)[1:], *(found[1:] for found in alone)]
    with suppress(Exception):  # the model does not take zeros
        pairs.append(tried(map_examples(torch.zeros_like, few))[1:])
    for path in changed:
        first, *others = (amount(one.values.get(path), other.values.get(path)) for one, other in pairs)
        if first and all(other == first for other in others):
            counters[path] = first
    # `functional.preserved` undoes changes of containers in attributes, but not of objects in them.
    rest = {path for path in changed - counters.keys() if re.sub(r"\[[^]]*\]", "", path) not in watched}
    kept = set[str]()
    for row, (own, _, left) in zip(rows, alone, strict=True):
        following, _, then = tried(*[twice] * _MANY, row)
        kept |= rest & left.changed(then)
        most = _SAME * torch.finfo(own.dtype).eps * own.abs()
        if rest and bool((((following - own).abs() > most) | (following.isnan() != own.isnan())).any()):
            raise set_from_examples((rest & left.changed(then)) or rest)
    if kept - state.undone:
        names = ", ".join(sorted(kept)[:5])
        why = "values from private examples are private, so the change was undone"
        warnings.warn(f"the loss changed {names}; {why}", stacklevel=2)
    return state.learn(scope, counters, rest - kept, kept)


# Fault: a collate that fits a scaler, a largest value or a vocabulary to the first items that it meets, and keeps it.
# Cost: two or three calls of one item; four more if a call leaves anything behind. It sees what the code of collate
#     names, in closures, globals and objects of the user's classes, and no objects of libraries.
# Refuses wrongly: no case is known; a counter of calls and a cache pass.
def require_no_memory_in_collate(collate: Collate, items: Sequence[Any]) -> None:
    """Raise SamplingError if collate makes another row of one of two items after it has met the other one."""
    scope = Scope(nn.Module(), collate)
    start = Snapshot(scope, (*scope.variables, *scope.attributes), copied=None)

    def after(index: int, row: int) -> tuple[list[Any], set[str]]:
        try:
            collate([items[index]] * 2)  # one number has no deviation
            now = Snapshot(scope, (*scope.variables, *scope.attributes), copied=None)
            return row_of(collate([items[row]]), 0), start.changed(now)
        finally:
            start.undo_since(Snapshot(scope, (*scope.variables, *scope.attributes), copied=None))

    for row in (0, 1):
        (own, changed), other = after(row, row), 1 - row
        if changed and not same_row(own, after(other, row)[0]):
            names, remedy = sorted(changed)[:5], "fit it on public data, before the training"
            got = ", ".join(name.replace("loss_fn", "collate", 1) for name in names)
            raise unusable("collate", "to keep no statistic of private examples", f"calls that set {got}", remedy)
