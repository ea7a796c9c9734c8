"""The products of `newton_schulz` for stacks on a device, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.backend.quintic import WORTH_HALVING


class TorchProducts:
    """By torch, the operations of torch.optim.Muon on a whole stack. Tall matrices are seen transposed."""

    def pays(self, rows: int, cols: int) -> bool:
        """For all sizes."""
        return True

    def gram(self, y: Tensor) -> Tensor:
        """The products of matrices and their transposes."""
        wide = _wide(y)
        return torch.bmm(wide, wide.mT)

    def polynomial(self, gram: Tensor, b: float, c: float) -> Tensor:
        """`b*x + c*x @ x`."""
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)

    def following(self, y: Tensor, polynomial: Tensor, a: float) -> Tensor:
        """`a*y + x @ y`, of tall matrices in the memory order of their transposes."""
        wide = _wide(y)
        result = torch.baddbmm(wide, polynomial, wide, beta=a)
        return result if wide is y else result.mT


def _wide(y: Tensor) -> Tensor:
    return y.mT if y.shape[-2] > y.shape[-1] else y


class ShapesProducts(TorchProducts):
    """For fake tensors: those of a GPU's backend, by their memory."""

    def pays(self, rows: int, cols: int) -> bool:
        """For the sizes that a GPU's backend takes."""
        return min(rows, cols) >= WORTH_HALVING


TORCH = TorchProducts()
