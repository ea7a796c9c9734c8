"""Storage of weights in 16 bits that train as weights in 32: split, master, Kahan and stochastic rounding.

A kind of weights is storage, not mathematics. The program of a rule reads the parameter as an expression of its arrays
in memory, and stores the new parameter in these. All else, fusion included, is as for other programs.

    split       bfloat16, and an int16: the ulps of float32 from it to the weight. The weight is an exact float32.
    split24     bfloat16, and an int8: the same in units of 256 ulps. The weight has 16 significant bits.
    master      bfloat16 or float16, and a copy in float32. The copy counts while the parameter is the copy rounded.
                If steps alone write the parameter, the copy always counts, and no step reads the parameter.
    kahan       bfloat16, and a bfloat16: the loss of the last rounding.
    stochastic  bfloat16 alone, with stochastic rounding. The mean of many steps is right.

A state can have stochastic rounding too. The step goes on with its new value as it was before the rounding.

Saved weights of one kind load as weights of another: the memory beside a parameter is computed from that of the other
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rulec.compiler.ir import Axes, Buffer, Memory, Program, Store, axes_of_letters
from rulec.compiler.scalars import evaluate_once
from rulec.errors import StateMismatch
from rulec.language.expr.node import WORDS, Node, Op, const, node, rewrite

#: The dtypes of parameters that each kind is for.
DTYPES: Mapping[str, tuple[str, ...]] = {
    "split": ("bfloat16",), "split24": ("bfloat16",), "master": ("bfloat16", "float16"), "kahan": ("bfloat16",),
    "stochastic": ("bfloat16",),
}  # fmt: skip

_P = node(Op.LOAD, "p")
_HALF = const(0x8000)


@dataclass(frozen=True)
class Part:
    """The memory beside a parameter: its name among the states, its dtype, and its first value."""

    name: str
    dtype: str
    init: Node

    @property
    def value(self) -> Node:
        """The value before a step."""
        return node(Op.LOAD, self.name)

    @property
    def buffer(self) -> Buffer:
        """The buffer of a program."""
        return Buffer(self.name, "state", axes_of_letters("knbij"), self.init)


def is_part(name: str) -> bool:
    """Whether a state of this name lies beside a parameter."""
    return name.startswith("param::")


#: Kind -> the memory beside a parameter.
PARTS: Mapping[str, Part] = {
    "split": Part("param::low", "int16", const(0)),
    "split24": Part("param::low8", "int8", const(0)),
    "master": Part("param::master", "float32", _P),
    "kahan": Part("param::lost", "bfloat16", const(0)),
}


def part_axes(memory: Memory) -> dict[str, Axes]:
    """The axes of the memory beside a parameter, by its name."""
    return {PARTS[memory.weights].name: axes_of_letters("knbij")} if memory.weights in PARTS else {}


def part_name(kind: str, dtype: str) -> str:
    """The name of the memory beside a parameter of this dtype, where this kind is asked for; empty for none."""
    return PARTS[kind].name if kind in PARTS and dtype in DTYPES[kind] else ""


def part_dtypes(program: Program) -> dict[str, str]:
    """The dtype of the memory beside the parameter of a program, by its name."""
    part = PARTS.get(program.memory.weights)
    return {} if part is None else {part.name: part.dtype}


def weight(memory: Memory) -> Node:
    """The value of a parameter in this memory before a step."""
    kind = memory.weights
    part = PARTS.get(kind)
    if part is None:
        return _P
    if kind == "master":
        return _unless_infinite(part.value) if memory.exclusive else _unless_changed(part.value)
    return _of_both(kind, _P, part.value)


def _of_both(kind: str, high: Node, part: Node) -> Node:
    """The weight of a parameter and the memory beside it, which is not a master copy."""
    if kind == "kahan":
        return node(Op.ADD, high, part)
    low = part if kind == "split" else node(Op.MUL, part, const(256))
    return node(Op.AWAY, high, low)


def _unless_changed(master: Node) -> Node:
    """The master copy; the parameter where someone else wrote it, such as a checkpoint of the model alone."""
    distance = node(Op.ABS, node(Op.SUB, _P, master))
    # An ulp of bfloat16, the coarser of the two dtypes, and the smallest number of float16.
    ulp = node(Op.ADD, node(Op.MUL, node(Op.ABS, master), const(2.0**-7)), const(2.0**-24))
    return node(Op.WHERE, node(Op.LE, distance, ulp), master, _P)


#: The least number that is infinite in the parameter's dtype: half an ulp above the largest one of bfloat16, else of
#: float16. `machine_eps` is 2**-7 in bfloat16.
_INFINITE = node(
    Op.WHERE, node(Op.GT, node(Op.FACT, "machine_eps"), const(2.0**-8)), const((2 - 2.0**-8) * 2.0**127),
    const((2 - 2.0**-11) * 2.0**15),
)  # fmt: skip


def _unless_infinite(master: Node) -> Node:
    """The master copy; infinity where the parameter is its rounded value and infinite. No parameter is read."""
    is_infinite = node(Op.GE, node(Op.ABS, master), _INFINITE)
    return node(Op.WHERE, is_infinite, node(Op.MUL, master, const(math.inf)), master)


def stored(memory: Memory, new: Node) -> list[Store]:
    """The stores of a new parameter in this memory."""
    kind = memory.weights
    if kind == "master":
        return [Store("p", new), Store(PARTS[kind].name, part_value(kind, new, new))]
    if not kind:
        return [Store("p", new)]
    if kind == "stochastic":
        return [Store("p", node(Op.COARSE, new, chance("p", 0, memory.places)))]
    # 128 more for `split24`: the low part is rounded up to 127 units at most.
    high = node(Op.COARSE, new, const(0x8080) if kind == "split24" else _HALF)
    return [Store("p", high), Store(PARTS[kind].name, part_value(kind, new, high))]


#: The factor of Veltkamp's splitting: `machine_eps` is 2**-23 in float32, where a number stays as it is.
_SPLITTING = node(Op.ADD, const(1), node(Op.MUL, node(Op.FACT, "machine_eps"), const(2.0**23)))


def in_memory(memory: Memory, new: Node) -> Node:
    """The weight that a step leaves in memory, where the rule's new value is `new`: rounded as its stores round it.

    A plain parameter has its own dtype. With memory beside it, the weight is of both: the float32 number itself with
    `split` and `master`.
    """
    kind = memory.weights
    if kind in ("split", "master"):
        return new
    if not kind:
        return _nearest(new)
    high = stored(memory, new)[0].value
    if kind == "stochastic":
        return high
    part = part_value(kind, new, high)
    return _of_both(kind, high, _nearest(part) if kind == "kahan" else part)


def _nearest(value: Node) -> Node:
    """A value rounded to the parameter's dtype, halves to even."""
    scaled = node(Op.MUL, _SPLITTING, value)
    return node(Op.SUB, scaled, node(Op.SUB, scaled, value))


