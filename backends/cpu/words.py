"""The words of printed kernels, as Numba intrinsics: loads, stores, elementary functions, atomics.

The functions below import Numba. They run when a kernel is compiled, and never when one is printed or loaded from the
cache. All addresses are int64, because Numba adds int64 and uint64 to a float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from inspect import signature
from typing import Any

from ..common.constants import DOUBLE, SINGLE
from . import lanes as cpu_lanes
from . import math as cpu_math
from . import storage as cpu_storage
from .lanes import Real, Truth, Unit

#: Functions of reals of one format, by their names in kernels.
FUNCTIONS: dict[str, Callable[..., Real | Truth]] = {
    "sqrt": cpu_lanes.sqrt,
    "rsqrt": cpu_math.rsqrt,
    "cbrt": cpu_math.cbrt,
    "magnitude": abs,
    "exp": cpu_math.exp,
    "expm1": cpu_math.expm1,
    "hypot": cpu_math.hypot,
    "log": cpu_math.log,
    "log1p": cpu_math.log1p,
    "tanh": cpu_math.tanh,
    "sigmoid": cpu_math.sigmoid,
    "erf": cpu_math.erf,
    "floor": cpu_lanes.floor,
    "sign": cpu_math.sign,
    "isfinite": cpu_math.isfinite,
    "ordinary": cpu_storage.ordinary,
    "inverse": cpu_math.inverse,
    "inverse_square": cpu_math.inverse_square,
    "root": cpu_math.root,
    "inverse_root": cpu_math.inverse_root,
    "power": cpu_math.power,
    "minimum": cpu_math.minimum,
    "maximum": cpu_math.maximum,
    "remainder": cpu_math.remainder,
    "away": cpu_storage.away,
    "ulps": cpu_storage.ulps,
    "coarse": cpu_storage.coarse,
}

_Signature = Callable[..., Any]  # the types of the arguments -> the type of the result, or None where they do not fit
_Generate = Callable[..., Any]  # the builder, the types and the LLVM values of the arguments -> the LLVM value


def made_once(module: str, words: Mapping[str, Callable[[], Any]]) -> Callable[[str], Any]:
    """The `__getattr__` of a module of words. Each word is made at its first import, so printing needs no Numba."""

    @cache
    def word(name: str) -> Any:
        if name not in words:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return words[name]()

    return word


def of_numba(name: str) -> Any:
    """A type of Numba."""
    import numba

    return getattr(numba, name)


def _compiled(inlined: bool = False) -> Any:
    """The decorator of a kernel's functions; `inlined` of those whose text takes the place of their calls."""
    from .target import compiled

    # No contraction, no reassociation: a kernel's bits are those of its text. Divisions by zero are IEEE's.
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": inlined}
    return compiled(options)


def intrinsic_word(arity: int, signature: _Signature, generate: _Generate) -> Any:
    """A word of `arity` arguments."""
    from numba.core.typing.templates import Signature
    from numba.extending import intrinsic

    def define(*types: Any) -> Any:
        result = signature(*types)
        if result is None:
            return None

        def emit(context: Any, builder: Any, _: Any, values: Any) -> Any:
            value = generate(builder, types, values)
            return context.get_dummy_value() if value is None else value

        return Signature(result, types, None), emit  # type: ignore[no-untyped-call]

    # Numba reads the number of arguments from the signature of the function.
    shapes: dict[int, Callable[..., Any]] = {
        0: lambda context: define(),
        1: lambda context, a: define(a),
        2: lambda context, a, b: define(a, b),
        3: lambda context, a, b, c: define(a, b, c),
        4: lambda context, a, b, c, d: define(a, b, c, d),
        5: lambda context, a, b, c, d, e: define(a, b, c, d, e),
        7: lambda context, a, b, c, d, e, f, g: define(a, b, c, d, e, f, g),
    }
    return intrinsic(prefer_literal=True)(shapes[arity])


