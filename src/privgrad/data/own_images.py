"""A data set from a folder of your own images: one sub-folder per class, each image a privacy unit.

Users call `image_folder`; `experiments.sources` calls it for `[data] folder`. The privacy guarantee rests on this file:
neither the pixels of an image nor its part depend on other images.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data.dataset import DataSet
from privgrad.data.own_table import Share, part_of, require_split
from privgrad.data.read_rows import is_datasets_folder
from privgrad.data.schema import ROW, Where
from privgrad.data.sources import PathLike, Positive
from privgrad.errors import described, did_you_mean, expected

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def image_folder(
    path: PathLike,
    *,
    classes: Sequence[str],
    size: Positive,
    channels: Literal[1, 3],
    unit: str | None = None,
    test: PathLike | None = None,
    test_share: Share = 0.0,
    validation_share: Share = 0.0,
    split_key: str = "",
) -> DataSet:
    """Load images of your own from a folder with one sub-folder per class; docs/own-data.md lists its rules.

    Inputs, float (n, channels, size, size): each image is resized to a square, and pixels are in [-1, 1].

    Args:
        path: the folder. The name of a sub-folder is the class of its images, which may be in deeper folders. Files
            that are no .png, .jpg, .bmp, .gif, .tif or .webp are not read.
        classes: the allowed names of sub-folders, in the order of the class numbers.
        size: height and width of all inputs in pixels.
        channels: 1 for gray, 3 for color. Images are converted.
        unit: required: "row". Each image is protected by itself; a person with several images is protected less.
        test: a second folder of the same form, whose images are the test part.
        test_share: the share of images in the test part, in [0, 1); 0 with `test`.
        validation_share: the share of images in the validation part, in [0, 1).
        split_key: a text that changes which images are in which part; at most 64 bytes.
    Returns:
        A data set with split "unit": an image's part depends on a hash of its file, and of `split_key`, only.
    Raises:
        PrivacyError: the folder has another form, an image is damaged, or an argument is wrong.
    Privacy:
        Classes and size must be public. An input depends on one image only.
    """
    require_images(Where("image_folder"), classes, size, channels, unit)
    require_split(Where("image_folder"), test, test_share, validation_share, split_key)
    folder = Path(path)
    found = _files(folder, classes)
    parts: dict[str, list[tuple[Path, int]]] = {"train": [], "validation": [], "test": []}
    for file, label in found:
        parts[part_of(file.read_bytes(), split_key, test_share, validation_share)].append((file, label))
    if test is not None:
        parts["test"] = _files(Path(test), classes)
    if not parts["train"]:
        remedy = "lower test_share and validation_share, or give a larger folder"
        raise expected("image_folder", f"the training part of {folder}", "to hold at least 1 image", 0, remedy)
    made = {name: _tensors(files, size, channels) for name, files in parts.items()}
    return DataSet(
        name=folder.name,
        train=made["train"],
        validation=made["validation"],
        test=made["test"],
        num_classes=len(classes),
        input_shape=(channels, size, size),
        split="unit",
        pixel_range=(0.0, 1.0),
    )


def require_images(where: Where, classes: Any, size: Any, channels: Any, unit: Any) -> None:
    """Raise PrivacyError unless the declaration of a folder is complete. `experiments.load_spec` also calls it."""
    shown: object = classes
    given: Sequence[Any] = cast("Sequence[Any]", classes) if isinstance(classes, list | tuple) else ()
    if len(given) < 2 or len(set(given)) < len(given) or not all(isinstance(name, str) and name for name in given):
        remedy = "list the names of the sub-folders"
        raise where.wrong("classes", "to be at least two different names", described(shown), remedy)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise where.wrong("size", "to be a whole number >= 1", described(size), "give the height in pixels, such as 28")
    if isinstance(channels, bool) or channels not in (1, 3):
        raise where.wrong("channels", "to be 1 or 3", described(channels), "give 1 for gray, 3 for color")
    if unit != ROW:
        remedy = (
            'with "row" each image is protected by itself, and a person with several images less; to protect persons, '
            "return a DataSet by person from a function"
        )
        raise where.wrong("unit", 'to be "row" for images', described(unit), remedy)


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the image files of a folder in the order of their names, each with its class number."""
    if not folder.is_dir():
        got = f"the file {folder}" if folder.exists() else f"{folder}, which does not exist"
        raise expected("image_folder", "path", "to be a folder with one sub-folder per class", got, "correct the path")
    if is_datasets_folder(folder):
        remedy = "declare columns, label and classes, and leave size out"
        raise expected("image_folder", "path", "to be a folder of images", f"the data set {folder}", remedy)
    present = sorted(place.name for place in folder.iterdir() if place.is_dir() and not place.name.startswith("."))
    for name in present:
        if name not in classes:
            remedy = did_you_mean(name, classes, "add it to classes, or move it out of the folder")
            condition = f"to be among classes, {', '.join(classes)}"
            raise expected("image_folder", f"sub-folders of {folder.name}", condition, repr(name), remedy)
    for name in classes:
        if name not in present:
            remedy = did_you_mean(name, present, "create it, even if it is empty, or correct classes")
            raise expected(
                "image_folder", f"sub-folders of {folder.name}", "to exist for each class", repr(name), remedy
            )
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]
    if not files:
        remedy = "correct the path, or convert the images to PNG"
        raise expected("image_folder", f"{folder.name}", "to hold at least 1 image", 0, remedy)
    return files


def _tensors(files: Sequence[tuple[Path, int]], size: int, channels: int) -> TensorDataset:
    """Return inputs and labels of image files."""
    pixels = torch.zeros(len(files), channels, size, size)
    for index, (file, _) in enumerate(files):
        pixels[index] = _pixels(file, size, channels)
    return TensorDataset(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


def _pixels(file: Path, size: int, channels: int) -> Tensor:
    """Return one image, float (channels, size, size), in [-1, 1]."""
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        remedy = "pip install 'privgrad[images]'"
        raise expected("image_folder", "Pillow", "to be installed for images", error, remedy) from error
    try:
        with pillow.open(file) as image:
            mode: str = image.mode
            deep = mode.startswith(("I", "F"))
            square = None if deep else image.convert("L" if channels == 1 else "RGB").resize((size, size))
    except Exception as error:  # a damaged image can raise anything
        got = f"{type(error).__name__}: {error}"
        place = f"{file.parent.name}/{file.name}"
        raise expected("image_folder", place, "to be a readable image", got, "replace or remove it") from error
    if square is None:
        place, remedy = f"{file.parent.name}/{file.name}", "convert it by a public rule, such as value / 256"
        raise expected("image_folder", place, "to have 8 bits per channel", f"mode {mode}", remedy)
    values = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, channels)
    return values.permute(2, 0, 1).float() / 127.5 - 1
