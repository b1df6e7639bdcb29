"""Every optimizer as the papers write it: one parameter, float64, nothing shared with the library.

step(theta, g, s) -> theta: g the released gradient, s the standard deviation of its noise, each of shape (d,) or a
number. The state is in attributes.
"""

import numpy as np

Array = np.ndarray


class Plain:
    def __init__(self, lr: float, **options: float | str | None) -> None:
        self.lr, self.t = lr, 0
        for name, value in options.items():
            setattr(self, name, value)


class SGD(Plain):
    momentum = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.t += 1
        self.b = g if self.t == 1 else self.momentum * self.b + g
        return theta - self.lr * self.b


class MomentumSGD(Plain):
    momentum = 0.9
    b: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.t += 1
        self.b = self.momentum * self.b + g
        return theta - self.lr * self.b / (1 - self.momentum**self.t)


class Yogi(Plain):
    beta1, beta2, eps = 0.9, 0.99, 1e-3
    m: Array | float = 0.0
    v: Array | float | None = None

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        if self.v is None:
            self.v = self.eps**2 + 0 * g
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.v - (1 - self.beta2) * np.sign(self.v - g**2) * g**2
        return theta - self.lr * self.m / (np.sqrt(self.v) + self.eps)


def orthogonal(m: Array, iterations: int) -> Array:
    """Newton-Schulz iterations of Muon: on the singular values, which leaves the singular vectors as they are."""
    if not np.any(m):
        return 0 * m
    u, values, vt = np.linalg.svd(np.atleast_2d(m), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(iterations if min(np.atleast_2d(m).shape) > 1 else 0):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (u @ np.diag(values) @ vt).reshape(m.shape)


class Muon(Plain):
    momentum, iterations = 0.95, 5
    m: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.m = self.momentum * self.m + g
        return theta - self.lr * orthogonal(self.m, self.iterations)


class MicroAdam(Plain):
    beta1, beta2, eps, density, window = 0.9, 0.999, 1e-8, 0.01, 10

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        if self.t == 0:
            self.error, self.kept = 0 * g, []
        self.t += 1
        a = self.error + g
        largest = np.argsort(-np.abs(a))[: max(1, int(self.density * len(a)))]
        kept = 0 * a
        kept[largest] = a[largest]
        self.error = a - kept
        self.kept = [kept, *self.kept][: self.window]
        m = (1 - self.beta1) / (1 - self.beta1**self.t) * sum(self.beta1**r * v for r, v in enumerate(self.kept))
        v = (1 - self.beta2) / (1 - self.beta2**self.t) * sum(self.beta2**r * v**2 for r, v in enumerate(self.kept))
        return theta - self.lr * m / (np.sqrt(v) + self.eps)


class Moments(Plain):
    beta1, beta2, gamma = 0.9, 0.999, 1e-8
    weight_decay = 0.0
    floor = 4.0  # in variances of the noise
    gamma_prime: float | None = None
    rule = "max"
    m: Array | float = 0.0
    v: Array | float = 0.0
    phi: Array | float = 0.0

    def hats(self, g: Array, s: Array | float) -> tuple[Array, Array, Array]:
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        self.phi = self.beta2 * self.phi + (1 - self.beta2) * np.asarray(s) ** 2
        correction = 1 - self.beta2**self.t
        return self.m / (1 - self.beta1**self.t), self.v / correction, self.phi / correction

    def floored(self, v_hat: Array, phi_hat: Array, m_hat: Array) -> Array:
        floor = self.floor * phi_hat
        floor = floor if self.gamma_prime is None else self.gamma_prime
        d = v_hat - phi_hat
        return {
            "max": np.maximum(d, floor),
            "negative_only": np.where(d > 0, d, floor),
            "moment": np.maximum(d, m_hat**2) + floor,
            "add": np.maximum(d, 0) + floor,
        }[self.rule]


class Adam(Moments):
    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        m_hat, v_hat, _ = self.hats(g, s)
        return (1 - self.lr * self.weight_decay) * theta - self.lr * m_hat / (np.sqrt(v_hat) + self.gamma)


class AdamBC(Moments):
    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        m_hat, v_hat, phi_hat = self.hats(g, s)
        root = np.sqrt(self.floored(v_hat, phi_hat, m_hat))
        return (1 - self.lr * self.weight_decay) * theta - self.lr * m_hat / root


class NAdam(Moments):
    momentum_decay = 4e-3
    debiased = False
    product = 1.0

    def mu(self, t: int) -> float:
        return self.beta1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay))

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        m_hat, v_hat, phi_hat = self.hats(g, s)
        self.product *= self.mu(self.t)
        now, following = self.mu(self.t), self.mu(self.t + 1)
        step = (1 - now) * g / (1 - self.product) + following * self.m / (1 - self.product * following)
        root = np.sqrt(self.floored(v_hat, phi_hat, m_hat)) if self.debiased else np.sqrt(v_hat) + self.gamma
        return theta - self.lr * step / root


