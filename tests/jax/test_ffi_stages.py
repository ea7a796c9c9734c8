"""The cpu kernel under XLA for rules of several stages: the bits of the cpu backend, and what others' code gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.array
import rulec.jax
from rulec.backend.printer import unique_name
from rulec.jax import cpu
from tests.jax.test_ffi import hlo, kernels, normal, numbers

#: Leaves without dimensions and without elements, of several chunks, stacks, and matrices cut in both directions.
SHAPES: dict[str, tuple[int, ...]] = {
    "number": (), "empty": (0, 3), "long": (70_000,), "few": (6, 5), "stack": (3, 8, 5), "wide": (3, 33_000),
    "tall": (33_000, 3),
}  # fmt: skip
#: Those of which matrix functions give what is definite, and soon.
SQUARE: dict[str, tuple[int, ...]] = {"number": (), "long": (70_000,), "square": (6, 6), "stack": (3, 5, 5)}

#: Rules of every kind of stage, each in one dtype of parameters, and of states where that is another: reductions of the
#: model, of tensors, rows, columns and blocks; numbers that are drawn; states of another dtype; one rule in another.
STAGED = {
    "sm3": ("bfloat16", "float32"), "prodigy": ("float32", None), "adafactor": ("float64", None),
    "adam_mini": ("float16", None), "novograd": ("float32", None), "adamp": ("float64", None),
    "mars_adamw": ("bfloat16", "float32"), "transforms/noise >> sgd": ("float32", None),
    "transforms/clip_by_global_norm >> lookahead(adamw)": ("float16", None), "mechanic(adam)": ("float32", None),
}  # fmt: skip
MATRICES = ("apollo(rank=2)", "muon", "soap")

STEPS = 3

CASES = [
    pytest.param(rule, *dtypes, marks=[] if rule == "sm3" else pytest.mark.another, id=f"{rule} in {dtypes[0]}")
    for rule, dtypes in STAGED.items()
]


def both(
    rule: str, shapes: dict[str, tuple[int, ...]], dtype: str, state_dtype: str | None
) -> Iterator[tuple[str, Any, Any]]:
    """What each leaf and its states are after some steps by the kernel under XLA, and by the cpu backend without it."""
    with jax.enable_x64(dtype == "float64"):
        shapes = dict(sorted(shapes.items()))
        params = {name: normal(i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
        arrays = [np.array(p) for p in params.values()]
        theirs = rulec.array.Optimizer(rule, arrays, backend="cpu", state_dtype=state_dtype)
        state = rulec.jax.init(rule, params, state_dtype=state_dtype, tags={})
        for t in range(STEPS):
            grads = {name: normal(100 * t + i, *s, dtype=dtype) for i, (name, s) in enumerate(shapes.items())}
            theirs.step([np.array(g) for g in grads.values()])
            params, state = rulec.jax.step(rule, params, grads, state, backend="cpu", tags={})
        yield from zip(params, [np.array(p) for p in params.values()], arrays, strict=True)
        trees = {field: tree for field, tree in state._asdict().items() if isinstance(tree, dict)}
        for i, leaf in enumerate(params):
            own = {unique_name(name, set()): array for name, array in theirs.state(str(i)).items()}
            kept = {field: np.array(tree[leaf]) for field, tree in trees.items() if tree[leaf] is not None}
            yield from ((f"{field} of {leaf}", array, own[field]) for field, array in kept.items())


def within_ulps(found: Any, expected: Any, dtype: str, ulps: int) -> None:
    """To so many units in the last place of the largest magnitude: an element may be what is left of a difference."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    largest = np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ulps * float(jnp.finfo(dtype).eps) * largest)


# Numbers


