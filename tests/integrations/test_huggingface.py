"""PrivateTrainer: our step, the Trainer's everything else; killed runs resume; adapters are trained."""

import copy
import json
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import active_children
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Subset

import privgrad as pg
from conftest import make_plan
from privgrad.accounting.accountant import epsilon
from privgrad.training.checkpoint import read_checkpoint
from scripts import example, how_it_ended, kill_again_and_again

pytest.importorskip("accelerate")
pytest.importorskip("peft")
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from peft import (
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from privgrad.accounting.accountant import rounded_up
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import gradients
from privgrad.gradient.reference import Vmap
from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.integrations.huggingface_arguments import HEAD_NOISE_STEP, NOISE_STEP, POOLER_NOISE_STEP
from privgrad.integrations.huggingface_models import causal_lm_losses, classification_losses

LENGTH = 6
STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")


def bert(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    options["num_labels"] = 2
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    make_config: Any = BertConfig
    config = make_config(vocab_size=20, max_position_embeddings=LENGTH, **(options | dropout | changed))
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    make_config: Any = GPT2Config
    config = make_config(
        vocab_size=20, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **dropout
    )
    return GPT2LMHeadModel(config)


def gpt2_lora() -> nn.Module:
    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), adapters)  # pyright: ignore[reportArgumentType]


def bert_lora() -> nn.Module:
    return get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))  # pyright: ignore[reportArgumentType]


def texts(count: int = 32) -> list[dict[str, Any]]:
    """Padded to a public length; the label is which of two tokens comes first. One column is not the model's."""
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        size = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < size).long()
        ids = torch.randint(4, 20, (LENGTH,), generator=generator)
        ids[0] = 2 + index % 2
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "label": index % 2, "row": index})
    return rows


