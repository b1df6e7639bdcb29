"""Conversion of examples to users: one row per user, the data set that federated training takes.

Users call it, and so do the loaders of `debian` and `stackoverflow`. The privacy guarantee for users rests on
`by_user`: all examples of a user must be in one row. It does not rest on `_require_tensors`, which finds mistakes of
usage.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data.units import key_of_user
from privgrad.errors import expected, require_integer


def by_user(
    tensors: Sequence[Tensor] | TensorDataset, users: Iterable[Hashable], *, cap: int, minimum: int = 1
) -> TensorDataset:
    """Return a data set with one row per user, from a data set with one row per example.

    Args:
        tensors: the tensors of the examples, for instance (inputs, labels), each with leading dimension n; or a
            TensorDataset of them.
        users: the user of each example, n entries: numbers, names or any other hashable values. As in a table, "7 ",
            "7.0" and 7 are one user. None, NaN, "", "NA", "?" and other marks of a missing name are errors.
        cap: the largest number of examples kept per user, the first ones; >= 1. Choose what a typical user has, from
            public knowledge. It does not change epsilon.
        minimum: users with fewer examples are left out; >= 1.
    Returns:
        TensorDataset of each tensor as (U, cap, ...), and the number of examples of each user, (U,). Rows with fewer
        examples are filled up with the user's first example; `LocalUpdate` does not train on these copies, and a loss
        of yours must leave them out by the numbers. Users with more examples come first, so that neighbors in a batch
        have similar sizes.
    Raises:
        PrivacyError: a number is out of its range, an argument is not a tensor, lengths differ, or no user is left.
    Privacy:
        Each row depends on one user only: its length is `cap`, whatever the largest user has. The number of users has
        to be public: it is the plan's n.
    """
    require_integer("by_user", "cap", cap, 1)
    require_integer("by_user", "minimum", minimum, 1)
    tensors = _require_tensors(tensors)
    rows = dict[Hashable, list[int]]()
    total = 0
    for index, named in enumerate(users):
        user = key_of_user(named)
        if user is None:
            got = repr(named.item() if isinstance(named, Tensor) else named)
            remedy = "leave out examples without a user"
            raise expected("by_user", f"the user of example {index}", "to be known", got, remedy)
        rows.setdefault(user, []).append(index)
        total += 1
    if not tensors or any(len(tensor) != total for tensor in tensors):
        got = f"{total} users and tensors of lengths {[len(tensor) for tensor in tensors]}"
        raise expected("by_user", "users", "to have one entry per example", got, "give the user of each example")
    kept = sorted((own for own in rows.values() if len(own) >= minimum), key=len, reverse=True)
    if not kept:
        got = max(map(len, rows.values()), default=0)
        condition = f"to be at least {minimum}"
        raise expected("by_user", "the most examples of a user", condition, got, "lower minimum")
    count_U = torch.tensor([min(cap, len(own)) for own in kept])
    place_UM = torch.tensor([(own + own[:1] * cap)[:cap] for own in kept])
    return TensorDataset(*(tensor[place_UM] for tensor in tensors), count_U)


def _require_tensors(given: object) -> tuple[Tensor, ...]:
    """Return the tensors of the examples; raise PrivacyError for anything else."""
    columns = given.tensors if isinstance(given, TensorDataset) else given
    if isinstance(columns, tuple | list):
        held = cast("Sequence[object]", columns)
        others = [column for column in held if not isinstance(column, Tensor)]
        if not others:
            return tuple(cast("Sequence[Tensor]", held))
        got = f"{type(others[0]).__name__} in a {type(held).__name__}"
        remedy = "convert each to a tensor: torch.as_tensor(inputs)"
    else:
        got, remedy = type(columns).__name__, "give a tuple, for instance (inputs, labels)"
    raise expected("by_user", "tensors", "to be a sequence of tensors, or a TensorDataset", got, remedy)
