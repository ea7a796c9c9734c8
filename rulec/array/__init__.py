"""Optimizers for plain arrays."""

from rulec.array.checkpoint import load, save
from rulec.array.lbfgs import LBFGS
from rulec.array.optimizer import Optimizer
from rulec.array.store import GradStore

__all__ = ["LBFGS", "GradStore", "Optimizer", "load", "save"]
