"""Synthetic examples in the form of the data: for the rule "inputs" of a method, and for the constants of features.

`build` calls `public_inputs` and `require_synthetic`, and `featuring` calls `synthetic_images`. The privacy guarantee
rests on this file: none of the examples is private.
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
    if not _are_square_images(data):
        return None
    return SYNTHETIC_IMAGES[kind](_COUNT, data.input_shape[1], channels=data.input_shape[0])


def public_inputs(kind: Synthetic, data: DataSet) -> tuple[Tensor, str]:
    """Return synthetic inputs in the form of the data's inputs, and their source.

    Args:
        kind: "silhouettes" or "pink-noise" for images, "words" for texts.
        data: gives the shape and the range of pixels, or the public counts of words. No example is read.
    Raises:
        PrivacyError: the data are not of that kind.
    """
    require_synthetic(kind, data)
    if kind == "words":
        assert data.public_counts is not None
        words = features.word_sequences(data.public_counts, _COUNT, data.input_shape[0])
        return cast(Tensor, words.rows), words.source
    made = synthetic_images(kind, data)
    assert made is not None
    assert data.pixel_range is not None
    black, white = data.pixel_range
    return cast(Tensor, made.rows) * (white - black) + black, made.source


def require_synthetic(kind: Synthetic, data: DataSet) -> None:
    """Raise PrivacyError unless synthetic examples of this kind have the form of the data's inputs."""
    if kind == "words":
        if (
            data.public_counts is None
            or data.counts_provenance in (None, "private-derived")
            or len(data.input_shape) != 1
        ):
            remedy = "choose data with counts of words in public text, or take public examples"
            raise _unsuited("to be texts with public word counts", data, remedy)
    elif data.pixel_range is None or not _are_square_images(data):
        remedy = "leave public out, and give public examples in [data]"
        raise _unsuited("to be square images with 1 or 3 channels and a known range", data, remedy)


def _are_square_images(data: DataSet) -> bool:
    """Return whether the data's inputs have the shape of synthetic images."""
    shape = data.input_shape
    return len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]


def _unsuited(condition: str, data: DataSet, remedy: str) -> Exception:
    """Return the error for data of another kind."""
    got: Any = f"{data.name} with inputs of shape {data.input_shape}"
    return expected("load_spec", "precondition.public", condition, got, remedy)
