"""What is measured: an ordinary step, and privgrad's, each as a function that takes one step."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.workloads import WORKLOADS, Workload

Step = Callable[[], object]
MAX_GRAD_NORM = 1.0
NOISE_MULTIPLIER = 1.0
PUBLIC = 20  # examples
PUBLIC_ROWS = 1024  # for the matrices of inputs


class SkipError(Exception):
    """A method that cannot take this workload, and why."""


@dataclass(frozen=True)
class Setup:
    """One workload under one setting; what every method is built from.

    Attributes:
        name: key of WORKLOADS.
        device: "cpu" or "cuda".
        dtype: "float32", "tf32" for products in this precision, or "bf16" for a forward pass under autocast.
        engine: privgrad's.
        microbatch_size: privgrad's; None is the whole batch.
        memory_limit: GiB that a method may spend on per-sample gradients.
        examples: size of the batch; None is the workload's own.
    """

    name: str
    device: str = "cpu"
    dtype: str = "float32"
    engine: str = "factored"
    microbatch_size: int | None = None
    memory_limit: float = 4.0
    examples: int | None = None

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    @property
    def batch_size(self) -> int:
        return min(self.examples or self.workload.batch_size, self.workload.batch_size)

    def model(self) -> nn.Module:
        """A new model; the same parameters every time."""
        torch.manual_seed(0)
        return self.workload.model().to(self.device)

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        x, y = self.workload.data()
        x, y = (part[: self.batch_size].clone() for part in (x, y))  # as a loader gives them, in memory of their own
        return x.to(self.device), y.to(self.device)

    def losses(self, model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
        """One loss an example."""
        x, y = batch
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            return self.workload.criterion(model(x), y)

    def outputs(self, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The model's outputs, in the precision of `losses`."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            return model(x)

    def require_room(self, model: nn.Module, examples: int | None = None) -> None:
        """Skip what would hold the gradients of so many examples (default: all) at once, and has not the room."""
        floats = sum(parameter.numel() for parameter in model.parameters()) * (examples or self.batch_size)
        if floats * 4 / 2**30 > self.memory_limit:
            raise SkipError(
                f"per-sample gradients take {floats * 4 / 2**30:.1f} GiB, over the limit of {self.memory_limit:g}"
            )

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def ordinary(setup: Setup) -> Step:
    """Forward, backward, torch's default Adam."""
    model, batch = setup.model(), setup.batch
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        setup.losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that between steps no method holds a gradient

    return step


def compiled(setup: Setup) -> Step:
    """The ordinary step by torch.compile: losses with their gradients, and the update."""
    model, batch = setup.model(), setup.batch
    optimizer = torch.optim.Adam(model.parameters())
    loss = torch.compile(lambda: setup.losses(model, batch).mean())
    update = torch.compile(optimizer.step)

    def step() -> None:
        loss().backward()
        update()
        optimizer.zero_grad()

    return step


def private(
    setup: Setup, variant: Callable[[nn.Module], dict[str, Any]], *, steps_a_pass: int = 1, **planned: Any
) -> Step:
    """privgrad's PrivateGradient and AdamBC, through the public interface."""
    model = setup.model()
    arguments: dict[str, Any] = {"engine": setup.engine, "microbatch_size": setup.microbatch_size} | variant(model)
    if arguments["engine"] == "vmap":
        setup.require_room(model, setup.microbatch_size)
    plan = pg.PrivacyPlan(
        sample_rate=1 / steps_a_pass,
        steps=10**6,
        expected_batch_size=setup.batch_size,
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_GRAD_NORM,
        num_examples=setup.batch_size * steps_a_pass,
        **planned,
    )
    private_grad = pg.PrivateGradient(model, setup.losses, plan, **arguments)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
    batches = _same_batch(plan, setup)

    def step() -> None:
        optimizer.step(grad=private_grad(next(batches)))

    return step


def _same_batch(plan: pg.PrivacyPlan, setup: Setup) -> Iterator[pg.Batch]:
    """The full batch again and again, each time as another draw, in the same memory."""
    drawn = next(plan.batches(TensorDataset(torch.empty(plan.num_examples))))
    first = replace(drawn, examples=setup.batch, size=setup.batch_size)
    return (replace(first, sampling=replace(first.sampling, step=step)) for step in count())


