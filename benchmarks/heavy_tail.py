"""Run an item of `privgrad reproduce` on the linear model in full batches, with a step made for one CPU.

The gradient of softmax regression is an outer product, so that its norm needs no gradient. Two products of matrices in
bfloat16 make a step, a third of the time of `PrivateGradient`. Residuals, sums and weights are in float32. Everything
else is the library's: plan, noise step, optimizers, tuning, evaluation and records. `privgrad reproduce` reads the same
folder, and runs what is missing by `PrivateGradient`.

    python -m benchmarks.heavy_tail heavy-tail/fig2-full --out results/heavy-tail-fig2-full
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privgrad.data import DataSet
from privgrad.progress import bars
from privgrad.training.run import FitResult
from privgrad.types import NoisyGradient
from privgrad_lab import runner
from privgrad_lab.load_spec import check_spec
from privgrad_lab.papers.reproduce import prepared
from privgrad_lab.records import Record
from privgrad_lab.spec import Spec
from privgrad_lab.tuner import measurement_of


def clipped_mean(
    weight: Tensor, inputs: Tensor, lengths: Tensor, labels: Tensor, max_norm: float
) -> tuple[Tensor, Tensor]:
    """Return the mean of the clipped gradients, (C, D), and each example's factor of clipping, (N,).

    `weight` is (C, D), `inputs` (N, D), and `lengths` are the norms of the inputs, (N,). The products are in the dtype
    of the inputs, everything else is in that of the weights.
    """
    dtype = weight.dtype
    logits = (inputs @ weight.to(inputs.dtype).mT).to(dtype)
    residuals = logits.softmax(1)
    residuals[torch.arange(len(labels)), labels] -= 1
    norms = residuals.norm(dim=1) * lengths
    factors = (max_norm / norms).clamp(max=1)
    residuals *= factors[:, None] / len(labels)
    return (residuals.to(inputs.dtype).mT @ inputs).to(dtype), factors


class _FullBatches(runner.Free):
    """A payer whose trainings take full batches."""

    def train(self, spec: Spec, run: runner.Run, data: DataSet, made: runner.Prepared, fitted: Any) -> Record:
        del fitted
        plan = made.plan
        if plan.sample_rate != 1 or plan.seed is None:
            raise SystemExit("full batches and a research seed are needed")
        exact, labels = data.train.tensors
        inputs, lengths = exact.bfloat16(), exact.norm(dim=1)
        ((name, weight),) = made.model.named_parameters()
        std = plan.noise_multiplier * plan.max_grad_norm / len(labels)
        generator, clipped = torch.Generator().manual_seed(plan.seed), list[float]()

        def fit(*, evaluate: Any, num_evaluations: int, on_evaluate: Any) -> FitResult:
            del on_evaluate
            result, evaluated = FitResult(ledger=made.private_grad.ledger), 0.0
            start = time.perf_counter()
            at = {round(plan.steps * (k + 1) / num_evaluations) for k in range(num_evaluations)}
            for step in range(1, plan.steps + 1):
                with torch.no_grad():
                    mean, factors = clipped_mean(weight, inputs, lengths, labels, plan.max_grad_norm)
                    mean += std * torch.randn(mean.shape, generator=generator)
                made.optimizer.step(grad=NoisyGradient({name: mean}, std, side_information=""))
                if step > plan.steps - math.ceil(plan.steps / 10):
                    clipped.append(float((factors < 1).float().mean()))
                if step in at:
                    before = time.perf_counter()
                    result.curve.append({"step": step, "epsilon": math.inf} | evaluate(made.model))
                    evaluated += time.perf_counter() - before
            result.updates, result.seconds = plan.steps, time.perf_counter() - start - evaluated
            return result

        record = super().train(spec, run, data, made, fit)
        if clipped:  # else the record is that of the tuning
            record |= {"raw_clip_fraction": sum(clipped) / len(clipped), "trained_by": "benchmarks.heavy_tail"}
        return record | {"epsilon": math.inf}  # of a fixed seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", action="append", default=[], help="one to run; repeat it for several")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    raw = prepared(given.item, smoke=given.smoke, methods=given.method)
    spec = check_spec(raw, given.item)
    assert spec.tuning is not None
    data = runner.open_folder(spec, given.out)
    payer = _FullBatches(spec, given.out, tuned_by=measurement_of(spec.tuning.by))
    with bars(shown=True) as bar:
        research = runner.Research(spec, payer, bar)
        runner.carry_out(research.runs(), payer, data, bar, research.watch)


if __name__ == "__main__":
    main()
