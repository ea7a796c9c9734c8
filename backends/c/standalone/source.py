"""Prints the standalone source file of a rule in C99, for a compiler and a C library alone.

One of its functions finds the matrices of a tensor, and the case of the rule for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rulec.compiler.ir import Buffer
from rulec.compiler.layout import Layout
from rulec.compiler.pipeline import compile
from rulec.language.expr.node import Node, Op, node
from rulec.runtime.buckets.plan import needs_matrix
from rulec.standalone.cases import versions
from rulec.standalone.prose import introduction, vendored

from ...cstyle.dialect import comment, indented
from ...cstyle.element import literal
from ...cstyle.format_words import format_functions
from .model import CFile
from .public import Public
from .stage import C99, TYPES, block, branch, expression, extents, guarded, loop, signature, words_used, wrapped
from .step import StepText

#: Columns in a tile of a matrix, for one call of a stage's function.
TILE = 4096


class Source:
    """The text of the source file."""

    def __init__(self, file: CFile) -> None:
        self.file, self.name, self.upper = file, file.name, file.upper
        self.states = file.states
        #: The matrix functions called in steps, the same in all of them.
        self.matrix_words = ""

    def text(self) -> str:
        """The whole file."""
        body = "\n".join(
            "\n".join(part) + "\n"
            for part in (
                self._structs(),
                self._find(),
                *([View(self.file).text()] if self.file.shaped else []),
                self._checks(),
                *self._updates(),
                *Public(self.file).text(),
            )
            if part
        )
        formats = guarded("\n".join(format_functions(self.file.formats, C99)))
        formats += "\n" * bool(formats)
        lines = [
            *comment([*introduction(self.file.rule), "", *vendored()]), "", f'#include "{self.name}.h"', "",
            "#include <math.h>", "#include <stdbool.h>", "#include <stdlib.h>", "", *self._constants(body),
        ]  # fmt: skip
        words = words_used(self.matrix_words + formats + body) + self.matrix_words + formats
        whole = "\n".join(lines) + "\n\n" + words + body
        return "\n".join(line for x in whole.rstrip("\n").split("\n") for line in wrapped(x)) + "\n"

    def _constants(self, body: str) -> list[str]:
        sizes = {
            f"{self.upper}_CHUNK": (self.file.chunk, "Elements that one thread updates at a time."),
            f"{self.upper}_TILE": (TILE, "Columns of a matrix that one thread updates at a time."),
        }
        lines = [
            line
            for key, (value, why) in sizes.items()
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
        numbers = [f"int64_t {p.name};" for p in self.file.words_of_bits]
        numbers += [f"double {self.states[n]};" for n in self.file.numbers()]
        head = ["uint64_t magic;", "int64_t steps;", "int64_t count;", *shape, *numbers]
        lines = ["/* The beginning of a state block. */", *_struct(f"{self.name}_head", head)]
        if self.file.shaped:
            extents = ["ndim", "count", "batch", "rows", "cols"]
            fields = [f"int64_t {x};" for x in extents] + ["int turned;"] * self.file.turns + ["int kind;"]
            lines += [
                "",
                "/* A tensor as the rule sees it: a batch of matrices. */",
                *_struct(f"{self.name}_view", fields),
            ]
        places = [f"size_t {field};" for n in self.file.all_arrays() for field in self.file.fields_of(n)]
        comment = "/* Where the states lie, in bytes from the beginning of their block, and the bytes of it all. */"
        return [*lines, "", comment, *_struct(f"{self.name}_places", [*places, "size_t bytes;"])]

    def _whole(self) -> str:
        return self.file.declared(self.file.inside("state_bytes")[0])

    def _find(self) -> list[str]:
        body = [f"{self.name}_places places = {{0}};", f"size_t end = (sizeof({self.name}_head) + 63) / 64 * 64;"]
        cases = self.file.family.cases
        for kind, case in enumerate(cases):
            lines = [line for b in self.file.arrays(case) for line in self._placed(b, case.versions[0].layout)]
            body += branch(f"view->kind == {kind}", lines) if len(cases) > 1 and lines else lines
        body += ["places.bytes = end;", "return places;"]
        if not self.file.shaped and not self.file.all_arrays():
            body.insert(0, "(void)count;")
        if self.file.shaped:
            body = [*extents("view->", body), *body]
            body = body if any("view" in line for line in body) else ["(void)view;", *body]
        return [*signature(f"static {self.name}_places {self.name}_find", [self._whole()]), *block(body)]

    def _placed(self, buffer: Buffer, layout: Layout) -> list[str]:
        form, size = layout.format(buffer.name), self.file.size(buffer)
        if form is None:
            parts = [(TYPES[layout.dtype(buffer.name)], size)]
        else:
            codes = size if form.bits == 8 else f"{size} / 2 + {size} % 2"
            parts = [(f"{form.code_dtype}_t", codes), ("float", f"({size} + {form.block - 1}) / {form.block}")]
        lines = []
        for field, (kind, items) in zip(self.file.fields_of(buffer.name), parts, strict=False):
            number = f"(size_t){items if items.isidentifier() else f'({items})'} * sizeof({kind})"
            lines += [f"places.{field} = end;", f"end += ({number} + 63) / 64 * 64;"]
        return lines

    def _checks(self) -> list[str]:
        """The function that checks the ranges of hyper-parameters."""
        checks = []
        for key, field in self.file.hyper.items():
            h, number = self.file.family.rule.hyper[key], f"hyper->{field}"
            ends = [f"{number} {sign} {literal(v)}" for sign, v in h.ends]
            checks += ends or [f"{number} == {number}"]
        if not checks:
            return []
        comment = "/* Whether all hyper-parameters lie in their ranges; a NaN lies in none. */"
        head = f"static int {self.name}_in_range(const {self.name}_hyper *hyper)"
        return [comment, head, *block([f"return {' && '.join(checks)};"])]

    # Steps

    def _updates(self) -> list[list[str]]:
        functions = []
        for kind, case in enumerate(self.file.family.cases):
            for number, version in enumerate(case.versions):
                function = self.file.inner_name("update", kind, number)
                step = StepText(self.file, version, function, "step")
                self.matrix_words = self.matrix_words or step.matrices.words()
                functions.append(step.text().rstrip("\n").split("\n"))
            for word, rule in self.file.moves().items():
                program = compile(rule, case.facts, self.file.family.static, memory=case.program.memory)
                (version,) = versions(rule, program, case.facts, {}, self.file.dtype, self.file.storage)[:1]
                function = self.file.inner_name(word, kind)
                move = StepText(self.file, version, function, word, counts=False)
                functions.append(move.text().rstrip("\n").split("\n"))
        return functions


def _struct(name: str, fields: Sequence[str]) -> list[str]:
    return ["typedef struct {", *indented(fields), f"}} {name};"]


class View:
    """The function from a shape to the batch, rows, columns and kind of a tensor."""

    def __init__(self, file: CFile) -> None:
        self.file, self.name, self.upper = file, file.name, file.upper

    def text(self) -> list[str]:
        """The function `<name>_look`, as lines."""
        body = [
            *branch("ndim < 0 || (ndim > 0 && shape == NULL)", [f"return {self.upper}_BAD_ARGUMENT;"]),
            "view->ndim = ndim;", "view->count = 1;",
            *loop("i", "0", "ndim", [
                *branch("shape[i] < 0", [f"return {self.upper}_BAD_ARGUMENT;"]), "view->count *= shape[i];",
            ]),
            *self._matrices(), *self._kinds(),
        ]  # fmt: skip
        comment = "/* What the rule sees of a tensor of this shape. */"
        return [comment, *signature(f"static int {self.name}_look", ["int ndim", "const int64_t *shape",
                 f"{self.name}_view *view"]), *block(body)]  # fmt: skip

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
        if self.file.turns:
            swap = ["const int64_t rows = view->rows;", "view->rows = view->cols;", "view->cols = rows;"]
            lines += ["view->turned = ndim >= 2 && view->rows > view->cols;", *branch("view->turned", swap)]
        return lines

    def _kinds(self) -> list[str]:
        family = self.file.family
        lines: list[str] = []
        if family.applies is not None:
            lines += branch(f"!({self._condition(family.applies)})", [f"return {self.upper}_BAD_SHAPE;"])
        elif all(needs_matrix(case.versions[0].program) for case in family.cases):
            lines += branch("ndim < 2", [f"return {self.upper}_BAD_SHAPE;"])
        for kind, case in enumerate(family.cases):
            ways = [
                " && ".join(self._term(*pair) for pair in zip(family.conditions, truths, strict=True))
                for truths in case.truths
            ]
            if len(family.cases) == 1:
                lines.append("view->kind = 0;")
            else:
                condition = " || ".join(f"({w})" for w in ways) if len(ways) > 1 else ways[0]
                lines += branch(condition, [f"view->kind = {kind};", "return 0;"])
        return [*lines, "return 0;"] if len(family.cases) == 1 else [*lines, f"return {self.upper}_BAD_SHAPE;"]

    def _term(self, value: Node, truth: bool) -> str:
        """A condition, or that it does not hold, as a part of a conjunction."""
        text = self._condition(value)
        return f"!({text})" if not truth else f"({text})" if value.op is Op.OR else text

    def _condition(self, value: Node) -> str:
        def leaf(n: Node) -> str:
            fact = n if str(n.arg) in self.file.family.static else node(Op.FACT, n.arg)
            return self.file.known(fact, "view->")

        return expression(self.file.program, value, leaf)
