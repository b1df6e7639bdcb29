"""The parts of one training of a spec: data and model, by name, file or function of the user, and side information.

Private examples may enter a training only through the losses of `metrics.losses_for`.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad import features, models, precondition
from privgrad.data import DataSet, image_folder, table
from privgrad.data.dataset import to_reconstruct, with_other_public, with_public
from privgrad.data.images import require_images
from privgrad.data.schema import ROW, Where, schema_of
from privgrad.data.table import require_every, require_split
from privgrad.errors import did_you_mean, expected
from privgrad.features.pretrained import pretrained
from privgrad.gradient.functional import evaluating
from privgrad.gradient.transform import Preconditioner
from privgrad.plan import PrivacyPlan
from privgrad.precondition import counts as side_information
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.types import PrivacyUnit
from privgrad_lab.data import LOADERS
from privgrad_lab.metrics import losses_for, require_suited
from privgrad_lab.spec import (
    DataTable,
    MethodTable,
    ModelTable,
    PreconditionTable,
    Spec,
    Synthetic,
    WarmStartTable,
    called,
    imported,
)


class Architecture(NamedTuple):
    """A model that a spec can name: the function that makes it, and the kind of its inputs."""

    make: Callable[[ModelTable, DataSet], nn.Module]
    inputs: Literal["images", "vectors", "words", "own"]


def _vectors(data: DataSet) -> dict[str, int]:
    """Return the arguments that models of vectors take from the data, in whose rows a person may have several ones."""
    in_features = torch.Size(data.input_shape).numel()
    return {"in_features": in_features, "num_classes": data.num_classes, "input_dims": len(data.input_shape)}


def _images(data: DataSet) -> dict[str, int]:
    """Return the arguments that models of images take from the data."""
    return {"in_channels": data.input_shape[0], "num_classes": data.num_classes}


def _words(data: DataSet) -> dict[str, int]:
    """Return the arguments that models of word ids take from the data."""
    return {"vocabulary": _vocabulary(data), "num_classes": data.num_classes}


def _vocabulary(data: DataSet) -> int:
    """Return the number of word ids; raise PrivacyError for data that are not text."""
    if data.vocabulary is None:
        remedy = "choose another model or data set"
        raise expected("load_spec", "data.name", "to be text for this model", data.name, remedy)
    return data.vocabulary


def _head(_: ModelTable, data: DataSet) -> nn.Module:
    sizes = _vectors(data)
    return models.UnitLinear(sizes["in_features"], data.num_classes, input_dims=sizes["input_dims"])


def _mlp(table: ModelTable, data: DataSet) -> nn.Module:
    return models.mlp(**_vectors(data), hidden=table.hidden, activation=table.activation, depth=table.depth)


def _language_model(table: ModelTable, data: DataSet) -> nn.Module:
    return models.LanguageModel(num_tokens=_vocabulary(data), length=data.input_shape[0], width=table.hidden)


def _pair_classifier(table: ModelTable, data: DataSet) -> nn.Module:
    return models.PairClassifier(encoder_folder(table.encoder), num_classes=data.num_classes)


MODELS: dict[str, Architecture] = {
    "autoencoder": Architecture(
        lambda _, data: models.autoencoder(in_features=_vectors(data)["in_features"]), "vectors"
    ),
    "bag-of-words": Architecture(lambda _, data: models.bag_of_words(**_words(data)), "words"),
    "cnn-small": Architecture(
        lambda table, data: models.cnn_small(**_images(data), activation=table.activation), "images"
    ),
    "cnn2": Architecture(lambda _, data: models.cnn2(**_images(data)), "images"),
    "cnn5": Architecture(lambda table, data: models.cnn5(**_images(data), activation=table.activation), "images"),
    "head": Architecture(_head, "vectors"),
    "language-model": Architecture(_language_model, "words"),
    "linear": Architecture(lambda _, data: models.linear(**_vectors(data)), "vectors"),
    "lora-language-model": Architecture(
        lambda table, _: models.LoraLanguageModel(encoder_folder(table.encoder)), "words"
    ),
    "mlp": Architecture(_mlp, "vectors"),
    "pair-classifier": Architecture(_pair_classifier, "words"),
    "resnet9": Architecture(lambda table, data: models.resnet9(**_images(data), width=table.hidden), "images"),
    "sparse-linear": Architecture(lambda _, data: models.SparseLinear(_vocabulary(data), data.num_classes), "words"),
    "wide-resnet": Architecture(lambda _, data: models.wide_resnet(**_images(data)), "images"),
    "word-lstm": Architecture(lambda table, data: models.WordLSTM(**_words(data), width=table.hidden), "words"),
}


def make_data(spec: Spec) -> DataSet:
    """Load the data, and check its size against the public count.

    The guarantee rests on two steps: the public examples leave the training set, and each row is one privacy unit. It
    does not rest on the count, because a plan draws and charges at the same sample rate.

    Raises:
        PrivacyError: the data are not available, or do not suit the model, the unit, num_examples or the metrics.
    """
    loaded = with_public(load(spec.data, spec.model.encoder), spec.data.public)
    if spec.data.elsewhere is not None:
        loaded = with_other_public(loaded, load(spec.data.elsewhere, spec.model.encoder))
    loaded = to_reconstruct(loaded) if spec.data.reconstruct else loaded
    if loaded.schema is not None and loaded.schema.bounds is not None:
        remedy = "train it in Python, by data.table and fit_head with bounds"
        raise expected("make_data", "the label", "to be a class", f"a number within {loaded.schema.bounds}", remedy)
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
    """Raise PrivacyError unless each row of the data is one privacy unit, and no part that is needed is empty."""
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
    by_validation = spec.tuning is not None and spec.tuning.by != "train_loss" and spec.tuning.way is None
    is_validated = by_validation and any(spec.is_tuned(method) for method in spec.methods)
    if len(loaded.test) == 0 or (len(loaded.validation) == 0 and is_validated):
        part = "validation" if len(loaded.test) else "test"
        remedy = f"give {part}_share, or return more {part} examples"
        raise expected("make_data", f"the {part} part of {name}", "to hold at least 1 example", 0, remedy)


def public_examples(method: MethodTable, loaded: DataSet) -> TensorDataset:
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


def require_model(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the model takes inputs of the data's kind, and images of their size."""
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
    """Return a new model for the data on the spec's device, initialized from torch's global random stream."""
    gpu = spec.run.device == "cuda" or (spec.run.device == "auto" and torch.cuda.is_available())
    architecture = _architecture(spec)
    model = architecture.make(spec.model, data)
    if data.by_person and architecture.inputs == "images":
        model = models.EachRow(model)
    return model.to("cuda" if gpu else "cpu")


