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
    weight_CD: Tensor, inputs_ND: Tensor, input_norms_N: Tensor, labels_N: Tensor, max_norm: float
) -> tuple[Tensor, Tensor]:
    """Return the mean of the clipped gradients, (C, D), and each example's factor of clipping, (N,).

    The products are in the dtype of the inputs, everything else is in that of the weights.
    """
    dtype = weight_CD.dtype
    logits_NC = (inputs_ND @ weight_CD.to(inputs_ND.dtype).mT).to(dtype)
    residuals_NC = logits_NC.softmax(1)
    residuals_NC[torch.arange(len(labels_N)), labels_N] -= 1
    norms_N = residuals_NC.norm(dim=1) * input_norms_N
    factors_N = (max_norm / norms_N).clamp(max=1)
    residuals_NC *= factors_N[:, None] / len(labels_N)
    return (residuals_NC.to(inputs_ND.dtype).mT @ inputs_ND).to(dtype), factors_N


class _FullBatches(runner.Free):
    """A payer whose trainings take full batches."""

    def train(self, spec: Spec, run: runner.Run, data: DataSet, made: runner.Prepared, fitted: Any) -> Record:
        del fitted
        plan = made.plan
        if plan.sample_rate != 1 or plan.seed is None:
            raise SystemExit("full batches and a research seed are needed")
        inputs, labels = data.train.tensors
        inputs_ND, input_norms_N = inputs.bfloat16(), inputs.norm(dim=1)
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
                    mean_CD, factors_N = clipped_mean(weight, inputs_ND, input_norms_N, labels, plan.max_grad_norm)
                    mean_CD += std * torch.randn(mean_CD.shape, generator=generator)
                made.optimizer.step(grad=NoisyGradient({name: mean_CD}, std, side_information=""))
                if step > plan.steps - math.ceil(plan.steps / 10):
                    clipped.append(float((factors_N < 1).float().mean()))
                if step in at:
                    before = time.perf_counter()
                    result.curve.append({"step": step, "epsilon": math.inf} | evaluate(made.model))
                    evaluated += time.perf_counter() - before
            result.updates, result.seconds = plan.steps, time.perf_counter() - start - evaluated
            return result

        record = super().train(spec, run, data, made, fit)
        return record | {
            "epsilon": math.inf,  # of a fixed seed
            "raw_clip_fraction": sum(clipped) / len(clipped),
            "trained_by": "benchmarks.heavy_tail",
        }


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
        runner.carry_out(runner.Research(spec, payer, bar).runs(), payer, data, bar)


if __name__ == "__main__":
    main()
