"""What the forward pass draws is secret, and what it leaves behind is undone."""

import hashlib
import operator
import pickle
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_plan
from privgrad.checks.model_and_loss import configuration
from privgrad.checks.randomness import require_equal_alone
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import parameters_kept, streams_kept
from privgrad.gradient.reference import Vmap
from privgrad.gradient.secret_draws import secret_draws
from privgrad.rng import derived_key, set_states, torch_state

KEY = bytes(range(32))


class Forward(nn.Module):
    """A linear layer behind a function of the inputs, shape (B, 5)."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 5) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unsqueeze(-1).expand(-1, -1, 4)
        return self.last(self.inner(steps, steps, steps, need_weights=False)[0].mean(1))


class Recurs(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(1, 4, layers, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.unsqueeze(-1))[0][:, -1])


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)),
    "a function": lambda: Forward(lambda x: F.dropout(x, 0.25)),
    "channels": lambda: Forward(lambda x: F.dropout1d(x.unsqueeze(-1), 0.5).squeeze(-1)),
    "alpha dropout": lambda: Forward(lambda x: F.alpha_dropout(x, 0.5, training=True)),
    "attention": Attends,
    "a recurrent layer": lambda: Recurs(2),
}


class Seen(TorchDispatchMode):
    """The operations that reach torch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


def test_a_key_gives_torchs_generator_its_whole_state():
    generator, same = torch.Generator(), random.Random()
    generator.set_state(torch_state(KEY))
    words = np.frombuffer(hashlib.shake_256(KEY).digest(4 * 624), np.uint32)
    same.setstate((3, (*words.tolist(), 624), None))
    drawn = torch.empty(2000, dtype=torch.int64).random_(0, 2**16, generator=generator)
    assert drawn.tolist() == [same.getrandbits(32) % 2**16 for _ in range(2000)]


def test_each_bit_of_a_key_changes_the_numbers_of_each_library():
    found = [set[Any](), set[Any](), set[Any]()]
    for bit in range(256):
        with secret_draws((int.from_bytes(KEY) ^ (1 << bit)).to_bytes(32)):
            for known, drawn in zip(
                found, (torch.rand(4).tolist(), np.random.bytes(16), random.randbytes(16)), strict=True
            ):
                known.add(tuple(drawn))
    assert [len(known) for known in found] == [256] * 3
    assert not found[1] & found[2]


def states() -> tuple[bytes, bytes, object]:
    """The states of the global generators of torch, numpy and Python."""
    return torch.get_rng_state().numpy().tobytes(), pickle.dumps(np.random.get_state()), random.getstate()


