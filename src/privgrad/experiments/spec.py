"""A TOML file that describes one experiment: its methods, their candidates, and the whole, a Spec.

`load_spec` makes it; `build`, `runner`, `audit_spec`, the report and `papers` read it. The privacy guarantee of a
training is that of its plan, which `Spec.plan` makes. It does not rest on the rest of this file.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from privgrad import optim
from privgrad.correlation import Banded
from privgrad.errors import expected
from privgrad.experiments.tables import (
    AdaptiveClipTable,
    DataTable,
    FeaturesTable,
    FilterTable,
    Grid,
    LocalTable,
    ModelTable,
    PerturbTable,
    PreconditionTable,
    PrivacyTable,
    PublicTable,
    RunTable,
    ScheduleTable,
    Table,
    TuningTable,
    WarmStartTable,
)
from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.gradient.local_training import LocalUpdate
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.optim.base import NamedParameters, constructor_arguments
from privgrad.plan import PrivacyPlan
from privgrad.schedule import Schedule
from privgrad.types import PrivacyUnit


class Candidate(NamedTuple):
    """One choice of a method's tuned values.

    Either lr or noise_step is None. The radius is None for a method without perturbation; local_lr is None where users
    do not train locally. `own` holds the values of `tune`, as pairs (option, value).
    """

    max_grad_norm: float
    lr: float | None = None
    radius: float | None = None
    local_lr: float | None = None
    noise_step: float | None = None
    own: tuple[tuple[str, Any], ...] = ()


class MethodTable(Table):
    """A table of [[methods]]: one optimizer with its options.

    `lr` or `noise_step` is a number or the method's own grid; the default is the grid of [tuning]. `tune` has a list of
    values for options of the method: of the optimizer, or, after "precondition.", "adaptive_clip." or "filter.", of
    that table.
    `max_grad_norm` is a number or a grid; the default is the value of [privacy]. `group_size` examples are averaged
    before they are clipped; above 1 the sensitivity is 2C. `bands` is the number of bands of noise with memory, or
    "auto"; see noise.Banded. `assumed_noise_std` replaces the noise scale that the
    optimizer is given, for ablations; it may be wrong. `non_private` neither clips nor adds noise. `local` is given if
    the privacy unit is a user; the optimizer is then the server's. `schedule` replaces that of [run]. `model` and
    `features` replace those tables; features = false trains on the inputs as loaded. `norm_bins`, `adaptive_clip` and
    `filter` are those of PrivateGradient.
    """

    name: str = Field(min_length=1)
    optimizer: str  # of optim.OPTIMIZERS
    lr: Annotated[float, Field(gt=0)] | Grid | None = None
    noise_step: Annotated[float, Field(gt=0)] | Grid | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    max_grad_norm: Annotated[float, Field(gt=0)] | Grid | None = None
    assumed_noise_std: float | None = Field(default=None, ge=0)
    group_size: int = Field(default=1, ge=1)
    bands: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None
    perturb: PerturbTable | None = None
    norm_bins: Any = None  # `check_methods` calls the check of PrivateGradient, whose message says more than pydantic's
    adaptive_clip: AdaptiveClipTable | None = None
    filter: FilterTable | None = None
    local: LocalTable | None = None
    precondition: PreconditionTable | None = None
    public: PublicTable = PublicTable()
    warm_start: WarmStartTable | None = None
    schedule: ScheduleTable | None = None
    model: ModelTable | None = None
    features: FeaturesTable | Literal[False] | None = None
    non_private: bool = False

    @property
    def has_fixed_rate(self) -> bool:
        """Return whether the method has a single learning rate or noise step, so that no grid of [tuning] applies.

        `Spec.is_tuned` counts a method without one as tuned.
        """
        return isinstance(self.lr, float | int) or isinstance(self.noise_step, float | int)

    @property
    def has_noise_step(self) -> bool:
        """Return whether the method's rate can be given as a noise step. `Spec.grid` and `load_spec` read it.

        An optimizer with an assumed noise scale would divide by that one, and so has none.
        """
        optimizer = optim.OPTIMIZERS[self.optimizer]
        return not self.non_private and self.assumed_noise_std is None and optimizer.has_noise_step()

    def with_own(self, candidate: Candidate) -> "MethodTable":
        """Return the method with the candidate's values of `tune` among its options.

        `runner`, `audit_spec`, `papers.stops` and `load_spec` call it.
        """
        changes: dict[str, Any] = {"options": dict(self.options)}
        for name, value in candidate.own:
            part, _, option = name.rpartition(".")
            if part:
                table = changes.get(part) or getattr(self, part)
                changes[part] = table.model_copy(update={"options": table.options | {option: value}})
            else:
                changes["options"][option] = value
        return self.model_copy(update=changes)

    @property
    def needs_public(self) -> bool:
        """Return whether the method computes gradients on public examples or starts from them.

        `build` and `load_spec` read it.
        """
        rule = self.precondition
        by_rule = rule is not None and (rule.rule.startswith("public") or (rule.rule == "inputs" and not rule.public))
        by_optimizer = "public" in constructor_arguments(optim.OPTIMIZERS[self.optimizer])
        return by_rule or self.warm_start is not None or by_optimizer

    def perturbation(self, candidate: Candidate, unit: PrivacyUnit = "example") -> Contribution | None:
        """Return the perturbation of one candidate, or its users' local training.

        None means gradients at the current weights. With unit "user" and without local training, each row holds all
        data of one person; `build.make_data` checks that. `runner`, `audit_spec` and `papers` call it.
        """
        if self.local is not None and candidate.local_lr is not None:
            return LocalUpdate(candidate.local_lr, batch_size=self.local.batch_size, epochs=self.local.epochs)
        if unit == "user":
            return SampleGradient("user")
        if self.filter is not None and self.filter.point is not None:
            return self.filter.point
        return None if self.perturb is None or candidate.radius is None else self.perturb.make(candidate.radius)

    @property
    def part_tables(self) -> dict[str, AdaptiveClipTable | FilterTable]:
        """Return the given tables of the rule for C and of the filter, by name. `check_methods` reads it."""
        tables = {"adaptive_clip": self.adaptive_clip, "filter": self.filter}
        return {part: table for part, table in tables.items() if table is not None}

    def parts(self) -> dict[str, Any]:
        """Return the arguments of PrivateGradient that follow its releases: statistic, rule for C, filter.

        `one_training` passes them, and `check_methods` makes them once.
        """
        return {"norm_bins": self.norm_bins, **{name: table.make() for name, table in self.part_tables.items()}}

    def make(
        self,
        named_parameters: NamedParameters,
        candidate: Candidate,
        *,
        public: PublicGradient | None = None,
        steps: int = 1,
    ) -> optim.PrivateOptimizer:
        """Return the optimizer over a model's parameters, at the candidate's rate. See `with_own` for its options.

        `runner` and `papers.stops` call it for a training, `load_spec` to check the options.
        """
        kind: Callable[..., optim.PrivateOptimizer] = optim.OPTIMIZERS[self.optimizer]
        given = {"horizon": steps, "public": public or dict}
        extra: dict[str, Any] = {name: value for name, value in given.items() if name in constructor_arguments(kind)}
        rate: dict[str, Any] = {"lr": candidate.lr, "noise_step": candidate.noise_step}
        optimizer = kind(named_parameters, **{k: v for k, v in rate.items() if v is not None}, **extra, **self.options)
        if (assumed := self.assumed_noise_std) is not None:

            def assume(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                return args, kwargs | {"grad": replace(kwargs["grad"], noise_std=assumed)}

            optimizer.register_step_pre_hook(assume)
        return optimizer


class Spec(Table):
    """A checked experiment: the whole TOML file."""

    title: str
    data: DataTable
    model: ModelTable
    features: FeaturesTable | None = None
    privacy: PrivacyTable
    methods: list[MethodTable] = Field(min_length=1)
    tuning: TuningTable | None = None
    run: RunTable = RunTable()
    paper: dict[str, Any] = Field(default_factory=dict)

    def grid(self, method: MethodTable) -> list[Candidate]:
        """Return the candidates of a method's first grid; one candidate if nothing is tuned.

        `runner`, `load_spec`, `audit_spec` and `papers` call it.
        """
        by_noise = self.tuning.noise_steps if self.tuning and method.has_noise_step else None
        steps = method.noise_step or (by_noise if method.lr is None else None)
        rates = method.lr or ((self.tuning.lr if self.tuning else None) if steps is None else None)
        if steps is None and rates is None:
            return []
        own = [[(name, plain(value)) for value in values] for name, values in method.tune.items()]
        norms = method.max_grad_norm or self.privacy.max_grad_norm
        radii = None if method.perturb is None else method.perturb.radius
        local = None if method.local is None else method.local.lr

        def each(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        grids = (*map(each, (norms, rates, radii, local, steps)), list(itertools.product(*own)))
        return [Candidate(*values) for values in itertools.product(*grids)]

    @property
    def tuning_scale(self) -> int:
        """Return K, by which tuning divides the batches of final trainings. `runner` and the report read it."""
        return 1 if self.tuning is None else self.tuning.simulate

    def of(self, method: MethodTable) -> "Spec":
        """Return the spec with a method's own model and features. `featuring` calls it."""
        features = self.features if method.features is None else method.features or None
        return self.model_copy(update={"model": method.model or self.model, "features": features})

    def shares_grid(self, method: MethodTable) -> bool:
        """Return whether a method is tuned together with the other ones, with the same number of trainings.

        These are the private methods without a rate of their own, if [tuning] gives noise_steps; methods whose
        optimizer has no noise step belong to them, with their own grid of learning rates. `runner` and `load_spec` call
        it.
        """
        common = self.tuning is not None and self.tuning.noise_steps is not None
        own_steps = method.noise_step is not None or (method.lr is not None and method.has_noise_step)
        return common and not method.non_private and not own_steps and not method.has_fixed_rate

    def schedule_of(self, method: MethodTable) -> Schedule | None:
        """Return the schedule of a method's learning rate; None if neither the method nor [run] gives one.

        `runner` and `report.metadata` call it.
        """
        table = method.schedule or self.run.schedule
        return None if table is None else Schedule(table.decay, table.warmup)

    def is_tuned(self, method: MethodTable) -> bool:
        """Return whether a method has several candidates, or may get more by an extended grid.

        `runner`, `load_spec` and `papers.stops` call it.
        """
        return not method.has_fixed_rate or len(self.grid(method)) > 1

    def plan(
        self, seed: int | None, method: MethodTable | None = None, max_grad_norm: float | None = None
    ) -> PrivacyPlan:
        """Return the plan of the experiment.

        The plan of a `non_private` method has no noise and an infinite clipping norm: its epsilon is infinite. With
        `simulate` in [privacy], the plan is scaled, and epsilon is infinite too.
        `runner`, `audit_spec`, `papers.stops` and `report.metadata` call it.

        Args:
            seed: a research seed, or None for noise from the operating system's entropy.
            method: the method that trains; None leaves the plan without a method's group size and bands.
            max_grad_norm: the method's own clipping norm; None takes that of [privacy].
        Raises:
            PrivacyError: [privacy] gives neither or both of target_epsilon and noise_multiplier, or a number is wrong.
        """
        bands = None if method is None or method.non_private else method.bands
        plan = self._plan(seed, max_grad_norm or self.privacy.max_grad_norm, bands)
        if method is not None and method.non_private:
            no_noise = {"noise_multiplier": 0.0, "noise_on_grid": False}
            plan = replace(plan, **no_noise, max_grad_norm=math.inf, target_epsilon=None)
        elif method is not None:
            plan = replace(plan, group_size=method.group_size)
        return plan.scaled(1 / self.privacy.simulate)

    def tuning_plan(self, seed: int | None, method: MethodTable, max_grad_norm: float) -> PrivacyPlan:
        """Return the plan of a method's trainings in tuning: that of `plan`, or a simulation of it."""
        plan = self.plan(seed, method, max_grad_norm)
        return plan if self.tuning_scale == 1 else plan.scaled(1 / self.tuning_scale)

    def _plan(self, seed: int | None, max_grad_norm: float, bands: int | Literal["auto"] | None) -> PrivacyPlan:
        """Return the plan of [privacy] with one clipping norm and a number of bands."""
        numbers: dict[str, Any] = self.privacy.model_dump(exclude_none=True, exclude={"simulate", "budget"})
        numbers["max_grad_norm"] = max_grad_norm
        if self.privacy.total_epsilon is not None:
            remedy = "run `privgrad compare`, which divides it; or give target_epsilon, of one training"
            raise expected("Spec.plan", "privacy.total_epsilon", "to be divided", self.privacy.total_epsilon, remedy)
        if (self.privacy.target_epsilon is None) == (self.privacy.noise_multiplier is None):
            name = "exactly one of privacy.target_epsilon and privacy.noise_multiplier"
            got = f"{self.privacy.target_epsilon} and {self.privacy.noise_multiplier}"
            remedy = "give one of the two, or total_epsilon for a private comparison"
            raise expected("load_spec", name, "to be given", got, remedy)
        correlation = Banded(bands) if isinstance(bands, int) else bands
        if self.privacy.noise_multiplier is None:
            return PrivacyPlan.for_budget(**numbers, seed=seed, correlation=correlation)
        if correlation == "auto":
            remedy = "give target_epsilon in its place, or a number of bands"
            got, condition = self.privacy.noise_multiplier, 'to be absent for bands = "auto"'
            raise expected("load_spec", "privacy.noise_multiplier", condition, got, remedy)
        rate = self.privacy.expected_batch_size / self.privacy.num_examples
        return PrivacyPlan(**numbers, sample_rate=rate, seed=seed, correlation=correlation)


def plain(value: Any) -> Any:
    """Return a value of `tune` that can be compared and used as a key: lists become tuples.

    `tuner.candidate_of` calls it too, because JSON turns tuples into lists.
    """
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
