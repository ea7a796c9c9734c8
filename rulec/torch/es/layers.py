"""The linear map of a layer: of all rows by one weight, or by one for each direction.

Weights are (outputs, inputs, *kernel), rows and columns in the words of perturbations. Tensors are a population's: see
`population`. A group of a convolution has all columns, so that inputs are groups times columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Map(ABC):
    """A linear map with a weight still to be given."""

    groups: int = 1

    @property
    @abstractmethod
    def axis(self) -> int:
        """Which axis of a population's tensor has the channels."""

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """All rows by one weight."""

    @abstractmethod
    def outputs(self, x: Tensor, weight: Tensor, lead: tuple[int, int, int]) -> Tensor:
        """An uninitialised tensor for the products of rows like `x` with `weight`; `lead` is its first three axes."""

    @abstractmethod
    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """Channels by number, the same in all directions."""

    @abstractmethod
    def windows(self, x: Tensor, weight: Tensor, step: int, bias: Tensor | None, out: Tensor) -> None:
        """Rows by windows of a weight that slide over its inputs by `step`, written into `out`.

        `x` is (windows, repeats, directions, ...) and `out` (1, repeats, windows*directions, ...); the first window
        begins where the weight does.
        """

    @abstractmethod
    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each direction's rows by a weight of its own, (directions, outputs, inputs, *kernel)."""

    @abstractmethod
    def spread(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Vectors over channels (..., channels) as they meet the trailing axes of a tensor like `x`."""

    @abstractmethod
    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """Channels by number, others in each direction: `index` is (directions, channels)."""

    def pointwise(self) -> Map:
        """The same of each place by itself, with as many groups."""
        return self

    def of_columns(self, vectors: Tensor) -> Tensor:
        """Vectors over columns (..., columns) once for each group: over the inputs."""
        return vectors if self.groups == 1 else vectors.repeat(*(1,) * (vectors.dim() - 1), self.groups)

    def inputs_of(self, columns: Tensor, count: int) -> Tensor:
        """The numbers of the inputs at some of `count` columns, in every group: (..., groups*chosen)."""
        if self.groups == 1:
            return columns
        first = torch.arange(self.groups, dtype=columns.dtype, device=columns.device).unsqueeze(1) * count
        return (columns.unsqueeze(-2) + first).flatten(-2)

    def narrowed(self, x: Tensor, outputs: range, rows: int) -> tuple[Map, Tensor]:
        """The map and its inputs for some of the `rows` outputs, whole groups of them."""
        return self, x

    def piece(self, rows: int, size: int) -> int:
        """How many outputs, at most `size` where that can be, a piece of the map may have."""
        return max(1, min(rows, size))
