"""The task `digits`: a perceptron on scikit-learn's handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.tools.demo import digits
from rulec.tools.race.task import Stack
from rulec.tools.race.tasks.frameworks import accuracy, back, cross_entropy, dense, dense_gradients, weights

Array = np.ndarray[Any, Any]

WIDTHS = (64, 64, 64, 10)
BATCH = 64


class HandwrittenDigits:
    """Rectified layers of 64 units; batches of 64 images; the test loss and accuracy of 449 images."""

    name, steps = "digits", 300

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        self._data, self._widths = digits.load("the task digits", "race"), widths
        self._layers = [f"layer{i}" for i in range(1, len(widths))]
        self.tags = {f"{self._layers[-1]}/weight": frozenset({"head"})}
        self._order = functools.lru_cache(maxsize=64)(self._permutation)

    def initial(self, seed: int) -> dict[str, Array]:
        """Weights of variance `2 / inputs`, and biases of zero."""
        rng, params = np.random.default_rng(seed), dict[str, Array]()
        for layer, (inputs, outputs) in zip(self._layers, pairwise(self._widths), strict=True):
            params[f"{layer}/weight"] = weights(rng, inputs, outputs, 2)
            params[f"{layer}/bias"] = np.zeros(outputs, np.float32)
        return params

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The mean cross entropy of a batch in nats, and its gradients."""
        rows = np.stack([self._rows(seed, step) for seed in seeds])
        values = self._forward(params, self._data.images[rows])
        losses, error = cross_entropy(values[-1], self._data.labels[rows])
        grads: Stack = {}
        for layer, below in zip(reversed(self._layers), reversed(values[:-1]), strict=True):
            grads[f"{layer}/weight"], grads[f"{layer}/bias"] = dense_gradients(below, error)
            if layer != self._layers[0]:
                error = back(error, params[f"{layer}/weight"]) * (below > 0)
        return losses, grads

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The mean cross entropy and the accuracy of the test images."""
        labels = self._data.test_labels[None]
        logits = self._forward(params, self._data.test_images)[-1]
        return {"test loss": cross_entropy(logits, labels)[0], "test accuracy": accuracy(logits, labels)}

    def _forward(self, params: Stack, images: Array) -> list[Array]:
        """The rows of every layer, and last the logits."""
        values = [images]
        for layer in self._layers:
            value = dense(values[-1], params[f"{layer}/weight"], params[f"{layer}/bias"])
            values.append(value if layer == self._layers[-1] else np.maximum(value, 0))
        return values

    def _rows(self, seed: int, step: int) -> Array:
        """The images of a batch: each epoch has an order of its own."""
        epoch, place = divmod(step, len(self._data.images) // BATCH)
        return self._order(seed, epoch)[place * BATCH : (place + 1) * BATCH]

    def _permutation(self, seed: int, epoch: int) -> Array:
        return np.random.default_rng((seed, epoch)).permutation(len(self._data.images))
