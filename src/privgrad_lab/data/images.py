"""Images: the MNIST family, barcodes, CIFAR-10, CIFAR-100, ImageNet32."""

import gzip
import math
import pickle
import pickletools
import struct
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from privgrad.accounting.calibration import cache
from privgrad.data.dataset import DataSet, split
from privgrad.data.schema import PathLike, Positive
from privgrad.errors import expected, readable, require_integer
from privgrad_lab.data.fetching import located, streamed

_LARGEST_IDX = 1 << 30  # values in a file

_LARGEST_BATCH = 1 << 28  # bytes: the training part of CIFAR-100 has 155 million


class _Cifar(NamedTuple):
    """The files of a set of the CIFAR family; the last batch is the test part."""

    name: str
    folder: str
    batches: tuple[str, ...]
    labels: bytes
    classes: int

    @property
    def function(self) -> str:
        return self.name.replace("-", "").lower()

    @property
    def archive(self) -> str:
        return f"{self.name.lower()}-python.tar.gz"


_CIFAR10 = _Cifar(
    "CIFAR-10", "cifar-10-batches-py", (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"), b"labels", 10
)
_CIFAR100 = _Cifar("CIFAR-100", "cifar-100-python", ("train", "test"), b"fine_labels", 100)
_IMAGENET_MEAN, _IMAGENET_STD = (torch.tensor(c).view(3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

_IMAGENET_CLASSES = 1000

_BITS = 10  # of a barcode
_BARCODES = 2**_BITS - 1  # of each digit
_BARCODE_GROUPS = ((10, 1127), (20, 500), (200, 10), (100, 5))  # classes, and examples of each


def fashion_mnist(path: PathLike | None = None, *, standardize: bool = True, validation: int = 0) -> DataSet:
    """Load Fashion-MNIST: 60,000 training (less `validation`) and 10,000 test images of clothing, 1x28x28.

    Args:
        path: folder with the four idx .gz files. None looks for Debian's package `dataset-fashion-mnist`, then for a
            downloaded copy in the cache, then downloads the public source and verifies its checksums.
        standardize: to mean 0 and deviation 1 over the training pixels; otherwise pixels are in [0, 1].
        validation: number of training examples, from the end, to hold out.
    Raises:
        PrivacyError: no source has the files, a file is damaged, or too many examples are held out.
    """
    folder, origin = _fashion_folder(path)
    moments = (0.2860, 0.3530) if standardize else (0.0, 1.0)
    return _standardized(f"Fashion-MNIST ({origin})", folder, moments, validation)


def mnist(path: PathLike | None = None, *, standardize: bool = True, validation: int = 0) -> DataSet:
    """Load MNIST: 60,000 training (less `validation`) and 10,000 test images of digits, 1x28x28.

    The arguments are those of `fashion_mnist`, except that `path` is ${XDG_CACHE_HOME:-~/.cache}/privgrad/mnist if it
    is None.

    Raises: as in `fashion_mnist`.
    """
    moments = (0.1307, 0.3081) if standardize else (0.0, 1.0)
    return _standardized("MNIST", located("mnist", path, "mnist"), moments, validation)


def barcode(path: PathLike | None = None, *, scale: Positive = 1, seed: int = 0, validation: int = 0) -> DataSet:
    """Make Barcode MNIST: a few large classes of plain digits, many small classes of a digit with a barcode; 1x28x28.

    Computes: 10 classes of 1,127 plain digits; and 20 of 500, 200 of 10, 100 of 5 images, each class a digit and one
        of the 1,023 strings of ten bits that are not all zero, all classes different. Bit k is the pixel in row 0,
        column k: 255 where it is 1, else 0. n = 23,770, 330 classes. The images of a class are different training
        images of its digit; an image may be in several classes. Each pixel then is standardized over all n images.

    Args:
        path: folder with MNIST's four idx .gz files. None uses Fashion-MNIST as a stand-in: its ten kinds of clothing
            take the place of the digits.
        scale: >= 1; divides the number of classes in each group and the number of examples in each class, but keeps at
            least one: the set is about scale**2 times smaller.
        seed: for drawing the barcodes and the images.
        validation: 0: as in heavy_tail, the training set is the test set.
    Raises:
        PrivacyError: no source has the files, a digit has too few images, or a number is out of its range.
    Privacy:
        Pixel means and deviations are computed from the private images: NOT private.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), whose classes all have 5 examples, in the form that Tang, Zhiyanov,
        Lecuyer use. Deviation: their table of classes is not published; this one has the same totals.
    """
    require_integer("barcode", "scale", scale, 1)
    if path is None:
        folder, origin = _fashion_folder(None)
        name = f"barcode Fashion-MNIST ({origin})"
    else:
        folder, name = located("barcode", path, "mnist"), "barcode MNIST"
    images, kinds = _read_part(folder, "train")
    generator = torch.Generator().manual_seed(seed)
    shrunk = [(max(1, classes // scale), max(1, examples // scale)) for classes, examples in _BARCODE_GROUPS]
    sizes = [examples for classes, examples in shrunk for _ in range(classes)]
    plain = torch.arange(shrunk[0][0])
    drawn = torch.randperm(10 * _BARCODES, generator=generator)[: len(sizes) - len(plain)]
    digit = torch.cat([plain, drawn // _BARCODES])
    code = torch.cat([torch.zeros_like(plain), drawn % _BARCODES + 1])

    chosen: list[Tensor] = []
    for kind, size in zip(digit, sizes, strict=True):
        candidates = (kinds == kind).nonzero().squeeze(1)
        if len(candidates) < size:
            got, remedy = len(candidates), "give the whole data set, or a larger scale"
            name = f"the number of images of digit {int(kind)}"
            raise expected("barcode", name, f"to be at least {size}", got, remedy)
        chosen.append(candidates[torch.randperm(len(candidates), generator=generator)[:size]])
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    inputs = images[torch.cat(chosen)].float()
    inputs[:, 0, :_BITS] = 255.0 * (code[labels, None] >> torch.arange(_BITS) & 1)
    std = inputs.std(0)
    inputs = (inputs - inputs.mean(0)) / torch.where(std > 0, std, 1.0)
    name, whole = f"{name}, {len(sizes)} classes", (inputs[:, None], labels)
    return split(name, whole, whole, validation, num_classes=len(sizes), frequency_edges=())


def cifar10(path: PathLike | None = None, *, validation: int = 0) -> DataSet:
    """Load CIFAR-10: 50,000 training (less `validation`) and 10,000 test images, 3x32x32.

    Each channel is normalized. Means .485, .456, .406 and deviations .229, .224, .225 are ImageNet's, as in the
    DP-AdamBC paper's code.

    Args:
        path: the folder cifar-10-batches-py of the python version, its .tar.gz, or a folder with one of these. None
            looks in ${XDG_CACHE_HOME:-~/.cache}/privgrad/cifar-10, then downloads the public source to it and verifies
            its SHA-256.
        validation: number of training examples, from the end, to hold out.
    Raises:
        PrivacyError: no source has the files; a file is damaged, or holds anything but arrays, bytes and lists; or too
            many examples are held out.
    """
    return _cifar(_CIFAR10, path, validation)


def cifar100(path: PathLike | None = None, *, validation: int = 0) -> DataSet:
    """Load CIFAR-100: 50,000 training (less `validation`) and 10,000 test images of 100 fine classes, 3x32x32.

    The arguments, channels and errors are those of `cifar10`; the folder is cifar-100-python, and that of the cache
    cifar-100.
    """
    return _cifar(_CIFAR100, path, validation)


def imagenet32(path: PathLike | None = None, *, validation: int = 0) -> DataSet:
    """Load ImageNet32: 1,281,167 training (less `validation`) and 50,000 test images of 1,000 classes, 3x32x32.

    It needs 20 GB of memory. Channels are normalized as in `cifar10`.

    Args:
        path: folder with the npz files train_data_batch_1 to _10 and val_data. image-net.org gives them to its users
            only, so nothing is downloaded. None is ${XDG_CACHE_HOME:-~/.cache}/privgrad/imagenet32.
        validation: number of training examples, from the end, to hold out.
    Raises:
        PrivacyError: files are absent or damaged, or too many examples are held out.
    Reference:
        Chrabaszcz, Loshchilov, Hutter 2017 (arXiv 1707.08819).
    """
    folder = located("imagenet32", path, "imagenet32")

    def part(*names: str) -> tuple[Tensor, Tensor]:
        return _normalized(_npz_batch(folder / f"{name}.npz") for name in names)

    training = part(*(f"train_data_batch_{number}" for number in range(1, 11)))
    return split("ImageNet32", training, part("val_data"), validation, num_classes=_IMAGENET_CLASSES)


def _cifar(kind: _Cifar, path: PathLike | None, validation: int) -> DataSet:
    source = _cifar_source(kind, path)
    files = _cifar_files(kind, source)

    def part(*names: str) -> tuple[Tensor, Tensor]:
        return _normalized(_cifar_batch(kind, name, files.get(name), source) for name in names)

    *training, last = kind.batches
    return split(kind.name, part(*training), part(last), validation, num_classes=kind.classes)


def _normalized(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the images, uint8, of all batches as float32 by the means and deviations of ImageNet, and the labels."""
    images, labels = map(list, zip(*batches, strict=True))
    inputs, start = torch.empty(sum(map(len, images)), 3, 32, 32), 0
    while images:  # each batch is freed after its use, so that the largest set fits into memory
        batch = images.pop(0)
        rows = inputs[start : start + len(batch)]
        rows.copy_(batch).div_(255).sub_(_IMAGENET_MEAN).div_(_IMAGENET_STD)
        start += len(batch)
    return inputs, torch.cat(labels)


def _npz_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return the images, uint8 (n, 3, 32, 32), and the labels from 0 of a file of ImageNet32; no pickle is read."""
    what, remedy = "to be an npz file of images", "fetch the npz version again from image-net.org"
    # np.load leaves a file open that it opened itself and that is no archive.
    with readable("imagenet32", f"{path}", what, remedy), path.open("rb") as file, np.load(file) as content:
        rows, labels = content["data"], torch.from_numpy(content["labels"].astype(np.int64) - 1)
        if rows.dtype != np.uint8:
            raise TypeError(f"an array of {rows.dtype}")
        return _labeled(torch.from_numpy(rows).view(len(rows), 3, 32, 32), labels, _IMAGENET_CLASSES)


def _labeled(images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    if labels.shape != (len(images),):
        raise TypeError(f"labels of shape {tuple(labels.shape)} for {len(images)} images")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()}, not from 0 to {classes - 1}")
    return images, labels


def _standardized(name: str, folder: Path, moments: tuple[float, float], validation: int) -> DataSet:
    """Load a data set of the MNIST family, 1x28x28; `moments` are subtracted from pixels in [0, 1], and divided by."""
    mean, std = moments

    def part(which: str) -> tuple[Tensor, Tensor]:
        images, labels = _read_part(folder, which)
        return ((images.float() / 255 - mean) / std)[:, None], labels

    return split(name, part("train"), part("t10k"), validation, pixel_range=(-mean / std, (1 - mean) / std))


def _read_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return raw images, uint8 (n, 28, 28), and labels, int64 (n,), of "train" or "t10k"."""
    images, labels = (_read_idx(folder / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        got, condition = f"{tuple(images.shape)} and {tuple(labels.shape)}", "to have shapes (n, 28, 28) and (n,)"
        raise expected("data", f"{part} images and labels in {folder}", condition, got, "fetch them again")
    return images, labels.long()


def _read_idx(path: Path) -> Tensor:
    with readable("data", f"{path}", "to be a gzipped idx file of bytes", "fetch it again"), gzip.open(path) as file:
        head = file.read(4)
        if head[:3] != b"\x00\x00\x08":
            raise ValueError(f"the first bytes {head!r}")
        shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
        size = math.prod(shape)
        if size > _LARGEST_IDX:
            raise ValueError(f"{shape}, more than {_LARGEST_IDX} values")
        raw = file.read(size + 1)  # a hostile file may unpack to far more: numpy refuses another number of values
        return torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(shape).copy())


def _fashion_folder(path: PathLike | None) -> tuple[Path, str]:
    folder = located("fashion_mnist", path, "fashion-mnist")
    if path is not None:
        return folder, str(path)
    return folder, "public source" if folder == cache("fashion-mnist") else "Debian package"


def _cifar_source(kind: _Cifar, path: PathLike | None) -> Path:
    name = kind.name.lower()
    root = located(kind.function, None, name) if path is None else Path(path)
    for place in (root, root / kind.folder, root / kind.archive):
        if place.is_file() or (place / kind.batches[-1]).is_file():
            return place
    remedy = f"give the folder {kind.folder} or its .tar.gz, or run `privgrad data fetch {name}`"
    raise expected(kind.function, "path", f"to hold {kind.folder} or {kind.archive}", root, remedy)


def _cifar_files(kind: _Cifar, source: Path) -> dict[str, bytes]:
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in kind.batches if (source / name).is_file()}
    what = f"to be the archive of {kind.name}'s python version"
    with readable(kind.function, f"{source}", what, "fetch it again"):
        named = ((Path(path).name, file) for path, file in streamed(source))
        return {name: file.read(_LARGEST_BATCH) for name, file in named if name in kind.batches}


class _Inert:
    """A stand-in for every numpy class in a pickle: it stores its arguments and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """An unpickler for bytes, numbers, lists, dicts and inert arrays: a hostile file cannot run code."""

    def find_class(self, module_name: str, global_name: str, /) -> type[_Inert]:
        if module_name.split(".")[0] != "numpy" or global_name not in ("_reconstruct", "ndarray", "dtype"):
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which is no array")
        return _Inert


def _cifar_batch(kind: _Cifar, name: str, raw: bytes | None, source: Path) -> tuple[Tensor, Tensor]:
    remedy = "fetch the python version again"
    with readable(kind.function, f"{name} in {source}", "to be a pickled batch of images", remedy):
        if raw is None:
            raise FileNotFoundError("the file is missing")
        for code, argument, _ in pickletools.genops(raw):  # genops refuses lengths beyond the end of the data
            if code.name in ("PUT", "LONG_BINPUT") and argument is not None and argument > len(raw):
                raise pickle.UnpicklingError(f"it asks for memory for {argument} objects")
        content = _InertUnpickler(BytesIO(raw), encoding="bytes").load()
        _, shape, dtype, fortran, values = content[b"data"].state
        if dtype.args[0] not in (b"u1", "u1"):
            raise TypeError(f"an array of {dtype.args[0]}")
        rows = np.frombuffer(values, np.uint8).reshape(shape, order="F" if fortran else "C")
        images = torch.from_numpy(np.array(rows, order="C")).view(len(rows), 3, 32, 32)
        return _labeled(images, torch.tensor(content[kind.labels], dtype=torch.int64), kind.classes)
