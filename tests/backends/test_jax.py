"""The jax backend in 32 and in 64 bits: its contract, what it traces again, and what it donates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
from rulec import extras
from rulec.backend.protocol import Rows
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.errors import BackendUnavailable
from rulec.testing import XLA, JaxKind
from rulec.testing.cases import buckets_of, gradients, loaded
from rulec.testing.conformance import check_rule, layout_of, trial_of
from rulec.testing.trial import Subject
from rulec_backends import jax as jax_backend
from rulec_backends.common import functional
from rulec_backends.jax import JaxBackend, JaxKernel
from tests.backends.kinds import KINDS, check_every_operation, check_extremes, check_piece, pieces, rule_of

LION = '''\
"""Lion by the jax backend: p:bf16 g:bf16 m:f32. Printed by rulec."""

import jax.numpy as jnp


def step(p_stored, g_stored, m, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay, lr):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(jnp.float32)
    g = g_stored.astype(jnp.float32)
    m_new = beta2 * m + one_minus_beta2 * g
    c = beta1 * m + one_minus_beta1 * g
    direction = jnp.sign(c) + weight_decay * p
    p_new = p - lr * direction
    return {'m': m_new, 'p': p_new}
'''


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def wide(request: pytest.FixtureRequest) -> Iterator[bool]:
    with jax.enable_x64(request.param):
        yield request.param


def subject() -> Subject:
    return Subject(JaxBackend(), JaxKind(), XLA)


def kernel_of(name: str, dtype: str = "float32") -> tuple[JaxKernel, Any]:
    program = compile(rulec.load(name))
    layout = layout_for(program, dtype)
    return JaxBackend().build(program, layout, JaxBackend().emit(program, layout)), program


def table(program: Any, tensors: int, value: float = 0.5) -> Rows:
    return Rows(np.full((1, len(program.scalars.columns)), value), np.zeros(tensors, np.int64))


def test_dtypes_are_those_that_jax_is_set_to(wide: bool) -> None:
    assert list(JaxKind().dtypes) == ["float32", *(["float64"] if wide else []), "bfloat16", "float16"]


EVERYDAY = (
    "adamw", "rprop", "madgrad", "asgd", "lamb", "adafactor", "cautious_adamw", "muon", "transforms/lookahead",
    "Exchange", "Names", "Words", "Last2", "Seldom",
)  # fmt: skip


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(subject())


@pytest.mark.parametrize("piece", pieces("float32", everyday=EVERYDAY))
def test_the_contract(piece: str) -> None:
    check_piece(subject(), piece, "float32")


#: A number, nothing, and two matrices: XLA compiles for every shape.
FEW = [(), (0,), (9, 5), (2, 3, 4)]


@pytest.mark.parametrize("name", EVERYDAY)
def test_rules_of_every_kind(name: str) -> None:
    check_rule(subject(), rule_of(name), "float32", FEW[1:3])


def test_every_operation() -> None:
    check_every_operation(subject())


def test_ascent() -> None:
    (bucket,) = buckets_of(loaded("adamw"), [(9, 5)])
    trial = trial_of(subject(), bucket, layout_of(bucket, "bfloat16", grad="float32", maximize=True))
    before = trial.values(0)["p"]
    trial.step(gradients(bucket.shapes, 0))
    assert not np.array_equal(trial.values(0)["p"], before)


@pytest.mark.parametrize(("name", "dtype"), [("adamw", "float64"), ("lamb", "float16"), ("adafactor", "bfloat16")])
def test_other_dtypes(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_rule(subject(), loaded(name), dtype, FEW[1:3])


@pytest.mark.slow
def test_rules_of_every_kind_in_other_dtypes(wide: bool) -> None:
    for name in KINDS:
        check_rule(subject(), loaded(name), "float64" if wide else "bfloat16", FEW[::2])


@pytest.mark.another
@pytest.mark.parametrize("name", rulec.rules())
def test_every_rule(name: str) -> None:
    check_rule(subject(), loaded(name), "float32", FEW[::2])


def test_the_code_reads_like_the_rule() -> None:
    program = compile(rulec.load("lion"))
    layout = layout_for(program, "bfloat16", states={"m": "float32"})
    assert JaxBackend().emit(program, layout) == LION


def test_neither_a_new_count_nor_a_new_rate_traces_anything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    run_source = functional.run_source

    def counting(*args: Any) -> dict[str, Any]:
        step = run_source(*args)["step"]
        return {"step": lambda *arrays: traces.append(len(arrays)) or step(*arrays)}  # type: ignore[func-returns-value]

    jax_backend._kernel.cache_clear()
    monkeypatch.setattr(functional, "run_source", counting)
    kernel, program = kernel_of("adamw")
    params = [jnp.ones((3, 2)), jnp.ones(5)]
    call = kernel.bind(params, [{"m": jnp.zeros_like(p), "v": jnp.zeros_like(p)} for p in params])
    for scalar in (0.1, 0.2, 0.3):
        call(0, [jnp.ones((3, 2)), jnp.ones(5)], table(program, 2, scalar))
    assert len(traces) == 2  # once for each tensor of the bucket
    again, _ = kernel_of("adamw")
    again.bind([jnp.ones((3, 2)), jnp.ones(5)], [{"m": jnp.zeros(s), "v": jnp.zeros(s)} for s in ((3, 2), 5)])(
        0, [jnp.ones((3, 2)), jnp.ones(5)], table(program, 2)
    )
    assert len(traces) == 2
    jax_backend._kernel.cache_clear()


def test_parameters_and_states_are_donated_and_gradients_are_not() -> None:
    kernel, program = kernel_of("momentum")
    p, m, g, other = jnp.ones(4), jnp.zeros(4), jnp.ones(4), jnp.ones(3)
    call = kernel.bind([p, other], [{"m": m}, {"m": jnp.zeros(3)}])
    params, states, _ = call(0, [g], table(program, 2), tensors=[0])
    assert (p.is_deleted(), m.is_deleted(), g.is_deleted()) == (True, True, False)
    assert params[1] is other
    assert not any(x.is_deleted() for x in (*params, *(s["m"] for s in states)))
    params, *_ = call(0, [g, jnp.ones(3)], table(program, 2))
    assert [x.shape for x in params] == [(4,), (3,)]


def test_a_step_can_be_traced_inside_another_function() -> None:
    """As an adapter does: the loop over buckets, scalars included, in one jit."""
    kernel, program = kernel_of("adamw")

    def step(p: Any, m: Any, v: Any, g: Any, scalars: Any) -> Any:
        call = kernel.bind([p], [{"m": m, "v": v}])
        rows = Rows(scalars, np.zeros(1, np.int64))
        (new,), *_ = call(0, [g], rows)
        return new

    arrays = [jnp.linspace(1, 2, 5), jnp.zeros(5), jnp.zeros(5), jnp.ones(5)]
    rows = table(program, 1)
    inside = jax.jit(step)(*arrays, jnp.asarray(rows.table))
    (outside,), *_ = kernel.bind(arrays[:1], [{"m": arrays[1], "v": arrays[2]}])(0, arrays[3:], rows)
    np.testing.assert_allclose(inside, outside, rtol=1e-6)


def test_float64_needs_64_bit_jax() -> None:
    with (
        jax.enable_x64(False),
        pytest.raises(BackendUnavailable, match=r"AdamW on float64 needs 64-bit JAX: jax\.config\.update"),
    ):
        kernel_of("adamw", "float64")


def test_the_compute_dtype_is_the_layouts_in_64_bit_jax_too() -> None:
    with jax.enable_x64(True):
        kernel, program = kernel_of("sgd")
        params, *_ = kernel.bind([jnp.ones(3, jnp.float32)], [{}])(0, [jnp.ones(3, jnp.float32)], table(program, 1))
        assert params[0].dtype == jnp.float32


def test_without_jax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert JaxBackend().unavailable_reason() == f"jax is not installed: {extras.command('jax')}"
