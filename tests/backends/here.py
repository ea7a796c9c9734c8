"""The backends that can run on this machine, in main memory and by CuPy's stand-in."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rulec.backend import registry
from tests.backends import cuda_stand_in

BRAIN = np.dtype(ml_dtypes.bfloat16)

#: The backends for arrays in main memory; those that cannot run are skipped.
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for name in ("numpy", "c", "cpu")
    for reason in [registry.get(name).unavailable_reason()]
]

needs_compiler = pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")
