"""Tables and figures of the papers, each a TOML here, run and set beside the paper's numbers."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import track
from rich.table import Table

from privgrad.diagnostics import five_numbers
from privgrad.errors import expected
from privgrad.experiments.runs import Record, compare
from privgrad.experiments.spec import Spec, check_spec
from privgrad.optim import AdamBC
from privgrad.types import NoisyGradient


class NoiseMoments(BaseModel):
    """An item of kind "noise-moments": the second moment of pure noise, for each divisor and step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["noise-moments"]
    title: str
    noise_multiplier: float = Field(gt=0)
    max_grad_norm: float = Field(gt=0)
    divisors: list[int]
    beta2: float = Field(ge=0, lt=1)
    steps: list[int]
    coordinates: int = Field(ge=1)
    seed: int
    paper: dict[str, dict[str, float]]


def items() -> list[str]:
    """The names of all items, as paper/item."""
    return sorted(f"{paper.name}/{item.name.removesuffix('.toml')}" for paper, item in _files())


def reproduce(name: str, out: Path, *, smoke: bool = False, progress: bool = True) -> tuple[dict[str, Any], Table]:
    """Run an item, or go on with it; everything that was found is written to out/runs.jsonl and out/table.json.

    Args:
        name: paper/item.
        out: folder.
        smoke: a tiny version that shows that it runs; its numbers mean nothing.
        progress: show a progress bar.
    Returns:
        The numbers, ours and the paper's; and the same as a table.
    Raises:
        PrivacyError: an unknown item, or a folder of another one.
    """
    raw = _load(name)
    tiny = raw.pop("smoke", {})
    if smoke:
        raw = _merged(raw, tiny)
    if raw.get("kind") == "noise-moments":
        found, table = _noise_moments(NoiseMoments.model_validate(raw), out, progress=progress)
    else:
        spec = check_spec(raw, name)
        found, table = _beside_paper(spec, compare(spec, out, progress=progress))
    (out / "table.json").write_text(json.dumps(found, indent=1))
    return found, table


def _files() -> Iterator[tuple[Traversable, Traversable]]:
    for paper in resources.files("privgrad.experiments").joinpath("items").iterdir():
        for item in paper.iterdir() if paper.is_dir() else ():
            if item.name.endswith(".toml"):
                yield paper, item


def _load(name: str) -> dict[str, Any]:
    for paper, item in _files():
        if f"{paper.name}/{item.name}" == f"{name}.toml":
            return tomllib.loads(item.read_text())
    raise expected("reproduce", "item", f"to be one of {', '.join(items())}", repr(name), "choose one")


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for key, value in changes.items():
        merged[key] = _merged(merged[key], value) if isinstance(value, dict) else value
    return merged


def _noise_moments(item: NoiseMoments, out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """AdamBC's own second moment under gradients that are noise only, from each divisor; quantiles over coordinates."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    table = Table("", "divisor", *_NUMBERS, title=item.title)
    records: list[Record] = []
    for divisor in item.divisors:
        noise_std = item.noise_multiplier * item.max_grad_norm / divisor
        parameter = torch.nn.Parameter(torch.zeros(item.coordinates))
        optimizer = AdamBC([("p", parameter)], lr=0.0, betas=(0.9, item.beta2))
        generator = torch.Generator().manual_seed(item.seed)
        steps = range(1, max(item.steps) + 1)
        for t in track(steps, f"divisor {divisor}", disable=not progress, transient=True):
            noise = noise_std * torch.randn(item.coordinates, generator=generator)
            optimizer.step(grad=NoisyGradient({"p": noise}, noise_std))
            if t in item.steps:
                numbers = five_numbers(optimizer.state[parameter]["exp_avg_sq"])
                records.append({"t": t, "divisor": divisor, **numbers})
    for t in item.steps:
        paper = item.paper[f"t={t}"]
        table.add_row(f"t = {t}", "paper", *(f"{paper[number]:.4g}" for number in _NUMBERS))
        for record in (record for record in records if record["t"] == t):
            differences = {number: record[number] / paper[number] - 1 for number in _NUMBERS}
            cells = (f"{record[number]:.4g} ({differences[number]:+.1%})" for number in _NUMBERS)
            table.add_row("", str(record["divisor"]), *cells)
            numbers = {number: record[number] for number in _NUMBERS}
            # The divisor that the authors' code really used comes first, and carries the plain name.
            key = f"t={t}" if record["divisor"] == item.divisors[0] else f"t={t}, divisor {record['divisor']}"
            found[key] = numbers | {"divisor": record["divisor"], "difference": differences}
    inner = ("q1", "median", "q3", "mean")
    last = found[f"t={max(item.steps)}"]
    found["within_1_percent"] = all(abs(last["difference"][number]) < 0.01 for number in inner)
    table.caption = (
        f"With divisor {item.divisors[0]}, quartiles and mean at t = {max(item.steps)} are "
        f"{'' if found['within_1_percent'] else 'NOT '}within 1 % of the paper's. Extremes grow with the number of "
        f"coordinates: here {item.coordinates:,}."
    )
    (out / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return found, table


_NUMBERS = ("min", "q1", "median", "q3", "max", "mean")


def _beside_paper(spec: Spec, records: Sequence[Record]) -> tuple[dict[str, Any], Table]:
    """By method and group of classes: mean and standard deviation over seeds, the paper's number, the difference."""
    found: dict[str, Any] = {}
    table = Table("method", "lr", "examples a class", "loss", "paper", "accuracy", "paper", title=spec.title)
    for method in spec.methods:
        finals = [r for r in records if r["method"] == method.name and r["phase"] == "final"]
        tried = sorted({r["lr"] for r in records if r["method"] == method.name and r["phase"] == "tuning"})
        groups: dict[str, Any] = {}
        for index, group in enumerate(finals[0]["curve"][-1]["raw_groups"]):
            key = f"{group['from']:g}"
            paper = spec.paper.get(method.name, {}).get(key, {})
            row: dict[str, Any] = {"paper": paper}
            for number in ("loss", "accuracy"):
                values = [final["curve"][-1]["raw_groups"][index][number] for final in finals]
                row[number] = {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None}
                if number in paper:
                    row[number]["difference"] = row[number]["mean"] - paper[number]
            groups[key] = row
            table.add_row(
                method.name if index == 0 else "",
                f"{finals[0]['lr']:g}" if index == 0 else "",
                f"{group['classes']:g} x {key}",
                _spread(row["loss"], "{:.2f}"),
                f"{paper['loss']:.2f}" if "loss" in paper else "–",
                _spread(row["accuracy"], "{:.1%}"),
                f"{paper['accuracy']:.1%}" if "accuracy" in paper else "–",
            )
        overall = [final["test_loss"] for final in finals]
        found[method.name] = {
            "lr": finals[0]["lr"],
            "lrs_tried": tried,
            "seeds": len(finals),
            "overall_loss": {"mean": mean(overall), "std": stdev(overall) if len(overall) > 1 else None},
            "groups": groups,
        }
    table.caption = "Mean ± standard deviation over seeds, on the training examples. NOT PRIVATE for those."
    return found, table


def _spread(row: Mapping[str, Any], form: str) -> str:
    text = form.format(row["mean"])
    return text if row["std"] is None else f"{text} ± {form.format(row['std'])}"
