"""The DataSet that every loader returns, and functions that make or change it.

The loaders must take care that `other_public`, `public_inputs` and `public_counts` come from no private example.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data.schema import Schema, key_of_user, rows_by_key
from privgrad.errors import expected, require_integer
from privgrad.features.extractor import Extractor
from privgrad.gradient.transform import Provenance

NO_LABEL = -100  # of a token that is not a target; torch's cross-entropy ignores this label
_MOST_COLUMNS = 2**24  # up to here float32 holds every integer


def has_label(labels: Tensor) -> Tensor:
    """Return which labels there are: those that are not NO_LABEL, and of numbers not NaN."""
    return ~labels.isnan() if labels.is_floating_point() else labels != NO_LABEL


def packed(matrix: Any) -> Tensor:
    """Return a sparse matrix as one row of (column, value) pairs per example, the input of `models.SparseLinear`.

    Args:
        matrix: shape (n, V), real, finite in float32: a scipy sparse matrix or array (for instance from a vectorizer
            of scikit-learn), or a torch sparse tensor of any layout.
    Returns:
        float32, shape (n, 2, L), where L is the largest number of entries in a row: columns in [:, 0], values in
        [:, 1]. Rows with fewer entries are padded with value 0 in column 0.
    Raises:
        PrivacyError: matrix is not sparse, not of two dimensions, has more than 2**24 columns, or has other values.
    Privacy:
        L depends on the private rows: NOT private, and never released.
    """
    is_tensor, shape = isinstance(matrix, Tensor), tuple(getattr(matrix, "shape", ()))
    is_sparse = matrix.layout != torch.strided and not matrix.dense_dim() if is_tensor else hasattr(matrix, "tocoo")
    if not is_sparse or len(shape) != 2 or shape[1] > _MOST_COLUMNS:
        condition = f"to be a sparse matrix of shape (n, V), V at most {_MOST_COLUMNS}"
        got = f"a {type(matrix).__name__} of shape {shape}"
        raise expected("packed", "matrix", condition, got, "use nn.Linear for dense input")
    if is_tensor:
        coalesced = matrix.detach().to_sparse_coo().coalesce()
        rows, columns = coalesced.indices().numpy()
        values = coalesced.values().numpy()
    else:
        found = matrix.tocsr().tocoo()  # sorted by rows, for every format
        rows, columns, values = found.row, found.col, found.data
    finite = np.abs(values) <= np.finfo(np.float32).max  # False for NaN too
    if np.iscomplexobj(values) or not finite.all():
        got = values.dtype if np.iscomplexobj(values) else values[~finite][0]
        raise expected("packed", "matrix", "to have real values, finite in float32", got, "scale or drop such values")
    counts = np.bincount(rows, minlength=shape[0])
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each entry within its row
    out = torch.zeros(shape[0], 2, max(int(counts.max(initial=0)), 1))
    array = out.numpy()
    array[rows, 0, place] = columns
    array[rows, 1, place] = values
    return out


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
    columns = list(tensors.tensors if isinstance(tensors, TensorDataset) else tensors)
    if isinstance(tensors, Tensor):  # its rows would be taken as columns
        remedy = "give a tuple of tensors, for instance (torch.as_tensor(inputs), labels)"
        raise expected("by_user", "tensors", "to be a sequence of tensors, or a TensorDataset", "Tensor", remedy)
    named = list(users)
    keys = list(map(key_of_user, named))
    if None in keys:
        place = keys.index(None)
        name, got = f"the user of example {place}", repr(named[place])
        raise expected("by_user", name, "to be known", got, "leave the example out")
    lengths = [len(column) for column in columns]
    if set(lengths) != {len(keys)}:
        got = f"{len(keys)} users and tensors of lengths {lengths}"
        raise expected("by_user", "users", "to have one entry per example", got)
    rows = rows_by_key(keys).values()
    kept = sorted((own for own in rows if len(own) >= minimum), key=len, reverse=True)
    if not kept:
        most = max(map(len, rows), default=0)
        raise expected("by_user", "the most examples of a user", f"to be at least {minimum}", most)
    count_U = torch.tensor([min(cap, len(own)) for own in kept])
    place_UM = torch.tensor([(own + own[:1] * cap)[:cap] for own in kept])
    return TensorDataset(*(column[place_UM] for column in columns), count_U)


@dataclass(frozen=True)
class DataSet:
    """A learning task, split into training, validation and test examples.

    Attributes:
        name: for reports: the data and its source.
        train: (input, label) pairs, the private examples. A label is an integer, or one integer per token of the input
            (NO_LABEL for a token that is not a target). For tags it is a float vector, 1 for each tag that applies. For
            reconstruction it is the input itself.
        validation: held out of the training set for tuning; may be empty.
        test: the data's own test part.
        num_classes: number of labels.
        input_shape: shape of one input, without the batch dimension.
        frequency_edges: for very unequal classes, whose results are reported by class frequency: the lower ends of the
            groups of counts; () groups classes of equal count. None: results are not grouped.
        vocabulary: for inputs that are ids of words or tokens: ids are in [0, vocabulary).
        public_counts: how often each id occurs in text outside of all examples, shape (vocabulary,).
        counts_provenance: the provenance of public_counts, as in `Scales`: "private-derived" if they also count the
            examples, NOT private. None if there are no counts.
        score: the measure for comparing models besides their loss; None where nothing can be right or wrong. "r2" is
            for labels that are numbers within the bounds of `schema`; R2 is the share of their variance that a model
            explains.
        public: (input, label) pairs that were moved out of the training set to be public; None if there are none.
        other_public: public examples from another source, with another distribution; None if there are none.
        split: how train, validation and test were divided. "unit": a keyed hash of each privacy unit alone decided its
            part, and all rows of a unit are in one part; the sizes of the parts are then private. "size": otherwise.
            Experiments treat the sizes of a user's data as private in both cases.
        pixel_range: for images: the values of black and of white pixels in all channels; None if inputs are no such
            images.
        by_person: whether each row of the tensors holds all rows of one person: inputs (n, rows, *input_shape), and
            labels (n, rows) with NO_LABEL for rows that the person does not have.
        public_inputs: inputs without labels, outside of all examples, (m, *input_shape): for the statistics of feature
            extractors. None if there are none.
        extractor: made the inputs from those of the loader; None if they are as loaded.
        image_shape: of the images from which an extractor made the inputs; None for other data.
        classes: the public names of the labels 0, 1, ..., which a head is saved with; None if they are not declared.
        schema: the public declaration of a table's columns, which a head is saved with; None for other data.
    """

    name: str
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    num_classes: int
    input_shape: tuple[int, ...]
    frequency_edges: tuple[int, ...] | None = None
    vocabulary: int | None = None
    public_counts: Tensor | None = None
    public: TensorDataset | None = None
    other_public: TensorDataset | None = None
    score: Literal["accuracy", "recall@5", "r2"] | None = "accuracy"
    counts_provenance: Provenance | None = None
    split: Literal["size", "unit"] = "size"
    by_person: bool = False
    pixel_range: tuple[float, float] | None = None
    public_inputs: Tensor | None = None
    extractor: Extractor | None = None
    image_shape: tuple[int, ...] | None = None
    classes: tuple[str | int | bool, ...] | None = None
    schema: Schema | None = None

    @property
    def measured_on(self) -> Literal["test", "training"]:
        """The examples on which results are measured.

        It is "training", NOT private, where there is nothing to generalize to.
        """
        is_copy = all(map(torch.equal, self.test.tensors, self.train.tensors))
        return "training" if self.test is self.train or is_copy else "test"


def split(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    validation: int,
    *,
    num_classes: int | None = None,
    **options: Any,
) -> DataSet:
    """Return a DataSet whose validation part is the end of the training part; nothing is held out if it is `test`."""
    inputs, labels = train
    most, kept = 0 if test is train else len(labels) - 1, len(labels) - validation
    if not 0 <= validation <= most:
        raise expected("data", "validation", f"to be from 0 to {most}", validation)
    private = TensorDataset(inputs[:kept], labels[:kept])
    return DataSet(
        name=name,
        train=private,
        validation=TensorDataset(inputs[kept:], labels[kept:]),
        test=private if test is train else TensorDataset(*test),
        num_classes=int(labels.max()) + 1 if num_classes is None else num_classes,
        input_shape=tuple(inputs.shape[1:]),
        **options,
    )


def have_most_rows_in_common(one: Tensor, other: Tensor) -> bool:
    """Return whether more than half of the different rows of the smaller tensor are in the other one."""
    ones, others = ({hash(row.tobytes()) for row in rows.numpy()} for rows in (one, other))
    return len(ones & others) > min(len(ones), len(others)) // 2  # fewer may be equal by chance, such as empty texts
