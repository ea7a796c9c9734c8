"""A rule as one file of CUDA C: its kernel, and functions of C for a program that calls it."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.backend.printer import identifier, unique_name
from rulec.language.expr.node import WORDS, Node, Op, is_boolean
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import introduction, vendored

from ..common.python_standalone import OneFile
from ..common.scalars import scalar_stage, without_table
from ..cstyle.dialect import Dialect, comment
from ..cstyle.element import STORAGE, ElementPrinter, literal
from ..cstyle.words import LIBRARY, RESERVED, words_used
from ..numpy.standalone import DIALECT as ARRAYS
from .coded import CodedKernel, bound_in, decodes
from .format_words import format_functions
from .plan import CHUNK, GIVEN, THREADS
from .print import with_words
from .stage import StageKernel
from .words import DIALECT

#: Elements that a block of threads takes.
_ELEMENTS = 8192

_HOST = """\
#ifndef __CUDACC_RTC__ /* what follows is for the host */

#include <cuda_runtime.h>

<words>
/* Hyper-parameters, which may change from step to step; and their defaults. */
typedef struct {
    <hyper>
} <name>_hyper;

#define <upper>_DEFAULTS {<defaults>}

/* One tensor: the addresses of its arrays in the memory of a GPU, its elements, and its numbers. */
typedef struct {
    <tensor>
} <name>_tensor;

/* The 64-bit words that <name>_fill writes for these tensors. */
extern "C" long long <name>_words(long long count, const <name>_tensor *tensors)
{
    long long blocks = 0;
    for (long long i = 0; i < count; ++i)
        blocks += (tensors[i].size + <elements> - 1) / <elements>;
    return <chunk> * blocks + <line> * count;
}

/* Writes the tables of a step into memory of the host, best pinned, and counts the step: copy them to the GPU with
   cudaMemcpyAsync, once, and call <name>_step there. Returns the number of blocks. */
extern "C" long long <name>_fill(long long count, <name>_tensor *tensors, const <name>_hyper *hyper, long long *words)
{
    const long long blocks = (<name>_words(count, tensors) - <line> * count) / <chunk>;
    long long *chunk = words, *bound = words + <chunk> * blocks, *given = bound + <bounds> * count;
    double *row = (double *)(given + <givens> * count);
    for (long long i = 0; i < count; ++i, bound += <bounds>, given += <givens>, row += <columns>) {
        <name>_tensor *const tensor = tensors + i;
        for (long long start = 0; start < tensor->size; start += <elements>, chunk += <chunk>) {
            chunk[0] = i;
            chunk[1] = start;
            chunk[2] = start + <elements> < tensor->size ? start + <elements> : tensor->size;
            chunk[3] = 0;
        }
        <addresses>
        given[0] = i;
        given[1] = ((<every>) & 15) == 0;
        <scalars>
        <stores>
        tensor->step += 1;
    }
    return blocks;
}

/* One step, in a stream: `words` are those of <name>_fill on the GPU, and <count_of> are its tensors and blocks. */
extern "C" cudaError_t <name>_step(const long long *words, long long count, long long blocks, cudaStream_t stream)
{
    const long long *bound = words + <chunk> * blocks, *given = bound + <bounds> * count;
    const double *table = (const double *)(given + <givens> * count);
    const bool *stays = 0;
    const float *scale = 0;
    void *arguments[] = {&words, &bound, &given, &table, &stays, &scale};
    if (blocks == 0)
        return cudaSuccess;
    return cudaLaunchKernel((const void *)<name>_kernel, dim3((unsigned)blocks), dim3(<threads>), arguments, 0, stream);
}

