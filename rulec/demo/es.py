"""Training without a backward pass: a population of perceptrons, and the same rule by gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from rulec.demo import training
from rulec.demo.digits import Digits
from rulec.demo.network import Network
from rulec.demo.populations import ArrayPopulation, Setting, TorchPopulation
from rulec.demo.training import Curve, Learner
from rulec.es import Perturbation

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
