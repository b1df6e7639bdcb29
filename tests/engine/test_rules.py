"""Every layer rule against a loop over single examples: gradients, norms, weighted sums, plain and preconditioned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from privgrad.engine.factored import Factored
from privgrad.engine.factors.weight_standardization import Combined
from privgrad.engine.layers.base import find_rule
from privgrad.gradient.factor import Dense, Factor
from privgrad.models import ws_conv2d

Make = Callable[[], nn.Module]


class WeightStandardization(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        flat = weight.flatten(1)
        centered = flat - flat.mean(1, keepdim=True)
        return (centered / (flat.std(1, keepdim=True) + 1e-3)).view_as(weight)


def standardized(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", WeightStandardization())


class StandardizedConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, torch's name
        return self._conv_forward(input, WeightStandardization()(self.weight), self.bias)


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def zero(layer: nn.Module, name: str) -> nn.Module:
    nn.init.zeros_(layer.get_parameter(name))
    return layer


def few_places(*, padding: int = 1, **options: Any) -> nn.Module:
    return ws_conv2d(8, 16, 3, padding=padding, **options)


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def ids(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(0, 6, (size, *shape), generator=torch.Generator().manual_seed(5))


def with_repeats(inputs: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """Every second place repeats the first: terms that nearly cancel in inner products."""

    def make(size: int) -> Tensor:
        x = inputs(size)
        x[:, 1::2] = -x[:, :1]
        return x

    return make


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Frames(nn.Module):
    """Folds a dimension into the examples, as video models do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Positions(nn.Module):
    """Looks up positions without an example dimension, and adds them to every example."""

    def __init__(self, *, leading: bool) -> None:
        super().__init__()
        self.table, self.leading = nn.Embedding(7, 4), leading

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        return x + self.table(positions[None] if self.leading else positions)


class Attends(nn.Module):
    """Attention from the examples to other places, time first as torch's default is."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, kdim=4, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attend(x, torch.sin(x), torch.cos(x))[0].transpose(0, 1)


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.sin(x[:, :2]))


class Reads(nn.Module):
    """A recurrent layer, time first as torch's default is."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


