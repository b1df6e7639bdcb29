"""Private linear heads: against a plain loop in float64, saved and loaded, refused, resumed, and for persons."""

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

import privgrad as pg
from privgrad import data
from privgrad.data.schema import Column, Schema
from privgrad.features import Hog, Scaled, save_extractor
from privgrad.heads import fitting
from privgrad.optim import SGD
from privgrad.training.defaults import head_max_grad_norm

TINY = 1e-6  # a noise multiplier that changes no digit that is compared
FACTS: dict[str, Any] = {"source": "random numbers", "progress": False}


def make_plan(noise: float = TINY, **changes: Any) -> pg.PrivacyPlan:
    numbers: dict[str, Any] = {
        "sample_rate": 0.5,
        "steps": 12,
        "expected_batch_size": 30,
        "noise_multiplier": noise,
        "max_grad_norm": 0.1,
        "num_examples": 60,
        "delta": 1e-3,
        "seed": 3,
    }
    return pg.PrivacyPlan(**numbers | changes)


def rows_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# What is predicted: features, labels, arguments, and the loss of one example in float64 from its outputs.
Task = tuple[Tensor, Tensor, dict[str, Any], Callable[[Tensor, Tensor], Tensor]]


def _class_loss(outputs: Tensor, label: Tensor) -> Tensor:
    return outputs.logsumexp(-1) - outputs[..., int(label)]


def classes() -> Task:
    return rows_of(60, 7), torch.arange(60) % 3, {"num_classes": 3}, _class_loss


def tags() -> Task:
    labels = (rows_of(60, 4, seed=1) > 0).float()
    labels[0] = 0  # an example without tags

    def loss(outputs: Tensor, row: Tensor) -> Tensor:
        return -(row / max(1, row.sum()) * outputs.log_softmax(-1)).sum()

    return rows_of(60, 7), labels, {"num_classes": 4}, loss


def numbers() -> Task:
    labels = 10 * rows_of(60, seed=1)

    def loss(outputs: Tensor, label: Tensor) -> Tensor:
        return (outputs[0] - label.clamp(-5, 15).sub(5) / 10) ** 2 / 2

    return rows_of(60, 7), labels, {"bounds": (-5.0, 15.0)}, loss


def counts() -> Task:
    labels = torch.poisson(3 * rows_of(60, seed=1).exp(), generator=torch.Generator().manual_seed(0))

    def loss(outputs: Tensor, label: Tensor) -> Tensor:
        value = label.clamp(0, 8)
        rate = 3 * outputs[0].exp()  # a head begins at the root of 1 + 8
        return (rate - value * rate.log() + torch.xlogy(value, value) - value) / 8**0.5

    return rows_of(60, 7), labels, {"bounds": (0, 8), "counts": True}, loss


def persons() -> Task:
    labels = torch.arange(180).view(60, 3) % 3
    labels[::2, 2] = -100
    labels[5] = -100  # a person without labels

    def loss(outputs: Tensor, own: Tensor) -> Tensor:
        kept = [_class_loss(row, label) for row, label in zip(outputs, own, strict=True) if label >= 0]
        return torch.stack(kept).mean() if kept else outputs.sum() * 0

    return rows_of(60, 3, 7), labels, {"num_classes": 3}, loss


def persons_numbers() -> Task:
    labels = rows_of(60, 3, seed=1)
    labels[::2, 2] = math.nan

    def loss(outputs: Tensor, own: Tensor) -> Tensor:
        kept = [
            (row[0] - label.clamp(-1, 1)) ** 2 / 2 for row, label in zip(outputs, own, strict=True) if label == label
        ]
        return torch.stack(kept).mean()

    return rows_of(60, 3, 7), labels, {"bounds": (-1.0, 1.0)}, loss


