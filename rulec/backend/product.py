"""A gradient as a product: kernels take a Product in place of the gradient, and the gradient is never in memory.

A backend may offer kernels for products, for rules of one elementwise stage, by two more methods.
`emit_epilogue(program, layout, factors)` is the source for factors of this dtype; it is pure, and raises
BackendUnsupported for a rule without such a kernel. `build_epilogue(program, layout, factors, source)` is the kernel.
It is bound and called as any other, with products among its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Product:
    """The gradient `outputs.T @ inputs` of a layer's matrix.

    `outputs` are the gradients of the layer's outputs, `inputs` its inputs. Both are matrices of one dtype with a line
    for each token, in any memory order. The product is rounded to their dtype, as torch would, and then to the dtype of
    the gradient.
    """

    outputs: Any
    inputs: Any


class GradientRows(Protocol):
    """A gradient computed some rows at a time, for updates tile by tile.

    A row is the part of the gradient at one index of its first dimension, as one line.
    """

    @property
    def dtype(self) -> Any:
        """The dtype of the computed rows; they are then rounded to the gradient's."""
        ...

    def rows(self, span: slice, out: Any) -> None:
        """Writes the rows of `span` into `out`, a contiguous matrix of as many rows."""
        ...
