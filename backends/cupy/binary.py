"""Binary layers on a GPU, for CuPy's arrays: CUDA C, compiled by NVRTC.

The printed source has products of packed bits in tiles, draws of them, and their weighted sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rulec.backend.capabilities import Window

from ..common.binary import PackedBits
from ..common.text import filled
from ..cstyle.noise_words import DRAW, draw_words
from .memory import Modules


class CupyBinary(PackedBits):
    """The kernels for CuPy's arrays, of the modules of their source; they run in CuPy's current stream."""

    def __init__(self, modules: Modules) -> None:
        import cupy

        super().__init__(cupy)
        self._modules = modules

    def _multiply(self, inputs: Any, weights: Any, results: Any, window: Window) -> None:
        rows = window.samples * window.out[0] * window.out[1]
        tiles = -(-rows // SIDE), -(-window.outputs // SIDE)
        sizes = (window.samples, *window.size, window.words, window.bits, window.outputs, *window.kernel)
        numbers = (*sizes, *window.stride, *window.padding, *window.out, *tiles)
        self._launch("multiply_bits", window.members * math.prod(tiles), (inputs, weights, results), numbers)

    def _draw(self, thresholds: Any, results: Any, numbers: Mapping[str, int]) -> None:
        sizes = [numbers[name] for name in DRAW]
        self._launch("draw_bits", -(-results.size // THREADS), (thresholds, results), sizes)

    def _add(self, words: Any, weights: Any, sums: Any, numbers: Mapping[str, int]) -> None:
        sizes = numbers["members"], numbers["total"]
        self._launch("add_bits", -(-sums.size // THREADS), (words, weights, sums), sizes)

    def _launch(self, name: str, blocks: int, arrays: Sequence[Any], sizes: Sequence[int]) -> None:
        """A kernel over arrays of the current device."""
        kernel = self._modules.functions("binary layers", arrays[0].device.id)(name)
        kernel((blocks,), (THREADS,), (*(int(a.data.ptr) for a in arrays), *map(int, sizes)))


#: A block of threads computes a square tile of results, each thread a small square of `SQUARE` by `SQUARE` of them.
#: It takes `DEEP` words at a time.
SIDE, SQUARE, DEEP = 64, 4, 16
THREADS = (SIDE // SQUARE) ** 2

#: The sizes of a product, after its addresses; all in the order height, width.
PRODUCT = (
    "samples", "height", "width", "words", "bits", "outputs", "kernel_height", "kernel_width", "stride_y", "stride_x",
    "padding_y", "padding_x", "out_height", "out_width", "row_tiles", "column_tiles",
)  # fmt: skip


def source() -> str:
    """The source: kernels `multiply_bits`, `draw_bits` and `add_bits`."""
    parts = {
        "<draw>": draw_words("__device__ inline"), "<draw fields>": ", ".join(DRAW),
        "<draw arguments>": ", ".join(f"int64_t {name}" for name in DRAW),
        "<product>": ", ".join(PRODUCT), "<product arguments>": ", ".join(f"int64_t {name}" for name in PRODUCT),
        "<side>": SIDE, "<square>": SQUARE, "<deep>": DEEP, "<threads>": THREADS,
    }  # fmt: skip
    return filled(_TEXT, parts)


_TEXT = """\
/* Binary layers: packed bits are multiplied, drawn and added up, of all members of a population. Printed by rulec. */
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;

// The sizes of a convolution. A row of the results is a sample and a position, a place is a word of the kernel.
struct Product {
    int64_t <product>;

    __device__ int64_t positions() const { return out_height * out_width; }
    __device__ int64_t rows() const { return samples * positions(); }
    __device__ int64_t places() const { return kernel_height * kernel_width * words; }
};

// Where the kernel of a row begins in the images of all samples of a member: maybe outside its own.
struct Place {
    int64_t sample, y, x;
};

__device__ inline Place place_of(const Product &p, int64_t row)
{
    const int64_t position = row % p.positions();
    const int64_t y = position / p.out_width, x = position % p.out_width;
    return {row / p.positions(), y * p.stride_y - p.padding_y, x * p.stride_x - p.padding_x};
}

