"""One bucket's share of a functional step: its stages, the values between them in float64, and increments of 16 bits.

The values between stages are narrower than a parameter. Increments are for users who add them to a parameter of 16
bits, as optax does. The weight has more digits than its parameter. Users add in float32 and round the sum to the
parameter's dtype. A difference of two numbers of 16 bits is exact in float32 where the new one is not below 2**-16 of
the old one (2**-13 in float16), and the sum is then the new parameter. Elsewhere the sum differs from it by less than
an ulp of float32 of the old parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api.bits import words_of
from rulec.compiler.ir import Buffer
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.weights import part_dtypes
from rulec.functional.hyper import PureRows
from rulec.functional.plan import Bucket
from rulec.functional.quantized import Coded, Unbiased, decode, encode
from rulec.functional.step_values import StepValues
from rulec.functional.values import PureFunctions, dtype_name
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import inside
from rulec.language.statistics import PREFIX
from rulec.runtime.buckets.plan import Gap
from rulec.runtime.buckets.reductions import Joining
from rulec.runtime.buckets.scalar_table_device import known_number
from rulec.runtime.stages.evaluate import GapEvaluator

#: Matrix functions that every device has in float32 and narrower.
_ANYWHERE = frozenset({Op.MATMUL, Op.MODE_PRODUCT, Op.GRAM, Op.NEWTON_SCHULZ})


class Gaps(GapEvaluator):
    """The work between stages. Tiles are left to the framework's compiler, and products to the device of elements."""

    def work_out(self, gap: Gap) -> Joining:
        """Computes all values of a gap that are read after it."""
        yield from self.each(gap.values, gap.over)

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function, on_device = super()._matrix_function(value), self.source.step.on_device  # type: ignore[attr-defined]
        if on_device is nullcontext or inside(value).op not in _ANYWHERE:
            return function

        def where_elements_are(*operands: Any) -> Any:
            wide = any(dtype_name(x) == "float64" for x in operands if hasattr(x, "dtype"))
            with nullcontext() if wide else on_device():
                return function(*operands)

        return where_elements_are


