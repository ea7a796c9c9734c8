"""Statistics in JAX: their values, the same bits with and without, and steps inside of JAX's and optax's functions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.errors import HyperError, RulecError, RuleError
from tests.jax.training import gradients, params, structure
from tests.weights import KINDS, RATES, check_unchanged, first_weights, gradient, options, weights

ROOT = Path(__file__).parents[2]
RULES = ["adamw", "lamb", "adafactor", "schedule_free_adamw"]
TOTAL = {"total": 'norm(update, per="model")'}
SKIPPING = rulec.parse("""
name: Wary
state: {m: 0}
skip: count_nonzero(not isfinite(g)) > 0
step: |
  m = 0.5*m + g
  direction = m
""")


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def pair(rule: Any, tree: Any, steps: int = 2, watch: Any = "norms", **options: Any) -> tuple[Any, Any]:
    """The results of steps without and with statistics, which donate nothing."""
    plain = watched = tree, rulec.jax.init(rule, tree, tags={})
    for i in range(steps):
        grads = gradients(plain[0], i)
        plain = rulec.jax.step(rule, plain[0], grads, plain[1], donate=False, tags={}, **options)
        watched = rulec.jax.step(rule, watched[0], grads, watched[1], donate=False, tags={}, watch=watch, **options)
    return plain, watched


def norms(old: Any, new: Any, grad: Any) -> dict[str, float]:
    """The set `norms` by NumPy in float64, after a step."""
    p, q, g = (np.asarray(x, np.float64) for x in (old, new, grad))
    u, size = q - p, np.linalg.norm
    return {
        "grad_norm": size(g), "update_norm": size(u), "param_norm": size(p), "update_ratio": size(u) / size(p),
        "grad_ratio": size(g) / size(p), "cosine": (u * g).sum() / size(u) / size(g), "nonfinite": 0.0,
        "unchanged": float((np.asarray(new) == np.asarray(old)).sum()),
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["jax", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_norms_are_those_that_numpy_computes_after_the_step(rule: str, backend: str) -> None:
    tree = params()
    grads, state = gradients(tree, 0), rulec.jax.init(rule, tree)
    new, _, measured = rulec.jax.step(rule, tree, grads, state, lr=0.05, donate=False, backend=backend, watch="norms")
    for place in range(2):

        def leaf(x: Any, place: int = place) -> Any:
            return jax.tree.leaves(x)[place]

        wanted = norms(leaf(tree), leaf(new), leaf(grads))
        assert {*measured} == {*wanted}
        for name, value in wanted.items():
            assert float(leaf(measured[name])) == pytest.approx(value, rel=1e-4, abs=1e-9), name


def library() -> list[str]:
    """The rules that a step of arrays alone takes."""
    known = {name: rulec.load(name) for name in rulec.rules()}
    return [name for name, rule in known.items() if not (rule.wraps or rule.inputs or rule.passes)]


@pytest.mark.parametrize("backend", ["jax", "cpu"])
@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=[] if name in RULES else pytest.mark.another) for name in library()]
)
def test_parameters_and_states_have_the_same_bits_with_statistics(rule: str, backend: str) -> None:
    options: dict[str, Any] = {"lr": 0.01} if "lr" in rulec.load(rule).settings else {}
    plain, watched = pair(rule, params(), backend=backend, **options)
    assert bits(plain) == bits(watched[:2])
    assert structure(plain) == structure(watched[:2])


def test_xla_compiles_a_step_as_it_does_without_statistics() -> None:
    """As one computation with its statistics, XLA contracts another product and sum in this step."""
    rng = np.random.default_rng(0)
    tree = {key: jnp.asarray(rng.standard_normal(shape), jnp.float32) for key, shape in (("w", (48, 32)), ("v", 33))}
    grads = jax.tree.map(lambda x: jnp.sin(3 * x) + 0.5, tree)
    state = rulec.jax.init("cautious_nadamw", tree)
    plain, watched = (
        rulec.jax.step("cautious_nadamw", tree, grads, state, donate=False, backend="jax", watch=watch)
        for watch in (None, "norms")
    )
    assert bits(plain) == bits(watched[:2])


def test_statistics_are_a_computation_apart_from_the_step() -> None:
    tree = params()
    state = rulec.jax.init("adamw", tree)
    step = jax.jit(lambda tree, watch: rulec.jax.step("adamw", tree, tree, state, watch=watch), static_argnums=1)
    counts = [step.lower(tree, watch).as_text().count("optimization_barrier") for watch in (None, "norms")]
    assert counts == [0, 1]


def test_matrix_functions_are_not_done_twice() -> None:
    tree = {"w": jnp.sin(jnp.arange(1536.0)).reshape(48, 32)}
    state = rulec.jax.init("muon", tree, tags={})

    def products(watch: Any) -> int:
        step = jax.jit(lambda tree, state: rulec.jax.step("muon", tree, tree, state, tags={}, watch=watch))
        return len(re.findall(r" dot\(", str(step.lower(tree, state).compile().as_text())))

    assert products("norms") == products(None) > 0


def test_a_step_with_statistics_is_differentiated_as_without() -> None:
    tree = params()
    state = rulec.jax.init("adamw", tree)

    def moved(rate: Any, watch: Any) -> Any:
        return rulec.jax.step("adamw", tree, gradients(tree, 0), state, lr=rate, watch=watch, donate=False)

    slopes = [jax.grad(lambda rate, w=watch: moved(rate, w)[0]["a"].sum())(0.1) for watch in (None, "norms")]
    assert slopes[0] == slopes[1]
    slope = jax.grad(lambda rate: moved(rate, {"u": "norm(update)"})[2]["u"]["a"])(0.1)
    assert float(slope) == pytest.approx(float(jnp.linalg.norm(moved(1.0, None)[0]["a"] - tree["a"])), rel=1e-5)


def test_many_small_leaves_are_held_packed_with_statistics_too() -> None:
    tree = {str(i): jnp.sin(jnp.arange(21.0) + i).reshape(7, 3) for i in range(70)}
    plain, (new, state, measured) = pair("adamw", tree, steps=1)
    assert state._trees is not None
    assert bits(plain) == bits((new, state))
    for key, leaf in tree.items():
        update = np.linalg.norm(np.asarray(new[key], np.float64) - np.asarray(leaf, np.float64))
        assert float(measured["update_norm"][key]) == pytest.approx(update, rel=1e-4)


def test_an_update_measures_the_change_that_it_returns() -> None:
    tree = params()
    tx = rulec.jax.transform("adam", lr=1e-4, watch=TOTAL | {"u": "norm(update)"})
    # The parameters are not needed where no statistic reads them.
    updates, state = tx.update(gradients(tree, 0), tx.init(tree))
    measured = rulec.jax.statistics(state)
    assert float(measured["total"]) == pytest.approx(float(optax.global_norm(updates)), rel=1e-6)
    assert float(measured["u"]["a"]) == pytest.approx(float(jnp.linalg.norm(updates["a"])), rel=1e-6)


def test_statistics_before_a_step_have_the_structure_of_later_ones() -> None:
    tree = params()
    tx = rulec.jax.transform("adamw", watch=TOTAL | {"rows": 'max(abs(g), per="row")', "u": "norm(update)"})
    first = tx.init(tree)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(rulec.jax.statistics(first)))
    _, state = tx.update(gradients(tree, 0), first, tree)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(first)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert structure(first) == structure(state)
    rows = rulec.jax.statistics(state)["rows"]
    assert np.array_equal(rows["a"], np.abs(gradients(tree, 0)["a"]).max(axis=1, keepdims=True))


def test_a_scan_over_steps_stacks_the_statistics() -> None:
    def step(carry: Any, i: Any) -> Any:
        tree, state, measured = rulec.jax.step("adamw", carry[0], gradients(carry[0], i), carry[1], watch=TOTAL)
        return (tree, state), (tree, measured)

    start = params(), rulec.jax.init("adamw", params())
    _, (trees, measured) = jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(3)))()
    assert measured["total"].shape == (3,)
    second = optax.global_norm(jax.tree.map(lambda x: x[1] - x[0], trees))
    assert float(measured["total"][1]) == pytest.approx(float(second), rel=1e-4)


def test_vmap_gives_the_statistics_of_each_model() -> None:
    trees = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params())
    states = jax.vmap(lambda tree: rulec.jax.init("adamw", tree))(trees)

    def step(tree: Any, state: Any) -> Any:
        return rulec.jax.step("adamw", tree, gradients(tree, 0), state, watch="norms")[2]

    measured = jax.vmap(step)(trees, states)
    assert np.allclose(measured["param_norm"]["a"], [np.linalg.norm(x) for x in trees["a"]], rtol=1e-6)


def test_leaves_that_skip_a_step_have_no_numbers_of_it() -> None:
    tree = params()
    grads = gradients(tree, 0)
    grads["a"] = grads["a"].at[0, 0].set(jnp.nan)
    state = rulec.jax.init(SKIPPING, tree)
    measured = rulec.jax.step(SKIPPING, tree, grads, state, lr=0.1, donate=False, watch="norms")[2]
    assert np.isnan(measured["param_norm"]["a"])
    assert float(measured["param_norm"]["b"]["c"]) == pytest.approx(float(jnp.linalg.norm(tree["b"]["c"])))


def test_in_a_partition_numbers_of_groups_and_models_are_vectors_over_its_parts() -> None:
    tree = params()
    rule = rulec.partition({"a": "sgd", "b/*": "adamw"})
    tx = rulec.jax.transform(rule, lr=0.1, watch=TOTAL | {"top": "max(v)", "rate": "2*lr"})
    updates, state = tx.update(gradients(tree, 0), tx.init(tree), tree)
    measured = rulec.jax.statistics(state)
    assert np.allclose(measured["total"], [optax.global_norm(updates["a"]), optax.global_norm(updates["b"])])
    assert np.allclose(measured["rate"], [0.2, 0.2])
    assert measured["top"]["a"] is None
    assert float(measured["top"]["b"]["c"]) == pytest.approx(float(state.v["b"]["c"].max()))


def test_masked_transformations_have_their_leaves_in_one_tree() -> None:
    tree, watch = params(), {"u": "norm(update)"}
    parts = {"x": rulec.jax.transform("adamw", watch=watch), "y": rulec.jax.transform("sgd", lr=0.1, watch=watch)}
    tx = optax.multi_transform(parts, {"a": "x", "b": "y"})
    updates, state = jax.jit(tx.update)(gradients(tree, 0), tx.init(tree), tree)
    measured = rulec.jax.statistics(state)
    assert structure(measured["u"]) == structure(tree)
    for number, update in zip(jax.tree.leaves(measured["u"]), jax.tree.leaves(updates), strict=True):
        assert float(number) == pytest.approx(float(jnp.linalg.norm(update)), rel=1e-6)
    chain = optax.chain(*parts.values())
    with pytest.raises(RulecError, match="two transformations in the state measure u for the same leaves"):
        rulec.jax.statistics(chain.init(tree))


def test_states_go_from_transformations_with_statistics_to_others_and_back() -> None:
    tree, grads = params(), gradients(params(), 0)
    plain, watching = rulec.jax.transform("adamw"), rulec.jax.transform("adamw", watch="norms")
    _, first = plain.update(grads, plain.init(tree), tree)
    updates, second = watching.update(grads, first, tree)
    others, third = plain.update(grads, second, tree)
    assert (first._fields, second._fields) == (("count", "m", "v"), ("count", "m", "v", "statistics"))
    assert structure(third) == structure(first)
    assert int(third.count) == 3
    expected, plain_second = plain.update(grads, first, tree)
    assert bits((updates, second[:3])) == bits((expected, plain_second[:3]))
    assert bits(others) == bits(plain.update(grads, plain_second, tree)[0])


def test_checkpoints_hold_no_statistics(tmp_path: Path) -> None:
    tree = params()
    watching = rulec.jax.transform("adamw", watch="norms")
    _, state = watching.update(gradients(tree, 0), watching.init(tree), tree)
    rulec.jax.save(tmp_path / "watched", "adamw", tree, state)
    rulec.jax.save(tmp_path / "plain", "adamw", tree, state._replace(statistics={}))
    assert (tmp_path / "watched").read_bytes() == (tmp_path / "plain").read_bytes()
    assert rulec.jax.load(tmp_path / "watched", "adamw", tree)._fields == ("count", "m", "v")
    loaded = rulec.jax.load(tmp_path / "watched", "adamw", tree, like=watching.init(tree))
    assert structure(loaded) == structure(state)
    assert bits(loaded[:3]) == bits(state[:3])
    assert np.isnan(rulec.jax.statistics(loaded)["update_norm"]["a"])


def test_packed_states_keep_statistics_as_trees() -> None:
    tree = params()
    tx = rulec.jax.transform("adamw", watch="norms")
    packed = rulec.jax.packed(tx.init(tree))
    _, state = tx.update(gradients(tree, 0), packed, tree)
    assert structure(state) == structure(packed)
    assert structure(rulec.jax.unpacked(state)) == structure(tx.init(tree))


def test_wrappers_of_optax_keep_statistics_apart_from_parameters() -> None:
    tree, tx = params(), rulec.jax.transform("lion", lr=0.1, watch="norms")
    theirs = optax.MultiSteps(tx, 2)
    assert {*rulec.jax.statistics(theirs.init(tree))} == {*rulec.jax.statistics(tx.init(tree))}
    marked = optax.tree_map_params(tx, lambda _: "parameter", tx.init(tree), transform_non_params=lambda _: "other")
    assert marked.statistics == "other"
    assert structure(marked.m) == structure(tree)


def test_numbers_have_64_bits_where_jax_is_allowed_them() -> None:
    with jax.enable_x64(True):
        tree = params()
        tx = rulec.jax.transform("adamw", watch=TOTAL)
        _, state = tx.update(gradients(tree, 0), tx.init(tree), tree)
        assert rulec.jax.statistics(state)["total"].dtype == jnp.float64
    assert rulec.jax.statistics(rulec.jax.transform("adamw", watch=TOTAL).init(params()))["total"].dtype == jnp.float32


def brain_or_single(kind: str) -> Any:
    return jnp.float32 if kind == "float32" else jnp.bfloat16


def weights_now(kind: str, tree: Any, state: Any) -> Any:
    """The weights of a leaf `w`, of its memory and that beside it."""
    names = [name for name in state._fields if name.startswith("param_")]
    return weights(kind, tree["w"], getattr(state, names[0])["w"] if names else None)


@pytest.mark.parametrize(
    ("rule", "backend"),
    [("adamw", "jax"), *(pytest.param(*each, marks=pytest.mark.slow) for each in [("adamw", "cpu"), ("lamb", "jax")])],
)
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_weights_are_those_that_their_memory_keeps(kind: str, rule: str, backend: str) -> None:
    tree = {"w": jnp.array(first_weights()).astype(brain_or_single(kind))}
    state = rulec.jax.init(rule, tree, **options(kind))
    words: dict[str, Any] = {"lr": RATES[rule], "weight_decay": 0.0, "watch": "norms", **options(kind)}
    measured, seen = [], [weights("", tree["w"], None)]
    for step in range(3):
        grads = {"w": jnp.array(gradient(step)).astype(brain_or_single(kind))}
        tree, state, now = rulec.jax.step(rule, tree, grads, state, donate=False, backend=backend, **words)
        measured.append(now["unchanged"]["w"])
        seen.append(weights_now(kind, tree, state))
    check_unchanged(measured, seen)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "split24" else pytest.mark.slow) for k in KINDS])
def test_unchanged_weights_are_those_that_optax_leaves(kind: str) -> None:
    """But for a plain bfloat16 weight that an update moves by half its last digit: optax adds the update rounded."""
    tree = {"w": jnp.array(first_weights()).astype(brain_or_single(kind))}
    tx = rulec.jax.transform("adamw", 1e-3, weight_decay=0.0, watch="norms", **options(kind))
    state = tx.init(tree)
    measured, seen = [], [weights("", tree["w"], None)]
    for step in range(3):
        updates, state = tx.update({"w": jnp.array(gradient(step)).astype(brain_or_single(kind))}, state, tree)
        tree = optax.apply_updates(tree, updates)
        measured.append(rulec.jax.statistics(state)["unchanged"]["w"])
        seen.append(weights_now(kind, tree, state))
    check_unchanged(measured, seen, apart=4 if kind == "bfloat16" else 0)


def test_a_step_with_passes_measures_its_last_point() -> None:
    tree = params()
    seen: list[Any] = []

    def gradient(point: Any) -> Any:
        seen.append(gradients(point, 0))
        return seen[-1]

    options: dict[str, Any] = {"lr": 0.1, "donate": False, "gradient": gradient, "watch": {"g": "norm(grad)"}}
    state = rulec.jax.init("sam(sgd)", tree)
    measured = rulec.jax.step("sam(sgd)", tree, gradients(tree, 0), state, **options)[2]
    assert len(seen) == 1
    assert float(measured["g"]["a"]) == pytest.approx(float(jnp.linalg.norm(seen[0]["a"])), rel=1e-6)


def test_sharded_steps_measure_whole_tensors() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.jax.measured"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for rule, distances in json.loads(run.stdout).items():
        assert {*distances} == {"u", "rows", "all", "t", "mean"}
        assert max(distances.values()) < 1e-5, rule


@pytest.mark.parametrize(
    ("watch", "kind", "message"),
    [
        ("normz", RuleError, "AdamW has no statistic 'normz'; did you mean 'norms'?"),
        ({"x": "m*g"}, RuleError, "differs from element to element"),
        ({"x": 3}, RuleError, "the statistic x is an expression in quotes, such as 'norm(update)', not 3"),
        (3, HyperError, "watch of AdamW is a name such as 'norms', a list of names, or expressions by name, not 3"),
    ],
)
def test_a_mistake_is_named_as_in_torch(watch: Any, kind: Any, message: str) -> None:
    tree = params()
    with pytest.raises(kind, match=re.escape(message)):
        rulec.jax.transform("adamw", watch=watch)
    with pytest.raises(kind, match=re.escape(message)):
        rulec.jax.step("adamw", tree, tree, rulec.jax.init("adamw", tree), watch=watch)


def test_a_state_without_statistics_says_so() -> None:
    with pytest.raises(RulecError, match="the state holds no statistics: make the transformation with watch='norms'"):
        rulec.jax.statistics(rulec.jax.init("adamw", params()))


def test_eager_updates_refuse_to_measure() -> None:
    with pytest.raises(RuleError, match="an eager update measures no statistics: give watch"):
        rulec.jax.eager_step(lambda tree, batch: 0.0, "adamw", watch="norms")
