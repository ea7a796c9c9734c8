"""Prints one version of a program as a C function that updates one tensor, and the functions of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Buffer, Result
from rulec.compiler.layout import scale_name
from rulec.kernel.place import COL, ROW, TENSOR, is_shaped, place
from rulec.kernel.quantized import CodedBuffer
from rulec.language.expr.node import Node, Op, walk
from rulec.runtime.buckets.plan import Plan
from rulec.standalone.cases import Version

from ...cstyle.element import Parameter
from ...cstyle.format_words import CodedNames, function_name
from ...cstyle.numbers import LOOPS, indexed, used
from .matrix import WRITTEN, MatrixFunctions
from .model import CFile
from .numbers import CNumbers
from .stage import RESERVED, TYPES, StageText, block, branch, extents, loop, narrowed, signature, widened


class StepText:
    """The function `function`: one version of the work of a public function `word`.

    It counts one more step where `counts`; else it is no step, and `t` is the number of steps so far.
    """

    def __init__(self, file: CFile, version: Version, function: str, word: str, counts: bool = True) -> None:
        self.file, self.version, self.name, self.function = file, version, file.name, function
        self.parameters, self.counts = file.inside(word), counts
        self.program, self.layout = version.program, version.layout
        self.plan: Plan = version.plan
        several = len(self.program.stages) > 1
        self.stages = [
            StageText(version, i, f"{function}_stage_{i}" if several else f"{function}_elements")
            for i in range(len(self.program.stages))
        ]
        self.taken = set(RESERVED) | {"t"}
        self.states = file.states
        self.pointers = self._pointers()
        #: The variables of scales of states in codes, of their values in a chunk, and of those of a whole tensor.
        self.codes = CodedNames(self.layout, self.taken)
        self.values = {name: unique_name(f"{name}_values", self.taken) for name, _ in self.layout.formats}
        tiled = {buffer.name for stage in self.stages if stage.nest.shaped for buffer in stage.coded}
        self.wholes = {name: unique_name(f"{name}_floats", self.taken) for name in sorted(tiled)}
        self.taken |= {"some"} if self.layout.formats else set()
        self.matrices = MatrixFunctions(version, self.taken)
        self.numbers = CNumbers(self.program, self._roots(), self._leaf, self.taken)
        #: Arrays of double for one step: name and size.
        self.work: list[tuple[str, str]] = []
        self.reduced: dict[str, str] = {}

    # Names

    def _pointers(self) -> dict[str, str]:
        names = {"p": "param", "g": "grad"}
        self.taken |= {b.name for b in self.program.buffers if b.role == "input"}
        for b in self.program.buffers:
            if b.name not in names:
                names[b.name] = b.name if b.role == "input" else unique_name(b.name, self.taken)
        return names

    def _columns(self) -> list[int]:
        """The columns of the scalar table in use."""
        values = [
            *(root for s in self.program.stages for root in s.roots),
            *(v for g in self.plan.gaps for v in g.values),
        ]
        return sorted({int(n.arg) for n in walk(values) if n.op is Op.SCALAR})  # type: ignore[call-overload]

    def _roots(self) -> dict[Node, str]:
        program = self.program
        roots = {program.columns[i].value: program.columns[i].name for i in self._columns()}
        for result in program.vectors:
            roots.setdefault(result.value, result.name)
        for store in (*program.finish, *program.scalars.stores):
            roots.setdefault(store.value, f"{store.buffer}_new")
        if program.skip is not None:
            roots.setdefault(program.skip, "skipped")
        return roots

    def _leaf(self, value: Node, index: str) -> str:
        if value.op is Op.SCALAR:
            return self.numbers.text(self.program.columns[int(value.arg)].value)  # type: ignore[call-overload]
        if value.op is Op.RESULT:
            return self._result(str(value.arg), index)
        if value.op is Op.LOAD:
            return self._loaded(self.program.buffer(str(value.arg)), index)
        return self.file.known(value)

    def _result(self, name: str, index: str) -> str:
        if name in self.reduced:
            return f"{self.reduced[name]}[{index}]" if index else self.reduced[name]
        return self.numbers.text(self.program.result(name).value, self._letters(self.program.result(name)))

    def _loaded(self, buffer: Buffer, index: str) -> str:
        if index:
            return widened(f"{self.pointers[buffer.name]}[{index}]", self.layout.dtype(buffer.name))
        return self.pointers[buffer.name] if buffer.role == "input" else f"head->{self.states[buffer.name]}"

    @staticmethod
    def _letters(result: Result) -> str:
        return "".join(c for c in result.axes.letters if c in "bij")

    # The function

    def text(self) -> str:
        """The functions of the stages, then the function that calls them."""
        body = self._body()
        silent = [f"(void){p.name};" for p in self.parameters if not used(body, p.name)]
        head = signature(f"static int {self.function}", [self.file.declared(p) for p in self.parameters])
        step = "\n".join([*head, *block([*silent, *body])]) + "\n"
        return "\n".join([*(s.text() for s in self.stages), step])

    def _body(self) -> list[str]:
        program = self.program
        scalars = [program.columns[i].value for i in self._columns() if i < len(program.scalars.columns)]
        stored = [s.value for s in program.scalars.stores]
        lines = self.numbers.lines([*scalars, *stored])
        for index in range(len(program.stages)):
            gap = self.plan.gaps[index].values
            lines += self.numbers.lines([v for v in gap if v.op not in WRITTEN])
            lines += [line for v in gap if v.op in WRITTEN for line in self._matrix(v)]
            if index == len(program.stages) - 1 and program.skip is not None:
                lines += branch(
                    self.numbers.text(program.skip), ["free(work);"] * bool(self._has_work()) + ["return 0;"]
                )
            lines += self._pass(index)
        lines += self.numbers.lines(self.plan.gaps[-1].values)
        lines += self._finish()
        lines += ["free(work);"] * self._has_work() + ["head->steps += 1;"] * self.counts + ["return 0;"]
        sizes = self._sizes()
        work = self._work()
        return [*self._begin([*sizes, *work, *lines]), *sizes, *work, *lines]

    def _begin(self, lines: Sequence[str]) -> list[str]:
        """The variables for parts of the state block and of the view, as far as lines name them."""
        states = [b for b in self.program.states if {"b", "i", "j"} & set(b.axes.letters)]
        read = [b for b in states if used(lines, self.pointers[b.name])]
        declared = []
        if read:
            declared.append(
                f"const {self.name}_places at = {self.name}_find({'view' if self.file.shaped else 'count'});"
            )
        for b in read:
            form = self.layout.format(b.name)
            kinds = [TYPES[self.layout.dtype(b.name)]] if form is None else [f"{form.code_dtype}_t", "float"]
            names = [self.pointers[b.name], self.codes.scales.get(scale_name(b.name), "")]
            for kind, name, field in zip(kinds, names, self.file.fields_of(b.name), strict=False):
                declared.append(f"{kind} *const {name} = ({kind} *)((char *)state + at.{field});")
        t = [
            "const double t = (double)head->steps;"
            if not self.counts
            else "const double t = (double)(head->steps + 1);"
        ]
        t = t if used(lines, "t") else []
        if used([*lines, *t], "head"):
            declared.insert(0, f"{self.name}_head *const head = state;")
        if self.file.shaped:
            declared = [*extents("view->", [*lines, *declared]), *declared]
        return [*declared, *t]

    # Passes over the tensor

    def _sizes(self) -> list[str]:
        shaped = [is_shaped(self.program, s, self.layout) for s in self.program.stages]
        lines = []
        if any(shaped) or self.matrices.values:
            height, width = ("cols", "rows") if self.version.turned else ("rows", "cols")
            lines += [f"const int64_t height = {height};", f"const int64_t width = {width};"]
        if any(shaped):
            lines += [
                "/* Tiles of the matrices: their size follows from the shape, never from the number of threads. */",
                "const int64_t tall = height > 4096 ? (height + 63) / 64 : 64;",
                "const int64_t down = (height + tall - 1) / tall;",
                f"const int64_t across = (width + {self.name.upper()}_TILE - 1) / {self.name.upper()}_TILE;",
            ]  # fmt: skip
        if self.wholes or not all(shaped):
            chunk = f"{self.name.upper()}_CHUNK"
            lines.append(f"const int64_t chunks = (count + {chunk} - 1) / {chunk};")
        return lines

    def _pass(self, index: int) -> list[str]:
        stage = self.stages[index]
        lines = self._coded_tiles(stage) if stage.nest.shaped else self._chunks(stage)
        for reduction in stage.stage.reduces:
            lines += self._folded(reduction, stage)
        return lines

    def _chunks(self, stage: StageText) -> list[str]:
        plain = signature(stage.name, [*stage.chunk(), *self._arguments(stage)], ";")
        return self._each_chunk(self._coded_call(stage) if stage.coded else plain)

    def _each_chunk(self, lines: list[str]) -> list[str]:
        """Statements for every chunk, from `start` to `stop`."""
        chunk = f"{self.name.upper()}_CHUNK"
        body = [
            f"const int64_t start = chunk * {chunk};",
            f"const int64_t stop = start + {chunk} < count ? start + {chunk} : count;",
            *lines,
        ]
        return [*_parallel("chunks"), *loop("chunk", "0", "chunks", body)]

    def _coded_tiles(self, stage: StageText) -> list[str]:
        """The calls for tiles; states in codes are decoded before all of them, and encoded after them."""
        values = {buffer.name: f"{self.wholes[buffer.name]} + start" for buffer in stage.coded}
        decoded = [self._moved("decode", buffer, values) for buffer in stage.coded if buffer.loaded]
        encoded = [self._moved("encode", buffer, values) for buffer in stage.coded if buffer.stored]
        some = ["const int64_t some = stop - start;"]
        before, after = (self._each_chunk(some + lines) if lines else [] for lines in (decoded, encoded))
        return [*before, *self._tiles(stage), *after]

    def _coded_call(self, stage: StageText) -> list[str]:
        """The call for a chunk whose states are decoded before it and encoded after it."""
        lines = ["const int64_t some = stop - start;"]
        lines += [f"float {self.values[buffer.name]}[{self.name.upper()}_CHUNK];" for buffer in stage.coded]
        lines += [self._moved("decode", buffer, self.values) for buffer in stage.coded if buffer.loaded]
        lines += signature(stage.name, [*stage.chunk(), *self._arguments(stage)], ";")
        return lines + [self._moved("encode", buffer, self.values) for buffer in stage.coded if buffer.stored]

    def _moved(self, way: str, buffer: CodedBuffer, values: Mapping[str, str]) -> str:
        """The call that decodes or encodes a state in a chunk; `values` has by state where its values are."""
        form, name = buffer.format, buffer.name
        codes, scales = self.pointers[name], self.codes.scales[scale_name(name)]
        at = f"{codes} + start{' / 2' * (form.bits == 4)}, {scales} + start / {form.block}"
        return f"{way}_{function_name(form)}({at}, some, {values[name]});"

    def _tiles(self, stage: StageText) -> list[str]:
        wide = f"{self.name.upper()}_TILE"
        places = ["matrix", "top", "bottom", "left", "right", "height", "width"]
        body = [
            "const int64_t aside = tile % across, below = tile / across % down, matrix = tile / across / down;",
            "const int64_t top = below * tall, bottom = top + tall < height ? top + tall : height;",
            f"const int64_t left = aside * {wide}, right = left + {wide} < width ? left + {wide} : width;",
            *signature(stage.name, [*places, *self._arguments(stage)], ";"),
        ]
        return [*_parallel("batch * down * across"), *loop("tile", "0", "batch * down * across", body)]

    def _arguments(self, stage: StageText) -> list[str]:
        return [self._argument(p, stage) for p in stage.passed()]

    def _argument(self, parameter: Parameter, stage: StageText) -> str:
        start = " + start" * (bool(stage.coded) and not stage.nest.shaped)
        if parameter.kind == "buffer":
            values = self.wholes if stage.nest.shaped else self.values
            return values.get(parameter.of) or f"{self.pointers[parameter.of]}{start}"
        if parameter.kind == "vector":
            result = self.program.result(parameter.of)
            if parameter.of in self.matrices.results:
                return f"{self.matrices.results[parameter.of]}{start}"
            letters = self._letters(result)
            return self.numbers.text(result.value, letters).removesuffix(f"[{LOOPS[letters][0]}]")
        if parameter.kind == "scalar":
            value = self.program.columns[int(parameter.of)].value
            text = self.numbers.text(value)
            return text if parameter.type == "bool" else narrowed(text, self.layout.compute)
        return self._slots(self.program.result(parameter.of), stage)

    def _slots(self, reduction: Result, stage: StageText) -> str:
        """The place for a chunk's or tile's part of a reduction."""
        where = place(reduction.axes, self.layout)
        kind = LOOPS[self._letters(reduction)][2] if self._letters(reduction) else "parts"
        if reduction.name not in self.reduced:
            self.reduced[reduction.name] = unique_name(f"{reduction.name}_{kind}", self.taken)
            tiles = "batch * down * across" if stage.nest.shaped else "chunks"
            size = {ROW: "across * batch * height", COL: "down * batch * width", TENSOR: tiles}[where]
            self.work.append((self.reduced[reduction.name], size))
        offsets = {ROW: "aside * batch * height", COL: "below * batch * width"}
        offset = offsets.get(where) or ("tile" if stage.nest.shaped else "chunk")
        return f"{self.reduced[reduction.name]} + {offset}"

    def _folded(self, reduction: Result, stage: StageText) -> list[str]:
        """The statements that join the parts of a reduction, always in the same order."""
        where, name = place(reduction.axes, self.layout), self.reduced[reduction.name]
        word = {Op.SUM: "fold_sum", Op.MIN: "fold_min", Op.MAX: "fold_max"}[reduction.value.op]
        if where == ROW:
            return [f"{word}({name}, across, batch * height);"]
        if where == COL:
            return [f"{word}({name}, down, batch * width);"]
        count = "batch * down * across" if stage.nest.shaped else "chunks"
        self.reduced[reduction.name] = unique_name(reduction.name, self.taken)
        return [f"{word}({name}, {count}, 1);", f"const double {self.reduced[reduction.name]} = {name}[0];"]

    # Numbers and vectors

    def _finish(self) -> list[str]:
        lines = []
        for store in self.program.finish:
            buffer = self.program.buffer(store.buffer)
            letters = "".join(c for c in buffer.axes.letters if c in "bij")
            if not letters:
                lines.append(f"head->{self.states[buffer.name]} = {self.numbers.text(store.value)};")
                continue
            variable, size, _ = LOOPS[letters]
            text = narrowed(self.numbers.text(store.value, letters), self.layout.dtype(buffer.name))
            body = indexed([f"{self.pointers[buffer.name]}[{variable}] = {text};"], letters)
            lines += loop(variable, "0", size, body)
        stores = self.program.scalars.stores
        return lines + [f"head->{self.states[s.buffer]} = {self.numbers.text(s.value)};" for s in stores]

    def _matrix(self, value: Node) -> list[str]:
        operand, steps = value.args
        return self.matrices.call(value, self.pointers[str(operand.arg)], self.numbers.text(steps))

    # Memory for one step

    def _arrays(self) -> list[tuple[str, str]]:
        return [*self.work, *self.numbers.work]

    def _wide(self) -> list[tuple[str, str, str]]:
        """Arrays of the parameter's shape, and room for matrix functions: name, type, and size in doubles."""
        real = TYPES[self.layout.compute]
        each = "count" if real == "double" else "(count + 1) / 2"
        scratch = [self.pointers[b.name] for b in self.program.buffers if b.role == "scratch"]
        names = [*scratch, *self.matrices.results.values()]
        floats = [(name, "float", "(count + 1) / 2") for name in self.wholes.values()]
        return [*((name, real, each) for name in names), *floats, *self.matrices.rooms()]

    def _has_work(self) -> bool:
        return bool(self._arrays() or self._wide()) or any(s.reduces for s in self.program.stages)

    def _work(self) -> list[str]:
        arrays, wide = self._arrays(), self._wide()
        if not arrays and not wide:
            return []
        total = " + ".join([*(size for _, size in arrays), *(size for _, _, size in wide)])
        lines = [
            f"double *const work = calloc((size_t)({total}), sizeof(double));",
            *branch("work == NULL", [f"return {self.name.upper()}_NO_MEMORY;"]),
        ]
        at = "work"
        for name, size in arrays:
            lines.append(f"double *const {name} = {at};")
            at = f"{name} + {size}"
        for name, real, size in wide:
            lines.append(f"{real} *const {name} = {at if real == 'double' else f'({real} *)({at})'};")
            at = f"{at} + {size}"
        return lines


def _parallel(count: str) -> list[str]:
    return ["#ifdef _OPENMP", f"#pragma omp parallel for schedule(static) if ({count} > 1)", "#endif"]
