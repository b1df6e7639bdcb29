"""The linter of prose in scripts/: it finds planted faults, and passes plain and accepted prose."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pages import ROOT

pytest.importorskip("proselint")

LONG = "The engine " + "adds a term and " * 11 + "stops."  # 47 words
CELL = "a-rather-long-value " * 11

PAGE = f"""# What a heading may say

A run is
gone on
with from its checkpoint. {LONG}

What is plain? A question is. What is not plain is found.

| name | value |
|---|---|
| cell | {CELL}|
| [link](https://example.org/{"path/" * 50}) | one an example |

- `anew` is code, and so is the next block; [a link](anew.md) hides its target.

```python
anew = "what is told is told"
```
"""

MODULE = '''"""A module.

Its docstring draws anew.
"""


def draw(amid):
    # A comment names whoever
    # hangs on this line.
    raise ValueError(f"draw: expected amid {amid} to be told, got what is told; draw it amid the others")
'''


def check(path: Path, text: str) -> tuple[int, list[str]]:
    """The exit code, and the findings without the path."""
    path.write_text(text)
    command = [sys.executable, str(ROOT / "scripts/check_prose.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, [line.removeprefix(f"{path}:") for line in done.stdout.splitlines() if str(path) in line]


def test_planted_phrases_sentences_and_cells_are_found_in_a_page(tmp_path: Path):
    code, found = check(tmp_path / "page.md", PAGE)
    assert code == 1
    assert found == [
        "4: write 'resume' or 'continue' for 'gone on with'",
        "5: the sentence 'The engine adds a term and add...' has 47 words; at most 40",
        "7: a sentence begins with 'What': name the subject",
        f"11: the table cell '{CELL[:30]}...' has {len(CELL.strip())} characters; at most 200",
        "12: write 'per example', 'per step', ... for 'one an example'",
    ]


def test_planted_phrases_are_found_in_docstrings_comments_and_messages(tmp_path: Path):
    code, found = check(tmp_path / "module.py", MODULE)
    assert code == 1
    assert found == [
        "3: write 'again' for 'anew'",
        "8: write 'anyone who' for 'whoever'",
        "9: write 'attach to' or 'depend on' for 'hangs on'",
        "10: write 'during' for 'amid'",
        "10: write 'during' for 'amid'",
        "10: write 'given', 'reported' or 'recorded' for 'told'",
        "10: write 'given', 'reported' or 'recorded' for 'told'",
    ]


def test_plain_and_accepted_prose_passes(tmp_path: Path):
    accepted = tomllib.loads((ROOT / "scripts/prose.toml").read_text())["accept"]["texts"]
    page = "# A page\n\nResume the run from its checkpoint, and report each step.\n\n"
    assert check(tmp_path / "page.md", page) == (0, [])
    for text in accepted:
        assert check(tmp_path / "page.md", f"{page}- {text}.\n") == (0, [])
        assert check(tmp_path / "page.md", f"{page}- {text}, whoever asks.\n")[0] == 1
