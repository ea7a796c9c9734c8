"""Extents are compared with static hyper-parameters as numbers, and errors of shapes are at the author's lines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import rulec
from rulec.compiler.extents import Extents
from rulec.compiler.ir import COLS, ROWS
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError, RuleError
from rulec.language.expr.node import Node, Op, node, rewrite
from rulec.language.parse.expression import parse_expression
from rulec.language.parse.located import Text
from rulec.language.sizes import sized
from rulec.language.source import Source

_STATIC = {"blocks": 3.0, "rank": 4.0, "k": 4.0}
_HEAD = "name: Blocks\napplies_to: ndim == 2\notherwise: sgd\n"


def extent_of(text: str) -> Node:
    known = ["rows", "cols", "numel", *_STATIC]
    value = parse_expression(Text(text, Source("", text)), known)

    def change(n: Node) -> Node:
        if n.op is not Op.NAME:
            return n
        return node(Op.HYPER if n.arg in _STATIC else Op.FACT, n.arg)

    return rewrite([value], change)[0]


#: Extents that are the same at these values, line by line.
_SAME = (
    ("cols", "3*cols/blocks", "cols/blocks*3", "cols*blocks/3", "blocks*cols/3", "cols/blocks + 2*cols/blocks",
     "(blocks - 1)*cols/blocks + cols/blocks", "cols - rows + rows", "cols*(1/blocks)*blocks", "-(-cols)"),
    ("rows", "rows*rank/4", "rows + k - rank", "rows/(2 - cols % 2)*(2 - cols % 2)", "rows/cols*cols"),
    ("cols/blocks", "cols/3", "2*cols/6", "cols - 2*cols/blocks"),
    ("rank", "k", "4", "minimum(rank, 5)", "7//2 + 1", "rank*k/4"),
    ("minimum(rank, rows)", "minimum(rows, k)", "minimum(2 + 2, rows)"),
    ("numel/rows", "numel/rows*blocks/3"),
    ("cols//blocks", "cols//3"),
    ("3*(cols//blocks)",),
    ("rows*cols", "cols*rows", "rows/4*cols*k", "(rows + rows)*cols/2", "rows/(rows/blocks)*rows*cols/3"),
    ("rows*cols - cols", "(rows - 1)*cols"),
    ("rows/cols", "1/cols*rows"),
    ("rows/(rows - 1)*cols",),
)  # fmt: skip


def test_extents_that_are_the_same_have_one_node() -> None:
    extents = Extents(_STATIC, (ROWS, COLS))
    groups = [{extents.one(extent_of(text)) for text in texts} for texts in _SAME]
    assert [len(group) for group in groups] == [1] * len(_SAME)
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(groups, 2))
    assert groups[0] == {COLS}
    assert groups[1] == {ROWS}


_LOOP = """\
hyper: {blocks: {default: 3, static: true, whole: true, min: 1}}
state: {m: 0}
step: |
  m = 0.5*m + g
  o = m[:, :cols/blocks]/norm(m[:, :cols/blocks])
  for i in range(1, blocks):
    x = m[:, i*cols/blocks:(i + 1)*cols/blocks]
    o = concat(o, x/norm(x), axis=1)
  direction = o + m
