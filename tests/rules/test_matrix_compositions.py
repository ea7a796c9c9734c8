"""Random compositions with the rules that factor, use matrices or project: backends agree with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import rshift
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import rulec
from rulec import Rule
from rulec.errors import RuleError
from tests.rules.measure import Shapes, Trial, largest_difference
from tests.rules.runs import our_run

#: Largest relative difference: bases of eigenvectors amplify rounding by the gaps between eigenvalues.
RELATIVE = 1e-9

BEFORE = ["clip_by_global_norm", "clip_by_norm", "clip_by_value", "centralize", "normalize", "scale", "nesterov", "l2"]
AFTER = ["trust_ratio", "cautious", "clip_by_norm", "scale"]
DIRECTED = ["came", "sm3", "adam_mini", "shampoo", "soap", "apollo", "apollo_mini", "galore", "orthogonalize"]
#: What assigns p, for some tensors at least, can only be last.
LAST = ["adafactor", "adafactor_paper", "muon", "normuon"]

#: Flattened, all matrices are square: bases of what has less than full rank are not unique.
SHAPES: Shapes = ((5,), (), (5, 5), (4, 2, 2), (6, 3, 1, 2))


def part(name: str, number: int) -> Rule:
    """A rule of the library whose hyper-parameters, but for the learning rate, are its own."""
    rule = rulec.load(f"transforms/{name}" if f"transforms/{name}" in rulec.rules() else name)
    return rule.bind(**{key: f"{key}_{number}" for key in rule.all_hyper if key != "lr"})


@st.composite
def compositions(draw: Any) -> Rule:
    """Transforms before a rule, at times one after it, weight decay beside it, and a wrapper around it all."""
    rule = draw(st.sampled_from([*DIRECTED, *LAST]))
    names = [*draw(st.lists(st.sampled_from(BEFORE), min_size=1, max_size=2)), rule]
    ended = rule in LAST
    names += [] if ended else draw(st.lists(st.sampled_from(AFTER), max_size=1))
    composed = _chained(names)
    if not ended and draw(st.booleans()):
        composed = composed + part("decay", 9)
    return rulec.load("lookahead")(composed) if draw(st.booleans()) else composed


def _chained(names: Sequence[str]) -> Rule:
    try:
        return reduce(rshift, [part(name, i) for i, name in enumerate(names)])
    except RuleError as error:
        # Rows of one part would be columns of another: refused, and not what is tested here.
        assume("a rule sees tensors in one way" not in error.message)
        raise


def difference(rule: Rule, backend: str) -> float:
    """How far a backend and the reference are apart after some steps."""
    trial = Trial("float64", steps=7, shapes=SHAPES)
    hyper = {"lr": 0.02}
    ours = our_run(rule, trial.params, hyper, backend)
    return largest_difference(ours, our_run(rule, trial.params, hyper, "reference"), trial, hyper).relative


@given(compositions())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_numpy(rule: Rule) -> None:
    assert difference(rule, "numpy") <= RELATIVE


@pytest.mark.slow
@given(compositions())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_numpy_on_many(rule: Rule) -> None:
    assert difference(rule, "numpy") <= RELATIVE


@pytest.mark.parametrize(
    "names",
    [
        ("nesterov", "soap", "trust_ratio"),
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (("clip_by_global_norm", "adafactor"), ("l2", "galore", "cautious"), ("clip_by_norm", "muon"))
        ),
    ],
    ids=" >> ".join,
)
def test_cpu(names: tuple[str, ...]) -> None:
    rule = _chained(names)
    assert difference(rulec.load("lookahead")(rule) if "muon" in names else rule, "cpu") <= RELATIVE
