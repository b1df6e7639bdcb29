"""Faults of BAM, SAT and AdaDPS, of what says that it is public, and of the optimizers."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere, plant_sum
from privgrad.gradient import functional as module_state
from privgrad.gradient import reference as engines
from privgrad.gradient import transform
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.transform import Provenance
from privgrad.noise import gaussian as noise
from privgrad.optim import base, debiased
from privgrad.optim.base import PrivateOptimizer
from privgrad.optim.debiased import Debiased, debias, noise_floor
from privgrad.precondition.moments import Moments
from privgrad.types import NoisyGradient


def ascent_of_the_batch(patch: Patch) -> None:
    """BAM up the loss of the batch, as SAM goes: every example moves every other's gradient."""

    def wrong(self: Any, engine: Any, examples: Any, step: int, _: Any) -> Mapping[str, Factor]:
        ones = torch.ones(len(examples[0]), dtype=torch.float64)
        mean = {name: factor.weighted_sum(ones) for name, factor in engine(examples).items()}
        norm = torch.stack([value.norm() for value in mean.values()]).norm()
        along = {n: (self.radius(step) * v / norm).expand(len(ones), *v.shape) for n, v in mean.items()}
        rows = engines.per_sample_gradients(engine._structure.model, engine._loss_fn, examples, along=along)
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}

    patch.setattr(pg.perturb.BAM, "gradients", wrong)


def sat_up_the_private_batch(patch: Patch) -> None:
    real = pg.perturb.SAT.at

    def wrong(self: Any, step: int, parameters: Any, raw_mean: Any) -> Any:
        self._direction = dict(raw_mean())
        return real(self, step, parameters, raw_mean)

    patch.setattr(pg.perturb.SAT, "at", wrong)


def sat_up_the_clean_mean(patch: Patch) -> None:
    """Past every guard: what SAT keeps is the gradient before its noise."""
    real, clean = noise.add_noise, dict[str, Tensor]()

    def wrong(clipped: Any, **options: Any) -> NoisyGradient:
        clean.update({name: value / options["divisor"] for name, value in clipped.values.items()})
        return real(clipped, **options)

    everywhere(patch, real, wrong)
    keep = pg.perturb.SAT.released
    patch.setattr(pg.perturb.SAT, "released", lambda self, gradient: keep(self, replace(gradient, tensors=clean)))


def sam_called_public(patch: Patch) -> None:
    patch.setattr(pg.perturb.RawSAM, "is_public", True)


def epsilon_of_the_plan(patch: Patch) -> None:
    patch.setattr(pg.PrivateGradient, "epsilon", lambda self, *, steps: self.plan.epsilon(steps=steps))


