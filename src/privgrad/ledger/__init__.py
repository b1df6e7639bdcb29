"""The record of releases: the ledger of a training, its file, and the budget that several trainings share."""

from privgrad.ledger.ledger import Ledger

__all__ = ["Ledger"]
