"""Transformations of rules inside of optax's, and inside of what JAX does to functions."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec.jax
from tests.jax.training import PARAMS, check_compiles_nothing, difference, gradients, params, structure, trained

Transformation = Any

#: optax works out 1 - 0.999**t in float32, which is right to some 1e-5.
CLOSE = 3e-5


def ours(lr: Any = 0.05, beta1: Any = 0.9) -> Transformation:
    return rulec.jax.transform("adamw", lr=lr, beta1=beta1, weight_decay=0.1)


def theirs(lr: Any = 0.05, beta1: Any = 0.9) -> Transformation:
    return optax.adamw(lr, b1=beta1, weight_decay=0.1)


def _chained(made: Callable[..., Transformation]) -> Transformation:
    return optax.chain(optax.clip_by_global_norm(1.0), made(), optax.scale(0.5))


def _masked(made: Callable[..., Transformation]) -> Transformation:
    return optax.masked(made(), {"a": True, "b": {"c": False}})


def _several(made: Callable[..., Transformation]) -> Transformation:
    other = optax.lion(0.01, weight_decay=0) if made is theirs else rulec.jax.transform("lion", 0.01, weight_decay=0.0)
    return optax.multi_transform({"x": made(), "y": other}, {"a": "x", "b": {"c": "y"}})


def _injected(made: Callable[..., Transformation]) -> Transformation:
    return optax.inject_hyperparams(made)(lr=optax.linear_schedule(0.1, 0.0, 10), beta1=0.8)


def _scheduled(made: Callable[..., Transformation]) -> Transformation:
    return made(lr=optax.cosine_decay_schedule(0.1, 6))


def _accumulated(made: Callable[..., Transformation]) -> Transformation:
    return optax.MultiSteps(made(), 2)


def _finite(made: Callable[..., Transformation]) -> Transformation:
    inner = optax.apply_if_finite(made(), 3)

    def update(grads: Any, state: Any, params: Any) -> Any:
        count = optax.tree_utils.tree_get(state, "total_notfinite")
        odd = (optax.tree_utils.tree_get(state, "count") == 1) & (count == 0)
        return inner.update(jax.tree.map(lambda g: jnp.where(odd, jnp.nan, g), grads), state, params)

    return optax.GradientTransformation(inner.init, update)


def _flattened(made: Callable[..., Transformation]) -> Transformation:
    return optax.flatten(made())


@pytest.mark.parametrize(
    "wrapped", [_chained, _masked, _several, _injected, _scheduled, _accumulated, _finite, _flattened]
)
def test_inside_of_what_optax_has(wrapped: Callable[..., Transformation]) -> None:
    found, state = trained(wrapped(ours), params())
    expected, _ = trained(wrapped(theirs), params())
    assert difference(found, expected, PARAMS) < CLOSE
    assert all(not leaf.weak_type for leaf in jax.tree.leaves(state))


def test_inside_of_lookahead() -> None:
    sides = []
    for made in (ours, theirs):
        transformation = optax.lookahead(made(), 2, 0.5)
        now = optax.LookaheadParams.init_synced(params())
        state = transformation.init(now)

        @jax.jit
        def step(now: Any, state: Any, i: Any, transformation: Any = transformation) -> Any:
            updates, state = transformation.update(gradients(now.fast, i), state, now)
            return optax.apply_updates(now, updates), state

        for i in range(3):
            now, state = step(now, state, i)
        sides.append(now)
    assert difference(sides[0].fast, sides[1].fast, PARAMS) < CLOSE
    assert difference(sides[0].slow, sides[1].slow, PARAMS) < CLOSE


def test_masked_leaves_vanish_from_the_state() -> None:
    state = _masked(ours).init(params()).inner_state
    assert isinstance(state.m["b"]["c"], optax.MaskedNode)
    assert len(jax.tree.leaves(state)) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_have_all_their_digits(dtype: str) -> None:
    """What is a millionth of the parameter is not rounded as the parameter is."""
    tree = jax.tree.map(lambda x: 100 * x, params(dtype))
    transformation = optax.chain(rulec.jax.transform("adam", lr=1e-4), optax.scale(1e-3))
    updates, _ = transformation.update(gradients(tree, 0), transformation.init(tree), tree)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), tree)
        exact = optax.adam(1e-7)
        expected, _ = exact.update(
            jax.tree.map(lambda g: g.astype(jnp.float64), gradients(tree, 0)), exact.init(wide), wide
        )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(updates)} == {dtype}
    assert difference(updates, expected) < {"float32": 5e-7, "bfloat16": 2**-7}[dtype]


def test_injected_numbers_trace_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    transformation = optax.inject_hyperparams(ours)(lr=0.1, beta1=0.9)
    tree = params()
    grads, state = gradients(tree, 0), transformation.init(tree)
    state.hyperparams["lr"] = jnp.float32(0.2)
    first, state = transformation.update(grads, state, tree)
    state.hyperparams["lr"] = rate = jnp.float32(0.4)
    with check_compiles_nothing(caplog):
        second, _ = transformation.update(grads, state, tree)
    expected = theirs(lr=float(rate))
    _, moments = expected.update(grads, expected.init(tree), tree)
    assert difference(second, expected.update(grads, moments, tree)[0]) < CLOSE
    assert difference(first, second) > 0.4


INJECTED: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "a name": ("adamw", {}, {"lr"}),
    "a rule": (rulec.load("adamw"), {"beta1": 0.5, "weight_decay": 0.25}, {"lr", "beta1", "weight_decay"}),
    "a partition": (rulec.partition({"a": "adamw", "...": "sgd"}), {"weight_decay": 0.25}, {"lr", "weight_decay"}),
    "a text": ("clip_by_global_norm >> lion", {"max_norm": 0.25}, {"lr", "max_norm"}),
    "what is compiled": ("galore", {"rank": 2, "seed": 3, "state_dtype": jnp.bfloat16}, {"lr"}),
    "directions": ("adamw", {"maximize": True, "tags": {"a": {"embedding"}}, "seed": 1}, {"lr"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "what is compiled")) for case in INJECTED]
)
def test_transform_itself_can_be_injected(case: str) -> None:
    """Every hyper-parameter is one of the state, and nothing else is, named among the static_args or not."""
    rule, more, names = INJECTED[case]
    tree, grads = params(), gradients(params(), 0)
    plain = rulec.jax.transform(rule, lr=0.25, **more)
    expected, after = jax.jit(plain.update)(grads, plain.init(tree), tree)
    for static in ((), ("rule", "seed")):
        injected = optax.inject_hyperparams(rulec.jax.transform, static_args=static)(rule, lr=0.25, **more)
        state = injected.init(tree)
        assert state.hyperparams.keys() == names
        updates, new = jax.jit(injected.update)(grads, state, tree)
        assert jax.tree.map(lambda x: x.dtype, new.inner_state) == jax.tree.map(lambda x: x.dtype, after)
        assert difference(updates, expected) < 1e-6
    state.hyperparams["lr"] = jnp.float32(0.0)
    updates, _ = injected.update(grads, state, tree)
    assert difference(updates, jax.tree.map(jnp.zeros_like, PARAMS)) == 0


def test_schedules_of_transform_can_be_injected() -> None:
    """They are optax's then, with a count of its own."""
    made = optax.inject_hyperparams(rulec.jax.transform)(rulec.load("sgd"), lr=lambda count: 0.5 / (count + 1))
    tree, state, found = params(), made.init(params()), []
    for _ in range(2):
        updates, state = made.update(tree, state, tree)
        found.append(float(updates["b"]["c"][0] / tree["b"]["c"][0]))
    assert found == [-0.5, -0.25]


