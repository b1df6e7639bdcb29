"""Optional packages, and the additions of the second one, privgrad_lab, which entry points name: nothing imports it."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from privgrad.errors import expected


def optional(function: str, name: str, module: str, remedy: str, purpose: str = "") -> Any:
    """Return a module of an optional package; raise PrivacyError, which calls it by `name`, if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise expected(function, name, f"to be installed{purpose}", error, remedy) from error


def from_lab(name: str) -> Any:
    """Return what privgrad_lab registers under a name of the entry points `privgrad.lab`."""
    try:
        return entry_points(group="privgrad.lab")[name].load()
    except (KeyError, ImportError) as error:  # KeyError: no such entry
        remedy = "pip install 'privgrad[experiments]'"
        raise expected("privgrad", f"{name!r} of privgrad_lab", "to be installed", error, remedy) from error


def lab_attribute(entry: str, module: str, name: str) -> Any:
    """Return a name that a module of the library lends from a module of the lab, for the module's `__getattr__`."""
    lent = None if name.startswith("_") else from_lab(entry)
    if lent is None or name not in lent.__all__:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(lent, name)
