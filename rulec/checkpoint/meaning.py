"""A digest of a rule's equations, and of nothing else: rules of one digest compute the same."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rulec.language.expr.levels import level_text
from rulec.language.expr.node import Node, Op, name, rewrite
from rulec.language.expr.text import expression_text
from rulec.language.parse.step import step_text
from rulec.language.rule import Assign, Branch, Rule, State, Statement, assignments


@functools.lru_cache(maxsize=256)
def meaning(rule: Rule) -> str:
    """The SHA-256 of a rule's step, states, inputs, skip, evaluation point and view, in the rule language.

    The rule's name, comments and summary, the names of local values, and the defaults and ranges of hyper-parameters
    are no part of it, nor is which tensors it applies to. The rule must be one that runs by itself.
    """
    rule = rule.standalone()
    local = {n: name(f"local{i}") for i, n in enumerate(_locals(rule))}
    said = {
        "state": {key: _state(state) for key, state in rule.state.items()},
        "inputs": dict(rule.inputs),
        "step": step_text(_renamed(rule.step, local)),
        "evaluate": _text(rule.evaluate),
        "skip": _text(rule.skip, local),
        "view": dict(rule.view),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _locals(rule: Rule) -> list[str]:
    """The names that a step assigns and nothing keeps, in order."""
    targets = dict.fromkeys(line.target for line in assignments(rule.step))
    return [target for target in targets if target != "p" and target not in rule.state]


def _state(state: State) -> list[Any]:
    shape = None if state.shape is None else [_text(x) for x in state.shape]
    return [_text(state.init), level_text(state.per, state.number), shape, _text(state.condition)]


def _text(value: Node | None, local: Mapping[str, Node] | None = None) -> str | None:
    return None if value is None else expression_text(_with(value, local or {}))


def _with(value: Node, local: Mapping[str, Node]) -> Node:
    return rewrite([value], lambda n: local.get(str(n.arg), n) if n.op is Op.NAME else n)[0]


def _renamed(step: Iterable[Statement], local: Mapping[str, Node]) -> list[Statement]:
    """The lines with local values called by other names."""
    lines: list[Statement] = []
    for line in step:
        if isinstance(line, Assign):
            target = str(local[line.target].arg) if line.target in local else line.target
            lines.append(Assign(target, _with(line.value, local)))
        else:
            then, otherwise = _renamed(line.then, local), _renamed(line.otherwise, local)
            lines.append(Branch(_with(line.condition, local), tuple(then), tuple(otherwise)))
    return lines
