"""Features from public numbers: codes of categories and bins, joined into rows of norm 1.

Users call these functions, and `data.table` does. The privacy guarantee rests on one fact: a row of the result depends
on the same row of the input and on public numbers only, so features need no epsilon.
"""

from privgrad.features.columns import Bins, OneHot, join, unit_rows

__all__ = ["Bins", "OneHot", "join", "unit_rows"]
