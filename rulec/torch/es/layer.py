"""The noise of one layer at one step: the operations of each family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.backend.noise import Noise
from rulec.backend.product import GradientRows, Product
from rulec.es.fitness import Floats
from rulec.es.perturbation import Perturbation
from rulec.es.streams import SHARED, short_weights
from rulec.torch.es.draws import Draws
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, combined, whole

#: A gradient as a kernel takes it in the place of memory, to be made inside the update.
Source = Noise | Product | GradientRows


class LayerNoise(ABC):
    """Noise of a weight of `shape` (rows, columns, *kernel); `dtype` is what it is made in, float32 or float64.

    Noise that all directions share is made once and kept until the step's update, and so are small arrays of each.
    """

    def __init__(self, perturbation: Perturbation, draws: Draws, shape: torch.Size, dtype: torch.dtype) -> None:
        self.perturbation, self.draws, self.shape, self.dtype = perturbation, draws, shape, dtype
        self.rows, self.columns, self.kernel = shape[0], shape[1] if len(shape) > 1 else 1, shape[2:]
        self.directions = range(perturbation.directions)
        self._kept: dict[str, Tensor] = {}

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: Map, who: Population) -> Tensor:
        """The layer's outputs for all members; `bias` is one that all share."""
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

    @abstractmethod
    def dense(self, direction: int) -> Tensor:
        """The noise of one direction as a whole, before sigma."""

    @abstractmethod
    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """The sum over directions of weight times noise, in `dtype`; of dropout the gradient's part along the gains."""

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

    def last(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The same in this noise's dtype, and no longer kept: it may be written to."""
        tensor = self.kept(name, make)
        del self._kept[name]
        return tensor

    def short(self, weights: Floats) -> Tensor:
        """The weights of directions as all backends round them, on the device."""
        return torch.from_numpy(short_weights(weights, "rademacher")).to(self.draws.device, self.dtype)


class SharedNoise(LayerNoise):
    """One noise for all directions, which differ in the order or the signs of its rows, its columns or both."""

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether the rows, and whether the columns differ."""
        return self.perturbation.sides_of(self.rows, self.columns)

    @property
    def lines(self) -> tuple[int, int]:
        """How many rows and columns of noise there are."""
        return self.perturbation.lines_of(self.rows, self.columns)

    def shared(self, dtype: torch.dtype | None = None) -> Tensor:
        """The noise, of the lines that it has."""
        return self.kept("noise", self.draw_shared, dtype)

    def draw_shared(self) -> Tensor:
        """The noise in new memory."""
        shape = (*self.lines, *self.kernel)
        noise = self.draws.values(0, [SHARED], int(np.prod(shape)), self.dtype)[0].view(shape)
        return noise * self.perturbation.scale_of(self.rows, self.columns)


@dataclass(frozen=True)
class RowSource:
    """A gradient that is made some rows at a time: `write(span, out)` writes the rows of a slice."""

    dtype: torch.dtype
    write: Callable[[slice, Tensor], None]

    def rows(self, span: slice, out: Any) -> None:
        """Writes the rows of `span` into `out`, a contiguous matrix of as many rows."""
        self.write(span, out)
