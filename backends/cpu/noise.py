"""Noise on the CPU: written into arrays, or computed tile by tile inside kernels in place of a gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.capabilities import Noise, Values
from rulec.compiler.ir import Program
from rulec.compiler.layout import FLOATS, ITEM_SIZE, Layout
from rulec.errors import TensorError
from rulec.kernel.multi_tensor.address import address_of, array_address, element_count
from rulec.kernel.multi_tensor.chunks import Chunks, flat_chunks

from ..common import threads as cpu_threads
from ..common.noise import RECORD, filling, records, require_estimate
from ..common.threads import POLICY, Job
from .machine import ObjectCode, loaded
from .noise_words import ADDED, BATCH, BATCH_WORDS, COUNT, DIRECTIONS, OFFSET, TILE
from .noise_words import NAMES as NOISE_NAMES
from .random import BLOCKS
from .source import chunks_source, loop
from .stage import StageWriter


def fill_noise(out: Any, noise: Noise, offset: int = 0) -> None:
    """Writes elements `offset` and on of the noise into a NumPy array or a PyTorch tensor.

    The array must be dense; its elements count in the order of memory. TensorError for an array with gaps, or of
    another dtype than float32, float64, bfloat16 and float16.
    """
    _run(_kernel(noise, out), out, records([noise], offset, "float64")[None])


def fill_lines(out: Any, noise: Noise, pairs: Sequence[int], offset: int = 0) -> None:
    """Writes the noise of direction `pairs[i]` into line i of a contiguous matrix, as `fill_noise` would.

    `noise` has one weight, used for every line.
    """
    _run(_kernel(noise, out), out, _records(noise, pairs, offset))


def fill_words(
    out: Any, *, seed: int, layer: int, step: int, pairs: Sequence[int], purpose: int = 0, offset: int = 0
) -> None:  # fmt: skip
    """Writes the random words of direction `pairs[i]` into line i of a contiguous matrix of uint32 (torch: or int32).

    The first word of a line belongs to element `offset`.
    """
    if _dtype(out) not in ("uint32", "int32"):
        raise TensorError(f"random words are written into arrays of uint32, not of {_dtype(out)}")
    one = Noise("normal", seed, layer, step, np.ones(1), purpose=purpose)
    _run(_filling("raw", "float32"), out, _records(one, pairs, offset))


def _records(noise: Noise, pairs: Sequence[int], offset: int) -> Any:
    """A line for each direction: a record, and the direction. Lines differ only in the number of the direction."""
    one = records([noise], offset, "float64")[: len(RECORD) + 2]
    lines = np.repeat(one[None], len(pairs), axis=0)
    lines[:, len(RECORD)] = np.asarray(pairs, np.int64) & 0xFFFFFFFF
    return lines


def _kernel(noise: Noise, out: Any) -> ObjectCode:
    """The kernel that fills an array with noise."""
    dtype = _dtype(out)
    if dtype not in FLOATS:
        raise TensorError(f"noise is written into arrays of {', '.join(FLOATS)}, not of {dtype}")
    return _filling(noise.values, dtype)


@functools.cache
def _filling(values: Any, dtype: str) -> ObjectCode:
    return loaded(f"{values}_noise_{dtype}", noisy_source(*filling(dtype), values))


def _dtype(array: Any) -> str:
    return _name(array.dtype)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _run(machine: ObjectCode, out: Any, records: Any) -> None:
    """Runs a kernel that writes equal parts of an array, one from each record."""
    _check_memory(out)
    count, size = len(records), element_count(out)
    if count > 1 and out.shape[0] != count:
        raise TensorError(f"noise of {count} directions needs as many lines, and a matrix has {out.shape[0]}")
    if not size:
        return
    chunks, spans = _chunks(size // count, count)
    lines = np.arange(count)
    first, each = address_of([out])(out), size // count * ITEM_SIZE.get(_dtype(out), 4)
    pointers = np.concatenate([first + each * lines, array_address(records) + records.strides[0] * lines])
    nothing = np.zeros(count, np.int64)
    job = Job()
    job[cpu_threads.SPANS :] = [
        len(spans), array_address(spans), array_address(chunks.table), array_address(pointers),
        count, array_address(nothing), array_address(nothing), 0,
    ]  # fmt: skip
    cpu_threads.run(machine.run, machine.address, job)


@functools.lru_cache(maxsize=256)
def _chunks(size: int, count: int) -> tuple[Chunks, Any]:
    chunks = flat_chunks([size] * count, POLICY)
    return chunks, chunks.spans(tuple(range(count)))


def _check_memory(array: Any) -> None:
    """TensorError where an array cannot be written, is on a device, or has gaps between its elements."""
    if isinstance(array, np.ndarray):
        writable, dense = array.flags.writeable, array.flags.forc
    else:
        writable = array.device.type == "cpu"
        # Any order of its dimensions in memory will do.
        order = sorted(range(array.dim()), key=array.stride, reverse=True)
        dense = array.permute(order).is_contiguous()
    if not writable:
        raise TensorError(
            "the cpu backend writes noise into main memory, which this array is not, or may not be written"
        )
    if not dense:
        raise TensorError(
            f"noise is written into dense arrays, and there are gaps in one of shape {tuple(array.shape)}"
        )


#: The numbers of memory that does not overlap, for LLVM. A rule's parameter has the first, its gradient the second; the
#: sums have the third where the gradient has another dtype.
_GRADIENT, _SUMS = 1, 2

_LOCALS = {"noise", "offset", "gradient", "min", "max"}


def estimate_source(program: Program, layout: Layout, values: Values) -> str:
    """The source of a rule's kernel with noise for its gradient; BackendUnsupported as in `require_estimate`."""
    require_estimate("cpu", program, values)
    return noisy_source(program, layout, values)


