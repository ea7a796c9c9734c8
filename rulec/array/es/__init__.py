"""Evolution strategies for plain arrays, NumPy's or CuPy's, and a forward pass of one's own."""

from rulec.array.es.strategy import Strategy
from rulec.es.fitness import Report
from rulec.es.perturbation import Perturbation

__all__ = ["Perturbation", "Report", "Strategy"]
