"""Crash during training and resume: the process kills itself, starts again, and the ledger is complete.

Shows   fit(output_dir=...) is durable. Each gradient is charged to the ledger on disk before it is released, so a crash
        never makes a step free. Steps after the last checkpoint stay spent, although their updates are lost.
Needs   pip install '.[experiments]' (scikit-learn contains the handwritten digits). Ten seconds.
Run     python examples/resume.py
Prints  the number of releases in the ledger after the kill, the warnings of fit when it resumes, and the final counts.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

import privgrad as pg
from privgrad.data import digits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def train(folder: str, steps: int, *, kill_at: int | None = None) -> pg.FitResult:
    """Train with a folder, as usual. The process kills itself after update kill_at."""
    plan = pg.PrivacyPlan(
        sample_rate=0.1,
        steps=steps,
        expected_batch_size=144,
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        num_examples=1437,
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = pg.optim.AdamBC(model.named_parameters(), noise_step=0.025)
    updates = itertools.count(1)

    def crash(*_: object) -> None:
        if next(updates) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)  # no exception, no cleanup

    optimizer.register_step_post_hook(crash)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    return pg.fit(private_grad, optimizer, digits().train, output_dir=folder, save_seconds=0.2, progress=False)


def main(steps: int = 200) -> tuple[int, pg.FitResult]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, str(steps)]
        ended = subprocess.run(command, check=False).returncode
        charged = pg.Ledger(Path(folder) / "ledger.jsonl", read_only=True).releases
        print(f"the process ended with {ended} (killed is -9); its ledger holds {charged} releases")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = train(folder, steps)  # the same call again
        print(*(f"fit: {warning.message}" for warning in told), sep="\n")
    spent = result.ledger.epsilon(delta=1e-5)
    print(f"at the end: {result.ledger.releases} releases, {result.updates} updates, epsilon {spent:.2f} as planned")
    return charged, result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]), kill_at=int(sys.argv[2]) // 2)
    else:
        main()