// A word of the inputs, and all bits set where it is inside them: what is outside counts for nothing.
struct Masked {
    uint64_t word, inside;
};

__device__ inline Masked find(const Product &p, const uint64_t *inputs, int64_t row, int64_t place)
{
    if (row >= p.rows() || place >= p.places())
        return {0, 0};
    const Place first = place_of(p, row);
    const int64_t tap = place / p.words;
    const int64_t y = first.y + tap / p.kernel_width, x = first.x + tap % p.kernel_width;
    if (y < 0 || y >= p.height || x < 0 || x >= p.width)
        return {0, 0};
    const int64_t line = (first.sample * p.height + y) * p.width + x;
    return {inputs[line * p.words + place % p.words], ~(uint64_t)0};
}

// How many of `count` places from `first` on are inside `size`.
__device__ inline int64_t overlap(int64_t first, int64_t count, int64_t size)
{
    const int64_t begin = first < 0 ? 0 : first, end = first + count < size ? first + count : size;
    return end > begin ? end - begin : 0;
}

// The bits of a row's kernel that are inside the inputs.
__device__ inline int64_t bits_of(const Product &p, int64_t row)
{
    const Place first = place_of(p, row);
    return overlap(first.y, p.kernel_height, p.height) * overlap(first.x, p.kernel_width, p.width) * p.bits;
}

// A tile of the products of one member: equal bits less different ones.
extern "C" __global__ void __launch_bounds__(<threads>) multiply_bits(
    const uint64_t *inputs, const uint64_t *weights, int *results, <product arguments>)
{
    const Product p = {<product>};
    __shared__ Masked sample[<deep>][<side>];
    __shared__ uint64_t of[<deep>][<side>];
    const int64_t tile = blockIdx.x, member = tile / (p.row_tiles * p.column_tiles);
    const int64_t top = tile / p.column_tiles % p.row_tiles * <side>, left = tile % p.column_tiles * <side>;
    const int thread = threadIdx.x, row = thread / (<side> / <square>) * <square>;
    const int column = thread % (<side> / <square>) * <square>;
    inputs += member * p.samples * p.height * p.width * p.words;
    weights += member * p.outputs * p.places();
    int different[<square>][<square>] = {};
    for (int64_t deep = 0; deep < p.places(); deep += <deep>) {
#pragma unroll 1
        for (int i = thread; i < <deep> * <side>; i += <threads>) {
            const int line = i / <deep>, word = i % <deep>;
            sample[word][line] = find(p, inputs, top + line, deep + word);
            const bool there = left + line < p.outputs && deep + word < p.places();
            of[word][line] = there ? weights[(left + line) * p.places() + deep + word] : 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int word = 0; word < <deep>; ++word)
#pragma unroll
            for (int i = 0; i < <square>; ++i)
#pragma unroll
                for (int j = 0; j < <square>; ++j) {
                    const Masked bits = sample[word][row + i];
                    different[i][j] += __popcll((bits.word ^ of[word][column + j]) & bits.inside);
                }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < <square>; ++i)
#pragma unroll
        for (int j = 0; j < <square>; ++j)
            if (top + row + i < p.rows() && left + column + j < p.outputs)
                results[(member * p.rows() + top + row + i) * p.outputs + left + column + j] =
                    (int)bits_of(p, top + row + i) - 2 * different[i][j];
}

<draw>
extern "C" __global__ void __launch_bounds__(<threads>) draw_bits(
    const uint32_t *thresholds, uint64_t *results, <draw arguments>)
{
    const Draw draw = {thresholds, results, <draw fields>};
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index < members * rows * words)
        draw_word(&draw, index);
}

// One sum for each bit of `total` words, over members in order.
extern "C" __global__ void __launch_bounds__(<threads>) add_bits(
    const uint64_t *inputs, const double *weights, double *sums, int64_t members, int64_t total)
{
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= 64 * total)
        return;
    double sum = 0.0;
    for (int64_t member = 0; member < members; ++member)
        sum += inputs[total * member + index / 64] >> index % 64 & 1 ? weights[member] : 0.0;
    sums[index] = sum;
}
"""
