"""Expressions as text of the rule language: from nodes back to an author's notation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

from rulec.language.expr.node import PLACED, Kind, Node, Op, dimension_of, name, rewrite, walk
from rulec.language.expr.static import (
    ALONG,
    ALONG_AXIS,
    LINEAR,
    MUON,
    NORM,
    ORDERS,
    inside,
    is_lowered,
    settings,
    statics,
)

_PRECEDENCE = {
    Op.OR: 1, Op.AND: 2, Op.NOT: 3,
    Op.LT: 4, Op.LE: 4, Op.GT: 4, Op.GE: 4, Op.EQ: 4, Op.NE: 4,
    Op.ADD: 5, Op.SUB: 5, Op.MUL: 6, Op.DIV: 6, Op.MOD: 6, Op.FLOORDIV: 6, Op.MATMUL: 6, Op.NEG: 7, Op.POW: 8,
}  # fmt: skip
_ATOM = 10

#: A text and how tightly its outermost operator binds.
_Piece = tuple[str, int]


def number_text(value: float) -> str:
    """The shortest text of a float64. Reading it gives the same float64."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15 and not (value == 0 and math.copysign(1, value) < 0):
        return str(int(value))
    return repr(value)


def expression_text(value: Node, named: Mapping[Node, str] | None = None) -> str:
    """`value` in the rule language. Nodes in `named`, except `value` itself, are written by name.

    Reading the text back gives the same node, except for nodes of the compiler (`Op.LOAD` and its kind): their text is
    their name.
    """
    done: dict[Node, _Piece] = {n: (text, _ATOM) for n, text in (named or {}).items() if n is not value}
    stack = [value]
    while stack:
        current = stack[-1]
        missing = [a for a in _operands(current) if a not in done]
        if missing:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        if current not in done:
            done[current] = _text(current, done)
    return done[value][0]


def short_text(value: Node, most: int = 30) -> str:
    """`value` in the rule language for a message: after `most` nodes, inner parts are written `...`."""
    queue, seen, cut = deque([value]), 0, {}
    while queue:
        current = queue.popleft()
        seen += 1
        if seen > most and current.args:
            cut[current] = "..."
        else:
            queue.extend(current.args)
    return expression_text(value, cut)


def _operands(value: Node) -> tuple[Node, ...]:
    """The expressions in the text of `value`."""
    return (*value.args, *statics(value)) if is_lowered(value) else value.args


def _text(value: Node, done: Mapping[Node, _Piece]) -> _Piece:
    if value.op is Op.CONST:
        text = number_text(cast(float, value.arg))
        return text, _PRECEDENCE[Op.NEG] if text.startswith("-") else _ATOM
    if value.op is Op.STEP:
        return "t", _ATOM
    if value.op is Op.FACT and (dimension := dimension_of(value.arg)) is not None:
        return f"dim({dimension})", _ATOM
    if value.op.kind is Kind.LEAF:
        return str(value.arg), _ATOM
    if value.op is Op.CALL:
        return _called(value, done), _ATOM
    if value.op is Op.SLICE:
        return _slice_text(value, done), _ATOM
    if value.op not in _PRECEDENCE:
        return f"{settings(value).get('function', value.op.symbol)}({_call_arguments(value, done)})", _ATOM
    return _operator_text(value, done)


def _operator_text(value: Node, done: Mapping[Node, _Piece]) -> _Piece:
    level = _PRECEDENCE[value.op]
    if len(value.args) == 1:
        inner, inner_level = done[value.args[0]]
        sign = "not " if value.op is Op.NOT else "-"
        return sign + (inner if inner_level >= level else f"({inner})"), level
    (left, left_level), (right, right_level) = (done[a] for a in value.args)
    comparison = value.op.kind is Kind.COMPARE
    if left_level < level or (left_level == level and (value.op is Op.POW or comparison)):
        left = f"({left})"
    if right_level < level or (right_level == level and value.op is not Op.POW):
        right = f"({right})"
    tight = value.op in (Op.MUL, Op.DIV, Op.POW, Op.MOD, Op.FLOORDIV)
    symbol = value.op.symbol if tight else f" {value.op.symbol} "
    return f"{left}{symbol}{right}", level


def _called(value: Node, done: Mapping[Node, _Piece]) -> str:
    """A wrapper's call of the rule it wraps: `inner(g)`, `inner(g, t=t/2)` or `inner(g, p=slow)`."""
    argument, *others = (done[a][0] for a in value.args)
    said = [f", {key}={text}" for key, text in zip(("t", "p"), others, strict=True) if text != key]
    return f"{value.arg}({argument}{''.join(said)})"


