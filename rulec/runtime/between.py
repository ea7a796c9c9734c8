"""What is worked out between the stages of one launch: all that is narrower than a parameter, and matrix functions.

Numbers of tensors, groups and the model are arrays over the tensors fired, in float64. Values of rows, columns and
matrices are, for each tensor, an array `(batch, rows, cols)` with 1 for an axis that it does not have: vectors in
float64, matrices in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from rulec.compiler import random
from rulec.compiler.ir import Axes, Site
from rulec.compiler.scalars import evaluate_once
from rulec.language.arithmetic import NUMPY
from rulec.language.node import Kind, Node, Op
from rulec.runtime.plan import Gap, Plan

Array = np.ndarray[Any, Any]

_COMBINE: Mapping[Op, Any] = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum}
_START: Mapping[Op, float] = {Op.SUM: 0.0, Op.MIN: np.inf, Op.MAX: -np.inf}


@dataclass(frozen=True)
class Join:
    """A reduction over several tensors that waits for what other launches have.

    `values` has one number for each tensor fired, or, where `per_group`, for each of their groups; `groups` are the
    groups of these, of the engine `owner`.
    """

    site: Site
    op: Op
    level: str
    values: Array
    groups: Array
    per_group: bool = False
    owner: Any = None


#: What gives a matrix of a stack the bits that it gives the matrix alone. Products do not: BLAS has another way for a
#: matrix times its own transpose, which it takes only where the two are one piece of memory.
_STACKED = frozenset({Op.NEWTON_SCHULZ, Op.QR, Op.EIGH, Op.SINGULAR_VECTORS, Op.INVERSE_ROOT})

#: Matrices of at most this many elements are worth stacking.
_SMALL = 1 << 14


#: A computation that yields where it needs what other launches have, and is sent the result for each of its tensors.
Joining = Generator[Join, Array, None]


class Surroundings(Protocol):
    """Where a launch's values come from: those of each tensor fired, by its place among them.

    `column` gives a column of the scalar table; `functions` are the matrix functions.
    """

    @property
    def groups(self) -> Array: ...
    @property
    def compute(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def owner(self) -> Any: ...
    @property
    def functions(self) -> Mapping[Op, Callable[..., Any]]: ...

    def __len__(self) -> int: ...
    def column(self, index: int) -> Any: ...
    def numbers(self, buffer: str) -> Any: ...
    def matrices(self, buffer: str, i: int) -> Array: ...
    def facts(self, i: int) -> Mapping[str, float]: ...
    def hyper(self, i: int) -> Mapping[str, float]: ...
    def tensor_number(self, i: int) -> int: ...


@dataclass
class Between:
    """The values of one launch so far."""

    plan: Plan
    around: Surroundings
    values: dict[Node, Any] = field(default_factory=dict)
    reduced: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many tensors are fired."""
        return len(self.around)

    def work_out(self, gap: Gap) -> Joining:
        """Everything of a gap."""
        for value in gap.values:
            self.values[value] = yield from self._value(value)

    # One value

    def _value(self, value: Node) -> Generator[Join, Array, Any]:
        kind = value.op.kind
        if kind is Kind.REDUCE:
            return (yield from self._reduction(value))
        if kind is Kind.LEAF:
            return self._leaf(value)
        if kind is Kind.MATRIX:
            apply = self._by_shape if value.op in _STACKED else self._for_each
            return apply(value, self._matrix_function(value))
        if kind is Kind.RANDOM:
            return [self._random(value, i) for i in range(self.count)]
        function = NUMPY[value.op]
        with np.errstate(all="ignore"):
            if self._is_number(value):
                return function(*(self.values[a] for a in value.args))
            return self._for_each(value, function)

    def _axes(self, value: Node) -> Axes:
        return self.plan.axes[value]

    def _is_number(self, value: Node) -> bool:
        return set(self._axes(value).letters) <= {"k", "n"}

    def _leaf(self, value: Node) -> Any:
        if value.op is Op.CONST:
            return np.float64(value.arg)  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            return self.around.column(value.arg)  # type: ignore[arg-type]
        if value.op is Op.RESULT:
            return self.reduced[str(value.arg)]
        if self._is_number(value):
            return self.around.numbers(str(value.arg))
        return [self.around.matrices(str(value.arg), i) for i in range(self.count)]

    def _operands(self, value: Node, i: int) -> list[Any]:
        """The operands of a value for tensor i: arrays, and numbers as Python's."""
        given = ((self.values[a], self._is_number(a)) for a in value.args)
        return [self._number(x, i) if number else x[i] for x, number in given]

    def _for_each(self, value: Node, function: Callable[..., Array]) -> list[Array]:
        return [self._rounded(value, function(*self._operands(value, i))) for i in range(self.count)]

    def _rounded(self, value: Node, found: Any) -> Array:
        """A result in its dtype: that of arithmetic for a matrix, float64 for a vector."""
        array = np.asarray(found)
        matrix = {"i", "j"} <= set(self._axes(value).letters)
        if matrix and array.dtype.kind == "f" and array.dtype != self.around.compute:
            array = array.astype(self.around.compute)
        return array

    def _by_shape(self, value: Node, function: Callable[..., Array]) -> list[Array]:
        """A matrix function of all tensors: small matrices of equal shape are stacked and go through it at once."""
        operands = [self._operands(value, i) for i in range(self.count)]
        alike: dict[Any, list[int]] = {}
        for i, own in enumerate(operands):
            small = all(x.size <= _SMALL for x in own if isinstance(x, np.ndarray))
            key = tuple(x.shape if isinstance(x, np.ndarray) else x for x in own) if small else i
            alike.setdefault(key, []).append(i)
        made: list[Any] = [None] * self.count
        for places in alike.values():
            first = operands[places[0]]
            if len(places) == 1:
                made[places[0]] = self._rounded(value, function(*first))
                continue
            stacked = [
                np.concatenate([operands[i][k] for i in places]) if isinstance(x, np.ndarray) else x
                for k, x in enumerate(first)
            ]
            found = self._rounded(value, function(*stacked))
            for i, array in zip(places, np.split(found, len(places)), strict=True):
                made[i] = array
        return made

    @staticmethod
    def _number(values: Any, i: int) -> Any:
        """The number of tensor i, as Python's: it then takes the dtype of the array it meets."""
        found = values if np.ndim(values) == 0 else values[i]
        return bool(found) if np.asarray(found).dtype.kind == "b" else float(found)

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function = self.around.functions[value.op]
        if value.arg is None:
            return function

        def in_dtype(*operands: Any) -> Any:
            return function(*operands, dtype=value.arg)

        return in_dtype

    def _random(self, value: Node, i: int) -> Array:
        draw, *sizes = cast(tuple[Any, ...], value.arg)
        facts, hyper = self.around.facts(i), self.around.hyper(i)
        extents = [int(evaluate_once(x, hyper, facts, {})) for x in sizes]
        count, at = int(np.prod(extents)), self._number(self.values[value.args[0]], i)
        position = {
            "seed": self.around.seed, "tensor": self.around.tensor_number(i), "draw": int(draw), "step": int(at)
        }  # fmt: skip
        if value.op is Op.NORMAL:
            made = random.normal(count, **position)
        else:
            made = random.uniform(random.stream(count, **position))
        return cast(Array, made.reshape(1, *extents).astype(self.around.compute))

    # Reductions

    def _reduction(self, value: Node) -> Generator[Join, Array, Any]:
        (operand,) = value.args
        letters, level = self._axes(value).letters, str(value.arg)
        found = self.values[operand]
        if not self._is_number(operand):
            removed = set(self._axes(operand).letters) - set(letters)
            axes = tuple(i for i, letter in enumerate("bij") if letter in removed)
            reduced = [_reduced(value.op, x, axes) for x in found]
            if not set(letters) <= {"k", "n"}:
                return reduced
            found = np.array([x.reshape(-1)[0] for x in reduced], np.float64)
        if "n" in letters:
            return found
        numbers = np.broadcast_to(np.asarray(found, np.float64), (self.count,))
        groups = self.around.groups
        per_group = "n" not in self._axes(operand).letters
        if per_group:
            _, first = np.unique(groups, return_index=True)
            numbers, groups = numbers[first], groups[first]
        site = self.plan.program.sites[value]
        return (yield Join(site, value.op, level, numbers, groups, per_group, self.around.owner))


