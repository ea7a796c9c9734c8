"""A step of MeZO as its paper has it (Malladi et al., arXiv 2305.17333, algorithms 1 and 2), written for this bench.

The parameters are perturbed in place, each time by noise drawn again from its seed: plus epsilon, minus two epsilon,
plus epsilon, and the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class MeZO:
    """MeZO's optimizer: sgd along one direction of standard normal noise."""

    def __init__(self, params: Sequence[torch.Tensor], lr: float = 1e-3, epsilon: float = 1e-3) -> None:
        import torch

        self._params, self._lr, self._epsilon = list(params), lr, epsilon
        self._generator, self._step = torch.Generator(), 0
        largest = max(p.numel() for p in self._params)
        self._noise = torch.empty(largest, dtype=self._params[0].dtype)

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        """One step; `loss` runs the model."""
        import torch

        with torch.no_grad():
            self._add(self._epsilon)
            above = float(loss())
            self._add(-2 * self._epsilon)
            below = float(loss())
            self._add(self._epsilon)
            self._add(-self._lr * (above - below) / (2 * self._epsilon))
        self._step += 1

    def _add(self, scale: float) -> None:
        """One sweep: the step's noise once more, scaled and added to every parameter. The noise needs no allocation."""
        self._generator.manual_seed(self._step)
        for param in self._params:
            noise = self._noise[: param.numel()].view(param.shape).normal_(generator=self._generator)
            param.add_(noise, alpha=scale)
