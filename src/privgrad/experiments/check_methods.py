"""Checks of the methods of a Spec: each one's options, data and grid suit the optimizer and the other tables.

`load_spec` calls `require_method`, `require_equal_grids` and `require_option`. The privacy guarantee does not rest on
this file.
"""

import difflib
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from privgrad import precondition, side_information
from privgrad.errors import did_you_mean, expected
from privgrad.experiments.sources import is_own
from privgrad.experiments.spec import Candidate, MethodTable, Spec
from privgrad.experiments.tables import PreconditionTable
from privgrad.gradient.norm_statistics import require_bins
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.optim import OPTIMIZERS
from privgrad.optim.base import constructor_arguments

_NEAR = 0.8  # how similar a name must be to `non_private` to mean it; a suggestion must not switch privacy off


def require_option(name: str, valid: list[str], place: str) -> None:
    """Raise PrivacyError, with the nearest valid name, unless the option is valid."""
    if name not in valid:
        is_near = difflib.SequenceMatcher(None, name.lower(), "non_private").ratio() >= _NEAR
        suggested = [option for option in valid if option != "non_private" or is_near]
        remedy = f"choose one of {', '.join(valid)}" if valid else "remove it: there are none"
        raise expected("load_spec", "options", "to be known", f"{place!r}", did_you_mean(name, suggested, remedy))


def require_method(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless a method's options suit its optimizer and the other tables."""
    _require_options(method, spec)
    _require_local(method, spec)
    _require_public(method, spec)
    _require_tuning(method, spec)
    _require_noise_for_scales(method, spec)


def _require_parts(method: MethodTable) -> None:
    """Raise PrivacyError unless the rule for C and the filter have their options, and nothing that contradicts them."""
    for part, table in method.part_tables.items():
        known = inspect.signature(table.kind).parameters
        for name in table.options:
            place = f"methods.{method.name}.{part}.options.{name}"
            require_option(name, list(known), place)
            value = table.options[name]
            if isinstance(value, list) and "Sequence" not in str(known[name].annotation):
                remedy = f'to try several, give tune = {{ "{part}.{name}" = {value} }}'
                raise expected("load_spec", place, "to be one value", value, remedy)
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in table.options:
                place = f"methods.{method.name}.{part}.options.{name}"
                raise expected("load_spec", place, "to be given", None, f"add {name}")
    method.parts()
    if method.norm_bins is not None:
        require_bins("load_spec", f"methods.{method.name}.norm_bins", method.norm_bins)
    if method.filter is not None and method.filter.rule == "DiSK" and (method.perturb or method.local):
        place, got = f"methods.{method.name}.filter", "DiSK with perturb or local"
        raise expected("load_spec", place, "to have the only point of the gradients", got, "leave one of the two out")
    for part, value in (("adaptive_clip", method.adaptive_clip), ("norm_bins", method.norm_bins)):
        if method.non_private and value is not None:
            got, remedy = getattr(value, "rule", value), "leave it out: a method without privacy does not clip"
            raise expected("load_spec", f"methods.{method.name}.{part}", "to be absent for non_private", got, remedy)


def _require_options(method: MethodTable, spec: Spec) -> None:
    """Raise PrivacyError unless the options suit the optimizer, the perturbation and the preconditioner."""
    arguments = constructor_arguments(OPTIMIZERS[method.optimizer])
    valid = [name for name in arguments if name not in ("params", "lr", "noise_step", "public", "horizon")]
    if method.perturb is not None and method.perturb.mode is not None and method.perturb.rule != "BAM":
        place = f"methods.{method.name}.perturb.mode"
        raise expected("load_spec", place, "to be given for BAM only", method.perturb.rule, "leave it out")
    for name in method.options:
        require_option(name, valid, f"methods.{method.name}.options.{name}")
    for name, values in method.tune.items():
        place = f"methods.{method.name}.tune.{name}"
        part, _, option = name.partition(".")
        if method.precondition is not None and option and part == "precondition":
            require_option(option, _options_of(method.precondition), place)
        elif option and (table := method.part_tables.get(part)) is not None:
            require_option(option, list(inspect.signature(table.kind).parameters), place)
        else:
            require_option(name, valid, place)
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
        _require_parts(tuned)
        if tuned.bands is not None and spec.privacy.sampling != "poisson":
            place, remedy = f"methods.{method.name}.bands", 'give sampling = "poisson", or leave bands out'
            raise expected("load_spec", place, "to be absent for this sampling", spec.privacy.sampling, remedy)
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
    is_validated = spec.privacy.total_epsilon is None and spec.tuning.by != "train_loss"
    if is_validated and spec.data.validation == 0 and not is_own(spec.data):
        remedy = "set it to a number of examples to hold out; learning rates must not be chosen on the test set"
        raise expected("load_spec", "data.validation", "to be positive for tuning", 0, remedy)


def require_equal_grids(spec: Spec, path: str | Path) -> None:
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
_GIVEN = ("gradient", "counts", "parameter", "dim", "source", "provenance", "examples", "forward")


def _rule(table: PreconditionTable) -> Callable[..., Any]:
    """Return the function of a preconditioner's rule."""
    return getattr(side_information if table.by_counts else precondition, table.rule)


def _options_of(table: PreconditionTable) -> list[str]:
    """Return the names of the options that a preconditioner's rule takes."""
    return [name for name in inspect.signature(_rule(table)).parameters if name not in _GIVEN]


def _require_precondition(table: PreconditionTable, place: str) -> None:
    """Raise PrivacyError unless the options suit the rule; the rule is called once on tiny inputs to check."""
    for name in table.options:
        require_option(name, _options_of(table), f"{place}.{name}")
    if table.public is not None and table.rule != "inputs":
        remedy = 'leave it out, or set rule = "inputs"'
        raise expected("load_spec", place.replace("options", "public"), 'to be for "inputs" only', table.rule, remedy)
    # Tiny versions of the arguments that the experiment gives itself.
    public = PublicGradient(nn.Identity(), lambda _, x: x, torch.zeros(1), source="none")
    given = dict(
        zip(_GIVEN, (public, torch.ones(10_000), "p", 0, "none", "public data", torch.ones(1), None), strict=True)
    )
    function = _rule(table)
    parameters = inspect.signature(function).parameters
    try:
        function(**{name: value for name, value in given.items() if name in parameters}, **table.options)
    except (TypeError, ValueError, OverflowError) as error:
        raise expected("load_spec", place, f"to suit {table.rule}", error, "correct them") from error
