"""Text of the rule language, straight into nodes.

The text is read by Python's own `ast` and every construct is looked up in a closed table; nothing is executed.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from rulec.language.functions import FUNCTIONS, CallError
from rulec.language.node import Node, Op, const, name, node
from rulec.language.source import Source, Span, did_you_mean, rule_error

#: Longest step, in characters: a step is some lines of mathematics.
MAX_TEXT = 100_000
#: Deepest nesting of an expression: what Python's parser and our walks take without a recursion error.
MAX_DEPTH = 150

CONSTANTS = {"inf": math.inf, "pi": math.pi}

_BINARY = {
    ast.Add: Op.ADD, ast.Sub: Op.SUB, ast.Mult: Op.MUL, ast.Div: Op.DIV, ast.Pow: Op.POW,
    ast.Mod: Op.MOD, ast.FloorDiv: Op.FLOORDIV, ast.MatMult: Op.MATMUL,
}  # fmt: skip
_COMPARE = {ast.Lt: Op.LT, ast.LtE: Op.LE, ast.Gt: Op.GT, ast.GtE: Op.GE, ast.Eq: Op.EQ, ast.NotEq: Op.NE}
_LOGIC = {ast.And: Op.AND, ast.Or: Op.OR}

#: Makes the node for a call of a name that is not a function of the language: a rule named under `uses`, `tagged`.
OtherCall = Callable[[str, list[Node], list[Any], Span], Node | None]


class Text:
    """A piece of rule text and where it stands in its file: turns `ast` positions into places users can find."""

    def __init__(self, text: str, source: Source, line: int = 1, column: int = 1, indent: int = 0) -> None:
        """`line` and `column` are where the text begins; `indent` what a block's later lines are indented by."""
        self.text, self.source, self.line, self.column, self.indent = text, source, line, column, indent
        self._lines = text.splitlines()

    def span(self, at: ast.AST) -> Span:
        """The place of a parsed construct."""
        line: int = at.lineno  # type: ignore[attr-defined]
        end = at.end_col_offset if at.end_lineno == line else None  # type: ignore[attr-defined]
        return self.place(line, at.col_offset, end)  # type: ignore[attr-defined]

    def place(self, line: int, byte_offset: int, byte_end: int | None = None) -> Span:
        """The place of 1-based `line` and 0-based UTF-8 offset within this text."""
        content = (self._lines[line - 1] if 0 < line <= len(self._lines) else "").encode()
        start = len(content[:byte_offset].decode(errors="replace"))
        end = len(content[:byte_end].decode(errors="replace")) if byte_end is not None else len(content)
        column = (self.column if line == 1 else self.indent + 1) + start
        return Span(self.source, self.line + line - 1, column, max(1, end - start))

    def parse(self) -> list[ast.stmt]:
        """The statements of the text; what Python's grammar refuses is an error at its place."""
        if len(self.text) > MAX_TEXT:
            message = f"this text has {len(self.text)} characters, over the limit of {MAX_TEXT}"
            raise rule_error(message, self.place(1, 0))
        for number, line in enumerate(self._lines, 1):
            if "\t" in line:
                offset = len(line[: line.index("\t")].encode())
                raise rule_error("a tab in the step: indent with spaces", self.place(number, offset, offset + 1))
        if "\0" in self.text:
            raise rule_error("a null character in the text: remove it", self.place(1, 0))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(self.text).body
        except SyntaxError as error:
            bad, column = error.lineno or 1, max(0, (error.offset or 1) - 1)
            place = self.place(bad, len(self._line(bad)[:column].encode()), None)
            raise rule_error(f"cannot read this: {error.msg}", Span(place.source, place.line, place.column)) from None
        except (RecursionError, MemoryError):
            raise rule_error("this is nested too deeply: split it into named lines", self.place(1, 0)) from None

    def _line(self, number: int) -> str:
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""


def dotted(tree: ast.expr) -> str | None:
    """`adam.m` for the attribute chain of that text, a name for a name, None for anything else."""
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Attribute):
        base = dotted(tree.value)
        return None if base is None else f"{base}.{tree.attr}"
    return None


