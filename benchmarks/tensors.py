"""torch's tensors for steps that are compared with torch's, and whether torch is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any


def have_torch(notes: list[str]) -> bool:
    """Whether torch is installed; where it is not, a note says what is left out."""
    if importlib.util.find_spec("torch") is None:
        notes.append("steps of rulec.torch are left out: torch is not installed")
        return False
    return True


def tensors(count: int, shape: int | Sequence[int]) -> list[Any]:
    """Parameters with gradients, each of memory of its own, the same random numbers whenever they are asked for."""
    import torch

    size = [shape] if isinstance(shape, int) else list(shape)
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=generator).requires_grad_() for _ in range(count)]
    for tensor in found:
        tensor.grad = torch.randn(size, generator=generator)
    return found
