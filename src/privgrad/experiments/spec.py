"""Read a TOML file into a Spec: the checked description of one experiment."""

import difflib
import inspect
import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn
from torch.utils.data import TensorDataset

from privgrad import data, optim, side_information
from privgrad.data.dataset import to_reconstruct, with_other_public, with_public
from privgrad.data.pretrained import pretrained
from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.gradient import perturb, precondition
from privgrad.gradient.local_training import LocalTraining
from privgrad.gradient.perturb import Perturbation
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.models import Activation
from privgrad.optim.base import NamedParameters
from privgrad.plan import PrivacyPlan
from privgrad.types import PrivacyUnit, SamplingScheme

OptimizerName = Literal[
    "SGD",
    "MomentumSGD",
    "Adam",
    "AdamBC",
    "AdamW",
    "AdamWBC",
    "NAdam",
    "NAdamBC",
    "RMSprop",
    "RMSpropBC",
    "Adagrad",
    "AdagradBC",
    "RMSpropPub",
    "AdamPub",
    "MirrorDescent",
    "Yogi",
]
_PUBLIC_OPTIMIZERS = ("RMSpropPub", "AdamPub", "MirrorDescent")
# Models whose inputs are numbers.
_OF_NUMBERS = ("autoencoder", "cnn-small", "cnn2", "cnn5", "linear", "mlp", "resnet9", "wide-resnet")

DataName = Literal[
    "adult",
    "barcode",
    "brown",
    "cifar-10",
    "debian-maintainers",
    "debian-sections",
    "debian-synopses",
    "debian-tags",
    "digits",
    "fashion-mnist",
    "heavy-tail",
    "imdb",
    "mnist",
    "ptb",
    "sentence-pairs",
    "snli",
    "stackoverflow",
    "tweets",
]


class Candidate(NamedTuple):
    """One choice of a method's tuned values.

    The radius is None for a method without perturbation; local_lr is None where users do not train locally.
    """

    max_grad_norm: float
    lr: float
    radius: float | None = None
    local_lr: float | None = None


Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataTable(_Table):
    """The table [data]: the data set, the number of validation examples, and the options of its loader.

    `validation` examples of the training part are held out for tuning. After that, the last `public` examples are taken
    out of the training part and count as public. `elsewhere` names a second data set whose training part is public too.
    With `reconstruct`, the label of an input is the input itself.
    """

    name: DataName
    path: str | None = None
    validation: int = Field(default=0, ge=0)
    public: int = Field(default=0, ge=0)
    elsewhere: "DataTable | None" = None
    reconstruct: bool = False
    standardize: bool | None = None
    seed: int | None = None
    groups: int | None = Field(default=None, ge=1)
    log_size: int | None = Field(default=None, ge=0)
    scale: int | None = Field(default=None, ge=1)
    words: int | None = Field(default=None, ge=1)
    length: int | None = Field(default=None, ge=1)
    limit: int | None = Field(default=None, ge=1)
    pairs: int | None = Field(default=None, ge=1)
    min_count: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=1)
    features: Literal["counts", "tf-idf", "words"] | None = None
    amazon: str | None = None
    other_public: int | None = Field(default=None, ge=0)
    minimum: int | None = Field(default=None, ge=1)
    cap: int | None = Field(default=None, ge=1)
    tags: int | None = Field(default=None, ge=1)


class ModelTable(_Table):
    """The table [model]: the model and its size."""

    name: Literal[
        "autoencoder",
        "bag-of-words",
        "cnn-small",
        "cnn2",
        "cnn5",
        "language-model",
        "linear",
        "lora-language-model",
        "mlp",
        "pair-classifier",
        "resnet9",
        "sparse-linear",
        "wide-resnet",
        "word-lstm",
    ]
    activation: Activation = "tanh"
    hidden: int = Field(default=64, ge=1)
    depth: int = Field(default=1, ge=1)  # hidden layers of an mlp
    # The pretrained model: a folder, or a name on the Hugging Face hub. Its tokenizer reads the data.
    encoder: str | None = None


