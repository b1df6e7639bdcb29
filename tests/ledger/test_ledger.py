"""The ledger: durable, whole, and with one writer."""

import copy
import errno
import fcntl
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import privgrad as pg
from conftest import forking, loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import Release
from privgrad.ledger import file as module

RELEASE = Release(1.0, 0.25)


def charge(ledger: pg.Ledger, *draws: str) -> None:
    for draw in draws:
        ledger.charge(RELEASE, draw=draw, limit=100)


def written(path: Path, *draws: str) -> bytes:
    """A ledger of one release a draw."""
    ledger = pg.Ledger(path)
    ledger.bind(make_plan().public_facts)
    charge(ledger, *draws)
    ledger.close()
    return path.read_bytes()


def resealed(*lines: bytes) -> bytes:
    """A ledger's bytes with checksums that fit, as someone who knows how they are made would write them."""
    head, out = "", b""
    for line in lines:
        body, seal, _ = line.rpartition(module._SEAL)
        sealed, head = module._sealed(head, body + b"}" if seal else line)
        out += sealed + b"\n"
    return out


def test_ledger_file_tells_each_release_and_its_epsilon(tmp_path: Path):
    plan, path = make_plan(), tmp_path / "ledger.jsonl"
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
    lines: list[Any] = []
    for count, batch in enumerate(plan.batches(make_data()), start=1):
        private_grad(batch)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == count + 1
        sigma_and_rate = {"noise_multiplier": 1.0, "sample_rate": 0.25, "scheme": "poisson"}
        assert lines[-1].pop("checksum") == private_grad.ledger.head
        planned = {"steps": 10} if count == 1 else {}
        assert lines[-1] == {"draw": batch.sampling.draw, **sigma_and_rate, **planned}
    assert private_grad.ledger.planned_steps == (10,)
    assert lines[0]["plan"]["max_grad_norm"] == 1.0
    assert lines[0]["plan"]["neighboring_relation"] == "add or remove one"
    again = pg.Ledger(path, read_only=True)
    assert again.planned_steps == (10,)
    assert again.epsilon(delta=1e-5) == private_grad.ledger.epsilon(delta=1e-5) == plan.epsilon(delta=1e-5)


def test_a_ledger_has_one_writer(tmp_path: Path):
    first = pg.Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(pg.PrivacyError, match="one writer"):
        pg.Ledger(tmp_path / "ledger.jsonl")
    first.close()
    pg.Ledger(tmp_path / "ledger.jsonl").close()


def test_who_only_looks_whether_a_ledger_is_in_use_is_no_writer(tmp_path: Path):
    """Someone looks all the time, and slowly; a training can begin between two looks, and does."""
    path, done, looks = tmp_path / "ledger.jsonl", threading.Event(), threading.Event()
    written(path, "a")

    def look() -> None:
        while not done.is_set():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                looks.set()
                time.sleep(0.01)
            time.sleep(0.003)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(10):
            looks.clear()
            looks.wait()
            pg.Ledger(path).close()
    finally:
        done.set()
        watcher.join()
    assert not module.is_in_use(path)


def test_a_writer_that_stays_is_told_of_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, slept = tmp_path / "ledger.jsonl", list[float]()
    first = pg.Ledger(path)
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(pg.PrivacyError, match="a running training has locked"):
        pg.Ledger(path)
    assert 0.1 <= sum(slept) < 1
    assert module.is_in_use(path)
    first.close()


@pytest.mark.parametrize(
    "other", [{"noise_multiplier": 2.0}, {"sample_rate": 0.24}, {"num_examples": 33}, {"max_grad_norm": 2.0}]
)
def test_a_ledger_of_other_numbers_is_refused(tmp_path: Path, other: dict[str, Any]):
    path = tmp_path / "ledger.jsonl"
    ledger = pg.Ledger(path)
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=ledger)
    ledger.close()
    with pytest.raises(pg.PrivacyError, match=next(iter(other))):
        pg.PrivateGradient(make_model(), loss_fn, make_plan(**other), ledger=path)
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), ledger=path).ledger.close()  # the refused one holds no lock


