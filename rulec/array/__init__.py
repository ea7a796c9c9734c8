"""Optimizers for plain arrays."""

from rulec.array.checkpoint import load, save
from rulec.array.optimizer import Optimizer
from rulec.array.search import LBFGS, LineSearch
from rulec.array.store import GradStore
from rulec.runtime.line_search import Backtracking, Zoom

__all__ = ["LBFGS", "Backtracking", "GradStore", "LineSearch", "Optimizer", "Zoom", "load", "save"]
