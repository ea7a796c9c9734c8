"""Steps of an optimizer with drawn gradients, for parameters and states in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BRAIN = torch.bfloat16


def gradients(net: nn.Module, count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Gradients of all parameters for some steps, rounded to a dtype."""
    draws = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=draws).to(dtype) for p in net.parameters()] for _ in range(count)]


def take(net: nn.Module, optimizer: Any, steps: Any) -> None:
    """Takes the steps, each with gradients in the dtype of their parameters."""
    for grads in steps:
        for p, g in zip(net.parameters(), grads, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