def _function(formula: Callable[..., Real | Truth], arity: int) -> Any:
    from numba import types

    def signature(*kinds: Any) -> Any:
        if not isinstance(kinds[0], types.Float) or len(set(kinds)) != 1:
            return None
        return types.boolean if formula is cpu_math.isfinite else kinds[0]

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        unit = _unit(builder, kinds[0])
        return formula(*(Real(unit, v) for v in values)).value

    return intrinsic_word(arity, signature, generate)


def _chance() -> Any:
    """`chance(i, first, *words)`: the random number of element i of a loop from element `first` on."""
    from numba import types

    def signature(place: Any, first: Any, *words: Any) -> Any:
        return words[0] if place == first == types.int64 and len({*words}) == 1 else None

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        return cpu_storage.chance(_unit(builder, kinds[2]), values[0], values[1], values[2:]).value

    return intrinsic_word(7, signature, generate)


def _place(formula: Callable[..., Any], arity: int) -> Any:
    """`in_range(i, *words)`: the place in a whole tensor of element i of a part."""
    from numba import types

    def signature(place: Any, *words: Any) -> Any:
        return place if place == types.int64 and len({*words}) == 1 else None

    return intrinsic_word(arity, signature, lambda builder, _, values: formula(builder, *values))


def _where() -> Any:
    from numba import types

    def signature(condition: Any, a: Any, b: Any) -> Any:
        return a if condition == types.boolean and a == b else None

    return intrinsic_word(3, signature, lambda builder, _, values: builder.select(*values))


def pointer_of(builder: Any, address: Any, index: Any, element: Any) -> Any:
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index], inbounds=True)


def _peek(name: str) -> Any:
    """`word(at, i)` and `number(at, i)`: entry i of a table of int64 or float64."""
    from llvmlite import ir
    from numba import types

    element = ir.IntType(64) if name == "int64" else ir.DoubleType()

    def generate(builder: Any, _: Any, values: Any) -> Any:
        return builder.load(pointer_of(builder, values[0], values[1], element))

    return intrinsic_word(2, lambda at, index: getattr(types, name), generate)


def _accumulate() -> Any:
    """`accumulate(total, x)`: adds one number to a sum at least as wide, in an order that lets LLVM vectorise the loop.

    Only sums may be reassociated. The partial sums of a loop follow from its length alone.
    """

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        total, value = values
        wide = value if kinds[0] == kinds[1] else builder.fpext(value, total.type)
        return builder.fadd(total, wide, flags=("reassoc",))

    return intrinsic_word(2, _joins, generate)


def _accumulate_product() -> Any:
    """`accumulate_product(total, a, b)`: adds a product to a sum of its width, rounded once or twice."""
    from llvmlite import ir

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        total, *factors = values
        kind = ir.FunctionType(total.type, [total.type] * 3)
        function = builder.module.declare_intrinsic("llvm.fmuladd", [total.type], kind)
        return builder.call(function, [*factors, total], fastmath=("reassoc",))

    return intrinsic_word(3, lambda *kinds: kinds[0] if len({*kinds}) == 1 else None, generate)


def _counted() -> Any:
    """`counted(total, condition)`: a number of 32 bits, and one more where the condition holds."""
    from numba import types

    def signature(total: Any, condition: Any) -> Any:
        return total if total == types.int32 and condition == types.boolean else None

    def generate(builder: Any, _: Any, values: Any) -> Any:
        total, condition = values
        return builder.add(total, builder.zext(condition, total.type))

    return intrinsic_word(2, signature, generate)


def _joins(total: Any, value: Any) -> Any:
    """The type of a total that takes in one more number, no wider than itself; None where it does not."""
    from numba import types

    floats = isinstance(total, types.Float) and isinstance(value, types.Float)
    return total if floats and value.bitwidth <= total.bitwidth else None


def _extreme(name: str) -> Any:
    """`lowest(best, x)` and `highest(best, x)`: the better of two, NaN where either is; as wide as `best`."""
    from llvmlite import ir

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        best, value = values
        kind = best.type
        if kinds[0] != kinds[1]:
            value = builder.fpext(value, kind)
        function = builder.module.declare_intrinsic(f"llvm.{name}", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, [best, value])

    return intrinsic_word(2, _joins, generate)


