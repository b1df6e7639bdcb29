"""Every file of the library has at most 400 lines, and every function at most 60 without its docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT

LONGEST_FILE, LONGEST_FUNCTION = 400, 60
SOURCE = ROOT / "src/privgrad"
# Path, or path:Class.function -> the reason why it is longer, in one sentence.
EXCEPTIONS = {
    "gradient/clipping.py": "The guarantee rests on it: a reviewer reads rules, factors and sum in one piece.",
    "private_gradient.py": "The guarantee rests on it: a reviewer reads admission, sum, noise and charge in one piece.",
    "private_gradient.py:PrivateGradient.__init__": "It checks every argument before anything is changed.",
}


def functions(node: ast.AST, path: str = "") -> Iterator[tuple[str, int]]:
    """Every function within a node, by its qualified name, with the number of lines of its body."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(child, path)
            continue
        name = f"{path}{child.name}"
        yield from functions(child, f"{name}.")
        statements = child.body[ast.get_docstring(child) is not None :]
        if statements and not isinstance(child, ast.ClassDef):
            yield name, (child.end_lineno or 0) - statements[0].lineno + 1


def too_long(folder: Path) -> dict[str, int]:
    """The files and functions of a folder that are longer than allowed, with their numbers of lines."""
    found: dict[str, int] = {}
    for file in sorted(folder.rglob("*.py")):
        text, path = file.read_text(encoding="utf-8"), file.relative_to(folder).as_posix()
        if text.count("\n") > LONGEST_FILE:
            found[path] = text.count("\n")
        found |= {f"{path}:{name}": size for name, size in functions(ast.parse(text)) if size > LONGEST_FUNCTION}
    return found


def test_no_file_and_no_function_is_too_long_without_a_reason():
    assert {path: size for path, size in too_long(SOURCE).items() if path not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed():
    assert sorted(set(EXCEPTIONS) - too_long(SOURCE).keys()) == [], "delete these from EXCEPTIONS"


def test_one_line_more_is_too_long(tmp_path: Path):
    def function(lines: int) -> str:
        return 'class A:\n    if True:\n        def f(self):\n            """Text."""\n' + lines * "            ...\n"

    (tmp_path / "right.py").write_text("\n" * LONGEST_FILE)
    (tmp_path / "wrong.py").write_text("\n" * (LONGEST_FILE + 1))
    (tmp_path / "short.py").write_text(function(LONGEST_FUNCTION))
    (tmp_path / "long.py").write_text(function(LONGEST_FUNCTION + 1))
    assert too_long(tmp_path) == {"wrong.py": LONGEST_FILE + 1, "long.py:A.f": LONGEST_FUNCTION + 1}
