"""Adaptive optimizers that subtract the known noise variance from their second moment."""

from typing import ClassVar

from torch import Tensor

from privgrad.optim.base import NamedParameters
from privgrad.optim.debiased import DEFAULT_FLOOR, Debiased, FloorRule, Group, State, noise_floor


class AdamBC(Debiased):
    """DP-AdamBC. Its default floor makes it momentum SGD where noise dominates; `gamma_prime` sets the papers' floor.

    Subtracts the noise variance in Adam's v. Elementwise, with g the released gradient and noise_std its noise:
        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g**2;  n = beta2 n + (1 - beta2) noise_std**2
        c = 1 - beta2**t;  p = p - lr * m / (1 - beta1**t) / sqrt(debias(v / c, sqrt(n / c), floor))

    Constant noise gives n / c = noise_std**2. No eps is added to the denominator: the floor bounds it from below.

    Args:
        noise_step: in place of lr. It is lr / sqrt(debias_floor), see Debiased.
        betas: decays (beta1, beta2), each in [0, 1).
        debias_floor: smallest debiased second moment, in variances of the noise, > 0. It is the method's main
            parameter: a large floor gives SGD with momentum, a small one Adam with a debiased denominator.
        gamma_prime: smallest debiased second moment in gradient**2, > 0, in place of debias_floor: the papers'
            gamma'. It does not follow C, sigma and B. None: debias_floor.
        floor_rule: how the floor is applied, see `debias`; all rules except "max" are for ablations.
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
        floor = {"debias_floor": debias_floor, "gamma_prime": gamma_prime, "floor_rule": floor_rule}
        super().__init__(params, defaults={"lr": lr, "betas": betas, **floor}, noise_step=noise_step)

    def _beta(self, group: Group) -> float:
        return group["betas"][0]

    def _weights(self, group: Group) -> tuple[float, float]:
        return group["betas"][1], 1 - group["betas"][1]

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        step_size = group["lr"] / (1 - group["betas"][0] ** state["step"])
        return 0.0, step_size * self._correction(group, state) ** 0.5

    def _correction(self, group: Group, state: State) -> float:
        return 1 - group["betas"][1] ** state["step"]


class AdamWBC(AdamBC):
    """An AdamBC with decoupled weight decay: p = (1 - lr * weight_decay) p, then AdamBC's step.

    Args:
        weight_decay: >= 0; multiplied by lr.
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
        floor = {"debias_floor": debias_floor, "gamma_prime": gamma_prime, "floor_rule": floor_rule}
        options = {"lr": lr, "betas": betas, **floor, "weight_decay": weight_decay}
        Debiased.__init__(self, params, defaults=options, noise_step=noise_step)


class NAdamBC(AdamBC):
    """An AdamBC with Nesterov momentum, as in torch's NAdam.

    Computes: mu_t = beta1 (1 - 0.5 * 0.96**(t * momentum_decay)), and p moves by
        lr ((1 - mu_t) g / (1 - prod mu) + mu_{t+1} m / (1 - prod mu * mu_{t+1})) over AdamBC's denominator.

    Args:
        momentum_decay: >= 0.
    Reference:
        Dozat 2016 (NAdam), with the denominator of Tang, Lecuyer 2023.
    """

    _products: ClassVar = {"mu_product": 1.0}

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
        floor = {"debias_floor": debias_floor, "gamma_prime": gamma_prime, "floor_rule": floor_rule}
        options = {"lr": lr, "betas": betas, **floor, "momentum_decay": momentum_decay}
        Debiased.__init__(self, params, defaults=options, noise_step=noise_step)

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        t, beta, decay = state["step"], group["betas"][0], group["momentum_decay"]
        now, following = (beta * (1 - 0.5 * 0.96 ** (at * decay)) for at in (t, t + 1))  # mu_t and mu_{t+1}
        product = state["mu_product"] = state["mu_product"] * now
        size = group["lr"] * self._correction(group, state) ** 0.5
        return size * (1 - now) / (1 - product), size * following / (1 - product * following)


class RMSpropBC(Debiased):
    """An RMSprop that subtracts the noise variance from its second moment.

    Computes: v = alpha v + (1 - alpha) g**2;  n = alpha n + (1 - alpha) noise_std**2;
        p = p - lr * g / sqrt(debias(v, sqrt(n), floor)). As in torch's RMSprop, v and n have no startup correction.

    Args:
        alpha: decay of the second moment, in [0, 1).
        debias_floor, gamma_prime: as AdamBC.
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


class AdagradBC(Debiased):
    """An Adagrad that subtracts the noise variance from its sum of squared gradients.

    Computes: v = v + g**2;  n = n + noise_std**2;  p = p - lr * g / sqrt(debias(v, sqrt(n), floor)). There is no noise
        step.

    Args:
        debias_floor: smallest debiased sum of squares, in variances of the noise in this sum, > 0.
        gamma_prime: smallest debiased sum of squares in gradient**2, > 0, in place of debias_floor. None: debias_floor.
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
