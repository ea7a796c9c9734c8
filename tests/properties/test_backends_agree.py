"""Random rules, shapes and dtypes: the cpu kernels against NumPy and the reference.

Elementwise rules agree bit for bit: every operation drawn here is correctly rounded by IEEE 754, and no backend may
contract or reassociate, so there is one right answer: equal bits, NaN where NaN is due, and the sign of zero. Rules
with reductions agree in float64 but for the rounding of sums, which may be added up in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rulec
from rulec.array import Optimizer
from rulec.backend import registry
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RuleError
from rulec.testing import IEEE, NumpyKind
from rulec.testing.trial import Subject
from rulec.testing.whole import check_against_reference
from tests.properties import reducing
from tests.properties.following import follow_in_jax, follow_in_torch
from tests.properties.reducing import branching_rules, reducing_rules
from tests.testing import broken_stages

LEAVES = ["g", "p", "a", "b", "lr", "k", "t", "0", "1", "-1", "0.5", "3", "1e-3", "-2.5"]
UNARY = ["-({})", "abs({})", "sqrt({})", "sign({})", "floor({})", "({})**2", "where(isfinite({}), 1, 0)"]
BINARY = ["({} + {})", "({} - {})", "({} * {})", "({} / {})", "minimum({}, {})", "maximum({}, {})"]
CHOICES = [
    "where({} < {}, {}, {})",
    "where({} >= {}, {}, {})",
    "where({} == {} or g > 0, {}, {})",
    "where(not ({} != {}), {}, {})",
]


def _extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    unary = st.builds(lambda form, a: form.format(a), st.sampled_from(UNARY), inner)
    binary = st.builds(lambda form, a, b: form.format(a, b), st.sampled_from(BINARY), inner, inner)
    choice = st.builds(
        lambda form, a, b, c, d: form.format(a, b, c, d), st.sampled_from(CHOICES), inner, inner, inner, inner
    )
    return unary | binary | choice


expressions = st.recursive(st.sampled_from(LEAVES), _extend, max_leaves=12)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-310, 1e30, 1.0, -1.0]


@st.composite
def rules(draw: Any) -> str:
    a, b, p = (draw(expressions) for _ in range(3))
    return (
        "name: Drawn\nhyper: {lr: 0.1, k: {default: 0.75}}\nstate: {a: 0.5, b: p}\n"
        f"step: |\n  x = {draw(expressions)}\n  a = {a} + 0*a\n  y = minimum(x, {draw(expressions)})\n"
        f"  b = maximum(y, {b}) + b*0\n  p = where(isfinite(x), {p}, y)\n"
    )


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3), dtype)
        special = rng.random(shape) < 0.2
        return np.asarray(np.where(special, rng.choice(SPECIAL, shape), values), dtype)


def _assert_same_bits(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    same &= np.isnan(ours) | (np.signbit(ours) == np.signbit(theirs))
    assert same.all(), f"{what}: {ours[~same][:3]} against {theirs[~same][:3]}"


def _run(
    text: str, backend: str, seed: int, shapes: list[tuple[int, ...]], dtype: str
) -> tuple[Optimizer, list[np.ndarray]]:
    """Two steps of a rule: the optimizer, and its parameters, which it updated in place."""
    rng = np.random.default_rng(seed)
    params = [_values(rng, s, dtype) for s in shapes]
    opt = Optimizer(rulec.parse(text), params, backend)
    for _ in range(2):
        with np.errstate(all="ignore"):
            opt.step([_values(rng, s, dtype) for s in shapes])
    return opt, params


shapes = st.lists(st.sampled_from([(), (1,), (3,), (17,), (2, 9), (0,), (130,)]), min_size=1, max_size=3)


Shapes = Sequence[tuple[int, ...]]

DTYPES, SEEDS = st.sampled_from(["float32", "float64", "float16"]), st.integers(0, 2**31)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@examples(4)
@given(rules(), shapes, DTYPES, SEEDS)
def test_cpu_and_numpy_give_the_same_bits(text: str, shapes: list[tuple[int, ...]], dtype: str, seed: int) -> None:
    check_cpu_beside_numpy(text, shapes, dtype, seed)


@pytest.mark.slow
@examples(60)
@given(rules(), shapes, DTYPES, SEEDS)
def test_cpu_and_numpy_give_the_same_bits_in_many(
    text: str, shapes: list[tuple[int, ...]], dtype: str, seed: int
) -> None:
    check_cpu_beside_numpy(text, shapes, dtype, seed)


def check_cpu_beside_numpy(text: str, shapes: list[tuple[int, ...]], dtype: str, seed: int) -> None:
    """Steps a rule by both."""
    (cpu, ours), (plain, theirs) = (_run(text, backend, seed, shapes, dtype) for backend in ("cpu", "numpy"))
    for name, p, expected in zip(cpu.names, ours, theirs, strict=True):
        _assert_same_bits(p, expected, f"p of {name} by\n{text}")
        for state in ("a", "b"):
            _assert_same_bits(cpu.state(name)[state], plain.state(name)[state], f"{state} of {name} by\n{text}")


@examples(25)
@given(rules(), shapes, SEEDS)
def test_numpy_and_the_reference_give_the_same_bits_in_float64(
    text: str, shapes: list[tuple[int, ...]], seed: int
) -> None:
    opt, ours = _run(text, "numpy", seed, shapes, "float64")
    rng = np.random.default_rng(seed)
    reference = ReferenceOptimizer(rulec.parse(text), [_values(rng, s, "float64") for s in shapes])
    for _ in range(2):
        reference.step([_values(rng, s, "float64") for s in shapes])
    for name, p, expected in zip(opt.names, ours, reference.params, strict=True):
        _assert_same_bits(p, expected, f"p of {name} by\n{text}")


def _subject(backend: str) -> Subject:
    return Subject(registry.get(backend), NumpyKind(), IEEE)


@pytest.mark.filterwarnings("ignore:.*skipped the step:RuntimeWarning")
@examples(8)
@given(reducing_rules(), reducing.shapes, st.integers(0, 1000), st.booleans())
def test_numpy_follows_the_reference_through_reductions_levels_and_branches(
    text: str, shapes: list[tuple[int, ...]], seed: int, special: bool
) -> None:
    check_against_reference(_subject("numpy"), rulec.parse(text), shapes, seed, special)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*skipped the step:RuntimeWarning")
@examples(80)
@given(reducing_rules(), reducing.shapes, st.integers(0, 1000), st.booleans())
def test_numpy_follows_the_reference_through_many(
    text: str, shapes: list[tuple[int, ...]], seed: int, special: bool
) -> None:
    check_against_reference(_subject("numpy"), rulec.parse(text), shapes, seed, special)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*skipped the step:RuntimeWarning")
@examples(8)
@given(reducing_rules(), reducing.shapes, st.integers(0, 1000), st.booleans())
def test_cpu_follows_the_reference_through_reductions_levels_and_branches(
    text: str, shapes: list[tuple[int, ...]], seed: int, special: bool
) -> None:
    check_against_reference(_subject("cpu"), rulec.parse(text), shapes, seed, special)


def check_branching(count: int, follow: Callable[[str, Shapes, int], None], most: int = 4) -> None:
    """Checks drawn rules with branches. Rules of axes get tensors of one number of dimensions."""

    @examples(count)
    @given(branching_rules(most), reducing.shapes, st.integers(0, 1000))
    def run(text: str, shapes: list[tuple[int, ...]], seed: int) -> None:
        alike = [s for s in shapes if len(s) == len(max(shapes, key=len))]
        follow(text, alike if max(alike) and "axis(" in text else [(3, 4)] if "axis(" in text else shapes, seed)

    run()


def _follow(backend: str) -> Callable[[str, Shapes, int], None]:
    return lambda text, shapes, seed: check_against_reference(_subject(backend), rulec.parse(text), shapes, seed)


def test_numpy_follows_the_reference_through_branches() -> None:
    check_branching(2, _follow("numpy"), most=1)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "count"), [("numpy", 60), ("cpu", 8), ("c", 8), ("torch", 25), ("jax", 6)])
def test_all_follow_the_reference_through_branches(backend: str, count: int) -> None:
    follows = {"torch": follow_in_torch, "jax": follow_in_jax}
    check_branching(count, follows.get(backend) or _follow(backend))


def test_a_branch_that_forgets_its_other_arm_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value with the axes of the arm that runs alone, and reductions that leave out tensors on the other arm."""
    cases = {
        "rulec.compiler.lower.widened": (
            lambda value, axes, inference: value,
            "step: |\n  if t > 0:\n    a = 1\n  else:\n    a = g\n  direction = g + sum(a)\n",
        ),
        "rulec.runtime.buckets.bucket.Bucket.specializes": (
            lambda bucket, decided, alike: True,
            'step: |\n  a = 0\n  if t > 3:\n    a = sum(g, per="model")\n  direction = a + sum(g, per="model")\n',
        ),
    }
    for place, (wrong, text) in cases.items():
        shapes, follow = [(3, 4), (5,)], _follow("numpy")
        follow(f"name: Right\n{text}", shapes, 0)
        with monkeypatch.context() as patch:
            patch.setattr(place, wrong)
            with pytest.raises((AssertionError, RuleError)):
                follow(f"name: Wrong\n{text}", shapes, 0)


def test_a_wrong_reduction_would_be_noticed() -> None:
    rule = rulec.parse('name: Right\nstep: |\n  direction = g*sum(g, per="row")\n')
    subject = Subject(broken_stages.SkipsNan(), NumpyKind(), IEEE)
    check_against_reference(subject, rule, [(3, 4)], 0)
    with pytest.raises(AssertionError, match="after step 4 of the runtime"):
        check_against_reference(subject, rule, [(3, 4)], 0, special=True)


def test_a_wrong_kernel_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="demo"):
        _assert_same_bits(np.array([0.0]), np.array([-0.0]), "demo")
    with pytest.raises(AssertionError, match="demo"):
        _assert_same_bits(np.array([1.0]), np.array([np.nextafter(1.0, 2.0)]), "demo")
