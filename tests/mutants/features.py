"""Faults of features and of their cache."""

import hashlib
import json
from typing import Any

from torch import Tensor, nn

from mutants.mutant import Mutant, Patch
from privgrad.features import Whitened, caching, extractor, unit_rows
from privgrad.features.extractor import Copies, Extractor, marks_of


def not_tried(patch: Patch) -> None:
    patch.setattr(Extractor, "_try", lambda self, rows: None)


def tried_with_copies(patch: Patch) -> None:
    patch.setattr(extractor, "_changed", lambda rows: rows)


def training_allowed(patch: Patch) -> None:
    patch.setattr(Extractor, "train", nn.Module.train)


def blocks_of_any_size(patch: Patch) -> None:
    patch.setattr(Extractor, "_block", lambda self, rows, start=None: self._features(rows).float())


def whitened_by_the_rows_at_hand(patch: Patch) -> None:
    def wrong(self: Whitened, rows: Any) -> Tensor:
        made = unit_rows(self.extractor.features(rows).float())
        return unit_rows((made - made.mean(0)) @ self.get_buffer("directions"))

    patch.setattr(Whitened, "features", wrong)


def digest_of_constants(patch: Patch) -> None:
    def wrong(self: Extractor) -> str:
        content = [self.config(), {name: value.tolist() for name, value in self.constants().items()}]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    patch.setattr(Extractor, "digest", wrong)


def rows_not_compared(patch: Patch) -> None:
    patch.setattr(caching, "_digest", lambda rows: "")


def copies_not_counted(patch: Patch) -> None:
    patch.setattr(extractor.Copies, "add", lambda self, rows: 0)


def blocks_counted_together(patch: Patch) -> None:
    def wrong(self: Copies, rows: Any) -> int:
        public = {mark for own, _ in self.parts for mark in own}
        found = public.intersection(marks_of(rows).tolist())
        most = min(self.count, len(public)) // 2
        return most + 1 if len(found) > most else 0

    patch.setattr(extractor.Copies, "add", wrong)


def changed_bytes_trusted(patch: Patch) -> None:
    patch.setattr(caching, "_checksum", lambda features: 0)


_RULE = "to depend on that row only"

FEATURES = [
    Mutant(
        "features that are not tried on the first rows",
        not_tried,
        "test_features.test_planted_faults_are_refused",
        {"fault": "batch mean", "count": 50},
    ),
    Mutant(
        "features tried with copies of a row as its companions",
        tried_with_copies,
        "test_features.test_planted_faults_are_refused",
        {"fault": "batch scale", "count": 1},
    ),
    Mutant(
        "an extractor in training mode",
        training_allowed,
        "test_features.test_order_and_batch_size_change_nothing",
        {"name": "frozen"},
    ),
    Mutant("blocks of any size, rounded differently", blocks_of_any_size, "test_features.test_rows_fill_a_block"),
    Mutant(
        "whitening by the mean of the rows at hand",
        whitened_by_the_rows_at_hand,
        "test_features.test_a_row_does_not_depend_on_companions",
        {"name": "whitened"},
        guard=_RULE,
    ),
    Mutant("a digest without the weights of a network", digest_of_constants, "test_features.test_refused_files"),
    Mutant("cached features of other rows", rows_not_compared, "test_features.test_refused_caches"),
    Mutant("cached features whose bytes were changed", changed_bytes_trusted, "test_features.test_refused_caches"),
    Mutant(
        "statistics of private rows, called public",
        copies_not_counted,
        "test_features.test_statistics_of_private_rows_are_found",
    ),
    Mutant(
        "a private vocabulary next to a large public block",
        blocks_counted_together,
        "test_features_text.test_a_vocabulary_of_private_texts_is_found",
    ),
]
