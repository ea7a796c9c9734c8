"""The scalar program: values of hyper-parameters, `t` and shape facts alone, taken out of the kernel.

It is evaluated in float64 once per distinct (group, t) into a table, and kernels read their row of it. So a learning
rate never recompiles anything, and `1 - beta2**t` is computed once in float64, not for every element in float32.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Column, Program, ScalarProgram, Stage, Store
from rulec.compiler.names import value_name
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import ROWS, WORDS, Kind, Node, Op, node, rewrite, walk
from rulec.language.hyper import resolve_hyper

__all__ = ["ScalarTable", "evaluate_once", "hoist_scalars", "resolve_hyper"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_SCALAR_LEAVES = (Op.CONST, Op.HYPER, Op.MODEL_HYPER, Op.STEP, Op.FACT)


def hoist_scalars(program: Program) -> Program:
    """The program with every largest scalar value replaced by a column of the table.

    A state joins the scalar program where its new value is scalar, as NAdam's product of momenta. Shape facts that
    statistics alone read, after their reductions, stay where they are: as columns they would give each tensor a row.
    """
    stage = program.stages[0]
    values = {s.buffer: s.value for s in stage.stores}
    states = _scalar_states(program, values)
    hoisted = _ScalarSet(states)
    columns: dict[Node, Column] = {}
    kernel_stores = [s for s in stage.stores if s.buffer not in states]
    roots = [s.value for s in kernel_stores] + ([] if program.skip is None else [program.skip])
    names = {b.name for b in program.statistics}
    measured = [s.value for s in kernel_stores if s.buffer in names]
    wanted = _maximal([root for root in roots if root not in measured], hoisted)
    if measured:
        wanted += _of_statistics(program, measured, hoisted, wanted)
    taken = {b.name for b in program.buffers}
    for index, value in enumerate(wanted):
        columns[value] = Column(value_name(program, value, f"scalar_{index}", taken), value)
    position = {value: node(Op.SCALAR, index) for index, value in enumerate(columns)}
    rewritten = _replace(roots, position)
    skip = None if program.skip is None else rewritten.pop()
    labels = dict(program.labels)
    memo: dict[Node, Node] = {}
    for value, label in program.labels.items():
        labels[_replace([value], position, memo)[0]] = label
    sites = {_replace([value], position, memo)[0]: site for value, site in program.sites.items()}
    stores = tuple(Store(s.buffer, v) for s, v in zip(kernel_stores, rewritten, strict=True))
    scalars = ScalarProgram(tuple(columns.values()), tuple(Store(b, v) for b, v in values.items() if b in states))
    return replace(program, stages=(Stage(stores),), scalars=scalars, labels=labels, skip=skip, sites=sites)


def _replace(roots: Sequence[Node], position: Mapping[Node, Node], memo: dict[Node, Node] | None = None) -> list[Node]:
    """The roots with hoisted values replaced from the outside in: the largest one wins."""
    memo = {} if memo is None else memo
    memo.update(position)
    return rewrite(roots, lambda n: n, memo)


class _ScalarSet:
    """Whether a value is scalar: made of hyper-parameters, `t`, scalar states and, where `of_shape`, shape facts."""

    def __init__(self, states: set[str], of_shape: bool = True) -> None:
        self.states, self.of_shape = states, of_shape
        self.known: dict[Node, bool] = {}

    def contains(self, value: Node) -> bool:
        for part in walk([value], self.known):
            self.known[part] = self._is_scalar(part)
        return self.known[value]

    def _is_scalar(self, value: Node) -> bool:
        if value.op is Op.LOAD:
            return value.arg in self.states
        if value.op.kind is Kind.LEAF:
            return value.op in _SCALAR_LEAVES and (self.of_shape or not is_shape_fact(value))
        elementwise = value.op.kind not in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM, Kind.SHAPE)
        return elementwise and all(self.known[a] for a in value.args)


def reduced_states(program: Program) -> frozenset[str]:
    """The states narrower than the parameter that a program, not yet hoisted, makes of reductions."""
    values = {s.buffer: s.value for s in program.stages[0].stores}
    return frozenset(_narrow_states(program) - _scalar_states(program, values))


def _narrow_states(program: Program) -> set[str]:
    return {b.name for b in program.states if b.axes.number}


def _scalar_states(program: Program, values: Mapping[str, Node]) -> set[str]:
    narrow = _narrow_states(program) - program.reduced
    while True:
        scalar = _ScalarSet(narrow)
        leaving = {s for s in narrow if s in values and not scalar.contains(values[s])}
        if not leaving:
            return narrow
        narrow -= leaving


def is_shape_fact(value: Node) -> bool:
    """Whether a value is a fact of a tensor's shape, not of its dtype or its random bits."""
    return value.op is Op.FACT and value.arg not in ("machine_eps", *WORDS, *ROWS)


