"""Tiny models of many architectures, with random weights: each by name, with examples and per-example losses.

`test_zoo` compares their released gradients with loops over single examples. Models of transformers are made from
configurations, so nothing is downloaded. timm is optional.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers: Any = importlib.import_module("transformers")
SIZE, TIME, WORDS = 5, 8, 40
_SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 24}
_BERT: dict[str, Any] = _SIZES | _HEADS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA: dict[str, Any] = _SIZES | _HEADS | {"num_key_value_heads": 1, "attention_dropout": 0.0}
_VISION: dict[str, Any] = (_SIZES | _HEADS | {"image_size": 8, "patch_size": 4}) | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
Losses = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Case:
    """A model in double precision and in training mode, its examples, and its losses.

    Attributes:
        model: the model; no parameter is at zero.
        examples: tensors by name, `SIZE` rows each.
        losses: (model, examples) -> one loss per example.
    """

    model: nn.Module
    examples: dict[str, Tensor]
    losses: Losses


def tokens() -> dict[str, Tensor]:
    """Texts with padding at the right, as token numbers, their mask and labels; -100 at the padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, WORDS, (SIZE, TIME), generator=generator)
    mask = (torch.arange(TIME) < torch.tensor([[TIME], [5], [6], [3], [TIME]])).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def images(size: int = 8) -> dict[str, Tensor]:
    """Random images of three channels."""
    generator = torch.Generator().manual_seed(2)
    return {"pixel_values": torch.randn(SIZE, 3, size, size, generator=generator, dtype=torch.float64)}


def vectors(*shape: int) -> dict[str, Tensor]:
    """Random numbers of this shape for each example."""
    return {"x": torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}


def token_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each token, averaged over the tokens of each example that have a label."""
    labels = examples["labels"]
    logits = model(**{name: value for name, value in examples.items() if name != "labels"}).logits
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1)


def sequence_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of a decoder that reads the labels."""
    logits, labels = model(**examples).logits, examples["labels"]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1)


def state_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """A smooth number from all entries of each example's last states, of its logits, or of its plain output."""
    found = model(*examples.values()) if list(examples) == ["x"] else model(**examples)
    for name in ("last_hidden_state", "logits"):
        found = getattr(found, name, found)
    rows = cast(Tensor, found).flatten(1)
    return (rows * torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype)).sum(1).sin() + rows.square().mean(1)


def pair_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """The sigmoid loss of each example's own image and text, which couples no examples; CLIP's own loss does."""
    found = model(**examples)
    scale = cast(Any, model).logit_scale.exp()
    return F.softplus(-scale * (found.image_embeds * found.text_embeds).sum(-1))


def contrastive_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """CLIP's own loss: each image chooses among the texts of the batch."""
    logits = model(**examples).logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


def temperature_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """Cross-entropy at a learned temperature, which only the loss uses."""
    logits = model(examples["x"]) / cast(Any, model).temperature.exp()
    return F.cross_entropy(logits, torch.arange(len(logits)) * 0, reduction="none")


def _hf(kind: str, config: Any, examples: dict[str, Tensor], losses: Losses) -> Case:
    """Make a model of transformers from a configuration."""
    return _moved(getattr(transformers, kind)(config), examples, losses)


def _moved(model: nn.Module, examples: dict[str, Tensor], losses: Losses) -> Case:
    """Move each parameter a little, so that none is at zero; freeze those that the losses do not reach."""
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    named = dict(model.named_parameters())
    with torch.random.fork_rng():
        total = losses(model, examples).sum()
    # torch types the result as if allow_unused did not exist.
    grads = cast("tuple[Tensor | None, ...]", torch.autograd.grad(total, list(named.values()), allow_unused=True))
    for parameter, grad in zip(named.values(), grads, strict=True):
        parameter.requires_grad_(grad is not None)
    return Case(model, examples, losses)


def _bert(kind: str, config: str, **options: Any) -> Case:
    return _hf(kind, getattr(transformers, config)(**(_BERT | options)), tokens(), token_losses)


def _llama(kind: str, config: str, **options: Any) -> Case:
    return _hf(kind, getattr(transformers, config)(**(_LLAMA | options)), tokens(), token_losses)


