"""Image loaders on the real files and on small ones of the same format."""

import gzip
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_fetching import checksums_of, redirect

import privgrad as pg
from privgrad import data
from privgrad_lab.build import to_reconstruct, with_public
from privgrad_lab.data import images
from privgrad_lab.data.fetching import SOURCES

DEBIAN_FASHION = Path(SOURCES["fashion-mnist"].folder)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_fashion(folder: Path, count: int = 20) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))


def test_digits_are_real_and_split():
    pytest.importorskip("sklearn")
    loaded = data.digits(validation=240)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [1197, 240, 360]
    inputs, labels = loaded.train.tensors
    assert inputs.shape == (1197, 1, 8, 8)
    assert labels.bincount().min() > 90
    assert torch.equal(inputs, data.digits(validation=240).train.tensors[0])


@pytest.mark.skipif(not DEBIAN_FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_from_the_debian_package():
    loaded = data.fashion_mnist(validation=5000)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [55_000, 5000, 10_000]
    inputs, labels = loaded.test.tensors
    assert inputs.shape == (10_000, 1, 28, 28)
    assert labels.bincount().tolist() == [1000] * 10
    assert abs(loaded.train.tensors[0].mean()) < 0.01
    assert abs(loaded.train.tensors[0].std() - 1) < 0.01
    found = checksums_of(DEBIAN_FASHION, "unpacked")
    for part in SOURCES["fashion-mnist"].ways[0]:
        assert found[part.name.rpartition("/")[2]] == part.checksum


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
        "garbled": content[:20] + bytes(200) + content[220:],
    }[how]