def _fetch_add() -> Any:
    """`fetch_add(at, n)`: adds n to the int64 at an address, atomically, and returns the old number."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return intrinsic_word(2, lambda at, count: types.int64, generate)


def _fetch_line() -> Any:
    """`fetch_line(at, offset)`: has a line of memory fetched that is read soon, and goes on; of any address."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> Any:
        byte, whole = ir.IntType(8), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), whole, whole, whole])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte.as_pointer()], kind)
        hints = [ir.Constant(whole, hint) for hint in (0, 3, 1)]
        builder.call(function, [pointer_of(builder, values[0], values[1], byte), *hints])

    return intrinsic_word(2, lambda at, offset: types.void, generate)


#: The attribute of a function whose loops are interleaved: of no meaning to LLVM, which keeps it in its assembly.
INTERLEAVED = "rulec-interleaved"


def _attribute(name: str, arity: int = 0) -> Any:
    """A word for an attribute of the function around it, with a number or without.

    `vector_bits(n)`: the vectors of its loops have so many bits, where the processor has such registers.
    `interleaved()`: its loops compute several vectors side by side: see `cpu.machine`.
    """
    from numba import types

    def generate(builder: Any, kinds: Any, _: Any) -> None:
        text = f'"{name}"' + "".join(f'="{kind.literal_value}"' for kind in kinds)
        # Inside of a caller, loops would have the caller's attributes. LLVM's texts know more than llvmlite does.
        set.update(builder.function.attributes, ["noinline", text])

    return intrinsic_word(arity, lambda *_: types.void, generate)


def _popcount() -> Any:
    """`popcount(word)`: the number of set bits of an int64; one instruction, also of vectors, on newer processors."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, values: Any) -> Any:
        kind = ir.IntType(64)
        function = builder.module.declare_intrinsic("llvm.ctpop", [kind], ir.FunctionType(kind, [kind]))
        return builder.call(function, [values[0]])

    return intrinsic_word(1, lambda word: types.int64 if word == types.int64 else None, generate)


def _element(storage: str, as_bits: bool) -> Any:
    """The LLVM type for moving an element."""
    from llvmlite import ir

    kind = cpu_storage.memory_type(storage)
    return ir.IntType({"float64": 64, "float32": 32, "int8": 8}.get(storage, 16)) if as_bits else kind


def _load(storage: str, as_bits: bool) -> Any:
    """`load_<storage>(at, i, buffer)`: element i as a float64 if stored as one, else a float32.

    `load_bits_<storage>(at, i, buffer)`: its bits as an int64.
    """
    from llvmlite import ir
    from numba import types

    result = types.int64 if as_bits else types.float64 if storage == "float64" else types.float32

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        element = builder.load(pointer_of(builder, values[0], values[1], _element(storage, as_bits)), align=1)
        _tell_apart(builder, element, kinds[2].literal_value)
        return builder.zext(element, ir.IntType(64)) if as_bits else cpu_storage.widen(builder, element, storage)

    return intrinsic_word(3, lambda at, index, buffer: result, generate)


def _store(storage: str, as_bits: bool) -> Any:
    """`store_<storage>(at, i, buffer, value)`: writes a value into element i, rounded as in `cpu.storage`.

    `store_bits_<storage>(at, i, buffer, bits)`: writes the low bits of an int64.
    """
    from numba import types

    def signature(at: Any, index: Any, buffer: Any, value: Any) -> Any:
        return types.void if as_bits or isinstance(value, types.Float) else None

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        element = _element(storage, as_bits)
        if as_bits:
            narrow = builder.trunc(values[3], element)
        else:
            narrow = cpu_storage.narrow(Real(_unit(builder, kinds[3]), values[3]), storage)
        pointer = pointer_of(builder, values[0], values[1], element)
        _tell_apart(builder, builder.store(narrow, pointer, align=1), kinds[2].literal_value)

    return intrinsic_word(4, signature, generate)


def _half(upper: bool) -> Any:
    """`lower_bfloat16(at, i, buffer)`, `upper_bfloat16(...)`: elements 2i and 2i + 1 as float32, from one word."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        pair = builder.load(pointer_of(builder, values[0], values[1], ir.IntType(32)), align=1)
        _tell_apart(builder, pair, kinds[2].literal_value)
        return cpu_storage.half(builder, pair, upper)

    return intrinsic_word(3, lambda at, index, buffer: types.float32, generate)