@pytest.mark.parametrize(("rule", "dtype", "state_dtype"), CASES)
def test_a_step_gives_what_the_cpu_backend_gives(rule: str, dtype: str, state_dtype: str | None) -> None:
    """Most bit by bit; what differs in the last bit are scalars, and states that JAX keeps in float32 as numbers."""
    for name, found, expected in both(rule, SHAPES, dtype, state_dtype):
        # A mean of no elements is NaN.
        assert name.endswith("empty") or not np.isnan(expected.astype(np.float64)).any(), name
        within_ulps(found, expected, dtype, 8 if dtype == "float64" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", MATRICES)
def test_rules_of_matrix_functions_give_what_the_cpu_backend_gives(rule: str) -> None:
    """As near as NumPy's matrix functions and XLA's are; some are made in bfloat16."""
    close = 1e-3 if rule in ("muon", "normuon", "sgd >> transforms/orthogonalize") else 1e-7
    for _, found, expected in both(rule, SQUARE, "float64", None):
        np.testing.assert_allclose(found, expected, rtol=close, atol=close)


TRANSPOSED = """
name: Transposed
view: {short: first}
hyper: {lr: 1}
step: |
  direction = g*norm(g, per="row")
"""


def test_matrices_that_are_seen_transposed_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernels(monkeypatch)
    rule = rulec.parse(TRANSPOSED)
    for shape, axis in (((2, 3), 1), ((3, 2), 0)):
        grads = {"w": normal(0, *shape)}
        params = jax.tree.map(jnp.zeros_like, grads)
        new, _ = rulec.jax.step(rule, params, grads, rulec.jax.init(rule, params, tags={}), backend="cpu", tags={})
        norms = np.linalg.norm(grads["w"], axis=axis, keepdims=True)
        np.testing.assert_allclose(new["w"], -grads["w"] * norms, rtol=1e-6)
    assert used == ["Transposed"] * 2


EXTREMES = """
name: Extremes
hyper: {lr: 1}
inputs: {scale: like p}
step: |
  direction = scale*(max(g) + 2*min(g)) + sum(g)/numel
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_extremes_sums_and_inputs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several chunks; where an input is of another dtype than the parameter, XLA's code reads it."""
    used = kernels(monkeypatch)
    rule = rulec.parse(EXTREMES)
    params = {"w": jnp.zeros(70_000), "v": jnp.zeros(3)}
    grads = {"w": normal(0, 70_000).at[40_000].set(9).at[69_999].set(-8), "v": jnp.array([1.0, jnp.nan, 2.0])}
    scale = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, dtype), params)
    state = rulec.jax.init(rule, params, tags={})
    new, _ = rulec.jax.step(rule, params, grads, state, scale=scale, lr=1, backend="cpu", tags={})
    expected = 0.5 * (9 - 16) + np.asarray(grads["w"], np.float64).mean()
    np.testing.assert_allclose(new["w"], np.full(70_000, -expected), rtol=1e-6)
    assert np.isnan(new["v"]).all()
    assert used == (["Extremes"] * 2 if dtype == "float32" else [])


@pytest.mark.slow
def test_leaves_of_several_calls_and_groups_share_what_is_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MOST_LEAVES", 3)
    rules = rulec.partition({"l[0-3]": ("novograd", {"lr": 0.5}), "l[45]": "novograd", "...": "dog"})
    params = {f"l{i}": normal(i, i + 1) for i in range(9)}
    grads = jax.tree.map(lambda p: p + 1, params)
    state = rulec.jax.init(rules, params)
    step = {
        backend: rulec.jax.step(rules, params, grads, state, donate=False, backend=backend)
        for backend in ("cpu", "jax")
    }
    for found, expected in zip(jax.tree.leaves(step["cpu"]), jax.tree.leaves(step["jax"]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


# Memory


@pytest.mark.slow
def test_stages_update_in_place() -> None:
    params, grads = {"w": jnp.ones(70_000)}, {"w": jnp.ones(70_000)}
    state = rulec.jax.init("prodigy", params)
    text = hlo("prodigy", params, grads, "cpu")
    assert text.count('custom_call_target="rulec_') == 2
    assert not [line for line in text.splitlines() if "f32[70000]" in line and " copy(" in line]

    def pointers(params: Any, state: Any) -> list[int]:
        return [x["w"].unsafe_buffer_pointer() for x in (params, state.m, state.v, state.s)]

    before = pointers(params, state)
    assert pointers(*rulec.jax.step("prodigy", params, grads, state)) == before


def test_large_leaves_are_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernels(monkeypatch)
    for elements in (cpu.LEAST_ELEMENTS - 1, cpu.LEAST_ELEMENTS):
        params = {"w": jnp.ones(elements)}
        rulec.jax.step("dog", params, {"w": jnp.ones(elements)}, rulec.jax.init("dog", params))
    assert used == ["DoG", "DoG"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adafactor", "prodigy"])
def test_packed_states_of_rules_that_reduce(rule: str) -> None:
    """Of the parameters' shape, and of rows and columns, which stages do not write."""
    params = {"a": normal(0, 6, 4), "b": normal(1, 7), "c": normal(2, 5, 9)}
    whole, packed = rulec.jax.init(rule, params, tags={}), rulec.jax.init(rule, params, packed=True, tags={})
    ours = theirs = params
    for t in range(2):
        grads = jax.tree.map(lambda p: p + t, params)  # noqa: B023 - called at once
        theirs, whole = rulec.jax.step(rule, theirs, grads, whole, donate=False, backend="cpu", tags={})
        ours, packed = rulec.jax.step(rule, ours, grads, packed, donate=False, tags={})
    for a, b in zip(numbers((ours, rulec.jax.unpacked(packed))), numbers((theirs, whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
