"""A TOML file that describes one experiment: its methods, their candidates, and the whole, a Spec.

docs/experiments.md says what each key means.
"""

import importlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from privgrad import clip, data, models, optim, perturb
from privgrad.errors import did_you_mean, expected
from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.models import Activation
from privgrad.noise.banded import Banded
from privgrad.optim import filters
from privgrad.optim.base import NamedParameters, constructor_arguments
from privgrad.perturb.augmentation import Flip
from privgrad.perturb.local_training import LocalUpdate
from privgrad.perturb.points import Perturbation
from privgrad.plan import PrivacyPlan
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.training.schedule import Decay, Schedule
from privgrad.types import PrivacyUnit, SamplingScheme

Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


class Table(BaseModel):
    """A table of the file: its keys are fixed, and its values have exactly the stated types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OpenTable(Table):
    """A table with further keys: the arguments of the function that it names."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """Return the keys that are no field of this table."""
        return dict(self.model_extra or {})


class DataTable(OpenTable):
    """The table [data]: the data set by exactly one of name, file and folder, and the arguments of its loader."""

    name: str = ""  # of LOADERS in privgrad_lab.data, or "package.module:function"
    file: str | None = None  # a table
    folder: str | None = None  # images, or a data set of Hugging Face
    validation: int = Field(default=0, ge=0)  # examples of the training part that are held out for tuning
    public: int = Field(
        default=0, ge=0
    )  # the last ones after that: taken out of the training part, they count as public
    elsewhere: "DataTable | None" = None  # a second data set, whose training part is public too
    reconstruct: bool = False  # the label of an input is the input itself
    _home: Path = PrivateAttr(default=Path())

    @property
    def given(self) -> dict[str, Any]:
        """Return the keys that decide the loader, with its arguments."""
        return {"name": self.name, "file": self.file, "folder": self.folder} | self.options

    @property
    def source(self) -> str:
        """Return the name, file or folder of the data, for errors."""
        return self.file or self.folder or self.name

    @property
    def home(self) -> Path:
        """Return the folder from which relative paths count: that of the TOML file."""
        return self._home

    def place(self, home: Path) -> None:
        """Set the folder of the TOML file, also for `elsewhere`."""
        self._home = home
        if self.elsewhere is not None:
            self.elsewhere.place(home)


class ModelTable(Table):
    """The table [model]: the model and its size.

    `name` is a model of the library, or "package.module:function" for a function of the user. Such a function is called
    with the data set, and with the keys of the table that it has as arguments.
    """

    model_config = ConfigDict(extra="allow")

    name: str  # of build.MODELS, or "package.module:function"
    activation: Activation = "tanh"
    hidden: int = Field(default=64, ge=1)
    depth: int = Field(default=1, ge=1)  # hidden layers of an mlp
    # The pretrained model: a folder, or a name on the Hugging Face hub. Its tokenizer reads the data.
    encoder: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the keys that the file gives."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class BlockTable(OpenTable):
    """One block of [features] with options: those of the extractor, or arguments of the user's function."""

    name: str  # of featuring.BLOCKS, or "package.module:function"


class FeaturesTable(Table):
    """The table [features]: features that replace the inputs, computed once before the training."""

    blocks: list[str | BlockTable] = Field(min_length=1)  # side by side, with the norms `weights`
    weights: Grid | None = None
    public: Literal["silhouettes", "pink-noise", "data"] | None = None  # the rows for the constants of blocks
    whiten: Literal["silhouettes", "pink-noise", "data"] | None = None  # also the default of `public`
    keep: int = Field(default=2048, ge=1)  # directions of each whitened block at most
    power: float | None = Field(default=None, ge=0, le=0.5)
    ridge: float | None = Field(default=None, gt=0)
    folder: str | None = None  # of the features, which are as private as the data

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(name=block) if isinstance(block, str) else block for block in self.blocks]


class PrivacyTable(Table):
    """The table [privacy]: the numbers that decide the guarantee; those without a default must be given.

    Of target_epsilon, noise_multiplier and total_epsilon, exactly one is given.
    """

    target_epsilon: float | None = None  # of each training
    noise_multiplier: float | None = None
    total_epsilon: float | None = Field(default=None, gt=0)  # of a private comparison: tuning, scores and training
    budget: str | None = None  # the file of a Budget that a private comparison shares with other releases
    delta: float
    max_grad_norm: float
    num_examples: int
    expected_batch_size: int
    steps: int
    sampling: SamplingScheme = "poisson"
    max_batch_size: int | None = None
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"  # with "user", every number of examples is a number of users
    simulate: int = Field(default=1, ge=1)  # K > 1: batches of 1/K of their size and no privacy; see PrivacyPlan.scaled


