"""Per-example gradients: one row an example, from the user's model and loss as they are.

Shape suffixes: B examples of the chunk, P the shape of one parameter.
"""

import operator
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.weight_norm import WeightNorm

from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.gradient.batching import batched
from privgrad.gradient.factors import Dense, Factor
from privgrad.gradient.products import nodes
from privgrad.types import count_examples, map_examples

LossFunction = Callable[[nn.Module, Any], Tensor]

_CONTAINERS = (dict, list, set, deque)
_ABSENT = object()


class BoundLoss(nn.Module):
    """loss_fn with its model as one module, so that parameters can be swapped wherever loss_fn uses them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, examples: Any) -> Tensor:
        return self.loss_fn(self.model, examples)


def require_losses(losses: object, size: int) -> Tensor:
    """Return losses if they are a tensor of shape (size,); raise PrivacyError otherwise."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        remedy = "return one loss per example, for instance with reduction='none', averaged over all but dimension 0"
        raise expected("loss_fn", "losses", f"of shape ({size},)", got, remedy)
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a tied parameter once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """torch's global random streams seeded; afterwards they are as they were."""
    with torch.random.fork_rng():
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            # torch.manual_seed queues calls for devices that will never come: a little more memory at every step.
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def differentiable(*, twice: bool) -> Generator[None]:
    """Attention by kernels that can be differentiated twice, if that is wanted: the fused ones cannot."""
    if not twice:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
    """Parameters with other values; what they held is put back, untouched, whatever happens."""
    before = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        yield
    finally:
        for parameter, held in before.items():
            parameter.data = held


@contextmanager
def preserved(model: nn.Module, path: str = "", *, but: Iterable[str] = ()) -> Generator[None]:
    """Undo what a forward pass leaves on the modules: attributes set anew, tensors written, containers refilled.

    Warns of it.

    Args:
        model: the module, with all below it.
        path: its own, to name it by.
        but: names of attributes that are not looked into.

    Privacy:
        What private examples leave behind is private, and would let one example touch another's gradient, or end in
        a checkpoint. Undone, each meets the model as it was. State elsewhere (globals, closures, objects of classes of
        your own) is out of reach.
    """
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules(prefix=path))
    before = [(path, vars(module), dict(vars(module)), _contents(vars(module), but)) for path, module in modules]
    copies: dict[int, Tensor] = {}
    for _, now, attributes, _ in before:
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                now[name] = copies[id(value)] = value.clone()
    try:
        yield
    finally:
        changed: list[str] = []
        for path, now, attributes, contents in before:
            names = list(now.keys() - attributes.keys())
            names += [name for name, value in attributes.items() if now.get(name, _ABSENT) is not value]
            for name, container, held in contents:
                if not _identical(_held(container), held):
                    _refill(container, held)
                    names.append(name)
            for name in dict.fromkeys(names):
                copy = copies.get(id(attributes.get(name)))
                untouched = copy is not None and now.get(name) is copy and copy._version == 0
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]
                # Underscores: torch's own bookkeeping, such as a GRU's list of its weights.
                if not untouched and not name.startswith("_") and name not in weight_norms(now):
                    changed.append(f"{path}.{name}" if path else name)
        if changed:
            warnings.warn(
                f"the forward pass changed {', '.join(sorted(changed)[:5])} of the model; what private examples leave "
                "there is private, so it was undone",
                stacklevel=3,
            )


def weight_norms(attributes: Mapping[str, Any]) -> dict[str, WeightNorm]:
    """Return the hooks of the old torch.nn.utils.weight_norm, by the weight that they compute before each forward.

    Args:
        attributes: of a module.
    """
    hooks = [hook for hook in attributes.get("_forward_pre_hooks", {}).values() if isinstance(hook, WeightNorm)]
    return {hook.name: hook for hook in hooks}


def _contents(attributes: dict[str, Any], but: Iterable[str]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(attribute, container, what it holds) for every list, dict, set or deque among the attributes and inside them."""
    found: list[tuple[str, Any, tuple[Any, ...]]] = []
    seen = set[int]()
    looked = [(name, value) for name, value in attributes.items() if name not in but]
    waiting: list[tuple[str, Any]] = [(name, value) for name, value in looked if isinstance(value, _CONTAINERS)]
    while waiting:
        name, container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        found.append((name, container, held := _held(container)))
        if not held:
            continue
        inner = cast("Iterable[Any]", container.values() if hasattr(container, "values") else container)
        waiting += [(name, value) for value in inner if isinstance(value, _CONTAINERS)]
    return found


def _held(container: Any) -> tuple[Any, ...]:
    if not len(container):
        return ()
    return tuple(cast("Iterable[Any]", container.items() if hasattr(container, "items") else container))


def _refill(container: Any, held: tuple[Any, ...]) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(held)
    else:
        container.update(held)


def _identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two containers hold the very same things: items of dicts are pairs, compared by part."""
    if not one and not other:  # as most are
        return True
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(one, other, strict=True)
    )


