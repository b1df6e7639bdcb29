"""A TOML file that describes one experiment: its methods, their candidates, and the whole, a Spec.

docs/experiments.md says what each key means.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr, model_validator

from privgrad import clip, perturb, precondition
from privgrad.accounting.calibration import steps_of
from privgrad.gradient.contribution import Contribution, SampleGradient
from privgrad.noise.banded import Banded
from privgrad.optim import OPTIMIZERS, PrivateOptimizer, filters
from privgrad.optim.base import NamedParameters
from privgrad.perturb.augmentation import Flip
from privgrad.perturb.local_training import LocalUpdate
from privgrad.plan import PrivacyPlan, sample_rate_of, size_of
from privgrad.precondition import counts
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.training.schedule import Decay, Schedule
from privgrad.types import PrivacyUnit, SamplingScheme
from privgrad_lab.calls import Call, Table, arguments, find, make, wrong

Device = Literal["cpu", "cuda", "auto"]  # "auto" is a GPU where there is one
Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]

# The functions and classes that the tables of a method may call, by the name of the table.
REGISTRIES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "optimizer": OPTIMIZERS,
    "perturb": {kind.__name__: kind for kind in (perturb.BAM, perturb.SAT, perturb.RawSAM, perturb.DiSK)},
    "local": {"LocalUpdate": LocalUpdate},
    "precondition": {
        rule.__name__: rule
        for rule in (
            precondition.public_rmsprop,
            precondition.public_adam,
            precondition.public_adagrad,
            precondition.raw_ideal_rmsprop,
            precondition.inputs,
            counts.frequencies,
            counts.by_rank,
            counts.tfidf,
        )
    },
    "clip": {kind.__name__: kind for kind in (clip.Flat, clip.PerLayer, clip.Automatic)},
    "adaptive_clip": {kind.__name__: kind for kind in (clip.TargetFraction, clip.Quantile, clip.SquaredError)},
    "filter": {
        # An EMA whose gradients are taken at the point of `perturb.DiSK`, both with the option `weight`.
        "DiSK": filters.EMA,
        **{k.__name__: k for k in (filters.EMA, filters.DOPPLER, filters.Innovation, filters.LinearFilter)},
    },
}


class DataTable(Call):
    """The table [data]: the data set by exactly one of use, file and folder, and the arguments of its loader."""

    use: str = ""  # of LOADERS in privgrad_lab.data, or "package.module:function"
    file: str | None = None  # a table
    folder: str | None = None  # images, or a data set of Hugging Face
    validation: int = Field(default=0, ge=0)  # examples of the training part that are held out for tuning
    # The last examples after that are taken out of the training part, and count as public.
    public: int = Field(default=0, ge=0)
    elsewhere: "DataTable | None" = None  # a second data set, whose training part is public too
    reconstruct: bool = False  # the label of an input is the input itself
    _home: Path = PrivateAttr(default=Path())

    @property
    def given(self) -> dict[str, Any]:
        """Return the keys that decide the loader, with its arguments."""
        return {"use": self.use, "file": self.file, "folder": self.folder} | self.options

    @property
    def source(self) -> str:
        """Return the name, file or folder of the data, for errors."""
        return self.file or self.folder or self.use

    @property
    def home(self) -> Path:
        """Return the folder from which relative paths count: that of the TOML file."""
        return self._home

    def place(self, home: Path) -> None:
        """Set the folder of the TOML file, also for `elsewhere`."""
        self._home = home
        if self.elsewhere is not None:
            self.elsewhere.place(home)


class ModelTable(Call):
    """The table [model]: a model of build.MODELS, or a function of the user that is called with the data set."""

    # The pretrained model: a folder, or a name on the Hugging Face hub. Its tokenizer reads the data.
    encoder: str | None = None


class FeaturesTable(Table):
    """The table [features]: features that replace the inputs, computed once before the training."""

    blocks: list[Call] = Field(min_length=1)  # side by side, with the norms `weights`
    weights: Grid | None = None
    public: Literal["silhouettes", "pink-noise", "data"] | None = None  # the rows for the constants of blocks
    whiten: Literal["silhouettes", "pink-noise", "data"] | None = None  # also the default of `public`
    keep: int = Field(default=2048, ge=1)  # directions of each whitened block at most
    power: float | None = Field(default=None, ge=0, le=0.5)
    ridge: float | None = Field(default=None, gt=0)
    folder: str | None = None  # of the features, which are as private as the data


class PrivacyTable(Table):
    """The table [privacy]: the numbers that decide the guarantee; those without a default must be given."""

    # Exactly one of these three is given.
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
    participations: int = 1
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"  # with "user", every number of examples is a number of users
    simulate: int = Field(default=1, ge=1)  # K > 1: batches of 1/K of their size and no privacy; see PrivacyPlan.scaled

    @model_validator(mode="before")
    @classmethod
    def _by_epochs(cls, given: dict[str, Any]) -> dict[str, Any]:
        own = {"expected_batch_size" if name == "batch_size" else name: value for name, value in given.items()}
        size, count, times = (own.get(name, 1) for name in ("expected_batch_size", "num_examples", "participations"))
        if "epochs" in own and "steps" not in own and {type(size), type(count), type(times)} == {int} and times > 0:
            rate = sample_rate_of(size, count, own.get("sampling", "poisson"), times)
            own["steps"] = steps_of("[privacy]", None, own.pop("epochs"), rate / times)
        return own


Synthetic = Literal["silhouettes", "pink-noise", "words"]


class PreconditionTable(Call):
    """A map of gradients before clipping: a rule on public data, or on public word counts."""

    public: Synthetic | None = None  # examples for the rule "inputs"; without it, the public examples of the data

    @property
    def rule(self) -> Callable[..., Any]:
        return find("precondition", self.use, REGISTRIES["precondition"])


class LocalTable(Call):
    """The local training of each user."""

    use: str = "LocalUpdate"


class PublicTable(Table):
    """The public examples of a method: the first `examples` of those taken out of the training part."""

    other: bool = False  # take the first of the data set's other public examples
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
    names: ClassVar[str] = "decay"


class TuningTable(Table):
    """The table [tuning]: how methods without a single rate are tuned; from `way` on, the keys of private ones."""

    # Of all private methods, each of which then gets the same number of trainings; see `tuner.wider`. A method whose
    # optimizer has no noise step gives a grid `lr` of the same length.
    noise_steps: Grid | None = None
    lr: Grid | None = None  # of all methods without their own, where noise_steps is not given
    seeds: list[int] = Field(default=[], min_length=1)  # research seeds
    simulate: int = Field(default=1, ge=1)  # as in [privacy], for trainings of tuning only
    way: Literal["trials", "select"] | None = None  # see `prices`
    # Whose score chooses; it is free of public examples.
    score_on: Literal["training", "held-out", "public"] = "training"
    mean_runs: float = Field(default=8.0, ge=1)  # the number of trainings of "select" is a truncated negative binomial
    shape: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # an infinite one allows no run at all
    by: str = "accuracy"  # or loss, or a named metric, on validation examples; or train_loss, NOT private
    extend: bool = False  # a grid grows as long as the best value is at its edge


class RunTable(Table):
    """The table [run]: seeds, schedule, augmentation, evaluation, device and speed."""

    seeds: list[int] = Field(default=[0], min_length=1)  # research seeds of a comparison
    schedule: ScheduleTable | None = None  # None is a constant rate
    num_evaluations: int = Field(default=10, ge=1)
    metrics: list[str] = Field(default=[])  # on the test part besides loss and score; see `metrics.metrics_of`
    augmentation_multiplicity: int = Field(default=1, ge=1)  # randomly shifted views of each image
    flip: Flip | Literal["none"] = "none"  # how half of the views are mirrored
    ema_decay: float | None = Field(default=None, ge=0, lt=1)  # of an average, evaluated in place of the weights
    device: Device = "cpu"
    autocast: Literal["bfloat16"] | None = None  # of forward and backward passes; sums and noise keep their precision
    engine: Literal["factored", "vmap"] = "factored"
    microbatch_size: int | None = Field(default=None, ge=1)
    memory_mb: float | None = Field(default=None, gt=0)
    diagnose: bool = False  # record the effect of clipping and noise on gradients in final runs, NOT private
    tensorboard: bool = False


class Candidate(NamedTuple):
    """One choice of a method's tuned values. Either lr or noise_step is None."""

    max_grad_norm: float
    lr: float | None = None
    radius: float | None = None  # of the perturbation
    local_lr: float | None = None  # of users who train locally
    noise_step: float | None = None
    own: tuple[tuple[str, Any], ...] = ()  # other options: "momentum" of the optimizer, "filter.weight" of `filter`