@pytest.mark.parametrize("how", ["truncated", "not gzip", "not idx", "too short", "garbled"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, how: str):
    write_fashion(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damaged(path.read_bytes(), how))
    with pytest.raises(pg.PrivacyError, match="t10k-images"):
        data.fashion_mnist(tmp_path)
    path.unlink()
    with pytest.raises(pg.PrivacyError, match=r"data folder to contain t10k-images-idx3-ubyte\.gz, got"):
        data.fashion_mnist(tmp_path)


def test_fashion_mnist_from_its_public_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The download, from a server of our own on the same machine: fetched once, kept, and checked."""
    write_fashion(tmp_path / "served")
    sums = checksums_of(tmp_path / "served", "unpacked")
    redirect(monkeypatch, "fashion-mnist", (tmp_path / "served").as_uri(), sums)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(data.fashion_mnist().train) == 20
    for path in (tmp_path / "served").iterdir():
        path.unlink()
    assert len(data.fashion_mnist().train) == 20  # from the cache


def test_a_wrong_checksum_or_no_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_fashion(tmp_path / "served")
    redirect(monkeypatch, "fashion-mnist", (tmp_path / "served").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(pg.PrivacyError, match="SHA-256"):
        data.fashion_mnist()
    redirect(monkeypatch, "fashion-mnist", (tmp_path / "nothing").as_uri())
    with pytest.raises(pg.PrivacyError, match=r"fashion_mnist: .*reachable, got .*nothing.*; go online, or give"):
        data.fashion_mnist()


def test_mnist_is_standardized_from_a_path_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(pg.PrivacyError, match=r"mnist: .*run `privgrad data fetch mnist`"):
        data.mnist()
    (tmp_path / "cache" / "privgrad").mkdir(parents=True)
    write_fashion(tmp_path / "cache" / "privgrad" / "mnist")
    loaded = data.mnist(validation=5)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [15, 5, 20]
    raw, labels = images._read_part(tmp_path / "cache" / "privgrad" / "mnist", "t10k")
    assert torch.equal(loaded.test.tensors[1], labels)
    torch.testing.assert_close(loaded.test.tensors[0][:, 0] * 0.3081 + 0.1307, raw / 255)
    given = data.mnist(tmp_path / "cache" / "privgrad" / "mnist")
    assert torch.equal(given.test.tensors[0], loaded.test.tensors[0])


def test_images_without_their_labels_are_refused(tmp_path: Path):
    write_fashion(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.zeros(3, dtype=np.uint8))
    with pytest.raises(pg.PrivacyError, match=r"got \(20, 28, 28\) and \(3,\)"):
        data.mnist(tmp_path)


def require_barcodes(loaded: data.DataSet, sizes: list[int]) -> None:
    """Classes of these sizes, each with one barcode and different images; plain ones first, without a barcode."""
    inputs, labels = loaded.train.tensors
    assert labels.bincount().tolist() == sizes
    assert loaded.num_classes == len(sizes)
    assert loaded.input_shape == (1, 28, 28)
    assert loaded.frequency_edges == ()
    assert loaded.train is loaded.test
    assert len(loaded.validation) == 0
    torch.testing.assert_close(inputs.mean(0), torch.zeros(1, 28, 28), atol=1e-4, rtol=0)
    codes = inputs[:, 0, 0, :10]
    assert all(len(codes[labels == label].unique(dim=0)) == 1 for label in range(loaded.num_classes))
    assert torch.equal(codes[labels == 0][0], codes.amin(0))


def test_barcodes_of_fashion_mnist():
    if not DEBIAN_FASHION.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    loaded = data.barcode()
    assert len(loaded.train) == 23_770
    require_barcodes(loaded, 10 * [1127] + 20 * [500] + 200 * [10] + 100 * [5])


def test_barcodes_of_mnist(tmp_path: Path):
    write_fashion(tmp_path, count=300)
    loaded = data.barcode(tmp_path, scale=100, seed=1)
    require_barcodes(loaded, [11, 5, 1, 1, 1])
    inputs, labels = loaded.train.tensors
    assert len(inputs[labels == 0, 0, 1:].unique(dim=0)) == 11
    assert torch.equal(inputs, data.barcode(tmp_path, scale=100, seed=1).train.tensors[0])
    assert not torch.equal(inputs, data.barcode(tmp_path, scale=100, seed=2).train.tensors[0])


def test_barcodes_that_cannot_be_made_are_refused(tmp_path: Path):
    write_fashion(tmp_path, count=300)
    with pytest.raises(pg.PrivacyError, match="images of digit 0 to be at least 112, got 30"):
        data.barcode(tmp_path, scale=10)
    with pytest.raises(pg.PrivacyError, match="validation"):
        data.barcode(tmp_path, scale=100, validation=5)
    with pytest.raises(pg.PrivacyError, match="scale"):
        data.barcode(tmp_path, scale=0)
    with pytest.raises(pg.PrivacyError, match=r"barcode: .*idx"):
        data.barcode(tmp_path / "nothing")


def python2_pickle(rows: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """A batch as the published files have it: Python 2's protocol 2, whose strings are of bytes."""
    text = lambda word: b"U" + bytes([len(word)]) + word  # noqa: E731
    integer = lambda number: b"J" + struct.pack("<i", number)  # noqa: E731
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"tR"
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + 2 * integer(-1) + b"K\x00tb"
    )
    shape = integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<i", rows.size) + rows.tobytes()
    array += b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
    return b"\x80\x02}(" + text(b"data") + array + text(key) + b"](" + b"".join(map(integer, labels)) + b"eu."


def write_cifar(folder: Path, count: int = 4) -> np.ndarray:
    """The python version with `count` images a file; returns the test images."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((0, 3072), dtype=np.uint8)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        (folder / name).write_bytes(python2_pickle(pixels, [9, 8, 7, 6][:count]))
    return pixels


def pack(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=folder.name)


def test_cifar10_from_its_folder_or_archive(tmp_path: Path):
    raw = write_cifar(tmp_path / "cifar-10-batches-py")
    pack(tmp_path / "cifar-10-batches-py", tmp_path / "archive.tar.gz")
    for path in (tmp_path, tmp_path / "cifar-10-batches-py", tmp_path / "archive.tar.gz"):
        loaded = data.cifar10(path, validation=3)
        assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [17, 3, 4]
        assert loaded.input_shape == (3, 32, 32)
        assert loaded.num_classes == 10
        inputs, labels = loaded.test.tensors
        assert labels.tolist() == [9, 8, 7, 6]
        pixels = torch.from_numpy(raw).view(4, 3, 32, 32) / 255
        torch.testing.assert_close(inputs[:, 2] * 0.225 + 0.406, pixels[:, 2])
        torch.testing.assert_close(inputs[:, 0] * 0.229 + 0.485, pixels[:, 0])


def write_cifar100(folder: Path) -> np.ndarray:
    """The python version with 6 training and 4 test images; returns the test images."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
    (folder / "train").write_bytes(python2_pickle(pixels, [99, 1, 2, 3, 4, 5], b"fine_labels"))
    (folder / "test").write_bytes(python2_pickle(pixels[:4], [9, 8, 7, 0], b"fine_labels"))
    return pixels[:4]


