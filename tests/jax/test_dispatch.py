"""What a step does before it calls what is compiled: little, and the same for thousands of leaves as for few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rulec
import rulec.jax
from rulec.jax import cpu, recipe
from rulec.jax.library import is_outermost

TEXT = "name: Scaled\nhyper: {lr: 1}\nstep: |\n  direction = {}*g\n"


def step_of(rule: Any) -> float:
    params, grads = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    new, _ = rulec.jax.step(rule, params, grads, rulec.jax.init(rule, params))
    return float(new["w"][0])


def test_a_rule_of_the_library_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = step_of("sgd"), step_of("sgd + decay")

    def refuses(*_: Any) -> None:
        raise AssertionError("looked up again")

    monkeypatch.setattr("rulec.language.library.load._load", refuses)
    assert (step_of("sgd"), step_of("sgd + decay")) == before


def test_a_rule_of_a_file_is_what_the_file_says_now(tmp_path: Path) -> None:
    path = tmp_path / "scaled.yaml"
    found = []
    for factor in (2, 3):
        path.write_text(TEXT.replace("{}", str(factor)))
        found += [step_of(str(path)), step_of(path), step_of(f"{path} >> clip_by_value(bound=10)")]
    assert found == [-2, -2, -2, -3, -3, -3]


def test_a_call_that_others_trace_is_not_the_outermost() -> None:
    """Also where nothing that is traced is given to it."""
    found = []

    def function(x: Any) -> Any:
        found.append(is_outermost(jnp.zeros(3)))
        return x

    function(jnp.ones(2))
    jax.jit(function)(jnp.ones(2))
    jax.grad(lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, None, length=2)[0])(1.0)
    assert found[0] is True
    assert len(found) > 2
    assert not any(found[1:])


def test_the_leaves_of_any_tree_are_looked_at() -> None:
    params = {"b": {"w": jnp.ones(2)}, "a": [jnp.zeros(1), None]}
    state = rulec.jax.init("adam", params)
    flat = {"b": jnp.ones(2), "a": jnp.zeros(1)}
    for tree in (params, state, flat, rulec.jax.init("adam", flat), rulec.jax.init("adam", flat, packed=True), {}):
        assert sorted(map(id, cpu._leaves(tree))) == sorted(map(id, jax.tree.leaves(tree)))


def test_names_of_files_do_not_last() -> None:
    assert recipe._is_lasting("adam + decay")
    assert not any(map(recipe._is_lasting, ("my.yaml", "my.yml >> clip_by_value", Path("adam"))))
