"""Parameters, and what a model computes from them once for all examples: each example's gradient is its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_perturb import moved_one_by_one
from test_rules import assert_equal_to_loop, floats, losses_of, one_by_one
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import privgrad as pg
from privgrad.engine import factored
from privgrad.engine.factored import Factored
from privgrad.gradient.functional import gradients, seeded
from privgrad.gradient.reference import Vmap

pytestmark = pytest.mark.filterwarnings("ignore:vmap cannot batch this model")


class With(nn.Module):
    """A forward of some parts, as call(parts, x); shapes are those of parameters."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], /, **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.randn(part)))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.patches(x)], 1) + m.places
    return m.head(x.tanh())[:, 0]


def repeated_token(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.cat([m.token.repeat(len(x), 2, 1), x], dim=1).tanh().sum(1))


def broadcast_token(m: Any, x: Tensor) -> Tensor:
    before = torch.broadcast_to(m.token.exp(), (len(x), 1, 4))
    return m.head(torch.hstack([before, x]).tanh().sum(1))


def written_token(m: Any, x: Tensor) -> Tensor:
    states = x.new_zeros(len(x), 4, 4)
    states[:, 1:] = x
    states[:, 0] = m.token
    states += m.places
    return m.head(states.tanh()).sum(1)


def masked(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.where(x[..., :1] > 0, m.token, x)).tanh().sum(1)


def relative(m: Any, x: Tensor) -> Tensor:
    """T5: biases of the scores, looked up once, and used by two layers."""
    places = torch.arange(x.shape[1])
    bias = m.table((places[:, None] - places).clamp(-2, 2) + 2).permute(2, 0, 1)[None]
    for _ in range(2):
        x = x + (m.keys(x)[:, None] @ x.mT[:, None] + bias).softmax(-1).mean(1) @ x
    return x.sum(1)


def by_kernel(m: Any, x: Tensor) -> Tensor:
    """Swin: windows of examples, and biases as the mask of attention."""
    bias = (m.places[torch.tensor([[0, 1], [1, 0]])]).permute(2, 0, 1)[None]
    windows = m.keys(x).view(-1, 1, 2, 4).expand(-1, 3, -1, -1)
    return F.scaled_dot_product_attention(windows, windows, windows, bias).view(len(x), 2, -1).sum(1)


def disentangled(m: Any, x: Tensor) -> Tensor:
    """DeBERTa: a table that is normalized, mapped, and repeated for each head."""
    keys = m.projection(m.norm(m.table)).view(3, 2, 2).permute(1, 0, 2)
    queries = m.queries(x).view(-1, 3, 2, 2).transpose(1, 2).reshape(-1, 3, 2)
    return torch.bmm(queries, keys.repeat(len(x), 1, 1).mT).view(len(x), -1)


def latents(m: Any, x: Tensor) -> Tensor:
    """Perceiver: learned queries, one set for all examples."""
    queries = m.queries(m.latents).unsqueeze(0).expand(len(x), -1, -1)
    return (queries @ x.mT).softmax(-1).matmul(x).flatten(1)


def layered(m: Any, x: Tensor) -> Tensor:
    """YOLOS: one table of all layers, of which each takes its part."""
    for table in m.tables:
        x = m.mix(x + table).tanh()
    return x.sum(1)


def generated(m: Any, x: Tensor) -> Tensor:
    """A weight that a network computes."""
    return F.linear(x, m.net(m.code).view(3, 4), m.net(m.code)[:3])