class RMSprop(Plain):
    alpha, eps, floor = 0.99, 1e-8, 4.0
    debiased = False
    v: Array | float = 0.0
    phi: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.t += 1
        self.v = self.alpha * self.v + (1 - self.alpha) * g**2
        self.phi = self.alpha * self.phi + (1 - self.alpha) * np.asarray(s) ** 2
        if not self.debiased:
            return theta - self.lr * g / (np.sqrt(self.v) + self.eps)
        floor = self.floor * self.phi / (1 - self.alpha**self.t)
        return theta - self.lr * g / np.sqrt(np.maximum(self.v - self.phi, floor))


class Adagrad(Plain):
    eps, floor = 1e-10, 4.0
    debiased = False
    v: Array | float = 0.0
    phi: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.t += 1
        self.v = self.v + g**2
        self.phi = self.phi + np.asarray(s) ** 2
        if not self.debiased:
            return theta - self.lr * g / (np.sqrt(self.v) + self.eps)
        floor = self.floor * self.phi
        return theta - self.lr * g / np.sqrt(np.maximum(self.v - self.phi, floor))


class RMSpropPub(Plain):
    """DP-R-Pub (SPEC 9); step takes the public gradient where the others take the noise."""

    alpha, eps = 0.9, 1e-5
    v: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.v = self.alpha * self.v + (1 - self.alpha) * np.asarray(s) ** 2
        return theta - self.lr * g / (np.sqrt(self.v) + self.eps)


class AdamPub(Plain):
    """DP-Adam-Pub (SPEC 10)."""

    beta1, beta2, eps, keep = 0.9, 0.999, 1e-5, 0.9
    numerator, corrected = "private", True
    m: Array | float = 0.0
    v: Array | float = 0.0

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        self.t += 1
        h = np.asarray(s)
        self.v = self.beta2 * self.v + (1 - self.beta2) * h**2
        if self.numerator == "public":
            self.m = self.beta1 * self.m + (1 - self.beta1) * h
            return theta - self.lr * (self.keep * g + (1 - self.keep) * self.m) / (np.sqrt(self.v) + self.eps)
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        c1, c2 = (1 - self.beta1**self.t, 1 - self.beta2**self.t) if self.corrected else (1.0, 1.0)
        return theta - self.lr * (self.m / c1) / (np.sqrt(self.v / c2) + self.eps)


class MirrorDescent(Plain):
    """PDA-DPMD (SPEC 11)."""

    horizon = 30

    def step(self, theta: Array, g: Array, s: Array | float) -> Array:
        alpha = max(0.0, np.cos(np.pi * self.t / (2 * self.horizon))) if self.t < self.horizon else 0.0
        self.t += 1
        return theta - self.lr * (alpha * g + (1 - alpha) * np.asarray(s))