def weights_left_where_they_were_moved(patch: Patch) -> None:
    @contextmanager
    def wrong(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
        for parameter, value in values.items():
            parameter.data = value.clone()
        yield

    everywhere(patch, module_state.replaced, wrong)


def weights_left_after_a_failure(patch: Patch) -> None:
    @contextmanager
    def wrong(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
        before = {parameter: parameter.data for parameter in values}
        for parameter, value in values.items():
            parameter.data = value
        yield
        for parameter, held in before.items():
            parameter.data = held

    everywhere(patch, module_state.replaced, wrong)


def scales_of_the_private_batch(patch: Patch) -> None:
    patch.setattr(Moments, "_update", as_if_ideal(Moments._update))


def as_if_ideal(update: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Moments, time: int, raw_mean: Any) -> None:
        public, self.public = self.public, None
        try:
            update(self, time, raw_mean)
        finally:
            self.public = public

    return wrong


def private_data_for_all(patch: Patch) -> None:
    real = pg.PrivateGradient._raw_mean

    def wrong(self: pg.PrivateGradient, batch: Any, asked_by: str) -> dict[str, Tensor]:
        refusing, self._not_private = self._not_private, {asked_by}
        try:
            return real(self, batch, asked_by)
        finally:
            self._not_private = refusing

    patch.setattr(pg.PrivateGradient, "_raw_mean", wrong)


def joined_scales_of_the_better_source(patch: Patch) -> None:
    real = pg.Scales.__or__

    def wrong(self: pg.Scales, other: Any) -> pg.Scales:
        joined = real(self, other)
        better: Provenance = min((self.provenance, other.provenance), key=get_args(Provenance).index)
        return pg.Scales(joined, provenance=better, source=joined.source)

    patch.setattr(pg.Scales, "__or__", wrong)


def side_information_not_recorded(patch: Patch) -> None:
    real = pg.Ledger.bind
    patch.setattr(pg.Ledger, "bind", lambda self, facts: real(self, dict(facts) | {"side_information": None}))


def unchecked_transforms(patch: Patch) -> None:
    everywhere(patch, transform.require_transform, lambda *_: None)


def clean_moments_kept(patch: Patch) -> None:
    real, update, clean = noise.add_noise, Debiased._update, dict[str, Tensor]()

    def wrong(clipped: Any, **options: Any) -> NoisyGradient:
        clean.update({name: value / options["divisor"] for name, value in clipped.values.items()})
        return real(clipped, **options)

    def updated(self: Any, gradient: NoisyGradient) -> None:
        update(self, gradient)
        for group in self.param_groups:
            for name, parameter in self._active(group):
                state = self.state[parameter]
                state["exp_avg_sq_clean"] = 0.999 * state.get("exp_avg_sq_clean", 0.0) + 0.001 * clean[name] ** 2

    everywhere(patch, real, wrong)
    patch.setattr(Debiased, "_update", updated)


def moments_of_the_clean_gradient(patch: Patch) -> None:
    """In place of those of the released one, from which the noise's variance is then taken."""
    real, update, clean = noise.add_noise, Debiased._update, dict[str, Tensor]()

    def wrong(clipped: Any, **options: Any) -> NoisyGradient:
        clean.update({name: value / options["divisor"] for name, value in clipped.values.items()})
        return real(clipped, **options)

    everywhere(patch, real, wrong)
    patch.setattr(Debiased, "_update", lambda *given: update(given[0], replace(given[1], tensors=clean)))


def reported_noise(planted: Callable[[int, int, dict[str, Any]], float]) -> Callable[[Patch], None]:
    """The noise is right, and what the optimizers are told of it is not."""

    def plant(patch: Patch) -> None:
        real, seen = noise.add_noise, [0, 0]

        def counted(real: Any, chunks: Any, **options: Any) -> Any:
            clipped, raw = real(chunks, **options)
            seen[:] = len(raw.raw_norms), len(chunks)
            return clipped, raw

        def wrong(clipped: Any, **options: Any) -> NoisyGradient:
            released: Any = real(clipped, **options)
            return replace(released, noise_std=released.noise_std * planted(seen[0], seen[1], options))

        plant_sum(patch, counted)
        everywhere(patch, real, wrong)

    return plant


def another_debias(planted: Callable[..., Tensor]) -> Callable[[Patch], None]:
    """Plants another formula: (the real one, second moment, noise_std, floor, the noise as it was told) -> moment."""

    def plant(patch: Patch) -> None:
        real, update, told = debias, Debiased._update, [0.0]

        def updated(self: Any, gradient: NoisyGradient) -> None:
            told[:] = [gradient.noise_std] if isinstance(gradient.noise_std, float) else [0.0]
            update(self, gradient)

        def wrong(square: Tensor, noise_std: Any, *, floor: Any, **_: Any) -> Tensor:
            return planted(real, square, noise_std, floor, told[0])

        def wrong_lists(squares: list[Tensor], stds: list[float], floors: list[float]) -> list[Tensor]:
            return [wrong(*one[:2], floor=one[2]) for one in zip(squares, stds, floors, strict=True)]

        patch.setattr(Debiased, "_update", updated)
        patch.setattr(debiased, "_debias_lists", wrong_lists)
        everywhere(patch, real, wrong)

    return plant


def without_a_floor(patch: Patch) -> None:
    everywhere(patch, noise_floor, lambda noise_std, multiple: 1e-16)


def bare_gradients_taken(patch: Patch) -> None:
    real = PrivateOptimizer.step

    def wrong(self: Any, closure: Any = None, *, grad: Any = None) -> None:
        real(self, closure, grad=NoisyGradient(grad, 0.0) if isinstance(grad, dict) else grad)

    for name in ("AdamBC", "Adam"):
        patch.setattr(getattr(pg.optim, name), "step", wrong)


def gradients_left_behind(patch: Patch) -> None:
    patch.setattr(PrivateOptimizer, "_clear", lambda self: None)


def momentum_forgotten(patch: Patch) -> None:
    """The noise step of one update, in place of that of many."""
    patch.setattr(pg.optim.SGD, "_noise_step_per_lr", lambda self, group, noise_std: noise_std)


def noise_not_divided_out(patch: Patch) -> None:
    """The rate is that of the noise step, and the gradient goes as it is into states, whose eps counts noise."""

    def wrong(self: Any, gradient: NoisyGradient, names: list[str]) -> None:
        groups = [group for group in self.param_groups if group["lr_is_noise_step"]]
        steps = [group["lr"] for group in groups]
        for group in groups:
            first = float(torch.as_tensor(gradient.noise_std_of(group["param_names"][0])).flatten()[0])
            group["lr"] = group["lr"] / self._noise_step_per_lr(group, first)
        self._update(gradient)
        for group, step in zip(groups, steps, strict=True):
            group["lr"] = step

    patch.setattr(PrivateOptimizer, "_update_in_noise_units", wrong)


def noise_step_without_noise(patch: Patch) -> None:
    real = base._require_usable
    everywhere(patch, real, lambda function, gradient, names, by_noise: real(function, gradient, names, set()))


def noise_of_the_first_release(patch: Patch) -> None:
    """Each later gradient is divided by the noise of the first one."""
    real, first = PrivateOptimizer._update_in_noise_units, dict[str, Any]()

    def wrong(self: Any, gradient: NoisyGradient, names: list[str]) -> None:
        for name in gradient:
            first.setdefault(name, gradient.noise_std_of(name))
        real(self, replace(gradient, noise_std=first), names)

    patch.setattr(PrivateOptimizer, "_update_in_noise_units", wrong)


NOISE_STEP = "test_noise_step.test_pure_noise_moves_a_weight_by_the_noise_step"
FIFTY_STEPS = "test_dp_adambc.test_fifty_steps_agree_with_the_plain_version"
PERTURBING = [
    Mutant(
        "BAM up the loss of the batch",
        ascent_of_the_batch,
        "test_perturb.test_an_example_swapped_leaves_the_others_contributions",
        {"engine": "vmap", "mode": "sam"},
    ),
    Mutant(
        "BAM's point made of the microbatch",
        ascent_of_the_batch,
        "test_perturb.test_engines_and_microbatches_agree_with_scales_and_every_clipping",
        {"mode": "sam", "clip": pg.clip.Flat()},
    ),
    Mutant(
        "SAT up the private batch",
        sat_up_the_private_batch,
        "test_perturb.test_sat_equals_a_plain_loop_and_goes_on_from_a_checkpoint",
        {"engine": "factored"},
        guard="perturb to use the raw mean only if its class has is_public = False",
    ),
    Mutant(
        "SAT along the last gradient before its noise",
        sat_up_the_clean_mean,
        "test_perturb.test_sat_keeps_what_was_released_noise_and_all",
    ),
    Mutant(
        "SAT's weights not put back",
        weights_left_where_they_were_moved,
        "test_perturb.test_sat_equals_a_plain_loop_and_goes_on_from_a_checkpoint",
        {"engine": "factored"},
    ),
    Mutant(
        "SAT's weights not put back after a failure",
        weights_left_after_a_failure,
        "test_perturb.test_sat_puts_the_weights_back_whatever_happens",
    ),
    Mutant(
        "RawSAM charged as if it were private",
        sam_called_public,
        "test_perturb.test_sam_is_not_private",
        guard="perturb to use the raw mean only if its class has is_public = False",
    ),
]

PRECONDITIONING = [
    Mutant(
        "scales of the private batch that are called public",
        scales_of_the_private_batch,
        "test_precondition.test_agrees_with_a_loop_over_examples",
        {"rule": "rmsprop", "schedule": "step", "every": 1, "unit": "eps"},
        guard="precondition to use the raw mean only if its class has is_public = False",
    ),
    Mutant(
        "the private batch given to whoever asks",
        private_data_for_all,
        "test_attacks_adadps.test_what_says_it_is_public_is_given_nothing_private",
    ),
    Mutant(
        "the plan's epsilon told of scales that no epsilon covers",
        epsilon_of_the_plan,
        "test_attacks_adadps.test_private_derived_scales_are_covered_by_no_epsilon",
    ),
    Mutant(
        "private-derived scales joined with public ones",
        joined_scales_of_the_better_source,
        "test_attacks_adadps.test_private_derived_scales_are_covered_by_no_epsilon",
    ),
    Mutant(
        "a ledger that does not tell its side information",
        side_information_not_recorded,
        "test_attacks_adadps.test_a_ledger_with_side_information_is_not_gone_on_with_without_any",
    ),
    Mutant(
        "scales that are infinite",
        unchecked_transforms,
        "test_attacks_adadps.test_a_transform_that_is_none_is_refused_and_nothing_charged",
        {"name": "infinite", "empty": False},
    ),
]

OPTIMIZERS = [
    Mutant(
        "clean moments in the optimizer's state",
        clean_moments_kept,
        "test_training.test_checkpoint_holds_no_key_and_nothing_but_state",
    ),
    Mutant("moments of the clean gradient", moments_of_the_clean_gradient, FIFTY_STEPS),
    Mutant(
        "debiased by noise over the realized batch",
        reported_noise(lambda examples, _, options: options["divisor"] / max(examples, 1)),
        "test_debias_configurations.test_debias_subtracts_the_noise_that_was_added",
        {"configuration": "Poisson, other sizes than expected", "optimizer": "AdamBC"},
    ),
    Mutant(
        "debiased by noise of every microbatch",
        reported_noise(lambda _, microbatches, __: max(microbatches, 1) ** 0.5),
        "test_debias_configurations.test_debias_subtracts_the_noise_that_was_added",
        {"configuration": "microbatches", "optimizer": "AdamBC"},
    ),
    Mutant(
        "debiased by the noise, not its square",
        another_debias(lambda real, square, std, floor, _: real(square, std**0.5, floor=floor)),
        FIFTY_STEPS,
    ),
    Mutant(
        "debiased without the startup correction",
        another_debias(lambda real, square, _, floor, told: real(square, told, floor=floor)),
        FIFTY_STEPS,
    ),
    Mutant(
        "nothing debiased",
        another_debias(lambda real, square, _, floor, __: real(square, 0.0, floor=floor)),
        FIFTY_STEPS,
    ),
    Mutant(
        "debiased without a floor on the noise's scale",
        without_a_floor,
        "test_optimizers.test_debiased_steps_are_a_bounded_number_of_learning_rates",
        {"name": "AdamBC", "floor": 1.0, "most": 1.0},
    ),
    Mutant(
        "an optimizer that takes bare gradients",
        bare_gradients_taken,
        "test_optimizers.test_refuses_anything_but_a_noisy_gradient",
        lambda module: {"row": module.OPTIMIZERS["AdamBC"]},
    ),
    Mutant(
        "gradients left for whoever steps next",
        gradients_left_behind,
        "test_optimizers.test_leaves_no_gradient_behind_and_closure_equals_grad",
        lambda module: {"row": module.OPTIMIZERS["SGD"]},
    ),
    Mutant("a noise step that forgets momentum", momentum_forgotten, NOISE_STEP, {"name": "SGD, momentum"}),
    Mutant(
        "a noise step whose noise is not divided out of the gradient",
        noise_not_divided_out,
        "test_noise_step.test_it_equals_the_learning_rate_that_it_stands_for",
        {"name": "Adam"},
    ),
    Mutant(
        "a noise step by the noise of the first release",
        noise_of_the_first_release,
        "test_noise_step.test_noise_that_changes_over_time_moves_a_weight_by_the_same_step",
        {"name": "MomentumSGD"},
    ),
    Mutant(
        "a noise step of a release without noise",
        noise_step_without_noise,
        "test_noise_step.test_one_of_both_is_taken_and_noise_is_needed",
    ),
]