def _architecture(spec: Spec) -> Architecture:
    """Return the model that a spec names, of the library or of the user."""
    return Architecture(own_model, "own") if ":" in spec.model.name else MODELS[spec.model.name]


def public_gradient(method: MethodTable, model: nn.Module, data: DataSet) -> PublicGradient | None:
    """Return the gradient on the data's public examples, or None for a method without public examples."""
    if not method.needs_public:
        return None
    examples = public_examples(method, data)
    origin = "from elsewhere" if method.public.other else "taken out of the training set"
    source = f"public data: {len(examples)} examples {origin}"
    return PublicGradient(model, losses_for(data), examples, source=source, batch_size=method.public.batch_size)


def preconditioner(
    table: PreconditionTable | None, public: PublicGradient | None, model: nn.Module, data: DataSet
) -> Preconditioner | None:
    """Return the preconditioner that a method's table describes, or None without a table."""
    if table is None:
        return None
    if table.by_counts:
        if data.public_counts is None:
            remedy = "choose a data set with public text in addition to the examples"
            raise expected("load_spec", "data.name", "to have public word counts", data.name, remedy)
        # The word table is the model's first parameter; its rows are words.
        name = next(name for name, _ in model.named_parameters())
        of_counts = getattr(side_information, table.rule)
        facts: dict[str, Any] = {"parameter": name, "dim": 0, "provenance": data.counts_provenance}
        facts["source"] = "words of texts apart from the examples"
        if data.counts_provenance == "private-derived":
            facts["source"] = "words of the examples too"
        return precondition.fixed(of_counts(data.public_counts, **facts, **table.options))
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
    """Train on public examples with ordinary SGD. They get no privacy, and private examples are not used."""
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=table.lr), losses_for(data)
    for _ in range(table.epochs):
        order = torch.randperm(len(examples))
        for chosen in order.split(table.batch_size):
            optimizer.zero_grad()
            loss_fn(model, tuple(tensor[chosen] for tensor in examples.tensors)).mean().backward()
            optimizer.step()
    optimizer.zero_grad()


