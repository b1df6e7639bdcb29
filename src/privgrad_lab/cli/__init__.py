"""The commands that run experiments: train, compare, reproduce, audit, data. privgrad.cli finds them here."""

from privgrad_lab.cli.audit import audit
from privgrad_lab.cli.train import compare, reproduce, train

COMMANDS = (train, compare, reproduce, audit)