def plain_weight(task: Task, plan: pg.PrivacyPlan, noise_step: float, clip: float) -> Tensor:
    """The weight after DP-SGD with momentum and a cosine, one example after the other, in float64, without noise."""
    features, labels, _, loss = task
    outputs = 1 if labels.is_floating_point() and "bounds" in task[2] else task[2]["num_classes"]
    weight = torch.zeros(outputs, features.shape[-1], dtype=torch.float64, requires_grad=True)
    velocity, deviation = (
        torch.zeros_like(weight),
        plan.noise_multiplier * plan.max_grad_norm / plan.expected_batch_size,
    )
    index = torch.utils.data.TensorDataset(torch.arange(len(features)))
    for step, batch in enumerate(plan.batches(index)):
        total = torch.zeros_like(weight)
        for i in batch.examples[0].tolist():
            row = features[i].double()
            row = row / row.norm(dim=-1, keepdim=True)
            (grad,) = torch.autograd.grad(loss(row @ weight.T, labels[i].double()), weight)
            total += grad * min(1.0, clip / max(float(grad.norm()), 1e-30))
        velocity = 0.9 * velocity + total / plan.expected_batch_size
        rate = noise_step / deviation * (1 - 0.9) * (1 + math.cos(math.pi * step / plan.steps)) / 2
        weight = (weight - rate * velocity).detach().requires_grad_()
    return weight.detach()


@pytest.mark.parametrize("make", [classes, tags, numbers, counts, persons, persons_numbers])
def test_training_equals_a_loop_over_examples_in_float64(make: Callable[[], Task]):
    task = make()
    features, labels, arguments, _ = task
    unit = "user" if features.ndim == 3 else "example"
    plan = make_plan(privacy_unit=unit)
    head = pg.fit_head(features, labels, plan=plan, noise_step=0.1 * TINY, **arguments, **FACTS)
    reference = plain_weight(task, plan, 0.1 * TINY, plan.max_grad_norm)
    weight = head.model.linear.weight.detach().double()
    assert (weight - reference).norm() < 2e-5 * reference.norm()
    # The comparison sees what clipping does.
    assert (weight - plain_weight(task, plan, 0.1 * TINY, 0.2)).norm() > 1e-2 * reference.norm()


def test_real_digits_without_tuning_and_with_the_source_in_ledger_and_head(tmp_path: Path):
    digits = data.digits()
    train, labels = digits.train.tensors
    extractor = Scaled(-2.0, 3.0)
    head = pg.fit_head(
        extractor(train.flatten(1)),
        labels,
        num_classes=10,
        extractor=extractor,
        target_epsilon=3.0,
        delta=1e-5,
        num_examples=1437,
        steps=100,
        output_dir=tmp_path,
        progress=False,
    )
    test, truth = digits.test.tensors
    assert (head.predict(test.flatten(1)) == truth).float().mean() > 0.85  # 0.89 to 0.91
    assert torch.allclose(head.predict_proba(test.flatten(1)).sum(1), torch.ones(len(test)))
    assert head.epsilon <= 3.0
    ledger = pg.Ledger(tmp_path / "ledger.jsonl", read_only=True)
    recorded = ledger.plan_facts["side_information"]
    declared = f"features: bounds as declared by the user (Scaled {extractor.digest()[:12]})"
    assert recorded == declared == head.privacy["side_information"]
    assert not ledger.plan_facts["research_seed"]
    assert ledger.releases == 100
    assert ledger.plan_facts["max_grad_norm"] == 0.3  # the noise is large: few examples
    assert ledger.plan_facts["expected_batch_size"] == 1437


@pytest.mark.parametrize(
    ("width", "outputs", "sigma", "of_numbers", "wanted"),
    [
        (50, 2, 10.0, False, 1.0),
        (50, 2, 60.0, False, 0.3),  # noise above .02
        (600, 10, 2.0, False, 0.3),  # many weights
        (600, 10, 9.0, False, 0.1),  # both
        (50, 1, 10.0, True, 0.3),
        (50, 1, 30.0, True, 0.1),  # noise above .005
    ],
)
def test_the_clipping_norm_follows_from_public_numbers(
    width: int, outputs: int, sigma: float, of_numbers: bool, wanted: float
):
    """sigma sqrt(weights / steps) / B, with B = 2,000 and 100 steps."""
    plan = make_plan(sigma, num_examples=8_000, expected_batch_size=2_000, sample_rate=0.25, steps=100, delta=1e-5)
    assert head_max_grad_norm(plan, width * outputs, of_numbers=of_numbers) == wanted


