"""The replacement forward of recurrent layers against torch's own, and against a loop over single examples."""

import warnings
from typing import Any

import pytest
import torch
from test_attention import Taps
from test_rules import assert_equal_to_loop, losses_of, one_by_one
from torch import Tensor, nn

from privgrad.engine.factored import Factored
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers.recurrent import recurrent_forward
from privgrad.errors import UnsupportedModuleError
from privgrad.gradient import factor as norms
from privgrad.gradient.reference import Vmap

pytestmark = pytest.mark.filterwarnings("ignore:vmap cannot batch this model")  # the reference

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
    "rnn tanh": (nn.RNN, {}),
    "rnn relu": (nn.RNN, {"nonlinearity": "relu"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}


def make(kind: str, option: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    layer, settings = KINDS[kind]
    return layer(4, 3, **settings, **OPTIONS[option]).to(dtype)


def make_inputs(module: Any, size: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any]:
    """Inputs, and an initial state."""
    shape = (size, length) if module.batch_first else (length, size)
    rows = module.num_layers * (2 if module.bidirectional else 1)
    hidden = torch.randn(rows, size, module.proj_size or module.hidden_size, dtype=dtype, requires_grad=True)
    cells = torch.randn(rows, size, module.hidden_size, dtype=dtype, requires_grad=True)
    inputs = torch.randn(*shape, 4, dtype=dtype, requires_grad=True)
    return inputs, (hidden, cells) if isinstance(module, nn.LSTM) else hidden


def flat(result: tuple[Tensor, Any]) -> list[Tensor]:
    """Output, last hidden state, and last cells if any."""
    output, state = result
    return [output, *state] if isinstance(state, tuple) else [output, state]


def loss_of(result: tuple[Tensor, Any]) -> Tensor:
    """Uses all that is returned, each element with another weight."""
    total = torch.zeros((), dtype=result[0].dtype)
    for part in flat(result):
        weights = torch.arange(part.numel(), dtype=part.dtype).reshape(part.shape).cos()
        total = total + (weights * part).sum() + (part**2).sum()
    return total


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("dtype", "close", "tight", "size", "length"),
    [
        (torch.float64, 1e-10, 1e-12, 1, 1),
        (torch.float64, 1e-10, 1e-12, 7, 5),
        (torch.float32, 1e-5, 1e-5, 7, 5),
        pytest.param(torch.float64, 1e-10, 1e-12, 7, 1, marks=pytest.mark.slow),
        pytest.param(torch.float64, 1e-10, 1e-12, 1, 5, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-5, 1e-5, 1, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_outputs_and_gradients(
    kind: str, option: str, given: bool, size: int, length: int, dtype: torch.dtype, close: float, tight: float
):
    module = make(kind, option, dtype)
    inputs, state = make_inputs(module, size, length, dtype)
    states = [] if not given else list(state) if isinstance(state, tuple) else [state]
    hx = state if given else None
    expected = module(inputs, hx)
    taps = Taps()
    results = recurrent_forward(module, taps, inputs, hx)
    for part, truth in zip(flat(results), flat(expected), strict=True):
        torch.testing.assert_close(part, truth, rtol=tight, atol=tight)

    leaves = [inputs, *states]
    truths = torch.autograd.grad(loss_of(expected), [*leaves, *module.parameters()])
    grads = torch.autograd.grad(loss_of(results), [*leaves, *taps.edges])
    for grad, truth in zip(grads[: len(leaves)], truths, strict=False):
        torch.testing.assert_close(grad, truth, rtol=close, atol=close)
    rows = taps.gradients(module, grads[len(leaves) :])
    assert rows.keys() == dict(module.named_parameters()).keys()
    for (name, _), truth in zip(module.named_parameters(), truths[len(leaves) :], strict=True):
        torch.testing.assert_close(rows[name].sum(0), truth, rtol=10 * close, atol=10 * close)


@pytest.mark.parametrize(
    ("size", "length"), [(1, 1), (7, 5), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((7, 1), (1, 5)))]
)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_gradients_of_single_examples(kind: str, option: str, size: int, length: int):
    module = make(kind, option)
    inputs, state = make_inputs(module, size, length)
    inputs = inputs.detach()
    taps = Taps()
    batch = 0 if module.batch_first else 1

    def single(index: int) -> tuple[Tensor, Any]:
        def part(tensor: Tensor) -> Tensor:
            return tensor[:, index : index + 1]

        hx = (part(state[0]), part(state[1])) if isinstance(state, tuple) else part(state)
        return module(inputs.narrow(batch, index, 1), hx)

    results = recurrent_forward(module, taps, inputs, state)
    output, *lasts = flat(results)
    losses = [loss_of((output.narrow(batch, i, 1), tuple(last[:, i : i + 1] for last in lasts))) for i in range(size)]
    rows = taps.gradients(module, torch.autograd.grad(torch.stack(losses).sum(), taps.edges))
    for index in range(size):
        truths = torch.autograd.grad(loss_of(single(index)), list(module.parameters()))
        for (name, _), truth in zip(module.named_parameters(), truths, strict=True):
            torch.testing.assert_close(rows[name][index], truth, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", ["lstm", "lstm, projected"])
def test_derivatives_of_a_few_steps_at_once_are_those_of_all(kind: str, monkeypatch: pytest.MonkeyPatch):
    found = list[tuple[Tensor, ...]]()
    for numbers in (1 << 20, 1400):  # all 5 steps, and two at once
        monkeypatch.setattr(norms, "_CACHED", numbers)
        module, taps = make(kind, "all"), Taps()
        loss = loss_of(recurrent_forward(module, taps, *make_inputs(module, 7, 5)))
        found.append(torch.autograd.grad(loss, taps.edges))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_draws_as_torch_does(kind: str):
    layer, settings = KINDS[kind]
    module = layer(4, 3, num_layers=3, dropout=0.5, **settings)
    inputs = torch.randn(5, 7, 4)
    torch.manual_seed(1)
    expected = module(inputs)
    torch.manual_seed(1)
    results = recurrent_forward(module, Taps(), inputs)
    torch.testing.assert_close(results[0], expected[0])
    module.eval()
    torch.testing.assert_close(recurrent_forward(module, Taps(), inputs)[0], module(inputs)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_taps_are_what_goes_on(kind: str):
    module = make(kind, "plain")
    inputs, _ = make_inputs(module, 2, 3)
    plain = recurrent_forward(module, Taps(), inputs)[0]
    moved = recurrent_forward(module, lambda tensor, _: tensor + 1, inputs)[0]
    assert (plain - moved).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_the_parameters_dtype(kind: str):
    module = make(kind, "all", torch.float32)
    inputs, _ = make_inputs(module, 7, 5, torch.float32)
    expected = module(inputs)
    taps = Taps()
    with torch.autocast("cpu", torch.bfloat16):
        results = recurrent_forward(module, taps, inputs)
        grads = torch.autograd.grad(loss_of(results), taps.edges)
        low = recurrent_forward(module, Taps(), inputs.bfloat16())[0]  # as a Linear before it would give
    assert results[0].dtype == grads[0].dtype == low.dtype == torch.float32
    torch.testing.assert_close(results[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind: str):
    module = make(kind, "batch first")
    inputs = torch.randn(2, 3, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedModuleError, match="of size 1"):
        recurrent_forward(module, Taps(), inputs[0])
    with pytest.raises(RuntimeError, match="Expected hidden"):
        recurrent_forward(module, Taps(), inputs, make_inputs(module, 3, 3)[1])
    inputs.requires_grad_()
    loss = loss_of(recurrent_forward(module, Taps(), inputs))
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_changes_in_place_are_refused_not_believed(kind: str):
    module = make(kind, "plain")
    inputs, taps = torch.randn(5, 2, 4, dtype=torch.float64), Taps()
    loss = loss_of(recurrent_forward(module, taps, inputs))
    grads = torch.autograd.grad(loss, taps.edges)
    inputs.mul_(2)
    with pytest.raises(UnsupportedModuleError, match="not to be changed in place"):
        taps.gradients(module, grads)
    taps = Taps()
    output = recurrent_forward(module, taps, inputs)[0]
    output.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(output.sum(), taps.edges)


def test_a_parameter_in_two_roles_gets_both_gradients():
    module = make("rnn tanh", "batch first")
    module.weight_hh_l0, module.weight_ih_l0 = nn.Parameter(torch.randn(3, 3).double()), None
    module.weight_ih_l0, module.input_size = module.weight_hh_l0, 3
    inputs, taps = torch.randn(4, 5, 3, dtype=torch.float64), Taps()
    loss = loss_of(recurrent_forward(module, taps, inputs))
    rows = taps.gradients(module, torch.autograd.grad(loss, taps.edges))
    truths = torch.autograd.grad(loss_of(module(inputs)), list(module.parameters()))
    for (name, _), truth in zip(module.named_parameters(), truths, strict=True):
        torch.testing.assert_close(rows[name].sum(0), truth)


def test_nothing_is_tapped_in_vain():
    module = make("lstm", "all")
    inputs = torch.randn(0, 5, 4, dtype=torch.float64)
    taps = Taps()
    loss = loss_of(recurrent_forward(module, taps, inputs))
    rows = taps.gradients(module, torch.autograd.grad(loss, taps.edges))
    assert {name: row.shape for name, row in rows.items()} == {
        name: (0, *parameter.shape) for name, parameter in module.named_parameters()
    }
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = recurrent_forward(module, lambda tensor, _: tensor, torch.randn(2, 5, 4, dtype=torch.float64))[0]
        assert not output.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_term_bounds_are_those_of_each_weight_alone(kind: str):
    module, taps = make(kind, "plain", torch.float32), Taps()
    recurrent_forward(module, taps, torch.randn(5, 4, 4))
    grads = torch.randn(5, 4, module.weight_ih_l0.shape[0])
    grads[:, 1] *= 1e-30  # squares underflow
    grads[2:, 2] = 0.0
    found = taps.factors[0](grads)
    outers = [found[weight] for weight in (module.weight_ih_l0, module.weight_hh_l0)]
    for factor in (2.0, 1.0, 3.0):  # of the gradients' entries: norms that were computed once follow a later write
        for outer in outers:
            assert isinstance(outer, Outer)
            wanted_B = (outer.a_BTI.double().norm(dim=2) * outer.b_BTO.double().norm(dim=2)).sum(1)
            torch.testing.assert_close(outer.term_bound(), wanted_B, rtol=1e-6, atol=0.0)
        grads *= factor


class Cells(nn.Module):
    """A loop over time of two cells, the first with a state that is given or not."""

    def __init__(self, cell: Any, given: bool, **options: Any) -> None:
        super().__init__()
        self.one, self.two, self.head = cell(4, 3, **options), cell(3, 3, **options), nn.Linear(3, 2)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        is_lstm = isinstance(self.one, nn.LSTMCell)
        zeros = x.new_zeros(len(x), 3) if self.given else None
        one: Any = (zeros, zeros) if is_lstm and self.given else zeros
        two: Any = None
        for t in range(x.shape[1]):
            one = self.one(x[:, t].tanh(), one)
            two = self.two(one[0] if is_lstm else one, two)
        return self.head(two[0] if is_lstm else two)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (nn.LSTMCell, {}),
        (nn.LSTMCell, {"bias": False}),
        (nn.GRUCell, {}),
        (nn.GRUCell, {"bias": False}),
        (nn.RNNCell, {}),
        (nn.RNNCell, {"nonlinearity": "relu", "bias": False}),
    ],
)
def test_loops_of_cells(cell: Any, options: dict[str, Any], given: bool):
    torch.manual_seed(0)
    model, x = Cells(cell, given, **options).double(), torch.randn(6, 5, 4, dtype=torch.float64)
    engine = Factored(model, losses_of)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = engine(x)
    for name, rows in one_by_one(model, x).items():
        assert_equal_to_loop(found[name], rows, 1e-8)
    assert {use.way for use in engine.uses().values()} == {"rule"}
    moved, wanted = engine.moved(x, 0.1, exact=False), Vmap(model, losses_of).moved(x, 0.1, exact=False)
    for name, factor in wanted.items():
        torch.testing.assert_close(moved[name].dense(), factor.dense(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_a_cell_that_gets_one_example_at_a_time(cell: Any):
    model, x = cell(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        states = [model(row) for row in x]
        return torch.stack([state[0] if isinstance(state, tuple) else state for state in states]).square().sum(1)

    found = Factored(model, loss_fn)(x)
    for name, factor in Vmap(model, loss_fn)(x).items():
        torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-8, atol=1e-8)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_exact_bam_through_cells():
    model, x = Cells(nn.GRUCell, True).double(), torch.randn(5, 3, 4, dtype=torch.float64)
    found, wanted = (engine(model, losses_of).moved(x, 0.1, exact=True) for engine in (Factored, Vmap))
    for name, factor in wanted.items():
        torch.testing.assert_close(found[name].dense(), factor.dense(), rtol=1e-8, atol=1e-8)
