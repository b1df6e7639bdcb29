"""Features in experiments: the table [features], the model "head" and its defaults, and the saved head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.data import TensorDataset

from privgrad import features
from privgrad.data import DataSet
from privgrad.data.schema import schema_of, with_knots
from privgrad.data.table import width_of
from privgrad.errors import expected
from privgrad.features import Extractor, Public
from privgrad.features.caching import cached
from privgrad.heads.fitting import LARGEST_BATCH, MAX_GRAD_NORM, MOMENTUM, STEPS
from privgrad.heads.head import Head, Target
from privgrad.models import LowerLayers, UnitLinear
from privgrad.training.defaults import head_max_grad_norm, head_noise_step
from privgrad.training.run import FitResult
from privgrad_lab import build
from privgrad_lab.calls import arguments, bind, find, make, wrong
from privgrad_lab.prices import price
from privgrad_lab.spec import FeaturesTable, MethodTable, Spec


def _lower_layers(encoder: str) -> Extractor:
    lower = LowerLayers(build.encoder_folder(encoder))
    return features.Frozen(lower, name=f"lower layers of {encoder}", source=f"weights of {encoder}")


BLOCKS: dict[str, Callable[..., Extractor]] = {
    "frozen-text": features.FrozenText,
    "hog": features.Hog,
    "lower-layers": _lower_layers,
    "patches": features.Patches,
    "scattering": features.Scattering,
    "tf-idf": features.TfIdf,
}

SCHEMA = ("columns", "label", "classes", "bounds", "counts", "interactions", "unit", "max_rows", "row_id")  # of a table

# The data with features, by the training part as loaded and by table: computed once for all trainings.
_MADE: WeakKeyDictionary[TensorDataset, dict[str, DataSet]] = WeakKeyDictionary()


def with_head_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables of a file whose model is "head" with the defaults of `fit_head`, and its method by default."""
    privacy, data, run = (raw.get(name) for name in ("privacy", "data", "run"))
    if not isinstance(privacy, dict):
        return raw
    defaults: dict[str, Any] = {"steps": STEPS, "max_grad_norm": MAX_GRAD_NORM}
    if isinstance(count := privacy.get("num_examples"), int):
        defaults["expected_batch_size"] = min(count, LARGEST_BATCH)
        if isinstance(data, dict) and isinstance(columns := data.get("columns"), dict):
            raw = {**raw, "data": {**data, "columns": with_knots(columns, count)}}
    made = {**raw, "privacy": defaults | privacy}
    if "methods" not in raw:
        schedule: Any = run.get("schedule") if isinstance(run, dict) else None
        decay = schedule.get("decay", "constant") if isinstance(schedule, dict) else schedule or "cosine"
        optimizer: dict[str, Any] = {"use": "SGD", "momentum": MOMENTUM}
        if "tuning" not in raw:  # it has the noise steps to try
            optimizer["noise_step"] = head_noise_step(decay, of_numbers=isinstance(data, dict) and "bounds" in data)
        method: dict[str, Any] = {"name": "head", "optimizer": optimizer}
        made["methods"] = [method | ({"schedule": "cosine"} if schedule is None else {})]
    return made


def with_norm_of_table(spec: Spec, raw: Mapping[str, Any]) -> Spec:
    """Return the spec of a head on a declared table with the C of `fit_head`, unless the file has one or features."""
    given = spec.data.options
    is_known = spec.model.use == "head" and spec.features is None and not spec.data.use and "columns" in given
    if not is_known or "max_grad_norm" in raw["privacy"]:
        return spec
    schema = schema_of("load_spec", **{name: given.get(name) for name in SCHEMA})
    single = spec if spec.privacy.total_epsilon is None else spec.with_noise(price(spec).noise_multiplier)
    weights, of_numbers = width_of(schema) * (len(schema.classes) or 1), schema.bounds is not None and not schema.counts
    norm = head_max_grad_norm(single.plan(None), weights, of_numbers=of_numbers)
    return spec.model_copy(update={"privacy": spec.privacy.model_copy(update={"max_grad_norm": norm})})


def require_features(spec: Spec) -> None:
    """Raise PrivacyError unless the tables of features name blocks, and fit together."""
    loader, given = arguments(build.find_loader(spec.data.given, "data")), spec.data
    standardizes = ":" not in given.use and "standardize" in loader and given.options.get("standardize", True)
    places = [("features", spec.features)]
    places += [(f"methods.{method.name}.features", method.features or None) for method in spec.methods]
    for place, table in places:
        if table is None:
            continue
        if spec.run.augmentation_multiplicity > 1:
            got, remedy = spec.run.augmentation_multiplicity, "features are computed once"
            raise wrong("run.augmentation_multiplicity", "to be 1 with features", got, remedy)
        for block in table.blocks:
            function = find(f"{place}.blocks", block.use, BLOCKS)
            bind(f"{place}.blocks.{block.use}", function, block.options, ["name", "public", "source"])
            if block.use in ("hog", "patches", "scattering") and standardizes:
                condition = f"to be false for the block {block.use!r}, which takes pixels in [0, 1]"
                raise wrong("data.standardize", condition, "true")
        if table.weights is not None and len(table.weights) != len(table.blocks):
            raise wrong(f"{place}.weights", f"to be {len(table.blocks)} numbers, one each", len(table.weights))


