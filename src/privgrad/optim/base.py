"""What makes a torch optimizer take a NoisyGradient, and refuse anything less."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from privgrad.errors import PrivacyError, expected, require_nonnegative, require_positive
from privgrad.types import NoisyGradient

# What torch's schedulers leave in param groups.
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}

NamedParameters = Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]]


class PrivateOptimizer(torch.optim.Optimizer):
    """Mixin before a torch optimizer: `step(grad=...)` takes a NoisyGradient and nothing else.

    Each param group holds `noise_std`, the noise of the last gradient it was given (None before the first): a
    number, or by parameter name.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        kwargs: the torch optimizer's own.
    Raises:
        PrivacyError: parameters without names or of equal names, an option that is unknown or out of its range.
    Privacy:
        Post-processing: state and updates are functions of released gradients and public constants.
    """

    def __init__(self, params: NamedParameters, **kwargs: Any) -> None:
        try:
            super().__init__(cast(Any, params), **kwargs)
        except (TypeError, ValueError) as error:
            if isinstance(error, PrivacyError) or "unexpected keyword" in str(error):  # as of any function
                raise
            remedy = "give model.named_parameters(), and numbers as torch's optimizer of that name takes them"
            function = type(self).__name__
            raise expected(function, "params and options", "to be an optimizer's", error, remedy) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and checked; see the class."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        self._require_group(group)
        self.param_groups.append(group)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], NoisyGradient] | None = None, *, grad: NoisyGradient | None = None
    ) -> None:
        """Update the parameters by one released gradient.

        Whatever is in `.grad` is cleared, before and after: an ordinary backward pass moves nothing, not even a
        parameter that is frozen by now.

        Args:
            closure: returns the gradient; in place of grad.
            grad: the gradient. Parameters that are frozen take no part; all others must be in it.
        Raises:
            PrivacyError: neither or both given, not a NoisyGradient, a parameter without its gradient, or noise that
                is not a number >= 0. The parameters have not moved.
        Privacy:
            Post-processing.
        """
        function = f"{type(self).__name__}.step"
        if (closure is None) == (grad is None):
            got, remedy = "neither" if grad is None else "both", "call step(grad=private_grad(batch))"
            if any(hasattr(parameter, "summed_grad") for group in self.param_groups for parameter in group["params"]):
                remedy = "let privgrad.integrations.opacus.connect(optimizer) tell it of Opacus' noise"
            raise expected(function, "grad or closure", "to be given", got, remedy)
        if isinstance(closure, NoisyGradient):
            raise expected(function, "the gradient", "to be given by name", "by position", "call step(grad=...)")
        gradient = closure() if closure is not None else grad
        if not isinstance(gradient, NoisyGradient):
            remedy = "pass what PrivateGradient returns: a gradient without its noise's size cannot be debiased"
            raise expected(function, "grad", "to be a NoisyGradient", type(gradient).__name__, remedy)
        active = [[name for name, _ in self._active(group)] for group in self.param_groups]
        _require_covered(function, gradient, [name for names in active for name in names])
        self._clear()
        try:
            for group, names in zip(self.param_groups, active, strict=True):
                std = gradient.noise_std
                group["noise_std"] = std if isinstance(std, float | int) else {name: std[name] for name in names}
            self._update(gradient)
        finally:
            # A gradient left behind would be used again by whoever steps next.
            self._clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for the same parameters in the same order, of the same kind of optimizer.

        Raises:
            PrivacyError: names, their order or the options are others. Nothing has changed.
        """
        function, remedy = f"{type(self).__name__}.load_state_dict", "load what an optimizer like this one saved"
        theirs, ours = (
            [group.get("param_names") for group in g] for g in (state_dict["param_groups"], self.param_groups)
        )
        if theirs != ours:
            first = next(
                (pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), (len(theirs), len(ours))
            )
            raise expected(function, "param_names", f"to be {first[1]}, in that order", first[0], remedy)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            differing = (saved.keys() ^ group.keys()) - _SCHEDULED
            if differing:
                got = f"{', '.join(sorted(differing))} on one side only"
                raise expected(function, "the options", "to be the same", got, remedy)
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in saved.items():
                if isinstance(value, Tensor) and value.is_floating_point() and parameter.itemsize < 4:
                    # torch rounds state to its parameter's precision; see `widened`.
                    self.state[parameter][name] = value.detach().to(parameter.device, torch.float32, copy=True)

    def _update(self, gradient: NoisyGradient) -> None:
        """Displacement the parameters by the gradient: torch's own step, unless a subclass has its own."""
        for group in self.param_groups:
            for name, parameter in self._active(group):
                value = gradient.values[name].to(parameter.dtype)
                parameter.grad = value.clone() if group.get("nesterov") else value  # into which foreach adds
        step = super().step
        # Bare: hooks have run around our own step, and would run again.
        (step.__func__.__wrapped__ if getattr(step, "hooked", False) else step.__func__)(self)  # pyright: ignore

    def _require_group(self, group: dict[str, Any]) -> None:
        """Check one param group; what numpy gave becomes plain numbers, which checkpoints can hold."""
        function = type(self).__name__
        if "param_names" not in group:
            remedy = "pass model.named_parameters(), not model.parameters()"
            raise expected(function, "params", "to have names", "bare parameters", remedy)
        known = {name for other in self.param_groups for name in other["param_names"]}
        if repeated := sorted(known & set(group["param_names"])):
            remedy = "give one model an optimizer, or prefix the names"
            raise expected(function, "names", "to differ between groups", ", ".join(repeated), remedy)
        unknown = group.keys() - self.defaults.keys() - {"params", "param_names", "noise_std", "name"} - _SCHEDULED
        if unknown:
            remedy = f"choose among {', '.join(sorted(self.defaults))}"
            raise expected(function, "options of a param group", "to be known", ", ".join(sorted(unknown)), remedy)
        group |= {key: value.item() for key, value in group.items() if isinstance(value, np.generic)}
        group["noise_std"] = None
        require_nonnegative(function, "lr", _number(group["lr"]), "give the learning rate")
        self._require_options(group)

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Raise PrivacyError for an option of the subclass that is out of its range."""

    def _clear(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @staticmethod
    def _active(group: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
        """The group's trainable parameters with their names."""
        pairs = zip(group["param_names"], group["params"], strict=True)
        return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def _number(value: Any) -> Any:
    """Return what a tensor of one number holds; all else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _require_covered(function: str, gradient: NoisyGradient, names: list[str]) -> None:
    missing = [name for name in names if name not in gradient.values]
    if missing:
        remedy = "give the optimizer and PrivateGradient the same model"
        got = f"none for {', '.join(missing)}"
        raise expected(function, "grad", "to cover every trainable parameter", got, remedy)
    std = gradient.noise_std
    for name in names:
        noise: object = cast("Mapping[str, object]", std).get(name) if hasattr(std, "get") else std
        one = noise if isinstance(noise, float | int | Tensor) else math.nan
        if not bool(torch.as_tensor((one >= 0) & (one < math.inf)).all()):
            remedy = "pass what PrivateGradient returns; made by hand, give sigma C / B"
            got = "others" if isinstance(noise, Tensor) else noise
            raise expected(function, f"noise_std of {name!r}", "to be finite numbers >= 0", got, remedy)


def widened(parameter: Tensor) -> Tensor:
    """Zeros like a parameter, in float32 or wider: moments of half-precision gradients would drown in rounding."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


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
        super().__init__(params, defaults={"lr": lr, "momentum": momentum})

    def _require_options(self, group: Mapping[str, Any]) -> None:
        if not 0 <= group["momentum"] < 1:
            raise expected("MomentumSGD", "momentum", "to be in [0, 1)", group["momentum"], "0.9 is usual")

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["step"], state["momentum_buffer"] = 0, widened(parameter)
                state["step"] += 1
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient.values[name])
                correction = 1 - group["momentum"] ** state["step"]
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"] / correction)


