"""Routing: the rule for the tensors that another does not apply to, alone and in compositions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec import Rule, RuleError
from rulec.compiler.reference import ReferenceOptimizer

ADAM, SGD, L2, DECAY = map(rulec.load, ("adam", "sgd", "l2", "decay"))

MATRICES = """
name: Matrices
hyper: {{lr: 0.02, momentum: 0.8}}
state: {{m: 0}}
applies_to: ndim == 2 and not tagged("embedding")
{otherwise}
step: |
  m = momentum*m + g
  direction = m
"""


def matrices(otherwise: str = "otherwise: {adam: {eps: adam_eps}}") -> Rule:
    return rulec.parse(MATRICES.format(otherwise=otherwise), "r.yaml")


def stepped(rule: Rule, shape: tuple[int, ...], tags: set[str] | None = None, **hyper: float) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(1)
    optimizer = ReferenceOptimizer(rule, [rng.normal(size=shape)], hyper, tags=[tags or set()])
    for _ in range(4):
        optimizer.step([rng.normal(size=shape)])
    return optimizer.params[0]


def test_the_rest_is_the_rule_itself_with_the_main_rule_s_defaults() -> None:
    rest = matrices().rest
    assert rest is not None
    assert rest.name == "Adam"
    assert {key: h.default for key, h in rest.hyper.items()} == {
        "lr": 0.02, "beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8
    }  # fmt: skip
    assert ADAM.rest is None
    assert matrices("").rest is None


def test_every_hyper_parameter_that_can_be_set() -> None:
    assert list(matrices().all_hyper) == ["lr", "momentum", "beta1", "beta2", "adam_eps"]
    assert matrices().all_hyper["lr"].default == 0.02
    assert list(matrices("").all_hyper) == ["lr", "momentum"]


def test_the_rest_follows_a_rate_that_neither_names() -> None:
    plain = "name: Plain\napplies_to: ndim == 2\notherwise: sign\nstep: |\n  direction = g\n"
    rule = rulec.parse(plain).bind(lr=0.5)
    assert rule.rest is not None
    assert rule.rest.hyper["lr"].default == 0.5
    np.testing.assert_array_equal(stepped(rule, (3,)), stepped(rulec.load("sign"), (3,), lr=0.5))


@pytest.mark.parametrize(
    ("shape", "tags", "applies"),
    [((3, 4), set(), True), ((3, 4), {"embedding"}, False), ((3,), set(), False), ((2, 3, 4), set(), False)],
)
def test_tensors_go_where_they_belong(shape: tuple[int, ...], tags: set[str], applies: bool) -> None:
    main = rulec.parse(MATRICES.format(otherwise="").replace('applies_to: ndim == 2 and not tagged("embedding")', ""))
    want = stepped(main, shape) if applies else stepped(ADAM, shape, lr=0.02)
    np.testing.assert_array_equal(stepped(matrices(), shape, tags), want)


def test_binding_reaches_both() -> None:
    rest = matrices().bind(lr=0.3, beta1=0.5).rest
    assert rest is not None
    assert rest.hyper["lr"].default == 0.3
    assert rest.hyper["beta1"].default == 0.5
    renamed = matrices().bind(lr="rate")
    assert renamed.rest is not None
    assert "lr" not in renamed.all_hyper
    np.testing.assert_allclose(stepped(renamed, (3,), rate=0.1), stepped(ADAM, (3,), lr=0.1), rtol=1e-15)
    np.testing.assert_allclose(stepped(renamed, (3, 4), rate=0.1), stepped(matrices(), (3, 4), lr=0.1), rtol=1e-15)
    with pytest.raises(RuleError, match=r"^Matrices has no hyper-parameter 'beta3'; did you mean"):
        matrices().bind(beta3=0.5)


@pytest.mark.parametrize(
    ("composed", "rest"),
    [
        (lambda r: L2 >> r, lambda r: L2 >> r),
        (lambda r: r + DECAY, lambda r: r + DECAY),
        (lambda r: L2 >> (r + SGD.bind(lr=0.02)), lambda r: L2 >> (r.bind(lr=0.02) + SGD.bind(lr=0.02))),
        (lambda r: rulec.load("lookahead")(r), lambda r: rulec.load("lookahead")(r)),
        (lambda r: rulec.load("ema")(L2 >> r), lambda r: rulec.load("ema")(L2 >> r)),
    ],
    ids=["chain", "plus", "both", "wrapped", "wrapped chain"],
)
def test_a_composition_composes_the_rest_as_well(composed: Any, rest: Any) -> None:
    rule = composed(matrices())
    assert rule.applies_to is not None
    np.testing.assert_allclose(stepped(rule, (3,)), stepped(rest(ADAM), (3,), lr=0.02), rtol=1e-14)
    np.testing.assert_allclose(stepped(rule, (3, 4)), stepped(composed(matrices("")), (3, 4)), rtol=1e-14)
    assert rulec.parse(rule.to_yaml()) == rule


RATED = "otherwise: {adam: {lr: adam_lr, eps: adam_eps}}"


@pytest.mark.parametrize("transform", ["cautious", "trust_ratio", "decay"])
def test_a_rest_with_a_rate_of_its_own_is_composed_like_any(transform: str) -> None:
    """Cautious Adam for the rest, with Adam's own learning rate: as where it is composed alone."""
    after = rulec.load(transform)
    rule = matrices(RATED) + after if transform == "decay" else matrices(RATED) >> after
    alone = ADAM + after if transform == "decay" else ADAM >> after
    assert rulec.parse(rule.to_yaml()) == rule
    np.testing.assert_allclose(stepped(rule, (3,), adam_lr=0.3), stepped(alone, (3,), lr=0.3), rtol=1e-14)


