"""The noise of one layer at one step: the operations of each family."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rulec.backend.capabilities import GradientRows, Noise, Product
from rulec.es import families
from rulec.es.families import Family
from rulec.es.fitness import Floats
from rulec.es.perturbation import Perturbation
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.draws import Draws
from rulec.torch.es.population import Population, combined, whole

#: A gradient as a kernel takes it in the place of memory, to be made inside the update.
Source = Noise | Product | GradientRows


class LayerNoise(Family):
    """Noise of a weight of `shape` (rows, columns, *window), and the outputs of a layer that it gives members.

    The sums of noise are those of `rulec.es.families`; products are other ones. Noise that all directions share is
    made once and kept until the step's update, and so are small arrays of each.
    """

    draws: Draws

    def __init__(self, perturbation: Perturbation, shape: torch.Size, draws: Draws) -> None:
        super().__init__(perturbation, shape, draws)
        self.dtype = draws.dtype
        self._kept: dict[str, Tensor] = {}

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: Map, who: Population) -> Tensor:
        """The layer's outputs for all members; `bias` is one that all share."""

    def source(self, weights: Floats) -> Source | None:
        """The source of the estimate for a kernel that makes it inside the update; None where no kernel can."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(t.nbytes for t in self._kept.values())

    def free(self) -> None:
        """Forgets what is kept; it is made again where it is needed."""
        self._kept.clear()

    def kept(self, name: str, make: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor that `make` returns, kept under this name, in another dtype than this noise's if need be."""
        key = name if dtype in (None, self.dtype) else f"{name} {dtype}"
        if key not in self._kept:
            self._kept[key] = make() if dtype is None else make().to(dtype)
        return self._kept[key]

    def every(
        self, name: str, make: Callable[[Sequence[int]], Tensor], directions: Sequence[int], dtype: torch.dtype | None
    ) -> Tensor:
        """The lines of a run of directions of the tensor that `make` returns for all of them, which is kept."""
        kept = self.kept(name, lambda: make(self.directions), dtype)
        return kept if len(directions) == len(kept) else kept[directions[0] : directions[-1] + 1]

    def lines(self, of: str, directions: Sequence[int], purpose: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same, kept."""
        make = super().lines
        return self.every(f"{of} {purpose}", lambda every: make(of, every, purpose), directions, dtype)

    def pairs(self, index: Tensor) -> Tensor:
        """The number of each direction, to meet an embedding's `index` (..., directions, *rest)."""
        return torch.arange(len(self.directions), device=index.device).view(-1, *(1,) * (index.dim() - 3))

    def across(self, lines: Tensor, index: Tensor) -> Tensor:
        """Lines of each direction (directions, ...), to meet the lines that are looked up at `index`."""
        return lines.view(len(lines), *(1,) * (index.dim() - 3), *lines.shape[1:])


class AddedNoise(LayerNoise):
    """Noise; its products are added to the products of the weight."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: Map, who: Population) -> Tensor:
        """The sum of both."""
        return self.add(way.product(x, weight, bias), x, way, who)

    @abstractmethod
    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """`base` plus the product of `x` with the noise, for all members."""

    def add_one_by_one(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """The same by the noise of one direction after the other as a whole."""
        out = whole(base, who)
        for d in self.directions:
            lines = x[:, :, d : d + 1] if x.shape[2] > 1 else x
            part, one = out[:, :, d : d + 1], replace(who, directions=1)
            combined(part, way.product(lines, self.dense(d).to(x.dtype)), one)
        return out

    @abstractmethod
    def lookup(self, index: Tensor) -> Tensor:
        """The noise of an embedding's lines, before sigma: `index` (..., directions, *rest) -> (*index, columns)."""


class SharedNoise(AddedNoise, families.SharedNoise):
    """One noise for all directions, kept."""

    def shared(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same, kept."""
        return self.kept("noise", super().shared, dtype)

    def last_shared(self) -> Tensor:
        """The same, no longer kept: it may be written to."""
        noise = self.shared()
        del self._kept["noise"]
        return noise


@dataclass(frozen=True)
class RowSource:
    """A gradient that is made some rows at a time: `write(span, out)` writes the rows of a slice."""

    dtype: torch.dtype
    write: Callable[[slice, Tensor], None]

    def rows(self, span: slice, out: Any) -> None:
        """Writes the rows of `span` into `out`, a contiguous matrix of as many rows."""
        self.write(span, out)
