"""Check that a model and a loss keep examples apart, before any release is charged.

Each check states the fault that it finds, its cost, and what it refuses wrongly.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import TopLevelTracedModule  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy

from privgrad.checks.randomness import (
    Observed,
    Randomness,
    find_randomness,
    observed,
    require_unseeded,
    without_randomness,
)
from privgrad.checks.state import require_no_memory
from privgrad.checks.variables import DEPTH, Scope, Snapshot, nonzero, references, shown, state_of
from privgrad.errors import PrivacyError, UnsupportedModuleError, expected
from privgrad.gradient.autograd_graph import refuse_reentrant, refusing_in_place, sources
from privgrad.gradient.contribution import OwnExamples
from privgrad.gradient.functional import Structure, losses_on_copies, own_parameters, seeded, structure_of, trainable
from privgrad.gradient.probes import (
    FOUR,
    InDouble,
    Precision,
    doubled,
    few_of,
    four_of,
    in_float32_too,
    leading_of,
    leading_rows,
    leaf_of,
    rows_of,
    unreached,
)
from privgrad.types import LossFunction, map_examples

# `fix` asks for these.
FROZEN = "has no trainable parameter"
KEEPS = "keeps running statistics of private examples without clipping and noise"
MIXES = "mixes the examples of a batch, so one example's gradient depends on the others"
SHORTENS = "shortens in place the rows that it looks up, and so reveals which rows the batch uses"
_HALVED = 64  # most examples for the comparison of a batch with its first half


@dataclass(frozen=True)
class Problem:
    """A property of a module that prevents private training."""

    path: str  # the module's path, "" for the model itself
    module: str  # the module's class name
    what: str
    remedy: str


# Faults: BatchNorm in training mode, which mixes examples; running statistics, and rows that are shortened in place;
#     hooks of other libraries, and hooks on parameters, which the engines do not call.
# Cost: it walks over the modules, without data.
# Refuses wrongly: normalizations in training mode whose outputs the loss does not use.
def find_problems(model: nn.Module | Structure) -> list[Problem]:
    """Return all in the model's structure that prevents private training, by module path; it reads no data."""
    structure = structure_of(model)
    traced = (path for path, module in structure.modules if isinstance(module, TopLevelTracedModule))
    if (path := next(traced, None)) is not None:  # its parts have no attributes to read
        what, remedy = "was traced by torch.jit.trace", "give the module that you traced, without torch.jit"
        return [Problem(path, TopLevelTracedModule.__name__, what, remedy)]
    found = ((path, module, problem) for path, module in structure.modules for problem in _problems_of(module))
    problems = [Problem(path, type(module).__name__, *problem) for path, module, problem in found]
    if not structure.trained:
        remedy = "set requires_grad_(True) on the parameters to train, such as model.requires_grad_(True)"
        problems.append(Problem("", type(structure.model).__name__, FROZEN, remedy))
    return problems


