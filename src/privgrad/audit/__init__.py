"""Empirical lower bounds on epsilon: attack a mechanism with all that an auditor may know, and count the errors."""

from privgrad.audit.bounds import (
    clopper_pearson,
    epsilon_of_accountant,
    epsilon_of_gaussian,
    epsilon_of_one_gaussian_run,
    epsilon_of_one_run,
    epsilon_of_one_training_run,
    epsilon_of_rates,
)
from privgrad.audit.games import Audit, Game, directions, distinguish, one_run
from privgrad.audit.methods import METHODS, method_game, one_step, rows
from privgrad.audit.own_training import canaries

__all__ = [
    "METHODS",
    "Audit",
    "Game",
    "canaries",
    "clopper_pearson",
    "directions",
    "distinguish",
    "epsilon_of_accountant",
    "epsilon_of_gaussian",
    "epsilon_of_one_gaussian_run",
    "epsilon_of_one_run",
    "epsilon_of_one_training_run",
    "epsilon_of_rates",
    "method_game",
    "one_run",
    "one_step",
    "rows",
]
