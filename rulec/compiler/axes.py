"""The axes of every value, and means, norms and counts written out by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.extents import Extents
from rulec.compiler.indices import template_of
from rulec.compiler.ir import (
    AXES,
    COLS,
    LETTERS,
    LEVEL_AXES,
    PARTS,
    ROWS,
    Axes,
    Program,
    Site,
    Stage,
    Store,
    axes_of_level,
    part_extent,
)
from rulec.compiler.matrix import extent_of_level, matrix_axes
from rulec.compiler.widen import realized
from rulec.errors import RuleError
from rulec.language.expr.counts import Count, level_text
from rulec.language.expr.node import Kind, Node, Op, const, node, rewrite, walk
from rulec.language.expr.static import ALONG, letters_of, settings, statics
from rulec.language.expr.text import short_text
from rulec.language.rule_data import RuleData
from rulec.language.source import Span, rule_error

_STEP_AXES = {None: "kn", "group": "k", "model": ""}


class AxisInference:
    """Computes the axes of values of one program, each value once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        sides = [x for b in program.buffers for x in (b.axes.rows, b.axes.cols) if x is not None]
        self.extents = Extents(program.static, [ROWS, COLS, *sides])
        self.buffers = {b.name: self._settled(b.axes) for b in program.buffers}
        self.results = {r.name: r.axes for r in (*program.vectors, *(x for s in program.stages for x in s.reduces))}
        self.known: dict[Node, Axes] = {}
        #: Reductions over several tensors, and the numbers of the texts that they are made for.
        self.made_for: dict[Node, Node] = {}

    @classmethod
    def of(cls, buffers: Mapping[str, Axes], static: Mapping[str, float]) -> AxisInference:
        """For values of buffers, before there is a program, at values of static hyper-parameters."""
        inference = cls(Program("", RuleData("", ()), (), {}, (), static=static))
        inference.buffers |= {key: inference._settled(axes) for key, axes in buffers.items()}
        return inference

    def fitting(self, value: Node) -> Axes | None:
        """The axes of `value`; None where its parts do not fit together."""
        try:
            return self.axes(value)
        except RuleError:
            return None

    def axes(self, value: Node) -> Axes:
        """The axes of `value`; RuleError where its parts do not fit together."""
        if value not in self.known:
            for part in walk([value], self.known):
                try:
                    self.known[part] = self._settled(self._infer(part))
                except RuleError as error:
                    raise self._as_written(error, part) from None
        return self.known[value]

    def _settled(self, axes: Axes) -> Axes:
        """The axes with one node for all extents that are the same."""
        rows, cols = (x if x is None else self.extents.one(x) for x in (axes.rows, axes.cols))
        return axes if rows is axes.rows and cols is axes.cols else replace(axes, rows=rows, cols=cols)

    def _as_written(self, error: RuleError, value: Node) -> RuleError:
        """The error of a value at the author's line, with the author's expression in place of the value's."""
        if value not in self.program.written:
            return error
        span, text = self.program.written[value]
        message = error.message
        for part, said in ((value, text), *zip(value.args, text.args, strict=False)):
            message = message.replace(repr(short_text(part)), repr(short_text(said)))
        return rule_error(message, span)

    def _infer(self, value: Node) -> Axes:
        operands = [self.known[a] for a in value.args]
        if value.op.kind is Kind.LEAF:
            return self._leaf(value)
        if value.op.kind is Kind.REDUCE:
            return axes_of_level(str(value.arg), operands[0])
        if value.op.kind is Kind.MATRIX:
            return matrix_axes(self._unhoisted(value), operands, self.extents.one)
        if value.op.kind is Kind.RANDOM:
            _, rows, cols = cast(tuple[int, Node, Node], value.arg)
            return Axes(AXES, rows, cols)
        if value.op is Op.WIDEN:
            return cast(Axes, value.arg)
        if value.op is Op.SPREAD:
            return Axes(in_batch(operands[0].letters), operands[0].rows, operands[0].cols)
        return self._union(value, operands)

    def _unhoisted(self, value: Node) -> Node:
        """The node with hoisted operands in place of columns of the scalar table: one of them may be an extent."""
        columns = self.program.columns
        arg = value.arg
        if value.op in ALONG:
            extent, *numbers = statics(value)
            arg = (self.extents.one(extent), *numbers)
        return node(value.op, *(columns[a.arg].value if a.op is Op.SCALAR else a for a in value.args), arg)  # type: ignore[call-overload]

    def _leaf(self, value: Node) -> Axes:
        if value.op is Op.LOAD:
            return self.buffers[str(value.arg)]
        if value.op is Op.HYPER:
            return Axes("k")
        if value.op is Op.STEP:
            return Axes(_STEP_AXES[value.arg])  # type: ignore[index]
        if value.op is Op.RESULT:
            return self.results[str(value.arg)]
        if value.op is Op.SCALAR:
            return self.axes(self.program.columns[value.arg].value)  # type: ignore[call-overload]
        return Axes("kn") if value.op is Op.FACT else Axes()

    def _union(self, value: Node, operands: list[Axes]) -> Axes:
        letters = "".join(c for c in LETTERS if any(c in a.letters for a in operands))
        if {"i", "j"} <= set(letters):
            letters = AXES  # also where it is the same in all matrices
        extents: list[Node | None] = []
        for side, letter in (("rows", "i"), ("cols", "j")):
            having = [getattr(a, side) for a in operands if letter in a.letters]
            if any(h is not having[0] for h in having):
                sizes = " and another ".join(dict.fromkeys(f"{short_text(h)} as its {side}" for h in having))
                raise RuleError(f"shapes do not fit in {short_text(value)!r}: one part has {sizes}")
            extents.append(having[0] if having else None)
        return Axes(letters, extents[0], extents[1])


