"""What every loader returns."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.utils.data import TensorDataset

from privgrad.errors import expected

NO_LABEL = -100  # of a token that is not to be foretold: what torch's cross-entropy leaves out


@dataclass(frozen=True)
class DataSet:
    """A classification task, split.

    Attributes:
        name: for reports: what it is and where it came from.
        train: (input, label) pairs, the private examples. A label is an integer, or one for each token of the input
            (NO_LABEL where nothing is to be foretold); for tags float with one entry each, 1 for what applies; to be
            reconstructed, the input itself.
        validation: held out of the training set for tuning; may be empty.
        test: the set's own test part.
        num_classes: number of labels.
        input_shape: shape of one input, without the batch dimension.
        frequency_edges: where classes are so unequal that results are told by how frequent a class is: lower ends of
            the groups' counts; () groups classes of equal count.
        vocabulary: where inputs are ids of words or tokens: ids are in [0, vocabulary).
        public_counts: how often each id occurs in text that is apart from all examples, shape (vocabulary,).
        score: what models are compared by, besides their loss; None where there is nothing to get right.
        public: (input, label) pairs that were taken out of the training set to be public; None if there are none.
        other_public: public ones from elsewhere, which are drawn otherwise than the training set; None if there are
            none.
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

    @property
    def measured_on(self) -> Literal["test", "training"]:
        """Which examples results are of; "training", NOT private, where there is nothing to generalize to."""
        return "training" if self.test is self.train else "test"


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
    score: Literal["accuracy", "recall@5"] = "accuracy",
) -> DataSet:
    """A DataSet whose validation part is the end of the training part.

    Args:
        name: as in DataSet.
        train: inputs (n, ...) and labels (n, ...).
        test: the same of the test part.
        validation: how many training examples to hold out, from 0 to n - 1.
        num_classes: None is one more than the largest training label.
        frequency_edges: as in DataSet.
        vocabulary: as in DataSet.
        public_counts: as in DataSet.
        score: as in DataSet.
    Raises:
        PrivacyError: more held out than there is.
    """
    inputs, labels = train
    kept = len(labels) - validation
    if validation < 0 or kept < 1:
        condition = f"from 0 to {len(labels) - 1} examples"
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
        score=score,
    )


def whole(name: str, inputs: Tensor, labels: Tensor, *, num_classes: int) -> DataSet:
    """A DataSet of unequal classes with nothing to generalize to: the training set is the test set."""
    examples = TensorDataset(inputs, labels)
    nothing = TensorDataset(inputs[:0], labels[:0])
    return DataSet(name, examples, nothing, examples, num_classes, tuple(inputs.shape[1:]), frequency_edges=())


def with_public(data: DataSet, count: int) -> DataSet:
    """The same with `count` examples, from the end of the training part, taken out of it as public ones.

    Raises:
        PrivacyError: no private example would be left.
    """
    if count == 0:
        return data
    inputs, labels = data.train.tensors
    kept = len(labels) - count
    if kept < 1:
        raise expected("data", "public", f"to be below {len(labels)}", count, "take fewer")
    private, public = (TensorDataset(inputs[part], labels[part]) for part in (slice(kept), slice(kept, None)))
    return replace(data, train=private, public=public)


def with_other_public(data: DataSet, other: DataSet) -> DataSet:
    """The same with another set's training part as public examples from elsewhere.

    Raises:
        PrivacyError: inputs of another shape, or most of them among the training inputs.
    """
    if other.input_shape != data.input_shape:
        remedy = "choose another set, or bring its inputs to that shape"
        raise expected("data", "elsewhere", f"to have inputs of shape {data.input_shape}", other.input_shape, remedy)
    private, public = ({hash(row.tobytes()) for row in part.train.tensors[0].numpy()} for part in (data, other))
    # Some may be equal by chance, such as two empty texts.
    if 2 * len(private & public) > min(len(private), len(public)):
        remedy = "choose a set that none of the private examples are in"
        raise expected("data", "elsewhere", "to be apart from the training examples", "many of them", remedy)
    return replace(data, other_public=other.train)


def to_reconstruct(data: DataSet) -> DataSet:
    """The same with every input as its own label."""
    parts = {name: getattr(data, name) for name in ("train", "validation", "test", "public", "other_public")}
    own = {name: part and TensorDataset(part.tensors[0], part.tensors[0]) for name, part in parts.items()}
    return replace(data, name=f"{data.name}, to be reconstructed", score=None, frequency_edges=None, **own)
