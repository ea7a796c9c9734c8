"""The allocator of states: it lays out the states of each tensor in memory and initialises them.

Saved states are converted to the format of the tensor that gets them: codes to floats, floats to codes, codes to other
codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rulec.compiler.ir import Axes, Program
from rulec.compiler.layout import ITEM_SIZE, Layout, array_buffers, scale_name
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError, StateMismatch
from rulec.formats import Format, decode, encode, of_key
from rulec.language.expr.node import Node, Op, walk

#: The bytes of an element of a state in memory, by its dtype or the dtype of its codes.
STATE_SIZE: Mapping[str, int] = {**ITEM_SIZE, "uint8": 1}

#: Buffers begin at multiples of this many bytes: a cache line, and the widest vector.
ALIGNMENT = 64


def array_shape(
    axes: Axes, view: MatrixView, hyper: Mapping[str, float], facts: Mapping[str, float]
) -> tuple[int, ...]:  # fmt: skip
    """The shape of a state or an input in memory: the tensor's, or the tensor's with other rows or columns."""
    if axes.elementwise:
        return view.shape
    here = {**facts, "rows": view.rows, "cols": view.cols}
    rows, cols = (1 if x is None else int(evaluate_once(x, hyper, here, {})) for x in (axes.rows, axes.cols))
    return view.kept_shape(rows, cols, axes.letters)


@dataclass(frozen=True)
class StateSpec:
    """One state array of one tensor: its name, storage dtype, first value and axes."""

    name: str
    dtype: str
    init: Node
    axes: Axes

    def shape(self, view: MatrixView, hyper: Mapping[str, float], facts: Mapping[str, float]) -> tuple[int, ...]:
        """The shape in memory: the tensor's, or the tensor's with other rows or columns."""
        return array_shape(self.axes, view, hyper, facts)

    @property
    def like_parameter(self) -> bool:
        """Whether the array has the parameter's shape, and its order in memory."""
        return self.axes.elementwise

    @property
    def copies_parameter(self) -> bool:
        """Whether the first value is the parameter itself."""
        return self.init.op is Op.LOAD

    @property
    def reads_parameter(self) -> bool:
        """Whether the first value is computed from the parameter, element by element."""
        return any(n.op is Op.LOAD for n in walk([self.init]))

    def number(self, hyper: Mapping[str, float], facts: Mapping[str, float]) -> float:
        """The first value where it is one number for all elements."""
        return float(evaluate_once(self.init, hyper, facts, {}))

    def values(self, hyper: Mapping[str, float], facts: Mapping[str, float], parameter: Any) -> Any:
        """The first value of each element, in float64, from the parameter's values in float64."""
        return evaluate_once(self.init, hyper, facts, {"p": parameter})


@dataclass(frozen=True)
class CodeSpec(StateSpec):
    """The codes of a state in a format."""

    format: Format

    def shape(self, view: MatrixView, hyper: Mapping[str, float], facts: Mapping[str, float]) -> tuple[int, ...]:
        """The parameter's shape, or one dimension where a byte has several codes."""
        return self.format.codes_shape(view.shape)

    @property
    def like_parameter(self) -> bool:
        """Whether a byte has one code."""
        return self.format.bits == 8

    def number(self, hyper: Mapping[str, float], facts: Mapping[str, float]) -> float:
        """The byte of codes of the first value."""
        return float(_encoded(self, hyper, facts)[0][0])


@dataclass(frozen=True)
class ScaleSpec(StateSpec):
    """The scales of a state in a format: float32, one for each block."""

    format: Format

    def shape(self, view: MatrixView, hyper: Mapping[str, float], facts: Mapping[str, float]) -> tuple[int, ...]:
        """One dimension, with a scale for each block."""
        return (self.format.scales(math.prod(view.shape)),)

    @property
    def like_parameter(self) -> bool:
        """False: one scale is for a block."""
        return False

    def number(self, hyper: Mapping[str, float], facts: Mapping[str, float]) -> float:
        """The scale of the first value."""
        return float(_encoded(self, hyper, facts)[1][0])


