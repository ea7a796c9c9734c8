"""Proofs about the storage of states, held against runs on wild gradients and against rules that only look alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rulec
from rulec import Rule
from rulec.analysis import StateStorage, storage
from rulec.analysis.bounds import ANY, POSITIVE, UNIT, Bounds, names_bounds
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Node, Op, const, name, node, walk
from rulec.language.hyper import Hyper
from tests.analysis.runs import COMPOSED, Array, Trial
from tests.analysis.test_drawn import drawn_rules, few, many

LIBRARY = (*rulec.rules(wrappers=False), *COMPOSED, "mechanic(adam)", "accumulate(adam)", "yogi + decay")
STEPS = 12
SLOW = "bfloat16 int8 softsign8 dynamic8 float8_e4m3 float8_e5m2 dynamic4"


@cache
def stored(text: str) -> Mapping[str, StateStorage]:
    return storage(rulec.load(text))


def rule(step: str, state: str = "v: 0", hyper: str = "lr: 0.1, beta2: 0.999, rho: 0.5", more: str = "") -> Rule:
    """A rule of these lines."""
    lines = "".join(f"  {line}\n" for line in step.split("; "))
    return rulec.parse(f"name: Test\nhyper: {{{hyper}}}\nstate: {{{state}}}\n{more}step: |\n{lines}")


def only(step: str, state: str = "v: 0", hyper: str = "lr: 0.1, beta2: 0.999, rho: 0.5") -> StateStorage:
    """The storage of the first state of a rule of these lines."""
    return next(iter(storage(rule(step, state, hyper)).values()))


def wild(rng: np.random.Generator, shape: tuple[int, ...], before: Array) -> Array:
    """Gradients of all sizes: some zero, some as before, some the opposite, some of the square root of nothing."""
    drawn = rng.normal(size=shape) * 10.0 ** rng.uniform(-12, 8, size=shape)
    kind = rng.integers(0, 6, size=shape)
    chosen = np.select([kind == 0, kind == 1, kind == 2, kind == 3], [0 * drawn, before, -before, 0.99 * before], drawn)
    return np.asarray(chosen)


def settings_in_range(rng: np.random.Generator, rule: Rule) -> dict[str, float]:
    """Hyper-parameters anywhere in their ranges, often near an end; static ones, counts and `lr` as they are."""
    values = {}
    for key, hyper in rule.standalone().hyper.items():
        low, high = max(hyper.min, hyper.above), min(hyper.max, hyper.below)
        if hyper.static or hyper.whole or not math.isfinite(low) or rng.random() < 0.3:
            continue
        top = high if math.isfinite(high) else low + 3.0
        part = float(rng.choice([1e-9, 1e-3, 0.5, 0.999, 1 - 1e-12, *([0.0, 1.0] if hyper.max == top else [])]))
        value = low + part * (top - low)
        if hyper.min <= value <= hyper.max and hyper.above < value < hyper.below:
            values[key] = value
    return values


def least(run: ReferenceOptimizer, key: str) -> float:
    """The least number of a state over all tensors; infinity where it has none."""
    arrays = [run.state(i)[key] for i in range(len(run.params)) if key in run.state(i)]
    return min((float(np.nanmin(a)) for a in arrays if np.isfinite(a).any()), default=math.inf)


def negative(rule: Rule, claimed: list[str], seed: int, *, in_range: bool) -> Iterator[tuple[str, int]]:
    """The claimed states that fell below 0 in a run on wild gradients, each with the step."""
    rng = np.random.default_rng(seed)
    trial = Trial(rule, settings_in_range(rng, rule) if in_range else {}, seed, blank=seed % 2 == 1)
    run, grads = trial.optimizer(), [0 * p for p in trial.params]
    for step in range(STEPS):
        grads = [wild(rng, g.shape, g) for g in grads]
        with np.errstate(all="ignore"):
            trial.step(run, grads, step)
        yield from ((key, step) for key in claimed if least(run, key) < 0)


@pytest.mark.parametrize("text", LIBRARY)
def test_states_without_a_sign_never_have_one(text: str) -> None:
    claimed = [key for key, state in stored(text).items() if state.unsigned]
    if claimed:
        for seed in range(4):
            assert not [*negative(rulec.load(text), claimed, seed, in_range=seed > 1)]


@pytest.mark.parametrize("text", ["adam", "yogi", "adafactor_paper", "adabelief"])
def test_wild_gradients_would_show_a_wrong_claim(text: str) -> None:
    """The same runs with the square of a line taken without one."""
    twisted = {
        "adam": ("v = beta2*v + (1 - beta2)*g*g", "v = beta2*v + (1 - beta2)*g*abs(g)"),
        "yogi": ("sign(v - g**2)*g*g", "sign(v - g**2)*2000*g*g"),
        "adafactor_paper": ("v = v + rho*(s - v)", "v = v + 3*rho*(s - v)"),
        "adabelief": ("(1 - beta2)*(g - m)*(g - m) + eps", "(1 - beta2)*(m - g)*g + eps"),
    }
    text_of = rulec.load(text).to_yaml()
    line, other = twisted[text]
    assert line in text_of
    changed = rulec.parse(text_of.replace(line, other))
    key = "s" if text == "adabelief" else "v"
    assert not storage(changed)[key].unsigned
    assert any(True for seed in range(6) for _ in negative(changed, [key], seed, in_range=False))


PROVED = (
    ("v = beta2*v + (1 - beta2)*g*g", ""),
    ("v = v + rho*(g**2 - v)", "rho: {default: 0.5, min: 0, max: 1}"),
    ("v = rho*(g*g - v) + v", "rho: {default: 0.5, min: 0, max: 1}"),
    ("v = v - rho*(v - abs(g))", "rho: {default: 0.5, min: 0, max: 1}"),
    ("v = v - (1 - beta2)*(v - g**2)", ""),
    ("c = t**-0.8; v = v + c*(g**2 - v)", ""),
    ("v = v - (1 - beta2)*sign(v - g**2)*g**2", ""),
    ("v = v + (1 - beta2)*sign(g*g - v)*g*g", ""),
    ("v = maximum(beta2*v, abs(g))", ""),
    ("v = maximum(v, -g)", ""),
    ("v = sqrt(v*v + g*g)", ""),
    ("v = beta2*v + exp(g)", ""),
    ("v = v + abs(g)**3", ""),
    ("v = where(g > 0, g**2, v)", ""),
    ("v = (g/(v + 1e-8))*(g/(v + 1e-8))", ""),
    ("v = v + norm(g)", ""),
    ("v = beta2*v/(1 - beta2**t) + tanh(g)**2", ""),
)


@pytest.mark.parametrize(("step", "hyper"), PROVED)
def test_states_that_are_never_negative(step: str, hyper: str) -> None:
    state = only(f"{step}; direction = g/(sqrt(v) + 1e-8)", hyper=hyper or "beta2: 0.999")
    assert state.unsigned
    assert state.allowed
    assert state.floor
    assert not state.refused
    assert "at least 0 at first" in state.proof


LOOK_ALIKE = (
    ("v = beta2*v + (1 - beta2)*g*abs(g)", "v: 0", "beta2: 0.999"),
    ("v = v - g*g", "v: 0", ""),
    ("v = abs(g) - v", "v: 0", ""),
    ("v = maximum(v, g) - abs(g)", "v: 0", ""),
    ("v = maximum(beta2*v, g)*g", "v: 0", "beta2: 0.999"),
    ("v = maximum(v, g)", "v: -1", ""),
    ("v = minimum(v, g)", "v: 0", ""),
    ("v = v + m; m = m + g", "v: 0, m: -1", ""),
    ("v = beta2*v + (1 - beta2)*g*g", "v: -1", "beta2: 0.999"),
    ("v = beta2*v + (1 - beta2)*g*g", "v: start", "beta2: 0.999, start: 0"),
    ("v = beta2*v + (1 - beta2)*g*g", "v: 0", "beta2: {default: 0.999, min: 0, max: 2}"),
    ("v = b*v + (1 - b)*g*g", "v: 0", "b: 0.5"),
    ("v = b*v + g*g", "v: 0", "b: {default: 0.5, min: -1, max: 1}"),
    ("v = v + rho*(g**2 - v)", "v: 0", "rho: {default: 0.5, min: 0, max: 1.5}"),
    ("v = v + rho*(g - v)", "v: 0", "rho: {default: 0.5, min: 0, max: 1}"),
    ("v = v - rho*(g**2 - v)", "v: 0", "rho: {default: 0.5, min: 0, max: 1}"),
    ("c = t**0.8; v = v + c*(g**2 - v)", "v: 0", ""),
    ("v = v - (1 - beta2)*sign(v - g**2)*abs(g)", "v: 0", "beta2: 0.999"),
    ("v = v - 2*sign(v - g**2)*g*g", "v: 0", ""),
    ("v = v + (1 - beta2)*sign(v - g**2)*g*g", "v: 0", "beta2: 0.999"),
    ("v = v - (1 - beta2)*sign(v - g)*g", "v: 0", "beta2: 0.999"),
    ("v = log(1 + v) + g", "v: 0", ""),
    ("v = v + tanh(g)", "v: 0", ""),
    ("v = v + g**3", "v: 0", ""),
    ("v = sum(g)", "v: {init: 0, per: tensor}", ""),
    ("v = where(g > 0, v, -v - g*g)", "v: 0", ""),
)


@pytest.mark.parametrize(("step", "state", "hyper"), LOOK_ALIKE)
def test_states_that_only_look_so_have_a_sign(step: str, state: str, hyper: str) -> None:
    judged = only(f"{step}; direction = g + v", state, hyper)
    assert not judged.unsigned
    under_root = only(f"{step}; direction = g/(sqrt(v) + 1e-8)", state, hyper)
    assert not under_root.unsigned
    assert not under_root.allowed
    assert under_root.reason == "v is under a root of a value that was not proved at least 0" or "per:" in state


def test_the_claim_of_one_state_falls_with_that_of_another() -> None:
    held = storage(rule("w = w + v; v = beta2*v + g*g; direction = w", "v: 0, w: 0"))
    fallen = storage(rule("w = w + v; v = beta2*v + g; direction = w", "v: 0, w: 0"))
    assert [held[k].unsigned for k in "vw"] == [True, True]
    assert [fallen[k].unsigned for k in "vw"] == [False, False]


@pytest.mark.parametrize(
    ("step", "state", "floors"),
    [
        ("v = v + g*g; direction = g/sqrt(v)", "v: 0", "v"),
        ("v = v + g*g; direction = g*rsqrt(v + 1e-8)", "v: 0", "v"),
        ("v = v + g*g; direction = g*v**-0.5", "v: 0", "v"),
        ("v = v + g*g; direction = g*sqrt(1/(v + 1))", "v: 0", "v"),
        ("v = v + g*g; direction = g/cbrt(v)", "v: 0", "v"),
        ("v = v + g*g; direction = g*exp(-0.5*log(v))", "v: 0", "v"),
        ("v = v + abs(g); direction = g/(v + 1e-8)", "v: 0", "v"),
        ("v = v + g*g; w = maximum(w, v); direction = g/sqrt(w)", "v: 0, w: 0", "v w"),
        ("direction = g/(r + 1e-8); r = sqrt(v); v = v + g*g", "v: 0, r: 0", "v r"),
        ("direction = g/(r + 1e-8); r = sqrt(u); u = u + v; v = v + g*g", "v: 0, u: 0, r: 0", "v u r"),
        ("v = v + g*g; direction = g*sqrt(v)", "v: 0", ""),
        ("v = v + g*g; direction = sign(g/sqrt(v))", "v: 0", ""),
        ("m = m + g; direction = m/(1 + norm(m))", "m: 0", ""),
        ("m = m + g; direction = m/sqrt(1e-8 + sum(m*m, per=\"row\"))", "m: 0", "m"),
        ("v = v + g*g; direction = where(v > 1, g, 0)", "v: 0", ""),
    ],
)  # fmt: skip
def test_the_floor_is_where_a_denominator_reads_a_state(step: str, state: str, floors: str) -> None:
    judged = storage(rule(step, state))
    assert {key for key, each in judged.items() if each.floor} == set(floors.split())
    for each in judged.values():
        assert each.refused == (("int8",) if each.floor and not each.unsigned else ())


@pytest.mark.parametrize(
    ("step", "state", "reason"),
    [
        ("direction = g + m; m = p", "m: 0", "copy or a mean"),
        ("direction = g + m; m = 0.5*m + 0.5*p", "m: 0", "copy or a mean"),
        ("m = m + rho*(p - m); p = p - lr*(g + m)", "m: 0", "copy or a mean"),
        ("p = p - lr*g; m = beta2*m + (1 - beta2)*p; p = p + 0*m", "m: 0", "copy or a mean"),
        ("direction = g + m", "m: 2*p", "copy or a mean"),
        ("m = p - a; direction = g + m; a = a + g", "m: 0, a: 0", "copy or a mean"),
        ("m = m + 1; direction = g/m", "m: 0", "counts in whole numbers"),
        ("m = where(g > 0, m + 1, 0); direction = g*m", "m: 0", "counts in whole numbers"),
        ("m = m + mean(g); direction = g*m", "m: {init: 0, per: tensor}", "one number for each tensor"),
        ("m = m + mean(g, per='row'); direction = g*m", "m: {init: 0, per: row}", "one number for each row"),
        ("m = m + mean(g, per='model'); direction = g*m", "m: {init: 0, per: model}", "for the whole model"),
        ("m = m + g @ transpose(g); direction = m @ g", "m: {init: 0, shape: [rows, rows]}", "a shape of its own"),
        ("m = m + g; direction = newton_schulz(m)", "m: 0", "matrix decomposition"),
        ("m = m + g; direction = inverse_root(m @ transpose(m), 4) @ g", "m: 0", "matrix decomposition"),
        ("v = v + g*g; a = a + g; direction = g/sqrt(v - a*a)", "v: 0, a: 0", "was not proved"),
        ("v = v + g*g; a = a + g; direction = g/(sqrt(maximum(v - a*a, 0)) + 1e-8)", "v: 0, a: 0", "difference"),
        ("m = m*0.9; direction = g/(1 - m)", "m: 1", "difference"),
    ],
)
def test_states_that_stay_exact(step: str, state: str, reason: str) -> None:
    judged = only(step, state)
    assert not judged.allowed
    assert reason in judged.reason
    assert judged.reason.startswith(f"{judged.name} ")
    assert str(judged).startswith("float32: ")
    assert judged.warnings == ()


@pytest.mark.parametrize(
    "step",
    [
        "m = beta2*m + (g + rho*p); direction = m",
        "m = beta2*m + (1 - beta2)*(g - 0.1*p); direction = m",
        "m = beta2*m + 0.5*g; p = p - lr*m",
        "m = g; direction = g + m",
    ],
)
def test_decay_in_a_momentum_is_no_copy(step: str) -> None:
    assert only(step, "m: 0").allowed


def test_a_rule_says_what_is_exact() -> None:
    said = rule("v = beta2*v + (1 - beta2)*g*g; direction = v", more="storage: {v: exact}\n")
    state = storage(said)["v"]
    assert not state.allowed
    assert state.reason == "the rule says storage: {v: exact}"
    assert state.unsigned
    assert not storage(rulec.load("clip_by_value") >> said)["v"].allowed


@pytest.mark.parametrize(
    ("step", "slow"),
    [
        ("v = 0.5*v + 0.5*g; direction = v", ""),
        ("v = 0.9*v + g; direction = v", "float8_e5m2 dynamic4"),
        ("v = 0.9*v + abs(g); direction = v", "float8_e5m2"),
        ("v = 0.99*v + 0.01*g; direction = v", "float8_e4m3 float8_e5m2 dynamic4"),
        ("v = 0.997*v + 0.003*g; direction = v", SLOW),
        ("v = v + rho*(g*g - v); direction = v", ""),
        ("v = maximum(beta2*v, abs(g)); direction = v", SLOW),
        ("v = maximum(v, abs(g)); direction = v", ""),
        ("v = where(t == 1, g, 0.5*v + g); direction = v", ""),
        ("v = where(t % 4 == 0, 0, v + g); direction = v", ""),
    ],
)  # fmt: skip
def test_slow_means(step: str, slow: str) -> None:
    state = only(step)
    assert {f for warned in state.warned for f in warned.formats} == set(slow.split())
    assert all("bfloat16_sr" in sentence for sentence in state.warnings)
    assert bool(state.warnings_of("float8_e5m2")) is ("float8_e5m2" in slow)


@pytest.mark.parametrize("step", ["v = v + g*g", "v = v + g", "v = where(ndim >= 2, v, v + g*g)", "v = g + v"])
def test_sums_without_decay(step: str) -> None:
    state = only(f"{step}; direction = v")
    assert state.warnings_of("float16")
    assert state.warnings_of("dynamic8")
    assert "adds without decay" in state.warnings[0]


def test_a_mean_in_bfloat16_stays_where_one_in_float32_falls() -> None:
    """Beta 0.999 and 4,000 steps without a gradient: the loss that the warning is about."""
    assert not storage(rulec.load("adam"))["m"].warnings_of("bfloat16")
    assert storage(rulec.load("adam"))["v"].warnings_of("bfloat16")

    def rounded(x: float) -> float:
        scale = 2.0 ** (math.frexp(x)[1] - 8)
        return round(x / scale) * scale

    kept = exact = 1.0
    for _ in range(4000):
        kept, exact = rounded(0.999 * kept), 0.999 * exact
    assert kept > 20 * exact


def test_signs_alone() -> None:
    assert storage(rulec.load("lion"))["m"].warnings_of("dynamic4")
    mixed = only("v = 0.5*v + g; direction = sign(v) + 0.1*v")
    assert not mixed.warnings_of("dynamic4")
    later = storage(rule("v = 0.5*v + g; w = 0.5*w + v; direction = sign(v) + w", "v: 0, w: 0"))
    assert not any(each.warned for each in later.values())
    through = storage(rule("v = 0.5*v + g; w = 0.5*w + sign(v); direction = w", "v: 0, w: 0"))
    assert [bool(through[k].warned) for k in "vw"] == [True, False]


@few
@given(drawn_rules(), st.integers(0, 99))
def test_drawn_rules(rule: Rule, seed: int) -> None:
    check_drawn(rule, seed)


@many
@given(drawn_rules(), st.integers(0, 99))
def test_many_drawn_rules(rule: Rule, seed: int) -> None:
    check_drawn(rule, seed)


def check_drawn(rule: Rule, seed: int) -> None:
    claimed = [key for key, state in storage(rule).items() if state.unsigned]
    assert not [*negative(rule, claimed, seed, in_range=True)]


_ONE = (
    Op.SQRT, Op.ABS, Op.SIGN, Op.EXP, Op.LOG, Op.TANH, Op.CBRT, Op.RSQRT, Op.FLOOR, Op.NEG, Op.ERF, Op.SIGMOID,
)  # fmt: skip
_TWO = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MINIMUM, Op.MAXIMUM, Op.MOD)


def _toward(base: Node, part: Node, target: Node) -> Node:
    return node(Op.ADD, base, node(Op.MUL, part, node(Op.SUB, target, base)))


def _by_sign(base: Node, part: Node, target: Node) -> Node:
    sign = node(Op.SIGN, node(Op.SUB, base, target))
    return node(Op.SUB, base, node(Op.MUL, node(Op.MUL, part, sign), target))


leaves = st.sampled_from(["g", "m", "v", "b", "t"]).map(name) | st.sampled_from([0.5, 1.0, -2.0, 3.0]).map(const)
elementwise = st.recursive(
    leaves,
    lambda x: st.one_of(
        st.builds(node, st.sampled_from(_TWO), x, x),
        st.builds(node, st.sampled_from(_ONE), x),
        st.builds(lambda a, b: node(Op.POW, node(Op.ABS, a), b), x, x),
        st.builds(lambda a, k: node(Op.POW, a, const(k)), x, st.sampled_from([2.0, 3.0, -2.0, 0.5])),
        st.builds(_toward, x, x, x),
        st.builds(_by_sign, x, x, x),
        st.builds(lambda c, a, b: node(Op.WHERE, node(Op.GT, c, const(0)), a, b), x, x, x),
    ),
    max_leaves=8,
)


@few
@given(elementwise, st.integers(0, 99))
def test_values_lie_within_their_bounds(value: Node, seed: int) -> None:
    check_bounds(value, seed)


@many
@given(elementwise, st.integers(0, 99))
def test_many_values_lie_within_their_bounds(value: Node, seed: int) -> None:
    check_bounds(value, seed)


def check_bounds(value: Node, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 200
    numbers = {
        "g": rng.normal(size=size) * 10.0 ** rng.uniform(-3, 3, size=size), "m": rng.normal(size=size),
        "v": rng.exponential(size=size), "b": rng.random(size), "t": rng.integers(1, 9, size=size).astype(float),
    }  # fmt: skip
    bounds = Bounds({**names_bounds({"b": Hyper(0.5, min=0, max=1)}), "v": POSITIVE, "m": ANY})
    known: dict[Node, Array] = {}
    with np.errstate(all="ignore"):
        for part in walk([value]):
            args = [known[a] for a in part.args]
            result = numbers[str(part.arg)] if part.op is Op.NAME else np.full(size, part.arg) if not args else None
            # Zero without a sign: bounds know one zero.
            known[part] = np.asarray(NUMPY[part.op](*args) + 0.0 if result is None else result)
    low, high = bounds.of(value)
    tried = known[value][np.isfinite(known[value])]
    largest = max((float(np.max(np.abs(x[np.isfinite(x)]), initial=0)) for x in known.values()), default=0.0)
    if largest < 1e9:
        assert np.all(tried >= low - 1e-12 * max(largest, 1)), (value, low, tried.min())
        assert np.all(tried <= high + 1e-12 * max(largest, 1)), (value, high, tried.max())


def test_known_bounds() -> None:
    bounds = Bounds(names_bounds({"b": Hyper(0.5, min=0, below=1), "eps": Hyper(0.1, min=0)}))
    b, t, g, one = name("b"), name("t"), name("g"), const(1)
    assert bounds.of(node(Op.SUB, one, node(Op.POW, b, t))) == UNIT
    assert bounds.of(node(Op.DIV, one, node(Op.SUB, one, b))) == (1.0, math.inf)
    assert bounds.of(node(Op.MUL, g, g)) == POSITIVE
    assert bounds.of(g) == ANY
    assert bounds.of(node(Op.LOG, b)) == (-math.inf, 0.0)


@pytest.mark.parametrize(
    ("rule", "exact"),
    [
        ("adamw", set()),
        ("adafactor", set()),  # rows and columns are arrays
        ("prodigy", {"x0", "num", "d"}),
        ("galore", set()),  # of a shape of their own
        ("shampoo", {"l", "r"}),
        ("muon", {"m"}),
        ("schedule_free_adamw", {"z", "lr_max", "weight_sum"}),
    ],
)
def test_states_that_cannot_be_rounded_at_random(rule: str, exact: set[str]) -> None:
    found = {key: state.exact for key, state in storage(rulec.load(rule)).items() if state.exact}
    assert found.keys() == exact
    assert all(reason.startswith(f"{key} ") for key, reason in found.items())
    assert not storage(rulec.load("adafactor"))["r"].allowed
