"""Items on BAM: the bias of clipping along trainings, and the time of a step by the depth of the model.

`reproduce` calls `clipping_bias` and `runtime` by the item's kind. The privacy guarantee does not rest on this file.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress
from rich.table import Table

from privgrad.data import DataSet
from privgrad.diagnostics import raw_clipping_bias
from privgrad.errors import expected
from privgrad.experiments.folder import Record, append, read_records
from privgrad.experiments.measures import losses_for
from privgrad.experiments.records import mean, std
from privgrad.experiments.runner import open_folder
from privgrad.experiments.spec import MethodTable, Spec
from privgrad.gradient.contribution import Contribution
from privgrad.papers.stops import Stop, begin, describe_probe, stops
from privgrad.threads import one_thread

_LABELS = {
    "raw_bias": "|clipped g - g|",
    "raw_cosine": "cosine of clipped g and g",
    "raw_ascent": "cosine of g_i and g",
    "raw_released": "cosine of last release and g",
    "seconds": "seconds per step",
}
# By (method, number), then by seed or trial: the values at each x; their mean is shown.
_Curves = dict[tuple[str, str], dict[int, dict[int, list[float]]]]
_Count = Annotated[int, Field(ge=1)]


class _Probe(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BiasProbe(_Probe):
    """The table [probe] of an item of kind "bias".

    After each number of steps in `at`, `raw_clipping_bias` is measured on random training examples, once for each size
    in `batch_sizes`. The gradients are evaluated at the weights. With `own`, they are also evaluated at the point that
    a perturbed method itself uses. `shows` lists the numbers to plot `against` the steps or the batch size, averaged
    over the other one.
    """

    at: list[_Count] = Field(min_length=1)
    batch_sizes: list[_Count] = Field(min_length=1)
    own: bool = False
    shows: list[Literal["raw_bias", "raw_cosine", "raw_ascent", "raw_released"]] = Field(min_length=1)
    against: Literal["step", "batch_size"]


class RuntimeProbe(_Probe):
    """The table [probe] of an item of kind "runtime".

    `depths` are numbers of hidden layers. The last steps of the plan are timed: `trials` trials of `repetitions` steps
    each. All earlier steps warm up.
    """

    depths: list[_Count] = Field(min_length=1)
    trials: _Count
    repetitions: _Count


def clipping_bias(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """Measure the bias of clipping along a training of each method and seed.

    The measurements do not change the training. Every method is measured on the same examples. A second call resumes
    after the last finished training.

    Args:
        spec: the methods and seeds.
        probe: the item's [probe] table, see BiasProbe.
        out: folder for runs.jsonl and curves.png.
        progress: show a progress bar.
    Returns:
        The numbers by x, method and number; and the same as a table.
    Raises:
        PrivacyError: a batch size or a stop is too large, a method is not tuned, or the folder holds another spec.
    Privacy:
        NOT private.
    Reference:
        The paper on BAM, figures 2, 4, 5 and 6. Deviation: the plots against batch size change the number of measured
        examples, along the same trainings.
    """
    item = BiasProbe.model_validate(probe)
    if max(item.batch_sizes) > spec.privacy.num_examples:
        condition = f"to be at most {spec.privacy.num_examples}"
        raise expected("reproduce", "probe.batch_sizes", condition, item.batch_sizes, "lower it in the item's file")
    data = open_folder(spec, out, describe_probe(spec, probe))
    done = {(record["method"], record["seed"]) for record in read_records(out)}
    planned = [(method, seed) for method in spec.methods for seed in spec.run.seeds]
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("", total=len(planned) * spec.privacy.steps)
        for index, (method, seed) in enumerate(planned):
            bar.update(task, description=f"{method.name}, seed {seed}", completed=index * spec.privacy.steps)
            if (method.name, seed) not in done:
                along = stops(spec, method, seed, item.at, data, partial(bar.advance, task))
                append(out, [record for stop in along for record in _measured(stop, spec, method, seed, data, item)])
    other, over = ("batch size", item.batch_sizes) if item.against == "step" else ("steps", item.at)
    caption = (
        f"NOT PRIVATE. {data.name}. g: mean of the gradients g_i of random training examples, at the weights"
        f"{'; own: at the point that the method uses' if item.own else ''}. Mean ± standard deviation over seeds, at "
        f"{other} {', '.join(map(str, over))}."
    )
    curves: _Curves = {}
    for record in read_records(out):
        name = record["method"] if record["gradients"] == "plain" else f"{record['method']}, own"
        for number in item.shows:
            points = curves.setdefault((name, number), {}).setdefault(record["seed"], {})
            points.setdefault(record[item.against], []).append(record[number])
    return _shown(curves, item.against, spec.title, caption, out)


def _measured(
    stop: Stop, spec: Spec, method: MethodTable, seed: int, data: DataSet, item: BiasProbe
) -> Iterator[Record]:
    """Yield the bias of clipping at one stop: a record for each batch size and each point of evaluation."""
    candidate, losses = spec.grid(method)[0], losses_for(data)
    places: dict[str, Contribution | None] = {"plain": None}
    own = method.perturbation(candidate)
    if item.own and own is not None and stop.released is not None:
        places["own"] = own
    order = torch.from_numpy(np.random.default_rng((seed, stop.step)).permutation(len(data.train)))
    for size in item.batch_sizes:
        for gradients, perturb in places.items():
            found = raw_clipping_bias(
                stop.model,
                losses,
                data.train[order[:size]],
                max_grad_norm=candidate.max_grad_norm,
                perturb=perturb,
                released=stop.released,
            )
            yield {
                "method": method.name,
                "seed": seed,
                "step": stop.step,
                "batch_size": size,
                "gradients": gradients,
            } | found


def runtime(spec: Spec, probe: Mapping[str, Any], out: Path, *, progress: bool) -> tuple[dict[str, Any], Table]:
    """Measure the seconds of one step of each method, gradient and update together, by the depth of an MLP.

    The measurement uses one thread and flushes denormal numbers (below 1e-38) to zero. Gradients that vanish over many
    layers would otherwise become denormal, and the processor handles these many times slower. A second call resumes
    after the last finished depth.

    Args:
        spec: the methods; its model is an mlp.
        probe: the item's [probe] table, see RuntimeProbe.
        out: folder for runs.jsonl and curves.png.
        progress: show a progress bar.
    Returns:
        The seconds by depth and method; and the same as a table.
    Raises:
        PrivacyError: the plan has too few steps for the trials, or the folder holds another spec.
    Reference:
        The paper on BAM, figure 3. Deviation: not compiled.
    """
    item = RuntimeProbe.model_validate(probe)
    if item.trials * item.repetitions > spec.privacy.steps:
        condition = f"to hold {item.trials} trials of {item.repetitions}"
        raise expected("reproduce", "privacy.steps", condition, spec.privacy.steps, "correct the item's file")
    data = open_folder(spec, out, describe_probe(spec, probe))
    done = {record["depth"] for record in read_records(out)}
    # The bar is refreshed between steps only: a refresh thread would add to the measured time.
    with one_thread(), _flushed(), Progress(disable=not progress, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(item.depths) * len(spec.methods) * spec.privacy.steps)
        for index, depth in enumerate(item.depths):
            completed = index * len(spec.methods) * spec.privacy.steps
            bar.update(task, description=f"depth {depth}", completed=completed, refresh=True)
            if depth not in done:
                append(out, _timed(spec, depth, data, item, partial(bar.update, task, advance=1, refresh=True)))
    caption = (
        f"Seconds per step on one thread, batches of {spec.privacy.expected_batch_size}: mean ± standard deviation "
        f"over {item.trials} trials of {item.repetitions} steps."
    )
    curves: _Curves = {}
    for record in read_records(out):
        points = curves.setdefault((record["method"], "seconds"), {}).setdefault(record["trial"], {})
        points[record["depth"]] = record["seconds"]
    return _shown(curves, "depth", spec.title, caption, out)


def _timed(spec: Spec, depth: int, data: DataSet, item: RuntimeProbe, tick: Callable[[], object]) -> list[Record]:
    """Time the methods' trials in turn, so that other load of the machine affects all methods equally."""
    deep = spec.model_copy(update={"model": spec.model.model_copy(update={"depth": depth})})
    clocks = {method.name: _seconds(deep, method, data, tick) for method in spec.methods}
    for clock in clocks.values():
        deque(islice(clock, spec.privacy.steps - item.trials * item.repetitions), maxlen=0)
    return [
        {"method": name, "depth": depth, "trial": trial, "seconds": list(islice(clock, item.repetitions))}
        for trial in range(item.trials)
        for name, clock in clocks.items()
    ]


def _seconds(spec: Spec, method: MethodTable, data: DataSet, tick: Callable[[], object]) -> Iterator[float]:
    """Yield the seconds of each step of a training."""
    _, private_grad, optimizer = begin(spec, method, spec.run.seeds[0], data)
    for batch in private_grad.plan.batches(data.train):
        start = perf_counter()
        optimizer.step(grad=private_grad(batch))
        elapsed = perf_counter() - start
        tick()
        yield elapsed


@contextmanager
def _flushed() -> Generator[None]:
    """Flush denormal numbers to zero inside the block."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _shown(curves: _Curves, against: str, title: str, caption: str, out: Path) -> tuple[dict[str, Any], Table]:
    """Return mean and standard deviation over seeds or trials, by x, method and number, and as a table; plot them."""
    from privgrad.experiments.report.figures import png
    from privgrad.papers.figures import curves_figure

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
    table = Table(label, *names.values(), title=title, caption=caption)
    for x, row in found.items():
        table.add_row(x.partition("=")[2], *(_cell(**row[method][number]) for method, number in names))
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


def _cell(mean: float, std: float | None) -> str:
    """Return a mean with its standard deviation, if there is one, as text."""
    return f"{mean:.3g}" + ("" if std is None else f" ± {std:.1g}")
