"""The mixin that makes a torch optimizer accept only released gradients, and the optimizers without debiasing.

`adaptive` and `public_data` build on it. Users and `papers` make the optimizers; `experiments.spec` and `audit.methods`
make them by name, through `optim.OPTIMIZERS`.

The privacy guarantee rests on `step` and `_clear` only: nothing but a released gradient may move a parameter. The rest
of this file is post-processing of released gradients.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from privgrad.errors import PrivacyError, expected, require_decays, require_nonnegative, require_positive
from privgrad.types import NoisyGradient

# Keys that torch's schedulers add to param groups.
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}

NamedParameters = Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]]


class PrivateOptimizer(torch.optim.Optimizer):
    """A mixin for torch optimizers: `step(grad=...)` accepts a NoisyGradient and nothing else.

    List it before the torch optimizer among the base classes. Each param group holds `noise_std`, the standard
    deviation of the noise in the group's last gradient: a number, or a mapping by parameter name. It is None before
    the first step.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        args, kwargs: options of the torch optimizer, `lr` first.
    Raises:
        PrivacyError: parameters lack names or share a name, or an option is unknown or out of its range.
    Privacy:
        Post-processing: state and updates are functions of released gradients and public constants.
    """

    def __init__(self, params: NamedParameters, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(cast(Any, params), *args, **kwargs)
        except (TypeError, ValueError) as error:
            if isinstance(error, PrivacyError) or "unexpected keyword" in str(error):  # a TypeError, as usual
                raise
            remedy = "give model.named_parameters(), and options in their ranges"
            function = type(self).__name__
            raise expected(function, "params and options", "to be valid for torch", error, remedy) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch, after the checks that the class describes.

        torch's constructor calls it for each param group; users can call it later.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        self._require_group(group)
        self.param_groups.append(group)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], NoisyGradient] | None = None, *, grad: NoisyGradient | None = None
    ) -> None:
        """Update the parameters with one released gradient.

        Clears every `.grad` before and after the update. A gradient of an ordinary backward pass therefore never
        moves a parameter, even one that has since been frozen. Users, `training_run`, the bridges, `papers` and
        `audit.methods` call it.

        Args:
            closure: returns the gradient; an alternative to grad.
            grad: the gradient. It must hold a value for each trainable parameter; frozen parameters are skipped.
        Raises:
            PrivacyError: neither or both are given, the gradient is not a NoisyGradient, a trainable parameter has no
                value in it, or noise_std is not a finite number >= 0. The parameters have not moved.
        Privacy:
            Post-processing.
        """
        function = f"{type(self).__name__}.step"
        if (closure is None) == (grad is None):
            got, remedy = 0 if grad is None else 2, "call step(grad=private_grad(batch))"
            if any(hasattr(parameter, "summed_grad") for group in self.param_groups for parameter in group["params"]):
                remedy = "call privgrad.integrations.opacus.connect(optimizer) before the first step"
            raise expected(function, "exactly one of grad and closure", "to be given", got, remedy)
        if isinstance(closure, NoisyGradient):
            condition, got = "to be the keyword argument grad", "a positional argument"
            raise expected(function, "the gradient", condition, got, "call step(grad=...)")
        gradient = closure() if closure is not None else grad
        if not isinstance(gradient, NoisyGradient):
            remedy = "pass the return value of PrivateGradient: without noise_std a gradient cannot be debiased"
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
            # Otherwise a later step could use this gradient again.
            self._clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch, that the same kind of optimizer saved for the same parameters in the same order.

        The options take their saved values. Users, `training_run` and `integrations.flower` call it.

        Raises:
            PrivacyError: the parameter names, their order or the names of the options differ. The optimizer has not
                changed.
        """
        function = f"{type(self).__name__}.load_state_dict"
        remedy = "load a state that the same optimizer class saved for the same model"
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
                got = ", ".join(f"{'unknown' if name in saved else 'no'} {name}" for name in sorted(differing))
                raise expected(function, "the options", "to be the same as this optimizer's", got, remedy)
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in saved.items():
                if isinstance(value, Tensor) and value.is_floating_point() and parameter.itemsize < 4:
                    # torch has rounded this state to the parameter's precision; see `widened`.
                    self.state[parameter][name] = value.detach().to(parameter.device, torch.float32, copy=True)

    def _update(self, gradient: NoisyGradient) -> None:
        """Move the parameters by the gradient: torch's own step, unless a subclass overrides this."""
        for group in self.param_groups:
            for name, parameter in self._active(group):
                value = gradient[name].to(parameter.dtype)
                # torch's foreach implementation of Nesterov momentum adds to .grad in place.
                parameter.grad = value.clone() if group.get("nesterov") else value
        step = super().step
        # Unwrapped: the hooks of torch's optimizers already run around our `step`, and must not run twice.
        (step.__func__.__wrapped__ if getattr(step, "hooked", False) else step.__func__)(self)  # pyright: ignore

    def _require_group(self, group: dict[str, Any]) -> None:
        """Check one param group, and turn its numpy scalars into plain numbers, which checkpoints can hold.

        Raises:
            PrivacyError: see the class.
        """
        function = type(self).__name__
        if "param_names" not in group:
            remedy = "pass model.named_parameters(), not model.parameters()"
            raise expected(function, "params", "to have names", "parameters without names", remedy)
        known = {name for other in self.param_groups for name in other["param_names"]}
        if repeated := sorted(known & set(group["param_names"])):
            remedy = "use one optimizer per model, or prefix the names"
            condition, got = "to differ between groups", f"{', '.join(repeated)} twice"
            raise expected(function, "names of parameters", condition, got, remedy)
        unknown = group.keys() - self.defaults.keys() - {"params", "param_names", "noise_std", "name"} - _SCHEDULED
        if unknown:
            remedy = f"choose among {', '.join(sorted(self.defaults))}"
            raise expected(function, "options of a param group", "to be known", ", ".join(sorted(unknown)), remedy)
        group |= {key: value.item() for key, value in group.items() if isinstance(value, np.generic)}
        group["noise_std"] = None
        require_nonnegative(function, "lr", _number(group["lr"]), "give the learning rate")
        self._require_options(group)

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Raise PrivacyError if an option is out of its range.

        This version checks nothing. Where no subclass overrides it, torch's constructor checks the defaults.
        """

    def _clear(self) -> None:
        """Remove every `.grad`, so that none of them can move a parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @staticmethod
    def _active(group: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
        """Return the names and the parameters of a group that are trainable."""
        pairs = zip(group["param_names"], group["params"], strict=True)
        return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; return any other value unchanged."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _require_covered(function: str, gradient: NoisyGradient, names: list[str]) -> None:
    """Raise PrivacyError unless the gradient has a value and a valid noise_std for each name."""
    missing = [name for name in names if name not in gradient]
    if missing:
        remedy = "give the optimizer and PrivateGradient the same model"
        got = f"a gradient without {', '.join(missing)}"
        raise expected(function, "grad", "to cover every trainable parameter", got, remedy)
    std = gradient.noise_std
    for name in names:
        noise: object = cast("Mapping[str, object]", std).get(name) if hasattr(std, "get") else std
        one = noise if isinstance(noise, float | int | Tensor) else math.nan
        if not bool(torch.as_tensor((one >= 0) & (one < math.inf)).all()):
            remedy = "pass the return value of PrivateGradient, or a NoisyGradient with noise_std = sigma C / B"
            got = f"{float(noise.min()):g} to {float(noise.max()):g}" if isinstance(noise, Tensor) else noise
            raise expected(function, f"noise_std of {name!r}", "to be finite numbers >= 0", got, remedy)


def widened(parameter: Tensor) -> Tensor:
    """Return zeros shaped like a parameter, in float32 or wider.

    The optimizers of this package call it for their state. In half precision, rounding would swamp the moments of
    gradients.
    """
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


class SGD(PrivateOptimizer, torch.optim.SGD):
    """The torch.optim.SGD for released gradients: DP-SGD, or DP-GDM with momentum."""


class MomentumSGD(PrivateOptimizer):
    """An SGD with momentum and Adam's startup correction. DP-Adam behaves like it where noise dominates.

    Computes: b = momentum * b + g;  p = p - lr * b / (1 - momentum**t). With lr = lr_adam (1 - momentum) / noise_std
    this is DP-Adam when the noise dominates its denominator. (SGD(momentum=...) is DP-GDM, without the correction.)

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        momentum: in [0, 1).
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), their comparison of DP-Adam with DP-SGD.
    """

    def __init__(self, params: NamedParameters, lr: float, *, momentum: float = 0.9) -> None:
        super().__init__(params, defaults={"lr": lr, "momentum": momentum})

    def _require_options(self, group: Mapping[str, Any]) -> None:
        require_decays("MomentumSGD", "momentum", group["momentum"], 0.9)

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["step"], state["momentum_buffer"] = 0, widened(parameter)
                state["step"] += 1
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient[name])
                correction = 1 - group["momentum"] ** state["step"]
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"] / correction)


