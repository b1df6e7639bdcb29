"""What becomes, under PrivateStrategy, of the Trainer's arguments, of hooks and of Lightning's own callbacks."""

import inspect

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks

NO_HOOK = "taken: a method to call, not a hook"
_BATCH = "taken: it sees the private batch; log and keep nothing of it"
_MANUAL = "no effect by design: part of manual optimization, which is refused"
_NO_GRAD = "taken: parameters hold no .grad; the optimizer gets the released gradient"
_BACKWARD = "refused: no backward pass is run; use on_train_batch_end"
_ONE_DEVICE = "no effect by design: the strategy trains on one device"


def _are(place: str, fate: str, names: str) -> dict[str, str]:
    return {f"{place}.{name}": fate for name in names.split()}


_EVALUATION = """
on_predict_batch_end on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_start
on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start on_test_start
on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end on_validation_epoch_start
on_validation_start
"""
_TRAINING = """
on_fit_end on_fit_start on_load_checkpoint on_save_checkpoint on_train_end on_train_epoch_end on_train_epoch_start
on_train_start setup teardown on_before_zero_grad
"""
_BATCH_END = "taken: public numbers may be logged; the batch is closed by then"

FATES: dict[str, str] = {
    **_are(
        "Trainer",
        "taken",
        """
        accelerator benchmark barebones check_val_every_n_epoch default_root_dir detect_anomaly deterministic
        enable_autolog_hparams enable_checkpointing enable_model_summary enable_progress_bar inference_mode
        limit_predict_batches limit_test_batches limit_val_batches log_every_n_steps logger model_registry
        num_sanity_val_steps reload_dataloaders_every_n_epochs val_check_interval
        """,
    ),
    "Trainer.callbacks": "taken: those that the table refuses are named in the error",
    "Trainer.min_epochs": "taken: how long EarlyStopping must wait",
    "Trainer.min_steps": "taken: how long EarlyStopping must wait",
    "Trainer.plugins": "taken: a precision that changes batches or scales gradients is refused",
    "Trainer.precision": "taken: '32-true' and 'bf16-mixed'; others are refused",
    "Trainer.profiler": "taken: its times depend on private batches, so publish none",
    "Trainer.strategy": "taken: the PrivateStrategy itself",
    "Trainer.accumulate_grad_batches": "refused: set 1; private_options={'microbatch_size': 16} limits memory",
    "Trainer.devices": "refused: set 1; `fit` trains on several with Distributed()",
    "Trainer.fast_dev_run": "refused: try a plan with few steps, and limit_val_batches",
    "Trainer.gradient_clip_val": "refused: the plan's max_grad_norm clips each example",
    "Trainer.limit_train_batches": "refused: an epoch is 1 / sample_rate steps; plan fewer steps",
    "Trainer.max_epochs": "refused: where it ends before plan.steps; set -1",
    "Trainer.max_steps": "refused: unless it is plan.steps",
    "Trainer.max_time": "refused: a step's time depends on its private batch",
    "Trainer.num_nodes": "refused: set 1; `fit` trains on several with Distributed()",
    "Trainer.overfit_batches": "refused: set 0.0; train a part of the data",
    "Trainer.gradient_clip_algorithm": "no effect by design: gradient_clip_val is refused",
    "Trainer.sync_batchnorm": _ONE_DEVICE,
    "Trainer.use_distributed_sampler": _ONE_DEVICE,
    **_are("LightningModule", "taken", _EVALUATION + _TRAINING),
    **_are(
        "LightningModule",
        "taken",
        """
        configure_callbacks configure_model configure_sharded_model forward lr_scheduler_step on_predict_model_eval
        on_test_model_eval on_test_model_train on_validation_model_eval on_validation_model_train
        on_validation_model_zero_grad optimizer_step optimizer_zero_grad predict_dataloader prepare_data
        test_dataloader test_step val_dataloader validation_step
        """,
    ),
    "LightningModule.configure_optimizers": "taken: one optimizer of privgrad.optim over self.named_parameters()",
    "LightningModule.predict_step": "taken: outputs for training rows have no noise; keep them private",
    "LightningModule.train_dataloader": "taken: it returns strategy.batches(train_set)",
    "LightningModule.training_step": "taken: one loss per example; it logs and measures nothing",
    "LightningModule.on_before_batch_transfer": "taken: it gets a privgrad.Batch, with the data in batch.examples",
    "LightningModule.on_before_optimizer_step": _NO_GRAD,
    "LightningModule.on_train_batch_end": _BATCH_END,
    **_are("LightningModule", _BATCH, "on_after_batch_transfer on_train_batch_start transfer_batch_to_device"),
    **_are("LightningModule", _BACKWARD, "on_after_backward on_before_backward"),
    "LightningModule.backward": "refused: the private step computes it; change the loss instead",
    "LightningModule.configure_gradient_clipping": "refused: the plan's max_grad_norm clips each example",
    **_are("LightningModule", _MANUAL, "manual_backward toggle_optimizer toggled_optimizer untoggle_optimizer"),
    "LightningModule.clip_gradients": "no effect by design: parameters hold no .grad, and gradient_clip_val is refused",
    **_are(
        "LightningModule",
        NO_HOOK,
        """
        all_gather freeze log log_dict lr_schedulers optimizers print remove_ignored_hparams save_hyperparameters
        to_onnx to_tensorrt to_torchscript unfreeze
        """,
    ),
    **_are("Callback", "taken", _EVALUATION + _TRAINING),
    **_are("Callback", "taken", "load_state_dict on_exception on_sanity_check_end on_sanity_check_start state_dict"),
    "Callback.on_before_optimizer_step": _NO_GRAD,
    "Callback.on_train_batch_start": _BATCH,
    "Callback.on_train_batch_end": _BATCH_END,
    **_are("Callback", _BACKWARD, "on_after_backward on_before_backward"),
    **_are(
        "callbacks",
        "taken",
        """
        BasePredictionWriter Callback Checkpoint EMAWeightAveraging LambdaCallback LearningRateMonitor ModelSummary
        OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar StochasticWeightAveraging TQDMProgressBar
        WeightAveraging
        """,
    ),
    "callbacks.BackboneFinetuning": "taken: the optimizer holds the backbone from the start, as last group",
    "callbacks.BaseFinetuning": "taken: the optimizer holds all parameters from the start",
    "callbacks.EarlyStopping": "taken: with selection_data; unused steps are charged",
    "callbacks.ModelCheckpoint": "taken: a monitor other than step and epoch needs selection_data",
    "callbacks.BatchSizeFinder": "refused: the plan decides the batch size",
    "callbacks.DeviceStatsMonitor": "refused: memory depends on the sizes of private batches",
    "callbacks.GradientAccumulationScheduler": "refused: private_options={'microbatch_size': 16} limits memory",
    "callbacks.LearningRateFinder": "refused: its steps would be charged; give a noise_step",
    "callbacks.ModelPruning": "refused: it renames parameters; prune the trained model",
    "callbacks.SpikeDetection": "refused: the losses that it watches are private",
    "callbacks.ThroughputMonitor": "refused: it logs the sizes of private batches",
    "callbacks.Timer": "refused: a step's time depends on its private batch",
}


def names() -> set[str]:
    """Return the Trainer's arguments, public methods of modules and callbacks, and Lightning's own callbacks."""
    bases = [base for base in LightningModule.__mro__ if base.__module__.startswith("lightning.pytorch.core")]
    return {
        *(f"Trainer.{name}" for name in list(inspect.signature(Trainer.__init__).parameters)[1:]),
        *(f"LightningModule.{name}" for base in bases for name in _methods(base)),
        *(f"Callback.{name}" for name in _methods(Callback)),
        *(f"callbacks.{name}" for name in callbacks.__all__),
    }


def _methods(one: type) -> list[str]:
    return [name for name, value in vars(one).items() if inspect.isfunction(value) and not name.startswith("_")]
