"""What becomes, with connect and plan_of, of Opacus' arguments, methods, optimizers and schedulers."""

import inspect

from opacus import PrivacyEngine, optimizers, schedulers

_NOISE = "refused: take a flat or per-layer optimizer, whose noise is known"
_ONCE = "taken: connect follows it; plan_of reads the numbers once"
_ARGUMENTS = {
    "accountant": "taken",
    "secure_mode": "taken",
    "module": "taken",
    "optimizer": "taken: of privgrad.optim, for connect",
    "criterion": "taken",
    "data_loader": "taken: plan_of needs Poisson sampling",
    "noise_multiplier": "taken",
    "target_epsilon": "taken",
    "target_delta": "taken",
    "epochs": "taken",
    "max_grad_norm": "taken",
    "batch_first": "taken",
    "loss_reduction": "taken: plan_of needs 'mean'",
    "poisson_sampling": "taken: plan_of needs True",
    "clipping": "taken: 'flat' and 'per_layer'; others are refused",
    "noise_generator": "taken",
    "grad_sample_mode": "taken",
    "wrap_model": "taken",
    "rand_on_empty": "taken",
    "kwargs": "taken",
}

FATES: dict[str, str] = {
    **{f"PrivacyEngine.{name}": _ARGUMENTS[name] for name in ("accountant", "secure_mode")},
    **{
        f"make_private.{name}": _ARGUMENTS[name]
        for name in _ARGUMENTS.keys() - {"accountant", "secure_mode", "target_epsilon", "target_delta", "epochs"}
    },
    **{
        f"make_private_with_epsilon.{name}": _ARGUMENTS[name]
        for name in _ARGUMENTS.keys() - {"accountant", "secure_mode", "noise_multiplier", "rand_on_empty"}
    },
    **dict.fromkeys(("PrivacyEngine.make_private", "PrivacyEngine.make_private_with_epsilon"), "taken"),
    **dict.fromkeys(("PrivacyEngine.get_compatible_module", "PrivacyEngine.is_compatible"), "taken"),
    **dict.fromkeys(("PrivacyEngine.validate", "PrivacyEngine.get_epsilon"), "taken"),
    "PrivacyEngine.save_checkpoint": "taken",
    "PrivacyEngine.load_checkpoint": "taken: its history counts from the next step or plan_of",
    "optimizers.DPOptimizer": "taken",
    "optimizers.DPPerLayerOptimizer": "taken",
    "optimizers.DPOptimizerFastGradientClipping": "taken",
    "optimizers.DistributedDPOptimizer": "taken",
    "optimizers.DistributedDPOptimizerFastGradientlipping": "taken",
    "optimizers.AdaClipDPOptimizer": _NOISE,
    "optimizers.FSDPOptimizerFastGradientClipping": _NOISE,
    "optimizers.SimpleDistributedPerLayerOptimizer": _NOISE,
    "schedulers.ExponentialGradClip": _ONCE,
    "schedulers.ExponentialNoise": _ONCE,
    "schedulers.LambdaGradClip": _ONCE,
    "schedulers.LambdaNoise": _ONCE,
    "schedulers.StepGradClip": _ONCE,
    "schedulers.StepNoise": _ONCE,
}


def names() -> set[str]:
    """The installed Opacus'."""
    found = {f"PrivacyEngine.{name}" for name in inspect.signature(PrivacyEngine).parameters}
    found |= {f"PrivacyEngine.{name}" for name in dir(PrivacyEngine) if name[0] != "_"}
    for method in (PrivacyEngine.make_private, PrivacyEngine.make_private_with_epsilon):
        found |= {f"{method.__name__}.{name}" for name in inspect.signature(method).parameters if name != "self"}
    found |= {f"optimizers.{name}" for name in optimizers.__all__}
    return found | {f"schedulers.{name}" for name in dir(schedulers) if name[0].isupper()}
