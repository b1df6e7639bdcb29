"""Each name of hosts/accelerate.py that a loop around PrivateGradient may meet is tried in such a loop."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import privgrad as pg
from conftest import loss_fn, make_data, make_model, make_plan

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from hosts.accelerate import FATES

STEPS = 6


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the settings of other tests, which Accelerate keeps for the process."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(before)


def of(fate: str, places: Any) -> list[str]:
    """The names of `places` that have a fate."""
    return [name for name in places if FATES[f"Accelerator.{name}"].startswith(fate)]


Around = Callable[[Accelerator, Any], AbstractContextManager[Any] | None]


# Each is used in every step, before the gradient or around it.
USES: dict[str, Around] = {
    "accumulate": lambda accelerator, model: accelerator.accumulate(model),
    "clip_grad_norm_": lambda accelerator, model: void(accelerator.clip_grad_norm_(model.parameters(), 1e-3)),
    "join_uneven_inputs": lambda accelerator, model: accelerator.join_uneven_inputs([model]),
    "maybe_context_parallel": lambda accelerator, model: accelerator.maybe_context_parallel(),
    "no_sync": lambda accelerator, model: accelerator.no_sync(model),
    "prepare_model": lambda accelerator, model: void(accelerator.prepare(model)),
    "trigger_sync_in_backward": lambda accelerator, model: accelerator.trigger_sync_in_backward(model),
    "unscale_gradients": lambda accelerator, model: void(accelerator.unscale_gradients()),
}


def void(value: object) -> None:
    """Drop a value."""


def train(accelerator: Any, around: Around = lambda *_: None) -> list[Tensor]:
    """The weights after a loop as docs/integrations.md has it, with a use of the accelerator in each step."""
    plan, model = make_plan(steps=STEPS, seed=5), make_model()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    if around is not USES["accumulate"]:
        schedule = accelerator.prepare(schedule)
    loader = accelerator.prepare(DataLoader(make_data(), batch_size=16))
    for batch in plan.batches(make_data()):
        with around(accelerator, model) or nullcontext():
            optimizer.step(grad=private_grad(batch.to(accelerator.device)))
        schedule.step()
    right = torch.cat([model(inputs).argmax(1) == labels for inputs, labels in loader])
    assert len(accelerator.gather_for_metrics(right)) == len(make_data())
    assert private_grad.ledger.releases == STEPS
    return list(model.parameters())


# A value of each argument that is not its default; deepspeed and megatron are not installed.
VALUES: dict[str, Callable[[], Any]] = {
    "cpu": lambda: True,
    "dataloader_config": lambda: DataLoaderConfiguration(even_batches=False),
    "device_placement": lambda: False,
    "dynamo_backend": lambda: "eager",
    "dynamo_plugin": lambda: TorchDynamoPlugin(backend="eager"),  # pyright: ignore
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "gradient_accumulation_plugin": lambda: GradientAccumulationPlugin(num_steps=4),
    "gradient_accumulation_steps": lambda: 4,
    "kwargs_handlers": lambda: [AutocastKwargs(enabled=False)],
    "log_with": lambda: "tensorboard",
    "mixed_precision": lambda: "bf16",
    "parallelism_config": ParallelismConfig,
    "project_config": lambda: ProjectConfiguration("mine"),
    "project_dir": lambda: "mine",
    "rng_types": lambda: ["torch"],
    "split_batches": lambda: True,
    "step_scheduler_with_optimizer": lambda: False,
    "torch_tp_plugin": TorchTensorParallelPlugin,
}
NOT_INSTALLED = {"deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"}


@pytest.mark.filterwarnings("ignore:`TorchTensorParallelPlugin` is deprecated")
@pytest.mark.parametrize("name", VALUES)
def test_no_argument_changes_the_weights(name: str):
    before = {} if name != "log_with" else {"project_dir": "mine"}
    options: dict[str, Any] = {name: VALUES[name](), **before}
    weights = train(Accelerator(**options))
    assert all(map(torch.equal, weights, train(Accelerator())))


def test_each_name_without_effect_is_tried():
    without = of("no effect", [name.partition(".")[2] for name in FATES])
    assert set(without) <= USES.keys() | VALUES.keys() | NOT_INSTALLED


@pytest.mark.filterwarnings("ignore:Joining uneven inputs is only supported")
@pytest.mark.parametrize("name", USES)
def test_no_use_around_the_step_changes_the_weights(name: str):
    weights = train(Accelerator(gradient_accumulation_steps=2), USES[name])
    assert all(map(torch.equal, weights, train(Accelerator())))


def test_autocast_reaches_the_private_step():
    seen = set[torch.dtype]()

    def watched(model: Any, batch: Any) -> Tensor:
        seen.add(model(batch[0]).dtype)
        return loss_fn(model, batch)

    plan, model, accelerator = make_plan(steps=2, seed=5), make_model(), Accelerator(mixed_precision="bf16")
    private_grad = pg.PrivateGradient(model, watched, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    for batch in plan.batches(make_data()):
        with accelerator.autocast():
            optimizer.step(grad=private_grad(batch))
    assert torch.bfloat16 in seen


def test_a_backward_pass_moves_nothing():
    plan, model, accelerator = make_plan(steps=2, seed=5), make_model(), Accelerator()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    optimizer = pg.optim.AdamBC(model.named_parameters(), lr=0.05)
    images, labels = make_data().tensors
    accelerator.backward(loss_fn(model, (images, labels)).mean())
    with pytest.raises(pg.PrivacyError, match=r"got 0; call step\(grad=private_grad\(batch\)\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="LOMO"):
        accelerator.lomo_backward(loss_fn(model, (images, labels)).mean(), 0.1)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="empty"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    assert private_grad.ledger.releases == 0


def test_a_prepared_optimizer_takes_no_released_gradient():
    plan, model, accelerator = make_plan(steps=2, seed=5), make_model(), Accelerator()
    private_grad = pg.PrivateGradient(model, loss_fn, plan)
    prepared: Any = accelerator.prepare(pg.optim.AdamBC(model.named_parameters(), lr=0.05))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'grad'"):
        prepared.step(grad=private_grad(next(iter(plan.batches(make_data())))))


def test_the_trained_model_is_saved_as_usual(tmp_path: Path):
    accelerator, model = Accelerator(), make_model()
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save(accelerator.get_state_dict(model), tmp_path / "weights.pt")
    assert accelerator.unwrap_model(model) is model
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert torch.load(tmp_path / "weights.pt").keys() == model.state_dict().keys()
