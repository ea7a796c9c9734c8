"""`rulec.jax.step`: new parameters in one call that uses the memory of the old ones again."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.array
import rulec.jax
from rulec.backend import registry
from rulec.language.expr.node import Node, names_in
from rulec.language.library.load import rules
from tests.jax.training import PARAMS, check_compiles_nothing, difference, gradients, params, structure

GUARDED = rulec.load("skip_not_finite") >> rulec.load("adam")

BY_LEAF = rulec.parse("""
name: Wary
state: {m: 0}
skip: count_nonzero(not isfinite(g)) > 0
step: |
  m = 0.5*m + g
  direction = m
""")

INFORMED = rulec.parse("""
name: Informed
state: {m: 0}
inputs: {loss: scalar, h: like p}
step: |
  m = 0.5*m + g
  direction = loss*m/h
""")


def kept(rule: Any, tree: Any, grads: Any, state: Any, **options: Any) -> tuple[Any, Any]:
    """A step that donates nothing."""
    return rulec.jax.step(rule, tree, grads, state, donate=False, **options)


@pytest.mark.parametrize("rule", ["adamw", "adafactor"])
def test_a_step_is_an_update_and_its_addition(rule: str) -> None:
    tree = other = params()
    state, transformation = rulec.jax.init(rule, tree), rulec.jax.transform(rule, lr=0.05)
    moments = transformation.init(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            grads = gradients(other, i)
            tree, state = kept(rule, tree, grads, state, lr=0.05)
            updates, moments = transformation.update(grads, moments, other)
            other = optax.apply_updates(other, updates)
    assert difference(tree, other, PARAMS) < 2e-6
    assert difference(state, moments) < 1e-6
    assert structure(state) == structure(moments)


def test_hyper_parameters_that_states_begin_with_are_for_init_too() -> None:
    """The page names all of the library; a state begins with what init is given, and with the default otherwise."""
    page = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
    table = page.partition("| hyper-parameter | rules with a state that begins with it |\n")[2].partition("\n\n")[0]
    said = {
        row[1].strip(" `"): {*row[2].strip().split(", ")} for line in table.splitlines()[1:] if (row := line.split("|"))
    }
    found: dict[str, set[str]] = {}
    for file in [file for file in rules() if not file.startswith("transforms/")]:
        rule = rulec.load(file)
        for name in names_in([state.init for state in rule.state.values() if isinstance(state.init, Node)]):
            if name in rule.hyper:
                found.setdefault(name, set()).add(rule.name)
    assert said == found
    for rule, name, field, default in (
        ("prodigy", "d0", "d", 1e-6),
        ("yogi", "initial", "v", 1e-6),
        ("rprop", "lr", "delta", 0.01),
    ):
        given, plain = rulec.jax.init(rule, jnp.ones(()), **{name: 0.25}), rulec.jax.init(rule, jnp.ones(()))
        assert (float(getattr(given, field)), float(getattr(plain, field))) == (0.25, pytest.approx(default))


def test_the_memory_of_the_old_is_used_again() -> None:
    tree, grads = params(), gradients(params(), 0)
    state = rulec.jax.init("adam", tree)
    expected = kept("adam", tree, grads, state, lr=0.1)
    old = jax.tree.leaves((tree, state))
    assert not any(leaf.is_deleted() for leaf in old)
    found = rulec.jax.step("adam", tree, grads, state, lr=0.1)
    assert all(leaf.is_deleted() for leaf in old)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(grads))
    assert difference(found, expected) < 1e-6


def test_within_users_jit_and_scan() -> None:
    tree = params()
    state, expected, moments = rulec.jax.init("adam", tree), tree, rulec.jax.init("adam", tree)

    def body(carry: Any, i: Any) -> Any:
        tree, state = carry
        return rulec.jax.step("adam", tree, gradients(tree, i), state, lr=optax.linear_schedule(0.1, 0, 5)), None

    (found, state), _ = jax.lax.scan(body, (tree, state), jnp.arange(3.0))
    for i in range(3):
        expected, moments = kept("adam", expected, gradients(expected, i), moments, lr=0.1 - 0.02 * i)
    assert difference(found, expected, PARAMS) < 2e-6
    assert int(state.count) == 3


def test_a_number_an_array_and_a_function_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    tree, grads = params(), gradients(params(), 0)
    state = rulec.jax.init("adam", tree)
    given: list[Any] = [0.125, jnp.float32(0.125), np.float64(0.125), lambda count: 0.125 / (count + 1)]
    found = [kept("adam", tree, grads, state, lr=lr)[0] for lr in given]
    assert all(difference(one, found[0]) < 2e-7 for one in found)
    with check_compiles_nothing(caplog):
        for lr, other in zip(given, (0.25, jnp.float32(0.25), np.float64(0.25), given[3]), strict=True):
            kept("adam", tree, grads, state, lr=other)
            kept("adam", tree, grads, state, lr=lr)


def test_a_rule_made_again_is_not_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    tree = params()
    state = rulec.jax.init("clip_by_value >> sgd", tree)
    kept("clip_by_value >> sgd", tree, gradients(tree, 0), state, lr=0.1)
    with check_compiles_nothing(caplog):
        kept("clip_by_value >> sgd", tree, gradients(tree, 0), state, lr=0.1)
        kept(rulec.load("clip_by_value") >> rulec.load("sgd"), tree, gradients(tree, 0), state, lr=0.1)


def test_arrays_of_weak_type_are_computed_with_in_their_own_dtype() -> None:
    """`jnp.full(3, 0.1)` is of weak type, which beside a number of Python would become float64."""
    rule, weak = rulec.parse("name: Halved\nstep: |\n  direction = 0.5*g"), jnp.full(3, 0.1)
    assert weak.weak_type
    made = rulec.jax.transform(rule)
    state = made.init(weak)
    for function in (partial(kept, rule), partial(kept, rule, backend="jax")):
        assert "f64[3]" not in str(jax.make_jaxpr(lambda *given: function(*given))(weak, weak, state))  # noqa: B023
        new, _ = function(weak, weak, state)
        assert (new.dtype, new.weak_type) == (jnp.float32, False)
    assert "f64[3]" not in str(jax.make_jaxpr(made.update)(weak, state, weak))


def test_what_a_rule_is_told_besides() -> None:
    tree, grads = params(), gradients(params(), 0)
    curvature = jax.tree.map(lambda x: jnp.abs(x) + 1, tree)
    state = rulec.jax.init(INFORMED, tree)
    found, _ = kept(INFORMED, tree, grads, state, lr=0.1, loss=2.0, h=curvature)
    expected = jax.tree.map(lambda p, g, h: p - 0.1 * 2 * g / h, tree, grads, curvature)
    assert difference(found, expected) < 1e-6
    transformation = rulec.jax.transform(INFORMED, lr=0.1)
    updates, _ = transformation.update(grads, state, tree, loss=jnp.float32(2), h=curvature, value=3.0)
    assert difference(optax.apply_updates(tree, updates), expected) < 1e-6
    chained = optax.chain(optax.clip(10.0), transformation)
    updates, _ = chained.update(grads, chained.init(tree), tree, loss=jnp.float32(2), h=curvature)
    assert difference(optax.apply_updates(tree, updates), expected) < 1e-6


def test_a_step_is_skipped_where_the_rule_says_so() -> None:
    tree, grads = params(), gradients(params(), 0)
    state = rulec.jax.init(GUARDED, tree)
    tree, state = kept(GUARDED, tree, grads, state, lr=0.1)
    harmed = {"a": grads["a"].at[1, 2].set(jnp.nan), "b": grads["b"]}
    same, after = kept(GUARDED, tree, harmed, state, lr=0.1)
    assert difference(same, tree) == 0
    assert difference(after, state) == 0
    assert int(after.count) == 1
    transformation = rulec.jax.transform(GUARDED, lr=0.1)
    updates, after = transformation.update(harmed, state, tree)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
    assert difference(after, state) == 0
    found, state = kept(GUARDED, tree, grads, after, lr=0.1)
    other = optax.adam(0.1)
    moments, now = other.init(params()), params()
    for _ in range(2):
        updates, moments = other.update(grads, moments, now)
        now = optax.apply_updates(now, updates)
    assert difference(found, now, PARAMS) < 3e-5
    assert int(state.count) == 2


def test_a_leaf_is_skipped_by_itself() -> None:
    tree, grads = params(), gradients(params(), 0)
    state = rulec.jax.init(BY_LEAF, tree)
    harmed = {"a": grads["a"], "b": {"c": grads["b"]["c"].at[0].set(jnp.inf)}}
    found, state = kept(BY_LEAF, tree, harmed, state, lr=0.1)
    assert difference(found["b"], tree["b"]) == 0
    assert difference(found["a"], tree["a"] - 0.1 * grads["a"]) < 1e-6
    assert state.count.tolist() == [1, 0]
    assert (state.m["b"]["c"] == 0).all()


def test_dtypes_of_parameters_gradients_and_states() -> None:
    """Products are rounded once, to the dtype of what they are kept in."""
    tree = {"half": params("bfloat16")["a"], "full": params()["a"]}
    state = rulec.jax.init("momentum", tree, state_dtype="float32")
    grads = {"half": gradients(tree, 0)["full"], "full": gradients(tree, 0)["full"].astype(jnp.float16)}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"int32", "float32"}
    found, state = kept("momentum", tree, grads, state, lr=0.5, momentum=0.5)
    assert [str(found[k].dtype) for k in ("full", "half")] == ["float32", "bfloat16"]
    (moments,) = (getattr(state, field) for field in state._fields if field != "count")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(moments)} == {"float32"}
    assert (moments["half"] == grads["half"]).all()
    for key in tree:
        exact = np.asarray(tree[key], np.float64) - 0.5 * np.asarray(grads[key], np.float64)
        assert (np.asarray(found[key]) == exact.astype(np.float32).astype(tree[key].dtype)).all()
    updates, _ = rulec.jax.transform("momentum", lr=0.5).update(grads, state, tree)
    assert [str(updates[k].dtype) for k in ("full", "half")] == ["float32", "bfloat16"]


CUBED = rulec.parse("name: Cubed\nstep: |\n  direction = g @ transpose(g) @ g\n")


@pytest.mark.parametrize("rule", ["lion", CUBED], ids=["elementwise", "matrices"])
def test_maximize(rule: Any) -> None:
    tree, grads = params(), gradients(params(), 0)
    state = rulec.jax.init(rule, tree)
    found, _ = kept(rule, tree, grads, state, lr=0.1, maximize=True)
    assert difference(found, kept(rule, tree, jax.tree.map(jnp.negative, grads), state, lr=0.1)[0]) == 0
    assert (found["a"] > tree["a"]).any()


def test_tags_route_leaves() -> None:
    tree = {"embed": {"table": jnp.ones((4, 3))}, "kernel": jnp.ones((4, 3))}
    state = rulec.jax.init("muon", tree, tags={"embed/table": {"embedding"}})
    assert state.v["embed"]["table"].shape == (4, 3)
    assert state.v["kernel"] is None
    grads = gradients(tree, 0)
    found, _ = kept("muon", tree, grads, state, tags={"embed/table": {"embedding"}})
    assert difference(found["embed"], found["kernel"]) > 0


def test_random_numbers_are_those_of_the_other_backends() -> None:
    """A leaf's numbers follow from the seed, its place in the tree and the step."""
    rule = rulec.load("noise") >> rulec.load("sgd")
    found: Any = {"a": jnp.zeros((3, 5)), "b": {"c": jnp.zeros(7)}}
    zeros, state = jax.tree.map(jnp.zeros_like, found), rulec.jax.init(rule, found)
    arrays = {"a": np.zeros((3, 5), np.float32), "b": {"c": np.zeros(7, np.float32)}}
    optimizer = rulec.array.Optimizer(rule, arrays, "numpy", seed=5, lr=1.0)
    for _ in range(2):
        found, state = kept(rule, found, zeros, state, seed=5, lr=1.0)
        optimizer.step(jax.tree.map(np.asarray, zeros))
    assert difference(found, arrays) < 1e-6
    other, _ = kept(rule, zeros, zeros, rulec.jax.init(rule, zeros), seed=6, lr=1.0)
    assert difference(other, arrays) > 0.1