# The options that have a field of Candidate, by their place in a method's table.
_OF_OPTIMIZERS = {f"optimizer.{name}": name for name in ("lr", "noise_step")}
_FIELDS = {**_OF_OPTIMIZERS, "perturb.radius": "radius", "local.lr": "local_lr"}


class MethodTable(Table):
    """A table of [[methods]]: an optimizer and the other parts of a training, each of them a call."""

    # A list is a grid: each of its values is tried. An option that takes a list by itself has a grid of lists.
    name: str = Field(min_length=1)
    optimizer: Call  # without lr and noise_step, the grid of [tuning]
    max_grad_norm: Annotated[float, Field(gt=0)] | Grid | None = None  # None is that of [privacy]
    # For ablations: what the optimizer is given in place of the noise's standard deviation; may be wrong.
    assumed_noise_std: float | None = Field(default=None, ge=0)
    group_size: int = Field(default=1, ge=1)  # examples that are averaged before they are clipped; above 1, 2C counts
    bands: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None  # of noise with memory; see noise.Banded
    perturb: Call | None = None  # the point at which gradients are evaluated
    norm_bins: Any = None  # `load_spec` calls the check of PrivateGradient: its message says more than pydantic's
    clip: Call | None = None
    adaptive_clip: Call | None = None  # moves C, starting at the method's C
    filter: Call | None = None  # of the released gradients
    local: LocalTable | None = None  # for the privacy unit "user"; the optimizer is then the server's
    precondition: PreconditionTable | None = None
    public: PublicTable = PublicTable()
    warm_start: WarmStartTable | None = None
    schedule: ScheduleTable | None = None  # in place of that of [run]
    model: ModelTable | None = None  # in place of [model]
    features: FeaturesTable | Literal[False] | None = None  # in place of [features]; False takes the inputs as loaded
    non_private: bool = False  # neither clips nor adds noise

    _keys: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _in_order(cls, given: Any, handler: Callable[[Any], Self]) -> Self:
        """Keep the order of the file, in which values are tried."""
        made = handler(given)
        if isinstance(given, dict):
            made._keys = tuple(given)
        return made

    @property
    def calls(self) -> dict[str, Call]:
        """Return the given tables of REGISTRIES, by name."""
        tables = {part: getattr(self, part) for part in self._keys if part in REGISTRIES}
        return {part: table for part, table in tables.items() if table is not None}

    @property
    def grids(self) -> dict[str, list[Any]]:
        """Return the values to try, by place such as "filter.weight"; fields of Candidate may have a single one."""
        found: dict[str, list[Any]] = {}
        for part, table in self.calls.items():
            known = arguments(find(f"methods.{self.name}.{part}", table.use, REGISTRIES[part]))
            for name, value in table.options.items():
                # A list is one value, and not a grid, for an argument that takes a list by its annotation.
                kind = f"{known[name].annotation}" if name in known else ""
                is_one = any(one in kind for one in ("Sequence", "tuple", "list"))
                if isinstance(value, list) and (all(isinstance(one, list) for one in value) or not is_one):
                    found[f"{part}.{name}"] = value
                elif f"{part}.{name}" in _FIELDS:
                    found[f"{part}.{name}"] = [value]
        return found

    @property
    def lr(self) -> Any:
        """The learning rate, or its grid; None without one."""
        return self.optimizer.options.get("lr")

    @property
    def noise_step(self) -> Any:
        """The noise step, or its grid; None without one."""
        return self.optimizer.options.get("noise_step")

    @property
    def has_fixed_rate(self) -> bool:
        """Return whether the method has a single learning rate or noise step, so that no grid of [tuning] applies."""
        return any(rate is not None and not isinstance(rate, list) for rate in (self.lr, self.noise_step))

    @property
    def has_noise_step(self) -> bool:
        """Return whether the method's rate can be given as a noise step."""
        has = getattr(self._optimizer, "has_noise_step", lambda: False)
        # An optimizer with an assumed noise scale would divide by that one.
        return not self.non_private and self.assumed_noise_std is None and has()

    @property
    def _optimizer(self) -> Callable[..., PrivateOptimizer]:
        return find(f"methods.{self.name}.optimizer", self.optimizer.use, OPTIMIZERS)

    @property
    def needs_public(self) -> bool:
        """Return whether the method computes gradients on public examples or starts from them."""
        table = self.precondition
        by_rule = table is not None and "gradient" in arguments(table.rule)
        by_inputs = table is not None and table.use == "inputs" and not table.public
        return by_rule or by_inputs or self.warm_start is not None or "public" in arguments(self._optimizer)

    def at(self, candidate: Candidate) -> "MethodTable":
        """Return the method with the candidate's values in its tables."""
        values = {place: getattr(candidate, field) for place, field in _FIELDS.items()}
        values = {place: value for place, value in values.items() if value is not None}
        values |= {name if "." in name else f"optimizer.{name}": value for name, value in candidate.own}
        tables = dict(self.calls)
        for place, value in values.items():
            part, _, option = place.partition(".")
            tables[part] = tables[part].model_copy(update={option: value})
        return self.model_copy(update=tables)

    def perturbation(self, unit: PrivacyUnit = "example") -> Contribution | None:
        """Return the point of the gradients, or the local training of the users; None for the current weights."""
        if self.local is not None:
            return self._made("local")
        if unit == "user":  # each row holds all data of one person; `build.make_data` checks that
            return SampleGradient("user")
        if self.filter is not None and self.filter.use == "DiSK":
            return make(f"methods.{self.name}.filter", self.filter, {"DiSK": perturb.DiSK})
        return self._made("perturb")

    def parts(self, unit: PrivacyUnit = "example") -> dict[str, Any]:
        """Return the arguments of PrivateGradient that the method's tables describe, except for its preconditioner."""
        made = {part: self._made(part) for part in ("clip", "adaptive_clip", "filter")}
        return made | {"perturb": self.perturbation(unit), "norm_bins": self.norm_bins}

    def facts(self) -> dict[str, Any]:
        """Return the tables for records, in the form that all versions write: the name as "rule", and its options."""
        rates = ("lr", "noise_step")
        options = {name: value for name, value in self.optimizer.options.items() if name not in rates}
        found: dict[str, Any] = {"optimizer": self.optimizer.use, "options": options}
        for part in ("precondition", "clip", "adaptive_clip", "filter"):
            table = self.calls.get(part)
            found[part] = None if table is None else {"rule": table.use, "options": table.options}
        if self.precondition is not None:
            found["precondition"]["public"] = self.precondition.public
        return found

    def make(
        self, named_parameters: NamedParameters, *, public: PublicGradient | None = None, steps: int = 1
    ) -> PrivateOptimizer:
        """Return the optimizer over a model's parameters."""
        optimizer = self._made("optimizer", params=named_parameters, public=public or dict, horizon=steps)
        if (assumed := self.assumed_noise_std) is not None:

            def assume(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                return args, kwargs | {"grad": replace(kwargs["grad"], noise_std=assumed)}

            optimizer.register_step_pre_hook(assume)
        return optimizer

    def _made(self, part: str, **given: Any) -> Any:
        table = getattr(self, part)
        return None if table is None else make(f"methods.{self.name}.{part}", table, REGISTRIES[part], **given)


def plain(value: Any) -> Any:
    """Return a value of a grid that can be compared and used as a key: lists become tuples."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


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
        grids, tuning = method.grids, self.tuning
        steps, rates = grids.get("optimizer.noise_step"), grids.get("optimizer.lr")
        if steps is None and rates is None and tuning is not None:
            steps = tuning.noise_steps if method.has_noise_step else None
            rates = tuning.lr if steps is None else None
        if steps is None and rates is None:
            return []
        norms = method.max_grad_norm or self.privacy.max_grad_norm
        fields = (
            norms if isinstance(norms, list) else [norms],
            rates or [None],
            grids.get("perturb.radius", [None]),
            grids.get("local.lr", [None]),
            steps or [None],
        )
        others = {place.removeprefix("optimizer."): tried for place, tried in grids.items() if place not in _FIELDS}
        own = [[(name, plain(value)) for value in tried] for name, tried in others.items()]
        return [Candidate(*values) for values in itertools.product(*fields, itertools.product(*own))]

    @property
    def tuning_scale(self) -> int:
        """Return K, by which tuning divides the batches of final trainings."""
        return 1 if self.tuning is None else self.tuning.simulate

    def with_noise(self, noise_multiplier: float) -> "Spec":
        """Return the spec of single trainings with this noise, in place of a total epsilon."""
        privacy = {"total_epsilon": None, "budget": None, "noise_multiplier": noise_multiplier}
        return self.model_copy(update={"privacy": self.privacy.model_copy(update=privacy)})

    def of(self, method: MethodTable) -> "Spec":
        """Return the spec with a method's own model and features."""
        features = self.features if method.features is None else method.features or None
        return self.model_copy(update={"model": method.model or self.model, "features": features})

    def shares_grid(self, method: MethodTable) -> bool:
        """Return whether a method is tuned together with the other ones, with the same number of trainings."""
        # These are the private methods without a rate of their own, if [tuning] gives noise_steps; methods whose
        # optimizer has no noise step belong to them, with their own grid of learning rates.
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
        self, seed: int | None, method: MethodTable | None = None, norm: float | None = None, *, tuning: bool = False
    ) -> PrivacyPlan:
        """Return the plan of a method, clipped to `norm`; without one, that of [privacy], without group size and bands.

        The epsilon of a `non_private` method and of a simulation is infinite; with `tuning`, the plan may be a
        simulation. Without a seed, the noise comes from the operating system's entropy.
        """
        numbers: dict[str, Any] = self.privacy.model_dump(exclude_none=True, exclude={"simulate", "budget"})
        numbers |= {"max_grad_norm": norm or self.privacy.max_grad_norm, "seed": seed}
        if (total := self.privacy.total_epsilon) is not None:
            remedy = "run `privgrad compare`, which divides it; or give target_epsilon, of one training"
            raise wrong("privacy.total_epsilon", "to be absent", total, remedy)
        if (self.privacy.target_epsilon is None) == (self.privacy.noise_multiplier is None):
            name = "exactly one of privacy.target_epsilon and privacy.noise_multiplier"
            got = f"{self.privacy.target_epsilon} and {self.privacy.noise_multiplier}"
            raise wrong(name, "to be given", got, "or give total_epsilon for a private comparison")
        bands = None if method is None or method.non_private else method.bands
        correlation = Banded(bands) if isinstance(bands, int) else bands
        if self.privacy.noise_multiplier is None:
            plan = PrivacyPlan.for_budget(**numbers, correlation=correlation)
        elif correlation == "auto":
            got = self.privacy.noise_multiplier
            raise wrong("privacy.noise_multiplier", 'to be absent for bands = "auto"', got, "give target_epsilon")
        else:
            own = self.privacy
            rate = sample_rate_of(own.expected_batch_size, own.num_examples, own.sampling, own.participations)
            numbers["expected_batch_size"] = size_of(own.expected_batch_size, rate * own.num_examples)
            plan = PrivacyPlan(**numbers, sample_rate=rate, correlation=correlation)
        if method is not None and method.non_private:
            plan = replace(plan, noise_multiplier=0.0, noise_on_grid=False, max_grad_norm=math.inf, target_epsilon=None)
        elif method is not None:
            plan = replace(plan, group_size=method.group_size)
        return plan.scaled(1 / self.privacy.simulate / (self.tuning_scale if tuning else 1))
