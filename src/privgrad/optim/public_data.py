"""Optimizers that combine released gradients with public gradients: the baselines that AdaDPS is compared with.

Users make the optimizers; `experiments.spec` and `audit.methods` make them by name, through `optim.OPTIMIZERS`. The
base class PrivateOptimizer calls `_update` in each step, and `_require_options` for each param group.

The privacy guarantee does not rest on this file. It needs public gradients that are public, see
`gradient.public_gradient`. `require_named_source` refuses a ledger that does not name them.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from privgrad.errors import expected, require_decays, require_integer, require_positive
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.shared_rows import share_rows
from privgrad.types import NoisyGradient

# (step) -> mean gradient on public data by parameter name, at the current weights. See privgrad.PublicGradient.
Public = Callable[[int], Mapping[str, Tensor]]
Numerator = Literal["private", "public"]


def require_named_source(function: str, optimizer: PrivateOptimizer, recorded: str | None) -> None:
    """Raise PrivacyError unless the ledger names the public data that the optimizer uses.

    `fit` and `integrations.external_loop` call it before the first release; `step` calls it for other loops.

    Args:
        function: the name that the message starts with.
        optimizer: any optimizer of ours.
        recorded: the sources that the ledger names, "" for none; None without a ledger.
    """
    if not isinstance(optimizer, _WithPublic) or recorded is None:
        return
    source = getattr(optimizer.public, "source", None)
    if not recorded or (isinstance(source, str) and f"; {source}; " not in f"; {recorded}; "):
        named, given = ("", '"their source"') if source is None else (f"{source!r}, ", "public.source")
        condition = f"to name {named}the public data of the {type(optimizer).__name__}"
        remedy = f"start a new ledger, with PrivateGradient(..., side_information={given})"
        remedy += ', joined by "; " to the other sources' if recorded else ""
        raise expected(function, "the ledger's side_information", condition, repr(recorded), remedy)


def require_separate(function: str, train_set: object, *parts: object) -> None:
    """Raise PrivacyError if a public gradient was made from rows of the private data set.

    `fit` and `integrations.external_loop` call it before the first release.

    Args:
        function: the name that the message starts with.
        train_set: the private examples.
        parts: the optimizer and the preconditioner, which may hold a public gradient.
    """
    for part in parts:
        if share_rows(getattr(getattr(part, "public", None), "given", None), train_set):
            condition, got = "to have no row of the private examples", "rows of the private data set itself"
            remedy = "split the public examples off first, and train on the others"
            raise expected(function, f"the public examples of {type(part).__name__}", condition, got, remedy)


class _WithPublic(PrivateOptimizer):
    """A base class that takes one public gradient per step, before any parameter moves."""

    _without_noise_step = "an optimizer with public gradients, whose steps do not follow the noise"

    def __init__(self, params: NamedParameters, public: Public, defaults: dict[str, Any]) -> None:
        name = type(self).__name__
        if not callable(public):
            remedy = "give PublicGradient(model, loss_fn, examples, source=...)"
            raise expected(name, "public", "to be callable", type(public).__name__, remedy)
        self.public = public
        # The step count is in the groups, because state_dict saves them.
        super().__init__(params, defaults=defaults | {"steps": 0})
        model = getattr(public, "model", None)
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if isinstance(model, nn.Module) and not ours <= {id(parameter) for parameter in model.parameters()}:
            remedy = "give the optimizer and the public gradient the same model"
            got = f"a gradient of a different {type(model).__name__}"
            raise expected(name, "public", "to be a gradient of the model that is trained", got, remedy)

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state and the public gradient; copy and pickle call it."""
        return super().__getstate__() | {"public": self.public}

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Raise PrivacyError if an option is out of its range."""
        function = type(self).__name__
        for option, usual in (("betas", (0.9, 0.999)), ("alpha", 0.9)):
            if option in group:
                require_decays(function, option, group[option], usual)
        if "eps" in group:
            require_positive(function, "eps", group["eps"], "give 1e-5, the usual value")
        if group.get("numerator", "private") not in get_args(Numerator):
            raise expected(function, "numerator", "to be 'private' or 'public'", repr(group["numerator"]), "choose one")
        if not 0 < group.get("keep", 1.0) <= 1:
            raise expected(function, "keep", "to be in (0, 1]", group["keep"], "give 0.9, the paper's value")
        require_integer(function, "horizon", group.get("horizon", 1), 1)

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        """Compute the public gradient once, then move each parameter by both gradients."""
        require_named_source(f"{type(self).__name__}.step", self, gradient.side_information)
        public = self.public(self.param_groups[0]["steps"])
        for group in self.param_groups:
            for parameter, grad, other in self._triples(group, gradient, public):
                self._move(group, parameter, grad, other)
        for group in self.param_groups:
            group["steps"] += 1

    @abstractmethod
    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        """Move one parameter by its released and its public gradient; group["steps"] counts from 0."""

    def _triples(
        self, group: Mapping[str, Any], released: Mapping[str, Tensor], public: Mapping[str, Tensor]
    ) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Yield each trainable parameter with its released and its public gradient, in float32 or wider."""
        for name, parameter in self._active(group):
            if name not in public:
                remedy = "give the optimizer and the public gradient the same model"
                condition, got = (
                    f"to have a gradient of {name!r}",
                    f"gradients of {', '.join(public) or 'no parameter'}",
                )
                raise expected(type(self).__name__, "public", condition, got, remedy)
            if public[name].shape != parameter.shape:
                got, remedy = tuple(public[name].shape), "give the optimizer and the public gradient the same model"
                raise expected(
                    type(self).__name__,
                    f"public gradient of {name!r}",
                    f"of shape {tuple(parameter.shape)}",
                    got,
                    remedy,
                )
            wide = torch.promote_types(parameter.dtype, torch.float32)
            yield parameter, released[name].to(wide), public[name].to(wide)

    def _average(self, parameter: nn.Parameter, name: str, value: Tensor, beta: float) -> Tensor:
        """Update and return a moving average in the parameter's state. It starts at zero."""
        state = self.state[parameter]
        if name not in state:
            state[name] = widened(parameter)
        return state[name].lerp_(value, 1 - beta)


