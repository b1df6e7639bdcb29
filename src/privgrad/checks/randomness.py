"""Find the random draws of a forward pass, and replace them by constants.

A check that compares two computations needs equal results from equal examples, whatever their places and their number.
So torch, numpy and Python draw one constant instead: a low one, then a high one, so that coins fall on both sides.
"""

import math
import operator
import random
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count, groupby, zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from privgrad.gradient.functional import (
    evaluating,
    known_draws,
    losses_on_copies,
    refuse_own_generators,
    seeded,
    streams_kept,
)
from privgrad.gradient.probes import each_gradient, norms_of, secret_seed
from privgrad.gradient.reference import per_sample_gradients
from privgrad.gradient.refusals import refused
from privgrad.rng import numpy_and_python_states
from privgrad.types import LossFunction, count_examples, map_examples, part_of

# In place of numbers between 0 and 1. A coin of any rate between the first two is heads under one, tails under the
# other. Under the third, rates below it drop and mask nothing. With more of them, each of up to five values is chosen.
_NUMBERS = (1e-4, 1 - 1e-4, 0.77)
_MORE = (0.1, 0.3, 0.5, 0.9)
_MOST = 10_000  # draws of a pass that are constant; a loop that draws until a number suits then gets others, and ends
_TOLERANCE = 0.05  # the fast engine's in half precision; other random numbers change far more


class Observed(NamedTuple):
    """A forward pass under a secret seed."""

    losses: Any  # or a function of them
    sizes: list[int]  # of torch's draws
    others: tuple[Any, Any]  # the last states of numpy and of Python
    drew: bool  # whether numpy or Python drew
    states: frozenset[bytes]  # of torch's streams at last and, if noticed, at each call of a function that draws
    is_random: bool  # whether anything drew or, if noticed, a layer has dropout


def observed(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Any,
    salt: int = 0,
    result: Callable[[Tensor], Any] = Tensor.detach,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    noticing: bool = False,
) -> Observed:
    """Compute losses, and note what draws; if functions are noticed, raise PrivacyError for draws without a trace."""
    found = list[Observed]()

    def noted(model: nn.Module, examples: Any) -> Tensor:
        before, first = torch_states(), numpy_and_python_states()
        dropout = _Dropout(off=False)
        with dropout if noticing else nullcontext(), Drawn() as drawn:
            losses = loss_fn(model, examples)
        end, others = torch_states(), numpy_and_python_states()
        if dropout.called and torch.equal(before, end):
            raise known_draws("draws that leave the random stream as it was")
        states, drew = frozenset((*dropout.states, end.numpy().tobytes())), others != first
        is_random = dropout.met or drew or not torch.equal(before, end)
        found.append(Observed(None, drawn.sizes, others, drew, states, is_random))
        return losses

    with seeded(secret_seed(salt)):
        losses = losses_on_copies(model, noted, examples, result, parameters, seed=None)
    return found[0]._replace(losses=losses)


# Fault: a mask or a layer to drop that one draw decides for the whole batch; the draws must then stay secret.
# Cost: a forward pass of a few examples if the model draws, and 2 more if their number says that draws are shared.
# Refuses nothing: such a model trains with secret draws. Numbers of numpy and Python count as shared in any case.
def share_draws(model: nn.Module, loss_fn: LossFunction, few: Any, seen: Observed | None = None) -> bool:
    """Return whether the losses of a few examples, `seen` before, depend on random numbers that the examples share."""
    one = seen or observed(model, loss_fn, few)
    # Shared draws are as many for twice as many examples.
    two = observed(model, loss_fn, map_examples(lambda leaf: torch.cat([leaf, leaf]), few))
    if one.drew and one.others == two.others:
        return True
    shared = {place for place, sizes in enumerate(zip_longest(one.sizes, two.sizes)) if sizes[0] == sizes[1]}
    if not shared:
        return False
    # A draw may decide nothing: BART draws a number for each layer also if its layerdrop is 0.
    low, high = (_losses_drawing(model, loss_fn, few, Drawn(number, shared)) for number in _NUMBERS[:2])
    return not torch.equal(low, high)


def _losses_drawing(model: nn.Module, loss_fn: LossFunction, few: Any, drawn: "Drawn") -> Tensor:
    with seeded(secret_seed()), drawn:
        return losses_on_copies(model, loss_fn, few, seed=None)


