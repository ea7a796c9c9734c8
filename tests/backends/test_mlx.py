"""The mlx backend: its contract, its text, what it refuses and how exact its functions are."""

from __future__ import annotations

import pytest

import rulec
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnsupported
from rulec.testing import MLX, MlxKind
from rulec.testing.conformance import check_operations, check_rule
from rulec.testing.trial import Subject
from rulec_backends.mlx import MlxBackend
from tests.backends.kinds import AWKWARD, BETWEEN, KINDS, check_extremes, check_piece, pieces, rule_of

mx = pytest.importorskip("mlx.core")

LION = '''\
"""Lion by the mlx backend: p:bf16 g:bf16 m:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import sign


def step(p_stored, g_stored, m, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay, lr):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(mx.float32)
    g = g_stored.astype(mx.float32)
    m_new = beta2 * m + one_minus_beta2 * g
    c = beta1 * m + one_minus_beta1 * g
    direction = sign(c) + weight_decay * p
    p_new = p - lr * direction
    return {'m': m_new, 'p': p_new}
'''


def subject() -> Subject:
    return Subject(MlxBackend(), MlxKind(), MLX)


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(subject())


@pytest.mark.parametrize("piece", pieces("float32", "bfloat16"))
def test_the_contract(piece: str) -> None:
    check_piece(subject(), piece, "float32", "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_are_good_to_the_ulps_of_the_contract(dtype: str) -> None:
    check_operations(subject(), dtype)


@pytest.mark.parametrize("name", [*KINDS, *AWKWARD, *BETWEEN])
def test_rules_of_each_kind(name: str) -> None:
    check_rule(subject(), rule_of(name), "float32", ((3, 5), (7,), (), (0, 2)))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes(dtype: str) -> None:
    for name in ("adamw", "lamb"):
        check_rule(subject(), rule_of(name), dtype, ((3, 5), ()))


def test_the_code_reads_like_the_rule() -> None:
    program = rulec.compile(rulec.load("lion"))
    assert MlxBackend().emit(program, layout_for(program, "bfloat16", states={"m": "float32"})) == LION


def test_an_error_function_of_three_digits_is_refused() -> None:
    program = rulec.compile(rulec.parse("name: Bell\nstep: |\n  direction = erf(g)\n"))
    with pytest.raises(BackendUnsupported, match="cannot express 'erf' of rule 'Bell'"):
        MlxBackend().emit(program, layout_for(program, "float32"))


def test_a_total_is_of_float64_on_the_cpu() -> None:
    """A hundred thousand times 0.1: in float32 a running sum is wrong in its fourth digit."""
    program = rulec.compile(rulec.parse("name: Mean\nstep: |\n  direction = mean(g)\n"))
    layout = layout_for(program, "float32")
    kernel = MlxBackend().build(program, layout, MlxBackend().emit(program, layout))
    g = mx.full((100_003,), 0.1)
    _, reduced = kernel.stage(0, {"p": g, "g": g}, [mx.array(1.0)] * len(kernel.columns(0)))
    (total,) = reduced.values()
    assert total.dtype == mx.float64
    assert float(total) == pytest.approx(100_003 * float(g[0]), rel=1e-12)


@pytest.mark.another
@pytest.mark.parametrize("name", rulec.rules())
def test_every_rule(name: str) -> None:
    check_rule(subject(), rule_of(name), "float32")
