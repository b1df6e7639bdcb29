"""State that passes leave behind: what is fitted is refused, a counter counts steps, and all else is undone."""

import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from conftest import make_plan
from privgrad.checks import variables

ROWS = 12
STATS: dict[str, Tensor] = {}


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(0, 3, (ROWS,)))


def ce(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def train(
    model: nn.Module,
    loss_fn: Any,
    *,
    engine: Any = "factored",
    steps: int = 3,
    after: Callable[[int, Any], object] = lambda step, batch: None,
    microbatch_size: int | None = None,
) -> tuple[int, list[dict[str, Tensor]]]:
    """Train on all rows without noise; return the number of releases, and the clipped sums."""
    plan = make_plan(sample_rate=1.0, expected_batch_size=ROWS, num_examples=ROWS, steps=steps, seed=0)
    sums = list[dict[str, Tensor]]()
    private_grad = pg.PrivateGradient(model, loss_fn, plan, engine=engine, microbatch_size=microbatch_size)
    private_grad.register_raw_observer(lambda raw: sums.append({k: v * ROWS for k, v in raw.raw_mean.items()}))
    try:
        for step, batch in enumerate(plan.batches(data())):
            private_grad(batch)
            after(step, batch)
    except pg.PrivacyError as error:
        error.add_note(f"after {private_grad.ledger.releases} releases")
        raise
    return private_grad.ledger.releases, sums


def expected_sum(model: nn.Module, loss_fn: Any) -> dict[str, Tensor]:
    """The sum of the gradients of single examples, each clipped to the plan's C."""
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    x, y = data().tensors
    for row in range(ROWS):
        grads = torch.autograd.grad(loss_fn(model, (x[row : row + 1], y[row : row + 1])).sum(), list(named.values()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, grad in zip(named, grads, strict=True):
            total[name] += grad * min(1.0, make_plan().max_grad_norm / float(norm))
    return total


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, 3, dtype=torch.float64)


class Scaler:
    """An object of the user's, fitted at its first call."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        return x - self.mean


class Fitted:
    """A loss that is an object, and fitted at its first call."""

    def __init__(self) -> None:
        self.scaler = Scaler()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return ce(model(self.scaler(batch[0])), batch[1])


class Slow:
    """A running mean with slots that reads before it writes."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(5, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = 0.999 * self.mean + 0.001 * x.detach().mean(0)
        return x - before


class Scaled(nn.Module):
    """A model that holds an object of the user's."""

    def __init__(self, scaler: Any) -> None:
        super().__init__()
        self.scaler, self.last = scaler, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scaler(x))


class Shared(nn.Module):
    """A model whose class holds the statistic."""

    mean: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.last = linear()

    def forward(self, x: Tensor) -> Tensor:
        if Shared.mean is None:
            Shared.mean = x.mean(0)
        return self.last(x - Shared.mean)


def in_a_closure() -> tuple[nn.Module, Any, str]:
    stats: dict[str, Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not stats:
            stats["mean"] = batch[0].mean(0)
        return ce(model(batch[0] - stats["mean"]), batch[1])

    return linear(), loss, r"stats\['mean'\]"


def in_a_global() -> tuple[nn.Module, Any, str]:
    STATS.clear()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] / STATS.setdefault("scale", batch[0].abs().max())
        return ce(model(x), batch[1])

    return linear(), loss, r"STATS\['scale'\]"


def in_a_nonlocal() -> tuple[nn.Module, Any, str]:
    largest = 0.0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, float(batch[0].abs().max()))
        return ce(model(batch[0] / largest), batch[1])

    return linear(), loss, "largest"


def in_a_number(made: Callable[[float], Any]) -> tuple[nn.Module, Any, str]:
    kept = SimpleNamespace(most=made(12.0))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept.most = max(kept.most, made(float(100 * batch[0].abs().max())))
        return ce(model(batch[0] / float(kept.most)), batch[1])

    return linear(), loss, "kept.most"


