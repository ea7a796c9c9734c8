"""Text of the rule language into nodes.

Python's own `ast` reads the text, and every construct is looked up in a closed table; nothing is executed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

from rulec.language.expr.arithmetic import NUMPY, ConstantError, constant, number_known
from rulec.language.expr.counts import SIGNATURES, Level
from rulec.language.expr.functions import FUNCTIONS, CallError, Function, numbered, part
from rulec.language.expr.names import CONSTANTS, name_problem, short
from rulec.language.expr.node import PLACED, Node, Op, const, name, names_in, node
from rulec.language.parse.located import Text
from rulec.language.sizes import MAX_LENGTH, entry
from rulec.language.source import Span, did_you_mean, rule_error

#: Deepest and largest expression, for people to read and for walks without a deep stack. The size counts a shared
#: part each time it is written, so that the text of an expression is never much longer than the text it was read from.
MAX_DEPTH = 150
MAX_SIZE = 20_000

_BINARY = {
    ast.Add: Op.ADD, ast.Sub: Op.SUB, ast.Mult: Op.MUL, ast.Div: Op.DIV, ast.Pow: Op.POW,
    ast.Mod: Op.MOD, ast.FloorDiv: Op.FLOORDIV, ast.MatMult: Op.MATMUL,
}  # fmt: skip
_COMPARE = {ast.Lt: Op.LT, ast.LtE: Op.LE, ast.Gt: Op.GT, ast.GtE: Op.GE, ast.Eq: Op.EQ, ast.NotEq: Op.NE}
_LOGIC = {ast.And: Op.AND, ast.Or: Op.OR}

#: Constructs of Python without a meaning in rules -> their names in messages.
_FOREIGN: dict[type[ast.AST], str] = {
    ast.IfExp: "`a if c else b`", ast.Lambda: "lambda", ast.Slice: "a slice", ast.List: "a list",
    ast.Tuple: "a comma between values", ast.Dict: "a dict", ast.Set: "a set", ast.JoinedStr: "an f-string",
    ast.NamedExpr: ":=", ast.Await: "await", ast.Starred: "*", ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension", ast.DictComp: "a comprehension", ast.GeneratorExp: "a comprehension",
    ast.Yield: "yield", ast.YieldFrom: "yield",
}  # fmt: skip

#: Reads a call of a name outside the language's functions: a rule under `uses`, or `tagged`. From the name, the
#: arguments (nodes, lists of nodes, strings), the place and the keywords it makes a node, or None for an unknown name.
#: It removes the keywords it has read.
OtherCall = Callable[[str, list[Any], Span, dict[str, Node]], Node | None]

#: A sentence about an unknown name; empty where nothing more is known of it.
Explain = Callable[[str], str]


def dotted(tree: ast.expr) -> str | None:
    """The text of a name or of names joined by dots, such as `adam.m`; None for any other expression."""
    parts = []
    while isinstance(tree, ast.Attribute):
        parts.append(tree.attr)
        tree = tree.value
    return ".".join([tree.id, *reversed(parts)]) if isinstance(tree, ast.Name) else None


class ExpressionParser:
    """Reads expressions over a set of known names. `other_call` reads calls of other names."""

    def __init__(
        self, text: Text, known: Iterable[str], other_call: OtherCall | None = None, explain: Explain | None = None
    ) -> None:
        self.text = text
        self.known = known
        self.other_call = other_call
        self.explain = explain
        #: The number of the next random draw: each call has its own, so that two of them are independent.
        self.next_draw = 0
        #: The lists in reach, by name, and the values of loop variables and of counts: see `rulec.language.sizes`.
        self.lists: dict[str, int] = {}
        self.variables: dict[str, int] = {}
        self.counts: Mapping[str, float] = {}
        self.counts_read: set[str] = set()
        #: The values of the constant expressions read so far.
        self._constants: dict[Node, float] = {}

    def fail(self, message: str, at: ast.AST) -> NoReturn:
        """Raises the error for a mistake at a parsed construct."""
        raise rule_error(message, self.text.span(at))

    def parse(self, tree: ast.expr) -> Node:
        """The node for an expression."""
        try:
            value = self._expression(tree, 0)
        except RecursionError:
            self._too_deep(tree)
        if value.depth > MAX_DEPTH:
            self._too_deep(tree)
        if value.size > MAX_SIZE:
            self.fail(f"this expression has more than {MAX_SIZE} parts: split it into named lines", tree)
        return value

    def _too_deep(self, tree: ast.expr) -> NoReturn:
        self.fail(f"this expression is more than {MAX_DEPTH} operations deep: split it into named lines", tree)

    def _expression(self, tree: ast.expr, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._too_deep(tree)
        if isinstance(tree, ast.Constant):
            return self._constant(tree)
        if isinstance(tree, ast.Name | ast.Attribute):
            return self._name(tree)
        if isinstance(tree, ast.Subscript):
            return self._part(tree, depth) if self._is_sliced(tree) else name(self.indexed(tree))
        if isinstance(tree, ast.BinOp):
            return self._binary(tree, depth)
        if isinstance(tree, ast.UnaryOp):
            return self._unary(tree, depth)
        if isinstance(tree, ast.Compare):
            return self._compare(tree, depth)
        if isinstance(tree, ast.BoolOp):
            values = [self._expression(v, depth + 1) for v in tree.values]
            return _joined(_LOGIC[type(tree.op)], values)
        if isinstance(tree, ast.Call):
            return self._call(tree, depth)
        hint = ": write where(c, a, b)" if isinstance(tree, ast.IfExp) else ""
        self.fail(f"{_FOREIGN.get(type(tree), 'this')} is not part of the rule language{hint}", tree)

    def _constant(self, tree: ast.Constant) -> Node:
        if isinstance(tree.value, bool) or not isinstance(tree.value, int | float):
            self.fail(f"{self.text.excerpt_of(tree)} is not a number", tree)
        try:
            value = float(tree.value)
        except OverflowError:
            value = math.inf
        if math.isinf(value):
            self.fail("this number is larger than a float64 can hold: write inf for infinity", tree)
        if value == 0 and any(digit in "123456789" for digit in self.text.piece(tree).lower().partition("e")[0]):
            self.fail("this number is smaller than a float64 can hold: write 0", tree)
        return const(value)

    def indexed(self, tree: ast.Subscript, new: bool = False) -> str:
        """The name of an entry of a list, `s[i]`; where `new`, it may get its first value here."""
        identifier = dotted(tree.value)
        if identifier is None:
            self.fail("only a list has entries: write its name and a number, as s[0]", tree)
        index = self.count(tree.slice, f"the index of {short(identifier)}")
        length = self.lists.get(identifier)
        if length is not None and index not in range(length):
            last = f"{identifier}[0] to {identifier}[{length - 1}]" if length > 1 else f"{identifier}[0] alone"
            self.fail(f"there is no {identifier}[{index}]: {identifier} has {last}", tree)
        if index < 0:
            self.fail(f"there is no {identifier}[{index}]: the first entry is {identifier}[0]", tree)
        if length is None and identifier in self.known:
            self.fail(f"{identifier!r} is one value, not a list: write {identifier}", tree)
        full = entry(identifier, index)
        if length is None and not new and full not in self.known:
            self.fail(f"there is no {identifier}[{index}]: declare the list {identifier}, or assign it first", tree)
        return full

    def count(self, tree: ast.expr, what: str) -> int:
        """A whole number that is known when a rule is read: of numbers, loop variables, lengths and static counts."""
        if isinstance(tree, ast.Slice):
            self.fail("a slice is not part of the rule language: write one index", tree)
        value = self._expression(tree, 0)
        number = number_known(value, self.counts)
        read = names_in([value])
        if number is None:
            loose = next((key for key in read if key not in self.counts), "")
            hint = f": {loose} is not static" if loose else ""
            self.fail(f"{what} must be known when the rule is made{hint}: use numbers, loop variables and len()", tree)
        if not float(number).is_integer():
            self.fail(f"{what} must be a whole number, not {number:g}", tree)
        self.counts_read.update(read)
        return int(number)

    def _name(self, tree: ast.expr) -> Node:
        identifier = dotted(tree)
        if identifier is None:
            self.fail("a dot may only join names", tree)
        if identifier in self.variables:
            return const(self.variables[identifier])
        if identifier in self.lists:
            self.fail(f"{identifier!r} is a list: write an entry of it, as {identifier}[0]", tree)
        if identifier in self.known:
            return name(identifier)
        if identifier in CONSTANTS:
            return const(CONSTANTS[identifier])
        if identifier in FUNCTIONS:
            self.fail(f"{identifier!r} is a function: write {FUNCTIONS[identifier].signature()}", tree)
        if identifier.endswith(".T") and identifier[:-2] in self.known:
            self.fail(f"{identifier!r} is no name: write transpose({identifier[:-2]})", tree)
        problem = name_problem(identifier) or (self.explain(identifier) if self.explain else "")
        self.fail(problem or f"unknown name {short(identifier)}{did_you_mean(identifier, self.known)}", tree)

    def _binary(self, tree: ast.BinOp, depth: int) -> Node:
        if type(tree.op) not in _BINARY:
            hint = ": a power is written **" if isinstance(tree.op, ast.BitXor) else ""
            self.fail(f"this operator is not part of the rule language{hint}", tree)
        left, right = self._expression(tree.left, depth + 1), self._expression(tree.right, depth + 1)
        return self._finite(node(_BINARY[type(tree.op)], left, right), tree)

    def _finite(self, value: Node, tree: ast.expr) -> Node:
        """The same value; RuleError where it is a constant too large for float64."""
        if value.op not in NUMPY:
            return value
        known = [cast(float, a.arg) if a.op is Op.CONST else self._constants.get(a) for a in value.args]
        operands = [number for number in known if number is not None]
        if len(operands) == len(known):
            try:
                self._constants[value] = constant(value.op, operands)
            except ConstantError as error:
                self.fail(str(error), tree)
        return value

    def _unary(self, tree: ast.UnaryOp, depth: int) -> Node:
        if isinstance(tree.op, ast.Invert):
            self.fail("~ is not part of the rule language: write not", tree)
        value = self._expression(tree.operand, depth + 1)
        if isinstance(tree.op, ast.Not):
            return node(Op.NOT, value)
        if isinstance(tree.op, ast.UAdd):
            return value
        # A number with a sign is one constant, so that its text reads back to the same node.
        if value.op is Op.CONST:
            return const(-cast(float, value.arg))
        return self._finite(node(Op.NEG, value), tree)

    def _compare(self, tree: ast.Compare, depth: int) -> Node:
        operands = [self._expression(x, depth + 1) for x in (tree.left, *tree.comparators)]
        parts = []
        for op, left, right in zip(tree.ops, operands, operands[1:], strict=False):
            if type(op) not in _COMPARE:
                self.fail("only < <= > >= == != compare values", tree)
            parts.append(node(_COMPARE[type(op)], left, right))
        return _joined(Op.AND, parts)

    def _is_sliced(self, tree: ast.Subscript) -> bool:
        """Whether brackets stand for rows and columns of a matrix, and not for an entry of a list."""
        return isinstance(tree.slice, ast.Slice | ast.Tuple) and dotted(tree.value) not in self.lists

    def _part(self, tree: ast.Subscript, depth: int) -> Node:
        """Rows and columns of a matrix: `x[a:b]`, `x[:, a:b]` or `x[a:b, c:d]`."""
        value = self._expression(tree.value, depth + 1)
        slices = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if len(slices) > 2 or not all(isinstance(s, ast.Slice) and s.step is None for s in slices):
            self.fail("only rows and columns from a bound up to another are taken: write x[a:b] or x[:, a:b]", tree)
        for axis, bounds in zip(("rows", "cols"), cast(list[ast.Slice], slices), strict=False):
            ends = [None if e is None else self._expression(e, depth + 1) for e in (bounds.lower, bounds.upper)]
            try:
                value = value if ends == [None, None] else part(value, axis, *ends)
            except CallError as error:
                self.fail(str(error), tree)
        return value

    def _call(self, tree: ast.Call, depth: int) -> Node:
        identifier = dotted(tree.func)
        if identifier is None:
            self.fail("only a function of the rule language can be called", tree)
        if identifier == "len":
            return self._length(tree)
        args = [self._argument(a, depth + 1) for a in tree.args]
        if self.other_call is not None and identifier not in FUNCTIONS:
            keywords = self._keywords(None, tree.keywords, depth + 1)
            result = self.other_call(identifier, args, self.text.span(tree), keywords)
            if result is not None and keywords:
                self.fail(f"{identifier} takes no keywords", tree.keywords[0].value)
            if result is not None:
                return result
        function = FUNCTIONS.get(identifier)
        if function is None:
            if identifier in self.known:
                self.fail(f"{identifier!r} is a value, not a function: write * to multiply", tree)
            known = FUNCTIONS.get(identifier.rpartition(".")[2])
            hint = f": write {known.signature()}" if known else did_you_mean(identifier, FUNCTIONS)
            if identifier in PLACED:
                self.fail(
                    f"{identifier} is a level: write it after per=, as in mean(g**2, per={SIGNATURES[identifier]})",
                    tree,
                )
            self.fail(f"unknown function {short(identifier)}{hint}", tree.func)
        try:
            value = function(*args, **self._keywords(function, tree.keywords, depth + 1))
        except CallError as error:
            self.fail(str(error), tree)
        value, self.next_draw = numbered(value, self.next_draw)
        return self._finite(value, tree)

    def _length(self, tree: ast.Call) -> Node:
        identifier = dotted(tree.args[0]) if len(tree.args) == 1 and not tree.keywords else None
        if identifier is None or identifier not in self.lists:
            lists = f": its lists are {', '.join(self.lists)}" if self.lists else ", and this rule has none"
            self.fail(f"len is of a list{lists}", tree)
        return const(self.lists[identifier])

    def _argument(self, tree: ast.expr, depth: int) -> Any:
        if isinstance(tree, ast.List):
            return [self._expression(e, depth) for e in tree.elts]
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
            return tree.value
        return self._expression(tree, depth)

    def _keywords(self, function: Function | None, keywords: list[ast.keyword], depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for keyword in keywords:
            if keyword.arg is None:
                self.fail("** is not part of the rule language", keyword.value)
            if keyword.arg in values:
                self.fail(f"{keyword.arg} is given twice", keyword.value)
            values[keyword.arg] = self._keyword(function, keyword, depth)
        return values

    def _keyword(self, function: Function | None, keyword: ast.keyword, depth: int) -> Any:
        if function is not None and keyword.arg in function.lists and isinstance(keyword.value, ast.List):
            return self._list(keyword.value, depth)
        choices: Any = {} if function is None else function.choices
        if keyword.arg not in choices:
            return self._expression(keyword.value, depth)
        if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            return keyword.value.value
        if function is not None and keyword.arg in function.numbers:
            return self._expression(keyword.value, depth)
        if keyword.arg == "per" and (level := self.level(keyword.value, depth)) is not None:
            return level
        allowed = ", ".join(repr(c) for c in choices[keyword.arg])
        levels = [] if function is None else function.placed(str(keyword.arg))
        placed = f", or {' or '.join(levels)} without them" if levels else ""
        self.fail(f"{keyword.arg} is one of {allowed}, in quotes{placed}", keyword.value)

    def level(self, tree: ast.expr, depth: int = 0) -> Level | None:
        """The level that `axis(i)` or `block(n)` is; None for any other expression."""
        if not isinstance(tree, ast.Call) or (word := dotted(tree.func)) not in PLACED:
            return None
        if len(tree.args) != 1 or tree.keywords:
            self.fail(f"{word} takes one number: write {SIGNATURES[str(word)]}", tree)
        return Level(str(word), self._expression(tree.args[0], depth))

    def _list(self, tree: ast.List, depth: int) -> list[Any]:
        """A list of expressions, or of lists of them."""
        return [
            self._list(e, depth + 1) if isinstance(e, ast.List) else self._argument(e, depth + 1) for e in tree.elts
        ]


def _joined(op: Op, values: list[Node]) -> Node:
    result = values[0]
    for value in values[1:]:
        result = node(op, result, value)
    return result


def parse_expression(
    text: Text, known: Iterable[str], other_call: OtherCall | None = None, explain: Explain | None = None,
    variables: Mapping[str, int] | None = None,
) -> Node:  # fmt: skip
    """The node for a text that is one expression over the names `known`, and over variables with their values."""
    parser = ExpressionParser(text.joined(), known, other_call, explain)
    parser.variables = dict(variables or {})
    return parse_whole(parser)


def parse_whole(parser: ExpressionParser) -> Node:
    """The node for the parser's text, which is one expression."""
    body = parser.text.parse()
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise rule_error("write one expression here, without a name and = before it", parser.text.start)
    return parser.parse(body[0].value)


