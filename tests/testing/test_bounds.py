"""The tolerances are sound, for no rounding leaves them, and sharp, for small mistakes do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rulec
from rulec.compiler.layout import kernel_buffers
from rulec.compiler.pipeline import compile
from rulec.compiler.reference import ReferenceOptimizer
from rulec.compiler.scalars import ScalarTable
from rulec.language.expr.arithmetic import NUMPY, mpmath_context, mpmath_table
from rulec.language.expr.node import Kind, Op
from rulec.language.expr.ops import SPECS
from rulec.testing.bounds import Bounds, StageInputs, rounded_to
from rulec.testing.cases import SPECIAL
from rulec.testing.interval import Array, Range, Truth, apply, point, widen
from rulec.testing.kinds import EPS, IEEE, XLA

FUNCTIONS = [op for op in Op if op.kind in (Kind.ARITHMETIC, Kind.FUNCTION)]
#: Without those of no program, and those of several operations.
SIMPLE = [op for op in FUNCTIONS if op not in (Op.ATAN2, Op.FLOORDIV, Op.RSQRT, Op.WHERE, Op.ISFINITE)]


def arity(op: Op) -> int:
    return SPECS[op].arity


def samples(random: np.random.Generator, count: int) -> tuple[Range, Callable[[], Array]]:
    """Ranges between special and ordinary numbers, and a way to draw numbers from them."""
    # A zero at the end of a range has the sign of the numbers beside it, so there is no -0 among these.
    numbers = np.array([x for x in SPECIAL if not np.isnan(x) and str(x) != "-0.0"] + list(random.standard_normal(20)))
    ends = np.sort(random.choice(numbers, (2, count)), axis=0)
    ends[1, ::4] = ends[0, ::4]

    def draw() -> Array:
        with np.errstate(all="ignore"):
            inner = ends[0] + (ends[1] - ends[0]) * random.uniform(size=count)
        inner = np.clip(np.where(np.isfinite(inner), inner, 0.0), *ends)
        return np.choose(random.integers(0, 3, count), [ends[0], ends[1], inner])

    return Range(ends[0], ends[1], np.zeros(count, bool)), draw


@pytest.mark.parametrize("op", SIMPLE, ids=lambda op: op.name)
def test_a_range_holds_the_results_of_all_numbers_in_its_operands(op: Op) -> None:
    random = np.random.default_rng(SIMPLE.index(op))
    operands = [samples(random, 4000) for _ in range(arity(op))]
    with np.errstate(all="ignore"):
        result = apply(op, [r for r, _ in operands])
        for _ in range(5):
            drawn = [draw() for _, draw in operands]
            value = NUMPY[op](*drawn)
            # Half an ulp for the value's own rounding, and for that of the ends.
            slack = 8 * EPS["float64"] * np.abs(np.where(np.isfinite(value), value, 0.0))
            inside = (result.low - slack <= value) & (value <= result.high + slack)
            wrong = np.flatnonzero(~np.where(np.isnan(value), result.nan, inside))
            assert [(d[wrong[0]], value[wrong[0]]) for d in drawn if wrong.size] == []


@pytest.mark.parametrize("op", [o for o in Op if o.kind is Kind.COMPARE], ids=lambda op: op.name)
def test_a_comparison_knows_what_it_does_not_know(op: Op) -> None:
    random = np.random.default_rng(1)
    (a, draw_a), (b, draw_b) = samples(random, 4000), samples(random, 4000)
    result = apply(op, [a, b])
    for _ in range(5):
        value = NUMPY[op](draw_a(), draw_b())
        assert np.where(value, result.true, result.false).all()
    points = [point(x) for x in np.meshgrid(SPECIAL, SPECIAL)]
    exact = apply(op, points)
    expected = NUMPY[op](*np.meshgrid(SPECIAL, SPECIAL))
    assert np.array_equal(exact.true, expected)
    assert np.array_equal(exact.false, ~expected)


def test_logic_and_choice() -> None:
    yes, no, maybe = (Truth(np.array([t]), np.array([f])) for t, f in ((True, False), (False, True), (True, True)))
    assert apply(Op.AND, [yes, no]) == no
    assert apply(Op.OR, [no, yes]) == yes
    assert apply(Op.NOT, [yes]) == no
    both = apply(Op.AND, [yes, maybe])
    assert (both.true.all(), both.false.all()) == (True, True)
    one, two = point(np.array([1.0])), point(np.array([2.0]))
    assert apply(Op.WHERE, [no, one, two]).value() == 2.0
    chosen = apply(Op.WHERE, [maybe, one, two])
    assert (chosen.low, chosen.high) == (1.0, 2.0)


def test_only_nan_is_allowed_where_there_is_no_number() -> None:
    with np.errstate(all="ignore"):
        r = apply(Op.SUB, [point(np.array([np.inf])), point(np.array([np.inf]))])
        r = apply(Op.MAXIMUM, [r, point(np.array([0.0]))])
    assert (r.surely_nan.all(), r.nan.all()) == (True, True)


def test_zero_stays_exact_and_overflow_is_infinite() -> None:
    format32 = (EPS["float32"], 2.0**-126, (2 - 2.0**-23) * 2.0**127)
    zero = widen(point(np.array([0.0])), 0.5, *format32, False)
    assert (zero.low, zero.high) == (0.0, 0.0)
    huge = widen(point(np.array([1e39])), 0.5, *format32, False)
    assert (huge.low, huge.high) == (format32[2], np.inf)
    tiny = widen(point(np.array([1e-40])), 0.5, *format32, True)
    assert tiny.low < 0 < tiny.high


def test_stored_values_may_be_rounded_through_float32() -> None:
    tie = 1 + 2.0**-8  # between two bfloat16: to even, unless something below float32 says otherwise
    r = rounded_to(Range(*(np.array([x]) for x in (tie - 1e-14, tie + 1e-14, False))), "bfloat16")
    assert (r.low, r.high) == (1.0, 1 + 2.0**-7)
    exact = rounded_to(point(np.array([1 + 2.0**-23])), "float32")
    assert exact.low == exact.high == 1 + 2.0**-23


def one_step(rule: rulec.Rule, **hyper: float) -> tuple[dict[str, Array], dict[str, Range]]:
    """The reference's values after a first step, and the float32 bounds with the rule's default hyper-parameters."""
    random = np.random.default_rng(3)
    p = random.standard_normal(500).astype(np.float32).astype(np.float64)
    g = (random.standard_normal(500) * 10.0 ** random.uniform(-7, 1, 500)).astype(np.float32).astype(np.float64)
    program = compile(rule)
    defaults = {k: float(h.default) for k, h in rule.standalone().hyper.items()}  # type: ignore[arg-type]
    table, _ = ScalarTable(program.scalars).evaluate((), defaults, 1, {}, {b.name: 1.0 for b in program.states})
    loads = {b.name: np.zeros(500) for b in kernel_buffers(program)} | {"p": p, "g": g}
    ranges = Bounds(program, "float32", IEEE).ranges(StageInputs(loads, np.broadcast_to(table, (500, table.size))))[0]
    reference = ReferenceOptimizer(rule, [p], hyper)
    reference.step([g])
    return {"p": reference.params[0], **reference.state(0)}, ranges


def outside(values: dict[str, Array], ranges: dict[str, Range]) -> int:
    return sum(int((~((r.low <= values[k]) & (values[k] <= r.high))).sum()) for k, r in ranges.items())


def test_the_bounds_hold_the_reference_and_are_a_few_ulps_wide() -> None:
    values, ranges = one_step(rulec.load("adamw"))
    assert outside(values, ranges) == 0
    for name, r in ranges.items():
        size = np.maximum(np.abs(r.low), np.abs(r.high))
        assert np.max((r.high - r.low) / size) < 16 * EPS["float32"], name


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta1", 0.900002), ("beta2", 0.999002), ("eps", 1.02e-8), ("lr", 1.002e-3), ("weight_decay", 1.1e-2)],
)
def test_small_mistakes_leave_the_bounds(name: str, value: float) -> None:
    values, ranges = one_step(rulec.load("adamw"), **{name: value})
    assert outside(values, ranges) > 0


def test_machines_without_subnormal_numbers_may_take_them_for_zero() -> None:
    program = compile(rulec.parse("name: Log\nstep: |\n  p = log(g)\n"))
    loads = {"g": np.array([1e-40]), "p": np.array([1.0])}
    for numerics, lowest in ((IEEE, -92.2), (XLA, -np.inf)):
        r = Bounds(program, "float32", numerics).ranges(StageInputs(loads, np.zeros((1, 0))))[0]["p"]
        assert r.low[0] == pytest.approx(lowest, abs=0.1)


def test_the_definition_of_powers_is_the_c_standards() -> None:
    """NumPy alone takes the square root for one exponent of 0.5, mpmath a complex number for a negative base."""
    bases, roots = np.array([-np.inf, -0.0, 4.0, -4.0, np.nan]), [np.inf, 0.0, 2.0, np.nan, np.nan]
    for exponent in (0.5, np.array(0.5), np.full(5, 0.5)):
        with np.errstate(invalid="ignore"):
            value = NUMPY[Op.POW](bases, exponent)
        np.testing.assert_array_equal(value, roots)
        assert not np.signbit(value[1])
    assert NUMPY[Op.POW](np.float32(4), np.float32(0.5)).dtype == np.float32
    exact, power = mpmath_context(), mpmath_table()[Op.POW]
    assert power(exact.mpf("-inf"), exact.mpf(0.5)) == exact.inf
    assert power(exact.mpf("-inf"), exact.mpf(-0.5)) == 0
    assert power(exact.mpf("-inf"), exact.mpf(3)) == -exact.inf
