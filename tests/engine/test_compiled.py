"""Steps by a compiled function equal those of the engine, and what cannot be recorded is computed without it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from privgrad.clip.clipping import ClippingAccumulator, Tried
from privgrad.engine import compiled
from privgrad.parts import Parts
from privgrad.private_gradient import RawStep

EXAMPLES, BATCH, MOST = 60, 12, 20
Loss = Callable[[nn.Module, Any], Tensor]


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_BACKEND", "eager")  # the graph itself; inductor takes a minute to compile it


class Attends(nn.Module):
    """Two layers over sequences, with attention, a position parameter and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(30, 8), nn.Parameter(0.1 * torch.randn(5, 8))
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.dropout(F.scaled_dot_product_attention(q, k, v))
        return self.out(h.mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "layers": (layers, lambda g: torch.randn(EXAMPLES, 6, generator=g)),
    "attention": (Attends, lambda g: torch.randint(30, (EXAMPLES, 5), generator=g)),
    "dropout": (lambda: Attends(0.3), lambda g: torch.randint(30, (EXAMPLES, 5), generator=g)),
    "convolutions": (convolutions, lambda g: torch.randn(EXAMPLES, 1, 8, 8, generator=g)),
}


SCALES = pg.Scales(
    {
        "0.weight": torch.full((9, 6), 0.5),
        "0.bias": torch.ones(9),
        "2.weight": torch.ones(3, 9),
        "2.bias": torch.ones(3),
    },
    provenance="public data",
    source="this test",
)


def cross_entropy(model: nn.Module, examples: Any) -> Tensor:
    return F.cross_entropy(model(examples[0]), examples[1], reduction="none")


def train(
    model: str = "layers",
    loss: Loss = cross_entropy,
    *,
    compile: bool,  # noqa: A002
    steps: int = 9,
    each: Callable[[int, nn.Module], None] | None = None,
    change: Callable[[list[Tensor]], None] | None = None,
    double: bool = False,
    plan: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Tensor], pg.PrivateGradient]:
    """Return the raw mean of each step, and what computed it. The noise is the same for a seed."""
    make, inputs = MODELS[model]
    torch.manual_seed(0)
    net, generator = make(), torch.Generator().manual_seed(1)
    columns = [inputs(generator), torch.randint(3, (EXAMPLES,), generator=generator)]
    if double:
        net = net.double()
        columns[0] = columns[0].double() if columns[0].is_floating_point() else columns[0]
    if change is not None:
        change(columns)
    numbers: dict[str, Any] = {"sampling": "truncated", "max_batch_size": MOST} | dict(plan or {})
    dp = pg.PrivacyPlan(
        sample_rate=BATCH / EXAMPLES,
        steps=steps,
        expected_batch_size=BATCH,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        num_examples=EXAMPLES,
        delta=1e-5,
        seed=2,
        **numbers,
    )
    private_grad = pg.PrivateGradient(net, loss, dp, compile=compile, **options)
    optimizer = pg.optim.AdamBC(net.named_parameters(), noise_step=1e-2)
    found = list[Tensor]()

    def observe(raw: RawStep) -> None:
        found.append(torch.cat([value.flatten().double() for value in raw.raw_mean.values()]))

    private_grad.register_raw_observer(observe)
    for step, batch in enumerate(dp.batches(TensorDataset(*columns))):
        if each is not None:
            each(step, net)
        optimizer.step(grad=private_grad(batch))
    return found, private_grad


