"""One text for all: the statement as a file, as a page and on the terminal, the model card, and the report."""

import html
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import rounded_up, two_decimals_up
from privgrad.accounting.mechanisms import Release, Selection, Split
from privgrad.cli import app
from privgrad.data import by_user
from privgrad.federated import LocalUpdate
from privgrad.heads import fit_head
from privgrad.noise import Banded
from privgrad.statement import budget_statement, statement
from privgrad.statement.facts import doubts

pytest.importorskip("huggingface_hub")
pytest.importorskip("matplotlib")

from privgrad.statement.model_card import write_privacy
from privgrad_lab.report import figures
from privgrad_lab.report.page import write_report

pytestmark = [pytest.mark.usefixtures("by_rdp"), pytest.mark.filterwarnings("ignore")]
BANDED: dict[str, Any] = {"correlation": Banded(4), "sample_rate": 0.125, "expected_batch_size": 4, "steps": 16}
TRUNCATED: dict[str, Any] = {"sampling": "truncated", "max_batch_size": 12}
EPOCHS: dict[str, Any] = {"sampling": "epochs", "steps": 12}
SCALES = pg.Scales({"0.weight": torch.ones(4, 5)}, provenance="public data", source="a dictionary")

# What differs from a plan of 10 steps, of which 2 are made.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "complete": {"steps": 2},
    "large noise": {"noise_multiplier": 30.0},
    "little noise": {"noise_multiplier": 0.3},
    "no noise": {"noise_multiplier": 0.0},
    "full batch": {"sample_rate": 1.0, "expected_batch_size": 32},
    "a seed": {"seed": 3},
    "truncated": TRUNCATED,
    "truncated, complete": TRUNCATED | {"steps": 2},
    "a tight truncation": TRUNCATED | {"max_batch_size": 8},
    "epochs": EPOCHS,
    "epochs, a seed": EPOCHS | {"seed": 1},
    "banded": BANDED,
    "two bands": BANDED | {"correlation": Banded(2)},
    "banded, on a grid": BANDED | {"noise_on_grid": True},
    "on a grid": {"noise_on_grid": True},
    "a large delta": {"delta": 0.2},
    "a tiny delta": {"delta": 1e-12},
    "many rows": {"num_examples": 123_456, "sample_rate": 8 / 123_456},
    "another norm": {"max_grad_norm": 0.123456},
}
OF_EXAMPLES: dict[str, dict[str, Any]] = {
    "groups": {"group_size": 2},
    "a simulation": {"simulated": True},
    "declared data": {"options": {"precondition": pg.precondition.fixed(SCALES)}},
    "norm bins": {"options": {"norm_bins": 6}},
    "a norm that moves": {"options": {"adaptive_clip": pg.clip.TargetFraction()}},
    "a private norm that moves": {"options": {"adaptive_clip": pg.clip.Quantile(count_std=5.0)}},
    "more steps": {"steps": 2, "more_steps": 4},
    "two trainings": {"trainings": 2},
}
OF_USERS: dict[str, dict[str, Any]] = {"local training": {"options": {"perturb": LocalUpdate(0.1, batch_size=2)}}}
CASES = [
    *((unit, name) for unit in ("example", "user") for name in KINDS),
    *(("example", name) for name in OF_EXAMPLES),
    *(("user", name) for name in OF_USERS),
]

# Sentences that must be on every surface, or on none.
CAVEATS = (
    r"A seed produced the noise\.",
    r"The batches had a fixed size\.",
    r"The training simulates another one",
    r"their epsilon is infinite",
    r"This delta is above 1 / [\d,]+\.",
    r"Of [\d,]+ planned steps, [\d,]+ are released\. If results decided when to stop, the number here is no guarantee",
    r"Epsilon holds if [\w ,]+ fixed beforehand\.",
    r"If a later plan was chosen after a look at earlier results, no number here is a guarantee",
)
# What the statement and the report say, and the card in its table.
DETAILS = (
    r"declared to have [\d,]+ \w+(?:, or one less| or more)",
    r"The unit of protection is one \w+",
    r"Noise multiplier [\d.]+, clipping norm .+?, sampling rate [\d.e-]+, noise from [^.]+\.",
    r"each \w+ was in one of \d+ secret groups",
    r"Batches held at most \d+ \w+\.",
    r"Gradients of \d+ \w+ on average were clipped as one",
    r"Each gradient was released with .+?\)\.",
    r"as declared: [^.]+\.",
    r"e\^epsilon(?: = [\d.,]+)? times as likely",
    r"The last digits of released numbers",
    r"[\w ()]+: proof not reviewed independently\.",
)


