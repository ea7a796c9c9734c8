"""The functions of the rule language: their names, their arguments and their nodes.

Text and Python both call through this one table, so they cannot differ. Some functions are composed of the language's
operations: every backend has them, with the operations' bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.counts import SIGNATURES, Level, bare_problem, count_of, reduction
from rulec.language.expr.newton_schulz import SCHEDULES, Coefficients
from rulec.language.expr.node import LEVELS, Kind, Node, Op, const, name, node
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
from rulec.language.expr.ops import SPECS
from rulec.language.expr.static import (
    ALONG_AXIS,
    BLOCKWISE,
    BOUNDS,
    DIRECT,
    GRAM,
    LINEAR,
    MUON,
    NORM,
    UNDIVIDED,
    Normalize,
    inside,
    settings,
)

_ONE, _HALF = const(1), const(0.5)


def clip(x: Node, low: Node, high: Node) -> Node:
    """`x` limited to a range; `high` where the ends cross."""
    return node(Op.MINIMUM, node(Op.MAXIMUM, x, low), high)


def middle(a: Node, b: Node, c: Node) -> Node:
    """The middle one of three values; NaN where one of them is NaN."""
    return node(Op.MAXIMUM, node(Op.MINIMUM, a, b), node(Op.MINIMUM, node(Op.MAXIMUM, a, b), c))


def rounded(x: Node) -> Node:
    """The nearest whole number, of two the even one; a zero is positive where `x` is not zero.

    The distance from the whole number below is exact wherever a half is near.
    """
    below = node(Op.FLOOR, x)
    rest = node(Op.SUB, x, below)
    odd = node(Op.NE, node(Op.MUL, const(2), node(Op.FLOOR, node(Op.MUL, _HALF, below))), below)
    up = node(Op.OR, node(Op.GT, rest, _HALF), node(Op.AND, node(Op.EQ, rest, _HALF), odd))
    return node(Op.WHERE, up, node(Op.ADD, below, _ONE), below)


def arc_tangent(x: Node) -> Node:
    """The angle of the point (1, x)."""
    return node(Op.ATAN2, x, _ONE)


def softplus(x: Node) -> Node:
    """`log(1 + exp(x))` without overflow.

    1 + exp(-|x|) is rounded; the derivative of the logarithm there, times the part lost, is added to its logarithm.
    """
    small = node(Op.EXP, node(Op.NEG, node(Op.ABS, x)))
    total = node(Op.ADD, _ONE, small)
    lost = node(Op.SUB, small, node(Op.SUB, total, _ONE))
    logarithm = node(Op.ADD, node(Op.LOG, total), node(Op.DIV, lost, total))
    return node(Op.ADD, node(Op.MAXIMUM, x, const(0)), logarithm)


def softmax(x: Node, per: str | Level) -> Node:
    """Exponentials over their sum at a level; the largest exponent is 0."""
    grown = node(Op.EXP, node(Op.SUB, x, reduction(Op.MAX, x, per)))
    return node(Op.DIV, grown, reduction(Op.SUM, grown, per))


def variance(x: Node, per: str | Level) -> Node:
    """The mean of the squared distances from the mean, at a level."""
    distance = node(Op.SUB, x, reduction(Op.MEAN, x, per))
    return reduction(Op.MEAN, node(Op.MUL, distance, distance), per)


def deviation(x: Node, per: str | Level) -> Node:
    """The root of the variance."""
    return node(Op.SQRT, variance(x, per))


#: Most random draws of a rule.
MAX_DRAWS = 1000

#: Reduction -> the function of two values to advise where it is called with two.
_OF_TWO = {"min": "minimum(a, b)", "max": "maximum(a, b)"}

#: A number may be written as a node or as a plain number.
Value = Node | float


class CallError(ValueError):
    """A call with wrong arguments. The parser adds the place."""


@dataclass(frozen=True)
class Function:
    """One callable of the language.

    `arguments` are the names of its values (a name in `[...]` is a list of extents), `optional` the keywords
    with their defaults: a value where the default is a number or None, a word where `choices` lists it. The keywords in
    `lists` may also be lists, those in `numbers` also numbers.
    """

    name: str
    build: Callable[..., Node]
    arguments: tuple[str, ...]
    optional: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    #: The number of arguments that a call may leave out, the last ones first.
    spare: int = 0

    def signature(self) -> str:
        """A call as messages show it: `clip(x, low, high)`."""
        shown = {k: "t" if k == "at" else repr(v) for k, v in self.optional.items() if k != "draw"}
        words = [f"{k}={v}" for k, v in shown.items()]
        return f"{self.name}({', '.join([*self.arguments, *words])})"

    def allowed(self, key: str) -> str:
        """The values of a keyword that takes one of some words, as messages list them."""
        return ", ".join([*map(repr, self.choices[key]), *self.placed(key)])

    def placed(self, key: str) -> list[str]:
        """The levels with a number that a keyword takes, as messages show them."""
        if key != "per" or self.choices["per"] == _ORDERED_LEVELS:
            return []
        return [SIGNATURES["block"]] if self.name in BLOCKWISE else [*SIGNATURES.values()]

    def _chooses(self, key: str, value: Any) -> bool:
        if isinstance(value, Level):
            return bool(self.placed(key))
        return value in self.choices[key] or value is self.optional[key]

    def _advice(self, count: int) -> str:
        other = _OF_TWO.get(self.name) if count == 2 else None
        return f"{other}, or {self.signature()} for a reduction" if other else self.signature()

    def __call__(self, *args: Any, **keywords: Any) -> Node:
        most = len(self.arguments)
        if not most - self.spare <= len(args) <= most:
            wanted = f"{'at most ' if self.spare else ''}{most} argument{'' if most == 1 else 's'}"
            raise CallError(f"{self.name} takes {wanted}, not {len(args)}: write {self._advice(len(args))}")
        for argument, value in zip(self.arguments, args, strict=False):
            is_list = argument.startswith("[")
            if not isinstance(value, list if is_list else Node | int | float):
                wanted = "a list of two extents" if is_list else "values, not lists and texts"
                raise CallError(f"{self.name} takes {wanted}: write {self.signature()}")
        for key, value in keywords.items():
            if key not in self.optional:
                raise CallError(f"{self.name} has no argument {key!r}: write {self.signature()}")
            if isinstance(value, list):
                if key not in self.lists:
                    raise CallError(f"{key} of {self.name} is no list: write {self.signature()}")
            elif key in self.numbers and not isinstance(value, str):
                continue
            elif self.spare:
                continue  # its own function checks them
            elif key in self.choices and not self._chooses(key, value):
                bare = bare_problem(value) if self.placed(key) else ""
                said = value if isinstance(value, Level) else repr(value)
                raise CallError(bare or f"{key} of {self.name} is one of {self.allowed(key)}, not {said}")
        value = self.build(*args, **{**self.optional, **keywords})
        count = count_of(value)
        if count is not None and (problem := count.problem({})):
            raise CallError(problem)
        return value


def as_node(value: Any) -> Node:
    """A plain number as a constant node; a node as it is."""
    return value if isinstance(value, Node) else const(float(value))


def numbered(value: Node, draw: int) -> tuple[Node, int]:
    """A random draw with its number, the author's or else `draw`, and the next free number; other values unchanged."""
    if value.op.kind is not Kind.RANDOM:
        return value, draw
    number = draw if value.arg is None else cast(int, value.arg)
    return node(value.op, *value.args, number), max(draw, number + 1)


