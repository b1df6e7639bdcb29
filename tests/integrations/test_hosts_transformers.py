"""Every argument, method and callback of the installed Trainer has a fate, and the fates are what happens."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import privgrad as pg

pytest.importorskip("transformers")
from hosts.transformers import FATES
from test_huggingface import bert, equal, make_trainer, texts
from transformers import TrainerCallback, TrainingArguments

from conftest import make_plan
from privgrad.integrations.huggingface import PrivateTrainer

REFUSED: dict[str, Any] = {  # a value of each refused argument
    "per_device_train_batch_size": 4,
    "num_train_epochs": 4,
    "max_steps": 5,
    "max_grad_norm": 0.5,
    "adam_epsilon": 1e-3,
    "optim": "sgd",
    "gradient_accumulation_steps": 2,
    "label_smoothing_factor": 0.1,
    "fp16": True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 2,
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "all",
    "enable_jit_checkpoint": True,
    "ignore_data_skip": True,
    "deepspeed": "config.json",
    "fsdp": True,
    "parallelism_config": object(),
    "dataloader_multiprocessing_context": "spawn",
    "train_sampling_strategy": "sequential",
    "debug": "underflow_overflow",
    "skip_memory_metrics": False,
}
LATER = {"deepspeed", "parallelism_config"}  # TrainingArguments itself asks for packages or devices
WITHOUT_EFFECT: dict[str, Any] = {
    "optim_args": "a=1",
    "optim_target_modules": ["query"],
    "average_tokens_across_devices": False,
    "liger_kernel_config": {"rms_norm": True},
    "log_on_each_node": False,
    "log_level_replica": "error",
    "save_on_each_node": True,
    "data_seed": 7,
    "fsdp_config": {"fsdp_version": 2},
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 10,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_timeout": 10,
    "length_column_name": "row",
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "resume_from_checkpoint": "elsewhere",
}
ONLINE = {"init_hf_repo", "push_to_hub", "on_push_begin"}  # they need the hub


def of(place: str, fate: str) -> set[str]:
    """The names at a place whose fate begins so."""
    found = (name for name in FATES if name.rpartition(".")[0] == place)
    return {name.rpartition(".")[2] for name in found if FATES[name].startswith(fate)}


def test_each_refused_argument_is_tried():
    assert REFUSED.keys() == of("TrainingArguments", "refused")
    starting = {"local_rank", "ddp_backend"}  # TrainingArguments itself would look for other processes
    assert WITHOUT_EFFECT.keys() | starting == of("TrainingArguments", "no effect by design")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments_raise_before_anything_is_released(tmp_path: Path, name: str):
    given: dict[str, Any] = {} if name in LATER else {name: REFUSED[name]}
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **given)
    if name in LATER:
        setattr(args, name, REFUSED[name])
    named = name.removesuffix("_backend").removesuffix("_mode")
    with pytest.raises(pg.PrivacyError, match=rf"to leave the private step to the plan, got {named}="):
        PrivateTrainer(bert(), args, plan=make_plan(steps=12, delta=1e-3), train_dataset=texts())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_arguments_without_effect_leave_the_weights_as_they_are(tmp_path: Path):
    trained = list[Any]()
    for folder, arguments in (("plain", {}), ("changed", WITHOUT_EFFECT)):
        model = bert()
        trainer = make_trainer(tmp_path / folder, model, texts(), planned={"steps": 2}, arguments=arguments)
        trainer.train()
        trained.append(model)
    assert equal(*trained)


@pytest.mark.parametrize("name", sorted(of("Trainer.__init__", "refused")))
def test_refused_options_of_the_constructor_raise(tmp_path: Path, name: str):
    values: dict[str, Any] = {
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
        "model_init": bert,
        "compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.loss,
    }
    with pytest.raises(pg.PrivacyError, match=rf"give .* in place of {name}"):
        make_trainer(tmp_path, bert(), texts(), **{name: values[name]})
    assert not (tmp_path / "ledger.jsonl").exists()


def counting(method: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return method(self, *args, **kwargs)

    return called


def redefined(methods: set[str], calls: Counter[str]) -> type[PrivateTrainer]:
    """A subclass with these methods, which count their calls and do what they did."""
    own = {name: counting(getattr(PrivateTrainer, name), name, calls) for name in methods}
    return type("Mine", (PrivateTrainer,), own)


@pytest.mark.parametrize("name", sorted(of("Trainer", "refused") - {"hyperparameter_search"}))
def test_refused_overrides_are_named_before_anything_is_released(tmp_path: Path, name: str):
    with pytest.raises(pg.PrivacyError, match=rf"to leave the private step to the plan, got Mine\.{name}; "):
        make_trainer(tmp_path, bert(), texts(), kind=redefined({name}, Counter()))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_search_of_hyperparameters_is_refused(tmp_path: Path):
    trainer = make_trainer(tmp_path, bert(), texts())
    with pytest.raises(RuntimeError):  # it needs model_init, which is refused
        trainer.hyperparameter_search()
    assert trainer.private_grad.ledger.releases == 0


def test_every_override_and_callback_that_is_taken_is_called(tmp_path: Path):
    methods, events = of("Trainer", "taken") - ONLINE, of("TrainerCallback", "taken") - ONLINE
    calls = Counter[str]()
    listening = type("Mine", (TrainerCallback,), {n: counting(getattr(TrainerCallback, n), n, calls) for n in events})
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "logging_steps": 1, "weight_decay": 0.1}
    trainer = make_trainer(
        tmp_path,
        bert(),
        texts(),
        planned={"steps": 2, "delta": 1e-3, "seed": None},
        arguments=arguments,
        kind=redefined(methods, calls),
        loss_fn=lambda model, batch: torch.nn.functional.cross_entropy(
            model(**batch).logits, batch["labels"], reduction="none"
        ),
        optimizers=(None, None),
        noise_step=0.01,
        callbacks=[listening()],
        eval_dataset=texts(8),
    )
    metrics = trainer.train().metrics
    assert trainer.state.global_step == 2
    trainer.predict(texts(4))  # pyright: ignore[reportArgumentType]
    trainer.save_model(str(tmp_path / "saved"))
    trainer.create_model_card()
    callback = TrainerCallback()
    for use in (trainer.add_callback, trainer.pop_callback, trainer.add_callback, trainer.remove_callback):
        use(callback)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.get_learning_rates()
    trainer.get_num_trainable_parameters()
    trainer.get_optimizer_group()
    trainer.end()
    assert methods | events == calls.keys()
    assert calls["create_optimizer"] == 1
