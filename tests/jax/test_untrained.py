"""Leaves that a partition leaves as they are, of any dtype, and masks that are modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

import rulec  # noqa: E402
import rulec.jax  # noqa: E402
from rulec.errors import TensorError  # noqa: E402

PARTITION = rulec.partition({"base/**": None, "...": rulec.part("adamw", lr=0.1)})

DTYPES = ["int8", "uint32", "int4", "bool", "float8_e4m3fn", "float8_e5m2", "complex64", "float32", "key"]


def tree(dtype: str) -> dict[str, Any]:
    values = [0, 1, 1]

    def base() -> Any:
        return jax.random.split(jax.random.key(0), 3) if dtype == "key" else jnp.array(values).astype(dtype)

    return {"base": {"codes": base(), "more": [base()]}, "lora": jnp.ones(3), "z": {"b": jnp.zeros(2)}}


def gradient(params: Any, kind: str) -> Any:
    trained: dict[str, Any] = {"lora": jnp.full(3, 0.5), "z": {"b": jnp.ones(2)}}
    beside = jax.tree.map(
        {
            "none": lambda x: None, "float0": lambda x: np.zeros(x.shape, jax.dtypes.float0), "itself": lambda x: x,
            "zeros": lambda x: jnp.zeros(x.shape), "a scalar": lambda x: jnp.zeros(()), "none above": lambda x: None,
        }[kind], params["base"],
    )  # fmt: skip
    return {"base": None if kind == "none above" else beside, **trained}


def same(one: Any, other: Any) -> bool:
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (one, other)]
    return bool(jnp.array_equal(*plain))


KINDS = ["none", "none above", "float0", "itself", "zeros", "a scalar"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_leaves_of_any_dtype_stay_whatever_their_gradients(dtype: str, kind: str) -> None:
    """The others take the steps of optax's AdamW, as they do in a tree of their own."""
    params = tree(dtype)
    grads = gradient(params, kind)
    trained = {name: params[name] for name in ("lora", "z")}
    peer = optax.adamw(0.1, weight_decay=0.01)
    expected, _ = peer.update({name: grads[name] for name in trained}, peer.init(trained), trained)

    tx = rulec.jax.transform(PARTITION, weight_decay=0.01)
    updates, state = tx.update(grads, tx.init(params), params)
    for name in trained:
        for ours, theirs in zip(jax.tree.leaves(updates[name]), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert len(jax.tree.leaves(state.m)) == 2
    is_none = kind.startswith("none")
    if is_none or dtype == "key":
        assert jax.tree.leaves(updates["base"]) == []
    else:
        moved = optax.apply_updates(params, updates)
        assert moved["base"]["codes"].dtype == params["base"]["codes"].dtype
        assert same(moved["base"]["codes"], params["base"]["codes"])


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_hands_them_on(dtype: str, kind: str) -> None:
    params = tree(dtype)
    grads = gradient(params, kind)
    state = rulec.jax.init(PARTITION, params)
    alone = {name: params[name] for name in ("lora", "z")}
    rest = {name: grads[name] for name in alone}
    expected, _ = rulec.jax.step("adamw", alone, rest, rulec.jax.init("adamw", alone), lr=0.1, donate=False)
    for step in (rulec.jax.step, jax.jit(partial(rulec.jax.step, PARTITION))):
        arguments = () if step is not rulec.jax.step else (PARTITION,)
        keywords = {"donate": False} if arguments else {}
        new, _ = step(*arguments, params, grads, state, **keywords)
        assert same(new["base"]["more"][0], params["base"]["more"][0])
        for name in alone:
            for ours, want in zip(jax.tree.leaves(new[name]), jax.tree.leaves(expected[name]), strict=True):
                np.testing.assert_array_equal(ours, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_has_what_is_trained(dtype: str, tmp_path: Path) -> None:
    params = tree(dtype)
    state = rulec.jax.init(PARTITION, params)
    params, state = rulec.jax.step(PARTITION, params, gradient(params, "none"), state)
    rulec.jax.save(tmp_path / "run.safetensors", PARTITION, params, state)
    again = rulec.jax.load(tmp_path / "run.safetensors", PARTITION, params)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    np.testing.assert_array_equal(again.m["lora"], state.m["lora"])


def test_shapes_are_enough_to_begin() -> None:
    for dtype in DTYPES:
        shapes = jax.eval_shape(lambda dtype=dtype: tree(dtype))
        assert rulec.jax.transform(PARTITION).init(shapes).m["lora"].shape == (3,)


def test_what_is_trained_is_checked_as_ever() -> None:
    params, tx = tree("int8"), rulec.jax.transform(PARTITION)
    state, grads = tx.init(params), gradient(tree("int8"), "none")
    with pytest.raises(TensorError, match="the gradient of lora is missing"):
        tx.update({**grads, "lora": None}, state, params)
    with pytest.raises(TensorError, match="the gradient of more is given, and there is no such parameter"):
        tx.update({**grads, "more": jnp.ones(3)}, state, params)
    with pytest.raises(TensorError, match="the parameter lora is of int32"):
        tx.init({**params, "lora": jnp.ones(3, jnp.int32)})
    with pytest.raises(TensorError, match="the parameter base/codes is of int8"):
        rulec.jax.transform("adamw").init(params)


@pytest.mark.peer
def test_a_mask_that_is_a_module_is_no_function() -> None:
    """As optax decides: a tree of truth values is a mask, whether or not its class can be called."""
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        w: Any
        b: Any

        def __call__(self, x: Any) -> Any:
            return self.w @ x + self.b

    params = Net(jnp.ones((2, 2)), jnp.ones(2))
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for given in (mask, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree), eqx.Partial(lambda tree: mask)):
        ours, theirs = (library.adamw(0.1, weight_decay=0.5, mask=given) for library in (rulec.jax, optax))
        for tx in (ours, theirs):
            updates, _ = tx.update(zeros, tx.init(params), params)
            np.testing.assert_allclose(updates.w, -0.05)
            np.testing.assert_allclose(updates.b, 0)
