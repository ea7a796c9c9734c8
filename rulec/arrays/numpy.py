"""NumPy, which is the definition: it differs in nothing, but that its arrays may be of 50-digit numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.arrays.functions import Functions
from rulec.arrays.matrix import matrix_functions


class NumpyFunctions(Functions):
    """NumPy's."""

    def norm(self, x: Any, dtype: Any) -> Any:
        """By a power, which NumPy has for objects too, and takes the square root for."""
        return np.sum(x * x, axis=(-2, -1), keepdims=True) ** 0.5


NUMPY_MATRIX = matrix_functions(NumpyFunctions(np))
