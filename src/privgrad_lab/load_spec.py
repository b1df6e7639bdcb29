"""Read a TOML file into a Spec, and check that its tables suit each other."""

import itertools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from privgrad.clip.norm_statistics import require_bins
from privgrad.errors import PrivacyError, expected, file_problem, readable
from privgrad.parts import Parts
from privgrad.precondition.public_gradient import PublicGradient
from privgrad_lab import build, old_spelling
from privgrad_lab.calls import arguments, find, missing, problem, require_option, wrong
from privgrad_lab.featuring import require_features, with_head_defaults, with_norm_of_table
from privgrad_lab.metrics import require_names
from privgrad_lab.prices import require_payable, require_total
from privgrad_lab.spec import REGISTRIES, MethodTable, Spec


def load_spec(path: str | Path) -> Spec:
    """Read and check a TOML file that describes an experiment; an error names the place in the file."""
    return check_spec(read_tables(path), path)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    if found := file_problem(path):
        remedy = "give the path of a TOML file that describes an experiment"
        raise expected("load_spec", "path", "to be a readable TOML file", f"{path}, which {found}", remedy)
    with readable("load_spec", f"{path}", "to be valid TOML", ""):
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))


def check_spec(raw: Mapping[str, Any], path: str | Path) -> Spec:
    """Convert the tables of a TOML file into a Spec; `path` is the file's, for relative paths."""
    old_spelling.refuse(raw, path)
    model: Any = raw.get("model")
    use: Any = model.get("use") if isinstance(model, dict) else model
    if isinstance(use, str):  # first, because a head has defaults for what others must give
        find("model", use, build.MODELS)
    whole = with_head_defaults(raw) if use == "head" else raw
    try:
        spec = Spec.model_validate(whole)
    except ValidationError as error:
        raise _explained(error, whole) from error
    build.require_loadable(spec.data, "data")
    spec.data.place(Path(path).parent)
    for place, table in [("model", spec.model), *((f"methods.{m.name}.model", m.model) for m in spec.methods)]:
        if table is not None:
            build.require_options(place, table)
    require_features(spec)
    for rule in _RULES:
        rule(spec)
    return with_norm_of_table(spec, raw)


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
        return wrong(place, "to be one number", repr(first["input"])[:80], remedy)
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
    return wrong(f"methods.{method.name}.{key}", condition, got, remedy)


# Arguments of a preconditioner's rule that the experiment gives itself, tiny.
_TINY: dict[str, Any] = {
    "gradient": PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none"),
    "counts": torch.ones(10_000),
    "weights": torch.ones(1, 10_000),
    "parameter": "p",
    "dim": 0,
    "source": "none",
    "provenance": "public data",
    "examples": torch.ones(1),
    "forward": None,
}


# Rules for one method of a spec.


def _tables_name_functions_and_arguments(method: MethodTable, spec: Spec) -> None:
    for part, table in method.calls.items():
        place = f"methods.{method.name}.{part}"
        known = arguments(find(place, table.use, REGISTRIES[part]))
        for name in table.options:
            valid = [one for one in known if one not in ("params", "public", "horizon", *_TINY)]
            require_option(name, valid, f"{place}.{name}")
    for place, values in method.grids.items():
        if not values:
            raise _wrong(method, place, "to have a value to try", [])


def _a_noise_step_needs_the_true_noise(method: MethodTable, spec: Spec) -> None:
    without = {"non_private": method.non_private, "assumed_noise_std": method.assumed_noise_std is not None}
    if method.noise_step is not None and (got := ", ".join(name for name, given in without.items() if given)):
        raise _wrong(method, "optimizer.noise_step", "to be given without this", got, "give lr in its place")
    noise = spec.privacy.noise_multiplier
    if noise == 0 and any(candidate.noise_step is not None for candidate in spec.grid(method)):
        remedy = "give lr in place of noise steps"
        raise wrong("privacy.noise_multiplier", f"to be > 0 for {method.name}", noise, remedy)


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


