"""The sources of a launch's values, and the values computed so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from rulec.array_api import random
from rulec.array_api.library import Library
from rulec.array_api.random import BLOCK
from rulec.array_api.slices import Pieces, Runs
from rulec.backend.capabilities import Noise
from rulec.compiler.indices import is_of_elements, template_of
from rulec.compiler.ir import Axes
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import letters_of, settings, statics
from rulec.runtime.buckets.flat import Flats
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.buckets.reductions import Processes
from rulec.runtime.distributed.process_group import RankGroup
from rulec.runtime.stages.kept_stacks import KeptStacks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tiled:
    """The matrices of a buffer, (batch, rows, cols).

    If reading copies, `copying` makes the elements of a part, and `array` is in its stored dtype. Else `copying` is
    None, and `array` is the library's, in the same memory. `skip_mask`, on the device or None, prevents
    writes.
    """

    array: Any
    library: Library
    compute: str
    copying: Callable[[Any], Any] | None
    skip_mask: Any = None

    def read(self, rows: slice, cols: slice) -> Any:
        """Some rows and columns in the compute dtype; the same memory where `copying` is None."""
        part = self.array[:, rows, cols]
        return part if self.copying is None else self.library.cast(self.copying(part), self.compute)

    def write(self, rows: slice, cols: slice, values: Any) -> None:
        """Writes some rows and columns, rounded to the stored dtype."""
        if self.skip_mask is not None:
            values = self.library.arithmetic[Op.WHERE](self.skip_mask, self.read(rows, cols), values)
        if self.copying is None:
            self.array[:, rows, cols] = values
        else:
            self.library.write(self.array[:, rows, cols], values)


class ValueSource(Protocol):
    """The source of a launch's values, for each fired tensor by its index among them.

    `column` gives a column of the scalar table, and `fact` a shape fact of all tensors. `known` gives a Python number
    where the host knows it, else the result of `Library.at`. `parted` has the indices of sharded tensors, by the rank
    groups that complete a reduction. `lines` has the rows and columns of a local shard of matrices, and `places` by
    letter its matrices too. `extents` are the
    numbers of a tensor's local matrices, rows and columns. `room` gives the bytes allowed for intermediate values.
    `fill_noise` is the backend's, or None. `flats` are the cuts of vectors in flat arrays, or None where each tensor
    has an array; `vectors_of` gives a buffer's flat array, or None in the same way. `sets` has the tensors of each
    stack. `stacks_of` gives a buffer of all sets in memory that stays, or None; `stacked` gives a buffer of a set as a
    stack in new memory, and `write_stack` writes a stack to a state.
    """

    @property
    def groups(self) -> Array: ...
    @property
    def compute(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def owner(self) -> Processes: ...
    @property
    def library(self) -> Library: ...
    @property
    def fill_noise(self) -> Any: ...
    @property
    def flats(self) -> Flats | None: ...
    @property
    def sets(self) -> Sequence[Sequence[int]]: ...

    def __len__(self) -> int: ...
    def column(self, index: int) -> Any: ...
    def fact(self, name: str) -> Any: ...
    def numbers(self, buffer: str) -> Any: ...
    def matrices(self, buffer: str, i: int) -> Array: ...
    def stacks_of(self, buffer: str, dtype: str | None = None) -> KeptStacks | None: ...
    def stacked(self, buffer: str, places: Sequence[int]) -> Array: ...
    def write_stack(self, buffer: str, places: Sequence[int], stack: Any) -> None: ...
    def vectors_of(self, buffer: str) -> Pieces | None: ...
    def room(self, i: int) -> int: ...
    def facts(self, i: int) -> Mapping[str, float]: ...
    def extents(self, i: int) -> tuple[int, int, int]: ...
    def hyper(self, i: int) -> Mapping[str, float]: ...
    def tensor_number(self, i: int) -> int: ...
    def known(self, value: Node, numbers: Any, i: int) -> Any: ...
    def parted(self, axes: frozenset[str]) -> list[tuple[tuple[RankGroup, ...], Array]]: ...
    def lines(self, i: int) -> tuple[Runs, Runs] | None: ...
    def places(self, i: int) -> Mapping[str, Runs] | None: ...


class InTiles(ValueSource, Protocol):
    """A value source with matrices and states for reading and writing tile by tile.

    `writes` is called before a state is written.
    """

    def tiled(self, buffer: str, i: int) -> Tiled: ...
    def writes(self) -> None: ...


@dataclass
class LaunchValues:
    """The values of one launch so far. The `narrow` ones stay in the dtype that their function rounds to."""

    plan: Plan
    source: ValueSource
    values: dict[Node, Any] = field(default_factory=dict)
    narrow: frozenset[Node] = frozenset()

    def __post_init__(self) -> None:
        self.library = self.source.library

    @property
    def count(self) -> int:
        """The number of fired tensors."""
        return len(self.source)

    def axes(self, value: Node) -> Axes:
        """The axes of a value: tensors, matrices, rows, columns."""
        return self.plan.axes[value]

    def is_number(self, value: Node) -> bool:
        """Whether a value is a number of each tensor, of each group or of the model."""
        return value in self.plan.numbers

    def rounded(self, value: Node, result: Any) -> Array:
        """A result in its dtype: the compute dtype for a matrix, float64 for a vector."""
        return cast(Array, self.library.cast(result, self.source.compute) if self.is_rounded(value) else result)

    def is_rounded(self, value: Node) -> bool:
        """Whether a result is in the compute dtype."""
        return value in self.plan.matrices and value not in self.narrow

    def statics(self, value: Node, i: int) -> list[float]:
        """The static operands of an operation, for tensor i."""
        wanted = statics(value)
        if not wanted:
            return []
        facts, hyper = self.source.facts(i), self.source.hyper(i)
        return [float(evaluate_once(x, hyper, facts, {})) for x in wanted]

    def identity(self, value: Node, i: int) -> Any:
        """An identity matrix in the compute dtype, made where the arrays are."""
        places = self.library.counted(0, int(self.statics(value, i)[0]))
        return self.library.cast((places[:, None] == places[None, :])[None], self.source.compute)

    def index(self, value: Node, i: int, *operands: Any) -> Any:
        """An index of tensor i in float64, made where the arrays are: a matrix once for a batch, a vector for each.

        `operands` are as for `rulec.array_api.indices.index_array`.
        """
        template = template_of(value)
        places = self.source.places(i) if is_of_elements(value) else None
        array, letters = self.library.index(template, operands, places), letters_of(template)
        batch = self.source.extents(i)[0]
        matrix = {"i", "j"} <= {*letters} or "b" in letters
        return array if matrix else self.library.spread(array, (batch, *array.shape[1:]))

    def random(self, value: Node, i: int, rows: slice | None = None) -> Any:
        """Random numbers of tensor i: a matrix, or some rows of it."""
        height, width = map(int, self.statics(value, i))
        step = self.source.known(value.args[0], self.values[value.args[0]], i)
        step = random.draw_number(step) if isinstance(step, int | float) else step
        source, position = self.source, self.position(value, i) | {"step": step}
        drawing = RandomMatrix(self.library, value.op, position, source.compute, source.room(i), source.fill_noise)
        lines = source.lines(i) if self.axes(value).elementwise else None
        if lines is not None:
            return drawing.matrix(*lines, width)
        first, last, _ = (rows or slice(None)).indices(height)
        return drawing.matrix(((first, last),), ((0, width),), width)

    def position(self, value: Node, i: int) -> dict[str, Any]:
        """The place of tensor i's draws in the random stream, except for the step."""
        number = self.source.tensor_number(i)
        return {"seed": self.source.seed, "tensor": number, "draw": int(settings(value)["draw"])}


