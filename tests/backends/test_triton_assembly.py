"""Triton's kernels compiled for GPUs that are not here: their assembly says how they use memory.

Compiled every day are some rules of each kind. The slow tests compile every rule in float32 for one target, and one
rule of each kind for the others; `make prove` compiles every rule for every target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import rulec
from tests import ledger
from tests.backends.kinds import KINDS
from tests.backends.triton_compiled import (
    CHECKERS,
    HELPED,
    TARGETS,
    Facts,
    Loop,
    compiled,
    compiled_helpers,
    loops,
    sources,
)

#: Few buffers and many, functions, one reduction and several, of tensors, rows and columns, both ways round.
SPOT = (
    "sgd", "adamw", "lion", "adan", "madgrad", "lamb", "prodigy", "cautious_adamw", "muon", "adafactor", "sm3",
    "apollo",
)  # fmt: skip

#: Bytes of stack that a kernel may have: what its preparation leaves for later. The loops of whole blocks use none.
STACK = 32


def check(facts: Facts) -> None:
    """The path of whole blocks: accesses of 16 bytes, none of them masked, as many as the program has; no spills."""
    accesses = facts.block / facts.threads / 16
    wanted = (facts.read * accesses, facts.written * accesses)
    assert [(loop.wide_loads, loop.wide_stores) for loop in facts.loops] == [wanted] * (1 + facts.shaped), facts.kernel
    assert [loop.masked for loop in facts.loops] == [0] * (1 + facts.shaped), facts.kernel
    for loop in facts.loops:
        # What else there is are values of rows: read once for each element of a thread at most, left once for its rows.
        elements = facts.block // facts.threads
        assert loop.loads <= facts.rows[0] * elements, facts.kernel
        assert loop.stores <= facts.rows[1] * elements, facts.kernel
    assert facts.local == 0, facts.kernel
    assert facts.stack <= STACK, facts.kernel
    assert facts.approximate == [], facts.kernel


def check_rules(target: str, dtype: str, rules: Sequence[str], states: str = "") -> None:
    """Proves the kernels of the rules whose text, compiler or check changed since they were proved."""
    known = ledger.checker(Path(__file__), *CHECKERS)
    claims = {rule: ledger.digest(known, target, *sources(rule, dtype, states)) for rule in rules}

    def compile_and_check(changed: list[str]) -> None:
        kernels = compiled(target, dtype, changed, states)
        assert {facts.kernel.split()[1] for facts in kernels} == set(changed)
        for facts in kernels:
            check(facts)
            # NVIDIA's compiler is told not to contract products and sums; AMD's does. Two quotients have two each for
            # every element of a thread, in the loops over whole blocks and over others.
            in_quotients = 4 * (facts.block + facts.block // 2) // facts.threads
            assert target.startswith("hip") or facts.fused == in_quotients or " adamw " not in facts.kernel

    ledger.prove(claims, compile_and_check)


@pytest.mark.proof
@pytest.mark.parametrize(("target", "dtype"), [("cuda:90", "bfloat16"), ("hip:gfx942", "float32")])
def test_kernels_move_what_the_program_moves_sixteen_bytes_at_a_time(target: str, dtype: str) -> None:
    check_rules(target, dtype, SPOT)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernels_of_every_rule(dtype: str) -> None:
    for target in TARGETS:
        first = (target, dtype) == ("cuda:90", "float32")
        check_rules(target, dtype, rulec.rules() if first else ledger.selected(rulec.rules(), KINDS))


@pytest.mark.slow
@pytest.mark.proof
def test_narrow_parameters_with_wide_states() -> None:
    check_rules("cuda:90", "bfloat16", ledger.selected(rulec.rules(), KINDS), states="float32")


@pytest.mark.proof
def test_the_scalar_program_and_what_finishes_reductions_keep_nothing_in_local_memory() -> None:
    def compile_and_check(_: list[str]) -> None:
        assert compiled_helpers() == {"cuda:80": 2, "cuda:90": 2, "cuda:100": 2, "hip:gfx942": 2}

    claim = ledger.digest(ledger.checker(Path(__file__), *CHECKERS), "helpers", *sources(HELPED, "float32"))
    ledger.prove({HELPED: claim}, compile_and_check)


PTX = """
$L__BB0_2:
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	ld.global.b32 { %r5 }, [ %rd2 + 0 ];
	@%p3 bra 	$L__BB0_2;
$L__BB0_5:
	ld.global.b32 { %r5 }, [ %rd2 + 0 ];
$L__BB0_6:
	st.global.v2.b64 [ %rd2 + 0 ], { %rd4, %rd5 };
	@%p3 bra 	$L__BB0_6;
	@%p4 bra 	$L__BB0_5;
"""


def test_loops_are_read_as_they_are() -> None:
    assert list(loops(PTX)) == [Loop(1, 1, 1, 0, 1), Loop(0, 1, 0, 0, 0)]
