"""A planted fault, and how a test of the suite ends under it."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import privgrad as pg
from conftest import account_by_rdp
from privgrad.clip import clipping
from privgrad.types import ClippedSum

Patch = pytest.MonkeyPatch
TESTS = Path(__file__).parent.parent
_OURS = (str(TESTS), str(Path(pg.__file__).parent))
BY_PLD = {"test_accounting", "test_selection", "test_truncated"}  # about epsilon itself
_CAUGHT = (AssertionError, pytest.fail.Exception, pg.PrivacyError)


@dataclass(frozen=True)
class Mutant:
    """A fault that a plausible wrong implementation has, and the test that must not pass with it.

    Attributes:
        fault: in a few words.
        plant: puts it into the library, until the patch is undone.
        caught_by: "module.function" of a test.
        given: the test's parameters, and what stands for its fixtures (tmp_path and monkeypatch are made); or, of the
            test's module, these.
        guard: where the library itself refuses the fault, part of what it says; None where the test finds it out.
    """

    fault: str
    plant: Callable[[Patch], None]
    caught_by: str
    given: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = field(default_factory=dict[str, Any])
    guard: str | None = None


def everywhere(patch: Patch, original: Any, planted: Any) -> None:
    """Put one thing in another's place in every module of library and tests, as an edit of its source would."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(_OURS) and not name.startswith("mutants."):
            for attribute in [key for key, value in vars(module).items() if value is original]:
                patch.setattr(module, attribute, planted)


def plant_sum(patch: Patch, planted: Callable[..., tuple[ClippedSum, Any]], module: Any = None) -> None:
    """Plant a wrong clipped sum, (the real one, chunks, its options) -> its result, in one module or in all."""
    real = clipping.ClippingAccumulator

    def clipped_sum(chunks: Iterable[Any], **options: Any) -> Any:
        accumulator = real(**options)
        for chunk in chunks:
            accumulator.add(chunk)
        return accumulator.result()

    class Planted:
        def __init__(self, **options: Any) -> None:
            self.chunks, self.options = list[Any](), options

        def add(self, chunk: Any, padded: int | None = None) -> None:
            assert padded is None
            self.chunks.append(chunk)

        def result(self) -> tuple[ClippedSum, Any]:
            return planted(clipped_sum, self.chunks, **self.options)

    if module is None:
        everywhere(patch, real, Planted)
    else:
        patch.setattr(module, real.__name__, Planted)


def ending(mutant: Mutant, folder: Path, *, planted: bool) -> BaseException | None:
    """What a mutant's test ends with, with the fault or without it; None if it passes.

    An error that is neither a test's finding nor a refusal of the library's is an accident, and is raised.
    """
    path, name = mutant.caught_by.split(".")
    module = import_module(path)
    test = getattr(module, name)
    wanted = inspect.signature(test).parameters
    given = dict(mutant.given(module) if callable(mutant.given) else mutant.given)
    if "tmp_path" in wanted:
        given["tmp_path"] = folder
        folder.mkdir(parents=True)
    with Patch.context() as patch, Patch.context() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "monkeypatch" in wanted:
            given["monkeypatch"] = own
        if path not in BY_PLD:
            account_by_rdp(own)
        if planted:
            mutant.plant(patch)
        try:
            test(**given)
        except _CAUGHT as error:
            return error
    return None