def test_static_hyper_parameters_decide_the_shapes_of_states() -> None:
    tree = {"w": jnp.ones((6, 4))}
    state = rulec.jax.init("galore", tree, rank=2, gap=3)
    assert state.P["w"].shape[-1] == 2
    found, state = kept("galore", tree, gradients(tree, 0), state, rank=2, gap=3, lr=0.1)
    assert found["w"].shape == (6, 4)
    with pytest.raises(rulec.errors.StateMismatch, match=r"P of w in the state of GaLore has shape .*2.* and not .*3"):
        kept("galore", tree, gradients(tree, 0), state, rank=3)


# Trees


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A layer of a user's."""

    kernel: Any
    bias: Any


class Pair:
    """Containers without names."""

    def __init__(self, *both: Any) -> None:
        self.both = both


jax.tree_util.register_pytree_node(Pair, lambda pair: (pair.both, None), lambda _, both: Pair(*both))
Model = namedtuple("Model", ["first", "rest"])


@pytest.mark.parametrize(
    "container",
    [
        lambda x: x, lambda x: [x, (2 * x,)], lambda x: Layer(x, None), lambda x: Pair(x, {"z": x + 1}),
        lambda x: Model(Layer(x, x[0]), {"none": None, "list": [x]}), lambda x: {"empty": x[:0], "number": x[0, 0]},
    ],
)  # fmt: skip
def test_any_tree(container: Callable[[Any], Any]) -> None:
    tree = container(params()["a"])
    state = rulec.jax.init("momentum", tree)
    grads = gradients(tree, 0)
    found, after = kept("momentum", tree, grads, state, lr=0.1)
    assert structure(found) == structure(tree)
    assert structure(after) == structure(state)
    assert difference(found, jax.tree.map(lambda p, g: p - 0.1 * g, tree, grads)) < 1e-6
    updates, _ = rulec.jax.transform("momentum", lr=0.1).update(grads, state, tree)
    assert structure(updates) == structure(tree)


