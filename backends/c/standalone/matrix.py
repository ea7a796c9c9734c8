"""Matrix functions in C: the Newton-Schulz iteration of one matrix, and its calls in a step."""

from __future__ import annotations

from rulec.backend.printer import unique_name
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import settings
from rulec.standalone.cases import Version

from .stage import TYPES, loop, signature

#: The matrix functions available in C.
WRITTEN = frozenset({Op.NEWTON_SCHULZ})

_NEWTON_SCHULZ = """\
/* The quintic iteration towards the nearest orthogonal matrix, with Muon's coefficients, in REAL. `x` and `found` are
 * height times width; `room` has space for 2 * height * width + 2 * n * n numbers, n being the lesser of the two. */
static void newton_schulz(
    const VALUE *restrict x, VALUE *restrict found, REAL *room, int64_t height, int64_t width, int64_t steps)
{
    const bool tall = height > width;
    const int64_t n = tall ? width : height, m = tall ? height : width;
    REAL *y = room, *next = room + n * m;
    REAL *const gram = room + 2 * n * m, *const weight = gram + n * n;
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
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (n > 64)
#endif
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k <= i; k++) {
                gram[i * n + k] = gram[k * n + i] = dot(y + i * m, y + k * m, m);
            }
        }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) if (n > 64)
#endif
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k <= i; k++) {
                const REAL twice = dot(gram + i * n, gram + k * n, n);
                weight[i * n + k] = weight[k * n + i] = B * gram[i * n + k] + C * twice;
            }
        }
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (n > 64)
#endif
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < m; j++) {
                next[i * m + j] = A * y[i * m + j];
            }
            for (int64_t k = 0; k < n; k++) {
                for (int64_t j = 0; j < m; j++) {
                    next[i * m + j] += weight[i * n + k] * y[k * m + j];
                }
            }
        }
        REAL *const last = y;
        y = next;
        next = last;
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < m; j++) {
            found[tall ? j * n + i : i * m + j] = y[i * m + j];
        }
    }
}
"""

_DOT = """\
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
"""


def _matrix_words(value: str, real: str) -> str:
    """The functions, for matrices of the C type `value`, computed in the C type `real`."""
    text = f"{_DOT}\n{_NEWTON_SCHULZ}\n"
    suffix = "f" if real == "float" else ""
    for name, number in (("A", "3.4445"), ("B", "-4.7750"), ("C", "2.0315")):
        text = text.replace(f" {name} *", f" {number}{suffix} *")
    narrow = "(float)y[i * m + j]" if (value, real) == ("float", "double") else "y[i * m + j]"
    return text.replace("= y[i * m + j];\n        }\n    }\n}", f"= {narrow};\n        }}\n    }}\n}}").replace(
        "REAL", real
    ).replace("VALUE", value)  # fmt: skip


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
        return loop("matrix", "0", "batch", signature("newton_schulz", arguments, ";"))

    def words(self) -> str:
        """The definitions of the called functions."""
        kinds = {self._inner(settings(v)["dtype"]) for v in self.values}
        return "".join(_matrix_words(TYPES[self.compute], kind) for kind in sorted(kinds))

    def rooms(self) -> list[tuple[str, str, str]]:
        """The room for a call: name, type, and size in doubles."""
        lesser = "(height < width ? height * height : width * width)"
        kinds = {self._inner(settings(v)["dtype"]) for v in self.values}
        return [("room", kind, f"2 * (height * width + {lesser})") for kind in sorted(kinds)]

    def _inner(self, dtype: str | None) -> str:
        """The C type of arithmetic in a matrix function of this dtype; for 16 bits and none, the compute dtype's."""
        return TYPES[self.compute if dtype not in ("float32", "float64") else dtype]