def in_batch(letters: str) -> str:
    """The letters with the whole batch in place of a segment of it, and beside rows or columns of all matrices."""
    return "".join(c for c in AXES if c in letters or (c == "b" and set(letters) & {*PARTS, "i", "j"}))


def over_repeated(values: Iterable[Node], axes: Mapping[Node, Axes]) -> frozenset[Node]:
    """The reductions over a batch whose operand is kept once for all its matrices, as identities and draws are.

    `values` come each after its operands; `axes` has the axes of all. Such an operand counts once for every matrix.
    """
    repeated: set[Node] = set()
    for value in values:
        alone = value.op.kind in (Kind.LEAF, Kind.SHAPE)
        alone = alone or (value.op is Op.INDEX and "b" in letters_of(template_of(value)))
        if "b" not in axes[value].letters or (not alone and repeated.issuperset(value.args)):
            repeated.add(value)
    reductions = (v for v in axes if v.op.kind is Kind.REDUCE and v.args[0] in repeated)
    return frozenset(v for v in reductions if "b" in axes[v.args[0]].letters and "b" not in axes[v].letters)


def _count(removed: str, operand: Axes, level: str, limit: Node | None) -> Node:
    """The number of values that a reduction joins, as an expression of shape facts; of the tensors of a limit alone."""
    factors = [x for letter, x in (("i", operand.rows), ("j", operand.cols)) if letter in removed and x is not None]
    factors += [part_extent(letter) for letter in removed if letter in PARTS]
    if {"b", "i", "j"} <= set(removed) and operand.rows is ROWS and operand.cols is COLS:
        factors = [node(Op.FACT, "numel")]
    elif "b" in removed:
        factors.append(node(Op.DIV, node(Op.FACT, "numel"), node(Op.MUL, ROWS, COLS)))
    count = factors[0] if factors else _one_of_each(removed)
    for factor in factors[1:]:
        count = node(Op.MUL, count, factor)
    # Tensors differ in size, so a count over several of them is a sum of their own counts.
    return node(Op.SUM, _within(limit, count), level) if "n" in removed or "k" in removed else count


def _apart(value: Node, of: Node, inference: AxisInference) -> Node:
    """A reduction over several tensors, apart from reductions in other texts of the rule.

    Two of them may be the same for tensors of one shape, and not for those of another. Programs of both have two.
    """
    text = of.args[-1]
    if len(of.args) == 1 or text.op is not Op.CONST or inference.made_for.setdefault(value, text) is text:
        return value
    operand = value.args[0]
    if not inference.axes(operand).number:
        operand = node(value.op, operand, "tensor")
    each = node(Op.FACT, "numel") if "n" in inference.axes(operand).letters else node(Op.STEP, "group")
    truth = node(Op.GE, each, const(-1.0 - float(text.arg)))  # type: ignore[arg-type]
    return node(value.op, node(Op.WHERE, truth, operand, const(REDUCTIONS[value.op].nothing)), value.arg)


