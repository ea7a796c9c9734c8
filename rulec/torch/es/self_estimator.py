"""The protocol of modules with a perturbation and an estimate of gradients of their own, such as binary layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch


@dataclass(frozen=True)
class Draw:
    """The arguments of the noise of one step, for one module.

    `layers` are the numbers of its own parameters, by their names in the module. Members are in the order (sign,
    direction), and rows of a batch in the order (sign, repeat, direction), as everywhere.
    """

    seed: int
    step: int
    directions: int
    antithetic: bool
    layers: Mapping[str, int]

    @property
    def signs(self) -> int:
        """How many signs each direction is taken with: 2 or 1."""
        return 2 if self.antithetic else 1

    @property
    def members(self) -> int:
        """How many networks are evaluated."""
        return self.signs * self.directions


@runtime_checkable
class SelfEstimator(Protocol):
    """A module whose own parameters are perturbed and estimated by itself; its forward is the plain network's.

    The parameters that it names are perturbed by nobody else, and their numbers come from the model's order as all do.
    """

    def own_parameters(self) -> tuple[str, ...]:
        """The names, in the module, of the parameters that it perturbs."""
        ...

    def members(self, batch: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The outputs of all members for a batch of a multiple of `draw.members` rows, without a graph."""
        ...

    def estimate(self, draw: Draw, weights: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, torch.Tensor]:
        """The gradients of its own parameters, by name: for each the sum over members of weight times score.

        `weights` (members,) come from `rulec.es.binary.member_weights`: with a minus and the baseline, divided by the
        number of members that count, 0 for the others. `draw` is the argument of the forward before.
        """
        ...

    def noise_bytes(self, draw: Draw) -> int:
        """The bytes that are kept of a step's noise between `members` and `free_memory`."""
        ...

    def free_memory(self) -> None:
        """Forgets what is kept; it is made again when it is needed."""
        ...
