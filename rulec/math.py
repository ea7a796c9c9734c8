"""The functions of the rule language for Python: they record traced values, and compute NumPy arrays.

from rulec.math import sqrt, where
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rulec.errors import RuleError
from rulec.language.expr.arithmetic import NUMPY, number_known
from rulec.language.expr.counts import Count, Level
from rulec.language.expr.functions import FUNCTIONS, as_node
from rulec.language.expr.node import Op
from rulec.language.expr.static import BLOCKWISE, settings
from rulec.language.tracing.author import author_error
from rulec.language.tracing.trace import cond as traced_cond
from rulec.language.tracing.trace import over_axes as traced_over_axes
from rulec.language.tracing.value import Value, as_traced, current, operation, record

__all__ = [
    "abs", "argsort", "atan", "atan2", "axis", "block", "cbrt", "cholesky", "clip", "concat", "cond", "cos",
    "count_nonzero", "diag", "dim", "eigh", "erf", "exp", "expm1", "eye", "floor", "gram", "hypot", "index",
    "inverse_root", "isfinite", "log", "log1p", "logical_and", "logical_not", "logical_or", "matmul", "max", "maximum",
    "mean", "median", "min", "minimum", "newton_schulz", "norm", "normal", "over_axes", "qr", "quantile", "rms",
    "round", "rsqrt", "sigmoid", "sign", "sin", "singular_vectors", "softmax", "softplus", "solve", "sort", "sqrt",
    "std", "sum", "take", "tanh", "topk", "transpose", "tril", "triu", "uniform", "variance", "where",
]  # fmt: skip

#: The axes of an array that a reduction to each level removes; a vector is one row.
_REMOVED: dict[str, tuple[int, ...] | None] = {
    "row": (-1,), "col": (-2,), "matrix": (-2, -1), "tensor": None, "group": None, "model": None,
}  # fmt: skip


def _apply(op: Op, *args: Any) -> Any:
    if any(isinstance(a, Value) for a in args):
        return operation(op, *args)
    return NUMPY[op](*args)


def _reduce(name: str, compute: Any, x: Any, per: str | Level) -> Any:
    if isinstance(x, Value):
        return record(name, x, per=per)
    if isinstance(per, Level):
        return _reduce_placed(compute, np.asarray(x), per)
    removed = _REMOVED[per]
    axis = None if removed is None else tuple(a for a in removed if np.ndim(x) + a >= 0)
    return compute(x, axis=axis, keepdims=axis is not None)


def _reduce_placed(compute: Any, x: Any, per: Level) -> Any:
    """A reduction of an array to an axis, with extents of 1 for the others, or to blocks, repeated for each element."""
    number = int(number_known(per.number, {"ndim": x.ndim}) or 0)
    if per.word == "axis":
        return compute(x, axis=tuple(k for k in range(x.ndim) if k != number % x.ndim), keepdims=True)
    blocks = compute(x.reshape(-1, number), axis=1, keepdims=True)
    return np.broadcast_to(blocks, (x.size // number, number)).reshape(x.shape)


def axis(i: Any) -> Level:
    """The level of one value for each index of axis `i`, for `per=`; counted from the end where negative."""
    return Level("axis", as_traced(i), current.get())


def block(n: Any) -> Level:
    """The level of one value for each block of `n` consecutive elements of a tensor, for `per=`."""
    return Level("block", as_traced(n), current.get())


def dim(i: Any) -> Any:
    """The extent of dimension `i`, counted from the end where negative: in rules alone."""
    return record("dim", i)


def index(i: Any = None, per: str | None = None, n: Any = None) -> Any:
    """The index of an element along dimension `i` or in the flattened tensor; per "row" or "col" of a matrix of `n`."""
    if per in ("row", "col") and n is not None and not isinstance(n, Value) and current.get() is None:
        return np.arange(float(n)).reshape((-1, 1) if per == "row" else (1, -1))
    keywords = {key: word for key, word in (("per", per), ("n", n)) if word is not None}
    return record("index", *(() if i is None else (i,)), **keywords)


def _matrix(op: Op, x: Any, *numbers: Any, **keywords: Any) -> Any:
    from rulec.compiler.matrix import MATRIX

    x = np.asarray(x)
    return MATRIX[op].compute(x, *numbers, **keywords) if x.ndim == 3 else _matrix(op, x[None], *numbers, **keywords)[0]


def _blockwise(function: str, *args: Any, per: str | Level, **keywords: Any) -> Any:
    """A function of matrices alone, or of their blocks: recorded, or computed of arrays."""
    if any(isinstance(x, Value) for x in args):
        return record(function, *args, per=per, **keywords)
    return _of_arrays(function, *args, per=per, **keywords)


def _of_arrays(function: str, x: Any, *others: Any, per: str | Level, **keywords: Any) -> Any:
    """The same of arrays; a second matrix may have its stack's dimension or not."""
    others = tuple(np.asarray(y)[None] if np.ndim(y) == 2 else y for y in others)
    if not isinstance(per, Level):
        return _matrix(BLOCKWISE[function], x, *others, **keywords)
    rows = number_known(per.number, {"ndim": np.ndim(x), "rows": np.shape(x)[-2], "cols": np.shape(x)[-1]})
    return _matrix(Op.IN_BLOCKS, x, *others, rows, function=function, **keywords)


