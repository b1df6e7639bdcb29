"""Experiments as they were spelled before tables were calls: refused, rewritten, and then the same trainings."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import privgrad as pg
from privgrad_lab import old_spelling
from privgrad_lab.load_spec import check_spec, load_spec
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
        "run": spec.run.model_dump(exclude={"autocast"}),  # which old files do not have
        "methods": methods,
    }


@pytest.mark.parametrize("name", TOLD)
def test_an_old_file_is_refused_and_rewritten_to_the_same_trainings(name: str):
    path = FILES / f"{name}.toml"
    with pytest.raises(pg.PrivacyError, match=r"to have .*use = .*; print the new file by `privgrad doctor .*rewrite`"):
        load_spec(path)
    new = old_spelling.rewritten(path.read_text())
    assert json.loads(json.dumps(described(check_spec(tomllib.loads(new), path)))) == TOLD[name]
    assert old_spelling.rewritten(new) == new


def test_comments_and_what_was_new_already_are_kept():
    old, new = ((FILES / f"every_key{end}.toml").read_text() for end in ("", "_new"))
    assert old_spelling.rewritten(old) == new
    assert new.count("#") == old.count("#")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('data = { name = "digits" }', 'data to have use = "digits", got name = "digits"'),
        ('model = { name = "resnet9", hidden = 8 }', 'model to have use = "resnet9", width = 8, got name = "resnet9"'),
        (
            '[[methods]]\nname = "first"\noptimizer = "SGD"\nlr = 0.1\noptions = { momentum = 0.9 }',
            r'methods.first to have optimizer = { use = "SGD", lr = 0.1, momentum = 0.9 }, got ',
        ),
        (
            '[[methods]]\nname = "first"\nfilter = { rule = "EMA", options = { weight = 0.3 } }',
            r'methods.first to have .*filter = { use = "EMA", weight = 0.3 }, got filter = { rule = "EMA"',
        ),
        ('features = { blocks = [{ name = "hog" }] }', r'features to have blocks = \["hog"\], got blocks = \[{ name'),
    ],
)
def test_the_error_has_the_new_spelling(table: str, message: str):
    with pytest.raises(pg.PrivacyError, match=message):
        check_spec(tomllib.loads(table), "old.toml")


def test_an_argument_called_name_is_no_old_spelling():
    old_spelling.refuse(
        {"data": {"use": "mine:rows", "name": "a"}, "model": {"use": "mine:net", "name": "b"}}, "a.toml"
    )
