"""What trains is what was written: parts outside the model, hooks, routed parts and foreign modules."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.private_gradient import RawStep

ENGINES = ["factored", "vmap"]
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(16) % 3
Loss = Callable[[nn.Module, Any], Tensor]


def losses_of(model: nn.Module, examples: Any) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def sum_of(model: nn.Module, loss_fn: Loss = losses_of, x: Tensor = X, **options: Any) -> dict[str, Tensor]:
    """The sum of one step, with a bound that clips nothing."""
    plan = pg.PrivacyPlan(
        sample_rate=1.0, steps=1, expected_batch_size=16, noise_multiplier=1.0, max_grad_norm=1e3, num_examples=16
    )
    private_grad, seen = pg.PrivateGradient(model, loss_fn, plan, **options), list[RawStep]()
    private_grad.register_raw_observer(seen.append)
    private_grad(next(iter(plan.batches(TensorDataset(x, Y)))))
    return {name: value.double() * plan.divisor for name, value in seen[0].raw_mean.items()}


def assert_exact(model: nn.Module, loss_fn: Loss = losses_of, x: Tensor = X, **options: Any) -> None:
    found, own = sum_of(model, loss_fn, x, **options), dict(model.named_parameters())
    grads = [
        torch.autograd.grad(
            loss_fn(model, (x[i : i + 1], Y[i : i + 1])).sum(),
            list(own.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        for i in range(len(x))
    ]
    for name, *rows in zip(own, *grads, strict=True):
        torch.testing.assert_close(found[name], sum(rows[1:], rows[0]), atol=1e-8, rtol=1e-8)


class Arc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.W


ARC, CENTERS, TEMPERATURE = Arc(), nn.Parameter(torch.zeros(3, 3).double()), torch.ones(()).double().requires_grad_()
BIAS = nn.Parameter(torch.zeros(3).double())


def of_module(arc: nn.Module) -> Loss:
    return lambda model, b: F.cross_entropy(arc(model(b[0])), b[1], reduction="none")


def of_global(model: nn.Module, b: Any) -> Tensor:
    return losses_of(model, b) + (model(b[0]) - CENTERS[b[1]]).square().sum(1)


def of_tensor(temperature: Tensor) -> Loss:
    return lambda model, b: F.cross_entropy(model(b[0]) / temperature, b[1], reduction="none")


def with_argument(model: nn.Module, b: Any, *, scale: Tensor) -> Tensor:
    return losses_of(model, b) * scale.exp()


def of_parts(*parts: nn.Module) -> Loss:
    chosen = {"arcs": [*parts]}
    return lambda model, b: F.cross_entropy(chosen["arcs"][0](model(b[0])), b[1], reduction="none")


def of_reference(reference: Any) -> Loss:
    return lambda model, b: F.cross_entropy(model(b[0]) + reference(), b[1], reduction="none")


class Method:
    def __init__(self) -> None:
        self.bias = nn.Parameter(torch.zeros(3).double())

    def loss(self, model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]) + self.bias, b[1], reduction="none")


class Hidden:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3).double())

    def __call__(self, model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]) + self.weight, b[1], reduction="none")


FOREIGN: dict[str, tuple[Loss, str]] = {
    "a module in the closure": (of_module(ARC), r"arc\.W"),
    "a global parameter": (of_global, "CENTERS"),
    "a tensor in the closure": (of_tensor(TEMPERATURE), "temperature"),
    "an argument of partial": (partial(with_argument, scale=TEMPERATURE), "scale"),
    "a module in a list in a dict": (of_parts(ARC), r"chosen\['arcs'\]"),
    "an attribute of the loss": (Method().loss, r"loss_fn\.bias"),
    "a slot of the loss": (Hidden(), r"loss_fn\.weight"),
    "one without a name": (of_reference(ref(BIAS)), r"a parameter of shape \(3,\)"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_trains_outside_of_the_model_is_named_once(name: str, engine: str):
    loss_fn, named = FOREIGN[name]
    with pytest.warns(UserWarning, match=f"loss_fn uses {named}, which PrivateGradient does not train") as seen:
        sum_of(net(), loss_fn, engine=engine)
    assert len(seen) == 1


def test_inputs_with_gradients_and_frozen_parts_are_no_parts_to_train():
    arc = Arc().requires_grad_(False)

    def loss_fn(model: nn.Module, b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        return F.cross_entropy(arc(model(x)), b[1], reduction="none")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(net(), loss_fn)
        assert_exact(
            nn.ModuleDict({"net": net(), "arc": Arc()}),
            lambda m, b: of_module(m.get_submodule("arc"))(m.get_submodule("net"), b),
        )


def hook(model: Any) -> Any:
    return model[0].weight.register_hook(lambda grad: grad * 0)


def hook_after(model: Any) -> Any:
    return model[2].bias.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("put", [hook, hook_after])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_on_a_trained_parameter_is_refused(put: Any, engine: str):
    model = net()
    handle = put(model)
    with pytest.raises(
        pg.UnsupportedModuleError, match=r"has a hook on (weight|bias).*multiply the weight by the mask"
    ):
        sum_of(model, engine=engine)
    handle.remove()
    assert_exact(model, engine=engine)
    frozen = net()
    put(frozen)
    frozen.requires_grad_(False)
    frozen.append(nn.Linear(3, 3).double())
    sum_of(frozen, engine=engine)


def hooked(model: Any, x: Tensor, *hooks: Callable[[Tensor], Any]) -> Tensor:
    h = model[0](x)
    for one in hooks:
        one(h)
    return model[2](model[1](h))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "retain_grad": lambda h: h.retain_grad(),
    "a hook that reads": lambda h: h.register_hook(lambda g: None),
    "a hook that scales": lambda h: h.register_hook(lambda g: 0.1 * g),
    "a hook that clips each row": lambda h: h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-3)),
}


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_activations_that_keep_examples_apart_are_exact(name: str, engine: str):
    def loss_fn(model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(hooked(model, b[0], HOOKS[name]), b[1], reduction="none")

    assert_exact(net(), loss_fn, engine=engine)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda g: g / (g.norm() + 1e-12),
    "centered": lambda g: g - g.mean(0),
    "turned": lambda g: g.flip(0),
}


@pytest.mark.parametrize("name", MIXING)
def test_hooks_of_activations_that_mix_examples_are_refused(name: str):
    def loss_fn(model: nn.Module, b: Any) -> Tensor:
        h = hooked(model, b[0], lambda h: h.register_hook(MIXING[name]))
        return F.cross_entropy(h, b[1], reduction="none")

    with pytest.raises(pg.UnsupportedModuleError, match="gradient"):
        sum_of(net(), loss_fn)


def test_operations_may_be_counted_around_a_step():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        found = sum_of(net())
    assert counted.get_total_flops() > 0
    for name, value in sum_of(net()).items():
        torch.testing.assert_close(found[name], value)


class Experts(nn.Module):
    def __init__(self, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.places = nn.ModuleList(nn.Linear(5, 3) for _ in range(4)), places

    def forward(self, x: Tensor) -> Tensor:
        at, out = self.places(x), x.new_zeros(len(x), 3)
        for index, head in enumerate(self.heads):
            rows = (at == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, head(x[rows]))
        return out


def quarters(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def rare(x: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 1.5, 1, torch.where(x[:, 0] > 1, 2, 0))


def first(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.long)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("seed", range(5))
def test_experts_that_some_rows_reach_are_accepted_whatever_rows_are_tried(seed: int):
    torch.manual_seed(seed)
    x = torch.randn(16, 5, dtype=torch.float64)
    x[:4, :2] = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    x = x[torch.randperm(16)]
    assert_exact(Experts(quarters).double(), x=x)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_experts_that_no_row_reaches_yet_are_warned_of():
    x = X.clamp(max=0.5)
    x[7, 0] = 2.0
    with pytest.warns(UserWarning, match=r"no example of the first batch reaches heads\.2\.weight"):
        sum_of(Experts(rare).double(), x=x)


def test_parts_that_no_row_can_reach_are_refused():
    with pytest.raises(pg.PrivacyError, match=r"no gradient for heads\.1\.weight.*freeze_unused"):
        sum_of(Experts(first).double())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_names_what_to_do():
    scripted: Any = torch.jit.script(net())
    traced: Any = torch.jit.trace(net(), X[:2])
    with pytest.raises(pg.UnsupportedModuleError, match=r"without torch\.jit\.script.*or use engine='vmap'"):
        sum_of(scripted)
    for model in (traced, nn.Sequential(nn.Identity(), traced)):
        with pytest.raises(pg.UnsupportedModuleError, match=r"give the module that you traced"):
            sum_of(model)
    with pytest.warns(UserWarning, match="by itself"):
        assert_exact(nn.Sequential(scripted))
    with pytest.warns(UserWarning, match="vmap cannot batch"):
        assert_exact(scripted, engine="vmap")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inner", [False, True])
def test_hooks_of_another_library_are_refused_by_name(engine: str, inner: bool):
    opacus = pytest.importorskip("opacus")
    model = net()
    wrapped = opacus.GradSampleModule(model)
    with pytest.raises(pg.UnsupportedModuleError, match=r"hooks of another library.*to_standard_module\(\)"):
        sum_of(model if inner else wrapped, engine=engine)
    assert_exact(wrapped.to_standard_module(), engine=engine)


def capture(module: nn.Module, inputs: Any, output: Any = None) -> None:
    raise AssertionError


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_are_known_by_their_module(register: str):
    model, one = net(), partial(capture)
    capture.__module__ = "private_transformers.autograd_grad_sample"
    getattr(model[2], register)(one)
    with pytest.raises(pg.UnsupportedModuleError, match=r"Linear at '2'.*hooks of another library"):
        sum_of(model)


FIXED: dict[str, Loss] = {
    "a fixed batch": lambda m, b: losses_of(m, (b[0].view(16, 5), b[1])),
    "a fixed state": lambda m, b: losses_of(m, (b[0] + torch.zeros(16, 5), b[1])),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["a fixed batch", "a fixed state"])
def test_an_error_of_the_model_says_how_it_was_called(name: str, engine: str):
    with pytest.raises(RuntimeError) as caught:
        sum_of(net(), FIXED[name], engine=engine)
    notes = [note for note in caught.value.__notes__ if "privgrad called it with a few examples" in note]
    assert len(notes) == 1
    assert "batches have any size from 0" in notes[0]
