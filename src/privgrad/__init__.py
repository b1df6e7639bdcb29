"""Differentially private training for PyTorch, with optimizers corrected for the privacy noise.

A privacy reviewer of one step reads these files, in this order. The guarantee rests on them:

    private_gradient.py        admit a batch, sum, noise, charge: what every other file must deliver
    types.py                   Batch, Sampling, ClippedSum, NoisyGradient
    plan.py                    the public numbers
    sampling/draws.py          which examples a step uses
    gradient/contribution.py   what one example adds
    gradient/reference.py      the trusted engine: each example by itself
    gradient/functional.py     parameters, buffers and modes of a module, kept as they were
    gradient/secret_draws.py   dropout by secret numbers
    gradient/factor.py         norms and sums of gradients
    clip/clipping.py           clip to norm C, add, state the sensitivity
    noise/gaussian.py          one normal for each number of the sum
    rng.py                     secret streams of random numbers
    accounting/mechanisms.py   what a release is
    accounting/composition.py  epsilon of releases, by dp_accounting
    ledger/ledger.py           charge a release before it is returned
    ledger/file.py             the record on disk
    processes.py               threads, and several processes; one alone returns what it is given
    errors.py                  the form of an error

`parts.py`, and the rest of these rooms, concern options: groups, noise with memory, adaptive C, budgets. All else
serves speed, warnings and use. `engine/` is fast and compared with the reference; `checks/` find mistakes and prove
nothing. `privgrad_lab`, a second package, runs experiments.

A wrong gradient that depends on its own example alone is clipped like any other, and only useless. A wrong norm, or a
gradient that depends on other examples, breaks the guarantee.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if sys.platform == "win32":  # before all other imports, which fail there without a remedy
    from privgrad.errors import expected

    # Windows locks bytes of a file against readers too, so nobody could read the ledger of a running training.
    remedy = "install and run privgrad in WSL (`wsl --install`)"
    raise ImportError(f"{expected('import privgrad', 'the system', 'to be Linux or macOS', 'Windows', remedy)}")

# Public modules whose code stands in another room. Each is one module under both names. A stub file of the public
# name, such as filters.pyi, tells type checkers.
ALIASES = {
    "privgrad.augmentation": "privgrad.perturb.augmentation",
    "privgrad.estimators": "privgrad.heads.sklearn",
    "privgrad.federated": "privgrad.perturb.local_training",
    "privgrad.filters": "privgrad.optim.filters",
    "privgrad.integrations.distributed": "privgrad.training.distributed",
    "privgrad.integrations.external_loop": "privgrad.training.external_loop",
    "privgrad.integrations.model_card": "privgrad.statement.model_card",
    "privgrad.pretrained": "privgrad.features.pretrained",
    "privgrad.side_information": "privgrad.precondition.counts",
}
# Former places of what pickles and saved experiments of version 0.1 name. New code uses the new places.
_FORMER = {
    "privgrad.class_rates": "privgrad.sampling.class_rates",
    "privgrad.correlation": "privgrad.noise.banded",
    "privgrad.data.debian": "privgrad_lab.data.debian",
    "privgrad.data.sentiment": "privgrad_lab.data.sentiment",
    "privgrad.data.stackoverflow": "privgrad_lab.data.stackoverflow",
    "privgrad.data.synthetic": "privgrad_lab.data.tabular",
    "privgrad.data.tabular": "privgrad_lab.data.tabular",
    "privgrad.data.text": "privgrad_lab.data.text",
    "privgrad.data.users": "privgrad.data.dataset",
    "privgrad.features.frozen_text": "privgrad.features.frozen",
    "privgrad.features.public_images": "privgrad.features.images",
    "privgrad.features.public_words": "privgrad.features.text",
    "privgrad.features.scaled": "privgrad.features.whitened",
    "privgrad.gradient.clipping": "privgrad.clip",
    "privgrad.models.convolutional": "privgrad_lab.models.convolutional",
    "privgrad.models.each_row": "privgrad.models.layers",
    "privgrad.models.fully_connected": "privgrad.models.layers",
    "privgrad.models.language": "privgrad_lab.models.language",
    "privgrad.schedule": "privgrad.training.schedule",
}


class _Aliases(MetaPathFinder, Loader):
    """A finder of modules under their public or former names."""

    places: ClassVar[dict[str, str]] = ALIASES | _FORMER

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.places else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes it from there.
        sys.modules[module.__name__] = import_module(self.places[module.__name__])


sys.meta_path.append(_Aliases())

from privgrad import audit, checks, clip, gradient, noise, optim, perturb, precondition
from privgrad.checks.fixing import fix
from privgrad.checks.randomness import require_equal_alone
from privgrad.engine import explanation
from privgrad.engine.compiled import Compiled
from privgrad.engine.explanation import Explanation, explain
from privgrad.engine.factored import Factored
from privgrad.engine.factors import mapped
from privgrad.engine.factors.conv import Convolution
from privgrad.engine.factors.embedding import Rows
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers.base import Rule, register_rule
from privgrad.errors import BudgetExceededError, PrivacyError, SamplingError, UnsupportedModuleError
from privgrad.gradient.probes import freeze_unused
from privgrad.gradient.reference import Vmap
from privgrad.gradient.transform import Scales
from privgrad.heads import Head, fit_head
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import ledgers_of
from privgrad.optim import filters
from privgrad.parts import Parts
from privgrad.perturb import local_training as federated
from privgrad.plan import PrivacyPlan
from privgrad.plugins import from_lab
from privgrad.precondition import counts as side_information
from privgrad.precondition.public_gradient import PublicGradient
from privgrad.private_gradient import PrivateGradient
from privgrad.releases import release_histogram, release_mean, release_second_moment, release_sum
from privgrad.sampling.class_rates import ClassRates
from privgrad.sampling.loading import Examples
from privgrad.statement.saved import load, save
from privgrad.training import FitResult, fit
from privgrad.training.defaults import Suggestion, suggest
from privgrad.training.run import EarlyStopping
from privgrad.training.schedule import Schedule
from privgrad.types import Batch, NoisyGradient

# PrivateGradient knows no more of what stands below the guarantee than it is handed here.
Parts.engines |= {"factored": Factored, "vmap": partial(Vmap, check=require_equal_alone)}
Parts.checks, Parts.input_maps, Parts.explanation = checks, mapped, explanation
Examples.require_no_memory = staticmethod(checks.require_no_memory_in_collate)
Parts.compiled = Compiled

# A user's own rule is written with these. They belong to the engine, on which `gradient` does not stand.
for _lent in (Convolution, Outer, Rows, Rule, register_rule):
    setattr(gradient, _lent.__name__, _lent)

if TYPE_CHECKING:
    compare: Callable[..., dict[str, Any]]
else:

    def __getattr__(name):
        if name == "compare":  # of privgrad_lab, which needs packages that training does not
            return from_lab("compare")
        raise AttributeError(f"module 'privgrad' has no attribute {name!r}")


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
    "fix",
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
