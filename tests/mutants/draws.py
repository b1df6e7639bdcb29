"""Faults of noise, random streams and sampling."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere, plant_sum
from privgrad import rng
from privgrad.noise import gaussian as noise
from privgrad.rng import RandomSource, Stream
from privgrad.sampling import draws as sampling
from privgrad.sampling import epochs, loading
from privgrad.sampling import loading as reading
from privgrad.types import ClippedSum, NoisyGradient

AddNoise = Callable[..., NoisyGradient]


def told_truly(planted: Callable[..., NoisyGradient]) -> Callable[[Patch], None]:
    """Plants another add_noise, whose result says the noise that it should have had.

    Args:
        planted: (the real one, the sum, its options) -> the gradient.
    """

    def plant(patch: Patch) -> None:
        real = noise.add_noise

        def wrong(clipped: ClippedSum, **options: Any) -> NoisyGradient:
            stated = options["noise_multiplier"] * clipped.sensitivity / options["divisor"]
            return replace(planted(real, clipped, **options), noise_std=stated)

        everywhere(patch, real, wrong)

    return plant


def scaled(factor: float) -> Callable[[Patch], None]:
    def planted(real: AddNoise, clipped: ClippedSum, *, noise_multiplier: float, **options: Any) -> NoisyGradient:
        return real(clipped, noise_multiplier=factor * noise_multiplier, **options)

    return told_truly(planted)


def not_of_the_mean(power: int) -> Callable[[Patch], None]:
    """Noise that is divided by B once more than the sum is, or not at all."""

    def planted(real: AddNoise, clipped: ClippedSum, *, noise_multiplier: float, **options: Any) -> NoisyGradient:
        return real(clipped, noise_multiplier=noise_multiplier * options["divisor"] ** power, **options)

    return told_truly(planted)


def by_batch(planted: Callable[[int, int, dict[str, Any]], None]) -> Callable[[Patch], None]:
    """Plants options of add_noise that depend on (examples, microbatches) of the batch."""

    def plant(patch: Patch) -> None:
        seen = [0, 0]

        def counted(real: Any, chunks: Any, **options: Any) -> Any:
            clipped, raw = real(chunks, **options)
            seen[:] = len(raw.raw_norms), len(chunks)
            return clipped, raw

        def wrong(real: AddNoise, clipped: ClippedSum, **options: Any) -> NoisyGradient:
            planted(seen[0], seen[1], options)
            return real(clipped, **options)

        plant_sum(patch, counted)
        told_truly(wrong)(patch)

    return plant


def for_each_microbatch(_: int, microbatches: int, options: dict[str, Any]) -> None:
    """k draws of sigma C / k each."""
    options["noise_multiplier"] /= max(microbatches, 1) ** 0.5


def realized_divisor(examples: int, _: int, options: dict[str, Any]) -> None:
    options["divisor"] = max(examples, 1)


def none_for_no_examples(examples: int, _: int, options: dict[str, Any]) -> None:
    if examples == 0:
        options["noise_multiplier"] = 0.0


def one_step_for_ever(_: int, __: int, options: dict[str, Any]) -> None:
    options["step"] = 0


def restart_for_each_tensor(patch: Patch) -> None:
    def wrong(real: AddNoise, clipped: ClippedSum, **options: Any) -> NoisyGradient:
        parts = [real(ClippedSum({n: v}, clipped.sensitivity), **options) for n, v in clipped.values.items()]
        return NoisyGradient({name: value for part in parts for name, value in part.items()}, 0.0)

    told_truly(wrong)(patch)


def of_torchs_global_stream(patch: Patch) -> None:
    def wrong(_: AddNoise, clipped: ClippedSum, *, noise_multiplier: float, divisor: int, **__: Any) -> NoisyGradient:
        std = noise_multiplier * clipped.sensitivity
        return NoisyGradient({n: (v + std * torch.randn_like(v)) / divisor for n, v in clipped.values.items()}, 0.0)

    told_truly(wrong)(patch)


def half_of_the_accumulated(patch: Patch) -> None:
    """In bfloat16 the noise is rounded to three digits."""

    def wrong(real: AddNoise, clipped: ClippedSum, **options: Any) -> NoisyGradient:
        released = real(clipped, **options)
        return replace(released, tensors={name: value.bfloat16().float() for name, value in released.items()})

    told_truly(wrong)(patch)


def shape_of_noise(planted: Callable[[np.ndarray], np.ndarray]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = rng.box_muller

        def wrong(words: np.ndarray, turns: np.ndarray, z: np.ndarray, *rest: Any) -> None:
            real(words, turns, z, *rest)
            z[:] = planted(z)

        everywhere(patch, real, wrong)

    return plant


def uniform(z: np.ndarray) -> np.ndarray:
    """Of variance one: Gaussian noise's size, and no Gaussian's protection."""
    ranks = np.empty(len(z))
    ranks[np.argsort(z)] = (np.arange(len(z)) + 0.5) / len(z)
    return (12**0.5 * (ranks - 0.5)).astype(z.dtype)


def default_seed(patch: Patch) -> None:
    real = RandomSource.__init__

    def wrong(self: RandomSource, seed: int | None = None) -> None:
        real(self, 42 if seed is None else seed)
        self.seed = seed

    patch.setattr(RandomSource, "__init__", wrong)


def off_the_grid(patch: Patch) -> None:
    """Noise in floating point, of the size that it would have on the grid."""
    real = noise.add_noise

    def wrong(clipped: ClippedSum, *, on_grid: bool = False, **options: Any) -> NoisyGradient:
        if on_grid:
            _, sensitivity = noise.grid_of(clipped, options["noise_multiplier"])
            clipped = ClippedSum(clipped.values, sensitivity)
        return real(clipped, **options)

    everywhere(patch, real, wrong)


def rounding_forgotten(patch: Patch) -> None:
    real = noise.grid_of
    everywhere(patch, real, lambda clipped, sigma: (real(clipped, sigma)[0], clipped.sensitivity))


def silent_seed(patch: Patch) -> None:
    real = RandomSource.__init__

    def wrong(self: RandomSource, seed: int | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real(self, seed)

    patch.setattr(RandomSource, "__init__", wrong)


def one_key(patch: Patch) -> None:
    real = RandomSource.stream
    patch.setattr(RandomSource, "stream", lambda self, name: real(self, "the one"))


def streams_that_stay(patch: Patch) -> None:
    """A state that is loaded, or a step that failed, goes back to a step whose noise is used."""
    real = pg.PrivateGradient._make_streams

    def wrong(self: pg.PrivateGradient) -> None:
        if not hasattr(self, "_noise_stream"):
            real(self)

    patch.setattr(pg.PrivateGradient, "_make_streams", wrong)


def copied_streams(patch: Patch) -> None:
    patch.setattr(Stream, "__reduce__", object.__reduce__)


def forked_streams(patch: Patch) -> None:
    patch.setattr(Stream, "_require_own_process", lambda self: None)


def poisson(planted: Callable[..., np.ndarray]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = sampling._poisson
        everywhere(patch, real, lambda *drawn: planted(real, *drawn))

    return plant


def shuffled(_: Any, stream: Stream, step: int, sample_rate: float, count: int, __: int) -> np.ndarray:
    size = round(sample_rate * count)
    shuffle, position = divmod(step, count // size)
    return np.argsort(stream.uint64(shuffle, count))[position * size : (position + 1) * size]


def of_fixed_size(_: Any, stream: Stream, step: int, sample_rate: float, count: int, __: int) -> np.ndarray:
    return np.argsort(stream.uint64(step, count))[: round(sample_rate * count)]


def in_runs(real: Any, stream: Stream, step: int, sample_rate: float, count: int, _: int) -> np.ndarray:
    """Neighbors are drawn together: the rate is right, independence is not."""
    firsts = real(stream, step, sample_rate, count // 2)
    return np.concatenate([2 * firsts, 2 * firsts + 1])


def slices_of_a_shuffle(patch: Patch) -> None:
    def wrong(stream: Stream, steps: int, chosen: int, position: int, first: int, last: int) -> np.ndarray:
        order = np.argsort(stream.uint64(0, last))
        return np.sort(order[position * last // steps : (position + 1) * last // steps])

    everywhere(patch, epochs.rows_in_step, wrong)


def one_epoch_for_ever(patch: Patch) -> None:
    real = epochs.EpochKeys.stream
    patch.setattr(epochs.EpochKeys, "stream", lambda self, _: real(self, 0))


def resumed_without_the_key(patch: Patch) -> None:
    patch.setattr(epochs.EpochKeys, "first_step", lambda self, step, steps: step)


def a_readable_key(patch: Patch) -> None:
    real = epochs._Held.write

    def wrong(self: Any, file: Path) -> None:
        real(self, file)
        file.chmod(0o644)

    patch.setattr(epochs._Held, "write", wrong)


def a_key_that_stays(patch: Patch) -> None:
    everywhere(patch, epochs.forget_epochs, lambda file, before: None)


def a_step_lost_at_a_resume(patch: Patch) -> None:
    real = epochs.EpochKeys.first_step
    patch.setattr(
        epochs.EpochKeys, "first_step", lambda self, step, steps: real(self, step, steps) + (step % steps > 0)
    )


def numbers_of_other_rows(patch: Patch) -> None:
    """A row that was added in front moves all others to the draws of their neighbors."""
    real = epochs.EpochKeys.__init__

    def wrong(self: Any, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        self._own = self._own._replace(rows=self._held.rows, content=self._held.content)

    patch.setattr(epochs.EpochKeys, "__init__", wrong)


def a_key_in_checkpoints(patch: Patch) -> None:
    real = pg.PrivateGradient.state_dict

    def wrong(self: pg.PrivateGradient) -> dict[str, Any]:
        file = self.ledger.epoch_key
        return real(self) | ({"epoch": file.read_text()} if file is not None and file.exists() else {})

    patch.setattr(pg.PrivateGradient, "state_dict", wrong)


def count_believed(patch: Patch) -> None:
    real: Any = sampling._require_samplable
    everywhere(patch, real, lambda data, _, *rest: real(data, 1, *rest))


def public_augmentation(patch: Patch) -> None:
    """Random augmentation by torch's global generator, which programs seed with a constant."""
    real: Any = loading._keyed
    everywhere(patch, real, lambda _: real(torch.initial_seed().to_bytes(32)))


