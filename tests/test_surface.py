"""The public names and the command line's options, frozen: a change here is a change for users."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import privgrad as pg
from privgrad import data, gradient
from privgrad.cli import app
from privgrad.engine import layers
from privgrad.optim.base import widened
from privgrad.processes import Processes

NAMES = {
    "privgrad": "Batch Budget BudgetExceededError ClassRates EarlyStopping Explanation FitResult Head Ledger "
    "NoisyGradient PrivacyError "
    "PrivacyPlan  PrivateGradient PublicGradient SamplingError Scales Schedule Suggestion "
    "UnsupportedModuleError audit clip  compare explain federated filters fit fit_head fix freeze_unused noise optim "
    "perturb precondition release_histogram  release_mean release_second_moment release_sum "
    "side_information suggest save load ledgers_of",
    "optim": "OPTIMIZERS SGD Adagrad AdagradBC Adam AdamBC AdamPub AdamW AdamWBC MirrorDescent MomentumSGD NAdam "
    "MicroAdam Muon MuonBC NAdamBC PrivateOptimizer RMSprop RMSpropBC RMSpropPub Yogi debias noise_floor widened",
}
SIGNATURES = {
    pg.PrivacyPlan: "sample_rate steps expected_batch_size noise_multiplier max_grad_norm num_examples delta "
    "target_epsilon sampling max_batch_size participations seed group_size noise_on_grid privacy_unit correlation "
    "user simulates",
    pg.PrivacyPlan.for_budget: "delta max_grad_norm num_examples target_epsilon target_success false_positive_rate "
    "target_advantage expected_batch_size steps batch_size epochs sampling max_batch_size participations seed "
    "group_size noise_on_grid privacy_unit correlation",
    pg.PrivacyPlan.for_users: "num_users expected_cohort_size rounds max_update_norm delta target_epsilon "
    "noise_multiplier sampling seed noise_on_grid correlation user",
    pg.PrivacyPlan.batches: "self dataset start collate processes num_workers prefetch_factor pin_memory collate_fn "
    "epoch_key rows habits",
    pg.PrivacyPlan.sampler: "self dataset start collate processes epoch_key rows",
    pg.Batch.to: "self device non_blocking",
    pg.ClassRates: "dataset labels rates",
    pg.EarlyStopping: "monitor patience mode data min_delta",
    pg.PrivacyPlan.epsilon: "self delta steps accountant rows_per_person",
    pg.PrivacyPlan.attack_success: "self false_positive_rate",
    pg.PrivacyPlan.scaled: "self factor num_examples",
    pg.PrivateGradient: "model loss_fn plan perturb precondition clip engine microbatch_size memory_mb compile ledger "
    "norm_bins adaptive_clip filter processes side_information",
    pg.noise.Banded: "bands coefficients relative_error",
    pg.NoisyGradient: "tensors noise_std norm_distribution noise_gain noise_memory is_filtered side_information",
    pg.filters.LinearFilter: "b a",
    pg.filters.EMA: "weight",
    pg.filters.Innovation: "weight",
    pg.filters.DOPPLER: "b a",
    pg.NoisyGradient.assign: "self model",
    pg.precondition.Transform: "inverse_scales keep shift input_maps",
    gradient.register_rule: "layers replace",
    gradient.Dense: "grads_BP",
    gradient.Outer: "a_BTI b_BTO",
    gradient.Rows: "ids_BT r_BTD rows",
    gradient.Convolution: "x b geometry parts",
    widened: "parameter",
    data.DataSet: "name train validation test num_classes input_shape frequency_edges vocabulary public_counts public "
    "other_public score counts_provenance split by_person pixel_range public_inputs extractor image_shape classes "
    "schema",
    data.part_of: "unit test_share validation_share split_key",
    data.image_folder: "path classes size channels standardize unit max_rows test test_share validation_share "
    "split_key",
    data.read_image: "path size channels",
    data.table: "path columns label classes unit max_rows row_id test test_share test_every validation_share "
    "split_key table bounds counts interactions",
    pg.compare: "spec out data model progress",
    pg.Budget: "path total_epsilon delta num_examples privacy_unit",
    pg.Budget.commit: "self name releases by place",
    pg.Budget.open_ledger: "self path plan name by",
    pg.Budget.calibrate: "self sample_rate steps",
    pg.Budget.left: "self sample_rate steps",
    pg.release_sum: "rows bound noise_multiplier num_examples privacy_unit delta ledger budget name seed",
    pg.release_mean: "rows bound noise_multiplier num_examples privacy_unit delta ledger budget name seed",
    pg.release_second_moment: "rows bound noise_multiplier num_examples privacy_unit delta ledger budget name seed",
    pg.release_histogram: "rows num_bins noise_multiplier num_examples bound privacy_unit delta ledger budget name "
    "seed",
    pg.Head.load: "folder modules",
    pg.save: "model folder ledger delta post_processing about overwrite",
    pg.load: "model folder",
    pg.ledgers_of: "model",
    pg.fit_head: "features labels num_classes bounds counts classes schema weights extractor source plan "
    "target_epsilon delta num_examples privacy_unit budget steps expected_batch_size max_grad_norm noise_step schedule "
    "momentum hidden output_dir seed progress",
    pg.Ledger: "path read_only",
    pg.Ledger.epsilon: "self delta accountant",
    pg.optim.AdamBC: "params lr noise_step betas debias_floor gamma_prime floor_rule",
    pg.optim.AdamWBC: "params lr noise_step betas weight_decay debias_floor gamma_prime floor_rule",
    pg.optim.NAdamBC: "params lr noise_step betas momentum_decay debias_floor gamma_prime floor_rule",
    pg.optim.RMSpropBC: "params lr noise_step alpha debias_floor gamma_prime",
    pg.optim.AdagradBC: "params lr debias_floor gamma_prime",
    pg.optim.MomentumSGD: "params lr noise_step momentum",
    pg.optim.Yogi: "params lr betas eps",
    pg.optim.Muon: "params lr momentum iterations bfloat16",
    pg.optim.MuonBC: "params lr momentum iterations bfloat16 probes",
    pg.optim.MicroAdam: "params lr betas eps density window",
    pg.optim.RMSpropPub: "params lr public alpha eps",
    pg.optim.AdamPub: "params lr public betas eps numerator keep bias_correction",
    pg.optim.MirrorDescent: "params lr public horizon",
    pg.optim.PrivateOptimizer.step: "self closure grad",
    pg.optim.debias: "exp_avg_sq_hat noise_std floor rule moment_sq",
    pg.perturb.BAM: "radius mode",
    pg.perturb.SAT: "radius",
    pg.perturb.RawSAM: "radius",
    pg.perturb.DiSK: "weight",
    pg.federated.LocalUpdate: "lr batch_size epochs",
    pg.federated.ReportedUpdate: "",
    pg.federated.local_update: "model loss_fn user local max_update_norm precondition step",
    pg.precondition.fixed: "scales source",
    pg.precondition.public_rmsprop: "gradient alpha noise_eps eps schedule every",
    pg.precondition.public_adam: "gradient betas keep noise_eps eps schedule every",
    pg.precondition.public_adagrad: "gradient noise_eps eps schedule every",
    pg.side_information.frequencies: "counts parameter dim source provenance cap division power",
    pg.fix: "model",
    pg.explain: "model loss_fn public_batch engine",
    pg.freeze_unused: "model loss_fn public_batch",
    pg.suggest: "model plan public_batch loss_fn",
    pg.Suggestion.optimizer: "self model",
    pg.precondition.raw_ideal_rmsprop: "alpha noise_eps eps",
    pg.PublicGradient: "model loss_fn examples source batch_size seed processes",
    pg.clip.Flat: "",
    pg.clip.PerLayer: "shares",
    pg.clip.Automatic: "gamma",
    pg.clip.TargetFraction: "target rate steps",
    pg.clip.Quantile: "quantile rate count_std",
    pg.clip.SquaredError: "weight",
    pg.audit.Game: "name release data directions claim delta steps",
    pg.audit.distinguish: "game trials confidence tick",
    pg.audit.one_run: "game guessed confidence",
    pg.audit.canaries: "private_grad train train_set added guessed confidence ledger",
    pg.audit.directions: "noiseless data canaries",
    pg.audit.one_step: "private_grad",
    pg.audit.method_game: "name mechanism epsilon delta canaries",
    pg.audit.rows: "methods epsilons delta trials confidence",
    pg.Schedule: "decay warmup",
    pg.Schedule.of: "self optimizer steps",
    pg.fit: "private_grad optimizer train_set scheduler collate ema_decay evaluate num_evaluations on_evaluate "
    "stop output_dir save_seconds progress num_workers prefetch_factor pin_memory rows",
}
# What users subclass or implement, by the class's own members: the parameters of a method, the value of an attribute.
EXTENSION_POINTS: dict[type[Any], dict[str, str]] = {
    pg.clip.Clipping: {"factors": "self norms max_grad_norm"},
    pg.precondition.Preconditioner: {
        "is_public": "= True",
        "begun": "self model",
        "transform": "abstract self step epoch_steps noise_std parameters raw_mean",
        "state_dict": "self",
        "load_state_dict": "self state",
    },
    gradient.Rule: {
        "parameters": "= ('weight', 'bias')",
        "has_delta": "= False",
        "is_bilinear": "= False",
        "forward": "abstract self layer parameters x",
        "factor": "abstract self layer name parameters x grad",
        "delta": "self layer displacements x",
        "moved": "self layer parameters displacements x",
        "bilinear": "self layer x",
        "supports": "self layer",
    },
    gradient.Factor: {
        "__init__": "self examples shape",
        "usual_terms": "= 4.0",
        "__getitem__": "abstract self examples",
        "__add__": "self other",
        "__mul__": "self share",
        "dense": "abstract self",
        "weighted_sum": "abstract self weight_B",
        "sum_in_parts": "self weight_B",
        "exact_sum": "self weight_B",
        "sum_and_rounding": "self weight_B inverse_scales",
        "mask": "abstract self kept_B",
        "worth_keeping": "property",
        "term_bound": "self inverse_scales",
        "term_norms": "self inverse_scales",
        "positions": "property",
        "norms": "self inverse_scales",
        "written_out": "self",
        "merge": "self parts",
        "inner_products": "self direction",
        "gram": "self",
    },
    gradient.LinearMapFactor: {
        "apply": "self x_BTI",
        "read": "self ids_BT",
        "read_bags": "self ids_BJT weight_BJT",
        "of_patches": "self",
        "scaled": "self scales",
        "settled": "self",
        "transposed": "self",
    },
    pg.perturb.Contribution: {
        "is_public": "= True",
        "privacy_unit": "= 'example'",
        "applies_scales": "= False",
        "keeps_order": "= True",
        "canaries": "= 0",
        "max_rows": "= None",
        "rows_by": "= None",
        "described": "self steps",
        "begun": "self",
        "losses": "self loss_fn",
        "at": "self step parameters raw_mean",
        "microbatch_size": "self engine examples usual_size",
        "chunks": "self engine examples size step inverse_scales",
        "gradients": "self engine examples step inverse_scales",
        "released": "self gradient",
        "require_filter": "self chosen",
        "state_dict": "self",
        "load_state_dict": "self state",
    },
    Processes: {
        "rank": "= 0",
        "count": "= 1",
        "all_succeed": "self step weights",
        "reduce": "self values",
        "broadcast": "self gradient",
        "broadcast_object": "self value",
        "begin": "self model",
        "fingerprint": "self model",
        "opened": "self model",
        "is_sharded": "self model",
        "attempt": "self changed",
        "sums": "self like expected_size",
        "as_shards": "self values places",
        "shard_like": "self values like",
        "gather_state": "self state",
        "gather_objects": "self value",
        "save_shards": "self shards folder",
    },
    pg.optim.PrivateOptimizer: {
        "__init__": "self params args noise_step kwargs",
        "noise_step": "property",
        "settings": "property",
        "has_noise_step": "class",
        "_noise_step_per_lr": "self group noise_std",
        "_why_no_noise_step": "self group",
        "add_param_group": "self param_group",
        "step": "self closure grad",
        "load_state_dict": "self state_dict",
        "_update": "self gradient",
        "_require_options": "self group",
        "_active": "static group",
    },
}
FOR_SUBCLASSES = {"__init__", "__getitem__", "__add__", "__mul__", "_update", "_require_options", "_active"} | {
    "_noise_step_per_lr",
    "_why_no_noise_step",
}
OPTIONS = {
    "train": "spec --out --seed --restart --json",
    "compare": "spec --out --restart --dry-run --json",
    "reproduce": "item --list --out --data --smoke --so-far --method --dry-run --price-per-hour --device --jobs "
    "--restart --json",
    "epsilon": "ledger --delta --noise-multiplier --sample-rate --steps --sampling --participations --json",
    "calibrate": "--target-epsilon --delta --sample-rate --steps --noise-multiplier --batch-size --num-examples "
    "--epochs --sampling --participations --json",
    "statement": "ledger --delta --title --model --purpose --data --out --for --json",
    "budget": "path --json",
    "audit": "spec --epsilon --method --training --canaries --trials --confidence --out --json",
    "doctor": "factory --batch --engine --json --rewrite",
    "predict": "head file --json --keep --out --table",
    "data": "--json",
    "data fetch": "names --again",
}


def test_public_names():
    assert sorted(pg.__all__) == sorted(NAMES["privgrad"].split())
    assert sorted(pg.optim.__all__) == sorted(NAMES["optim"].split())
    for module in (pg, pg.optim):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_signatures():
    found = {thing: " ".join(inspect.signature(thing).parameters) for thing in SIGNATURES}
    assert found == SIGNATURES


def members(kind: type[Any]) -> dict[str, str]:
    """Describe the members that a subclass may call, implement or override."""
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    found: dict[str, str] = {}
    for name, member in vars(kind).items():
        if name.startswith("_") and (name not in FOR_SUBCLASSES or kind is pg.clip.Clipping):
            continue
        if isinstance(member, property):
            found[name] = "property"
        elif callable(member) or isinstance(member, classmethod):
            words = ["abstract"] if name in abstract else ["static"] if isinstance(member, staticmethod) else []
            words = ["class"] if isinstance(member, classmethod) else words
            found[name] = " ".join([*words, *inspect.signature(getattr(kind, name)).parameters])
        else:
            found[name] = f"= {member!r}"
    return found


@pytest.mark.parametrize("kind", EXTENSION_POINTS, ids=lambda kind: kind.__name__)
def test_members_of_extension_points(kind: type[Any]):
    assert members(kind) == EXTENSION_POINTS[kind]


def test_a_changed_extension_point_is_found():
    class Changed(pg.precondition.Preconditioner):
        def begun(self, model: nn.Module, more: int = 0) -> "Changed":
            return self

    assert members(Changed) == {"begun": "self model more"}


def test_every_loader_returns_a_data_set():
    assert {inspect.signature(loader).return_annotation for loader in data.LOADERS.values()} == {data.DataSet}


OPTIMIZERS = [
    getattr(pg.optim, name)
    for name in pg.optim.__all__
    if inspect.isclass(getattr(pg.optim, name)) and name != "PrivateOptimizer"
]
REQUIRED: dict[str, Any] = {"public": lambda step: {}, "horizon": 3}


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_second_argument_of_every_optimizer_is_the_learning_rate(kind: Any):
    parameters = inspect.signature(kind).parameters
    extra = {name: value for name, value in REQUIRED.items() if name in parameters}
    optimizer = kind([("p", nn.Parameter(torch.zeros(2)))], 0.125, **extra)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125]


def test_command_line_options():
    command = typer.main.get_command(app)
    commands: dict[str, Any] = dict(command.commands)  # pyright: ignore[reportAttributeAccessIssue]
    for name, group in list(commands.items()):
        commands |= {f"{name} {inner}": sub for inner, sub in getattr(group, "commands", {}).items()}
    found = {
        name: " ".join(option.opts[0] for option in sub.params if option.name != "help")
        for name, sub in commands.items()
    }
    assert {name: sorted(line.split()) for name, line in found.items()} == {
        name: sorted(line.split()) for name, line in OPTIONS.items()
    }


def test_the_extension_points_are_frozen():
    names = {"Convolution", "Dense", "Factor", "LinearMapFactor", "Outer", "Rows", "Rule", "register_rule"}
    assert set(gradient.__all__) == names


def test_every_file_with_a_rule_is_imported_with_the_package():
    """A rule that is not registered is missed by nobody: its layer is taken by vmap, and slow."""
    folder = Path(layers.__file__).parent
    with_rules = {
        path.stem for path in folder.glob("*.py") if re.search(r"^@register_(rule|forward)", path.read_text(), re.M)
    }
    assert with_rules == set(layers.__all__)


def test_the_import_loads_nothing_that_takes_long_and_may_not_be_needed():
    """With torch at hand, `import privgrad` takes a third of a second; scipy alone takes another half."""
    code = "import sys, torch; held = set(sys.modules); import privgrad; print(*sorted(set(sys.modules) - held))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "privgrad" in loaded
    slow = {"dp_accounting", "matplotlib", "pydantic", "scipy", "sklearn", "transformers", "typer"}
    assert loaded & slow == set()