def _preconditioned(model: nn.Module) -> dict[str, Any]:
    precondition = _room("precondition")
    generator = torch.Generator().manual_seed(2)
    scales = {
        name: (torch.rand(p.shape, generator=generator) + 0.5).to(p.device)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    known = pg.Scales(scales, provenance="common knowledge", source="made up")
    return {"precondition": precondition.fixed(known)}


def _public(setup: Setup, schedule: str) -> Callable[[nn.Module], dict[str, Any]]:
    """RMSProp's scales from examples that are called public."""

    def variant(model: nn.Module) -> dict[str, Any]:
        precondition, examples = _room("precondition"), tuple(part[:PUBLIC].clone() for part in setup.batch)
        gradient = pg.PublicGradient(model, setup.losses, examples, source="the workload's own")
        return {"precondition": precondition.public_rmsprop(gradient, schedule=schedule)}

    return variant


def _inputs(setup: Setup, **arguments: Any) -> Callable[[nn.Module], dict[str, Any]]:
    """Matrices for the inputs of layers, from as many public rows as a computation takes by default."""

    def variant(model: nn.Module) -> dict[str, Any]:
        inputs, batch = getattr(_room("precondition"), "inputs", None), setup.batch[0]
        if inputs is None:
            raise SkipError("this privgrad has no privgrad.precondition.inputs")
        rows = batch.repeat(-(-PUBLIC_ROWS // len(batch)), *[1] * (batch.dim() - 1))[:PUBLIC_ROWS]
        return {"precondition": inputs(rows, source="the workload's own", forward=setup.outputs, **arguments)}

    return variant


def _perturbed(name: str, **arguments: Any) -> dict[str, Any]:
    return {"perturb": getattr(_room("perturb"), name)(**arguments)}


def captured(setup: Setup) -> Step:
    """privgrad's step by a compiled function, for chunks of the size of the batch."""
    if "compile" not in inspect.signature(pg.PrivateGradient).parameters:
        raise SkipError("this privgrad has no PrivateGradient(compile=)")
    return private(setup, lambda _: {"compile": True, "microbatch_size": setup.batch_size})


def _banded(bands: int) -> Any:
    """Noise with memory, its coefficients chosen for a thousand steps."""
    return _room("noise").Banded(bands).for_steps(1000)


def _room(name: str) -> Any:
    """A part of privgrad that this version may lack."""
    room = getattr(pg, name, None)
    if room is None:
        raise SkipError(f"this privgrad has no privgrad.{name}")
    return room


OURS: dict[str, Callable[[Setup], Step]] = {
    "plain": partial(private, variant=lambda model: {}),
    "captured": captured,
    "on-grid": partial(private, variant=lambda model: {}, noise_on_grid=True),
    "preconditioned": partial(private, variant=_preconditioned),
    "inputs": lambda setup: private(setup, _inputs(setup, every=10**6)),  # a step that keeps its matrices
    "inputs-refreshed": lambda setup: private(setup, _inputs(setup, every=1)),  # one that computes them anew
    "public-ordinary": lambda setup: ordinary(replace(setup, examples=PUBLIC)),  # what the statistics may cost
    "public-by-step": lambda setup: private(setup, _public(setup, "step")),
    "public-by-pass": lambda setup: private(setup, _public(setup, "epoch"), steps_a_pass=10),
    "vmap": partial(private, variant=lambda model: {"engine": "vmap"}),
    "vmap-preconditioned": partial(private, variant=lambda model: _preconditioned(model) | {"engine": "vmap"}),
    "bam": partial(private, variant=lambda model: _perturbed("BAM", radius=0.02)),
    "bam-exact": partial(private, variant=lambda model: _perturbed("BAM", radius=0.02, mode="exact")),
    "slots": partial(private, variant=lambda model: {"norm_bins": 64}),
    "adaptive": partial(private, variant=lambda model: {"adaptive_clip": _room("clip").TargetFraction()}),
    "ema": partial(private, variant=lambda model: {"filter": _room("filters").EMA(0.2)}),
    "doppler": partial(private, variant=lambda model: {"filter": _room("filters").DOPPLER()}),
    "bands-8": lambda setup: private(setup, lambda model: {}, steps_a_pass=8, correlation=_banded(8)),
    "sat": partial(private, variant=lambda model: _perturbed("SAT", radius=0.02)),
}

# Steps from one refresh of the public statistics to the next: any so many steps in a row hold one refresh. The default
# of `public_rmsprop`, and the steps of a pass.
PERIODS = {"public-by-step": 4, "public-by-pass": 10}
