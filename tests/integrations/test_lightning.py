"""PrivateStrategy: the step is the private_grad's, the rest is Lightning's; killed runs go on."""

import dataclasses
import gc
import os
import signal
import warnings
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Subset, TensorDataset

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan
from scripts import example, how_it_ended, kill_again_and_again

pytest.importorskip("lightning")
from lightning import pytorch as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from torchmetrics.classification import MulticlassAccuracy

from privgrad.integrations.lightning import PrivateStrategy
from privgrad.ledger.lineage import loaded_into

STEPS = 12
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The '.*_dataloader' does not have many workers",  # Lightning's advice
        "Checkpoint directory .* exists and is not empty",
        "Be aware that when using `ckpt_path`, callbacks",
        "Starting from v1.9.0, `tensorboardX` has been removed",
        "The number of training batches .* is smaller than the logging interval",
        "`isinstance.treespec, LeafSpec.` is deprecated",  # in its use of torch
    )
]


class Classifier(L.LightningModule):
    """As a user writes it, but that training_step returns one loss an example, and names go to the optimizer."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__()
        self.net = make_model()
        self.make_optimizer = make_optimizer or (lambda params: pg.optim.AdamBC(params, lr=0.05))
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

    test_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # pyright: ignore

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(L.Callback):
    """Notes what was released; ends the process or the training at a step."""

    def __init__(self, *, kill_at: int = 0, stop_at: int = 0) -> None:
        self.kill_at, self.stop_at = kill_at, stop_at
        self.released: list[pg.NoisyGradient] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.private_grad.register_raw_observer(lambda step: self.released.append(step.released))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == self.stop_at:
            raise RuntimeError("stopped")


def make_trainer(folder: Path, plan: pg.PrivacyPlan, *, strategy: Any = None, **options: Any) -> Any:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    numbers: dict[str, Any] = {"max_steps": plan.steps, "default_root_dir": folder, "enable_checkpointing": False}
    strategy = strategy or PrivateStrategy(plan, device="cpu", ledger=folder / "ledger.jsonl")
    return L.Trainer(strategy=strategy, **(quiet | numbers | options))


def fit(trainer: Any, module: Any, data: TensorDataset | None = None, **options: Any) -> Any:
    data = make_data() if data is None else data
    held_out = TensorDataset(*(tensor.clone() for tensor in data.tensors))  # equal rows, so that scores are known
    trainer.fit(module, trainer.strategy.batches(data), DataLoader(held_out, batch_size=len(data)), **options)
    return module


def saving(folder: Path) -> dict[str, Any]:
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [callback]}


def planned(**changed: Any) -> pg.PrivacyPlan:
    return make_plan(**({"steps": STEPS, "seed": 5, "noise_multiplier": 0.5} | changed))


def test_every_private_gradient_equals_the_oracles(tmp_path: Path):
    plan, watch, alone = planned(), Watch(), make_model()
    module = fit(make_trainer(tmp_path, plan, callbacks=[watch]), Classifier())
    private_grad = pg.PrivateGradient(alone, loss_fn, plan)
    optimizer = pg.optim.AdamBC(alone.named_parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    for batch, released in zip(plan.batches(make_data()), watch.released, strict=True):
        gradient = private_grad(batch)
        assert gradient.noise_std == released.noise_std
        assert all(torch.equal(value, released[f"net.{name}"]) for name, value in gradient.items())
        optimizer.step(grad=gradient)
        schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), alone.parameters(), strict=True))
    assert module.rates == [0.05 * 0.5 ** (step // 4) for step in range(1, STEPS + 1)]


def test_a_checkpoint_that_follows_a_number_needs_to_know_whose_it_is(tmp_path: Path):
    best = ModelCheckpoint(tmp_path, monitor="accuracy", mode="max")
    with pytest.raises(pg.PrivacyError, match=r"selection_data=None with ModelCheckpoint\(monitor=...\)"):
        fit(make_trainer(tmp_path, planned(), callbacks=[best], enable_checkpointing=True), Classifier())
    wrong = PrivateStrategy(planned(), device="cpu", selection_data=cast(Any, "private"))
    with pytest.raises(pg.PrivacyError, match="selection_data='private' with no use for it"):
        fit(make_trainer(tmp_path, planned(), strategy=wrong), Classifier())


def test_the_training_data_are_not_evaluated(tmp_path: Path):
    data, plan = make_data(), planned(seed=None)
    some = Subset(data, range(3))
    for own in (DataLoader(data), DataLoader(some)):
        trainer = make_trainer(tmp_path / "a", plan)
        with pytest.raises(
            pg.PrivacyError, match="got evaluation data with rows of the training data; evaluate other data"
        ):
            trainer.fit(Classifier(), trainer.strategy.batches(data), own)
        assert trainer.strategy.private_grad.ledger.releases == 0
    trainer = make_trainer(tmp_path / "b", plan)
    module = fit(trainer, Classifier(), data)
    for evaluate in (trainer.validate, trainer.test):
        with pytest.raises(
            pg.PrivacyError, match="got evaluation data with rows of the training data; evaluate other data"
        ):
            evaluate(module, DataLoader(data))


def test_hooks_cannot_log_private_batches(tmp_path: Path):
    class LogsLosses(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            losses = super().training_step(batch, batch_idx)
            cast(Any, self.logger).log_metrics({"loss": losses.mean().item()})
            return losses

    class LogsBatches(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert batch.size is None
            self.log("mean", batch.examples[0].mean())

    class LogsRates(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"])  # pyright: ignore

    for module, what in ((LogsLosses(), "a logger in training_step"), (LogsBatches(), "the batch after training_step")):
        trainer = make_trainer(tmp_path / what, planned(), logger=CSVLogger(tmp_path / what))
        with pytest.raises(pg.PrivacyError, match=f"expected {what} to stay unused"):
            fit(trainer, module)
    logger = CSVLogger(tmp_path / "public")
    fit(make_trainer(tmp_path / "public", planned(), logger=logger, log_every_n_steps=1), LogsRates())
    assert (Path(logger.log_dir) / "metrics.csv").read_text().count("\n") > STEPS


class LogsPosition(L.Callback):
    """Logs the position of a step in its epoch, which is public."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        cast(Any, self).log("callback", float(batch_idx), on_epoch=True)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"]
)
def test_means_over_an_epoch_do_not_depend_on_private_batch_sizes(tmp_path: Path, hook: str):
    class LogsPositions(Classifier):
        def log_position(self, *args: Any) -> None:
            position = float(cast(Any, self.trainer).fit_loop.epoch_loop.batch_idx)
            self.log("by_log", position, on_step=True, on_epoch=True)
            self.log_dict({"by_log_dict": position}, on_step=False, on_epoch=True)
            self.log("weighted", position, on_step=False, on_epoch=True, batch_size=1 + int(position))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", float(batch_idx))

    setattr(LogsPositions, hook, LogsPositions.log_position)
    data = make_data()
    trainer = make_trainer(tmp_path, planned(), callbacks=[LogsPosition()])
    trainer.fit(LogsPositions(), trainer.strategy.batches(data), DataLoader(make_data(), batch_size=len(data) - 1))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert trainer.strategy.private_step.epoch_steps == 4
    assert logged["by_log_epoch"] == logged["by_log_dict"] == logged["callback_epoch"] == (0 + 1 + 2 + 3) / 4
    assert logged["weighted"] == (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / (1 + 2 + 3 + 4)
    assert logged["validated"] == pytest.approx(1 / len(data))  # by sizes, as in Lightning: they are not private


def separable(count: int = 200) -> TensorDataset:
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


@pytest.mark.parametrize(("noise_multiplier", "learns"), [(0.3, True), (1000.0, False)])
def test_noise_decides_what_is_learned(tmp_path: Path, noise_multiplier: float, learns: bool):
    numbers = {"num_examples": 200, "sample_rate": 0.2, "expected_batch_size": 40, "steps": 40, "delta": 1e-3}
    plan = planned(**numbers, noise_multiplier=noise_multiplier, seed=None)
    trainer = make_trainer(tmp_path, plan)
    fit(trainer, Classifier(lambda params: pg.optim.SGD(params, lr=2.0, momentum=0.9)), separable())
    assert (trainer.callback_metrics["accuracy"].item() > 0.85) == learns
    assert trainer.strategy.private_grad.ledger.epsilon(delta=1e-3) == plan.epsilon()


def test_a_tiny_clip_norm_freezes_the_model_and_that_is_refused(tmp_path: Path):
    module = Classifier(lambda params: pg.optim.SGD(params, lr=0.01))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(pg.PrivacyError, match="updates without effect on"):
        fit(make_trainer(tmp_path, planned(max_grad_norm=1e-10)), module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_seeded_run_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path: Path):
    whole = fit(make_trainer(tmp_path / "whole", planned()), Classifier())
    options = saving(tmp_path / "cut")
    options["callbacks"].append(Watch(stop_at=7))
    with pytest.raises(RuntimeError, match="stopped"):
        fit(make_trainer(tmp_path / "cut", planned(), **options), Classifier())
    resumed = make_trainer(tmp_path / "cut", planned(), **saving(tmp_path / "cut"))
    with pytest.raises(pg.BudgetExceededError, match="to be empty at the start"):
        fit(resumed, Classifier())
    module = fit(resumed, Classifier(), ckpt_path=tmp_path / "cut" / "step=5.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), module.parameters(), strict=True))
    assert resumed.global_step == resumed.strategy.private_grad.ledger.releases == STEPS
    assert module.rates == whole.rates[5:]
    assert resumed.current_epoch == 3


def test_workers_load_the_same_batches_and_live_through_all_epochs(tmp_path: Path):
    def train(name: str, **loading: Any) -> tuple[Classifier, list[set[int | None]]]:
        torch.manual_seed(0)
        module, seen = Classifier(), list[set[int | None]]()
        others = {child.pid for child in active_children()}

        class Look(L.Callback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append({child.pid for child in active_children()} - others)

        (tmp_path / name).mkdir()
        trainer = make_trainer(tmp_path / name, planned(), callbacks=[Look()])
        trainer.fit(module, trainer.strategy.batches(make_data(), **loading), DataLoader(make_data(), batch_size=32))
        return module, seen

    here, _ = train("here")
    there, workers = train("there", num_workers=1, prefetch_factor=3)
    assert all(map(torch.equal, here.parameters(), there.parameters()))
    assert len(workers) > 2
    assert len(set.union(*workers)) == 1  # the same worker in every epoch
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        train("nowhere", num_workers=-1)


def test_a_killed_run_goes_on_and_what_it_lost_stays_spent(tmp_path: Path):
    plan = planned(seed=None)

    def train() -> None:
        options = saving(tmp_path)
        options["callbacks"].append(Watch(kill_at=7))
        fit(make_trainer(tmp_path, plan, **options), Classifier())

    assert how_it_ended(train) == -signal.SIGKILL
    trainer = make_trainer(tmp_path, plan)
    with pytest.warns(UserWarning, match="2 charged steps had no checkpoint.* ends with 10 updates of 12"):
        fit(trainer, Classifier(), ckpt_path=tmp_path / "step=5.ckpt")
    assert trainer.global_step == 10
    assert trainer.strategy.private_grad.ledger.releases == STEPS


@pytest.mark.parametrize(("has_key", "updates"), [(True, 11), (False, 9)])
def test_a_killed_run_goes_on_within_its_epoch_or_with_the_next_one(tmp_path: Path, has_key: bool, updates: int):
    plan = planned(seed=None, sampling="epochs")  # of 4 steps

    def train() -> None:
        options = saving(tmp_path)
        options["callbacks"].append(Watch(kill_at=6))
        fit(make_trainer(tmp_path, plan, **options), Classifier())

    assert how_it_ended(train) == -signal.SIGKILL
    key = tmp_path / "_ledger.jsonl.epoch"
    assert key.exists()
    if not has_key:
        key.unlink()
    trainer = make_trainer(tmp_path, plan)
    why = "1 charged steps had no checkpoint" if has_key else "the key of the epoch before step 8 is not here"
    with pytest.warns(UserWarning, match=f"{why}.* ends with {updates} updates of 12"):
        fit(trainer, Classifier(), ckpt_path=tmp_path / "step=5.ckpt")
    ledger = trainer.strategy.private_grad.ledger
    assert (trainer.global_step, ledger.participations) == (updates, STEPS)
    assert not key.exists()


def test_a_callback_that_stops_within_an_epoch_costs_all_epochs(tmp_path: Path):
    plan = planned(seed=None, delta=1e-3, sampling="epochs", sample_rate=1 / 6, expected_batch_size=5)
    strategy = PrivateStrategy(plan, device="cpu", ledger=tmp_path / "ledger.jsonl", selection_data="public")
    stop = EarlyStopping("accuracy", mode="max", stopping_threshold=0.0)
    trainer = make_trainer(tmp_path, plan, strategy=strategy, callbacks=[stop], val_check_interval=3)
    fit(trainer, Classifier())
    assert (trainer.global_step, strategy.private_grad.ledger.participations) == (3, STEPS)
    assert not list(tmp_path.glob("*.epoch"))


def test_a_callback_that_stops_early_does_not_lower_epsilon(tmp_path: Path):
    plan, stop = planned(seed=None, delta=1e-5), EarlyStopping("accuracy", mode="max", stopping_threshold=0.0)
    with pytest.raises(pg.PrivacyError, match="selection_data=None with EarlyStopping; give selection_data='public'"):
        fit(make_trainer(tmp_path / "undeclared", plan, callbacks=[stop]), Classifier())
    strategy = PrivateStrategy(plan, device="cpu", ledger=tmp_path / "ledger.jsonl", selection_data="public")
    trainer = make_trainer(tmp_path, plan, strategy=strategy, callbacks=[stop])
    fit(trainer, Classifier())
    assert (trainer.global_step, trainer.strategy.private_grad.ledger.releases) == (4, STEPS)
    assert trainer.strategy.private_grad.ledger.epsilon(delta=1e-5) == plan.epsilon()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 5])
def test_killed_at_random_moments_everything_released_was_charged(tmp_path: Path, seed: int | None):
    folder, plan = tmp_path / "run", planned(seed=seed, steps=100)

    def resume() -> tuple[Any, Any]:
        trainer = make_trainer(folder, plan, **saving(folder))
        # Lightning writes a checkpoint to another file first.
        done = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2].partition("-")[0]))
        return trainer, fit(trainer, Classifier(), ckpt_path=done[-1] if done else None)

    kill_again_and_again(resume, folder, kills=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that were lost: they are what this is about
        trainer, module = resume()
    assert trainer.strategy.private_grad.ledger.releases == plan.steps
    if seed is not None:
        whole = fit(make_trainer(tmp_path / "whole", plan), Classifier())
        assert trainer.global_step == plan.steps
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), module.parameters(), strict=True))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    plan = planned(steps=5)
    fit(make_trainer(tmp_path / "one", plan, **saving(tmp_path)), Classifier())
    other = make_trainer(tmp_path / "other", plan)
    with pytest.raises(
        pg.PrivacyError, match=r"no step that is not in the ledger, got 5 steps, not those of its ledger"
    ):
        fit(other, Classifier(), ckpt_path=tmp_path / "step=5.ckpt")
    plain = L.Trainer(max_steps=5, default_root_dir=tmp_path, accelerator="cpu", logger=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.fit(Plain(), DataLoader(make_data(), batch_size=8), DataLoader(make_data(), batch_size=8))
        plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(pg.PrivacyError, match="to hold the key 'privgrad', got the keys"):
        fit(other, Classifier(), ckpt_path=tmp_path / "plain.ckpt")
    clipped = PrivateStrategy(
        plan,
        device="cpu",
        ledger=tmp_path / "one" / "ledger.jsonl",
        private_options={"clip": pg.clip.PerLayer({"": 1.0})},
    )
    with pytest.raises(pg.PrivacyError, match=r"to be of this run, got a checkpoint with clip Flat\(\), now PerLayer"):
        fit(make_trainer(tmp_path / "one", plan, strategy=clipped), Classifier(), ckpt_path=tmp_path / "step=5.ckpt")


class Plain(Classifier):
    """Trains without privacy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "its own clipping": ({"gradient_clip_val": 1.0}, "set gradient_clip_val=None"),
    "accumulation": ({"accumulate_grad_batches": 2}, "set accumulate_grad_batches=1"),
    "other steps": ({"max_steps": 3}, f"set max_steps={STEPS}"),
    "epochs": ({"max_steps": -1, "max_epochs": 3}, f"set max_steps={STEPS}"),
    "part of an epoch": ({"limit_train_batches": 2}, "set limit_train_batches=1.0"),
    "another precision": ({"precision": "bf16-true"}, "take '32-true' or 'bf16-mixed'"),
    "several devices": ({"devices": 2}, "set devices=1, or use fit"),
    "few examples": ({"overfit_batches": 2}, "set .*overfit_batches=0.0"),
    "too few epochs": ({"max_epochs": 2}, "set max_epochs=-1"),
    "one batch an epoch": ({"limit_train_batches": 1}, "set limit_train_batches=1.0"),
    "several machines": ({"num_nodes": 2}, "set num_nodes=1, or use fit"),
}


@pytest.mark.parametrize(("options", "remedy"), REFUSED.values(), ids=REFUSED)
def test_options_that_change_the_step_are_refused(tmp_path: Path, options: dict[str, Any], remedy: str):
    with pytest.raises(pg.PrivacyError, match=rf"(?s)to leave the private step to the plan, got .*;\s+(- )?{remedy}"):
        fit(make_trainer(tmp_path, planned(), **options), Classifier())


class Cosine(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = pg.optim.AdamBC(self.named_parameters(), noise_step=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


FOLLOWED: dict[str, tuple[dict[str, Any], Any]] = {
    "max_epochs": ({"max_epochs": -1}, Classifier),
    "enough epochs": ({"max_epochs": 3}, Classifier),
    "numbers of the plan": ({"accumulate_grad_batches": 1, "gradient_clip_val": None}, Classifier),
    "whole epochs": ({"limit_train_batches": 1.0, "overfit_batches": 0.0}, Classifier),
    "one device": ({"devices": 1, "num_nodes": 1}, Classifier),
    "a noise step, without a metric": ({"precision": "32-true"}, Cosine),
    "a small microbatch": ({"strategy": {"microbatch_size": 16}}, Classifier),
}


@pytest.mark.parametrize(("options", "module"), FOLLOWED.values(), ids=FOLLOWED)
def test_the_remedies_train_all_steps(tmp_path: Path, options: dict[str, Any], module: Any):
    strategy = PrivateStrategy(planned(), device="cpu", private_options=options.get("strategy"))
    trainer = make_trainer(tmp_path, planned(), **options | {"strategy": strategy})
    fit(trainer, module())
    assert trainer.global_step == strategy.private_grad.ledger.releases == STEPS


def test_a_development_run_needs_a_short_plan(tmp_path: Path):
    plan = planned()
    with pytest.raises(
        pg.PrivacyError, match=r"got fast_dev_run=True, which sets max_steps; .*replace\(plan, steps=2\)"
    ):
        fit(make_trainer(tmp_path / "a", plan, fast_dev_run=True), Classifier())
    trainer = make_trainer(tmp_path / "b", dataclasses.replace(plan, steps=2), max_steps=2, limit_val_batches=2)
    fit(trainer, Classifier())
    assert trainer.global_step == trainer.strategy.private_grad.ledger.releases == 2


class Measures(Classifier):
    """Measures the training by a metric, as is usual without privacy."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.seen, self.where = MulticlassAccuracy(3), where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "training":
            self.seen(self.net(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.seen)


def test_a_metric_of_private_batches_is_refused_and_not_logged_as_zero(tmp_path: Path):
    refused = make_trainer(tmp_path / "a", planned())
    with pytest.raises(pg.PrivacyError, match=r"to update no metric, got self.seen; update .* in validation"):
        fit(refused, Measures("training"))
    assert refused.strategy.private_grad.ledger.releases == 0
    trainer = make_trainer(tmp_path / "b", planned())
    fit(trainer, Measures("validation"))
    assert trainer.callback_metrics["seen"] > 0


def test_a_trained_model_is_pruned_afterwards(tmp_path: Path):
    trainer = make_trainer(tmp_path, planned())
    module = fit(trainer, Classifier())
    prune.l1_unstructured(module.net[0], "weight", 0.5)
    trainer.validate(module, DataLoader(make_data(), batch_size=32), verbose=False)
    assert (module.net[0].weight == 0).float().mean() == 0.5


def test_the_last_checkpoints_are_no_choice_by_evaluations(tmp_path: Path):
    for monitor in ("step", "epoch"):
        last = ModelCheckpoint(tmp_path / monitor, monitor=monitor, mode="max", save_top_k=2, filename="{epoch}")
        trainer = make_trainer(tmp_path / f"{monitor}s", planned(), callbacks=[last], enable_checkpointing=True)
        fit(trainer, Classifier())
        assert {path.name for path in (tmp_path / monitor).iterdir()} == {"epoch=1.ckpt", "epoch=2.ckpt"}


class OfParts(Classifier):
    """A backbone that is frozen at first, and a head."""

    def __init__(self, *groups: str) -> None:
        super().__init__()
        self.backbone, self.groups = self.net[0], groups

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = {"backbone": [one for one in named if one[0].startswith("net.0")]}
        groups["head"] = [one for one in named if one not in groups["backbone"]]
        return pg.optim.AdamBC([{"params": groups[name]} for name in self.groups], lr=0.1)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
def test_unfreezing_needs_all_parameters_in_the_optimizer(tmp_path: Path):
    class LowersRate(BackboneFinetuning):
        def __init__(self) -> None:
            super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda epoch: 0.5)

    trainer = make_trainer(tmp_path / "a", planned(), callbacks=[LowersRate()])
    with pytest.raises(pg.PrivacyError, match=r"got BaseFinetuning with an optimizer without .*last param"):
        fit(trainer, OfParts("head"))
    assert not hasattr(trainer.strategy, "private_grad")
    trainer, module = make_trainer(tmp_path / "b", planned(), callbacks=[LowersRate()]), OfParts("head", "backbone")
    before = cast(Tensor, module.net[0].weight).detach().clone()
    fit(trainer, module)
    assert not torch.equal(before, cast(Tensor, module.net[0].weight))
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.005]


