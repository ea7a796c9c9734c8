"""Libraries for the computations between stages: arithmetic, reductions and matrix functions on arrays of one kind.

Results of CPU backends go to NumPy. Results of device backends stay on the device, for the tensors' own framework, and
nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rulec.array_api import random
from rulec.array_api.functions import Functions
from rulec.array_api.indices import index_array
from rulec.array_api.reductions import REDUCTIONS
from rulec.array_api.slices import Runs
from rulec.errors import InternalError
from rulec.language.expr.node import Node, Op, walk
from rulec.language.expr.static import DIRECT

Array = np.ndarray[Any, Any]


class Library:
    """Functions on arrays of one kind, on one device; here by an array library's functions `of`, with NumPy's names.

    Numbers of tensors, groups and the model are float64 arrays of one dimension, or none. Vectors and matrices are
    stacks `(batch, rows, cols)`. No function waits for the device, except for decompositions where the framework
    itself waits. Nothing is written here: results are new arrays, or an operand itself. Libraries that write override
    the methods for it.
    """

    of: Functions
    #: The elementwise operations.
    arithmetic: Mapping[Op, Callable[..., Any]]
    #: The matrix functions. Numbers among their operands are Python's where their value is known.
    matrix: Mapping[Op, Callable[..., Any]]

    #: Matrices of so many elements in all go into one stack at most, where they are large; None is without bound.
    most_stacked: int | None = None

    #: Matrices of at most so many elements are worth stacking for every function.
    small = 1 << 14
    #: Matrices of at most so many elements are in stacks between the stages of a step; 0 for every tensor on its own.
    most_in_set = 0

    #: Whether vectors of several tensors are computed in one flat array; and whether `segments` reduces parts of one.
    flattens = False
    joins_segments = False

    _REDUCE: Mapping[Op, str] = {Op.SUM: "sum", Op.MIN: "min", Op.MAX: "max"}

    def several(self, op: Op, operands: Sequence[Sequence[Any]]) -> list[Any]:
        """An elementwise operation on several lists of operands, with a result for each. A device takes one call."""
        return [self.arithmetic[op](*each) for each in operands]

    def adopt(self, capabilities: Any) -> None:
        """Has matrix functions computed by a backend's own kernels, where it has some for this library.

        `capabilities` are the backend's, as `rulec.backend.capabilities` has them.
        """

    def stacks(self, value: Node, operands: Sequence[Any]) -> bool:
        """Whether matrices of such a shape are worth stacking for a matrix function: small ones."""
        return all(math.prod(x.shape) <= self.small for x in operands if hasattr(x, "shape"))

    def stack_size(self, value: Node, shape: Sequence[int], count: int) -> int:
        """How many of `count` tensors, with matrices `(batch, rows, cols)`, go into one stack: all of them."""
        return count

    def constant(self, value: float) -> Any:
        """One number, for arithmetic with arrays."""
        return np.float64(value)

    def numbers(self, values: Any) -> Any:
        """Numbers of NumPy, or an array of another library or device, as an array of this library."""
        return self.of.xp.asarray(values)

    def read(self, array: Any) -> Any:
        """The elements of a stored array, in float32 or float64: the same memory for an array of such a dtype."""
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def write(self, array: Any, values: Any) -> None:
        """Writes values to a stored array, rounded to its dtype. InternalError where arrays are never written."""
        raise InternalError("arrays of this library cannot be written")

    def handed(self, values: Any, dtype: str, copied: bool) -> Any:
        """Values for kernels to read: contiguous, of this dtype, and in new memory where `copied`."""
        return self.cast(values, dtype)

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype; the same array where it has this dtype."""
        return self.of.xp.asarray(values).astype(dtype, copy=False)

    def copy(self, values: Any) -> Any:
        """The same values in new memory; the same array where it is never written."""
        return values

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Values broadcast to a shape, as a view."""
        return self.of.xp.broadcast_to(values, shape)

    def at(self, values: Any, i: int) -> Any:
        """The number of tensor i among numbers of tensors; in arithmetic it takes the dtype of the array."""
        return values[i] if getattr(values, "ndim", 0) else values

    def take(self, values: Any, places: Array) -> Any:
        """The numbers at these places."""
        return values[places]

    def picked(self, values: Any, places: Any) -> Any:
        """The elements of a vector at places that are an array of this library."""
        return values[places]

    def places(self, places: Array) -> Any:
        """Whole numbers as an array of this library, which may be kept for the next time."""
        return places

    def columns(self, table: Any) -> Sequence[Any]:
        """The columns of a table, as views."""
        return [table[:, index] for index in range(table.shape[1])]

    def first_row(self, table: Any) -> Sequence[Any]:
        """The numbers of a table's first row, as arrays without axes."""
        return [table[0, index] for index in range(table.shape[1])]

    def address(self, array: Any) -> int:
        """The address of an array whose memory may move; 0 where nobody moves it."""
        return 0

    def copy_all(self, into: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Writes arrays of one dtype to others of one dtype and of the same shapes, rounded."""
        for one, other in zip(into, arrays, strict=True):
            self.write(one, other)

    def put(self, into: Any, places: Array | slice, values: Any) -> None:
        """Writes numbers, or one, at these places. InternalError where arrays are never written."""
        raise InternalError("arrays of this library cannot be written")

    def together(self, numbers: Sequence[Any]) -> Any:
        """Arrays of one element each, in any shape, as numbers of tensors."""
        return self.of.xp.concatenate([self.cast(self.numbers(x), "float64").reshape(1) for x in numbers])

    def stack(self, matrices: Sequence[Any], dtype: str | None = None) -> Any:
        """Several stacks as one. A library may round them to `dtype`, where that is their first use."""
        return self.of.xp.concatenate([*matrices])

    def in_one(self, arrays: Sequence[Any]) -> Any:
        """Arrays of one shape as one array with an axis more, in new memory."""
        return self.of.xp.stack([*arrays])

    def cut(self, array: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """An array in parts of so many indices of its first axis."""
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def moved(self, array: Any, axes: Sequence[int]) -> Any:
        """The array with its axes in another order."""
        return self.of.xp.transpose(array, axes)

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """The inverse of `stack`, for stacks of equal length."""
        return self.of.xp.split(matrices, count)  # type: ignore[no-any-return]

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Any:
        """A sum, minimum or maximum in float64. Reduced `axes` keep an extent of 1; None is for a single number."""
        values, kept = self.cast(self.numbers(values), "float64"), axes is not None
        axes = tuple(range(values.ndim)) if axes is None else axes
        if not all(values.shape[axis] for axis in axes):
            shape = tuple(1 if i in axes else n for i, n in enumerate(values.shape)) if kept else ()
            return self.of.xp.full(shape, REDUCTIONS[op].nothing, dtype=self.of.xp.float64)
        return getattr(self.of.xp, self._REDUCE[op])(values, axis=axes, keepdims=kept) if axes else values

    def segments(self, op: Op, values: Any, ends: Any) -> Any:
        """Runs of a vector of float64, each reduced to a number. `ends` has the end of each, after a 0.

        The order of adding depends on the length of a run alone. InternalError where `joins_segments` is False.
        """
        raise InternalError("this library does not reduce runs of a vector")

    def empty(self, count: int) -> Any:
        """Memory for `count` numbers of float64."""
        return self.of.xp.empty(count, dtype=self.of.xp.float64)

    def blank(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Memory for an array of this shape, of the dtype of another."""
        return self.of.xp.empty(shape, dtype=like.dtype)

    def join(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays side by side along an axis."""
        return self.of.xp.concatenate([*arrays], axis)

    def product(self, a: Any, b: Any, into: Any = None) -> Any:
        """The product of two stacks of matrices of one dtype; with `into`, it is added to `into` in its memory."""
        product = self.of.matmul(a, b)
        if into is None:
            return product
        into += product
        return into

    def quintic(self, dtype: str, form: str = DIRECT) -> Any:
        """The parts of `newton_schulz` for pieces of a matrix. InternalError where matrices are never in pieces."""
        raise InternalError("matrices of this library are not orthogonalized in pieces")

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Any:
        """Uniform or normal numbers of the language's stream, in float64, from the first of block `block` on.

        A block has four numbers. The `step` of the position may be an array of one number. With several tensors, whose
        numbers are an array of NumPy's, the result has a line for each; then `step` may be a column.
        """
        xp, normal = self.of.xp, op is Op.NORMAL
        words = self._words(count + count % 2 if normal else count, block, **position)
        uniform = (self.cast(words >> 9, "float64") + 0.5) * 2.0**-23
        if not normal:
            return uniform
        lines = tuple(uniform.shape[:-1])
        u = uniform.reshape(*lines, -1, 2)
        radius, angle = xp.sqrt(-2.0 * xp.log(u[..., 0])), 2.0 * math.pi * u[..., 1]
        return xp.stack([radius * xp.cos(angle), radius * xp.sin(angle)], axis=-1).reshape(*lines, -1)[..., :count]

    #: Whether `draws` are by a backend's kernel, which writes them as they are returned.
    draws_by_kernel = False

    def draws(self, op: Op, counts: Sequence[int], position: Mapping[str, Any], dtype: str, first: int = 0) -> Any:
        """Random numbers of several tensors in one vector of a dtype: `counts[i]` of tensor i, from number `first` on.

        The `tensor` of the position is an array of NumPy's, and its `step` one number or an array as for `random`.
        """
        block, before = divmod(first, random.BLOCK)
        lines = self.cast(self.random(op, max(counts) + before, position, block), dtype)
        runs = [(count, len([*alike])) for count, alike in groupby(counts)]
        parts = self.cut(lines, [times for _, times in runs])
        each = [x[:, before : before + count].reshape(-1) for x, (count, _) in zip(parts, runs, strict=True)]
        return each[0] if len(each) == 1 else self.join(each, 0)

    def _words(self, count: int, first: int, *, seed: int, tensor: Any, draw: int, step: Any) -> Any:
        block = self.counted(first, first + (count + 3) // 4)
        at = int(step) if isinstance(step, int | float) else self.cast(step, "int64")
        counter = (block & random.WORD, block >> 32, draw, at & random.WORD)
        several = isinstance(tensor, np.ndarray)
        tensors = self.places(tensor & random.WORD).reshape(-1, 1) if several else tensor & random.WORD
        words = self.of.xp.stack(random.rounds(counter, (seed & random.WORD, tensors)), axis=-1)
        return words.reshape(*((len(tensor),) if several else ()), -1)[..., :count]

    def counted(self, first: int, stop: int) -> Any:
        """The integers from `first` up to `stop`, in 64 bits."""
        return self.of.xp.arange(first, stop, dtype=self.of.xp.int64)

    def index(self, template: Node, operands: Sequence[Any], places: Mapping[str, Runs] | None = None) -> Any:
        """An index of elements in float64: see `index_array`. Operands are Python's numbers where they are known.

        `places` has the local numbers of each letter, in a part of a tensor.
        """
        step = sum(n.op is Op.NAME and str(n.arg).isdigit() for n in walk([template]))
        numbers = [x if hasattr(x, "dtype") else self.constant(float(x)) for x in operands[:step]]

        def counted(letter: str, count: int) -> Any:
            runs = ((0, count),) if places is None else places[letter]
            parts = [self.cast(self.counted(first, stop), "float64") for first, stop in runs or ((0, 0),)]
            return parts[0] if len(parts) == 1 else self.join(parts, 0)

        return index_array(template, [*numbers, *operands[step:]], self.arithmetic, self.constant, counted)

    def hold(self, thing: Any) -> None:
        """Keeps an object for good while a graph is captured: replays of the graph read its memory again."""
