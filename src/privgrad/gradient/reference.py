"""The reference engine: it computes each example by itself, with the user's model and loss unchanged.

It stores one whole gradient per example. The number of examples that are computed at once may not depend on the drawn
batch.

Shape suffixes: B examples of the chunk, P the shape of one parameter.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from privgrad.errors import PrivacyError
from privgrad.gradient.autograd_graph import refuse_reentrant
from privgrad.gradient.contribution import Use
from privgrad.gradient.factor import Dense, Factor
from privgrad.gradient.functional import (
    BoundLoss,
    Model,
    batched,
    differentiable,
    gradients,
    preserved,
    require_losses,
    streams_kept,
    structure_of,
)
from privgrad.gradient.novelty import CheckSchedule
from privgrad.gradient.probes import few_of
from privgrad.gradient.refusals import buffers_written, first_line, refused
from privgrad.rng import numpy_and_python_states
from privgrad.types import LossFunction, count_examples, map_examples, part_of

Check = Callable[[nn.Module, LossFunction, Any], None]
Named = dict[str, Tensor]  # by parameter name
_SLOW = weakref.WeakSet[nn.Module]()  # models that were warned of


class Vmap:
    """The reference engine: any module, with one gradient per example in memory. See `per_sample_gradients`."""

    batches_examples = False  # each example is computed by itself, with random numbers of its own

    def __init__(
        self, model: Model, loss_fn: LossFunction, *, memory_mb: float | None = None, check: Check | None = None
    ) -> None:
        self._structure = structure_of(model)
        self._loss_fn = loss_fn
        self._memory_mb = memory_mb  # a bound on the gradients
        self._compare = check  # compares a few examples with the same examples alone
        self._schedule = CheckSchedule()

    def microbatch_size(self, examples: Any, usual_size: int) -> int:
        if self._memory_mb is None:
            return usual_size
        an_example = sum(p.numel() * p.element_size() for p in self._structure.follow().trained.values())
        return max(1, int(self._memory_mb * 2**20) // max(1, an_example))

    def uses(self) -> dict[str, Use]:
        return {name: Use("whole", "", "engine='vmap'", "use engine='factored'") for name in self._structure.trained}

    def begin_step(self) -> None:
        if self._compare is not None:
            self._schedule.begin_step()

    def check_again(self, randomness: Any = None) -> None:
        """Compare the next examples with their gradients alone, after a change of the model."""
        self._schedule.is_due = True

    def moved_size(self, examples: Any, size: int, *, exact: bool) -> int:
        """Return `size`: this engine writes out all gradients in any case."""
        return size

    def __call__(self, examples: Any) -> dict[str, Factor]:
        return self._checked(examples, {})

    def moved(self, examples: Any, radius: float, *, exact: bool) -> dict[str, Factor]:
        with streams_kept():  # so that both passes have the same random draws
            first = self(examples)
        share_B, moving_B = shares([factor.norms() for factor in first.values()], radius)
        along = {name: factor.mask(moving_B).dense() for name, factor in first.items()}
        along = {name: rows * share_B.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1)) for name, rows in along.items()}
        rows = per_sample_gradients(self._structure.follow(), self._loss_fn, examples, along=along, exact=exact)
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> dict[str, Factor]:
        return self._checked(examples, {name: share * factor.dense() for name, factor in moved.items()})

    def _checked(self, examples: Any, along: Named) -> dict[str, Factor]:
        """Return the factors; where due, compare a few examples with the same examples alone."""
        rows = per_sample_gradients(self._structure.follow(), self._loss_fn, examples, along=along)
        if self._compare is not None:
            schedule = self._schedule
            schedule.begin(examples)
            if schedule.is_due:
                few = few_of(examples, salt=schedule.calls, fill=False, novel=schedule.novel)
                self._compare(self._structure.model, self._loss_fn, few)
                schedule.is_due = False
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}


def shares(norms: Sequence[Tensor], radius: float) -> tuple[Tensor, Tensor]:
    """Return (radius / |g_i|, whether |g_i| is finite and > 0; else 0), both (B,), from the norms by parameter."""
    norm_B = cast(Tensor, torch.linalg.vector_norm(torch.stack(list(norms)), dim=0))
    moving_B = torch.isfinite(norm_B) & (norm_B > 0)
    return torch.where(moving_B, radius / norm_B, 0.0), moving_B


def per_sample_gradients(
    model: Model, loss_fn: LossFunction, examples: Any, *, along: Named | None = None, exact: bool = False
) -> Named:
    """Compute the gradient of each example's own loss by parameter name, shape (B, *parameter.shape), without a graph.

    Computes: for every i, the gradient of loss_fn(model, example i alone, as a batch of one). It uses vmap over
    examples; if the model has an operation that vmap cannot batch, or draws from numpy's or Python's random numbers, it
    computes one example after the other. Parameters and buffers are read, never written; see `preserved` for other
    state.

    Row i of `along`, of the same shapes, displaces the parameters of example i. With `exact` they stay, and the product
    of its Hessian with that row is added instead.

    Privacy:
        NOT private. Row i depends on example i and the model only, because each example is computed by itself, with its
        own dropout. For state that the model or loss_fn keeps outside the modules, see `checks.state`.
    """
    structure = structure_of(model)
    model, parameters = structure.model, {name: parameter.detach() for name, parameter in structure.trained.items()}
    buffers = {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
    bound, moves = BoundLoss(model, loss_fn), along or {}
    with differentiable(twice=exact):
        try:
            before = numpy_and_python_states()
            with preserved(structure):
                of_one = _gradient_of_one(bound, buffers, exact)
                rows = batched(of_one, (None, 0, 0), module=model)(parameters, moves, examples)
            # vmap refuses to write what differs by example, but not a count of the passes, which depends on the batch.
            _require_unwritten([name for name, copy in buffers.items() if copy._version])
            if numpy_and_python_states() == before:
                return {name: row.detach() for name, row in rows.items()}  # a leaf outside of the model has a graph
            del rows  # all rows share the numbers of numpy and Python, and which rows are at once depends on the batch
        except PrivacyError:
            raise
        except Exception:
            pass  # vmap has no rule for an operation; the message may contain the batch size, which is private
        rows = list[Named]()
        for index in range(count_examples(examples)):
            one = part_of(examples, slice(index, index + 1))
            own = {name: move[index] for name, move in moves.items()}
            rows.append(_alone(model, loss_fn, one, own, exact=exact))
    if model not in _SLOW:
        _SLOW.add(model)
        warnings.warn("vmap cannot batch this model; its gradients are computed one by one, slowly", stacklevel=2)
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def _gradient_of_one(bound: BoundLoss, rest: Named, exact: bool) -> Callable[[Named, Named, Any], Named]:
    """Return a function (parameters, along, example) -> gradient, for vmap, which refuses writes to `rest`."""

    def loss_of_one(parameters: Named, example: Any) -> Tensor:
        state = {f"model.{name}": tensor for name, tensor in (rest | parameters).items()}
        single = map_examples(lambda leaf: leaf.unsqueeze(0), example)
        return require_losses(functional_call(bound, state, (single,)), 1)[0]

    gradient = cast("Callable[[Named, Any], Named]", grad(loss_of_one))

    def product(parameters: Named, along: Named, example: Any) -> tuple[Tensor, Any]:
        grads = gradient(parameters, example)
        return torch.stack([(grads[name] * move).sum() for name, move in along.items()]).sum(), grads

    def moved(parameters: Named, along: Named, example: Any) -> Named:
        if not along:
            return gradient(parameters, example)
        if not exact:
            return gradient({name: p + along[name].to(p.dtype) for name, p in parameters.items()}, example)
        curved, grads = grad(product, has_aux=True)(parameters, along, example)
        return {name: value + curved[name] for name, value in grads.items()}

    return moved


def _alone(model: nn.Module, loss_fn: LossFunction, example: Any, along: Named, *, exact: bool) -> Named:
    """Compute one example's gradient by ordinary autograd, from copies of parameters and buffers."""
    # autograd can differentiate more than torch.func can: for instance checkpointed parts, or an autograd.Function
    # without setup_context. A pass that writes to parameters or buffers writes to the copies, and is refused.
    held = list[tuple[str, Tensor, int]]()

    def watched(model: nn.Module, example: Any) -> Tensor:
        named = (*model.named_parameters(), *model.named_buffers())  # the copies
        held.extend((name, copy, copy._version) for name, copy in named)
        losses = require_losses(loss_fn(model, example), 1)
        refuse_reentrant(losses)
        return losses

    try:
        found = gradients(model, watched, example, along=along, exact=exact, seed=None)
    except NotImplementedError as error:
        remedy = "use BAM(mode='sam'), or other layers" if exact else "replace the operation"
        raise refused("the loss", "to have derivatives", first_line(error), remedy) from error
    except RuntimeError as error:
        remedy = "compute by operations that autograd can differentiate, write to no parameter, and take a batch of one"
        raise refused("each example", "to have a gradient", first_line(error), remedy) from error
    _require_unwritten([name for name, copy, version in held if copy._version != version])
    return found


def _require_unwritten(written: Sequence[str]) -> None:
    """Raise UnsupportedModuleError if there are names of tensors that a forward pass wrote to."""
    if written:
        raise buffers_written("parameters and buffers", written)