def test_an_interrupted_run_ends_in_spite_of_min_steps(tmp_path: Path):
    plan, options = planned(seed=None), saving(tmp_path)
    options["callbacks"].append(Watch(stop_at=7))
    with pytest.raises(RuntimeError, match="stopped"):
        fit(make_trainer(tmp_path, plan, **options), Classifier())
    trainer = make_trainer(tmp_path, plan, min_steps=STEPS, min_epochs=3)
    with pytest.warns(UserWarning, match="2 charged steps had no checkpoint"):
        module = fit(trainer, Classifier(), ckpt_path=tmp_path / "step=5.ckpt")
    assert trainer.global_step == 10
    assert loaded_into(module) == []  # to resume is no second training


class ReadsItself(Classifier):
    """Overrides a hook without a call of Lightning's own."""

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.read = True


def test_a_loaded_module_knows_what_its_weights_went_through(tmp_path: Path):
    said = "noise multiplier 0.5, sampling rate 0.25 and 12 releases"
    trainer = make_trainer(tmp_path, planned(seed=None), **saving(tmp_path))
    fit(trainer, Classifier())
    for weights_only in (True, False):
        trainer.save_checkpoint(tmp_path / "end.ckpt", weights_only=weights_only)
        for kind in (Classifier, ReadsItself):
            (note,) = loaded_into(kind.load_from_checkpoint(tmp_path / "end.ckpt"))
            assert f"were loaded into the model: {said}." in note


