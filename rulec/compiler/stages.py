"""Cuts a program at its reductions and matrix functions.

Kernels compute the values of the parameter's shape, in stages; all other values (of rows, columns, whole tensors,
groups, matrices of other shapes) are computed between the stages. A stage computes a value again rather than keep it:
states and the parameter are stored in the last stage, so each stage sees the values from before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rulec.compiler.axes import AxisInference, in_batch
from rulec.compiler.factors import with_factors_outside
from rulec.compiler.ir import PARTS, Axes, Buffer, Column, Program, Result, Stage, Store, axes_of_letters, axes_of_level
from rulec.compiler.names import value_name
from rulec.language.expr.node import Kind, Node, Op, node, walk
from rulec.language.rule_data import differs_by_shape

#: Level of the language -> level of the reduction inside a kernel; the rest is summed between the stages.
_KERNEL_LEVEL = {"row": "row", "col": "col", "matrix": "row", "tensor": "tensor", "group": "tensor", "model": "tensor"}
_KERNEL_LEVEL |= {"axis_i": "row", "axis_j": "col", **{f"axis_{part}": "row" for part in PARTS}}

ELEMENT = axes_of_letters("knbij")

#: The kinds of operations that take and give whole arrays outside of kernels.
_APART = (Kind.MATRIX, Kind.RANDOM)


def joins(program: Program, inference: AxisInference) -> list[Node]:
    """The reductions over several tensors in a program of one stage, in the order of the lines of the rule."""
    order = {value: place for place, value in enumerate(program.sites)}
    reductions = (n for n in walk(_roots(program)) if n.op.kind is Kind.REDUCE)
    return sorted((n for n in reductions if "n" not in inference.axes(n).letters), key=order.__getitem__)


def split_stages(program: Program) -> Program:
    """The program as stages. Each ends in reductions and stores for the values after it."""
    if program.watch:
        inference = AxisInference(program)
        program = with_factors_outside(program, inference, _Levels(program, inference).of)
    return _Splitter(program).split()


def with_reads(program: Program, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a program with their `reads`, and the `columns` and `vectors` that each is the first to need."""
    known = len(program.scalars.columns)
    earlier_columns: set[int] = set()
    earlier_vectors: set[str] = set()
    done = []
    for stage in stages:
        values = list(walk(stage.roots))
        late = {int(n.arg) for n in values if n.op is Op.SCALAR and int(n.arg) >= known}  # type: ignore[call-overload]
        names = {str(n.arg) for n in values if n.op is Op.RESULT}
        reads = tuple(v.name for v in program.vectors if v.name in names)
        columns = tuple(sorted(late - earlier_columns))
        vectors = tuple(name for name in reads if name not in earlier_vectors)
        done.append(replace(stage, columns=columns, vectors=vectors, reads=reads))
        earlier_columns |= late
        earlier_vectors |= set(reads)
    return tuple(done)


def with_late_statistics(program: Program) -> Program:
    """The program with reductions that statistics alone read in its last stage, where it has their operands at hand.

    A stage with reductions of the rule then is as without statistics. Reductions over several tensors stay where they
    are: all programs of a rule have them in one order. A rule with `skip` keeps all reductions in place, for tensors
    may skip its last stage.
    """
    *early, last = program.stages
    if not program.watch or not early or program.skip is not None:
        return program
    stored = {node(Op.LOAD, store.buffer) for stage in early for store in stage.stores}
    at_hand = _memory_read(last.roots) - stored
    joined = {str(n.arg) for n in walk(program.joins) if n.op is Op.RESULT}
    measured = program.measured - joined
    moved = [r for s in early for r in s.reduces if r.name in measured and _memory_read([r.value]) <= at_hand]
    kept = [replace(s, reduces=tuple(r for r in s.reduces if r not in moved)) for s in early]
    stages = [*kept, replace(last, reduces=(*last.reduces, *moved))]
    return replace(program, stages=with_reads(program, stages))


def without_statistics(program: Program) -> Program:
    """The program with the reductions of the rule alone."""
    if not program.watch:
        return program
    measured = program.measured
    stages = [replace(s, reduces=tuple(r for r in s.reduces if r.name not in measured)) for s in program.stages]
    return replace(program, stages=with_reads(program, stages))


