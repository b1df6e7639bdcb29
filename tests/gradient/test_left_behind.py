"""What backward passes and objects of the user leave behind: refused in buffers, undone in attributes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.gradient.functional import Bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap cannot batch this model"),
    pytest.mark.filterwarnings("ignore:the forward pass changed"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
ENGINES: Any = pytest.mark.parametrize("engine", ["factored", "vmap"])


def step(model: nn.Module, engine: Any, loss: Any = loss_fn) -> None:
    plan = make_plan()
    pg.PrivateGradient(model, loss, plan, engine=engine)(first_batch(plan, make_data()))


class Noting(torch.autograd.Function):
    """Its backward pass calls a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Any) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.note(grads[0])
        return grads[0], None


class Notes(nn.Module):
    """Calls `note` with the gradient of a layer's output, in the backward pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(5, 4), nn.Linear(4, 3)
        if way == "module hook":
            self.first.register_full_backward_hook(lambda module, inputs, outputs: self.note(outputs[0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "tensor hook" and y.requires_grad:
            y.register_hook(self.note)
        return self.last(Noting.apply(y, self.note) if self.way == "function" else y)

    def note(self, grad: Tensor) -> None:
        raise NotImplementedError


class Scales(Notes):
    """Keeps the largest gradient, as training in 8 bits does for its next scale."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.register_buffer("largest", torch.zeros(()))

    def note(self, grad: Tensor) -> None:
        self.get_buffer("largest").copy_(grad.abs().max())


@ENGINES
@pytest.mark.parametrize("way", ["tensor hook", "module hook", "function"])
def test_a_buffer_written_in_the_backward_pass_is_refused_and_keeps_its_value(way: str, engine: Any):
    model = Scales(way)
    with pytest.raises(pg.UnsupportedModuleError, match=r"buffers not to be written.*got (.*)largest"):
        step(model, engine)
    assert model.largest == 0


class Frozen(Notes):
    """Keeps the gradient's norm in a frozen parameter, by a write that autograd does not count."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.norm = nn.Parameter(torch.zeros(()), requires_grad=False)

    def note(self, grad: Tensor) -> None:
        self.norm.data.copy_(grad.norm())


@ENGINES
def test_a_frozen_parameter_written_in_the_backward_pass_keeps_its_value(engine: Any):
    model = Frozen("module hook")
    with pytest.raises(pg.UnsupportedModuleError, match=r"parameters not to be written.*got norm"):
        step(model, engine)
    assert model.norm == 0


class Remembers(nn.Module):
    """Keeps its activations in an attribute, also in the second run of a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        self.seen = y.detach()
        return (2 * y).tanh()


@ENGINES
def test_an_attribute_set_by_a_part_that_is_computed_again_is_undone(engine: Any):
    model = Remembers()
    step(model, engine)
    assert model.seen is None


class Tracks(nn.Module):
    """Writes the mean of the activations to a buffer that another object holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(width))
        self.tracker = SimpleNamespace(mean=self.mean)

    def forward(self, x: Tensor) -> Tensor:
        self.tracker.mean.add_(x.detach().nan_to_num().mean())
        return self.last(x)


@ENGINES
@pytest.mark.parametrize("width", [4, 2**17 + 1])
def test_a_buffer_that_another_object_holds_is_refused(width: int, engine: Any):
    model = Tracks(width)
    with pytest.raises(pg.UnsupportedModuleError, match="buffers not to be written by the forward pass, got mean"):
        step(model, engine)
    if width == 4:  # a large buffer is not copied in each step, so it cannot be restored
        assert torch.equal(model.get_buffer("mean"), torch.zeros(4))


class Disturbed(nn.Module):
    """Adds a tensor that is no parameter, and that autograd differentiates."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.last, delta = nn.Linear(5, 3), torch.zeros(5, requires_grad=True)
        self.held = [delta] if listed else delta

    @property
    def delta(self) -> Tensor:
        return self.held[0] if isinstance(self.held, list) else self.held

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.delta)


@ENGINES
@pytest.mark.parametrize("listed", [True, False])
def test_gradients_that_a_loss_leaves_on_tensors_of_the_modules_are_undone(engine: Any, listed: bool):
    def adversarial(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            loss_fn(model, batch).sum().backward(retain_graph=True)
        return loss_fn(model, batch)

    model = Disturbed(listed=listed)
    model.delta.grad = held = torch.ones(5)
    step(model, engine, adversarial)
    assert model.delta.grad is held
    assert torch.equal(held, torch.ones(5))


@pytest.mark.parametrize("shape", [(5000,), (70, 33), (1500, 1), (2049,)])
@pytest.mark.parametrize("place", [0, 1337, -1])
def test_sums_of_bits_see_a_write_to_any_number_of_a_large_frozen_weight(shape: tuple[int, ...], place: int):
    weight = nn.Parameter(torch.randn(shape), requires_grad=False)
    before = Bits([("weight", weight)], sums=True)
    assert before.undo() == []
    weight.data.view(-1)[place] += 1e-3
    assert before.undo() == ["weight"]
    before = Bits([("weight", weight)], sums=True)
    weight.data.copy_(weight.data.roll(1, 0))  # a queue, whose numbers have the same sum
    assert before.undo() == ["weight"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta", "conjugate"])
def test_a_frozen_parameter_may_have_no_bits(kind: str, engine: Any):
    torch.manual_seed(0)
    weight = torch.randn(3, 3)
    made: dict[str, Callable[[], Tensor]] = {
        "sparse": weight.to_sparse,
        "quantized": lambda: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "meta": lambda: weight.to("meta"),
        "conjugate": lambda: torch.complex(weight, weight).conj(),
    }
    model = make_model()
    model.register_parameter("frozen", nn.Parameter(made[kind](), requires_grad=False))
    step(model, engine)
