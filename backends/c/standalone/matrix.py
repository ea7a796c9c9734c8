"""Matrix functions in C: the Newton-Schulz iteration of one matrix, and its calls in a step."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rulec.backend.printer import unique_name
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import DIRECT, GRAM, settings
from rulec.standalone.cases import Version

from ...common.text import filled
from .stage import TYPES, loop, signature

#: The matrix functions available in C.
WRITTEN = frozenset({Op.NEWTON_SCHULZ})

_NEWTON_SCHULZ = """\
/* The quintic iteration towards the nearest orthogonal matrix, with Muon's coefficients, in REAL. `x` and `result` are
 * height times width; `room` has space for 2 * height * width + <squares> * n * n numbers, n being the lesser of the
 * two.<about> */
static void NAME(
    const VALUE *restrict x, VALUE *restrict result, REAL *room, int64_t height, int64_t width, int64_t steps)
{
    const bool tall = height > width;
    const int64_t n = tall ? width : height, m = tall ? height : width;
    REAL *y = room, *next = room + n * m;
    REAL *const gram = room + 2 * n * m, *const weight = gram + n * n<half>;
    double square = 0.0;
    for (int64_t i = 0; i < n * m; i++) {
        square += (double)x[i] * x[i];
    }
    const double norm = maximum(sqrt(square), 1e-7);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < m; j++) {
            y[i * m + j] = (REAL)(x[tall ? j * n + i : i * m + j] / norm);
        }
    }
    for (int64_t step = 0; step < steps; step++) {
        gram_matrix(y, gram, n, m);
        symmetric_product(gram, gram, B, C, weight, n);
<following>
        REAL *const last = y;
        y = next;
        next = last;
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < m; j++) {
            result[tall ? j * n + i : i * m + j] = <narrow>y[i * m + j];
        }
    }
}
"""

#: The next matrix in the direct form; and in the `gram` form, after one iteration or two.
_FOLLOWING = """\
        long_product(y, weight, A, next, n, m);
"""
_FOLLOWING_OF_TWO = """\
        if (n == m || step + 1 == steps) {
            long_product(y, weight, A, next, n, m);
        } else {
            symmetric_product(gram, weight, A, 1, half, n);
            symmetric_product(half, weight, A, 1, gram, n);
            symmetric_product(gram, gram, B, C, half, n);
            for (int64_t i = 0; i < n; i++) {
                weight[i * n + i] += A;
            }
            symmetric_product(weight, half, A, 1, gram, n);
            long_product(y, gram, 0, next, n, m);
            step++;
        }
"""
_ABOUT_TWO = """ Where the sides differ, the polynomial of every second iteration is of the Gram matrix after the one
 * before."""

_PRODUCTS = """\
/* The sum of products of two rows. */
static REAL dot(const REAL *a, const REAL *b, int64_t count)
{
    REAL sum = 0;
#ifdef _OPENMP
#pragma omp simd reduction(+ : sum)
#endif
    for (int64_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* The products of the n rows of `y` with one another. */
static void gram_matrix(const REAL *restrict y, REAL *restrict gram, int64_t n, int64_t m)
{
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (n > 64)
#endif
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k <= i; k++) {
            gram[i * n + k] = gram[k * n + i] = dot(y + i * m, y + k * m, m);
        }
    }
}

/* share * x + factor * x * p, of symmetric matrices that commute. */
static void symmetric_product(
    const REAL *x, const REAL *p, REAL share, REAL factor, REAL *restrict result, int64_t n)
{
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (n > 64)
#endif
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k <= i; k++) {
            const REAL sum = dot(x + i * n, p + k * n, n);
            result[i * n + k] = result[k * n + i] = share * x[i * n + k] + factor * sum;
        }
    }
}

/* share * y + p * y, of a symmetric p. */
static void long_product(
    const REAL *restrict y, const REAL *restrict p, REAL share, REAL *restrict result, int64_t n, int64_t m)
{
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (n > 64)
#endif
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < m; j++) {
            result[i * m + j] = share * y[i * m + j];
        }
        for (int64_t k = 0; k < n; k++) {
            for (int64_t j = 0; j < m; j++) {
                result[i * m + j] += p[i * n + k] * y[k * m + j];
            }
        }
    }
}
"""

#: The function of each form, and the matrices of n times n in its room.
_NAMES, _SQUARES = {DIRECT: "newton_schulz", GRAM: "newton_schulz_by_gram"}, {DIRECT: 2, GRAM: 3}


def _matrix_words(value: str, real: str, forms: Sequence[str]) -> str:
    """The functions, for matrices of the C type `value`, computed in the C type `real`."""
    text = "\n".join([_PRODUCTS, *map(_iteration, forms)]) + "\n"
    suffix = "f" if real == "float" else ""
    for name, number in (("A", "3.4445"), ("B", "-4.7750"), ("C", "2.0315")):
        text = re.sub(rf"(?<=[ (]){name}(?=[,;])", f"{number}{suffix}", text)
    narrow = "(float)" if (value, real) == ("float", "double") else ""
    return filled(text, {"<narrow>": narrow, "REAL": real, "VALUE": value})


def _iteration(form: str) -> str:
    pairs = form == GRAM
    return filled(_NEWTON_SCHULZ, {
        "NAME": _NAMES[form], "<squares>": str(_SQUARES[form]), "<about>": _ABOUT_TWO if pairs else "",
        "<half>": ", *const half = weight + n * n" if pairs else "",
        "<following>\n": _FOLLOWING_OF_TWO if pairs else _FOLLOWING,
    })  # fmt: skip


def _form(value: Node) -> str:
    return str(settings(value).get("form", DIRECT))


class MatrixFunctions:
    """The matrix functions of one version: their calls, their words, and memory for them.

    `results` has the arrays for their results, of the parameter's shape, by name; the names are added to `taken`.
    """

    def __init__(self, version: Version, taken: set[str]) -> None:
        self.program, self.compute = version.program, version.layout.compute
        self.values = [v for gap in version.plan.gaps for v in gap.values if v.op in WRITTEN]
        self.results = {v.name: unique_name(v.name, taken) for v in self.program.vectors if v.axes.elementwise}

    def call(self, value: Node, source: str, steps: str) -> list[str]:
        """The statements that compute a value, matrix by matrix, from the array `source` in this number of steps."""
        (name,) = [self.results[v.name] for v in self.program.vectors if v.value is value]
        at = "matrix * height * width"
        arguments = [f"{source} + {at}", f"{name} + {at}", "room", "height", "width", f"(int64_t){steps}"]
        return loop("matrix", "0", "batch", signature(_NAMES[_form(value)], arguments, ";"))

    def words(self) -> str:
        """The definitions of the called functions."""
        kinds = {self._inner(settings(v)["dtype"]) for v in self.values}
        return "".join(_matrix_words(TYPES[self.compute], kind, self._forms()) for kind in sorted(kinds))

    def rooms(self) -> list[tuple[str, str, str]]:
        """The room for a call: name, type, and size in doubles."""
        lesser = "(height < width ? height * height : width * width)"
        squares = max((_SQUARES[form] for form in self._forms()), default=0)
        kinds = {self._inner(settings(v)["dtype"]) for v in self.values}
        return [("room", kind, f"2 * height * width + {squares} * {lesser}") for kind in sorted(kinds)]

    def _forms(self) -> list[str]:
        return sorted({_form(v) for v in self.values})

    def _inner(self, dtype: str | None) -> str:
        """The C type of arithmetic in a matrix function of this dtype; for 16 bits and none, the compute dtype's."""
        return TYPES[self.compute if dtype not in ("float32", "float64") else dtype]
