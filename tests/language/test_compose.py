"""Rules made of rules: what they mean, what they compile to, and how their names are kept apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rulec
from rulec import Rule, RuleError
from rulec.checkpoint.content import meaning
from rulec.compiler.ir import Program
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.node import Node, const
from rulec.language.inputs import kind_data
from rulec.language.rule_data import assignments
from tests.compiler.plain import PlainRun

ADAM, DECAY, L2, SGD = map(rulec.load, ("adam", "decay", "l2", "sgd"))

ADAMW = """
name: HandWrittenAdamW
hyper: {lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2}
state: {m: 0, v: 0}
step: |
  m = beta1*m + (1 - beta1)*g
  v = beta2*v + (1 - beta2)*g*g
  direction = m/(1 - beta1**t)/(sqrt(v)/sqrt(1 - beta2**t) + eps) + weight_decay*p
"""

L2_ADAM = """
name: HandWrittenL2Adam
hyper: {lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2}
state: {m: 0, v: 0}
step: |
  d = g + weight_decay*p
  m = beta1*m + (1 - beta1)*d
  v = beta2*v + (1 - beta2)*d*d
  direction = m/(1 - beta1**t)/(sqrt(v)/sqrt(1 - beta2**t) + eps)
"""


def written(rule: Rule) -> tuple[dict[str, Node], list[Node]]:
    """What a rule's program stores, by buffer, and its scalar columns in the order of their text."""
    program = rulec.compile(rule)
    assert len(program.stages) == 1
    resolved = {s.buffer: with_columns(program, s.value) for s in program.stages[0].stores}
    return resolved, sorted((c.value for c in program.scalars.columns), key=repr)


def with_columns(program: Program, value: Node) -> Node:
    """The value with each scalar column as the expression it stands for: columns may be in another order."""
    from rulec.language.expr.node import Op, rewrite

    def change(n: Node) -> Node:
        return program.scalars.columns[n.arg].value if n.op is Op.SCALAR else n  # type: ignore[call-overload]

    return rewrite([value], change)[0]


def same_program(one: Rule, other: Rule) -> bool:
    return written(one) == written(other) and rulec.compile(one).states == rulec.compile(other).states


def test_adam_plus_decay_is_adamw() -> None:
    assert same_program(ADAM + DECAY, rulec.parse(ADAMW))
    assert same_program(rulec.load("adamw"), rulec.parse(ADAMW))
    assert not same_program(ADAM, rulec.parse(ADAMW))


def test_adam_plus_decay_has_the_nodes_and_names_of_adamw() -> None:
    composed, hand = rulec.compile(ADAM + DECAY), rulec.compile(rulec.parse(ADAMW))
    assert composed.stages == hand.stages
    assert composed.scalars == hand.scalars
    assert [b.name for b in composed.buffers] == [b.name for b in hand.buffers] == ["p", "g", "m", "v"]


