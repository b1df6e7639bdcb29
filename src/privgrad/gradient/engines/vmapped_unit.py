"""One call of a unit by vmap, with a separate copy of the unit's parameters for each example.

The gradients at the copies are the per-example gradients. `capture` calls the functions and the methods of
`VmappedUnit`. The privacy guarantee rests on the isolation of examples here: no attribute and no argument may carry one
example's values to another example.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from privgrad.errors import PrivacyError
from privgrad.gradient.batching import Mended, batched, unseen_by_checkpoints
from privgrad.gradient.engines.arguments import Watched
from privgrad.gradient.engines.refusals import REMEDY, CallSequenceChangedError, refused
from privgrad.gradient.factors.base import Dense, Factor
from privgrad.gradient.factors.displacement import Displacements
from privgrad.gradient.module_state import preserved, weight_hooks


class VmappedUnit:
    """One call of a unit by vmap.

    Args:
        path: the unit's path, for messages.
        module: the unit.
        forward: the unit's own forward.
        arguments: the arguments of the call, as (args, kwargs).
    Attributes:
        tensors: the tensors among the arguments.
    """

    def __init__(self, path: str, module: nn.Module, forward: Any, arguments: Any) -> None:
        self._path, self._module, self._forward, self._arguments = path, module, forward, arguments
        self._leaves, self._structure = tree_flatten(arguments)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._watched = Watched(self._leaves)
        self._unit = _Unit(module, forward)
        self._frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self._found: Any = None  # the leaves and the structure of the last output

    def plain(self) -> Any:
        """Return the output for all examples together, without per-example gradients."""
        args, kwargs = self._arguments
        output = self._forward(*args, **kwargs)
        require_unchanged(self._path, self._watched)
        return output

    def output(self, copies: Mapping[str, Tensor], inputs: Sequence[tuple[Tensor, int | None]], size: int) -> Any:
        """Return the tensors in the output, computed from each example's own copy of the parameters.

        Args:
            copies: the trained parameters by name, each of shape (B, *P).
            inputs: the tensors among the arguments, with the dimension of their examples; None: all examples share it.
            size: B.
        Returns:
            The tensors, each with the examples in dimension 0.
        Raises:
            CallSequenceChangedError: the outputs of the examples differ in their number of tensors.
            UnsupportedModuleError: the unit cannot run on single examples, or changes its arguments.
        """
        # Dropout draws in the order of memory, and BAM's second pass needs equal draws.
        tensors, dims = [x.contiguous() for x, _ in inputs], [dim for _, dim in inputs]
        versions = [x._version for x in tensors]
        try:
            with self._isolated(), unseen_by_checkpoints():
                produced = batched(self._single, (0, *dims), module=self._module)(copies, *tensors)
        except Exception:  # an operation without a rule in vmap
            require_unchanged(self._path, self._watched)
            if writes := sum(x._version - version for x, version in zip(tensors, versions, strict=True)):
                condition, remedy = "not to be changed in place", f"work on a copy, or {REMEDY}"
                raise refused(f"the input of '{self._path}'", condition, f"{writes} in-place writes", remedy) from None
            produced = self._one_by_one(copies, tensors, dims, size)
        require_unchanged(self._path, self._watched)
        return produced

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return the last output, with these tensors in place of its own."""
        remaining, (leaves, structure) = iter(tensors), self._found
        return tree_unflatten([next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)

    def _single(self, parameters: Mapping[str, Tensor], *inputs: Tensor) -> list[Tensor]:
        """Return the tensors in one example's output, and note its structure."""
        remaining = iter(inputs)
        filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(filled, self._structure)
        state = {f"module.{name}": p for name, p in (*parameters.items(), *self._frozen.items())}
        self._found = tree_flatten(functional_call(self._unit, state, args, kwargs))
        return [leaf for leaf in self._found[0] if isinstance(leaf, Tensor)]

    def _one_by_one(
        self, copies: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Sequence[int | None], size: int
    ) -> list[Tensor]:
        """Return the tensors in the outputs of all examples, each computed by itself."""
        rows: list[list[Tensor]] = []
        for i in range(size):
            own = [x if dim is None else x[i].clone() for x, dim in zip(inputs, dims, strict=True)]
            try:
                with Mended(several=False), self._isolated():  # sparse gradients of single examples cannot be stacked
                    rows.append(self._single({name: p[i].clone() for name, p in copies.items()}, *own))
            except PrivacyError:
                raise
            except Exception as error:
                got = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                raise refused(f"'{self._path}'", "to run on one example", got, REMEDY, unit=self._path) from error
            require_unchanged(self._path, self._watched)
        if len({len(row) for row in rows}) != 1:
            raise CallSequenceChangedError(self._path) from None
        return [torch.stack(row) for row in zip(*rows, strict=True)]

    def _isolated(self) -> AbstractContextManager[None]:
        """Undo changes of attributes: they hold one example's values, which must not reach others in the loop."""
        return preserved(self._module, self._path, but=("_parameters", "_buffers"))


class _Unit(nn.Module):
    """A module with a given forward, so that functional_call can replace its parameters around that forward.

    torch's old weight_norm and spectral_norm compute a weight in a hook before the forward. Here the hook computes the
    weight again, from the replaced parameters.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self._forward = forward
        self._computed = weight_hooks(vars(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = {name: getattr(self.module, name) for name in self._computed}
        try:
            for hook in self._computed.values():
                hook(self.module, args)
            return self._forward(*args, **kwargs)
        finally:
            for name, weight in before.items():
                setattr(self.module, name, weight)


def copies_of(parameters: Mapping[str, Tensor], size: int, displacements: Displacements | None) -> dict[str, Tensor]:
    """Return each example's own copy of parameters, displaced if they move; each of shape (B, *P), with gradients."""
    own = {name: p.detach() for name, p in parameters.items()}
    moved = {} if displacements is None else displacements.of(parameters)
    points = {n: moved[n].added_to(p) if n in moved else p.expand(size, *p.shape) for n, p in own.items()}
    return {name: point.requires_grad_() for name, point in points.items()}


def displacement_of(parameter: Tensor, displacements: Displacements) -> Tensor | None:
    """Return each example's displacement of a parameter, shape (B, *P); None if it does not move."""
    displacement = displacements.of({"": parameter}).get("")
    return None if displacement is None else displacement.dense()


def written_out(parameter: Tensor, grads_BP: Tensor) -> dict[Tensor, Factor]:
    """Return the factor of a parameter whose gradients are written out."""
    return {parameter: Dense(grads_BP)}


def require_unchanged(path: str, watched: Watched) -> None:
    """Raise UnsupportedModuleError if a unit changed an argument: examples could then read each other's values."""
    kind = watched.changed()
    if kind is not None:
        remedy = f"call it without (model.config.use_cache = False for a cache of transformers), or {REMEDY}"
        condition, got = "to stay unchanged during its forward", f"a changed {kind}"
        raise refused(f"the arguments of '{path}'", condition, got, remedy, unit=path)
