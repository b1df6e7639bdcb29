"""Ways in which preconditioning could break the bound or mislead, each tried."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rules import RULES, losses_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model
from privgrad.engine.factored import Factored
from privgrad.gradient.transform import Preconditioner, Scales, Transform
from privgrad.models import SparseLinear
from privgrad.statement.text import statement


def linear_loss(model: nn.Module, batch: Any) -> Tensor:
    """The output's product with the second tensor: gradients are exactly what a test puts in."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def plan_of(size: int, **changed: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {
        "sample_rate": 1.0,
        "steps": 40,
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        "num_examples": size,
        "expected_batch_size": size,
    }
    return pg.PrivacyPlan(**(numbers | changed))


def released(model: nn.Module, examples: Any, loss: Any = linear_loss, **options: Any) -> dict[str, Tensor]:
    """The clipped sum of all examples."""
    plan = plan_of(len(examples[0]), max_grad_norm=options.pop("max_grad_norm", 1.0))
    private_grad = pg.PrivateGradient(model, loss, plan, **options)
    values = private_grad(next(plan.batches(TensorDataset(*examples))))
    return {name: value.double() * len(examples[0]) for name, value in values.items()}


def length(values: Mapping[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in values.values()]).norm())


def fixed(scale: Tensor, name: str = "weight") -> pg.precondition.Preconditioner:
    """A preconditioner with the scales of one parameter."""
    return pg.precondition.fixed(Scales({name: scale}, provenance="common knowledge", source="a test"))


ENGINES = ("factored", "vmap")


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_broken_value_in_a_sparse_row_spoils_nothing(scale: float | None, wrong: float):
    torch.manual_seed(0)
    model, x = SparseLinear(6, 2), torch.ones(4, 2, 3)
    x[:, 0], x[3, 1, 1] = torch.tensor([1.0, 2.0, 3.0]), wrong
    y = torch.zeros(4, dtype=torch.long)
    options = {} if scale is None else {"precondition": fixed(torch.tensor(scale))}
    found, wanted = (released(model, (x[:n], y[:n]), loss_fn, **options) for n in (4, 3))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_kept_spoils_no_sum(name: str):
    """Every operand of every factor is full of nan for one example."""
    torch.manual_seed(0)
    make, inputs = RULES[name]
    model, x, kept = make().double(), inputs(3), torch.tensor([True, False, True])
    engine = Factored(model, lambda model, batch: losses_of(model, batch[0]) * batch[1])
    weights = torch.ones(3, dtype=torch.float64)
    whole = {n: f.mask(kept).weighted_sum(weights) for n, f in engine((x, weights)).items()}
    broken = x.clone()
    if x.is_floating_point():
        broken[1] = math.nan
    poison = torch.tensor([1.0, math.nan, 1.0], dtype=torch.float64)
    for parameter, factor in engine((broken, poison)).items():
        torch.testing.assert_close(factor.mask(kept).weighted_sum(weights), whole[parameter])


