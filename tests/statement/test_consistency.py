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
from privgrad.cli import app
from privgrad.noise import Banded
from privgrad.statement import statement
from privgrad.statement.facts import doubts

pytest.importorskip("huggingface_hub")
pytest.importorskip("matplotlib")

from privgrad.statement.model_card import write_privacy
from privgrad_lab.report import figures
from privgrad_lab.report.page import write_report

pytestmark = [pytest.mark.usefixtures("by_rdp"), pytest.mark.filterwarnings("ignore")]
BANDED: dict[str, Any] = {"correlation": Banded(4), "sample_rate": 0.125, "expected_batch_size": 4, "steps": 16}
TRUNCATED: dict[str, Any] = {"sampling": "truncated", "max_batch_size": 12}
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
    "fixed": {"sampling": "fixed"},
    "fixed, a seed": {"sampling": "fixed", "seed": 1},
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
CASES = [(unit, name) for unit in ("example", "user") for name in KINDS] + [("example", name) for name in OF_EXAMPLES]

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
    model, paths = make_model(), list[Path]()
    for number in range(trainings):
        paths.append(folder / f"{number}.jsonl")
        for planned in (plan, *((replace(plan, steps=more_steps),) if more_steps else ())):
            private_grad = pg.PrivateGradient(model, loss_fn, planned, ledger=paths[-1], **options)
            made = private_grad.ledger.next_step
            for batch in list(planned.batches(make_data(), start=made))[:2]:
                private_grad(batch)
            private_grad.ledger.close()
    return private_grad, paths  # pyright: ignore[reportPossiblyUnboundVariable]


def report_of(folder: Path, plan: pg.PrivacyPlan, ledgers: Sequence[pg.Ledger]) -> str:
    """The report of trainings, of which records and metadata are as the runner writes them."""
    facts = ledgers[0].plan_facts
    costs = [one.epsilon(delta=plan.delta or 1.0, assume_poisson=True) for one in ledgers]
    records = [
        {"method": f"A{number}", "phase": "final", "lr": 0.1, "epsilon": cost, "delta": plan.delta, "seed": plan.seed}
        | {"sampling": plan.sampling, "test_accuracy": 0.5, "side_information": facts["side_information"]}
        | {"simulates_epsilon": None if plan.simulates is None else 2.0}
        for number, cost in enumerate(costs)
    ]
    numbers = {name: value for name, value in asdict(plan).items() if name != "correlation"}
    numbers |= {"bands": str(plan.bands), "sample_rate": plan.group_rate, "noise_generator": facts["noise_generator"]}
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
    changed: dict[str, Any] = {"delta": 1e-3, "privacy_unit": unit} | (KINDS | OF_EXAMPLES)[name]
    options, more_steps = changed.pop("options", {}), changed.pop("more_steps", 0)
    if unit == "user":
        options = {"perturb": pg.perturb.SampleGradient("user")}
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

    for sentence in (one for part in said.sections for one in part.sentences):
        assert sentence.endswith(".")
        assert not re.search(r"\bNone\b|\bnan\b|  |[{}]|\.\.", sentence), sentence

    # The numbers are those of the plan and the accountant.
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
    epsilon, word = said.numbers["epsilon"], "person" if unit == "user" else "row"
    assert rows["unit of protection"] == f"one {word}"
    assert ("epsilon" in rows) == (short_facts(text)["protected"])
    assert rows.get("epsilon", rounded_up(epsilon, 4)) == rounded_up(epsilon, 4)
    size = short_facts(text)["size"]
    assert (size is None) == (epsilon == float("inf"))
    assert size is None or (size[0], float(size[1])) == (rounded_up(epsilon, 4), plan.delta)
    assert f"declared to have {plan.num_examples:,} {'people' if unit == 'user' else 'rows'}" in text
    assert is_simulation or f"Noise multiplier {plan.noise_multiplier:.4g}, clipping norm" in text
    assert ("one row was added" if unit == "user" else "one person was added") not in text


def test_there_are_forty_plans() -> None:
    assert len(CASES) >= 40
