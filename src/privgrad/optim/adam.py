"""Adam with the noise's variance taken out of its second moment."""

import math
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from privgrad.errors import expected, require_nonnegative, require_positive
from privgrad.optim.base import NamedParameters, PrivateOptimizer
from privgrad.optim.debias import debias, default_floor

# Numbers in a block: what eight operators read and write stays in cache, and is still worth torch's own threads.
_BLOCK = 1 << 18


class AdamBC(PrivateOptimizer):
    """DP-AdamBC: Adam whose denominator is the gradient's own second moment, not the noise's.

    Computes, elementwise, with g the released gradient and noise_std its noise:
        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g**2;  n = beta2 n + (1 - beta2) noise_std**2
        p = p - lr * m / (1 - beta1**t) / sqrt(debias((v, less n) / (1 - beta2**t), floor))

    Constant noise gives n / (1 - beta2**t) = noise_std**2. Nothing is added to the denominator: the floor bounds it.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        betas: decays (beta1, beta2), each in [0, 1).
        debias_floor: smallest debiased second moment, gradient**2, > 0 (the paper's gamma'). None sets it on the
            noise's own scale, see `default_floor`: one default for every model and budget.
    Raises:
        PrivacyError: parameters without names, or a number out of its range.
    Privacy:
        Post-processing: the state holds moments of released gradients and public constants only.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), algorithm 1. Deviations: noise that changes over time is tracked by n; the
        default floor is relative.
    """

    def __init__(
        self,
        params: NamedParameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        debias_floor: float | None = None,
    ) -> None:
        require_nonnegative("AdamBC", "lr", lr, "1e-3 is usual")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise expected("AdamBC", "betas", "to be two numbers in [0, 1)", betas, "(0.9, 0.999) is usual")
        if debias_floor is not None:
            require_positive("AdamBC", "debias_floor", debias_floor, "use None for the floor on the noise's scale")
        super().__init__(params, defaults={"lr": lr, "betas": betas, "debias_floor": debias_floor})

    def fraction_floored(self) -> float:
        """Share of coordinates whose debiased second moment sits on its floor, in [0, 1]; nan before any step.

        Privacy:
            Post-processing.
        """
        floored = total = 0
        for group, state in self._trained():
            noise_std, floor, _ = _noise_in(state, group)
            floored += int((debias(state["exp_avg_sq"], noise_std, floor=floor) <= floor).sum())
            total += state["exp_avg_sq"].numel()
        return floored / total if total else math.nan

    @torch.no_grad()
    def _update(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter, noise_std in self._active_noise(group):
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["exp_avg_noise_var"] = 0.0
                assert parameter.grad is not None
                state["step"] += 1
                state["exp_avg_noise_var"] = beta2 * state["exp_avg_noise_var"] + (1 - beta2) * noise_std**2
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                noise_std, floor, root_correction = _noise_in(state, group)
                step_size = group["lr"] / (1 - beta1 ** state["step"]) * root_correction
                for values, grad, exp_avg, exp_avg_sq, std, lowest in _blocks(*tensors, noise_std, floor):
                    exp_avg.lerp_(grad, 1 - beta1)
                    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    values.addcdiv_(exp_avg, debias(exp_avg_sq, std, floor=lowest).sqrt_(), value=-step_size)

    def _trained(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state[parameter]:
                    yield group, self.state[parameter]


def _noise_in(state: dict[str, Any], group: dict[str, Any]) -> tuple[float | Tensor, float | Tensor, float]:
    """The noise in exp_avg_sq as it stands and its floor; and the root of what both squares would be divided by.

    debias(c v, sqrt(c) s, c floor) = c debias(v, s, floor), so the startup correction c = 1 - beta2**t can wait for the
    step size, where it is one number.
    """
    beta2: float = group["betas"][1]
    correction: float = 1 - beta2 ** state["step"]
    noise_var: float | Tensor = state["exp_avg_noise_var"]
    floor = group["debias_floor"]
    if floor is None:
        floor = default_floor((noise_var / correction) ** 0.5, beta2)
    return noise_var**0.5, correction * floor, correction**0.5


def _blocks(*values: float | Tensor) -> Iterable[tuple[Any, ...]]:
    """The tensors in aligned blocks, each with the numbers. Whole if short, not laid out alike, or not on the CPU."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0]
    if first.numel() <= _BLOCK or any(
        not t.is_contiguous() or t.shape != first.shape or t.device.type != "cpu" for t in tensors
    ):
        return [values]
    parts: list[Iterable[Any]] = [v.view(-1).split(_BLOCK) if isinstance(v, Tensor) else repeat(v) for v in values]
    return zip(*parts, strict=False)
