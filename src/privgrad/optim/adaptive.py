"""Adaptive optimizers that subtract the known noise variance from their second moment.

Users and `papers` make the optimizers; `experiments.spec` and `audit.methods` make them by name, through
`optim.OPTIMIZERS`. The base class PrivateOptimizer calls `_update` in each step, and `_require_options` for each param
group.

The privacy guarantee does not rest on this file, which uses released gradients and public numbers only.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from privgrad.errors import require_decays, require_nonnegative, require_positive
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.optim.debias import FloorRule, debias, noise_floor, require_rule
from privgrad.threads import blocks
from privgrad.types import NoisyGradient

Group = dict[str, Any]
State = dict[str, Any]

# The default floor in variances of the noise, measured for AdamBC (docs/choosing.md): 4 was best on tags, sections and
# the autoencoder, level on digits, and half a point behind 1 on a small CNN. The others share its denominator.
DEFAULT_FLOOR = 4.0


class Debiased(PrivateOptimizer):
    """A base class of all `*BC` optimizers. It updates in one pass over memory, and noise_std may change over time.

    Computes, elementwise, with g the released gradient, noise_std its noise, and the subclass's keep, add, beta, floor,
    of_gradient and of_average for a group:
        v = keep v + add g**2;  n = keep n + add noise_std**2;  m = beta m + (1 - beta) g (if the subclass has a beta)
        p = (1 - decay) p - (of_gradient g + of_average m) / sqrt(debias(v, sqrt(n), floor))

    A coordinate without signal is on the floor if `debias_floor` is well above the relative spread of v, which is
    sqrt(2 (1 - beta2) / (1 + beta2)): 0.03 for 0.999, docs/mathematics.md (5.4). From about 0.3 on, the noise step is
    lr / sqrt(debias_floor), see (5.6) there.
    Below, most coordinates of a real model are not on the floor, and the noise step does not describe their steps.
    """

    _square: ClassVar[str] = "exp_avg_sq"
    _noise: ClassVar[str] = "exp_avg_noise_var"

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Raise PrivacyError if an option is out of its range."""
        function = type(self).__name__
        require_positive(function, "debias_floor", group["debias_floor"], f"{DEFAULT_FLOOR:g} is the default")
        if group["gamma_prime"] is not None:
            require_positive(function, "gamma_prime", group["gamma_prime"], "leave it out to use debias_floor")
        if "floor_rule" in group:
            require_rule(function, group["floor_rule"])
        for option, usual in (("betas", (0.9, 0.999)), ("alpha", 0.99)):
            if option in group:
                require_decays(function, option, group[option], usual)
        for option, usual in (("weight_decay", "1e-2"), ("momentum_decay", "4e-3")):
            require_nonnegative(function, option, group.get(option, 0.0), f"give {usual}")

    def fraction_floored(self) -> float:
        """Return the share of coordinates whose debiased second moment equals its floor, in [0, 1].

        It is nan before the first step. For a sharded model only the coordinates of this process count. Users call it,
        and `experiments.runner` records it at the end of a training.

        Privacy:
            Post-processing.
        """
        counts = self.floored().values()
        total = sum(coordinates for _, coordinates in counts)
        return sum(floored for floored, _ in counts) / total if total else math.nan

    def floored(self) -> dict[str, tuple[int, int]]:
        """Return by parameter name the number of coordinates on their floor and the number of all coordinates.

        Parameters that were never updated are left out. Users call it, and `diagnostics.recorder` reports it by layer.

        Privacy:
            Post-processing.
        """
        found: dict[str, tuple[int, int]] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                state = self.state[parameter]
                if state:
                    floor = self._floor(group, state)
                    square, noise_std = state[self._square], state[self._noise] ** 0.5
                    on_floor: Any = debias(square, noise_std, floor=floor) <= floor
                    local = on_floor.to_local() if hasattr(on_floor, "to_local") else on_floor
                    found[name] = int(local.sum()), local.numel()
        return found

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        """Move the parameters by the gradient, as the class describes."""
        for group in self.param_groups:
            beta, (keep, add) = self._beta(group), self._weights(group)
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state[self._square] = widened(parameter)
                    state[self._noise] = 0.0
                    if beta is not None:
                        state["exp_avg"] = widened(parameter)
                state["step"] += 1
                state[self._noise] = keep * state[self._noise] + add * gradient.noise_std_of(name) ** 2
                floor, (of_gradient, of_average) = self._floor(group, state), self._coefficients(group, state)
                rule, moment_scale = group.get("floor_rule", "max"), self._moment_scale(group, state)
                decay = group["lr"] * group.get("weight_decay", 0.0)
                given = gradient[name].to(state[self._square].dtype)
                tensors = (parameter, given, state[self._square], state.get("exp_avg"))
                for values, grad, square, average, std, lowest in blocks(*tensors, state[self._noise] ** 0.5, floor):
                    if keep != 1:
                        square.mul_(keep)
                    square.addcmul_(grad, grad, value=add)
                    moment_sq = None
                    if beta is not None:
                        average.lerp_(grad, 1 - beta)
                        moment_sq = average.square().mul_(moment_scale) if rule == "moment" else None
                    root = debias(square, std, floor=lowest, rule=rule, moment_sq=moment_sq).sqrt_()
                    if decay:
                        values.mul_(1 - decay)
                    if of_gradient:
                        values.addcdiv_(grad, root, value=-of_gradient)
                    if of_average:
                        values.addcdiv_(average, root, value=-of_average)

    def _beta(self, group: Group) -> float | None:
        """Return the decay of the first moment, or None if the optimizer has no first moment."""
        return None

    def _weights(self, group: Group) -> tuple[float, float]:
        """Return (keep, add) of the second moment."""
        raise NotImplementedError

    def _floor(self, group: Group, state: State) -> float | Tensor:
        """Return the floor in the units of the stored second moment.

        debias(c v, sqrt(c) s, c floor) = c debias(v, s, floor), so `_coefficients` can apply a startup correction c to
        the step size.
        """
        if group["gamma_prime"] is not None:
            return self._correction(group, state) * group["gamma_prime"]
        return noise_floor(state[self._noise] ** 0.5, group["debias_floor"])

    def _correction(self, group: Group, state: State) -> float:
        """Return the factor that the stored second moment has and the corrected one has not."""
        return 1.0

    def _noise_step_per_lr(self, group: Mapping[str, Any], noise_std: float | Tensor) -> float | Tensor:
        if group["gamma_prime"] is None:
            return group["debias_floor"] ** -0.5 * (noise_std > 0)
        return noise_std / group["gamma_prime"] ** 0.5

    def _why_no_noise_step(self, group: Mapping[str, Any]) -> str:
        if group["gamma_prime"] is not None and group["lr_is_noise_step"]:
            return "gamma_prime, which is in gradient units; give debias_floor in its place"
        rule = group.get("floor_rule", "max")
        return self._without_noise_step or ("" if rule == "max" else f"floor_rule={rule!r}")

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        """Return (of_gradient, of_average), the factors of g and m in the update. May update numbers in the state."""
        raise NotImplementedError

    def _moment_scale(self, group: Group, state: State) -> float:
        """Return the factor that converts m**2 to the units of the stored second moment."""
        return 1.0


