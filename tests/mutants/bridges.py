"""Faults of bridges: what was asked is silently not done, or what was spent is forgotten."""

import math

import privgrad as pg
from mutants.mutant import Mutant

BRIDGES = [
    Mutant(
        "an earlier training by Opacus that its bridge forgets",
        lambda patch: patch.setattr("privgrad.integrations.opacus.note_training", lambda *_: None),
        "test_opacus.test_releases_under_a_schedule_of_opacus_are_known",
    ),
    Mutant(
        "weights of a folder whose card is not read again",
        lambda patch: patch.setattr("privgrad.integrations.huggingface.note_folder", lambda *_: None),
        "test_huggingface.test_adapters_of_a_folder_are_known_as_trained",
        {"is_auto": True},
    ),
    Mutant(
        "a key of an epoch that the Trainer uploads",
        lambda patch: patch.setattr(
            pg.Ledger, "epoch_key", property(lambda self: self.path and self.path.with_name("ledger.jsonl.epoch"))
        ),
        "test_huggingface.test_what_the_trainer_uploads_has_no_key",
    ),
    Mutant(
        "a swallowed override: it is never called, and nothing says so",
        lambda patch: patch.setattr("privgrad.integrations.huggingface_arguments._NOT_REDEFINED", {}),
        "test_hosts_transformers.test_refused_overrides_are_named_before_anything_is_released",
        {"name": "_get_train_sampler"},
    ),
    Mutant(
        "a budget spent on gradients of which none is finite",
        lambda patch: patch.setattr("privgrad.training.external_loop._FUTILE", math.inf),
        "test_huggingface_remedies.test_gradients_that_are_not_finite_are_told_at_the_first_step",
    ),
]