def own(spec: Spec, method: MethodTable, data: DataSet) -> tuple[Spec, DataSet]:
    """Return the spec with a method's own model, and the data with its features."""
    # The features of a row depend on this row and on public rows only. A folder of features is private.
    spec = spec.of(method)
    if spec.features is None or data.extractor is not None:
        return spec, data
    held = _MADE.setdefault(data.train, {})
    dtype = torch.float16 if spec.model.use == "head" else torch.float32
    key = f"{dtype} {spec.features.model_dump_json()}"
    if key not in held:
        held[key] = _featured(spec.features, data, spec.data.home, dtype)
    return spec, held[key]


def _featured(table: FeaturesTable, data: DataSet, home: Path, dtype: torch.dtype) -> DataSet:
    extractor, folder = _extractor(table, data), None
    if table.folder is not None:
        name = extractor.digest()[:12] + ("" if dtype == torch.float16 else "-float32")
        folder = home / Path(table.folder).expanduser() / name
    parts = {name: getattr(data, name) for name in ("train", "validation", "test", "public", "other_public")}
    made: dict[str, Any] = {}
    for name, part in parts.items():
        if part is not None and part is parts["train"] and name != "train":
            made[name] = made["train"]
        elif part is not None:
            place = None if folder is None else folder / name
            compute = cached if "public" in name else features.cache  # public rows may be those of the extractor
            inputs, *rest = part.tensors
            around = inputs.shape[: -len(data.input_shape)]  # the rows of the data, and those of a person
            rows = inputs.reshape(around.numel(), *data.input_shape)
            if len(rows):
                found = compute(extractor, rows, place, dtype=dtype)
            else:
                found = extractor(torch.zeros(1, *data.input_shape, dtype=inputs.dtype))[:0].to(dtype)
            made[name] = TensorDataset(found.view(*around, found.shape[1]), *rest)
    shape = tuple(made["train"].tensors[0].shape[2 if data.by_person else 1 :])
    images = data.input_shape if len(data.input_shape) == 3 else None
    made |= {"input_shape": shape, "image_shape": images, "vocabulary": None, "public_inputs": None}
    return replace(data, **made, extractor=extractor)


def _extractor(table: FeaturesTable, data: DataSet) -> Extractor:
    made: list[tuple[Extractor, float]] = []
    for given, weight in zip(table.blocks, table.weights or [1.0] * len(table.blocks), strict=True):
        public: dict[str, Any] = {}
        if "public" in arguments(find("features.blocks", given.use, BLOCKS)):
            public["public"] = _public(table.public or table.whiten, data, given.use)
        block = make("features.blocks", given, BLOCKS, **public)
        if not isinstance(block, Extractor):
            raise expected("make_data", "features.blocks", "to return an Extractor", f"a {type(block).__name__}")
        if table.whiten is not None:
            rows = _public(table.whiten, data, given.use)
            width = block(rows.rows[:1]).shape[1]
            chosen = table.model_dump(include={"power", "ridge"}, exclude_none=True)
            block = features.Whitened(block, rows, keep=min(table.keep, width, len(rows.rows) - 1), **chosen)
        made.append((block, weight))
    return features.join(*made)


def _public(name: str | None, data: DataSet, block: str) -> Public:
    if name is None:
        remedy = 'set it to "silhouettes", "pink-noise" or "data"'
        raise expected("make_data", "features.public", f"to be given for the block {block!r}", None, remedy)
    if name in build.SYNTHETIC_IMAGES:
        return build.synthetic_images(name, data)
    if data.public_inputs is not None:
        return Public(data.public_inputs, f"{len(data.public_inputs):,} public inputs of {data.name}")
    for part, origin in ((data.public, "taken out of the training set"), (data.other_public, "from elsewhere")):
        if part is not None:
            return Public(part.tensors[0], f"{len(part):,} public examples {origin}, {data.name}")
    remedy = "set public in [data], give elsewhere, or choose synthetic rows"
    raise expected("make_data", "features.public", "to have public rows in the data", data.name, remedy)


def save_head(
    model: nn.Module, data: DataSet, folder: Path, privacy: Mapping[str, Any], result: FitResult | None = None
) -> str | None:
    """Save a trained head with its extractor in a new folder, and return it; None if the model is another one.

    `result` is for the statement in the folder; a training within a budget has none.
    """
    if not isinstance(model, UnitLinear):
        return None
    if not (folder / "head.json").exists():  # else it holds the head of the same training
        facts: dict[str, Any] = {"classes": data.classes, "image_shape": data.image_shape}
        # A function of the user may have replaced the codes of a table by other inputs.
        if data.schema is not None and (data.extractor is not None or data.input_shape == (width_of(data.schema),)):
            facts["schema"] = data.schema
        Head(model, Target.of(data), data.extractor, privacy=privacy, result=result, **facts).save(folder)
    return str(folder)
