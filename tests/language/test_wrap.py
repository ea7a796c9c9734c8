"""Wrappers: what they make of a rule, how names are kept apart, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.compiler.reference import ReferenceOptimizer
from rulec.math import norm, where
from tests.language.test_compose import same_program

ADAM, ADAMW, SGD, RPROP = map(rulec.load, ("adam", "adamw", "sgd", "rprop"))
LOOKAHEAD, EMA, ACCUMULATE, LOW_RANK = map(rulec.load, ("lookahead", "ema", "accumulate", "low_rank"))

LOOKAHEAD_ADAM = """
name: HandWritten
hyper: {lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, k: 5, alpha: 0.5}
state: {m: 0, v: 0, slow: p}
step: |
  m = beta1*m + (1 - beta1)*g
  v = beta2*v + (1 - beta2)*g*g
  fast = p - lr*(m/(1 - beta1**t)/(sqrt(v)/sqrt(1 - beta2**t) + eps))
  if t % k == 0:
    slow = slow + alpha*(fast - slow)
    p = slow
  else:
    p = fast
"""

CAUTIOUS = """
name: Careful
wraps: inner
step: |
  d = inner(g)
  direction = where(d*g > 0, d, 0)
"""


def wrapper(step: str, head: str = "") -> Rule:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return rulec.parse(f"name: Outer\n{head}wraps: inner\nstep: |\n{lines}")


def steps_of(rule: Rule, seed: int = 0, count: int = 7, **hyper: float) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    optimizer = ReferenceOptimizer(rule, [rng.normal(size=(3, 4))], hyper)
    for _ in range(count):
        optimizer.step([rng.normal(size=(3, 4))])
    return optimizer.params[0]


def test_a_wrapped_rule_is_the_rule_written_by_hand() -> None:
    assert same_program(LOOKAHEAD(ADAM), rulec.parse(LOOKAHEAD_ADAM))
    assert not same_program(LOOKAHEAD(SGD), rulec.parse(LOOKAHEAD_ADAM))


def test_a_wrapped_rule_is_an_ordinary_rule() -> None:
    rule = LOOKAHEAD(ADAMW)
    assert not rule.wraps
    assert rule.name == "LookaheadAdamW"
    assert list(rule.hyper) == ["lr", "beta1", "beta2", "eps", "weight_decay", "k", "alpha"]
    assert list(rule.state) == ["m", "v", "slow"]
    assert rulec.parse(rule.to_yaml()) == rule
    clipped = rulec.load("clip_by_value") >> rule
    assert clipped.assigns_parameter
    assert next(iter(clipped.hyper)) == "bound"


@pytest.mark.parametrize("name", sorted(set(rulec.rules()) - set(rulec.rules(wrappers=False))))
def test_every_wrapper_is_written_and_read_again(name: str) -> None:
    rule = rulec.load(name)
    assert rulec.parse(rule.to_yaml()) == rule
    around = rule(*[ADAM] * len(rule.wraps))
    assert rulec.parse(around.to_yaml()) == around


def test_bindings_are_of_the_wrapper() -> None:
    assert LOOKAHEAD(ADAM, k=3).hyper["k"].default == 3
    assert LOOKAHEAD(ADAM, k=3) == LOOKAHEAD.bind(k=3)(ADAM)
    with pytest.raises(RuleError, match=r"^Lookahead has no hyper-parameter 'lr'$"):
        LOOKAHEAD(ADAM, lr=0.1)


def test_a_bound_expression_names_hyper_parameters_of_both() -> None:
    rule = LOOKAHEAD(ADAM, alpha="beta1/2")
    assert "alpha" not in rule.hyper
    np.testing.assert_array_equal(steps_of(rule, k=2), steps_of(LOOKAHEAD(ADAM), k=2, alpha=0.45))


def test_equal_names_are_one_hyper_parameter_or_a_mistake() -> None:
    twice = wrapper("direction = beta1*inner(g)", "hyper: {beta1: 0.9}\n")
    assert list(twice(ADAM).hyper) == list(ADAM.hyper)
    other = wrapper("direction = beta1*inner(g)", "hyper: {beta1: 0.5}\n")
    with pytest.raises(
        RuleError, match=r"^Adam and Outer both have a hyper-parameter 'beta1', with the defaults 0\.9 and"
    ):
        other(ADAM)
    assert other.bind(beta1="scale")(ADAM).hyper["scale"].default == 0.5


def test_states_that_clash_keep_both_prefixes() -> None:
    rule = wrapper("m = m + g\ndirection = m*inner(g)", "state: {m: 0}\n")(ADAM)
    assert list(rule.state) == ["adam.m", "v", "outer.m"]


def test_wrappers_around_wrappers() -> None:
    rule = EMA(LOOKAHEAD(ACCUMULATE(ADAM, every=2), k=3))
    assert rulec.parse(rule.to_yaml()) == rule
    params, rng = [np.ones((2, 3))], np.random.default_rng(5)
    grads = [rng.normal(size=(2, 3)) for _ in range(12)]
    optimizer, adam = ReferenceOptimizer(rule, params), ReferenceOptimizer(ADAM, params)
    slow, average = params[0], params[0]
    for t, g in enumerate(grads, 1):
        optimizer.step([g])
        if t % 2 == 0:
            adam.step([(grads[t - 2] + g) / 2])
        if t % 3 == 0:
            slow = slow + 0.5 * (adam.params[0] - slow)
            adam.tensors[0].value = adam.tensors[0].view.matrices(slow)
        average = adam.params[0] if t == 1 else 0.999 * average + (1 - 0.999) * adam.params[0]
        np.testing.assert_allclose(optimizer.params[0], adam.params[0], rtol=1e-14)
        np.testing.assert_allclose(optimizer.state(0)["average"], average, rtol=1e-14)


def test_what_changes_the_gradient_is_the_raw_gradient_of_what_is_wrapped() -> None:
    """A rule that asks for the gradient itself gets what the wrapper made of it, and else that of the whole."""
    reading = rulec.parse("name: Raw\nstep: |\n  direction = grad + 0*g\n")
    changed = wrapper("direction = inner(2*g)")(reading)
    same = wrapper("direction = inner(g)")(reading)
    half = rulec.load("scale").bind(factor=0.5)
    whole = steps_of(SGD, count=1)
    start = steps_of(SGD, count=0)
    np.testing.assert_allclose(steps_of(half >> changed, count=1) - start, (whole - start), rtol=1e-12)
    np.testing.assert_allclose(steps_of(half >> same, count=1) - start, (whole - start), rtol=1e-12)
    np.testing.assert_allclose(steps_of(changed, count=1) - start, 2 * (whole - start), rtol=1e-12)


def test_a_rule_that_assigns_p_is_wrapped_by_what_reads_inner_p() -> None:
    rule = LOOKAHEAD(RPROP)
    assert rulec.parse(rule.to_yaml()) == rule
    np.testing.assert_array_equal(steps_of(rule, k=100), steps_of(RPROP))
    assert not np.array_equal(steps_of(rule, k=2), steps_of(RPROP))


def test_a_rule_that_assigns_p_in_several_lines_counts_on_from_its_own() -> None:
    twice = rulec.parse("name: Twice\nhyper: {lr: 0.1}\nstep: |\n  p = p - lr*p\n  q = p\n  p = p - lr*g*q\n")
    np.testing.assert_array_equal(steps_of(wrapper("inner(g)\np = inner.p")(twice)), steps_of(twice))
    once = wrapper("inner(g)\nif t % 2 == 0:\n  p = inner.p")(twice)
    assert not np.array_equal(steps_of(once), steps_of(twice))


def test_the_inner_count_of_updates_is_the_wrapper_s_to_say() -> None:
    counted = rulec.parse("name: Counted\nstep: |\n  direction = g*t\n")
    start, one = steps_of(SGD, count=0), steps_of(SGD, count=1)
    tripled = wrapper("direction = inner(g, t=3*t)")(counted)
    np.testing.assert_allclose(steps_of(tripled, count=1) - start, 3 * (one - start), rtol=1e-12)


def test_two_random_draws_are_independent() -> None:
    noisy = rulec.parse("name: Noisy\nstep: |\n  direction = g + normal([rows, cols])\n")
    rule = wrapper("direction = inner(g) - normal([rows, cols])")(noisy)
    numbers = {n.arg for line in rule.step for n in _random_nodes(line)}
    assert numbers == {0, 1}


def _random_nodes(line: Any) -> list[Any]:
    from rulec.language.expr.node import Kind, walk

    return [n for n in walk([line.value]) if n.op.kind is Kind.RANDOM]


def test_skipping_and_evaluation_are_kept() -> None:
    skipping = rulec.parse("name: Skipping\nskip: not isfinite(sum(g))\nstep: |\n  direction = g\n")
    rule = LOOKAHEAD(skipping)
    optimizer = ReferenceOptimizer(rule, [np.ones(3)])
    optimizer.step([np.array([1.0, np.nan, 1.0])])
    np.testing.assert_array_equal(optimizer.params[0], np.ones(3))
    assert EMA(ADAM).evaluate is not None
    with pytest.raises(RuleError, match=r"^Skipping skips steps, and Accumulate calls it only at some: put what skips"):
        ACCUMULATE(skipping)


def test_low_rank_runs_on_the_projection() -> None:
    rule = LOW_RANK(ADAM, rank=2)
    assert [len(state.shape or ()) for state in rule.state.values()] == [2, 2]
    assert rule.rest == ADAM.bind()
    counting = rulec.parse("name: Counting\nstate: {n: 0}\nstep: |\n  n = n + g*numel + rows - cols\n  direction = n\n")
    optimizer = ReferenceOptimizer(LOW_RANK(counting, rank=2), [np.ones((3, 5))])
    optimizer.step([np.zeros((3, 5))])
    np.testing.assert_array_equal(optimizer.state(0)["n"], np.full((1, 2, 5), 2.0 - 5))


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ("adamw", r"decay\.yaml:\d+:3: AdamW reads p, which has the parameter's shape, and LowRank runs it in another: "
                  r"put this part outside, as in low_rank\(adam\) \+ decay\n    +direction = weight_decay\*p"),
        ("rprop", r"rprop\.yaml:\d+:3: Rprop assigns p itself, and LowRank needs the direction"),
        ("l2 >> adam", r"l2\.yaml:\d+:3: L2ThenAdam reads p, which has"),
    ],
)  # fmt: skip
def test_low_rank_refuses_what_needs_the_parameter_at_its_line(inner: str, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        LOW_RANK(rulec.load(inner))


def test_low_rank_refuses_states_of_the_parameter_s_sides_and_beginnings() -> None:
    rows = rulec.parse("name: Rows\nstate: {n: {init: 0, per: row}}\nstep: |\n  n = n + 1\n  direction = g*n\n")
    with pytest.raises(RuleError, match="Rows keeps a state per row, which has the parameter's shape"):
        LOW_RANK(rows)
    anchored = rulec.parse("name: Anchored\nstate: {a: p}\nstep: |\n  direction = g*a\n")
    with pytest.raises(RuleError, match="Anchored reads p, which has the parameter's shape"):
        LOW_RANK(anchored)


def test_a_shaped_wrapper_refuses_what_has_the_parameter_s_shape() -> None:
    shaped = wrapper("inner(sum(g, per='col') + 0*g)\ndirection = g", "").to_yaml().replace(
        "wraps: inner", "wraps: {inner: {shape: [1, cols]}}"
    )  # fmt: skip
    with pytest.raises(
        RuleError, match=r"rprop\.yaml:\d+:\d+: Rprop \w+ p, which has the parameter's shape, and Outer runs"
    ):
        rulec.parse(shaped)(RPROP)
    curved = rulec.parse("name: Curved\ninputs: {h: like p}\nstep: |\n  direction = g*h\n")
    with pytest.raises(
        RuleError, match=r"^Curved reads the input h, which has the parameter's shape, and LowRank runs"
    ):
        LOW_RANK(curved)


def test_the_direction_of_a_rule_that_assigns_p_is_no_use() -> None:
    with pytest.raises(
        RuleError, match=r"rprop\.yaml:\d+:3: Rprop assigns p itself, and Careful needs the direction of"
    ):
        rulec.parse(CAUTIOUS)(RPROP)


@pytest.mark.parametrize(
    "use",
    [
        lambda: LOOKAHEAD.standalone(),
        lambda: LOOKAHEAD >> ADAM,
        lambda: ADAM >> LOOKAHEAD,
        lambda: ADAM + LOOKAHEAD,
        lambda: LOOKAHEAD(EMA),
        lambda: rulec.compile(LOOKAHEAD),
        lambda: rulec.array.Optimizer("lookahead", [np.ones(3)]),
        lambda: ReferenceOptimizer(LOOKAHEAD, [np.ones(3)]),
        lambda: rulec.parse("name: R\nuses: [lookahead]\nstep: |\n  direction = lookahead(g)\n"),
    ],
)
def test_a_wrapper_alone_is_no_rule(use: Any) -> None:
    with pytest.raises(
        RuleError, match=r"\w+ wraps another rule and has none here: write \w+\(adam\), or another rule"
    ):
        use()


def test_a_rule_that_wraps_nothing_is_no_wrapper() -> None:
    with pytest.raises(RuleError, match=r"^Decay wraps no rule: did you mean decay >> adam\?$"):
        rulec.load("decay")(ADAM)


@rulec.rule(wraps="inner", assigns="p", state={"slow": "p"})
def slow_steps(g, p, t, s, inner, *, k=5.0, alpha=0.5):  # type: ignore[no-untyped-def]
    """Lookahead."""
    inner(g)
    sync = t % k == 0
    s.slow = where(sync, s.slow + alpha * (inner.p - s.slow), s.slow)
    return where(sync, s.slow, inner.p)


@rulec.rule(wraps="rule")
def careful(g, rule):  # type: ignore[no-untyped-def]
    """Leaves out where the direction points uphill."""
    d = rule(g)
    return where(d * g > 0, d, 0)


def test_python_wrappers_are_those_of_files() -> None:
    assert rulec.parse(slow_steps.to_yaml()) == slow_steps
    np.testing.assert_array_equal(steps_of(slow_steps(ADAM), k=2), steps_of(LOOKAHEAD(ADAM), k=2))
    np.testing.assert_array_equal(steps_of(careful(ADAM)), steps_of(rulec.parse(CAUTIOUS)(ADAM)))


def test_a_python_wrapper_s_own_function_runs_on_arrays() -> None:
    d = np.array([1.0, -1.0])
    np.testing.assert_array_equal(careful.function(np.array([2.0, 2.0]), lambda g: d), [1.0, 0.0])


def test_a_wrapper_may_use_rules_of_its_own() -> None:
    rule = wrapper("direction = inner(clip_by_value(g))", "uses: [clip_by_value]\n")
    assert rulec.parse(rule.to_yaml()) == rule
    np.testing.assert_array_equal(
        steps_of(rule(ADAM), bound=0.5), steps_of(rulec.load("clip_by_value") >> ADAM, bound=0.5)
    )


def test_skipping_looks_at_what_the_rule_is_called_with() -> None:
    skipping = rulec.parse("name: Skipping\nskip: sum(g) > 1\nstep: |\n  direction = g\n")
    rule = wrapper("direction = inner(g/2)")(skipping)
    for size, moved in ((0.4, True), (0.6, True), (0.8, False)):
        optimizer = ReferenceOptimizer(rule, [np.zeros(3)])
        optimizer.step([np.full(3, size)])
        assert optimizer.params[0].any() == moved


def test_a_text_is_no_rule() -> None:
    with pytest.raises(
        RuleError, match=r"^Lookahead wraps a rule, not a text: write rulec\.load\('lookahead\(adamw\)'\)$"
    ):
        LOOKAHEAD("adamw")


def test_a_wrapper_may_be_bound_to_the_learning_rate() -> None:
    rule = wrapper("direction = c*inner(g)", "hyper: {c: 1}\n").bind(c="2*lr")(ADAM)
    assert rulec.parse(rule.to_yaml()) == rule
    assert list(rule.hyper) == ["lr", "beta1", "beta2", "eps"]
    np.testing.assert_array_equal(steps_of(rule, lr=0.5), steps_of(ADAM, lr=0.5))


def test_names_made_for_a_call_are_those_of_no_other_call() -> None:
    """However often a rule is wrapped, and whatever it is called by then."""
    mixed = wrapper("d = inner(g/2, t=2*t)\ndirection = d + g*t**2")
    one, two = mixed(mixed(ADAM)), mixed(mixed(ADAM).renamed("Adam"))
    np.testing.assert_array_equal(steps_of(one), steps_of(two))
    assert rulec.parse(two.to_yaml()) == two
    doubled = rulec.parse("name: Adam\nuses: [adam]\nstep: |\n  direction = adam(2*g)\n")
    chained = rulec.load("scale").bind(factor=0.5) >> doubled
    np.testing.assert_allclose(steps_of(wrapper("direction = inner(g/2)")(doubled)), steps_of(ADAM), rtol=1e-12)
    np.testing.assert_allclose(steps_of(chained), steps_of(ADAM), rtol=1e-12)


GRAFT = rulec.load("graft")


def test_a_wrapper_of_two_rules_has_the_states_of_both() -> None:
    """By hand from two optimizers that do not know of each other: the direction of one, the length of the other."""
    rule = GRAFT(ADAM, rulec.load("momentum"))
    assert list(rule.state) == ["adam.m", "v", "momentum.m"]
    assert rulec.load("graft(adam, momentum)") == rule
    params, rng = [np.ones((3, 4))], np.random.default_rng(3)
    optimizer = ReferenceOptimizer(rule, params, {"lr": 0.1})
    adam, momentum = (ReferenceOptimizer(r, [np.zeros((3, 4))], {"lr": 1.0}) for r in (ADAM, rulec.load("momentum")))
    p = params[0]
    for _ in range(5):
        grads = [rng.normal(size=(3, 4))]
        moves = []
        for each in (adam, momentum):
            before = each.params[0].copy()
            each.step(grads)
            moves.append(before - each.params[0])
        optimizer.step(grads)
        p = p - 0.1 * moves[0] * np.linalg.norm(moves[1]) / np.linalg.norm(moves[0])
        np.testing.assert_allclose(optimizer.params[0], p, rtol=1e-12)


def test_hyper_parameters_of_several_wrapped_rules_are_apart_where_their_defaults_are() -> None:
    rule = GRAFT(rulec.load("shampoo"), ADAM)
    assert {key: rule.all_hyper[key].default for key in ("lr", "eps", "shampoo_eps", "adagrad_eps")} == {
        "lr": 1e-3, "eps": 1e-8, "shampoo_eps": 1e-4, "adagrad_eps": 1e-10
    }  # fmt: skip
    assert list(GRAFT(ADAM, ADAM).hyper) == list(ADAM.hyper)
    sums = rulec.parse("name: Sums\nwraps: [a, b]\nstep: |\n  b(a(g))\n  p = a.p + b.p\n")
    with pytest.raises(RuleError, match=r"^Shampoo and Adam both have a hyper-parameter 'lr', with the defaults"):
        sums(rulec.load("shampoo"), ADAM)


def test_a_rule_that_leaves_tensors_out_is_grafted_for_each_kind_of_tensor() -> None:
    rule = GRAFT(rulec.load("muon"), ADAM)
    rest = GRAFT(rulec.load("adamw").bind(weight_decay=0.1), ADAM)
    assert rulec.parse(rule.to_yaml()) == rule
    optimizers = [
        ReferenceOptimizer(rule, [np.ones(5)], {"adamw_lr": 0.2}),
        ReferenceOptimizer(rest, [np.ones(5)], {"lr": 0.2}),
    ]
    rng = np.random.default_rng(4)
    for _ in range(3):
        grads = [rng.normal(size=5)]
        for optimizer in optimizers:
            optimizer.step(grads)
    np.testing.assert_allclose(optimizers[0].params[0], optimizers[1].params[0], rtol=1e-14)


def test_a_wrapper_of_two_takes_two_rules() -> None:
    for wrong in (lambda: GRAFT(ADAM), lambda: GRAFT(ADAM, ADAM, ADAM), lambda: rulec.load("graft(adam)")):
        with pytest.raises(RuleError, match=r"Graft wraps 2 rules, heading and magnitude, not [13]: write graft\(adam"):
            wrong()
    with pytest.raises(RuleError, match=r"^Graft wraps 2 other rules and has none here: write graft\(adam, sgd\), or"):
        GRAFT.standalone()
    with pytest.raises(RuleError, match=r"^Graft is called with a Rule and a str: give it rules, or one traced value$"):
        GRAFT(ADAM, "adam")


@rulec.rule(wraps=("heading", "magnitude"))
def grafted(g: Any, heading: Any, magnitude: Any) -> Any:
    """The direction of one rule at the length of another."""
    h = heading(g)
    a = norm(magnitude(g))
    b = norm(h)
    return h * where(b > 0, a / b, 0)


def test_a_wrapper_of_two_in_python() -> None:
    assert grafted.wraps == ("heading", "magnitude")
    np.testing.assert_array_equal(steps_of(grafted(ADAM, SGD)), steps_of(GRAFT(ADAM, SGD)))
