"""Sums of noise written into tensors: by the device's backend where it has a way to, else by operations of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.backend.noise import Noise
from rulec.es.streams import SCALE
from rulec.torch.es.draws import Draws
from rulec.torch.es.writers import writer

#: Elements that are made at a time by operations of torch.
_AT_ONCE = 1 << 18


def fill(out: Tensor, noise: Noise, offset: int = 0) -> None:
    """Writes the sum of weights times noise, from element `offset` on, into a contiguous tensor, rounded once."""
    written = writer(out.device.type)
    if written is not None:
        written(out, noise, offset)
    else:
        _fill_by_torch(out, noise, offset)


def _fill_by_torch(out: Tensor, noise: Noise, offset: int) -> None:
    draws = Draws(noise.seed, noise.layer, noise.step, noise.values, out.device)
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    flat = out.view(-1)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        total = torch.zeros(part.shape, dtype=dtype, device=out.device)
        for pair, weight in zip(*noise.counted, strict=True):
            values = draws.by_torch(noise.purpose, [int(pair)], part.numel(), dtype, offset + start)[0]
            total.add_(values, alpha=float(weight) / SCALE[noise.values])
        part.copy_(total)
