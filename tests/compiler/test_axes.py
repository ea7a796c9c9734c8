"""Levels of any tensor, `axis(i)`, `block(n)` and `dim(i)`: against NumPy, and refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.view import view_of
from rulec.math import axis, block, mean

#: A state and a reduction of every kind for each of three axes, the last one, and the whole.
EACH = """
name: EachAxis
hyper: {lr: 1.0}
state:
  a: {init: 0, per: axis(0)}
  b: {init: 0, per: axis(1), if: ndim > 1}
  c: {init: 0, per: axis(2), if: ndim > 2}
  d: {init: 0, per: axis(-1)}
step: |
  a = a + mean(g**2, per=axis(0))
  s = a
  if ndim > 1:
    b = b + max(abs(g), per=axis(1))
    s = s + b
  if ndim > 2:
    c = c + sum(g, per=axis(2))*dim(2)
    s = s + c**2
  d = d + norm(g, per=axis(-1))
  direction = g/(s + d + mean(a))
"""

BLOCKS = """
name: Blocks
hyper: {lr: 1.0, size: {default: 4, static: true, whole: true}}
state: {v: {init: 0, per: block(size)}}
step: |
  v = v + mean(g**2, per=block(size))
  direction = g/(sqrt(v) + max(abs(p), per=block(size)))
"""

#: Rank 1 to 5; batches of one axis and of several; extents of 1, and none.
SHAPES = [(5,), (4, 3), (2, 3, 4), (2, 3, 4, 5), (2, 1, 3, 2, 4), (1, 1, 1), (1, 4, 1, 1), (3, 0, 2, 4), (0,)]


def numbers(shape: tuple[int, ...], count: int = 3) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(7)
    return rng.normal(size=shape), [rng.normal(size=shape) for _ in range(count)]


def along(reduce: Callable[..., Any], x: Any, kept: int) -> Any:
    """A reduction of all axes but one."""
    return reduce(x, axis=tuple(k for k in range(x.ndim) if k != kept % x.ndim), keepdims=True)


def each_axis(p: Any, gradients: list[Any]) -> Any:
    """The rule `EACH` in NumPy."""
    count, a, b, c, d = p.ndim, 0.0, 0.0, 0.0, 0.0
    for g in gradients if p.size else ():
        a = a + along(np.mean, g**2, 0)
        s = a
        if count > 1:
            b = b + along(np.max, abs(g), 1)
            s = s + b
        if count > 2:
            c = c + along(np.sum, g, 2) * p.shape[2]
            s = s + c**2
        d = d + np.sqrt(along(np.sum, g * g, -1))
        p = p - g / (s + d + np.mean(a))
    return p


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_axes_of_any_rank(shape: tuple[int, ...]) -> None:
    start, gradients = numbers(shape)
    wanted = each_axis(start, gradients)
    reference = ReferenceOptimizer(rulec.parse(EACH), [start])
    for g in gradients:
        reference.step([g])
    np.testing.assert_allclose(reference.params[0], wanted, rtol=1e-13, atol=1e-14)
    for backend in ("numpy", "cpu"):
        mine = start.copy()
        opt = rulec.array.Optimizer(rulec.parse(EACH), [mine], backend=backend)
        for g in gradients:
            opt.step([g])
        np.testing.assert_allclose(mine, wanted, rtol=1e-13, atol=1e-14)


def test_a_state_has_one_number_for_each_index() -> None:
    start, gradients = numbers((2, 3, 4, 5), 1)
    opt = rulec.array.Optimizer(rulec.parse(EACH), [start])
    opt.step(gradients)
    state = opt.state("0")
    assert {key: state[key].shape for key in "abcd"} == {
        "a": (2, 1, 1, 1), "b": (1, 3, 1, 1), "c": (1, 1, 4, 1), "d": (1, 1, 1, 5)
    }  # fmt: skip
    np.testing.assert_allclose(state["b"], along(np.max, abs(gradients[0]), 1), rtol=1e-15)


@pytest.mark.parametrize(
    ("text", "shape", "wanted"),
    [
        ("per=axis(0)", (6, 3, 2, 2), (1, 6, 12)), ("per=axis(-1)", (6, 3, 2, 2), (1, 36, 2)),
        ("per=axis(1)", (6, 3, 2, 2), (6, 3, 4)), ("per=block(4)", (6, 3, 2, 2), (1, 18, 4)),
        ("per=block(numel/dim(0))", (6, 3, 2, 2), (1, 6, 12)),
    ],
)  # fmt: skip
def test_dimensions_between_axes_are_joined(text: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    view = view_of(rulec.parse(f"name: R\nstep: |\n  direction = g/norm(g, {text})"), shape)
    assert (view.batch, view.rows, view.cols) == wanted


def test_one_axis_of_a_matrix_needs_no_more_than_rows() -> None:
    by_axis = rulec.compile(rulec.parse("name: R\nstep: |\n  direction = g/norm(g, per=axis(0))"))
    by_row = rulec.compile(rulec.parse('name: R\nstep: |\n  direction = g/norm(g, per="row")'))
    assert by_axis.stages == by_row.stages


@pytest.mark.parametrize(
    ("shape", "size"), [((8,), 4), ((4, 6), 8), ((2, 3, 4), 6), ((0, 3), 4), ((5,), 5), ((3,), 1)], ids=str
)
def test_blocks(shape: tuple[int, ...], size: int) -> None:
    start, gradients = numbers(shape)
    p, v = start.reshape(-1, size), np.zeros((start.size // size, 1))
    for g in gradients if start.size else ():
        g = g.reshape(-1, size)
        v = v + np.mean(g**2, axis=1, keepdims=True)
        p = p - g / (np.sqrt(v) + np.max(abs(p), axis=1, keepdims=True))
    reference = ReferenceOptimizer(rulec.parse(BLOCKS), [start], {"size": size})
    for g in gradients:
        reference.step([g])
    np.testing.assert_allclose(reference.params[0], p.reshape(shape), rtol=1e-13, atol=1e-14)
    for backend in ("numpy", "cpu"):
        mine = start.copy()
        opt = rulec.array.Optimizer(rulec.parse(BLOCKS), [mine], backend=backend, size=size)
        for g in gradients:
            opt.step([g])
        np.testing.assert_allclose(mine, p.reshape(shape), rtol=1e-13, atol=1e-14)
        assert opt.state("0")["v"].shape == (start.size // size,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("g/norm(g, per=axis(2))", "a tensor of 2 dimensions has no axis(2): put it under a condition on ndim"),
        ("g/norm(g, per=axis(-3))", "a tensor of 2 dimensions has no axis(-3): put it under a condition on ndim"),
        ("g*dim(2)", "a tensor of 2 dimensions has no dim(2): put it under a condition on ndim"),
        ("g*dim(t)", "dim(t) must be known when a kernel is made: make it of numbers and shape facts"),
        ("g/norm(g, per=axis(t))", "axis(t) must be known when a kernel is made: make it of numbers and shape facts"),
        (
            "g/norm(g, per=block(n))",
            "block(n) of R must be known when a kernel is made: make it of numbers, shape facts and static "
            "hyper-parameters",
        ),
        (
            "g/norm(g, per=block(5))",
            "block(5) of R does not divide the 12 elements of a tensor of shape (3, 4): choose another size, or say "
            "under applies_to for which tensors it is one",
        ),
        (
            "g/norm(g, per=block(dim(0) - 3))",
            "block(dim(0) - 3) of R, here 0, is no number of elements: choose a whole number from 1",
        ),
        (
            "g/norm(g, per=block(2))/norm(g, per=axis(0))",
            "R has block(2) and axis(0) for one tensor, and blocks stand alone: reduce to one kind of block, or choose "
            "between them by a condition on the shape",
        ),
    ],
)
def test_refused_with_a_sentence(line: str, says: str) -> None:
    rule = rulec.parse(f"name: R\nhyper: {{lr: 0.1, n: 4}}\nstep: |\n  direction = {line}")
    with pytest.raises(rulec.RulecError) as caught:
        rulec.array.Optimizer(rule, [np.ones((3, 4))]).step([np.ones((3, 4))])
    assert str(caught.value).split("\n")[0].partition(": ")[2] == says


@pytest.mark.parametrize(("value", "level"), [("g", "axis(0)"), ("norm(g, per=axis(1))", "axis(0)"), ("g", "block(2)")])
def test_a_state_of_an_axis_takes_no_finer_value(value: str, level: str) -> None:
    text = f"name: R\nstate: {{v: {{init: 0, per: {level}}}}}\nstep: |\n  v = {value}\n  direction = g*v"
    with pytest.raises(rulec.RuleError, match="differs within it: reduce it with per="):
        rulec.array.Optimizer(rulec.parse(text), [np.ones((3, 4))]).step([np.ones((3, 4))])


def test_blocks_under_a_condition_need_not_divide() -> None:
    rule = rulec.parse("""