@dataclass(frozen=True)
class Randomness:
    """The random draws of a forward pass in the modules' current modes."""

    draws: bool = False  # whether there are any, those of dropout included
    # The constants that take the place of draws other than dropout, if any; NaN for a model that takes none.
    numbers: tuple[float, ...] = ()
    shared: bool = False  # whether examples share any, other than those of dropout
    seen: Observed | None = field(default=None, compare=False, repr=False)  # the first pass that a check saw

    @property
    def compared(self) -> tuple[float, ...]:
        """The numbers under which a comparison runs, one after the other; there is at least one."""
        return self.numbers or _NUMBERS[-1:]

    @property
    def tried(self) -> tuple[float, ...]:
        """More numbers, for a comparison of a few examples; the model may not take each of them."""
        return tuple(dict.fromkeys((*self.numbers, *_NUMBERS, *_MORE))) if self.numbers else ()


def find_randomness(model: nn.Module, loss_fn: LossFunction, few: Any) -> Randomness:
    """Return the random draws of a forward pass, and the constants under which comparisons say something."""
    with _Dropout(off=True) as dropout, seeded(secret_seed()):
        before = random_state()
        losses_on_copies(model, loss_fn, few, seed=None)
        drawn = random_state() != before
    if not drawn:
        return Randomness(dropout.met)
    telling, others = list[float](), list[float]()
    for number in _NUMBERS:
        try:
            with constant_draws(number):
                norm = _norm(model, loss_fn, few)
        except Exception:  # the model does not take such numbers
            continue
        # Gradients that are all zero say nothing: a mask of words may be empty under one constant.
        (telling if 0 < norm < math.inf else others).append(number)
        if len(telling) == 2:
            break
    return Randomness(True, tuple((telling or others)[:2]) or (math.nan,))


def _norm(model: nn.Module, loss_fn: LossFunction, few: Any) -> float:
    norms = list[float]()
    each_gradient(model, loss_fn, few, lambda _, grad: norms.extend(norms_of([grad])))
    return sum(norms)


# Fault: `torch.manual_seed` in the forward pass, or a Generator of its own. Such draws are known, and follow the place
#     of an example in the batch: one example more gives others another mask of dropout, which anyone can compute.
# Cost: nothing, after two passes that other checks need; one more with draws of numpy or Python under a fixed seed.
# Refuses wrongly: a fixed matrix that each pass draws again. It misses np.random.rand(999)[:len(x)] under a seed.
def require_unseeded(model: nn.Module, loss_fn: LossFunction, few: Any, seen: Sequence[Observed]) -> None:
    """Raise PrivacyError if passes of a few examples, with salts 0 and 1, show that the forward pass seeds draws."""
    one, other = seen
    if one.states & other.states:  # under two seeds, no function that draws may meet one state
        raise known_draws("the same random state after different ones")
    if any(map(operator.eq, one.others, other.others)):
        # Refused if the number of draws depends on that of examples; BigBird's, which all examples share, do not.
        twice = observed(model, loss_fn, map_examples(lambda leaf: torch.cat([leaf, leaf]), few), 1)
        alike = zip(one.others, other.others, twice.others, strict=True)
        if any(first == second != third for first, second, third in alike):
            raise known_draws("numbers of numpy or Python under a fixed seed")


@contextmanager
def without_randomness(model: nn.Module, randomness: Randomness, number: float) -> Generator[None]:
    """Disable dropout, and replace other draws by a constant, so that a check runs the code that trains."""
    with ExitStack() as stack:
        if randomness.draws:
            stack.enter_context(_Dropout(off=True))
        if math.isnan(number):  # the last resort, because evaluation mode may enable caches or other branches
            stack.enter_context(evaluating(model))
        elif randomness.numbers:
            stack.enter_context(constant_draws(number))
        yield


@contextmanager
def constant_draws(number: float) -> Generator[None]:
    """Let torch, numpy and Python draw this number, under any seed; integers are at this place of their range."""
    own, low, calls = _states(number), _states(_NUMBERS[0]), count()

    def begin(*_: Any, states: Any = own) -> None:
        np.random.set_state(states[0])
        random.setstate(states[1])

    def begun(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) > _MOST:
                return function(*args, **kwargs)
            is_subset = name == "choice" and kwargs.get("replace", args[2] if len(args) > 2 else True) is False
            is_order = is_subset or name in ("permutation", "sample", "shuffle")
            begin(states=low if is_order else own)  # high numbers would leave rows at their places
            result: Any = function(*args, **kwargs)
            if name in _INTEGERS and not is_subset and number not in _NUMBERS[:2]:
                function.__self__.seed(0)  # pyright: ignore[reportFunctionMemberAccess]
                result = _at_place([function(*args, **kwargs) for _ in range(64)], number)
            begin()
            if isinstance(result, np.ndarray) and result.size and not is_order and name not in _JOINT:
                result[...] = result.flat[0]
            return cast("Any", result)

        return call

    before: list[tuple[Any, str, Any]] = []
    modules: Any = (random, np.random)
    # Functions that a program has imported by name draw from the states alone.
    for module, source in zip(modules, (modules[0]._inst, modules[1].mtrand._rand), strict=True):
        names = cast("dict[str, Any]", vars(module)).items()
        found = [(name, value) for name, value in names if getattr(value, "__self__", None) is source]
        before += [(module, name, value) for name, value in (*found, ("seed", module.seed)) if "state" not in name]
    with streams_kept():
        begin()
        try:
            for module, name, value in before:
                setattr(module, name, begin if name == "seed" else begun(name, value))
            with Drawn(number):
                yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