class AdamBC(Debiased):
    """An Adam that subtracts the noise variance from its second moment: DP-AdamBC.

    Computes, elementwise, with g the released gradient and noise_std its noise:
        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g**2;  n = beta2 n + (1 - beta2) noise_std**2
        c = 1 - beta2**t;  p = p - lr * m / (1 - beta1**t) / sqrt(debias(v / c, sqrt(n / c), floor))

    Constant noise gives n / c = noise_std**2. No eps is added to the denominator: the floor bounds it from below.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0. Give this or noise_step.
        noise_step: in place of lr, see PrivateOptimizer. It is lr / sqrt(debias_floor), see Debiased.
        betas: decays (beta1, beta2), each in [0, 1).
        debias_floor: smallest debiased second moment, in variances of the noise, > 0. It is the method's main
            parameter: a large floor gives SGD with momentum, a small one Adam with a debiased denominator.
        gamma_prime: smallest debiased second moment in gradient**2, > 0, in place of debias_floor: the papers'
            gamma'. None: debias_floor.
        floor_rule: how the floor is applied, see `debias`; all rules except "max" are for ablations.
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing: the state holds moments of released gradients and public constants only.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), algorithm 1. Deviations: n tracks noise that changes over time; the floor is
        relative to the noise, unless gamma_prime is given.
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        noise_step: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        debias_floor: float = DEFAULT_FLOOR,
        gamma_prime: float | None = None,
        floor_rule: FloorRule = "max",
    ) -> None:
        options = _adam_options(lr, betas, debias_floor, gamma_prime, floor_rule)
        super().__init__(params, defaults=options, noise_step=noise_step)

    def _beta(self, group: Group) -> float:
        return group["betas"][0]

    def _weights(self, group: Group) -> tuple[float, float]:
        return group["betas"][1], 1 - group["betas"][1]

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        step_size = group["lr"] / (1 - group["betas"][0] ** state["step"])
        return 0.0, step_size * self._correction(group, state) ** 0.5

    def _moment_scale(self, group: Group, state: State) -> float:
        return self._correction(group, state) / (1 - group["betas"][0] ** state["step"]) ** 2

    def _correction(self, group: Group, state: State) -> float:
        """Return Adam's startup correction of the second moment, 1 - beta2**t."""
        return 1 - group["betas"][1] ** state["step"]


