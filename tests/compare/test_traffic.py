"""Bytes per parameter, counted by hand for rules that are simple enough."""

from __future__ import annotations

import pytest

import rulec
from rulec.compiler.layout import kernel_for, layout_for
from rulec.compiler.layout import traffic as counted
from rulec.tools.display.kernels import traffic


def test_sgd() -> None:
    program = rulec.compile(rulec.load("sgd"))
    moved = traffic(program, layout_for(program, "float32"))
    assert (moved.read, moved.written, moved.state) == ({"p": 4, "g": 4}, {"p": 4}, {})
    # lr*g reads one and writes one array, p - that reads two and writes one.
    assert (moved.values, moved.stores, moved.total, moved.unfused) == (2, 1, 12, 20)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_dtype(dtype: str, size: int) -> None:
    program = rulec.compile(rulec.load("adamw"))
    assert traffic(program, layout_for(program, dtype)).total == 7 * size


def test_states_of_another_dtype_count_as_theirs() -> None:
    program = rulec.compile(rulec.load("adamw"))
    moved = traffic(program, layout_for(program, "bfloat16", states={"m": "float32"}))
    assert moved.read == {"p": 2, "g": 2, "m": 4, "v": 2}


def test_a_stage_that_reads_again_counts_again() -> None:
    text = "name: N\nhyper: {lr: 1}\nstep: |\n  direction = g/norm(g)\n"
    program = rulec.compile(rulec.parse(text))
    assert traffic(program, layout_for(program, "float32")).read == {"p": 4, "g": 8}


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon", "apollo", "prodigy"])
def test_the_bytes_of_scheduled_stages_are_those_the_engine_counts(name: str) -> None:
    rule = rulec.load(name).standalone()
    program = rulec.compile(rule)
    program, layout = kernel_for(program, "float32")
    found = traffic(program, layout)
    assert (sum(found.read.values()), sum(found.written.values())) == counted(program, layout)


def test_what_is_worked_out_between_stages_and_kept_in_other_shapes() -> None:
    program = rulec.compile(rulec.load("muon"))
    (matrix,) = (v.name for v in program.vectors if v.axes.elementwise)
    assert traffic(program, layout_for(program, "bfloat16")).read[matrix] == 4
    program = rulec.compile(rulec.load("apollo"))
    assert traffic(program, layout_for(program, "float32")).state == {}
