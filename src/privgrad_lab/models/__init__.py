"""The architectures of the papers and of the experiments. No model here mixes examples."""

from privgrad_lab.models.convolutional import autoencoder, cnn2, cnn5, cnn_small, resnet9, wide_resnet
from privgrad_lab.models.language import (
    HeadLanguageModel,
    LanguageModel,
    LoraLanguageModel,
    LowerLayers,
    PairClassifier,
    WordLSTM,
)

__all__ = [
    "HeadLanguageModel",
    "LanguageModel",
    "LoraLanguageModel",
    "LowerLayers",
    "PairClassifier",
    "WordLSTM",
    "autoencoder",
    "cnn2",
    "cnn5",
    "cnn_small",
    "resnet9",
    "wide_resnet",
]
