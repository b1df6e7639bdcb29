"""Sharded models, block by block, in two processes and four."""

import signal
from pathlib import Path
from typing import Any

import by_blocks
import pytest
import torch
from test_distributed import require_independent, started
from torch import Tensor

from privgrad.processes import ALONE


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("blocks")
    jobs = ["by_blocks", "attempts", "moved", "without_noise"]
    started(request.param, folder, *jobs)
    return {job: torch.load(folder / f"{job}.pt") for job in jobs}


@pytest.mark.parametrize("case", by_blocks.CASES)
def test_processes_with_shards_train_as_one_with_all(found: dict[str, Any], case: str):
    for name, value in by_blocks.ends(processes=ALONE, **by_blocks.CASES[case]).items():
        torch.testing.assert_close(
            found["by_blocks"][case][name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_all_processes_begin_a_step_again_with_the_one_that_must(found: dict[str, Any]):
    assert len(found["attempts"]) > 1
    assert {tuple(ends) for ends in found["attempts"]} == {(False, True, True)}


@pytest.mark.parametrize(("dtype", "share"), [("torch.float32", 1.1), ("torch.bfloat16", 1.4)])
def test_no_collective_moves_a_whole_gradient_and_few_bytes_more_than_fsdp(
    found: dict[str, Any], dtype: str, share: float
):
    """Sums are in float32 also of bfloat16 parameters."""
    moved = found["moved"][dtype]
    private, ordinary = moved["private"], moved["ordinary"]
    assert max(size for _, size in private) <= 1.1 * 4 * moved["largest"] < 4 * moved["whole"] / 2  # shards are padded
    assert sum(size for _, size in private) <= share * sum(size for _, size in ordinary)


def test_processes_with_shards_release_the_gradient_of_one(found: dict[str, Any]):
    alone = by_blocks.without_noise(ALONE, Path())
    exact = flat(alone["torch.float64"])
    # float32 weights, as those in float64 are rounded; and the order of sums in float64 is all that differs.
    for dtype, apart in (("torch.float32", 1e-6), ("torch.float64", 1e-14)):
        one, several = flat(alone[dtype]), flat(found["without_noise"][dtype])
        assert float((several - one).norm()) <= apart * float(one.norm())
    assert float((several - exact).norm()) <= 1e-14 * float(exact.norm())


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in gradient.values()])


def test_a_step_again_has_other_noise_in_each_shard_also_after_a_kill(tmp_path: Path):
    """The same step three times. It was charged each time, before anything left."""
    started(2, tmp_path, "killed_in_noise", ends=[0, -signal.SIGKILL])
    assert (tmp_path / "ledger.jsonl").read_text().count('"draw"') == 1
    started(2, tmp_path, "failed_in_noise")
    assert (tmp_path / "ledger.jsonl").read_text().count('"draw"') == 2
    for said in torch.load(tmp_path / "failed_in_noise.pt"):  # the first process has a charge more than the others
        assert "releases in the ledger" in said or "an exception in at least one" in said
    started(2, tmp_path, "same_step_again")
    assert torch.load(tmp_path / "same_step_again.pt") == ""
    assert (tmp_path / "ledger.jsonl").read_text().count('"draw"') == 4
    noises = [torch.load(tmp_path / f"{name}{rank}.pt") for name in ("killed", "failed", "again") for rank in (0, 1)]
    require_independent(torch.stack(noises).flatten(1).double() * 8)  # sigma C / B
