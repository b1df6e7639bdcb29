"""TRL's trainers with the private step: one loss per text or pair, exact, also on a base of 4 bits."""

import hashlib
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from conftest import make_plan

pytest.importorskip("accelerate")
pytest.importorskip("trl")
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from trl.trainer.callbacks import LogCompletionsCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from privgrad.engine.factored import Factored
from privgrad.integrations.trl import PrivateDPOTrainer, PrivateSFTTrainer

LENGTH = 8
COUNT = 24
WORDS = [f"w{number}" for number in range(20)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:.*(return_outputs|gradient_checkpointing).*:FutureWarning"),
]
BUDGET: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-2, "num_examples": COUNT}


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.add_tokens([" <eos>"])
    return made


def smol() -> Any:
    """A Llama of SmolLM2's shape: heads 9 to 3, layers between 8/3 as wide, tied embeddings; a sixteenth as wide."""
    torch.manual_seed(0)
    make: Any = LlamaConfig
    sizes = {"hidden_size": 36, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 9}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True}
    return LlamaForCausalLM(make(vocab_size=24, num_key_value_heads=3, max_position_embeddings=32, **sizes, **ends))


def words(seed: int, size: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[number] for number in torch.randint(20, (size,), generator=generator))


def texts(count: int = COUNT) -> Dataset:
    rows = [{"prompt": words(n, 2), "completion": " " + words(n + 100, 1 + n % 4)} for n in range(count)]
    return Dataset.from_list(rows)


def pairs(count: int = COUNT) -> Dataset:
    rows = [{"prompt": words(n, 2), "chosen": " " + words(n + 100, 1 + n % 4)} for n in range(count)]
    return Dataset.from_list([row | {"rejected": " " + words(n + 200, 3)} for n, row in enumerate(rows)])


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (PrivateSFTTrainer, SFTConfig, texts),
    "dpo": (PrivateDPOTrainer, DPOConfig, pairs),
}


def make(kind: str, folder: Path, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    trainer, config, data = KINDS[kind]
    numbers = {"max_length": LENGTH, "max_steps": 6, "per_device_train_batch_size": 6, "bf16": False, "use_cpu": True}
    quiet = {"report_to": [], "disable_tqdm": True, "save_steps": 2, "logging_steps": 2}
    args = config(str(folder), **(numbers | quiet | (arguments or {})))
    given = {"model": None, "train_dataset": None, "processing_class": tokenizer()} | BUDGET | options
    model, rows = given.pop("model"), given.pop("train_dataset")
    return trainer(smol() if model is None else model, args, train_dataset=data() if rows is None else rows, **given)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], **options)