EPOCHS = [
    Mutant("slices of a shuffle in place of an epoch", slices_of_a_shuffle, "test_epochs.test_each_row_is_drawn_alone"),
    Mutant(
        "one epoch for ever",
        one_epoch_for_ever,
        "test_epochs.test_each_example_is_in_so_many_steps_of_each_epoch",
        {"rate": 0.25, "times": 1},
    ),
    Mutant(
        "an epoch drawn again where it was interrupted",
        resumed_without_the_key,
        "test_epochs.test_without_the_key_a_resume_begins_the_next_epoch_and_the_old_one_is_paid_for",
        {"damage": "gone"},
    ),
    Mutant(
        "a step of an epoch lost at a resume",
        a_step_lost_at_a_resume,
        "test_epochs.test_a_resume_continues_within_the_epoch_by_its_key",
    ),
    Mutant(
        "rows that get other numbers within an epoch",
        numbers_of_other_rows,
        "test_epochs.test_data_that_grow_within_an_epoch_are_refused",
    ),
    Mutant(
        "a key of an epoch in checkpoints",
        a_key_in_checkpoints,
        "test_epochs.test_nothing_that_saves_or_publishes_has_the_key",
    ),
    Mutant(
        "a key of an epoch that others can read",
        a_readable_key,
        "test_epochs.test_a_resume_continues_within_the_epoch_by_its_key",
    ),
    Mutant(
        "a key of an epoch that stays",
        a_key_that_stays,
        "test_epochs.test_a_key_is_deleted_with_the_charge_of_the_last_step_of_its_epoch",
    ),
]
NOISE = [
    Mutant("noise at half scale", scaled(0.5), "test_noise.test_noise_has_the_stated_scale"),
    Mutant("noise at 0.9 of its scale", scaled(0.9), "test_noise.test_noise_has_the_stated_scale"),
    Mutant("noise divided by B twice", not_of_the_mean(-1), "test_noise.test_noise_has_the_stated_scale"),
    Mutant("noise of the sum added to the mean", not_of_the_mean(1), "test_noise.test_noise_has_the_stated_scale"),
    Mutant(
        "noise drawn for each microbatch, sigma C / k each",
        by_batch(for_each_microbatch),
        "test_debias_configurations.test_debias_subtracts_the_noise_that_was_added",
        {"configuration": "microbatches", "optimizer": "AdamBC"},
    ),
    Mutant(
        "realized batch size as divisor",
        by_batch(realized_divisor),
        "test_private_gradient.test_divides_by_the_public_batch_size_whatever_was_drawn",
    ),
    Mutant(
        "an empty batch gets no noise",
        by_batch(none_for_no_examples),
        "test_private_gradient.test_an_empty_batch_costs_and_hides_as_much_as_any_other",
    ),
    Mutant(
        "the same noise at each step",
        by_batch(one_step_for_ever),
        "test_private_gradient.test_threads_get_noise_of_their_own",
    ),
    Mutant(
        "the same noise for each tensor",
        restart_for_each_tensor,
        "test_noise.test_the_draw_depends_neither_on_threads_nor_on_how_the_sum_is_cut",
        {"threads": 1},
    ),
    Mutant("uniform noise", shape_of_noise(uniform), "test_noise.test_noise_is_gaussian_and_uncorrelated"),
    Mutant(
        "noise without its tail",
        shape_of_noise(lambda z: np.clip(z, -5, 5)),
        "test_noise.test_extreme_words_give_the_right_normals",
        {"dtype": np.float64},
    ),
    Mutant(
        "noise that is zero for one coordinate in 2^25",
        lambda patch: patch.setattr(rng, "_mend_short", lambda *_: None),
        "test_randomness.test_no_normal_is_zero_and_short_radii_are_exact",
        {"kind": "float32"},
    ),
    Mutant(
        "released values rounded to bfloat16",
        half_of_the_accumulated,
        "test_noise.test_the_draw_depends_neither_on_threads_nor_on_how_the_sum_is_cut",
        {"threads": 1},
    ),
    Mutant(
        "noise from torch's global stream",
        of_torchs_global_stream,
        "test_private_gradient.test_without_a_seed_the_noise_cannot_be_repeated",
    ),
    Mutant(
        "a fixed seed by default",
        default_seed,
        "test_private_gradient.test_without_a_seed_the_noise_cannot_be_repeated",
    ),
    Mutant("a research seed that does not warn", silent_seed, "test_private_gradient.test_a_seed_warns_once"),
    Mutant("one key for sampling and noise", one_key, "test_noise.test_steps_streams_and_sources_are_independent"),
    Mutant(
        "noise repeated by a state that goes back",
        streams_that_stay,
        "test_private_gradient.test_rolling_an_oracle_back_does_not_repeat_its_noise",
        guard="whose noise was drawn",
    ),
    Mutant(
        "noise of a failed step drawn again",
        streams_that_stay,
        "test_private_gradient.test_noise_of_a_release_that_was_not_charged_is_not_drawn_again",
        guard="whose noise was drawn",
    ),
    Mutant(
        "a grid that is planned and forgotten",
        off_the_grid,
        "test_noise_on_grid.test_every_release_of_the_oracle_is_on_the_grid",
        {"engine": "factored", "dtype": torch.float32},
    ),
    Mutant(
        "a sensitivity not widened by the rounding to the grid",
        rounding_forgotten,
        "test_noise_on_grid.test_rounded_neighboring_sums_stay_within_the_sensitivity_that_is_noised",
        {"count": 1000, "sigma": 0.7},
    ),
    Mutant("a random stream that can be copied", copied_streams, "test_noise.test_a_stream_has_one_holder"),
    Mutant("a random stream shared with a fork", forked_streams, "test_noise.test_a_stream_has_one_holder"),
]


