"""Audits of steps that two processes take with shards of one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, jobs = tmp_path_factory.mktemp("audits"), ["audited_step", "audited_fault"]
    started(2, folder, *jobs)
    return {job: torch.load(folder / f"{job}.pt") for job in jobs}


def test_a_step_with_shards_stays_within_its_claim_and_comes_near(found: dict[str, Any]):
    assert found["audited_step"]["passed"], found
    assert found["audited_step"]["bounds"]["gaussian"] > 0.5 * found["audited_step"]["claim"], found


def test_half_of_the_noise_in_one_process_exceeds_the_claim(found: dict[str, Any]):
    assert not found["audited_fault"]["passed"], found


def test_a_training_with_shards_stays_within_its_claim(tmp_path: Path):
    started(2, tmp_path, "audited_training")
    found = torch.load(tmp_path / "audited_training.pt")
    assert found["passed"], found
    assert found["bound"] > 0.25 * found["claim"], found
