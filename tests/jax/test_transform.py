"""`rulec.jax.transform`: rules as optax's gradient transformations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import rulec
import rulec.jax
from tests.jax.training import PARAMS, check_compiles_nothing, difference, gradients, params, trained


def test_it_is_one_of_optax() -> None:
    made = rulec.jax.transform("adam", lr=0.1)
    assert isinstance(made, optax.GradientTransformationExtraArgs)
    state = made.init(params())
    assert state._fields == ("count", "m", "v")
    assert (state.count.dtype, state.m["a"].dtype) == (jnp.int32, jnp.float32)
    found, state = trained(made, params())
    expected, _ = trained(optax.adam(0.1), params())
    assert difference(found, expected, PARAMS) < 3e-5
    assert int(state.count) == 4


def test_a_rule_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("name: Own\nhyper: {lr: 0.25}\nstep: |\n  direction = 2*g\n")
    for rule in (path, str(path), rulec.load(path)):
        made = rulec.jax.transform(rule)
        updates, _ = made.update(params(), made.init(params()))
        assert difference(updates, jax.tree.map(lambda g: -0.5 * g, PARAMS)) == 0


def test_states_have_the_dtypes_that_are_asked_for() -> None:
    tree = params("bfloat16")
    ways: list[tuple[Any, tuple[str, str]]] = [
        (None, ("bfloat16", "bfloat16")),
        ("float32", ("float32", "float32")),
        ({"v": jnp.float16}, ("bfloat16", "float16")),
    ]
    for given, expected in ways:
        made = rulec.jax.transform("adam", state_dtype=given)
        state = made.init(tree)
        _, after = made.update(gradients(tree, 0), state, tree)
        for found in (state, after):
            assert (str(found.m["a"].dtype), str(found.v["a"].dtype)) == expected


def test_updates_have_the_dtype_of_the_parameters_or_else_of_the_gradients() -> None:
    made, tree = rulec.jax.transform("adam"), params()
    half = params("bfloat16")
    updates, _ = made.update(half, made.init(tree), tree)
    assert updates["a"].dtype == jnp.float32
    updates, _ = made.update(half, made.init(tree))
    assert updates["a"].dtype == jnp.bfloat16
    updates, _ = made.update(tree, made.init(half), half)
    assert updates["a"].dtype == jnp.bfloat16


def test_a_schedule_is_given_the_steps_before_this_one() -> None:
    """As in optax: 0 in the first step; its numbers are int32, or what JAX makes of them, as anywhere in JAX."""
    seen: list[Any] = []

    def schedule(count: Any) -> Any:
        seen.append((count.dtype, (count * 1.5).dtype))
        return jnp.where(count == 1, 0.5, 0.0)

    made = rulec.jax.transform("sgd", lr=schedule)
    state, grads = made.init(params()), params()
    sizes = []
    for _ in range(3):
        updates, state = made.update(grads, state, params())
        sizes.append(float(updates["b"]["c"][0]))
    assert sizes == [0.0, -0.5 * float(grads["b"]["c"][0]), 0.0]
    assert set(seen) == {(jnp.dtype("int32"), jnp.dtype("float32"))}


def test_what_was_made_once_is_not_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    tree = params()
    first = rulec.jax.transform("adam", lr=0.1, eps=1e-6)
    state = first.init(tree)
    first.update(tree, state, tree)
    with check_compiles_nothing(caplog):
        for lr in (0.2, 0.3):
            other = rulec.jax.transform("adam", lr=lr, eps=1e-3)
            other.update(tree, other.init(tree), tree)


def test_numbers_meant_for_one_are_not_used_for_another() -> None:
    """What is shared is compiled code alone: names, tags, seeds, directions and groups tell transformations apart."""
    grads = jax.tree.map(jnp.ones_like, params())
    noisy = rulec.load("noise") >> rulec.load("sgd")
    ways: dict[str, Any] = {
        "plain": rulec.jax.transform("sgd", lr=0.5), "up": rulec.jax.transform("sgd", lr=0.5, maximize=True),
        "other": rulec.jax.transform("sgd", lr=0.25), "default": rulec.jax.transform("sgd"),
        "scheduled": rulec.jax.transform("sgd", lr=lambda count: 2.0),
        "seed 0": rulec.jax.transform(noisy, lr=1.0), "seed 1": rulec.jax.transform(noisy, lr=1.0, seed=1),
    }  # fmt: skip
    found = {name: float(made.update(grads, made.init(grads))[0]["a"][0, 0]) for name, made in ways.items()}
    again = {name: float(made.update(grads, made.init(grads))[0]["a"][0, 0]) for name, made in ways.items()}
    assert found == again
    assert [found[k] for k in ("plain", "up", "other", "scheduled")] == [-0.5, 0.5, -0.25, -2.0]
    assert len(set(found.values())) == len(ways)


def test_several_threads() -> None:
    """Each with transformations of its own, made and compiled at the same time."""
    names = ["beta1", "beta2", "eps", "lr"]

    def work(i: int) -> Any:
        given = dict.fromkeys(names[: i // 2], 0.25 + 0.125 * (i % 2))
        made = rulec.jax.transform("adam", **given)  # type: ignore[arg-type]
        tree = {"w": jnp.linspace(0.5, 1, 5)}
        state = made.update(tree, made.init(tree), tree)[1]
        return made.update(tree, state, tree)[0]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(8)))
    assert all(difference(one, work(i)) == 0 for i, one in enumerate(together))
