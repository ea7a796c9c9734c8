"""Prints the public functions of a rule in C: each checks its arguments, and calls a function inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rulec.compiler.ir import Buffer
from rulec.formats import Format
from rulec.language.expr.node import Node, Op
from rulec.standalone.cases import Case

from ...cstyle.dialect import indented
from ...cstyle.format_words import function_name
from ...cstyle.numbers import used
from .model import STATUSES, CFile, is_vector
from .stage import TYPES, block, branch, expression, extents, loop, narrowed, signature, widened


class Public:
    """The functions of a header."""

    def __init__(self, file: CFile) -> None:
        self.file, self.name, self.upper, self.states = file, file.name, file.upper, file.states

    def text(self) -> list[list[str]]:
        """Each function, as lines."""
        moves = [self._move(word) for word in self.file.moves()]
        return [
            self._defaults(),
            self._state_bytes(),
            self._init(),
            self._step(),
            *moves,
            self._steps(),
            self._message(),
        ]

    def _defaults(self) -> list[str]:
        body = [f"const {self.name}_hyper hyper = {self.upper}_DEFAULTS;", "return hyper;"]
        return self._defined("defaults", body)

    def _defined(self, word: str, body: Sequence[str]) -> list[str]:
        return [*signature(*self.file.head(word)), *block(body)]

    def _begin(self, pointers: Sequence[str]) -> list[str]:
        """The checks at the beginning of a function."""
        null = " || ".join(f"{p} == NULL" for p in pointers)
        null = f"({null})" if len(pointers) > 1 else null
        bad = f"return {self.upper}_BAD_ARGUMENT;"
        defaults = f"const {self.name}_hyper defaults = {self.upper}_DEFAULTS;"
        lines = [defaults]
        if self.file.shaped:
            lines += [f"{self.name}_view view;", f"const int status = {self.name}_look(ndim, shape, &view);"]
            lines += branch("status != 0", ["return status;"])
            lines += branch(f"state == NULL || (view.count > 0 && {null})", [bad])
        else:
            lines += branch(f"count < 0 || state == NULL || (count > 0 && {null})", [bad])
        lines += branch("hyper == NULL", ["hyper = &defaults;"])
        if self.file.hyper:
            lines += branch(f"!{self.name}_in_range(hyper)", [f"return {self.upper}_BAD_HYPER;"])
        return lines

    def _state_bytes(self) -> list[str]:
        if self.file.shaped:
            bad = branch(f"{self.name}_look(ndim, shape, &view) != 0", ["return 0;"])
            body = [f"{self.name}_view view;", *bad, f"return {self.name}_find(&view).bytes;"]
        else:
            body = [f"return count < 0 ? 0 : {self.name}_find(count).bytes;"]
        return self._defined("state_bytes", body)

    def _init(self) -> list[str]:
        count, view = ("view.count", "&view") if self.file.shaped else ("count", "count")
        shape = ["head->rows = view.rows;", "head->cols = view.cols;"] if self.file.shaped else []
        body = [
            *self._begin(["param"]), f"{self.name}_head *const head = state;", f"head->magic = {self.upper}_MAGIC;",
            "head->steps = 0;", f"head->count = {count};", *shape,
            *(f"head->{p.name} = {p.name};" for p in self.file.words_of_bits),
            *(f"head->{self.states[n]} = 0.0;" for n in self.file.numbers() if len(self.file.family.cases) > 1),
        ]  # fmt: skip
        cases = [self._first_values(case) for case in self.file.family.cases]
        texts = [line for lines in cases for line in lines]
        if any("at." in line for line in texts):
            body.append(f"const {self.name}_places at = {self.name}_find({view});")
        if self.file.shaped:
            body += extents("view.", texts)
        for kind, lines in enumerate(cases):
            body += branch(f"view.kind == {kind}", lines) if len(cases) > 1 and lines else lines
        return self._defined("init", [*body, f"return {self.upper}_OK;"])

    def _first_values(self, case: Case) -> list[str]:
        lines = []
        for buffer in case.program.states:
            assert buffer.init is not None
            if not is_vector(buffer):
                lines.append(f"head->{self.states[buffer.name]} = {self._initial(buffer.init)};")
                continue
            layout, name = case.versions[0].layout, self.states[buffer.name]
            form, stored = layout.format(buffer.name), layout.dtype(buffer.name)
            if form is not None:
                lines += self._first_codes(buffer, form)
                continue
            kind = TYPES[stored]
            copy = buffer.init.op is Op.LOAD and stored == self.file.dtype
            value = "param[i]" if copy else narrowed(self._initial(buffer.init), stored)
            if buffer.init.op is Op.CONST and not buffer.init.arg:
                value = "0"
            filled = loop("i", "0", self.file.size(buffer), [f"values[i] = {value};"])
            lines += ["{", *indented([f"{kind} *const values = ({kind} *)((char *)state + at.{name});", *filled]), "}"]
        return lines

    def _first_codes(self, buffer: Buffer, form: Format) -> list[str]:
        """The statements that encode the first values of a state, chunk by chunk."""
        assert buffer.init is not None
        codes, scales = self.file.fields_of(buffer.name)
        value = narrowed(self._initial(buffer.init, "param[start + i]"), "float32")
        value = "0" if buffer.init.op is Op.CONST and not buffer.init.arg else value
        half = " / 2" * (form.bits == 4)
        body = [
            f"for (int64_t start = 0; start < count; start += {self.file.chunk}) {{",
            *indented(
                [
                    f"const int64_t some = count - start < {self.file.chunk} ? count - start : {self.file.chunk};",
                    f"float values[{self.file.chunk}];",
                    *loop("i", "0", "some", [f"values[i] = {value};"]),
                    f"encode_{function_name(form)}(codes + start{half}, scales + start / {form.block}, some, values);",
                ]
            ),
            "}",
        ]
        kind = f"{form.code_dtype}_t"
        return ["{", *indented([
            f"{kind} *const codes = ({kind} *)((char *)state + at.{codes});",
            f"float *const scales = (float *)((char *)state + at.{scales});", *body,
        ]), "}"]  # fmt: skip

    def _initial(self, value: Node, element: str = "param[i]") -> str:
        def leaf(n: Node) -> str:
            return widened(element, self.file.dtype) if n.op is Op.LOAD else self.file.known(n)

        return expression(self.file.program, value, leaf)

    def _known(self) -> list[str]:
        """The check that a state block belongs to the tensor."""
        checks = [f"head->magic != {self.upper}_MAGIC"]
        if self.file.shaped:
            checks += ["head->count != view.count", "head->rows != view.rows", "head->cols != view.cols"]
        else:
            checks += ["head->count != count"]
        return [
            f"{self.name}_head *const head = state;", *branch(" || ".join(checks), [f"return {self.upper}_BAD_STATE;"])
        ]  # fmt: skip

    def _step(self) -> list[str]:
        count = "view.count" if self.file.shaped else "count"
        pointers = ["param", "grad", *(key for key, kind in self.file.inputs if kind == "like p")]
        body = [
            *self._begin(pointers), *self._known(), *branch(f"{count} == 0", ["head->steps += 1;", "return 0;"]),
        ]  # fmt: skip
        arguments = self._arguments("step")
        body += self._chosen(lambda kind, number: f"{self.file.inner_name('update', kind, number)}({arguments})")
        return self._defined("step", body)

    def _arguments(self, word: str) -> str:
        return ", ".join("&view" if p.kind == "view" else p.name for p in self.file.inside(word))

    def _chosen(self, call: Callable[[int, int], str]) -> list[str]:
        """The statements that call the version for this tensor and step, and return its status."""
        lines: list[str] = []
        cases = self.file.family.cases
        for kind, case in enumerate(cases):
            calls: list[str] = []
            for number, version in enumerate(case.versions):
                tests = [
                    f"{'' if truth else '!'}({self._predicate(value)})"
                    for (_, value), truth in zip(case.program.predicates, version.decided, strict=True)
                ]
                if self.file.turns and len({v.turned for v in case.versions}) > 1:
                    tests.append("view.turned" if version.turned else "!view.turned")
                last = number == len(case.versions) - 1
                done = [f"return {call(kind, number)};"]
                calls += done if last else branch(" && ".join(tests), done)
            if used(calls, "t"):
                calls.insert(0, "const double t = (double)(head->steps + 1);")
            lines += calls if kind == len(cases) - 1 else branch(f"view.kind == {kind}", calls)
        return lines

    def _predicate(self, value: Node) -> str:
        return expression(self.file.program, value, lambda n: self.file.known(n, "view."))

    def _move(self, word: str) -> list[str]:
        count = "view.count" if self.file.shaped else "count"
        arguments = self._arguments(word)
        body = [
            *self._begin(["param"]), *self._known(), *branch(f"{count} == 0", ["return 0;"]),
        ]  # fmt: skip
        cases = self.file.family.cases
        for kind in range(len(cases)):
            call = [f"return {self.file.inner_name(word, kind)}({arguments});"]
            body += call if kind == len(cases) - 1 else branch(f"view.kind == {kind}", call)
        return self._defined(word, body)

    def _steps(self) -> list[str]:
        body = [
            f"const {self.name}_head *const head = state;",
            f"return head == NULL || head->magic != {self.upper}_MAGIC ? -1 : head->steps;",
        ]
        return self._defined("steps", body)

    def _message(self) -> list[str]:
        cases = [line for key, text in STATUSES for line in (f"case {self.upper}_{key}:", f'    return "{text}";')]
        body = ["switch (status) {", *cases, "default:", '    return "no status of this rule";', "}"]
        return self._defined("message", body)