def in_two_threads(*works: Callable[[], object]) -> list[BaseException | None]:
    """Begin all at once; what each ended with."""
    together = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> BaseException | None:
        together.wait()
        try:
            work()
        except pg.PrivacyError as error:
            return error
        return None

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def test_threads_that_share_a_ledger_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One draw serves one of them, one plan binds it, and the file's lines are whole and in order."""
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.05)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    ledger = pg.Ledger(tmp_path / "ledger.jsonl")
    plans = [make_plan(), make_plan(max_grad_norm=2.0)]
    ended = in_two_threads(*(lambda plan=plan: ledger.bind(plan.public_facts) for plan in plans))
    assert sum(error is None for error in ended) == 1
    for draw in ("a", "b"):
        ended = in_two_threads(*[lambda draw=draw: charge(ledger, draw)] * 2)
        assert [type(error) for error in ended if error is not None] == [pg.SamplingError]
    assert in_two_threads(lambda: charge(ledger, "c"), lambda: charge(ledger, "d")) == [None, None]
    assert ledger.releases == pg.Ledger(tmp_path / "ledger.jsonl", read_only=True).releases == 4


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_ledger_has_one_holder(tmp_path: Path, in_memory: bool):
    """A second one's releases, or budget, would be beside the record."""
    ledger = pg.Ledger(None if in_memory else tmp_path / "ledger.jsonl")
    ledger.bind(make_plan().public_facts)
    charge(ledger, "a")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(pg.PrivacyError, match="one holder"):
            duplicate(ledger)
    child = os.fork()
    if child == 0:
        try:
            charge(ledger, "b")
        except pg.PrivacyError:
            os._exit(ledger.releases)  # looking is free
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    charge(ledger, "b")


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "grown"])
def test_a_ledger_that_is_taken_from_its_writer_takes_no_charge(tmp_path: Path, how: str):
    path, kept = tmp_path / "ledger.jsonl", tmp_path / "kept"
    ledger = pg.Ledger(path)
    ledger.bind(make_plan().public_facts)
    charge(ledger, "a")
    whole = path.read_bytes()
    if how == "grown":
        path.write_bytes(whole + b"\n")
    else:
        path.rename(kept)
    if how == "replaced":
        path.write_bytes(whole)
    elif how == "removed":
        kept.unlink()
    with pytest.raises(pg.PrivacyError, match="left to its one writer"):
        charge(ledger, "b")
    assert ledger.releases == 1
    if how == "removed":
        return
    if how == "grown":
        path.write_bytes(whole)
    else:
        kept.replace(path)
    charge(ledger, "b")
    assert pg.Ledger(path, read_only=True).releases == 2


def test_a_ledger_of_a_relative_path_follows_no_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ledger = pg.Ledger("ledger.jsonl")
    ledger.bind(make_plan().public_facts)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    charge(ledger, "a")


def test_a_longer_run_on_an_old_ledger_composes(tmp_path: Path):
    path, data = tmp_path / "ledger.jsonl", make_data()
    for steps, start in ((3, 0), (5, 3)):
        plan = make_plan(steps=steps)
        ledger = pg.Ledger(path)
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=ledger)
        for batch in plan.batches(data, start=start):
            private_grad(batch)
        ledger.close()
    assert pg.Ledger(path, read_only=True).epsilon(delta=1e-5) == make_plan(steps=5).epsilon(delta=1e-5)


