"""Noise in backends: its division into words of random bits, its records in memory, and the rule that fills an array.

On a device, calls with noise in place of gradients send the records of the noise to the device first. Normal numbers
follow Box and Muller's method. Its constants are the same in C, CUDA C and Triton, and so are the bits of the numbers.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.capabilities import Noise
from rulec.backend.printer import require_elementwise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, has_chance, layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.kernel.multi_tensor.address import array_address
from rulec.kernel.multi_tensor.call import AddressedCall, Needs
from rulec.language.expr.node import Op, walk
from rulec.language.library.load import parse

from .text import polynomial

Table = np.ndarray[Any, np.dtype[np.int64]]

#: The number of elements for which a block of four words has bits.
ELEMENTS: Mapping[str, int] = {"normal": 4, "popcount": 16, "rademacher": 128}

#: Kernels begin at multiples of this many elements, where blocks of all kinds of values begin.
WHOLE = 128


def require_estimate(backend: str, program: Program, values: str) -> None:
    """Checks that a kernel can compute the gradient of a program from noise of the kind `values`.

    BackendUnsupported for an unknown kind, and for a rule of several stages, with inputs, or without the gradient.
    """
    stage = require_elementwise(backend, program)
    if values not in ELEMENTS:
        raise BackendUnsupported(backend, f"noise of {values!r}", program.name)
    for buffer in program.buffers:
        if buffer.role == "input":
            raise BackendUnsupported(backend, f"the input {buffer.name!r} beside noise", program.name)
    if has_chance(program):
        raise BackendUnsupported(backend, "stochastic rounding beside noise", program.name)
    if not any(n.op is Op.LOAD and n.arg == "g" for n in walk(stage.roots)):
        raise BackendUnsupported(backend, "noise in the place of a gradient that is not read", program.name)


def sum_dtype(layout: Layout) -> str:
    """The dtype for sums of noise: float64 for a float64 gradient, else float32."""
    return "float64" if layout.dtype("g") == "float64" else "float32"


#: The words of a record, in the place of a gradient. `directions` is the distance in bytes from the record to the first
#: direction, `count` their number. `seed` and `layer` are the key, `high` is added to the upper half of a block's
#: number, `step` is the step, and `offset` the place of the tensor's first element in the noise.
RECORD = ("directions", "count", "seed", "layer", "high", "step", "offset", "unused")

#: The number of directions of weight 0 after the others: a kernel may read this many at once.
PADDING = 32


def records(noises: Sequence[Noise], offset: int, dtype: str) -> Table:
    """A table for a device: a record for each noise, then the directions. Tensors begin at element `offset` of noise.

    A direction is its number and its weight in `dtype`, each of as many bytes. Noises of the same weights share them.
    """
    lines: list[int] = []
    parts: list[Table] = []
    known: dict[tuple[int, int], tuple[int, int]] = {}
    end = len(noises) * len(RECORD)
    for noise in noises:
        which = id(noise.weights), noise.first
        if which not in known:
            numbers, weights = noise.counted
            parts.append(_directions(numbers, weights, dtype))
            known[which] = end, len(numbers)
            end += parts[-1].size
        start, count = known[which]
        behind = 8 * (start - len(lines))
        lines += [behind, count, *noise.key, noise.high, noise.step & 0xFFFFFFFF, offset, 0]
    return np.concatenate([np.array(lines, np.int64), *parts])


def record_lines(noises: Sequence[Noise], offset: int) -> list[Table]:
    """The records in main memory, each a line of one array; the directions follow in the same array."""
    return list(records(noises, offset, "float64")[: len(noises) * len(RECORD)].reshape(-1, len(RECORD)))


class NoiseKernel:
    """A kernel for arrays in main memory, with noise in place of gradients."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (),
        offset: int = 0,
    ) -> NoiseCall:  # fmt: skip
        """A call with Noise for gradients. A tensor begins at element `offset` of its noise, in C a multiple of 128."""
        return NoiseCall(self._kernel.bind(params, states, views), offset)


