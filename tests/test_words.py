"""How long the pages are that somebody reads.

Readers' pages are README.md and the pages of docs/ in the menu outside of its entry "Evidence". Words are those of
prose, headings and table cells. Fenced blocks of code and of output do not count, nor link targets; code within a line
counts as one word.
"""

import runpy
from collections.abc import Iterator
from typing import Any

import pytest

from pages import ROOT

pytest.importorskip("proselint")
pytest.importorskip("yaml")

import yaml

CHECK_PROSE = runpy.run_path(str(ROOT / "scripts/check_prose.py"))
DOORS = [
    f"docs/{name}.md"
    for name in ("own-data", "images-and-texts", "loop", "migration", "hugging-face", "scikit-learn", "papers/README")
]
LIMITS = {
    "README.md": 900,
    "docs/choosing.md": 1_500,
    "docs/guide.md": 2_500,
    "docs/promise.md": 1_500,
    "docs/tuning.md": 1_200,
} | dict.fromkeys(DOORS, 500)
TOTAL = 30_000


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose other parts name functions."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def menu() -> list[dict[str, Any]]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]


def pages_of(entry: Any) -> Iterator[str]:
    """The pages of docs/ under an entry of the menu; those from elsewhere in the repository are for who works on it."""
    if isinstance(entry, str):
        if not entry.startswith("repository/"):
            yield "README.md" if entry == "index.md" else f"docs/{entry}"
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(part)


def read_pages() -> list[str]:
    return [page for entry in menu() if "Evidence" not in entry for page in pages_of(entry)]


def words(page: str) -> int:
    found = CHECK_PROSE["page_passages"]((ROOT / page).read_text())
    texts = [one.text for one in found if isinstance(one, CHECK_PROSE["Passage"])]
    return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())


def test_lessons_come_first():
    assert [next(iter(entry)) for entry in menu()][:2] == ["Home", "Lessons"]
    assert menu()[-1].keys() == {"Evidence"}


@pytest.mark.parametrize("page", LIMITS)
def test_a_page_is_no_longer_than_it_may_be(page: str):
    assert page in read_pages()
    assert words(page) <= LIMITS[page]


def test_all_that_somebody_reads_is_no_longer_than_it_may_be():
    counts = {page: words(page) for page in read_pages()}
    assert sum(counts.values()) <= TOTAL, sorted(counts.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("page", DOORS)
def test_a_door_ends_in_predictions_and_a_statement(page: str):
    text = (ROOT / page).read_text().lower()
    assert "predict" in text
    assert "statement" in text.rpartition("predict")[2] or "statement" in text.rpartition("\n## ")[2]