def _plain(op: Op, *arguments: str) -> Function:
    return Function(op.symbol, lambda *args: node(op, *map(as_node, args)), arguments)


def _reduction(op: Op) -> Function:
    def build(x: Value, per: str | Level) -> Node:
        return reduction(op, as_node(x), per)

    return Function(op.symbol, build, ("x",), {"per": "tensor"}, {"per": LEVELS[1:]})


def _composed(name: str, build: Callable[..., Node], *arguments: str) -> Function:
    return Function(name, lambda *args: build(*map(as_node, args)), arguments)


def _composed_reduction(name: str, build: Callable[[Node, str | Level], Node]) -> Function:
    def of_value(x: Value, per: str | Level) -> Node:
        return build(as_node(x), per)

    return Function(name, of_value, ("x",), {"per": "tensor"}, {"per": LEVELS[1:]})


def _random(op: Op) -> Function:
    def build(shape: Sequence[Value], at: Value | None, draw: Value | None) -> Node:
        if len(shape) != 2:
            raise CallError(
                f"{op.symbol} takes a list of two extents, not {len(shape)}: write {op.symbol}([rows, cols])"
            )
        position = name("t") if at is None else as_node(at)
        number = None if draw is None else as_node(draw)
        if number is not None and (number.op is not Op.CONST or number.arg not in range(MAX_DRAWS)):
            raise CallError(
                f"draw of {op.symbol} is a whole number below {MAX_DRAWS}: it tells the draws of a rule apart"
            )
        return node(op, position, *map(as_node, shape), None if number is None else int(cast(float, number.arg)))

    return Function(op.symbol, build, ("[rows, cols]",), {"at": None, "draw": None})


