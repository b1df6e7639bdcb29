"""Differentially private training for PyTorch, with optimizers corrected for the privacy noise."""

import sys

if sys.platform == "win32":  # before all other imports, which fail there without a remedy
    from privgrad.errors import expected

    # Windows locks bytes of a file against readers too, so nobody could read the ledger of a running training.
    remedy = "install and run privgrad in WSL (`wsl --install`)"
    raise ImportError(f"{expected('import privgrad', 'the system', 'to be Linux or macOS', 'Windows', remedy)}")

from privgrad import audit, clip, federated, filters, noise, optim, perturb, precondition, side_information
from privgrad.budget import Budget
from privgrad.class_rates import ClassRates
from privgrad.comparison import compare
from privgrad.defaults import Suggestion, suggest
from privgrad.deployment import load, save
from privgrad.early_stopping import EarlyStopping
from privgrad.errors import BudgetExceededError, PrivacyError, SamplingError, UnsupportedModuleError
from privgrad.gradient.explanation import Explanation, explain
from privgrad.gradient.public_gradient import PublicGradient
from privgrad.gradient.unused import freeze_unused
from privgrad.heads import Head, fit_head
from privgrad.ledger import Ledger
from privgrad.lineage import ledgers_of
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import PrivateGradient
from privgrad.releases import release_histogram, release_mean, release_second_moment, release_sum
from privgrad.schedule import Schedule
from privgrad.training import fit
from privgrad.training_run import FitResult
from privgrad.types import Batch, NoisyGradient, Scales

__all__ = [
    "Batch",
    "Budget",
    "BudgetExceededError",
    "ClassRates",
    "EarlyStopping",
    "Explanation",
    "FitResult",
    "Head",
    "Ledger",
    "NoisyGradient",
    "PrivacyError",
    "PrivacyPlan",
    "PrivateGradient",
    "PublicGradient",
    "SamplingError",
    "Scales",
    "Schedule",
    "Suggestion",
    "UnsupportedModuleError",
    "audit",
    "clip",
    "compare",
    "explain",
    "federated",
    "filters",
    "fit",
    "fit_head",
    "freeze_unused",
    "ledgers_of",
    "load",
    "noise",
    "optim",
    "perturb",
    "precondition",
    "release_histogram",
    "release_mean",
    "release_second_moment",
    "release_sum",
    "save",
    "side_information",
    "suggest",
]
