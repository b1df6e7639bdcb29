"""PrivateGradient: the privacy boundary. Its inputs are sensitive; its outputs are safe to use in any way.

For fixed coins, step t releases N(S, (sigma C)^2 I) without an example x, and with probability q the same around
S + f g_x, where |f g_x| <= C. This is the sampled Gaussian of Mironov et al. 2019 (arXiv 1908.10530), section 3, which
the ledger records as Release(sigma, q). Section 0 of docs/mathematics.md says why the coins may be held fixed: those
are the words of the sampler, the groups, dropout and augmentation.

The file is long, so that a reviewer reads admission, sum, noise and charge in one piece. With one process, `processes`
is `ALONE`, whose methods return what they are given.
"""

import hashlib
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from privgrad.accounting.mechanisms import whole_epochs
from privgrad.clip.adaptive import AdaptiveClip
from privgrad.clip.clipping import Clipping, ClippingAccumulator, RawClipping, sum_dtype, without_gradient
from privgrad.clip.groups import group_means, group_of, split_by_group
from privgrad.clip.norm_statistics import NORMS, NormBins
from privgrad.errors import SamplingError, described, expected, require_callable, require_integer, require_max_grad_norm
from privgrad.gradient.contribution import Contribution, OwnExamples
from privgrad.gradient.factor import Factor
from privgrad.gradient.functional import Structure, advanced, gradients, parameters_kept, seeded
from privgrad.gradient.refusals import StepChangedError
from privgrad.gradient.secret_draws import secret_draws
from privgrad.gradient.transform import Preconditioner, Transform, require_scales_only, require_transform, shifted
from privgrad.ledger.ledger import Ledger
from privgrad.noise.banded import Recursion
from privgrad.noise.gaussian import add_noise, noise_generator
from privgrad.parts import Filter, Parts, Stateful
from privgrad.plan import PrivacyPlan
from privgrad.processes import ALONE, Processes, keep_freed_memory, meanwhile, require_all_processes
from privgrad.rng import RandomSource, Stream, derived_key
from privgrad.sampling.epochs import forget_epochs
from privgrad.types import Batch, ClippedSum, LossFunction, NoisyGradient, Place, Sampling, count_examples, part_of

_Begins = tuple[int, bool, bool] | None  # as `_begin_noise` returns it
_ALIKE = "in every process, load the same state, give PrivateGradient(..., ledger=) from the start, and draw alike"
# A step changes the model while it computes, and what a process has once: autograd's functions and the generators of
# numpy and Python. Threads at once would compute each other's gradients, and put back each other's changes.
_TURN = threading.RLock()


@dataclass(frozen=True)
class RawStep:
    """One step before the noise, for diagnostics. NOT PRIVATE: no epsilon covers it."""

    step: int  # the index of the release, from 0
    # Clipped sum / divisor, by parameter name: the released gradient without its noise. With several processes, the
    # first has the sum of all; each other process has its own sum. Of a sharded parameter, each has its shard.
    raw_mean: Mapping[str, Tensor]
    clipping: RawClipping  # of this process' examples
    released: NoisyGradient
    raw_shares: Tensor | None = None  # of `released.norm_distribution` without noise; None if there is none


def require_model(function: str, model: object) -> None:
    """Raise PrivacyError unless `model` is a module (an instance, not a class)."""
    if not isinstance(model, nn.Module):
        raise expected(function, "model", "to be a torch.nn.Module", described(model), "give the model itself")


