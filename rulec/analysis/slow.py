"""States that move by small parts of themselves: sums without decay, and slow means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Kind, Node, Op, const, name, node, walk

#: Format -> its largest spacing in parts of a value: of bfloat16 between numbers, of block formats below the maximum.
SPACING: Mapping[str, float] = {
    "bfloat16": 2.0**-7, "float16": 2.0**-10, "int8": 1 / 127, "softsign8": 2 / 127, "dynamic8": 0.9 / 64,
    "float8_e4m3": 2.0**-3, "float8_e5m2": 2.0**-2, "dynamic4": 0.9 / 4,
}  # fmt: skip

#: The step to look at: decays that change with `t` are then those of a long run. It is prime, so that what a rule does
#: every so many steps is not done in it.
LATE = 10_007.0

_ZERO, _ONE = const(0), const(1)
_STEADY = (Op.SIGN, Op.FLOOR, Op.ISFINITE)


@dataclass(frozen=True)
class Pace:
    """The part of a state's old value in its new one. `adds` is true for a sum of the old value and others."""

    kept: float
    adds: bool

    def too_slow(self, unsigned: bool) -> tuple[str, ...]:
        """The formats in which changes are below half of the spacing."""
        if self.kept == 1:
            return tuple(SPACING) if self.adds else ()
        # Without a sign a map has twice the codes.
        halves = ("dynamic8", "dynamic4") if unsigned else ()
        return tuple(key for key, size in SPACING.items() if 1 - self.kept < size / (4 if key in halves else 2))


def pace(key: str, value: Node, hyper: Mapping[str, float]) -> Pace | None:
    """The pace of a state with the new value `value`, by these hyper-parameters; None where it depends on more."""
    paces = [_arm(key, arm, hyper) for arm in _arms(key, value, hyper)]
    if not paces or None in paces:
        return None
    return min((p for p in paces if p is not None), key=lambda p: p.kept)


def _arm(key: str, value: Node, hyper: Mapping[str, float]) -> Pace | None:
    part = weight(value, key)
    kept = None if part is None else number_known(part, {**hyper, "t": LATE})
    return Pace(kept, value.op in (Op.ADD, Op.SUB)) if kept is not None and 0 <= kept <= 1 else None


def _arms(key: str, value: Node, hyper: Mapping[str, float]) -> list[Node]:
    """The values of a choice, without arms for the first steps alone, and without an arm of the unchanged state."""
    arms: dict[Node, None] = {value: None}
    for part in (waiting := [value]):
        if part.op is not Op.WHERE:
            continue
        condition, *both = part.args
        truths = [number_known(condition, {**hyper, "t": t}) for t in (LATE, LATE + 1)]
        if truths[0] is not None and truths[0] == truths[1]:
            both = [both[0] if truths[0] else both[1]]
        new = [arm for arm in dict.fromkeys(both) if arm is not name(key) and arm not in arms]
        arms |= dict.fromkeys(new)
        waiting += new
    return [arm for arm in arms if arm.op is not Op.WHERE]


def weight(value: Node, key: str) -> Node | None:
    """The factor of a name in a value that is a sum of a multiple of it and others; None where it is no such sum.

    Signs, comparisons and the choice of the larger of two are read as they are near a value: as constants, and as the
    value chosen.
    """
    weights: dict[Node, Node | None] = {}
    for part in walk([value]):
        weights[part] = _ONE if part is name(key) else _weight(part, [weights[a] for a in part.args])
    return weights[value]


def _weight(value: Node, weights: list[Node | None]) -> Node | None:
    op, args = value.op, value.args
    if op in _STEADY or op.kind in (Kind.COMPARE, Kind.LOGIC) or all(w is _ZERO for w in weights):
        return _ZERO
    known = [w for w in weights if w is not None]
    if op in (Op.ADD, Op.SUB) and len(known) == 1 and weights[0] is not None:
        # A decay beside a term that is no multiple: `rho*u` in `rho*u + f(u)`.
        return None if weights[0] is _ZERO else weights[0]
    if len(known) < len(weights):
        return None
    if op in (Op.ADD, Op.SUB):
        return _slow_sum(op, *known)
    if op is Op.MUL and _ZERO in known:
        return _times(*((args[0], known[1]) if known[0] is _ZERO else (args[1], known[0])))
    if op is Op.DIV and known[1] is _ZERO:
        return node(Op.DIV, known[0], args[1])
    if op is Op.WHERE and known[0] is _ZERO:
        return known[1] if known[1] is known[2] else node(Op.WHERE, args[0], known[1], known[2])
    if op in (Op.MAXIMUM, Op.MINIMUM) and _ZERO in known:
        return known[1] if known[0] is _ZERO else known[0]
    return node(Op.NEG, known[0]) if op is Op.NEG else None


def _slow_sum(op: Op, left: Node, right: Node) -> Node:
    if right is _ZERO:
        return left
    return node(op, left, right) if left is not _ZERO or op is Op.SUB else right


def _times(factor: Node, part: Node) -> Node:
    return factor if part is _ONE else node(Op.MUL, factor, part)
