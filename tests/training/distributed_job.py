"""What several processes do in test_distributed.py; torchrun takes it as `distributed_job.py FOLDER JOB...`.

A job is a function of this file, or one of the faults of mutants/processes.py, planted around its function.
"""

import inspect
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from audited_shards import audited_fault as audited_fault  # jobs
from audited_shards import audited_step as audited_step
from audited_shards import audited_training as audited_training
from by_blocks import TEXTS, made, of_texts
from by_blocks import attempts as attempts  # jobs
from by_blocks import by_blocks as by_blocks
from by_blocks import failed_in_noise as failed_in_noise
from by_blocks import killed_in_noise as killed_in_noise
from by_blocks import moved as moved
from by_blocks import noise_of_shards as noise_of_shards
from by_blocks import one_sharded as one_sharded
from by_blocks import same_step_again as same_step_again
from by_blocks import without_noise as without_noise
from one_ledger import SCENARIOS, counted, early_stop
from one_ledger import killed as killed  # a job
from saved_shards import refused as refused
from saved_shards import resumed as resumed
from saved_shards import saving as saving
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_plan
from mutants.processes import PROCESSES
from privgrad.noise.banded import Banded
from privgrad.processes import ALONE, Processes
from privgrad.sampling.draws import BatchSampler
from privgrad.training.distributed import Distributed

# The first layer is longer than what optimizers take in one block.
WIDTH = 600
FAULTS = {f"fault{index}": mutant for index, mutant in enumerate(PROCESSES)}
OPTIMIZERS = [n for n, c in vars(pg.optim).items() if inspect.isclass(c) and n not in ("PrivateOptimizer",)]


def wide_model() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4))
    body = nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return nn.Sequential(*body, head, nn.Linear(4, 3)).double()


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3))).double()


DATA, PUBLIC = make_data(dtype=torch.float64), make_data(8, torch.float64)


def everything() -> tuple[Tensor, Tensor]:
    inputs, labels = DATA.tensors
    return inputs, labels


class Changing(Dataset[tuple[Tensor, Tensor]]):
    """Each example flipped now and then, as views of images are."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = DATA[index]
        return inputs * random.choice((-1, 1)), label


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:
        if isinstance(part, nn.Sequential):
            fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def of_all(value: Any) -> list[Any]:
    """The value of each process."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def public(model: nn.Module, processes: Processes) -> pg.PublicGradient:
    return pg.PublicGradient(model, loss_fn, PUBLIC, source="a test's", batch_size=4, processes=processes)


def inputs(*, first: int = 0) -> pg.precondition.Preconditioner:
    """Matrices that are computed again at steps 2 and 4."""
    return pg.precondition.inputs(PUBLIC.tensors[0][first:], source="a test's", every=2, batch_size=4)


def released(
    model: nn.Module, plan: pg.PrivacyPlan, processes: Processes = ALONE, optimizer: str = "AdamBC", **options: Any
) -> dict[str, Tensor]:
    """The parameters after the plan's steps."""
    kind = getattr(pg.optim, optimizer)
    wanted = inspect.signature(kind).parameters
    extra: dict[str, Any] = {"horizon": 10} if "horizon" in wanted else {}
    if "public" in wanted:
        extra["public"] = public(model, processes)
        options["side_information"] = extra["public"].source
    private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes, **options)
    moved = kind(model.named_parameters(), lr=0.05, **extra)
    for batch in plan.batches(DATA, processes=processes):
        moved.step(grad=private_grad(batch))
    return processes.gather_state({name: value.detach().clone() for name, value in model.state_dict().items()})


VARIANTS: dict[str, Callable[[nn.Module, Processes], dict[str, Any]]] = {
    "plain": lambda model, processes: {},
    "microbatches": lambda model, processes: {"microbatch_size": 1},
    "vmap": lambda model, processes: {"engine": "vmap"},
    "bam": lambda model, processes: {"perturb": pg.perturb.BAM(0.05)},
    "bam exact": lambda model, processes: {"perturb": pg.perturb.BAM(0.05, mode="exact")},
    "sat": lambda model, processes: {"perturb": pg.perturb.SAT(0.05)},
    "automatic": lambda model, processes: {"clip": pg.clip.Automatic()},
    "preconditioned": lambda model, processes: {"precondition": pg.precondition.public_adam(public(model, processes))},
    "inputs": lambda model, processes: {"precondition": inputs()},
    "adaptive clip": lambda model, processes: {
        "adaptive_clip": pg.clip.TargetFraction(),
        "filter": pg.filters.EMA(0.5),
    },
    "disk": lambda model, processes: {"perturb": pg.perturb.DiSK(0.5), "filter": pg.filters.EMA(0.5)},
}
BY_BLOCKS = ("plain", "microbatches", "automatic", "adaptive clip")  # the variants that take a sharded model


