"""Sharded models, block by block, in two processes and four."""

from pathlib import Path
from typing import Any

import by_blocks
import pytest
import torch
from test_distributed import started

from privgrad.processes import ALONE


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("blocks")
    started(request.param, folder, "by_blocks")
    return torch.load(folder / "by_blocks.pt")


@pytest.mark.parametrize("case", by_blocks.CASES)
def test_processes_with_shards_train_as_one_with_all(found: dict[str, Any], case: str):
    for name, value in by_blocks.ends(processes=ALONE, **by_blocks.CASES[case]).items():
        torch.testing.assert_close(found[case][name], value, rtol=1e-9, atol=1e-10, msg=lambda text: f"{name}: {text}")
