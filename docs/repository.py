"""The site's pages from outside of docs/, and links to them: written for the repository, right on the site too."""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
CODE = {".py": "python", ".toml": "toml", ".txt": "text", ".json": "json"}
SHOWN = (
    "[A-Z]*.md",
    "benchmarks/*.*",
    *("examples/*.*", "examples/*/*.*"),
    *("results/*.md", "results/*/*.*", "results/*/*/*.*"),
)
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")


def uri_of(path: str) -> str:
    """Where the site has what the repository has at a path."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        path += "/README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}.md" if PurePosixPath(path).suffix in CODE else f"repository/{path}"


def _folder_page(folder: Path) -> str:
    """Return a page for a folder without a README: its table, its plots, its files."""
    parts = [f"# {folder.relative_to(ROOT)}"]
    for path in sorted(folder.iterdir()):
        parts.append(f"![{path.stem}]({path.name})" if path.suffix == ".png" else f"- [{path.name}]({path.name})")
    table = folder / "table.txt"
    if table.exists():
        parts.insert(1, f"```text\n{table.read_text()}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    paths = [path for pattern in SHOWN for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in CODE:
            content = f"# {name}\n\n```{CODE[path.suffix]}\n{path.read_text()}\n```\n"
            files.append(File.generated(config, uri_of(name), content=content))
        else:
            files.append(File.generated(config, uri_of(name), abs_src_path=str(path)))
    for folder in sorted({path.parent for path in paths} - {ROOT}):
        if not (folder / "README.md").exists():
            name = folder.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri_of(name), content=_folder_page(folder)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Turn links between files of the repository into links between pages; search finds readers' pages first."""
    uri = page.file.src_uri
    if uri.startswith("repository/") or "Evidence" in [section.title for section in page.ancestors]:
        page.meta.setdefault("search", {})["boost"] = 0.3
    outside = uri.removeprefix("repository/")
    source = "README.md" if uri == "index.md" else outside if outside != uri else f"docs/{uri}"

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        return posixpath.relpath(uri_of(path), posixpath.dirname(uri))

    return LINK.sub(moved, markdown)
