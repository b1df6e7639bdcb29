"""Jobs on sharded models of several kinds, which the tests compare with one process."""

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad import private_gradient
from privgrad.processes import ALONE, Processes
from privgrad.training import distributed, shards

WORDS, WIDTH, LENGTH = 23, 8, 5
TEXTS = torch.randint(0, WORDS - 1, (32, LENGTH), generator=torch.Generator().manual_seed(1))
TEXTS[20, 0] = WORDS - 1  # a rare word: one process has it
MARK = 50.0  # in the embedding of the rare word


class Layer(nn.Module):
    def __init__(self, inner: nn.Module | None = None, hidden: int = 13) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x if self.inner is None else self.inner(x)


class Joined(nn.Module):
    """Examples side by side with a parameter, which the engine cannot attribute: it takes the module whole."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(1, LENGTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.shift])
        return x + self.layer(both[:-1] + both[-1:])


class Split(nn.Module):
    """One function by two ways. The engine takes the module whole once a batch needs the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(1, LENGTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0, 0] > MARK / 2).any()):
            both = torch.cat([x, self.shift])
            return self.layer(both[:-1] + both[-1:])
        return self.layer(x + self.shift)


class Texts(nn.Module):
    """A language model of layers, each of which is sharded by itself."""

    def __init__(self, layers: list[nn.Module], *, tied: bool = False, recomputed: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers, self.recomputed = nn.ModuleList(layers), recomputed
        if tied:
            self.head.weight = self.words.weight

    def forward(self, texts: Tensor) -> Tensor:
        x = self.words(texts)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return self.head(x)


class Routed(nn.Module):
    """Two experts of which each example reaches one, by its first word."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1, :1] > 1.5  # few
        return x + torch.where(chosen, self.rare(x), self.usual(x))


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name)
    return model


def marked(model: Texts) -> Texts:
    model.words.requires_grad_(requires_grad=False)
    model.words.weight[WORDS - 1, 0] = MARK
    return model


class Inner(Layer):
    """A layer that is sharded by itself within another one."""


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Texts([Layer(), Layer()]),
    "tied": lambda: Texts([Layer()], tied=True),
    "recomputed": lambda: Texts([Layer(), Layer()], recomputed=True),
    "nested": lambda: Texts([Layer(Inner()), Layer(Inner())]),
    "whole": lambda: Texts([Joined(), Layer()]),
    "frozen": lambda: frozen(Texts([Layer(), Layer()])),
    "routed": lambda: Texts([Routed()]),
    "attention": lambda: Texts([nn.TransformerEncoderLayer(WIDTH, 2, 11, dropout=0.0, batch_first=True)]),
    "recurrent": lambda: Texts([Recurrent()]),
    "whole over blocks": lambda: Texts([Joined()]),
    "split": lambda: marked(Texts([Split(), Layer()])),
    "one layer": lambda: Texts([nn.Linear(WIDTH, WIDTH)]),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def split(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.modules():
        if isinstance(part, Inner):
            fully_shard(part, mesh=mesh)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def of_texts(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (texts,) = batch
    return F.cross_entropy(model(texts)[:, :-1].mT, texts[:, 1:], reduction="none").mean(1)


def of_two_views(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return of_texts(model, batch) + of_texts(model, (batch[0].flip(1),))


def ends(
    name: str,
    processes: Processes,
    loss: Any = of_texts,
    *,
    evaluated: bool = False,
    numbers: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The parameters after two steps."""
    model = made(name) if processes is ALONE else split(made(name))
    plan = make_plan(**{"steps": 2, "seed": 3, "noise_multiplier": 0.5, **(numbers or {})})
    private_grad = pg.PrivateGradient(model, loss, plan, processes=processes, **options)
    optimizer = pg.optim.AdamBC([pair for pair in model.named_parameters() if pair[1].requires_grad], lr=0.05)
    for batch in plan.batches(TensorDataset(TEXTS), processes=processes):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="PrivateGradient computes 'layers.0' for each example by itself")
            gradient = private_grad(batch)
        optimizer.step(grad=gradient)
        if evaluated:  # by FSDP's own hooks, which leave the parameters of the root whole
            with torch.no_grad():
                model(TEXTS)
    return processes.gather_state({key: value.detach().clone() for key, value in model.state_dict().items()})


CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in MODELS},
    "microbatches": {"name": "layers", "microbatch_size": 2},
    "two views": {"name": "layers", "loss": of_two_views},
    "evaluated": {"name": "layers", "evaluated": True},
    "on a grid": {"name": "layers", "numbers": {"noise_on_grid": True}},
    "with memory": {
        "name": "layers",
        "numbers": {"correlation": pg.noise.Banded(2), "sample_rate": 0.125, "expected_batch_size": 4},
    },
    "few": {"name": "layers", "numbers": {"sample_rate": 1 / 32, "expected_batch_size": 1, "steps": 4}},
    "norms": {"name": "layers", "norm_bins": 4},
    "again": {
        "name": "split",
        "microbatch_size": 4,
        "numbers": {"sample_rate": 1.0, "expected_batch_size": 32, "steps": 2},
    },
}
del CASES["split"], CASES["whole over blocks"]