def test_a_module_without_a_private_training_is_saved_and_loaded_as_usual(tmp_path: Path):
    trainer, module = make_trainer(tmp_path, planned()), Classifier()
    trainer.validate(module, DataLoader(make_data(), batch_size=32), verbose=False)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    assert loaded_into(Classifier.load_from_checkpoint(tmp_path / "plain.ckpt")) == []


@pytest.mark.parametrize(
    "callback",
    [
        LearningRateFinder(),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
        DeviceStatsMonitor(cpu_stats=False),
        Timer("00:00:00:03"),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_spend_steps_or_show_private_sizes_are_refused(callback: Any, tmp_path: Path):
    logger = CSVLogger(str(tmp_path))
    trainer = make_trainer(tmp_path, planned(), callbacks=[callback], logger=logger)
    with pytest.raises(pg.PrivacyError, match=f"to the plan, got a {type(callback).__name__}; leave it out"):
        fit(trainer, Classifier())


def test_no_private_duration_ends_the_training(tmp_path: Path):
    with pytest.raises(pg.PrivacyError, match="got a Timer; leave it out: the time of a step"):
        fit(make_trainer(tmp_path, planned(), max_time={"seconds": 3}), Classifier())


def test_no_exact_result_decides_the_rate(tmp_path: Path):
    class ByMetric(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.named_parameters())
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "accuracy"}}

    with pytest.raises(pg.PrivacyError, match="got ReduceLROnPlateau; give CosineAnnealingLR"):
        fit(make_trainer(tmp_path, planned()), ByMetric())


