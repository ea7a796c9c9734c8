"""Sums of noise written into tensors: by the device's backend where it has a way to, else by operations of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rulec.backend import registry
from rulec.backend.noise import Noise
from rulec.errors import RulecError
from rulec.es.streams import SCALE

#: The backends that write noise, by type of device.
_BACKENDS = {"cpu": "cpu", "cuda": "triton"}

#: Elements that are made at a time by operations of torch.
_AT_ONCE = 1 << 18


def fill(out: Tensor, noise: Noise, offset: int = 0) -> None:
    """Writes the sum of weights times noise, from element `offset` on, into a contiguous tensor, rounded once."""
    written = writer(out.device.type)
    if written is not None:
        written(out, noise, offset)
    else:
        _fill_by_torch(out, noise, offset)


@functools.cache
def writer(device: str) -> Callable[..., Any] | None:
    """The `fill_noise` of the backend for a type of device; None where it has none, or cannot run."""
    return _offered(device, "fill_noise")


@functools.cache
def line_writer(device: str) -> Callable[..., Any] | None:
    """The `fill_lines` of the backend for a type of device: noise of a direction into each line of a matrix."""
    return _offered(device, "fill_lines")


def _offered(device: str, name: str) -> Callable[..., Any] | None:
    try:
        found = getattr(registry.usable(_BACKENDS[device]), name, None) if device in _BACKENDS else None
    except RulecError:
        return None
    return found if callable(found) else None


def _fill_by_torch(out: Tensor, noise: Noise, offset: int) -> None:
    from rulec.torch.es.draws import Draws

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
