"""The fast engine: one forward and one backward pass for all examples, with gradients kept as factors.

The number of examples that are computed at once may not depend on the drawn batch, because it decides how a sum is
rounded.
"""

import copy
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from privgrad.checks.model_and_loss import require_apart, require_same_losses_in_half
from privgrad.checks.randomness import Randomness, find_randomness, streams, without_randomness
from privgrad.engine.factors.parametrized import Pulled, PulledDense
from privgrad.engine.factors.weight_standardization import Projected
from privgrad.engine.layouts import LayoutCache, example_shapes
from privgrad.engine.passes import Found, MemoryPlan, Passes, Point
from privgrad.engine.self_check import (
    require_apart_from_infinite,
    require_same_draws,
    require_single,
    restored,
    rows_to_check,
)
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.contribution import Use
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import Model, seeded, structure_of
from privgrad.gradient.novelty import CheckSchedule
from privgrad.gradient.probes import PROBED, InDouble, doubled, few_of, secret_seed
from privgrad.gradient.reference import Vmap
from privgrad.gradient.refusals import (
    REMEDY,
    CallSequenceChangedError,
    Reason,
    StepChangedError,
    UnitRefusedError,
    calls_changed,
    refused,
)
from privgrad.processes import Gathered
from privgrad.types import LossFunction, map_examples


class Fallback:
    """The fallback of one engine from a refused unit to vmap: for the unit, a module above it, or the whole loss.

    It hides no dependence between examples: in a module that is taken whole, each runs by itself; outside of it, all
    checks run again, and compare losses too. An example may decide it in any step, which then starts again, so that a
    sum is computed in one way. With and without this example the ways may differ, each within its bound:
    docs/rounding.md.
    """

    def __init__(self, model: nn.Module, layouts: LayoutCache) -> None:
        self._model, self._layouts = model, layouts
        self.reached_loss = False  # whether even the root is taken whole, so the loss
        self._computed: int | None = None  # calls of the engine in this step; None before the first step
        self.reasons = dict[str, Reason]()  # of the refusals, by the path of the module that was taken whole
        self._new = list[str]()  # the modules taken so far, until an attempt is accepted

    def begin_step(self) -> None:
        """Begin to count the calls of the engine that must compute alike."""
        self._computed = 0

    def take_whole(self, error: UnitRefusedError | CallSequenceChangedError) -> None:
        """Take a refused unit or a module above it whole; the step starts again if it computed examples before."""
        refusal = error if isinstance(error, UnitRefusedError) else calls_changed(error)
        if self.reached_loss:
            raise refusal from None
        self._new.append(self._take(refusal.unit))
        self.reasons[self._new[-1]] = refusal.reason
        if self._computed:
            self._computed = 0
            raise StepChangedError from None

    def accept(self, *, computed: bool = False) -> None:
        """Note that an attempt has succeeded, and warn of the modules that were taken whole, if there is a remedy."""
        if self._new and (reason := self.reasons[self._new[-1]]).remedy:  # no value of the examples is in the reason
            last = [path for path in self._new if not any(_is_above(other, path) for other in self._new)]
            names = ", ".join(f"'{path}'" if path else "the whole model" for path in dict.fromkeys(last[:3]))
            more = f" and {len(last) - 3} more" if len(last) > 3 else ""
            what = f"PrivateGradient computes {names}{more} for each example by itself: this is right, but slow. For"
            warnings.warn(f"{what} the fast engine, {reason.condition}: {reason.remedy}", stacklevel=4)
        self._new = []
        if computed and self._computed is not None:
            self._computed += 1

    def _take(self, unit: str) -> str:
        """Take the unit whole, or the next module above those that are, and return its path; at last, the loss."""
        path = unit.partition("[")[0]  # a unit may be a call inside of a module, such as "body[0]"
        taken = self._layouts.current.vmapped_units
        holding = [other for other in taken if other == path or _is_above(other, path)]
        if not holding:
            self._layouts.take_whole(path)
            return path
        path = min(holding, key=len)
        while path:
            path = path.rpartition(".")[0]
            kind = type(self._model.get_submodule(path))
            if getattr(kind, "forward", None) is not nn.Module.forward:  # a ModuleList has none
                self._layouts.take_whole(path)
                return path
        self.reached_loss = True
        return ""


