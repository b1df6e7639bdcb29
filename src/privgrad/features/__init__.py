"""Features from public numbers: extractors, and codes of a table's columns, joined into rows of norm 1.

Users call these functions, and `data.table` does. The privacy guarantee rests on one fact: a row of the result depends
on the same row of the input and on public numbers only, so features need no epsilon.
"""

from privgrad.features.caching import cache
from privgrad.features.columns import Bins, OneHot
from privgrad.features.extractor import Extractor, Public
from privgrad.features.frozen import Frozen, RandomFourier
from privgrad.features.frozen_text import FrozenText
from privgrad.features.images import Hog, Patches, Scattering
from privgrad.features.public_images import pink_noise, silhouettes
from privgrad.features.public_words import word_sequences
from privgrad.features.saving import load_extractor, save_extractor
from privgrad.features.scaled import Scaled
from privgrad.features.text import TfIdf, text_rows
from privgrad.features.whitened import Whitened, join, unit_rows

__all__ = [
    "Bins",
    "Extractor",
    "Frozen",
    "FrozenText",
    "Hog",
    "OneHot",
    "Patches",
    "Public",
    "RandomFourier",
    "Scaled",
    "Scattering",
    "TfIdf",
    "Whitened",
    "cache",
    "join",
    "load_extractor",
    "pink_noise",
    "save_extractor",
    "silhouettes",
    "text_rows",
    "unit_rows",
    "word_sequences",
]
