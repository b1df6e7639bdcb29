"""The command `privgrad predict`, which applies a saved head to the rows of a table."""

import csv
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from privgrad.cli.console import STDOUT, AsJson, print_json
from privgrad.data.read_rows import read_columns
from privgrad.errors import expected
from privgrad.heads import Head

_SELF = "privgrad predict"


def predict(
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="The folder of a head that was trained on a table.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table with the input columns, as [data] takes it.")],
    out: Annotated[Path, typer.Option(help="The CSV file to write, one row for each row of FILE.")],
    keep: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Copy a column, such as an id.")] = None,
    table: Annotated[str | None, typer.Option(help="The table of an SQLite file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the label of each row of a table by a saved head.

    Rows are coded as in training. The label and other columns of FILE are not needed, and not read. For classes, the
    file also has the probability of each class: it ranks rows, and is not a rate.
    """
    loaded = Head.load(head)
    if (schema := loaded.schema) is None:
        remedy = "train on a table by a TOML or data.table; for others, call Head.load(folder).predict(rows) in Python"
        raise expected(_SELF, "the head", "to have been trained on columns of a table", f"{head}", remedy)
    if out.exists():
        raise expected(_SELF, "--out", "to be a new file", f"{out}, which exists", "choose another one")
    kept = list(dict.fromkeys(keep or []))
    _, texts = read_columns(_SELF, file, [*schema.inputs, *kept], table=table)
    rows = [
        dict(zip(schema.inputs, values, strict=True))
        for values in zip(*(texts[name] for name in schema.inputs), strict=True)
    ]
    outputs = loaded(rows)
    found = cast("list[Any]", loaded.target.decoded(outputs).tolist())
    is_class, classes = loaded.target.kind == "class", loaded.classes or list(schema.classes)
    chances: list[list[float]] = outputs.double().softmax(-1).tolist() if is_class else [[]] * len(rows)
    with out.open("x", newline="", encoding="utf-8") as target:
        writer = csv.writer(target)
        writer.writerow([*kept, "prediction", *(f"probability of {name}" for name in classes if is_class)])
        for row, label in enumerate(found):
            own = [texts[name][row] for name in kept]
            writer.writerow([*own, classes[label] if is_class else f"{label:.6g}", *(f"{p:.4f}" for p in chances[row])])
    if as_json:
        print_json({"rows": len(rows), "out": str(out)})
    else:
        STDOUT.print(f"{len(rows):,} rows -> {out}", highlight=False)
