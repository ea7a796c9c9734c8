"""Layers of a network for many runs at once: the first two axes of every array are rates and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def dense(values: Array, weight: Array, bias: Array) -> Array:
    """Rows times weights `(inputs, outputs)`, plus a bias."""
    return np.asarray(values @ weight + bias[..., None, :])


def dense_gradients(values: Array, error: Array) -> tuple[Array, Array]:
    """The gradients of a dense layer's weight and bias, from its rows and the gradient of its results."""
    return np.swapaxes(values, -1, -2) @ error, error.sum(axis=-2)


def back(error: Array, weight: Array) -> Array:
    """The gradient of a dense layer's rows."""
    return np.asarray(error @ np.swapaxes(weight, -1, -2))


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The mean cross entropy of each run in nats, float64, and its gradient by the logits.

    `logits` have shape (rates, seeds, rows, classes), `labels` (seeds, rows).
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=-1, keepdims=True)
    index = labels[None, ..., None]
    losses = np.log(total) - np.take_along_axis(shifted, index, -1)
    error = powers / total
    classes = np.arange(logits.shape[-1])
    error -= index == classes
    error /= labels.shape[-1]
    return np.asarray(losses.mean(axis=(-1, -2), dtype=np.float64)), error


def accuracy(logits: Array, labels: Array) -> Array:
    """The part of the rows with the label's logit as their largest, of each run."""
    return np.asarray((logits.argmax(axis=-1) == labels).mean(axis=-1))


def weights(rng: np.random.Generator, inputs: int, outputs: int, gain: float) -> Array:
    """Normal float32 weights `(inputs, outputs)` with a variance of `gain / inputs`."""
    values = rng.normal(size=(inputs, outputs)) * np.sqrt(gain / inputs)
    return np.asarray(values, np.float32)