@pytest.mark.parametrize("given", [None, 0.7])
def test_a_head_has_this_clipping_norm_unless_another_one_is_given(given: float | None):
    features, labels, arguments, _ = classes()
    facts: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-3, "num_examples": 60, "steps": 3} | arguments | FACTS
    head = pg.fit_head(features, labels, max_grad_norm=given, **facts)
    assert head.result is not None
    found = head.result.ledger.plan_facts
    plan = make_plan(found["noise_multiplier"], expected_batch_size=60, sample_rate=1.0, steps=3)
    rule = head_max_grad_norm(plan, head.model.linear.weight.numel(), of_numbers=False)
    assert found["max_grad_norm"] == (given or rule)


def test_two_private_trainings_differ_and_a_seed_is_declared():
    features, labels, arguments, _ = classes()
    facts: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-3, "num_examples": 60, "steps": 3} | arguments | FACTS
    first, second = (pg.fit_head(features, labels, **facts).model.linear.weight for _ in range(2))
    assert not torch.equal(first, second)
    assert pg.fit_head(features, labels, seed=1, **facts).privacy["research_seed"]


def test_memory_mapped_float16_features_are_read_and_not_changed(tmp_path: Path):
    features, labels, arguments, _ = classes()
    half = features.half().numpy()
    np.save(tmp_path / "features.npy", half)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    weights = [
        pg.fit_head(rows, labels, plan=make_plan(1.0), **arguments, **FACTS).model.linear.weight
        for rows in (mapped, torch.from_numpy(half))
    ]
    assert torch.equal(*weights)
    assert np.array_equal(np.load(tmp_path / "features.npy"), half)


def test_the_norm_of_a_row_does_not_matter():
    features, labels, arguments, _ = classes()
    lengths = torch.arange(1, 61)[:, None]
    weights = [
        pg.fit_head(rows, labels, plan=make_plan(1.0), **arguments, **FACTS).model.linear.weight
        for rows in (features, features * lengths)
    ]
    assert torch.allclose(weights[0], weights[1], atol=1e-5)


# --- save and load ----------------------------------------------------------------------------------------------------


def image_head() -> tuple[pg.Head, Tensor]:
    images = data.digits().train.tensors[0][:60].clamp(0, 1)
    extractor = Hog(places=(2,))
    plan = make_plan(1.0, seed=None)
    head = pg.fit_head(
        extractor(images), torch.arange(60) % 3, num_classes=3, extractor=extractor, plan=plan, progress=False
    )
    return head, images


def test_a_saved_head_predicts_from_raw_rows_in_another_object(tmp_path: Path):
    head, images = image_head()
    head.save(tmp_path / "head")
    loaded = pg.Head.load(tmp_path / "head")
    assert torch.equal(loaded.predict_proba(images), head.predict_proba(images))
    assert loaded.privacy == head.privacy
    assert loaded.epsilon == head.epsilon
    assert sorted(path.suffix for path in (tmp_path / "head").rglob("*.*")) == [
        ".json",
        ".json",
        ".safetensors",
        ".safetensors",
        ".txt",
    ]
    with pytest.raises(pg.PrivacyError, match="folder to be new or empty"):
        head.save(tmp_path / "head")


