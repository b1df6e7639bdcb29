"""The trainings behind the weights of a model, as far as this process knows.

A ledger is kept as long as the weights that it paid for, because a statement needs its counts. It takes 0.3 kB per
release. Lineage is kept in two places, because neither knows every way that weights take:

- with each trained parameter, which may become a part of another module;
- in each module that holds one: a deep copy has other parameters, but its modules have the same attributes.

Nothing tells where weights came from that were loaded from a state dict, or from a pickle. Folders with a statement of
ours are read again by `load`, and by `from_pretrained` of transformers and PEFT.
"""

import os
import re
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from privgrad.accounting.accountant import rounded_up
from privgrad.gradient.functional import Structure
from privgrad.ledger.ledger import Ledger
from privgrad.types import ASSIGNED, RELEASED

_NAME = "_privgrad_lineage"  # of the attribute; `preserved` and `configuration` do not look into its value
_LOADED = (
    "Weights with a privacy statement of their own were loaded into the model: {}. Their training is counted here only "
    "if its record was given too."
)


class Lineage:
    """The ledgers of the trainings that a parameter, or a part of a module, went through."""

    def __init__(self, ledgers: Iterable[Ledger] = (), loaded: Iterable[str] = (), moved_by: str = "") -> None:
        self._ledgers = list(ledgers)
        self.loaded = list(loaded)  # epsilon and delta of the weights that were loaded, by their own statements
        self.moved_by = moved_by  # the optimizer that used a gradient that was not released; "" if none did
        self.holders = weakref.WeakSet[Lineage]()  # of a parameter: those of the modules that hold it

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers)

    def add(self, ledger: Ledger) -> None:
        """Add a ledger, unless it is there already."""
        if ledger not in self._ledgers:
            self._ledgers.append(ledger)

    def remove(self, ledger: Ledger) -> None:
        """Remove a ledger, if it is there."""
        self._ledgers = [one for one in self._ledgers if one is not ledger]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lineage":
        """Return a lineage of its own, which later trainings of the copied module extend."""
        return Lineage(self, self.loaded, self.moved_by)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an empty list in a pickle, which loads without privgrad. A ledger has one holder."""
        return list, ()


_OF_PARAMETERS = cast("MutableMapping[Tensor, Lineage]", WeakTensorKeyDictionary())
_IDS = set[int]()  # of all parameters that were ever in it: looked up far faster
_WARNED = cast("MutableMapping[Optimizer, bool]", WeakIdKeyDictionary())  # optimizers of other models
_MOVED = (
    "{} moved the weights by gradients that were not released as they were. If private data were used for them, no "
    "epsilon covers these weights."
)


def note_training(model: nn.Module | Structure, ledger: Ledger, moved: Collection[str] | None = None) -> None:
    """Note that the releases of a ledger move the weights of a model, until these and their copies are deleted.

    `moved` has the names of the parameters that move; None: the trainable ones. Modules without any, such as a frozen
    encoder, get no note. Call it again when the structure has changed: a part may be unfrozen or added at any time.
    """
    named = model.parameters if isinstance(model, Structure) else list(model.named_parameters())
    trained = [one for name, one in named if (one.requires_grad if moved is None else name in moved)]
    if all(ledger in _OF_PARAMETERS.get(parameter, ()) for parameter in trained):
        return
    for lineage in _made_for(model.model if isinstance(model, Structure) else model, trained):
        lineage.add(ledger)
    _watch_optimizers()


# Fault: an ordinary loop, with a backward pass of its own, on a model that is trained privately.
# Cost: in each step of an optimizer that is not ours, a look-up for each parameter of a private training.
# Warns wrongly: gradients computed from released ones, by `clone` say; gradients of public data alone. Not seen: steps
# without an optimizer of torch, steps on a copy, steps before the first release, and backward passes that add to an
# assigned gradient in place, as after `zero_grad(set_to_none=False)`: a public loss may.
@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: tuple[object, ...], kwargs: object) -> None:
    """Warn if an optimizer moved weights of a private training by another gradient than a released one, or none."""
    given = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    is_plain = len(args) == 1 and not kwargs  # ours take the gradient, LBFGS a closure
    if not given and is_plain and optimizer not in _WARNED and any(map(_is_waiting, ASSIGNED)):
        _WARNED[optimizer] = True
        own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        warn_of_other_model(f"{type(optimizer).__name__}.step", own)
    if known := [(p, group) for p, group in given if id(p) in _IDS]:
        ASSIGNED.clear()  # as this optimizer uses them
    held = [_OF_PARAMETERS.get(p) for p, group in known if _is_moved(p) and group.get("lr") != 0]
    unmarked = [one for one in held if one and not one.moved_by and any(ledger.releases for ledger in one)]
    if not unmarked:
        return
    for lineage in unmarked:
        for one in (lineage, *lineage.holders):
            one.moved_by = one.moved_by or type(optimizer).__name__
    warnings.warn(
        f"{_MOVED.format(type(optimizer).__name__)} Use an optimizer of privgrad.optim; or call grad.assign(model), "
        "with the gradient that PrivateGradient returned, before the step of any other",
        stacklevel=3,
    )


def _is_waiting(model: nn.Module) -> bool:
    """Return whether a model still holds a gradient that it was assigned."""
    return any(p.grad is not None and p.grad in RELEASED for p in model.parameters())


def _is_moved(parameter: Tensor) -> bool:
    """Return whether the `.grad` of a parameter was not released; ours leave none, and that of Opacus has noise."""
    return cast(Tensor, parameter.grad) not in RELEASED and not hasattr(parameter, "summed_grad")


# Fault: an optimizer that was made before `pg.fix`, or before another copy: the model that is trained never moves.
# Cost: one look-up a step. Warns wrongly: weights that are kept apart from the model, and copied to it by hand.
def warn_of_other_model(function: str, parameters: Collection[nn.Parameter]) -> None:
    """Warn if none of an optimizer's parameters, which are trainable, belongs to a model of a private training."""
    if parameters and not any(map(is_trained, parameters)):
        warnings.warn(
            f"{function}: no parameter of this optimizer belongs to the model of the gradient, so this model does "
            "not move. Make the optimizer of its named_parameters(), after `privgrad.fix` or another copy",
            stacklevel=4,  # beyond the step and torch's hooks around it
        )


