"""Check that a tag is the version of pyproject.toml, CITATION.cff and CHANGELOG.md: `check_tag.py v1.2.3`.

`make release` runs it before it builds.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = {  # where each file has the version
    "pyproject.toml": r'^version = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
    "CHANGELOG.md": r"^## (.*)$",
}


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return one line for each file whose version is not that of the tag."""
    found = {
        name: re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name, pattern in PLACES.items()
    }
    versions = {name: match[1] if match else "no version" for name, match in found.items()}
    return [f"{name} has {version}, and the tag is {tag}" for name, version in versions.items() if f"v{version}" != tag]


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1])) or 0)
