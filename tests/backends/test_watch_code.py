"""Steps with statistics as machine code for a GPU that is not here: not a byte more, and nothing in local memory."""

from __future__ import annotations

import json

import pytest

from rulec.tools.display.kernels import traffic
from tests.backends.cuda_assembly import missing
from tests.backends.watch_code import (
    BACKENDS,
    DTYPES,
    FILE,
    RULES,
    StageCost,
    instructions,
    measure,
    measured_elsewhere,
    program_of,
    stage_cost,
    usual_path,
)

needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")

#: Rules with one stage: what they read without statistics is what the statistics read.
ELEMENTWISE = ("sgd", "lion", "adamw", "nadam", "adan", "adabelief")


def check_bytes(costs: list[StageCost]) -> None:
    """Asserts that the stages of one rule move as many bytes more as its program says, and spill nothing."""
    first = costs[0]
    plain, measured = (traffic(*program_of(first.rule, first.dtype, watch)).total for watch in ("", "norms"))
    moved = [
        sum(cost.read + cost.written for cost in kind)
        for kind in ([c.plain for c in costs], [c.measured for c in costs])
    ]
    assert moved[1] - moved[0] == measured - plain, first
    assert [(c.plain.stack, c.measured.stack) for c in costs] == [(0, 0)] * len(costs), first


@needs_nvrtc
@pytest.mark.parametrize("rule", ["sgd", "lion", "adamw"])
def test_statistics_move_no_byte_more(rule: str) -> None:
    (cost,) = measure("cupy", "float32", [rule])
    assert (cost.measured.read, cost.measured.written) == (cost.plain.read, cost.plain.written)
    assert cost.measured.instructions > cost.plain.instructions
    check_bytes([cost])


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_move_what_their_program_moves(backend: str, dtype: str) -> None:
    rules = dict.fromkeys((*ELEMENTWISE, *RULES))
    costs = measured_elsewhere(backend, dtype, [*rules])
    for rule in rules:
        of_rule = [cost for cost in costs if cost.rule == rule]
        check_bytes(of_rule)
        if rule in ELEMENTWISE:
            (cost,) = of_rule
            assert (cost.measured.read, cost.measured.written) == (cost.plain.read, cost.plain.written), cost


def test_the_table_is_of_these_rules_and_bytes() -> None:
    costs = [stage_cost(row) for row in json.loads(FILE.read_text())]
    for backend in BACKENDS:
        for dtype in DTYPES:
            for rule in RULES:
                of_rule = [c for c in costs if (c.backend, c.dtype, c.rule) == (backend, dtype, rule)]
                assert [c.stage for c in of_rule] == [*range(len(of_rule))] != []
                check_bytes(of_rule)


SASS = """
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/                   FADD R0, R0, R1 ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/               @P0 BRA 0x60 ;
        /*0040*/                   CALL.REL.NOINC 0x200 ;
        /*0050*/                   BRA 0x80 ;
        /*0060*/                   FMUL R0, R0, R1 ;
        /*0070*/                   FMUL R0, R0, R1 ;
        /*0080*/                   STG.E.U16 [R2.64], R0 ;
        /*0090*/              @!P1 BRA 0x10 ;
        /*00a0*/                   LDG.E.64 R4, [R2.64] ;
        /*00b0*/               @P1 BRA 0x0 ;
        /*00c0*/                   BRA 0xc0 ;
"""


def test_the_usual_path_is_that_of_wide_accesses_without_calls() -> None:
    way = usual_path(instructions(SASS))
    assert [x.address // 16 for x in way] == [1, 2, 3, 6, 7, 8, 9]
    assert [x.moved for x in way] == [0, 16, 0, 0, 0, 2, 0]