def test_l2_then_adam() -> None:
    assert same_program(L2 >> ADAM, rulec.parse(L2_ADAM))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("plus: [adam, decay]", ADAM + DECAY),
        ("chain: [l2, adam]", L2 >> ADAM),
        ("plus: [adam, {decay: {weight_decay: 0.5}}]", ADAM + DECAY.bind(weight_decay=0.5)),
        ("plus: [adam, decay]\nhyper: {weight_decay: 0.5}", (ADAM + DECAY).bind(weight_decay=0.5)),
        ("plus: [adam, decay]\nhyper: {weight_decay: lr/2}", (ADAM + DECAY).bind(weight_decay="lr/2")),
        ("chain: [{clip_by_value: {bound: 2*lr}}, adam]", rulec.load("clip_by_value").bind(bound="2*lr") >> ADAM),
        ("chain: [l2, adam, scale, sign]", L2 >> ADAM >> rulec.load("scale") >> rulec.load("sign")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_yaml_composes_as_python_does(text: str, rule: Rule) -> None:
    parsed = rulec.parse(f"name: R\n{text}\n")
    assert same_program(parsed, rule)
    assert {k: (h.default, h.limits) for k, h in parsed.hyper.items()} == {
        k: (h.default, h.limits) for k, h in rule.hyper.items()
    }


def uses(step: str, components: str, head: str = "") -> Rule:
    lines = "".join(f"  {line}\n" for line in step.split("\n"))
    return rulec.parse(f"name: R\n{head}uses: {components}\nstep: |\n{lines}")


def test_calling_is_the_general_form() -> None:
    assert (
        same_program(uses("direction = adam(g) + decay(g)", "[adam, decay]"), ADAM + DECAY) is False
    )  # its states differ
    called = written(uses("direction = adam(g) + decay(g)", "[adam, decay]"))
    assert renamed(called, {"adam.m": "m", "adam.v": "v"}) == written(ADAM + DECAY)
    called = written(uses("direction = adam(l2(g))", "[l2, adam]"))
    assert renamed(called, {"adam.m": "m", "adam.v": "v"}) == written(L2 >> ADAM)
    called = written(uses("d = l2(g)\nd = adam(d)\ndirection = d", "[l2, adam]"))
    assert renamed(called, {"adam.m": "m", "adam.v": "v"}) == written(L2 >> ADAM)


def renamed(what: tuple[dict[str, Node], list[Node]], names: dict[str, str]) -> tuple[dict[str, Node], list[Node]]:
    from rulec.language.expr.node import Op, node, rewrite

    stores, columns = what

    def change(n: Node) -> Node:
        return node(Op.LOAD, names[str(n.arg)]) if n.op is Op.LOAD and n.arg in names else n

    return {names.get(k, k): rewrite([v], change)[0] for k, v in stores.items()}, columns


def test_a_called_rule_keeps_to_itself() -> None:
    rule = uses(
        "m_hat = 3*g\nm = 0.5*m + adam(m_hat)\ndirection = m + m_hat + adam.m", "[adam]", "state: {m: 1}\n"
    )  # fmt: skip
    assert set(rule.state) == {"m", "adam.m", "adam.v"}
    run, inner = PlainRun(rule, np.ones((1, 2, 2)), HYPER), PlainRun(ADAM, np.ones((1, 2, 2)), HYPER)
    g = np.array([[[1.0, -2.0], [0.5, 3.0]]])
    state = np.ones((1, 2, 2))
    for _ in range(3):
        direction = inner.step(3 * g)["direction"]
        state = 0.5 * state + direction
        found = run.step(g)
        np.testing.assert_allclose(found["direction"], state + 3 * g + inner.states["m"], rtol=1e-14)
    np.testing.assert_allclose(run.states["adam.m"], inner.states["m"], rtol=1e-14)


def test_one_rule_twice_under_two_names() -> None:
    rule = uses("direction = fast(g) + slow(g)", "{fast: {adam: {beta1: b}}, slow: adam}", "hyper: {b: 0.5}\n")
    assert set(rule.state) == {"fast.m", "fast.v", "slow.m", "slow.v"}
    assert set(rule.hyper) == {"b", "lr", "beta1", "beta2", "eps"}
    g = np.full((1, 1, 2), 0.25)
    first = PlainRun(rule, g, {**HYPER, "b": 0.5}).step(g)["direction"]
    np.testing.assert_allclose(first, 2.0, rtol=1e-6)


HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "bound": 0.3, "factor": 1.5}


