"""Read a TOML file into a Spec, and check that its tables suit each other.

The command line and `papers.reproduce` call it. The privacy guarantee rests on one check of `check_spec`: the data set
of public examples, data.elsewhere, is not the private one. It does not rest on the rest of this file.
"""

import difflib
import inspect
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from torch import nn

from privgrad import precondition, side_information
from privgrad.data import LOADERS
from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.experiments.build import MODELS
from privgrad.experiments.sources import (
    find_loader,
    is_own,
    model_options,
    options_of,
    require_declared,
    require_unit,
    required_of,
)
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tables import DataTable, ModelTable, PreconditionTable
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.optim import OPTIMIZERS
from privgrad.optim.base import constructor_arguments

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
_NEAR = 0.8  # how similar a name must be to `non_private` to mean it; a suggestion must not switch privacy off


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file that describes an experiment.

    `privgrad train`, `compare` and `audit` call it.

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

    `papers.reproduce` calls it with the tables of an item.

    Args:
        raw: the file's tables.
        path: the file's path, for errors.
    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that are also the private ones.
    """
    _require_known(raw, Spec, (), raw)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, (), raw, path) from error
    _require_data(spec.data, ("data",), raw, path)
    spec.data.place(Path(path).parent)
    if ":" not in spec.model.name:
        _require_name("model.name", spec.model.name, MODELS, path)
    for method in spec.methods:
        _require_name(f"methods.{method.name}.optimizer", method.optimizer, OPTIMIZERS, path)
    require_unit(spec.data, spec.privacy.privacy_unit)
    own, other = spec.data, spec.data.elsewhere
    if other is not None and (other.source, other.options.get("path")) == (own.source, own.options.get("path")):
        condition, remedy = "to differ from data.name", "use data.public to count some of these examples as public"
        raise expected("load_spec", "data.elsewhere", condition, repr(other.source), remedy)
    for method in spec.methods:
        _require_method(method, spec)
    _require_equal_grids(spec, path)
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
        return _unknown_name(place, first["input"], re.findall("'([^']*)'", first["ctx"]["expected"]), path)
    got = repr(first["input"])[:80]
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
        _require_option(name, list(known), _place((*loc, name), raw))
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


def _require_option(name: str, valid: list[str], place: str) -> None:
    """Raise PrivacyError, with the nearest valid name, unless the option is valid."""
    if name not in valid:
        is_near = difflib.SequenceMatcher(None, name.lower(), "non_private").ratio() >= _NEAR
        suggested = [option for option in valid if option != "non_private" or is_near]
        remedy = f"choose one of {', '.join(valid)}" if valid else "remove it: there are none"
        raise expected("load_spec", "options", "to be known", f"{place!r}", did_you_mean(name, suggested, remedy))


def _require_method(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless a method's options suit its optimizer and the other tables."""
    _require_options(method, spec)
    _require_local(method, spec)
    _require_public(method, spec)
    _require_tuning(method, spec)
    _require_noise_for_scales(method, spec)


