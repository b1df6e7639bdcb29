"""Read a TOML file into a Spec, and check that its tables suit each other."""

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

from privgrad import precondition
from privgrad.clip.norm_statistics import require_bins
from privgrad.errors import PrivacyError, did_you_mean, expected, file_problem
from privgrad.optim import OPTIMIZERS
from privgrad.optim.base import constructor_arguments
from privgrad.precondition import counts as side_information
from privgrad.precondition.public_gradient import PublicGradient
from privgrad_lab import build
from privgrad_lab.data import LOADERS
from privgrad_lab.featuring import require_features, with_head_defaults
from privgrad_lab.metrics import require_names
from privgrad_lab.prices import require_payable, require_total
from privgrad_lab.spec import Candidate, DataTable, MethodTable, ModelTable, PreconditionTable, Spec

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

    Raises:
        PrivacyError: the file is unreadable, has an unknown option (the error suggests the nearest valid one), or has a
            wrong value.
    """
    return check_spec(read_tables(path), path)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
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
    """Convert the tables of a TOML file into a Spec; `path` is the file's, for errors and for relative paths.

    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that are also the private ones.
    """
    raw = with_head_defaults(raw)
    _require_known(raw, Spec, (), raw)
    name: Any = raw["model"].get("name") if isinstance(raw.get("model"), dict) else None
    if isinstance(name, str) and ":" not in name:  # first, because a head has defaults for what others must give
        _require_name("model.name", name, build.MODELS, path)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, (), raw, path) from error
    _require_data(spec.data, ("data",), raw, path)
    spec.data.place(Path(path).parent)
    for method in spec.methods:
        if method.model is not None and ":" not in method.model.name:
            _require_name(f"methods.{method.name}.model.name", method.model.name, build.MODELS, path)
    require_features(spec)
    for method in spec.methods:
        _require_name(f"methods.{method.name}.optimizer", method.optimizer, OPTIMIZERS, path)
    build.require_unit(spec.data, spec.privacy.privacy_unit)
    size, count = spec.privacy.expected_batch_size, spec.privacy.num_examples
    if size > count:
        condition, remedy = f"to be at most num_examples = {count}", "lower it, or correct num_examples"
        raise expected("load_spec", "privacy.expected_batch_size", condition, size, remedy)
    own, other = spec.data, spec.data.elsewhere
    if other is not None and (other.source, other.options.get("path")) == (own.source, own.options.get("path")):
        condition, remedy = "to differ from data.name", "use data.public to count some of these examples as public"
        raise expected("load_spec", "data.elsewhere", condition, repr(other.source), remedy)
    require_total(spec)
    for method in spec.methods:
        for refuse in _RULES:
            refuse(method, spec)
    require_names(spec)
    require_payable(spec)
    _require_equal_grids(spec, path)
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise expected("load_spec", "methods", "to have different names", names, f"rename one in {path}")
    return spec


def _explained(
    error: ValidationError, table: tuple[str, ...], raw: Mapping[str, Any], path: str | Path
) -> PrivacyError:
    """Return the first problem that pydantic found in the table at a place of the file, as an error of ours."""
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
    remedy = did_you_mean(name, valid, f"choose one, and correct it in {path}")
    return expected("load_spec", place, f"to be one of {', '.join(valid)}", repr(name)[:80], remedy)


def _require_name(place: str, name: str, registry: Mapping[str, Any], path: str | Path) -> None:
    if name not in registry:
        raise _unknown_name(place, name, list(registry), path)


def _require_data(table: DataTable, place: tuple[str, ...], raw: Mapping[str, Any], path: str | Path) -> None:
    """Raise PrivacyError unless a loader has the table's name, and its arguments have the types of the options."""
    loader = build.find_loader(table.given, ".".join(place))
    if loader is None:
        _require_name(".".join((*place, "name")), table.name, LOADERS, path)
        return
    kinds: dict[str, Any] = {name: (kind, None) for name, kind in build.options_of(loader).items()}
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    try:
        create_model("Options", __config__=config, **kinds).model_validate(table.options)
    except ValidationError as error:
        raise _explained(error, place, raw, path) from error
    for name in build.required_of(loader):
        if name not in table.options:
            raise expected("load_spec", ".".join((*place, name)), "to be given", None, f"add it to {path}")
    build.require_declared(table, loader, ".".join(place))
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
    """Raise PrivacyError for the first key, at any depth, that is no field of its table and no option of the loader."""
    known = {name: field.annotation for name, field in kind.model_fields.items()}
    if kind is DataTable:
        loader = build.find_loader(table, ".".join(map(str, loc)))
        # A wrong name is an error of its own; which options it has is then unknown.
        known |= dict.fromkeys(table, Any) if loader is None else build.options_of(loader)
    if kind is ModelTable and (options := build.model_options(table)) is not None:
        known = dict.fromkeys(("name", "encoder", *options), Any)
    for name, value in table.items():
        build.require_option(name, list(known), _place((*loc, name), raw))
        kinds: tuple[Any, ...] = (known[name], *get_args(known[name]))
        for inner in kinds:
            if not (inspect.isclass(inner) and issubclass(inner, BaseModel)):
                continue
            places = [((*loc, name), value)]
            if isinstance(value, list):
                places = [((*loc, name, index), item) for index, item in enumerate(cast("list[Any]", value))]
            for place, item in places:
                if isinstance(item, dict):
                    _require_known(cast("dict[str, Any]", item), inner, place, raw)


