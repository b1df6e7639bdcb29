"""The costs of releases: epsilon and the noise multiplier, for single releases and for compositions.

Only `composition` imports dp_accounting, when an epsilon is computed.
"""

from privgrad.accounting.accountant import (
    Accountant,
    attack_advantage,
    attack_success,
    calibrate,
    calibrate_noise_multiplier,
    calibrate_to_attack,
    epsilon,
    gaussian_dp,
    steps_for_budget,
)
from privgrad.accounting.mechanisms import Release, Selection, Split

__all__ = [
    "Accountant",
    "Release",
    "Selection",
    "Split",
    "attack_advantage",
    "attack_success",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_to_attack",
    "epsilon",
    "gaussian_dp",
    "steps_for_budget",
]
