"""What becomes of Accelerate's arguments and methods in a loop around PrivateGradient, as docs/integrations.md has it.

There is no bridge: neither the model nor the optimizer is prepared, so most options find nothing to act on.
"""

import inspect

from accelerate import Accelerator

_ACTS_ON_PREPARED = "no effect by design: it acts on prepared models only; use Distributed()"
_ONE_STEP = "no effect by design: each batch is one step; microbatch_size limits memory"
_NO_LOSS = "no effect by design: no loss is scaled, and parameters hold no .grad"
_NO_EXCHANGE = "no effect by design: PrivateGradient adds up the gradients of processes"


def _are(fate: str, names: str) -> dict[str, str]:
    return {f"Accelerator.{name}": fate for name in names.split()}


FATES: dict[str, str] = {
    **_are("taken", "cpu kwargs_handlers log_with project_config project_dir rng_types"),
    **_are("taken: for prepared loaders of held-out data", "dataloader_config device_placement split_batches"),
    "Accelerator.mixed_precision": "taken: 'bf16', by accelerator.autocast around private_grad",
    "Accelerator.step_scheduler_with_optimizer": "taken: for prepared schedulers",
    **_are(_ONE_STEP, "gradient_accumulation_plugin gradient_accumulation_steps"),
    "Accelerator.accumulate": "taken: each batch is one step all the same; it delays prepared schedulers",
    **_are(
        _ACTS_ON_PREPARED,
        """
        deepspeed_plugin deepspeed_plugins dynamo_backend dynamo_plugin fsdp_plugin megatron_lm_plugin
        parallelism_config torch_tp_plugin
        """,
    ),
    **_are(
        "taken",
        """
        autocast check_trigger clear end_training free_memory gather gather_for_metrics get_state_dict get_tracker
        init_trackers local_main_process_first log main_process_first on_last_process on_local_main_process
        on_local_process on_main_process on_process pad_across_processes prepare_scheduler print profile reduce save
        save_model set_trigger split_between_processes unwrap_model verify_device_map wait_for_everyone
        """,
    ),
    **_are(
        "taken: for held-out data; plan.batches loads the training data",
        "prepare_data_loader skip_first_batches deepspeed_ulysses_dl_adapter",
    ),
    "Accelerator.prepare": "taken: loaders and schedulers; leave the model and the optimizer out",
    "Accelerator.prepare_model": "taken: it changes nothing in one process; leave it out with several",
    "Accelerator.prepare_optimizer": "refused: the step has no 'grad' then; leave the optimizer out",
    "Accelerator.backward": "refused: the optimizer asks for step(grad=private_grad(batch))",
    "Accelerator.lomo_backward": "refused: by Accelerate, without an optimizer of LOMO",
    "Accelerator.clip_grad_norm_": "no effect by design: the plan's max_grad_norm clips each example",
    "Accelerator.clip_grad_value_": "refused: by torch, because parameters hold no .grad",
    "Accelerator.unscale_gradients": _NO_LOSS,
    **_are(_NO_EXCHANGE, "join_uneven_inputs maybe_context_parallel no_sync trigger_sync_in_backward"),
    **_are(
        "taken: not advised, because it stores states of random generators",
        "load_state register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save_state",
    ),
}


def names() -> set[str]:
    """Return the arguments and the public methods of Accelerator."""
    methods = [
        name
        for name, value in vars(Accelerator).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, staticmethod | classmethod))
    ]
    arguments = list(inspect.signature(Accelerator.__init__).parameters)[1:]
    return {f"Accelerator.{name}" for name in (*arguments, *methods)}
