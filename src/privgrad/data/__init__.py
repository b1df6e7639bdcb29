"""Data sets: your own tables and images, the digits, and by their names those of privgrad_lab.

The values that a data set declares as public come from no private example. For users as privacy units, `by_user` and
`table` put all examples of a user into one row.
"""

from typing import Any

from privgrad.data.dataset import DataSet, by_user, packed
from privgrad.data.digits import digits
from privgrad.data.images import image_folder, read_image
from privgrad.data.table import part_of, synthetic_rows, table
from privgrad.features.pretrained import MINILM, SMOLLM2, pretrained
from privgrad.plugins import lab_attribute

__all__ = [
    "MINILM",
    "SMOLLM2",
    "DataSet",
    "by_user",
    "digits",
    "image_folder",
    "packed",
    "part_of",
    "pretrained",
    "read_image",
    "synthetic_rows",
    "table",
]


def __getattr__(name: str) -> Any:  # adult, fashion_mnist, ... and LOADERS, the loaders by name
    return lab_attribute("data", __name__, name)