def test_plus_and_chain_associate() -> None:
    lion = rulec.load("lion").bind(lr=1e-3, beta2=0.999, weight_decay=0.01)
    assert set((ADAM + lion + DECAY).state) == {"adam.m", "v", "lion.m"}  # only what clashes is prefixed
    one, two = (ADAM + lion) + DECAY, ADAM + (lion + DECAY)
    for rule in (one, two):
        assert len(rule.state) == 3
    same_steps(one, two)
    clip, scale = rulec.load("clip_by_value"), rulec.load("scale")
    same_steps((clip >> scale) >> ADAM, clip >> (scale >> ADAM))
    same_steps((L2 >> ADAM) + DECAY, L2 >> (ADAM + DECAY))  # decay does not look at what comes in
    sgd = SGD.bind(lr=1e-3)
    same_steps((L2 >> ADAM) + sgd, L2 >> (ADAM + sgd), equal=False)


def same_steps(one: Rule, two: Rule, equal: bool = True) -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(3, 4))
    a, b = ReferenceOptimizer(one, [p]), ReferenceOptimizer(two, [p])
    for _ in range(3):
        g = rng.normal(size=(3, 4))
        a.step([g])
        b.step([g])
    if equal:
        np.testing.assert_array_equal(a.params[0], b.params[0])
    else:
        assert not np.array_equal(a.params[0], b.params[0])


def test_grad_is_always_the_raw_gradient() -> None:
    both = rulec.parse("name: Both\nstep: |\n  direction = 10*g + grad\n")
    chained = rulec.load("scale").bind(factor=2) >> both >> both
    direction = PlainRun(chained, np.ones((1, 1, 1)), {"factor": 2, "lr": 1}).step(np.ones((1, 1, 1)))["direction"]
    assert direction == 10 * (10 * 2 + 1) + 1
    called = uses("direction = both(2*g)", "{both: {scale: {factor: 3}}}")
    assert PlainRun(called, np.ones((1, 1, 1)), {"factor": 3}).step(np.ones((1, 1, 1)))["direction"] == 6


def test_the_last_of_a_chain_may_assign_the_parameter() -> None:
    rprop = rulec.load("rprop")
    clipped = rulec.load("clip_by_value") >> rprop
    assert clipped.assigns_parameter
    rng = np.random.default_rng(1)
    p = rng.normal(size=(3, 4))
    one, two = ReferenceOptimizer(clipped, [p], {"bound": 0.1}), ReferenceOptimizer(rprop, [p])
    for _ in range(4):
        g = rng.normal(size=(3, 4))
        one.step([g])
        two.step([np.clip(g, -0.1, 0.1)])
    np.testing.assert_array_equal(one.params[0], two.params[0])


def test_names_are_kept_apart() -> None:
    """A part's local, state, hyper-parameter and input never meet another part's thing of the same name."""
    text = "name: {}\nhyper: {}\nstate: {}\nstep: |\n  {}\n"
    one = rulec.parse(text.format("One", "{a: 2}", "{b: 3}", "c = a + b\n  b = c\n  direction = c*g"))
    two = rulec.parse(text.format("Two", "{b: 5}", "{c: 7}", "a = b + c\n  c = a\n  direction = a*g"))
    three = rulec.parse(text.format("Three", "{c: 11}", "{a: 13}", "b = a + c\n  a = b\n  direction = b*g"))
    total = one + two + three
    assert set(total.hyper) == {"a", "b", "c"}
    assert len(total.state) == 3
    run = PlainRun(total, np.ones((1, 1, 1)), {"a": 2, "b": 5, "c": 11})
    assert run.step(np.ones((1, 1, 1)))["direction"] == 5 + 12 + 24
    assert run.step(np.ones((1, 1, 1)))["direction"] == 7 + 17 + 35
    assert rulec.parse(total.to_yaml()) == total


def test_a_short_name_never_takes_another_parts_full_name() -> None:
    """One part's own `adam.m`, from a call, beside a part `adam` that must keep the prefix of its `m`."""
    outer = uses("direction = adam(g)", "[adam]").renamed("Outer")
    other = rulec.parse("name: Other\nstate: {m: 0}\nstep: |\n  m = m + g\n  direction = m\n")
    total = outer + ADAM + other
    assert len(total.state) == 5
    g = np.full((1, 1, 1), 2.0)
    parts = [PlainRun(r, g, HYPER) for r in (outer, ADAM, other)]
    run = PlainRun(total, g, HYPER)
    for _ in range(3):
        wanted = sum(part.step(g)["direction"] for part in parts)
        np.testing.assert_allclose(run.step(g)["direction"], wanted, rtol=1e-15)


