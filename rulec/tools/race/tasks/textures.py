"""The task `cifar-like`: a convolutional network on small colour images, which are computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rulec.tools.race.task import Stack
from rulec.tools.race.tasks.frameworks import accuracy, back, cross_entropy, dense, dense_gradients, weights

Array = np.ndarray[Any, Any]

#: Sides of an image and its colours, and the classes: five directions of stripes, each wide and narrow.
SIDE, COLOURS, DIRECTIONS = 16, 3, 5
CLASSES = 2 * DIRECTIONS
#: Pixels from a stripe to the next, by width.
PERIODS = (6.0, 3.5)
TRAINING, TEST, BATCH = 2000, 500, 32
#: Standard deviation of the noise, where stripes have an amplitude of 0.5 to 1.
NOISE = 1.0

#: Channels of the two convolutions. Each has kernels of 3 by 3, and takes every other pixel.
CHANNELS = (12, 24)


class Images(NamedTuple):
    """Images of shape (images, SIDE, SIDE, COLOURS) in float32, and their classes."""

    pixels: Array
    labels: Array


def images(count: int, seed: int) -> Images:
    """Stripes with a colour and a place of their own, under noise: no single pixel says anything of the class."""
    rng = np.random.default_rng((seed, count))
    labels = rng.integers(CLASSES, size=count)
    angle = math.pi * (labels % DIRECTIONS + rng.uniform(-0.25, 0.25, count)) / DIRECTIONS
    period = np.array(PERIODS)[labels // DIRECTIONS]
    y, x = np.mgrid[:SIDE, :SIDE]
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    stripes = np.cos(2 * math.pi * (along / period[:, None, None] + rng.uniform(size=(count, 1, 1))))
    colour = rng.uniform(0.5, 1, (count, 1, 1, COLOURS)) * rng.choice([-1, 1], (count, 1, 1, COLOURS))
    noise = NOISE * rng.normal(size=(count, SIDE, SIDE, COLOURS))
    return Images((stripes[..., None] * colour + noise).astype(np.float32), labels)


@functools.cache
def _data() -> tuple[Images, Images]:
    return images(TRAINING, 0), images(TEST, 1)


def patches(values: Array) -> Array:
    """The 3 by 3 surroundings of every other pixel, zero outside: (..., h, w, c) becomes (..., h/2, w/2, 9*c)."""
    *_, height, width, _ = values.shape
    padded = np.pad(values, [(0, 0)] * (values.ndim - 3) + [(1, 0), (1, 0), (0, 0)])
    return np.concatenate(
        [padded[..., i : i + height : 2, j : j + width : 2, :] for i in range(3) for j in range(3)], axis=-1
    )


def patches_gradient(error: Array) -> Array:
    """The gradient of the values that patches were taken of, from the gradient of the patches."""
    *outer, height, width, size = error.shape
    padded = np.zeros((*outer, 2 * height + 1, 2 * width + 1, size // 9), error.dtype)
    places = ((i, j) for i in range(3) for j in range(3))
    for (i, j), part in zip(places, np.split(error, 9, axis=-1), strict=True):
        padded[..., i : i + 2 * height : 2, j : j + 2 * width : 2, :] += part
    return padded[..., 1:, 1:, :]


class Textures:
    """Two convolutions, rectified, a mean over all places and a softmax over ten classes of stripes.

    Kernels are matrices `(9*channels, channels)`. Batches are 32 of 2,000 images of 16 by 16 pixels in three colours,
    drawn anew for each step; the test loss and accuracy are of 500 other images.
    """

    name, steps = "cifar-like", 300
    tags = {"head/weight": frozenset({"head"})}  # noqa: RUF012

    def __init__(self, channels: Sequence[int] = CHANNELS, batch: int = BATCH) -> None:
        self._channels, self._batch = tuple(channels), batch
        self._training, self._test = _data()

    def initial(self, seed: int) -> dict[str, Array]:
        """Weights of variance `2 / inputs`, and biases of zero."""
        rng, params, inputs = np.random.default_rng(seed), dict[str, Array](), COLOURS
        for place, outputs in enumerate(self._channels, 1):
            params[f"conv{place}/weight"] = weights(rng, 9 * inputs, outputs, 2)
            params[f"conv{place}/bias"] = np.zeros(outputs, np.float32)
            inputs = outputs
        params["head/weight"] = weights(rng, inputs, CLASSES, 1)
        params["head/bias"] = np.zeros(CLASSES, np.float32)
        return params

    def gradients(self, params: Stack, step: int, seeds: Sequence[int]) -> tuple[Array, Stack]:
        """The mean cross entropy of a batch in nats, and its gradients."""
        rows = np.stack([self._rows(seed, step) for seed in seeds])
        below, mean, logits = self._forward(params, self._training.pixels[rows][None])
        losses, error = cross_entropy(logits, self._training.labels[rows])
        grads: Stack = {}
        grads["head/weight"], grads["head/bias"] = dense_gradients(mean, error)
        error = back(error, params["head/weight"])[..., None, None, :]
        for place in range(len(self._channels), 0, -1):
            columns, values = below[place - 1]
            if place == len(self._channels):
                error = error / (values.shape[-2] * values.shape[-3])
            flat = _rows_of(error * (values > 0))
            grads[f"conv{place}/weight"], grads[f"conv{place}/bias"] = dense_gradients(_rows_of(columns), flat)
            if place > 1:
                error = patches_gradient(back(flat, params[f"conv{place}/weight"]).reshape(columns.shape))
        return losses, grads

    def measures(self, params: Stack, seeds: Sequence[int]) -> dict[str, Array]:
        """The mean cross entropy and the accuracy of the test images."""
        labels = self._test.labels[None]
        logits = self._forward(params, self._test.pixels[None, None])[-1]
        return {"test loss": cross_entropy(logits, labels)[0], "test accuracy": accuracy(logits, labels)}

    def _forward(self, params: Stack, values: Array) -> tuple[list[tuple[Array, Array]], Array, Array]:
        """The patches and the results of each convolution, their mean over places, and the logits."""
        below = []
        for place in range(1, len(self._channels) + 1):
            columns = patches(values)
            rows = dense(_rows_of(columns), params[f"conv{place}/weight"], params[f"conv{place}/bias"])
            values = np.maximum(rows, 0).reshape(*rows.shape[:-2], *columns.shape[2:-1], rows.shape[-1])
            below.append((columns, values))
        mean = values.mean(axis=(-2, -3))
        return below, mean, dense(mean, params["head/weight"], params["head/bias"])

    def _rows(self, seed: int, step: int) -> Array:
        return np.random.default_rng((seed, step)).integers(len(self._training.labels), size=self._batch)


def _rows_of(values: Array) -> Array:
    """All places of all images as rows: (rates, seeds, images, h, w, c) becomes (rates, seeds, images*h*w, c)."""
    return values.reshape(*values.shape[:2], -1, values.shape[-1])
