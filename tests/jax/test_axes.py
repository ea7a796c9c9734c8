"""Axes of tensors of any rank under JAX, against optax's SM3; blocks against the same rule on arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import rulec
import rulec.jax
from tests.compiler.test_axes import BLOCKS, numbers

#: SM3 as optax writes it: a bound for each axis of a tensor of one to four dimensions.
SM3 = """
name: SM3
hyper: {lr: 0.1, momentum: 0.9, eps: 1e-8}
state:
  m: 0
  a0: {init: 0, per: axis(0)}
  a1: {init: 0, per: axis(1), if: ndim > 1}
  a2: {init: 0, per: axis(2), if: ndim > 2}
  a3: {init: 0, per: axis(3), if: ndim > 3}
step: |
  s = a0
  if ndim > 1:
    s = minimum(s, a1)
  if ndim > 2:
    s = minimum(s, a2)
  if ndim > 3:
    s = minimum(s, a3)
  s = s + g**2
  a0 = max(s, per=axis(0))
  if ndim > 1:
    a1 = max(s, per=axis(1))
  if ndim > 2:
    a2 = max(s, per=axis(2))
  if ndim > 3:
    a3 = max(s, per=axis(3))
  m = momentum*m + (1 - momentum)*where(s > 0, g*rsqrt(s + eps), 0)
  direction = m
"""


def stepped(transform: Any, start: Any, gradients: list[Any]) -> Any:
    params = jax.numpy.asarray(start)
    state = transform.init(params)
    for g in gradients:
        updates, state = transform.update(jax.numpy.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 4), (2, 3, 2, 4)], ids=str)
def test_sm3_of_any_rank_is_that_of_optax(shape: tuple[int, ...]) -> None:
    start, gradients = numbers(shape)
    with jax.enable_x64(True):
        ours = stepped(rulec.jax.transform(rulec.parse(SM3)), start, gradients)
        theirs = stepped(optax.sm3(0.1, momentum=0.9), start, gradients)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_blocks_as_on_arrays() -> None:
    start, gradients = numbers((4, 6))
    with jax.enable_x64(True):
        ours = stepped(rulec.jax.transform(rulec.parse(BLOCKS), size=8), start, gradients)
    mine = start.copy()
    opt = rulec.array.Optimizer(rulec.parse(BLOCKS), [mine], backend="numpy", size=8)
    for g in gradients:
        opt.step([g])
    np.testing.assert_allclose(ours, mine, rtol=1e-13, atol=1e-13)
