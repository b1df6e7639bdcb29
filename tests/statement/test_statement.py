"""The statement on ledgers: its sentences say what the ledgers hold, and its numbers are those of the accountant."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm
from typer.testing import CliRunner

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import Release, attack_success, rounded_up
from privgrad.accounting.mechanisms import Selection
from privgrad.cli import app
from privgrad.heads import fit_head
from privgrad.noise import Banded
from privgrad.statement import About, budget_statement, statement
from privgrad.statement.registry import registry_record


def trained(steps: int = 2, path: Path | None = None, **changed: Any) -> pg.Ledger:
    """The ledger of a short training."""
    planned = {"steps": 12} if changed.get("sampling") == "epochs" else {}
    plan = make_plan(**({"delta": 1e-3} | planned | changed))
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
    for batch in plan.batches(make_data()):
        if private_grad.ledger.releases < steps:
            private_grad(batch)
    private_grad.ledger.close()
    return private_grad.ledger


def test_the_statement_says_what_must_not_follow_from_results():
    model, ledger = make_model(), pg.Ledger()

    def train(steps: int) -> str:
        plan = make_plan(steps=steps, delta=1e-3)
        private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
        for batch in plan.batches(make_data(), start=ledger.next_step):
            private_grad(batch)
        return str(statement([ledger]))

    doubt = "no number here is a guarantee"
    assert doubt not in train(3)
    assert ledger.planned_steps == (3,)
    assert "if the number of steps, which changed, was fixed beforehand" in train(5)
    assert ledger.planned_steps == (3, 5)
    stopped = str(statement([trained(2)]))
    assert "Of 10 planned steps, 2 are released. If results decided when to stop, the number here is no" in stopped
    assert "no guarantee; that of all planned steps is." in stopped
    assert "that of all planned steps is" not in str(statement([trained(2, seed=1)]))
    both = str(statement([ledger, trained(10)]))
    assert "Epsilon holds if the plans of all these trainings and releases were fixed beforehand" in both


def test_the_statement_quotes_the_accountant():
    ledger = trained()
    found = statement([ledger])
    assert found.numbers["epsilon"] == ledger.epsilon(delta=1e-3)
    assert found.numbers["epsilon_rdp"] == ledger.epsilon(delta=1e-3, accountant="rdp")
    text = str(found)
    assert f"epsilon = {rounded_up(found.numbers['epsilon'], 4)} and delta = 0.001" in text
    assert f"Quote epsilon = {rounded_up(found.numbers['epsilon'], 4)}" in text
    assert "2 noisy gradients" in text
    assert "declared to have 32 rows or more" in text
    assert "A person with several rows is protected less" in text
    assert "would satisfy" not in text
    assert statement([ledger], delta=1e-6).numbers["epsilon"] > found.numbers["epsilon"]
    both = statement([ledger, trained()])
    assert both.numbers["releases"] == 4
    assert both.numbers["epsilon"] > found.numbers["epsilon"]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.1])
def test_the_attack_bound_is_that_of_the_best_attack_on_one_gaussian(sigma: float, alpha: float):
    best = float(norm.cdf(norm.ppf(alpha) + 1 / sigma))
    found = attack_success([Release(sigma, 1.0)], false_positive_rate=alpha)
    assert best <= found <= best * 1.01 + 0.001


def test_the_attack_bound_grows_with_the_releases_and_ends_at_its_limits():
    found = [attack_success([Release(1.0, 0.1, count=n)], false_positive_rate=0.01) for n in (0, 1, 10, 100, 10_000)]
    assert found == sorted(found)
    assert found[0] == 0.01
    assert found[-1] <= 1.0
    assert attack_success([Release(0.0, 0.1)], false_positive_rate=0.01) == 1.0
    assert attack_success([Release(1.0, 0.1, "fixed")], false_positive_rate=0.01) == 1.0
    with pytest.raises(pg.PrivacyError):
        attack_success([Release(1.0, 0.1)], false_positive_rate=0.0)


@pytest.mark.filterwarnings("ignore:sampling")
def test_a_delta_that_allows_to_publish_a_row_is_named():
    ledger, words = trained(), "This delta is above 1 / 32."
    assert words not in str(statement([ledger]))
    assert words in str(statement([ledger], delta=0.04))


def test_what_weakens_the_protection_is_said_first():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "would satisfy differential privacy .* A seed produced the noise"),
        ({"noise_multiplier": 0.0}, "These releases protect nobody: their epsilon is infinite"),
    ]
    for changed, said in cases:
        first, _, rest = str(statement([trained(**changed)])).partition("People and data")
        assert "Quote epsilon" not in rest
        assert ("The following would hold without the exceptions above." in rest) == ("would" in said)
        assert re.search(said, " ".join(first.split()).replace(" - ", " ")), first
        assert "are protected by" not in first
    shuffled = pg.Ledger()
    shuffled.bind(make_plan(delta=1e-3).public_facts | {"sampling": "fixed"})
    shuffled.charge(Release(1.0, 0.25, "fixed"), draw="a loader:0", limit=10)
    said = str(statement([shuffled]))
    assert "their epsilon is infinite" in said.replace("\n", " ")
    assert "The batches had a fixed size. No computation here covers such batches." in said.replace("\n", " ")
    simulated = pg.PrivateGradient(make_model(), loss_fn, make_plan(delta=1e-3).scaled(1 / 2)).ledger
    assert "simulates another one" in str(statement([simulated]))


def test_epochs_are_described_with_the_proof_that_they_rest_on():
    said = " ".join(str(statement([trained(sampling="epochs")])).split())
    assert "Each row was in 1 of the 4 steps of each epoch, drawn for it alone." in said
    assert "An epoch that was begun counts as a whole one. 1 epoch was begun." in said
    assert "The other bound (RDP) does not cover epochs." in said
    assert "Epochs (random allocation): proof not reviewed independently. Epsilon rests on it." in said
    assert "Poisson sampling" not in said


def test_steps_that_results_left_out_are_told_apart_from_releases():
    for sampling, steps in (("epochs", 12), ("poisson", 10)):
        private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan(sampling=sampling, steps=steps, delta=1e-3))
        stop = pg.EarlyStopping(monitor="loss", mode="min", patience=1, data="public")
        optimizer = pg.optim.SGD(private_grad.model.named_parameters(), lr=0.1)
        options: dict[str, Any] = {"evaluate": lambda _: {"loss": 1.0}, "num_evaluations": steps}
        pg.fit(private_grad, optimizer, make_data(), stop=stop, progress=False, **options)
        said = " ".join(str(statement([private_grad.ledger])).split())
        left = steps - 4 if sampling == "epochs" else steps - 2
        assert f"released {private_grad.ledger.releases - left} noisy gradients" in said
        assert f"The {left} steps that were left are charged, without a release." in said
        assert "is no guarantee" not in said


def test_a_budget_with_epochs_is_marked(tmp_path: Path):
    own: dict[str, Any] = {"total_epsilon": 50.0, "delta": 1e-3, "num_examples": 40, "privacy_unit": "example"}
    budget = pg.Budget(tmp_path / "budget.jsonl", **own)
    budget.commit("a training", [Release(1.0, 0.25, "epochs", count=8, epoch_steps=4)])
    assert "Epochs (random allocation): proof not reviewed independently." in str(budget_statement(budget))


def of_fit(optimizer: type[pg.optim.PrivateOptimizer], path: Path | None = None, **parts: Any) -> pg.Ledger:
    """The ledger of a training by `fit`."""
    plan = make_plan(delta=1e-3, steps=2)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path, **parts)
    pg.fit(private_grad, optimizer(private_grad.model.named_parameters(), lr=0.1), make_data(), progress=False)
    private_grad.ledger.close()
    return private_grad.ledger


def test_methods_whose_proof_nobody_reviewed_are_marked(tmp_path: Path):
    mark = "proof not reviewed independently"
    assert mark not in str(statement([of_fit(pg.optim.SGD)]))
    micro_adam = of_fit(pg.optim.MicroAdam, tmp_path / "ledger.jsonl")
    halves: dict[str, Any] = {"perturb": pg.perturb.DiSK(0.5), "filter": pg.filters.EMA(0.5)}
    for name, ledger in {
        "MicroAdam": pg.Ledger(tmp_path / "ledger.jsonl", read_only=True),
        "Muon": of_fit(pg.optim.Muon),
        "MuonBC": of_fit(pg.optim.MuonBC),
        "DiSK": of_fit(pg.optim.SGD, **halves),
    }.items():
        text = str(statement([ledger]))
        assert f"- {name}: {mark}. Epsilon does not rest on it: the method uses released gradients only." in text
        assert text.count(mark) == 1
    assert micro_adam.optimizers == ("MicroAdam",)
    memory: dict[str, Any] = {"correlation": Banded(4), "sample_rate": 0.125, "expected_batch_size": 4, "steps": 16}
    assert f"Noise with memory: {mark}. Epsilon rests on it." in str(statement([trained(**memory)]))


def test_the_page_has_the_trade_off_curve(tmp_path: Path):
    ledger = trained()
    said = statement([ledger])
    rates = dict(said.numbers["trade_off"])
    assert rates[0.01] == said.numbers["attack_success"]
    assert all(rate <= found <= 1 for rate, found in rates.items())
    assert list(rates.values()) == sorted(rates.values())
    page = said.to_html()
    assert page.count("<polyline") == 1
    missed = math.floor(1000 * (1 - rates[0.04])) / 10
    assert f"wrongly names 4% of the rows not in the data misses at least {missed:g}% of the rows" in " ".join(
        page.split()
    )
    assert "<polyline" not in statement([trained(noise_multiplier=0.0)]).to_html()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, make_plan(delta=1e-3))
    private_grad(next(iter(private_grad.plan.batches(make_data()))))
    pg.save(private_grad.model, tmp_path / "saved", ledger=private_grad.ledger)
    assert "<polyline" in pg.load(make_model(), tmp_path / "saved").to_html()


def test_the_questions_of_nist_are_answered_as_far_as_the_ledger_knows(tmp_path: Path):
    trained(path=tmp_path / "ledger.jsonl", noise_on_grid=True)
    run = CliRunner().invoke(
        app, ["statement", str(tmp_path / "ledger.jsonl"), "--for", "nist"], env={"COLUMNS": "300"}
    )
    found = statement([pg.Ledger(tmp_path / "ledger.jsonl", read_only=True)], appendix="nist")
    questions = found.sections[-1]
    assert questions.heading == "Questions of NIST SP 800-226"
    assert all(sentence in " ".join(run.stdout.split()) for sentence in questions.sentences)
    asked = questions.sentences[1:]
    assert all("?" in one for one in asked)
    told = " ".join(asked)
    numbers = found.numbers
    assert f"({rounded_up(numbers['epsilon'], 4)}, 0.001)-differential privacy" in told
    assert f"mu = {rounded_up(numbers['mu'], 4)}" in told
    assert "One row. Neighbors differ by one row more or less." in told
    assert "All noise lies on a grid" in told
    unknown = [one for one in asked if "you must answer" in one]
    assert len(unknown) == 9
    assert "No bound, for the reasons of the first section." in str(statement([trained(seed=1)], appendix="nist"))


# The fields of github.com/opendp/deployments-registry-data, schemas/deployments-schema.yaml at 3e9c812a, with those
# that must be there. Other fields are refused there.
FIELDS: dict[str, tuple[str, str]] = {
    "basic": (
        "name data_curators description intended_use data_product_type data_product_region publication_date",
        "data_product_sector",
    ),
    "dp_variant": ("", "variant_name data_domain unprotected_quantities"),
    "privacy_loss": ("", "privacy_unit privacy_unit_details privacy_parameters privacy_parameters_details"),
    "deployment_model": (
        "",
        "model_name model_name_details actors release_type release_type_details data_source_type "
        "data_source_type_details access_type access_type_details",
    ),
    "accounting": ("", "post_processing composition"),
    "implementation": ("", "preprocessing_and_hyperparameter_tuning mechanisms justification"),
    "administrative": ("registry_authors", "sources notes"),
}


def test_a_record_for_the_registry_has_its_fields(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    ledger = trained(path=path)
    about = ["--title", "Digits, read", "--purpose", "to sort letters", "--data", "scans"]
    run = CliRunner().invoke(app, ["statement", str(path), "--for", "registry", *about])
    assert "a draft: complete what says" in run.stderr
    record = json.loads(run.stdout)
    assert {name: record[name] for name in ("url_slug", "status", "tier")} == {
        "url_slug": f"digits-read-{statement([ledger]).numbers['date'][:4]}",
        "status": "Draft",
        "tier": 3,
    }
    parts = record["deployment"]
    assert parts.keys() == FIELDS.keys()
    for name, (needed, others) in FIELDS.items():
        assert set(needed.split()) <= set(parts[name]) <= {*needed.split(), *others.split()}
    basic, loss = parts["basic"], parts["privacy_loss"]
    assert (basic["name"], basic["intended_use"]) == ("Digits, read", "to sort letters")
    assert basic["data_product_type"] == "Machine learning model"
    assert basic["data_curators"] == ["Not known from the ledger: you must answer."]
    assert loss["privacy_parameters"] == {"epsilon": ledger.epsilon(delta=1e-3), "delta": 1e-3}
    assert "2 noisy gradients" in parts["accounting"]["composition"]
    numbers: dict[str, Any] = {"bound": 2.0, "noise_multiplier": 9.0, "num_examples": 32, "delta": 1e-3}
    pg.release_mean(torch.ones(32, 2), **numbers, ledger=tmp_path / "mean.jsonl")
    sums = registry_record(statement([pg.Ledger(tmp_path / "mean.jsonl", read_only=True)]))
    assert sums["deployment"]["basic"]["data_product_type"] == "Summary statistics"
    with pytest.raises(pg.PrivacyError, match="to begin with a protection, got These releases would satisfy"):
        registry_record(statement([trained(seed=1)]))


def test_people_are_called_people():
    ledger = ledger_of_people()
    text = str(statement([ledger]))
    assert "Nothing has been released" in text
    assert "Quote epsilon" not in text
    assert "declared to have 30 people or more" in text
    assert "all data of this person" in text
    with pytest.raises(
        pg.PrivacyError, match="the same unit, got add or remove one example and add or remove one user"
    ):
        statement([ledger, trained()])


def test_a_path_is_as_good_as_its_ledger(tmp_path: Path):
    ledger = trained(path=tmp_path / "ledger.jsonl")
    assert str(statement([tmp_path / "ledger.jsonl"])) == str(statement([ledger]))


@pytest.mark.parametrize(("user", "many"), [("person", "people"), ("device", "devices"), ("site", "sites")])
def test_a_user_is_called_what_the_plan_says_it_is(user: Any, many: str):
    ledger = ledger_of_people(user=user)
    ledger.charge(Release(1.0, 1 / 6), draw="one", limit=2)
    said = statement([ledger], appendix="nist")
    text, page = str(said), said.to_html()
    assert f"- The {many} in the training data are protected by differential privacy" in text
    assert f"one {user} with all data of this {user}" in text
    assert f"Neighbors differ by one {user} more or less" in text
    assert f"{many} not in the data" in text
    assert f"declared to have 30 {many} or more" in page
    told = registry_record(said)["deployment"]["privacy_loss"]["privacy_unit"]
    assert told == f"{user.capitalize()}, with all data of this {user}"
    if user != "person":
        assert not re.search(r"\b(a|one|this|each) person\b", text)
        with pytest.raises(pg.PrivacyError, match="one user and add or remove one user"):
            statement([ledger, ledger_of_people()])


def test_a_user_is_one_of_three_kinds():
    with pytest.raises(pg.PrivacyError, match="user to be 'person', 'device' or 'site', got 'hospital'"):
        ledger_of_people(user="hospital")
    assert ledger_of_people(user="site", noise_multiplier=None, target_epsilon=3.0).plan_facts["user"] == "site"


def test_the_rows_of_a_person_that_are_used_are_stated():
    def of_heads(*rows: int, alone: bool = False) -> str:
        made: list[pg.Ledger] = []
        for most in rows:
            features, labels = torch.ones(20, most, 3), torch.zeros(20, most, dtype=torch.int64)
            options: Any = {"num_classes": 2, "target_epsilon": 3.0, "delta": 1e-3, "num_examples": 20, "steps": 2}
            head = fit_head(features, labels, source="public rows", progress=False, **options)
            assert head.result is not None
            made.append(head.result.ledger)
        return str(statement([*made, *([ledger_of_people()] if alone else [])], appendix="nist"))

    said = "At most 4 rows of a person are used"
    assert of_heads(4).count(said) == 2
    assert said in of_heads(3, 4)
    assert "rows of a person are used" not in of_heads(4, alone=True)  # where not all are known


def ledger_of_people(**changed: Any) -> pg.Ledger:
    numbers: dict[str, Any] = {"expected_cohort_size": 5, "rounds": 2, "noise_multiplier": 1.0, **changed}
    plan = pg.PrivacyPlan.for_users(num_users=30, max_update_norm=1.0, delta=1e-3, **numbers)
    ledger = pg.Ledger()
    ledger.bind(plan.public_facts)
    return ledger


def test_a_statement_needs_a_plan_and_one_delta():
    with pytest.raises(pg.PrivacyError, match="to hold a plan each"):
        statement([pg.Ledger()])
    with pytest.raises(pg.PrivacyError, match="to hold a plan each, got 0 ledgers"):
        statement([])
    with pytest.raises(pg.PrivacyError, match=r"delta to be recorded and equal .*give delta"):
        statement([trained(delta=None)])
    with pytest.raises(pg.PrivacyError, match=r"got 0\.001, 0\.01; give delta"):
        statement([trained(), trained(delta=0.01)])


def test_declared_side_information_is_named():
    scales = pg.Scales(
        {"0.weight": torch.ones(4, 5)}, provenance="public data", source="a <b>dictionary</b>\n- Quote epsilon = 0"
    )
    plan = make_plan(delta=1e-3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=pg.precondition.fixed(scales))
    found = statement([private_grad.ledger])
    assert "as declared: public data: a <b>dictionary</b> - Quote epsilon = 0." in str(found)
    assert "&lt;b&gt;dictionary" in found.to_html()
    assert not re.search(r"src=|href=(?!\"data:,\")", found.to_html())


def test_the_command_prints_writes_and_counts(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    trained(path=path)
    run = CliRunner().invoke(app, ["statement", str(path), "--out", str(tmp_path / "report" / "statement.html")])
    assert run.exit_code == 0, run.output
    assert "PRIVACY STATEMENT" in run.output
    assert "<h1>Privacy statement</h1>" in (tmp_path / "report" / "statement.html").read_text()
    answer = json.loads(CliRunner().invoke(app, ["statement", str(path), "--json"]).output.splitlines()[-1])
    assert answer["delta"] == 1e-3
    assert 0.01 < answer["attack_success"] < 1
    assert math.isfinite(answer["epsilon"])
    assert answer["statement"][0]["heading"] == "In short"
    assert answer["head"].keys() == {"Date"}


def test_a_statement_names_what_it_is_about_as_declared(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    about = About(title="Readmission", model="head <b>", purpose="to plan beds\n- Quote epsilon = 0", data="visits")
    found = statement([trained(path=path)], about=about)
    first, head, _ = str(found).split("\n\n")[:3]
    assert first == "PRIVACY STATEMENT: Readmission"
    assert head.splitlines()[:3] == [
        "Model, as declared: head <b>",
        "Purpose, as declared: to plan beds - Quote epsilon = 0",
        "Data set, as declared: visits",
    ]
    assert head.splitlines()[3].startswith("Date: 20")
    page = found.to_html()
    assert "<h1>Readmission</h1>" in page
    assert "head &lt;b&gt;" in page
    options = ("--title", "Readmission", "--model", about.model, "--purpose", about.purpose, "--data", "visits")
    shown = CliRunner().invoke(app, ["statement", str(path), *options], env={"COLUMNS": "200"})
    assert shown.stdout.splitlines()[: len(str(found).splitlines())] == str(found).splitlines()
    plan = make_plan(delta=1e-3)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan)
    private_grad(next(iter(plan.batches(make_data()))))
    said = pg.save(private_grad.model, tmp_path / "saved", ledger=private_grad.ledger, about=about)
    assert said.about == pg.load(make_model(), tmp_path / "saved").about == about
    assert (tmp_path / "saved" / "statement.txt").read_text().startswith(first)


def test_a_page_is_like_that_of_a_report_and_boxes_what_is_no_guarantee():
    cases: list[tuple[dict[str, Any], int]] = [({}, 0), ({"seed": 1}, 1)]
    for changed, boxed in cases:
        page = statement([trained(**changed)]).to_html()
        assert page.count('class="warning" role="note"') == boxed
        assert "prefers-color-scheme: dark" in page
        assert not re.search(r"<script|https?:|@import|url\(", page)


def test_releases_and_several_ledgers_are_told_apart(tmp_path: Path):
    numbers: dict[str, Any] = {"bound": 2.0, "noise_multiplier": 9.0, "num_examples": 32, "delta": 1e-3}
    pg.release_mean(torch.ones(32, 2), **numbers, ledger=tmp_path / "mean.jsonl")
    mean = pg.Ledger(tmp_path / "mean.jsonl", read_only=True)
    alone = str(statement([mean]))
    assert "A noisy mean of the data was released." in alone
    assert "noisy gradients." not in alone
    assert "fixed beforehand" not in alone
    both = str(statement([mean, trained()]))
    assert "The training released 2 noisy gradients." in both
    assert "no number here is a guarantee" in both


def test_the_statement_on_a_budget_says_what_each_commitment_is(tmp_path: Path):
    options: dict[str, Any] = {"total_epsilon": 9.0, "delta": 1e-3, "num_examples": 32, "privacy_unit": "example"}
    budget = pg.Budget(tmp_path / "budget.jsonl", **options)
    pg.release_sum(torch.ones(32, 2), bound=2.0, noise_multiplier=9.0, num_examples=32, budget=budget, name="sums")
    text = str(budget_statement(budget))
    assert "Its only commitment costs" in text
    assert "sums: a noisy sum with 2 values, by" in text
    assert "For a budget, it follows from epsilon and delta alone" in text
    pg.release_sum(torch.ones(32, 2), bound=2.0, noise_multiplier=9.0, num_examples=32, ledger=tmp_path / "own.jsonl")
    run = CliRunner().invoke(app, ["statement", str(tmp_path / "budget.jsonl"), str(tmp_path / "own.jsonl")])
    assert "a budget to be given alone, got 2 records and delta None" in str(run.exception)
    budget.commit("two trainings", [Release(9.0, 0.1, count=5), Release(9.0, 0.1, count=5)])
    budget.commit("/home/ann/clinic/run/ledger.jsonl", [Release(9.0, 0.1, count=5)], by="Ann")
    assert "run/ledger.jsonl: a training with up to 5 noisy gradients, by Ann" in str(budget_statement(budget))
    assert "clinic" not in str(budget_statement(budget))
    assert "two trainings: trainings that were compared, and their scores, by" in str(budget_statement(budget))


def test_a_secret_number_of_trainings_protects_the_best_one_only(tmp_path: Path):
    budget = pg.Budget(tmp_path / "b.jsonl", total_epsilon=9.0, delta=1e-3, num_examples=32, privacy_unit="example")
    run = (Release(9.0, 0.1, count=5), Release(20.0, 1.0))
    budget.commit("two trainings", run)
    warning = "The others, their number and their duration must stay secret."
    assert warning not in str(budget_statement(budget))
    budget.commit("best", [Selection(run, mean=8, shape=0)])
    text = str(budget_statement(budget))
    assert warning in text
    assert "best: the best of several trainings, and its score, by" in text
    assert "Later ones outside of the budget raise epsilon." in text


def test_noise_that_is_not_cryptographic_is_named():
    ledger, words = trained(), "An attacker who predicts the noise: its generator is not cryptographic."
    assert words not in str(statement([ledger]))
    ledger.plan_facts["noise_generator"] = "torch's generator on cuda (Philox): not cryptographic"
    assert words in str(statement([ledger]))


def test_a_clipping_norm_that_moves_is_named():
    plan = make_plan(delta=1e-5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, adaptive_clip=pg.clip.TargetFraction())
    private_grad(next(iter(plan.batches(make_data()))))
    private_grad.ledger.close()
    assert "clipping norm 1, moved by TargetFraction(0.75, rate=0.5, steps=50)" in str(statement([private_grad.ledger]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm_bins": 6}, "noisy shares of gradients by length, Slots(bins=6)"),
        (
            {"adaptive_clip": pg.clip.Quantile(count_std=5.0)},
            "a noisy count of gradients within the clipping norm, Count(",
        ),
        ({"adaptive_clip": pg.clip.SquaredError()}, "a noisy histogram of the gradients' norms, Histogram("),
        ({}, None),
    ],
)
def test_what_is_released_with_each_gradient_is_named(options: dict[str, Any], words: str | None):
    plan = make_plan(delta=1e-5)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, **options)
    private_grad(next(iter(plan.batches(make_data()))))
    private_grad.ledger.close()
    text = str(statement([private_grad.ledger]))
    assert ("Each gradient was released with" in text) == (words is not None)
    assert words is None or f"Each gradient was released with {words}" in text


def test_several_budgets_are_refused_with_what_to_do(tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        pg.Budget(tmp_path / name, total_epsilon=3.0, delta=1e-5, num_examples=100, privacy_unit="example")
    both = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    found = CliRunner().invoke(app, ["statement", *both])
    assert found.exit_code != 0
    assert "give it alone" in str(found.exception)
    found = CliRunner().invoke(app, ["epsilon", both[0]])
    assert "run `privgrad budget` on it" in str(found.exception)
    assert "left: nothing" not in CliRunner().invoke(app, ["budget", both[0]]).stdout