def _problems_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each problem of a module, without its submodules, and the remedy."""
    # torch types running_mean as a Tensor, but it may be None.
    has_statistics = getattr(module, "running_mean", None) is not None
    if isinstance(module, _InstanceNorm):
        if module.training and has_statistics:
            yield KEEPS, "set track_running_stats=False, or call .eval() on it"
    elif isinstance(module, _BatchNorm) and (module.training or not has_statistics):
        replaced = "replace it by GroupNorm or LayerNorm, as privgrad.fix(model) does in a copy"
        yield MIXES, f"{replaced}, or call .eval() on it if its statistics are public"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        yield SHORTENS, "set max_norm=None, and shorten its output rows if necessary"
    is_wrapper = type(module).__name__ == "ParamWrapper"
    if is_wrapper and not any(getattr(module, off, False) for off in ("merged", "disable_adapters")):
        what = "adds peft's adapter to a parameter by writing to it in each forward pass"
        yield what, "name linear layers in LoraConfig, such as target_modules=['q_proj', 'v_proj'], and no experts"
    if type(module).__module__.startswith("bitsandbytes."):
        yield from _problems_of_few_bits(module)
    hooks = (hook for name in _HOOKS for hook in vars(module)[name].values())
    if any("grad_sample" in str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks):
        what = "has the hooks of another library that computes a gradient for each example"
        yield what, "give the model without them: for Opacus, wrapped_model.to_standard_module()"
    own = own_parameters(module)
    if any(map(is_lazy, own.values())):
        yield "has lazy parameters that do not have a shape yet", "run one public example through the model first"
    for name, parameter in own.items():
        after = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage]
        if parameter.requires_grad and (parameter._backward_hooks or after):
            what = f"has a hook on {name}, which gradients of examples do not pass"
            yield what, "remove it, and multiply the weight by the mask in forward, or mask the released gradient"
        if parameter.requires_grad and not parameter.is_floating_point():
            what = f"has {name} of type {parameter.dtype}, for which no noise is defined"
            yield what, "use real parameters: view_as_real for complex ones"


# Finds: layers of bitsandbytes that compute examples together, or lose gradients.
# Cost: it reads attributes of each such layer, once for each structure of a model.
# Refuses wrongly: a threshold that no input exceeds; it cannot be seen without the data.
def _problems_of_few_bits(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the problems of a layer of bitsandbytes, with its base of 4 or 8 bits, and the remedies."""
    weight: Any = module.weight
    is_trained_on_cpu = weight.is_cpu and module.training  # there, 8 bits have a kernel that quantizes no inputs
    if getattr(getattr(module, "state", None), "threshold", 0) > 0 and not is_trained_on_cpu:
        what = "computes a column of all examples in 16 bits if one of them exceeds a threshold there"
        yield what, "load the model with BitsAndBytesConfig(..., llm_int8_threshold=0.0)"
    if weight.requires_grad and type(weight).__name__ == "Int8Params":
        what = "trains a weight that it rounds to 8 bits in each pass"
        yield what, "set has_fp16_weights=False, which freezes it, and train adapters"
    # bitsandbytes then has a product without a gradient for the inputs, in ordinary training too.
    is_packed = getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False)
    packs = weight.is_cpu and not module.training and getattr(module, "support_avx512bf16_for_cpu", False)
    if is_packed or packs:
        what = "packs its 4 bits for inference when it evaluates on this processor, and no gradient passes it then"
        remedy = "set support_avx512bf16_for_cpu = False on it before you evaluate; model.state_dict() unpacks weights"
        yield what, remedy


def require_supported(model: nn.Module | Structure) -> None:
    """Raise UnsupportedModuleError if `find_problems` finds any; it names the first, and counts the others."""
    if problems := structure_of(model).once(find_problems):
        first = problems[0]
        condition = "to have trainable parameters" if first.what == FROZEN else "to keep examples apart"
        more = f" (and {len(problems) - 1} more; print(privgrad.explain(model)) lists all)" if len(problems) > 1 else ""
        place = f" at '{first.path}'" if first.path else ""
        got = f"{first.module}{place}, which {first.what}{more}"
        raise expected("PrivateGradient", "model", condition, got, first.remedy, UnsupportedModuleError)


