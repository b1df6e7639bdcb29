"""Synthetic examples in the form of the data: for the rule "inputs" of a method, and for the constants of features.

`build.preconditioner` calls `public_inputs`, and `featuring` calls `synthetic_images`. The privacy guarantee rests on
this file: none of the examples is private.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from privgrad import features
from privgrad.data import DataSet
from privgrad.errors import expected
from privgrad.experiments.tables import Synthetic

_COUNT = 6000  # synthetic examples, from which each computation draws some


SYNTHETIC_IMAGES: dict[str, Callable[..., features.Public]] = {
    "silhouettes": features.silhouettes,
    "pink-noise": features.pink_noise,
}


def synthetic_images(kind: str, data: DataSet) -> features.Public | None:
    """Return synthetic images of the data's size and channels, in [0, 1]; None unless it holds square images.

    Args:
        kind: of SYNTHETIC_IMAGES.
        data: gives the shape. No example is read.
    """
    shape = data.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2]:
        return None
    return SYNTHETIC_IMAGES[kind](_COUNT, shape[1], channels=shape[0])


def public_inputs(kind: Synthetic, data: DataSet) -> tuple[Tensor, str]:
    """Return synthetic inputs in the form of the data's inputs, and their source.

    Args:
        kind: "silhouettes" or "pink-noise" for images, "words" for texts.
        data: gives the shape and the range of pixels, or the public counts of words. No example is read.
    Raises:
        PrivacyError: the data are not of that kind.
    """
    if kind == "words":
        if data.public_counts is None or data.counts_provenance == "private-derived" or len(data.input_shape) != 1:
            remedy = "choose data with counts of words in public text, or take public examples"
            raise _unsuited("to be texts with public word counts", data, remedy)
        made = features.word_sequences(data.public_counts, _COUNT, data.input_shape[0])
        return cast(Tensor, made.rows), made.source
    pixels = data.pixel_range
    if pixels is None or (made := synthetic_images(kind, data)) is None:
        remedy = "leave public out, and give public examples in [data]"
        raise _unsuited("to be square images with 1 or 3 channels and a known range", data, remedy)
    black, white = pixels
    return cast(Tensor, made.rows) * (white - black) + black, made.source


def _unsuited(condition: str, data: DataSet, remedy: str) -> Exception:
    """Return the error for data of another kind."""
    got: Any = f"{data.name} with inputs of shape {data.input_shape}"
    return expected("load_spec", "precondition.public", condition, got, remedy)