def test_the_forward_pass_of_a_step_has_the_state_of_its_key():
    """No seed of 32 bits leads to it. numpy and Python draw from states of the key, too."""
    model, met = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)), list[tuple[bytes, bytes, object]]()
    plan = make_plan(seed=0)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    batch = first_batch(plan, make_data())

    def meet(*_: Any) -> None:
        met.append(states())
        np.random.rand()
        random.random()

    model.register_forward_pre_hook(meet)
    private_grad(batch)
    key = derived_key(private_grad._dropout_stream.key(0, 40)[:32], "0")
    with streams_kept():
        set_states(key)
        expected = states()
    assert expected[0] == torch_state(key).numpy().tobytes()
    assert expected in met


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("normals", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_a_step_neither_follows_nor_changes_the_random_numbers_of_numpy_and_python(normals: int, engine: Any):
    """numpy draws normals in pairs, and keeps the second one for its next call."""
    plan, drawn = make_plan(sample_rate=0.5, expected_batch_size=16), list[tuple[float, float]]()
    model = nn.Linear(5, 3)
    private_grad, batches = pg.PrivateGradient(model, loss_fn, plan, engine=engine), plan.batches(make_data())
    model.register_forward_pre_hook(lambda *_: drawn.append((np.random.randn(), random.gauss(0, 1))))
    for _ in range(4):
        private_grad(next(batches))
    before, after = list[Any](), list[Any]()
    for _ in range(2):  # steps without a check, whose draws are those of the gradient
        random.seed(0)
        np.random.seed(0)
        before = [(np.random.randn(), random.gauss(0, 1)) for _ in range(normals)]
        kept = states()
        private_grad(next(batches))
        assert states() == kept
        after.append(drawn[-1])
        assert all(map(operator.ne, drawn[-1], (np.random.randn(), random.gauss(0, 1))))
    assert len({*before, *after}) == normals + 2


def test_a_generator_that_a_program_gives_to_numpy_is_left_in_place():
    chosen, before = np.random.PCG64(0), get_bit_generator()
    state = np.random.get_state(legacy=False)
    try:
        set_bit_generator(chosen)
        np.random.randn()
        kept, plan = np.random.get_state(legacy=False), make_plan()
        pg.PrivateGradient(nn.Linear(5, 3), loss_fn, plan)(first_batch(plan, make_data()))
        assert get_bit_generator() is chosen
        assert np.random.get_state(legacy=False) == kept
    finally:
        set_bit_generator(before)
        np.random.set_state(state)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", DRAWING)
def test_no_draw_of_a_released_gradient_comes_from_a_short_seed(name: str, engine: Any):
    """torch's kernel takes 31 bits from the generator for a whole mask."""
    torch.manual_seed(0)
    plan = make_plan(seed=0)
    private_grad, batches = pg.PrivateGradient(DRAWING[name](), loss_fn, plan, engine=engine), plan.batches(make_data())
    private_grad(next(batches))  # its checks draw outside of the step
    with Seen() as seen:
        private_grad(next(batches))
    assert torch.ops.aten.rand.generator in seen.functions
    assert not {torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p} & seen.functions


def test_replaced_draws_have_their_distributions():
    with secret_draws(KEY):
        kept = torch.empty(100_000, dtype=torch.float64).bernoulli_(0.3)
        waits = torch.empty(100_000).exponential_(2.0)
    assert stats.binomtest(int(kept.sum()), kept.numel(), 0.3).pvalue > 1e-6
    assert stats.kstest(waits.numpy(), stats.expon(scale=0.5).cdf).pvalue > 1e-6
    assert set(kept.tolist()) == {0.0, 1.0}
    assert waits.min() > 0


def test_operations_that_draw_nothing_do_not_pass_through_python():
    layers = nn.Sequential(nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(6, 3))

    def calls() -> int:
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            layers(torch.ones(4, 1, 5)).sum().backward()
        finally:
            sys.setprofile(None)
        return count

    calls()
    ordinary = calls()
    with secret_draws(KEY):
        assert calls() == ordinary


def drawing_operations() -> dict[str, Any]:
    """All operations that torch tags as drawing from a random stream, by name."""
    found = dict[str, Any]()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and hasattr(torch.ops.aten, base):
            operation = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if operation is not None and torch.Tag.nondeterministic_seeded in operation.tags:
                found[f"{base}.{overload}" if overload else base] = operation
    return found


# They need another device, or get the numbers from outside; or they draw nothing: one chooses a kernel, the other
# takes no dropout.
NOT_DRAWN_ON_THE_CPU = re.compile(
    r"_cudnn|_lstm_mps|miopen|_triton|_flash_attention_forward|_efficient_attention|_fused_dropout|_for_mps"
    r"|_fill_mem_eff|_flash_attention(\.quantized)?$|_cudnn_attention|_fused_attention|_nested_tensor|_fused_sdp_choice"
    r"|_flash_attention_for_cpu"
)
ROWS, WIDTH = 64, 16
VALUES: dict[str, Any] = {
    **dict.fromkeys(("p", "dropout_p", "dropout"), 0.5),
    **dict.fromkeys(("train", "training"), True),
    "size": [ROWS, WIDTH],
    "high": 2**20,
    "low": 0,
    "to": 2**20,
    "from": 0,
    "n": 1000,
    "num_samples": WIDTH,
    "lambd": 1.0,
    "mean": 0.0,
    "std": 1.0,
    "replacement": False,
    "is_causal": False,
    "median": 0.0,
    "sigma": 1.0,
    "num_layers": 2,
    "has_biases": False,
    "bidirectional": False,
    "batch_first": True,
}


def argument(operation: str, name: str, kind: str) -> Any:
    """Return a value for an argument of an operation with which it draws many numbers."""
    if "Tensor" not in kind:
        return VALUES[name]
    if name in ("query", "key", "value"):
        return torch.ones(2, 2, WIDTH, WIDTH)
    if operation.startswith(("lstm", "gru", "rnn")):
        gates, state = {"l": 4, "g": 3, "r": 1}[operation[0]], torch.zeros(2, ROWS, WIDTH)
        return {
            "input": torch.ones(ROWS, 5, WIDTH),
            "data": torch.ones(ROWS * 5, WIDTH),
            "batch_sizes": torch.full((5,), ROWS),
            "hx": [state, state] if gates == 4 else state,
            "params": [torch.eye(WIDTH).repeat(gates, 1)] * 4,
        }[name]
    if name == "high":
        return torch.tensor(2**20)
    if operation.startswith(("randint", "random")):
        return torch.zeros(ROWS, WIDTH, dtype=torch.long)
    if name == "out":
        integers = torch.zeros(1000 if "perm" in operation else (ROWS, WIDTH), dtype=torch.long)
        return integers if "perm" in operation or "multi" in operation else torch.zeros(ROWS, WIDTH)
    if name in ("out0", "out1"):
        return torch.zeros(ROWS, WIDTH, dtype=torch.bool if name == "out1" else None)
    if operation.startswith("rrelu"):
        return -torch.ones(ROWS, WIDTH)
    if name == "count":
        return torch.full((ROWS, WIDTH), 50.0)
    return torch.full((ROWS, WIDTH), 0.5)


@pytest.mark.parametrize("name", drawing_operations())
def test_each_operation_that_draws_takes_its_numbers_from_the_whole_state(name: str):
    """Two states that begin with the same words give the same numbers at first, and then others."""
    if NOT_DRAWN_ON_THE_CPU.search(name):
        return
    operation = drawing_operations()[name]
    kinds = {one.name: str(one.type) for one in operation._schema.arguments}
    given = [one for one in kinds if one in VALUES or ("Tensor" in kinds[one] and "Optional" not in kinds[one])]

    def drawn(state: Tensor) -> bytes:
        values = {one: argument(name, one, kinds[one]) for one in given}
        with secret_draws(KEY):
            torch.default_generator.set_state(state)
            result = operation(**values, **{name: None for name in ("generator", "names") if name in kinds})
        found = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
        return b"".join(
            x.contiguous().numpy().tobytes()
            for x in (*found, *(values.get(n) for n in ("self", "noise")))
            if isinstance(x, Tensor)
        )

    state, other = torch_state(KEY), torch_state(KEY[::-1])
    other[: 24 + 8 * 300] = state[: 24 + 8 * 300]  # 300 of 624 words
    assert drawn(state) == drawn(state)
    assert drawn(state) != drawn(other)


def test_the_random_streams_of_the_program_are_left_alone():
    plan = make_plan()
    private_grad = pg.PrivateGradient(DRAWING["a layer"](), loss_fn, plan)
    state = torch.get_rng_state()
    private_grad(first_batch(plan, make_data()))
    assert torch.equal(torch.get_rng_state(), state)


def _seeds(x: Tensor) -> Tensor:
    torch.manual_seed(42)
    return F.dropout(x, 0.5)


def _seeds_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(42)
        return F.dropout(x, 0.5)


def _seeds_some(x: Tensor) -> Tensor:
    return F.dropout(_seeds_apart(x), 0.5)


def _seeds_attention(x: Tensor) -> Tensor:
    x = x.unsqueeze(-1)
    with torch.random.fork_rng():
        torch.manual_seed(42)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).squeeze(-1)