def _is_above(one: str, other: str) -> bool:
    return one != other and (one == "" or other.startswith(f"{one}."))


_WEIGHTS = Point()
_CHEAP = 0.1  # a share of the floats that a step holds for each example

Result = TypeVar("Result")


class Factored:
    """An engine that computes the per-example gradients of a model as factors, with its forwards replaced meanwhile."""

    batches_examples = True  # they share one forward pass, and the random numbers that it draws

    def __init__(self, model: Model, loss_fn: LossFunction, *, memory_mb: float | None = None) -> None:
        self._structure = structure_of(model)
        model = self._structure.model
        if isinstance(model, torch.jit.ScriptModule):  # a part that is scripted is taken whole
            got, remedy = "TorchScript", f"give the module without torch.jit.script (torch.compile works), or {REMEDY}"
            raise refused("the model", "to consist of Python modules", got, remedy)
        self._model = model
        self._loss_fn = loss_fn
        self._memory = MemoryPlan(self._structure, memory_mb)
        self._passes = Passes(self._structure, loss_fn, self._memory)
        self._layouts = self._passes.layouts
        self._fallback = Fallback(model, self._layouts)
        self._reference = Vmap(self._structure, loss_fn)  # for whole losses
        self._schedule = CheckSchedule()
        self._compared = False  # whether the losses that the next check would compare were compared already
        self._randomness = Randomness()  # random draws of a forward pass in the last audit
        self._found: Randomness | None = None  # those that a check of the loss has found for the next batch
        self._set_back: Callable[[], None] = lambda: None  # puts the random streams back to the start of a pass
        self._density: float | None = None  # floats of output gradients per value of an example

    def begin(self, examples: Any) -> bool:
        """Begin a call; return whether it is to be checked."""
        self._schedule.begin(examples)
        return self._schedule.is_due

    def __call__(self, examples: Any, point: Point = _WEIGHTS, *, has_begun: bool = False) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss, a factor for each parameter that it reaches. NOT private."""
        if not has_begun:
            self._schedule.begin(examples)
        # A pass that is computed again draws the same again: else a coin would follow the calls that were learned.
        may_draw = self._randomness.numbers or self._schedule.calls == 1
        self._set_back = streams() if may_draw else lambda: None
        while True:  # `_falling_back` written out: a traceback from the user's model stays short
            try:
                if self._fallback.reached_loss:
                    factors = self._alone(examples, point)
                else:
                    if not self._is_learned(point):
                        self._audit_at(examples, point)
                    try:
                        found = self._compute(examples, point)
                    except UnsupportedModuleError:
                        if not self._schedule.is_due:
                            raise
                        self._set_back()
                        self._audit_at(examples, point)  # a module may compute differently since the last audit
                        found = self._compute(examples, point)
                    self._schedule.note_size(self._passes.ambiguous)
                    if self._schedule.is_due:
                        self._check(examples, point, found)
                    factors, _ = found
            except (UnitRefusedError, CallSequenceChangedError) as error:
                self._fallback.take_whole(error)
                self._set_back()
            else:
                self._fallback.accept(computed=True)
                return factors

    def _falling_back(self, compute: Callable[[], Result]) -> Result:
        """Return compute(). As long as it refuses a unit, take this or a module above whole, and compute again."""
        while True:
            try:
                found = compute()
            except (UnitRefusedError, CallSequenceChangedError) as error:
                self._fallback.take_whole(error)
            else:
                self._fallback.accept()
                return found

    def _alone(self, examples: Any, point: Point) -> dict[str, Factor]:
        """Return each example's gradient from its loss alone; check where due that a batch has the same losses."""
        if any(isinstance(parameter, Gathered) for _, parameter in self._structure.parameters):
            why = self._fallback.reasons.get("", Reason("a module cannot be computed for all examples at once", ""))
            got, remedy = f"a loss that is taken whole, because {why.condition}", "give all processes a whole model"
            raise refused("a sharded model", "to be computed by blocks", got, remedy)
        if self._schedule.is_due:
            with restored(self._structure):
                self._randomness = find_randomness(self._model, self._loss_fn, self._few(examples))
                self._check_losses(examples)
            self._schedule.is_due, self._compared, self._found = False, False, None
        if point.along is not None:
            return self._reference.at(examples, point.along, point.share)
        if point.radius is None:
            return self._reference(examples)
        return self._reference.moved(examples, point.radius, exact=point.exact)

    def moved(self, examples: Any, radius: float, *, exact: bool) -> dict[str, Factor]:
        """Compute the gradients at theta + radius g_i / |g_i|; with `exact`, g_i + radius H_i g_i / |g_i| instead."""
        return self(examples, Point(radius=radius, exact=exact))

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> dict[str, Factor]:
        """Compute the gradient of each example's own loss at theta + share f_i, as factors; `moved` has f_i by name."""
        return self(examples, Point(along=moved, share=share))

    def recordable(self, examples: Any) -> Passes | str:
        """Return passes for a recording, with the layouts of these examples; or why there can be none."""
        if self._fallback.reached_loss:
            return "the whole loss is computed for each example by itself"
        if self._randomness.numbers:  # a graph repeats what numpy and Python drew
            return "the forward pass draws random numbers besides dropout"
        self._layouts.recall(examples)
        return self._passes.copied()

    def kept_draws(self) -> Callable[[], None]:
        """Return a function that puts the random streams back, so that a second pass draws what the first one did."""
        return streams() if self._randomness.draws else lambda: None

    @property
    def tolerance(self) -> float:
        """The relative tolerance of a comparison."""
        return self._passes.tolerance

    def inputs(self, examples: Any) -> dict[str, Factor]:
        """Return factors that hold the inputs of each layer, with zeros in place of the gradients of its outputs."""
        return self._falling_back(partial(self._inputs, examples))

    def _inputs(self, examples: Any) -> dict[str, Factor]:
        if self._fallback.reached_loss:
            remedy = "use precondition.fixed or no preconditioner"
            raise refused("the inputs of layers", "to be found", "gradients of whole losses", remedy)
        if not self._is_learned(_WEIGHTS):
            self._audit(examples)
        self._layouts.recall(examples)
        try:
            return self._passes.inputs(examples)
        except CallSequenceChangedError:
            self._audit(examples)
        return self._passes.inputs(examples)

    def uses(self) -> dict[str, Use]:
        """Return how the last pass computed the gradient of each parameter, by name."""
        if self._fallback.reached_loss:
            return {name: Use("whole", "", *self._fallback.reasons[""]) for name in self._structure.trained}
        found = dict[str, Use]()
        for name, use in self._passes.uses.items():
            if use.way == "whole":
                why, remedy = self._fallback.reasons.get(use.unit, Reason("", ""))
                found[name] = replace(use, why=why, remedy=remedy)
            else:
                is_cheap = use.floats <= _CHEAP * self._passes.floats
                found[name] = Use("rule") if is_cheap and use.way == "rule" else replace(use, is_cheap=is_cheap)
        return found

    def begin_step(self) -> None:
        self._passes.norms.begin_step()
        self._schedule.begin_step()
        self._fallback.begin_step()

    def check_again(self, randomness: Randomness | None = None) -> None:
        """Check the next batch too, because the model's configuration has changed; its losses were compared."""
        self._schedule.is_due = self._compared = True
        self._found = randomness
        self._density = None

    def microbatch_size(self, examples: Any, usual_size: int) -> int:
        """Return the number of examples to compute at once, from the shapes of one and the public `usual_size`."""
        return self._memory.examples(usual_size, self._floats(examples))

    def moved_size(self, examples: Any, size: int, *, exact: bool) -> int:
        """Return that of `moved`, at most `size`: some layers write out their weights for each example."""
        floats, written = self._floats(examples), self._passes.written_per_example(exact=exact)
        return self._memory.displaced_examples(size, floats, written, exact=exact)

    def _floats(self, examples: Any) -> int:
        """Return about how many floats of output gradients there are per example, by the shapes of the examples."""
        values = sum(shape.numel() for shape in example_shapes(examples))
        # Measured once: if each pass measured again, earlier examples would decide the pass sizes of a step.
        if self._density is None:
            self.audit(examples)
            self._density = self._passes.floats / max(1, values)
        return math.ceil(self._density * values)

    def audit(self, examples: Any) -> None:
        """Learn from a few examples where each layer's tensors hold the examples, and have the next batch checked."""
        self._falling_back(partial(self._audit, examples))

    def _audit(self, examples: Any) -> None:
        self._schedule.is_due, self._schedule.depth = True, 2
        if self._fallback.reached_loss:
            self._passes.floats = sum(p.numel() for p in self._structure.follow().trained.values())
            return
        few = self._few(examples)
        try:
            self._learn(few)
        except (CallSequenceChangedError, UnsupportedModuleError) as refusal:
            self._layouts.current.calls = None
            # For instance, the calls differ in evaluation mode.
            if isinstance(refusal, CallSequenceChangedError | UnitRefusedError):
                raise
            with self._double(refusal) as twin:
                twin._learn(map_examples(doubled, few))
            displaced, self._layouts.current = self._layouts.current.displaced, twin._layouts.current
            self._layouts.current.displaced = displaced
            self._randomness, self._passes.floats = twin._randomness, twin._passes.floats
        self._layouts.remember(examples)

    def _few(self, examples: Any, *, fill: bool = True) -> Any:
        return few_of(examples, salt=self._schedule.calls, fill=fill, novel=self._schedule.novel)

    def _audit_at(self, examples: Any, point: Point) -> None:
        """Audit; for displaced parameters, also learn their passes, and check them on a few examples."""
        self._audit(examples)
        if not point.is_displaced:
            return
        few = self._few(examples)
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
        with restored(self._structure):
            passes.learn(few)
            self._randomness = randomness = self._found or find_randomness(self._model, self._loss_fn, few)
            every, changed = list[dict[str, Factor]](), list[CallSequenceChangedError]()
            for number in randomness.compared:
                try:
                    with without_randomness(self._model, randomness, number):
                        every.append(passes.compute(few, Point(), is_first=True)[0])
                except CallSequenceChangedError as error:  # a coin may choose the layers
                    changed.append(error)
        if not every:
            raise changed[0]
        found = every[0]
        own, kinds = self._structure.trained, (Projected, Pulled, PulledDense)
        passes.closed_forms = {
            id(own[name]): isinstance(factor, Projected) for name, factor in found.items() if isinstance(factor, kinds)
        }
        self._layouts.current.reached = set(found).intersection(*every)

    def _learn_displaced(self, few: Any, point: Point) -> None:
        """Learn the layouts of passes with displaced parameters, and check the gradients of a few examples."""
        try:
            with restored(self._structure):
                self._passes.learn_displaced(few, exact=point.exact)
                randomness = self._randomness
                with without_randomness(self._model, randomness, randomness.compared[0]):
                    found = self._passes.compute(few, point)
                    require_single(self._passes, few, point, found, range(PROBED))
                if randomness.draws and not point.exact:
                    require_same_draws(self._passes, few, secret_seed(self._schedule.calls))
        except NotImplementedError as error:
            remedy = "use BAM(mode='sam'), or other layers (for instance Embedding and a sum instead of EmbeddingBag)"
            raise refused("the loss", "to have a second derivative", error, remedy) from error

    def _learn_whole(self, examples: Any, point: Point) -> None:
        """Learn the layouts from a whole batch, because a mask may exist for some contents only."""
        with restored(self._structure):
            self._passes.learn(examples)
            if point.is_displaced:
                self._passes.learn_displaced(examples, exact=point.exact)
        self._layouts.remember(examples)

    def _is_learned(self, point: Point) -> bool:
        known = self._layouts.current
        return known.calls is not None and (not point.is_displaced or point.exact in known.displaced)

    def _compute(self, examples: Any, point: Point) -> Found:
        """Return the factors of a batch; if the sequence of calls has changed, compute again with other layouts."""
        self._layouts.recall(examples)
        try:
            found = self._passes.compute(examples, point)
        except CallSequenceChangedError:
            found = self._compute_again(examples, point)
        self._require_reached(found)
        return found

    def _require_reached(self, found: Found) -> None:
        """Raise UnsupportedModuleError if a parameter gets no gradient that got one from the first batch."""
        factors, _ = found
        lost = self._layouts.current.reached - factors.keys()
        if lost and (lost := sorted(lost & self._structure.trained.keys())):
            got, remedy = "a gradient of None", f"do not detach it from the loss in training mode, or {REMEDY}"
            raise refused(", ".join(lost), "to get a gradient, as on the first batch", got, remedy)

    def _compute_again(self, examples: Any, point: Point) -> Found:
        """Return the factors of a batch whose sequence of calls differs from the current layouts."""
        # First with the layouts known for examples of these shapes, so loops may be longer for longer sequences; then
        # with those of a new audit, and at last of the whole batch.
        self._layouts.note_change(examples)
        for learn in (self._audit_at, self._learn_whole):
            self._set_back()
            try:
                return self._passes.compute(examples, point)
            except CallSequenceChangedError:
                self._set_back()
                learn(examples, point)
        self._set_back()
        return self._passes.compute(examples, point)

    def _check(self, examples: Any, point: Point, found: Found) -> None:
        """Raise PrivacyError if losses of a batch depend on other examples, or rows differ from single examples."""
        randomness, seed, set_back = self._randomness, secret_seed(self._schedule.calls), self._set_back
        try:
            with restored(self._structure):
                # First: a gradient that is wrong because of it has no remedy of its own. With dropout on, a pass
                # without it comes before.
                is_late = randomness.draws and self._known_losses(point) is not None
                if not is_late:
                    self._check_losses(examples, self._known_losses(point))
                for place, number in enumerate(randomness.compared[: 1 + self._schedule.depth]):
                    with without_randomness(self._model, randomness, number):
                        if randomness.draws:
                            with seeded(seed):
                                self._set_back = streams()
                                found = self._compute(examples, point)
                            if is_late and place == 0:
                                self._check_losses(examples, self._known_losses(point))
                        rows = rows_to_check(found[0], examples, self._schedule)
                        try:
                            require_single(self._passes, examples, point, found, rows)
                        except UnsupportedModuleError as refusal:
                            # In single precision, rounding may move the position of a maximum.
                            with self._double(refusal) as twin, seeded(seed):
                                twin._check_rows(map_examples(doubled, examples), point.doubled(), rows)
                        if place == 0 and self._schedule.depth == 2:
                            require_apart_from_infinite(self._passes, self._few(examples), seed)
        finally:
            self._randomness, self._set_back = randomness, set_back  # with constants, a new audit meets no draws
        self._schedule.is_due, self._compared, self._found = False, False, None

    def _check_rows(self, examples: Any, point: Point, rows: Sequence[int]) -> None:
        """Raise UnsupportedModuleError if some rows differ from single examples; for an engine that is used once."""
        self._learn(few_of(examples))
        if point.is_displaced:
            self._passes.learn_displaced(few_of(examples), exact=point.exact)
        found = self._passes.compute(examples, point)
        require_single(self._passes, examples, point, found, rows)

    def _known_losses(self, point: Point) -> Tensor | None:
        """Return the losses of the last pass, if it computed them as the model itself does."""
        # A part that vmap computes keeps examples apart, and so hides whether the loss does.
        calls = self._layouts.current.calls or ()
        is_plain = not self._fallback.reasons and all(call.layout and None not in call.layout for call in calls)
        return self._passes.losses if is_plain and not point.is_displaced and not self._randomness.numbers else None

    def _check_losses(self, examples: Any, known: Tensor | None = None) -> None:
        """Raise PrivacyError if losses depend on other examples; `known`: those of all, without random numbers."""
        if self._compared:
            return
        novel, randomness = self._schedule.novel, self._randomness
        require_same_losses_in_half(self._model, self._loss_fn, examples, randomness, novel, known=known)
        # Where a module is taken whole, examples run alone, so that the gradients cannot show a dependence in it.
        if self._fallback.reasons and self._schedule.depth > 0:
            require_apart(self._model, self._loss_fn, self._few(examples, fill=False), self._randomness)

    @contextmanager
    def _double(self, refusal: UnsupportedModuleError) -> Generator["Factored"]:
        """Yield this engine in double precision, to repeat a failed check; raise `refusal` if anything fails there."""
        try:
            twin = Factored(copy.deepcopy(self._model).double(), self._loss_fn)
            twin._layouts.current.vmapped_units |= self._layouts.current.vmapped_units
            with InDouble():
                yield twin
        except Exception:  # the check failed again, or, for instance, the loss accepts single precision only
            raise refusal from None