def in_a_default() -> tuple[nn.Module, Any, str]:
    def loss(model: nn.Module, batch: Any, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
        seen[:] = seen or [batch[0].mean(0)]
        return ce(model(batch[0] - seen[0]), batch[1])

    return linear(), loss, "seen"


def in_a_partial() -> tuple[nn.Module, Any, str]:
    def loss(kept: SimpleNamespace, model: nn.Module, batch: Any) -> Tensor:
        kept.mean = batch[0].mean(0) if kept.mean is None else kept.mean
        return ce(model(batch[0] - kept.mean), batch[1])

    return linear(), partial(loss, SimpleNamespace(mean=None)), "loss_fn.mean"


def in_place() -> tuple[nn.Module, Any, str]:
    center = torch.zeros(5, dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0] - center)
        center.data.mul_(0.9).add_(0.1 * batch[0].mean(0))
        return ce(output, batch[1])

    return linear(), loss, "center"


def in_a_queue() -> tuple[nn.Module, Any, str]:
    queue = deque([torch.zeros(5, dtype=torch.float64)], maxlen=4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] - torch.stack(list(queue)).mean(0)
        queue.append(batch[0].mean(0))
        return ce(model(x), batch[1])

    return linear(), loss, "queue"


def in_a_hook() -> tuple[nn.Module, Any, str]:
    model, scaler = nn.Sequential(nn.Identity(), linear()), Scaler()
    model[0].register_forward_hook(lambda module, inputs, output: scaler(output))  # pyright: ignore
    return model, lambda m, batch: ce(m(batch[0]), batch[1]), "scaler.mean"


def in_a_class() -> tuple[nn.Module, Any, str]:
    Shared.mean = None
    return Shared(), lambda m, batch: ce(m(batch[0]), batch[1]), "Shared.mean"


FITTED: dict[str, Callable[[], tuple[nn.Module, Any, str]]] = {
    "closure": in_a_closure,
    "global": in_a_global,
    "nonlocal": in_a_nonlocal,
    "a float of numpy": partial(in_a_number, np.float32),
    "a fraction": partial(in_a_number, Fraction),
    "default": in_a_default,
    "partial": in_a_partial,
    "in place": in_place,
    "queue": in_a_queue,
    "hook": in_a_hook,
    "class": in_a_class,
    "callable": lambda: (linear(), Fitted(), "loss_fn.scaler.mean"),
    "object": lambda: (Scaled(Scaler()), lambda m, batch: ce(m(batch[0]), batch[1]), "model.scaler.mean"),
    "slots": lambda: (Scaled(Slow()), lambda m, batch: ce(m(batch[0]), batch[1]), "model.scaler.mean"),
}


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("kind", FITTED)
def test_fitted_state_is_refused_by_name_before_a_release(kind: str, engine: Any):
    model, loss, name = FITTED[kind]()
    with pytest.raises(pg.PrivacyError, match=f"expected {name} not to be set from private") as error:
        train(model, loss, engine=engine)
    assert error.value.__notes__ == ["after 0 releases"]


