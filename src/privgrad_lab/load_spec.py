"""Read a TOML file into a Spec, and check that its tables suit each other."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from privgrad.clip.norm_statistics import require_bins
from privgrad.data.schema import ROW
from privgrad.errors import PrivacyError, expected, file_problem
from privgrad.parts import Parts
from privgrad.precondition.public_gradient import PublicGradient
from privgrad_lab import build, old_spelling
from privgrad_lab.calls import arguments, find, missing, problem, require_option
from privgrad_lab.featuring import require_features, with_head_defaults
from privgrad_lab.metrics import require_names
from privgrad_lab.prices import require_payable, require_total
from privgrad_lab.spec import REGISTRIES, MethodTable, Spec


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file that describes an experiment.

    Raises:
        PrivacyError: the file is unreadable, has an unknown option (the error suggests the nearest valid one), or has a
            wrong value.
    """
    return check_spec(read_tables(path), path)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    if found := file_problem(path):
        remedy = "give the path of a TOML file that describes an experiment"
        raise expected("load_spec", "path", "to be a readable TOML file", f"{path}, which {found}", remedy)
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise expected("load_spec", "path", "to be a readable TOML file", path, "give its path") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too many digits, nested too deeply
        raise expected("load_spec", f"{path}", "to be valid TOML", error) from error


def check_spec(raw: Mapping[str, Any], path: str | Path) -> Spec:
    """Convert the tables of a TOML file into a Spec; `path` is the file's, for relative paths.

    Raises:
        PrivacyError: an unknown option, a wrong value, or public examples that are also the private ones.
    """
    old_spelling.refuse(raw, path)
    raw = with_head_defaults(raw)
    model: Any = raw.get("model")
    use: Any = model.get("use") if isinstance(model, dict) else model
    if isinstance(use, str):  # first, because a head has defaults for what others must give
        find("model", use, build.MODELS)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, raw) from error
    build.require_loadable(spec.data, "data")
    spec.data.place(Path(path).parent)
    for place, table in [("model", spec.model), *((f"methods.{m.name}.model", m.model) for m in spec.methods)]:
        if table is not None:
            build.require_options(place, table)
    require_features(spec)
    for method in spec.methods:
        _require_calls(method)
    unit, given = spec.data.options.get("unit"), spec.privacy.privacy_unit
    needed, counted = ("example", "rows") if unit == ROW else ("user", "persons")
    if not spec.data.use and unit is not None and given != needed:
        remedy = f"correct it, and count {counted} in [privacy]"
        condition = f"to be {needed!r} for data.unit = {unit!r}"
        raise expected("load_spec", "privacy.privacy_unit", condition, repr(given), remedy)
    size, count = spec.privacy.expected_batch_size, spec.privacy.num_examples
    if size > count:
        raise expected("load_spec", "privacy.expected_batch_size", f"to be at most num_examples = {count}", size)
    own, other = spec.data, spec.data.elsewhere
    if other is not None and (other.source, other.options.get("path")) == (own.source, own.options.get("path")):
        condition, remedy = "to differ from data.use", "use data.public to count some of these examples as public"
        raise expected("load_spec", "data.elsewhere", condition, repr(other.source), remedy)
    require_total(spec)
    for method in spec.methods:
        for rule in _RULES:
            rule(method, spec)
    require_names(spec)
    require_payable(spec)
    _methods_with_one_grid_have_equally_many_candidates(spec)
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise expected("load_spec", "methods", "to have different names", names)
    return spec


def _explained(error: ValidationError, raw: Mapping[str, Any]) -> PrivacyError:
    """Return the first problem that pydantic found as an error of ours; an unknown key is often why another lacks."""
    first: Any = min(error.errors(), key=lambda found: found["type"] != "unknown")
    place = _place(first["loc"], raw)
    if first["type"] == "unknown":
        try:
            require_option(first["ctx"]["name"], first["ctx"]["valid"], f"{place}.{first['ctx']['name']}".lstrip("."))
        except PrivacyError as unknown:
            return unknown
    if first["type"] == "missing":
        return missing(place)
    if place == "privacy.max_grad_norm" and isinstance(first["input"], list):
        remedy = f"give one number here, and the values to try in [[methods]]: max_grad_norm = {first['input']}"
        return expected("load_spec", place, "to be one number", repr(first["input"])[:80], remedy)
    return problem(place, first)


