"""States that a step holds packed behind trees: few arrays in a call, and to all that reads them the state of init."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.errors import StateMismatch, TensorError
from rulec.jax import cpu, functional
from rulec.jax.compiled import machine
from rulec.jax.packing import Packed
from rulec.jax.recipe import recipe
from rulec.jax.state import held, is_held_packed
from rulec.jax.transform import options
from rulec.runtime.storage.options import FEWEST_CODED

LEAVES = cpu.LEAST_LEAVES


def normal(seed: int, leaves: int = LEAVES) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"l{i}": jnp.asarray(rng.normal(size=(i % 3, i % 5)[: i % 3]), jnp.float32) for i in range(leaves)}


def trained(steps: int = 2, **keywords: Any) -> tuple[Any, Any]:
    params = normal(0)
    state = rulec.jax.init("adamw", params)
    for t in range(steps):
        params, state = rulec.jax.step("adamw", params, normal(1 + t), state, lr=0.01, **keywords)
    return params, state


def check_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_call_has_a_parameter_and_a_gradient_of_each_leaf_and_few_arrays_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[tuple[int, int]] = []
    call = functional.call

    def counting(function: Any, *operands: Any) -> Any:
        result = call(function, *operands)
        sizes.append((len(jax.tree.leaves(operands)), len(jax.tree.leaves(result))))
        return result

    monkeypatch.setattr(functional, "call", counting)
    params, state = trained(1)
    sizes.clear()
    rulec.jax.step("adamw", params, normal(9), state)
    assert sizes == [(2 * LEAVES + 3, LEAVES + 3)]  # the count and two moments


def test_the_program_is_calls_in_place_and_copies_nothing() -> None:
    params, state = trained(1)
    step = machine(recipe("adamw", {}, None), replace(options(None, False, 0), backend="either")).step
    with jax.enable_x64(True):
        text = step.lower(params, normal(9), held(state), [{}], {}).compile().as_text()
    assert text.count('custom_call_target="rulec_') == -(-LEAVES // cpu.MOST_LEAVES)
    assert not re.search(r"f32\[\d+\]\S* (copy|concatenate|slice|dynamic-update-slice)\(", text)


def test_it_agrees_with_optax() -> None:
    params, state = trained(3)
    theirs, made = normal(0), optax.adamw(0.01, weight_decay=1e-2)
    their_state = made.init(theirs)
    for t in range(3):
        updates, their_state = made.update(normal(1 + t), their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert is_held_packed(state)
    moments = their_state[0]
    for ours, other in ((params, theirs), (state.m, moments.mu), (state.v, moments.nu)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, other)


def test_to_all_that_reads_it_it_is_the_state_of_init() -> None:
    params, state = trained()
    plain = rulec.jax.unpacked(rulec.jax.packed(trained()[1]))
    assert is_held_packed(state)
    assert not is_held_packed(plain)
    first = rulec.jax.init("adamw", params)
    assert jax.tree.structure(state) == jax.tree.structure(first)
    for other in (
        state, copy.deepcopy(state), state._replace(count=plain.count), type(state)(*state),
        type(state)(**state._asdict()), jax.tree.map(lambda x: x, state), jax.jit(lambda s: s)(state),
    ):  # fmt: skip
        check_same(other, plain)
    assert (len(state), repr(state), state[1:]) == (3, repr(plain), (state.m, state.v))
    assert [x.shape for x in jax.tree.leaves(jax.tree.map(jnp.multiply, params, state.m))] == [
        x.shape for x in jax.tree.leaves(params)
    ]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert paths[:2] == [".count", ".m['l0']"]


def test_a_tuple_of_values_it_is_as_well() -> None:
    _, state = trained(1)
    kept = state.m["l7"]
    assert state.m["l7"] is kept  # read once
    assert state == tuple(state) == (*state,) == (state.count, state.m, state.v)
    assert state[1:] + (7,) == (state + (7,))[1:]  # noqa: RUF005 - what is under test
    assert state != tuple.__getitem__(state, slice(None))


@pytest.mark.slow
def test_a_state_goes_on_in_a_jit_of_others_and_back() -> None:
    params, state = trained(1)
    grads = normal(5)

    def step(params: Any, state: Any) -> Any:
        return rulec.jax.step("adamw", params, grads, state)

    inside, new = jax.jit(step)(params, state)
    closed, _ = jax.jit(lambda p: step(p, state))(params)
    outside, last = rulec.jax.step("adamw", params, grads, state)
    assert not is_held_packed(new)
    assert is_held_packed(last)
    for other in (inside, closed):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), other, outside)


def test_a_file_has_it(tmp_path: Path) -> None:
    params, state = trained(1)
    rulec.jax.save(tmp_path / "state.safetensors", "adamw", params, state)
    check_same(rulec.jax.load(tmp_path / "state.safetensors", "adamw", params), state)


# Donation


def test_reading_changes_neither_what_was_read_nor_the_steps_after_it() -> None:
    expected, states = trained(3)
    params, state = normal(0), rulec.jax.init("adamw", normal(0))
    for t in range(3):
        params, new = rulec.jax.step("adamw", params, normal(1 + t), state, lr=0.01)
        # A view keeps the memory of what was read, which the next step deletes but must not write over.
        views = jax.tree.map(np.asarray, new.v)
        values = jax.tree.map(np.array, views)
        state = new
        if t < 2:
            rulec.jax.step("adamw", jax.tree.map(jnp.copy, params), normal(9), state, donate=False)
            check_same(views, values)
    check_same((params, state), (expected, states))
    rulec.jax.step("adamw", params, normal(9), state)
    check_same(views, values)


def test_a_state_that_was_read_is_still_updated_in_place() -> None:
    params, state = trained(2)

    def addresses(state: Any) -> list[int]:
        return [flat.unsafe_buffer_pointer() for flat in jax.tree.leaves(held(state))]

    before, read = addresses(state), (state.m, state.v)
    _, new = rulec.jax.step("adamw", params, normal(9), state)
    assert addresses(new) == before
    assert all(x.is_deleted() for x in jax.tree.leaves(read))


def test_donated_trees_are_gone_and_kept_ones_are_not() -> None:
    params, first = normal(0), rulec.jax.init("adamw", normal(0))
    kept = first
    results = [rulec.jax.step("adamw", params, normal(1), kept, donate=False) for _ in range(2)]
    check_same(*results)
    _, state = results[0]
    read = state.m["l7"]
    params, _ = rulec.jax.step("adamw", params, normal(2), first)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    rulec.jax.step("adamw", params, normal(2), state)
    assert read.is_deleted()


@pytest.mark.parametrize("use", ["plain", "packed", "read"])
def test_a_state_that_was_donated_is_refused(use: str) -> None:
    params, state = normal(0), rulec.jax.init("adamw", normal(0))
    if use != "plain":
        params, state = rulec.jax.step("adamw", params, normal(1), state)
    params, _ = rulec.jax.step("adamw", params, normal(1), state)
    with pytest.raises(TensorError, match="donated to an earlier call, which used its memory again: go on with what"):
        _ = state.m if use == "read" else rulec.jax.step("adamw", params, normal(1), state)


def test_other_parameters_are_refused() -> None:
    params, state = trained(1)
    others = {f"x{name}": p for name, p in params.items()}
    with pytest.raises(StateMismatch, match="does not have the structure of the parameters"):
        rulec.jax.step("adamw", others, others, state)


# Where it is not


@pytest.mark.parametrize("why", ["few", "by xla", "in codes", "complex", "no state", "reductions", "passes"])
def test_what_is_not_held_packed(why: str) -> None:
    params = normal(0, LEAVES - 1 if why == "few" else LEAVES)
    if why == "complex":
        params = jax.tree.map(lambda p: p + 1j, params)
    if why == "in codes":
        params["l0"] = jnp.ones(FEWEST_CODED)
    rule = {"no state": "sgd", "reductions": "lamb", "passes": "sam(adam)"}.get(why, "adam")
    state = rulec.jax.init(rule, params, state_dtype="int8" if why == "in codes" else None)
    keywords: dict[str, Any] = {"by xla": {"backend": "jax"}, "passes": {"gradient": lambda p: p}}.get(why, {})
    _, new = rulec.jax.step(rule, params, jax.tree.map(jnp.ones_like, params), state, **keywords)
    assert not is_held_packed(new)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_a_state_that_users_packed_is_theirs() -> None:
    params = normal(0)
    _, state = rulec.jax.step("adamw", params, normal(1), rulec.jax.init("adamw", params, packed=True))
    assert isinstance(state.m, Packed)
    assert not is_held_packed(state)
