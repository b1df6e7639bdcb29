"""Encoders of texts, from transformers."""

from typing import Any

from .cases import Case, Maker, Size, hugging_face, token_losses, tokens, unmasked


def _masked_words(kind: str, **own: Any) -> Maker:
    """Make a model of masked words, by the first part of the names of its classes."""
    return lambda size: hugging_face(f"{kind}ForMaskedLM", f"{kind}Config", size, tokens(size), token_losses, **own)


def _albert(size: Size) -> Case:
    return _masked_words("Albert", embedding_size=size.width // 2)(size)


def _electra(size: Size) -> Case:
    return _masked_words("Electra", embedding_size=size.width // 2)(size)


def _roformer(size: Size) -> Case:
    return _masked_words("RoFormer", embedding_size=size.width)(size)


def _deberta(size: Size) -> Case:
    attention: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    positions: dict[str, Any] = {"position_biased_input": False, "max_relative_positions": size.time}
    buckets: dict[str, Any] = {"position_buckets": size.time // 2, "norm_rel_ebd": "layer_norm"}
    return _masked_words("DebertaV2", **attention, **positions, **buckets)(size)


def _modern_bert(size: Size) -> Case:
    own: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 1, "local_attention": size.time // 2}
    return _masked_words("ModernBert", **own)(size)


def _fnet(size: Size) -> Case:
    texts = unmasked(size)
    return hugging_face("FNetForMaskedLM", "FNetConfig", size, texts, token_losses, tpu_short_seq_length=size.time)


def _longformer(size: Size) -> Case:
    texts = unmasked(size)  # a window of padding only has a gradient of NaN in transformers
    own = {"attention_window": size.time // 2}
    return hugging_face("LongformerForMaskedLM", "LongformerConfig", size, texts, token_losses, **own)


def _perceiver(size: Size) -> Case:
    texts = tokens(size)
    texts["inputs"] = texts.pop("input_ids")
    own: dict[str, Any] = {
        "num_latents": size.time // 2, "d_latents": size.width, "d_model": size.width, "num_blocks": 1,
        "num_self_attends_per_block": size.layers, "num_cross_attention_heads": size.heads,
        "num_self_attention_heads": size.heads, "max_position_embeddings": size.time, "qk_channels": size.width,
        "v_channels": size.width,
    }  # fmt: skip
    return hugging_face("PerceiverForMaskedLM", "PerceiverConfig", size, texts, token_losses, **own)


ENCODERS: dict[str, Maker] = {
    "bert": _masked_words("Bert"),
    "roberta": _masked_words("Roberta"),
    "electra": _electra,
    "albert": _albert,
    "deberta_v2": _deberta,
    "distilbert": lambda size: _masked_words("DistilBert", dim=size.width, hidden_dim=size.hidden)(size),
    "mpnet": _masked_words("MPNet", relative_attention_num_buckets=32),
    "modernbert": _modern_bert,
    "roformer": _roformer,
    "fnet": _fnet,
    "longformer": _longformer,
    "esm": _masked_words("Esm", mask_token_id=2, position_embedding_type="rotary", token_dropout=False),
    "perceiver": _perceiver,
}
