"""Faults of input maps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere
from privgrad.engine.factors import mapped
from privgrad.engine.factors.mapped import InputMap
from privgrad.gradient.factor import Dense, Factor
from privgrad.precondition.input_maps import Inputs


def matrices_of_the_private_batch(patch: Patch) -> None:
    real = pg.PrivateGradient._transform

    def wrong(self: pg.PrivateGradient, batch: pg.Batch, *rest: Any) -> pg.precondition.Transform:
        if isinstance(self._precondition, Inputs):
            self._precondition.examples, self._precondition._step = batch.examples[0], -1
        return real(self, batch, *rest)

    patch.setattr(pg.PrivateGradient, "_transform", wrong)


def matrices_of_another_layer(patch: Patch) -> None:
    real = mapped.with_mapped_inputs

    def wrong(chunk: Mapping[str, Factor], maps: Mapping[str, InputMap]) -> dict[str, Factor]:
        shapes = [own.matrix.shape for own in maps.values()]
        alike = [name for name, own in maps.items() if shapes.count(own.matrix.shape) > 1]
        others = dict(zip(alike, [*alike[1:], *alike[:1]], strict=True))
        swapped = {n: replace(own, matrix=maps[others.get(n, n)].matrix) for n, own in maps.items()}
        return real(chunk, swapped)

    everywhere(patch, real, wrong)


class Believed(Dense):
    """Gradients with the norms that they had before the matrix."""

    def __init__(self, grads: Tensor, before: Factor) -> None:
        super().__init__(grads)
        self.before = before

    def norms(self, inverse_scales: Tensor | None = None) -> Tensor:
        return self.before.norms(inverse_scales)


def norms_from_before_the_matrix(patch: Patch) -> None:
    real = mapped.with_mapped_inputs

    def wrong(chunk: Mapping[str, Factor], maps: Mapping[str, InputMap]) -> dict[str, Factor]:
        return {name: Believed(factor.dense(), chunk[name]) for name, factor in real(chunk, maps).items()}

    everywhere(patch, real, wrong)


def another_gain_per_example(patch: Patch) -> None:
    real = mapped.with_mapped_inputs

    def wrong(chunk: Mapping[str, Factor], maps: Mapping[str, InputMap]) -> dict[str, Factor]:
        found = real(chunk, maps)
        gains = torch.linspace(0.5, 2, len(next(iter(chunk.values())).norms()))
        return {
            name: Believed(factor.dense() * gains.view(-1, *[1] * len(factor.shape)), factor)
            for name, factor in found.items()
        }

    everywhere(patch, real, wrong)


INPUT_MAPS = [
    Mutant(
        "matrices from the private batch",
        matrices_of_the_private_batch,
        "test_input_maps.test_one_example_moves_the_sum_by_at_most_the_bound",
    ),
    Mutant(
        "the matrix of another layer",
        matrices_of_another_layer,
        "test_input_maps.test_a_release_equals_the_reference",
        {"engine": "factored", "power": 0.5, "ridge": 0.1},
    ),
    Mutant(
        "norms from before the matrix",
        norms_from_before_the_matrix,
        "test_input_maps.test_one_example_moves_the_sum_by_at_most_the_bound",
    ),
    Mutant(
        "a gain for each example after its norm",
        another_gain_per_example,
        "test_input_maps.test_one_example_moves_the_sum_by_at_most_the_bound",
    ),
]
