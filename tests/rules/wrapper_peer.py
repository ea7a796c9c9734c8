"""One row of the comparisons of wrappers: a composition of ours beside an implementation that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import rulec
from tests.rules.measure import ALL_DIMENSIONS, Shapes
from tests.rules.runs import Array, Hyper, OracleRun, Run

Start = Callable[[Sequence[Array], Hyper], Run]


@dataclass(frozen=True)
class WrapperPeer:
    """One row: a composition of ours, and who else computes it.

    `state` names what is compared, where it is not the parameter: an average that the rule keeps. `shapes` are those
    that theirs treats as ours does. `note` says what the row changes in theirs, and which shapes it leaves out.
    `called` makes theirs as its users call it.
    """

    composed: str
    theirs: str
    hyper: Hyper
    start: Start
    state: str = ""
    shapes: Shapes = ALL_DIMENSIONS
    note: str = ""
    called: Start | None = None

    def ours(self, params: Sequence[Array]) -> Run:
        """Our side, by the reference in float64."""
        return StateRun(rulec.load(self.composed), params, self.state)

    def __str__(self) -> str:
        return f"{self.composed} = {self.theirs}"


class StateRun(OracleRun):
    """A rule of ours by the reference, of which a state may be compared in place of the parameter."""

    def __init__(self, rule: rulec.Rule, params: Sequence[Array], state: str) -> None:
        super().__init__(rule, params, "float64")
        self.compared = state

    def params(self) -> list[Array]:
        if not self.compared:
            return super().params()
        return [self.optimizer.state(i)[self.compared] for i in range(len(self.optimizer.params))]
