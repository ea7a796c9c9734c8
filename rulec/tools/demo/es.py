"""Training without a backward pass: a population of perceptrons, and the same rule by gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rulec.array import Optimizer
from rulec.array.es import Strategy
from rulec.es import Perturbation
from rulec.tools.demo import training
from rulec.tools.demo.digits import Array, Digits, Network, chosen_of, softmax
from rulec.tools.demo.training import Curve, Learner

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Setting:
    """The perturbation of members, the layers' widths, the batch, the rule and its rate, and the fitness shaping."""

    perturbation: Perturbation
    widths: tuple[int, ...] = (64, 64, 10)
    batch: int = 64
    rule: str = "adam"
    lr: float = 1e-2
    shaping: str = "centered_rank"


class ArrayPopulation:
    """All members in one forward of a network's arrays."""

    def __init__(self, params: Sequence[Array], setting: Setting) -> None:
        self._params, self._shaping = [*params], setting.shaping
        self._es = Strategy(self._params, setting.perturbation)
        self._optimizer = Optimizer(setting.rule, self._params, lr=setting.lr)

    def step(self, images: Array, labels: Array) -> float:
        """One update, by the members' losses on a batch; their mean."""
        probabilities = softmax(self._logits(self._es.member_batch(images)))
        loss = -np.log(chosen_of(probabilities, self._es.member_batch(labels)))
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


class TorchPopulation:
    """All members in one forward of a `torch.nn.Sequential`."""

    def __init__(self, params: Sequence[Array], setting: Setting) -> None:
        import rulec.torch

        self._model, self._shaping = _model(params), setting.shaping
        self._es = rulec.torch.perturb(self._model, setting.perturbation)
        self._optimizer = rulec.torch.optimizer(setting.rule)(self._model.parameters(), lr=setting.lr)

    def step(self, images: Array, labels: Array) -> float:
        """One update, by the members' losses on a batch; their mean."""
        import torch

        logits = self._es(self._es.member_batch(torch.from_numpy(images)))
        wanted = self._es.member_batch(torch.from_numpy(labels))
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        self._es.step(None, self._optimizer, loss=loss, shaping=self._shaping)
        return float(loss.mean())

    def params(self) -> list[Array]:
        """The network's parameters; weights as (inputs, outputs)."""
        return [param.detach().numpy().T for param in self._model.parameters()]


def _model(params: Sequence[Array]) -> torch.nn.Module:
    """Linear layers with these weights (inputs, outputs) and biases, rectified in between."""
    import torch

    widths = [params[0].shape[0], *(bias.size for bias in params[1::2])]
    linear = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    with torch.no_grad():
        for layer, weight, bias in zip(linear, params[::2], params[1::2], strict=True):
            layer.weight.copy_(torch.from_numpy(weight.T))
            layer.bias.copy_(torch.from_numpy(bias))
    between = [module for layer in linear for module in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(*between[:-1])


#: Members share a batch: 64 antithetic pairs of noise of rank 1.
SETTING = Setting(Perturbation("lowrank", directions=64, sigma=0.05, seed=0))


def framework() -> str:
    """The framework for the population: torch where it is installed, else NumPy."""
    return "torch" if importlib.util.find_spec("torch") else "numpy"


def population(kind: str) -> Learner:
    """The population of a framework, with the first weights of `Network`."""
    members = TorchPopulation if kind == "torch" else ArrayPopulation
    return members(Network(SETTING.widths).params, SETTING)


def train(digits: Digits, epochs: int, kind: str, advance: Callable[[], object] = lambda: None) -> Curve:
    """Trains by the members' losses alone; `advance` is called after every epoch."""
    name = f"{SETTING.perturbation.members} members, no gradient"
    return training.train(name, population(kind), digits, epochs, SETTING.batch, advance)


def train_by_gradients(digits: Digits, epochs: int, advance: Callable[[], object] = lambda: None) -> Curve:
    """Trains the same network on the same batches by the same rule, with gradients."""
    descent = training.Descent(SETTING.rule, SETTING.widths, {"lr": SETTING.lr})
    return training.train("gradients", descent, digits, epochs, SETTING.batch, advance)
