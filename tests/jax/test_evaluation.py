"""The parameters at which a model is to be evaluated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax import contrib

import rulec
import rulec.jax
import rulec.torch
from rulec.errors import HyperError, RuleError, StateMismatch, TensorError
from tests.jax.training import PARAMS, difference, gradients, params, trained

AVERAGED = rulec.load("ema")(rulec.load("adamw"))


@pytest.mark.slow
def test_of_schedule_free_as_in_optax() -> None:
    tree, state = trained(rulec.jax.transform("schedule_free_adamw", lr=0.05), params())
    other, moments = trained(contrib.schedule_free_adamw(0.05), params())
    found = rulec.jax.eval_params("schedule_free_adamw", tree, state, lr=0.05)
    assert difference(found, contrib.schedule_free_eval_params(moments, other), PARAMS) < 3e-5
    assert difference(found, tree, PARAMS) > 0.01


@pytest.mark.parametrize(
    ("name", "moment", "in_torch"),
    [
        pytest.param("schedule_free_adamw", "beta1", {"betas": (0.8, 0.999)}, marks=pytest.mark.slow),
        ("schedule_free_sgd", "momentum", {"momentum": 0.8}),
    ],
)
def test_of_schedule_free_as_in_torch(name: str, moment: str, in_torch: dict[str, Any]) -> None:
    """With warm-up, and a momentum of its own, in 64 bits."""
    hyper: dict[str, Any] = {"lr": 0.05, "warmup_steps": 3, moment: 0.8}
    with jax.enable_x64(True):
        start = jax.tree.map(lambda x: jnp.array(x, jnp.float64), PARAMS)
        tree, state = trained(rulec.jax.transform(name, **hyper), start)
        found = rulec.jax.eval_params(name, tree, state, **hyper)
        tensors = [torch.tensor(np.array(x)) for x in jax.tree.leaves(start)]
        optimizer: Any = rulec.torch.optimizer(name)(tensors, lr=0.05, warmup_steps=3, **in_torch)
        now: Any = start
        for i in range(4):
            for tensor, grad in zip(tensors, jax.tree.leaves(gradients(now, i)), strict=True):
                tensor.grad = torch.tensor(np.array(grad))
            optimizer.step()
            now = jax.tree.unflatten(jax.tree.structure(start), [jnp.asarray(t.numpy()) for t in tensors])
        assert difference(tree, now, PARAMS) < 1e-6
        optimizer.eval()
        expected = [t.numpy() for t in tensors]
        assert difference(jax.tree.leaves(found), expected, jax.tree.leaves(PARAMS)) < 1e-6
        assert difference(found, tree, PARAMS) > 0.01


def test_an_average_is_exchanged_bit_for_bit() -> None:
    tree, state = trained(rulec.jax.transform(AVERAGED), params())
    found = rulec.jax.eval_params(AVERAGED, tree, state)
    assert difference(found, state.average) == 0
    assert difference(found, tree) > 0
    assert difference(rulec.jax.eval_params(AVERAGED, tree, state), found) == 0


def test_nothing_is_moved() -> None:
    tree, state = trained(rulec.jax.transform("schedule_free_adamw"), params())
    before = [np.array(leaf) for leaf in jax.tree.leaves((tree, state))]
    eager = rulec.jax.eval_params("schedule_free_adamw", tree, state)
    traced = jax.jit(lambda p, s: rulec.jax.eval_params("schedule_free_adamw", p, s))(tree, state)
    assert difference(traced, eager) < 1e-6
    assert all((x == y).all() for x, y in zip(before, jax.tree.leaves((tree, state)), strict=True))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), (tree, state), (tree, state))
    both = jax.vmap(lambda p, s: rulec.jax.eval_params("schedule_free_adamw", p, s))(*stacked)
    assert difference(jax.tree.map(lambda x: x[1], both), eager) < 1e-6


def test_before_the_first_step_it_is_where_training_starts() -> None:
    state = rulec.jax.init("schedule_free_adamw", params())
    assert difference(rulec.jax.eval_params("schedule_free_adamw", params(), state), params()) == 0


def test_a_function_has_the_value_of_the_last_step() -> None:
    """beta1 was 0.8 in the step that was the last one, and is 0.4 from then on."""

    def beta1(count: Any) -> Any:
        return jnp.where(count < 2, 0.8, 0.4)

    rule = "schedule_free_adamw"
    tree, state = trained(rulec.jax.transform(rule, beta1=beta1), params(), 2)
    found = rulec.jax.eval_params(rule, tree, state, beta1=beta1)
    assert difference(found, rulec.jax.eval_params(rule, tree, state, beta1=0.8)) < 1e-6
    traced = jax.jit(lambda p, s: rulec.jax.eval_params(rule, p, s, beta1=beta1))(tree, state)
    assert difference(traced, found) < 1e-6
    assert difference(found, tree, PARAMS) > 0.01


def test_leaves_of_several_rules_go_each_its_own_way() -> None:
    rule = rulec.partition({"a": AVERAGED, "...": "sgd"})
    tree, state = trained(rulec.jax.transform(rule, lr=0.1), params())
    found = rulec.jax.eval_params(rule, tree, state, lr=0.1)
    assert difference(found["a"], state.average["a"]) == 0
    assert difference(found["a"], tree["a"]) > 0
    assert difference(found["b"], tree["b"]) == 0


COUNTED = rulec.parse("""
name: Counted
hyper: {lr: 0.5}
state: {n: {init: 0, per: tensor}}
step: |
  n = n + sum(g)
  p = p - lr*g
