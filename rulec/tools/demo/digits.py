"""The data and the model of the demonstration: handwritten digits, and a multilayer perceptron in NumPy.

scikit-learn ships the digits: 1797 images of 8 by 8 pixels. The perceptron has rectified hidden layers, and the cross
entropy of a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.extras import needing

Array = np.ndarray[Any, Any]

#: Images kept for the test: a quarter.
TEST = 449


@dataclass(frozen=True)
class Digits:
    """Images as float32 rows of 64 pixels between 0 and 1, and their labels, for training and for the test."""

    images: Array
    labels: Array
    test_images: Array
    test_labels: Array

    def batches(self, size: int, epoch: int) -> Iterator[tuple[Array, Array]]:
        """The training images once, in an order of this epoch's own, in whole batches."""
        order = np.random.default_rng(epoch).permutation(len(self.images))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield self.images[chosen], self.labels[chosen]


def load(user: str = "the data of handwritten digits", extra: str = "demo") -> Digits:
    """The digits, shuffled once; MissingExtra, for a user with this extra, where scikit-learn is not installed."""
    with needing(user, extra):
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return Digits(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


class Network:
    """Layers of float32 weights `(inputs, outputs)` and biases `(outputs,)`, in `params` in that order."""

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.params: list[Array] = []
        for inputs, outputs in pairwise(widths):
            self.params.append((rng.normal(size=(inputs, outputs)) * np.sqrt(2 / inputs)).astype(np.float32))
            self.params.append(np.zeros(outputs, np.float32))

    def forward(self, images: Array) -> list[Array]:
        """The input of every layer, and last the logits `(images, classes)`."""
        values = [images]
        layers = len(self.params) // 2
        for layer in range(layers):
            weight, bias = self.params[2 * layer : 2 * layer + 2]
            value = values[-1] @ weight + bias
            values.append(np.maximum(value, 0) if layer < layers - 1 else value)
        return values

    def loss(self, images: Array, labels: Array) -> float:
        """The mean cross entropy, in nats."""
        return float(-np.mean(np.log(chosen_of(softmax(self.forward(images)[-1]), labels))))

    def accuracy(self, images: Array, labels: Array) -> float:
        """The part of the images whose largest logit is their label's."""
        return float(np.mean(np.argmax(self.forward(images)[-1], axis=1) == labels))

    def gradients(self, images: Array, labels: Array) -> tuple[float, list[Array]]:
        """The mean cross entropy, and its gradient for each of `params`."""
        values = self.forward(images)
        probabilities = softmax(values[-1])
        loss = float(-np.mean(np.log(chosen_of(probabilities, labels))))
        error = probabilities
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        grads: list[Array] = []
        for layer in reversed(range(len(self.params) // 2)):
            grads[:0] = [values[layer].T @ error, error.sum(axis=0)]
            if layer:
                error = (error @ self.params[2 * layer].T) * (values[layer] > 0)
        return loss, grads


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis, without overflow."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def chosen_of(probabilities: Array, labels: Array) -> Array:
    """The probability of each label; no smaller than float32's smallest normal number, so that it has a logarithm."""
    return np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(np.float32).tiny)
