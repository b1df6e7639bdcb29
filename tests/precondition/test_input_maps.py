"""Input maps: equal to a loop over single examples in float64 for every rule, and what they leave alone or refuse."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import inputs_side as plain
import pytest
import torch
import torch.nn.functional as F
from test_rules import RULES, assert_equal_to_loop, floats, losses_of, one_by_one
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import first_batch, loss_fn, make_data, make_model, make_plan
from privgrad.engine.factored import Factored
from privgrad.engine.factors.conv import Convolution, Geometry
from privgrad.engine.factors.mapped import InputMap, Mapped, with_mapped_inputs
from privgrad.engine.factors.outer import Outer
from privgrad.gradient.factor import Dense
from privgrad.precondition import input_maps
from privgrad.precondition.input_maps import Inputs

WITHOUT_INPUTS = (
    "Embedding",
    "Norm",
    "Scale",
    "PReLU",
    "ConvTranspose",
    "standardized",
    "weight norm",
    "frozen weight",
    "bias only",
)


def maps_of(model: nn.Module, examples: Any, **options: Any) -> tuple[Mapping[str, InputMap], dict[str, str]]:
    """Return the maps of one step, and how each parameter is preconditioned."""
    made = pg.precondition.inputs(examples, source="drawn", **options).begun(model)
    assert isinstance(made, Inputs)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = made.transform(0, epoch_steps=1, noise_std=0.0, parameters=parameters, raw_mean=dict)
    return found.input_maps, made.layers


def written_out(rows: Mapping[str, Tensor], maps: Mapping[str, InputMap]) -> dict[str, Tensor]:
    """Return per-example gradients times U, by a product of whole matrices."""
    found = dict(rows)
    for name, own in maps.items():
        weight = rows[name].mT if own.transposed else rows[name].flatten(2)
        both = weight if own.bias is None else torch.cat([weight, rows[own.bias][:, :, None]], 2)
        matrix = torch.diag(own.matrix) if own.matrix.dim() == 1 else own.matrix
        both = both @ matrix
        part = both if own.bias is None else both[:, :, :-1]
        found[name] = (part.mT if own.transposed else part).reshape(rows[name].shape)
        if own.bias is not None:
            found[own.bias] = both[:, :, -1]
    return found


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("name", "wide"),
    [  # by default, inputs that are too wide for a matrix with each third rule
        pytest.param(name, wide, marks=[pytest.mark.slow] if wide == 3 and index % 3 else [])
        for index, name in enumerate(RULES)
        for wide in (4096, 3)
        if not any(part in name for part in WITHOUT_INPUTS)
    ],
)
def test_a_mapped_rule_equals_a_loop_over_single_examples(name: str, wide: int):
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model = make().double()
    for parameter in model.parameters():  # some start at zero
        nn.init.normal_(parameter, std=0.5)
    maps, _ = maps_of(model, inputs(9), wide=wide)
    x = inputs(7)
    factors, rows = with_mapped_inputs(Factored(model, losses_of)(x), maps), written_out(one_by_one(model, x), maps)
    assert factors.keys() == rows.keys()
    for parameter, factor in factors.items():
        assert_equal_to_loop(factor, rows[parameter], 1e-10)
        assert_equal_to_loop(factor[:0], rows[parameter][:0], 1e-10)
        assert_equal_to_loop(factor * 0.5, 0.5 * rows[parameter], 1e-10)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["Linear", "Conv2d, inner products", "Conv2d, many places", "GRU"])
def test_bam_behind_maps_equals_written_out_gradients(name: str, exact: bool):
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model, x = make().double(), inputs(5)
    maps, _ = maps_of(model, inputs(9))
    moved = Factored(model, losses_of).moved(x, 0.1, exact=exact)
    rows = written_out({name: factor.dense() for name, factor in moved.items()}, maps)
    for parameter, factor in with_mapped_inputs(moved, maps).items():
        assert_equal_to_loop(factor, rows[parameter], 1e-8)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize(("power", "ridge"), [(0.5, 0.1), (0.25, 1.0), (1.0, 0.01)])
def test_a_release_equals_the_reference(engine: Any, power: float, ridge: float):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, (2, 3), stride=(2, 1), padding=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(100, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
        nn.Tanh(),
        nn.Linear(3, 3, bias=False),
    ).double()
    x, y, public = floats(2, 8, 5)(12), torch.arange(12) % 3, floats(2, 8, 5)(9).cos()
    plan = make_plan(sample_rate=1.0, num_examples=12, expected_batch_size=12, noise_multiplier=0.0, max_grad_norm=0.3)
    made = pg.precondition.inputs(public, source="drawn", power=power, ridge=ridge)
    private_grad, seen = pg.PrivateGradient(model, loss_fn, plan, precondition=made, engine=engine), list[Any]()
    private_grad.register_raw_observer(seen.append)
    private_grad(first_batch(plan, TensorDataset(x, y)))
    wanted = plain.contributions(model, x, y, public, power=power, ridge=ridge, clip=0.3)
    assert float((seen[0].clipping.raw_factors < 1).sum()) > 3
    for name, value in wanted.items():
        torch.testing.assert_close(seen[0].raw_mean[name], value / 12, rtol=1e-10, atol=1e-13)


def test_one_example_moves_the_sum_by_at_most_the_bound():
    """The public inputs hardly reach the last feature, so the matrix enlarges it most."""
    torch.manual_seed(0)
    model, public = nn.Linear(5, 3, bias=False), torch.randn(50, 5) * torch.tensor([3.0, 3.0, 3.0, 3.0, 0.01])
    x, y = torch.randn(33, 5), torch.arange(33) % 3
    x[-1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0])
    x[0, 4] = 9.0

    def clipped_sum(count: int) -> Tensor:
        sizes: dict[str, Any] = {"sample_rate": 1.0, "num_examples": 32, "expected_batch_size": 32}
        plan = make_plan(**sizes, noise_multiplier=0.0, max_grad_norm=1.0)
        made, seen = pg.precondition.inputs(public, source="drawn"), list[Any]()
        private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=made)
        private_grad.register_raw_observer(seen.append)
        private_grad(first_batch(plan, TensorDataset(x[:count], y[:count])))
        return seen[0].raw_mean["weight"].double() * 32

    whole = clipped_sum(33)
    assert float((whole - clipped_sum(32)).norm()) == pytest.approx(1.0, abs=0.005)


def test_groups_users_and_small_passes_give_the_same_sum():
    torch.manual_seed(0)
    model, data = make_model(torch.float64), make_data(32, torch.float64)
    public = make_data(40, torch.float64).tensors[0][:10]

    def raw(**options: Any) -> Tensor:
        plan = make_plan(**{"sample_rate": 1.0, "expected_batch_size": 32, "noise_multiplier": 0.0, **options})
        contribution = pg.perturb.SampleGradient("user") if options.get("privacy_unit") == "user" else None
        sums = []
        for size in (None, 3):
            made, seen = pg.precondition.inputs(public, source="drawn"), list[Any]()
            private_grad = pg.PrivateGradient(
                model, loss_fn, plan, precondition=made, microbatch_size=size, perturb=contribution
            )
            private_grad.register_raw_observer(seen.append)
            private_grad(first_batch(plan, data))
            sums.append(torch.cat([value.flatten() for value in seen[0].raw_mean.values()]))
        if options.get("group_size", 1) == 1:  # groups are drawn anew
            torch.testing.assert_close(sums[0], sums[1], rtol=1e-10, atol=1e-13)
        return sums[0]

    alone = raw()
    torch.testing.assert_close(alone, raw(privacy_unit="user"), rtol=1e-10, atol=1e-13)
    assert float(raw(group_size=2).norm()) < 2 * float(alone.norm())


def test_every_parameter_says_how_it_is_preconditioned():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.layer, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False)
            self.frozen = nn.Linear(7, 7).requires_grad_(False)
            self.tied = nn.Linear(4, 7)
            self.tied.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.table(ids).mean(1)
            return self.frozen(self.head(self.norm(self.layer(hidden)))) + self.tied(hidden)

    maps, layers = maps_of(Net(), torch.randint(0, 7, (20, 3)), wide=5)
    assert layers == {
        "table.weight": "unchanged",
        "layer.weight": "inputs",
        "layer.bias": "with layer.weight",
        "norm.weight": "unchanged",
        "norm.bias": "unchanged",
        "head.weight": "inputs",
        "tied.bias": "unchanged",
    }
    assert {name: own.matrix.shape for name, own in maps.items()} == {"layer.weight": (5, 5), "head.weight": (5, 5)}
    _, layers = maps_of(Net(), torch.randint(0, 7, (20, 3)), wide=4)
    assert layers["head.weight"] == "inputs, diagonal"


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "GRU", "MultiheadAttention, decoder"])
def test_a_computation_in_parts_gives_the_same_matrices(name: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model, x = make().double(), inputs(9)
    whole, _ = maps_of(model, x)
    monkeypatch.setattr(Factored, "microbatch_size", lambda *_: 2)
    for parameter, own in maps_of(model, x)[0].items():
        torch.testing.assert_close(own.matrix, whole[parameter].matrix, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("most", [1, 7, 10**6])
def test_some_rows_stand_for_all(most: int, monkeypatch: pytest.MonkeyPatch):
    """Constant images have equal patches, so any of them give the matrix of all; other images do not."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, (2, 3), stride=(1, 2), dilation=(2, 1)).double(), torch.ones(5, 2, 6, 7).double()
    alike, other = maps_of(layer, x)[0]["weight"].matrix, maps_of(layer, floats(2, 6, 7)(5))[0]["weight"].matrix
    monkeypatch.setattr(input_maps, "_ROWS", most)
    torch.testing.assert_close(maps_of(layer, x)[0]["weight"].matrix, alike)
    found = maps_of(layer, floats(2, 6, 7)(5))[0]["weight"].matrix
    assert torch.allclose(found, other) == (most == 10**6)


