"""The statistics that rules of the library declare: all compile and are finite, and some values by other formulas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import rulec
from rulec import Rule
from rulec.checkpoint.content import meaning
from rulec.compiler.pipeline import compile
from rulec.compiler.text import program_text
from rulec.language.library.load import parse
from rulec.language.statistics import watched
from rulec.tools.compare.difference import Trial, shapes_for
from rulec.tools.compare.sides import EngineSide
from tests.library import by_kind

Array = np.ndarray[Any, Any]

RULES = Path(rulec.__file__).parent.parent / "rules"

#: The rules whose own file has the key.
DECLARING = [name for name in rulec.rules() if "\nstatistics:" in (RULES / f"{name}.yaml").read_text()]


def whole_of(rule: Rule) -> Rule:
    """A rule that steps: a wrapper goes around Adam, and around gradient descent where it wraps two."""
    return (rule(*map(rulec.load, ("adam", "sgd")[: len(rule.wraps)])) if rule.wraps else rule).standalone()


def own_names(name: str) -> list[str]:
    return [*yaml.safe_load((RULES / f"{name}.yaml").read_text())["statistics"]]


def stepped(rule: Rule, trial: Trial, hyper: Mapping[str, float] | None = None) -> dict[str, float]:
    """All statistics that a rule declares, of the last step of a trial by the numpy backend."""
    known = {k: v for k, v in (hyper or {}).items() if k in rule.standalone().hyper}
    side = EngineSide(rule, trial.params, known, "numpy", [*rule.statistics])
    for grads, inputs in zip(trial.gradients(), trial.inputs(rule), strict=True):
        side.step(grads, inputs)
    return side.statistics().numbers()


def test_at_least_25_rules_declare_statistics() -> None:
    assert len(DECLARING) >= 25


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_the_statistics_of_a_rule_compile_and_take_no_stage_more(name: str) -> None:
    rule = whole_of(rulec.load(name))
    names = [*rule.statistics]
    assert {key.rpartition(".")[2] for key in names} >= {*own_names(name)}
    measuring = compile(rule, watch=watched(rule, names))
    assert len(measuring.statistics) == len(names)
    assert len(measuring.stages) == len(compile(rule).stages)


def without_statistics(name: str) -> Rule:
    """A rule of the library from its file without the key."""
    path = RULES / f"{name}.yaml"
    text = re.sub(r"^statistics:.*\n(?: .*\n)*", "", path.read_text(), flags=re.MULTILINE)
    return parse(text, path.stem, path.parent)


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_a_rule_means_the_same_without_its_statistics(name: str) -> None:
    rule, plain = whole_of(rulec.load(name)), whole_of(without_statistics(name))
    assert {*rule.statistics} == {*plain.statistics, *own_names(name)} != {*plain.statistics}
    assert meaning(rule) == meaning(plain)
    assert program_text(compile(rule)) == program_text(compile(plain))


@pytest.mark.parametrize("name", by_kind(DECLARING))
def test_the_statistics_of_a_rule_are_finite_numbers(name: str) -> None:
    rule = whole_of(rulec.load(name))
    trial = Trial("float32", 3, shapes_for(rule))
    numbers = stepped(rule, trial)
    assert {key.partition("/")[0] for key in numbers} == {*rule.statistics}
    assert all(map(np.isfinite, numbers.values())), numbers


#: Rules that only call or compose those above, and the statistics that they have by this.
COMPOSED = {
    "lamb": ["trust_ratio.trust"],
    "fromage": ["trust_ratio.trust"],
    "cautious_lion": ["cautious.kept"],
    "cautious_lamb": ["cautious_adamw.cautious.kept", "trust_ratio.trust"],
    "emonavi": ["emo_drive.drive"],
    "adoptw": ["adopt.clipped"],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_rules_have_the_statistics_of_their_parts(name: str) -> None:
    rule = rulec.load(name)
    assert [*rule.statistics] == COMPOSED[name]
    assert all(map(np.isfinite, stepped(rule, Trial("float32", 2)).values()))


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        (["clip_by_global_norm", "adamw"], ["clip_by_global_norm.clip"]),
        (["cautious_decay", "lamb"], ["cautious_decay.decayed", "lamb.trust_ratio.trust"]),
        (["clip_by_value", "prodigy"], ["clip_by_value.clipped", "prodigy.d"]),
    ],
)
def test_chains_have_them_under_dotted_names(parts: list[str], names: list[str]) -> None:
    first, second = map(rulec.load, parts)
    assert [*(first >> second).statistics] == names


def test_a_wrapper_has_its_own_and_those_of_the_rule_inside() -> None:
    assert [*rulec.load("lookahead")(rulec.load("lamb")).statistics] == ["distance", "lamb.trust_ratio.trust"]


#: One matrix and one vector, both alike to all rules below.
TRIAL = Trial("float64", 4)


def by_tensor(numbers: Mapping[str, float], name: str) -> list[float]:
    return [numbers[f"{name}/tensor {i}"] for i in range(len(TRIAL.shapes))]


def last(trial: Trial) -> list[Array]:
    return [*trial.gradients()][-1]


def adam_directions(trial: Trial) -> list[Array]:
    """Adam's directions at the last step of a trial, by its formula and its defaults."""
    moments = [(np.zeros(s), np.zeros(s)) for s in trial.shapes]
    for grads in trial.gradients():
        moments = [(0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g) for (m, v), g in zip(moments, grads, strict=True)]
    t = trial.steps
    return [m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) for m, v in moments]


