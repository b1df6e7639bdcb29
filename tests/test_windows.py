"""On Windows the import is refused, with the remedy and before anything else fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT


def refusal(source: Path) -> subprocess.CompletedProcess[str]:
    """What `make windows` runs, on the privgrad of a folder."""
    command = [sys.executable, str(ROOT / "tests/refusal.py")]
    return subprocess.run(command, env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False)


def test_the_import_is_refused_with_the_remedy():
    done = refusal(ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert "expected the system to be Linux or macOS, got Windows; install and run privgrad in WSL" in done.stdout


@pytest.mark.parametrize("text", ["", "import nothing_like_fcntl", "import torch\nraise ImportError('WSL')"])
def test_an_import_that_succeeds_or_fails_otherwise_is_found(text: str, tmp_path: Path):
    (tmp_path / "privgrad.py").write_text(text)
    assert refusal(tmp_path).returncode == 1
