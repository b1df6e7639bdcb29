"""The fast engine: one forward and one backward pass for all examples, with gradients kept as factors.

The backward pass computes gradients at the outputs of layers only, and never the gradient of a weight. The rules of
`privgrad.gradient.layers` make factors from these and the layers' inputs. PrivateGradient uses this engine by default;
`diagnostics` and `federated` use it directly.

`passes` computes; this file decides when to learn and to check. The privacy guarantee rests on this file: row i of
every factor depends on example i, the model and public numbers only. The number of examples that are computed at once
may not depend on the drawn batch, because it decides how a sum is rounded.
"""

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.engines.check_schedule import CheckSchedule
from privgrad.gradient.engines.climb import Climb
from privgrad.gradient.engines.layout_cache import shapes_of
from privgrad.gradient.engines.memory import MemoryPlan
from privgrad.gradient.engines.passes import Passes, Point
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, UnitRefusedError, refused
from privgrad.gradient.engines.self_check import (
    require_apart_from_infinite,
    require_apart_in_training,
    require_same_draws,
    require_single,
    restored,
    rows_to_check,
)
from privgrad.gradient.engines.uses import Use, completed
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.factors.jacobian import Pulled, PulledDense
from privgrad.gradient.factors.weight_standardization import Projected
from privgrad.gradient.module_state import trainable
from privgrad.gradient.probes import PROBED, doubled, few_of
from privgrad.gradient.randomness import Randomness, find_randomness, without_randomness
from privgrad.gradient.validation import require_apart, require_same_losses_in_half
from privgrad.types import LossFunction, map_examples

_WEIGHTS = Point()

Found = tuple[dict[str, Factor], Displacements | None]