# Faults: a loss of the wrong shape or without a gradient; parameters that it does not reach, so that noise alone moves
#     them; seeds in the forward pass; a loss that depends on other examples: see the functions that it calls.
# Cost: 6 to 36 forward passes of a few examples, and 3 to 6 of at most 64, in the first step and after changes.
# Refuses wrongly: experts, if the first 64 examples all reach the same ones; `freeze_unused` or zero rows help.
def check_loss(model: nn.Module, loss_fn: LossFunction, examples: Any) -> Randomness:
    """Try the loss on a few examples, and return its random draws. The model is in the mode in which it trains."""
    few = four_of(few_of(examples, fill=False))
    parameters = {name: leaf_of(p, copied=True) for name, p in trainable(model).items()}
    tried = loss_fn.tried if isinstance(loss_fn, OwnExamples) else loss_fn
    reach = partial(_reach, model, tried, parameters)
    try:
        if isinstance(loss_fn, OwnExamples) and loss_fn.state is not None:
            require_no_memory(model, loss_fn, examples)  # first: other passes would fit state for good
        own = map_examples(torch.clone, few)  # the loss may write to its examples, which is noticed in this pass
        first = observed(model, tried, own, result=reach, parameters=parameters, noticing=True)
    except TypeError as error:
        error.add_note("PrivateGradient calls loss_fn(model, examples); check the order of its arguments.")
        raise
    losses, unused = first.losses
    if unused:
        # Whether examples are routed shows in other parts that one, a few or many of them reach. Then chance decides
        # what this batch reaches: this may not decide between refused and accepted.
        others = (leading_of(examples, most) for most in (1, _HALVED))
        (_, fewer), (_, more) = (losses_on_copies(model, tried, some, reach, parameters) for some in others)
        if not fewer == unused == more:
            if unused := [name for name in unused if name in more]:
                what = f"no example of the first batch reaches {listed(unused)}: until one does, noise alone moves"
                warnings.warn(f"{what} them; if none ever will, freeze them with requires_grad_(False)", stacklevel=2)
            unused = list[str]()
    if unused:
        remedy = (
            "freeze them by privgrad.freeze_unused, or use them in the loss; call experts that only some examples "
            "reach with zero rows too; with gradient checkpointing, pass use_reentrant=False"
        )
        got = f"no gradient for {listed(unused)}"
        raise expected("loss_fn", "every trainable parameter", "to get a gradient", got, remedy)
    seen = [first._replace(losses=losses)]
    randomness = find_randomness(model, loss_fn, few) if first.is_random else Randomness()
    if randomness.draws:
        seen.append(observed(model, loss_fn, few, 1, noticing=True))
        require_unseeded(model, loss_fn, few, seen)
    require_apart(model, loss_fn, few, randomness, seen=seen)
    require_same_losses_in_half(model, loss_fn, examples, randomness)
    return replace(randomness, seen=seen[0])


def _reach(
    model: nn.Module, loss_fn: LossFunction, parameters: Mapping[str, Tensor], losses: Tensor
) -> tuple[Tensor, list[str]]:
    """Return losses, and the names of the parameters to which they give no gradient."""
    refuse_reentrant(losses)
    _warn_of_foreign(model, loss_fn, losses, parameters.values())
    with refusing_in_place():
        return losses.detach(), unreached(losses, parameters)


def listed(names: Sequence[str]) -> str:
    """Return up to eight names as text, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# Fault: a part outside of the model that was meant to be trained, such as the weights of a loss: it gets no gradient.
# Cost: a walk over the graph of a few examples' losses.
# Warns wrongly: of a generator that the loss does not detach, if only the discriminator is trained.
def _warn_of_foreign(model: nn.Module, loss_fn: LossFunction, losses: Tensor, parameters: Iterable[Tensor]) -> None:
    """Warn of parameters and tensors in the graph of the losses that require a gradient and are not the model's."""
    own = set(map(id, (*parameters, *model.parameters())))
    leaves = [leaf for leaf in sources([losses]) if id(leaf) not in own]
    if not leaves:
        return
    owner = getattr(loss_fn, "__self__", None)
    scope = Scope(model, owner.plain if isinstance(owner, OwnExamples) else loss_fn)
    names = scope.parameters | Snapshot(scope, scope.variables).tensors
    # A tensor without a name that is no parameter was made in the pass, such as inputs for a gradient penalty.
    kept = [leaf for leaf in leaves if id(leaf) in names or isinstance(leaf, nn.Parameter)]
    foreign = {shown(names.get(id(leaf), f"a parameter of shape {tuple(leaf.shape)}")) for leaf in kept}
    if foreign:
        what = f"loss_fn uses {listed(sorted(foreign))}, which PrivateGradient does not train, because the model does"
        remedy = "put all that is to be trained into one module, as the model; or detach them"
        warnings.warn(f"{what} not hold them: {remedy}", stacklevel=2)


# The configuration has these.
_PLAIN = frozenset({bool, str, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, set, list, tuple})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_TENSORS = frozenset({"_buffers", "_parameters"})


