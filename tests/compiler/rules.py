"""Random rules: lines over states of several levels, locals, branches and reductions."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rulec.language.expr.node import Kind, Node, Op, const, name, node
from rulec.language.hyper import Hyper
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign, Branch, State, Statement
from tests.language.expressions import arithmetic

#: The states a drawn rule has: name, level and first value.
STATES = {
    "m": State(const(0)), "v": State(node(Op.MUL, const(2), name("p"))), "n": State(const(1), per="tensor"),
    "r": State(name("a"), per="row"), "c": State(const(0.5), per="col"), "k": State(const(0), per="matrix"),
    "s": State(const(1), per="tensor"),
}  # fmt: skip
HYPER = {"lr": Hyper(0.1), "a": Hyper(0.5), "b": Hyper(2.0)}
_BASE = ["g", "grad", "p", "t", "a", "b", "rows", "cols", "numel", *STATES]
_SCALAR = ["t", "a", "b", "rows", "numel", "n", "s"]


def _reduced(value: Node, op: Op, level: str) -> Node:
    return node(op, value, level)


@st.composite
def values(draw: Any, names: list[str], level: str) -> Node:
    """An expression that a state of this level can be assigned: reduced to it, or made of what is no wider."""
    inner = draw(arithmetic(tuple(names), leaves=6))
    if level == "element":
        if draw(st.booleans()):
            return inner
        reduction = draw(st.sampled_from([op for op in Op if op.kind is Kind.REDUCE]))
        return node(
            Op.ADD, inner, _reduced(inner, reduction, draw(st.sampled_from(["row", "col", "matrix", "tensor"])))
        )
    if level == "tensor" and draw(st.booleans()):
        return draw(arithmetic(tuple(n for n in names if n in _SCALAR), leaves=5))
    reduction = draw(st.sampled_from([op for op in Op if op.kind is Kind.REDUCE]))
    return node(Op.MUL, const(0.5), _reduced(inner, reduction, level))


@st.composite
def lines(draw: Any, known: list[str], least: int = 1, deep: int = 2) -> list[Statement]:
    """Some lines that assign states and locals; adds the locals to `known`."""
    found: list[Statement] = []
    for _ in range(draw(st.integers(least, 4))):
        target = draw(st.sampled_from([*STATES, "x", "y", "n", "s"]))
        if deep and draw(st.integers(0, 5)) == 0:
            condition = draw(st.sampled_from([
                node(Op.GE, name("rows"), const(4)), node(Op.GT, name("t"), const(1)),
                node(Op.GT, name("n"), name("a")), node(Op.LT, name("a"), name("b")),
            ]))  # fmt: skip
            then, otherwise = list(known), list(known)
            branch = Branch(
                condition,
                tuple(draw(lines(then, deep=deep - 1))),
                tuple(draw(lines(otherwise, least=0, deep=deep - 1))),
            )
            known[:] = [n for n in then if n in otherwise]
            found.append(branch)
            continue
        level = STATES[target].per if target in STATES else "element"
        found.append(Assign(target, draw(values(known, level))))
        if target not in known:
            known.append(target)
    return found


def _using_every_state(end: Node) -> Node:
    """The value, which reads every state, so that none is unused."""
    for key in STATES:
        end = node(Op.ADD, end, node(Op.MUL, const(0), name(key)))
    return end


@st.composite
def rules(draw: Any) -> Rule:
    """A rule of a few lines; it assigns a direction or the parameter."""
    known = list(_BASE)
    step = draw(lines(known))
    end = _using_every_state(draw(arithmetic(tuple(known), leaves=8)))
    target = draw(st.sampled_from(["direction", "p"]))
    return Rule("Drawn", (*step, Assign(target, end)), HYPER, STATES)
