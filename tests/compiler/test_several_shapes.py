"""Reductions over the tensors of a group or the model, where the rule is another program for each rank.

Two reductions of a rule may be one for tensors of one rank, as the largest value of each row of a vector is the vector,
and two for another. The witness is NumPy, on all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.array
from rulec.compiler.reference import ReferenceOptimizer
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.torch.tensors.tensors import TorchArrays
from tests.runtime.elsewhere import Elsewhere, Here

Array = np.ndarray[Any, Any]

SHAPES = [(3, 4), (5,), (2, 3, 2), (4, 2, 2, 3)]
GRADIENTS = [np.random.default_rng(k).normal(size=shape) for k, shape in enumerate(SHAPES)]

#: The learning rates `h` of the groups, and the group of each tensor.
GROUPS = [((0.25,), [0, 0, 0, 0]), ((0.1,), [0, 0, 0, 0]), ((0.25, 0.1), [0, 1, 0, 1]), ((0.25, 0.1), [0, 0, 1, 1])]

#: The gradients of all tensors, or of one group.
Of = Sequence[Array]


def first(reduce: Callable[..., Any], g: Array) -> Array:
    """A reduction to one value for each index of the first axis."""
    return np.asarray(reduce(g, axis=tuple(range(1, g.ndim))) if g.ndim > 1 else g)


def spread(reduce: Callable[..., Any], g: Array, first: bool) -> Array:
    """A reduction to one value for each index of the first axis or of the last, for each index of both."""
    kept = 0 if first else g.ndim - 1
    others = tuple(axis for axis in range(g.ndim) if axis != kept)
    both = tuple(n if axis in (0, g.ndim - 1) else 1 for axis, n in enumerate(g.shape))
    return np.broadcast_to(reduce(g, axis=others, keepdims=True) if others else g, both)


def normed(b: Array) -> Array:
    """A tensor divided by one more than the norm of each index of its first axis."""
    norms = first(np.sum, b * b) ** 0.5
    return b / (1 + norms.reshape(-1, *[1] * (b.ndim - 1)))


def total(values: Sequence[Any]) -> float:
    return float(sum(np.sum(x) for x in values))


def mean(values: Sequence[Any]) -> float:
    return total(values) / sum(np.size(x) for x in values)


#: Lines of a rule -> the factor of the gradient in its direction, for `h`, a group's gradients and the model's.
RULES: dict[str, Callable[[float, Of, Of], float]] = {
    'b = mean(g, per=axis(0))\ns = mean(g, per="group")\nx = s*mean(b, per="group")': lambda h, group, model: (
        mean(group) * mean([first(np.mean, g) for g in group])
    ),
    'b = max(g, per=axis(0))\ns = sum(g, per="model")\nx = s + 2*sum(b, per="model")': lambda h, group, model: (
        total(model) + 2 * total([first(np.max, g) for g in model])
    ),
    'x = mean(g, per="model") + 2*mean(norm(g, per=axis(-1)), per="model")': lambda h, group, model: (
        mean(model)
        + 2 * mean([np.sqrt(np.sum(g * g, axis=tuple(range(g.ndim - 1)))) if g.ndim > 1 else abs(g) for g in model])
    ),
    'if ndim > 1:\n  b = abs(g)\nelse:\n  b = g\nx = sum(g, per="group") + 2*sum(b, per="group")': (
        lambda h, group, model: total(group) + 2 * total([abs(g) if g.ndim > 1 else g for g in group])
    ),
    'b = g\nif ndim > 1:\n  b = g**2\nx = max(g, per="model")*min(b, per="model") + max(b, per="model")': (
        lambda h, group, model: (
            max(g.max() for g in model) * min((g**2 if g.ndim > 1 else g).min() for g in model)
            + max((g**2 if g.ndim > 1 else g).max() for g in model)
        )
    ),
    'b = sum(g, per=axis(0))\nif h > 0.2:\n  a = mean(g, per="group")\nelse:\n  a = b\nx = mean(a, per="group")': (
        lambda h, group, model: mean(group) if h > 0.2 else mean([first(np.sum, g) for g in group])
    ),
    'if h > 0.2:\n  a = mean(g, per="group")\nelse:\n  a = 2\nif ndim > 1:\n  b = 0\nelse:\n  b = 1\nx = a + 0*b': (
        lambda h, group, model: mean(group) if h > 0.2 else 2.0
    ),
    'y = 0*dim(-1)\nx = norm(g, per="model") + sum(g*g, per="model") + rms(g, per="group") + y': (
        lambda h, group, model: (
            np.sqrt(total([g * g for g in model]))
            + total([g * g for g in model])
            + np.sqrt(mean([g * g for g in group]))
        )
    ),
    # A vector is a program of one stage, whose sum comes after it: its count must wait for the sum.
    'z = mean(g, per=axis(0))\ns = s + mean(g, per="group")\nif h > 0.2:\n  a = 3 + 0*g\nelse:\n  a = 2\nx = a + 0*z': (
        lambda h, group, model: 3.0 if h > 0.2 else 2.0
    ),
    's = s + mean(g, per="group")\nif t > 1:\n  a = g\nelse:\n  a = 2\nx = a + 0*mean(g, per=axis(0))': (
        lambda h, group, model: 2.0
    ),
    # Both arms are one value for vectors: its sum does not wait for `s`, which is on a line above.
    's = s + mean(g, per="group")\nif s > 0:\n  a = max(g, per=axis(-1))\nelse:\n  a = max(g, per=axis(0))\n'
    'b = mean(a, per="group")\nx = b': (
        lambda h, group, model: mean([spread(np.max, g, first=1 + mean(group) <= 0) for g in group])
    ),
    # A line needs no other, but the values of the lines above are deeper for matrices.
    'b = g/(1 + norm(g, per="model"))\nb = b/(1 + norm(b, per=axis(0)))\ny = sum(b*b, per="model")\n'
    'z = norm(b*g/(1 + norm(g*g, per="tensor")), per="tensor")\nx = y + 0*z': (
        lambda h, group, model: total([normed(g / (1 + np.sqrt(total([m * m for m in model])))) ** 2 for g in model])
    ),
    # A name that a branch on the shape assigns is a value of each tensor, and so is what follows from it.
    'if ndim > 1:\n  a = 2\nelse:\n  a = mean(g, per="tensor")\nx = sum(a, per="model")': (
        lambda h, group, model: total([2.0 if g.ndim > 1 else np.mean(g) for g in model])
    ),
    'k = sum(g, per="group")\nif ndim > 1:\n  a = 2\nelse:\n  a = k\nb = a + 1\nx = mean(b, per="group") + 0*k': (
        lambda h, group, model: mean([3.0 if g.ndim > 1 else total(group) + 1 for g in group])
    ),
    'a = 1\nif ndim > 1:\n  a = 3\nif a > h + 2:\n  b = 5\nelse:\n  b = 1\nx = norm(b, per="model")': (
        lambda h, group, model: np.sqrt(total([25.0 if g.ndim > 1 else 1.0 for g in model]))
    ),
    # The condition is known before a step for matrices alone.
    'a = h\nif ndim < 2:\n  a = g\nif a > -9:\n  b = 2\nelse:\n  b = sum(g, per="model")\nx = max(b, per="model")': (
        lambda h, group, model: 2.0
    ),
    # The arm that other shapes take assigns `b` anew, so the two sums are two for all shapes.
    'b = g\nx = sum(b, per="model")\nif ndim > 1:\n  b = g**2\nx = x + 2*sum(b, per="model")': (
        lambda h, group, model: total(model) + 2 * total([g**2 if g.ndim > 1 else g for g in model])
    ),
}

each = pytest.mark.parametrize("lines", RULES, ids=map(str, range(len(RULES))))
grouped = pytest.mark.parametrize(("rates", "groups"), GROUPS, ids=["taken", "left", "mixed", "apart"])


def rule_of(lines: str) -> rulec.Rule:
    step = "".join(f"  {line}\n" for line in lines.splitlines())
    state = "state: {s: {init: 1, per: group}}\n" if "s = s" in lines else ""
    return rulec.parse(f"name: R\nhyper: {{lr: 1.0, h: 0.25}}\n{state}step: |\n{step}  direction = g*x + 0*h\n")


def expected(lines: str, rates: Sequence[float], groups: Sequence[int]) -> list[Array]:
    """The parameters after a step from zero."""
    results = []
    for g, k in zip(GRADIENTS, groups, strict=True):
        group = [x for x, other in zip(GRADIENTS, groups, strict=True) if other == k]
        # A reduction in an arm is over the tensors of this arm, and all tensors of a group take one arm.
        results.append(-g * RULES[lines](rates[k], group, GRADIENTS))
    return results


def check(params: Sequence[Any], lines: str, rates: Sequence[float], groups: Sequence[int], rtol: float) -> None:
    for mine, wanted in zip(params, expected(lines, rates, groups), strict=True):
        np.testing.assert_allclose(np.asarray(mine), wanted, rtol=rtol)


@each
@grouped
def test_in_the_reference(lines: str, rates: Sequence[float], groups: Sequence[int]) -> None:
    hyper = [{"h": h} for h in rates]
    reference = ReferenceOptimizer(rule_of(lines), [np.zeros(shape) for shape in SHAPES], hyper, groups=groups)
    reference.step(GRADIENTS)
    check(reference.params, lines, rates, groups, 1e-12)


@each
@grouped
@pytest.mark.parametrize("backend", [Here, Elsewhere])
def test_on_hosts_and_devices(lines: str, rates: Sequence[float], groups: Sequence[int], backend: type[Here]) -> None:
    params = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    engine = Engine(rule_of(lines), TorchArrays(), backend())
    for i, p in enumerate(params):
        engine.add(p, groups[i], f"tensor {i}")
    table = engine.hyper_table([default_hyper(engine.rule, {"h": h}, "float64") for h in rates])
    engine.begin()
    run(engine.ready(tuple(range(len(params))), [torch.from_numpy(g) for g in GRADIENTS], table, {}, None))
    engine.end()
    check(params, lines, rates, groups, 1e-12)


@pytest.mark.slow
@each
@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_by_compiled_kernels(lines: str, backend: str) -> None:
    params = [np.zeros(shape) for shape in SHAPES]
    rulec.array.Optimizer(rule_of(lines), params, backend=backend).step(GRADIENTS)
    check(params, lines, [0.25], [0, 0, 0, 0], 1e-12)


@pytest.mark.slow
@each
def test_in_jax(lines: str) -> None:
    import jax.numpy as jnp

    import rulec.jax

    rule, params = rule_of(lines), [jnp.zeros(shape) for shape in SHAPES]
    params, _ = rulec.jax.step(rule, params, [jnp.asarray(g) for g in GRADIENTS], rulec.jax.init(rule, params))
    check(params, lines, [0.25], [0, 0, 0, 0], 2e-5)