def test_layers_with_the_same_inputs_share_a_matrix_and_map_their_inputs_once(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 3), nn.Linear(4, 3)]).double(), floats(6, 5)(7)
    query, key, other = model
    model.forward = lambda x: key(x) * other(query(x).tanh())
    maps, _ = maps_of(model, floats(6, 5)(9))
    assert maps["0.weight"].matrix is maps["1.weight"].matrix
    assert maps["0.weight"].matrix is not maps["2.weight"].matrix
    seen, real = list[int](), InputMap.of_inputs
    monkeypatch.setattr(InputMap, "of_inputs", lambda self, x: seen.append(len(x)) or real(self, x))
    factors, rows = with_mapped_inputs(Factored(model, losses_of)(x), maps), written_out(one_by_one(model, x), maps)
    assert len(seen) == 2
    for parameter, factor in factors.items():
        assert_equal_to_loop(factor, rows[parameter], 1e-10)


def test_the_weight_of_gpt2_is_transposed():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.pytorch_utils.Conv1D(6, 4).double()  # 6 outputs, 4 inputs
    x = floats(3, 4)(20)
    maps, _ = maps_of(model, x)
    assert maps["weight"].transposed
    rows = torch.cat([x.flatten(0, 1), torch.ones(60, 1).double()], 1)
    torch.testing.assert_close(maps["weight"].matrix, plain.matrix(rows, 0.35, 0.1, bias=False))


