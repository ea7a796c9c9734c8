"""Evolution strategies for PyTorch: all members of a population in one forward pass."""

from rulec.torch.es.report import Report
from rulec.torch.es.strategy import Strategy, perturb

__all__ = ["Report", "Strategy", "perturb"]