class PlainAndComputed(nn.Module):
    """One weight, used as it is and doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[:, :4], self.weight * 2) + F.linear(x[:, 4:], self.weight)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T)


class NormedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("engine", ENGINES)
def test_public_momentum_leaves_the_bound_where_a_weight_is_used_plainly_and_computed(engine: Any):
    one, s = torch.ones(1, 4), 0.05
    model = PlainAndComputed()
    public = pg.PublicGradient(model, linear_loss, (torch.cat([0 * one, one], 1), torch.ones(1, 3)), source="test")
    example = (torch.cat([1.998 * s * one, -0.9979 * 2 * s * one], 1), torch.ones(1, 3))
    made = pg.precondition.public_adam(public, keep=0.5, eps=1e-5)
    assert length(released(model, example, engine=engine, max_grad_norm=1e-3, precondition=made)) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("kind", [TiedAutoencoder, NormedTwice])
def test_inner_products_of_all_factors_are_those_of_the_gradients(kind: Any):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(5, 4, dtype=torch.float64)
    for factor in Factored(model, losses_of)(x).values():
        direction = torch.randn(factor.shape, dtype=torch.float64)
        wanted = factor.dense().flatten(1) @ direction.flatten()
        torch.testing.assert_close(factor.inner_products(direction), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sparse", [False, True])
def test_scales_far_apart_hide_no_norm(sparse: bool, engine: Any):
    scales, large = torch.tensor([9e11, 2e-12]), torch.tensor([1e3 * 9e11])
    if sparse:
        model, x = SparseLinear(2, 1), torch.tensor([[[0.0], [1.0]]])
        model.bias.requires_grad_(False)
        scales = scales[:, None]
    else:
        model, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0]])
        scales = scales[None]
    made = fixed(scales)
    found = length(released(model, (x, large[:, None]), engine=engine, precondition=made))
    assert found == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("value", [1e-24, 1e-22, 1e30])
def test_values_of_sparse_rows_whose_squares_are_no_float32_hide_no_norm(value: float):
    model, x = SparseLinear(2, 1), torch.tensor([[[0.0], [value]]])
    model.bias.requires_grad_(False)
    made = fixed(torch.tensor(2.0))
    found = length(released(model, (x, torch.tensor([[1e3 / value]])), precondition=made))
    assert found == pytest.approx(1.0, rel=1e-5)


def test_terms_that_cancel_are_seen_though_their_squares_are_no_float32():
    torch.manual_seed(1)
    others = (torch.rand(16, 2, 4) + 0.5, torch.rand(16, 2, 4))
    x = (torch.rand(1, 1, 4) + 1).expand(1, 2, 4).clone() * 5e-24
    x[:, 1] *= -1
    y = (torch.rand(1, 1, 4) + 0.5).expand(1, 2, 4) * 3e-5 / 5e-24
    made = fixed(torch.tensor(2e-12))
    model = nn.Linear(4, 4, bias=False)
    with_it, without = (
        released(model, examples, precondition=made, microbatch_size=100)["weight"]
        for examples in ((torch.cat([others[0], x]), torch.cat([others[1], y])), others)
    )
    assert float((with_it - without).norm()) <= 1 + 1e-3


class Given(Preconditioner):
    """Returns what it is given."""

    source = "test"

    def __init__(self, made: Transform) -> None:
        self.made = made

    def transform(self, step: int, **_: Any) -> Transform:
        return self.made


WHOLE = {name: torch.ones_like(p) for name, p in make_model().named_parameters()}
WRONG: dict[str, tuple[Transform, str]] = {
    "infinite": (Transform(WHOLE | {"0.bias": torch.full((4,), math.inf)}), "from 1e-12 to 1e"),
    "nan": (Transform(WHOLE | {"0.bias": torch.full((4,), math.nan)}), "from 1e-12 to 1e"),
    "negative": (Transform(WHOLE | {"0.bias": -torch.ones(4)}), "from 1e-12 to 1e"),
    "unknown name": (Transform(WHOLE | {"9.bias": torch.ones(4)}), "trainable parameter's shape, None"),
    "shape": (Transform(WHOLE | {"0.bias": torch.ones(1)}), "trainable parameter's shape"),
    "keep": (Transform(WHOLE, keep=math.nan), r"keep to be in \(0, 1\]"),
    "keep negative": (Transform(WHOLE, keep=-1.0), r"keep to be in \(0, 1\]"),
    "shift": (Transform(WHOLE, shift={"0.bias": torch.full((4,), math.nan)}), "shift of '0.bias' to be finite"),
}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_transform_that_is_none_is_refused_and_nothing_charged(name: str, empty: bool):
    made, told = WRONG[name]
    plan = plan_of(32)
    private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=Given(made))
    with pytest.raises(pg.PrivacyError, match=told):
        private_grad(next(plan.batches(make_data())))
    assert not private_grad.ledger.charged


@pytest.mark.parametrize("engine", ENGINES)
def test_a_share_without_momentum_is_that_share(engine: Any):
    data = make_data().tensors
    half = released(
        make_model(), data, loss_fn, engine=engine, precondition=Given(Transform(keep=0.5)), max_grad_norm=1e3
    )
    whole = released(make_model(), data, loss_fn, engine=engine, max_grad_norm=1e3)
    for name, value in whole.items():
        torch.testing.assert_close(half[name], 0.5 * value, rtol=1e-5, atol=1e-6)


class Cheats(Preconditioner):
    source = "mine"

    def transform(self, step: int, *, raw_mean: Any, **_: Any) -> Transform:
        return Transform({name: 1 / (value.abs() + 1e-5) for name, value in raw_mean().items()})


def test_what_says_it_is_public_is_given_nothing_private():
    with pytest.raises(
        pg.PrivacyError, match=r"precondition to use the raw mean only if its class has is_public = False, got is_pub"
    ):
        released(make_model(), make_data().tensors, loss_fn, precondition=Cheats())


def ones_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).flatten(1).sum(1)


def public_of(model: nn.Module, values: Tensor, **options: Any) -> pg.PublicGradient:
    """Its gradient is the mean of the values in a batch."""
    return pg.PublicGradient(model, ones_loss, (values,), source="test", **options)


def test_many_may_be_given_one_preconditioner_and_none_sees_another():
    model = nn.Linear(4, 1, bias=False)
    made = pg.precondition.public_adagrad(public_of(model, torch.ones(2, 4)), eps=1e-5)
    data = (torch.randn(8, 4), torch.randn(8, 1))
    first, again = (released(model, data, precondition=made)["weight"] for _ in range(2))
    assert torch.equal(first, again)
    scales = fixed(torch.tensor(2.0))
    small, large = nn.Linear(4, 1, bias=False), nn.Linear(6, 1, bias=False)
    plan = plan_of(8)
    private_grad = pg.PrivateGradient(small, linear_loss, plan, precondition=scales)
    pg.PrivateGradient(large, linear_loss, plan, precondition=scales)
    private_grad(next(plan.batches(TensorDataset(*data))))


def adagrad(model: nn.Module, plan: pg.PrivacyPlan) -> pg.PrivateGradient:
    made = pg.precondition.public_adagrad(public_of(model, torch.ones(2, 4)), eps=1e-5)
    return pg.PrivateGradient(model, linear_loss, plan, precondition=made)


def test_a_state_does_not_change_once_it_is_taken():
    plan, model = plan_of(8), nn.Linear(4, 1, bias=False)
    private_grad, batches = adagrad(model, plan), plan.batches(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)))
    private_grad(next(batches))
    state = private_grad.state_dict()
    before = copy.deepcopy(state)
    for _ in range(3):
        private_grad(next(batches))
    assert torch.equal(state["precondition"]["exp_avg_sq"]["weight"], before["precondition"]["exp_avg_sq"]["weight"])


def test_a_state_of_something_else_is_refused():
    plan, model = plan_of(8), nn.Linear(4, 1, bias=False)
    state = adagrad(model, plan).state_dict()
    others: tuple[dict[str, Any], ...] = (
        {"precondition": pg.precondition.public_rmsprop(public_of(model, torch.ones(2, 4)), eps=1e-5)},
        {},
    )
    for options in others:
        with pytest.raises(pg.PrivacyError, match="resume with the same perturb, precondition"):
            pg.PrivateGradient(model, linear_loss, plan, **options).load_state_dict(state)
    wrong = copy.deepcopy(state)
    wrong["precondition"] |= {"step": 3, "exp_avg": {}, "exp_avg_sq": {"weight": torch.ones(2, 4)}}
    private_grad = adagrad(model, plan)
    private_grad.load_state_dict(wrong)
    with pytest.raises(pg.PrivacyError, match=r"moments of 'weight' to have .* \(1, 4\), got \(2, 4\)"):
        private_grad(next(plan.batches(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)))))


def test_after_a_failure_the_scales_are_those_of_the_step():
    model, wrong = nn.Linear(4, 1, bias=False), [True]

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return ones_loss(model, batch) * (math.inf if wrong else 1.0)

    public = pg.PublicGradient(model, losses, (torch.full((2, 4), 100.0),), source="test")
    plan = plan_of(8)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    private_grad = pg.PrivateGradient(
        model, linear_loss, plan, precondition=pg.precondition.public_adagrad(public, eps=1e-5)
    )
    with pytest.raises(pg.PrivacyError, match="public gradient of 'weight' to be finite"):
        private_grad(next(plan.batches(data)))
    wrong.clear()
    private_grad(next(plan.batches(data)))
    assert private_grad.state_dict()["precondition"]["exp_avg_sq"]["weight"] == pytest.approx(1e4)


@pytest.mark.parametrize("rule", [pg.precondition.public_rmsprop, pg.precondition.public_adam])
def test_parameters_that_are_unfrozen_within_a_pass_get_scales_at_once(rule: Any):
    model = make_model()
    model[0].weight.requires_grad_(False)
    public = pg.PublicGradient(model, loss_fn, TensorDataset(*make_data(10).tensors), source="test")
    plan = plan_of(32, sample_rate=0.25, expected_batch_size=8)
    private_grad = pg.PrivateGradient(model, loss_fn, plan, precondition=rule(public, eps=1e-5, schedule="epoch"))
    batches = plan.batches(make_data())
    private_grad(next(batches))
    model[0].weight.requires_grad_(True)
    private_grad(next(batches))
    assert "0.weight" in private_grad.state_dict()["precondition"]["exp_avg_sq"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_half_precision_are_wide(dtype: torch.dtype):
    model = nn.Linear(4, 1, bias=False).to(dtype)
    made = pg.precondition.public_adagrad(public_of(model, torch.full((2, 4), 1e-4, dtype=dtype)), eps=1e-5)
    plan = plan_of(8)
    private_grad = pg.PrivateGradient(model, linear_loss, plan, precondition=made)
    for batch in [next(plan.batches(TensorDataset(torch.randn(8, 4, dtype=dtype), torch.randn(8, 1, dtype=dtype))))]:
        private_grad(batch)
    square = private_grad.state_dict()["precondition"]["exp_avg_sq"]["weight"]
    assert square.dtype == torch.float32
    assert square.mean() == pytest.approx(1e-8, rel=0.02)


@pytest.mark.parametrize(("model", "rows"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_sparse_rows_and_model_may_differ_in_precision(model: torch.dtype, rows: torch.dtype):
    x = torch.ones(2, 2, 1, dtype=rows)
    found = released(SparseLinear(2, 1).to(model), (x, torch.ones(2, 1, dtype=model)))
    assert length(found) == pytest.approx(2.0)


def test_private_derived_scales_are_covered_by_no_epsilon():
    scales = Scales({"0.weight": torch.tensor(2.0)}, provenance="private-derived", source="our patients")
    others = Scales({"2.weight": torch.tensor(3.0)}, provenance="public data", source="a book")
    plan = plan_of(32, noise_multiplier=1.0, delta=1e-5)
    for given, source in ((scales, None), (scales, "word counts"), (others | scales, None)):
        made = pg.precondition.fixed(given, source=source)
        assert "private-derived" in made.source
        assert "our patients" in made.source
        private_grad = pg.PrivateGradient(make_model(), loss_fn, plan, precondition=made)
        private_grad(next(plan.batches(make_data())))
        assert private_grad.ledger.epsilon(delta=1e-5) == math.inf == private_grad.epsilon(steps=1)
    with pytest.raises(AttributeError):
        _ = scales | {"2.weight": torch.tensor(1.0)}  # pyright: ignore[reportOperatorIssue]


def test_a_ledger_with_side_information_is_not_gone_on_with_without_any(tmp_path: Any):
    plan, path = plan_of(32, noise_multiplier=1.0), tmp_path / "ledger.jsonl"
    made = fixed(torch.tensor(2.0), "0.weight")
    pg.PrivateGradient(make_model(), loss_fn, plan, precondition=made, ledger=path).ledger.close()
    with pytest.raises(pg.PrivacyError, match="side_information"):
        pg.PrivateGradient(make_model(), loss_fn, plan, ledger=path)


@pytest.mark.parametrize("kind", ["RMSpropPub", "AdamPub", "MirrorDescent"])
def test_optimizers_refuse_the_public_gradient_of_another_model(kind: str):
    model, other = make_model(), make_model()
    extra = {"horizon": 3} if kind == "MirrorDescent" else {}
    public = pg.PublicGradient(other, loss_fn, TensorDataset(*make_data(10).tensors), source="test")
    with pytest.raises(pg.PrivacyError, match="public to be a gradient of the model that is trained"):
        getattr(pg.optim, kind)(model.named_parameters(), public=public, lr=0.1, **extra)

    def broadcasts(step: int) -> dict[str, Tensor]:
        return {name: torch.ones(1) for name, _ in model.named_parameters()}

    optimizer = getattr(pg.optim, kind)(model.named_parameters(), public=broadcasts, lr=0.1, **extra)
    gradient = pg.NoisyGradient({name: torch.ones_like(p) for name, p in model.named_parameters()}, 0.1)
    with pytest.raises(pg.PrivacyError, match=r"public gradient of '0.weight' to have shape \(4, 5\), got \(1,\)"):
        optimizer.step(grad=gradient)


@pytest.mark.parametrize("kind", ["RMSpropPub", "AdamPub", "MirrorDescent"])
def test_the_ledger_names_the_public_data_of_an_optimizer(kind: str):
    extra = {"horizon": 3} if kind == "MirrorDescent" else {}
    data = make_data(10)

    def parts(named: str | None) -> tuple[pg.PrivateGradient, Any]:
        model = make_model()
        public = pg.PublicGradient(model, loss_fn, TensorDataset(*data.tensors), source="public: ten volunteers")
        optimizer = getattr(pg.optim, kind)(model.named_parameters(), public=public, lr=0.1, **extra)
        return pg.PrivateGradient(model, loss_fn, plan_of(10, noise_multiplier=1.0), side_information=named), optimizer

    for named in (None, "features: somewhere else", "x public: ten volunteers"):
        private_grad, optimizer = parts(named)
        before = [p.detach().clone() for p in private_grad.model.parameters()]
        with pytest.raises(pg.PrivacyError, match=r"fit: expected the ledger's side_information to name 'public: ten"):
            pg.fit(private_grad, optimizer, data)
        assert private_grad.ledger.releases == 0
        gradient = private_grad(next(iter(private_grad.plan.batches(data))))
        with pytest.raises(pg.PrivacyError, match=rf"{kind}.step: .* start a new ledger, with PrivateGradient"):
            optimizer.step(grad=gradient)
        assert all(torch.equal(p, old) for p, old in zip(private_grad.model.parameters(), before, strict=True))
    private_grad, optimizer = parts("public: ten volunteers")
    optimizer.step(grad=private_grad(next(iter(private_grad.plan.batches(data)))))
    assert "public: ten volunteers" in str(statement([private_grad.ledger], delta=1e-3))
    private_grad, optimizer = parts(None)
    optimizer.public = dict  # without a source
    with pytest.raises(
        pg.PrivacyError, match=rf"to name the public data of the {kind}.*side_information=\"their source"
    ):
        pg.fit(private_grad, optimizer, data)


def test_a_parameter_of_no_size_has_scales_too():
    class WithNothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.layer = nn.Linear(1, 3), nn.Linear(4, 3)
            self.nothing.weight = nn.Parameter(torch.zeros(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.nothing(x[:, :0])

    model = WithNothing()
    made = pg.precondition.public_rmsprop(public_of(model, torch.ones(2, 4)), eps=1e-5)
    assert length(released(model, (torch.randn(8, 4), torch.randn(8, 3)), precondition=made)) > 0


class Pairs(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, labels = make_data(10).tensors
        return inputs[index], int(labels[index])


def test_public_examples_may_be_any_map_style_data_set():
    model = make_model()
    one, other = (pg.PublicGradient(model, loss_fn, data, source="test")(0) for data in (Pairs(), make_data(10)))
    for name in one:
        torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("wrong", [{"source": 123}, {"seed": "a"}, {"seed": 1.5}, {"seed": None}])
def test_a_public_gradient_is_checked_when_it_is_made(wrong: dict[str, Any]):
    options: dict[str, Any] = {"source": "test"} | wrong
    with pytest.raises(pg.PrivacyError, match=f"expected {next(iter(wrong))}"):
        pg.PublicGradient(make_model(), loss_fn, make_data(10), **options)