def plain(page: str) -> str:
    """The words of a page or a text, with single spaces and without the dashes of lists."""
    body = re.sub(r"<style>.*?</style>|<head>.*?</head>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).replace("\n- ", "\n").split())


def short_facts(text: str) -> dict[str, Any]:
    found = re.search(r"epsilon = ([\d.]+) and delta = ([\d.e-]*\d)", text)
    said: dict[str, Any] = {one: sorted(set(re.findall(one, text))) for one in CAVEATS}
    said["protected"] = "are protected by differential privacy with" in text
    said["would be"] = "would satisfy differential privacy with" in text
    return said | {"size": found and found.groups()}


def long_facts(text: str) -> dict[str, Any]:
    return short_facts(text) | {one: sorted(set(re.findall(one, text))) for one in DETAILS}


def trained(folder: Path, *, trainings: int, more_steps: int, options: dict[str, Any], plan: pg.PrivacyPlan) -> Any:
    """The last PrivateGradient of a model, and the files of all ledgers."""
    model, paths, data = make_model(), list[Path](), make_data()
    if isinstance(options.get("perturb"), LocalUpdate):
        data = by_user(data.tensors, range(len(data)), cap=2)
    for number in range(trainings):
        paths.append(folder / f"{number}.jsonl")
        for planned in (plan, *((replace(plan, steps=more_steps),) if more_steps else ())):
            private_grad = pg.PrivateGradient(model, loss_fn, planned, ledger=paths[-1], **options)
            made = private_grad.ledger.next_step
            for batch in list(planned.batches(data, start=made))[:2]:
                private_grad(batch)
            private_grad.ledger.close()
    return private_grad, paths  # pyright: ignore[reportPossiblyUnboundVariable]


def report_of(folder: Path, plan: pg.PrivacyPlan, ledgers: Sequence[pg.Ledger]) -> str:
    """The report of trainings, of which records and metadata are as the runner writes them."""
    facts = ledgers[0].plan_facts
    costs = [one.epsilon(delta=plan.delta or 1.0) for one in ledgers]
    records = [
        {"method": f"A{number}", "phase": "final", "lr": 0.1, "epsilon": cost, "delta": plan.delta, "seed": plan.seed}
        | {"sampling": plan.sampling, "test_accuracy": 0.5, "side_information": facts["side_information"]}
        | {"simulates_epsilon": None if plan.simulates is None else 2.0}
        for number, cost in enumerate(costs)
    ]
    numbers = {name: value for name, value in asdict(plan).items() if name != "correlation"}
    numbers |= {"bands": str(plan.bands), "sample_rate": plan.group_rate, "noise_generator": facts["noise_generator"]}
    numbers |= {"epoch_steps": plan.release.epoch_steps}
    numbers |= {name: facts[name] for name in ("norm_statistic",) if facts[name]}
    if moved := facts["adaptive_clip"]:
        numbers["max_grad_norm"] = f"{plan.max_grad_norm:g}, moved by {moved}"
    metadata: dict[str, Any] = {"plan": numbers, "doubts": doubts(ledgers)}
    if ledgers[1:]:
        whole = statement(ledgers).numbers["epsilon"]
        metadata["total_epsilon"] = {"value": whole, "runs": len(ledgers), "covered": True}
    return plain(write_report(records, metadata, folder).read_text())


@pytest.mark.parametrize(("unit", "name"), CASES, ids=[f"{name}, {unit}" for unit, name in CASES])
def test_all_surfaces_show_the_same_facts(
    unit: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "png", lambda _: bytes(24))
    changed: dict[str, Any] = {"delta": 1e-3, "privacy_unit": unit} | (KINDS | OF_EXAMPLES | OF_USERS)[name]
    of_unit = {"perturb": pg.perturb.SampleGradient("user")} if unit == "user" else {}
    options, more_steps = changed.pop("options", of_unit), changed.pop("more_steps", 0)
    trainings, is_simulation = changed.pop("trainings", 1), changed.pop("simulated", False)
    plan = make_plan(**changed)
    plan = plan.scaled(1 / 2) if is_simulation else plan
    private_grad, paths = trained(tmp_path, trainings=trainings, more_steps=more_steps, options=options, plan=plan)
    ledgers = [pg.Ledger(path, read_only=True) for path in paths]

    said = statement(ledgers)
    shown = CliRunner().invoke(app, ["statement", *map(str, paths)], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    (tmp_path / "card").mkdir()
    write_privacy(tmp_path / "card", private_grad, "SGD", {"learning_rate": 0.1}, 2)
    card = (tmp_path / "card" / "README.md").read_text()
    text, page, terminal = plain(f"{said}"), plain(said.to_html()), plain(shown.stdout)
    noted = plain(CliRunner().invoke(app, ["epsilon", *map(str, paths)]).stderr.replace("note: ", ""))

    assert long_facts(page) == long_facts(terminal) == long_facts(text)
    assert short_facts(plain(card)) == short_facts(text)
    assert long_facts(plain((tmp_path / "card" / "statement.txt").read_text())) == long_facts(text)
    for caveat in CAVEATS:
        assert sorted(set(re.findall(caveat, noted))) == short_facts(text)[caveat]

    report = report_of(tmp_path / "report", plan, ledgers)
    assert long_facts(report) == long_facts(text)
    assert trainings == 1 or f"together they cost ε = {two_decimals_up(said.numbers['epsilon'])}" in report

    told = statement(ledgers, appendix="nist")
    assert told.sections[:-1] == said.sections
    for sentence in (one for part in told.sections for one in part.sentences):
        assert sentence.endswith(".")
        assert not re.search(r"\bNone\b|\bnan\b|  |[{}]|\.\.", sentence), sentence

    # The numbers are those of the plan and the accountant.
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
    epsilon = said.numbers["epsilon"]
    assert rows["unit"] == unit
    assert ("epsilon" in rows) == (short_facts(text)["protected"])
    assert rows.get("epsilon", rounded_up(epsilon, 4)) == rounded_up(epsilon, 4)
    size = short_facts(text)["size"]
    assert (size is None) == (epsilon == float("inf"))
    assert size is None or (size[0], float(size[1])) == (rounded_up(epsilon, 4), plan.delta)
    assert f"declared to have {plan.num_examples:,} {'people' if unit == 'user' else 'rows'}" in text
    assert is_simulation or f"Noise multiplier {plan.noise_multiplier:.4g}, clipping norm" in text
    assert ("one row was added" if unit == "user" else "one person was added") not in text


RUN = Release(9.0, 0.25, count=5)
BUDGETS: dict[str, list[list[Any]]] = {
    "nothing": [],
    "one training": [[RUN]],
    "two trainings": [[RUN], [Release(12.0, 0.25, count=5)]],
    "trainings that are compared": [[RUN, RUN]],
    "a random number of runs": [[Selection((RUN,), 2.0, 1.0)]],
    "two groups": [[Split(((RUN,), (Release(30.0, 1.0),)))]],
    "little noise": [[Release(0.4, 0.25, count=5)]],
}
OF_BUDGETS = (
    r"The data set has a budget: epsilon = [\d.]+ for everything together\.",
    r"Nothing is committed yet\.",
    r"Its only commitment costs epsilon = [\d.]+\.",
    r"Its \d+ commitments cost epsilon = [\d.]+ together\.",
    r"Quote epsilon = [\d.]+, the budget\.",
    r"Quote this number\.",
    r"because a number of runs is random",
    r"So held-out \w+ have the same protection",
    r"Alone it costs epsilon = [\d.]+\.",
)


def budget_words(text: str) -> dict[str, Any]:
    return long_facts(text) | {one: sorted(set(re.findall(one, text))) for one in OF_BUDGETS}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_all_surfaces_of_a_budget_show_the_same_facts(unit: Any, name: str, tmp_path: Path) -> None:
    path, total = tmp_path / "budget.jsonl", 50.0
    budget = pg.Budget(path, total_epsilon=total, delta=1e-3, num_examples=32, privacy_unit=unit)
    for number, releases in enumerate(BUDGETS[name]):
        budget.commit(f"commitment {number}", releases, by="Ann")
    said = budget_statement(budget)
    text, spent = plain(f"{said}"), budget.spent()
    shown = CliRunner().invoke(app, ["statement", str(path)], env={"COLUMNS": "80"})
    table = CliRunner().invoke(app, ["budget", str(path)], env={"COLUMNS": "80"})
    assert budget_words(plain(said.to_html())) == budget_words(plain(shown.stdout)) == budget_words(text)
    if BUDGETS[name]:
        pg.save(make_model(), tmp_path / "saved", ledger=path)
        assert budget_words(plain((tmp_path / "saved" / "statement.txt").read_text())) == budget_words(text)
    assert f"spent: epsilon {rounded_up(spent, 4)} of 50" in table.stdout
    assert said.numbers["spent"] == spent
    # Several commitments may have followed from results: the cap is the guarantee then.
    assert said.numbers["epsilon"] == (total if len(BUDGETS[name]) > 1 else spent)


@pytest.mark.parametrize("unit", ["example", "user"])
def test_all_surfaces_of_a_head_show_the_same_facts(unit: Any, tmp_path: Path) -> None:
    features, labels = make_data().tensors
    numbers: dict[str, Any] = {"target_epsilon": 3.0, "delta": 1e-3, "num_examples": 32, "privacy_unit": unit}
    head = fit_head(features, labels, num_classes=3, source="public", output_dir=tmp_path / "run", **numbers)
    head.save(tmp_path / "head")
    path = tmp_path / "run" / "ledger.jsonl"
    text = plain(f"{statement([pg.Ledger(path, read_only=True)])}")
    shown = CliRunner().invoke(app, ["statement", str(path)], env={"COLUMNS": "80"})
    saved = plain((tmp_path / "head" / "statement.txt").read_text())
    assert long_facts(saved) == long_facts(plain(shown.stdout)) == long_facts(text)
    assert long_facts(text)["size"][0] == rounded_up(head.privacy["epsilon"], 4)
    assert head.privacy["privacy_unit"] == unit


def test_there_are_forty_plans() -> None:
    assert len(CASES) >= 40