Synthetic = Literal["silhouettes", "pink-noise", "words"]


class PreconditionTable(Table):
    """A map of gradients before clipping: a rule on public data, or on public word counts.

    The rule "inputs" takes synthetic examples by `public`; without it, the public examples of the data.
    """

    rule: Literal[
        "public_rmsprop", "public_adam", "public_adagrad", "raw_ideal_rmsprop", "frequencies", "by_rank", "inputs"
    ]
    options: dict[str, Any] = Field(default_factory=dict)
    public: Synthetic | None = None

    @property
    def by_counts(self) -> bool:
        """Return whether the rule uses public word counts."""
        return self.rule in ("frequencies", "by_rank")


class PerturbTable(Table):
    """The point at which gradients are evaluated; `radius` is a number or a grid."""

    rule: Literal["BAM", "SAT", "RawSAM"]
    radius: Annotated[float, Field(ge=0)] | list[Annotated[float, Field(ge=0)]]
    mode: Literal["sam", "exact"] | None = None

    def make(self, radius: float) -> Contribution:
        kind: type[Perturbation] = getattr(perturb, self.rule)
        return kind(radius, **({} if self.mode is None else {"mode": self.mode}))


class AdaptiveClipTable(Table):
    """A rule that moves C, starting at the method's C; `options` are those of its class in `clip`."""

    rule: Literal["TargetFraction", "Quantile", "SquaredError"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def kind(self) -> Callable[..., clip.AdaptiveClip]:
        return getattr(clip, self.rule)

    def make(self) -> clip.AdaptiveClip:
        return self.kind(**self.options)


class FilterTable(Table):
    """A filter of the released gradients; `options` are those of its class in `filters`."""

    # "DiSK" is an EMA with gradients at the point of `perturb.DiSK`, both with the option `weight`.
    rule: Literal["EMA", "DOPPLER", "Innovation", "LinearFilter", "DiSK"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def kind(self) -> Callable[..., filters.LinearFilter]:
        return getattr(filters, "EMA" if self.rule == "DiSK" else self.rule)

    def make(self) -> filters.LinearFilter:
        return self.kind(**self.options)

    @property
    def point(self) -> Contribution | None:
        """Return the point of the gradients that belongs to the filter; None for the weights."""
        return perturb.DiSK(self.options["weight"]) if self.rule == "DiSK" else None


class LocalTable(Table):
    """The local training of each user; `lr` is a number or a grid."""

    lr: Annotated[float, Field(gt=0)] | Grid
    batch_size: int = Field(ge=1)
    epochs: int = Field(default=1, ge=1)


class PublicTable(Table):
    """The public examples of a method: the first `examples` of those taken out of the training part.

    With `other`, they are the first of the data set's other public examples.
    """

    other: bool = False
    examples: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)


class WarmStartTable(Table):
    """Ordinary SGD on the public examples before the private training."""

    lr: float = Field(gt=0)
    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class ScheduleTable(Table):
    """The learning rate over the steps; see Schedule. A name instead of the table, such as "linear", is the decay."""

    decay: Decay = "constant"
    warmup: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, value: Any) -> Any:
        """Return the table that a name abbreviates."""
        return {"decay": value} if isinstance(value, str) else value


class TuningTable(Table):
    """The table [tuning]: how methods without a single rate are tuned; from `way` on, the keys of private ones.

    With `noise_steps`, every private method gets the same number of trainings; see `tuner.wider`. A method whose
    optimizer has no noise step then gives a grid `lr` of the same length.
    """

    noise_steps: Grid | None = None  # of all private methods
    lr: Grid | None = None  # of all methods without their own, where noise_steps is not given
    seeds: list[int] = Field(default=[], min_length=1)  # research seeds
    simulate: int = Field(default=1, ge=1)  # as in [privacy], for trainings of tuning only
    way: Literal["trials", "select"] | None = None  # see `prices`
    score_on: Literal["training", "held-out", "public"] = (
        "training"  # whose score chooses; it is free of public examples
    )
    mean_runs: float = Field(default=8.0, ge=1)  # the number of trainings of "select" is a truncated negative binomial
    shape: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # an infinite one allows no run at all
    by: str = "accuracy"  # or loss, or a named metric, on validation examples; or train_loss, NOT private
    extend: bool = False  # a grid grows as long as the best value is at its edge


