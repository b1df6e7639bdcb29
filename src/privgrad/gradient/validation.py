"""Check that a model and a loss allow private training, before any release is charged.

PrivateGradient calls `require_supported` and `check_loss`; `privgrad doctor` calls `find_problems`. The engines use
the rest for their self-checks. The privacy guarantee needs models and losses that keep examples apart. These checks
try that on a few examples; they find mistakes, but they prove nothing.
"""

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

PROBED = 3  # number of examples on which a model is tried
_FROZEN = "has no trainable parameter"
_DRAWS = 4  # number of random draws: a model that mixes examples only sometimes does so in some of them
_HALVED = 64  # most examples for the comparison of a batch with its first half
_SAME = 1e-3  # relative change of a loss that is too large for rounding

# The random draws of a forward pass: none; dropout only; or others, such as noise or skipped layers.
Randomness = Literal["none", "dropout", "other"]


@dataclass(frozen=True)
class Problem:
    """A property of a module that prevents private training.

    Attributes:
        path: the module's path, "" for the model itself.
        module: the module's class name.
        what: the problem.
        remedy: how to solve it.
    """

    path: str
    module: str
    what: str
    remedy: str


def find_problems(model: nn.Module) -> list[Problem]:
    """Return everything in the model that prevents private training, by module path; an empty list if nothing does.

    Privacy:
        This reads the structure only, and no data. `check_loss` finds on the first batch problems that need data.
    """
    problems: list[Problem] = []
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        kind = type(module).__name__
        # torch types running_mean as a Tensor; without tracked statistics it is None.
        has_statistics = getattr(module, "running_mean", None) is not None
        if isinstance(module, _InstanceNorm):
            if module.training and has_statistics:
                what = "keeps running statistics of private examples without clipping and noise"
                problems.append(Problem(path, kind, what, "set track_running_stats=False, or call .eval() on it"))
        elif isinstance(module, _BatchNorm) and (module.training or not has_statistics):
            what = "mixes the examples of a batch, so one example's gradient depends on the others"
            remedy = "replace it by GroupNorm or LayerNorm, or call .eval() on it if its statistics are public"
            problems.append(Problem(path, kind, what, remedy))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            what = "shortens in place the rows that it looks up, and so reveals which rows the batch uses"
            problems.append(Problem(path, kind, what, "set max_norm=None, and shorten its output rows if necessary"))
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            what = "has lazy parameters that do not have a shape yet"
            problems.append(Problem(path, kind, what, "run one public example through the model first"))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not parameter.is_floating_point():
                what = f"has {name} of type {parameter.dtype}, for which no noise is defined"
                problems.append(Problem(path, kind, what, "use real parameters: view_as_real for complex ones"))
    if not trainable(model):
        remedy = "set requires_grad_(True) on the parameters to train"
        problems.append(Problem("", type(model).__name__, _FROZEN, remedy))
    return problems


def require_supported(model: nn.Module) -> None:
    """Raise UnsupportedModuleError if `find_problems` finds any; it names the first, and counts the others."""
    problems = find_problems(model)
    if problems:
        first = problems[0]
        if first.what == _FROZEN:
            count = sum(1 for _ in model.parameters())
            remedy = f"{first.remedy}, such as model.requires_grad_(True)"
            got = f"{count} parameters with requires_grad=False" if count else f"a {first.module} without parameters"
            condition = "to have trainable parameters"
            raise expected("PrivateGradient", "model", condition, got, remedy, UnsupportedModuleError)
        more = f" (and {len(problems) - 1} more; `privgrad doctor` lists all)" if len(problems) > 1 else ""
        raise UnsupportedModuleError(
            f"PrivateGradient: expected a model that keeps examples apart, got {first.module} at "
            f"'{first.path}', which {first.what}{more}; {first.remedy}."
        )


