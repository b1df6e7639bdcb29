"""Which trainings are known for which weights: copies, parts, wrappers, files that were opened again, and pickles."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from privgrad.accounting.accountant import rounded_up
from privgrad.checks.model_and_loss import configuration


def train(model: nn.Module, folder: Path | None = None, *, steps: int = 2, **changed: Any) -> pg.FitResult:
    private_grad = pg.PrivateGradient(model, loss_fn, make_plan(steps=steps, delta=1e-3, **changed))
    optimizer = pg.optim.SGD(model.named_parameters(), lr=0.1)
    return pg.fit(private_grad, optimizer, make_data(), output_dir=folder, progress=False)


def test_a_second_training_that_its_ledger_does_not_count_gets_a_warning(tmp_path: Path):
    model = make_model()
    train(model, tmp_path)
    private_grad = pg.PrivateGradient(copy.deepcopy(model), loss_fn, make_plan(delta=1e-3))
    batch = next(iter(private_grad.plan.batches(make_data())))
    with pytest.warns(UserWarning, match=r"trained before, with 2 releases, which this ledger does not count") as told:
        private_grad(batch)
    assert told[0].filename == __file__
    train(model, tmp_path, steps=4)  # the same ledger, opened again, counts all of them
    budget = pg.Budget(
        tmp_path / "budget.jsonl", total_epsilon=99.0, delta=1e-3, num_examples=32, privacy_unit="example"
    )
    twice = make_model()
    for name in ("one", "two"):
        plan = make_plan(delta=1e-3)
        ledger = budget.open_ledger(tmp_path / name / "ledger.jsonl", plan)
        private_grad = pg.PrivateGradient(twice, loss_fn, plan, ledger=ledger)
        private_grad(next(iter(plan.batches(make_data()))))


def test_a_saved_model_that_was_loaded_is_named_by_the_next_save(tmp_path: Path):
    model = make_model()
    first = pg.save(model, tmp_path / "a", ledger=train(model).ledger)
    other = make_model()
    pg.load(other, tmp_path / "a")
    said = pg.save(other, tmp_path / "b", ledger=train(other).ledger)
    (named,) = (line for line in said.sections[-1].sentences if "were loaded into the model" in line)
    assert f"epsilon = {rounded_up(first.numbers['epsilon'], 4)} and delta = 0.001" in named
    assert "were loaded into the model" in str(
        pg.save(copy.deepcopy(other), tmp_path / "c", ledger=pg.ledgers_of(other))
    )


def raw_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    model(rows).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("how", ["instead", "between", "after"])
def test_steps_of_an_ordinary_loop_get_a_warning_and_are_stated(how: str, tmp_path: Path):
    model, plan = make_model(), make_plan(delta=1e-3, steps=2)
    private_grad, rows = pg.PrivateGradient(model, loss_fn, plan), torch.ones(3, 5)
    ours, other = pg.optim.SGD(model.named_parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    batch, last = plan.batches(make_data())
    grad = private_grad(batch)
    if how != "instead":
        ours.step(grad=grad)
    with pytest.warns(UserWarning, match="SGD moved the weights by gradients that were not released") as told:
        raw_step(model, other, rows)
    assert len(told) == 1
    if how == "between":
        ours.step(grad=private_grad(last))
    raw_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rows)  # warned of once
    said = pg.save(model, tmp_path, ledger=private_grad.ledger)
    assert "moved the weights by gradients that were not released" in said.sections[-1].sentences[1]
    resumed = make_model()
    pg.PrivateGradient(resumed, loss_fn, plan, ledger=private_grad.ledger).load_state_dict(private_grad.state_dict())
    assert "SGD moved the weights" in str(pg.save(resumed, tmp_path / "resumed", ledger=private_grad.ledger))


@pytest.mark.parametrize("how", ["assigned", "by name", "scaled in place", "and a public loss", "public data before"])
def test_other_optimizers_of_released_gradients_are_not_warned_of(how: str, tmp_path: Path):
    model, plan = make_model(), make_plan(delta=1e-3, steps=2)
    other, rows = torch.optim.Adam(model.parameters()), torch.ones(3, 5)
    if how == "public data before":
        raw_step(model, other, rows)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    for batch in plan.batches(make_data()):
        grad = private_grad(batch)
        if how == "by name":
            for name, parameter in model.named_parameters():
                parameter.grad = grad[name]
        else:
            grad.assign(model)
        if "scaled" in how:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if "loss" in how:
            model(rows).square().mean().backward()
        other.step()
    with torch.no_grad():  # post-processing
        for parameter in model.parameters():
            parameter.mul_(0.5).round_(decimals=3)
    assert "moved the weights" not in str(pg.save(model, tmp_path, ledger=private_grad.ledger))


@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_of_moved_weights_are_stated_as_moved(when: str, tmp_path: Path):
    model, plan = make_model(), make_plan(delta=1e-3, steps=2)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    private_grad(next(iter(plan.batches(make_data()))))
    early = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="not released"):
        raw_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 5))
    made = early if when == "before" else torch.optim.swa_utils.AveragedModel(model).module
    said = pg.save(made, tmp_path, ledger=private_grad.ledger)
    assert ("moved the weights" in str(said)) == (when == "after")
    in_short = said.sections[0].sentences
    if when == "after":  # the first words must not promise what later ones take back
        assert in_short[0].startswith("SGD moved the weights by gradients that were not released")
        assert in_short[1].startswith("Otherwise: The rows in the training data are protected by")
        assert not said.is_guarantee
        assert 'class="warning"' in said.to_html()
    else:
        assert in_short[0].startswith("The rows in the training data are protected by")


def test_a_second_model_of_one_optimizer_is_marked_too(tmp_path: Path):
    models, plan = [make_model(), make_model()], make_plan(delta=1e-3, steps=2)
    grads = [pg.PrivateGradient(model, loss_fn, plan) for model in models]
    for private_grad in grads:
        private_grad(next(iter(plan.batches(make_data()))))
    both = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    for model in models:
        with pytest.warns(UserWarning, match="SGD moved the weights"):
            raw_step(model, both, torch.ones(3, 5))
    assert "SGD moved the weights" in str(pg.save(models[1], tmp_path, ledger=grads[1].ledger))


@pytest.mark.parametrize("how", ["before the first release", "with a rate of 0"])
def test_ordinary_steps_without_private_weights_get_no_warning(how: str, tmp_path: Path):
    model, plan = make_model(), make_plan(delta=1e-3, steps=2)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    other = torch.optim.SGD(model.parameters(), lr=0.0 if "rate" in how else 0.1)
    for batch in plan.batches(make_data()):
        if private_grad.ledger.releases == 0 or "rate" in how:
            raw_step(model, other, torch.ones(3, 5))
        private_grad(batch)
    assert "moved the weights" not in str(pg.save(model, tmp_path, ledger=private_grad.ledger))


@pytest.mark.parametrize("how", ["torch", "ours"])
def test_an_optimizer_that_was_made_before_fix_is_warned_of(how: str):
    before, plan = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), make_plan(delta=1e-3, steps=3)
    old: Any = (
        torch.optim.Adam(before.parameters()) if how == "torch" else pg.optim.SGD(before.named_parameters(), lr=1)
    )
    model = pg.fix(before)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)

    def step(batch: pg.Batch) -> None:
        grad = private_grad(batch)
        grad.assign(model)
        old.step(**{} if how == "torch" else {"grad": grad})

    with pytest.warns(UserWarning, match="no parameter of this optimizer belongs to the model of the gradient") as told:
        list(map(step, plan.batches(make_data())))
    assert {warning.filename for warning in told} == {__file__}
    assert how == "ours" or len(told) == 1


@pytest.mark.parametrize("how", ["GAN", "frozen", "LBFGS", "part", "cleared", "ours"])
def test_other_optimizers_next_to_an_assigned_gradient_are_not_warned_of(how: str):
    model, other, plan = make_model(), make_model(), make_plan(delta=1e-3, steps=3)
    private_grad, rows = pg.PrivateGradient(model, loss_fn, plan), torch.ones(3, 5)
    second = pg.PrivateGradient(other, loss_fn, plan) if how == "ours" else None
    mine = torch.optim.Adam(model.parameters())
    if how == "part":
        model[0].requires_grad_(False)
    steps: dict[str, Any] = {
        "frozen": torch.optim.SGD(other.requires_grad_(how != "frozen").parameters(), lr=0.1),
        "LBFGS": torch.optim.LBFGS(other.parameters()),
        "part": torch.optim.SGD(model[0].parameters(), lr=0.1),
    }
    for batch in plan.batches(make_data()):
        grad = private_grad(batch)
        grad.assign(model)
        if how == "GAN":
            mine.step()  # the discriminator, whose gradient stays
            other_step = torch.optim.SGD(other.parameters(), lr=0.1)
            other_step.step()  # no gradient yet
            model(other(rows)[:, :1].expand(3, 5)).sum().backward()
            other_step.step()
        elif how == "cleared":
            mine.zero_grad()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        elif how == "LBFGS":
            steps[how].step(lambda: other.zero_grad() or torch.zeros(()))
        elif second is not None:
            pg.optim.SGD(other.named_parameters(), lr=0.1).step(grad=second(batch))
        else:
            steps[how].step()
        mine.step()


def counts(model: nn.Module) -> list[int]:
    return sorted(ledger.releases for ledger in pg.ledgers_of(model))


def shared(model: Any) -> nn.Module:
    other = nn.Linear(5, 4)
    other.weight = model[0].weight
    return other


def loaded(model: nn.Module) -> nn.Module:
    made = make_model()
    made.load_state_dict(model.state_dict())
    return made


DERIVED: dict[str, Callable[[Any], nn.Module]] = {
    "itself": lambda model: model,
    "a copy": copy.deepcopy,
    "a shallow copy": copy.copy,
    "a copy of a part": lambda model: copy.deepcopy(model[0]),
    "a wrapper": lambda model: nn.Sequential(model, nn.Softmax(1)),
    "a copy of a wrapper": lambda model: copy.deepcopy(nn.Sequential(model, nn.Softmax(1))),
    "other precision and back": lambda model: model.double().float(),
    "a module with one of its parameters": shared,
    "parametrized": lambda model: nn.Sequential(parametrizations.weight_norm(copy.deepcopy(model)[0])),
    "compiled": torch.compile,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("derived", DERIVED)
def test_weights_keep_their_trainings(derived: str):
    model = make_model()
    train(model, steps=2)
    made = DERIVED[derived](model)
    train(model, steps=3)
    gc.collect()
    is_copy = ("copy" in derived and "shallow" not in derived) or derived == "parametrized"
    assert counts(model) == [2, 3]
    assert counts(made) == ([2] if is_copy else [2, 3])


def test_a_training_that_goes_on_is_counted_as_far_as_it_went():
    model, plan = make_model(), make_plan(delta=1e-3, steps=3)
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    assert pg.ledgers_of(model) == []  # nothing released
    made, seen = copy.deepcopy(model), list[list[int]]()
    for batch in plan.batches(make_data()):
        private_grad(batch)
        seen.append(counts(model) + counts(made))
    assert seen == [[1, 1], [2, 2], [3, 3]]


def test_a_file_that_is_opened_again_is_one_training(tmp_path: Path):
    model = make_model()
    first, again = train(model, tmp_path / "run"), train(model, tmp_path / "run")
    assert first.ledger is not again.ledger
    assert counts(model) == [2]
    (tmp_path / "run").rename(tmp_path / "moved")
    train(model, tmp_path / "run")  # another training at the path of the first
    assert counts(model) == [2, 2]


@pytest.mark.filterwarnings("ignore:1 charged steps")
def test_a_record_covers_what_its_file_held_when_it_was_read(tmp_path: Path):
    model, plan = make_model(), make_plan(delta=1e-3, steps=3)
    early = None
    for steps in (1, 3):
        ledger = pg.Ledger(tmp_path / "ledger.jsonl")
        private_grad = pg.PrivateGradient(model, loss_fn, plan, ledger=ledger)
        for batch in plan.batches(make_data(), start=ledger.next_step):
            private_grad(batch)
            if ledger.releases == steps:
                break
        ledger.close()
        early = early or ledger
    assert (early and early.releases, counts(model)) == (1, [3])
    with pytest.raises(pg.PrivacyError, match=r"a training with 3 releases, recorded in .*ledger\.jsonl; give"):
        pg.save(model, tmp_path / "saved", ledger=early)
    assert pg.save(model, tmp_path / "saved", ledger=tmp_path / "ledger.jsonl").numbers["releases"] == 3


def test_a_frozen_part_was_not_trained():
    encoder = nn.Linear(5, 5).requires_grad_(False)
    for _ in range(2):  # several heads on one encoder
        model = nn.Sequential(encoder, make_model())
        train(model)
        assert counts(model) == [2]
    assert pg.ledgers_of(encoder) == []


def test_weights_from_elsewhere_have_no_known_training():
    model = make_model()
    train(model)
    assert pg.ledgers_of(loaded(model)) == []
    whole = pickle.loads(pickle.dumps(model))
    assert pg.ledgers_of(whole) == []
    train(whole, steps=3)
    assert counts(whole) == [3]


def test_a_pickled_model_loads_without_privgrad(tmp_path: Path):
    model = nn.Sequential(nn.Linear(5, 3))
    train(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(dict(model.named_parameters()), tmp_path / "parameters.pt")
    torch.load(tmp_path / "parameters.pt", weights_only=True)
    read = f"import sys, torch; torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout
    assert "torch" in told.split()
    assert not [name for name in told.split() if name.startswith("privgrad")]


def test_trainings_are_forgotten_with_the_weights():
    model = make_model()
    alive = weakref.ref(train(model).ledger)
    made = copy.deepcopy(model)
    gc.collect()
    assert alive() is not None
    del model
    gc.collect()
    assert alive() is not None  # its copy is there
    del made
    gc.collect()
    assert alive() is None


def test_a_note_leaves_the_model_as_it_is():
    model = make_model()
    before = list(model.state_dict()), list(model.buffers()), str(model), configuration(model)
    train(model)
    assert (list(model.state_dict()), list(model.buffers()), str(model), configuration(model)) == before
    rows = torch.rand(3, 5)
    torch.testing.assert_close(torch.func.functional_call(model, model.state_dict(), rows), model(rows))
