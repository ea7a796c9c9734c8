"""The settings of the demonstration without a backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from rulec.es import Perturbation


@dataclass(frozen=True)
class Setting:
    """The perturbation of members, the layers' widths, the batch, the rule and its rate, and the fitness shaping."""

    perturbation: Perturbation
    widths: tuple[int, ...] = (64, 64, 10)
    batch: int = 64
    rule: str = "adam"
    lr: float = 1e-2
    shaping: str = "centered_rank"
