"""The values between the stages of one launch: numbers, vectors, and results of matrix functions.

Numbers of tensors, groups and the model are arrays over the fired tensors, in float64. A vector or a matrix is one
array `(batch, rows, cols)` for each tensor, with 1 for a missing axis. Vectors are in float64, matrices in the compute
dtype. All are arrays of the launch's library. Where the value source has `flats`, vectors of all tensors are the pieces
of one flat array (`rulec.runtime.buckets.flat`), and an operation on them is one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from rulec.array_api.reductions import reduced_to, segments_of, shape_of_letters, spread_from
from rulec.array_api.slices import Pieces, Stacks
from rulec.compiler.ir import COLS, PARTS, ROWS, Axes, Result
from rulec.compiler.matrix import MATRIX
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Kind, Node, Op
from rulec.language.expr.static import settings, statics
from rulec.runtime.buckets.flat import axes_in_flat
from rulec.runtime.buckets.plan import Gap, Projection
from rulec.runtime.buckets.reductions import Join, Joining, Waits
from rulec.runtime.distributed.shards import PartialReduction, Partials
from rulec.runtime.stages.sources import Array, LaunchValues
from rulec.runtime.stages.tiles import Tiles

#: Functions with the same bits for a matrix in a stack as for the matrix alone. Products differ: BLAS has a special
#: routine for a matrix times its own transpose, and takes it only where both are the same memory.
STACKED = frozenset({Op.NEWTON_SCHULZ, Op.QR, Op.EIGH, Op.SINGULAR_VECTORS, Op.INVERSE_ROOT, Op.CHOLESKY})


#: Indices of tensors.
Places = np.ndarray[Any, np.dtype[Any]]


def shapes_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of the arrays among arguments; arrays of one number, and numbers, stand for themselves."""
    return tuple(tuple(x.shape) or id(x) if hasattr(x, "shape") else x for x in arguments)


