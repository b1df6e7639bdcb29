"""TOML -> a checked description of an experiment."""

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
from privgrad.types import NoisyGradient, PrivacyUnit, SamplingScheme

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
_OF_NUMBERS = ("autoencoder", "cnn-small", "cnn2", "cnn5", "linear", "mlp", "resnet9", "wide-resnet")  # models

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
    """What of a method is tuned; a radius only where gradients are perturbed, local_lr only where users train."""

    max_grad_norm: float
    lr: float
    radius: float | None = None
    local_lr: float | None = None


Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataTable(_Table):
    """Which data, how much of its training part is held out for tuning, and its loader's own options.

    `public` examples, from the end of what is left, are taken out of the training part and count as public.
    `elsewhere` is another data set, by name or by path, whose training part is public too. `reconstruct`: the label of
    an input is the input.
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
    """Which model."""

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
    # What is pretrained: a folder, or a name on the Hugging Face hub; its tokenizer reads the data.
    encoder: str | None = None


class PrivacyTable(_Table):
    """What decides privacy: no defaults, save for the way of sampling. Either a budget or the noise itself.

    With `privacy_unit` "user" all that is said of examples is said of users; see PrivacyPlan.
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
    """What gradients are divided by before they are clipped: a rule on public data, or on public word counts."""

    rule: Literal["public_rmsprop", "public_adam", "public_adagrad", "raw_ideal_rmsprop", "frequencies", "by_rank"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def by_counts(self) -> bool:
        """Whether it goes by public word counts."""
        return self.rule in ("frequencies", "by_rank")


class PerturbTable(_Table):
    """Where gradients are taken; `radius` is a number or a grid."""

    rule: Literal["BAM", "SAT", "RawSAM"]
    radius: Annotated[float, Field(ge=0)] | list[Annotated[float, Field(ge=0)]]
    mode: Literal["sam", "exact"] | None = None

    def make(self, radius: float) -> Perturbation:
        """The perturbation, with one radius."""
        kind: type[Perturbation] = getattr(perturb, self.rule)
        return kind(radius, **({} if self.mode is None else {"mode": self.mode}))


class LocalTable(_Table):
    """How each user trains: `lr` is a number or a grid."""

    lr: Annotated[float, Field(gt=0)] | Grid
    batch_size: int = Field(ge=1)
    epochs: int = Field(default=1, ge=1)


class PublicTable(_Table):
    """Which public examples a method uses: the first so many of those taken out of training, or of other ones."""

    other: bool = False
    examples: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)


class WarmStartTable(_Table):
    """Ordinary SGD on the public examples, before the private training."""

    lr: float = Field(gt=0)
    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)


