"""save() and load(): the weights of a trained model with its privacy statement, and nothing else."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copyfile
from typing import Literal

import torch
from torch import Tensor, nn

from privgrad.accounting.accountant import rounded_up
from privgrad.errors import described, expected, readable
from privgrad.features.saving import require_place, safetensors, written_whole
from privgrad.ledger.budget import Budget, is_budget
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import covers, ledgers_of, loaded_into, note_loaded, said_of_moves
from privgrad.private_gradient import require_model
from privgrad.processes import ALONE
from privgrad.statement.text import About, Section, Statement, budget_statement, public_facts, statement
from privgrad.training.checkpoint import damage_refused, is_plain, read_checkpoint

_FORMAT = 1  # of statement.json
WEIGHTS, TEXT, FACTS = "model.safetensors", "statement.txt", "statement.json"
Record = Ledger | Budget | str | os.PathLike[str]


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    ledger: Record | Sequence[Record],
    delta: float | None = None,
    post_processing: str | None = None,
    about: About | None = None,
    overwrite: bool = False,
) -> Statement:
    """Write a trained model for publication: its weights, and the statement on the training.

    The folder holds model.safetensors (the state dict), statement.txt and statement.json. It holds no state of the
    optimizer, no curve, no times and no data.

    Args:
        model: a trained module.
        folder: a new or empty folder, or with `overwrite` one that `save` wrote.
        ledger: of the training, or its file; or the budget, or its file, if a budget holds the releases. A sequence of
            ledgers if several trainings made the weights: `ledgers_of(model)` returns those that this process knows.
        delta: in (0, 1). None: the delta that the ledgers record.
        post_processing: what changed the weights after the training, in a few words: "merged the adapters", say. It
            is stated as declared. None: nothing did, and the weights are compared with checkpoint.pt in the folder of
            the ledger, if there is one.
        about: `privgrad.statement.About`: title, model, purpose and data set, which the statement gives as declared.
        overwrite: replace a folder that `save` wrote, as a whole, if nothing in it was added or changed since. Any
            other folder with files is refused.
    Returns:
        The statement, with a section on the weights. A research seed, a simulated plan or batches of a fixed size are
        named in its first section, because then there is no guarantee.
    Raises:
        PrivacyError: the model is a Head; the ledger holds no release; this process trained the model, or one that it
            was copied from, with another ledger too; the weights are not those of the checkpoint; `statement` refuses
            the ledgers; the folder holds files; or tensors of the model are sharded.
    Privacy:
        Weights are post-processing of released gradients if they were computed from these and public data alone. The
        statement says how far this was checked. Buffers that the model computes from private data itself, such as
        running means, are not covered; PrivateGradient refuses the layers that have them.
    """
    require_model("save", model)
    if getattr(model, "saves_itself", False):
        remedy = "call head.save(folder): it also writes the extractor and the statement"
        raise expected("save", "model", "to be no Head", "a Head", remedy)
    state = model.state_dict()
    if any(hasattr(value, "to_local") for value in state.values()):
        remedy = "gather the weights into a whole model first: docs/processes.md, Several processes"
        raise expected("save", "model", "to have whole tensors", "sharded ones", remedy)
    place = require_place("save", folder, overwrite=overwrite, is_own=_is_saved)
    if post_processing is not None and not post_processing.strip():
        raise expected("save", "post_processing", "to be a few words", described(post_processing))
    given = [ledger] if isinstance(ledger, Ledger | Budget | str | os.PathLike) else ledger
    records = [opened(record) for record in given]
    if any(isinstance(record, Ledger) and record.plan_facts.get("canaries") for record in records):
        remedy = "train it again without them: the model of an audit must not be released"
        raise expected("save", "ledger", "to be of a training without canaries", "that of an audit", remedy)
    said = statement_of("save", records, delta, about)
    if not said.numbers["releases"]:
        raise expected("save", "ledger", "to hold releases", 0, "give the ledger of the training that made the weights")
    origin, (first, *others) = Section("Weights", _origin(model, records, post_processing)), said.sections
    if moves := said_of_moves(model):
        first = replace(first, sentences=(*moves, *(f"Otherwise: {each}" for each in first.sentences)))
    said = replace(said, sections=(first, *others, origin))
    with written_whole(place, overwrite=overwrite) as partial:
        safetensors().save_model(model, str(partial / "weights"))
        copyfile(partial / "weights", partial / WEIGHTS)  # of the usual mode: only its owner may read the first one
        (partial / "weights").unlink()
        (partial / TEXT).write_text(f"{said}\n", encoding="utf-8")
        facts = {
            "format": _FORMAT,
            "weights": {"file": WEIGHTS, "sha256": _digest(partial / WEIGHTS), "tensors": len(state)},
            "numbers": {  # JSON has no infinite numbers
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in said.numbers.items()
            },
            "about": asdict(said.about),
            "plans": [public_facts(record) for record in records if isinstance(record, Ledger)],
            "statement": [asdict(section) for section in said.sections],
        }
        (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return said


def load(model: nn.Module, folder: str | os.PathLike[str]) -> Statement:
    """Load the weights of a folder that `save` wrote into a model. Nothing in the folder is executed.

    A later `save` of the model names the epsilon of these weights.

    Args:
        model: of the same architecture. Its parameters and buffers are overwritten, where they are.
        folder: of `save`.
    Returns:
        The statement of the folder.
    Raises:
        PrivacyError: files are missing or damaged, the weights are not those of the statement, or the model has other
            tensors.
    """
    require_model("load", model)
    if getattr(model, "saves_itself", False):
        raise expected("load", "model", "to be no Head", "a Head", "call Head.load(folder), which returns the head")
    place = Path(folder)
    with readable("load", f"{place}", "to hold a saved model", "give the folder that pg.save wrote"):
        facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
        version, digest = facts["format"], facts["weights"]["sha256"]
        found = _digest(place / WEIGHTS)
        sections = tuple(Section(part["heading"], tuple(part["sentences"])) for part in facts["statement"])
        numbers = {name: math.inf if value is None else value for name, value in facts["numbers"].items()}
        about = About(**facts.get("about", {}))  # absent in folders of older versions
    if version != _FORMAT:
        raise expected("load", f"the format of {place}", f"to be {_FORMAT}, of this version of privgrad", version)
    if found != digest:
        remedy = "restore the folder from a copy: the statement is on other weights"
        raise expected("load", f"the SHA-256 of {place / WEIGHTS}", f"to be {digest}", found, remedy)
    try:
        safetensors().load_model(model, str(place / WEIGHTS))
    except Exception as error:  # safetensors and torch raise errors of several types
        remedy = "make the model with the same code and sizes as before"
        remedy += ", or give privgrad.fix(model)" if "running_mean" in str(error) else ""
        got = " ".join(str(error).split())[:300]
        raise expected("load", "model", f"to have the tensors of {place / WEIGHTS}", got, remedy) from error
    size, delta = (rounded_up(float(numbers[name]), 4) for name in ("epsilon", "delta"))
    note_loaded(model, f"epsilon = {size} and delta = {delta}")
    return Statement(sections, numbers, about)


def _is_saved(place: Path) -> bool:
    """Return whether a folder holds what `save` wrote, unchanged, and nothing else."""
    if {path.name for path in place.iterdir()} != {WEIGHTS, TEXT, FACTS}:
        return False
    try:
        facts = json.loads((place / FACTS).read_text(encoding="utf-8"))
        return facts["format"] == _FORMAT and facts["weights"]["sha256"] == _digest(place / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def opened(record: Record) -> Ledger | Budget:
    """Return a ledger or a budget, read from its file if it is a path."""
    if isinstance(record, Ledger | Budget):
        return record
    path = Path(record)
    if path.is_dir():
        found = " ".join(map(str, sorted(path.rglob("ledger.jsonl"))))
        remedy = f"give {found or 'a ledger.jsonl, or the file of a budget'}"
        if (path / TEXT).exists():
            remedy = f"read {path / TEXT}; for a page, give the ledger of the training"
        raise expected("privgrad statement", f"{path}", "to be a file", "a folder", remedy)
    return Budget(path) if is_budget(path) else Ledger(path, read_only=True)


def statement_of(
    function: str,
    records: Sequence[Ledger | Budget],
    delta: float | None,
    about: About | None,
    appendix: Literal["nist"] | None = None,
) -> Statement:
    """Return the statement on ledgers, or on one budget."""
    ledgers = [record for record in records if isinstance(record, Ledger)]
    if len(ledgers) == len(records):
        return statement(ledgers, delta=delta, about=about, appendix=appendix)
    budget = records[0]
    if records[1:] or delta is not None or isinstance(budget, Ledger):
        got = f"{len(records)} records and delta {delta}"
        remedy = "give it alone: it covers all of its ledgers. For people in others too, epsilons and deltas add up"
        raise expected(function, "a budget", "to be given alone", got, remedy)
    return budget_statement(budget, about=about, appendix=appendix)


def _origin(model: nn.Module, records: Sequence[Ledger | Budget], changes: str | None) -> tuple[str, ...]:
    """Return how the weights are tied to the records; PrivacyError if the records lack a training in this process."""
    begun = loaded_into(model) or [
        "If the training began with weights of an earlier private training, that one is counted only if its record was "
        "given too."
    ]
    moves, known = said_of_moves(model), ledgers_of(model)
    begun = [*moves, *begun]
    for held in known:
        if not any(_covers(record, held) for record in records):
            got = f"a training with {held.releases} releases, recorded in {held.path or 'memory'}"
            remedy = "give privgrad.ledgers_of(model), or the budget; if the weights were reset after that training, "
            remedy += "load the state dict of the model into a newly built one, and save that one"
            raise expected("save", "ledger", "to cover every training of the model in this process", got, remedy)
    if changes is not None:
        return (
            f"After the training, the weights were changed, as declared: {' '.join(changes.split())}.",
            "This costs no privacy if no private data were used for it. Nothing checks this.",
            *begun,
        )
    if known:
        remedy = "save the model as its training left it, or say in post_processing what changed the weights"
        said = "The process that trained the model with this record saved its weights."
        if _is_at_checkpoint(model, [held.path for held in known], remedy):
            return (f"{said} They are those of the checkpoint that was written with it.", *begun)
        said += " That they were not changed since is only the word of the person who saved them."
        return (said, *begun)
    paths = [record.path for record in records if isinstance(record, Ledger)]
    remedy = "give the ledger of this model's training, or say in post_processing what changed the weights"
    if _is_at_checkpoint(model, paths, remedy):
        return ("The weights are those of the checkpoint that was written with this record.", *begun)
    return ("That these weights belong to this record is only the word of the person who saved them.", *begun)


def _is_at_checkpoint(model: nn.Module, ledgers: Sequence[Path | None], remedy: str) -> bool:
    """Return whether checkpoints lie next to ledgers; raise PrivacyError unless the model has the weights of one."""
    beside = [path.with_name("checkpoint.pt") for path in ledgers if path is not None]
    checkpoints = [path for path in beside if path.exists() and not is_plain(path)]
    if checkpoints and not any(_is_of(model, checkpoint) for checkpoint in checkpoints):
        condition = f"to have the weights of {' or '.join(map(str, checkpoints))}"
        raise expected("save", "model", condition, "different weights", remedy)
    return bool(checkpoints)


def _covers(record: Ledger | Budget, held: Ledger) -> bool:
    """Return whether the statement on a record counts the releases of a ledger."""
    if isinstance(record, Budget):
        own = next((one for one in record.commitments if one.name == held.commitment), None)
        is_there = own is not None and (own.ledger is None or held.path is None or held.path.is_relative_to(own.ledger))
        return held.budget == record.path.name and is_there
    return covers(record, held)


def _is_of(model: nn.Module, checkpoint: Path) -> bool:
    """Return whether the model has the weights, or the averaged weights, of a checkpoint of `fit`."""
    with damage_refused("save", checkpoint):
        held = read_checkpoint(checkpoint)
        if "shards" in held:
            from privgrad.training import shard_files  # takes as long to import as all else

            held = shard_files.read(held, checkpoint, model, ALONE)
        of_average: dict[str, Tensor] = held["averaged"] or {}
        averaged = {name.removeprefix("module."): value for name, value in of_average.items()}
        averaged.pop("n_averaged", None)
    own = model.state_dict()
    return any(
        all(v.shape == other[n].shape and torch.equal(v.cpu(), other[n].cpu()) for n, v in own.items())
        for other in (held["model"], averaged)
        if own.keys() == other.keys()
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