class _SeedsLayer(nn.Module):
    """A layer whose functions drop values, under a seed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(42)
            return self.layer(x)


class DropPath(nn.Module):
    """A layer that skips examples by a mask of its own, under a seed."""

    drop_prob: float

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(42)
            return x * torch.empty(len(x), 1).bernoulli_(1 - self.drop_prob)


SEEDING = [
    *(_seeds, _seeds_apart, _seeds_some, _seeds_attention),
    *(_SeedsLayer(Attends()), _SeedsLayer(Recurs(2)), DropPath()),
]


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("function", SEEDING)
def test_a_forward_pass_that_seeds_its_dropout_is_refused(function: Any, engine: Any):
    plan = make_plan()
    width = function(torch.zeros(1, 5)).shape[1]
    private_grad = pg.PrivateGradient(Forward(function, width), loss_fn, plan, engine=engine)
    with pytest.raises(pg.PrivacyError, match=r"random draws to follow.*leave torch\.manual_seed out"):
        private_grad(first_batch(plan, make_data()))


@pytest.mark.parametrize("make", [lambda: Recurs(1), lambda: _of_zeros(DRAWING["a layer"]())])
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_dropout_that_changes_no_loss_is_accepted(make: Callable[[], nn.Module]):
    plan = make_plan()
    pg.PrivateGradient(make(), loss_fn, plan)(first_batch(plan, make_data()))


def _of_zeros(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def _features_of_a_seed(x: Tensor) -> Tensor:
    return torch.cos(x @ torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))


def _features_of_a_seed_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.cos(x @ torch.randn(5, 8))


def test_vmap_refuses_numbers_from_a_fixed_seed_which_it_would_draw_for_each_row():
    """Also where the checks of the first batch have not seen them."""
    engine = Vmap(Forward(_features_of_a_seed_apart, 8), loss_fn, check=require_equal_alone)
    with pytest.raises(pg.UnsupportedModuleError, match=r"not to come from a fixed seed.*keep it as a buffer"):
        engine(make_data()[:])
    with pytest.raises(pg.PrivacyError, match=r"random draws to follow.*got a torch\.Generator"):
        Vmap(Forward(_features_of_a_seed, 8), loss_fn, check=require_equal_alone)(make_data()[:])


_HELD = torch.Generator().manual_seed(0)


def _fixed_apart(size: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand(size)


def _fixed_among_others(size: int) -> Tensor:
    torch.rand(())
    return _fixed_apart(size)


def _fixed_state(size: int) -> Tensor:
    before = torch.get_rng_state()
    torch.set_rng_state(_STATE)
    drawn = torch.rand(size)
    torch.set_rng_state(before)
    return drawn


def _fixed_numpy(size: int) -> Tensor:
    np.random.seed(0)
    return torch.from_numpy(np.random.rand(size))


def _fixed_python(size: int) -> Tensor:
    random.seed(0)
    return torch.tensor([random.random() for _ in range(size)])


_STATE = torch.get_rng_state()
FIXED: dict[str, Callable[[int], Tensor]] = {
    "a new generator": lambda size: torch.rand(size, generator=torch.Generator().manual_seed(0)),
    "a generator that is held": lambda size: torch.rand(size, generator=_HELD),
    "a generator in place": lambda size: torch.empty(size).uniform_(generator=_HELD),
    "a generator by position": lambda size: torch.poisson(torch.full((size,), 0.01), _HELD),
    "an initialization": lambda size: nn.init.uniform_(torch.empty(size), generator=_HELD),
    "seeded apart": _fixed_apart,
    "seeded among others": _fixed_among_others,
    "a state": _fixed_state,
    "numpy": _fixed_numpy,
    "Python": _fixed_python,
}


def _mirrors(drawn: Callable[[int], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss that mirrors a thousandth of the rows, which no comparison of values finds."""

    def mirrored(model: nn.Module, batch: Any) -> Tensor:
        x, target = batch
        return loss_fn(model, (torch.where(drawn(len(x))[:, None] < 1e-3, -x, x), target))

    return mirrored


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", FIXED)
def test_numbers_that_anyone_can_compute_are_refused_for_each_row(name: str, engine: Any):
    """One more example would give other numbers to all others, which are known."""
    plan = make_plan(seed=0)
    private_grad = pg.PrivateGradient(nn.Linear(5, 3), _mirrors(FIXED[name]), plan, engine=engine)
    with pytest.raises(pg.PrivacyError, match=r"random draws to follow.*leave torch\.manual_seed out"):
        private_grad(first_batch(plan, make_data()))


