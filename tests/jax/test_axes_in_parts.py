"""Roles of axes beside other features: part trees of optax, weights of 16 bits, passes, `vmap` and eager steps."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from rulec.errors import TensorError

KERNEL = ("inputs", "outputs")
AXES = {"*kernel": KERNEL, "b/*": KERNEL, "c/conv": ("window", "window", "inputs", "outputs")}


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": {"kernel": (4, 6)}, "b": {"kernel": (6, 3)}, "c": {"conv": (2, 2, 3, 4)}}
    return {
        layer: {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in of.items()}
        for layer, of in shapes.items()
    }


def test_patterns_and_tags_of_a_whole_tree_are_for_the_parts_of_multi_transform() -> None:
    def part(rule: str) -> Any:
        return rulec.jax.transform(rule, lr=0.05, axes=AXES, tags={"b/kernel": ("head",)})

    params, grads = tree(), tree(1)
    tx = optax.multi_transform({"x": part("muon"), "y": part("adafactor")}, {"a": "x", "b": "y", "c": "x"})
    updates, _ = tx.update(grads, tx.init(params), params)
    for layer, rule in {"b": "adafactor", "c": "muon"}.items():
        axes = {f"{layer}/{name}": AXES.get(f"{layer}/{name}", KERNEL) for name in params[layer]}
        alone = rulec.jax.transform(rule, lr=0.05, axes=axes, tags={})
        one = {layer: params[layer]}
        expected, _ = alone.update({layer: grads[layer]}, alone.init(one), one)
        jax.tree.map(np.testing.assert_array_equal, updates[layer], expected[layer])
    with pytest.raises(TensorError, match="the tags of Muon name 'd/kernel'"):
        rulec.jax.transform("muon", axes=AXES, tags={"d/kernel": ("head",)}).init(params)


def trained(rule: Any, turned: bool, dtype: Any = jnp.float32, steps: int = 2, **options: Any) -> Any:
    """One kernel after some steps in the layout of torch, from that layout or from that of Flax."""

    def seen(seed: int) -> dict[str, Any]:
        x = np.random.default_rng(seed).normal(size=(6, 4))
        return {"kernel": jnp.asarray(x.T if turned else x, dtype)}

    def gradient(params: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.cos(x) * y, params, seen(1))

    axes: Any = {"*kernel": KERNEL} if turned else {"*kernel": None}
    params = seen(0)
    state = rulec.jax.init(rule, params, axes=axes, tags={}, **options)
    inputs = {"gradient": gradient} if rulec.load(rule).passes else {}
    for _ in range(steps):
        grads = gradient(params)
        params, state = rulec.jax.step(rule, params, grads, state, axes=axes, tags={}, lr=0.05, **options, **inputs)
    array = np.asarray(params["kernel"].astype(jnp.float32))
    return array.T if turned else array


@pytest.mark.parametrize(
    "weights",
    ["split", *(pytest.param(w, marks=pytest.mark.another) for w in ("split24", "master", "kahan", "stochastic"))],
)
def test_weights_of_16_bits_have_roles(weights: str) -> None:
    plain, turned = (trained("muon", kind, jnp.bfloat16, weights=weights) for kind in (False, True))
    assert np.array_equal(plain, turned)


@pytest.mark.parametrize("rule", ["sam(muon)", pytest.param("looksam(adafactor, k=2)", marks=pytest.mark.another)])
def test_points_of_passes_have_roles(rule: str) -> None:
    assert np.array_equal(trained(rule, False), trained(rule, True))


@pytest.mark.parametrize("roles", [KERNEL, ("batch", "outputs")])
def test_a_step_with_roles_is_mapped(roles: tuple[str, str]) -> None:
    axes = {"kernel": roles}
    params, grads = jnp.stack([tree(i)["a"]["kernel"] for i in range(3)]), jnp.ones((3, 4, 6)).at[:, 0].set(2.0)

    def moved(param: Any, grad: Any) -> Any:
        state = rulec.jax.init("muon", {"kernel": param}, axes=axes, tags={})
        new, _ = rulec.jax.step("muon", {"kernel": param}, {"kernel": grad}, state, axes=axes, tags={}, donate=False)
        return new["kernel"]

    expected = jnp.stack([moved(*pair) for pair in zip(params, grads, strict=True)])
    np.testing.assert_allclose(jax.vmap(moved)(params, grads), expected, rtol=1e-5, atol=1e-6)


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch @ params["a"]["kernel"]) @ params["b"]["kernel"]) ** 2)


@pytest.mark.parametrize("rule", ["muon", pytest.param("adafactor", marks=pytest.mark.another)])
def test_an_eager_step_has_roles(rule: str) -> None:
    params = {layer: tree()[layer] for layer in ("a", "b")}
    axes, batch = {"a/*": ("batch", "outputs"), "b/*": KERNEL}, jnp.ones((5, 4))
    eager = rulec.jax.eager_step(loss, rule, axes=axes, tags={})
    ours, state = jax.tree.map(jnp.copy, params), eager.init(params)
    theirs, deferred = params, rulec.jax.init(rule, params, axes=axes, tags={})
    for _ in range(2):
        grads = jax.grad(loss)(theirs, batch)
        theirs, deferred = rulec.jax.step(rule, theirs, grads, deferred, axes=axes, tags={}, donate=False)
        ours, state, _ = eager.step(ours, state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, deferred)


def test_eager_steps_name_a_kernel_whose_roles_are_unknown_once() -> None:
    params = {layer: tree()[layer] for layer in ("a", "b")}
    eager = rulec.jax.eager_step(loss, "muon", tags={}, seed=77)
    with pytest.warns(UserWarning, match=r"takes the axes of a/kernel.*give rulec\.jax\.eager_step axes="):
        state = eager.init(params)
    scan = rulec.jax.eager_scan(
        lambda layer, x: jnp.tanh(x @ layer["kernel"]), lambda rest, x, batch: jnp.mean(x), "muon", tags={}, seed=78
    )
    with pytest.warns(UserWarning, match="eager_scan takes all layers as torch keeps them"):
        scan.init({"layers": {"kernel": jnp.ones((2, 4, 4))}, "rest": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager.step(params, state, jnp.ones((5, 4)))
