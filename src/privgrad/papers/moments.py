"""Items that measure gradients during training: their moments with and without noise, and cosines of examples.

`reproduce` calls `noise_moments`, `moments` and `cosines` by the item's kind. The privacy guarantee does not rest on
this file.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress, track
from rich.table import Table
from torch import Tensor, nn

from privgrad.diagnostics import RawGradientStats, RawMoments, five_numbers, raw_pairwise_cosines
from privgrad.errors import expected
from privgrad.experiments.folder import Record, claim, read_records
from privgrad.experiments.measures import losses_for
from privgrad.experiments.runner import open_folder
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.optim import AdamBC
from privgrad.papers.stops import describe_probe, stops
from privgrad.types import NoisyGradient

NUMBERS = ("min", "q1", "median", "q3", "max", "mean")
_INNER = ("q1", "median", "q3", "mean")
_BINS = 80
_FLOOR = 0.041  # in variances of the noise: the gamma' that the paper tuned, on CIFAR-10 and on SNLI
_PAIRED = 520  # number of examples, as in the paper's figure


class NoiseMoments(BaseModel):
    """The file of an item of kind "noise-moments": the second moment of pure noise, for each divisor and step."""

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


def noise_moments(raw: Mapping[str, Any], out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """Compute AdamBC's second moment on gradients of pure noise, and compare its quantiles with the paper's.

    Args:
        raw: the item's file, see NoiseMoments.
        out: folder for runs.jsonl.
        progress: show a progress bar.
    Returns:
        The quantiles by step and divisor, with their relative differences from the paper; and the same as a table.
    Raises:
        PrivacyError: the folder holds runs of another item.
    """
    item = NoiseMoments.model_validate(raw)
    claim(out, json.dumps(raw, indent=1))
    found: dict[str, Any] = {}
    table = Table("", "divisor", *NUMBERS, title=item.title)
    records: list[Record] = []
    for divisor in item.divisors:
        noise_std = item.noise_multiplier * item.max_grad_norm / divisor
        parameter = nn.Parameter(torch.zeros(item.coordinates))
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
        table.add_row(f"t = {t}", "paper", *(f"{paper[number]:.4g}" for number in NUMBERS))
        for record in (record for record in records if record["t"] == t):
            differences = {number: record[number] / paper[number] - 1 for number in NUMBERS}
            cells = (f"{record[number]:.4g} ({differences[number]:+.1%})" for number in NUMBERS)
            table.add_row("", str(record["divisor"]), *cells)
            numbers = {number: record[number] for number in NUMBERS}
            # The divisor that the authors' code used comes first; its key does not name the divisor.
            key = f"t={t}" if record["divisor"] == item.divisors[0] else f"t={t}, divisor {record['divisor']}"
            found[key] = numbers | {"divisor": record["divisor"], "difference": differences}
    last = found[f"t={max(item.steps)}"]
    found["within_1_percent"] = all(abs(last["difference"][number]) < 0.01 for number in _INNER)
    ends = [value for key, value in found.items() if key.startswith(f"t={max(item.steps)}")]
    largest = {value["divisor"]: max(abs(value["difference"][number]) for number in _INNER) for value in ends}
    largest_text = ", ".join(f"{difference:.2%} with divisor {divisor}" for divisor, difference in largest.items())
    table.caption = (
        f"With divisor {item.divisors[0]}, which the authors' library used, quartiles, median and mean at "
        f"t = {max(item.steps)} are {'' if found['within_1_percent'] else 'NOT '}within 1 % of the paper's. Largest "
        f"difference of these: {largest_text}. Extremes grow with the number of coordinates: here {item.coordinates:,}."
    )
    _write(out, records)
    return found, table


class _Along(BaseModel):
    """The table [probe] of kinds "moments" and "cosines": the steps to measure after; 0 is before the first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: list[int] = Field(min_length=1)


