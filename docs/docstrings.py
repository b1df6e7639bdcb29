"""The house's docstrings as mkdocstrings reads them: plain text, sections apart, one line for each argument."""

import re
from typing import Any

import griffe

_SECTIONS = "Args|Attributes|Returns|Yields|Raises|Privacy|Reference"
_SEVERAL = re.compile(r"^( +)([\w*]+(?:,\s+[\w*]+)+):((?: .*)?(?:\n\1 .*)*)", re.MULTILINE)
_AS_ELSEWHERE = re.compile(rf"\n    ({_SECTIONS}): (.*)")


def _one_by_one(several: re.Match[str]) -> str:
    """Write `a, b: as in X` as two lines."""
    indent, names, text = several.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in re.split(r",\s+", names))


def _plain(line: str) -> str:
    """Nothing in the line is markup but what stands in backticks; `*names:` of an argument stays, too."""
    parts = re.split(r"(`[^`]*`|^ +\*+\w+(?=:))", line)
    return "".join(
        part if index % 2 else re.sub(r"([*>])", r"\\\1", part).replace("<", "&lt;") for index, part in enumerate(parts)
    )


def rewritten(text: str) -> str:
    """Return the docstring as Markdown; formulas, indented before the sections, become blocks of their own."""
    text = _SEVERAL.sub(_one_by_one, text)
    # "Raises: as X" among the arguments is a section of its own.
    for name, said in _AS_ELSEWHERE.findall(text):
        text += f"\n{name}:\n    {'PrivacyError: ' if name == 'Raises' else ''}{said}"
    text = _AS_ELSEWHERE.sub("", text)
    lines: list[str] = []
    formula = sections = False
    for line in text.splitlines():
        begins = re.fullmatch(rf"({_SECTIONS}):", line) is not None
        sections = sections or begins
        was_formula, formula = formula, not sections and line.startswith("    ")
        if begins or formula != was_formula:
            lines.append("")
        lines.append(line if formula else _plain(line))
    return "\n".join(lines)


class Sections(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has found."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)