def _wrong(method: MethodTable, key: str, condition: str, got: object, remedy: str) -> PrivacyError:
    """Return the error for a key of a method's table."""
    return expected("load_spec", f"methods.{method.name}.{key}", condition, got, remedy)


def _refuse_unknown_options(method: MethodTable, spec: Spec) -> None:
    """Refuse options and names in `tune` that the optimizer, the preconditioner, the rule for C or the filter lack."""
    if method.perturb is not None and method.perturb.mode is not None and method.perturb.rule != "BAM":
        raise _wrong(method, "perturb.mode", "to be given for BAM only", method.perturb.rule, "leave it out")
    arguments = constructor_arguments(OPTIMIZERS[method.optimizer])
    valid = [name for name in arguments if name not in ("params", "lr", "noise_step", "public", "horizon")]
    for name in method.options:
        build.require_option(name, valid, f"methods.{method.name}.options.{name}")
    for name, values in method.tune.items():
        place = f"methods.{method.name}.tune.{name}"
        part, _, option = name.partition(".")
        if method.precondition is not None and option and part == "precondition":
            build.require_option(option, _options_of(method.precondition), place)
        elif option and (table := method.part_tables.get(part)) is not None:
            build.require_option(option, list(inspect.signature(table.kind).parameters), place)
        else:
            build.require_option(name, valid, place)
        if tables := [value for value in values if isinstance(value, dict)]:
            raise _wrong(method, f"tune.{name}", "to be numbers, names or lists", tables[0], "correct it")


def _refuse_useless_noise_step(method: MethodTable, spec: Spec) -> None:
    """Refuse a noise step next to a learning rate, without noise, and for an optimizer that takes none."""
    if method.noise_step is not None:
        if method.non_private:
            remedy = "give lr alone: without noise there is no noise step"
            raise _wrong(method, "noise_step", "to be given without this", "non_private = true", remedy)
        if method.lr is not None:
            remedy = "leave one of the two out"
            raise _wrong(method, "noise_step", "to be given without this", f"lr = {method.lr}", remedy)
        if not method.has_noise_step:
            got = method.optimizer if method.assumed_noise_std is None else f"{method.optimizer} with assumed_noise_std"
            raise _wrong(method, "noise_step", "to be absent for an optimizer without one", got, "give lr in its place")
    noise = spec.privacy.noise_multiplier
    if noise == 0 and any(candidate.noise_step is not None for candidate in spec.grid(method)):
        remedy = "give lr in place of noise steps"
        raise expected("load_spec", "privacy.noise_multiplier", f"to be > 0 for {method.name}", noise, remedy)


def _refuse_unsuited_values(method: MethodTable, spec: Spec) -> None:
    """Refuse values of options that a constructor refuses: each one is called for every combination of `tune`."""
    by_noise = any(candidate.noise_step is not None for candidate in spec.grid(method))
    rate = Candidate(1.0, noise_step=0.1) if by_noise else Candidate(1.0, lr=0.1)
    own = [[(name, value) for value in values] for name, values in method.tune.items()]
    for values in itertools.product(*own):
        tuned = method.with_own(rate._replace(own=values))
        try:
            tuned.make([("p", nn.Parameter(torch.zeros(1)))], rate)
        except (TypeError, ValueError, OverflowError) as error:
            key, condition = "tune" if method.tune else "options", f"to suit {method.optimizer}"
            raise _wrong(method, key, condition, error, "correct them") from error
        _require_parts(tuned)
        if tuned.bands is not None and spec.privacy.sampling != "poisson":
            remedy = 'give sampling = "poisson", or leave bands out'
            raise _wrong(method, "bands", "to be absent for this sampling", spec.privacy.sampling, remedy)
        if tuned.precondition is not None:
            _require_precondition(tuned, tuned.precondition)