def _shared_by_numpy(x: Tensor) -> Tensor:
    """As BigBird chooses its random blocks in training."""
    np.random.seed(0)
    return x[:, np.random.permutation(5)]


ACCEPTED: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy's for all": _shared_by_numpy,
    "torch's global generator": lambda x: x + 0 * torch.randn(x.shape, generator=torch.default_generator),
    "dropout": nn.Dropout(0.5),
}


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_secret_draws_and_permutations_that_all_examples_share_are_accepted(name: str, engine: Any):
    plan = make_plan(seed=0)
    pg.PrivateGradient(Forward(ACCEPTED[name]), loss_fn, plan, engine=engine)(first_batch(plan, make_data()))


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "Python"])
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_vmap_gives_each_example_numbers_of_its_own_from_numpy_and_python(draw: Callable[[], float]):
    """The examples that are computed at once would share them, and one more example moves another to the next part."""
    rows = Vmap(Forward(lambda x: x * draw()), loss_fn)((torch.ones(6, 5), torch.zeros(6, dtype=torch.int64)))
    assert len({float(norm) for norm in rows["last.weight"].norms()}) == 6


def test_features_of_a_seed_are_the_same_for_all_examples_in_the_fast_engine_and_as_a_buffer():
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = nn.Buffer(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cos(x @ self.drawn))

    torch.manual_seed(0)
    model = Forward(_features_of_a_seed, 8)
    remedied = Buffered()
    remedied.last.load_state_dict(model.last.state_dict())
    fast, reference = Factored(model, loss_fn)(make_data()[:]), Vmap(remedied, loss_fn)(make_data()[:])
    for name, factor in reference.items():
        assert torch.allclose(fast[name].dense(), factor.dense(), atol=1e-5)


