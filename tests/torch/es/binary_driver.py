"""The least that steps binary layers: what the adapter does, without the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rulec.es.binary import member_weights
from rulec.torch.es.self_estimator import Draw, SelfEstimator


class Driver:
    """Members of a model whose parameters all belong to modules with their own estimators."""

    def __init__(self, model: nn.Module, directions: int, antithetic: bool = True, seed: int = 0) -> None:
        self.model, self.directions, self.antithetic, self.seed, self.step = model, directions, antithetic, seed, 0
        numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        self.own: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, SelfEstimator)}
        self.layers = {
            name: {own: numbers[f"{name}.{own}".lstrip(".")] for own in module.own_parameters()}
            for name, module in self.own.items()
        }
        assert sum(map(len, self.layers.values())) == len(numbers)

    def draw(self, name: str) -> Draw:
        return Draw(self.seed, self.step, self.directions, self.antithetic, self.layers[name])

    def __call__(self, samples: Tensor) -> Tensor:
        """What all members make of the same samples, (signs, samples, directions, ...)."""
        signs = 2 if self.antithetic else 1
        batch = samples.repeat_interleave(self.directions, dim=0).repeat(signs, *(1,) * (samples.dim() - 1))
        out = self.forward(batch)
        return out.view(signs, len(samples), self.directions, *out.shape[1:])

    def forward(self, batch: Tensor) -> Tensor:
        """What members make of their rows of a batch."""
        plain = {name: module.forward for name, module in self.own.items()}
        for name, module in self.own.items():
            module.forward = self._members(module, self.draw(name))
        try:
            with torch.no_grad():
                return self.model(batch)  # type: ignore[no-any-return]
        finally:
            for name, module in self.own.items():
                del module.forward
                assert module.forward == plain[name]

    @staticmethod
    def _members(module: Any, draw: Draw) -> Callable[[Tensor], Tensor]:
        return lambda batch: module.members(batch, draw)

    def update(self, fitness: Tensor, shaping: Any = None) -> None:
        """Sets gradients from fitness by (sign, direction)."""
        weights = member_weights(fitness.double().numpy(), shaping)
        for name, module in self.own.items():
            for own, gradient in module.estimate(self.draw(name), weights).items():
                getattr(module, own).grad = gradient
            module.free_memory()
        self.step += 1