def own_loss(model: nn.Module, row: dict[str, Any]) -> Tensor:
    """The loss of one example that is not padded, written from the definitions."""

    def log_probs(ids: list[int], labels: list[int]) -> Tensor:
        scores = cast(Any, model)(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return torch.stack([scores[at, label] for at, label in enumerate(labels[1:]) if label != -100])

    if "labels" in row:
        return -log_probs(row["input_ids"], row["labels"]).mean()
    prompt, sums = row["prompt_ids"], []
    for name in ("chosen", "rejected"):
        answer = row[f"{name}_ids"]
        ids = (prompt + answer)[:LENGTH]
        sums.append(log_probs(ids, ([-100] * len(prompt) + answer)[:LENGTH]).sum() - row[f"ref_{name}_logps"])
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_gradients_of_single_examples(kind: str, checkpointing: bool, adapters: bool, tmp_path: Path):
    """All examples, no noise, and a clipping norm that some gradients exceed."""
    norm = {"sft": 5.0, "dpo": 1.1}[kind] if not adapters else 0.5
    plan = make_plan(
        sample_rate=1.0,
        expected_batch_size=COUNT,
        num_examples=COUNT,
        steps=1,
        noise_multiplier=0.0,
        max_grad_norm=norm,
    )
    model = smol()
    if adapters:
        model = get_peft_model(model, lora(init_lora_weights=False))
    model.double()  # float32 alone rounds by 2e-6
    arguments = {"gradient_checkpointing": checkpointing, "learning_rate": 0.1, "max_steps": 1}
    arguments |= {"per_device_train_batch_size": COUNT}
    trainer = make(kind, tmp_path, arguments, model=model, plan=plan, **dict.fromkeys(BUDGET))
    rows = [own_loss(trainer.model.eval(), row) for row in trainer.train_dataset]
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    single = [torch.autograd.grad(loss, list(parameters.values())) for loss in rows]
    norms = [float(torch.cat([part.flatten() for part in grads]).norm()) for grads in single]
    assert min(norms) < norm < max(norms)
    scales = [min(1.0, norm / each) for each in norms]
    wanted = [sum(s * p for s, p in zip(scales, parts, strict=True)) / COUNT for parts in zip(*single, strict=True)]
    seen: list[pg.NoisyGradient] = []
    trainer.private_grad.register_raw_observer(lambda step: seen.append(step.released))
    trainer.train()
    assert trainer.model.is_gradient_checkpointing is checkpointing
    size = max(float(cast(Tensor, part).norm()) for part in wanted)
    for name, part in zip(parameters, wanted, strict=True):
        assert float((seen[0][name] - part).norm()) <= 1e-6 * size


OWNERS = [math.isqrt(row) for row in range(COUNT)]  # 1, 3, 5, 7 and 8 rows of five persons


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_of_a_person_are_clipped_together(kind: str, tmp_path: Path):
    """The mean of the gradients of four rows of a person, clipped once; every person, and no noise."""
    model = get_peft_model(smol(), lora(init_lora_weights=False)).double()
    plan = make_plan(
        sample_rate=1.0,
        expected_batch_size=5,
        num_examples=5,
        steps=1,
        noise_multiplier=0.0,
        max_grad_norm=0.2,
        privacy_unit="user",
    )
    options: dict[str, Any] = {"unit": "owner", "max_rows": 4, "plan": plan, **dict.fromkeys(BUDGET)}
    arguments = {"learning_rate": 0.1, "max_steps": 1, "per_device_train_batch_size": 5}
    rows = KINDS[kind][2]().add_column("owner", OWNERS)
    trainer = make(kind, tmp_path, arguments, model=model, train_dataset=rows, **options)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    wanted, norms = [torch.zeros_like(p) for p in parameters.values()], list[float]()
    for person in range(5):
        own = [row for row in trainer.train_dataset if row["owner"] == person]
        own = sorted(own, key=lambda row: hashlib.sha256(repr(row).encode()).digest())[:4]
        loss = torch.stack([own_loss(trainer.model.eval(), row) for row in own]).mean()
        parts = torch.autograd.grad(loss, list(parameters.values()))
        norms.append(float(torch.cat([part.flatten() for part in parts]).norm()))
        wanted = [sum_ + min(1.0, 0.2 / norms[-1]) * part / 5 for sum_, part in zip(wanted, parts, strict=True)]
    assert min(norms) < 0.2 < max(norms)
    seen: list[pg.NoisyGradient] = []
    trainer.private_grad.register_raw_observer(lambda step: seen.append(step.released))
    trainer.train_dataset = trainer.train_dataset.shuffle(seed=1)  # neither persons nor their kept rows change
    trainer.train()
    size = max(float(part.norm()) for part in wanted)
    for name, part in zip(parameters, wanted, strict=True):
        assert float((seen[0][name] - part).norm()) <= 1e-6 * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_for_persons_counts_persons(kind: str, tmp_path: Path):
    rows = KINDS[kind][2]().add_column("owner", [f"person {row // 2}" for row in range(COUNT)])
    persons: dict[str, Any] = {
        "unit": "owner",
        "max_rows": 2,
        "target_epsilon": 8.0,
        "delta": 1e-2,
        "num_examples": COUNT // 2,
    }
    options: dict[str, Any] = {"train_dataset": rows, "eval_dataset": KINDS[kind][2](4), "peft_config": lora()}
    trainer = make(kind, tmp_path, {"shuffle_dataset": True} if kind == "sft" else {}, **options, **persons)
    trainer.train()
    plan = trainer.private_grad.plan
    assert (plan.privacy_unit, plan.num_examples, plan.sample_rate) == ("user", COUNT // 2, 0.5)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(tmp_path / "out"))
    assert "each person" in (tmp_path / "out" / "statement.txt").read_text()
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
        trainer.evaluate(rows.select(range(4)))


def test_a_training_of_persons_resumes_with_the_same_persons_only(tmp_path: Path):
    rows = KINDS["sft"][2]().add_column("owner", OWNERS).add_column("household", [owner // 2 for owner in OWNERS])
    persons: dict[str, Any] = {"max_rows": 2, "num_examples": 6, "train_dataset": rows, "peft_config": lora()}
    trainer = make("sft", tmp_path, unit="owner", **persons)
    trainer.train()
    trainer.private_grad.ledger.close()
    with pytest.raises(pg.PrivacyError, match=r"the plan's rows_by to be as recorded \(owner\), got household"):
        make("sft", tmp_path, unit="household", **persons)
    with pytest.raises(pg.PrivacyError, match="perturb in private_options; leave it out"):
        make("sft", tmp_path / "b", unit="owner", private_options={"perturb": pg.perturb.BAM(0.1)}, **persons)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_reload_with_plain_peft(kind: str, tmp_path: Path):
    trainer = make(kind, tmp_path / "a", peft_config=lora())
    trainer.train()
    assert trainer.private_grad.ledger.releases == 6
    assert trainer.epsilon <= 8.0
    trainer.save_model(str(tmp_path / "out"))
    loaded = PeftModel.from_pretrained(smol(), str(tmp_path / "out")).eval()
    ids = torch.arange(3, 9)[None]
    found, known = (cast(Any, one)(ids).logits for one in (loaded, trainer.model.eval()))
    assert torch.equal(found, known)
    assert not torch.equal(found, smol().eval()(ids).logits)
    assert (tmp_path / "out" / "statement.txt").exists()
    for folder in (tmp_path / "out", tmp_path / "a"):
        assert "epsilon" in (folder / "README.md").read_text()
    logged = {name for one in trainer.state.log_history for name in one}
    assert not logged & {"loss", "train_loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy"}


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_training_resumes_and_stops_at_its_budget(kind: str, tmp_path: Path):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = make(kind, tmp_path, peft_config=lora(), callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    again = make(kind, tmp_path, peft_config=lora())
    with pytest.warns(UserWarning, match="this run ends with 5 updates of 6"):
        again.train(resume_from_checkpoint=True)
    assert again.private_grad.ledger.releases == 6
    assert again.state.global_step == 5  # the third update was lost, and its step was paid for
    assert again.epsilon <= 8.0
    again = make(kind, tmp_path, peft_config=lora())
    with pytest.raises(pg.PrivacyError):
        again.train()


@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_are_trls_and_training_rows_are_refused(kind: str, tmp_path: Path):
    rows, held_out = KINDS[kind][2](), KINDS[kind][2](4)
    trainer = make(kind, tmp_path, peft_config=lora(), train_dataset=rows, eval_dataset=held_out)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_loss"] > 0
    assert trainer.evaluate(held_out)["eval_loss"] == pytest.approx(found["eval_loss"])
    if kind == "dpo":
        assert 0 <= trainer.state.log_history[-1]["eval_rewards/accuracies"] <= 1
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
        trainer.evaluate(rows.select(range(4)))
    with pytest.raises(pg.PrivacyError, match="eval_dataset with rows of the training data"):
        make(kind, tmp_path / "b", train_dataset=rows, eval_dataset=rows)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "packing": ("sft", {"packing": True}, "packing=True; set packing=False .a packed row holds"),
    "padding_free": ("sft", {"padding_free": True}, "padding_free=True; set padding_free=False"),
    "of pairs": ("dpo", {"padding_free": True}, "padding_free=True; set padding_free=False"),
    "length": ("sft", {"max_length": None}, "max_length=None; give a public max_length"),
    "multiple": ("dpo", {"pad_to_multiple_of": 4}, "pad_to_multiple_of=4; set pad_to_multiple_of=8"),
    "kernels": ("sft", {"use_liger_kernel": True}, "use_liger_kernel=True; set use_liger_kernel=False"),
    "dft": ("sft", {"loss_type": "dft"}, "loss_type='dft'; set loss_type='nll'"),
    "sorted": ("dpo", {"loss_type": ["aot"]}, r"loss_type=\['aot'\]; give one of 'sigmoid', 'hinge', 'ipo'"),
    "several": ("dpo", {"loss_type": ["sigmoid", "sft"]}, r"loss_type=\['sigmoid', 'sft'\]; give one of"),
    "weights": ("dpo", {"use_weighting": True}, "use_weighting=True; set use_weighting=False"),
    "offloading": ("sft", {"activation_offloading": True}, "activation_offloading=True; set"),
    "selective": ("sft", {"gradient_checkpointing_kwargs": {"selective": True}}, "with selective; leave it out"),
    "accumulated": ("sft", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2; set"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:`use_liger_kernel")
def test_arguments_that_mix_examples_are_refused(case: str, tmp_path: Path):
    kind, arguments, words = REFUSED[case]
    with pytest.raises(pg.PrivacyError, match=words):
        make(kind, tmp_path, arguments)


def test_other_data_and_arguments_are_refused(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match=r"train_dataset to be a datasets.Dataset, got list; give datasets"):
        make("sft", tmp_path, train_dataset=list(texts()))
    with pytest.raises(pg.PrivacyError, match="args to be a SFTConfig, got TrainingArguments"):
        PrivateSFTTrainer(smol(), TrainingArguments(str(tmp_path)), train_dataset=texts(), **BUDGET)
    plan = make_plan(steps=6, privacy_unit="user")
    with pytest.raises(pg.PrivacyError, match="privacy_unit='user' with unit='row'; for persons, give unit"):
        make("sft", tmp_path, {"per_device_train_batch_size": 8}, plan=plan, **dict.fromkeys(BUDGET))
    of_persons: dict[str, Any] = {"unit": "owner", "max_rows": 2}
    plan = make_plan(steps=6)
    with pytest.raises(pg.PrivacyError, match="privacy_unit='example' with unit='owner', unit='owner'"):
        make("sft", tmp_path, {"per_device_train_batch_size": 8}, plan=plan, **dict.fromkeys(BUDGET), **of_persons)
    with pytest.raises(pg.PrivacyError, match="unit='owner'; name one of prompt, completion"):
        make("sft", tmp_path, **of_persons)
    with pytest.raises(
        pg.PrivacyError, match="max_rows to be a whole number >= 1 for a unit with several rows, got None"
    ):
        make("sft", tmp_path, unit="prompt")
    prompts = Dataset.from_list([{"prompt": words(n, LENGTH), "completion": " w1"} for n in range(COUNT)])
    with pytest.raises(pg.SamplingError, match="to keep rows with tokens to learn, got 0 of them; raise max_length"):
        make("sft", tmp_path, train_dataset=prompts)
    prompts = prompts.map(lambda row: {"chosen": " w1", "rejected": " w2"}, remove_columns="completion")
    with pytest.raises(pg.SamplingError, match="to keep rows with tokens to learn, got 0 of them; raise max_length"):
        make("dpo", tmp_path, train_dataset=prompts)
    plain = Dataset.from_list([{"text": words(n, 4)} for n in range(COUNT)])
    with pytest.raises(pg.PrivacyError, match="completion_only_loss=True without completions; give columns prompt and"):
        make("sft", tmp_path, {"completion_only_loss": True}, train_dataset=plain)
    long = Dataset.from_list([{"input_ids": [3] * size, "labels": [3] * size} for size in (4, 5, 12)])
    with pytest.raises(pg.SamplingError, match="at most max_length=8 tokens in a row, got a longer one"):
        make("sft", tmp_path, {"dataset_kwargs": {"skip_prepare_dataset": True}}, train_dataset=long)
    ids = [[3, 4, 0, 0]] * COUNT
    for labels, is_right in (({}, False), ({"labels": ids}, False), ({"labels": [[3, 4, -100, -100]] * COUNT}, True)):
        padded = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1, 1, 0, 0]] * COUNT, **labels})
        refused = pytest.raises(
            pg.SamplingError, match="to have no padding to learn, got an attention_mask of 0 without"
        )
        with nullcontext() if is_right else refused:
            make("sft", tmp_path / f"{is_right}", train_dataset=padded)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    classifier = BertForSequenceClassification(BertConfig(vocab_size=24, num_hidden_layers=1, **sizes))
    with pytest.raises(
        pg.PrivacyError, match="a causal language model, got BertForSequenceClassification; train other"
    ):
        make("sft", tmp_path, model=classifier, peft_config=lora())
    balanced = smol()
    balanced.config.output_router_logits = True
    balanced.config.router_aux_loss_coef = 0.1
    with pytest.raises(pg.PrivacyError, match="one loss per example, got output_router_logits=True"):
        make("sft", tmp_path, model=balanced)

    class Own(PrivateSFTTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    args = SFTConfig(str(tmp_path), max_length=LENGTH, use_cpu=True, bf16=False)
    with pytest.raises(pg.PrivacyError, match=r"got Own\.compute_loss; give loss_fn too"):
        Own(smol(), args, train_dataset=texts(), processing_class=tokenizer(), **BUDGET)
    assert not list((tmp_path / "False").rglob("ledger.jsonl")) + list(tmp_path.glob("ledger.jsonl"))


def test_a_collator_that_pads_to_the_longest_spends_nothing(tmp_path: Path):
    rows = Dataset.from_list([{"text": words(n, 2 + n % 5)} for n in range(COUNT)])
    trainer = make("sft", tmp_path, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(0))
    with pytest.raises(pg.SamplingError, match="pad"):
        trainer.train()
    assert trainer.private_grad.ledger.releases == 0


def test_generation_from_rows_of_evaluations_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer = make("dpo", tmp_path, eval_dataset=pairs(4), peft_config=lora())
    trainer.add_callback(LogCompletionsCallback(trainer, GenerationConfig(max_new_tokens=2), freq=3))
    with caplog.at_level("INFO", "privgrad"):
        trainer.train()
    assert "LogCompletionsCallback shows what the model makes of the prompts of eval_dataset" in caplog.text


FORMATS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "texts": ([{"text": words(n, 3 + n % 9)} for n in range(COUNT)], {}, {}),
    "formatted": (
        [{"ask": words(n, 2), "say": words(n + 9, 2)} for n in range(COUNT)],
        {},
        {"formatting_func": lambda row: f"{row['ask']} {row['say']}"},
    ),
    "whole": (list(texts()), {"completion_only_loss": False, "dataset_num_proc": 1}, {}),
    "no label": ([{"input_ids": [3] * 4, "labels": [-100] * 4 if n % 2 else [3] * 4} for n in range(COUNT)], {}, {}),
}


@pytest.mark.parametrize("case", FORMATS)
def test_every_format_of_texts_trains(case: str, tmp_path: Path):
    rows, arguments, options = FORMATS[case]
    trainer = make("sft", tmp_path, arguments, train_dataset=Dataset.from_list(rows), peft_config=lora(), **options)
    trainer.train()
    assert trainer.private_grad.ledger.releases == 6


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_losses_of_pairs_are_those_of_trl(loss_type: str, tmp_path: Path):
    trainer = make("dpo", tmp_path, {"loss_type": [loss_type]}, peft_config=lora(init_lora_weights=False))
    rows, model = [trainer.train_dataset[row] for row in range(5)], trainer.model.eval()
    found = trainer._losses(model, trainer._train_collate()(rows))
    known = torch.stack([trainer._compute_loss(model, trainer.data_collator([row]), False) for row in rows])
    torch.testing.assert_close(found, known)


def test_pairs_of_equal_answers_move_nothing(tmp_path: Path):
    rows = Dataset.from_list([{"prompt": words(n, 2), "chosen": " w1", "rejected": " w1"} for n in range(COUNT)])
    trainer = make("dpo", tmp_path, train_dataset=rows, peft_config=lora(init_lora_weights=False))
    losses = trainer._losses(trainer.model, trainer._train_collate()([trainer.train_dataset[0]]))
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert max(float(part.abs().max()) for part in torch.autograd.grad(losses.sum(), trained)) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_base_of_4_bits_are_trained(kind: str, tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    smol().save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    place: dict[str, Any] = {"device_map": "cpu", "dtype": torch.float32}
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, **place)
    trainer = make(kind, tmp_path / "a", model=base, peft_config=lora())
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    batch = trainer._train_collate()([trainer.train_dataset[row] for row in range(4)])
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    found = Factored(trainer.model, trainer._losses)(batch)
    for row in range(4):
        one = trainer._losses(trainer.model, {name: part[row : row + 1] for name, part in batch.items()})
        for (name, _), part in zip(
            trained.items(), torch.autograd.grad(one.sum(), list(trained.values())), strict=True
        ):
            assert float((found[name].dense()[row] - part).norm()) <= 1e-5 * float(part.norm())
    trainer.train()
    assert trainer.private_grad.ledger.releases == 6
    trainer.save_model(str(tmp_path / "out"))
    assert PeftModel.from_pretrained(smol(), str(tmp_path / "out")).peft_config
