"""Heads and features in TOML files: defaults, refusals, a network beside a head, persons, texts, and the recipes."""

import csv
import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg
from pages import ROOT
from privgrad import data
from privgrad.accounting.calibration import cache
from privgrad.heads.head import Target
from privgrad_lab import paid_runner, runner
from privgrad_lab.load_spec import check_spec, load_spec
from privgrad_lab.metrics import losses_for

pytest.importorskip("sklearn")
RECIPES = ROOT / "examples" / "recipes"
DIGITS: dict[str, Any] = {
    "title": "digits",
    "data": {"use": "digits", "standardize": False, "validation": 237},
    "features": {"blocks": [{"use": "hog", "places": [4], "orientations": 8}], "whiten": "silhouettes", "keep": 64},
    "model": {"use": "head"},
    "privacy": {"target_epsilon": 3.0, "delta": 1e-5, "num_examples": 1200},
    "run": {"num_evaluations": 1},
}


def changed(**tables: Any) -> dict[str, Any]:
    """The tables of DIGITS with other keys; a table that is None is left out."""
    merged = {name: DIGITS.get(name) for name in (*DIGITS, *tables)}
    for name, table in tables.items():
        own = DIGITS.get(name)
        merged[name] = own | table if isinstance(own, dict) and isinstance(table, dict) else table
    return {name: table for name, table in merged.items() if table is not None}


def test_defaults_are_those_of_fit_head_and_none_decides_privacy():
    spec = check_spec(DIGITS, "digits.toml")
    assert (spec.privacy.steps, spec.privacy.max_grad_norm, spec.privacy.expected_batch_size) == (300, 0.1, 1200)
    (method,) = spec.methods
    assert (method.noise_step, method.schedule and method.schedule.decay) == (0.15, "cosine")
    assert check_spec(changed(privacy={"steps": 7}), "digits.toml").privacy.steps == 7
    for schedule, step, decay in (
        ("constant", 0.06, "constant"),
        ({"warmup": 0.1}, 0.06, "constant"),
        ({}, 0.06, "constant"),
        ("linear", 0.15, "linear"),
    ):
        spec = check_spec(changed(run={"schedule": schedule}), "digits.toml")
        (method,) = spec.methods
        made = spec.schedule_of(method)
        assert (method.noise_step, made and made.decay) == (step, decay)
    with pytest.raises(pg.PrivacyError, match=r"run.schedule.* to be one of constant, linear, cosine, got 'fast'"):
        check_spec(changed(run={"schedule": "fast"}), "digits.toml")
    for name in ("delta", "num_examples", "target_epsilon"):
        own = {key: value for key, value in DIGITS["privacy"].items() if key != name}
        with pytest.raises(pg.PrivacyError, match=name):
            check_spec(DIGITS | {"privacy": own}, "digits.toml").plan(None)


def test_pixels_that_do_not_suit_features_are_refused_before_they_are_loaded():
    for table in ({"use": "digits"}, {"use": "fashion-mnist", "standardize": True}):
        with pytest.raises(pg.PrivacyError, match=r"data.standardize to be false for the block 'hog'"):
            check_spec(DIGITS | {"data": table}, "digits.toml")


@pytest.mark.slow
def test_train_prints_metric_and_epsilon_and_saves_a_head_for_raw_images(tmp_path: Path):
    command = [sys.executable, "-m", "privgrad", "train", str(RECIPES / "digits.toml"), "--json", "--out", "out"]

    def trained() -> str:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    answer = json.loads(trained().splitlines()[-1])
    assert answer["accuracy"] > 0.95  # 0.973 to 0.983
    assert answer["epsilon"] <= 3.0
    head = pg.Head.load(tmp_path / answer["head"])
    images, truth = data.digits(standardize=False).test.tensors
    assert (head.predict(images) == truth).double().mean() == pytest.approx(answer["accuracy"], abs=0.003)
    assert head.image_shape == (1, 8, 8)
    (tmp_path / answer["head"] / "head.json").unlink()  # as if the process had ended while it wrote the folder
    (tmp_path / "out" / "runs.jsonl").unlink()
    assert json.loads(trained().splitlines()[-1])["accuracy"] == answer["accuracy"]
    assert torch.equal(pg.Head.load(tmp_path / answer["head"]).predict(images), head.predict(images))
    ledger = pg.Ledger(next((tmp_path / "out").rglob("ledger.jsonl")), read_only=True)
    assert "6,000 synthetic silhouettes (seed 0)" in ledger.plan_facts["side_information"]
    assert head.privacy["side_information"] == ledger.plan_facts["side_information"]
    assert head.epsilon == answer["epsilon"]


