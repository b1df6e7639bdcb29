"""A table of a TOML file is a call: `use` names a function or a class, and the other keys are its arguments.

The function itself checks the values. This file adds the place in the file, which precedes every error.
"""

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticCustomError

from privgrad import data
from privgrad.errors import PrivacyError, did_you_mean, expected

# Values that a required key may have, for errors.
SUCH_AS = {
    "title": '"My experiment"',
    "name": '"DP-AdamBC"',
    "optimizer": '"AdamBC"',
    "delta": "1e-5",
    "max_grad_norm": "1.0",
    "expected_batch_size": "256",
    "steps": "1000",
    "seeds": "[0, 1]",
}


class Table(BaseModel):
    """A table of the file: its keys are fixed, and its values have exactly the stated types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    names: ClassVar[str] = ""  # the key that a name in place of the table gives

    @model_validator(mode="before")
    @classmethod
    def _require_known(cls, given: Any) -> Any:
        if isinstance(given, str) and cls.names:
            return {cls.names: given}
        if isinstance(given, dict) and cls.model_config.get("extra") == "forbid":
            for name in given:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown", "unknown", {"name": name, "valid": list(cls.model_fields)})
        return given


class Call(Table):
    """A table that is a call. A name in place of the table is a call without arguments."""

    model_config = ConfigDict(extra="allow")
    names: ClassVar[str] = "use"
    use: str = Field(min_length=1)  # a name of a registry, or "package.module:function"

    @property
    def options(self) -> dict[str, Any]:
        """Return the keys that are no field of this table: arguments of what it calls."""
        return dict(self.model_extra or {})


def make(place: str, table: Call, registry: Mapping[str, Callable[..., Any]], **given: Any) -> Any:
    """Return what the function that a table names returns for the table's options, and those of `given` that it has."""
    return call(place, table.use, find(place, table.use, registry), table.options, given)


def call(
    place: str, use: str, function: Callable[..., Any], options: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:
    """Call a function with options of the file, and those of the given arguments that it has. See `make`."""
    known = bind(place, function, options, given)
    return called(place, use, function, **{name: value for name, value in given.items() if name in known}, **options)


def find(place: str, use: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function of a name; raise PrivacyError for an unknown one."""
    if ":" in use:
        return imported(f"{place}.use", use)
    if use not in registry:
        raise unknown(f"{place}.use", use, registry)
    return registry[use]


def unknown(place: str, name: object, valid: Iterable[str], remedy: str = "choose one") -> PrivacyError:
    """Return the error for a name that is not one of the valid ones, with the nearest of them."""
    names = list(valid)
    return wrong(place, f"to be one of {', '.join(names)}", repr(name)[:80], did_you_mean(name, names, remedy))


def arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named arguments of a function or class; a class that takes `**kwargs` has those of its base too."""
    found: dict[str, inspect.Parameter] = {}
    for one in _constructors(function):
        parameters = inspect.signature(one).parameters.values()
        found = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} | found
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    found.pop("self", None)
    return found


def _constructors(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    if not inspect.isclass(function):
        return [function]
    return [vars(kind)["__init__"] for kind in function.__mro__ if "__init__" in vars(kind)]


def bind(
    place: str, function: Callable[..., Any], options: Mapping[str, Any], given: Iterable[str]
) -> dict[str, inspect.Parameter]:
    """Check that the options are arguments of a function, of the types of its annotations; return all its arguments."""
    try:
        known = arguments(function)
    except (TypeError, ValueError) as error:
        raise wrong(f"{place}.use", "to name a function whose arguments suit", error) from error
    for name in options:
        require_option(name, [one for one in known if one not in given], f"{place}.{name}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options and name not in given:
            raise missing(f"{place}.{name}")
    hints: dict[str, Any] = {}
    for one in reversed(_constructors(function)):
        try:
            hints |= get_type_hints(getattr(one, "func", one), include_extras=True)
        except (AttributeError, NameError, TypeError):  # annotations of a user's function that cannot be resolved
            continue
    for name, value in options.items():
        require_type(f"{place}.{name}", value, hints.get(name, Any))
    return known


def require_type(place: str, value: Any, kind: Any) -> None:
    """Raise PrivacyError unless a value of the file has the type that an annotation states."""
    try:
        # In a tuple, because an adapter of a type that has its own settings takes none. As JSON, lists are tuples.
        config = ConfigDict(strict=True, arbitrary_types_allowed=True)
        holder: Any = tuple
        TypeAdapter(holder[kind], config=config).validate_json(json.dumps([value], default=str))
    except PydanticUserError:  # a type that pydantic does not know
        return
    except ValidationError as error:
        first = error.errors()[0]
        for part in first["loc"][1:]:  # the other ones are pydantic's names for kinds of values
            if isinstance(value, dict) and part in value:
                place, value = f"{place}.{part}", value[part]
        raise problem(place, first) from error


def wrong(place: str, condition: str, got: object, remedy: str = "") -> PrivacyError:
    """Return the error for a place of the file."""
    return expected("load_spec", place, condition, got, remedy)


def problem(place: str, found: Mapping[str, Any]) -> PrivacyError:
    """Return a problem that pydantic found at a place of the file as an error of ours."""
    if found["type"] == "literal_error":
        valid = found["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return unknown(place, found["input"], valid)
    return wrong(place, f"to be valid ({found['msg']})", repr(found["input"])[:80])


def missing(place: str) -> PrivacyError:
    """Return the error for a required key that the file lacks."""
    name = place.rpartition(".")[2]
    example = f", such as {name} = {SUCH_AS[name]}" if name in SUCH_AS else ""
    return wrong(place, "to be given", None, f"add it{example}")


def require_option(name: str, valid: list[str], place: str) -> None:
    """Raise PrivacyError, with the nearest valid name, unless the option is valid."""
    if name not in valid:
        # A suggestion must not switch privacy off: only a similar name means `non_private`.
        is_near = difflib.SequenceMatcher(None, name.lower(), "non_private").ratio() >= 0.8
        suggested = [option for option in valid if option != "non_private" or is_near]
        remedy = f"choose one of {', '.join(valid)}" if valid else "remove it: there are none"
        raise wrong("options", "to be known", f"{place!r}", did_you_mean(name, suggested, remedy))


def called(place: str, use: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function that a file names, and put the place in the file before its errors."""
    try:
        return function(*args, **options)
    except PrivacyError as error:
        raise type(error)(f"{place}: {error}") from error
    except Exception as error:
        # A function of the user may raise anything. Ours raise these for values that do not suit them.
        if ":" not in use and not isinstance(error, TypeError | ValueError | OverflowError):
            raise
        condition, remedy = ("to run", f"correct {use}") if ":" in use else (f"to suit {use}", "")
        raise wrong(place, condition, f"{type(error).__name__}: {error}", remedy) from error


def imported(place: str, name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names, from the current directory or an installed package."""
    module_name, _, attribute = name.partition(":")
    here = f"{Path.cwd()}"
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0])
        condition = f"to name a module in {here} or an installed one" if missing else "to name a module that imports"
        raise wrong(place, condition, f"{type(error).__name__}: {error}") from error
    function = getattr(found, attribute, None)
    if function is None and module_name.startswith("privgrad."):  # a loader that another module of ours has now
        function = getattr(data, attribute, None)
    if not callable(function):
        own = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        raise wrong(place, f"to name a function of {module_name}", repr(attribute), did_you_mean(attribute, own))
    return function
