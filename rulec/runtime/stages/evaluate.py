"""The values between the stages of one launch: numbers, vectors, and results of matrix functions.

Numbers of tensors, groups and the model are arrays over the fired tensors, in float64. A vector or a matrix is one
array `(batch, rows, cols)` for each tensor, with 1 for a missing axis. Vectors are in float64, matrices in the compute
dtype. All are arrays of the launch's library. If the value source has `flats`, vectors of all tensors are the pieces
of one flat array (`rulec.runtime.buckets.flat`), and an operation on them is one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from rulec.array_api.reductions import reduced_to, segments_of, shape_of_letters, spread_from
from rulec.array_api.slices import Pieces, Stacks, Together
from rulec.compiler.ir import COLS, PARTS, ROWS, Axes, Result
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Kind, Node, Op
from rulec.language.expr.static import ORDERS, inside, settings, statics
from rulec.runtime.buckets.flat import ROUNDS, axes_in_flat
from rulec.runtime.buckets.plan import Gap, Projection, Step
from rulec.runtime.buckets.reductions import Join, Joining, Waits
from rulec.runtime.distributed.shards import PartialReduction, Partials
from rulec.runtime.stages.projected import FlatProjection, InFlat, groups_of
from rulec.runtime.stages.sets import Loaded, SetValues
from rulec.runtime.stages.sources import Array
from rulec.runtime.stages.tiles import Tiles

#: Functions with the same bits for a matrix in a stack as for the matrix alone. Products differ: BLAS has a special
#: routine for a matrix times its own transpose, and takes it only where both are the same memory.
STACKED = frozenset({Op.NEWTON_SCHULZ, Op.QR, Op.EIGH, Op.SINGULAR_VECTORS, Op.INVERSE_ROOT, Op.CHOLESKY})


#: Indices of tensors.
Places = np.ndarray[Any, np.dtype[Any]]


def _of_tensors(x: Any, count: int) -> Any:
    """Stacks of the matrices of `count` tensors, with all matrices of a tensor as one."""
    return x.reshape(count, len(x) // count * x.shape[-2], x.shape[-1])


def _of_each(x: Any, count: int) -> Any:
    """The numbers of `count` tensors, each once; other numbers as they are."""
    return x[:: len(x) // count] if getattr(x, "ndim", 0) else x


def shapes_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of the arrays among arguments; arrays of one number, and numbers, stand for themselves."""
    return tuple(tuple(x.shape) or id(x) if hasattr(x, "shape") else x for x in arguments)


