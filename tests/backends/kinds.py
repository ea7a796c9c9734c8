"""Rules that stand for the library where a backend is tested: one of each kind of program that a rule can become.

Every backend runs these every day; the others are among the slow tests, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.layout import layout_for
from rulec.language.rule import Rule
from rulec.testing.cases import SPECIAL, hostile_rules, loaded, operation_rules, staged_rules
from rulec.testing.conformance import Report, check_rule, contract
from rulec.testing.trial import Subject, Trial

#: One stage: few buffers and many, signs, choices, roots, states that are numbers, a parameter of its own.
ELEMENTWISE = ("sgd", "adamw", "lion", "adan", "rprop", "madgrad", "nadam", "schedule_free_adamw")

#: Several: norms, means of truth, rows and columns, greatest numbers, matrices, projections, states of the model,
#: branches that are decided before a step and in one.
STAGED = (
    "lamb", "cautious_adamw", "adafactor", "sm3", "muon", "adamp", "prodigy", "transforms/lookahead",
    "transforms/skip_not_finite",
)  # fmt: skip

#: Of the suite: values that another store overwrites, names a source may use for itself, steps that store nothing,
#: every reduction, views, inputs, states that are read before they are written.
AWKWARD = ("Exchange", "Names", "Sometimes", "Nothing", "Words", "Tensors", "Rows1", "Matrices0", "Last2", "Seldom")

#: Rules of the suite of which `AWKWARD` has another view.
VIEWS = ("Rows0", "Rows2", "Matrices1", "Matrices2", "Last0", "Last1")

KINDS = (*ELEMENTWISE, *STAGED)

#: One for each way of cutting tensors: elements, reductions of tensors, and lines of matrices.
CUTS = ("adamw", "lamb", "adafactor")

#: What else there is between stages: every matrix function, random numbers, powers and logarithms of scalars.
BETWEEN = ("soap", "apollo_mini", "galore", "shampoo", "ademamix", "transforms/adaptive_clip")

#: A rule file with sines and cosines in its scalar program.
WAVES = str(Path(__file__).with_name("waves.yaml"))


def every_operation() -> Rule:
    """A rule with a state for each elementwise operation of `g` and `p`: all of them in one kernel.

    A choice by a comparison is one of two numbers, so that it shows where `g` and `p` are the same.
    """
    names = [rule.name for rule in operation_rules() if "t ==" not in rule.name and "t >" not in rule.name]
    expressions = [name.replace(", g, p)", ", 1, 2)") for name in names]
    states = ", ".join(f"s{i}: 0" for i in range(len(expressions)))
    lines = [f"s{i} = where(s{i} == 0, {expression}, 0)" for i, expression in enumerate(expressions)]
    step = "".join(f"  {line}\n" for line in [*lines, "p = p"])
    return rulec.parse(f"name: Every\nstate: {{{states}}}\nstep: |\n{step}")


def check_every_operation(subject: Subject, dtype: str = "float32") -> None:
    """Steps of that rule with all pairs of special values."""
    rule = every_operation()
    program = rulec.compile(rule)
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype).astype(np.float64)
        g, p = (x.reshape(-1) for x in np.meshgrid(values, values))
        Trial(subject, rule, program, layout_for(program, dtype), [p], [{}]).step({0: g})


def check_extremes(subject: Subject) -> None:
    """Greatest numbers that are all negative, and least ones that are all positive, of tensors, rows and columns."""
    lines = 'a = -abs(g) - 1\n  b = abs(g) + 1\n  c = max(a, per="row") + min(b, per="col")'
    rule = rulec.parse(f"name: Extremes\nstep: |\n  {lines}\n  direction = g + c + max(a) + min(b)\n")
    check_rule(subject, rule, "float32", [(), (3, 4)])


def pieces(*dtypes: str, everyday: Sequence[str] = (*CUTS, *AWKWARD)) -> list[Any]:
    """Names of the pieces of a backend's contract, as parameters of a slow test.

    Operations, other views, and the rules that tests of every day run in one dtype or another, are `another`.
    """
    repeated = {*everyday, *VIEWS, *(f"operations in {dtype}" for dtype in dtypes)}
    return [
        pytest.param(piece.name, marks=pytest.mark.another if piece.name in repeated else pytest.mark.slow)
        for piece in contract(CUTS, dtypes)
    ]


def check_piece(subject: Subject, name: str, *dtypes: str) -> None:
    """A piece of the contract for one rule for each way of cutting tensors, that a backend meets in every point."""
    (piece,) = (piece for piece in contract(CUTS, dtypes) if piece.name == name)
    report = Report(subject.backend.name)
    piece.check(subject, report)
    assert (report.refused, report.unmet, report.stages) == ([], [], True)


def rule_of(name: str) -> Rule:
    """A rule of the library, or one of the suite's own."""
    return loaded(name) if name in rulec.rules() else _suite().get(name) or loaded(name)


def suite_names() -> list[str]:
    """The rules of the suite, each operation among them."""
    return [*_suite()]


@cache
def _suite() -> dict[str, Rule]:
    return {rule.name: rule for rule in (*hostile_rules(), *operation_rules(), *staged_rules())}
