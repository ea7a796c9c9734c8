"""Optimizers for plain arrays."""

from rulec.array.checkpoint import load, save
from rulec.array.optimizer import Optimizer

__all__ = ["Optimizer", "load", "save"]