def test_matrices_are_kept_for_an_interval_and_come_back_from_a_checkpoint():
    model, data, plan = make_model(), make_data(), make_plan(steps=6, seed=0)
    public = make_data(40).tensors[0][:20]

    def fresh() -> pg.PrivateGradient:
        made = pg.precondition.inputs(public, source="drawn", every=4, batch_size=8)
        return pg.PrivateGradient(model, loss_fn, plan, precondition=made)

    def step(private_grad: pg.PrivateGradient, batch: pg.Batch) -> None:
        released = private_grad(batch)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * released[name].to(parameter.dtype)

    whole, matrices, batches = fresh(), list[Tensor](), list(plan.batches(data))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        step(whole, batch)
        matrices.append(whole.state_dict()["precondition"]["maps"]["0.weight"]["matrix"])
    ended = {name: value.clone() for name, value in model.state_dict().items()}
    assert [torch.equal(matrices[0], other) for other in matrices] == [True] * 4 + [False] * 2

    model.load_state_dict(start)
    first = fresh()
    for batch in batches[:2]:
        step(first, batch)
    second = pg.PrivateGradient(
        model,
        loss_fn,
        plan,
        precondition=pg.precondition.inputs(public, source="drawn", every=4, batch_size=8),
        ledger=first.ledger,
    )
    second.load_state_dict(first.state_dict())
    for batch in batches[2:]:
        step(second, batch)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, ended[name], rtol=0, atol=0)


