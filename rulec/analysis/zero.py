"""The effects of a gradient of zeros: constant values, shrinking values, and divisions of 0 by 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rulec.analysis.flow import Flow, Line
from rulec.analysis.fold import NAN, NIL, Fold
from rulec.analysis.regions import ALL, Regions, RegionsOf, range_of
from rulec.language.expr.node import Node, Op, const, name, walk

#: The regions of names, and the conditions on hyper-parameters under which they hold.
Assumed = tuple[Mapping[str, Regions], tuple[str, ...]]

What = Literal["stays", "shrinks", "changes", "NaN", "unknown"]

_EPS = re.compile(r"eps\d*")
#: A count of steps, or of elements.
_COUNT = frozenset("1+")


@dataclass(frozen=True)
class Rest:
    """The effect on one value.

    `stays`, `shrinks` (by a factor from 0 to 1) and `NaN` are proved under the conditions in `where`; `changes` was
    seen in numbers. `by` are the states and inputs in the change, and `p`: alone it is decay. `line` is the line that
    computes the value, or makes it NaN.
    """

    what: What
    where: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    line: Line | None = None

    def __str__(self) -> str:
        text: str = self.what
        if self.what in ("changes", "unknown") and self.by:
            text += f" with {', '.join(self.by)}"
        text += f" where {' and '.join(self.where)}" if self.where else ""
        return f"{text}: {self.line}" if self.what == "NaN" and self.line else text


@dataclass(frozen=True)
class AtZero:
    """The effects of a zero gradient on `p` and on every state, in a first step and in a later one.

    Values are finite before the step. For each value the general case comes first, then cases of a hyper-parameter
    at 0.
    """

    first: Mapping[str, tuple[Rest, ...]]
    later: Mapping[str, tuple[Rest, ...]]


#: Whether a value was seen to change: its name, and whether in the first step.
Seen = Callable[[str, bool], bool]


def at_zero(flow: Flow, seen: Seen) -> AtZero:
    """The effects of a zero gradient, by proof; a change without a proof is `unknown` unless it was `seen`."""
    small = [key for key, hyper in flow.rule.hyper.items() if _EPS.fullmatch(key) and "0" in range_of(hyper)]
    assumed: list[Assumed] = [(invariants(flow, ()), ())]
    if small:
        assumed.append((invariants(flow, small), tuple(f"{key} > 0" for key in small)))
    phases: list[dict[str, tuple[Rest, ...]]] = []
    for first in (True, False):
        cases = {key: _cases(_Case(flow, key, first, assumed)) for key in ("p", *flow.rule.state)}
        phases.append({
            key: tuple(replace(x, what="unknown") if x.what == "changes" and not seen(key, first) else x for x in rests)
            for key, rests in cases.items()
        })  # fmt: skip
    return AtZero(*phases)


@dataclass(frozen=True)
class _Case:
    """One question: the effect on `key`. `assumed` are the regions of names, each with its conditions."""

    flow: Flow
    key: str
    first: bool
    assumed: Sequence[Assumed]


def _cases(case: _Case) -> tuple[Rest, ...]:
    rest, used = _rest(case, ())
    settled = rest.what != "changes"
    tried = [condition.removesuffix(" > 0") for condition in rest.where] if settled else used
    others = [_rest(case, (x,))[0] for x in tried if _may_be_zero(case.flow, x)]
    return (rest, *(x for x in others if x.what == "NaN" or (x.what == "stays" and not settled)))


def _rest(case: _Case, zero: tuple[str, ...]) -> tuple[Rest, list[str]]:
    """The effect on the value with the hyper-parameters `zero` at 0, and the names in its change."""
    refused = {f"{key} > 0" for key in zero}
    outcomes = [_folded(case, zero, names, holds) for names, holds in case.assumed if not refused.intersection(holds)]
    return next((x for x in outcomes if x[0].what != "changes"), outcomes[0])


def _may_be_zero(flow: Flow, key: str) -> bool:
    hyper = flow.rule.hyper.get(key)
    return hyper is not None and key != "lr" and "0" in range_of(hyper)


def _folded(
    case: _Case, zero: tuple[str, ...], regions: Mapping[str, Regions], assumed: tuple[str, ...]
) -> tuple[Rest, list[str]]:
    flow, key = case.flow, case.key
    known: dict[str, Node] = {"g": NIL, **({"t": const(1)} if case.first else {}), **dict.fromkeys(zero, NIL)}
    fold = Fold(known, regions if case.first else {**regions, "t": frozenset("+")}, flow.rule.hyper)
    if case.first:
        fold.known |= {name(x): fold.fold(state.init) for x, state in flow.rule.state.items()}
    new, old = fold.fold(flow.new[key]), fold.fold(name(key))
    where = (*(f"{x} = 0" for x in zero), *dict.fromkeys((*assumed, *fold.conditions)))
    line = flow.assigned.get(key)
    if new is NAN:
        return Rest("NaN", where, (), flow.line(fold.nan) if fold.nan else line), []
    if new is old:
        return Rest("stays", where, (), line), []
    if _shrinks(new, name(key), fold):
        return Rest("shrinks", where, (), line), []
    added = new.args[1] if new.op in (Op.ADD, Op.SUB) and new.args[0] is old else new
    used = list(dict.fromkeys(str(n.arg) for n in walk([added]) if n.op is Op.NAME))
    by = tuple(x for x in used if x == "p" or x in flow.rule.state or x in flow.rule.inputs)
    return Rest("changes", tuple(f"{x} = 0" for x in zero), by, line), used


def _shrinks(new: Node, old: Node, fold: Fold) -> bool:
    if new is NIL:
        return True
    if new.op is not Op.MUL or old not in new.args:
        return False
    factor = new.args[0] if new.args[1] is old else new.args[1]
    return (fold.regions.of(factor) or ALL) <= {"0", "f", "1"}


def invariants(flow: Flow, positive: Sequence[str]) -> dict[str, Regions]:
    """The regions of every name in any step, while all is finite: states by induction from their first values.

    The hyper-parameters in `positive` are assumed other than 0.
    """
    rule = flow.rule
    names = {key: range_of(hyper) - ({"0"} if key in positive else set()) for key, hyper in rule.hyper.items()}
    names |= {"t": _COUNT, "rows": _COUNT, "cols": _COUNT, "numel": _COUNT, "ndim": frozenset("01+")}
    names |= {"machine_eps": frozenset("f")}
    first = RegionsOf(names)
    names |= {key: first.of(state.init) or ALL for key, state in rule.state.items()}
    while True:
        regions = RegionsOf(names)
        wider = {key: names[key] | (regions.of(flow.new[key]) or ALL) for key in rule.state}
        if all(names[key] == wider[key] for key in wider):
            return names
        names.update(wider)