name: R
hyper: {lr: 1.0}
step: |
  if numel % 4 == 0:
    direction = g/norm(g, per=block(4))
  else:
    direction = g/norm(g, per=axis(0))
""")
    params = [np.zeros(8), np.zeros((2, 5))]
    grads = [np.arange(1.0, 9.0), np.arange(1.0, 11.0).reshape(2, 5)]
    rulec.array.Optimizer(rule, params).step(grads)
    blocks = grads[0].reshape(2, 4)
    np.testing.assert_allclose(params[0].reshape(2, 4), -blocks / np.linalg.norm(blocks, axis=1, keepdims=True))
    np.testing.assert_allclose(params[1], -grads[1] / np.linalg.norm(grads[1], axis=1, keepdims=True))


def test_python_says_the_same() -> None:
    @rulec.rule(state={"v": {"init": 0, "per": axis(0)}}, hyper={"size": {"static": True, "whole": True}})
    def of_axis(g, s, *, size=4):  # type: ignore[no-untyped-def]
        s.v = s.v + mean(g**2, per=axis(0))
        return g * s.v

    text = rulec.parse("""
name: OfAxis
hyper: {size: {default: 4, static: true, whole: true}}
state: {v: {init: 0, per: axis(0)}}
step: |
  v = v + mean(g**2, per=axis(0))
  direction = g*v
""")
    assert of_axis.step_text() == text.step_text()
    assert of_axis.state == text.state
    assert rulec.parse(text.to_yaml()) == text
    x = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_allclose(mean(x, axis(1)), x.mean(axis=(0, 2), keepdims=True))
    np.testing.assert_allclose(mean(x, block(6)).reshape(4, 6)[:, 0], x.reshape(4, 6).mean(axis=1))


def test_groups_of_one_rank_share_a_program() -> None:
    rule = rulec.parse(EACH)
    programs = [rulec.compile(rule, view_of(rule, shape).facts) for shape in ((2, 3, 4), (5, 6, 7), (2, 3, 4, 5))]
    assert programs[0] is programs[1]
    assert programs[0] is not programs[2]


def test_analysis_knows_axes_and_blocks() -> None:
    analysis = rulec.parse(EACH).analysis
    assert analysis.scope == "tensor"
    assert rulec.parse(BLOCKS).analysis.scope == "tensor"
