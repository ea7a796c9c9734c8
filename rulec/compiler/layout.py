"""The layout of a kernel: the storage dtype of each buffer, fixed when the kernel is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rulec.compiler.decoded import decoded_between
from rulec.compiler.ir import Buffer, Program, verify
from rulec.compiler.rereads import choose_rereads
from rulec.compiler.weights import part_dtypes
from rulec.formats import UNBIASED, Format
from rulec.language.expr.node import Op, walk

#: Storage dtype of an element, by our name -> its size in bytes. Integers are for parts of weights.
ITEM_SIZE: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}

#: The storage dtypes of parameters, gradients and states.
FLOATS = ("float32", "float64", "bfloat16", "float16")

#: The words for the storage of a state that name no format of codes.
PLAIN_STORAGE = (*FLOATS, UNBIASED)


def scale_name(state: str) -> str:
    """The name of the scales of a state in codes, beside the name of its codes, the state's own."""
    return f"{state}::scale"


@dataclass(frozen=True)
class Layout:
    """The storage dtype of each buffer, in the program's order of buffers.

    A state in `formats` is stored in codes: a kernel decodes it to its dtype, float32, and encodes the new value. With
    `maximize`, gradients point uphill and are negated as they are loaded. With `transposed`, the rows of the
    rule's matrices are the columns in memory. `results` are the vectors that are not in the dtype of arithmetic.
    """

    dtypes: tuple[tuple[str, str], ...]
    maximize: bool = False
    transposed: bool = False
    formats: tuple[tuple[str, Format], ...] = ()
    results: tuple[tuple[str, str], ...] = ()

    def result(self, name: str) -> str:
        """The dtype of a vector in memory."""
        return dict(self.results).get(name, self.compute)

    def dtype(self, buffer: str) -> str:
        """The storage dtype of a buffer."""
        return dict(self.dtypes)[buffer]

    def format(self, buffer: str) -> Format | None:
        """The format of a state stored in codes; None for any other buffer."""
        return dict(self.formats).get(buffer)

    def size(self, buffer: str) -> float:
        """The bytes of an element of a buffer in memory; for a state in codes with its share of the scale."""
        form = self.format(buffer)
        return ITEM_SIZE[self.dtype(buffer)] if form is None else form.bits / 8 + ITEM_SIZE["float32"] / form.block

    @property
    def decoded(self) -> Layout:
        """The same layout with all states decoded."""
        return replace(self, formats=())

    @cached_property
    def compute(self) -> str:
        """The dtype of arithmetic, scratch and vectors: float64 where any buffer has it, otherwise float32."""
        return "float64" if any(d == "float64" for _, d in self.dtypes) else "float32"

    def of(self, program: Program) -> Layout:
        """The layout of another version of the program: with the same states, and scratch of its own."""
        known = dict(self.dtypes)
        dtypes = tuple((b.name, known.get(b.name, self.compute)) for b in array_buffers(program))
        return replace(self, dtypes=dtypes, results=())

    def text(self) -> str:
        """The layout in one line, for messages and file names."""
        short = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int16": "i16", "int8": "i8"}
        words = [f"{b}:{form.key if (form := self.format(b)) else short[d]}" for b, d in (*self.dtypes, *self.results)]
        return " ".join(words + ["maximize"] * self.maximize + ["transposed"] * self.transposed)


def layout_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
    transposed: bool = False,
    formats: Mapping[str, Format] | None = None,
) -> Layout:
    """The layout for parameters of dtype `param`: gradients, states and inputs have the same unless said otherwise.

    States in `formats` are stored in codes.
    """
    formats = formats or {}
    chosen = {"p": param, "g": grad or param, **(states or {}), **dict.fromkeys(formats, "float32")}
    chosen |= part_dtypes(program)
    stored = [b for b in array_buffers(program) if b.role != "scratch"]
    dtypes = [(b.name, chosen.get(b.name, param)) for b in stored]
    compute = Layout(tuple(dtypes)).compute
    dtypes += [(b.name, compute) for b in kernel_buffers(program) if b.role == "scratch"]
    return Layout(tuple(dtypes), maximize, transposed, tuple(formats.items()))


class Kernel(NamedTuple):
    """A program that moves the fewest bytes in its layout, and the layout with its scratch buffers."""

    program: Program
    layout: Layout


def scheduled(program: Program, layout: Layout, early: bool = True) -> Kernel:
    """The program after the passes that depend on the layout; `early` is for `choose_rereads`."""
    program = verify(decoded_between(program, dict(layout.formats)), "decoded_between")
    sizes = {buffer: layout.size(buffer) for buffer, _ in layout.dtypes}
    best = verify(choose_rereads(program, sizes, ITEM_SIZE[layout.compute], early), "choose_rereads")
    return Kernel(best, layout.of(best))


def kernel_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
    transposed: bool = False,
) -> Kernel:
    """The program and layout for parameters of dtype `param`: see `layout_for`."""
    return scheduled(program, layout_for(program, param, grad, states, maximize, transposed))


def traffic(program: Program, layout: Layout) -> tuple[float, float]:
    """The bytes read and written for each element over all stages: the measure of a kernel's speed."""
    read: float = 0
    written: float = 0
    pointers = {b.name for b in kernel_buffers(program)}
    for stage in program.stages:
        loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        read += sum(layout.size(b) for b in loads & pointers)
        read += sum(ITEM_SIZE[layout.result(name)] for name in stage.reads if program.result(name).axes.elementwise)
        written += sum(layout.size(s.buffer) for s in stage.stores)
    return read, written


def kernel_buffers(program: Program) -> list[Buffer]:
    """The buffers with a pointer in a kernel, in order: those of the parameter's shape."""
    return [b for b in program.buffers if b.axes.elementwise]


def array_buffers(program: Program) -> list[Buffer]:
    """The buffers with an array for each tensor: of its shape, of its rows or columns, or of a shape of their own.

    The other buffers are single numbers for a tensor, a group or the model.
    """
    return [b for b in program.buffers if not b.axes.number]


def is_viewed(program: Program) -> bool:
    """Whether a program sees tensors as matrices, or the places of elements: then they must be contiguous in memory."""
    kept = any(not b.axes.number and not b.axes.elementwise for b in program.buffers)
    scratch = any(b.role == "scratch" for b in program.buffers)
    return bool(kept or scratch or program.vectors) or is_shaped(program) or has_chance(program)


def has_chance(program: Program) -> bool:
    """Whether random bits of an element follow from its place in its tensor."""
    values = [*(root for stage in program.stages for root in stage.roots), *program.between]
    return any(n.op is Op.CHANCE for n in walk(values))


def is_shaped(program: Program) -> bool:
    """Whether a kernel must know the row and column of an element."""
    reduced = [r.axes for stage in program.stages for r in stage.reduces]
    read = [v.axes for v in program.vectors if not v.axes.elementwise]
    return any(not axes.number for axes in reduced + read)
