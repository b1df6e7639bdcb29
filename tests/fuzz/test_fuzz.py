"""What reads files from elsewhere, on files changed at random: a few seconds of `python -m tests.fuzz`."""

import gzip
import io
import pickle
import random
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from test_data_images import python2_pickle, write_cifar, write_fashion
from test_data_sparse import write_imdb
from test_data_text import write_lists

import privgrad as pg
from privgrad import data
from privgrad_lab.data import sentiment
from privgrad_lab.load_spec import load_spec
from tests.fuzz.__main__ import is_forbidden
from tests.fuzz.changes import changed
from tests.fuzz.readers import READERS, Reader, ReaderError, Target


@pytest.mark.usefixtures("by_rdp")
@pytest.mark.parametrize(
    ("name", "executions"), [("spec", 60), ("ledger", 120), ("budget", 200), ("checkpoint", 40), ("data", 60)]
)
def test_changed_files_are_read_or_refused_and_nothing_else(tmp_path: Path, name: str, executions: int):
    targets = [Target(reader, tmp_path / str(index)) for index, reader in enumerate(READERS[name])]
    refused = 0
    for number in range(executions):
        target = targets[number % len(targets)]
        target.change(changed, random.Random(f"{name} {number}"))
        refused += not target.read()
        target.restore()
    assert refused > executions // 4


def test_only_the_process_itself_may_be_opened_as_a_library():
    assert is_forbidden("ctypes.dlopen", ("libm.so.6",))
    assert is_forbidden("os.system", (b"true",))
    assert not is_forbidden("ctypes.dlopen", (None,))
    assert not is_forbidden("open", ("file", "r", 0))


def test_the_fuzzer_sees_what_must_not_happen(tmp_path: Path):
    """Wrong twins: a reader that unpickles, one that lets an error through, one whose memory runs out."""

    def unpickle(folder: Path) -> None:
        pickle.loads((folder / "file").read_bytes())

    def crash(folder: Path) -> None:
        (folder / "file").read_bytes().decode("ascii")

    def fill(folder: Path) -> None:
        try:
            if (folder / "file").read_bytes() != b"file":
                raise MemoryError
        except MemoryError as error:
            raise pg.PrivacyError("refused") from error

    for index, (read, content, message) in enumerate(
        [(unpickle, None, "has run code"), (crash, b"\xff", "UnicodeDecodeError"), (fill, b"", "out of memory")]
    ):
        folder = tmp_path / str(index)
        valid = pickle.dumps(1) if read is unpickle else b"file"
        target = Target(Reader(lambda f, valid=valid: (f / "file").write_bytes(valid), read), folder)
        harm = b"cposix\nsystem\n(V" + f"touch {folder}/harm".encode() + b"\ntR."
        (folder / "file").write_bytes(harm if content is None else content)
        with pytest.raises(ReaderError, match=message):
            target.read()


def test_files_that_unpack_to_far_more_than_they_say_are_not_unpacked(tmp_path: Path):
    write_fashion(tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    header = struct.pack(">II", 0x801, 20)
    path.write_bytes(gzip.compress(header) + gzip.compress(bytes(1 << 20)) * 50_000)  # 50 GiB
    with pytest.raises(pg.PrivacyError, match=r"got ValueError: cannot reshape array of size 21 into shape"):
        data.fashion_mnist(tmp_path)
    path.write_bytes(gzip.compress(struct.pack(">I4I", 0x804, *[1 << 16] * 4)))  # 0 modulo 2**64
    with pytest.raises(pg.PrivacyError, match="more than"):
        data.fashion_mnist(tmp_path)


def test_pickles_that_ask_for_more_room_than_they_fill_are_refused(tmp_path: Path):
    write_cifar(tmp_path)
    for bomb in (
        b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b".",  # a memo of 2**31 places
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",  # bytes that are not there
    ):
        (tmp_path / "data_batch_3").write_bytes(bomb)
        with pytest.raises(pg.PrivacyError, match="data_batch_3") as refused:
            data.cifar10(tmp_path)
        assert not isinstance(refused.value.__cause__, MemoryError)


def test_archives_that_point_back_into_themselves_end(tmp_path: Path):
    """An entry of negative size, as base-256 numbers can say, would be read again and again."""
    member = tarfile.TarInfo("test_batch")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + struct.pack(">h", -1024)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "cifar.tar.gz").write_bytes(gzip.compress(bytes(header) * 3 + bytes(1024)))
    with pytest.raises(pg.PrivacyError, match="archive of CIFAR-10"):
        data.cifar10(tmp_path / "cifar.tar.gz")


