"""Eager updates: each parameter is updated inside the backward pass, and its gradient freed."""

from rulec.torch.eager.optimizer import EagerUpdate
from rulec.torch.eager.params import Report
from rulec.torch.eager.store import GradStore

__all__ = ["EagerUpdate", "GradStore", "Report"]
