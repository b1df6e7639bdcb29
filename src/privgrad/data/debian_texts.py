"""The Debian package index as raw texts, for extractors of text: tags or sections of packages.

`experiments.sources` calls the loader by name, through `data.LOADERS`; users call it directly. The privacy guarantee
rests on one fact: `public_inputs` holds texts of packages that are in no part of the data.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from privgrad.data.dataset import DataSet, split
from privgrad.data.debian_index import Package, read_index, tag_labels, tag_numbers
from privgrad.data.sources import PathLike, Positive
from privgrad.errors import require_choice, require_integer
from privgrad.features import text_rows

_PARAGRAPH = re.compile(r"^ \.$", re.MULTILINE)


def debian_texts(
    path: PathLike | None = None,
    *,
    task: Literal["sections", "tags"],
    length: Positive = 2048,
    limit: Positive | None = None,
    validation: int = 0,
) -> DataSet:
    """Load the tasks of debian_sections and debian_tags with texts in place of words.

    A text is "<synopsis>. <description>". Inputs, int8 (n, length): bytes of the texts, see `features.text_rows`.
    Labels and parts are those of debian_sections or debian_tags. `public_inputs` holds the texts of other packages: for
    tags, those without a tag; for sections, the packages of the training part beyond `limit`, if there is one.

    Args:
        path: folder with apt's lists, as in debian_sections.
        task: "sections" has one of 58 classes per package, "tags" has several of about 550 tags per package.
        length: bytes kept of a text, >= 1; 2,048 cut one text in 300.
        limit: number of training examples to keep; None keeps all.
        validation: number of these, from the end, to hold out.
    Raises:
        PrivacyError: as in debian_sections.
    Privacy:
        The list of tags comes from the training examples: NOT private. The list of sections is Debian's own.
    """
    require_choice("debian_texts", "task", task, ("sections", "tags"))
    require_integer("debian_texts", "limit", 1 if limit is None else limit, 1)
    suites, *parts = read_index("debian_texts", path)
    if task == "tags":
        train, test = ([package for package in part if package.tags] for part in parts)
        train, others = train[:limit], [package for package in chain(*parts) if not package.tags]
        names = tag_numbers(train)
        test = [package for package in test if package.tags & names.keys()]
    else:
        train, test = parts
        names = {name: index for index, name in enumerate(sorted({p.section for p in train + test}))}
        train, others = train[:limit], train[len(train[:limit]) :]

    def part(packages: Sequence[Package]) -> tuple[Tensor, Tensor]:
        if task == "tags":
            labels = tag_labels(packages, names)
        else:
            labels = torch.tensor([names[package.section] for package in packages], dtype=torch.int64)
        return text_rows([_text(package) for package in packages], length), labels

    loaded = split(
        f"Debian package index ({suites}), {task} from texts",
        part(train),
        part(test),
        validation,
        num_classes=len(names),
        score="recall@5" if task == "tags" else "accuracy",
    )
    return replace(loaded, public_inputs=part(others)[0]) if others else loaded


def _text(package: Package) -> str:
    """Return synopsis and description as one line."""
    return f"{package.synopsis}. {' '.join(_PARAGRAPH.sub('', package.description).split())}"
