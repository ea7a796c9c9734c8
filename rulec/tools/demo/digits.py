"""The handwritten digits that ship with scikit-learn: 1797 images of 8 by 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.errors import RulecError

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


def load() -> Digits:
    """The digits, shuffled once; RulecError where scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RulecError("the handwritten digits are of scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return Digits(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])
