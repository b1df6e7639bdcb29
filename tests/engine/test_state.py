"""Layers that keep something from call to call: in an argument, in an attribute, or in evaluation mode only."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn

import privgrad as pg
from privgrad.engine.factored import Factored
from privgrad.engine.units import Watched
from privgrad.gradient.functional import Structure, named_modules
from privgrad.gradient.reference import Vmap

pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
    pytest.mark.filterwarnings("ignore:the forward pass changed"),
]


class Cache:
    """Keys of the calls so far, as transformers' DynamicCache has them."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = [{}]

    def update(self, x: Tensor) -> Tensor:
        held = self.layers[0]
        held["keys"] = torch.cat([held["keys"], x], 1) if "keys" in held else x
        return held["keys"]


class Attends(nn.Module):
    """Owns a parameter. If it is listed, it is taken whole; if it is looped, vmap fails after the cache was filled."""

    def __init__(self, *, looped: bool, listed: bool) -> None:
        super().__init__()
        self.sink, self.inner, self.looped = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), looped
        self.listed = listed  # repeated in a way that the fast engine cannot attribute to examples

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        keys = x + (torch.cat([self.sink[None, None]] * len(x)) if self.listed else self.sink)
        keys = keys if cache is None else cache.update(keys)
        if self.looped:
            assert keys.detach().abs().max().item() >= 0
        return self.inner((x @ keys.mT).softmax(-1) @ keys)


class Decoder(nn.Module):
    """Fills a cache in training too (GPT-OSS), or in evaluation mode only (Mamba, RWKV)."""

    def __init__(self, *, looped: bool = True, training_too: bool = True, listed: bool = False) -> None:
        super().__init__()
        self.config, self.training_too = SimpleNamespace(use_cache=True), training_too
        self.attention, self.head = Attends(looped=looped, listed=listed), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        cached = self.config.use_cache and (self.training_too or not self.training)
        return self.head(self.attention(x, Cache() if cached else None).sum(1))


def texts() -> Tensor:
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def assert_right(engine: Any, model: nn.Module, x: Tensor) -> None:
    found = engine(model, losses_of)(x)
    for name, rows in one_by_one(copy.deepcopy(model), x).items():
        assert_equal_to_loop(found[name], rows, 1e-8)


def refusal_of(model: nn.Module, x: Tensor) -> str | None:
    """What the factored engine says; None if it takes the model, and is right."""
    try:
        Factored(model, losses_of)(x)
    except pg.UnsupportedModuleError as error:
        return str(error)
    assert_right(Factored, model, x)
    return None


@pytest.mark.parametrize("training_too", [True, False])
@pytest.mark.parametrize("looped", [True, False])
def test_a_cache_is_switched_off_for_the_fast_engine_only(looped: bool, training_too: bool):
    torch.manual_seed(0)
    model, x = Decoder(looped=looped, training_too=training_too).double(), texts()
    for engine in (Factored, Vmap):
        assert_right(engine, model, x)
        assert model.config.use_cache


@pytest.mark.parametrize("looped", [True, False])
def test_a_layer_may_fill_an_argument_for_the_batch(looped: bool):
    """Whatever decides to make it: here no configuration that the engine knows."""
    torch.manual_seed(0)
    model, x = Decoder(looped=looped).double(), texts()
    model.config = SimpleNamespace(use_cache=1)
    assert_right(Factored, model, x)


@pytest.mark.parametrize("looped", [True, False])
def test_a_layer_that_fills_an_argument_is_taken_with_the_module_that_makes_it(looped: bool):
    torch.manual_seed(0)
    model, x = Decoder(looped=looped, listed=True).double(), texts()
    model.config = SimpleNamespace(use_cache=1)
    with pytest.warns(UserWarning, match="the whole model.*arguments of 'attention' must stay unchanged"):
        assert_right(Factored, model, x)


class CachedWhenEvaluated(nn.Module):
    """Is handed one tensor more in evaluation mode, as RWKV's layers are."""

    def __init__(self, *, state: bool) -> None:
        super().__init__()
        self.config, self.state = SimpleNamespace(use_cache=True), state
        self.shift, self.head = Shifts(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        cached = self.config.use_cache and not self.training
        state = x.new_zeros(len(x), 4) if cached else None
        output, _ = self.shift(x, state, returns=cached and self.state)
        return self.head(output.sum(1))


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, state: Tensor | None, returns: bool) -> tuple[Tensor, Tensor | None]:
        before = torch.zeros_like(x[:, 0]) if state is None else state
        output = torch.tanh(x * self.mix + torch.cat([before[:, None], x[:, :-1]], 1) * (1 - self.mix))
        return output, output[:, -1] if returns else None


@pytest.mark.parametrize("state", [True, False])
def test_other_tensors_in_evaluation_mode_end_in_no_bare_error(state: bool):
    torch.manual_seed(0)
    model, x = CachedWhenEvaluated(state=state).double(), texts()
    # An audit in training mode sees no cache, and has nothing to refuse.
    refusal = refusal_of(model, x)
    assert refusal is None or re.search(r"shift'?.*use engine='vmap'", refusal)
    assert_right(Vmap, model, x)
    model.config.use_cache = False
    assert_right(Factored, model, x)