class Scale(nn.Module):
    """No rule: a parameter used in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


# name: (layer, inputs by batch size)
RULES: dict[str, tuple[Make, Callable[[int], Tensor]]] = {
    "Linear": (lambda: nn.Linear(5, 4), floats(5)),
    "Linear, no bias": (lambda: nn.Linear(5, 4, bias=False), floats(5)),
    "Linear, sequence, written out": (lambda: nn.Linear(3, 2), floats(6, 3)),
    "Linear, sequence, inner products": (lambda: nn.Linear(30, 40), floats(3, 30)),
    "Linear, sequence, canceling": (lambda: nn.Linear(30, 40), with_repeats(floats(4, 30))),
    "Linear, two dimensions more": (lambda: nn.Linear(3, 4), floats(2, 5, 3)),
    "Linear, frozen weight": (lambda: frozen(nn.Linear(5, 4), "weight"), floats(5)),
    "Linear, frozen bias": (lambda: frozen(nn.Linear(5, 4), "bias"), floats(5)),
    "Linear, standardized": (lambda: standardized(nn.Linear(5, 4)), floats(5)),
    "Linear, places, bias only": (lambda: frozen(nn.Linear(5, 4), "weight"), floats(3, 5)),
    "Linear, weight norm": (lambda: parametrizations.weight_norm(nn.Linear(5, 4)), floats(3, 5)),
    "Linear, twice": (lambda: Twice(nn.Linear(5, 5)), floats(5)),
    "Linear, twice, sequence": (lambda: Twice(nn.Linear(5, 5)), floats(3, 5)),
    "Linear, frames": (lambda: Frames(nn.Linear(5, 4)), floats(3, 5)),
    "Scale (no rule)": (Scale, floats(3, 5)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), floats(3, 8)),
    "Conv1d, stride, dilation": (lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), floats(4, 12)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, padding=1), floats(2, 6, 5)),
    "Conv2d, no bias, stride leaves a rest": (lambda: nn.Conv2d(2, 4, 3, stride=2, bias=False), floats(2, 8, 6)),
    "Conv2d, inner products": (lambda: nn.Conv2d(8, 16, 3, stride=2), floats(8, 5, 5)),
    "Conv2d, inner products, dilation": (lambda: nn.Conv2d(8, 16, 3, stride=(2, 3), dilation=(1, 2)), floats(8, 5, 8)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=(1, 0)), floats(4, 5, 6)),
    "Conv1d, depthwise": (lambda: nn.Conv1d(3, 3, 4, groups=3, stride=3, padding=2), floats(3, 9)),
    "Conv1d, depthwise, dilation": (lambda: nn.Conv1d(3, 3, 3, groups=3, dilation=2), floats(3, 9)),
    "Conv2d, depthwise, stride leaves a rest": (
        lambda: nn.Conv2d(3, 3, (3, 2), groups=3, stride=(3, 2), dilation=(1, 2), padding=(2, 0)),
        floats(3, 8, 8),
    ),
    "Conv2d, depthwise, frames": (lambda: Frames(nn.Conv2d(2, 2, 3, groups=2)), floats(4, 2, 5, 6)),
    "Conv2d, depthwise, twice": (lambda: Twice(nn.Conv2d(3, 3, 5, padding=2, groups=3)), floats(3, 5, 4)),
    "Conv3d, depthwise": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), groups=2), floats(2, 4, 5, 4)),
    "Conv2d, pointwise, many places": (lambda: nn.Conv2d(3, 4, 1), floats(3, 9, 8)),
    "Conv2d, pointwise, stride": (lambda: nn.Conv2d(3, 4, 1, stride=2), floats(3, 6, 7)),
    "Conv2d, same": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same"), floats(2, 6, 6)),
    "Conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), floats(2, 6, 6)),
    "Conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), floats(2, 6, 6)),
    "Conv2d, replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), floats(2, 6, 6)),
    "Conv2d, many places": (lambda: nn.Conv2d(2, 4, 3, padding=1), floats(2, 9, 9)),
    "Conv2d, many places, standardized": (lambda: standardized(nn.Conv2d(2, 3, 3)), floats(2, 11, 11)),
    "Conv2d, standardized": (lambda: standardized(nn.Conv2d(3, 4, 3)), floats(3, 6, 6)),
    "Conv2d, standardized, gain": (lambda: ws_conv2d(2, 4, 3, padding=1), floats(2, 5, 6)),
    "Conv2d, few places, standardized": (lambda: few_places(gain=False), floats(8, 2, 2)),
    "Conv2d, few places, standardized, gain": (few_places, floats(8, 2, 2)),
    "Conv2d, few places, standardized, gain 0": (
        lambda: zero(few_places(), "parametrizations.weight.0.gain"),
        floats(8, 2, 2),
    ),
    "Conv2d, few places, standardized, stride": (lambda: few_places(stride=(2, 3)), floats(8, 4, 5)),
    "Conv2d, few places, standardized, reflect": (lambda: few_places(padding_mode="reflect"), floats(8, 2, 2)),
    "Conv2d, few places, standardized, frozen gain": (
        lambda: frozen(few_places(), "parametrizations.weight.0.gain"),
        floats(8, 2, 2),
    ),
    "Conv2d, few places, standardized, frozen weight": (
        lambda: frozen(few_places(), "parametrizations.weight.original"),
        floats(8, 2, 2),
    ),
    "Conv2d, few places, standardized, frames": (lambda: Frames(few_places()), floats(2, 8, 2, 1)),
    "Conv2d, few places, standardized, twice": (lambda: Twice(ws_conv2d(16, 16, 3, padding=1)), floats(16, 2, 2)),
    "Conv2d, standardized by itself (no rule)": (lambda: StandardizedConv2d(2, 4, 3, padding=1), floats(2, 5, 6)),
    "Conv2d, frames": (lambda: Frames(nn.Conv2d(2, 3, 3)), floats(4, 2, 6, 6)),
    "Conv2d, twice": (lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), floats(3, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), floats(2, 4, 5, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, groups=2), floats(4, 5)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1, dilation=2),
        floats(3, 4, 4),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), floats(2, 3, 3, 3)),
    "Embedding": (lambda: nn.Embedding(6, 4), ids(5)),
    "Embedding, padding": (lambda: nn.Embedding(6, 4, padding_idx=2), ids(5)),
    "Embedding, one id": (lambda: nn.Embedding(6, 4), ids()),
    "Embedding, twice": (lambda: Twice2(nn.Embedding(6, 4)), ids(5)),
    "Embedding of positions": (lambda: Positions(leading=False), floats(7, 4)),
    "Embedding of positions, leading 1": (lambda: Positions(leading=True), floats(7, 4)),
    "EmbeddingBag, mean": (lambda: nn.EmbeddingBag(6, 4, padding_idx=1), ids(5)),
    "EmbeddingBag, sum": (lambda: nn.EmbeddingBag(6, 4, mode="sum"), ids(5)),
    "EmbeddingBag, max (no rule)": (lambda: nn.EmbeddingBag(6, 4, mode="max"), ids(5)),
    "LayerNorm": (lambda: nn.LayerNorm(5), floats(3, 5)),
    "LayerNorm, two dimensions": (lambda: nn.LayerNorm([3, 5]), floats(2, 3, 5)),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(5, bias=False), floats(5)),
    "RMSNorm": (lambda: nn.RMSNorm(5), floats(3, 5)),
    "RMSNorm of transformers": (lambda: MixtralRMSNorm(5), floats(3, 5)),
    "RMSNorm of transformers, twice": (lambda: Twice2(Qwen3RMSNorm(5)), floats(5)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(4, 5, 3)),
    "GroupNorm, no places": (lambda: nn.GroupNorm(2, 4), floats(4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), floats(4, 6)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), floats(4, 5, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), floats(2, 3, 3, 4)),
    "BatchNorm2d, frozen": (lambda: nn.BatchNorm2d(4).eval(), floats(4, 5, 3)),
    "MultiheadAttention, three inputs": (Attends, floats(3, 4)),
    "MultiheadAttention, decoder": (Decodes, floats(3, 4)),
    "LSTM, both directions": (lambda: Reads(nn.LSTM(4, 3, bidirectional=True, num_layers=2)), floats(5, 4)),
    "GRU": (lambda: Reads(nn.GRU(4, 3)), floats(5, 4)),
    "RNN, frames": (lambda: Frames(Reads(nn.RNN(4, 3))), floats(2, 5, 4)),
    "PReLU (no rule)": (lambda: nn.PReLU(5), floats(5)),
}


@pytest.mark.parametrize("name", [name for name in RULES if "few places, standardized" in name])
def test_gradients_of_standardized_weights_are_not_written_out(name: str):
    make, inputs = RULES[name]
    engine, x = Factored(make().double(), losses_of), inputs(3)
    known = name.split(", ")[-1] not in ("frames", "twice", "frozen weight")
    for factors in (engine(x), engine.moved(x, 0.1, exact=False), engine.moved(x, 0.1, exact=True)):
        found = next((factor for parameter, factor in factors.items() if parameter.endswith("original")), None)
        assert (isinstance(found, Combined) and not isinstance(found.inner, Dense)) == known


def test_a_forward_that_classes_copy_has_a_rule_by_its_code():
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 2

    class Copied(LlamaRMSNorm):
        pass

    assert find_rule(LlamaRMSNorm(3)) is find_rule(MixtralRMSNorm(3)) is find_rule(Copied(3)) is not None
    assert find_rule(Other(3)) is find_rule(T5LayerNorm(3)) is None


class Twice2(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.layer(x.flip(1))


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss an example; weights by place, so that no two places have the same gradient."""
    output = model(x)
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return ((output * weights).sin() + 0.3 * output.square()).flatten(1).sum(1)


