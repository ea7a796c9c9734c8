"""A value has the axes of all arms of a branch, and a state those of its memory, whatever arm or line runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from tests.compiler import branching
from tests.compiler.branching import ARMS, SHAPES, Array

CONDITIONS = ("h > 0.2", "h < 0.2", "t > 1")
PAIRS = [*permutations(ARMS, 2)]
BACKENDS = ["reference", "numpy", "cpu", "c"]


def gradients() -> list[list[Array | None]]:
    """Gradients of three steps; the first tensor joins late."""
    rng = np.random.default_rng(3)
    steps: list[list[Array | None]] = [[rng.normal(size=shape) for shape in SHAPES] for _ in range(3)]
    steps[0][0] = None
    return steps


def check_follows(text: str, backend: str, arms: Sequence[str], condition: str) -> None:
    """Steps a rule and adds up the same in NumPy."""
    params = [np.zeros(shape) for shape in SHAPES]
    rule = rulec.parse(text)
    opt = ReferenceOptimizer(rule, params) if backend == "reference" else Optimizer(rule, params, backend)
    wanted, counts = [p.copy() for p in params], [0, 0]
    for grads in gradients():
        opt.step(grads)
        fired = [i for i, g in enumerate(grads) if g is not None]
        for i in fired:
            counts[i] += 1
        truths = [counts[i] > 1 if condition == "t > 1" else condition == "h > 0.2" for i in fired]
        each = branching.values(arms, truths, [g for g in grads if g is not None])
        for i, change in zip(fired, branching.direction(each), strict=True):
            wanted[i] = wanted[i] - change
        for got, want in zip(opt.params if backend == "reference" else params, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_reduction_counts_by_the_axes_of_both_arms(condition: str) -> None:
    arms = ("3", "g")
    check_follows(branching.text(condition, arms), "numpy", arms, condition)


@pytest.mark.slow
@pytest.mark.parametrize("by_axes", [False, True], ids=["matrices", "axes"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("arms", PAIRS, ids=" or ".join)
def test_a_reduction_counts_by_the_axes_of_all_pairs_of_arms(
    arms: tuple[str, str], condition: str, backend: str, by_axes: bool
) -> None:
    check_follows(branching.text(condition, arms, by_axes), backend, arms, condition)


def moved(step: str, backend: str, state: str = "{m: 0}", hyper: str = "{lr: 1, h: 0.25}") -> list[list[Array]]:
    """The parameters after each step."""
    body = "".join(f"  {line}\n" for line in step.split("\n"))
    rule = rulec.parse(f"name: R\nhyper: {hyper}\nstate: {state}\nstep: |\n{body}")
    params = [np.zeros(shape) for shape in SHAPES]
    opt = ReferenceOptimizer(rule, params) if backend == "reference" else Optimizer(rule, params, backend)
    points = []
    for grads in gradients():
        opt.step(grads)
        points.append([np.array(p) for p in (opt.params if backend == "reference" else params)])
    return points


#: State or states, the lines of a step, and the same with values of the full size written out.
STATES = {
    "element": ("{m: 0}", "m = 3", "m = 3 + 0*g"),
    "a branch": ("{m: 0}", "if t > 1:\n  m = 0\nelse:\n  m = g", "m = where(t > 1, 0*g, g)"),
    "row": ("{m: {init: 0, per: row}}", "m = 2", 'm = 2 + 0*mean(g, per="row")'),
    "axis": ("{m: {init: 0, per: axis(1)}}", "m = h", "m = h + 0*mean(g, per=axis(1))"),
    "matrix of another shape": ("{m: {init: 0, shape: [cols, rows]}}", "m = 2", "m = 2 + 0*transpose(g)"),
    "tensor": ("{m: {init: 0, per: tensor}}", "m = 2", "m = 2 + 0*mean(g)"),
    "history": ("{m: {history: 2}}", "if t > 1:\n  m = 1\nelse:\n  m = g", "m = where(t > 1, 1 + 0*g, g)"),
    "parameter": ("{m: 0}", "m = m + g\np = 2", "m = m + g\np = 2 + 0*g"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "numpy"])
@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_is_set_to_a_number_has_its_axes(kind: str, backend: str) -> None:
    state, short, full = STATES[kind]
    x = "m[1] + m[0]" if kind == "history" else "p" if kind == "parameter" else "m"
    end = f'\nd = sum({x} + 1) + sum(norm({x}), per="model")'
    end += "\np = p - d" if kind == "parameter" else "\ndirection = d"
    end += "" if kind in ("history", "parameter") else f"\n{full}"
    for got, want in zip(moved(short + end, backend, state), moved(full + end, "reference", state), strict=True):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_a_matrix_function_of_a_number_on_one_arm_has_a_matrix() -> None:
    step = "if h > 0.2:\n  a = 3\nelse:\n  a = g\nm = m + g\ndirection = a @ transpose(a) @ g"
    want = [0.0, 0.0]
    for grads, points in zip(gradients(), moved(step, "numpy"), strict=True):
        for i, g in enumerate(grads):
            if g is not None:
                threes = np.full(g.shape, 3.0)
                want[i] = want[i] - threes @ threes.T @ g
            np.testing.assert_allclose(points[i], want[i] + np.zeros(SHAPES[i]), rtol=1e-12)


@pytest.mark.parametrize("level", ["group", "model"])
@pytest.mark.parametrize("function", ["sum", "mean", "norm", "rms", "min", "max", "count_nonzero"])
def test_a_reduction_on_an_arm_is_over_the_tensors_there(function: str, level: str) -> None:
    """On both arms at once, beside the same reduction of all tensors after the branch."""
    step = f'm = m + g\nif t > 1:\n  a = {function}(g, per="{level}")\nelse:\n  a = 2*{function}(m, per="{level}")'
    step += f'\ndirection = a + 5*{function}(g, per="{level}")'
    reduce = branching.REDUCTIONS[function]
    wanted, counts, sums = [0.0, 0.0], [0, 0], [np.zeros(shape) for shape in SHAPES]
    points = [moved(step, backend) for backend in ("reference", "numpy")]
    for k, grads in enumerate(gradients()):
        fired = {i: g for i, g in enumerate(grads) if g is not None}
        for i, g in fired.items():
            counts[i], sums[i] = counts[i] + 1, sums[i] + g
        of_all = reduce(np.concatenate([g.ravel() for g in fired.values()]), (0,))[0]
        for i in fired:
            there = [j for j in fired if (counts[j] > 1) == (counts[i] > 1)]
            x = np.concatenate([(fired[j] if counts[i] > 1 else sums[j]).ravel() for j in there])
            wanted[i] -= (1 if counts[i] > 1 else 2) * reduce(x, (0,))[0] + 5 * of_all
        for ours in points:
            for i, p in enumerate(ours[k]):
                np.testing.assert_allclose(p, wanted[i], rtol=1e-12)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("level", ["group", "model"])
def test_a_shared_state_assigned_on_an_arm_follows_the_count_of_its_level(level: str, reduces: bool) -> None:
    then = f'k + mean(g, per="{level}")' if reduces else "7"
    step = f"m = m + g\nif t > 2:\n  k = {then}\nelse:\n  k = t\ndirection = k + 0*m"
    state = f"{{m: 0, k: {{init: 0, per: {level}}}}}"
    last = gradients()[2][1]
    assert last is not None
    k = [1.0, 2.0, 2.0 + last.mean() if reduces else 7.0]  # the other tensor is at its second step
    for backend in ("reference", "numpy"):
        points = moved(step, backend, state)
        np.testing.assert_allclose([p[1].flat[0] for p in points], -np.cumsum(k), rtol=1e-12)
        np.testing.assert_allclose([p[0].flat[0] for p in points], -np.cumsum([0, *k[1:]]), rtol=1e-12)


def test_arms_with_fewer_reductions_of_the_model_keep_them_apart() -> None:
    """Two sums of one value on one arm are two reductions on the other."""
    step = "if t > 1:\n  a = g\n  b = g\nelse:\n  a = g\n  b = 2*g\nm = m + g\n"
    step += 'direction = sum(a, per="model") + 3*sum(b, per="model")'
    for ours, theirs in zip(moved(step, "numpy"), moved(step, "reference"), strict=True):
        for got, want in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