class BucketStep:
    """One bucket's share of a step: the loop over its stages, and the value source of the work between them."""

    #: The library draws random numbers.
    fill_noise = None
    #: Each leaf's vectors are arrays of their own.
    flats = None
    gaps: type[Gaps] = Gaps

    def __init__(self, step: StepValues, bucket: Bucket) -> None:
        self.step, self.bucket, self.program = step, bucket, bucket.program
        self.library, self.compute = step.library, bucket.layout.compute
        self.seed, self.owner, self.groups = step.plan.options.seed, step.processes, bucket.group_at
        self.rows = PureRows(bucket, self.library, step.t, step.hyper, self.numbers, self._row_facts)
        self.between = self.gaps(bucket.plan, self)
        self.scratch: dict[str, list[Any]] = {}
        self.vectors: dict[str, list[Any]] = {}
        self.increments: dict[int, Increment] = {}
        self.states = {name: copy(step.old.arrays[name]) for name in step.plan.states_of(bucket, "array")}
        self._decode()
        self._numbers: dict[tuple[int, int], Any] = {}
        #: Each leaf on its own.
        self.sets = [[i] for i in range(len(bucket.places))]

    def __len__(self) -> int:
        return len(self.bucket.places)

    # Scalars

    def column(self, index: int) -> Any:
        """A column of the scalar table, for each leaf or one for all."""
        return self.rows.of_leaves(self.rows.values[self.bucket.table.columns[index]])

    def fact(self, name: str) -> Any:
        """A shape fact, for each leaf."""
        return self.library.numbers(np.array([facts[name] for facts in self.bucket.facts], np.float64))

    def scalars(self, index: int) -> Any:
        """A column of the table as kernels see it: for each row or, where it is late, for each leaf; or one number."""
        value = self.program.columns[index].value
        return self.between.values[value] if self._late(index) else self.rows.values[value]

    def _late(self, index: int) -> bool:
        return index >= len(self.bucket.table.columns)

    def _kernel_scalar(self, index: int, i: int) -> Any:
        """A column as a kernel takes it, for leaf i."""
        column = self.scalars(index)
        at = (i if self._late(index) else int(self.rows.row[i])) if np.ndim(column) else 0
        if (index, at) not in self._numbers:
            self._numbers[index, at] = self.library.cast(column[at] if np.ndim(column) else column, self.compute)
        return self._numbers[index, at]

    def _row_facts(self, i: int) -> dict[str, Any]:
        """The facts of leaf i in the scalar table; its number may be traced."""
        return {**self.bucket.facts[i], **words_of(self.seed, self.tensor_number(i))}

    # Where values between the stages come from

    def known(self, value: Node, numbers: Any, i: int) -> Any:
        """The number of leaf i: Python's where it follows from static hyper-parameters."""
        static = self.bucket.static
        expression = known_number(value, self.program, static, {})
        return self.library.at(numbers, i) if expression is None else float(evaluate_once(expression, static, {}, {}))

    def vectors_of(self, buffer: str) -> None:
        """Returns None: no vector lies in a flat array."""

    def parted(self, axes: frozenset[str]) -> list[Any]:
        """None: the framework's compiler reduces over devices."""
        return []

    def lines(self, i: int) -> None:
        """None, as for `parted`."""

    def places(self, i: int) -> None:
        """None, as for `parted`."""

    def room(self, i: int) -> int:
        """Any number of bytes: the framework's compiler decides how much is alive at once."""
        return sys.maxsize

    def facts(self, i: int) -> Mapping[str, float]:
        """The shape facts of a leaf."""
        return self.bucket.facts[i]

    def extents(self, i: int) -> tuple[int, int, int]:
        """The matrices of a leaf, and their rows and columns."""
        view = self.bucket.views[i]
        return view.batch, view.rows, view.cols

    def hyper(self, i: int) -> Mapping[str, float]:
        """The hyper-parameters of a leaf that are known when the step is traced."""
        return self.bucket.static

    def tensor_number(self, i: int) -> int:
        """The leaf's number in the seed of its random numbers; it may be traced."""
        return self.step.numbers[self.bucket.places[i]]  # type: ignore[no-any-return]

    def numbers(self, buffer: str) -> Any:
        """The value of a buffer of numbers, for each leaf or one for all."""
        plan, old = self.step.plan, self.step.old.numbers
        if buffer in self.step.inputs:
            return self.library.constant(self.step.inputs[buffer]).reshape(())
        numbers = self.library.cast(old[buffer], "float64")
        level = plan.numbers[buffer]
        if level == "model":
            return numbers
        return self.library.take(numbers, self.groups if level == "group" else self._places_among(buffer))

    def _places_among(self, state: str) -> np.ndarray[Any, Any]:
        """The places of this bucket's leaves among all leaves with a state."""
        return np.searchsorted(np.array(self.step.plan.having[state]), np.array(self.bucket.places))

    def matrices(self, buffer: str, i: int) -> Any:
        """A buffer of a leaf as `(batch, rows, cols)`: vectors in float64, matrices in the compute dtype."""
        view, axes = self.bucket.views[i], self.program.buffer(buffer).axes
        array = self.library.read(self.stored(buffer, i))
        array = -array if buffer == "g" and self.bucket.layout.maximize else array
        array = view.matrices(array) if axes.elementwise else view.kept(array, axes.letters)
        return self.library.cast(array, self.compute if {"i", "j"} <= set(axes.letters) else "float64")

    def stacks_of(self, buffer: str, dtype: str | None = None) -> None:
        """Returns None: no leaves are in a stack."""

    def stacked(self, buffer: str, places: Sequence[int]) -> Any:
        """Raises: no leaves are in a stack."""
        raise AssertionError(f"the leaves {places} of {buffer} are in no stack")

    def write_stack(self, buffer: str, places: Sequence[int], stack: Any) -> None:
        """Raises, as `stacked` does."""
        self.stacked(buffer, places)

    def stored(self, buffer: str, i: int) -> Any:
        """A buffer of leaf i as it is stored."""
        place = self.bucket.places[i]
        if buffer == "g":
            return self.step.grads[place]
        if buffer == "p":
            return self.step.params[place]
        if buffer in self.scratch:
            return self.scratch[buffer][i]
        return self.states[buffer][place] if buffer in self.states else self.step.inputs[buffer][place]

    # The loop

    def steps(self) -> Joining:
        """Runs all stages and gaps; yields at each reduction that other buckets share."""
        gaps, last = self.bucket.plan.gaps, len(self.program.stages) - 1
        for index in range(last + 1):
            yield from self.between.work_out(gaps[index])
            for name in self.program.stages[index].vectors:
                self.vectors[name] = self._vectors(name)
            skip_mask = self._skip_mask() if index == last else None
            self.stage(index, skip_mask)
        yield from self.between.work_out(gaps[-1])
        self._measure(skip_mask)
        self._hold_changes(skip_mask)
        self._write_narrow(skip_mask)
        self._encode(skip_mask)
        self._mark()

    def _vectors(self, name: str) -> list[Any]:
        """A result as kernels read it: one of a parameter's shape in the order of its elements in memory."""
        result = self.program.result(name)
        arrays = []
        for array, view in zip(self.between.values[result.value], self.bucket.views, strict=True):
            whole = self.library.cast(self.library.spread(array, self._extents(result.axes, view)), self.compute)
            arrays.append(view.tensor(whole) if result.axes.elementwise else whole)
        return arrays

    @staticmethod
    def _extents(axes: Any, view: Any) -> tuple[int, int, int]:
        return view.batch, 1 if axes.rows is None else view.rows, 1 if axes.cols is None else view.cols

    def _skip_mask(self) -> list[Any] | None:
        """For each leaf whether its step is skipped; None where the rule never skips a step."""
        if self.program.skip is None:
            return None
        skips = self.library.numbers(self.between.values[self.program.skip]) != 0
        skip_mask = [skips[i] if skips.ndim else skips for i in range(len(self))]
        self.step.skip_masks.update(zip(self.bucket.places, skip_mask, strict=True))
        return skip_mask

    def stage(self, index: int, skip_mask: Sequence[Any] | None) -> None:
        """Runs one stage of every leaf, and takes over its stores and reductions."""
        kernel, reduced = self.bucket.kernel, []
        columns = kernel.columns(index)
        results = []
        for i in range(len(self)):
            scalars = [self._kernel_scalar(column, i) for column in columns]
            with self.step.on_device():
                results.append(kernel.stage(index, self.arrays(i), scalars, self.bucket.views[i]))
        for i, (new, reductions) in enumerate(results):
            reduced.append(reductions)
            for buffer, value in new.items():
                self.keep(buffer, i, value, skip_mask)
        for reduction in self.program.stages[index].reduces:
            each = [reductions[reduction.name] for reductions in reduced]
            per_tensor = reduction.axes.number
            self.between.reduced[reduction.name] = self.library.together(each) if per_tensor else each

    def arrays(self, i: int) -> dict[str, Any]:
        """The arrays that a kernel may read for leaf i, by name."""
        place = self.bucket.places[i]
        arrays = {"p": self.step.params[place], "g": self.step.grads[place]}
        arrays |= {name: state[place] for name, state in self.states.items()}
        arrays |= {name: value[place] for name, value in self.step.inputs.items() if isinstance(value, list | tuple)}
        return arrays | {name: of_leaves[i] for name, of_leaves in {**self.scratch, **self.vectors}.items()}

    def keep(self, buffer: str, i: int, value: Any, skip_mask: Sequence[Any] | None) -> None:
        """Takes over a stage's store to a buffer of leaf i."""
        place = self.bucket.places[i]
        if buffer == "p":
            value = self._change(place, value) if self._changes else value
            old = self.step.result(place) if skip_mask is not None else None
            self.step.results[place] = self._unless(skip_mask, i, old, value)
        elif buffer in self.states:
            value = self._unless(skip_mask, i, self.states[buffer][place], value)
            self.step.new.arrays[buffer][place] = value
            self.states[buffer][place] = value
        else:
            self.scratch.setdefault(buffer, [None] * len(self))[i] = value

    @property
    def _changes(self) -> bool:
        """Whether the step computes new parameters, and its users want their changes."""
        return self.step.plan.options.update and bool(self.program.memory.weights)

    def _change(self, place: int, new: Any) -> Any:
        self.increments[place] = increment(new, self.step.params[place], self.library.of)
        return self.increments[place].update

    def _hold_changes(self, skip_mask: Sequence[Any] | None) -> None:
        """Puts beside each parameter what belongs to it after its change is added."""
        for name in part_dtypes(self.program) if self._changes else ():
            old, new = self.step.old.arrays[name], self.step.new.arrays[name]
            for i, place in enumerate(self.bucket.places):
                part = self.increments[place].part(name, new[place], self.library.of)
                new[place] = self._unless(skip_mask, i, old[place], part)

    def _unless(self, skip_mask: Sequence[Any] | None, i: int, old: Any, new: Any) -> Any:
        return new if skip_mask is None else self.library.where(skip_mask[i], old, new)

    # States in codes

    def _decode(self) -> None:
        for state in self._unbiased:
            self.states[state].update((place, self.states[state][place].values) for place in self.bucket.places)
        for state in self.bucket.formats:
            for place, view in zip(self.bucket.places, self.bucket.views, strict=True):
                with self.step.on_device():
                    self.states[state][place] = decode(self.states[state][place], view.shape, self.library.of)

    def _encode(self, skip_mask: Sequence[Any] | None) -> None:
        """Puts codes in the place of the new values; a skipped step keeps the old codes."""
        for state, form in self.bucket.formats.items():
            new, old = self.step.new.arrays[state], self.step.old.arrays[state]
            for i, place in enumerate(self.bucket.places):
                if new[place] is old[place]:
                    continue
                with self.step.on_device():
                    coded = encode(form, new[place], self.library.of).like(old[place])
                codes = self._unless(skip_mask, i, old[place].codes, coded.codes)
                new[place] = Coded(codes, self._unless(skip_mask, i, old[place].scales, coded.scales), form)

    @property
    def _unbiased(self) -> set[str]:
        """The states of the bucket that are rounded at random."""
        return {*self.states} & self.program.memory.unbiased

    def _mark(self) -> None:
        """Says of new values that they are rounded at random."""
        for state in self._unbiased:
            new = self.step.new.arrays[state]
            for place in self.bucket.places:
                new[place] = new[place] if isinstance(new[place], Unbiased) else Unbiased(new[place])

    # Statistics

    def _measure(self, skip_mask: Sequence[Any] | None) -> None:
        """Notes the statistics."""
        values = {store.buffer: store.value for store in self.program.finish}
        for buffer in self.program.statistics:
            self.note(buffer, self.between.values[values[buffer.name]], skip_mask)

    def note(self, buffer: Buffer, value: Any, skip_mask: Sequence[Any] | None) -> None:
        """Notes a statistic of each leaf; NaN where it skips the step."""
        each = self._numbers_of(value) if buffer.axes.number else self._vectors_of(value, buffer)
        of_leaves = self.step.statistics.setdefault(buffer.name.removeprefix(PREFIX), {})
        for i, place in enumerate(self.bucket.places):
            of_leaves[place] = self._unless(skip_mask, i, self.library.constant(float("nan")), each[i])

    def _numbers_of(self, value: Any) -> list[Any]:
        """A number of each leaf."""
        numbers = self.library.spread(self.library.cast(value, "float64"), (len(self),))
        return [numbers[i] for i in range(len(self))]

    def _vectors_of(self, value: Any, buffer: Buffer) -> list[Any]:
        """The rows, columns or matrices of each leaf, in the shape of such a state."""
        shapes = (self.bucket.kept_shape(i, buffer.axes) for i in range(len(self)))
        return [self.library.cast(x, "float64").reshape(shape) for x, shape in zip(value, shapes, strict=True)]

    # What is narrower than a parameter

    def _write_narrow(self, skip_mask: Sequence[Any] | None) -> None:
        measured = {buffer.name for buffer in self.program.statistics}
        for store in self.program.finish:
            if store.buffer in measured:
                continue
            value = self.between.values[store.value]
            if store.buffer in self.states:
                if self.between.is_number(store.value):
                    value = [self.library.at(value, i) for i in range(len(self))]
                self._keep_narrow(store.buffer, value, skip_mask)
            else:
                self._keep_numbers(store.buffer, value, skip_mask)
        for store in self.bucket.table.stores:
            self._keep_numbers(store.buffer, self.rows.of_leaves(self.rows.values[store.value]), skip_mask)

    def _keep_narrow(self, buffer: str, value: Sequence[Any], skip_mask: Sequence[Any] | None) -> None:
        for i, place in enumerate(self.bucket.places):
            old, view = self.states[buffer][place], self.bucket.views[i]
            extents = view.kept_extents(old.shape, self.program.buffer(buffer).axes.letters)
            new = self.library.spread(value[i], extents).reshape(old.shape).astype(old.dtype)
            self.step.new.arrays[buffer][place] = self._unless(skip_mask, i, old, new)

    def _keep_numbers(self, buffer: str, value: Any, skip_mask: Sequence[Any] | None) -> None:
        """Takes over new values of a state of numbers; a group's or the model's number is its first leaf's."""
        level, now = self.step.plan.numbers[buffer], self.step.new.numbers[buffer]
        value = self.library.spread(self.library.numbers(value), (len(self),)).astype(now.dtype)
        if skip_mask is not None:
            old = self.library.spread(self.numbers(buffer), (len(self),)).astype(now.dtype)
            value = self.library.where(self.library.of.xp.stack(list(skip_mask)), old, value)
        if level == "model":
            self.step.new.numbers[buffer] = value[0]
        elif level == "tensor":
            places = self._places_among(buffer)
            whole = len(places) == len(now)
            self.step.new.numbers[buffer] = value if whole else self.library.placed(now, places, value)
        else:
            groups, first = np.unique(self.groups, return_index=True)
            self.step.new.numbers[buffer] = self.library.placed(now, groups, self.library.take(value, first))


@dataclass(frozen=True)
class Increment:
    """`update`, in float32, and for each element whether `parameter + update`, rounded, is not the new parameter."""

    update: Any
    missed: Any

    def part(self, name: str, new: Any, of: PureFunctions) -> Any:
        """The memory of this name beside the parameter after the update.

        A loss or low places belong to one parameter alone. Without them the weight is the parameter itself.
        """
        return new if name == "param::master" else of.xp.where(self.missed, of.xp.zeros_like(new), new)


def increment(new: Any, old: Any, of: PureFunctions) -> Increment:
    """The increment from the old parameter to the new one, both of one dtype of 16 bits."""
    xp = of.xp
    before = old.astype(xp.float32)
    update = of.kept(new).astype(xp.float32) - before
    comes = (before + update).astype(new.dtype)
    return Increment(update, comes.view(xp.uint16) != new.view(xp.uint16))