def twice_as_often(real: Any, stream: Stream, step: int, rates: Any, *rows: int) -> np.ndarray:
    """For rates of classes only: the plan's rate is one number."""
    return real(stream, step, np.minimum(2 * rates, 1) if np.ndim(rates) else rates, *rows)


SAMPLING = [
    Mutant(
        "shuffled batches that are called Poisson",
        poisson(shuffled),
        "test_sampling.test_batches_are_poisson_samples_at_the_plans_rate",
    ),
    Mutant(
        "fixed-size draws that are called Poisson",
        poisson(of_fixed_size),
        "test_sampling.test_batches_are_poisson_samples_at_the_plans_rate",
    ),
    Mutant(
        "examples drawn at twice the rate",
        poisson(lambda real, stream, step, rate, *rows: real(stream, step, 2 * rate, *rows)),
        "test_sampling.test_batches_are_poisson_samples_at_the_plans_rate",
    ),
    Mutant(
        "classes drawn at twice their rate",
        poisson(twice_as_often),
        "test_class_rates.test_the_draws_are_the_plans_thinned_by_one_coin_each",
    ),
    Mutant(
        "neighbors drawn together", poisson(in_runs), "test_sampling.test_batches_are_poisson_samples_at_the_plans_rate"
    ),
    Mutant(
        "the same batch at each step",
        poisson(lambda real, stream, step, rate, *rows: real(stream, 0, rate, *rows)),
        "test_sampling.test_batches_are_poisson_samples_at_the_plans_rate",
    ),
    Mutant(
        "fewer examples than the public count",
        count_believed,
        "test_plan_and_sampling.test_data_sets_that_cannot_be_sampled_are_refused",
    ),
    Mutant(
        "rows that change with their companions",
        lambda patch: everywhere(patch, reading.require_rows, lambda *_: None),
        "test_plan_and_sampling.test_collating_an_example_may_not_depend_on_its_companions",
    ),
    Mutant(
        "a collate that keeps a statistic",
        lambda patch: patch.setattr(reading.Examples, "require_no_memory", lambda *_: None),
        "test_loading.test_a_collate_that_keeps_what_it_meets_is_refused",
        {"kind": "scaler", "workers": 0},
    ),
    Mutant(
        "examples of different forms that are collated together",
        lambda patch: everywhere(patch, reading.require_alike, lambda *_: None),
        "test_loading.test_one_example_of_another_form_cannot_change_the_rows_of_the_others",
        {"usual": (torch.zeros(2, dtype=torch.uint8), 1), "other": (torch.zeros(2), 1), "place": 0},
    ),
    Mutant(
        "random augmentation with a public seed",
        public_augmentation,
        "test_loading.test_random_augmentation_of_a_private_run_has_no_predictable_seed",
        {"workers": 0},
    ),
    Mutant(
        "batches of another plan",
        lambda patch: patch.setattr(pg.PrivateGradient, "_require_drawn_as_planned", lambda *_: None),
        "test_private_gradient.test_a_batch_of_another_plan_is_refused",
        {"other": {"sample_rate": 0.26}},
    ),
]
