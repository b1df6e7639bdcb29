"""Models of images, from transformers."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Case, Maker, Size, hugging_face, images, pooled_losses, state_losses, tokens


def _states(kind: str, **own: Any) -> Maker:
    """Make a model that returns states, by the first part of the names of its classes."""
    return lambda size: hugging_face(f"{kind}Model", f"{kind}Config", size, images(size), state_losses, **own)


def _swin(kind: str) -> Maker:
    def make(size: Size) -> Case:
        depths = [size.layers // 2] * 2
        own: dict[str, Any] = {"embed_dim": size.width // 2, "depths": depths, "num_heads": [size.heads] * 2}
        return _states(kind, **own, patch_size=size.patch // 2, window_size=size.patch // 2)(size)

    return make


def _convolutional(kind: str) -> Maker:
    """Make a network of two stages, of which each has half of the layers."""

    def make(size: Size) -> Case:
        widths, depths = [size.width // 2, size.width], [size.layers // 2] * 2
        return _states(kind, hidden_sizes=widths, depths=depths, num_stages=2, patch_size=size.patch // 2)(size)

    return make


def _pool_former(size: Size) -> Case:
    widths, depths = [size.width // 2, size.width], [size.layers // 2] * 2
    own: dict[str, Any] = {"patch_sizes": [size.patch - 1, 3], "strides": [size.patch // 2, 2], "padding": [1, 1]}
    return _states("PoolFormer", hidden_sizes=widths, depths=depths, num_encoder_blocks=2, **own)(size)


def _segformer(size: Size) -> Case:
    widths, depths = [size.width // 2, size.width], [size.layers // 2] * 2
    own: dict[str, Any] = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]}
    rest: dict[str, Any] = {"num_attention_heads": [1, size.heads], "mlp_ratios": [2, 2]}
    return _states("Segformer", hidden_sizes=widths, depths=depths, **own, **rest)(size)


def _resnet(size: Size) -> Case:
    widths, depths = [size.width // 2, size.width], [size.layers // 2] * 2
    return _states("ResNet", embedding_size=size.width // 4, hidden_sizes=widths, depths=depths)(size)


def with_group_norm(case: Case) -> Case:
    """Replace each BatchNorm by a GroupNorm of as many channels."""
    for parent in list(case.model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(2, child.num_features))
    return case


def _siglip(size: Size) -> Case:
    return hugging_face("SiglipVisionModel", "SiglipVisionConfig", size, images(size), pooled_losses)


def _yolos(size: Size) -> Case:
    own: dict[str, Any] = {
        "image_size": [size.image] * 2,
        "num_detection_tokens": 3,
        "use_mid_position_embeddings": True,
    }
    return hugging_face("YolosForObjectDetection", "YolosConfig", size, images(size), state_losses, **own)


def pair_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """The sigmoid loss of each example's own image and text, which couples no examples; CLIP's own loss does."""
    found = model(**examples)
    scale = cast(Any, model).logit_scale.exp()
    return F.softplus(-scale * (found.image_embeds * found.text_embeds).sum(-1))


def contrastive_losses(model: nn.Module, examples: dict[str, Tensor]) -> Tensor:
    """CLIP's own loss: each image chooses among the texts of the batch."""
    logits = model(**examples).logits_per_image
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="none")


def clip(size: Size) -> Case:
    """Make CLIP, with its loss of pairs."""
    both: dict[str, Any] = {
        "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "intermediate_size": size.hidden, "attention_dropout": 0.0,
    }  # fmt: skip
    text = {"vocab_size": size.words, "max_position_embeddings": size.time, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"image_size": size.image, "patch_size": size.patch}
    examples = tokens(size)
    del examples["labels"]
    own: dict[str, Any] = {
        "text_config": both | text,
        "vision_config": both | vision,
        "projection_dim": size.width // 2,
    }
    return hugging_face("CLIPModel", "CLIPConfig", size, examples | images(size), pair_losses, **own)


def clip_with_its_own_loss(size: Size) -> Case:
    """Make CLIP, with a loss that couples examples."""
    case = clip(size)
    return Case(case.model, case.examples, contrastive_losses)


def _clip_frozen_scale(size: Size) -> Case:
    case = clip(size)
    cast(Any, case.model).logit_scale.requires_grad_(False)
    return case


VISION: dict[str, Maker] = {
    "vit": _states("ViT"),
    "deit": _states("DeiT"),
    "beit": _states("Beit"),
    "dinov2": lambda size: _states("Dinov2", mlp_ratio=size.hidden // size.width)(size),
    "swin": _swin("Swin"),
    "swinv2": _swin("Swinv2"),
    "convnext": _convolutional("ConvNext"),
    "convnextv2": _convolutional("ConvNextV2"),
    "poolformer": _pool_former,
    "resnet_groupnorm": lambda size: with_group_norm(_resnet(size)),
    "segformer": _segformer,
    "clip": clip,
    "clip_frozen_scale": _clip_frozen_scale,
    "siglip_vision": _siglip,
    "yolos": _yolos,
}
# They have BatchNorm.
VISION_REFUSED: dict[str, Maker] = {"resnet": _resnet, "mobilenet_v2": _states("MobileNetV2")}
