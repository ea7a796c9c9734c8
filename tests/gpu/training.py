"""Parameters on the device with twins of their own, and gradients that are the same for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

DEVICE = "cuda"

SHAPES: Sequence[tuple[int, ...]] = ((), (7,), (64, 3), (1000,), (33, 65), (4, 3, 5, 5), (300, 1000))


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in shapes]


def gradients(params: Sequence[Tensor], step: int, scale: float = 1.0) -> list[Tensor]:
    """Gradients of a step, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(100 + step)
    return [(scale * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype) for p in params]


def give(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Gives every parameter its gradient."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """The bits of tensors, however they lie."""
    return [t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else _one(t) for t in tensors]


def _one(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], relative: float, least: float = 0.0) -> None:
    """Every number within so much of the largest of its tensor, or of `least` where that is larger."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape
        far = float((a.detach().double() - b.detach().double()).abs().max())
        size = max(float(b.detach().double().abs().max()), least)
        assert far <= relative * size, f"tensor {number} of shape {tuple(a.shape)} differs by {far / size:.3g}"


@contextmanager
def check_no_waiting() -> Iterator[None]:
    """Within the block, whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
