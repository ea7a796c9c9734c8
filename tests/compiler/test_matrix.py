"""The matrix functions: stacks, dtypes, signs, what is not finite, and sides that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
import rulec.math as rm
from rulec.compiler.extents import Extents
from rulec.compiler.ir import AXES, COLS, ROWS, Axes
from rulec.compiler.matrix import MATRIX, matrix_axes
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RuleError, TensorError
from rulec.language.expr.node import Kind, Node, Op, const, name, node

X, Y = name("x"), name("y")
WIDE = Axes(AXES, ROWS, COLS)

#: Calls of every function on one stack, and whether it must be symmetric.
CALLS: dict[Op, tuple[tuple[Any, ...], bool]] = {
    Op.TRANSPOSE: ((), False), Op.NEWTON_SCHULZ: ((3,), False), Op.QR: ((), False), Op.EIGH: ((), True),
    Op.SINGULAR_VECTORS: ((2,), False), Op.INVERSE_ROOT: ((4, 1e-3), True),
}  # fmt: skip


#: Functions whose values are in tests/arrays/test_linear.py and test_ordering.py, and of `index` in test_indices.py.
LINEAR = {
    Op.EYE, Op.DIAG, Op.TRIU, Op.TRIL, Op.SLICE, Op.CONCAT, Op.SOLVE, Op.CHOLESKY, Op.TOPK, Op.IN_BLOCKS, Op.INDEX,
    Op.QUANTILE, Op.MODE_PRODUCT, Op.GRAM, Op.SORT, Op.ARGSORT, Op.TAKE,
}  # fmt: skip


def stack(op: Op, dtype: str = "float64") -> np.ndarray[Any, Any]:
    x = np.random.default_rng(5).normal(size=(3, 4, 4 if CALLS[op][1] else 3))
    return (x @ x.swapaxes(1, 2) if CALLS[op][1] else x).astype(dtype)


def test_the_table_is_whole() -> None:
    assert set(MATRIX) == {op for op in Op if op.kind is Kind.MATRIX} == {*CALLS, *LINEAR, Op.MATMUL}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", CALLS)
def test_a_stack_is_its_matrices_one_by_one(op: Op, dtype: str) -> None:
    x, numbers = stack(op, dtype), CALLS[op][0]
    together = MATRIX[op].compute(x, *numbers)
    assert together.dtype == dtype
    for i in range(len(x)):
        np.testing.assert_allclose(together[i], MATRIX[op].compute(x[i : i + 1], *numbers)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("op", [op for op in CALLS if op not in (Op.TRANSPOSE, Op.NEWTON_SCHULZ)])
def test_nan_stays_in_its_matrix(op: Op, bad: float) -> None:
    x, numbers = stack(op), CALLS[op][0]
    clean = MATRIX[op].compute(x, *numbers)
    x[1, 0, 0] = bad
    found = MATRIX[op].compute(x, *numbers)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])


def test_qr_is_the_one_with_a_positive_diagonal() -> None:
    x = stack(Op.QR)
    q = MATRIX[Op.QR].compute(x)
    triangular = q.swapaxes(1, 2) @ x
    np.testing.assert_allclose(q @ triangular, x, atol=1e-14)
    np.testing.assert_allclose(np.tril(triangular, -1), 0, atol=1e-14)
    assert (np.diagonal(triangular, axis1=1, axis2=2) > 0).all()


@pytest.mark.parametrize("op", [Op.EIGH, Op.SINGULAR_VECTORS])
def test_the_largest_component_of_a_vector_is_positive(op: Op) -> None:
    vectors = MATRIX[op].compute(stack(op), *CALLS[op][0])
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1, keepdims=True), axis=1)
    assert (largest > 0).all()
    np.testing.assert_allclose(np.abs(MATRIX[op].compute(-stack(op), *CALLS[op][0])).sum(), np.abs(vectors).sum())


def test_eigenvectors_ascend_and_singular_vectors_descend() -> None:
    x = stack(Op.EIGH)
    v = MATRIX[Op.EIGH].compute(x)
    diagonal = np.diagonal(v.swapaxes(1, 2) @ x @ v, axis1=1, axis2=2)
    assert (np.diff(diagonal) > 0).all()
    y = stack(Op.SINGULAR_VECTORS)
    u = MATRIX[Op.SINGULAR_VECTORS].compute(y, 2)
    sizes = np.linalg.norm(u.swapaxes(1, 2) @ y, axis=2)
    np.testing.assert_allclose(sizes, np.linalg.svd(y)[1][:, :2], rtol=1e-13)


def test_inverse_roots_of_each_matrix_with_its_own_numbers() -> None:
    x = stack(Op.INVERSE_ROOT)
    order, eps = np.array([2.0, 1.0, 4.0]).reshape(3, 1, 1), np.array([0.0, 0.5, 2.0]).reshape(3, 1, 1)
    found = MATRIX[Op.INVERSE_ROOT].compute(x, order, eps)
    for i, power in enumerate((2, 1, 4)):
        whole = np.linalg.matrix_power(np.linalg.inv(found[i]), power)
        np.testing.assert_allclose(whole, x[i] + eps[i] * np.eye(4), rtol=1e-9, atol=1e-9)


def test_an_eigenvalue_that_rounding_made_negative_counts_as_zero() -> None:
    x = np.diag([1.0, -1e-20])[None]
    np.testing.assert_allclose(MATRIX[Op.INVERSE_ROOT].compute(x, 2, 0.25)[0], np.diag([1.25**-0.5, 2.0]))


def test_newton_schulz_of_a_tall_matrix_is_that_of_its_transpose() -> None:
    x, compute = stack(Op.NEWTON_SCHULZ), MATRIX[Op.NEWTON_SCHULZ].compute
    np.testing.assert_array_equal(compute(x, 5), compute(x.swapaxes(1, 2), 5).swapaxes(1, 2))
    assert not compute(np.zeros((1, 2, 3)), 5).any()


def test_python_computes_on_arrays_what_rules_do() -> None:
    for op, called in (
        (Op.TRANSPOSE, rm.transpose), (Op.QR, rm.qr), (Op.EIGH, rm.eigh), (Op.SINGULAR_VECTORS, rm.singular_vectors),
        (Op.INVERSE_ROOT, rm.inverse_root), (Op.NEWTON_SCHULZ, rm.newton_schulz),
    ):  # fmt: skip
        x, numbers = stack(op), CALLS[op][0]
        np.testing.assert_array_equal(called(x, *numbers), MATRIX[op].compute(x, *numbers))
        np.testing.assert_allclose(called(x[0], *numbers), MATRIX[op].compute(x[:1], *numbers)[0], atol=1e-15)


def test_python_records_what_yaml_says() -> None:
    @rulec.rule
    def rooted(g: Any, t: Any, s: Any, *, eps: float = 1e-8) -> Any:
        u = rm.singular_vectors(g, 2)
        return rm.inverse_root(rm.matmul(g, rm.transpose(g)), 4, eps=eps) @ u @ (rm.transpose(u) @ g)

    text = """name: rooted