def test_names_of_rules_that_are_no_identifiers() -> None:
    odd = [ADAM.renamed(name) for name in ("8-bit Adam (fast)", "lambda", "Ädam", "+", "t")]
    total = odd[0]
    for rule in odd[1:]:
        total = total + rule
    assert rulec.parse(total.to_yaml()) == total
    assert len(total.state) == 10


def test_binding_a_number() -> None:
    bound = ADAM.bind(beta1=0.5, eps="1e-4")
    assert (bound.hyper["beta1"].default, bound.hyper["eps"].default) == (0.5, 1e-4)
    assert bound.hyper["beta1"].limits == ADAM.hyper["beta1"].limits
    assert bound.step == ADAM.step
    assert ADAM.bind() == ADAM
    assert SGD.bind(lr=3).hyper["lr"].default == 3
    assert DECAY.bind(lr=3).standalone().hyper["lr"].default == 3  # it names none, but every direction has one


def test_binding_a_name_renames() -> None:
    bound = ADAM.bind(beta1="momentum")
    assert "beta1" not in bound.hyper
    assert bound.hyper["momentum"] == ADAM.hyper["beta1"]
    same_steps(bound, ADAM)
    swapped = ADAM.bind(beta1="beta2", beta2="beta1")
    assert swapped.hyper["beta2"].default == 0.9
    assert swapped.hyper["beta1"].default == 0.999
    same_steps(swapped, ADAM)


def test_binding_an_expression_removes_the_hyper_parameter() -> None:
    bound = ADAM.bind(beta2="1 - (1 - beta1)**2")
    assert set(bound.hyper) == {"lr", "beta1", "eps"}
    same_steps(bound, ADAM.bind(beta2=1 - (1 - 0.9) ** 2))
    scaled = ADAM.bind(eps="2*eps")
    assert scaled.hyper["eps"] == ADAM.hyper["eps"]
    same_steps(scaled, ADAM.bind(eps=2e-8))
    open_name = ADAM.bind(eps="2*delta")
    assert open_name.hyper["delta"].default is None
    given = open_name + rulec.parse("name: G\nhyper: {delta: 5e-9}\nstep: |\n  direction = 0*delta*g\n")
    assert given.hyper["delta"].default == 5e-9


def test_binding_reaches_defaults_initial_values_and_conditions() -> None:
    rule = rulec.parse(
        "name: R\nhyper: {a: 2, b: 3*a, k: {default: 1, static: true}}\n"
        "state: {m: a + b, n: {init: 0, if: k > 0}}\nskip: a > 5\nevaluate: p + a\n"
        "step: |\n  if k > 0:\n    n = n + a\n  direction = m*g\n"
    )
    bound = rule.bind(a="c/2", k="j")
    assert bound.hyper["c"].default is None
    assert repr(bound.hyper["b"].default) == "<3*(c/2)>"
    assert repr(bound.state["m"].init) == "<c/2 + b>"
    assert repr(bound.state["n"].condition) == "<j > 0>"
    assert repr(bound.skip) == "<c/2 > 5>"
    assert repr(bound.evaluate) == "<p + c/2>"
    assert bound.step_text() == "if j > 0:\n  n = n + c/2\ndirection = m*g"
    assert bound.hyper["j"].static
    assert rulec.parse(bound.to_yaml()) == bound


def test_a_bound_name_does_not_meet_a_local() -> None:
    bound = ADAM.bind(eps="m_hat")
    assert "m_hat" in bound.hyper
    same_steps(bound, ADAM)
    assert rulec.parse(bound.to_yaml()) == bound


