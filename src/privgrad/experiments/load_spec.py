"""Read a TOML file into a Spec, and check that its tables suit each other.

The command line and `papers.reproduce` call it. The privacy guarantee rests on one check of `check_spec`: the data set
of public examples, data.elsewhere, is not the private one. It does not rest on the rest of this file.
"""

import inspect
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from privgrad.data import LOADERS
from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.experiments.build import MODELS
from privgrad.experiments.check_methods import require_equal_grids, require_method, require_option
from privgrad.experiments.featuring import require_features, with_head_defaults
from privgrad.experiments.metrics import require_names
from privgrad.experiments.prices import require_payable, require_total
from privgrad.experiments.sources import (
    find_loader,
    model_options,
    options_of,
    require_declared,
    require_unit,
    required_of,
)
from privgrad.experiments.spec import Spec
from privgrad.experiments.tables import DataTable, ModelTable
from privgrad.optim import OPTIMIZERS

# Values that a required option may have, for errors.
_SUCH_AS = {
    "title": '"My experiment"',
    "model.name": '"mlp"',
    "privacy.delta": "1e-5",
    "privacy.max_grad_norm": "1.0",
    "privacy.expected_batch_size": "256",
    "privacy.steps": "1000",
    "methods.name": '"DP-AdamBC"',
    "methods.optimizer": '"AdamBC"',
    "methods.perturb.rule": '"BAM"',
    "methods.perturb.radius": "0.02",
    "methods.precondition.rule": '"public_rmsprop"',
    "methods.local.lr": "0.1",
    "methods.local.batch_size": "20",
    "methods.warm_start.lr": "0.1",
    "methods.warm_start.epochs": "5",
    "methods.warm_start.batch_size": "20",
    "tuning.seeds": "[0, 1]",
}


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file that describes an experiment.

    `privgrad train`, `compare` and `audit` call it.

    Raises:
        PrivacyError: the file is unreadable, has an unknown option (the error suggests the nearest valid one), or has a
            wrong value.
    """
    return check_spec(read_tables(path), path)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. `privgrad.compare` calls it too.

    Raises:
        PrivacyError: the file is unreadable, or no TOML.
    """
    if problem := file_problem(path):
        remedy = "give the path of a TOML file that describes an experiment"
        raise expected("load_spec", "path", "to be a readable TOML file", f"{path}, which {problem}", remedy)
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise expected("load_spec", "path", "to be a readable TOML file", path, "give its path") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, nested too deeply
        raise expected("load_spec", f"{path}", "to be valid TOML", error, "correct the file") from error


def check_spec(raw: Mapping[str, Any], path: str | Path) -> Spec:
    """Convert the tables of a TOML file into a Spec.

    `papers.reproduce` calls it with the tables of an item.

    Args:
        raw: the file's tables.
        path: the file's path, for errors.
    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that are also the private ones.
    """
    raw = with_head_defaults(raw)
    _require_known(raw, Spec, (), raw)
    name: Any = raw["model"].get("name") if isinstance(raw.get("model"), dict) else None
    if isinstance(name, str) and ":" not in name:  # first, because a head has defaults for what others must give
        _require_name("model.name", name, MODELS, path)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, (), raw, path) from error
    _require_data(spec.data, ("data",), raw, path)
    spec.data.place(Path(path).parent)
    for one in spec.methods:
        if one.model is not None and ":" not in one.model.name:
            _require_name(f"methods.{one.name}.model.name", one.model.name, MODELS, path)
    require_features(spec)
    for method in spec.methods:
        _require_name(f"methods.{method.name}.optimizer", method.optimizer, OPTIMIZERS, path)
    require_unit(spec.data, spec.privacy.privacy_unit)
    size, count = spec.privacy.expected_batch_size, spec.privacy.num_examples
    if size > count:
        remedy = "lower it, or correct num_examples"
        raise expected(
            "load_spec", "privacy.expected_batch_size", f"to be at most num_examples = {count}", size, remedy
        )
    own, other = spec.data, spec.data.elsewhere
    if other is not None and (other.source, other.options.get("path")) == (own.source, own.options.get("path")):
        condition, remedy = "to differ from data.name", "use data.public to count some of these examples as public"
        raise expected("load_spec", "data.elsewhere", condition, repr(other.source), remedy)
    require_total(spec)
    for method in spec.methods:
        require_method(method, spec)
    require_names(spec)
    require_payable(spec)
    require_equal_grids(spec, path)
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise expected("load_spec", "methods", "to have different names", names, f"rename one in {path}")
    return spec


