"""Counts of a step: what is counted, that they repeat, and that small models stay below their bars."""

import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import methods
from benchmarks.counted import COUNTED, Counted
from benchmarks.counting import Counts, as_counted, calls_of, operations_of
from benchmarks.counts import THRESHOLDS, bars_of, count, missed, rows_of
from pages import ROOT
from privgrad.noise import gaussian
from privgrad.processes import is_on_processor, on_lists

BARS = tomllib.loads(THRESHOLDS.read_text())["counts"]
(TORCH,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["torch"]
SMALL = ("softmax", "mlp", "dlrm", "bert_tiny")


def counted(step: Callable[[], object]) -> Counts:
    counts = Counts()
    operations_of(step, counts)
    return counts


X = torch.arange(12.0).view(3, 4)
MASK = X > 5


@pytest.mark.parametrize(
    ("step", "kernels", "reads"),
    [
        (lambda: X.view(4, 3).t()[1:], 0, 0),
        (lambda: X.mul(2).add_(1), 2, 0),
        (lambda: torch.empty(5), 0, 0),
        (lambda: float(X.sum()), 2, 1),
        (lambda: X.tolist(), 0, 1),
        (lambda: X.cpu(), 0, 1),
        (lambda: X[MASK], 1, 1),
        (lambda: X.clone().masked_fill_(MASK, 0.0), 2, 0),
        (lambda: X.nonzero(), 3, 1),
        (lambda: on_lists._foreach_add([X] * 80, 1.0), 2, 0),  # 64 pairs of tensors a launch
        (lambda: on_lists._foreach_add_([torch.empty(2**25)], 1.0), 2, 0),  # 320 chunks of 65,536 numbers
    ],
)
def test_kernels_and_reads_of_known_operations(step: Callable[[], object], kernels: int, reads: int):
    counts = counted(step)
    assert (counts.kernels, counts.reads) == (kernels, reads)


def test_bytes_are_of_new_memory_and_the_peak_of_what_is_alive():
    def step() -> None:
        for _ in range(3):
            X.mul(2).view(4, 3).add_(1)

    counts = counted(step)
    assert (counts.allocated, counts.peak) == (3 * 48, 48)


def test_calls_are_of_python_and_c():
    def twice(x: list[int]) -> int:
        return len(x) + len(x)

    one, other = Counts(), Counts()
    calls_of(lambda: twice([1]), one)
    calls_of(lambda: (twice([1]), twice([2])), other)
    assert other.calls - one.calls == 3  # a function, and what it calls twice
    assert other.functions["called"]["builtins.len (C)"] == 4


def test_counted_steps_take_the_paths_of_a_device_and_give_them_back():
    own = gaussian._release_on_cpu
    model = nn.Linear(2, 2)
    with as_counted():
        assert not is_on_processor(X)
        assert not X.is_cpu
        assert gaussian._release_on_cpu is not own
        assert torch.optim.Adam(model.parameters()).defaults["foreach"]
    assert is_on_processor(X)
    assert X.is_cpu
    assert gaussian._release_on_cpu is own
    assert torch.optim.Adam(model.parameters()).defaults["foreach"] is None
    with as_counted(device_paths=False):
        assert is_on_processor(X)


@pytest.mark.parametrize("name", SMALL)
def test_a_steady_step_stays_below_its_bars(name: str):
    if not TORCH.endswith(f"=={torch.__version__.partition('+')[0]}"):
        pytest.skip("the bars are those of another torch, whose operators are others")
    if name == "bert_tiny":
        pytest.importorskip("transformers")
    *_, (row, _) = rows_of(name, ["plain"], "steady", None, device_paths=True)
    assert missed(row, BARS) == []


def test_counts_repeat():
    found = [vars(count(Counted("softmax", examples=8), "plain")) for _ in range(2)]
    assert found[0] == found[1]


def test_what_is_above_a_bar_is_named(monkeypatch: pytest.MonkeyPatch):
    def slower(setup: Any) -> methods.Step:
        step = methods.ordinary(setup)

        def slow() -> None:
            for _ in range(9):
                step()
            bool(F.relu(X).sum())

        return slow

    monkeypatch.setitem(methods.OURS, "plain", slower)
    monkeypatch.setattr("benchmarks.measure.METHODS", {"ordinary": methods.ordinary, "plain": slower})
    *_, (row, _) = rows_of("softmax", ["plain"], "steady", None, device_paths=True)
    bars = {"all": {"kernels": 2.2, "calls": 5, "reads": 0}}
    assert [text.partition(",")[0].rpartition(" ")[0] for text in missed(row, bars)] == [
        f"softmax: {what}" for what in ("kernels", "calls", "reads")
    ]
    assert missed(row | {"skipped": "no room"}, bars) == ["softmax: not counted: no room"]


def test_every_counted_model_has_bars():
    assert BARS.keys() <= {"all", *COUNTED}
    for name in COUNTED:
        assert bars_of(name, BARS).keys() >= {"kernels", "calls", "reads"}