def test_a_saved_head_knows_its_classes_and_refuses_images_of_another_size(tmp_path: Path):
    head, images = image_head()
    head.classes = ["one", "two"]
    with pytest.raises(pg.PrivacyError, match="classes to be 3 names, got 2 names"):
        head.save(tmp_path / "head")
    head.classes, head.image_shape = ["one", "two", "three"], (1, 8, 8)
    head.save(tmp_path / "head")
    loaded = pg.Head.load(tmp_path / "head")
    assert loaded.classes == ["one", "two", "three"]
    for one in (head, loaded):
        with pytest.raises(
            pg.PrivacyError, match=r"images of shape \(n, 1, 8, 8\), as in training, got \(60, 1, 16, 16\)"
        ):
            one.predict(images.repeat(1, 1, 2, 2))
        for files in ("x.jpg", ["x.jpg"]):
            with pytest.raises(
                pg.PrivacyError, match=r"images of shape \(n, 1, 8, 8\), as .*, got a .*data.read_image"
            ):
                one.predict(files)
    facts = json.loads((tmp_path / "head" / "head.json").read_text())
    del facts["classes"], facts["image_shape"]  # as an older version wrote it
    (tmp_path / "head" / "head.json").write_text(json.dumps(facts))
    old = pg.Head.load(tmp_path / "head")
    assert old.classes is None
    assert old.predict(images.repeat(1, 1, 2, 2)).shape == (60,)


def test_a_saved_head_says_nothing_about_images_that_is_not_declared(tmp_path: Path):
    """One person's photo of another size changed the file, when the extractor noted the sizes that it saw."""
    texts: list[str] = []
    for size in (8, 9):
        extractor, images = Hog(places=(2,)), list(torch.rand(60, 1, 1, 8, 8).unbind())
        images[0] = torch.rand(1, 1, size, size)
        features = torch.cat([extractor(image) for image in images])
        plan = make_plan(1.0, seed=0)
        head = pg.fit_head(features, Y, num_classes=3, extractor=extractor, plan=plan, progress=False)
        assert head.predict(torch.rand(60, 1, 9, 9)).shape == (60,)
        head.save(tmp_path / str(size))
        texts.append((tmp_path / str(size) / "head.json").read_text())
    assert texts[0] == texts[1]


def _other_extractor(folder: Path) -> None:
    save_extractor(Hog(places=(3,)), folder / "extractor")


def _other_format(folder: Path) -> None:
    facts = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps(facts | {"format": 99}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_other_extractor, "to be that of the training"),
        (_other_format, "to hold a head, got ValueError: format 99"),
        (lambda folder: (folder / "head.json").unlink(), "to hold a head"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"pickle"), "to hold a head"),
        (lambda folder: (folder / "head.json").write_text("{}"), "to hold a head"),
    ],
)
def test_a_damaged_or_changed_folder_is_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str):
    image_head()[0].save(tmp_path)
    damage(tmp_path)
    with pytest.raises(pg.PrivacyError, match=message):
        pg.Head.load(tmp_path)


def test_predictions_of_tags_and_numbers():
    features, labels, arguments, _ = tags()
    head = pg.fit_head(features, labels, plan=make_plan(1.0), **arguments, **FACTS)
    found = head.predict(features)
    assert found.shape == (60, 4)  # the likeliest five, of four
    assert torch.equal(found[:, 0], head(features).argmax(1))
    features, labels, arguments, _ = numbers()
    head = pg.fit_head(features, labels, plan=make_plan(1.0), **arguments, **FACTS)
    found = head.predict(1000 * features)
    assert found.min() >= -5
    assert found.max() <= 15
    with pytest.raises(pg.PrivacyError, match="to predict classes"):
        head.predict_proba(features)


def test_counts_learn_rates_that_are_saved_and_bounded(tmp_path: Path):
    features = rows_of(4000, 7).index_fill(1, torch.tensor([6]), 2.0)  # a constant
    rates = (features[:, 0] / features.norm(dim=1) * 3 + 1).exp()
    labels = torch.poisson(rates, generator=torch.Generator().manual_seed(0))
    own = OWN | {"num_examples": 4000, "delta": 1e-5}
    head = pg.fit_head(features, labels, bounds=(0, 30), counts=True, **own, **FACTS)
    found = head.predict(features)
    assert (found.log() - rates.log()).abs().mean() < 0.3  # of the constant exp(1): 0.6
    head.save(tmp_path / "head")
    loaded = pg.Head.load(tmp_path / "head")
    assert torch.equal(loaded.predict(features), found)
    with torch.no_grad():
        loaded.model.linear.weight.fill_(1e6)  # exp overflows
    outputs = loaded(torch.ones(1, 7)).requires_grad_()
    assert loaded.target.decoded(outputs).item() == 30
    loss = loaded.target.losses_of(outputs, torch.tensor([2.0])).sum()
    (slope,) = torch.autograd.grad(loss, outputs)
    assert slope.item() == pytest.approx((30 - 2) / 30**0.5)