# Fault: a layer or branch that mixes examples and is switched on after the first check.
# Cost: a walk over modules and their attributes if their structure changes, and what is `_live` in each step; a change
#     costs one more `check_loss`.
# Refuses nothing by itself.
def configuration(model: nn.Module | Structure) -> tuple[object, ...]:
    """Return what decides how the modules compute; PrivateGradient checks the loss again if it changes.

    It sees each module's path, class, code, flags, texts and functions, hooks too; and whether a number, or an entry of
    a small tensor on the CPU, is zero. So a counter of steps changes nothing. `checks.variables` sees the rest.
    """
    fixed, live = structure_of(model).once(_configuration)
    return fixed, *[state_of(holder[name], DEPTH) for holder, name in live]


def _configuration(structure: Structure) -> tuple[tuple[object, ...], list[tuple[dict[Any, Any], Any]]]:
    """Return the part of the configuration that the structure decides, and the places of the other part."""
    found, live = list[object](), list[tuple[dict[Any, Any], Any]]()
    for path, module in structure.modules:
        owner, own = type(module), vars(module)
        found.append((path, owner, getattr(getattr(owner, "forward", None), "__code__", owner)))
        for name, value in own.items():
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind in _PLAIN:
                found.append((name, value))
            elif kind is int or kind is float:
                found.append((name, value != 0))
            elif kind not in _CONTAINERS:
                if (state := state_of(value, DEPTH)) is not None:
                    found.append((name, state))
                    live += [(own, name)] if _is_live(value) else []
            elif value and name in _HOOKS:  # by position: the keys of hooks are never used again
                found.append((name, *(state_of(hook, DEPTH) for hook in value.values())))
                live += [(value, key) for key, hook in value.items() if _is_live(hook)]
            elif value and name in _TENSORS:
                small = [key for key, x in value.items() if isinstance(x, Tensor) and nonzero(x) is not None]
                found.append((name, *small))
                live += [(value, key) for key in small]
    return tuple(found), live


def _is_live(value: object) -> bool:
    """Return whether what the configuration sees of a value may change while it stays the same object."""
    if isinstance(value, Tensor):
        return True
    return isinstance(value, FunctionType | MethodType | partial) and any(True for _ in references("", value))


# Faults: BatchNorm by hand, a mean over the batch, numbers by place; mixup behind a coin, of torch, numpy or Python; a
#     mean over the words that one draw masks.
# Cost: 5 forward passes of a few examples; 8 with dropout, 29 with other draws; fewer after passes that were `seen`.
# Refuses wrongly: no case is known; tied weights and augmentation of each example pass. It cannot pin the draws of
#     generators that the user holds (np.random.default_rng()).
@in_float32_too
def require_apart(
    model: nn.Module, loss_fn: LossFunction, few: Any, randomness: Randomness, *, seen: Sequence[Observed] = ()
) -> None:
    """Raise PrivacyError if the first or the last loss depends on the others; `seen`: passes with salts 0 and 1."""
    few, rows = few if seen else four_of(few), (0, FOUR - 1)
    copies = [rows_of(few, [row] * FOUR) for row in rows]

    def require_equal(together: Tensor, alike: Tensor, row: int) -> None:
        # Shapes and random draws are equal, so a loss of its own example only repeats, up to the last few bits.
        one, other = together[row], alike[row]
        far = 64 * torch.finfo(one.dtype).eps * (one.abs() + torch.finfo(one.dtype).tiny)
        if (other - one).abs() > far or other.isnan() != one.isnan():  # a mean of others may fill in what is missing
            raise _depends("a loss that changes with the other examples")

    is_compared = randomness.draws and not randomness.numbers  # with draws, as in training
    for salt, row in enumerate(rows if randomness.draws else ()):
        one = seen[salt] if seen else observed(model, loss_fn, few, salt)
        other = observed(model, loss_fn, copies[salt], salt)
        # If the examples decide how many numbers are drawn, as with packed sequences, masks follow their places.
        if (one.sizes, one.others) == (other.sizes, other.others):
            require_equal(one.losses, other.losses, row)
        else:
            is_compared = False
    for number in dict.fromkeys((*randomness.compared, *randomness.tried)):
        with without_randomness(model, randomness, number):
            try:
                if randomness.draws or not seen:
                    together = None if is_compared else losses_on_copies(model, loss_fn, few)
                else:
                    together = seen[0].losses
                both = [losses_on_copies(model, loss_fn, examples) for examples in copies]
            except Exception:
                if number in randomness.compared:
                    raise
                continue  # the model does not take such numbers
            for alike, row, examples in zip(both, rows, copies, strict=True):
                if together is not None:
                    require_equal(together, alike, row)
                if number in randomness.compared and _differ(model, loss_fn, examples, slice(1), alike):
                    raise _depends("a loss that changes with the number of examples or its place among them")


