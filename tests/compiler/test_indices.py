"""The function `index`: places of elements by NumPy, for all views, backends and arithmetics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError

Array = np.ndarray[Any, Any]

SHAPES: list[tuple[int, ...]] = [(4, 3), (3, 4), (5,), (), (2, 3, 4), (2, 4, 3), (3, 2, 2, 5), (4, 3), (1, 6), (0, 3)]

VIEWS = ("", "view: {flatten: rest}\n", "view: {short: first}\n", "view: {flatten: rest, short: first}\n")


def along(dimension: int) -> Callable[[Array, Array], Array]:
    """NumPy's indices along a dimension, or 0 without it."""

    def indices(x: Array, matrices: Array) -> Array:
        there = -x.ndim <= dimension < x.ndim
        return np.indices(x.shape)[dimension] if there else np.zeros(x.shape)

    return indices


def flat(x: Array, matrices: Array) -> Array:
    """NumPy's numbers of the elements in their order."""
    return np.arange(x.size).reshape(x.shape)


def side(axis: int) -> Callable[[Array, Array], Array]:
    """The row or the column in the view as matrices, in the tensor's shape."""

    def indices(x: Array, matrices: Array) -> Array:
        numbers = np.broadcast_to(np.indices(matrices.shape)[axis], matrices.shape)
        return numbers.reshape(-1)[np.argsort(matrices.reshape(-1))].reshape(x.shape)

    return indices


def matrices_of(x: Array, view: str) -> Array:
    """The tensor's places as a batch of matrices under a view."""
    places = np.arange(x.size).reshape(x.shape if x.ndim > 1 else (1, -1))
    places = places.reshape(1, len(places), int(np.prod(x.shape[1:]))) if "flatten" in view and x.ndim > 1 else places
    places = places.reshape(int(np.prod(places.shape[:-2])), *places.shape[-2:])
    tall = x.ndim > 1 and places.shape[-2] > places.shape[-1]
    return places.swapaxes(-1, -2) if "short" in view and tall else places


#: Expression -> its elements.
TEXTS: dict[str, Callable[[Array, Array], Array]] = {
    "index()": flat,
    "index(0)": along(0),
    "index(-1)": along(-1),
    "index(1)": along(1),
    'index(per="row")': side(1),
    'index(per="col")': side(2),
    "2*index() + t": lambda x, m: 2 * flat(x, m) + 1,
    "where(index() % 3 == h and not index(-1) < 1, 5, -1)": lambda x, m: np.where(
        (flat(x, m) % 3 == 2) & (along(-1)(x, m) >= 1), 5, -1
    ),
    'cos(index(per="row"))*numel + index(per="col")': lambda x, m: np.cos(side(1)(x, m)) * x.size + side(2)(x, m),
    'sum(index(per="row") > 0, per="col") + g': lambda x, m: np.full(x.shape, max(m.shape[1] - 1, 0)),
}


def rule_of(text: str, view: str = "") -> rulec.Rule:
    least = {"index(1)": "ndim > 1", "index(0)": "ndim > 0", "index(-1)": "ndim > 0"}
    needed = next((condition for key, condition in least.items() if key in text), "")
    where = f"applies_to: {needed}\notherwise: {{name: Zero, step: 'p = p'}}\n" if needed else ""
    where = where.replace("{name: Zero, step: 'p = p'}", "\n  name: Zero\n  step: p = p")
    return rulec.parse(f"name: R\nhyper: {{h: 2}}\n{view}{where}step: |\n  p = {text}\n")


def expected(text: str, view: str) -> list[Array]:
    least = {"index(1)": 2, "index(0)": 1, "index(-1)": 1}
    needed = next((n for key, n in least.items() if key in text), 0)
    tensors = [np.empty(shape) for shape in SHAPES]
    return [
        np.asarray(TEXTS[text](x, matrices_of(x, view)), np.float64) if x.ndim >= needed else np.zeros(x.shape)
        for x in tensors
    ]


def by_reference(rule: rulec.Rule, arithmetic: str = "float64") -> list[Array]:
    reference = ReferenceOptimizer(rule, [np.zeros(shape) for shape in SHAPES], {}, arithmetic)
    reference.step([np.zeros(shape) for shape in SHAPES])
    return [np.asarray(p, np.float64) for p in reference.params]


def by_arrays(rule: rulec.Rule, backend: str) -> list[Array]:
    params = [np.zeros(shape, np.float32) for shape in SHAPES]
    rulec.array.Optimizer(rule, params, backend=backend).step([np.zeros_like(p) for p in params])
    return [*params]


