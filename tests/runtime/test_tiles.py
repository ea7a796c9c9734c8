"""Projections worked out tile by tile: what they give, what is there at once, and what is written when one fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array_api import random
from rulec.array_api.numpy import NumpyLibrary
from rulec.backend.registry import usable
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.errors import PartialUpdate
from rulec.language.expr.node import Op
from rulec.runtime.buckets.plan import Plan, Projection
from rulec.runtime.engine import default_hyper
from rulec.runtime.stages import tiles
from rulec.runtime.stages.sources import RandomMatrix
from rulec.testing.cases import loaded
from tests.rules.printed_matrices import Apollo, ApolloMini
from tests.rules.runs import OurRun
from tests.runtime.test_stages import Run, check_near, random_arrays, rule_of

#: Wide, tall and square, and small, of rows that are no multiples of four.
SHAPES = [(7, 30), (41, 9), (22, 22), (6, 5)]

HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "scale": 2.0, "growth": 1.01, "gap": 2.0}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a few numbers at a time, so that there are many tiles of everything."""
    monkeypatch.setattr("rulec.runtime.stages.kernel_arguments.room_for", lambda own, largest: 400)
    monkeypatch.setattr("rulec.runtime.stages.sources._LEAST", 12)


def projection(name: str, static: Mapping[str, float]) -> Projection | None:
    rule = rulec.load(name).standalone()
    view = matrix_view((24, 60), rule.view)
    named = default_hyper(rule, static)
    given = {key: named[key] for key, hyper in rule.hyper.items() if hyper.static}
    program = compile(rule, {**view.facts, "machine_eps": 2.0**-23}, given)
    return Plan(program).gaps[0].projection


def test_which_rules_have_one() -> None:
    """Those that need nothing of the product as a whole."""
    found = {name: projection(name, {}) for name in ("apollo", "apollo_mini", "galore", "muon", "soap")}
    assert [name for name, made in found.items() if made is not None] == ["apollo", "apollo_mini"]
    assert found["apollo"] is not None
    assert found["apollo"].stored == {"m", "v"}


@pytest.mark.parametrize(
    "line", ["pr = pr", "pr = where(t > 1, pr, pr)", "if t % 2 == 0:\n    pr = 2*pr\n  else:\n    pr = pr"]
)
def test_a_factor_that_is_stored_has_no_tiles(line: str) -> None:
    """The step is equal to the step of a rule with a whole factor, and so without a projection."""
    rules = [
        rulec.parse(
            "name: X\nsummary: x\nhyper: {lr: 0.1}\nstate: {pr: {init: 1, shape: [rows, 3]}}\napplies_to: ndim == 2\n"
            f"step: |\n  {line}\n  direction = g*norm(normal([2, rows]) @ pr){more}\n"
        )
        for more in ("", " + 0*mean(pr)")
    ]
    weights, grads = random_arrays(0, SHAPES), [random_arrays(step, SHAPES) for step in (1, 2, 3)]
    runs = [Run(rule, [w.copy() for w in weights]) for rule in rules]
    for run in runs:
        for made in grads:
            run.step(made)
    for weight, mine, whole in zip(weights, *(run.params for run in runs), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-6)
        assert not np.array_equal(mine, weight)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("mini", [False, True])
@pytest.mark.usefixtures("narrow")
def test_many_tiles_are_the_algorithm(mini: bool, backend: str) -> None:
    """As its paper prints it, in NumPy, on whole matrices."""
    hyper = HYPER if mini else HYPER | {"rank": 5.0}
    rule = rulec.load("apollo_mini" if mini else "apollo")
    weights = random_arrays(0, SHAPES)
    ours, theirs = OurRun(rule, weights, hyper, backend), (ApolloMini if mini else Apollo)(weights)
    for step in range(5):
        grads = random_arrays(step + 1, SHAPES)
        ours.step(grads, hyper)
        theirs.step(grads, hyper)
    check_near(rule, ours.params(), theirs.w)