def test_modules_that_would_train_otherwise_are_refused(tmp_path: Path):
    by_hand = Classifier()
    by_hand.automatic_optimization = False
    with pytest.raises(pg.PrivacyError, match="got manual optimization; use automatic optimization with one optimizer"):
        fit(make_trainer(tmp_path / "a", planned()), by_hand)
    with pytest.raises(pg.PrivacyError, match="to take released gradients, got SGD"):
        fit(make_trainer(tmp_path / "b", planned()), Plain())
    of_others = Classifier(lambda params: pg.optim.SGD(make_model().named_parameters(), lr=0.1))
    with pytest.raises(
        pg.PrivacyError, match=r"to hold every trainable parameter, .*, got an optimizer without net\.0\.weight"
    ):
        fit(make_trainer(tmp_path / "c", planned()), of_others)
    mean = Classifier()
    mean.training_step = lambda batch, batch_idx: Classifier.training_step(mean, batch, batch_idx).mean()  # pyright: ignore
    with pytest.raises(pg.PrivacyError, match="losses"):
        fit(make_trainer(tmp_path / "d", planned()), mean)


def test_a_loader_of_ones_own_is_refused(tmp_path: Path):
    trainer = make_trainer(tmp_path, planned())
    with pytest.raises(pg.SamplingError, match=r"batch to be what plan\.batches.* yields, .*, got list"):
        trainer.fit(Classifier(), DataLoader(make_data(), batch_size=8), DataLoader(make_data(), batch_size=8))
    assert trainer.strategy.private_grad.ledger.releases == 0


