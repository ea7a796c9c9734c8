"""Indices of elements: values of `index`, which are computed in float64 until they meet a value of the step.

An index depends on the place of an element alone. Arithmetic on indices, hyper-parameters, `t` and shape facts becomes
one operation between the stages, by a template as in `rulec.array_api.indices`. float64 has every whole number up to
2**53. A result that is a matrix is rounded once; one of rows or of columns alone stays in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rulec.array_api.indices import index_array
from rulec.compiler.ir import AXES, COLS, ROWS, Axes, axes_of_letters
from rulec.compiler.view import MatrixView, shape_of, view_of
from rulec.language.expr.arithmetic import NUMPY, mpmath_context, mpmath_table, number_known
from rulec.language.expr.node import NUMBERS, Node, Op, const, extent, is_boolean, name, node, rewrite, walk
from rulec.language.expr.static import is_lowered, letters_of, settings, statics
from rulec.language.expr.text import expression_text
from rulec.language.rule_data import RuleData
from rulec.language.source import Span, rule_error

_LETTERS = "bij"

#: The leaves of numbers that a template takes as operands.
_NUMBERS = (Op.CONST, Op.HYPER, Op.STEP, Op.FACT)


def is_lowered_index(value: Node) -> bool:
    """Whether a value is a template of indices with its operands."""
    return value.op is Op.INDEX and is_lowered(value)


def template_of(value: Node) -> Node:
    """The template of an index."""
    return cast(Node, settings(value)["template"])


def view_key(rule: RuleData, known: Mapping[str, float]) -> tuple[object, ...]:
    """The axis of each dimension of a tensor in its matrices, which the indices of a rule follow from."""
    if not any(n.op is Op.INDEX and n.arg is None for n in walk(rule.expressions)):
        return ()
    view = view_of(rule, shape_of(known), _static(rule, known))
    return view.transposed, "".join(view.axis(d) for d in range(len(view.shape)))


def _static(rule: RuleData, known: Mapping[str, float]) -> dict[str, float]:
    return {key: known[key] for key, hyper in rule.hyper.items() if hyper.static and key in known}


def index_of(rule: RuleData, value: Node, known: Mapping[str, float], span: Span | None) -> Node:
    """A call of `index` as a template; RuleError for a dimension that the tensor does not have."""
    if value.arg is not None:
        letter = {"row": "i", "col": "j"}[str(value.arg)]
        return node(Op.INDEX, (name(letter), *value.args))
    view = view_of(rule, shape_of(known), _static(rule, known))
    if not value.args:
        return _of_own_matrices(_place(view), rule)
    number, count = number_known(value.args[0], known), len(view.shape)
    said = f"index({expression_text(value.args[0])})"
    if number is None:
        raise rule_error(
            f"the dimension of {said} must be known when a kernel is made: make it of numbers and shape facts", span
        )
    if not float(number).is_integer() or not -count <= number < count:
        size = f"{count} dimension{'' if count == 1 else 's'}"
        raise rule_error(f"a tensor of {size} has no {said}: put it under a condition on ndim", span)
    return _of_own_matrices(_along(view, int(number) % count), rule)


def _place(view: MatrixView) -> Node:
    """The place of an element in the flattened tensor, as an expression of letters and shape facts."""
    b, i, j = map(name, _LETTERS)
    if len(view.shape) < 2:
        return j
    row, cols, col = (j, ROWS, i) if view.transposed else (i, COLS, j)
    rows = COLS if view.transposed else ROWS
    if any(view.axis(d) not in "ij" for d in range(len(view.shape))):
        row = node(Op.ADD, node(Op.MUL, b, rows), row)
    return node(Op.ADD, node(Op.MUL, row, cols), col)


def _along(view: MatrixView, dimension: int) -> Node:
    """The index along a dimension, which is joined with others into rows, columns or the batch."""
    if view.blocks:
        place, group = _place(view), [*range(len(view.shape))]
    else:
        axes = [axis if (axis := view.axis(d)) in "ij" else "b" for d in range(len(view.shape))]
        place, group = name(axes[dimension]), [d for d, axis in enumerate(axes) if axis == axes[dimension]]
    inner = [node(Op.FACT, extent(d)) for d in group if d > dimension]
    if inner:
        size = inner[0]
        for fact in inner[1:]:
            size = node(Op.MUL, size, fact)
        place = node(Op.FLOORDIV, place, size)
    return place if group[0] == dimension else node(Op.MOD, place, node(Op.FACT, extent(dimension)))


def _of_own_matrices(value: Node, rule: RuleData) -> Node:
    """An expression of letters of the parameter's own matrices as an index."""
    letters = letters_of(value)
    batch = node(Op.DIV, node(Op.FACT, "numel"), node(Op.MUL, ROWS, COLS))
    sides = {"b": batch, "i": ROWS, "j": COLS}
    return _Fusion(rule).index(value, {letter: sides[letter] for letter in letters})