def _newton_schulz(x: Value, steps: Value, dtype: str | None, coefficients: Any, normalize: Any, form: str) -> Node:
    schedule = coefficients if isinstance(coefficients, str) else _schedule(coefficients)
    return _iteration(as_node(x), as_node(steps), dtype, schedule, _divisor(normalize), form)


def _iteration(
    x: Node, steps: Node, dtype: str | None, coefficients: str | Coefficients, normalize: Normalize = NORM,
    form: str = DIRECT,
) -> Node:  # fmt: skip
    """The node, with constants up to the last that a rule need name."""
    further = (normalize, form) if form != DIRECT else () if normalize == NORM else (normalize,)
    return node(Op.NEWTON_SCHULZ, x, steps, (dtype, coefficients, *further))


def in_form(value: Node, form: str) -> Node:
    """A `newton_schulz`, of a matrix or of its blocks, in another form; any other node as it is."""
    iteration = inside(value)
    if iteration.op is not Op.NEWTON_SCHULZ:
        return value
    x, steps = iteration.args
    changed = _iteration(x, steps, **{**settings(iteration), "form": form})
    return changed if iteration is value else _in_blocks("newton_schulz", changed, value.args[-1])


def _in_blocks(function: str, value: Node, rows: Node) -> Node:
    """The function of each block of so many rows, from the function of the whole matrix."""
    return node(Op.IN_BLOCKS, *value.args, rows, (function, value.arg))


def _blockwise(function: Function) -> Function:
    """The function with `per=block(n)`; with an `axis` where it has one, of rows or of columns."""

    def build(*args: Any, per: str | Level, axis: Value = 0, **keywords: Any) -> Node:
        number = as_node(axis)
        if number not in (const(0), const(1)):
            raise CallError(f"axis of {function.name} is 0 for blocks of rows, or 1 for blocks of columns")
        if not isinstance(per, Level):
            if number is const(1):
                raise CallError(f"axis of {function.name} is that of blocks: write per=block(64), axis=1")
            return function.build(*args, **keywords)
        if per.word != "block":
            raise CallError(f"per of {function.name} is one of {called.allowed('per')}, not {per}")
        if number is const(0):
            return _in_blocks(function.name, function.build(*args, **keywords), per.number)
        turned = node(Op.TRANSPOSE, as_node(args[0]))
        return node(Op.TRANSPOSE, _in_blocks(function.name, function.build(turned, *args[1:], **keywords), per.number))

    optional = {**function.optional, "per": "matrix"} | ({"axis": 0} if function.name == "newton_schulz" else {})
    called = replace(function, build=build, optional=optional, choices={**function.choices, "per": ("matrix",)})
    return called


def _along_axes(function: Function) -> Function:
    """The product of matrices with the `axis` of a tensor that a matrix multiplies."""

    def build(a: Value, b: Value, axis: Value | None, per: str | Level) -> Node:
        if axis is None:
            return function.build(a, b, per=per)
        if isinstance(per, Level):
            raise CallError(f"{function.name} has an axis of a tensor, or blocks of a matrix: leave axis or per out")
        return node(Op.MODE_PRODUCT, as_node(a), as_node(b), as_node(axis))

    return replace(function, build=build, optional={"axis": None, **function.optional})


def _divisor(normalize: Any) -> Normalize:
    """The divisor of a matrix: a word for it, a number to multiply the norm by, or a word and a number."""
    if isinstance(normalize, str):
        return normalize
    word, *rest = [*normalize, 1.0][:3] if isinstance(normalize, list) and normalize else [NORM, normalize]
    number = _number(rest[0]) if word in (NORM, *BOUNDS) and (len(rest) == 1 or rest[1] == 1.0) else None
    if number is None or not 0 < number < math.inf:
        raise CallError(
            "normalize of newton_schulz is a word, or the number that the norm is multiplied by, above 0 and known in "
            'advance: write normalize=1.02, or normalize=["aol", 1.02] for another bound'
        )
    return number if word == NORM and number != 1 else word if number == 1 else (word, number)


