"""One training of an experiment: a method with its tuned values, and its parts, made ready for `fit`.

`runner` and `paid_runner` call it; the report reads `Run`. The privacy guarantee rests on `prepare`: model and
optimizer may use private examples through PrivateGradient alone.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import torch
from torch import nn

from privgrad import optim
from privgrad.data import DataSet
from privgrad.diagnostics import ReleasedStats
from privgrad.experiments.build import (
    make_model,
    preconditioner,
    public_examples,
    public_gradient,
    warm_start,
)
from privgrad.experiments.folder import Record
from privgrad.experiments.measures import losses_for
from privgrad.experiments.records import own_text, rate_text
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tuner import candidate_of
from privgrad.heads.head import declared
from privgrad.optim.debiased import Debiased
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.training_run import FitResult
from privgrad.types import PrivacyUnit

Phase = Literal["tuning", "final"]


@dataclass(frozen=True)
class Run:
    """One training of a comparison: a method with its tuned values, a seed and a phase."""

    method: MethodTable
    candidate: Candidate
    seed: int | None
    phase: Phase

    @property
    def name(self) -> str:
        """Return the name of the folder for the run's ledger and checkpoint. `report.metadata` also reads it."""
        norm = "" if self.method.max_grad_norm is None else f"-C{self.candidate.max_grad_norm:g}"
        radius = "" if self.candidate.radius is None else f"-r{self.candidate.radius:g}"
        local = "" if self.candidate.local_lr is None else f"-local{self.candidate.local_lr:g}"
        name, own = (quote(text, safe=" ,;+=()") for text in (self.method.name, own_text(self.candidate.own)))
        own = own and f"-{own}"  # quoted, so that no two runs share a folder
        return f"{name}{norm}-{rate_text(self.candidate)}{radius}{local}{own}-{self.phase}-seed{self.seed}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key that identifies the run's record."""
        return (self.method.name, self.candidate, self.seed, self.phase)


def find_record(records: Sequence[Record], run: Run) -> Record | None:
    """Return the record of a run, or None if there is none yet. `runner` and `paid_runner` call it."""
    return next((r for r in records if (r["method"], candidate_of(r), r["seed"], r["phase"]) == run.key), None)


class Prepared(NamedTuple):
    """The parts of one training, ready for `fit`.

    Attributes:
        model, plan, private_grad, optimizer: of the training.
        method: with the candidate's values of `tune`.
        source: of the side information; None without any.
        released: statistics of the released gradients, if the method has a private distribution of norms.
    """

    model: nn.Module
    plan: PrivacyPlan
    private_grad: PrivateGradient
    optimizer: optim.PrivateOptimizer
    method: MethodTable
    source: str | None
    released: ReleasedStats | None


def prepare(spec: Spec, run: Run, data: DataSet) -> Prepared:
    """Make model, plan, optimizer and PrivateGradient of a run; nothing is charged.

    Privacy:
        A warm start and a preconditioner use public examples only.
    """
    if run.seed is not None:
        torch.manual_seed(run.seed)
    else:
        torch.seed()  # the first weights of a private run depend on nothing that came before
    make_plan = spec.tuning_plan if run.phase == "tuning" else spec.plan
    model, plan = make_model(spec, data), make_plan(run.seed, run.method, run.candidate.max_grad_norm)
    method = run.method.with_own(run.candidate)
    public = public_gradient(method, model, data)
    if method.warm_start is not None:
        warm_start(method.warm_start, model, public_examples(method, data), data)
    optimizer = method.make(model.named_parameters(), run.candidate, public=public, steps=plan.steps)
    made = preconditioner(method.precondition, public, model, data)
    # First weights, preconditioner or optimizer depend on the public examples; a preconditioner names them by itself.
    sources = [public and public.source, data.extractor and declared(data.extractor)]
    others = [source for source in sources if source and source != (made and made.source)]
    private_grad = PrivateGradient(
        model,
        losses_for(data, views=spec.run.augmentation_multiplicity, flip=spec.run.mirrored),
        plan,
        perturb=method.perturbation(run.candidate, spec.privacy.privacy_unit),
        precondition=made,
        engine=spec.run.engine,
        microbatch_size=spec.run.microbatch_size,
        memory_mb=spec.run.memory_mb,
        side_information="; ".join(others) or None,
        **method.parts(),
    )
    source = private_grad.ledger.plan_facts["side_information"]
    has_distribution = method.norm_bins is not None or method.adaptive_clip is not None
    released = ReleasedStats(private_grad) if has_distribution else None
    return Prepared(model, plan, private_grad, optimizer, method, source, released)


@contextmanager
def rows_are_units(unit: PrivacyUnit) -> Generator[None]:
    """Keep `fit` from asking whether a row holds all data of one person: `build.make_data` has checked it.

    `runner` and `paid_runner` train within it. `sources.require_count` has named a count that is far too small.
    """
    if unit == "example":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NOT PRIVATE: the plan declares")
        yield


def facts_of(run: Run, made: Prepared, data: DataSet, result: FitResult) -> Record:
    """Return the part of a run's record that every kind of comparison has: settings, privacy and speed."""
    plan = made.plan
    assert plan.delta is not None
    return {
        "method": run.method.name,
        "optimizer": made.method.optimizer,
        "options": made.method.options,
        "precondition": None if made.method.precondition is None else made.method.precondition.model_dump(),
        "adaptive_clip": None if made.method.adaptive_clip is None else made.method.adaptive_clip.model_dump(),
        "bands": plan.bands,
        "filter": None if made.method.filter is None else made.method.filter.model_dump(),
        **run.candidate._asdict(),
        "noise_step": _noise_step(run, made.optimizer),
        "seed": run.seed,
        "phase": run.phase,
        "epsilon": result.ledger.epsilon(delta=plan.delta, assume_poisson=not plan.is_covered),
        "simulates_epsilon": made.private_grad.simulated_epsilon,
        "delta": plan.delta,
        "sampling": plan.sampling,
        "score": data.score,
        "side_information": made.source,
        "released": None if made.released is None else made.released.summary(),
        "fraction_floored": made.optimizer.fraction_floored() if isinstance(made.optimizer, Debiased) else None,
        "updates": result.updates,
        "seconds": result.seconds,
        "examples_per_second": result.examples_per_second,
    }


def _noise_step(run: Run, optimizer: optim.PrivateOptimizer) -> float | None:
    """Return the noise step of a training's peak rate; None for one without it, and without noise."""
    if run.candidate.noise_step is not None:
        return run.candidate.noise_step
    if run.method.assumed_noise_std is not None:
        return None
    for group in optimizer.param_groups:  # the training is over, and a schedule may have lowered the rate
        group["lr"] = run.candidate.lr
    step = optimizer.noise_step
    return float(f"{step:.4g}") if step > 0 else None