class PrivateGradient:
    """Turn a batch into a released gradient: per example gradient, clip; sum; noise; charge; divide by B.

    Args:
        model: any module whose examples do not influence each other. It is not changed, except for a note of its
            ledger (see `ledgers_of`), and no hooks stay on it. Threads that use one model take turns. Use models that
            share modules in one thread only.
        loss_fn: (model, examples) -> losses, shape (B,), one per example and depending on that example only.
        plan: the public numbers.
        perturb: what each example adds: perturb.BAM(radius), its gradient at a point of its own; perturb.SAT(radius),
            its gradient at one point along the last released gradient; None, its gradient at the weights. With a plan
            for users, federated.LocalUpdate(...): the update of each user.
        precondition: divides each gradient by public scales before it is clipped (AdaDPS), or multiplies the inputs of
            its layers by public matrices. None: neither.
        clip: Flat(), PerLayer({...}) or Automatic().
        engine: "factored" (fast; examples share one forward pass) or "vmap" (any module, one example at a time, much
            memory). Speed only: both compute the same gradients.
        microbatch_size: the number of examples to compute at once; None lets the engine choose. Speed and memory only.
        memory_mb: about how many MiB the engine may use for per-example values, in addition to an ordinary step; > 0.
            None lets the engine choose. Speed and memory only.
        compile: whether to compute batches of one shape by a function that `torch.compile` makes, in a minute or two.
            For sampling="truncated", or with a `microbatch_size`. It warns where it cannot. Speed only.
        ledger: a Ledger, or the path of one; None records in memory. With several processes, the first process has the
            record. The others take it over, and count in memory.
        norm_bins: the number of bins, 1 to 1024, of a distribution of the clipped gradients' lengths, which each
            released gradient then has as `norm_distribution`. It is private, costs no epsilon and leaves the gradient
            as it is. "auto" takes 8 to 64, as the noise allows (see `norm_statistics.chosen_slots`). None: no
            distribution.
        adaptive_clip: changes C during training: clip.TargetFraction(), at no cost, or a rule of `clip` with a release
            of its own. The plan's `max_grad_norm` is the first C, and the property `max_grad_norm` is the current one.
            It does not suit clip.Automatic(). None keeps C.
        filter: a linear filter of the released gradients (see `filters`); the gradient that a call returns is then the
            filtered one. perturb.DiSK(weight) needs filters.EMA(weight). None: no filter.
        processes: the processes that train together; see training.distributed. None: only this one.
        side_information: other data that the training depends on, in a few words: the source of features, or of the
            public gradients of an optimizer. The ledger records it. None: there is none.
    Raises:
        UnsupportedModuleError: a module mixes examples. The message gives its path and the remedy.
        PrivacyError: an argument is invalid, or the ledger was written under a different plan.
    Privacy:
        All calls together cost what `plan.epsilon()` says. For Poisson batches and independent noise, these are T
        subsampled Gaussian mechanisms with the plan's sigma and q; neighboring data sets differ by one unit more or
        less. The reason: each contribution has norm at most C, the noise is scaled to the sensitivity of their sum, and
        each step is charged before it is returned. Any use of the returned gradients is post-processing.
    Attributes:
        raw_nonfinite_examples: the number of gradients that were not finite, which count as zero. NOT private. Read it
            where a training does not learn: all gradients may be NaN, and no release says so.
    Reference:
        Abadi et al. 2016 (arXiv 1607.00133), algorithm 1, with the public expected batch size as divisor.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        plan: PrivacyPlan,
        *,
        perturb: Contribution | None = None,
        precondition: Preconditioner | None = None,
        clip: Clipping | None = None,
        engine: Literal["factored", "vmap"] = "factored",
        microbatch_size: int | None = None,
        memory_mb: float | None = None,
        compile: bool = False,  # noqa: A002, torch's name
        ledger: Ledger | str | os.PathLike[str] | None = None,
        norm_bins: NormBins = None,
        adaptive_clip: AdaptiveClip | None = None,
        filter: Filter | None = None,  # noqa: A002, the field's name
        processes: Processes | None = None,
        side_information: str | None = None,
    ) -> None:
        parts = Parts(
            perturb=perturb,
            precondition=precondition,
            clip=clip,
            engine=engine,
            microbatch_size=microbatch_size,
            memory_mb=memory_mb,
            compile=compile,
            norm_bins=norm_bins,
            adaptive_clip=adaptive_clip,
            filter=filter,
        )
        require_model("PrivateGradient", model)
        require_callable("PrivateGradient", "loss_fn", loss_fn, "give (model, examples) -> losses of shape (B,)")
        self._processes = processes = ALONE if processes is None else processes
        require_all_processes("PrivateGradient", processes)
        processes.begin(model)
        self._model, self._plan = model, plan
        with _TURN, processes.opened(model):
            self._structure = Structure(model)
            Parts.checks.require_supported(self._structure)
            self._parts = parts = parts.begun(model, plan)
        # Read once, so that a part cannot change from public to private between charges.
        self._not_private = {name for name, part in parts.stateful().items() if not part.is_public}
        self._contribution, self._clip = cast(Contribution, parts.perturb), cast(Clipping, parts.clip)
        self._precondition, self._adaptive, self._filter = parts.precondition, parts.adaptive_clip, parts.filter
        self._statistic = parts.statistic(plan)
        # sigma, C and n are not compared: this plan's are used and charged. Only what decided the draw must agree.
        self._is_sharded = processes.is_sharded(model)
        self._planned = {
            "scheme": plan.sampling,
            "sample_rate": plan.group_rate,
            "expected_batch_size": plan.expected_batch_size,
            "seed": plan.seed,
            "bands": plan.bands,
            "max_batch_size": plan.max_batch_size,
            "num_examples": plan.num_examples if plan.sampling == "truncated" else None,
            "epoch_steps": plan.release.epoch_steps,
            "rank": processes.rank,
            "processes": processes.count,
        }
        self._state = Parts.checks.State(loss_fn)
        self._given_loss_fn = loss_fn
        self._loss_fn = OwnExamples(self._contribution.losses(loss_fn), self._state)
        self._engine = Parts.engines[engine](self._structure, self._loss_fn, memory_mb=memory_mb)
        self._compiled = self._compiling() if compile else None
        self._facts = facts = self._public_facts(side_information)
        self._release = plan.release
        if self._not_private:  # a part that depends on the private batch reveals it, whatever noise is added later
            self._release = replace(plan.release, noise_multiplier=0.0)
        if processes.count > 1:
            self._require_shared(facts, ledger)
        self._ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger if processes.rank == 0 else None)
        try:
            with processes.all_succeed():
                self._ledger.bind(facts)
            self._ledger.follow_first(processes)
        except BaseException:
            if not isinstance(ledger, Ledger):  # nobody else could close it
                self._ledger.close()
            raise
        Parts.checks.note_base(model, self._ledger)
        Parts.checks.note_training(model, self._ledger)
        self._make_streams()
        self._charged_by = ""  # the stream of the last charged draw
        keep_freed_memory(unless=self._is_sharded)
        self._step = 0
        self._shares_draws = False  # in the last check of the loss
        self._due = False  # whether a number that the loss reads has changed since that check
        self._checked = list[tuple[tuple[str, ...], tuple[object, ...]]]()  # trained parameters and configuration
        self._known: Transform | None = None
        self.raw_nonfinite_examples = 0
        self._observers = OrderedDict[int, Callable[[RawStep], None]]()

    def _compiling(self) -> Any:
        """Return what computes chunks by compiled functions; None, with a warning, if a part has none."""
        if found := self._parts.not_compiled(self._plan, self._processes.count):
            return _not_compiled(" and ".join(found))
        return Parts.compiled(self._engine, self._structure, self._state)

    def _public_facts(self, side_information: str | None) -> dict[str, Any]:
        """Return what the ledger records of the plan and the parts. It is public, and a resumed run has the same."""
        plan, parts = self._plan, self._parts.stateful()
        sums = [
            torch.empty(0, dtype=sum_dtype(parameter, plan.divisor), device=parameter.device)
            for parameter in self._structure.trained.values()
        ]
        if self._statistic is not None:
            sums.append(torch.empty(0, dtype=torch.float64, device=sums[0].device))
        sources = (None if self._precondition is None else self._precondition.source, side_information)
        facts = plan.public_facts
        facts["research_seed"] = plan.seed is not None
        facts["side_information"] = "; ".join(source for source in sources if source) or None
        facts["perturbation"] = self._described(parts["perturb"]) if "perturb" in parts else None
        known = {name: getattr(self._contribution, name) for name in ("canaries", "max_rows", "rows_by")}
        facts |= {name: value for name, value in known.items() if value}
        facts["norm_statistic"] = None if self._statistic is None else repr(self._statistic)
        facts["adaptive_clip"] = None if self._adaptive is None else repr(self._adaptive)
        facts["noise_generator"] = noise_generator(sums, on_grid=plan.noise_on_grid)
        if self._not_private:
            facts["noise_multiplier"] = 0.0
        return facts

    def __repr__(self) -> str:
        numbers = f"noise_multiplier={self._plan.noise_multiplier}, max_grad_norm={self.max_grad_norm}"
        return f"PrivateGradient({type(self._model).__name__}, {numbers}, step {self._step} of {self._plan.steps})"

    @property
    def ledger(self) -> Ledger:
        """The record of all releases."""
        return self._ledger

    @property
    def plan(self) -> PrivacyPlan:
        """The public numbers."""
        return self._plan

    @property
    def model(self) -> nn.Module:
        """The model whose gradients are released."""
        return self._model

    @property
    def precondition(self) -> Preconditioner | None:
        """The preconditioner. `fit` and the bridges compare its public examples with the private ones."""
        return self._precondition

    @property
    def processes(self) -> Processes:
        """The processes that train together."""
        return self._processes

    @property
    def max_grad_norm(self) -> float:
        """C of the next step: the plan's, or that of `adaptive_clip`."""
        return self._plan.max_grad_norm if self._adaptive is None else float(self._adaptive.max_grad_norm)

    @property
    def settings(self) -> dict[str, str]:
        """All that decides the released gradient besides the plan, in words. A resumed run must have the same.

        `fit` and `integrations.external_loop` store it in their checkpoints.
        """
        found = {"perturb": "None", "precondition": "None", "clip": repr(self._clip)}
        return found | {name: self._described(part) for name, part in self._parts.stateful().items()}

    @property
    def parts(self) -> Parts:
        """The arguments that make a gradient from a batch."""
        return self._parts

    def beside(
        self,
        *,
        plan: PrivacyPlan | None = None,
        perturb: Contribution | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
    ) -> "PrivateGradient":
        """Return a new PrivateGradient of the model, for audits: the same except for its ledger and what is given."""
        parts: dict[str, Any] = vars(self._parts) | {"perturb": perturb or self._parts.perturb}
        loss_fn, source = self._given_loss_fn, self._facts["side_information"]
        return PrivateGradient(
            self._model, loss_fn, plan or self._plan, ledger=ledger, side_information=source, **parts
        )

    def explain(self) -> Any:
        """Say how the last step computed the gradient of each parameter; `print` shows it.

        `privgrad.explain` says it before a training, from public examples, with the time and the memory of a step.

        Raises:
            PrivacyError: no examples were computed so far.
        Privacy:
            NOT covered by epsilon: private examples of the last steps may decide how a module was computed. To publish
            an explanation, call privgrad.explain with public examples.
        """
        uses = self._engine.uses()
        if not uses:
            remedy = "compute a step first, or call privgrad.explain(model, loss_fn, public_batch)"
            raise expected("PrivateGradient.explain", "the engine", "to have computed examples", 0, remedy)
        return Parts.explanation.Explanation(Parts.explanation.parts_of(self._model, uses))

    def register_raw_observer(self, observer: Callable[[RawStep], None]) -> RemovableHandle:
        """Call `observer` with each step as it was before the noise, once it is charged.

        Args:
            observer: see RawStep and privgrad.diagnostics.
        Returns:
            A handle, as torch's hooks have: `handle.remove()` removes the observer.
        Privacy:
            What an observer sees is NOT private.
        """
        require_callable("PrivateGradient.register_raw_observer", "observer", observer, "give a function of a RawStep")
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def record_in(self, record: Ledger | str | os.PathLike[str]) -> None:
        """Record all releases in a ledger file, in place of the memory.

        Args:
            record: the path of a new ledger, or of one that this run's earlier attempts have written; or such a ledger,
                opened just now.
        Raises:
            PrivacyError: something was released already and is recorded elsewhere; or the file is another run's.
        Privacy:
            A file that holds releases counts them against the plan's steps.
        """
        ledger = self._ledger
        path = record.path if isinstance(record, Ledger) else Path(record).absolute()
        if (ledger.releases > 0 or ledger.commitment) and (path is None or ledger.path != path):
            got = f"{ledger.releases} releases, recorded in {ledger.path or 'memory'}"
            if ledger.commitment:  # the new file would not have the budget's limit
                got += f", committed as {ledger.commitment}"
            remedy = f"give PrivateGradient(..., ledger={str(path)!r}) from the start"
            raise expected("PrivateGradient", "the ledger", "to be unused before it moves to a file", got, remedy)
        if self._ledger.path is not None:
            self._ledger.close()
        ledger = record if isinstance(record, Ledger) else Ledger(record)
        try:
            ledger.bind(self._facts)
        except BaseException:
            ledger.close()
            raise
        Parts.checks.note_training(self._model, ledger)
        self._ledger = ledger

    def epsilon(self, *, steps: int) -> float:
        """Return the epsilon of `steps` steps; infinite if a part declares that it is not public.

        Raises:
            PrivacyError: as plan.epsilon.
        """
        is_planned = self._release == self._plan.release
        return self._plan.epsilon(steps=steps) if is_planned else math.inf

    @property
    def simulated_epsilon(self) -> float | None:
        """The epsilon of all steps of the plan that this training simulates; see PrivacyPlan.scaled.

        None if it simulates no plan, or the plan has no delta or batches of fixed size; infinite if a part declares
        that it is not public. It is not the epsilon of this training, which is infinite.
        """
        simulated = self._plan.simulates
        if simulated is None or simulated.delta is None:
            return None
        return math.inf if self._not_private else simulated.epsilon()

    # Compiled loops take it as it is. torch.compiler.disable would do the same, but import the compiler here, for 2 s.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def __call__(self, batch: Batch) -> NoisyGradient:
        """Release the gradient of one batch.

        Args:
            batch: from `plan.batches(dataset)`; each at most once. May hold no examples.
        Returns:
            The averaged noisy gradient by parameter name, and the standard deviation of its noise.
        Raises:
            SamplingError: it is not a Batch, or its draw was charged before; or a number that decides its cost, its
                seed or its process is not that of the plan; or it comes out of the order that noise with memory needs.
                A batch of another plan that agrees in all of these is accepted, and costs the same.
            BudgetExceededError: the plan's steps are spent.
            PrivacyError: the loss is wrong (first batch of a set of trained parameters), or the ledger cannot be
                written.
        Privacy:
            Each call is charged once, on the ledger, before the gradient is returned. An empty batch gets noise and a
            charge like any other. If the call raises before the charge, nothing was released and nothing was charged.
            If it raises after the charge, the step stays charged. The charge comes with the noise. Errors of a raw
            observer come after the charge, and so do some errors of the network between processes.
        """
        processes = self._processes
        weights = processes.fingerprint(self._model)
        structure = self._structure
        with _TURN, processes.opened(self._model), advanced(structure.follow(), keep=True):
            parameters = structure.trained
            with processes.all_succeed():
                self._admit(batch, parameters)
            step = batch.sampling.step if self._follows_draws else self._step
            try:
                begins = self._begin_noise(batch.sampling)
                # The noise is made for the C, the record and the groups of the first process.
                mine = {"C": self.max_grad_norm, "releases in the ledger": self._ledger.releases, "the draw": begins}
                keys = self._dropout_stream.key(step, 40), self._noise_stream.shared_key if self._is_sharded else b""
                (key, noise_key), first = processes.broadcast_object((keys, mine))
                with processes.all_succeed(step=step, weights=weights):
                    clipped, clipping = self._clipped_sum(batch, step, key, parameters)
                    self._require_same(first, mine, _ALIKE)  # after the sum of shards, in which all must take part
                    if self._state.unknown:  # such as a statistic that is fitted after a warm-up
                        Parts.checks.require_no_memory(self._model, self._loss_fn, batch.examples)
                clipped = replace(clipped, values=processes.reduce(clipped.values))
                raw_mean = dict[str, Tensor]()
                if self._observers:  # a copy: the noise is added in place
                    raw_mean = {name: value / self._plan.divisor for name, value in clipped.values.items()}
                with processes.all_succeed():
                    gradient = self._add_noise(batch, clipped, step, parameters, noise_key)
                gradient = processes.broadcast(gradient)
                digest = None if self._plan.seed is None else processes.broadcast_object(_digest(gradient))
                if processes.rank > 0:
                    self._charge(batch, digest)
                gradient = replace(gradient, tensors=processes.as_shards(gradient.tensors, clipped.places))
                self._step = batch.sampling.step + 1 if self._follows_draws else self._step + 1
                if begins is not None:
                    self._charged_by = batch.sampling.stream
                gradient, raw_shares = self._with_distribution(gradient, raw_mean.pop(NORMS, None))
            except BaseException:
                # A traceback may still show the values. Without a seed, the same noise is not drawn again.
                self._make_streams()
                raise
            self._contribution.released(gradient)
            self._state.end_step(structure)
            if clipping.raw_nonfinite_examples:
                self.raw_nonfinite_examples += clipping.raw_nonfinite_examples
            for observe in self._observers.values():
                observe(RawStep(step, raw_mean, clipping, gradient, raw_shares))
            if self._filter is not None:
                gradient = self._filter.moved_on(gradient, in_place=not self._observers)
        return replace(gradient, side_information=self._facts["side_information"] or "")

    def _admit(self, batch: Batch, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise PrivacyError if this step is not allowed, before it is computed."""
        require_all_processes("PrivateGradient", self._processes)  # the process group may have been created since
        self._require_drawn_as_planned(batch)
        # A draw is used once. Under a seed, a release that was lost may be computed again.
        repeatable = self._plan.seed is not None and batch.sampling.step >= self._step
        self._ledger.admit(batch.sampling.draw, limit=self._plan.steps, repeatable=repeatable)
        if self._adaptive is not None:  # a rule of the user's may choose any C
            require_max_grad_norm("PrivateGradient", self._adaptive.max_grad_norm, self._plan.noise_multiplier)
        Parts.checks.require_supported(self._structure)
        if self._ledger.releases == 0 and self._plan.seed is None:
            Parts.checks.warn_if_trained(self._model, self._ledger)
        self._structure.once(Parts.checks.note_training, self._ledger)  # a part may have been unfrozen or added
        found = self._structure.once(_names_of), Parts.checks.configuration(self._structure)
        if self._filter is not None:
            self._filter.require_shapes({name: parameter.shape for name, parameter in parameters.items()})
        if self._state.begin_step(self._structure):
            self._due = True
        if batch.size > 0 and (self._due or found not in self._checked):
            with parameters_kept(self._structure):
                randomness = Parts.checks.try_batch(
                    self._model, self._loss_fn, batch.examples, together=self._engine.batches_examples
                )
            self._shares_draws = randomness.shared
            self._engine.check_again(randomness)
            self._checked.append(found)
            self._due = False

    def _clipped_sum(
        self, batch: Batch, step: int, key: bytes, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[ClippedSum, RawClipping]:
        """Return the clipped sum of this process's examples, and the PRIVATE norms and factors.

        Random draws follow the step's secret key, of 40 bytes. Each process draws its own masks of dropout.
        """
        plan, contribution = self._plan, self._contribution
        self._engine.begin_step()
        transform = self._transform(batch, step, int.from_bytes(key[32:]) >> 1, parameters)
        scales = require_scales_only(transform) if contribution.applies_scales else transform.inverse_scales
        mixed = bool(transform.shift) or transform.keep < 1
        raw_mean = partial(self._raw_mean, batch, "perturb")
        own_key = derived_key(key[:32], str(self._processes.rank))

        while True:
            accumulator = ClippingAccumulator(
                like=parameters,
                clip=self._clip,
                max_grad_norm=self.max_grad_norm,
                inverse_scales={} if contribution.applies_scales else scales,
                grouped=plan.group_size > 1,
                expected_size=plan.divisor,
                statistic=self._statistic,
                shards=self._processes.sums(parameters, plan.divisor),
            )
            done = 0
            with (
                # In this case, all examples again in one way, in all processes: see `engine.factored.Fallback`.
                self._processes.attempt(StepChangedError) as attempt,
                parameters_kept(self._structure),
                secret_draws(own_key),
                contribution.at(step, parameters, raw_mean),
            ):
                if self._compiled is not None and (transform.input_maps or mixed):
                    self._compiled = _not_compiled(f"the transform of {self._precondition!r}")
                for rows, chunk in self._chunks(batch, step, scales, accumulator):
                    if chunk is not None:  # a compiled function has not added it
                        self._require_rows(rows, chunk, parameters)
                        if transform.input_maps:
                            chunk = Parts.input_maps.with_mapped_inputs(chunk, transform.input_maps)
                        chunk = chunk or without_gradient(rows, parameters)
                        chunk = shifted(chunk, transform.keep, transform.shift, parameters) if mixed else chunk
                        accumulator.add(chunk, self._padded(batch, done, rows))
                    if self._shares_draws and (done > 0 or self._processes.count > 1):
                        self._require_own_draws()
                    done += rows
                    del chunk  # before the next one is computed: only one is in memory
            if attempt.is_whole:
                return accumulator.result()

    def _chunks(
        self, batch: Batch, step: int, inverse_scales: Mapping[str, Tensor], accumulator: ClippingAccumulator
    ) -> Iterable[tuple[int, Mapping[str, Factor] | None]]:
        """Return the contributions of the batch in chunks, each with its number of rows; None for one that is added."""
        if batch.size == 0:
            return []
        contribution, engine = self._contribution, self._engine
        usual_size = self._plan.usual_batch_size(self._processes.count)
        size = self._parts.microbatch_size or contribution.microbatch_size(engine, batch.examples, usual_size)
        if self._shares_draws and size >= usual_size:
            size = max(size, batch.size)
        if self._compiled is not None:
            return self._compiled_chunks(batch, size, accumulator)
        if self._plan.group_size == 1:
            return contribution.chunks(engine, batch.examples, size, step, inverse_scales)
        return self._group_chunks(batch, step, size, inverse_scales)

    def _compiled_chunks(
        self, batch: Batch, size: int, accumulator: ClippingAccumulator
    ) -> Iterator[tuple[int, Mapping[str, Factor] | None]]:
        """Add the chunks that a compiled function computes, and yield None for them; yield the others."""
        for start in range(0, count_examples(batch.examples), size):
            part = part_of(batch.examples, slice(start, start + size))
            rows = count_examples(part)
            if self._compiled is not None and (rows == size or self._plan.max_batch_size is not None):
                yield rows, self._compiled(part, accumulator, self._padded(batch, start, rows))
            else:  # the rest of a Poisson batch, of any size
                yield rows, self._engine(part)

    def _padded(self, batch: Batch, start: int, rows: int) -> int | None:
        """Return how many of the rows from `start` are padding; None if the plan has none."""
        return None if self._plan.max_batch_size is None else rows - max(0, min(batch.size - start, rows))

    def _require_own_draws(self) -> None:
        """Raise PrivacyError if examples share random numbers, for a batch in several microbatches or processes."""
        # One example more would move others to the next microbatch, and so to other numbers. Where the engine computes
        # the whole model for each example by itself, no examples share them.
        if any(use.unit or use.way != "whole" for use in self._engine.uses().values()):
            condition = "to come with one microbatch for a batch, in one process"
            # The rows of the last microbatch would say how many examples were drawn, which is private.
            got = "several microbatches" if self._processes.count == 1 else f"{self._processes.count} processes"
            remedy = f'switch layerdrop off, or give engine="vmap" or microbatch_size={self._plan.usual_batch_size()}'
            raise expected("PrivateGradient", "random numbers that examples share", condition, got, remedy)

    def _group_chunks(
        self, batch: Batch, step: int, size: int, inverse_scales: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, Mapping[str, Factor]]]:
        """Yield the means over random groups of examples in chunks, each with its number of groups."""
        groups = group_of(self._group_stream.uint64(step, batch.size), self._plan.divisor)
        for group_size, part in split_by_group(batch.examples, groups, size):
            rows = self._contribution.gradients(self._engine, part, step, inverse_scales)
            self._require_rows(count_examples(part), rows, self._structure.trained)
            means = group_means(rows, group_size)
            del rows  # before the next part is computed
            yield count_examples(part) // group_size, means
            del means

    def _require_rows(self, rows: int, chunk: Mapping[str, Factor], parameters: Mapping[str, Tensor]) -> None:
        """Raise PrivacyError unless a chunk has one row per example: with two, the sum could change by 2C."""
        for name, factor in chunk.items():
            if name not in parameters or (factor.examples, factor.shape) != (rows, parameters[name].shape):
                condition = "to have one row per example, shaped like the parameter"
                got = f"rows of shape {tuple(factor.shape)}" if name in parameters else f"the unknown name {name!r}"
                raise expected(type(self._contribution).__name__, f"gradients of {name!r}", condition, got)

    def _add_noise(
        self, batch: Batch, clipped: ClippedSum, step: int, parameters: Mapping[str, Tensor], key: bytes
    ) -> NoisyGradient:
        """Return this process's part of the released gradient; the first one charges it.

        Other processes than the first return their shards, and memory to receive the values that are whole. They draw
        by the `key` of the first one's stream.
        """
        is_first, stream = self._processes.rank == 0, self._noise_stream
        if not is_first and not clipped.places:
            gradient = _rounded(NoisyGradient(clipped.values, noise_std=0.0), parameters)
            return gradient if self._recursion is None else self._recursion.released(gradient, step)
        own = clipped
        if not is_first:
            stream = Stream(key)
            whole = {name: value for name, value in clipped.values.items() if name not in clipped.places}
            own = replace(
                clipped,
                values={**clipped.values, **{name: value.new_empty(0) for name, value in whole.items()}},
                places={**clipped.places, **{name: Place(0, value.numel()) for name, value in whole.items()}},
            )
        if step <= self._drawn and self._plan.seed is None:
            raise expected("PrivateGradient", "step", f"to be above {self._drawn}, whose noise was drawn", step)
        self._drawn = step
        # `add_noise` begins this charge once nothing can refuse any more, and ends once its line is on disk. So nothing
        # leaves before; and if nothing leaves, the step stays charged, which is the safe side. Under a research seed
        # the line has a digest, by which to recognize the release, and so comes after it.
        seeded = self._plan.seed is not None
        numbers = 0 if self._ledger.path is None else sum(value.numel() for value in clipped.values.values())
        is_charged = seeded or not is_first
        gradient = add_noise(
            own,
            noise_multiplier=self._plan.noise_multiplier,
            divisor=self._plan.divisor,
            stream=stream,
            step=step,
            on_grid=self._plan.noise_on_grid,
            recursion=self._recursion,
            charging=None if is_charged else meanwhile(partial(self._charge, batch), numbers=numbers),
            process=self._processes.rank,
        )
        if not is_first:
            gradient = replace(
                gradient, tensors={**clipped.values, **{name: gradient[name] for name in clipped.places}}
            )
        gradient = _rounded(gradient, parameters)
        if seeded and is_first:
            self._charge(batch, _digest(gradient))
        return gradient

    def _with_distribution(
        self, gradient: NoisyGradient, raw_mean: Tensor | None
    ) -> tuple[NoisyGradient, Tensor | None]:
        """Move C; return the gradient apart from its distribution of norms, and the shares without noise, if given."""
        if self._statistic is None:
            return gradient, None
        tensors, noise_std, bound = dict(gradient), cast(float, gradient.noise_std), self.max_grad_norm
        found = self._statistic.distribution(tensors.pop(NORMS).cpu(), noise_std, bound)
        raw = None if raw_mean is None else self._statistic.distribution(raw_mean.cpu(), 0.0, bound).shares
        if self._adaptive is not None:
            self._adaptive.update(found)
        return replace(gradient, tensors=tensors, norm_distribution=found), raw

    def _charge(self, batch: Batch, digest: str | None = None) -> None:
        """Charge a step to the ledger."""
        # Only a research seed can draw the same noise again, so only then can a release be recognized: by the digest.
        bound = None if self._adaptive is None else self.max_grad_norm
        draw, limit = batch.sampling.draw, self._plan.steps
        self._ledger.charge(self._release, draw=draw, limit=limit, digest=digest, max_grad_norm=bound)
        steps, key = self._release.epoch_steps, self._ledger.epoch_key
        if steps is not None and key is not None and (batch.sampling.step + 1) % steps == 0:
            forget_epochs(key, (batch.sampling.step + 1) // steps)

    @property
    def _follows_draws(self) -> bool:
        """Whether a step has the index of its draw. Otherwise the steps of all draws are counted."""
        # Under a seed, a draw has a fixed position in the streams. Noise with memory follows the steps of the groups.
        return self._plan.seed is not None or self._plan.correlation is not None

    def _begin_noise(self, drawn: Sampling) -> _Begins:
        """Begin noise with memory again if another sampler drew the batch, because its groups are others.

        Returns the step, whether noise begins with it, and whether its groups are those of the last charged step.
        """
        if self._plan.correlation is None:
            return None
        begins = drawn.stream != self._drawn_by
        if begins:
            self._make_streams()
            start = 0 if self._plan.seed is not None else drawn.step
            self._recursion = Recursion(self._plan.correlation, start, self._noise_stream.public_id)
            self._drawn_by = drawn.stream
        return drawn.step, begins, drawn.stream == self._charged_by

    def _require_shared(self, facts: Mapping[str, Any], ledger: object) -> None:
        """Raise PrivacyError unless all processes have the same plan and parts, and can train together."""
        plan = self._plan
        parts = {"precondition": self._precondition, "filter": self._filter}
        own = {**facts, "steps": plan.steps, "seed": plan.seed, **{name: repr(part) for name, part in parts.items()}}
        first, is_given = self._processes.broadcast_object((own, ledger is not None))
        with self._processes.all_succeed():
            if isinstance(ledger, str | os.PathLike) and not is_given:
                raise expected("PrivateGradient", "ledger", "to be given in the first process", "a path in this one")
            self._require_same(first, own, "build one plan, and use it with the same arguments in every process")
            if plan.group_size > 1 or self._not_private:
                condition = "to train without groups and without parts that are NOT private"
                got = f"group_size {plan.group_size} and {sorted(self._not_private)}"
                raise expected("PrivateGradient", "several processes", condition, got, "train in one process")
            if self._is_sharded:
                self._parts.require_blocks()

    def _require_same(self, first: Mapping[str, Any], own: Mapping[str, Any], remedy: str) -> None:
        """Raise PrivacyError unless this process has the same values as the first one."""
        if first is own:  # of the only process
            return
        if differing := [name for name, value in own.items() if value != first.get(name)]:
            condition = f"to be the same in all processes ({_named(first, differing)})"
            got = f"{_named(own, differing)} in process {self._processes.rank}"
            raise expected("PrivateGradient", " and ".join(differing), condition, got, remedy)

    def _raw_mean(self, batch: Batch, asked_by: str) -> dict[str, Tensor]:
        """Return the mean gradient of the batch, for research only. NOT private."""
        if asked_by not in self._not_private:
            condition = "to use the raw mean only if its class has is_public = False"
            raise expected("PrivateGradient", asked_by, condition, "is_public = True")
        if batch.size == 0:
            return {name: torch.zeros_like(parameter) for name, parameter in self._structure.trained.items()}
        sums = gradients(self._model, self._loss_fn, part_of(batch.examples, slice(batch.size)))
        return {name: value / batch.size for name, value in sums.items()}

    def _transform(self, batch: Batch, step: int, seed: int, parameters: Mapping[str, Tensor]) -> Transform:
        """Return the preconditioner's transform of this step, after it was checked."""
        if self._precondition is None:
            return Transform()
        raw_mean = partial(self._raw_mean, batch, "precondition")
        with seeded(seed):
            transform = self._precondition.transform(
                step,
                epoch_steps=self._plan.epoch_steps,
                # Scales of a local training divide its gradients; the noise is in the units of its update.
                noise_std=0.0 if self._contribution.applies_scales else self._noise_std(),
                parameters=parameters,
                raw_mean=raw_mean,
            )
        if transform is not self._known:
            require_transform(transform, parameters)
            self._known = transform
        return transform

    def _noise_std(self) -> float:
        """Return the noise's standard deviation at the current C, without the grid; of the last step if correlated."""
        bound = self.max_grad_norm if self._statistic is None else self._statistic.sensitivity(self.max_grad_norm)
        return self._plan.noise_std * bound / self._plan.max_grad_norm if self._plan.noise_std > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the next step's index, and the state of its parts.

        It holds no key, and no value from before the noise (except for a preconditioner that is NOT private).
        """
        state: dict[str, Any] = {"step": self._step, "plan": self._kind_of_plan()}
        for name, part in self._parts.stateful().items():
            state[name] = {"made_by": self._described(part), **part.state_dict()}
        return state | Parts.checks.moves_of(self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of the state. Without a research seed the streams are new, so no noise repeats.

        The guarantee rests on two checks. A state of a simulation, or of a run with a research seed, is refused under a
        plan without. A state with steps that the ledger has not charged is refused, because epsilon would not count
        them.
        """
        function, parts = "PrivateGradient.load_state_dict", self._parts.stateful()
        require_integer(function, "step", state["step"], 0)
        if state.get("plan") != (kind := self._kind_of_plan()):
            condition, remedy = f"to be of a plan with {kind}", "resume under the plan that the state was saved under"
            raise expected(function, "state", condition, described(state.get("plan")), remedy)
        # An epoch that was begun is charged whole.
        if state["step"] > whole_epochs(self._ledger.next_step, self._release.epoch_steps or 1):
            condition, got = f"to hold the {state['step']} steps of the state", f"{self._ledger.releases} releases"
            raise expected(function, "the ledger", condition, got, "give the ledger of the run that saved the state")
        for name in parts.keys() | state.keys() - {"step", "plan", "moved_by"}:
            ours, theirs = self._described(parts.get(name)), state.get(name, {}).get("made_by", "None")
            if theirs != ours:
                remedy = "resume with the same perturb, precondition, adaptive_clip and filter"
                raise expected(function, f"the state of {name}", f"to be of {ours}", theirs, remedy)
        Parts.checks.note_moves(self._model, state.get("moved_by", ""))
        with _TURN:
            self._make_streams()  # before anything can fail: a step that is taken again must have other noise
            for name, part in parts.items():
                if name in state:
                    part.load_state_dict(state[name])
            self._step = state["step"]

    def _kind_of_plan(self) -> dict[str, Any]:
        """Return what decides whether the releases of this plan are private at all."""
        return {"research_seed": self._plan.seed is not None, "simulates": self._facts["simulates"]}

    def _described(self, part: Stateful | None) -> str:
        """Return a part in words; None gives "None"."""
        return part.described(self._plan.steps) if isinstance(part, Contribution) else repr(part)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse new values of arguments, which would have no effect."""
        if name != "raw_nonfinite_examples" and not name.startswith("_"):
            remedy = "construct a new PrivateGradient with it, before the first step"
            raise expected("PrivateGradient", name, "to stay as it is", described(value), remedy)
        super().__setattr__(name, value)

    def __reduce__(self) -> str:
        """Refuse copies and pickles, because two copies of the stream would draw the same noise."""
        return self._noise_stream.__reduce__()

    def _make_streams(self) -> None:
        """Make the random streams: from the research seed, or each time from new entropy."""
        source = RandomSource(self._plan.seed)
        self._noise_stream = source.stream("noise")
        self._dropout_stream = source.stream("dropout")
        self._group_stream = source.stream("groups")
        self._recursion: Recursion | None = None
        self._drawn = -1  # the last step whose noise was drawn from this stream
        self._drawn_by = ""  # the stream whose groups the noise with memory follows

    def _require_drawn_as_planned(self, batch: object) -> None:
        """Raise SamplingError unless this plan drew the batch for this process, with one row per example."""

        def refusal(condition: str, got: object, remedy: str = "") -> Exception:
            return expected("PrivateGradient", "batch", condition, got, remedy, SamplingError)

        if not isinstance(batch, Batch):
            raise refusal("to be what plan.batches(dataset) yields, which knows how it was drawn", type(batch).__name__)
        plan, drawn, planned = self._plan, batch.sampling, self._planned
        held = vars(drawn)
        if other := [name for name, value in planned.items() if held[name] != value]:
            remedy = "take the batch from plan.batches of the same plan, with the same processes"
            raise refusal(f"to be drawn by the plan's {_named(planned, other)}", _named(held, other), remedy)
        if plan.correlation is not None and drawn.stream == self._drawn_by and drawn.step < self._step:
            raise refusal(f"to be of step {self._step} or later, which noise with memory follows", drawn.step)
        if count_examples(batch.examples) != (plan.max_batch_size or batch.size):  # the numbers are private
            raise refusal("to hold one row per example", "a different number of rows")


def _not_compiled(part: str) -> None:
    warnings.warn(f"PrivateGradient computes without a compiled function, which does not take {part}", stacklevel=4)


def _names_of(structure: Structure) -> tuple[str, ...]:
    """Return the names of the trained parameters."""
    return tuple(structure.trained)


def _named(values: Mapping[str, object], names: Iterable[str]) -> str:
    """Return some values with their names, for an error."""
    return " and ".join(f"{name} {values[name]}" for name in names)


def _rounded(gradient: NoisyGradient, parameters: Mapping[str, Tensor]) -> NoisyGradient:
    """Return a gradient in float32, or in float64 for float64 parameters, as the optimizers need. Post-processing."""
    wide = {name: value for name, value in gradient.tensors.items() if name != NORMS}
    dtypes = {name: torch.promote_types(parameters[name].dtype, torch.float32) for name in wide}
    rounded = {name: value.to(dtypes[name]) for name, value in wide.items() if value.dtype != dtypes[name]}
    return replace(gradient, tensors={**gradient.tensors, **rounded}) if rounded else gradient


def _digest(values: Mapping[str, Tensor]) -> str:
    """Return a hash of released values. Post-processing."""
    state = hashlib.sha256()  # processors have instructions for it
    for name, value in values.items():
        state.update(name.encode())
        state.update(value.detach().cpu().flatten().numpy().data)
    return state.hexdigest()[:32]
