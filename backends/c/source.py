"""The C99 source of a program: for each stage the function of an element, of a chunk of elements, and of a bucket."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, scale_name
from rulec.kernel.nest import Level, written
from rulec.kernel.place import ELEMENT
from rulec.kernel.quantized import CodedBuffer, coded_buffers, coded_lines, part_length

from ..common.text import about
from ..cstyle.dialect import WIDTH, Dialect, block, comment, indented
from ..cstyle.format_words import CodedNames, format_functions, function_name
from ..cstyle.loops import LOCALS, ChunkLoops, chunk_type, helpers

#: The fields of a bucket before its table of addresses: see `_BUCKET`.
BUCKET = ("threads", "tensors", "spans", "span", "chunk", "row_of", "table")

#: The elements that are decoded, updated and, where blocks are no longer, encoded before the next ones: few enough for
#: a processor to begin with the next ones while the divisions of these wait for one another, and as many as the bytes
#: of its widest vector, for a compiler gives a loop with bytes in it so many lanes.
PIECE = 128

#: C99. No value of a rule gets the name of a bucket's field or of a variable of the loops.
C99 = Dialect(
    "c", reserved=LOCALS | {*BUCKET, "Bucket", "Span", "bucket", "part", "count", "first", "last"},
    simd=("#pragma omp simd",),
)  # fmt: skip

_INLINE = """\
/* A loop can be vectors only where the calls in it disappear. */
#if defined(__GNUC__)
#define RULEC_FUNCTION static inline __attribute__((always_inline))
#else
#define RULEC_FUNCTION static inline
#endif
"""

_BUCKET = """\
/* The tensors that one call is for, cut into chunks, and spans of chunks for threads to take. */
typedef struct {
    int64_t threads, tensors, spans;
    const Span *span;
    const Chunk *chunk;
    const int64_t *row_of;  // for each tensor its row of the table
    const double *table;    // <columns> numbers in a row
    // For each tensor the address of:
    void *const <lines>;
} Bucket;
"""

_SPAN = """\
/* Chunks that lie one after the other. */
typedef struct {
    int64_t first, last;
} Span;
"""


def source(program: Program, layout: Layout) -> str:
    """The whole file. BackendUnsupported for an operation without a spelling in C."""
    stages = [StageSource(program, layout, i) for i, stage in enumerate(program.stages) if stage.roots]
    return file_text(program, layout, f"C99 for {layout.text()}.", stages)


def file_text(program: Program, layout: Layout, title: str, stages: Sequence[StageSource]) -> str:
    """A file of these stages, under a title."""
    code = "\n".join(stage.text() for stage in stages)
    head = comment([f"{title} Printed by rulec.", "", *about(program)])
    types = [_SPAN, chunk_type(program, layout), _bucket(program, layout, stages)]
    code = "\n".join([*format_functions([form for _, form in layout.formats], C99), code])
    parts = ["\n".join(head) + "\n", _includes(code), _INLINE, *types, *helpers(code, C99), code]
    return "\n".join(parts)


def stage_name(program: Program, stage: int) -> str:
    """The name of a stage's function for a bucket."""
    return "step" if len(program.stages) == 1 else f"stage_{stage}"


def _includes(code: str) -> str:
    names = ["math", *["stdbool"] * bool(re.search(r"\bbool\b", code)), "stdint"]
    return "".join(f"#include <{name}.h>\n" for name in names)


def _bucket(program: Program, layout: Layout, stages: Sequence[StageSource]) -> str:
    """The type of a stage's argument."""
    lines = ", ".join(f"*const\0*{stages[0].field(line) if stages else line}" for line in coded_lines(program, layout))
    wrapped = textwrap.fill(lines, WIDTH - 9, subsequent_indent=" " * 9).replace("\0", " ")
    return _BUCKET.replace("<columns>", str(len(program.columns))).replace("*const <lines>", wrapped)


