"""Other libraries on the same step: clip each example to C, noise sigma C, divide by B, Adam.

Each adapter imports its library when it is built, and skips what that library cannot do.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks import jax_models
from benchmarks.methods import MAX_GRAD_NORM, NOISE_MULTIPLIER, Setup, SkipError, Step


def opacus(setup: Setup, *, ghost: bool) -> Step:
    """Opacus: hooks that keep per-sample gradients, or ghost clipping with its two backward passes."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from opacus.validators import ModuleValidator

    model = setup.model()
    if ModuleValidator.validate(model):
        model: nn.Module = ModuleValidator.fix(model)  # its own LSTM in place of torch's
    batch = setup.batch
    adam = torch.optim.Adam(model.parameters())
    numbers: dict[str, Any] = {
        "noise_multiplier": NOISE_MULTIPLIER,
        "max_grad_norm": MAX_GRAD_NORM,
        "expected_batch_size": setup.batch_size,
    }
    if ghost:
        fast = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM)  # pyright: ignore[reportArgumentType]
        fast_optimizer = DPOptimizerFastGradientClipping(adam, **numbers)

        def ghost_step() -> None:
            losses = setup.losses(fast, batch)
            DPTensorFastGradientClipping(fast, fast_optimizer, losses).backward()
            fast_optimizer.step()
            fast_optimizer.zero_grad()

        return ghost_step

    setup.require_room(model)
    module, optimizer = GradSampleModule(model), DPOptimizer(adam, **numbers)

    def step() -> None:
        setup.losses(module, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opake(setup: Setup) -> Step:
    """Opake: vmap, with its own Adam."""
    import torchopt
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.functional import make_functional
    from opake.optimizers import adam
    from opake.random import random_key

    model, (x, y) = setup.model(), setup.batch
    setup.require_room(model)
    functional, parameters, _ = make_functional(model, disable_autograd_tracking=True, partition_trainable=True)

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return setup.losses(partial(functional, parameters), (x.unsqueeze(0), y.unsqueeze(0)))[0]

    gradient, clip_state = clipped_grad(
        loss, batch_argnums=(1, 2), clipping_norm=MAX_GRAD_NORM, normalize_by=setup.batch_size
    )
    noise, noise_state = gaussian_noise(noise_multiplier=NOISE_MULTIPLIER, key=random_key())
    optimizer = adam(1e-3, noise_bias_correction=True)
    state = (parameters, clip_state, noise_state, optimizer.init(parameters))

    def step() -> None:
        nonlocal state
        parameters, clip_state, noise_state, optimizer_state = state
        clipped, clip_state = gradient(parameters, x, y, state=clip_state)
        noisy, noise_state = noise(clipped, noise_state)
        updates, optimizer_state = optimizer.update(noisy, optimizer_state, params=parameters)
        state = (torchopt.apply_updates(parameters, updates), clip_state, noise_state, optimizer_state)

    return step


def fastdp(setup: Setup) -> Step:
    """FastDP: book-keeping, one backward pass."""
    with contextlib.redirect_stdout(io.StringIO()):
        from fastDP import PrivacyEngine
        from fastDP.supported_layers_grad_samplers import _supported_layers_norm_sample_AND_clipping as supported

    model, batch = setup.model(), setup.batch
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise SkipError(
                f"FastDP computes the gradient of the parametrized weight of '{path}', not of the parameter"
            )
        if any(True for _ in module.parameters(recurse=False)) and type(module) not in supported:
            raise SkipError(f"FastDP has no rule for {type(module).__name__} and would leave it untrained")
    optimizer = torch.optim.Adam(model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        engine = PrivacyEngine(
            model,
            batch_size=setup.batch_size,
            sample_size=setup.batch_size,
            num_steps=1000,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=MAX_GRAD_NORM,
            clipping_fn="Abadi",
        )
    engine.attach(optimizer)

    def step() -> None:
        setup.losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def jax_privacy(setup: Setup) -> Step:
    """JAX-Privacy: vmap under jit, with optax's Adam, on the model as jax_models has it."""
    if setup.device != "cpu" or setup.dtype != "float32":
        raise SkipError("measured on CPU in float32 only")
    if setup.name.partition("-")[0] not in jax_models.LOSSES:
        raise SkipError("the model is not written in JAX here")
    import jax
    import jax.numpy as jnp
    import optax
    from jax_privacy import clipping, noise_addition

    model = setup.model()
    setup.require_room(model)
    loss = jax_models.LOSSES[setup.name.partition("-")[0]]
    parameters = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    x, y = (jnp.asarray(leaf.numpy()) for leaf in setup.batch)
    few = tuple(leaf[:4] for leaf in setup.batch)
    _require_equal(setup.losses(model, few), jax.vmap(loss, (None, 0, 0))(parameters, x[:4], y[:4]))
    gradient = clipping.clipped_grad(
        loss, l2_clip_norm=MAX_GRAD_NORM, normalize_by=setup.batch_size, batch_argnums=(1, 2), keep_batch_dim=False
    )
    optimizer = optax.chain(
        noise_addition.gaussian_privatizer(
            stddev=NOISE_MULTIPLIER * MAX_GRAD_NORM / setup.batch_size, prng_key=jax.random.key(0)
        ),
        optax.adam(1e-3),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(gradient(parameters, x, y), state)
        return optax.apply_updates(parameters, updates), state

    state = (parameters, optimizer.init(parameters))

    def step() -> None:
        nonlocal state
        state = jax.block_until_ready(update(*state, x, y))

    return step


def _require_equal(ours: Tensor, theirs: Any) -> None:
    """The model written again must be the same model."""
    if not torch.allclose(ours.detach(), torch.tensor(theirs), rtol=1e-4, atol=1e-5):
        raise RuntimeError("jax_models differs from workloads")


# By method: the package to import, the packages whose versions are recorded, and the adapter.
_ADAPTERS: dict[str, tuple[str, tuple[str, ...], Callable[[Setup], Step]]] = {
    "opacus-hooks": ("opacus", ("opacus",), partial(opacus, ghost=False)),
    "opacus-ghost": ("opacus", ("opacus",), partial(opacus, ghost=True)),
    "opake": ("opake", ("opake",), opake),
    "fastdp": ("fastDP", ("fastDP",), fastdp),
    "jax-privacy": ("jax_privacy", ("jax-privacy", "jax"), jax_privacy),
}
PEERS = {name: build for name, (_, _, build) in _ADAPTERS.items()}


def installed() -> list[str]:
    """The peers whose library can be imported here."""
    return [name for name, (library, _, _) in _ADAPTERS.items() if importlib.util.find_spec(library)]


def versions(method: str) -> dict[str, str]:
    """The versions of the packages behind a method; a clone on PYTHONPATH has none."""
    found: dict[str, str] = {}
    for name in _ADAPTERS[method][1] if method in _ADAPTERS else ("privgrad",):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
