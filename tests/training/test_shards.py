"""Sharded models, block by block, in two processes and four."""

from typing import Any

import by_blocks
import pytest
import torch
from test_distributed import started

from privgrad.processes import ALONE


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("blocks")
    jobs = ["by_blocks", "attempts", "moved"]
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


def test_no_collective_moves_a_whole_gradient_and_few_bytes_more_than_fsdp(found: dict[str, Any]):
    model = by_blocks.made("layers")
    count, blocks = (
        len(found["attempts"]),
        [sum(p.numel() for p in x.parameters()) for x in model.get_submodule("layers").children()],
    )
    whole = sum(p.numel() for p in model.parameters())
    most = max(*blocks, whole - sum(blocks))  # shards are padded to one size
    ordinary, names = found["moved"]["ordinary"], {name for name, _ in found["moved"]["ordinary"]}
    private = [pair for pair in found["moved"]["private"] if pair[0] in names]
    assert max(size for _, size in found["moved"]["private"]) <= 1.1 * most < whole / 2
    # Others than all-gather and reduce-scatter hold the steps, the keys and a few weights; the norms are in no other.
    assert sum(size for name, size in found["moved"]["private"] if name not in names) < whole / 2
    assert sum(size for _, size in private) <= 1.1 * sum(size for _, size in ordinary)
    for name in names:
        assert sum(size for kind, size in private if kind == name and size > count) == sum(
            size for kind, size in ordinary if kind == name
        )