def _schedule(rows: Sequence[Any]) -> Coefficients:
    """Three numbers, or three for each iteration, as numbers."""
    rows = rows if rows and all(isinstance(row, list) for row in rows) else [rows]
    numbers = tuple(tuple(_number(x) for x in row) for row in rows)
    if any(len(row) != 3 or None in row for row in numbers):
        raise CallError(
            "coefficients of newton_schulz are three numbers, or a list of three for each iteration: write "
            "coefficients=[3.4445, -4.775, 2.0315]"
        )
    return cast(Coefficients, numbers)


def _number(value: Any) -> float | None:
    if isinstance(value, Node):
        return number_known(value, {})
    return None if isinstance(value, list | str) else float(value)


#: The levels of ordered elements: each is of values of one tensor.
_ORDERED_LEVELS = ("row", "col", "matrix", "tensor")

#: The values of `quantile` between two elements: those of NumPy and torch.
INTERPOLATIONS = (LINEAR, "lower", "higher", "nearest", "midpoint")


def _quantile(x: Value, q: Value, per: str, interpolation: str) -> Node:
    number = as_node(q)
    known = number_known(number, {})
    if known is not None and not 0 <= known <= 1:
        raise CallError(f"q of quantile is a number from 0 to 1, not {known:g}: write quantile(x, 0.9)")
    return node(Op.QUANTILE, as_node(x), number, (per, interpolation))


def _ordering(op: Op) -> Function:
    return Function(
        op.symbol, lambda x, per: node(op, as_node(x), (per,)), ("x",), _PER_TENSOR, {"per": _ORDERED_LEVELS}
    )


def _take(x: Value, i: Value, axis: Value | None, per: str) -> Node:
    """The node of the elements at places: along an axis of a matrix, or in the order of all elements of a level."""
    places, number = as_node(i), None if axis is None else as_node(axis)
    if number is not None:
        if per != "tensor":
            raise CallError(f'take has an axis or a level: leave out axis, or per="{per}"')
        if number not in (const(0), const(1)):
            raise CallError("axis of take is 0 for places among rows, or 1 for places among columns")
        per = ALONG_AXIS[int(cast(float, number.arg))]
    return node(Op.TAKE, as_node(x), places, (per,))


class _Median(Function):
    """The middle one of three values, or the quantile 0.5 of one."""

    def signature(self) -> str:
        return f"{super().signature()} or {self.name}(a, b, c)"

    def __call__(self, *args: Any, **keywords: Any) -> Node:
        if len(args) == 3:
            return _MIDDLE(*args, **keywords)
        if len(args) != 1:
            raise CallError(f"{self.name} takes 1 argument or 3, not {len(args)}: write {self.signature()}")
        return super().__call__(*args, **keywords)


def _concat(a: Value, b: Value, axis: Value) -> Node:
    number = as_node(axis)
    if number not in (const(0), const(1)):
        raise CallError("axis of concat is 0 for rows below rows, or 1 for columns beside columns")
    return node(Op.CONCAT, as_node(a), as_node(b), (int(cast(float, number.arg)),))


def _solve(a: Value, b: Value, kind: str) -> Node:
    return node(Op.SOLVE, as_node(a), as_node(b), (kind,))


def part(x: Node, axis: str, start: Value | None, stop: Value | None) -> Node:
    """Rows or columns of a matrix, from a bound up to another; None for the first and for the end."""
    bounds = const(0) if start is None else as_node(start), const(math.inf) if stop is None else as_node(stop)
    value = node(Op.SLICE, x, *bounds, (axis,))
    count = count_of(value)
    if count is not None and (problem := count.problem({})):
        raise CallError(problem)
    return value


#: Function of two results -> the value of each, from the call and its matrix.
PAIRS: Mapping[Op, Callable[[Node, Node], tuple[Node, Node]]] = {
    Op.QR: lambda call, x: (call, node(Op.TRIU, node(Op.MATMUL, node(Op.TRANSPOSE, call), x))),
    Op.EIGH: lambda call, x: (
        node(Op.DIAG, node(Op.MATMUL, node(Op.MATMUL, node(Op.TRANSPOSE, call), x), call)), call
    ),
}  # fmt: skip


#: Side of a matrix -> the fact of its extent in the parameter's matrix view.
SIDES = {"row": "rows", "col": "cols"}