class Vmap:
    """The reference engine: any module, one gradient an example in memory. See `per_sample_gradients`.

    Args:
        model, loss_fn: as in `per_sample_gradients`.
        memory_mb: MiB for gradients; at least one example is taken. None: room for all.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, memory_mb: float | None = None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._memory_mb = memory_mb

    def microbatch_size(self, examples: Any) -> int:
        """How many examples to take at once."""
        if self._memory_mb is None:
            return count_examples(examples)
        an_example = sum(p.numel() * p.element_size() for p in trainable(self._model).values())
        return max(1, int(self._memory_mb * 2**20) // max(1, an_example))

    def check_again(self) -> None:
        """Nothing is to be checked: each example is computed by itself."""

    def moved_size(self, size: int, *, exact: bool) -> int:
        """As many: all is written out in any case."""
        del exact
        return size

    def __call__(self, examples: Any) -> dict[str, Factor]:
        rows = per_sample_gradients(self._model, self._loss_fn, examples)
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}

    def moved(self, examples: Any, radius: float, *, exact: bool) -> dict[str, Factor]:
        """Gradient of each example's own loss at its own point: as Hooks.moved."""
        with torch.random.fork_rng():  # the same random draws in both passes
            first = self(examples)
        share_B, moving_B = shares([factor.norms() for factor in first.values()], radius)
        along = {name: factor.keep(moving_B).dense() for name, factor in first.items()}
        along = {name: rows * share_B.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1)) for name, rows in along.items()}
        rows = per_sample_gradients(self._model, self._loss_fn, examples, along=along, exact=exact)
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}

    def at(self, examples: Any, moved: Mapping[str, Factor], share: float) -> dict[str, Factor]:
        """Gradient of each example's own loss at its own point: as Hooks.at."""
        along = {name: share * factor.dense() for name, factor in moved.items()}
        rows = per_sample_gradients(self._model, self._loss_fn, examples, along=along)
        return {name: Dense(grads_BP) for name, grads_BP in rows.items()}


def shares(norms: Sequence[Tensor], radius: float) -> tuple[Tensor, Tensor]:
    """(radius / |g_i|, whether that is a number), both shape (B,), from norms by parameter; 0 where it is not."""
    norm_B = cast(Tensor, torch.linalg.vector_norm(torch.stack(list(norms)), dim=0))
    moving_B = torch.isfinite(norm_B) & (norm_B > 0)
    return torch.where(moving_B, radius / norm_B, 0.0), moving_B


def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    *,
    along: Mapping[str, Tensor] | None = None,
    exact: bool = False,
) -> dict[str, Tensor]:
    """Gradient of each example's own loss: the reference engine.

    Computes: for every i, the gradient of loss_fn(model, example i alone, as a batch of one); by vmap over
    examples, or one by one where the model has an operation that vmap cannot batch.

    Args:
        model: any module. Its parameters and buffers are read, never written; see `preserved` for the rest.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: tensor or tuple, list or dict of tensors with leading dimension B >= 1.
        along: by parameter name, shape (B, *parameter.shape): moves each example's parameters, to take its gradient
            there.
        exact: do not move, but add each Hessian's product with `along`.
    Returns:
        grads_BP by parameter name: tensors of shape (B, *parameter.shape), without a graph.
    Raises:
        PrivacyError: loss_fn does not return one loss per example.
        UnsupportedModuleError: the forward pass writes to a buffer, or torch.func cannot differentiate it.
    Privacy:
        NOT private. Row i depends on example i and the model alone: each example is isolated, dropout included,
        unless model or loss_fn keep state outside the modules.
    """
    parameters = {name: parameter.detach() for name, parameter in trainable(model).items()}
    rest = {name: tensor.detach() for name, tensor in model.named_parameters() if name not in parameters}
    rest |= {name: tensor.detach() for name, tensor in model.named_buffers()}
    bound, moves = BoundLoss(model, loss_fn), dict(along or {})
    with differentiable(twice=exact):
        try:
            with preserved(model):
                of_one = _gradient_of_one(bound, rest, exact)
                return batched(of_one, (None, 0, 0), module=model)(parameters, moves, examples)
        except PrivacyError:
            raise
        except Exception:
            pass  # an operation that vmap has no rule for; what it says may hold the batch's size, which is private
        rows = [
            _alone(
                bound,
                parameters,
                rest,
                {name: move[index] for name, move in moves.items()},
                map_examples(itemgetter(slice(index, index + 1)), examples),
                exact=exact,
            )
            for index in range(count_examples(examples))
        ]
    warnings.warn(
        "vmap cannot batch this model; its examples are taken one by one, which is slow",
        stacklevel=2,
    )
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def _gradient_of_one(
    bound: BoundLoss, rest: dict[str, Tensor], exact: bool
) -> Callable[[dict[str, Tensor], dict[str, Tensor], Any], dict[str, Tensor]]:
    """(parameters, along, example) -> gradient; `rest` is captured, so that torch.func refuses writes to it."""

    def loss_of_one(parameters: dict[str, Tensor], example: Any) -> Tensor:
        state = {f"model.{name}": tensor for name, tensor in (rest | parameters).items()}
        single = map_examples(lambda leaf: leaf.unsqueeze(0), example)
        return require_losses(functional_call(bound, state, (single,)), 1)[0]

    gradient = cast("Callable[[dict[str, Tensor], Any], dict[str, Tensor]]", grad(loss_of_one))

    def product(parameters: dict[str, Tensor], along: dict[str, Tensor], example: Any) -> tuple[Tensor, Any]:
        grads = gradient(parameters, example)
        return torch.stack([(grads[name] * move).sum() for name, move in along.items()]).sum(), grads

    def moved(parameters: dict[str, Tensor], along: dict[str, Tensor], example: Any) -> dict[str, Tensor]:
        if not along:
            return gradient(parameters, example)
        if not exact:
            return gradient({name: p + along[name].to(p.dtype) for name, p in parameters.items()}, example)
        curved, grads = grad(product, has_aux=True)(parameters, along, example)
        return {name: value + curved[name] for name, value in grads.items()}

    return moved


