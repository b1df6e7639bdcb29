"""Baselines of papers: optimizers that combine released with public gradients, as AdaDPS's; and MicroAdam."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.checks.data import share_rows
from privgrad.errors import expected, require_callable, require_choice
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.optim.matrix import gathered, sharded_like
from privgrad.types import NoisyGradient

# (step) -> mean gradient on public data by parameter name, at the current weights. See privgrad.PublicGradient.
Public = Callable[[int], Mapping[str, Tensor]]
Numerator = Literal["private", "public"]


def require_named_source(function: str, optimizer: PrivateOptimizer, recorded: str | None) -> None:
    """Raise PrivacyError unless the `recorded` side information of the ledger names the optimizer's public data."""
    if not isinstance(optimizer, _WithPublic) or recorded is None:  # None: there is no ledger
        return
    source = getattr(optimizer.public, "source", None)
    if not recorded or (isinstance(source, str) and f"; {source}; " not in f"; {recorded}; "):
        named, given = ("", '"their source"') if source is None else (f"{source!r}, ", "public.source")
        condition = f"to name {named}the public data of the {type(optimizer).__name__}"
        remedy = f"start a new ledger, with PrivateGradient(..., side_information={given})"
        remedy += ', joined by "; " to the other sources' if recorded else ""
        raise expected(function, "the ledger's side_information", condition, repr(recorded), remedy)


def require_separate(function: str, train_set: object, *parts: object) -> None:
    """Raise PrivacyError if the public gradient that one of these parts may hold has rows of the private data set."""
    for part in parts:
        if share_rows(getattr(getattr(part, "public", None), "given", None), train_set):
            name, condition = f"the public examples of {type(part).__name__}", "to have no row of the private examples"
            remedy = "split the public examples off first, and train on the others"
            raise expected(function, name, condition, "rows of the private data set itself", remedy)


class _WithPublic(PrivateOptimizer):
    """A base class that takes one public gradient per step, before any parameter moves."""

    _without_noise_step = "an optimizer with public gradients, whose steps do not follow the noise"
    _intervals: ClassVar = {"betas": "[0, 1)", "alpha": "[0, 1)", "eps": "(0, inf)", "keep": "(0, 1]"}

    def __init__(self, params: NamedParameters, public: Public, defaults: dict[str, Any]) -> None:
        name = type(self).__name__
        require_callable(name, "public", public, "give PublicGradient(model, loss_fn, examples, source=...)")
        self.public = public
        # The step count is in the groups, because state_dict saves them.
        super().__init__(params, defaults=defaults | {"steps": 0})
        model = getattr(public, "model", None)
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if isinstance(model, nn.Module) and not ours <= {id(parameter) for parameter in model.parameters()}:
            got = f"a gradient of a different {type(model).__name__}"
            raise expected(name, "public", "to be a gradient of the model that is trained", got)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"public": self.public}

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        require_named_source(f"{type(self).__name__}.step", self, gradient.side_information)
        public = self.public(self.param_groups[0]["steps"])
        for group in self.param_groups:
            for name, parameter in self._active(group):
                own = public[name]
                if own.shape != parameter.shape:
                    condition = f"to have shape {tuple(parameter.shape)}"
                    raise expected(type(self).__name__, f"public gradient of {name!r}", condition, tuple(own.shape))
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._move(group, parameter, gradient[name].to(wide), own.to(wide))
        for group in self.param_groups:
            group["steps"] += 1

    @abstractmethod
    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        """Move one parameter by its released and its public gradient, in float32 or wider; "steps" counts from 0."""

    def _average(self, parameter: nn.Parameter, name: str, value: Tensor, beta: float) -> Tensor:
        """Update and return a moving average in the parameter's state, from zero: a = beta a + (1 - beta) value."""
        state = self.state[parameter]
        if name not in state:
            state[name] = widened(parameter)
        return state[name].lerp_(value, 1 - beta)


class RMSpropPub(_WithPublic):
    """An RMSprop whose second moment is computed from public gradients: DP-R-Pub.

    Computes, with g the released and h the public gradient: v = alpha v + (1 - alpha) h**2;
        p = p - lr * g / (sqrt(v) + eps). The division comes after the noise is added, so small h amplify the noise.

    Args:
        public: `PublicGradient` of the same model.
        alpha: decay of the second moment, in [0, 1).
        eps: > 0, gradient units.
    Privacy:
        Post-processing. The public gradient costs no privacy.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), their baseline DP-R-Pub.
    """

    def __init__(
        self, params: NamedParameters, lr: float, *, public: Public, alpha: float = 0.9, eps: float = 1e-5
    ) -> None:
        super().__init__(params, public, {"lr": lr, "alpha": alpha, "eps": eps})

    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        square = self._average(parameter, "exp_avg_sq", public.square(), group["alpha"])
        # p = p - lr g / (sqrt(v) + eps)
        parameter.addcdiv_(grad, square.sqrt().add_(group["eps"]), value=-group["lr"])


