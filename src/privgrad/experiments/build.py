"""The parts of one training of a spec: data, model and side information.

`runner` and `audit_spec` call it; the items of papers call `make_model`. `load_spec` checks the names of models against
MODELS.

The privacy guarantee rests on `make_data`, `public_examples`, `public_gradient`, `preconditioner` and `warm_start`.
Private examples may enter a training only through the losses of `measures.losses_for`. The guarantee does not rest on
the models.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from privgrad import models, precondition, side_information
from privgrad.data import DataSet
from privgrad.data.dataset import to_reconstruct, with_other_public, with_public
from privgrad.errors import expected
from privgrad.experiments.measures import losses_for
from privgrad.experiments.metrics import require_suited
from privgrad.experiments.public_inputs import public_inputs, require_synthetic
from privgrad.experiments.sources import encoder_folder, load, own_model, require_count
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.experiments.tables import ModelTable, PreconditionTable, WarmStartTable
from privgrad.gradient.precondition import Preconditioner
from privgrad.gradient.public_gradient import PublicGradient


class Architecture(NamedTuple):
    """A model that a spec can name: the function that makes it, and the kind of its inputs.

    `make_model` and `require_model` call `make`.
    """

    make: Callable[[ModelTable, DataSet], nn.Module]
    inputs: Literal["images", "vectors", "words", "own"]


MODELS: dict[str, Architecture] = {
    "autoencoder": Architecture(lambda _, data: models.autoencoder(in_features=_size(data)), "vectors"),
    "bag-of-words": Architecture(
        lambda _, data: models.bag_of_words(vocabulary=_vocabulary(data), num_classes=data.num_classes), "words"
    ),
    "cnn-small": Architecture(
        lambda table, data: models.cnn_small(**_images(data), activation=table.activation), "images"
    ),
    "cnn2": Architecture(lambda _, data: models.cnn2(**_images(data)), "images"),
    "cnn5": Architecture(lambda table, data: models.cnn5(**_images(data), activation=table.activation), "images"),
    "head": Architecture(
        lambda _, data: models.UnitLinear(_size(data), data.num_classes, input_dims=len(data.input_shape)), "vectors"
    ),
    "language-model": Architecture(
        lambda table, data: models.LanguageModel(
            num_tokens=_vocabulary(data), length=data.input_shape[0], width=table.hidden
        ),
        "words",
    ),
    "linear": Architecture(
        lambda _, data: models.linear(
            in_features=_size(data), num_classes=data.num_classes, input_dims=len(data.input_shape)
        ),
        "vectors",
    ),
    "lora-language-model": Architecture(
        lambda table, _: models.LoraLanguageModel(encoder_folder(table.encoder)), "words"
    ),
    "mlp": Architecture(
        lambda table, data: models.mlp(
            in_features=_size(data),
            hidden=table.hidden,
            num_classes=data.num_classes,
            activation=table.activation,
            depth=table.depth,
            input_dims=len(data.input_shape),
        ),
        "vectors",
    ),
    "pair-classifier": Architecture(
        lambda table, data: models.PairClassifier(encoder_folder(table.encoder), num_classes=data.num_classes), "words"
    ),
    "resnet9": Architecture(lambda table, data: models.resnet9(**_images(data), width=table.hidden), "images"),
    "sparse-linear": Architecture(lambda _, data: models.SparseLinear(_vocabulary(data), data.num_classes), "words"),
    "wide-resnet": Architecture(lambda _, data: models.wide_resnet(**_images(data)), "images"),
    "word-lstm": Architecture(
        lambda table, data: models.WordLSTM(
            vocabulary=_vocabulary(data), num_classes=data.num_classes, width=table.hidden
        ),
        "words",
    ),
}


def _size(data: DataSet) -> int:
    """Return the number of values of one input."""
    return torch.Size(data.input_shape).numel()


def _images(data: DataSet) -> dict[str, int]:
    """Return the arguments that all models for images take from the data."""
    return {"in_channels": data.input_shape[0], "num_classes": data.num_classes}


def make_data(spec: Spec) -> DataSet:
    """Load the data, and check its size against the public count.

    `runner.open_folder` and `audit_spec` call it. The guarantee rests on two steps: the public examples leave the
    training set, and each row is one privacy unit. It does not rest on the count, because a plan draws and charges at
    the same sample rate.

    Raises:
        PrivacyError: the data are not available, or do not suit the model, the unit, num_examples or the metrics.
    """
    loaded = with_public(load(spec.data, spec.model.encoder), spec.data.public)
    if spec.data.elsewhere is not None:
        loaded = with_other_public(loaded, load(spec.data.elsewhere, spec.model.encoder))
    loaded = to_reconstruct(loaded) if spec.data.reconstruct else loaded
    _require_suited(spec, loaded)
    for method in spec.methods:
        if method.needs_public:
            public_examples(method, loaded)
        if method.precondition is not None and method.precondition.public is not None:
            require_synthetic(method.precondition.public, loaded)
    require_count(spec.data, loaded, spec.privacy.num_examples)
    require_suited(spec, loaded)
    return loaded


def _require_suited(spec: Spec, loaded: DataSet) -> None:
    """Raise PrivacyError unless each row of the data is one privacy unit.

    The guarantee for users rests on the first check.
    """
    by_user, name = len(loaded.train.tensors) > 2, spec.data.source  # the third tensor counts each user's examples
    by_unit = by_user or loaded.by_person
    if by_unit != (spec.privacy.privacy_unit == "user"):
        remedy = 'choose "debian-maintainers" or "stackoverflow", or leave privacy_unit and local out'
        if by_unit:
            remedy = 'set privacy_unit = "user", count users in [privacy], and give each method a local table'
            remedy = remedy if by_user else 'set privacy_unit = "user", and count persons in [privacy]'
        got = f"data by {'user' if by_unit else 'example'}"
        raise expected("load_spec", f"data.name {name!r}", f"to be by {spec.privacy.privacy_unit}", got, remedy)
    for method in spec.methods:
        if by_unit and by_user != (method.local is not None):
            rows = "given for data by user" if by_user else "absent for data whose rows are persons"
            condition = f"to be {rows}, {name}"
            got = None if method.local is None else method.local.model_dump(exclude_defaults=True)
            remedy = "add local with lr and batch_size" if by_user else "leave it out"
            raise expected("load_spec", f"methods.{method.name}.local", condition, got, remedy)
    if len(loaded.test) == 0 or (len(loaded.validation) == 0 and _is_validated(spec)):
        part = "validation" if len(loaded.test) else "test"
        remedy = f"give {part}_share, or return more {part} examples"
        raise expected("make_data", f"the {part} part of {name}", "to hold at least 1 example", 0, remedy)


def _is_validated(spec: Spec) -> bool:
    """Return whether a method is tuned by its results on validation examples."""
    by_validation = spec.tuning is not None and spec.tuning.by != "train_loss" and spec.tuning.way is None
    return by_validation and any(spec.is_tuned(method) for method in spec.methods)


def public_examples(method: MethodTable, loaded: DataSet) -> TensorDataset:
    """Return the public examples of a method, as its `public` table selects them.

    `runner` gives them to `warm_start`.

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


