"""Pictures of reports for docs/reports.md and docs/lessons/reading-a-report.md.

Run `privgrad compare examples/digits.toml --out report`, and save the file of the lesson and run `privgrad train
digits.toml --out report-lesson`. Then run `python docs/screenshots.py`. A report that is not there keeps its pictures.

Needs Chromium and, from PyPI, playwright.
"""

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("section[aria-labelledby=results]", "section[aria-labelledby=results] figure >> nth=0")
# Name, folder, width of the window, what is shown: from the top of the first to the bottom of the second.
PICTURES = (
    ("report-results", "report", 1280, RESULTS),
    ("report-tuning", "report", 1280, ("section[aria-labelledby=results] figure >> nth=2",) * 2),
    ("report-privacy", "report", 1280, ("section[aria-labelledby=privacy]",) * 2),
    ("report-diagnostics", "report", 1280, ("section[aria-labelledby=diagnostics]",) * 2),
    ("report-narrow", "report", 360, RESULTS),
    ("lesson-report", "report-lesson", 1000, ("h1", "section[aria-labelledby=privacy] > p >> nth=0")),
)


def taken(page: Page, first: str, last: str) -> bytes:
    """Return a picture of the page from one element to another, with a margin."""
    top, bottom = (page.locator(selector).bounding_box() for selector in (first, last))
    assert top is not None
    assert bottom is not None
    left = max(0.0, min(top["x"], bottom["x"]) - 20)
    right = min(page.viewport_size["width"], max(box["x"] + box["width"] for box in (top, bottom)) + 20)
    above = max(0.0, top["y"] - 20)
    clip = {"x": left, "y": above, "width": right - left, "height": bottom["y"] + bottom["height"] + 20 - above}
    return page.screenshot(full_page=True, clip=clip)


def main() -> None:
    """Take every picture of the report."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, folder, width, ends in PICTURES:
            if not (ROOT / folder).exists():
                continue
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto((ROOT / folder / "index.html").as_uri())
            image = Image.open(io.BytesIO(taken(page, *ends))).convert("RGB")
            image.quantize(128, dither=Image.Dither.NONE).save(ROOT / f"docs/img/{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
