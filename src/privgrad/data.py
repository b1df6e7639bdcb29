"""Real data sets, each from a given path, an installed package, or its public source, in this order."""

import gzip
import hashlib
import os
import struct
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.errors import PrivacyError, expected

_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
_FASHION_SOURCE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# Of the contents: the same files are compressed differently in different places.
_FASHION_SHA256 = {
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
}


@dataclass(frozen=True)
class DataSet:
    """A classification task, split.

    Attributes:
        name: for reports: what it is and where it came from.
        train: (input, label) pairs, the private examples.
        validation: held out of the training set for tuning; may be empty.
        test: the set's own test part.
        num_classes: number of labels.
        input_shape: shape of one input, without the batch dimension.
        frequency_edges: where classes are so unequal that results are told by how frequent a class is: lower ends of
            the groups' counts; () groups classes of equal count.
    """

    name: str
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    num_classes: int
    input_shape: tuple[int, ...]
    frequency_edges: tuple[int, ...] | None = None


def digits(*, validation: int = 0) -> DataSet:
    """Handwritten digits bundled with scikit-learn: 1,437 training (less `validation`) and 360 test images, 1x8x8.

    Args:
        validation: how many training examples to hold out.
    Raises:
        PrivacyError: scikit-learn is not installed, or more examples held out than there are.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        remedy = "pip install 'privgrad[experiments]'"
        raise expected("digits", "scikit-learn", "to be installed", "none", remedy) from error
    pixels, targets = cast("tuple[np.ndarray, np.ndarray]", load_digits(return_X_y=True))
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(targets).long()
    # The file is ordered by writer; a fixed permutation makes the parts alike.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = (images[order] - 0.3) / 0.37, labels[order]
    return _split("digits (scikit-learn)", images[:1437], labels[:1437], images[1437:], labels[1437:], validation)


def fashion_mnist(path: str | os.PathLike[str] | None = None, *, validation: int = 0) -> DataSet:
    """Fashion-MNIST: 60,000 training (less `validation`) and 10,000 test images of clothing, 1x28x28, standardised.

    Args:
        path: folder with the four idx .gz files. None looks for Debian's package `dataset-fashion-mnist`, then for a
            downloaded copy in the cache, then downloads the public source, checking checksums.
        validation: how many of the training examples, from the end, to hold out.
    Raises:
        PrivacyError: no source has the files, a file is damaged, or too many examples held out.
    """
    folder, origin = _fashion_folder(path)
    (train_x, train_y), (test_x, test_y) = (
        (_read_idx(folder / f"{part}-images-idx3-ubyte.gz"), _read_idx(folder / f"{part}-labels-idx1-ubyte.gz"))
        for part in ("train", "t10k")
    )

    def standardised(images: Tensor) -> Tensor:
        return ((images.float() / 255 - 0.2860) / 0.3530)[:, None]

    return _split(
        f"Fashion-MNIST ({origin})",
        standardised(train_x),
        train_y.long(),
        standardised(test_x),
        test_y.long(),
        validation,
    )


def heavy_tail(*, groups: int = 8, log_size: int = 10, seed: int = 0, validation: int = 0) -> DataSet:
    """Synthetic classes of very unequal size, inputs that tell nothing of them: what is learnt is remembered.

    Computes: group i of G = `groups` has 2**i classes with 2**(log_size - i) examples each; n = G 2**log_size examples
        in d = n + 2**log_size dimensions, uniform in [0, 1]. 8 and 10 give n = 8192, d = 9216, 255 classes.

    Args:
        groups: G >= 1.
        log_size: at least groups - 1.
        seed: of the inputs.
        validation: 0: there is nothing to generalise to, and the training set is the test set.
    Raises:
        PrivacyError: numbers out of range.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), as Tang, Zhiyanov, Lecuyer use it: SPEC E8 resolves its sizes.
    """
    if groups < 1 or log_size < groups - 1 or validation != 0:
        got, remedy = (groups, log_size, validation), "as groups=8, log_size=10, validation=0"
        condition = "to be at least 1, groups - 1, and 0"
        raise expected("heavy_tail", "groups, log_size and validation", condition, got, remedy)
    sizes = torch.tensor([2 ** (log_size - group) for group in range(groups) for _ in range(2**group)])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    width = len(labels) + 2**log_size
    inputs = torch.rand(len(labels), width, generator=torch.Generator().manual_seed(seed))
    whole = TensorDataset(inputs, labels)
    nothing = TensorDataset(inputs[:0], labels[:0])
    name = f"heavy-tail synthetic, {groups} groups"
    return DataSet(name, whole, nothing, whole, len(sizes), (width,), frequency_edges=())


LOADERS: dict[str, Callable[..., DataSet]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "heavy-tail": heavy_tail,
}


def _split(name: str, train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, validation: int) -> DataSet:
    kept = len(train_y) - validation
    if validation < 0 or kept < 1:
        got, remedy = validation, "hold out fewer"
        raise expected("data", "validation", f"from 0 to {len(train_y) - 1} examples", got, remedy)
    return DataSet(
        name=name,
        train=TensorDataset(train_x[:kept], train_y[:kept]),
        validation=TensorDataset(train_x[kept:], train_y[kept:]),
        test=TensorDataset(test_x, test_y),
        num_classes=int(train_y.max()) + 1,
        input_shape=tuple(train_x.shape[1:]),
    )


def _read_idx(path: Path) -> Tensor:
    """A gzipped idx file of unsigned bytes (the MNIST format) as a tensor."""

    def damaged(why: object) -> PrivacyError:
        return expected("data", f"{path}", "to be a gzipped idx file of bytes", why, "fetch it again")

    try:
        raw = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise damaged("no such file") from error
    except (OSError, EOFError) as error:
        raise damaged(error) from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise damaged("another format")
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    content = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    if content.size != int(np.prod(shape)):
        raise damaged(f"{content.size} values where its header says {shape}")
    return torch.from_numpy(content.reshape(shape).copy())


def _fashion_folder(path: str | os.PathLike[str] | None) -> tuple[Path, str]:
    if path is not None:
        return Path(path), str(path)
    if _DEBIAN_FASHION.is_dir():
        return _DEBIAN_FASHION, "Debian package"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "privgrad" / "fashion-mnist"
    try:
        for name, checksum in _FASHION_SHA256.items():
            _download(f"{_FASHION_SOURCE}/{name}", cache / name, checksum)
    except OSError as error:
        raise expected(
            "fashion_mnist",
            "the data",
            "to be found",
            f"no path given, no package dataset-fashion-mnist, and {_FASHION_SOURCE}: {error}",
            "give the folder of its four .gz files, or apt-get install dataset-fashion-mnist, or go online",
        ) from error
    return cache, "public source"


def _download(url: str, target: Path, checksum: str) -> None:
    """Fetch a file once; it appears under its name only if its SHA-256 is right."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
    found = hashlib.sha256(gzip.decompress(content)).hexdigest()
    if found != checksum:
        raise expected("data", f"the SHA-256 of {url}, unpacked", f"to be {checksum}", found, "do not use this copy")
    partial = target.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(target)