def without_rounding(program: Program) -> Program:
    """The program for parameters in the dtype of arithmetic: memory does not round them, see `in_memory`."""
    factors = {node(Op.SCALAR, i) for i, column in enumerate(program.scalars.columns) if column.value is _SPLITTING}

    def unrounded(value: Node) -> Node:
        new = number_in_memory(value)
        return value if new is None or factors.isdisjoint(value.args[0].args) else new

    if not factors:
        return program
    known: dict[Node, Node] = {}
    stages = [
        replace(stage, reduces=tuple(replace(r, value=rewrite([r.value], unrounded, known)[0]) for r in stage.reduces))
        for stage in program.stages
    ]
    # Nothing reads the factor any more; a constant costs nothing in a step.
    columns = [replace(c, value=const(1)) if c.value is _SPLITTING else c for c in program.scalars.columns]
    return replace(program, stages=tuple(stages), scalars=replace(program.scalars, columns=tuple(columns)))


def number_in_memory(value: Node) -> Node | None:
    """The new parameter where a value is `in_memory` of it; None for another value."""
    if value.op is not Op.SUB or value.args[1].op is not Op.SUB:
        return None
    scaled, (again, new) = value.args[0], value.args[1].args
    return new if scaled is again and scaled.op is Op.MUL and new in scaled.args else None


def chance(buffer: str, draw: int, piece: tuple[str, ...] = ()) -> Node:
    """A random whole number below 2**16 for each element of a buffer.

    `draw` tells the draws of one step apart; `piece` has the facts of a part of a tensor.
    """
    words, places = ([node(Op.FACT, word) for word in names] for names in (WORDS, piece))
    # A float32 has 24 bits: of the step, those are taken.
    step, most = node(Op.STEP), const(1 << 24)
    beyond = node(Op.MUL, node(Op.FLOORDIV, step, most), most)
    return node(Op.CHANCE, node(Op.LOAD, buffer), *words, node(Op.SUB, step, beyond), const(draw), *places)


