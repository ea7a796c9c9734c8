"""Exact accumulation of gradients into the states that a rule keeps anyway.

A rule accumulates where it has states, here called linear, of which all of this holds:

1. Their new value is `A + L(g)`: `A` is free of `g`, and `L` is linear in `g` and reads none of these states.
2. The new value of `p`, and of every other state, depends on `g` and on these states through their new values alone.

Then one step with `g1 + g2` equals two calls that share one count `t`. The first sets each linear state to
`A + L(g1)`, once: that is where a decay such as `beta*m` is applied. The second adds `L(g2)` to it, and so would any
further call. After the last call `p` and the other states are computed from the linear states as they then stand. A
call that is skipped adds nothing, and whether the sum would have been skipped is not known. Between the calls no buffer
of gradients is kept: what each adds is `Accumulation.adds`, an expression of `g`, `t`, hyper-parameters, `p` and states
that stay as they are until the last call. Where condition 1 or 2 fails something else than the sum reaches `p`:
Nesterov's momentum and Lion read `g` beside the moment, Adam its square, and gradient descent has nothing to add to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rulec.analysis.fact import Fact, Line
from rulec.analysis.flow import Flow, flow_of, reads
from rulec.analysis.linear import LinearForms
from rulec.language.node import Node, Op, const, name, node, rewrite, walk
from rulec.language.rule import Assign, Rule

#: The phases of a step whose gradient comes in parts.
Phase = Literal["first", "more", "last"]


@dataclass(frozen=True)
class Accumulation:
    """Whether a rule accumulates exactly, and what a call after the first adds to each linear state."""

    fact: Fact
    adds: Mapping[str, Node] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fact)

    def __str__(self) -> str:
        return str(self.fact)


def accumulation(flow: Flow, forms: LinearForms) -> Accumulation:
    """What is proved of a rule; the answer is `unknown` where nothing is.

    What refutes it is a sum that these linear states were seen to miss.
    """
    members = linear_members(flow, forms)
    adds = {key: part for key in members if (part := forms.form(flow.taken[key]).part) is not None}
    for key in ("p", *flow.rule.state):
        if key not in members and (found := _read_beside(flow, key, members)):
            who = "p" if key == "p" else f"state {key}"
            line = found[0] or flow.assigned.get(key)
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
    """The linear states: those that are affine in `g`, less those whose old value something else reads."""
    found = [key for key in flow.rule.state if not forms.form(flow.taken[key]).free and _affine(flow, forms, key)]
    while True:
        adds = [part for key in found if (part := forms.form(flow.taken[key]).part) is not None]
        ends = {flow.taken[key] for key in found}
        rest = [of_states(flow, key, found) for key in flow.taken if key not in found]
        old = {n for n in (*walk(rest, ends), *walk(adds)) if n.op is Op.NAME}
        kept = [key for key in found if name(key) not in old]
        if kept == found:
            return found
        found = kept


def _affine(flow: Flow, forms: LinearForms, key: str) -> bool:
    return forms.form(flow.taken[key]).broken is None


def _read_beside(flow: Flow, key: str, members: list[str]) -> tuple[Line | None] | None:
    """The line where the new value of `key` reads `g` past the new values of the linear states, if it does."""
    g, value, ends = name("g"), of_states(flow, key, members), {flow.taken[member] for member in members}
    if value is g:
        return (None,)
    seen: list[Node] = [] if g in ends else [g]
    found: list[Node] = []
    for part in walk([value], ends):
        if any(a in seen for a in part.args):
            seen.append(part)
            found.append(part)
    if not found:
        return None
    # A part of what a linear state adds may stand elsewhere too: what makes something else of it says more.
    shared = set(walk(ends))
    return (flow.line(next((part for part in found if part not in shared), found[0]), key),)


#: Deepest expression that is searched for what a state is within an arm.
_DEEP = 300


def of_states(flow: Flow, key: str, members: Sequence[str]) -> Node:
    """The new value of `key`, in which what the new value of a linear state is within an arm of an `if` is that value.

    After `if c: m = a` and `else: m = b`, what an arm under the same `c` reads as `a` or `b` is the new `m`.
    """
    value = flow.taken[key]
    return value if value.depth > _DEEP else _within(value, flow.taken, {m: flow.taken[m] for m in members}, {})


def _within(
    value: Node, new: Mapping[str, Node], here: Mapping[str, Node], done: dict[tuple[Node, tuple[Node, ...]], Node]
) -> Node:
    """`value` where the new values of linear states, `new` in general, are those of `here`."""
    found = done.get((value, tuple(here.values())))
    if found is not None:
        return found
    for key, now in here.items():
        if value is now and (value.args or value in (name(key), name("g"))):
            return new[key]
    args = [_within(value.args[0], new, here, done)] if value.op is Op.WHERE else []
    for arm in range(len(args), len(value.args)):
        inside = {key: _arm(now, value, arm) for key, now in here.items()} if value.op is Op.WHERE else here
        args.append(_within(value.args[arm], new, inside, done))
    made = value if all(a is b for a, b in zip(args, value.args, strict=True)) else node(value.op, *args, value.arg)
    done[value, tuple(here.values())] = made
    return made


def _arm(now: Node, choice: Node, arm: int) -> Node:
    """What a state is in one arm of a `where`."""
    return now.args[arm] if now.op is Op.WHERE and now.args[0] is choice.args[0] else now


def accumulating(flow: Flow, adds: Mapping[str, Node]) -> Rule:
    """The rule with its step taken apart: what the input `phase` says is done, for the step number `step`.

    At 0 the linear states get their new value; at 1 what a further gradient adds is added; at 2 `p` and the other
    states get theirs, from the linear states as they stand.
    """
    now = {name("t"): name("step"), **{flow.taken[key]: name(key) for key in adds}}
    lines, late = [], []
    for key, value in flow.taken.items():
        if key in adds:
            first, more = (rewrite([x], lambda n: name("step") if n is name("t") else n)[0] for x in (value, adds[key]))
            added = node(Op.WHERE, _is(1), node(Op.ADD, name(key), more), name(key))
            lines.append(Assign(f"{key}_now", node(Op.WHERE, _is(0), first, added)))
        else:
            finished = rewrite([of_states(flow, key, list(adds))], lambda n: now.get(n, n), dict(now))[0]
            late.append(Assign(f"{key}_now", node(Op.WHERE, _is(2), finished, name(key))))
    stores = [Assign(line.target.removesuffix("_now"), name(line.target)) for line in (*lines, *late)]
    inputs = {**flow.rule.inputs, "phase": "scalar", "step": "scalar"}
    return replace(flow.rule, step=(*lines, *late, *stores), inputs=inputs, skip=None, interop={})


def phase_rule(rule: Rule, phase: Phase) -> Rule:
    """One phase of a step of a rule that accumulates, as a rule of the same states and hyper-parameters.

    `first` gives the linear states their new value, from the first gradient; `more` adds what a further one adds;
    `last` gives `p` and the other states theirs, and reads no gradient. All three have the `t` of the step.
    """
    flow = flow_of(rule)
    adds = accumulation(flow, LinearForms()).adds
    if phase == "last":
        now = {flow.taken[key]: name(key) for key in adds}
        new = {k: rewrite([of_states(flow, k, list(adds))], lambda n: now.get(n, n), dict(now))[0]
               for k in flow.taken if k not in adds}  # fmt: skip
    else:
        made = flow.taken if phase == "first" else {k: node(Op.ADD, name(k), more) for k, more in adds.items()}
        new = {**{k: made[k] for k in adds}, "p": name("p")}
    lines = [Assign(f"{key}_now", value) for key, value in new.items()]
    stores = [Assign(key, name(f"{key}_now")) for key in new]
    return replace(flow.rule, step=(*lines, *stores), skip=None, interop={})


def _is(phase: int) -> Node:
    return node(Op.EQ, name("phase"), const(phase))
