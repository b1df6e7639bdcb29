"""AdaDPS: divide each example's gradient by public scales before it is clipped."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from privgrad.errors import expected
from privgrad.gradient.functional import trainable
from privgrad.gradient.transform import Preconditioner, Scales, Transform, require_scales


class Fixed(Preconditioner):
    """A preconditioner with given, constant scales: see `fixed`."""

    def __init__(self, scales: Mapping[str, Tensor], source: str, *, is_public: bool) -> None:
        self._scales, self.source, self.is_public = scales, source, is_public
        self._made = Transform()

    def __repr__(self) -> str:
        """Return the names of the scales, a hash of their shapes and values, and the source, for checkpoints."""
        state = hashlib.blake2b(digest_size=8)
        for _, scale in sorted(self._scales.items()):
            state.update(repr(tuple(scale.shape)).encode() + scale.detach().cpu().double().numpy().tobytes())
        return f"fixed({', '.join(sorted(self._scales))}; {state.hexdigest()}; {self.source})"

    def begun(self, model: nn.Module) -> "Fixed":
        """Return a copy that holds 1 / A for this model; raise PrivacyError if the scales do not fit it."""
        parameters, twin = trainable(model), copy.copy(self)
        if unknown := ", ".join(sorted(self._scales.keys() - parameters.keys())):
            raise expected("precondition", "scales", "to be for trainable parameters", unknown)
        inverse = {name: _inverse(name, scale, parameters[name]) for name, scale in self._scales.items()}
        # Where A = 1, leave the division out: this is ordinary clipping, equal to the last bit.
        twin._made = Transform({name: value for name, value in inverse.items() if bool((value != 1).any())})
        return twin

    def transform(self, step: int, **_: Any) -> Transform:
        """Return the transform that `begun` made, the same in all steps."""
        return self._made


def fixed(scales: Scales, *, source: str | None = None) -> Preconditioner:
    """Return a preconditioner with constant scales A: each example's gradient g becomes g / A before it is clipped.

    Args:
        scales: Scales, with values from 1e-12 to 1e12, that broadcast to their parameters. Where a name is missing,
            A = 1. `privgrad.side_information` makes such Scales.
        source: more about where the scales come from, in a few words; recorded after their own source.
    Raises:
        PrivacyError: `scales` are not Scales, for instance a dict, which has no provenance; or, when PrivateGradient is
            constructed, a name, shape or value does not fit.
    Privacy:
        This function gives no guarantee of its own: the scales must be public, or post-processing of released values.
        The bound C then holds in the preconditioned space, and the released gradient stays in that space. If the
        scales have the provenance "private-derived", no epsilon covers them: every release is charged as one without
        noise.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), algorithm 1, option 2.
    """
    if not isinstance(scales, Scales):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = 'give pg.Scales({"layer.weight": scale}, provenance="public data", source="..."), if that is true'
        raise expected("precondition.fixed", "scales", "to be Scales, with a provenance", type(scales).__name__, remedy)
    # The text becomes a fact of the ledger, and a resumed run must have equal facts: do not change it.
    recorded = "; ".join(part for part in (f"{scales.provenance}: {scales.source}", source) if part)
    is_public = scales.provenance != "private-derived"
    return Fixed(dict(scales), recorded, is_public=is_public)


def _inverse(name: str, scale: Tensor, parameter: Tensor) -> Tensor:
    """Return 1 / A with the parameter's shape and device, in float32 or wider."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    whole = scale.to(parameter.device, dtype).expand(parameter.shape)
    require_scales(name, whole)
    return whole.reciprocal().contiguous()
