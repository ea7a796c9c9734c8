"""Prints kernels with a gradient of noise, made tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.backend.capabilities import Values
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout

from ..common.noise import require_estimate
from .noise_record import BATCH, BATCH_WORDS, COUNT, DIRECTIONS, OFFSET, TILE
from .noise_words import ADDED
from .noise_words import NAMES as NOISE_NAMES
from .random import BLOCKS
from .source import chunks_source, loop
from .stage import StageWriter

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