def test_private_losses_are_not_logged(tmp_path: Path):
    class Telling(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            losses = super().training_step(batch, batch_idx)
            self.log("loss", losses.mean())
            return losses

    module = Telling()
    with pytest.raises(pg.PrivacyError, match=r"self\.log in training_step to stay unused"):
        fit(make_trainer(tmp_path, planned()), module)
    assert "log" not in vars(module)

    class TellingOtherwise(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            losses = super().training_step(batch, batch_idx)
            super().log("loss", losses.mean())
            return losses

    with pytest.raises(MisconfigurationException, match="not managed"):
        fit(make_trainer(tmp_path / "otherwise", planned()), TellingOtherwise())


def test_a_gradient_that_made_no_update_stops_the_run_before_the_next_is_paid_for(tmp_path: Path):
    class Accumulates(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.accumulate_grad_batches = 2

    trainer = make_trainer(tmp_path, planned(), callbacks=[Accumulates()])
    with pytest.raises(pg.PrivacyError, match="each released gradient to be used by one update, got 0"):
        fit(trainer, Classifier())
    assert trainer.strategy.private_grad.ledger.releases == 1


def test_a_second_fit_does_not_forget_what_the_first_released(tmp_path: Path):
    strategy, module = PrivateStrategy(planned(), device="cpu"), Classifier()
    fit(make_trainer(tmp_path, planned(), strategy=strategy, accelerator="auto"), module)
    with pytest.raises(pg.BudgetExceededError, match=f"got {STEPS} releases"):
        fit(make_trainer(tmp_path, planned(), strategy=strategy, accelerator="auto"), module)
    assert strategy.private_grad.ledger.releases == STEPS


def test_a_saved_module_counts_the_trainings_of_strategies_that_are_gone(tmp_path: Path):
    plan, module = planned(steps=2, delta=1e-3), Classifier()
    for _ in range(2):
        strategy = PrivateStrategy(plan, device="cpu")
        trainer = make_trainer(tmp_path, plan, strategy=strategy)
        fit(trainer, module)
        trainer.save_checkpoint(tmp_path / "end.ckpt", weights_only=True)
        del trainer
    (note,) = loaded_into(Classifier.load_from_checkpoint(tmp_path / "end.ckpt"))
    assert note.count("and 2 releases") == 2
    ledger = strategy.private_grad.ledger  # pyright: ignore[reportPossiblyUnboundVariable]
    gc.collect()
    with pytest.raises(pg.PrivacyError, match=r"cover every training .* got a training with 2 releases"):
        pg.save(module, tmp_path / "saved", ledger=ledger)
    assert pg.save(module.net, tmp_path / "saved", ledger=pg.ledgers_of(module)).numbers["releases"] == 4


def test_autocast_reaches_the_private_step(tmp_path: Path):
    kinds: set[torch.dtype] = set()

    class Noting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kinds.add(self.net(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    plan, watch = planned(steps=2), Watch()
    fit(make_trainer(tmp_path, plan, precision="bf16-mixed", callbacks=[watch]), Noting())
    assert torch.bfloat16 in kinds
    assert {value.dtype for value in watch.released[0].values()} == {torch.float32}


def test_validation_alone_needs_no_plan(tmp_path: Path):
    trainer = make_trainer(tmp_path, planned())
    (measured,) = trainer.validate(Classifier(), DataLoader(make_data(), batch_size=32), verbose=False)
    assert 0 <= measured["accuracy"] <= 1
    assert not (tmp_path / "ledger.jsonl").exists()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert 0 <= example("lightning_module", monkeypatch)(steps=2, folder=str(tmp_path)) <= 1
    assert (tmp_path / "ledger.jsonl").exists()
