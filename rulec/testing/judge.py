"""The comparison of one stage's results with their definition, within the bounds of `bounds`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.language.expr.node import Op
from rulec.testing.bounds import Bounds, StageInputs, rounded_to
from rulec.testing.interval import Array, Range, point
from rulec.testing.kinds import MOST_TERMS, PARTIAL_SUMS, Numerics

#: Buffer -> its content, for each tensor.
Values = Sequence[Mapping[str, Array]] | Mapping[int, Mapping[str, Array]]

#: Reduction -> its array for each tensor fired: `(batch, rows, 1)`, `(batch, 1, cols)` or `(1, 1, 1)`, float64.
Reductions = Mapping[str, Sequence[Array]]


class Judge:
    """Compares the results of stages over the tensors of one bucket with their definition.

    Messages begin with `title`. `counts` are the updates of each tensor so far, for messages.
    """

    def __init__(
        self, title: str, program: Program, layout: Layout, numerics: Numerics, views: Sequence[MatrixView],
        counts: Sequence[int],
    ) -> None:  # fmt: skip
        self.title, self.program, self.layout, self.views, self.counts = title, program, layout, views, counts
        self._of_statistics = program.measured if program.watch else frozenset()
        self.bounds = [Bounds(program, layout.compute, numerics, i) for i in range(len(program.stages))]

    def check(
        self, index: int, fired: Sequence[int], inputs: StageInputs, after: Values, reductions: Reductions,
        stays: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """AssertionError, in one sentence, where a number is outside the bounds of a machine with these numerics.

        `inputs` has the elements of the tensors fired, one tensor after the other; `after` their buffers after stage
        `index`. The buffers of tensors that stay are not compared.
        """
        if not self.is_rounded(index, fired, inputs, after, reductions, stays):
            self._check_bounds_of(index, fired, inputs, after, reductions, stays)

    def is_rounded(
        self, index: int, fired: Sequence[int], inputs: StageInputs, after: Values, reductions: Reductions,
        stays: Sequence[int],
    ) -> bool:  # fmt: skip
        """Whether all results are NumPy's, with each operation rounded to the nearest number: so they are in bounds.

        Sums may be in any order. False for a machine that rounds differently, and for inexact functions.
        """
        bounds = self.bounds[index]
        if not bounds.is_rounded:
            return False
        wanted, operands = bounds.rounded(inputs)
        count = inputs.loads["g"].shape
        with np.errstate(all="ignore"):
            for name, want in wanted.items():
                stored = self._as_stored(name, np.broadcast_to(want, count))
                if not np.array_equal(self._result(fired, name, after, stored, stays), stored, equal_nan=True):
                    return False
        spread = {name: point(np.broadcast_to(x, count)) for name, x in operands.items()}
        return all(
            result.shape == allowed.low.shape and _inside(result, allowed).all()
            for *_, result, allowed in self._pieces(index, fired, spread, reductions)
        )

    def _check_bounds_of(
        self, index: int, fired: Sequence[int], inputs: StageInputs, after: Values, reductions: Reductions,
        stays: Sequence[int],
    ) -> None:  # fmt: skip
        stored, totals = self.bounds[index].ranges(inputs)
        wanted, operands = self.bounds[index].exact(inputs)
        for name, r in stored.items():
            ends = np.broadcast_arrays(r.low, r.high, r.nan, inputs.loads["g"])[:3]
            want = np.broadcast_to(wanted[name], ends[0].shape)
            self.compare(fired, name, after, rounded_to(Range(*ends), self.layout.dtype(name)), want, stays)
        for reduction, i, piece, result, allowed in self._pieces(index, fired, totals, reductions):
            want = exact(reduction.value.op, _level(reduction), operands[reduction.name][piece], self.views[i])
            self._compare_reduction(i, reduction, result, allowed, want)

    def compare(
        self, fired: Sequence[int], name: str, after: Values, allowed: Range, want: Array, stays: Sequence[int]
    ) -> None:
        """AssertionError where an element of a buffer is not in its range; `want` is the reference's value."""
        stored = self._as_stored(name, want)
        self._check_bounds(name, stored, allowed)
        result = self._result(fired, name, after, stored, stays)
        if _inside(result, allowed).all():
            return
        at = _farthest(result, stored, allowed)
        ends = np.cumsum(self._sizes(fired))
        place = int(np.searchsorted(ends, at, side="right"))
        element = at - (int(ends[place - 1]) if place else 0)
        self._fail(fired[place], f"element {element} of {name}", result, stored, allowed, at)

    def _as_stored(self, name: str, values: Array) -> Array:
        """Values rounded to the dtype of a buffer, as float64."""
        return values.astype(numpy_dtype(self.layout.dtype(name))).astype(np.float64)

    def _sizes(self, fired: Sequence[int]) -> list[int]:
        return [int(np.prod(self.views[i].shape)) for i in fired]

    def _result(self, fired: Sequence[int], name: str, after: Values, stored: Array, stays: Sequence[int]) -> Array:
        """The content of a buffer after a stage, with `stored` in place of tensors in `stays`."""
        result = flat([after[i][name] for i in fired])
        return np.where(np.repeat([i in stays for i in fired], self._sizes(fired)), stored, result)

    def _pieces(
        self, index: int, fired: Sequence[int], operands: Mapping[str, Range], reductions: Reductions
    ) -> Iterator[tuple[Result, int, slice, Array, Range]]:
        """Each reduction of each tensor: the tensor, the places of its elements, the result and its range."""
        ends = np.cumsum([0, *self._sizes(fired)])
        for reduction in self.program.stages[index].reduces:
            r = operands[reduction.name]
            for place, i in enumerate(fired):
                piece = slice(ends[place], ends[place + 1])
                part = Range(r.low[piece], r.high[piece], r.nan[piece])
                error = PARTIAL_SUMS[self.layout.compute] if reduction.name in self._of_statistics else 0.0
                allowed = reduced(reduction.value.op, _level(reduction), part, self.views[i], error)
                yield reduction, i, piece, reductions[reduction.name][place], allowed

    def _compare_reduction(self, tensor: int, reduction: Result, result: Array, allowed: Range, want: Array) -> None:
        name, level = reduction.name, _level(reduction)
        if result.shape != want.shape:
            fault = f"the reduction {name} of a tensor of shape {self.views[tensor].shape} has shape {result.shape}"
            raise AssertionError(f"{self.title} {fault}, not {want.shape}")
        ranges = Range(allowed.low.reshape(-1), allowed.high.reshape(-1), allowed.nan.reshape(-1))
        result, want = result.reshape(-1), want.reshape(-1)
        self._check_bounds(name, want, ranges)
        if not _inside(result, ranges).all():
            at = _farthest(result, want, ranges)
            self._fail(tensor, name if level == "tensor" else f"{level} {at} of {name}", result, want, ranges, at)

    def _check_bounds(self, name: str, want: Array, allowed: Range) -> None:
        """InternalError where the reference's own value is outside the bounds."""
        if not _inside(want, allowed).all():
            at = int(np.flatnonzero(~_inside(want, allowed))[0])
            raise InternalError(
                f"the bounds of {name} of {self.program.name} ({allowed.low[at]!r} to {allowed.high[at]!r}) "
                f"leave out the reference's own value {want[at]!r}"
            )

    def _fail(self, tensor: int, what: str, result: Array, want: Array, allowed: Range, at: int) -> None:
        limits = "only NaN" if allowed.surely_nan[at] else f"{allowed.low[at]:.9g} to {allowed.high[at]:.9g}"
        distance = np.abs(result[at] - want[at])
        raise AssertionError(
            f"{self.title} in a tensor of shape {self.views[tensor].shape}, at its step {self.counts[tensor]}, "
            f"{what} became {result[at]:.9g} where the reference has {want[at]:.9g} "
            f"(largest difference {np.inf if np.isnan(distance) else distance:.3g}; allowed is {limits})"
        )


