"""A gradient that is a product and need not be made: what a backend may be given in the place of a gradient.

A backend may offer kernels for such gradients, of rules that are one elementwise stage, by two more methods:
`emit_epilogue(program, layout, factors)`, the source for factors of that dtype, pure, and BackendUnsupported where it
has none; and `build_epilogue(program, layout, factors, source)`, whose kernel is bound and called as any other, but
with products among its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Product:
    """The gradient `outputs.T @ inputs` of a matrix: of gradients of a layer's outputs, and its inputs.

    Both are matrices of one dtype with a line for each token, in any memory order. The product is rounded to their
    dtype, as torch would, and then to that of the gradient.
    """

    outputs: Any
    inputs: Any


class GradientRows(Protocol):
    """A gradient that is made some rows at a time, wherever its update is done tile by tile.

    A row is what the gradient has at one index of its first dimension, as one line.
    """

    @property
    def dtype(self) -> Any:
        """The dtype of the rows as they are made; they are then rounded to the gradient's."""
        ...

    def rows(self, span: slice, out: Any) -> None:
        """Writes the rows of `span` into `out`, a contiguous matrix of as many rows."""
        ...
