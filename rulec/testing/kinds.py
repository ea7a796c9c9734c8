"""The kinds of arrays in the conformance suite, and the exactness of a machine's arithmetic.

A kind says how its arrays are made and read. All tolerances derive from the numbers of exactness.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.backend.capabilities import capabilities_of
from rulec.backend.protocol import Backend
from rulec.compiler.layout import FLOATS
from rulec.language.expr.node import Op
from rulec.language.expr.ops import having

Array = np.ndarray[Any, Any]


class ArrayKind(Protocol):
    """Arrays of one library.

    `mutable` is true where a step writes into them. They are made from and read as NumPy arrays of their storage dtype
    (bfloat16 by ml_dtypes), so that every bit can be compared.
    """

    name: str
    mutable: bool

    @property
    def dtypes(self) -> Sequence[str]:
        """The storage dtypes of these arrays on this machine, by our names."""
        ...

    def make(self, values: Array, skip: int = 0) -> Any:
        """A new contiguous array with these values, `skip` elements off an aligned address where the library can."""
        ...

    def read(self, array: Any) -> Array:
        """A copy of the values."""
        ...


class NumpyKind:
    """NumPy arrays."""

    name = "numpy"
    mutable = True
    dtypes = tuple(FLOATS)

    def make(self, values: Array, skip: int = 0) -> Array:
        """A view of new memory that begins `skip` elements in."""
        memory = np.zeros(values.size + skip, values.dtype)
        array = memory[skip:].reshape(values.shape)
        array[...] = values
        return array

    def read(self, array: Any) -> Array:
        """A copy."""
        return np.array(array)


class TorchKind:
    """PyTorch tensors on one device."""

    name = "torch"
    mutable = True
    dtypes = tuple(FLOATS)

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def make(self, values: Array, skip: int = 0) -> Any:
        """A view of new memory that begins `skip` elements in."""
        import torch

        bits = values.view(np.int16) if values.dtype.name == "bfloat16" else values
        host = torch.from_numpy(np.array(bits)).reshape(values.shape)
        if values.dtype.name == "bfloat16":
            host = host.view(torch.bfloat16)
        memory = torch.zeros(values.size + skip, dtype=host.dtype, device=self.device)
        tensor = memory[skip:].view(values.shape)
        return tensor.copy_(host)

    def read(self, array: Any) -> Array:
        """A copy in main memory."""
        import torch

        host = array.detach().cpu()
        if host.dtype is torch.bfloat16:
            return np.array(host.contiguous().view(torch.int16).numpy()).view(numpy_dtype("bfloat16"))
        return np.array(host.numpy())


class JaxKind:
    """JAX arrays."""

    name = "jax"
    mutable = False

    @property
    def dtypes(self) -> Sequence[str]:
        """All of ours, without float64 where JAX is limited to 32 bits."""
        import jax

        wide = jax.config.read("jax_enable_x64")  # type: ignore[no-untyped-call]
        return [d for d in FLOATS if d != "float64" or wide]

    def make(self, values: Array, skip: int = 0) -> Any:
        """A new array; JAX chooses its address."""
        import jax.numpy as jnp

        return jnp.array(values, copy=True)

    def read(self, array: Any) -> Array:
        """A copy."""
        return np.array(array)


class CupyKind:
    """CuPy arrays on the current GPU."""

    name = "cupy"
    mutable = True
    dtypes = tuple(FLOATS)

    def make(self, values: Array, skip: int = 0) -> Any:
        """A view of new memory that begins `skip` elements in."""
        import cupy

        array = cupy.empty(values.size + skip, values.dtype)[skip:].reshape(values.shape)
        array[...] = cupy.asarray(values)
        return array

    def read(self, array: Any) -> Array:
        """A copy in main memory."""
        return np.array(array.get())


class MlxKind:
    """MLX arrays on the default device."""

    name = "mlx"
    mutable = False

    @property
    def dtypes(self) -> Sequence[str]:
        """All of ours, without float64 on a GPU."""
        import mlx.core as mx

        wide = mx.default_device().type == mx.DeviceType.cpu
        return [d for d in FLOATS if d != "float64" or wide]

    def make(self, values: Array, skip: int = 0) -> Any:
        """A new array; MLX chooses its address."""
        import mlx.core as mx

        return mx.array(values, getattr(mx, values.dtype.name))

    def read(self, array: Any) -> Array:
        """A copy."""
        import mlx.core as mx

        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(numpy_dtype("bfloat16"))
        return np.array(array)


#: Backend -> the one library with arrays it works on.
_LIBRARY_OF = {"jax": "jax", "cupy": "cupy", "mlx": "mlx"}


def kind_of(backend: Backend) -> ArrayKind:
    """The kind of arrays for a backend.

    It is the library of a backend that works on one alone, PyTorch for other backends on the device (on the CPU where
    there is no GPU), and NumPy for the rest.
    """
    if backend.name in _LIBRARY_OF or not capabilities_of(backend).on_device:
        return kind_named(_LIBRARY_OF.get(backend.name, "numpy"))
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return TorchKind("cuda" if torch.cuda.is_available() and not interpreted else "cpu")


def kind_named(name: str) -> ArrayKind:
    """The arrays of a library: `numpy`, `torch` (on the CPU), `jax`, `cupy` or `mlx`; ValueError for another name."""
    kinds: dict[str, type[Any]] = {
        "numpy": NumpyKind,
        "torch": TorchKind,
        "jax": JaxKind,
        "cupy": CupyKind,
        "mlx": MlxKind,
    }
    if name not in kinds:
        raise ValueError(f"arrays are {', '.join(kinds)}, or an object like rulec.testing.NumpyKind, not {name!r}")
    kind: ArrayKind = kinds[name]()
    return kind


#: Spacing of the numbers above 1, smallest normal and largest number of each dtype.
EPS: Mapping[str, float] = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST_NORMAL: Mapping[str, float] = {"float64": 2.0**-1022, "float32": 2.0**-126}
LARGEST: Mapping[str, float] = {"float64": (2 - 2.0**-52) * 2.0**1023, "float32": (2 - 2.0**-23) * 2.0**127}

#: The error of one addition to a partial sum that statistics alone read, in parts of the sum, by the dtype of the
#: terms, and the most terms of a partial sum. Partial sums are added up in float64. Every bound of statistics has both.
PARTIAL_SUMS: Mapping[str, float] = {"float64": 0.0, "float32": 2.0**-24}
MOST_TERMS = 512

_FUNCTIONS = {op for op, error in having("error").items() if error == "function"}


@dataclass(frozen=True)
class Numerics:
    """The greatest error of each operation, in ulps of its result in the compute dtype.

    `rounded` is for + - * / sqrt: 0.5 where they are correctly rounded. `function` is for every other function that is
    not exact. With `flushes`, numbers too small to be normal may count as zero.
    """

    rounded: float = 0.5
    function: float = 4.0
    flushes: bool = False

    def ulps(self, op: Op) -> float:
        """The greatest error of one operation."""
        return self.function if op in _FUNCTIONS else self.rounded


#: IEEE 754 arithmetic, and functions good to a few ulps: the promise of every backend but JAX and MLX.
IEEE = Numerics()

#: XLA's arithmetic on CPUs, as exact, but subnormal numbers are zero.
XLA = Numerics(flushes=True)

#: MLX's arithmetic on CPUs: as exact, but subnormal results may be zero.
MLX = Numerics(flushes=True)
