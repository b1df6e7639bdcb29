"""Find the random draws of a forward pass, and disable them.

A check that compares two computations needs equal results from equal examples, so it runs without random draws.
"""

import operator
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from privgrad.gradient.functional import evaluating, known_draws, refuse_own_generators, seeded
from privgrad.gradient.probes import losses_on_copies, norm_of
from privgrad.gradient.reference import per_sample_gradients
from privgrad.gradient.refusals import refused
from privgrad.rng import numpy_and_python_states
from privgrad.types import LossFunction, count_examples, map_examples, part_of

# The random draws of a forward pass: none; dropout only; torch's other draws, such as noise; or more, such as numpy's.
Randomness = Literal["none", "dropout", "numbers", "other"]
_DRAWN = 0.7  # in place of a drawn number: x, -x and 1 - x differ, and rates below it drop and mask nothing
_TOLERANCE = 0.05  # the fast engine's in half precision; other random numbers change far more


# Fault: a mask or a layer to drop that one draw decides for the whole batch; the draws must then stay secret.
# Cost: a forward pass of a few examples; up to 4 if the model draws.
# Refuses nothing: such a model trains with secret draws. Numbers of numpy and Python count as shared in any case.
def share_draws(model: nn.Module, loss_fn: LossFunction, few: Any) -> bool:
    """Return whether the losses of a few examples depend on random numbers that the examples share."""
    own, more = _Draws(), _Draws()
    _losses(model, loss_fn, few, own)
    if not own.sizes and own.others is None:  # there are no draws, as in most models
        return False
    # Shared draws are as many for twice as many examples.
    _losses(model, loss_fn, map_examples(lambda leaf: torch.cat([leaf, leaf]), few), more)
    if own.others is not None and own.others == more.others:
        return True
    shared = [place for place, sizes in enumerate(zip_longest(own.sizes, more.sizes)) if sizes[0] == sizes[1]]
    if not shared:
        return False
    # A draw may decide nothing: BART draws a number for each layer also if its layerdrop is 0.
    low = _losses(model, loss_fn, few, _Draws(shared, 0.0))
    high = _losses(model, loss_fn, few, _Draws(shared, 1.0))
    return not torch.equal(low, high)


def _losses(model: nn.Module, loss_fn: LossFunction, examples: Any, draws: "_Draws") -> Tensor:
    """Return the losses of a pass under a fixed seed, in which a mode notes or replaces the draws."""
    with seeded(0):
        before = numpy_and_python_states()
        with draws:
            losses = losses_on_copies(model, loss_fn, examples, seed=None)
        after = numpy_and_python_states()
        draws.others = None if after == before else after
    return losses


class _Draws(TorchFunctionMode):
    """A mode that notes how many numbers each function draws, and can replace what some of them return."""

    def __init__(self, places: Collection[int] = (), number: float = 0.0) -> None:
        super().__init__()
        self._places = places  # of the calls to replace, among all calls that draw
        self._number = number  # what their tensors are filled with
        self.sizes = list[int]()  # the number of elements that each call returned
        self.others: Any = None  # the last states of numpy's and Python's random streams, if any was drawn from

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch_states()
        result: Any = func(*args, **(kwargs or {}))
        if torch.equal(before, torch_states()):
            return result
        place = len(self.sizes)
        drawn = cast("Any", result[0] if isinstance(result, tuple) else result)
        self.sizes.append(drawn.numel() if isinstance(drawn, Tensor) else 1)
        if place not in self._places or not isinstance(result, Tensor):
            return cast("Any", result)
        is_in_place = bool(args) and result is args[0]
        return result.fill_(self._number) if is_in_place else torch.full_like(result, self._number)


def find_randomness(model: nn.Module, loss_fn: LossFunction, few: Any) -> Randomness:
    """Return the kind of random draws that the forward pass makes in the modules' current modes."""
    with _without_dropout(model) as dropout:
        losses, draws = _drawn(model, loss_fn, few)
        if not draws:
            return "dropout" if dropout.met else "none"
        try:
            with _ConstantDraws():
                constant, draws = _drawn(model, loss_fn, few)
        except Exception:  # the model does not take such numbers
            return "other"
    return "other" if draws or bool((losses.isfinite() & ~constant.isfinite()).any()) else "numbers"


def _drawn(model: nn.Module, loss_fn: LossFunction, few: Any) -> tuple[Tensor, bool]:
    """Return the losses of a few examples, and whether the random streams advanced."""
    with seeded(0):
        before = random_state()
        losses = losses_on_copies(model, loss_fn, few, seed=None).detach()
        return losses, not torch.equal(before, random_state())


# Fault: `torch.manual_seed` in the forward pass, or a Generator of its own. Such draws are known, and follow the place
#     of an example in the batch: one example more gives others another mask of dropout, which anyone can compute.
# Cost: 2 forward passes of a few examples; 3 with draws of numpy or Python under a fixed seed.
# Refuses wrongly: a fixed random matrix that each forward pass draws again under its own seed.
def require_unseeded(model: nn.Module, loss_fn: LossFunction, few: Any) -> None:
    """Raise PrivacyError if the forward pass seeds random draws itself, or draws from a torch.Generator of its own."""
    states, others = _met(model, loss_fn, few, 0)
    other_states, same = _met(model, loss_fn, few, 1)
    if states & other_states:  # under two seeds, no function that draws may meet one state
        raise known_draws("the same random state after different ones")
    if any(map(operator.eq, others, same)):
        # Refused if the number of draws depends on that of examples; BigBird's, which all examples share, do not.
        _, more = _met(model, loss_fn, map_examples(lambda leaf: torch.cat([leaf, leaf]), few), 1)
        if any(one == other != third for one, other, third in zip(others, same, more, strict=True)):
            raise known_draws("numbers of numpy or Python under a fixed seed")


