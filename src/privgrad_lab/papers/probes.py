"""Items that measure along trainings: the bias of clipping, the time of a step, moments and cosines of gradients.

Each item writes its records and a plot to a folder, and returns its numbers, which are NOT private, and the same as a
table. A second call resumes. In [probe], `at` are the steps to measure after, from 1 on, or from 0 on for moments and
cosines.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import table as rich
from rich.progress import Progress, track
from torch import Tensor, nn

from privgrad.audit.methods import flat
from privgrad.data import DataSet
from privgrad.diagnostics import RawGradientStats, RawMoments, five_numbers, raw_clipping_bias, raw_pairwise_cosines
from privgrad.errors import expected
from privgrad.gradient.contribution import Contribution
from privgrad.optim import AdamBC
from privgrad.private_gradient import PrivateGradient
from privgrad.processes import one_thread
from privgrad.types import NoisyGradient
from privgrad_lab.metrics import losses_for
from privgrad_lab.papers.toy_regression import Found
from privgrad_lab.records import Record, append, claim, mean, read_records, std
from privgrad_lab.runner import Prepared, Run, open_folder, prepare
from privgrad_lab.spec import MethodTable, Spec


def begin(spec: Spec, method: MethodTable, seed: int, data: DataSet) -> Prepared:
    """Return the parts of a training of a method with one candidate, before its first step."""
    if spec.is_tuned(method):
        got = f"{len(spec.grid(method))} candidates"
        raise expected("reproduce", method.name, "to have one lr, one max_grad_norm and one radius", got)
    return prepare(spec, Run(method, spec.grid(method)[0], seed, "final"), data)


class Stop(NamedTuple):
    """The state of a training after `step` steps; `released` is the last released gradient, None before the first."""

    step: int
    model: nn.Module
    private_grad: PrivateGradient
    released: NoisyGradient | None


def stops(
    spec: Spec, method: MethodTable, seed: int, at: Sequence[int], data: DataSet, tick: Callable[[], object]
) -> Iterator[Stop]:
    """Train one method, call `tick` after each step, and yield a Stop at each number of steps in `at`, maybe 0."""
    made = begin(spec, method, seed, data)
    if 0 in at:
        yield Stop(0, made.model, made.private_grad, None)
    for step, batch in enumerate(made.plan.batches(data.train), start=1):
        released = made.private_grad(batch)
        made.optimizer.step(grad=released)
        tick()
        if step in at:
            yield Stop(step, made.model, made.private_grad, released)


def describe_probe(spec: Spec, probe: Mapping[str, Any]) -> str:
    """Return the text of spec.json for an item with a [probe] table."""
    described = spec.model_dump(mode="json", exclude_defaults=True) | {"probe": dict(probe)}
    return json.dumps(described, indent=1, ensure_ascii=False)


_LABELS = {
    "raw_bias": "|clipped g - g|",
    "raw_cosine": "cosine of clipped g and g",
    "raw_ascent": "cosine of g_i and g",
    "raw_released": "cosine of last release and g",
    "seconds": "seconds per step",
}
# By (method, number), then by seed or trial: the values at each x; their mean is shown.
_Curves = dict[tuple[str, str], dict[int, dict[int, list[float]]]]


def clipping_bias(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Measure the bias of clipping along a training of each method and seed, as the mean of random training examples.

    The measurements do not change the training. Every method is measured on the same examples, `batch_sizes` of them,
    at the weights and, with `own`, at the point that it uses. `shows` are the numbers of the plot. It has "step" or
    "batch_size" along x, as `against` says, and averages over the other one.

    Reference:
        The paper on BAM, figures 2, 4, 5 and 6. Deviation: the plots against batch size change the number of measured
        examples, along the same trainings.
    """
    data = open_folder(spec, out, describe_probe(spec, probe))
    done = {(record["method"], record["seed"]) for record in read_records(out)}
    planned = [(method, seed) for method in spec.methods for seed in spec.run.seeds]
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("", total=len(planned) * spec.privacy.steps)
        for index, (method, seed) in enumerate(planned):
            bar.update(task, description=f"{method.name}, seed {seed}", completed=index * spec.privacy.steps)
            if (method.name, seed) not in done:
                along = stops(spec, method, seed, probe["at"], data, partial(bar.advance, task))
                append(out, [record for stop in along for record in _measured(stop, spec, method, seed, data, probe)])
    against, own = probe["against"], probe.get("own", False)
    other, over = ("batch size", probe["batch_sizes"]) if against == "step" else ("steps", probe["at"])
    caption = (
        f"NOT PRIVATE. {data.name}. g: mean of the gradients g_i of random training examples, at the weights"
        f"{'; own: at the point that the method uses' if own else ''}. Mean ± standard deviation over seeds, at "
        f"{other} {', '.join(map(str, over))}."
    )
    curves: _Curves = {}
    for record in read_records(out):
        name = record["method"] if record["gradients"] == "plain" else f"{record['method']}, own"
        for number in probe["shows"]:
            points = curves.setdefault((name, number), {}).setdefault(record["seed"], {})
            points.setdefault(record[against], []).append(record[number])
    return _shown(curves, against, spec.title, caption, out)