class AdamWBC(AdamBC):
    """An AdamBC with decoupled weight decay: p = (1 - lr * weight_decay) p, then AdamBC's step.

    Args:
        weight_decay: >= 0; multiplied by lr.
        params, lr, noise_step, betas, debias_floor, gamma_prime, floor_rule, Raises, Privacy: as AdamBC.
    Reference:
        Loshchilov, Hutter 2019 (AdamW), with the denominator of Tang, Lecuyer 2023.
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        noise_step: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        debias_floor: float = DEFAULT_FLOOR,
        gamma_prime: float | None = None,
        floor_rule: FloorRule = "max",
    ) -> None:
        options = _adam_options(lr, betas, debias_floor, gamma_prime, floor_rule)
        Debiased.__init__(self, params, defaults=options | {"weight_decay": weight_decay}, noise_step=noise_step)


class NAdamBC(AdamBC):
    """An AdamBC with Nesterov momentum, as in torch's NAdam.

    Computes: mu_t = beta1 (1 - 0.5 * 0.96**(t * momentum_decay)), and p moves by
        lr ((1 - mu_t) g / (1 - prod mu) + mu_{t+1} m / (1 - prod mu * mu_{t+1})) over AdamBC's denominator.

    Args:
        momentum_decay: >= 0.
        params, lr, noise_step, betas, debias_floor, gamma_prime, floor_rule, Raises, Privacy: as AdamBC.
    Reference:
        Dozat 2016 (NAdam), with the denominator of Tang, Lecuyer 2023.
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        noise_step: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum_decay: float = 4e-3,
        debias_floor: float = DEFAULT_FLOOR,
        gamma_prime: float | None = None,
        floor_rule: FloorRule = "max",
    ) -> None:
        options = _adam_options(lr, betas, debias_floor, gamma_prime, floor_rule)
        Debiased.__init__(self, params, defaults=options | {"momentum_decay": momentum_decay}, noise_step=noise_step)

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        def mu(t: int) -> float:
            return group["betas"][0] * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"]))

        now, following = mu(state["step"]), mu(state["step"] + 1)
        state["mu_product"] = state.get("mu_product", 1.0) * now
        size = group["lr"] * self._correction(group, state) ** 0.5
        product = state["mu_product"]
        return size * (1 - now) / (1 - product), size * following / (1 - product * following)


class RMSpropBC(Debiased):
    """An RMSprop that subtracts the noise variance from its second moment.

    Computes: v = alpha v + (1 - alpha) g**2;  n = alpha n + (1 - alpha) noise_std**2;
        p = p - lr * g / sqrt(debias(v, sqrt(n), floor)). As in torch's RMSprop, v and n have no startup correction.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0. Give this or noise_step.
        noise_step: in place of lr, see PrivateOptimizer. It is lr / sqrt(debias_floor), see Debiased.
        alpha: decay of the second moment, in [0, 1).
        debias_floor, gamma_prime: as in AdamBC.
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing.
    Reference:
        Ours, after Tang, Lecuyer 2023; its biased form is RMSprop.
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        noise_step: float | None = None,
        alpha: float = 0.99,
        debias_floor: float = DEFAULT_FLOOR,
        gamma_prime: float | None = None,
    ) -> None:
        options = {"lr": lr, "alpha": alpha, "debias_floor": debias_floor, "gamma_prime": gamma_prime}
        super().__init__(params, defaults=options, noise_step=noise_step)

    def _weights(self, group: Group) -> tuple[float, float]:
        return group["alpha"], 1 - group["alpha"]

    def _floor(self, group: Group, state: State) -> float | Tensor:
        if group["gamma_prime"] is not None:
            return group["gamma_prime"]
        noise_var = state[self._noise] / (1 - group["alpha"] ** state["step"])
        return noise_floor(noise_var**0.5, group["debias_floor"])

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        return group["lr"], 0.0


class AdagradBC(Debiased):
    """An Adagrad that subtracts the noise variance from its sum of squared gradients.

    Computes: v = v + g**2;  n = n + noise_std**2;  p = p - lr * g / sqrt(debias(v, sqrt(n), floor)).

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        debias_floor: smallest debiased sum of squares, in variances of the noise in this sum, > 0.
        gamma_prime: smallest debiased sum of squares in gradient**2, > 0, in place of debias_floor. None: debias_floor.
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing.
    Reference:
        Ours, after Tang, Lecuyer 2023; its biased form is Adagrad.
    """

    _square = "sum"
    _noise = "noise_var_sum"
    _without_noise_step = "AdagradBC, whose steps shrink over time"

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        debias_floor: float = DEFAULT_FLOOR,
        gamma_prime: float | None = None,
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "debias_floor": debias_floor, "gamma_prime": gamma_prime})

    def _weights(self, group: Group) -> tuple[float, float]:
        return 1.0, 1.0

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        return group["lr"], 0.0


def _adam_options(
    lr: float | None,
    betas: tuple[float, float],
    debias_floor: float,
    gamma_prime: float | None,
    floor_rule: FloorRule,
) -> dict[str, Any]:
    """Return the options that AdamBC, AdamWBC and NAdamBC share, by name."""
    floor = {"debias_floor": debias_floor, "gamma_prime": gamma_prime, "floor_rule": floor_rule}
    return {"lr": lr, "betas": betas, **floor}
