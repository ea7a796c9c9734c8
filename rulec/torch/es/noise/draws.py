"""Random numbers of perturbations as tensors: words of Philox and their values, for many directions at once.

If a device's backend has functions that write noise, they are used.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.array_api.random import WORD, rounds
from rulec.backend import registry
from rulec.backend.capabilities import Capabilities, FillsLines, FillsNoise, Noise, Values, capabilities_of
from rulec.errors import RulecError
from rulec.es import families
from rulec.es.streams import DOMAIN, ELEMENTS, SCALE, short_weights

#: Blocks of words that are made at a time: their intermediates stay in a cache.
_AT_ONCE = 1 << 15

#: Elements of a sum that are made at a time.
_PART = 1 << 18


@dataclass(frozen=True)
class Draws(families.Draws):
    """What `rulec.es.families` draws from: the streams of one layer at one step, as tensors of a dtype on a device.

    `kind` is the distribution of its noise. Weights lie as (rows, columns, *window).
    """

    seed: int
    layer: int
    step: int
    kind: Values
    device: torch.device
    dtype: torch.dtype = torch.float32
    xp: Any = torch
    axis: int = 1

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """In this order; a vector has one column."""
        return shape[0], shape[1] if len(shape) > 1 else 1, shape[2:]

    def laid(self, array: Tensor) -> Tensor:
        """The array itself."""
        return array

    def numbers(self, numbers: Sequence[int]) -> Tensor:
        """The tensor is on the device."""
        if isinstance(numbers, range):
            return torch.arange(numbers.start, numbers.stop, device=self.device)
        return torch.tensor(numbers, device=self.device)

    def cast(self, array: Tensor) -> Tensor:
        """The same tensor where it has the dtype."""
        return array.to(self.dtype)

    def weights(self, weights: Any) -> Tensor:
        """The weights as all backends round them."""
        return torch.from_numpy(short_weights(weights, "rademacher")).to(self.device, self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """The tensor is on the device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def take(self, array: Tensor, places: Tensor, axis: int) -> Tensor:
        """By `index_select`, which is several times as fast as indexing."""
        return array.index_select(axis, places)

    def added_at(self, array: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        """The array, which is written to."""
        return array.index_add_(1, columns, values)

    def summed_at(self, size: int, place: Tensor, values: Tensor) -> Tensor:
        """A vector with values summed at places."""
        return self.zeros((size,)).index_add_(0, place, values)

    def summed(self, weights: Any, shape: tuple[int, ...]) -> Tensor:
        """One fill with all weights."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        fill(out, self.noise(weights))
        return out

    def noise(self, weights: Any) -> Noise:
        """The same, for a kernel that makes it where it needs it."""
        return Noise(self.kind, self.seed, self.layer, self.step, short_weights(weights, self.kind))

    def values(self, directions: Sequence[int], purpose: int, shape: tuple[int, ...]) -> Tensor:
        """Noise of mean 0 and variance 1, all in one call where the backend can."""
        return self.elements(directions, purpose, math.prod(shape)).view(-1, *shape)

    def elements(self, directions: Sequence[int], purpose: int, count: int, offset: int = 0) -> Tensor:
        """The same of `count` elements from `offset` on: (directions, count)."""
        write = writer(self.device.type)
        if write is None:
            return self.by_torch(directions, purpose, count, offset)
        out = torch.empty(len(directions), count, dtype=self.dtype, device=self.device)
        one = Noise(self.kind, self.seed, self.layer, self.step, np.array([SCALE[self.kind]]), purpose=purpose)
        lines = line_writer(self.device.type)
        if lines is not None:
            lines(out, one, directions, offset)
            return out
        for line, direction in zip(out, directions, strict=True):
            write(line, replace(one, first=direction), offset)
        return out

    def by_torch(self, directions: Sequence[int], purpose: int, count: int, offset: int = 0) -> Tensor:
        """The same by operations of torch, on any device."""
        if self.kind != "normal":
            return _numbers(self._parts(self.kind, purpose, directions, count, offset), self.kind, self.dtype)
        first = offset // 2 * 2
        words = self._parts("raw", purpose, directions, (count + offset - first + 1) // 2 * 2, first)
        both = torch.stack(_normal(words[:, 0::2], words[:, 1::2], self.dtype), dim=-1).flatten(1)
        return both[:, offset - first :][:, :count]

    def at(self, pairs: Tensor, purpose: int, elements: Tensor) -> Tensor:
        """The noise of single elements, by direction and number: two int64 tensors that broadcast."""
        each = ELEMENTS[self.kind]
        words = torch.stack(self._blocks(purpose, pairs, elements // each), dim=-1)
        if self.kind == "normal":
            elements = elements.expand(words.shape[:-1])
            place = elements % 4 // 2 * 2
            u, v = (words.gather(-1, (place + i).unsqueeze(-1)).squeeze(-1) for i in (0, 1))
            return torch.where(elements % 2 == 0, *_normal(u, v, self.dtype))
        size = 128 // each
        chosen = words.gather(-1, (elements % each * size // 32).unsqueeze(-1)).squeeze(-1)
        return _numbers((chosen >> (elements % each * size % 32)) & ((1 << size) - 1), self.kind, self.dtype)

    def orders(self, directions: Sequence[int], purpose: int, count: int) -> Tensor:
        """The order of `count` lines that sorts their words, equal ones in their old order; int64."""
        # Words with their places behind them are sorted several times as fast as an argsort takes.
        keys = (self._words(purpose, directions, count) << 31) + torch.arange(count, device=self.device)
        if keys.device.type == "cpu":
            keys.numpy().sort(axis=1)
        else:
            keys = keys.sort(dim=1).values
        return keys & ((1 << 31) - 1)

    def _words(self, purpose: int, pairs: Sequence[int], count: int) -> Tensor:
        """One word for each line, int64."""
        if self.device.type != "cpu":
            return self._parts("raw", purpose, pairs, count, 0)
        fill_words = importlib.import_module("rulec_backends.cpu.noise").fill_words
        out = np.empty((len(pairs), count), np.uint32)
        fill_words(out, seed=self.seed, layer=self.layer, step=self.step, pairs=pairs, purpose=purpose)
        return torch.from_numpy(out.astype(np.int64))

    def _parts(self, kind: str, purpose: int, pairs: Sequence[int], count: int, offset: int) -> Tensor:
        """The word, byte or bit of each element, int64."""
        each = ELEMENTS[kind]
        first, last = offset // each, -(-(offset + count) // each)
        lines = self.numbers(pairs).unsqueeze(1)
        blocks = torch.arange(first, last, device=self.device)
        step = max(1, _AT_ONCE // blocks.numel())
        parts = [
            torch.stack(self._blocks(purpose, lines[i : i + step], blocks), dim=-1).flatten(1)
            for i in range(0, len(lines), step)
        ]
        words = torch.cat(parts)
        if each > 4:
            size = 128 // each
            shifts = torch.arange(0, 32, size, device=self.device)
            words = ((words.unsqueeze(-1) >> shifts) & ((1 << size) - 1)).flatten(1)
        return words[:, offset - first * each :][:, :count]

    def _blocks(self, purpose: int, pairs: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
        """The four words of each block of each direction."""
        pairs, blocks = pairs + torch.zeros_like(blocks), blocks + torch.zeros_like(pairs)
        counter = (blocks & WORD, (blocks >> 32) + (purpose << 16), pairs, torch.full_like(blocks, self.step & WORD))
        return tuple(rounds(counter, (self.seed & WORD, (self.layer + DOMAIN) & WORD)))


def fill(out: Tensor, noise: Noise, offset: int = 0) -> None:
    """Writes the sum of weights times noise, from element `offset` on, into a contiguous tensor, rounded once."""
    written = writer(out.device.type)
    if written is not None:
        written(out, noise, offset)
    else:
        _fill_by_torch(out, noise, offset)


def _fill_by_torch(out: Tensor, noise: Noise, offset: int) -> None:
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    draws = Draws(noise.seed, noise.layer, noise.step, noise.values, out.device, dtype)
    flat = out.view(-1)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        total = torch.zeros(part.shape, dtype=dtype, device=out.device)
        for pair, weight in zip(*noise.counted, strict=True):
            values = draws.by_torch([int(pair)], noise.purpose, part.numel(), offset + start)[0]
            total.add_(values, alpha=float(weight) / SCALE[noise.values])
        part.copy_(total)


def _normal(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two standard normal numbers of two words, by Box and Muller's method."""
    u, v = (((words >> 9).to(dtype) + 0.5) * 2.0**-23 for words in (first, second))
    radius, angle = torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
    return radius * torch.cos(angle), radius * torch.sin(angle)


#: The set bits of each byte.
_SET_BITS = np.bitwise_count(np.arange(256, dtype=np.uint8)).astype(np.int64)


def _numbers(parts: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """What bits and bytes become: 1 and -1, and binomial numbers of variance 1."""
    if kind == "rademacher":
        signs: Tensor = 1 - 2 * parts
        return signs.to(dtype)
    whole: Tensor = torch.from_numpy(_SET_BITS).to(parts.device)[parts] - 4
    return torch.mul(whole.to(dtype), SCALE[kind])


#: The backends that write noise, by type of device.
_BACKENDS = {"cpu": "cpu", "cuda": "triton"}


@functools.cache
def writer(device: str) -> FillsNoise | None:
    """The `fill_noise` of the backend for a type of device; None where it has none, or cannot run."""
    offered = _offered(device)
    return None if offered is None else offered.fill_noise


@functools.cache
def line_writer(device: str) -> FillsLines | None:
    """The `fill_lines` of the backend for a type of device: noise of a direction into each line of a matrix."""
    offered = _offered(device)
    return None if offered is None else offered.fill_lines


def _offered(device: str) -> Capabilities | None:
    try:
        return capabilities_of(registry.usable(_BACKENDS[device])) if device in _BACKENDS else None
    except RulecError:
        return None
