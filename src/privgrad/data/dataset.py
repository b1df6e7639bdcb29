"""The DataSet that every loader returns, and functions that make or change it.

The loaders call `split` and `whole`. `experiments.build` calls the other functions, to change a loader's result. The
privacy guarantee rests on `with_public`: the public examples leave the training set. It also rests on the check in
`with_other_public`, and on the loaders: `other_public`, `public_inputs` and `public_counts` must not come from private
examples. It does not rest on the rest of this file.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.data.schema import Schema
from privgrad.errors import expected
from privgrad.features.extractor import Extractor
from privgrad.types import Provenance

NO_LABEL = -100  # of a token that is not a target; torch's cross-entropy ignores this label


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
        score: the measure for comparing models besides their loss; None where nothing can be right or wrong.
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
    score: Literal["accuracy", "recall@5"] | None = "accuracy"
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

        It is "training", NOT private, where there is nothing to generalize to. `experiments.runner` records it.
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
    frequency_edges: tuple[int, ...] | None = None,
    vocabulary: int | None = None,
    public_counts: Tensor | None = None,
    counts_provenance: Provenance | None = None,
    score: Literal["accuracy", "recall@5"] = "accuracy",
    pixel_range: tuple[float, float] | None = None,
) -> DataSet:
    """Return a DataSet whose validation part is the end of the training part.

    Args:
        name: as in DataSet.
        train: inputs (n, ...) and labels (n, ...).
        test: inputs and labels of the test part.
        validation: number of training examples to hold out, from 0 to n - 1.
        num_classes: None is one more than the largest training label.
        frequency_edges: as in DataSet.
        vocabulary: as in DataSet.
        public_counts: as in DataSet.
        counts_provenance: as in DataSet.
        score: as in DataSet.
        pixel_range: as in DataSet.
    Raises:
        PrivacyError: validation is out of its range.
    """
    inputs, labels = train
    kept = len(labels) - validation
    if validation < 0 or kept < 1:
        condition = f"to be from 0 to {len(labels) - 1} examples"
        raise expected("data", "validation", condition, validation, "hold out fewer")
    return DataSet(
        name=name,
        train=TensorDataset(inputs[:kept], labels[:kept]),
        validation=TensorDataset(inputs[kept:], labels[kept:]),
        test=TensorDataset(*test),
        num_classes=int(labels.max()) + 1 if num_classes is None else num_classes,
        input_shape=tuple(inputs.shape[1:]),
        frequency_edges=frequency_edges,
        vocabulary=vocabulary,
        public_counts=public_counts,
        counts_provenance=counts_provenance,
        score=score,
        pixel_range=pixel_range,
    )


def whole(name: str, inputs: Tensor, labels: Tensor, *, num_classes: int) -> DataSet:
    """Return a DataSet of unequal classes whose training set is also its test set.

    It is for data without anything to generalize to.
    """
    examples = TensorDataset(inputs, labels)
    nothing = TensorDataset(inputs[:0], labels[:0])
    return DataSet(name, examples, nothing, examples, num_classes, tuple(inputs.shape[1:]), frequency_edges=())


def with_public(data: DataSet, count: int) -> DataSet:
    """Return the data set with the last `count` training examples moved to `public`.

    Raises:
        PrivacyError: no private example would be left, or the data are by user.
    """
    if count == 0:
        return data
    if len(data.train.tensors) != 2:
        remedy = "leave it out, or choose data without users"
        raise expected("data", "public", "to be 0 for data by user", count, remedy)
    inputs, labels = data.train.tensors
    kept = len(labels) - count
    if kept < 1:
        raise expected("data", "public", f"to be below {len(labels)}, all training examples", count, "take fewer")
    private, public = (TensorDataset(inputs[part], labels[part]) for part in (slice(kept), slice(kept, None)))
    return replace(data, train=private, public=public, split="size")  # others decide which examples are the last ones


def with_other_public(data: DataSet, other: DataSet) -> DataSet:
    """Return the data set with the training part of another one as `other_public`.

    Raises:
        PrivacyError: the inputs have another shape, or most of them are also training inputs.
    Privacy:
        The check for equal inputs finds only exact copies. The user is responsible for data that is truly public.
    """
    if other.input_shape != data.input_shape:
        remedy = "choose a different set, or convert its inputs to that shape"
        raise expected("data", "elsewhere", f"to have inputs of shape {data.input_shape}", other.input_shape, remedy)
    if have_most_rows_in_common(data.train.tensors[0], other.train.tensors[0]):
        remedy = "choose a set without any of the private examples"
        # The number is private.
        condition, got = "to share at most half of its inputs with the training examples", f"copies in {other.name}"
        raise expected("data", "elsewhere", condition, got, remedy)
    return replace(data, other_public=other.train)


def have_most_rows_in_common(one: Tensor, other: Tensor) -> bool:
    """Return whether more than half of the different rows of the smaller tensor are in the other one.

    Some rows may be equal by chance, such as two empty texts. `with_other_public` and `image_folder` call it.
    """
    ones, others = ({hash(row.tobytes()) for row in rows.numpy()} for rows in (one, other))
    return len(ones & others) > min(len(ones), len(others)) // 2


def to_reconstruct(data: DataSet) -> DataSet:
    """Return the data set with every input as its own label.

    Raises:
        PrivacyError: the data are by user.
    """
    if len(data.train.tensors) > 2 or data.by_person:
        raise expected("data", "reconstruct", "to be false for data by user", True, "leave it out")
    parts = {name: getattr(data, name) for name in ("train", "validation", "test", "public", "other_public")}
    own = {name: part and TensorDataset(part.tensors[0], part.tensors[0]) for name, part in parts.items()}
    return replace(data, name=f"{data.name}, to be reconstructed", score=None, frequency_edges=None, **own)