# JAX's own


def test_a_stack_of_models_with_states_of_their_own() -> None:
    factors = jnp.array([1.0, -2.0, 0.5])
    stack = jax.tree.map(lambda x: factors.reshape(-1, *[1] * x.ndim) * x, params())
    rates = jnp.array([0.1, 0.2, 0.3])

    def train(tree: Any, rate: Any) -> Any:
        return trained(ours(lr=rate), tree, 2)[0]

    found = jax.vmap(train)(stack, rates)
    for i in range(3):
        alone = train(jax.tree.map(lambda x, i=i: x[i], stack), rates[i])
        assert difference(jax.tree.map(lambda x, i=i: x[i], found), alone) < 3e-7


def test_matrices_and_reductions_under_vmap() -> None:
    made = rulec.jax.transform("muon", lr=0.1)
    tree = {"w": jnp.stack([jnp.eye(4) + 0.1, 2 * jnp.eye(4) - 0.3])}
    grads = {"w": jnp.stack([jnp.arange(16.0).reshape(4, 4) - 3, jnp.cos(jnp.arange(16.0)).reshape(4, 4)])}
    found, _ = jax.vmap(lambda g, p: made.update(g, made.init(p), p))(grads, tree)
    for i in range(2):
        own, grad = {"w": tree["w"][i]}, {"w": grads["w"][i]}
        assert difference({"w": found["w"][i]}, made.update(grad, made.init(own), own)[0]) < 1e-5