def test_a_misspelled_head_is_named_before_what_other_models_need():
    with pytest.raises(pg.PrivacyError, match=r"model.use .* got 'hed'; did you mean 'head'"):
        check_spec(DIGITS | {"model": {"use": "hed"}}, "digits.toml")


def test_a_head_and_a_network_side_by_side(tmp_path: Path):
    network = {"use": "mlp", "hidden": 16}
    methods = [
        {"name": "head", "optimizer": {"use": "SGD", "noise_step": 0.15}},
        {"name": "on pixels", "optimizer": {"use": "SGD", "noise_step": 0.02}, "model": network, "features": False},
        {"name": "on features", "optimizer": {"use": "SGD", "noise_step": 0.02}, "model": network},
    ]
    spec = check_spec(changed(methods=methods, privacy={"steps": 3}), "digits.toml")
    records = {record["method"]: record for record in runner.compare(spec, tmp_path, progress=False)}
    sources = [records[method["name"]]["side_information"] is not None for method in methods]
    assert sources == [True, False, True]
    weights = {
        name: torch.load(path / "checkpoint.pt", weights_only=True)["model"]
        for name in records
        for path in (tmp_path / "runs").glob(f"{name}-*")
    }
    assert weights["head"]["linear.weight"].shape == (10, 64)
    assert weights["on pixels"]["1.weight"].shape == (16, 64)
    assert weights["on features"]["1.weight"].dtype == torch.float32
    assert [record.get("head") is not None for record in records.values()] == [True, False, False]


def test_a_private_comparison_saves_the_head_that_it_chose(tmp_path: Path):
    tables = changed(tuning={"way": "trials", "noise_steps": [0.1, 0.2]})  # the method has a default
    tables["data"] = {"use": "digits", "standardize": False}  # whose training people are scored
    tables["privacy"] = {"total_epsilon": 3.0, "delta": 1e-5, "num_examples": 1437, "steps": 20}
    record = paid_runner.compare(check_spec(tables, "digits.toml"), tmp_path, progress=False)[-1]
    head = pg.Head.load(record["head"])
    assert head.epsilon == record["epsilon"] <= 3.0
    assert (head.privacy["budget"], head.privacy["total_epsilon"]) == ("budget.jsonl", 3.0)
    assert (head.privacy["privacy_unit"], head.privacy["num_examples"]) == ("example", 1437)
    images, truth = data.digits(standardize=False).test.tensors
    assert (head.predict(images) == truth).double().mean() == pytest.approx(record["test_accuracy"], abs=0.003)


def test_stored_features_are_read_again_and_a_changed_table_has_its_own(tmp_path: Path):
    path = tmp_path / "digits.toml"
    path.write_text("")
    for keep in (64, 32, 64):
        tables = changed(features={"folder": "features", "keep": keep}, privacy={"steps": 2})
        runner.train(check_spec(tables, path), tmp_path / f"out-{keep}", progress=False)
    assert len(list((tmp_path / "features").iterdir())) == 2
    assert {part.name for part in (tmp_path / "features").glob("*/*")} == {"train", "validation", "test"}


def no_extractor() -> str:
    return "features"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"blocks": ["hogs"]}, "did you mean 'hog'"),
        ({"blocks": [{"use": "hog", "place": [4]}]}, "did you mean 'places'"),
        ({"blocks": [{"use": "patches", "public": 3}]}, "'features.blocks.patches.public'"),
        ({"blocks": ["nowhere:at_all"]}, "to name a module"),
        ({"weights": [1.0, 0.5]}, "features.weights to be 1 numbers"),
        ({"whiten": None, "blocks": ["patches"]}, "features.public to be given for the block 'patches'"),
        ({"whiten": "data"}, "features.public to have public rows in the data"),
        ({"blocks": [f"{__name__}:no_extractor"]}, "to return an Extractor, got a str"),
        ({"blocks": ["frozen-text"]}, "encoder"),
    ],
)
def test_refused(tmp_path: Path, features: dict[str, Any], message: str):
    table = {key: value for key, value in (DIGITS["features"] | features).items() if value is not None}
    with pytest.raises(pg.PrivacyError, match=message):
        runner.train(check_spec(DIGITS | {"features": table}, "digits.toml"), tmp_path, progress=False)
    assert not (tmp_path / "spec.json").exists()


