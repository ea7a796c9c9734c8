"""The products of `newton_schulz` for stacks on a device, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.backend.capabilities import WORTH_HALVING
from rulec.language.expr.static import DIRECT


class TorchProducts:
    """By torch, the operations of torch.optim.Muon on a whole stack. Tall matrices are seen transposed.

    Results are in memory of their own, which torch's allocator has ready.
    """

    def pays(self, rows: int, cols: int) -> bool:
        """Always True: torch takes every size."""
        return True

    def stack_size(
        self, device: torch.device, dtype: str, rows: int, cols: int, count: int, most: int, form: str = DIRECT
    ) -> int:  # fmt: skip
        """As many as there are, and fit."""
        return max(1, min(count, most // max(1, rows * cols)))

    def divided(self, y: Tensor, norms: Tensor, out: Tensor | None = None) -> Tensor:
        """Matrices over their norms."""
        return y / norms if out is None else out.copy_(y / norms)

    def gram(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        """The products of matrices and their transposes."""
        wide = _wide(y)
        return torch.bmm(wide, wide.mT)

    def polynomial(self, gram: Tensor, b: float, c: float, out: Tensor | None = None) -> Tensor:
        """`b*x + c*x @ x`."""
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)

    def multiplied(self, x: Tensor, polynomial: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        """`a*x + x @ p`."""
        return torch.baddbmm(x, x, polynomial, beta=a)

    def following(self, y: Tensor, polynomial: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        """`a*y + x @ y`, of tall matrices in the memory order of their transposes."""
        wide = _wide(y)
        result = torch.baddbmm(wide, polynomial, wide, beta=a)
        return result if wide is y else result.mT


def _wide(y: Tensor) -> Tensor:
    return y.mT if y.shape[-2] > y.shape[-1] else y


class ShapesProducts(TorchProducts):
    """For fake tensors: those of a GPU's backend, by their memory."""

    def pays(self, rows: int, cols: int) -> bool:
        """True for the sizes that a GPU's backend takes."""
        return min(rows, cols) >= WORTH_HALVING

    def gram(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns `out` unchanged, if there is one."""
        return super().gram(y) if out is None else out

    def polynomial(self, gram: Tensor, b: float, c: float, out: Tensor | None = None) -> Tensor:
        """Returns `out` unchanged, if there is one."""
        return super().polynomial(gram, b, c) if out is None else out

    def multiplied(self, x: Tensor, polynomial: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        """Returns `out` unchanged, if there is one."""
        return super().multiplied(x, polynomial, a) if out is None else out

    def following(self, y: Tensor, polynomial: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        """Returns `out` unchanged, if there is one."""
        return super().following(y, polynomial, a) if out is None else out


TORCH = TorchProducts()
