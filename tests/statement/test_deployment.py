"""What is saved for publication: the weights and the statement, and nothing else; and that the files can be used."""

import copy
import gc
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import Release, epsilon
from privgrad.features import Hog, Patches, Whitened, join, silhouettes
from privgrad.heads import Head
from privgrad.statement.text import statement
from privgrad.training.checkpoint import read_checkpoint
from privgrad_lab.models.convolutional import cnn_small

pytestmark = pytest.mark.usefixtures("by_rdp")
RAW = 0.123456789  # what `evaluate` says about private examples

PLAN = {
    "sampling", "sample_rate", "expected_batch_size", "noise_multiplier", "max_grad_norm", "num_examples", "delta",
    "group_size", "max_batch_size", "epoch_steps", "noise_memory", "noise_on_grid", "neighboring_relation",
    "privacy_unit",
    "simulates", "research_seed",
    "side_information", "perturbation", "noise_generator", "norm_statistic", "adaptive_clip",
}  # fmt: skip
NUMBERS = {
    "epsilon", "epsilon_rdp", "delta", "attack_success", "false_positive_rate", "releases", "seeded_releases",
    "trade_off", "mu", "mu_regret",
    "covered_by_accountant", "privacy_unit", "num_examples", "at_least", "digests", "file", "date", "versions",
}  # fmt: skip


def trained(folder: Path | None = None, *, model: nn.Module | None = None, **changed: Any) -> tuple[Any, ...]:
    """A model, its PrivateGradient and its result; what it evaluates is raw."""
    plan = make_plan(**({"delta": 1e-3} | changed))
    private_grad = pg.PrivateGradient(make_model() if model is None else model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(private_grad.model.named_parameters(), lr=0.1)
    result = pg.fit(
        private_grad,
        optimizer,
        make_data(),
        evaluate=lambda _: {"raw_loss": RAW},
        num_evaluations=2,
        ema_decay=0.5,
        output_dir=folder,
        progress=False,
    )
    return private_grad.model, private_grad, result


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_saved_model_is_its_weights_and_its_statement(tmp_path: Path):
    model, private_grad, result = trained()
    said = pg.save(model, tmp_path / "published" / "model", ledger=private_grad.ledger)
    folder = tmp_path / "published" / "model"
    assert files(tmp_path) == [f"published/model/{name}" for name in files(folder)]
    assert files(folder) == ["model.safetensors", "statement.json", "statement.txt"]

    state, held = model.state_dict(), load_file(folder / "model.safetensors")
    assert held.keys() == state.keys()
    assert all(torch.equal(held[name], state[name]) for name in state)
    size = sum(value.numel() * value.element_size() for value in state.values())
    assert size < (folder / "model.safetensors").stat().st_size < size + 1000  # a header, and no room for more

    facts = json.loads((folder / "statement.json").read_text())
    assert facts.keys() == {"format", "weights", "numbers", "about", "plans", "statement"}
    assert facts["weights"].keys() == {"file", "sha256", "tensors"}
    assert facts["numbers"].keys() == NUMBERS
    (plan,) = facts["plans"]
    assert plan.keys() == PLAN
    assert facts["numbers"]["epsilon"] == private_grad.ledger.epsilon(delta=1e-3)
    assert (folder / "statement.txt").read_text() == f"{said}\n"
    for name in ("statement.json", "statement.txt"):
        text = (folder / name).read_text()
        assert not [raw for raw in (str(RAW), "raw_", "seconds", str(tmp_path)) if raw in text]
    assert result.curve[-1]["raw_loss"] == RAW  # which the test would have found


def test_the_loader_takes_what_was_saved_and_nothing_else(tmp_path: Path):
    model, private_grad, _ = trained()
    said = pg.save(model, tmp_path / "saved", ledger=private_grad.ledger)
    other = make_model()
    assert not torch.equal(*(one.state_dict()["0.weight"] for one in (other, model)))
    assert pg.load(other, tmp_path / "saved") == said
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())

    longer, wider = nn.Sequential(*make_model(), nn.Linear(2, 2)), make_model()
    wider[0] = nn.Linear(7, 11)
    for differing, got in (
        (nn.Linear(5, 3), 'Unexpected key(s) in state_dict: "0.bias"'),
        (wider, "copying a param with shape torch.Size([4]) from checkpoint"),
        (longer, f'Missing key(s) in state_dict: "{len(make_model())}.bias"'),
    ):
        with pytest.raises(
            pg.PrivacyError, match=f"load: expected model to have the tensors of .*{re.escape(got)}.*; make"
        ):
            pg.load(differing, tmp_path / "saved")
    with pytest.raises(pg.PrivacyError, match=r"Missing key.*running_mean.*; make .* as before, or give privgrad.fix"):
        pg.load(nn.Sequential(*make_model(), nn.BatchNorm1d(3)), tmp_path / "saved")
    with pytest.raises(pg.PrivacyError, match=r"load: .*to hold a saved model, got FileNotFoundError"):
        pg.load(other, tmp_path)
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(pg.PrivacyError, match=r"the SHA-256 of .*the statement is on other weights"):
        pg.load(other, tmp_path / "saved")
    (tmp_path / "saved" / "statement.json").write_text("{}")
    with pytest.raises(pg.PrivacyError, match=r"load: .*to hold a saved model, got KeyError"):
        pg.load(other, tmp_path / "saved")