def one_by_one(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [torch.autograd.grad(losses_of(model, x[i : i + 1]).sum(), list(parameters.values())) for i in range(len(x))]
    return {name: torch.stack([row[index] for row in rows]) for index, name in enumerate(parameters)}


def assert_equal_to_loop(factor: Factor, rows: Tensor, tolerance: float, rounding: float = 1e-30) -> None:
    size, generator = len(rows), torch.Generator().manual_seed(7)
    weights = torch.rand(size, generator=generator, dtype=torch.float64)
    inverse = (torch.rand(rows.shape[1:], generator=generator, dtype=torch.float64) * 3 + 0.1).to(rows.dtype)

    def close(got: Tensor, wanted: Tensor) -> None:
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance * scale + rounding)

    assert factor.examples == size
    assert factor.shape == rows.shape[1:]
    close(factor.dense(), rows)
    close(factor.norms(), rows.reshape(size, rows.shape[1:].numel()).double().norm(dim=1))
    close(factor.norms(inverse), (rows * inverse).reshape(size, rows.shape[1:].numel()).double().norm(dim=1))
    close(
        factor.weighted_sum(weights),
        (weights.to(rows.dtype) @ rows.reshape(size, rows.shape[1:].numel())).view(rows.shape[1:]),
    )
    exact = factor.exact_sum(weights)
    assert exact.dtype == torch.float64
    close(exact, (weights @ rows.double().reshape(size, rows.shape[1:].numel())).view(rows.shape[1:]))
    terms = factor.term_bound(inverse)
    if terms is not None and size > 0:  # a bound on the norm, and on each term's
        assert bool(
            (
                terms * (1 + tolerance) + rounding
                >= (rows * inverse).reshape(size, rows.shape[1:].numel()).double().norm(dim=1)
            ).all()
        )
    kept = torch.arange(size) % 2 == 0
    close(factor.mask(kept).dense(), rows * kept.view(-1, *[1] * (rows.dim() - 1)))
    if size > 2:
        close(factor[1:3].dense(), rows[1:3])
        close(factor[torch.tensor([2, 0])].dense(), rows[[2, 0]])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("dtype", "tolerance", "size"),
    [
        (torch.float64, 1e-10, 7),
        (torch.float32, 1e-5, 1),
        pytest.param(torch.float64, 1e-10, 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-5, 7, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_a_loop_over_single_examples(name: str, dtype: torch.dtype, tolerance: float, size: int):
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model = make().to(dtype)
    x = inputs(size)
    x = x.to(dtype) if x.is_floating_point() else x
    factors, rows = Factored(model, losses_of)(x), one_by_one(model, x)
    assert factors.keys() == rows.keys()
    for parameter, factor in factors.items():
        assert_equal_to_loop(factor, rows[parameter], tolerance)
        assert_equal_to_loop(factor[:0], rows[parameter][:0], tolerance)
