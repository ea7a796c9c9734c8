"""Scale invariance: whether a rule's steps change when gradients are multiplied by positive numbers.

This is a calculus of degrees. A run with scaled gradients is compared with a run without. A value has a degree where
its scaled form is its plain form times a product of powers of unknown positive scales. The calculus answers two
questions:

- All gradients are scaled alike: there is one scale, `c`; a state of degree k is `c**k` times as large.
- Each step's gradient is scaled by another number: `c` is the scale of this step, and every state has a scale of its
  own, from the steps before. Rprop keeps `g` itself, but reads its sign alone.

If a sum has a term of another degree, and a hyper-parameter that may be 0, such as `eps`, is a factor of this term,
the answer is for a value of 0.

Guarded divisions are recognised: in `x/where(n > 0, n, 1)` with `n = norm(x)`, `x` is 0 where the guard acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from rulec.analysis.flow import Fact, Flow, Line
from rulec.analysis.regions import ZERO, range_of
from rulec.language.expr.node import Kind, Node, Op, const, name, node, rewrite, walk
from rulec.language.expr.ops import SPECS, having
from rulec.language.expr.static import UNDIVIDED, inside, settings

#: The scale of this step's gradient.
GRADIENT = "c"

#: newton_schulz divides by the norm, or by 1e-7 where the norm is less.
NORM_FLOOR = "no matrix given to newton_schulz has a norm below 1e-7"

_PARTS = (Op.DIAG, Op.TRIU, Op.TRIL, Op.SLICE)
#: Operation -> the power of a positive factor of its operands in its result.
_DEGREES: Mapping[Op, Fraction] = {**having("degree"), Op.CHOLESKY: Fraction(1, 2)}
_SAME = (
    *(op for op, degree in _DEGREES.items() if degree == 1 and SPECS[op].arity == 1),
    Op.SUM, Op.MEAN, Op.NORM, Op.RMS, Op.MIN, Op.MAX, Op.TRANSPOSE, Op.SORT, *_PARTS,
)  # fmt: skip
_ROOTS = {op: degree for op, degree in _DEGREES.items() if degree.denominator > 1}
_ALIKE = (*(op for op, degree in _DEGREES.items() if degree == 1 and op not in _SAME), Op.CONCAT)
_UNSCALED = (Op.SIGN, Op.ISFINITE, Op.COUNT_NONZERO, Op.NOT, Op.AND, Op.OR, Op.EYE, Op.INDEX, Op.ARGSORT)
_PRODUCTS = (Op.MUL, Op.MATMUL, Op.MODE_PRODUCT)
_DIRECTIONS = (Op.NEWTON_SCHULZ, Op.QR, Op.EIGH, Op.SINGULAR_VECTORS)


@dataclass(frozen=True)
class Degree:
    """The powers of each scale in a value; `any` for 0, infinity and NaN, which have every degree."""

    powers: tuple[tuple[str, Fraction], ...] = ()
    any: bool = False

    def times(self, other: Degree, power: Fraction = Fraction(1)) -> Degree:
        """The degree of a product with a power of the other value."""
        if self.any or other.any:
            return ANY
        total = dict(self.powers)
        for scale, k in other.powers:
            total[scale] = total.get(scale, Fraction(0)) + k * power
        return Degree(tuple(sorted((s, k) for s, k in total.items() if k)))

    def agrees(self, other: Degree) -> bool:
        """Whether values of the two degrees can be added."""
        return self.any or other.any or self == other


NONE, ANY = Degree(), Degree(any=True)


class Broken(Exception):
    """A value without a degree. `value` is the first part without one; `zero` is a hyper-parameter to try at 0."""

    def __init__(self, value: Node, zero: str | None = None) -> None:
        super().__init__()
        self.value, self.zero = value, zero


class Degrees:
    """The degrees of values, given those of states; hyper-parameters in `zero` are 0."""

    def __init__(self, flow: Flow, states: Mapping[str, Degree], zero: Sequence[str]) -> None:
        self.flow, self.states, self.zero = flow, states, zero
        leaves = {name(key): degree for key, degree in states.items()}
        self.known: dict[Node, Degree] = {**leaves, name("g"): Degree(((GRADIENT, Fraction(1)),))}
        self.known |= {name(key): ANY for key in zero}
        self.conditions: dict[str, None] = {}
        #: The degrees where some values are 0: those that a guard tests.
        self.guarded: dict[tuple[Node, ...], Degrees] = {}
        self.vanishing: dict[Node, str | None] = {}

    def degree(self, value: Node) -> Degree:
        """The degree of `value`; Broken for a value without one."""
        for part in walk([value], self.known):
            self.known[part] = self._degree(part, [self.known[a] for a in part.args])
        return self.known[value]

    def kept(self, key: str, old: Degree) -> Degree:
        """The degree of a state before and after the step; Broken where the two differ."""
        new = self.degree(self.flow.new[key])
        if not new.agrees(old):
            raise Broken(self.flow.new[key], self._vanishes(name(key)))
        return new if old.any else old

    def _degree(self, value: Node, args: list[Degree]) -> Degree:
        value = inside(value)
        op = value.op
        if op is Op.CONST:
            number = cast(float, value.arg)
            return ANY if number == 0 or number - number != 0 else NONE
        if op is Op.NEWTON_SCHULZ and args[0] != NONE:
            if settings(value).get("normalize") == UNDIVIDED:
                return self._power(value, args)
            self.conditions[NORM_FLOOR] = None
        if op in _SAME or (op in (Op.QUANTILE, Op.TAKE) and args[1] == NONE):
            return args[0]
        if op in _UNSCALED or op in _DIRECTIONS:
            return NONE
        if op in _ALIKE:
            return self._alike(value, *args)
        if op.kind is Kind.COMPARE or op is Op.FLOORDIV:
            self._alike(value, *args)
            return NONE
        if op in _PRODUCTS:
            return args[0].times(args[1])
        if op is Op.GRAM:
            return args[0].times(args[0])
        if op is Op.DIV:
            return args[0].times(args[1], Fraction(-1))
        if op is Op.SOLVE:
            return args[1].times(args[0], Fraction(-1))
        if op is Op.WHERE:
            return self._where(value, args)
        return self._power(value, args)

    def _where(self, value: Node, args: list[Degree]) -> Degree:
        try:
            return self._alike(value, *args[1:])
        except Broken:
            zero = zero_unless(value)
            if not zero:
                raise
        if zero not in self.guarded:
            self.guarded[zero] = guarded = Degrees(self.flow, self.states, self.zero)
            guarded.known |= dict.fromkeys(zero, ANY)
            guarded.guarded, guarded.vanishing = self.guarded, self.vanishing
        return self._alike(value, args[1], self.guarded[zero].degree(value.args[2]))

    def _power(self, value: Node, args: list[Degree]) -> Degree:
        if value.op in _ROOTS:
            return _power(args[0], _ROOTS[value.op])
        if value.op is Op.POW and value.args[1].op is Op.CONST:
            return _power(args[0], _exponent(value))
        if all(a.any or a == NONE for a in args):
            return NONE
        if value.op is Op.INVERSE_ROOT and value.args[1].op is Op.CONST and cast(float, value.args[1].arg):
            if len(args) == 3:
                self._alike(value, args[0], args[2])
            return _power(args[0], -1 / _exponent(value))
        raise Broken(value)

    def _alike(self, value: Node, left: Degree, right: Degree) -> Degree:
        if not left.agrees(right):
            operands = value.args[-2:] if value.op is not Op.INVERSE_ROOT else (value.args[0], value.args[2])
            for degree, operand in zip((left, right), operands, strict=True):
                if degree == NONE and (key := self._vanishes(operand)):
                    raise Broken(value, key)
            raise Broken(value)
        return right if left.any else left

    def _vanishes(self, value: Node) -> str | None:
        """A hyper-parameter with 0 in its range that makes this value 0 before the first step; None without one."""
        starts = {name(key): state.init for key, state in self.flow.rule.state.items()}
        for part in walk([*starts.values(), value], self.vanishing):
            self.vanishing[part] = self._vanishing(part, starts)
        return self.vanishing[value]

    def _vanishing(self, value: Node, starts: Mapping[Node, Node]) -> str | None:
        """The hyper-parameter of `_vanishes`, for a value whose operands have theirs; `starts` has states at first."""
        if value in starts:
            return self.vanishing.get(starts[value])
        if value.op is Op.NAME:
            hyper = self.flow.rule.hyper.get(str(value.arg))
            free = hyper is not None and value.arg != "lr" and not hyper.static and ZERO in range_of(hyper)
            return str(value.arg) if free else None
        args = [self.vanishing[a] for a in value.args]
        if value.op in _PRODUCTS:
            return args[0] or args[1]
        if value.op is Op.POW and value.args[1].op is Op.CONST and cast(float, value.args[1].arg) > 0:
            return args[0]
        if value.op in (Op.DIV, Op.GRAM) or (value.op in (*_SAME, *_ROOTS) and value.op is not Op.RSQRT):
            return args[0]
        return None


def _exponent(value: Node) -> Fraction:
    number = cast(float, value.args[1].arg)
    if number - number != 0:
        raise Broken(value)
    return Fraction(number)


def _power(degree: Degree, power: Fraction) -> Degree:
    if not power:
        return NONE
    return ANY if degree.any else NONE.times(degree, power)


def constant_scale(flow: Flow) -> Fact:
    """Whether `p` moves the same when every gradient is multiplied by one positive number."""
    fact = _prove(flow, _with_one_scale)
    if fact.answer == "yes":
        return fact
    changing = changing_scale(flow)
    return changing if changing.answer == "yes" else fact


def changing_scale(flow: Flow) -> Fact:
    """Whether `p` moves the same when each step's gradient is multiplied by a positive number of its own.

    All gradients of one step are multiplied by the same number, and every parameter has a gradient.
    """
    return _prove(flow, _with_scales_of_steps)


def _prove(flow: Flow, attempt: Callable[[Flow, Sequence[str]], Degrees]) -> Fact:
    zero: list[str] = []
    flow = with_guards_outside(flow)
    while True:
        try:
            degrees = attempt(flow, zero)
        except Broken as broken:
            if broken.zero is None or broken.zero in zero:
                return Fact("unknown", "the scale stays in", line=flow.line(broken.value))
            zero.append(broken.zero)
            continue
        where = (*(f"{key} = 0" for key in zero), *degrees.conditions)
        gone = _where_gone(flow, degrees)
        return Fact("yes", "the scale is gone after" if gone else "no scale reaches p", where, gone)


def _where_gone(flow: Flow, degrees: Degrees) -> Line | None:
    for part in walk([flow.new["p"]]):
        if degrees.known[part] == NONE and any(degrees.known[a].powers for a in part.args):
            return flow.line(part)
    return None


def _with_one_scale(flow: Flow, zero: Sequence[str]) -> Degrees:
    """The degrees with every state a power of the one scale; Broken where a value has none."""
    start = Degrees(flow, {}, zero)
    read = states_read(flow)
    states = {key: start.degree(flow.rule.state[key].init) for key in read}
    while True:
        degrees, broken, joined = Degrees(flow, states, zero), [], dict(states)
        for key in read:
            try:
                joined[key] = degrees.kept(key, states[key])
            except Broken as error:
                broken.append(error)
        if joined != states:
            states = joined
        elif broken:
            raise next((x for x in broken if x.zero), broken[0])
        else:
            return _unscaled(flow, degrees)


def _with_scales_of_steps(flow: Flow, zero: Sequence[str]) -> Degrees:
    """The degrees with a scale of its own for every state that needs one; Broken where a value has none."""
    read = states_read(flow)
    states = dict.fromkeys(read, NONE)
    while True:
        degrees = Degrees(flow, states, zero)
        scaled = {key for key in read if states[key] == NONE and not _stays_unscaled(degrees, flow.new[key])}
        if not scaled:
            break
        states |= {key: Degree(((key, Fraction(1)),)) for key in scaled}
    for key in read:
        degrees.degree(flow.new[key])
    return _unscaled(flow, degrees)


def _stays_unscaled(degrees: Degrees, value: Node) -> bool:
    try:
        return degrees.degree(value).agrees(NONE)
    except Broken:
        return False


def _unscaled(flow: Flow, degrees: Degrees) -> Degrees:
    if not degrees.degree(flow.new["p"]).agrees(NONE):
        raise Broken(flow.new["p"])
    return degrees


def states_read(flow: Flow) -> list[str]:
    """The states that the parameter depends on, also through other states."""
    read: dict[str, None] = {}
    pending = [flow.new["p"]]
    while pending:
        names = {str(n.arg) for n in walk([pending.pop()]) if n.op is Op.NAME}
        for key in flow.rule.state:
            if key in names and key not in read:
                read[key] = None
                pending.append(flow.new[key])
    return list(read)


_SIZES = (Op.NORM, Op.RMS, Op.ABS)


def zero_unless(value: Node) -> tuple[Node, ...]:
    """The values that are 0 in the second arm of a `where`, by its condition `n > 0` or `n != 0` for a size `n`.

    A size is a norm, a root mean square or an absolute value. Empty where the arm reduces its operand: a norm of one
    tensor says nothing about the others.
    """
    condition, _, otherwise = value.args
    if condition.op not in (Op.GT, Op.NE) or condition.args[1] is not const(0) or condition.args[0].op not in _SIZES:
        return ()
    size = condition.args[0]
    wide = [n for n in walk([otherwise], {size}) if n.op.kind in (Kind.REDUCE, Kind.MATRIX)]
    return () if any(size.args[0] in walk([n]) for n in wide) else (size, size.args[0])


def with_guards_outside(flow: Flow) -> Flow:
    """The same flow with guards moved outward: a product or quotient of a guarded value becomes a guarded one."""
    done: dict[Node, Node] = {}
    values = rewrite(flow.new.values(), _outside, done)
    lines: dict[Node, Sequence[Line]] = {done[old]: places for old, places in flow.lines.items() if old in done}
    return replace(flow, new=dict(zip(flow.new, values, strict=True)), lines={**lines, **flow.lines})


def _outside(value: Node) -> Node:
    if value.op not in (Op.MUL, Op.DIV):
        return value
    for index, operand in enumerate(value.args):
        if operand.op is Op.WHERE and zero_unless(operand):
            arms = [
                node(value.op, *(arm if i == index else x for i, x in enumerate(value.args)))
                for arm in operand.args[1:]
            ]
            return node(Op.WHERE, operand.args[0], *arms)
    return value