def _of_statistics(program: Program, roots: Sequence[Node], hoisted: _ScalarSet, known: Sequence[Node]) -> list[Node]:
    """The columns for statistics, beside those `known`: scalars in kernels, and scalars without facts elsewhere."""
    axes = AxisInference(program).axes
    apart = (Kind.MATRIX, Kind.RANDOM, Kind.SHAPE)
    inside = [n for n in walk(roots) if n.op.kind in apart or axes(n).elementwise]
    wanted = [a for n in inside for a in n.args if hoisted.contains(a) and a.op is not Op.CONST and a not in known]
    later = _ScalarSet(hoisted.states, of_shape=False)
    return list(dict.fromkeys([*wanted, *_maximal(roots, later, {*known, *wanted})]))


def _maximal(roots: Sequence[Node], hoisted: _ScalarSet, ends: Container[Node] = ()) -> list[Node]:
    """The scalar operands of values that are not scalar, each once, in order, and scalar roots; except for constants.

    Nodes in `ends` are left out, with the nodes that stand only under them.
    """
    parts = [part for part in walk(roots, ends) if not hoisted.contains(part)]
    read = [*(a for part in parts for a in part.args), *roots]
    return list(dict.fromkeys(a for a in read if hoisted.contains(a) and a.op is not Op.CONST and a not in ends))


class ScalarTable:
    """Evaluates a scalar program for many tensors at once, in float64.

    Every input is an array over rows (or a number): hyper-parameters, the step count, shape facts, states.
    """

    def __init__(self, scalars: ScalarProgram) -> None:
        self.columns = [c.value for c in scalars.columns]
        self.stores = scalars.stores
        self.order = list(walk([*self.columns, *(s.value for s in scalars.stores)]))
        self._constants = _constants(self.order)
        self._others = [part for part in self.order if part not in self._constants]
        self.hyper = {str(n.arg) for n in self.order if n.op in (Op.HYPER, Op.MODEL_HYPER)}
        self.facts = {str(n.arg) for n in self.order if n.op is Op.FACT}
        self.loads = {str(n.arg) for n in self.order if n.op is Op.LOAD}

    @classmethod
    def of(cls, values: Sequence[Node]) -> ScalarTable:
        """The table of values without names, one a column."""
        return cls(ScalarProgram(columns=tuple(Column("", value) for value in values)))

    def evaluate(
        self, shape: tuple[int, ...], hyper: Mapping[str, Any], t: Any, facts: Mapping[str, Any],
        states: Mapping[str, Any], levels: Mapping[str, Any] | None = None,
    ) -> tuple[Array, dict[str, Any]]:  # fmt: skip
        """The table (`shape` by columns, float64) and the new value of each scalar state.

        Every input broadcasts to `shape`. `levels` are the step counts of groups and of the model, for states kept
        per those; by default `t`.
        """
        values = self.values(hyper, t, facts, states, levels or {})
        table = np.empty((*shape, len(self.columns)))
        for index, value in enumerate(self.columns):
            table[..., index] = values[value]
        return table, {s.buffer: values[s.value] for s in self.stores}

    def values(
        self, hyper: Mapping[str, Any], t: Any, facts: Mapping[str, Any], states: Mapping[str, Any],
        levels: Mapping[str, Any],
    ) -> dict[Node, Any]:  # fmt: skip
        """Every value of the program, operands first."""
        values = {**self._constants}
        with np.errstate(all="ignore"):
            for part in self._others:
                values[part] = self._value(part, values, hyper, t, facts, states, levels)
        return values

    @staticmethod
    def _value(
        part: Node, values: Mapping[Node, Any], hyper: Mapping[str, Any], t: Any, facts: Mapping[str, Any],
        states: Mapping[str, Any], levels: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        if part.op in (Op.HYPER, Op.MODEL_HYPER):
            return hyper[str(part.arg)]
        if part.op is Op.STEP:
            return t if part.arg is None else levels.get(str(part.arg), t)
        if part.op is Op.FACT:
            return facts[str(part.arg)]
        if part.op is Op.LOAD:
            return states[str(part.arg)]
        return NUMPY[part.op](*(values[a] for a in part.args))


def _constants(parts: Sequence[Node]) -> dict[Node, Any]:
    """The parts made of constants alone, with their values; operands come before what reads them."""
    known: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for part in parts:
            if part.op is Op.CONST:
                known[part] = np.float64(part.arg)  # type: ignore[arg-type]
            elif part.args and known.keys() >= {*part.args}:
                known[part] = NUMPY[part.op](*(known[a] for a in part.args))
    return known


def evaluate_once(value: Node, hyper: Mapping[str, Any], facts: Mapping[str, Any], loads: Mapping[str, Any]) -> Any:
    """One expression of hyper-parameters, shape facts and buffers, in float64."""
    return ScalarTable.of([value]).values(hyper, 0, facts, loads, {})[value]