def _memory_read(roots: Iterable[Node]) -> set[Node]:
    """The buffers and results under some values."""
    return {n for n in walk(roots) if n.op in (Op.LOAD, Op.RESULT)}


def _roots(program: Program) -> list[Node]:
    """The values that a program of one stage stores, and `skip`."""
    return [s.value for s in program.stages[0].stores] + ([] if program.skip is None else [program.skip])


class _Levels:
    """The number of stages to run before each value of a program is known.

    `joins` are the reductions over several tensors in the order in which stages take them: by level, and of one level
    by the lines of the rule. A rule with other programs for other shapes has them in the order of its lines. The
    order is one for all programs: a join is known no earlier than the joins of the lines above.
    """

    def __init__(self, program: Program, inference: AxisInference) -> None:
        self.inference = inference
        self.known: dict[Node, int] = {}
        self.joins = joins(program, inference)
        differs = differs_by_shape(program.rule)
        above = 0
        for join in self.joins if differs else ():
            above = self.known[join] = max(above, self.of(join))
        for root in _roots(program):
            self.of(root)
        if not differs:
            self.joins.sort(key=self.known.__getitem__)

    def of(self, value: Node) -> int:
        """The level of a value. A line reads lines above alone, so its joins have theirs."""
        for part in walk([value], self.known):
            self.known[part] = max((self._after(a, part) for a in part.args), default=0)
        return self.known[value]

    def _after(self, operand: Node, value: Node) -> int:
        """The level at which an operation on an operand is known, as far as this operand goes."""
        elementwise = self.inference.axes(operand).elementwise
        if value.op.kind is Kind.REDUCE:
            waits = elementwise
        else:
            waits = value.op.kind in _APART and elementwise and operand.op.kind not in (*_APART, Kind.LEAF)
        return self.known[operand] + waits


