"""Matrix functions on NumPy arrays `(batch, rows, cols)`, in the dtype that a rule asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rulec.compiler.matrix import MATRIX, newton_schulz
from rulec.language.node import Op


def _newton_schulz(x: Any, *numbers: Any, dtype: str) -> Any:
    """In float32 where fewer bits are asked for: NumPy has no product of matrices of 16 bits."""
    wanted = np.dtype("float64" if dtype == "float64" else "float32")
    return newton_schulz(np.asarray(x, wanted), *numbers)


#: The matrix functions by NumPy.
NUMPY_MATRIX: Mapping[Op, Callable[..., Any]] = {
    **{op: function.compute for op, function in MATRIX.items()}, Op.NEWTON_SCHULZ: _newton_schulz
}  # fmt: skip
