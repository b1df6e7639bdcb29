"""Examples -> users, one row each: what federated training takes as a data set."""

from collections.abc import Hashable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.errors import expected, require_integer


def by_user(
    tensors: Sequence[Tensor] | TensorDataset, users: Iterable[Hashable], *, cap: int, minimum: int = 1
) -> TensorDataset:
    """A data set with one row a user, from one with a row an example.

    Args:
        tensors: the examples' tensors, (inputs, labels) say, each with leading dimension n; or a TensorDataset of them.
        users: whose each example is, n of them: numbers, names or whatever compares.
        cap: the most examples kept of a user, the first ones; >= 1.
        minimum: users with fewer examples are left out; >= 1.
    Returns:
        TensorDataset of each tensor as (U, M, ...), and how many examples each user has, (U,); M <= cap is the most.
        What is missing of M repeats the user's first example, and is not trained on. Users with more examples come
        first, so that neighbors in a batch are of like size.
    Raises:
        PrivacyError: a number out of its range, what are no tensors, lengths that differ, or no user left.
    Privacy:
        Rows are made of one user's examples each. How many users there are is to be public: it is the plan's n.
    """
    require_integer("by_user", "cap", cap, 1)
    require_integer("by_user", "minimum", minimum, 1)
    tensors = _require_tensors(tensors)
    rows = dict[Hashable, list[int]]()
    total = 0
    for index, named in enumerate(users):
        user: Hashable = named.item() if isinstance(named, Tensor) else named
        if user is None or user != user:  # NaN: each would be a user of its own
            remedy = "leave examples without a user out"
            raise expected("by_user", "users", "to be known", f"{user} at example {index}", remedy)
        rows.setdefault(user, []).append(index)
        total += 1
    if not tensors or any(len(tensor) != total for tensor in tensors):
        got = f"{total} users of {', '.join(str(len(tensor)) for tensor in tensors) or 'no'} examples"
        raise expected("by_user", "users", "to be one an example", got, "say whose each example is")
    kept = sorted((own for own in rows.values() if len(own) >= minimum), key=len, reverse=True)
    if not kept:
        raise expected("by_user", "users", f"with at least {minimum} examples", "none", "lower minimum")
    most = min(cap, len(kept[0]))
    count_U = torch.tensor([min(cap, len(own)) for own in kept])
    place_UM = torch.tensor([(own + own[:1] * most)[:most] for own in kept])
    return TensorDataset(*(tensor[place_UM] for tensor in tensors), count_U)


def _require_tensors(given: object) -> tuple[Tensor, ...]:
    columns = given.tensors if isinstance(given, TensorDataset) else given
    if isinstance(columns, tuple | list):
        others = [column for column in cast("Sequence[object]", columns) if not isinstance(column, Tensor)]
        if not others:
            return tuple(cast("Sequence[Tensor]", columns))
        got, remedy = f"{type(others[0]).__name__} among them", "turn each into one: torch.as_tensor(inputs)"
    else:
        got, remedy = type(columns).__name__, "give a tuple, (inputs, labels) say"
    raise expected("by_user", "tensors", "to be a sequence of tensors, or a TensorDataset", got, remedy)
