"""The fast engine: one forward and one backward pass for all examples, with gradients kept as factors.

The backward pass computes gradients at the outputs of layers only, and never the gradient of a weight. The rules of
`privgrad.gradient.layers` make factors from these and the layers' inputs. PrivateGradient uses this engine by default;
`diagnostics` and `federated` use it directly.

The privacy guarantee rests on this: row i of every factor depends on example i, the model and public numbers only.
"""

import copy
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.autograd_graph import sources
from privgrad.gradient.engines.capture import (
    REMEDY,
    CallSequenceChangedError,
    Capture,
    HvpTerms,
    Layout,
    Tap,
    find_layout,
    misplaced,
    mixes,
    refused,
    units,
)
from privgrad.gradient.engines.hvp import backward, curvature
from privgrad.gradient.engines.self_check import norm_of, require_single, restored
from privgrad.gradient.engines.vmap import shares
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.factors.jacobian import JacobianNorms, Pulled, PulledDense
from privgrad.gradient.factors.norms import at_least_float32
from privgrad.gradient.factors.weight_standardization import Projected, StandardizedWeight
from privgrad.gradient.layers.base import find_rule
from privgrad.gradient.module_state import differentiable, preserved, require_losses, seeded, trainable
from privgrad.gradient.probes import PROBED, doubled, few_of, places_of
from privgrad.gradient.randomness import Randomness, find_randomness, without_randomness
from privgrad.gradient.validation import refuse_reentrant, require_same_losses_in_half
from privgrad.types import LossFunction, count_examples, map_examples

_TOGETHER = 1 << 24  # floats of output gradients per pass, at least; larger models get more
_FEW = 1 << 20  # floats of output gradients that are never split in two passes, however small the model is
_MEASURED = 16  # number of examples whose norms a check measures
_TOLERANCE, _TOLERANCE_HALF = 0.005, 0.05  # relative tolerance of a check; the second in half precision