def test_the_ledger_names_the_public_data_and_epsilon_stays(tmp_path: Path):
    plan = make_plan(delta=1e-5)
    made = pg.precondition.inputs(make_data(40).tensors[0], source="drawn for the test")
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=made, ledger=tmp_path / "l.jsonl")
    private_grad(first_batch(plan, make_data()))
    assert "drawn for the test" in (tmp_path / "l.jsonl").read_text()
    assert private_grad.epsilon(steps=1) == plan.epsilon(steps=1)
    assert math.isfinite(private_grad.epsilon(steps=1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "power": ({"power": 0.0}, "expected power to be"),
    "large power": ({"power": 1.5}, r"expected power to be in \(0, 1\], got 1.5"),
    "ridge": ({"ridge": -1.0}, "expected ridge to be"),
    "every": ({"every": 0}, "expected every to be"),
    "batch_size": ({"batch_size": 0}, "expected batch_size to be"),
    "wide": ({"wide": -1}, "expected wide to be"),
    "seed": ({"seed": -1}, "expected seed to be"),
    "source": ({"source": ""}, "expected source to be a text"),
    "no examples": ({"examples": torch.zeros(0, 5)}, "the number of examples to be an integer >= 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused(name: str):
    changed, message = REFUSED[name]
    options: dict[str, Any] = {"examples": torch.zeros(4, 5), "source": "drawn", **changed}
    with pytest.raises(pg.PrivacyError, match=message):
        pg.precondition.inputs(options.pop("examples"), **options)


def test_a_private_batch_is_refused():
    plan = make_plan()
    with pytest.raises(pg.PrivacyError, match="expected examples to be public"):
        pg.precondition.inputs(first_batch(plan, make_data()), source="drawn")


def test_models_and_data_without_matrices_are_refused():
    with pytest.raises(pg.PrivacyError, match="expected the model to have a layer with inputs"):
        maps_of(nn.Embedding(6, 4), torch.arange(6)[:, None])
    with pytest.raises(pg.PrivacyError, match="expected the inputs of 'weight' to be finite"):
        maps_of(nn.Linear(2, 2), torch.tensor([[math.inf, 1.0]] * 4))
    with pytest.raises(pg.PrivacyError, match="expected the outputs to have leading dimension"):
        maps_of(nn.Linear(2, 2), torch.ones(4, 2), forward=lambda model, x: model(x).sum())


class Slope(nn.Module):
    """A layer whose output is its derivative by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.inner(x).sin().sum(), x, create_graph=True)
        return slope


def test_a_model_that_is_computed_whole_is_refused_by_name():
    with pytest.raises(pg.PrivacyError, match=r"a layer with inputs|gradients of whole losses"):
        maps_of(nn.Sequential(nn.Linear(4, 3), Slope()), torch.randn(8, 4))


def test_users_with_local_training_are_refused():
    plan = pg.PrivacyPlan.for_users(
        noise_multiplier=1.0, max_update_norm=1.0, num_users=4, expected_cohort_size=4, rounds=1, delta=1e-5
    )
    made = pg.precondition.inputs(torch.randn(8, 5), source="drawn")
    contribution = pg.federated.LocalUpdate(0.1, batch_size=2)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=made, perturb=contribution)
    users = TensorDataset(torch.randn(4, 3, 5), torch.zeros(4, 3, dtype=torch.int64), torch.full((4,), 3))
    with pytest.raises(pg.PrivacyError, match="expected precondition to divide only"):
        private_grad(first_batch(plan, users))


class _Maps(pg.precondition.Preconditioner):
    """A preconditioner of one's own with given maps."""

    source = "drawn"

    def __init__(self, **maps: InputMap) -> None:
        self._maps = maps

    def transform(self, step: int, **_: Any) -> pg.precondition.Transform:
        return pg.precondition.Transform(input_maps={name.replace("_", "."): own for name, own in self._maps.items()})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (InputMap(torch.ones(4)), r"expected input map of '0.weight' to have shape \(5, 5\) or \(5,\), got \(4,\)"),
        (InputMap(torch.eye(5), "0.bias"), r"to have shape \(6, 6\) or \(6,\), got \(5, 5\)"),
        (InputMap(torch.eye(6), "unknown"), "to be for trainable parameters, got 'unknown'"),
        (InputMap(torch.full((5, 5), math.nan)), "to be finite"),
        (InputMap(torch.full((5, 5), 1e20)), "to be finite"),
    ],
)
def test_maps_of_ones_own_are_checked(own: InputMap, message: str):
    plan = make_plan()
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=_Maps(**{"0_weight": own}))
    with pytest.raises(pg.PrivacyError, match=message):
        private_grad(first_batch(plan, make_data()))


def test_dense_gradients_of_another_layer_are_not_touched():
    rows = torch.randn(3, 4, 5).double()
    chunk = {"a": Dense(rows), "b": Dense(rows)}
    found = with_mapped_inputs(chunk, {"a": InputMap(2 * torch.eye(5).double()), "absent": InputMap(torch.eye(5))})
    torch.testing.assert_close(found["a"].dense(), 2 * rows)
    assert found["b"] is chunk["b"]