def flat(arrays: Sequence[Array]) -> Array:
    """The elements of several arrays as one vector of float64."""
    return np.concatenate([np.asarray(a).astype(np.float64).reshape(-1) for a in arrays])


def _level(reduction: Result) -> str:
    return str(reduction.value.arg)


def _farthest(result: Array, want: Array, allowed: Range) -> int:
    distance = np.where(_inside(result, allowed), 0.0, np.abs(result - want))
    distance[np.isnan(distance)] = np.inf
    return int(np.argmax(distance))


def _inside(x: Array, allowed: Range) -> Array:
    return np.where(np.isnan(x), allowed.nan, (allowed.low <= x) & (x <= allowed.high))


#: Level of a reduction in a kernel -> its reduced axes of `(batch, rows, cols)`.
AXES = {"row": (2,), "col": (1,), "tensor": (0, 1, 2)}


def reduced(op: Op, level: str, r: Range, view: MatrixView, error: float = 0.0) -> Range:
    """The range of a reduction of one tensor's elements, `r`, in the order of its shape.

    The result has the shape `(batch, rows, 1)`, `(batch, 1, cols)`, or `(1, 1, 1)` per tensor. Terms of a sum are
    added up in parts, with this `error` for each addition, and the parts in float64: see `PARTIAL_SUMS`.
    """
    low, high, nan = (view.matrices(x.reshape(view.shape)) for x in (r.low, r.high, r.nan))
    return reduce_range(op, Range(low, high, nan), AXES[level], error)


