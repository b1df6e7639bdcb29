"""Print how many lines of each room refuse something: a part of the source that a reader passes over.

Counted are `raise` statements, blocks of `if` and `except` that end in one (with the line of their `try`), and
functions whose names begin with require, refuse, check or warn.

Run `python scripts/refusals.py`, or name folders of other packages to count them in the same way.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
_CHECKS = re.compile(r"_*(require|refuse|check|warn)(_|$)")


def refusing(source: str) -> set[int]:
    """Return the numbers of the lines that refuse."""
    found = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.FunctionDef) and _CHECKS.match(node.name)):
            found.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.If | ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
            found.update(range(node.lineno, (node.body[-1].end_lineno or 0) + 1))
        elif isinstance(node, ast.Try) and any(isinstance(each.body[-1], ast.Raise) for each in node.handlers):
            found.add(node.lineno)
    return found


def counts(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the lines that refuse and all lines, by room; "(root)" holds the modules that are in no folder."""
    refused, lines = Counter[str](), Counter[str]()
    for file in sorted(folder.rglob("*.py")):
        path, source = file.relative_to(folder), file.read_text(encoding="utf-8")
        room = path.parts[0] if len(path.parts) > 1 else "(root)"
        refused[room] += len(refusing(source))
        lines[room] += source.count("\n")
    return {room: (refused[room], lines[room]) for room in lines}


def main(folders: list[Path]) -> None:
    """Print a table for each folder, and the share of all of them together."""
    every = {folder: counts(folder) for folder in folders}
    for folder, rooms in every.items():
        print(folder.name)
        for room, (refused, lines) in rooms.items():
            print(f"  {room:15} {refused:6,} of {lines:6,} lines {refused / max(lines, 1):7.1%}")
    refused, lines = (sum(pair[k] for rooms in every.values() for pair in rooms.values()) for k in (0, 1))
    print(f"together {refused:,} of {lines:,} lines, {refused / max(lines, 1):.1%}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [SOURCE / "privgrad", SOURCE / "privgrad_lab"])
