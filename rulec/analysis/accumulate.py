"""Exact accumulation of gradients in states of the rule itself.

A rule accumulates where some of its states, here called linear, meet two conditions:

1. Their new value is `A + L(g)`: `A` is free of `g`, and `L` is linear in `g` and reads none of these states.
2. The new value of `p`, and of every other state, depends on `g` and on these states through their new values alone.

Then one step with `g1 + g2` equals two calls with one count `t`. The first call sets each linear state to `A + L(g1)`:
it applies a decay such as `beta*m`, once. The second adds `L(g2)` to it, and so does any further call. After the last
call `p` and the other states are computed from the linear states. A skipped call adds nothing, and it is not known
whether the sum would have been skipped.

No buffer of gradients is kept between the calls. `Accumulation.adds` has the `L(g)` of each linear state, an expression
of `g`, `t`, hyper-parameters, `p` and states that stay as they are until the last call. If a condition fails, `p`
depends on more than the sum: Nesterov's momentum and Lion read `g` beside the moment, Adam reads its square, and
gradient descent has no state to add to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rulec.analysis.flow import Fact, Flow, Line, flow_of, reads
from rulec.analysis.linear import LinearForms
from rulec.language.expr.node import Node, Op, const, name, node, rewrite, walk
from rulec.language.rule_data import Assign, Branch, RuleData, Statement

#: The phases of a step with a gradient in parts.
Phase = Literal["first", "more", "last"]


@dataclass(frozen=True)
class Accumulation:
    """Whether a rule accumulates exactly, and linear state -> its increment `L(g)` by a call after the first."""

    fact: Fact
    adds: Mapping[str, Node] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fact)

    def __str__(self) -> str:
        return str(self.fact)


def accumulation(flow: Flow, forms: LinearForms) -> Accumulation:
    """Whether a rule accumulates: `yes` with a proof, or `unknown`.

    A sum of gradients with another result than its parts refutes it: see `Witness.accumulation_fails`.
    """
    members = linear_members(flow, forms)
    adds = {key: part for key in members if (part := forms.form(flow.taken[key]).part) is not None}
    for key in ("p", *flow.rule.state):
        if key not in members and (beside := _read_beside(flow, key, members)):
            who = "p" if key == "p" else f"state {key}"
            line = beside[0] or flow.assigned.get(key)
            return Accumulation(Fact("unknown", f"{who} depends on g through", line=line), adds)
    read = {key for key in flow.rule.inputs if any(reads(value, [key]) for value in flow.taken.values())}
    if read:
        return Accumulation(Fact("unknown", f"every call has its own {min(read)}"), adds)
    first = next(iter(adds), None)
    line = flow.assigned.get(first) if first else None
    why = f"g reaches p through {' and '.join(adds)} alone:" if adds else "g is not read"
    where = ("no call is skipped",) if flow.rule.skip is not None else ()
    return Accumulation(Fact("yes", why, where, line), adds)


def linear_members(flow: Flow, forms: LinearForms) -> list[str]:
    """The linear states: affine in `g`, and with no other reader of their old value."""
    members = [key for key in flow.rule.state if not forms.form(flow.taken[key]).free and _affine(flow, forms, key)]
    while True:
        adds = [part for key in members if (part := forms.form(flow.taken[key]).part) is not None]
        ends = {flow.taken[key] for key in members}
        rest = [of_states(flow, key, members) for key in flow.taken if key not in members]
        old = {n for n in (*walk(rest, ends), *walk(adds)) if n.op is Op.NAME}
        kept = [key for key in members if name(key) not in old]
        if kept == members:
            return members
        members = kept


def _affine(flow: Flow, forms: LinearForms, key: str) -> bool:
    return forms.form(flow.taken[key]).broken is None


def _read_beside(flow: Flow, key: str, members: list[str]) -> tuple[Line | None] | None:
    """The line where the new value of `key` reads `g` other than through linear states; None where none does.

    The line is a tuple of one: `(None,)` where `g` is the new value itself.
    """
    g, value, ends = name("g"), of_states(flow, key, members), {flow.taken[member] for member in members}
    if value is g:
        return (None,)
    seen: list[Node] = [] if g in ends else [g]
    parts: list[Node] = []
    for part in walk([value], ends):
        if any(a in seen for a in part.args):
            seen.append(part)
            parts.append(part)
    if not parts:
        return None
    # A part of an increment may stand elsewhere too: the first value outside of increments says more.
    shared = set(walk(ends))
    return (flow.line(next((part for part in parts if part not in shared), parts[0]), key),)


#: Deepest expression to search for values of states within an arm.
_DEEP = 300


def of_states(flow: Flow, key: str, members: Sequence[str]) -> Node:
    """The new value of `key`, with the new value of a linear state also where an arm of an `if` reads a part of it.

    After `if c: m = a` and `else: m = b`, an `a` or `b` in an arm under the same `c` is the new `m`.
    """
    value = flow.taken[key]
    return value if value.depth > _DEEP else _within(value, flow.taken, {m: flow.taken[m] for m in members}, {})


def _within(
    value: Node, new: Mapping[str, Node], here: Mapping[str, Node], done: dict[tuple[Node, tuple[Node, ...]], Node]
) -> Node:
    """`value` with `new[key]` in place of `here[key]`: the form of a state's new value within the current arms."""
    known = done.get((value, tuple(here.values())))
    if known is not None:
        return known
    for key, now in here.items():
        if value is now and (value.args or value in (name(key), name("g"))):
            return new[key]
    args = [_within(value.args[0], new, here, done)] if value.op is Op.WHERE else []
    for arm in range(len(args), len(value.args)):
        inside = {key: _arm(now, value, arm) for key, now in here.items()} if value.op is Op.WHERE else here
        args.append(_within(value.args[arm], new, inside, done))
    result = value if all(a is b for a, b in zip(args, value.args, strict=True)) else node(value.op, *args, value.arg)
    done[value, tuple(here.values())] = result
    return result