def test_binding_to_the_learning_rate() -> None:
    clip = rulec.load("clip_by_value")
    for rule in (clip.bind(bound="2*lr"), clip.bind(bound="2*lr") >> ADAM, (clip >> ADAM).bind(bound="2*lr")):
        assert rulec.parse(rule.to_yaml()) == rule
        assert "bound" not in rule.hyper
    same_steps(clip.bind(bound="2*lr") >> ADAM, clip.bind(bound=2e-3) >> ADAM)
    same_steps((clip >> ADAM).bind(bound="2*lr"), clip.bind(bound=2e-3) >> ADAM)
    called = uses("direction = scale(g)", "[scale: {factor: 2*lr}]")
    assert rulec.parse(called.to_yaml()) == called


def test_binding_the_learning_rate_itself() -> None:
    bound = ADAM.bind(lr="peak/2")
    assert not bound.assigns_parameter
    assert "lr" not in bound.hyper
    same_steps(bound.bind(peak=2e-3), ADAM)
    assert rulec.parse(bound.bind(peak=2e-3).to_yaml()) == bound.bind(peak=2e-3)
    renamed_rate = ADAM.bind(lr="adam_lr")
    assert renamed_rate.hyper["adam_lr"] == replace(ADAM.hyper["lr"], follows=True)
    same_steps(renamed_rate, ADAM)


def test_a_rule_with_a_rate_of_its_own_keeps_its_direction() -> None:
    """Theirs by hand: the direction is Adam's, decay and a mask come before the learning rate."""
    rule = (ADAM.bind(lr="2*lr") >> rulec.load("cautious")) + DECAY
    assert "rate: 2*lr\n" in rule.to_yaml()
    assert rulec.parse(rule.to_yaml()) == rule
    by_hand = (ADAM >> rulec.load("cautious")) + DECAY
    same_steps(rule, by_hand.bind(lr=2e-3))
    written = rulec.parse("name: R\nhyper: {speed: 1e-3}\nrate: 2*speed\nstep: |\n  direction = g\n")
    same_steps(written, rulec.load("sgd").bind(lr=2e-3))
    with pytest.raises(
        RuleError, match=r"^Adam has the learning rate 2\*lr, and SGD has the learning rate lr: bind lr"
    ):
        ADAM.bind(lr="2*lr") + rulec.load("sgd")


def test_unification() -> None:
    half = DECAY.bind(weight_decay=0.5)
    with pytest.raises(
        RuleError, match=r"both have a hyper-parameter 'weight_decay', with the defaults 0\.5 and 0\.01"
    ):
        half + DECAY
    total = half.bind(weight_decay="other") + DECAY
    assert total.hyper["other"].default == 0.5
    assert total.hyper["weight_decay"].default == 0.01
    same = DECAY + DECAY
    assert list(same.hyper) == ["weight_decay"]
    text = "name: R\nhyper: {{k: {{default: 1, {}}}}}\nstep: |\n  direction = k*g\n"
    one, two = rulec.parse(text.format("min: 0, max: 5")), rulec.parse(text.format("min: -1, below: 3"))
    assert (one + two).hyper["k"].limits == {"min": 0, "max": 5, "below": 3}
    apart = rulec.parse(text.format("min: 1")), rulec.parse(text.format("max: 1"))
    assert (apart[0] + apart[1]).hyper["k"].limits == {"min": 1, "max": 1}
    low, high = rulec.parse(text.format("min: 1")), text.format("below: 1").replace("default: 1", "default: null")
    with pytest.raises(RuleError, match="no number is in the range of k"):
        low + rulec.parse(high)


def whole(attribute: str) -> Rule:
    return rulec.parse(f"name: Whole\n{attribute}\nstate: {{z: p}}\nstep: |\n  z = z + g\n  direction = z\n")


