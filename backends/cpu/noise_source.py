"""Prints kernels that make noise: those that write it as a gradient, and those that use it as one, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.backend.noise import Values
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout

from ..noise import require_estimate
from .noise_record import BATCH, BATCH_WORDS, COUNT, DIRECTIONS, OFFSET, TILE
from .noise_words import ADDED
from .noise_words import NAMES as NOISE_NAMES
from .philox import BLOCKS
from .source import chunks_source, loop
from .stage import StageWriter

#: The numbers by which LLVM is told apart what does not overlap. A rule's parameter has the first, its gradient the
#: second; sums are a table of their own where the gradient has another dtype.
_OUT, _GRADIENT, _SUMS = range(3)

_LOCALS = {"noise", "offset", "gradient", "min", "max"}


def fill_source(values: Values, dtype: str) -> str:
    """The source of the kernel that writes noise into arrays of a dtype."""
    bits = f"load_bits_{dtype}(gradient_at, i + offset - first, {_GRADIENT})"
    lines = [
        "out_at = word(pointers, tensor)",
        f"gradient_at = room({TILE * ITEM_SIZE[dtype]})",
        *_tile_lines(BATCH[values], [_call("gradient_at")], [f"store_bits_{dtype}(out_at, i, {_OUT}, {bits})"]),
    ]
    return chunks_source(f"Noise: the cpu kernel of {values} values for {dtype}", [_gradient(values, dtype)], lines, 0)


def words_source() -> str:
    """The source of the kernel that writes random words, of the first direction of a record."""
    made = f"make_words(words_at + {4 * BATCH_WORDS} * batch, noise, pair, first // 4 + {BLOCKS} * batch)"
    bits = f"load_bits_float32(words_at, i + offset - first, {_GRADIENT})"
    lines = [
        "out_at = word(pointers, tensor)",
        f"words_at = room({4 * TILE})",
        f"pair = word(word(pointers, tensors + tensor), {DIRECTIONS})",
        *_tile_lines(
            BATCH_WORDS,
            loop("batch", "0", f"(last - first + {BATCH_WORDS - 1}) // {BATCH_WORDS}", [made]),
            [f"store_bits_float32(out_at, i, {_OUT}, {bits})"],
        ),
    ]
    return chunks_source("Random words: the cpu kernel", [], lines, 0)


def estimate_source(program: Program, layout: Layout, values: Values) -> str:
    """The source of a rule's kernel whose gradient is noise; BackendUnsupported as `require_estimate` says."""
    require_estimate("cpu", program, values)
    write = _TileWriter(program, layout, program.stages[0], NOISE_NAMES | _LOCALS)
    body = [*write.load_lines(), *write.value_lines(), *write.store_lines()]
    lines = [
        *write.address_lines(),
        *write.scalar_lines(),
        *_tile_lines(BATCH[values], [_call(write.at["g"])], body),
    ]
    title = f"{program.name}: the cpu kernel for {layout.text()}, with a gradient of {values} noise"
    return chunks_source(title, [_gradient(values, layout.dtype("g"))], lines, 8 * len(program.columns))


class _TileWriter(StageWriter):
    """A stage whose gradient is a tile in the stack."""

    def _address(self, name: str) -> str:
        return f"room({TILE * ITEM_SIZE[self.layout.dtype('g')]})" if name == "g" else super()._address(name)

    def _element(self, name: str, index: str = "i") -> str:
        return super()._element(name, "i + offset - first" if name == "g" else index)


def _call(gradient: str) -> str:
    return f"gradient(noise, first, last - first, {gradient})"


def _tile_lines(batch: int, before: Sequence[str], body: Sequence[str]) -> list[str]:
    """The loop over tiles, in which `first` and `last` count elements of the noise, and over a tile's elements."""
    return [
        "noise = word(pointers, tensors + tensor)",
        f"offset = word(noise, {OFFSET})",
        f"for first in range((offset + start) // {batch} * {batch}, offset + stop, {TILE}):",
        f"    last = min(first + {TILE}, offset + stop)",
        *(f"    {line}" for line in [*before, *loop("i", "max(first - offset, start)", "last - offset", body)]),
    ]


def _gradient(values: Values, dtype: str) -> str:
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
        f"    for direction in range(word(noise, {COUNT})):",
        f"        pair = word(noise, {DIRECTIONS} + 2 * direction)",
        f"        weight = {total}(number(noise, {DIRECTIONS + 1} + 2 * direction))",
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
