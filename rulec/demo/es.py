"""Training without a backward pass: a population of perceptrons, and the same rule by gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rulec.array import Optimizer
from rulec.demo.digits import Digits
from rulec.demo.es_setting import Setting
from rulec.demo.network import Network
from rulec.demo.training import Curve
from rulec.es import Perturbation

Array = np.ndarray[Any, Any]

#: Members share a batch: 64 antithetic pairs of noise of rank 1.
SETTING = Setting(Perturbation("lowrank", directions=64, sigma=0.05, seed=0))


class Population(Protocol):
    """A network and the members around it."""

    def step(self, images: Array, labels: Array) -> float:
        """One update, by the members' losses on a batch; their mean."""
        ...

    def params(self) -> list[Array]:
        """The network's parameters, as `Network` has them."""
        ...


def framework() -> str:
    """The framework for the population: torch where it is installed, else NumPy."""
    return "torch" if importlib.util.find_spec("torch") else "numpy"


def population(kind: str) -> Population:
    """The population of a framework, with the first weights of `Network`."""
    if kind == "torch":
        from rulec.demo.es_torch import TorchPopulation

        return TorchPopulation(Network(SETTING.widths).params, SETTING)
    from rulec.demo.es_arrays import ArrayPopulation

    return ArrayPopulation(Network(SETTING.widths).params, SETTING)


def train(digits: Digits, epochs: int, kind: str, advance: Callable[[], object] = lambda: None) -> Curve:
    """Trains by the members' losses alone; `advance` is called after every epoch."""
    members = population(kind)
    return _curve(f"{SETTING.perturbation.members} members, no gradient", members, digits, epochs, advance)


def train_by_gradients(digits: Digits, epochs: int, advance: Callable[[], object] = lambda: None) -> Curve:
    """Trains the same network on the same batches by the same rule, with gradients."""
    return _curve("gradients", _Descent(), digits, epochs, advance)


class _Descent:
    """The same interface as a population, with gradients."""

    def __init__(self) -> None:
        self._network = Network(SETTING.widths)
        self._optimizer = Optimizer(SETTING.rule, self._network.params, lr=SETTING.lr)

    def step(self, images: Array, labels: Array) -> float:
        loss, gradients = self._network.gradients(images, labels)
        self._optimizer.step(gradients)
        return loss

    def params(self) -> list[Array]:
        return self._network.params


def _curve(name: str, members: Population, digits: Digits, epochs: int, advance: Callable[[], object]) -> Curve:
    network = Network(SETTING.widths)
    training, test = [], []
    for epoch in range(epochs):
        losses = [members.step(images, labels) for images, labels in digits.batches(SETTING.batch, epoch)]
        training.append(sum(losses) / len(losses))
        network.params = members.params()
        test.append(network.loss(digits.test_images, digits.test_labels))
        advance()
    return Curve(name, training, test, network.accuracy(digits.test_images, digits.test_labels))
