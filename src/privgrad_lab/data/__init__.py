"""Loaders of the data sets of the papers and experiments.

A loader looks for its files in a given path, then in a package or the cache, then at the public source. Data that not
everyone can get has a stand-in, whose name results on it have: Fashion-MNIST for MNIST and CIFAR-10, the Debian package
index for tagged or paired sentences, and the Brown corpus for the Penn Treebank.
"""

from collections.abc import Callable

from privgrad.data import DataSet, digits
from privgrad_lab.data.debian import (
    debian_maintainers,
    debian_sections,
    debian_synopses,
    debian_tags,
    debian_texts,
    sentence_pairs,
)
from privgrad_lab.data.images import barcode, cifar10, cifar100, fashion_mnist, imagenet32, mnist
from privgrad_lab.data.sentiment import imdb, tweets
from privgrad_lab.data.stackoverflow import stackoverflow, stackoverflow_tags
from privgrad_lab.data.tabular import adult, heavy_tail
from privgrad_lab.data.text import brown, e2e, ptb, snli

__all__ = [
    "LOADERS",
    "adult",
    "barcode",
    "brown",
    "cifar10",
    "cifar100",
    "debian_maintainers",
    "debian_sections",
    "debian_synopses",
    "debian_tags",
    "debian_texts",
    "digits",
    "e2e",
    "fashion_mnist",
    "heavy_tail",
    "imagenet32",
    "imdb",
    "mnist",
    "ptb",
    "sentence_pairs",
    "snli",
    "stackoverflow",
    "stackoverflow_tags",
    "tweets",
]

# By their names with hyphens.
LOADERS: dict[str, Callable[..., DataSet]] = {
    name.replace("_", "-").replace("cifar1", "cifar-1"): globals()[name] for name in __all__ if name != "LOADERS"
}
