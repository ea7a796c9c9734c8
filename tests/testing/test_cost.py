"""The suite does interval arithmetic only where numbers are not those of operations rounded as IEEE 754 says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.language.expr.node import Op
from rulec.testing import IEEE, NumpyKind, bounds
from rulec.testing.bounds import Bounds
from rulec.testing.cases import staged_rules
from rulec.testing.conformance import check_neighbours, check_operations, check_rule, check_stages
from rulec.testing.interval import apply
from rulec.testing.trial import Subject
from rulec_backends.numpy import NumpyBackend
from tests.testing import broken

#: What the suite does with one rule, one of them with functions that are not exact.
CHECKS: dict[str, Callable[[Subject], None]] = {
    "elementwise": lambda subject: check_rule(subject, rulec.load("adamw"), "bfloat16"),
    "functions": lambda subject: check_rule(subject, rulec.load("madgrad"), "float32"),
    "stages": lambda subject: check_stages(subject, staged_rules()[0], ["float32", "bfloat16"]),
    "neighbours": lambda subject: check_neighbours(subject, staged_rules()[0], "float32"),
    "operations": lambda subject: check_operations(subject, "float32"),
}


def interval_operations(check: Callable[[Subject], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many elements the suite computes with intervals, operation by operation."""
    done = 0

    def counted(op: Op, operands: Sequence[Any]) -> Any:
        nonlocal done
        result = apply(op, operands)
        done += int(np.size(result.nan if hasattr(result, "nan") else result.true))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(bounds, "apply", counted)
        check(Subject(NumpyBackend(), NumpyKind(), IEEE))
    return done


@pytest.mark.parametrize("name", CHECKS)
def test_few_numbers_need_intervals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = interval_operations(CHECKS[name], monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("rulec.testing.judge.Judge.is_rounded", lambda *_: False)
        before = interval_operations(CHECKS[name], monkeypatch)
    assert now == before if name == "functions" else 2 * now <= before


def test_what_is_rounded_lies_in_the_bounds() -> None:
    """The shortcut is no wider than what it spares: over ordinary and special numbers, of whole rules."""
    random = np.random.default_rng(0)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38, 3e38, 1e-20, 1e20])
    for name in ("adamw", "rmsprop_centered", "yogi", "adabelief", "rprop", "lion"):
        program = rulec.compile(rulec.load(name))
        judge = Bounds(program, "float32", IEEE)
        assert judge.is_rounded
        names = [b.name for b in program.buffers if b.role in ("param", "grad", "state")]
        drawn = np.where(random.random((len(names), 5000)) < 0.2, random.choice(special, (len(names), 5000)),
                         random.standard_normal((len(names), 5000)))  # fmt: skip
        loads = {key: x.astype(np.float32).astype(np.float64) for key, x in zip(names, drawn, strict=True)}
        given = bounds.StageInputs(loads, random.uniform(0.01, 1, (5000, len(program.scalars.columns))))
        with np.errstate(all="ignore"):
            rounded, _ = judge.rounded(given)
            ranges, _ = judge.ranges(given)
        for buffer, x in rounded.items():
            inside = (ranges[buffer].low <= x) & (x <= ranges[buffer].high)
            assert np.where(np.isnan(x), ranges[buffer].nan, inside).all(), (name, buffer)


def test_a_fault_in_one_number_is_still_named() -> None:
    with pytest.raises(AssertionError, match=r"became .* where the reference has .* allowed is"):
        check_rule(Subject(broken.WrongSign(), NumpyKind(), IEEE), rulec.load("sgd"), "float32")