def check_loss(model: nn.Module, loss_fn: LossFunction, examples: Any) -> None:
    """Raise PrivacyError if the loss fails on a few examples: shape, gradients, or dependence on other examples.

    PrivateGradient calls it before it charges the first batch, and again if `configuration` or the set of trainable
    parameters changes.

    Args:
        model: the model, in the mode in which it trains.
        loss_fn: (model, examples) -> losses, shape (B,).
        examples: with leading dimension >= 1.
    Raises:
        PrivacyError: the losses have a wrong shape or no gradient, do not depend on some trainable parameter, or
            depend on other examples. The message says how to correct it.
    Privacy:
        This reveals only success or an error, like any exception raised on private data. The loss is tried on copies
        of parameters and buffers, and changes that it makes to the modules are undone. Each loss must depend on its
        own example only: the privacy guarantee rests on that. It is tried here, not proven.
    """
    few = few_of(examples, fill=False)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
    losses = _losses(model, loss_fn, few, parameters)
    if not losses.requires_grad:
        remedy = "compute the loss from the model's output, without no_grad or detach"
        raise expected("loss_fn", "losses", "to have a gradient", "requires_grad=False", remedy)
    refuse_reentrant(losses)
    grads = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    # torch types the result as if allow_unused did not exist.
    unused = [
        name for name, grad in zip(parameters, cast("Sequence[Tensor | None]", grads), strict=True) if grad is None
    ]
    if unused:
        remedy = (
            "use them in the loss, or freeze them with requires_grad_(False); with gradient checkpointing, pass "
            "use_reentrant=False: re-entrant checkpointing of the first layers gives them no gradient"
        )
        got = f"no gradient for {', '.join(unused)}"
        raise expected("loss_fn", "every trainable parameter", "to get a gradient", got, remedy)
    randomness = find_randomness(model, loss_fn, few)
    _require_apart(model, loss_fn, few, randomness)
    require_same_losses_in_half(model, loss_fn, examples, randomness)


def configuration(model: nn.Module) -> int:
    """Return a hash of the modules' settings; if it changes, the model may compute differently from now on.

    It is computed from each module's mode and its other flags and strings, and for a number, whether it is zero. So a
    layer that is switched on changes the hash, and a counter of steps does not. PrivateGradient checks the loss again
    if the hash changes.
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
    """Return the gradient of the summed losses by parameter name; zero for unreached parameters. NOT private.

    Args:
        model: as in PrivateGradient.
        loss_fn: as in PrivateGradient.
        examples: as in PrivateGradient.
        along: displacements by parameter name; the gradient is evaluated at the displaced parameters.
        exact: do not displace the parameters, but add the Hessian's product with `along` to the gradient.
        copied: whether to copy the parameters, so that a forward pass that writes to them does no harm.
    """
    moves, own = along or {}, trainable(model)
    points = {} if exact else {own[name]: own[name].detach() + by.to(own[name].dtype) for name, by in moves.items()}
    # Replace the model's own parameters too: in the backward pass, checkpointed parts recompute from them.
    with replaced(points), torch.enable_grad(), differentiable(twice=exact):
        # Displaced parameters need no copy: they are new tensors of this function.
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
    # Embeddings with sparse=True have sparse gradients.
    return {name: grad.detach().to_dense() for name, grad in zip(parameters, grads, strict=True)}


def few_of(examples: Any, *, salt: int = 0, fill: bool = True) -> Any:
    """Return PROBED examples: the first, the last, and some at random indices between them.

    Args:
        examples: with leading dimension >= 1.
        salt: a different salt gives different indices. The indices depend on torch's seed too, but the random streams
            do not advance.
        fill: whether to add examples of zeros if there are fewer than PROBED.
    """
    size = count_examples(examples)
    if size > PROBED:
        index = torch.tensor([0, *(1 + places_of(size - 2, PROBED - 2, salt)).tolist(), size - 1])
        return map_examples(lambda leaf: leaf[index.to(leaf.device)], examples)
    missing = PROBED - size if fill else 0
    return map_examples(lambda leaf: torch.cat([leaf, leaf.new_zeros(missing, *leaf.shape[1:])]), examples)


def places_of(size: int, chosen: int, salt: int) -> Tensor:
    """Return `chosen` distinct random indices below `size`, sorted; torch's seed and the salt determine them."""
    generator = torch.Generator().manual_seed((torch.initial_seed() + salt) % 2**63)
    return torch.randperm(size, generator=generator)[:chosen].sort().values