class NoiseCall:
    """A kernel bound to tensors in main memory, called with noise in place of gradients.

    Each tensor begins at element `offset` of its noise.
    """

    def __init__(self, call: Any, offset: int) -> None:
        self._call, self._offset = call, offset
        call._address = array_address  # the address of a gradient, which is a record here

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place. `moving` is the noise of each."""
        lines = record_lines(moving, self._offset)
        written: Written = self._call(stage, lines, rows, scratch, tensors=tensors, stream=stream)
        return written


def _directions(numbers: Table, weights: np.ndarray[Any, Any], dtype: str) -> Table:
    pairs = np.zeros(2 * (len(numbers) + PADDING), dtype)
    whole = pairs.view(np.uint32 if dtype == "float32" else np.uint64)
    whole[: 2 * len(numbers) : 2] = numbers & 0xFFFFFFFF
    pairs[1 : 2 * len(numbers) : 2] = weights
    return pairs.view(np.int64)


@functools.cache
def filling(dtype: str) -> tuple[Program, Layout]:
    """The rule `p = g` for arrays of a dtype: with noise as its gradient it fills an array with noise."""
    program = compile(parse("name: Noise\nsummary: A sum of noise as it is.\nstep: p = g\n"))
    return program, layout_for(program, dtype)


def fill(backend: Any, out: Any, noise: Noise, offset: int, **options: Any) -> None:
    """Writes elements `offset` and on of noise into a contiguous array, with a backend's kernel for `filling`.

    `options` are keywords for the kernel's `bind`.
    """
    before = offset % WHOLE
    whole = out if not before else _longer(out, before)
    program, layout = filling(str(out.dtype).removeprefix("torch."))
    source = backend.emit_estimate(program, layout, noise.values)
    kernel = backend.build_estimate(program, layout, noise.values, source)
    call = kernel.bind([whole], [{}], offset=offset - before, **options)
    call(0, [noise], Rows(np.zeros((1, 0)), np.zeros(1, np.int64)))
    if before:
        out[...] = whole[before:].reshape(out.shape)


def _longer(out: Any, more: int) -> Any:
    """A new array of one dimension with `more` elements more, of the same library, dtype and device."""
    if hasattr(out, "new_empty"):
        return out.new_empty(out.numel() + more)
    return np.empty_like(out, shape=out.size + more)


class RecordsCall(AddressedCall[Needs]):
    """A call with noise in place of gradients, summed in `_dtype`. A tensor begins at element `_offset` of noise."""

    _offset: int
    _dtype: str
    _records_at: int

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place. `moving` is the noise of each."""
        self._records_at = self._sent(records(moving, self._offset, self._dtype), stream)
        return super().__call__(stage, moving, rows, scratch, tensors=tensors, stream=stream)

    def _addresses(self, moving: Sequence[Any]) -> Sequence[int]:
        record = 8 * len(RECORD)
        return range(self._records_at, self._records_at + record * len(moving), record)

    @abstractmethod
    def _sent(self, table: Table, stream: Any) -> int:
        """Copies a table of records to the device. Its address there."""


#: (log(1 + f) - f + f**2/2)/f**3 for f from sqrt(1/2) - 1 to sqrt(2) - 1, at Chebyshev's points: good to 2**-27.
_LOG = (
    0.3333333134651184, -0.2499999701976776, 0.20000715553760529, -0.1666780263185501, 0.14249058067798615,
    -0.12425687164068222, 0.11685419827699661, -0.11479733884334564, 0.06971611827611923,
)  # fmt: skip


def normal_marks(wide: bool, number: Callable[[float], str]) -> Mapping[str, str]:
    """The parts of the method's text by mark, in float64 where `wide`; `number` prints a constant.

    They are polynomials of `f` or `square`, the size of a cell of uniform numbers, and the angle of a cell.
    """
    # As many terms of the series, beside the first, as an eighth of a turn needs.
    sines, cosines = (8, 9) if wide else (4, 5)
    sine = ((-1) ** n / math.factorial(2 * n + 1) for n in range(1, sines + 1))
    cosine = ((-1) ** n / math.factorial(2 * n) for n in range(1, cosines + 1))

    def printed(name: str, terms: Iterable[float]) -> str:
        return polynomial(name, [*map(number, terms)])

    return {
        "<log>": printed("f", _LOG), "<sine>": printed("square", sine), "<cosine>": printed("square", cosine),
        "<cell>": number(2.0**-23), "<angle>": number(2 * math.pi * 2.0**-23),
    }  # fmt: skip
