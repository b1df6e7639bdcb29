"""Accuracy of private heads on texts of Debian packages, at several values of epsilon.

`python -m benchmarks.debian_texts --task tags` appends a line to results/texts/runs.jsonl for each training that the
file does not hold yet. The features are those of examples/recipes/texts_tags.toml and texts_sections.toml; they are
computed once and stored in `--folder`. Recall and accuracy are measured on test packages and are NOT private for these.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import privgrad as pg
from privgrad.data import MINILM, DataSet, debian_texts
from privgrad.features import Extractor, FrozenText, Public, TfIdf, cache, join

ROOT = Path(__file__).resolve().parents[1]
NOISE_STEP = 0.08  # at a constant rate, chosen on held-out packages
PLANS: dict[str, dict[str, Any]] = {
    "tags": {"delta": 6.97e-5, "num_examples": 14_340, "expected_batch_size": 2048, "steps": 200},
    "sections": {"delta": 1e-5, "num_examples": 45_000, "expected_batch_size": 4500, "steps": 300},
}
HELD_OUT = {"tags": 1500, "sections": 2000}


def loaded(task: Literal["tags", "sections"]) -> tuple[DataSet, Extractor]:
    """Return the data, and the extractor of its features."""
    limit = PLANS[task]["num_examples"] + HELD_OUT[task]
    data = debian_texts(task=task, limit=limit, validation=HELD_OUT[task])
    language = FrozenText(MINILM, dtype="bfloat16", source="MiniLM, trained on public web text")
    if task == "tags":
        return data, language
    assert data.public_inputs is not None
    return data, join((TfIdf(Public(data.public_inputs, "texts beyond the limit")), 1.0), (language, 1.0))


def main(
    task: Annotated[str, typer.Option(help="tags or sections")],
    epsilon: Annotated[list[float] | None, typer.Option(help="of a training; 3 and 1 if not given")] = None,
    seeds: Annotated[int, typer.Option(help="trainings for each epsilon, with research seeds 0, 1, ...")] = 3,
    folder: Annotated[Path, typer.Option(help="of the features")] = Path("runs/texts"),
    out: Annotated[Path, typer.Option(help="the file that records are added to")] = ROOT / "results/texts/runs.jsonl",
) -> None:
    data, extractor = loaded("tags" if task == "tags" else "sections")
    parts = {"train": data.train.tensors, "test": data.test.tensors}
    rows = {name: cache(extractor, part[0], folder / task / name, dtype=torch.float16) for name, part in parts.items()}
    held = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(one["task"], one["target_epsilon"], one["seed"]) for one in held}
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = data.test.tensors[1]
    for target in epsilon or [3.0, 1.0]:
        for seed in range(seeds):
            if (task, target, seed) in known:
                continue
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the research seed
                plan = pg.PrivacyPlan.for_budget(target_epsilon=target, max_grad_norm=0.1, seed=seed, **PLANS[task])
                options: dict[str, Any] = {"noise_step": NOISE_STEP, "schedule": "constant"}
                labels, classes = data.train.tensors[1], data.num_classes
                head = pg.fit_head(
                    rows["train"], labels, num_classes=classes, source=extractor.source, plan=plan, **options
                )
            outputs = head(rows["test"])
            if task == "tags":
                score = (wanted.gather(1, outputs.topk(5).indices).sum(1) / wanted.sum(1)).mean().item()
            else:
                score = (outputs.argmax(1) == wanted).double().mean().item()
            record = {
                "task": task,
                "target_epsilon": target,
                "seed": seed,
                "noise_step": NOISE_STEP,
                "score": round(score, 4),
            }
            record |= {"epsilon": head.epsilon, "cpu_seconds": round(time.process_time() - start)}
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            typer.echo(json.dumps(record))


if __name__ == "__main__":
    typer.run(main)
