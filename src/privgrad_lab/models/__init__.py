"""The architectures of the papers and of the experiments. No model here mixes examples."""

from privgrad_lab.models.convolutional import autoencoder, cnn2, cnn5, cnn_small, resnet9
from privgrad_lab.models.language import LanguageModel, LoraLanguageModel, LowerLayers, PairClassifier, WordLSTM

__all__ = [
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
]
