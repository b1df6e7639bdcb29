"""The base class of the optimizers that subtract the known noise variance from their second moment.

`adaptive` has its subclasses. PrivateOptimizer calls `_update` in each step, and `_require_options` for each param
group. `experiments` and `diagnostics.recorder` call `fraction_floored` and `floored`.

The privacy guarantee does not rest on this file, which uses released gradients and public numbers only.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from privgrad.errors import require_decays, require_nonnegative, require_positive
from privgrad.optim.base import PrivateOptimizer, widened
from privgrad.optim.debias import debias, debias_lists, noise_floor, require_denominator, require_rule
from privgrad.threads import AT_ONCE, blocks, is_on_processor, on_lists
from privgrad.types import NoisyGradient

Group = dict[str, Any]
State = dict[str, Any]

# The default floor in variances of the noise, measured for AdamBC (docs/choosing.md): 4 was best on tags, sections and
# the autoencoder, level on digits, and half a point behind 1 on a small CNN. The others share its denominator.
DEFAULT_FLOOR = 4.0


class _Moved(NamedTuple):
    """A parameter with what moves it in one step."""

    values: Tensor
    grad: Tensor
    square: Tensor
    average: Tensor | None
    std: float | Tensor
    floor: float | Tensor
    moment_scale: float

    @property
    def suits_lists(self) -> bool:
        """Whether `_move_by_lists` can update it, and is faster."""
        if is_on_processor(self.values) or isinstance(self.std, Tensor):
            return False
        tensors = [self.values, self.grad, self.square, *([] if self.average is None else [self.average])]
        return all(t.dtype == self.values.dtype and not is_traceable_wrapper_subclass(t) for t in tensors)


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
            lists, held = dict[tuple[float, float], list[_Moved]](), 0
            for name, parameter in self._active(group):
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state[self._square] = widened(parameter)
                    state[self._noise] = 0.0
                    if self._beta(group) is not None:
                        state["exp_avg"] = widened(parameter)
                state["step"] += 1
                keep, add = self._weights(group)
                state[self._noise] = keep * state[self._noise] + add * gradient.noise_std_of(name) ** 2
                given, square = gradient[name].to(state[self._square].dtype), state[self._square]
                std, floor, average = state[self._noise] ** 0.5, self._floor(group, state), state.get("exp_avg")
                coefficients = self._coefficients(group, state)
                one = _Moved(parameter, given, square, average, std, floor, self._moment_scale(group, state))
                if not one.suits_lists or group.get("floor_rule", "max") != "max":
                    self._move(group, coefficients, one)
                    continue
                require_denominator(std, floor)
                lists.setdefault(coefficients, []).append(one)
                held += parameter.numel()
                if held >= AT_ONCE:
                    self._move_by_lists(group, lists)
                    lists, held = {}, 0
            self._move_by_lists(group, lists)

    def _move(self, group: Group, coefficients: tuple[float, float], one: _Moved) -> None:
        """Update the moments and values of a parameter."""
        beta, (keep, add), rule = self._beta(group), self._weights(group), group.get("floor_rule", "max")
        decay, (of_gradient, of_average) = group["lr"] * group.get("weight_decay", 0.0), coefficients
        for values, grad, square, average, std, lowest in blocks(*one[:6]):
            if keep != 1:
                square.mul_(keep)
            square.addcmul_(grad, grad, value=add)
            moment_sq = None
            if beta is not None:
                average.lerp_(grad, 1 - beta)
                moment_sq = average.square().mul_(one.moment_scale) if rule == "moment" else None
            root = debias(square, std, floor=lowest, rule=rule, moment_sq=moment_sq).sqrt_()
            if decay:
                values.mul_(1 - decay)
            if of_gradient:
                values.addcdiv_(grad, root, value=-of_gradient)
            if of_average:
                values.addcdiv_(average, root, value=-of_average)

    def _move_by_lists(self, group: Group, lists: Mapping[tuple[float, float], list[_Moved]]) -> None:
        """Do the same to the parameters of each pair of coefficients, with a few kernels, for the rule "max"."""
        beta, (keep, add) = self._beta(group), self._weights(group)
        decay = group["lr"] * group.get("weight_decay", 0.0)
        for (of_gradient, of_average), moved in lists.items():
            values, grads, squares, averages, stds, floors, _ = (list(column) for column in zip(*moved, strict=True))
            if keep != 1:
                on_lists._foreach_mul_(squares, keep)
            on_lists._foreach_addcmul_(squares, grads, grads, value=add)
            if beta is not None:
                on_lists._foreach_lerp_(averages, grads, 1 - beta)
            roots = debias_lists(squares, stds, floors)
            on_lists._foreach_sqrt_(roots)
            if decay:
                on_lists._foreach_mul_(values, 1 - decay)
            for numerators, coefficient in ((grads, of_gradient), (averages, of_average)):
                if coefficient:
                    on_lists._foreach_addcdiv_(values, numerators, roots, value=-coefficient)

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
