"""Features from public numbers: extractors, and codes of a table's columns, joined into rows of norm 1."""

from privgrad.features.caching import cache
from privgrad.features.columns import Bins, Hats, OneHot
from privgrad.features.extractor import Extractor, Public
from privgrad.features.frozen import Frozen, FrozenText, RandomFourier
from privgrad.features.images import Hog, Patches, Scattering, pink_noise, silhouettes
from privgrad.features.saving import load_extractor, save_extractor
from privgrad.features.text import TfIdf, text_rows, word_sequences
from privgrad.features.whitened import Scaled, Splines, Whitened, join, unit_rows

__all__ = [
    "Bins",
    "Extractor",
    "Frozen",
    "FrozenText",
    "Hats",
    "Hog",
    "OneHot",
    "Patches",
    "Public",
    "RandomFourier",
    "Scaled",
    "Scattering",
    "Splines",
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
