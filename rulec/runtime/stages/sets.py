"""Sets of equal tensors: on a device their matrices are one stack, and an operation on them is one call.

A set has tensors of one view, small enough that a call for each would take longer than its work. A larger tensor, and
every tensor in main memory, is a set of its own. A value of a set is an array `(tensors * matrices, rows, cols)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np

from rulec.array_api import random
from rulec.array_api.slices import Cuts, Pieces, Stacks
from rulec.compiler.matrix import MATRIX, matrices
from rulec.language.expr.node import Node, Op, is_boolean
from rulec.language.expr.static import UNDIVIDED, settings
from rulec.runtime.buckets.flat import MOST
from rulec.runtime.stages.kept_stacks import KeptStacks
from rulec.runtime.stages.sources import Array, LaunchValues, ValueSource

#: Functions that take a number for each matrix of a stack.
_OF_STACKS = frozenset({Op.TOPK, Op.INVERSE_ROOT, Op.QUANTILE, Op.TAKE})


class Loaded(Sequence[Any]):
    """A buffer of all tensors as matrices, read at the first use: of one tensor, or of a set as a stack."""

    def __init__(self, source: ValueSource, buffer: str) -> None:
        self._source, self._buffer = source, buffer
        self._alone: dict[int, Any] = {}
        self._stacks: dict[int, Any] = {}
        self._kept: dict[str | None, KeptStacks | None] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        if i not in self._alone:
            self._alone[i] = self._source.matrices(self._buffer, i)
        return self._alone[i]

    def stack(self, k: int) -> Any:
        """The matrices of set k: where there are several tensors, in memory that nobody writes in this step."""
        places = self._source.sets[k]
        if len(places) == 1:
            return self[places[0]]
        kept = self.kept()
        if kept is not None:
            return kept.stacks[k]
        if k not in self._stacks:
            self._stacks[k] = self._source.stacked(self._buffer, places)
        return self._stacks[k]

    def kept(self, dtype: str | None = None) -> KeptStacks | None:
        """The stacks of all sets in the compute dtype or another, where they are in memory that stays."""
        if dtype not in self._kept:
            self._kept[dtype] = self._source.stacks_of(self._buffer, dtype)
        return self._kept[dtype]

    def copied(self, copy: Callable[[Any], Any], split: Callable[[Any, int], Sequence[Any]]) -> Stacks:
        """The present values, in memory that nobody writes."""
        sets = self._source.sets
        stacks = [self.stack(k) if len(places) > 1 else copy(self.stack(k)) for k, places in enumerate(sets)]
        return Stacks(stacks, sets, split)


@dataclass
class SetValues(LaunchValues):
    """The values of one launch as operands for sets, and results of sets as values.

    `in_sets` has arrays of sets that were made of values, by value, until the value is dropped.
    """

    in_sets: dict[Node, dict[Any, Any]] = field(default_factory=dict)

    @cached_property
    def sets(self) -> Sequence[Sequence[int]]:
        """The tensors of each set."""
        return self.source.sets

    @cached_property
    def alone(self) -> bool:
        """Whether each tensor is a set of its own."""
        return len(self.sets) == self.count

    @property
    def joins_flat(self) -> bool:
        """Whether matrices of several shapes may lie in one flat array, and be reduced there."""
        return self.source.flats is not None and self.library.joins_segments

    def drop(self, value: Node) -> None:
        """Forgets a value."""
        self.values.pop(value, None)
        self.in_sets.pop(value, None)

    # Operands

    def operands(self, value: Node, k: int, local: Mapping[Node, Any] | None = None) -> list[Any]:
        """The operands of a value for set k: arrays and numbers. Settings of matrix functions are known numbers."""
        count = matrices(value) if value.op in MATRIX else len(value.args)
        narrow = self.numbers_are_narrow(value.args)
        chosen = [
            self.operand(a, k, narrow, local) if place < count else self._known(value.op, a, k)
            for place, a in enumerate(value.args)
        ]
        places = self.sets[k]
        return [
            *(chosen if len(places) == 1 else self._for_batches(chosen, len(places))),
            *self.statics(value, places[0]),
        ]

    def operand(self, value: Node, k: int, narrow: bool = False, local: Mapping[Node, Any] | None = None) -> Any:
        """A value for set k. Numbers of several tensors have one matrix each, where `narrow` in the compute dtype."""
        places, known = self.sets[k], None if local is None else local.get(value)
        if known is not None:
            return known
        operand = self.values[value]
        if self.is_number(value):
            if len(places) == 1:
                return self.library.at(operand, places[0])
            return self._numbers(value, narrow)[k] if getattr(operand, "ndim", 0) else operand
        if len(places) == 1:
            return operand[places[0]]
        whole = operand.stack_with(places) if isinstance(operand, Stacks) else None
        if whole is not None:
            return whole
        if isinstance(operand, Loaded):
            return operand.stack(k)
        stacks = self.in_sets.setdefault(value, {})
        if k not in stacks:
            stacks[k] = self._stack_of(operand, places)
        return stacks[k]

    def _stack_of(self, operand: Sequence[Any], places: Sequence[int]) -> Any:
        if not isinstance(operand, Pieces):
            return self.library.join([operand[i] for i in places], 0)
        shape = operand.cuts.shapes[places[0]]
        starts, size = operand.cuts.starts[list(places)], math.prod(shape)
        if (np.diff(starts) == size).all():
            flat = operand.flat[int(starts[0]) : int(starts[0]) + len(places) * size]
        else:
            flat = self.library.take(operand.flat, (starts[:, None] + np.arange(size)).reshape(-1))
        return flat.reshape(len(places) * shape[0], *shape[1:])

    def numbers_are_narrow(self, operands: tuple[Node, ...]) -> bool:
        """Whether numbers beside these operands take the compute dtype, as one number beside a matrix does."""
        known = self.plan.beside
        if operands not in known:
            others = [a for a in operands if not self.is_number(a)]
            floats = [a for a in others if not is_boolean(a)]
            known[operands] = bool(floats) and all({"i", "j"} <= set(self.axes(a).letters) for a in others)
        return known[operands]

    def _numbers(self, value: Node, narrow: bool) -> Mapping[int, Any]:
        """The numbers of the sets of several tensors, `(tensors, 1, 1)`, by set."""
        stacks = self.in_sets.setdefault(value, {})
        if ("numbers", narrow) not in stacks:
            several = [k for k, places in enumerate(self.sets) if len(places) > 1]
            order = [i for k in several for i in self.sets[k]]
            numbers = self.values[value]
            if order != [*range(self.count)]:
                numbers = self.library.take(numbers, np.array(order, np.int64))
            numbers = self.library.cast(numbers, self.source.compute) if narrow else numbers
            cut = self.library.cut(numbers.reshape(-1, 1, 1), [len(self.sets[k]) for k in several])
            stacks["numbers", narrow] = dict(zip(several, cut, strict=True))
        return cast(Mapping[int, Any], stacks["numbers", narrow])

    def is_one(self, value: Node) -> bool:
        """Whether a value is one number, which all tensors share."""
        return self.is_number(value) and not getattr(self.values[value], "ndim", 0)

    def narrowed(self, value: Node) -> Any:
        """One number of all tensors in the compute dtype, as it is beside matrices."""
        known = self.in_sets.setdefault(value, {})
        if "one" not in known:
            known["one"] = self.library.cast(self.values[value], self.source.compute)
        return known["one"]

    def _known(self, op: Op, value: Node, k: int) -> Any:
        """A number of a matrix function for set k: one, or a list or stack where numbers of tensors differ."""
        places = self.sets[k]
        if not self.is_number(value):
            return self.operand(value, k)
        known = self.numbers_known(value, places)
        if known is not None:
            return known[0] if len({*known}) == 1 else known
        numbers, first = self.values[value], self.source.known(value, self.values[value], places[0])
        if len(places) == 1 or not getattr(numbers, "ndim", 0):
            return first
        if op in _OF_STACKS:
            return self._numbers(value, False)[k]
        return [self.source.known(value, numbers, i) for i in places]

    def numbers_known(self, value: Node, places: Sequence[int]) -> list[Any] | None:
        """The numbers of these tensors where the host knows them."""
        known = []
        for i in places:
            number = self.source.known(value, self.values[value], i)
            if not isinstance(number, int | float):
                return None
            known.append(number)
        return known

    def _for_batches(self, operands: Sequence[Any], count: int) -> list[Any]:
        """Operands of a set of `count` tensors, those with one matrix a tensor for all matrices of the others."""
        arrays = [x for x in operands if getattr(x, "ndim", 0)]
        batch = max((len(x) // count for x in arrays), default=1)
        if all(len(x) == count * batch for x in arrays):
            return [*operands]
        return [self.for_batch(x, count, batch) if getattr(x, "ndim", 0) else x for x in operands]

    def for_batch(self, x: Array, count: int, batch: int) -> Array:
        """A value of `count` tensors that is kept once for all matrices of a tensor, for each of `batch`."""
        sides = tuple(x.shape[1:])
        if count == 1:
            return cast(Array, self.library.spread(x, (batch, *sides)))
        if len(x) == count * batch:
            return x
        return cast(Array, self.library.spread(x.reshape(count, 1, *sides), (count, batch, *sides)).reshape(-1, *sides))

    def kept(self, value: Node, dtype: str | None = None) -> KeptStacks | None:
        """The stacks of a buffer, where they are in memory that stays."""
        operand = self.values.get(value)
        return operand.kept(dtype) if isinstance(operand, Loaded) else None

    def rounded_operand(self, value: Node) -> KeptStacks | None:
        """The stacks of `newton_schulz`, where they are read in the dtype that it rounds them to."""
        keywords = settings(value)
        if value.op is not Op.NEWTON_SCHULZ or self.alone or keywords.get("normalize") == UNDIVIDED:
            return None
        dtype = keywords.get("dtype")
        return None if dtype is None else self.kept(value.args[0], str(dtype))

    # Results

    def of_all_sets(self, value: Node) -> list[Array]:
        """An elementwise value of all sets, in one call where the library has it."""
        shared = {a: self.narrowed(a) for a in value.args if self.numbers_are_narrow(value.args) and self.is_one(a)}
        operands = [self.operands(value, k, shared) for k in range(len(self.sets))]
        return [self.rounded(value, x) for x in self.library.several(value.op, operands)]

    def apply(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """A function of a set's operands; tensor by tensor where a known number differs between them."""
        count = next((len(x) for x in operands if isinstance(x, list)), 0)
        if not count:
            return function(*operands)
        parts = [x if isinstance(x, list) else self._parts(x, count) for x in operands]
        return self.library.join([function(*each) for each in zip(*parts, strict=True)], 0)

    def _parts(self, x: Any, count: int) -> Sequence[Any]:
        return self.library.split(x, count) if getattr(x, "ndim", 0) else [x] * count

    def collected(self, results: Sequence[Any]) -> Sequence[Any]:
        """The results of all sets as one value."""
        return [*results] if self.alone else Stacks(results, self.sets, self.library.split)

    def gathered(self, value: Node, results: Sequence[Any], parts: Sequence[Sequence[int]] | None = None) -> Any:
        """The reductions of all sets as one value: numbers of tensors, vectors in a flat array, or arrays.

        `parts` are the tensors of each result, where they are not those of the sets.
        """
        letters = self.plan.in_flat[value]
        flats = self.source.flats
        if self.is_number(value) or set(self.axes(value).letters) <= {"k", "n"}:
            if self.alone and parts is None:
                return self.library.together(results)
            return self._ordered(results, None, parts or self.sets)
        if flats is None or letters is None:
            return self.collected(results)
        cuts = flats.cuts(letters)
        return Pieces(self._ordered(results, cuts, parts or self.sets), cuts)

    def for_kernels(self, value: Node) -> Any:
        """A value as kernels take it: a vector of sets in one flat array."""
        known = self.values[value]
        if not isinstance(known, Stacks) or not self.plan.in_flat[value] or known.places is not self.sets:
            return known
        return self.gathered(value, known.stacks)

    def _ordered(self, results: Sequence[Any], cuts: Cuts | None, parts: Sequence[Sequence[int]]) -> Any:
        """Results of `parts` in a flat array of float64 in the order of tensors; without `cuts`, of numbers."""
        flat = [self.library.cast(x, "float64").reshape(-1) for x in results]
        joined = flat[0] if len(flat) == 1 else self.library.join(flat, 0)
        order = np.fromiter(chain.from_iterable(parts), np.int64)
        if (order == np.arange(len(order))).all():
            return joined
        sizes = np.ones(self.count, np.int64) if cuts is None else cuts.sizes
        here = sizes[order]
        starts = np.zeros(self.count, np.int64)
        starts[order] = np.cumsum(here) - here
        first = np.cumsum(sizes) - sizes
        return self.library.take(joined, np.arange(int(sizes.sum())) + np.repeat(starts - first, sizes))

    # Reductions

    def reduced_in(self, op: Op, x: Any, axes: tuple[int, ...], count: int) -> Any:
        """The matrices of `count` tensors, each reduced over axes that are kept with an extent of 1.

        Of small matrices the order of adding depends on the number of terms alone, not on the number of tensors.
        """
        library = self.library
        if not library.joins_segments or math.prod(x.shape) > count * library.most_in_set or not axes:
            return library.reduce(op, x, axes)
        extents = (count, len(x) // count, *x.shape[1:])
        last = tuple(axis + 1 for axis in axes)
        kept = tuple(axis for axis in range(4) if axis not in last)
        terms, results = (math.prod(extents[axis] for axis in each) for each in (last, kept))
        runs = library.moved(x.reshape(extents), (*kept, *last)).reshape(-1)
        ends = library.places(np.arange(results + 1) * terms)
        reduced = library.segments(op, library.cast(runs, "float64"), ends)
        shape = tuple(1 if axis in last else n for axis, n in enumerate(extents))
        return reduced.reshape(count * shape[1], *shape[2:])

    # Random numbers

    def draws(self, value: Node, alone: bool = True) -> list[Any]:
        """Random numbers of all tensors, for each set: of sets of several tensors in one pass.

        Unless `alone`, None stands for those of a tensor on its own.
        """
        several = [k for k, places in enumerate(self.sets) if len(places) > 1]
        if self.axes(value).elementwise and any(
            self.source.lines(i) is not None for k in several for i in self.sets[k]
        ):
            return [self.library.join([self.random(value, i) for i in places], 0) for places in self.sets]
        by_set: dict[int, Any] = {}
        for chosen in self._passes(value, several):
            by_set |= self._drawn(value, chosen)
        for k, places in enumerate(self.sets):
            if k not in by_set:
                by_set[k] = self.random(value, places[0]) if alone else None
        return [by_set[k] for k in range(len(self.sets))]

    def _passes(self, value: Node, sets: Sequence[int]) -> list[list[int]]:
        """The sets to draw for in one pass, all of them where they have little to draw, with as many numbers each."""
        if not sets:
            return []
        counts = {k: math.prod(map(int, self.statics(value, self.sets[k][0]))) for k in sets}
        size = max(counts.values()) * sum(len(self.sets[k]) for k in sets)
        return [[*sets]] if size <= MOST else [[k] for k in sets]

    def _drawn(self, value: Node, sets: Sequence[int]) -> dict[int, Any]:
        """Random numbers of some sets, by set."""
        places = [i for k in sets for i in self.sets[k]]
        sides = {k: tuple(map(int, self.statics(value, self.sets[k][0]))) for k in sets}
        counts = [math.prod(sides[k]) for k in sets for _ in self.sets[k]]
        numbers = self.drawn(value, places, counts)
        cut = self.library.cut(numbers, [math.prod(sides[k]) * len(self.sets[k]) for k in sets])
        return {k: x.reshape(len(self.sets[k]), *sides[k]) for k, x in zip(sets, cut, strict=True)}

    def drawn(self, value: Node, places: Sequence[int], counts: Sequence[int]) -> Any:
        """Random numbers of these tensors in one vector, so many of each."""
        position = self.position(value, places[0]) | {"step": self._steps(value, places)}
        position["tensor"] = np.array([self.source.tensor_number(i) for i in places], np.int64)
        return self.library.draws(value.op, counts, position, self.source.compute)

    def _steps(self, value: Node, places: Sequence[int]) -> Any:
        """The numbers of a draw of these tensors, one for all or `(tensors, 1)`."""
        (number,) = value.args
        numbers, known = self.values[number], self.numbers_known(number, places)
        if known is not None:
            steps = [random.draw_number(x) for x in known]
            return steps[0] if len({*steps}) == 1 else self.library.places(np.array(steps, np.int64)).reshape(-1, 1)
        if not getattr(numbers, "ndim", 0):
            return numbers
        return self.library.take(numbers, np.array(places, np.int64)).reshape(-1, 1)