evaluate: p/4 + n
""")

SUMMED = rulec.parse("""
name: Summed
state: {n: {init: 0, per: tensor}}
step: |
  n = n + 1
  direction = n*g
""")


def test_with_the_numbers_of_each_leaf() -> None:
    """Two of three leaves are evaluated elsewhere; all have a number of their own, kept in one vector."""
    rule = rulec.partition({"b": SUMMED, "...": COUNTED})
    start = {"a": jnp.full(3, 8.0), "b": jnp.full(2, 16.0), "c": jnp.full(4, 32.0)}
    tree, state = start, rulec.jax.init(rule, start)
    for _ in range(2):
        grads = jax.tree.map(jnp.ones_like, tree)
        tree, state = rulec.jax.step(rule, tree, grads, state, lr=0.5, donate=False)
    found = rulec.jax.eval_params(rule, tree, state, lr=0.5)
    assert found["a"].tolist() == pytest.approx([(8 - 1) / 4 + 2 * 3] * 3)
    assert found["b"].tolist() == tree["b"].tolist()
    assert found["c"].tolist() == pytest.approx([(32 - 1) / 4 + 2 * 4] * 4)


def test_dtypes_stay() -> None:
    tree = params("bfloat16")
    state = rulec.jax.init("schedule_free_adamw", tree, state_dtype="float32")
    tree, state = rulec.jax.step("schedule_free_adamw", tree, gradients(tree, 0), state)
    found = rulec.jax.eval_params("schedule_free_adamw", tree, state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"bfloat16"}


def test_what_is_refused() -> None:
    state = rulec.jax.init("schedule_free_adamw", params())
    with pytest.raises(RuleError, match=r"^Adam is evaluated where it is trained: it has no evaluate$"):
        rulec.jax.eval_params("adam", params(), rulec.jax.init("adam", params()))
    with pytest.raises(StateMismatch, match="the state is a ScaleByAdamState without 'z', which ScheduleFreeAdamW"):
        rulec.jax.eval_params("schedule_free_adamw", params(), optax.scale_by_adam().init(params()))
    with pytest.raises(HyperError, match=r"^beta1=1 of ScheduleFreeAdamW must be above 0 and below 1$"):
        rulec.jax.eval_params("schedule_free_adamw", params(), state, beta1=1)
    with pytest.raises(TensorError, match=r"^the parameter a is of int32"):
        rulec.jax.eval_params("schedule_free_adamw", {**params(), "a": jnp.ones(3, int)}, state)
