"""The matrix view of a tensor of any shape: a batch of matrices, shape facts, and the grouping of dimensions.

Kernels see a tensor as a batch of matrices. A rule with `axis(i)` has each of its axes apart from the others, and
dimensions between them joined: of the segments that this gives, the last are the columns, the one before it the rows,
and all others the batch. If the batch has several segments, a value of one of them is reduced between the stages. A
rule with `block(n)` has blocks as rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rulec.compiler.ir import PARTS
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.counts import level_text
from rulec.language.expr.node import PLACED, Kind, Node, extent, walk
from rulec.language.expr.text import expression_text
from rulec.language.rule_data import Branch, RuleData, Statement, placed_level
from rulec.language.source import Span, rule_error


@dataclass(frozen=True)
class MatrixView:
    """A tensor's shape, and its `batch x rows x cols` in row and column reductions and in `@`.

    By default the last two dimensions are the matrix and the others the batch; a vector is one row.
    `flatten: rest` joins all but the first dimension into columns; `short: first` transposes tall matrices. Of a part
    of a tensor, `whole` is the view of the whole one, which the shape facts are of.

    For rules with axes or blocks, `letters` has the axis of each dimension, and `segments` the extents of the axes that
    the batch consists of, where it has several. With `blocks` the rows are blocks of consecutive elements.
    """

    shape: tuple[int, ...]
    batch: int
    rows: int
    cols: int
    transposed: bool = False
    whole: MatrixView | None = None
    letters: str = ""
    segments: tuple[int, ...] = ()
    blocks: bool = False

    @cached_property
    def facts(self) -> dict[str, float]:
        """The shape facts of the rule language. `machine_eps` is not among them: it belongs to the dtype."""
        if self.whole is not None:
            return self.whole.facts
        return {
            **plain_facts(self.shape), "rows": self.rows, "cols": self.cols,
            **{f"part{k}": n for k, n in enumerate(self.segments)},
        }  # fmt: skip

    @property
    def work(self) -> float:
        """The multiplications of one iteration of `newton_schulz`: the Gram matrix, its square, and the next matrix."""
        short, long = sorted((self.rows, self.cols))
        return float(self.batch) * (2.0 * short * short * long + float(short) ** 3)

    def axis(self, dimension: int) -> str:
        """The axis of the matrices that a dimension of the tensor is, or is joined into: b, i or j."""
        if self.letters:
            return self.letters[dimension]
        rows, cols = (self.whole or self).axes
        return "i" if dimension in rows else "j" if dimension in cols else "b"

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the tensor in its rows, and the axes in its columns."""
        count = len(self.shape)
        if self.blocks:
            return (0,), (1,)  # of the blocks
        if self.letters:
            return tuple(tuple(d for d in range(count) if self.letters[d] == letter) for letter in "ij")  # type: ignore[return-value]
        rows: tuple[int, ...] = ()
        cols: tuple[int, ...] = tuple(range(count))
        if count >= 2 and {self.rows, self.cols} == {*self.shape[-2:]} and self.batch == math.prod(self.shape[:-2]):
            rows, cols = (count - 2,), (count - 1,)
        elif count >= 2:
            rows, cols = (0,), cols[1:]
        return (cols, rows) if self.transposed else (rows, cols)

    def matrices(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array of the tensor's shape as `batch x rows x cols`."""
        if self.transposed:
            return array.reshape(self.batch, self.cols, self.rows).swapaxes(1, 2)
        return array.reshape(self.batch, self.rows, self.cols)

    def kept_shape(self, rows: int, cols: int, letters: str = "bij") -> tuple[int, ...]:
        """The shape of a kept array of `batch x rows x cols`: the tensor's, with these rows and columns at its end.

        With axes, it is the tensor's with 1 for each axis that is not in `letters`; with blocks, it is a vector.
        """
        if self.blocks:
            return (rows,)
        if self.letters:
            return tuple(n if c in letters else 1 for n, c in zip(self.shape, self.letters, strict=True))
        of = self.whole or self
        return (*self.shape[:-2], rows, cols) if math.prod(of.shape[:-2]) == of.batch else (rows, cols)

    def kept(self, array: Any, letters: str) -> Any:
        """A kept array as `batch x rows x cols`, with 1 for each axis that is not in `letters`."""
        return array.reshape(self.kept_extents(tuple(array.shape), letters))

    def kept_extents(self, shape: tuple[int, ...], letters: str) -> tuple[int, int, int]:
        """The matrices, rows and columns of a kept array of this shape."""
        if not (self.blocks or self.letters):
            return self.batch, shape[-2], shape[-1]
        part = next((n for k, n in enumerate(self.segments) if str(k) in letters), 1)
        batch = self.batch if "b" in letters else part
        return batch, self.rows if "i" in letters else 1, self.cols if "j" in letters else 1

    def tensor(self, matrices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The inverse of `matrices`."""
        return (matrices.swapaxes(1, 2) if self.transposed else matrices).reshape(self.shape)


def plain_facts(shape: Sequence[int]) -> dict[str, float]:
    """The shape facts that do not depend on a rule's view: dimensions, elements, and the extent of each dimension."""
    return {"ndim": len(shape), "numel": math.prod(shape), **{extent(d): n for d, n in enumerate(shape)}}


def matrix_view(
    shape: Sequence[int], view: Mapping[str, str] | None = None, whole: Sequence[int] | None = None
) -> MatrixView:  # fmt: skip
    """The view of a tensor of this shape under a rule's `view`, or of a part of a tensor of the shape `whole`."""
    shape, view = tuple(shape), view or {}
    of_whole = None if whole is None else matrix_view(whole, view)
    if len(shape) < 2:
        batch, rows, cols = 1, 1, math.prod(shape)
    elif view.get("flatten") == "rest":
        batch, rows, cols = 1, shape[0], math.prod(shape[1:])
    else:
        batch, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    tall = rows > cols if of_whole is None else of_whole.transposed
    if view.get("short") == "first" and tall:
        return MatrixView(shape, batch, cols, rows, transposed=True, whole=of_whole)
    return MatrixView(shape, batch, rows, cols, whole=of_whole)


@dataclass(frozen=True)
class Grouping:
    """The letter of each dimension in the batch of matrices: b, i or j, or one of PARTS for a segment of the batch.

    `block` is the number of elements of a block, or 0 without blocks.
    """

    letters: str
    block: int = 0

    @property
    def parts(self) -> int:
        """The number of segments in the batch, where it has several."""
        return len({letter for letter in self.letters if letter in PARTS})

    def level(self, dimension: int) -> str:
        """The level of one value for each index of a dimension."""
        letter = self.letters[dimension]
        if len(self.letters) == 1:
            return "element"
        if letter == "b":
            return "matrix"
        if "b" in self.letters or self.parts:
            return f"axis_{letter}"
        return {"i": "row", "j": "col"}[letter]

    def extents(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        """The extents of the segments of the batch, and the rows and columns, of a tensor of this shape."""
        if self.block:
            return (1,), math.prod(shape) // self.block, self.block
        batch = dict.fromkeys(letter for letter in self.letters if letter not in "ij")
        sizes = [
            math.prod(n for n, c in zip(shape, self.letters, strict=True) if c == letter) for letter in (*batch, *"ij")
        ]
        *segments, rows, cols = sizes
        return tuple(segments) or (1,), rows, cols


def view_of(
    rule: RuleData, shape: Sequence[int], static: Mapping[str, float] | None = None, whole: Sequence[int] | None = None
) -> MatrixView:  # fmt: skip
    """The view of a tensor of this shape under a rule, or of a part of a tensor of the shape `whole`.

    `static` has the static hyper-parameters, by default their defaults. Raises RuleError as `grouping` does.
    """
    shape, of_whole = tuple(shape), None if whole is None else view_of(rule, whole, static)
    known = {**static_defaults(rule), **(static or {}), **plain_facts(shape if whole is None else whole)}
    grouped = grouping(rule, known)
    if grouped is None:
        return matrix_view(shape, rule.view, whole)
    segments, rows, cols = grouped.extents(shape)
    return MatrixView(
        shape, math.prod(segments), rows, cols, whole=of_whole, letters=grouped.letters,
        segments=segments if grouped.parts else (), blocks=bool(grouped.block),
    )  # fmt: skip


def static_defaults(rule: RuleData) -> dict[str, float]:
    """Name -> default, for the static hyper-parameters with a number as their default."""
    return {k: h.default for k, h in rule.hyper.items() if h.static and isinstance(h.default, float)}


def static_of(rule: RuleData, hyper: Mapping[str, float]) -> dict[str, float]:
    """The static hyper-parameters of a rule among the values of all."""
    return {k: v for k, v in hyper.items() if rule.hyper[k].static}


def grouping(rule: RuleData, known: Mapping[str, float]) -> Grouping | None:
    """The grouping of a tensor with these facts, and static hyper-parameters; None for a rule without axes and blocks.

    Raises RuleError for blocks whose size does not divide the tensor, and for blocks beside other levels.
    """
    if not placed_level(rule):
        return None
    levels = [*_levels(rule, known)]
    blocks = {number: (number_known(number, known), span) for word, number, span in levels if word == "block"}
    axes = [number for word, number, _ in levels if word == "axis"]
    count = int(known["ndim"])
    if not blocks:
        return Grouping(_letters(count, {d for x in axes for d in _dimensions(x, known, count)})) if axes else None
    sizes = {_block(rule, number, size, known, span) for number, (size, span) in blocks.items()}
    if axes or len(sizes) > 1:
        levels_ = " and ".join(dict.fromkeys(level_text(word, number) for word, number, _ in levels))
        raise rule_error(
            f"{rule.name} has {levels_} for one tensor, and blocks stand alone: reduce to one kind of block, or choose "
            f"between them by a condition on the shape", next(iter(blocks.values()))[1],
        )  # fmt: skip
    return Grouping("i" * count, sizes.pop())


def dimension_of(number: Node, known: Mapping[str, float], span: Span | None) -> int:
    """The dimension of `axis(number)`, for a tensor with these facts; RuleError where it has none."""
    count = int(known["ndim"])
    dimensions = _dimensions(number, known, count)
    if number_known(number, known) is None:
        raise rule_error(
            f"axis({expression_text(number)}) must be known when a kernel is made: make it of numbers and shape facts",
            span,
        )
    if not dimensions:
        size = f"{count} dimension{'' if count == 1 else 's'}"
        raise rule_error(
            f"a tensor of {size} has no axis({expression_text(number)}): put it under a condition on ndim", span
        )
    return dimensions[0]


def _dimensions(number: Node, known: Mapping[str, float], count: int) -> Sequence[int]:
    """The dimension that a number stands for: none where there is no such one, all where it is not known."""
    value = number_known(number, known)
    if value is None:
        return range(count)
    return [int(value) % count] if float(value).is_integer() and -count <= value < count else []


def _block(rule: RuleData, number: Node, size: float | None, known: Mapping[str, float], span: Span | None) -> int:
    """The elements of a block; RuleError where they are no whole number that divides the tensor."""
    text = f"block({expression_text(number)})"
    if size is None:
        raise rule_error(
            f"{text} of {rule.name} must be known when a kernel is made: make it of numbers, shape facts and static "
            f"hyper-parameters", span,
        )  # fmt: skip
    said = "" if text == f"block({size:g})" else f", here {size:g},"
    if size < 1 or not float(size).is_integer():
        raise rule_error(f"{text} of {rule.name}{said} is no number of elements: choose a whole number from 1", span)
    if known["numel"] % size:
        raise rule_error(
            f"{text} of {rule.name}{said} does not divide the {known['numel']:g} elements of a tensor of shape "
            f"{shape_of(known)}: choose another size, or say under applies_to for which tensors it is one", span,
        )  # fmt: skip
    return int(size)


def _letters(count: int, axes: set[int]) -> str:
    """The letter of each dimension, where these axes are apart."""
    segments: list[list[int]] = []
    for dimension in range(count):
        if segments and dimension not in axes and segments[-1][-1] not in axes:
            segments[-1].append(dimension)
        else:
            segments.append([dimension])
    batch = "b" if len(segments) == 3 else PARTS
    letters = [*batch[: max(len(segments) - 2, 0)], *"ij"][-len(segments) :] if segments else []
    return "".join(letter * len(segment) for letter, segment in zip(letters, segments, strict=True))


def shape_of(known: Mapping[str, float]) -> tuple[int, ...]:
    """The shape of a tensor with these facts."""
    return tuple(int(known[extent(k)]) for k in range(int(known["ndim"])))


def _levels(rule: RuleData, known: Mapping[str, float]) -> Iterator[tuple[str, Node, Span | None]]:
    """The axes and blocks of a tensor with these facts: word, number, and the place of the line."""
    for state in rule.state.values():
        if state.number is not None and (state.condition is None or number_known(state.condition, known) != 0):
            yield state.per, state.number, state.span
    yield from _in_step(rule.step, known)
    for value in (rule.skip, rule.evaluate):
        yield from _in_value(value, None) if value is not None else ()


def _in_step(step: Sequence[Statement], known: Mapping[str, float]) -> Iterator[tuple[str, Node, Span | None]]:
    for line in step:
        if not isinstance(line, Branch):
            yield from _in_value(line.value, line.span)
            continue
        yield from _in_value(line.condition, line.span)
        truth = number_known(line.condition, known)
        yield from _in_step(line.then, known) if truth is None or truth else ()
        yield from _in_step(line.otherwise, known) if not truth else ()


def _in_value(value: Node, span: Span | None) -> Iterator[tuple[str, Node, Span | None]]:
    for part in walk([value]):
        if part.op.kind is Kind.REDUCE and part.arg in PLACED:
            yield str(part.arg), part.args[1], span


def placed_as(rule: RuleData, word: str, number: Node, known: Mapping[str, float], span: Span | None) -> str:
    """`axis(number)` or `block(number)` as a level of matrices, for a tensor with these facts."""
    grouped = grouping(rule, known)
    if word == "block" or grouped is None:
        return "row"
    return grouped.level(dimension_of(number, known, span))