def kinds(name: str, processes: Processes) -> tuple[str, ...]:
    return ("whole", "sharded") if processes.count > 1 and name in BY_BLOCKS else ("whole",)


def same_training(
    processes: Processes,
    folder: Path,
    names: Iterable[str] = ("plain", "microbatches", "sat", "inputs", "adaptive clip"),
) -> dict[str, dict[str, Tensor]]:
    """Some variants, whole and sharded: the parameters at the end."""
    ends: dict[str, dict[str, Tensor]] = {}
    for name in names:
        options = VARIANTS[name]
        for kind in kinds(name, processes):
            model = sharded(small_model()) if kind == "sharded" else small_model(processes.rank)
            plan = make_plan(seed=3, noise_multiplier=0.5, steps=5)
            ends[f"{name}, {kind}"] = released(model, plan, processes, **options(model, processes))
    return ends


def every_training(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    return same_training(processes, folder, VARIANTS)


def input_maps(processes: Processes, folder: Path) -> Any:
    """The matrices of each step in each process."""
    model, plan = small_model(processes.rank), make_plan(seed=3, noise_multiplier=0.5, steps=5)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes, precondition=inputs())
    optimizer, mine = pg.optim.SGD(model.named_parameters(), lr=0.05), list[dict[str, Tensor]]()
    for batch in plan.batches(DATA, processes=processes):
        optimizer.step(grad=private_grad(batch))
        maps = private_grad.state_dict()["precondition"]["maps"]
        mine.append({name: own["matrix"] for name, own in maps.items()})
    return of_all(mine) if processes.count > 1 else [mine]