@dataclass
class GapEvaluator(LaunchValues):
    """Computes the values of one launch, gap by gap.

    `reduced` has the results of its stages' reductions, by name. `spreads` has, by value and axes, flat arrays with
    each element for all elements with more axes.
    """

    reduced: dict[str, Any] = field(default_factory=dict)
    spreads: dict[Node, dict[str, Any]] = field(default_factory=dict)

    def begin(self) -> Joining:
        """Waits for values that all gaps need; a launch without owners waits for nothing."""
        yield from ()

    def work_out(self, gap: Gap) -> Joining:
        """Computes the values of a gap, and drops each after its last use."""
        projection = gap.projection
        yield from self.each(gap.values if projection is None else projection.before, gap.over)
        if projection is not None:
            self._project(projection)
            yield from self.each(projection.after, gap.over)

    def each(self, values: Sequence[Node], over: Mapping[Node, Sequence[Node]]) -> Joining:
        """Computes values one after the other; `over` has the values to drop after each."""
        for value in values:
            self.values[value] = yield from self._value(value)
            for last in over.get(value, ()):
                self.values.pop(last, None)
                self.spreads.pop(last, None)

    def _project(self, projection: Projection) -> None:
        """Computes a projection's reductions, and writes its states."""
        by_tensor = [Tiles(self, projection, i).work_out() for i in range(self.count)]
        for value in projection.reductions:
            reduced = [each[value] for each in by_tensor]
            self.values[value] = self.library.together(reduced) if self.is_number(value) else reduced

    # One value

    def _value(self, value: Node) -> Generator[Waits, Any, Any]:
        kind = value.op.kind
        if kind is Kind.REDUCE:
            return (yield from self._reduction(value))
        if kind is Kind.LEAF:
            return self._leaf(value)
        if kind is Kind.MATRIX:
            return self._matrices(value)
        if kind is Kind.SHAPE:
            return self._spread(value)
        if kind is Kind.RANDOM:
            return [self.random(value, i) for i in range(self.count)]
        function = self.library.arithmetic[value.op]
        if self.is_number(value):
            with np.errstate(all="ignore"):
                return function(*(self.values[a] for a in value.args))
        if self._is_flat(value):
            return self._in_flat(value, function)
        with np.errstate(all="ignore"):
            return self._for_each(value, function)

    def _leaf(self, value: Node) -> Any:
        if value.op is Op.CONST:
            return self.library.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            return self.source.column(value.arg)  # type: ignore[arg-type]
        if value.op is Op.RESULT:
            return self.reduced[str(value.arg)]
        if self.is_number(value):
            return self.source.numbers(str(value.arg or self.source.compute))
        vectors = self.source.vectors_of(str(value.arg))
        return [self.source.matrices(str(value.arg), i) for i in range(self.count)] if vectors is None else vectors

    # Values in flat arrays

    def _is_flat(self, value: Node) -> bool:
        """Whether a value, of operands elementwise, is computed for all tensors at once."""
        if self.source.flats is None or self.plan.in_flat[value] is None or value.op is Op.CHANCE:
            return False
        return not statics(value) and all(
            self.is_number(a) or isinstance(self.values[a], Pieces) for a in value.args
        )  # fmt: skip

    def _in_flat(self, value: Node, function: Callable[..., Array]) -> Pieces:
        letters = self.plan.in_flat[value]
        assert letters is not None
        flat = function(*(self.flat(a, letters) for a in value.args))
        return self._pieces(flat, letters)

    def _pieces(self, flat: Any, letters: str) -> Pieces:
        assert self.source.flats is not None
        return Pieces(flat, self.source.flats.cuts(letters))

    def flat(self, value: Node, letters: str) -> Any:
        """A value as a flat array with more axes; the number itself where all tensors share one."""
        operand, flats = self.values[value], self.source.flats
        assert flats is not None
        if self.is_number(value) and not getattr(operand, "ndim", 0):
            return operand
        known = self.spreads.setdefault(value, {})
        if letters not in known:
            flat = operand.flat if isinstance(operand, Pieces) else operand
            known[letters] = flats.spread(flat, self.plan.in_flat[value] or "", letters)
        return known[letters]

    def _operands(self, value: Node, i: int) -> list[Any]:
        """The operands of a value for tensor i: arrays and numbers. Settings of matrix functions are known numbers."""
        matrices = MATRIX[value.op].matrices if value.op in MATRIX else len(value.args)
        operands = [self._operand(a, i, known=place >= matrices) for place, a in enumerate(value.args)]
        return [*operands, *self.statics(value, i)]

    def _operand(self, value: Node, i: int, known: bool) -> Any:
        operand = self.values[value]
        if not self.is_number(value):
            return operand[i]
        return self.source.known(value, operand, i) if known else self.library.at(operand, i)

    def _for_each(self, value: Node, function: Callable[..., Array]) -> list[Array]:
        return [self.rounded(value, function(*self._operands(value, i))) for i in range(self.count)]

    def _matrices(self, value: Node) -> Sequence[Array]:
        """A matrix function of all tensors."""
        if value.op is Op.EYE:
            return [self.identity(value, i) for i in range(self.count)]
        function = self._matrix_function(value)
        operands = [self._operands(value, i) for i in range(self.count)]
        if value.op in STACKED:
            return self._by_shape(value, function, operands)
        return [self.rounded(value, function(*each)) for each in operands]

    def _by_shape(
        self, value: Node, function: Callable[..., Array], operands: Sequence[list[Any]]
    ) -> Sequence[Array]:  # fmt: skip
        """A matrix function of tensors: one call for each stack of small matrices of equal shape."""
        places = self._alike(value, operands)
        chosen = [[operands[i] for i in each] for each in places]
        if self.source.flats is not None:
            return Stacks([self._in_stack(value, function, x) for x in chosen], places, self.library.split)
        results: dict[int, Array] = {}
        for each, stack in zip(places, chosen, strict=True):
            results |= zip(each, self._stacked(value, function, stack), strict=True)
        return [results[i] for i in range(len(operands))]

    def _alike(self, value: Node, operands: Sequence[list[Any]]) -> list[list[int]]:
        """The indices of tensors whose matrices go into one stack."""
        alike: dict[Any, list[int]] = {}
        for i, arguments in enumerate(operands):
            kind = self._kind(value, arguments)
            alike.setdefault(i if kind is None else kind, []).append(i)
        cuts = [(places, self._stack_size(value, operands[places[0]][0], len(places))) for places in alike.values()]
        return [places[k : k + count] for places, count in cuts for k in range(0, len(places), count)]

    def _stack_size(self, value: Node, operand: Any, count: int) -> int:
        """The number of tensors, of `count` with operands like this one, in one stack: all tensors with numbers."""
        shape = tuple(getattr(operand, "shape", ()))
        return self.library.stack_size(value, shape, count) if len(shape) == 3 else count

    def _kind(self, value: Node, arguments: Sequence[Any]) -> Any:
        """The key of the stack for some matrices; None for matrices that do not go into one."""
        return shapes_of(arguments) if self.library.stacks(value, arguments) else None

    def _stacked(self, value: Node, function: Callable[..., Array], operands: Sequence[list[Any]]) -> Sequence[Array]:
        """A matrix function of equal matrices, in one call."""
        stack = self._in_stack(value, function, operands)
        return [stack] if len(operands) == 1 else self.library.split(stack, len(operands))

    def _in_stack(self, value: Node, function: Callable[..., Array], operands: Sequence[list[Any]]) -> Array:
        """The same, with the results in one stack."""
        first = operands[0]
        if len(operands) == 1:
            return self.rounded(value, function(*first))
        dtype = settings(value).get("dtype")
        stacked = [
            self.library.stack([each[k] for each in operands], dtype) if getattr(x, "shape", ()) else x
            for k, x in enumerate(first)
        ]
        return self.rounded(value, function(*stacked))

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function = self.library.matrix[value.op]
        keywords = settings(value)
        return partial(function, **keywords) if keywords else function

    # Axes of the batch

    def _spread(self, value: Node) -> list[Array]:
        """Values of one axis of the batch, for each matrix; or of fewer axes, for each index of more."""
        if value.op is Op.WIDEN:
            return [self._widened(value, i) for i in range(self.count)]
        part, operands = int(str(value.arg)), self.values[value.args[0]]
        facts = self.source.facts
        return [spread_from(part, x, segments_of(facts(i)), self.library.spread) for i, x in enumerate(operands)]

    def _widened(self, value: Node, i: int) -> Array:
        """A value of tensor i for each index of more axes."""
        axes, facts, hyper = cast(Axes, value.arg), self.source.facts(i), self.source.hyper(i)
        batch, rows, cols = self.source.extents(i)
        extents = {"b": batch, "i": rows, "j": cols, **{str(k): n for k, n in enumerate(segments_of(facts))}}
        for letter, extent, here in (("i", axes.rows, ROWS), ("j", axes.cols, COLS)):
            if extent is not None and extent is not here:
                extents[letter] = int(evaluate_once(extent, hyper, facts, {}))
        operand = self.library.numbers(self._operand(value.args[0], i, known=False))
        return cast(Array, self.library.spread(operand, shape_of_letters(axes.letters, extents)))

    def _for_batch(self, x: Array, i: int) -> Array:
        """A value of tensor i that is kept once for all its matrices, for each of them."""
        return self.library.spread(x, (self.source.extents(i)[0], *x.shape[1:]))  # type: ignore[no-any-return]

    def _reduced_to(self, part: int, op: Op, x: Array, i: int, axes: tuple[int, ...]) -> Array:
        """A reduction within tensor i to an axis of its batch."""
        extents = segments_of(self.source.facts(i))
        return cast(Array, reduced_to(part, x, extents, axes, lambda array, over: self.library.reduce(op, array, over)))

    # Reductions

    def take(self, reduced: Mapping[str, Any], reduces: Sequence[Result]) -> Joining:
        """Takes the reductions of a stage, by name, and completes them over ranks where tensors are sharded."""
        removed = [frozenset("bij") - set(r.axes.letters) for r in reduces]
        whole = yield from self._completed([r.value.op for r in reduces], [reduced[r.name] for r in reduces], removed)
        flats = self.source.flats
        for result, values in zip(reduces, whole, strict=True):
            letters = axes_in_flat(result.axes)
            self.reduced[result.name] = flats.taken(values, letters) if flats and letters else values

    def _completed(
        self, ops: Sequence[Op], values: Sequence[Any], removed: Sequence[frozenset[str]]
    ) -> Generator[Partials, list[Any], list[Any]]:
        """Completes reductions of all tensors, without the axes `removed`, over the ranks with other shards."""
        ways = [(i, peers, places) for i, axes in enumerate(removed) for peers, places in self.source.parted(axes)]
        if not ways:
            return [*values]
        library = self.library
        whole = [[*x] if isinstance(x, list | Pieces) else library.cast(x, "float64") for x in values]
        sent = [PartialReduction(ops[i], self._elements(whole[i], places), peers) for i, peers, places in ways]
        for (i, _, places), numbers in zip(ways, (yield Partials(sent, library)), strict=True):
            whole[i] = self._with_elements(whole[i], places, numbers)
        return whole

    def _elements(self, values: Any, places: Places) -> Any:
        """The elements of the values of some tensors, as one vector in float64."""
        library = self.library
        if isinstance(values, list):
            return library.join([library.cast(values[k], "float64").reshape(-1) for k in places], 0)
        return values if len(places) == self.count else library.take(values, places)

    def _with_elements(self, values: Any, places: Places, elements: Any) -> Any:
        """Values of all tensors, with these elements for some of them: the inverse of `_elements`."""
        if not isinstance(values, list):
            return elements if len(places) == self.count else self._with_numbers(values, places, elements)
        begin = 0
        for k in places:
            shape = tuple(values[k].shape)
            values[k] = elements[begin : (begin := begin + math.prod(shape))].reshape(shape)
        return values

    def _with_numbers(self, numbers: Any, places: Places, others: Any) -> Any:
        """Numbers of all tensors, with others for some of them."""
        order = np.arange(self.count)
        order[places] = self.count + np.arange(len(places))
        return self.library.take(self.library.join([numbers, others], 0), order)

    def _reduction(self, value: Node) -> Generator[Waits, Any, Any]:
        values = yield from self.within(value)
        if not self.is_number(value) or "n" in self.axes(value).letters:
            return values
        numbers = self.library.spread(self.library.cast(values, "float64"), (self.count,))
        groups = self.source.groups
        per_group = "n" not in self.axes(value.args[0]).letters
        if per_group:
            _, first = np.unique(groups, return_index=True)
            numbers, groups = self.library.take(numbers, first), groups[first]
        site = self.plan.program.sites[value]
        return (yield Join(site, value.op, str(value.arg), numbers, groups, self.library, per_group, self.source.owner))

    def within(self, value: Node) -> Generator[Waits, Any, Any]:
        """A reduction within each tensor: complete, or still to be reduced over tensors."""
        (operand,) = value.args
        values = self.values[operand]
        if self.is_number(operand):
            return values
        if value in self.plan.over_repeated:
            values = [self._for_batch(x, i) for i, x in enumerate(values)]
        after = self.plan.in_flat[value]
        if isinstance(values, Pieces) and after is not None:
            return self._reduced_in_flat(value, values, after)
        letters = set(self.axes(value).letters)
        removed = frozenset(self.axes(operand).letters) - letters
        axes = tuple(i for i, letter in enumerate("bij") if letter in removed or (letter == "b" and removed & {*PARTS}))
        part = letters & {*PARTS} if "b" in removed else set()
        if part:
            reduced = [self._reduced_to(int(*part), value.op, x, i, axes) for i, x in enumerate(values)]
        else:
            reduced = [self.library.reduce(value.op, x, axes) for x in values]
        values = self.library.together(reduced) if letters <= {"k", "n"} else reduced
        (values,) = yield from self._completed([value.op], [values], [removed])
        return values

    def _reduced_in_flat(self, value: Node, values: Pieces, after: str) -> Any:
        """A reduction within each tensor of a vector in a flat array: numbers of tensors, or a shorter vector."""
        before = self.plan.in_flat[value.args[0]]
        assert before is not None
        assert self.source.flats is not None
        flat = self.source.flats.reduced(value.op, values, before, after)
        return self._pieces(flat, after) if after else flat
