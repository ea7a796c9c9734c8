"""Training a network by the rule of the demonstration: losses, their picture, and the time of an update beside NumPy.

The rule is authored here, and beside it is the same update in NumPy without rulec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rulec.array import Optimizer
from rulec.errors import RulecError
from rulec.extras import needing
from rulec.language.rule import Rule
from rulec.runtime.engine import default_hyper
from rulec.tools.compare.measure import interleaved
from rulec.tools.demo.digits import Array, Digits, Network

WIDTHS = (64, 512, 512, 10)
BATCH = 64


@dataclass(frozen=True)
class Curve:
    """A training run: mean training loss and test loss of every epoch, the test accuracy at the end, and seconds."""

    rule: str
    training: list[float]
    test: list[float]
    accuracy: float
    seconds: float


class Learner(Protocol):
    """A network and the way it is trained."""

    def step(self, images: Array, labels: Array) -> float:
        """One update on a batch; its mean loss."""
        ...

    def params(self) -> list[Array]:
        """The network's parameters, as `Network` has them."""
        ...


class Descent:
    """A network trained by a rule and gradients; `hyper` are values of hyper-parameters."""

    def __init__(self, rule: Rule | str, widths: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        self._network = Network(widths)
        self._optimizer = Optimizer(rule, self._network.params, **hyper)

    def step(self, images: Array, labels: Array) -> float:
        """One update on a batch; its mean loss."""
        loss, gradients = self._network.gradients(images, labels)
        self._optimizer.step(gradients)
        return loss

    def params(self) -> list[Array]:
        """The network's parameters."""
        return self._network.params


def train(
    name: str, learner: Learner, digits: Digits, epochs: int, batch: int = BATCH,
    advance: Callable[[], object] = lambda: None,
) -> Curve:  # fmt: skip
    """Trains on the same batches, whatever the learner; `advance` is called after every epoch."""
    network = Network(())
    training, test, begin = [], [], time.perf_counter()
    for epoch in range(epochs):
        losses = [learner.step(images, labels) for images, labels in digits.batches(batch, epoch)]
        training.append(sum(losses) / len(losses))
        network.params = learner.params()
        test.append(network.loss(digits.test_images, digits.test_labels))
        advance()
    accuracy = network.accuracy(digits.test_images, digits.test_labels)
    return Curve(name, training, test, accuracy, time.perf_counter() - begin)


@dataclass(frozen=True)
class Update:
    """Median seconds of one update, and how far the two sides' parameters were apart after ten."""

    parameters: int
    fused: float
    unfused: float
    largest_difference: float


def compare_update(rule: Rule, hyper: dict[str, Any], rounds: int) -> Update:
    """Both sides over copies of the same parameters and gradients, timed by turns."""
    ours, theirs = Network(WIDTHS).params, Network(WIDTHS).params
    rng = np.random.default_rng(1)
    grads = [np.asarray(rng.standard_normal(p.shape), np.float32) for p in ours]
    fused, unfused = Optimizer(rule, ours, **hyper), Unfused(theirs, default_hyper(rule, hyper))
    for _ in range(10):
        fused.step(grads)
        unfused.step(grads)
    apart = max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))
    times = interleaved({"fused": lambda: fused.step(grads), "unfused": lambda: unfused.step(grads)}, rounds)
    return Update(sum(p.size for p in ours), times.median("fused"), times.median("unfused"), apart)


def plot(curves: Sequence[Curve], path: Path, widths: Sequence[int]) -> None:
    """Writes a PNG with the training loss (full lines) and the test loss (dashed) of two curves of a network.

    RulecError where matplotlib is not installed or the file cannot be written.
    """
    with needing("the demonstration", "demo"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for curve, colour in zip(curves, ("tab:red", "tab:blue"), strict=True):
        epochs = range(1, len(curve.training) + 1)
        axes.plot(epochs, curve.training, color=colour, label=f"{curve.rule}, training")
        axes.plot(epochs, curve.test, color=colour, linestyle="--", label=f"{curve.rule}, test ({curve.accuracy:.1%})")
    title = f"Handwritten digits, {'-'.join(map(str, widths))}"
    axes.set(yscale="log", xlabel="epoch", ylabel="cross entropy (nats)", title=title)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RulecError(f"{path} cannot be written: {error.strerror or error}") from None


TEXT = """\
name: WaryAdam
summary: AdamW that takes a shorter step where momentum and gradient disagree.
hyper:
  lr: 1e-3
  beta1: 0.9
  beta2: 0.99
  eps: 1e-8
  weight_decay: 1e-2
  damping: {default: 0.3, min: 0, max: 1}
state: {m: 0, v: 0}
step: |
  m = beta1*m + (1 - beta1)*g
  v = beta2*v + (1 - beta2)*g*g
  m_hat = m / (1 - beta1**t)
  sigma = sqrt(v) / sqrt(1 - beta2**t)
  trust = where(m*g > 0, 1, damping)
  direction = trust*m_hat/(sigma + eps) + weight_decay*p
"""


class Unfused:
    """The same rule in plain NumPy: every operation reads its operands from memory and writes its result there."""

    def __init__(self, params: Sequence[Array], hyper: Mapping[str, float]) -> None:
        self.params, self.hyper = list(params), hyper
        self.m = [np.zeros_like(p) for p in params]
        self.v = [np.zeros_like(p) for p in params]
        self.t = 0

    def step(self, grads: Sequence[Array]) -> None:
        """One update in place, in the parameters' float32."""
        self.t += 1
        h = {name: np.float32(value) for name, value in self.hyper.items()}
        left1 = np.float32(1 - self.hyper["beta1"] ** self.t)
        left2 = np.float32(np.sqrt(1 - self.hyper["beta2"] ** self.t))
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
            self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g * g
            m_hat, sigma = self.m[i] / left1, np.sqrt(self.v[i]) / left2
            trust = np.where(self.m[i] * g > 0, np.float32(1), h["damping"])
            direction = trust * m_hat / (sigma + h["eps"]) + h["weight_decay"] * p
            p[...] = p - h["lr"] * direction