@dataclass
class GapEvaluator(SetValues):
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
        for each in self.plan.rounds(tuple(values)):
            if len(each) > 1 and each[0].op.kind is Kind.REDUCE:
                self.values |= zip(each, (yield from self.within(each)), strict=True)
            elif len(each) > 1 and all(map(self._is_flat, each)):
                self._round_in_flat(each)
            else:
                for value in each:
                    self.values[value] = yield from self._value(value)
            for last in chain.from_iterable(over.get(value, ()) for value in each):
                self.drop(last)
                self.spreads.pop(last, None)

    def _project(self, projection: Projection) -> None:
        """Computes a projection's reductions, and writes its states."""
        source = cast(InFlat, self.source)
        groups = groups_of(self, source, projection)
        together = {k for group in groups for k in group}
        rest = [k for k in range(len(self.sets)) if k not in together]
        results = [FlatProjection(self, source, projection, group, self.in_set).work_out() for group in groups]
        results += self._each_projected(projection, rest)
        parts = [*([i for k in group for i in self.sets[k]] for group in groups), *(self.sets[k] for k in rest)]
        for value in projection.reductions:
            each = [reduced[value] for reduced in results]
            self.values[value] = self.gathered(value, each, parts if groups else None)

    def _each_projected(self, projection: Projection, sets: Sequence[int]) -> list[dict[Node, Any]]:
        """Computes a projection set by set. The reductions of each."""
        drawn = [s.value for s in projection.left if s.value.op.kind is Kind.RANDOM] if sets else []
        draws = {value: self.draws(value, False) for value in drawn}
        return [
            Tiles(self, projection, self.sets[k][0]).work_out()
            if len(self.sets[k]) == 1
            else self._project_set(projection, k, {v: by_set[k] for v, by_set in draws.items()})
            for k in sets
        ]

    def _project_set(self, projection: Projection, k: int, local: dict[Node, Any]) -> dict[Node, Any]:
        """Computes a projection of the small matrices of a set as a whole, and writes its states. Its reductions."""
        operands = [replace(step, over=()) for step in (*projection.left, *projection.right)]
        product = Step(projection.product, (), (*(step.value for step in operands),))
        reduced: dict[Node, Any] = {}
        for step in (*operands, product, *projection.steps):
            value = step.value
            if value.op.kind is Kind.REDUCE:
                reduced[value] = self._reduced(value, value.args[0], k, local)
            elif value.op is Op.LOAD:
                local[value] = self.source.stacked(str(value.arg), self.sets[k])
            elif value not in local:
                local[value] = self.in_set(value, k, local)
            for store in step.stores:
                self.source.write_stack(store.buffer, self.sets[k], local[store.value])
            for last in step.over:
                local.pop(last, None)
        return reduced

    # One value

    def _value(self, value: Node) -> Generator[Waits, Any, Any]:
        kind = value.op.kind
        if kind is Kind.REDUCE:
            return (yield from self._reduction(value))
        if kind is Kind.LEAF:
            return self._leaf(value)
        if value.op is Op.QUANTILE or (value.op is Op.TAKE and self.is_number(value)):
            return self.gathered(value, [self._element(value, k) for k in range(len(self.sets))])
        if kind is Kind.MATRIX:
            return self._by_shape(value) if inside(value).op in STACKED else self._for_each(value)
        if kind in (Kind.SHAPE, Kind.RANDOM):
            return self._for_each(value)
        function = self.library.arithmetic[value.op]
        if self.is_number(value):
            with np.errstate(all="ignore"):
                return function(*(self.values[a] for a in value.args))
        return self._in_flat(value, function) if self._is_flat(value) else self._for_each(value)

    def _leaf(self, value: Node) -> Any:
        if value.op is Op.CONST:
            return self.library.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            return self.source.column(value.arg)  # type: ignore[arg-type]
        if value.op is Op.FACT:
            return self.source.fact(str(value.arg))
        if value.op is Op.RESULT:
            return self.reduced[str(value.arg)]
        if self.is_number(value):
            return self.source.numbers(str(value.arg or self.source.compute))
        vectors = self.source.vectors_of(str(value.arg))
        if vectors is not None:
            return vectors
        if self.alone:
            return [self.source.matrices(str(value.arg), i) for i in range(self.count)]
        return Loaded(self.source, str(value.arg))

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

    def _round_in_flat(self, values: Sequence[Node]) -> None:
        """Computes independent values of one operation in one call."""
        letters = [self.plan.in_flat[value] or "" for value in values]
        operands = [[self.flat(a, axes) for a in value.args] for value, axes in zip(values, letters, strict=True)]
        for value, flat, axes in zip(values, self.library.several(values[0].op, operands), letters, strict=True):
            self.values[value] = self._pieces(flat, axes)

    def _pieces(self, flat: Any, letters: str) -> Pieces:
        assert self.source.flats is not None
        return Pieces(flat, self.source.flats.cuts(letters))

    def flat(self, value: Node, letters: str) -> Any:
        """A value as a flat array with more axes; the number itself where all tensors share one."""
        operand, flats = self.values[value], self.source.flats
        assert flats is not None
        if self.is_number(value) and not getattr(operand, "ndim", 0):
            return operand
        lasts = value.op is Op.FACT or (value.op is Op.SCALAR and value.arg in self.plan.columns_of_facts)
        known = flats.lasting(self.plan, value) if lasts else self.spreads.setdefault(value, {})
        if letters not in known:
            flat = operand.flat if isinstance(operand, Pieces) else operand
            known[letters] = flats.spread(flat, self.plan.in_flat[value] or "", letters)
        return known[letters]

    # Values of sets

    def _for_each(self, value: Node) -> Sequence[Array]:
        """A value of all tensors, set by set."""
        if value.op.kind is Kind.RANDOM:
            return self.collected(self.draws(value))
        if value.op in ROUNDS and not self.alone:
            return self.collected(self.of_all_sets(value))
        with np.errstate(all="ignore"):
            return self.collected([self._in_set(value, k, None) for k in range(len(self.sets))])

    def in_set(self, value: Node, k: int, local: Mapping[Node, Any]) -> Any:
        """A value of set k, with its operands from `local` where they are there."""
        with np.errstate(all="ignore"):
            return self._in_set(value, k, local)

    def _in_set(self, value: Node, k: int, local: Mapping[Node, Any] | None) -> Any:
        places = self.sets[k]
        if value.op is Op.EYE:
            one = self.identity(value, places[0])
            return one if len(places) == 1 else self.library.spread(one, (len(places), *one.shape[1:]))
        if value.op is Op.INDEX:
            return self.rounded(value, self._index(value, k, local))
        if value.op.kind is Kind.SHAPE:
            return self._spread(value, k)
        if value.op is Op.TRANSPOSE and len(places) > 1 and local is None:
            kept = self.kept(value.args[0])
            if kept is not None:
                return kept.transposed[k]
        if value.op in ORDERS:
            return self.rounded(value, self._of_order(value, k, local))
        function = self._matrix_function(value) if value.op.kind is Kind.MATRIX else self.library.arithmetic[value.op]
        return self.rounded(value, self.apply(function, self.operands(value, k, local)))

    def _index(self, value: Node, k: int, local: Mapping[Node, Any] | None) -> Array:
        """An index of the tensors of set k, which are of one shape."""
        places, operands = self.sets[k], self.operands(value, k, local)
        if any(self.source.places(i) is not None for i in places[1:]):
            each = [[x[n] if isinstance(x, list) else x for x in operands] for n in range(len(places))]
            arrays = [self.index(value, i, *numbers) for i, numbers in zip(places, each, strict=True)]
            return cast(Array, self.library.join(arrays, 0))
        one = self.apply(partial(self.index, value, places[0]), operands)
        if len(places) == 1 or any(isinstance(x, list) for x in operands):
            return cast(Array, one)
        every = self.library.spread(one[None], (len(places), *one.shape))
        return cast(Array, every.reshape(-1, *one.shape[1:]))

    def _by_shape(self, value: Node) -> Sequence[Array]:
        """A matrix function of tensors: one call for each set, and for each stack of small matrices of equal shape."""
        function, kept = self._matrix_function(value), self.rounded_operand(value)
        stacks_of = {} if kept is None else kept.stacks
        local = [{value.args[0]: stacks_of[k]} if k in stacks_of else None for k in range(len(self.sets))]
        operands = [self.operands(value, k, local[k]) for k in range(len(self.sets))]
        stacks = self._alike(value, operands)
        chosen = [[operands[k] for k in each] for each in stacks]
        if self.alone and self.source.flats is None:
            results: dict[int, Array] = {}
            for each, stack in zip(stacks, chosen, strict=True):
                results |= zip(each, self._stacked(value, function, stack), strict=True)
            return [results[i] for i in range(self.count)]
        places = [self.sets[each[0]] if len(each) == 1 else [self.sets[k][0] for k in each] for each in stacks]
        return Stacks([self._in_stack(value, function, x) for x in chosen], places, self.library.split)

    def _alike(self, value: Node, operands: Sequence[list[Any]]) -> list[list[int]]:
        """The sets of each stack: sets of one tensor each, or one set that is a stack already."""
        alike: dict[Any, list[int]] = {}
        for k, arguments in enumerate(operands):
            kind = self._kind(value, arguments) if len(self.sets[k]) == 1 else None
            alike.setdefault(k if kind is None else kind, []).append(k)
        cuts = [(each, self._stack_size(value, operands[each[0]][0], len(each))) for each in alike.values()]
        return [each[k : k + count] for each, count in cuts for k in range(0, len(each), count)]

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
            return self.rounded(value, self.apply(function, first))
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

    def _element(self, value: Node, k: int) -> Array:
        """A quantile, or an element, within each tensor of set k, in float64."""
        return cast(Array, self.library.cast(self._of_order(value, k), "float64"))

    def _of_order(self, value: Node, k: int, local: Mapping[Node, Any] | None = None) -> Any:
        """A function of the order of elements within each tensor of set k; all matrices of a tensor may be one."""
        operands, keywords = self.operands(value, k, local), settings(value)
        if keywords["per"] != "tensor" or "b" not in self.axes(value.args[0]).letters:
            return self._ordered_in(value, operands, **keywords)
        count, (batch, *_) = len(self.sets[k]), self.source.extents(self.sets[k][0])
        batched = ["b" in self.axes(a).letters for a in value.args]
        wide = [self.for_batch(x, count, batch) if b else x for x, b in zip(operands, batched, strict=True)]
        joined = [_of_tensors(x, count) if b else _of_each(x, count) for x, b in zip(wide, batched, strict=True)]
        result = self._ordered_in(value, joined, **{**keywords, "per": "matrix"})
        return result.reshape(wide[-1].shape) if "b" in self.axes(value).letters else result

    def _ordered_in(self, value: Node, operands: Sequence[Any], **keywords: Any) -> Any:
        with np.errstate(all="ignore"):
            return self.apply(partial(self.library.matrix[value.op], **keywords), operands)

    # Axes of the batch

    def _spread(self, value: Node, k: int) -> Array:
        """A value of one axis of the batch, for each matrix; or of fewer axes, for each index of more."""
        places = self.sets[k]
        if value.op is Op.WIDEN:
            return self._widened(value, k, places)
        segments = segments_of(self.source.facts(places[0]))
        part, operand = int(str(value.arg)), self.operand(value.args[0], k)
        return cast(Array, spread_from(part, operand, segments, self.library.spread))

    def _widened(self, value: Node, k: int, places: Sequence[int]) -> Array:
        """A value of set k for each index of more axes."""
        first, count = places[0], len(places)
        axes, facts, hyper = cast(Axes, value.arg), self.source.facts(first), self.source.hyper(first)
        batch, rows, cols = self.source.extents(first)
        extents = {"b": batch, "i": rows, "j": cols, **{str(k): n for k, n in enumerate(segments_of(facts))}}
        for letter, extent, here in (("i", axes.rows, ROWS), ("j", axes.cols, COLS)):
            if extent is not None and extent is not here:
                extents[letter] = int(evaluate_once(extent, hyper, facts, {}))
        operand, shape = self.library.numbers(self.operand(value.args[0], k)), shape_of_letters(axes.letters, extents)
        if getattr(operand, "ndim", 0):
            operand = self.for_batch(operand, count, shape[0])
        return cast(Array, self.library.spread(operand, (count * shape[0], *shape[1:])))

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
        ways = [
            (i, rank_groups, places)
            for i, axes in enumerate(removed)
            for rank_groups, places in self.source.parted(axes)
        ]
        if not ways:
            return [*values]
        library = self.library
        whole = [[*x] if isinstance(x, list | Together) else library.cast(x, "float64") for x in values]
        sent = [
            PartialReduction(ops[i], self._elements(whole[i], places), rank_groups) for i, rank_groups, places in ways
        ]
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
        (values,) = yield from self.within([value])
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

    def within(self, values: Sequence[Node]) -> Generator[Waits, Any, list[Any]]:
        """Independent reductions within each tensor: complete, or still to be reduced over tensors."""
        here = [self.reduced_here(value) for value in values]
        ops, removed = [value.op for value in values], [axes for _, axes in here]
        return (yield from self._completed(ops, [x for x, _ in here], removed))

    def reduced_here(self, value: Node) -> tuple[Any, frozenset[str]]:
        """A reduction within the local shard of each tensor, and the axes that are reduced there."""
        (operand,) = value.args
        values, after = self.values[operand], self.plan.in_flat[value]
        if self.is_number(operand):
            return values, frozenset()
        if isinstance(values, Pieces) and after is not None and value not in self.plan.over_repeated:
            return self._reduced_in_flat(value, values, after), self._removed(value)
        each = [self._reduced(value, operand, k) for k in range(len(self.sets))]
        return self.gathered(value, each), self._removed(value)

    def _removed(self, value: Node) -> frozenset[str]:
        """The axes of its operand that a reduction has not."""
        return frozenset(self.axes(value.args[0]).letters) - set(self.axes(value).letters)

    def _reduced(self, value: Node, operand: Node, k: int, local: Mapping[Node, Any] | None = None) -> Array:
        """A reduction within each tensor of set k."""
        places, x = self.sets[k], self.operand(operand, k, local=local)
        if value in self.plan.over_repeated:
            x = self.for_batch(x, len(places), self.source.extents(places[0])[0])
        letters, removed = set(self.axes(value).letters), self._removed(value)
        part = letters & {*PARTS} if "b" in removed else set()
        axes = tuple(i for i, letter in enumerate("bij") if letter in removed or (letter == "b" and removed & {*PARTS}))
        if part:
            return self._reduced_to(int(*part), value.op, x, places[0], axes)
        return cast(Array, self.reduced_in(value.op, x, axes, len(places)))

    def _reduced_in_flat(self, value: Node, values: Pieces, after: str) -> Any:
        """A reduction within each tensor of a vector in a flat array: numbers of tensors, or a shorter vector."""
        before, flats = self.plan.in_flat[value.args[0]], self.source.flats
        assert before is not None
        assert flats is not None
        flat = flats.reduced(value.op, values, before, after)
        return self._pieces(flat, after) if after else flat
