"""Inputs-side preconditioning in plain float64, one layer and one example at a time: METHODS 7."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of one layer as rows, shape (N, I): patches for a convolution, positions otherwise."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    assert isinstance(layer, nn.Conv2d)
    x = F.pad(x, [layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]])  # type: ignore[misc]
    rows: list[Tensor] = []
    (height, width), channels = layer.kernel_size, x.shape[1] // layer.groups
    for group in range(layer.groups):
        part = x[:, group * channels : (group + 1) * channels]
        for top in range(0, x.shape[2] - height + 1, layer.stride[0]):
            for left in range(0, x.shape[3] - width + 1, layer.stride[1]):
                rows.append(part[:, :, top : top + height, left : left + width].flatten(1))
    return torch.cat(rows)


def matrix(inputs: Tensor, power: float, ridge: float, *, bias: bool) -> Tensor:
    """Return U for rows of inputs, shape (N, I)."""
    rows = [torch.cat([row, torch.ones(1).double()]) if bias else row for row in inputs]
    moment = torch.stack([torch.outer(row, row) for row in rows]).mean(0)
    values, vectors = torch.linalg.eigh(moment)
    scales = torch.stack([(value.clamp(min=0) + ridge * values.clamp(min=0).mean()) ** -power for value in values])
    return vectors @ torch.diag(scales / scales.mean()) @ vectors.T


def contributions(
    model: nn.Module, x: Tensor, y: Tensor, public: Tensor, *, power: float, ridge: float, clip: float
) -> dict[str, Tensor]:
    """Return the sum of the clipped, preconditioned gradients of a model of Linear and Conv2d layers, by name."""
    seen: dict[str, Tensor] = {}

    def watch(path: str, layer: nn.Module) -> Any:
        def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[path] = patches(layer, args[0])

        return layer.register_forward_pre_hook(see)

    handles = [watch(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        model(public)
    for handle in handles:
        handle.remove()
    maps = {
        path: matrix(rows, power, ridge, bias=getattr(model.get_submodule(path), "bias") is not None)  # noqa: B009
        for path, rows in seen.items()
    }
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (inputs[None],)), label[None])

    total = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for inputs, label in zip(x, y, strict=True):
        own = grad(loss)(parameters, inputs, label)
        for path, u in maps.items():
            weight, bias = own[f"{path}.weight"], own.get(f"{path}.bias")
            both = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias[:, None]], 1)
            both = both @ u
            own[f"{path}.weight"] = (both if bias is None else both[:, :-1]).reshape(weight.shape)
            if bias is not None:
                own[f"{path}.bias"] = both[:, -1]
        norm = torch.cat([value.flatten() for value in own.values()]).norm()
        for name, value in own.items():
            total[name] += value * min(1.0, clip / float(norm))
    return total