def _store_two() -> Any:
    """`store_two_bfloat16(at, i, buffer, lower, upper)`: writes floats into elements 2i and 2i + 1, as one word."""
    from llvmlite import ir
    from numba import types

    def signature(at: Any, index: Any, buffer: Any, lower: Any, upper: Any) -> Any:
        return types.void if lower == upper == types.float32 else None

    def generate(builder: Any, kinds: Any, values: Any) -> Any:
        unit = _unit(builder, kinds[3])
        pair = cpu_storage.joined(*(Real(unit, value) for value in values[3:]))
        pointer = pointer_of(builder, values[0], values[1], ir.IntType(32))
        _tell_apart(builder, builder.store(pair, pointer, align=1), kinds[2].literal_value)

    return intrinsic_word(5, signature, generate)


def _unit(builder: Any, kind: Any) -> Unit:
    """The instructions of one of Numba's types of floats."""
    return Unit(builder, SINGLE if kind.bitwidth == 32 else DOUBLE)


#: Buffers of one kernel that LLVM knows not to overlap; it checks further ones during the run.
_TOLD_APART = 32


def _tell_apart(builder: Any, access: Any, buffer: int) -> None:
    """Promises LLVM that buffers of different numbers do not overlap: the loop vectorises without checks."""
    module = builder.module
    if not hasattr(module, "rulec_scopes"):
        module.rulec_scopes = alias_scopes(module, "rulec", _TOLD_APART)
    if buffer < _TOLD_APART:
        scope, others = module.rulec_scopes[buffer]
        access.set_metadata("alias.scope", scope)
        access.set_metadata("noalias", others)


def alias_scopes(module: Any, name: str, count: int) -> list[tuple[Any, Any]]:
    """The metadata of accesses of each of `count` sets of memory: its scope, and the scopes of all others."""
    from llvmlite import ir

    domain = module.add_metadata([ir.MetaDataString(module, name)])
    scopes = [module.add_metadata([ir.MetaDataString(module, f"buffer {i}"), domain]) for i in range(count)]
    return [
        (module.add_metadata([scope]), module.add_metadata([s for s in scopes if s is not scope])) for scope in scopes
    ]


#: The makers of words, for `from rulec_backends.cpu.words import exp`.
WORDS: Mapping[str, Callable[[], Any]] = {
    "compiled": _compiled, "inlined": partial(_compiled, True),
    "float32": partial(of_numba, "float32"), "float64": partial(of_numba, "float64"),
    "where": _where, "chance": _chance, "in_range": partial(_place, cpu_storage.in_range, 3),
    "in_rows": partial(_place, cpu_storage.in_rows, 7),
    "vector_bits": partial(_attribute, "prefer-vector-width", 1), "interleaved": partial(_attribute, INTERLEAVED),
    "fetch_add": _fetch_add, "popcount": _popcount, "fetch_line": _fetch_line,
    "accumulate": _accumulate, "accumulate_product": _accumulate_product, "counted": _counted,
    "lower_bfloat16": partial(_half, False), "upper_bfloat16": partial(_half, True), "store_two_bfloat16": _store_two,
    "word": partial(_peek, "int64"), "number": partial(_peek, "float64"),
    "lowest": partial(_extreme, "minimum"), "highest": partial(_extreme, "maximum"),
    **{name: partial(_function, formula, len(signature(formula).parameters)) for name, formula in FUNCTIONS.items()},
    **{
        f"{way}_{bits}{storage}": partial(word, storage, bool(bits))
        for way, word in (("load", _load), ("store", _store)) for bits in ("", "bits_")
        for storage in cpu_storage.STORAGES
    },
}  # fmt: skip

NAMES = frozenset(WORDS)

__getattr__ = made_once(__name__, WORDS)