# --- refusals ---------------------------------------------------------------------------------------------------------

X, Y = rows_of(60, 7), torch.arange(60) % 3
OWN: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-3, "num_examples": 60}
NO_FEATURES = X.index_fill(0, torch.tensor([7]), math.nan)
NUMBER: dict[str, Any] = {"num_classes": None, "bounds": (0, 1)}
WARD = Column("ward", {"kind": "category", "values": ["north", "south"], "other": False})
SCHEMA = Schema({"ward": WARD}, "back", ("no", "yes"), "row", None, None)


@pytest.mark.parametrize(
    ("features", "labels", "changes", "message"),
    [
        (X, Y, {"target_epsilon": None}, "expected target_epsilon to be given, got None"),
        (X, Y, {"delta": None, "num_examples": None}, "expected delta, num_examples to be given, got None"),
        (X, Y, {"plan": make_plan()}, "got plan and delta, num_examples, target_epsilon"),
        (X, Y, {"num_classes": None}, "exactly one of num_classes and bounds to be given, got num_classes None, bou"),
        (X, Y, {"bounds": (0, 1)}, r"exactly one of num_classes and bounds to be given, got num_classes 3, .*\(0, 1"),
        (X, Y.float(), NUMBER | {"classes": ["a", "b", "c"]}, "exactly one of num_classes and bounds to be given"),
        (X, Y, {"classes": ["a", "b"]}, "classes to be 3 names, got 2 names"),
        (X, Y, {"schema": SCHEMA}, "schema to have 7 codes, as in training, got 2"),
        (X, Y, {"num_classes": 2}, "integers from 0 to 1, got the label 2"),
        (X, Y - 100, {}, "integers from 0 to 2, got the label -100"),
        (X, Y.float(), {}, "integers from 0 to 2, got torch.float32"),
        (X, Y, {"num_classes": None, "bounds": (1, 1)}, "bounds to be finite, and low < high"),
        (X, Y, NUMBER | {"bounds": (-1, 9), "counts": True}, "low < high, from 0 or above for counts, got"),
        (X, Y, {"counts": True}, "from 0 or above for counts, got None"),
        (X, Y[:50], {}, r"labels to have shape \(60,\), got \(50,\)"),
        (X, torch.zeros(60, 5), {}, r"labels to have shape \(60, 3\), got \(60, 5\)"),
        (X.long(), Y, {}, "features to be floating point"),
        (X[:, :, None, None], Y, {}, "features to be floating point"),
        (X.tolist(), Y, {}, r"expected np.ndarray \(got list\)"),
        (sparse.csr_array(X.numpy()), Y, {}, r"expected np.ndarray \(got csr_array\)"),
        (NO_FEATURES, Y, {}, "features to be finite, got inf or NaN in row 7"),
        ((1e30 * X).half(), Y, {}, "features to be finite, got inf or NaN in row 0"),
        (NO_FEATURES[:, None], Y[:, None], {}, "features to be finite, got inf or NaN in row 7"),
        (X, NO_FEATURES[:, 0], NUMBER, "labels to be finite, got inf or NaN in row 7"),
        (X, NO_FEATURES[:, :3], {}, "labels to be finite, got inf or NaN in row 7"),
        (X, np.array(["a", "b", "c"] * 20), {}, "can't convert np.ndarray of type numpy.str_"),
        (X, Y[:, None], {}, r"labels to have shape \(60,\), got \(60, 1\); give labels\[\.\.\., 0\]"),
        (X, X[:, :1], NUMBER, r"labels to have shape \(60,\), got \(60, 1\); give labels\[\.\.\., 0\]"),
        (X[:, None], Y[:, None], {"privacy_unit": "example"}, "privacy_unit to be 'user'"),
        (X, Y, {"source": None}, "exactly one of extractor and source to be given, got extractor None, source None"),
        (X, Y, {"extractor": Scaled(0.0, 1.0)}, "got extractor Scaled, source random numbers"),
        (X, Y, {"schedule": "fast"}, "to be 'constant', 'linear' or 'cosine'"),
        (X, Y, {"delta": 2.0}, "delta to be in"),
    ],
)
def test_refused_before_anything_is_spent(tmp_path: Path, features: Any, labels: Tensor, changes: Any, message: str):
    arguments: dict[str, Any] = {"num_classes": 3, "output_dir": tmp_path} | FACTS | OWN | changes
    with pytest.raises((pg.PrivacyError, TypeError), match=message):
        pg.fit_head(features, labels, **arguments)
    ledger = tmp_path / "ledger.jsonl"
    assert not ledger.exists() or pg.Ledger(ledger, read_only=True).releases == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (NO_FEATURES, "Head: expected features to be finite, got inf or NaN in row 7"),
        (NO_FEATURES.numpy(), "got inf or NaN in row 7"),
        (X.repeat(100, 1).index_fill(0, torch.tensor([5000]), math.nan), "got inf or NaN in row 5000"),
        (X[:, :5], r"rows to be features of shape \(n, 7\), got \(60, 5\)"),
        ("text", r"rows to be features of shape \(n, 7\), got a str;"),
        (["text"], r"rows to be features of shape \(n, 7\), got a list;"),
        (np.array(["text"]), r"rows to be features of shape \(n, 7\), got a list;"),
    ],
)
@pytest.mark.parametrize("by_extractor", [False, True])
def test_rows_without_a_prediction_are_refused(rows: Any, message: str, by_extractor: bool):
    if by_extractor and isinstance(rows, str):
        message = r"Scaled: expected rows to be a tensor \(n, ...\), or a list of n texts, n >= 1, got a str"
    elif by_extractor and "of shape" in message:
        message = r"\(n, 7\)" if isinstance(rows, Tensor) else "has no attribute 'shape'"
    elif by_extractor:
        message = message.replace("Head: expected", "Scaled: expected")
    extractor = Scaled([-9.0] * 7, [9.0] * 7)
    facts: dict[str, Any] = {"extractor": extractor, "progress": False} if by_extractor else FACTS
    head = pg.fit_head(extractor(X) if by_extractor else X, Y, num_classes=3, plan=make_plan(1.0), **facts)
    for predict in (head.predict, head.predict_proba):
        with pytest.raises((pg.PrivacyError, AttributeError), match=message):
            predict(rows)


