"""What stands between a model and private training: found before anything is charged."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy

from privgrad.errors import UnsupportedModuleError, expected
from privgrad.gradient.engines import (
    BoundLoss,
    LossFunction,
    differentiable,
    preserved,
    replaced,
    require_losses,
    seeded,
    trainable,
)
from privgrad.types import count_examples, map_examples

_PROBED = 4  # examples that the loss is tried on
_FROZEN = "has no trainable parameter"
_DRAWS = 4  # and random draws: what mixes examples now and then shows in some of them


@dataclass(frozen=True)
class Problem:
    """One thing that blocks private training.

    Attributes:
        path: module path, "" for the model itself.
        module: class name.
        what: the problem.
        remedy: what to do.
    """

    path: str
    module: str
    what: str
    remedy: str


def find_problems(model: nn.Module) -> list[Problem]:
    """Everything in the model that blocks private training, by module path. Empty if nothing does.

    Privacy:
        Reads the structure only, no data. What only shows on data, `check_loss` finds on the first batch.
    """
    problems: list[Problem] = []
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        kind = type(module).__name__
        # torch types running_mean as a Tensor; without tracked statistics it is None.
        has_statistics = getattr(module, "running_mean", None) is not None
        if isinstance(module, _InstanceNorm):
            if module.training and has_statistics:
                what = "keeps running statistics of private examples, which nothing clips or noises"
                problems.append(Problem(path, kind, what, "set track_running_stats=False, or call .eval() on it"))
        elif isinstance(module, _BatchNorm) and (module.training or not has_statistics):
            what = "mixes the examples of a batch, so one example's gradient depends on the others"
            remedy = "replace it by GroupNorm or LayerNorm, or call .eval() on it if its statistics are public"
            problems.append(Problem(path, kind, what, remedy))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            what = "shortens the rows that it looks up in place, which shows whose they are"
            problems.append(Problem(path, kind, what, "set max_norm=None, and shorten rows on the way out if need be"))
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            what = "has parameters without a shape yet"
            problems.append(Problem(path, kind, what, "run one public example through the model first"))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not parameter.is_floating_point():
                what = f"has {name} of type {parameter.dtype}, for which no noise is defined"
                problems.append(Problem(path, kind, what, "use real parameters: view_as_real for complex ones"))
    if not trainable(model):
        problems.append(Problem("", type(model).__name__, _FROZEN, "set requires_grad_(True) on what to train"))
    return problems


def require_supported(model: nn.Module) -> None:
    """Raise UnsupportedModuleError that names the first problem, and counts the others."""
    problems = find_problems(model)
    if problems:
        first = problems[0]
        if first.what == _FROZEN:
            count = sum(1 for _ in model.parameters())
            remedy = f"{first.remedy}, such as model.requires_grad_(True)"
            got = f"none of {count} that requires gradients" if count else f"a {first.module} without parameters"
            condition = "to have trainable parameters"
            raise expected("PrivateGradient", "model", condition, got, remedy, UnsupportedModuleError)
        more = f" (and {len(problems) - 1} more; `privgrad doctor` lists all)" if len(problems) > 1 else ""
        raise UnsupportedModuleError(
            f"PrivateGradient: expected a model that keeps examples apart, got {first.module} at "
            f"'{first.path}', which {first.what}{more}; {first.remedy}."
        )


def check_loss(model: nn.Module, loss_fn: LossFunction, examples: Any) -> None:
    """Try the loss on a few examples: shape, gradient, every parameter reached, examples kept apart.

    Args:
        model: the model, in the mode it trains in.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: with leading dimension >= 1.
    Raises:
        PrivacyError: what is wrong, and what to do.
    Privacy:
        Releases nothing but success or an error, as any exception raised on private data does. The loss is tried on
        copies of parameters and buffers, and what it leaves on the modules is undone.
    """
    size = min(count_examples(examples), _PROBED)
    few = map_examples(lambda leaf: leaf[:size], examples)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
    losses = _losses(model, loss_fn, few, parameters)
    if not losses.requires_grad:
        remedy = "compute the loss from the model's output, without no_grad or detach"
        raise expected("loss_fn", "losses", "to have a gradient", "none", remedy)
    grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    # torch types the result as if allow_unused did not exist.
    unused = [
        name for name, grad in zip(parameters, cast("Sequence[Tensor | None]", grads), strict=True) if grad is None
    ]
    if unused:
        remedy = "use them in the loss, or freeze them with requires_grad_(False)"
        got = f"none for {', '.join(unused)}"
        raise expected("loss_fn", "every trainable parameter", "to get a gradient", got, remedy)
    _require_apart(model, loss_fn, few, size)


def gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    *,
    along: Mapping[str, Tensor] | None = None,
    exact: bool = False,
) -> dict[str, Tensor]:
    """Gradient of the summed losses by parameter name, from copies; zero where the loss does not reach. NOT private.

    Args:
        model, loss_fn, examples: as in PrivateGradient.
        along: moves the parameters by name, to take the gradient there.
        exact: do not move, but add the Hessian's product with `along`.
    """
    moves, own = along or {}, trainable(model)
    points = {} if exact else {own[name]: own[name].detach() + by.to(own[name].dtype) for name, by in moves.items()}
    # The model's own parameters too: checkpointed parts compute again from them.
    with replaced(points), torch.enable_grad(), differentiable(twice=exact):
        # Moved parameters are the audit's own; others are copied, for a forward pass may write to them.
        parameters = {
            name: (p.detach() if p in points else p.detach().clone()).requires_grad_() for name, p in own.items()
        }
        leaves = list(parameters.values())
        total = _losses(model, loss_fn, examples, parameters).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True, create_graph=exact)
        if exact:
            products = [
                (grad * moves[name]).sum() for name, grad in zip(parameters, grads, strict=True) if name in moves
            ]
            phi = torch.stack(products).sum()
            if phi.requires_grad:
                more = torch.autograd.grad(phi, leaves, allow_unused=True, materialize_grads=True)
                grads = tuple(grad + add for grad, add in zip(grads, more, strict=True))
    return {name: grad.detach() for name, grad in zip(parameters, grads, strict=True)}


def _require_apart(model: nn.Module, loss_fn: LossFunction, few: Any, size: int) -> None:
    """The first example's loss must move neither with its companions' content nor with their number."""

    def repeated(count: int) -> Any:
        return map_examples(lambda leaf: leaf[:1].expand(count, *leaf.shape[1:]).clone(), few)

    remedy = "make each loss depend on its own example: no statistics, ranks or means over the batch"
    if size == 1:
        few = map_examples(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), few)
        size = 2
    for seed in range(_DRAWS):
        # Same shapes and same random draws: a loss that keeps to its own example repeats to the last bit, or nearly.
        among, alone = (_losses(model, loss_fn, x, seed=seed).detach()[0] for x in (few, repeated(size)))
        scale = among.abs() + torch.finfo(among.dtype).tiny
        got = "a loss that changes with the other examples"
        if (alone - among).abs() > 64 * torch.finfo(among.dtype).eps * scale:
            raise expected("loss_fn", "each loss", "to depend on its own example only", got, remedy)
    with evaluating(model):
        one, two = (_losses(model, loss_fn, repeated(count)).detach()[0] for count in (1, 2))
    # Losses that are rounding themselves move by as much.
    if (one - two).abs() > 1e-2 * one.abs() + torch.finfo(one.dtype).eps:
        got = "a loss that changes with the number of examples"
        raise expected("loss_fn", "each loss", "to depend on its own example only", got, remedy)


def _losses(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    seed: int = 0,
) -> Tensor:
    given = parameters or {}
    copies = {name: p.detach().clone() for name, p in model.named_parameters() if name not in given}
    copies |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {f"model.{name}": tensor for name, tensor in {**copies, **given}.items()}
    # Compiled code keeps no graph to differentiate twice.
    with seeded(seed), preserved(model), torch.compiler.set_stance("force_eager"):
        losses = functional_call(BoundLoss(model, loss_fn), state, (examples,))
    return require_losses(losses, count_examples(examples))


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode (no dropout), each module's own mode restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
