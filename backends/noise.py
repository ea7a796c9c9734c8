"""What backends that make noise have in common: how it is cut into words, and the rule that stores it as it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.noise import Noise
from rulec.backend.printer import require_elementwise
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.kernel.bucket.address import array_address
from rulec.language.library import parse
from rulec.language.node import Op, walk

Table = np.ndarray[Any, np.dtype[np.int64]]

#: How many elements a block of four words serves.
ELEMENTS: Mapping[str, int] = {"normal": 4, "popcount": 16, "rademacher": 128}

#: Kernels begin at elements that are a multiple of this: where a block of any values begins.
WHOLE = 128


def require_estimate(backend: str, program: Program, values: str) -> None:
    """BackendUnsupported but for a rule of one elementwise stage that reads its gradient and no input, and values that
    there are."""
    stage = require_elementwise(backend, program)
    if values not in ELEMENTS:
        raise BackendUnsupported(backend, f"noise of {values!r}", program.name)
    for buffer in program.buffers:
        if buffer.role == "input":
            raise BackendUnsupported(backend, f"the input {buffer.name!r} beside noise", program.name)
    if not any(n.op is Op.LOAD and n.arg == "g" for n in walk(stage.roots)):
        raise BackendUnsupported(backend, "noise in the place of a gradient that is not read", program.name)


def sum_dtype(layout: Layout) -> str:
    """The dtype in which noise is summed: float64 for a gradient of that, else float32."""
    return "float64" if layout.dtype("g") == "float64" else "float32"


#: The words of a record, which lies where a gradient would: how many bytes behind it directions begin and how many
#: there are, the key, what is added to the upper half of a block's number, the step, and the element that the tensor's
#: first one is.
RECORD = ("directions", "count", "seed", "layer", "high", "step", "offset", "unused")

#: Directions are followed by as many as a kernel may read at once, of weight 0, and make words for in vain.
PADDING = 32


def records(noises: Sequence[Noise], offset: int, dtype: str) -> Table:
    """What a device is given of noises of which tensors begin with element `offset`: their records, then directions.

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
    """Such records in main memory, each a line of one array that has directions behind them."""
    return list(records(noises, offset, "float64")[: len(noises) * len(RECORD)].reshape(-1, len(RECORD)))


class NoiseKernel:
    """A kernel of main memory whose gradients are noise."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (),
        offset: int = 0,
    ) -> NoiseCall:  # fmt: skip
        """A call that takes Noise, of which each tensor begins with element `offset`: in C a multiple of 128."""
        return NoiseCall(self._kernel.bind(params, states, views), offset)


class NoiseCall:
    """A kernel bound to tensors in main memory, called with noise in the place of gradients.

    Each tensor begins with element `offset` of its noise.
    """

    def __init__(self, call: Any, offset: int) -> None:
        self._call, self._offset = call, offset
        call._address = array_address  # of gradients, from here on: they are records

    def __call__(
        self, stage: int, moving: Sequence[Noise], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place: `moving` is the noise of each."""
        lines = record_lines(moving, self._offset)
        written: Written = self._call(stage, lines, rows, scratch, tensors=tensors, stream=stream)
        return written


def _directions(numbers: Table, weights: np.ndarray[Any, Any], dtype: str) -> Table:
    found = np.zeros(2 * (len(numbers) + PADDING), dtype)
    whole = found.view(np.uint32 if dtype == "float32" else np.uint64)
    whole[: 2 * len(numbers) : 2] = numbers & 0xFFFFFFFF
    found[1 : 2 * len(numbers) : 2] = weights
    return found.view(np.int64)


@functools.cache
def filling(dtype: str) -> tuple[Program, Layout]:
    """The rule that stores its gradient as it is, over arrays of this dtype: its estimate fills an array with noise."""
    program = compile(parse("name: Noise\nsummary: A sum of noise as it is.\nstep: p = g\n"))
    return program, layout_for(program, dtype)


def fill(backend: Any, out: Any, noise: Noise, offset: int, **options: Any) -> None:
    """Writes elements `offset` and on of noise into a contiguous array, by a backend's own estimate of `filling`.

    `options` are for the backend, which binds the array.
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
    """An array of one dimension that has so many elements more, of the same kind."""
    if hasattr(out, "new_empty"):
        return out.new_empty(out.numel() + more)
    return np.empty_like(out, shape=out.size + more)
