"""Random numbers of perturbations as tensors: words of Philox, and what they become, for many directions at once."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rulec.arrays.random import WORD, rounds
from rulec.backend.noise import Noise, Values
from rulec.es.streams import DOMAIN, ELEMENTS, SCALE
from rulec.torch.es.writers import line_writer, writer

#: Blocks of words that are made at a time: their intermediates stay in a cache.
_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Draws:
    """The streams of one layer at one step, on a device; `kind` is the distribution of its noise.

    Directions are numbers of pairs; results have a line for each.
    """

    seed: int
    layer: int
    step: int
    kind: Values
    device: torch.device

    def values(self, purpose: int, pairs: Sequence[int], count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Noise of mean 0 and variance 1 of `count` elements from `offset` on, in float32 or float64."""
        write = writer(self.device.type)
        if write is None:
            return self.by_torch(purpose, pairs, count, dtype, offset)
        out = torch.empty(len(pairs), count, dtype=dtype, device=self.device)
        one = Noise(self.kind, self.seed, self.layer, self.step, np.array([SCALE[self.kind]]), purpose=purpose)
        lines = line_writer(self.device.type)
        if lines is not None:
            lines(out, one, pairs, offset)
            return out
        for line, pair in zip(out, pairs, strict=True):
            write(line, replace(one, first=pair), offset)
        return out

    def by_torch(self, purpose: int, pairs: Sequence[int], count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """The same by operations of torch, on any device."""
        if self.kind != "normal":
            return _numbers(self._parts(self.kind, purpose, pairs, count, offset), self.kind, dtype)
        first = offset // 2 * 2
        words = self._parts("raw", purpose, pairs, (count + offset - first + 1) // 2 * 2, first)
        both = torch.stack(_normal(words[:, 0::2], words[:, 1::2], dtype), dim=-1).flatten(1)
        return both[:, offset - first :][:, :count]

    def at(self, purpose: int, pairs: Tensor, elements: Tensor, dtype: torch.dtype) -> Tensor:
        """The noise of single elements, by direction and number: two int64 tensors that broadcast."""
        each = ELEMENTS[self.kind]
        words = torch.stack(self._blocks(purpose, pairs, elements // each), dim=-1)
        if self.kind == "normal":
            elements = elements.expand(words.shape[:-1])
            place = elements % 4 // 2 * 2
            u, v = (words.gather(-1, (place + i).unsqueeze(-1)).squeeze(-1) for i in (0, 1))
            return torch.where(elements % 2 == 0, *_normal(u, v, dtype))
        size = 128 // each
        chosen = words.gather(-1, (elements % each * size // 32).unsqueeze(-1)).squeeze(-1)
        return _numbers((chosen >> (elements % each * size % 32)) & ((1 << size) - 1), self.kind, dtype)

    def signs(self, purpose: int, pairs: Sequence[int], count: int, dtype: torch.dtype) -> Tensor:
        """A sign for each of `count` lines, 1 or -1."""
        return replace(self, kind="rademacher").values(purpose, pairs, count, dtype)

    def orders(self, purpose: int, pairs: Sequence[int], count: int) -> Tensor:
        """The order of `count` lines that sorts their words, equal ones in their old order; int64."""
        # Words with their places behind them are sorted several times as fast as an argsort takes.
        keys = (self._words(purpose, pairs, count) << 31) + torch.arange(count, device=self.device)
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
        lines = torch.tensor(list(pairs), dtype=torch.int64, device=self.device).unsqueeze(1)
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
