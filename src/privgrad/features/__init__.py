"""Features from public numbers: extractors, and codes of a table's columns, joined into rows of norm 1.

Users call these functions, and `data.table` does. The privacy guarantee rests on one fact: a row of the result depends
on the same row of the input and on public numbers only, so features need no epsilon.
"""

from privgrad.features.columns import Bins, OneHot, join, unit_rows
from privgrad.features.extractor import Extractor, Public
from privgrad.features.frozen_text import FrozenText
from privgrad.features.text import TfIdf, text_rows

__all__ = ["Bins", "Extractor", "FrozenText", "OneHot", "Public", "TfIdf", "join", "text_rows", "unit_rows"]
