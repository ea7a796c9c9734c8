"""A second opinion: the lines of a rule run one after the other on NumPy arrays, with no compiler in between.

It shares the table of what each operation means, and nothing else, with what it checks. It knows one tensor at a
time, so nothing that is kept for a group or model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Node, Op, names_in, walk
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign, Statement

Array = np.ndarray[Any, Any]

#: What remains of the axes (batch, row, column) of a value at each level.
_KEPT = {"element": "bij", "row": "bi", "col": "bj", "matrix": "b", "tensor": ""}


class PlainRun:
    """One tensor, of three dimensions (a batch of matrices), and the rule's states for it."""

    def __init__(self, rule: Rule, param: Array, hyper: Mapping[str, float]) -> None:
        self.rule, self.p, self.hyper, self.t = rule, np.array(param, np.float64), dict(hyper), 0
        facts = {
            "ndim": 3,
            "numel": param.size,
            "rows": param.shape[1],
            "cols": param.shape[2],
            "machine_eps": 2.0**-52,
            "tensor": 0,
            "tensors": 1,
            "depth": 0,
            "depths": 1,
        }
        self.facts = {k: np.float64(v) for k, v in facts.items()}
        self.states = {}
        for key, state in rule.state.items():
            shape = tuple(n if c in _KEPT[state.per] else 1 for n, c in zip(param.shape, "bij", strict=True))
            self.states[key] = np.array(np.broadcast_to(self._value(state.init, {**self._names(), "p": self.p}), shape))

    def _names(self) -> dict[str, Any]:
        return {**self.facts, **{k: np.float64(v) for k, v in self.hyper.items()}, "t": np.float64(self.t)}

    def step(self, g: Array, grad: Array | None = None) -> dict[str, Any]:
        """Every name's value after one step with the input `g`; states are kept, the parameter is not moved."""
        self.t += 1
        names = {**self._names(), **self.states, "p": self.p, "g": g, "grad": g if grad is None else grad}
        with np.errstate(all="ignore"):
            self._lines(self.rule.step, names)
        self.states = {
            key: np.array(np.broadcast_to(_number(names[key]), old.shape)) for key, old in self.states.items()
        }
        return names

    def update(self, g: Array) -> None:
        """One step, and the parameter moved: by the rule itself, or along its direction."""
        names = self.step(g)
        if not self.rule.assigns_parameter:
            names["p"] = self.p - np.float64(self.hyper.get("lr", 1e-3)) * _number(names["direction"])
        self.p = np.array(np.broadcast_to(_number(names["p"]), self.p.shape))

    def _lines(self, step: Sequence[Statement], names: dict[str, Any]) -> None:
        for line in step:
            if isinstance(line, Assign):
                names[line.target] = self._value(line.value, names)
                kept = self.p if line.target == "p" else self.states.get(line.target)
                if kept is not None:  # a line that reads it back finds the axes of its memory
                    names[line.target] = np.broadcast_to(_number(names[line.target]), kept.shape)
            elif set(names_in([line.condition])) <= self.facts.keys():
                self._lines(line.then if self._value(line.condition, names) else line.otherwise, names)
            else:
                self._both(self._value(line.condition, names), line.then, line.otherwise, names)

    def _both(
        self, condition: Any, then: Sequence[Statement], otherwise: Sequence[Statement], names: dict[str, Any]
    ) -> None:
        """A value that branches give has the axes of both, whichever is taken."""
        first, second = dict(names), dict(names)
        self._lines(then, first)
        self._lines(otherwise, second)
        for key in first.keys() & second.keys():
            if first[key] is not second[key]:
                names[key] = np.where(condition != 0, _number(first[key]), _number(second[key]))

    def _value(self, value: Node, names: Mapping[str, Any]) -> Any:
        done: dict[Node, Any] = {}
        for part in walk([value]):
            if part.op is Op.CONST:
                done[part] = np.float64(part.arg)  # type: ignore[arg-type]
            elif part.op is Op.NAME:
                done[part] = names[str(part.arg)]
            else:
                done[part] = _apply(part, [done[a] for a in part.args])
        return done[value]


def _number(value: Any) -> Any:
    return np.asarray(value, np.float64)


def _apply(part: Node, args: list[Any]) -> Any:
    if part.op in (Op.AND, Op.OR, Op.NOT):
        return NUMPY[part.op](*(np.not_equal(a, 0) for a in args))
    if part.op is Op.WHERE:
        condition, a, b = args
        both = np.asarray(a).dtype == bool and np.asarray(b).dtype == bool
        return np.where(np.not_equal(condition, 0), *((a, b) if both else (_number(a), _number(b))))
    args = [_number(a) for a in args]
    reduce = _REDUCTIONS.get(part.op)
    if reduce is None:
        return NUMPY[part.op](*args)
    axes = tuple(i for i, c in enumerate("bij") if c not in _KEPT[str(part.arg)])
    x = args[0]
    return reduce(x, tuple(i for i in axes if x.shape[i] != 1)) if x.ndim else reduce(x.reshape(1, 1, 1), ())


_REDUCTIONS = {
    Op.SUM: lambda x, axes: np.sum(x, axis=axes, keepdims=True),
    Op.MEAN: lambda x, axes: np.mean(x, axis=axes, keepdims=True),
    Op.NORM: lambda x, axes: np.sqrt(np.sum(x * x, axis=axes, keepdims=True)),
    Op.RMS: lambda x, axes: np.sqrt(np.mean(x * x, axis=axes, keepdims=True)),
    Op.MIN: lambda x, axes: np.min(x, axis=axes, keepdims=True),
    Op.MAX: lambda x, axes: np.max(x, axis=axes, keepdims=True),
    Op.COUNT_NONZERO: lambda x, axes: np.sum(x != 0, axis=axes, keepdims=True),
}
