"""A rule as one file of CUDA C: its kernel, and functions of C for a program that calls it."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from rulec.array_api.reductions import REDUCTIONS
from rulec.backend.printer import identifier, unique_name
from rulec.compiler.ir import Program
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.expr.node import WORDS, Node, Op, is_boolean, walk
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CheckedStorage, values
from rulec.standalone.prose import introduction, vendored

from ..common.python_standalone import OneFile, Parts
from ..common.scalars import scalar_stage, without_table
from ..cstyle.dialect import Dialect, call_lines, comment, indented
from ..cstyle.element import STORAGE, ElementPrinter, literal
from ..cstyle.words import LIBRARY, RESERVED, words_used
from ..numpy.standalone import DIALECT as ARRAYS
from .coded import CodedKernel, bound_in, coded_in, decodes
from .cuda_host import ELEMENTS, HOST, JOINS, SCRATCH, STEP, WORK, filled_c
from .cuda_host import MOVES as MOVE_COMMENTS
from .cuda_numbers import Lines, NumbersKernel, is_shared
from .format_words import format_functions
from .plan import CHUNK, FINISH, GIVEN, THREADS, bound_lines, given_lines
from .print import with_words
from .stage import StageKernel
from .words import DIALECT, finish_kernel

#: What moves parameters between steps.
MOVES = {"to_evaluation": to_evaluation, "to_training": to_training}

#: The language of the host's functions.
HOST_C = Dialect("CUDA C", "static inline")

#: The line for a tensor's row of the table, and its name: a kernel without columns does not read it.
_ROW, _ROW_USED = re.compile(r"    const int64_t place = .*\n"), re.compile(r"\bplace\b")


class Launch(NamedTuple):
    """A launch of a kernel: its number of blocks, its arguments, and the first reduction that it finishes."""

    kernel: str
    blocks: str
    arguments: str
    first: int = 0


class CudaFile(OneFile):
    """The text of the file.

    Between the launches of stages, kernels of one block compute the numbers of tensors and of the model. The tensors of
    a call are the model, and one group.
    """

    form = "CUDA C"
    dialect, words = ARRAYS, {}
    shares, evaluates, known_facts = True, True, frozenset({"numel"})
    #: What moves parameters between steps, for a file of such a move; empty for a step.
    word = ""
    locals = (
        "count", "tensors", "tensor", "hyper", "words", "chunk", "bound", "per_call", "row", "i", "start", "blocks",
        "table", "stays", "scale", "arguments", "stream", "size", "step", "shared", "scratch", "finish", "first",
        "line", "kinds", "r", *RESERVED, *DIALECT.reserved, *LIBRARY,
    )  # fmt: skip

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        super().__init__(rule, name, dtype, storage)
        self.begin()

    def begin(self) -> None:
        """Finds the names of the file."""
        program = self.program
        self.reduced = [r for stage in program.stages for r in stage.reduces]
        #: The states on the GPU that are one number, of a tensor or of the model.
        self.singles = [s.buffer for s in program.finish]
        counts = {n.arg for n in walk(program.between) if n.op is Op.STEP}
        #: What a tensor has in each call: the address of its gradient, and the counts that kernels read.
        self.per_call = [*given_lines(program), *["t"] * (None in counts), *["shared_t"] * bool(counts - {None})]
        #: Whether the steps of the model are counted: a tensor may have fewer.
        steps = [n for n in values(program) if n.op is Op.STEP and n.arg]
        self.counts_model = bool(steps) and not program.elementwise
        taken = {"step", "size", "param", "grad", "seed", "number"}
        #: The field of each array of a tensor, and of each of its numbers.
        self.members = {b: unique_name(identifier(b), taken) for b in self.addressed if b != "p"}
        self.members = {"p": "param", "g": "grad"} | self.members
        hosted = [b.name for b in self.numbers if b.name not in self.singles]
        self.counted = {b: unique_name(b, taken) for b in hosted}
        self.moves = [CudaMove(self, word, move(self.rule)) for word, move in MOVES.items() if self.rule.evaluate]

    def refuse_stages(self, program: Program) -> None:
        """CannotBuild for a program that may skip a step, or shares arrays."""
        if program.skip is not None:
            self.cannot("it skips steps, and what is written always takes them")
        if any(b.role == "scratch" for b in program.buffers):
            self.cannot("its stages share an array beside its states")

    @property
    def bound(self) -> list[str]:
        """The lines of a tensor with the same address at every step."""
        return [*bound_in(self.program, self.layout), *self.singles]

    @property
    def addressed(self) -> list[str]:
        """The lines of `bound` whose addresses a program gives; the others lie in the scratch memory."""
        slots = {r.name for r in self.reduced}
        return [b for b in self.bound if b not in slots]

    @property
    def shared(self) -> list[str]:
        """The states on the GPU that are one number of the model."""
        return [b for b in self.singles if is_shared(self.program, b)]

    def text(self) -> str:
        """The whole file."""
        head = comment([*introduction(self.rule), "", *vendored()])
        kernels = self._kernels().rstrip("\n")
        space = f"namespace {self.name}_device {{\n\n{kernels}\n\n}}  // namespace {self.name}_device"
        names = dict.fromkeys(launch.kernel for each in (self, *self.moves) for launch in each._launches())
        uses = [f"using {self.name}_device::{name};" for name in names]
        return "\n".join([*head, "", space, *uses, "", *self._host(), ""])

    # Kernels

    def _kernels(self) -> str:
        """The kernels, after the types and functions that they use."""
        formats = [form for _, form in self.layout.formats]
        if not decodes(self.program, self.layout, THREADS):
            short = min(formats, key=lambda form: form.block)
            self.cannot(f"a thread takes more neighbouring elements than a block of {short.text} has")
        texts = [text for each in (self, *self.moves) for text in each._stages()]
        texts += [finish_kernel(f"{self.name}_join")] * bool(self.reduced)
        texts += [between.text() for between in self._between().values()]
        return with_words([*format_functions(formats, "\n".join(texts)), *texts])

    def _stages(self) -> list[str]:
        return [text for i, stage in enumerate(self.program.stages) if stage.roots for text in self._stage(i)]

    def _stage(self, index: int) -> list[str]:
        """The function of an element of a stage, and the stage's kernel."""
        program, stage, only = self.program, self.program.stages[index], len(self.program.stages) == 1
        kind = CodedKernel if coded_in(program, stage, self.layout) else StageKernel
        element = f"{self.word}_element".lstrip("_") if only else f"element_{index}"
        kernel = kind(program, self.layout, stage, self._name(index), element)
        kernel.bound, kernel.per_call = self.bound, self.per_call
        return [text if len(_ROW_USED.findall(text)) > 1 else _ROW.sub("", text) for text in kernel.texts()]

    def _name(self, index: int) -> str:
        kernel = f"{self.word}_kernel".lstrip("_") if len(self.program.stages) == 1 else f"stage_{index}"
        return f"{self.name}_{kernel}"

    def _between(self) -> dict[int, NumbersKernel]:
        """The kernels for numbers, by the stage that they come before: one more than the last comes after it."""
        program, lines = self.program, Lines(self.bound, self.per_call, [r.name for r in self.reduced])
        kernels = {}
        for i, stage in enumerate(program.stages):
            late = [c for c in stage.columns if c >= len(program.scalars.columns)]
            about = f"Before stage {i}: the numbers that it reads."
            if late:
                kernels[i] = NumbersKernel(program, lines, f"{self.name}_before_{i}", about, late, ())
        if program.finish:
            about = "After the last stage: the new states that are numbers."
            kernels[len(program.stages)] = NumbersKernel(
                program, lines, f"{self.name}_after", about, (), program.finish
            )
        return kernels

    def _launches(self) -> list[Launch]:
        """The launches of a step, in their order."""
        between, done = self._between(), 0
        launches: list[Launch] = []
        for i, stage in enumerate([*self.program.stages, None]):
            if i in between:
                launches.append(Launch(between[i].name, "count > 0", "numbers"))
            if stage is not None and stage.roots:
                launches.append(Launch(self._name(i), "blocks", "arguments"))
            if stage is not None and stage.reduces:
                launches.append(Launch(f"{self.name}_join", f"{len(stage.reduces)} * count", f"joins_{i}", done))
                done += len(stage.reduces)
        return launches

    # The host's part

    def _host(self) -> list[str]:
        """The lines of the host: the structs, and the functions of a step and of moves."""
        works = [each.work_lines(self.line) for each in (self, *self.moves)]
        words = words_used("\n".join(text for each in (self, *self.moves) for text in each.texts), HOST_C)
        known = self._known(self.line) | {"defaults": ", ".join(literal(x) for x in self.defaults.values())}
        parts = self._structs() | {"work": [line for work in works for line in (*work, "")]}
        parts["words"] = [line for text in words for line in (*text.rstrip("\n").split("\n"), "")]
        return filled_c(HOST, known, parts)

    @property
    def line(self) -> int:
        """The words of a tensor beside its chunks: enough for a step and for the moves."""
        return max(each.own_line for each in (self, *self.moves))

    @property
    def own_line(self) -> int:
        """The words of a tensor for this program alone."""
        reductions = len(FINISH) * len(self.reduced)
        return len(self.bound) + len(GIVEN) + len(self.per_call) + len(self.program.columns) + reductions

    def _known(self, line: int) -> dict[str, str]:
        """The texts that templates name."""
        results = len(self.reduced)
        return {
            "name": self.name, "upper": self.name.upper(), "elements": str(ELEMENTS), "chunk": str(len(CHUNK)),
            "bounds": str(len(self.bound)), "givens": str(len(GIVEN) + len(self.per_call)), "line": str(line),
            "columns": str(len(self.program.columns)), "threads": str(THREADS), "count_of": "`count` and `blocks`",
            "every": " | ".join([*["per_call[2]"] * self._reads_gradients, *(
                f"bound[{self.bound.index(b)}]" for b in self._wide()
            )]),
            "slot": f"(chunk - words) / {len(CHUNK)}" if results else "0",
            "words_type": "long long" if self._between() else "const long long", "const": "const " * bool(self.word),
            "results": str(results), "finish_line": str(len(FINISH)),
            "slots": str(len(bound_lines(self.program)) - results),
            "function": f"{self.name}_{self.word or 'step'}",
        }  # fmt: skip

    @property
    def _reads_gradients(self) -> bool:
        return "g" in self.per_call

    def work_lines(self, line: int) -> list[str]:
        """The two functions of a step or a move: one writes its tables, the other launches its kernels."""
        scalars, stores = self.scalar_lines()
        comment, about = MOVE_COMMENTS.get(self.word, STEP)
        parts: dict[str, list[str]] = {key: [*lines] for key, lines in self._filled().items()}
        parts |= {
            "scalars": scalars, "stores": stores, "tables": self._tables(), "launches": self._launched(),
            "comment": comment.rstrip("\n").split("\n"), "about": about.rstrip("\n").split("\n"),
            "counted": ["tensor->step += 1;"] * (not self.word),
        }  # fmt: skip
        return filled_c(WORK, self._known(line), parts)

    def _wide(self) -> list[str]:
        """The lines of arrays that move 16 bytes at a time."""
        return [b for b in self.addressed if b not in self.singles]

    def _structs(self) -> Parts:
        arrays = [b for b in ["g", *self.addressed] if b not in self.shared]
        numbers = [f"double *{self.members[b]};" for b in self.shared]
        numbers += ["long long step;"] * self.counts_model
        about = "/* The model: the addresses of its numbers in the memory of a GPU; and its steps, where they count. */"
        shared = [about, "typedef struct {", *indented(numbers), f"}} {self.name}_shared;", ""]
        return {
            "hyper": [f"double {x};" for x in self.fields.values()] + ["unsigned seed;"] * self.seeded,
            "tensor": [*(f"{self.type_of(b)}{self.members[b]};" for b in arrays), "long long size, step;", *(
                f"double {x};" for x in self.counted.values()
            ), *["unsigned number;"] * self.seeded],
            "shared": shared if numbers else [],
            "scratch": [*SCRATCH.splitlines(), ""] if self.reduced else [],
        }  # fmt: skip

    def _filled(self) -> Parts:
        """The parts of the function that writes the tables."""
        results = len(self.reduced)
        addresses = {b: ("shared" if b in self.shared else "tensor", self.members[b]) for b in self.addressed}
        at = [(self.bound.index(b), *where) for b, where in addresses.items()]
        more = " + 1" * (not self.word)
        counts = {"t": f"tensor->step{more}", "shared_t": f"shared->step{more}"}
        head = f'extern "C" long long {self.name}_{f"{self.word}_fill".lstrip("_")}'
        const = "const " * bool(self.word)
        groups = [["long long count", f"{const}{self.name}_tensor *tensors", f"const {self.name}_hyper *hyper"],
                  [f"{self.name}_shared *shared"] * (bool(self.shared) or self.counts_model),
                  ["double *scratch"] * bool(results), ["long long *words"]]  # fmt: skip
        codes = ", ".join(str(REDUCTIONS[r.value.op].code) for r in self.reduced)
        return {
            "fill": call_lines(head, [[*itertools.chain(*groups)]], ""),
            "addresses": [*(f"bound[{i}] = (long long){owner}->{member};" for i, owner, member in at),
                          *[f"per_call[2] = (long long)tensor->{self.members['g']};"] * self._reads_gradients,
                          *(f"per_call[{len(GIVEN) + self.per_call.index(x)}] = {text};"
                            for x, text in counts.items() if x in self.per_call)],
            "finish": [f"long long *const finish = (long long *)(row + {len(self.program.columns)} * count);",
                       f"static const int kinds[] = {{{codes}}};"] if results else [],
            "first": ["const long long *const first = chunk;"] * bool(results),
            "joins": JOINS.splitlines() if results else [],
            "counts": ["shared->step += 1;"] * (self.counts_model and not self.word),
        }  # fmt: skip

    def _tables(self) -> list[str]:
        """The declarations of the scalar table and of the words of reductions."""
        givens, columns = len(GIVEN) + len(self.per_call), len(self.program.columns)
        table = "double" if self._between() else "const double"
        lines = [f"{table} *table = ({table} *)(per_call + {givens} * count);"]
        if self.reduced:
            lines.append(f"const long long *finish = (const long long *)(table + {columns} * count);")
        return lines

    def _launched(self) -> list[str]:
        """The statements of the launches: after an error there is none."""
        launches, size = self._launches(), len(FINISH)
        calls = [f"{self.name}_launch({x.kernel}, {x.blocks}, {x.arguments}, stream)" for x in launches]
        if len(calls) == 1:
            return [f"return {calls[0]};"]
        lines = []
        for x in launches:
            if x.arguments.startswith("joins"):
                stage = x.arguments.removeprefix("joins_")
                lines.append(f"const long long *first_{stage} = finish + {size * x.first} * count;")
                lines.append(f"void *{x.arguments}[] = {{&first_{stage}}};")
        if self._between():
            last = ", &finish" if self.reduced else ""
            lines.append(f"void *numbers[] = {{&count, &bound, &per_call, &table{last}}};")
        lines.append(f"cudaError_t error = {calls[0]};")
        for call in calls[1:]:
            lines += ["if (error == cudaSuccess)", f"    error = {call};"]
        return [*lines, "return error;"]

    def type_of(self, name: str) -> str:
        """The C type of the member for an array or a number on the GPU, up to its name."""
        dtype = self.layout.dtype(name) if name in dict(self.layout.dtypes) else "float32"
        form = self.layout.format(name)
        if name in self.singles:
            return "double *"
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
            return "(double)(shared->step + 1)" if value.arg and self.counts_model else "t"
        if value.op is Op.FACT and name == "numel":
            return "(double)tensor->size"
        if value.op is Op.FACT:
            return f"(double)({words[name]})" if name in WORDS else literal(EPS[self.dtype])
        if value.op is Op.LOAD:
            return f"tensor->{self.counted[name]}"
        if value.op not in (Op.HYPER, Op.MODEL_HYPER):
            return None
        return literal(self.static[name]) if name in self.static else f"hyper->{self.fields[name]}"

    def scalar_lines(self) -> tuple[list[str], list[str]]:
        """The statements for the row of a tensor, and those for its new numbers."""
        program, stage = self.program, scalar_stage(self.program)
        printer = ElementPrinter(
            self.form, without_table(program), stage, {}, literal, reserved=frozenset(self.reserved),
            known=lambda v: self.leaf(v, ""),
        )  # fmt: skip
        kinds = {name: "int" if is_boolean(v) else "double" for v, name in printer.names.items()}
        texts = [text for _, text in printer.lines()] + [printer.text(s.value) for s in stage.stores]
        count = [f"const double t = (double){'tensor->step' if self.word else '(tensor->step + 1)'};"]
        self.texts = texts
        lines = count * self.named("t", texts)
        lines += [f"const {kinds[name]} {name} = {text};" for name, text in printer.lines()]
        lines += [f"row[{i}] = {printer.text(c.value)};" for i, c in enumerate(program.scalars.columns)]
        values = [(self.counted[s.buffer], printer.text(s.value)) for s in program.scalars.stores]
        news = [f"const double new_{name} = {text};" for name, text in values]
        return lines + news, [f"tensor->{name} = new_{name};" for name, _ in values]


class CudaMove(CudaFile):
    """The move of parameters to where the model is evaluated, or back: a kernel and functions in a step's file."""

    def __init__(self, step: CudaFile, word: str, rule: Rule | None) -> None:
        assert rule is not None
        storage = CheckedStorage.of_layout(step.program, step.layout, step.program.memory.weights)
        super().__init__(rule, step.name, step.dtype, storage)
        if not self.program.elementwise:
            step.cannot("its point of evaluation is found by more than one kernel")
        if any(n.op is Op.LOAD and n.arg in step.singles for n in values(self.program)):
            step.cannot("its point of evaluation follows from a number on the GPU")
        self.word, self.members, self.counted = word, step.members, step.counted
        self.counts_model = step.counts_model
        self.per_call = [line for line in self.per_call if line != "g"]
