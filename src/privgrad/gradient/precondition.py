"""AdaDPS: divide each example's gradient by public scales before it is clipped."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from privgrad.errors import expected


@dataclass(frozen=True)
class Preconditioner:
    """Scales A by parameter name: each example's gradient g becomes g / A before it is clipped.

    Args:
        scales: positive finite tensors that broadcast to their parameters; parameters without one keep A = 1.
    Privacy:
        None of its own: the scales must be public, or post-processing of what was released. The bound C then holds
        in the preconditioned space, and the released gradient stays there.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1.
    """

    scales: Mapping[str, Tensor]

    def __repr__(self) -> str:
        """Names, and a hash of the scales: equal for equal preconditioners, and short enough for a record."""
        state = hashlib.blake2b(digest_size=8)
        for scale in self.scales.values():
            state.update(repr(tuple(scale.shape)).encode() + scale.detach().cpu().double().numpy().tobytes())
        return f"Preconditioner({', '.join(self.scales)}; {state.hexdigest()})"

    def inverse_scales(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """1 / A by name, shaped and placed like the parameters, float32 or wider.

        Raises:
            PrivacyError: an unknown name, a shape that does not fit, or a scale that is not positive and finite.
        """
        unknown = sorted(set(self.scales) - set(parameters))
        if unknown:
            remedy = "name them as model.named_parameters() does"
            raise expected("precondition", "scales", "for trainable parameters", ", ".join(unknown), remedy)
        return {name: _inverse(name, scale, parameters[name]) for name, scale in self.scales.items()}


def fixed(scales: Mapping[str, Tensor]) -> Preconditioner:
    """Scales that are given, and stay: see `Preconditioner`.

    Raises:
        PrivacyError: (when PrivateGradient is constructed) a name, shape or value that does not fit.
    """
    return Preconditioner(scales)


def _inverse(name: str, scale: Tensor, parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    try:
        whole = scale.detach().to(parameter.device, dtype).expand(parameter.shape)
    except RuntimeError:
        got = f"shape {tuple(scale.shape)} for {tuple(parameter.shape)}"
        raise expected("precondition", f"scales of {name!r}", "to fit", got, "broadcast to the parameter") from None
    inverse = 1 / whole
    if not bool(((whole > 0) & torch.isfinite(whole) & torch.isfinite(inverse)).all()):
        remedy = "add a small constant, as 1e-5"
        raise expected("precondition", f"scales of {name!r}", "to be positive and finite", "others", remedy)
    return inverse.contiguous()