def _reduced(op: Op, x: Array, axes: tuple[int, ...]) -> Array:
    return cast(Array, _COMBINE[op].reduce(x, axis=axes, keepdims=True, initial=_START[op], dtype=np.float64))


def joined(joins: Sequence[Join]) -> list[Array]:
    """The result of one reduction for each of the launches that take part: a number, or one for each of its values."""
    if joins[0].level == "model":
        return [np.asarray(_total(joins))] * len(joins)
    owners = {id(join.owner): [j for j in joins if j.owner is join.owner] for join in joins}
    by_group = {
        (owner, group): _total([_of_group(join, group) for join in own])
        for owner, own in owners.items()
        for group in np.unique(np.concatenate([j.groups for j in own])).tolist()
    }
    return [np.array([by_group[id(j.owner), g] for g in j.groups.tolist()], np.float64) for j in joins]


def _of_group(join: Join, group: int) -> Join:
    mine = join.groups == group
    return replace(join, values=join.values[mine], groups=join.groups[mine])


def _total(joins: Sequence[Join]) -> Any:
    """All values in one, launch by launch in their order; what a group has counts once, whoever brings it."""
    op = joins[0].op
    if joins[0].per_group:
        once = {(id(j.owner), g): v for j in joins for g, v in zip(j.groups.tolist(), j.values.tolist(), strict=True)}
        return _COMBINE[op].reduce(np.array([*once.values()], np.float64), initial=_START[op])
    total = np.float64(_START[op])
    for join in joins:
        total = _COMBINE[op](total, _COMBINE[op].reduce(join.values, initial=_START[op]))
    return total
