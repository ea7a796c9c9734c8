"""torch keeps the scalars it counts per tensor in float32: with its rounded scalars, our rule gives its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import rulec
from rulec.language import rule_data as language
from tests.rules.measure import Trial, largest_difference
from tests.rules.peers import PEERS
from tests.rules.runs import Array, Hyper, OurRun, TorchRun

pytestmark = pytest.mark.peer


class GivenScalars:
    """Our rule with one of its states read from torch's optimizer, as `theirs` has stored it, at every step.

    `late` is for a state that a step uses before it changes it: then the value stored by the step before counts.
    """

    def __init__(self, rule: rulec.Rule, name: str, theirs: TorchRun, params: Sequence[Array], late: bool) -> None:
        rule = replace(
            rule,
            hyper={**rule.hyper, name: language.Hyper(1.0)},
            state={key: state for key, state in rule.state.items() if key != name},
            step=tuple(line for line in rule.step if not (isinstance(line, language.Assign) and line.target == name)),
        )
        self.name, self.theirs, self.late = name, theirs, late
        self.stored: float | None = None
        self.run = OurRun(rule, params, {}, "numpy")

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One step; `theirs` has already taken it."""
        before, self.stored = self.stored, float(self.theirs.state(0)[self.name])
        first = float(np.float32(hyper["lr"]))
        value = (first if before is None else before) if self.late else self.stored
        self.run.step(grads, {**hyper, self.name: value})

    def params(self) -> list[Array]:
        return self.run.params()


@pytest.mark.parametrize(("rule", "name", "late"), [("nadam", "mu_product", False), ("asgd", "eta", True)])
def test_rounding_of_torch_reproduced(rule: str, name: str, late: bool) -> None:
    peer = next(peer for peer in PEERS if peer.rule == rule)
    trial = Trial("float64")
    theirs = peer.start(trial.params, peer.hyper, shipped=True)
    assert isinstance(theirs, TorchRun)
    ours = GivenScalars(peer.ours(), name, theirs, trial.params, late)
    # The side named first steps first.
    assert largest_difference(theirs, ours, trial, peer.hyper).relative <= 1e-12
