"""Faults of the bridge to the Trainer of transformers: what was asked is silently not done."""

import math

from mutants.mutant import Mutant

HUGGING_FACE = [
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