def test_a_full_disk_stops_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, plan = tmp_path / "ledger.jsonl", make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)
    batches = plan.batches(make_data())
    private_grad(next(batches))
    before, real = path.read_bytes(), os.write

    def short_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 10:
            return real(descriptor, data[: len(data) - 5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", short_then_full)
    with pytest.raises(pg.PrivacyError, match="No space left"):
        private_grad(next(batches))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert private_grad.ledger.releases == 1
    private_grad(next(batches))
    assert pg.Ledger(path, read_only=True).releases == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_really_full_device_refuses_the_charge(tmp_path: Path):
    ledger = pg.Ledger(tmp_path / "ledger.jsonl")
    file = ledger._file
    assert file is not None
    file.close()
    file.path, file._descriptor = Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(pg.PrivacyError, match="No space left"):
        ledger.bind({"sample_rate": 1.0})
    with pytest.raises(pg.PrivacyError, match="closed"):
        ledger.bind({"sample_rate": 1.0})


def test_a_ledger_cut_at_any_byte_keeps_its_whole_lines_and_takes_more(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, "a", "b", "c")
    for length in range(1, len(whole) + 1):
        path.write_bytes(whole[:length])
        # A line that lacks nothing but its end is charged: an editor that drops the last newline drops no charge.
        releases = max(0, (whole[:length] + b"\n").count(b'"}\n') - 1)
        if length < whole.index(b"\n"):
            with pytest.raises(pg.PrivacyError, match="line 1"):
                pg.Ledger(path, read_only=True)
        else:
            assert pg.Ledger(path, read_only=True).releases == releases
        if length % 25 and length < len(whole) - 2:
            continue
        ledger = pg.Ledger(path)
        ledger.bind(make_plan().public_facts)
        charge(ledger, "d")
        ledger.close()
        assert pg.Ledger(path, read_only=True).releases == releases + 1


@pytest.mark.parametrize("how", ["changed", "removed", "doubled", "broken"])
def test_no_byte_of_a_ledger_changes_unseen(tmp_path: Path, how: str):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, "a", "b", "c")
    for place, byte in enumerate(whole):
        kept, rest = whole[:place], whole[place + 1 :]
        middle = {"changed": [byte ^ 1], "removed": [], "doubled": [byte, byte], "broken": [10, byte]}[how]
        path.write_bytes(kept + bytes(middle) + rest)
        if how == "removed" and not rest:
            assert pg.Ledger(path, read_only=True).releases == 3
            continue
        with pytest.raises(pg.PrivacyError, match=r"line \d of .*ledger\.jsonl.*restore|version (3|22)"):
            pg.Ledger(path, read_only=True)


def reordered(lines: list[bytes], how: str) -> list[bytes]:
    first, a, b, c = lines
    return {
        "removed": [first, a, c],
        "first removed": [a, b, c],
        "moved": [first, b, a, c],
        "repeated": [first, a, b, b, c],
        "of another ledger": [first, a, b, c.replace(b'"c"', b'"d"')],
        "after another plan": [first.replace(b"32", b"33"), a, b, c],
    }[how]


HOWS = ["removed", "first removed", "moved", "repeated", "of another ledger", "after another plan"]


@pytest.mark.parametrize("how", HOWS)
def test_lines_removed_moved_repeated_or_exchanged_are_refused(tmp_path: Path, how: str):
    path = tmp_path / "ledger.jsonl"
    lines = reordered(written(path, "a", "b", "c").splitlines(keepends=True), how)
    path.write_bytes(b"".join(lines))
    for read_only in (True, False):
        with pytest.raises(pg.PrivacyError, match=r"line .*restore the file from a copy"):
            pg.Ledger(path, read_only=read_only)
    assert path.read_bytes() == b"".join(lines)


def test_checksums_that_do_not_chain_would_let_lines_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The wrong twin of the chain: each line sealed by itself."""
    sealed = module._sealed
    monkeypatch.setattr(module, "_sealed", lambda _, body: sealed("", body))
    path = tmp_path / "ledger.jsonl"
    whole = written(path, "a", "b", "c").splitlines(keepends=True)
    for how in ("removed", "moved"):
        path.write_bytes(b"".join(reordered(whole, how)))
        assert pg.Ledger(path, read_only=True).releases < 4


def test_what_the_checksum_cannot_tell(tmp_path: Path):
    """Cut back at a line's end, and sealed anew by someone who knows how: both open. The heads tell them apart."""
    path = tmp_path / "ledger.jsonl"
    lines = written(path, "a", "b", "c").splitlines(keepends=True)
    head = pg.Ledger(path, read_only=True).head
    assert head == json.loads(lines[-1])["checksum"]
    path.write_bytes(b"".join(lines[:-1]))
    shorter = pg.Ledger(path, read_only=True)
    assert shorter.releases == 2
    assert not shorter.went_through(head)
    assert shorter.went_through(shorter.head)
    path.write_bytes(resealed(lines[0], *lines[2:]))
    forged = pg.Ledger(path, read_only=True)
    assert forged.releases == 2
    assert not forged.went_through(head)


@pytest.mark.parametrize(("held", "given"), [(5, None), (5, 6), (5, 5), (None, 5)])
def test_a_resume_declares_the_same_rows_of_a_person(tmp_path: Path, held: int | None, given: int | None):
    plan = make_plan(privacy_unit="user")

    def begun(max_rows: int | None) -> None:
        ledger = pg.Ledger(tmp_path / "ledger.jsonl")
        perturb = pg.perturb.SampleGradient("user", max_rows)
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, perturb=perturb, ledger=ledger)
        try:
            private_grad(next(iter(plan.batches(make_data(), start=ledger.next_step))))
        finally:
            ledger.close()

    begun(held)
    if given == held or held is None:  # older files lack it
        begun(given)
        return
    with pytest.raises(pg.PrivacyError, match=rf"max_rows to be as recorded \(5\), got {given}"):
        begun(given)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b'{"ledger_version": 3}',
        b'{"ledger_version": 3, "plan": 5}',
        b'{"ledger_version": 3, "plan": {"noise_multiplier": 1.0}}',
        *(
            b'{"ledger_version": 3, "plan": {"noise_multiplier": %s, "sample_rate": %s, "sampling": "%s", '
            b'"num_examples": %s}}' % values
            for values in [
                (b"-1", b"0.5", b"poisson", b"5"),
                (b"1" + b"0" * 400, b"0.5", b"poisson", b"5"),
                (b"NaN", b"0.5", b"poisson", b"5"),
                (b"1", b"[]", b"poisson", b"5"),
                (b"1", b"0.5", b"all", b"5"),
                (b"1", b"0.5", b"poisson", b"0"),
            ]
        ),
        b'{"ledger_version": 3, "plan": ' + b"[" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_first_line_that_is_no_plan_is_refused_whatever_its_checksum(tmp_path: Path, line: bytes):
    path = tmp_path / "ledger.jsonl"
    for content in (line, line + b"\n", resealed(line)):
        path.write_bytes(content)
        with pytest.raises(pg.PrivacyError, match="line 1"):
            pg.Ledger(path, read_only=True)