def _place(loc: tuple[int | str, ...], raw: Any) -> str:
    """Return the name of a place in a TOML file: a method by its name, other list entries by number from 1."""
    words: list[str] = []
    for index, part in enumerate(loc):
        if isinstance(raw, list) and isinstance(part, int):
            raw = raw[part]
            name = raw.get("name") if isinstance(raw, dict) else None
            words += [name] if isinstance(name, str) and name else [f"{words.pop()} (entry {part + 1})"]
        elif isinstance(raw, dict) and (part in raw or index == len(loc) - 1):  # others are pydantic's names for kinds
            words.append(f"{part}")
            raw = raw.get(part)
    return ".".join(words)


def _wrong(method: MethodTable, key: str, condition: str, got: object, remedy: str = "") -> PrivacyError:
    """Return the error for a key of a method's table."""
    return expected("load_spec", f"methods.{method.name}.{key}", condition, got, remedy)


# Arguments of a preconditioner's rule that the experiment gives itself, tiny.
_TINY: dict[str, Any] = {
    "gradient": PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none"),
    "counts": torch.ones(10_000),
    "parameter": "p",
    "dim": 0,
    "source": "none",
    "provenance": "public data",
    "examples": torch.ones(1),
    "forward": None,
}


def _require_calls(method: MethodTable) -> None:
    """Raise PrivacyError unless the tables of a method name functions and arguments, and every grid has a value."""
    for part, table in method.calls.items():
        place = f"methods.{method.name}.{part}"
        known = arguments(find(place, table.use, REGISTRIES[part]))
        valid = [name for name in known if name not in ("params", "public", "horizon", *_TINY)]
        for name in table.options:
            require_option(name, valid, f"{place}.{name}")
    for place, values in method.grids.items():
        if not values:
            raise _wrong(method, place, "to have a value to try", [])


# Rules across tables, each for one method of a spec.


def _a_noise_step_needs_the_true_noise(method: MethodTable, spec: Spec) -> None:
    without = {"non_private": method.non_private, "assumed_noise_std": method.assumed_noise_std is not None}
    if method.noise_step is not None and (got := ", ".join(name for name, given in without.items() if given)):
        raise _wrong(method, "optimizer.noise_step", "to be given without this", got, "give lr in its place")
    noise = spec.privacy.noise_multiplier
    if noise == 0 and any(candidate.noise_step is not None for candidate in spec.grid(method)):
        remedy = "give lr in place of noise steps"
        raise expected("load_spec", "privacy.noise_multiplier", f"to be > 0 for {method.name}", noise, remedy)


def _every_part_can_be_made(method: MethodTable, spec: Spec) -> None:
    """Make the parts of each candidate once, on tiny inputs: their constructors check the values."""
    for tuned in map(method.at, spec.grid(method)):
        tuned.make([("p", nn.Parameter(torch.zeros(1)))])
        parts = tuned.parts(spec.privacy.privacy_unit)  # its errors begin with the table's place
        try:
            Parts(**parts)
        except PrivacyError as error:
            raise type(error)(f"methods.{method.name}: {error}") from error
        if tuned.precondition is not None:
            build.precondition_of(f"methods.{method.name}.precondition", tuned.precondition, _TINY)
    if method.norm_bins is not None:
        require_bins("load_spec", f"methods.{method.name}.norm_bins", method.norm_bins)


def _bands_need_poisson_sampling(method: MethodTable, spec: Spec) -> None:
    if method.bands is not None and spec.privacy.sampling != "poisson":
        remedy = 'give sampling = "poisson", or leave bands out'
        raise _wrong(method, "bands", "to be absent for this sampling", spec.privacy.sampling, remedy)


def _only_inputs_take_synthetic_examples(method: MethodTable, spec: Spec) -> None:
    table = method.precondition
    if table is not None and table.public is not None and table.use != "inputs":
        raise _wrong(method, "precondition.public", 'to be for "inputs" only', table.use)


def _a_method_without_privacy_does_not_clip(method: MethodTable, spec: Spec) -> None:
    for part in ("clip", "adaptive_clip", "norm_bins"):
        if method.non_private and (value := getattr(method, part)) is not None:
            got, remedy = getattr(value, "use", value), "leave it out: a method without privacy does not clip"
            raise _wrong(method, part, "to be absent for non_private", got, remedy)


def _gradients_have_one_point(method: MethodTable, spec: Spec) -> None:
    is_filtered = method.filter is not None and method.filter.use == "DiSK"
    points = {"perturb": method.perturb, "local": method.local, 'filter = "DiSK"': is_filtered or None}
    if len(given := [name for name, point in points.items() if point is not None]) > 1:
        raise _wrong(method, given[0], "to have the only point of the gradients", " and ".join(given), "leave one out")


