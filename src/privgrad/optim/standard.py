"""The optimizers without debiasing: torch's own for released gradients, and MomentumSGD and Yogi."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.types import NoisyGradient


class SGD(PrivateOptimizer, torch.optim.SGD):
    """The torch.optim.SGD for released gradients: DP-SGD, or DP-GDM with momentum.

    Its noise step is lr * noise_std * (1 - dampening) / (1 - momentum), without dampening if momentum is 0.
    """

    def _noise_step_per_lr(self, group: Mapping[str, Any], noise_std: float | Tensor) -> float | Tensor:
        dampening = group["dampening"] if group["momentum"] else 0.0
        return noise_std * (1 - dampening) / (1 - group["momentum"])

    def _why_no_noise_step(self, group: Mapping[str, Any]) -> str:
        if group["momentum"] >= 1:
            return f"momentum={group['momentum']}"
        return f"dampening={group['dampening']}" if group["momentum"] and group["dampening"] >= 1 else ""


class MomentumSGD(PrivateOptimizer):
    """An SGD with momentum and Adam's startup correction. DP-Adam behaves like it where noise dominates.

    Computes: b = momentum * b + g;  p = p - lr * b / (1 - momentum**t). With lr = lr_adam (1 - momentum) / noise_std
    this is DP-Adam when the noise dominates its denominator. (SGD(momentum=...) is DP-GDM, without the correction.)
    Its noise step is lr * noise_std / (1 - momentum).

    Args:
        momentum: in [0, 1).
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their comparison of DP-Adam with DP-SGD.
    """

    _intervals: ClassVar = {"momentum": "[0, 1)"}

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        noise_step: float | None = None,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "momentum": momentum}, noise_step=noise_step)

    def _noise_step_per_lr(self, group: Mapping[str, Any], noise_std: float | Tensor) -> float | Tensor:
        return noise_std / (1 - group["momentum"])

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group, name, parameter, state in self._each():
            if not state:
                state["step"], state["momentum_buffer"] = 0, widened(parameter)
            state["step"] += 1
            # b = momentum b + g
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient[name])
            # p = p - lr b / (1 - momentum**t)
            correction = 1 - group["momentum"] ** state["step"]
            parameter.add_(state["momentum_buffer"], alpha=-group["lr"] / correction)


class Yogi(PrivateOptimizer):
    """An Adam whose second moment changes per step by at most (1 - beta2) g**2: FedYogi's server optimizer.

    Computes, elementwise, from m = 0 and v = eps**2:
        m = beta1 m + (1 - beta1) g;  v = v - (1 - beta2) sign(v - g**2) g**2;  p = p - lr m / (sqrt(v) + eps)

    Args:
        betas: decays (beta1, beta2), each in [0, 1).
        eps: > 0, gradient units.
    Privacy:
        Post-processing. The noise biases the second moment, as in Adam.
    Reference:
        Zaheer et al. 2018 (Yogi); Reddi et al. 2021 (arXiv 2003.00295), algorithm 2, without startup correction.
    """

    _without_noise_step = "Yogi, whose denominator settles above the noise"
    _intervals: ClassVar = {"betas": "[0, 1)", "eps": "(0, inf)"}

    def __init__(
        self, params: NamedParameters, lr: float, *, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group, name, parameter, state in self._each():
            beta1, beta2 = group["betas"]
            if not state:
                state["exp_avg"] = widened(parameter)
                state["exp_avg_sq"] = widened(parameter) + group["eps"] ** 2
            moment, second = state["exp_avg"], state["exp_avg_sq"]
            given = gradient[name].to(moment.dtype)
            square = given.square()
            # m = beta1 m + (1 - beta1) g
            moment.lerp_(given, 1 - beta1)
            # v = v - (1 - beta2) sign(v - g**2) g**2
            second.addcmul_(torch.sign(second - square), square, value=beta2 - 1)
            # p = p - lr m / (sqrt(v) + eps)
            parameter.addcdiv_(moment, second.sqrt().add_(group["eps"]), value=-group["lr"])


class _Adaptive(PrivateOptimizer):
    """A base class of torch's adaptive optimizers, whose denominator is the noise where noise dominates."""

    def _noise_step_per_lr(self, group: Mapping[str, Any], noise_std: float | Tensor) -> float | Tensor:
        eps = group["eps"]
        share = noise_std / (noise_std + eps) if eps else 1.0 * (noise_std > 0)  # 0 / 0 without noise is 0
        return share / (1 - group.get("momentum", 0.0))

    def _why_no_noise_step(self, group: Mapping[str, Any]) -> str:
        momentum = group.get("momentum", 0.0)
        return "amsgrad=True" if group.get("amsgrad") else f"momentum={momentum}" if momentum >= 1 else ""


class Adam(_Adaptive, torch.optim.Adam):
    """The torch.optim.Adam for released gradients: DP-Adam. The noise biases its second moment (see AdamBC).

    Where the noise dominates, its noise step is lr * noise_std / (noise_std + eps): lr, for the usual eps.
    """


class AdamW(_Adaptive, torch.optim.AdamW):
    """The torch.optim.AdamW for released gradients. The noise biases its second moment (see AdamWBC).

    Its noise step is Adam's.
    """


class NAdam(_Adaptive, torch.optim.NAdam):
    """The torch.optim.NAdam for released gradients. The noise biases its second moment (see NAdamBC).

    Its noise step is Adam's.
    """


class RMSprop(_Adaptive, torch.optim.RMSprop):
    """The torch.optim.RMSprop for released gradients: DP-RMSProp. Its second moment is biased (see RMSpropBC).

    Its noise step is Adam's, divided by 1 - momentum. The first steps are longer, because the second moment starts at 0
    and has no startup correction: ten times as long at step 1, 4 % longer at step 5,000 on average.
    """


class Adagrad(PrivateOptimizer, torch.optim.Adagrad):
    """The torch.optim.Adagrad for released gradients: DP-AdaGrad. Its sum of squares is biased (see AdagradBC)."""

    _without_noise_step = "Adagrad, whose steps shrink over time"