def test_one_row_is_refused_with_a_remedy_that_works():
    head = pg.fit_head(X, Y, num_classes=3, plan=make_plan(1.0), **FACTS)
    with pytest.raises(pg.PrivacyError, match=r"got \(7,\); .*for one row, give row\[None\]"):
        head.predict(X[0])
    assert head.predict(X[0][None]).shape == (1,)


def test_rows_of_another_width_than_in_training_are_refused():
    extractor = Scaled(-9.0, 9.0)
    head = pg.fit_head(extractor(X), Y, num_classes=3, extractor=extractor, plan=make_plan(1.0), progress=False)
    with pytest.raises(pg.PrivacyError, match=r"the extractor returns to be features of shape \(n, 8\), got \(60, 6\)"):
        head.predict(X[:, :5])
    with pytest.raises(pg.PrivacyError, match=r"got shape \(7,\); give .*, and one row as rows\[None\]"):
        head.predict(X[0])


# --- budget, resume, persons ------------------------------------------------------------------------------------------


def test_a_budget_pays_once_and_a_second_call_resumes(tmp_path: Path):
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=2.0, delta=1e-3, num_examples=60, privacy_unit="example"
    )
    arguments: dict[str, Any] = {"num_classes": 3, "budget": budget, "steps": 5} | FACTS
    with pytest.raises(pg.PrivacyError, match="output_dir to be given with a budget"):
        pg.fit_head(X, Y, target_epsilon=1.0, **arguments)
    part = pg.fit_head(X, Y, target_epsilon=1.0, output_dir=tmp_path / "part", **arguments)
    assert part.epsilon <= 1.0
    rest = pg.fit_head(X, Y, output_dir=tmp_path / "rest", **arguments)
    assert 1.0 < budget.spent() <= 2.0
    with pytest.warns(UserWarning, match="holds a finished training. Its head is returned"):
        again = pg.fit_head(X, Y, output_dir=tmp_path / "rest", **arguments)
    assert torch.equal(again.model.linear.weight, rest.model.linear.weight)
    assert again.privacy == rest.privacy
    assert rest.privacy["budget"] == "budget.jsonl"
    with pytest.raises(pg.BudgetExceededError):
        pg.fit_head(X, Y, target_epsilon=1.0, output_dir=tmp_path / "more", **arguments)
    assert not (tmp_path / "more" / "ledger.jsonl").exists()


