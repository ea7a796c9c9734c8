"""The layout of a kernel: the storage dtype of each buffer, fixed when the kernel is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rulec.compiler.ir import Buffer, Program, verify
from rulec.compiler.rereads import choose_rereads
from rulec.language.node import Op, walk

#: Storage dtype of parameters, gradients and states, by our name -> its size in bytes.
ITEM_SIZE: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layout:
    """The storage dtype of each buffer, in the program's order of buffers.

    With `maximize`, gradients point uphill and are negated as they are loaded. With `transposed`, the rows of the
    rule's matrices are the columns in memory.
    """

    dtypes: tuple[tuple[str, str], ...]
    maximize: bool = False
    transposed: bool = False

    def dtype(self, buffer: str) -> str:
        """The storage dtype of a buffer."""
        return dict(self.dtypes)[buffer]

    @property
    def compute(self) -> str:
        """The dtype of arithmetic, scratch and vectors: float64 where any buffer has it, otherwise float32."""
        return "float64" if any(d == "float64" for _, d in self.dtypes) else "float32"

    def of(self, program: Program) -> Layout:
        """The layout of another version of the program: with the same states, and scratch of its own."""
        known = dict(self.dtypes)
        dtypes = tuple((b.name, known.get(b.name, self.compute)) for b in array_buffers(program))
        return replace(self, dtypes=dtypes)

    def text(self) -> str:
        """The layout in one line, for messages and file names."""
        short = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
        words = [f"{b}:{short[d]}" for b, d in self.dtypes]
        return " ".join(words + ["maximize"] * self.maximize + ["transposed"] * self.transposed)


def layout_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
    transposed: bool = False,
) -> Layout:
    """The layout for parameters of dtype `param`: gradients, states and inputs have the same unless said otherwise."""
    chosen = {"p": param, "g": grad or param, **(states or {})}
    stored = [b for b in array_buffers(program) if b.role != "scratch"]
    dtypes = [(b.name, chosen.get(b.name, param)) for b in stored]
    compute = Layout(tuple(dtypes)).compute
    dtypes += [(b.name, compute) for b in kernel_buffers(program) if b.role == "scratch"]
    return Layout(tuple(dtypes), maximize, transposed)


class Kernel(NamedTuple):
    """A program that moves the fewest bytes in its layout, and the layout with its scratch buffers."""

    program: Program
    layout: Layout


def scheduled(program: Program, layout: Layout) -> Kernel:
    """The program after the pass `choose_rereads`, the one pass that depends on the layout."""
    sizes = {buffer: ITEM_SIZE[dtype] for buffer, dtype in layout.dtypes}
    best = verify(choose_rereads(program, sizes, ITEM_SIZE[layout.compute]), "choose_rereads")
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


def traffic(program: Program, layout: Layout) -> tuple[int, int]:
    """The bytes read and written for each element over all stages: the measure of a kernel's speed."""
    read = written = 0
    pointers = {b.name for b in kernel_buffers(program)}
    for stage in program.stages:
        loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        read += sum(ITEM_SIZE[layout.dtype(b)] for b in loads & pointers)
        read += sum(ITEM_SIZE[layout.compute] for name in stage.reads if program.result(name).axes.elementwise)
        written += sum(ITEM_SIZE[layout.dtype(s.buffer)] for s in stage.stores)
    return read, written


def kernel_buffers(program: Program) -> list[Buffer]:
    """The buffers with a pointer in a kernel, in order: those of the parameter's shape."""
    return [b for b in program.buffers if b.axes.elementwise]


def array_buffers(program: Program) -> list[Buffer]:
    """The buffers with an array for each tensor: of its shape, of its rows or columns, or of a shape of their own.

    The other buffers are single numbers for a tensor, a group or the model.
    """
    return [b for b in program.buffers if {"b", "i", "j"} & set(b.axes.letters)]


def is_viewed(program: Program) -> bool:
    """Whether a program sees tensors as matrices: then they must be contiguous in memory."""
    kept = any({"b", "i", "j"} & set(b.axes.letters) and not b.axes.elementwise for b in program.buffers)
    scratch = any(b.role == "scratch" for b in program.buffers)
    return bool(kept or scratch or program.vectors) or is_shaped(program)


def is_shaped(program: Program) -> bool:
    """Whether a kernel must know the row and column of an element."""
    reduced = [r.axes.letters for stage in program.stages for r in stage.reduces]
    read = [v.axes.letters for v in program.vectors if not v.axes.elementwise]
    return any({"b", "i", "j"} & set(letters) for letters in reduced + read)
