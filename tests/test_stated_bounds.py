"""Bounds that are shown to people are rounded up, everywhere."""

import ast
import math
import re

import pytest

from pages import ROOT
from privgrad.accounting.accountant import rounded_up, two_decimals_up

SOURCES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
BOUND = re.compile(r"\b(epsilon|delta|spent|total_epsilon|target_epsilon|epsilon_rdp|epsilon_pld)\b|_epsilon\b")


@pytest.mark.parametrize(
    ("bound", "digits", "text"),
    [
        (1.00495, 3, "1.01"),
        (2.9994, 4, "3"),
        (2.9991, 4, "3"),
        (2.999, 4, "2.999"),
        (0.1 + 0.2, 4, "0.3001"),
        (1e-5, 6, "1e-05"),
        (1.0000001e-5, 6, "1.00001e-05"),
        (0.0, 4, "0"),
        (math.inf, 4, "inf"),
    ],
)
def test_digits_are_rounded_up(bound, digits, text):
    assert rounded_up(bound, digits) == text
    assert float(text) >= bound


@pytest.mark.parametrize(
    ("bound", "text"), [(3.0, "3.00"), (2.991, "3.00"), (3.0000001, "3.01"), (0.0123, "0.013"), (0.0, "0.00")]
)
def test_decimals_are_rounded_up(bound, text):
    assert two_decimals_up(bound) == text
    assert float(text) >= bound


def rounded_to_nearest(code: str) -> list[str]:
    """Return each formatted value of an f-string that names a bound and has a number of digits."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            form = ast.unparse(node.format_spec)[2:-1]  # without f' and '
            value = ast.unparse(node.value)
            if re.search(r"[gfe%]$", form) and BOUND.search(value) and not value.startswith("1 / "):
                found.append(f"{value}:{form}")
    return found


def test_the_search_finds_what_it_should():
    code = "f'{plan.epsilon():.3g} and {delta:g}, {spent:.2f}, {rounded_up(delta)}, {loss:.3g}'"
    assert rounded_to_nearest(code) == ["plan.epsilon():.3g", "delta:g", "spent:.2f"]


def test_no_text_rounds_a_bound_to_nearest():
    found = {str(path.relative_to(ROOT)): rounded_to_nearest(path.read_text()) for path in SOURCES}
    assert {path: bounds for path, bounds in found.items() if bounds} == {}