def noisy_source(program: Program, layout: Layout, values: str) -> str:
    """The source of such a kernel, also for `raw` noise: the random words of its first direction."""
    write = _TileWriter(program, layout, program.stages[0], NOISE_NAMES | _LOCALS)
    body = [*write.load_lines(), *write.value_lines(), *write.store_lines()]
    lines = [
        *write.address_lines(),
        *write.scalar_lines(),
        *_tile_lines(BATCH[values], f"gradient(noise, first, last - first, {write.at['g']})", body),
    ]
    dtype = layout.dtype("g")
    gradient = _words() if values == "raw" else _gradient(values, dtype)
    title = f"{program.name}: the cpu kernel for {layout.text()}, with a gradient of {values} noise"
    return chunks_source(title, [gradient], lines, 8 * len(program.columns))


class _TileWriter(StageWriter):
    """A stage with its gradient in a tile in the stack."""

    def address(self, name: str) -> str:
        return f"room({TILE * ITEM_SIZE[self.layout.dtype('g')]})" if name == "g" else super().address(name)

    def element(self, name: str, index: str = "i", copy: int = 0) -> str:
        return super().element(name, "i + offset - first" if name == "g" else index, copy)


def _tile_lines(batch: int, make: str, body: Sequence[str]) -> list[str]:
    """The loops over tiles and over a tile's elements; `first` and `last` count elements of the noise."""
    return [
        "noise = word(pointers, tensors + tensor)",
        f"offset = word(noise, {OFFSET})",
        f"for first in range((offset + start) // {batch} * {batch}, offset + stop, {TILE}):",
        f"    last = min(first + {TILE}, offset + stop)",
        *(f"    {line}" for line in [make, *loop("i", "max(first - offset, start)", "last - offset", body)]),
    ]


def _words() -> str:
    """The function that writes a tile of raw words in place of a gradient."""
    return "\n".join([
        "@compiled",
        "def gradient(noise, first, count, gradient_at):",
        '    """Words first..first+count of the first direction."""',
        f"    pair = word(noise + word(noise, {DIRECTIONS}), 0)",
        f"    for batch in range((count + {BATCH_WORDS - 1}) // {BATCH_WORDS}):",
        f"        make_words(gradient_at + {4 * BATCH_WORDS} * batch, noise, pair, first // 4 + {BLOCKS} * batch)",
    ])  # fmt: skip


def _gradient(values: str, dtype: str) -> str:
    """The function that writes a tile of the gradient."""
    total, batch, added = ("float64" if dtype == "float64" else "float32"), BATCH[values], ADDED[values]
    sums, number = ("gradient_at", _GRADIENT) if dtype == total else ("sums_at", _SUMS)
    lines = [
        "@compiled",
        "def gradient(noise, first, count, gradient_at):",
        '    """Elements first..first+count of the gradient: the noise of directions times their weights, in order."""',
        f"    words_at = room({4 * BATCH_WORDS * TILE // batch})",
        *[f"    sums_at = room({TILE * ITEM_SIZE[total]})"] * (dtype != total),
        f"    batches, groups = (count + {batch - 1}) // {batch}, (count + {added - 1}) // {added}",
        f"    for i in range({batch} * batches):",
        f"        store_{total}({sums}, i, {number}, {total}(0.0))",
        f"    directions = noise + word(noise, {DIRECTIONS})",
        f"    for direction in range(word(noise, {COUNT})):",
        "        pair = word(directions, 2 * direction)",
        f"        weight = {total}(number(directions, 2 * direction + 1))",
        "        for batch in range(batches):",
        f"            block = first // {batch // BLOCKS} + {BLOCKS} * batch",
        f"            make_words(words_at + {4 * BATCH_WORDS} * batch, noise, pair, block)",
        "        for i in range(groups):",
        f"            add_{values}({sums}, i, words_at, weight)",
    ]
    if dtype != total:
        value = f"load_{total}(sums_at, i, {_SUMS})"
        value = f"ordinary({value})" if dtype == "bfloat16" else value
        lines += ["    for i in range(count):", f"        store_{dtype}(gradient_at, i, {_GRADIENT}, {value})"]
    return "\n".join(lines)
