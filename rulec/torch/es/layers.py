"""The maps of linear and convolution layers for a population: one weight for all rows, or one for each direction.

Weights are (outputs, inputs, *kernel); perturbations call these rows and columns. Tensors are a population's (see
`population`). A group of a convolution has all columns, so inputs are groups times columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True)
class Linear(Map):
    """Of a linear layer: channels come last."""

    @property
    def axis(self) -> int:
        """The last."""
        return -1

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        return F.linear(x, weight, bias)

    def outputs(self, x: Tensor, weight: Tensor, lead: tuple[int, int, int]) -> Tensor:
        """The outputs, with the weight's rows as the last axis."""
        return x.new_empty(*lead, *x.shape[3:-1], weight.shape[0])

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """From a matrix: torch selects several times as fast as where there are more axes."""
        return x.flatten(0, -2).index_select(1, index).view(*x.shape[:-1], len(index))

    def windows(self, x: Tensor, weight: Tensor, step: int, bias: Tensor | None, out: Tensor) -> None:
        """One batched product, in the memory of `out` where its rows lie in order."""
        along, down = weight.stride(1), weight.stride(0)
        slid = weight.as_strided((x.shape[0], x.shape[-1], weight.shape[0]), (step * along, along, down))
        lines, parts = x.flatten(1, -2), torch.unflatten(out[0], 1, (x.shape[0], -1)).transpose(0, 1)
        into = parts.view(*lines.shape[:2], weight.shape[0]) if parts.is_contiguous() else None
        if bias is None:
            products = torch.bmm(lines, slid, out=into)
        else:
            products = torch.baddbmm(bias, lines, slid, out=into)
        if into is None:
            parts.copy_(products.view(parts.shape))

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """A batched product over directions; one product where all directions have the same rows."""
        directions, outputs = weights.shape[:2]
        if x.shape[2] == 1:
            products = F.linear(x.squeeze(2), weights.flatten(0, 1))
            return products.view(*products.shape[:-1], directions, outputs).movedim(-2, 2)
        lines = x.movedim(2, 0)
        products = torch.bmm(lines.reshape(directions, -1, x.shape[-1]), weights.transpose(1, 2))
        return products.view(*lines.shape[:-1], outputs).movedim(0, 2)

    def spread(self, vectors: Tensor, x: Tensor) -> Tensor:
        """With axes of 1 between the directions and the channels."""
        return vectors.view(*vectors.shape[:-1], *(1,) * (x.dim() - 4), vectors.shape[-1])

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """A gather along the last axis."""
        lead = (*x.shape[:2], index.shape[0], *x.shape[3:-1])
        places = self.spread(index, x).expand(*lead, index.shape[-1])
        return x.expand(*lead, x.shape[-1]).gather(-1, places)


@dataclass(frozen=True)
class Convolution(Map):
    """Of a convolution by `function`, with its settings: channels come before the places."""

    function: Callable[..., Tensor]
    settings: tuple[Any, ...]
    groups: int = 1

    @property
    def axis(self) -> int:
        """The one after the directions."""
        return 3

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's own convolution."""
        outputs = self.function(x.flatten(0, 2), weight, bias, *self.settings, self.groups)
        return outputs.view(*x.shape[:3], *outputs.shape[1:])

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """Chooses along the axis after the directions."""
        return x.index_select(self.axis, index)

    def windows(self, x: Tensor, weight: Tensor, step: int, bias: Tensor | None, out: Tensor) -> None:
        """A convolution for each window."""
        wide, count = x.shape[3] // self.groups, x.shape[2]
        for i in range(x.shape[0]):
            seen = weight[:, i * step : i * step + wide]
            out[:, :, i * count : (i + 1) * count] = self.product(x[i : i + 1], seen, bias)

    def outputs(self, x: Tensor, weight: Tensor, lead: tuple[int, int, int]) -> Tensor:
        """With the places that a convolution of tensors without values has."""
        one = torch.empty_like(x[0, 0, :1], device="meta")
        example = self.function(one, torch.empty_like(weight, device="meta"), None, *self.settings, self.groups)
        return x.new_empty(*lead, *example.shape[1:])

    def each(self, x: Tensor, weights: Tensor) -> Tensor:
        """A convolution with a group, or several, for each direction."""
        directions, outputs = weights.shape[:2]
        if x.shape[2] == 1:
            return self._same(x, weights)
        lines = x.reshape(-1, directions * x.shape[3], *x.shape[4:])
        result = self.function(lines, weights.flatten(0, 1), None, *self.settings, directions * self.groups)
        return result.view(*x.shape[:2], directions, outputs, *result.shape[2:])

    def _same(self, x: Tensor, weights: Tensor) -> Tensor:
        """Where all directions have the same rows: one convolution with all directions' outputs in each group."""
        directions, outputs, groups = weights.shape[0], weights.shape[1], self.groups
        by_group = weights.reshape(directions, groups, outputs // groups, *weights.shape[2:]).transpose(0, 1)
        outputs_by_group = self.function(x.flatten(0, 2), by_group.flatten(0, 2), None, *self.settings, groups)
        parts = outputs_by_group.view(*x.shape[:2], groups, directions, outputs // groups, *outputs_by_group.shape[2:])
        return parts.transpose(2, 3).flatten(3, 4)

    def spread(self, vectors: Tensor, x: Tensor) -> Tensor:
        """With axes of 1 for the places after the channels."""
        return vectors.view(*vectors.shape, *(1,) * (x.dim() - 4))

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """Whole channels are copied, by their numbers among all channels of all rows."""
        signs, repeats, shared, channels = x.shape[:4]
        lines = torch.arange(signs * repeats, device=x.device).view(signs, repeats, 1, 1) * (shared * channels)
        if shared > 1:
            lines = lines + torch.arange(shared, device=x.device).view(shared, 1) * channels
        places = lines + index
        return x.flatten(0, 3).index_select(0, places.flatten()).view(*places.shape, *x.shape[4:])

    def pointwise(self) -> Map:
        """The same map with a window of 1."""
        return replace(self, settings=(1, 0, 1))

    def narrowed(self, x: Tensor, outputs: range, rows: int) -> tuple[Map, Tensor]:
        """The groups of some outputs, and their inputs."""
        if self.groups == 1 or len(outputs) == rows:
            return self, x
        each, wide = rows // self.groups, x.shape[3] // self.groups
        first, count = outputs.start // each, len(outputs) // each
        return replace(self, groups=count), x.narrow(3, first * wide, count * wide)

    def piece(self, rows: int, size: int) -> int:
        """Whole groups, at least one."""
        if self.groups == 1:
            return super().piece(rows, size)
        each = rows // self.groups
        return min(rows, each * max(1, size // each))