def test_views_of_features_and_unknown_models_of_a_method_are_refused():
    with pytest.raises(pg.PrivacyError, match="augmentation_multiplicity to be 1 with features"):
        check_spec(changed(run={"augmentation_multiplicity": 2}), "digits.toml")
    methods = [{"name": "net", "optimizer": {"use": "SGD", "noise_step": 0.1}, "model": {"use": "mpl"}}]
    with pytest.raises(pg.PrivacyError, match=r"methods\.net\.model\.use .* did you mean 'mlp'"):
        check_spec(changed(methods=methods), "digits.toml")


def test_the_loss_of_a_head_is_that_of_other_models_in_experiments():
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    tags = (torch.arange(40).view(8, 5) % 3 == 0).float()
    kinds: Any = ((torch.arange(8) % 5, "class"), (tags, "tags"))
    for labels, kind in kinds:
        examples = torch.utils.data.TensorDataset(logits, labels)
        task = data.DataSet("", examples, examples, examples, num_classes=5, input_shape=(5,))
        model = torch.nn.Linear(5, 5)
        expected = losses_for(task)(model, (logits, labels))
        assert torch.allclose(Target(kind, 5).losses(model, (logits, labels)), expected)


def test_patients_with_visits_are_protected_together(tmp_path: Path):
    visits: Any = runpy.run_path(str(RECIPES / "visits.py"))
    visits["main"](str(tmp_path / "visits.csv"), patients=600)
    tables = tomllib.loads((RECIPES / "patients_with_visits.toml").read_text())
    tables["privacy"] |= {"num_examples": 400, "delta": 1e-3, "steps": 60}
    (record,) = runner.train(check_spec(tables, tmp_path / "recipe.toml"), tmp_path / "out", progress=False)
    assert record["metrics"]["auc"] > 0.65  # 0.70 to 0.76
    assert pg.Head.load(record["head"]).privacy["privacy_unit"] == "user"


def test_texts_with_the_words_of_public_texts(tmp_path: Path):
    for name, words, labels in (
        ("mail.csv", ("win money now", "see you at lunch"), ("spam", "mail")),
        ("public.csv", ("win lunch", "money see"), ("help pages", "help pages")),
    ):
        with (tmp_path / name).open("w", newline="") as file:
            rows = [[f"{words[k % 2]} {k} {name}", labels[k % 2]] for k in range(200)]
            csv.writer(file).writerows([["text", "kind"], *rows])
    columns = {"text": {"kind": "text", "length": 64}}
    table: dict[str, Any] = {"unit": "row", "label": "kind", "classes": ["spam", "mail"], "columns": columns}
    public = table | {"file": "public.csv", "classes": ["help pages", "articles"]}
    tables = changed(
        data=None,
        features={"blocks": ["tf-idf"], "whiten": None, "public": "data"},
        privacy={"num_examples": 120, "delta": 1e-3, "steps": 30},
    )
    del tables["features"]["whiten"]
    tables["data"] = table | {"file": "mail.csv", "test_share": 0.25, "elsewhere": public}
    (record,) = runner.train(check_spec(tables, tmp_path / "mail.toml"), tmp_path / "out", progress=False)
    assert record["test_accuracy"] > 0.9
    head = pg.Head.load(record["head"])
    assert head.predict(["see you at lunch", "win money now"]).tolist() == [1, 0]
    assert head.classes == ["spam", "mail"]


def test_every_recipe_is_valid_and_in_the_documents():
    told = (ROOT / "docs" / "recipes.md").read_text()
    for path in sorted(RECIPES.glob("*.toml")):
        if "encoder" not in path.stem:  # whose function is found from its own folder
            load_spec(path)
        assert f"recipes/{path.name}" in told, path.name


def test_the_twin_of_adult(capsys: pytest.CaptureFixture[str]):
    if not cache("adult").is_dir():
        pytest.skip("needs PyPI's wheel xai in the cache, see .ci/run")
    main: Any = runpy.run_path(str(RECIPES / "adult.py"))["main"]
    assert main().epsilon <= 1.0
    words = capsys.readouterr().out.split()
    assert float(words[1].rstrip(",")) > 0.86
    assert float(words[3]) > 0.91


@pytest.mark.slow
def test_the_twin_of_clothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    try:
        data.fashion_mnist()
    except pg.PrivacyError as error:
        pytest.skip(str(error))
    main: Any = runpy.run_path(str(RECIPES / "clothing.py"))["main"]
    assert main(str(tmp_path), examples=4000).epsilon <= 3.0
    assert float(capsys.readouterr().out.split()[1]) > 0.75


@pytest.mark.parametrize("name", ["clothing.py", "adult.py"])
def test_twins_are_short(name: str):
    assert (RECIPES / name).read_text().count("\n") <= 60