def test_either_branch_of_a_condition() -> None:
    transformation, tree = ours(), params()
    state, grads = transformation.init(tree), gradients(params(), 0)

    def maybe(do: Any) -> Any:
        return jax.lax.cond(
            do, lambda: transformation.update(grads, state, tree),
            lambda: (jax.tree.map(jnp.zeros_like, grads), state),
        )  # fmt: skip

    updates, after = jax.jit(maybe)(True)
    _, same = jax.jit(maybe)(False)
    assert difference(updates, transformation.update(grads, state, tree)[0]) < 3e-7
    assert (int(after.count), int(same.count)) == (1, 0)


def _loss_after(made: Callable[..., Transformation], tree: Any, checkpointed: bool = False) -> Callable[[Any], Any]:
    def loss(rate: Any) -> Any:
        transformation, now = made(lr=rate), tree
        state = transformation.init(now)
        update = jax.checkpoint(transformation.update) if checkpointed else transformation.update
        for step in range(2):
            updates, state = update(gradients(now, step), state, now)
            now = optax.apply_updates(now, updates)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(now))

    return loss


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_loss_has_a_derivative_by_the_learning_rate(checkpointed: bool) -> None:
    found = jax.jit(jax.grad(_loss_after(ours, params(), checkpointed)))(0.05)
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.array(x, jnp.float64), PARAMS)
        expected = jax.jit(jax.grad(_loss_after(theirs, tree)))(0.05)
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_derivatives_forward_and_of_second_order() -> None:
    """Of Python's own number as the rate, which stays one of 32 bits, plainly and batched."""
    tree = {"w": jnp.linspace(1, 2, 4)}
    state = rulec.jax.init("sgd", tree)

    def change(rate: Any) -> Any:
        return rulec.jax.transform("sgd", lr=rate).update(tree, state, tree)[0]["w"]

    def after(rate: Any) -> Any:
        return rulec.jax.step("sgd", tree, tree, state, lr=rate, donate=False)[0]["w"]

    assert difference(jax.jacfwd(change)(0.1), -tree["w"]) == 0
    assert difference(jax.jacrev(after)(0.1), -tree["w"]) == 0
    assert difference(jax.jacfwd(after)(0.1), -tree["w"]) == 0
    curvature = jax.hessian(lambda rate: jnp.sum(change(rate) ** 2))(0.1)
    assert float(curvature) == pytest.approx(float(2 * jnp.sum(tree["w"] ** 2)))


def test_rates_alone_may_be_traced_of_large_leaves() -> None:
    """What differentiates or batches a step does so with XLA's code, never with a kernel that it cannot look into."""
    tree = {"w": jnp.linspace(-1, 2, 1 << 15)}
    state = rulec.jax.init("sgd", tree)

    def after(rate: Any) -> Any:
        return rulec.jax.step("sgd", tree, tree, state, lr=rate, donate=False)[0]["w"]

    assert difference(jax.vmap(after)(jnp.array([0.5, 0.25])), jnp.stack([0.5 * tree["w"], 0.75 * tree["w"]])) == 0
    assert difference(jax.jacfwd(after)(0.1), -tree["w"]) == 0


def test_derivatives_reach_a_schedule() -> None:
    """It closes over what is differentiated, eagerly and under jit, and nothing keeps that."""
    tree = {"w": jnp.linspace(1, 2, 4)}
    state = rulec.jax.init("sgd", tree)._replace(count=jnp.int32(2))

    def change(rate: Any) -> Any:
        made = rulec.jax.transform("sgd", lr=lambda count: rate * (count + 1))
        made.init(tree)
        return made.update(tree, state, tree)[0]["w"]

    with jax.checking_leaks():
        assert difference(jax.jit(jax.jacrev(change))(0.1), -3 * tree["w"]) < 1e-6
    assert difference(jax.jacrev(change)(0.1), -3 * tree["w"]) < 1e-6
    assert difference(jax.jacfwd(change)(0.1), -3 * tree["w"]) < 1e-6


def test_a_schedule_may_mean_something_else_in_another_trace() -> None:
    """The same function over a variable that holds what is traced, first in one jit and then in another."""
    held: list[Any] = []
    tree = {"w": jnp.ones(3)}

    def schedule(count: Any) -> Any:
        return held[-1] * (count + 1)

    def change(rate: Any) -> Any:
        held.append(rate)
        transformation = rulec.jax.transform("sgd", lr=schedule)
        return transformation.update(tree, transformation.init(tree), tree)[0]["w"][0]

    def change_at(rate: Any, tree: Any) -> Any:
        held.append(rate)
        transformation = rulec.jax.transform("sgd", lr=schedule)
        return transformation.update(tree, transformation.init(tree), tree)[0]["w"][0]

    assert float(jax.jit(change_at)(0.5, tree)) == -0.5
    assert float(jax.jit(change_at)(jnp.float16(0.25), tree)) == -0.25
    held.append(2.0)
    assert float(change(3.0)) == -3.0


