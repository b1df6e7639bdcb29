"""Each name of hosts/lightning.py is tried: refused before the first release, called, or without effect."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import privgrad as pg
from conftest import make_data

pytest.importorskip("lightning")
from hosts.lightning import FATES, NO_HOOK
from lightning import pytorch as L
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from test_lightning import Classifier, Watch, fit, make_trainer, planned, pytestmark, saving

from privgrad.integrations.lightning import PrivateStrategy

__all__ = ["pytestmark"]  # the warnings of Lightning that test_lightning ignores


def of(place: str, fate: str) -> list[str]:
    """The names of a place with a fate; those that are no hooks are left out."""
    found = [name for name, said in FATES.items() if said.startswith(fate) and said != NO_HOOK]
    return [name.partition(".")[2] for name in found if name.startswith(f"{place}.")]


# A value of each argument of the Trainer that is not its default.
VALUES: dict[str, Any] = {
    "accelerator": "cpu",
    "accumulate_grad_batches": 2,
    "barebones": True,
    "benchmark": True,
    "callbacks": [L.Callback()],
    "check_val_every_n_epoch": 2,
    "default_root_dir": "elsewhere",
    "detect_anomaly": True,
    "deterministic": True,
    "devices": 2,
    "enable_autolog_hparams": False,
    "enable_checkpointing": True,
    "enable_model_summary": True,
    "enable_progress_bar": True,
    "fast_dev_run": True,
    "gradient_clip_algorithm": "value",
    "gradient_clip_val": 1.0,
    "inference_mode": False,
    "limit_predict_batches": 1,
    "limit_test_batches": 1,
    "limit_train_batches": 1,
    "limit_val_batches": 1,
    "log_every_n_steps": 3,
    "logger": True,
    "max_epochs": 2,
    "max_steps": 3,
    "max_time": "00:00:00:30",
    "min_epochs": 2,
    "min_steps": 5,
    "model_registry": "mine",
    "num_nodes": 2,
    "num_sanity_val_steps": 0,
    "overfit_batches": 1,
    "plugins": [],
    "precision": "bf16-mixed",
    "profiler": "simple",
    "reload_dataloaders_every_n_epochs": 1,
    "strategy": None,  # make_trainer gives one
    "sync_batchnorm": True,
    "use_distributed_sampler": False,
    "val_check_interval": 2,
}
QUIET = {"barebones": {"logger": None, "enable_checkpointing": None}}  # what make_trainer would set against it


def test_every_argument_is_tried():
    assert VALUES.keys() == {name.partition(".")[2] for name in FATES if name.startswith("Trainer.")}


@pytest.mark.parametrize("name", of("Trainer", "refused"))
def test_a_refused_argument_stops_before_anything_is_released(name: str, tmp_path: Path):
    trainer = make_trainer(tmp_path, planned(), **{name: VALUES[name]})
    before_the_first(trainer, Classifier(), name if name != "max_time" else "Timer.*max_time")


def before_the_first(trainer: Any, module: Any, match: str) -> None:
    with pytest.raises(pg.PrivacyError, match=f"PrivateStrategy: .*{match}"):
        fit(trainer, module)
    assert not hasattr(trainer.strategy, "private_grad") or trainer.strategy.private_grad.ledger.releases == 0


@pytest.mark.filterwarnings("ignore:You are trying to `self.log..` but `Trainer.barebones=True.` is configured")
@pytest.mark.parametrize("name", of("Trainer", "taken"))
def test_a_taken_argument_trains_all_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, planned(), **QUIET.get(name, {}) | {name: VALUES[name]})
    fit(trainer, Classifier())
    assert trainer.global_step == trainer.strategy.private_grad.ledger.releases == planned().steps


@pytest.mark.parametrize("name", of("Trainer", "no effect by design"))
def test_an_argument_without_effect_has_none(name: str, tmp_path: Path):
    weights = list[list[torch.Tensor]]()
    for options in ({}, {name: VALUES[name]}):
        trainer = make_trainer(tmp_path, planned(), strategy=PrivateStrategy(planned(), device="cpu"), **options)
        weights.append(list(fit(trainer, Classifier()).parameters()))
    assert all(map(torch.equal, *weights))


def counted(base: Any, held: list[str], called: set[str]) -> Any:
    """A subclass that overrides methods, each of which notes its call and goes on."""

    def override(name: str) -> Any:
        original = getattr(base, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return original(self, *args, **kwargs)

        method.__signature__ = inspect.signature(original)  # pyright: ignore  # not by wraps: Lightning would see through
        return method

    return type("Counted", (base,), {name: override(name) for name in held})


class Complete(Classifier):
    """Holds its own data."""

    batch_size = 8  # BatchSizeFinder asks for it

    def forward(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_dataloader(self) -> Any:
        return self.trainer.strategy.batches(make_data())  # pyright: ignore

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*(tensor.clone() for tensor in make_data().tensors)), batch_size=16)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> Any:
        return DataLoader(make_data().tensors[0].clone(), batch_size=16)  # pyright: ignore


def use_all(folder: Path, module: Any, **options: Any) -> None:
    """Train, evaluate and predict."""
    trainer = make_trainer(folder, planned(), **options)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)


def saving_until_it_stops(folder: Path, *others: L.Callback) -> dict[str, Any]:
    options = saving(folder)
    return options | {"callbacks": [*options["callbacks"], *others, Watch(stop_at=7)]}


@pytest.mark.filterwarnings("ignore:You have overridden `Counted.configure_sharded_model` which is deprecated")
def test_each_hook_of_a_module_that_is_taken_is_called(tmp_path: Path):
    hooks, called = of("LightningModule", "taken"), set[str]()
    older = "configure_sharded_model"  # either this one or configure_model is called
    make = counted(Complete, [name for name in hooks if name != older], called)
    use_all(tmp_path / "a", make(), **saving(tmp_path / "a"))
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(tmp_path / "b", planned(), **saving_until_it_stops(tmp_path)).fit(make())
    make_trainer(tmp_path / "b", planned()).fit(make(), ckpt_path=tmp_path / "step=5.ckpt")
    use_all(tmp_path / "c", counted(Complete, [older], called)())
    assert called == set(hooks)


def test_each_hook_of_a_callback_that_is_taken_is_called(tmp_path: Path):
    hooks, called = of("Callback", "taken"), set[str]()
    watch = counted(type("Watch", (L.Callback,), {"state_dict": lambda self: {"some": 1}}), hooks, called)
    use_all(tmp_path / "a", Complete(), callbacks=[watch()])
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(tmp_path / "b", planned(), **saving_until_it_stops(tmp_path, watch())).fit(Complete())
    make_trainer(tmp_path / "b", planned(), callbacks=[watch()]).fit(Complete(), ckpt_path=tmp_path / "step=5.ckpt")
    assert called == set(hooks)


@pytest.mark.parametrize("name", of("LightningModule", "refused"))
def test_a_refused_hook_of_a_module_stops_before_anything_is_released(name: str, tmp_path: Path):
    before_the_first(make_trainer(tmp_path, planned()), counted(Classifier, [name], set())(), f"no {name}")


@pytest.mark.parametrize("name", of("Callback", "refused"))
def test_a_refused_hook_of_a_callback_stops_before_anything_is_released(name: str, tmp_path: Path):
    for one in (counted(L.Callback, [name], set())(), callbacks.LambdaCallback(**{name: lambda *args: None})):
        before_the_first(make_trainer(tmp_path, planned(), callbacks=[one]), Classifier(), f"no {name}")


class Unfreezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Writes(callbacks.BasePredictionWriter):
    """Writes nothing."""


CALLBACKS: dict[str, Any] = {
    "BaseFinetuning": Unfreezes,
    "BasePredictionWriter": Writes,
    "BatchSizeFinder": callbacks.BatchSizeFinder,
    "EarlyStopping": lambda: callbacks.EarlyStopping("accuracy", mode="max", patience=99),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 2}),
    "LearningRateMonitor": callbacks.LearningRateMonitor,
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(".", monitor="accuracy", mode="max"),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.3),
    "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2),
    "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(batch_size_fn=len),
    "Timer": lambda: callbacks.Timer("00:00:00:30"),
}


@pytest.mark.parametrize("name", of("callbacks", "refused"))
def test_a_refused_callback_stops_before_anything_is_released(name: str, tmp_path: Path):
    one = CALLBACKS.get(name, getattr(callbacks, name))()
    trainer = make_trainer(tmp_path, planned(), callbacks=[one], logger=CSVLogger(tmp_path))
    with pytest.raises(pg.PrivacyError, match=f"PrivateStrategy: .* to the plan, got a {name}; leave it out"):
        trainer.fit(Complete())
    assert not hasattr(trainer.strategy, "private_grad")


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
@pytest.mark.filterwarnings("ignore:.*was called without a model|.* there is no last checkpoint")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("name", [name for name in of("callbacks", "taken") if name != "BackboneFinetuning"])
def test_a_taken_callback_trains_all_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    strategy = PrivateStrategy(planned(), device="cpu", selection_data="public")
    one = CALLBACKS.get(name, getattr(callbacks, name))()
    options: dict[str, Any] = {"strategy": strategy, "callbacks": [one], "logger": True, "max_epochs": 3}
    if isinstance(one, callbacks.ProgressBar | callbacks.RichProgressBar):
        options["enable_progress_bar"] = True
    trainer = make_trainer(tmp_path, planned(), enable_checkpointing=True, **options)
    fit(trainer, Classifier())
    assert trainer.global_step == strategy.private_grad.ledger.releases == planned().steps
