"""The data and the model that a TOML file names: of the library, of a function of the user, or of files.

`load_spec` and `build` call it. The privacy guarantee does not rest on this file, but on the loaders that it calls: a
function of the user is responsible for its own DataSet.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from privgrad.data import LOADERS, DataSet, image_folder, table
from privgrad.data.own_images import require_images
from privgrad.data.own_table import require_every, require_split
from privgrad.data.schema import ROW, Where, schema_of
from privgrad.errors import did_you_mean, expected
from privgrad.experiments.tables import DataTable, ModelTable
from privgrad.gradient.module_state import evaluating
from privgrad.plan import PrivacyPlan
from privgrad.pretrained import pretrained
from privgrad.types import PrivacyUnit

_FAR = {True: 2, False: 4}  # times num_examples: more persons, or rows, than this waste much of the epsilon
_FILES = (table, image_folder)  # loaders of files, whose `path` is given by file or folder


def imported(place: str, name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names, from the current directory or an installed package.

    Raises:
        PrivacyError: the module cannot be imported, or has no such function.
    """
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
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0])
        condition = f"to name a module in {here} or an installed one" if missing else "to name a module that imports"
        remedy = "correct the name, or change to its folder" if missing else f"correct the module {module_name}"
        raise expected("load_spec", place, condition, f"{type(error).__name__}: {error}", remedy) from error
    own = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
    if not hasattr(found, attribute):
        remedy = did_you_mean(attribute, own, f"correct the name, or add it to {module_name}")
        raise expected("load_spec", place, f"to name a function of {module_name}", repr(attribute), remedy)
    function = getattr(found, attribute)
    if not callable(function):
        remedy = "name a function"
        raise expected("load_spec", place, "to name something to call", f"a {type(function).__name__}", remedy)
    return function


def find_loader(given: Mapping[str, Any], place: str) -> Callable[..., DataSet] | None:
    """Return the loader of a table [data]; None if its name is unknown.

    Args:
        given: the table's keys.
        place: its place in the file, for errors.
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
    """Return the arguments of a loader that the table [data] may give, with their types.

    Raises:
        PrivacyError: the loader's arguments or types cannot be read.
    """
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
    """Return the options of [model] that its function takes besides the data; None if it names no function.

    `load_spec` calls it.

    Raises:
        PrivacyError: the function cannot be imported or called with a data set.
    """
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
    """Raise PrivacyError unless [data] suits a loader of files: schema, shares, and keys of other kinds of data.

    `load_spec` calls it. No file is read.
    """
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
    """Return whether the data are the user's: of a file, a folder or a function. `check_methods` calls it.

    Their validation part and their unit are checked by `build.make_data`, when they are loaded.
    """
    return not given.name or ":" in given.name


def require_unit(given: DataTable, privacy_unit: PrivacyUnit) -> None:
    """Raise PrivacyError unless [privacy] has the unit that a file declares. `load_spec` calls it."""
    unit = given.options.get("unit")
    if given.name or (unit != ROW) == (privacy_unit == "user"):
        return
    needed = "example" if unit == ROW else "user"
    counted = "rows" if unit == ROW else "persons"
    condition, remedy = f"to be {needed!r} for data.unit = {unit!r}", f"correct it, and count {counted} in [privacy]"
    raise expected("load_spec", "privacy.privacy_unit", condition, repr(privacy_unit), remedy)


def load(given: DataTable, encoder: str | None) -> DataSet:
    """Call the loader of [data] with the table's options. `build.make_data` calls it.

    Raises:
        PrivacyError: the data are not available, or a function of the user raises, or returns no DataSet.
    """
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
    """Call the user's function for a model. `build.make_model` calls it.

    Raises:
        PrivacyError: the function raises, or returns no torch.nn.Module.
    """
    names = model_options(given.given) or []
    options = {name: value for name, value in given.given.items() if name in names}
    made = called("model.name", given.name, imported("model.name", given.name), data, **options)
    if not isinstance(made, nn.Module):
        remedy = "return the model"
        raise expected("make_model", "model.name", "to return a torch.nn.Module", f"a {type(made).__name__}", remedy)
    _require_logits(given.name, made, data)
    return made


def _require_logits(name: str, model: nn.Module, data: DataSet) -> None:
    """Raise PrivacyError unless a model of the user returns a number per class for each label, on an input of zeros."""
    if data.score is None:
        return
    inputs, labels = (tensor[:1] for tensor in data.train.tensors[:2])
    shape = (*(labels.shape[:1] if labels.is_floating_point() else labels.shape), data.num_classes)
    with evaluating(model), torch.no_grad():
        logits = called("model.name", name, model, torch.zeros_like(inputs))
    got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if got != shape:
        condition = f"to return logits of shape {shape} for inputs of shape {tuple(inputs.shape)}"
        raise expected("make_model", "model.name", condition, got, f"correct {name}")


def called(place: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of the user; errors of the library pass. `metrics` calls it too."""
    try:
        return function(*args, **options)
    except ValueError as error:
        if type(error).__module__.startswith("privgrad."):
            raise
        raise _failed(place, name, error) from error
    except Exception as error:  # whatever a function of the user raises
        raise _failed(place, name, error) from error


def _failed(place: str, name: str, error: Exception) -> Exception:
    """Return the error for a function of the user that raised one."""
    return expected("load_spec", place, "to run", f"{type(error).__name__}: {error}", f"correct {name}")


def encoder_folder(name: str | None) -> str:
    """Return the folder of the pretrained model whose tokenizer reads the data; see privgrad.pretrained.

    `build` also calls it.

    Raises:
        PrivacyError: no model is named, or it cannot be found.
    """
    if name is None:
        remedy = "give a folder, or a name on the Hugging Face hub"
        raise expected("load_spec", "model.encoder", "to be given for text that a tokenizer reads", None, remedy)
    return pretrained(name)


def require_count(given: DataTable, loaded: DataSet, num_examples: int) -> None:
    """Raise PrivacyError unless the public count suits the number of training examples. `build.make_data` calls it.

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

    A function of the user may hide how it divided its parts, and public examples that are taken out change the split.
    """
    return is_own(given) or data.split == "unit"


def sizes_text(given: DataTable, data: DataSet, plan: PrivacyPlan) -> str:
    """Return the name and the public sizes of the data, for records. `runner` and `paid_runner` call it.

    Where sizes are private, only the plan's count is named.
    """
    units = " persons" if data.by_person else " users" if plan.privacy_unit == "user" else ""
    if _has_private_sizes(given, data):
        return f"{data.name}: {plan.num_examples:,} training{units or ' examples'} or more, the public count"
    return (
        f"{data.name}: {len(data.train):,} training{units}, {len(data.validation):,} validation, "
        f"{len(data.test):,} test examples" + (f", {len(data.public):,} public" if data.public else "")
    )
