"""Decoders and recurrent models of texts, from transformers."""

from typing import Any

from .cases import TINY, Case, Maker, Size, hugging_face, sequence_losses, token_losses, tokens, unmasked


def _causal(kind: str, config: str | None = None, **own: Any) -> Maker:
    """Make a causal model of words, by the first part of the names of its classes."""
    name = config or f"{kind}Config"
    return lambda size: hugging_face(f"{kind}ForCausalLM", name, size, tokens(size), token_losses, **own)


def _gpt2(size: Size) -> Case:
    own = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": 2 * size.time}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", size, tokens(size), token_losses, **own)


def _gptj(size: Size) -> Case:
    own: dict[str, Any] = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads}
    return _causal("GPTJ", **own, n_positions=2 * size.time, rotary_dim=size.width // size.heads // 2)(size)


def _gpt_neo(size: Size) -> Case:
    kinds = [[["global", "local"], size.layers // 2]]
    return _causal("GPTNeo", num_layers=size.layers, attention_types=kinds, window_size=size.time // 2)(size)


def _opt(size: Size) -> Case:
    return _causal("OPT", ffn_dim=size.hidden, word_embed_proj_dim=size.width)(size)


def _bloom(size: Size) -> Case:
    return _causal("Bloom", n_layer=size.layers, n_head=size.heads)(size)


def _llama(kind: str, config: str | None = None, window: bool = False, **own: Any) -> Maker:
    """Make a model with grouped queries, and with a sliding window of half of the text if asked for."""

    def make(size: Size) -> Case:
        grouped: dict[str, Any] = {"num_key_value_heads": size.heads // 2}
        windowed: dict[str, Any] = {"sliding_window": size.time // 2} if window else {}
        return _causal(kind, config, **grouped, **windowed, **own)(size)

    return make


def _headed(kind: str, config: str | None = None, **own: Any) -> Maker:
    """Make a model of that kind that has the width of a head in its configuration."""
    return lambda size: _llama(kind, config, head_dim=size.width // size.heads, **own)(size)


def _experts(kind: str, **own: Any) -> Maker:
    """Make a mixture of four experts, of which each token uses two."""

    def make(size: Size) -> Case:
        experts: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": size.hidden // 2}
        if size == TINY:  # it is in double precision, which the fused product does not take
            experts["experts_implementation"] = "eager"
        return _llama(kind, **experts, **own)(size)

    return make


def _mamba2(size: Size) -> Case:
    heads: dict[str, Any] = {"num_heads": 2 * size.heads, "head_dim": size.width // size.heads, "n_groups": 1}
    return _causal("Mamba2", **heads, state_size=size.width // 4, chunk_size=size.time // 2)(size)


def _mamba(size: Size) -> Case:
    return _causal("Mamba", state_size=max(4, size.width // 16), time_step_rank=max(2, size.width // 16))(size)


def _rwkv(size: Size) -> Case:
    own = {"attention_hidden_size": size.width, "context_length": 2 * size.time}
    return hugging_face("RwkvForCausalLM", "RwkvConfig", size, unmasked(size), token_losses, **own)


def _recurrent_gemma(size: Size) -> Case:
    own: dict[str, Any] = {"lru_width": size.width, "attention_window_size": size.time, "num_key_value_heads": 1}
    layers = max(3, size.layers)
    return _causal("RecurrentGemma", **own, head_dim=size.width // size.heads, num_hidden_layers=layers)(size)


def _t5(size: Size) -> Case:
    own: dict[str, Any] = {"d_model": size.width, "d_kv": size.width // size.heads, "d_ff": size.hidden}
    both: dict[str, Any] = {"num_layers": size.layers, "num_heads": size.heads, "decoder_start_token_id": 0}
    return hugging_face("T5ForConditionalGeneration", "T5Config", size, tokens(size), sequence_losses, **own, **both)


def two_stacks(size: Size, start: int = 1) -> dict[str, Any]:
    """Options of the configurations that BART's became the model of."""
    parts = ("encoder", "decoder")
    heads = {f"{part}_attention_heads": size.heads for part in parts}
    rest = {f"{part}_layers": size.layers for part in parts} | {f"{part}_ffn_dim": size.hidden for part in parts}
    return {"d_model": size.width, "decoder_start_token_id": start} | heads | rest


def _bart(size: Size) -> Case:
    return hugging_face(
        "BartForConditionalGeneration", "BartConfig", size, tokens(size), sequence_losses, **two_stacks(size)
    )


def _marian(size: Size) -> Case:
    return hugging_face("MarianMTModel", "MarianConfig", size, tokens(size), sequence_losses, **two_stacks(size, 0))


DECODERS: dict[str, Maker] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "gpt_neox": _causal("GPTNeoX"),
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _causal("Falcon"),
    "llama": _llama("Llama"),
    "mistral": _llama("Mistral", window=True),
    "qwen2": _llama("Qwen2"),
    "qwen3": _headed("Qwen3"),
    "gemma": _headed("Gemma"),
    "gemma2": _headed("Gemma2"),
    "gemma3": _headed("Gemma3", "Gemma3TextConfig", window=True),
    "phi": _llama("Phi"),
    "phi3": _llama("Phi3"),
    "olmo2": _llama("Olmo2"),
    "smollm3": _llama("SmolLM3"),
    "mixtral": _experts("Mixtral", num_local_experts=4),
    "qwen3_moe": _experts("Qwen3Moe", num_experts=4),
    "olmoe": _experts("Olmoe", num_experts=4),
    "gpt_oss": lambda size: _experts("GptOss", num_local_experts=4, head_dim=size.width // size.heads)(size),
    "mamba": _mamba,
    "mamba2": _mamba2,
    "rwkv": _rwkv,
    "recurrent_gemma": _recurrent_gemma,
    "t5": _t5,
    "bart": _bart,
    "marian": _marian,
}
