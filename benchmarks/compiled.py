"""Compare compiled private steps with compiled ordinary ones: `python -m benchmarks.compiled`.

The ordinary step is forward, backward and Adam in one compiled function of tensors, which is the fastest that torch
has. The clock is the process's. Without noise: the compiled part of the private step, and a compiled Adam.
"""

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.engine import compiled
from privgrad.private_gradient import RawStep

BATCH, VOCABULARY, POSITIONS, WIDTH, HEADS = 32, 2000, 32, 128, 4
Named = Mapping[str, Tensor]


class Block(nn.Module):
    """A layer of a transformer, its norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        x = self.first(h)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = torch.softmax(q @ k.mT / (WIDTH / HEADS) ** 0.5, -1) @ v
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h + self.down(F.relu(self.up(self.second(h))))


class Transformer(nn.Module):
    """Two layers with learned positions; the mean of the outputs is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.02 * torch.randn(POSITIONS, WIDTH))
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.positions)).mean(1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "transformer": (Transformer, lambda: torch.randint(VOCABULARY, (BATCH, POSITIONS)), 2),
    "mlp": (_mlp, lambda: torch.randn(BATCH, 784), 10),
}


def losses(model: Callable[[Tensor], Tensor], examples: Any) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def private(
    model: nn.Module, examples: TensorDataset, *, is_compiled: bool
) -> tuple[Callable[[], Any], Callable[[], Any], pg.PrivateGradient]:
    """Return a private step, one without the update, and the PrivateGradient that takes both."""
    plan = pg.PrivacyPlan(
        sample_rate=0.999,
        steps=10**6,
        expected_batch_size=BATCH,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_examples=BATCH,
        delta=1e-5,
        sampling="truncated",
        max_batch_size=BATCH,
    )
    private_grad = pg.PrivateGradient(model, losses, plan, compile=is_compiled)
    optimizer = pg.optim.AdamBC(model.named_parameters(), noise_step=1e-3)
    drawn = next(plan.batches(examples))
    whole = replace(drawn, examples=examples.tensors, size=BATCH)  # the same examples each time, as another draw
    batches = (replace(whole, sampling=replace(whole.sampling, step=step)) for step in count())
    return lambda: optimizer.step(grad=private_grad(next(batches))), lambda: private_grad(next(batches)), private_grad


def adam(values: Named, grads: Named, means: Named, squares: Named, step: Tensor) -> list[Named]:
    """Return parameters, first and second moments after a step of Adam."""
    first = {name: 0.9 * means[name] + 0.1 * grads[name] for name in values}
    second = {name: 0.999 * squares[name] + 0.001 * grads[name].square() for name in values}
    one, two = 1 - 0.9**step, 1 - 0.999**step
    moved = {n: x - 1e-3 * (first[n] / one) / ((second[n] / two).sqrt() + 1e-8) for n, x in values.items()}
    return [moved, first, second]


def steps_of(name: str) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return what is timed, and how far the compiled private gradient without noise is from the engine's, at most."""
    make, inputs, classes = MODELS[name]
    torch.manual_seed(0)
    model, examples = make(), TensorDataset(inputs(), torch.randint(classes, (BATCH,)))
    engine, found = copy.deepcopy(model), list[list[Tensor]]()
    taken = [private(net, examples, is_compiled=net is model) for net in (model, engine)]
    for _, release, private_grad in taken:
        seen = list[Tensor]()

        def observe(raw: RawStep, seen: list[Tensor] = seen) -> None:
            seen.append(torch.cat([value.flatten().double() for value in raw.raw_mean.values()]))

        handle = private_grad.register_raw_observer(observe)
        for _ in range(5):  # at the same weights
            release()
        handle.remove()
        found.append(seen)
    gap = max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))
    functions = [x for x in taken[0][2]._structure.once(compiled._functions).values() if x is not None]
    if len(functions) != 1:
        raise RuntimeError(f"{name}: expected one compiled function, got {len(functions)}")
    region, chunk = functions[0], [*examples.tensors, torch.ones(BATCH, dtype=torch.bool)]
    values = {key: p.detach().clone() for key, p in model.named_parameters()}
    zeros = {key: torch.zeros_like(p) for key, p in values.items()}
    time_step = torch.tensor(10.0)

    def loss(values: Named) -> Tensor:
        return losses(lambda x: torch.func.functional_call(model, dict(values), (x,)), examples.tensors).mean()

    def step_of(values: Named, means: Named, squares: Named, time_step: Tensor) -> list[Named]:
        return adam(values, torch.func.grad(loss)(values), means, squares, time_step)

    ordinary, update = torch.compile(step_of, fullgraph=True), torch.compile(adam, fullgraph=True)
    eager = torch.optim.Adam(model.parameters())

    def step_eagerly() -> None:
        eager.zero_grad()
        losses(model, examples.tensors).mean().backward()
        eager.step()

    def without_noise() -> None:
        update(values, region(*chunk).sums, zeros, zeros, time_step)

    return {
        "ordinary, compiled": lambda: ordinary(values, zeros, zeros, time_step),
        "ordinary": step_eagerly,
        "private, compiled, without noise": without_noise,
        "private, compiled": taken[0][0],
        "private": taken[1][0],
    }, gap


def main(
    seconds: Annotated[float, typer.Option(help="Of timing for each model.")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="A file to append one line of JSON for each model to.")] = None,
) -> None:
    """Time compiled private steps of a transformer and an MLP, in turn with compiled ordinary ones."""
    torch.set_num_threads(1)
    for name in MODELS:
        steps, gap = steps_of(name)
        for step in (*steps.values(), *steps.values()):
            step()
        times: dict[str, list[float]] = {what: [] for what in steps}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for what, step in steps.items():
                begin = time.process_time()
                step()
                times[what].append(time.process_time() - begin)
        base = times["ordinary, compiled"]
        table = Table(
            "step", "ms", "of the compiled ordinary one", "fastest of fastest", title=f"{name}, {BATCH} examples"
        )
        rows = {w: [median(t) * 1e3, median(t) / median(base), min(t) / min(base)] for w, t in times.items()}
        for what, (ms, ratio, fastest) in rows.items():
            table.add_row(what, f"{ms:.2f}", f"{ratio:.2f}", f"{fastest:.2f}")
        Console().print(table, f"furthest from the engine's gradient without noise: {gap:.1e} of its norm")
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({"model": name, "gap": gap, "n": len(base), "rows": rows}) + "\n")


if __name__ == "__main__":
    typer.run(main)