def test_the_clip_of_a_global_norm_is_its_factor() -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("sgd")
    numbers = stepped(rule, TRIAL, {"lr": 0.1, "max_norm": 0.5})
    norm = np.sqrt(sum((g * g).sum() for g in last(TRIAL)))
    assert numbers == {"clip_by_global_norm.clip/group 0": pytest.approx(0.5 / (norm + 1e-6), rel=1e-12)}


def test_the_kept_share_of_a_cautious_step_is_of_its_elements() -> None:
    numbers = stepped(rulec.load("cautious_adamw"), TRIAL)
    directions = adam_directions(TRIAL)
    wanted = [np.mean(d * g > 0) for d, g in zip(directions, last(TRIAL), strict=True)]
    assert by_tensor(numbers, "cautious.kept") == wanted
    assert any(0 < share < 1 for share in wanted)


def test_the_trust_of_lamb_is_a_norm_over_a_norm() -> None:
    once = Trial("float64", 1)
    numbers = stepped(rulec.load("lamb"), once, {"weight_decay": 0.1})
    for p, g, trust in zip(once.params, last(once), by_tensor(numbers, "trust_ratio.trust"), strict=True):
        direction = g / (np.abs(g) + 1e-6) + 0.1 * p
        assert trust == pytest.approx(np.linalg.norm(p) / np.linalg.norm(direction), rel=1e-12)


def test_the_distance_of_dog_is_from_the_first_parameters() -> None:
    side = EngineSide(rulec.load("dog"), TRIAL.params, {"lr": 5.0}, "numpy", "distance")
    largest, before = 0.0, TRIAL.params
    for t, grads in enumerate(TRIAL.gradients(), 1):
        apart = np.sqrt(sum(((p - q) ** 2).sum() for p, q in zip(before, TRIAL.params, strict=True)))
        start = 1e-6 * (1 + np.sqrt(sum((p * p).sum() for p in TRIAL.params)))
        largest = start if t == 1 else max(largest, apart)
        side.step(grads)
        assert side.statistics().numbers() == {"distance": pytest.approx(largest, rel=1e-9)}
        before = [each["p"].copy() for each in side.values()]
    assert largest > start


def test_the_weight_of_a_schedule_free_step_is_one_over_t() -> None:
    numbers = stepped(rulec.load("schedule_free_sgd"), TRIAL)
    assert [*numbers.values()] == pytest.approx([1 / TRIAL.steps] * len(numbers), rel=1e-12)


def test_the_distance_of_lookahead_is_that_of_the_slow_weights() -> None:
    rule = rulec.load("lookahead")(rulec.load("sgd"))
    numbers = stepped(rule, TRIAL, {"lr": 0.1, "k": 5})
    moved = [0.1 * sum(grads[i] for grads in TRIAL.gradients()) for i in range(2)]
    assert by_tensor(numbers, "distance") == pytest.approx([np.linalg.norm(x) for x in moved], rel=1e-9)
    assert by_tensor(stepped(rule, TRIAL, {"lr": 0.1, "k": 4}), "distance") == [0, 0]


def test_the_clipped_share_of_sophia_is_of_its_elements() -> None:
    once = Trial("float64", 1)
    rule = rulec.load("sophia")
    numbers = stepped(rule, once, {"gamma": 5.0})
    (inputs,) = once.inputs(rule)
    for i, (g, h) in enumerate(zip(last(once), inputs["hessian"], strict=True)):
        clipped = np.abs(0.035 * g) >= np.maximum(5.0 * 0.01 * h, 1e-12)
        assert numbers[f"clipped/tensor {i}"] == pytest.approx(np.mean(clipped), rel=1e-12)
        assert 0 < np.mean(clipped) < 1