def part_value(kind: str, new: Node, high: Node) -> Node:
    """The part of a number beside its rounded value."""
    if kind == "master":
        return new
    if kind == "kahan":
        return node(Op.SUB, new, high)
    ulps = node(Op.ULPS, new, high)
    return ulps if kind == "split" else node(Op.FLOOR, node(Op.ADD, node(Op.DIV, ulps, const(256)), const(0.5)))


def unbiased(memory: Memory, state: str, new: Node, place: int) -> Store:
    """The store of a state that is rounded at random; `place` is its place among the states of the rule.

    Draw 0 of a step is the parameter's. The draw of a state does not depend on the storage of other states.
    """
    return Store(state, node(Op.COARSE, new, chance(state, place + 1, memory.places)))


def with_memory(program: Program, memory: Memory) -> Program:
    """The program in this memory, with what lies beside its parameter among its buffers."""
    part = PARTS.get(memory.weights)
    buffers = program.buffers if part is None else (*program.buffers, part.buffer)
    memory = replace(memory, unbiased=memory.unbiased & {b.name for b in program.states})
    return replace(program, buffers=buffers, memory=memory)


Array = np.ndarray[Any, Any]

#: The name of the memory beside a parameter -> the kind of weights.
KINDS = {part.name: kind for kind, part in PARTS.items()}


def reweighed(
    saved: Mapping[str, Any], wanted: Collection[str], parameter: Callable[[], Array], part: Callable[[Any], Array],
    owner: str,
) -> dict[str, Any]:  # fmt: skip
    """Saved states of the parameter `owner`, with the wanted part of its weight made of the part of another kind.

    `wanted` are the names of the states here. `parameter` gives the parameter's values in float32, and `part` those of
    a saved part. If one of the two kinds has no part, the parameter alone counts. StateMismatch for a part of
    another shape.
    """
    before = [name for name in saved if is_part(name) and name not in wanted]
    after = [name for name in wanted if is_part(name) and name not in saved]
    states = {name: value for name, value in saved.items() if name not in before}
    if before and after:
        p, beside = parameter(), np.asarray(part(saved[before[0]]), np.float32)
        if p.shape != beside.shape:
            raise StateMismatch(f"{before[0]} of {owner} was saved with shape {beside.shape}, where it has {p.shape}")
        states[after[0]] = converted(KINDS[before[0]], KINDS[after[0]], p, beside)
    return states


def converted(before: str, after: str, p: Array, part: Array) -> Array:
    """The part of a weight of the kind `after`, of a parameter and its part of the kind `before`, all in float32.

    The weight is the same float32 where the kind holds it, else the nearest that the kind holds beside the parameter. A
    `master` copy counts beside its own rounded value where the parameter is another one: it may not be loaded yet.
    """
    return part_of(after, float_of(before, p, part), _beside(part, p) if before == "master" else p)


def float_of(kind: str, p: Array, part: Array) -> Array:
    """The float32 weight of a parameter and its part; of a `master` copy the copy."""
    if kind == "master":
        return part
    return np.asarray(evaluate_once(weight(Memory(kind)), {}, {}, {"p": p, PARTS[kind].name: part}), np.float32)


def part_of(kind: str, value: Array, p: Array | None = None) -> Array:
    """The part of this kind of a float32 weight beside a parameter; where there is none, beside the weight rounded."""
    high = rounded(value) if p is None else p
    expression = part_value(kind, node(Op.LOAD, "value"), node(Op.LOAD, "p"))
    return _fitting(PARTS[kind], np.asarray(evaluate_once(expression, {}, {}, {"value": value, "p": high})))


def _beside(master: Array, p: Array) -> Array:
    """The bfloat16 number beside a master copy: the parameter within an ulp of it, else the copy rounded."""
    p = rounded(p)
    with np.errstate(invalid="ignore"):
        near = np.abs(p - master) <= np.abs(master) * np.float32(2.0**-7)
    return np.where(near, p, rounded(master))


def rounded(value: Array) -> Array:
    """Values of float32 rounded to bfloat16, halves to even. Infinities and NaN stay."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(value), nearest, value)


def _fitting(part: Part, value: Array) -> Array:
    """Values of a part in its dtype, the nearest that there are; bfloat16 in float32."""
    if not part.dtype.startswith("int"):
        return value.astype(np.float32)
    limits = np.iinfo(part.dtype)
    fitting: Array = np.clip(np.nan_to_num(value), limits.min, limits.max).astype(part.dtype)
    return fitting
