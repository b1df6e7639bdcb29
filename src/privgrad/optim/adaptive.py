"""Adaptive optimizers with the noise's variance taken out of their second moment."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from privgrad.errors import described, expected, require_nonnegative, require_positive
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.optim.debias import FloorRule, debias, default_floor, require_rule
from privgrad.threads import blocks
from privgrad.types import NoisyGradient

Group = dict[str, Any]
State = dict[str, Any]


class Debiased(PrivateOptimizer):
    """What the family shares: one pass over memory, and noise that may change over time.

    Computes, elementwise, with g the released gradient, noise_std its noise, and what a subclass says of a group:
        v = keep v + add g**2;  n = keep n + add noise_std**2;  m = beta m + (1 - beta) g (where there is a beta)
        p = (1 - decay) p - (of_gradient g + of_average m) / sqrt(debias(v, noise n, floor))
    """

    _square: ClassVar[str] = "exp_avg_sq"
    _noise: ClassVar[str] = "exp_avg_noise_var"

    def _require_options(self, group: Mapping[str, Any]) -> None:
        function, floor = type(self).__name__, group["debias_floor"]
        if floor is not None:
            require_positive(function, "debias_floor", floor, "use None for the floor on the noise's scale")
        if "floor_rule" in group:
            require_rule(function, group["floor_rule"])
        for option, usual in (("betas", (0.9, 0.999)), ("alpha", 0.99)):
            if option in group and not _are_decays(group[option], usual):
                raise expected(function, option, "to be in [0, 1)", described(group[option]), f"{usual} is usual")
        for option in ("weight_decay", "momentum_decay"):
            require_nonnegative(function, option, group.get(option, 0.0), "1e-2 and 4e-3 are usual")

    def fraction_floored(self) -> float:
        """Share of coordinates whose debiased second moment sits on its floor, in [0, 1]; nan before any step.

        Of a sharded model: of the coordinates that lie in this process.

        Privacy:
            Post-processing.
        """
        counts = self.floored().values()
        total = sum(coordinates for _, coordinates in counts)
        return sum(floored for floored, _ in counts) / total if total else math.nan

    def floored(self) -> dict[str, tuple[int, int]]:
        """By parameter name, how many coordinates sit on their floor, and of how many; without those never updated.

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
                    here = on_floor.to_local() if hasattr(on_floor, "to_local") else on_floor
                    found[name] = int(here.sum()), here.numel()
        return found

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
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
                given = gradient.values[name].to(state[self._square].dtype)
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
        """Decay of the average of gradients; None keeps none."""
        return None

    def _weights(self, group: Group) -> tuple[float, float]:
        """(keep, add) of the second moment."""
        raise NotImplementedError

    def _floor(self, group: Group, state: State) -> float | Tensor:
        """The floor, in the units of the second moment as it stands."""
        raise NotImplementedError

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        """(of the gradient, of the average) in the step. May advance the state's numbers."""
        raise NotImplementedError

    def _moment_scale(self, group: Group, state: State) -> float:
        """What turns m**2 into the units of the second moment as it stands."""
        return 1.0


class AdamBC(Debiased):
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
        floor_rule: how the floor enters, see `debias`; all but "max" are for ablations.
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
        floor_rule: FloorRule = "max",
    ) -> None:
        super().__init__(params, defaults=_adam_options(lr, betas, debias_floor, floor_rule))

    def _beta(self, group: Group) -> float:
        return group["betas"][0]

    def _weights(self, group: Group) -> tuple[float, float]:
        return group["betas"][1], 1 - group["betas"][1]

    def _floor(self, group: Group, state: State) -> float | Tensor:
        """debias(c v, sqrt(c) s, c floor) = c debias(v, s, floor): the startup correction c waits for the step size."""
        correction = self._correction(group, state)
        floor = group["debias_floor"]
        if floor is None:
            floor = default_floor((state[self._noise] / correction) ** 0.5, group["betas"][1])
        return correction * floor

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        step_size = group["lr"] / (1 - group["betas"][0] ** state["step"])
        return 0.0, step_size * self._correction(group, state) ** 0.5

    def _moment_scale(self, group: Group, state: State) -> float:
        return self._correction(group, state) / (1 - group["betas"][0] ** state["step"]) ** 2

    def _correction(self, group: Group, state: State) -> float:
        return 1 - group["betas"][1] ** state["step"]


class AdamWBC(AdamBC):
    """AdamBC with decoupled weight decay: p = (1 - lr * weight_decay) p, then AdamBC's step.

    Args:
        weight_decay: >= 0, times lr.
        params, lr, betas, debias_floor, floor_rule, Raises, Privacy: as AdamBC.
    Reference:
        Loshchilov, Hutter 2019 (AdamW), with the denominator of Tang, Lecuyer 2023.
    """

    def __init__(
        self,
        params: NamedParameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        debias_floor: float | None = None,
        floor_rule: FloorRule = "max",
    ) -> None:
        options = _adam_options(lr, betas, debias_floor, floor_rule)
        Debiased.__init__(self, params, defaults=options | {"weight_decay": weight_decay})