class StageSource(ChunkLoops):
    """The functions of one stage: of an element, of a chunk, and of a bucket with its tables of addresses."""

    dialect = C99

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        super().__init__(program, layout, index, stage_name(program, index))
        self.coded = coded_buffers(layout, self.write.printer.loads(), self.nest.stored)
        #: The variables of codes and scales of each state in codes.
        self.codes = CodedNames(layout, self.write.taken)

    def text(self) -> str:
        """The function of an element, of a chunk and of a bucket."""
        return "\n".join([self._element(), self._chunk(), self._bucket()])

    def _bucket(self) -> str:
        return "\n".join([
            "/* All chunks of a bucket. */",
            f"void {self.name}(const Bucket *bucket)", "{",
            "#pragma omp parallel for schedule(dynamic) num_threads((int)bucket->threads) if (bucket->threads > 1)",
            *indented(block(
                "for (int64_t s = 0; s < bucket->spans; s++)",
                block("for (int64_t chunk = bucket->span[s].first; chunk < bucket->span[s].last; chunk++)",
                      [f"{self.name}_chunk(bucket, chunk);"]),
            )),
            "}", "",
        ])  # fmt: skip

    def _chunk(self) -> str:
        loops = written(self.nest.levels(), self)
        return "\n".join([
            "/* One chunk. The buffers of a tensor do not overlap. */",
            f"static void {self.name}_chunk(const Bucket *bucket, int64_t chunk)", "{",
            *indented([*self._variables(), "", *loops]),
            "}", "",
        ])  # fmt: skip

    def _variables(self) -> list[str]:
        """The variables of a chunk: addresses, and columns of the scalar table."""
        row = f"const double *row = bucket->table + {len(self.program.columns)} * bucket->row_of[at->tensor];"
        return ["const Chunk *at = &bucket->chunk[chunk];", *self._addresses(), *self.scalar_lines(row)]

    def _addresses(self) -> list[str]:
        """The addresses of arrays; with states in codes, those of elements are variables of each part."""
        parted = {*self.nest.buffers, *self.nest.stage.reads} if self.coded else set()
        return [self._declared(name) for name in self.write.at if self.pointer(name) and name not in parted]

    def _declared(self, name: str, start: str = "") -> str:
        """The declaration of an address, of the array's element `start`."""
        return f"{self._variable(name, self.pointer(name))} = {self._address(name, start)};"

    def _variable(self, name: str, kind: str) -> str:
        """The declaration of an address, without its value."""
        return f"{kind}{self.write.at[name]}"

    def _address(self, name: str, start: str) -> str:
        """The address of a tensor's array, or of a chunk's first total."""
        text = f"bucket->{self.field(name)}[at->tensor]"
        slots = self.slots_of(name)
        if slots:
            return f"(double *){text} + at->{slots}"
        return f"({self.pointer(name).rstrip()}){text} + {start}" if start else text

    def field(self, line: str) -> str:
        """The field of a bucket for a line of the table of addresses."""
        return self.write.names.get(line) or self.codes.scales[line]

    # States in codes

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """As of all loops; a loop over elements with states in codes goes part by part."""
        if level.place != ELEMENT or not self.coded:
            return super().loop(level, body)
        length = part_length(self.layout)
        names = {buffer.name for buffer in self.coded}
        arrays = [name for name in self.write.at if name in {*self.nest.buffers, *self.nest.stage.reads} - names]
        stored = [buffer for buffer in self.coded if buffer.stored]
        return block(f"for (int64_t part = at->first; part < at->last; part += {length})", [
            f"const int64_t count = at->last - part < {length} ? at->last - part : {length};",
            *(self._declared(name, "part") for name in arrays),
            *(line for buffer in self.coded for line in self._variables_of(buffer, length)),
            *block(f"for (int64_t first = 0; first < count; first += {PIECE})", [
                f"const int64_t last = count - first < {PIECE} ? count : first + {PIECE};",
                *(line for buffer in self.coded if buffer.loaded for line in self._moved("decode", buffer)),
                *(self._prefetched(self.write.at[name]) for name in arrays),
                *self._loop("first", "last", body),
                *(line for buffer in stored if buffer.format.block <= PIECE for line in self._moved("encode", buffer)),
            ]),
            *(line for buffer in stored if buffer.format.block > PIECE for line in self._moved("encode", buffer, True)),
        ])  # fmt: skip

    def _prefetched(self, at: str) -> str:
        """The call that asks for memory of an array in advance: arrays stand still while states are encoded."""
        return f"prefetch({at} + first, (last - first) * (int64_t)sizeof *{at});"

    def place(self, index: str) -> dict[str, str]:
        """As of all loops; a loop over a part counts from its first element."""
        return {"position": f"part + {index}", "origin": "part"} if self.coded else super().place(index)

    def _variables_of(self, buffer: CodedBuffer, length: int) -> list[str]:
        """The variables of a state in codes, in a part: its codes and scales, and memory for its values."""
        form, const = buffer.format, "" if buffer.stored else "const "
        codes, scales = self.codes.codes[buffer.name], self.codes.scales[scale_name(buffer.name)]
        return [
            f"{const}{form.code_dtype}_t *{codes} = ({const}{form.code_dtype}_t *)"
            f"bucket->{self.field(buffer.name)}[at->tensor] + part{' / 2' * (form.bits == 4)};",
            f"{const}float *{scales} = ({const}float *)bucket->{scales}[at->tensor] + part / {form.block};",
            f"float {self.write.at[buffer.name]}[{length}];",
        ]

    def _moved(self, way: str, buffer: CodedBuffer, whole: bool = False) -> list[str]:
        """The call that decodes or encodes a state: elements `first` to `last` of a part, or the `whole` part."""
        form, name = buffer.format, buffer.name
        codes, scales, values = self.codes.codes[name], self.codes.scales[scale_name(name)], self.write.at[name]
        function = f"{way}_{function_name(form)}"
        if whole:
            return [f"{function}({codes}, {scales}, count, {values});"]
        half = " / 2" * (form.bits == 4)
        return [f"{function}({codes} + first{half}, {scales} + first / {form.block}, last - first, {values} + first);"]
