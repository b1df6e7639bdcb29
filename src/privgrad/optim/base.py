"""What makes a torch optimizer take a NoisyGradient, and refuse anything less."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_nonnegative
from privgrad.types import NoisyGradient

NamedParameters = Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]]


class PrivateOptimizer(torch.optim.Optimizer):
    """Mixin before a torch optimizer: `step(grad=...)` takes a NoisyGradient and nothing else.

    Each param group holds `noise_std`, the noise of the last gradient it was given (None before the first): a
    number, or a list aligned with the group's parameters.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        kwargs: the torch optimizer's own.
    Raises:
        PrivacyError: parameters without names.
    Privacy:
        Post-processing: state and updates are functions of released gradients and public constants.
    """

    def __init__(self, params: NamedParameters, **kwargs: Any) -> None:
        super().__init__(cast(Any, params), **kwargs)
        for group in self.param_groups:
            if "param_names" not in group:
                remedy = "pass model.named_parameters(), not model.parameters()"
                raise expected(type(self).__name__, "params", "to have names", "bare parameters", remedy)
            group["noise_std"] = None

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], NoisyGradient] | None = None, *, grad: NoisyGradient | None = None
    ) -> None:
        """Update the parameters by one released gradient.

        Args:
            closure: returns the gradient; in place of grad.
            grad: the gradient. Parameters that are frozen take no part; all others must be in it.
        Raises:
            PrivacyError: neither or both given, not a NoisyGradient, or a parameter without its gradient. The
                parameters have not moved.
        Privacy:
            Post-processing.
        """
        function = f"{type(self).__name__}.step"
        if (closure is None) == (grad is None):
            got = "neither" if grad is None else "both"
            raise expected(function, "grad or closure", "to be given", got, "call step(grad=private_grad(batch))")
        gradient = closure() if closure is not None else grad
        if not isinstance(gradient, NoisyGradient):
            remedy = "pass what PrivateGradient returns: a gradient without its noise's size cannot be debiased"
            raise expected(function, "grad", "to be a NoisyGradient", type(gradient).__name__, remedy)
        active = [self._active(group) for group in self.param_groups]
        missing = [name for pairs in active for name, _ in pairs if name not in gradient.values]
        if missing:
            remedy = "give the optimizer and PrivateGradient the same model"
            got = f"none for {', '.join(missing)}"
            raise expected(function, "grad", "to cover every trainable parameter", got, remedy)
        try:
            for group, pairs in zip(self.param_groups, active, strict=True):
                group["noise_std"] = _noise_std(gradient, [name for name, _ in pairs])
                for name, parameter in pairs:
                    parameter.grad = gradient.values[name].to(parameter.dtype)
            self._update()
        finally:
            # A gradient left behind would be used again by whoever steps next.
            for pairs in active:
                for _, parameter in pairs:
                    parameter.grad = None

    def _update(self) -> None:
        """Move the parameters by their `.grad`: torch's own step, unless a subclass has its own."""
        super().step()

    @staticmethod
    def _active(group: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
        """The group's trainable parameters with their names."""
        pairs = zip(group["param_names"], group["params"], strict=True)
        return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]

    @classmethod
    def _active_noise(cls, group: Mapping[str, Any]) -> list[tuple[nn.Parameter, float | Tensor]]:
        """The group's trainable parameters, each with the noise of its present gradient."""
        parameters = [parameter for _, parameter in cls._active(group)]
        noise_std = group["noise_std"]
        stds = cast("list[float | Tensor]", noise_std if isinstance(noise_std, list) else [noise_std] * len(parameters))
        return list(zip(parameters, stds, strict=True))


def _noise_std(gradient: NoisyGradient, names: list[str]) -> float | list[float | Tensor]:
    """As a param group holds it."""
    if isinstance(gradient.noise_std, float | int):
        return gradient.noise_std
    return [gradient.noise_std[name] for name in names]


class SGD(PrivateOptimizer, torch.optim.SGD):
    """torch.optim.SGD for released gradients: DP-SGD, and DP-GDM with momentum."""


class MomentumSGD(PrivateOptimizer):
    """Momentum SGD with Adam's startup correction: what DP-Adam is where noise fills its denominator.

    Computes: b = momentum * b + g;  p = p - lr * b / (1 - momentum**t). With lr = lr_adam (1 - momentum) / noise_std
    this is DP-Adam once the noise outweighs the gradient. (SGD(momentum=...) is DP-GDM: without the correction.)

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        momentum: in [0, 1).
    Raises:
        PrivacyError: parameters without names, or a number out of its range.
    Privacy:
        Post-processing.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their comparison of DP-Adam with DP-SGD.
    """

    def __init__(self, params: NamedParameters, *, lr: float, momentum: float = 0.9) -> None:
        require_nonnegative("MomentumSGD", "lr", lr, "give the learning rate")
        if not 0 <= momentum < 1:
            raise expected("MomentumSGD", "momentum", "to be in [0, 1)", momentum, "0.9 is usual")
        super().__init__(params, defaults={"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def _update(self) -> None:
        for group in self.param_groups:
            for _, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["step"], state["momentum_buffer"] = 0, torch.zeros_like(parameter)
                assert parameter.grad is not None
                state["step"] += 1
                state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                correction = 1 - group["momentum"] ** state["step"]
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"] / correction)


class Adam(PrivateOptimizer, torch.optim.Adam):
    """torch.optim.Adam for released gradients: DP-Adam, its second moment biased by the noise (see AdamBC)."""


class AdamW(PrivateOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW for released gradients, its second moment biased by the noise (see AdamWBC)."""


class NAdam(PrivateOptimizer, torch.optim.NAdam):
    """torch.optim.NAdam for released gradients."""


class RMSprop(PrivateOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop for released gradients: DP-RMSProp."""


class Adagrad(PrivateOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad for released gradients: DP-AdaGrad."""