def functions_of(private_grad: pg.PrivateGradient) -> list[compiled.Function | None]:
    """Return the functions that a training keeps."""
    return [*private_grad._structure.once(compiled._functions).values()]


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def both(*args: Any, tolerance: float = 1e-6, **options: Any) -> pg.PrivateGradient:
    """Train with and without a compiled function, compare each step, and return the former."""
    plain, _ = train(*args, compile=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*compiled function.*")
        found, private_grad = train(*args, compile=True, **options)
    assert furthest(found, plain) < tolerance
    assert any(functions_of(private_grad))
    return private_grad


@pytest.mark.parametrize("model", MODELS)
def test_equals_the_engine(model: str) -> None:
    both(model)


@pytest.mark.parametrize("model", MODELS)
def test_equals_the_engine_in_float64(model: str) -> None:
    both(model, double=True, tolerance=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"clip": pg.clip.PerLayer({"0": 1.0, "2": 2.0})},
        {"clip": pg.clip.Automatic()},
        {"norm_bins": 4},
        {"precondition": pg.precondition.fixed(SCALES)},
        {"microbatch_size": 8},
        {"microbatch_size": 5, "plan": {"sampling": "poisson", "max_batch_size": None}},
    ],
    ids=["per layer", "automatic", "norm bins", "scales", "microbatches", "poisson"],
)
def test_equals_the_engine_beside(options: dict[str, Any]) -> None:
    both(**options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of itself
def test_equals_the_engine_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of dropout are the same, too."""
    monkeypatch.setattr(compiled, "_BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}")  # torch runs a cached function for another processor
    both("dropout", steps=5)


@pytest.mark.parametrize("spoiling", [torch.inf, 1e12], ids=["not finite", "squares lost"])
@pytest.mark.parametrize("model", ["layers", "convolutions"])
def test_an_example_with_a_flag_is_computed_by_the_engine(model: str, spoiling: float) -> None:
    def spoil(columns: list[Tensor]) -> None:
        columns[0][7] = spoiling

    plain, engine = train(model, compile=False, change=spoil)
    found, ours = train(model, compile=True, change=spoil)
    assert furthest(found, plain) < 1e-6
    assert ours.raw_nonfinite_examples == engine.raw_nonfinite_examples
    assert (spoiling != torch.inf) or ours.raw_nonfinite_examples > 0


@pytest.mark.parametrize("model", ["layers", "dropout"])
def test_an_example_with_a_flag_does_not_change_how_others_are_computed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their norms are the same, bit for bit; so are their masks of dropout."""
    own, flagged = compiled.Function.__call__, True

    def flags(self: compiled.Function, *inputs: Tensor) -> compiled.Tried:
        tried = own(self, *inputs)
        if self.is_compared and flagged and bool(inputs[-1][2]):  # once: then this row does not count
            seen.append(tried.raw_norms)
            tried.flags[2] = True
        elif self.is_compared:
            without.append(tried.raw_norms)
        return tried

    seen, without = list[Tensor](), list[Tensor]()
    monkeypatch.setattr(compiled.Function, "__call__", flags)
    found, _ = train(model, compile=True)
    plain, _ = train(model, compile=False)
    assert len(seen) == len(without) > 3
    others = torch.arange(MOST) != 2
    assert all(torch.equal(a[others], b[others]) for a, b in zip(seen, without, strict=True))
    assert model == "dropout" or furthest(found, plain) < 1e-6  # the row by itself draws another mask


def test_a_new_number_in_the_loss_makes_a_new_function() -> None:
    weight = 1.0

    def loss(model: nn.Module, examples: Any) -> Tensor:
        return weight * cross_entropy(model, examples)

    def each(step: int, _: nn.Module) -> None:
        nonlocal weight
        weight = 1.0 if step < 5 else 0.05

    both(loss=loss, each=each)


def test_a_number_that_changes_in_each_step_ends_the_recordings() -> None:
    weight = 1.0

    def loss(model: nn.Module, examples: Any) -> Tensor:
        return weight * cross_entropy(model, examples)

    def each(step: int, _: nn.Module) -> None:
        nonlocal weight
        weight = 1 / (1 + step)

    plain, _ = train(loss=loss, each=each, compile=False, steps=20)
    with pytest.warns(UserWarning, match="changes again and again"):
        found, _ = train(loss=loss, each=each, compile=True, steps=20)
    assert furthest(found, plain) < 1e-6


def test_a_loss_that_counts_its_passes_is_not_recorded() -> None:
    def made() -> Loss:
        passes = {"count": 0}

        def loss(model: nn.Module, examples: Any) -> Tensor:
            passes["count"] += 1
            return min(1.0, passes["count"] / 9) * cross_entropy(model, examples)

        return loss

    plain, _ = train(loss=made(), compile=False)
    with pytest.warns(UserWarning, match="passes count passes"):
        found, _ = train(loss=made(), compile=True)
    assert furthest(found, plain) == 0.0


def test_a_frozen_layer_makes_a_new_function() -> None:
    def each(step: int, model: nn.Module) -> None:
        if step == 5:
            model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]

    plain, _ = train(compile=False, each=each, steps=5)
    found, private_grad = train(compile=True, each=each, steps=5)
    assert furthest(found, plain) < 1e-6
    before = functions_of(private_grad)
    private_grad.model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    assert before
    assert not private_grad._structure.follow().once(compiled._functions)


def _reads(model: nn.Module, examples: Any) -> Tensor:
    assert examples[1].max().item() < 3
    return cross_entropy(model, examples)


