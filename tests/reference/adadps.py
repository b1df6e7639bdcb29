"""AdaDPS in plain float64, one example at a time: Li et al. 2022, algorithm 1 (SPEC 7.1); and our noise_eps."""

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # weights, input, label -> gradient of one example's loss


class AdaDPS:
    """Scales A and public momentum M for one weight tensor; `schedule` "step" or "epoch".

    `unit` is "eps" or "noise_eps". The latter has `noise`, k times the standard deviation of the noise in
    the mean gradient.
    """

    def __init__(
        self, gradient: Gradient, x: Tensor, y: Tensor, *, batch_size: int, rule: str, unit: str, noise: float = 0.0
    ) -> None:
        self.gradient, self.x, self.y, self.batch_size = gradient, x, y, batch_size
        self.rule, self.unit, self.noise = rule, unit, noise
        self.beta1, self.beta2, self.eps = 0.7, 0.8, 1e-3
        self.keep = 0.9 if rule == "adam" else 1.0
        self.v: Tensor | float = 0.0
        self.m: Tensor | float = 0.0

    def mean(self, w: Tensor, chosen: Tensor) -> Tensor:
        return torch.stack([self.gradient(w, self.x[i], self.y[i]) for i in chosen]).mean(0)

    def order(self, passed: int) -> Tensor:
        return torch.randperm(len(self.x), generator=torch.Generator().manual_seed(passed))

    def see_step(self, w: Tensor, step: int) -> None:
        passed, place = divmod(step, len(self.x) // self.batch_size)
        h = self.mean(w, self.order(passed)[place * self.batch_size : (place + 1) * self.batch_size])
        self.v = self.v + h**2 if self.rule == "adagrad" else self.beta2 * self.v + (1 - self.beta2) * h**2
        self.m = self.beta1 * self.m + (1 - self.beta1) * h

    def see_epoch(self, w: Tensor, epoch: int) -> None:
        means = torch.stack([self.mean(w, part) for part in self.order(epoch).split(self.batch_size)])
        fresh = (means**2).mean(0)
        self.v = self.v + fresh if self.rule == "adagrad" else fresh
        self.m = self.beta1 * self.m + (1 - self.beta1) * means.mean(0)

    def contribution(self, w: Tensor, x: Tensor, y: Tensor, clip: float) -> Tensor:
        """One example's, after transforming and clipping."""
        v = torch.as_tensor(self.v)
        a = 1 + torch.sqrt(v) / self.noise if self.unit == "noise_eps" else torch.sqrt(v) + self.eps
        g = (self.keep * self.gradient(w, x, y) + (1 - self.keep) * self.m) / a
        return g / max(1.0, float(g.norm()) / clip)
