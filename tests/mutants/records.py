"""Faults of accounting, plan, ledger and checkpoints."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from dp_accounting import rdp

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere
from privgrad import plan as plan_numbers
from privgrad import processes
from privgrad.accounting import accountant as accounting
from privgrad.accounting import composition
from privgrad.accounting import mechanisms as of_releases
from privgrad.accounting.accountant import Release
from privgrad.checks import data as shared_rows
from privgrad.ledger import file as ledger_file
from privgrad.ledger import lineage
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import Lineage, warn_if_trained
from privgrad.noise import gaussian
from privgrad.training import checkpoint
from privgrad.training import run as training_run


def edited(module: Any, name: str, **changed: Any) -> Callable[[Patch], None]:
    """A standard module as one of ours sees it, some of its functions replaced."""

    def plant(patch: Patch) -> None:
        patch.setattr(module, name, SimpleNamespace(**(vars(getattr(module, name)) | changed)))

    return plant


def unsafe_end(patch: Patch) -> None:
    """Sigma rounded down to two digits after the point."""
    real = accounting.calibrate_noise_multiplier
    everywhere(patch, real, lambda **options: float(np.floor(100 * real(**options)) / 100))


def wrong_conversion(patch: Patch) -> None:
    """log(1 / delta) / alpha in place of log(1 / delta) / (alpha - 1)."""

    def wrong(self: Any, delta: float) -> float:
        return float(np.min(self._rdp + np.log(1 / delta) / np.asarray(self._orders)))

    uncached(patch)
    patch.setattr(rdp.RdpAccountant, "get_epsilon", wrong)


def uncached(patch: Patch) -> None:
    patch.setattr(composition, "epsilon_of", composition.epsilon_of.__wrapped__)


def mechanisms(planted: Callable[[float, float, int], tuple[float, float, int]]) -> Callable[[Patch], None]:
    """Plants another (sigma, q, T) that is accounted."""

    def plant(patch: Patch) -> None:
        real = composition._compose
        uncached(patch)

        def wrong(accountant: Any, found: tuple[Any, ...], delta: float) -> float:
            numbers = (planted(one.noise_multiplier, one.sample_rate, one.count) for one in found)
            return real(accountant, tuple(Release(sigma, q, count=count) for sigma, q, count in numbers), delta)

        everywhere(patch, real, wrong)

    return plant


def fixed_charged_as_poisson(patch: Patch) -> None:
    real: Any = of_releases._sums
    patch.setattr(
        of_releases, "_sums", lambda name, found: real(name, [replace(one, scheme="poisson") for one in found])
    )


def other_sigma(release: Release) -> Release:
    return replace(release, noise_multiplier=2 * release.noise_multiplier)


def charged_with_another_sigma(patch: Patch) -> None:
    real = pg.Ledger.charge
    patch.setattr(pg.Ledger, "charge", lambda self, release, **options: real(self, other_sigma(release), **options))


def recorded_with_another_sigma(patch: Patch) -> None:
    """In the plan's numbers and in the releases: the ledger agrees with itself."""
    charged_with_another_sigma(patch)
    bind = pg.Ledger.bind

    def wrong(self: pg.Ledger, facts: Any) -> None:
        bind(self, dict(facts) | {"noise_multiplier": 2 * facts["noise_multiplier"]})

    patch.setattr(pg.Ledger, "bind", wrong)


def charged_at_the_next_step(patch: Patch) -> None:
    real, waiting = pg.Ledger.charge, list[Callable[[], None]]()

    def wrong(self: pg.Ledger, *given: Any, **options: Any) -> None:
        while waiting:
            waiting.pop()()
        waiting.append(lambda: real(self, *given, **options))

    patch.setattr(pg.Ledger, "charge", wrong)


def written_in_good_time(patch: Patch) -> None:
    """By a thread that nobody waits for."""

    @contextmanager
    def wrong(work: Callable[[], object], *, numbers: int) -> Generator[None]:
        threading.Thread(target=work).start()
        yield

    everywhere(patch, processes.meanwhile, wrong)


def charged_before_all_is_checked(patch: Patch) -> None:
    real = gaussian.add_noise

    def wrong(clipped: Any, *, charging: Any = None, **options: Any) -> pg.NoisyGradient:
        with charging or nullcontext():
            return real(clipped, **options)

    everywhere(patch, real, wrong)


