"""The parts of one training of a spec: data and model, by name, file or function of the user, and side information.

Private examples may enter a training only through the losses of `metrics.losses_for`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privgrad import features, models, precondition
from privgrad.data import DataSet, image_folder, table
from privgrad.data.dataset import have_most_rows_in_common
from privgrad.errors import expected
from privgrad.features.pretrained import pretrained
from privgrad.gradient.functional import evaluating
from privgrad.gradient.transform import Preconditioner
from privgrad.heads.head import Target
from privgrad.perturb import SampleGradient
from privgrad.plan import PrivacyPlan
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.private_gradient import PrivateGradient
from privgrad_lab.calls import arguments, bind, call, called, find, imported, make, wrong
from privgrad_lab.data import LOADERS
from privgrad_lab.data.findings import problem_of_count
from privgrad_lab.metrics import losses_for, require_suited
from privgrad_lab.spec import REGISTRIES, DataTable, MethodTable, ModelTable, PreconditionTable, Spec, Synthetic

# The models that a spec can name. They get the arguments of `_fact` from the data, and the other ones from the table.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "autoencoder": models.autoencoder,
    "bag-of-words": models.bag_of_words,
    "cnn-small": models.cnn_small,
    "cnn2": models.cnn2,
    "cnn5": models.cnn5,
    "head": lambda *, in_features, num_classes, input_dims: models.UnitLinear(
        in_features, num_classes, input_dims=input_dims
    ),
    "head-language-model": models.HeadLanguageModel,
    "language-model": models.LanguageModel,
    "linear": models.linear,
    "lora-language-model": models.LoraLanguageModel,
    "mlp": models.mlp,
    "pair-classifier": models.PairClassifier,
    "resnet9": models.resnet9,
    "sparse-linear": lambda *, vocabulary, num_classes: models.SparseLinear(vocabulary, num_classes),
    "wide-resnet": models.wide_resnet,
    "word-lstm": models.WordLSTM,
}
# The arguments by which a model tells what its inputs are: images, vectors or words. Other ones take any inputs.
_IMAGES, _VECTORS, _WORDS = {"in_channels"}, {"in_features"}, {"vocabulary", "num_tokens", "path"}
OF_DATA = _IMAGES | _VECTORS | _WORDS | {"num_classes", "input_dims", "length"}


def _fact(name: str, given: ModelTable, data: DataSet) -> Any:
    if name in ("vocabulary", "num_tokens"):
        if data.vocabulary is None:
            raise wrong("data.use", "to be text for this model", data.name)
        return data.vocabulary
    if name == "path":
        return encoder_folder(given.encoder)
    if name in ("in_channels", "length"):
        return data.input_shape[0]
    if name == "in_features":
        return torch.Size(data.input_shape).numel()
    return len(data.input_shape) if name == "input_dims" else data.num_classes


def make_data(spec: Spec) -> DataSet:
    """Load the data, and check that they suit the spec."""
    # The guarantee rests on two steps: the public examples leave the training set, and each row is one privacy unit. It
    # does not rest on the count, because a plan draws and charges at the same sample rate.
    loaded = load(spec.data, spec.model.encoder)
    if spec.data.public:
        loaded = with_public(loaded, spec.data.public)
    if spec.data.elsewhere is not None:
        loaded = with_other_public(loaded, load(spec.data.elsewhere, spec.model.encoder))
    if spec.data.reconstruct:
        loaded = to_reconstruct(loaded)
    _require_suited(spec, loaded)
    for method in spec.methods:
        if method.needs_public:
            public_examples(method, loaded)
        if method.precondition is not None and method.precondition.public is not None:
            require_synthetic(method.precondition.public, loaded)
    require_count(spec.data, loaded, spec.privacy.num_examples)
    require_suited(spec, loaded)
    return loaded


def with_public(data: DataSet, count: int) -> DataSet:
    """Return the data set with the last `count` training examples moved to `public`."""
    inputs, labels, *counts = data.train.tensors
    kept = len(labels) - count
    if counts or kept < 1:
        most = "0 for data by user" if counts else f"below {len(labels)}, all training examples"
        raise expected("data", "public", f"to be {most}", count)
    private, public = (TensorDataset(inputs[part], labels[part]) for part in (slice(kept), slice(kept, None)))
    return replace(data, train=private, public=public, split="size")  # others decide which examples are the last ones


def with_other_public(data: DataSet, other: DataSet) -> DataSet:
    """Return the data set with the training part of another one as `other_public`; only exact copies are refused."""
    if other.input_shape != data.input_shape:
        raise expected("data", "elsewhere", f"to have inputs of shape {data.input_shape}", other.input_shape)
    if have_most_rows_in_common(data.train.tensors[0], other.train.tensors[0]):
        condition = "to share at most half of its inputs with the training examples"
        remedy = "use data.public to count some of the training examples as public"
        raise expected("data", "elsewhere", condition, f"copies in {other.name}", remedy)  # their number is private
    return replace(data, other_public=other.train)


def to_reconstruct(data: DataSet) -> DataSet:
    """Return the data set with every input as its own label."""
    if len(data.train.tensors) > 2 or data.by_person:
        raise expected("data", "reconstruct", "to be false for data by user", True)
    parts = {name: getattr(data, name) for name in ("train", "validation", "test", "public", "other_public")}
    own = {name: part and TensorDataset(part.tensors[0], part.tensors[0]) for name, part in parts.items()}
    return replace(data, name=f"{data.name}, to be reconstructed", score=None, frequency_edges=None, **own)


def _require_suited(spec: Spec, loaded: DataSet) -> None:
    """Raise PrivacyError unless each row of the data is one privacy unit, and no part that is needed is empty."""
    by_user, name = len(loaded.train.tensors) > 2, spec.data.source  # the third tensor counts each user's examples
    by_unit = by_user or loaded.by_person
    if by_unit != (spec.privacy.privacy_unit == "user"):
        got = f"data by {'user' if by_unit else 'example'}"
        remedy = f'set privacy_unit = "{"user" if by_unit else "example"}" in [privacy]'
        raise wrong(f"data {name!r}", f"to be by {spec.privacy.privacy_unit}", got, remedy)
    for method in spec.methods:
        if by_unit and by_user != (method.local is not None):
            condition = "given for data by user" if by_user else "absent for data whose rows are persons"
            got = None if method.local is None else method.local.options
            raise wrong(f"methods.{method.name}.local", f"to be {condition}, {name}", got)
    by_validation = spec.tuning is not None and spec.tuning.by != "train_loss" and spec.tuning.way is None
    is_validated = by_validation and any(spec.is_tuned(method) for method in spec.methods)
    if len(loaded.test) == 0 or (len(loaded.validation) == 0 and is_validated):
        part = "validation" if len(loaded.test) else "test"
        remedy = f"give {part}_share of a file, or data.{part}, or return more {part} examples"
        raise expected("make_data", f"the {part} part of {name}", "to hold at least 1 example", 0, remedy)


def public_examples(method: MethodTable, loaded: DataSet) -> TensorDataset:
    """Return the public examples of a method, as its `public` table selects them."""
    whole = loaded.other_public if method.public.other else loaded.public
    if whole is None:
        place = "elsewhere, other_public or amazon" if method.public.other else "public"
        raise wrong(f"data.{place}", f"to be given for {method.name!r}", None)
    if (count := method.public.examples or len(whole)) > len(whole):
        raise expected("make_data", "public.examples", f"to be at most {len(whole)} for {method.name!r}", count)
    return TensorDataset(*(tensor[:count] for tensor in whole.tensors))


def require_model(spec: Spec, data: DataSet) -> None:
    """Raise PrivacyError unless the model takes inputs of the data's kind, and images of their size."""
    known = set() if ":" in spec.model.use else set(arguments(MODELS[spec.model.use]))
    got, name = repr(spec.model.use), spec.data.source
    if data.by_person and known and "input_dims" not in known and not (known & _IMAGES and len(data.input_shape) == 3):
        remedy = 'choose "head", "linear" or "mlp", or a function of yours'
        raise wrong("model.use", f"to take the rows of a person, as {name!r} has", got, remedy)
    is_text = data.train.tensors[0].dtype == torch.int8  # see features.text_rows
    if known & (_IMAGES | _VECTORS | (_WORDS if is_text else set())) and not data.train.tensors[0].is_floating_point():
        remedy = 'add [features], such as blocks = ["tf-idf"], or choose another model'
        raise wrong("model.use", f"to take {'texts' if is_text else 'word ids'}, as {name!r} has", got, remedy)
    if not known & _IMAGES:
        return
    try:
        with torch.device("meta"):  # shapes only: nothing is computed, and no random number is drawn
            _model(spec.model, data)(torch.zeros(1, *data.input_shape))
    except RuntimeError as error:
        condition = f"to take inputs of shape {data.input_shape}, as {name!r} has"
        raise wrong("model.use", condition, got, "try size = 28 in [data]") from error