def _arm(now: Node, choice: Node, arm: int) -> Node:
    """The value of a state in one arm of a `where`."""
    return now.args[arm] if now.op is Op.WHERE and now.args[0] is choice.args[0] else now


def accumulating(flow: Flow, adds: Mapping[str, Node]) -> RuleData:
    """The rule with its step in three phases, chosen by the input `phase`, for the step number in the input `step`.

    Phase 0 sets the linear states to their new value. Phase 1 adds the increment of a further gradient to them. Phase 2
    computes `p` and the other states from the linear states.
    """
    now = {name("t"): name("step"), **{flow.taken[key]: name(key) for key in adds}}
    new = {}
    for key, value in flow.taken.items():
        if key in adds:
            first, more = (rewrite([x], lambda n: name("step") if n is name("t") else n)[0] for x in (value, adds[key]))
            added = node(Op.WHERE, _is(1), node(Op.ADD, name(key), more), name(key))
            new[key] = node(Op.WHERE, _is(0), first, added)
        else:
            finished = rewrite([of_states(flow, key, list(adds))], lambda n: now.get(n, n), dict(now))[0]
            new[key] = node(Op.WHERE, _is(2), finished, name(key))
    inputs = {**flow.rule.inputs, "phase": "scalar", "step": "scalar"}
    return replace(flow.rule, step=at_once(flow.rule, new), inputs=inputs, skip=None, interop={})


def phase_rule(rule: RuleData, phase: Phase) -> RuleData:
    """One phase of a step of a rule that accumulates, as a rule of the same states and hyper-parameters.

    `first` sets the linear states to their new value, from the first gradient. `more` adds the increment of a further
    gradient. `last` computes `p` and the other states, and reads no gradient. All three read the `t` of the step.
    """
    flow = flow_of(rule)
    adds = accumulation(flow, LinearForms()).adds
    if phase == "last":
        now = {flow.taken[key]: name(key) for key in adds}
        new = {k: rewrite([of_states(flow, k, list(adds))], lambda n: now.get(n, n), dict(now))[0]
               for k in flow.taken if k not in adds}  # fmt: skip
    else:
        changed = flow.taken if phase == "first" else {k: node(Op.ADD, name(k), more) for k, more in adds.items()}
        new = {**{k: changed[k] for k in adds}, "p": name("p")}
    return replace(flow.rule, step=at_once(flow.rule, new), skip=None, interop={})


def at_once(rule: RuleData, new: Mapping[str, Node]) -> tuple[Statement, ...]:
    """The lines that set `p` and states to new values of the old ones, a state where the tensor's shape has it."""
    lines = [(key, Assign(f"{key}_now", value)) for key, value in new.items()]
    lines += [(key, Assign(key, name(f"{key}_now"))) for key in new]
    exists = {key: state.condition for key, state in rule.state.items() if state.condition is not None}
    return tuple(Branch(exists[key], (line,)) if key in exists else line for key, line in lines)


def _is(phase: int) -> Node:
    return node(Op.EQ, name("phase"), const(phase))
