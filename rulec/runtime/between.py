"""What is worked out between the stages of one launch: all that is narrower than a parameter, and matrix functions.

Numbers of tensors, groups and the model are arrays over the tensors fired, in float64. Values of rows, columns and
matrices are, for each tensor, an array `(batch, rows, cols)` with 1 for an axis that it does not have: vectors in
float64, matrices in the compute dtype. All are arrays of the launch's library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from rulec.compiler import random
from rulec.compiler.ir import Axes, Site
from rulec.compiler.matrix import MATRIX
from rulec.compiler.reductions import REDUCTIONS
from rulec.compiler.scalars import evaluate_once
from rulec.language.node import Kind, Node, Op, is_boolean
from rulec.runtime.drawing import Drawing
from rulec.runtime.library import Library
from rulec.runtime.plan import Gap, Plan
from rulec.runtime.projection import Projection
from rulec.runtime.tiled import Tiled
from rulec.runtime.tiles import Tiles

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Join:
    """A reduction over several tensors that waits for what other launches have.

    `values` has one number for each tensor fired, or, where `per_group`, for each of their groups; `groups` are the
    groups of these, of the engine `owner`.
    """

    site: Site
    op: Op
    level: str
    values: Any
    groups: Array
    library: Library
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

    `column` gives a column of the scalar table; `known` a number as Python's, where that needs no device, else what
    `Library.at` gives. `room` says how many bytes may be taken on the way; `fill_noise` is the backend's, or None.
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
    def library(self) -> Library: ...
    @property
    def fill_noise(self) -> Any: ...

    def __len__(self) -> int: ...
    def column(self, index: int) -> Any: ...
    def numbers(self, buffer: str) -> Any: ...
    def matrices(self, buffer: str, i: int) -> Array: ...
    def room(self, i: int) -> int: ...
    def facts(self, i: int) -> Mapping[str, float]: ...
    def hyper(self, i: int) -> Mapping[str, float]: ...
    def tensor_number(self, i: int) -> int: ...
    def known(self, value: Node, found: Any, i: int) -> Any: ...


class InTiles(Surroundings, Protocol):
    """Surroundings whose matrices may be taken, and states written, tile by tile.

    `writes` is called before a state is written; `extents` are a tensor's matrices, and their rows and columns.
    """

    def tiled(self, buffer: str, i: int) -> Tiled: ...
    def writes(self) -> None: ...
    def extents(self, i: int) -> tuple[int, int, int]: ...


@dataclass
class Between:
    """The values of one launch so far."""

    plan: Plan
    around: Surroundings
    values: dict[Node, Any] = field(default_factory=dict)
    reduced: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.library = self.around.library

    @property
    def count(self) -> int:
        """How many tensors are fired."""
        return len(self.around)

    def work_out(self, gap: Gap) -> Joining:
        """Everything of a gap that is needed after it."""
        projection = gap.projection
        yield from self._each(gap.values if projection is None else projection.before, gap)
        if projection is not None:
            self._project(projection)
            yield from self._each(projection.after, gap)

    def _each(self, values: Sequence[Node], gap: Gap) -> Joining:
        for value in values:
            self.values[value] = yield from self._value(value)
            for over in gap.over.get(value, ()):
                self.values.pop(over, None)

    def _project(self, projection: Projection) -> None:
        """The reductions of a projection; what it stores is stored."""
        found = [Tiles(self, projection, i).work_out() for i in range(self.count)]
        for value in projection.reductions:
            reduced = [each[value] for each in found]
            self.values[value] = self.library.together(reduced) if self._is_number(value) else reduced

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
            return [self.random(value, i) for i in range(self.count)]
        function = self.library.arithmetic[value.op]
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
            return self.library.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            return self.around.column(value.arg)  # type: ignore[arg-type]
        if value.op is Op.RESULT:
            return self.reduced[str(value.arg)]
        if self._is_number(value):
            return self.around.numbers(str(value.arg))
        return [self.around.matrices(str(value.arg), i) for i in range(self.count)]

    def _operands(self, value: Node, i: int) -> list[Any]:
        """The operands of a value for tensor i: arrays, and numbers; those that say how to go on are Python's."""
        matrices = MATRIX[value.op].matrices if value.op in MATRIX else len(value.args)
        return [self._operand(a, i, known=place >= matrices) for place, a in enumerate(value.args)]

    def _operand(self, value: Node, i: int, known: bool) -> Any:
        found = self.values[value]
        if not self._is_number(value):
            return found[i]
        return self.around.known(value, found, i) if known else self.library.at(found, i)

    def _for_each(self, value: Node, function: Callable[..., Array]) -> list[Array]:
        return [self.rounded(value, function(*self._operands(value, i))) for i in range(self.count)]

    def rounded(self, value: Node, found: Any) -> Array:
        """A result in its dtype: that of arithmetic for a matrix, float64 for a vector."""
        return cast(Array, self.library.cast(found, self.around.compute) if self.is_rounded(value) else found)

    def is_rounded(self, value: Node) -> bool:
        """Whether a result is in the dtype of arithmetic."""
        return {"i", "j"} <= set(self._axes(value).letters) and not is_boolean(value)

    def _by_shape(self, value: Node, function: Callable[..., Array]) -> list[Array]:
        """A matrix function of all tensors: small matrices of equal shape are stacked and go through it at once."""
        operands = [self._operands(value, i) for i in range(self.count)]
        alike: dict[Any, list[int]] = {}
        for i, own in enumerate(operands):
            small = all(math.prod(x.shape) <= _SMALL for x in own if hasattr(x, "shape"))
            key = tuple(tuple(x.shape) or id(x) if hasattr(x, "shape") else x for x in own) if small else i
            alike.setdefault(key, []).append(i)
        made: list[Any] = [None] * self.count
        for places in alike.values():
            first = operands[places[0]]
            if len(places) == 1:
                made[places[0]] = self.rounded(value, function(*first))
                continue
            stacked = [
                self.library.stack([operands[i][k] for i in places]) if getattr(x, "shape", ()) else x
                for k, x in enumerate(first)
            ]
            found = self.rounded(value, function(*stacked))
            for i, array in zip(places, self.library.split(found, len(places)), strict=True):
                made[i] = array
        return made

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function = self.library.matrix[value.op]
        if value.arg is None:
            return function

        def in_dtype(*operands: Any) -> Any:
            return function(*operands, dtype=value.arg)

        return in_dtype

    def random(self, value: Node, i: int, rows: slice | None = None) -> Any:
        """Random numbers of tensor i: a matrix, or some rows of it."""
        draw, *sizes = cast(tuple[Any, ...], value.arg)
        facts, hyper = self.around.facts(i), self.around.hyper(i)
        height, width = (int(evaluate_once(x, hyper, facts, {})) for x in sizes)
        step = self.around.known(value.args[0], self.values[value.args[0]], i)
        step = random.draw_number(step) if isinstance(step, int | float) else step
        position = {
            "seed": self.around.seed, "tensor": self.around.tensor_number(i), "draw": int(draw), "step": step
        }  # fmt: skip
        first, last, _ = (rows or slice(None)).indices(height)
        count = (last - first) * width
        around = self.around
        drawing = Drawing(self.library, value.op, position, around.compute, around.room(i), around.fill_noise)
        return drawing.numbers(first * width, count).reshape(1, last - first, width)

    # Reductions

    def _reduction(self, value: Node) -> Generator[Join, Array, Any]:
        (operand,) = value.args
        letters, level = self._axes(value).letters, str(value.arg)
        found = self.values[operand]
        if not self._is_number(operand):
            removed = set(self._axes(operand).letters) - set(letters)
            axes = tuple(i for i, letter in enumerate("bij") if letter in removed)
            reduced = [self.library.reduce(value.op, x, axes) for x in found]
            if not set(letters) <= {"k", "n"}:
                return reduced
            found = self.library.together(reduced)
        if "n" in letters:
            return found
        numbers = self.library.spread(self.library.cast(found, "float64"), (self.count,))
        groups = self.around.groups
        per_group = "n" not in self._axes(operand).letters
        if per_group:
            _, first = np.unique(groups, return_index=True)
            numbers, groups = self.library.take(numbers, first), groups[first]
        site = self.plan.program.sites[value]
        return (yield Join(site, value.op, level, numbers, groups, self.library, per_group, self.around.owner))


