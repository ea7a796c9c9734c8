"""The time of one update of the network's parameters: rulec's kernel beside the same rule in plain NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array import Optimizer
from rulec.compare.interleave import interleaved
from rulec.demo.network import Network
from rulec.demo.rule import Unfused
from rulec.demo.training import WIDTHS
from rulec.language.rule import Rule
from rulec.runtime.engine import default_hyper


@dataclass(frozen=True)
class Update:
    """Median seconds of one update, and how far the two sides' parameters were apart after ten."""

    parameters: int
    fused: float
    unfused: float
    largest_difference: float


def compare_update(rule: Rule, hyper: dict[str, Any], rounds: int) -> Update:
    """Both sides over copies of the same parameters and gradients, timed by turns."""
    ours, theirs = Network(WIDTHS).params, Network(WIDTHS).params
    rng = np.random.default_rng(1)
    grads = [np.asarray(rng.standard_normal(p.shape), np.float32) for p in ours]
    fused, unfused = Optimizer(rule, ours, **hyper), Unfused(theirs, default_hyper(rule, hyper))
    for _ in range(10):
        fused.step(grads)
        unfused.step(grads)
    apart = max(float(np.max(np.abs(a - b))) for a, b in zip(ours, theirs, strict=True))
    times = interleaved({"fused": lambda: fused.step(grads), "unfused": lambda: unfused.step(grads)}, rounds)
    return Update(sum(p.size for p in ours), times.median("fused"), times.median("unfused"), apart)