def test_images_of_another_shape_and_labels_out_of_range_are_refused(tmp_path: Path):
    write_fashion(tmp_path / "fashion")
    for shape, size in (((20, 28, 27), 20 * 28 * 27), ((), 1), ((20,), 20)):
        header = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape)
        (tmp_path / "fashion/train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(size)))
        with pytest.raises(pg.PrivacyError, match="28, 28"):
            data.fashion_mnist(tmp_path / "fashion")
    write_cifar(tmp_path / "cifar")
    (tmp_path / "cifar/test_batch").write_bytes(python2_pickle(np.zeros((2, 3072), dtype=np.uint8), [1, 10]))
    with pytest.raises(pg.PrivacyError, match=r"labels from .* not from 0 to 9"):
        data.cifar10(tmp_path / "cifar")


def test_archives_without_one_of_the_parts_are_refused(tmp_path: Path):
    write_imdb(tmp_path)
    path, kept = tmp_path / "aclImdb_v1.tar.gz", io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=kept, mode="w:gz") as new:
        for member in old:
            if "test/" not in member.name:
                new.addfile(member, old.extractfile(member))
    path.write_bytes(kept.getvalue())
    with pytest.raises(pg.PrivacyError, match="IMDB's archive, got ValueError: no reviews of "):
        data.imdb(tmp_path)


def test_long_runs_of_one_character_take_no_quadratic_time(tmp_path: Path):
    """They would take hours: the test ends by its timeout."""
    write_lists(tmp_path)
    (packages,) = tmp_path.glob("*Packages")
    packages.write_text(packages.read_text().replace("Tag: role", "Tag: " + "a" * 1_000_000 + " role", 1))
    data.debian_tags(tmp_path)
    assert sentiment._words("'" * 1_000_000 + "don't" + "'" * 1_000_000) == ["'" * 1_000_000 + "don't"]


@pytest.mark.parametrize(
    "content", [b"\xff", b"a = " + b"[" * 100_000, b"a = " + b"1" * 5000, b"title = 1\n[data]\nname = 'x'"]
)
def test_specifications_that_are_no_toml_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "spec.toml").write_bytes(content)
    with pytest.raises(pg.PrivacyError, match="load_spec"):
        load_spec(tmp_path / "spec.toml")


def test_a_number_too_large_for_floats_is_refused_as_an_option(tmp_path: Path):
    text = Path(__file__).parents[2].joinpath("examples/digits.toml").read_text()
    head, _, method = text.partition("[[methods]]")
    assert method
    huge = "1" + "0" * 400
    table = f'[[methods]]\nname = "huge"\noptimizer = {{ use = "AdamBC", lr = 0.1, debias_floor = {huge} }}\n'
    (tmp_path / "spec.toml").write_text(f"{head}{table}[[methods]]{method}")
    with pytest.raises(pg.PrivacyError, match=r"methods\.huge\.optimizer"):
        load_spec(tmp_path / "spec.toml")


def test_arrays_are_refused_where_they_are_no_bytes(tmp_path: Path):
    write_cifar(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}))
    with pytest.raises(pg.PrivacyError, match="test_batch"):
        data.cifar10(tmp_path)
