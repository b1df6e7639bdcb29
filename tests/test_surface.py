"""The public names and the command line's options, frozen: a change here is a change for users."""

import inspect
import re
from pathlib import Path

import typer

import privgrad as pg
from privgrad import gradient
from privgrad.cli import app
from privgrad.gradient import layers

NAMES = {
    "privgrad": "Batch BudgetExceededError FitResult Ledger NoisyGradient PrivacyError PrivacyPlan PrivateGradient "
    "PublicGradient SamplingError Scales UnsupportedModuleError audit clip federated fit optim perturb precondition "
    "side_information",
    "optim": "SGD Adagrad AdagradBC Adam AdamBC AdamPub AdamW AdamWBC MirrorDescent MomentumSGD NAdam NAdamBC "
    "PrivateOptimizer RMSprop RMSpropBC RMSpropPub Yogi debias default_floor",
}
SIGNATURES = {
    pg.PrivacyPlan: "sample_rate steps expected_batch_size noise_multiplier max_grad_norm num_examples delta "
    "target_epsilon sampling seed group_size noise_on_grid privacy_unit",
    pg.PrivacyPlan.for_budget: "target_epsilon delta max_grad_norm num_examples expected_batch_size steps "
    "sampling seed group_size noise_on_grid privacy_unit",
    pg.PrivacyPlan.for_users: "num_users expected_cohort_size rounds max_update_norm delta target_epsilon "
    "noise_multiplier sampling seed noise_on_grid",
    pg.PrivacyPlan.batches: "self dataset start collate processes",
    pg.PrivacyPlan.epsilon: "self delta steps accountant",
    pg.PrivateGradient: "model loss_fn plan perturb precondition clip engine microbatch_size memory_mb ledger "
    "processes",
    pg.NoisyGradient: "tensors noise_std",
    pg.NoisyGradient.assign: "self model",
    pg.Ledger: "path read_only",
    pg.Ledger.epsilon: "self delta accountant assume_poisson",
    pg.optim.AdamBC: "params lr betas debias_floor floor_rule",
    pg.optim.AdamWBC: "params lr betas weight_decay debias_floor floor_rule",
    pg.optim.NAdamBC: "params lr betas momentum_decay debias_floor floor_rule",
    pg.optim.RMSpropBC: "params lr alpha debias_floor",
    pg.optim.AdagradBC: "params lr debias_floor",
    pg.optim.MomentumSGD: "params lr momentum",
    pg.optim.Yogi: "params lr betas eps",
    pg.optim.RMSpropPub: "params lr public alpha eps",
    pg.optim.AdamPub: "params lr public betas eps numerator keep bias_correction",
    pg.optim.MirrorDescent: "params lr public horizon",
    pg.optim.PrivateOptimizer.step: "self closure grad",
    pg.optim.debias: "exp_avg_sq_hat noise_std floor rule moment_sq",
    pg.perturb.BAM: "radius mode",
    pg.perturb.SAT: "radius",
    pg.perturb.RawSAM: "radius",
    pg.federated.LocalTraining: "lr batch_size epochs",
    pg.federated.Reported: "",
    pg.federated.local_update: "model loss_fn user local max_update_norm precondition step",
    pg.precondition.fixed: "scales source",
    pg.precondition.public_rmsprop: "gradient alpha eps eps_inside schedule",
    pg.precondition.public_adam: "gradient betas keep eps eps_inside schedule",
    pg.precondition.public_adagrad: "gradient eps eps_inside schedule",
    pg.precondition.raw_ideal_rmsprop: "alpha eps eps_inside",
    pg.PublicGradient: "model loss_fn examples source batch_size seed processes",
    pg.clip.Flat: "",
    pg.clip.PerLayer: "shares",
    pg.clip.Automatic: "gamma",
    pg.audit.Game: "name release data directions claim delta steps",
    pg.audit.distinguish: "game trials confidence tick",
    pg.audit.one_run: "game guessed confidence",
    pg.audit.directions: "noiseless data canaries",
    pg.audit.one_step: "private_grad",
    pg.audit.method_game: "name mechanism epsilon delta canaries",
    pg.audit.rows: "methods epsilons delta trials confidence",
    pg.fit: "private_grad optimizer train_set scheduler collate ema_decay evaluate num_evaluations on_evaluate "
    "output_dir save_seconds progress",
}
OPTIONS = {
    "train": "spec --out --seed --restart --json",
    "compare": "spec --out --restart --json",
    "reproduce": "item --out --data --smoke --so-far --restart --json",
    "epsilon": "ledger --delta --noise-multiplier --sample-rate --steps --json",
    "calibrate": "--target-epsilon --delta --sample-rate --steps --noise-multiplier --json",
    "audit": "spec --epsilon --method --trials --confidence --out --json",
    "doctor": "factory --json",
}


def test_public_names():
    assert sorted(pg.__all__) == sorted(NAMES["privgrad"].split())
    assert sorted(pg.optim.__all__) == sorted(NAMES["optim"].split())
    for module in (pg, pg.optim):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_signatures():
    found = {thing: " ".join(inspect.signature(thing).parameters) for thing in SIGNATURES}
    assert found == SIGNATURES


def test_command_line_options():
    command = typer.main.get_command(app)
    found = {
        name: " ".join(option.opts[0] for option in sub.params if option.name != "help")
        for name, sub in command.commands.items()  # pyright: ignore[reportAttributeAccessIssue]
    }
    assert {name: sorted(line.split()) for name, line in found.items()} == {
        name: sorted(line.split()) for name, line in OPTIONS.items()
    }


def test_the_extension_points_are_frozen():
    names = {"Convolution", "Dense", "Factor", "Outer", "Rows", "Rule", "register_rule"}
    assert set(gradient.__all__) == names


def test_every_file_with_a_rule_is_imported_with_the_package():
    """A rule that is not registered is missed by nobody: its layer is taken by vmap, and slow."""
    folder = Path(layers.__file__).parent
    with_rules = {path.stem for path in folder.glob("*.py") if re.search(r"^@register_rule", path.read_text(), re.M)}
    assert with_rules == set(layers.__all__)
