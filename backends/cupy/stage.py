"""Prints one stage of a program as a kernel of CUDA C, around the function of its elements."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout, scale_name
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, place
from rulec.language.expr.node import Op

from ..common.partial import counted, partial_sums
from ..cstyle.dialect import WIDTH, block, call_lines, indented
from ..cstyle.element import ElementWriter, Parameter
from .plan import GIVEN, THREADS, bound_lines, given_lines, pack_width
from .words import DIALECT

#: The word of a reduction in CUDA C, and the reduction of no elements.
KIND = {Op.SUM: "SUM", Op.MIN: "LOWEST", Op.MAX: "HIGHEST"}
NOTHING = {Op.SUM: "0", Op.MIN: "INFINITY", Op.MAX: "-INFINITY"}

#: Blocks that a multiprocessor must have room for: two, so that a thread has 128 registers. Without this number, the
#: compiler may move values to local memory to make room for more blocks.
_BLOCKS = 2
#: Bytes of packs, by the dtype of arithmetic, and elements of packs, for which 128 registers are enough. A thread with
#: more of them has 255.
_KEPT = {"float32": 384, "float64": 208}
_KEPT_ELEMENTS = 160

#: The parameters of every kernel of a stage after its chunks or tiles.
_TABLES = ("const int64_t *bound", "const int64_t *per_call", "const double *table", "const bool *stays",
           "const float *scale")  # fmt: skip


class StageKernel:
    """The kernel `name` of a stage, and the function `element` that it calls for each element.

    A thread takes `wide` neighbouring elements at a time: 16 bytes of the narrowest array. With `narrow_gradient`, the
    gradient may lie at any address, and the other arrays still move 16 bytes at a time.
    """

    dialect = DIALECT
    narrow_gradient = False

    def __init__(self, program: Program, layout: Layout, stage: Stage, name: str, element: str) -> None:
        self.program, self.layout, self.stage, self.name = program, layout, stage, name
        narrow = [r for r in partial_sums(program, layout, stage) if place(r.axes, layout) in (ROW, TENSOR)]
        self.writer = ElementWriter(
            program, layout, stage, self.dialect, element, scaled=True, narrow=[r.name for r in narrow]
        )
        #: The variables for parts of sums in float32, by reduction: for what a thread counts, and for a pack.
        parts = {r.name: unique_name(f"{self.writer.names[r.name]}_part", self.writer.taken) for r in narrow}
        counts = [r.name for r in narrow if counted(r.value.args[0]) and place(r.axes, layout) == TENSOR]
        self._counts = {name: part for name, part in parts.items() if name in counts}
        self._packs = {name: part for name, part in parts.items() if name not in counts}
        self.parameters, self.nest = self.writer.parameters(), self.writer.nest
        self.wide = pack_width(program, layout, stage)
        self.shaped = self.nest.shaped
        self.bound, self.per_call = (
            [*bound_lines(program), *map(scale_name, dict(layout.formats))],
            given_lines(program),
        )

    def texts(self) -> list[str]:
        """The function and the kernel."""
        body = self._shaped() if self.shaped else self._flat()
        first = "const Tile *tiles" if self.shaped else "const Chunk *chunks"
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}, {self._blocks()}) {self.name}'
        lines = call_lines(head, [[first, *_TABLES]], "")
        return [self.writer.text(), "\n".join([*self._about(), *lines, "{", *indented(body), "}"])]

    def _blocks(self) -> int:
        """The blocks that a multiprocessor must have room for."""
        compute = self.layout.compute
        packs = [*map(self.layout.dtype, [*self.nest.buffers, *self.nest.stored]), *[compute] * len(self.nest.vectors)]
        kept = self.wide * sum(ITEM_SIZE[dtype] for dtype in packs)
        return 1 if kept > _KEPT[compute] or self.wide * len(packs) > _KEPT_ELEMENTS else _BLOCKS

    def _about(self) -> list[str]:
        """The work of a block, in a sentence."""
        levels: dict[str, list[str]] = {}
        for r in self.stage.reduces:
            levels.setdefault(str(r.value.arg), []).append(r.name)
        does = [f"stores {', '.join(self.nest.stored)}"] * bool(self.stage.stores)
        does += [f"totals {', '.join(names)} per {level}" for level, names in levels.items()]
        text = f"A block takes one {'tile' if self.shaped else 'chunk'} of one tensor: it {'; it '.join(does)}."
        return textwrap.wrap(text, WIDTH, initial_indent="// ", subsequent_indent="// ")

    # Lines before the loops

    def _begin(self) -> list[str]:
        """The variables of a block: its chunk or tile, its tensor's lines of the tables, and their contents."""
        part = "tile" if self.shaped else "chunk"
        return [
            f"const {part.title()} {part} = {part}s[blockIdx.x];",
            f"bound += {len(self.bound)} * {part}.tensor;  // addresses of the tensor's arrays",
            f"per_call += {len(GIVEN) + len(self.per_call)} * {part}.tensor;  // what comes with each call",
            "const int64_t place = per_call[0];  // its row of the table",
            "const bool wide = per_call[1];  // whether all its addresses are multiples of 16",
            *self._stays(),
            *self._addresses(),
            *self._scalars(),
        ]

    def _stays(self) -> list[str]:
        """The test for a tensor that stays as it is. Its reductions are computed all the same."""
        if not self.stage.reduces:
            return block("if (stays && stays[place])", ["return;"])
        return ["const bool writes = !(stays && stays[place]);"] * bool(self.stage.stores)

    def _addresses(self) -> list[str]:
        kinds = {p.of: p.type for p in self.parameters if p.kind == "buffer"}
        kinds |= dict.fromkeys(self.stage.reads, f"const {self.writer.real} *")
        order = [*self.bound, *self.per_call]
        known = sorted(kinds.items(), key=lambda item: order.index(item[0]))
        return [line for name, kind in known for line in self._address(name, kind)]

    def _address(self, name: str, kind: str) -> list[str]:
        """The statements that declare the pointer, of type `kind`, to a buffer or vector."""
        return [f"{kind}const {self.writer.at[name]} = at<{kind.removesuffix(' *')}>({self._word(name)});"]

    def _slots(self, reduction: Result) -> str:
        """The pointer to a reduction's first slot, read where it is used: it takes no register before."""
        return f"at<double>({self._word(reduction.name)})"

    def _word(self, name: str) -> str:
        if name in self.bound:
            return f"bound[{self.bound.index(name)}]"
        return f"per_call[{len(GIVEN) + self.per_call.index(name)}]"

    def _scalars(self) -> list[str]:
        """The variables for columns of the table, for inverses, and for the factor of gradients."""
        lines = []
        columns = [p for p in self.parameters if p.kind == "scalar"]
        if columns:
            lines.append(f"const double *const row = table + {len(self.program.columns)} * place;")
        for p in columns:
            text = f"row[{p.of}]"
            text = f"{text} != 0" if p.type == "bool" else text if p.type == "double" else f"({p.type}){text}"
            lines.append(f"const {p.type} {p.name} = {text};")
        reciprocal = f"reciprocal{self.writer.suffix}"
        for p in self.parameters:
            if p.kind == "inverse":
                lines.append(f"const {p.type} {p.name} = {reciprocal}({p.of});")
        scales = [p for p in self.parameters if p.kind == "scale"]
        return lines + [f"const {p.type} {p.name} = scale ? 1.0f / *scale : 1.0f;" for p in scales]

    def _totals(self, *places: str) -> list[str]:
        """The variables of reductions, with their first values; what a thread counts is exact in float32."""
        totals = {r.name: r for r in self.nest.totals(*places)}
        counts = [f"float {part} = 0;" for name, part in self._counts.items() if name in totals]
        return [f"double {self.writer.names[n]} = {NOTHING[r.value.op]};" for n, r in totals.items()] + counts

    def _in_parts(self, lines: list[str]) -> list[str]:
        """The statements for the elements of a pack, around them those for its parts of sums."""
        begun = [f"float {part} = 0;" for part in self._packs.values()]
        return [*begun, *lines, *(f"{self.writer.names[name]} += {part};" for name, part in self._packs.items())]

    # Elements

    def _packed(self, i: str, columns: str = "") -> list[str]:
        """The statements for whole packs of elements from `i` on; `columns` is the first index of values of columns."""
        wide, names, at = self.wide, self.writer.names, self.writer.at
        stored = self.nest.stored
        arrays = [p for p in self.parameters if p.kind == "buffer" or p.place in (ELEMENT, COL)]
        loads, arguments = [], {"i": "e", "position": f"{i} + e", "origin": i}
        for p in arrays:
            start = columns if p.place == COL else i
            loads += self._load(p, start)
            arguments[p.name] = f"{names[p.of]}.at"
            if p.place == COL:
                arguments[p.name] = self._truth(p, f"{names[p.of]}.at[e]")
        loop = block(f"for (int e = 0; e < {wide}; ++e)", self._call(arguments))
        stores = [f"pack<{wide}>({at[b]} + {i}) = {names[b]};" for b in self.nest.buffers if b in stored]
        return [*loads, "#pragma unroll", *loop, *self._written(stores)]

    def _load(self, p: Parameter, start: str) -> list[str]:
        """The statement that declares a pack of an array's elements from `start` on: loaded, or only stored later."""
        name = self.writer.names[p.of]
        if p.kind == "buffer" and p.of not in self.writer.printer.loads():
            return [f"Pack<{p.type.removesuffix(' *')}, {self.wide}> {name};"]
        return [f"auto {name} = {self._pack_of(p, start)};"]

    def _pack_of(self, p: Parameter, start: str) -> str:
        """A pack of an array's elements from `start` on."""
        function = "loose" if p.of == "g" and self.narrow_gradient else "pack"
        return f"{function}<{self.wide}>({self.writer.at[p.of]} + {start})"

    def _written(self, stores: list[str]) -> list[str]:
        """The stores; in a stage with reductions, only for a tensor that does not stay as it is."""
        return block("if (writes)", stores) if stores and self.stage.reduces else stores

    def _single(self, i: str, column: str = "") -> list[str]:
        """The statements for one element, `i`, in memory."""
        arguments = {"i": i, "position": i, "origin": i}
        for p in self.parameters:
            if p.place == COL:
                arguments[p.name] = self._truth(p, f"{self.writer.at[p.of]}[{column}]")
        if not (self.stage.stores and self.stage.reduces):
            return self._call(arguments)
        # The call stores into copies; the copies are written where the tensor does not stay as it is.
        stored = [p for p in self.parameters if p.kind == "buffer" and p.of in self.nest.stored]
        copies = [f"auto {self.writer.names[p.of]} = {p.name}[{i}];" for p in stored]
        elements = [p for p in self.parameters if p.kind == "buffer" or p.place == ELEMENT]
        arguments |= {p.name: f"{p.name} + {i}" for p in elements} | {
            p.name: f"&{self.writer.names[p.of]}" for p in stored
        }
        stores = [f"{p.name}[{i}] = {self.writer.names[p.of]};" for p in stored]
        return [*copies, *self._call(arguments | {"i": "0"}), *self._written(stores)]

    def _call(self, arguments: dict[str, str]) -> list[str]:
        for p in self.parameters:
            if p.kind == "total":
                column = any(r.name == p.of for r in self.nest.totals(COL))
                total = (self._counts | self._packs).get(p.of, p.name)
                arguments[p.name] = f"&{total}[e]" if column else f"&{total}"
            elif p.place in (ROW, MATRIX):
                index = "line" if p.place == ROW else "tile.matrix"
                arguments[p.name] = self._truth(p, f"{self.writer.at[p.of]}[{index}]")
        return self.writer.call(arguments)

    @staticmethod
    def _truth(p: Parameter, text: str) -> str:
        return f"{text} != 0" if p.type == "bool" else text

    # Chunks of elements

    def _flat(self) -> list[str]:
        body = self._in_order() if self.stage.reduces else self._side_by_side()
        return [*self._begin(), *self._totals(TENSOR), *body, *self._leave("chunk")]

    def _side_by_side(self) -> list[str]:
        """Packs as far as they go; then single elements, neighbours by neighbouring threads."""
        wide = self.wide
        whole = f"chunk.start + (chunk.stop - chunk.start) / {wide} * {wide}"
        return [
            "// Packs where addresses allow them, then single elements.",
            f"const int64_t packed = wide ? {whole} : chunk.start;",
            "#pragma unroll 1",
            f"for (int64_t i = chunk.start + {wide} * threadIdx.x; i < packed; i += {wide} * blockDim.x) {{",
            *indented(self._packed("i")), "}",
            "#pragma unroll 1",
            *block("for (int64_t i = packed + threadIdx.x; i < chunk.stop; i += blockDim.x)", self._single("i")),
        ]  # fmt: skip

    def _in_order(self) -> list[str]:
        """The loop of a stage with reductions: a thread has the same elements in packs or singly, for the same bits."""
        wide = self.wide
        return [
            "// A thread takes the same elements in packs or one by one, so that its totals have the same bits.",
            "#pragma unroll 1",
            f"for (int64_t i = chunk.start + {wide} * threadIdx.x; i < chunk.stop; i += {wide} * blockDim.x) {{",
            *indented(self._pack_or("i", "chunk.stop", self._packed("i"), [
                "#pragma unroll 1",
                *block(f"for (int64_t e = i; e < i + {wide} && e < chunk.stop; ++e)", self._single("e")),
            ])),
            "}",
        ]  # fmt: skip

    def _pack_or(self, at: str, end: str, packed: list[str], others: list[str]) -> list[str]:
        """The statements `packed` for a whole pack of elements from `at` on, else `others` for a part of a pack."""
        head = f"if (wide && {at} + {self.wide} <= {end}) {{"
        return [head, *indented(self._in_parts(packed)), "} else {", *indented(self._in_parts(others)), "}"]

    def _leave(self, part: str) -> list[str]:
        """The stores of a tensor's totals, joined over the block."""
        lines = []
        for r in self.nest.totals(TENSOR):
            name = self.writer.names[r.name]
            lines += [
                *[f"{name} += {self._counts.get(r.name)};"] * (r.name in self._counts),
                f"{name} = over_block({KIND[r.value.op]}, {name});",
                *block("if (threadIdx.x == 0)", [f"{self._slots(r)}[{part}.slot] = {name};"]),
            ]
        return lines

    # Matrices

    def _shaped(self) -> list[str]:
        """Lines by groups of threads, and in a line packs by lanes.

        In a stage with columns, a tile is no wider than the packs of its lanes: a thread has the same columns in all
        lines.
        """
        wide = self.wide
        columns = [f"double {self.writer.names[r.name]}[{wide}];" for r in self.nest.totals(COL)]
        clear = [f"{self.writer.names[r.name]}[e] = {NOTHING[r.value.op]};" for r in self.nest.totals(COL)]
        begin = ["#pragma unroll", *block(f"for (int e = 0; e < {wide}; ++e)", clear)] if clear else []
        return [
            *self._begin(),
            "const unsigned lanes = tile.lanes, lane = threadIdx.x % lanes;",
            *self._totals(TENSOR), *columns, *begin,
            "// Each group of lanes takes a line; those without one go along, for lanes wait for each other.",
            "#pragma unroll 1",
            "for (int64_t top = tile.top; top < tile.bottom; top += blockDim.x / lanes) {",
            *indented(self._line()),
            "}",
            *self._leave_columns(), *self._leave("tile"),
        ]  # fmt: skip

    def _line(self) -> list[str]:
        """A line for each group of lanes. Threads below the tile's end run it too: lanes wait for each other."""
        start, step = f"tile.left + {self.wide} * lane", f"{self.wide} * lanes"
        return [
            "const int64_t line = top + threadIdx.x / lanes;",
            *self._totals(ROW),
            "#pragma unroll 1",
            f"for (int64_t j = {start}; line < tile.bottom && j < tile.right; j += {step}) {{",
            *indented(self._columns()),
            "}",
            *self._leave_rows(),
        ]  # fmt: skip

    def _columns(self) -> list[str]:
        has_columns = any(p.place == COL for p in self.parameters)
        return [
            "const int64_t i = line * tile.width + j;",
            *["const int64_t column = tile.matrix * tile.width + j;"] * has_columns,
            *self._pack_or("j", "tile.right", self._packed("i", "column"), self._one_by_one()),
        ]  # fmt: skip

    def _one_by_one(self) -> list[str]:
        """The statements for the elements of a part of a pack, one by one."""
        single = self._single("i + e", "column + e")
        if self.nest.totals(COL):  # totals in registers have indices that the compiler knows
            whole = block("if (j + e < tile.right)", single)
            return ["#pragma unroll", *block(f"for (int e = 0; e < {self.wide}; ++e)", whole)]
        return ["#pragma unroll 1", *block(f"for (int e = 0; e < {self.wide} && j + e < tile.right; ++e)", single)]

    def _leave_rows(self) -> list[str]:
        lines = []
        for r in self.nest.totals(ROW):
            name = self.writer.names[r.name]
            lines += [
                f"{name} = over_lanes({KIND[r.value.op]}, {name}, lanes);",
                *block(
                    "if (lane == 0 && line < tile.bottom)",
                    [f"{self._slots(r)}[tile.row_slots + line] = {name};"],
                ),
            ]
        return lines

    def _leave_columns(self) -> list[str]:
        lines: list[str] = []
        for r in self.nest.totals(COL):
            name = self.writer.names[r.name]
            first = f"tile.left + {self.wide} * lane"
            target = f"{self._slots(r)} + tile.col_slots + tile.matrix * tile.width + {first}"
            arguments: Sequence[Sequence[str]] = [[KIND[r.value.op], name, "lanes", target, f"tile.right - ({first})"]]
            lines += call_lines("leave_columns", arguments, ";")
        return lines
