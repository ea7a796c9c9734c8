"""Intrinsics for kernels of noise on the CPU: random words, sums of their values, and the sizes of tiles and batches.

Sums and random words lie in tables in the function's stack. Values of bits and bytes are in vectors of one width; LLVM
cuts them to the processor's. Normal numbers come from scalar instructions; LLVM joins them to vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..common.constants import DOUBLE, SINGLE
from ..common.noise import RECORD
from .lanes import Real, Unit, fma
from .random import BLOCKS, constant, generated, normal_pair, spread
from .words import intrinsic_word as intrinsic
from .words import made_once
from .words import pointer_of as pointer

#: The elements that one call of `add_<values>` adds to.
ADDED = {"rademacher": 32, "popcount": 32, "normal": 2}


def _room() -> Any:
    """`room(n)`: the address of n bytes of the stack, valid until the function returns; n is a literal."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, kinds: Any, _: Any) -> Any:
        # Outside of loops: inside one, each turn would take more of the stack.
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), kinds[0].literal_value))
            memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return intrinsic(1, lambda count: types.int64 if isinstance(count, types.IntegerLiteral) else None, generate)


def _make_words() -> Any:
    """`make_words(at, noise, pair, block)`: the words of eight blocks from `block` on, a multiple of eight."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> None:
        at, noise, pair, block = values
        whole = ir.IntType(64)
        lanes = ir.Constant(ir.VectorType(whole, BLOCKS), [ir.Constant(whole, lane) for lane in range(BLOCKS)])
        low = builder.and_(block, ir.Constant(whole, 0xFFFFFFFF))
        high = builder.add(_entry(builder, noise, HIGH), builder.lshr(block, ir.Constant(whole, 32)))
        counter = builder.add(spread(builder, low, BLOCKS), lanes), high, pair, _entry(builder, noise, STEP)
        generated_words = generated(builder, counter, [_entry(builder, noise, KEY + i) for i in range(2)])
        builder.store(generated_words, pointer(builder, at, ir.Constant(whole, 0), generated_words.type), align=8)

    return intrinsic(4, lambda at, noise, pair, block: types.void, generate)


def _entry(builder: Any, record: Any, index: int) -> Any:
    """A word of a record. It is constant during a kernel, so LLVM may read it once for a whole loop."""
    from llvmlite import ir

    whole = ir.IntType(64)
    value = builder.load(pointer(builder, record, ir.Constant(whole, index), whole))
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _add(generate: Any) -> Any:
    """`add_<values>(sums, i, words, weight)`: group i of sums grows by the weight times the values of its words."""
    from numba import types

    def signature(sums: Any, index: Any, words: Any, weight: Any) -> Any:
        return types.void if isinstance(weight, types.Float) else None

    return intrinsic(4, signature, generate)


def _rademacher(builder: Any, _: Any, values: Any) -> None:
    """Adds to 32 elements, one for each bit of a word: the weight, or minus the weight where the bit is set."""
    from llvmlite import ir

    sums, index, words, weight = values
    word = builder.load(pointer(builder, words, index, ir.IntType(32)))
    bits = builder.bitcast(word, ir.VectorType(ir.IntType(1), 32))
    signed = builder.select(bits, spread(builder, builder.fneg(weight), 32), spread(builder, weight, 32))
    where = pointer(builder, sums, index, signed.type)
    builder.store(builder.fadd(builder.load(where, align=64), signed), where, align=64)


def _popcount(builder: Any, _: Any, values: Any) -> None:
    """Adds to 32 elements, one for each byte: the weight times (set bits - 4), exact for a short weight."""
    from llvmlite import ir

    sums, index, words, weight = values
    octets = ir.VectorType(ir.IntType(8), 32)
    loaded = builder.load(pointer(builder, words, index, octets), align=8)
    count = builder.module.globals.get("llvm.ctpop.v32i8")
    count = count or ir.Function(builder.module, ir.FunctionType(octets, [octets]), "llvm.ctpop.v32i8")
    whole = builder.sext(builder.sub(builder.call(count, [loaded]), constant(octets, 4)), _wide(ir.IntType(32)))
    # The product is exact, so a fused multiply-add gives the same bits.
    product = builder.fmul(builder.sitofp(whole, _wide(weight.type)), spread(builder, weight, 32), flags=("contract",))
    where = pointer(builder, sums, index, product.type)
    builder.store(builder.fadd(builder.load(where, align=64), product, flags=("contract",)), where, align=64)


def _wide(element: Any) -> Any:
    from llvmlite import ir

    return ir.VectorType(element, 32)


def _normal(builder: Any, kinds: Any, values: Any) -> None:
    """Adds to two elements from two words, each by a fused multiply-add."""
    from llvmlite import ir

    sums, index, words, weight = values
    unit = Unit(builder, SINGLE if kinds[3].bitwidth == 32 else DOUBLE)
    first = builder.shl(index, ir.Constant(ir.IntType(64), 1))
    places = first, builder.or_(first, ir.Constant(ir.IntType(64), 1))
    pair = normal_pair(unit, *(builder.load(pointer(builder, words, i, ir.IntType(32))) for i in places))
    for i, value in zip(places, pair, strict=True):
        where = pointer(builder, sums, i, unit.real_type)
        builder.store(fma(value, Real(unit, weight), Real(unit, builder.load(where))).value, where)


#: The makers of words, for `from rulec_backends.cpu.noise_words import room`.
WORDS: Mapping[str, Callable[[], Any]] = {
    "room": _room, "make_words": _make_words, "add_rademacher": partial(_add, _rademacher),
    "add_popcount": partial(_add, _popcount), "add_normal": partial(_add, _normal),
}  # fmt: skip

NAMES = frozenset(WORDS)

__getattr__ = made_once(__name__, WORDS)


#: Positions in a record. Each direction has two words: its number, and its weight as a float64.
DIRECTIONS, COUNT, HIGH, STEP, OFFSET = (
    RECORD.index(name) for name in ("directions", "count", "high", "step", "offset")
)
KEY = RECORD.index("seed")  # the first of two words

#: Elements of a tile, the part of a gradient in memory at a time: with its random words it fits in the nearest cache,
#: and leaves room there.
TILE = 2048

#: Words made together, and the elements that they serve, by kind of values.
BATCH_WORDS = 32
BATCH = {"raw": 32, "normal": 32, "rademacher": 1024, "popcount": 128}