def _within(limit: Node | None, value: Node, otherwise: float = 0) -> Node:
    """The value for the tensors of a limit, all where it is None, and a number for the others."""
    return value if limit is None else node(Op.WHERE, limit, value, const(otherwise))


def _limit(value: Node, operand: Axes, inference: AxisInference) -> Node | None:
    """The condition of the tensors that a reduction in a branch is over; for values of groups, of their groups."""
    limit = value.args[1] if len(value.args) > 1 else None
    if limit is None or limit.op is Op.CONST:
        return None
    if "n" in operand.letters or "n" not in inference.axes(limit).letters:
        return limit
    some = node(Op.MAX, node(Op.WHERE, limit, const(1), const(0)), "group")
    return node(Op.GT, some, const(0))


def _one_of_each(removed: str) -> Node:
    """A one for every tensor, or for every group. Its sum is their number; the sum of a plain constant is not."""
    each = node(Op.FACT, "numel") if "n" in removed else node(Op.STEP, "group")
    return node(Op.WHERE, node(Op.GE, each, const(0)), const(1), const(0))


def _removed(operand: Axes, level: str, parts: int) -> str:
    """The axes that a reduction to a level removes; of a batch of several segments, all but the one that remains."""
    letters, kept = operand.letters, LEVEL_AXES[level]
    if part := set(kept) & set(PARTS):
        letters = letters.replace("b", "".join(c for c in PARTS[:parts] if c not in part))
    return "".join(c for c in letters if c not in kept)


def _spread(value: Node, inference: AxisInference) -> Node:
    """A value of a segment of the batch, for each matrix of the batch; other values unchanged."""
    part = set(inference.axes(value).letters) & set(PARTS)
    return node(Op.SPREAD, value, part.pop()) if part else value


def _joined(value: Node, inference: AxisInference) -> Node:
    """An elementwise operation on values of the same axes of the batch."""
    letters = [set(inference.axes(a).letters) for a in value.args]
    batches = set[str]().union(*letters) & {*PARTS, "b"}
    if not batches & set(PARTS) or (len(batches) == 1 and not any(x & {"i", "j"} for x in letters)):
        return value
    return node(value.op, *(_spread(a, inference) for a in value.args), value.arg)


def _written_out(value: Node, inference: AxisInference) -> Node:
    """A mean, norm, rms or count as sums, and a reduction over no axis as its operand; other values unchanged."""
    if value.op is Op.QUANTILE and inference.axes(value).letters == inference.axes(value.args[0]).letters:
        return value.args[0]
    if value.op.kind is not Kind.REDUCE:
        return _joined(value, inference) if value.args and inference.program.parts else value
    x, level = value.args[0], str(value.arg)
    if value.op is Op.COUNT_NONZERO:
        x = node(Op.WHERE, node(Op.NE, x, const(0)), const(1), const(0))
    operand = inference.axes(x)
    removed = _removed(operand, level, inference.program.parts)
    if not removed:
        return node(Op.ABS, x) if value.op in (Op.NORM, Op.RMS) else x
    limit = _limit(value, operand, inference)
    if value.op in (Op.SUM, Op.MIN, Op.MAX):
        return _apart(node(value.op, _within(limit, x, REDUCTIONS[value.op].nothing), level), value, inference)
    total = node(Op.SUM, _within(limit, node(Op.MUL, x, x) if value.op in (Op.NORM, Op.RMS) else x), level)
    total = _apart(total, value, inference)
    if value.op in (Op.MEAN, Op.RMS):
        total = node(Op.DIV, total, _apart(_count(removed, operand, level, limit), value, inference))
    return node(Op.SQRT, total) if value.op in (Op.NORM, Op.RMS) else total


