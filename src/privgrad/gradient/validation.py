"""What stands between a model and private training: found before anything is charged."""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.gradient.autograd_graph import nodes
from privgrad.gradient.module_state import (
    BoundLoss,
    differentiable,
    preserved,
    replaced,
    require_losses,
    seeded,
    trainable,
)
from privgrad.types import LossFunction, count_examples, map_examples

PROBED = 3  # examples that a model is tried on
_FROZEN = "has no trainable parameter"
_DRAWS = 4  # random draws: what mixes examples now and then shows in some of them
_HALVED = 64  # examples whose losses are compared with those in half of them
_SAME = 1e-3  # relative change of a loss that rounding does not make

# What a forward pass draws at random: nothing; dropout only; or something else, such as noise or skipped layers.
Randomness = Literal["none", "dropout", "other"]


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
    few = few_of(examples, fill=False)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
    losses = _losses(model, loss_fn, few, parameters)
    if not losses.requires_grad:
        remedy = "compute the loss from the model's output, without no_grad or detach"
        raise expected("loss_fn", "losses", "to have a gradient", "none", remedy)
    refuse_reentrant(losses)
    grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    # torch types the result as if allow_unused did not exist.
    unused = [
        name for name, grad in zip(parameters, cast("Sequence[Tensor | None]", grads), strict=True) if grad is None
    ]
    if unused:
        remedy = (
            "use them in the loss, or freeze them with requires_grad_(False); with gradient checkpointing, pass "
            "use_reentrant=False: re-entrant checkpointing of the first layers gives them none"
        )
        got = f"none for {', '.join(unused)}"
        raise expected("loss_fn", "every trainable parameter", "to get a gradient", got, remedy)
    randomness = find_randomness(model, loss_fn, few)
    _require_apart(model, loss_fn, few, randomness)
    require_same_losses_in_half(model, loss_fn, examples, randomness)


def configuration(model: nn.Module) -> int:
    """Return a number that changes where the model may begin to compute in another way.

    It is made of each module's mode and of its other flags, words and numbers; of a number, whether it is zero. So a
    layer that is switched on counts, and a counter of steps does not.
    """
    found: list[tuple[int, str, object]] = []
    for index, module in enumerate(model.modules()):
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | str):
                found.append((index, name, value))
            elif isinstance(value, int | float):
                found.append((index, name, value != 0))
    return hash(tuple(found))


def gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    *,
    along: Mapping[str, Tensor] | None = None,
    exact: bool = False,
    copied: bool = True,
) -> dict[str, Tensor]:
    """Return the gradient of the summed losses by parameter name; zero where the loss does not reach. NOT private.

    Args:
        model, loss_fn, examples: as in PrivateGradient.
        along: moves the parameters by name, to take the gradient there.
        exact: do not move, but add the Hessian's product with `along`.
        copied: whether parameters are copied, so that a forward pass that writes to them spoils nothing.
    """
    moves, own = along or {}, trainable(model)
    points = {} if exact else {own[name]: own[name].detach() + by.to(own[name].dtype) for name, by in moves.items()}
    # The model's own parameters too: checkpointed parts compute again from them.
    with replaced(points), torch.enable_grad(), differentiable(twice=exact):
        # Moved parameters are this function's own.
        parameters = {
            name: (p.detach().clone() if copied and p not in points else p.detach()).requires_grad_()
            for name, p in own.items()
        }
        leaves = list(parameters.values())
        total = _losses(model, loss_fn, examples, parameters, copied=copied).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True, create_graph=exact)
        if exact:
            products = [
                (grad * moves[name]).sum() for name, grad in zip(parameters, grads, strict=True) if name in moves
            ]
            phi = torch.stack(products).sum()
            if phi.requires_grad:
                more = torch.autograd.grad(phi, leaves, allow_unused=True, materialize_grads=True)
                grads = tuple(grad + add for grad, add in zip(grads, more, strict=True))
    # Sparse ones are of tables that ask for it.
    return {name: grad.detach().to_dense() for name, grad in zip(parameters, grads, strict=True)}