def test_checkpointed_parts_have_inputs_too():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.part, x, use_reentrant=False))  # type: ignore[arg-type]

    torch.manual_seed(0)
    model, x = Net().double(), floats(5)(8)
    maps, _ = maps_of(model, x)
    rows = torch.cat([x, torch.ones(8, 1).double()], 1)
    torch.testing.assert_close(maps["part.0.weight"].matrix, plain.matrix(rows, 0.35, 0.1, bias=False))
    assert "head.weight" in maps
    assert F.cross_entropy(model(x), torch.zeros(8, dtype=torch.int64)).isfinite()


def test_the_terms_of_mapped_gradients_are_bounded_so_that_canceling_examples_are_written_out():
    torch.manual_seed(0)
    geometry = Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1)
    x, b = torch.randn(5, 2, 14, 14).double(), torch.randn(5, 4, 12, 12).double()
    matrix = torch.randn(19, 19).double()
    matrix = matrix @ matrix.T
    bias = Dense(b.flatten(2).sum(2))
    factor = with_mapped_inputs(
        {"weight": Convolution(x, b, geometry), "bias": bias}, {"weight": InputMap(matrix, "bias")}
    )["weight"]
    assert isinstance(factor, Mapped)
    rows = torch.cat([geometry.patches(x), torch.ones(5, 144, 1).double()], 2) @ matrix
    terms = (rows[..., :-1].norm(dim=2) * b.flatten(2).norm(dim=1)).sum(1)
    bound = factor.term_bound()
    assert bound is not None
    assert bool((bound >= terms).all())
    assert factor.positions == 144
    largest = float(torch.linalg.matrix_norm(matrix, 2))
    assert largest <= InputMap(matrix).bound <= 1.5 * largest
    assert InputMap(torch.tensor([1.0, -3.0])).bound == 3.0
    assert InputMap(torch.zeros(3, 3)).bound == 0.0
    assert 2.0 <= InputMap(torch.tensor([[0.0, 2.0], [0.0, 0.0]])).bound <= 2.1  # a matrix whose powers are zero


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_a_matrix_that_cancels_an_example_does_not_enlarge_it(engine: str):
    """The gradient lies where U is small, so that float32 measures U g far too short."""
    torch.manual_seed(0)
    model, line = nn.Linear(2, 1, bias=False), torch.tensor([1.0, 0.7347])
    nn.init.zeros_(model.weight)
    public = torch.rand(64, 1) * line
    options: dict[str, Any] = {"power": 1.0, "ridge": 1e-8}
    evened = pg.precondition.inputs(public, source="drawn", **options)
    maps, _ = maps_of(model, public, **options)
    matrix = maps["weight"].matrix
    g = 2.0**40 * (1 + torch.rand(200_000, 1)) * line * (1 + 1e-7 * torch.randint(-9, 10, (200_000, 2)))
    true, measured = (g.double() @ matrix.double()).norm(dim=1), (g.view(-1, 1, 2) @ matrix).norm(dim=(1, 2)).double()
    row = g[(true / measured.clamp(min=1.0)).argmax()]
    plan = pg.PrivacyPlan(
        sample_rate=1.0, steps=9, expected_batch_size=1, noise_multiplier=1.0, max_grad_norm=1.0, num_examples=1
    )
    how: dict[str, Any] = {"engine": engine, "precondition": evened}
    private_grad = pg.PrivateGradient(model, lambda model, batch: model(batch[0]).sum(1), plan, **how)
    seen: list[Tensor] = []
    private_grad.register_raw_observer(lambda step: seen.append(step.raw_mean["weight"].double()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private_grad(first_batch(plan, TensorDataset(row[None], torch.zeros(1))))
    assert float(seen[0].norm()) <= 1.005


def test_inputs_that_share_memory_but_not_their_sign_are_mapped_apart():
    x = torch.view_as_complex(torch.randn(3, 4, 5, 2).double())
    pair, grads = (x.imag, x.conj().imag), torch.randn(3, 4, 2).double()
    matrix = torch.randn(5, 5).double()
    chunk = {name: Outer(inputs, grads) for name, inputs in zip("ab", pair, strict=True)}
    found = with_mapped_inputs(chunk, {name: InputMap(matrix) for name in "ab"})
    for name, inputs in zip("ab", pair, strict=True):
        torch.testing.assert_close(found[name].dense(), grads.mT @ (inputs @ matrix))
