"""Modules that bring their own perturbation: their forward and their estimate, for one step of a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rulec.errors import HyperError
from rulec.es.perturbations import Perturbations
from rulec.torch.es.model import Perturbed
from rulec.torch.es.self_estimator import Draw, SelfEstimator


class SelfEstimators:
    """The modules of a model that perturb their parameters by themselves, and the parameters' numbers."""

    def __init__(self, perturbed: Sequence[Perturbed]) -> None:
        self._layers: dict[int, dict[str, int]] = {}
        self._patterns: dict[int, str] = {}
        self.modules: list[Any] = []
        for entry in perturbed:
            for use in entry.uses:
                if isinstance(use.module, SelfEstimator) and use.name in use.module.own_parameters():
                    if id(use.module) not in self._layers:
                        self.modules.append(use.module)
                    self._layers.setdefault(id(use.module), {})[use.name] = entry.number
                    self._patterns.setdefault(id(use.module), entry.pattern)

        for module in self.modules:
            others = {*module.own_parameters()} - {*self._layers[id(module)]}
            patterns = {entry.pattern for entry in perturbed for use in entry.uses if use.module is module}
            if others or len(patterns) > 1:
                raise HyperError(
                    f"{type(module).__name__} perturbs {' and '.join(module.own_parameters())} together: train all of "
                    f"them, by one pattern"
                )

    def draw(self, module: nn.Module, perturbations: Perturbations, step: int) -> Draw:
        """The arguments of the module's noise in a step."""
        p = perturbations[self._patterns[id(module)]]
        return Draw(p.seed_or_0, step, p.directions, p.antithetic, self._layers[id(module)])

    @contextmanager
    def forward(self, perturbations: Perturbations, step: int) -> Iterator[None]:
        """While it is entered, the modules' forward is that of all members."""
        try:
            for module in self.modules:
                # Past nn.Module's own way to set attributes: the module's state is not to know of it.
                module.__dict__["forward"] = partial(module.members, draw=self.draw(module, perturbations, step))
            yield
        finally:
            for module in self.modules:
                module.__dict__.pop("forward", None)

    def check_penalty(self, penalty: tuple[float, float]) -> None:
        """HyperError for a bad l1 or l2, and for one where there is no binary layer."""
        for name, value in zip(("l1", "l2"), penalty, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise HyperError(f"{name}={value!r} must be a finite number of at least 0")
            if value and not self.modules:
                raise HyperError(
                    f"{name}= is for weights of binary layers, and there is none: give it to the optimizer"
                )

    def gradients(
        self, perturbations: Perturbations, step: int, weights: np.ndarray[Any, np.dtype[np.float64]],
        penalty: tuple[float, float],
    ) -> dict[int, Tensor]:  # fmt: skip
        """The estimates of all of their parameters, by the parameters' identity, with a penalty (l1, l2) of weights.

        Where all weights of members are 0 nothing is to be updated, and there is no penalty.
        """
        gradients = {}
        for module in self.modules:
            grads = module.estimate(self.draw(module, perturbations, step), weights)
            for name, grad in grads.items():
                param = getattr(module, name)
                penalized = any(penalty) and name == "weight" and weights.any()
                gradients[id(param)] = _penalized(grad, param.detach(), *penalty) if penalized else grad
        return gradients


def _penalized(grad: Tensor, weight: Tensor, l1: float, l2: float) -> Tensor:
    """grad + l1*sign(weight) + l2*weight, in the dtype of both, and as large as that can be."""
    wide, most = weight.double(), torch.finfo(grad.dtype).max
    return (grad.double() + l1 * wide.sign() + l2 * wide).clamp(-most, most).to(grad.dtype)
