"""The model architectures of the experiments.

Users make them directly, `experiments.build` by name. The privacy guarantee does not rest on this package. No model
here mixes examples, and `gradient.validation` tests each before it is trained.
"""

from privgrad.models.activations import Activation
from privgrad.models.convolutional import (
    GlobalAverage,
    Residual,
    cnn2,
    cnn5,
    cnn_small,
    resnet9,
    wide_resnet,
    ws_conv2d,
)
from privgrad.models.each_row import EachRow
from privgrad.models.fully_connected import SparseLinear, UnitLinear, autoencoder, bag_of_words, linear, mlp
from privgrad.models.language import LanguageModel, LoraLanguageModel, LowerLayers, PairClassifier, WordLSTM

__all__ = [
    "Activation",
    "EachRow",
    "GlobalAverage",
    "LanguageModel",
    "LoraLanguageModel",
    "LowerLayers",
    "PairClassifier",
    "Residual",
    "SparseLinear",
    "UnitLinear",
    "WordLSTM",
    "autoencoder",
    "bag_of_words",
    "cnn2",
    "cnn5",
    "cnn_small",
    "linear",
    "mlp",
    "resnet9",
    "wide_resnet",
    "ws_conv2d",
]
