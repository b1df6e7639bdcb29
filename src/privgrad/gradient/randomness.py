"""Find the random draws of a forward pass, and disable them.

A check that compares two computations needs equal results from equal examples, so it runs without random draws. The
checks of `validation` and `engines.factored` use this file. The privacy guarantee rests on it as on these checks: code
that is disabled with the draws is not checked.
"""

import operator
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from privgrad.global_streams import numpy_and_python_states
from privgrad.gradient.batching import known_draws, refuse_own_generators
from privgrad.gradient.module_state import evaluating, seeded
from privgrad.gradient.probes import losses_on_copies
from privgrad.types import LossFunction, map_examples

# The random draws of a forward pass: none; dropout only; torch's other draws, such as noise; or more, such as numpy's.
Randomness = Literal["none", "dropout", "numbers", "other"]
_DRAWN = 0.7  # in place of a drawn number: x, -x and 1 - x differ, and rates below it drop and mask nothing


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


def require_unseeded(model: nn.Module, loss_fn: LossFunction, few: Any) -> None:
    """Raise PrivacyError if the forward pass seeds random draws itself, or draws from a torch.Generator of its own.

    The draws would be known, and would follow an example's place in the batch. So one example more would give others
    another mask of dropout, which anyone can compute. Under two seeds, no function that draws may meet one state.

    Seeds of numpy and Python are refused if the number of draws depends on the number of examples. BigBird draws
    under such a seed what all examples share.
    """
    (states, others), (other_states, same) = (_met(model, loss_fn, few, seed) for seed in (0, 1))
    if states & other_states:
        raise known_draws("the same random state after different ones")
    if any(map(operator.eq, others, same)):
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
    return {*dropout.states, _bytes(end)}, others


@contextmanager
def without_randomness(model: nn.Module, randomness: Randomness) -> Generator[None]:
    """Disable random draws, and as little else as possible, so that a check runs the code that trains.

    One constant replaces all numbers that torch draws. Numbers that depend on an example's place or on the number of
    examples, such as pairs x and -x, still do so then. Evaluation mode is the last resort, for draws of other
    libraries: it may enable caches or other branches.
    """
    with ExitStack() as stack:
        if randomness != "none":
            stack.enter_context(_without_dropout(model))
        if randomness == "numbers":
            stack.enter_context(_ConstantDraws())
        if randomness == "other":
            stack.enter_context(evaluating(model))
        yield


class _ConstantDraws(TorchDispatchMode):
    """A mode in which each operation that draws a tensor returns equal numbers, and the random streams stay.

    Integers get the first number that a fixed seed draws, so that they stay in their range.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; torch calls this for each one under the mode, also within compiled code and vmap."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with seeded(0):
            before = torch_states()
            result = func(*args, **(kwargs or {}))
            drawn = not torch.equal(before, torch_states())
        if drawn and isinstance(result, Tensor) and result.numel():
            result.fill_(_DRAWN if result.is_floating_point() else result.flatten()[0].clone())
        return result


class _Dropout(TorchFunctionMode):
    """A mode that notices dropout functions, and can make them return their input.

    Args:
        off: whether they return their input.
    Attributes:
        met: whether there is dropout: a layer of the model has a rate, or such a function was called.
        called: whether a function was called that drops a part of its input, or draws random numbers.
        states: of torch's random streams, at each call of a function that draws or may drop a part of its input.
    """

    def __init__(self, *, off: bool) -> None:
        super().__init__()
        self._off, self.met, self.called, self.states = off, False, False, set[bytes]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, with its dropout off or not; torch calls this for each function under the mode."""
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
            self.states.add(_bytes(before))
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
    before = [(layer, rate, value) for layer, rates in _dropping(model).items() for rate, value in rates.items()]
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


def _dropping(model: nn.Module) -> dict[nn.Module, dict[str, float]]:
    """Return the layers that have rates of dropout, with the rates by name."""
    found = dict[nn.Module, dict[str, float]]()
    for module in model.modules():
        name = type(module).__name__.lower()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) or "drop" in name or "stochasticdepth" in name:
            held = {rate: vars(module).get(rate) for rate in _RATES}
            if rates := {rate: value for rate, value in held.items() if isinstance(value, float) and value > 0}:
                found[module] = rates
    return found


def random_state() -> Tensor:
    """Return the states of the random streams of torch, numpy and Python, as bytes."""
    others = bytearray(repr(numpy_and_python_states()).encode())
    return torch.cat([torch_states(), torch.frombuffer(others, dtype=torch.uint8)])


def torch_states() -> Tensor:
    """Return the states of torch's random streams, on the CPU and on CUDA devices. `shared_draws` calls it too."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return torch.cat([state.cpu() for state in states])


def _bytes(state: Tensor) -> bytes:
    """Return a random state as a value that a set can hold."""
    return state.numpy().tobytes()
