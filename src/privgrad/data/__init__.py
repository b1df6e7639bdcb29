"""Loaders of real data sets.

A loader looks for its files in a given path, then in a package or the cache, then at the public source. Data that not
everyone can get has a stand-in, and results on a stand-in are reported under the stand-in's name. Fashion-MNIST
replaces MNIST and CIFAR-10, the Debian package index replaces tagged or paired sentences, and the Brown corpus
replaces the Penn Treebank.

Users call the loaders; `experiments.sources` calls them by name, through LOADERS, and calls `table` for files. The
privacy guarantee rests on two facts in this package. The values that a data set declares as public come from no private
example. For users as privacy units, `by_user` and `table` put all examples of a user into one row. The guarantee does
not rest on the rest of this package.
"""

from collections.abc import Callable

from privgrad.data.dataset import DataSet
from privgrad.data.debian import (
    debian_maintainers,
    debian_sections,
    debian_synopses,
    debian_tags,
    sentence_pairs,
)
from privgrad.data.debian_texts import debian_texts
from privgrad.data.images import barcode, cifar10, digits, fashion_mnist, mnist
from privgrad.data.own_images import image_folder, read_image
from privgrad.data.own_table import part_of, table
from privgrad.data.sentiment import imdb, tweets
from privgrad.data.sparse import packed
from privgrad.data.stackoverflow import stackoverflow
from privgrad.data.synthetic import heavy_tail
from privgrad.data.tabular import adult
from privgrad.data.text import brown, ptb, snli
from privgrad.data.users import by_user
from privgrad.pretrained import MINILM, SMOLLM2, pretrained

__all__ = [
    "LOADERS",
    "MINILM",
    "SMOLLM2",
    "DataSet",
    "adult",
    "barcode",
    "brown",
    "by_user",
    "cifar10",
    "debian_maintainers",
    "debian_sections",
    "debian_synopses",
    "debian_tags",
    "debian_texts",
    "digits",
    "fashion_mnist",
    "heavy_tail",
    "image_folder",
    "imdb",
    "mnist",
    "packed",
    "part_of",
    "pretrained",
    "ptb",
    "read_image",
    "sentence_pairs",
    "snli",
    "stackoverflow",
    "table",
    "tweets",
]

LOADERS: dict[str, Callable[..., DataSet]] = {
    "adult": adult,
    "barcode": barcode,
    "brown": brown,
    "cifar-10": cifar10,
    "debian-maintainers": debian_maintainers,
    "debian-sections": debian_sections,
    "debian-synopses": debian_synopses,
    "debian-tags": debian_tags,
    "debian-texts": debian_texts,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "heavy-tail": heavy_tail,
    "imdb": imdb,
    "mnist": mnist,
    "ptb": ptb,
    "sentence-pairs": sentence_pairs,
    "snli": snli,
    "stackoverflow": stackoverflow,
    "tweets": tweets,
}
