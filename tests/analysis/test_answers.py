"""The answers of known rules, and of rules written to have one property and not another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.analysis import Analysis, Rest
from rulec.analysis.flow import flow_of
from rulec.analysis.regions import RegionsOf, range_of, region
from rulec.analysis.zero import invariants
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op, name, node
from rulec.language.hyper import Hyper
from tests.analysis.runs import EXAMPLES, Trial, far_apart, two_calls


@dataclass(frozen=True)
class Known:
    """What is known of a rule: `one` and `each` are its answers for scales of `g`, or what these hold under."""

    scope: str
    linear: str
    accumulates: bool = False
    one: str = "no"
    each: str = "no"
    first: str = "stays"
    later: str = "changes"
    state: str = "none"


RULES = {
    "sgd": Known("elementwise", "", later="stays"),
    "momentum": Known("elementwise", "m", accumulates=True, state="4 per parameter"),
    "nesterov": Known("elementwise", "m", state="4 per parameter"),
    "adam": Known("elementwise", "m", one="eps = 0", first="stays where eps > 0", state="8 per parameter"),
    "adamw": Known("elementwise", "m", one="eps = 0", first="changes", state="8 per parameter"),
    "lion": Known("elementwise", "m", one="yes", first="changes", state="4 per parameter"),
    "signum": Known("elementwise", "m", accumulates=True, one="yes", state="4 per parameter"),
    "rmsprop": Known(
        "elementwise", "", one="eps = 0", first="stays where eps > 0", later="stays where eps > 0",
        state="4 per parameter",
    ),
    "adagrad": Known(
        "elementwise", "", one="initial = 0 and eps = 0", first="stays where eps > 0", later="stays where eps > 0",
        state="4 per parameter",
    ),
    "adabelief": Known("elementwise", "m", one="eps = 0", first="stays where eps > 0", state="8 per parameter"),
    "adadelta": Known(
        "elementwise", "", one="eps = 0", first="stays where eps > 0", later="stays where eps > 0",
        state="8 per parameter",
    ),
    "rprop": Known("elementwise", "", one="yes", each="yes", later="stays", state="8 per parameter"),
    "lamb": Known("tensor", "m", one="eps = 0", first="changes", state="8 per parameter"),
    "cautious_adamw": Known("tensor", "adam.m", one="eps = 0", first="changes", state="8 per parameter"),
    "prodigy": Known(
        "model", "m s num x0", one="eps = 0", first="changes", state="16 per parameter + 8 in all",
    ),
    "schedule_free_adamw": Known(
        "elementwise", "lr_max weight_sum", one="eps = 0", first="changes", state="8 per parameter + 8 per group",
    ),
    "transforms/sign": Known("elementwise", "", one="yes", each="yes", later="stays"),
    "transforms/normalize": Known("model", "", one="yes", each="yes", first="stays", later="stays"),
}  # fmt: skip


@cache
def analysis(text: str) -> Analysis:
    return rulec.load(text).analysis


@pytest.mark.parametrize("text", RULES)
def test_known_rules(text: str) -> None:
    found, known = analysis(text), RULES[text]
    assert found.scope == known.scope
    assert {key for key, fact in found.linear.items() if fact} == set(known.linear.split())
    assert bool(found.accumulates) is known.accumulates
    for fact, answer in ((found.constant_scale, known.one), (found.changing_scale, known.each)):
        assert (" and ".join(fact.where) or fact.answer) == answer
    assert str(found.at_zero.first["p"][0]).partition(" with ")[0] == known.first
    assert str(found.at_zero.later["p"][0]).partition(" with ")[0] == known.later
    assert found.state_text == known.state


def test_factored_moments() -> None:
    found = analysis(str(EXAMPLES / "adafactor.yaml"))
    assert found.scope == "tensor"
    assert found.constant_scale.where == ("eps1 = 0",)
    assert found.state_text == "4*(rows + cols) where ndim >= 2; 4 per parameter where ndim < 2"
    assert found.state_bytes["r"].formula == "4*rows"


def test_matrices() -> None:
    muon, apollo = analysis(str(EXAMPLES / "muon.yaml")), analysis(str(EXAMPLES / "apollo.yaml"))
    assert muon.matrices
    assert not muon.accumulates
    assert muon.constant_scale.where == ("no matrix given to newton_schulz has a norm below 1e-7",)
    assert apollo.random
    assert apollo.routes
    assert not apollo.reads_parameter
    assert apollo.state_text == "8*rank*cols + 4 per tensor"


def test_reasons_name_the_line_and_its_place() -> None:
    found = analysis("adam")
    assert str(found.linear["v"]) == "no: linearity ends at `v = beta2*v + (1 - beta2)*g*g`"
    line = found.linear["v"].line
    assert line is not None
    assert line.span is not None
    assert line.span.source.line(line.span.line).strip() == "v = beta2*v + (1 - beta2)*g*g"
    assert str(analysis("nesterov").accumulates).endswith("`nesterov_momentum.direction = sgd.direction + momentum*m`")
    assert str(analysis("lion").accumulates) == "no: p depends on g through `c = beta1*m + (1 - beta1)*g`"


def test_traits() -> None:
    found = analysis("prodigy")
    assert found.traits == ["reads p", "assigns p", "reads t"]
    assert analysis("schedule_free_adamw").evaluates
    assert analysis("transforms/skip_not_finite").skips
    assert not analysis("adam").reads_parameter
    assert not analysis("signum").reads_step


def rule(step: str, state: str = "", hyper: str = "", more: str = "") -> Rule:
    """A rule of these lines."""
    lines = "".join(f"  {line}\n" for line in step.split("; "))
    return rulec.parse(f"name: Test\nhyper: {{{hyper}}}\nstate: {{{state}}}\n{more}step: |\n{lines}")


def test_the_sum_of_two_gradients_is_what_accumulation_adds_up_to() -> None:
    found = analysis("momentum").accumulates
    assert found.fact.answer == "yes"
    (added,) = found.adds.values()
    assert repr(added) == "<where(t == 1, g, (1 - dampening)*g)>"
    g1, g2, beta, lr = np.array([1.0, -2.0]), np.array([0.5, 3.0]), 0.9, 1e-3
    run = ReferenceOptimizer(rulec.load("momentum"), [np.zeros(2)])
    run.step([g1])
    m = g1.copy()
    m = beta * m + g1
    m += g2
    run.step([g1 + g2])
    np.testing.assert_allclose(run.params[0], -lr * g1 - lr * m, rtol=1e-14)


@pytest.mark.parametrize(
    ("step", "state", "answer"),
    [
        ("m = 0.9*m + g; direction = m", "m: 0", "yes"),
        ("m = 0.9*m + g; n = 0.5*n + m; direction = n", "m: 0, n: 0", "yes"),
        ("n = 0.5*n + m; m = 0.9*m + g; direction = n + m", "m: 0, n: 0", "no"),
        ("m = 0.9*m + v*g; v = v + 1; direction = m", "m: 0, v: 0", "yes"),
        ("m = 0.9*m + g; v = v + m**2; direction = m/(1 + v)", "m: 0, v: 0", "yes"),
        ("m = 0.9*m + abs(g); direction = m", "m: 0", "no"),
        ("k = k + mean(g); m = 0.9*m + g; direction = m*k", "m: 0, k: {init: 0, per: tensor}", "yes"),
        ("if t > 3:;   m = g + m; else:;   m = g; direction = sign(m)", "m: 0", "yes"),
        ("if t > 3:;   m = g + m;   d = m; else:;   m = g;   d = 2*m; direction = d", "m: 0", "yes"),
        ("if t > 3:;   m = g + m;   d = m; else:;   d = 2*m; direction = d", "m: 0", "yes"),
        ("if t > 3:;   m = g + m;   d = m; else:;   m = g;   d = g + p; direction = d", "m: 0", "yes"),
        ("if t > 3:;   m = g + m;   d = g; else:;   m = g;   d = 2*m; direction = d", "m: 0", "no"),
        (
            "if t > 3:;   if t > 5:;     m = g + m;     d = m;   else:;     m = 2*g;     d = 3*m; else:;   d = m; "
            "direction = d",
            "m: 0",
            "yes",
        ),
        ("if g > 0:;   m = g + m; else:;   m = g; direction = sign(m)", "m: 0", "no"),
    ],
)
def test_accumulation(step: str, state: str, answer: str) -> None:
    made = rule(step, state)
    assert made.analysis.accumulates.fact.answer == answer
    trial = Trial(made, {})
    assert far_apart(*two_calls(trial), trial.params, 1e-9) is (answer == "no")


def test_a_state_that_p_does_not_read_is_to_be_right_too() -> None:
    found = rule("m = 0.9*m + g; v = v + g**2; direction = m", "m: 0, v: 0").analysis.accumulates.fact
    assert str(found) == "unknown: state v depends on g through `v = v + g**2`"


@pytest.mark.parametrize(
    ("step", "state", "one", "each"),
    [
        ("direction = g/norm(g)", "", "yes", "yes"),
        ("direction = g/(norm(g) + 1e-3)", "", "no", "no"),
        ("direction = g/maximum(norm(g), eps)", "", "eps = 0", "eps = 0"),
        ("n = norm(g); direction = g/where(n > 0, n, 1)", "", "yes", "yes"),
        ("n = norm(g); direction = where(n != 0, g/n, g)", "", "yes", "yes"),
        ("n = norm(g); direction = 3*where(n > 0, 1/n, 1)*g", "", "yes", "yes"),
        ("n = norm(p); direction = g/where(n > 0, n, 1)", "", "no", "no"),
        (
            'n = norm(g); direction = g/norm(g, per="model")*where(n > 0, 2, sum(g, per="model"))',
            "",
            "unknown",
            "unknown",
        ),
        ("v = maximum(v, g**2); direction = g/sqrt(v)", "v: 0", "yes", "no"),
        ("v = v*norm(g); direction = sign(v)*sign(g)", "v: 1", "yes", "yes"),
        ("v = v + norm(g); direction = p/v", "v: {init: 0, per: tensor}", "no", "no"),
        ("direction = exp(g)/exp(g)*log(2)", "", "unknown", "unknown"),
        (
            "direction = newton_schulz(g, normalize=2)",
            "",
            "no matrix given to newton_schulz has a norm below 1e-7",
            "no matrix given to newton_schulz has a norm below 1e-7",
        ),
        ('direction = newton_schulz(g, normalize="none")', "", "no", "unknown"),
        ("direction = where(g > 0, 1, 0) - count_nonzero(g)", "", "yes", "yes"),
        ("v = 0.5*v + g; direction = floor(v/abs(v))", "v: 0", "yes", "no"),
    ],
)
def test_scales(step: str, state: str, one: str, each: str) -> None:
    found = rule(step, state, "eps: 1e-3").analysis
    assert [" and ".join(fact.where) or fact.answer for fact in (found.constant_scale, found.changing_scale)] == [
        one,
        each,
    ]


def test_a_hyper_parameter_that_cannot_be_zero_is_no_condition() -> None:
    found = rule("direction = g/(abs(g) + delta)", hyper="delta: {default: 0.1, above: 0}").analysis
    assert (found.constant_scale.answer, found.constant_scale.where) == ("no", ())


@pytest.mark.parametrize(
    ("step", "state", "first", "later"),
    [
        ("direction = g/norm(g)", "", "NaN", "NaN"),
        ("direction = where(norm(g) > 0, g/norm(g), 0)", "", "stays", "stays"),
        ("v = maximum(v, abs(g)); w = maximum(w, v); direction = w - maximum(w, v)", "v: 0, w: 0", "stays", "unknown"),
        ("direction = g/(norm(g) + eps)", "", "stays", "stays"),
        ("direction = g + p", "", "changes", "changes"),
        ("direction = g*normal([rows, cols])", "", "stays", "stays"),
        ("v = 0.5*v + g**2; direction = g*m/(1 + v); m = m + 1", "v: 0, m: 0", "stays", "stays"),
        ("m = m + g; direction = m/(1 - 0.9**t)", "m: 0", "stays", "changes"),
        ("if t == 1:;   d = g; else:;   d = g + 1; direction = d", "", "stays", "changes"),
        ("direction = sqrt(abs(g))*log(t)", "", "stays", "stays"),
        ("m = 0.5/g; direction = where(g > m, p, g)", "m: 0", "changes", "changes"),
    ],
)
def test_gradients_of_zero(step: str, state: str, first: str, later: str) -> None:
    found = rule(step, state, "eps: 1e-3").analysis.at_zero
    assert [found.first["p"][0].what, found.later["p"][0].what] == [first, later]


def test_the_line_that_divides_zero_by_zero_is_named() -> None:
    found = analysis("adam").at_zero.first["p"]
    assert found[0].where == ("eps > 0",)
    assert str(found[1]) == "NaN where eps = 0: `direction = m_hat/(sigma + eps)`"
    assert analysis("prodigy").at_zero.first["d"] == (
        Rest("stays", line=analysis("prodigy").at_zero.first["d"][0].line),
    )
    unguarded = rulec.load(EXAMPLES / "prodigy.yaml").analysis.at_zero.first["d"]
    assert str(unguarded[0]) == 'NaN: `d = maximum(d, d_coef*num/sum(abs(s), per="model"))`'


def test_decay_is_what_moves_p_by_itself() -> None:
    general, without = analysis("adamw").at_zero.first["p"]
    assert (general.what, general.by) == ("changes", ("p",))
    assert without.where == ("weight_decay = 0", "eps > 0")
    assert analysis("adamw").at_zero.later["p"][0].by == ("m", "v", "p")


def test_a_wrapper_around_nothing_is_refused() -> None:
    with pytest.raises(RuleError, match="Lookahead"):
        _ = rulec.load("lookahead").analysis


def test_states_keep_to_their_side_of_zero() -> None:
    found = invariants(flow_of(rulec.load("nadam")), ())
    assert "-" not in found["v"]
    assert "-" in found["m"]
    assert found["mu_product"] == {"0", "f", "1"}


def test_ranges_are_regions() -> None:
    assert range_of(Hyper(0.5, min=0.0, below=1.0)) == {"0", "f"}
    assert range_of(Hyper(2.0, above=1.0)) == {"+"}
    assert range_of(Hyper(1.0, above=0.0)) == {"f", "1", "+"}
    assert range_of(Hyper(0.0, min=0.0, max=0.0)) == {"0"}
    assert range_of(Hyper(0.0)) == {"-", "0", "f", "1", "+"}


@pytest.mark.parametrize("op", [Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.MINIMUM, Op.MAXIMUM])
def test_regions_of_operations_hold_every_result(op: Op) -> None:
    samples = [-3.0, -1.0, -0.3, 0.0, 0.2, 0.9, 1.0, 1.1, 4.0]
    for a in samples:
        for b in samples:
            regions = RegionsOf({"a": region(a), "b": region(b)})
            with np.errstate(all="ignore"):
                result = float(NUMPY[op](a, b))
            found = regions.of(node(op, name("a"), name("b")))
            if not np.isfinite(result):
                assert found is None, (op, a, b)
            elif found is not None:
                assert region(result) <= found, (op, a, b)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_analysed(path: object) -> None:
    found = rulec.load(str(path)).analysis
    text = str(found)
    assert found.scope in text
    assert "accumulates" in text
    assert all(f"{key} linear in g" in text for key in found.linear)


def test_what_grows_is_not_said_to_shrink_nor_to_stay() -> None:
    rule = rulec.parse(
        "name: Growing\nstate: {a: 1, b: 1, c: 1, d: 1, e: 1}\nstep: |\n"
        "  a = 2*a + g\n  b = 0.5*b + g\n  c = c + g\n"
        "  d = where(t > 0 and d > 1, 2*d, d) + g\n  e = where(t < 1 or e > 1, e, 2*e) + g\n"
        "  direction = a + b + c + d + e\n"
    )
    later = {key: rests[0].what for key, rests in rule.analysis.at_zero.later.items()}
    assert (later["b"], later["c"]) == ("shrinks", "stays")
    assert {later[key] for key in "ade"} <= {"changes", "unknown"}