def _call_arguments(value: Node, done: Mapping[Node, _Piece]) -> str:
    parts = [done[a][0] for a in _operands(value)]
    if value.op is Op.IN_BLOCKS:
        *operands, rows = parts
        return f"{_arguments(inside(value), operands)}, per=block({rows})"
    return _arguments(value, parts)


def _arguments(value: Node, parts: Sequence[str]) -> str:
    """The text between the parentheses of a call, with the texts of the operands."""
    if value.op.kind is Kind.REDUCE:
        per = f"{value.arg}({parts[1]})" if value.arg in PLACED else f'"{value.arg}"'
        return f"{parts[0]}, per={per}"
    if value.op.kind is Kind.RANDOM:
        at, *extents = parts
        return f"[{', '.join(extents)}], at={at}, draw={settings(value)['draw']}"
    if value.op is Op.NEWTON_SCHULZ:
        return f"{parts[0]}, steps={parts[1]}{_iteration_text(value)}"
    if value.op is Op.QUANTILE:
        per, interpolation = settings(value).values()
        words = "" if interpolation == LINEAR else f', interpolation="{interpolation}"'
        return f'{parts[0]}, {parts[1]}, per="{per}"{words}'
    if value.op in ORDERS:
        per = settings(value)["per"]
        axes = {level: f"axis={axis}" for axis, level in ALONG_AXIS.items()} if value.op is Op.TAKE else {}
        return ", ".join([*parts, axes.get(per, f'per="{per}"')])
    if value.op in (Op.SOLVE, Op.CONCAT):
        ((key, word),) = settings(value).items()
        return ", ".join(parts) + ("" if word in ("full", 0) else f", {key}={_word(word)}")
    if value.op is Op.INDEX:
        return _index_text(value, parts)
    if value.op in ALONG and not is_lowered(value):
        return f"{', '.join(parts[:-1])}, axis={parts[-1]}"
    if value.op is Op.INVERSE_ROOT and len(parts) == 3:
        return f"{parts[0]}, {parts[1]}, eps={parts[2]}"
    return ", ".join(parts)


def _index_text(value: Node, parts: Sequence[str]) -> str:
    """The arguments of `index`; lowered, its template with the numbers in it."""
    if not is_lowered(value):
        plain = value.arg is None or value.args[0] is name(f"{value.arg}s")
        return ", ".join(parts) if value.arg is None else f'per="{value.arg}"' + ("" if plain else f", n={parts[0]}")
    atoms = [part if part.replace("_", "").isalnum() else f"({part})" for part in parts]
    numbers = {name(str(k)): name(atoms[k]) for k in range(len(value.args))}
    template = cast(Node, settings(value)["template"])
    known = len(parts) - sum(n.op is Op.NAME and str(n.arg).startswith("s") for n in walk([template]))
    numbers |= {name(f"s{k}"): name(atom) for k, atom in enumerate(atoms[known:])}
    letters = {name(letter): name(word) for letter, word in (("b", "matrix"), ("i", "row"), ("j", "col"))}
    return expression_text(rewrite([template], lambda n: numbers.get(n, letters.get(n, n)))[0])


def _slice_text(value: Node, done: Mapping[Node, _Piece]) -> str:
    """Rows or columns of a matrix: `x[a:b]`, `x[:, a:]`."""
    (matrix, level), (start, _), (stop, _) = (done[a] for a in _operands(value))
    bounds = f"{start}:{'' if stop == 'inf' else stop}"
    inside = bounds if settings(value)["axis"] == "rows" else f":, {bounds}"
    return f"{matrix if level >= _ATOM else f'({matrix})'}[{inside}]"


def _iteration_text(value: Node) -> str:
    """The keywords of `newton_schulz` after its steps, without defaults."""
    keywords = {key: word for key, word in settings(value).items() if word not in (None, MUON, NORM)}
    return "".join(f", {key}={_word(word)}" for key, word in keywords.items())


def _word(setting: object) -> str:
    """A constant of an operation: a word in quotes, a number, or a list of them."""
    if isinstance(setting, tuple):
        return f"[{', '.join(map(_word, setting))}]"
    return f'"{setting}"' if isinstance(setting, str) else number_text(cast(float, setting))


def shared(roots: Sequence[Node]) -> list[Node]:
    """The nodes under `roots` with more than one use, operands first and without leaves."""
    uses: dict[Node, int] = {}
    order = list(walk(roots))
    for value in order:
        for arg in value.args:
            uses[arg] = uses.get(arg, 0) + 1
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    return [value for value in order if uses.get(value, 0) > 1 and value.op.kind is not Kind.LEAF]