def is_trained(parameter: nn.Parameter) -> bool:
    """Return whether a parameter itself, and not a copy of it, belongs to a model that was trained here."""
    return parameter in _OF_PARAMETERS


def forget_training(model: nn.Module, ledger: Ledger) -> None:
    """Forget a ledger whose releases another one holds."""
    for lineage in _lineages(model):
        lineage.remove(ledger)


def note_loaded(model: nn.Module, said: str) -> None:
    """Note what the statement says of weights that were loaded into a model."""
    for lineage in _made_for(model, list(model.parameters())):
        lineage.loaded.append(said)


def note_base(model: nn.Module, ledger: Ledger) -> None:
    """Note the privacy of weights that transformers loaded from a folder."""
    for part in model.modules():  # `from_pretrained` notes the folder in a model's configuration
        if folder := str(getattr(getattr(part, "config", None), "_name_or_path", None) or ""):
            note_folder(part, folder, ledger)


def note_folder(model: nn.Module, folder: str | os.PathLike[str], ledger: Ledger | None = None) -> None:
    """Note the privacy that the README.md of a folder of weights states, if there is any, unless `ledger` counts it."""
    path = Path(folder) / "README.md"
    section = re.search(r"(?m)^privacy:\n((?:  .*\n)+)", path.read_text("utf-8") if path.is_file() else "")
    facts = dict[str, str](re.findall(r"(?m)^  (\w+): (.*)$", section[1] if section else ""))
    if not facts and path.with_name("privgrad.pt").is_file():  # a checkpoint, next to its ledger
        is_own = ledger is not None and ledger.path == path.parent.parent.absolute() / "ledger.jsonl"
        facts = {} if is_own else {"unit": "unknown"}
    # After an interruption, the folder is the training's own.
    if facts and not (ledger and ledger.went_through(facts.get("ledger_digest", "").strip("'\""))):
        epsilon, delta = facts.get("epsilon"), facts.get("delta")
        said = f"epsilon = {rounded_up(float(epsilon), 3)} and delta = {delta}" if epsilon else "an unknown epsilon"
        said += f", after others at {earlier}" if (earlier := facts.get("earlier_trainings")) else ""
        note_loaded(model, said)


