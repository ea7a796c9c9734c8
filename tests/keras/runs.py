"""Runs of Keras' optimizers and ours on the same variables and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

Arrays = list[Any]

#: Two kernels of dense layers, and a bias.
SHAPES = ((6, 8), (8,), (8, 3))
AXES = {"kernel": ("inputs", "outputs"), "last": ("inputs", "outputs")}
NAMES = ("kernel", "bias", "last")


def gradients(steps: int, shapes: Sequence[tuple[int, ...]] = SHAPES, scale: float = 1.0) -> list[Arrays]:
    rng = np.random.default_rng(3)
    return [[(scale * (rng.normal(size=s) + 0.3)).astype(np.float32) for s in shapes] for _ in range(steps)]


def start(shapes: Sequence[tuple[int, ...]] = SHAPES) -> Arrays:
    rng = np.random.default_rng(4)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def trained(optimizer: Any, steps: int = 20, scale: float = 1.0) -> Arrays:
    """The variables after some steps of an optimizer of Keras."""
    variables = [keras.Variable(x, name=name) for x, name in zip(start(), NAMES, strict=True)]
    for grads in gradients(steps, scale=scale):
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in grads], variables)
    return [keras.ops.convert_to_numpy(v) for v in variables]


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest difference in parts of the largest number of the same array."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def model(*more: Any) -> Any:
    """A small network of two dense layers, always the same."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6,)), dense(8, activation="tanh"), *more, dense(3)])


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(32, 6)).astype(np.float32)
    return inputs, inputs @ rng.normal(size=(6, 3)).astype(np.float32)


def fitted(network: Any, optimizer: Any, epochs: int = 2, **options: Any) -> Any:
    network.compile(optimizer, "mse")
    return network.fit(*data(), epochs=epochs, batch_size=8, verbose=0, shuffle=False, **options)


def weights(network: Any) -> Arrays:
    return [keras.ops.convert_to_numpy(v) for v in network.trainable_variables]
