"""Rules with several gradients in a step, in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RuleError
from tests.array.test_passes import gradient, start
from tests.language.test_passes import EVERY_OTHER, THREE


def by_step(rule: Any, params: Any, counted: Any, jit: bool) -> Any:
    state = rulec.jax.init(rule, params)

    def step(params: Any, state: Any) -> Any:
        return rulec.jax.step(rule, params, jax.tree.map(jnp.cos, params), state, gradient=counted)

    run = jax.jit(step) if jit else step
    for _ in range(4):
        params, state = run(params, state)
    return params


def by_transform(rule: Any, params: Any, counted: Any) -> Any:
    tx = optax.chain(rulec.jax.transform(rule))
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params, gradient=counted)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("form", ["step", "jit", "transform"])
def test_every_form_does_what_the_reference_does(form: str) -> None:
    rules = [(rulec.parse(THREE), 8), (rulec.parse(EVERY_OTHER), 2), (rulec.load("looksam(adamw, k=2)"), 2)]
    for rule, passes in rules if form == "step" else rules[1:2]:
        reference, calls = ReferenceOptimizer(rule, start()), []

        def counted(params: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return jax.tree.map(jnp.cos, params)

        for _ in range(4):
            reference.step(gradient(reference.params), gradient=gradient)
        with jax.enable_x64(True):
            params = [jnp.asarray(p) for p in start()]
            ended = (
                by_transform(rule, params, counted)
                if form == "transform"
                else by_step(rule, params, counted, form == "jit")
            )
        assert len(calls) == (1 if form == "jit" else passes)  # traced once, and run in the steps that ask
        for ours, theirs in zip(ended, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)


def test_matrices_and_vectors_share_one_climb() -> None:
    """Of Muon and the AdamW beside it: the norm is of all gradients."""
    rule = rulec.load("sam(muon)")
    params = [jnp.asarray(p, jnp.float32) for p in start()]
    points: list[Any] = []

    def gradient_at(params: Any) -> Any:
        points.append(params)
        return jax.tree.map(jnp.cos, params)

    grads = jax.tree.map(jnp.cos, params)
    rulec.jax.step(
        rule, params, grads, rulec.jax.init(rule, params, tags={}), gradient=gradient_at, tags={}, donate=False
    )
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in grads))
    for point, param, grad in zip(points[0], params, grads, strict=True):
        np.testing.assert_allclose(point, np.asarray(param) + 0.05 / norm * np.asarray(grad), rtol=1e-5)


def test_maximize_climbs_down() -> None:
    with jax.enable_x64(True):
        params = [jnp.asarray(p) for p in start()]
        up, down = (rulec.jax.transform("gsam(sgd)", lr=0.1, maximize=maximize) for maximize in (True, False))
        higher, _ = up.update(
            [-jnp.cos(p) for p in params], up.init(params), params, gradient=lambda ps: [-jnp.cos(p) for p in ps]
        )
        lower, _ = down.update(
            [jnp.cos(p) for p in params], down.init(params), params, gradient=lambda ps: [jnp.cos(p) for p in ps]
        )
        for a, b in zip(higher, lower, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-15)


def test_a_missing_gradient_is_one_sentence() -> None:
    params = [jnp.zeros(3)]
    with pytest.raises(HyperError, match="SAMAdamW evaluates the model again in a step: give step or update"):
        rulec.jax.step("sam(adamw)", params, params, rulec.jax.init("sam(adamw)", params))
    tx = rulec.jax.transform("sam(adamw)")
    with pytest.raises(HyperError, match="SAMAdamW evaluates the model again in a step: give step or update"):
        tx.update(params, tx.init(params))
    with pytest.raises(RuleError, match="a step inside the backward pass has one gradient in a step"):
        rulec.jax.eager_step(lambda p, b: p.sum(), "sam(adamw)")