def sentences(count: int = 32) -> list[dict[str, Any]]:
    def labeled(row: dict[str, Any]) -> dict[str, Any]:
        masked = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
        return {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": masked}

    return [labeled(row) for row in texts(count)]


def make_trainer(
    folder: Path,
    model: nn.Module,
    data: list[dict[str, Any]],
    *,
    optimizer: Any = None,
    arguments: dict[str, Any] | None = None,
    planned: dict[str, Any] | None = None,
    kind: type[PrivateTrainer] = PrivateTrainer,
    **options: Any,
) -> PrivateTrainer:
    plan = make_plan(**({"steps": STEPS, "seed": 5, "noise_multiplier": 0.5} | (planned or {})))
    numbers: dict[str, Any] = {
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.expected_batch_size,
        "max_grad_norm": 0.0,
        "save_steps": 5,
        "logging_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **(numbers | (arguments or {})))
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.01) if optimizer is None else optimizer
    return kind(
        model, args, plan=plan, train_dataset=data, optimizers=options.pop("optimizers", (optimizer, None)), **options
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


@pytest.mark.parametrize(
    ("make", "make_texts", "loss_fn", "workers"),
    [(bert, texts, classification_losses, 1), (gpt2_lora, sentences, causal_lm_losses, 0)],
)
def test_every_private_gradient_equals_the_oracles(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    make_texts: Callable[[], list[dict[str, Any]]],
    loss_fn: Any,
    workers: int,
):
    steps, others = 4, active_children()
    data, model, alone = make_texts(), make(), make()
    arguments = {"lr_scheduler_type": "constant", "dataloader_num_workers": workers}
    trainer = make_trainer(tmp_path, model, data, planned={"steps": steps}, arguments=arguments)
    seen_workers = set[int | None]()
    trainer.private_grad.register_raw_observer(
        lambda _: seen_workers.update(child.pid for child in active_children() if child not in others)
    )
    seen: list[pg.NoisyGradient] = []
    trainer.private_grad.register_raw_observer(lambda step: seen.append(step.released))
    trainer.train()
    assert len(seen_workers) == workers
    private_grad = pg.PrivateGradient(alone, loss_fn, trainer.private_grad.plan)
    optimizer = pg.optim.AdamBC(alone.named_parameters(), lr=0.01)
    columns = ("input_ids", "attention_mask")
    plain = [{name: row[name] for name in columns} | {"labels": row.get("label", row.get("labels"))} for row in data]
    for batch, released in zip(private_grad.plan.batches(plain), seen, strict=True):
        gradient = private_grad(batch)
        assert gradient.noise_std == released.noise_std
        assert all(torch.equal(value, released[name]) for name, value in gradient.items())
        optimizer.step(grad=gradient)
    assert equal(model, alone)


@pytest.mark.parametrize(
    ("make", "data", "losses"), [(bert, texts(4), classification_losses), (gpt2, sentences(4), causal_lm_losses)]
)
def test_losses_are_those_of_transformers(make: Callable[[], nn.Module], data: list[dict[str, Any]], losses: Any):
    model = make().eval()
    names = ("input_ids", "attention_mask")
    labels = torch.stack([torch.as_tensor(row.get("label", row.get("labels"))) for row in data])
    batch = {name: torch.stack([row[name] for row in data]) for name in names} | {"labels": labels}
    alone = [model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(4)]
    torch.testing.assert_close(losses(model, batch), torch.stack(alone))


def test_losses_that_are_not_transformers_own_are_refused(tmp_path: Path):
    class Weighted(PrivateTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    model = bert()
    args = make_trainer(tmp_path / "a", model, texts()).args
    plan, optimizer = make_plan(steps=STEPS, seed=5), pg.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(pg.PrivacyError, match=r"got Weighted\.compute_loss; give loss_fn too"):
        Weighted(model, args, plan=plan, train_dataset=texts(), optimizers=(optimizer, None))
    balanced: Any = gpt2()
    balanced.config.output_router_logits = True
    with pytest.raises(pg.PrivacyError, match="one loss per example, got output_router_logits=True"):
        make_trainer(tmp_path / "b", balanced, sentences())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_learned_prompts_are_trained_by_the_loss_of_transformers(tmp_path: Path):
    def shorter(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value[: LENGTH - 2] for name, value in row.items()} for row in rows]

    data = shorter(sentences())
    prompts: Any = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model: Any = get_peft_model(gpt2(), prompts)  # pyright: ignore[reportArgumentType]
    batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
    alone = [model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(4)]
    torch.testing.assert_close(causal_lm_losses(model, batch), torch.stack(alone))
    for options in ({}, {"engine": "vmap"}):
        trainer = make_trainer(tmp_path / str(len(options)), model, data, private_options=options)
        trainer.train()
        assert trainer.private_grad.ledger.releases == STEPS


OF_PEFT: dict[str, PeftConfig] = {
    "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "prompts of an encoder": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
    "prefixes": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "LoRA": LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "LoRA of embeddings": LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["wte"]),
    "DoRA": LoraConfig(task_type="CAUSAL_LM", use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
}


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("kind", OF_PEFT)
def test_every_kind_of_adapter_has_the_gradients_of_single_examples(kind: str):
    model = get_peft_model(gpt2(), copy.deepcopy(OF_PEFT[kind])).double().eval()  # pyright: ignore[reportArgumentType]
    for name, parameter in model.named_parameters():
        if "lora" in name and "_B" in name:  # zero at first: the other factor would have no gradient
            nn.init.normal_(parameter, std=0.1)
    rows = [{name: value[: LENGTH - 2] for name, value in row.items()} for row in sentences()[:3]]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = [engine(model, causal_lm_losses)(batch) for engine in (Vmap, Factored)]
    for index in range(3):
        single = gradients(model, causal_lm_losses, {name: value[index : index + 1] for name, value in batch.items()})
        assert any(wanted.norm() > 0 for wanted in single.values())
        for factors in found:
            for name, wanted in single.items():
                torch.testing.assert_close(factors[name].dense()[index], wanted, rtol=1e-5, atol=1e-8)


def test_layers_may_be_called_otherwise_in_evaluation_mode(tmp_path: Path):
    dora = LoraConfig(task_type="CAUSAL_LM", r=2, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True)
    trainer = make_trainer(tmp_path, get_peft_model(gpt2(), dora), sentences())  # pyright: ignore[reportArgumentType]
    trainer.train()
    assert trainer.private_grad.ledger.releases == STEPS


def accuracy(model: nn.Module, data: list[dict[str, Any]]) -> float:
    ids, mask = (torch.stack([row[name] for row in data]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=mask).logits.argmax(1)
    return (found == torch.tensor([row["label"] for row in data])).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("noise_multiplier", "learns"), [(0.3, True), (1000.0, False)])
def test_noise_decides_what_is_learned(tmp_path: Path, noise_multiplier: float, learns: bool):
    model, data = bert(), texts(200)
    numbers = {"num_examples": 200, "sample_rate": 0.2, "expected_batch_size": 40, "steps": 25, "delta": 1e-3}
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
    planned = numbers | {"noise_multiplier": noise_multiplier, "seed": None}
    trainer = make_trainer(tmp_path, model, data, optimizer=optimizer, planned=planned)
    trainer.train()
    assert (accuracy(model, data) > 0.9) == learns
    promised = trainer.private_grad.plan.epsilon()
    assert trainer.private_grad.ledger.epsilon(delta=1e-3) == promised
    assert trainer.state.log_history[-1]["epsilon"] == promised


def test_a_tiny_clip_norm_freezes_the_model_and_that_is_refused(tmp_path: Path):
    model = bert()
    before = weights(model)
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.01)
    trainer = make_trainer(tmp_path, model, texts(), optimizer=optimizer, planned={"max_grad_norm": 1e-10})
    with pytest.raises(pg.PrivacyError, match="updates without effect on"):
        trainer.train()
    # A bias that is zero moves by what is added to it, however little.
    assert all((value - before[name]).abs().max() < 1e-10 for name, value in weights(model).items())


class Stop(TrainerCallback):
    """Ends the process, or the training, in the midst of a step."""

    def __init__(self, step: int, *, kill: bool) -> None:
        self.step, self.kill = step, kill

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (bert_lora, {}),
        pytest.param(
            bert,
            {"optimizers": (None, None), "noise_step": 0.02, "arguments": {"weight_decay": 0.1, "max_steps": -1}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_seeded_run_that_was_interrupted_ends_as_if_it_had_not_been(
    tmp_path: Path, make: Callable[[], nn.Module], options: dict[str, Any]
):
    data = texts()
    whole = make_trainer(tmp_path / "whole", make(), data, **options)
    whole.train()
    cut = make_trainer(tmp_path / "cut", make(), data, **options, callbacks=[Stop(8, kill=False)])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    cut.private_grad.ledger.close()
    resumed = make_trainer(tmp_path / "cut", make(), data, **options)
    with pytest.raises(pg.BudgetExceededError, match="to be empty at the start"):
        resumed.train()
    resumed.train(resume_from_checkpoint=True)
    assert equal(whole.private_step.model, resumed.private_step.model)
    assert resumed.state.global_step == resumed.private_grad.ledger.releases == STEPS
    logged = [[(row["step"], row.get("learning_rate")) for row in t.state.log_history] for t in (whole, resumed)]
    assert logged[0] == logged[1]
    resumed.private_grad.ledger.close()
    again = make_trainer(tmp_path / "cut", make(), data, **options)
    assert again.train(resume_from_checkpoint=True).global_step == STEPS
    assert equal(whole.private_step.model, again.private_step.model)


def test_a_killed_run_goes_on_and_what_it_lost_stays_spent(tmp_path: Path):
    def train() -> None:
        make_trainer(tmp_path, bert(), texts(), planned={"seed": None}, callbacks=[Stop(7, kill=True)]).train()

    assert how_it_ended(train) == -signal.SIGKILL
    # Killed once more, as it wrote a checkpoint.
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text('{"global_st')
    trainer = make_trainer(tmp_path, bert(), texts(), planned={"seed": None})
    with pytest.warns(UserWarning, match="2 charged steps had no checkpoint.* ends with 10 updates of 12"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 10
    assert trainer.private_grad.ledger.releases == STEPS


EPOCHS = {"seed": None, "delta": 1e-3, "sampling": "epochs"}  # of 4 steps


@pytest.mark.parametrize(("has_key", "updates"), [(True, 11), (False, 9)])
def test_a_killed_run_goes_on_within_its_epoch_or_with_the_next_one(tmp_path: Path, has_key: bool, updates: int):
    def train() -> None:
        make_trainer(tmp_path, bert(), texts(), planned=EPOCHS, callbacks=[Stop(6, kill=True)]).train()

    assert how_it_ended(train) == -signal.SIGKILL
    key = tmp_path / "_ledger.jsonl.epoch"
    assert key.exists()
    if not has_key:
        key.unlink()
    trainer = make_trainer(tmp_path, bert(), texts(), planned=EPOCHS)
    why = "1 charged steps had no checkpoint" if has_key else "the key of the epoch before step 8 is not here"
    with pytest.warns(UserWarning, match=f"{why}.* ends with {updates} updates of 12"):
        trainer.train(resume_from_checkpoint=True)
    ledger = trainer.private_grad.ledger
    assert (trainer.state.global_step, ledger.participations) == (updates, STEPS)
    assert not key.exists()


def test_what_the_trainer_uploads_has_no_key(tmp_path: Path):
    cut = make_trainer(tmp_path, bert(), texts(), planned=EPOCHS, callbacks=[Stop(6, kill=False)])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    assert list(tmp_path.glob("*.epoch"))
    found = uploaded(tmp_path, "checkpoint-5")
    assert {"ledger.jsonl", "privgrad.pt"} <= set(found)
    assert not [name for name in found if name.endswith(".epoch")]


def uploaded(folder: Path, *checkpoints: str) -> list[str]:
    """The files that the Trainer uploads from its output folder."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def upload(*, folder_path: Any, ignore_patterns: Any = None, **_: Any) -> Any:
            done = Future[None]()
            done.set_result(None)
            files = [f"{path.relative_to(folder_path)}" for path in Path(folder_path).rglob("*") if path.is_file()]
            found.extend(filter_repo_objects(files, ignore_patterns=ignore_patterns))
            return done

        def created(*_: Any, **__: Any) -> Any:
            return SimpleNamespace(repo_id="one/two")

        patch.setattr(HfApi, "upload_folder", lambda _, **options: upload(**options))
        patch.setattr(HfApi, "create_repo", created)
        arguments = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True}
        with TemporaryDirectory() as other:
            trainer = make_trainer(Path(other), bert(), texts(), planned=EPOCHS, arguments=arguments)
            trainer.args.output_dir = str(folder)
            for checkpoint in checkpoints:
                trainer._push_from_checkpoint(str(folder / checkpoint))
            trainer.save_model = trainer.create_model_card = lambda *_, **__: None
            trainer.push_to_hub()
    return found


def test_a_callback_that_stops_within_an_epoch_costs_all_epochs(tmp_path: Path):
    scores = iter([0.5, 0.4, 0.3])
    options: dict[str, Any] = {
        "arguments": SELECTING,
        "planned": EPOCHS,
        "eval_dataset": texts(),
        "compute_metrics": lambda _: {"score": next(scores)},
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
    }
    trainer = make_trainer(tmp_path, bert(), texts(), selection_data="public", **options)
    trainer.train()
    assert (trainer.state.global_step, trainer.private_grad.ledger.participations) == (6, STEPS)
    assert not list(tmp_path.glob("*.epoch"))


def test_a_number_of_epochs_counts_those_of_the_plan(tmp_path: Path):
    numbers = EPOCHS | {"sample_rate": 2 / 8, "participations": 2, "steps": 16}
    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2}
    trainer = make_trainer(tmp_path, bert(), texts(), planned=numbers, arguments=options)
    assert trainer.args.max_steps == 16
    with pytest.raises(pg.PrivacyError, match=r"num_train_epochs=4 \(the plan has 2\)"):
        make_trainer(tmp_path, bert(), texts(), planned=numbers, arguments=options | {"num_train_epochs": 4})


@pytest.mark.slow
def test_a_run_that_lost_more_than_an_epoch_ends_and_loses_no_more(tmp_path: Path):
    def trainer(*callbacks: TrainerCallback) -> PrivateTrainer:
        options: dict[str, Any] = {"planned": {"seed": None}, "arguments": {"save_steps": 6}}
        return make_trainer(tmp_path, bert(), texts(), **options, callbacks=[*callbacks])

    cut = trainer(Stop(11, kill=False))
    assert cut.private_step.epoch_steps < 11 - 6
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    cut.private_grad.ledger.close()
    resumed = trainer()
    with pytest.warns(UserWarning, match="5 charged steps had no checkpoint.* ends with 7 updates of 12"):
        assert resumed.train(resume_from_checkpoint=True).global_step == 7
    resumed.private_grad.ledger.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of further losses
        again = trainer()
        assert again.train(resume_from_checkpoint=True).global_step == 7
    assert equal(resumed.private_step.model, again.private_step.model)
    again.private_grad.ledger.close()
    spent = trainer()
    with pytest.warns(UserWarning, match="6 charged steps had no checkpoint.* ends with 6 updates of 12"):
        assert spent.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6")).global_step == 6
    spent.save_model(str(tmp_path / "model"))


def test_a_callback_that_ends_an_epoch_early_gets_the_next_epoch(tmp_path: Path):
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    trainer = make_trainer(tmp_path, bert(), texts(), callbacks=[EndEpoch()])
    trainer.train()
    assert trainer.state.global_step == trainer.private_grad.ledger.releases == 2 + 2 + 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 5])
def test_killed_at_random_moments_everything_released_was_charged(tmp_path: Path, seed: int | None):
    folder, steps = tmp_path / "run", 40

    def trainer(folder: Path) -> PrivateTrainer:
        return make_trainer(folder, bert(), texts(), planned={"seed": seed, "steps": steps})

    def train() -> None:
        trainer(folder).train(resume_from_checkpoint=any(folder.glob("checkpoint-*/trainer_state.json")))

    kill_again_and_again(train, folder, kills=2)
    resumed = trainer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that were lost: they are what this is about
        resumed.train(resume_from_checkpoint=True)
    assert resumed.private_grad.ledger.releases == steps
    if seed is not None:
        whole = trainer(tmp_path / "whole")
        whole.train()
        assert resumed.state.global_step == steps
        assert equal(whole.private_step.model, resumed.private_step.model)


def test_a_damaged_checkpoint_is_refused_whatever_byte_has_changed(tmp_path: Path):
    trainer = make_trainer(tmp_path, bert(), texts(), planned={"steps": 5})
    trainer.train()
    path = tmp_path / "checkpoint-5" / "privgrad.pt"
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(pg.PrivacyError, match=r"PrivateTrainer: .*privgrad\.pt to be a complete checkpoint"):
            trainer.train(resume_from_checkpoint=True)
    path.write_bytes(whole)
    assert trainer.train(resume_from_checkpoint=True).global_step == 5


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    planned = {"steps": 5, "seed": None}  # under one seed, both would be the same run
    make_trainer(tmp_path / "one", bert(), texts(), planned=planned).train()
    other = make_trainer(tmp_path / "other", bert(), texts(), planned=planned)
    with pytest.raises(
        pg.PrivacyError, match=r"no step that is not in the ledger, got 5 steps, not those of its ledger"
    ):
        other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-5"))
    with pytest.raises(pg.PrivacyError, match="to find a complete checkpoint"):
        other.train(resume_from_checkpoint=True)
    other.train()
    with pytest.raises(pg.PrivacyError, match=r"no step .*, got 5 steps, not those of its ledger of 5 releases"):
        other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-5"))
    other.private_grad.ledger.close()
    model = bert()
    sgd = pg.optim.SGD(model.named_parameters(), lr=0.1)
    changed = make_trainer(tmp_path / "other", model, texts(), optimizer=sgd, planned=planned)
    with pytest.raises(pg.PrivacyError, match="to be of this run, got a checkpoint with optimizer AdamBC, now SGD"):
        changed.train(resume_from_checkpoint=True)
    changed.private_grad.ledger.close()
    clipped = make_trainer(
        tmp_path / "other", bert(), texts(), private_options={"clip": pg.clip.Automatic()}, planned=planned
    )
    with pytest.raises(
        pg.PrivacyError, match=r"to be of this run, got a checkpoint with clip Flat\(\), now Automatic\(gamma=0\.01\)"
    ):
        clipped.train(resume_from_checkpoint=True)


def test_a_run_resumes_with_the_parameters_that_it_trained(tmp_path: Path):
    def trainer_of(*frozen: str) -> PrivateTrainer:
        model = bert()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return make_trainer(tmp_path, model, texts(), planned={"steps": 6, "seed": None})

    first = trainer_of("bert.embeddings")
    first.train()
    first.private_grad.ledger.close()
    other = trainer_of()
    with pytest.raises(
        pg.PrivacyError, match=r"a checkpoint with bert\.embeddings\..* None, now trained, .*resume with the same"
    ):
        other.train(resume_from_checkpoint=True)
    assert other.private_grad.ledger.releases == 6
    other.private_grad.ledger.close()
    trainer_of("bert.embeddings").train(resume_from_checkpoint=True)


def test_a_folder_without_a_checkpoint_says_what_is_possible(tmp_path: Path):
    trainer = make_trainer(tmp_path, bert(), texts(), arguments={"save_strategy": "no"}, planned={"seed": None})
    with pytest.raises(pg.PrivacyError, match=r"got 0 in .*; train without resume_from_checkpoint\.$"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(pg.PrivacyError, match=r"in another output_dir, .* both deltas: 12 steps were released"):
        trainer.train(resume_from_checkpoint=True)


def test_epochs_schedules_and_evaluations_are_the_trainers(tmp_path: Path):
    data = texts()
    arguments = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer = make_trainer(
        tmp_path,
        bert(),
        data,
        arguments=arguments | {"metric_for_best_model": "loss"},
        eval_dataset=texts(),
        selection_data="public",
    )
    result = trainer.train()
    history = trainer.state.log_history
    assert [row["step"] for row in history if "eval_loss" in row] == [4, 8, 12]  # 1 / sample_rate steps an epoch
    rates = [row["learning_rate"] for row in history if "learning_rate" in row]
    assert rates == pytest.approx([0.01 * (STEPS - step + 1) / STEPS for step in (3, 6, 9, 12)])
    assert result.training_loss is None


def test_nothing_private_is_logged_or_saved(tmp_path: Path):
    arguments = {"logging_strategy": "steps", "logging_steps": 1, "save_steps": 2}
    trainer = make_trainer(tmp_path, bert(), texts(), planned={"steps": 2}, arguments=arguments)
    result = trainer.train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0
    assert state["num_input_tokens_seen"] == 0
    rows = [*state["log_history"], *trainer.state.log_history, result.metrics]
    assert not {"loss", "train_loss", "grad_norm"} & {name for row in rows for name in row}


@pytest.mark.usefixtures("by_rdp_here")
def test_what_a_saved_folder_holds(tmp_path: Path):
    trainer = make_trainer(tmp_path / "run", bert_lora(), texts(), planned={"steps": 2, "seed": None, "delta": 1e-3})
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    weights = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in (tmp_path / "final").iterdir()} == weights | {"statement.txt"}
    state = {"optimizer.pt", "privgrad.pt", "scheduler.pt", "trainer_state.json"}
    assert {path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()} == weights | state
    assert read_checkpoint(tmp_path / "run" / "checkpoint-2" / "privgrad.pt").keys() == {
        "version", "seed", "settings", "private_grad", "ledger", "trained",
    }  # fmt: skip
    assert "train_runtime" in json.dumps(trainer.state.log_history)  # why the Trainer's state is private

    pg.save(trainer.private_grad.model, tmp_path / "published", ledger=trainer.private_grad.ledger)
    held = load_file(tmp_path / "published" / "model.safetensors")
    own = trainer.private_grad.model.state_dict()
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], own[name]) for name in own)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "its own clipping": ({"max_grad_norm": 0.5}, r"set max_grad_norm=0.0 \(the plan clips each example to 1\)"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "set gradient_accumulation_steps=1"),
    "sampling by length": ({"train_sampling_strategy": "group_by_length"}, "set train_sampling_strategy='random'"),
    "another batch size": ({"per_device_train_batch_size": 4}, r"set .*=8 \(to save memory, give .*size': 4"),
    "other steps": ({"max_steps": 5}, f"set max_steps={STEPS}"),
    "other epochs": ({"max_steps": -1, "num_train_epochs": 4}, "leave out num_train_epochs, or plan for steps=16"),
    "a batch size of its own": ({"auto_find_batch_size": True}, "set auto_find_batch_size=False"),
    "counting tokens": ({"include_num_input_tokens_seen": "all"}, "set include_num_input_tokens_seen='no'"),
    "memory of private batches": ({"skip_memory_metrics": False}, "set skip_memory_metrics=True"),
    "printed activations": ({"debug": "underflow_overflow"}, r"set debug=\[\]"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "set label_smoothing_factor=0.0"),
    "noisy embeddings": ({"neftune_noise_alpha": 5.0}, "set neftune_noise_alpha=None"),
    "fp16": ({"fp16": True}, r"set fp16=False \(for mixed precision, set bf16=True\)"),
    "skipping": ({"ignore_data_skip": True}, "set ignore_data_skip=False"),
}


@pytest.mark.parametrize(("arguments", "remedy"), REFUSED.values(), ids=REFUSED)
def test_options_that_change_or_reveal_the_step_are_refused(tmp_path: Path, arguments: dict[str, Any], remedy: str):
    with pytest.raises(pg.PrivacyError, match=f"to leave the private step to the plan.*; {remedy}"):
        make_trainer(tmp_path, bert(), texts(), arguments=arguments)


@pytest.mark.parametrize("optimizers", [None, torch.optim.SGD, "AdamBC", (), (None, "linear")], ids=str)
def test_what_is_no_pair_with_a_private_optimizer_is_refused(tmp_path: Path, optimizers: Any):
    is_pair = isinstance(optimizers, tuple) and len(cast(Any, optimizers)) == 2
    with pytest.raises(
        pg.PrivacyError if is_pair else (TypeError, ValueError),
        match=r"got optimizers=\(.*\); give optimizers=" if is_pair else None,
    ):
        make_trainer(tmp_path, bert(), texts(), optimizers=optimizers)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_all_conflicts_are_named_at_once(tmp_path: Path):
    model, plan = bert(), make_plan(steps=STEPS, delta=1e-3)
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=5, max_grad_norm=0.5, gradient_accumulation_steps=4, learning_rate=0.1
    )
    with pytest.raises(pg.PrivacyError) as refused:
        PrivateTrainer(
            model,
            args,
            plan=plan,
            train_dataset=texts(),
            noise_step=0.1,
            optimizers=(pg.optim.SGD(model.named_parameters(), lr=0.2), None),
            data_collator=DataCollatorWithPadding(Tokenizer()),  # pyright: ignore[reportArgumentType]
            private_options={"ledger": "mine"},
            model_init=bert,
        )
    named = (
        *("num_train_epochs=5 (the plan has 3)", "max_grad_norm=0.5", "gradient_accumulation_steps=4"),
        *("noise_step=0.1 next to optimizers", "learning_rate=0.1 next to optimizers", "model_init (a function)"),
        *("private_options with ledger", "a data_collator with padding=True"),
    )
    assert [name for name in named if name not in str(refused.value).replace("5.0", "5")] == []
    assert not (tmp_path / "ledger.jsonl").exists()


def test_what_the_plan_decides_can_be_left_out(tmp_path: Path):
    """The least that a user types; the arguments stay as they were given."""
    plan, args = make_plan(steps=STEPS, delta=1e-3), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = PrivateTrainer(bert(), args, plan=plan, train_dataset=texts())
    trainer.train()
    assert trainer.state.global_step == trainer.private_grad.ledger.releases == STEPS
    assert trainer.args.per_device_train_batch_size == plan.expected_batch_size
    assert (args.max_steps, args.max_grad_norm) == (-1, 1.0)
    optimizer: Any = trainer.optimizer
    rates = {name: group["initial_lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert all(group["lr_is_noise_step"] for group in optimizer.param_groups)
    assert {name for name, rate in rates.items() if rate == HEAD_NOISE_STEP} == {"classifier.weight", "classifier.bias"}
    assert {rate for name, rate in rates.items() if "classifier" not in name} == {NOISE_STEP}


def test_defaults_that_the_plan_replaces_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    plan = make_plan(steps=20, sample_rate=0.5, expected_batch_size=16, delta=1e-3, max_grad_norm=0.5)
    typed: dict[str, Any] = {"num_train_epochs": 3, "per_device_train_batch_size": 8, "max_grad_norm": 1.0}

    def said(**arguments: Any) -> list[str]:
        caplog.clear()
        args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **arguments)
        PrivateTrainer(bert(), args, plan=plan, train_dataset=texts()).private_grad.ledger.close()
        return [one.getMessage() for one in caplog.records if "the plan decides" in one.getMessage()]

    assert said(**typed) == [
        "PrivateTrainer: the plan decides: steps=20 (10 epochs), not num_train_epochs=3; "
        "expected_batch_size=16, not per_device_train_batch_size=8; "
        "max_grad_norm=0.5 for each example, not max_grad_norm=1 of the arguments."
    ]
    assert said() == said(**typed)
    assert said(max_steps=20, per_device_train_batch_size=16, max_grad_norm=0.5) == []


def test_a_pooler_has_a_rate_of_its_own_if_the_encoder_is_frozen(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")

    def rates(folder: str, *frozen: str, **options: Any) -> dict[str, float]:
        model = bert()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        trainer = make_trainer(
            tmp_path / folder, model, texts(), optimizers=(None, None), planned={"seed": None, "steps": 2}, **options
        )
        trainer.train()
        trainer.save_model()
        return {name: rate for one in trainer.state.log_history for name, rate in one.items() if "_step" in name}

    logged = {"arguments": {"logging_steps": 1, "lr_scheduler_type": "constant"}}
    found = rates("frozen", "bert.embeddings", "bert.encoder", **logged)
    assert {"noise_step_pooler": POOLER_NOISE_STEP, "noise_step_head": HEAD_NOISE_STEP}.items() <= found.items()
    assert "noise_step_layers" not in found
    assert "PrivateTrainer: noise step pooler 0.025, noise step head 0.06. Random weights" in caplog.text
    assert "pg.fit_head on stored states" in caplog.text
    card = (tmp_path / "frozen" / "README.md").read_text()
    assert "AdamWBC, noise step pooler 0.025, noise step head 0.06" in card
    more = rates("last", "bert.embeddings", **logged)  # the encoder's layer is trained too
    assert more["noise_step_layers"] == NOISE_STEP
    assert "noise_step_pooler" not in more


def test_a_learning_rate_is_translated_to_a_noise_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    planned = {"seed": None, "steps": 2}
    arguments = {"learning_rate": 2e-5, "lr_scheduler_type": "constant"}
    trainer = make_trainer(tmp_path, bert(), texts(), optimizers=(None, None), planned=planned, arguments=arguments)
    optimizer: Any = trainer.optimizer
    before = optimizer.noise_step
    assert f"learning_rate 2e-05 is noise step {before:.2g} under this plan" in caplog.text
    trainer.train()
    assert optimizer.noise_step == pytest.approx(before)  # that of the noise which was really added


def test_the_head_of_adapters_is_what_peft_trains_as_a_whole(tmp_path: Path):
    for make, data, head in ((bert_lora, texts(), {"classifier"}), (gpt2_lora, sentences(), set[str]())):
        trainer = make_trainer(tmp_path / make.__name__, make(), data, optimizers=(None, None), planned={"seed": None})
        optimizer: Any = trainer.optimizer
        trained = {name for name, p in trainer.private_step.model.named_parameters() if p.requires_grad}
        found = [group["param_names"] for group in optimizer.param_groups if group["lr"] == HEAD_NOISE_STEP]
        of_head = trained.intersection(*found) if found else set[str]()
        assert {name.split(".")[2] for name in of_head} == head
        assert all("lora" in name for name in trained - of_head)


@pytest.mark.parametrize(
    ("rate", "arguments", "settings"),
    [
        (0.25, {}, {"lr": 0.25, "lr_is_noise_step": True}),
        (None, {"learning_rate": 0.25, "adam_beta1": 0.5}, {"lr": 0.25, "lr_is_noise_step": False}),
    ],
)
def test_the_default_optimizer_has_the_arguments_rate(
    tmp_path: Path, rate: float | None, arguments: dict[str, Any], settings: dict[str, Any]
):
    numbers = {"num_train_epochs": 3, "max_steps": -1, "weight_decay": 0.5, **arguments}
    trainer = make_trainer(
        tmp_path, bert(), texts(), arguments=numbers, optimizers=(None, None), noise_step=rate, planned={"seed": None}
    )
    optimizer: Any = trainer.optimizer
    assert optimizer.settings.items() >= settings.items()
    assert optimizer.settings["betas"] == (arguments.get("adam_beta1", 0.9), 0.999)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decay["classifier.weight"] == decay["bert.pooler.dense.weight"] == 0.5
    assert decay["classifier.bias"] == decay["bert.embeddings.LayerNorm.weight"] == 0.0


def test_rates_that_make_no_optimizer_are_refused(tmp_path: Path):
    def refused(words: str, *, planned: Any = None, arguments: Any = None, **options: Any) -> None:
        with pytest.raises(pg.PrivacyError, match=words):
            make_trainer(
                tmp_path, bert(), texts(), planned=planned, arguments=arguments, optimizers=(None, None), **options
            )

    refused("noise_step to be a positive finite number, got 0", noise_step=0.0)
    refused("set learning_rate: there is no noise step", planned={"noise_multiplier": 0.0})
    refused("next to noise_step=0.1; leave out learning_rate or", noise_step=0.1, arguments={"learning_rate": 0.1})
    refused(r"got optim='sgd'; give optimizers=", arguments={"optim": "sgd"})


def test_a_base_class_of_another_trainer_is_refused(tmp_path: Path):
    class Counting(Trainer): ...

    class Both(PrivateTrainer, Counting): ...

    args, plan = TrainingArguments(str(tmp_path)), make_plan(steps=STEPS)
    with pytest.raises(
        pg.PrivacyError, match="got the base class Counting; derive from PrivateTrainer alone: Counting"
    ):
        Both(bert(), args, plan=plan, train_dataset=texts())


def test_trls_collator_pads_to_a_public_length_and_its_trainer_is_refused(tmp_path: Path):
    trl: Any = pytest.importorskip("trl.trainer.sft_trainer")
    rows = [{"input_ids": [4] * size, "labels": [-100] + [4] * (size - 1)} for size in (2, 3, 4, 5) for _ in range(8)]
    collate: Any = trl.DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=LENGTH)
    trainer = make_trainer(tmp_path / "a", gpt2(), rows, data_collator=collate, planned={"steps": 4})
    trainer.train()
    assert trainer.private_grad.ledger.releases == 4
    shorter: Any = trl.DataCollatorForLanguageModeling(pad_token_id=0)
    trainer = make_trainer(tmp_path / "b", gpt2(), rows, data_collator=shorter)
    with pytest.raises(pg.SamplingError, match="pad to a public length"):
        trainer.train()

    Both: Any = type("Both", (PrivateTrainer, trl.SFTTrainer), {})

    with pytest.raises(pg.PrivacyError, match="got the base class SFTTrainer; derive from PrivateTrainer alone"):
        Both(gpt2(), trainer.args, plan=trainer.private_grad.plan, train_dataset=rows)


def test_options_that_change_after_construction_are_refused(tmp_path: Path):
    steps = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}
    trainer = make_trainer(tmp_path / "a", bert(), texts(), arguments=steps)
    with pytest.raises(pg.PrivacyError, match="set gradient_accumulation_steps=1"):
        trainer.train()
    trainer = make_trainer(tmp_path / "b", bert(), texts())
    trainer.args.max_grad_norm = 1.0
    with pytest.raises(pg.PrivacyError, match=r"set max_grad_norm=0\.0"):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 0


def test_a_gradient_that_made_no_update_stops_the_run_before_the_next_is_paid_for(tmp_path: Path):
    class Accumulate(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.gradient_accumulation_steps = 2

    for steps in (STEPS, 1):  # the next step, or the end of the training, finds it
        trainer = make_trainer(
            tmp_path / f"{steps}", bert(), texts(), callbacks=[Accumulate()], planned={"steps": steps}
        )
        with pytest.raises(pg.PrivacyError, match="each released gradient to be used by one update, got 0"):
            trainer.train()
        assert trainer.private_grad.ledger.releases == 1


def test_what_is_unfrozen_and_not_held_by_the_optimizer_is_refused(tmp_path: Path):
    class Unfreeze(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            model.bert.requires_grad_(state.global_step >= 3)

    model: Any = bert()
    model.bert.requires_grad_(False)
    optimizer = pg.optim.SGD([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=0.1)
    trainer = make_trainer(tmp_path, model, texts(), optimizer=optimizer, callbacks=[Unfreeze()])
    with pytest.raises(
        pg.PrivacyError, match=r"to hold every trainable parameter, .*, got an optimizer without bert\."
    ):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 3


@pytest.mark.slow
def test_an_optimizer_may_serve_one_trainer_after_another(tmp_path: Path):
    model = bert()
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    for folder in ("a", "b"):
        trainer = make_trainer(tmp_path / folder, model, texts(), optimizer=optimizer)
        trainer.train()
        assert trainer.private_grad.ledger.releases == STEPS


def test_checkpoints_do_not_tell_how_many_examples_augmentation_drew_for(tmp_path: Path):
    for name, seed in (("a", None), ("b", 5)):
        make_trainer(tmp_path / name, bert(), texts(), planned={"seed": seed, "steps": 5}).train()
    assert not list((tmp_path / "a").rglob("rng_state*"))
    checkpoints = list((tmp_path / "a").glob("checkpoint-*"))
    assert checkpoints
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in checkpoints)
    assert list((tmp_path / "b").rglob("rng_state*"))  # where what was lost is to come out the same


@pytest.mark.slow
def test_the_best_model_may_be_the_one_that_was_resumed_from(tmp_path: Path):
    class Interrupt(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    options: dict[str, Any] = {"arguments": arguments, "planned": {"steps": 6}, "eval_dataset": texts()}
    options["selection_data"] = "public"
    trainer = make_trainer(tmp_path, bert(), texts(), callbacks=[Interrupt()], **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.private_grad.ledger.close()
    resumed = make_trainer(tmp_path, bert(), texts(), **options)
    resumed.train(resume_from_checkpoint=True)  # for one update
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-5")


SELECTING: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


@pytest.mark.usefixtures("by_rdp_here")
def test_a_callback_that_stops_early_fires_and_does_not_lower_epsilon(tmp_path: Path):
    scores = iter([0.5, 0.7, 0.6, 0.4, 0.9, 0.9])
    options: dict[str, Any] = {
        "arguments": SELECTING,
        "planned": {"seed": None, "delta": 1e-5},
        "eval_dataset": texts(),
        "compute_metrics": lambda _: {"score": next(scores)},
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
    }
    trainer = make_trainer(tmp_path, bert(), texts(), selection_data="public", **options)
    trainer.train()
    assert trainer.state.global_step == 8  # the second evaluation in a row below the best one
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert trainer.private_grad.ledger.releases == STEPS
    assert trainer.private_grad.ledger.epsilon(delta=1e-5) == trainer.private_grad.plan.epsilon()
    assert trainer.state.log_history[-1]["epsilon"] == trainer.private_grad.plan.epsilon()
    trainer.save_model()
    assert (
        "| released gradients | 12 |\n| planned gradients | 12 |\n| updates | 4 |"
        in (tmp_path / "README.md").read_text()
    )


def test_data_that_choose_the_model_are_declared(tmp_path: Path):
    stopping = [EarlyStoppingCallback(early_stopping_patience=2)]
    for number, given in enumerate((None, "private")):
        with pytest.raises(pg.PrivacyError, match="otherwise remove EarlyStoppingCallback, load_best_model_at_end"):
            make_trainer(
                tmp_path / str(number),
                bert(),
                texts(),
                arguments=SELECTING,
                eval_dataset=texts(),
                callbacks=stopping,
                selection_data=given,
            )
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    with pytest.raises(pg.PrivacyError, match="selection_data=None with ReduceLROnPlateau"):
        make_trainer(tmp_path / "rate", bert(), texts(), arguments=plateau, eval_dataset=texts())
    later = make_trainer(tmp_path / "later", bert(), texts(), eval_dataset=texts())
    later.add_callback(stopping[0])
    with pytest.raises(pg.PrivacyError, match="with EarlyStoppingCallback"):
        later.train()
    assert later.private_grad.ledger.releases == 0


@pytest.mark.parametrize("named", [False, True])
def test_the_training_data_are_not_evaluated(tmp_path: Path, named: bool):
    data = texts()
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data; evaluate other data"):
        make_trainer(tmp_path / "a", bert(), data, eval_dataset={"own": data} if named else data)
    later = make_trainer(tmp_path / "b", bert(), data)
    later.eval_dataset = cast(Any, data)
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
        later.train()
    assert later.private_grad.ledger.releases == 0
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
        later.evaluate(cast(Any, Subset(cast(Any, data), [0, 1])))


def test_selections_of_the_training_data_are_not_evaluated(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in texts(40)]
    split = datasets.Dataset.from_list(rows).train_test_split(test_size=8, seed=0)
    own, trainer = split["train"], make_trainer(tmp_path, bert(), split["train"], eval_dataset=split["test"])
    for some in (own.select(range(5)), own.shuffle(seed=1), own.shard(4, 0)):
        with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
            trainer.evaluate(some)
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.slow
def test_a_folder_can_be_trained_in_again_once_a_training_has_ended(tmp_path: Path):
    first = make_trainer(tmp_path, bert(), texts())
    first.train()
    assert not first.private_grad.ledger.is_open
    first.save_model()
    second = make_trainer(tmp_path, bert(), texts())
    with pytest.raises(pg.BudgetExceededError, match=r"got 12 releases in .*ledger\.jsonl, which cost epsilon = "):
        second.train()
    assert second.train(resume_from_checkpoint=True).global_step == STEPS


def test_a_card_names_the_private_training_that_the_weights_come_from(tmp_path: Path):
    options: dict[str, Any] = {"planned": {"seed": None, "delta": 1e-3}}
    first = make_trainer(tmp_path / "a", bert(), texts(), **options)
    first.train()
    first.save_model()
    later = BertForSequenceClassification.from_pretrained(tmp_path / "a")
    second = make_trainer(tmp_path / "b", later, texts(), **options)
    with pytest.warns(UserWarning, match=r"trained before, at epsilon = [\d.]+ and delta = 0.001 \(its files say so\)"):
        second.train()
    second.save_model()
    said = "Weights with a privacy statement of their own were loaded into the model: epsilon = "
    for file in ("README.md", "statement.txt"):
        assert said in (tmp_path / "b" / file).read_text()
        assert said not in (tmp_path / "a" / file).read_text()
    load: Any = BertForSequenceClassification.from_pretrained
    third = make_trainer(tmp_path / "c", load(tmp_path / "b"), texts(), **options)
    with pytest.warns(UserWarning, match=r"at epsilon = [\d.]+ and delta = 0.001, after others at epsilon = "):
        third.train()
    of_checkpoint = make_trainer(tmp_path / "d", load(tmp_path / "a" / "checkpoint-5"), texts(), **options)
    with pytest.warns(UserWarning, match="trained before, at an unknown epsilon"):
        of_checkpoint.train()


def test_a_ledger_of_another_plan_stays_open_to_the_right_one(tmp_path: Path):
    options: dict[str, Any] = {"planned": {"seed": None, "delta": 1e-3}}
    make_trainer(tmp_path, bert(), texts(), **options).train()
    with pytest.raises(pg.PrivacyError, match="noise_multiplier"):
        make_trainer(tmp_path, bert(), texts(), planned={**options["planned"], "noise_multiplier": 0.7})
    assert make_trainer(tmp_path, bert(), texts(), **options).private_grad.ledger.is_open


@pytest.mark.parametrize("is_part", [False, True])
def test_a_loop_of_ones_own_warns_of_weights_that_were_trained_before(tmp_path: Path, is_part: bool):
    first = make_trainer(tmp_path, bert(), texts(), planned={"seed": None, "delta": 1e-3})
    first.train()
    first.save_model()
    model: Any = BertForSequenceClassification.from_pretrained(tmp_path)
    whole: Any = torch.nn.ModuleDict({"encoder": model}) if is_part else model

    def losses(_: Any, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")

    ids, labels = torch.stack([row["input_ids"] for row in texts()]), torch.zeros(len(texts()), dtype=torch.long)
    plan = make_plan(sample_rate=1.0, expected_batch_size=len(ids), num_examples=len(ids))
    private_grad = pg.PrivateGradient(whole, losses, plan)
    with pytest.warns(UserWarning, match="trained before, at epsilon = "):
        private_grad(next(iter(plan.batches(torch.utils.data.TensorDataset(ids, labels)))))
    again = make_trainer(tmp_path / "new", bert(), texts(), planned={"seed": None, "delta": 1e-3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # weights of its own
        again.train()


@pytest.mark.parametrize("is_auto", [False, True])
def test_adapters_of_a_folder_are_known_as_trained(tmp_path: Path, is_auto: bool):
    cast(Any, bert()).save_pretrained(tmp_path / "base")
    load: Any = BertForSequenceClassification.from_pretrained
    options: dict[str, Any] = {"planned": {"seed": None, "delta": 1e-3}}
    adapted = get_peft_model(load(tmp_path / "base"), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    first = make_trainer(tmp_path / "a", adapted, texts(), **options)
    first.train()
    first.save_model()
    of_auto: Any = AutoPeftModelForSequenceClassification.from_pretrained
    of_peft: Any = PeftModel.from_pretrained
    folder = tmp_path / "a"
    later = (
        of_auto(folder, is_trainable=True) if is_auto else of_peft(load(tmp_path / "base"), folder, is_trainable=True)
    )
    with pytest.warns(UserWarning, match="trained before, at epsilon = "):
        make_trainer(tmp_path / "b", later, texts(), **options).train()


def test_a_card_says_that_a_training_may_have_been_ended_by_results(tmp_path: Path):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = make_trainer(tmp_path, bert(), texts(), planned={"seed": None, "delta": 1e-3}, callbacks=[Stop()])
    trainer.train()
    trainer.save_model()
    said = "If results decided when to stop, the number here is no guarantee; that of all planned steps is."
    card = (tmp_path / "README.md").read_text()
    assert f"planned steps, 2 are released. {said}" in card


def labeled(value: Any) -> list[dict[str, Any]]:
    return [row if row["row"] else row | {"label": value} for row in texts()]


@pytest.mark.parametrize("value", [None, -1, np.int64(2), torch.tensor(7)])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_labels_that_the_model_cannot_learn_are_refused_before_a_release(tmp_path: Path, value: Any, as_dataset: bool):
    rows: Any = labeled(value)
    if as_dataset:
        datasets = pytest.importorskip("datasets")
        numbers = [
            {name: one.tolist() if isinstance(one, Tensor | np.generic) else one for name, one in row.items()}
            for row in rows
        ]
        rows = datasets.Dataset.from_list(numbers)
    trainer = make_trainer(tmp_path, bert(), rows, planned={"seed": None})
    words = r"label of the example at index 0 to be a class number from 0 to 1, got (None|-1|2|7); correct it"
    with pytest.raises(pg.PrivacyError, match=words):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 0
    trainer.private_grad.ledger.close()


def test_a_column_of_labels_is_asked_for_by_the_names_that_there_are(tmp_path: Path):
    renamed = [{"input_ids": row["input_ids"], "target": row["label"]} for row in texts()]
    trainer = make_trainer(tmp_path / "a", bert(), renamed, planned={"seed": None})
    with pytest.raises(pg.PrivacyError, match="columns input_ids, target; rename it"):
        trainer.train()

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "input_ids": torch.stack([item["input_ids"] for item in items]),
            "label": torch.tensor(len(items) * [0]),
        }

    own = make_trainer(tmp_path / "b", bert(), texts(), data_collator=collate, planned={"seed": None})
    with pytest.raises(KeyError, match="labels"):
        own.train()
    assert trainer.private_grad.ledger.releases == own.private_grad.ledger.releases == 0


def test_persons_in_rows_are_refused_in_an_evaluation_and_named_in_errors(tmp_path: Path):
    persons = [{name: torch.stack([value] * 2) for name, value in row.items() if name != "row"} for row in sentences(4)]
    options: dict[str, Any] = {"planned": {"seed": None, "privacy_unit": "user"}, "arguments": {"max_grad_norm": 0.5}}
    options["private_options"] = {"perturb": pg.perturb.SampleGradient("user")}
    with pytest.raises(pg.PrivacyError, match=r"\(the plan clips each person to 1\)"):
        make_trainer(tmp_path, bert(), texts(), **options)
    trainer = make_trainer(tmp_path, bert(), texts(), **cast(Any, options | {"arguments": {}}))
    for given in (persons, {"others": persons}, [{"input_ids": row["input_ids"].tolist()} for row in persons]):
        trainer.eval_dataset = given  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(pg.PrivacyError, match=r"eval_dataset to hold one text per row"):
            trainer.train()  # before anything is released
    assert trainer.private_grad.ledger.releases == 0


def test_rows_that_may_not_be_persons_are_asked_about(tmp_path: Path):
    users = {"perturb": pg.perturb.SampleGradient("user")}
    planned = {"seed": None, "privacy_unit": "user", "num_examples": 12, "sample_rate": 2 / 3}
    asks = r"declares 12 people, .*2 times as many rows\. Does each row hold all data.* raise it if a public number"
    with pytest.warns(UserWarning, match=asks):  # before anything is spent
        trainer = make_trainer(tmp_path / "a", bert(), texts(), planned=planned, private_options=users)
    assert trainer.private_grad.ledger.releases == 0
    with pytest.warns(UserWarning, match=asks):  # from the same line: Python's default is to print it once
        trainer.train()
    assert trainer.private_grad.ledger.releases == STEPS  # a question, no refusal
    enough = planned | {"num_examples": 24, "sample_rate": 1 / 3}
    make_trainer(tmp_path / "b", bert(), texts(), planned=enough, private_options=users).train()
    with (
        pytest.warns(UserWarning, match=asks),
        pytest.raises(pg.PrivacyError, match=r"private_options=\{'perturb': \."),
    ):
        make_trainer(tmp_path / "c", bert(), texts(), planned=planned)


class Tokenizer:
    """What padding collators ask of one; pads to the longest of the batch."""

    def pad(self, items: list[dict[str, Any]], **_: Any) -> dict[str, Tensor]:
        longest = max(int(item["attention_mask"].sum()) for item in items)
        return {name: torch.stack([item[name][:longest] for item in items]) for name in ("input_ids", "attention_mask")}


def test_collators_that_mix_examples_are_refused(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="padding='max_length'"):
        make_trainer(tmp_path / "a", bert(), texts(), data_collator=DataCollatorWithPadding(Tokenizer()))  # pyright: ignore

    def to_the_longest(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return Tokenizer().pad(items) | {"labels": torch.tensor([item["label"] for item in items])}

    trainer = make_trainer(tmp_path / "b", bert(), texts(), data_collator=to_the_longest)
    with pytest.raises(pg.SamplingError, match="pad to a public length"):
        trainer.train()
    uneven = [{"input_ids": [1] * (1 + row % 3), "label": 0} for row in range(32)]
    trainer = make_trainer(tmp_path / "c", bert(), uneven)
    with pytest.raises(pg.SamplingError, match=r"columns of one public length, got .*; pad each one: tokenizer"):
        trainer.train()


def test_random_masks_of_a_collator_are_refused(tmp_path: Path):
    class Masking(DataCollatorForLanguageModeling):
        def __post_init__(self) -> None: ...

        def __call__(self, features: Any, return_tensors: Any = None) -> dict[str, Tensor]:
            ids = torch.stack([feature["input_ids"] for feature in features])
            return {"input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.5, 1), "labels": ids}

    trainer = make_trainer(tmp_path, gpt2(), sentences(), data_collator=Masking(None))  # pyright: ignore
    with pytest.raises(pg.SamplingError, match="rows that change from call to call"):
        trainer.train()


def test_what_would_be_made_or_run_again_is_refused(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="give model in place of model_init"):
        make_trainer(tmp_path / "a", bert(), texts(), model_init=bert)
    model = bert()
    with pytest.raises(pg.PrivacyError, match=r"got optimizers=\(Adam, None\)"):
        make_trainer(tmp_path / "b", model, texts(), optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(pg.PrivacyError, match=r"images or languages, got Linear; give loss_fn"):
        make_trainer(tmp_path / "c", nn.Linear(2, 2), texts())
    with pytest.raises(TypeError, match="traindataset"):
        make_trainer(tmp_path / "e", bert(), texts(), traindataset=[])


def test_every_adapter_weight_is_trained(tmp_path: Path):
    model = bert_lora()
    before = weights(model)
    assert sum("lora_A" in name for name in before) == sum("lora_B" in name for name in before) == 2
    make_trainer(tmp_path, model, texts(), planned={"noise_multiplier": 0.0}).train()
    after = weights(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_adapters_that_the_optimizer_does_not_know_are_refused(tmp_path: Path):
    """As Opacus issue 820: adapters added after the optimizer was made are never moved, and nothing says so."""
    base = bert()
    optimizer = pg.optim.AdamBC(base.named_parameters(), lr=0.01)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))  # pyright: ignore
    with pytest.raises(
        pg.PrivacyError, match=r"to hold every trainable parameter, .*, got an optimizer without .*lora_A"
    ):
        make_trainer(tmp_path, model, texts(), optimizer=optimizer)


def test_adapters_that_stay_as_they_are_stop_the_run(tmp_path: Path):
    model = bert_lora()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named.items() if "lora_A" not in name]},
        {"params": [(name, p) for name, p in named.items() if "lora_A" in name], "lr": 0.0},
    ]
    trainer = make_trainer(tmp_path, model, texts(), optimizer=pg.optim.AdamBC(groups, lr=0.01))
    with pytest.raises(pg.PrivacyError, match=r"10 updates without effect on .*lora_A"):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 10


def test_adapters_that_no_loss_reaches_are_refused(tmp_path: Path):
    model: Any = bert_lora()

    def loss_fn(_: Any, batch: dict[str, Tensor]) -> Tensor:
        with model.disable_adapter():
            return classification_losses(model, batch)

    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "embeddings" in name)
    trainer = make_trainer(tmp_path, model, texts(), loss_fn=loss_fn)
    with pytest.raises(
        pg.PrivacyError, match=r"every trainable parameter to get a gradient, got no gradient for .*lora_A"
    ):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 0


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = example("huggingface", monkeypatch)(steps=2, folder=str(tmp_path / "one"))
    assert 0 <= measured["eval_accuracy"] <= 1
    assert (tmp_path / "one" / "ledger.jsonl").exists()
    assert 0 < example("lora", monkeypatch)(steps=3, folder=str(tmp_path / "other")) < 10
    assert 0 < example("sft", monkeypatch)(steps=2, folder=str(tmp_path / "third")) < 10
    assert "differential-privacy" in ModelCard.load(tmp_path / "third" / "README.md").data["tags"]


def test_the_prompts_of_an_example_are_no_targets(monkeypatch: pytest.MonkeyPatch):
    collate = example("sft", monkeypatch).__globals__["collate"]
    batch = collate([{"prompt": "ab", "completion": "cd"}, {"prompt": "a" * 70, "completion": "b"}])
    assert batch["labels"].shape == (2, 64)
    assert (batch["labels"][0] != -100).nonzero().flatten().tolist() == [2, 3]
    assert batch["input_ids"][0, :5].tolist() == [*b"abcd", 0]
    assert batch["attention_mask"].sum(1).tolist() == [4, 64]
    assert (batch["labels"][1] == -100).all()


def folder_text(folder: Path) -> str:
    """Everything in a folder that can be read as text."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pt", ".bin", ".safetensors")
    ]
    return "\n".join(path.read_text(errors="ignore") for path in paths)


@pytest.mark.parametrize("make", [bert, bert_lora])
def test_a_saved_model_carries_its_privacy(
    tmp_path: Path, make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
):
    planned = {"seed": None, "delta": 1e-3, "noise_multiplier": 1.5, "steps": 4}
    trainer = make_trainer(tmp_path, make(), texts(), planned=planned)
    trainer.train()
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    trainer.save_model(str(saved))  # again: the section is replaced
    ledger = trainer.private_grad.ledger
    card = ModelCard.load(saved / "README.md")
    privacy: Any = card.data["privacy"]
    assert privacy["epsilon"] == float(rounded_up(ledger.epsilon(delta=1e-3)))
    assert (privacy["delta"], privacy["released_gradients"], privacy["ledger_digest"]) == (1e-3, 4, ledger.head)
    assert {"differential-privacy", "privgrad"} <= set(card.data["tags"])
    assert card.data.get("library_name") == ("peft" if make is bert_lora else None)
    assert card.text.count("## Privacy") == 1
    assert f"| epsilon | {rounded_up(ledger.epsilon(delta=1e-3), 4)} |" in card.text
    assert f"Quote epsilon = {rounded_up(ledger.epsilon(delta=1e-3), 4)}" in (saved / "statement.txt").read_text()
    assert "raw_" not in folder_text(saved)
    assert "metadata block" not in caplog.text


def trained_in_phases(folder: Path, **second: Any) -> PrivateTrainer:
    """The trainer of the second of two trainings of one model: of its head, and of all layers. Both save it."""
    model, phases = bert(), list[dict[str, Any]](({"steps": 4}, {"steps": 3, **second}))
    for number, changed in enumerate(phases):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(number == 1 or name.startswith("classifier"))
        planned: dict[str, Any] = {"seed": None, "delta": 1e-3, "noise_multiplier": 1.5, **changed}
        options = {"perturb": pg.perturb.SampleGradient(planned.get("privacy_unit", "example"))}
        trainer = make_trainer(folder / f"{number}", model, texts(), planned=planned, private_options=options)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
    return trainer  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_card_counts_every_private_training_of_the_model(tmp_path: Path):
    trainer = trained_in_phases(tmp_path, delta=5e-4)
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    privacy: Any = card.data["privacy"]
    assert (privacy["released_gradients"], privacy["other_trainings"], privacy["other_released_gradients"]) == (3, 1, 4)
    assert "| other trainings | 1 |\n| other released gradients | 4 |" in card.text
    charged = [one for ledger in pg.ledgers_of(trainer.private_grad.model) for one in ledger.charged]
    assert privacy["epsilon"] == float(rounded_up(epsilon(charged, delta=5e-4)))
    assert privacy["epsilon"] > trainer.private_grad.ledger.epsilon(delta=5e-4)
    assert "The trainings released 7 noisy gradients." in (tmp_path / "saved" / "statement.txt").read_text()


def test_merged_adapters_keep_their_training(tmp_path: Path):
    model: Any = bert_lora()
    trainer = make_trainer(tmp_path, model, texts(), planned={"seed": None, "steps": 2})
    trainer.train()
    assert pg.ledgers_of(model.merge_and_unload()) == [trainer.private_grad.ledger]


def test_a_card_has_no_epsilon_if_trainings_cannot_be_counted_together(tmp_path: Path):
    trained_in_phases(tmp_path, privacy_unit="user")
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    assert "epsilon" not in dict(card.data["privacy"])
    assert "The private trainings of this model have no statement in common." in card.text
    assert "No number here counts the other private trainings of this model." in card.text
    assert not (tmp_path / "saved" / "statement.txt").exists()  # that of the first training


def test_the_trainers_card_names_the_private_optimizer_and_no_private_loss(tmp_path: Path):
    planned = {"seed": None, "delta": 1e-3, "noise_multiplier": 1.5, "steps": 4}
    trainer = make_trainer(tmp_path, bert(), texts(), planned=planned, eval_dataset=texts(8))
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card(model_name="mine", tags="text")
    card = ModelCard.load(tmp_path / "README.md")
    assert set(card.data["tags"]) >= {"text", "differential-privacy"}
    assert "- optimizer: AdamBC, learning rate 0.01\n" in card.text
    assert "adamw_torch" not in card.text
    assert "learning_rate" not in card.text
    assert card.data.get("privacy") is not None
    assert "- Epsilon:" not in card.text
    assert any("epsilon" in one for one in trainer.state.log_history)


def test_a_card_tells_of_updates_that_an_interruption_lost(tmp_path: Path):
    planned = {"seed": None, "delta": 1e-3, "noise_multiplier": 1.5}
    trainer = make_trainer(tmp_path, bert(), texts(), planned=planned)
    trainer.train()
    trainer.state.global_step = STEPS - 3
    trainer.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    privacy: Any = card.data["privacy"]
    assert (privacy["updates"], privacy["released_gradients"]) == (STEPS - 3, STEPS)
    assert "| updates | 9 |" in card.text


@pytest.mark.parametrize(
    ("planned", "words"),
    [
        ({"seed": 5, "delta": 1e-3}, "A seed produced the noise."),
        ({"seed": None, "delta": 1e-3, "noise_multiplier": 0.0}, "their epsilon is infinite"),
        ({"seed": None}, "The plan has no delta."),
    ],
)
def test_a_number_that_protects_nobody_is_not_called_epsilon(tmp_path: Path, planned: dict[str, Any], words: str):
    trainer = make_trainer(tmp_path, bert(), texts(), planned={"steps": 2, **planned})
    trainer.train()
    trainer.save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert "epsilon" not in dict(card.data["privacy"])
    assert "| epsilon |" not in card.text
    assert words in card.text


@pytest.mark.usefixtures("by_rdp_here")
def test_epsilon_is_next_to_the_loss_in_tensorboard_from_the_first_evaluation_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Before: an evaluation ahead of training sent all events to `runs/` in the working directory."""
    pytest.importorskip("tensorboard")
    from test_tensorboard import scalars

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = make_trainer(
        tmp_path / "mine",
        bert(),
        texts(),
        planned={"delta": 1e-3},
        arguments={"report_to": ["tensorboard"], "eval_strategy": "epoch"},
        eval_dataset=texts(8),
    )
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    (folder,) = (tmp_path / "mine" / "runs").iterdir()
    found = scalars(folder)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert [step for step, _ in found["train/epsilon"]] == [4, 8, 12, 12]  # and at the end of training
    assert [step for step, _ in found["eval/loss"]][:4] == [0, 4, 8, 12]
    assert "train/loss" not in found


def test_the_trainer_moves_c_and_filters_gradients(tmp_path: Path):
    options = {"adaptive_clip": pg.clip.TargetFraction(), "filter": pg.filters.EMA(0.5)}
    trainer = make_trainer(tmp_path / "moved", bert(), texts(), private_options=options)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "moved" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert len({line["max_grad_norm"] for line in lines}) == STEPS
    assert trainer.private_grad.settings["filter"] == "EMA(0.5)"
    trainer.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "| released with each gradient | noisy shares of gradients by length, Slots(" in card


@pytest.mark.parametrize("name", ["adaptive_clip", "norm_bins", "filter"])
def test_an_option_of_private_gradient_in_the_wrong_place_is_named(tmp_path: Path, name: str):
    words = rf"{name}, an option of PrivateGradient; give private_options={{'{name}': \.\.\.}}"
    misplaced: dict[str, Any] = {name: "auto"}
    with pytest.raises(pg.PrivacyError, match=words):
        make_trainer(tmp_path, bert(), texts(), **misplaced)
