"""Statistics of steps beside 50 digits: every backend, level, reduction and dtype, and statistics of the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.routing import Router
from rulec.errors import RuleError
from rulec.language.expr.node import Kind, walk
from rulec.testing.kinds import IEEE, XLA
from tests.backends.conftest import cupy as cupy
from tests.backends.here import BACKENDS, needs_compiler
from tests.backends.triton_process import in_a_process
from tests.compare.measured import EXPRESSIONS, Numbers, Oracle, Start, check, engine, jax, of_library
from tests.library import by_kind, single

#: The numbers of the groups of `SHAPES`.
GROUPS = (0, 0, 0, 0, 1, 1, 1, 0)

#: More than the elements of a chunk, of an odd number of them.
LARGE = ((301, 399), (1,), (5, 7))

EVERY = [*(pytest.param(*b.values, marks=b.marks) for b in BACKENDS), "jax"]


def oracle(rule: str, numbers: Numbers, backend: Any, watch: Any = EXPRESSIONS) -> Oracle:
    """An oracle with the groups and the arithmetic of a backend."""
    groups = None if backend == "jax" else [g for g, _ in zip(GROUPS, numbers.shapes, strict=False)]
    return Oracle(rulec.load(rule), numbers, watch, groups, XLA if backend == "jax" else IEEE)


def start_of(backend: Any) -> Start:
    return jax if backend == "jax" else engine(backend)


@pytest.mark.parametrize("backend", [*EVERY[:-1], pytest.param("jax", marks=pytest.mark.slow)])
def test_every_level_and_reduction(backend: str) -> None:
    check(start_of(backend), oracle("adamw", Numbers("float32"), backend))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "unequal", "special"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("backend", EVERY)
def test_dtypes_and_numbers_of_unequal_sizes_or_none(backend: str, dtype: str, kind: str) -> None:
    for rule in ("adamw", "lamb"):
        check(start_of(backend), oracle(rule, Numbers(dtype, kind=kind), backend))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kind"), [("float32", ""), ("float32", "unequal"), ("float64", "unequal")])
def test_a_hundred_thousand_elements_in_chunks_and_threads(dtype: str, kind: str) -> None:
    """One oracle for all backends: it takes a hundred times as long as any of them."""
    numbers = Numbers(dtype, LARGE, kind)
    watch = {name: EXPRESSIONS[name] for name in ("update_norm", "dot", "moment", "agree", "model", "columns")}
    bounded = oracle("adamw", numbers, "jax", watch).step([{"p": p} for p in numbers.drawn(0)], numbers.drawn(1))
    for backend in ("numpy", "cpu", "c", "jax"):
        side = start_of(backend)(rulec.load("adamw"), numbers.drawn(0), {}, watch, None)
        side.step(numbers.drawn(1))
        bounded.check(side.statistics())


def test_bounds_are_narrow() -> None:
    """Of norms and means the additions of partial sums; an update has lost the digits that the parameter has not."""
    bounded = _first(Numbers("float32"))
    widths = {name: max(w for other, w in bounded.widths() if other == name) for name in EXPRESSIONS}
    assert all(widths[name] < 2e-5 for name in ("grad_norm", "param_norm", "grad_ratio", "model", "share"))
    assert all(widths[name] < 1e-3 for name in ("update_norm", "update_ratio", "rows", "cosine", "dot"))
    assert all(widths[name] < 1e-13 for name in ("nonfinite", "unchanged", "least", "agree", "few", "count"))


def _first(numbers: Numbers) -> Any:
    return oracle("adamw", numbers, "numpy").step([{"p": p} for p in numbers.drawn(0)], numbers.drawn(1))


@pytest.mark.parametrize("name", [*EXPRESSIONS])
def test_a_small_mistake_is_beyond_the_bounds(name: str) -> None:
    bounded = _first(Numbers("float64"))
    right = {n: {k: np.asarray(x).astype(np.float64) for k, x in by.items()} for n, by in bounded.exact.items()}
    bounded.check(right)
    with np.errstate(invalid="ignore"):
        wrong = {key: x + 1e-9 * (np.abs(x) + 1e-3) for key, x in right[name].items()}
    with pytest.raises(AssertionError, match=f"{name} of .* is .*, in 50 digits "):
        bounded.check({**right, name: wrong})


@pytest.mark.parametrize("backend", ["numpy", "cpu", "c", "jax"])
def test_a_value_for_each_element_is_refused(backend: str) -> None:
    side = start_of(backend)
    with pytest.raises(RuleError, match="the statistic x differs from element to element: reduce it"):
        side(rulec.load("adamw"), [np.ones(3)], {}, {"x": "m*g"}, None).step([np.ones(3)])


@pytest.mark.parametrize("name", by_kind(single()))
def test_statistics_of_the_library(name: str) -> None:
    known = of_library(name)
    rules = [known.rule, *Router(known.rule).rules]
    if any(n.op.kind is Kind.MATRIX for rule in rules for n in walk(rule.standalone().expressions)):
        pytest.skip("a matrix function has no bound of its error")
    check(engine("cpu"), known)


WARY = """
name: Wary
state: {m: 0}
skip: count_nonzero(not isfinite(g)) > 0
step: |
  m = 0.5*m + g
  if ndim >= 2:
    direction = m
  else:
    direction = 2*m
"""


@pytest.mark.filterwarnings("ignore:Wary skipped the step")
@pytest.mark.parametrize("faulty", [(0,), (1, 4, 5, 6), (0, 1, 2, 3, 7), tuple(range(8))], ids=str)
@pytest.mark.parametrize("backend", [*EVERY[:-1], pytest.param("jax", marks=pytest.mark.slow)])
def test_skipped_tensors_have_nan_and_groups_where_all_are_skipped(backend: str, faulty: tuple[int, ...]) -> None:
    names = ("param_norm", "rows", "columns", "group", "model", "nonfinite", "share")
    numbers = Numbers("float32", faulty=faulty)
    known = oracle("sgd", numbers, backend, {name: EXPRESSIONS[name].replace("grad", "p") for name in names})
    check(start_of(backend), replace(known, rule=rulec.parse(WARY)))


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype", "kind"),
    [
        ("adamw", "float32", ""),
        pytest.param("lamb", "bfloat16", "special", marks=pytest.mark.slow),
        pytest.param("sgd", "float64", "unequal", marks=pytest.mark.slow),
    ],
)
def test_cupy_on_its_stand_in(rule: str, dtype: str, kind: str, cupy: Any) -> None:
    from rulec_backends.cupy import CupyBackend

    check(engine(CupyBackend(threads=64)), oracle(rule, Numbers(dtype, kind=kind), "cupy"))


TRITON = """
import json, warnings
warnings.simplefilter("ignore")
from tests.compare.measured import *
import rulec
watch = {name: EXPRESSIONS[name] for name in NAMES}
check(engine("triton"), Oracle(rulec.load(RULE), Numbers(DTYPE, ((), (7,), (33, 65)), KIND), watch), steps=1)
print(json.dumps(None))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "dtype", "kind"),
    [("adamw", "float32", ""), ("lamb", "bfloat16", "special"), ("sgd", "float64", "unequal")],
)
def test_triton_in_its_interpreter(rule: str, dtype: str, kind: str) -> None:
    names = [name for name in EXPRESSIONS if name not in ("group", "group_mean")]
    words = {"NAMES": names, "RULE": rule, "DTYPE": dtype, "KIND": kind}
    program = TRITON
    for word, value in words.items():
        program = program.replace(word, repr(value))
    assert in_a_process(program, TRITON_INTERPRET="1") is None