class RunTable(Table):
    """The table [run]: seeds, schedule, augmentation, evaluation, device and speed."""

    seeds: list[int] = Field(default=[0], min_length=1)  # research seeds of a comparison
    schedule: ScheduleTable | None = None  # None is a constant rate
    num_evaluations: int = Field(default=10, ge=1)
    metrics: list[str] = []  # on the test part besides loss and score; see `metrics.metrics_of`
    augmentation_multiplicity: int = Field(default=1, ge=1)  # randomly shifted views of each image
    flip: Flip | Literal["none"] = "none"  # how half of the views are mirrored
    ema_decay: float | None = Field(default=None, ge=0, lt=1)  # of an average, evaluated in place of the weights
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    engine: Literal["factored", "vmap"] = "factored"
    microbatch_size: int | None = Field(default=None, ge=1)
    memory_mb: float | None = Field(default=None, gt=0)
    diagnose: bool = False  # record the effect of clipping and noise on gradients in final runs, NOT private
    tensorboard: bool = False

    @property
    def mirrored(self) -> Flip | None:
        """Return the direction in which views are mirrored."""
        return None if self.flip == "none" else self.flip


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
    """A table of [[methods]]: one optimizer with its options; `norm_bins` and the like are those of PrivateGradient."""

    name: str = Field(min_length=1)
    optimizer: str  # of optim.OPTIMIZERS
    lr: Annotated[float, Field(gt=0)] | Grid | None = None  # without lr and noise_step, the grid of [tuning]
    noise_step: Annotated[float, Field(gt=0)] | Grid | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    # Values to try by option: of the optimizer, or after "precondition.", "adaptive_clip." or "filter.", of that table.
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    max_grad_norm: Annotated[float, Field(gt=0)] | Grid | None = None  # None is that of [privacy]
    assumed_noise_std: float | None = Field(
        default=None, ge=0
    )  # for ablations: what the optimizer is given; may be wrong
    group_size: int = Field(default=1, ge=1)  # examples that are averaged before they are clipped; above 1, 2C counts
    bands: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None  # of noise with memory; see noise.Banded
    perturb: PerturbTable | None = None
    norm_bins: Any = None  # `load_spec` calls the check of PrivateGradient: its message says more than pydantic's
    adaptive_clip: AdaptiveClipTable | None = None
    filter: FilterTable | None = None
    local: LocalTable | None = None  # for the privacy unit "user"; the optimizer is then the server's
    precondition: PreconditionTable | None = None
    public: PublicTable = PublicTable()
    warm_start: WarmStartTable | None = None
    schedule: ScheduleTable | None = None  # in place of that of [run]
    model: ModelTable | None = None  # in place of [model]
    features: FeaturesTable | Literal[False] | None = None  # in place of [features]; False takes the inputs as loaded
    non_private: bool = False  # neither clips nor adds noise

    @property
    def has_fixed_rate(self) -> bool:
        """Return whether the method has a single learning rate or noise step, so that no grid of [tuning] applies."""
        return isinstance(self.lr, float | int) or isinstance(self.noise_step, float | int)

    @property
    def has_noise_step(self) -> bool:
        """Return whether the method's rate can be given as a noise step.

        An optimizer with an assumed noise scale would divide by that one, and so has none.
        """
        optimizer = optim.OPTIMIZERS[self.optimizer]
        return not self.non_private and self.assumed_noise_std is None and optimizer.has_noise_step()

    def with_own(self, candidate: Candidate) -> "MethodTable":
        """Return the method with the candidate's values of `tune` among its options."""
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
        """Return whether the method computes gradients on public examples or starts from them."""
        rule = self.precondition
        by_rule = rule is not None and (rule.rule.startswith("public") or (rule.rule == "inputs" and not rule.public))
        by_optimizer = "public" in constructor_arguments(optim.OPTIMIZERS[self.optimizer])
        return by_rule or self.warm_start is not None or by_optimizer

    def perturbation(self, candidate: Candidate, unit: PrivacyUnit = "example") -> Contribution | None:
        """Return the perturbation of one candidate, or its users' local training.

        None means gradients at the current weights. With unit "user" and without local training, each row holds all
        data of one person; `build.make_data` checks that.
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
        """Return the given tables of the rule for C and of the filter, by name."""
        tables = {"adaptive_clip": self.adaptive_clip, "filter": self.filter}
        return {part: table for part, table in tables.items() if table is not None}

    def parts(self) -> dict[str, Any]:
        """Return the arguments of PrivateGradient that follow its releases: statistic, rule for C, filter."""
        return {"norm_bins": self.norm_bins, **{name: table.make() for name, table in self.part_tables.items()}}

    def make(
        self,
        named_parameters: NamedParameters,
        candidate: Candidate,
        *,
        public: PublicGradient | None = None,
        steps: int = 1,
    ) -> optim.PrivateOptimizer:
        """Return the optimizer over a model's parameters, at the candidate's rate. See `with_own` for its options."""
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
        """Return the candidates of a method's first grid; one candidate if nothing is tuned."""
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
        """Return K, by which tuning divides the batches of final trainings."""
        return 1 if self.tuning is None else self.tuning.simulate

    def of(self, method: MethodTable) -> "Spec":
        """Return the spec with a method's own model and features."""
        features = self.features if method.features is None else method.features or None
        return self.model_copy(update={"model": method.model or self.model, "features": features})

    def shares_grid(self, method: MethodTable) -> bool:
        """Return whether a method is tuned together with the other ones, with the same number of trainings.

        These are the private methods without a rate of their own, if [tuning] gives noise_steps; methods whose
        optimizer has no noise step belong to them, with their own grid of learning rates.
        """
        common = self.tuning is not None and self.tuning.noise_steps is not None
        own_steps = method.noise_step is not None or (method.lr is not None and method.has_noise_step)
        return common and not method.non_private and not own_steps and not method.has_fixed_rate

    def schedule_of(self, method: MethodTable) -> Schedule | None:
        """Return the schedule of a method's learning rate; None if neither the method nor [run] gives one."""
        table = method.schedule or self.run.schedule
        return None if table is None else Schedule(table.decay, table.warmup)

    def is_tuned(self, method: MethodTable) -> bool:
        """Return whether a method has several candidates, or may get more by an extended grid."""
        return not method.has_fixed_rate or len(self.grid(method)) > 1

    def plan(
        self, seed: int | None, method: MethodTable | None = None, max_grad_norm: float | None = None
    ) -> PrivacyPlan:
        """Return the plan of the experiment.

        The plan of a `non_private` method has no noise and an infinite clipping norm: its epsilon is infinite. With
        `simulate` in [privacy], the plan is scaled, and epsilon is infinite too.

        Args:
            seed: a research seed, or None for noise from the operating system's entropy.
            method: the method that trains; None leaves the plan without a method's group size and bands.
            max_grad_norm: the method's own clipping norm; None takes that of [privacy].
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
            # Reports label the epsilon of batches of fixed size.
            return PrivacyPlan.for_budget(**numbers, seed=seed, correlation=correlation, assume_poisson=True)
        if correlation == "auto":
            remedy = "give target_epsilon in its place, or a number of bands"
            got, condition = self.privacy.noise_multiplier, 'to be absent for bands = "auto"'
            raise expected("load_spec", "privacy.noise_multiplier", condition, got, remedy)
        rate = self.privacy.expected_batch_size / self.privacy.num_examples
        return PrivacyPlan(**numbers, sample_rate=rate, seed=seed, correlation=correlation)


def plain(value: Any) -> Any:
    """Return a value of `tune` that can be compared and used as a key: lists become tuples."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def imported(place: str, name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names, from the current directory or an installed package."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        remedy = "name the module as in an import statement, and a function of it"
        raise expected("load_spec", place, 'to be "package.module:function"', repr(name), remedy)
    here = f"{Path.cwd()}"
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        if (moved := _moved(module_name, attribute)) is not None:
            return moved
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0])
        condition = f"to name a module in {here} or an installed one" if missing else "to name a module that imports"
        remedy = "correct the name, or change to its folder" if missing else f"correct the module {module_name}"
        raise expected("load_spec", place, condition, f"{type(error).__name__}: {error}", remedy) from error
    if not hasattr(found, attribute):
        if (moved := _moved(module_name, attribute)) is not None:
            return moved
        own = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        remedy = did_you_mean(attribute, own, f"correct the name, or add it to {module_name}")
        raise expected("load_spec", place, f"to name a function of {module_name}", repr(attribute), remedy)
    function = getattr(found, attribute)
    if not callable(function):
        got = f"a {type(function).__name__}"
        raise expected("load_spec", place, "to name something to call", got, "name a function")
    return function


def _moved(module_name: str, attribute: str) -> Callable[..., Any] | None:
    """Return a loader or model of privgrad that was in another module in earlier versions; None if there is none."""
    if module_name.partition(".")[0] != "privgrad":
        return None
    found = (getattr(place, attribute, None) for place in (data, models))
    return next((function for function in found if callable(function)), None)


def called(place: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of the user; errors of the library pass."""
    try:
        return function(*args, **options)
    except Exception as error:  # whatever a function of the user raises
        if isinstance(error, ValueError) and type(error).__module__.startswith("privgrad."):
            raise
        raise expected("load_spec", place, "to run", f"{type(error).__name__}: {error}", f"correct {name}") from error
