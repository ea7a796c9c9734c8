"""Expressions as text and back: the same node, however operators nest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rulec.language.expr.node import Node, Op, const, name, node, walk
from rulec.language.expr.text import expression_text, number_text, shared, short_text
from rulec.language.parse.expression import MAX_DEPTH, parse_expression
from rulec.language.parse.located import Text
from rulec.language.source import Source
from tests.language.expressions import NAMES, expressions, negated, numbers

A, B, C = name("a"), name("b"), name("c")


def parse(text: str) -> Node:
    return parse_expression(Text(text, Source("<test>", text)), [*NAMES, "a", "b", "c"])


@given(expressions)
@settings(max_examples=120, deadline=None)
def test_reads_back_to_the_same_node(value: Node) -> None:
    if value.depth <= MAX_DEPTH:
        assert parse(expression_text(value)) is value


@given(numbers)
def test_numbers_read_back(value: Node) -> None:
    assert parse(expression_text(value)) is value
    assert parse(f"a*{expression_text(value)}") is node(Op.MUL, A, value)
    assert parse(expression_text(node(Op.POW, value, A))) is node(Op.POW, value, A)
    assert parse(expression_text(node(Op.POW, A, value))) is node(Op.POW, A, value)


def plus(a: Node, b: Node) -> Node:
    return node(Op.ADD, a, b)


def minus(a: Node, b: Node) -> Node:
    return node(Op.SUB, a, b)


def times(a: Node, b: Node) -> Node:
    return node(Op.MUL, a, b)


def power(a: Node, b: Node) -> Node:
    return node(Op.POW, a, b)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-a**2", negated(power(A, const(2)))),
        ("(-a)**2", power(negated(A), const(2))),
        ("-2**2", negated(power(const(2), const(2)))),
        ("(-2)**2", power(const(-2), const(2))),
        ("2**(-1)", power(const(2), const(-1))),
        ("2**(-a)", power(const(2), negated(A))),
        ("a**b**c", power(A, power(B, C))),
        ("(a**b)**c", power(power(A, B), C)),
        ("a - (b - c)", minus(A, minus(B, C))),
        ("a - b - c", minus(minus(A, B), C)),
        ("a - (b + c)", minus(A, plus(B, C))),
        ("a + (b - c)", plus(A, minus(B, C))),
        ("a/(b*c)", node(Op.DIV, A, times(B, C))),
        ("a/b*c", times(node(Op.DIV, A, B), C)),
        ("a*(b/c)", times(A, node(Op.DIV, B, C))),
        ("a//b%c", node(Op.MOD, node(Op.FLOORDIV, A, B), C)),
        ("a - -b", minus(A, negated(B))),
        ("a - -2", minus(A, const(-2))),
        ("a*-b", times(A, negated(B))),
        ("--a", negated(negated(A))),
        ("-(a + b)", negated(plus(A, B))),
        ("-a*b", times(negated(A), B)),
        ("not a < b", node(Op.NOT, node(Op.LT, A, B))),
        ("(not a) < b", node(Op.LT, node(Op.NOT, A), B)),
        ("a < b == c", None),
        ("(a < b) == c", node(Op.EQ, node(Op.LT, A, B), C)),
        ("a < (b == c)", node(Op.LT, A, node(Op.EQ, B, C))),
        ("a < b and b < c", node(Op.AND, node(Op.LT, A, B), node(Op.LT, B, C))),
        ("a and (b or c)", node(Op.AND, A, node(Op.OR, B, C))),
        ("a and b or c", node(Op.OR, node(Op.AND, A, B), C)),
        ("a or b and c", node(Op.OR, A, node(Op.AND, B, C))),
        ("not (a and b)", node(Op.NOT, node(Op.AND, A, B))),
        ("not a and b", node(Op.AND, node(Op.NOT, A), B)),
        ("a and (b and c)", node(Op.AND, A, node(Op.AND, B, C))),
        ("(a < b)*c", times(node(Op.LT, A, B), C)),
        ("a @ b @ c", node(Op.MATMUL, node(Op.MATMUL, A, B), C)),
        ("a @ (b @ c)", node(Op.MATMUL, A, node(Op.MATMUL, B, C))),
        ("a*b @ c", node(Op.MATMUL, times(A, B), C)),
        ("where(a < b, a, -b)", node(Op.WHERE, node(Op.LT, A, B), A, negated(B))),
        ('norm(a + b, per="row")', node(Op.NORM, plus(A, B), "row")),
        ('newton_schulz(a, steps=5, dtype="bfloat16")', node(Op.NEWTON_SCHULZ, A, const(5), ("bfloat16", "muon"))),
        (
            'newton_schulz(a, steps=5, normalize="none", form="gram")',
            node(Op.NEWTON_SCHULZ, A, const(5), (None, "muon", "none", "gram")),
        ),
        (
            'newton_schulz(a, steps=2, dtype="float32", coefficients=[[1.5, -0.5, 0], [2, -1.5, 0.5]])',
            node(Op.NEWTON_SCHULZ, A, const(2), ("float32", ((1.5, -0.5, 0.0), (2.0, -1.5, 0.5)))),
        ),
        (
            'newton_schulz(a, steps=5, dtype="bfloat16", per=block(b))',
            node(Op.IN_BLOCKS, A, const(5), B, ("newton_schulz", ("bfloat16", "muon"))),
        ),
        (
            'solve(a, b, kind="lower", per=block(8)) + matmul(a, b, per=block(8))',
            plus(
                node(Op.IN_BLOCKS, A, B, const(8), ("solve", ("lower",))),
                node(Op.IN_BLOCKS, A, B, const(8), ("matmul", None)),
            ),
        ),
        (
            "(a + a)[2:][:, 0:3]",
            node(
                Op.SLICE,
                node(Op.SLICE, node(Op.ADD, A, A), const(2), const(float("inf")), ("rows",)),
                const(0),
                const(3),
                ("cols",),
            ),
        ),
        (
            'concat(a, a, axis=1) + solve(a, a, kind="upper")',
            node(Op.ADD, node(Op.CONCAT, A, A, (1,)), node(Op.SOLVE, A, A, ("upper",))),
        ),
        ("normal([a, 4], at=t, draw=2)", node(Op.NORMAL, name("t"), A, const(4), 2)),
        ("1e-08*a", times(const(1e-8), A)),
        ("inf", const(math.inf)),
        ("-inf", const(-math.inf)),
        ("-0.0", const(-0.0)),
        ("0", const(0.0)),
        ("1e+16", const(1e16)),
    ],
    ids=str,
)
def test_precedence(text: str, value: Node | None) -> None:
    if value is None:  # Python chains comparisons, and so does a rule
        value = node(Op.AND, node(Op.LT, A, B), node(Op.EQ, B, C))
        text = "a < b and b == c"
        assert parse("a < b == c") is value
    assert expression_text(value) == text
    assert parse(text) is value


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ("+a", "a"), ("a + +2", "a + 2"), ("-(2)", "-2"), ("-(+2)", "-2"), ("- -2", "2"), ("2**-1", "2**(-1)"),
        ("clip(a, -b, b)", "minimum(maximum(a, -b), b)"), ("matmul(a, b)", "a @ b"),
        ("norm(a)", 'norm(a, per="tensor")'),
        ("a < b < c", "a < b and b < c"), ("a < b < c < a", "a < b and b < c and c < a"), ("0x10*a", "16*a"),
        ("1_000*a", "1000*a"), ("pi", "3.141592653589793"), ("normal([rows, 2])", "normal([rows, 2], at=t, draw=0)"),
        ("uniform([1, 2], at=a)", "uniform([1, 2], at=a, draw=0)"),
        ("uniform([1, 2]) + uniform([1, 2])", "uniform([1, 2], at=t, draw=0) + uniform([1, 2], at=t, draw=1)"),
        ("newton_schulz(a)", "newton_schulz(a, steps=5)"),
        ('newton_schulz(a, dtype="float32", normalize=1)', 'newton_schulz(a, steps=5, dtype="float32")'),
        ('newton_schulz(a, normalize="norm", coefficients="muon")', "newton_schulz(a, steps=5)"),
        ('newton_schulz(a, form="direct")', "newton_schulz(a, steps=5)"),
        ('newton_schulz(a, normalize="norm", form="gram")', 'newton_schulz(a, steps=5, form="gram")'),
        ("newton_schulz(a, normalize=51/50)", "newton_schulz(a, steps=5, normalize=1.02)"),
        ("((a))", "a"), ("a  +   b", "a + b"), ("(a +\n b)", "a + b"), ("a +\n b", "a + b"), ("not not a", "not not a"),
    ],
)  # fmt: skip
def test_other_ways_to_write(written: str, same: str) -> None:
    assert expression_text(parse(written)) == same
    assert parse(same) is parse(written)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_number_text(value: float) -> None:
    text = number_text(value)
    assert math.copysign(1, float(text)) == math.copysign(1, value)
    assert float(text) == value
    assert len(text) <= len(repr(value))


def test_constants_are_told_apart_by_their_bits() -> None:
    assert const(0.0) is not const(-0.0)
    assert const(1) is const(1.0)
    assert const(math.nan) is const(math.nan)


def test_shared_nodes_do_not_grow_the_text_of_a_message() -> None:
    value = A
    for _ in range(200):
        value = plus(times(value, value), B)
    assert value.size == 1 << 40
    assert len(short_text(value)) < 500
    assert len(repr(value)) < 500


@pytest.mark.slow
def test_deep_nodes_have_a_text() -> None:
    value = A
    for _ in range(10_000):
        value = plus(value, B)
    assert expression_text(value).count("b") == 10_000
    assert sum(1 for _ in walk([value])) == 10_002


def test_named_values_are_written_by_name() -> None:
    inner = plus(A, B)
    assert expression_text(times(inner, inner), {inner: "x"}) == "x*x"
    assert expression_text(inner, {inner: "x"}) == "a + b"
    assert shared([times(inner, inner), C]) == [inner]