def _measured(
    stop: Stop, spec: Spec, method: MethodTable, seed: int, data: DataSet, probe: Mapping[str, Any]
) -> Iterator[Record]:
    candidate, losses = spec.grid(method)[0], losses_for(data)
    places: dict[str, Contribution | None] = {"plain": None}
    own = method.at(candidate).perturbation()
    if probe.get("own") and own is not None and stop.released is not None:
        places["own"] = own
    order = torch.from_numpy(np.random.default_rng((seed, stop.step)).permutation(len(data.train)))
    for size in probe["batch_sizes"]:
        for gradients, perturb in places.items():
            found = raw_clipping_bias(
                stop.model,
                losses,
                data.train[order[:size]],
                max_grad_norm=candidate.max_grad_norm,
                perturb=perturb,
                released=stop.released,
            )
            key = {"method": method.name, "seed": seed, "step": stop.step, "batch_size": size, "gradients": gradients}
            yield key | found


def runtime(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Measure the seconds of one step of each method, gradient and update together, by the number of hidden layers.

    The last steps of the plan are timed, `repetitions` in each of `trials`, and all earlier ones warm up.

    Reference:
        The paper on BAM, figure 3. Deviation: not compiled.
    """
    data = open_folder(spec, out, describe_probe(spec, probe))
    done = {record["depth"] for record in read_records(out)}
    # The bar is refreshed between steps only: a refresh thread would add to the measured time.
    with one_thread(), ExitStack() as after, Progress(disable=not progress, transient=True, auto_refresh=False) as bar:
        # Gradients that vanish over many layers become denormal (below 1e-38), which is many times slower.
        torch.set_flush_denormal(True)
        after.callback(torch.set_flush_denormal, False)
        task = bar.add_task("", total=len(probe["depths"]) * len(spec.methods) * spec.privacy.steps)
        for index, depth in enumerate(probe["depths"]):
            completed = index * len(spec.methods) * spec.privacy.steps
            bar.update(task, description=f"depth {depth}", completed=completed, refresh=True)
            if depth not in done:
                append(out, _timed(spec, depth, data, probe, partial(bar.update, task, advance=1, refresh=True)))
    caption = (
        f"Seconds per step on one thread, batches of {spec.privacy.expected_batch_size}: mean ± standard deviation "
        f"over {probe['trials']} trials of {probe['repetitions']} steps."
    )
    curves: _Curves = {}
    for record in read_records(out):
        points = curves.setdefault((record["method"], "seconds"), {}).setdefault(record["trial"], {})
        points[record["depth"]] = record["seconds"]
    return _shown(curves, "depth", spec.title, caption, out)


def _timed(spec: Spec, depth: int, data: DataSet, probe: Mapping[str, Any], tick: Callable[[], object]) -> list[Record]:
    """Time the methods' trials in turn, so that other load of the machine affects all methods equally."""
    deep = spec.model_copy(update={"model": spec.model.model_copy(update={"depth": depth})})
    clocks = {method.name: _seconds(deep, method, data, tick) for method in spec.methods}
    for clock in clocks.values():
        deque(islice(clock, spec.privacy.steps - probe["trials"] * probe["repetitions"]), maxlen=0)
    return [
        {"method": name, "depth": depth, "trial": trial, "seconds": list(islice(clock, probe["repetitions"]))}
        for trial in range(probe["trials"])
        for name, clock in clocks.items()
    ]


def _seconds(spec: Spec, method: MethodTable, data: DataSet, tick: Callable[[], object]) -> Iterator[float]:
    made = begin(spec, method, spec.run.seeds[0], data)
    for batch in made.plan.batches(data.train):
        start = perf_counter()
        made.optimizer.step(grad=made.private_grad(batch))
        elapsed = perf_counter() - start
        tick()
        yield elapsed


def _shown(curves: _Curves, against: str, title: str, caption: str, out: Path) -> Found:
    """Return mean and standard deviation over seeds or trials, by x, method and number, and as a table; plot them."""
    from privgrad_lab.report.figures import curves_figure, png

    shown = list(dict.fromkeys(number for _, number in curves))
    names = {key: key[0] if len(shown) == 1 else f"{key[0]}, {_LABELS[key[1]]}" for key in curves}
    lines = {
        key: [[(x, fmean(values)) for x, values in points.items()] for points in trials.values()]
        for key, trials in curves.items()
    }
    found: dict[str, Any] = {}
    for (method, number), trials in lines.items():
        for points in zip(*trials, strict=True):
            row, values = found.setdefault(f"{against}={points[0][0]}", {}), [y for _, y in points]
            row.setdefault(method, {})[number] = {"mean": mean(values), "std": std(values)}
    label = against.replace("_", " ")
    table = rich.Table(label, *names.values(), title=title, caption=caption)
    for x, row in found.items():
        cells = (row[method][number] for method, number in names)
        texts = (f"{c['mean']:.3g}" + ("" if c["std"] is None else f" ± {c['std']:.1g}") for c in cells)
        table.add_row(x.partition("=")[2], *texts)
    # With several numbers, the legend holds the full label, for example "cosine of g_i and g".
    labels = [_LABELS[number] if len(shown) == 1 else _LABELS[number].partition(" of ")[0] for number in shown]
    marked = [*dict.fromkeys(labels), *(["NOT PRIVATE"] if shown[0].startswith("raw_") else [])]
    draw = partial(
        curves_figure,
        {names[key]: trials for key, trials in lines.items()},
        xlabel=label,
        ylabel=", ".join(marked),
        xscale="log" if against == "batch_size" else "linear",
    )
    (out / "curves.png").write_bytes(png(draw))
    return found, table


NUMBERS = ("min", "q1", "median", "q3", "max", "mean")
_INNER = ("q1", "median", "q3", "mean")
_BINS = 80
_FLOOR = 0.041  # in variances of the noise: the gamma' that the paper tuned, on CIFAR-10 and on SNLI
_PAIRED = 520  # number of examples, as in the paper's figure


def noise_moments(raw: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Compute AdamBC's second moment on gradients of pure noise, and compare its quantiles with the paper's."""
    item = SimpleNamespace(**raw)
    claim(out, json.dumps(raw, indent=1))
    found: dict[str, Any] = {}
    unit = 10.0 ** math.floor(math.log10(item.paper[f"t={item.steps[0]}"]["median"]))
    table = rich.Table("t", "divisor", *NUMBERS, title=f"{item.title}, in units of {unit:g}")
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
        table.add_row(f"{t}", "paper", *(f"{paper[number] / unit:.3f}" for number in NUMBERS))
        for record in (record for record in records if record["t"] == t):
            differences = {number: record[number] / paper[number] - 1 for number in NUMBERS}
            cells = (f"{record[number] / unit:.3f}\n{differences[number]:+.2%}" for number in NUMBERS)
            table.add_row("", str(record["divisor"]), *cells)
            # The divisor that the authors' code used comes first; its key does not name the divisor.
            key = f"t={t}" if record["divisor"] == item.divisors[0] else f"t={t}, divisor {record['divisor']}"
            found[key] = {n: record[n] for n in NUMBERS} | {"divisor": record["divisor"], "difference": differences}
    last = found[f"t={max(item.steps)}"]
    found["within_1_percent"] = all(abs(last["difference"][number]) < 0.01 for number in _INNER)
    table.caption = (
        f"With divisor {item.divisors[0]}, which the authors' library used, quartiles, median and mean at "
        f"t = {max(item.steps)} are {'' if found['within_1_percent'] else 'NOT '}within 1 % of the paper's. "
        f"Extremes grow with the number of coordinates: here {item.coordinates:,}."
    )
    (out / "runs.jsonl").unlink(missing_ok=True)
    append(out, records)
    return found, table


def moments(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Measure the moments of the gradient with and without noise along one training of the only method."""
    from privgrad_lab.report.figures import histograms_figure, png

    def measured(_: DataSet, along: Iterator[Stop]) -> Iterator[Record]:
        private_grad = next(along).private_grad
        moments, stats = RawMoments(private_grad), RawGradientStats(private_grad)
        for stop in along:
            found = {"raw_moments": moments.table(), "raw_watch": stats.summary()}
            yield {"t": stop.step, **found, "raw_histograms": _histograms(moments)}

    records = _once_along(spec, probe, out, [0, *probe["at"]], measured, progress=progress)
    (out / "histograms.png").write_bytes(png(partial(histograms_figure, records[-1]["raw_histograms"])))
    table = rich.Table("step", "second moment", *_INNER, title=spec.title, caption="NOT PRIVATE")
    for record in records:
        for row, numbers in record["raw_moments"].items():
            shown = (f"{numbers[number]:.3g}" for number in _INNER)
            table.add_row(str(record["t"]), row.removeprefix("raw_"), *shown)
            if theirs := spec.paper.get(f"t={record['t']}", {}).get(row):
                table.add_row("", "  paper", *(f"{theirs[number]:.3g}" for number in _INNER), style="dim")
    return {f"t={r['t']}": {key: r[key] for key in ("raw_moments", "raw_watch")} for r in records}, table


def cosines(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> Found:
    """Measure the cosines between the gradients of random pairs of examples along one training of the only method."""
    from privgrad_lab.report.figures import cosines_figure, png

    matrices: dict[int, Tensor] = {}

    def measured(data: DataSet, along: Iterator[Stop]) -> Iterator[Record]:
        chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:_PAIRED]
        inputs, labels = (tensor[chosen] for tensor in data.train.tensors)
        for stop in along:
            found = raw_pairwise_cosines(stop.model, losses_for(data), (inputs, labels), labels)
            matrices[stop.step] = found["cosines"]
            yield {"t": stop.step, "raw_within": found["within"], "raw_across": found["across"]}

    records = _once_along(spec, probe, out, probe["at"], measured, progress=progress)
    if matrices:  # the records of a finished item hold no matrix
        (out / "cosines.png").write_bytes(png(partial(cosines_figure, matrices)))
    caption = "Mean cosines. NOT PRIVATE"
    table = rich.Table("step", "within a class", "across classes", title=spec.title, caption=caption)
    for record in records:
        table.add_row(str(record["t"]), f"{record['raw_within']:.4f}", f"{record['raw_across']:.5f}")
    return {f"t={record['t']}": record for record in records}, table


def _once_along(
    spec: Spec,
    probe: Mapping[str, Any],
    out: Path,
    at: Sequence[int],
    measured: Callable[[DataSet, Iterator[Stop]], Iterator[Record]],
    *,
    progress: bool,
) -> list[Record]:
    """Return the records of a finished item, or those that are measured along a training of its only method."""
    if records := read_records(out):
        claim(out, describe_probe(spec, probe))
        return records
    data, (method,) = open_folder(spec, out, describe_probe(spec, probe)), spec.methods
    with Progress(disable=not progress, transient=True) as bar:
        tick = partial(bar.advance, bar.add_task(method.name, total=spec.privacy.steps))
        records = list(measured(data, stops(spec, method, spec.run.seeds[0], at, data, tick)))
    append(out, records)
    return records


def _histograms(moments: RawMoments) -> dict[str, dict[str, Any]]:
    clean, noisy = moments.raw_exp_avg_sq, moments.exp_avg_sq
    debiased = {name: v - moments.noise_var[name] for name, v in noisy.items()}
    updates = moments.updates(debias_floor=_FLOOR)
    panels: dict[str, dict[str, Tensor]] = {
        "first moment": {"clean": flat(moments.raw_exp_avg), "noisy": flat(moments.exp_avg)},
        "second moment": {"clean": flat(clean), "noisy": flat(noisy), "debiased": flat(debiased)},
        "step / lr, clean numerator": {k.removeprefix("raw_"): x for k, x in updates.items()},
    }
    found: dict[str, dict[str, Any]] = {}
    for title, values in panels.items():
        ends = [np.quantile(x.numpy(), [0.001, 0.999]) for x in values.values()]
        edges = np.linspace(min(low for low, _ in ends), max(high for _, high in ends), _BINS + 1)
        found[title] = {"edges": edges.tolist()}
        found[title] |= {name: np.histogram(x.numpy(), edges)[0].tolist() for name, x in values.items()}
    return found