def few_of(examples: Any, *, salt: int = 0, fill: bool = True) -> Any:
    """Return the first example, the last, and others at random places between them, PROBED in all.

    Args:
        examples: with leading dimension >= 1.
        salt: other places for another number. They follow from torch's seed too, and use up no random draws.
        fill: whether to fill up with zeros where there are too few.
    """
    size = count_examples(examples)
    if size > PROBED:
        index = torch.tensor([0, *(1 + places_of(size - 2, PROBED - 2, salt)).tolist(), size - 1])
        return map_examples(lambda leaf: leaf[index.to(leaf.device)], examples)
    missing = PROBED - size if fill else 0
    return map_examples(lambda leaf: torch.cat([leaf, leaf.new_zeros(missing, *leaf.shape[1:])]), examples)


def places_of(size: int, chosen: int, salt: int) -> Tensor:
    """Return different random places below size, in order; the same again under the same seed and salt."""
    generator = torch.Generator().manual_seed((torch.initial_seed() + salt) % 2**63)
    return torch.randperm(size, generator=generator)[:chosen].sort().values


def _require_apart(model: nn.Module, loss_fn: LossFunction, few: Any, randomness: Randomness) -> None:
    """Require that the first and the last loss move neither with their companions' content nor with their number."""
    size = count_examples(few)
    if size == 1:
        few = map_examples(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), few)
        size = 2

    def repeated(row: int, count: int) -> Any:
        return map_examples(lambda leaf: leaf[row : row + 1].expand(count, *leaf.shape[1:]).clone(), few)

    for row in (0, size - 1):
        for seed in range(_DRAWS):
            # Same shapes and random draws: a loss that keeps to its own example repeats to the last bit, or nearly.
            among, alone = (_losses(model, loss_fn, x, seed=seed).detach()[row] for x in (few, repeated(row, size)))
            scale = among.abs() + torch.finfo(among.dtype).tiny
            if (alone - among).abs() > 64 * torch.finfo(among.dtype).eps * scale:
                raise _depends("a loss that changes with the other examples")

        def by_count(model: nn.Module, row: Any) -> tuple[Tensor, Tensor]:
            one = _losses(model, loss_fn, map_examples(lambda leaf: leaf[:1], row)).detach()
            return one, _losses(model, loss_fn, row).detach()[:1]

        with without_randomness(model, randomness):
            if _differ(model, repeated(row, 2), by_count):
                raise _depends("a loss that changes with the number of examples")


def require_same_losses_in_half(model: nn.Module, loss_fn: LossFunction, examples: Any, randomness: Randomness) -> None:
    """Require that the first half of a batch keeps its losses without the second half, and with another one.

    Raises:
        PrivacyError: some losses change, as where a loss keeps the largest of the batch, or ranks them.
    """
    size = min(count_examples(examples), _HALVED)
    half = (size + 1) // 2
    examples = map_examples(lambda leaf: leaf[:size], examples)

    def in_both(model: nn.Module, examples: Any) -> tuple[Tensor, Tensor]:
        first = _losses(model, loss_fn, map_examples(lambda leaf: leaf[:half], examples)).detach()
        return first, _losses(model, loss_fn, examples).detach()[:half]

    with without_randomness(model, randomness):
        if _differ(model, examples, in_both):
            raise _depends("losses that change with the second half of the batch")
    if randomness != "none":
        _require_same_losses_under_draws(model, loss_fn, examples, half)


def _require_same_losses_under_draws(model: nn.Module, loss_fn: LossFunction, examples: Any, half: int) -> None:
    """Require that the first losses stay where the first examples stand for the others, under the same draws.

    What switches dropout off may switch off other code too, such as a mask made of the batch.
    """

    def drawn(examples: Any) -> tuple[Tensor, Tensor]:
        with seeded(0):
            return _losses(model, loss_fn, examples, seed=None).detach()[:half], _random_state()

    places = torch.arange(count_examples(examples)) % half
    (among, state), (alone, other) = (
        drawn(examples),
        drawn(map_examples(lambda leaf: leaf[places.to(leaf.device)], examples)),
    )
    # Where the number of draws depends on the data, the draws are not the same ones.
    most = _SAME * among.abs() + torch.finfo(among.dtype).eps
    if torch.equal(state, other) and bool(((alone - among).abs() > most).any()):
        raise _depends("losses that change with the content of the second half")


def _differ(model: nn.Module, examples: Any, losses: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]) -> bool:
    """Return whether two tensors of losses differ, in double precision too if in their own.

    Losses that are rounding themselves, as the sine of large numbers, move by as much with the number of examples.
    """

    def found(model: nn.Module, examples: Any) -> bool:
        one, other = losses(model, examples)
        return bool(((one - other).abs() > 1e-2 * one.abs() + torch.finfo(one.dtype).eps).any())

    if not found(model, examples):
        return False
    try:
        return found(copy.deepcopy(model).double(), map_examples(doubled, examples))
    except Exception:  # a loss that takes single precision only, say
        return True