def parse_level(text: Text, known: Iterable[str], variables: Mapping[str, int] | None = None) -> Level | None:
    """The level that a text of the form `axis(i)` or `block(n)` is; None for any other text."""
    joined = text.joined()
    if "(" not in joined.text:
        return None
    body = joined.parse()
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        return None
    parser = ExpressionParser(joined, known)
    parser.variables = dict(variables or {})
    return parser.level(body[0].value)


def tagged(called: str, args: list[Any], span: Span, _: dict[str, Node]) -> Node | None:
    """The fact that a tensor has a tag, of a call `tagged("word")`; None for another function."""
    if called != "tagged":
        return None
    if len(args) != 1 or not isinstance(args[0], str) or not re.fullmatch(r"[\w .:/-]+", args[0]):
        raise rule_error('tagged takes one word in quotes: tagged("embedding")', span)
    return node(Op.FACT, f'tagged("{args[0]}")')


def length_of(
    value: float | Text, what: str, lists: Mapping[str, int], counts: Mapping[str, float], span: Span | None = None
) -> tuple[int, list[str]]:
    """The length by a number or an expression, and the names of the counts in it.

    RuleError for any other value, with `what` as the length's name.
    """
    number: float | Text | None = value
    names: list[str] = []
    if isinstance(value, Text):

        def explain(identifier: str) -> str:
            near = did_you_mean(identifier, counts) or ": it is made of numbers, static hyper-parameters and len()"
            return f"{short(identifier)} has no place in {what}{near}"

        parser = ExpressionParser(value.joined(), counts, None, explain)
        parser.lists = dict(lists)
        parsed = parse_whole(parser)
        number, names = number_known(parsed, counts), names_in([parsed])
    if not isinstance(number, int | float) or not float(number).is_integer() or not 1 <= number <= MAX_LENGTH:
        text = f"{number:g}" if isinstance(number, int | float) else repr(number)
        raise rule_error(f"{what} must be a whole number from 1 to {MAX_LENGTH}, not {text}", span)
    return int(number), names