_FAR = {True: 2, False: 4}  # times num_examples: more persons, or rows, than this waste much of the epsilon
_FILES = (table, image_folder)  # loaders of files, whose `path` is given by file or folder


def find_loader(given: Mapping[str, Any], place: str) -> Callable[..., DataSet] | None:
    """Return the loader of a table [data] at a place of the file; None if its name is unknown.

    Raises:
        PrivacyError: the table gives none or several of name, file and folder; or its function cannot be imported.
    """
    keys = [key for key in ("name", "file", "folder") if given.get(key) not in (None, "")]
    if len(keys) > 1:
        remedy = "keep one: name for a data set or function, file for a table, folder for images"
        raise expected("load_spec", place, "to have exactly one of name, file and folder", ", ".join(keys), remedy)
    if not keys:
        remedy = 'add it, such as name = "digits", or give file = "people.csv" or folder = "xrays"'
        raise expected("load_spec", f"{place}.name", "to be given", None, remedy)
    if keys == ["file"]:
        return table
    if keys == ["folder"]:
        return table if "columns" in given else image_folder
    name = given["name"]
    if isinstance(name, str) and ":" in name:
        return imported(f"{place}.name", name)
    return LOADERS.get(name) if isinstance(name, str) else None


def options_of(loader: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a loader that the table [data] may give, with their types."""
    try:
        kinds, signature = get_type_hints(loader, include_extras=True), inspect.signature(loader)
    except (TypeError, ValueError, NameError) as error:
        got, remedy = f"{type(error).__name__}: {error}", "name a Python function whose annotations can be resolved"
        raise expected("load_spec", "data.name", "to name a function with known arguments", got, remedy) from error
    own = ("tokenizer", "validation", *(("path",) if loader in _FILES else ()))
    named = [name for name, argument in signature.parameters.items() if argument.kind is not argument.VAR_KEYWORD]
    return {name: kinds.get(name, Any) for name in named if name not in own}


def required_of(loader: Callable[..., Any]) -> list[str]:
    """Return the options of a loader that have no default."""
    parameters = inspect.signature(loader).parameters
    return [name for name in options_of(loader) if parameters[name].default is inspect.Parameter.empty]


def model_options(given: Mapping[str, Any]) -> list[str] | None:
    """Return the options of [model] that its function takes besides the data; None if it names no function."""
    name = given.get("name")
    if not isinstance(name, str) or ":" not in name:
        return None
    function = imported("model.name", name)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise expected("load_spec", "model.name", "to name a Python function", error, "write a function") from error
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        remedy = "add a first argument, the DataSet"
        raise expected("load_spec", "model.name", "to take the data set", f"{len(parameters)} arguments", remedy)
    return [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def require_declared(given: DataTable, loader: Callable[..., DataSet], place: str) -> None:
    """Raise PrivacyError unless [data] suits a loader of files: schema, shares and keys. No file is read."""
    options, where = given.options, Where("load_spec", f"{place}.")
    if "validation" in given.model_fields_set and "validation" not in inspect.signature(loader).parameters:
        is_file = loader in _FILES
        condition = "to be absent for files" if is_file else "to be absent unless the function has this argument"
        remedy = "give validation_share, a share of units" if is_file else "hold examples out in the function"
        raise where.wrong("validation", condition, given.validation, remedy)
    if loader not in _FILES:
        return
    if given.public:
        remedy = "leave it out, or give a second file as elsewhere"
        raise where.wrong("public", "to be 0 for files, whose parts are decided for each unit", given.public, remedy)
    shares = {name: options.get(name) or 0.0 for name in ("test_share", "validation_share")}
    require_split(where, options.get("test"), **shares, split_key=options.get("split_key", ""))
    is_tested = shares["test_share"] or not {"test", "test_every"}.isdisjoint(options)
    if not is_tested and place == "data":
        remedy = "add test_share = 0.25, or the path of a second file as test"
        raise where.wrong("test or data.test_share", "to be given", None, remedy)
    if loader is table:
        names = ("columns", "label", "classes", "unit", "max_rows", "row_id")
        schema = schema_of(where, **{name: options.get(name) for name in names})
        every = options.get("test_every")
        require_every(where, every, schema.identifier, options.get("test"), shares["test_share"])
    else:
        require_images(where, *(options.get(name) for name in ("classes", "size", "channels", "unit", "max_rows")))


def is_own(given: DataTable) -> bool:
    """Return whether the data are the user's: of a file, a folder or a function. `make_data` checks their parts."""
    return not given.name or ":" in given.name


def require_unit(given: DataTable, privacy_unit: PrivacyUnit) -> None:
    """Raise PrivacyError unless [privacy] has the unit that a file declares."""
    unit = given.options.get("unit")
    if given.name or (unit != ROW) == (privacy_unit == "user"):
        return
    needed = "example" if unit == ROW else "user"
    counted = "rows" if unit == ROW else "persons"
    condition, remedy = f"to be {needed!r} for data.unit = {unit!r}", f"correct it, and count {counted} in [privacy]"
    raise expected("load_spec", "privacy.privacy_unit", condition, repr(privacy_unit), remedy)


def load(given: DataTable, encoder: str | None) -> DataSet:
    """Call the loader of [data] with the table's options."""
    loader, options = find_loader(given.given, "data"), given.options
    assert loader is not None
    if loader in _FILES:
        for name in ("path", "test"):
            path = (given.file or given.folder) if name == "path" else options.get("test")
            options |= {} if path is None else {name: given.home / Path(path).expanduser()}
        return loader(**options)
    if "tokenizer" in inspect.signature(loader).parameters:
        options["tokenizer"] = encoder_folder(encoder)
    if "validation" in given.model_fields_set:
        options["validation"] = given.validation
    if ":" not in given.name:
        return loader(**options)
    made = called("data.name", given.name, loader, **options)
    if not isinstance(made, DataSet):
        remedy = "return privgrad.data.DataSet(...), or the result of privgrad.data.table"
        raise expected("make_data", "data.name", "to return a DataSet", f"a {type(made).__name__}", remedy)
    return made


def own_model(given: ModelTable, data: DataSet) -> nn.Module:
    """Call the user's function for a model, and check that it returns one whose outputs suit the labels."""
    names = model_options(given.given) or []
    options = {name: value for name, value in given.given.items() if name in names}
    made = called("model.name", given.name, imported("model.name", given.name), data, **options)
    if not isinstance(made, nn.Module):
        remedy = "return the model"
        raise expected("make_model", "model.name", "to return a torch.nn.Module", f"a {type(made).__name__}", remedy)
    if data.score is None:
        return made
    # It must return a number per class for each label, on an input of zeros.
    inputs, labels = (tensor[:1] for tensor in data.train.tensors[:2])
    shape = (*(labels.shape[:1] if labels.is_floating_point() else labels.shape), data.num_classes)
    with evaluating(made), torch.no_grad():
        logits = called("model.name", given.name, made, torch.zeros_like(inputs))
    got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if got != shape:
        condition = f"to return logits of shape {shape} for inputs of shape {tuple(inputs.shape)}"
        raise expected("make_model", "model.name", condition, got, f"correct {given.name}")
    return made


def encoder_folder(name: str | None) -> str:
    """Return the folder of the pretrained model whose tokenizer reads the data; see privgrad.pretrained."""
    if name is None:
        remedy = "give a folder, or a name on the Hugging Face hub"
        raise expected("load_spec", "model.encoder", "to be given for text that a tokenizer reads", None, remedy)
    return pretrained(name)


def require_count(given: DataTable, loaded: DataSet, num_examples: int) -> None:
    """Raise PrivacyError unless the public count suits the number of training examples.

    It is at most this number where sizes are private, and equal to it otherwise.
    """
    count, are_private = len(loaded.train), _has_private_sizes(given, loaded)
    are_persons = loaded.by_person or len(loaded.train.tensors) > 2
    units, far = "persons" if are_persons else "examples", _FAR[are_persons]
    if are_private and num_examples > count:
        # The remedy names no number: one that comes from the data is not public.
        remedy = (
            "lower it to a number that is known without the data, such as the planned size of a study, or to a count "
            "with noise, by release_sum of ones"
        )
        condition = f"to be at most the number of training {units} of {loaded.name}"
        raise expected("make_data", "privacy.num_examples", condition, num_examples, remedy)
    if are_private and count > far * num_examples:
        warnings.warn(
            f"NOT PRIVATE: {loaded.name} has more than {far} times as many training {units} as num_examples = "
            f"{num_examples:,}, so the model gets more noise than it needs. Raise it if a public number allows",
            stacklevel=3,
        )
    if not are_private and count != num_examples:
        condition = (
            f"to be {count}, the training examples of {loaded.name} without {given.validation} for validation and "
            f"{given.public} public ones"
        )
        raise expected("make_data", "privacy.num_examples", condition, num_examples, "correct it")


def _has_private_sizes(given: DataTable, data: DataSet) -> bool:
    """Return whether the exact sizes of the parts are private: those of the user's data, and of a split by unit.

    Then neither an error nor a report may show them. By unit, a keyed hash of each unit chose its part.
    """
    # A function of the user may hide how it divided its parts, and public examples that are taken out change the split.
    return is_own(given) or data.split == "unit"


def sizes_text(given: DataTable, data: DataSet, plan: PrivacyPlan) -> str:
    """Return the name and the public sizes of the data; where sizes are private, the plan's count alone."""
    units = " persons" if data.by_person else " users" if plan.privacy_unit == "user" else ""
    if _has_private_sizes(given, data):
        return f"{data.name}: {plan.num_examples:,} training{units or ' examples'} or more, the public count"
    return (
        f"{data.name}: {len(data.train):,} training{units}, {len(data.validation):,} validation, "
        f"{len(data.test):,} test examples" + (f", {len(data.public):,} public" if data.public else "")
    )


_COUNT = 6000  # synthetic examples, from which each computation draws some
SYNTHETIC_IMAGES: dict[str, Callable[..., features.Public]] = {
    "silhouettes": features.silhouettes,
    "pink-noise": features.pink_noise,
}


def synthetic_images(kind: str, data: DataSet) -> features.Public | None:
    """Return synthetic images of the data's size and channels, in [0, 1]; None unless it holds square images."""
    if not _are_square_images(data):
        return None
    return SYNTHETIC_IMAGES[kind](_COUNT, data.input_shape[1], channels=data.input_shape[0])


def public_inputs(kind: Synthetic, data: DataSet) -> tuple[Tensor, str]:
    """Return synthetic inputs in the form of the data's inputs, and their source. No example is read.

    Raises:
        PrivacyError: the data are not of that kind: images in a known range, or texts with public counts of words.
    """
    require_synthetic(kind, data)
    if kind == "words":
        assert data.public_counts is not None
        words = features.word_sequences(data.public_counts, _COUNT, data.input_shape[0])
        return cast(Tensor, words.rows), words.source
    made = synthetic_images(kind, data)
    assert made is not None
    assert data.pixel_range is not None
    black, white = data.pixel_range
    return cast(Tensor, made.rows) * (white - black) + black, made.source


def require_synthetic(kind: Synthetic, data: DataSet) -> None:
    """Raise PrivacyError unless synthetic examples of this kind have the form of the data's inputs."""
    if kind == "words":
        is_public = data.public_counts is not None and data.counts_provenance not in (None, "private-derived")
        suits, condition = is_public and len(data.input_shape) == 1, "to be texts with public word counts"
        remedy = "choose data with counts of words in public text, or take public examples"
    else:
        suits = data.pixel_range is not None and _are_square_images(data)
        condition = "to be square images with 1 or 3 channels and a known range"
        remedy = "leave public out, and give public examples in [data]"
    if not suits:
        got = f"{data.name} with inputs of shape {data.input_shape}"
        raise expected("load_spec", "precondition.public", condition, got, remedy)


def _are_square_images(data: DataSet) -> bool:
    shape = data.input_shape
    return len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]


def require_option(name: str, valid: list[str], place: str) -> None:
    """Raise PrivacyError, with the nearest valid name, unless the option is valid."""
    if name not in valid:
        # A suggestion must not switch privacy off: only a similar name means `non_private`.
        is_near = difflib.SequenceMatcher(None, name.lower(), "non_private").ratio() >= 0.8
        suggested = [option for option in valid if option != "non_private" or is_near]
        remedy = f"choose one of {', '.join(valid)}" if valid else "remove it: there are none"
        raise expected("load_spec", "options", "to be known", f"{place!r}", did_you_mean(name, suggested, remedy))
