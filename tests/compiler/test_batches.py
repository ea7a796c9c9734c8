"""Reductions of values that are kept once for all matrices of a batch: identities, draws, and what follows from them.

A value of the parameter's axes counts once for each matrix, whether it is the same in all of them or not. The witness
is NumPy, on the value broadcast to the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array_api.random import stream, uniform
from rulec.compiler.reference import ReferenceOptimizer

Array = np.ndarray[Any, Any]

#: Batches of square matrices: of the two tensors of a model.
SHAPES = [(2, 3, 3), (2, 2, 3, 3)]


def drawn(tensor: int, rows: int, cols: int) -> Array:
    """The first draw of a tensor at its first step, in float64."""
    words = stream(rows * cols, seed=0, tensor=tensor, draw=0, step=1)
    return uniform(words).reshape(rows, cols)


#: Text -> the matrix of a tensor.
VALUES: dict[str, Callable[[int], Array]] = {
    "eye(rows)": lambda n: np.eye(3),
    "transpose(uniform([rows, cols]))": lambda n: drawn(n, 3, 3).T,
    "uniform([rows, cols])": lambda n: drawn(n, 3, 3),
    "uniform([1, cols])": lambda n: drawn(n, 1, 3),
    "uniform([rows, 2]) - 1/4": lambda n: drawn(n, 3, 2) - 0.25,
    "concat(eye(rows), uniform([2, rows]))": lambda n: np.concatenate([np.eye(3), drawn(n, 2, 3)]),
    "2*eye(rows)*mean(g)": lambda n: 2 * np.eye(3),
    "diag(uniform([rows, rows]))": lambda n: np.diag(drawn(n, 3, 3))[:, None],
}

#: Level -> the axes (batch, row, column) that remain, and whether other tensors take part.
LEVELS = {"row": "bi", "col": "bj", "matrix": "b", "tensor": "", "group": "", "model": ""}

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "rms": lambda x, **keywords: np.sqrt(np.mean(x * x, **keywords)),
    "norm": lambda x, **keywords: np.sqrt(np.sum(x * x, **keywords)),
    "std": np.std,
    "variance": np.var,
    "min": np.min,
    "max": np.max,
    "count_nonzero": lambda x, **keywords: np.sum(x != 0, **keywords),
    "median": np.median,
}


def has(name: str, level: str) -> bool:
    """Whether a reduction has a level."""
    return name != "median" or level not in ("group", "model")


def rule_of(text: str, levels: tuple[str, ...]) -> rulec.Rule:
    """A rule that keeps the sum of every reduction of a value to these levels, one number for each tensor."""
    every = [(name, level) for name in (*REDUCTIONS, "softmax") for level in levels if has(name, level)]
    names = [(f"{name}_{level}", name, level) for name, level in every]
    lines = [
        f'{key} = 0*{key} + sum({name}(x, per="{level}"){"**2" * (name == "softmax")}, per="tensor")'
        for key, name, level in names
    ]
    states = "".join(f"  {key}: {{init: 0, per: tensor}}\n" for key, _, _ in names)
    step = "".join(f"  {line}\n" for line in lines)
    return rulec.parse(f"name: R\nstate:\n{states}step: |\n  x = {text}\n{step}  direction = g\n")


def expected(text: str, levels: tuple[str, ...]) -> list[dict[str, float]]:
    """The same numbers for each tensor, by NumPy."""
    batches = [int(np.prod(shape[:-2])) for shape in SHAPES]
    wholes = [np.broadcast_to(x := VALUES[text](i), (n, *x.shape)) for i, n in enumerate(batches)]
    every = np.concatenate([x.reshape(-1) for x in wholes])
    results: list[dict[str, float]] = [{} for _ in wholes]
    for whole, numbers in zip(wholes, results, strict=True):
        for level in levels:
            wide = level in ("group", "model")
            x, axes = every if wide else whole, tuple(i for i, c in enumerate("bij") if c not in LEVELS[level])
            for name, reduce in ((n, r) for n, r in REDUCTIONS.items() if has(n, level)):
                numbers[f"{name}_{level}"] = float(np.sum(reduce(x, axis=None if wide else axes)))
            shares = np.exp(whole) / np.sum(np.exp(x), axis=None if wide else axes, keepdims=not wide)
            numbers[f"softmax_{level}"] = float(np.sum(shares**2))
    return results


def by_reference(rule: rulec.Rule, arithmetic: str = "float64") -> list[dict[str, Any]]:
    reference = ReferenceOptimizer(rule, [np.zeros(shape) for shape in SHAPES], {}, arithmetic)
    reference.step([np.ones(shape) for shape in SHAPES])
    return [reference.state(i) for i in range(len(SHAPES))]


def by_arrays(rule: rulec.Rule, backend: str) -> list[dict[str, Any]]:
    opt = rulec.array.Optimizer(rule, [np.zeros(shape) for shape in SHAPES], backend=backend)
    opt.step([np.ones(shape) for shape in SHAPES])
    return [opt.state(name) for name in opt.names]


def by_jax(rule: rulec.Rule) -> list[dict[str, Any]]:
    import jax.numpy as jnp

    import rulec.jax

    params = [jnp.zeros(shape) for shape in SHAPES]
    _, state = rulec.jax.step(rule, params, [jnp.ones(shape) for shape in SHAPES], rulec.jax.init(rule, params))
    return [{key: getattr(state, key)[i] for key in rule.state} for i in range(len(SHAPES))]


WITHIN, ACROSS = ("row", "col", "matrix", "tensor"), ("group", "model")

everyday = pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[pytest.mark.slow] if count > 2 else []) for count, text in enumerate(VALUES)],
)
in_halves = pytest.mark.parametrize("levels", [WITHIN, ACROSS], ids=["within", "across"])


def check(text: str, levels: tuple[str, ...], states: list[dict[str, Any]], digits: float = 1e-12) -> None:
    for mine, wanted in zip(states, expected(text, levels), strict=True):
        numbers = {key: float(np.reshape(mine[key], -1)[0]) for key in wanted}
        assert numbers == {key: pytest.approx(x, rel=digits) for key, x in wanted.items()}


@everyday
@in_halves
def test_the_reference_counts_each_matrix(text: str, levels: tuple[str, ...]) -> None:
    check(text, levels, by_reference(rule_of(text, levels)))


@everyday
@in_halves
def test_values_between_stages_count_each_matrix(text: str, levels: tuple[str, ...]) -> None:
    check(text, levels, by_arrays(rule_of(text, levels), "numpy"))


@pytest.mark.parametrize("text", ["eye(rows)", "uniform([rows, cols])"])
def test_fifty_digits_count_each_matrix(text: str) -> None:
    check(text, ("tensor",), by_reference(rule_of(text, ("tensor",)), "mpmath"))


@pytest.mark.slow
@pytest.mark.parametrize("text", VALUES)
@pytest.mark.parametrize("backend", ["cpu", "c", "jax"])
def test_every_backend_counts_each_matrix(text: str, backend: str) -> None:
    rule = rule_of(text, ("row", "tensor", "model"))
    states = by_jax(rule) if backend == "jax" else by_arrays(rule, backend)
    check(text, ("row", "tensor", "model"), states, 2e-6 if backend == "jax" else 1e-12)


def test_an_axis_of_a_batch_of_several() -> None:
    """Of five segments, the batch has three: a value of rows and columns counts once for each index of the others."""
    rule = rulec.parse("""
name: R
hyper: {lr: 1.0}
step: |
  x = mean(g, per=axis(-2))*mean(g, per=axis(-1))
  y = mean(g, per=axis(0)) + mean(g, per=axis(2))
  direction = sum(x, per=axis(0)) + sum(x, per=axis(1)) + 0*y
""")
    g = np.random.default_rng(3).normal(size=(2, 3, 2, 4, 5))
    rows, cols = g.mean((0, 1, 2, 4), keepdims=True), g.mean((0, 1, 2, 3), keepdims=True)
    x = np.broadcast_to(rows * cols, g.shape)
    wanted = x.sum((1, 2, 3, 4), keepdims=True) + x.sum((0, 2, 3, 4), keepdims=True)
    reference = ReferenceOptimizer(rule, [np.zeros(g.shape)])
    reference.step([g])
    np.testing.assert_allclose(-reference.params[0], np.broadcast_to(wanted, g.shape), rtol=1e-12)
    mine = np.zeros(g.shape)
    rulec.array.Optimizer(rule, [mine], backend="numpy").step([g])
    np.testing.assert_allclose(-mine, np.broadcast_to(wanted, g.shape), rtol=1e-12)
