"""The Trainer of transformers: its arguments, its methods and its callbacks, and what PrivateTrainer makes of each."""

from __future__ import annotations

import inspect
from dataclasses import fields

from transformers import Trainer, TrainerCallback, TrainingArguments

# Methods with an underscore that are well known for being overridden.
PRIVATE = {"_get_train_sampler", "_inner_training_loop", "_prepare_inputs", "_save"}
_ONE_PROCESS = "no effect by design: PrivateTrainer trains in one process"
_BATCHES = "refused: the plan draws the batches"
_EVALUATION = "taken: for evaluations"
_YOURS = "taken: only your own code calls it"
_SCRIPT = "no effect by design: it is for your own script, as in transformers"
_SEVERAL = "refused: several devices need fit with PrivateGradient(processes=Distributed())"
_MEMORY = "refused: private_options={'microbatch_size': n} saves memory"
_COMPILED = "refused: private_options={'compile': True} compiles the private step"
_REDEFINE = "refused: redefine create_optimizer or create_scheduler"


def names() -> set[str]:
    """Every argument, method and callback of the installed transformers that a user may give or override."""
    found = {f"TrainingArguments.{field.name}" for field in fields(TrainingArguments)}
    found |= {f"Trainer.__init__.{name}" for name in inspect.signature(Trainer.__init__).parameters if name != "self"}
    found |= {f"Trainer.{name}" for name in dir(Trainer) if not name.startswith("_") or name in PRIVATE}
    return found | {f"TrainerCallback.{name}" for name in dir(TrainerCallback) if not name.startswith("_")}


def _of(place: str, fates: dict[str, str]) -> dict[str, str]:
    """Fates by full name; a key may hold several names with one fate."""
    return {f"{place}.{name}": fate for several, fate in fates.items() for name in several.split()}