def _met(model: nn.Module, loss_fn: LossFunction, examples: Any, seed: int) -> tuple[set[bytes], tuple[Any, Any]]:
    """Return torch's random states that functions with draws meet under a seed, and the last states of the others."""
    with _Dropout(off=False) as dropout, seeded(seed):
        before = torch_states()
        losses_on_copies(model, loss_fn, examples, seed=None)
        end, others = torch_states(), numpy_and_python_states()
    if dropout.called and torch.equal(before, end):
        raise known_draws("draws that leave the random stream as it was")
    return {*dropout.states, end.numpy().tobytes()}, others


@contextmanager
def without_randomness(model: nn.Module, randomness: Randomness) -> Generator[None]:
    """Disable random draws, and as little else as possible, so that a check runs the code that trains."""
    with ExitStack() as stack:
        if randomness != "none":
            stack.enter_context(_without_dropout(model))
        if randomness == "numbers":
            # Numbers that depend on an example's place or on the number of examples, such as x and -x, still do so.
            stack.enter_context(_ConstantDraws())
        if randomness == "other":  # the last resort, because evaluation mode may enable caches or other branches
            stack.enter_context(evaluating(model))
        yield


class _ConstantDraws(TorchDispatchMode):
    """A mode in which each operation that draws a tensor returns equal numbers, and the random streams stay."""

    # Dispatch, not a mode of functions, because it also sees operations within compiled code and vmap.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with seeded(0):
            before = torch_states()
            result = func(*args, **(kwargs or {}))
            drawn = not torch.equal(before, torch_states())
        if drawn and isinstance(result, Tensor) and result.numel():
            # Integers get the first number that a fixed seed draws, so that they stay in their range.
            result.fill_(_DRAWN if result.is_floating_point() else result.flatten()[0].clone())
        return result


class _Dropout(TorchFunctionMode):
    """A mode that notices dropout functions, and can make them return their input."""

    def __init__(self, *, off: bool) -> None:
        super().__init__()
        self._off = off  # whether they return their input
        self.met = False  # whether there is dropout: a layer has a rate, or such a function was called
        self.called = False  # whether a function was called that drops a part of its input, or draws random numbers
        self.states = set[bytes]()  # of torch's random streams, at each call of a function that draws or may drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, drops = dict(kwargs or {}), func in _RECURRENT
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
            drops = bool(args[place] if len(args) > place else options.get(name))
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
# For functions with dropout inside: position and name of an argument, and its value without dropout.
_WITH_DROPOUT: dict[Any, tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    F.rrelu: (3, "training", False),
}
_RECURRENT: set[Any] = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_RATES = ("p", "drop_prob", "drop_path", "dropout")  # names of the dropout rate in modules


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[_Dropout]:
    """Disable dropout without changing the modules' modes; the value says whether there was any."""
    before: list[tuple[nn.Module, str, float]] = []  # the layers that have rates of dropout, with these rates
    for layer in model.modules():
        name = type(layer).__name__.lower()
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) or "drop" in name or "stochasticdepth" in name:
            held = [(rate, vars(layer).get(rate)) for rate in _RATES]
            before += [(layer, rate, value) for rate, value in held if isinstance(value, float) and value > 0]
    mode = _Dropout(off=True)
    mode.met = any(module.training for module, _, _ in before)  # some layers read the rate, and call no function above
    try:
        for module, rate, _ in before:
            setattr(module, rate, 0.0)
        with mode:
            yield mode
    finally:
        for module, rate, value in before:
            setattr(module, rate, value)


def random_state() -> Tensor:
    """Return the states of the random streams of torch, numpy and Python, as bytes."""
    others = bytearray(repr(numpy_and_python_states()).encode())
    return torch.cat([torch_states(), torch.frombuffer(others, dtype=torch.uint8)])


def torch_states() -> Tensor:
    """Return the states of torch's random streams, on the CPU and on CUDA devices."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat([state.cpu() for state in states])


def require_equal_alone(model: nn.Module, loss_fn: LossFunction, few: Any) -> None:
    """Raise UnsupportedModuleError if a row of the gradients depends on its place among the examples.

    vmap gives each row random numbers of its own, also where the forward pass draws them from a fixed seed. These
    numbers are public, so one example more would give all later rows other numbers that are known. The rows are
    compared with the same examples alone, with dropout off. If the forward pass draws other numbers from torch's random
    streams, which are secret, nothing can be compared.
    """
    with without_randomness(model, find_randomness(model, loss_fn, few)), seeded(0):
        before = random_state()
        together = per_sample_gradients(model, loss_fn, few)
        if not torch.equal(random_state(), before):
            return  # draws from torch's random streams differ by row, as they should
        for index in range(count_examples(few)):
            alone = per_sample_gradients(model, loss_fn, part_of(few, slice(index, index + 1)))
            whole = sum(norm_of(row) ** 2 for row in alone.values()) ** 0.5
            for name, row in alone.items():
                difference = norm_of(together[name][index] - row[0])
                # The comparison is false if values are not finite: such an example contributes zero anyway.
                if difference > _TOLERANCE * whole:
                    remedy = (
                        "draw what all examples share once, in __init__, and keep it as a buffer; draw what differs by "
                        "example from torch's global random stream"
                    )
                    condition = "not to come from a fixed seed in the forward pass"
                    got = f"a gradient of {name!r} that depends on its row"
                    raise refused("random numbers", condition, got, remedy)