def _made_for(model: nn.Module, parameters: Collection[nn.Parameter]) -> list[Lineage]:
    """Return the lineages of some parameters and of the modules that hold them; make those that are missing."""
    ours = {id(parameter): _OF_PARAMETERS.setdefault(parameter, Lineage()) for parameter in parameters}
    _IDS.update(ours)
    found = [*ours.values()]
    for module in model.modules():
        if held := [ours[id(parameter)] for parameter in module.parameters() if id(parameter) in ours]:
            if not isinstance(vars(module).get(_NAME), Lineage):
                vars(module)[_NAME] = Lineage()
            found.append(vars(module)[_NAME])
            for lineage in held:
                lineage.holders.add(vars(module)[_NAME])
    return found


def _lineages(model: nn.Module) -> list[Lineage]:
    found = [vars(module).get(_NAME) for module in model.modules()]
    found += [_OF_PARAMETERS.get(parameter) for parameter in model.parameters()]
    return [lineage for lineage in found if isinstance(lineage, Lineage)]


def loaded_into(model: nn.Module) -> list[str]:
    """Return a sentence on each statement of weights that this process loaded into a model or its parts."""
    return list(map(_LOADED.format, said_of_loaded(model)))


def _movers(model: nn.Module) -> list[str]:
    """Return the names of optimizers that moved a model by gradients that were not released, each once."""
    return list(dict.fromkeys(held.moved_by for held in _lineages(model) if held.moved_by))


def said_of_moves(model: nn.Module) -> list[str]:
    """Return a sentence on each optimizer that moved a model by gradients that were not released."""
    return list(map(_MOVED.format, _movers(model)))


def moves_of(model: nn.Module) -> dict[str, str]:
    """Return the part of a checkpoint that keeps what `said_of_moves` says; empty if it says nothing."""
    return {"moved_by": " and ".join(names)} if (names := _movers(model)) else {}


def note_moves(model: nn.Module, moved_by: str) -> None:
    """Note what a checkpoint keeps of the moves of a model."""
    for lineage in _lineages(model):
        lineage.moved_by = lineage.moved_by or moved_by


def said_of_loaded(model: nn.Module) -> list[str]:
    """Return what the statements say of weights that this process loaded into a model or its parts, each once."""
    return list(dict.fromkeys(one for held in _lineages(model) for one in held.loaded))


def warn_if_trained(model: nn.Module, ledger: Ledger) -> None:
    """Warn if the model had private trainings that a ledger, which begins now, does not count."""
    others = [one for one in ledgers_of(model) if not covers(ledger, one)]
    others = [one for one in others if one.budget != ledger.budget or not one.budget]  # it counts all that it opened
    loaded = said_of_loaded(model)
    if not (others or loaded):
        return
    known = [f"with {sum(one.releases for one in others):,} releases"] if others else []
    known += [f"at {one} (its files say so)" for one in loaded]
    ledgers = "privgrad.ledgers_of(model)" + (", and those of the files" if loaded else "")
    warnings.warn(
        f"the model was trained before, {' and '.join(known)}, which this ledger does not count: the weights cost the "
        f"epsilon of all together. Build a new model; or give `statement` and `save` all ledgers, {ledgers}",
        stacklevel=6,  # the call of PrivateGradient, beyond two frames of torch._disable_dynamo
    )


def ledgers_of(model: nn.Module) -> list[Ledger]:
    """Return the ledgers of all private trainings of a model that this process knows, each once.

    They are those of the model, of its parts and of the models that it was copied from by `copy.deepcopy`. They are
    known as long as the model exists, even if nothing else holds them. `save(model, folder, ledger=ledgers_of(model))`
    states them together.

    Args:
        model: a module.
    Returns:
        The ledgers with at least one release. Not known are trainings in other processes, and those of weights that
        were loaded from a state dict or a pickle.
    """
    kept = list[Ledger]()
    for ledger in dict.fromkeys(one for lineage in _lineages(model) for one in lineage if one.releases):
        if not any(covers(other, ledger) for other in kept):  # a file that was opened again is one training
            kept = [*(other for other in kept if not covers(ledger, other)), ledger]
    return kept


def covers(record: Ledger, other: Ledger) -> bool:
    """Return whether a ledger holds all releases of another: it is the same one, or has all lines of its file."""
    return record is other or record.went_through(other.head)
