"""Functions of blocks of rows in rules: written in YAML and in Python, and computed by every library."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import rulec
import rulec.jax
import rulec.math as rm
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError

Array = np.ndarray[Any, Any]

TEXT = """\
name: heads
hyper: {lr: 0.1, heads: {default: 3, static: true, whole: true, min: 1}}
state: {left: {init: 0, shape: [rows, rows/heads]}}
applies_to: ndim == 2
otherwise: sgd
step: |
  left = left/2 + matmul(g, transpose(g, per=block(rows/heads)), per=block(rows/heads))
  u = newton_schulz(g, per=block(rows/heads)) + newton_schulz(g, steps=3, normalize=1.02, per=block(4), axis=1)
  root = inverse_root(left, 4, eps=0.5, per=block(rows/heads))
  direction = u + matmul(root, g, per=block(rows/heads))
"""
RULE = rulec.parse(TEXT)
DRAWN = np.random.default_rng(2)
START, GRADS = DRAWN.normal(size=(6, 8)), DRAWN.normal(size=(2, 6, 8))


def transcript(heads: int) -> Array:
    """The parameter after two steps, block by block in NumPy."""
    p, left = START.copy(), np.zeros((heads, 6 // heads, 6 // heads))
    for g in GRADS:
        blocks = g.reshape(heads, -1, 8)
        left = left / 2 + blocks @ blocks.swapaxes(1, 2)
        u = np.concatenate([iterated(x, 5, 1.0) for x in blocks])
        u += np.concatenate([iterated(x, 3, 1.02) for x in (g[:, :4], g[:, 4:])], axis=1)
        values, vectors = np.linalg.eigh(left)
        root = vectors * (values[:, None] + 0.5) ** -0.25 @ vectors.swapaxes(1, 2)
        p = p - 0.1 * (u + (root @ blocks).reshape(6, 8))
    return p


def iterated(x: Array, steps: int, times: float) -> Array:
    """Muon's polynomial of the singular values of a matrix."""
    left, values, right = np.linalg.svd(x / (times * np.linalg.norm(x)), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right  # type: ignore[no-any-return]


def by_arrays(backend: str, heads: int) -> Array:
    p = START.copy()
    optimizer = rulec.array.Optimizer(RULE, [p], backend=backend, heads=heads)
    for g in GRADS:
        optimizer.step([g])
    return p


def by_torch(device: str, heads: int) -> Array:
    p = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = rulec.torch.optimizer(RULE)([p], heads=heads)
    for g in GRADS:
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    return p.detach().numpy()


def by_jax(device: str, heads: int) -> Array:
    with jax.enable_x64(True):
        p = jax.numpy.asarray(START)
        transform = rulec.jax.transform(RULE, heads=heads)
        state = transform.init(p)
        for g in GRADS:
            update, state = transform.update(jax.numpy.asarray(g), state, p)
            p = p + update
        return np.asarray(p)


def by_reference(arithmetic: str, heads: int) -> Array:
    reference = ReferenceOptimizer(RULE, [START], {"heads": heads}, arithmetic)
    for g in GRADS:
        reference.step([g])
    return np.asarray(reference.params[0], dtype=np.float64)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(("run", "by"), [
    (by_arrays, "numpy"), (by_arrays, "cpu"), (by_arrays, "c"), (by_torch, "cpu"), (by_jax, "cpu"),
    (by_reference, "float64"),
])  # fmt: skip
def test_every_library_has_the_numbers_of_the_blocks(run: Any, by: str, heads: int) -> None:
    if heads == 1 and by not in ("numpy", "cpu"):
        pytest.skip("one block is the matrix, in every library alike")
    np.testing.assert_allclose(run(by, heads), transcript(heads), rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", ["cholesky(left", "inverse_root(left, 4, eps=0.5"])
def test_fifty_digits_of_blocks(function: str) -> None:
    rule = rulec.parse(TEXT.replace("inverse_root(left, 4, eps=0.5", function))
    exact, plain = (ReferenceOptimizer(rule, [START], {"heads": 2}, how) for how in ("mpmath", "float64"))
    for side in (exact, plain):
        side.step([GRADS[0]])
    np.testing.assert_allclose(np.asarray(exact.params[0], dtype=np.float64), plain.params[0], atol=1e-12)


def test_python_records_what_yaml_says() -> None:
    @rulec.rule(
        state={"left": {"init": 0, "shape": ["rows", "rows/heads"]}}, applies_to="ndim == 2", otherwise="sgd",
        hyper={"heads": {"static": True, "whole": True, "min": 1}},
    )  # fmt: skip
    def heads(g: Any, s: Any, rows: Any, *, lr: float = 0.1, heads: int = 3) -> Any:
        by = rm.block(rows / heads)
        s.left = s.left / 2 + rm.matmul(g, rm.transpose(g, per=by), per=by)
        root = rm.inverse_root(s.left, 4, eps=0.5, per=by)
        u = rm.newton_schulz(g, per=by) + rm.newton_schulz(g, steps=3, normalize=1.02, per=rm.block(4), axis=1)
        return u + rm.matmul(root, g, per=by)

    assert heads.step_text() == RULE.step_text()


def test_texts_of_blocks_are_read_again() -> None:
    assert rulec.parse(RULE.to_yaml()).step_text() == RULE.step_text()
    turned = RULE.in_form("gram")
    assert 'newton_schulz(g, steps=5, form="gram", per=block(rows/heads))' in turned.step_text()
    assert turned.in_form("direct").step_text() == RULE.step_text()
    assert r"\operatorname{newton\_schulz}_{\mathrm{block}" in RULE.latex()


def test_arrays_in_python() -> None:
    g = GRADS[0]
    np.testing.assert_allclose(rm.newton_schulz(g, per=rm.block(2))[2:4], iterated(g[2:4], 5, 1.0), atol=1e-12)
    np.testing.assert_allclose(
        rm.newton_schulz(g, per=rm.block(4), axis=1)[:, 4:], iterated(g[:, 4:], 5, 1.0), atol=1e-12
    )
    np.testing.assert_array_equal(rm.transpose(g, per=rm.block(3))[8:], g[3:].T)
    product = rm.matmul(g, rm.transpose(g, per=rm.block(3)), per=rm.block(3))
    np.testing.assert_allclose(product[3:], g[3:] @ g[3:].T, atol=1e-14)
    with pytest.raises(RulecError, match="qr cannot cut a matrix of 6 by 8 into blocks of 4 rows"):
        rm.qr(g, per=rm.block(4))