def make_model(spec: Spec, data: DataSet) -> nn.Module:
    """Return a new model for the data on the spec's device, initialized from torch's global random stream."""
    model = _model(spec.model, data)
    if data.by_person and ":" not in spec.model.use and _IMAGES & arguments(MODELS[spec.model.use]).keys():
        model = models.EachRow(model)
    return model.to(device_of(spec))


def device_of(spec: Spec) -> str:
    """Return "cuda" or "cpu", the device of a spec's trainings."""
    found = torch.cuda.is_available()
    if spec.run.device == "cuda" and not found:
        raise wrong("run.device", "to be a device that torch finds", "'cuda'", "choose auto or cpu")
    return "cpu" if spec.run.device == "cpu" or not found else "cuda"


def autocast(spec: Spec) -> torch.autocast:
    """Return the context of trainings and evaluations of a spec: mixed precision, if [run] asks for it."""
    # torch keeps cast weights until the outermost context ends, also if a step has changed the weights since.
    return torch.autocast(device_of(spec), torch.bfloat16, spec.run.autocast is not None, cache_enabled=False)


def _model(given: ModelTable, data: DataSet) -> nn.Module:
    if ":" in given.use:
        return _own_model(given, data)
    names = OF_DATA & arguments(MODELS[given.use]).keys()
    return make("model", given, MODELS, **{name: _fact(name, given, data) for name in names})


