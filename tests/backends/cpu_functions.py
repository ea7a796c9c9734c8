"""A kernel of one function, for tests: `out[i] = f(x[i], ...)` through the same words and compiler as every kernel."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rulec_backends.cpu import machine as cpu_machine
from rulec_backends.cpu.words import FUNCTIONS

Array = np.ndarray[Any, Any]

_SOURCE = """\
from rulec_backends.cpu.words import compiled, float32, float64, load_{read}, store_{write}, word{names}


@compiled
def kernel(job):
    {pointers}
    for i in range(word(job, 0)):
        {loads}
        store_{write}(out_at, i, 0, {expression})
"""


@functools.cache
def assembly_text(expression: str, names: tuple[str, ...], read: str, write: str, inputs: int) -> str:
    """LLVM assembly of the kernel, optimised."""
    pointers = [f"x{i}_at = word(job, {i + 1})" for i in range(inputs)] + [f"out_at = word(job, {inputs + 1})"]
    loads = [f"x{i} = load_{read}(x{i}_at, i, {i + 1})" for i in range(inputs)]
    source = _SOURCE.format(
        read=read, write=write, names="".join(f", {n}" for n in names), expression=expression,
        pointers="\n    ".join(pointers), loads="\n        ".join(loads),
    )  # fmt: skip
    return cpu_machine.compile_text(source, Path(f"{'_'.join(names)}.py"))


def function(
    expression: str, names: tuple[str, ...], read: str, write: str | None = None, inputs: int = 1
) -> Callable[..., Array]:
    """The expression of `x0`, `x1`, ... as a function of arrays stored as `read`; the result is stored as `write`.

    16-bit formats are NumPy arrays of uint16: their bits.
    """
    write = write or read
    machine = cpu_machine.ObjectCode(cpu_machine.emit_object(assembly_text(expression, names, read, write, inputs)))
    dtype = {"float32": np.float32, "float64": np.float64}.get(write, np.uint16)

    def call(*arrays: Array) -> Array:
        out = np.zeros(arrays[0].size, dtype)
        words = [out.size, *(a.ctypes.data for a in arrays), out.ctypes.data]
        job = (ctypes.c_int64 * len(words))(*words)
        machine.run(ctypes.addressof(job))
        return out

    return call


def elementary(name: str, dtype: str) -> Callable[..., Array]:
    """A word of one or two numbers as a function of arrays."""
    inputs = len(inspect.signature(FUNCTIONS[name]).parameters)
    return function(f"{name}({', '.join(f'x{i}' for i in range(inputs))})", (name,), dtype, inputs=inputs)