@pytest.mark.parametrize("rule", ["apollo", "l2 >> apollo"])
def test_the_gradient_s_dtype_and_sign(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read by copying it, part by part, is what it is as a whole."""
    grads = [random_arrays(step, SHAPES, "float16") for step in range(4)]
    whole, cut = (Run(loaded(rule), random_arrays(9, SHAPES), hyper=[{"rank": 5}], maximize=True) for _ in range(2))
    for made in grads:
        whole.step(made)
    monkeypatch.setattr("rulec.runtime.stages.kernel_arguments.room_for", lambda own, largest: 400)
    for made in grads:
        cut.step(made)
    for a, b in zip(whole.params, cut.params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_extremes_and_rows_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions of all kinds of what is made of a product, put together from tiles."""
    head = (
        "hyper: {lr: 0.1, rank: {default: 5, static: true}}\nview: {short: first}\napplies_to: ndim == 2\n"
        "otherwise: sgd\nstate: {m: {init: 0, shape: [rank, cols]}, a: {init: 0, per: tensor}, "
        "b: {init: 0, shape: [rank, 1]}}\n"
    )
    step = 'R = normal([rank, rows], at=1) @ g\nm = m + R\nb = max(R, per="row")\na = min(R) + sum(m)\n'
    rule = rule_of(f'{step}direction = g*sum(m, per="col")*a/(1 + max(b))', head)
    whole, cut = (Run(rule, random_arrays(0, SHAPES)) for _ in range(2))
    for narrow in (False, True):
        if narrow:
            monkeypatch.setattr("rulec.runtime.stages.kernel_arguments.room_for", lambda own, largest: 400)
        for step_number in range(3):
            (cut if narrow else whole).step(random_arrays(step_number, SHAPES))
    check_near(rule, cut.params, whole.params)
    for i in whole.ids:
        for name, value in whole.engine.state(i).items():
            np.testing.assert_allclose(np.asarray(cut.engine.state(i)[name]), np.asarray(value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "inner", "cols", "number", "room"),
    [
        (64, 1024, 1024, 4, 1 << 18),
        (256, 4096, 32000, 4, 13107200),
        (1, 5, 9, 8, 1),
        (5, 0, 9, 8, 100),
        (0, 3, 0, 4, 9),
    ],
)
def test_sizes_fit_into_their_room(rows: int, inner: int, cols: int, number: int, room: int) -> None:
    sizes = tiles.sizes_for(rows, inner, cols, number, room)
    assert min(sizes.rows, sizes.cols, sizes.part, sizes.inner) >= 1
    if room > 1000:
        left, product = sizes.rows * inner * number, sizes.rows * sizes.cols * number
        copied, rest = sizes.inner * sizes.cols * number, 5 * sizes.rows * sizes.part * number
        assert left + product + copied <= room
        assert product + rest + (left if sizes.cols < cols else 0) <= room


def test_the_largest_gradient_has_the_least_room() -> None:
    assert tiles.room_for(1 << 30, 1 << 30) == (1 << 30) // 20
    assert tiles.room_for(1 << 20, 1 << 30) > (1 << 30) - (1 << 20)
    assert tiles.room_for(100, 100) == tiles.LEAST_ROOM


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 100), (3, 50), (4096, 5000), (17, 0)])
def test_numbers_are_those_of_the_stream(backend: str | None, first: int, count: int) -> None:
    """Whoever makes them, in however many parts."""
    position = {"seed": 3, "tensor": 5, "draw": 2, "step": 7}
    fill: Any = None if backend is None else getattr(usable(backend), "fill_noise", None)
    made = RandomMatrix(NumpyLibrary(), Op.NORMAL, position, "float64", 64 * 8, fill).numbers(first, count)
    wanted = random.normal(first + count, **position)[first:]
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-14)
    assert RandomMatrix(NumpyLibrary(), Op.UNIFORM, position, "float32", 64, fill).numbers(first, count).shape == (
        count,
    )


def test_what_fails_after_a_state_was_stored_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run(rulec.load("apollo"), random_arrays(0, [(7, 30), (7, 30)]))
    made.step(random_arrays(1, [(7, 30), (7, 30)]))
    before, calls = NumpyLibrary.product, []

    def product(self: NumpyLibrary, a: Any, b: Any, into: Any = None) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return before(self, a, b, into)

    monkeypatch.setattr(NumpyLibrary, "product", product)
    with pytest.raises(PartialUpdate, match="some of tensor 0, tensor 1 were updated: no memory"):
        made.step(random_arrays(2, [(7, 30), (7, 30)]))


@pytest.mark.parametrize("rule", ["apollo", "apollo_mini"])
def test_a_gradient_is_let_go_at_once(rule: str) -> None:
    """Without a collection of cycles: an eager step would else have several gradients at once."""
    opt = rulec.array.Optimizer(rule, [np.ones((64, 64))])
    gradient = np.ones((64, 64))
    there = weakref.ref(gradient)
    gc.disable()
    try:
        opt.step([gradient])
        del gradient
        assert there() is None
    finally:
        gc.enable()