def moments(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """Measure the moments of the gradient with and without noise along one training.

    Args:
        spec: a spec with one method.
        probe: the item's [probe] table: the steps to measure after.
        out: folder for runs.jsonl and histograms.png.
        progress: show a progress bar.
    Returns:
        The numbers by step; and the second moments as a table.
    Raises:
        PrivacyError: the spec has several methods, a stop is too large, or the folder holds another spec.
    Privacy:
        NOT private: the moments without noise are computed before the noise.
    """
    from privgrad.experiments.report.figures import png
    from privgrad.papers.figures import histograms_figure

    at, method, records = _Along.model_validate(probe).at, _only_method(spec), _read(spec, probe, out)
    if not records:
        data = open_folder(spec, out, describe_probe(spec, probe))
        with Progress(disable=not progress, transient=True) as bar:
            tick = partial(bar.advance, bar.add_task(method.name, total=spec.privacy.steps))
            along = stops(spec, method, spec.run.seeds[0], [0, *at], data, tick)
            private_grad = next(along).private_grad
            moments, stats = RawMoments(private_grad), RawGradientStats(private_grad)
            for stop in along:
                found = {"raw_moments": moments.table(), "raw_watch": stats.summary()}
                records.append({"t": stop.step, **found, "raw_histograms": _histograms(moments)})
        _write(out, records)
    (out / "histograms.png").write_bytes(png(partial(histograms_figure, records[-1]["raw_histograms"])))
    table = Table("step", "second moment", *_INNER, title=spec.title, caption="NOT PRIVATE")
    for record in records:
        for row, numbers in record["raw_moments"].items():
            shown = (f"{numbers[number]:.3g}" for number in _INNER)
            table.add_row(str(record["t"]), row.removeprefix("raw_"), *shown)
    return {f"t={r['t']}": {key: r[key] for key in ("raw_moments", "raw_watch")} for r in records}, table


def cosines(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """Measure the cosines between the gradients of random pairs of examples, at several steps of one training.

    Args:
        spec: a spec with one method.
        probe: the item's [probe] table: the steps to measure after.
        out: folder for runs.jsonl and cosines.png.
        progress: show a progress bar.
    Returns:
        The mean cosines within a class and across classes, by step; and the same as a table.
    Raises:
        PrivacyError: the spec has several methods, a stop is too large, or the folder holds another spec.
    Privacy:
        NOT private.
    """
    from privgrad.experiments.report.figures import png
    from privgrad.papers.figures import cosines_figure

    at, method, records = _Along.model_validate(probe).at, _only_method(spec), _read(spec, probe, out)
    if not records:
        data, matrices = open_folder(spec, out, describe_probe(spec, probe)), dict[int, Tensor]()
        chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:_PAIRED]
        inputs, labels = (tensor[chosen] for tensor in data.train.tensors)
        with Progress(disable=not progress, transient=True) as bar:
            tick = partial(bar.advance, bar.add_task(method.name, total=spec.privacy.steps))
            for stop in stops(spec, method, spec.run.seeds[0], at, data, tick):
                found = raw_pairwise_cosines(stop.model, losses_for(data), (inputs, labels), labels)
                matrices[stop.step] = found["cosines"]
                records.append({"t": stop.step, "raw_within": found["within"], "raw_across": found["across"]})
        (out / "cosines.png").write_bytes(png(partial(cosines_figure, matrices)))
        _write(out, records)
    table = Table("step", "within a class", "across classes", title=spec.title, caption="Mean cosines. NOT PRIVATE")
    for record in records:
        table.add_row(str(record["t"]), f"{record['raw_within']:.4f}", f"{record['raw_across']:.5f}")
    return {f"t={record['t']}": record for record in records}, table


def _only_method(spec: Spec) -> MethodTable:
    """Return the only method of a spec; raise PrivacyError if there are several."""
    if len(spec.methods) != 1:
        raise expected("reproduce", "the number of methods", "to be 1", len(spec.methods), "correct the item's file")
    return spec.methods[0]


def _histograms(moments: RawMoments) -> dict[str, dict[str, Any]]:
    """Return, by panel, the "edges" of the bins and the number of coordinates of each kind in each bin."""
    clean, noisy = moments.raw_exp_avg_sq, moments.exp_avg_sq
    debiased = {name: v - moments.noise_var[name] for name, v in noisy.items()}
    panels: dict[str, dict[str, Tensor]] = {
        "first moment": {"clean": _flat(moments.raw_exp_avg), "noisy": _flat(moments.exp_avg)},
        "second moment": {"clean": _flat(clean), "noisy": _flat(noisy), "debiased": _flat(debiased)},
        "step / lr, clean numerator": {
            k.removeprefix("raw_"): x for k, x in moments.updates(debias_floor=_FLOOR).items()
        },
    }
    found: dict[str, dict[str, Any]] = {}
    for title, values in panels.items():
        ends = [np.quantile(x.numpy(), [0.001, 0.999]) for x in values.values()]
        edges = np.linspace(min(low for low, _ in ends), max(high for _, high in ends), _BINS + 1)
        found[title] = {"edges": edges.tolist()}
        found[title] |= {name: np.histogram(x.numpy(), edges)[0].tolist() for name, x in values.items()}
    return found


def _flat(values: Mapping[str, Tensor]) -> Tensor:
    """Return all values as one vector."""
    return torch.cat([value.flatten() for value in values.values()])


def _read(spec: Spec, probe: Mapping[str, Any], out: Path) -> list[Record]:
    """Return the records of a finished item, or an empty list for an unfinished one."""
    records = read_records(out)
    if records:
        claim(out, describe_probe(spec, probe))
    return records


def _write(out: Path, records: Sequence[Record]) -> None:
    """Write the records to runs.jsonl, in place of earlier ones."""
    (out / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