#: Bytes of room for each number during the work: of a backend's kernel, in float64 and then in another dtype; and of a
#: library, with more values on the way.
_BY_KERNEL, _BY_LIBRARY = 14, 64

#: The least count of numbers in one piece, and the count in some rows of which a few columns are taken.
_LEAST, _BAND = 4096, 1 << 18

_ONE = np.ones(1)
_WORD = 0xFFFFFFFF


class Draw(Noise):
    """A rule's draw as noise for a backend's `fill_noise`: one direction, with the draw's number."""

    @property
    def key(self) -> tuple[int, int]:
        """The key of the generator for a rule's streams, without the bit that marks perturbations."""
        return self.seed & _WORD, self.layer & _WORD


@dataclass(frozen=True)
class RandomMatrix:
    """One draw of a tensor at a step.

    `room` is the bytes allowed on the way. `fill` is the backend's `fill_noise`, or None. A library with a kernel for
    draws does not need it.
    """

    library: Library
    op: Op
    position: Mapping[str, Any]
    dtype: str
    room: int
    fill: Callable[[Any, Noise, int], None] | None

    def numbers(self, first: int, count: int) -> Any:
        """`count` numbers of the draw from the position `first` on, computed in float64, piece by piece."""
        draw = self._draw()
        each = _BY_LIBRARY if draw is None and not self.library.draws_by_kernel else _BY_KERNEL
        size = max(self.room // each, _LEAST) // BLOCK * BLOCK
        stop = first + count
        parts = [self._part(draw, at, min(at + size, stop)) for at in range(first, max(stop, first + 1), size)]
        return parts[0] if len(parts) == 1 else self.library.join(parts, 0)

    def matrix(self, rows: Runs, cols: Runs, width: int) -> Any:
        """The numbers in some rows and columns of a draw of a matrix `width` wide: `(1, rows, cols)`."""
        height, wide = (sum(stop - first for first, stop in runs) for runs in (rows, cols))
        if not height or not wide:
            parts = [self.numbers(0, 0)]
        elif cols == ((0, width),):
            parts = [self.numbers(first * width, (stop - first) * width) for first, stop in rows]
        elif height == 1 or wide >= _LEAST:
            each = [row for first, stop in rows for row in range(first, stop)]
            parts = [self.numbers(row * width + first, stop - first) for row in each for first, stop in cols]
        else:
            parts = [part for first, stop in rows for part in self._columns(first, stop, cols, width)]
        return (parts[0] if len(parts) == 1 else self.library.join(parts, 0)).reshape(1, height, wide)

    def _columns(self, first: int, stop: int, cols: Runs, width: int) -> Iterator[Any]:
        """The numbers in some columns of a few whole rows at a time, row by row."""
        band = max(1, _BAND // width)
        for at in range(first, stop, band):
            count = min(band, stop - at)
            whole = self.numbers(at * width, count * width).reshape(count, width)
            chosen = [whole[:, begin:end] for begin, end in cols]
            yield (chosen[0] if len(chosen) == 1 else self.library.join(chosen, 1)).reshape(-1)

    def _draw(self) -> Draw | None:
        """The draw for the backend's kernel; None where it has no such kernel or the host does not know the step."""
        step = self.position["step"]
        if self.fill is None or self.op is not Op.NORMAL or not isinstance(step, int | float):
            return None
        if self.library.draws_by_kernel:
            return None
        seed, tensor, number = (self.position[key] for key in ("seed", "tensor", "draw"))
        return Draw("normal", seed, tensor, int(step), _ONE, first=number)

    def _part(self, draw: Draw | None, first: int, stop: int) -> Any:
        if draw is not None and self.fill is not None:
            numbers = self.library.empty(stop - first)
            self.fill(numbers, draw, first)
            return self.library.cast(numbers, self.dtype)
        if self.library.draws_by_kernel:
            position = {**self.position, "tensor": np.array([self.position["tensor"]], np.int64)}
            return self.library.draws(self.op, [stop - first], position, self.dtype, first)
        block, before = divmod(first, BLOCK)
        numbers = self.library.random(self.op, stop - first + before, self.position, block)
        return self.library.cast(numbers[before:], self.dtype)