hyper: {eps: 1e-8}
step: |
  u = singular_vectors(g, 2)
  direction = inverse_root(g @ transpose(g), 4, eps=eps) @ u @ (transpose(u) @ g)
"""
    sides = [ReferenceOptimizer(rule, [np.ones((4, 3))]) for rule in (rooted, rulec.parse(text))]
    for side in sides:
        side.step([stack(Op.QR)[0]])
    np.testing.assert_array_equal(sides[0].params[0], sides[1].params[0])
    assert not np.array_equal(sides[0].params[0], np.ones((4, 3)))


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: MATRIX[Op.QR].compute(np.ones((1, 2, 3))), "as many rows as columns, and was given 2 by 3"),
        (lambda: MATRIX[Op.SINGULAR_VECTORS].compute(np.ones((1, 2, 3)), 3), "2 by 3 has no 3 singular vectors"),
        (lambda: MATRIX[Op.SINGULAR_VECTORS].compute(np.ones((1, 2, 3)), 0), "has no 0 singular vectors"),
    ],
)
def test_sides_that_do_not_do(compute: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        compute()


@pytest.mark.parametrize(
    ("value", "operands", "expected"),
    [
        (node(Op.MATMUL, X, Y), [WIDE, Axes(AXES, COLS, ROWS)], Axes(AXES, ROWS, ROWS)),
        (node(Op.TRANSPOSE, X), [WIDE], Axes(AXES, COLS, ROWS)),
        (node(Op.SINGULAR_VECTORS, X, Y), [WIDE, Axes("k")], Axes(AXES, ROWS, Y)),
        (node(Op.INVERSE_ROOT, X, const(2)), [Axes(AXES, ROWS, ROWS), Axes()], Axes(AXES, ROWS, ROWS)),
        (node(Op.NEWTON_SCHULZ, X, const(5), ("float32", "muon")), [WIDE, Axes()], WIDE),
        (node(Op.EYE, Y), [], Axes(AXES, Y, Y)),
        (node(Op.INDEX, (name("i"), Y)), [], Axes("knbi", Y)),
        (node(Op.INDEX, (node(Op.ADD, name("i"), name("j")), Y, COLS)), [], Axes(AXES, Y, COLS)),
        (node(Op.INDEX, (name("b"), Y)), [], Axes("knb")),
        (node(Op.DIAG, X), [Axes(AXES, ROWS, ROWS)], Axes("knbi", ROWS)),
        (node(Op.DIAG, X), [Axes("knbj", None, COLS)], Axes(AXES, COLS, COLS)),
        (node(Op.TOPK, X, Y), [Axes("knbj", None, COLS), Axes()], Axes("knbj", None, COLS)),
        (node(Op.QUANTILE, X, Y, ("row", "linear")), [WIDE, Axes("k")], Axes("knbi", ROWS)),
        (node(Op.SORT, X, ("row",)), [WIDE], WIDE),
        (node(Op.ARGSORT, X, ("matrix",)), [Axes("knbi", ROWS)], Axes("knbi", ROWS)),
        (node(Op.TAKE, X, Y, ("col",)), [WIDE, Axes("knbi", Y)], Axes(AXES, Y, COLS)),
        (node(Op.TAKE, X, Y, ("row",)), [WIDE, Axes("knbj", None, Y)], Axes(AXES, ROWS, Y)),
        (node(Op.TAKE, X, Y, ("row",)), [WIDE, Axes("knbi", ROWS)], Axes("knbi", ROWS)),
        (node(Op.TAKE, X, Y, ("col",)), [Axes("knbi", ROWS), Axes("knbj", None, Y)], Axes("knbj", None, Y)),
        (node(Op.TAKE, X, Y, ("matrix",)), [WIDE, Axes("k")], Axes("knb")),
        (node(Op.TAKE, X, Y, ("tensor",)), [WIDE, Axes("k")], Axes("kn")),
        (node(Op.TAKE, X, Y, ("tensor",)), [Axes("knb"), Axes("knbi", ROWS)], Axes("knbi", ROWS)),
        (node(Op.QUANTILE, X, Y, ("tensor", "linear")), [Axes("knbi", ROWS), Axes()], Axes("kn")),
        (node(Op.SLICE, X, const(0), Y, ("cols",)), [WIDE], Axes(AXES, ROWS, Y)),
        (node(Op.SLICE, X, const(2), const(5), ("rows",)), [WIDE], Axes(AXES, const(3), COLS)),
        (
            node(Op.CONCAT, X, Y, (1,)),
            [Axes(AXES, ROWS, const(2)), Axes(AXES, ROWS, const(3))],
            Axes(AXES, ROWS, const(5)),
        ),
        (node(Op.SOLVE, X, Y, ("upper",)), [Axes(AXES, ROWS, ROWS), WIDE], WIDE),
        (node(Op.IN_BLOCKS, X, const(5), const(2), ("newton_schulz", (None, "muon"))), [WIDE, Axes()], WIDE),
        (node(Op.IN_BLOCKS, X, Y, ("eigh", None)), [Axes(AXES, ROWS, Y)], Axes(AXES, ROWS, Y)),
    ],
)
def test_axes(value: Node, operands: list[Axes], expected: Axes) -> None:
    assert matrix_axes(value, operands, Extents({}, (ROWS, COLS)).one) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("direction = g @ g", "the inner sides of 'g @ g' differ"),
        ("direction = g @ a", "needs a matrix, and 'a' is none"),
        ('direction = g*sum(eigh(mean(g, per="row")))', "eigh needs a matrix"),
        ("direction = g*sum(eigh(g))", "eigh needs a square matrix"),
        ("direction = g*sum(inverse_root(g, 2))", "inverse_root needs a square matrix"),
        ("direction = solve(g, g)", "solve needs a square matrix, and 'g' is rows by cols"),
        ("direction = solve(g @ transpose(g), transpose(g))", "solve needs as many rows on the right as on the left"),
        ("direction = concat(g, transpose(g))", "concat needs matrices with the same cols"),
        ("direction = g*sum(diag(g))", "diag needs a square matrix"),
        ("direction = g*sum(diag(a))", "diag needs a matrix or a vector, and 'a' is neither"),
        (
            "direction = topk(g, 2)",
            "topk needs one value for each row or column, and 'g' is something else: reduce it with per=\"row\", or "
            "compare elements with a quantile of them",
        ),
        ("direction = g - quantile(p, g)", "q of quantile is one number for a tensor, and 'g' is something else"),
        ("direction = g*sum(sort(norm(g)))", "sort needs a vector or a matrix, and 'norm"),
        ("direction = g*sum(take(t, g))", "take needs a vector or a matrix, and 't' is one number"),
        ('direction = g*take(g, argsort(g[:1], per="row"), axis=1)', "take needs as many rows of places as of values"),
        ("direction = g*sum(cholesky(g))", "cholesky needs a square matrix"),
    ],
)
def test_what_does_not_fit_is_an_error(line: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        ReferenceOptimizer(rulec.parse(f"name: R\nhyper: {{a: 1}}\nstep: |\n  {line}\n"), [np.ones((2, 3))])
