"""The demo's report in a browser: nothing is loaded, nothing overflows, and the keyboard reaches what scrolls."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from rich.console import Console

from privgrad_lab.report.page import write_report
from privgrad_lab.report.texts import summary_table

ROOT = Path(__file__).parents[2]
RECORDS = [json.loads(line) for line in (ROOT / "results/digits/runs.jsonl").read_text().splitlines()]


def test_what_the_page_says_a_comparison_prints_is_what_its_records_say():
    console = Console(width=80, record=True)
    console.print(summary_table(RECORDS))
    table = [line for line in console.export_text().splitlines() if line and line[0] in "┏┃┡│└"]
    assert "\n".join(table) in (ROOT / "docs/choosing-evidence.md").read_text()
    kept = (ROOT / "results/README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table if line[0] == "│"]
    for method, accuracy, *_ in rows:
        if method:  # otherwise a row's second line
            assert re.search(rf"\| {method} +\| {re.escape(accuracy)} ", kept), (method, accuracy)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo's records, with diagnostics as it has them and the longest texts there are."""
    layer = {"raw_signal_to_noise": 0.1, "noise_share": 0.9, "fraction_floored": 0.5}
    diary = {"raw_clip_fraction": 0.5, "raw_kept": 0.5, "raw_signal_to_noise": 0.1, "noise_share": 0.9}
    edges = [10 ** (k / 8) for k in range(-32, 17)]
    moments = {"edges": edges, "noisy": [1] * 48, "debiased": [2] * 48}
    records: list[dict[str, Any]] = []
    for record in RECORDS:
        record = record | {"raw_clip_fraction": 0.05 if record["method"] == "DP-AdamBC" else 0.3}
        curve = [row | diary | {"raw_layers": {"1": layer, "3": layer}} for row in record["curve"]]
        curve[-1] |= {"raw_moments": moments}
        records.append(record | {"curve": curve} if record["phase"] == "final" else record)
    metadata = {
        "title": "A title with averyveryverylongwordthatnobodycouldbreak_" + 60 * "x",
        "command": "privgrad compare examples/digits.toml " + 20 * "--and-more ",
        "specification": json.dumps({"long": 200 * "y"}),
        "plan": {"steps": 200, "seed": 0},
    }
    return write_report(records, metadata, tmp_path_factory.mktemp("report"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_whole_in_a_browser(browser: Any, report: Path, width: int):
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.extend([request.url] * (not request.url.startswith(("data:", "file:")))))
    page.goto(report.as_uri())
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    images = page.evaluate("[...document.images].map(i => [i.alt, i.naturalWidth, i.getBoundingClientRect().right])")
    assert len(images) == 5
    for alt, natural, right in images:
        assert len(alt) > 20
        assert natural > 0
        assert right <= width

    # Whatever scrolls is reached by the keyboard, in the order of the page, and shows that it is.
    scrolls = page.evaluate(
        "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 &&"
        " ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map(e => e.tagName + e.className)"
    )
    reached: list[str] = []
    places: list[float] = []
    for _ in range(3):
        page.keyboard.press("Tab")
        name, top, outline = page.evaluate(
            "(e => [e.tagName + e.className, e.getBoundingClientRect().top + scrollY,"
            " getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        reached.append(name)
        places.append(top)
        assert outline == "solid"
    assert reached == ["DIVscroll", "PRE", "PRE"]
    assert places == sorted(places)
    assert set(scrolls) <= set(reached)
    headings = page.evaluate("[...document.querySelectorAll('h1, h2')].map(e => e.textContent.trim())")
    assert [text.split()[0] for text in headings] == ["A", "Results", "Privacy", "Diagnostics", "Settings"]
    measure = (
        "[...document.querySelectorAll('section > *:not(h2)')].map(e => Math.round(e.getBoundingClientRect().right))"
    )
    assert len(set(page.evaluate(measure))) == 1  # texts, tables and plots have one right edge
    if width > 1000:
        assert page.evaluate(
            "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
        )
    page.close()


@pytest.mark.slow
def test_the_page_is_readable_in_the_dark(browser: Any, report: Path):
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    # Contrast as WCAG 2 defines it: 4.5 at least for text of usual size.
    contrast = """element => {
        const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        let behind = element;
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        const [low, high] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
            .map(light).sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    }"""
    found = {name: page.locator(name).first.evaluate(contrast) for name in ("p", ".soft, .notes", ".tag", "td", "pre")}
    assert min(found.values()) >= 4.5, found
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", dark)[:3])) < 60
    page.close()


@pytest.mark.slow
def test_the_page_prints(browser: Any, report: Path):
    page = browser.new_page()
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 680, "height": 960})  # A4 less its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
