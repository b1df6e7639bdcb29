"""Adam's moments of the released gradient, together with the same moments of the gradient before its noise."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import require_in
from privgrad.optim.debiased import DEFAULT_FLOOR, debias, noise_floor
from privgrad.private_gradient import PrivateGradient, RawStep


class RawMoments:
    """Moving averages of both gradients over a training. NOT private, and never part of any update.

    Computes: with the same betas, m and v of the clipped mean before the noise (clean), and of the released gradient
        (noisy); also n, the moving average of the noise's variance. All start at 0.

    Args:
        private_grad: observed from now on; None if you register `observe` on it later.
        betas: decays (beta1, beta2).
    Raises:
        PrivacyError: betas that are not two decays in [0, 1).
    Attributes:
        steps: number of observed steps, by parameter name.
        raw_exp_avg, raw_exp_avg_sq: clean m and v by parameter name. NOT private.
        exp_avg, exp_avg_sq, noise_var: of the released gradient. Post-processing.
    Reference:
        Tang, Lecuyer 2023 (DP-AdamBC), table 1 and figure 2.
    """

    def __init__(
        self, private_grad: PrivateGradient | None = None, *, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        require_in("RawMoments", "betas", betas, "[0, 1)", is_pair=True)
        self.betas = betas
        self.steps: dict[str, int] = {}
        self.raw_exp_avg: dict[str, Tensor] = {}
        self.raw_exp_avg_sq: dict[str, Tensor] = {}
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        self.noise_var: dict[str, float | Tensor] = {}
        if private_grad is not None:
            private_grad.register_raw_observer(self.observe)

    def observe(self, raw: RawStep) -> None:
        """Add one step to the averages."""
        beta1, beta2 = self.betas
        for name, clean in raw.raw_mean.items():
            for average, square, value in (
                (self.raw_exp_avg, self.raw_exp_avg_sq, clean),
                (self.exp_avg, self.exp_avg_sq, raw.released[name]),
            ):
                average.setdefault(name, torch.zeros_like(value)).lerp_(value, 1 - beta1)
                square.setdefault(name, torch.zeros_like(value)).mul_(beta2).addcmul_(value, value, value=1 - beta2)
            self.steps[name] = self.steps.get(name, 0) + 1
            variance = raw.released.noise_std_of(name) ** 2
            self.noise_var[name] = beta2 * self.noise_var.get(name, 0.0) + (1 - beta2) * variance

    def table(self) -> dict[str, dict[str, float]]:
        """Return five numbers and the mean of v over all coordinates: clean, noisy and debiased.

        Returns:
            {"raw_clean", "noisy", "debiased"} -> see `five_numbers`. NOT private.
        """
        debiased = {name: v - self.noise_var[name] for name, v in self.exp_avg_sq.items()}
        rows = {"raw_clean": self.raw_exp_avg_sq, "noisy": self.exp_avg_sq, "debiased": debiased}
        return {name: five_numbers(self._corrected(values, 0.0)) for name, values in rows.items()}

    def updates(self, *, debias_floor: float = DEFAULT_FLOOR, gamma_prime: float | None = None) -> dict[str, Tensor]:
        """Return Adam's step divided by its learning rate, with three denominators: clean, noisy and debiased.

        The numerator is always clean. The arguments are those of AdamBC.

        Returns:
            "raw_clean", "raw_noisy", "raw_debiased": one number per coordinate, shape (P,). NOT private.
        """
        beta1, beta2 = self.betas
        numerator = self._corrected(self.raw_exp_avg, beta1)
        debiased = [self._debiased(name, debias_floor, gamma_prime).flatten() for name in self.exp_avg_sq]
        tiny = torch.finfo(numerator.dtype).tiny
        return {
            "raw_clean": numerator / self._corrected(self.raw_exp_avg_sq, beta2).clamp(min=tiny).sqrt(),
            "raw_noisy": numerator / self._corrected(self.exp_avg_sq, beta2).clamp(min=tiny).sqrt(),
            "raw_debiased": numerator / torch.cat(debiased).sqrt(),
        }

    def over_noise(self, *, debias_floor: float = DEFAULT_FLOOR, gamma_prime: float | None = None) -> dict[str, Tensor]:
        """Return v of all coordinates in units of the noise's variance: 1 is a coordinate without signal.

        The arguments are those of AdamBC.

        Returns:
            "raw_clean" (NOT private), "noisy" and "debiased" (at its floor or above): one number per coordinate, shape
            (P,); not finite where there is no noise.
        """
        found: dict[str, list[Tensor]] = {"raw_clean": [], "noisy": [], "debiased": []}
        for name, v in self.exp_avg_sq.items():
            correction = 1 - self.betas[1] ** self.steps[name]
            debiased = self._debiased(name, debias_floor, gamma_prime) * correction
            for kind, values in (("raw_clean", self.raw_exp_avg_sq[name]), ("noisy", v), ("debiased", debiased)):
                found[kind].append((values / self.noise_var[name]).flatten())
        return {kind: torch.cat(values) for kind, values in found.items()}

    def _debiased(self, name: str, debias_floor: float, gamma_prime: float | None) -> Tensor:
        """Return the square of AdamBC's denominator."""
        correction = 1 - self.betas[1] ** self.steps[name]
        noise_std = (self.noise_var[name] / correction) ** 0.5
        floor = noise_floor(noise_std, debias_floor) if gamma_prime is None else gamma_prime
        return debias(self.exp_avg_sq[name] / correction, noise_std, floor=floor)

    def _corrected(self, values: Mapping[str, Tensor], beta: float) -> Tensor:
        """Return all coordinates as one vector, each divided by 1 - beta**t of its own parameter."""
        return torch.cat([value.flatten() / (1 - beta ** self.steps[name]) for name, value in values.items()])


def five_numbers(values: Tensor) -> dict[str, float]:
    """Return min, q1, median, q3, max and mean of a tensor."""
    flat = values.double().flatten().cpu().numpy()
    found = np.quantile(flat, [0.0, 0.25, 0.5, 0.75, 1.0]).tolist()
    return dict(zip(("min", "q1", "median", "q3", "max"), found, strict=True)) | {"mean": float(flat.mean())}