def _users_train_locally(method: MethodTable, spec: Spec) -> None:
    unit = spec.privacy.privacy_unit
    if unit == "example" and method.local is not None:
        remedy = 'leave it out, or set privacy_unit = "user" in [privacy] and choose [data] with one row per user'
        raise _wrong(method, "local", 'to be absent for privacy_unit = "example"', method.local.options, remedy)
    if unit == "user" and method.perturb is not None:
        raise _wrong(method, "perturb", 'to be absent for privacy_unit = "user"', method.perturb.use)
    if (
        unit == "user" and method.local is None and not build.is_own(spec.data)
    ):  # of data of your own, a row may be a person
        remedy = "add local with lr and batch_size, for example local = { lr = 0.1, batch_size = 20 }"
        raise _wrong(method, "local", 'to be given for privacy_unit = "user"', None, remedy)


def _users_are_tuned_on_other_users(method: MethodTable, spec: Spec) -> None:
    if method.local is not None and spec.tuning is not None and spec.tuning.by == "train_loss":
        remedy = 'tune by "accuracy" or "loss" on users that are held out'
        raise expected("load_spec", "tuning.by", "to be measured on held-out users", "'train_loss'", remedy)


def _public_examples_are_there_and_used(method: MethodTable, spec: Spec) -> None:
    if "public" in method.model_fields_set and not method.needs_public:
        got = method.public.model_dump(exclude_defaults=True)
        remedy = "remove it, or add a precondition rule, a warm_start or an optimizer that uses public gradients"
        raise _wrong(method, "public", "to be absent for a method that uses no public examples", got, remedy)
    if method.needs_public and not method.public.other and spec.data.public == 0:
        remedy = "set it to the number of training examples that count as public"
        raise expected("load_spec", "data.public", f"to be positive for {method.name}", 0, remedy)


def _tuning_has_values_and_held_out_examples(method: MethodTable, spec: Spec) -> None:
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        rate = "an lr or a noise_step" if method.has_noise_step else "an lr"
        raise _wrong(
            method, "optimizer", "to have a rate", None, f"give it {rate}, or add a [tuning] table with a grid"
        )
    if spec.tuning is None:
        remedy = "add [tuning] with seeds, or give one lr and one max_grad_norm"
        raise expected("load_spec", "[tuning]", f"to be given for the grid of {method.name}", None, remedy)
    is_validated = spec.privacy.total_epsilon is None and spec.tuning.by != "train_loss"
    if is_validated and spec.data.validation == 0 and not build.is_own(spec.data):
        remedy = "set it to a number of examples to hold out; learning rates must not be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def _scales_without_noise_need_eps(method: MethodTable, spec: Spec) -> None:
    table = method.precondition
    if table is None or "noise_eps" not in arguments(table.rule) or "eps" in table.options:
        return
    without = {"non_private = true": method.non_private, "local": method.local is not None}
    without["privacy.noise_multiplier = 0"] = spec.privacy.noise_multiplier == 0
    if got := ", ".join(name for name, given in without.items() if given):
        remedy = "add eps, such as eps = 1e-5"
        raise _wrong(method, "precondition.eps", "to be given where no noise sets the unit", got, remedy)


_RULES = (
    _a_noise_step_needs_the_true_noise,
    _every_part_can_be_made,
    _bands_need_poisson_sampling,
    _only_inputs_take_synthetic_examples,
    _a_method_without_privacy_does_not_clip,
    _gradients_have_one_point,
    _users_train_locally,
    _users_are_tuned_on_other_users,
    _public_examples_are_there_and_used,
    _tuning_has_values_and_held_out_examples,
    _scales_without_noise_need_eps,
)


def _methods_with_one_grid_have_equally_many_candidates(spec: Spec) -> None:
    """Raise PrivacyError unless all methods that are tuned together get the same number of trainings."""
    together = [method for method in spec.methods if spec.shares_grid(method)]
    if not together or spec.tuning is None or spec.tuning.noise_steps is None or spec.privacy.total_epsilon is not None:
        return
    if len(set(spec.tuning.seeds)) < 2:
        remedy = "the spread over seeds decides whether a difference counts"
        raise expected("load_spec", "tuning.seeds", "to hold two seeds or more", spec.tuning.seeds, remedy)
    rates = len(set(spec.tuning.noise_steps))
    for method in together:
        if not method.has_noise_step and len(set(method.lr) if isinstance(method.lr, list) else ()) != rates:
            condition = f"to be a grid of {rates} rates, because {method.optimizer.use} has no noise step"
            raise _wrong(method, "optimizer.lr", condition, method.lr)
    counts = {method.name: len(set(spec.grid(method))) for method in together}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{count} ({name})" for name, count in counts.items())
        remedy = "give each method as many values to try, or a rate of its own"
        raise expected("load_spec", "candidates of methods", "to be equally many", got, remedy)
