"""Products along an axis of a tensor, states for each axis, and loops over the axes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.math as rm
from rulec.compiler.pipeline import compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.view import view_of
from rulec.errors import RuleError
from rulec.language.export.sympy import FromSympy
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import name
from rulec.language.expr.text import expression_text
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.source import Source

Array = np.ndarray[Any, Any]

#: Each axis of at most `most` has its sum of Gram matrices; the direction is multiplied by all of them.
TEXT = """
name: Whitened
hyper: {lr: 0.1, keep: 0.5, most: {default: 6, static: true, whole: true}}
view: {flatten: rest}
applies_to: ndim <= 4
state:
  l: {init: 2*eye(dim(i)), shape: [dim(i), dim(i)], each: axis(i), if: dim(i) <= most}
step: |
  h = g
  for i in range(ndim):
    if dim(i) <= most:
      l[i] = keep*l[i] + gram(g, axis=i)
      h = matmul(h, l[i], axis=i - ndim)
  direction = h
"""
RULE = rulec.parse(TEXT)


@rulec.rule(
    name="Whitened", view={"flatten": "rest"}, applies_to="ndim <= 4", hyper={"most": {"static": True, "whole": True}},
    state={"l": {"init": "2*eye(dim(i))", "shape": ["dim(i)", "dim(i)"], "each": "axis(i)", "if": "dim(i) <= most"}},
)  # fmt: skip
def whitened(g, ndim, s, *, lr=0.1, keep=0.5, most=6):  # type: ignore[no-untyped-def]
    def along(i: int, h: Any) -> Any:
        def small() -> Any:
            s.l[i] = keep * s.l[i] + rm.gram(g, axis=i)
            return rm.matmul(h, s.l[i], axis=i)

        return rm.cond(rm.dim(i) <= most, small, lambda: h)

    return rm.over_axes(ndim, along, g)


SHAPES = [(), (3,), (3, 4), (7, 2), (2, 3, 4), (2, 7, 3, 2), (2, 0, 3)]


def contracted(p: Array, grads: list[Array], most: int = 6) -> Array:
    """The parameter after these gradients, by tensordot alone."""
    factors = {i: 2 * np.eye(n) for i, n in enumerate(p.shape) if n <= most}
    for g in grads:
        h = g
        for i, factor in factors.items():
            rest = [k for k in range(g.ndim) if k != i]
            factors[i] = 0.5 * factor + np.tensordot(g, g, (rest, rest))
            h = np.moveaxis(np.tensordot(h, factors[i], (i, 0)), -1, i)
        p = p - 0.1 * h
    return p


def drawn(shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(3)
    return np.asarray(rng.standard_normal(shape)), [np.asarray(rng.standard_normal(shape)) for _ in range(3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", ["float64", "mpmath", "Python", "numpy", "cpu", "c"])
def test_every_side_has_the_contractions(side: str, shape: tuple[int, ...]) -> None:
    p, grads = drawn(shape)
    wanted = contracted(p, grads)
    if side in ("float64", "mpmath", "Python"):
        rule, arithmetic = (whitened, "float64") if side == "Python" else (RULE, side)
        reference = ReferenceOptimizer(rule, [p], {}, arithmetic)
        for g in grads:
            reference.step([g])
        found = reference.params[0].astype(np.float64)
    else:
        found = p.copy()
        optimizer = rulec.array.Optimizer(RULE, [found], backend=side)
        for g in grads:
            optimizer.step([g])
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_states_are_those_of_the_axes() -> None:
    optimizer = rulec.array.Optimizer(RULE, [np.ones((2, 7, 3)), np.ones(3)])
    optimizer.step([np.ones((2, 7, 3)), np.ones(3)])
    shapes = [{k: v.shape for k, v in optimizer.state(at).items() if k != "step"} for at in ("0", "1")]
    assert shapes == [{"l_0": (2, 2), "l_2": (3, 3)}, {"l_0": (3, 3)}]


def test_a_loop_over_axes_is_written_out() -> None:
    text = TEXT.replace("ndim <= 4", "2 <= ndim and ndim <= 3")
    lines = rulec.parse(text).step_text().splitlines()
    begin = lines.index("h = g")
    assert lines[begin + 1 : begin + 4] == [
        "if dim(0) <= most:", "  l_0 = keep*l_0 + gram(g, axis=0)", "  h = matmul(h, l_0, axis=0 - ndim)",
    ]  # fmt: skip
    assert lines[begin + 7 : begin + 9] == ["if ndim > 2:", "  if dim(2) <= most:"]
    assert rulec.parse(text).state.keys() == {"l_0", "l_1", "l_2"}


def test_a_rule_for_tensors_of_more_dimensions_is_seen_of_a_matrix_too() -> None:
    rule = rulec.parse(TEXT.replace("ndim <= 4", "ndim == 4"))
    assert rule.analysis.state_bytes
    assert "if ndim > 3:" in rule.step_text().splitlines()


@pytest.mark.parametrize("rule", [RULE, whitened], ids=["text", "Python"])
def test_a_file_of_the_rule_is_the_rule(rule: Any) -> None:
    again = rulec.parse(rule.to_yaml())
    assert again.step == rule.step
    assert again.state == rule.state


def test_the_function_runs_on_arrays() -> None:
    p, grads = drawn((2, 3, 4))
    states = SimpleNamespace(l=[2 * np.eye(n) for n in p.shape])
    monkey = rm.dim
    try:
        rm.dim = lambda i: p.shape[i]
        for g in grads:
            p = p - 0.1 * whitened.function(g, g.ndim, states)
    finally:
        rm.dim = monkey
    np.testing.assert_allclose(p, contracted(*drawn((2, 3, 4))), rtol=1e-12)


def test_tensors_of_one_number_of_dimensions_share_a_program() -> None:
    programs = [compile(RULE, view_of(RULE, shape).facts) for shape in ((2, 3, 4), (4, 3, 2), (2, 7, 3), (2, 3))]
    assert programs[0] is programs[1]
    assert len({id(program) for program in programs}) == 3


def test_matrices_of_a_matrix_are_rows_and_columns() -> None:
    """A state of dim(0) by dim(0) fits `g @ transpose(g)`, and the columns of what has two dimensions are dim(1)."""
    rule = rulec.parse("""