class Keeps(nn.Module):
    """Keeps a state in an attribute (RecurrentGemma): of the batch when it is set before, of an example if not."""

    def __init__(self, *, looped: bool, listed: bool) -> None:
        super().__init__()
        self.gain, self.looped, self.listed = nn.Parameter(torch.rand(4)), looped, listed
        self.state: Tensor | float | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.state is None else self.state
        gain = torch.cat([self.gain[None, None]] * len(x)) if self.listed else self.gain
        output = torch.tanh(x * gain + before)
        # A number, which vmap cannot know.
        self.state = output.detach().mean().item() if self.looped else output.detach()
        return output


class Recurs(nn.Module):
    def __init__(self, *, looped: bool, prepared: bool = False, twice: bool = False, listed: bool = False) -> None:
        super().__init__()
        self.keeps, self.head = Keeps(looped=looped, listed=listed), nn.Linear(4, 3)
        self.prepared, self.twice = prepared, twice

    def forward(self, x: Tensor) -> Tensor:
        self.keeps.state = x.new_ones(len(x), 1, 1) if self.prepared else None
        x = self.keeps(x)
        return self.head((self.keeps(x) if self.twice else x).sum(1))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("looped", [True, False])
def test_a_state_in_an_attribute_passes_between_no_examples(looped: bool, listed: bool):
    torch.manual_seed(0)
    model, x = Recurs(looped=looped, listed=listed).double(), texts()
    for engine in (Factored, Vmap):
        assert_right(engine, model, x)
        assert model.keeps.state is None
    changed = x.clone()
    changed[:3] = 100.0
    one, other = (Factored(model, losses_of)(z)["keeps.gain"].dense()[3:] for z in (x, changed))
    torch.testing.assert_close(one, other)


def test_a_state_of_the_whole_batch_that_is_needed_again_is_refused():
    torch.manual_seed(0)
    model, x = Recurs(looped=True, twice=True).double(), texts()
    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example"):
        Factored(model, losses_of)(x)
    assert_right(Vmap, model, x)
    assert model.keeps.state is None


def test_a_state_of_each_example_may_be_needed_again():
    torch.manual_seed(0)
    model, x = Recurs(looped=False, twice=True).double(), texts()
    for engine in (Factored, Vmap):
        assert_right(engine, model, x)
        assert model.keeps.state is None


@pytest.mark.parametrize("looped", [True, False])
def test_a_state_that_another_module_sets(looped: bool):
    torch.manual_seed(0)
    model, x = Recurs(looped=looped, prepared=True).double(), texts()
    assert_right(Factored, model, x)
    assert_right(Vmap, model, x)
    assert model.keeps.state is None


class Overwrites(nn.Module):
    """Writes to what it is handed, and then does what vmap has no rule for."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.gain, self.copied = nn.Parameter(torch.rand(4)), copied

    def forward(self, x: Tensor) -> Tensor:
        x = (x.clone() if self.copied else x).mul_(2.0)
        assert x.abs().max().item() >= 0
        return torch.tanh(x * self.gain)


def test_a_tensor_that_is_written_to_and_needed_again_is_refused():
    torch.manual_seed(0)
    for copied in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Overwrites(copied=copied), nn.Linear(4, 2)).double()
        if copied:
            assert_right(Factored, model, texts()[:, 0])
        else:
            with pytest.raises(pg.UnsupportedModuleError, match=r"in place.*copy"):
                Factored(model, losses_of)(texts()[:, 0])


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_changes_is_seen_however_deep():
    tensor, inner = torch.zeros(2), [1, 2]
    arguments: dict[str, Any] = {
        "slots": Slotted([inner]),
        "attributes": SimpleNamespace(parts={"a": ({"b": tensor}, 3)}),
        "set": {4},
        "number": 3,
        "module": nn.Linear(1, 1),
    }
    watched = Watched(arguments.values())
    assert watched.changed() is None
    inner.append(3)
    assert watched.changed() == "Slotted"
    watched = Watched(arguments.values())
    tensor.add_(1)
    assert watched.changed() == "SimpleNamespace"
    watched = Watched(arguments.values())
    arguments["attributes"].parts["c"] = 1
    assert watched.changed() == "SimpleNamespace"
    watched = Watched(arguments.values())
    arguments["set"].add(5)
    assert watched.changed() == "set"


def test_modules_and_parameters_are_walked_as_torch_does():
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.LSTM(2, 2), shared), "b": nn.ModuleList([shared[1]])})
    model["b"].weight = shared[0].weight
    model["b"].register_module("none", None)
    for path in ("", "outer.inner"):
        assert list(named_modules(model, path)) == list(model.named_modules(prefix=path))
    walked, torchs = Structure(model).parameters, list(model.named_parameters())
    assert [(name, id(p)) for name, p in walked] == [(name, id(p)) for name, p in torchs]