def test_gradients_that_a_loss_leaves_are_undone():
    def adversarial(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().requires_grad_()
        loss_fn(model, (x, batch[1])).sum().backward()
        return loss_fn(model, (x.detach() + 0.1 * x.grad.sign(), batch[1]))

    plan, model = make_plan(), nn.Linear(5, 3)
    model.bias.grad = held = torch.ones(3)
    pg.PrivateGradient(model, adversarial, plan)(first_batch(plan, make_data()))
    assert model.weight.grad is None
    assert model.bias.grad is held
    assert torch.equal(held, torch.ones(3))


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("way", ["data", "numpy"])
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_a_write_to_a_frozen_parameter_stays_at_no_step(way: str, engine: Any):
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.rows = nn.Linear(5, 3), nn.Parameter(torch.zeros(20, 5), requires_grad=False)
            self.begins, self.calls = 10**9, 0

        def forward(self, x: Tensor) -> Tensor:
            if self.begins == 0:
                if way == "data":
                    self.rows.data[:1] = x.detach()[:1]
                else:
                    self.rows.detach().numpy()[:1] = x.detach()[:1].numpy()
            return self.last(x)

    model, plan = Bank(), make_plan(seed=0)
    private_grad, batches = pg.PrivateGradient(model, loss_fn, plan, engine=engine), plan.batches(make_data())
    for _ in range(4):
        private_grad(next(batches))
    object.__setattr__(model, "begins", 0)
    private_grad._checked.append(  # as if the configuration had not changed
        (("last.weight", "last.bias"), configuration(model))
    )
    with pytest.raises(pg.UnsupportedModuleError, match="parameters not to be written by the forward pass, got rows"):
        private_grad(next(batches))
    assert torch.equal(model.rows, torch.zeros(20, 5))


def test_frozen_parameters_with_values_that_are_not_finite_are_no_writes():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False).fill_(torch.nan)
    with parameters_kept(model):
        pass
