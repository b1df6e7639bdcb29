"""fix(): replace layers that private training refuses, in a copy of a model."""

import copy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils import parametrize

from privgrad.checks.model_and_loss import FROZEN, KEEPS, MIXES, SHORTENS, Problem, find_problems, listed
from privgrad.errors import UnsupportedModuleError, expected, readable
from privgrad.private_gradient import require_model
from privgrad.progress import note, notes_only

_MOST_GROUPS = 8  # with 16 groups of 64 channels, or one, a small ResNet lost two to three points
_FEWEST_CHANNELS = 2  # in a group: one channel at one position would be a constant
_FEWEST_FEATURES = 3  # of BatchNorm1d, whose examples may have one position: two features would keep one sign
_OF_BATCHES = frozenset({"num_features", "momentum", "track_running_stats", "process_group", "_buffers"})
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def fix(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose layers private training takes, and print on stderr what was replaced.

    - BatchNorm1d, 2d, 3d and SyncBatchNorm become GroupNorm with the same weights and biases. Running statistics are
      lost. BatchNorm1d gets one group, as LayerNorm has. The others get up to 8 groups of at least 2 channels.
    - InstanceNorm keeps no running statistics.
    - Embedding and EmbeddingBag shorten no rows: `max_norm` is None.

    Shared layers and shared parameters stay shared. A BatchNorm that alone is in evaluation mode stays, too: its
    statistics do not change. Make the optimizer from the parameters of the model that is returned.

    Args:
        model: the module; it is not changed.
    Returns:
        The copy, in the mode of the model. A model without such layers is copied, too.
    Raises:
        PrivacyError: model is no module, or copy.deepcopy fails.
        UnsupportedModuleError: a layer cannot be replaced; the message names all of them.
    Privacy:
        It reads no data. `ledgers_of` knows the private trainings of the model from its copy, too.
    """
    require_model("fix", model)
    if not model.training:  # what matters is how it computes in training
        return fix(_copied(model, {}).train()).eval()
    memo, left, said = dict[int, Any](), list[Problem](), dict[str, list[str]]()
    for problem in find_problems(model):
        module, kind = model.get_submodule(problem.path), problem.module
        change = {KEEPS: f"statistics of {kind} by none", SHORTENS: f"max_norm of {kind} by None"}.get(problem.what, "")
        if problem.what == MIXES:
            change, why = f"{kind} by GroupNorm", _why_not(module)
            if why:
                problem, change = Problem(problem.path, kind, *why), ""
            else:
                memo[id(module)] = _group_norm(module)
        if change:
            said.setdefault(change, []).append(problem.path or "the model")
        elif problem.what != FROZEN:
            left.append(problem)
    if left:
        got = "; ".join(f"{one.module} at '{one.path}', which {one.what} ({one.remedy})" for one in left)
        remedy = "change these by hand"
        raise expected("fix", "model", "to have layers that can be replaced", got, remedy, UnsupportedModuleError)
    # With these in its memo, deepcopy puts the new layers wherever the old ones are: in lists and attributes, too.
    for module in [module for module in model.modules() if id(module) in memo]:
        kept = {name: value for name, value in vars(module).items() if name not in _OF_BATCHES}
        vars(memo[id(module)]).update(copy.deepcopy(kept, memo))
    fixed = _copied(model, memo)
    for module in (fixed.get_submodule(problem.path) for problem in find_problems(fixed)):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.max_norm = None
        elif isinstance(module, _InstanceNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    changes = "; ".join(f"{change} at {listed(places)}" for change, places in said.items())
    note(notes_only(), f"privgrad.fix replaced {changes or 'nothing: nothing in this model needs it'}")
    return fixed


def _group_norm(module: Any) -> nn.GroupNorm:
    """Return a GroupNorm for the channels of a BatchNorm, without weights and biases."""
    channels: int = module.num_features
    sizes = range(_FEWEST_CHANNELS, channels + 1)
    fitting = (channels // size for size in sizes if channels % size == 0 and channels // size <= _MOST_GROUPS)
    groups = 1 if isinstance(module, nn.BatchNorm1d) else next(fitting, 1)
    return nn.GroupNorm(groups, channels, module.eps, affine=False)


def _why_not(module: Any) -> tuple[str, str] | None:
    """Return why a BatchNorm cannot be replaced, and a remedy; None if it can be."""
    has_own = type(module).forward not in _FORWARDS or "forward" in vars(module) or parametrize.is_parametrized(module)
    if has_own:
        return "computes more than BatchNorm", "write it with GroupNorm or LayerNorm"
    if module.num_features == 0:
        return "has no number of channels yet", "run one public example through the model first"
    if isinstance(module, nn.BatchNorm1d) and module.num_features < _FEWEST_FEATURES:
        what = f"normalizes {module.num_features} features, of which an example alone would keep signs at most"
        return what, "delete it, and scale its inputs by public numbers; for inputs with positions, use GroupNorm(1, C)"
    return None


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    remedy = "take computed tensors out of its attributes, or build it again"
    with readable("fix", "model", "to be copied by copy.deepcopy", remedy):
        return copy.deepcopy(model, memo)