def test_weights_that_were_changed_after_the_training_are_not_those_of_its_statement(tmp_path: Path):
    model, private_grad, _ = trained(tmp_path / "run")
    said = "They are those of the checkpoint"
    assert said in str(pg.save(model, tmp_path / "a", ledger=tmp_path / "run/ledger.jsonl"))
    with torch.no_grad():
        model[0].weight += 0.1
    for record in (private_grad.ledger, tmp_path / "run/ledger.jsonl"):
        with pytest.raises(pg.PrivacyError, match="got different weights; save the model as its training left it"):
            pg.save(model, tmp_path / "b", ledger=record)
    pg.save(model, tmp_path / "b", ledger=private_grad.ledger, post_processing="rounded")


def test_a_budget_of_the_same_name_states_nothing_of_this_training(tmp_path: Path):
    numbers: dict[str, Any] = {"total_epsilon": 50.0, "delta": 1e-3, "num_examples": 32, "privacy_unit": "example"}
    own, other = (pg.Budget(tmp_path / name / "budget.jsonl", **numbers) for name in ("own", "other"))
    other.commit("another training", [Release(20.0, 1.0)])
    plan, model = make_plan(steps=2, delta=1e-3), make_model()
    ledger = own.open_ledger(tmp_path / "own/run/ledger.jsonl", plan)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
    pg.fit(private_grad, pg.optim.SGD(model.named_parameters(), lr=0.1), make_data())
    with pytest.raises(pg.PrivacyError, match="to cover every training of the model"):
        pg.save(model, tmp_path / "saved", ledger=other)
    pg.save(model, tmp_path / "saved", ledger=own)


