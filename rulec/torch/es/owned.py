"""Modules that bring their own perturbation: their forward and their estimate, for one step of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from rulec.es.perturbation import Perturbation
from rulec.torch.es.census import Perturbed
from rulec.torch.es.own import Draw, OwnEstimator


class Owned:
    """The modules of a model that perturb parameters by themselves, with these parameters' numbers."""

    def __init__(self, perturbed: Iterable[Perturbed]) -> None:
        self._layers: dict[int, dict[str, int]] = {}
        self.modules: list[Any] = []
        for entry in perturbed:
            for use in entry.uses:
                if isinstance(use.module, OwnEstimator) and use.name in use.module.own_parameters():
                    if id(use.module) not in self._layers:
                        self.modules.append(use.module)
                    self._layers.setdefault(id(use.module), {})[use.name] = entry.number

    def draw(self, module: nn.Module, perturbation: Perturbation, step: int) -> Draw:
        """What the module's noise of a step is a function of."""
        p = perturbation
        return Draw(p.seed, step, p.directions, p.antithetic, self._layers[id(module)])

    @contextmanager
    def forward(self, perturbation: Perturbation, step: int) -> Iterator[None]:
        """While it is entered, the modules' forward is that of all members."""
        try:
            for module in self.modules:
                # Past nn.Module's own way to set attributes: the module's state is not to know of it.
                module.__dict__["forward"] = partial(module.members, draw=self.draw(module, perturbation, step))
            yield
        finally:
            for module in self.modules:
                module.__dict__.pop("forward", None)

    def gradients(
        self, perturbation: Perturbation, step: int, weights: np.ndarray[Any, np.dtype[np.float64]]
    ) -> dict[int, Tensor]:
        """The estimates of all of their parameters, by the parameters' identity."""
        found = {}
        for module in self.modules:
            grads = module.estimate(self.draw(module, perturbation, step), weights)
            found.update({id(getattr(module, name)): grad for name, grad in grads.items()})
        return found
