"""Models of sound and of time series, from transformers."""

from typing import Any

import torch
from torch import Tensor

from .cases import Case, Maker, Size, hugging_face, state_losses, tokens
from .decoders import two_stacks


def _numbers(size: Size, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((size.batch, *shape), generator=generator, dtype=torch.float64)


def _whisper(size: Size) -> dict[str, Any]:
    return two_stacks(size) | {"num_mel_bins": 8, "max_source_positions": size.time, "max_target_positions": size.time}


def _whisper_encoder(size: Size) -> Case:
    case = _whisper_full(size)
    model: Any = case.model
    return Case(model.get_encoder(), {"input_features": case.examples["input_features"]}, state_losses)


def _whisper_full(size: Size) -> Case:
    sounds = {"input_features": _numbers(size, 8, 2 * size.time), "decoder_input_ids": tokens(size)["input_ids"]}
    return hugging_face("WhisperModel", "WhisperConfig", size, sounds, state_losses, **_whisper(size))


def _waves(kind: str, **own: Any) -> Maker:
    """Make a model of waves, with two convolutions before its layers."""

    def make(size: Size) -> Case:
        shape: dict[str, Any] = {"conv_dim": [size.width] * 2, "conv_stride": [5, 2], "conv_kernel": [10, 3]}
        rest: dict[str, Any] = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
        waves = {"input_values": _numbers(size, 10 * size.time + 30)}
        options = shape | rest | {"apply_spec_augment": False} | own
        return hugging_face(f"{kind}Model", f"{kind}Config", size, waves, state_losses, **options)

    return make


def _ast(size: Size) -> Case:
    own: dict[str, Any] = {"num_mel_bins": size.image, "max_length": size.image}
    strides = {"frequency_stride": size.patch, "time_stride": size.patch}
    sounds = {"input_values": _numbers(size, size.image, size.image)}
    return hugging_face("ASTModel", "ASTConfig", size, sounds, state_losses, **own, **strides)


def _patch_tst(size: Size) -> Case:
    own: dict[str, Any] = {
        "num_input_channels": 2, "context_length": 4 * size.time, "patch_length": 4, "patch_stride": 4,
        "d_model": size.width, "ffn_dim": size.hidden, "norm_type": "layernorm", "prediction_length": 4,
    }  # fmt: skip
    series = {"past_values": _numbers(size, 4 * size.time, 2)}
    return hugging_face("PatchTSTModel", "PatchTSTConfig", size, series, state_losses, **own)


def _time_series(size: Size) -> Case:
    own: dict[str, Any] = {"prediction_length": size.time // 2, "context_length": size.time, "lags_sequence": [1, 2]}
    past = size.time + 2
    series = {
        "past_values": _numbers(size, past), "past_time_features": _numbers(size, past, 2),
        "past_observed_mask": torch.ones(size.batch, past, dtype=torch.float64),
        "future_values": _numbers(size, size.time // 2), "future_time_features": _numbers(size, size.time // 2, 2),
    }  # fmt: skip
    stacks = two_stacks(size)
    del stacks["decoder_start_token_id"]
    name = "TimeSeriesTransformer"
    return hugging_face(
        f"{name}Model", f"{name}Config", size, series, state_losses, num_time_features=2, **own, **stacks
    )


SERIES: dict[str, Maker] = {
    "whisper_encoder": _whisper_encoder,
    "whisper_full": _whisper_full,
    "wav2vec2": _waves("Wav2Vec2"),
    "wav2vec2_layernorm": _waves("Wav2Vec2", feat_extract_norm="layer", do_stable_layer_norm=True),
    "wavlm": _waves("WavLM"),
    "ast": _ast,
    "patchtst": _patch_tst,
    "time_series_transformer": _time_series,
}