def test_what_belongs_to_a_whole_rule() -> None:
    skipping, averaged = whole("skip: not isfinite(sum(g)) or max(z) > 9"), whole("evaluate: (p + z)/2")
    total = skipping + averaged
    assert repr(total.skip) == '<not isfinite(sum(g, per="tensor")) or max(whole.z, per="tensor") > 9>'
    assert repr(total.evaluate) == "<(p + whole2.z)/2>"
    with pytest.raises(RuleError, match="Whole and Whole both say skip: only one of them may"):
        skipping + skipping
    chained = L2 >> skipping  # what it skips by is its own input
    assert repr(chained.skip) == '<not isfinite(sum(l2.direction, per="tensor")) or max(z, per="tensor") > 9>'
    ReferenceOptimizer(chained, [np.ones((2, 2))]).step([np.ones((2, 2))])


@pytest.mark.parametrize("attribute", ["skip: sum(g) > 1", "evaluate: p + z"])
def test_a_rule_with_an_attribute_of_the_whole_is_not_called(attribute: str, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(whole(attribute).to_yaml())
    word = attribute.partition(":")[0]
    with pytest.raises(RuleError, match=f"Whole says {word}, so it cannot be called: say it in the rule that calls it"):
        rulec.parse("name: R\nuses: [inner.yaml]\nstep: |\n  direction = inner(g)\n", base=tmp_path)


HALVED = "name: Halved\nuses: [muon]\nhyper: {{k: 0.5}}\n{}step: |\n  direction = k*muon(g)\n"


def test_a_called_rule_for_some_tensors_is_a_case_of_its_caller() -> None:
    """Half of Muon's direction is half of its length: of matrices, and of what AdamW steps at a rate of its own."""
    muon = rulec.load("muon")
    in_python = rulec.rule(name="Halved")(lambda g, *, k=0.5: k * muon.bind(momentum=0.95)(g))
    start = [np.ones((3, 2)), np.ones(4)]
    grads = [np.arange(6.0).reshape(3, 2) - 2, np.arange(4.0) - 1]
    whole = ReferenceOptimizer(muon, start, {"lr": 0.05, "adamw_lr": 0.1})
    for rule in (rulec.parse(HALVED.format("")), in_python):
        half = ReferenceOptimizer(rule, start, {"lr": 0.1, "adamw_lr": 0.2})
        for _ in range(3):
            half.step(grads)
        assert rule.rest is not None
        assert rule.rest.to_yaml().partition("rate: ")[2].split()[0] == "adamw_lr"
        assert rulec.parse(rule.to_yaml()) == rule
        if rule is not in_python:
            for _ in range(3):
                whole.step(grads)
        for mine, theirs in zip(half.params, whole.params, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    for binding in ("momentum: k", "adamw_lr: k"):
        bound = rulec.parse(HALVED.format("").replace("[muon]", f"[{{muon: {{{binding}}}}}]"))
        assert bound.all_hyper["k"].default == 0.5
    with pytest.raises(RuleError, match=r":2:1: Halved says applies_to and calls Muon, which applies to some"):
        rulec.parse(HALVED.format("applies_to: ndim > 1\n"))
    with pytest.raises(RuleError, match="says applies_to and calls Muon, which applies to some tensors only: leave"):
        rulec.rule(applies_to="ndim > 1")(lambda g: muon(g))


def test_inputs_travel_with_their_rules(tmp_path: Path) -> None:
    text = "name: {}\ninputs: {{loss: {}}}\nstep: |\n  direction = g*loss\n"
    one = rulec.parse(text.format("One", "scalar"))
    (tmp_path / "one.yaml").write_text(one.to_yaml())
    assert (one + DECAY).inputs == {"loss": "scalar"}
    called = rulec.parse("name: R\nuses: [one.yaml]\nstep: |\n  direction = one(g)\n", base=tmp_path)
    assert called.inputs == {"loss": "scalar"}
    optimizer = ReferenceOptimizer(called, [np.ones(3)], {"lr": 1.0})
    optimizer.step([np.ones(3)], inputs={"loss": 0.25})
    np.testing.assert_array_equal(optimizer.params[0], 0.75)
    with pytest.raises(RuleError, match="the input 'loss' is 'like p' for Two and 'scalar' for another"):
        one + rulec.parse(text.format("Two", "like p"))
    with pytest.raises(RuleError, match="'loss' is a hyper-parameter already"):
        one + rulec.parse("name: H\nhyper: {loss: 1}\nstep: |\n  direction = g*loss\n")


def test_views_travel_with_called_rules(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(
        "name: Flat\nview: {flatten: rest}\nstep: |\n  direction = g/norm(g, per='row')\n"
    )
    text = "name: R\n{}uses: [flat.yaml]\nstep: |\n  direction = flat(g)\n"
    assert rulec.parse(text.format(""), base=tmp_path).view == {"flatten": "rest"}
    with pytest.raises(RuleError, match="see tensors differently"):
        rulec.parse(text.format("view: {short: first}\n"), base=tmp_path)


#: Rules that have a direction, with one learning rate and no clash of hyper-parameters between them.
PARTS = [
    ADAM, DECAY, L2, SGD, rulec.load("clip_by_value"), rulec.load("scale"), rulec.load("sign"),
    rulec.load("transforms/nesterov"),
    rulec.load("momentum").bind(lr=1e-3), rulec.load("adagrad").bind(lr=1e-3, eps=1e-8),
    rulec.load("signum").bind(lr=1e-3), rulec.load("lion").bind(lr=1e-3, beta2=0.999),
    rulec.parse("name: Branching\nstate: {m: 0}\nstep: |\n  if rows >= 2:\n    m = m + g\n  else:\n    m = g\n"
                "  if t > 2:\n    direction = m\n  else:\n    direction = g + grad\n"),
    uses("m = 2*g\ndirection = adam(m) + m", "[adam]").renamed("Caller"),
]  # fmt: skip


class Direct:
    """A composition run part by part, each on its own."""

    def __init__(self, tree: Any, p: np.ndarray[Any, Any]) -> None:
        self.kind = "part" if isinstance(tree, Rule) else tree[0]
        self.run = PlainRun(tree, p, hyper_of(tree)) if isinstance(tree, Rule) else None
        self.parts = [] if isinstance(tree, Rule) else [Direct(part, p) for part in tree[1:]]

    def direction(self, g: Any, grad: Any, p: Any) -> Any:
        if self.run is not None:
            self.run.p = p
            return self.run.step(g, grad)["direction"]
        if self.kind == "+":
            found = [part.direction(g, grad, p) for part in self.parts]
            return found[0] + found[1]
        return self.parts[1].direction(self.parts[0].direction(g, grad, p), grad, p)


def hyper_of(rule: Rule) -> dict[str, float]:
    return {key: float(h.default) for key, h in rule.hyper.items()}  # type: ignore[arg-type]


def build(tree: Any) -> Rule:
    if isinstance(tree, Rule):
        return tree
    one, two = build(tree[1]), build(tree[2])
    return one + two if tree[0] == "+" else one >> two


trees = st.recursive(
    st.sampled_from(PARTS), lambda inner: st.tuples(st.sampled_from(["+", ">>"]), inner, inner), max_leaves=5
)


@given(trees)
@settings(max_examples=30, deadline=None)
def test_random_compositions(tree: Any) -> None:
    try:
        rule = build(tree)
    except RuleError as error:
        if "both have a hyper-parameter" not in error.message and "never reads its input" not in error.message:
            raise
        return
    assert replace(rulec.parse(rule.to_yaml()), name="") == replace(rule, name="")
    rng = np.random.default_rng(0)
    p = rng.normal(size=(1, 3, 2))
    direct, composed = Direct(tree, p), ReferenceOptimizer(rule, [p])
    for _ in range(3):
        g = rng.normal(size=(1, 3, 2))
        p = p - 1e-3 * direct.direction(g, g, p)
        composed.step([g])
        np.testing.assert_allclose(composed.params[0], p, rtol=1e-12)


def test_to_yaml_writes_what_it_cannot_leave_out() -> None:
    rule = rulec.parse(
        "name: R\nhyper: {lr: {default: 1, min: -.inf}, k: {default: null}, beta1: {default: 0.5, max: 2}}\n"
        "state: {m: .inf, n: {init: -.inf, per: row}}\nsummary: 'a: b # c'\n"
        "step: |\n  direction = m*k*beta1 + mean(n)\n"
    )
    assert rule.hyper["lr"].limits == {}
    assert rulec.parse(rule.to_yaml()) == rule
    assert rule.state["m"].init is const(float("inf"))
    assert next(assignments(rule.step)).target == "direction"


def test_rules_that_see_tensors_differently_are_not_composed() -> None:
    flat, short = (
        rulec.parse(f"name: {name}\nview: {view}\nstep: |\n  direction = g\n")
        for name, view in (("Flat", "{flatten: rest}"), ("Short", "{short: first}"))
    )
    assert (flat >> flat).view == (flat >> ADAM).view == {"flatten": "rest"}
    says = "^Flat sees tensors by view {flatten: rest} and Short sees tensors by view {short: first}, and a rule sees"
    with pytest.raises(RuleError, match=says):
        _ = flat >> short


def test_a_suggestion_names_rules_as_text_does() -> None:
    with pytest.raises(RuleError, match=r"did you mean adabelief \+ decay\?$"):
        _ = rulec.load("adabelief") >> DECAY


PROJECTED = """
name: Projected
hyper: {n: {default: 2, static: true, whole: true, min: 1}}
inputs: {c: {shape: [n, cols]}}
step: |
  direction = g @ transpose(c) @ c
"""


def test_matrices_that_are_inputs_are_carried_with_their_extents() -> None:
    rule = rulec.parse(PROJECTED)
    for composed in (rule + DECAY, rulec.load("clip_by_value") >> rule, rulec.load("lookahead")(rule)):
        assert composed.inputs == rule.inputs
        assert rulec.parse(composed.to_yaml()) == composed
    assert "shape: [rank, cols]" in rule.bind(n="rank").to_yaml()
    with pytest.raises(
        RuleError, match=r"'c' is of shape \[n, rows\] for Projected and of shape \[n, cols\] for anoth"
    ):
        rule + rulec.parse(PROJECTED.replace("[n, cols]", "[n, rows]"))
    assert meaning(rule) != meaning(rulec.parse(PROJECTED.replace("[n, cols]", "[1, cols]")))


def test_an_input_of_the_parameter_s_extents_is_like_p() -> None:
    rule = rulec.parse("name: R\ninputs: {h: {shape: [rows, cols]}}\nstep: |\n  direction = g*h\n")
    assert rule.inputs == {"h": "like p"}

    kinds = {"h": {"shape": ["rows", "cols"]}, "c": {"shape": ["k", "2*cols"]}}

    @rulec.rule(inputs=kinds, hyper={"k": {"static": True}})
    def traced(g: Any, h: Any, c: Any, *, k: float = 2) -> Any:
        return g * h + rulec.math.sum(c)

    assert rulec.parse(traced.to_yaml()).inputs == traced.inputs


def test_a_wrapper_that_runs_a_rule_in_another_shape_gives_its_matrices_the_extents_there() -> None:
    wrapper = rulec.parse(
        "name: Half\nwraps: {inner: {shape: [rows, 2]}}\n"
        "step: |\n  direction = concat(inner(g[:, :2]), g[:, 2:], axis=1)\n"
    )
    rule = rulec.parse("name: R\ninputs: {c: {shape: [cols, cols]}}\nstep: |\n  direction = g @ c\n")
    assert kind_data(wrapper(rule).inputs["c"]) == {"shape": [2.0, 2.0]}
