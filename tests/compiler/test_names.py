"""Names of values that the author gave none: sources and tables of scalars are read by people."""

from __future__ import annotations

import re

import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import kernel_for
from rulec.compiler.names import free_name, words
from rulec.language.expr.node import Op, walk


def program_of(step: str, state: str = "") -> Program:
    lines = "".join(f"  {line}\n" for line in step.splitlines())
    hyper = "{lr: 0.1, a: 0.5, b: 2, every: {default: 3, static: true}}"
    return rulec.compile(rulec.parse(f"name: Named\nhyper: {hyper}\nstate: {{{state}}}\nstep: |\n{lines}"))


@pytest.mark.parametrize(("expression", "name"), [
    ("1 - a", "one_minus_a"), ("1 - a**t", "one_minus_a_t"), ("sqrt(1 - a**t)", "sqrt_one_minus_a_t"),
    ("a*a", "a_squared"), ("a/b", "a_over_b"), ("minimum(a, 1/sqrt(t))", "min_a_one_over_sqrt_t"),
    ("a**b", "a_to_b"), ("sqrt(numel)", "sqrt_numel"), ("floor((t - 1)/a)", "floor_t_minus_one_over_a"),
    ("abs(-a)", "abs_minus_a"), ("0.37*exp(a)*floor(a)", "direction_factor"),
])  # fmt: skip
def test_columns_of_the_scalar_table(expression: str, name: str) -> None:
    program = program_of(f"direction = g*({expression})")
    assert [c.name for c in program.scalars.columns if c.name != "lr"] == [name]


@pytest.mark.parametrize(("expression", "reduction", "column"), [
    ("norm(p)", "sum_p_squared", "norm_p"), ("mean(g)", "sum_g", "sum_g_over_numel"),
    ("max(abs(g))", "max_abs_g", "max_abs_g_2"), ("sum(u*p)", "sum_u_p", "sum_u_p_2"),
    ("sum(where(g*p > 0, 1, 0))", "sum_for_direction", "sum_for_direction_2"),
])  # fmt: skip
def test_reductions_and_what_follows_from_them(expression: str, reduction: str, column: str) -> None:
    program = program_of(f"u = g - p\ndirection = (u + g)*({expression})")
    assert [r.name for r in program.stages[0].reduces] == [reduction]
    assert [c.name for c in program.late] == [column]


def test_names_say_what_a_reduction_is_per() -> None:
    program = program_of('direction = g/(sum(g*g, per="row") + 0.1)/(sum(g*g, per="col") + 0.1)/(1 + norm(g))')
    assert {r.name for r in program.stages[0].reduces} == {
        "sum_g_squared_row", "sum_g_squared_col", "sum_g_squared",
    }  # fmt: skip


def test_what_is_long_is_named_by_the_line_that_reads_it() -> None:
    program = program_of("update = g/(a*b + 0.123456*exp(a)*exp(b))\ndirection = update")
    assert [c.name for c in program.scalars.columns if c.name != "lr"] == ["update_divisor"]


def test_no_two_values_have_one_name() -> None:
    for name in rulec.rules(wrappers=False):
        program = kernel_for(rulec.compile(rulec.load(name)), "float32").program
        reduces = [r.name for stage in program.stages for r in stage.reduces]
        names = [c.name for c in program.columns] + [v.name for v in program.vectors] + reduces
        names += [b.name for b in program.buffers if b.role == "scratch"]
        assert len(set(names)) == len(names), name
        assert all(re.fullmatch(r"[^\W\d]\w*", n) for n in names), name


def test_words_end_where_they_would_be_long() -> None:
    program = program_of("direction = g*a")
    value = next(n for n in walk([program.stages[0].stores[0].value]) if n.op is Op.MUL)
    assert 0 < len(words(program, value)) <= 32
    deep = value
    for _ in range(4):
        from rulec.language.expr.node import node

        deep = node(Op.ADD, deep, value)
    assert words(program, deep) == ""
    assert free_name("adam.m", {"adam_m"}) == "adam_m_2"
