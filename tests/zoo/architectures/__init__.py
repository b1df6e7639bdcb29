"""Many architectures with random weights: each by name, with examples and per-example losses.

`test_zoo` compares their released gradients at a tiny size with loops over single examples. `benchmarks.zoo` measures
them at a real size. Models of transformers are made from configurations, so nothing is downloaded. timm is optional.
"""

from collections.abc import Callable

import torch

from .by_hand import BY_HAND
from .cases import REAL, TINY, Case, Maker, Size, moved
from .convolutions import CONVOLUTIONS
from .decoders import DECODERS
from .encoders import ENCODERS
from .of_timm import TIMM, TIMM_REFUSED
from .series import SERIES
from .units import BLOCKS, COUPLED_UNITS, UNITS
from .variants import VARIANTS
from .vision import VISION, VISION_REFUSED, clip_with_its_own_loss

HAND: dict[str, Maker] = BY_HAND | CONVOLUTIONS | UNITS
TRANSFORMERS: dict[str, Maker] = ENCODERS | DECODERS | VISION | SERIES
ARCHITECTURES: dict[str, Maker] = TRANSFORMERS | TIMM | HAND
# Their examples are coupled.
WITH_BATCH_NORM: dict[str, Maker] = VISION_REFUSED | TIMM_REFUSED
COUPLED: dict[str, Maker] = COUPLED_UNITS | {"clip_with_its_own_loss": clip_with_its_own_loss}

__all__ = [
    "ARCHITECTURES", "BLOCKS", "COUPLED", "HAND", "REAL", "TIMM", "TINY", "TRANSFORMERS", "VARIANTS",
    "WITH_BATCH_NORM", "Case", "Size", "make",
]  # fmt: skip


def make(
    name: str,
    size: Size = TINY,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    variant: Callable[[Case], Case] = lambda case: case,
) -> Case:
    """Return a new model of an architecture, always with the same weights and examples.

    Args:
        name: a key of ARCHITECTURES, BLOCKS, WITH_BATCH_NORM or COUPLED.
        variant: one of VARIANTS, or none.
        size: of the model and of its batch.
        dtype: of its parameters and of examples that are no integers.
        device: of both.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return moved(variant((ARCHITECTURES | BLOCKS | WITH_BATCH_NORM | COUPLED)[name](size)), dtype, device)
