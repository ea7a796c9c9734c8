"""Tensors of torch for comparisons with torch's steps, and whether torch is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any


def have_torch(notes: list[str]) -> bool:
    """Whether torch is installed; where it is not, a note about the missing rows is added."""
    if importlib.util.find_spec("torch") is None:
        notes.append("steps of rulec.torch are left out: torch is not installed")
        return False
    return True


def tensors(count: int, shape: int | Sequence[int]) -> list[Any]:
    """Parameters with gradients, each in memory of its own; every call gives the same random numbers."""
    import torch

    size = [shape] if isinstance(shape, int) else list(shape)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator).requires_grad_() for _ in range(count)]
    for tensor in params:
        tensor.grad = torch.randn(size, generator=generator)
    return params