def _depends(got: str) -> PrivacyError:
    remedy = "make each loss depend on its own example: no statistics, ranks or means over the batch"
    return expected("loss_fn", "each loss", "to depend on its own example only", got, remedy)


def doubled(leaf: Tensor) -> Tensor:
    """Return floating-point numbers in double precision, and others as they are."""
    return leaf.double() if leaf.is_floating_point() else leaf


def _losses(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    seed: int | None = 0,
    copied: bool = True,
) -> Tensor:
    """Return the losses at copies of parameters and buffers.

    Args:
        model, loss_fn, examples: as in `gradients`.
        parameters: what stands for some of them, by name.
        seed: of the random draws; None draws on.
        copied: whether parameters are copied, so that a forward pass that writes to them spoils nothing.
    """
    given = parameters or {}
    own = {name: p.detach() for name, p in model.named_parameters() if name not in given}
    copies = {name: p.clone() for name, p in own.items()} if copied else own
    copies |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {f"model.{name}": tensor for name, tensor in {**copies, **given}.items()}
    # Compiled code keeps no graph to differentiate twice.
    draws = nullcontext() if seed is None else seeded(seed)
    with draws, preserved(model), torch.compiler.set_stance("force_eager"):
        losses = functional_call(BoundLoss(model, loss_fn), state, (examples,))
    return require_losses(losses, count_examples(examples))


def find_randomness(model: nn.Module, loss_fn: LossFunction, few: Any) -> Randomness:
    """Return what the forward pass draws in the modes that the modules are in."""
    with _without_dropout(model) as dropout, seeded(0):
        before = _random_state()
        _losses(model, loss_fn, few, seed=None)
        drawn = not torch.equal(before, _random_state())
    return "other" if drawn else "dropout" if dropout.met else "none"


@contextmanager
def without_randomness(model: nn.Module, randomness: Randomness) -> Generator[None]:
    """Switch off what draws, and nothing else: the program that is checked is to be the one that trains.

    Evaluation mode is the last resort, for it may switch on caches or other branches.
    """
    with ExitStack() as stack:
        if randomness != "none":
            stack.enter_context(_without_dropout(model))
        if randomness == "other":
            stack.enter_context(evaluating(model))
        yield


class _WithoutDropout(TorchFunctionMode):
    """While open, functions that drop return their input.

    Attributes:
        met: whether any has been called that would have dropped.
    """

    met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in _DROPOUTS:
            x, rate, training = (
                args[place] if len(args) > place else options.get(name, default)
                for place, (name, default) in enumerate((("input", None), ("p", 0.5), ("training", True)))
            )
            self.met = self.met or bool(rate and training)
            return x
        if func in _WITH_DROPOUT:
            place, name, off = _WITH_DROPOUT[func]
            self.met = self.met or bool(args[place] if len(args) > place else options.get(name))
            args = (*args[:place], off, *args[place + 1 :]) if len(args) > place else args
            options |= {} if len(args) > place else {name: off}
        return func(*args, **options)


_DROPOUTS: set[Any] = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
}
# By function: the place and name of an argument, and its value without dropout.
_WITH_DROPOUT: dict[Any, tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
}
_RATES = ("p", "drop_prob", "drop_path", "dropout")  # what modules that drop call the share that they drop


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[_WithoutDropout]:
    """Switch dropout off without touching the modules' modes."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        drops = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        name = type(module).__name__.lower()
        if drops or "drop" in name or "stochasticdepth" in name:
            held = {rate: vars(module).get(rate) for rate in _RATES}
            before += [(module, rate, value) for rate, value in held.items() if isinstance(value, float) and value > 0]
    mode = _WithoutDropout()
    mode.met = any(module.training for module, _, _ in before)  # as layers with rules of their own ask
    try:
        for module, rate, _ in before:
            setattr(module, rate, 0.0)
        with mode:
            yield mode
    finally:
        for module, rate, value in before:
            setattr(module, rate, value)


def _random_state() -> Tensor:
    """Return the state of torch's random streams, of the accelerator too where there is one."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat([state.cpu() for state in states])


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