@pytest.mark.parametrize("wrapper", ["lookahead", "ema", "schedule_free", "accumulate"])
def test_a_wrapper_steps_the_rest_at_its_own_rate(wrapper: str) -> None:
    """schedule_free weighs steps by the learning rate: it is that of the rule it is around."""
    rule, alone = (rulec.load(wrapper)(inner) for inner in (matrices(RATED), ADAM))
    assert rulec.parse(rule.to_yaml()) == rule
    np.testing.assert_allclose(stepped(rule, (3,), lr=7.0, adam_lr=0.3), stepped(alone, (3,), lr=0.3), rtol=1e-14)


def test_several_rules_that_leave_tensors_out() -> None:
    """Each tensor gets the rule that each part has for it, in all four combinations."""
    big = "name: Big\nhyper: {{lr: 0.02}}\napplies_to: numel > 5\n{}\nstep: |\n  direction = 3*sign(g)\n"
    rule = matrices("otherwise: sgd(lr=lr)") + rulec.parse(big.format("otherwise: sign"))
    assert rulec.parse(rule.to_yaml()) == rule
    main, sign = rulec.parse(MATRICES.format(otherwise="").replace("applies_to", "# ")), rulec.load("sign")
    triple = rulec.parse("name: Triple\nstep: |\n  direction = 3*sign(g)\n")
    for shape, parts in (((3, 4), (main, triple)), ((2, 2), (main, sign)), ((7,), (SGD, triple)), ((3,), (SGD, sign))):
        want = parts[0].bind(lr=0.02) + parts[1]
        np.testing.assert_allclose(stepped(rule, shape), stepped(want, shape), rtol=1e-14)
    partly = matrices("otherwise: sgd") + rulec.parse(big.format(""))
    with pytest.raises(RuleError, match=r"does not apply to .*\(3,\), and names no rule"):
        stepped(partly, (3,))
    twice = matrices() + matrices()
    assert twice.rest is not None
    assert twice.rest.rest is None
    np.testing.assert_allclose(stepped(twice, (3,)), stepped(ADAM, (3,), lr=0.04), rtol=1e-13)


def test_what_is_composed_is_written_out_and_what_has_a_name_by_it() -> None:
    assert "otherwise: adam(eps=adam_eps)\n" in matrices().to_yaml()
    assert rulec.parse(matrices().to_yaml()) == matrices()
    assert "otherwise:\n  name: L2ThenAdam\n" in (L2 >> matrices()).to_yaml()