#endif
"""


class CudaFile(OneFile):
    """The text of the file."""

    form = "CUDA C"
    dialect, words = ARRAYS, {}
    locals = (
        "count", "tensors", "tensor", "hyper", "words", "chunk", "bound", "given", "row", "i", "start", "blocks",
        "table", "stays", "scale", "arguments", "stream", "size", "step", *RESERVED, *DIALECT.reserved, *LIBRARY,
    )  # fmt: skip

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        super().__init__(rule, name, dtype, storage)
        taken = {"step", "size", "param", "grad", "seed", "number"}
        #: The field of each array of a tensor, and of each of its numbers.
        self.members = {b: unique_name(identifier(b), taken) for b in self.bound if b != "p"}
        self.members = {"p": "param", "g": "grad"} | self.members
        self.counted = {b.name: unique_name(b.name, taken) for b in self.numbers}

    @classmethod
    def files(cls, rule: Rule, name: str, dtype: str, storage: Storage) -> Mapping[str, str]:
        """The file, by its name."""
        return {f"{name}.cu": cls(rule, name, dtype, storage).text()}

    @property
    def bound(self) -> list[str]:
        """The arrays of a tensor with the same address at every step."""
        return bound_in(self.program, self.layout)

    def text(self) -> str:
        """The whole file."""
        head = comment([*introduction(self.rule), "", *vendored()])
        kernels = self._kernels().rstrip("\n")
        space = f"namespace {self.name}_device {{\n\n{kernels}\n\n}}  // namespace {self.name}_device"
        return "\n".join([*head, "", space, f"using {self.name}_device::{self.name}_kernel;", "", *self._host(), ""])

    def _kernels(self) -> str:
        """The kernel, after the types and functions that it uses."""
        formats = [form for _, form in self.layout.formats]
        if not decodes(self.program, self.layout, THREADS):
            short = min(formats, key=lambda form: form.block)
            self.cannot(f"a thread takes more neighbouring elements than a block of {short.text} has")
        kind = CodedKernel if formats else StageKernel
        texts = kind(self.program, self.layout, self.program.stages[0], f"{self.name}_kernel", "element").texts()
        return with_words([*format_functions(formats, "\n".join(texts)), *texts])

    # The host's part

    def _host(self) -> list[str]:
        lines, columns = self._scalars()
        arrays = ["g", *self.bound]
        known = {
            "name": self.name, "upper": self.name.upper(), "elements": str(_ELEMENTS), "chunk": str(len(CHUNK)),
            "bounds": str(len(self.bound)), "givens": str(len(GIVEN) + 1), "columns": str(columns),
            "line": str(len(self.bound) + len(GIVEN) + 1 + columns), "threads": str(THREADS),
            "defaults": ", ".join(literal(x) for x in self.defaults.values()), "count_of": "`count` and `blocks`",
            "every": " | ".join(["given[2]", *(f"bound[{i}]" for i in range(len(self.bound)))]),
        }  # fmt: skip
        parts = {
            "hyper": [f"double {x};" for x in self.fields.values()] + ["unsigned seed;"] * self.seeded,
            "tensor": [*(f"{self._type(b)}{self.members[b]};" for b in arrays), "long long size, step;", *(
                f"double {x};" for x in self.counted.values()
            ), *["unsigned number;"] * self.seeded],
            "addresses": [*(f"bound[{i}] = (long long)tensor->{self.members[b]};" for i, b in enumerate(self.bound)),
                          f"given[2] = (long long)tensor->{self.members['g']};"],
            "scalars": lines[0], "stores": lines[1],
        }  # fmt: skip
        words = [line for text in self.host_words for line in (*text.rstrip("\n").split("\n"), "")]
        return filled_c(_HOST, known, parts | {"words": words})

    def _type(self, name: str) -> str:
        dtype = self.layout.dtype(name) if name in dict(self.layout.dtypes) else "float32"
        form = self.layout.format(name)
        kind = "void" if form else {"uint16_t": "unsigned short", "int16_t": "short", "int8_t": "signed char"}.get(
            STORAGE[dtype], STORAGE[dtype]
        )  # fmt: skip
        return f"{'const ' * (name == 'g')}{kind} *"

    def leaf(self, value: Node, state: str) -> str | None:
        """A hyper-parameter, `t`, a number of the tensor, or a word of random bits, in C."""
        name = str(value.arg)
        words = {
            "seed_low": "hyper->seed & 0xffff",
            "seed_high": "hyper->seed >> 16",
            "number": "tensor->number & 0xffffff",
        }
        if value.op is Op.STEP:
            return "t"
        if value.op is Op.FACT:
            return f"(double)({words[name]})" if name in WORDS else literal(EPS[self.dtype])
        if value.op is Op.LOAD:
            return f"tensor->{self.counted[name]}"
        if value.op not in (Op.HYPER, Op.MODEL_HYPER):
            return None
        return literal(self.static[name]) if name in self.static else f"hyper->{self.fields[name]}"

    def _scalars(self) -> tuple[tuple[list[str], list[str]], int]:
        """The statements for the row of a tensor, those for its new numbers, and the number of columns."""
        program, stage = self.program, scalar_stage(self.program)
        printer = ElementPrinter(
            self.form, without_table(program), stage, {}, literal, reserved=frozenset(self.reserved),
            known=lambda v: self.leaf(v, ""),
        )  # fmt: skip
        kinds = {name: "int" if is_boolean(v) else "double" for v, name in printer.names.items()}
        texts = [text for _, text in printer.lines()] + [printer.text(s.value) for s in stage.stores]
        count = ["const double t = (double)(tensor->step + 1);"] * self.named("t", texts)
        self.host_words = words_used("\n".join(texts), Dialect(self.form, "static inline"))
        lines = count + [f"const {kinds[name]} {name} = {text};" for name, text in printer.lines()]
        lines += [f"row[{i}] = {printer.text(c.value)};" for i, c in enumerate(program.scalars.columns)]
        values = [(self.counted[s.buffer], printer.text(s.value)) for s in program.scalars.stores]
        news = [f"const double new_{name} = {text};" for name, text in values]
        return (lines + news, [f"tensor->{name} = new_{name};" for name, _ in values]), len(program.scalars.columns)


def filled_c(template: str, known: Mapping[str, str], parts: Mapping[str, list[str]]) -> list[str]:
    """The lines of a template: `<part>` alone in a line stands for lines, and elsewhere for a text."""
    lines: list[str] = []
    for line in template.rstrip("\n").split("\n"):
        part = line.strip()[1:-1]
        if line.strip() == f"<{part}>" and part in parts:
            margin = line[: len(line) - len(line.lstrip())]
            lines += [f"{margin}{x}" for x in parts[part]]
            continue
        for name, text in known.items():
            line = line.replace(f"<{name}>", text)
        lines.append(line)
    return lines


files = CudaFile.files
