"""DP-AdamBC as the paper writes it: one example at a time, float64, nothing shared with the library."""

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray


class DPAdamBC:
    """Tang, Lecuyer 2023, algorithm 1; loops and plain numpy.

    theta: (d,). gradient(theta, example) -> (d,), the gradient of one example's loss.
    """

    def __init__(
        self,
        theta: Array,
        gradient: Callable[[Array, int], Array],
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: int,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        gamma_prime: float | None = None,
    ) -> None:
        self.theta = theta.astype(np.float64).copy()
        self.gradient = gradient
        self.C, self.sigma, self.B = max_grad_norm, noise_multiplier, expected_batch_size
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2
        self.phi = (self.sigma * self.C / self.B) ** 2
        self.gamma_prime = 4 * self.phi if gamma_prime is None else gamma_prime
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)
        self.t = 0

    def step(self, batch: Sequence[int], z: Array) -> None:
        """One step on the examples of the batch with standard normal draws z, shape (d,)."""
        clipped_sum = np.zeros_like(self.theta)
        for example in batch:
            g = self.gradient(self.theta, example)
            clipped_sum += g / max(1.0, float(np.linalg.norm(g)) / self.C)
        noisy = (clipped_sum + self.sigma * self.C * z) / self.B
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * noisy
        self.v = self.beta2 * self.v + (1 - self.beta2) * noisy**2
        m_hat = self.m / (1 - self.beta1**self.t)
        v_hat = self.v / (1 - self.beta2**self.t)
        self.theta = self.theta - self.lr * m_hat / np.sqrt(np.maximum(v_hat - self.phi, self.gamma_prime))