class RMSpropPub(_WithPublic):
    """An RMSprop whose second moment is computed from public gradients: DP-R-Pub.

    Computes, with g the released and h the public gradient: v = alpha v + (1 - alpha) h**2;
        p = p - lr * g / (sqrt(v) + eps). The division comes after the noise is added, so small h amplify the noise.

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        public: `PublicGradient` of the same model.
        lr: learning rate, >= 0.
        alpha: decay of the second moment, in [0, 1).
        eps: > 0, gradient units.
    Raises:
        PrivacyError: parameters lack names, public is not callable, or a number is out of its range.
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
        parameter.addcdiv_(grad, square.sqrt().add_(group["eps"]), value=-group["lr"])


class AdamPub(_WithPublic):
    """An Adam whose second moment is computed from public gradients: DP-Adam-Pub.

    Computes, with g the released and h the public gradient: v = beta2 v + (1 - beta2) h**2, and by numerator
        "private": m = beta1 m + (1 - beta1) g; p = p - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps);
        "public": M = beta1 M + (1 - beta1) h; p = p - lr (keep g + (1 - keep) M) / (sqrt(v) + eps).

    Args:
        params, public, lr, eps, Raises, Privacy: as `RMSpropPub`.
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

    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        beta1, beta2 = group["betas"]
        square = self._average(parameter, "exp_avg_sq", public.square(), beta2)
        if group["numerator"] == "public":
            average = self._average(parameter, "public_exp_avg", public, beta1)
            numerator, first, second = group["keep"] * grad + (1 - group["keep"]) * average, 1.0, 1.0
        else:
            numerator, first, second = self._average(parameter, "exp_avg", grad, beta1), 1.0, 1.0
            if group["bias_correction"]:
                first, second = (1 - beta ** (group["steps"] + 1) for beta in (beta1, beta2))
        root = (square / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(numerator, root, value=-group["lr"] / first)


class MirrorDescent(_WithPublic):
    """A PDA-DPMD with the Euclidean mirror map. Its update moves from the released to the public gradient over time.

    Computes, with g the released and h the public gradient and t from 0: alpha = cos(pi t / (2 horizon)), 0 after the
        horizon; p = p - lr (alpha g + (1 - alpha) h).

    Args:
        params, public, lr, Raises, Privacy: as `RMSpropPub`.
        horizon: steps until only the public gradient is left, >= 1; the number of steps of the training.
    Reference:
        Amid et al. 2022 (PDA-DPMD, arXiv 2112.00193), as Li et al. 2022 approximate it.
    """

    def __init__(self, params: NamedParameters, lr: float, *, public: Public, horizon: int) -> None:
        super().__init__(params, public, {"lr": lr, "horizon": horizon})

    def _move(self, group: Mapping[str, Any], parameter: nn.Parameter, grad: Tensor, public: Tensor) -> None:
        steps = self.param_groups[0]["steps"]  # all groups follow one schedule, even those added later
        alpha = math.cos(math.pi * min(steps / group["horizon"], 1.0) / 2)
        parameter.add_(grad, alpha=-group["lr"] * alpha).add_(public, alpha=-group["lr"] * (1 - alpha))