_ARGUMENTS = {
    "output_dir": "taken: ledger.jsonl is in it",
    "per_device_train_batch_size": "refused: next to a plan; private_options={'microbatch_size': n} saves memory",
    "num_train_epochs": "refused: next to a plan with another number of steps",
    "max_steps": "refused: next to a plan, which decides the number of steps",
    "max_grad_norm": "refused: next to a plan, which clips each example",
    "learning_rate": "taken: of the default optimizer; the default 5e-5 counts as not set",
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps": "taken",
    "weight_decay adam_beta1 adam_beta2": "taken: of the default optimizer",
    "adam_epsilon": "refused: AdamWBC has debias_floor in its place",
    "optim": "refused: give optimizers=(an optimizer of pg.optim, None)",
    "optim_args optim_target_modules": "no effect by design: adamw_torch has no such options",
    "gradient_accumulation_steps": "refused: the plan's batch is one step",
    "average_tokens_across_devices": _ONE_PROCESS,
    "label_smoothing_factor": "refused: loss_fn may have F.cross_entropy(..., label_smoothing=0.1)",
    "bf16 tf32 activation_checkpointing activation_checkpointing_kwargs": "taken",
    "gradient_checkpointing gradient_checkpointing_kwargs": "taken",
    "fp16": "refused: for mixed precision, set bf16=True",
    "bf16_full_eval fp16_full_eval": _EVALUATION,
    "torch_compile torch_compile_backend torch_compile_mode": _COMPILED,
    "use_liger_kernel": "refused: its kernels have no gradients of single examples",
    "liger_kernel_config": "no effect by design: it belongs to use_liger_kernel",
    "use_cache": "taken: for evaluations; the private step has no cache",
    "neftune_noise_alpha": "refused: privgrad has nothing in its place",
    "torch_empty_cache_steps auto_find_batch_size": _MEMORY,
    "logging_strategy logging_steps logging_first_step": "taken: no loss on private examples is logged",
    "log_on_each_node log_level_replica save_on_each_node": _ONE_PROCESS,
    "logging_nan_inf_filter": _EVALUATION,
    "include_num_input_tokens_seen": "refused: the number of private tokens has no noise",
    "log_level disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id": "taken",
    "trackio_static_space_id": "taken",
    "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start": "taken",
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps": "taken",
    "include_for_metrics batch_eval_metrics": "taken",
    "save_only_model save_strategy save_steps save_total_limit": "taken",
    "enable_jit_checkpoint": "refused: a killed run resumes from its last checkpoint: set save_steps",
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": "taken",
    "load_best_model_at_end": "taken: with selection_data",
    "metric_for_best_model greater_is_better restore_callback_states_from_checkpoint": "taken",
    "ignore_data_skip": "refused: a resumed run continues after its last release",
    "full_determinism seed": "taken: torch's generators; draws and noise have the plan's seed",
    "data_seed": "no effect by design: the plan draws the batches",
    "use_cpu": "taken",
    "accelerator_config": "taken: for evaluations; gradient_accumulation_kwargs are refused",
    "deepspeed fsdp parallelism_config": _SEVERAL,
    "fsdp_config": "no effect by design: it belongs to fsdp",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": _ONE_PROCESS,
    "ddp_backend ddp_timeout local_rank": _ONE_PROCESS,
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor": "taken",
    "dataloader_drop_last": _EVALUATION,
    "dataloader_persistent_workers": "taken: for evaluations; training keeps its workers anyway",
    "dataloader_in_order": "taken: for evaluations; the plan orders its own batches",
    "dataloader_multiprocessing_context": "refused: call torch.multiprocessing.set_start_method",
    "remove_unused_columns label_names": "taken",
    "train_sampling_strategy": _BATCHES,
    "length_column_name": "no effect by design: it belongs to group_by_length",
    "debug": "refused: it prints private activations",
    "skip_memory_metrics": "refused: peak memory reveals the size of the largest batch",
    "do_train do_eval do_predict resume_from_checkpoint": _SCRIPT,
}
_CONSTRUCTOR = {
    "model args train_dataset eval_dataset processing_class compute_metrics callbacks": "taken",
    "preprocess_logits_for_metrics": "taken",
    "data_collator": "taken: if it pads to a public length",
    "optimizers": "taken: with an optimizer of pg.optim",
    "optimizer_cls_and_kwargs": "refused: give optimizers in place of it",
    "model_init": "refused: give model in place of it",
    "compute_loss_func": "refused: give loss_fn, which returns one loss per example",
}
_METHODS = {
    "get_train_dataloader get_batch_samples _get_train_sampler": _BATCHES,
    "training_step": "refused: give loss_fn, or a TrainerCallback for what else a step does",
    "floating_point_ops": "refused: the number would reveal the size of a batch",
    "set_initial_training_values": "refused: the plan decides the steps",
    "_inner_training_loop": "refused: write a loop with pg.PrivateGradient",
    "create_optimizer_and_scheduler get_optimizer_cls_and_kwargs": _REDEFINE,
    "call_model_init": "refused: give model in place of model_init",
    "hyperparameter_search": "refused: give each trial its own plan, trainer and epsilon",
    "create_optimizer": "taken: called once, in the constructor",
    "create_scheduler get_decay_parameter_names": "taken",
    "compute_loss": "taken: for evaluations, next to loss_fn",
    "prediction_step evaluate evaluation_loop predict get_eval_dataloader get_test_dataloader": "taken",
    "compute_loss_context_manager autocast_smart_context_manager _prepare_inputs": "taken",
    "train log save_model _save create_model_card num_examples get_total_train_batch_size store_flos": "taken",
    "create_accelerator_and_postprocess add_callback is_local_process_zero is_world_process_zero": "taken",
    "init_hf_repo": "taken: with push_to_hub=True",
    "push_to_hub pop_callback remove_callback end save_state save_metrics log_metrics": _YOURS,
    "get_learning_rates get_num_trainable_parameters get_optimizer_group": _YOURS,
    "get_cp_size get_sp_size get_tp_size": _ONE_PROCESS,
    "metrics_format": "no effect by design: transformers itself calls a function in its place",
    "loss_is_scaled_for_ga": "no effect by design: no loss is accumulated",
}
_CALLBACKS = {
    "on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_step_end": "taken",
    "on_pre_optimizer_step on_optimizer_step on_log on_evaluate on_predict on_prediction_step on_save": "taken",
    "on_push_begin": "taken: with push_to_hub=True",
    "on_substep_end": "no effect by design: no gradient is accumulated",
}
FATES: dict[str, str] = {
    **_of("TrainingArguments", _ARGUMENTS),
    **_of("Trainer.__init__", _CONSTRUCTOR),
    **_of("Trainer", _METHODS),
    **_of("TrainerCallback", _CALLBACKS),
}
