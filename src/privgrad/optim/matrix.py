"""Muon for released gradients, as published and with its bias correction."""

import hashlib
import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from privgrad.errors import expected
from privgrad.optim.base import NamedParameters, PrivateOptimizer, widened
from privgrad.optim.debiased import Group, State
from privgrad.types import NoisyGradient

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon


class Muon(PrivateOptimizer):
    """A momentum SGD whose steps are orthogonal matrices: DP-Muon. It has no noise step.

    Computes: m = momentum * m + g;  p = p - lr * orthogonalized(m), by Newton-Schulz iterations on m divided by its
    Frobenius norm. A parameter of more than two dimensions is a matrix of its first one and the rest; a vector is a
    matrix of one row, so its step is m / |m|.

    Args:
        lr: >= 0, about the size of the singular values of a step.
        momentum: in [0, 1).
        iterations: >= 1.
        bfloat16: compute the iterations in bfloat16, as torch.optim.Muon does. With a processor or GPU that has
            instructions for it, they take about a third of the time; a step of Muon differs by about 3 % of its norm,
            one of MuonBC by about 7 %. A matrix more than twice as long as wide keeps its own precision.
    Reference:
        Kim, Fan 2026 (DP-Muon, arXiv 2605.12994). Deviations: m is always divided by its norm, and the polynomial is
        that of torch.optim.Muon.
    """

    _without_noise_step = "Muon, whose steps have the same size at any noise"
    _intervals: ClassVar = {"momentum": "[0, 1)"}
    _counts: ClassVar = ("iterations",)

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        momentum: float = 0.95,
        iterations: int = 5,
        bfloat16: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "iterations": iterations, "bfloat16": bfloat16}
        super().__init__(params, defaults=options)

    @torch.no_grad()
    def _update(self, gradient: NoisyGradient) -> None:
        for group, name, parameter, state in self._each():
            if not state:
                state["momentum_buffer"] = widened(parameter)
            # m = momentum m + g
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient[name])
            # p = p - lr orthogonalized(m), of the whole matrix also where the parameter is sharded
            whole = gathered(state["momentum_buffer"])
            step = self._step_of(whole, group, state, name, gradient.noise_std_of(name))
            parameter.add_(sharded_like(step.to(parameter.dtype), parameter), alpha=-group["lr"])

    def _step_of(self, moment: Tensor, group: Group, state: State, name: str, noise_std: float | Tensor) -> Tensor:
        """Return the step of one parameter, given its momentum and the noise of its last gradient."""
        del state, name, noise_std
        return orthogonalized(moment, group["iterations"], group["bfloat16"])


class MuonBC(Muon):
    """A Muon that subtracts the leading bias that the noise has after the orthogonalization: DP-MuonBC.

    Computes: p = p - lr * (2 f(m) - (f(m + z) + f(m - z)) / 2), where f orthogonalizes, and z is fresh public noise
    with the standard deviation of the noise in m. The mean of f(m + z) and f(m - z) differs from f(m) by half the noise
    variance times the Laplacian of f in expectation, and so does f(m) from its value without noise. It costs three
    orthogonalizations, and averages over `probes` draws of z. The noise must be independent from step to step: without
    a filter, and without memory.

    Args:
        probes: >= 1.
    Reference:
        Kim, Fan 2026 (DP-MuonBC, arXiv 2605.12994), the output-level bias; the estimate by probes is ours.
    """

    _counts = ("iterations", "probes")

    def __init__(
        self,
        params: NamedParameters,
        lr: float | None = None,
        *,
        momentum: float = 0.95,
        iterations: int = 5,
        bfloat16: bool = False,
        probes: int = 1,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "iterations": iterations, "bfloat16": bfloat16, "probes": probes}
        PrivateOptimizer.__init__(self, params, defaults=options)

    def _update(self, gradient: NoisyGradient) -> None:
        if gradient.is_filtered or gradient.noise_memory is not None:  # the noise of the momentum would be another
            condition = "to have independent noise at each step, without a filter or memory"
            raise expected("MuonBC.step", "grad", condition, f"noise_gain = {gradient.noise_gain:.3g}")
        super()._update(gradient)

    def _step_of(self, moment: Tensor, group: Group, state: State, name: str, noise_std: float | Tensor) -> Tensor:
        step = state["step"] = state.get("step", 0) + 1
        state["noise_var"] = group["momentum"] ** 2 * state.get("noise_var", 0.0) + noise_std**2
        noise_var = gathered(state["noise_var"])
        around = torch.zeros_like(moment)
        # The same draws in each process and after a resume.
        seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(group["probes"]):
            z = torch.randn(moment.shape, generator=generator, dtype=torch.float64).to(moment) * noise_var**0.5
            for moved in (moment + z, moment - z):
                around += orthogonalized(moved, group["iterations"], group["bfloat16"])
        # 2 f(m) minus the mean of f(m + z) and f(m - z)
        return 2 * orthogonalized(moment, group["iterations"], group["bfloat16"]) - around / (2 * group["probes"])


def orthogonalized(moment: Tensor, iterations: int, bfloat16: bool = False) -> Tensor:
    """Return a tensor whose matrix has about the singular vectors of the given one, and singular values of about 1."""
    # X = M / |M|, then X = a X + (b X X^T + c (X X^T)^2) X in each iteration, on the side with fewer rows
    a, b, c = _COEFFICIENTS
    matrix = moment.reshape(moment.shape[0], -1) if moment.dim() > 1 else moment.reshape(1, -1)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    norm = float(cast(Tensor, torch.linalg.vector_norm(x)))
    if not 0 < norm < math.inf:
        return torch.zeros_like(moment)
    if min(x.shape) == 1:
        return moment / norm
    x = x / norm
    if x.shape[1] > 2 * x.shape[0]:
        x = _polynomial_of_rows(x @ x.T, iterations) @ x  # in bfloat16 it would lose small singular values
    else:
        x = x.bfloat16() if bfloat16 else x
        for _ in range(iterations):
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if is_tall else x).reshape(moment.shape).to(moment)


def _polynomial_of_rows(gram: Tensor, iterations: int) -> Tensor:
    """Return the matrix P with P X = the iterations on X, given X X^T. For wide X, this takes far fewer operations."""
    # Y = a I + b G + c G^2, then P = Y P and G = Y G Y, in each iteration. All are polynomials of the first G.
    a, b, c = _COEFFICIENTS
    product: Tensor | None = None
    for left in reversed(range(iterations)):
        step = b * gram + c * (gram @ gram)
        step.diagonal().add_(a)
        product = step if product is None else step @ product
        if left:
            gram = step @ gram @ step
    return cast(Tensor, product)


def gathered(value: Any) -> Any:
    """Return the whole of a sharded tensor; return any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # only a DTensor has it


def sharded_like(value: Tensor, parameter: Any) -> Tensor:
    """Return a whole tensor, sharded as the parameter is."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor  # here: it slows the import of privgrad

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
