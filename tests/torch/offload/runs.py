"""Runs of an optimizer with and without offload, and the comparison of their bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Matrices, vectors, more dimensions, one element, none, and one larger than the transfer buffers of these tests.
SHAPES = ((64, 48), (48,), (3, 5, 7), (200, 30), (1,), (0, 4))

#: The bytes of a transfer buffer: several groups, and one tensor that is larger.
BUFFER = 8192


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """Parameters of these shapes, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(s), generator=generator).to(dtype).requires_grad_() for s in shapes]


def take_steps(optimizer: Any, params: Sequence[Tensor], count: int, first: int = 0) -> None:
    """Takes steps with gradients that depend on the number of the step alone."""
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        optimizer.step()


def assert_same_bits(mine: Any, other: Any) -> None:
    """Asserts that two trees of tensors and numbers have the same bits; NaN is equal to NaN."""
    if isinstance(other, Tensor):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())
    elif isinstance(other, dict):
        assert mine.keys() == other.keys()
        for key in other:
            assert_same_bits(mine[key], other[key])
    elif isinstance(other, list | tuple):
        assert len(mine) == len(other)
        for left, right in zip(mine, other, strict=True):
            assert_same_bits(left, right)
    else:
        assert mine == other