def _t5() -> Case:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _hf("T5ForConditionalGeneration", config, tokens(), sequence_losses)


def _bart() -> Case:
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, **sizes,
    )  # fmt: skip
    return _hf("BartForConditionalGeneration", config, tokens(), sequence_losses)


def _deberta() -> Case:
    options = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
    extra = {"max_relative_positions": 8, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    return _bert("DebertaV2ForMaskedLM", "DebertaV2Config", **options, **extra, max_position_embeddings=32)


def _longformer() -> Case:
    config = transformers.LongformerConfig(**_BERT, attention_window=4, max_position_embeddings=32)
    examples = tokens()
    del examples["attention_mask"]  # a window of padding only has a gradient of NaN in transformers
    return _hf("LongformerForMaskedLM", config, examples, token_losses)


def _perceiver() -> Case:
    config = transformers.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_cross_attention_heads=2, num_self_attention_heads=2, vocab_size=WORDS, max_position_embeddings=TIME,
        qk_channels=16, v_channels=16, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    examples = tokens()
    examples["inputs"] = examples.pop("input_ids")
    return _hf("PerceiverForMaskedLM", config, examples, token_losses)


def _swin(kind: str = "Swin") -> Case:
    config = getattr(transformers, f"{kind}Config")(
        image_size=8, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=2, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _hf(f"{kind}Model", config, images(), state_losses)


def _yolos() -> Case:
    config = transformers.YolosConfig(
        **(_VISION | {"image_size": [8, 8]}), num_detection_tokens=3, use_mid_position_embeddings=True
    )
    return _hf("YolosForObjectDetection", config, images(), state_losses)


def _vit(kind: str, **options: Any) -> Case:
    return _hf(f"{kind}Model", getattr(transformers, f"{kind}Config")(**(_VISION | options)), images(), state_losses)


def _gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _hf("GPT2LMHeadModel", config, tokens(), token_losses)


def _gpt_oss() -> Case:
    heads: dict[str, Any] = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    config = transformers.GptOssConfig(**_LLAMA, **heads, max_position_embeddings=64)
    config._experts_implementation = "eager"  # the fused product takes no double precision
    return _hf("GptOssForCausalLM", config, tokens(), token_losses)


def _mixtral() -> Case:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=2, num_experts_per_tok=1)
    config._experts_implementation = "eager"
    return _hf("MixtralForCausalLM", config, tokens(), token_losses)


def _mamba2() -> Case:
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    config = transformers.Mamba2Config(**_SIZES, state_size=4, **sizes)
    return _hf("Mamba2ForCausalLM", config, tokens(), token_losses)


def _rwkv(**options: Any) -> Case:
    sizes = {"attention_hidden_size": 16, "intermediate_size": 24, "context_length": 32}
    examples = tokens()
    del examples["attention_mask"]
    return _hf("RwkvForCausalLM", transformers.RwkvConfig(**_SIZES, **sizes, **options), examples, token_losses)


def _recurrent_gemma() -> Case:
    sizes: dict[str, Any] = {"lru_width": 16, "attention_window_size": 8, "head_dim": 8, "num_hidden_layers": 3}
    config = transformers.RecurrentGemmaConfig(**(_SIZES | _HEADS | sizes))
    return _hf("RecurrentGemmaForCausalLM", config, tokens(), token_losses)


def _clip(losses: Losses = pair_losses) -> Case:
    text: dict[str, Any] = _SIZES | _HEADS | {"max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    vision: dict[str, Any] = _HEADS | {"hidden_size": 16, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    examples = tokens()
    del examples["labels"]
    return _hf("CLIPModel", config, examples | images(), losses)


class Temperature(nn.Module):
    """A linear model whose temperature is used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = nn.Linear(5, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class RootParameter(nn.Module):
    """A text classifier with positions of its own, and a table with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 6, padding_idx=0), nn.Linear(6, 3)
        self.positions = nn.Parameter(torch.zeros(TIME, 6))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = (self.table(input_ids) + self.positions).tanh() * attention_mask[..., None]
        return self.head(states.sum(1))


class Experts(nn.Module):
    """Routes each token to one expert of a list; the experts see the tokens of all examples in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(4, 4), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x).tanh().flatten(0, 1)
        shares = self.router(states).softmax(-1)
        chosen, output = shares.argmax(-1), torch.zeros_like(states)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows):
                output = output.index_add(0, rows, expert(states[rows]) * shares[rows, index, None])
        return output.view(x.shape)


class RelativeBias(nn.Module):
    """Attention with a table of biases that is looked up once for all examples, below a plain residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.values = nn.Embedding(9, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        biases = self.table((places[:, None] - places).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        scores = (x @ x.transpose(1, 2))[:, None] + biases
        return (scores.softmax(-1) @ self.values(x)[:, None]).mean(1)


class Centered(RelativeBias):
    """Subtracts the mean of the batch before the attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class TimeFirst(nn.Module):
    """Hands (time, batch, width) to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)


class Latents(nn.Module):
    """Repeats learned latents for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.head = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents(torch.arange(3)[None]).repeat(len(x), 1, 1)
        return self.head((latents @ x.transpose(1, 2)).softmax(-1) @ x)


class Residual(nn.Module):
    """One block between layers of its own, so that only the block needs another treatment."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(4, 4), block, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        return self.after(x + self.block(x).mean(1, keepdim=True))


def _residual(block: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: _moved(Residual(block()), vectors(5, 4), state_losses)


def _root_parameter() -> Case:
    examples = {name: value for name, value in tokens().items() if name != "labels"}
    return _moved(RootParameter(), examples, state_losses)


_LONGER: dict[str, Any] = {"max_position_embeddings": 32}
HAND: dict[str, Callable[[], Case]] = {
    "hand_relative_bias": _residual(RelativeBias),
    "hand_time_first": _residual(TimeFirst),
    "hand_latents": _residual(Latents),
    "hand_moe_modulelist": _residual(Experts),
    "hand_loss_temperature": lambda: _moved(Temperature(), vectors(5), temperature_losses),
    "hand_root_param_padding_idx": _root_parameter,
}
TRANSFORMERS: dict[str, Callable[[], Case]] = {
    "t5": _t5,
    "mpnet": lambda: _bert("MPNetForMaskedLM", "MPNetConfig", **_LONGER, relative_attention_num_buckets=32),
    "deberta_v2": _deberta,
    "swin": _swin,
    "longformer": _longformer,
    "perceiver": _perceiver,
    "yolos": _yolos,
    "gpt_oss": _gpt_oss,
    "mamba": lambda: _hf(
        "MambaForCausalLM", transformers.MambaConfig(**_SIZES, state_size=4, time_step_rank=2), tokens(), token_losses
    ),
    "mamba2": _mamba2,
    "rwkv": _rwkv,
    "recurrent_gemma": _recurrent_gemma,
    "clip": _clip,
    "bert": lambda: _bert("BertForMaskedLM", "BertConfig", **_LONGER),
    "roberta": lambda: _bert("RobertaForMaskedLM", "RobertaConfig", **_LONGER, pad_token_id=0),
    "albert": lambda: _bert("AlbertForMaskedLM", "AlbertConfig", **_LONGER, embedding_size=8),
    "electra": lambda: _bert("ElectraForMaskedLM", "ElectraConfig", **_LONGER, embedding_size=8),
    "gpt2": _gpt2,
    "llama": lambda: _llama("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": lambda: _llama("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "gemma3": lambda: _llama("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4),
    "mixtral": _mixtral,
    "bart": _bart,
    "vit": lambda: _vit("ViT"),
    "dinov2": lambda: _vit("Dinov2"),
    "swinv2": lambda: _swin("Swinv2"),
}

# Their examples are coupled.
COUPLED: dict[str, Callable[[], Case]] = {
    "clip_with_its_own_loss": lambda: _clip(contrastive_losses),
    "centered_inside": _residual(Centered),
    "centered_outside": lambda: _moved(
        Residual(RelativeBias()), vectors(5, 4), lambda m, x: state_losses(m, {"x": x["x"] - x["x"].mean(0)})
    ),
    "batch_norm": lambda: _moved(
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(20), nn.Linear(20, 3)), vectors(5, 4), state_losses
    ),
}


def make(name: str) -> Case:
    """Return a new model of an architecture, always with the same weights and examples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (HAND | TRANSFORMERS | COUPLED)[name]()
