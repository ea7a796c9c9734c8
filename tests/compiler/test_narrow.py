"""Operands and results of `newton_schulz` in 16 bits: which have them, and what a step then moves."""

from __future__ import annotations

import pytest

import rulec
from rulec.compiler.layout import Kernel, layout_for, scheduled, traffic
from rulec.compiler.memory import narrowed

RULE = """
name: Trial
hyper: {lr: 0.1}
state: {m: 0}
step: |
  m = m + g
  o = newton_schulz(m + g, steps=2, dtype="bfloat16")
  LINES
"""


def kernel(rule: str, dtype: str = "float32") -> Kernel:
    """A program of a rule, and its layout with memory of 16 bits."""
    program, layout = scheduled(*_plain(rule, dtype))
    return Kernel(program, narrowed(program, layout))


def _plain(rule: str, dtype: str) -> Kernel:
    program = rulec.compile(rulec.load(rule) if "\n" not in rule else rulec.parse(rule))
    return Kernel(program, layout_for(program, dtype))


def narrow(rule: str, dtype: str = "float32") -> dict[str, str]:
    """The scratch and results in 16 bits."""
    program, layout = kernel(rule, dtype)
    scratch = {b.name for b in program.buffers if b.role == "scratch"}
    return {b: d for b, d in layout.dtypes if b in scratch and d == "bfloat16"} | dict(layout.results)


def test_muon_moves_eight_bytes_less_for_an_element() -> None:
    program, layout = kernel("muon")
    assert narrow("muon") == {"o_part": "bfloat16", "o": "bfloat16"}
    assert traffic(*scheduled(*_plain("muon", "float32"))) == (16, 12)
    assert traffic(program, layout) == (14, 10)
    assert layout.result("o") == "bfloat16"
    assert layout.of(program).results == (), "another version has results of its own"


@pytest.mark.parametrize("rule", ["adamuon", "normuon", "scion", "spel", "polargrad", "dion2"])
def test_other_rules_with_the_function_move_less_too(rule: str) -> None:
    program, layout = kernel(rule)
    assert sum(traffic(program, layout)) <= sum(traffic(*scheduled(*_plain(rule, "float32")))) - 4


def test_a_rule_without_the_function_is_as_before() -> None:
    assert kernel("shampoo") == scheduled(*_plain("shampoo", "float32"))


def test_a_result_that_another_function_reads_stays_wide() -> None:
    lines = "direction = o + (o @ transpose(o)) @ o"
    program, layout = kernel(RULE.replace("LINES", lines))
    assert "o" in {v.name for v in program.vectors}
    assert layout.results == ()
    assert "o" in narrow(RULE.replace("LINES", "direction = 2*o"))


def test_scratch_that_another_reader_needs_whole_stays_wide() -> None:
    """Both functions read the same operand, one of them in float32."""
    lines = 'direction = o + newton_schulz(m + g, steps=2, dtype="float32")'
    both = narrow(RULE.replace("LINES", lines))
    assert not [b for b in both if b != "o"]


def test_a_function_in_float32_has_no_narrow_memory() -> None:
    assert narrow(RULE.replace('"bfloat16"', '"float32"').replace("LINES", "direction = o")) == {}
