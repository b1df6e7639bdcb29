"""The types that the parts of the library pass to each other: Batch -> ClippedSum -> NoisyGradient, and Scales.

Each type carries the facts that its receiver needs, such as the sensitivity of a sum or the noise of a gradient. All
are frozen dataclasses.

The whole library uses them. The privacy guarantee rests on three: ClippedSum states the sensitivity, Batch and Sampling
state how the examples were drawn. It also rests on `count_examples`, with which PrivateGradient checks that a batch has
one row per example. The provenance of Scales is a statement of the user. NoisyGradient is post-processing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from privgrad.errors import described, expected

SamplingScheme = Literal["poisson", "truncated", "fixed"]
COVERED: tuple[SamplingScheme, ...] = ("poisson", "truncated")  # schemes that an accountant covers
PRIVATE_MOMENT = "private second moment, counted on a ledger of its own"  # the source of features that it whitens
PrivacyUnit = Literal["example", "user"]
LossFunction = Callable[[nn.Module, Any], Tensor]  # (model, examples) -> losses, shape (B,)


@dataclass(frozen=True)
class Sampling:
    """A public record of how the examples of one batch were drawn.

    `sampling.BatchSampler` makes it. PrivateGradient compares it with the plan and charges the ledger for its `draw`.

    Attributes:
        scheme: "poisson" (every example independently with probability sample_rate), "truncated" (the same, and then at
            most max_batch_size of them) or "fixed" (shuffled, fixed size; no accountant covers it).
        sample_rate: q, in (0, 1]; with bands, of the people in the group of this step.
        expected_batch_size: B, the divisor of the clipped sum.
        step: index of the batch in its stream, from 0.
        stream: public name of the random stream that drew the batch. Two batches with the same (stream, step)
            are the same draw.
        seed: the research seed that the stream derives from, or None for the operating system's entropy.
        rank: rank of the process that the batch was drawn for. Each example belongs to exactly one process.
        processes: number of processes that train together.
        bands: b, the number of groups that take turns: step t draws from group t mod b. 1: all are one group.
        max_batch_size: for "truncated", the number of rows of each batch; None for other schemes.
        num_examples: for "truncated", the size of the data that the cost depends on; None for other schemes.
    """

    scheme: SamplingScheme
    sample_rate: float
    expected_batch_size: int
    step: int
    stream: str
    seed: int | None = None
    rank: int = 0
    processes: int = 1
    bands: int = 1
    max_batch_size: int | None = None
    num_examples: int | None = None

    @property
    def draw(self) -> str:
        """The name of this draw: two batches have the same name exactly if their (stream, step) are equal.

        PrivateGradient charges the ledger under this name, so that no draw is released twice.
        """
        return f"{self.stream}:{self.step}"


@dataclass(frozen=True)
class Batch:
    """The examples of one step, with the record of how they were drawn.

    Attributes:
        examples: a tensor, or a tuple, list or dict of tensors, each with the same leading dimension. This is `size`,
            which may be 0, or with truncated sampling `max_batch_size`: rows from `size` on are padding, and count for
            nothing.
        size: number of examples drawn. PRIVATE under Poisson sampling: never use it as a divisor or report it.
        sampling: the public record of the draw.
    """

    examples: Any
    size: int
    sampling: Sampling

    def __repr__(self) -> str:
        """Return the form of one example and the step. The examples and their number are private."""

        def form(leaf: Any) -> Any:
            return tuple(leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf).__name__

        return f"Batch(one example has shape {tree_map(form, self.examples)}, step={self.sampling.step})"

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on a device. Users call it.

        Args:
            device: such as "cuda".
            non_blocking: do not wait for the copy; it needs batches in pinned memory.
        """
        return self._mapped(lambda leaf: leaf.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch with its tensors in pinned memory; torch's DataLoader calls it."""
        return self._mapped(lambda leaf: leaf.pin_memory())

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to its tensors. Other values stay as they are."""

        def mapped(leaf: Any) -> Any:
            return function(leaf) if isinstance(leaf, Tensor) else leaf

        return replace(self, examples=map_examples(mapped, self.examples))


def map_examples(function: Callable[[Tensor], Tensor], examples: Any) -> Any:
    """Apply a function to every tensor of a batch's examples and keep their structure.

    `sampling`, `augmentation`, `diagnostics.bias` and many files of `gradient` call it. The guarantee rests on the
    functions that they apply, not on this.
    """
    return tree_map(cast("Callable[[Any], Any]", function), examples)


def part_of(examples: Any, rows: slice) -> Any:
    """Return rows of a batch, in memory of their own.

    The engines, `contribution` and `diagnostics.bias` compute parts of a batch. The guarantee rests on the memory: a
    model that reads by an offset in memory, as `as_strided` does, would find other examples in front of a view.
    """

    def own(leaf: Tensor) -> Tensor:
        part = leaf[rows]
        is_whole = part.layout is torch.strided and part.untyped_storage().nbytes() == part.numel() * part.itemsize
        return part if is_whole else part.clone()

    return map_examples(own, examples)


def count_examples(examples: Any) -> int:
    """Return the number of examples: the leading dimension that all their tensors share.

    PrivateGradient, `sampling`, `augmentation`, `diagnostics.bias` and many files of `gradient` call it.

    Raises:
        PrivacyError: a leaf is not a tensor, there is no tensor, or the leading dimensions differ.
    """
    leaves: list[Any] = tree_leaves(examples)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            remedy = "turn it into a tensor in the data set or in collate"
            raise expected("Batch", "examples", "to be tensors", type(leaf).__name__, remedy)
    sizes = {leaf.shape[0] for leaf in cast("list[Tensor]", leaves)}
    if len(sizes) != 1:
        remedy = "collate the examples into tensors with one entry per example"
        raise expected("Batch", "examples", "to share one leading dimension", sorted(sizes), remedy)
    return sizes.pop()


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped per-example gradients. PRIVATE until noise has been added.

    The guarantee rests on `sensitivity`: `noise.add_noise` scales the noise by it.

    Attributes:
        values: sum by parameter name, float32 or wider.
        sensitivity: the largest L2 norm by which adding or removing one example (one unit of privacy) moves the
            values, taken as one vector.
    """

    values: Mapping[str, Tensor]
    sensitivity: float


Provenance = Literal["public data", "common knowledge", "private-derived"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Scales(Mapping[str, Tensor]):
    """A mapping from parameter name to scales A, with the provenance of the scales. It cannot be changed.

    Users and `side_information` make them. `precondition.fixed` divides each gradient by A before clipping. It takes no
    plain dict, such as one that was made from Scales by `{**scales}`.

    Args:
        values: scales by parameter name; each broadcasts to its parameter.
    Attributes:
        provenance: "public data", which includes released values; "common knowledge" (anyone may assume it, for example
            the word frequencies of a language); or "private-derived": computed from the private data, so that no
            epsilon covers the scales.
        source: the exact source, in a few words.
    Raises:
        PrivacyError: values is not a mapping, the provenance is unknown, or the source is empty.
    Privacy:
        The provenance is a statement of the caller. No code can check it. Values that are computed from Scales and put
        into new Scales need the provenance of the old ones.
    """

    provenance: Provenance
    source: str
    _tensors: dict[str, Tensor]

    def __init__(self, values: Mapping[str, Tensor], *, provenance: Provenance, source: str) -> None:
        if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give a dict, such as {'0.weight': torch.ones(4, 5)}"
            raise expected("Scales", "values", "to be a mapping of scales by parameter name", described(values), remedy)
        if f"{provenance}" not in get_args(Provenance) or not source:
            condition = f"to be one of {', '.join(get_args(Provenance))}, with a source"
            got, remedy = f"provenance {provenance!r} and source {source!r}", "say where the scales come from"
            raise expected("Scales", "provenance", condition, got, remedy)
        # Copies, here and below: a tensor that is overwritten would change the scales, and not their provenance.
        tensors: dict[str, Tensor] = {name: torch.as_tensor(value).detach().clone() for name, value in values.items()}
        vars(self).update(provenance=provenance, source=source, _tensors=tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Scales({self._tensors!r}, provenance={self.provenance!r}, source={self.source!r})"

    # The entries of two tensors are compared one by one, which gives no single answer.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __or__(self, other: Any) -> "Scales":
        """Return the union of both, with the less public provenance of the two and with both sources. For users."""
        if not isinstance(other, Scales):
            raise _not_scales("right", other)
        order = get_args(Provenance)
        provenance = cast(Provenance, max(self.provenance, other.provenance, key=order.index))
        source = "; ".join(dict.fromkeys((self.source, other.source)))
        return Scales({**self, **other}, provenance=provenance, source=source)

    def __ror__(self, other: Any) -> "Scales":
        """Refuse the union with a left operand that is not Scales."""
        raise _not_scales("left", other)


def _not_scales(side: str, operand: object) -> Exception:
    """Return the error for the union of Scales with something else."""
    remedy = "convert it to Scales, so that both sources stay known"
    return expected("Scales", f"the {side} operand of |", "to be Scales", type(operand).__name__, remedy)


@dataclass(frozen=True, eq=False)
class NormDistribution:
    """A released distribution of the norms of the gradients of one step. It is as private as the released gradient.

    PrivateGradient makes it, from `norm_bins` or for `adaptive_clip`.

    Attributes:
        shares: for each edge, the noisy share of gradients that are shorter, shape (K,), float64, on the CPU. It is
            their number in the batch, divided by the public expected number of contributions. Noise may bring it below
            0 or above 1. With `norm_bins`, it is the share of clipped gradients, and one that is between an edge and
            the next lower edge counts in proportion. With other rules, one within 10 % of an edge does.
        noise_std: standard deviation of the noise in each share, shape (K,).
        edges: the norms below which `shares` counts, shape (K,), falling. With `norm_bins`: C (1 - k / K) for k = 0 to
            K - 1.
        max_grad_norm: C of the step, which is one of the edges.
    """

    shares: Tensor
    noise_std: Tensor
    edges: Tensor
    max_grad_norm: float

    @property
    def clip_fraction(self) -> float:
        """The noisy share of gradients longer than C, which clipping shortens; nan if C is no edge. See `shares`."""
        return 1.0 - float(self.shares[self.edges == self.max_grad_norm].mean())

    @property
    def clip_fraction_std(self) -> float:
        """The standard deviation of the noise in `clip_fraction`."""
        return float(self.noise_std[self.edges == self.max_grad_norm].mean())

    def __repr__(self) -> str:
        span = f"edges from {float(self.edges[-1]):.4g} to {float(self.edges[0]):.4g}"
        share = f"clip_fraction={self.clip_fraction:.2g} +- {self.clip_fraction_std:.1g}"
        return f"NormDistribution(bins={len(self.edges)}, {span}, max_grad_norm={self.max_grad_norm:.4g}, {share})"


NoiseStd = float | Mapping[str, float | Tensor]


@dataclass(frozen=True)
class NoiseMemory:
    """How the noise of a released gradient depends on that of earlier ones; see `noise.Banded`.

    Attributes:
        coefficients: c_0, c_1, ... of w_t = (z_t - c_1 w_{t-1} - ...) / c_0, with independent z.
        step: t of this gradient. w before t = 0 is 0.
        stream: public name of the random stream of z. Noise of another stream is independent.
    """

    coefficients: tuple[float, ...]
    step: int
    stream: str = ""


@dataclass(frozen=True)
class NoisyGradient(Mapping[str, Tensor]):
    """A released gradient: a mapping from parameter name to a tensor of the parameter's shape.

    `noise.add_noise` makes it, and PrivateGradient returns it. Any use of it is post-processing and costs no more
    privacy.

    Attributes:
        tensors: averaged noisy gradient by parameter name, in the order of the parameters.
        noise_std: standard deviation of the noise in the tensors, sigma C / B, in gradient units, >= 0. It is one
            number for all parameters, or a mapping from parameter name to a number or to a tensor shaped like the
            parameter.
        norm_distribution: the private distribution of the gradients' norms, if PrivateGradient was given `norm_bins`.
        noise_gain: in the long run, the standard deviation of a sum of such gradients' noise over that of a sum of
            independent noise with `noise_std`. It is 1, except for noise with memory and after a filter.
        noise_memory: for noise with memory (`noise.Banded`), its coefficients; None for independent noise, and after a
            filter.
        is_filtered: whether it is the output of a filter, whose noise depends on that of earlier steps.
        side_information: the sources of public data that the ledger names; empty if it names none, and None for a
            gradient without a ledger.
    """

    tensors: Mapping[str, Tensor]
    noise_std: NoiseStd
    norm_distribution: NormDistribution | None = None
    noise_gain: float = 1.0
    noise_memory: NoiseMemory | None = None
    is_filtered: bool = False
    side_information: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def noise_std_of(self, name: str) -> float | Tensor:
        """Return the standard deviation of the noise for one parameter. `optim.debiased` and `diagnostics` call it."""
        return self.noise_std if isinstance(self.noise_std, float | int) else self.noise_std[name]

    def noise_variance_of(self, name: str) -> float:
        """Return the sum of the noise's variances over a parameter's coordinates. `filters` and diagnostics call it."""
        std = self.noise_std_of(name)
        variance = float(std.double().square().mean()) if isinstance(std, Tensor) else std**2
        return variance * self.tensors[name].numel()

    def assign(self, model: nn.Module) -> None:
        """Write the gradient to the `.grad` of the model's parameters, for any torch optimizer.

        Users call it in loops of their own.

        Raises:
            PrivacyError: model is not a torch.nn.Module, or lacks a parameter of this gradient.
        Privacy:
            Post-processing. `.grad` does not hold `noise_std`. The optimizers of privgrad need it, so pass them the
            gradient by `step(grad=...)` instead.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "pass the model that PrivateGradient was given"
            raise expected("NoisyGradient.assign", "model", "to be a torch.nn.Module", described(model), remedy)
        parameters = dict(model.named_parameters())
        unknown = [name for name in self if name not in parameters]
        if unknown:
            raise expected(
                "NoisyGradient.assign",
                "model",
                "to have every parameter of the gradient",
                f"a {type(model).__name__} without {', '.join(unknown)}",
                "pass the model that PrivateGradient was given",
            )
        for name, value in self.items():
            parameters[name].grad = value.to(parameters[name].dtype)
