"""How many examples the fast engine computes at once.

`factored.Factored` calls `examples` and `displaced_examples`, and `passes.Passes` calls `room`.

The bound on rounding rests on this file (docs/rounding.md): the answers depend on the model, its device, the shapes of
the examples and public numbers only, never on the number of examples that were drawn. If one example could split a pass
in two, or change how a gradient is stored, all others would be rounded differently.
"""

from torch import nn

from privgrad.gradient.module_state import named_parameters
from privgrad.threads import is_on_processor

_TOGETHER = 1 << 24  # floats of output gradients per pass, at least; larger models get more
_FEW = 1 << 22  # floats of output gradients that are never split in two passes, however small the model is
_ON_DEVICE = 1 << 26  # both of these numbers on a device other than the CPU, where a pass costs a fixed time


class MemoryPlan:
    """The number of examples per pass, so that their data stay near the processor's caches or within a limit.

    In all methods, `floats` is the number of floats of output gradients per example.

    Args:
        model: the module.
        memory_mb: MiB for the data that grow with the number of examples: half for output gradients, half for
            gradients that are kept from the norms to the sum. None: a multiple of the model's size.
    """

    def __init__(self, model: nn.Module, memory_mb: float | None) -> None:
        self._model = model
        self._room = None if memory_mb is None else int(memory_mb * 2**20) // 8  # floats, for each half

    def examples(self, usual_size: int, floats: int) -> int:
        """Return the number of examples per pass. A batch of `usual_size`, which is public, has nearly equal parts."""
        together, few, size = self._limits()
        most = max(1, together // max(1, floats))
        if self._room is None and usual_size * floats > max(few, 12 * size):
            # Inputs and output gradients of all layers are in memory together. Two parts keep the peak near that of
            # ordinary training.
            most = min(most, -(-usual_size // 2))
        return -(-usual_size // -(-usual_size // most))

    def displaced_examples(self, size: int, floats: int, written: int, *, exact: bool) -> int:
        """Return the number of examples per pass with displaced parameters, at most `size`.

        Args:
            size: the number of examples per pass at the weights. Public.
            floats: see above.
            written: the number of parameters that are written out for each example.
            exact: whether Hessian products are computed.
        """
        together, few, trained = self._limits()
        if exact and size * floats > max(few, 2 * trained):
            # The graph of the backward pass needs about as much memory as the graph of the forward pass.
            size = -(-size // 2)
        # 2: the weights themselves, and their gradients.
        return max(1, min(size, together // max(1, 2 * written)))

    def room(self, floats: int) -> int:
        """Return how many floats of written-out gradients per example may be kept from the norms to the sum."""
        return floats // 4 if self._room is None else min(floats, self._room)

    def _limits(self) -> tuple[int, int, int]:
        """Return three numbers of floats: to hold for one pass, never to split in two passes, and trainable values."""
        parameters = [parameter for _, parameter in named_parameters(self._model)]
        size = sum(int(parameter.numel()) for parameter in parameters if parameter.requires_grad)
        on_processor = all(map(is_on_processor, parameters[:1]))  # a model is on one device
        together, few = (_TOGETHER, _FEW) if on_processor else (_ON_DEVICE, _ON_DEVICE)
        return max(together, 4 * size) if self._room is None else self._room, few, size