def require_model(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the model takes inputs of the data's kind, and images of their size.

    `runner.open_folder` and `audit_spec` call it, with each method's own model and features.
    """
    name, takes_rows = spec.data.source, spec.model.name in ("head", "linear", "mlp") or ":" in spec.model.name
    is_image = _architecture(spec).inputs == "images" and len(data.input_shape) == 3
    if data.by_person and not (takes_rows or is_image):
        remedy = 'choose "head", "linear" or "mlp", or a function of yours'
        condition = f"to take the rows of a person, as {name!r} has"
        raise expected("load_spec", "model.name", condition, repr(spec.model.name), remedy)
    if data.train.tensors[0].dtype == torch.int8 and _architecture(spec).inputs != "own":  # see features.text_rows
        remedy = 'add [features] with blocks = ["tf-idf"] or "frozen-text", and choose the model "head"'
        raise expected("load_spec", "model.name", f"to take texts, as {name!r} has", repr(spec.model.name), remedy)
    if _architecture(spec).inputs in ("images", "vectors") and not data.train.tensors[0].is_floating_point():
        remedy = 'choose "bag-of-words" or another model for text, or add [features]'
        raise expected("load_spec", "model.name", f"to take word ids, as {name!r} has", repr(spec.model.name), remedy)
    if _architecture(spec).inputs != "images":
        return
    try:
        with torch.device("meta"):  # shapes only: nothing is computed, and no random number is drawn
            _architecture(spec).make(spec.model, data)(torch.zeros(1, *data.input_shape))
    except RuntimeError as error:
        condition = f"to take inputs of shape {data.input_shape}, as {spec.data.source!r} has"
        remedy = "set size = 28 in [data] if the data set supports it, or choose another model"
        raise expected("load_spec", "model.name", condition, repr(spec.model.name), remedy) from error


def make_model(spec: Spec, data: DataSet) -> nn.Module:
    """Return a new model for the data on the spec's device, initialized from torch's global random stream.

    `runner`, `audit_spec` and `papers.stops` call it.
    """
    gpu = spec.run.device == "cuda" or (spec.run.device == "auto" and torch.cuda.is_available())
    architecture = _architecture(spec)
    model = architecture.make(spec.model, data)
    if data.by_person and architecture.inputs == "images":
        model = models.EachRow(model)
    return model.to("cuda" if gpu else "cpu")


def _architecture(spec: Spec) -> Architecture:
    """Return the model that a spec names, of the library or of the user."""
    return Architecture(own_model, "own") if ":" in spec.model.name else MODELS[spec.model.name]


def _vocabulary(data: DataSet) -> int:
    """Return the number of word ids; raise PrivacyError for data that are not text."""
    if data.vocabulary is None:
        raise expected(
            "load_spec", "data.name", "to be text for this model", data.name, "choose another model or data set"
        )
    return data.vocabulary


def public_gradient(method: MethodTable, model: nn.Module, data: DataSet) -> PublicGradient | None:
    """Return the gradient on the data's public examples, or None for a method without public examples.

    `runner` and `audit_spec` call it.
    """
    if not method.needs_public:
        return None
    examples, origin = (
        public_examples(method, data),
        "from elsewhere" if method.public.other else "taken out of the training set",
    )
    source = f"public data: {len(examples)} examples {origin}"
    return PublicGradient(model, losses_for(data), examples, source=source, batch_size=method.public.batch_size)


def preconditioner(
    table: PreconditionTable | None, public: PublicGradient | None, model: nn.Module, data: DataSet
) -> Preconditioner | None:
    """Return the preconditioner that a method's table describes, or None without a table.

    `runner` and `audit_spec` call it.

    Raises:
        PrivacyError: the rule needs public word counts or another kind of data.
    """
    if table is None:
        return None
    if table.by_counts:
        if data.public_counts is None:
            remedy = "choose a data set with public text in addition to the examples"
            raise expected("load_spec", "data.name", "to have public word counts", data.name, remedy)
        # The word table is the model's first parameter; its rows are words.
        name = next(name for name, _ in model.named_parameters())
        of_counts, provenance = getattr(side_information, table.rule), data.counts_provenance
        own = (
            "words of the examples too" if provenance == "private-derived" else "words of texts apart from the examples"
        )
        facts = {"parameter": name, "dim": 0, "source": own, "provenance": provenance}
        scales = of_counts(data.public_counts, **facts, **table.options)
        return precondition.fixed(scales)
    if table.rule == "raw_ideal_rmsprop":
        return precondition.raw_ideal_rmsprop(**table.options)
    if table.rule == "inputs" and table.public is not None:
        examples, origin = public_inputs(table.public, data)
        return precondition.inputs(examples, source=origin, **table.options)
    assert public is not None
    if table.rule == "inputs":
        return precondition.inputs(public.examples[0], source=public.source, **table.options)
    return getattr(precondition, table.rule)(public, **table.options)


def warm_start(table: WarmStartTable, model: nn.Module, examples: TensorDataset, data: DataSet) -> None:
    """Train on public examples with ordinary SGD.

    `runner` calls it before the private training.

    Privacy:
        The public examples get no privacy; the private examples are not used.
    """
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=table.lr), losses_for(data)
    for _ in range(table.epochs):
        order = torch.randperm(len(examples))
        for chosen in order.split(table.batch_size):
            optimizer.zero_grad()
            loss_fn(model, tuple(tensor[chosen] for tensor in examples.tensors)).mean().backward()
            optimizer.step()
    optimizer.zero_grad()