def _encoded(spec: CodeSpec | ScaleSpec, hyper: Mapping[str, float], facts: Mapping[str, float]) -> tuple[Any, Any]:
    """The codes and scales of the first value of a state, one number for all elements."""
    return encode(spec.format, np.full(8 // spec.format.bits, StateSpec.number(spec, hyper, facts), np.float32))


def state_specs(program: Program, layout: Layout) -> list[StateSpec]:
    """The arrays of states for each tensor, in the program's order; a quantized state is two."""
    specs: list[StateSpec] = []
    for buffer in array_buffers(program):
        if buffer.role == "state":
            if buffer.init is None:
                raise InternalError(f"state {buffer.name} of {program.name} has no initial value")
            specs += _specs(buffer.name, buffer.init, buffer.axes, layout)
    return specs


def _specs(name: str, init: Node, axes: Axes, layout: Layout) -> list[StateSpec]:
    """The arrays of one state."""
    form = layout.format(name)
    if form is None:
        return [StateSpec(name, layout.dtype(name), init, axes)]
    return [
        CodeSpec(name, form.code_dtype, init, axes, form),
        ScaleSpec(scale_name(name), "float32", init, axes, form),
    ]


@dataclass(frozen=True)
class Slot:
    """A range of bytes of an arena: one state of one tensor."""

    tensor: int
    name: str
    offset: int
    size: int


def plan_arena(specs: Sequence[StateSpec], element_counts: Sequence[Sequence[int]]) -> tuple[list[Slot], int]:
    """The place of each state of each tensor in one arena, tensor by tensor, and the arena's size in bytes.

    `element_counts` has for each tensor the number of elements of each state. Every slot is aligned. InternalError
    where two overlap.
    """
    slots: list[Slot] = []
    end = 0
    for tensor, counts in enumerate(element_counts):
        for spec, count in zip(specs, counts, strict=True):
            offset = math.ceil(end / ALIGNMENT) * ALIGNMENT
            slots.append(Slot(tensor, spec.name, offset, count * STATE_SIZE[spec.dtype]))
            end = slots[-1].offset + slots[-1].size
    for before, after in pairwise(slots):
        if before.offset + before.size > after.offset:
            raise InternalError(f"states {before} and {after} overlap")
    return slots, end


def aligned_bytes(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised memory of this many bytes that begins at a multiple of `ALIGNMENT`."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


#: The suffix of a name after the name of a quantized state.
_SCALE = scale_name("")

Array = np.ndarray[Any, Any]


def formats_of(keys: Mapping[str, str], saved: Mapping[str, Any], tensor: str) -> dict[str, Format]:
    """The formats of one tensor's saved quantized states: those with scales. `keys` has the formats' keys by state.

    StateMismatch where the saved state has scales, and nothing says the format of their codes.
    """
    coded = [name.removesuffix(_SCALE) for name in saved if name.endswith(_SCALE)]
    for name in coded:
        if name not in keys:
            raise StateMismatch(
                f"{name} of {tensor} was saved in codes, and the saved groups do not say in which format: save it again"
            )
    return {name: of_key(keys[name]) for name in coded}


def recoded(
    saved: Mapping[str, Array], before: Mapping[str, Format], after: Mapping[str, Format], shape: tuple[int, ...],
    tensor: str,
) -> dict[str, Array]:  # fmt: skip
    """The saved states of a tensor of this shape: those in the formats `before` in the formats `after`.

    A state in neither is as it was saved. StateMismatch for codes or scales of another shape.
    """
    arrays = dict(saved)
    for name in {*before, *after} & saved.keys():
        if before.get(name) == after.get(name):
            continue
        values = _values(arrays, name, before.get(name), shape, tensor)
        if name in after and values.shape == shape:
            arrays[name], arrays[scale_name(name)] = encode(after[name], values)
        else:
            arrays[name] = values
    return arrays


def _values(arrays: dict[str, Array], name: str, form: Format | None, shape: tuple[int, ...], tensor: str) -> Array:
    """The values of a state in C order. The arrays lose its scales."""
    if form is None:
        return np.ascontiguousarray(arrays[name])
    codes, scales = np.ascontiguousarray(arrays[name]), np.ascontiguousarray(arrays.pop(scale_name(name)))
    wanted = form.codes_shape(shape), (form.scales(int(np.prod(shape, dtype=np.int64))),)
    if (codes.shape, scales.shape) != wanted:
        raise StateMismatch(
            f"{name} of {tensor} was saved as codes of shape {codes.shape} with scales of shape {scales.shape}, where "
            f"{form.text} has {wanted[0]} and {wanted[1]}"
        )
    return decode(form, codes.view(form.code_dtype), scales, shape)
