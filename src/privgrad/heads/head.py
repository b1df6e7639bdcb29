"""A private linear head: what it predicts, and how it is saved and loaded. All of it is post-processing."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privgrad.data.dataset import NO_LABEL, DataSet, has_label
from privgrad.data.read_rows import Frame, records_of
from privgrad.data.schema import Schema, schema_of
from privgrad.data.table import declaration_of, is_rows, require_codes, row_codes, width_of
from privgrad.errors import PrivacyError, expected, readable
from privgrad.features.extractor import Extractor, first_infinite
from privgrad.features.saving import (
    CONFIG,
    CONSTANTS,
    load_extractor,
    require_place,
    safetensors,
    save_extractor,
    written_whole,
)
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import Lineage, covers, ledgers_of
from privgrad.models import UnitLinear
from privgrad.plan import PrivacyPlan
from privgrad.statement.text import Section, public_facts, statement
from privgrad.training.run import FitResult

_BLOCK = 4096  # rows that are predicted at once
_MOST_TAGS = 5  # that `predict` returns
_FORMAT = 1  # of head.json
_FACTS, _WEIGHTS, _TEXT, _EXTRACTOR = "head.json", "weights.safetensors", "statement.txt", "extractor"
Row = Mapping[str, Any]  # of a table, by column name
Rows = Tensor | np.ndarray[Any, Any] | Sequence[str] | Row | Sequence[Row] | Frame


def cost_of(
    model: nn.Module, privacy: Mapping[str, Any], ledgers: Iterable[Ledger]
) -> tuple[dict[str, Any], Sequence[Ledger]]:
    """Return the public facts of all trainings of a head, and their ledgers, as far as this process knows them.

    `privacy` and `ledgers` are those of the training that made the head. With later trainings, epsilon covers all.
    """
    own = [ledger for ledger in ledgers if ledger.releases]
    further = [ledger for ledger in ledgers_of(model) if not any(covers(one, ledger) for one in own)]
    if not further:
        return dict(privacy), own
    try:
        # Without a ledger of its own, and for different units or within a budget, no statement covers all.
        numbers = statement([*own, *further] if own else [], delta=privacy.get("delta")).numbers
    except PrivacyError as error:
        count, releases = len(further), sum(one.releases for one in further)
        got = f"{count} later training{'s' * (count > 1)} with {releases} release{'s' * (releases > 1)}"
        remedy = "call privgrad.save(head.model, folder, ledger=...) with the ledgers of all trainings, or their budget"
        remedy += "; for trainings of different units, save a copy of the head from before the later one"
        raise expected("Head", "the head", "to have had no training that it cannot count", got, remedy) from error
    is_guarantee = numbers["covered_by_accountant"] and math.isfinite(numbers["epsilon"])
    epsilon = numbers["epsilon"] if is_guarantee else None
    later = [{**public_facts(ledger), "ledger": ledger.head} for ledger in further]
    return {**privacy, "epsilon": epsilon, "further": later}, [*own, *further]


@dataclass(frozen=True)
class Target:
    """The target of a head: classes, tags or a bounded number, which may be a count."""

    kind: Literal["class", "tags", "number"]
    outputs: int  # number of classes or tags, or 1
    low: float = 0.0  # public bounds of a number
    high: float = 1.0
    counts: bool = False  # whether the output is the logarithm of a rate, over that of `start`

    @classmethod
    def of(cls, data: DataSet) -> "Target":
        """Return the target of a head on a data set."""
        if data.score == "r2":
            assert data.schema is not None, 'the score "r2" needs a schema with bounds'
            assert data.schema.bounds is not None
            return cls("number", 1, *data.schema.bounds, counts=data.schema.counts)
        return cls("tags" if data.train.tensors[1].is_floating_point() else "class", data.num_classes)

    @property
    def middle(self) -> float:  # where a head begins
        return (self.low + self.high) / 2

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def start(self) -> float:
        """The logarithm of the rate where a head for counts begins: between 1 and the largest."""
        return math.log1p(self.high) / 2

    def prepared(self, labels: Tensor) -> Tensor:
        """Return labels as `losses` takes them: numbers are cut to their bounds; those but counts move to [-1, 1]."""
        if self.counts:
            return labels.double().clamp(self.low, self.high).float()
        if self.kind == "number":
            return ((labels.double().clamp(self.low, self.high) - self.middle) / self.half).float()
        return labels.float() if self.kind == "tags" else labels.long()

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return one loss per row of the batch, (B,): the mean over a person's rows that have a label."""
        losses = self.losses_of(model(batch[0]), batch[1])
        return losses if losses.ndim == 1 else losses.sum(1) / has_label(batch[1]).sum(1).clamp(min=1)

    def losses_of(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label that `prepared` returned, or of all tags of a row; 0 where there is none."""
        if self.kind == "tags":  # all tags of a row have equal shares
            shares = labels / labels.sum(1, keepdim=True).clamp(min=1)
            return F.cross_entropy(outputs, shares, reduction="none")
        if self.kind == "class":
            return F.cross_entropy(outputs.movedim(-1, 1), labels, ignore_index=NO_LABEL, reduction="none")
        known = has_label(labels)
        values, outputs = torch.where(known, labels, 0), outputs.squeeze(-1)
        if self.counts:
            # Half of Poisson's deviance, e^z - y z + y log y - y, over the root of the largest count, which is about
            # the standard deviation of large ones. Beyond the largest rate it is linear, so that nothing overflows.
            logs = outputs + self.start
            above = (logs - math.log(self.high)).relu()
            rates = (logs - above).exp() + self.high * above
            return (rates - values * logs + torch.xlogy(values, values) - values) / math.sqrt(self.high) * known
        # Half of the squared error, in units of half the distance between the bounds.
        return (outputs - values).square() / 2 * known

    def decoded(self, outputs: Tensor) -> Tensor:
        """Return classes (n,), the likeliest tags (n, 5) in their order, or numbers or rates of counts (n,)."""
        if self.counts:
            return (outputs.squeeze(-1) + self.start).exp().clamp(self.low, self.high)
        if self.kind == "number":
            return self.middle + self.half * outputs.squeeze(-1).clamp(-1, 1)
        return outputs.argmax(-1) if self.kind == "class" else outputs.topk(min(_MOST_TAGS, self.outputs)).indices


class Head(nn.Module):
    """A private linear head with the extractor of its features.

    Attributes:
        saves_itself: True: `privgrad.save` refuses it.
        model: a UnitLinear, from features to outputs.
        extractor: from raw rows to features; None if the rows are features.
        target: see Target.
        classes: the public names of the classes or tags 0, 1, ..., for `save`; None if they are unknown.
        schema: of the table of the training, `DataSet.schema`, for rows by column name; None for other data.
        image_shape: (channels, height, width) of all images, a public number; `predict` refuses others. None if it is
            not declared. Set it after `fit_head`.
        privacy: the public facts of the training: epsilon, delta, the plan and the sources of the features. `epsilon`
            and `save` also count later trainings.
        result: of the training; None for a loaded head.
    """

    saves_itself = True

    def __init__(
        self,
        model: UnitLinear,
        target: Target,
        extractor: Extractor | None = None,
        *,
        privacy: Mapping[str, Any],
        classes: Sequence[Any] | None = None,
        image_shape: Sequence[int] | None = None,
        schema: Schema | None = None,
        result: FitResult | None = None,
    ) -> None:
        super().__init__()
        self.model, self.extractor = model, extractor
        self.target, self.privacy, self.result = target, dict(privacy), result
        self._made_by = Lineage(ledgers_of(model) if result is None else [result.ledger])  # what `privacy` counts
        self.classes = None if classes is None else list(classes)
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self.schema = schema
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the result out of copies and pickles: its ledger has one holder."""
        return {**self.__dict__, "result": None}

    @property
    def epsilon(self) -> float:
        """The epsilon that the training has cost, at the delta of its plan; infinite without a guarantee.

        It counts later private trainings of `model` in this process. With a research seed, this number holds for people
        who do not know the seed. If `privacy` names a budget, quote the statement on the budget, which also covers
        other releases from the same data.

        Raises:
            PrivacyError: no statement covers the training and the later ones together.
        """
        epsilon = cost_of(self.model, self.privacy, self._made_by)[0]["epsilon"]
        return math.inf if epsilon is None else epsilon

    def forward(self, rows: Rows) -> Tensor:
        """Return the outputs for rows, (n, outputs), float32.

        Args:
            rows: what the extractor takes: a tensor or an array with leading dimension n, or n texts. Without an
                extractor, features of shape (n, width). With a schema also a list of n dicts by column name, one dict,
                or a DataFrame of pandas; they are encoded as `data.table` encodes a file, and other columns are not
                read. Without a schema, a DataFrame counts as the array of its numbers.
        Raises:
            PrivacyError: the rows are of another kind, or a row has features that are not finite. A row of a table
                lacks a column, has a value that the schema does not declare, or cannot be codes of its columns.
        """
        if torch.compiler.is_exporting():  # torch cannot load a block without gradients; values are unknown
            return self.model(rows if self.extractor is None else self.extractor(rows))
        if isinstance(rows, Frame):
            numbers: np.ndarray[Any, Any] = rows.to_numpy()
            rows = records_of(rows) if self.schema is not None or numbers.dtype.kind not in "biuf" else numbers
        given: Any = self.encode(cast(Any, rows)) if is_rows(rows) else rows
        made: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(given), _BLOCK):
                features = self._features(given[start : start + _BLOCK], start)
                made.append(self.model(features.to(self.model.linear.weight.device)))
        return torch.cat(made) if made else torch.zeros(0, self.target.outputs)

    def encode(self, rows: Row | Sequence[Row]) -> Tensor:
        """Return the codes of rows of a table, (n, width), as `data.table` makes them. An exported head takes these.

        Args:
            rows: one dict by column name, or a list of n. Other columns are not read.
        Raises:
            PrivacyError: the head has no schema, or a row lacks a column or has a value that is not declared.
        """
        if self.schema is None:
            remedy = "give fit_head schema=data.schema; in a pipeline, whose steps make codes, joblib.dump the pipeline"
            raise expected("Head", "head.schema", "to be given for rows by column name", None, remedy)
        return row_codes("Head", self.schema, rows)

    def _features(self, rows: Any, start: int) -> Tensor:
        """Return the features of a few rows, of which the first has the number `start`."""
        if isinstance(rows, np.ndarray):
            rows = rows.tolist() if rows.dtype.kind in "OSU" else torch.as_tensor(rows.copy())
        if self.image_shape is not None and (not isinstance(rows, Tensor) or tuple(rows.shape[1:]) != self.image_shape):
            condition = f"to be images of shape (n, {', '.join(map(str, self.image_shape))}), as in training"
            remedy = "read each file by privgrad.data.read_image, and give torch.stack of the images"
            raise expected("Head", "rows", condition, _kind(rows), remedy)
        if self.extractor is not None:
            rows = self.extractor(rows, first=start)
        width = self.model.linear.in_features
        if not isinstance(rows, Tensor) or rows.ndim < 2 or rows.flatten(-self.model.input_dims).shape[-1] != width:
            of_table = "give a list of dicts by column name, or a DataFrame"
            remedy = "give rows as in training; for one row, give row[None]" if self.schema is None else of_table
            name = "rows" if self.extractor is None else "what the extractor returns"
            raise expected("Head", name, f"to be features of shape (n, {width})", _kind(rows), remedy)
        if (row := first_infinite(rows)) is not None:
            raise expected("Head", "features", "to be finite", f"inf or NaN in row {start + row}")
        if self.schema is not None and self.extractor is None:
            require_codes("Head", self.schema, rows, start)
        return rows

    def predict(self, rows: Rows) -> Tensor:
        """Return the class of each row (n,), its 5 likeliest tags (n, 5), the likeliest first, or its number (n,).

        `rows` are as in `forward`.
        """
        return self.target.decoded(self(rows))

    def predict_proba(self, rows: Rows) -> Tensor:
        """Return the probability of each class, or the share of each tag, (n, outputs); rows sum to 1.

        Clipping and noise distort these numbers. They rank rows, and are not rates: see docs/before-training.md.
        `rows` are as in `forward`.

        Raises:
            PrivacyError: the head predicts numbers.
        """
        if self.target.kind == "number":
            raise expected("Head.predict_proba", "the head", "to predict classes", "a number", "call predict")
        return self(rows).softmax(-1)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the head to a new folder: head.json, weights.safetensors, and the extractor in its own folder.

        The folder also gets the privacy statement, statement.txt, if this process trained the head, the plan has a
        delta, and no budget holds the training. A budget has one statement on everything in it: `budget_statement`. All
        numbers count later private trainings of `model` in this process.

        Args:
            folder: a new or empty folder, or with `overwrite` one that `save` wrote.
            overwrite: replace a folder that `save` wrote, as a whole. A folder with any other file is refused.
        Raises:
            PrivacyError: the folder holds files already; its statement would be lost, because this process does not
                know the training; a later training of `model` cannot be counted; or `classes` names another number of
                classes.
        Privacy:
            Everything in the folder is post-processing of released gradients, or public.
        """
        place = require_place("Head.save", folder, overwrite=overwrite, is_own=_is_saved)
        privacy, ledgers = cost_of(self.model, self.privacy, self._made_by)
        said, delta = None, privacy.get("delta")
        if ledgers and delta is not None and not any(one.budget for one in ledgers):
            said = statement(ledgers, delta=delta)
            weights = Section("Weights", ("The process that trained the head with this record saved its weights.",))
            said = replace(said, sections=(*said.sections, weights))
        elif (place / _TEXT).exists():
            got, remedy = "a head of unknown training", "choose another one, and copy statement.txt"
            raise expected("Head.save", "folder", "to keep its statement", got, remedy)
        weights = {name: weight.detach().cpu().contiguous() for name, weight in self.model.state_dict().items()}
        schema = self.schema if self.extractor is None else None
        require_declared("Head.save", self.target, self.classes, schema, self.model.linear.in_features)
        facts = {
            "format": _FORMAT,
            "target": {name: value for name, value in asdict(self.target).items() if value is not False},  # no counts
            "width": self.model.linear.in_features,
            "input_dims": self.model.input_dims,
            "extractor": None if self.extractor is None else self.extractor.digest(),
            "classes": self.classes and [c if isinstance(c, str | int | float) else str(c) for c in self.classes],
            "image_shape": self.image_shape,
            "schema": None if self.schema is None else declaration_of(self.schema),
            "privacy": privacy,
        }
        with written_whole(place, overwrite=overwrite) as made:
            if self.extractor is not None:
                save_extractor(self.extractor, made / _EXTRACTOR)
            (made / _WEIGHTS).write_bytes(safetensors().save(weights))
            if said is not None:
                (made / _TEXT).write_text(f"{said}\n", encoding="utf-8")
            (made / _FACTS).write_text(json.dumps(facts, indent=1))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, modules: Mapping[str, Extractor] | None = None) -> "Head":
        """Read a head that `save` wrote. Nothing in the folder is executed.

        Args:
            folder: of `save`.
            modules: the pretrained modules of the extractor, as in `features.load_extractor`.
        Raises:
            PrivacyError: files are missing or damaged, or the extractor is not the one of the training.
        """
        place = Path(folder)
        with readable("Head.load", f"{place}", "to hold a head", "give the folder of Head.save, with all its files"):
            facts = json.loads((place / _FACTS).read_text())
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']}, of another version of privgrad")
            target = Target(**facts["target"])
            weights = safetensors().load_file(place / _WEIGHTS)
            of_rows = {"input_dims": facts["input_dims"], "hidden": len(weights.get("inner.weight", ()))}
            model = UnitLinear(facts["width"], target.outputs, **of_rows)
            model.load_state_dict(weights)
            table = facts.get("schema")  # absent in folders of older versions
            schema = None if table is None else schema_of("Head.load", **table)
        extractor = None
        if facts["extractor"] is not None:
            extractor = load_extractor(place / _EXTRACTOR, modules=modules)
            if extractor.digest() != facts["extractor"]:
                got, remedy = extractor.digest()[:12], "restore the folder, or give the same modules"
                raise expected("Head.load", f"{place / _EXTRACTOR}", "to be that of the training", got, remedy)
        own = {name: facts.get(name) for name in ("classes", "image_shape")}  # absent in folders of older versions
        return cls(model, target, extractor, privacy=facts["privacy"], schema=schema, **own)


def require_declared(
    function: str, target: Target, classes: Sequence[Any] | None, schema: Schema | None, width: int
) -> None:
    """Raise PrivacyError unless there are as many names as outputs, and as many codes of a schema as features."""
    if classes is not None and len(classes) != target.outputs:
        raise expected(function, "classes", f"to be {target.outputs} names", f"{len(classes)} names")
    if schema is not None and width_of(schema) != width:
        raise expected(function, "schema", f"to have {width} codes, as in training", width_of(schema))


def declared(extractor: Extractor) -> str:
    """Return the source of an extractor's constants, with its digest, for the ledger."""
    return f"features: {extractor.source} ({type(extractor).__name__} {extractor.digest()[:12]})"


def privacy_of(plan: PrivacyPlan, ledger: Ledger) -> dict[str, Any]:
    """Return the public facts of a training, for JSON; epsilon is None without a guarantee."""
    epsilon = math.inf if plan.delta is None else ledger.epsilon(delta=plan.delta)
    facts = public_facts(ledger) | ({} if ledger.commitment is None else {"budget": ledger.budget})
    return {**facts, "epsilon": epsilon if math.isfinite(epsilon) else None, "ledger": ledger.head}


def _kind(rows: object) -> str:
    """Return the shape or the type of rows, for errors, which show no private value."""
    return f"{tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"


def _is_saved(place: Path) -> bool:
    """Return whether a folder holds the files of a saved head, and no others."""
    held = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    of_extractor = {_EXTRACTOR, f"{_EXTRACTOR}/{CONFIG}", f"{_EXTRACTOR}/{CONSTANTS}"}
    return {_FACTS, _WEIGHTS} <= held <= {_FACTS, _WEIGHTS, _TEXT, *of_extractor}
