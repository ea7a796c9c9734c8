"""Prints a stage without rows and columns: a loop over blocks of a tensor, and the kernel of its chunks."""

from __future__ import annotations

from rulec.kernel.place import ELEMENT

from .plan import FLAT
from .stage import StageSource, call, indented


class FlatStage(StageSource):
    """A stage over blocks of elements."""

    def functions(self) -> list[list[str]]:
        """The loop and the kernel, each as lines."""
        return [self._blocks(), self._kernel()]

    def _arguments(self) -> list[str]:
        """The arguments of the loop, without its range of blocks and its constants."""
        arguments = [*(self.at[a] for a in self.arrays), *self.scalars]
        return arguments + ["scale"] * self.scaled + ["stays", "row"] * self.guarded

    def _blocks(self) -> list[str]:
        switches = [f"{s}: tl.constexpr" for s in ["ALL", "BLOCK", *["EMULATED"] * self.emulates]]
        head = call(f"def stage_{self.index}_blocks", ["first", "last", "size", *self._arguments(), *switches], ":")
        shape = "(BLOCK,)"
        loop = [
            "start = block * BLOCK", "inside = None if ALL else i < size - start",
            *self.load_lines(), *self.vector_lines(ELEMENT, "start + i", "inside"), *self.value_lines(),
            *self.store_lines(), *(self.taken_in(r, shape) for r in self.stage.reduces),
        ]  # fmt: skip
        totals = [self.total(r, self.names[r.name]) for r in self.stage.reduces]
        body = [
            f'"""Blocks `first` to `last` of one tensor, in {self.compute}: ALL of each, 16 bytes at a time, or those',
            "of its elements that are below `size`, at any address.", '"""',
            *self.pointer_lines(), *self.before_lines(), "i = tl.arange(0, BLOCK)",
            *(self.zero(r, shape) for r in self.stage.reduces),
            "for block in range(first, last):", *indented(loop),
            *[f"return {', '.join(totals)}"] * bool(totals),
        ]  # fmt: skip
        return ["@triton.jit", *head, *indented(body)]

    def _kernel(self) -> list[str]:
        reduced = bool(self.stage.reduces)
        tables = ["chunks", "known", "moving", "table", "stays", "scale", *["slots"] * reduced]
        switches = [f"{s}: tl.constexpr" for s in ["BLOCK", *["EMULATED"] * self.emulates]]
        names = ", ".join(f'"{t}"' for t in tables)
        body = [
            *self.about_lines(),
            *chunk_lines(self), *(f"{n} = tl.load(known + {i})" for i, n in enumerate(FLAT)), *self.address_lines(),
            *self.scalar_lines(),
            "first = number.to(tl.int64) * span",
            "last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)",
            *self._leave_lines(),
            f"aligned = {self.aligned(self.arrays)}",
            "whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)",
            *self._call_lines("first", "whole", "True", "BLOCK", self.names),
            # A masked access keeps an address for each element in registers, so these blocks are smaller.
            *self._call_lines("2 * whole", "2 * last", "False", "BLOCK // 2", self.rest),
            *(
                f"tl.store(slots + {self.slots(r)} + number, "
                f"{self.joined(r, self.names[r.name], self.rest[r.name])})" for r in self.stage.reduces
            ),
        ]  # fmt: skip
        return [
            f"@triton.jit(do_not_specialize=[{names}])",
            *call(f"def stage_{self.index}", [*tables, *switches], ":"),
            *indented(body),
        ]

    def _leave_lines(self) -> list[str]:
        """No blocks for a tensor that stays as it is, in a stage without other work."""
        if self.guarded or self.stage.reduces or not self.stage.stores:
            return []
        if all(self.program.buffer(s.buffer).role == "scratch" for s in self.stage.stores):
            return []
        return ["if stays is not None:", "    last = tl.where(tl.load(stays + row) == 0, last, first)"]

    def _call_lines(self, first: str, last: str, everything: str, block: str, names: dict[str, str]) -> list[str]:
        arguments = [first, last, "size", *self._arguments(), everything, block, *["EMULATED"] * self.emulates]
        results = ", ".join(names[r.name] for r in self.stage.reduces)
        return call(f"{results} = stage_{self.index}_blocks" if results else f"stage_{self.index}_blocks", arguments)


def chunk_lines(stage: StageSource) -> list[str]:
    """The tensor and chunk of a program, and its lines of the tables."""
    columns = len(stage.program.columns)
    return [
        "chunk = chunks + 2 * tl.program_id(0).to(tl.int64)",
        "tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)",
        f"known += {len(stage.known)} * tensor",
        f"moving += {1 + len(stage.moving)} * tensor",
        "row = tl.load(moving)",
        *[f"values = table + {columns} * row"] * bool(stage.scalars),
    ]