class MethodTable(_Table):
    """One optimizer with its options.

    `lr` is a number, or the method's own grid; without it, [tuning]'s grid. `max_grad_norm` likewise; without it,
    [privacy]'s. `group_size` examples are clipped as one, with the sensitivity that this has. `assumed_noise_std` is
    what the optimizer is told of the noise, true or not: for ablations. `non_private` neither clips nor adds noise.
    `local` is there where the privacy unit is a user; the optimizer is then the server's.
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
        """The learning rate, where it is not to be tuned."""
        return None if isinstance(self.lr, list) else self.lr

    @property
    def needs_public(self) -> bool:
        """Whether it takes gradients on public examples, or starts from them."""
        by_rule = self.precondition is not None and self.precondition.rule.startswith("public")
        return by_rule or self.warm_start is not None or self.optimizer in _PUBLIC_OPTIMIZERS

    def perturbation(self, candidate: Candidate) -> Perturbation | None:
        """Where its gradients are taken, or what its users contribute; None is gradients at the weights."""
        if self.local is not None and candidate.local_lr is not None:
            return LocalTraining(candidate.local_lr, batch_size=self.local.batch_size, epochs=self.local.epochs)
        return None if self.perturb is None or candidate.radius is None else self.perturb.make(candidate.radius)

    def make(
        self, named_parameters: NamedParameters, lr: float, *, public: PublicGradient | None = None, steps: int = 1
    ) -> optim.PrivateOptimizer:
        """The optimizer, over a model's parameters."""
        kind: type[optim.PrivateOptimizer] = getattr(optim, self.optimizer)
        extra = {"horizon": steps} if self.optimizer == "MirrorDescent" else {}
        extra |= {"public": public or dict} if self.optimizer in _PUBLIC_OPTIMIZERS else {}
        optimizer = kind(named_parameters, lr=lr, **extra, **self.options)
        if (assumed := self.assumed_noise_std) is not None:

            def tell(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                return args, kwargs | {"grad": NoisyGradient(kwargs["grad"].values, assumed)}

            optimizer.register_step_pre_hook(tell)
        return optimizer


class TuningTable(_Table):
    """How methods without a number for lr are tuned.

    By accuracy or loss on the validation examples, or by loss on the training examples (NOT private). `lr` is the grid
    of all that have none of their own. `extend`: while a method's best is at an edge, its grid grows there by half a
    power of ten.
    """

    lr: Grid | None = None
    seeds: list[int] = Field(min_length=1)
    by: Literal["accuracy", "loss", "train_loss"] = "accuracy"
    extend: bool = False


class RunTable(_Table):
    """What decides speed and how much is shown; research seeds of a comparison; randomly moved views of each image.

    `average`: decay of an average of the weights, which is what is then measured. `device`: where the model is;
    "auto" takes the GPU if there is one. `diagnose`: record what clipping and noise do to gradients in final runs, NOT
    private. `tensorboard`: write evaluations for TensorBoard too.
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
    """One experiment."""

    title: str
    data: DataTable
    model: ModelTable
    privacy: PrivacyTable
    methods: list[MethodTable] = Field(min_length=1)
    tuning: TuningTable | None = None
    run: RunTable = RunTable()
    paper: dict[str, Any] = Field(default_factory=dict)

    def grid(self, method: MethodTable) -> list[Candidate]:
        """What a method is tuned on at first; one candidate if there is nothing to tune."""
        rates = method.lr or (self.tuning.lr if self.tuning else None) or []
        norms = method.max_grad_norm or self.privacy.max_grad_norm
        radii = None if method.perturb is None else method.perturb.radius
        local = None if method.local is None else method.local.lr

        def each(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        return [Candidate(*values) for values in itertools.product(*map(each, (norms, rates, radii, local)))]

    def is_tuned(self, method: MethodTable) -> bool:
        """Whether a method has more than one candidate, or may get more."""
        return method.fixed_lr is None or len(self.grid(method)) > 1

    def plan(
        self, seed: int | None, method: MethodTable | None = None, max_grad_norm: float | None = None
    ) -> PrivacyPlan:
        """The plan that the experiment's methods train under, with a method's own clipping norm if it has one."""
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
            got = "neither" if self.privacy.target_epsilon is None else "both"
            remedy = "give the budget, or the noise itself"
            raise expected("load_spec", "privacy.target_epsilon or noise_multiplier", "to be given", got, remedy)
        if self.privacy.noise_multiplier is None:
            return PrivacyPlan.for_budget(**numbers, seed=seed)
        rate = self.privacy.expected_batch_size / self.privacy.num_examples
        return PrivacyPlan(**numbers, sample_rate=rate, seed=seed)


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file.

    Raises:
        PrivacyError: unreadable, an unknown option (named, with the nearest valid one), or a wrong value.
    """
    if problem := file_problem(path):
        remedy = "give the path of a TOML file that describes an experiment"
        raise expected("load_spec", "path", "to be a readable TOML file", f"{path}, which {problem}", remedy)
    try:
        with Path(path).open("rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise expected("load_spec", "path", "to be a readable TOML file", path, "give its path") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of too many digits; too deep
        raise expected("load_spec", f"{path}", "to be TOML", error, "correct that place") from error
    return check_spec(raw, path)


def check_spec(raw: Mapping[str, Any], path: str | Path) -> Spec:
    """Turn what a TOML file says into a Spec.

    Args:
        raw: the file's tables.
        path: named in errors.
    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that would be the private ones.
    """
    _require_known(raw, Spec, "")
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(first["loc"], raw)
        if first["type"] == "missing":
            raise expected("load_spec", place, "to be given", "nothing", f"add it to {path}") from error
        got = repr(first["input"])[:80]
        if first["type"] == "literal_error" and "ctx" in first:
            valid = re.findall("'([^']*)'", first["ctx"]["expected"])
            remedy = did_you_mean(first["input"], valid, f"choose one, and correct it in {path}")
            raise expected("load_spec", place, f"to be one of {', '.join(valid)}", got, remedy) from error
        raise expected("load_spec", place, f"to be right ({first['msg']})", got, f"correct it in {path}") from error
    other = spec.data.elsewhere
    if other is not None and (other.name, other.path) == (spec.data.name, spec.data.path):
        remedy = "its training part would be the private examples; use data.public to take some out of them"
        raise expected("load_spec", "data.elsewhere", "to be another data set", f"{other.name} again", remedy)
    for method in spec.methods:
        _require_method(method, spec)
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise expected("load_spec", "methods", "to have different names", names, f"rename one in {path}")
    return spec


def _place(loc: tuple[int | str, ...], raw: Any) -> str:
    """Name a place in a TOML file as its writer would: a method by its name, another entry of a list counted from 1."""
    words: list[str] = []
    for part in loc:
        inner = raw[part] if isinstance(raw, dict) and part in raw else None
        if isinstance(raw, list) and isinstance(part, int):
            inner = raw[part]
            name = inner.get("name") if isinstance(inner, dict) else None
            words += [name] if isinstance(name, str) and name else [f"{words.pop()} (entry {part + 1})"]
        elif isinstance(raw, dict):
            words.append(str(part))  # what follows the last table or list is how pydantic calls a kind of value
        raw = inner
    return ".".join(words)


def _require_known(raw: Mapping[str, Any], table: type[BaseModel], place: str) -> None:
    for name, value in raw.items():
        _require_option(name, list(table.model_fields), f"{place}{name}")
        for inner in _tables_in(table.model_fields[name].annotation):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    _require_known(item, inner, f"{place}{name}.")


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    candidates = (annotation, *get_args(annotation))
    return [kind for kind in candidates if inspect.isclass(kind) and issubclass(kind, BaseModel)]


def _require_option(name: str, valid: list[str], place: str) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        remedy = f"did you mean {near[0]!r}? Valid are {', '.join(valid)}"
        raise expected("load_spec", "options", "to be known", f"{place!r}", remedy)


def _require_method(method: MethodTable, spec: Spec) -> None:
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
        remedy = "add local = { lr = 0.1, batch_size = 20 }, say"
        raise expected("load_spec", local, 'to say how each user trains, for privacy_unit = "user"', "nothing", remedy)
    if method.local is not None and unit == "example":
        remedy = 'leave it out, or give [privacy] privacy_unit = "user" and [data] that are by user'
        raise expected("load_spec", local, 'to be there for privacy_unit = "user" only', "it for examples", remedy)
    if method.local is not None and method.perturb is not None:
        raise expected("load_spec", local, "to be given without perturb", "both", "leave one of the two out")
    if method.local is not None and spec.tuning is not None and spec.tuning.by == "train_loss":
        remedy = 'tune by "accuracy" or "loss" on packages or users that are held out'
        raise expected("load_spec", "tuning.by", "to be of examples held out, for users", "'train_loss'", remedy)
    if "public" in method.model_fields_set and not method.needs_public:
        remedy = "remove it, or give a precondition rule, a warm_start or an optimizer with public gradients"
        raise expected("load_spec", f"methods.{method.name}.public", "to be used", "a method that does not", remedy)
    if method.needs_public and not method.public.other and spec.data.public == 0:
        remedy = "say how many examples of the training part count as public"
        raise expected("load_spec", "data.public", f"to be positive for {method.name}", 0, remedy)
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        remedy = "give the method its lr, or a grid and a [tuning] table"
        raise expected("load_spec", f"methods.{method.name}.lr", "to be given", "none", remedy)
    if spec.tuning is None:
        remedy = "add [tuning] with its seeds, or give one lr and one max_grad_norm"
        raise expected("load_spec", "[tuning]", f"to be there for the grid of {method.name}", "none", remedy)
    if spec.tuning.by != "train_loss" and spec.data.validation == 0:
        remedy = "hold out validation examples: learning rates are not to be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def _require_precondition(table: PreconditionTable, place: str) -> None:
    function = getattr(side_information if table.by_counts else precondition, table.rule)
    # What the experiment gives itself, in small.
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
    """Load the data, and check it against the public count.

    Raises:
        PrivacyError: no source has it, or it does not hold num_examples training examples.
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
            f"make_data: expected privacy.num_examples to be the size of the training set, got "
            f"{spec.privacy.num_examples} where {loaded.name} has {len(loaded.train)} after "
            f"{spec.data.validation} held out and {spec.data.public} public; correct it."
        )
    return loaded


def _require_suited(spec: Spec, loaded: data.DataSet) -> None:
    """Raise PrivacyError unless the data's rows are of the privacy unit, and the model takes inputs of their kind."""
    by_user, name = len(loaded.train.tensors) > 2, spec.data.name  # the third says how many examples a user has
    if by_user != (spec.privacy.privacy_unit == "user"):
        remedy = 'take "debian-maintainers" or "stackoverflow", or leave privacy_unit and local out'
        if by_user:
            remedy = 'give privacy_unit = "user", say all [privacy] numbers of users, and each method its local'
        got = f"data by {'user' if by_user else 'example'}"
        raise expected("load_spec", f"data.name {name!r}", f"to be by {spec.privacy.privacy_unit}", got, remedy)
    if spec.model.name in _OF_NUMBERS and not loaded.train.tensors[0].is_floating_point():
        remedy = 'take "bag-of-words", or another model for text'
        raise expected(
            "load_spec", "model.name", f"to take ids of words, as {name!r} has", repr(spec.model.name), remedy
        )


def public_examples(method: MethodTable, loaded: data.DataSet) -> TensorDataset:
    """Those that a method's table says.

    Raises:
        PrivacyError: there are none, or fewer.
    """
    whole = loaded.other_public if method.public.other else loaded.public
    if whole is None:
        remedy = "give [data] elsewhere, other_public or amazon"
        raise expected("make_data", "other public data", f"to be there for {method.name!r}", "none", remedy)
    count = method.public.examples or len(whole)
    if count > len(whole):
        remedy = "ask for fewer"
        raise expected("make_data", "public.examples", f"to be at most {len(whole)} for {method.name!r}", count, remedy)
    return TensorDataset(*(tensor[:count] for tensor in whole.tensors))


def _load(table: DataTable, encoder: str | None) -> data.DataSet:
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
    """Where the pretrained model lies whose tokenizer reads the data; see data.pretrained.

    Raises:
        PrivacyError: none named, or none to be had.
    """
    if name is None:
        remedy = "give a folder, or a name on the Hugging Face hub"
        raise expected("load_spec", "model.encoder", "to be given for text of a tokenizer", "none", remedy)
    return pretrained(name)
