"""The kind of an optimizer's arrays: NumPy's or CuPy's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rulec.array.arrays import NumpyArrays
from rulec.errors import TensorError


def arrays_for(leaves: Mapping[str, Any]) -> NumpyArrays:
    """The operations of the runtime on these arrays: CuPy's where any of them is one, else NumPy's.

    TensorError where only some are CuPy's, or they lie on several GPUs.
    """
    cupy = sys.modules.get("cupy")
    there = {name: array for name, array in leaves.items() if cupy is not None and isinstance(array, cupy.ndarray)}
    if not there:
        return NumpyArrays()
    first = next(iter(there))
    for name in leaves:
        if name not in there:
            raise TensorError(
                f"parameter {first} is a CuPy array and parameter {name} is not: give arrays of one kind to an "
                f"optimizer, the others to another"
            )
    from rulec.array.cupy_arrays import CupyArrays

    for name, array in there.items():
        if array.device.id != there[first].device.id:
            raise TensorError(
                f"parameter {first} is on GPU {there[first].device.id} and parameter {name} on GPU {array.device.id}: "
                f"give those of each GPU to an optimizer of their own"
            )
    return CupyArrays(there[first].device.id)