def sqrt(x: Any) -> Any:
    """Square root, elementwise; NaN below zero."""
    return _apply(Op.SQRT, x)


def rsqrt(x: Any) -> Any:
    """One over the square root, elementwise."""
    return _apply(Op.RSQRT, x)


def cbrt(x: Any) -> Any:
    """Cube root, elementwise; negative below zero."""
    return _apply(Op.CBRT, x)


def abs(x: Any) -> Any:
    """Absolute value, elementwise."""
    return _apply(Op.ABS, x)


def sign(x: Any) -> Any:
    """-1, 0 or 1, elementwise; NaN of NaN."""
    return _apply(Op.SIGN, x)


def exp(x: Any) -> Any:
    """Exponential, elementwise."""
    return _apply(Op.EXP, x)


def log(x: Any) -> Any:
    """Natural logarithm, elementwise; NaN below zero."""
    return _apply(Op.LOG, x)


def log1p(x: Any) -> Any:
    """log(1 + x), elementwise, to the last digits for small `x` too; NaN below -1."""
    return _apply(Op.LOG1P, x)


def expm1(x: Any) -> Any:
    """exp(x) - 1, elementwise, to the last digits for small `x` too."""
    return _apply(Op.EXPM1, x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent, elementwise."""
    return _apply(Op.TANH, x)


def sigmoid(x: Any) -> Any:
    """1/(1 + exp(-x)), elementwise, without overflow."""
    return _apply(Op.SIGMOID, x)


def erf(x: Any) -> Any:
    """The error function, elementwise."""
    return _apply(Op.ERF, x)


def sin(x: Any) -> Any:
    """Sine, elementwise; NaN beyond 100000, except for values known before a step."""
    return _apply(Op.SIN, x)


def cos(x: Any) -> Any:
    """Cosine, elementwise; NaN where `sin` is."""
    return _apply(Op.COS, x)


def atan2(y: Any, x: Any) -> Any:
    """The angle from -pi to pi of the point (x, y), elementwise; 0 at the origin."""
    return _apply(Op.ATAN2, y, x)


def hypot(a: Any, b: Any) -> Any:
    """sqrt(a*a + b*b), elementwise, without overflow and underflow; infinite where either is, even beside NaN."""
    return _apply(Op.HYPOT, a, b)


def atan(x: Any) -> Any:
    """Arc tangent, elementwise: `atan2(x, 1)`."""
    return atan2(x, 1)


def floor(x: Any) -> Any:
    """The largest whole number not above, elementwise."""
    return _apply(Op.FLOOR, x)


def isfinite(x: Any) -> Any:
    """Whether a number is neither infinite nor NaN, elementwise."""
    return _apply(Op.ISFINITE, x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller, elementwise; NaN where either is NaN."""
    return _apply(Op.MINIMUM, a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger, elementwise; NaN where either is NaN."""
    return _apply(Op.MAXIMUM, a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """`x` limited to the range from `low` to `high`, elementwise."""
    if any(isinstance(a, Value) for a in (x, low, high)):
        return record("clip", x, low, high)
    return np.minimum(np.maximum(x, low), high)


def cond(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any] = lambda: None) -> Any:
    """`then()` where the condition holds, else `otherwise()`: an `if`, which computes only the arm it takes.

    The arms are functions without arguments. They may assign states, and return as many values each: none, one, or a
    tuple. On arrays the condition is one number.
    """
    if not callable(then) or not callable(otherwise):
        raise author_error("cond calls the arm that it takes: write cond(condition, lambda: a, lambda: b)")
    if isinstance(condition, Value):
        return traced_cond(condition, then, otherwise)
    if np.size(condition) != 1:
        raise author_error(f"cond has one condition, not {np.size(condition)}: use where for each element")
    return then() if np.all(condition) else otherwise()


def over_axes(ndim: Any, body: Callable[..., Any], *values: Any) -> Any:
    """`body(i, *values)` for each axis `i` of a tensor: a loop over `range(ndim)`.

    Every pass gets the values that the one before it returned, as many as are given here: none, one, or a tuple. The
    values of the last one are the result. `body` may assign states, such as `s.l[i]`.
    """
    if isinstance(ndim, Value):
        return traced_over_axes(ndim, body, values)
    result: Any = None if not values else values[0] if len(values) == 1 else values
    for i in range(int(ndim)):
        result = body(i, *values)
        values = () if result is None else result if isinstance(result, tuple) else (result,)
    return result


def median(a: Any, b: Any = None, c: Any = None, per: str | None = None) -> Any:
    """The quantile 0.5 of one value, one left per `per`; or the middle one of three values, elementwise."""
    values = [x for x in (a, b, c) if x is not None]
    if any(isinstance(x, Value) for x in values):
        return record("median", *values, **({} if per is None else {"per": per}))
    if len(values) == 1:
        return quantile(a, 0.5, per or "tensor")
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def round(x: Any) -> Any:
    """The nearest whole number, of two the even one, elementwise."""
    return record("round", x) if isinstance(x, Value) else np.rint(x)


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), elementwise, without overflow."""
    return record("softplus", x) if isinstance(x, Value) else np.logaddexp(0, x)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, `b` elsewhere, elementwise."""
    return _apply(Op.WHERE, condition, a, b)


def logical_and(a: Any, b: Any) -> Any:
    """Whether both are true, elementwise: Python's `and` cannot be traced."""
    return _apply(Op.AND, a, b)


def logical_or(a: Any, b: Any) -> Any:
    """Whether at least one is true, elementwise: Python's `or` cannot be traced."""
    return _apply(Op.OR, a, b)


def logical_not(a: Any) -> Any:
    """Whether it is false, elementwise: Python's `not` cannot be traced."""
    return _apply(Op.NOT, a)


def sum(x: Any, per: str | Level = "tensor") -> Any:
    """Sum, one left per `per`: "row", "col", "matrix", "tensor", "group", "model", axis(i) or block(n)."""
    return _reduce("sum", np.sum, x, per)


def mean(x: Any, per: str | Level = "tensor") -> Any:
    """Arithmetic mean, one value left per `per`."""
    return _reduce("mean", np.mean, x, per)


def norm(x: Any, per: str | Level = "tensor") -> Any:
    """Euclidean norm, one value left per `per`."""
    return _reduce("norm", lambda x, **k: np.sqrt(np.sum(np.square(x), **k)), x, per)


def rms(x: Any, per: str | Level = "tensor") -> Any:
    """Root of the mean square, one value left per `per`."""
    return _reduce("rms", lambda x, **k: np.sqrt(np.mean(np.square(x), **k)), x, per)


def min(x: Any, per: str | Level = "tensor") -> Any:
    """Smallest value, one left per `per`."""
    return _reduce("min", np.min, x, per)


def max(x: Any, per: str | Level = "tensor") -> Any:
    """Largest value, one left per `per`."""
    return _reduce("max", np.max, x, per)


def count_nonzero(x: Any, per: str | Level = "tensor") -> Any:
    """The number of values other than zero, one count left per `per`."""
    return _reduce("count_nonzero", lambda x, **k: np.sum(np.not_equal(x, 0), **k), x, per)


def variance(x: Any, per: str | Level = "tensor") -> Any:
    """Mean of the squared distances from the mean, one value left per `per`."""
    return _reduce("variance", np.var, x, per)


def std(x: Any, per: str | Level = "tensor") -> Any:
    """Root of the variance, one value left per `per`."""
    return _reduce("std", np.std, x, per)


def softmax(x: Any, per: str | Level = "tensor") -> Any:
    """exp(x) over its sum at `per`, of the shape of `x`, without overflow."""
    if isinstance(x, Value):
        return record("softmax", x, per=per)
    grown = np.exp(x - max(x, per))
    return grown / sum(grown, per)


def quantile(x: Any, q: Any, per: str = "tensor", interpolation: str = "linear") -> Any:
    """The value with a share `q` of the elements below it, one left per `per`: "row", "col", "matrix" or "tensor"."""
    if isinstance(x, Value) or isinstance(q, Value):
        return record("quantile", x, q, per=per, interpolation=interpolation)
    FUNCTIONS["quantile"](as_node(0), q, per=per, interpolation=interpolation)

    def compute(x: Any, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
        removed = [*range(x.ndim)] if axis is None else [a % x.ndim for a in axis]
        kept = [a for a in range(x.ndim) if a not in removed]
        lines = np.transpose(x, kept + removed).reshape(1, -1, int(np.prod([x.shape[a] for a in removed])))
        result = _matrix(Op.QUANTILE, lines, q, per="row", interpolation=interpolation)
        return result.reshape([1 if a in removed else n for a, n in enumerate(x.shape)] if keepdims else ())[()]

    return _reduce("quantile", compute, np.asarray(x), per)


def sort(x: Any, per: str = "tensor") -> Any:
    """The elements in ascending order, NaN last, within each row, column or matrix, or the whole tensor."""
    return _in_order("sort", x, per=per)


def argsort(x: Any, per: str = "tensor") -> Any:
    """The places of the elements in ascending order, within each row, column or matrix, or the whole tensor, from 0."""
    return _in_order("argsort", x, per=per)


def take(x: Any, i: Any, axis: Any = None, per: str = "tensor") -> Any:
    """The elements of `x` at places `i`: along axis 0 or 1 of a matrix, or in the order of rows; NaN beyond the end."""
    if axis is None:
        return _in_order("take", x, i, per=per)
    return _in_order("take", x, i, axis=axis, per=per)


def _in_order(name: str, *args: Any, **keywords: Any) -> Any:
    """A function of the order of elements: recorded, or computed of arrays; a vector is one row."""
    if any(isinstance(x, Value) for x in args):
        return record(name, *args, **keywords)
    call = FUNCTIONS[name](*map(as_node, range(len(args))), **keywords)
    arrays = [np.asarray(x) for x in args]
    stacks = [x.reshape(int(np.prod(x.shape[:-2])), *(1,) * (2 - x.ndim), *x.shape[-2:]) for x in arrays]
    result = _matrix(call.op, *stacks, **settings(call))
    shaped = arrays[1:] if settings(call)["per"] == "tensor" and len(arrays) > 1 else arrays
    shape = (*np.broadcast_shapes(*(x.shape[:-2] for x in shaped)), *result.shape[1:])
    return result.reshape(shape[len(shape) - np.max([x.ndim for x in shaped]) :])[()]


def matmul(a: Any, b: Any, axis: Any = None, per: str | Level = "matrix") -> Any:
    """Product of two matrices, as `a @ b`; with `axis=i`, dimension `i` of a tensor times the rows of a matrix."""
    if axis is None:
        return _blockwise("matmul", a, b, per=per) if isinstance(per, Level) else a @ b
    if isinstance(a, Value) or isinstance(b, Value):
        return record("matmul", a, b, axis=axis, per=per)
    return np.moveaxis(np.tensordot(a, b, (axis, 0)), -1, axis)


def gram(x: Any, axis: Any = 0) -> Any:
    """The square matrix of inner products of the parts of a tensor at each two indices of dimension `axis`."""
    if isinstance(x, Value):
        return record("gram", x, axis=axis)
    rows = np.moveaxis(x, axis, 0).reshape(np.shape(x)[axis], -1)
    return rows @ rows.T


def transpose(x: Any, per: str | Level = "matrix") -> Any:
    """The transposed matrix."""
    return _blockwise("transpose", x, per=per)


def eye(n: Any) -> Any:
    """The identity matrix of `n` rows."""
    return record("eye", n) if isinstance(n, Value) or current.get() is not None else np.eye(int(n))


def diag(x: Any) -> Any:
    """The diagonal of a square matrix, one value for each row; of a vector, the matrix with it on the diagonal."""
    if isinstance(x, Value):
        return record("diag", x)
    return np.diag(x)


def triu(x: Any) -> Any:
    """The matrix with zeros below its diagonal."""
    return record("triu", x) if isinstance(x, Value) else np.triu(x)


def tril(x: Any) -> Any:
    """The matrix with zeros above its diagonal."""
    return record("tril", x) if isinstance(x, Value) else np.tril(x)


def concat(a: Any, b: Any, axis: int = 0) -> Any:
    """The rows of `b` below those of `a`; for axis 1, the columns of `b` beside those of `a`."""
    if isinstance(a, Value) or isinstance(b, Value):
        return record("concat", a, b, axis=axis)
    return np.concatenate([a, b], axis - 2)


def solve(a: Any, b: Any, kind: str = "full", per: str | Level = "matrix") -> Any:
    """`x` with `a @ x = b`; `kind` "upper" or "lower" reads this triangle alone; NaN where `a` is singular."""
    return _blockwise("solve", a, b, per=per, kind=kind)


def cholesky(x: Any, per: str | Level = "matrix") -> Any:
    """The lower triangular `l` with `l @ transpose(l) = x`; NaN where `x` is not positive definite."""
    return _blockwise("cholesky", x, per=per)


def topk(x: Any, k: Any) -> Any:
    """1 for the `k` largest of a vector of rows or of columns, and 0 for the others; of equal ones the first count."""
    return record("topk", x, k) if isinstance(x, Value) or isinstance(k, Value) else _matrix(Op.TOPK, x, k)


def newton_schulz(
    x: Any, steps: Any = 5, dtype: str | None = None, coefficients: Any = "muon", normalize: Any = "norm",
    form: str = "direct", per: str | Level = "matrix", axis: int = 0,
) -> Any:  # fmt: skip
    """The nearest orthogonal matrix, roughly, by Muon's iteration or another, in `dtype` or that of `x`."""
    if isinstance(x, Value) or isinstance(steps, Value):
        return record(
            "newton_schulz", x, steps=steps, dtype=dtype, coefficients=coefficients, normalize=normalize, form=form,
            per=per, axis=axis,
        )  # fmt: skip
    rows = coefficients if isinstance(coefficients, str) else np.reshape(coefficients, (-1, 3)).tolist()
    iteration = FUNCTIONS["newton_schulz"](as_node(0), coefficients=rows, normalize=normalize, form=form)
    normalize = settings(iteration).get("normalize", "norm")
    words = {"coefficients": rows, "normalize": normalize, "form": form}
    if axis and isinstance(per, Level):
        return transpose(_of_arrays("newton_schulz", transpose(x), steps, per=per, **words))
    return _of_arrays("newton_schulz", x, steps, per=per, **words)


def qr(x: Any, per: str | Level = "matrix") -> Any:
    """The orthogonal factor of the QR decomposition; the triangular one has no negative diagonal: `q, r = qr(x)`."""
    return _blockwise("qr", x, per=per)


def eigh(x: Any, per: str | Level = "matrix") -> Any:
    """The eigenvectors of a symmetric matrix, by ascending eigenvalue; the largest component of each is positive."""
    return _blockwise("eigh", x, per=per)


def singular_vectors(x: Any, rank: Any) -> Any:
    """The left singular vectors of the `rank` largest singular values; the largest component of each is positive."""
    if isinstance(x, Value) or isinstance(rank, Value):
        return record("singular_vectors", x, rank)
    return _matrix(Op.SINGULAR_VECTORS, x, rank)


def inverse_root(x: Any, order: Any, eps: Any = 0, per: str | Level = "matrix") -> Any:
    """`x**(-1/order)` of a symmetric positive matrix, `eps` added to its eigenvalues."""
    if any(isinstance(a, Value) for a in (x, order, eps)):
        return record("inverse_root", x, order, eps=eps, per=per)
    return _of_arrays("inverse_root", x, order, eps, per=per)


def _draw(name: str, shape: Any, at: Any, draw: int | None) -> Any:
    """The traced draw; on plain numbers the reference's draw with the seed 0 for the first tensor."""
    if any(isinstance(x, Value) for x in (*shape, at)):
        return record(name, list(shape), at=at, draw=draw)
    from rulec.array_api import random

    if problem := Count(f"an extent of {name}", tuple(map(as_node, shape))).problem({}):
        raise RuleError(problem)
    position = {"seed": 0, "tensor": 0, "draw": draw or 0, "step": random.draw_number(at)}
    count = int(np.prod(shape))
    numbers = random.normal(count, **position) if name == "normal" else random.uniform(random.stream(count, **position))
    return numbers.reshape(tuple(map(int, shape)))


def uniform(shape: Any, at: Any, draw: int | None = None) -> Any:
    """A matrix of these extents, of random numbers uniform between 0 and 1, both excluded: the same for the same `at`.

    Every call in a traced rule has a `draw` number of its own. On arrays, `draw` distinguishes calls with one `at`.
    """
    return _draw("uniform", shape, at, draw)


def normal(shape: Any, at: Any, draw: int | None = None) -> Any:
    """A matrix of these extents, of standard normal random numbers: the same for the same `at`."""
    return _draw("normal", shape, at, draw)


if missing := FUNCTIONS.keys() - set(__all__):
    raise AssertionError(f"rulec.math lacks {sorted(missing)}")
