"""What the records of operations claim, beside computed numbers: bounds, regions, degrees, forms in sympy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rulec.analysis.bounds import Bounds
from rulec.analysis.regions import RegionsOf, region
from rulec.language.export.sympy import FromSympy, ToSympy
from rulec.language.expr.arithmetic import NUMPY, mpmath_context, mpmath_table
from rulec.language.expr.node import Node, name, node
from rulec.language.expr.ops import SPECS, Kind, Op, having

#: Numbers of every region, at the ends of domains, and large.
NUMBERS = (-math.inf, -7.5, -2.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.25, 0.999, 1.0, 1.001, 1.7, 3.0, 5.0, math.inf)
FUNCTIONS = [op for op in SPECS if op.kind is Kind.FUNCTION and op is not Op.WHERE]


def computed(op: Op, *operands: float) -> float:
    with np.errstate(all="ignore"):
        return float(NUMPY[op](*map(np.float64, operands)))


def call(op: Op) -> Node:
    return node(op, *map(name, "ab"[: SPECS[op].arity]))


@pytest.mark.parametrize("op", having("bounds"), ids=lambda op: op.name)
def test_results_lie_within_the_bounds(op: Op) -> None:
    ends = [(a, b) for a, b in itertools.combinations_with_replacement(NUMBERS[::3], 2)]
    for pair in itertools.product(ends, repeat=min(SPECS[op].arity, 2)):
        names = dict(zip("ab", pair, strict=False))
        if op is Op.WHERE:
            continue
        low, high = Bounds(names).of(call(op))
        inside = [[x for x in NUMBERS if a <= x <= b] for a, b in pair]
        values = [computed(op, *operands) for operands in itertools.product(*inside)]
        assert all(low <= v <= high for v in values if not math.isnan(v)), (op, pair)


@pytest.mark.parametrize("op", FUNCTIONS, ids=lambda op: op.name)
def test_results_lie_in_the_regions(op: Op) -> None:
    """In exact arithmetic; a region without an image may have NaN."""
    finite = [x for x in NUMBERS if math.isfinite(x)]
    for operands in itertools.product(finite, repeat=SPECS[op].arity):
        known = RegionsOf({key: region(x) for key, x in zip("ab", operands, strict=False)}).of(call(op))
        value = mpmath_table()[op](*map(mpmath_context().mpf, operands))
        if known is not None:
            assert mpmath_context().isfinite(value), (op, operands)
            assert region(value) <= known, (op, operands)


@pytest.mark.parametrize("op", having("degree"), ids=lambda op: op.name)
def test_a_positive_factor_of_all_operands_comes_out_with_its_degree(op: Op) -> None:
    degree = float(SPECS[op].degree or 0)
    for operands in itertools.product((-2.5, -0.5, 0.75, 3.0), repeat=SPECS[op].arity):
        plain, scaled = computed(op, *operands), computed(op, *(4096.0 * x for x in operands))
        np.testing.assert_allclose(scaled, plain * 4096.0**degree, rtol=1e-14)


@pytest.mark.parametrize("op", having("rises"), ids=lambda op: op.name)
def test_a_function_that_rises_never_falls_and_is_undefined_below_its_domain(op: Op) -> None:
    first = SPECS[op].rises
    assert first is not None
    values = [computed(op, x) for x in NUMBERS if x >= first]
    assert values == sorted(values)
    assert all(math.isnan(computed(op, x)) for x in NUMBERS if x < first)


@pytest.mark.parametrize("op", having("of_sizes"), ids=lambda op: op.name)
def test_an_operation_of_sizes_sees_no_sign_and_never_falls(op: Op) -> None:
    sizes = [x for x in NUMBERS if x >= 0]
    for operands in itertools.product(sizes, repeat=SPECS[op].arity):
        value = computed(op, *operands)
        assert value == computed(op, *(-x for x in operands))
        assert value <= computed(op, *(2 * x + 1 for x in operands))


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if op not in (Op.RSQRT, Op.SIGMOID)], ids=lambda op: op.name)
def test_sympy_reads_back_what_it_was_given(op: Op) -> None:
    """But for those that sympy writes with other operations."""
    value = call(op)
    again = FromSympy({"a": name("a"), "b": name("b")}).node(ToSympy().number(ToSympy().expression(value, {})))
    if op is Op.ISFINITE:
        assert again.args[0].args[0] is value
    elif op in (Op.MINIMUM, Op.MAXIMUM, Op.HYPOT):
        assert again.op is op
        assert {*again.args} == {*value.args}
    else:
        assert again is value


def test_records_are_of_all_operations_that_numbers_have() -> None:
    kinds = (Kind.ARITHMETIC, Kind.COMPARE, Kind.LOGIC, Kind.FUNCTION)
    assert {op for op in Op if op.kind in kinds} <= SPECS.keys()