class NAdamBC(AdamBC):
    """AdamBC with Nesterov momentum, as torch's NAdam.

    Computes: mu_t = beta1 (1 - 0.5 * 0.96**(t * momentum_decay)), and p moves by
        lr ((1 - mu_t) g / (1 - prod mu) + mu_{t+1} m / (1 - prod mu * mu_{t+1})) over AdamBC's denominator.

    Args:
        momentum_decay: >= 0.
        params, lr, betas, debias_floor, floor_rule, Raises, Privacy: as AdamBC. lr is 2e-3 by default.
    Reference:
        Dozat 2016 (NAdam), with the denominator of Tang, Lecuyer 2023.
    """

    def __init__(
        self,
        params: NamedParameters,
        *,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum_decay: float = 4e-3,
        debias_floor: float | None = None,
        floor_rule: FloorRule = "max",
    ) -> None:
        options = _adam_options(lr, betas, debias_floor, floor_rule)
        Debiased.__init__(self, params, defaults=options | {"momentum_decay": momentum_decay})

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        def mu(t: int) -> float:
            return group["betas"][0] * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"]))

        now, following = mu(state["step"]), mu(state["step"] + 1)
        state["mu_product"] = state.get("mu_product", 1.0) * now
        size = group["lr"] * self._correction(group, state) ** 0.5
        product = state["mu_product"]
        return size * (1 - now) / (1 - product), size * following / (1 - product * following)


class RMSpropBC(Debiased):
    """RMSprop whose denominator is the gradient's own second moment, not the noise's.

    Computes: v = alpha v + (1 - alpha) g**2;  n = alpha n + (1 - alpha) noise_std**2;
        p = p - lr * g / sqrt(debias(v, less n, floor)). As torch's RMSprop, v has no startup correction; neither has n.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        alpha: decay of the second moment, in [0, 1).
        debias_floor: smallest debiased second moment, gradient**2, > 0. None: on the noise's own scale.
    Raises:
        PrivacyError: parameters without names, or a number out of its range.
    Privacy:
        Post-processing.
    Reference:
        Ours, after Tang, Lecuyer 2023; its biased form is RMSprop.
    """

    def __init__(
        self, params: NamedParameters, *, lr: float = 1e-2, alpha: float = 0.99, debias_floor: float | None = None
    ) -> None:
        super().__init__(params, defaults={"lr": lr, "alpha": alpha, "debias_floor": debias_floor})

    def _weights(self, group: Group) -> tuple[float, float]:
        return group["alpha"], 1 - group["alpha"]

    def _floor(self, group: Group, state: State) -> float | Tensor:
        if group["debias_floor"] is not None:
            return group["debias_floor"]
        noise_var = state[self._noise] / (1 - group["alpha"] ** state["step"])
        return default_floor(noise_var**0.5, group["alpha"])

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        return group["lr"], 0.0


class AdagradBC(Debiased):
    """Adagrad whose denominator is the sum of the gradient's own squares, not the noise's.

    Computes: v = v + g**2;  n = n + noise_std**2;  p = p - lr * g / sqrt(debias(v, less n, floor)).

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        debias_floor: smallest debiased sum of squares, gradient**2, > 0. None: on the noise's own scale, 1.3 standard
            deviations of the sum for a coordinate without signal under constant noise.
    Raises:
        PrivacyError: parameters without names, or a number out of its range.
    Privacy:
        Post-processing.
    Reference:
        Ours, after Tang, Lecuyer 2023; its biased form is Adagrad.
    """

    _square = "sum"
    _noise = "noise_var_sum"

    def __init__(self, params: NamedParameters, *, lr: float = 1e-2, debias_floor: float | None = None) -> None:
        super().__init__(params, defaults={"lr": lr, "debias_floor": debias_floor})

    def _weights(self, group: Group) -> tuple[float, float]:
        return 1.0, 1.0

    def _floor(self, group: Group, state: State) -> float | Tensor:
        if group["debias_floor"] is not None:
            return group["debias_floor"]
        # A sum of t is as sure as an average with decay (t - 1) / (t + 1).
        return default_floor(state[self._noise] ** 0.5, (state["step"] - 1) / (state["step"] + 1))

    def _coefficients(self, group: Group, state: State) -> tuple[float, float]:
        return group["lr"], 0.0


def _are_decays(given: Any, usual: object) -> bool:
    """Numbers in [0, 1), as many as are usual."""
    if isinstance(usual, float):
        return isinstance(given, float | int) and 0 <= given < 1
    return isinstance(given, tuple | list) and [_are_decays(d, 0.9) for d in cast("list[Any]", given)] == [True, True]


def _adam_options(
    lr: float, betas: tuple[float, float], debias_floor: float | None, floor_rule: FloorRule
) -> dict[str, Any]:
    return {"lr": lr, "betas": betas, "debias_floor": debias_floor, "floor_rule": floor_rule}
