"""Epsilon of noise with memory and of truncated batches, beside that of jax_privacy 2.0.0."""

import json
from pathlib import Path
from typing import Any

import pytest

import privgrad as pg
from privgrad.noise.banded import Banded

ROWS = json.loads((Path(__file__).parents[1] / "reference" / "jax_epsilons.json").read_text())


FAST = (2, 9, 10, 17)  # the others take 40 s


def marked(index: int) -> Any:
    row = ROWS[index]
    name = f"{row['numbers']} {row.get('bands') or row['max_batch_size']}"
    return pytest.param(row, id=name, marks=() if index in FAST else pytest.mark.slow)


@pytest.mark.parametrize("row", [marked(index) for index in range(len(ROWS))])
def test_epsilon_is_that_of_jax_privacy(row: dict[str, Any]):
    sigma, steps, examples, size = row["numbers"]
    kind: dict[str, Any] = {"sampling": "truncated", "max_batch_size": row.get("max_batch_size")}
    if "bands" in row:
        kind = {"correlation": Banded(row["bands"])}
    plan = pg.PrivacyPlan(
        sample_rate=size / examples,
        steps=steps,
        expected_batch_size=size,
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        num_examples=examples,
        **kind,
    )
    assert plan.epsilon(delta=1e-5) == pytest.approx(row["epsilon"], rel=1e-3)
