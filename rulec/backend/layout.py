"""What a kernel is specialised for: the storage dtype of each buffer, and nothing that changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.compiler.ir import Program
from rulec.language.node import Op, walk

#: The dtypes that parameters, gradients and states may be stored in, by our names, with their size in bytes.
ITEM_SIZE: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layout:
    """The storage dtype of each buffer a kernel reads or writes, in the program's order of buffers.

    `maximize` says that gradients point uphill: they are negated as they are loaded.
    """

    dtypes: tuple[tuple[str, str], ...]
    maximize: bool = False

    def dtype(self, buffer: str) -> str:
        """The storage dtype of a buffer."""
        return dict(self.dtypes)[buffer]

    @property
    def compute(self) -> str:
        """The dtype arithmetic is done in: float64 where any storage is, else float32."""
        return "float64" if any(d == "float64" for _, d in self.dtypes) else "float32"

    def text(self) -> str:
        """The layout in one line, for messages and file names."""
        short = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
        return " ".join(f"{b}:{short[d]}" for b, d in self.dtypes) + (" maximize" if self.maximize else "")


def layout_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
) -> Layout:
    """The layout for parameters of dtype `param`: gradients and states have the same unless said otherwise."""
    chosen = {"p": param, "g": grad or param, **(states or {})}
    return Layout(tuple((b.name, chosen.get(b.name, param)) for b in kernel_buffers(program)), maximize)


def traffic(program: Program, layout: Layout) -> tuple[int, int]:
    """The bytes that one element's update reads and writes, over all stages: what a kernel's speed is judged by."""
    read = written = 0
    pointers = {b.name for b in kernel_buffers(program)}
    for stage in program.stages:
        loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        read += sum(ITEM_SIZE[layout.dtype(b)] for b in loads & pointers)
        written += sum(ITEM_SIZE[layout.dtype(s.buffer)] for s in stage.stores)
    return read, written


def kernel_buffers(program: Program) -> list:  # type: ignore[type-arg]
    """The buffers a kernel has pointers to, in order: parameter, gradient, states; scalar states are not among them."""
    scalar = {s.buffer for s in program.scalars.stores}
    narrow = {b.name for b in program.buffers if not {"i", "j"} & set(b.axes.letters)}
    return [b for b in program.buffers if b.name not in scalar | narrow]