class PrivacyTable(_Table):
    """The table [privacy]: the numbers that decide the guarantee.

    Apart from sampling, grid and unit they have no defaults. Give either `target_epsilon` or `noise_multiplier`. With
    `privacy_unit` "user", every number of examples is a number of users; see PrivacyPlan.
    """

    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float
    max_grad_norm: float
    num_examples: int
    expected_batch_size: int
    steps: int
    sampling: SamplingScheme = "poisson"
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"


class PreconditionTable(_Table):
    """The divisor of gradients before clipping: a rule on public data, or on public word counts."""

    rule: Literal["public_rmsprop", "public_adam", "public_adagrad", "raw_ideal_rmsprop", "frequencies", "by_rank"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def by_counts(self) -> bool:
        """Return whether the rule uses public word counts."""
        return self.rule in ("frequencies", "by_rank")


class PerturbTable(_Table):
    """The point at which gradients are evaluated; `radius` is a number or a grid."""

    rule: Literal["BAM", "SAT", "RawSAM"]
    radius: Annotated[float, Field(ge=0)] | list[Annotated[float, Field(ge=0)]]
    mode: Literal["sam", "exact"] | None = None

    def make(self, radius: float) -> Perturbation:
        """Return the perturbation with one radius."""
        kind: type[Perturbation] = getattr(perturb, self.rule)
        return kind(radius, **({} if self.mode is None else {"mode": self.mode}))


class LocalTable(_Table):
    """The local training of each user; `lr` is a number or a grid."""

    lr: Annotated[float, Field(gt=0)] | Grid
    batch_size: int = Field(ge=1)
    epochs: int = Field(default=1, ge=1)


class PublicTable(_Table):
    """The public examples of a method: the first `examples` of those taken out of the training part.

    With `other`, they are the first of the data set's other public examples.
    """

    other: bool = False
    examples: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)