def _index(*dimension: Value, per: str | Level | None, n: Value | None) -> Node:
    """The index of an element: along a dimension, in the flattened tensor, or of a row or column of a matrix."""
    if per is None:
        if n is not None:
            raise CallError('n of index is the extent of one side of a matrix: write index(per="row", n=...)')
        return node(Op.INDEX, *map(as_node, dimension))
    if not isinstance(per, str) or per not in SIDES:
        raise CallError(f"per of index is one of 'row', 'col', not {str(per)!r}: for a dimension, write index(0)")
    if dimension:
        raise CallError(f'index takes a dimension or per=, not both: write index(0), or index(per="{per}")')
    return node(Op.INDEX, name(SIDES[per]) if n is None else as_node(n), per)


def _inverse_root(x: Value, order: Value, eps: Value) -> Node:
    operands = [as_node(x), as_node(order), as_node(eps)]
    return node(Op.INVERSE_ROOT, *(operands[:2] if operands[2] is const(0) else operands))


#: What a matrix given to `solve` is: its elements below or above the diagonal are not read where they are zero.
KINDS = ("full", "upper", "lower")

_FLOATS = ("float32", "float64", "bfloat16", "float16")

#: The words of `newton_schulz`.
_ITERATION_WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": _FLOATS, "coefficients": tuple(SCHEDULES), "normalize": (NORM, UNDIVIDED, *BOUNDS), "form": (DIRECT, GRAM),
}  # fmt: skip

_PER_TENSOR: Mapping[str, Any] = {"per": "tensor"}
_MIDDLE = _composed("median", middle, "a", "b", "c")
_MEDIAN = _Median(
    "median", lambda x, per: _quantile(x, _HALF, per, LINEAR), ("x",), _PER_TENSOR, {"per": _ORDERED_LEVELS}
)
_QUANTILE = Function(
    "quantile", _quantile, ("x", "q"), {**_PER_TENSOR, "interpolation": LINEAR},
    {"per": _ORDERED_LEVELS, "interpolation": INTERPOLATIONS},
)  # fmt: skip

#: Every function of the language by the name it is called by.
FUNCTIONS: dict[str, Function] = {
    f.name: _blockwise(f) if f.name in BLOCKWISE else f
    for f in (
        *(_plain(op, *SPECS[op].arguments) for op in ELEMENTWISE),
        _composed("atan", arc_tangent, "x"),
        _composed("clip", clip, "x", "low", "high"),
        _MEDIAN,
        _composed("round", rounded, "x"),
        _composed("softplus", softplus, "x"),
        *(_reduction(op) for op in (Op.SUM, Op.MEAN, Op.NORM, Op.RMS, Op.MIN, Op.MAX, Op.COUNT_NONZERO)),
        _composed_reduction("variance", variance),
        _composed_reduction("std", deviation),
        _composed_reduction("softmax", softmax),
        _QUANTILE,
        _ordering(Op.SORT),
        _ordering(Op.ARGSORT),
        Function("take", _take, ("x", "i"), {"axis": None, **_PER_TENSOR}, {"per": _ORDERED_LEVELS}),
        _plain(Op.DIM, "i"),
        Function("index", _index, ("i",), {"per": None, "n": None}, {"per": tuple(SIDES)}, spare=1),
        Function("matmul", lambda a, b: node(Op.MATMUL, as_node(a), as_node(b)), ("a", "b")),
        Function("gram", lambda x, axis: node(Op.GRAM, as_node(x), as_node(axis)), ("x",), {"axis": 0}),
        _plain(Op.TRANSPOSE, "x"),
        _plain(Op.EYE, "n"),
        *(_plain(op, "x") for op in (Op.DIAG, Op.TRIU, Op.TRIL)),
        Function("concat", _concat, ("a", "b"), {"axis": 0}),
        Function("solve", _solve, ("a", "b"), {"kind": "full"}, {"kind": KINDS}),
        _plain(Op.CHOLESKY, "x"),
        _plain(Op.TOPK, "x", "k"),
        Function(
            "newton_schulz",
            _newton_schulz,
            ("x",),
            {"steps": 5, "dtype": None, "coefficients": MUON, "normalize": NORM, "form": DIRECT},
            _ITERATION_WORDS,
            ("coefficients", "normalize"),
            ("normalize",),
        ),
        _plain(Op.QR, "x"),
        _plain(Op.EIGH, "x"),
        _plain(Op.SINGULAR_VECTORS, "x", "rank"),
        Function("inverse_root", _inverse_root, ("x", "order"), {"eps": 0}),
        _random(Op.UNIFORM),
        _random(Op.NORMAL),
    )
}
FUNCTIONS["matmul"] = _along_axes(FUNCTIONS["matmul"])
