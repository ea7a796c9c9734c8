"""Models of Flax and Haiku: the roles of their parameters, and their optimizers beside torch's and optax's."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import rulec
import rulec.jax
from rulec.errors import HyperError, TensorError


def test_muon_of_a_dense_layer_of_flax_is_torch_s() -> None:
    """Torch keeps the layer as (outputs, inputs), Flax as (inputs, outputs)."""
    gradient = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    weight.grad = torch.tensor(gradient)
    torch.optim.Muon([weight], lr=0.1, weight_decay=0.0).step()
    params = {"kernel": jnp.zeros((16, 64))}
    tx = rulec.jax.transform("muon", lr=0.1, weight_decay=0.0, axes={"*kernel": ("inputs", "outputs")})
    updates, _ = tx.update({"kernel": jnp.array(gradient.T)}, tx.init(params), params)
    theirs = weight.detach().numpy()
    assert float(np.abs(np.asarray(updates["kernel"]).T - theirs).max()) <= 5e-2 * float(np.abs(theirs).max())
    assert float(np.linalg.norm(updates["kernel"])) == pytest.approx(float(np.linalg.norm(theirs)), rel=1e-2)


def test_contrib_muon_with_axes_is_optax_s_with_numbers_of_axes() -> None:
    params = nnx.state(nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)), nnx.Param)
    grads = jax.tree.map(lambda x: jnp.cos(3 * x + 1), params)
    axes = rulec.jax.flax_axes(params)

    def numbers(tree: Any) -> Any:
        named = {"query": ((0,), (1, 2)), "key": ((0,), (1, 2)), "value": ((0,), (1, 2)), "out": ((0, 1), (2,))}

        def of(path: Any, leaf: Any) -> Any:
            words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            return optax.contrib.MuonDimensionNumbers(*named[words[0]]) if words[1] == "kernel" else None

        return jax.tree_util.tree_map_with_path(of, tree)

    theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    ours = rulec.jax.contrib.muon(0.1, axes=axes)
    expected, _ = theirs.update(grads, theirs.init(params), params)
    updates, _ = ours.update(grads, ours.init(params), params)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(a - b).max()) <= 2e-5 * float(jnp.abs(b).max())


def test_every_kernel_of_flax_s_attention_goes_to_muon_and_no_bias() -> None:
    params = nnx.state(nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)), nnx.Param)
    routed = rulec.jax.routing("muon", params, tags={}, axes=rulec.jax.flax_axes(params))
    assert {path: rule == "Muon" for path, rule in routed.items()} == {path: "kernel" in path for path in routed}
    assert len(routed) == 8


def test_drop_ins_take_axes() -> None:
    """LAMB's norms are of each layer of a stack."""
    axes = {"*kernel": ("batch", "inputs", "outputs")}
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.float32)
    params = {"kernel": jnp.ones((3, 4, 5)) * jnp.arange(1.0, 4.0)[:, None, None]}
    tx = rulec.jax.lamb(0.1, axes=axes)
    updates, _ = tx.update({"kernel": grads}, tx.init(params), params)
    theirs = optax.lamb(0.1)
    for i in range(3):
        one = {"kernel": params["kernel"][i]}
        expected, _ = theirs.update({"kernel": grads[i]}, theirs.init(one), one)
        assert np.allclose(updates["kernel"][i], expected["kernel"], rtol=1e-5)
    numbers = optax.contrib.MuonDimensionNumbers()
    with pytest.raises(HyperError, match="say the same: leave one out"):
        rulec.jax.contrib.muon(0.1, axes=axes, muon_weight_dimension_numbers={"kernel": numbers})


