"""What becomes of each name that a user of a host framework may override or give."""

from collections import defaultdict
from importlib import import_module
from importlib.metadata import version

HOSTS = ("transformers", "lightning", "accelerate", "opacus", "flwr")
_HEAD = """# What becomes of a host's options

Each argument, method and hook of a host framework, under privgrad's bridges. *Taken* has its usual effect. *Refused*
ends in an error that names a remedy, before anything is released. *No effect by design* is ignored, for the reason
given. [integrations.md](integrations.md) and [flower.md](flower.md) say how to use the bridges.
"""


def page() -> str:
    """Return docs/hosts.md: a table for each host, in which names with the same fate share a row."""
    parts = [_HEAD]
    for host in HOSTS:
        rows = defaultdict[str, list[str]](list)
        for name, fate in import_module(f"hosts.{host}").FATES.items():
            rows[fate].append(f"`{name}`")
        lines = [f"| {some} | {fate} |" for fate in sorted(rows, key=_order) for some in _cells(sorted(rows[fate]))]
        parts.append(
            "\n".join([f"## {host} {version(host)}", "", "| name | what becomes of it |", "|---|---|", *lines, ""])
        )
    return "\n".join(parts)


def _order(fate: str) -> tuple[bool, str]:
    return fate.startswith("taken"), fate


def _cells(names: list[str]) -> list[str]:
    """Return the names in cells that are read at a glance."""
    cells = [names[0]]
    for name in names[1:]:
        if len(cells[-1]) + len(name) < 180:
            cells[-1] += f", {name}"
        else:
            cells.append(name)
    return cells
