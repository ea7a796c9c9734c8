"""Training a network by a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rulec.array import Optimizer
from rulec.demo.digits import Digits
from rulec.demo.network import Network
from rulec.language.rule import Rule

WIDTHS = (64, 512, 512, 10)
BATCH = 64


@dataclass(frozen=True)
class Curve:
    """A training run: mean training loss and test loss of every epoch, and the test accuracy at the end."""

    rule: str
    training: list[float]
    test: list[float]
    accuracy: float


def train(
    rule: Rule, digits: Digits, epochs: int, hyper: dict[str, Any], advance: Callable[[], object] = lambda: None
) -> Curve:
    """Trains a network from the same first weights and on the same batches, whatever the rule.

    `hyper` are values of hyper-parameters; `advance` is called after every epoch.
    """
    network = Network(WIDTHS)
    optimizer = Optimizer(rule, network.params, **hyper)
    training, test = [], []
    for epoch in range(epochs):
        losses = []
        for images, labels in digits.batches(BATCH, epoch):
            loss, grads = network.gradients(images, labels)
            optimizer.step(grads)
            losses.append(loss)
        training.append(sum(losses) / len(losses))
        test.append(network.loss(digits.test_images, digits.test_labels))
        advance()
    return Curve(rule.name, training, test, network.accuracy(digits.test_images, digits.test_labels))
