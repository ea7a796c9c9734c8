"""Matrix functions on NumPy arrays `(batch, rows, cols)`, in the dtype that a rule asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.compiler.matrix import MATRIX, newton_schulz
from rulec.language.node import Op


def _newton_schulz(x: Any, *numbers: Any, dtype: str) -> Any:
    """In the matrix's own dtype where 16 bits are asked for: NumPy has no product of such matrices."""
    return newton_schulz(np.asarray(x, dtype if dtype in ("float32", "float64") else None), *numbers)


#: The matrix functions by NumPy.
NUMPY_MATRIX: Mapping[Op, Callable[..., Any]] = {
    **{op: function.compute for op, function in MATRIX.items()}, Op.NEWTON_SCHULZ: _newton_schulz
}  # fmt: skip