def private_gradient(spec: Spec, model: nn.Module, plan: PrivacyPlan, data: DataSet, **parts: Any) -> PrivateGradient:
    """Return the PrivateGradient of a model, with the losses of its data, as [run] asks for it."""
    run = spec.run
    losses = losses_for(data, views=run.augmentation_multiplicity, flip=None if run.flip == "none" else run.flip)
    speed: Any = {"engine": run.engine, "microbatch_size": run.microbatch_size, "memory_mb": run.memory_mb}
    if data.by_person and isinstance(parts["perturb"], SampleGradient):
        parts["perturb"] = SampleGradient("user", data.train.tensors[1].shape[1])
    return PrivateGradient(model, losses, plan, **speed, **parts)


def require_options(place: str, given: ModelTable) -> None:
    """Raise PrivacyError unless a model has the name of the table, and its options."""
    if ":" in given.use:
        function = partial(imported(f"{place}.use", given.use), None)  # its first argument is the data set
        bind(place, function, given.options, ["encoder"])
    else:
        bind(place, find(place, given.use, MODELS), given.options, OF_DATA)


def public_gradient(method: MethodTable, model: nn.Module, data: DataSet) -> PublicGradient | None:
    """Return the gradient on a method's public examples; None without them."""
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
    facts: dict[str, Any] = {"gradient": public}
    if (by_weights := "weights" in arguments(table.rule)) or "counts" in arguments(table.rule):
        if data.public_counts is None or (by_weights and data.public_inputs is None):
            condition = "to have public TF-IDF weights" if by_weights else "to have public word counts"
            raise wrong("data.use", condition, data.name, 'try features = "tf-idf" in [data]' * by_weights)
        # The word table is the model's first parameter; its rows are words.
        name = next(name for name, _ in model.named_parameters())
        facts = {"counts": data.public_counts, "parameter": name, "dim": 0, "provenance": data.counts_provenance}
        is_private = data.counts_provenance == "private-derived"
        facts["source"] = f"words of {'the examples too' if is_private else 'texts apart from the examples'}"
        if by_weights and data.public_inputs is not None:  # the rule needs their sum over the texts only
            columns, values = data.public_inputs.double().unbind(1)
            sums = torch.zeros(len(data.public_counts), dtype=torch.float64)
            facts["weights"] = sums.scatter_add_(0, columns.long().flatten(), values.flatten()).unsqueeze(0)
    elif table.use == "inputs" and table.public is not None:
        facts = dict(zip(("examples", "source"), public_inputs(table.public, data), strict=True))
    elif table.use == "inputs" and public is not None:
        facts = {"examples": public.examples[0], "source": public.source}
    return precondition_of("precondition", table, facts)


