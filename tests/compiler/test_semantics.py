"""What a rule means: the compiled program against the lines run one by one, and float64 against 50 digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rulec
from rulec.compiler.interpreter import arithmetic
from rulec.compiler.ir import verify
from rulec.compiler.matrix import takes_eigenvectors
from rulec.compiler.pipeline import passes
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.check import check_rule
from rulec.language.expr.node import Op, const, name, node, walk
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign
from tests.compiler.plain import PlainRun
from tests.compiler.rules import rules
from tests.language import expressions
from tests.library import by_kind, single

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.yaml"))
ALL = [*rulec.rules(), *(str(path) for path in EXAMPLES)]
STEPPED = [*single(), *(str(path) for path in EXAMPLES)]
SHAPE = (2, 3, 4)


def whole(rule_name: str) -> Rule:
    """A rule of the library; a wrapper around Adam, which it lets move something in three steps.

    What moves only the weights that began near zero has some of them.
    """
    rule = rulec.load(rule_name)
    if not rule.wraps:
        return rule.bind(cutoff=1.0) if "cutoff" in rule.hyper else rule
    wrapped = rule(*[rulec.load("adam")] * len(rule.wraps))
    return wrapped.bind(every=2) if "every" in wrapped.hyper else wrapped


def shapes_for(rule: Rule) -> list[tuple[int, ...]]:
    """A rank is more than small and empty matrices have."""
    return [(), (5,), (6, 8), (8, 6)] if "rank" in rule.settings else SHAPES


def same(a: Any, b: Any) -> None:
    """Equal but for the rounding that another order of adding makes."""
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-10, atol=1e-13)


def hyper_of(rule: Rule) -> dict[str, float]:
    return {key: float(h.default) for key, h in rule.hyper.items()}  # type: ignore[arg-type]


@given(rules(), st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_compiled_is_what_the_lines_say(rule: Rule, seed: int) -> None:
    check_beside_its_lines(rule, seed)


@pytest.mark.slow
@given(rules(), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_many_compiled_are_what_the_lines_say(rule: Rule, seed: int) -> None:
    check_beside_its_lines(rule, seed)


def check_beside_its_lines(rule: Rule, seed: int) -> None:
    """Three steps of what is compiled, and of the lines one by one."""
    rng = np.random.default_rng(seed)
    param = rng.normal(size=SHAPE)
    plain = PlainRun(rule, param, hyper_of(rule))
    compiled = ReferenceOptimizer(rule, [param])
    for _ in range(3):
        g = rng.normal(size=SHAPE)
        if not np.isfinite(plain.p).all() or np.abs(plain.p).max() > 1e6:
            return  # beyond here rounding decides
        with np.errstate(all="ignore"):
            plain.update(g)
        compiled.step([g])
        if any(not np.isfinite(x).all() or np.abs(x).max() > 1e6 for x in (plain.p, *plain.states.values())):
            return
        same(compiled.params[0], plain.p)
        for key, value in compiled.state(0).items():
            same(value, plain.states[key])


@given(rules())
@settings(max_examples=25, deadline=None)
def test_every_pass_leaves_a_program_that_holds(rule: Rule) -> None:
    facts = {"ndim": 2, "numel": 12, "rows": 3, "cols": 4}
    for pass_name, program in passes(check_rule(rule), facts, {}):
        assert verify(program, pass_name) is program


@given(rules())
@settings(max_examples=25, deadline=None)
def test_text_of_a_rule_reads_back(rule: Rule) -> None:
    again = rulec.parse(rule.to_yaml())
    assert again == rule
    assert again.to_yaml() == rule.to_yaml()


@pytest.mark.parametrize("rule_name", ALL, ids=lambda n: Path(n).stem)
def test_text_of_every_rule_reads_back(rule_name: str) -> None:
    rule = rulec.load(rule_name)
    again = rulec.parse(rule.to_yaml())
    assert again == rule
    assert hash(again) == hash(rule)
    if not rule.wraps:
        assert [s.value for s in stores(again)] == [s.value for s in stores(rule)]


def stores(rule: Rule) -> list[Any]:
    program = rulec.compile(rule)
    return [*program.scalars.stores, *(s for stage in program.stages for s in stage.stores), *program.finish]


SHAPES: list[tuple[int, ...]] = [(), (5,), (4, 3), (2, 3, 4), (2, 1, 3, 2), (0,), (3, 0), (1, 1)]


@pytest.mark.parametrize("rule_name", STEPPED, ids=lambda n: Path(n).stem)
def test_float64_against_50_digits(rule_name: str) -> None:
    rule = whole(rule_name)
    shapes = shapes_for(rule)
    if takes_eigenvectors(rule):
        shapes = [shape for shape in shapes if len(shape) < 2 or math.prod(shape) < 2] + [(3, 3), (4, 2, 2)]
    # Rounding in a root of a matrix without full rank, and in its vectors, is enlarged by what is divided by.
    close = 1e-7 if {Op.EIGH, Op.INVERSE_ROOT, Op.SINGULAR_VECTORS} & {n.op for n in walk(rule.expressions)} else 1e-13
    rng = np.random.default_rng(3)
    params = [rng.normal(size=shape) for shape in shapes]
    fast, exact = ReferenceOptimizer(rule, params), ReferenceOptimizer(rule, params, arithmetic="mpmath")
    for step in range(12):
        if step >= 3 and (fast.params[1] != params[1]).any():
            break  # some rules wait for several gradients
        grads = [rng.normal(size=shape) for shape in shapes]
        fast.step(grads)
        exact.step(grads)
    for before, a, b in zip(params, fast.params, exact.params, strict=True):
        assert a.shape == before.shape
        np.testing.assert_allclose(a, np.asarray(b, np.float64), rtol=close, atol=close / 100)
        # What is centred has nothing left where it is one number.
        assert a.size < 2 or (a != before).any()


@pytest.mark.parametrize("rule_name", by_kind(STEPPED), ids=lambda n: Path(n).stem)
def test_tensors_do_not_meet(rule_name: str) -> None:
    """A rule without a level beyond the tensor gives each tensor what it would get alone."""
    rule = whole(rule_name)
    shared = any(state.per in ("group", "model") for state in rule.state.values())
    if shared or rulec.compile(rule).joins:
        pytest.skip("its tensors share states or reductions")
    rng = np.random.default_rng(4)
    params = [rng.normal(size=shape) for shape in shapes_for(rule)]
    grads = [[rng.normal(size=p.shape) for p in params] for _ in range(2)]
    # Tensors draw their random numbers by their place, so each is alone but at its own.
    together = ReferenceOptimizer(rule, params)
    for step in grads:
        together.step(step)
    for i in range(len(params)):
        alone = ReferenceOptimizer(rule, params)
        for step in grads:
            alone.step([g if j == i else None for j, g in enumerate(step)])
        np.testing.assert_array_equal(alone.params[i], together.params[i])
        assert all((a == b).all() for j, (a, b) in enumerate(zip(alone.params, params, strict=True)) if j != i)


def _close(a: float, b: Any, bound: float) -> bool:
    exact = float(b)
    if math.isnan(a) or math.isnan(exact):
        return math.isnan(a) and math.isnan(exact)
    if math.isinf(a) or math.isinf(exact):
        return a == exact
    return abs(a - exact) <= bound


#: For each operation, how many units in the last place its float64 result may be off the exact one.
ULPS = {Op.POW: 2, Op.CBRT: 2, Op.EXP: 2, Op.LOG: 2, Op.TANH: 3, Op.SIGMOID: 4, Op.ERF: 2, Op.RSQRT: 2}
SPECIAL = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, -1e3, 1e300, -1e-300, 5e-324, math.inf, -math.inf, math.nan]


@given(
    expressions.arithmetic(("x", "y", "z")),
    st.lists(st.sampled_from(SPECIAL) | st.floats(-10, 10), min_size=3, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_every_operation_against_50_digits(value: Any, given_values: list[float]) -> None:
    """Each operation on the float64 numbers it was given is what the exact one on these numbers rounds to.

    The sign of zero and all that follows from it is IEEE's alone, so operations on zeros are left out.
    """
    rule = Rule(
        "Drawn",
        (Assign("p", node(Op.ADD, value, node(Op.MUL, const(0), name("p")))),),
        inputs=dict.fromkeys("xyz", "scalar"),
    )
    _, program = next(passes(rule, {}, {}))
    fast, exact = arithmetic("float64"), arithmetic("mpmath")
    values: dict[Any, Any] = {}
    inputs = dict(zip("xyz", given_values, strict=True)) | {"p": 0.0}
    with np.errstate(all="ignore"):
        for part in walk([s.value for s in program.stages[0].stores]):
            if part.op in (Op.CONST, Op.LOAD):
                values[part] = np.float64(part.arg if part.op is Op.CONST else inputs[str(part.arg)])  # type: ignore[arg-type]
                continue
            args = [values[a] for a in part.args]
            values[part] = found = fast.table[part.op](*args)
            if any(not isinstance(a, np.bool_) and a == 0 for a in args) or part.op in (Op.MOD, Op.FLOORDIV):
                continue
            wanted = exact.table[part.op](*(a if isinstance(a, np.bool_) else exact.array(a) for a in args))
            if abs(float(wanted)) < 1e-300:
                continue  # subnormal results are off by more of their own units
            bound = ULPS.get(part.op, 1) * math.ulp(float(wanted)) if np.isfinite(float(wanted)) else 0.0
            assert _close(float(found), wanted, bound), (part, args, found, wanted)


_POLYNOMIAL = (Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MINIMUM, Op.MAXIMUM)


@pytest.mark.slow
@given(st.recursive(
    st.sampled_from(["g", "p", "a", "t"]).map(name) | st.floats(-4, 4).map(const),
    lambda inner: st.builds(node, st.sampled_from(_POLYNOMIAL[:3] + _POLYNOMIAL[5:]), inner, inner)
    | st.builds(node, st.sampled_from([Op.ABS]), inner),
    max_leaves=20,
), st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whole_expressions_within_their_error_bound(value: Any, seed: int) -> None:
    """float64 strays from the exact value of a whole expression by no more than its rounding errors can add up to."""
    rng = np.random.default_rng(seed)
    param, g = rng.normal(size=4), rng.normal(size=4)
    rule = Rule(
        "Drawn",
        (Assign("direction", node(Op.ADD, value, node(Op.MUL, const(0), name("g")))),),
        {"a": rulec.load("adam").hyper["beta1"]},
    )
    fast, exact = ReferenceOptimizer(rule, [param], {}), ReferenceOptimizer(rule, [param], {}, "mpmath")
    fast.step([g])
    exact.step([g])
    size = _largest(value, {"g": np.abs(g), "p": np.abs(param), "a": 0.9, "t": 1.0})
    bound = (np.abs(param) + 1e-3 * size) * (value.size + 4) * 2.0**-52
    assert (np.abs(fast.params[0] - np.asarray(exact.params[0], np.float64)) <= bound).all()


def _largest(value: Any, names: dict[str, Any]) -> Any:
    """An upper bound of what any part of the expression may be, sign aside."""
    if value.op is Op.CONST:
        return abs(value.arg)
    if value.op is Op.NAME:
        return names[str(value.arg)]
    parts = [_largest(a, names) for a in value.args]
    if value.op is Op.MUL:
        return parts[0] * parts[1]
    return sum(parts[1:], parts[0])