def _require_apart(model: nn.Module, loss_fn: LossFunction, few: Any, randomness: Randomness) -> None:
    """Raise PrivacyError if the first or the last loss depends on the other examples or on their number."""
    size = count_examples(few)
    if size == 1:
        few = map_examples(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), few)
        size = 2

    def repeated(row: int, count: int) -> Any:
        return map_examples(lambda leaf: leaf[row : row + 1].expand(count, *leaf.shape[1:]).clone(), few)

    for row in (0, size - 1):
        for seed in range(_DRAWS):
            # Shapes and random draws are equal, so a loss of its own example only repeats, up to the last few bits.
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
    """Raise PrivacyError if the losses of a batch's first half change when the second half is removed or replaced.

    Raises:
        PrivacyError: some losses change, for instance because the loss ranks the batch or keeps its largest values.
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
    """Raise PrivacyError if the first losses change when the first examples replace the others, under equal draws.

    This runs with dropout on: the switch for dropout may also disable other code, such as a mask computed from the
    batch.
    """

    def drawn(examples: Any) -> tuple[Tensor, Tensor]:
        with seeded(0):
            return _losses(model, loss_fn, examples, seed=None).detach()[:half], _random_state()

    places = torch.arange(count_examples(examples)) % half
    (among, state), (alone, other) = (
        drawn(examples),
        drawn(map_examples(lambda leaf: leaf[places.to(leaf.device)], examples)),
    )
    # If the random states differ, the number of draws depends on the data, and the losses cannot be compared.
    most = _SAME * among.abs() + torch.finfo(among.dtype).eps
    if torch.equal(state, other) and bool(((alone - among).abs() > most).any()):
        raise _depends("losses that change with the content of the second half")


def _differ(model: nn.Module, examples: Any, losses: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]) -> bool:
    """Return whether two tensors of losses differ, in their own precision and in double precision.

    Losses that consist of rounding errors, such as the sine of large numbers, differ in their own precision only.
    """

    def found(model: nn.Module, examples: Any) -> bool:
        one, other = losses(model, examples)
        return bool(((one - other).abs() > 1e-2 * one.abs() + torch.finfo(one.dtype).eps).any())

    if not found(model, examples):
        return False
    try:
        return found(copy.deepcopy(model).double(), map_examples(doubled, examples))
    except Exception:  # for instance a loss that accepts single precision only
        return True


def _depends(got: str) -> PrivacyError:
    remedy = "make each loss depend on its own example: no statistics, ranks or means over the batch"
    return expected("loss_fn", "each loss", "to depend on its own example only", got, remedy)


def doubled(leaf: Tensor) -> Tensor:
    """Return a floating-point tensor in double precision, and any other tensor unchanged."""
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
    """Return the losses, computed with copies of parameters and buffers.

    Args:
        model: as in `gradients`.
        loss_fn: as in `gradients`.
        examples: as in `gradients`.
        parameters: tensors that replace some parameters, by name.
        seed: the seed of the random draws; None continues torch's random streams.
        copied: as in `gradients`.
    """
    given = parameters or {}
    own = {name: p.detach() for name, p in model.named_parameters() if name not in given}
    copies = {name: p.clone() for name, p in own.items()} if copied else own
    copies |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {f"model.{name}": tensor for name, tensor in {**copies, **given}.items()}
    # Compiled code has no graph that can be differentiated twice.
    draws = nullcontext() if seed is None else seeded(seed)
    with draws, preserved(model), torch.compiler.set_stance("force_eager"):
        losses = functional_call(BoundLoss(model, loss_fn), state, (examples,))
    return require_losses(losses, count_examples(examples))


def find_randomness(model: nn.Module, loss_fn: LossFunction, few: Any) -> Randomness:
    """Return the kind of random draws that the forward pass makes in the modules' current modes."""
    with _without_dropout(model) as dropout, seeded(0):
        before = _random_state()
        _losses(model, loss_fn, few, seed=None)
        drawn = not torch.equal(before, _random_state())
    return "other" if drawn else "dropout" if dropout.met else "none"


@contextmanager
def without_randomness(model: nn.Module, randomness: Randomness) -> Generator[None]:
    """Disable random draws, and as little else as possible, so that a check runs the code that trains.

    Evaluation mode is the last resort, for draws other than dropout: it may enable caches or other branches.
    """
    with ExitStack() as stack:
        if randomness != "none":
            stack.enter_context(_without_dropout(model))
        if randomness == "other":
            stack.enter_context(evaluating(model))
        yield


class _WithoutDropout(TorchFunctionMode):
    """A mode in which dropout functions return their input.

    Attributes:
        met: whether a dropout function was called that would have dropped values.
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
# For functions with dropout inside: position and name of an argument, and its value without dropout.
_WITH_DROPOUT: dict[Any, tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
}
_RATES = ("p", "drop_prob", "drop_path", "dropout")  # names of the dropout rate in modules


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[_WithoutDropout]:
    """Disable dropout without changing the modules' modes; the value says whether there was any."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        drops = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        name = type(module).__name__.lower()
        if drops or "drop" in name or "stochasticdepth" in name:
            held = {rate: vars(module).get(rate) for rate in _RATES}
            before += [(module, rate, value) for rate, value in held.items() if isinstance(value, float) and value > 0]
    mode = _WithoutDropout()
    mode.met = any(module.training for module, _, _ in before)  # some layers read the rate, and call no function above
    try:
        for module, rate, _ in before:
            setattr(module, rate, 0.0)
        with mode:
            yield mode
    finally:
        for module, rate, value in before:
            setattr(module, rate, value)


def _random_state() -> Tensor:
    """Return the states of torch's random streams, on the CPU and on CUDA devices."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat([state.cpu() for state in states])


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Set evaluation mode (no dropout), and restore each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def refuse_reentrant(loss: Tensor) -> None:
    """Raise UnsupportedModuleError if a loss is computed by re-entrant gradient checkpointing.

    The backward pass of such checkpointing writes to `.grad` of parameters, instead of returning their gradients.
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
