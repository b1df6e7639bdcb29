"""The tables and figures of the papers: by which item, on which data, how long, and what was run or is missing."""

import tomllib
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from privgrad_lab.papers.reproduce import items, keys_of


def listing() -> list[dict[str, Any]]:
    """Return a row for each item, and for each table or figure of a paper that no item shows.

    The keys: item, "" without one; paper; shows; data; given, the paper's own data that --data takes, or None; device,
    and after "; " that of the own data; hours of a core that the records in results/ took, or None; state.
    """
    papers = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for name in items():
        raw = keys_of(name)
        given, of = raw.get("given", {}), raw.get("data", {})
        is_large = "autocast" in given.get("run", {})
        state = "recorded" if raw.get("recorded") else "not run"
        state += ", stand-in" if raw.get("recorded") and (given or "stands_in_for" in raw) else ""
        rows.append(
            {
                "item": name,
                "paper": name.partition("/")[0],
                "shows": raw.get("shows", []),
                "data": of.get("use", "its items'" if raw.get("kind") == "table" else "generated"),
                "given": given.get("data", {}).get("use"),
                "device": ("CPU; GPU" if of["use"] != given["data"]["use"] else "GPU") if is_large else "CPU",
                "hours": raw.get("hours"),
                "state": "as its items" if raw.get("kind") == "table" else state,
            }
        )
    for paper, facts in papers.items():
        every = [f"{kind} {k}" for kind in ("table", "figure") for k in range(1, facts[f"{kind}s"] + 1)]
        shown = {one for row in rows if row["paper"] == paper for one in row["shows"]}
        for one in every:
            if one not in shown:
                row = dict.fromkeys(("data", "given", "device", "hours"))
                reason = facts.get("missing", {}).get(one, "no reason is given")
                rows.append({"item": "", "paper": paper, "shows": [one], **row, "state": f"missing: {reason}"})
    return sorted(rows, key=lambda row: row["paper"])


def listing_table() -> Table:
    """Return `listing` as a table that is whole at 100 columns."""
    rows, table = listing(), Table(box=SIMPLE, caption_justify="left")
    for header in ("item", "shows", "data; --data", "device", "hours", "state"):
        table.add_column(header, no_wrap=header in ("item", "hours"), overflow="fold")
    for row in (row for row in rows if row["item"]):
        data = "; ".join(dict.fromkeys(filter(None, (row["data"], row["given"]))))
        hours = "–" if row["hours"] is None else f"{row['hours']:g}"
        table.add_row(row["item"], _short(row["shows"]), data, row["device"], hours, row["state"])
    lines = [f"{row['paper']}, {row['shows'][0]}: {row['state']}" for row in rows if not row["item"]]
    table.caption = "\n".join(
        ["Hours of a core that the records took, perhaps of some methods; –: not measured.", *lines]
    )
    return table


def _short(shows: list[str]) -> str:
    """Return "tables 2-4; figure 1" for these tables and this figure, whose numbers rise."""
    kinds: dict[str, list[list[int]]] = {}
    for one in shows:
        kind, _, number = one.partition(" ")
        runs = kinds.setdefault(kind, [])
        if runs and runs[-1][-1] + 1 == int(number):
            runs[-1].append(int(number))
        else:
            runs.append([int(number)])
    texts = {kind: [f"{of[0]}-{of[-1]}" if len(of) > 1 else f"{of[0]}" for of in runs] for kind, runs in kinds.items()}
    return "; ".join(f"{kind}{'s' * ('-' in of[0] or len(of) > 1)} {', '.join(of)}" for kind, of in texts.items())