def test_a_draw_that_is_no_text_is_refused_whatever_its_checksum(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    first, line = written(path, "a").splitlines()
    path.write_bytes(resealed(first, line.replace(b'"draw": "a"', b'"draw": 1.5')))
    with pytest.raises(pg.PrivacyError, match="line 2"):
        pg.Ledger(path, read_only=True)


@pytest.mark.parametrize("changed", [b'"noise_multiplier": 9.0', b'"noise_multiplier": []', b'"noise": 1.0'])
def test_a_release_of_other_numbers_is_refused_whatever_its_checksum(tmp_path: Path, changed: bytes):
    path = tmp_path / "ledger.jsonl"
    first, line = written(path, "a").splitlines()
    path.write_bytes(resealed(first, line.replace(b'"noise_multiplier": 1.0', changed)))
    with pytest.raises(pg.PrivacyError, match="line 2"):
        pg.Ledger(path, read_only=True)


def test_a_ledger_of_version_1_is_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"ledger_version": 1, "plan": {}}\n')
    with pytest.raises(pg.PrivacyError, match=r"version 3, got version 1; .*both epsilons and both deltas\."):
        pg.Ledger(path)
    assert path.read_text() == '{"ledger_version": 1, "plan": {}}\n'


@pytest.mark.parametrize("content", [b"my notes", b"a\nb", b"{", b'{"draw": "x', bytes(100)])
def test_a_file_that_is_no_ledger_is_left_as_it_was(tmp_path: Path, content: bytes):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    if content == b"{":  # the first byte of a ledger
        pg.Ledger(path).close()
        return
    with pytest.raises(pg.PrivacyError, match="line 1"):
        pg.Ledger(path)
    assert path.read_bytes() == content


