"""Further words for a kernel's entry for XLA: memory, C functions, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .words import WORDS as WORDS_OF_KERNELS
from .words import intrinsic_word as intrinsic
from .words import made_once


def _put() -> Any:
    """`put(at, i, n)`: writes n, int64 or float64 as the table, into entry i of a table."""
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> None:
        at = builder.inttoptr(values[0], values[2].type.as_pointer())
        builder.store(values[2], builder.gep(at, [values[1]], inbounds=True))

    return intrinsic(3, lambda at, index, value: types.void, generate)


def _invoke() -> Any:
    """`invoke(function, argument)`: calls the C function at an address with one pointer, and returns its pointer."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = builder.inttoptr(values[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(function, [values[1]])

    return intrinsic(2, lambda function, argument: types.int64, generate)


def _of_c(name: str, arity: int) -> Any:
    """A function of the C library from at most one word to one."""
    from llvmlite import ir
    from numba import types

    word = ir.IntType(64)

    def generate(builder: Any, _: Any, values: Any) -> Any:
        kind = ir.FunctionType(word, [word] * arity)
        known = builder.module.globals.get(name)
        return builder.call(known or ir.Function(builder.module, kind, name), list(values)[:arity])

    return intrinsic(1, lambda argument: types.int64, generate)


#: The makers of words, for `from rulec_backends.cpu.ffi_words import put`.
WORDS: Mapping[str, Callable[[], Any]] = {
    "put": _put, "real": WORDS_OF_KERNELS["number"], "invoke": _invoke, "allocate": partial(_of_c, "malloc", 1),
    "release": partial(_of_c, "free", 1),
    "pause": partial(_of_c, "sched_yield", 0),  # it takes a word as all do, and passes none on
}  # fmt: skip

__getattr__ = made_once(__name__, WORDS)
