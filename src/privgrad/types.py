"""Frozen values that cross rooms, each carrying the facts that the next room needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from privgrad.errors import described, expected

SamplingScheme = Literal["poisson", "fixed"]
PrivacyUnit = Literal["example", "user"]
LossFunction = Callable[[nn.Module, Any], Tensor]  # (model, examples) -> losses, shape (B,)


@dataclass(frozen=True)
class Sampling:
    """How the examples of one batch were drawn. Everything here is public.

    Attributes:
        scheme: "poisson" (every example independently with probability sample_rate) or "fixed" (shuffled,
            fixed size; no accountant covers it).
        sample_rate: q, in (0, 1].
        expected_batch_size: B, the divisor of the clipped sum.
        step: index of the batch in its stream, from 0.
        stream: public name of the random stream that drew the batch. Two batches with the same (stream, step)
            hold the same draw.
        seed: the research seed that the stream derives from, or None for the operating system's entropy.
        rank, processes: which of how many processes the batch was drawn for; each example belongs to one of them.
    """

    scheme: SamplingScheme
    sample_rate: float
    expected_batch_size: int
    step: int
    stream: str
    seed: int | None = None
    rank: int = 0
    processes: int = 1

    @property
    def draw(self) -> str:
        """Name of this draw: equal for equal (stream, step)."""
        return f"{self.stream}:{self.step}"


@dataclass(frozen=True)
class Batch:
    """The examples of one step, and how they were drawn.

    Attributes:
        examples: tensor, or tuple, list or dict of tensors, each with the same leading dimension `size`; may hold
            zero examples.
        size: number of examples drawn. PRIVATE under Poisson sampling: never a divisor, never reported.
        sampling: the public facts.
    """

    examples: Any
    size: int
    sampling: Sampling


def map_examples(function: Callable[[Tensor], Tensor], examples: Any) -> Any:
    """Apply a function to every tensor of a batch's examples, keeping their structure."""
    return tree_map(cast("Callable[[Any], Any]", function), examples)


def count_examples(examples: Any) -> int:
    """The leading dimension that all tensors of the examples share.

    Raises:
        PrivacyError: no tensor, or leading dimensions that differ.
    """
    leaves: list[Any] = tree_leaves(examples)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            remedy = "turn it into a tensor in the data set or in collate"
            raise expected("Batch", "examples", "to be tensors", type(leaf).__name__, remedy)
    sizes = {leaf.shape[0] for leaf in cast("list[Tensor]", leaves)}
    if len(sizes) != 1:
        remedy = "collate examples into tensors with one entry an example"
        raise expected("Batch", "examples", "to share one leading dimension", sorted(sizes), remedy)
    return sizes.pop()


@dataclass(frozen=True)
class ClippedSum:
    """Sum of clipped per-example gradients. PRIVATE until noise has been added.

    Attributes:
        values: sum by parameter name, float32 or wider.
        sensitivity: adding or removing one example moves the values, taken as one vector, by at most this L2
            norm.
    """

    values: Mapping[str, Tensor]
    sensitivity: float


Provenance = Literal["public data", "common knowledge", "private-derived"]


class Scales(dict[str, Tensor]):
    """Scales A by parameter name, and where they come from.

    Args:
        values: each broadcasts to its parameter.
        provenance: "public data"; "common knowledge" (what anyone may assume, such as word frequencies of a language);
            or "private-derived": made of the private data, so that no epsilon covers them.
        source: what exactly, in a few words.
    Raises:
        PrivacyError: an unknown provenance, or no source.
    """

    def __init__(self, values: Mapping[str, Tensor], *, provenance: Provenance, source: str) -> None:
        if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "give a dict, such as {'0.weight': torch.ones(4, 5)}"
            raise expected("Scales", "values", "to be scales by parameter name", described(values), remedy)
        super().__init__(values)
        if f"{provenance}" not in get_args(Provenance) or not source:
            condition = f"to be one of {', '.join(get_args(Provenance))}, with its source"
            raise expected("Scales", "provenance", condition, f"{provenance!r}, {source!r}", "say where they come from")
        self.provenance, self.source = provenance, source

    def __or__(self, other: Any) -> "Scales":
        """Both together; what is private-derived stays so."""
        if not isinstance(other, Scales):
            remedy = "make it Scales, so that both sources stay known"
            raise expected("Scales", "what is joined to them", "to be Scales", type(other).__name__, remedy)
        order = get_args(Provenance)
        provenance = cast(Provenance, max(self.provenance, other.provenance, key=order.index))
        source = "; ".join(dict.fromkeys((self.source, other.source)))
        return Scales({**self, **other}, provenance=provenance, source=source)


NoiseStd = float | Mapping[str, float | Tensor]


@dataclass(frozen=True)
class NoisyGradient:
    """A released gradient: safe to use in any way.

    Attributes:
        values: averaged noisy gradient by parameter name, each shaped like its parameter.
        noise_std: standard deviation of the noise in `values`, sigma C / B: one number, or by parameter name a
            number or a tensor shaped like the parameter. Gradient units, >= 0.
    """

    values: Mapping[str, Tensor]
    noise_std: NoiseStd

    def noise_std_of(self, name: str) -> float | Tensor:
        """The noise's standard deviation for one parameter."""
        return self.noise_std if isinstance(self.noise_std, float | int) else self.noise_std[name]

    def assign(self, model: nn.Module) -> None:
        """Write the values to the `.grad` of the model's parameters, for any torch optimizer.

        Raises:
            PrivacyError: the model lacks a parameter that this gradient is for.
        Privacy:
            Post-processing. The noise's size does not travel with `.grad`: the optimizers of privgrad take
            `step(grad=...)` instead.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "pass the model that PrivateGradient was given"
            raise expected("NoisyGradient.assign", "model", "to be a torch.nn.Module", described(model), remedy)
        parameters = dict(model.named_parameters())
        unknown = [name for name in self.values if name not in parameters]
        if unknown:
            raise expected(
                "NoisyGradient.assign",
                "model",
                "to have every parameter of the gradient",
                f"none named {', '.join(unknown)}",
                "pass the model that PrivateGradient was given",
            )
        for name, value in self.values.items():
            parameters[name].grad = value.to(parameters[name].dtype)
