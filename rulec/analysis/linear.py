"""Linearity of values in the gradient of this step, with everything else held fixed.

States that change by small parts of themselves are recognised too: sums without decay, and slow means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.formats.format import SPECS
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Kind, Node, Op, const, name, node, walk
from rulec.language.expr.ops import having

G = name("g")

#: Operations of one operand that are linear in it.
_LINEAR = (Op.NEG, Op.SUM, Op.MEAN, Op.TRANSPOSE)


@dataclass(frozen=True)
class Form:
    """A value as a function of `g`: its value at `g = 0` plus `part`, where it is affine.

    `part` is linear and homogeneous in `g`, and None where the value is free of `g`. `homogeneous` is true where the
    value at `g = 0` is 0. `broken` is the first operation that is not linear, and None for an affine value.
    """

    part: Node | None = None
    homogeneous: bool = False
    broken: Node | None = None

    @property
    def free(self) -> bool:
        """Whether the value does not depend on `g`."""
        return self.part is None and self.broken is None


class LinearForms:
    """Computes the forms of values, each value once."""

    def __init__(self) -> None:
        self.known: dict[Node, Form] = {G: Form(G, homogeneous=True)}

    def form(self, value: Node) -> Form:
        """The form of `value`."""
        for part in walk([value], self.known):
            self.known[part] = self._form(part, [self.known[a] for a in part.args])
        return self.known[value]

    def _form(self, value: Node, args: list[Form]) -> Form:
        broken = next((a.broken for a in args if a.broken is not None), None)
        if broken is not None:
            return Form(broken=broken)
        if all(a.free for a in args):
            return Form(homogeneous=value.op is Op.CONST and value.arg == 0)
        if value.op in (Op.ADD, Op.SUB):
            return _sum(value, args[0], args[1])
        if value.op in _LINEAR:
            return Form(node(value.op, args[0].part, *value.args[1:], value.arg), args[0].homogeneous)
        if value.op in (Op.MUL, Op.MATMUL, Op.MODE_PRODUCT) and any(a.free for a in args[:2]):
            return _product(value, args[0], args[1])
        if value.op is Op.DIV and args[1].free:
            return Form(node(Op.DIV, args[0].part, value.args[1]), args[0].homogeneous)
        if value.op is Op.WHERE and args[0].free:
            arms = [a.part or const(0) for a in args[1:]]
            return Form(node(Op.WHERE, value.args[0], *arms), args[1].homogeneous and args[2].homogeneous)
        return Form(broken=value)


def _sum(value: Node, left: Form, right: Form) -> Form:
    homogeneous = left.homogeneous and right.homogeneous
    if right.part is None:
        return Form(left.part, homogeneous)
    if left.part is None:
        return Form(right.part if value.op is Op.ADD else node(Op.NEG, right.part), homogeneous)
    return Form(node(value.op, left.part, right.part), homogeneous)


def _product(value: Node, left: Form, right: Form) -> Form:
    first, second, *axis = value.args
    parts = [form.part or operand for form, operand in ((left, first), (right, second))]
    return Form(node(value.op, *parts, *axis), left.homogeneous or right.homogeneous)


#: Format -> its largest spacing in parts of a value: of bfloat16 between numbers, of block formats below the maximum.
SPACING: Mapping[str, float] = {
    "bfloat16": 2.0**-7, "float16": 2.0**-10, **{name: spec.spacing for name, spec in SPECS.items()}
}  # fmt: skip

#: The step to look at: decays that change with `t` are then those of a long run. It is prime, so that what a rule does
#: every so many steps is not done in it.
LATE = 10_007.0

_ZERO, _ONE = const(0), const(1)
_STEADY = having("is_flat")


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
        halves = [name for name, spec in SPECS.items() if unsigned and spec.coding[1] == "thresholds"]
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
