"""Prints the C function that finds the matrices of a tensor, and the case of the rule for it."""

from __future__ import annotations

from rulec.language.expr.node import Node, Op, node
from rulec.runtime.buckets.plan import needs_matrix

from .model import CFile
from .standalone_text import block, branch, loop, signature
from .standalone_words import expression


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
        told = "/* What the rule sees of a tensor of this shape. */"
        return [told, *signature(f"static int {self.name}_look", ["int ndim", "const int64_t *shape",
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