def _require_parts(method: MethodTable) -> None:
    """Raise PrivacyError unless the rule for C and the filter have their options, and nothing that contradicts them."""
    for part, table in method.part_tables.items():
        known = inspect.signature(table.kind).parameters
        for name, value in table.options.items():
            build.require_option(name, list(known), f"methods.{method.name}.{part}.options.{name}")
            if isinstance(value, list) and "Sequence" not in str(known[name].annotation):
                remedy = f'to try several, give tune = {{ "{part}.{name}" = {value} }}'
                raise _wrong(method, f"{part}.options.{name}", "to be one value", value, remedy)
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in table.options:
                raise _wrong(method, f"{part}.options.{name}", "to be given", None, f"add {name}")
    method.parts()
    if method.norm_bins is not None:
        require_bins("load_spec", f"methods.{method.name}.norm_bins", method.norm_bins)
    if method.filter is not None and method.filter.rule == "DiSK" and (method.perturb or method.local):
        condition, got = "to have the only point of the gradients", "DiSK with perturb or local"
        raise _wrong(method, "filter", condition, got, "leave one of the two out")
    for part, value in (("adaptive_clip", method.adaptive_clip), ("norm_bins", method.norm_bins)):
        if method.non_private and value is not None:
            remedy = "leave it out: a method without privacy does not clip"
            raise _wrong(method, part, "to be absent for non_private", getattr(value, "rule", value), remedy)


# Arguments of a preconditioner's rule that the experiment gives itself, with tiny versions of them for a check.
_GIVEN: dict[str, Any] = {
    "gradient": PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none"),
    "counts": torch.ones(10_000),
    "parameter": "p",
    "dim": 0,
    "source": "none",
    "provenance": "public data",
    "examples": torch.ones(1),
    "forward": None,
}


def _require_precondition(method: MethodTable, table: PreconditionTable) -> None:
    """Raise PrivacyError unless the options suit the rule; the rule is called once on tiny inputs to check."""
    for name in table.options:
        build.require_option(name, _options_of(table), f"methods.{method.name}.precondition.options.{name}")
    if table.public is not None and table.rule != "inputs":
        remedy = 'leave it out, or set rule = "inputs"'
        raise _wrong(method, "precondition.public", 'to be for "inputs" only', table.rule, remedy)
    rule = _rule_of(table)
    parameters = inspect.signature(rule).parameters
    try:
        rule(**{name: value for name, value in _GIVEN.items() if name in parameters}, **table.options)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong(method, "precondition.options", f"to suit {table.rule}", error, "correct them") from error


def _rule_of(table: PreconditionTable) -> Callable[..., Any]:
    """Return the function of a preconditioner's rule."""
    return getattr(side_information if table.by_counts else precondition, table.rule)


def _options_of(table: PreconditionTable) -> list[str]:
    return [name for name in inspect.signature(_rule_of(table)).parameters if name not in _GIVEN]


def _refuse_unsuited_local(method: MethodTable, spec: Spec) -> None:
    """Refuse a method that does not train locally by user, and one that trains locally by example."""
    unit = spec.privacy.privacy_unit
    if unit == "user" and method.perturb is not None and method.local is None:
        condition, got = 'to be absent for privacy_unit = "user"', f"rule {method.perturb.rule!r}"
        raise _wrong(method, "perturb", condition, got, "leave it out")
    if method.local is None:
        if unit == "user" and not build.is_own(spec.data):  # of the user's own data, a row may be a person
            remedy = "add local with lr and batch_size, for example local = { lr = 0.1, batch_size = 20 }"
            raise _wrong(method, "local", 'to be given for privacy_unit = "user"', None, remedy)
        return
    if unit == "example":
        got = method.local.model_dump(exclude_defaults=True)
        remedy = 'leave it out, or set privacy_unit = "user" in [privacy] and choose [data] with one row per user'
        raise _wrong(method, "local", 'to be absent for privacy_unit = "example"', got, remedy)
    if method.perturb is not None:
        got = f"perturb.rule = {method.perturb.rule!r}"
        raise _wrong(method, "local", "to be given without perturb", got, "leave one of the two out")
    if spec.tuning is not None and spec.tuning.by == "train_loss":
        remedy = 'tune by "accuracy" or "loss" on users that are held out'
        raise expected("load_spec", "tuning.by", "to be measured on held-out users", "'train_loss'", remedy)