def reduce_range(op: Op, r: Range, axes: tuple[int, ...], error: float = 0.0) -> Range:
    """The range of a reduction over axes, which are kept with an extent of 1; `error` as for `reduced`."""
    with np.errstate(all="ignore"):
        return _sum(r, axes, error) if op is Op.SUM else _extreme(op)(r, axes)


def exact(op: Op, level: str, x: Array, view: MatrixView) -> Array:
    """The reduction of one tensor's elements, in the same shape."""
    function, start = {Op.SUM: (np.add, 0.0), Op.MIN: (np.minimum, np.inf), Op.MAX: (np.maximum, -np.inf)}[op]
    with np.errstate(all="ignore"):
        whole: Array = function.reduce(
            view.matrices(x.reshape(view.shape)), axis=AXES[level], keepdims=True, initial=start
        )
    return whole


def _sum(r: Range, axes: tuple[int, ...], error: float) -> Range:
    """The range of a sum in any order: each addition errs by at most half an ulp of the sum so far.

    Whole numbers have no error in partial sums.
    """

    def some(which: Array) -> Array:
        return np.asarray(which.any(axis=axes, keepdims=True))

    plus, minus = some(r.high == np.inf), some(r.low == -np.inf)
    surely_plus, surely_minus = some((r.low == np.inf) & ~r.surely_nan), some((r.high == -np.inf) & ~r.surely_nan)
    empty = some(r.surely_nan) | (surely_plus & surely_minus)
    ends = [np.where(np.isfinite(x), x, 0.0) for x in (r.low, r.high)]
    size = np.maximum(np.abs(ends[0]), np.abs(ends[1])).sum(axis=axes, keepdims=True)
    count = int(np.prod([r.low.shape[axis] for axis in axes]))
    whole = all((x == np.rint(x)).all() for x in ends)
    # Twice half an ulp for each addition: the bounds themselves are added up too.
    slack = (count * 2.0**-52 + (0.0 if whole else error * min(count, MOST_TERMS))) * size
    low, high = (x.sum(axis=axes, keepdims=True) for x in ends)
    low = np.where(minus, -np.inf, np.where(surely_plus, np.inf, low - slack))
    high = np.where(plus, np.inf, np.where(surely_minus, -np.inf, high + slack))
    nan = some(r.nan) | (plus & minus)
    return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), np.asarray(nan | empty))


def _extreme(op: Op) -> Callable[[Range, tuple[int, ...]], Range]:
    function, start = (np.minimum, np.inf) if op is Op.MIN else (np.maximum, -np.inf)

    def apply(r: Range, axes: tuple[int, ...]) -> Range:
        low, high = (function.reduce(x, axis=axes, keepdims=True, initial=start) for x in (r.low, r.high))
        empty = r.surely_nan.any(axis=axes, keepdims=True)
        nan = np.asarray(r.nan.any(axis=axes, keepdims=True))
        return Range(np.where(empty, np.inf, low), np.where(empty, -np.inf, high), nan)

    return apply
