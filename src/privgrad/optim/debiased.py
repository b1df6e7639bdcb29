"""The base class of the optimizers that subtract the known noise variance from their second moment."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import require_choice, require_nonnegative, require_positive
from privgrad.optim.base import PrivateOptimizer, widened
from privgrad.processes import AT_ONCE, BLOCK, blocks, in_threads, is_on_processor, on_lists, threads_for
from privgrad.types import NoisyGradient

FloorRule = Literal["max", "negative_only", "moment", "add"]
Group = dict[str, Any]
State = dict[str, Any]
Coefficients = tuple[float, float]  # of g and of m in the update

# The default floor in variances of the noise, measured for AdamBC (docs/choosing-evidence.md): 4 was best on tags,
# sections and the autoencoder, level on digits, half a point behind 1 on a small CNN. The others share its denominator.
DEFAULT_FLOOR = 4.0

# Without noise nothing is subtracted, and the floor only prevents 0 / 0. It is (1e-8)**2, torch's eps inside the root.
_NOISELESS_FLOOR = 1e-16


def debias(
    exp_avg_sq_hat: Tensor,
    noise_std: float | Tensor,
    *,
    floor: float | Tensor,
    rule: FloorRule = "max",
    moment_sq: Tensor | None = None,
) -> Tensor:
    """Subtract the known noise variance from a startup-corrected second moment.

    Computes, elementwise with d = v - noise_std**2, by rule:
        "max": max(d, floor), the paper's rule, and the only one that bounds steps on the scale of the noise;
        "negative_only": d where d > 0, else floor;
        "moment": max(d, moment_sq) + floor;
        "add": max(d, 0) + floor.

    Args:
        exp_avg_sq_hat: v, shape (P,) like the parameter, divided by 1 - beta2**t. It may also be undivided, if
            noise_std**2 and floor are undivided too. Units: gradient**2.
        noise_std: standard deviation of the noise in the averaged gradient, sigma C / B; scalar or (P,). >= 0.
        floor: > 0; scalar or (P,). The papers' gamma'. Units: gradient**2.
        rule: how the floor is applied; all rules except "max" are for ablations.
        moment_sq: square of the first moment, shape (P,), for the rule "moment".
    Returns:
        Tensor of the same shape and dtype, positive. Every entry is >= floor, except with "negative_only".
    Raises:
        PrivacyError: noise_std is negative, floor is not positive, or rule is unknown.
        TypeError: moment_sq is missing.
    Privacy:
        Post-processing of noisy gradients; uses public constants only.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), eq. (3); docs/mathematics.md (5.2) and (5.3).
    """
    require_nonnegative("debias", "noise_std", _smallest(noise_std), "give sigma C / B")
    require_positive("debias", "floor", _smallest(floor), "give the smallest denominator squared")
    difference = exp_avg_sq_hat - noise_std**2
    if rule == "max":
        return difference.clamp_(min=floor)
    require_choice("debias", "floor_rule", rule, get_args(FloorRule))
    if rule == "negative_only":
        return torch.where(difference > 0, difference, floor)
    if rule == "add":
        return difference.clamp_(min=0).add_(floor)
    return torch.maximum(difference, cast(Tensor, moment_sq)).add_(floor)


def noise_floor(noise_std: float | Tensor, multiple: float) -> float | Tensor:
    """Return a floor that is a multiple of the noise's variance; 1e-16 where there is no noise.

    Args:
        noise_std: sigma C / B, scalar or (P,). >= 0.
        multiple: the floor in variances of the noise, > 0: `debias_floor` of the optimizers.
    Returns:
        The floor, in gradient**2, shaped like noise_std.
    Privacy:
        Public constants only.
    """
    if isinstance(noise_std, Tensor):
        variance = noise_std**2
        return torch.where(variance > 0, multiple * variance, _NOISELESS_FLOOR)
    return multiple * noise_std**2 if noise_std > 0 else _NOISELESS_FLOOR


def _smallest(value: float | Tensor) -> float:
    """Return the smallest entry of a tensor, 1 if it has none, or the number itself."""
    return (float(value.min()) if value.numel() else 1.0) if isinstance(value, Tensor) else value


class _Numbers(NamedTuple):
    """Numbers of a step that parameters of one group, past and noise have in common."""

    state: State
    coefficients: Coefficients
    std: float | Tensor  # of the noise in the second moment, in its units
    floor: float | Tensor
    moment_scale: float  # of m**2: m has the startup correction 1 - beta**t, and v has that of `_correction`
    suits_lists: bool


class _Moved(NamedTuple):
    """The tensors that move at once: of a parameter, of a block of one, or of several as lists."""

    values: Any
    grad: Any
    square: Any
    average: Any  # None without a first moment
    std: Any
    floor: Any
    moment_scale: Any

    def debiased(self, rule: FloorRule) -> Any:
        """Return `debias` of the second moment."""
        if not isinstance(self.square, Tensor):
            return _debias_lists(self.square, self.std, self.floor)
        moment_sq = self.average.square().mul_(self.moment_scale) if rule == "moment" else None
        return debias(self.square, self.std, floor=self.floor, rule=rule, moment_sq=moment_sq)


def _debias_lists(squares: list[Tensor], stds: list[float], floors: list[float]) -> list[Tensor]:
    """Return `debias` of each tensor by the rule "max"."""
    differences = on_lists._foreach_add(squares, [-(std**2) for std in stds])
    on_lists._foreach_clamp_min_(differences, floors)
    return differences


# The same operations on one tensor, and on each of a list by one call, which starts few kernels.
_OPERATIONS = ("mul_", "addcmul_", "lerp_", "sqrt_", "addcdiv_")
_ON_TENSOR: Any = SimpleNamespace(**{name: getattr(Tensor, name) for name in _OPERATIONS})
_ON_LISTS: Any = SimpleNamespace(**{name: getattr(on_lists, f"_foreach_{name}") for name in _OPERATIONS})
_PLAIN = (Tensor, nn.Parameter)  # others, such as shards, know few of the operations on lists
Row = tuple[Any, ...]  # the fields of a `_Moved`


def _cut(rows: Iterable[Row], most: int) -> list[Row]:
    """Cut rows into blocks of at most `most` numbers."""
    return [block for row in rows for block in (blocks(*row, most=most) if row[0].numel() > most else (row,))]


def _joined(rows: Iterable[Row], most: int) -> list[_Moved]:
    """Join rows to lists of at most `most` numbers."""
    lists, room = list[list[Row]](), -1
    for row in rows:
        if (size := row[0].numel()) > room:
            lists.append([])
            room = most
        lists[-1].append(row)
        room -= size
    return [_Moved(*map(list, zip(*several, strict=True))) for several in lists]


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
    _products: ClassVar[Mapping[str, float]] = {}  # further numbers of a state, by their values before the first step
    _intervals: ClassVar = {
        **dict.fromkeys(("betas", "alpha"), "[0, 1)"),
        **dict.fromkeys(("weight_decay", "momentum_decay"), "[0, inf)"),
        "debias_floor": "(0, inf)",
    }

    def _require_options(self, group: Mapping[str, Any]) -> None:
        super()._require_options(group)
        if group["gamma_prime"] is not None:
            require_positive(type(self).__name__, "gamma_prime", group["gamma_prime"])
        require_choice(type(self).__name__, "floor_rule", group.get("floor_rule", "max"), get_args(FloorRule))

    def fraction_floored(self) -> float:
        """Return the share of coordinates whose debiased second moment equals its floor, in [0, 1].

        It is nan before the first step. For a sharded model only the coordinates of this process count.
        """
        counts = self.floored().values()
        total = sum(coordinates for _, coordinates in counts)
        return sum(floored for floored, _ in counts) / total if total else math.nan

    def floored(self) -> dict[str, tuple[int, int]]:
        """Return by name the numbers of coordinates on their floor and of all, of parameters that were updated."""
        found: dict[str, tuple[int, int]] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if state := self.state[parameter]:
                    floor = self._floor(group, state)
                    square, noise_std = state[self._square], state[self._noise] ** 0.5
                    on_floor: Any = debias(square, noise_std, floor=floor) <= floor
                    local = on_floor.to_local() if hasattr(on_floor, "to_local") else on_floor
                    found[name] = int(local.sum()), local.numel()
        return found

    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            for (coefficients, in_lists, *_), rows in self._rows(group, gradient).items():
                numbers = 0
                longest = AT_ONCE  # the denominators take as much memory as what moves at once
                if is_on_processor(rows[0][0]):
                    # Other threads may not change tensors of inference mode.
                    numbers = 0 if torch.is_inference_mode_enabled() else sum([row[0].numel() for row in rows])
                    longest = BLOCK if threads_for(numbers) == 1 else BLOCK // 2  # shorter ones are easier to share
                parts = _cut(rows, longest)
                moved = _joined(parts, longest) if in_lists else [_Moved(*row) for row in parts]
                work = partial(self._move_all, group, coefficients, _ON_LISTS if in_lists else _ON_TENSOR)
                in_threads(work, moved, numbers=numbers)

    def _rows(self, group: Group, gradient: NoisyGradient) -> dict[Any, list[Any]]:
        """Move the numbers of the states on, and return what moves by the same operations, one row a parameter."""
        noise_std, beta = gradient.noise_std, self._beta(group)
        is_one = isinstance(noise_std, float | int)
        first = {"step": 0, self._noise: 0.0, **self._products}
        past_of = itemgetter(*first)
        known, found = dict[Any, _Numbers](), dict[Any, list[Any]]()
        # Almost all parameters have the same numbers, and calls of functions would take longer than the arithmetic.
        for name, parameter in self._active(group):
            state = self.state[parameter]
            if not state:
                state.update(first)
                state[self._square] = widened(parameter)
                if beta is not None:
                    state["exp_avg"] = widened(parameter)
            std = noise_std if is_one else noise_std[name]
            past = past_of(state), std
            if past in known:
                state |= known[past].state
            else:
                known[past] = self._moved_on(group, state, std, first)
            now, square, grad = known[past], state[self._square], gradient.tensors[name]
            if grad.dtype != square.dtype:
                grad = grad.to(square.dtype)
            average = None if beta is None else state["exp_avg"]
            in_lists = now.suits_lists and parameter.__class__ in _PLAIN and grad.__class__ in _PLAIN
            key = now.coefficients, in_lists, parameter.device, parameter.dtype
            row = parameter, grad, square, average, now.std, now.floor, now.moment_scale
            found.setdefault(key, []).append(row)
        return found

    def _moved_on(self, group: Group, state: State, std: float | Tensor, names: Iterable[str]) -> _Numbers:
        """Move the numbers of one state on, by the noise of its gradient."""
        beta = self._beta(group)
        keep, add = self._weights(group)
        state["step"] += 1
        # n = keep n + add noise_std**2
        state[self._noise] = keep * state[self._noise] + add * std**2
        return _Numbers(
            coefficients=self._coefficients(group, state),
            std=state[self._noise] ** 0.5,
            floor=self._floor(group, state),
            moment_scale=1.0 if beta is None else self._correction(group, state) / (1 - beta ** state["step"]) ** 2,
            state={name: state[name] for name in names},
            suits_lists=group.get("floor_rule", "max") == "max" and not isinstance(state[self._noise], Tensor),
        )

    def _move_all(self, group: Group, coefficients: Coefficients, on: Any, several: Iterable[_Moved]) -> None:
        with torch.no_grad():  # each thread has its own setting
            for one in several:
                self._move(group, coefficients, one, on)

    def _move(self, group: Group, coefficients: tuple[float, float], one: _Moved, on: Any) -> None:
        """Update the moments and values of a parameter or of several, by the operations `on` one tensor or on lists."""
        keep, add = self._weights(group)
        beta = self._beta(group)
        decay = group["lr"] * group.get("weight_decay", 0.0)
        of_gradient, of_average = coefficients
        # v = keep v + add g**2
        if keep != 1:
            on.mul_(one.square, keep)
        on.addcmul_(one.square, one.grad, one.grad, value=add)
        # m = beta m + (1 - beta) g
        if beta is not None:
            on.lerp_(one.average, one.grad, 1 - beta)
        # p = (1 - decay) p - (of_gradient g + of_average m) / sqrt(debias(v, sqrt(n), floor))
        root = one.debiased(group.get("floor_rule", "max"))
        on.sqrt_(root)
        if decay:
            on.mul_(one.values, 1 - decay)
        if of_gradient:
            on.addcdiv_(one.values, one.grad, root, value=-of_gradient)
        if of_average:
            on.addcdiv_(one.values, one.average, root, value=-of_average)

    def _beta(self, group: Group) -> float | None:
        """Return the decay of the first moment, or None if the optimizer has no first moment."""
        return None

    def _weights(self, group: Group) -> tuple[float, float]:
        """Return (keep, add) of the second moment."""
        raise NotImplementedError

    def _floor(self, group: Group, state: State) -> float | Tensor:
        """Return the floor in the units of the stored second moment."""
        # `_coefficients` applies a startup correction c to the step size, because
        # debias(c v, sqrt(c) s, c floor) = c debias(v, s, floor).
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
        return group["lr"], 0.0
