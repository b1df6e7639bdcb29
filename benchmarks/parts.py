"""Where an ordinary step's time goes: `python -m benchmarks.parts`."""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.methods import Setup
from benchmarks.workloads import WORKLOADS

PARTS = ("forward", "backward", "Adam")


def seconds_of_parts(setup: Setup, repetitions: int) -> dict[str, list[float]]:
    """Seconds of forward, backward and Adam of each of so many ordinary steps, and of the step as a whole."""
    model, batch = setup.model(), setup.batch
    optimizer = torch.optim.Adam(model.parameters())
    seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}

    def timed(part: str, work: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        setup.synchronize()
        before = time.perf_counter()
        result = work()
        setup.synchronize()
        seconds[part].append(time.perf_counter() - before)
        return result

    for _ in range(repetitions + 2):
        loss = timed("forward", lambda: setup.losses(model, batch).mean())
        assert loss is not None
        timed("backward", loss.backward)  # pyright: ignore[reportUnknownArgumentType]
        timed("Adam", optimizer.step)
        optimizer.zero_grad()
        seconds["step"].append(sum(seconds[part][-1] for part in PARTS))
    return {part: values[2:] for part, values in seconds.items()}


def main(
    workload: Annotated[list[str] | None, typer.Option(help="Name, repeatable; default: all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bf16.")] = "float32",
    threads: Annotated[int, typer.Option(help="Of torch on CPU; 0: all cores.")] = 0,
    repetitions: Annotated[int, typer.Option(min=1)] = 15,
) -> None:
    """Milliseconds of an ordinary step and its parts: median, and in brackets the fastest."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    table = Table("", "about", "B", "parameters", "step", *PARTS)
    for name in workload or WORKLOADS:
        setup = Setup(name, device, dtype)
        seconds = seconds_of_parts(setup, repetitions)
        times = (
            f"{median(v) * 1e3:.1f} ({min(v) * 1e3:.1f})" for v in (seconds["step"], *map(seconds.get, PARTS)) if v
        )
        count = sum(parameter.numel() for parameter in setup.model().parameters())
        table.add_row(name, setup.workload.about, str(setup.batch_size), f"{count / 1e6:.2f} M", *times)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
