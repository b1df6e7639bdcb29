"""StackOverflow as TensorFlow Federated distributes it: questions and answers by user, with their tags."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from torch.utils.data import TensorDataset

from privgrad.data.dataset import DataSet, by_user, packed, split
from privgrad.data.schema import PathLike, Positive
from privgrad.errors import expected, readable, require_integer
from privgrad_lab.data.fetching import located, require_counts
from privgrad_lab.data.text import digest, padded

_REMEDY = "run `privgrad data fetch stackoverflow --again`, and `pip install 'privgrad[experiments]'`"
_Rows = list[tuple[str, list[int], list[int]]]  # user, words, tags
_Post = tuple[str, list[int], int, int]  # name, known words, number of all words, label


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
        counted, known = _frequent(folder, words, tags)
        ids = {word: index for index, word in enumerate(counted, start=1)}
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


def stackoverflow_tags(
    path: PathLike | None = None,
    *,
    words: Positive = 10_000,
    tags: Positive = 500,
    length: Positive = 256,
    users: Positive = 400,
    limit: Positive | None = None,
    other_users: int = 4,
    validation: int = 0,
) -> DataSet:
    """Load the paper's centralized task: predict the most frequent tag of a post. One row per post, as their code.

    The posts are those of the first `users` training users, in the order of their names. Each is a sentence of a
    question or an answer, with the title and tags of the question. A hash orders the posts, and chooses a fifth of each
    user's for the test part. A row has the shares of its known words among all its words, packed (see `packed`). The
    label is the most frequent of its tags, or 0 for a post without a known one.

    Args:
        path: folder with TensorFlow Federated's files; None is the cache.
        words: number of most frequent words, by the counts in the data's own files; >= 1.
        tags: number of most frequent tags, by the same counts; >= 1.
        length: words kept of a post, >= 1. The authors keep all.
        users: number of users, >= 1.
        limit: number of training posts to keep, >= 1; None keeps all.
        other_users: the posts of so many users after these become `other_public`, >= 0.
        validation: number of training posts to hold out, >= 0.
    Raises:
        PrivacyError: files are absent or damaged, h5py is not installed, or there are too few users.
    Privacy:
        A row is a sentence: its user has many others. The frequent words, their `public_counts` and the frequent tags
        were counted over all users: NOT private.
    Reference:
        Li et al. 2022 (AdaDPS). Deviations: the other users are not among the 400; there, they are the first four.
    """
    counts = {"words": words, "tags": tags, "length": length, "users": users, "limit": limit}
    require_counts("stackoverflow_tags", **counts)
    require_integer("stackoverflow_tags", "other_users", other_users, 0)
    folder = located("stackoverflow_tags", path, "stackoverflow")
    with readable("stackoverflow_tags", f"the files in {folder}", "to be readable", _REMEDY):
        counted, known = _frequent(folder, words, tags)
        ids = {word: index for index, word in enumerate(counted)}
        every = list(islice(_posts(folder / "stackoverflow_train.h5", ids, known, length), users + other_users))
    if len(every) < users + other_users:
        condition, remedy = f"to be at least {users + other_users}", "lower users or other_users"
        raise expected("stackoverflow_tags", "the number of training users", condition, len(every), remedy)
    parts = [(own[: len(own) * 4 // 5], own[len(own) * 4 // 5 :]) for own in every[:users]]
    train = sorted(chain.from_iterable(own for own, _ in parts), key=_order)
    test, others = [post for _, own in parts for post in own], list(chain.from_iterable(every[users:]))
    loaded = split(
        "StackOverflow (TensorFlow Federated), tags by post",
        _packed(train[:limit], len(ids)),
        _packed(test, len(ids)),
        validation,
        num_classes=len(known),
        vocabulary=len(ids),
        public_counts=torch.tensor([*counted.values()]),
        counts_provenance="private-derived",
    )
    return replace(loaded, other_public=TensorDataset(*_packed(others, len(ids))) if others else None)


def _frequent(folder: Path, words: int, tags: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the counts of the most frequent words, and the numbers of the most frequent tags, from 0 on."""
    with (folder / "stackoverflow.word_count").open(encoding="utf-8") as file:
        counted = {word: int(count) for word, count in map(str.split, islice(file, words))}
    tag_counts: Counter[str] = Counter(json.loads((folder / "stackoverflow.tag_count").read_text(encoding="utf-8")))
    return counted, {tag: index for index, (tag, _) in enumerate(tag_counts.most_common(tags))}


def _posts(file: Path, ids: Mapping[str, int], tags: Mapping[str, int], length: int) -> Iterator[list[_Post]]:
    for user, posts in _read(file):
        rows = list[_Post]()
        for number, (words, names) in enumerate(posts):
            kept = words[:length]
            label = min((tags[tag] for tag in names if tag in tags), default=0)
            rows.append((f"{user} {number}", [ids[word] for word in kept if word in ids], len(kept), label))
        yield sorted(rows, key=_order)


def _order(post: _Post) -> bytes:
    return digest(post[0])


def _packed(posts: Sequence[_Post], words: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat(np.arange(len(posts)), [len(known) for _, known, _, _ in posts])
    columns = np.fromiter(chain.from_iterable(known for _, known, _, _ in posts), np.int64, len(rows))
    shares = np.repeat([1 / max(1, every) for _, _, every, _ in posts], [len(known) for _, known, _, _ in posts])
    matrix = coo_array((shares.astype(np.float32), (rows, columns)), shape=(len(posts), words))
    return packed(matrix.tocsr()), torch.tensor([label for _, _, _, label in posts], dtype=torch.int64)


def _read(file: Path) -> Iterator[tuple[str, Iterator[tuple[list[str], list[str]]]]]:
    """Yield each user, in the order of the names, with the words of title and text, and the tags, of each post."""
    import h5py

    with h5py.File(file) as opened:
        examples: Any = opened["examples"]
        for user in sorted(examples):
            columns = (examples[user][name][()] for name in ("title", "tokens", "tags"))
            posts = zip(*columns, strict=True)
            yield user, ((f"{a.decode()} {b.decode()}".split(), tags.decode().split("|")) for a, b, tags in posts)


def _users(
    file: Path, ids: Mapping[str, int], tags: Mapping[str, int], length: int, minimum: int, cap: int
) -> Iterator[_Rows]:
    for user, posts in _read(file):
        rows: _Rows = []
        for words, names in posts:
            known = [tags[tag] for tag in names if tag in tags]
            if known:
                rows.append((user, [ids[word] for word in words if word in ids][:length], known))
        if len(rows) >= minimum:
            yield rows[:cap]


def _tensors(rows: _Rows, length: int, tags: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.zeros(len(rows), tags)
    for row, (_, _, known) in enumerate(rows):
        labels[row, known] = 1
    return padded((words for _, words, _ in rows), len(rows), length), labels
