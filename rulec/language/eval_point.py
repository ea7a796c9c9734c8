"""The evaluation point: from `evaluate` to the change in place of `p` to it, and the change back.

Training happens at `p`; under `evaluate` a rule may name another point to evaluate the model at. For a point `a*p + b`,
with `a` and `b` free of `p`, the way back is `(p - b)/a`. A state, such as an average, is exchanged with `p`.
"""

from __future__ import annotations

from rulec.errors import HyperError, RuleError
from rulec.language.evaluations import standalone
from rulec.language.expr.node import Node, Op, const, name, names_in, node, walk
from rulec.language.hyper import number_of, resolve_hyper
from rulec.language.rule_data import AnyRule, Assign, RuleData, Statement
from rulec.language.source import Span, rule_error

_P, _ZERO, _ONE = name("p"), const(0), const(1)

#: A value as `slope*p + offset`.
_Affine = tuple[Node, Node]


def to_evaluation(rule: AnyRule) -> AnyRule | None:
    """A rule whose step moves `p` to the evaluation point of `rule`; None where `rule` is evaluated at `p`.

    It has the states and hyper-parameters of `rule`, and reads no gradient. Raises RuleError where there is no way
    back.
    """
    if rule.evaluate is None:
        return None
    swapped = _swap(rule, rule.evaluate)
    if swapped is None:
        invert(rule)
        return _moving(rule, "ToEvaluation", (Assign("p", rule.evaluate),))
    return _moving(rule, "ToEvaluation", swapped)


def to_training(rule: AnyRule) -> AnyRule | None:
    """A rule whose step moves `p` from the evaluation point back; None where `rule` is evaluated at `p`."""
    if rule.evaluate is None:
        return None
    swapped = _swap(rule, rule.evaluate)
    return _moving(rule, "ToTraining", (Assign("p", invert(rule)),) if swapped is None else swapped)


def _moving(rule: AnyRule, word: str, step: tuple[Statement, ...]) -> AnyRule:
    whole = standalone(rule)
    return type(rule)(f"{rule.name}{word}", step, hyper=whole.hyper, state=whole.state, view=whole.view)


def check_evaluation(rule: AnyRule, span: Span | None) -> AnyRule:
    """The same rule, where its evaluation point has a way back to `p`; RuleError at `span` otherwise."""
    try:
        if rule.evaluate is not None and _swap(rule, rule.evaluate) is None:
            invert(rule)
    except RuleError as error:
        raise rule_error(error.message, span) from None
    return rule


def _swap(rule: RuleData, point: Node) -> tuple[Statement, ...] | None:
    """The lines to exchange `p` with the state at the evaluation point; None where the point depends on `p`."""
    if "p" in names_in([point]):
        return None
    state = rule.state.get(str(point.arg)) if point.op is Op.NAME else None
    if state is None or state.per != "element" or state.shape is not None:
        raise RuleError(
            f"the evaluation point of {rule.name} has no p in it: then it must be one state of p's shape, such as an "
            f"average"
        )
    key = str(point.arg)
    return Assign(f"{key}.p", _P), Assign("p", point), Assign(key, name(f"{key}.p"))


def invert(rule: RuleData) -> Node:
    """The way back: the old `p` as an expression of the evaluation point, written `p` in it.

    Raises RuleError where the evaluation point is not `a*p + b` with `a` other than zero.
    """
    assert rule.evaluate is not None  # whoever asks has looked
    slope, offset = _affine(rule, rule.evaluate)
    if slope is _ZERO or _vanishes(rule, slope):
        raise RuleError(f"p cancels out of the evaluation point of {rule.name}, so it could not be found again")
    return _div(_sub(_P, offset), slope)


def _vanishes(rule: RuleData, slope: Node) -> bool:
    """Whether the slope is zero, infinite or NaN with every hyper-parameter at its default."""
    if not set(names_in([slope])) <= rule.hyper.keys():
        return False
    try:
        value = number_of(slope, resolve_hyper(rule.hyper, {}, 2.0**-52, rule.name))
    except HyperError:
        return False
    return not 0 < abs(value) < float("inf")


def _affine(rule: RuleData, point: Node) -> _Affine:
    """The evaluation point as `slope*p + offset`."""
    forms: dict[Node, _Affine] = {}
    for part in walk([point]):
        operands = [forms[a] for a in part.args]
        if part is _P:
            forms[part] = _ONE, _ZERO
        elif all(slope is _ZERO for slope, _ in operands):
            forms[part] = _ZERO, part
        else:
            forms[part] = _combined(rule, part, operands)
    return forms[point]


def _combined(rule: RuleData, part: Node, operands: list[_Affine]) -> _Affine:
    """The affine form of an operation with `p` in at least one operand."""
    (slope, offset), *others = operands
    if part.op is Op.NEG:
        return _sub(_ZERO, slope), _sub(_ZERO, offset)
    if part.op is Op.ADD:
        return _add(slope, others[0][0]), _add(offset, others[0][1])
    if part.op is Op.SUB:
        return _sub(slope, others[0][0]), _sub(offset, others[0][1])
    if part.op is Op.MUL and others[0][0] is _ZERO:
        return _mul(slope, others[0][1]), _mul(offset, others[0][1])
    if part.op is Op.MUL and slope is _ZERO:
        return _mul(offset, others[0][0]), _mul(offset, others[0][1])
    if part.op is Op.DIV and others[0][0] is _ZERO:
        return _div(slope, others[0][1]), _div(offset, others[0][1])
    if part.op is Op.WHERE and slope is _ZERO:
        then, otherwise = others
        return _where(offset, then[0], otherwise[0]), _where(offset, then[1], otherwise[1])
    raise RuleError(
        f"p cannot be found again from the evaluation point of {rule.name}: it must be a*p + b with a and b free of p, "
        f"or one state"
    )


def _both(op: Op, a: Node, b: Node) -> Node:
    """The operation on `a` and `b`; its result where both are numbers."""
    value = node(op, a, b)
    numbers = a.op is Op.CONST and b.op is Op.CONST and not (op is Op.DIV and b.arg == 0)
    return const(number_of(value, {})) if numbers else value


def _add(a: Node, b: Node) -> Node:
    if a is _ZERO or b is _ZERO:
        return b if a is _ZERO else a
    return _sub(a, b.args[0]) if b.op is Op.NEG else _both(Op.ADD, a, b)


def _sub(a: Node, b: Node) -> Node:
    if a is b:
        return _ZERO
    if b is _ZERO:
        return a
    if b.op is Op.SUB and b.args[0] is a:
        return b.args[1]
    return node(Op.NEG, b) if a is _ZERO and b.op is not Op.CONST else _both(Op.SUB, a, b)


def _mul(a: Node, b: Node) -> Node:
    if _ZERO in (a, b):
        return _ZERO
    for one, other in ((a, b), (b, a)):
        if one is _ONE:
            return other
        if one.op is Op.CONST and one.arg == -1:
            return _sub(_ZERO, other)
    return _both(Op.MUL, a, b)


def _div(a: Node, b: Node) -> Node:
    if a is _ZERO or b is _ONE:
        return a
    return _mul(a, b.args[1]) if b.op is Op.DIV and b.args[0] is _ONE else _both(Op.DIV, a, b)


def _where(condition: Node, a: Node, b: Node) -> Node:
    return a if a is b else node(Op.WHERE, condition, a, b)
