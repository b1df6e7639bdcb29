"""Loaders on the real files and on small ones of the same format; architectures by their published sizes."""

import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privgrad as pg
from privgrad import data, models


def write_fashion(folder: Path, count: int = 20) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3", images), (f"{part}-labels-idx1", labels)):
            header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def test_digits_are_real_and_split():
    pytest.importorskip("sklearn")
    loaded = data.digits(validation=240)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [1197, 240, 360]
    inputs, labels = loaded.train.tensors
    assert inputs.shape == (1197, 1, 8, 8)
    assert labels.bincount().min() > 90
    assert torch.equal(inputs, data.digits(validation=240).train.tensors[0])


@pytest.mark.skipif(not data._DEBIAN_FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_from_the_debian_package():
    loaded = data.fashion_mnist(validation=5000)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [55_000, 5000, 10_000]
    inputs, labels = loaded.test.tensors
    assert inputs.shape == (10_000, 1, 28, 28)
    assert labels.bincount().tolist() == [1000] * 10
    assert abs(loaded.train.tensors[0].mean()) < 0.01
    assert abs(loaded.train.tensors[0].std() - 1) < 0.01
    for name, checksum in data._FASHION_SHA256.items():
        content = gzip.decompress((data._DEBIAN_FASHION / name).read_bytes())
        assert hashlib.sha256(content).hexdigest() == checksum


def test_fashion_mnist_from_a_path(tmp_path: Path):
    write_fashion(tmp_path)
    loaded = data.fashion_mnist(tmp_path, validation=5)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [15, 5, 20]
    with pytest.raises(pg.PrivacyError, match="validation"):
        data.fashion_mnist(tmp_path, validation=20)


def damaged(content: bytes, how: str) -> bytes:
    return {
        "truncated": content[: len(content) // 2],
        "not gzip": b"hello",
        "not idx": gzip.compress(b"hello"),
        "too short": gzip.compress(gzip.decompress(content)[:-10]),
    }[how]


@pytest.mark.parametrize("how", ["truncated", "not gzip", "not idx", "too short"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, how: str):
    write_fashion(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(pg.PrivacyError, match="t10k-images"):
        data.fashion_mnist(tmp_path)
    path.unlink()
    with pytest.raises(pg.PrivacyError, match="no such file"):
        data.fashion_mnist(tmp_path)


def test_fashion_mnist_from_its_public_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The download, from a server of our own on the same machine: fetched once, kept, and checked."""
    write_fashion(tmp_path / "served")
    sums = {
        path.name: hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
        for path in (tmp_path / "served").iterdir()
    }
    monkeypatch.setattr(data, "_DEBIAN_FASHION", tmp_path / "absent")
    monkeypatch.setattr(data, "_FASHION_SOURCE", (tmp_path / "served").as_uri())
    monkeypatch.setattr(data, "_FASHION_SHA256", sums)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(data.fashion_mnist().train) == 20
    for path in (tmp_path / "served").iterdir():
        path.unlink()
    assert len(data.fashion_mnist().train) == 20  # from the cache


def test_a_wrong_checksum_or_no_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_fashion(tmp_path / "served")
    monkeypatch.setattr(data, "_DEBIAN_FASHION", tmp_path / "absent")
    monkeypatch.setattr(data, "_FASHION_SOURCE", (tmp_path / "served").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(pg.PrivacyError, match="SHA-256"):
        data.fashion_mnist()
    monkeypatch.setattr(data, "_FASHION_SOURCE", (tmp_path / "nothing").as_uri())
    with pytest.raises(pg.PrivacyError, match=r"give the folder.*apt-get install dataset-fashion-mnist.*online"):
        data.fashion_mnist()


@pytest.mark.parametrize(("channels", "size", "parameters"), [(3, 32, 411_466), (1, 28, 410_890)])
def test_cnn5_has_the_papers_size(channels: int, size: int, parameters: int):
    model = models.cnn5(in_channels=channels, num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model[:-1](torch.zeros(2, channels, size, size)).shape == (2, 10, 3, 3)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_mlp_and_activations():
    for activation in ("tanh", "relu", "leaky_relu"):
        options: dict[str, Any] = {"activation": activation}
        assert models.mlp(in_features=64, hidden=5, num_classes=3, **options)(torch.zeros(2, 8, 8)).shape == (2, 3)
    with pytest.raises(pg.PrivacyError, match="tanh"):
        models.mlp(in_features=1, hidden=1, num_classes=1, activation="sine")  # pyright: ignore[reportArgumentType]
