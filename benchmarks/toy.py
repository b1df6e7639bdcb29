"""The methods of a comparison on the toy regression, tuned by the same tuner.

`python -m benchmarks.toy results/more-toy/comparison.toml` appends a line to runs.jsonl beside that file for each
training that it does not hold yet, and writes table.json. Data, model and plan are those of `privgrad reproduce
adadps/toy`; C, methods and tuning are those of the file. The loss is that of the training examples, and is NOT private.
"""

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import torch
import typer
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad_lab.load_spec import load_spec
from privgrad_lab.papers.reproduce import prepared
from privgrad_lab.papers.toy_regression import Toy, losses, plan_of, problem, start
from privgrad_lab.records import Record, append, own_text, read_records
from privgrad_lab.runner import Run, find_record
from privgrad_lab.tuner import judge


def trained(item: Toy, data: tuple[torch.Tensor, torch.Tensor], run: Run) -> Record:
    """Train one run, and return its record."""
    assert run.seed is not None
    began, model, candidate = time.time(), start(item, run.seed), run.candidate
    plan = replace(plan_of(item, run.seed), max_grad_norm=candidate.max_grad_norm)
    method = run.method.at(candidate)
    optimizer = method.make(model.named_parameters(), steps=plan.steps)
    private_grad = pg.PrivateGradient(model, losses, plan, **method.parts())
    loss = float("inf")  # what a training that diverges is worth
    try:
        for batch in plan.batches(TensorDataset(*data)):
            optimizer.step(grad=private_grad(batch))
        loss = losses(model, data).mean().item()
    except pg.PrivacyError as error:
        typer.echo(f"{run.name}: {error}")
    return {
        "method": method.name,
        "phase": run.phase,
        "seed": run.seed,
        "max_grad_norm": candidate.max_grad_norm,
        "lr": candidate.lr,
        "noise_step": candidate.noise_step,
        "own": [list(pair) for pair in candidate.own],
        "raw_train_loss": loss,
        "epsilon": plan.epsilon(),
        "seconds": time.time() - began,
    }


def main(file: Annotated[Path, typer.Argument(help="comparison whose [data] and [model] are not used")]) -> None:
    """Tune each method, and train its best candidate with the seeds of [run]."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a fixed seed makes the noise predictable")
    item = Toy(**prepared("adadps/toy"))
    x, y, _ = problem(item)
    spec, folder, table = load_spec(file), file.parent, dict[str, dict[str, float]]()
    assert spec.tuning is not None
    for method in spec.methods:
        for candidate in spec.grid(method):
            for seed in spec.tuning.seeds:
                run = Run(method, candidate, seed, "tuning")
                if find_record(read_records(folder), run) is None:
                    append(folder, [trained(item, (x, y), run)])
        verdict = judge(read_records(folder), method.name, "train_loss")
        for seed in spec.run.seeds:
            run = Run(method, verdict.best, seed, "final")
            if find_record(read_records(folder), run) is None:
                append(folder, [trained(item, (x, y), run)])
        records = [r for r in read_records(folder) if (r["method"], r["phase"]) == (method.name, "final")]
        final = [r["raw_train_loss"] for r in records]
        table[method.name] = {"mean": mean(final), "sd": stdev(final)}
        own = own_text(verdict.best.own)
        typer.echo(json.dumps({"method": method.name, "loss": final, "own": own, "grid": verdict.text}))
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