class _Fusion:
    """Joins a value of indices and numbers into one index."""

    def __init__(self, rule: RuleData) -> None:
        self.rule = rule
        self.of_step: list[Node] = []
        self.of_shape: list[Node] = []
        self.sides: dict[str, Node] = {}

    def index(self, value: Node, sides: Mapping[str, Node]) -> Node:
        """The index of a value of letters and numbers, with the extent of each letter."""
        self.sides |= sides
        template = self._template(value)
        extents = [self.sides[letter] for letter in letters_of(template)]
        return node(Op.INDEX, *self.of_step, (template, *extents, *self.of_shape))

    def _template(self, value: Node) -> Node:
        """A value with its numbers as operands, the largest ones first."""
        if value.op in (Op.NAME, Op.CONST):
            return value
        if value.op is Op.INDEX:
            return self._merge(value)
        parts = [*walk([value])]
        if any(n.op in (Op.NAME, Op.INDEX) for n in parts):
            return node(value.op, *map(self._template, value.args), value.arg)
        shaped = all(self._is_of_shape(n) for n in parts)
        numbers, prefix = (self.of_shape, "s") if shaped else (self.of_step, "")
        if value not in numbers:
            numbers.append(value)
        return name(f"{prefix}{numbers.index(value)}")

    def _is_of_shape(self, part: Node) -> bool:
        """Whether a part of a number is known for each shape."""
        if part.op is Op.HYPER:
            return self.rule.hyper[str(part.arg)].static
        return part.op is not Op.STEP and part.arg not in ("machine_eps", *NUMBERS)

    def _merge(self, value: Node) -> Node:
        template = template_of(value)
        letters, known = letters_of(template), statics(value)
        for letter, side in zip(letters, known, strict=False):
            if self.sides.setdefault(letter, side) is not side:
                raise _ApartError
        numbers = {name(str(k)): self._template(operand) for k, operand in enumerate(value.args)}
        numbers |= {name(f"s{k}"): self._template(each) for k, each in enumerate(known[len(letters) :])}
        return rewrite([template], lambda n: numbers.get(n, n))[0]


class _ApartError(Exception):
    """Indices of matrices with other extents: they do not join."""


def _has_index(value: Node) -> bool:
    return any(n.op is Op.INDEX for n in walk([value]))


def fuse(value: Node, rule: RuleData) -> Node | None:
    """Arithmetic on indices and numbers as one index; None for any other value.

    A truth value is an index, 1 or 0, that is compared with 0.
    """
    if value.op not in NUMPY or not any(_has_index(a) for a in value.args):
        return None
    parts = [*walk([value])]
    if not all(n.op in NUMPY or n.op in _NUMBERS or is_lowered_index(n) for n in parts):
        return None
    if value.op is Op.NE and value.args[0].op is Op.INDEX and value.args[1] is const(0):
        return None
    truth = is_boolean(value)
    try:
        index = _Fusion(rule).index(node(Op.WHERE, value, const(1), const(0)) if truth else value, {})
    except _ApartError:
        return None
    return node(Op.NE, index, const(0)) if truth else index


def is_of_elements(value: Node) -> bool:
    """Whether a value is an index in the parameter's own matrices: each part of a tensor has its own numbers of it."""
    if value.op is not Op.INDEX:
        return False
    sides = dict(zip(letters_of(template_of(value)), statics(value), strict=False))
    return sides.get("i", ROWS) is ROWS and sides.get("j", COLS) is COLS


def index_axes(value: Node, _: Sequence[Axes]) -> Axes:
    """The axes of an index: its letters, and the extents of its rows and columns."""
    letters = letters_of(template_of(value))
    sides = dict(zip(letters, statics(value), strict=False))
    if {"i", "j"} <= {*letters}:
        return Axes(AXES, sides["i"], sides["j"])
    plain = axes_of_letters("kn" + "".join(c for c in _LETTERS if c in letters or c == "b"))
    return Axes(plain.letters, sides.get("i"), sides.get("j"))


def numpy_index(*operands: Any, template: Node) -> Any:
    """An index on NumPy's arrays, in float64; `operands` are as for `index_array`."""
    return index_array(template, operands, NUMPY, np.float64, lambda _, n: np.arange(n, dtype=np.float64))


def exact_index(*operands: Any, template: Node) -> Any:
    """The same with 50 digits."""
    number = mpmath_context().mpf
    return index_array(
        template, operands, mpmath_table(), number, lambda _, n: np.array([number(k) for k in range(n)], dtype=object)
    )
