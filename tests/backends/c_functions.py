"""A compiled loop of one expression, for tests: `out[i] = f(x0[i], ...)` through the same words and compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from rulec_backends.c.compile import library
from rulec_backends.cstyle.dialect import Dialect
from rulec_backends.cstyle.words import words_used

Array = np.ndarray[Any, Any]

_TYPES = {"float32": "float", "float64": "double", "bits": "uint16_t"}

_SOURCE = """\
#include <math.h>
#include <stdint.h>
#define RULEC_FUNCTION static inline __attribute__((always_inline))
{words}
void run(int64_t count, {result} *out, {inputs})
{{
    for (int64_t i = 0; i < count; i++)
        out[i] = {expression};
}}
"""


def function(expression: str, read: str, write: str = "", inputs: int = 1) -> Callable[..., Array]:
    """The expression of `x0[i]`, ... as a function of arrays of float32, float64 or 16 bits."""
    write = write or read
    source = _SOURCE.format(
        words="\n".join(words_used(expression, Dialect("c"))), result=_TYPES[write], expression=expression,
        inputs=", ".join(f"const {_TYPES[read]} *x{i}" for i in range(inputs)),
    )  # fmt: skip
    run = library("function", source).run
    dtype = np.uint16 if write == "bits" else np.dtype(write)

    def call(*arrays: Array) -> Array:
        out = np.zeros(arrays[0].size, dtype)
        held = [np.ascontiguousarray(a) for a in arrays]
        run(ctypes.c_int64(out.size), *(ctypes.c_void_p(a.ctypes.data) for a in (out, *held)))
        return out

    return call


def elementary(name: str, dtype: str, inputs: int = 1) -> Callable[..., Array]:
    """A function of one or two numbers, by its name for double, as a function of arrays."""
    arguments = ", ".join(f"x{i}[i]" for i in range(inputs))
    return function(f"{name}{'f' if dtype == 'float32' else ''}({arguments})", dtype, inputs=inputs)
