"""Every page of the site in a real browser: no broken link, no error, no other host, readable on a phone."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

import pytest

import privgrad as pg
from pages import ROOT
from privgrad import data, diagnostics, features

pytest.importorskip("mkdocs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
FACTS = """() => ({
    width: document.documentElement.scrollWidth,
    ids: [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name),
    links: [...document.querySelectorAll('a[href]')].map(e => e.href),
    images: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    unreached: [...document.querySelectorAll('.formula-body')].filter(e => e.tabIndex < 0).length,
    tex: [...document.querySelectorAll('.arithmatex, merror')].length + /\\\\(frac|sum|langle)/.test(
        [...document.querySelectorAll('article p, article td')].map(e => e.textContent).join()),
})"""


@dataclass
class Opened:
    """What the browser said of a page, at the width of a phone."""

    facts: dict[str, Any]
    said: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def opened(browser: Any, site: Path) -> Iterator[dict[Path, Opened]]:
    """Each page, opened once."""
    page = browser.new_page(viewport=PHONE)
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    found: dict[Path, Opened] = {}
    for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # that one is for servers, at their root
        said.clear()
        requests.clear()
        page.goto(path.as_uri())
        found[path.relative_to(site)] = Opened(page.evaluate(FACTS), list(said), list(requests))
    yield found
    page.close()


def test_nothing_is_loaded_from_elsewhere_and_every_page_and_name_is_there(site: Path):
    html = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(html) > 50
    for path, text in html.items():
        assert not re.search(r"""(?:src|srcset)=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//""", text), path
    home = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs").with_suffix(".html")).replace("README", "index")
        assert f'href="{name}"' in home, f"{name} is not in the navigation of mkdocs.yml"
    anchors = set(re.findall(r'id="(privgrad[\w.]*)"', "".join(html.values())))
    for module in (pg, pg.optim, pg.audit, pg.federated, data, diagnostics, features):
        public = {name for name in module.__all__ if not name.isupper()}
        assert {name for name in public if _places(module, name) & anchors} == public


def _places(module: ModuleType, name: str) -> set[str]:
    """Return where the site may tell of a name. A function hides a module of the same name."""
    value, here = getattr(module, name), f"{module.__name__}.{name}"
    if isinstance(value, ModuleType):  # another name of a module that stands deeper
        return {here, value.__name__, *(f"{value.__name__}.{part}" for part in getattr(value, "__all__", ()))}
    return {here, f"{here}.{name}", f"{value.__module__}.{name}"}


def test_all_pages_are_there(opened: dict[Path, Opened]):
    assert len(opened) > 100
    assert {"index.html", "mathematics.html", "lessons/first-model.html"} <= {path.as_posix() for path in opened}


def test_no_page_says_an_error_or_asks_another_host(opened: dict[Path, Opened]):
    assert {path: page.said for path, page in opened.items() if page.said} == {}
    foreign = {
        path: [url for url in page.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]
        for path, page in opened.items()
    }
    assert {path: urls for path, urls in foreign.items() if urls} == {}


def test_no_page_is_wider_than_the_window(opened: dict[Path, Opened]):
    assert {path: page.facts["width"] for path, page in opened.items() if page.facts["width"] > PHONE["width"]} == {}


def test_every_picture_and_formula_is_drawn(opened: dict[Path, Opened]):
    for kind in ("images", "tex", "unreached"):
        assert {path: page.facts[kind] for path, page in opened.items() if page.facts[kind]} == {}, kind


def test_every_link_within_the_site_leads_somewhere(opened: dict[Path, Opened], site: Path):
    ids = {path: set(page.facts["ids"]) for path, page in opened.items()}
    broken: set[tuple[str, str]] = set()
    for path, page in opened.items():
        for link in page.facts["links"]:
            target, anchor = urldefrag(link)
            if urlparse(target).scheme != "file":
                continue
            place = Path(unquote(urlparse(target).path))
            is_there = place.is_file() and place.is_relative_to(site)
            if is_there and anchor and place.suffix == ".html":
                is_there = unquote(anchor) in ids[place.relative_to(site)]
            if not is_there:
                broken.add((path.as_posix(), link))
    assert broken == set()


def test_the_search_ranks_evidence_last(site: Path):
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    boosts = {one["location"].partition("#")[0]: one.get("boost", 1) for one in found}
    assert boosts["trust.html"] < boosts["guide.html"] == boosts["api/training.html"] == 1
    assert boosts["repository/results/index.html"] < 1


def test_a_wide_formula_scrolls_by_itself(browser: Any, site: Path):
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "mathematics.html").as_uri())
    widths = page.evaluate(
        "[...document.querySelectorAll('.formula-body')].map(e => [e.scrollWidth, e.clientWidth,"
        " getComputedStyle(e).overflowX])"
    )
    assert any(whole > shown for whole, shown, _ in widths)
    assert {overflow for *_, overflow in widths} == {"auto"}
    numbers = page.evaluate("[...document.querySelectorAll('.formula > a')].map(e => e.textContent)")
    tags = re.findall(r"\\tag\{([\d.]+)\}", (ROOT / "docs/mathematics.md").read_text())
    assert numbers == [f"({tag})" for tag in tags]
    page.close()


def test_the_search_finds_a_page_without_a_server(browser: Any, site: Path):
    page = browser.new_page(viewport=DESK)
    page.goto((site / "index.html").as_uri())
    page.get_by_label("Search").first.click()
    page.keyboard.type("participations")
    result = page.locator(".md-search-result__link").first
    result.wait_for(state="attached", timeout=30_000)
    assert result.get_attribute("href")
    page.close()
