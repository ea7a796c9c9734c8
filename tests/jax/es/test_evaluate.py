"""The fitness of members: together, in chunks, one by one and on several devices; and trainings by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec.jax
from rulec.es import Perturbation
from rulec.jax import es
from rulec.tools.demo import digits

EPOCHS = 20

ROOT = Path(__file__).resolve().parents[3]


def test_members_together_are_those_one_by_one() -> None:
    perturbation = Perturbation("signflip", 4, 0.5, values="rademacher")
    params = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.ones(3)}
    x, state = jnp.linspace(0, 1, 20).reshape(5, 4), es.init(params, perturbation)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    @jax.jit
    def fitness(params: Any, state: es.State, x: Any) -> Any:
        together, in_chunks = (es.evaluate(loss, params, state, perturbation, x, chunk=chunk) for chunk in (None, 2))
        return together, in_chunks

    one = jax.jit(lambda params, index: loss(es.member(params, state, perturbation, index), x))
    expected = [-one(params, index) for index in range(perturbation.members)]
    for found in fitness(params, state, x):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len({float(f) for f in expected}) == 8


@pytest.mark.slow
def test_members_on_several_devices_have_the_bits_of_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.es.sharded"], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == found["row_devices"] == 4
    assert found["same"]
    assert found["together"] < 1e-5
    assert found["spread"] > 0.01
    assert found["rows"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["independent", "permuted", "signflip", "lowrank"])
def test_the_gradient_of_a_quadratic_is_its_mean(family: str) -> None:
    """Over steps, whose draws are apart: six standard errors, and an error that falls as the root of their number."""
    perturbation = Perturbation(family, 8, 0.1, antithetic=False)
    params = {"w": jnp.linspace(-1, 1, 48).reshape(8, 6)}
    first = es.init(params, perturbation)

    def draw(step: Any) -> Any:
        state = replace(first, step=step)
        fitness = es.evaluate(lambda p: 0.5 * jnp.sum(p["w"] ** 2), params, state, perturbation)
        return es.estimate(params, state, perturbation, fitness)[0]["w"]

    draws = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(1024, dtype=jnp.uint32)), np.float64)
    error = draws.mean(axis=0) - params["w"]
    assert np.abs(error / (draws.std(axis=0, ddof=1) / 32)).max() < 6
    few = np.mean([np.linalg.norm(draws[i : i + 64].mean(axis=0) - params["w"]) for i in range(0, 1024, 64)])
    assert 1 / 8 < np.linalg.norm(error) / few < 1 / 2  # 1/4, of sixteen times as many


@pytest.mark.slow
@pytest.mark.parametrize("family", ["signflip", "lowrank"])
def test_digits_are_learnt(family: str) -> None:
    data = digits.load()
    rng = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(rng.standard_normal((64, 48)) / 8, jnp.float32), "b1": jnp.zeros(48),
        "w2": jnp.asarray(rng.standard_normal((48, 10)) / 7, jnp.float32), "b2": jnp.zeros(10),
    }  # fmt: skip
    perturbation = Perturbation(family, 64, 0.1)
    tx, state = rulec.jax.transform("adam", lr=0.02), es.init(params, perturbation)

    def network(params: Any, images: Any) -> Any:
        return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    @jax.jit
    def train(params: Any, opt_state: Any, state: es.State, images: Any, labels: Any) -> Any:
        rows, wanted = (es.member_batch(array, perturbation) for array in (images, labels))
        scores = jax.nn.log_softmax(network(es.batched(params, state, perturbation), rows))
        fitness = jnp.take_along_axis(scores, wanted[:, None], axis=1)[:, 0]
        return es.update(params, opt_state, tx, state, perturbation, fitness, "centered_rank")[:3]

    opt_state = tx.init(params)
    for epoch in range(EPOCHS):
        for images, labels in data.batches(64, epoch):
            params, opt_state, state = train(params, opt_state, state, images, labels)
    found = jnp.argmax(network(params, data.test_images), axis=1)
    assert float(jnp.mean(found == data.test_labels)) > 0.9
