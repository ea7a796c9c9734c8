"""The map of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rulec.torch.es.layers import Map


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
        """With the weight's rows last."""
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
