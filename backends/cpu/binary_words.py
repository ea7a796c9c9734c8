"""The word, beside those of kernels, in which products of bits are written."""

from __future__ import annotations

import functools
from typing import Any

from .words import _intrinsic as intrinsic

#: Every word.
NAMES = frozenset({"popcount"})


def __getattr__(name: str) -> Any:
    """A word, made at its first import: `from rulec_backends.cpu.binary_words import popcount`."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return popcount_word()


@functools.cache
def popcount_word() -> Any:
    """`popcount(word)`: how many bits of an int64 are set; one instruction, of vectors too, where the processor can."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> Any:
        kind = ir.IntType(64)
        function = builder.module.declare_intrinsic("llvm.ctpop", [kind], ir.FunctionType(kind, [kind]))
        return builder.call(function, [values[0]])

    return intrinsic(1, lambda word: types.int64 if word == types.int64 else None, generate)
