"""MicroAdam for released gradients: an Adam of the largest entries, with error feedback.

Users make the optimizer; `experiments.spec` and `audit.methods` make it by name, through `optim.OPTIMIZERS`. The base
class PrivateOptimizer calls `_update` in each step, and `_require_options` for each param group. The privacy guarantee
does not rest on this file, which uses released gradients and public numbers only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from privgrad.errors import require_decays, require_integer, require_positive, require_share
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.optim.matrix import gathered, sharded_like
from privgrad.types import NoisyGradient


class MicroAdam(PrivateOptimizer):
    """An Adam over the largest entries of the last gradients: DP-MicroAdam. It has no noise step.

    Computes, by parameter: a = g + e; V, the `density` largest entries of a by size; e = a without V; with the entries
    of the last `window` steps, r steps old:
        m = (1 - beta1) / (1 - beta1^t) sum of beta1^r V_r;  v = (1 - beta2) / (1 - beta2^t) sum of beta2^r V_r^2;
        p = p - lr m / (sqrt(v) + eps)

    Args:
        params: `model.named_parameters()`, or param groups of named parameters.
        lr: learning rate, >= 0.
        betas: decays (beta1, beta2), each in [0, 1).
        eps: > 0, gradient units.
        density: the share of entries that are kept of each gradient, in (0, 1]; at least one entry.
        window: how many steps are kept, >= 1.
    Raises:
        PrivacyError: parameters lack names, or a number is out of its range.
    Privacy:
        Post-processing. The noise biases the second moment, as in Adam.
    Reference:
        Hudisteanu, Kalinin, Cyffers 2025 (arXiv 2511.20509). Deviation: the error e is not quantized.
    """

    _without_noise_step = "MicroAdam, which moves few weights at a step"

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

    def _require_options(self, group: Mapping[str, Any]) -> None:
        require_decays("MicroAdam", "betas", group["betas"], (0.9, 0.999))
        require_positive("MicroAdam", "eps", group["eps"], "give 1e-8, the usual value")
        usual = "0.01 is the paper's"
        require_share("MicroAdam", "density", group["density"], usual, usual)
        require_integer("MicroAdam", "window", group["window"], 1)

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group in self.param_groups:
            for name, parameter in self._active(group):
                state = self.state[parameter]
                count = max(1, int(group["density"] * parameter.numel()))
                if not state:
                    state["step"], state["error"] = 0, widened(parameter)
                    device = state["error"].device
                    state["indices"] = torch.zeros(group["window"], count, dtype=torch.int64, device=device)
                    state["values"] = torch.zeros(group["window"], count, dtype=state["error"].dtype, device=device)
                row = state["step"] % group["window"]
                state["step"] += 1
                whole = gathered(state["error"] + gradient[name]).flatten()
                largest = whole.abs().topk(count, sorted=False).indices
                state["indices"][row], state["values"][row] = largest, whole[largest]
                whole[largest] = 0.0
                state["error"].copy_(sharded_like(whole.view(parameter.shape), state["error"]))
                step = self._step_of(group, state, whole)
                parameter.add_(sharded_like(step.view(parameter.shape).to(parameter.dtype), parameter))

    @staticmethod
    def _step_of(group: Mapping[str, Any], state: Mapping[str, Any], like: Tensor) -> Tensor:
        """Return the step of one parameter, flat, from the entries of the last steps."""
        t, window = state["step"], group["window"]
        ages = [(t - 1 - row) % window for row in range(window)]
        moments = list[Tensor]()
        for beta, power in zip(group["betas"], (1, 2), strict=True):
            weights = torch.tensor([beta**age for age in ages], dtype=like.dtype, device=like.device)
            terms = weights[:, None] * state["values"] ** power
            total = torch.zeros_like(like).index_add_(0, state["indices"].flatten(), terms.flatten())
            moments.append(total * ((1 - beta) / (1 - beta**t)))
        m, v = moments
        return -group["lr"] * m / (v.sqrt() + group["eps"])