@dataclass
class _Splitter:
    """Walks the values of a program once, operands first.

    `level` is the number of stages to run before a value is known. `kernel` maps a value of the parameter's shape to
    its form inside a kernel, and `between` maps a value to its form between the stages.
    """

    program: Program
    kernel: dict[Node, Node] = field(default_factory=dict)
    between: dict[Node, Node] = field(default_factory=dict)
    reduces: dict[int, list[Result]] = field(default_factory=dict)
    spilled: dict[int, list[Store]] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    late: dict[Node, int] = field(default_factory=dict)
    columns: list[Column] = field(default_factory=list)
    vectors: dict[Node, Result] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.inference = AxisInference(self.program)
        levels = _Levels(self.program, self.inference)
        self.level, self.joins = levels.known, levels.joins
        self.taken = {b.name for b in self.program.buffers} | {c.name for c in self.program.scalars.columns}

    def split(self) -> Program:
        program = self.program
        stores = program.stages[0].stores
        for value in walk(_roots(program)):
            self._visit(value)
        wide = [s for s in stores if program.buffer(s.buffer).axes.elementwise]
        narrow = [s for s in stores if s not in wide]
        needed = [self.level[s.value] for s in wide] + ([self.level[program.skip]] if program.skip is not None else [])
        last = max([*needed, *self.reduces, *self.spilled, 0])
        if program.skip is not None and last in self.reduces:
            last += 1  # a reduction over all tensors comes before the stage that some of them skip
        if last in self.spilled:
            last += 1  # a state of another shape alone reads it, and is computed before the last stage
        stages = [
            Stage(stores=tuple(self.spilled.get(i, ())), reduces=tuple(self.reduces.get(i, ()))) for i in range(last)
        ]
        final = [*self.spilled.get(last, ()), *(Store(s.buffer, self._inside(s.value)) for s in wide)]
        stages.append(Stage(stores=tuple(final), reduces=tuple(self.reduces.get(last, ()))))
        finish = tuple(Store(s.buffer, self._outside(s.value)) for s in narrow)
        skip = None if program.skip is None else self._outside(program.skip)
        return self._assembled(stages, finish, skip)

    def _assembled(self, stages: list[Stage], finish: tuple[Store, ...], skip: Node | None) -> Program:
        sites = {self.between[value]: self.program.sites[value] for value in self.joins}
        program = replace(
            self.program, buffers=(*self.program.buffers, *self.buffers), late=tuple(self.columns),
            vectors=tuple(self.vectors.values()), stages=tuple(stages), finish=finish, skip=skip, labels=self._labels(),
            joins=tuple(sites), sites=sites,
        )  # fmt: skip
        return replace(program, stages=with_reads(program, stages))

    def _labels(self) -> dict[Node, str]:
        labels = dict(self.program.labels)
        for value, label in self.program.labels.items():
            for side in (self.kernel, self.between):
                if value in side and side[value].op.kind is not Kind.LEAF:
                    labels.setdefault(side[value], label)
        return labels

    # One value

    def _visit(self, value: Node) -> None:
        if value.op.kind is Kind.LEAF:
            self.kernel[value] = self.between[value] = value
        elif value.op.kind is Kind.REDUCE:
            self._reduce(value)
        elif value.op.kind in _APART:
            self.between[value] = node(value.op, *map(self._outside, value.args), value.arg)
        elif self._axes(value).elementwise:
            self.kernel[value] = node(value.op, *map(self._inside, value.args), value.arg)
        else:
            self.between[value] = node(value.op, *map(self._outside, value.args), value.arg)

    def _axes(self, value: Node) -> Axes:
        return self.inference.axes(value)

    def _reduce(self, value: Node) -> None:
        (operand,), level = value.args, str(value.arg)
        if not self._axes(operand).elementwise:
            self.between[value] = node(value.op, self._outside(operand), level)
            return
        stage, kernel_level = self.level[operand], _KERNEL_LEVEL[level]
        reduction = node(value.op, self._inside(operand), kernel_level)
        entry = next((r for r in self.reduces.get(stage, ()) if r.value is reduction), None)
        if entry is None:
            name = value_name(self.program, value, f"{value.op.symbol}_{level}", self.taken)
            entry = Result(name, reduction, axes_of_level(kernel_level, self._axes(operand)))
            self.reduces.setdefault(stage, []).append(entry)
        result = node(Op.RESULT, entry.name)
        self.between[value] = result if kernel_level == level else node(value.op, result, level)

    def _materialised(self, value: Node) -> Node:
        """A value of the parameter's shape as a scratch buffer for a matrix function to read."""
        stage, inside = self.level[value], self.kernel[value]
        stores = self.spilled.setdefault(stage, [])
        buffer = next((s.buffer for s in stores if s.value is inside), None)
        if buffer is None:
            buffer = value_name(self.program, value, "operand", self.taken)
            self.buffers.append(Buffer(buffer, "scratch", ELEMENT))
            stores.append(Store(buffer, inside))
        return node(Op.LOAD, buffer)

    # The two sides

    def _outside(self, value: Node) -> Node:
        return self.between[value] if value in self.between else self._materialised(value)

    def _inside(self, value: Node) -> Node:
        """The value inside a kernel: computed there, or read from the table or a vector."""
        if value in self.kernel and (value.op in (Op.CONST, Op.SCALAR) or self._axes(value).elementwise):
            return self.kernel[value]
        letters = self._axes(value).letters
        if set(letters) <= {"k", "n"}:
            return self._column(value)
        return self._vector(value)

    def _column(self, value: Node) -> Node:
        outside = self.between[value]
        if outside not in self.late:
            self.late[outside] = len(self.program.scalars.columns) + len(self.columns)
            name = value_name(self.program, value, f"scalar_{len(self.columns)}", self.taken)
            self.columns.append(Column(name, outside))
        return node(Op.SCALAR, self.late[outside])

    def _vector(self, value: Node) -> Node:
        outside = self.between[value]
        if outside not in self.vectors:
            name = value_name(self.program, value, value.op.name.lower(), self.taken)
            axes = self._axes(value)
            # Kernels read a vector of rows or columns for each matrix.
            self.vectors[outside] = Result(name, outside, replace(axes, letters=in_batch(axes.letters)))
        return node(Op.RESULT, self.vectors[outside].name)
