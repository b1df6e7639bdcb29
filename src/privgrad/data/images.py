"""A data set from a folder of your own images: one sub-folder per class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data import schema as schemas
from privgrad.data.dataset import NO_LABEL, DataSet, have_most_rows_in_common
from privgrad.data.read_rows import read_columns
from privgrad.data.schema import ROW, Fault, PathLike, Positive
from privgrad.data.table import Share, Split, in_both, report, require_training
from privgrad.errors import described, did_you_mean, expected, readable, require_integer
from privgrad.plugins import optional

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
METADATA, FILE_NAME = "metadata.csv", "file_name"  # as in the image folders of Hugging Face


class Image(NamedTuple):
    """The file of an image, and its class number."""

    file: Path
    label: int


def image_folder(
    path: PathLike,
    *,
    classes: Sequence[str],
    size: Positive,
    channels: Literal[1, 3],
    standardize: bool = True,
    unit: str | None = None,
    max_rows: Positive | None = None,
    test: PathLike | None = None,
    test_share: Share = 0.0,
    validation_share: Share = 0.0,
    split_key: str = "",
) -> DataSet:
    """Load images of your own from a folder with one sub-folder per class; docs/data-reference.md lists its rules.

    Inputs, float (n, channels, size, size): each image is resized to a square, as `read_image` describes. With a person
    as unit, each input holds all images of one person: (n, max_rows, channels, size, size), with zeros and labels
    NO_LABEL for images that the person does not have. A training needs privacy unit "user" for them.

    Args:
        path: the folder. The name of a sub-folder is the class of its images, which may be in deeper folders. Files
            that are no .png, .jpg, .bmp, .gif, .tif or .webp are not read.
        classes: the allowed names of sub-folders, in the order of the class numbers.
        size: height and width of all inputs in pixels.
        channels: 1 for gray, 3 for color. Images are converted.
        standardize: whether pixels are in [-1, 1]; otherwise they are in [0, 1], as `privgrad.features` needs them.
        unit: required. "row" protects each image by itself; a person with several images is then protected less. The
            name of a column of metadata.csv that identifies a person protects all images of a person together. This
            file lies in the folder, and its column file_name has each image's path from the folder.
        max_rows: for persons: the most images per person, a public number. The first ones in metadata.csv are kept.
        test: a second folder of the same form, whose images are the test part.
        test_share: the share of units in the test part, in [0, 1); 0 with `test`.
        validation_share: the share of units in the validation part, in [0, 1).
        split_key: a text that changes which units are in which part; at most 64 bytes.
    Returns:
        A data set with split "unit": a unit's part depends on a hash of its file or of the person, and of `split_key`,
        only.
    Raises:
        PrivacyError: the folder has another form, an image is damaged, or an argument is wrong.
    Privacy:
        Classes, size and max_rows must be public. An input depends on one unit only.
    """
    require_images("image_folder", classes, size, channels, unit, max_rows)
    split = Split("image_folder", None, test, test_share, validation_share, split_key)
    folder = Path(path)
    own = units_of(folder, classes, unit, max_rows)
    parts: dict[Any, list[list[Image]]] = split.parts(f"{folder}", own)
    require_training("image_folder", f"{folder}", "image" if unit == ROW else "person", parts)
    if test is not None:
        other = units_of(Path(test), classes, unit, max_rows)
        if unit != ROW and (shared := {key for key, _ in own} & {key for key, _ in other}):
            raise in_both("image_folder", "persons", Path(test).name, folder.name, f"{len(shared)} of them in both")
        parts["test"] = [images for _, images in other]
    form = size, channels, max_rows, standardize
    made: dict[str, Any] = {name: _tensors(units, *form) for name, units in parts.items()}
    if test is not None and have_most_rows_in_common(made["train"].tensors[0], made["test"].tensors[0]):
        raise in_both("image_folder", "images", Path(test).name, folder.name, "copies")
    return DataSet(
        name=folder.name,
        **made,
        num_classes=len(classes),
        input_shape=(channels, size, size),
        split="unit",
        classes=tuple(classes),
        by_person=unit != ROW,
        pixel_range=(-1.0 if standardize else 0.0, 1.0),
    )


def require_images(function: str, classes: Any, size: Any, channels: Any, unit: Any, max_rows: Any) -> None:
    """Raise PrivacyError unless the declaration of a folder is complete."""
    are_names = schemas.is_a(classes, list, tuple) and all(isinstance(name, str) and name for name in classes)
    if not are_names or len(set(classes)) < max(2, len(classes)):
        raise expected(function, "classes", "to be at least two different names", described(classes))
    require_integer(function, "size", size, 1)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise expected(function, "channels", "to be 1 or 3", described(channels), "give 1 for gray, 3 for color")
    schemas.require_unit(function, unit, max_rows)
    if unit == FILE_NAME:
        raise expected(function, "unit", f"to be a column apart from {FILE_NAME}", repr(unit))


def units_of(
    folder: Path, classes: Sequence[str], unit: str | None, max_rows: int | None
) -> list[tuple[str | bytes, list[Image]]]:
    """Return the images of each unit, with the text that decides its part: the content of a file, or a person."""
    found = _files(folder, classes)
    if unit == ROW or unit is None:
        return [(image.file.read_bytes(), [image]) for image in found]
    by_name = {image.file.relative_to(folder).as_posix(): image for image in found}
    source = f"{METADATA} of {folder.name}"
    _, columns = read_columns("image_folder", folder / METADATA, [FILE_NAME, unit])
    names, texts = columns[FILE_NAME], columns[unit]
    unknown = [row for row, name in enumerate(names) if name not in by_name]
    remedy = f"give the path from {folder.name}, such as '{next(iter(by_name))}', or leave the row out"
    faults = [
        Fault("no image", "to be an image in a class's folder", unknown, remedy),
        Fault("a repeated image", "to differ from earlier rows", schemas.repeated(names), "leave one out"),
    ]
    report("image_folder", f"column {FILE_NAME!r} of {source}", faults, names)
    keys, faults = schemas.read_names(texts, unique=False)
    report("image_folder", f"column {unit!r} of {source}", faults, texts)
    listed = set(names)
    if left := [name for name in by_name if name not in listed]:
        remedy = "add its row, or move the image out of the folder"
        raise expected("image_folder", source, "to have a row for each image", f"no row for {left[0]!r}", remedy)
    return [(key, [by_name[names[row]] for row in rows[:max_rows]]) for key, rows in schemas.rows_by_key(keys).items()]


def _files(folder: Path, classes: Sequence[str]) -> list[Image]:
    if not folder.is_dir():
        raise expected("image_folder", "path", "to be a folder with one sub-folder per class", folder)
    present = sorted(inner.name for inner in folder.iterdir() if inner.is_dir() and not inner.name.startswith("."))
    folders = f"sub-folders of {folder.name}"
    for name in sorted({*present} ^ {*classes}):
        others, no = ([*classes], "") if name in present else (present, "no ")
        remedy = did_you_mean(name, others, "correct its name or classes, move it away, or create it, even if empty")
        raise expected("image_folder", folders, f"to be the classes {', '.join(classes)}", f"{no}{name!r}", remedy)
    files = [
        Image(file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    ]
    if not files:
        raise expected("image_folder", folder.name, "to hold at least 1 image", 0, "correct path, or convert to PNG")
    return files


def _tensors(
    units: Sequence[Sequence[Image]], size: int, channels: Literal[1, 3], max_rows: int | None, standardize: bool
) -> TensorDataset:
    """Return inputs and labels, one row per unit: (n, C, S, S) and (n,), or for persons (n, max_rows, ...)."""
    pixels = torch.zeros(len(units), max_rows or 1, channels, size, size)
    labels = torch.full(pixels.shape[:2], NO_LABEL)
    for unit, images in enumerate(units):
        for row, image in enumerate(images):
            read = read_image(image.file, size=size, channels=channels)
            pixels[unit, row] = read / 127.5 - 1 if standardize else read / 255
            labels[unit, row] = image.label
    return TensorDataset(pixels, labels) if max_rows is not None else TensorDataset(pixels[:, 0], labels[:, 0])


def read_image(path: PathLike, *, size: Positive, channels: Literal[1, 3]) -> Tensor:
    """Return one image file as `image_folder` reads it, before pixels are scaled: uint8 (channels, size, size).

    Computes: `Image.open(path).convert("L" or "RGB").resize((size, size), Image.Resampling.BICUBIC)` of Pillow, which
        smooths where it shrinks. Height and width are scaled apart.

    The arguments are as in `image_folder`, except `path`, the file.

    Raises:
        PrivacyError: Pillow is missing, the image is damaged, or it has more than 8 bits per channel.
    """
    file, pillow = Path(path), require_pillow()
    place, remedy = f"{file.parent.name}/{file.name}", "replace or remove it; `privgrad doctor` lists all such files"
    with readable("image_folder", place, "to be a readable image", remedy), pillow.open(file) as image:
        if image.mode.startswith(("I", "F")):
            remedy = "convert it by a public rule, such as value / 256"
            raise expected("image_folder", place, "to have 8 bits per channel", f"mode {image.mode}", remedy)
        square = image.convert("L" if channels == 1 else "RGB").resize((size, size), pillow.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, channels)
    return values.permute(2, 0, 1)


def require_pillow() -> Any:
    """Return Pillow's module of images; raise PrivacyError if it is missing."""
    return optional("image_folder", "Pillow", "PIL.Image", "pip install 'privgrad[images]'", " for images")
