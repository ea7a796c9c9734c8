"""Newton-Schulz iterations in a file of CUDA C: matrices of all sizes in one launch for each product."""

from __future__ import annotations

from ..cstyle.element import STORAGE
from .plan import THREADS

#: The words of a matrix: addresses, its sides, the distances of neighbours in memory, and the parts of its elements.
MATRIX = (
    "source", "first", "second", "gram", "weight", "squares", "rows", "cols", "row_step", "col_step", "parts",
)  # fmt: skip

#: The words of a part of a matrix: elements from `row` and `col` on.
PART = ("matrix", "row", "col", "slot")

#: The side of a part.
EDGE = 64

_DEVICE = """\
// A matrix with no more rows than columns, and the arrays of its iteration.
struct <name>_matrix {
    int64_t <matrix>;
};

// <edge> by <edge> elements of a matrix.
struct <name>_part {
    int64_t <part>;
};

__device__ inline double <name>_source(const <name>_matrix &x, int64_t i, int64_t j)
{
    return <load>;
}

// The sums of squares of parts.
extern "C" __global__ void __launch_bounds__(<threads>) <name>_squares(
    const <name>_matrix *matrices, const <name>_part *parts)
{
    const <name>_part part = parts[blockIdx.x];
    const <name>_matrix x = matrices[part.matrix];
    double total = 0;
    for (int64_t e = threadIdx.x; e < <edge> * <edge>; e += blockDim.x) {
        const int64_t i = part.row + (x.col_step == 1 ? e / <edge> : e % <edge>);
        const int64_t j = part.col + (x.col_step == 1 ? e % <edge> : e / <edge>);
        const double value = i < x.rows && j < x.cols ? <name>_source(x, i, j) : 0;
        total += value * value;
    }
    total = over_block(SUM, total);
    if (threadIdx.x == 0)
        at<double>(x.squares)[part.slot] = total;
}

// Matrices divided by their Frobenius norms.
extern "C" __global__ void __launch_bounds__(<threads>) <name>_scale(
    const <name>_matrix *matrices, const <name>_part *parts)
{
    const <name>_part part = parts[blockIdx.x];
    const <name>_matrix x = matrices[part.matrix];
    const double *const squares = at<const double>(x.squares);
    double total = 0;
    for (int64_t k = threadIdx.x; k < x.parts; k += blockDim.x)
        total += squares[k];
    const double norm = maximum(sqrt(over_all(SUM, total)), 1e-7);
    <real> *const first = at<<real>>(x.first);
    for (int64_t e = threadIdx.x; e < <edge> * <edge>; e += blockDim.x) {
        const int64_t i = part.row + (x.col_step == 1 ? e / <edge> : e % <edge>);
        const int64_t j = part.col + (x.col_step == 1 ? e % <edge> : e / <edge>);
        if (i < x.rows && j < x.cols)
            first[i * x.row_step + j * x.col_step] = (<real>)(<name>_source(x, i, j) / norm);
    }
}

// An operand of a product, by the distances of its neighbours in memory.
struct <name>_operand {
    const <real> *at;
    int64_t row_step, col_step;
};

// A part of alpha * a * b + beta * c, in tiles of shared memory. `depth` is the number of columns of a. A library such
// as cuBLAS has faster products: call it in place of these kernels where its bits may change with its version.
__device__ inline void <name>_multiplied(
    <name>_operand a, <name>_operand b, <name>_operand c, <real> *to, const <name>_part &part, int64_t rows,
    int64_t cols, int64_t depth, <real> alpha, <real> beta)
{
    __shared__ <real> left[<depth>][<edge> + 1], right[<depth>][<edge> + 1];
    <real> sums[<each>][<each>] = {};
    const unsigned lane = threadIdx.x % <side>, line = threadIdx.x / <side>;
    for (int64_t first = 0; first < depth; first += <depth>) {
        for (unsigned e = threadIdx.x; e < <depth> * <edge>; e += blockDim.x) {
            // Neighbouring threads read neighbours in memory.
            const unsigned k = a.col_step == 1 ? e % <depth> : e / <edge>;
            const unsigned i = a.col_step == 1 ? e / <depth> : e % <edge>;
            const bool inside = part.row + i < rows && first + k < depth;
            left[k][i] = inside ? a.at[(part.row + i) * a.row_step + (first + k) * a.col_step] : 0;
        }
        for (unsigned e = threadIdx.x; e < <depth> * <edge>; e += blockDim.x) {
            const unsigned k = b.row_step == 1 ? e % <depth> : e / <edge>;
            const unsigned j = b.row_step == 1 ? e / <depth> : e % <edge>;
            const bool inside = part.col + j < cols && first + k < depth;
            right[k][j] = inside ? b.at[(first + k) * b.row_step + (part.col + j) * b.col_step] : 0;
        }
        __syncthreads();
        for (unsigned k = 0; k < <depth>; ++k)
#pragma unroll
            for (unsigned i = 0; i < <each>; ++i)
#pragma unroll
                for (unsigned j = 0; j < <each>; ++j)
                    sums[i][j] = <fma>(left[k][line + <side> * i], right[k][lane + <side> * j], sums[i][j]);
        __syncthreads();
    }
#pragma unroll
    for (unsigned i = 0; i < <each>; ++i)
#pragma unroll
        for (unsigned j = 0; j < <each>; ++j) {
            const int64_t row = part.row + line + <side> * i, col = part.col + lane + <side> * j;
            if (row >= rows || col >= cols)
                continue;
            const int64_t place = row * c.row_step + col * c.col_step;
            to[place] = beta == 0 ? alpha * sums[i][j] : <fma>(alpha, sums[i][j], beta * c.at[place]);
        }
}

// The three products of an iteration: the Gram matrix, a polynomial of it, and the next matrix. The results lie as the
// operand that is added to them.
extern "C" __global__ void __launch_bounds__(<threads>) <name>_product(
    const <name>_matrix *matrices, const <name>_part *parts, int turn, int step)
{
    const <name>_part part = parts[blockIdx.x];
    const <name>_matrix x = matrices[part.matrix];
    <real> *const gram = at<<real>>(x.gram), *const weight = at<<real>>(x.weight);
    const <real> *const y = at<const <real>>(turn ? x.second : x.first);
    const <name>_operand now = {y, x.row_step, x.col_step}, across = {y, x.col_step, x.row_step};
    const <name>_operand square = {gram, x.rows, 1}, polynomial = {weight, x.rows, 1};
    if (step == 0)
        <name>_multiplied(now, across, square, gram, part, x.rows, x.rows, x.cols, 1, 0);
    else if (step == 1)
        <name>_multiplied(square, square, square, weight, part, x.rows, x.rows, x.rows, <c>, <b>);
    else
        <name>_multiplied(
            polynomial, now, now, at<<real>>(turn ? x.first : x.second), part, x.rows, x.cols, x.rows, 1, <a>);
}
"""