def interrupt(monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: dict[str, Any]) -> None:
    """Train a head, and interrupt it after five updates."""
    step, made = SGD.step, []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        made.append(step(*args, **kwargs))
        if len(made) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(SGD, "step", stopped)
    with pytest.raises(KeyboardInterrupt):
        pg.fit_head(X, Y, output_dir=folder, **arguments)
    monkeypatch.undo()


def test_an_interrupted_training_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments: dict[str, Any] = {"num_classes": 3, "plan": make_plan(1.0)} | FACTS
    whole = pg.fit_head(X, Y, **arguments).model.linear.weight
    interrupt(monkeypatch, tmp_path, arguments)
    assert torch.equal(pg.fit_head(X, Y, output_dir=tmp_path, **arguments).model.linear.weight, whole)
    arguments["source"] = "other features"
    with pytest.raises(pg.PrivacyError, match="side_information"):
        pg.fit_head(X, Y, output_dir=tmp_path, **arguments)


@pytest.mark.parametrize(("has_key", "updates"), [(True, 12), (False, 11)])
def test_a_head_is_trained_by_epochs_and_goes_on_within_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_key: bool, updates: int
):
    arguments: dict[str, Any] = {"num_classes": 3, "plan": make_plan(1.0, seed=None, sampling="epochs")} | FACTS
    interrupt(monkeypatch, tmp_path, arguments)
    key = tmp_path / "_ledger.jsonl.epoch"
    if not has_key:
        key.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = pg.fit_head(X, Y, output_dir=tmp_path, **arguments).result
    assert result is not None
    assert (result.ledger.releases, result.ledger.participations) == (updates, 12)
    assert not key.exists()


def last_contribution(rows: Tensor, labels: Tensor, removed: int, **facts: Any) -> float:
    """The norm of what the last `removed` rows add to the clipped sum of one full batch, over C."""
    count = len(rows) - removed
    plan = make_plan(sample_rate=1.0, expected_batch_size=count, num_examples=count, steps=1, **facts)
    rate = 0.1 * TINY / plan.noise_std * (1 - fitting.MOMENTUM)
    weights = [
        pg.fit_head(
            rows[:kept], labels[:kept], plan=plan, num_classes=3, noise_step=0.1 * TINY, **FACTS
        ).model.linear.weight.detach()
        for kept in (len(rows), count)
    ]
    return float((weights[0] - weights[1]).norm()) * count / rate / plan.max_grad_norm


def test_all_rows_of_a_person_together_move_the_sum_by_at_most_c():
    rows, labels, _, _ = persons()
    assert 0.9 < last_contribution(rows, labels, 1, privacy_unit="user") < 1.001
    # As examples, the three rows of the last person move it further: what the unit decides can be seen.
    kept = labels.flatten() >= 0
    assert last_contribution(rows.flatten(0, 1)[kept], labels.flatten()[kept], 3) > 1.3


def test_a_pickled_head_leaves_its_ledger_behind():
    head = pg.fit_head(X, Y, num_classes=3, plan=make_plan(1.0), **FACTS)
    assert head.result is not None
    copied = copy.deepcopy(head)
    assert copied.result is None
    assert torch.equal(copied.predict(X), head.predict(X))