def test_what_cannot_be_opened_ends_in_one_error(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file/ledger.jsonl", tmp_path / ("x" * 300)):
        for read_only in (True, False):
            with pytest.raises(pg.PrivacyError, match=r"path to be a .*give a ledger's path"):
                pg.Ledger(path, read_only=read_only)
    with pytest.raises(pg.PrivacyError, match="readable"):
        pg.Ledger(tmp_path / "absent", read_only=True)
    with pytest.raises(pg.PrivacyError, match="which is empty"):
        pg.Ledger(tmp_path / "file", read_only=True)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for read_only in (True, False):
        with pytest.raises(pg.PrivacyError, match="not a regular file"):
            pg.Ledger(tmp_path / "pipe", read_only=read_only)


def test_what_json_does_not_know_is_refused_with_the_remedy(tmp_path: Path):
    plan = make_plan(sample_rate=Fraction(1, 4))
    with pytest.raises(pg.PrivacyError, match=r"float\("):
        pg.PrivateGradient(make_model(), loss_fn, plan, ledger=tmp_path / "ledger.jsonl")


def test_refusals_say_how_to_go_on(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    written(path, "a")
    ledger = pg.Ledger(path)
    with pytest.raises(pg.PrivacyError, match=r"PrivacyPlan\(noise_multiplier=1\.0, steps="):
        ledger.bind(make_plan(noise_multiplier=2.0).public_facts)
    with pytest.raises(pg.BudgetExceededError, match=r"start=private_grad\.ledger\.next_step"):
        ledger.charge(RELEASE, draw="b", limit=1)
    ledger.close()
    path.write_bytes(path.read_bytes() + b"x\n")
    with pytest.raises(pg.PrivacyError, match=r"at least 1 releases .* the epsilon and the delta of all steps"):
        pg.Ledger(path)


def test_a_ledger_tells_that_its_end_was_cut_off(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, "a")
    assert not pg.Ledger(path, read_only=True).was_cut_off
    path.write_bytes(whole[:-5])
    assert pg.Ledger(path, read_only=True).was_cut_off


def test_a_charge_is_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "ledger.jsonl"
    written(path)
    ledger, done = pg.Ledger(path), list[str]()
    for name in ("write", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (done.append(name), real(*args))[1])
    charge(ledger, "a")
    assert done == ["write", "fsync"]


@pytest.mark.parametrize("problem", [None, errno.ENOTSUP, errno.EIO])
def test_where_fsync_stops_at_the_drives_cache_the_cache_is_emptied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int | None
):
    """On macOS. A file system that has no such operation is no reason to refuse; a failed one is."""
    path, asked = tmp_path / "ledger.jsonl", list[int]()
    written(path, "a")
    ledger = pg.Ledger(path)

    def empty(descriptor: int, operation: int) -> None:
        asked.append(operation)
        if problem is not None:
            raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", empty)
    if problem == errno.EIO:
        with pytest.raises(pg.PrivacyError, match="one more line"):
            charge(ledger, "b")
    else:
        charge(ledger, "b")
    assert asked == [51]
    assert ledger.releases == pg.Ledger(path, read_only=True).releases == 1 + (problem != errno.EIO)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_an_interrupted_charge_was_none_and_the_next_one_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    path = tmp_path / "ledger.jsonl"
    written(path, "a")
    ledger, real = pg.Ledger(path), os.write

    def interrupted(descriptor: int, *data: bytes) -> None:
        for part in data:
            real(descriptor, part[: len(part) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            charge(ledger, "b")
    assert ledger.releases == pg.Ledger(path, read_only=True).releases == 1
    charge(ledger, "b")
    assert pg.Ledger(path, read_only=True).releases == 2


def test_a_line_that_could_not_be_read_again_is_not_written(tmp_path: Path):
    ledger = pg.Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(pg.PrivacyError, match="at most"):
        ledger.bind(make_plan().public_facts | {"side_information": "x" * 2**24})
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


def hold(path: Path, told: Connection) -> None:
    """In a child: open the ledger, tell how that went, and wait to be killed."""
    try:
        ledger = pg.Ledger(path)
    except pg.PrivacyError as error:
        told.send(str(error))
        return
    told.send(ledger.releases)
    signal.pause()


def test_two_processes_do_not_write_one_ledger(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    written(path, "a")
    context = forking()
    ours = pg.Ledger(path)
    here, there = context.Pipe()
    second = context.Process(target=hold, args=(path, there))
    second.start()
    assert here.poll(60)
    assert "one writer" in here.recv()
    second.join()
    ours.close()
    third = context.Process(target=hold, args=(path, there))
    third.start()
    assert here.poll(60)
    assert here.recv() == 1
    with pytest.raises(pg.PrivacyError, match="one writer"):
        pg.Ledger(path)
    assert pg.Ledger(path, read_only=True).releases == 1
    assert third.pid is not None
    os.kill(third.pid, signal.SIGKILL)
    third.join()
    pg.Ledger(path).close()  # a lock dies with its holder


def test_a_refused_training_leaves_its_ledger_free(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(pg.PrivacyError, match="radius"):
        pg.PrivateGradient(
            make_model(), loss_fn, make_plan(), perturb=pg.perturb.BAM(lambda step: 0.1 - step), ledger=path
        )
    pg.PrivateGradient(make_model(), loss_fn, make_plan(), perturb=pg.perturb.BAM(0.1), ledger=path).ledger.close()