class _Differentiated(nn.Module):
    """A loss that returns its gradient when it is called.

    The backward pass runs while other parameters are swapped in: checkpointed parts compute again from what the modules
    hold then.
    """

    def __init__(self, bound: BoundLoss) -> None:
        super().__init__()
        self.bound = bound

    def forward(
        self, example: Any, leaves: list[Tensor], along: list[Tensor | None], exact: bool
    ) -> tuple[Tensor, ...]:
        loss = require_losses(self.bound(example), 1).sum()
        if not loss.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        refuse_reentrant(loss)
        bent = exact and any(move is not None for move in along)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, create_graph=bent)
        if not bent:
            return grads
        parts = [(grad * move).sum() for grad, move in zip(grads, along, strict=True) if move is not None]
        phi = torch.stack(parts).sum()
        if not phi.requires_grad:
            return grads
        more = torch.autograd.grad(phi, leaves, allow_unused=True, materialize_grads=True)
        return tuple(grad + add for grad, add in zip(grads, more, strict=True))


def _alone(
    bound: BoundLoss,
    parameters: dict[str, Tensor],
    rest: dict[str, Tensor],
    along: dict[str, Tensor],
    example: Any,
    *,
    exact: bool,
) -> dict[str, Tensor]:
    """Compute one example's gradient by ordinary autograd, from copies of parameters and buffers.

    torch.func cannot differentiate all that autograd can: checkpointed parts, say, or an autograd.Function without
    setup_context.

    Args:
        bound: the model and its loss.
        parameters, rest: by name, what is trained and what is not.
        along: as in `per_sample_gradients`, of this example.
        example: a batch of one.
        exact: as in `per_sample_gradients`.
    Raises:
        UnsupportedModuleError: the forward pass writes to a copy, or cannot be differentiated.
    Privacy:
        NOT private. What the forward pass writes goes with the copies, and never meets another example.
    """
    leaves: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moves = name in along and not exact
        point = parameter + along[name].to(parameter.dtype) if moves else parameter.clone()
        leaves[name] = point.requires_grad_()
    copies = leaves | {name: tensor.clone() for name, tensor in rest.items()}
    versions = {name: copy._version for name, copy in copies.items()}
    state = {f"bound.model.{name}": copy for name, copy in copies.items()}
    moves = [along.get(name) for name in leaves]
    try:
        with torch.enable_grad(), preserved(bound.model), torch.compiler.set_stance("force_eager"):
            inputs = (example, list(leaves.values()), moves, exact)
            grads = cast("tuple[Tensor, ...]", functional_call(_Differentiated(bound), state, inputs))
    except NotImplementedError as error:
        remedy = "use BAM(mode='sam'), or other layers" if exact else "replace the operation"
        raise expected(
            "PrivateGradient", "the loss", "to have derivatives", _first_line(error), remedy, UnsupportedModuleError
        ) from error
    except RuntimeError as error:
        remedy = (
            "compute with operations that autograd can differentiate, and write to no parameter; "
            "loss_fn(model, examples) must also take a batch of one"
        )
        raise expected(
            "PrivateGradient", "each example", "to have a gradient", _first_line(error), remedy, UnsupportedModuleError
        ) from error
    written = [name for name, copy in copies.items() if copy._version != versions[name]]
    if written:
        remedy = (
            "do not write to parameters and buffers in training, for what is written there is private; or call .eval() "
            "on the module that does"
        )
        condition, got = "not to be written by the forward pass", ", ".join(written)
        raise expected("PrivateGradient", "parameters and buffers", condition, got, remedy, UnsupportedModuleError)
    return {name: value.detach().to_dense() for name, value in zip(leaves, grads, strict=True)}


def refuse_reentrant(loss: Tensor) -> None:
    """Raise UnsupportedModuleError if a loss is computed by re-entrant gradient checkpointing.

    Its backward pass writes to `.grad`, past what is asked for.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes([loss])):
        remedy = (
            "pass use_reentrant=False to torch.utils.checkpoint (for transformers "
            "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})), or turn gradient "
            "checkpointing off"
        )
        raise expected(
            "PrivateGradient",
            "gradient checkpointing",
            "not to be re-entrant",
            "use_reentrant=True",
            remedy,
            UnsupportedModuleError,
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