@pytest.mark.filterwarnings("ignore:vmap cannot batch this model")
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_an_estimator_that_a_pass_fits_is_refused(engine: Any, is_fitted: bool, partial: bool):
    """Scikit-learn's own objects: three private rows would stay in the scaler for all steps."""
    scaler = StandardScaler()
    if is_fitted:
        scaler.fit(np.random.default_rng(0).normal(size=(50, 5)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().numpy()
        if partial:
            scaler.partial_fit(x)
        elif not hasattr(scaler, "mean_"):
            scaler.fit(x)
        return ce(model(torch.as_tensor(scaler.transform(x))), batch[1])

    if is_fitted and not partial:
        assert train(linear(), loss, engine=engine)[0] == 3
        return
    with pytest.raises(pg.PrivacyError, match=r"scaler\.mean_ .* not to be set from private examples") as error:
        train(linear(), loss, engine=engine)
    assert error.value.__notes__ == ["after 0 releases"]


def test_the_remedy_works():
    stats = {"mean": torch.ones(5, dtype=torch.float64)}  # fitted on public data

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not stats:
            stats["mean"] = batch[0].mean(0)
        return ce(model(batch[0] - stats["mean"]), batch[1])

    assert train(linear(), loss)[0] == 3


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_state_that_is_fitted_after_a_warm_up_is_refused_in_that_step(engine: Any):
    stats: dict[str, Any] = {"step": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if stats["step"] >= 2 and "mean" not in stats:
            stats["mean"] = batch[0].mean(0)
        return ce(model(batch[0] - stats.get("mean", 0.0)), batch[1])

    with pytest.raises(pg.PrivacyError, match=r"stats\['mean'\] not to be set") as error:
        train(linear(), loss, engine=engine, after=lambda step, _: stats.update(step=step + 1))
    assert error.value.__notes__ == ["after 2 releases"]


class Largest:
    """A running maximum in some holder; the first batches do not exceed it."""

    __slots__ = ("most",)

    def __init__(self) -> None:
        self.most: Any = 12.0


class Inherits(Largest):
    """Its slot is that of its base."""

    __slots__ = ()


class Hidden:
    """A slot with a name that Python changes."""

    __slots__ = ("__most",)

    def __init__(self) -> None:
        self.__most = 12.0

    most = property(lambda self: self.__most, lambda self, value: setattr(self, "_Hidden__most", value))


class OnClass:
    """The attribute's default is that of the class."""

    most = 12.0


class Phase(Enum):
    TRAIN = 1

    def __init__(self, _: int) -> None:
        self.most = 12.0


def set_item(x: Any, value: float) -> None:
    with torch.no_grad():
        x[...] = value


HOLDERS: dict[str, tuple[Any, Any, Any]] = {  # what holds it, how to read it, and how to write it
    "an inherited slot": (Inherits, lambda kept: kept.most, lambda kept, value: setattr(kept, "most", value)),
    "a hidden slot": (Hidden, lambda kept: kept.most, lambda kept, value: setattr(kept, "most", value)),
    "an attribute of an Enum": (
        lambda: Phase.TRAIN,
        lambda kept: kept.most,
        lambda k, value: setattr(k, "most", value),
    ),
    "a default of a class": (OnClass, lambda kept: kept.most, lambda kept, value: setattr(kept, "most", value)),
    "a large array": (lambda: np.full((40, 40), 12.0), lambda kept: kept.max(), set_item),
    "a frozen parameter": (
        lambda: nn.Parameter(torch.full((3,), 12.0), requires_grad=False),
        lambda kept: float(kept.max()),
        set_item,
    ),
    "a frozen set": (
        lambda: SimpleNamespace(seen=frozenset({12.0})),
        lambda kept: max(kept.seen),
        lambda kept, value: setattr(kept, "seen", frozenset({value})),
    ),
}


@pytest.mark.filterwarnings("ignore:vmap cannot batch")
@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_maximum_that_a_later_batch_raises_is_refused_in_that_step(holder: str, engine: Any):
    made, read, write = HOLDERS[holder]
    kept, scale = SimpleNamespace(most=made()), SimpleNamespace(value=1.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        largest = float(scale.value * batch[0].abs().max())
        if largest > read(kept.most):
            write(kept.most, largest)
        return ce(model(batch[0] / read(kept.most)), batch[1])

    Phase.TRAIN.most = 12.0
    with pytest.raises(pg.PrivacyError, match=r"not to be set from private examples") as error:
        train(linear(), loss, engine=engine, after=lambda step, _: setattr(scale, "value", 10.0 if step else 1.0))
    assert error.value.__notes__ == ["after 2 releases"]


def test_no_key_that_the_code_does_not_name_is_shown():
    words: dict[int, int] = {}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        places = [words.setdefault(round(float(v) * 1e6), len(words)) for v in batch[0][:, 0]]
        return ce(model(batch[0]), batch[1]) * (1 + torch.tensor(places, dtype=torch.float64))

    with pytest.raises(pg.PrivacyError, match="expected words not to be set"):
        train(linear(), loss)


class Counts(nn.Module):
    """A model that counts its passes in a buffer, an attribute or an object, and warms up."""

    steps: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last = linear()
        self.counter, self.state = SimpleNamespace(n=0.0), {"n": 0}
        if kind == "buffer":
            self.register_buffer("steps", torch.tensor(0))
        else:
            self.steps = 0
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "object":
            self.counter.n += 0.5
            return self.last(x) * min(1.0, self.counter.n / 2)
        if self.kind == "dict":
            self.state["n"] += 1
            return self.last(x) * min(1.0, self.state["n"] / 4)
        self.steps += 1
        return (
            self.last(x) * min(1.0, float(self.steps) / 4) if self.kind != "buffer" else self.last(x) * self.steps / 4
        )


def count_of(model: Any) -> float:
    return float({"object": model.counter.n * 2, "dict": model.state["n"]}.get(model.kind, model.steps))


@pytest.mark.parametrize("engine", ["factored", "vmap"])
@pytest.mark.parametrize("kind", ["buffer", "attribute", "object", "dict"])
def test_a_counter_counts_steps_and_all_passes_of_a_step_see_one_value(kind: str, engine: Any):
    model = Counts(kind)
    seen = list[float]()
    _, sums = train(
        model,
        lambda m, batch: ce(m(batch[0]), batch[1]),
        engine=engine,
        microbatch_size=5,
        after=lambda step, batch: seen.append(count_of(model)),
    )
    assert seen == [1, 2, 3]
    for step, found in enumerate(sums):
        wanted = expected_sum(model.last, lambda m, b, scale=(step + 1) / 4: ce(m(b[0]) * scale, b[1]))
        for name, value in wanted.items():
            torch.testing.assert_close(found[f"last.{name}"], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_a_counter_in_a_closure_counts_steps(engine: Any):
    state = {"n": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        state["n"] += 1
        return ce(model(batch[0]), batch[1]) * min(1.0, state["n"] / 2)

    model = linear()
    _, sums = train(model, loss, engine=engine, microbatch_size=5)
    assert state["n"] == 3
    for found, scale in zip(sums, (0.5, 1.0, 1.0), strict=True):
        wanted = expected_sum(model, lambda m, b, scale=scale: ce(m(b[0]), b[1]) * scale)
        assert all(torch.allclose(found[name], value, rtol=1e-8, atol=1e-8) for name, value in wanted.items())


def test_a_counter_continues_from_a_state_dict():
    model = Counts("buffer")
    model.load_state_dict({**model.state_dict(), "steps": torch.tensor(7)})
    train(model, lambda m, batch: ce(m(batch[0]), batch[1]))
    assert int(model.steps) == 10


def test_a_counter_that_changes_by_another_amount_is_refused_before_its_release():
    state = {"n": 0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        state["n"] += 1 if state["n"] < 2 else len(batch[0])
        return ce(model(batch[0]), batch[1])

    with pytest.raises(pg.PrivacyError, match=r"state\['n'\] not to be set") as error:
        train(linear(), loss)
    assert (state["n"], error.value.__notes__) == (2, ["after 2 releases"])


@pytest.mark.parametrize("kind", ["rows", "hits", "largest", "total"])
@pytest.mark.filterwarnings("ignore:the loss changed state")
def test_what_depends_on_the_examples_is_never_kept(kind: str):
    state: dict[str, Any] = {"number": 0.0}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = ce(model(batch[0]), batch[1])
        if kind == "rows":
            state["number"] += len(losses)
        elif kind == "hits":
            state["number"] += int((losses > 1).sum())
        elif kind == "largest":
            state["number"] = max(state["number"], float(losses.detach().max()))
        else:
            state["number"] = state["number"] + losses.detach().sum()
        return losses

    assert train(linear(), loss)[0] == 3
    assert state == {"number": 0.0}


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_what_each_pass_overwrites_and_a_log_are_left_alone_without_a_warning(engine: Any):
    model, kept, log = nn.Sequential(linear(), nn.Identity()), dict[str, Tensor](), list[int]()
    model[0].register_forward_hook(lambda module, inputs, output: kept.update(h=output))  # pyright: ignore

    def loss(model: nn.Module, batch: Any) -> Tensor:
        log.append(1)
        output = model(batch[0])
        return ce(output, batch[1]) + kept["h"].square().mean(1)

    assert train(model, loss, engine=engine)[0] == 3
    assert len(log) > 3


class Holds(nn.Module):
    """A model with a buffer, or a plain tensor, that the loop writes, and a number."""

    center: Tensor

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.last, center = linear(), torch.zeros(5, dtype=torch.float64)
        self.register_buffer("center", center) if not plain else setattr(self, "center", center)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x - self.center)


WRITES: dict[str, Callable[[Holds, Tensor], object]] = {
    "in place": lambda model, x: model.center.mul_(0.9).add_(x.mean(0)),
    "replaced": lambda model, x: setattr(model, "center", x.mean(0)),
    "an entry": lambda model, x: model.center[0].fill_(1),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", WRITES)
def test_a_buffer_that_the_loop_writes_warns_once(kind: str, plain: bool):
    model = Holds(plain=plain)
    with pytest.warns(UserWarning, match="between two steps") as found:
        train(model, lambda m, b: ce(m(b[0]), b[1]), after=lambda _, batch: WRITES[kind](model, batch.examples[0]))
    texts = [str(warning.message) for warning in found if "between two steps" in str(warning.message)]
    assert len(texts) == 1
    assert texts[0].startswith("model.center changed between two steps. If it was computed from a private batch")


def test_a_queue_that_the_loop_fills_warns():
    queue = deque([torch.zeros(5, dtype=torch.float64)], maxlen=3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ce(model(batch[0] - torch.stack(list(queue)).mean(0)), batch[1])

    with pytest.warns(UserWarning, match="queue changed between two steps"):
        train(linear(), loss, after=lambda _, batch: queue.append(batch.examples[0].mean(0)))


def test_a_tensor_in_a_closure_that_the_loop_writes_warns_once():
    queue = {"keys": torch.zeros(5, dtype=torch.float64)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ce(model(batch[0] - queue["keys"]), batch[1])

    with pytest.warns(UserWarning, match=r"queue\['keys'\] changed between two steps") as found:
        train(linear(), loss, after=lambda _, batch: queue.update(keys=batch.examples[0].mean(0)))
    assert sum("between two steps" in str(warning.message) for warning in found) == 1


MADE: dict[str, Callable[[Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "module": lambda weight: nn.CrossEntropyLoss(weight, reduction="none").double(),
    "partial": lambda weight: partial(F.cross_entropy, weight=weight, reduction="none"),
    "function": lambda weight: lambda output, y: F.cross_entropy(output, y, weight, reduction="none"),
}


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_a_criterion_that_the_loop_makes_of_a_batch_warns_once(kind: str, public: bool):
    weight = torch.ones(3, dtype=torch.float64)
    held = SimpleNamespace(criterion=MADE[kind](weight))

    def made(step: int, batch: Any) -> None:
        held.criterion = MADE[kind](weight if public else 1 + batch.examples[1].bincount(minlength=3).double())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(linear(), lambda m, b: held.criterion(m(b[0]), b[1]), after=made)
    texts = [str(warning.message) for warning in found if "between two steps" in str(warning.message)]
    assert [text.split(".")[:2] for text in texts] == (
        [] if public else [["held", "criterion changed between two steps"]]
    )


class Kept:
    """An object whose attributes a loss reads."""

    def __init__(self) -> None:
        self.number, self.texts, self.inner = 2.0, ["a", "b"], {"mean": torch.zeros(2), "deep": [1, {"x": 2}]}
        self.array, self.queue, self.seen = np.zeros(3), deque([1, 2]), {1}


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda kept: setattr(kept, "number", 3.0),
    "an item of a list": lambda kept: kept.texts.__setitem__(0, "c"),
    "one item more": lambda kept: kept.texts.append("c"),
    "an entry": lambda kept: kept.inner.update(mean=torch.zeros(2)),
    "a new key for an old one": lambda kept: kept.inner.update(late=kept.inner.pop("mean")),
    "an item inside": lambda kept: kept.inner["deep"][1].update(x=3),
    "a tensor": lambda kept: kept.inner["mean"].add_(1),
    "an array": lambda kept: kept.array.fill(1),
    "a queue": lambda kept: kept.queue.append(3),
    "a set": lambda kept: kept.seen.add(2),
    "an attribute that is new": lambda kept: setattr(kept, "late", 1),
    "an attribute that is gone": lambda kept: delattr(kept, "number"),
    "an attribute of the function": lambda kept: setattr(kept.loss, "late", 1),
    "the object": lambda kept: setattr(kept, "loss", None),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_snapshot_is_current_until_something_changes(kind: str):
    kept: Any = Kept()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = kept.number, kept.texts, kept.inner, kept.array, kept.queue, kept.seen, getattr(kept, "late", 0)
        return ce(model(batch[0]), batch[1]) + len(found) * len(loss.__name__) + (kept.loss is None)

    kept.loss = loss
    scope = variables.Scope(linear(), loss)
    before = variables.Snapshot(scope, scope.variables)
    assert before.is_current()
    CHANGES[kind](kept)
    assert not before.is_current()
    after = variables.Snapshot(scope, scope.variables)
    assert before.changed(after)
    assert after.is_current()


@pytest.mark.filterwarnings("ignore:a fixed seed")
def test_own_writes_moves_and_counts_of_the_loop_do_not_warn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), Holds(), nn.BatchNorm1d(3).eval())
    model.double()

    def after(step: int, batch: Any) -> None:
        model[1].count += 1  # pyright: ignore
        model(batch.examples[0])  # advances the vectors of the spectral norm
        model.float() if step == 1 else model.double()
        model.double()

    assert train(model, lambda m, b: ce(m(b[0]), b[1]), after=after, steps=4)[0] == 4


@pytest.mark.parametrize("holder", ["dict", "attribute", "object", "arguments", "module", "model"])
def test_mixing_that_a_number_of_the_loop_switches_on_is_refused_at_that_step(holder: str):
    state, other, args = {"epoch": 0}, SimpleNamespace(epoch=0), Namespace(epoch=0)
    settings, trained = cast(Any, ModuleType("settings_of_the_user")), cast(Any, linear())
    settings.epoch, trained.options = 0, {"epoch": 0}

    def loss(model: Any, batch: Any) -> Tensor:
        epoch = {
            "dict": state["epoch"],
            "attribute": getattr(loss, "epoch", 0),
            "object": other.epoch,
            "arguments": args.epoch,
            "module": settings.epoch,
            "model": model.options["epoch"],
        }[holder]
        x = batch[0] if epoch < 4 else 0.6 * batch[0] + 0.4 * batch[0].roll(1, 0)
        return ce(model(x), batch[1])

    loss.epoch = 0  # pyright: ignore

    def after(step: int, batch: Any) -> None:
        if holder in ("dict", "model"):
            (state if holder == "dict" else trained.options)["epoch"] = step
        else:
            objects = {"attribute": loss, "object": other, "arguments": args, "module": settings}
            objects[holder].epoch = step  # pyright: ignore

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example") as error:
        train(trained, loss, after=after, steps=9)
    assert error.value.__notes__ == ["after 5 releases"]


class Mode(Enum):
    PLAIN = 0
    MIXED = 1


def mixed_by_half(x: Tensor, by: float = 0.4) -> Tensor:
    return (1 - by) * x + by * x.roll(1, 0)


class Plain:
    """A way to augment; another class does it otherwise."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __bool__(self) -> bool:
        return False


class Mixed(Plain):
    def __call__(self, x: Tensor) -> Tensor:
        return mixed_by_half(x)


def mixed_by(share: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + share * (x.roll(1, 0) - x)


SWITCHES: dict[str, tuple[Any, Any]] = {
    "a float of numpy": (np.float32(0), np.float32(1)),
    "an integer of numpy": (np.int64(0), np.int64(3)),
    "a bool of numpy": (np.bool_(False), np.bool_(True)),
    "an Enum": (Mode.PLAIN, Mode.MIXED),
    "a fraction": (Fraction(0), Fraction(1, 2)),
    "a decimal": (Decimal(0), Decimal(1)),
    "bytes": (b"", b"mix"),
    "a range": (range(0), range(2)),
    "a function": (lambda x: x, mixed_by_half),
    "a closure": (mixed_by(0.0), mixed_by(0.4)),
    "a partial": (partial(mixed_by_half, by=0.0), partial(mixed_by_half)),
    "an object of another class": (Plain(), Mixed()),
    "a frozen set": (frozenset[str](), frozenset({"mix"})),
}


@pytest.mark.parametrize("replaced", [False, True], ids=["", "p.data"])
@pytest.mark.parametrize("place", ["object", "model"])
@pytest.mark.parametrize("kind", SWITCHES)
def test_mixing_that_the_loop_switches_on_by_another_value_is_refused_at_that_step(
    kind: str, place: str, replaced: bool
):
    """Also where the loop replaces the memory of the parameters, as `vector_to_parameters` does."""
    off, on = SWITCHES[kind]
    trained = cast(Any, linear())
    holder = trained if place == "model" else SimpleNamespace()
    holder.switch = off

    def loss(model: Any, batch: Any) -> Tensor:
        switch = holder.switch
        is_on = bool(switch.value) if isinstance(switch, Enum) else bool(switch)
        return ce(
            model(switch(batch[0]) if callable(switch) else mixed_by_half(batch[0]) if is_on else batch[0]), batch[1]
        )

    def after(step: int, batch: Any) -> None:
        holder.switch = on if step == 4 else holder.switch
        if replaced:
            for parameter in trained.parameters():
                parameter.data = parameter.data.clone()

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example") as error:
        train(trained, loss, after=after, steps=9)
    assert error.value.__notes__ == ["after 5 releases"]


def mixing(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + output.mean(0)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0) if self.training else x


TEACHERS: dict[str, Callable[[Any], object]] = {
    "mode": lambda kept: kept.teacher[1].train(),
    "layer": lambda kept: kept.teacher.__setitem__(1, Mixing()),
    "hook": lambda kept: kept.teacher[0].register_forward_hook(mixing),
    "statistics": lambda kept: [setattr(kept.teacher[2], name, None) for name in ("running_mean", "running_var")],
    "another one": lambda kept: setattr(kept, "teacher", nn.Sequential(nn.Identity(), Mixing())),
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_part_outside_of_the_model_that_mixes_later_is_refused_at_that_step(kind: str):
    kept: Any = SimpleNamespace(teacher=nn.Sequential(nn.Identity(), Mixing(), nn.BatchNorm1d(5)).eval().double())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = kept.teacher(batch[0])
        return ce(model(batch[0] + wanted), batch[1])

    def after(step: int, batch: Any) -> None:
        if step == 4:
            TEACHERS[kind](kept)
            kept.teacher.double()

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example") as error:
        train(linear(), loss, after=after, steps=9)
    assert error.value.__notes__ == ["after 5 releases"]


def test_a_switch_beside_a_move_of_the_model_is_refused_at_that_step():
    kept, trained = SimpleNamespace(epoch=0), linear()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].to(next(model.parameters()).dtype)
        return ce(model(mixed_by_half(x) if kept.epoch > 3 else x), batch[1])

    def after(step: int, batch: Any) -> None:
        kept.epoch = step
        trained.to(torch.float32 if step > 3 else torch.float64)

    with pytest.raises(pg.PrivacyError, match="each loss to depend on its own example") as error:
        train(trained, loss, after=after, steps=9)
    assert error.value.__notes__ == ["after 5 releases"]


def test_a_tensor_that_the_loop_writes_warns_also_where_it_replaces_parameters():
    center, trained = torch.zeros(5, dtype=torch.float64), linear()

    def after(step: int, batch: Any) -> None:
        center.add_(batch.examples[0].mean())
        for parameter in trained.parameters():
            parameter.data = parameter.data.clone()

    with pytest.warns(UserWarning, match="center changed between two steps"):
        train(trained, lambda m, b: ce(m(b[0] - center), b[1]), after=after, steps=4)
