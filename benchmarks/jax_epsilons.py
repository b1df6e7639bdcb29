"""Epsilons of jax_privacy for noise with memory and for truncated batches, for tests/accounting/test_jax_epsilons.py.

In an environment of its own: `pip install jax-privacy==2.0.0`, then
`python benchmarks/jax_epsilons.py tests/reference/jax_epsilons.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import dp_accounting
from jax_privacy.experimental import accounting  # pyright: ignore

DELTA = 1e-5
# noise multiplier, steps, examples, batch size, bands
BANDED = [
    (0.6, 400, 60_000, 1024, 2),
    (0.8, 400, 60_000, 1024, 4),
    (1.0, 400, 60_000, 1024, 8),
    (1.3, 400, 60_000, 1024, 16),
    (1.0, 403, 60_000, 1024, 8),
    (0.7, 1000, 60_000, 256, 8),
    (0.9, 1000, 60_000, 256, 16),
    (1.5, 300, 60_000, 8192, 4),
    (2.0, 300, 60_000, 8192, 7),
    (1.0, 50, 1000, 100, 10),
    (3.0, 17, 1000, 100, 4),
    (0.5, 100, 10_000, 32, 32),
]
# noise multiplier, steps, examples, batch size, largest batch size
TRUNCATED = [
    (0.9, 400, 60_000, 1024, 1100),
    (0.9, 400, 60_000, 1024, 1184),
    (1.0, 400, 60_000, 1024, 1024),
    (0.7, 1000, 60_000, 256, 320),
    (1.2, 300, 60_000, 8192, 8500),
    (1.5, 50, 1000, 100, 120),
    (1.0, 30, 200, 20, 24),
    (2.0, 100, 10_000, 500, 560),
]


def epsilon_of(event: dp_accounting.DpEvent) -> float:
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(event)
    return float(accountant.get_epsilon(DELTA))


def main(out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for sigma, steps, examples, size, bands in BANDED:
        event: Any = accounting.amplified_bandmf_event(
            sigma, steps, num_bands=bands, sampling_prob=min(1.0, bands * size / examples)
        )
        rows.append({"numbers": [sigma, steps, examples, size], "bands": bands, "epsilon": epsilon_of(event)})
    for sigma, steps, examples, size, largest in TRUNCATED:
        event = accounting.truncated_dpsgd_event(
            sigma, steps, sampling_prob=size / examples, num_examples=examples, truncated_batch_size=largest
        )
        numbers = [sigma, steps, examples, size]
        rows.append({"numbers": numbers, "max_batch_size": largest, "epsilon": epsilon_of(event)})
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