class WarmStartTable(_Table):
    """Ordinary SGD on the public examples before the private training."""

    lr: float = Field(gt=0)
    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class MethodTable(_Table):
    """A table of [[methods]]: one optimizer with its options.

    `lr` is a number or the method's own grid; the default is the grid of [tuning]. `max_grad_norm` is a number or a
    grid; the default is the value of [privacy]. `group_size` examples are averaged before they are clipped; above 1 the
    sensitivity is 2C. `assumed_noise_std` replaces the noise scale that the optimizer is given, for ablations; it may
    be wrong. `non_private` neither clips nor adds noise. `local` is given if the privacy unit is a user; the optimizer
    is then the server's.
    """

    name: str = Field(min_length=1)
    optimizer: OptimizerName
    lr: Annotated[float, Field(gt=0)] | Grid | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_grad_norm: Annotated[float, Field(gt=0)] | Grid | None = None
    assumed_noise_std: float | None = Field(default=None, ge=0)
    group_size: int = Field(default=1, ge=1)
    perturb: PerturbTable | None = None
    local: LocalTable | None = None
    precondition: PreconditionTable | None = None
    public: PublicTable = PublicTable()
    warm_start: WarmStartTable | None = None
    non_private: bool = False

    @property
    def fixed_lr(self) -> float | None:
        """Return the learning rate, or None if it is tuned on a grid."""
        return None if isinstance(self.lr, list) else self.lr

    @property
    def needs_public(self) -> bool:
        """Return whether the method computes gradients on public examples or starts from them."""
        by_rule = self.precondition is not None and self.precondition.rule.startswith("public")
        return by_rule or self.warm_start is not None or self.optimizer in _PUBLIC_OPTIMIZERS

    def perturbation(self, candidate: Candidate) -> Perturbation | None:
        """Return the perturbation of one candidate, or its users' local training.

        None means gradients at the current weights.
        """
        if self.local is not None and candidate.local_lr is not None:
            return LocalTraining(candidate.local_lr, batch_size=self.local.batch_size, epochs=self.local.epochs)
        return None if self.perturb is None or candidate.radius is None else self.perturb.make(candidate.radius)

    def make(
        self, named_parameters: NamedParameters, lr: float, *, public: PublicGradient | None = None, steps: int = 1
    ) -> optim.PrivateOptimizer:
        """Return the optimizer over a model's parameters."""
        kind: type[optim.PrivateOptimizer] = getattr(optim, self.optimizer)
        extra = {"horizon": steps} if self.optimizer == "MirrorDescent" else {}
        extra |= {"public": public or dict} if self.optimizer in _PUBLIC_OPTIMIZERS else {}
        optimizer = kind(named_parameters, lr=lr, **extra, **self.options)
        if (assumed := self.assumed_noise_std) is not None:

            def assume(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                return args, kwargs | {"grad": replace(kwargs["grad"], noise_std=assumed)}

            optimizer.register_step_pre_hook(assume)
        return optimizer


class TuningTable(_Table):
    """The table [tuning]: how methods without a single lr are tuned.

    `by` is the accuracy or loss on the validation examples, or the loss on the training examples (NOT private). `lr` is
    the grid of all methods without their own. With `extend`, a grid grows by half a power of ten as long as the
    method's best rate is at its edge.
    """

    lr: Grid | None = None
    seeds: list[int] = Field(min_length=1)
    by: Literal["accuracy", "loss", "train_loss"] = "accuracy"
    extend: bool = False


class RunTable(_Table):
    """The table [run]: seeds, augmentation, evaluation, device and speed.

    `seeds` are the research seeds of a comparison. `views` is the number of randomly moved views of each image.
    `average` is the decay of an average of the weights, which is then evaluated in place of the weights. `device` is
    the model's device; "auto" takes the GPU if there is one. `diagnose` records the effect of clipping and noise on
    gradients in final runs, NOT private. `tensorboard` also writes evaluations for TensorBoard.
    """

    seeds: list[int] = Field(default=[0], min_length=1)
    evaluations: int = Field(default=10, ge=1)
    views: int = Field(default=1, ge=1)
    average: float | None = Field(default=None, ge=0, lt=1)
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    engine: Literal["factored", "vmap"] = "factored"
    microbatch_size: int | None = Field(default=None, ge=1)
    memory_mb: float | None = Field(default=None, gt=0)
    diagnose: bool = False
    tensorboard: bool = False


class Spec(_Table):
    """A checked experiment: the whole TOML file."""

    title: str
    data: DataTable
    model: ModelTable
    privacy: PrivacyTable
    methods: list[MethodTable] = Field(min_length=1)
    tuning: TuningTable | None = None
    run: RunTable = RunTable()
    paper: dict[str, Any] = Field(default_factory=dict)

    def grid(self, method: MethodTable) -> list[Candidate]:
        """Return the candidates of a method's first grid; one candidate if nothing is tuned."""
        rates = method.lr or (self.tuning.lr if self.tuning else None) or []
        norms = method.max_grad_norm or self.privacy.max_grad_norm
        radii = None if method.perturb is None else method.perturb.radius
        local = None if method.local is None else method.local.lr

        def each(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        return [Candidate(*values) for values in itertools.product(*map(each, (norms, rates, radii, local)))]

    def is_tuned(self, method: MethodTable) -> bool:
        """Return whether a method has several candidates, or may get more by an extended grid."""
        return method.fixed_lr is None or len(self.grid(method)) > 1

    def plan(
        self, seed: int | None, method: MethodTable | None = None, max_grad_norm: float | None = None
    ) -> PrivacyPlan:
        """Return the plan of the experiment.

        The plan of a `non_private` method has no noise and an infinite clipping norm: its epsilon is infinite.

        Args:
            seed: a research seed, or None for noise from the operating system's entropy.
            method: the method that trains; None leaves the plan without a method's group size.
            max_grad_norm: the method's own clipping norm; None takes that of [privacy].
        Raises:
            PrivacyError: [privacy] gives neither or both of target_epsilon and noise_multiplier, or a number is wrong.
        """
        plan = self._plan(seed, max_grad_norm or self.privacy.max_grad_norm)
        if method is None:
            return plan
        if method.non_private:
            no_noise = {"noise_multiplier": 0.0, "noise_on_grid": False}
            return replace(plan, **no_noise, max_grad_norm=math.inf, target_epsilon=None)
        return replace(plan, group_size=method.group_size)

    def _plan(self, seed: int | None, max_grad_norm: float) -> PrivacyPlan:
        numbers: dict[str, Any] = self.privacy.model_dump(exclude_none=True) | {"max_grad_norm": max_grad_norm}
        if (self.privacy.target_epsilon is None) == (self.privacy.noise_multiplier is None):
            name = "exactly one of privacy.target_epsilon and privacy.noise_multiplier"
            got = f"{self.privacy.target_epsilon} and {self.privacy.noise_multiplier}"
            raise expected("load_spec", name, "to be given", got, "give one of the two")
        if self.privacy.noise_multiplier is None:
            return PrivacyPlan.for_budget(**numbers, seed=seed)
        rate = self.privacy.expected_batch_size / self.privacy.num_examples
        return PrivacyPlan(**numbers, sample_rate=rate, seed=seed)


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file that describes an experiment.

    Raises:
        PrivacyError: the file is unreadable, has an unknown option (the error suggests the nearest valid one), or has a
            wrong value.
    """
    if problem := file_problem(path):
        remedy = "give the path of a TOML file that describes an experiment"
        raise expected("load_spec", "path", "to be a readable TOML file", f"{path}, which {problem}", remedy)
    try:
        with Path(path).open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise expected("load_spec", "path", "to be a readable TOML file", path, "give its path") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, nested too deeply
        raise expected("load_spec", f"{path}", "to be valid TOML", error, "correct the file") from error
    return check_spec(raw, path)


def check_spec(raw: Mapping[str, Any], path: str | Path) -> Spec:
    """Convert the tables of a TOML file into a Spec.

    Args:
        raw: the file's tables.
        path: the file's path, for errors.
    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that are also the private ones.
    """
    _require_known(raw, Spec, "")
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(first["loc"], raw)
        if first["type"] == "missing":
            raise expected("load_spec", place, "to be given", None, f"add it to {path}") from error
        got = repr(first["input"])[:80]
        if first["type"] == "literal_error" and "ctx" in first:
            valid = re.findall("'([^']*)'", first["ctx"]["expected"])
            remedy = did_you_mean(first["input"], valid, f"choose one, and correct it in {path}")
            raise expected("load_spec", place, f"to be one of {', '.join(valid)}", got, remedy) from error
        raise expected("load_spec", place, f"to be valid ({first['msg']})", got, f"correct it in {path}") from error
    other = spec.data.elsewhere
    if other is not None and (other.name, other.path) == (spec.data.name, spec.data.path):
        condition, remedy = "to differ from data.name", "use data.public to count some of these examples as public"
        raise expected("load_spec", "data.elsewhere", condition, repr(other.name), remedy)
    for method in spec.methods:
        _require_method(method, spec)
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise expected("load_spec", "methods", "to have different names", names, f"rename one in {path}")
    return spec


def _place(loc: tuple[int | str, ...], raw: Any) -> str:
    """Return the name of a place in a TOML file: a method by its name, other list entries by number from 1."""
    words: list[str] = []
    for part in loc:
        inner = raw[part] if isinstance(raw, dict) and part in raw else None
        if isinstance(raw, list) and isinstance(part, int):
            inner = raw[part]
            name = inner.get("name") if isinstance(inner, dict) else None
            words += [name] if isinstance(name, str) and name else [f"{words.pop()} (entry {part + 1})"]
        elif isinstance(raw, dict):
            words.append(str(part))  # later parts are pydantic's names for kinds of values
        raw = inner
    return ".".join(words)


def _require_known(raw: Mapping[str, Any], table: type[BaseModel], place: str) -> None:
    """Raise PrivacyError for the first key, at any depth, that is not a field of its table."""
    for name, value in raw.items():
        _require_option(name, list(table.model_fields), f"{place}{name}")
        for inner in _tables_in(table.model_fields[name].annotation):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    _require_known(item, inner, f"{place}{name}.")


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables that a field of this type may hold."""
    candidates = (annotation, *get_args(annotation))
    return [kind for kind in candidates if inspect.isclass(kind) and issubclass(kind, BaseModel)]


def _require_option(name: str, valid: list[str], place: str) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        remedy = f"did you mean {near[0]!r}? Choose one of {', '.join(valid)}"
        raise expected("load_spec", "options", "to be known", f"{place!r}", remedy)


def _require_method(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless a method's options suit its optimizer and the other tables."""
    kind: type[optim.PrivateOptimizer] = getattr(optim, method.optimizer)
    signatures = (inspect.signature(cls.__init__) for cls in kind.__mro__ if "__init__" in vars(cls))
    parameters = next(s.parameters for s in signatures if "kwargs" not in s.parameters)
    valid = [name for name in parameters if name not in ("self", "params", "lr", "public", "horizon")]
    if method.perturb is not None and method.perturb.mode is not None and method.perturb.rule != "BAM":
        place = f"methods.{method.name}.perturb.mode"
        raise expected("load_spec", place, "to be given for BAM only", method.perturb.rule, "leave it out")
    for name in method.options:
        _require_option(name, valid, f"methods.{method.name}.options.{name}")
    try:
        method.make([("p", nn.Parameter(torch.zeros(1)))], 0.1)
    except (TypeError, ValueError, OverflowError) as error:
        place = f"methods.{method.name}.options"
        raise expected("load_spec", place, f"to suit {method.optimizer}", error, "correct them") from error
    if method.precondition is not None:
        _require_precondition(method.precondition, f"methods.{method.name}.precondition.options")
    local, unit = f"methods.{method.name}.local", spec.privacy.privacy_unit
    if method.local is None and unit == "user":
        remedy = "add local with lr and batch_size, for example local = { lr = 0.1, batch_size = 20 }"
        raise expected("load_spec", local, 'to be given for privacy_unit = "user"', None, remedy)
    if method.local is not None and unit == "example":
        condition = 'to be absent for privacy_unit = "example"'
        remedy = 'leave it out, or set privacy_unit = "user" in [privacy] and choose [data] with one row per user'
        raise expected("load_spec", local, condition, method.local.model_dump(exclude_defaults=True), remedy)
    if method.local is not None and method.perturb is not None:
        got = f"perturb.rule = {method.perturb.rule!r}"
        raise expected("load_spec", local, "to be given without perturb", got, "leave one of the two out")
    if method.local is not None and spec.tuning is not None and spec.tuning.by == "train_loss":
        remedy = 'tune by "accuracy" or "loss" on users that are held out'
        raise expected("load_spec", "tuning.by", "to be measured on held-out users", "'train_loss'", remedy)
    if "public" in method.model_fields_set and not method.needs_public:
        place, condition = f"methods.{method.name}.public", "to be absent for a method that uses no public examples"
        remedy = "remove it, or add a precondition rule, a warm_start or an optimizer that uses public gradients"
        raise expected("load_spec", place, condition, method.public.model_dump(exclude_defaults=True), remedy)
    if method.needs_public and not method.public.other and spec.data.public == 0:
        remedy = "set it to the number of training examples that count as public"
        raise expected("load_spec", "data.public", f"to be positive for {method.name}", 0, remedy)
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        remedy = "give the method an lr, or give a grid and a [tuning] table"
        raise expected("load_spec", f"methods.{method.name}.lr", "to be given", None, remedy)
    if spec.tuning is None:
        remedy = "add [tuning] with seeds, or give one lr and one max_grad_norm"
        raise expected("load_spec", "[tuning]", f"to be given for the grid of {method.name}", None, remedy)
    if spec.tuning.by != "train_loss" and spec.data.validation == 0:
        remedy = "set it to a number of examples to hold out; learning rates must not be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def _require_precondition(table: PreconditionTable, place: str) -> None:
    """Raise PrivacyError unless the options suit the rule; the rule is called once on tiny inputs to check."""
    function = getattr(side_information if table.by_counts else precondition, table.rule)
    # Tiny versions of the arguments that the experiment gives itself.
    public = PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none")
    given = {"gradient": public, "counts": torch.ones(10_000), "parameter": "p", "dim": 0, "source": "none"}
    parameters = inspect.signature(function).parameters
    for name in table.options:
        _require_option(name, [name for name in parameters if name not in given], f"{place}.{name}")
    try:
        function(**{name: value for name, value in given.items() if name in parameters}, **table.options)
    except (TypeError, ValueError, OverflowError) as error:
        raise expected("load_spec", place, f"to suit {table.rule}", error, "correct them") from error


def make_data(spec: Spec) -> data.DataSet:
    """Load the data, and check its size against the public count.

    The guarantee rests on this check: the plan's sample rate uses num_examples.

    Raises:
        PrivacyError: the data are not available, do not suit the model or the privacy unit, or do not hold exactly
            num_examples training examples.
    """
    loaded = with_public(_load(spec.data, spec.model.encoder), spec.data.public)
    if spec.data.elsewhere is not None:
        loaded = with_other_public(loaded, _load(spec.data.elsewhere, spec.model.encoder))
    loaded = to_reconstruct(loaded) if spec.data.reconstruct else loaded
    _require_suited(spec, loaded)
    for method in spec.methods:
        if method.needs_public:
            public_examples(method, loaded)
    if len(loaded.train) != spec.privacy.num_examples:
        raise PrivacyError(
            f"make_data: expected privacy.num_examples to be {len(loaded.train)}, the training examples of "
            f"{loaded.name} without {spec.data.validation} for validation and {spec.data.public} public ones, got "
            f"{spec.privacy.num_examples}; correct it."
        )
    return loaded


def _require_suited(spec: Spec, loaded: data.DataSet) -> None:
    """Raise PrivacyError unless each row of the data is one privacy unit, and the model takes inputs of their kind.

    The guarantee for users rests on the first check.
    """
    by_user, name = len(loaded.train.tensors) > 2, spec.data.name  # the third tensor counts each user's examples
    if by_user != (spec.privacy.privacy_unit == "user"):
        remedy = 'choose "debian-maintainers" or "stackoverflow", or leave privacy_unit and local out'
        if by_user:
            remedy = 'set privacy_unit = "user", count users in [privacy], and give each method a local table'
        got = f"data by {'user' if by_user else 'example'}"
        raise expected("load_spec", f"data.name {name!r}", f"to be by {spec.privacy.privacy_unit}", got, remedy)
    if spec.model.name in _OF_NUMBERS and not loaded.train.tensors[0].is_floating_point():
        remedy = 'choose "bag-of-words", or another model for text'
        raise expected("load_spec", "model.name", f"to take word ids, as {name!r} has", repr(spec.model.name), remedy)


def public_examples(method: MethodTable, loaded: data.DataSet) -> TensorDataset:
    """Return the public examples of a method, as its `public` table selects them.

    Raises:
        PrivacyError: the data hold none, or fewer than requested.
    """
    whole = loaded.other_public if method.public.other else loaded.public
    if whole is None:
        remedy = "give elsewhere, other_public or amazon in [data]"
        raise expected("make_data", "other public data", f"to be given for {method.name!r}", None, remedy)
    count = method.public.examples or len(whole)
    if count > len(whole):
        condition = f"to be at most {len(whole)} for {method.name!r}"
        raise expected("make_data", "public.examples", condition, count, f"lower it to {len(whole)}")
    return TensorDataset(*(tensor[:count] for tensor in whole.tensors))


def _load(table: DataTable, encoder: str | None) -> data.DataSet:
    """Call the data set's loader with the table's options, or raise PrivacyError for an option that it lacks."""
    loader, own = data.LOADERS[table.name], {"name", "public", "elsewhere", "reconstruct"}
    options = table.model_dump(exclude=own, exclude_none=True)
    parameters = inspect.signature(loader).parameters
    if "tokenizer" in parameters:
        options["tokenizer"] = encoder_folder(encoder)
    if "validation" not in table.model_fields_set:
        options.pop("validation")
    for name, value in options.items():
        if name not in parameters:
            raise expected("load_spec", f"data.{name}", f"to be absent for {table.name}", value, "remove it")
    return loader(**options)


def encoder_folder(name: str | None) -> str:
    """Return the folder of the pretrained model whose tokenizer reads the data; see data.pretrained.

    Raises:
        PrivacyError: no model is named, or it cannot be found.
    """
    if name is None:
        remedy = "give a folder, or a name on the Hugging Face hub"
        raise expected("load_spec", "model.encoder", "to be given for text that a tokenizer reads", None, remedy)
    return pretrained(name)