def precondition_of(place: str, table: PreconditionTable, facts: Mapping[str, Any]) -> Preconditioner:
    """Return the preconditioner of a table for the facts that the experiment knows by itself."""
    made = make(place, table, REGISTRIES["precondition"], **facts)
    return made if isinstance(made, Preconditioner) else precondition.fixed(made)


def warm_start(method: MethodTable, model: nn.Module, data: DataSet) -> None:
    """Train on public examples with ordinary SGD. They get no privacy, and private examples are not used."""
    if (table := method.warm_start) is None:
        return
    examples = public_examples(method, data)
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=table.lr), losses_for(data)
    for _ in range(table.epochs):
        order = torch.randperm(len(examples))
        for chosen in order.split(table.batch_size):
            optimizer.zero_grad()
            loss_fn(model, tuple(tensor[chosen] for tensor in examples.tensors)).mean().backward()
            optimizer.step()
    optimizer.zero_grad()


_FILES = (table, image_folder)  # loaders of files, whose `path` is given by file or folder


def find_loader(given: Mapping[str, Any], place: str) -> Callable[..., DataSet]:
    """Return the loader of a table [data] at a place of the file."""
    keys = [key for key in ("use", "file", "folder") if given.get(key) not in (None, "")]
    if len(keys) > 1:
        raise wrong(place, "to have exactly one of use, file and folder", ", ".join(keys))
    if not keys:
        remedy = 'add it, such as use = "digits", or give file = "people.csv" or folder = "xrays"'
        raise wrong(f"{place}.use", "to be given", None, remedy)
    if keys == ["use"]:
        return find(place, f"{given['use']}", LOADERS)
    return table if keys == ["file"] or "columns" in given else image_folder


def require_loadable(given: DataTable, place: str) -> None:
    """Raise PrivacyError unless the options of [data] are arguments of its loader; nothing is read."""
    loader = find_loader(given.given, place)
    is_file = loader in _FILES
    known = bind(place, loader, given.options, ["tokenizer", "validation", *(["path"] if is_file else [])])
    if "validation" in given.model_fields_set and "validation" not in known:
        where = "for files" if is_file else "unless the function has this argument"
        remedy = "give validation_share, a share of units" if is_file else ""
        raise wrong(f"{place}.validation", f"to be absent {where}", given.validation, remedy)
    if is_file and given.public:
        condition = "to be 0 for files, whose parts are decided for each unit"
        raise wrong(f"{place}.public", condition, given.public, "give a second file as elsewhere")
    if given.elsewhere is not None:
        require_loadable(given.elsewhere, f"{place}.elsewhere")


def load(given: DataTable, encoder: str | None) -> DataSet:
    """Call the loader of [data] with the table's options."""
    loader, options, own = find_loader(given.given, "data"), given.options, dict[str, Any]()
    if loader in _FILES:
        own["path"] = given.home / Path(given.source).expanduser()
        if "test" in options:
            options["test"] = given.home / Path(options["test"]).expanduser()
    elif "tokenizer" in (known := arguments(loader)) and (encoder or known["tokenizer"].default is not None):
        own["tokenizer"] = encoder_folder(encoder)
    if "validation" in given.model_fields_set:
        own["validation"] = given.validation
    made = call("data", given.source, loader, options, own)
    if not isinstance(made, DataSet):
        raise expected("make_data", "data.use", "to return a DataSet", f"a {type(made).__name__}")
    return made


def _own_model(given: ModelTable, data: DataSet) -> nn.Module:
    function = partial(imported("model.use", given.use), data)
    made = call("model", given.use, function, given.options, {"encoder": given.encoder})
    if not isinstance(made, nn.Module):
        raise expected("make_model", "model.use", "to return a torch.nn.Module", f"a {type(made).__name__}")
    if data.score is None:
        return made
    # It must return a number per class for each label, on an input of zeros.
    inputs, labels = (tensor[:1] for tensor in data.train.tensors[:2])
    shape = (*(labels.shape[:1] if Target.of(data).kind == "tags" else labels.shape), data.num_classes)
    with evaluating(made), torch.no_grad():
        logits = called("model", given.use, made, torch.zeros_like(inputs))
    got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if got != shape:
        condition = f"to return logits of shape {shape} for inputs of shape {tuple(inputs.shape)}"
        raise expected("make_model", "model.use", condition, got)
    return made