class Tied(nn.Module):
    """One weight under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(5, dtype=torch.float64))
        self.last = nn.Linear(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(rows)) * self.scale.float())


def test_tied_weights_are_saved_once_and_tied_again(tmp_path: Path):
    model, private_grad, _ = trained(model=Tied())
    pg.save(model, tmp_path / "saved", ledger=private_grad.ledger)
    assert len(load_file(tmp_path / "saved" / "model.safetensors")) == len(model.state_dict()) - 1
    other = Tied()
    pg.load(other, tmp_path / "saved")
    assert other.first.weight is other.second.weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.filterwarnings("ignore:sampling")
def test_a_guarantee_that_is_none_is_said_first_as_in_the_statement(tmp_path: Path):
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("seed", {"seed": 1}, "A seed produced the noise. Anyone who knows the seed can remove the noise."),
        ("none", {"noise_multiplier": 0.0}, "These releases protect nobody: their epsilon is infinite."),
    ]
    for name, changed, words in cases:
        model, private_grad, _ = trained(**changed)
        said = pg.save(model, tmp_path / name, ledger=private_grad.ledger)
        assert said.sections[:-1] == statement([private_grad.ledger]).sections
        assert words in " ".join(said.sections[0].sentences)
        assert "are protected by" not in str(said)
        assert pg.load(make_model(), tmp_path / name) == said
    facts = json.loads((tmp_path / "none" / "statement.json").read_text(), parse_constant=pytest.fail)
    assert facts["numbers"]["epsilon"] is None
    assert pg.load(make_model(), tmp_path / "none").numbers["epsilon"] == math.inf
    plan = make_plan(delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan.scaled(1 / 2))
    for batch in private_grad.plan.batches(make_data()):
        private_grad(batch)
    said = pg.save(private_grad.model, tmp_path / "simulated", ledger=private_grad.ledger)
    assert "The training simulates another one in smaller batches, which protects nobody." in str(said)


def test_a_ledger_of_another_training_is_refused(tmp_path: Path):
    model, private_grad, _ = trained()
    _, other, _ = trained()
    with pytest.raises(pg.PrivacyError, match=r"cover every training .* got a training with 10 releases, recorded in"):
        pg.save(model, tmp_path / "saved", ledger=other.ledger)
    assert "Weights\n- The process that trained the model with this record saved" in str(
        pg.save(nn.Sequential(model, nn.Softmax(1)), tmp_path / "whole", ledger=[private_grad.ledger, other.ledger])
    )
    for empty in (pg.Ledger(), pg.PrivateGradient(make_model(), loss_fn, make_plan(delta=1e-3)).ledger):
        with pytest.raises(pg.PrivacyError, match="ledger"):
            pg.save(make_model(), tmp_path / "saved", ledger=empty)
    assert files(tmp_path / "saved") == []


EARLIER = "If the training began with weights of an earlier private training, that one is counted only if"


def trained_twice(how: str, folder: Path) -> tuple[nn.Module, pg.Ledger]:
    """A model that went through two trainings of 10 and 4 releases, and the ledger of the second."""
    places = [folder / name if "in folders" in how else None for name in ("a", "b")]
    model, _, result = trained(places[0])
    if how == "as a copy":
        model = copy.deepcopy(model)
    elif how == "from an average":
        model = result.averaged
    del result
    gc.collect()
    model, _, result = trained(places[1], model=model, steps=4)
    return (result.averaged if "an average" in how else model), result.ledger


@pytest.mark.parametrize(
    "how", ["in memory", "in folders", "as a copy", "an average", "an average in folders", "from an average"]
)
def test_a_model_that_was_trained_twice_is_stated_with_both_trainings(how: str, tmp_path: Path):
    model, ledger = trained_twice(how, tmp_path)
    with pytest.raises(pg.PrivacyError, match=r"cover every training .* got a training with 10 releases, recorded in"):
        pg.save(model, tmp_path / "saved", ledger=ledger)
    said = pg.save(model, tmp_path / "saved", ledger=pg.ledgers_of(model))  # the remedy
    assert (said.numbers["releases"], len(pg.ledgers_of(model))) == (14, 2)
    both = epsilon([one for held in pg.ledgers_of(model) for one in held.charged], delta=1e-3)
    assert said.numbers["epsilon"] == both > ledger.epsilon(delta=1e-3)
    assert EARLIER in said.sections[-1].sentences[-1]


@pytest.mark.parametrize("how", ["unfrozen", "added", "an average", "an average, amid the training"])
def test_a_part_that_is_unfrozen_or_added_later_is_stated_with_its_training(how: str, tmp_path: Path):
    plan, data, model, other = make_plan(delta=1e-3), make_data(), make_model(), make_model()
    model[0].requires_grad_(False)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    if how == "added":
        model[0] = nn.Linear(5, 4)
    model[0].requires_grad_("amid" not in how)

    calls = list[nn.Module]()

    def unfreeze(seen: nn.Module) -> dict[str, float]:
        calls.append(seen)
        if len(calls) == 3:  # `fit` tries the function before it begins
            model[0].requires_grad_(True)
        return {}

    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    options: Any = {"evaluate": unfreeze, "num_evaluations": 5, "ema_decay": 0.5 if "average" in how else None}
    result = pg.fit(private_grad, optimizer, data, progress=False, **options)
    trained: Any = result.averaged if "average" in how else model
    other[0] = trained[0].requires_grad_(False)
    second = pg.PrivateGradient(other, loss_fn, plan)
    pg.fit(second, pg.optim.SGD(other.named_parameters(), lr=0.1), data, progress=False)
    assert len(pg.ledgers_of(other)) == 2
    with pytest.raises(pg.PrivacyError, match="cover every training"):
        pg.save(other, tmp_path / "saved", ledger=second.ledger)


def test_a_model_that_was_reset_between_its_trainings_is_saved_by_the_remedy(tmp_path: Path):
    model, _, _ = trained()
    for module in model:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    _, _, result = trained(model=model, steps=4)
    match = "if the weights were reset after that training, load the state dict of the model into a newly built one"
    with pytest.raises(pg.PrivacyError, match=match):
        pg.save(model, tmp_path / "saved", ledger=result.ledger)
    built = make_model()
    built.load_state_dict(model.state_dict())
    said = pg.save(built, tmp_path / "saved", ledger=result.ledger)
    assert said.numbers["releases"] == 4
    assert EARLIER in said.sections[-1].sentences[-1]  # what the folder cannot tell


def test_weights_are_compared_with_the_checkpoint_of_their_ledger(tmp_path: Path):
    model, _, result = trained(tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    weights: Any = make_model()
    averaged = make_model()
    weights.load_state_dict(model.state_dict())  # as in another process, which does not know the training
    averaged.load_state_dict(result.averaged.state_dict())
    for name, same in (("last", weights), ("averaged", averaged)):
        said = pg.save(same, tmp_path / name, ledger=ledger)
        assert "The weights are those of the checkpoint that was written with this record." in str(said)
    with torch.no_grad():
        weights[0].weight += 1
    with pytest.raises(pg.PrivacyError, match=r"model to have the weights of .*checkpoint.pt, got different weights;"):
        pg.save(weights, tmp_path / "changed", ledger=ledger)
    said = pg.save(weights, tmp_path / "changed", ledger=ledger, post_processing="added\n\n1")
    assert "After the training, the weights were changed, as declared: added 1." in str(said)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-40])
    with pytest.raises(pg.PrivacyError, match=r"to be a complete checkpoint of this run"):
        pg.save(weights, tmp_path / "damaged", ledger=ledger)
    torch.save({"epoch": 3}, checkpoint)  # of a loop of your own
    said = pg.save(weights, tmp_path / "own", ledger=ledger)
    assert "only the word of the person who saved them" in str(said)
    checkpoint.unlink()
    said = pg.save(weights, tmp_path / "alone", ledger=ledger)
    assert "That these weights belong to this record is only the word of the person who saved them." in str(said)
    assert str(tmp_path) not in (tmp_path / "alone" / "statement.json").read_text()


def test_a_training_within_a_budget_is_stated_by_its_budget(tmp_path: Path):
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=50.0, delta=1e-3, num_examples=32, privacy_unit="example"
    )
    plan = make_plan(delta=1e-3)
    ledger = budget.open_ledger(tmp_path / "run" / "ledger.jsonl", plan, name="a model")
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
    for batch in plan.batches(make_data()):
        private_grad(batch)
    with pytest.raises(pg.PrivacyError, match=r"each ledger to be without a budget"):
        pg.save(private_grad.model, tmp_path / "saved", ledger=ledger)
    for name, given in (("object", budget), ("file", tmp_path / "budget.jsonl")):
        said = pg.save(private_grad.model, tmp_path / name, ledger=given)
        assert "The data set has a budget: epsilon = 50" in str(said)
    with pytest.raises(pg.PrivacyError, match="a budget to be given alone"):
        pg.save(private_grad.model, tmp_path / "saved", ledger=[budget, ledger])


def test_bad_arguments_are_refused_and_leave_nothing(tmp_path: Path):
    model, private_grad, _ = trained()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    ledger: Any = private_grad.ledger
    calls: list[tuple[str, Mapping[str, Any]]] = [
        ("folder to be new or empty", {"folder": tmp_path / "full"}),
        ("model to be a torch.nn.Module", {"model": model.state_dict()}),
        ("ledgers to hold a plan each", {"ledger": []}),
        ("delta", {"delta": 2.0}),
        ("post_processing to be a few words", {"post_processing": " "}),
    ]
    for message, changed in calls:
        given: dict[str, Any] = {"model": model, "folder": tmp_path / "saved", "ledger": ledger} | dict(changed)
        with pytest.raises(pg.PrivacyError, match=f"expected .*{message}"):
            pg.save(**given)

    class WithState(nn.Linear):
        def get_extra_state(self) -> list[int]:
            return [1]

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises((pg.PrivacyError, TypeError, AttributeError), match="list"):
        pg.save(WithState(2, 2), tmp_path / "saved", ledger=ledger)
    assert files(tmp_path) == ["full/notes.txt"]


# The folders that other functions write


def test_the_folder_of_fit_holds_a_private_checkpoint_and_a_public_ledger(tmp_path: Path):
    trained(tmp_path)
    assert files(tmp_path) == ["checkpoint.pt", "ledger.jsonl"]
    state = read_checkpoint(tmp_path / "checkpoint.pt")
    assert state.keys() == {
        "version", "seed", "settings", "model", "averaged", "optimizer", "scheduler", "private_grad", "ledger",
        "curve", "updates", "seconds",
    }  # fmt: skip
    # Why the checkpoint is private: the time, and raw numbers of `evaluate`.
    assert state["seconds"] > 0
    assert state["curve"][-1]["raw_loss"] == RAW
    first, *lines = (json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert first["plan"].keys() == PLAN
    assert len(lines) == 10
    assert lines[0].pop("steps") == 10
    known = {"draw", "noise_multiplier", "sample_rate", "scheme"}
    assert all(line.keys() - {"n", "sum", "previous", "checksum", "check", "chain"} == known for line in lines), lines[
        0
    ]
    assert str(RAW) not in (tmp_path / "ledger.jsonl").read_text()


def head_of(rows: torch.Tensor) -> Head:
    facts: dict[str, Any] = {"num_classes": 3, "target_epsilon": 3.0, "delta": 1e-3, "num_examples": 300}
    labels = torch.arange(len(rows)) % 3
    return pg.fit_head(rows, labels, **facts, source="no data", steps=3, expected_batch_size=50, progress=False)


def test_the_folder_of_a_head_is_public(tmp_path: Path):
    rows = torch.rand(300, 7)
    head = head_of(rows)
    head.save(tmp_path / "head")
    assert files(tmp_path / "head") == ["head.json", "statement.txt", "weights.safetensors"]
    sections = statement([head.result.ledger]).sections if head.result else ()
    text = (tmp_path / "head" / "statement.txt").read_text()
    assert all(line in text for section in sections for line in section.sentences)
    assert "Weights\n- The process that trained the head with this record saved its weights." in text
    held = load_file(tmp_path / "head" / "weights.safetensors")
    assert list(held) == ["linear.weight"]
    assert torch.equal(held["linear.weight"], head.model.linear.weight)
    facts = json.loads((tmp_path / "head" / "head.json").read_text())
    assert facts.keys() == {
        "format", "target", "width", "input_dims", "extractor", "classes", "image_shape", "schema", "privacy",
    }  # fmt: skip
    assert facts["privacy"].keys() == PLAN | {"epsilon", "ledger"}
    assert not [name for name in ("head.json", "statement.txt") if "seconds" in (tmp_path / "head" / name).read_text()]
    Head.load(tmp_path / "head").save(tmp_path / "again")  # a loaded head does not know its ledger
    assert files(tmp_path / "again") == ["head.json", "weights.safetensors"]


def train_further(head: Head, **changed: Any) -> pg.Ledger:
    plan = make_plan(**{"delta": 1e-3, "steps": 1} | changed)
    unit = pg.perturb.SampleGradient(plan.privacy_unit)
    private_grad = pg.PrivateGradient(head.model, head.target.losses, plan, perturb=unit)
    batch = pg.Batch((torch.rand(4, 7), torch.tensor([0, 1, 2, 0])), 4, next(plan.batches(make_data())).sampling)
    private_grad(batch)
    return private_grad.ledger


def test_a_head_that_was_trained_further_counts_every_training(tmp_path: Path):
    head = head_of(torch.rand(300, 7))
    alone, copied = head.epsilon, copy.deepcopy(head)
    train_further(head, delta=5e-4)
    gc.collect()
    both = epsilon([one for held in pg.ledgers_of(head.model) for one in held.charged], delta=1e-3)
    assert head.epsilon == both > alone == copied.epsilon
    head.save(tmp_path / "head")
    assert "The trainings released 4 noisy gradients." in (tmp_path / "head" / "statement.txt").read_text()
    facts = json.loads((tmp_path / "head" / "head.json").read_text())["privacy"]
    assert facts["epsilon"] == both == Head.load(tmp_path / "head").epsilon
    (further,) = facts["further"]
    assert further.keys() == PLAN | {"ledger"}
    copied.save(tmp_path / "copy")
    assert "The training released 3 noisy gradients." in (tmp_path / "copy" / "statement.txt").read_text()
    assert "further" not in json.loads((tmp_path / "copy" / "head.json").read_text())["privacy"]


def test_a_head_is_not_saved_with_an_epsilon_that_lacks_a_training(tmp_path: Path):
    made = head_of(torch.rand(300, 7))
    made.save(tmp_path / "made")
    head = Head.load(tmp_path / "made")
    assert head.epsilon == made.epsilon
    second = train_further(head)
    for act in (lambda: head.save(tmp_path / "saved"), lambda: head.epsilon):
        with pytest.raises(pg.PrivacyError, match=r"1 later training with 1 release; call privgrad\.save\(head"):
            act()
    assert not (tmp_path / "saved").exists()
    assert made.result is not None
    said = pg.save(head.model, tmp_path / "model", ledger=[made.result.ledger, second])  # the remedy
    assert said.numbers["releases"] == 4
    for_users = head_of(torch.rand(300, 7))
    train_further(for_users, privacy_unit="user")
    with pytest.raises(pg.PrivacyError, match="to have had no training that it cannot count"):
        for_users.save(tmp_path / "saved")


def test_the_statement_of_a_head_in_a_budget_is_that_of_the_budget(tmp_path: Path):
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=3.0, delta=1e-3, num_examples=300, privacy_unit="example"
    )
    rows, labels = torch.rand(300, 7), torch.arange(300) % 3
    facts: dict[str, Any] = {"num_classes": 3, "source": "no data", "steps": 3, "progress": False}
    pg.fit_head(rows, labels, budget=budget, output_dir=tmp_path / "run", **facts).save(tmp_path / "head")
    assert files(tmp_path / "head") == ["head.json", "weights.safetensors"]


def test_a_head_is_saved_by_its_own_function(tmp_path: Path):
    head = head_of(torch.rand(300, 7))
    assert head.result is not None
    with pytest.raises(pg.PrivacyError, match=r"save: expected model to be no Head, got a Head; call head.save\(f"):
        pg.save(head, tmp_path / "head", ledger=head.result.ledger)
    with pytest.raises(pg.PrivacyError, match=r"load: expected model to be no Head, got a Head; call Head.load\(f"):
        pg.load(head, tmp_path / "head")
    assert files(tmp_path) == []


def test_a_pickled_estimator_holds_no_row_and_no_time():
    estimators = pytest.importorskip("privgrad.estimators")
    rows = torch.rand(300, 4).numpy()
    model = estimators.PrivateLogisticRegression(
        classes=[0, 1],
        target_epsilon=3.0,
        delta=1e-3,
        num_examples=300,
        feature_bounds=None,
        steps=3,
        expected_batch_size=50,
    ).fit(rows, (rows[:, 0] > 0.5).astype(int))
    assert model.head_.result.seconds > 0
    written = pickle.dumps(model)
    assert not [row for row in rows if row.tobytes() in written]
    assert rows[0].tobytes() in pickle.dumps((model, rows))  # the wrong twin
    assert pickle.loads(written).head_.result is None


def exported(model: nn.Module, rows: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (rows,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def is_within(rows: torch.Tensor, path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(rows.numpy().tobytes() in archive.read(name) for name in archive.namelist())


@pytest.mark.filterwarnings("ignore:`isinstance.treespec")
def test_a_trained_model_is_exported(tmp_path: Path):
    model, _, _ = trained()
    program = exported(model, torch.zeros(2, 5))
    torch.export.save(program, tmp_path / "model.pt2")
    rows = torch.rand(7, 5)
    torch.export.save(exported(model, rows), tmp_path / "real.pt2")
    assert is_within(rows, tmp_path / "real.pt2")  # why docs/deploy.md says to make rows up
    assert not is_within(make_data().tensors[0][:2], tmp_path / "model.pt2")
    assert {name for name, _ in model.named_parameters()} == set(program.state_dict)
    loaded = cast(nn.Module, torch.export.load(tmp_path / "model.pt2").module())
    assert torch.equal(loaded(rows), model(rows))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_head_is_exported_with_its_extractor(strict: bool, tmp_path: Path):
    public = silhouettes(200, size=12)
    whole = join((Whitened(Patches(public=public, filters=8), public, keep=20), 1.0), (Hog(places=(3,)), 0.5))
    images = torch.rand(300, 1, 12, 12)
    facts: dict[str, Any] = {"num_classes": 3, "target_epsilon": 3.0, "delta": 1e-3, "num_examples": 300}
    labels = torch.arange(300) % 3
    head = pg.fit_head(whole(images), labels, extractor=whole, **facts, steps=2, progress=False)
    for rows in (images[:7], (images[:7] * 255).byte()):
        batch = torch.export.Dim("batch")
        program = torch.export.export(head, (torch.zeros_like(rows[:2]),), dynamic_shapes=({0: batch},), strict=strict)
        torch.export.save(program, tmp_path / "head.pt2")
        for found in (program, torch.export.load(tmp_path / "head.pt2")):
            for some in (rows, rows[:1]):
                scores = cast(nn.Module, found.module())(some)
                torch.testing.assert_close(scores.detach(), head(some))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["small", "convolutional", "bert"])
def test_a_trained_model_runs_as_onnx(kind: str, tmp_path: Path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    rows: Any = torch.rand(7, 5)
    if kind == "small":
        model, _, _ = trained()
    elif kind == "convolutional":
        model, rows = cnn_small(in_channels=1, num_classes=10), torch.rand(7, 1, 28, 28)
    else:
        from test_huggingface import bert

        class Scores(nn.Module):
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.inner(input_ids=ids, attention_mask=torch.ones_like(ids)).logits

        model, rows = Scores(bert()), torch.randint(0, 20, (7, 6))
    model.eval()
    path = tmp_path / "model.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(model, (rows[:2],), path, dynamo=True, input_names=["rows"], dynamic_shapes=({0: batch},))
    assert rows[:2].numpy().tobytes() not in path.read_bytes()
    (found,) = onnxruntime.InferenceSession(path).run(None, {"rows": rows.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(rows).detach(), atol=1e-4, rtol=1e-4)


# A folder that is saved again


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_saved_files_have_the_mode_of_other_files(tmp_path: Path):
    model, private_grad, _ = trained()
    head = head_of(torch.rand(300, 7))
    head.extractor = Whitened(Hog(places=(2,)), silhouettes(50, size=8))
    before = os.umask(0o027)
    try:
        pg.save(model, tmp_path / "model", ledger=private_grad.ledger)
        head.save(tmp_path / "head")
    finally:
        os.umask(before)
    assert len(list((tmp_path / "head").rglob("*.safetensors"))) == 2
    assert modes(tmp_path) == {0o640}
    assert (tmp_path / "model").stat().st_mode & 0o777 == (tmp_path / "head").stat().st_mode & 0o777 == 0o750


def test_a_saved_model_is_replaced_on_request_only(tmp_path: Path):
    model, private_grad, _ = trained()
    place = tmp_path / "saved"
    pg.save(model, place, ledger=private_grad.ledger)
    again, other, _ = trained()
    with pytest.raises(pg.PrivacyError, match=r"new or empty, got .*saved, which exists; .*give overwrite=True to rep"):
        pg.save(again, place, ledger=other.ledger)
    (tmp_path / "link").symlink_to(place)
    said = pg.save(again, tmp_path / "link", ledger=other.ledger, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    served = make_model()
    assert pg.load(served, place) == said
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in served.state_dict().items())
    assert files(place) == ["model.safetensors", "statement.json", "statement.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "saved"]


def test_a_folder_that_is_not_as_it_was_saved_is_kept(tmp_path: Path):
    model, private_grad, _ = trained()
    kept = dict[str, Any](ledger=private_grad.ledger, overwrite=True)
    cases: dict[str, Callable[[Path], object]] = {
        "more": lambda place: (place / "notes.txt").write_text("mine"),
        "fewer": lambda place: (place / "statement.txt").unlink(),
        "changed": lambda place: save_file({"a": torch.ones(1)}, place / "model.safetensors"),
        "damaged": lambda place: (place / "statement.json").write_text("[]"),
    }
    for name, change in cases.items():
        pg.save(model, tmp_path / name, **kept)
        change(tmp_path / name)
        before = {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(pg.PrivacyError, match=r"new, empty, or as save wrote it, .* something else; choose ano"):
            pg.save(model, tmp_path / name, **kept)
        assert before == {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(pg.PrivacyError, match="something else"):
        pg.save(model, tmp_path / "file", **kept)
    with pytest.raises(pg.PrivacyError, match="overwrite to be True or False, got 'yes'"):
        pg.save(model, tmp_path / "new", ledger=private_grad.ledger, overwrite=cast(Any, "yes"))


def test_a_failed_save_leaves_the_former_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, private_grad, _ = trained()
    pg.save(model, tmp_path / "saved", ledger=private_grad.ledger)
    before = {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    replaced = Path.replace

    def fails(path: Path, target: Path) -> Path:
        if path.name == "made":
            raise OSError("disk full")
        return replaced(path, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        pg.save(model, tmp_path / "saved", ledger=private_grad.ledger, overwrite=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_saved_head_is_replaced_on_request_only(tmp_path: Path):
    head, other = head_of(torch.rand(300, 7)), head_of(torch.rand(300, 7))
    head.save(tmp_path / "head")
    with pytest.raises(pg.PrivacyError, match=r"Head.save: expected folder to be new or empty, .* overwrite=True"):
        other.save(tmp_path / "head")
    other.save(tmp_path / "head", overwrite=True)
    loaded = Head.load(tmp_path / "head")
    assert torch.equal(loaded.model.linear.weight, other.model.linear.weight)
    with pytest.raises(pg.PrivacyError, match="folder to keep its statement, got a head of unknown training"):
        loaded.save(tmp_path / "head", overwrite=True)
    (tmp_path / "head" / "notes.txt").write_text("mine")
    with pytest.raises(pg.PrivacyError, match=r"new, empty, or as Head\.save wrote it"):
        other.save(tmp_path / "head", overwrite=True)