def by_blocks(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {case: ends(processes=processes, **given) for case, given in CASES.items()}


def one_sharded(processes: Processes, folder: Path) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_LARGE", 50)  # some by themselves, others together
        return ends("layers", processes)


def of_nothing(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return 0.0 * model(batch[0]).sum(1)


def wide(processes: Processes) -> nn.Module:
    """One weight, of which each process has a million numbers."""
    model = nn.Sequential(nn.Linear(1000, 1000 * processes.count, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (processes.count,)))
    return model


ONES = TensorDataset(torch.ones(32, 1000))


def noise_of_shards(processes: Processes, folder: Path) -> Tensor:
    """Two releases of noise only: all numbers of a weight whose rows are spread over the processes, by step."""
    plan = make_plan(steps=2)
    private_grad = pg.PrivateGradient(wide(processes), of_nothing, plan, processes=processes)
    releases = [private_grad(batch)["0.weight"] for batch in plan.batches(ONES, processes=processes)]
    return torch.stack(processes.gather_state(releases))


def _draw(processes: Processes, folder: Path, name: str, end: Callable[[], None] | None = None) -> str:
    """Write down the noise of each process's shard; `end` comes next, in the last process. Return a second try's end.

    The ledger has the first step of earlier calls, so each call draws the noise of another batch for one step.
    """
    real, plan, record = private_gradient.add_noise, make_plan(), folder / "ledger.jsonl"

    def noted(*args: Any, process: int, **options: Any) -> pg.NoisyGradient:
        gradient = real(*args, process=process, **options)
        torch.save(gradient["0.weight"], folder / f"{name}{process}.pt")
        if end is not None and process == processes.count - 1:
            end()
        return gradient

    ledger = record if processes.rank == 0 else None
    private_grad = pg.PrivateGradient(wide(processes), of_nothing, plan, processes=processes, ledger=ledger)
    one, other, *_ = plan.batches(ONES, processes=processes)
    with pytest.MonkeyPatch.context() as patch, suppress(ArithmeticError, pg.PrivacyError):
        patch.setattr(private_gradient, "add_noise", noted)
        private_grad(one)
    try:
        private_grad(other)
    except pg.PrivacyError as error:
        return str(error)
    return ""


def killed_in_noise(processes: Processes, folder: Path) -> None:
    """A job of its own: the last process is killed after it has drawn noise, and the first one ends with an error."""
    _draw(processes, folder, "killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
    os._exit(0)


def failed_in_noise(processes: Processes, folder: Path) -> list[str]:
    """The same step from the ledger of `killed_in_noise`; it fails in the last process after its noise was drawn."""

    def fail() -> None:
        raise ArithmeticError

    everyone: list[Any] = [None] * processes.count
    dist.all_gather_object(everyone, _draw(processes, folder, "failed", fail))
    return everyone


def same_step_again(processes: Processes, folder: Path) -> str:
    """The same step from the ledger of `failed_in_noise`."""
    return _draw(processes, folder, "again")


def attempts(processes: Processes, folder: Path) -> list[list[bool]]:
    """For each process, whether each attempt at a step ended the step."""
    mine, real = list[bool](), distributed._Attempt.__exit__

    def noted(self: distributed._Attempt, *exception: Any) -> bool:
        is_changed = real(self, *exception)
        mine.append(self.is_whole)
        return is_changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed._Attempt, "__exit__", noted)
        ends(processes=processes, **CASES["again"])
    everyone: list[Any] = [None] * processes.count
    dist.all_gather_object(everyone, mine)
    return everyone


class Moved(TorchDispatchMode):
    """A mode that notes the collectives: the name of each, and the bytes of the largest tensor that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.seen.append((func.__name__.split(".")[0], max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def moved(processes: Processes, folder: Path) -> dict[str, Any]:
    """The collectives of a steady step by dtype of the parameters: private, and ordinary by FSDP's own hooks."""
    found = dict[str, Any]()
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = split(Texts([Layer(hidden=1500) for _ in range(3)]).to(dtype))
        plan = make_plan(steps=3, sample_rate=1.0, expected_batch_size=32)
        private_grad, private = pg.PrivateGradient(model, of_texts, plan, processes=processes), list[tuple[str, int]]()
        for batch in plan.batches(TensorDataset(TEXTS), processes=processes):
            with Moved() as mode:
                private_grad(batch)
            private = mode.seen
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            of_texts(model, (TEXTS,)).mean().backward()
            with Moved() as ordinary:
                of_texts(model, (TEXTS,)).mean().backward()
        blocks = [sum(p.numel() for p in layer.parameters()) for layer in model.get_submodule("layers").children()]
        whole = sum(p.numel() for p in model.parameters())
        sizes = {"largest": max(*blocks, whole - sum(blocks)), "whole": whole}
        found[str(dtype)] = {"private": private, "ordinary": ordinary.seen, **sizes}
    return found


def without_noise(processes: Processes, folder: Path) -> dict[str, dict[str, Tensor]]:
    """A gradient in float32, and one of the same weights in float64."""
    found = dict[str, dict[str, Tensor]]()
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = Texts([Layer(hidden=150), Layer(hidden=150)]).to(dtype)
        model = model if processes is ALONE else split(model)
        plan = make_plan(sample_rate=1.0, expected_batch_size=32, noise_multiplier=0.0, max_grad_norm=0.5)
        private_grad = pg.PrivateGradient(model, of_texts, plan, processes=processes)
        gradient = private_grad(next(plan.batches(TensorDataset(TEXTS), processes=processes)))
        found[str(dtype)] = processes.gather_state(dict(gradient))
    return found
