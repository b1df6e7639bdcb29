"""Defaults without tuning: what `suggest` measures, what it refuses, and that it looks at public data only."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad import models
from privgrad.perturb.augmentation import multiplicity


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(1), batch[1], reduction="none")


def norms_of(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    return dict(pg.suggest(model, make_plan(), public_batch=inputs).input_norms)


def test_one_layer_gets_the_linear_rule():
    model = models.linear(in_features=6, num_classes=3)
    rows = F.normalize(torch.randn(20, 6), dim=1) * 2
    found = pg.suggest(model, make_plan(), public_batch=(rows, torch.zeros(20).long()), loss_fn=classes)
    assert found.noise_step == pytest.approx(0.03)
    assert found.schedule == pg.Schedule("constant")
    assert found.input_norms["1"] == pytest.approx(2.0)
    # Softmax from zero: |x| times the norm of (1/3 - 1, 1/3, 1/3); 0.3 of it, to one digit.
    assert found.plan.max_grad_norm == pytest.approx(float(f"{0.3 * 2 * (2 / 3) ** 0.5:.1g}"))
    assert found.plan.noise_multiplier == make_plan().noise_multiplier
    assert "0.06 / 2 (1)." in str(found)
    bare = pg.suggest(nn.Linear(6, 3), make_plan(), public_batch=rows)
    assert "0.06 / 2 (of the model)." in str(bare)


def test_a_network_gets_the_rule_of_its_largest_inputs():
    torch.manual_seed(0)
    model = models.mlp(in_features=6, hidden=5, num_classes=3)
    rows = 10 * torch.randn(50, 6)
    found = pg.suggest(model, make_plan(), public_batch=rows)
    hidden = torch.tanh(model[1](rows)).detach()
    first, second = (inputs.square().sum(1).mean().sqrt() for inputs in (rows, hidden))
    assert found.input_norms == pytest.approx({"1": float(first), "3": float(second)})
    assert found.noise_step == pytest.approx(0.16 / float(first), rel=0.05)
    assert found.schedule == pg.Schedule("linear")
    assert isinstance(found.clip, pg.clip.Automatic)


@pytest.mark.parametrize(("noise", "share"), [(0.019, 3.0), (0.039, 1.0), (0.041, 0.3)])
def test_little_noise_gets_a_large_norm_for_classes_of_rows(noise: float, share: float):
    model, rows = make_model(), torch.ones(8, 5)  # 39 weights
    plan = make_plan(noise_multiplier=noise * 8 / (39 / 10) ** 0.5)
    losses: dict[int, float] = {}
    for places in (1, 2):  # of each row in each layer
        batch = rows.unflatten(0, (-1, places)) if places > 1 else rows, torch.zeros(8 // places).long()
        found = pg.suggest(
            model,
            plan,
            public_batch=batch,
            loss_fn=lambda m, b: F.cross_entropy(
                m(b[0]).mean(-2) if b[0].ndim > 2 else m(b[0]), b[1], reduction="none"
            ),
        )
        losses[places] = found.plan.max_grad_norm
    assert losses[1] / losses[2] == pytest.approx(share / 0.3, rel=0.3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2)),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 6, 3, padding="same"),
    ],
)
def test_a_convolutions_inputs_are_its_patches(layer: nn.Conv2d):
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(5, 4, 9, 8)
    model(images)
    padding = layer.padding if not isinstance(layer.padding, str) else 1
    patches = F.unfold(images, layer.kernel_size, layer.dilation, padding, layer.stride)
    per_group = patches.unflatten(1, (layer.groups, -1)).square().sum(2)
    found = pg.suggest(model, make_plan(), public_batch=images)
    assert found.input_norms["0"] == pytest.approx(float(per_group.mean().sqrt()))


@pytest.mark.parametrize("groups", [1, 2])
def test_an_output_of_a_transposed_convolution_reads_the_inputs_that_reach_it(groups: int):
    layer = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=groups)
    images = torch.randn(3, 4, 5, 4)
    found = norms_of(nn.Sequential(layer, nn.Flatten(), nn.Linear(4 * 10 * 8, 2)), images)
    weights, biases = dict(layer.named_parameters()), torch.zeros(4)

    def output(weight: torch.Tensor) -> torch.Tensor:
        """The first channel of each group: linear in the weights, so the inputs are its derivatives by them."""
        return torch.func.functional_call(layer, {"weight": weight, "bias": biases}, images)[:, :: 4 // groups]

    reads = torch.func.jacrev(output)(weights["weight"].detach()).flatten(4).square().sum(-1)
    assert found["0"] == pytest.approx(float(reads.mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("views", [1, 8])
def test_places_are_those_of_one_weight_in_one_view(groups: int, views: int):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(196, 2))
    examples = 100 * torch.randn(6, 4, 9, 9), torch.zeros(6, dtype=torch.long)
    losses = multiplicity(classes, lambda batch: batch, views=views)
    found = pg.suggest(model, make_plan(), public_batch=examples, loss_fn=losses)
    assert "x 49 places" in found.reasons[0]
    assert found.noise_step == pytest.approx(0.16 / (found.input_norms["0"] * 49**0.25), rel=0.05)


@pytest.mark.parametrize(
    ("parts", "loss_fn", "steps", "factor"),
    [
        ((nn.ReLU(), nn.BatchNorm2d(4)), classes, 100, 2.0),  # the norm need not follow at once
        ((nn.BatchNorm2d(4), nn.ReLU()), classes, 400, 2**0.5),
        ((nn.BatchNorm2d(4), nn.ReLU()), classes, 5000, 1.0),
        ((nn.ReLU(),), classes, 100, 1.0),
        ((nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Tanh()), classes, 100, 1.0),  # the second has no norm
        ((nn.BatchNorm2d(4),), lambda m, b: m(b[0]).square().sum(1), 100, 1.0),
    ],
)
def test_convolutions_before_norms_get_a_larger_noise_step(
    parts: tuple[nn.Module, ...], loss_fn: Any, steps: int, factor: float
):
    torch.manual_seed(0)
    model = pg.fix(nn.Sequential(nn.Conv2d(1, 4, 3), *parts, nn.Flatten(), nn.Linear(4 * 16, 3)))
    batch = torch.randn(8, 1, 6, 6), torch.arange(8) % 3
    found = pg.suggest(model, make_plan(steps=steps), public_batch=batch, loss_fn=loss_fn)
    largest = max(norm * (1 if name == str(len(parts) + 2) else 2) for name, norm in found.input_norms.items())
    assert found.noise_step == pytest.approx(0.16 * factor / largest, rel=0.05)
    assert ("that are normalized" in str(found)) == (factor > 1 or steps > 200)


@pytest.mark.parametrize("norm", ["before the convolution", "after it"])
def test_a_last_layer_of_zeros_shows_no_normalization(norm: str):
    """All losses are then equal, whatever the convolution returns."""
    torch.manual_seed(0)
    parts = [nn.GroupNorm(1, 1), nn.Conv2d(1, 4, 3)] if "before" in norm else [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * 16, 3))
    batch = torch.randn(8, 1, 6, 6), torch.arange(8) % 3
    settings: Any = {"public_batch": batch, "loss_fn": classes}
    assert ("normalized" in str(pg.suggest(model, make_plan(), **settings))) == ("after" in norm)
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    assert "normalized" not in str(pg.suggest(model, make_plan(), **settings))


def test_words_are_vectors_with_a_single_one():
    ids = torch.tensor([[1, 1, 2, 0], [3, 4, 0, 0]])  # 0 is padding
    bag = models.bag_of_words(vocabulary=6, num_classes=2)
    assert norms_of(bag, ids)[""] == pytest.approx(math.sqrt(((2 / 3) ** 2 + (1 / 3) ** 2 + 0.5) / 2))
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(16, 2))
    found = pg.suggest(model, make_plan(), public_batch=ids)
    assert found.input_norms["0"] == pytest.approx(1.0)
    sparse = models.SparseLinear(6, 2)
    packed = torch.tensor([[[1.0, 2.0], [0.3, 0.4]]])
    assert norms_of(sparse, packed)[""] == pytest.approx(0.5)


def test_a_layer_of_another_kind_may_take_one_number_an_example():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, None] * self.weight

    assert norms_of(Scaled(), torch.tensor([3.0, 4.0]))[""] == pytest.approx(math.sqrt(12.5))


def test_sequences_count_their_places():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = torch.randn(8, 1, 4)
    short, long = (pg.suggest(model, make_plan(), public_batch=rows.expand(8, n, 4)).noise_step for n in (1, 16))
    assert long == pytest.approx(short / 2, rel=0.06)


def test_it_takes_the_median_public_gradient_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model, (x, y) = make_model(), make_data().tensors
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].eval()
    found = pg.suggest(model, make_plan(), public_batch=(x, y), loss_fn=loss_fn)
    norms = []
    for index in range(len(x)):
        model.zero_grad()
        loss_fn(model, (x[index : index + 1], y[index : index + 1])).sum().backward()
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
    model.zero_grad()
    assert found.plan.max_grad_norm == pytest.approx(float(f"{0.3 * sorted(norms)[len(norms) // 2]:.1g}"), rel=0.3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model[0].training, model[1].training) == (False, True)
    assert "Noise step" in str(found)
    assert all(reason in str(found) for reason in found.reasons)


def test_a_training_by_the_suggestion_runs_and_a_simulation_stays_one():
    data = make_data()
    plan = make_plan(steps=3)
    model = make_model()
    found = pg.suggest(model, plan, public_batch=data.tensors, loss_fn=loss_fn)
    optimizer = found.optimizer(model)
    private_grad = pg.PrivateGradient(model, loss_fn, found.plan, clip=found.clip)
    pg.fit(private_grad, optimizer, data, scheduler=found.schedule, progress=False)
    assert private_grad.ledger.releases == 3
    halved = plan.scaled(0.5)
    simulated = pg.suggest(model, halved, public_batch=data.tensors, loss_fn=loss_fn).plan
    assert simulated.simulates is not None
    assert simulated.max_grad_norm == found.plan.max_grad_norm
    assert simulated.expected_batch_size == halved.expected_batch_size


def test_private_batches_plans_of_users_and_models_without_layers_are_refused():
    data, plan, model = make_data(), make_plan(), make_model()
    batch = next(plan.batches(data))
    users = pg.PrivacyPlan.for_users(
        num_users=10, expected_cohort_size=5, rounds=2, max_update_norm=1.0, delta=1e-3, noise_multiplier=1.0
    )
    rows: list[tuple[dict[str, Any], str]] = [
        ({"public_batch": batch}, "public_batch to be public, got a batch of a privacy plan"),
        ({"plan": users}, "plan to be for examples, got privacy_unit 'user'"),
        ({"model": nn.Linear}, "model to be a torch.nn.Module"),
        ({"loss_fn": 3}, "not callable"),
        ({"model": nn.LayerNorm(4), "public_batch": torch.randn(3, 4), "loss_fn": None}, "to call a trained layer"),
        ({"public_batch": (torch.zeros(3, 4), torch.zeros(2))}, "a length that differs"),
        (
            {"public_batch": make_data().tensors[0][:0], "loss_fn": None},
            "number of public examples to be an integer >= 1, got 0",
        ),
        ({"public_batch": data}, "one entry per example, got TensorDataset"),
        ({"public_batch": DataLoader(data)}, "one entry per example, got DataLoader"),
        ({"public_batch": [data[0], data[1]]}, "one entry per example, got a tensor without dimensions"),
        ({"public_batch": data.tensors, "loss_fn": None}, "positional argument"),
        (
            {"plan": make_plan(noise_multiplier=0.0)},
            "plan.noise_multiplier to be a positive finite number, got 0.0; without noise",
        ),
        ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))}, "got BatchNorm1d at '1'"),
        ({"model": make_model().requires_grad_(False)}, "trainable parameters"),
    ]
    for change, message in rows:
        given: dict[str, Any] = {
            "model": model,
            "plan": plan,
            "public_batch": data.tensors,
            "loss_fn": loss_fn,
        } | change
        with pytest.raises((pg.PrivacyError, TypeError), match=message):
            pg.suggest(given["model"], given["plan"], public_batch=given["public_batch"], loss_fn=given["loss_fn"])


def test_the_model_and_the_global_random_stream_are_left_as_they_were():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(F.dropout(x, 0.5, training=True))

    model, before = Counting(), torch.get_rng_state()
    pg.suggest(model, make_plan(), public_batch=torch.randn(20, 5, generator=torch.Generator().manual_seed(0)))
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_only_a_model_with_one_trained_matrix_gets_the_linear_rule():
    torch.manual_seed(0)
    rows = torch.randn(50, 6)
    shared = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))
    assert pg.suggest(shared, make_plan(), public_batch=rows).schedule == pg.Schedule("linear")
    normed = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
    assert pg.suggest(normed, make_plan(), public_batch=rows).schedule == pg.Schedule("constant")
    images = nn.Sequential(nn.LayerNorm([4, 4]), nn.Flatten(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2))
    assert set(pg.suggest(images, make_plan(), public_batch=torch.randn(9, 4, 4)).input_norms) == {"2", "4"}
    half = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).half()
    found = pg.suggest(half, make_plan(), public_batch=(200 * rows).half())
    assert found.input_norms["0"] == pytest.approx(float((200 * rows).square().sum(1).mean().sqrt()), rel=0.01)


def test_without_losses_a_batch_holds_the_arguments_of_the_model():
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.first(a) + self.second(b)

    a, b = torch.randn(20, 3), torch.randn(20, 4)
    found = [pg.suggest(TwoInputs(), make_plan(), public_batch=batch) for batch in ((a, b), {"b": b, "a": a})]
    expected = {"first": float(a.square().sum(1).mean().sqrt()), "second": float(b.square().sum(1).mean().sqrt())}
    assert all(one.input_norms == pytest.approx(expected) for one in found)


# By name: outputs, loss, and the standard deviation of the labels if they are one number.
LOSSES: dict[str, tuple[int, Any, float | None]] = {
    "two classes": (2, lambda m, b: F.cross_entropy(m(b[0]), b[1] % 2, reduction="none"), None),
    "600 classes": (600, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), None),
    "one logit": (
        1,
        lambda m, b: F.binary_cross_entropy_with_logits(m(b[0])[:, 0], b[2][:, 0], reduction="none"),
        None,
    ),
    "absolute": (1, lambda m, b: (m(b[0])[:, 0] - b[1]).abs(), None),
    "one label for all": (1, lambda m, b: (m(b[0])[:, 0] - 0.3).square(), None),
    "pictures": (9, lambda m, b: (m(b[0]) - b[2][:, :9]).square().mean(1), None),
    "squares": (1, lambda m, b: (m(b[0])[:, 0] - b[1] / 100).square(), 0.1847),
    "wide squares": (1, lambda m, b: (m(b[0])[:, 0] - b[1]).square() / 2, 18.47),
    "counts": (1, lambda m, b: F.poisson_nll_loss(m(b[0])[:, 0], b[1] / 50, reduction="none"), 0.3695),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_noise_step_of_a_number_follows_its_spread(name: str):
    outputs, loss_fn, spread = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs))
    batch = torch.randn(64, 5), torch.arange(64), torch.rand(64, 600)
    share = 1.0 if spread is None else min(1.0, 0.011 / 0.16 * spread * math.sqrt(3))
    is_bounded = name in ("two classes", "600 classes", "one logit", "absolute")
    for steps in (10, 800):
        found = pg.suggest(model, make_plan(steps=steps), public_batch=batch, loss_fn=loss_fn)
        rows = 0.1 * math.log10(max(2, outputs)) * math.sqrt(200 / steps)
        network = min(0.16, rows) if is_bounded else 0.16
        assert found.noise_step == pytest.approx(network / max(found.input_norms.values()) * share, rel=0.06)
    assert any("that of a number" in reason for reason in found.reasons) == (spread is not None)
    if outputs == 1:
        one = pg.suggest(nn.Linear(5, 1), make_plan(), public_batch=batch, loss_fn=loss_fn)
        share = 1.0 if spread is None else min(1.0, 0.016 / 0.06 * spread * math.sqrt(3))
        assert one.noise_step == pytest.approx(0.06 / max(one.input_norms.values()) * share, rel=0.06)