class Yogi(PrivateOptimizer):
    """An Adam whose second moment changes per step by at most (1 - beta2) g**2: FedYogi's server optimizer.

    Computes, elementwise, from m = 0 and v = eps**2:
        m = beta1 m + (1 - beta1) g;  v = v - (1 - beta2) sign(v - g**2) g**2;  p = p - lr m / (sqrt(v) + eps)

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        betas: decays (beta1, beta2), each in [0, 1).
        eps: > 0, gradient units.
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing. The noise biases the second moment, as in Adam.
    Reference:
        Zaheer et al. 2018 (Yogi); Reddi et al. 2021 (arXiv 2003.00295), algorithm 2, without startup correction.
    """

    def __init__(
        self, params: NamedParameters, lr: float, *, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "betas": betas, "eps": eps})

    def _require_options(self, group: Mapping[str, Any]) -> None:
        require_decays("Yogi", "betas", group["betas"], (0.9, 0.99))
        require_positive("Yogi", "eps", group["eps"], "give 1e-3, the usual value")

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = widened(parameter), widened(parameter) + group["eps"] ** 2
                moment, second = state["exp_avg"], state["exp_avg_sq"]
                given = gradient[name].to(moment.dtype)
                square = given.square()
                moment.lerp_(given, 1 - beta1)
                second.addcmul_(torch.sign(second - square), square, value=beta2 - 1)
                parameter.addcdiv_(moment, second.sqrt().add_(group["eps"]), value=-group["lr"])