def test_the_rest_may_itself_leave_tensors_out() -> None:
    inner = "name: Vectors\napplies_to: ndim == 1\notherwise: sign\nhyper: {lr: 0.1}\nstep: |\n  direction = g\n"
    below = "\n".join(f"  {line}" for line in inner.strip().split("\n"))
    rule = matrices(f"otherwise:\n{below}")
    assert rulec.parse(rule.to_yaml()) == rule
    np.testing.assert_array_equal(stepped(rule, (3,)), stepped(SGD, (3,), lr=0.02))
    np.testing.assert_array_equal(stepped(rule, ()), stepped(rulec.load("sign"), (), lr=0.02))


def test_a_mistake_in_a_rule_written_out_is_at_its_line() -> None:
    wrong = "otherwise:\n  name: Other\n  step: |\n    direction = gg"
    with pytest.raises(
        RuleError, match=r"^r\.yaml:9:17: unknown name 'gg'; did you mean 'g'\?\n +direction = gg\n +\^\^$"
    ):
        matrices(wrong)
    with pytest.raises(RuleError, match=r"^r\.yaml:8:3: unknown key 'stepp'; did you mean 'step'\?"):
        matrices("otherwise:\n  name: Other\n  stepp: |\n    direction = g")


def test_what_cannot_be_composed_for_the_rest_says_so() -> None:
    with pytest.raises(
        RuleError, match=r"^for the tensors that Matrices leaves out: Rprop and AdGD both assign p: only one of"
    ):
        _ = matrices("otherwise: rprop") + rulec.load("adgd")
    tall = rulec.parse("name: Tall\nview: {short: first}\napplies_to: rows > 1\nstep: |\n  direction = g\n")
    wide = rulec.parse("name: Wide\napplies_to: cols > 1\nstep: |\n  direction = g\n")
    with pytest.raises(RuleError, match=r"^Tall and Wide both choose tensors by rows and cols, and see them by"):
        _ = tall + wide
    with pytest.raises(RuleError, match=r"^r\.yaml:6:12: Lookahead wraps another rule: write lookahead\(adam\)"):
        matrices("otherwise: lookahead")


def test_a_wrapper_leaves_tensors_to_what_it_wraps_or_to_another() -> None:
    text = "name: Big\nwraps: inner\napplies_to: ndim >= 2\notherwise: {}\nstep: |\n  direction = 2*inner(g)\n"
    for rest, want in (("inner", ADAM), ("sgd", SGD), ("lookahead", rulec.load("lookahead")(ADAM))):
        wrapper = rulec.parse(text.format(rest))
        assert rulec.parse(wrapper.to_yaml()) == wrapper
        rule = wrapper(ADAM)
        np.testing.assert_array_equal(stepped(rule, (3,), lr=0.1), stepped(want, (3,), lr=0.1))
        np.testing.assert_allclose(stepped(rule, (3, 2), lr=0.1), stepped(ADAM, (3, 2), lr=0.2), rtol=1e-14)


def test_a_tensor_that_nothing_applies_to_is_refused() -> None:
    with pytest.raises(RuleError, match=r"Matrices does not apply to .*\(3,\), and names no rule"):
        stepped(matrices(""), (3,))


def test_a_step_is_given_the_inputs_of_both() -> None:
    other = "otherwise:\n  name: Polyak\n  inputs: {loss: scalar}\n  step: |\n    direction = g*loss\n"
    for rule in (matrices(other), L2.bind(weight_decay=0.0) >> matrices(other)):
        assert rule.inputs == {"loss": "scalar"}
        assert rulec.parse(rule.to_yaml()) == rule
        optimizer = ReferenceOptimizer(rule, [np.zeros(2), np.zeros((2, 2))])
        optimizer.step([np.ones(2), np.ones((2, 2))], inputs={"loss": 3.0})
        np.testing.assert_allclose(optimizer.params[0], -0.02 * 3, rtol=1e-15)
        np.testing.assert_allclose(optimizer.params[1], -0.02, rtol=1e-15)
        arrays = [np.zeros(2), np.zeros((2, 2))]
        rulec.array.Optimizer(rule, arrays).step([np.ones(2), np.ones((2, 2))], loss=3.0)
        np.testing.assert_allclose(arrays[0], optimizer.params[0], rtol=1e-15)
    clashing = other.replace("loss: scalar", "loss: like p").replace("otherwise:", "inputs: {loss: scalar}\notherwise:")
    with pytest.raises(RuleError, match="the input 'loss' is 'like p' for Polyak and 'scalar' for another"):
        matrices(clashing)