def by_jax(rule: rulec.Rule) -> list[Array]:
    import jax.numpy as jnp

    import rulec.jax

    params = [jnp.zeros(shape, jnp.float32) for shape in SHAPES]
    new, _ = rulec.jax.step(rule, params, params, rulec.jax.init(rule, params))
    return [np.asarray(p) for p in new]


@pytest.mark.parametrize("text", TEXTS)
def test_an_index_is_that_of_numpy(text: str) -> None:
    for view in VIEWS if "per=" in text or text in ("index()", "index(1)") else VIEWS[:1]:
        rule, wanted = rule_of(text, view), expected(text, view)
        ways = {way: by_reference(rule, way) for way in ("float64", "mpmath")} | {"numpy": by_arrays(rule, "numpy")}
        for way, found in ways.items():
            for new, value in zip(found, wanted, strict=True):
                np.testing.assert_allclose(new, value, rtol=1e-7, atol=1e-7, err_msg=f"{way} {view}")


@pytest.mark.parametrize("text", ["index()", 'cos(index(per="row"))*numel + index(per="col")'])
@pytest.mark.parametrize("way", [lambda rule: by_arrays(rule, "cpu"), lambda rule: by_arrays(rule, "c"), by_jax])
def test_every_backend_has_the_same(text: str, way: Callable[[rulec.Rule], list[Array]]) -> None:
    for new, value in zip(way(rule_of(text)), expected(text, ""), strict=True):
        np.testing.assert_allclose(new, value, rtol=1e-6, atol=1e-6)


def test_an_index_is_exact_beyond_the_whole_numbers_of_float32() -> None:
    """A float32 tensor of more than 2**24 elements: the last bit of an index decides."""
    p = np.zeros(2**24 + 6, np.float16)
    rulec.array.Optimizer(rule_of("index() % 2 + (index() == numel - 3)"), [p]).step([p.copy()])
    np.testing.assert_array_equal(p[-6:], [0, 1, 0, 2, 0, 1])


def test_rows_and_columns_of_another_matrix() -> None:
    """The discrete cosine transform in one line, beside SciPy's."""
    fft = pytest.importorskip("scipy.fft")
    text = 'sqrt(2/cols)*cos(pi*(2*index(per="row", n=cols) + 1)*index(per="col", n=cols)/(2*cols))'
    rule = rulec.parse(f"name: R\nstep: |\n  basis = {text}\n  p = g @ basis\n")
    g = np.random.default_rng(0).normal(size=(3, 8))
    p = [np.zeros_like(g)]
    rulec.array.Optimizer(rule, p).step([g])
    wanted = fft.dct(g, norm="ortho", axis=1) * np.r_[2**0.5, np.ones(7)]
    np.testing.assert_allclose(p[0], wanted, rtol=0, atol=1e-12)


def test_axes_and_blocks() -> None:
    g = np.zeros((2, 3, 4))
    for level, of_index in (("axis(1)", 1), ("block(6)", 2), ("axis(0)", 2)):
        p = [g.copy()]
        rule = rulec.parse(f"name: R\nstep: |\n  p = g*sum(g, per={level}) + 100*index({of_index}) + index()\n")
        rulec.array.Optimizer(rule, p).step([g])
        np.testing.assert_array_equal(p[0], 100 * np.indices(g.shape)[of_index] + np.arange(24).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("p = g*index(2)", r"a tensor of 2 dimensions has no index\(2\): put it under a condition on ndim"),
        ("p = g*index(t)", "the dimension of index.t. must be known when a kernel is made"),
        ('p = index(0, per="row")', "index takes a dimension or per=, not both"),
        ('p = index(per="matrix")', "per of index is one of 'row', 'col', not 'matrix'"),
        ("p = index(n=3)", "n of index is the extent of one side of a matrix"),
        ("p = index(0, 1)", "index takes at most 1 argument, not 2"),
        ('p = g*sum(index(per="row", n=h))', "an extent of index depends on h, which may change between steps"),
        ('p = index(per="row", n=rows + 1)', "shapes do not fit|is assigned a value of"),
        ('p = g*index(per="row")*sum(g, per=axis(0))', "also rows"),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    def made() -> None:
        ReferenceOptimizer(rulec.parse(f"name: R\nhyper: {{h: 2}}\nstep: |\n  {line}\n"), [np.ones((2, 3))])

    with pytest.raises(RulecError, match=message):
        made()
