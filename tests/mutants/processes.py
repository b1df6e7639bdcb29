"""Faults of several processes: planted in each of them, by tests/distributed_job.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import privgrad as pg
from mutants.draws import scaled
from mutants.mutant import Mutant, Patch, everywhere
from privgrad import private_gradient
from privgrad.clip import clipping
from privgrad.processes import require_all_processes
from privgrad.rng import RandomSource, Stream
from privgrad.sampling import draws as sampling
from privgrad.training import run
from privgrad.training.distributed import Distributed
from privgrad.training.run import charge_unused
from privgrad.training.shards import Part
from privgrad.types import ClippedSum, NoisyGradient, Place


def received(change: Callable[[Tensor, float], Tensor]) -> Callable[[Patch], None]:
    """Plants what a process makes of the values that it receives."""

    def plant(patch: Patch) -> None:
        real = Distributed.broadcast

        def wrong(self: Distributed, gradient: NoisyGradient) -> NoisyGradient:
            got = real(self, gradient)
            std: Any = got.noise_std
            return NoisyGradient({name: change(value, std) for name, value in got.items()}, std)

        patch.setattr(Distributed, "broadcast", wrong)

    return plant


def added_up(value: Tensor, std: float) -> Tensor:
    noise = own(value, std)
    torch.distributed.all_reduce(noise)
    return value + noise


def own(value: Tensor, std: float) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return std * torch.randn(value.shape, dtype=value.dtype, generator=generator)


def one_stream(patch: Patch) -> None:
    """Every process draws as many words as it has examples, from the start of the same stream."""
    real = sampling._poisson

    def wrong(stream: Stream, step: int, sample_rate: float, count: int, _: int) -> np.ndarray:
        ranks = torch.distributed.get_world_size()
        return real(stream, step, sample_rate, count // ranks) * ranks + torch.distributed.get_rank()

    def one_root(self: RandomSource, seed: int | None = None) -> None:
        self.seed, self._root = seed, bytes(32)

    everywhere(patch, real, wrong)
    patch.setattr(RandomSource, "__init__", one_root)


def untold(patch: Patch) -> None:
    everywhere(patch, require_all_processes, lambda *_: None)


def plans_of_their_own(patch: Patch) -> None:
    patch.setattr(pg.PrivateGradient, "_require_shared", lambda *_: None)


def uncharged(patch: Patch) -> None:
    def in_one(private_grad: pg.PrivateGradient) -> None:
        if private_grad.processes.rank == 0:
            charge_unused(private_grad)

    patch.setattr(run, "charge_unused", in_one)


def unseen(patch: Patch) -> None:
    patch.setattr(Distributed, "fingerprint", lambda *_: [])


def one_counter(patch: Patch) -> None:
    """Each shard takes the first numbers of its parameter's noise."""
    patch.setattr(Part, "place", property(lambda part: Place(0, part.shard.numel())))


def bare_shard(patch: Patch) -> None:
    real = private_gradient.add_noise

    def wrong(clipped: ClippedSum, *, noise_multiplier: float, process: int, **options: Any) -> NoisyGradient:
        return real(clipped, noise_multiplier=0.0 if process else noise_multiplier, process=process, **options)

    patch.setattr(private_gradient, "add_noise", wrong)


def noise_before_the_sum(patch: Patch) -> None:
    real = Part.scattered

    def wrong(self: Part, total: Tensor | None, dtype: torch.dtype) -> Tensor:
        noise = own(torch.zeros(self.shard.shape, dtype=dtype), 1.0)
        return real(self, noise if total is None else total + noise, dtype)

    patch.setattr(Part, "scattered", wrong)


def norms_of_all(patch: Patch) -> None:
    """Norms as of a model that is split by tensor parallel: each process's is taken for a part of one norm."""
    real = clipping._joint_norm
    patch.setattr(clipping, "_joint_norm", lambda norms: real(norms) * torch.distributed.get_world_size() ** 0.5)


_NOISE = "test_distributed.test_one_noise_whatever_the_number_of_processes"
_SHARDS = "test_distributed.test_each_process_draws_its_own_part_of_one_noise"
_BLOCKS = "test_distributed.test_shards_are_clipped_and_added_as_the_whole"
_DRAWS = "test_distributed.test_each_process_draws_its_own_examples_from_its_own_stream"
_REFUSALS = "test_distributed.test_what_would_be_wrong_is_refused_in_every_process"
_LEDGER = "test_distributed.test_all_processes_state_the_same_of_one_ledger"
_STOP = {"job": "one_early_stop", "case": "early_stop"}
PROCESSES = [
    Mutant("each of several processes adds a noise", received(added_up), _NOISE, {"job": "noise"}),
    Mutant("each of several processes goes by a noise of its own", received(own), _NOISE, {"job": "noise"}),
    Mutant("noise of one of two processes: too little by a root", scaled(0.5**0.5), _NOISE, {"job": "noise"}),
    Mutant("the same stream draws in all processes", one_stream, _DRAWS, {"job": "sampling"}),
    Mutant(
        "a process that was not told of the others goes on", untold, _REFUSALS, {"job": "refusals", "case": "untold"}
    ),
    Mutant(
        "processes with plans of their own", plans_of_their_own, _REFUSALS, {"job": "refusals", "case": "other_plans"}
    ),
    Mutant("a process without the charge of an early stop", uncharged, _LEDGER, _STOP),
    Mutant("shards with one counter of noise", one_counter, _SHARDS, {"job": "noise_of_shards"}),
    Mutant("a shard without noise", bare_shard, _SHARDS, {"job": "noise_of_shards"}),
    Mutant("each process adds a noise before the sum", noise_before_the_sum, _SHARDS, {"job": "noise_of_shards"}),
    Mutant("norms of examples added up over processes", norms_of_all, _BLOCKS, {"job": "one_sharded"}),
    Mutant("a process that alone updates its model", unseen, _REFUSALS, {"job": "refusals", "case": "update_in_one"}),
]
