"""Prints kernels that move the same bytes as a program's kernel and compute nothing: the limit set by memory.

They store the loaded numbers, so kernels timed beside them get the same ones. LLVM must not remove a load: a mask,
always zero but unknown to LLVM, mixes every load into every store. In a stage without stores it mixes the loads into a
zero in the slot of a reduction. Values of rows and columns are few beside elements, and left out.
"""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.plan import chunk_columns
from rulec.kernel.place import TENSOR

from .print import ELEMENTS
from .source import elements_source, loop, stages_source
from .stage import StageWriter

_MASK = "mask = tensor >> 62"


def limit_source(program: Program, layout: Layout) -> str:
    """The source of a program's limit kernel, with chunks of elements in every stage."""
    title = f"{program.name}: the memory traffic of its cpu kernel for {layout.text()}, alone"
    if program.elementwise:
        write = StageWriter(program, layout, program.stages[0])
        body = [*write.load_bits_lines(), f"others = ({_mixed(write)}) & mask", *_store_lines(write)]
        return elements_source(title, [*write.address_lines(), _MASK], body, 0)
    stages = [[_limit_lines(StageWriter(program, layout, stage))] if stage.roots else [] for stage in program.stages]
    return stages_source(title, stages, 8 * chunk_columns(program, layout), 0)


def _limit_lines(write: StageWriter) -> list[str]:
    """The body of a stage's function."""
    loads, mixed = write.load_bits_lines(), _mixed(write)
    used = [*write.moved(), *(s.buffer for s in write.stage.stores), *(r.name for r in write.stage.reduces[:1])]
    before = [ELEMENTS, *write.addresses(used), _MASK]
    if write.stage.stores:
        body = [*loads, f"others = ({mixed}) & mask", *_store_lines(write)]
        return [*before, *loop("i", "start", "stop", body)]
    slot = write.stage.reduces[0]
    index = "chunk" if write.nest.place(slot) == TENSOR else "0"
    return [
        *before, "others = 0", *loop("i", "start", "stop", [*loads, f"others = others ^ {mixed}"]),
        write.store_zero(slot.name, index, "others & mask"),
    ]  # fmt: skip


def _mixed(write: StageWriter) -> str:
    return " ^ ".join(write.names[name] for name in write.moved()) or "0"


def _store_lines(write: StageWriter) -> list[str]:
    moved = write.moved()
    return [
        write.store_bits(s.buffer, f"{write.names[s.buffer]} ^ others" if s.buffer in moved else "others")
        for s in write.stage.stores
    ]