class Yogi(PrivateOptimizer):
    """Adam whose second moment moves by at most a step, not by a share of itself: FedYogi's server optimizer.

    Computes, elementwise, from m = 0 and v = eps**2:
        m = beta1 m + (1 - beta1) g;  v = v - (1 - beta2) sign(v - g**2) g**2;  p = p - lr m / (sqrt(v) + eps)

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        betas: decays (beta1, beta2), each in [0, 1).
        eps: > 0, gradient units.
    Raises:
        PrivacyError: parameters without names, or a number out of its range.
    Privacy:
        Post-processing. The second moment is biased by the noise, as Adam's is.
    Reference:
        Zaheer et al. 2018 (Yogi); Reddi et al. 2021 (arXiv 2003.00295), algorithm 2, without startup correction.
    """

    def __init__(
        self, params: NamedParameters, *, lr: float, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "betas": betas, "eps": eps})

    def _require_options(self, group: Mapping[str, Any]) -> None:
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise expected("Yogi", "betas", "to be in [0, 1)", group["betas"], "(0.9, 0.99) is usual")
        require_positive("Yogi", "eps", group["eps"], "1e-3 is usual")

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = widened(parameter), widened(parameter) + group["eps"] ** 2
                moment, second = state["exp_avg"], state["exp_avg_sq"]
                given = gradient.values[name].to(moment.dtype)
                square = given.square()
                moment.lerp_(given, 1 - beta1)
                second.addcmul_(torch.sign(second - square), square, value=beta2 - 1)
                parameter.addcdiv_(moment, second.sqrt().add_(group["eps"]), value=-group["lr"])


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