class ExpressionParser:
    """Reads expressions over a set of known names; `other_call` may give meaning to further callables."""

    def __init__(self, text: Text, known: Iterable[str], other_call: OtherCall | None = None) -> None:
        self.text = text
        self.known = known
        self.other_call = other_call

    def fail(self, message: str, at: ast.AST) -> Exception:
        """The error for a mistake at a parsed construct."""
        return rule_error(message, self.text.span(at))

    def parse(self, tree: ast.expr, depth: int = 0) -> Node:
        """The node for an expression."""
        if depth > MAX_DEPTH:
            raise self.fail(f"this is nested deeper than {MAX_DEPTH} levels: split it into named lines", tree)
        if isinstance(tree, ast.Constant):
            return self._constant(tree)
        if isinstance(tree, ast.Name | ast.Attribute):
            return self._name(tree)
        if isinstance(tree, ast.BinOp):
            return self._binary(tree, depth)
        if isinstance(tree, ast.UnaryOp):
            return self._unary(tree, depth)
        if isinstance(tree, ast.Compare):
            return self._compare(tree, depth)
        if isinstance(tree, ast.BoolOp):
            values = [self.parse(v, depth + 1) for v in tree.values]
            result = values[0]
            for value in values[1:]:
                result = node(_LOGIC[type(tree.op)], result, value)
            return result
        if isinstance(tree, ast.Call):
            return self._call(tree, depth)
        raise self.fail(f"{_construct(tree)} is not part of the rule language", tree)

    def _constant(self, tree: ast.Constant) -> Node:
        if isinstance(tree.value, bool) or not isinstance(tree.value, int | float):
            raise self.fail(f"{ast.unparse(tree)} is not a number", tree)
        try:
            return const(float(tree.value))
        except OverflowError:
            raise self.fail("this number is larger than a float64 can hold", tree) from None

    def _name(self, tree: ast.expr) -> Node:
        identifier = dotted(tree)
        if identifier is None:
            raise self.fail("a dot may only join names", tree)
        if identifier in CONSTANTS and identifier not in self.known:
            return const(CONSTANTS[identifier])
        if identifier not in self.known:
            if identifier in FUNCTIONS:
                raise self.fail(f"{identifier!r} is a function: write {FUNCTIONS[identifier].signature()}", tree)
            raise self.fail(f"unknown name {identifier!r}{did_you_mean(identifier, self.known)}", tree)
        return name(identifier)

    def _binary(self, tree: ast.BinOp, depth: int) -> Node:
        if type(tree.op) not in _BINARY:
            hint = ": a power is written **" if isinstance(tree.op, ast.BitXor) else ""
            raise self.fail(f"this operator is not part of the rule language{hint}", tree)
        return node(_BINARY[type(tree.op)], self.parse(tree.left, depth + 1), self.parse(tree.right, depth + 1))

    def _unary(self, tree: ast.UnaryOp, depth: int) -> Node:
        if isinstance(tree.op, ast.Invert):
            raise self.fail("~ is not part of the rule language: write not", tree)
        value = self.parse(tree.operand, depth + 1)
        if isinstance(tree.op, ast.Not):
            return node(Op.NOT, value)
        if isinstance(tree.op, ast.UAdd):
            return value
        if isinstance(tree.operand, ast.Constant):
            return const(-float(value.arg))  # type: ignore[arg-type]
        return node(Op.NEG, value)

    def _compare(self, tree: ast.Compare, depth: int) -> Node:
        operands = [self.parse(x, depth + 1) for x in (tree.left, *tree.comparators)]
        parts = []
        for op, left, right in zip(tree.ops, operands, operands[1:], strict=False):
            if type(op) not in _COMPARE:
                raise self.fail("only < <= > >= == != compare values", tree)
            parts.append(node(_COMPARE[type(op)], left, right))
        result = parts[0]
        for part in parts[1:]:
            result = node(Op.AND, result, part)
        return result

    def _call(self, tree: ast.Call, depth: int) -> Node:
        identifier = dotted(tree.func)
        if identifier is None:
            raise self.fail("only a function of the rule language can be called", tree)
        args = [self._argument(a, depth + 1) for a in tree.args]
        if self.other_call is not None:
            made = self.other_call(identifier, [a for a in args if isinstance(a, Node)], args, self.text.span(tree))
            if made is not None:
                return made
        function = FUNCTIONS.get(identifier)
        if function is None:
            hint = did_you_mean(identifier, FUNCTIONS)
            if identifier in self.known:
                raise self.fail(f"{identifier!r} is a value, not a function", tree)
            raise self.fail(f"unknown function {identifier!r}{hint}", tree.func)
        keywords = {str(k.arg): self._keyword(function.choices, k, depth + 1) for k in tree.keywords}
        try:
            return function(*args, **keywords)
        except CallError as error:
            raise self.fail(str(error), tree) from None

    def _argument(self, tree: ast.expr, depth: int) -> Any:
        if isinstance(tree, ast.List):
            return [self.parse(e, depth) for e in tree.elts]
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
            return tree.value
        return self.parse(tree, depth)

    def _keyword(self, choices: Any, keyword: ast.keyword, depth: int) -> Any:
        if keyword.arg is None:
            raise self.fail("** is not part of the rule language", keyword.value)
        if keyword.arg in choices:
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                return keyword.value.value
            allowed = ", ".join(repr(c) for c in choices[keyword.arg])
            raise self.fail(f"{keyword.arg} is one of {allowed}, in quotes", keyword.value)
        return self.parse(keyword.value, depth)


def _construct(tree: ast.AST) -> str:
    words = {
        ast.IfExp: "`a if c else b` (write where(c, a, b))", ast.Lambda: "lambda", ast.Subscript: "indexing",
        ast.List: "a list", ast.Tuple: "a tuple", ast.Dict: "a dict", ast.JoinedStr: "an f-string",
        ast.NamedExpr: ":=", ast.Await: "await", ast.Starred: "*",
    }  # fmt: skip
    return words.get(type(tree), f"a Python {type(tree).__name__}")


def parse_expression(text: Text, known: Iterable[str], other_call: OtherCall | None = None) -> Node:
    """The node for a text that is one expression over the names `known`."""
    body = text.parse()
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise rule_error("write one expression here", text.place(1, 0))
    return ExpressionParser(text, known, other_call).parse(body[0].value)
