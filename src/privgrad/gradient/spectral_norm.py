"""Advance the vectors of spectral norms once per step, outside of all forward passes, and hold them during the step.

torch's spectral_norm estimates the norm of a weight by two vectors, and improves them in each training forward pass.
`PrivateGradient`, `federated.local_update`, `explanation` and `diagnostics` open `advanced` around a step instead.

The privacy guarantee rests on this file: what stays in the vectors depends on parameters and on the earlier vectors
alone. They advance in each step, whatever batch was drawn and even if it is empty, and before any example is read. In
the passes nothing may be written to a buffer: both engines refuse it.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.spectral_norm import SpectralNorm

from privgrad.gradient.module_state import named_modules


@contextmanager
def advanced(model: nn.Module, *, keep: bool) -> Generator[None]:
    """Advance the vectors of all spectral norms in training mode, and hold all vectors until the exit.

    Computes: for each weight W with vectors u and v, what one training forward pass computes: `n_power_iterations`
    times u = W v / |W v| and v = W^T u / |W^T u| (the old spectral_norm: v first). So a layer that is called twice, a
    second pass and a recomputed part all use the same vectors.

    Args:
        model: the module; both torch.nn.utils.parametrizations.spectral_norm and the old torch.nn.utils.spectral_norm
            are found, if W is a parameter itself. A spectral norm of a computed weight is left as it is.
        keep: whether the new vectors stay. Otherwise, and after an exception, the old ones are put back.
    """
    found = list(_spectral_norms(model))
    if not found:
        yield
        return
    iterations = [norm.n_power_iterations for norm, _, _ in found]
    before = [(vector, vector.clone()) for _, _, vectors in found for vector in vectors]
    done = False
    try:
        with torch.no_grad():
            for norm, of, _ in found:
                if isinstance(norm, SpectralNorm):
                    norm.compute_weight(of, do_power_iteration=of.training)
                else:
                    norm(of.original)
        for norm, _, _ in found:
            norm.n_power_iterations = 0
        yield
        done = keep
    finally:
        for (norm, _, _), count in zip(found, iterations, strict=True):
            norm.n_power_iterations = count
        for vector, held in () if done else before:
            vector.copy_(held)


def _spectral_norms(model: nn.Module) -> Iterator[tuple[Any, Any, tuple[Tensor, Tensor]]]:
    """Yield each spectral norm of a parameter, the module that holds the parameter, and the two vectors."""
    for _, module in named_modules(model):
        if isinstance(module, parametrize.ParametrizationList):
            norm = module[0]  # a later one sees what the earlier ones computed
            original = vars(module)["_parameters"].get("original")
            if type(norm) is _SpectralNorm and original is not None and original.dim() > 1:
                yield norm, module, (norm.get_buffer("_u"), norm.get_buffer("_v"))
        for hook in cast("Mapping[int, Any]", vars(module)["_forward_pre_hooks"]).values():
            if type(hook) is SpectralNorm and vars(module)["_parameters"].get(f"{hook.name}_orig") is not None:
                vectors = module.get_buffer(f"{hook.name}_u"), module.get_buffer(f"{hook.name}_v")
                yield hook, module, vectors