class AdamPub(_WithPublic):
    """An Adam whose second moment is computed from public gradients: DP-Adam-Pub.

    Computes, with g the released and h the public gradient: v = beta2 v + (1 - beta2) h**2, and by numerator
        "private": m = beta1 m + (1 - beta1) g; p = p - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps);
        "public": M = beta1 M + (1 - beta1) h; p = p - lr (keep g + (1 - keep) M) / (sqrt(v) + eps).

    Args:
        public, eps, Privacy: as `RMSpropPub`.
        betas: decays (beta1, beta2) of the first and the second moment, each in [0, 1).
        numerator: one of two readings of the paper, whose equation is not available.
        keep: share of the released gradient, with numerator "public", in (0, 1].
        bias_correction: divide each moment by 1 - decay**t, with numerator "private".
    Reference:
        Li et al. 2022 (AdaDPS), their baseline DP-Adam-Pub.
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float,
        *,
        public: Public,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        numerator: Numerator = "private",
        keep: float = 0.9,
        bias_correction: bool = True,
    ) -> None:
        options = {"numerator": numerator, "keep": keep, "bias_correction": bias_correction}
        super().__init__(params, public, {"lr": lr, "betas": betas, "eps": eps} | options)

    def _require_options(self, group: Mapping[str, Any]) -> None:
        super()._require_options(group)
        require_choice("AdamPub", "numerator", group["numerator"], get_args(Numerator))

    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        beta1, beta2 = group["betas"]
        square = self._average(parameter, "exp_avg_sq", public.square(), beta2)
        if group["numerator"] == "public":
            average = self._average(parameter, "public_exp_avg", public, beta1)
            numerator = group["keep"] * grad + (1 - group["keep"]) * average
        else:
            numerator = self._average(parameter, "exp_avg", grad, beta1)
        first, second = 1.0, 1.0
        if group["numerator"] == "private" and group["bias_correction"]:
            first, second = (1 - beta ** (group["steps"] + 1) for beta in (beta1, beta2))
        # p = p - lr numerator / first / (sqrt(v / second) + eps)
        root = (square / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(numerator, root, value=-group["lr"] / first)


class MirrorDescent(_WithPublic):
    """A PDA-DPMD with the Euclidean mirror map. Its update moves from the released to the public gradient over time.

    Computes, with g the released and h the public gradient and t from 0: alpha = cos(pi t / (2 horizon)), 0 after the
        horizon; p = p - lr (alpha g + (1 - alpha) h).

    Args:
        public, Privacy: as `RMSpropPub`.
        horizon: steps until only the public gradient is left, >= 1; the number of steps of the training.
    Reference:
        Amid et al. 2022 (PDA-DPMD, arXiv 2112.00193), as Li et al. 2022 approximate it.
    """

    _counts = ("horizon",)

    def __init__(self, params: NamedParameters, lr: float, *, public: Public, horizon: int) -> None:
        super().__init__(params, public, {"lr": lr, "horizon": horizon})

    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        steps = self.param_groups[0]["steps"]  # all groups follow one schedule, even those added later
        alpha = math.cos(math.pi * min(steps / group["horizon"], 1.0) / 2)
        # p = p - lr (alpha g + (1 - alpha) h)
        parameter.add_(grad, alpha=-group["lr"] * alpha).add_(public, alpha=-group["lr"] * (1 - alpha))


class MicroAdam(PrivateOptimizer):
    """An Adam over the largest entries of the last gradients: DP-MicroAdam. It has no noise step.

    Computes, by parameter: a = g + e; V, the `density` largest entries of a by size; e = a without V; with the entries
    of the last `window` steps, r steps old:
        m = (1 - beta1) / (1 - beta1^t) sum of beta1^r V_r;  v = (1 - beta2) / (1 - beta2^t) sum of beta2^r V_r^2;
        p = p - lr m / (sqrt(v) + eps)

    Args:
        density: the share of entries that are kept of each gradient, in (0, 1]; at least one entry.
        window: how many steps are kept, >= 1.
        betas: decays (beta1, beta2), each in [0, 1).
        eps: > 0.
    Reference:
        Hudisteanu, Kalinin, Cyffers 2025 (arXiv 2511.20509). Deviation: the error e is not quantized.
    """

    _without_noise_step = "MicroAdam, which moves few weights at a step"
    _intervals: ClassVar = {"betas": "[0, 1)", "eps": "(0, inf)", "density": "(0, 1]"}
    _counts = ("window",)

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        density: float = 0.01,
        window: int = 10,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "density": density, "window": window}
        super().__init__(params, defaults=options)

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group, name, parameter, state in self._each():
            count = max(1, int(group["density"] * parameter.numel()))
            if not state:
                state["step"], state["error"] = 0, widened(parameter)
                device = state["error"].device
                state["indices"] = torch.zeros(group["window"], count, dtype=torch.int64, device=device)
                state["values"] = torch.zeros(group["window"], count, dtype=state["error"].dtype, device=device)
            row = state["step"] % group["window"]
            state["step"] += 1
            # a = g + e; V, its largest entries; e = a without V
            whole = gathered(state["error"] + gradient[name]).flatten()
            largest = whole.abs().topk(count, sorted=False).indices
            state["indices"][row], state["values"][row] = largest, whole[largest]
            whole[largest] = 0.0
            state["error"].copy_(sharded_like(whole.view(parameter.shape), state["error"]))
            step = self._step_of(group, state, whole)
            parameter.add_(sharded_like(step.view(parameter.shape).to(parameter.dtype), parameter))

    @staticmethod
    def _step_of(group: Mapping[str, Any], state: Mapping[str, Any], like: Tensor) -> Tensor:
        t, window = state["step"], group["window"]
        ages = [(t - 1 - row) % window for row in range(window)]
        moments = list[Tensor]()
        for beta, power in zip(group["betas"], (1, 2), strict=True):
            # (1 - beta) / (1 - beta^t) sum of beta^r V_r^power; rows that are not filled yet hold zeros
            weights = torch.tensor([beta**age for age in ages], dtype=like.dtype, device=like.device)
            terms = weights[:, None] * state["values"] ** power
            total = torch.zeros_like(like).index_add_(0, state["indices"].flatten(), terms.flatten())
            moments.append(total * ((1 - beta) / (1 - beta**t)))
        m, v = moments
        return -group["lr"] * m / (v.sqrt() + group["eps"])