class Factored:
    """An engine that computes the per-example gradients of a model as factors.

    It implements `contribution.Engine`. Contributions call the engine itself, and so does `diagnostics.alignment`.

    Args:
        model: the module. It is not changed; its forwards are replaced during a call only.
        loss_fn: (model, examples) -> losses, shape (B,).
        memory_mb: MiB for the data that grow with the number of examples; at least one example is computed at once.
            None: see `MemoryPlan`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, memory_mb: float | None = None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._memory = MemoryPlan(model, memory_mb)
        self._passes = Passes(model, loss_fn, self._memory)
        self._layouts = self._passes.layouts
        self._climb = Climb(model, loss_fn, self._layouts)
        self._schedule = CheckSchedule()
        self._randomness: Randomness = "none"  # random draws of a forward pass in the last audit
        self._density: float | None = None  # floats of output gradients per value of an example

    def __call__(self, examples: Any, point: Point = _WEIGHTS) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss as factors, by parameter name.

        Args:
            examples: with leading dimension B >= 1.
            point: where the gradients are computed; the default is the weights.
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
        self._schedule.begin()
        while True:
            with self._climb.attempt():
                if self._climb.reached_loss:
                    return self._alone(examples, point)
                if not self._is_learned(point):
                    self._audit_at(examples, point)
                try:
                    found = self._compute(examples, point)
                except UnsupportedModuleError:
                    if not self._schedule.is_due:
                        raise
                    self._audit_at(examples, point)  # a module may compute differently since the last audit
                    found = self._compute(examples, point)
                self._schedule.note_size(self._passes.ambiguous)
                if self._schedule.is_due:
                    self._check(examples, point, found)
                return found[0]

    def _alone(self, examples: Any, point: Point) -> dict[str, Factor]:
        """Return each example's gradient from its loss alone; check where due that a batch has the same losses."""
        if self._schedule.is_due:
            with restored(self._model):
                self._randomness = find_randomness(self._model, self._loss_fn, few_of(examples))
                self._check_losses(examples)
            self._schedule.is_due = False
        return self._climb.of_losses(examples, point)

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
        return self(examples, Point(radius=radius, exact=exact))

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss at its own point, theta + share f_i, as factors.

        LocalUpdate calls it for every local step but the first.

        Args:
            examples: with leading dimension B >= 1.
            moved: f_i by parameter name, one row per example; parameters that are not displaced are missing.
            share: finite.
        Returns, Raises, Privacy: as __call__.
        """
        return self(examples, Point(along=moved, share=share))

    def inputs(self, examples: Any) -> dict[str, Factor]:
        """Return factors that hold the inputs of each layer, with zeros in place of the gradients of its outputs.

        `input_maps` calls it on public examples.

        Args:
            examples: with leading dimension B >= 1.
        Raises:
            UnsupportedModuleError: as __call__.
        """
        while True:
            with self._climb.attempt():
                if self._climb.reached_loss:
                    got, remedy = "gradients of whole losses", "use precondition.fixed or no preconditioner"
                    raise refused("the inputs of layers", "to be found", got, remedy)
                if not self._is_learned(_WEIGHTS):
                    self._audit(examples)
                self._layouts.recall(examples)
                try:
                    return self._passes.inputs(examples)
                except CallSequenceChangedError:
                    self._audit(examples)
                return self._passes.inputs(examples)

    def uses(self) -> dict[str, Use]:
        """Return how the last pass computed the gradient of each parameter, by name; `explanation` calls it."""
        if self._climb.reached_loss:
            return {name: Use("whole", "", *self._climb.reasons[""]) for name in trainable(self._model)}
        return completed(self._passes.uses, self._climb.reasons, self._passes.floats)

    def begin_step(self) -> None:
        """Count a step of the training. PrivateGradient calls it, whatever batch was drawn."""
        self._passes.norms.begin_step()
        self._climb.begin_step()

    def check_again(self) -> None:
        """Check the next batch too; PrivateGradient calls this when the model's configuration has changed."""
        self._schedule.is_due, self._density = True, None
        self._climb.reopen()

    def microbatch_size(self, examples: Any, usual_size: int) -> int:
        """Return the number of examples to compute at once.

        Their gradients should stay near the processor's caches, but be much larger than the parameters.
        `Contribution.microbatch_size` and `diagnostics.bias` call it.

        Args:
            examples: a batch; only the shapes of one example decide.
            usual_size: a number of examples that batches rarely exceed. Public.
        """
        return self._memory.examples(usual_size, self._floats(examples))

    def moved_size(self, examples: Any, size: int, *, exact: bool) -> int:
        """Return the number of examples to compute at once in `moved`, at most `size`.

        It can be smaller than in `microbatch_size`, because some layers write out their weights for each example. BAM
        calls it.

        Args:
            examples: as in `microbatch_size`.
            size: what `microbatch_size` has returned, or the user's choice.
            exact: as in `moved`.
        """
        floats, written = self._floats(examples), self._passes.written_per_example(exact=exact)
        return self._memory.displaced_examples(size, floats, written, exact=exact)

    def _floats(self, examples: Any) -> int:
        """Return about how many floats of output gradients there are per example, by the shapes of the examples.

        They are measured on the first batch of a configuration. If each pass measured them again, the pass sizes of a
        step would depend on the examples of an earlier step.
        """
        values = sum(shape.numel() for shape in shapes_of(examples))
        if self._density is None:
            self.audit(examples)
            self._density = self._passes.floats / max(1, values)
        return math.ceil(self._density * values)

    def audit(self, examples: Any) -> None:
        """Learn from a few examples where each layer's tensors hold the examples, and have the next batch checked.

        Raises:
            UnsupportedModuleError: the tensors do not keep examples apart.
        """
        while True:
            with self._climb.attempt():
                return self._audit(examples)

    def _audit(self, examples: Any) -> None:
        """Do what `audit` does, for the current units."""
        self._schedule.is_due = True
        if self._climb.reached_loss:
            self._passes.floats = sum(p.numel() for p in trainable(self._model).values())
            return
        few = few_of(examples, salt=self._schedule.calls)
        try:
            self._learn(few)
        except (CallSequenceChangedError, UnitRefusedError):  # for instance, the calls differ in evaluation mode
            self._layouts.current.calls = None
            raise
        except UnsupportedModuleError as refusal:
            self._layouts.current.calls = None
            with self._double(refusal) as twin:
                twin._learn(map_examples(doubled, few))
            displaced, self._layouts.current = self._layouts.current.displaced, twin._layouts.current
            self._layouts.current.displaced = displaced
            self._randomness, self._passes.floats = twin._randomness, twin._passes.floats
        self._layouts.remember(examples)

    def _audit_at(self, examples: Any, point: Point) -> None:
        """Do what `audit` does; for displaced parameters, also learn their passes, and check them on a few examples."""
        self._audit(examples)
        if not point.is_displaced:
            return
        few = few_of(examples, salt=self._schedule.calls)
        probe = Point(radius=abs(point.share) if point.radius is None else point.radius, exact=point.exact)
        displaced = self._layouts.current.displaced
        try:
            self._learn_displaced(few, probe)
        except UnsupportedModuleError as refusal:
            displaced.pop(point.exact, None)
            with self._double(refusal) as twin:
                twin._learn(map_examples(doubled, few))
                twin._learn_displaced(map_examples(doubled, few), probe)
            displaced[point.exact] = twin._layouts.current.displaced[point.exact]
        self._layouts.remember(examples)

    def _learn(self, few: Any) -> None:
        """Learn the layouts, the random draws and the reached parameters from a few examples."""
        passes = self._passes
        with restored(self._model):
            passes.learn(few)
            self._randomness = find_randomness(self._model, self._loss_fn, few)
            with without_randomness(self._model, self._randomness):
                found = passes.compute_first(few)
        own, kinds = trainable(self._model), (Projected, Pulled, PulledDense)
        passes.pulled = {id(own[name]): isinstance(f, Projected) for name, f in found.items() if isinstance(f, kinds)}
        self._layouts.current.reached = set(found)

    def _learn_displaced(self, few: Any, point: Point) -> None:
        """Learn the layouts of passes with displaced parameters, and check the gradients of a few examples."""
        try:
            with restored(self._model):
                self._passes.learn_displaced(few, exact=point.exact)
                with without_randomness(self._model, self._randomness):
                    self._require_single(few, point, self._passes.compute(few, point), range(PROBED))
                if self._randomness != "none" and not point.exact:
                    require_same_draws(self._passes, few, self._passes.tolerance, self._schedule.calls)
        except NotImplementedError as error:
            remedy = "use BAM(mode='sam'), or other layers (for instance Embedding and a sum instead of EmbeddingBag)"
            raise refused("the loss", "to have a second derivative", error, remedy) from error

    def _learn_whole(self, examples: Any, point: Point) -> None:
        """Learn the layouts from a whole batch, because a mask may exist for some contents only."""
        with restored(self._model):
            self._passes.learn(examples)
            if point.is_displaced:
                self._passes.learn_displaced(examples, exact=point.exact)
        self._layouts.remember(examples)

    def _is_learned(self, point: Point) -> bool:
        """Return whether the layouts of a pass at this kind of point are known."""
        known = self._layouts.current
        return known.calls is not None and (not point.is_displaced or point.exact in known.displaced)

    def _compute(self, examples: Any, point: Point) -> Found:
        """Return the factors of a batch; if the sequence of calls has changed, compute again with other layouts.

        The second attempt uses the layouts known for examples of these shapes, so loops may be longer for longer
        sequences. The third uses those of a new audit, and the last those of the whole batch.
        """
        self._layouts.recall(examples)
        try:
            found = self._passes.compute(examples, point)
        except CallSequenceChangedError:
            found = self._compute_again(examples, point)
        factors, _ = found
        lost = self._layouts.current.reached - factors.keys()
        if lost and (lost := sorted(lost & trainable(self._model).keys())):
            got, remedy = "a gradient of None", f"do not detach it from the loss in training mode, or {REMEDY}"
            raise refused(", ".join(lost), "to get a gradient, as on the first batch", got, remedy)
        return found

    def _compute_again(self, examples: Any, point: Point) -> Found:
        """Return the factors of a batch whose sequence of calls differs from the current layouts."""
        self._layouts.note_change(examples)
        for learn in (self._audit_at, self._learn_whole):
            try:
                return self._passes.compute(examples, point)
            except CallSequenceChangedError:
                learn(examples, point)
        return self._passes.compute(examples, point)

    def _check(self, examples: Any, point: Point, found: Found) -> None:
        """Compare some rows of a batch with the gradients of single examples.

        Raises:
            UnsupportedModuleError: some row differs, in double precision too.
        """
        with restored(self._model), without_randomness(self._model, self._randomness):
            if self._randomness != "none":
                found = self._compute(examples, point)
            rows = rows_to_check(found[0], examples, self._schedule.calls)
            try:
                self._require_single(examples, point, found, rows)
            except UnsupportedModuleError as refusal:
                self._check_in_double(map_examples(doubled, examples), point.doubled(), rows, refusal)
            self._check_losses(examples)
            few = few_of(examples, salt=self._schedule.calls)
            require_apart_from_infinite(self._passes, few, self._passes.tolerance, self._schedule.calls)
        if self._randomness in ("numbers", "other"):  # the check above ran without these draws
            with restored(self._model):
                require_apart_in_training(self._passes, few, self._passes.tolerance, self._schedule.calls)
        self._schedule.is_due = False

    def _check_losses(self, examples: Any) -> None:
        """Raise PrivacyError if losses depend on other examples.

        Where a module is taken whole, each example runs by itself, and the gradients cannot show a dependence in it.
        """
        require_same_losses_in_half(self._model, self._loss_fn, examples, self._randomness)
        if self._climb.any:
            few = few_of(examples, salt=self._schedule.calls, fill=False)
            require_apart(self._model, self._loss_fn, few, self._randomness)

    def _check_in_double(
        self, examples: Any, point: Point, rows: Sequence[int], refusal: UnsupportedModuleError
    ) -> None:
        """Repeat a failed comparison in double precision.

        In single precision, rounding may move the position of a maximum, which is no reason to refuse.
        """
        with self._double(refusal) as twin:
            twin._learn(few_of(examples))
            if point.is_displaced:
                twin._passes.learn_displaced(few_of(examples), exact=point.exact)
            twin._require_single(examples, point, twin._passes.compute(examples, point), rows)

    @contextmanager
    def _double(self, refusal: UnsupportedModuleError) -> Generator["Factored"]:
        """Yield this engine in double precision, to repeat a failed check; raise `refusal` if anything fails there."""
        try:
            twin = Factored(copy.deepcopy(self._model).double(), self._loss_fn)
            twin._layouts.current.vmapped_units |= self._layouts.current.vmapped_units
            yield twin
        except Exception:  # the check failed again, or, for instance, the loss accepts single precision only
            raise refusal from None

    def _require_single(self, examples: Any, point: Point, found: Found, rows: Sequence[int]) -> None:
        """Raise UnsupportedModuleError if rows of the factors differ from the gradients of these examples alone."""
        factors, along = found
        model, loss_fn, tolerance = self._model, self._loss_fn, self._passes.tolerance
        more: dict[str, Any] = {"exact": point.exact, "suspect": self._passes.shared()}
        require_single(model, loss_fn, examples, factors, tolerance, along, rows=rows, **more)
