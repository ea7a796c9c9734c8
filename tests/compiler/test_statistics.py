"""Statistics in programs: reductions of the stages that have their values, without another pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec import RuleError
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.view import plain_facts
from rulec.language.statistics import watched
from rulec.runtime.buckets.scalar_table import ScalarRows
from rulec.runtime.statistics import checked_words, waits_for_shards
from rulec.tools.display.kernels import traffic
from tests.library import by_kind

WHOLE_RULES = [name for name in rulec.rules() if not rulec.load(name).wraps]


@pytest.mark.parametrize("name", by_kind(WHOLE_RULES))
def test_the_norms_of_a_step_take_no_pass_over_memory_more(name: str) -> None:
    rule = rulec.load(name).standalone()
    plain, measuring = compile(rule), compile(rule, watch=watched(rule, "norms"))
    layout = layout_for(plain, "float32")
    moved = [traffic(*scheduled(program, layout.of(program))).total for program in (plain, measuring)]
    # The cosine reads the gradient, and norms the parameter, in a last stage that may read neither.
    assert moved[1] - moved[0] in ((0,) if plain.elementwise else (0, 4, 8))
    assert len(plain.stages) == len(measuring.stages)
    assert len(measuring.statistics) == 8


def test_adamw_with_three_statistics_moves_28_bytes() -> None:
    rule = rulec.load("adamw")
    watch = {"ratio": "norm(update)/norm(p)", "agree": "mean(where(m*g > 0, 1, 0))", "top": "max(v)"}
    program = compile(rule, watch=watched(rule, watch))
    assert traffic(program, layout_for(program, "float32")).total == 28
    assert len(program.stages) == 1


def test_a_statistic_of_a_reduced_value_takes_a_stage_of_its_own_where_it_must() -> None:
    rule = rulec.load("adamw")
    program = compile(rule, watch=watched(rule, {"spread": "rms(update - mean(update))"}))
    assert len(program.stages) == 2


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("norm(g)", "kn"), ('norm(g, per="row")', "knbi"), ('max(g, per="col")', "knbj"), ('norm(g, per="group")', "k"),
        ('norm(g, per="model")', ""), ("2*lr", "k"), ("1", ""), ("t", "kn"),
    ],
)  # fmt: skip
def test_the_level_of_a_statistic_is_that_of_its_value(text: str, letters: str) -> None:
    rule = rulec.load("adamw")
    (buffer,) = compile(rule, watch=watched(rule, {"x": text})).statistics
    assert buffer.axes.letters == letters


def test_programs_with_other_statistics_are_other_programs() -> None:
    rule = rulec.load("adamw")
    first, second = (compile(rule, watch=watched(rule, {"x": text})) for text in ("norm(g)", "norm(p)"))
    assert first is not second
    assert compile(rule) is compile(rule, watch=())


@pytest.mark.parametrize(
    ("watch", "waits"),
    [
        ("norms", False), ({"x": 'max(abs(g), per="model")'}, False), ({"x": "mean(update)/lr"}, False),
        ({"x": "rms(update - mean(update))"}, True), ({"x": 'max(norm(update, per="row"))'}, True),
    ],
)  # fmt: skip
def test_a_step_of_shards_waits_for_values_of_its_own_alone(watch: Any, waits: bool) -> None:
    words = checked_words("test", watch)
    assert waits_for_shards(rulec.load("adamw"), words, across=False, resident=False) == waits
    assert waits_for_shards(rulec.load("lamb"), words, across=False, resident=False)
    assert waits_for_shards(rulec.load("adamw"), words, across=False, resident=True)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("mean(where(m*g > 0, 1, 0))", 2), ("rms(update)/cols", 2), ('mean(g, per="row")', 2), ("numel*lr", 2),
        ('mean(g, per="model")', 2), ("rms(update - mean(update))", 2), ("mean(where(abs(g) > 1/numel, 1, 0))", 5),
    ],
)  # fmt: skip
def test_shape_facts_behind_reductions_give_no_tensor_a_row_of_its_own(text: str, rows: int) -> None:
    """A kernel that reads a fact for each element finds it in the tensor's row."""
    rule = rulec.load("adamw")
    facts = [{**plain_facts((n, 3)), "rows": n, "cols": 3} for n in (1, 2, 3, 4, 5)]
    program = compile(rule, facts[0], watch=watched(rule, {"x": text}))
    hyper = {name: np.array([0.5, 0.25]) for name in program.hyper}
    table = ScalarRows(program, np.array([0, 0, 0, 1, 1]), facts)
    counts = np.ones(5)
    assert len(table.separate(counts, None, hyper, {}, {})[0].table) == rows


def test_a_fact_that_a_rule_reads_itself_is_one_column_for_it_and_its_statistics() -> None:
    rule = rulec.parse("name: Sized\nhyper: {lr: 0.1}\nstep: |\n  direction = g/numel\n")
    program, plain = compile(rule, watch=watched(rule, {"mean": "mean(g)"})), compile(rule)
    assert [c.value for c in program.columns] == [c.value for c in plain.columns]


@pytest.mark.parametrize("when", ["", "\n    when: t > 3"])
@pytest.mark.parametrize(("step", "kept"), [("climb.g", False), ("climb.g + 0*g", True)])
def test_a_rule_with_passes_measures_an_earlier_gradient_that_its_step_reads(step: str, kept: bool, when: str) -> None:
    rule = rulec.parse(
        f"name: Climbing\nhyper: {{lr: 0.1}}\npasses:\n  climb:\n    point: p + g{when}\nstatistics:\n"
        f"  first: norm(g)\n  last: norm(climb.g)\nstep: |\n  direction = {step}\n"
    ).standalone()
    assert len(compile(rule, watch=watched(rule, "last")).statistics) == 1
    if kept:
        assert len(compile(rule, watch=watched(rule, "first")).statistics) == 1
        return
    with pytest.raises(RuleError, match="is gone at the end of a step that does not read it: measure that of the last"):
        compile(rule, watch=watched(rule, "first"))
