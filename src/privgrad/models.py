"""The model architectures of the experiments."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.errors import expected
from privgrad.gradient.factors.weight_standardization import WeightStandardization

Activation = Literal["tanh", "relu", "leaky_relu"]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
}


class GlobalAverage(nn.Module):
    """The mean over the two spatial dimensions: (B, C, H, W) -> (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def cnn5(*, in_channels: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """Return five convolutions without normalization, (B, in_channels, H, W) -> logits (B, num_classes).

    Inputs of 28x28 and of 32x32 both end on 3x3. 411,466 parameters for 3x32x32 and 10 classes, 410,890 for one
    channel.

    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their published CNN for CIFAR-10. Deviation: torch's default initialization.
    """
    make_activation = _activation(activation)
    widths = (32, 64, 128)
    layers: list[nn.Module] = []
    previous = in_channels
    for index, width in enumerate(widths):
        padding = 0 if index == 0 else 1
        layers += [nn.Conv2d(previous, width, 3, padding=padding), make_activation(), nn.MaxPool2d(2)]
        previous = width
    layers += [nn.Conv2d(128, 256, 3, padding=1), make_activation()]
    layers += [nn.Conv2d(256, num_classes, 3, padding=1), GlobalAverage()]
    return nn.Sequential(*layers)


def cnn2(*, in_channels: int, num_classes: int) -> nn.Sequential:
    """Return two convolutions and a linear layer, (B, in_channels, 28, 28) -> logits (B, num_classes).

    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), their CNN for Barcode MNIST. 1,698,262 parameters for 330 classes.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 100, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4900, num_classes),
    )


def cnn_small(*, in_channels: int, num_classes: int, activation: Activation = "tanh") -> nn.Sequential:
    """Return two convolutions and two linear layers, (B, in_channels, 28, 28) -> logits (B, num_classes).

    Reference:
        The model of Papernot et al. 2021 (tempered sigmoids): 26,010 parameters for one channel and 10 classes.
    """
    make_activation = _activation(activation)
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 8, stride=2, padding=3),
        make_activation(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        make_activation(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        make_activation(),
        nn.Linear(32, num_classes),
    )


def autoencoder(*, in_features: int) -> nn.Sequential:
    """Return an autoencoder with a code of 30 numbers, (B, ...) -> (B, in_features) in (0, 1).

    Every layer except the code ends in a sigmoid.

    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963): 784-1000-500-250-30 and back, 2,837,314 parameters.
    """
    widths = [in_features, 1000, 500, 250, 30, 250, 500, 1000, in_features]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out)] if fan_out == 30 else [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
    return nn.Sequential(*layers)


def ws_conv2d(n_in: int, n_out: int, kernel: int, *, gain: bool = True, **options: Any) -> nn.Module:
    """Return a convolution with standardized weights.

    Args:
        n_in: number of input channels.
        n_out: number of output channels.
        kernel: width and height of the kernel.
        gain: whether each output channel has a trainable gain.
        **options: as in nn.Conv2d.
    """
    standardization = WeightStandardization(n_out if gain else None)
    layer = nn.Conv2d(n_in, n_out, kernel, **options)
    return parametrize.register_parametrization(layer, "weight", standardization)


class Residual(nn.Sequential):
    """A residual connection: x + f(x), where f is the sequence of modules."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        changed = cast(Tensor, super().forward(input))
        return input + changed


def resnet9(*, in_channels: int, num_classes: int, width: int = 64) -> nn.Sequential:
    """Return a ResNet-9 with standardized weights, GroupNorm and Mish.

    It maps (B, in_channels, H, W) -> logits (B, num_classes).

    Args:
        in_channels: channels of the images, 28x28 or larger.
        num_classes: number of labels.
        width: width of the first layer, a multiple of 16; 64 gives 2,447,946 parameters for 3 channels and 10 classes.
    Reference:
        The paper on BAM trains a ResNet-9 but does not describe it. This one is the model of Klause et al. 2022 (arXiv
        2203.00324), from the same institute, without their scale norm.
    """

    def block(n_in: int, n_out: int) -> list[nn.Module]:
        conv = ws_conv2d(n_in, n_out, 3, padding=1, bias=False, gain=False)
        return [conv, nn.GroupNorm(min(32, n_out // 2), n_out), nn.Mish()]

    def pair(channels: int) -> Residual:
        return Residual(*block(channels, channels), *block(channels, channels))

    return nn.Sequential(
        *block(in_channels, width),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        pair(2 * width),
        *block(2 * width, 4 * width),
        nn.MaxPool2d(2),
        *block(4 * width, 4 * width),
        nn.MaxPool2d(2),
        pair(4 * width),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, num_classes),
    )


class _WideBlock(nn.Module):
    """A pre-activation block; its shortcut is the identity, or one convolution where the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()

        def conv(n_in: int, kernel: int, stride: int) -> list[nn.Module]:
            layer = ws_conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2)
            return [nn.ReLU(), nn.GroupNorm(min(16, n_in), n_in), layer]

        self.main = nn.Sequential(*conv(n_in, 3, stride), *conv(n_out, 3, 1))
        self.shortcut = nn.Sequential(*(conv(n_in, 1, stride) if (n_in, stride) != (n_out, 1) else ()))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.shortcut(x)


def wide_resnet(*, in_channels: int, num_classes: int, depth: int = 16, widen: int = 4) -> nn.Sequential:
    """Return a WRN-depth-widen with standardized weights and GroupNorm.

    It maps (B, in_channels, H, W) -> logits (B, num_classes).

    Args:
        in_channels: channels of the images.
        num_classes: number of labels.
        depth: 6 n + 4; 16 and widen = 4 give 2,753,818 parameters for 3 channels and 10 classes.
        widen: factor of the widths 16, 32, 64.
    Raises:
        PrivacyError: depth is not 6 n + 4, or is below 10.
    Reference:
        De et al. 2022 (arXiv 2204.13650).
    """
    if depth < 10 or (depth - 4) % 6:
        raise expected("wide_resnet", "depth", "to be 6 n + 4, with n >= 1", depth, "give 16, 28 or 40")
    layers, previous = [ws_conv2d(in_channels, 16, 3, padding=1)], 16
    for index, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
        for block in range((depth - 4) // 6):
            layers.append(_WideBlock(previous, width, 2 if index > 0 and block == 0 else 1))
            previous = width
    head = [nn.ReLU(), nn.GroupNorm(16, previous), GlobalAverage(), nn.Linear(previous, num_classes)]
    return nn.Sequential(*layers, *head)


def bag_of_words(*, vocabulary: int, num_classes: int) -> nn.EmbeddingBag:
    """Return softmax regression on mean word counts: word ids (B, L) -> logits (B, num_classes).

    Id 0 means no word. The weights start at zero.

    Args:
        vocabulary: ids are in [0, vocabulary).
        num_classes: number of labels.
    """
    layer = nn.EmbeddingBag(vocabulary, num_classes, mode="mean", padding_idx=0)
    nn.init.zeros_(layer.weight)
    return layer


class SparseLinear(nn.Module):
    """A linear map of sparse rows: (column, value) pairs (B, 2, L) from `data.packed` -> (B, out_features).

    Attributes:
        weight: shape (in_features, out_features), one row per feature. Initialized as in nn.Linear.
        bias: shape (out_features,). Initialized as in nn.Linear.

    Args:
        in_features: columns are in [0, in_features).
        out_features: width of the output.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = in_features**-0.5
        self.weight = nn.Parameter(torch.empty(in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        columns, values = x[:, 0].long(), x[:, 1].to(self.weight.dtype)
        return F.embedding_bag(columns, self.weight, mode="sum", per_sample_weights=values) + self.bias


class WordLSTM(nn.Module):
    """An LSTM classifier: word ids (B, T) -> embeddings, two LSTM layers, mean over words -> logits (B, num_classes).

    Args:
        vocabulary: ids are in [0, vocabulary).
        num_classes: number of labels.
        width: width of the embeddings and layers.
    Reference:
        Li et al. 2022 (AdaDPS), their LSTM for IMDB: 706,690 parameters for 10,000 words, width 64 and two classes.
    """

    def __init__(self, *, vocabulary: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(ids)))
        return self.head(self.dropout(states).mean(1))


class LanguageModel(nn.Module):
    """A small GPT-2 with random weights: token ids (B, T) -> logits of the next token (B, T, num_tokens).

    Args:
        num_tokens: size of the vocabulary.
        length: longest T.
        width, layers, heads: of the transformer.
    Raises:
        PrivacyError: transformers is not installed.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance) train the untied head of the pretrained GPT-2. Deviation:
        this model is small, and all of it is trained.
    """

    def __init__(self, *, num_tokens: int, length: int, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        transformers = _transformers()
        config = transformers.GPT2Config(
            vocab_size=num_tokens,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt2(input_ids=ids, use_cache=False).logits


class LoraLanguageModel(nn.Module):
    """A pretrained causal language model with low-rank adapters: token ids (B, T) -> logits (B, T, num_tokens).

    Only the adapters are trained. PEFT adds them to the projections that it chooses for the kind of model: queries and
    values.

    Args:
        path: folder of the model, as transformers saves it.
        rank, alpha: of the adapters: each adds alpha / rank times a product of rank `rank`, which is 0 at first.
    Raises:
        PrivacyError: transformers or peft is not installed, or the folder holds no such model.
    Reference:
        Tang, Zhiyanov, Lecuyer (heavy-tailed class imbalance), their E2E experiment, as Yu et al. 2022 adapt GPT-2:
        rank 4, alpha 32, no dropout.
    """

    def __init__(self, path: str, *, rank: int = 4, alpha: int = 32) -> None:
        super().__init__()
        transformers = _transformers()
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise expected("models", "peft", "to be installed", error, "pip install 'privgrad[hf]'") from error
        try:
            base = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
            config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=0.0)
            self.adapted: Any = get_peft_model(base, config)
        except (OSError, ValueError) as error:
            remedy = "give the folder of a causal language model that PEFT supports"
            raise expected("LoraLanguageModel", "path", "to hold a model", error, remedy) from error

    def forward(self, ids: Tensor) -> Tensor:
        # Padding follows the example, so causal attention hides it from all tokens of the example.
        return self.adapted(input_ids=ids, use_cache=False).logits


class PairClassifier(nn.Module):
    """A pretrained BERT-like encoder with a linear head: token ids and types (B, 2, T) -> logits (B, num_classes).

    The last layer, the pooler and the head get new random weights and are trained. The rest is frozen.

    Args:
        path: folder of the encoder, as transformers saves it.
        num_classes: number of labels.
    Raises:
        PrivacyError: transformers is not installed, or the folder holds no such encoder.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their SNLI experiment. Deviation: new weights are drawn with the encoder's own
        standard deviation (0.02), not with 1.
    """

    def __init__(self, path: str, *, num_classes: int) -> None:
        super().__init__()
        transformers = _transformers()
        try:
            encoder = transformers.AutoModel.from_pretrained(path, local_files_only=True)
            fresh = [encoder.encoder.layer[-1], encoder.pooler]
        except (OSError, ValueError, AttributeError) as error:
            remedy = "give the folder of a BERT-like encoder"
            raise expected("PairClassifier", "path", "to hold an encoder", error, remedy) from error
        self.padding = int(encoder.config.pad_token_id)
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Linear(encoder.config.hidden_size, num_classes)
        for layer in (module for part in (*fresh, self.head) for module in part.modules()):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=encoder.config.initializer_range)
                nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.LayerNorm):
                layer.reset_parameters()
        for part in fresh:
            part.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        ids, types = x.unbind(1)
        states = self.encoder(input_ids=ids, token_type_ids=types, attention_mask=(ids != self.padding).long())
        return self.head(states.pooler_output)


def linear(*, in_features: int, num_classes: int) -> nn.Sequential:
    """Return softmax regression without bias on flattened input, (B, ...) -> logits (B, num_classes).

    The weights start at zero.
    """
    layer = nn.Linear(in_features, num_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(
    *, in_features: int, hidden: int, num_classes: int, activation: Activation = "tanh", depth: int = 1
) -> nn.Sequential:
    """Return a perceptron with `depth` hidden layers on flattened input, (B, ...) -> logits (B, num_classes)."""
    make_activation = _activation(activation)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in in (in_features, *[hidden] * (depth - 1)):
        layers += [nn.Linear(fan_in, hidden), make_activation()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise expected("models", "transformers", "to be installed", error, "pip install 'privgrad[hf]'") from error
    return transformers


def _activation(name: str) -> Callable[[], nn.Module]:
    if name not in _ACTIVATIONS:
        raise expected("models", "activation", f"to be one of {', '.join(_ACTIVATIONS)}", repr(name), "choose one")
    return _ACTIVATIONS[name]