def joined(joins: Sequence[Join]) -> list[Any]:
    """The result of one reduction for each of the launches that take part: a number, or one for each of its values.

    It is reduced by the library of the first, in the order of the launches.
    """
    library, across = joins[0].library, getattr(joins[0].owner, "across", None)
    if joins[0].level == "model":
        total = _total(library, joins)
        if across is not None:
            total = across.total(joins[0].op, library.together([total]))[0]
        return [join.library.numbers(total) for join in joins]
    owners = {id(join.owner): [j for j in joins if j.owner is join.owner] for join in joins}
    by_group = {
        (owner, group): _total(library, [_of_group(join, group) for join in own])
        for owner, own in owners.items()
        for group in np.unique(np.concatenate([j.groups for j in own])).tolist()
    }
    if across is not None:
        by_group = _across_groups(library, joins, by_group)
    return [join.library.numbers(_spread_groups(library, join, by_group)) for join in joins]


def _across_groups(library: Library, joins: Sequence[Join], by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The numbers of groups with what other processes have of them."""
    owners = {id(join.owner): join.owner for join in joins}
    places = {(owner, group): owners[owner].places[group] for owner, group in by_group}
    op, across = joins[0].op, joins[0].owner.across
    found = [library.constant(REDUCTIONS[op].nothing)] * joins[0].owner.group_count
    for key, place in places.items():
        found[place] = by_group[key]
    total = across.total(op, library.together(found))
    return {key: total[place] for key, place in places.items()}


def _spread_groups(library: Library, join: Join, by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The number of each of a launch's values' groups."""
    groups, places = np.unique(join.groups, return_inverse=True)
    return library.take(library.together([by_group[id(join.owner), g] for g in groups.tolist()]), places)


def _of_group(join: Join, group: int) -> Join:
    mine = join.groups == group
    if mine.all():
        return join
    return replace(join, values=join.library.take(join.values, np.flatnonzero(mine)), groups=join.groups[mine])


def _total(library: Library, joins: Sequence[Join]) -> Any:
    """All values in one, launch by launch in their order; what a group has counts once, whoever brings it."""
    op = joins[0].op
    if joins[0].per_group:
        places = {(id(j.owner), g): (j, i) for j in joins for i, g in enumerate(j.groups.tolist())}
        once = [library.numbers(join.library.take(join.values, np.array([i]))) for join, i in places.values()]
        return library.reduce(op, library.together(once))
    total = library.constant(REDUCTIONS[op].nothing)
    for join in joins:
        total = library.arithmetic[REDUCTIONS[op].join](total, library.numbers(join.library.reduce(op, join.values)))
    return total