# The states alone give the ends of a range.
_INTEGERS = ("choice", "choices", "randint", "randrange", "random_integers")
_JOINT = ("multinomial", "dirichlet", "multivariate_normal")  # draw several numbers that belong together


def _at_place(drawn: list[Any], number: float) -> Any:
    """Return one of many results, in which each value is the one at this place among all that occur."""
    first: Any = drawn[0]
    is_array, is_list = isinstance(first, np.ndarray), isinstance(first, list)
    values = [x for one in drawn for x in (one.flat if is_array else one)] if is_array or is_list else drawn
    with suppress(TypeError):  # values without an order
        values = [value for value, _ in groupby(sorted(values))]
    value = values[int(number * len(values))] if values else 0
    if is_array:
        first[...] = value
    return first if is_array else [value] * len(first) if is_list else value


@cache
def _states(number: float) -> tuple[Any, Any]:
    """Return states of numpy and Python that draw this number at first, and integers at this place of their range."""
    words = np.empty(624, np.uint32)
    # A number between 0 and 1 takes two words, and the first one decides. An integer takes one, and another one while
    # it is out of range. The others fall slowly, in both halves, so that the first one in range is the largest.
    words[::2] = (int(number * 2**16) << 16) + (0xFFFF if number > 0.5 else 0)
    words[1::2] = ((65535 - 210 * np.arange(312)) << 16) + 65535 - np.arange(312)
    # The tempering of the Mersenne Twister is undone, so that these words are its next outputs.
    words = words ^ (words >> 18)
    state = words = words ^ ((words << 15) & np.uint32(0xEFC60000))
    for _ in range(4):  # each time, seven more of the lower bits are right
        state = words ^ ((state << 7) & np.uint32(0x9D2C5680))
    held = (state ^ (state >> 11) ^ (state >> 22)).tolist()
    return ("MT19937", held, 0), (random.Random.VERSION, (*held, 0), None)


class Drawn(TorchDispatchMode):
    """A mode that notes how many numbers each of torch's operations draws, and can draw a constant instead."""

    def __init__(self, number: float | None = None, places: Collection[int] | None = None) -> None:
        super().__init__()
        self._number = number  # between 0 and 1
        self._places = places  # of the operations that draw the number, among all that draw; None: all
        self.sizes = list[int]()  # the number of elements that each operation drew

    # Dispatch, not a mode of functions, because it also sees operations within compiled code and vmap.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        place = len(self.sizes)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **options)
        is_fixed = self._number is not None and place < _MOST and (self._places is None or place in self._places)
        with seeded(0) if is_fixed else nullcontext():
            before = torch_states()
            result = func(*args, **options)
            drawn = not torch.equal(before, torch_states())
        if drawn:
            self.sizes.append(result.numel() if isinstance(result, Tensor) else 1)
        if drawn and is_fixed and isinstance(result, Tensor) and result.numel():
            named = enumerate(func._schema.arguments)
            given: dict[str, Any] = {
                a.name: args[i] if i < len(args) else options.get(a.name, a.default_value) for i, a in named
            }
            result.copy_(_constant(func._schema.name.removeprefix("aten::").rstrip("_"), given, result, self._number))
        return result


def _constant(name: str, given: dict[str, Any], drawn: Tensor, number: Any) -> Any:
    """Return what an operation draws if each number between 0 and 1 behind its result is this one."""
    low, high = given.get("low") or given.get("from") or 0, given.get("high", given.get("to"))
    if name == "bernoulli":
        rate = given.get("p")
        return number < torch.as_tensor(given["self"] if rate is None else rate, device=drawn.device)
    if name == "uniform":
        return torch.full_like(drawn, low + number * (given["to"] - low))
    if name.startswith(("randn", "normal")):
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        return mean + std * torch.full_like(drawn, 2**0.5 * float(torch.tensor(2 * number - 1).double().erfinv()))
    if name.startswith("rand") and high is not None:
        return torch.full_like(drawn, low + int(number * (int(high) - low)))
    if name == "randperm":
        return torch.arange(len(drawn)).flip(0)
    if name == "multinomial":
        if not given["replacement"] and given["num_samples"] > 1:
            return given["self"].topk(given["num_samples"]).indices
        choices = (given["self"] > 0).cumsum(-1)
        return (choices <= (number * choices[..., -1:]).floor()).sum(-1, keepdim=True).expand_as(drawn)
    # Other integers get the first that a fixed seed draws, so that they stay in their range.
    return torch.full_like(drawn, number) if drawn.is_floating_point() else drawn.flatten()[0].clone()