"""


@pytest.mark.parametrize("backend", ["reference", "numpy", "cpu"])
@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_blocks_of_columns(blocks: int, backend: str) -> None:
    rule = rulec.parse(_HEAD + _LOOP)
    rng = np.random.default_rng(0)
    start, g = rng.normal(size=(2, 4, 6))
    if backend == "reference":
        rule, hyper = sized(rule, {"blocks": blocks, "lr": 1.0})
        run = ReferenceOptimizer(rule, [start.copy()], hyper)
        run.step([g])
        p = run.params[0]
    else:
        p = start.copy()
        rulec.array.Optimizer(rule, [p], backend=backend, lr=1.0, blocks=blocks).step([g])
    wanted = g + np.concatenate([x / np.linalg.norm(x) for x in np.split(g, blocks, axis=1)], axis=1)
    assert np.allclose(start - p, wanted, rtol=0, atol=1e-13)


def refused(step: str, hyper: str = "", shape: tuple[int, int] = (8, 4)) -> str:
    """The error of a rule of matrices, at its first step."""
    lines = "".join(f"  {line}\n" for line in step.splitlines())
    rule = rulec.parse(f"{_HEAD}hyper: {{{hyper}}}\nstep: |\n{lines}")
    with pytest.raises(RulecError) as error:
        rulec.array.Optimizer(rule, [np.ones(shape)], backend="numpy").step([np.ones(shape)])
    return str(error.value)


_K = "k: {default: 2, static: true}"


@pytest.mark.parametrize(("step", "line", "said"), [
    ("a = 2*g\nb = a[:, :cols/k]\nc = b*3\nd = concat(c, g)\ndirection = d[:rows]", "d = concat(c, g)",
     "those of 'concat(c, g)' differ"),
    ("a = 2*g\nb = eigh(a, per=block(2))\ndirection = b", "b = eigh(a, per=block(2))", "needs a square matrix"),
    ("a = 2*g\nb = matmul(a, a, per=block(2))\ndirection = b", "b = matmul(a, a, per=block(2))",
     "the inner sides of 'matmul(a, a, per=block(2))' differ"),
    ("a = 3*g\nb = newton_schulz(a, per=block(3))\ndirection = b", "b = newton_schulz(a, per=block(3))",
     "blocks of 3 rows do not divide the 8 rows in 'newton_schulz(a, steps=5, per=block(3))' for a matrix of 8 by 4: "
     "say under applies_to which tensors they divide"),
    ("a = 3*g\nb = newton_schulz(a, per=block(k + 1), axis=1)\ndirection = b", "b = newton_schulz(a, per=block(k",
     "blocks of 3 rows do not divide the 4 rows in"),
    ("a = g @ transpose(g)\nb = a + 1\nc = g @ b\ndirection = c - g", "c = g @ b", "the inner sides of 'g @ b' differ"),
    ("a = 2*g\nb = cholesky(a)\ndirection = b", "b = cholesky(a)", "needs a square matrix, and 'a' is rows by cols"),
    ("a = 2*g\nb = a[:, :cols/k]\nc = b + a\ndirection = 2*c", "c = b + a", "shapes do not fit in 'b + a'"),
    ("a = solve(eye(cols), g)\ndirection = a", "a = solve(eye(cols), g)", "those of 'solve(eye(cols), g)' differ"),
    ("a = g\nif mean(g) > 0:\n  b = g[:, :cols/k]\nelse:\n  b = a\ndirection = b + g", "if mean(g) > 0",
     "shapes do not fit in 'b'"),
    ("for i in range(2):\n  a = 3*g\n  b = a[:, i*cols/3:] + a\ndirection = g + b", "b = a[:, i*cols/3:] + a",
     "shapes do not fit in 'a[:, 1*cols/3:] + a'"),
    ("a = 3*g\nb = a[:, :cols/3]\ndirection = concat(concat(b, b, axis=1), b, axis=1)", "b = a[:, :cols/3]",
     "the extent of 'a[:, 0:cols/3]' must be a whole number"),
    ("a = 3*g\nb = a[:, :5]\ndirection = g + sum(b)", "b = a[:, :5]", "'a[:, 0:5]' ends at 5 of 4 cols"),
])  # fmt: skip
def test_errors_of_shapes_are_at_the_author_s_line(step: str, line: str, said: str) -> None:
    error = refused(step, _K)
    assert said in error
    assert line in error.splitlines()[1]
    assert "3*g" not in error.splitlines()[0]
    assert "2*g" not in error.splitlines()[0]


#: Shapes of a state by the rank -> its sides for the matrix (8, 3).
_BOUNDED = {
    '[rows, "minimum(rank, rows)"]': (8, 6), '["minimum(rank, rows)", cols]': (6, 3),
    '[rows, "minimum(rank, cols)"]': (8, 3),
    '["minimum(minimum(rank, rows), cols)", cols]': (3, 3), '[rows, "minimum(rank, minimum(k, rows))"]': (8, 5),
    '[rows, "maximum(rank, k)"]': (8, 6), '[rows, "where(rank < rows, rank, rows)"]': (8, 6),
    '[rows, "clip(rank, 1, k)"]': (8, 5), '["2*minimum(rank, rows)", cols]': (12, 3),
}  # fmt: skip


@pytest.mark.parametrize("shape", [*_BOUNDED])
def test_a_rank_that_the_author_bounds(shape: str) -> None:
    hyper = "rank: {default: 6, static: true, whole: true}, k: {default: 5, static: true, whole: true}"
    head = f"{_HEAD}hyper: {{{hyper}}}\nstate: {{u: {{init: 0, shape: {shape}}}}}\n"
    rule = rulec.parse(f"{head}step: |\n  u = 0.5*u + 1\n  direction = g + sum(u)\n")
    p, g = np.zeros((8, 3)), np.ones((8, 3))
    rulec.array.Optimizer(rule, [p], backend="numpy", lr=1.0).step([g])
    rows, cols = _BOUNDED[shape]
    assert np.allclose(p, -1 - rows * cols)


@pytest.mark.parametrize("shape", ["[rows, rank]", "[rank, cols]", '[rows, "2*rank"]'])
def test_a_rank_without_a_bound_is_held_to_the_shorter_side(shape: str) -> None:
    head = f"{_HEAD}hyper: {{rank: {{default: 6, static: true}}}}\nstate: {{u: {{init: 0, shape: {shape}}}}}\n"
    rule = rulec.parse(f"{head}step: |\n  u = 0.5*u + 1\n  direction = g + sum(u)\n")
    with pytest.raises(RuleError, match="must be a whole number from 1 to 3"):
        rulec.array.Optimizer(rule, [np.ones((8, 3))], backend="numpy").step([np.ones((8, 3))])
