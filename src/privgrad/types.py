"""The types that the parts of the library pass to each other: Batch -> ClippedSum -> NoisyGradient, and Scales.

Each type carries the facts that its receiver needs, such as the sensitivity of a sum or the noise of a gradient. All
are frozen dataclasses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, keystr, register_pytree_node, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from privgrad.errors import PrivacyError, described, expected

SamplingScheme = Literal["poisson", "truncated", "epochs"]
SHUFFLED = "fixed"  # in records: batches of one size, as of a shuffled DataLoader, which no accountant covers
PRIVATE_MOMENT = "private second moment, counted on a ledger of its own"  # the source of features that it whitens
PrivacyUnit = Literal["example", "user"]
User = Literal["person", "device", "site"]  # what a user is, in the words of a statement
LossFunction = Callable[[nn.Module, Any], Tensor]  # (model, examples) -> losses, shape (B,)


@dataclass(frozen=True)
class Sampling:
    """A public record of how the examples of one batch were drawn.

    PrivateGradient compares it with the plan and charges the ledger for its `draw`.

    Attributes:
        scheme: "poisson" (every example independently with probability sample_rate), "truncated" (the same, and then at
            most max_batch_size of them) or "epochs" (every example in as many steps of each
            epoch).
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
        epoch_steps: for "epochs", the number of steps of an epoch; None for other schemes.
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
    epoch_steps: int | None = None

    @property
    def draw(self) -> str:
        """The name of this draw, equal exactly if (stream, step) are: the ledger releases no draw twice."""
        return f"{self.stream}:{self.step}"


