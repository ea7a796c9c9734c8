"""The demonstration's population in NumPy, where no framework is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.array import Optimizer
from rulec.array.es import Strategy
from rulec.demo.es_setting import Setting
from rulec.demo.network import softmax

Array = np.ndarray[Any, Any]


class ArrayPopulation:
    """All members in one forward of a network's arrays."""

    def __init__(self, params: Sequence[Array], setting: Setting) -> None:
        self._params, self._shaping = [*params], setting.shaping
        self._es = Strategy(self._params, setting.perturbation)
        self._optimizer = Optimizer(setting.rule, self._params, lr=setting.lr)

    def step(self, images: Array, labels: Array) -> float:
        """One update, by the members' losses on a batch; their mean."""
        probabilities = softmax(self._logits(self._es.member_batch(images)))
        wanted = self._es.member_batch(labels)
        chosen = probabilities[np.arange(len(wanted)), wanted]
        loss = -np.log(np.maximum(chosen, np.finfo(np.float32).tiny))
        self._es.step(None, self._optimizer, loss=loss, shaping=self._shaping)
        return float(loss.mean())

    def params(self) -> list[Array]:
        """The network's parameters."""
        return self._params

    def _logits(self, value: Array) -> Array:
        """The logits of the members' batches, `(members * rows, classes)`."""
        layers = len(self._params) // 2
        for layer in range(layers):
            value = self._es.product(value, f"{2 * layer}")
            value = value + self._es.rows(f"{2 * layer + 1}", value)
            value = np.maximum(value, 0) if layer < layers - 1 else value
        return value
