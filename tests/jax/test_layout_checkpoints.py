"""Checkpoints of runs in several layouts: parameters and states lie in a file as torch keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec
import rulec.jax
from rulec.errors import StateMismatch


def saved_in_torch(file: Path, model: torch.nn.Module, rule: str) -> None:
    import rulec.torch

    optimizer = rulec.torch.optimizer(rule)([*model.named_parameters()], lr=0.01)
    for t in range(2):
        for k, p in enumerate(model.parameters()):
            p.grad = torch.tensor(np.random.default_rng(10 * t + k).normal(size=tuple(p.shape)))
        optimizer.step()
    rulec.torch.save(optimizer, file, parameters=True)


@pytest.mark.parametrize("rule", ["adamw", "soap", "normuon"])
def test_a_run_goes_on_across_layouts(rule: str, tmp_path: Path) -> None:
    """From torch to Flax's layout and back: states and parameters lie as torch keeps them in a file."""
    file, axes = tmp_path / "run.safetensors", {"*kernel": ("inputs", "outputs")}
    model = torch.nn.Linear(6, 6, dtype=torch.float64)
    saved_in_torch(file, model, rule)
    names = {"weight": "kernel"}
    with jax.enable_x64(True):
        shapes = {"kernel": jnp.zeros((6, 6)), "bias": jnp.zeros(6)}
        params = rulec.jax.load_params(file, shapes, names=names, axes=axes)
        assert np.array_equal(params["kernel"].T, model.weight.detach())
        options: Any = {"axes": axes, "tags": {}}
        state = rulec.jax.load(file, rule, params, names=names, lr=0.01, **options)
        again = tmp_path / "again.safetensors"
        rulec.jax.save(again, rule, params, state, parameters=True, lr=0.01, **options)
        grads = {"kernel": jnp.array(np.random.default_rng(9).normal(size=(6, 6))), "bias": jnp.ones(6)}
        new, _ = rulec.jax.step(rule, params, grads, state, lr=0.01, donate=False, **options)
        # torch's layout in JAX goes on from the same file
        plain = {"kernel": params["kernel"].T, "bias": params["bias"]}
        turned = {"kernel": grads["kernel"].T, "bias": grads["bias"]}
        quiet: Any = {"axes": {"*kernel": None}, "tags": {}}
        state = rulec.jax.load(again, rule, plain, lr=0.01, **quiet)
        other, _ = rulec.jax.step(rule, plain, turned, state, lr=0.01, donate=False, **quiet)
        assert float(jnp.abs(new["kernel"].T - other["kernel"]).max()) <= 1e-12
        with pytest.raises(StateMismatch, match="was saved with roles of its axes"):
            rulec.jax.load(again, rule, plain, lr=0.01, tags={})
        first = rulec.jax.init(rule, plain, **quiet)
        rulec.jax.save(again, rule, plain, first, lr=0.01, **quiet)
        with pytest.raises(StateMismatch, match="was saved without roles of its axes"):
            rulec.jax.load(again, rule, params, lr=0.01, **options)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_codes_of_a_stack_are_saved_and_go_on(rule: str, tmp_path: Path) -> None:
    file, axes = tmp_path / "run.safetensors", {"w": ("batch", "inputs", "outputs")}
    params = {"w": jnp.zeros((2, 96, 64))}
    options: Any = {"axes": axes, "tags": {}}
    state = rulec.jax.init(rule, params, state_dtype="dynamic8", **options)
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(2, 96, 64)), jnp.float32)}
    params, state = rulec.jax.step(rule, params, grads, state, **options)
    rulec.jax.save(file, rule, params, state, parameters=True, **options)
    loaded = rulec.jax.load(file, rule, params, state_dtype="dynamic8", **options)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        assert np.array_equal(old, new)
    again = rulec.jax.load_params(file, params, axes=axes)
    assert np.array_equal(again["w"], params["w"])
    layers = {"w": {str(i): jnp.zeros((64, 96)) for i in range(2)}}
    assert np.array_equal(rulec.jax.load_params(file, layers)["w"]["1"], params["w"][1].T)