# The roles that models say


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.linear = nnx.LoRALinear(16, 64, lora_rank=2, rngs=rngs)
        self.conv = nnx.Conv(3, 8, (3, 5), rngs=rngs)
        self.back = nnx.ConvTranspose(8, 3, (3,), transpose_kernel=True, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.heads = nnx.Einsum("bshd,hde->bshe", (4, 4, 6), (4, 6), rngs=rngs)
        self.cell = nnx.GRUCell(16, 8, rngs=rngs)
        self.stack = nnx.vmap(lambda r: nnx.Linear(16, 8, rngs=r))(rngs.split(3))


def test_modules_of_nnx_say_the_roles() -> None:
    axes = rulec.jax.flax_axes(Block(nnx.Rngs(0)))
    qkv, out = ("inputs", "outputs", "outputs"), ("inputs", "inputs", "outputs")
    expected = {
        "embed/embedding": ("outputs", "inputs"),
        "attention/query/kernel": qkv, "attention/query/bias": ("outputs", "outputs"), "attention/out/kernel": out,
        "linear/kernel": ("inputs", "outputs"), "linear/lora/lora_a": ("inputs", "outputs"),
        "conv/kernel": ("window", "window", "inputs", "outputs"), "back/kernel": ("window", "outputs", "inputs"),
        "norm/scale": ("outputs",), "heads/kernel": ("batch", "inputs", "outputs"), "heads/bias": ("batch", "outputs"),
        "cell/dense_i/kernel": ("inputs", "outputs"), "stack/kernel": ("batch", "inputs", "outputs"),
        "stack/bias": ("batch", "outputs"),
    }  # fmt: skip
    assert {path: axes.get(path) for path in expected} == expected
    named = nnx.to_flat_state(nnx.state(Block(nnx.Rngs(0)), nnx.Param))
    assert {"/".join(map(str, path)) for path, _ in named} == axes.keys()


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(16, use_bias=False, name="down")(nn.Dense(32, name="up")(h)), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"params": 0}
        x, _ = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)(name="layers")(x, None)
        return nn.DenseGeneral(7, axis=(-2, -1), name="last")(nn.Conv(8, (3,))(x))


def test_modules_of_linen_say_the_roles_also_of_stacked_layers() -> None:
    model, x = Stacked(), jnp.zeros((1, 6, 16))
    axes = rulec.jax.flax_axes(model, x)
    expected = {
        "layers/MultiHeadDotProductAttention_0/query/kernel": ("batch", "inputs", "outputs", "outputs"),
        "layers/MultiHeadDotProductAttention_0/out/kernel": ("batch", "inputs", "inputs", "outputs"),
        "layers/LayerNorm_0/scale": ("batch", "outputs"), "layers/down/kernel": ("batch", "inputs", "outputs"),
        "layers/up/bias": ("batch", "outputs"), "Conv_0/kernel": ("window", "inputs", "outputs"),
        "last/kernel": ("inputs", "inputs", "outputs"), "last/bias": ("outputs",),
    }  # fmt: skip
    assert {path: axes.get(path) for path in expected} == expected
    assert axes["params/last/kernel"] == axes["last/kernel"]  # the whole dict of variables is known as well
    params = model.init(jax.random.key(0), x)["params"]
    by_names = rulec.jax.flax_axes(params, stacked="layers/**", axes={"last/*": axes["last/kernel"]})
    assert {path: by_names[path] for path in expected if "last" not in path} == {
        path: roles for path, roles in expected.items() if "last" not in path
    }


def test_parameters_that_tell_no_roles_are_refused_by_name() -> None:
    params = {"mix": {"kernel": jnp.zeros((2, 3, 5))}}
    with pytest.raises(TensorError, match=re.escape("the axes of mix/kernel, of shape (2, 3, 5), are: give")):
        rulec.jax.flax_axes(params)
    assert rulec.jax.flax_axes(params, stacked="mix/*") == {"mix/kernel": ("batch", "inputs", "outputs")}
    roles = ("inputs", "batch", "outputs")
    assert rulec.jax.flax_axes(params, axes={"mix/*": roles}) == {"mix/*": roles}


def test_parameters_of_haiku_say_the_roles() -> None:
    shapes = {
        "mlp/~/linear_0": {"w": (12, 8), "b": (8,)}, "conv2_d": {"w": (3, 3, 3, 4), "b": (4,)},
        "conv2_d_transpose": {"w": (3, 3, 6, 4), "b": (6,)}, "embed": {"embeddings": (9, 8)},
        "gru": {"w_i": (8, 15), "w_h": (5, 15), "b": (15,)}, "layer_norm": {"scale": (12,), "offset": (12,)},
        "__layer_stack_no_per_layer/linear": {"w": (3, 8, 7), "b": (3, 7)}, "mine": {"table": (4, 4)},
    }  # fmt: skip
    params = {module: {name: jnp.zeros(shape) for name, shape in each.items()} for module, each in shapes.items()}
    axes = rulec.jax.haiku_axes(params)
    window = ("window", "window")
    assert axes["mlp/~/linear_0/w"] == axes["gru/w_i"] == ("inputs", "outputs")
    assert (axes["conv2_d/w"], axes["conv2_d_transpose/w"]) == (
        (*window, "inputs", "outputs"), (*window, "outputs", "inputs"),
    )  # fmt: skip
    assert axes["__layer_stack_no_per_layer/linear/w"] == ("batch", "inputs", "outputs")
    assert axes["__layer_stack_no_per_layer/linear/b"] == ("batch", "outputs")
    assert "mine/table" not in axes
    assert axes["embed/embeddings"] == ("outputs", "inputs")
