"""StackOverflow as TensorFlow Federated distributes it: questions and answers by user, with their tags."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from privgrad.data.dataset import DataSet, by_user
from privgrad.data.schema import PathLike, Positive
from privgrad.errors import expected, readable, require_integer
from privgrad_lab.data.fetching import located, require_counts
from privgrad_lab.data.text import padded

_REMEDY = "run `privgrad data fetch stackoverflow --again`, and `pip install 'privgrad[experiments]'`"
_Rows = list[tuple[str, list[int], list[int]]]  # user, words, tags


def stackoverflow(
    path: PathLike | None = None,
    *,
    words: Positive = 10_000,
    tags: Positive = 500,
    length: Positive = 128,
    limit: Positive = 400,
    minimum: Positive = 10,
    cap: Positive = 256,
    validation: int = 0,
) -> DataSet:
    """Load the paper's federated task: predict the most frequent tags of a post. Bags of words, one row per user.

    The training part has the format of by_user: word ids (U, cap, length), 0 for none, tags (U, cap, tags), and the
    number of posts of each user. Title and text are one bag; posts without any of the tags are left out. The validation
    part has the posts of other training users. The test part has the posts of users of the test file, as many as train.

    Args:
        path: folder with TensorFlow Federated's files; None is the cache.
        words: number of most frequent words, by the counts in the data's own files; >= 1.
        tags: number of most frequent tags, by the same counts; >= 1.
        length: words kept of a post, >= 1.
        limit: number of training users, in the order of their names; >= 1.
        minimum: users with fewer posts are left out, >= 1.
        cap: posts kept of a user, >= 1.
        validation: number of users to hold out, >= 0.
    Raises:
        PrivacyError: files are absent or damaged, h5py is not installed, or there are too few users.
    Privacy:
        The frequent words, their `public_counts` and the frequent tags were counted over all users: NOT private.
    """
    require_counts("stackoverflow", words=words, tags=tags, length=length, limit=limit, minimum=minimum, cap=cap)
    require_integer("stackoverflow", "validation", validation, 0)
    folder = located("stackoverflow", path, "stackoverflow")
    with readable("stackoverflow", f"the files in {folder}", "to be readable", _REMEDY):
        with (folder / "stackoverflow.word_count").open(encoding="utf-8") as file:
            counted = {word: int(count) for word, count in map(str.split, islice(file, words))}
        tag_counts: Counter[str] = Counter(json.loads((folder / "stackoverflow.tag_count").read_text(encoding="utf-8")))
        ids = {word: index for index, word in enumerate(counted, start=1)}
        known = {tag: index for index, (tag, _) in enumerate(tag_counts.most_common(tags))}
        files = (folder / f"stackoverflow_{part}.h5" for part in ("train", "test"))
        read = (_users(file, ids, known, length, minimum, cap) for file in files)
        # The files are large: only the posts of the first users are read.
        first = (islice(users, count) for users, count in zip(read, (limit + validation, limit), strict=True))
        train, test = (list(chain.from_iterable(users)) for users in first)
    found = len({user for user, _, _ in train})
    if found < limit + validation or not test:
        name = f"the numbers of training and test users with at least {minimum} tagged posts"
        got = f"{found} and {len({user for user, _, _ in test})}"
        condition, remedy = f"to be at least {limit + validation} and 1", "lower limit, validation or minimum"
        raise expected("stackoverflow", name, condition, got, remedy)
    private = set(list(dict.fromkeys(user for user, _, _ in train))[:limit])
    own, others = ([row for row in train if (row[0] in private) == is_private] for is_private in (True, False))
    return DataSet(
        name="StackOverflow (TensorFlow Federated), tags by user",
        train=by_user(_tensors(own, length, len(known)), (user for user, _, _ in own), cap=cap),
        validation=TensorDataset(*_tensors(others, length, len(known))),
        test=TensorDataset(*_tensors(test, length, len(known))),
        num_classes=len(known),
        input_shape=(length,),
        vocabulary=len(ids) + 1,
        public_counts=torch.tensor([0, *counted.values()]),
        score="recall@5",
        counts_provenance="private-derived",
    )


def _users(
    file: Path, ids: Mapping[str, int], tags: Mapping[str, int], length: int, minimum: int, cap: int
) -> Iterator[_Rows]:
    import h5py

    with h5py.File(file) as opened:
        examples: Any = opened["examples"]
        for user in sorted(examples):
            columns = (examples[user][name][()] for name in ("title", "tokens", "tags"))
            rows: _Rows = []
            for title, text, names in zip(*columns, strict=True):
                known = [tags[tag] for tag in names.decode().split("|") if tag in tags]
                if known:
                    post = [ids[word] for word in f"{title.decode()} {text.decode()}".split() if word in ids]
                    rows.append((user, post[:length], known))
            if len(rows) >= minimum:
                yield rows[:cap]


def _tensors(rows: _Rows, length: int, tags: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.zeros(len(rows), tags)
    for row, (_, _, known) in enumerate(rows):
        labels[row, known] = 1
    return padded((words for _, words, _ in rows), len(rows), length), labels
