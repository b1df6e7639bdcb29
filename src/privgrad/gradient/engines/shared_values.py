"""The values that a model computes once for all examples: its parameters, and what follows from them alone.

Examples are a parameter that is expanded, a table of relative positions, or a weight computed from other parameters.
Where such a value meets the examples, each example gets its own copy, and the gradients at the copies are the
per-example gradients. `capture` adds the values and asks for the copies.

The privacy guarantee of the fast engine rests on this file: copy i must depend on example i, the model and public
numbers only. A value itself keeps the graph of its parameters. A use that `capture` does not see therefore leads from
the losses to a parameter, and `passes` refuses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privgrad.errors import UnsupportedModuleError
from privgrad.gradient.batching import unseen_by_checkpoints
from privgrad.gradient.engines.refusals import REMEDY, refused
from privgrad.gradient.layers.base import version_of


@dataclass
class _Value:
    """A shared value. `compute` returns its copies; None for a parameter, and while layouts are being learned."""

    tensor: Tensor
    version: int
    trained: bool
    unit: str
    compute: Callable[[], Tensor] | None
    inputs: Sequence[tuple[Tensor, int]] = ()  # what it was computed from, with the versions
    copies: Tensor | None = None
    sources: frozenset[int] = frozenset()  # the ids of the parameters among these


class SharedValues:
    """The shared values of one forward pass.

    Args:
        parameters: pairs of a path and a trainable parameter; the path is that of the module that owns it.
        copies_of: parameter and path -> its copies, shape (B, *P).
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], copies_of: Callable[[str, Tensor], Tensor]) -> None:
        self._copies_of = copies_of
        self._values = {
            id(p): _Value(p, p._version, True, unit, None, sources=frozenset([id(p)])) for unit, p in parameters
        }
        self._parameters = set(self._values)

    def __contains__(self, tensor: object) -> bool:
        value = self._values.get(id(tensor))  # the values are kept, so no other object has this id
        # The forward of an autograd.Function is seen, but not its backward: its result has a graph only afterwards.
        return value is not None and value.tensor.requires_grad == value.trained

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a trainable parameter."""
        return id(tensor) in self._parameters

    def unit(self, tensor: Tensor) -> str:
        """Return the path of the module to blame for a value: the owner of its first parameter."""
        return self._values[id(tensor)].unit

    def sources(self, tensor: Tensor) -> frozenset[int]:
        """Return the ids of the parameters that a value was computed from; none if it is no shared value."""
        return self._values[id(tensor)].sources if tensor in self else frozenset()

    def add(
        self, tensor: Tensor, unit: str, compute: Callable[[], Tensor] | None, inputs: Sequence[Tensor] = ()
    ) -> None:
        """Add a value that was computed from shared values and from constants alone; a known value stays as it is.

        Args:
            tensor: the value, with the graph of its parameters.
            unit: see `unit`.
            compute: returns its copies, shape (B, *value). It runs at the first use, if there is one, in the modes of
                the present moment.
            inputs: the tensors that it reads.
        """
        if tensor not in self:
            within = _present_modes(tensor.device.type)
            delayed = None if compute is None else lambda: _within(within, compute)
            versions = [(x, version_of(x)) for x in inputs]
            sources = frozenset[int]().union(*map(self.sources, inputs))
            value = _Value(tensor, tensor._version, tensor.requires_grad, unit, delayed, versions, sources=sources)
            self._values[id(tensor)] = value

    def rewrite(
        self, tensor: Tensor, version: int, compute: Callable[[Tensor], Tensor], inputs: Sequence[Tensor] = ()
    ) -> None:
        """Follow an operation that has changed a value in place.

        Args:
            tensor: the value, not a parameter.
            version: its version before the operation.
            compute: the copies before -> the copies after, which are other tensors.
            inputs: the other tensors that the operation reads.
        """
        before = self._values[id(tensor)]
        if before.version == version:  # else another operation changed it, through a view
            del self._values[id(tensor)]
            self.add(tensor, before.unit, lambda: compute(self._computed(before)), inputs)
            self._values[id(tensor)].sources |= before.sources

    def copies(self, tensor: Tensor) -> Tensor:
        """Return one copy of a value for each example, shape (B, *value).

        Raises:
            UnsupportedModuleError: the value, or what its copies are computed from, was written to.
        """
        value = self._values[id(tensor)]
        if value.version != tensor._version:
            raise _written_to(value.unit)
        return self._computed(value)

    def _computed(self, value: _Value) -> Tensor:
        """Return the copies of a value as it was when it was added."""
        if value.copies is None:
            if any(version_of(x) != version for x, version in value.inputs):
                raise _written_to(value.unit)
            compute = value.compute
            value.copies = self._copies_of(value.unit, value.tensor) if compute is None else compute()
        return value.copies


def _written_to(unit: str) -> UnsupportedModuleError:
    """Return the error for a value that was written to through a view, or after it was read."""
    name, got, remedy = f"what '{unit}' computes once", "an in-place write", f"work on a copy, or {REMEDY}"
    return refused(name, "not to be changed in place", got, remedy, unit=unit)


@dataclass(frozen=True)
class _Modes:
    """The modes that decide how an operation is computed."""

    device: str
    grad: bool
    autocast: bool
    dtype: torch.dtype


def _present_modes(device: str) -> _Modes:
    return _Modes(device, torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def _within(modes: _Modes, compute: Callable[[], Tensor]) -> Tensor:
    """Return compute(), in these modes."""
    autocast = torch.autocast(modes.device, modes.dtype, enabled=modes.autocast)
    with unseen_by_checkpoints(), torch.set_grad_enabled(modes.grad), autocast:
        return compute()