def released_whatever_the_ledger_says(patch: Patch) -> None:
    real = pg.Ledger.charge

    def wrong(self: pg.Ledger, *given: Any, **options: Any) -> None:
        try:
            real(self, *given, **options)
        except pg.PrivacyError:
            return

    patch.setattr(pg.Ledger, "charge", wrong)


def free_if_empty(patch: Patch) -> None:
    call, charge, empty = pg.PrivateGradient.__call__, pg.Ledger.charge, [False]

    def called(self: pg.PrivateGradient, batch: pg.Batch) -> pg.NoisyGradient:
        empty[:] = [batch.size == 0]
        return call(self, batch)

    def charged(self: pg.Ledger, *given: Any, **options: Any) -> None:
        if not empty[0]:
            charge(self, *given, **options)

    patch.setattr(pg.PrivateGradient, "__call__", called)
    patch.setattr(pg.Ledger, "charge", charged)


def admitted(patch: Patch, **changed: Any) -> None:
    real = pg.Ledger.admit
    patch.setattr(pg.Ledger, "admit", lambda self, draw, **options: real(self, draw, **(options | changed)))


def last_line_dropped(patch: Patch) -> None:
    """Whatever lacks its end is taken for a line that was never finished."""
    real = ledger_file._is_cut_off

    def wrong(raw: bytes, begins: bytes) -> bool:
        return real(raw, begins) or (begins == ledger_file._LATER and not raw.endswith(b"\n"))

    everywhere(patch, real, wrong)


def other_numbers_taken(patch: Patch) -> None:
    real = pg.Ledger.bind

    def wrong(self: pg.Ledger, facts: Any) -> None:
        real(self, self.plan_facts or facts)

    patch.setattr(pg.Ledger, "bind", wrong)


def checksums_of(planted: Callable[[str, bytes], tuple[str, bytes]]) -> Callable[[Patch], None]:
    """Plants what a line's checksum is taken of, in place of the checksum before it and the line."""

    def plant(patch: Patch) -> None:
        real, seal = ledger_file._sealed, ledger_file._SEAL

        def wrong(head: str, body: bytes) -> tuple[bytes, str]:
            _, checksum = real(*planted(head, body))
            return body[:-1] + seal + checksum.encode() + b'"}', checksum

        everywhere(patch, real, wrong)

    return plant


def whatever_torch_loads(patch: Patch) -> None:
    """A checkpoint is taken for whole if torch can load it."""

    def wrong(path: Path) -> Any:
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError("its bytes are not those that were written") from error

    everywhere(patch, checkpoint.read_checkpoint, wrong)


def lost_steps_forgotten(patch: Patch) -> None:
    patch.setattr(training_run.TrainingRun, "_go_on_after_lost_steps", lambda *_: None)


def resumed_from_the_first_step(patch: Patch) -> None:
    real = pg.PrivacyPlan.batches
    patch.setattr(pg.PrivacyPlan, "batches", lambda self, data, *, start=0, **options: real(self, data, **options))


def code_run_by_checkpoints(patch: Patch) -> None:
    real: Any = torch.load
    patch.setattr(torch, "load", lambda file, **options: real(file, **(options | {"weights_only": False})))


def halves_saved(patch: Patch) -> None:
    patch.setattr(training_run.TrainingRun, "is_consistent", property(lambda self: True))


def only_the_last_training_known(patch: Patch) -> None:
    def wrong(self: Lineage, ledger: pg.Ledger) -> None:
        self._ledgers = [ledger]

    patch.setattr(Lineage, "add", wrong)


def known_by_its_path(patch: Patch) -> None:
    everywhere(patch, lineage.covers, lambda record, other: record is other or record.path == other.path is not None)


def unknown_arguments_swallowed(patch: Patch) -> None:
    real, known = pg.PrivacyPlan.__init__, set(pg.PrivacyPlan.__dataclass_fields__)

    def wrong(self: pg.PrivacyPlan, **options: Any) -> None:
        real(self, **{name: value for name, value in options.items() if name in known})

    patch.setattr(pg.PrivacyPlan, "__init__", wrong)


def rate_of_whole_steps(patch: Patch) -> None:
    """q = 1 / int(1 / q), as loaders that count batches have it."""
    real = pg.PrivacyPlan.release.fget

    def wrong(self: pg.PrivacyPlan) -> Release:
        release = real(self)  # pyright: ignore[reportOptionalCall]
        return replace(release, sample_rate=1 / int(1 / release.sample_rate))

    patch.setattr(pg.PrivacyPlan, "release", property(wrong))


