"""Lists of hyper-parameters and states, histories, and loops: what they are written out to, and other lengths."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RuleError

AGGREGATED = """
name: Aggregated
hyper: {lr: 1e-1, betas: [0, 0.9, 0.99]}
state: {v: {count: len(betas)}}
step: |
  total = 0
  for i in range(len(betas)):
    v[i] = betas[i]*v[i] + g
    total = total + v[i]
  direction = total/len(betas)
"""

DELAYED = """
name: Delayed
hyper: {keep: {default: 3, min: 1, static: true, whole: true}}
state: {s: {history: keep}}
step: |
  old = s[keep - 1]
  s = g
  direction = old + s[0]
"""


@rulec.rule(state={"v": {"count": "len(betas)"}})
def aggregated(g, s, *, lr=0.1, betas=(0, 0.9, 0.99)):  # type: ignore[no-untyped-def]
    total = 0
    for i, beta in enumerate(betas):
        s.v[i] = beta * s.v[i] + g
        total = total + s.v[i]
    return total / len(betas)


@rulec.rule(state={"s": {"history": "keep"}}, hyper={"keep": {"min": 1, "static": True, "whole": True}})
def delayed(g, s, *, keep=3):  # type: ignore[no-untyped-def]
    old = s.s[int(keep) - 1]
    s.s = g
    return old + s.s[0]


def test_a_loop_is_its_lines() -> None:
    lines = rulec.parse(AGGREGATED.replace("[0, 0.9, 0.99]", "[0, 0.9]")).step_text().splitlines()
    assert lines == [
        "total = 0", "v_0 = betas_0*v_0 + g", "total = total + v_0", "v_1 = betas_1*v_1 + g", "total = total + v_1",
        "direction = total/2",
    ]  # fmt: skip


def test_a_push_moves_every_entry() -> None:
    lines = rulec.parse(DELAYED).step_text().splitlines()
    assert lines == ["old = s_2", "s_2 = s_1", "s_1 = s_0", "s_0 = g", "direction = old + s_0"]


def test_a_push_of_older_entries_reads_them_before() -> None:
    text = "name: Sums\nstate: {s: {history: 3, init: 1}}\nstep: |\n  s = s[0] + s[1] + s[2]\n  direction = s[0]\n"
    reference = ReferenceOptimizer(rulec.parse(text), [np.zeros(1)], {"lr": 1.0})
    sums = []
    for _ in range(4):
        reference.step([np.zeros(1)])
        sums.append(float(reference.state(0)["s_0"].ravel()[0]))
    assert sums == [3, 5, 9, 17]


@pytest.mark.parametrize(("text", "traced", "hyper"), [
    (AGGREGATED, aggregated, {}), (AGGREGATED, aggregated, {"betas": [0.5]}),
    (AGGREGATED, aggregated, {"betas": (0.1, 0.2, 0.3, 0.4, 0.5)}),
    (DELAYED, delayed, {}), (DELAYED, delayed, {"keep": 1}), (DELAYED, delayed, {"keep": 5}),
])  # fmt: skip
def test_text_and_python_are_the_same(text: str, traced: rulec.Rule, hyper: dict[str, object]) -> None:
    gradients = np.random.default_rng(0).normal(size=(8, 3))
    ends = []
    for rule in (rulec.parse(text), traced):
        for run in (
            ReferenceOptimizer(rule, [np.ones(3)], hyper),
            ReferenceOptimizer(rule.bind(**hyper), [np.ones(3)]),
        ):
            for gradient in gradients:
                run.step([gradient])
            ends.append(run.params[0])
    assert all(np.array_equal(end, ends[0]) for end in ends)


def test_a_delay_is_as_long_as_its_history() -> None:
    params, gradients = [np.zeros(1)], [1.0, 10.0, 100.0, 1000.0]
    optimizer = rulec.array.Optimizer(rulec.parse(DELAYED), params, keep=2, lr=1.0, backend="numpy")
    moves = []
    for gradient in gradients:
        before = params[0].copy()
        optimizer.step([np.array([gradient])])
        moves.append(float((before - params[0])[0]))
    assert moves == [1, 10, 101, 1010]


def test_the_text_of_a_rule_is_of_its_length() -> None:
    for rule in (rulec.parse(AGGREGATED), rulec.parse(AGGREGATED).bind(betas=[0.5]), rulec.parse(DELAYED).bind(keep=2)):
        again = rulec.parse(rule.to_yaml())
        assert again == rule
        name = "betas" if "betas_0" in rule.hyper else "keep"
        with pytest.raises((HyperError, RuleError), match=f"{name}=.* of (Aggregated|Delayed)"):
            rulec.array.Optimizer(again, [np.zeros(1)], **{name: [0.1] * 7 if name == "betas" else 7})


def test_lengths_go_through_compositions() -> None:
    clipped = rulec.load("clip_by_value") >> rulec.parse(AGGREGATED)
    assert len(clipped.state) == 3
    assert len(clipped.bind(betas=[0.5, 0.6]).state) == 2
    assert len(rulec.load("lookahead")(clipped).bind(betas=[0.5], bound=2).state) == 2
    assert rulec.load("lookahead")(clipped).bind(betas=[0.5], bound=2).hyper["bound"].default == 2
    assert len(rulec.load("clip_by_value >> aggmo(betas=[0.1, 0.2])").bind(bound=3).bind(betas=[0.3] * 5).state) == 5


def test_an_entry_may_be_bound_to_an_expression() -> None:
    rule = rulec.load("aggmo(betas=[0, beta, beta**2])")
    assert [*rule.hyper] == ["lr", "betas_0", "beta"]
    assert rule.step_text().splitlines()[3] == "v_1 = beta*v_1 + g"


def test_lists_of_two_lengths_are_refused() -> None:
    other = rulec.parse(AGGREGATED.replace("Aggregated", "Other").replace("[0, 0.9, 0.99]", "[0, 0.9]"))
    with pytest.raises(RuleError, match="betas is of length 3 in one rule and 2 in Other: bind one of them"):
        rulec.parse(AGGREGATED) + other


def test_a_count_cannot_change_later() -> None:
    optimizer = rulec.array.Optimizer(rulec.parse(DELAYED), [np.zeros(1)], keep=2)
    optimizer.hyper["keep"] = 3
    with pytest.raises(HyperError, match=r"keep=3.* decides how many states or lines the rule has"):
        optimizer.step([np.ones(1)])


@pytest.mark.parametrize("betas", [0.5, [], "abc", [0.5, 1.5], [[0.5]]])
def test_what_is_no_list_is_refused(betas: object) -> None:
    with pytest.raises(HyperError, match="betas"):
        rulec.array.Optimizer("aggmo", [np.zeros(1)], betas=betas)


def test_a_pickled_rule_has_its_lengths() -> None:
    rule = rulec.load("aggmo").bind(betas=[0.5])
    again = pickle.loads(pickle.dumps(rule))  # noqa: S301
    assert again == rule


def test_a_condition_on_a_loop_variable_is_decided() -> None:
    body = "for i in range(3):\n    if i == 0:\n      x = g\n    else:\n      x = 2*x\n  direction = x\n"
    assert rulec.parse(f"name: R\nstep: |\n  {body}").step_text().splitlines() == [
        "x = g",
        "x = 2*x",
        "x = 2*x",
        "direction = x",
    ]
