"""Writes a rule as C99: one source file and its header, which compile with nothing but a C library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rulec.compiler.ir import Buffer, Program
from rulec.compiler.pipeline import compile
from rulec.language.evaluation import to_evaluation, to_training
from rulec.language.node import Node, Op, node
from rulec.language.rule import Rule
from rulec.runtime.plan import needs_matrix
from rulec.standalone.cases import Case, versions
from rulec.standalone.prose import introduction, vendored

from ..cstyle.element import literal
from ..cstyle.text import comment, indented
from .standalone import STATUSES, CFile, is_vector
from .standalone_numbers import used
from .standalone_step import StepText
from .standalone_text import block, branch, extents, loop, signature, wrapped
from .standalone_words import TYPES, expression, narrowed, widened, words_used

#: Elements in a chunk of a tensor, and columns in a tile of a matrix: what one call of a stage's function updates.
CHUNK, TILE = 8192, 4096


class Source:
    """The text of the source file."""

    def __init__(self, file: CFile) -> None:
        self.file, self.name, self.upper = file, file.name, file.upper
        self.states = file.states
        #: The matrix functions that any step calls: all call the same.
        self.matrix_words = ""

    def text(self) -> str:
        """The whole file."""
        body = "\n".join(
            "\n".join(part) + "\n"
            for part in (
                self._structs(),
                self._find(),
                *self._look(),
                self._checks(),
                *self._updates(),
                *self._public(),
            )
            if part
        )
        lines = [
            *comment([*introduction(self.file.rule), "", *vendored()]), "", f'#include "{self.name}.h"', "",
            "#include <math.h>", "#include <stdbool.h>", "#include <stdlib.h>", "", *self._constants(body),
        ]  # fmt: skip
        words = words_used(self.matrix_words + body) + self.matrix_words
        whole = "\n".join(lines) + "\n\n" + words + body
        return "\n".join(line for x in whole.rstrip("\n").split("\n") for line in wrapped(x)) + "\n"

    def _constants(self, body: str) -> list[str]:
        told = {
            f"{self.upper}_CHUNK": (CHUNK, "Elements that one thread updates at a time."),
            f"{self.upper}_TILE": (TILE, "Columns of a matrix that one thread updates at a time."),
        }
        lines = [
            line
            for key, (value, why) in told.items()
            if key in body
            for line in (f"/* {why} */", f"#define {key} {value}")
        ]
        return [
            *lines, "/* What a state block begins with where it was initialised. */",
            f"#define {self.upper}_MAGIC UINT64_C({self.file.magic})",
        ]  # fmt: skip

    # Types

    def _structs(self) -> list[str]:
        shape = ["int64_t rows;", "int64_t cols;"] if self.file.shaped else []
        numbers = [f"double {self.states[n]};" for n in self.file.numbers()]
        head = ["uint64_t magic;", "int64_t steps;", "int64_t count;", *shape, *numbers]
        lines = ["/* The beginning of a state block. */", *_struct(f"{self.name}_head", head)]
        if self.file.shaped:
            extents = ["ndim", "count", "batch", "rows", "cols"]
            fields = [f"int64_t {x};" for x in extents] + ["int turned;"] * self._turns() + ["int kind;"]
            lines += [
                "",
                "/* A tensor as the rule sees it: a batch of matrices. */",
                *_struct(f"{self.name}_view", fields),
            ]
        places = [f"size_t {self.states[n]};" for n in self.file.all_arrays()]
        told = "/* Where the states lie, in bytes from the beginning of their block, and the bytes of it all. */"
        return [*lines, "", told, *_struct(f"{self.name}_places", [*places, "size_t bytes;"])]

    def _turns(self) -> bool:
        return self.file.family.rule.view.get("short") == "first"

    def _whole(self) -> str:
        return self.file.declared(self.file.inside("state_bytes")[0])

    def _view(self) -> str:
        return "&view" if self.file.shaped else "count"

    def _find(self) -> list[str]:
        body = [f"{self.name}_places found = {{0}};", f"size_t end = (sizeof({self.name}_head) + 63) / 64 * 64;"]
        cases = self.file.family.cases
        for kind, case in enumerate(cases):
            own = [line for b in self.file.arrays(case) for line in self._placed(b)]
            body += branch(f"view->kind == {kind}", own) if len(cases) > 1 and own else own
        body += ["found.bytes = end;", "return found;"]
        if not self.file.shaped and not self.file.all_arrays():
            body.insert(0, "(void)count;")
        if self.file.shaped:
            body = [*extents("view->", body), *body]
            body = body if any("view" in line for line in body) else ["(void)view;", *body]
        return [*signature(f"static {self.name}_places {self.name}_find", [self._whole()]), *block(body)]

    def _placed(self, buffer: Buffer) -> list[str]:
        kind = TYPES[self.file.state_dtype]
        field = self.states[buffer.name]
        size = self.file.size(buffer)
        size = f"(size_t){size if size.isidentifier() else f'({size})'} * sizeof({kind})"
        return [f"found.{field} = end;", f"end += ({size} + 63) / 64 * 64;"]

    # What a tensor is

    def _look(self) -> list[list[str]]:
        if not self.file.shaped:
            return []
        body = [
            *branch("ndim < 0 || (ndim > 0 && shape == NULL)", [f"return {self.upper}_BAD_ARGUMENT;"]),
            "view->ndim = ndim;", "view->count = 1;",
            *loop("i", "0", "ndim", [
                *branch("shape[i] < 0", [f"return {self.upper}_BAD_ARGUMENT;"]), "view->count *= shape[i];",
            ]),
            *self._matrices(), *self._kinds(),
        ]  # fmt: skip
        told = "/* What the rule sees of a tensor of this shape. */"
        return [[told, *signature(f"static int {self.name}_look", ["int ndim", "const int64_t *shape",
                 f"{self.name}_view *view"]), *block(body)]]  # fmt: skip

    def _matrices(self) -> list[str]:
        if self.file.family.rule.view.get("flatten") == "rest":
            wide = ["view->rows = shape[0];", *loop("i", "1", "ndim", ["view->cols *= shape[i];"])]
        else:
            wide = [
                *loop("i", "0", "ndim - 2", ["view->batch *= shape[i];"]),
                "view->rows = shape[ndim - 2];", "view->cols = shape[ndim - 1];",
            ]  # fmt: skip
        lines = ["view->batch = 1;", "view->rows = 1;", "view->cols = ndim < 2 ? view->count : 1;"]
        lines += branch("ndim >= 2", wide)
        if self._turns():
            swap = ["const int64_t rows = view->rows;", "view->rows = view->cols;", "view->cols = rows;"]
            lines += ["view->turned = ndim >= 2 && view->rows > view->cols;", *branch("view->turned", swap)]
        return lines

    def _kinds(self) -> list[str]:
        found = self.file.family
        lines: list[str] = []
        if found.applies is not None:
            lines += branch(f"!({self._condition(found.applies)})", [f"return {self.upper}_BAD_SHAPE;"])
        elif all(needs_matrix(case.versions[0].program) for case in found.cases):
            lines += branch("ndim < 2", [f"return {self.upper}_BAD_SHAPE;"])
        for kind, case in enumerate(found.cases):
            ways = [
                " && ".join(
                    self._condition(c) if truth else f"!({self._condition(c)})"
                    for c, truth in zip(found.conditions, truths, strict=True)
                )
                for truths in case.truths
            ]  # fmt: skip
            if len(found.cases) == 1:
                lines.append("view->kind = 0;")
            else:
                condition = " || ".join(f"({w})" for w in ways) if len(ways) > 1 else ways[0]
                lines += branch(condition, [f"view->kind = {kind};", "return 0;"])
        return [*lines, "return 0;"] if len(found.cases) == 1 else [*lines, f"return {self.upper}_BAD_SHAPE;"]

    def _condition(self, value: Node) -> str:
        def leaf(n: Node) -> str:
            fact = n if str(n.arg) in self.file.family.static else node(Op.FACT, n.arg)
            return self.file.known(fact, "view->")

        return expression(self._program, value, leaf)

    def _checks(self) -> list[str]:
        """Whether hyper-parameters lie in their ranges."""
        checks = []
        for key, field in self.file.hyper.items():
            h, own = self.file.family.rule.hyper[key], f"hyper->{field}"
            ends = [f"{own} {sign} {literal(v)}" for sign, v in h.ends]
            checks += ends or [f"{own} == {own}"]
        if not checks:
            return []
        told = "/* Whether all hyper-parameters lie in their ranges; a NaN lies in none. */"
        head = f"static int {self.name}_in_range(const {self.name}_hyper *hyper)"
        return [told, head, *block([f"return {' && '.join(checks)};"])]

    # Steps

    def _moves(self) -> list[tuple[str, str, Rule]]:
        """The functions that move a parameter to where its rule is evaluated and back, and the rules that do it."""
        there, back = to_evaluation(self.file.rule), to_training(self.file.rule)
        if there is None or back is None:
            return []
        return [("to_evaluation", "where the model is to be evaluated", there), ("to_training", "back", back)]

    def _updates(self) -> list[list[str]]:
        found = []
        for kind, case in enumerate(self.file.family.cases):
            for number, version in enumerate(case.versions):
                function = self._function("update", kind, number)
                step = StepText(self.file, version, function, "step")
                self.matrix_words = self.matrix_words or step.words()
                found.append(step.text().rstrip("\n").split("\n"))
            for word, _, rule in self._moves():
                program = compile(rule, case.facts, self.file.family.static)
                (version,) = versions(rule, program, case.facts, {}, self.file.dtype, self.file.state_dtype)[:1]
                function = self._function(word, kind, 0, "_")
                move = StepText(self.file, version, function, word, counts=False)
                found.append(move.text().rstrip("\n").split("\n"))
        return found

    def _function(self, word: str, kind: int, number: int, end: str = "") -> str:
        cases = self.file.family.cases
        name = f"{self.name}_{word}{end}"
        name += f"_{kind}" if len(cases) > 1 else ""
        return name + (chr(ord("a") + number) if len(cases[kind].versions) > 1 and word == "update" else "")

    # What is called from outside

    def _public(self) -> list[list[str]]:
        moves = [self._move(word) for word, _, _ in self._moves()]
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
        """What every function checks first."""
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
        count = "view.count" if self.file.shaped else "count"
        shape = ["head->rows = view.rows;", "head->cols = view.cols;"] if self.file.shaped else []
        body = [
            *self._begin(["param"]), f"{self.name}_head *const head = state;", f"head->magic = {self.upper}_MAGIC;",
            "head->steps = 0;", f"head->count = {count};", *shape,
            *(f"head->{self.states[n]} = 0.0;" for n in self.file.numbers() if len(self.file.family.cases) > 1),
        ]  # fmt: skip
        cases = [self._first_values(case) for case in self.file.family.cases]
        texts = [line for own in cases for line in own]
        if any("at." in line for line in texts):
            body.append(f"const {self.name}_places at = {self.name}_find({self._view()});")
        if self.file.shaped:
            body += extents("view.", texts)
        for kind, own in enumerate(cases):
            body += branch(f"view.kind == {kind}", own) if len(cases) > 1 and own else own
        return self._defined("init", [*body, f"return {self.upper}_OK;"])

    def _first_values(self, case: Case) -> list[str]:
        lines = []
        for buffer in case.program.states:
            assert buffer.init is not None
            if not is_vector(buffer):
                lines.append(f"head->{self.states[buffer.name]} = {self._initial(buffer.init)};")
                continue
            kind, compute = TYPES[self.file.state_dtype], self.file.state_dtype
            name = self.states[buffer.name]
            copy = buffer.init.op is Op.LOAD and self.file.state_dtype == self.file.dtype
            value = "param[i]" if copy else narrowed(self._initial(buffer.init), compute)
            if buffer.init.op is Op.CONST and not buffer.init.arg:
                value = "0"
            filled = loop("i", "0", self.file.size(buffer), [f"values[i] = {value};"])
            lines += ["{", *indented([f"{kind} *const values = ({kind} *)((char *)state + at.{name});", *filled]), "}"]
        return lines

    def _initial(self, value: Node) -> str:
        def leaf(n: Node) -> str:
            return widened("param[i]", self.file.dtype) if n.op is Op.LOAD else self.file.known(n)

        return expression(self._program, value, leaf)

    @property
    def _program(self) -> Program:
        return self.file.family.cases[0].program

    def _known(self) -> list[str]:
        """Whether a state block belongs to the tensor."""
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
        body += self._chosen(lambda kind, number: f"{self._function('update', kind, number)}({arguments})")
        return self._defined("step", body)

    def _arguments(self, word: str) -> str:
        return ", ".join("&view" if p.kind == "view" else p.name for p in self.file.inside(word))

    def _chosen(self, call: Callable[[int, int], str]) -> list[str]:
        """The statements that return what the version for this tensor and step does."""
        lines: list[str] = []
        cases = self.file.family.cases
        for kind, case in enumerate(cases):
            own: list[str] = []
            for number, version in enumerate(case.versions):
                tests = [
                    f"{'' if truth else '!'}({self._predicate(value)})"
                    for (_, value), truth in zip(case.program.predicates, version.decided, strict=True)
                ]
                if self._turns() and len({v.turned for v in case.versions}) > 1:
                    tests.append("view.turned" if version.turned else "!view.turned")
                last = number == len(case.versions) - 1
                done = [f"return {call(kind, number)};"]
                own += done if last else branch(" && ".join(tests), done)
            if used(own, "t"):
                own.insert(0, "const double t = (double)(head->steps + 1);")
            lines += own if kind == len(cases) - 1 else branch(f"view.kind == {kind}", own)
        return lines

    def _predicate(self, value: Node) -> str:
        return expression(self._program, value, lambda n: self.file.known(n, "view."))

    def _move(self, word: str) -> list[str]:
        count = "view.count" if self.file.shaped else "count"
        arguments = self._arguments(word)
        body = [
            *self._begin(["param"]), *self._known(), *branch(f"{count} == 0", ["return 0;"]),
        ]  # fmt: skip
        cases = self.file.family.cases
        for kind in range(len(cases)):
            call = [f"return {self._function(word, kind, 0, '_')}({arguments});"]
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


def _struct(name: str, fields: Sequence[str]) -> list[str]:
    return ["typedef struct {", *indented(fields), f"}} {name};"]