def _explained(
    error: ValidationError, table: tuple[str, ...], raw: Mapping[str, Any], path: str | Path
) -> PrivacyError:
    """Return the first problem that pydantic found, as an error of ours.

    Args:
        error: pydantic's.
        table: place of the checked table in the file.
        raw: the file's tables.
        path: the file's path.
    """
    first = error.errors()[0]
    place = _place((*table, *first["loc"]), raw)
    if first["type"] == "missing":
        option = ".".join(part for part in (*table, *first["loc"]) if isinstance(part, str))
        example = f", such as {option.rpartition('.')[2]} = {_SUCH_AS[option]}" if option in _SUCH_AS else ""
        return expected("load_spec", place, "to be given", None, f"add it to {path}{example}")
    if first["type"] == "literal_error" and "ctx" in first:
        if first["input"] == "DiSK" and place.endswith("perturb.rule"):
            remedy = 'give filter = { rule = "DiSK", options = { weight = 0.7 } } in place of perturb'
            return expected("load_spec", place, "to be a point of its own", "'DiSK', which also filters", remedy)
        return _unknown_name(place, first["input"], re.findall("'([^']*)'", first["ctx"]["expected"]), path)
    got = repr(first["input"])[:80]
    if place == "privacy.max_grad_norm" and isinstance(first["input"], list):
        remedy = f"give one number here, and the values to try in [[methods]]: max_grad_norm = {first['input']}"
        return expected("load_spec", place, "to be one number", got, remedy)
    if first["type"] == "model_type" and isinstance(first["input"], str) and place.startswith("methods."):
        part = place.rpartition(".")[2]
        remedy = f'write {part} = {{ rule = "{first["input"]}" }} in {path}'
        return expected("load_spec", place, "to be a table", got, remedy)
    return expected("load_spec", place, f"to be valid ({first['msg']})", got, f"correct it in {path}")


def _unknown_name(place: str, name: Any, valid: list[str], path: str | Path) -> PrivacyError:
    """Return the error for a name that is not valid; it suggests the nearest valid one."""
    remedy = did_you_mean(name, valid, f"choose one, and correct it in {path}")
    return expected("load_spec", place, f"to be one of {', '.join(valid)}", repr(name)[:80], remedy)


def _require_name(place: str, name: str, registry: Mapping[str, Any], path: str | Path) -> None:
    """Raise PrivacyError unless a registry has the name."""
    if name not in registry:
        raise _unknown_name(place, name, list(registry), path)


def _require_data(table: DataTable, place: tuple[str, ...], raw: Mapping[str, Any], path: str | Path) -> None:
    """Raise PrivacyError unless a loader has the table's name, and its arguments have the types of the options."""
    loader = find_loader(table.given, ".".join(place))
    if loader is None:
        _require_name(".".join((*place, "name")), table.name, LOADERS, path)
        return
    kinds: dict[str, Any] = {name: (kind, None) for name, kind in options_of(loader).items()}
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    try:
        create_model("Options", __config__=config, **kinds).model_validate(table.options)
    except ValidationError as error:
        raise _explained(error, place, raw, path) from error
    for name in required_of(loader):
        if name not in table.options:
            raise expected("load_spec", ".".join((*place, name)), "to be given", None, f"add it to {path}")
    require_declared(table, loader, ".".join(place))
    if table.elsewhere is not None:
        _require_data(table.elsewhere, (*place, "elsewhere"), raw, path)


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


def _require_known(
    table: Mapping[str, Any], kind: type[BaseModel], loc: tuple[int | str, ...], raw: Mapping[str, Any]
) -> None:
    """Raise PrivacyError for the first key, at any depth, that is no field of its table and no option of the loader.

    Args:
        table: a table of the file.
        kind: what the table should be.
        loc: place of the table in the file.
        raw: the file's tables.
    """
    known = {name: field.annotation for name, field in kind.model_fields.items()}
    if kind is DataTable:
        loader = find_loader(table, ".".join(map(str, loc)))
        # A wrong name is an error of its own; which options it has is then unknown.
        known |= dict.fromkeys(table, Any) if loader is None else options_of(loader)
    if kind is ModelTable and (options := model_options(table)) is not None:
        known = dict.fromkeys(("name", "encoder", *options), Any)
    for name, value in table.items():
        require_option(name, list(known), _place((*loc, name), raw))
        for inner in _tables_in(known[name]):
            places = [((*loc, name), value)]
            if isinstance(value, list):
                places = [((*loc, name, index), item) for index, item in enumerate(cast("list[Any]", value))]
            for place, item in places:
                if isinstance(item, dict):
                    _require_known(cast("dict[str, Any]", item), inner, place, raw)


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the tables that a field of this type may hold."""
    candidates = (annotation, *get_args(annotation))
    return [kind for kind in candidates if inspect.isclass(kind) and issubclass(kind, BaseModel)]
