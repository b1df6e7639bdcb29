"""The names of persons and other units: which texts name the same unit, and which name nobody.

`own_table`, `own_images`, `findings`, `raw_sizes` and `users` call it. The privacy guarantee for persons rests on this
file: two spellings of one name are one unit, and people without a name are never put together.
"""

import re
import unicodedata
from collections.abc import Hashable
from numbers import Number
from typing import Any, cast

import numpy as np
from torch import Tensor

from privgrad.data.schema import text_of

_WHOLE = re.compile(r"^([+-]?\d+)\.0+$")  # tables write whole numbers with or without a fraction
# Marks of a missing value, reduced to letters and digits: those of R, pandas, SQL, JSON, spreadsheets and surveys.
_NOBODY = {
    *("na", "nan", "nana", "nat", "snan", "qnan", "1qnan", "1ind"),
    *("none", "null", "nil", "undef", "undefined", "empty", "blank"),
    *("missing", "unknown", "anonymous", "notavailable", "notapplicable"),
}
_WHOLE_MARKS = (r"\n",)  # \N of SQL dumps; "N" alone may be a name
_NAMES = ("nana",)  # a name as it is; "N/A N/A" is a mark


def person_of(text: str) -> str:
    """Return the name of a unit from the text of its column: "7" for "7.0".

    Texts that Unicode holds to be equal have one name.
    """
    return _WHOLE.sub(r"\1", unicodedata.normalize("NFC", text).strip())


def is_nobody(name: str) -> bool:
    """Return whether a text marks a missing name, such as "", "NA", "<NA>", "None" or "?", in any case.

    All rows with such a text would be one unit, although they belong to many people.
    """
    lowered = unicodedata.normalize("NFKC", name).strip().casefold()
    letters = "".join(letter for letter in lowered if letter.isalnum())
    return not letters or lowered in _WHOLE_MARKS or (letters in _NOBODY and lowered not in _NAMES)


def key_of_user(user: Hashable) -> Hashable | None:
    """Return the key that all examples of a user share; None if the value names nobody.

    Texts and numbers have the key of their name in a table, so "7 ", "7.0", 7 and 7.0 are one user. A tuple has the
    keys of its parts, and each part must name something. Other values are their own keys.
    """
    value: Any = cast("Any", user).item() if isinstance(user, Tensor | np.generic) else user
    if isinstance(value, tuple):
        keys = tuple(key_of_user(part) for part in cast("tuple[Hashable, ...]", value))
        return None if None in keys else keys
    is_text = isinstance(value, str | Number)
    text = text_of(value) if is_text else f"{value}"
    if value is None or value != value or is_nobody(text):  # NaN and NaT differ from themselves
        return None
    return person_of(text) if is_text else value
