"""Optimizers for plain arrays."""

from rulec.array.optimizer import Optimizer

__all__ = ["Optimizer"]