def _bakes(model: nn.Module, examples: Any) -> Tensor:
    """Labels that a recording from real values would keep for ever."""
    return F.cross_entropy(model(examples[0]), torch.from_numpy(examples[1].numpy()), reduction="none")


@pytest.mark.parametrize(("loss", "reason"), [(_reads, "reads values of tensors"), (_bakes, "could not compile it")])
def test_a_loss_that_reads_values_is_not_recorded(loss: Loss, reason: str) -> None:
    plain, _ = train(loss=loss, compile=False)
    with pytest.warns(UserWarning, match=reason):
        found, private_grad = train(loss=loss, compile=True)
    assert furthest(found, plain) == 0.0
    assert functions_of(private_grad) == [None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "vmap"}, "engine='vmap'"),
        ({"perturb": pg.perturb.BAM(0.1)}, "BAM"),
        ({"adaptive_clip": pg.clip.TargetFraction(), "norm_bins": 4}, "adaptive_clip"),
        ({"plan": {"sampling": "poisson", "max_batch_size": None}}, "Poisson batches"),
    ],
)
def test_warns_of_a_part_without_a_compiled_function(options: dict[str, Any], reason: str) -> None:
    plain, _ = train(compile=False, steps=3, **options)
    with pytest.warns(UserWarning, match=reason):
        found, _ = train(compile=True, steps=3, **options)
    assert furthest(found, plain) == 0.0


def test_a_function_that_differs_from_the_engine_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(compiled.Compiled):
        def _recorded(
            self, examples: Any, inputs: Sequence[Tensor], accumulator: ClippingAccumulator
        ) -> compiled.Function | None:
            own = super()._recorded(examples, inputs, accumulator)
            assert own is not None
            run, count = own._run, len(own._names)
            own._run = lambda *inputs: [x * (1.1 if place < count else 1) for place, x in enumerate(run(*inputs))]
            return own

    plain, _ = train(compile=False, steps=12)
    monkeypatch.setattr(Parts, "compiled", Wrong)
    with pytest.warns(UserWarning, match="differs from the engine"):
        found, private_grad = train(compile=True, steps=12)
    assert furthest(found, plain) == 0.0
    assert functions_of(private_grad) == [None]


@pytest.mark.parametrize(("change", "differs"), [(2e-5, False), (2e-2, True)])
def test_a_difference_of_gradients_near_zero_counts_in_units_of_c(change: float, differs: bool) -> None:
    """Where a model is sure of its classes, rounding changes gradients by percents."""

    def tried(length: float) -> Tried:
        found = torch.full((1,), length)
        return Tried({"weight": found.double()}, found, torch.ones(1), found, torch.zeros(1, dtype=torch.bool))

    assert compiled._differ(tried(1e-3 + change), tried(1e-3), 0.005, 1.0) is differs


@pytest.mark.parametrize("kind", ["function", "module", "data"])
def test_a_change_of_what_the_loss_reads_makes_a_new_function(kind: str) -> None:
    """Functions and modules, and a loop that replaces the data of parameters."""

    def made() -> tuple[Loss, Callable[[int, nn.Module], None]]:
        part: Any = nn.L1Loss(reduction="none") if kind == "module" else partial(F.l1_loss, reduction="none")
        weight = 1.0

        def loss(model: nn.Module, examples: Any) -> Tensor:
            return weight * part(model(examples[0]), F.one_hot(examples[1], 3).float()).sum(1)

        def each(step: int, model: nn.Module) -> None:
            nonlocal part, weight
            if step == 9 and kind != "data":
                part = nn.MSELoss(reduction="none") if kind == "module" else partial(F.mse_loss, reduction="none")
            if kind == "data":
                weight = 1.0 if step < 9 else 0.1
                for p in model.parameters():
                    p.data = p.data.clone()

        return loss, each

    trained = list[list[Tensor]]()
    for is_compiled in (True, False):
        loss, each = made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained.append(train(loss=loss, each=each, compile=is_compiled, steps=14)[0])
    assert furthest(*trained) < 1e-6


def test_an_unseen_change_ends_the_training_before_a_release() -> None:
    """Else private examples could decide when all others are computed by the new loss."""
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda _: 1.0)

    def loss(model: nn.Module, examples: Any) -> Tensor:
        return schedule.get_last_lr()[0] * cross_entropy(model, examples)

    def each(step: int, _: nn.Module) -> None:
        if step == 9:
            schedule._last_lr = [0.1]

    with pytest.raises(pg.PrivacyError, match="to compute what was compiled"):
        train(loss=loss, each=each, compile=True, steps=20)