def infer_axes(program: Program) -> Program:
    """The program with means and norms written out as sums, and its values' axes checked.

    Raises RuleError for parts that do not fit together, and for a state assigned a value with more axes than its own.
    The error has the place of its line, where the line has one.
    """
    inference = AxisInference(program)
    memo: dict[Node, Node] = {}
    plain: dict[Node, Node] = {}
    stages = []
    for stage in program.stages:
        stores = []
        for store in stage.stores:
            _check_fits(program, store, inference)
            value = rewrite([store.value], lambda n: _written_out(n, inference), memo)[0]
            if program.parts and "b" in program.buffer(store.buffer).axes.letters:
                value = _spread(value, inference)
            _check_store(program, store.buffer, value, inference)
            stores.append(Store(store.buffer, *realized([value], inference.axes, plain)))
        stages.append(Stage(tuple(stores)))
    skip = program.skip
    if skip is not None:
        skip = rewrite([skip], lambda n: _written_out(n, inference), memo)[0]
        if not inference.axes(skip).number:
            raise RuleError(
                f"skip of {program.name} differs from element to element: reduce it, as in isfinite(sum(g))"
            )
        skip = realized([skip], inference.axes, plain)[0]
    memo = {value: plain.get(new, new) for value, new in memo.items()}
    counts = tuple(_within_extents(count, inference) for count in program.counts)
    labels = {memo.get(value, value): label for value, label in program.labels.items()}
    return replace(
        program, stages=tuple(stages), labels=labels, skip=skip, sites=_written_sites(program, memo),
        counts=counts,
    )  # fmt: skip


def _within_extents(count: Count, inference: AxisInference) -> Count:
    """The count of a slice or a place with the extent of its matrix as a limit; any other count as it is."""
    if count.end is None:
        return count
    axes = inference.axes(count.end.args[0])
    if count.end.op is Op.TAKE:
        return replace(count, limit=extent_of_level(settings(count.end)["per"], axes))
    return replace(count, limit=axes.cols if settings(count.end).get("axis") == "cols" else axes.rows)


def _written_sites(program: Program, memo: Mapping[Node, Node]) -> dict[Node, Site]:
    """The sites of sums over several tensors, those in place of means and norms included."""
    sites: dict[Node, Site] = {}
    for value, site in program.sites.items():
        sums = (n for n in walk([memo.get(value, value)]) if n.op.kind is Kind.REDUCE and n.arg in ("group", "model"))
        for count, n in enumerate(n for n in sums if n not in sites):
            sites[n] = (*site, count)
    return sites


def _place_of(program: Program, buffer: str) -> Span | None:
    # The line that assigns p by the direction has no place of its own.
    return program.places.get(buffer) or program.places.get("direction")


def _check_fits(program: Program, store: Store, inference: AxisInference) -> None:
    """RuleError, at the author's line, where the parts of a value do not fit together."""
    try:
        inference.axes(store.value)
    except RuleError as error:
        raise (error if error.place else rule_error(error.message, _place_of(program, store.buffer))) from None


def _check_store(program: Program, buffer: str, value: Node, inference: AxisInference) -> None:
    span, axes = _place_of(program, buffer), inference.axes(value)
    kept = inference.buffers[buffer]
    for have, keep in ((axes.rows, kept.rows), (axes.cols, kept.cols)):
        if have is not None and keep is not None and have is not keep:
            raise rule_error(f"{buffer} is {_extents(kept)} but is assigned a value of {_extents(axes)}", span)
    wider = set(axes.letters) - set(kept.letters)
    state = program.rule.state.get(buffer)
    if wider and state is not None and state.number is not None:
        level = level_text(state.per, state.number)
        raise rule_error(
            f"{buffer} is kept per {level} but is assigned a value that differs within it: reduce it with per={level}",
            span,
        )
    if wider:
        names = {v: k for k, v in LEVEL_AXES.items()}
        has, keeps = names.get(axes.letters, axes.letters), names[kept.letters]
        raise rule_error(
            f"{buffer} is kept per {keeps} but is assigned a value per {has}: "
            f"reduce it with per={keeps!r}, or declare the state per {has}", span,
        )  # fmt: skip


def _extents(axes: Axes) -> str:
    return " by ".join("1" if x is None else short_text(x) for x in (axes.rows, axes.cols))
