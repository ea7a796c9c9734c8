"""Drawn rules in frameworks' own shapes, beside the reference, with tensors that join late where there may be some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import BackendUnsupported
from rulec.testing.whole import TOLERANCE

Array = np.ndarray[Any, np.dtype[np.float64]]
Shapes = Sequence[tuple[int, ...]]


def _numbers(shapes: Shapes, seed: int) -> tuple[list[Array], list[list[Array]]]:
    """Parameters, and the gradients of four steps."""
    rng = np.random.default_rng(seed)
    params = [np.asarray(rng.normal(size=shape)) for shape in shapes]
    return params, [[np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(4)]


def _same(ours: Sequence[Array], theirs: Sequence[Array], text: str) -> None:
    for mine, wanted in zip(ours, theirs, strict=True):
        size = float(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)))
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=TOLERANCE * size, err_msg=text)


def follow_in_jax(text: str, shapes: Shapes, seed: int) -> None:
    """Every tensor has a gradient in every step, as JAX asks for. What JAX refuses by name is left out."""
    rule, (params, steps) = rulec.parse(text), _numbers(shapes, seed)
    reference = ReferenceOptimizer(rule, [p.copy() for p in params])
    with jax.enable_x64(True):
        try:
            leaves = [jnp.asarray(p) for p in params]
            state = rulec.jax.init(rule, leaves)
            for grads in steps:
                leaves, state = rulec.jax.step(rule, leaves, [jnp.asarray(g) for g in grads], state)
                reference.step(grads)
                _same([np.asarray(p) for p in leaves], reference.params, text)
        except BackendUnsupported:
            return


def follow_in_torch(text: str, shapes: Shapes, seed: int) -> None:
    """Some tensors have no gradient in the first and the third step."""
    rule, (arrays, steps) = rulec.parse(text), _numbers(shapes, seed)
    reference = ReferenceOptimizer(rule, [p.copy() for p in arrays])
    params = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in arrays]
    opt = rulec.torch.optimizer(rule)(params)
    for step, each in enumerate(steps):
        left = {0: 0, 2: 1}.get(step)
        grads = [None if len(each) > 1 and i % 2 == left else g for i, g in enumerate(each)]
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.from_numpy(g.copy())
        opt.step()
        reference.step(grads)
        _same([p.detach().numpy() for p in params], reference.params, text)