def encoder_folder(name: str | None) -> str:
    """Return the folder of the pretrained model whose tokenizer reads the data; see privgrad.pretrained."""
    if name is None:
        raise wrong("model.encoder", "to be given for text that a tokenizer reads", None)
    return pretrained(name)


def require_count(given: DataTable, loaded: DataSet, num_examples: int) -> None:
    """Raise PrivacyError unless the public count is that of the training examples; where it is private, only warn."""
    count = len(loaded.train)
    if not _has_private_sizes(given, loaded):
        if count != num_examples:
            rest = f"without {given.validation} for validation and {given.public} public ones"
            condition = f"to be {count}, the training examples of {loaded.name} {rest}"
            raise expected("make_data", "privacy.num_examples", condition, num_examples)
        return
    are_persons = loaded.by_person or len(loaded.train.tensors) > 2
    if problem := problem_of_count(count, "persons" if are_persons else "examples", num_examples):
        what, remedy = problem
        warnings.warn(f"NOT PRIVATE: {loaded.name} has {what}. Epsilon holds; {remedy}", stacklevel=3)


def _has_private_sizes(given: DataTable, data: DataSet) -> bool:
    # By unit, a keyed hash of each unit chose its part. A function of the user may hide how it divided its parts, and
    # public examples that are taken out change the split.
    return not given.use or ":" in given.use or data.split == "unit"


def sizes_text(given: DataTable, data: DataSet, plan: PrivacyPlan) -> str:
    """Return the name and the public sizes of the data; where sizes are private, the plan's count alone."""
    units = " persons" if data.by_person else " users" if plan.privacy_unit == "user" else ""
    if _has_private_sizes(given, data):
        return f"{data.name}: {plan.num_examples:,} training{units or ' examples'}, the public count"
    return (
        f"{data.name}: {len(data.train):,} training{units}, {len(data.validation):,} validation, "
        f"{len(data.test):,} test examples" + (f", {len(data.public):,} public" if data.public else "")
    )


_COUNT = 6000  # synthetic examples, from which each computation draws some
SYNTHETIC_IMAGES: dict[str, Callable[..., features.Public]] = {
    "silhouettes": features.silhouettes,
    "pink-noise": features.pink_noise,
}


def synthetic_images(kind: str, data: DataSet) -> features.Public:
    """Return synthetic images of the size and channels of the data's square images, in [0, 1]."""
    shape = data.input_shape
    if not _are_square_images(shape):
        condition = "to be square images with 1 or 3 channels"
        raise expected("make_data", f"the inputs of {data.name}", condition, f"shape {shape}")
    return SYNTHETIC_IMAGES[kind](_COUNT, shape[1], channels=shape[0])


def public_inputs(kind: Synthetic, data: DataSet) -> tuple[Tensor, str]:
    """Return synthetic inputs in the form of the data's inputs, and their source. No example is read."""
    require_synthetic(kind, data)
    if kind == "words":
        assert data.public_counts is not None
        words = features.word_sequences(data.public_counts, _COUNT, data.input_shape[0])
        return cast(Tensor, words.rows), words.source
    made = synthetic_images(kind, data)
    assert data.pixel_range is not None
    black, white = data.pixel_range
    return cast(Tensor, made.rows) * (white - black) + black, made.source


def require_synthetic(kind: Synthetic, data: DataSet) -> None:
    """Raise PrivacyError unless synthetic examples of this kind have the form of the data's inputs."""
    if kind == "words":
        is_public = data.public_counts is not None and data.counts_provenance not in (None, "private-derived")
        suits, condition = is_public and len(data.input_shape) == 1, "to be texts with public word counts"
    else:
        suits = data.pixel_range is not None and _are_square_images(data.input_shape)
        condition = "to be square images with 1 or 3 channels and a known range"
    if not suits:
        raise wrong("precondition.public", condition, f"{data.name} with inputs of shape {data.input_shape}")


def _are_square_images(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]