def numbers_unchecked(patch: Patch) -> None:
    patch.setattr(plan_numbers, "require_max_grad_norm", lambda *_: None)


def simulation_charged_with_noise(patch: Patch) -> None:
    patch.setattr(
        pg.PrivacyPlan,
        "release",
        property(lambda self: Release(self.noise_multiplier, self.sample_rate, self.sampling)),
    )


ACCOUNTING = [
    Mutant(
        "sigma calibrated to the unsafe side",
        unsafe_end,
        "test_accounting.test_calibration_ends_on_the_safe_side",
        {"target": 0.5, "delta": 1e-5, "q": 1.0, "steps": 1},
    ),
    Mutant(
        "RDP converted to epsilon by the wrong order",
        wrong_conversion,
        "test_accounting.test_rdp_golden_values",
        {"q": 2048 / 50_000, "sigma": 1.0, "steps": 552, "delta": 1e-5, "golden": 7.02},
    ),
    Mutant(
        "steps accounted as one",
        mechanisms(lambda sigma, rate, _: (sigma, rate, 1)),
        "test_accounting.test_rdp_golden_values",
        {"q": 2048 / 50_000, "sigma": 1.0, "steps": 552, "delta": 1e-5, "golden": 7.02},
    ),
    Mutant(
        "noise of 2 sigma accounted",
        mechanisms(lambda sigma, rate, steps: (2 * sigma, rate, steps)),
        "test_accounting.test_against_the_closed_form_of_the_gaussian_mechanism",
    ),
    Mutant(
        "fixed-size batches accounted as Poisson",
        fixed_charged_as_poisson,
        "test_accounting.test_shuffled_batches_cost_infinitely_much",
    ),
    Mutant(
        "an early stop at the epsilon of the steps that were taken",
        lambda patch: patch.setattr(training_run, "charge_unused", lambda _: None),
        "test_early_stopping.test_an_early_stop_has_the_epsilon_of_all_planned_steps",
    ),
    Mutant(
        "another rate accounted than drawn at",
        rate_of_whole_steps,
        "test_plan_and_sampling.test_rates_that_do_not_divide_evenly_keep_their_steps_and_rate",
    ),
    Mutant(
        "unknown arguments swallowed",
        unknown_arguments_swallowed,
        "test_plan_and_sampling.test_unknown_arguments_are_refused",
    ),
    Mutant(
        "a negative clipping norm",
        numbers_unchecked,
        "test_plan_and_sampling.test_numbers_out_of_range_are_refused_at_construction",
        {"changed": {"max_grad_norm": float("nan")}, "message": "max_grad_norm"},
    ),
    Mutant(
        "a simulation in smaller batches charged with its noise",
        simulation_charged_with_noise,
        "test_plan_and_sampling.test_a_scaled_plan_has_the_same_noise_and_no_epsilon",
        {"factor": 0.5, "group_size": 1},
    ),
]