def einsum(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("btd,hde->bhe", x, m.weight).flatten(1)


def gated(m: Any, x: Tensor) -> Tensor:
    return m.gate.sigmoid() * m.head(x) + (1 - m.gate) * x.pow(m.power.exp()).sum(-1, keepdim=True)


def unused_mixture(m: Any, x: Tensor) -> Tensor:
    """CLIP: an output that mixes examples, which the loss does not use."""
    y = m.head(x)
    m_scores = y @ y.T * m.scale.exp()
    assert m_scores.shape == (len(x), len(x))
    return y * m.scale


def detached(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.scale.exp() + 1
    return m.head(x) * scale + m.scale.detach() * m.scale


def twice(m: Any, x: Tensor, *, by: Callable[..., Any] = lambda part, x, **_: part(x)) -> Tensor:
    bias = m.scale * 2

    def part(x: Tensor) -> Tensor:
        return m.head(x * bias + m.shift.exp()).tanh()

    return by(part, by(part, x, use_reentrant=False), use_reentrant=False) + bias


def windows(m: Any, x: Tensor) -> Tensor:
    """Rows of windows in dimension 0, and a list of parameters."""
    rows = x.view(-1, 2, 4) * m.scales[0] + m.scales[1]
    return m.norm(rows).view(len(x), -1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "token": (
        lambda: With(token, token=(1, 1, 4), places=(1, 4, 4), patches=nn.Linear(4, 4), head=nn.Linear(4, 3)),
        floats(3, 4),
    ),
    "repeated token": (lambda: With(repeated_token, token=(1, 1, 4), head=nn.Linear(4, 3)), floats(3, 4)),
    "broadcast token": (lambda: With(broadcast_token, token=(4,), head=nn.Linear(4, 3)), floats(3, 4)),
    "written token": (lambda: With(written_token, token=(4,), places=(4, 4), head=nn.Linear(4, 3)), floats(3, 4)),
    "masked": (lambda: With(masked, token=(4,), head=nn.Linear(4, 3)), floats(3, 4)),
    "relative": (lambda: With(relative, table=nn.Embedding(5, 2), keys=nn.Linear(4, 4)), floats(3, 4)),
    "by kernel": (lambda: With(by_kernel, places=(2, 3), keys=nn.Linear(4, 4)), floats(4, 4)),
    "disentangled": (
        lambda: With(
            disentangled, table=(3, 4), norm=nn.LayerNorm(4), projection=nn.Linear(4, 4), queries=nn.Linear(4, 4)
        ),
        floats(3, 4),
    ),
    "latents": (lambda: With(latents, latents=(2, 4), queries=nn.Linear(4, 4)), floats(3, 4)),
    "layered": (lambda: With(layered, tables=(2, 1, 3, 4), mix=nn.Linear(4, 4)), floats(3, 4)),
    "generated": (lambda: With(generated, code=(2,), net=nn.Sequential(nn.Linear(2, 12), nn.Tanh())), floats(4)),
    "matmul": (lambda: With(lambda m, x: (x @ m.a).tanh() @ m.b.T, a=(4, 5), b=(3, 5)), floats(3, 4)),
    "transposed": (lambda: With(lambda m, x: F.linear(x, m.weight.t(), m.bias), weight=(4, 3), bias=(3,)), floats(4)),
    "a vector as weight": (lambda: With(lambda m, x: F.linear(x, m.w).sin()[..., None], w=(4,)), floats(3, 4)),
    "one bias for all outputs": (lambda: With(lambda m, x: F.linear(x, m.w, m.b), w=(3, 4), b=(1,)), floats(3, 4)),
    "from the left": (lambda: With(lambda m, x: (m.graph @ x) @ m.weight, graph=(3, 3), weight=(4, 2)), floats(3, 4)),
    "einsum": (lambda: With(einsum, weight=(2, 4, 3)), floats(3, 4)),
    "layer norm": (lambda: With(lambda m, x: F.layer_norm(x, (4,), m.w, m.b), w=(4,), b=(4,)), floats(3, 4)),
    "channels first": (lambda: With(lambda m, x: F.layer_norm(x.mT, (4,), m.w, m.b).mT, w=(4,), b=(4,)), floats(4, 3)),
    "rms norm": (
        lambda: With(
            lambda m, x: F.rms_norm(x, (4,), m.w) * (1 + m.v) * x.pow(2).mean(-1, True).rsqrt(), w=(4,), v=(4,)
        ),
        floats(3, 4),
    ),
    "group norm": (lambda: With(lambda m, x: F.group_norm(x, 2, m.w, m.b), w=(4,), b=(4,)), floats(4, 3)),
    "prelu": (lambda: With(lambda m, x: F.prelu(m.head(x), m.slope), head=nn.Linear(4, 3), slope=(3,)), floats(4)),
    "bilinear": (lambda: nn.Sequential(With(lambda m, x: F.bilinear(x, x.sin(), m.w), w=(3, 4, 4))), floats(4)),
    "rows of a table": (
        lambda: With(lambda m, x: m.table[(3 * x).abs().long().clamp(max=4)].flatten(1), table=(5, 2)),
        floats(3),
    ),
    "gated": (lambda: With(gated, gate=(), power=(), head=nn.Linear(4, 3)), lambda size: floats(4)(size).abs() + 0.1),
    "unused mixture": (lambda: With(unused_mixture, scale=(), head=nn.Linear(4, 3)), floats(4)),
    "detached": (lambda: With(detached, scale=(3,), head=nn.Linear(4, 3)), floats(4)),
    "written": (lambda: With(written, net=nn.Linear(2, 4), scale=(4,), head=nn.Linear(4, 3)), floats(3, 4)),
    "twice": (lambda: With(twice, scale=(4,), shift=(4,), head=nn.Linear(4, 4)), floats(4)),
    "windows": (
        lambda: With(windows, scales=nn.ParameterList([torch.randn(4), torch.randn(2, 4)]), norm=nn.LayerNorm(4)),
        floats(4, 4),
    ),
    "a weight of another module": (
        lambda: With(
            lambda m, x: F.linear(m.words((3 * x).abs().long().clamp(max=4)).tanh().sum(1), m.words.weight),
            words=nn.Embedding(5, 4),
        ),
        floats(3),
    ),
    "sequence first": (
        lambda: With(lambda m, x: (x.transpose(0, 1) * m.scale + m.shift).sum(0), scale=(4,), shift=(3, 1, 4)),
        floats(3, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_points_equal_single_examples(name: str):
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, x = nn.Sequential(nn.Identity(), make()).double(), inputs(6).double()
    engine, reference = Factored(model, losses_of), Vmap(model, losses_of)
    for parameter, rows in one_by_one(model, x).items():
        assert_equal_to_loop(engine(x)[parameter], rows, 1e-10)
    for exact in (False, True):
        found = engine.moved(x, 0.1, exact=exact)
        for parameter, rows in moved_one_by_one(model, x, 0.1, exact=exact).items():
            assert_equal_to_loop(found[parameter], rows, 1e-10)
    along = reference(x)
    found = engine.at(x, along, -0.5)
    for parameter, factor in reference.at(x, along, -0.5).items():
        assert_equal_to_loop(found[parameter], factor.dense(), 1e-10)
    assert not engine._layouts.current.vmapped_units


NO_ROWS = {"Linear": lambda: nn.Linear(4, 3), "LSTM": lambda: nn.LSTM(4, 3, batch_first=True)}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_layer_that_is_called_on_no_rows_has_gradients_of_zero(name: str):
    def forward(m: Any, x: Tensor) -> Tensor:
        output = m.layer(x[:0, None])
        return m.head(x) + (output[0] if isinstance(output, tuple) else output).sum((0, 1))

    torch.manual_seed(0)
    model, x = With(forward, layer=NO_ROWS[name](), head=nn.Linear(4, 3)).double(), floats(4)(6).double()
    engine = Factored(model, losses_of)
    for parameter, rows in one_by_one(model, x).items():
        assert_equal_to_loop(engine(x)[parameter], rows, 1e-10)
    found = engine.moved(x, 0.1, exact=False)
    for parameter, rows in moved_one_by_one(model, x, 0.1, exact=False).items():
        assert_equal_to_loop(found[parameter], rows, 1e-10)


def added(m: Any, x: Tensor) -> Tensor:
    """A parameter and a mask, which has a row for each example only if it hides something."""
    hidden = x > 2
    mask = hidden.double() if bool(hidden.any()) else x.new_zeros(1, x.shape[1])
    return m.head(x + (m.shift + mask).tanh())


def test_a_mask_with_a_row_for_each_example_is_learned_when_it_first_appears():
    torch.manual_seed(0)
    model = With(added, shift=(4,), head=nn.Linear(4, 3)).double()
    engine, x = Factored(model, losses_of), floats(4)(6).double().clamp(-2, 2)
    for batch in (x, x, x + 1):  # the third call is not audited
        found = engine(batch)
        for parameter, rows in one_by_one(model, batch).items():
            assert_equal_to_loop(found[parameter], rows, 1e-10)


@pytest.mark.parametrize("exact", [None, False, True])
def test_checkpointed_parts(exact: bool | None):
    torch.manual_seed(0)
    parts = {"scale": (4,), "shift": (4,), "head": nn.Linear(4, 4)}
    model, plain = With(partial(twice, by=checkpoint), **parts).double(), With(twice, **parts).double()
    plain.load_state_dict(model.state_dict())
    x, engine = floats(4)(6).double(), Factored(model, losses_of)
    found = engine(x) if exact is None else engine.moved(x, 0.1, exact=exact)
    wanted = one_by_one(plain, x) if exact is None else moved_one_by_one(plain, x, 0.1, exact=exact)
    for parameter, rows in wanted.items():
        assert_equal_to_loop(found[parameter], rows, 1e-10)
    assert not engine._layouts.current.vmapped_units


def heated(model: Any, x: Tensor) -> Tensor:
    return losses_of(model, x) * model.heat.exp() + 0.1 * model.body.weight.square().sum()


def test_parameters_in_the_loss():
    torch.manual_seed(0)
    model, x = With(lambda m, x: m.body(x), body=nn.Linear(4, 3), heat=()).double(), floats(4)(6).double()
    found = Factored(model, heated)(x)
    for parameter, factor in Vmap(model, heated)(x).items():
        assert_equal_to_loop(found[parameter], factor.dense(), 1e-10)


@pytest.mark.parametrize("name", ["token", "relative", "by kernel", "disentangled", "gated"])
def test_under_autocast(name: str):
    torch.manual_seed(0)
    make, inputs = CASES[name]
    model, x = make(), inputs(6).float()

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses_of(model, x).float()

    found = Factored(model, losses)(x)
    for index in range(len(x)):
        grads = torch.autograd.grad(losses(model, x[index : index + 1]).sum(), list(model.parameters()))
        for (parameter, _), grad in zip(model.named_parameters(), grads, strict=True):
            assert (found[parameter].dense()[index] - grad).norm() <= 0.05 * (grad.norm() + 0.1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_example_moves_the_rows_of_another(size: int):
    """The rows of the last examples stay equal if the first one becomes huge."""
    torch.manual_seed(0)
    for name, (make, inputs) in CASES.items():
        model, x = make().double(), inputs(size + 1).double()
        other = x.clone()
        other[0] = 3 * x[0].abs() + 1
        engine = Factored(model, losses_of)
        engine(inputs(6).double())
        one, two = engine(x), engine(other)
        for parameter, factor in one.items():
            torch.testing.assert_close(two[parameter].dense()[1:], factor.dense()[1:], msg=f"{name}, {parameter}")


def centered(m: Any, x: Tensor) -> Tensor:
    return m.head(x) * (m.scale * x.mean(0).sum())


def written(m: Any, x: Tensor) -> Tensor:
    """Swin V2: a network of places with activations in place."""
    places = m.net(torch.arange(6, dtype=x.dtype).view(3, 2)).relu_()
    shift = m.scale * 2
    shift.add_(1).neg_()
    return m.head(x + places.view(1, 3, 4) * shift).sum(1)


def after_writing(m: Any, x: Tensor, *, copied: bool) -> Tensor:
    scale = m.scale * 2
    read = scale.clone() if copied else scale[:]
    scale.mul_(3)
    return m.head(x) * read


def rare(m: Any, x: Tensor, *, by_layer: bool) -> Tensor:
    """Rows that few examples have go to another layer, and come back to their places."""
    y, chosen = m.head(x), x[:, 0] > 3
    index = chosen.nonzero()[:, 0]
    if by_layer and not len(index):
        return y
    rows = m.layer(x[index]) if by_layer else F.linear(x[index], m.weight)
    if by_layer:
        return y + torch.zeros_like(y).masked_scatter(chosen[:, None].expand(-1, 3), rows)
    return y.index_add(0, index, rows)


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("by_layer", [True, False])
def test_rare_rows_of_a_later_batch_are_right(by_layer: bool, monkeypatch: pytest.MonkeyPatch):
    """No row was chosen, or one, where the layouts were learned: the chosen rows are no constant."""
    monkeypatch.setattr(factored, "require_apart_from_infinite", lambda *_: None)  # an infinite row is chosen
    torch.manual_seed(0)
    parts: dict[str, Any] = {"layer": nn.Linear(4, 3)} if by_layer else {"weight": (3, 4)}
    model = With(partial(rare, by_layer=by_layer), head=nn.Linear(4, 3), **parts).double()
    usual = floats(4)(9).double().clamp(-2, 2)
    if by_layer:
        usual[-1, 0] = 4.0
    unusual = usual.clone()
    unusual[0] = 50.0
    if by_layer:
        unusual[1:4, 0] = 4.0
    engine = Factored(model, losses_of)
    for batch in (usual, usual):
        engine.begin_step()
        engine(batch)
    engine.begin_step()
    found = engine(unusual)  # the third call: not audited
    for index in range(len(unusual)):
        wanted = gradients(model, losses_of, unusual[index : index + 1])
        for name, factor in found.items():
            torch.testing.assert_close(factor.dense()[index], wanted[name])


def segments(m: Any, x: Tensor) -> Tensor:
    """Unpadded segments of all examples go through a recurrent layer, and are added up for each example."""
    valid = x[:, :, 0, 0] < 9
    owners = valid.nonzero()[:, 0]
    return x.new_zeros(len(x), 2).index_add(0, owners, m.lstm(x[valid])[0].sum(1))


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
def test_another_number_of_rows_per_example_is_computed_by_itself():
    torch.manual_seed(0)
    model = With(segments, lstm=nn.LSTM(3, 2, batch_first=True)).double()
    x = torch.randn(4, 3, 5, 3, dtype=torch.float64).clamp(-2, 2)
    one_each, uneven = x.clone(), x.clone()
    one_each[:, 1:, 0, 0] = 10.0
    for row, count in enumerate((2, 3, 1, 2)):  # 8 segments, as if each example had two
        uneven[row, count:, 0, 0] = 10.0
    engine = Factored(model, losses_of)
    for batch in (one_each, one_each):
        engine.begin_step()
        engine(batch)
    engine.begin_step()
    found = engine(uneven)  # the third call: not audited
    for index in range(len(uneven)):
        for name, wanted in gradients(model, losses_of, uneven[index : index + 1]).items():
            torch.testing.assert_close(found[name].dense()[index], wanted)


def test_a_value_made_of_the_whole_batch_is_refused():
    torch.manual_seed(0)
    with pytest.raises(pg.PrivacyError, match=r"match the gradients of single|own example"):
        Factored(With(centered, scale=(3,), head=nn.Linear(4, 3)).double(), losses_of)(floats(4)(6).double())


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
@pytest.mark.parametrize("copied", [True, False])
def test_a_value_that_is_written_to_is_taken_whole(copied: bool):
    torch.manual_seed(0)
    model = With(partial(after_writing, copied=copied), scale=(3,), head=nn.Linear(4, 3)).double()
    engine, x = Factored(model, losses_of), floats(4)(6).double()
    for parameter, rows in one_by_one(model, x).items():
        assert_equal_to_loop(engine(x)[parameter], rows, 1e-10)
    assert engine._layouts.current.vmapped_units


class Squared(torch.autograd.Function):
    """A function that torch does not show to modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore:PrivateGradient computes")
def test_a_use_that_torch_does_not_show_is_taken_whole():
    torch.manual_seed(0)

    def call(m: Any, x: Tensor) -> Tensor:
        scale: Any = Squared.apply(m.scale)
        return m.head(x) * scale

    model = With(call, scale=(3,), head=nn.Linear(4, 3)).double()
    engine, x = Factored(model, losses_of), floats(4)(6).double()
    found, wanted = engine(x), one_by_one(model, x)
    assert found.keys() == wanted.keys()
    for parameter, rows in wanted.items():
        assert_equal_to_loop(found[parameter], rows, 1e-10)
    assert engine._layouts.current.vmapped_units


def test_draws_of_dropout_are_the_same_in_both_passes():
    torch.manual_seed(0)
    make, inputs = CASES["token"]
    model, x = nn.Sequential(make(), nn.Dropout(0.5)).double(), inputs(6).double()
    engine = Factored(model, losses_of)
    engine(x)
    with seeded(1):
        first = engine(x)
    with seeded(1):
        second = engine.moved(x, 0.0, exact=False)
    for parameter, factor in first.items():
        torch.testing.assert_close(second[parameter].dense(), factor.dense())