#: The host's functions.
HOST = """\
/* The lines of the matrices of a tensor, which lie one after the other, and of their parts. */
static void <name>_fill_matrices(
    const <name>_view *view, const long long *addresses, long long size, long long matrices, long long **lines)
{
    const long long rows = view->height < view->width ? view->height : view->width;
    const long long cols = view->height + view->width - rows, count = rows * cols;
    const bool tall = view->height > view->width;
    const long long down = <name>_parts(rows, <edge>), across = <name>_parts(cols, <edge>);
    for (long long matrix = 0; matrix < view->batch; ++matrix) {
        long long *const line = lines[0];
        line[0] = addresses[0] + size * count * matrix;
        for (int k = 1; k < 3; ++k)
            line[k] = addresses[k] + <bytes> * count * matrix;
        for (int k = 3; k < 5; ++k)
            line[k] = addresses[k] + <bytes> * rows * rows * matrix;
        line[5] = addresses[5] + 8 * down * across * matrix;
        line[6] = rows;
        line[7] = cols;
        line[8] = tall ? 1 : cols;
        line[9] = tall ? rows : 1;
        line[10] = down * across;
        lines[0] += <matrix_words>;
        for (long long part = 0; part < down * down; ++part, lines[1] += <part_words>) {
            lines[1][0] = matrices + matrix;
            lines[1][1] = part / down * <edge>;
            lines[1][2] = part % down * <edge>;
            lines[1][3] = part;
        }
        for (long long part = 0; part < down * across; ++part, lines[2] += <part_words>) {
            lines[2][0] = matrices + matrix;
            lines[2][1] = part / across * <edge>;
            lines[2][2] = part % across * <edge>;
            lines[2][3] = part;
        }
    }
}

"""


def device_text(name: str, source: str, compute: str) -> str:
    """The kernels, for matrices stored in the dtype `source` and computed in the dtype `compute`."""
    real, suffix = STORAGE[compute], "" if compute == "float64" else "f"
    element = f"at<const {STORAGE[source]}>(x.source)[i * x.row_step + j * x.col_step]"
    load = f"from_{source}({element})" if source in ("bfloat16", "float16") else element
    depth, side = 16, 16
    parts = {
        "name": name, "matrix": ", ".join(MATRIX), "part": ", ".join(PART), "edge": str(EDGE), "load": load,
        "threads": str(THREADS), "real": real, "depth": str(depth), "side": str(side), "each": str(EDGE // side),
        "fma": f"fma{suffix}", "a": f"3.4445{suffix}", "b": f"-4.7750{suffix}", "c": f"2.0315{suffix}",
    }  # fmt: skip
    text = _DEVICE
    for key, value in parts.items():
        text = text.replace(f"<{key}>", value)
    return text