def test_shapes_are_found_without_computing() -> None:
    transformation = ours()
    shapes = jax.eval_shape(transformation.init, params())
    state = transformation.init(params())
    assert structure(shapes) == structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def test_users_may_donate() -> None:
    transformation, tree = ours(), params()

    @jax.jit
    def plain(tree: Any, state: Any) -> Any:
        updates, state = transformation.update(gradients(tree, 0), state, tree)
        return optax.apply_updates(tree, updates), state

    state = transformation.init(tree)
    expected, _ = plain(tree, state)
    found, _ = jax.jit(plain, donate_argnums=(0, 1))(tree, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((tree, state)))
    assert difference(found, expected) < 3e-7


# The state


def test_a_state_is_of_one_type_from_the_first_step_on() -> None:
    tree = {"a": jnp.ones((2, 3)) * 2.0, "weak": jnp.asarray(1.0), "number": 2.0}
    for made in (ours(), rulec.jax.transform("prodigy")):
        state = made.init(tree)
        _, after = made.update(jax.tree.map(lambda x: jnp.ones(jnp.shape(x)), tree), state, tree)
        assert structure(state) == structure(after)
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert old.aval == new.aval
            assert not old.weak_type
            assert old.dtype in (jnp.float32, jnp.int32)


def _pickled(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))  # noqa: S301 - our own


@pytest.mark.parametrize("through", [_pickled, copy.copy, copy.deepcopy, lambda x: x._replace(count=x.count)])
def test_a_state_is_a_named_tuple(through: Callable[[Any], Any]) -> None:
    state = ours().init(params())
    found = through(state)
    assert type(found) is type(state)
    assert found._fields == ("count", "m", "v")
    assert structure(found) == structure(state)
    assert difference(found, state) == 0
    ours().update(gradients(params(), 0), found, params())


def test_what_optax_finds_in_a_state() -> None:
    state = optax.chain(optax.clip(1.0), ours()).init(params())
    assert optax.tree_utils.tree_get(state, "count") == 0
    assert optax.tree_utils.tree_get(state, "m").keys() == PARAMS.keys()
    later = optax.tree_utils.tree_set(state, count=jnp.int32(7))
    assert optax.tree_utils.tree_get(later, "count") == 7
    cast = optax.tree_utils.tree_cast(state[1].m, jnp.bfloat16)
    assert cast["a"].dtype == jnp.bfloat16


# How users may have set up JAX


def test_strict_promotion() -> None:
    with jax.numpy_dtype_promotion("strict"):
        for rule in ("adamw", "adafactor", "muon"):
            made = rulec.jax.transform(rule, lr=0.03, tags={})
            tree = params("bfloat16")
            updates, _ = jax.eval_shape(lambda tree, made=made: made.update(tree, made.init(tree), tree), tree)
            assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(jax.checking_leaks, marks=pytest.mark.slow),
        jax.disable_jit,
        lambda: jax.debug_nans(True),
    ],
)
def test_modes_for_debugging(mode: Callable[[], Any]) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3)}
    expected = ours().update(gradients(tree, 0), ours().init(tree), tree)[0]
    with mode():
        found, _ = ours().update(gradients(tree, 0), ours().init(tree), tree)
        made = functools.partial(rulec.jax.transform, "adamw", eps=1e-7)  # of no other test's names
        jax.jit(lambda rate: made(lr=rate).update(gradients(tree, 0), made(lr=rate).init(tree), tree)[0])(0.1)
    assert difference(found, expected) < 3e-7


def test_of_64_bits_within_32_and_back() -> None:
    """The same rule in one process, where JAX is allowed 64 bits for a while."""
    made = ours()
    narrow = made.update(gradients(params(), 0), made.init(params()), params())[0]
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.array(x, jnp.float64), PARAMS)
        grads = jax.tree.map(lambda x: x.astype(jnp.float64), gradients(params(), 0))
        state = made.init(tree)
        found, state = made.update(grads, state, tree)
        other = theirs()
        expected, _ = other.update(grads, other.init(tree), tree)
        assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float64"}
        assert difference(found, expected) < 1e-12
    assert difference(made.update(gradients(params(), 0), made.init(params()), params())[0], narrow) == 0
    assert difference(narrow, found) < 5e-7
    assert np.asarray(state.count) == 1