class Adam(PrivateOptimizer, torch.optim.Adam):
    """The torch.optim.Adam for released gradients: DP-Adam. The noise biases its second moment (see AdamBC)."""


class AdamW(PrivateOptimizer, torch.optim.AdamW):
    """The torch.optim.AdamW for released gradients. The noise biases its second moment (see AdamWBC)."""


class NAdam(PrivateOptimizer, torch.optim.NAdam):
    """The torch.optim.NAdam for released gradients. The noise biases its second moment (see NAdamBC)."""


class RMSprop(PrivateOptimizer, torch.optim.RMSprop):
    """The torch.optim.RMSprop for released gradients: DP-RMSProp. Its second moment is biased (see RMSpropBC)."""


class Adagrad(PrivateOptimizer, torch.optim.Adagrad):
    """The torch.optim.Adagrad for released gradients: DP-AdaGrad. Its sum of squares is biased (see AdagradBC)."""


def constructor_arguments(kind: Callable[..., PrivateOptimizer]) -> list[str]:
    """Return the names of the arguments of an optimizer's constructor, in their order.

    A class without a constructor, or with one that takes `**kwargs`, has the arguments of its base. `experiments.spec`,
    `experiments.load_spec` and `audit.methods` call it.
    """
    classes = [cls for cls in cast("type[PrivateOptimizer]", kind).__mro__ if "__init__" in vars(cls)]
    signatures = (inspect.signature(cls.__init__).parameters for cls in classes)
    return [name for name in next(s for s in signatures if "kwargs" not in s) if name != "self"]
