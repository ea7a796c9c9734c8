"""Updates inside of the backward pass: a gradient is used as soon as it is complete, and its memory is free again."""

from __future__ import annotations

from rulec.jax.eager.call import Outcome
from rulec.jax.eager.memory import StepBytes, deferred_bytes
from rulec.jax.eager.scan import EagerScan, EagerStep, ScanState, eager_scan, eager_step

__all__ = [
    "EagerScan",
    "EagerStep",
    "Outcome",
    "ScanState",
    "StepBytes",
    "deferred_bytes",
    "eager_scan",
    "eager_step",
]
