"""The mixin that makes a torch optimizer accept only released gradients, and that knows its noise step."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from privgrad.errors import PrivacyError, expected, require_in, require_integer, require_nonnegative
from privgrad.ledger.lineage import warn_of_other_model
from privgrad.types import NoisyGradient

_OF_GROUPS = {"params", "param_names", "noise_std", "noise_gain", "name", "lr_is_noise_step"}
_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}  # by torch's schedulers
_UNDEFINED = "a class without _noise_step_per_lr"
NamedParameters = Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]]


class PrivateOptimizer(torch.optim.Optimizer):
    """A mixin for torch optimizers: `step(grad=...)` accepts a NoisyGradient and nothing else.

    List it before the torch optimizer among the base classes. A subclass describes how it differs from its base class;
    torch's own optimizers have torch's options. Each param group holds `noise_std`, the standard deviation of the noise
    in the group's last gradient: a number, or a mapping by parameter name. It is None before the first step.

    With `noise_step=u` in place of `lr`, a group's `lr` is u, and schedulers act on u. Each step divides the gradient
    by its noise_std first. All options in gradient units (`eps`, and L2 `weight_decay`) then count standard deviations
    of the noise. The rate is the one at which u is the noise step: the root mean square displacement of a weight after
    T updates of pure noise, divided by sqrt(T), for large T. Noise that changes over time, or differs between
    parameters or coordinates, is divided out before it enters any state, so that each release moves each weight by u,
    in the long run behind a filter too.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters. A group may have its own `lr` or
            `noise_step`.
        args, kwargs: options of the torch optimizer, `lr` first: the learning rate, >= 0.
        noise_step: u >= 0, in units of the weights. Give this or `lr`.
    Raises:
        PrivacyError: parameters lack names or share a name; an option is unknown or out of its range; `lr` and
            `noise_step` are both given, or neither; or noise_step is given to an optimizer that has none.
    Privacy:
        Post-processing: state and updates are functions of released gradients and public constants.
    """

    # Why the optimizer has no noise step; empty if it has one.
    _without_noise_step: ClassVar[str] = ""
    # The interval of each option, and the options that are integers >= 1; torch checks those of its own classes.
    _intervals: ClassVar[Mapping[str, str]] = {}
    _counts: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Here, because the constructor of a subclass may not know the argument: torch's message would not say why.
        if kwargs.get("noise_step") is not None and not cls.has_noise_step():
            raise _no_noise_step(cls.__name__, cls._without_noise_step)
        return super().__new__(cls)

    def __init__(self, params: NamedParameters, *args: Any, noise_step: float | None = None, **kwargs: Any) -> None:
        # A subclass of ours gives `defaults`; a class of torch's takes lr by itself, and may have a default for it.
        options = kwargs.get("defaults", kwargs)
        lr = self._require_one_rate(args[0] if args else options.pop("lr", None), noise_step)
        if not args and (lr is not None or options is not kwargs):
            options["lr"] = lr
        self._lr_is_noise_step = noise_step is not None
        self._has_rate = lr is not None
        self._rates: list[dict[str, float]] = []  # by group: its own rate; empty if it has the default one
        try:
            super().__init__(params, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        except PrivacyError:
            raise
        except ValueError as error:
            raise expected(type(self).__name__, "options", "to be valid for torch", error) from error
        self.defaults["lr_is_noise_step"] = self._lr_is_noise_step

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lr_is_noise_step", "_has_rate", "_rates")
        return super().__getstate__() | {name: vars(self)[name] for name in own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch, after the checks that the class describes."""
        group = dict(param_group)
        given = group.keys() & {"lr", "noise_step"}
        noise_step = group.pop("noise_step", None)
        if noise_step is not None:
            group["lr"] = self._require_one_rate(group.get("lr"), noise_step)
        by_default = self.defaults.get("lr_is_noise_step", self._lr_is_noise_step)
        is_noise_step = noise_step is not None or ("lr" not in group and by_default)
        if group.get("lr") is None and not self._has_rate:  # torch's own default would spend a budget on a guess
            raise expected(type(self).__name__, f"lr{' or noise_step' * self.has_noise_step()}", "to be given", None)
        super().add_param_group({"lr_is_noise_step": is_noise_step} | group)
        group = self.param_groups.pop()
        self._require_group(group)
        self.param_groups.append(group)
        self._rates.append({"noise_step" if is_noise_step else "lr": float(_number(group["lr"]))} if given else {})

    @classmethod
    def has_noise_step(cls) -> bool:
        """Return whether `noise_step` can be given in place of `lr`, with the usual options."""
        return cls._noise_step_per_lr is not PrivateOptimizer._noise_step_per_lr and not cls._without_noise_step

    @property
    def settings(self) -> dict[str, Any]:
        """The options as they were given, and the rates of param groups with their own: a resumed run has the same."""
        return self.defaults | ({"rates": self._rates} if any(self._rates) else {})

    @property
    def noise_step(self) -> float:
        """The noise step u of the current rates, in units of the weights.

        It is the root mean square over all trainable coordinates, if param groups or coordinates differ. It is nan for
        an optimizer without a noise step and, where `lr` was given, before the first step.
        """
        squares, count = 0.0, 0
        for group in self.param_groups:
            for name, parameter in self._active(group):
                held: float | Mapping[str, float | Tensor] | None = group["noise_std"]
                std = held.get(name) if isinstance(held, Mapping) else held
                per_lr: float | Tensor = 1.0
                if self._why_no_noise_step(group):
                    return math.nan
                if not group["lr_is_noise_step"]:
                    if std is None:
                        return math.nan
                    per_lr = self._noise_step_per_lr(group, std) * group["noise_gain"]
                steps = torch.as_tensor(float(_number(group["lr"])) * per_lr, dtype=torch.float64)
                squares += float(steps.square().mean()) * parameter.numel()
                count += parameter.numel()
        # Rounded, so that a given noise step is read back as it was given.
        return float(f"{math.sqrt(squares / count):.12g}") if count else math.nan

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], NoisyGradient] | None = None, *, grad: NoisyGradient | None = None
    ) -> None:
        """Update the parameters with one released gradient.

        Clears every `.grad` before and after the update. A gradient of an ordinary backward pass therefore never moves
        a parameter, even one that has since been frozen.

        Args:
            closure: returns the gradient; an alternative to grad.
            grad: the gradient. It must hold a value for each trainable parameter; frozen parameters are skipped.
        Raises:
            PrivacyError: neither or both are given, the gradient is not a NoisyGradient, a trainable parameter has no
                value in it, or noise_std is not a finite number >= 0 (> 0 for a group with a noise step, whose options
                must allow one). The parameters have not moved.
        Privacy:
            Post-processing.
        """
        function = f"{type(self).__name__}.step"
        if (closure is None) == (grad is None):
            remedy = "call step(grad=private_grad(batch))"
            if any(hasattr(parameter, "summed_grad") for group in self.param_groups for parameter in group["params"]):
                remedy = "call privgrad.integrations.opacus.connect(optimizer) before the first step"
            raise expected(function, "exactly one of grad and closure", "to be given", 0 if grad is None else 2, remedy)
        gradient = closure() if closure is not None else grad
        if not isinstance(gradient, NoisyGradient):
            remedy = "pass the return value of PrivateGradient: without noise_std a gradient cannot be debiased"
            raise expected(function, "grad", "to be a NoisyGradient", type(gradient).__name__, remedy)
        pairs = [(group, self._active(group)) for group in self.param_groups]
        active = [(group, [name for name, _ in own]) for group, own in pairs]
        if gradient.side_information is not None:
            warn_of_other_model(function, [parameter for _, own in pairs for _, parameter in own])
        by_noise = {name for group, names in active if group["lr_is_noise_step"] for name in names}
        _require_usable(function, gradient, [name for _, names in active for name in names], by_noise)
        for group in self.param_groups:
            self._require_noise_step(function, group)  # options may have changed since the group was added
        self._clear()
        try:
            std = gradient.noise_std
            for group, names in active:
                group["noise_gain"] = gradient.noise_gain
                group["noise_std"] = std if isinstance(std, float | int) else {name: std[name] for name in names}
            if by_noise:
                self._update_in_noise_units(gradient, by_noise)
            else:
                self._update(gradient)
        finally:
            # Otherwise a later step could use this gradient again.
            self._clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as in torch, that the same kind of optimizer saved for the same parameters in the same order.

        The options take their saved values.

        Raises:
            PrivacyError: the parameter names, their order, the names of the options, or the kind of rate (lr or
                noise_step) differ. The optimizer has not changed.
        """
        function = f"{type(self).__name__}.load_state_dict"
        # torch refuses another number of groups.
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            own, got = group["param_names"], saved.get("param_names")
            if got != own:
                raise expected(function, "param_names", f"to be {own}, in that order", got)
            if differing := (saved.keys() ^ group.keys()) - _SCHEDULED:
                got = ", ".join(f"{'unknown' if name in saved else 'no'} {name}" for name in sorted(differing))
                raise expected(function, "the options", "to be the same as this optimizer's", got)
            given, own = ("noise_step" if each["lr_is_noise_step"] else "lr" for each in (saved, group))
            if given != own:  # a scheduler that was made before would continue in the other unit
                raise expected(function, "the rate", f"to be given as {own}", given)
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in saved.items():
                if isinstance(value, Tensor) and (parameter.itemsize < 4 or not value.is_floating_point()):
                    # torch has rounded this state to the parameter's precision, indices too; see `widened`.
                    held = value.detach().to(parameter.device, copy=True)
                    self.state[parameter][name] = held.float() if value.is_floating_point() else held

    def _update_in_noise_units(self, gradient: NoisyGradient, names: Iterable[str]) -> None:
        """Update `names` by gradient / noise_std, at the rates of docs/mathematics.md (5.7), the others as usual."""
        tensors, noise_std = dict(gradient.tensors), gradient.noise_std
        stds = dict.fromkeys(tensors, noise_std) if isinstance(noise_std, float | int) else dict(noise_std)
        for name in names:
            tensors[name] = tensors[name] / stds[name]
            stds[name] = 1.0
        groups = [group for group in self.param_groups if group["lr_is_noise_step"]]
        steps = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] / self._noise_step_per_lr(group, 1.0) / gradient.noise_gain
            self._update(NoisyGradient(tensors, stds))
        finally:
            for group, step in zip(groups, steps, strict=True):
                group["lr"] = step

    def _noise_step_per_lr(self, group: Mapping[str, Any], noise_std: float | Tensor) -> float | Tensor:
        """Return the noise step at lr = 1, docs/mathematics.md (5.6), for noise in the units of the group's options."""
        raise NotImplementedError

    def _why_no_noise_step(self, group: Mapping[str, Any]) -> str:
        """Return why the optimizer with these options has no noise step; an empty string if it has one."""
        return "" if self.has_noise_step() else self._without_noise_step or _UNDEFINED

    def _require_one_rate(self, lr: float | None, noise_step: float | None) -> float | None:
        """Return the one of lr and noise_step that is given, or None; raise PrivacyError for both."""
        if lr is not None and noise_step is not None:
            raise expected(type(self).__name__, "lr", "to be absent next to noise_step", _number(lr))
        if noise_step is None:
            return lr
        require_nonnegative(type(self).__name__, "noise_step", noise_step)
        return noise_step

    def _update(self, gradient: NoisyGradient) -> None:
        """Move the parameters by the gradient: torch's own step, unless a subclass overrides this."""
        step = super().step
        narrow: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for group in self.param_groups:
                for name, parameter in self._active(group):
                    if parameter.itemsize < 4:  # torch keeps its state in this precision, so update in float32
                        narrow.append((parameter, parameter.data))
                        parameter.data = parameter.data.float()
                    value = gradient[name].to(parameter.dtype)
                    # torch's foreach implementation of Nesterov momentum adds to .grad in place.
                    parameter.grad = value.clone() if group.get("nesterov") else value
            # Unwrapped: the hooks of torch's optimizers already run around our `step`, and must not run twice.
            (step.__func__.__wrapped__ if getattr(step, "hooked", False) else step.__func__)(self)  # pyright: ignore
        finally:
            for parameter, stored in narrow:
                parameter.data = stored.copy_(parameter.data)

    def _require_group(self, group: dict[str, Any]) -> None:
        """Check one param group, and turn its numpy scalars into plain numbers, which checkpoints can hold."""
        function = type(self).__name__
        if "param_names" not in group:
            remedy = "pass model.named_parameters(), not model.parameters()"
            raise expected(function, "params", "to have names", "parameters without names", remedy)
        known = {name for other in self.param_groups for name in other["param_names"]}
        if repeated := sorted(known & set(group["param_names"])):
            raise expected(function, "names of parameters", "to differ between groups", f"{', '.join(repeated)} twice")
        if unknown := sorted(group.keys() - self.defaults.keys() - _OF_GROUPS - _SCHEDULED):
            condition = f"to be among {', '.join(sorted(self.defaults))}"
            raise expected(function, "options of a param group", condition, ", ".join(unknown))
        group |= {key: value.item() for key, value in group.items() if isinstance(value, np.generic)}
        group["noise_std"], group["noise_gain"] = None, 1.0
        require_nonnegative(function, "lr", _number(group["lr"]))
        self._require_options(group)
        self._require_noise_step(function, group)

    def _require_options(self, group: Mapping[str, Any]) -> None:
        for option, interval in self._intervals.items():
            if option in group:
                require_in(type(self).__name__, option, group[option], interval, is_pair=option == "betas")
        for option in self._counts:
            require_integer(type(self).__name__, option, group[option], 1)

    def _require_noise_step(self, function: str, group: Mapping[str, Any]) -> None:
        if group["lr_is_noise_step"] and (why := self._why_no_noise_step(group)):
            raise _no_noise_step(function, why)

    def _clear(self) -> None:
        """Remove every `.grad`, so that none of them can move a parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _each(self) -> Iterator[tuple[dict[str, Any], str, nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for name, parameter in self._active(group):
                yield group, name, parameter, self.state[parameter]

    @staticmethod
    def _active(group: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
        pairs = zip(group["param_names"], group["params"], strict=True)
        return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def _number(value: Any) -> Any:
    """Return the number in a tensor of one element; return any other value unchanged."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _require_usable(function: str, gradient: NoisyGradient, names: list[str], by_noise: set[str]) -> None:
    """Raise PrivacyError unless each name has a value, and a finite noise_std >= 0; > 0 for the names in by_noise."""
    if missing := [name for name in names if name not in gradient.tensors]:
        got = f"a gradient without {', '.join(missing)}"
        remedy = "give the optimizer and PrivateGradient the same model"
        raise expected(function, "grad", "to cover every trainable parameter", got, remedy)
    if isinstance(gradient.noise_std, float | int) and 0 < gradient.noise_std < math.inf:  # right for all of them
        return
    for name in names:
        noise = gradient.noise_std_of(name)
        valid = (noise > 0 if name in by_noise else noise >= 0) & (noise < math.inf)
        if not (bool(valid.all()) if isinstance(valid, Tensor) else valid):
            got = f"{float(noise.min()):g} to {float(noise.max()):g}" if isinstance(noise, Tensor) else noise
            condition = f"to be finite numbers {'>' if name in by_noise else '>='} 0"
            remedy = "give lr in place of noise_step: without noise there is no noise step" if name in by_noise else ""
            raise expected(function, f"noise_std of {name!r}", condition, got, remedy)


def _no_noise_step(function: str, why: str) -> PrivacyError:
    remedy = "give lr in its place"
    if why in ("", _UNDEFINED):
        remedy += ", or define _noise_step_per_lr(self, group, noise_std) in your class (docs/extending.md)"
    return expected(function, "noise_step", "to be absent for an optimizer without one", why or _UNDEFINED, remedy)


def widened(parameter: Tensor) -> Tensor:
    """Return zeros shaped like a parameter, in float32 or wider, for the state of this package's optimizers."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