def test_cifar100_has_its_fine_classes(tmp_path: Path):
    raw = write_cifar100(tmp_path / "cifar-100-python")
    pack(tmp_path / "cifar-100-python", tmp_path / "cifar-100-python.tar.gz")
    for path in (tmp_path, tmp_path / "cifar-100-python", tmp_path / "cifar-100-python.tar.gz"):
        loaded = data.cifar100(path, validation=2)
        assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [4, 2, 4]
        assert (loaded.num_classes, loaded.input_shape) == (100, (3, 32, 32))
        inputs, labels = loaded.test.tensors
        assert labels.tolist() == [9, 8, 7, 0]
        pixels = torch.from_numpy(raw).view(4, 3, 32, 32) / 255
        torch.testing.assert_close(inputs[:, 1] * 0.224 + 0.456, pixels[:, 1])
    (tmp_path / "cifar-100-python" / "test").write_bytes(python2_pickle(raw, [9, 8, 7, 100], b"fine_labels"))
    with pytest.raises(pg.PrivacyError, match=r"cifar100: .*labels from 0|labels from 7 to 100, not from 0 to 99"):
        data.cifar100(tmp_path / "cifar-100-python")
    mark = tmp_path / "ran"
    hostile = pickle.dumps({b"data": Payload(mark), b"fine_labels": []})
    (tmp_path / "cifar-100-python" / "test").write_bytes(hostile)
    with pytest.raises(pg.PrivacyError, match=r"cifar100: .*which is no array"):
        data.cifar100(tmp_path / "cifar-100-python")
    assert not mark.exists()
    with pytest.raises(pg.PrivacyError, match=r"cifar100: .*to hold cifar-100-python or cifar-100-python\.tar\.gz"):
        data.cifar100(tmp_path / "nothing")