def _require_options(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless the options suit the optimizer, the perturbation and the preconditioner."""
    arguments = constructor_arguments(OPTIMIZERS[method.optimizer])
    valid = [name for name in arguments if name not in ("params", "lr", "noise_step", "public", "horizon")]
    if method.perturb is not None and method.perturb.mode is not None and method.perturb.rule != "BAM":
        place = f"methods.{method.name}.perturb.mode"
        raise expected("load_spec", place, "to be given for BAM only", method.perturb.rule, "leave it out")
    for name in method.options:
        _require_option(name, valid, f"methods.{method.name}.options.{name}")
    for name, values in method.tune.items():
        place = f"methods.{method.name}.tune.{name}"
        if method.precondition is None or not name.startswith("precondition."):
            _require_option(name, valid, place)
        else:
            _require_option(name.removeprefix("precondition."), _options_of(method.precondition), place)
        if tables := [value for value in values if isinstance(value, dict)]:
            raise expected("load_spec", place, "to be numbers, names or lists", tables[0], "correct it")
    by_noise = method.noise_step is not None
    if by_noise and (method.lr is not None or method.non_private):
        place, remedy = f"methods.{method.name}.noise_step", "give lr alone: without noise there is no noise step"
        got = "non_private = true" if method.non_private else f"lr = {method.lr}"
        remedy = remedy if method.non_private else "leave one of the two out"
        raise expected("load_spec", place, "to be given without this", got, remedy)
    if by_noise and not method.has_noise_step:
        place, condition = f"methods.{method.name}.noise_step", "to be absent for an optimizer without one"
        got = method.optimizer if method.assumed_noise_std is None else f"{method.optimizer} with assumed_noise_std"
        raise expected("load_spec", place, condition, got, "give lr in its place")
    by_noise = any(candidate.noise_step is not None for candidate in spec.grid(method))
    if by_noise and spec.privacy.noise_multiplier == 0:
        got, remedy = spec.privacy.noise_multiplier, "give lr in place of noise steps"
        raise expected("load_spec", "privacy.noise_multiplier", f"to be > 0 for {method.name}", got, remedy)
    rate = Candidate(1.0, noise_step=0.1) if by_noise else Candidate(1.0, lr=0.1)
    own = [[(name, value) for value in values] for name, values in method.tune.items()]
    for values in itertools.product(*own):
        tuned = method.with_own(rate._replace(own=values))
        try:
            tuned.make([("p", nn.Parameter(torch.zeros(1)))], rate)
        except (TypeError, ValueError, OverflowError) as error:
            place = f"methods.{method.name}.{'tune' if method.tune else 'options'}"
            raise expected("load_spec", place, f"to suit {method.optimizer}", error, "correct them") from error
        if tuned.precondition is not None:
            _require_precondition(tuned.precondition, f"methods.{method.name}.precondition.options")


def _require_local(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless users train locally exactly if the privacy unit is a user."""
    local, unit = f"methods.{method.name}.local", spec.privacy.privacy_unit
    if unit == "user" and method.perturb is not None and method.local is None:
        condition, got = 'to be absent for privacy_unit = "user"', f"rule {method.perturb.rule!r}"
        raise expected("load_spec", f"methods.{method.name}.perturb", condition, got, "leave it out")
    if method.local is None and unit == "user" and not is_own(spec.data):
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


def _require_public(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless a method has public examples exactly if it uses them."""
    if "public" in method.model_fields_set and not method.needs_public:
        place, condition = f"methods.{method.name}.public", "to be absent for a method that uses no public examples"
        remedy = "remove it, or add a precondition rule, a warm_start or an optimizer that uses public gradients"
        raise expected("load_spec", place, condition, method.public.model_dump(exclude_defaults=True), remedy)
    if method.needs_public and not method.public.other and spec.data.public == 0:
        remedy = "set it to the number of training examples that count as public"
        raise expected("load_spec", "data.public", f"to be positive for {method.name}", 0, remedy)


def _require_tuning(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless [tuning] and validation examples suit the method's grid."""
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        rate = "an lr or a noise_step" if method.has_noise_step and not method.non_private else "an lr"
        remedy = f"give the method {rate}, or give a grid and a [tuning] table"
        raise expected("load_spec", f"methods.{method.name}.lr", "to be given", None, remedy)
    if spec.tuning is None:
        remedy = "add [tuning] with seeds, or give one lr and one max_grad_norm"
        raise expected("load_spec", "[tuning]", f"to be given for the grid of {method.name}", None, remedy)
    if spec.tuning.by != "train_loss" and spec.data.validation == 0 and not is_own(spec.data):
        remedy = "set it to a number of examples to hold out; learning rates must not be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def _require_equal_grids(spec: Spec, path: str | Path) -> None:
    """Raise PrivacyError unless all methods that are tuned together get the same number of trainings."""
    together = [method for method in spec.methods if spec.shares_grid(method)]
    if not together or spec.tuning is None or spec.tuning.noise_steps is None:
        return
    if len(set(spec.tuning.seeds)) < 2:
        remedy = f"add one in {path}: the spread over seeds decides whether a difference counts"
        raise expected("load_spec", "tuning.seeds", "to hold two seeds or more", spec.tuning.seeds, remedy)
    rates = len(set(spec.tuning.noise_steps))
    for method in together:
        if not method.has_noise_step and len(set(method.lr) if isinstance(method.lr, list) else ()) != rates:
            remedy = "give it as many values as tuning.noise_steps has"
            condition = f"to be a grid of {rates} rates, because {method.optimizer} has no noise step"
            raise expected("load_spec", f"methods.{method.name}.lr", condition, method.lr, remedy)
    counts = {method.name: len(set(spec.grid(method))) for method in together}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{count} ({name})" for name, count in counts.items())
        remedy = "give each method as many values in tune, or a rate of its own"
        raise expected("load_spec", "candidates of methods", "to be equally many", got, remedy)


def _require_noise_for_scales(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError if a preconditioner measures its scales by the noise, and there is none in their units."""
    rule = method.precondition
    if rule is None or rule.by_counts or "eps" in rule.options or "precondition.eps" in method.tune:
        return
    without = {"non_private = true": method.non_private, "local": method.local is not None}
    without["privacy.noise_multiplier = 0"] = spec.privacy.noise_multiplier == 0
    if got := ", ".join(name for name, given in without.items() if given):
        place, condition = f"methods.{method.name}.precondition.options.eps", "to be given where no noise sets the unit"
        raise expected("load_spec", place, condition, got, "add eps, such as options = { eps = 1e-5 }")


# Arguments of a preconditioner's rule that the experiment gives itself.
_GIVEN = ("gradient", "counts", "parameter", "dim", "source", "provenance")


def _rule(table: PreconditionTable) -> Callable[..., Any]:
    """Return the function of a preconditioner's rule."""
    return getattr(side_information if table.by_counts else precondition, table.rule)


def _options_of(table: PreconditionTable) -> list[str]:
    """Return the names of the options that a preconditioner's rule takes."""
    return [name for name in inspect.signature(_rule(table)).parameters if name not in _GIVEN]


def _require_precondition(table: PreconditionTable, place: str) -> None:
    """Raise PrivacyError unless the options suit the rule; the rule is called once on tiny inputs to check."""
    for name in table.options:
        _require_option(name, _options_of(table), f"{place}.{name}")
    # Tiny versions of the arguments that the experiment gives itself.
    public = PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none")
    given = dict(zip(_GIVEN, (public, torch.ones(10_000), "p", 0, "none", "public data"), strict=True))
    function = _rule(table)
    parameters = inspect.signature(function).parameters
    try:
        function(**{name: value for name, value in given.items() if name in parameters}, **table.options)
    except (TypeError, ValueError, OverflowError) as error:
        raise expected("load_spec", place, f"to suit {table.rule}", error, "correct them") from error