@dataclass(frozen=True)
class Batch:
    """The examples of one step, with the record of how they were drawn.

    Attributes:
        examples: a tensor, or a tuple, list, mapping or dataclass of tensors, all of one leading dimension. This is
            `size`, which may be 0, or with truncated sampling `max_batch_size`: rows from `size` on are padding, and
            count for nothing. An empty batch is released as any other: to leave it out would publish that it was empty.
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

        return f"Batch(one example has shape {map_examples(form, self.examples)}, step={self.sampling.step})"

    # Habits of a DataLoader: `for x, y in batches` calls __getitem__, too.
    def __getitem__(self, key: object) -> Any:
        remedy = "call private_grad(batch): loss_fn gets batch.examples, as examples[0] or x, y = examples"
        raise TypeError(f"Batch: expected the whole batch, which is private, to go to private_grad; {remedy}.")

    def __len__(self) -> int:
        remedy = "divide by plan.expected_batch_size, which is public; loss_fn may use the length of batch.examples"
        raise TypeError(f"Batch: expected the size of a batch to stay private; {remedy}.")

    def __bool__(self) -> bool:
        return True

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on a device; with `non_blocking`, copy pinned memory without a wait."""
        return self._mapped(lambda leaf: leaf.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch with its tensors in pinned memory, as torch's DataLoader asks for."""
        return self._mapped(lambda leaf: leaf.pin_memory())

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to its tensors. Other values stay as they are."""
        mapped = map_examples(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, self.examples)
        return replace(self, examples=mapped)


def map_examples(function: Callable[[Any], Any], examples: Any) -> Any:
    """Apply a function to every tensor of a batch's examples and keep their structure, and the types of it."""

    def mapped(leaf: Any) -> Any:
        return map_examples(function, leaf) if _registered(leaf) else function(leaf)

    if (leaves := _flat(examples)) is None:
        return tree_map(mapped, examples)
    found = [function(leaf) for leaf in leaves]
    if isinstance(examples, dict):
        return dict(zip(cast("dict[Any, Any]", examples), found, strict=True))
    return found[0] if isinstance(examples, Tensor) else type(examples)(found)


def leaves_of(examples: Any) -> Sequence[Any]:
    """Return the leaves of a batch's examples, in order."""
    return tree_leaves(examples) if (leaves := _flat(examples)) is None else leaves


def _flat(examples: Any) -> Sequence[Tensor] | None:
    """Return the tensors of a tensor, or of a plain tuple, list or dict of tensors; None for any other structure."""
    # torch's trees take 40 calls of Python for a pair of tensors.
    kind = cast("type[Any]", type(examples))
    leaves = examples if kind is tuple or kind is list else (*examples.values(),) if kind is dict else (examples,)
    return leaves if {*map(type, leaves)} == {Tensor} else None


def _registered(leaf: object) -> bool:
    """Let torch's trees look into a mapping or a dataclass of a new type; return False for anything else."""
    if isinstance(leaf, Tensor):  # nearly every leaf
        return False
    kind, is_mapping = cast("type[Any]", type(leaf)), isinstance(leaf, Mapping)
    if not (is_mapping or is_dataclass(kind)):
        return False

    def flat(whole: Any) -> tuple[list[Any], Any]:
        names = list(whole) if is_mapping else [field.name for field in fields(whole)]
        return [whole[name] if is_mapping else getattr(whole, name) for name in names], names

    def named(whole: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values, names = flat(whole)
        return [(MappingKey(name), value) for name, value in zip(names, values, strict=True)], names

    def made(values: Iterable[Any], names: Any) -> Any:
        held = dict(zip(names, values, strict=True))
        if is_mapping:
            return kind(held)
        whole = object.__new__(kind)
        for name, value in held.items():
            object.__setattr__(whole, name, value)  # as __init__ does, also if the class is frozen
        return whole

    register_pytree_node(kind, flat, made, flatten_with_keys_fn=named)
    return True


def part_of(examples: Any, rows: slice | Tensor) -> Any:
    """Return rows of a batch, a slice or those where a mask of shape (B,) holds, in memory of their own."""

    # A model that reads by an offset in memory, as `as_strided` does, would find other examples in front of a view.
    def own(leaf: Tensor) -> Tensor:
        part = leaf[rows]
        is_whole = part.layout is torch.strided and part.untyped_storage().nbytes() == part.numel() * part.itemsize
        return part if is_whole else part.clone()

    return map_examples(own, examples)


def count_examples(examples: Any) -> int:
    """Return the number of examples: the leading dimension that all their tensors share."""
    leaves = tree_leaves(examples) if (plain := _flat(examples)) is None else plain
    if plain is None and any(map(_registered, leaves)):
        return count_examples(examples)
    if plain is None and not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise _unusable(examples)
    lengths = {leaf.shape[0] if leaf.ndim > 0 and leaf.layout is torch.strided else None for leaf in leaves}
    if len(lengths) != 1 or (length := lengths.pop()) is None:
        raise _unusable(examples)
    return length


def named_leaves(path: str, examples: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return what examples hold, each with its name, such as examples['label']; `is_leaf` says what stays whole."""
    known = map_examples(lambda leaf: leaf, examples)
    return [(path + keystr(place), leaf) for place, leaf in tree_flatten_with_path(known, is_leaf)[0]]


def _unusable(examples: Any) -> PrivacyError:
    """Return the error for examples that are not dense tensors of one length; it names the first other part."""
    leaves = named_leaves("examples", examples)
    condition = "to be a tensor with one entry per example"
    for name, leaf in leaves:
        if not isinstance(leaf, Tensor):
            remedy = "leave it out of the batch, or turn it into a tensor in collate"
            return expected("Batch", name, condition, type(leaf).__name__, remedy)
        if leaf.layout is not torch.strided:
            return expected("Batch", name, condition, f"layout {leaf.layout}", "give its to_dense() in collate")
        if leaf.dim() == 0 or len(leaf) != len(leaves[0][1]):  # the numbers are private
            got = f"a length that differs from that of {leaves[0][0]}" if leaf.dim() else "a tensor without dimensions"
            remedy = "leave a constant, such as a (T, T) mask, to loss_fn; pad nodes of graphs to a public number"
            return expected("Batch", name, condition, got, remedy)
    return expected("Batch", "examples", "to hold a tensor", described(examples), "return tensors from collate")


class Place(NamedTuple):
    """Where this process's shard of a value is, in the order of memory; the shards of all make up the whole."""

    start: int  # the first number of the shard
    of: int  # the numbers of the whole


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped per-example gradients. PRIVATE until noise has been added.

    Attributes:
        values: sum by parameter name, float32 or wider. Of a sharded parameter: the shard of this process.
        sensitivity: the largest L2 norm by which adding or removing one example (one unit of privacy) moves the
            values, taken as one vector, if all other examples keep their random numbers (docs/mathematics.md, section
            0). The noise is scaled by it.
        places: of the values that are shards, by name. The sensitivity is that of all shards together.
    """

    values: Mapping[str, Tensor]
    sensitivity: float
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])


@dataclass(frozen=True, eq=False)
class NormDistribution:
    """A released distribution of the norms of the gradients of one step. It is as private as the released gradient.

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


# Tensors that gradients gave out, as they are; and models that were assigned some, which no optimizer has used yet.
RELEASED = cast("MutableMapping[Tensor, bool]", WeakTensorKeyDictionary())
ASSIGNED = cast("MutableMapping[nn.Module, bool]", WeakIdKeyDictionary())


@dataclass(frozen=True)
class NoisyGradient(Mapping[str, Tensor]):
    """A released gradient: a mapping from parameter name to a tensor of the parameter's shape.

    Any use of it is post-processing and costs no more privacy.

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
        RELEASED[self.tensors[name]] = True
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def noise_std_of(self, name: str) -> float | Tensor:
        """Return the standard deviation of the noise for one parameter."""
        return self.noise_std if isinstance(self.noise_std, float | int) else self.noise_std[name]

    def noise_variance_of(self, name: str) -> float:
        """Return the sum of the noise's variances over a parameter's coordinates."""
        std = self.noise_std_of(name)
        variance = float(std.double().square().mean()) if isinstance(std, Tensor) else std**2
        return variance * self.tensors[name].numel()

    def assign(self, model: nn.Module) -> None:
        """Write the gradient to the `.grad` of the model's parameters, for any torch optimizer.

        It replaces what `.grad` holds. A public loss goes after it: its backward pass adds its gradient.

        Raises:
            PrivacyError: the model lacks a parameter of this gradient.
        Privacy:
            Post-processing. `.grad` does not hold `noise_std`. The optimizers of privgrad need it, so pass them the
            gradient by `step(grad=...)` instead.
        """
        parameters = dict(model.named_parameters())
        if unknown := [name for name in self if name not in parameters]:
            got = f"a {type(model).__name__} without {', '.join(unknown)}"
            raise expected("NoisyGradient.assign", "model", "to be the one that PrivateGradient was given", got)
        for name, value in self.items():
            parameters[name].grad = own = value.to(parameters[name].dtype)
            RELEASED[own] = ASSIGNED[model] = True
