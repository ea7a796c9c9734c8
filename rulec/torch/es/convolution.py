"""The map of a convolution, with its groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rulec.torch.es.layers import Map


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
        """From the axis after the directions."""
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
        """With a window of 1."""
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
