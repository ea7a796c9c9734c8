"""Which backend's kernels binary layers run on."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np

from rulec.backend import registry
from rulec.backend.binary import BinaryKernels
from rulec.errors import BackendUnavailable
from rulec.es.binary.reference import ReferenceKernels


def kernels_of(array: Any, backend: str | None = None) -> BinaryKernels:
    """The kernels for such an array: of the backend named, else CUDA's for CuPy's arrays, machine code for NumPy's.

    Where Numba is not installed, and for backend "numpy", those of NumPy. BackendUnavailable for a backend without.
    """
    if backend is None:
        backend = "cpu" if isinstance(array, np.ndarray) else "cupy"
        if backend == "cpu" and registry.get("cpu").unavailable_reason() is not None:
            backend = "numpy"
    return _kernels(backend)


@functools.cache
def _kernels(name: str) -> BinaryKernels:
    if name == "numpy":
        return ReferenceKernels()
    backend = registry.usable(name)
    if not hasattr(backend, "binary"):
        raise BackendUnavailable(f"backend {name!r} has no kernels for packed bits: use 'numpy', 'cpu', 'c' or 'cupy'")
    return cast(BinaryKernels, backend.binary())
