"""Check the language of pages and source: rejected phrases, long sentences, long table cells.

`make lint` runs it. scripts/prose.toml holds the phrases; proselint does the matching, with none of its own checks.
Without arguments it reads the project's pages and src/privgrad; with arguments, these files and folders.
Prose is what a reader reads: in pages everything but code, formulas, link targets and HTML comments; in Python files
the docstrings, the comments, and string literals of several words, such as error messages.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from proselint.registry.checks import Check
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import PreferredForms

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
SOURCE = ("src/**/*.py",)

MAX_WORDS = 40  # of a sentence in a page; the aim is 25
MAX_CELL = 200  # characters of a table cell, without link targets

SEPARATOR = "\n\0\n"  # no phrase crosses it
CODE = re.compile(r"(?s)(`+)(?!`).+?(?<!`)\1(?!`)")
LINK = re.compile(r"\]\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s\"[^\"]*\")?\)|<https?:[^>]*>|https?://\S+")
MATH = re.compile(r"(?<![\w$\\])\$(?=\S)[^$\n]*(?<=\S)\$(?![\w$])")
HTML_COMMENT = re.compile(r"(?s)<!--.*?-->")
FENCE = re.compile(r" *(```+|~~~+)")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
SENTENCE_END = re.compile(r"[.!?][\"')\]*_]*\s+")
ABBREVIATIONS = ("al.", "approx.", "cf.", "e.g.", "eq.", "etc.", "fig.", "i.e.", "no.", "resp.", "sec.", "vs.")
DIRECTIVE = re.compile(r"#\s*(?:noqa|pyright|type:|fmt:|!)")


class Passage(NamedTuple):
    """A piece of prose that is read as one: a paragraph, an item, a heading, a cell, a docstring's paragraph."""

    line: int
    text: str
    is_heading: bool = False


class Finding(NamedTuple):
    """A place in a file and what to change there."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.message}"


class Rules(NamedTuple):
    """The content of prose.toml."""

    everywhere: Check
    in_pages: Check
    at_start: dict[str, str]
    accepted: re.Pattern[str] | None


def load_rules(path: Path) -> Rules:
    """Read the phrases; in each, a space stands for any white space."""
    table = tomllib.loads(path.read_text())

    def check(phrases: dict[str, str]) -> Check:
        forms = {f"(?:{phrase})".replace(" ", r"\s+"): better for phrase, better in phrases.items()}
        return Check(check_type=PreferredForms(forms), engine=Fancy(), path="privgrad", message="write {} for '{}'")

    accepted = [re.escape(" ".join(text.split())).replace(r"\ ", r"\s+") for text in table["accept"]["texts"]]
    return Rules(
        everywhere=check(table["reject"]),
        in_pages=check(table["reject_in_pages"]),
        at_start=table["reject_at_start"],
        accepted=re.compile("|".join(accepted)) if accepted else None,
    )


def blanked(pattern: re.Pattern[str], text: str, fill: str) -> str:
    """Return the text with each match overwritten; lines and lengths stay."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", fill, found[0]), text)


def prose_of(text: str) -> str:
    """Return the text with code and formulas as one word each, and link targets as spaces."""
    return blanked(LINK, blanked(MATH, blanked(CODE, text, "x"), "x").replace("[", " "), " ")