name: Both
view: {flatten: rest}
applies_to: 2 <= ndim and ndim <= 3
state: {l: {init: 0, shape: [dim(i), dim(i)], each: axis(i)}}
step: |
  l[0] = l[0] + g @ transpose(g) + gram(g, axis=0)
  l[1] = l[1] + gram(g, axis=1)
  if ndim == 2:
    l[1] = l[1] + transpose(g) @ g
  else:
    l[2] = gram(g, axis=2)
  direction = l[0] @ g
""")
    g = np.random.default_rng(0).standard_normal((2, 3))
    reference = ReferenceOptimizer(rule, [np.zeros((2, 3)), np.zeros((2, 3, 1))])
    reference.step([g, g[:, :, None]])
    first, second = reference.state(0), reference.state(1)
    np.testing.assert_allclose(first["l_0"][0], 2 * g @ g.T)
    np.testing.assert_allclose(first["l_1"][0], 2 * g.T @ g)
    np.testing.assert_allclose(second["l_1"][0], g.T @ g)


def test_levels_of_each_axis() -> None:
    """A state for each axis may be one value for each index of it: SM3 in a loop."""
    cover = rulec.parse("""
name: Cover
applies_to: 1 <= ndim and ndim <= 4
state: {a: {init: 0, per: axis(i), each: axis(i)}}
step: |
  s = a[0]
  for i in range(1, ndim):
    s = minimum(s, a[i])
  s = s + g**2
  for i in range(ndim):
    a[i] = max(s, per=axis(i))
  direction = g/sqrt(s + 1e-30)
""")
    shape = (2, 3, 4)
    grads = drawn(shape)[1]
    kept = [np.zeros([n if k == i else 1 for k in range(3)]) for i, n in enumerate(shape)]
    reference, p = ReferenceOptimizer(cover, [np.zeros(shape)], {"lr": 0.1}), np.zeros(shape)
    for g in grads:
        s = np.minimum(np.minimum(kept[0], kept[1]), kept[2]) + g**2
        kept = [s.max(axis=tuple(k for k in range(3) if k != i), keepdims=True) for i in range(3)]
        p = p - 0.1 * g / np.sqrt(s + 1e-30)
        reference.step([g])
    np.testing.assert_allclose(reference.params[0], p, rtol=1e-13)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("matmul(g, g, axis=0)", "matmul along an axis needs a square matrix of its extent rows, and 'g' is rows by"),
        (
            "matmul(g, transpose(g), axis=1)",
            r"is cols by rows: the product has the shape of the tensor. Project an axis by",
        ),
        ("matmul(g, eye(cols), axis=1)", r"a square matrix of its extent dim\(1\), and 'eye\(cols\)' is cols by cols"),
        ("g*sum(gram(gram(g, axis=1), axis=0))", "gram along an axis needs a tensor of the parameter's shape, and 'gr"),
        ("g*sum(gram(lr, axis=0))", "gram needs a matrix, and 'lr' is none"),
        ("matmul(g, eye(dim(0)), axis=3)", "a tensor of 3 dimensions has no axis=3: put it under a condition on ndim"),
        ("matmul(g, eye(dim(0)), axis=-4)", "a tensor of 3 dimensions has no axis=-4"),
        ("gram(g, axis=t) @ g", "axis=t must be known when a kernel is made: make it of numbers and shape facts"),
    ],
)
def test_what_does_not_fit_is_an_error(line: str, message: str) -> None:
    text = f"name: R\nview: {{flatten: rest}}\nhyper: {{lr: 1}}\nstep: |\n  p = {line}\n"
    with pytest.raises(RuleError, match=message):
        ReferenceOptimizer(rulec.parse(text), [np.ones((2, 3, 4))])


def known(text: str, **facts: float) -> float | None:
    return number_known(parse_expression(Text(text, Source("", text)), ["ndim", "x"]), facts)


def test_a_condition_on_a_dimension_that_a_tensor_lacks() -> None:
    assert known("ndim > 2 and dim(2) <= 9", ndim=2, dim0=3, dim1=4) == 0
    assert known("dim(2) <= 9 or ndim < 3", ndim=2, dim0=3, dim1=4) == 1
    assert known("ndim > 1 and dim(2) <= 9", ndim=2, dim0=3, dim1=4) is None
    assert known("ndim > 2 and x > 1", ndim=2) is None
    assert known("not (ndim > 2 and dim(-3) <= 9)", ndim=2) == 1


def test_in_formulas() -> None:
    text = RULE.latex()
    assert r"{g_{t}}_{(0)} \, {g_{t}}_{(0)}^{\top}" in text
    assert r"\times_{0 - \mathrm{ndim}}" in text
    assert "gram(g, 1)" in str(RULE.sympy()["l_1"])


def test_sympy_reads_products_along_axes() -> None:
    sympy = pytest.importorskip("sympy")
    g, matmul, gram = sympy.Symbol("g"), sympy.Function("matmul"), sympy.Function("gram")
    read = FromSympy({"g": name("g")}).node(matmul(g, gram(g, 1), 1) + matmul(gram(g, 0), g))
    assert {*expression_text(read).split(" + ")} == {"matmul(g, gram(g, axis=1), axis=1)", "gram(g, axis=0) @ g"}
