"""A classifier that starts from a private head on stored states, and what PrivateTrainer says at its start."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import privgrad as pg

pytest.importorskip("accelerate")
pytest.importorskip("peft")
from test_huggingface import bert, bert_lora, gpt2, sentences, texts
from transformers import TrainerCallback, TrainingArguments

from privgrad.accounting.accountant import epsilon, rounded_up
from privgrad.integrations import huggingface_start as start
from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.integrations.huggingface_arguments import tell

NUMBERS: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-2, "num_examples": 64}
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.usefixtures("by_rdp_here"),
]


def trainer_of(folder: Path, model: nn.Module, data: list[dict[str, Any]] | None = None, **options: Any):
    args = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_steps=8, **options.pop("arguments", {})
    )
    return PrivateTrainer(model, args, train_dataset=texts(64) if data is None else data, **NUMBERS, **options)


@pytest.mark.parametrize("make", [bert, bert_lora])
def test_head_and_fine_tuning_cost_the_target_together(tmp_path: Path, make: Any):
    model = make()
    trainer = trainer_of(tmp_path, model)
    plan = trainer.private_grad.plan
    assert (plan.expected_batch_size, plan.steps, plan.max_grad_norm) == (6, 32, 0.1)
    trainer.train()  # without a warning that the model was trained before
    own, head = trainer.private_grad.ledger, tmp_path / "head" / "ledger.jsonl"
    assert [ledger.path for ledger in trainer.ledgers] == [head, own.path]
    assert {ledger.path for ledger in pg.ledgers_of(model)} == {head, own.path}
    parts = [ledger.epsilon(delta=1e-2) for ledger in trainer.ledgers]
    assert max(parts) < trainer.epsilon <= 8.0
    assert trainer.epsilon == epsilon([one for ledger in trainer.ledgers for one in ledger.charged], delta=1e-2)
    assert trainer.state.log_history[-1]["epsilon"] == trainer.epsilon
    trainer.save_model(str(tmp_path / "saved"))
    assert "| other released gradients | 300 |" in (tmp_path / "saved" / "README.md").read_text()
    said = (tmp_path / "saved" / "statement.txt").read_text()
    assert "later plan" not in said  # both plans were made at once


def test_the_classifier_predicts_as_the_head_does(tmp_path: Path):
    model = bert(hidden_dropout_prob=0.5)
    layer = start.last_layer(model)
    assert layer is not None
    assert layer.linear is model.get_submodule("classifier")
    plan = pg.PrivacyPlan(
        num_examples=64, sample_rate=1.0, expected_batch_size=64, steps=300, noise_multiplier=5.0, max_grad_norm=1.0
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask")
        columns = {name: torch.stack([row[name] for row in rows]) for name in names}
        return columns | {"labels": torch.tensor([row["label"] for row in rows])}

    data = texts(64)
    data[3]["label"] = -100  # a row without a label
    assert start.start_from_head(model, layer, data, collate, plan, tmp_path).releases == 300
    head_weights = torch.load(tmp_path / "checkpoint.pt", weights_only=False)["model"]["linear.weight"]
    assert torch.allclose(layer.linear.weight * layer.norm, head_weights)
    batch = collate(data)
    states = start._inputs_of(layer.linear, model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    model.eval()
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(1)
    assert torch.equal(found, nn.functional.linear(states, head_weights).argmax(1))


@pytest.mark.parametrize("make", [bert, bert_lora])
def test_a_resumed_training_counts_the_head_and_trains_none(tmp_path: Path, monkeypatch: Any, make: Any):
    trainer_of(tmp_path, make(), arguments={"max_steps": 16}).train()
    monkeypatch.setattr(start, "start_from_head", lambda *_: pytest.fail("a second head"))
    resumed = trainer_of(tmp_path, make(), arguments={"max_steps": 16})
    resumed.train(resume_from_checkpoint=True)
    assert [ledger.releases for ledger in resumed.ledgers] == [300, 16]
    resumed.save_model(str(tmp_path / "saved"))
    assert "earlier_trainings" not in (tmp_path / "saved/README.md").read_text()  # its own checkpoint is none
    assert "unknown epsilon" not in (tmp_path / "saved/statement.txt").read_text()


def test_a_killed_training_says_what_it_has_spent_and_what_is_possible(tmp_path: Path):
    class Kill(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    killed = trainer_of(tmp_path, bert(), callbacks=[Kill()])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    spent = rounded_up(killed.epsilon, 4)  # of the head too
    again = trainer_of(tmp_path, bert())
    with pytest.raises(pg.BudgetExceededError, match=rf"got 1 releases .* cost epsilon = {spent};.*new folder"):
        again.train()
    with pytest.raises(pg.PrivacyError, match=r"got 0 in .* in another output_dir, .*: 1 steps were released here"):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(pg.BudgetExceededError):  # the ledger is not locked by the failed call
        trainer_of(tmp_path, bert()).train()


@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (gpt2, sentences(64), {}),  # no classifier
        (bert, texts(64), {"head_first": False}),
        (bert, texts(64), {"loss_fn": lambda model, batch: None}),
        (lambda: bert(num_labels=1), texts(64), {}),  # a number
    ],
)
def test_other_trainings_spend_all_of_epsilon_on_fine_tuning(tmp_path: Path, make: Any, data: Any, options: Any):
    trainer = trainer_of(tmp_path, make(), data, **options)
    assert trainer._layer is None
    assert 7.9 < trainer.private_grad.plan.epsilon() <= 8.0


def test_the_numbers_that_decide_privacy_are_asked_for(tmp_path: Path):
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(pg.PrivacyError, match=r"delta, num_examples to be given without a plan, got None; give target"):
        PrivateTrainer(bert(), args, train_dataset=texts(), target_epsilon=8.0)
    plan = trainer_of(tmp_path / "one", bert()).private_grad.plan
    with pytest.raises(pg.PrivacyError, match="plan to replace target_epsilon, delta and num_examples"):
        PrivateTrainer(bert(), args, train_dataset=texts(), plan=plan, target_epsilon=8.0)


def test_typed_arguments_decide_the_plan(tmp_path: Path):
    typed = {"per_device_train_batch_size": 16, "num_train_epochs": 2, "max_grad_norm": 0.5}
    plan = trainer_of(tmp_path, bert(), arguments=typed).private_grad.plan
    assert (plan.expected_batch_size, plan.steps, plan.max_grad_norm) == (16, 8, 0.5)


def test_normal_facts_are_seen_once_and_are_no_warnings(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    tell("a fact")
    assert capsys.readouterr().err == "PrivateTrainer: a fact\n"
    caplog.set_level(logging.INFO)
    tell("another")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", "PrivateTrainer: another")]
    assert not capsys.readouterr().err
    logging.getLogger("privgrad").setLevel(logging.ERROR)
    try:
        tell("a third")
    finally:
        logging.getLogger("privgrad").setLevel(logging.NOTSET)
    assert not capsys.readouterr().err


def test_a_classifier_with_several_labels_starts_from_a_head_too(tmp_path: Path):
    model = bert(num_labels=3, problem_type="multi_label_classification")
    data = [{**row, "label": [1.0, 0.0, float(index % 2)]} for index, row in enumerate(texts(64))]
    trainer = trainer_of(tmp_path, model, data, arguments={"max_steps": 2})
    trainer.train()
    assert len(trainer.ledgers) == 2
    weights = torch.load(tmp_path / "head" / "checkpoint.pt", weights_only=False)["model"]["linear.weight"]
    assert weights.shape[0] == 3
