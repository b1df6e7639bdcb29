"""Experiments as they were spelled before tables were calls, as in the spec.json of older folders."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from privgrad_lab import old_spelling
from privgrad_lab.load_spec import check_spec
from privgrad_lab.spec import MethodTable, Spec

FILES = Path(__file__).parents[1] / "old_files" / "experiments"
# What each file described to the version that wrote it: `described` of that version, with its names of attributes.
TOLD: dict[str, Any] = json.loads((FILES / "described.json").read_text())


def made(method: MethodTable, spec: Spec) -> list[Any]:
    optimizer = method.make([("p", nn.Parameter(torch.zeros(1)))], steps=7)
    options = {name: repr(value) for name, value in sorted(optimizer.defaults.items()) if not callable(value)}
    parts = method.parts(spec.privacy.privacy_unit)
    table = method.precondition
    return [
        [type(optimizer).__name__, options],
        {name: repr(part) for name, part in sorted(parts.items()) if part is not None},
        table and [table.use, dict(sorted(table.options.items())), table.public],
    ]


def described(spec: Spec) -> dict[str, Any]:
    methods: list[dict[str, Any]] = []
    for method in spec.methods:
        grid, own = spec.grid(method), spec.of(method)
        methods.append(
            {
                "name": method.name,
                "grid": grid,
                "made": [made(method.at(candidate), spec) for candidate in (grid[0], grid[-1])],
                "group_size": method.group_size,
                "bands": method.bands,
                "public": method.public.model_dump(),
                "needs_public": method.needs_public,
                "warm_start": method.warm_start and method.warm_start.model_dump(),
                "schedule": repr(spec.schedule_of(method)),
                "non_private": method.non_private,
                "model": own.model.use,
                "blocks": [[block.use, block.options] for block in own.features.blocks] if own.features else [],
            }
        )
    data, other = spec.data, spec.data.elsewhere
    return {
        "title": spec.title,
        "data": [data.source, data.validation, data.public, data.options],
        "elsewhere": other and [other.use, other.options],
        "privacy": spec.privacy.model_dump(exclude={"participations"}),  # of epochs, which old files do not have
        "tuning": spec.tuning and spec.tuning.model_dump(),
        "run": spec.run.model_dump(),
        "methods": methods,
    }


@pytest.mark.parametrize("name", TOLD)
def test_old_tables_are_those_of_the_same_trainings(name: str):
    path = FILES / f"{name}.toml"
    new = old_spelling.canonical(tomllib.loads(path.read_text()))
    assert json.loads(json.dumps(described(check_spec(new, path)))) == TOLD[name]
    assert old_spelling.canonical(new) == new


def test_an_argument_called_name_is_no_old_spelling():
    tables = {"data": {"use": "mine:rows", "name": "a"}, "model": {"use": "mine:net", "name": "b"}}
    assert old_spelling.canonical(tables) == tables
