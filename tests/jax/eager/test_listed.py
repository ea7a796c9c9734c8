"""A run that goes from stacked layers to a list of them, and back, with all that its rule remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rulec
import rulec.jax
from tests.jax.eager import models
from tests.jax.training import difference, structure

WARY = rulec.parse("""
name: Wary
state: {m: 0, seen: {init: 0, per: tensor}}
skip: norm(g) > 1e9
step: |
  seen = seen + 1
  m = 0.5*m + g/seen
  direction = m
""")

DRIFT = rulec.parse("""
name: Drift
hyper: {rate: 0.1}
state: {drift: {init: 1, per: group}, pull: {init: 1, per: model}}
step: |
  drift = drift*(1 - rate)
  pull = 0.5*pull
  direction = g*drift*(1 + pull)
""")

GROUPS = rulec.partition({"**/out": rulec.part(DRIFT, lr=0.1, rate=0.3), "...": rulec.part(DRIFT, lr=0.1)})


@pytest.mark.parametrize(
    "rule", [pytest.param(WARY, id="tensors", marks=pytest.mark.slow), pytest.param(GROUPS, id="groups")]
)
def test_a_run_goes_on_with_a_list_of_layers_and_back(rule: Any) -> None:
    made, params, batch = rulec.jax.eager_scan(models.layer, models.head, rule), models.deep(2), models.pairs()
    theirs, gradient = models.unstacked(params), jax.jit(jax.grad(models.loss))
    state, deferred = made.init(params), rulec.jax.init(rule, theirs)
    hyper: Any = {} if rule is GROUPS else {"lr": 0.1}
    for way in "ele":
        theirs, deferred = rulec.jax.step(rule, theirs, gradient(theirs, batch), deferred, **hyper)
        if way == "e":
            params, state, _ = made.step(params, state, batch, **hyper)
            continue
        tree, found = made.listed(params, state)
        assert structure((tree, found)) == structure((theirs, deferred))
        tree, found = rulec.jax.step(rule, tree, gradient(tree, batch), found, **hyper)
        params, state = made.stacked(tree, found)
    tree, found = made.listed(params, state)
    assert difference((tree, found), (theirs, deferred)) < 1e-5
    again = made.listed(*made.stacked(tree, found))
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (again, (tree, found))), strict=True))


@pytest.mark.slow
def test_what_is_listed_is_saved_and_read(tmp_path: Path) -> None:
    made, params, batch = rulec.jax.eager_scan(models.layer, models.head, "momentum"), models.deep(2), models.pairs()
    params, state, _ = made.step(params, made.init(params), batch, lr=0.1)
    tree, found = made.listed(params, state)
    rulec.jax.save(tmp_path / "run.safetensors", "momentum", tree, found, parameters=True, lr=0.1)
    tree = rulec.jax.load_params(tmp_path / "run.safetensors", tree)
    found = rulec.jax.load(tmp_path / "run.safetensors", "momentum", tree, lr=0.1)
    again = made.stacked(tree, found)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (again, (params, state))), strict=True))
