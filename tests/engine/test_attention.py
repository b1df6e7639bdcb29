"""The replacement forward of attention against torch's own, and against a loop over single examples."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from privgrad.checks.model_and_loss import check_loss
from privgrad.engine.factors.outer import RowRanges
from privgrad.engine.layers.attention import attention_forward
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.factor import Factor

HEADS, LENGTH, KEYS = 2, 3, 5
MODULES: dict[str, dict[str, Any]] = {
    "packed": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "separate weights": {"kdim": 6, "vdim": 8, "batch_first": True},
    "separate, no bias": {"kdim": 6, "vdim": 8, "bias": False},
    "appended": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "zero": {"add_zero_attn": True},
}
MASKS = ["none", "bool", "float", "per head", "padding", "both", "causal"]
ROLES = ["self", "memory", "three", "query is key"]


class Taps:
    """Collects what is tapped, as the engine does: the gradient's edge, and the function that makes factors of it."""

    def __init__(self) -> None:
        self.edges: list[Any] = []
        self.factors: list[Callable[[Tensor], Mapping[Tensor, Factor]]] = []

    def __call__(self, tensor: Tensor, factors: Callable[[Tensor], Mapping[Tensor, Factor]]) -> Tensor:
        self.edges.append(get_gradient_edge(tensor))
        self.factors.append(factors)
        return tensor

    def gradients(self, module: nn.Module, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Per-sample gradients by parameter name; every row comes from one tap."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        found: dict[str, Tensor] = {}
        for factors, grad in zip(self.factors, grads, strict=True):
            for parameter, factor in factors(grad).items():
                empty = grad.new_full((factor.examples, *parameter.shape), torch.nan)
                whole = found.setdefault(names[parameter], empty)
                for first, part in factor.parts if isinstance(factor, RowRanges) else [(0, factor)]:
                    rows = slice(first, first + part.shape[0])
                    assert whole[:, rows].isnan().all()
                    whole[:, rows] = part.dense()
        assert found.keys() == set(names.values())
        return found


def make(option: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, HEADS, dropout=dropout, **MODULES[option]).to(dtype)
    for parameter in module.parameters():  # torch's start has zero biases
        nn.init.normal_(parameter)
    return module


def make_roles(module: Any, roles: str, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, batch first; the same tensor where the roles share it."""
    query, key, value = (
        torch.randn(size, length, width, dtype=dtype, requires_grad=True)
        for length, width in ((LENGTH, 4), (KEYS, module.kdim), (KEYS, module.vdim))
    )
    if roles == "self":
        return [query, query, query]
    if roles == "query is key":
        return [query, query, torch.randn(size, LENGTH, 4, dtype=dtype, requires_grad=True)]
    return [query, key, key if roles == "memory" else value]


def make_masks(kind: str, size: int, keys: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    attn = torch.ones(LENGTH, keys).triu(1).bool()
    padding = torch.zeros(size, keys).bool()
    padding[-1, 1:] = True
    if kind == "both":
        return {"attn_mask": attn, "key_padding_mask": padding}
    if kind == "causal":
        return {"attn_mask": attn, "is_causal": True}
    return {
        "none": {},
        "bool": {"attn_mask": attn},
        "float": {"attn_mask": torch.randn(LENGTH, keys, dtype=dtype)},
        "per head": {"attn_mask": torch.randn(size * HEADS, LENGTH, keys, dtype=dtype)},
        "padding": {"key_padding_mask": padding},
    }[kind]


def alone(masks: dict[str, Any], index: int) -> dict[str, Any]:
    """The masks of one example."""
    masks = dict(masks)
    if "key_padding_mask" in masks:
        masks["key_padding_mask"] = masks["key_padding_mask"][index : index + 1]
    if "attn_mask" in masks and masks["attn_mask"].dim() == 3:
        masks["attn_mask"] = masks["attn_mask"][index * HEADS : (index + 1) * HEADS]
    return masks


def placed(module: nn.MultiheadAttention, inputs: list[Tensor], index: slice = slice(None)) -> list[Tensor]:
    """The inputs as the module wants them, shared where they are shared."""
    moved: dict[int, Tensor] = {}
    for tensor in inputs:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor[index] if module.batch_first else tensor[index].transpose(0, 1)
    return [moved[id(tensor)] for tensor in inputs]


def loss_of(module: nn.MultiheadAttention, result: tuple[Tensor, Tensor | None]) -> Tensor:
    """One loss for each example, of all that is returned."""
    output, weights = result
    output = output if module.batch_first else output.transpose(0, 1)
    losses = (output.flatten(1) * torch.arange(output[0].numel(), dtype=output.dtype).cos()).sum(1)
    return losses if weights is None else losses + (weights.flatten(1) ** 3).sum(1)


CASES = [
    (option, roles, mask)
    for option, settings in MODULES.items()
    for roles in ROLES
    for mask in MASKS
    if "kdim" not in settings or roles == "three"
]


@pytest.mark.parametrize(
    ("weights", "average", "size"),
    [
        (False, True, 3),
        (True, True, 3),
        (True, False, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, True, 1), (True, True, 1), (True, False, 3))
        ),
    ],
)
@pytest.mark.parametrize(("option", "roles", "mask"), CASES)
def test_same_outputs_and_gradients(option: str, roles: str, mask: str, weights: bool, average: bool, size: int):
    module = make(option)
    inputs = make_roles(module, roles, size)
    settings: Any = make_masks(mask, size, inputs[1].shape[1])
    settings |= {"need_weights": weights, "average_attn_weights": average}
    expected = module(*placed(module, inputs), **settings)
    taps = Taps()
    query, key, value = placed(module, inputs)
    result = attention_forward(module, taps, query, key, value, **settings)
    assert (result[1] is None) == (expected[1] is None)
    for part, truth in zip(result, expected, strict=True):
        if truth is not None:
            torch.testing.assert_close(part, truth, rtol=1e-12, atol=1e-12)

    leaves = list({id(tensor): tensor for tensor in inputs}.values())
    truths = torch.autograd.grad(loss_of(module, expected).sum(), leaves)
    grads = torch.autograd.grad(loss_of(module, result).sum(), [*leaves, *taps.edges])
    for grad, truth in zip(grads, truths, strict=False):
        torch.testing.assert_close(grad, truth, rtol=1e-10, atol=1e-10)
    rows = taps.gradients(module, grads[len(leaves) :])
    for index in range(size):
        single = placed(module, inputs, slice(index, index + 1))
        loss = loss_of(module, module(*single, **alone(settings, index))).sum()
        truths = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
        for (name, _), truth in zip(module.named_parameters(), truths, strict=True):
            torch.testing.assert_close(rows[name][index], truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("option", MODULES)
def test_float32_dropout_and_evaluation(option: str, weights: bool):
    module = make(option, torch.float32, dropout=0.5)
    query, key, value = placed(module, make_roles(module, "three", 3, torch.float32))
    for training in (True, False):
        module.train(training)
        torch.manual_seed(1)
        expected = module(query, key, value, need_weights=weights)
        torch.manual_seed(1)
        result = attention_forward(module, Taps(), query, key, value, need_weights=weights)
        for part, truth in zip(result, expected, strict=True):
            if truth is not None:
                torch.testing.assert_close(part, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [False, True])
def test_autocast_follows_torch(weights: bool):
    module = make("appended", torch.float32)
    query, key, value = placed(module, make_roles(module, "three", 3, torch.float32))
    masks: Any = make_masks("both", 3, KEYS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(query, key, value, need_weights=weights, **masks)[0]
        result = attention_forward(module, Taps(), query, key, value, need_weights=weights, **masks)[0]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


def test_one_tap_for_a_tensor_in_several_roles():
    module = make("packed")
    for roles, count in (("self", 2), ("memory", 3), ("three", 4), ("query is key", 4)):
        taps = Taps()
        attention_forward(module, taps, *placed(module, make_roles(module, roles, 2)))  # pyright: ignore[reportArgumentType]
        assert len(taps.edges) == count


def test_refusals():
    module = make("batch first")
    query, key, value = make_roles(module, "three", 2)
    with pytest.raises(UnsupportedModuleError, match="of size 1"):
        attention_forward(module, Taps(), query[0], key[0], value[0])
    with pytest.raises(KeyError, match=r"1, 5"):
        attention_forward(module, Taps(), query, key, value, attn_mask=torch.zeros(1, 5))


@pytest.mark.parametrize(
    "mask", [{"attn_mask": torch.zeros(1, 5)}, {"key_padding_mask": torch.zeros(2, 5).int()}, {"is_causal": True}]
)
def test_a_mask_of_another_shape_or_dtype_is_refused_when_the_loss_is_tried(mask: dict[str, Tensor]):
    module = make("batch first")
    query, key, value = make_roles(module, "three", 2)

    def losses_of(model: nn.Module, examples: Tensor) -> Tensor:
        return model(examples, key, value, **mask)[0].sum((1, 2))

    with pytest.raises((RuntimeError, AssertionError)):
        check_loss(module, losses_of, query)


def test_changes_in_place_are_refused_not_believed():
    module, taps = make("batch first"), Taps()
    query, key, value = (tensor.detach() for tensor in make_roles(module, "three", 2))
    loss = loss_of(module, attention_forward(module, taps, query, key, value)).sum()
    grads = torch.autograd.grad(loss, taps.edges)
    key.mul_(2)
    with pytest.raises(UnsupportedModuleError, match="not to be changed in place"):
        taps.gradients(module, grads)


def test_no_examples_and_no_gradients():
    module, taps = make("appended"), Taps()
    query, key, value = make_roles(module, "three", 0)
    result = attention_forward(module, taps, query, key, value)
    rows = taps.gradients(module, torch.autograd.grad(result[0].sum(), taps.edges))
    assert all(len(row) == 0 for row in rows.values())
    query, key, value = make_roles(module, "three", 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = attention_forward(module, lambda tensor, _: tensor, query, key, value)
        assert not result[0].requires_grad
