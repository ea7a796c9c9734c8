"""Models whose layers are stacked, and the same with a list of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def stacked(shapes: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Small random numbers in arrays of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.array(random.normal(size=shape, scale=0.3 / np.sqrt(shape[-1])), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def unstacked(params: Tree) -> Tree:
    """The same parameters with a list of layers, in arrays of their own."""
    layers, rest = jax.tree.map(np.array, params["layers"]), jax.tree.map(jnp.copy, params["rest"])
    count = jax.tree.leaves(layers)[0].shape[0]
    return {"layers": [jax.tree.map(lambda a, i=i: jnp.array(a[i]), layers) for i in range(count)], "rest": rest}


# Residual layers between a batch and a linear head


def layer(own: Tree, x: Any) -> Any:
    """A residual layer."""
    return x + jnp.tanh(x @ own["w"] + own["b"]) @ own["v"]


def head(rest: Tree, x: Any, batch: Any) -> Any:
    """The mean squared error of a linear map."""
    return jnp.mean((x @ rest["out"] - batch[1]) ** 2)


def loss(params: Tree, batch: Any) -> Any:
    """The same network of a list of layers."""
    x = batch[0]
    for own in params["layers"]:
        x = layer(own, x)
    return head(params["rest"], x, batch)


def deep(layers: int = 3, width: int = 8, dtype: Any = np.float32) -> Tree:
    """Its parameters."""
    own = {"w": (layers, width, width), "v": (layers, width, width), "b": (layers, width)}
    return stacked({"layers": own, "rest": {"out": (width, width)}}, dtype=dtype)


def pairs(width: int = 8, rows: int = 4, dtype: Any = np.float32) -> tuple[Any, Any]:
    """A batch for it."""
    random = np.random.default_rng(5)
    x, y = (jnp.array(random.normal(size=(rows, width)), dtype) for _ in range(2))
    return x, y


# A transformer whose table of embeddings is its head, with dropout and norms


def embed(rest: Tree, batch: Any) -> Any:
    """Vectors of tokens and of their places."""
    return rest["table"][batch] + rest["places"]


def block(own: Tree, x: Any, key: Any) -> Any:
    """Attention of one head, and a hidden layer, with dropout where there is a key."""
    q, k, v = (norm(x) @ own[name] for name in ("q", "k", "v"))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(x.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    x = x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
    hidden = jax.nn.gelu(norm(x) @ own["up"])
    if key is not None:
        hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    return x + hidden @ own["down"]


def norm(x: Any) -> Any:
    """Each vector with a mean of 0 and a variance of 1."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def cross_entropy(rest: Tree, x: Any, batch: Any) -> tuple[Any, Any]:
    """How badly each token is foretold, and the accuracy; the table of embeddings is the last layer, too."""
    logits = norm(x[:, :-1]) @ rest["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1)
    return -picked.mean(), (logits.argmax(-1) == batch[:, 1:]).mean()


def transformer_loss(params: Tree, batch: Any, key: Any) -> tuple[Any, Any]:
    """The same transformer of a list of layers, with the keys of `eager_scan`."""
    x = embed(params["rest"], batch)
    for index, own in enumerate(params["layers"]):
        x = block(own, x, None if key is None else jax.random.fold_in(key, index))
    return cross_entropy(params["rest"], x, batch)


def transformer(layers: int = 3, width: int = 8, words: int = 11, length: int = 6) -> Tree:
    """Its parameters."""
    square = (layers, width, width)
    own = {"q": square, "k": square, "v": square, "up": (layers, width, 2 * width), "down": (layers, 2 * width, width)}
    return stacked({"layers": own, "rest": {"table": (words, width), "places": (length, width)}})


def tokens(words: int = 11, length: int = 6) -> Any:
    """A batch for it."""
    return jnp.array(np.random.default_rng(9).integers(words, size=(4, length)), jnp.int32)