def _refuse_unsuited_public(method: MethodTable, spec: Spec) -> None:
    """Refuse public examples that a method does not use, and a method that lacks those that it uses."""
    if "public" in method.model_fields_set and not method.needs_public:
        condition, got = "to be absent for a method that uses no public examples", method.public
        remedy = "remove it, or add a precondition rule, a warm_start or an optimizer that uses public gradients"
        raise _wrong(method, "public", condition, got.model_dump(exclude_defaults=True), remedy)
    if method.needs_public and not method.public.other and spec.data.public == 0:
        remedy = "set it to the number of training examples that count as public"
        raise expected("load_spec", "data.public", f"to be positive for {method.name}", 0, remedy)


def _refuse_untunable(method: MethodTable, spec: Spec) -> None:
    """Refuse a method that needs tuning, if [tuning] or examples to tune on are absent."""
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        rate = "an lr or a noise_step" if method.has_noise_step and not method.non_private else "an lr"
        raise _wrong(method, "lr", "to be given", None, f"give the method {rate}, or give a grid and a [tuning] table")
    if spec.tuning is None:
        remedy = "add [tuning] with seeds, or give one lr and one max_grad_norm"
        raise expected("load_spec", "[tuning]", f"to be given for the grid of {method.name}", None, remedy)
    is_validated = spec.privacy.total_epsilon is None and spec.tuning.by != "train_loss"
    if is_validated and spec.data.validation == 0 and not build.is_own(spec.data):
        remedy = "set it to a number of examples to hold out; learning rates must not be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def _refuse_scales_without_unit(method: MethodTable, spec: Spec) -> None:
    """Refuse a preconditioner that measures its scales by the noise, where there is none in their units."""
    rule = method.precondition
    if rule is None or rule.by_counts or "eps" in rule.options or "precondition.eps" in method.tune:
        return
    without = {"non_private = true": method.non_private, "local": method.local is not None}
    without["privacy.noise_multiplier = 0"] = spec.privacy.noise_multiplier == 0
    if got := ", ".join(name for name, given in without.items() if given):
        remedy = "add eps, such as options = { eps = 1e-5 }"
        raise _wrong(method, "precondition.options.eps", "to be given where no noise sets the unit", got, remedy)


_RULES = (
    _refuse_unknown_options,
    _refuse_useless_noise_step,
    _refuse_unsuited_values,
    _refuse_unsuited_local,
    _refuse_unsuited_public,
    _refuse_untunable,
    _refuse_scales_without_unit,
)


def _require_equal_grids(spec: Spec, path: str | Path) -> None:
    """Raise PrivacyError unless all methods that are tuned together get the same number of trainings."""
    together = [method for method in spec.methods if spec.shares_grid(method)]
    if not together or spec.tuning is None or spec.tuning.noise_steps is None or spec.privacy.total_epsilon is not None:
        return
    if len(set(spec.tuning.seeds)) < 2:
        remedy = f"add one in {path}: the spread over seeds decides whether a difference counts"
        raise expected("load_spec", "tuning.seeds", "to hold two seeds or more", spec.tuning.seeds, remedy)
    rates = len(set(spec.tuning.noise_steps))
    for method in together:
        if not method.has_noise_step and len(set(method.lr) if isinstance(method.lr, list) else ()) != rates:
            condition = f"to be a grid of {rates} rates, because {method.optimizer} has no noise step"
            raise _wrong(method, "lr", condition, method.lr, "give it as many values as tuning.noise_steps has")
    counts = {method.name: len(set(spec.grid(method))) for method in together}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{count} ({name})" for name, count in counts.items())
        remedy = "give each method as many values in tune, or a rate of its own"
        raise expected("load_spec", "candidates of methods", "to be equally many", got, remedy)