LEDGER = [
    Mutant(
        "a step charged once its gradient has left",
        charged_at_the_next_step,
        "test_ledger.test_ledger_file_tells_each_release_and_its_epsilon",
    ),
    Mutant(
        "a gradient released though the charge failed",
        released_whatever_the_ledger_says,
        "test_ledger.test_a_full_disk_stops_the_step",
    ),
    Mutant(
        "a gradient that does not wait for its line",
        written_in_good_time,
        "test_charging.test_the_line_goes_to_disk_while_noise_is_drawn_and_before_the_gradient_leaves",
        {"seed": None},
    ),
    Mutant(
        "a step charged before its noise can be refused",
        charged_before_all_is_checked,
        "test_charging.test_noise_that_is_refused_leaves_no_line",
    ),
    Mutant(
        "a charge of another sigma than was used",
        charged_with_another_sigma,
        "test_ledger.test_ledger_file_tells_each_release_and_its_epsilon",
        guard="as in the ledger's plan",
    ),
    Mutant(
        "another sigma recorded than was used",
        recorded_with_another_sigma,
        "test_ledger.test_ledger_file_tells_each_release_and_its_epsilon",
    ),
    Mutant(
        "an empty batch is not charged",
        free_if_empty,
        "test_private_gradient.test_an_empty_batch_costs_and_hides_as_much_as_any_other",
    ),
    Mutant(
        "a draw that serves twice",
        lambda patch: admitted(patch, repeatable=True),
        "test_private_gradient.test_a_batch_serves_once",
    ),
    Mutant(
        "steps past the plan",
        lambda patch: admitted(patch, limit=10**9),
        "test_private_gradient.test_going_past_the_plans_steps_raises_before_release",
    ),
    Mutant(
        "a charge that is not on disk",
        edited(ledger_file, "os", fsync=lambda descriptor: None),
        "test_ledger.test_a_charge_is_on_disk_before_it_returns",
    ),
    Mutant(
        "two writers of one ledger",
        edited(ledger_file, "fcntl", flock=lambda descriptor, operation: None),
        "test_ledger.test_a_ledger_has_one_writer",
    ),
    Mutant(
        "the last charge dropped on opening",
        last_line_dropped,
        "test_ledger.test_a_ledger_cut_at_any_byte_keeps_its_whole_lines_and_takes_more",
    ),
    Mutant(
        "a line of the ledger that was edited",
        checksums_of(lambda head, body: (head, b"{}")),
        "test_ledger.test_lines_removed_moved_repeated_or_exchanged_are_refused",
        {"how": "of another ledger"},
    ),
    Mutant(
        "checksums of the ledger's lines that do not chain",
        checksums_of(lambda head, body: ("", body)),
        "test_ledger.test_lines_removed_moved_repeated_or_exchanged_are_refused",
        {"how": "moved"},
    ),
    Mutant(
        "a ledger gone on with under other numbers",
        other_numbers_taken,
        "test_ledger.test_a_ledger_of_other_numbers_is_refused",
        {"other": {"max_grad_norm": 2.0}},
    ),
]

CHECKPOINTS = [
    Mutant(
        "steps that were lost are free",
        lost_steps_forgotten,
        "test_training.test_without_a_seed_lost_steps_stay_spent_and_it_says_so",
    ),
    Mutant(
        "a resumed run draws its first batches again",
        resumed_from_the_first_step,
        "test_training.test_interrupt_saves_and_resumes",
        guard="batch to be used once",
    ),
    Mutant(
        "a checkpoint saved amid an update",
        halves_saved,
        "test_training.test_interrupted_amid_an_update_nothing_half_done_is_saved",
    ),
    Mutant(
        "a checkpoint whose bytes were changed",
        whatever_torch_loads,
        "test_training.test_no_byte_of_a_checkpoint_changes_unseen",
    ),
    Mutant("checkpoints that run code", code_run_by_checkpoints, "test_training.test_a_checkpoint_cannot_run_code"),
]

WEIGHTS = [
    Mutant(
        "a training of the same weights that is forgotten",
        only_the_last_training_known,
        "test_deployment.test_a_model_that_was_trained_twice_is_stated_with_both_trainings",
        {"how": "in memory"},
    ),
    Mutant(
        "a copy of a model without its trainings",
        lambda patch: patch.setattr(Lineage, "__deepcopy__", lambda self, memo: Lineage()),
        "test_deployment.test_a_model_that_was_trained_twice_is_stated_with_both_trainings",
        {"how": "as a copy"},
    ),
    Mutant(
        "an average without the training of its weights",
        lambda patch: patch.setattr(training_run, "note_training", lambda model, ledger, moved=None: None),
        "test_deployment.test_a_model_that_was_trained_twice_is_stated_with_both_trainings",
        {"how": "an average in folders"},
        guard="model to have the weights of",  # those of the checkpoint of the first training
    ),
    Mutant(
        "a second training of a model in silence",
        lambda patch: everywhere(patch, warn_if_trained, lambda model, ledger: None),
        "test_lineage.test_a_second_training_that_its_ledger_does_not_count_gets_a_warning",
    ),
    Mutant(
        "steps that were added after a look at results, unsaid",
        lambda patch: patch.setattr(Ledger, "planned_steps", ()),
        "test_statement.test_the_statement_says_what_must_not_follow_from_results",
    ),
    Mutant(
        "public examples that are the private ones",
        lambda patch: everywhere(patch, shared_rows.share_rows, lambda one, other: False),
        "test_shared_rows.test_fit_refuses_public_examples_that_are_the_private_ones",
        {"holder": "the optimizer"},
    ),
    Mutant(
        "a record that is known by its path alone",
        known_by_its_path,
        "test_lineage.test_a_record_covers_what_its_file_held_when_it_was_read",
    ),
]