# Fault: a loss that ranks the batch, keeps its largest values, or counts others otherwise where a rare row is among
#     them, which a few examples may not show.
# Cost: 3 passes of <= 64 examples, 1 if losses are known, 6 with draws but dropout's; 5, 2, 10 if they differentiate.
# Refuses wrongly: no case is known.
@in_float32_too
def require_same_losses_in_half(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    randomness: Randomness,
    novel: Sequence[int] = (),
    *,
    known: Tensor | None = None,
) -> None:
    """Raise PrivacyError if losses depend on those of the `novel` rows; `known`: all losses, if only dropout draws."""
    rows = leading_rows(examples, _HALVED, novel)
    examples, half = rows_of(examples, rows), (len(rows) + 1) // 2
    for number in randomness.compared:
        with without_randomness(model, randomness, number):
            losses = losses_on_copies(model, loss_fn, examples) if known is None else known[rows]
            if _differ(model, loss_fn, examples, slice(half), losses[:half]):
                raise _depends("losses that change with the second half of the batch")
            # Rare rows are in the first half: what they change may be in the second.
            is_whole = known is None and not novel and half < len(rows)
            if is_whole and _differ(model, loss_fn, examples, slice(half, None), losses[half:]):
                raise _depends("losses that change with the first half of the batch")


def _differ(model: nn.Module, loss_fn: LossFunction, examples: Any, own: slice, losses: Tensor) -> bool:
    """Return whether losses of some examples alone differ from theirs among all, in double precision too."""

    def far(alone: Tensor, losses: Tensor) -> Tensor:
        differ = (alone - losses).abs() > 1e-2 * alone.abs() + torch.finfo(alone.dtype).eps
        return differ | (alone.isnan() != losses.isnan())

    few = map_examples(lambda leaf: leaf[own].clone(), examples)  # a loss may read memory by places
    with suppress(Exception), saved_tensors_hooks(_forgotten, _forgotten):
        if not far(losses_on_copies(model, loss_fn, few), losses).any():
            return False
    with Precision() as met:
        single = losses_on_copies(model, loss_fn, few)  # again with a graph, for a loss that differentiates
    if not (differ := far(single, losses)).any():
        return False
    try:  # losses that consist of rounding errors, such as the sine of large numbers, do not differ in double precision
        twin = copy.deepcopy(model).double()
        with InDouble():
            alone, together = (losses_on_copies(twin, loss_fn, map_examples(doubled, some)) for some in (few, examples))
        if far(alone, together[own][: len(losses)]).any():
            return True
        if met.half:  # it would round slight changes away
            return False
        moved = copy.deepcopy(model)  # in single precision, slight changes of weights then change these losses as much
        for seed in range(2):
            with seeded(seed), torch.no_grad():
                for weight in filter(Tensor.is_floating_point, moved.parameters()):
                    weight.mul_(1 + 1e-4 * torch.randn_like(weight))
            differ &= ~far(single, losses_on_copies(moved, loss_fn, few))
        return bool(differ.any())
    except Exception:  # for instance a loss that accepts single precision only
        return True


def _forgotten(_: object) -> Any:
    """Keep nothing for a backward pass: of half a batch, it would take half of a step's memory."""


def _depends(got: str) -> PrivacyError:
    remedy = (
        "make each loss depend on its own example: no statistics, ranks or means over the batch, and no random numbers "
        "by place; augment by augmentation.multiplicity with views >= 2, or in __getitem__, from that item alone"
    )
    return expected("loss_fn", "each loss", "to depend on its own example only", got, remedy)
