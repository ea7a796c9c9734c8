"""Noise in Triton: in its interpreter beside the definition, and its assembly for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rulec
from rulec.compiler.layout import layout_for
from rulec_backends.triton import TritonBackend
from tests import ledger
from tests.backends import triton_noise
from tests.backends.noises import VALUES
from tests.backends.test_noise_streams import STREAMS
from tests.backends.triton_compiled import CHECKERS
from tests.backends.triton_noise import Facts, compiled_noise
from tests.backends.triton_process import check_in_interpreter as in_the_interpreter

HEAD = """
import torch
from tests.backends.noises import *
from tests.backends.test_noise_streams import STREAMS, check_whole, check_words, from_signs
from rulec.testing.kinds import TorchKind
from rulec_backends.triton import TritonBackend
backend, kind = TritonBackend(), TorchKind()
"""

#: Everything that is looked at every day, in one process.
DAILY = f"""{HEAD}
found = {{
    "words": check_words(from_signs(backend, kind), STREAMS[::2]),
    "whole": check_whole(backend, kind, STREAMS[::6]),
    "worst": worst_fills(backend, kind, "float32", (3,), 100, OFFSETS[1::3]),
    "fused": fused_as_filled(backend, kind, "adamw", "float32", "popcount", shapes=SHAPES[:2]),
    "bfloat16": fused_as_filled(backend, kind, "lion", "bfloat16", "rademacher", shapes=SHAPES[:2], maximize=True),
    "some": fused_as_filled(backend, kind, "sgd", "float32", "popcount", tensors=[1], shapes=SHAPES[:2]),
    "stays": fused_as_filled(backend, kind, "sgd", "float32", "popcount", shapes=SHAPES[:1],
                             stays=lambda: torch.tensor([False, True])),
}}
"""


@pytest.fixture(scope="module")
def daily() -> Any:
    """What the interpreter finds."""
    return in_the_interpreter(DAILY, "found")


def test_words_and_whole_numbers_are_those_of_the_definition(daily: Any) -> None:
    assert [daily["words"], daily["whole"]] == [len(STREAMS[::2]), len(STREAMS[::6])]


def test_sums_are_those_of_the_definition(daily: Any) -> None:
    assert daily["worst"] < 1e-6


@pytest.mark.parametrize("case", ["fused", "bfloat16", "some", "stays"])
def test_an_update_by_noise_has_the_bits_of_one_by_a_filled_gradient(daily: Any, case: str) -> None:
    assert daily[case] is True


@pytest.mark.slow
def test_sums_in_other_dtypes() -> None:
    program = f"""{HEAD}
dtypes = ("float64", "bfloat16", "float16")
found = [worst_fills(backend, kind, dtype, (2,), 200, OFFSETS[1::2]) for dtype in dtypes]
"""
    double, brain, half = in_the_interpreter(program, "found")
    assert double < 2e-15
    assert brain < 1e-2
    assert half < 1e-3


@pytest.mark.slow
def test_updates_by_other_rules_and_of_other_dtypes() -> None:
    program = f"""{HEAD}
found = [
    fused_as_filled(backend, kind, "adamw", "bfloat16", "normal", skip=1),
    fused_as_filled(backend, kind, "adamw", "float64", "popcount", grad="float32", shapes=SHAPES[:3]),
    fused_as_filled(backend, kind, "lion", "float32", "rademacher", grad="bfloat16", shapes=SHAPES[:3]),
    fused_as_filled(backend, kind, "sgd", "float64", "normal"),
    fused_as_filled(backend, kind, "sgd", "float16", "normal", scale=lambda: torch.tensor([3.0])),
]
"""
    assert in_the_interpreter(program, "found") == [True] * 5


# Assembly


def check(facts: Facts) -> None:
    """Whole blocks move 16 bytes at a time, unmasked, all that the program moves but a gradient; nothing spills, and no
    thread waits for another while it makes noise."""
    accesses = facts.block / facts.threads / 16
    (loop,) = facts.loops
    assert (loop.wide_loads, loop.wide_stores) == (facts.read * accesses, facts.written * accesses), facts.kernel
    assert loop.masked == loop.stores == 0, facts.kernel
    assert (facts.stack, facts.local) == (0, 0), facts.kernel
    assert facts.products >= 36, "the products of ten rounds, in both loops"
    assert facts.exchanges == 0, facts.kernel
    assert facts.approximate == [], facts.kernel


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(
    ("target", "dtype", "values"),
    [
        ("cuda:90", "float32", VALUES),
        ("hip:gfx942", "float32", VALUES),
        ("cuda:80", "float32", VALUES[:1]),
        ("cuda:100", "float32", VALUES[:1]),
        ("cuda:90", "bfloat16", VALUES[1:2]),
    ],
)
def test_kernels_for_every_target(target: str, dtype: str, values: Sequence[str]) -> None:
    known = ledger.checker(Path(__file__), Path(triton_noise.__file__), *CHECKERS)
    program = rulec.compile(rulec.load("adamw"))
    layout = layout_for(program, dtype)
    sources = {kind: TritonBackend().emit_estimate(program, layout, kind) for kind in values}

    def compile_and_check(changed: list[str]) -> None:
        kernels = compiled_noise(target, dtype, "adamw", changed)
        assert len(kernels) == len(changed)
        for facts in kernels:
            check(facts)

    ledger.prove({kind: ledger.digest(known, target, text) for kind, text in sources.items()}, compile_and_check)


# As text


def test_the_code_reads_like_the_rule() -> None:
    program = rulec.compile(rulec.load("lion"))
    source = TritonBackend().emit_estimate(program, layout_for(program, "bfloat16", maximize=True), "popcount")
    lines = [line.strip() for line in source.splitlines()]
    for line in (
        "g = -to_bfloat16(sum_of_noise(g_at, start, BLOCK), EMULATED).to(tl.float32)",
        "bits = set_bits(b)",
        "sum_5 += weight * less_four(bits >> 8 & 255)",
        "for d in range(0, tl.load(at + 1)):",
    ):
        assert line in lines, line
