"""Models of timm, where it is installed."""

import importlib
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

from .cases import Case, Maker, Size, plain_images, state_losses
from .vision import with_group_norm

CLASSES = 5


def _timm(name: str, size: Size, **own: Any) -> Case:
    """Make a model of timm without dropout."""
    timm: Any = importlib.import_module("timm")
    return Case(timm.create_model(name, num_classes=CLASSES, **own), plain_images(size), state_losses)


def _transformer(name: str, **own: Any) -> Maker:
    def make(size: Size) -> Case:
        shape = {"img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "depth": size.layers}
        return _timm(name, size, **shape, num_heads=size.heads, **own)

    return make


def _mixer(size: Size) -> Case:
    models: Any = importlib.import_module("timm.models.mlp_mixer")
    shape = {"img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "num_blocks": size.layers}
    return Case(models.MlpMixer(num_classes=CLASSES, **shape), plain_images(size), state_losses)


def _swin(size: Size) -> Case:
    shape = {"img_size": size.image, "patch_size": size.patch // 2, "embed_dim": size.width // 2}
    own: dict[str, Any] = {"window_size": size.patch // 2, "depths": (size.layers // 2,) * 2, "drop_path_rate": 0.0}
    return _timm("swin_tiny_patch4_window7_224", size, **shape, **own, num_heads=(size.heads,) * 2)


def _conv_next(size: Size) -> Case:
    widths = tuple(size.width // part for part in (4, 4, 2, 1))
    large = replace(size, image=max(32, size.image))  # it halves an image five times
    return _timm("convnext_atto", large, depths=(size.layers // 2,) * 4, dims=widths, patch_size=size.patch // 2)


def _bit(size: Size) -> Case:
    models: Any = importlib.import_module("timm.models.resnetv2")
    layers: Any = importlib.import_module("timm.layers")
    shape: dict[str, Any] = {"layers": (size.layers // 2,) * 2, "channels": (size.width // 2, size.width)}
    norm = partial(layers.GroupNormAct, num_groups=2)
    own = {"stem_chs": size.width // 4, "stem_type": "fixed", "norm_layer": norm, "conv_layer": layers.StdConv2d}
    return Case(models.ResNetV2(num_classes=CLASSES, **shape, **own), plain_images(size), state_losses)


def _resnet(size: Size) -> Case:
    return _timm("resnet18", replace(size, image=max(32, size.image)))


_ALL: dict[str, Maker] = {
    "timm_vit": _transformer("vit_tiny_patch16_224"),
    "timm_vit_layerscale_gap": _transformer(
        "vit_tiny_patch16_224", init_values=0.1, global_pool="avg", class_token=False
    ),
    "timm_eva_rope": _transformer("eva02_tiny_patch14_224"),
    "timm_mixer": _mixer,
    "timm_convnext": _conv_next,
    "timm_swin": _swin,
    "timm_cait": _transformer("cait_xxs24_224"),
    "timm_resnet18_gn": lambda size: with_group_norm(_resnet(size)),
    "timm_bit_stdconv": _bit,
}
TIMM: dict[str, Maker] = _ALL if importlib.util.find_spec("timm") else {}
# It has BatchNorm.
TIMM_REFUSED: dict[str, Maker] = {"timm_resnet18": _resnet} if TIMM else {}
