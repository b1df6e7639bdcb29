"""The smaller tables of a TOML file that describes one experiment.

`spec` puts them together; `load_spec` and `build` read them too. The privacy guarantee does not rest on this file:
`PrivacyPlan` checks the numbers of [privacy].
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from privgrad import clip, filters, perturb
from privgrad.augmentation import Flip
from privgrad.gradient.contribution import Contribution
from privgrad.gradient.perturb import Perturbation
from privgrad.models import Activation
from privgrad.schedule import Decay
from privgrad.types import PrivacyUnit, SamplingScheme

Grid = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


class Table(BaseModel):
    """A table of the file: its keys are fixed, and its values have exactly the stated types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataTable(Table):
    """The table [data]: the data set, the number of validation examples, and the options of its loader.

    Exactly one of three keys gives the data. `name` is a data set of the library, or "package.module:function" for a
    function of the user. `file` is a table, and `folder` holds images or a data set of Hugging Face.

    `validation` examples of the training part are held out for tuning. After that, the last `public` examples are taken
    out of the training part and count as public. `elsewhere` names a second data set whose training part is public too.
    With `reconstruct`, the label of an input is the input itself. Every other key is an argument of the loader.
    """

    model_config = ConfigDict(extra="allow")

    name: str = ""  # of data.LOADERS, or "package.module:function"
    file: str | None = None
    folder: str | None = None
    validation: int = Field(default=0, ge=0)
    public: int = Field(default=0, ge=0)
    elsewhere: "DataTable | None" = None
    reconstruct: bool = False
    _home: Path = PrivateAttr(default=Path())

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the loader that are no field of this table. `build` and `load_spec` read them."""
        return dict(self.model_extra or {})

    @property
    def given(self) -> dict[str, Any]:
        """Return the keys that decide the loader, with its arguments. `sources` reads them."""
        return {"name": self.name, "file": self.file, "folder": self.folder} | self.options

    @property
    def source(self) -> str:
        """Return the name, file or folder of the data, for errors. `build` and `load_spec` read it."""
        return self.file or self.folder or self.name

    @property
    def home(self) -> Path:
        """Return the folder from which relative paths count: that of the TOML file. `sources` reads it."""
        return self._home

    def place(self, home: Path) -> None:
        """Set the folder of the TOML file, also for `elsewhere`. `load_spec` calls it."""
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
        """Return the keys that the file gives. `sources` reads them."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class BlockTable(Table):
    """One block of [features] with options: those of the extractor, or arguments of the user's function."""

    model_config = ConfigDict(extra="allow")

    name: str  # of featuring.BLOCKS, or "package.module:function"

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the block. `featuring` reads them."""
        return dict(self.model_extra or {})


class FeaturesTable(Table):
    """The table [features]: features that replace the inputs, computed once before the training.

    `blocks` are side by side, with the norms `weights`: names of `featuring.BLOCKS`, or "package.module:function" for a
    function of the user that returns an Extractor. A block with options is a table. `public` names the rows for the
    constants of blocks: synthetic images, or the public examples and inputs of the data set. With `whiten`, each block
    is whitened by such rows, and keeps at most `keep` directions; `public` is then the same by default. `folder` stores
    the features, which are as private as the data.
    """

    blocks: list[str | BlockTable] = Field(min_length=1)
    weights: Grid | None = None
    public: Literal["silhouettes", "pink-noise", "data"] | None = None
    whiten: Literal["silhouettes", "pink-noise", "data"] | None = None
    keep: int = Field(default=2048, ge=1)
    power: float | None = Field(default=None, ge=0, le=0.5)
    ridge: float | None = Field(default=None, gt=0)
    folder: str | None = None

    @property
    def tables(self) -> list[BlockTable]:
        """Return the blocks as tables. `featuring` reads them."""
        return [BlockTable(name=block) if isinstance(block, str) else block for block in self.blocks]


class PrivacyTable(Table):
    """The table [privacy]: the numbers that decide the guarantee.

    Apart from sampling, grid and unit they have no defaults. Give one of `target_epsilon` (of each training),
    `noise_multiplier` and `total_epsilon` (of a private comparison: tuning, scores and training together). `budget` is
    the file of a budget that a private comparison shares with other releases from the same data; see Budget. With
    `privacy_unit` "user", every number of examples is a number of users; see PrivacyPlan. With `simulate` K > 1, the
    trainings simulate this plan in batches of 1/K of its size, and have no privacy; see PrivacyPlan.scaled.
    """

    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    total_epsilon: float | None = Field(default=None, gt=0)
    budget: str | None = None
    delta: float
    max_grad_norm: float
    num_examples: int
    expected_batch_size: int
    steps: int
    sampling: SamplingScheme = "poisson"
    max_batch_size: int | None = None
    noise_on_grid: bool = False
    privacy_unit: PrivacyUnit = "example"
    simulate: int = Field(default=1, ge=1)


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
        """Return whether the rule uses public word counts. `build` and `load_spec` read it."""
        return self.rule in ("frequencies", "by_rank")


class PerturbTable(Table):
    """The point at which gradients are evaluated; `radius` is a number or a grid."""

    rule: Literal["BAM", "SAT", "RawSAM"]
    radius: Annotated[float, Field(ge=0)] | list[Annotated[float, Field(ge=0)]]
    mode: Literal["sam", "exact"] | None = None

    def make(self, radius: float) -> Contribution:
        """Return the perturbation with one radius."""
        kind: type[Perturbation] = getattr(perturb, self.rule)
        return kind(radius, **({} if self.mode is None else {"mode": self.mode}))


class AdaptiveClipTable(Table):
    """A rule that moves C, starting at the method's C; `options` are those of its class in `clip`."""

    rule: Literal["TargetFraction", "Quantile", "SquaredError"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def kind(self) -> Callable[..., clip.AdaptiveClip]:
        """Return the class of the rule."""
        return getattr(clip, self.rule)

    def make(self) -> clip.AdaptiveClip:
        """Return the rule."""
        return self.kind(**self.options)


class FilterTable(Table):
    """A filter of the released gradients; `options` are those of its class in `filters`.

    The rule "DiSK" is an EMA with gradients at the point of `perturb.DiSK`, both with the option `weight`.
    """

    rule: Literal["EMA", "DOPPLER", "Innovation", "LinearFilter", "DiSK"]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def kind(self) -> Callable[..., filters.LinearFilter]:
        """Return the class of the filter."""
        return getattr(filters, "EMA" if self.rule == "DiSK" else self.rule)

    def make(self) -> filters.LinearFilter:
        """Return the filter."""
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
        """Return the table that a name abbreviates. pydantic calls it."""
        return {"decay": value} if isinstance(value, str) else value


class TuningTable(Table):
    """The table [tuning]: how methods without a single rate are tuned.

    `by` is the score, the loss or a named metric on the validation examples, or the loss on the training examples (NOT
    private); see `metrics`.
    `noise_steps` is the grid of all private methods: every method gets the same number of trainings, see
    `tuner.wider`. A method whose optimizer has no noise step then gives a grid `lr` of the same length. `lr` is the
    grid of all methods without their own, where `noise_steps` is not given. With `extend`, a grid grows as long as the
    best value is at its edge. `seeds` are research seeds. With `simulate` K > 1, trainings of tuning simulate the plan
    in batches of 1/K of its size, and have no privacy; see PrivacyPlan.scaled.

    A private comparison has a `way` in place of seeds; see `prices`. `score_on` names the people whose noisy score
    chooses: those of the training set, other people who are held out, or public examples, for whom it is free.
    `mean_runs` and `shape` are the law of the number of trainings of "select": a truncated negative binomial.
    """

    noise_steps: Grid | None = None
    lr: Grid | None = None
    seeds: list[int] = Field(default=[], min_length=1)
    simulate: int = Field(default=1, ge=1)
    way: Literal["trials", "select"] | None = None
    score_on: Literal["training", "held-out", "public"] = "training"
    mean_runs: float = Field(default=8.0, ge=1)
    shape: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # an infinite one allows no run at all
    by: str = "accuracy"  # or loss, train_loss, or a named metric
    extend: bool = False


class RunTable(Table):
    """The table [run]: seeds, schedule, augmentation, evaluation, device and speed.

    `seeds` are the research seeds of a comparison. `schedule` is the learning rate over the steps; without it, the rate
    is constant. `augmentation_multiplicity` is the number of randomly shifted views of each image; `flip` also mirrors
    half of them. `ema_decay` is the decay of an average of the weights, which is then evaluated in place of the
    weights. `device` is the model's device; "auto" takes the GPU if there is one. `diagnose` records the effect of
    clipping and noise on gradients in final runs, NOT private. `tensorboard` also writes evaluations for TensorBoard.
    `metrics` are measured on the test part besides loss and score; see `metrics.metrics_of`.
    """

    seeds: list[int] = Field(default=[0], min_length=1)
    schedule: ScheduleTable | None = None
    num_evaluations: int = Field(default=10, ge=1)
    metrics: list[str] = []
    augmentation_multiplicity: int = Field(default=1, ge=1)
    flip: Flip | Literal["none"] = "none"
    ema_decay: float | None = Field(default=None, ge=0, lt=1)
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    engine: Literal["factored", "vmap"] = "factored"
    microbatch_size: int | None = Field(default=None, ge=1)
    memory_mb: float | None = Field(default=None, gt=0)
    diagnose: bool = False
    tensorboard: bool = False

    @property
    def mirrored(self) -> Flip | None:
        """Return the direction in which views are mirrored. `one_training` and `audit_spec` read it."""
        return None if self.flip == "none" else self.flip