class _Dropout(TorchFunctionMode):
    """A mode that notices dropout functions, and can make them return their input."""

    def __init__(self, *, off: bool) -> None:
        super().__init__()
        self._off = off  # whether they return their input
        self.met = False  # whether there is dropout: a layer has a rate, or such a function was called
        self.called = False  # whether a function was called that drops a part of its input, or draws random numbers
        self.states = set[bytes]()  # of torch's random streams, at each call of a function that draws or may drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._off and func is Tensor.backward:  # it may compute a checkpointed part again, in this mode too
            given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False))
            given |= kwargs or {}
            with self:
                return torch.autograd.backward(args[0], given.pop("gradient", None), **given)
        if self._off and func not in _DROPOUTS and func not in _WITH_DROPOUT:
            return func(*args, **(kwargs or {}))
        options, drops = dict(kwargs or {}), False
        if func in _DROPOUTS:
            x, rate, training = (
                args[place] if len(args) > place else options.get(name, default)
                for place, (name, default) in enumerate((("input", None), ("p", 0.5), ("training", True)))
            )
            self.met = self.met or bool(rate and training)
            if self._off:
                return x
            drops = bool(training and 0 < rate < 1 and x.numel())
            self.called = self.called or drops
        elif func in _WITH_DROPOUT:
            place, name, off = _WITH_DROPOUT[func]
            if func in _RECURRENT:
                place += not isinstance(args[2], list)  # a packed sequence takes one argument more
            drops = bool(args[place] if len(args) > place else options.get(name))
            drops = drops and (func not in _RECURRENT or args[place + 1])
            self.met = self.met or drops
            if self._off:
                args = (*args[:place], off, *args[place + 1 :]) if len(args) > place else args
                options |= {} if len(args) > place else {name: off}
        if self._off:
            return func(*args, **options)
        refuse_own_generators(args, options)
        before = torch_states()
        result = func(*args, **options)
        draws = not torch.equal(before, torch_states())
        self.called = self.called or draws
        if draws or drops:
            self.states.add(before.numpy().tobytes())
        return result


_DROPOUTS: set[Any] = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
}
_RECURRENT: set[Any] = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
# For functions with dropout inside: position and name of an argument, and its value without dropout.
_WITH_DROPOUT: dict[Any, tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
    **dict.fromkeys(_RECURRENT, (5, "dropout", 0.0)),
}


def random_state() -> tuple[bytes, Any]:
    """Return the states of the random streams of torch, numpy and Python, for comparisons."""
    return torch_states().numpy().tobytes(), numpy_and_python_states()


def torch_states() -> Tensor:
    """Return the states of torch's random streams, on the CPU and on CUDA devices."""
    if not torch.backends.cuda.is_built():  # this is read around each function
        return torch.get_rng_state()
    return torch.cat([torch.get_rng_state(), *(state.cpu() for state in torch.cuda.get_rng_state_all())])


def streams() -> Callable[[], None]:
    """Return a function that sets the global random streams of torch, numpy and Python back to where they are now."""
    of_numpy, of_python, of_torch = np.random.get_state(), random.getstate(), torch.get_rng_state()
    of_devices = torch.cuda.get_rng_state_all()

    def set_back() -> None:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        torch.cuda.set_rng_state_all(of_devices)

    return set_back


def require_equal_alone(model: nn.Module, loss_fn: LossFunction, few: Any) -> None:
    """Raise UnsupportedModuleError if a row of the gradients, with dropout off, depends on its place."""
    # vmap gives each row numbers of its own, also of a fixed seed: these are public, and one example more would move
    # all later rows.
    randomness = find_randomness(model, loss_fn, few)
    with without_randomness(model, randomness, randomness.compared[0]), seeded(secret_seed()):
        before = random_state()
        together = per_sample_gradients(model, loss_fn, few)
        if random_state() != before:
            return  # draws from torch's random streams differ by row, as they should
        for index in range(count_examples(few)):
            alone = per_sample_gradients(model, loss_fn, part_of(few, slice(index, index + 1)))
            whole = math.hypot(*norms_of(list(alone.values())))
            differences = norms_of([together[name][index] - row[0] for name, row in alone.items()])
            for name, difference in zip(alone, differences, strict=True):
                # The comparison is false if values are not finite: such an example contributes zero anyway.
                if difference > _TOLERANCE * whole:
                    remedy = "draw what is shared once, and keep it as a buffer; draw all else from torch's stream"
                    got = f"a gradient of {name!r} that depends on its row"
                    raise refused("random numbers", "not to come from a fixed seed in the forward pass", got, remedy)
