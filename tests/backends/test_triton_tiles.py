"""Kernels with rows and columns, as they are launched on an H200: enough of them at a time, by their machine code.

A limit is an estimate from counted instructions, registers and bytes; no GPU takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import rulec
from rulec.kernel.place import is_shaped
from rulec_backends.triton import work
from rulec_backends.triton.registers import ALL, most_registers
from tests import ledger
from tests.backends.triton_compiled import programs, sources
from tests.backends.triton_tiles import JUDGES, TileFacts, compiled, executed

#: Reductions to rows, to columns and to numbers, few arrays and many.
SPOT = ("adafactor", "came", "sm3", "adamp", "adam_mini")

#: The accesses of local memory by a thread for a whole tile, in the rules that have any.
LOCAL = {"apollo": 1, "ranger21": 2, "sinkgd": 3}

#: 10,240 by 10,240.
ELEMENTS = 10240**2


def check(facts: TileFacts) -> None:
    """Programs hardly wait longer than memory or arithmetic take, and keep whole tiles in registers."""
    limits = facts.seconds(ELEMENTS)
    waiting = limits.pop("waiting")
    assert facts.programs >= 2, facts
    assert waiting <= 1.4 * max(limits.values()), (facts, waiting, limits)
    assert facts.local <= LOCAL.get(facts.kernel.split(" ")[0], 0), facts


def check_rules(rules: Sequence[str]) -> None:
    """Proves the kernels of the rules whose text, compiler or check changed since they were proved."""
    known = ledger.checker(Path(__file__), *JUDGES)
    claims = {rule: ledger.digest(known, *sources(rule, "float32")) for rule in rules}

    def compile_and_check(changed: list[str]) -> None:
        found = compiled("float32,", changed)
        assert {facts.kernel.split()[0] for facts in found} == set(changed)
        for facts in found:
            check(facts)

    ledger.prove(claims, compile_and_check)


def shaped_rules() -> list[str]:
    """The rules with a stage over rows and columns."""
    return [
        rule
        for rule in rulec.rules()
        if any(is_shaped(p, s, layout) for p, layout in programs(rule, "float32") for s in p.stages if s.roots)
    ]


@pytest.mark.proof
def test_enough_programs_with_rows_and_columns_share_a_multiprocessor() -> None:
    check_rules(SPOT)


@pytest.mark.slow
@pytest.mark.proof
def test_enough_programs_of_every_rule_with_rows_and_columns() -> None:
    check_rules(shaped_rules())


LOOP = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0010*/              @!P1 FADD R8, R8, R12 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   CALL.REL.NOINC `($div_slowpath) ;
.L_x_2:
        /*0040*/                   IMAD.MOV.U32 R12, RZ, RZ, R5 ;
"""


def test_a_loop_is_read_as_it_is() -> None:
    lines = [line.strip() for line in LOOP.strip().splitlines()]
    assert executed(lines) == ["LDG.E.128", "FADD", "BRA", "IMAD.MOV.U32"]


def test_a_kernel_waits_for_memory_where_few_programs_share_a_multiprocessor() -> None:
    facts = TileFacts("", 8, 0, 1024, 256, 64, 8192, 0, {"FADD": 70, "MUFU": 8})
    assert facts.programs == 4
    assert facts.seconds(ELEMENTS)["special"] == pytest.approx(ELEMENTS / 4 * 8 / 16 / 132 / 1.75e9)
    check(facts)
    few = replace(facts, registers=112)
    assert few.programs == 2
    assert few.seconds(ELEMENTS)["waiting"] == pytest.approx(ELEMENTS / 1024 / 132 / 2 * (600e-9 + 78 * 4 / 1.75e9))
    with pytest.raises(AssertionError):
        check(few)
    with pytest.raises(AssertionError):
        check(replace(facts, local=1))


@pytest.mark.parametrize(("backend", "stage", "bound"), [("cuda", 0, 64), ("cuda", 1, 48), ("hip", 0, None)])
def test_registers_are_bounded_where_triton_can(
    backend: str, stage: int, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((program, layout),) = programs("adafactor", "float32")
    monkeypatch.setattr(work, "_target", lambda: SimpleNamespace(backend=backend))
    launched = SimpleNamespace(
        _program=program, _shaped=True, _vector=4, _block=SimpleNamespace(threads=256),
        device=SimpleNamespace(type="cuda"),
    )  # fmt: skip
    found = work.StageWork._bounds(launched, program.stages[stage], layout)  # type: ignore[arg-type]
    assert found == ({"maxnreg": bound} if bound else {})


def test_all_threads_of_the_programs_have_registers() -> None:
    for moved in range(2, 64, 2):
        for reduces in (False, True):
            most = most_registers(moved, 4, reduces, 256)
            assert most % 8 == 0
            assert 2 * 256 * most <= ALL
