"""Rules of the library that read layers, by the names of parameters: in torch, JAX and on arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import rulec
import rulec.array
import rulec.jax
import rulec.torch
from rulec.runtime.layers import layers_of
from tests.rules.measure import Trial, largest_difference
from tests.rules.printed_layers import Blocks
from tests.rules.runs import OracleRun

#: Parameters of a vision transformer, as timm calls them.
NAMES = (
    "cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "blocks.0.norm1.weight",
    "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc1.weight", "blocks.1.ls1.gamma", "norm.weight", "head.weight",
)  # fmt: skip

#: BAdam of Luo and others (2024): a layer for some steps, from the last on, with moments that begin anew.
BADAM = """
name: BAdam
summary: AdamW on one layer for some steps, then on the one before it, with states that begin anew.
hyper:
  lr: 1e-3
  beta1: 0.9
  beta2: 0.999
  eps: 1e-8
  weight_decay: 1e-2
  switch_every: {default: 50, min: 1, whole: true}
state: {m: 0, v: 0}
step: |
  k = (t - 1) % switch_every + 1
  if depth == depths - 1 - floor((t - 1)/switch_every) % depths:
    if k == 1:
      m = (1 - beta1)*g
      v = (1 - beta2)*g*g
    else:
      m = beta1*m + (1 - beta1)*g
      v = beta2*v + (1 - beta2)*g*g
    m_hat = m/(1 - beta1**k)
    sigma = sqrt(v)/sqrt(1 - beta2**k)
    p = p - lr*(m_hat/(sigma + eps) + weight_decay*p)
"""

RULES = ("adamw >> layerwise_rate", BADAM, "lisa(adamw, lisa_every=2, lisa_layers=1)")

STEPS = 6


def parameters() -> dict[str, Any]:
    made = np.random.default_rng(4)
    return {name: made.standard_normal((3, 2)) for name in NAMES}


def gradients(step: int) -> dict[str, Any]:
    made = np.random.default_rng(100 + step)
    return {name: made.standard_normal((3, 2)) for name in NAMES}


def on_arrays(rule: rulec.Rule) -> dict[str, Any]:
    params = parameters()
    optimizer = rulec.array.Optimizer(rule, params)
    for step in range(STEPS):
        optimizer.step(gradients(step))
    return params


@pytest.mark.parametrize("composed", RULES, ids=["layerwise_rate", "badam", "lisa"])
def test_torch_and_jax_agree_with_arrays(composed: str) -> None:
    rule = rulec.parse(composed) if composed == BADAM else rulec.load(composed)
    expected = on_arrays(rule)
    in_torch = {name: nn.Parameter(torch.tensor(p)) for name, p in parameters().items()}
    optimizer = rulec.torch.optimizer(rule)([*in_torch.items()])
    for step in range(STEPS):
        for name, grad in gradients(step).items():
            in_torch[name].grad = torch.tensor(grad)
        optimizer.step()
    for name in NAMES:
        np.testing.assert_allclose(in_torch[name].detach().numpy(), expected[name], rtol=1e-13, err_msg=name)
    if "lisa" in composed:
        return  # JAX numbers the leaves in another order, so others are drawn
    in_jax: Any = {name: jnp.asarray(p, jnp.float32) for name, p in parameters().items()}
    state = rulec.jax.init(rule, in_jax)
    for step in range(STEPS):
        grads = {name: jnp.asarray(g, jnp.float32) for name, g in gradients(step).items()}
        in_jax, state = rulec.jax.step(rule, in_jax, grads, state)
    for name in NAMES:
        np.testing.assert_allclose(np.asarray(in_jax[name]), expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_layer_for_some_steps() -> None:
    """Beside torch's AdamW, made anew for each layer."""
    hyper = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.07, "switch_every": 3}
    trial = Trial("float64")
    ours = OracleRun(rulec.parse(BADAM), trial.params, "float64", hyper)
    assert largest_difference(ours, Blocks(trial.params), trial, hyper).relative < 1e-12


def test_rates_of_layers() -> None:
    """The factors that timm's `param_groups_layer_decay` gives these parameters of a model of two blocks."""
    factors = [0.75**3, 0.75**3, 0.75**3, 0.75**3, 0.75**2, 0.75**2, 0.75, 0.75, 1.0, 1.0]
    layers = layers_of(NAMES, [()] * len(NAMES))
    assert [0.75 ** (layer[1] - layer[0]) for layer in layers if layer] == factors
    params, start = parameters(), parameters()
    rulec.array.Optimizer("sgd >> layerwise_rate", params, lr=1).step({name: np.ones((3, 2)) for name in NAMES})
    for name, factor in zip(NAMES, factors, strict=True):
        np.testing.assert_allclose(start[name] - params[name], factor, rtol=1e-12)


def test_layers_of_an_interval() -> None:
    """As many layers as are asked for, all of them in the long run, and embeddings and the output always."""
    names = ["embed", *(f"layers/{i}/{leaf}" for i in range(5) for leaf in "ab"), "head"]
    params = {name: np.zeros(2) for name in names}
    optimizer = rulec.array.Optimizer("lisa(sgd, lisa_layers=3, lisa_every=2)", params, lr=1, seed=2)
    sets = []
    for step in range(80):
        before = {name: p.copy() for name, p in params.items()}
        optimizer.step({name: np.ones(2) for name in names})
        moved = [name for name in names if (params[name] != before[name]).all()]
        assert (moved[0], moved[-1]) == ("embed", "head")
        layers = moved[1:-1]
        assert {name[:-1] + leaf for name in layers for leaf in "ab"} == {*layers}
        assert len(layers) == 6
        if step % 2:
            assert layers == sets[-1]
        else:
            sets.append(layers)
    assert len({tuple(each) for each in sets}) == 10


def test_a_model_of_fewer_layers_trains_all() -> None:
    params = {f"layers/{i}": np.zeros(2) for i in range(2)}
    optimizer = rulec.array.Optimizer("lisa(sgd, lisa_layers=4)", params, lr=1)
    for _ in range(5):
        optimizer.step({name: np.ones(2) for name in params})
    assert all((p == -5).all() for p in params.values())