def page_passages(source: str) -> Iterator[Passage | Finding]:
    """Yield the passages of a Markdown page, and a finding without path for each table cell that is too long."""
    fence, lines, first = "", [], 0

    def paragraph() -> Iterator[Passage]:
        if lines:
            yield Passage(first, prose_of("\n".join(lines)))
            lines.clear()

    for number, line in enumerate(blanked(HTML_COMMENT, source, " ").splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            yield from paragraph()
            fence = "" if fence else mark[1]
        elif fence:
            continue
        elif line.startswith("#"):
            yield from paragraph()
            yield Passage(number, prose_of(line.strip("# ")), is_heading=True)
        elif line.lstrip().startswith("|"):
            yield from paragraph()
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                shown = LINK.sub("", cell).strip()
                if len(shown) > MAX_CELL:
                    message = f"the table cell '{shown[:30]}...' has {len(shown)} characters; at most {MAX_CELL}"
                    yield Finding(Path(), number, message)
                yield Passage(number, prose_of(cell))
        elif not line.strip():
            yield from paragraph()
        else:
            if ITEM.match(line):
                yield from paragraph()
            if not lines:
                first = number
            lines.append(ITEM.sub("", line) if ITEM.match(line) else line)
    yield from paragraph()


def python_passages(source: str) -> Iterator[Passage]:
    """Yield the docstrings' paragraphs, the comments, and the string literals of several words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            line = node.lineno
            for part in re.split(r"(\n[ \t]*\n)", node.value):
                if part.strip():
                    yield Passage(line, blanked(CODE, part, "x"))
                line += part.count("\n")
    yield from comments(source)


def comments(source: str) -> Iterator[Passage]:
    """Yield the comments; comments on consecutive lines that hold nothing else are one."""
    block: list[str] = []
    last = first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        number, text = token.start[0], blanked(CODE, token.string.lstrip("# "), "x")
        if not (block and number == last + 1 and token.line.lstrip().startswith("#")):
            if block:
                yield Passage(first, "\n".join(block))
            block, first = [], number
        block.append(text)
        last = number
    if block:
        yield Passage(first, "\n".join(block))


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence of a passage with its offset."""
    start = 0
    for end in SENTENCE_END.finditer(text):
        sentence = text[start : end.end()]
        if not sentence.rstrip().lower().endswith(ABBREVIATIONS):
            yield start, sentence
            start = end.end()
    if text[start:].strip():
        yield start, text[start:]


def check_file(path: Path, rules: Rules) -> Iterator[Finding]:
    """Yield the findings of one file."""
    source, is_page = path.read_text(), path.suffix == ".md"
    passages: list[Passage] = []
    for item in page_passages(source) if is_page else python_passages(source):
        if isinstance(item, Finding):
            yield item._replace(path=path)
        else:
            passages.append(item)
    text = SEPARATOR.join(passage.text for passage in passages)
    starts = [0, *accumulate(len(passage.text) + len(SEPARATOR) for passage in passages)]
    accepted = [found.span() for found in rules.accepted.finditer(text)] if rules.accepted else []

    def finding(start: int, end: int, message: str) -> Iterator[Finding]:
        if not any(first <= start and end <= last for first, last in accepted):
            index = bisect_right(starts, start) - 1
            line = passages[index].line + text.count("\n", starts[index], start)
            yield Finding(path, line, message)

    for check in (rules.everywhere, rules.in_pages) if is_page else (rules.everywhere,):
        for result in check.check(text):
            yield from finding(*result.span, " ".join(result.message.split()))
    for begin, passage in zip(starts, passages, strict=False):
        for offset, sentence in sentences(passage.text):
            lead, said = len(sentence) - len(sentence.lstrip()), sentence.strip()
            start = begin + offset + lead
            end = start + len(said)
            for opener, better in rules.at_start.items():
                begun = re.match(rf"{opener}\b", said)
                if begun and not said.endswith("?") and not passage.is_heading:
                    yield from finding(start, end, f"a sentence begins with '{begun[0]}': {better}")
            words = sum(any(map(str.isalnum, word)) for word in said.split())
            if is_page and words > MAX_WORDS:
                excerpt = " ".join(said.split())[:30]
                yield from finding(start, end, f"the sentence '{excerpt}...' has {words} words; at most {MAX_WORDS}")


def files(arguments: list[str]) -> list[Path]:
    """Return the files to check: those of the arguments, or the project's."""
    if not arguments:
        return sorted({path for pattern in (*PAGES, *SOURCE) for path in ROOT.glob(pattern)})
    found = (Path(argument) for argument in arguments)
    return sorted(
        path for top in found for path in (top.rglob("*") if top.is_dir() else [top]) if path.suffix in (".md", ".py")
    )


def main(arguments: list[str]) -> int:
    """Print the findings and return the exit code: 1 if there are any."""
    rules = load_rules(ROOT / "scripts/prose.toml")
    found = sorted(finding for path in files(arguments) for finding in check_file(path, rules))
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} findings; phrases and exceptions are in scripts/prose.toml")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