def write_imagenet32(folder: Path, count: int = 3) -> np.ndarray:
    """The npz version with `count` images a file, of classes from 1 on; returns the test images."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((0, 3072), dtype=np.uint8)
    for name in (*(f"train_data_batch_{number}" for number in range(1, 11)), "val_data"):
        pixels = np.random.default_rng(len(name)).integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = np.array([1, 1000, 7][:count])
        np.savez(folder / f"{name}.npz", data=pixels, labels=labels, mean=np.zeros(3072))
    return pixels


def test_imagenet32_from_its_npz_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in (None, tmp_path):
        with pytest.raises(pg.PrivacyError, match=r"train_data_batch_1\.npz.*log in at https://image-net\.org"):
            data.imagenet32(path)
    raw = write_imagenet32(tmp_path / "npz")
    loaded = data.imagenet32(tmp_path / "npz", validation=4)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [26, 4, 3]
    assert (loaded.num_classes, loaded.input_shape) == (1000, (3, 32, 32))
    inputs, labels = loaded.test.tensors
    assert labels.tolist() == [0, 999, 6]
    pixels = torch.from_numpy(raw).view(3, 3, 32, 32) / 255
    torch.testing.assert_close(inputs[:, 0] * 0.229 + 0.485, pixels[:, 0])
    last, mark = tmp_path / "npz" / "val_data.npz", tmp_path / "ran"
    hostile = np.array([Payload(mark)], dtype=object)
    cases = {
        "labels from 1 to 1000": {"data": raw, "labels": np.array([2, 3, 1001])},
        r"labels of shape \(2,\) for 3": {"data": raw, "labels": np.array([2, 3])},
        "an array of int64": {"data": raw.astype(np.int64), "labels": np.array([1, 2, 3])},
        "KeyError": {"labels": np.array([1, 2, 3])},
        "ValueError.*Object arrays": {"data": hostile, "labels": np.array([1])},
    }
    for message, content in cases.items():
        np.savez(last, allow_pickle=True, **content)
        with pytest.raises(pg.PrivacyError, match=f"imagenet32: .*{message}"):
            data.imagenet32(tmp_path / "npz")
    assert not mark.exists()
    last.write_bytes(b"hello")
    with pytest.raises(pg.PrivacyError, match=r"val_data\.npz to be an npz file"):
        data.imagenet32(tmp_path / "npz")


def test_cifar10_from_its_public_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_cifar(tmp_path / "cifar-10-batches-py")
    archive = tmp_path / "served" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    pack(tmp_path / "cifar-10-batches-py", archive)
    redirect(monkeypatch, "cifar-10", archive.parent.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(pg.PrivacyError, match="SHA256"):
        data.cifar10()
    redirect(monkeypatch, "cifar-10", archive.parent.as_uri(), checksums_of(archive.parent, "md5"))
    assert len(data.cifar10().train) == 20
    archive.unlink()
    assert len(data.cifar10().train) == 20  # from the cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(
        pg.PrivacyError, match=r"cifar10: .*served.*; go online, or give the loader a folder with cifar-10-\*"
    ):
        data.cifar10()
    with pytest.raises(pg.PrivacyError, match=r"path to hold .*, got .*nothing; give the folder"):
        data.cifar10(tmp_path / "nothing")


class Payload:
    """What a file from elsewhere could hold: unpickling it would call a function."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_damaged_or_hostile_batches_are_refused(tmp_path: Path):
    write_cifar(tmp_path)
    whole, mark = (tmp_path / "data_batch_3").read_bytes(), tmp_path / "ran"
    hostile = pickle.dumps({b"data": Payload(mark), b"labels": []})
    pickle.loads(hostile)
    assert mark.exists()  # the wrong twin
    mark.unlink()
    cases = {
        "UnpicklingError.*which is no array": hostile,
        "no array": pickle.dumps({b"data": np.float64(1.0), b"labels": []}),
        "data_batch_3.*pickled batch": whole[:-100],
        "KeyError": pickle.dumps({b"labels": []}),
        "an array of b'u2'": whole.replace(b"U\x02u1", b"U\x02u2"),
        r"labels of shape \(3,\) for 4": python2_pickle(np.zeros((4, 3072), dtype=np.uint8), [1, 2, 3]),
        "ValueError|RuntimeError": python2_pickle(np.zeros((4, 3000), dtype=np.uint8), [1, 2, 3, 4]),
    }
    for message, content in cases.items():
        (tmp_path / "data_batch_3").write_bytes(content)
        with pytest.raises(pg.PrivacyError, match=message):
            data.cifar10(tmp_path)
    assert not mark.exists()
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(pg.PrivacyError, match=r"data_batch_3.*the file is missing"):
        data.cifar10(tmp_path)
    (tmp_path / "archive.tar.gz").write_bytes(b"hello")
    with pytest.raises(pg.PrivacyError, match="archive"):
        data.cifar10(tmp_path / "archive.tar.gz")


def test_pixels_may_stay_and_be_their_own_labels():
    plain = data.digits(standardize=False, validation=100)
    pixels = plain.train.tensors[0]
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    torch.testing.assert_close((pixels - 0.3) / 0.37, data.digits(validation=100).train.tensors[0])
    own = to_reconstruct(with_public(plain, 7))
    assert own.score is None
    assert own.public is not None
    for part in (own.train, own.validation, own.test, own.public):
        assert part.tensors[0] is part.tensors[1]
