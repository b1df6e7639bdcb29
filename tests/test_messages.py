"""Error messages name a value: no pronoun or filler stands where `expected` shows what it got."""

import ast
import re
from collections.abc import Iterator

import pytest

from pages import ROOT

PRONOUNS = (
    "another|others?|ones?|more|fewer|less|none|nothing|neither|both|them|they|its?|some|something|any|anything|"
    "a change|a second one|no such"
)
EMPTY = re.compile(rf"(?:{PRONOUNS})\b", re.IGNORECASE)
HOLE = "{}"  # a placeholder of an f-string
POSITION = 3  # of `got` among the arguments of `expected`

FILE = """
def direct(function, remedy):
    raise expected(function, "a file", "to be ours", "another process", remedy)

def by_keyword(function, remedy):
    raise expected(function, "a file", "to be ours", remedy=remedy, got="others")

def by_assignment(function, count):
    got, remedy = ("none", "add one") if count else (f"{count} files", "give a file")
    raise expected(function, "a file", "to be ours", got, remedy)

class Holder:
    def forwarded(self, problem):
        raise expected("f", "a file", "to be ours", problem or "no such file", "give one")

    def call(self, names):
        self.forwarded("an anotherness")
        self.forwarded(f"more than {names}")
        self.forwarded(f"{names} files, one of them empty")
        self.forwarded(names)

def unrelated():
    return print("another")
"""


def test_every_error_shows_a_value():
    sources = sorted((ROOT / "src").rglob("*.py"))
    found = [(path, line, text) for path in sources for line, text in texts_given(path.read_text())]
    assert len(found) > 100
    assert [f"{path}:{line}: got {text}" for path, line, text in found if EMPTY.match(text)] == []


def test_pronouns_are_found_however_they_are_passed():
    found = {text for _, text in texts_given(FILE) if EMPTY.match(text)}
    assert found == {"another process", "others", "none", "no such file", "more than {}"}


@pytest.mark.parametrize("text", ["0 files", "a file without rows", "oneself", "moreover.toml", "'other'", "itself"])
def test_values_pass(text: str):
    assert not EMPTY.match(text)


def texts_given(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that a call of `expected` may receive as `got`.

    It follows local names to their assignments, conditional expressions to their branches, and the parameters of
    functions to the calls in the same file.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    receivers: dict[str, tuple[int, str]] = {"expected": (POSITION, "got")}
    for _ in range(2):  # a helper may call a helper
        for function in functions:
            names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            for got in _given(function, receivers):
                for leaf in _leaves(got, function):
                    if isinstance(leaf, ast.Name) and leaf.id in names:
                        receivers[function.name] = names.index(leaf.id) - (names[0] == "self"), leaf.id
    seen = set[tuple[int, str]]()
    for scope in functions:
        for got in _given(scope, receivers):
            for leaf in _leaves(got, scope):
                if (text := _text(leaf)) is not None and (found := (leaf.lineno, text)) not in seen:
                    seen.add(found)
                    yield found


def _given(scope: ast.AST, receivers: dict[str, tuple[int, str]]) -> Iterator[ast.expr]:
    """Yield the expressions that are passed as `got` within a scope."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in receivers:
                position, keyword = receivers[name]
                yield from node.args[position : position + 1]
                yield from (each.value for each in node.keywords if each.arg == keyword)


def _leaves(node: ast.expr, scope: ast.AST, depth: int = 4) -> Iterator[ast.expr]:
    """Yield the expressions that a value may come from."""
    if isinstance(node, ast.IfExp):
        yield from (leaf for part in (node.body, node.orelse) for leaf in _leaves(part, scope, depth))
    elif isinstance(node, ast.BoolOp):
        yield from (leaf for part in node.values for leaf in _leaves(part, scope, depth))
    elif isinstance(node, ast.Name) and depth:
        yield node
        for value in _assigned(node.id, scope):
            yield from _leaves(value, scope, depth - 1)
    else:
        yield node


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """Yield the values that are assigned to a name within a scope."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Tuple):
                    yield from _unpacked(name, target, node.value)


def _unpacked(name: str, target: ast.Tuple, value: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a tuple, or of the tuples of a conditional expression, that are assigned to a name."""
    places = [place for place, part in enumerate(target.elts) if isinstance(part, ast.Name) and part.id == name]
    branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    for branch in branches:
        if isinstance(branch, ast.Tuple) and len(branch.elts) == len(target.elts):
            yield from (branch.elts[place] for place in places)


def _text(node: ast.expr) -> str | None:
    """Return the text of a string, with a hole for each value of an f-string; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or HOLE for part in node.values)
    return None
