"""The formula of debiasing: second moment minus noise variance, with a floor.

`debiased`, the base class of all `*BC` optimizers, calls the functions of this file. `diagnostics.moments` calls
`debias` and `noise_floor`; users can call both. The privacy guarantee does not rest on this file.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from privgrad.errors import expected, require_nonnegative, require_positive
from privgrad.threads import on_lists

FloorRule = Literal["max", "negative_only", "moment", "add"]

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
        PrivacyError: noise_std is negative, floor is not positive, rule is unknown, or moment_sq is missing.
    Privacy:
        Post-processing of noisy gradients; uses public constants only.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), eq. (3); docs/mathematics.md (5.2) and (5.3).
    """
    require_denominator(noise_std, floor)
    difference = exp_avg_sq_hat - noise_std**2
    if rule == "max":
        return difference.clamp_(min=floor)
    require_rule("debias", rule)
    if rule == "negative_only":
        return torch.where(difference > 0, difference, floor)
    if rule == "add":
        return difference.clamp_(min=0).add_(floor)
    if moment_sq is None:
        remedy = "pass the square of the first moment, which the rule 'moment' needs"
        raise expected("debias", "moment_sq", "to be given", None, remedy)
    return torch.maximum(difference, moment_sq).add_(floor)


def debias_lists(squares: list[Tensor], stds: list[float], floors: list[float]) -> list[Tensor]:
    """Return `debias` with the rule "max" of several tensors, by as many kernels as one tensor needs.

    `optim.debiased` calls it after `require_denominator`. There is one noise_std and one floor for each tensor.
    """
    differences = on_lists._foreach_add(squares, [-(std**2) for std in stds])
    on_lists._foreach_clamp_min_(differences, floors)
    return differences


def require_denominator(noise_std: float | Tensor, floor: float | Tensor) -> None:
    """Raise PrivacyError if noise_std is negative or floor is not positive."""
    require_nonnegative("debias", "noise_std", _smallest(noise_std), "give sigma C / B")
    require_positive("debias", "floor", _smallest(floor), "give the smallest denominator squared")


def require_rule(function: str, rule: str) -> None:
    """Raise PrivacyError unless rule is a FloorRule."""
    if rule not in get_args(FloorRule):
        raise expected(
            function, "floor_rule", f"to be one of {', '.join(get_args(FloorRule))}", repr(rule), "choose one"
        )


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