def every_optimizer(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    ends: dict[str, dict[str, Tensor]] = {}
    for name in OPTIMIZERS:
        model = sharded(wide_model()) if processes.count > 1 else wide_model()
        ends[name] = released(model, make_plan(seed=3, steps=3), processes, optimizer=name)
    return ends


def noise(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Releases without examples: noise only, by process."""

    def nothing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 0.0 * loss_fn(model, batch)

    model = wide_model()
    private_grad = pg.PrivateGradient(model, nothing, plan := make_plan(steps=2), processes=processes)
    releases = [private_grad(batch) for batch in plan.batches(DATA, processes=processes)]
    mine = {str(i): torch.cat([v.flatten() for v in g.values()]) for i, g in enumerate(releases)}
    everyone = of_all(mine)
    return {str(rank): values for rank, values in enumerate(everyone)}


def noise_memory(processes: Processes, folder: Path) -> Any:
    """Releases without examples, of noise with memory under a seed; and the steps of examples without a seed."""

    def nothing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 0.0 * loss_fn(model, batch)

    changed: dict[str, Any] = {"steps": 12, "sample_rate": 0.125, "expected_batch_size": 4, "correlation": Banded(3)}
    plan = make_plan(seed=7, **changed)
    private_grad = pg.PrivateGradient(wide_model(), nothing, plan, processes=processes)
    releases = [private_grad(batch) for batch in plan.batches(DATA, processes=processes)]
    flat = torch.stack([torch.cat([v.flatten() for v in gradient.values()]) for gradient in releases])
    stated = [(gradient.noise_std, gradient.noise_gain, gradient.noise_memory) for gradient in releases]
    plan, data = make_plan(**changed), TensorDataset(torch.arange(32))
    drawn = [batch.examples[0].tolist() for batch in plan.batches(data, processes=processes)]
    mine = flat, [repr(values) for values in stated], drawn
    return of_all(mine) if processes.count > 1 else [mine]


def sampling(processes: Processes, folder: Path) -> Any:
    """Which examples each process drew, by step: of its own entropy, and under a seed."""
    data = TensorDataset(torch.arange(64))
    plans = [make_plan(num_examples=64, expected_batch_size=16, steps=400, seed=seed) for seed in (None, 5)]
    mine = [
        [(batch.examples[0].tolist(), batch.sampling.stream) for batch in plan.batches(data, processes=processes)]
        for plan in plans
    ]
    return of_all(mine)


def parts(processes: Processes, folder: Path) -> Any:
    """Which rows each process drew of its own shards on disk, by scheme and step; and what was said of an overlap.

    The shards are files of Arrow: `batches` maps them into memory, and a stream reads them in order.
    """
    import datasets

    size, rank = 64 // processes.count, processes.rank
    rows, files = range(rank * size, rank * size + size), folder / f"shards of {rank}"
    datasets.Dataset.from_dict({"row": list(rows)}).save_to_disk(files, num_shards=2)
    shards: Any = datasets.load_from_disk(files).with_format("torch")
    names = sorted(map(str, files.glob("*.arrow")))
    stream: Any = datasets.load_dataset("arrow", data_files=names, split="train", streaming=True, cache_dir=str(folder))
    numbers = {"num_examples": 64, "expected_batch_size": 16, "steps": 12}
    drawn = dict[str, Any]()
    for name, changed in {"poisson": {}, "epochs": {"sampling": "epochs"}}.items():
        for seed in (None, 5):
            plan = make_plan(**(numbers | changed), seed=seed)
            batches = plan.batches(shards, rows=rows, processes=processes, epoch_key=folder / "parts.epoch")
            drawn[f"{name} {seed}"] = [batch.examples["row"].tolist() for batch in batches]
        sampler = make_plan(**(numbers | changed), seed=5).sampler(rows, rows=rows, processes=processes)
        drawn[f"{name} stream 5"] = [[*streamed(stream, sampler, step, rows.start)] for step in range(12)]
    plan, own = make_plan(**numbers), torch.arange(64).view(processes.count, -1)
    said = list[str]()
    for data, rows in (
        (own[rank], range(rank, rank + size)),
        (own[0], range(rank * size, rank * size + size)),
        (own[rank], None if rank else range(size)),
    ):
        with pytest.raises(pg.PrivacyError) as caught, warnings.catch_warnings(action="ignore"):  # a part is small
            plan.batches(TensorDataset(data), rows=rows, processes=processes)
        said.append(str(caught.value))
    return of_all([drawn, said])


def streamed(stream: Any, sampler: BatchSampler, step: int, start: int) -> Iterator[int]:
    """Yield the rows that a step uses, of a stream whose first row has the number `start`."""
    for block in stream.iter(batch_size=5):
        end = start + len(block["row"])
        yield from (block["row"][row - start] for row in sampler.members(step, start, end))
        start = end


def fitted_in_parts(processes: Processes, folder: Path) -> Any:
    """A training by epochs, of data in parts, that goes on within its second epoch."""
    size = len(DATA) // processes.count
    rows = range(processes.rank * size, processes.rank * size + size)
    part = TensorDataset(*(column[rows.start : rows.stop] for column in everything()))
    counted = list[int]()
    for steps in (6, 8):  # at most
        model, losses = small_model(), Limited(steps)
        plan = make_plan(sampling="epochs", steps=8, delta=1e-3)
        private_grad = losses.ledger_of = pg.PrivateGradient(model, losses, plan, processes=processes)
        optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
        options: dict[str, Any] = {"output_dir": folder / "parts", "save_seconds": 0.0, "progress": False}
        with suppress(pg.PrivacyError, Limited.StoppedError):
            result = pg.fit(private_grad, optimizer, part, rows=rows, **options)
            counted = [result.updates, result.ledger.releases, result.ledger.participations]
    return of_all([counted, sorted(path.name for path in (folder / "parts").iterdir())])


class Limited:
    """A loss that dies after so many steps."""

    class StoppedError(Exception):
        pass

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.ledger_of: pg.PrivateGradient | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.ledger_of is not None and self.ledger_of.state_dict()["step"] >= self._steps:
            raise Limited.StoppedError
        return loss_fn(model, batch)


def empty_batches(processes: Processes, folder: Path) -> Any:
    """A rate so low that most processes, and some steps, have no example."""
    for model in (small_model(), sharded(small_model())):
        plan = make_plan(sample_rate=1 / 32, expected_batch_size=1, seed=2, steps=12)
        drawn = [batch.size for batch in plan.batches(DATA, processes=processes)]
        private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes)
        optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
        for batch in plan.batches(DATA, processes=processes):
            optimizer.step(grad=private_grad(batch))
    everyone = of_all(drawn)
    return [everyone, private_grad.ledger.releases]


def a_failure_is_everyones(processes: Processes, folder: Path) -> Any:
    """The last process' loss raises in the third step; then all go on with the fourth. Whole, and sharded."""
    return [_failing(processes, folder, kind) for kind in ("whole", "sharded")]


def _failing(processes: Processes, folder: Path, kind: str) -> Any:
    calls, model = 0, sharded(small_model()) if kind == "sharded" else small_model()

    def breaking(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if calls == 2 and processes.rank == processes.count - 1:
            raise ArithmeticError("broken")
        return loss_fn(model, batch)

    plan = make_plan(sample_rate=1.0, expected_batch_size=32, seed=None, steps=5)
    private_grad = pg.PrivateGradient(model, breaking, plan, ledger=folder / f"{kind}.jsonl", processes=processes)
    outcomes: list[str] = []
    for calls, batch in enumerate(plan.batches(DATA, processes=processes)):  # noqa: B007
        try:
            private_grad(batch)
            outcomes.append("released")
        except (pg.PrivacyError, ArithmeticError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    everyone = of_all(outcomes)
    private_grad.ledger.close()
    return [everyone, private_grad.ledger.releases]


def refusals(processes: Processes, folder: Path) -> Any:
    """What each of these says, in every process."""
    plan, model, data, rule = make_plan(seed=0), small_model(), DATA, pg.clip.TargetFraction()

    def untold() -> None:
        pg.PrivateGradient(model, loss_fn, plan)

    def untold_batches() -> None:
        next(plan.batches(data))

    def foreign_batch() -> None:
        private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes)
        batch = next(plan.batches(data, processes=processes))
        private_grad(replace(batch, sampling=replace(batch.sampling, rank=0, processes=1)))

    def other_plans() -> None:
        mine = make_plan(seed=0, noise_multiplier=1.0 + processes.rank)
        pg.PrivateGradient(model, loss_fn, mine, processes=processes)

    def other_public() -> None:
        precondition = inputs(first=processes.rank)
        pg.PrivateGradient(model, loss_fn, plan, processes=processes, precondition=precondition)

    def other_filter() -> None:
        own = pg.filters.EMA(0.5 + processes.rank / 8)
        pg.PrivateGradient(model, loss_fn, plan, processes=processes, filter=own)

    def wrapped() -> None:
        pg.PrivateGradient(DistributedDataParallel(small_model()), loss_fn, plan, processes=processes)

    def wrapped_inside() -> None:
        pg.PrivateGradient(nn.Sequential(DistributedDataParallel(small_model())), loss_fn, plan, processes=processes)

    def wrapped_by_fsdp1() -> None:
        inner = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=True)
        pg.PrivateGradient(inner, loss_fn, plan, processes=processes)

    def part_of_the_world() -> None:
        Distributed(cast("dist.ProcessGroup", dist.new_group([0])))

    def other_order() -> None:
        plan.batches(TensorDataset(*(values.roll(processes.rank, 0) for values in everything())), processes=processes)

    def other_length() -> None:
        twice = [torch.cat([values, values]) for values in everything()]
        plan.batches(TensorDataset(*(values[processes.rank :] for values in twice)), processes=processes)

    def changing() -> None:
        for _ in plan.batches(Changing(), processes=processes):
            pass

    def groups() -> None:
        pg.PrivateGradient(model, loss_fn, make_plan(seed=0, group_size=2), processes=processes)

    def not_private() -> None:
        pg.PrivateGradient(model, loss_fn, plan, perturb=pg.perturb.RawSAM(0.1), processes=processes)

    def by_blocks(model: Any, **options: Any) -> None:
        pg.PrivateGradient(model, loss_fn, plan, processes=processes, **options)

    def vmap_by_blocks() -> None:
        by_blocks(sharded(small_model()), engine="vmap")

    def perturbed_by_blocks() -> None:
        by_blocks(sharded(small_model()), perturb=pg.perturb.SAT(0.1))

    def preconditioned_by_blocks() -> None:
        by_blocks(sharded(small_model()), precondition=inputs())

    def tensor_parallel() -> None:
        mesh = init_device_mesh("cpu", (processes.count,))
        by_blocks(parallelize_module(small_model(), mesh, {"0": ColwiseParallel()}))

    def two_dimensions() -> None:
        mesh = init_device_mesh("cpu", (1, processes.count), mesh_dim_names=("replicate", "shard"))
        by_blocks(fully_shard(small_model(), mesh=mesh))

    def other_dimension() -> None:
        mesh = init_device_mesh("cpu", (processes.count,))
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        by_blocks(fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1)))

    def a_list_of_modules() -> None:
        mesh, model = init_device_mesh("cpu", (processes.count,)), small_model()
        fully_shard([model[0], model[2]], mesh=mesh)
        by_blocks(fully_shard(model, mesh=mesh))

    def tied_blocks() -> None:
        mesh, model = init_device_mesh("cpu", (processes.count,)), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        model[1].weight = model[0].weight
        fully_shard(model[0], mesh=mesh)
        by_blocks(fully_shard(model, mesh=mesh))

    def whole_over_blocks() -> None:
        """A module that the engine must take whole, with a block in it."""
        mesh, model = init_device_mesh("cpu", (processes.count,)), made("whole over blocks")
        fully_shard(model.get_submodule("layers.0.layer"), mesh=mesh)
        fully_shard(model, mesh=mesh)
        private_grad = pg.PrivateGradient(model, of_texts, plan, processes=processes)
        private_grad(next(plan.batches(TensorDataset(TEXTS), processes=processes)))

    def computed_weight() -> None:
        model = small_model()
        nn.utils.parametrizations.weight_norm(model[0])
        by_blocks(sharded(model))

    def other_bound() -> None:
        """C of the first process, for which the noise is made, is half of that of the others."""
        private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes, adaptive_clip=rule)
        if processes.rank == 0:
            state = private_grad.state_dict()
            private_grad.load_state_dict(state | {"adaptive_clip": state["adaptive_clip"] | {"max_grad_norm": 0.5}})
        private_grad(next(plan.batches(data, processes=processes)))

    def other_groups() -> None:
        """A process draws new groups in the middle; a second try is refused as the first one is."""
        turns = make_plan(correlation=Banded(2))
        private_grad = pg.PrivateGradient(model, loss_fn, turns, processes=processes)
        old, new = (list(turns.batches(data, processes=processes)) for _ in range(2))
        private_grad(old[0])
        mine = new if processes.rank == processes.count - 1 else old
        with pytest.raises(pg.PrivacyError):
            private_grad(mine[1])
        private_grad(mine[2])

    def alone(
        update: Callable[[Any, pg.NoisyGradient, nn.Module], None], model: nn.Sequential | None = None, ranks: int = 1
    ) -> None:
        """Three steps, with an update in only so many processes after the first one."""
        model = small_model() if model is None else model
        private_grad = pg.PrivateGradient(model, loss_fn, plan, processes=processes)
        optimizer = pg.optim.AdamBC(model.named_parameters(), lr=1e-3)
        for step, batch in enumerate(plan.batches(data, processes=processes)):
            gradient = private_grad(batch)
            if step != 1 or processes.rank < ranks:
                update(optimizer, gradient, model)
            if step == 2:
                return

    def update_in_one() -> None:
        alone(lambda optimizer, gradient, model: optimizer.step(grad=gradient))

    def update_in_all_but_one() -> None:
        alone(lambda optimizer, gradient, model: optimizer.step(grad=gradient), ranks=processes.count - 1)

    def update_of_one_shard() -> None:
        alone(lambda optimizer, gradient, model: optimizer.step(grad=gradient), sharded(small_model()))

    def schedule_in_one() -> None:
        def update(optimizer: Any, gradient: pg.NoisyGradient, model: nn.Module) -> None:
            optimizer.step(grad=gradient)
            if processes.rank == 0:
                optimizer.param_groups[0]["lr"] *= 0.9

        alone(update, ranks=processes.count)

    def loaded_in_one() -> None:
        def update(optimizer: Any, gradient: pg.NoisyGradient, model: nn.Module) -> None:
            if processes.rank == 0:
                model.load_state_dict(small_model(seed=1).state_dict())

        alone(update)

    def averaged_in_one() -> None:
        """Legitimate: the first process puts other weights in, evaluates, and takes them out, up to rounding."""

        def update(optimizer: Any, gradient: pg.NoisyGradient, model: nn.Module) -> None:
            optimizer.step(grad=gradient)
            if processes.rank == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2).div_(2 - 1e-7)  # as float32 would round

        alone(update, ranks=processes.count)

    def frozen() -> None:
        """Legitimate: only a bias is trained, and no process updates it at first."""
        model = small_model()
        for parameter in list(model.parameters())[1:]:
            parameter.requires_grad_(False)
        alone(lambda optimizer, gradient, model: None, model)

    def cast_by_fsdp() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        pg.PrivateGradient(sharded(small_model(), mp_policy=policy), loss_fn, plan, processes=processes)

    def same_dtype_of_fsdp() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float64)
        pg.PrivateGradient(sharded(small_model(), mp_policy=policy), loss_fn, plan, processes=processes)

    def autocast_of_fsdp() -> None:
        """What the refusal of a cast advises."""

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_fn(model, (batch[0].float(), batch[1]))

        private_grad = pg.PrivateGradient(sharded(small_model().float()), loss, plan, processes=processes)
        private_grad(next(plan.batches(data, processes=processes)))

    def other_record() -> None:
        """The first process moves to the file of an earlier attempt, in the middle of a loop."""
        private_grad = pg.PrivateGradient(small_model(), loss_fn, fresh := make_plan(), processes=processes)
        if processes.rank == 0:
            private_grad.record_in(folder / f"{uuid4()}.jsonl")
            private_grad.ledger.charge(private_grad.plan.release, draw="earlier:0", limit=fresh.steps)
        private_grad(next(fresh.batches(data, processes=processes)))

    def other_ledger() -> None:
        ledger = pg.Ledger(folder / f"{uuid4()}.jsonl")
        pg.PrivateGradient(model, loss_fn, plan, processes=processes, ledger=ledger)

    def other_path() -> None:
        """A path in the last process only: the first one, which keeps the record, would have none."""
        ledger = folder / f"{uuid4()}.jsonl" if processes.rank == processes.count - 1 else None
        pg.PrivateGradient(model, loss_fn, plan, processes=processes, ledger=ledger)

    def other_layers() -> None:
        pg.PrivateGradient(nn.Linear(5, 3 + processes.rank), loss_fn, plan, processes=processes)

    def other_frozen() -> None:
        mine = small_model()
        mine[0].requires_grad_(processes.rank == 0)
        pg.PrivateGradient(mine, loss_fn, plan, processes=processes)

    def other_blocks() -> None:
        mine, mesh = small_model(), init_device_mesh("cpu", (processes.count,))
        if processes.rank == 0:
            fully_shard(mine[0], mesh=mesh)
        by_blocks(fully_shard(mine, mesh=mesh))

    def sharded_later() -> None:
        mine = small_model()
        private_grad = pg.PrivateGradient(mine, loss_fn, plan, processes=processes)
        sharded(mine)
        private_grad(next(plan.batches(data, processes=processes)))

    def sharded_anew() -> None:
        """Legitimate: a whole model is sharded for another training."""
        mine = small_model()
        by_blocks(mine)
        private_grad = pg.PrivateGradient(sharded(mine), loss_fn, plan, processes=processes)
        private_grad(next(plan.batches(data, processes=processes)))

    def read_outside() -> None:
        """The root reads the weight of a block, which FSDP keeps there after the forward pass."""

        def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_fn(model, (batch[0] + model(batch[0]) @ model[2][0].weight @ model[0].weight, batch[1]))

        mine, mesh = small_model(), init_device_mesh("cpu", (processes.count,))
        fully_shard(mine[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(mine, mesh=mesh)
        private_grad = pg.PrivateGradient(mine, loss, plan, processes=processes)
        private_grad(next(plan.batches(data, processes=processes)))

    def method_of_fsdp() -> None:
        mine: Any = sharded(small_model())
        register_fsdp_forward_method(mine, "extra_repr")
        by_blocks(mine)

    def fit_alone(*, rate: float = 0.1, output_dir: Path | None = None, **options: Any) -> None:
        mine = sharded(small_model())
        private_grad = pg.PrivateGradient(mine, loss_fn, plan, processes=processes)
        optimizer = pg.optim.SGD(mine.named_parameters(), lr=rate)
        pg.fit(private_grad, optimizer, data, output_dir=output_dir, progress=False, **options)

    def other_evaluations() -> None:
        fit_alone(evaluate=(lambda model: {"loss": 0.0}) if processes.rank == 0 else None)

    def other_rates() -> None:
        fit_alone(rate=0.1 + processes.rank)

    def other_folders() -> None:
        fit_alone(output_dir=folder / f"{uuid4()}" if processes.rank == 0 else None)

    def truncated() -> None:
        next(make_plan(sampling="truncated", max_batch_size=20).batches(data, processes=processes))

    said: dict[str, str] = {}
    cases = [
        untold,
        untold_batches,
        foreign_batch,
        other_plans,
        other_public,
        other_filter,
        other_groups,
        wrapped,
        wrapped_inside,
        wrapped_by_fsdp1,
    ]
    cases += [part_of_the_world, other_order, other_length, changing, groups, not_private, other_bound, truncated]
    cases += [vmap_by_blocks, perturbed_by_blocks, preconditioned_by_blocks, tensor_parallel, two_dimensions]
    cases += [other_dimension, a_list_of_modules, computed_weight, tied_blocks, whole_over_blocks]
    cases += [update_in_one, update_in_all_but_one, update_of_one_shard, schedule_in_one, loaded_in_one]
    cases += [averaged_in_one, frozen, cast_by_fsdp, same_dtype_of_fsdp, autocast_of_fsdp, other_record, other_ledger]
    cases += [other_path, other_layers, other_frozen, other_rates, other_folders, other_evaluations, other_blocks]
    cases += [sharded_later, sharded_anew, read_outside, method_of_fsdp]
    for case in cases:
        try:
            case()
            said[case.__name__] = "nothing"
        except pg.PrivacyError as error:
            said[case.__name__] = str(error)
    return of_all(said)


def one_ledger(processes: Processes, folder: Path) -> Any:
    return of_all(counted(processes, folder, SCENARIOS))


def one_early_stop(processes: Processes, folder: Path) -> Any:
    return of_all(counted(processes, folder, [early_stop]))


def losses(processes: Processes, folder: Path) -> list[float]:
    """Final training losses of trainings with noise of their own."""
    ends: list[float] = []
    for _ in range(10):
        model = small_model()
        released(model, make_plan(steps=6), processes, optimizer="SGD")
        ends.append(float(loss_fn(model, everything()).mean().detach()))
    return ends


def fitted(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Trainings through fit to the step in the folder's file "steps", whole and sharded; later ones go on."""
    steps = int((folder / "steps").read_text())
    ends: dict[str, dict[str, Tensor]] = {}
    for kind in ("whole", "sharded"):
        model = sharded(small_model()) if kind == "sharded" and processes.count > 1 else small_model()
        private_grad = pg.PrivateGradient(model, loss_fn, make_plan(seed=4, steps=steps), processes=processes)
        pg.fit(
            private_grad,
            pg.optim.AdamBC(model.named_parameters(), lr=0.05),
            DATA,
            evaluate=lambda model: {"loss": float(loss_fn(model, everything()).mean())},
            output_dir=folder / kind,
            save_seconds=0.0,
            progress=False,
        )
        ends[kind] = processes.gather_state(
            {name: value.detach().clone() for name, value in model.state_dict().items()}
        )
    return ends


def take_part(folder: Path, jobs: Sequence[str]) -> None:
    """Do the jobs in one process of those that torch.distributed knows; the first writes down the results."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="a fixed seed makes the noise predictable")
    processes = Distributed()
    for name in jobs:
        with pytest.MonkeyPatch.context() as patch:
            job = name
            if name in FAULTS:
                FAULTS[name].plant(patch)
                job = cast("dict[str, str]", FAULTS[name].given)["job"]
            result = globals()[job](processes, folder)
        if processes.rank == 0:
            torch.save(result, folder / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


def child(rank: int, count: int, store: Path, folder: Path, jobs: Sequence[str]) -> None:
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=count)
    take_part(folder, jobs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    take_part(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort a process that takes its interpreter down
