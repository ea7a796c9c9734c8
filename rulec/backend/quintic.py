"""The products of `newton_schulz` by a backend's own kernels, for stacks of matrices on its device.

A backend may offer them by three more methods. `has_quintic(device)` says whether it has such kernels for a device of
torch's. `emit_quintic(dtype)` is the source for matrices of this dtype; it is pure, and raises BackendUnsupported for a
dtype without such kernels. `build_quintic(dtype, source)` is the QuinticProducts. A matrix has the same bits in every
stack, whatever its neighbours are.
"""

from __future__ import annotations

from typing import Any, Protocol

#: The dtypes of matrices that a GPU's backend has products for.
DTYPES = ("bfloat16", "float16")

#: From so many rows or columns on, whichever are fewer, half of a product is quicker than the whole by the library.
WORTH_HALVING = 256


class QuinticProducts(Protocol):
    """Products of stacks `(batch, rows, cols)` of one dtype, each summed in float32 and rounded once.

    Symmetric matrices have as many rows as the shorter side of the others. A result may be written to `out`, memory of
    its shape that no operand lies in.
    """

    def pays(self, rows: int, cols: int) -> bool:
        """Whether they are for matrices of this size. The library's own products are for all others."""
        ...

    def stack_size(self, device: Any, dtype: str, rows: int, cols: int, count: int, most: int) -> int:
        """How many of `count` matrices of this size go into one stack, of `most` elements or of one matrix."""
        ...

    def divided(self, y: Any, norms: Any) -> Any:
        """Matrices over their `norms`, of shape `(batch, 1, 1)` and the same dtype: IEEE quotients, rounded once."""
        ...

    def gram(self, y: Any, out: Any = None) -> Any:
        """The products of matrices and their transposes: `y @ y.T`, of tall ones `y.T @ y`."""
        ...

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        """`b*x + c*x @ x` of symmetric matrices."""
        ...

    def following(self, y: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*y + x @ y`, of tall matrices `a*y + y @ x`, for their polynomials `x`."""
        ...
