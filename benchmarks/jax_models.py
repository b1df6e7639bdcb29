"""Some workloads once more, as functions of torch's parameters by name and one example, for libraries on JAX."""

from collections.abc import Callable
from typing import Any

Parameters = Any
Array = Any


def softmax(p: Parameters, x: Array, y: Array) -> Array:
    return _cross_entropy(p["weight"] @ x + p["bias"], y)


def autoencoder(p: Parameters, x: Array, y: Array) -> Array:
    import jax

    for index in range(0, len(p), 2):
        x = jax.nn.sigmoid(p[f"{index}.weight"] @ x + p[f"{index}.bias"])
    return ((x - y) ** 2).mean()


def encoder(p: Parameters, ids: Array, y: Array, layers: int = 4, heads: int = 4) -> Array:
    import jax

    def linear(path: str, x: Array) -> Array:
        return x @ p[f"{path}.weight"].T + p[f"{path}.bias"]

    def norm(path: str, x: Array) -> Array:
        return jax.nn.standardize(x, epsilon=1e-5) * p[f"{path}.weight"] + p[f"{path}.bias"]

    def attention(path: str, x: Array) -> Array:
        query, key, value = (
            linear(f"{path}.{name}", x).reshape(len(x), heads, -1) for name in ("query", "key", "value")
        )
        return linear(f"{path}.out", jax.nn.dot_product_attention(query, key, value).reshape(x.shape))

    x = p["tokens.weight"][ids] + p["positions.weight"]
    for layer in (f"layers.{index}" for index in range(layers)):
        x = x + attention(f"{layer}.attention", norm(f"{layer}.norm1", x))
        x = x + linear(f"{layer}.down", jax.nn.relu(linear(f"{layer}.up", norm(f"{layer}.norm2", x))))
    return _cross_entropy(linear("head", norm("norm", x).mean(0)), y)


def _cross_entropy(logits: Array, y: Array) -> Array:
    import jax

    return jax.nn.logsumexp(logits) - logits[y]


LOSSES: dict[str, Callable[[Parameters, Array, Array], Array]] = {
    "W1": softmax,
    "W2": autoencoder,
    "W5": encoder,
    "W7": softmax,
}
