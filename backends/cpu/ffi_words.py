"""Further words, for an entry for XLA and for functions that others export: memory, C functions, threads."""

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


def _c_call(result: str, arity: int) -> Any:
    """A call of the C function at an address with so many words: `invoke(function, word)`.

    `result` is what it returns: a word, a code (a C int), a truth (a C++ bool), or nothing.
    """
    from llvmlite import ir
    from numba import types

    word, bits = ir.IntType(64), {"word": 64, "code": 32, "truth": 8, "nothing": 0}[result]
    returns = ir.IntType(bits) if bits else ir.VoidType()
    kind = ir.FunctionType(returns, [word] * arity)
    numba_type = {"word": types.int64, "code": types.int64, "truth": types.boolean, "nothing": types.void}[result]

    def generate(builder: Any, _: Any, values: Any) -> Any:
        function = builder.inttoptr(values[0], kind.as_pointer())
        value = builder.call(function, [*values[1:]])
        if result == "truth":
            return builder.icmp_unsigned("!=", value, ir.Constant(returns, 0))
        return builder.sext(value, word) if result == "code" else value if bits else None

    return intrinsic(1 + arity, lambda *_: numba_type, generate)


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
    "put": _put, "real": WORDS_OF_KERNELS["number"], "allocate": partial(_of_c, "malloc", 1),
    "release": partial(_of_c, "free", 1),
    "invoke": partial(_c_call, "word", 1), "invoke_2": partial(_c_call, "word", 2),
    "code_2": partial(_c_call, "code", 2), "code_3": partial(_c_call, "code", 3),
    "code_4": partial(_c_call, "code", 4),
    "truth": partial(_c_call, "truth", 1),
    "tell": partial(_c_call, "nothing", 1),
    "pause": partial(_of_c, "sched_yield", 0),  # it takes a word as all do, and passes none on
}  # fmt: skip

__getattr__ = made_once(__name__, WORDS)