@pytest.mark.parametrize("rule", ["adamw", "prodigy", "adafactor", GUARDED])
def test_a_tree_without_leaves(rule: Any) -> None:
    for tree in ({}, {"a": None}):
        state = rulec.jax.init(rule, tree)
        found, after = kept(rule, tree, tree, state)
        assert found == tree
        assert int(after.count) == 1
        assert structure(after) == structure(state)


def test_leaves_of_no_elements_beside_others() -> None:
    tree = {"none": jnp.zeros((0, 4)), "some": params()["a"]}
    for rule in ("adafactor", "prodigy", GUARDED):
        state = rulec.jax.init(rule, tree)
        found, _ = kept(rule, tree, gradients(tree, 0), state)
        alone = {"some": tree["some"]}
        expected, _ = kept(rule, alone, gradients(alone, 0), rulec.jax.init(rule, alone))
        assert found["none"].shape == (0, 4)
        assert difference({"some": found["some"]}, expected) < 1e-6
        assert np.isfinite(found["some"]).all()


def test_a_count_stays_at_the_largest_number() -> None:
    tree = params()
    last = np.iinfo(np.int32).max
    state = rulec.jax.init("adam", tree)._replace(count=jnp.int32(last - 1))
    for _ in range(2):
        tree, state = kept("adam", tree, gradients(tree, 0), state)
        assert int(state.count) == last
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_every_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first step: a first state needs no kernel."""
    made: list[str] = []
    backend = registry.get("jax")
    build = backend.build

    def counted(program: Any, layout: Any, source: str) -> Any:
        made.append(program.name)
        return build(program, layout, source)

    monkeypatch.setattr(backend, "build", counted)
    params = {"kernel": jnp.ones((7, 3)), "bias": jnp.ones(3)}
    state = rulec.jax.init("muon", params, tags={}, weight_decay=0.03)
    assert made == []
    for _ in range(2):
        grads = jax.tree.map(jnp.ones_like, params)
        params, state = rulec.jax.step("muon", params, grads, state, tags={}, weight_decay=0.03)
    assert sorted(made) == ["AdamW", "Muon"]
