"""The Newton-Schulz iteration of `newton_schulz`, once for all array libraries, and the parts that others share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rulec.array_api.functions import Functions
from rulec.errors import RuleError
from rulec.language.expr.counts import MAX_STEPS, count_problem, is_count
from rulec.language.expr.newton_schulz import Coefficients, coefficients_of, in_blocks, iterated_in
from rulec.language.expr.static import AOL, BOUNDS, DIRECT, GRAM, MUON, NORM, SCHATTEN, UNDIVIDED, Normalize


class SymmetricProducts(Protocol):
    """Products of symmetric matrices that commute. A result may be written to `out`, memory that no operand lies in."""

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        """`b*x + c*x @ x`."""
        ...

    def multiplied(self, x: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*x + x @ p`."""
        ...

    def shifted(self, x: Any, a: float) -> Any:
        """`a + x` on the diagonal; it may be written to the memory of `x`."""
        ...


#: Memory for results: of two products, each None where there is none yet.
Rooms = tuple[Any, Any]


def factor(
    gram: Any, block: Coefficients, by: SymmetricProducts, rooms: Rooms = (None, None)
) -> tuple[Any, float, Rooms]:
    """The matrix `p`, the number `a` and free memory after some iterations, which make `a*y + p @ y` of the matrix `y`.

    The Gram matrix after an iteration is `(a + p) @ gram @ (a + p)`. The memory of `gram` is written to.
    """
    (a, b, c), *others = block
    last, product, room = by.polynomial(gram, b, c, out=rooms[0]), None, rooms[1]
    for following, b, c in others:
        half = by.multiplied(gram, last, a, out=room)
        gram = by.multiplied(half, last, a, out=gram)
        product = by.shifted(last, a) if product is None else by.multiplied(product, last, a)
        a, last, room = following, by.polynomial(gram, b, c, out=half), None
    if product is None:
        return last, a, (gram, room)
    return by.multiplied(product, last, a, out=gram), 0.0, (product, last)


def iterations(steps: Any) -> int:
    """The number of iterations of newton_schulz; RuleError where it is not a whole number from 0 to MAX_STEPS."""
    if not is_count(steps, 0, MAX_STEPS):
        raise RuleError(count_problem("the number of steps of newton_schulz", f"{float(steps):g}", 0, MAX_STEPS))
    return int(steps)


def times(norm: Any, normalize: Normalize) -> Any:
    """What a matrix is divided by first: its norm, or a number times it."""
    return norm if isinstance(normalize, str | tuple) else norm * normalize


class Sizes(Protocol):
    """What `bound` asks of a library, beside operators and sums."""

    def at_least(self, x: Any, least: float) -> Any:
        """The larger of each element and a number."""
        ...

    def largest(self, x: Any) -> Any:
        """The largest of each column of sizes."""
        ...


def bound(of: Sizes, y: Any, gram: Callable[[], Any], normalize: Normalize) -> Any:
    """The divisor of wide matrices of norm 1: one number for each, or one for each row.

    No singular value of the quotient is above 1. `gram` gives the Gram matrices, `normalize` a word of `BOUNDS`.
    The square of a divisor is at least 1e-14.
    """
    word, factor = normalize if isinstance(normalize, tuple) else (normalize, 1.0)
    if word == AOL:
        squares = abs(gram()).sum(axis=-1, keepdims=True)
    elif word == SCHATTEN:
        squares = (gram() ** 2).sum(axis=(-2, -1), keepdims=True) ** 0.5
    else:
        rows, cols = (abs(y).sum(axis=axis, keepdims=True) for axis in (-1, -2))
        squares = of.largest(rows) * of.largest(cols.swapaxes(-1, -2))
    return of.at_least(squares, 1e-14) ** 0.5 * factor


def is_bound(normalize: Normalize) -> bool:
    """Whether a matrix is divided by a bound of its largest singular value after its norm."""
    return isinstance(normalize, tuple) or normalize in BOUNDS


@dataclass(frozen=True)
class _Products:
    """Products of wide matrices by the functions of a library, each rounded to a dtype together with its addend."""

    of: Functions
    dtype: Any

    def rounded(self, y: Any) -> Any:
        return y if self.dtype is None else self.of.cast(y, self.dtype)

    def gram(self, y: Any) -> Any:
        return self.of.matmul(y, self.of.transposed(y))

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        return self.rounded(b * self.of.wide(gram) + c * self.of.wide_matmul(gram, gram))

    def multiplied(self, x: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        return self.rounded(a * self.of.wide(x) + self.of.wide_matmul(x, polynomial))

    def shifted(self, x: Any, a: float) -> Any:
        return self.rounded(self.of.wide(x) + a * self.of.cast(self.of.xp.eye(x.shape[-1]), self.of.wide(x).dtype))

    def following(self, y: Any, polynomial: Any, a: float) -> Any:
        return self.rounded(a * self.of.wide(y) + self.of.wide_matmul(polynomial, y))


def newton_schulz(
    of: Functions, x: Any, steps: Any, dtype: str | None = None, coefficients: str | Coefficients = MUON,
    normalize: Normalize = NORM, form: str = DIRECT,
) -> Any:  # fmt: skip
    """The quintic iteration towards the nearest orthogonal matrix, in `dtype` or else in the matrix's own.

    A product and its addend are rounded together. In the `gram` form, matrices in bfloat16 are iterated in float16, and
    rounded again at the end.
    """
    count = iterations(of.known(steps, "the number of steps of newton_schulz"))
    operand = x if dtype is None else of.cast(x, of.product_dtype(x, dtype))
    inside = iterated_in(dtype, form)
    by = _Products(of, None if inside is None else of.product_dtype(x, inside))
    tall = x.shape[-2] > x.shape[-1]
    y = of.transposed(operand) if tall else operand
    if form == GRAM:
        y = of.wide(y)
    if normalize != UNDIVIDED:
        y = y / times(of.at_least(of.norm(y, x.dtype), 1e-7), normalize)
    if is_bound(normalize):
        z = of.wide(y)
        y = by.rounded(z / bound(of, z, lambda: of.wide_matmul(y, of.transposed(y)), normalize))
    y = by.rounded(y) if form == GRAM else y
    for block in in_blocks(coefficients_of(coefficients, count), form, *x.shape[-2:]):
        matrix, a, _ = factor(by.gram(y), block, by)
        y = by.following(y, matrix, a)
    result = of.transposed(y) if tall else y
    return result if dtype is None else of.cast(of.cast(result, operand.dtype), x.dtype)
