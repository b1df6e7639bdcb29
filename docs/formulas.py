r"""Formulas of the pages as MathML, which browsers draw by themselves: no script, no font, no other host.

A page writes TeX as code hosts read it: `$...$` in a sentence, and a block of kind `math`, numbered by `\tag{1.2}`.
"""

import re
from html import escape, unescape
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
TAG = re.compile(r"\\tag\{([\d.]+)\}")
CITED = re.compile(r"\((\d+\.\d+)\)(?![^<]*</(?:code|math|m\w+|h\d)>)")


def anchor(number: str) -> str:
    """Return the id of an equation on its page."""
    return f"eq-{number.replace('.', '-')}"


def _inline(found: re.Match[str]) -> str:
    return convert(unescape(found[1]).strip())


def _block(found: re.Match[str]) -> str:
    """Return a formula that scrolls by itself where it is wider than the page, and its number next to it."""
    tex = unescape(found[1])
    tag = TAG.search(tex)
    # latex2mathml knows `aligned` by this name only.
    formula = convert(TAG.sub("", tex).replace("{aligned}", "{align*}").strip(), display="block")
    scroller = f'<div class="formula-body" tabindex="0">{formula}</div>'
    if tag is None:
        return f'<div class="formula">{scroller}</div>'
    name = escape(anchor(tag[1]))
    return f'<div class="formula" id="{name}">{scroller}<a href="#{name}">({tag[1]})</a></div>'


def rendered(html: str) -> str:
    """Return the content of a page with MathML in place of TeX, and with links from cited numbers to equations."""
    numbers = {tag[1] for block in BLOCK.finditer(html) for tag in TAG.finditer(block[1])}

    def link(found: re.Match[str]) -> str:
        return f'<a href="#{anchor(found[1])}">{found[0]}</a>' if found[1] in numbers else found[0]

    parts = re.split(r'(<(?:div|span) class="arithmatex">.*?</(?:div|span)>)', html, flags=re.DOTALL)
    linked = "".join(CITED.sub(link, part) if index % 2 == 0 else part for index, part in enumerate(parts))
    return INLINE.sub(_inline, BLOCK.sub(_block, linked))


def on_page_content(html: str, **_: Any) -> str:
    """Render the formulas of a page. mkdocs calls it."""
    return rendered(html) if 'class="arithmatex"' in html else html
