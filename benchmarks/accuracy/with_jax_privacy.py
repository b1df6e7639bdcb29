"""JAX-Privacy on a task: `.peers/jax-privacy/bin/python -m benchmarks.accuracy.with_jax_privacy FOLDER VARIANT SEED`.

"example" takes model and settings from the examples of JAX-Privacy 2.0.0:
- images: examples/keras_api_example.py. Its network, Adam of Keras, batches of 128, 5 epochs, C = 1.
- tables: examples/dp_logistic_regression.py. Zero weights, SGD 0.2, batches of 1,000, 500 steps, C = 1, noise with four
  bands.
- texts: it has no example of a classifier that starts without a pretrained network. The settings of the table, on
  frequencies of public words.
"features" has the settings of the table, on the features of our recipe. "recipe" is our head and our settings on our
features, without bands: what is left is the library.
"""

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection
from jax_privacy.experimental import execution_plan

from benchmarks.accuracy.task import Array, Result, Task, main

PACKAGES = ("jax-privacy", "jax", "dp-accounting", "optax")
EXAMPLE: dict[str, Any] = {"lr": 0.2, "batch_size": 1000, "steps": 500, "clip": 1.0, "bands": 4}
IMAGES: dict[str, Any] = {"optimizer": "Adam", "batch_size": 128, "epochs": 5, "clip": 1.0}
DEVICE = jax.devices()[0]  # a GPU, if JAX finds one
PHYSICAL = 128  # examples whose gradients are held at once; it changes no result
PADDING = 32


def linear(task: Task, variant: str, seed: int) -> Result:
    """A linear model from zero, as dp_logistic_regression.py trains it."""
    get = task.plain if variant == "example" else task.features
    rows, targets = get("train"), task.targets("train")
    own = variant != "recipe"
    numbers = EXAMPLE if own else task.recipe | {"bands": 1}
    batch, steps, bands, clip = (
        min(numbers["batch_size"], len(rows)),
        numbers["steps"],
        numbers["bands"],
        numbers["clip"],
    )
    config: Any = execution_plan.BandMFExecutionPlanConfig.default(
        iterations=steps,
        num_bands=bands,
        l2_clip_norm=clip,
        normalize_by=batch,
        epsilon=task.epsilon,
        delta=task.delta,
        sampling_prob=min(1.0, batch / len(rows) * bands),
        noise_seed=seed,
    )
    plan, event = config.plan, config.plan.dp_event
    sigma = noise_multiplier(event)
    # Gradients are divided by C (rescale_to_unit_norm), so that the noise is that of C = 1.
    lr = numbers["lr"] if own else task.learning_rate(sigma, batch, 1.0)
    rate: Any = lr if own else lambda step: lr * decay(task, step)
    optimizer = optax.sgd(rate, momentum=None if own else task.recipe["momentum"])
    many = min(PHYSICAL, batch)
    gradient = plan.clipped_grad(loss, batch_argnums=(1, 2), microbatch_size=many)

    @jax.jit
    def update(params: Any, x: Any, y: Any, is_padding: Any, noise: Any, state: Any) -> Any:
        total = gradient(params, x, y, is_padding_example=is_padding)
        noisy, noise = plan.noise_addition_transform.update(total, noise)
        updates, state = optimizer.update(noisy, state)
        return optax.apply_updates(params, updates), noise, state

    params: Any = {"weights": jnp.zeros((rows.shape[1], task.outputs))} | (
        {"bias": jnp.zeros(task.outputs)} if own else {}
    )
    noise, state = plan.noise_addition_transform.init(params), optimizer.init(params)
    chosen: Any = plan.batch_selection_strategy.batch_iterator(len(rows), rng=np.random.default_rng(seed))
    for indices in chosen:
        padded = batch_selection.pad_to_multiple_of(np.asarray(indices), max(PADDING, many))
        x, y = jnp.asarray(rows[padded]), jnp.asarray(targets[padded])
        params, noise, state = update(params, x, y, padded == -1, noise, state)
    found = {name: np.asarray(value) for name, value in params.items()}
    outputs = task_rows(get, found)
    accountant = config.accountant.__class__(config.accountant.neighboring_relation)
    settings = {"optimizer": "SGD", "lr": lr, "expected_batch_size": batch, "steps": steps, "clip": clip}
    return {
        "outputs": outputs,
        "epsilon": float(accountant.compose(event).get_epsilon(task.delta)),
        "delta": task.delta,
        "accountant": "PLD, replace one example by none",
        "settings": settings | {"bands": bands, "sigma": sigma},
    }


def loss(params: Any, x: Any, y: Any) -> Any:
    logits = jnp.dot(x, params["weights"]) + params.get("bias", 0.0)
    return jnp.mean(optax.softmax_cross_entropy(logits, y))


def task_rows(get: Any, params: dict[str, Array]) -> Array:
    """Outputs on the test part."""
    return get("test") @ params["weights"] + params.get("bias", 0.0)


def decay(task: Task, step: Any) -> Any:
    if task.recipe["schedule"] == "constant":
        return 1.0
    return (1 + jnp.cos(jnp.pi * step / task.recipe["steps"])) / 2


def noise_multiplier(event: Any) -> float:
    """The noise multiplier within an event of dp_accounting."""
    while not hasattr(event, "noise_multiplier"):
        event = event.event if hasattr(event, "event") else event.events[0]
    return float(event.noise_multiplier)


def images(task: Task, seed: int) -> Result:
    """The network of keras_api_example.py, with its settings."""
    import keras
    from jax_privacy import keras_api
    from keras import layers

    keras.utils.set_random_seed(seed)
    batch = min(IMAGES["batch_size"], len(task.labels("train")))
    size = len(task.labels("train")) // batch * batch  # as in the example
    pixels = {part: task.part("pixels", part).astype("float32")[..., None] / 255 for part in ("train", "test")}
    steps = IMAGES["epochs"] * (size // batch)
    model: Any = keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(task.outputs, activation="softmax"),
        ]
    )
    params = keras_api.DPKerasConfig(
        epsilon=task.epsilon,
        delta=task.delta,
        clipping_norm=IMAGES["clip"],
        batch_size=batch,
        train_steps=steps,
        train_size=size,
        poisson_sampling_in_fit=True,
        seed=seed,
        gradient_accumulation_steps=1,
    )
    model = keras_api.make_private(model, params)
    model.compile(loss="categorical_crossentropy", optimizer="adam")
    model.fit(x=pixels["train"][:size], y=task.targets("train")[:size], epochs=IMAGES["epochs"], verbose=0)
    sigma = float(model.get_noise_multiplier())
    from jax_privacy.accounting import analysis

    numbers = analysis.DpParams(noise_multipliers=sigma, batch_size=batch, num_samples=size, delta=task.delta)
    return {
        "outputs": np.asarray(model.predict(pixels["test"], verbose=0)),
        "epsilon": float(params._accountant.compute_epsilon(steps, numbers)),
        "delta": task.delta,
        "accountant": "PLD, add or remove one example",
        "settings": IMAGES | {"expected_batch_size": batch, "steps": steps, "sigma": sigma},
    }


def trained(task: Task, variant: str, seed: int) -> Result:
    """Train once, and return the outputs on the test part with the facts of the training."""
    is_network = variant == "example" and task.facts["kind"] == "images"
    result = images(task, seed) if is_network else linear(task, variant, seed)
    return result | {"gpu": DEVICE.device_kind if DEVICE.platform == "gpu" else None}


if __name__ == "__main__":
    main(trained, PACKAGES)