def _parts_do_not_exclude_each_other(method: MethodTable, spec: Spec) -> None:
    unit, table = spec.privacy.privacy_unit, method.precondition
    if method.bands is not None and spec.privacy.sampling != "poisson":
        raise _wrong(method, "bands", "to be absent for this sampling", spec.privacy.sampling)
    if table is not None and table.public is not None and table.use != "inputs":
        raise _wrong(method, "precondition.public", 'to be for "inputs" only', table.use)
    if "public" in method.model_fields_set and not method.needs_public:
        got = method.public.model_dump(exclude_defaults=True)
        raise _wrong(method, "public", "to be absent for a method that uses no public examples", got)
    # A method without privacy does not clip.
    defaults = {"clip": None, "adaptive_clip": None, "norm_bins": None, "bands": None, "group_size": 1}
    for part, default in defaults.items():
        if method.non_private and (value := getattr(method, part)) != default:
            raise _wrong(method, part, "to be absent for non_private", getattr(value, "use", value))
    # Gradients have one point, and a unit has one contribution.
    is_filtered = method.filter is not None and method.filter.use == "DiSK"
    points = {"perturb": method.perturb, "local": method.local, 'filter = "DiSK"': is_filtered or None}
    if len(given := [name for name, point in points.items() if point is not None]) > 1:
        raise _wrong(method, given[0], "to have the only point of the gradients", " and ".join(given))
    part = "local" if unit == "example" else "perturb"
    if (given_part := getattr(method, part)) is not None:
        raise _wrong(method, part, f'to be absent for privacy_unit = "{unit}"', given_part.options)


def _tuning_has_values(method: MethodTable, spec: Spec) -> None:
    if method.local is not None and spec.tuning is not None and spec.tuning.by == "train_loss":
        raise wrong("tuning.by", "to be measured on held-out users", "'train_loss'")
    if not spec.is_tuned(method):
        return
    if not spec.grid(method):
        more = "a noise_step, or add [tuning] with a grid" if method.has_noise_step else "a list: it has no noise step"
        raise _wrong(method, "optimizer", "to have a rate", None, f"give it an lr, or {more}")
    if spec.tuning is None:
        raise wrong("[tuning]", f"to be given for the grid of {method.name}", None, "add it with seeds")


def _scales_without_noise_need_eps(method: MethodTable, spec: Spec) -> None:
    table = method.precondition
    if table is None or "noise_eps" not in arguments(table.rule) or "eps" in table.options:
        return
    without = {"non_private = true": method.non_private, "local": method.local is not None}
    without["privacy.noise_multiplier = 0"] = spec.privacy.noise_multiplier == 0
    if got := ", ".join(name for name, given in without.items() if given):
        raise _wrong(method, "precondition.eps", "to be given where no noise sets the unit", got, "add eps = 1e-5, say")


_RULES_OF_METHODS: tuple[Callable[[MethodTable, Spec], None], ...] = (
    _tables_name_functions_and_arguments,
    _a_noise_step_needs_the_true_noise,
    _every_part_can_be_made,
    _parts_do_not_exclude_each_other,
    _tuning_has_values,
    _scales_without_noise_need_eps,
)


# Rules for the whole spec.


def _names_and_seeds_differ(spec: Spec) -> None:
    """Two equal runs would count as two in the spread over seeds."""
    names = [method.name for method in spec.methods]
    if len(set(names)) < len(names):
        raise wrong("methods", "to have different names", names)
    for place, table in {"run": spec.run, "tuning": spec.tuning}.items():
        if table is not None and len(set(table.seeds)) < len(table.seeds):
            raise wrong(f"{place}.seeds", "to differ", table.seeds)


def _methods_follow_their_rules(spec: Spec) -> None:
    for method, rule in itertools.product(spec.methods, _RULES_OF_METHODS):
        rule(method, spec)


def _methods_with_one_grid_have_equally_many_candidates(spec: Spec) -> None:
    together = [method for method in spec.methods if spec.shares_grid(method)]
    if not together or spec.tuning is None or spec.tuning.noise_steps is None or spec.privacy.total_epsilon is not None:
        return
    if len(set(spec.tuning.seeds)) < 2:
        remedy = "the spread over seeds decides whether a difference counts"
        raise wrong("tuning.seeds", "to hold two seeds or more", spec.tuning.seeds, remedy)
    rates = len(set(spec.tuning.noise_steps))
    for method in together:
        if not method.has_noise_step and len(set(method.lr) if isinstance(method.lr, list) else ()) != rates:
            condition = f"to be a grid of {rates} rates, because {method.optimizer.use} has no noise step"
            raise _wrong(method, "optimizer.lr", condition, method.lr)
    counts = {method.name: len(set(spec.grid(method))) for method in together}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{count} ({name})" for name, count in counts.items())
        raise wrong("candidates of methods", "to be equally many", got)


_RULES: tuple[Callable[[Spec], None], ...] = (
    _names_and_seeds_differ,
    require_total,
    _methods_follow_their_rules,
    require_names,
    require_payable,
    _methods_with_one_grid_have_equally_many_candidates,
)
