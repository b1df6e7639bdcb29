"""Every planted fault must be caught by the test that says so; a slow test shows that it passes without the fault.

Adding one is a row in a list; a new part is a list and a line of MUTANTS. Those of several processes are planted in
these, by tests/training/test_distributed.py.
"""

from pathlib import Path
from typing import Any

import pytest

import privgrad as pg
from mutants.bridges import BRIDGES
from mutants.budgets import BUDGET
from mutants.draws import EPOCHS, NOISE, SAMPLING
from mutants.features import FEATURES
from mutants.gradients import CLIPPING, GRADIENTS
from mutants.input_maps import INPUT_MAPS
from mutants.memory import MEMORY, TRUNCATION
from mutants.methods import OPTIMIZERS, PERTURBING, PRECONDITIONING
from mutants.mutant import Mutant, ending
from mutants.norms import NORMS
from mutants.processes import PROCESSES
from mutants.records import ACCOUNTING, CHECKPOINTS, LEDGER, WEIGHTS
from mutants.users import USERS

MUTANTS: dict[str, list[Mutant]] = {
    "Noise": NOISE,
    "Noise with memory": MEMORY,
    "Sampling": [*SAMPLING, *EPOCHS],
    "Truncated batches": TRUNCATION,
    "Clipping": CLIPPING,
    "Statistics of norms, and rules for C": NORMS,
    "Per-example gradients, model and loss": GRADIENTS,
    "BAM and SAT": PERTURBING,
    "AdaDPS": PRECONDITIONING,
    "Features": FEATURES,
    "Input maps": INPUT_MAPS,
    "Users": USERS,
    "Optimizers": OPTIMIZERS,
    "Accounting and plan": ACCOUNTING,
    "Ledger": LEDGER,
    "Budget": BUDGET,
    "Checkpoints": CHECKPOINTS,
    "Statements on weights": WEIGHTS,
    "Several processes": PROCESSES,
    "Bridges": BRIDGES,
}
ALL = [mutant for part in MUTANTS.values() if part is not PROCESSES for mutant in part]


def fault_tables() -> str:
    """What docs/trust.md ends with."""
    parts = []
    for title, part in MUTANTS.items():
        rows = [f"| {m.fault} | `{m.caught_by.split('.')[1]}`{' (refused)' if m.guard else ''} |" for m in part]
        parts.append("\n".join([f"| {title} | caught by |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _marked(mutant: Mutant) -> Any:
    """Mark the faults of the bound on rounding: `make rounding` plants them under several instruction sets."""
    of_rounding = mutant.caught_by.split(".")[0] in ("test_rounding", "test_sensitivity")
    return pytest.param(mutant, id=mutant.fault, marks=[pytest.mark.rounding] if of_rounding else [])


@pytest.mark.parametrize("mutant", [_marked(mutant) for mutant in ALL])
def test_the_fault_is_caught(mutant: Mutant, tmp_path: Path):
    error = ending(mutant, tmp_path / "planted", planted=True)
    assert error is not None, "it survived"
    assert isinstance(error, pg.PrivacyError) == (mutant.guard is not None), error
    assert mutant.guard is None or mutant.guard in str(error)


# Each test with what it is given, once. Most of these also run in their own files, by default.
SOUND = list({f"{mutant.caught_by} {mutant.given}": mutant for mutant in ALL}.values())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SOUND, ids=[mutant.fault for mutant in SOUND])
def test_the_same_test_passes_without_the_fault(mutant: Mutant, tmp_path: Path):
    assert ending(mutant, tmp_path / "sound", planted=False) is None