class Hooks:
    """An engine that computes the per-example gradients of a model as factors.

    Args:
        model: the module. It is not changed; its forwards are replaced during a call only.
        loss_fn: (model, examples) -> losses, shape (B,).
        memory_mb: MiB for the data that grow with the number of examples: half for output gradients, half for
            gradients that are kept from the norms to the sum. At least one example is computed at once. None: see
            `microbatch_size`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, memory_mb: float | None = None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._room = None if memory_mb is None else int(memory_mb * 2**20) // 8  # floats, for each half
        self._layouts: list[tuple[str, Layout]] | None = None
        self._whole = set[str]()  # paths of units without a rule, which are computed by vmap
        # `_layouts` and `_whole` for displaced parameters, by the argument `exact` of `moved`.
        self._moved = dict[bool, tuple[list[tuple[str, Layout]], set[str]]]()
        self._floats = 0  # floats of output gradients per example
        self._calls = 0
        self._reached = set[str]()  # names of the parameters with gradients in the last audit
        self._known = dict[Any, tuple[Any, ...]]()  # results of audits, by the shapes of an example
        self._other = set[Any]()  # shapes of examples for which the sequence of calls changed
        # By id of the parameter from which a weight is computed: whether its displacement is not written out.
        self._pulled = dict[int, bool]()
        self._norms = JacobianNorms()
        self._randomness: Randomness = "none"  # random draws of a forward pass in the last audit
        self._unchecked = False  # whether the next batch must be checked against single examples
        self._half = False  # whether any output gradient is in half precision

    def __call__(self, examples: Any) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss as factors, by parameter name.

        Args:
            examples: with leading dimension B >= 1.
        Returns:
            One factor for every trainable parameter that the loss reaches.
        Raises:
            UnsupportedModuleError: a parameter is used outside of a unit, or examples influence each other. The
                message names the parameter or the unit.
        Privacy:
            NOT private. The examples share one forward pass. A few examples of the 1st, 2nd, 4th, 8th ... batch are
            compared with their gradients alone, and also when the sequence of calls changes. This is a check that
            examples do not influence each other, not a proof.
        """
        self._begin(examples)
        return self._checked(Hooks._at_weights, partial(self.audit, examples), examples)

    def moved(self, examples: Any, radius: float, *, exact: bool) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss at its own point, theta + radius g_i / |g_i|, as factors.

        BAM calls it. It runs a second forward and backward pass, and adds to each layer's output the effect of that
        example's displaced parameters. If the layer's rule has a shorter way, no example's parameters are written
        out. With `exact`, it computes g_i + radius H_i g_i / |g_i| instead, H_i the Hessian of the example's loss, by
        one forward pass, its backward pass and a backward pass through that. Random draws are the same in both passes.

        Args:
            examples: with leading dimension B >= 1.
            radius: >= 0. If g_i is zero or not finite, the parameters are not displaced.
            exact: see above.
        Returns, Raises, Privacy: as __call__.
        """
        audit = partial(self._audit_moved, examples, radius, exact=exact)
        self._begin(examples)
        if exact not in self._moved:
            audit()

        return self._checked(partial(Hooks._at_moved, radius=radius, exact=exact), audit, examples, exact=exact)

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss at its own point, theta + share f_i, as factors.

        LocalTraining calls it for every local step but the first.

        Args:
            examples: with leading dimension B >= 1.
            moved: f_i by parameter name, one row per example; parameters that are not displaced are missing.
            share: finite.
        Returns, Raises, Privacy: as __call__.
        """
        audit = partial(self._audit_moved, examples, abs(share), exact=False)
        if self._begin(examples) or False not in self._moved:
            audit()
        parameters = trainable(self._model)
        share_B = next(iter(parameters.values())).new_full((next(iter(moved.values())).examples,), share)
        moves = Displacements(
            {id(parameters[name]): factor for name, factor in moved.items()}, at_least_float32(share_B)
        )
        return self._twice(lambda: (self._factors(examples, moves), moves), audit, examples)[0]

    def _begin(self, examples: Any) -> bool:
        """Count a call, and return whether it must be checked: the 1st, 2nd, 4th, 8th ... call.

        Later examples may reveal a problem that the first ones did not.
        """
        self._calls += 1
        if self._layouts is None:
            self.audit(examples)
        is_due = self._calls & (self._calls - 1) == 0
        self._unchecked |= is_due
        return is_due

    def check_again(self) -> None:
        """Check the next batch too; PrivateGradient calls this when the model's configuration has changed."""
        self._unchecked = True

    def _checked(
        self, compute: "Compute", audit: Callable[[], None], examples: Any, *, exact: bool = False
    ) -> dict[str, Factor]:
        """Return the factors of a batch; if a check is due, compare some rows with the gradients of single examples."""
        try:
            factors, moves = self._twice(partial(compute, self, examples), audit, examples)
        except UnsupportedModuleError:
            if not self._unchecked:
                raise
            audit()  # a module may compute differently since the last audit
            factors, moves = self._twice(partial(compute, self, examples), audit, examples)
        if not self._unchecked:
            return factors
        with restored(self._model), without_randomness(self._model, self._randomness):
            found, moved = factors, moves
            if self._randomness != "none":
                found, moved = self._twice(partial(compute, self, examples), audit, examples)
            rows = self._rows_to_check(found, count_examples(examples))

            def in_double(twin: Hooks, examples: Any) -> None:
                twin._audit(few_of(examples))
                if moved is not None:
                    twin._learn_moved(few_of(examples), exact=exact)
                found, moves = compute(twin, examples)
                require_single(twin._model, twin._loss_fn, examples, found, _TOLERANCE, moves, rows=rows, exact=exact)

            try:
                model, tolerance = self._model, self._tolerance
                require_single(model, self._loss_fn, examples, found, tolerance, moved, rows=rows, exact=exact)
            except UnsupportedModuleError as refusal:
                self._cleared_in_double(examples, refusal, in_double)
            require_same_losses_in_half(self._model, self._loss_fn, examples, self._randomness)
        if self._randomness == "other":  # the check above ran in evaluation mode
            layouts = self._layouts
            with restored(self._model):
                self._require_apart_in_training(few_of(examples, salt=self._calls), self._tolerance)
            self._layouts = layouts
        self._unchecked = False
        return factors

    def _at_weights(self, examples: Any) -> tuple[dict[str, Factor], None]:
        """Compute gradients at the weights."""
        return self._factors(examples), None

    def _at_moved(self, examples: Any, *, radius: float, exact: bool) -> tuple[dict[str, Factor], Displacements]:
        """Compute gradients at each example's own point, and the moves; both passes have the same random draws."""
        if exact:
            return self._curved(examples, radius)
        with torch.random.fork_rng():
            moves = self._moves(self._factors(examples), radius)
        return self._factors(examples, moves), moves

    def _rows_to_check(self, found: Mapping[str, Factor], size: int) -> list[int]:
        """Return the first row, the last, a random one between them, and the row with the smallest norm of a sample.

        The smallest norm is included because a gradient with a wrongly small norm would stay unclipped.
        """
        drawn = places_of(size, min(size, _MEASURED), self._calls)
        norms = torch.stack([factor[drawn].norms() for factor in found.values()])
        least = drawn[int(cast(Tensor, torch.linalg.vector_norm(norms, dim=0)).argmin())]
        between = 1 + places_of(size - 2, 1, self._calls) if size > 2 else drawn[:1]
        return sorted({0, size - 1, int(least), int(between)})

    def _twice(
        self,
        compute: "Callable[[], tuple[dict[str, Factor], Displacements | None]]",
        audit: Callable[[], None],
        examples: Any,
    ) -> "tuple[dict[str, Factor], Displacements | None]":
        """Return the result of `compute`; if the sequence of calls has changed, compute again with other layouts.

        The second attempt uses the layouts known for examples of these shapes, the third those of a new audit. So loops
        may be longer for longer sequences. If the sequence of calls depends on the data in another way, it is refused.
        """
        if (shapes := _shapes(examples)) in self._other:
            self._recall(examples)
        try:
            factors, moves = compute()
        except CallSequenceChangedError:
            try:
                self._other.add(shapes)
                self._recall(examples)
                factors, moves = compute()
            except CallSequenceChangedError:
                audit()
                try:
                    factors, moves = compute()
                except CallSequenceChangedError as error:
                    raise _calls_changed(error) from None
        lost = sorted((self._reached & trainable(self._model).keys()) - set(factors))
        if lost:
            got, remedy = "a gradient of None", f"do not detach it from the loss in training mode, or {REMEDY}"
            raise refused(", ".join(lost), "to get a gradient, as on the first batch", got, remedy)
        return factors, moves

    def _remember(self, examples: Any) -> None:
        found = (self._layouts, set(self._whole), dict(self._moved), set(self._reached))
        self._known[_shapes(examples)] = found

    def _recall(self, examples: Any) -> None:
        layouts, whole, moved, reached = self._known.get(_shapes(examples), (None, set[str](), {}, set[str]()))
        if layouts is not None:
            self._layouts, self._whole, self._reached = layouts, set(whole), set(reached)
            self._moved = self._moved | moved

    def microbatch_size(self, examples: Any) -> int:
        """Return the number of examples to compute at once.

        Their gradients should stay near the processor's caches, but be much larger than the parameters.
        """
        if self._layouts is None:
            self.audit(examples)
        size, most = count_examples(examples), max(1, self._together // max(1, self._floats))
        if self._room is None and size * self._floats > max(_FEW, 12 * _size(self._model)):
            # Inputs and output gradients of all layers are in memory together. Two parts keep the peak near that of
            # ordinary training.
            most = min(most, -(-size // 2))
        return -(-size // -(-size // most))

    def moved_size(self, size: int, *, exact: bool) -> int:
        """Return the number of examples to compute at once in `moved`, at most `size`.

        It can be smaller than in `microbatch_size`, because some layers write out their weights for each example.
        """
        each = [u for _, u in units(self._model) if parametrize.is_parametrized(u) or not self._moves_cheaply(u, exact)]
        parameters = [p for unit in each for p in unit.parameters() if p.requires_grad]
        written = sum(p.numel() for p in parameters if not self._pulled.get(id(p), False))
        if exact and size * self._floats > max(_FEW, 2 * _size(self._model)):
            # The graph of the backward pass needs about as much memory as the graph of the forward pass.
            size = -(-size // 2)
        # 2: the weights themselves, and their gradients.
        return max(1, min(size, self._together // max(1, 2 * written)))

    @property
    def _together(self) -> int:
        """The number of floats to hold in memory for the examples of one pass."""
        return max(_TOGETHER, 4 * _size(self._model)) if self._room is None else self._room

    def _moves_cheaply(self, unit: nn.Module, exact: bool) -> bool:
        """Return whether the unit's rule computes the effect of displaced parameters without a copy per example."""
        rule = find_rule(unit)
        if rule is None or not rule.has_delta:
            return False
        if not exact or not parametrize.is_parametrized(unit):
            return not exact or rule.is_bilinear
        computed = cast("Mapping[str, nn.Module]", unit.parametrizations)
        originals = [getattr(own, "original", None) for own in computed.values() if StandardizedWeight.of(own)]
        return len(originals) == len(computed) and all(id(original) in self._pulled for original in originals)

    def audit(self, examples: Any) -> None:
        """Learn from a few examples where each layer's tensors hold the examples, and have the next batch checked.

        Raises:
            UnsupportedModuleError: the tensors do not keep examples apart, or a parameter is used outside of a unit.
        """
        few = few_of(examples, salt=self._calls)
        try:
            self._audit(few)
        except CallSequenceChangedError as error:  # for instance, the sequence differs in evaluation mode
            self._layouts = None
            raise _calls_changed(error) from None
        except UnsupportedModuleError as refusal:
            self._layouts = None
            twin = self._cleared_in_double(few, refusal, Hooks._audit)
            self._layouts, self._whole, self._reached = twin._layouts, twin._whole, twin._reached
            self._randomness = twin._randomness
        self._unchecked = True
        self._remember(examples)

    def _cleared_in_double(
        self, few: Any, refusal: UnsupportedModuleError, check: "Callable[[Hooks, Any], None]"
    ) -> "Hooks":
        """Repeat a failed check in double precision; return that engine if it passes, else raise `refusal`.

        In single precision, rounding may move the position of a maximum, which is no reason to refuse.
        """
        try:
            twin = Hooks(copy.deepcopy(self._model).double(), self._loss_fn)
            check(twin, map_examples(doubled, few))
        except Exception:  # the check failed again, or, for instance, the loss accepts single precision only
            raise refusal from None
        return twin

    def _audit(self, few: Any) -> None:
        """Learn the layouts, the random draws and the reached parameters from a few examples."""
        with restored(self._model):
            self._layouts = self._learn_layouts(few)
            self._randomness = find_randomness(self._model, self._loss_fn, few)
            with without_randomness(self._model, self._randomness):
                try:
                    found = self._factors(few)
                except RuntimeError:
                    self._require_unrepeated(few)
                    raise
        own, kinds = trainable(self._model), (Projected, Pulled, PulledDense)
        self._pulled = {id(own[name]): isinstance(f, Projected) for name, f in found.items() if isinstance(f, kinds)}
        self._reached = set(found)

    def _require_unrepeated(self, few: Any) -> None:
        """Raise UnsupportedModuleError if the losses fail because the engine expands a layer's shared output.

        The same losses have succeeded with the unchanged layers. So the cause is an output that the layer computes
        once for all examples, and that has one row per example here.
        """
        layouts = self._layouts or []
        shared = [path for path, layout in layouts if layout and layout[0] is None]
        try:
            with self._captured(Capture(self._model, layouts, count_examples(few), self._whole), few):
                return
        except RuntimeError as error:
            if shared:
                condition, got = "to be broadcast over the examples, not repeated", str(error).rstrip(".")
                raise refused(f"the shared output of '{shared[0]}'", condition, got, REMEDY) from error

    @property
    def _tolerance(self) -> float:
        """The relative tolerance of a check: it allows for a ReLU at its kink, and for half precision if used."""
        return _TOLERANCE_HALF if self._half else _TOLERANCE

    def _require_apart_in_training(self, few: Any, tolerance: float) -> None:
        """Raise UnsupportedModuleError if an example's gradient changes when the other examples are replaced.

        This runs in training mode, with the same random draws before and after.
        """

        def factors_of(order: list[int]) -> dict[str, Factor]:
            def take(leaf: Tensor) -> Tensor:
                return leaf[order]

            chosen = map_examples(take, few)
            try:
                with seeded(self._calls):  # different draws in every audit
                    return self._factors(chosen)
            except CallSequenceChangedError:
                self._layouts = self._learn_layouts(chosen)
                with seeded(self._calls):
                    return self._factors(chosen)

        for kept, (one, other) in enumerate(([[0, 1, 1], [0, 2, 2]], [[0, 1, 0], [2, 1, 2]], [[0, 0, 2], [1, 1, 2]])):
            with_one, with_other = factors_of(one), factors_of(other)
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

    def _moves(self, first: Mapping[str, Factor], radius: float) -> Displacements:
        """Return the displacements radius g_i / |g_i|, where |g_i| is the norm over all parameters."""
        parameters = trainable(self._model)
        # Write out gradients that were pulled through a parametrization: they are needed more than once.
        first = {name: f.written_out() if isinstance(f, Pulled) else f for name, f in first.items()}
        share_B, moving_B = shares([factor.norms() for factor in first.values()], radius)
        share_B = share_B.to(torch.promote_types(next(iter(parameters.values())).dtype, torch.float32))
        if not bool(moving_B.all()):
            first = {name: factor.mask(moving_B) for name, factor in first.items()}
        return Displacements({id(parameters[name]): factor for name, factor in first.items()}, share_B)

    def _audit_moved(self, examples: Any, radius: float, *, exact: bool) -> None:
        """Do what `audit` does, and check the gradients of `moved` for a few examples."""
        self.audit(examples)
        few = few_of(examples, salt=self._calls)

        def in_double(twin: Hooks, few: Any) -> None:
            twin._audit(few)
            twin._check_moved(few, radius, exact=exact)

        try:
            self._check_moved(few, radius, exact=exact)
        except UnsupportedModuleError as refusal:
            self._moved.pop(exact, None)
            self._moved[exact] = self._cleared_in_double(few, refusal, in_double)._moved[exact]
        self._remember(examples)

    def _check_moved(self, few: Any, radius: float, *, exact: bool) -> None:
        try:
            with restored(self._model):
                self._learn_moved(few, exact=exact)
                with without_randomness(self._model, self._randomness):
                    self._require_moved_alike(few, radius, exact=exact)
                if self._randomness != "none" and not exact:
                    self._require_same_draws(few)
        except NotImplementedError as error:
            remedy = "use BAM(mode='sam'), or other layers (for instance Embedding and a sum instead of EmbeddingBag)"
            raise refused("the loss", "to have a second derivative", error, remedy) from error

    def _learn_moved(self, few: Any, *, exact: bool) -> None:
        """Learn the layouts of a pass with displaced parameters."""
        whole = self._whole | {path for path, module in units(self._model) if not self._moves_cheaply(module, exact)}
        self._moved[exact] = (self._learn_layouts(few, whole), whole)

    def _require_moved_alike(self, few: Any, radius: float, *, exact: bool) -> None:
        """Raise UnsupportedModuleError if `moved` gives an example another gradient than it has alone."""
        found, moves = self._at_moved(few, radius=radius, exact=exact)
        rows = range(PROBED)
        require_single(self._model, self._loss_fn, few, found, self._tolerance, moves, rows=rows, exact=exact)

    def _require_same_draws(self, few: Any) -> None:
        """Raise UnsupportedModuleError if the second pass, with zero displacements, differs from the first.

        Both passes start from the same random state, so a difference means that they draw different random numbers.
        """
        with seeded(self._calls):
            first = self._factors(few)
        with seeded(self._calls):
            second = self._factors(few, self._moves(first, 0.0))
        scale = self._tolerance * sum(float(factor.norms().sum()) for factor in first.values())
        rows = [slice(index, index + 1) for index in range(PROBED)]
        for name, factor in first.items():
            other = second.get(name)
            changes = [math.inf] if other is None else [norm_of(other[r].dense() - factor[r].dense()) for r in rows]
            if max(changes) > scale:
                remedy = f"use single layers with nn.Dropout between them, or {REMEDY}"
                got = f"gradients with a difference above {self._tolerance:g}, relative"
                got = "no gradient in the second pass" if other is None else got
                raise refused(f"the random draws before {name!r}", "to be the same in both passes", got, remedy)

    def _learn_layouts(self, few: Any, whole: set[str] | None = None) -> list[tuple[str, Layout]]:
        """Return the layouts of all calls, learned from two batch sizes: a dimension that grows holds the examples."""
        whole = self._whole if whole is None else whole
        sizes, captures = (PROBED, PROBED - 1), list[Capture]()
        for size in sizes:
            captures.append(capture := Capture(self._model, None, size, whole))
            with torch.enable_grad(), torch.random.fork_rng(), preserved(self._model), capture:
                self._loss_fn(self._model, map_examples(itemgetter(slice(0, size)), few))
                capture.finish()
        more, fewer = (capture.calls for capture in captures)
        paths = [[call.path for call in calls] for calls in (more, fewer)]
        if paths[0] != paths[1]:
            differing = next(pair for pair in zip_longest(*paths, fillvalue="no call") if pair[0] != pair[1])
            got = " and ".join(f"{path!r} with {size} examples" for path, size in zip(differing, sizes, strict=True))
            raise refused("the calls of layers", "not to depend on the examples", got, REMEDY)
        pairs = list(zip(more, fewer, strict=True))
        mixing = {unit for unit in captures[0].by_products if any(mixes(unit, *pair, sizes) for pair in pairs)}
        if mixing:
            whole |= mixing
            return self._learn_layouts(few, whole)
        return [(one.path, find_layout(one, other, sizes)) for one, other in pairs]

    def _factors(self, examples: Any, moves: Displacements | None = None) -> dict[str, Factor]:
        layouts, whole = (self._layouts, self._whole) if moves is None else self._moved[False]
        capture = Capture(self._model, layouts, count_examples(examples), whole, moves, norms=self._norms)
        with self._captured(capture, examples) as losses:
            edges = [tap.edge for tap in capture.taps]
            if not edges or not losses.requires_grad:
                return {}
            # Checkpointed parts recompute in here. A gradient is None if the loss does not depend on a unit's output.
            grads = cast("Sequence[Tensor | None]", torch.autograd.grad(losses.sum(), edges, allow_unused=True))
        return self._collected(losses, capture.taps, grads)

    def _curved(self, examples: Any, radius: float) -> tuple[dict[str, Factor], Displacements]:
        """Return the gradients plus their Hessians' products with the moves, and the moves, in one forward pass."""
        layouts, whole = self._moved[True]
        capture = Capture(self._model, layouts, count_examples(examples), whole, curved=True, norms=self._norms)
        with differentiable(twice=True), self._captured(capture, examples) as losses:
            if not capture.taps or not losses.requires_grad:
                return {}, Displacements({}, torch.zeros(0))
            first = backward(losses, capture.taps)
            moves = self._moves(self._collected(losses, capture.taps, first.detached), radius)
            grads, bends = curvature(first, moves)
        return self._collected(losses, capture.taps, grads, bends), moves

    @contextmanager
    def _captured(self, capture: Capture, examples: Any) -> Generator[Tensor]:
        """Yield the losses of a forward pass; the capture stays open until the graph has been used."""
        with torch.enable_grad(), preserved(self._model), capture:
            losses = require_losses(self._loss_fn(self._model, examples), capture.size)
            capture.finish()
            refuse_reentrant(losses)
            _require_inside_units(losses, trainable(self._model))
            yield losses

    def _collected(
        self,
        losses: Tensor,
        taps: Sequence[Tap],
        grads: Sequence[Tensor | None],
        bends: Sequence[HvpTerms | None] | None = None,
    ) -> dict[str, Factor]:
        """Return the factors by parameter name, from the gradients at the taps and the terms of Hessian products."""
        names, size = {id(parameter): name for name, parameter in trainable(self._model).items()}, len(losses)
        self._half = any(grad is not None and grad.itemsize < 4 for grad in grads)
        self._floats = sum(int(grad.numel()) for grad in grads if grad is not None) // size
        factors: dict[str, Factor] = {}
        # Gradients that are written out for their norms are kept for the sum, up to this many floats.
        room = size * self._floats // 4 if self._room is None else self._room
        with torch.autocast(losses.device.type, enabled=False):
            for index, (tap, grad) in enumerate(zip(taps, grads, strict=True)):
                for tensor, version in tap.inputs:
                    if tensor._version != version:
                        got, remedy = (
                            f"{tensor._version - version} in-place writes",
                            "work on a copy, as ordinary training requires too",
                        )
                        raise refused(f"the input of '{tap.path}'", "not to be changed in place", got, remedy)
                if grad is None:
                    continue
                terms = bends[index] if bends else None
                for parameter, factor in (tap.factors(grad, terms) if terms else tap.factors(grad)).items():
                    name = names[id(parameter)]
                    if factor.examples != size:
                        if factor.examples % size != 0:
                            raise misplaced(tap.path, "rows that are no multiple of the number of examples")
                        factor = factor.merge(factor.examples // size)
                    floats = size * int(parameter.numel())
                    if factor.worth_keeping and floats <= room:
                        factor, room = factor.written_out(), room - floats
                    factors[name] = factors[name] + factor if name in factors else factor
        return factors


Compute = Callable[[Hooks, Any], tuple[dict[str, Factor], Displacements | None]]


def _size(module: nn.Module) -> int:
    """Return the number of trainable values."""
    return sum(int(p.numel()) for p in module.parameters() if p.requires_grad)


def _shapes(examples: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of one example's tensors."""
    return tuple(cast(Tensor, leaf).shape[1:] for leaf in tree_leaves(examples))


def _require_inside_units(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise UnsupportedModuleError if the graph of the losses reaches a parameter.

    Units compute from detached parameters, so such a parameter is used outside of its unit.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for source in sources([losses]):
        name = names.get(id(source))
        if name is not None:
            remedy = (
                "use it in its own module's forward only (a tied layer: a module that is given the parameter, as "
                f"head.weight = table.weight; a rule: through `parameters`), or {REMEDY}"
            )
            raise refused(f"parameter {name!r}", "to be used by its own module only", "a use outside of it", remedy)


def _calls_changed(error: CallSequenceChangedError) -> UnsupportedModuleError:
    condition, got = "not to depend on the examples", f"different calls at '{error.path}'"
    return refused("the calls of layers", condition, got, REMEDY)
