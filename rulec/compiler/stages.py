"""Cuts a program at its reductions and matrix functions.

What has the parameter's shape is computed by kernels, in stages; everything else (rows, columns, whole tensors, groups,
matrices of other shapes) between them. A stage reads what it needs and recomputes rather than keeps: every store of a
state or parameter happens in the last stage, so each stage sees the values from before the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rulec.compiler.axes import AxisInference, axes_of_level
from rulec.compiler.ir import Axes, Buffer, Column, Program, Result, Stage, Store, axes_of_letters
from rulec.compiler.names import value_name
from rulec.language.node import Kind, Node, Op, node, walk

#: What a kernel reduces to, for each level of the language: the rest is summed between the stages.
_KERNEL_LEVEL = {"row": "row", "col": "col", "matrix": "row", "tensor": "tensor", "group": "tensor", "model": "tensor"}

ELEMENT = axes_of_letters("knbij")


def joins(program: Program, inference: AxisInference) -> list[Node]:
    """The reductions over several tensors, of a program that is not cut yet, in the order of their sites."""
    roots = [s.value for s in program.stages[0].stores] + ([] if program.skip is None else [program.skip])
    found = [n for n in walk(roots) if n.op.kind is Kind.REDUCE and "n" not in inference.axes(n).letters]
    return sorted(found, key=lambda n: tuple((isinstance(part, int), part) for part in program.sites[n]))


def split_stages(program: Program) -> Program:
    """The program as stages, each ending in the reductions and stores that what follows it reads."""
    return _Splitter(program).split()


@dataclass
class _Splitter:
    """Walks the values of a program once, operands first.

    For each value `level` is how many stages must be done before it can be had. `kernel` is what it is inside a kernel
    (for values of the parameter's shape), `between` what it is outside of one.
    """

    program: Program
    level: dict[Node, int] = field(default_factory=dict)
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
        self.taken = {b.name for b in self.program.buffers} | {c.name for c in self.program.scalars.columns}

    def split(self) -> Program:
        program = self.program
        stores = program.stages[0].stores
        roots = [s.value for s in stores] + ([program.skip] if program.skip is not None else [])
        for value in walk(roots):
            self._visit(value)
        wide = [s for s in stores if program.buffer(s.buffer).axes.elementwise]
        narrow = [s for s in stores if s not in wide]
        needed = [self.level[s.value] for s in wide] + ([self.level[program.skip]] if program.skip is not None else [])
        last = max([*needed, *self.reduces, *self.spilled, 0])
        if program.skip is not None and last in self.reduces:
            last += 1  # what all tensors take part in comes before the stage that some of them skip
        stages = [
            Stage(stores=tuple(self.spilled.get(i, ())), reduces=tuple(self.reduces.get(i, ()))) for i in range(last)
        ]
        final = [*self.spilled.get(last, ()), *(Store(s.buffer, self._inside(s.value)) for s in wide)]
        stages.append(Stage(stores=tuple(final), reduces=tuple(self.reduces.get(last, ()))))
        finish = tuple(Store(s.buffer, self._outside(s.value)) for s in narrow)
        skip = None if program.skip is None else self._outside(program.skip)
        shared = joins(program, self.inference)
        sites = {self.between[value]: program.sites[value] for value in shared}
        return replace(self._assembled(stages, finish, skip), joins=tuple(sites), sites=sites)

    def _assembled(self, stages: list[Stage], finish: tuple[Store, ...], skip: Node | None) -> Program:
        program = replace(
            self.program, buffers=(*self.program.buffers, *self.buffers), late=tuple(self.columns),
            vectors=tuple(self.vectors.values()), stages=tuple(stages), finish=finish, skip=skip, labels=self._labels(),
        )  # fmt: skip
        known = len(program.scalars.columns)
        columns_done: set[int] = set()
        vectors_done: set[str] = set()
        done = []
        for stage in stages:
            values = list(walk(stage.roots))
            late = {int(n.arg) for n in values if n.op is Op.SCALAR and int(n.arg) >= known}  # type: ignore[call-overload]
            reads = [r.name for r in program.vectors if any(n.op is Op.RESULT and n.arg == r.name for n in values)]
            vectors = tuple(n for n in reads if n not in vectors_done)
            done.append(replace(stage, columns=tuple(sorted(late - columns_done)), vectors=vectors, reads=tuple(reads)))
            columns_done |= late
            vectors_done |= set(vectors)
        return replace(program, stages=tuple(done))

    def _labels(self) -> dict[Node, str]:
        labels = dict(self.program.labels)
        for value, label in self.program.labels.items():
            for side in (self.kernel, self.between):
                if value in side and side[value].op.kind is not Kind.LEAF:
                    labels.setdefault(side[value], label)
        return labels

    # One value

    def _visit(self, value: Node) -> None:
        below = max((self.level[a] for a in value.args), default=0)
        self.level[value] = below
        if value.op.kind is Kind.LEAF:
            self.kernel[value] = self.between[value] = value
        elif value.op.kind is Kind.REDUCE:
            self._reduce(value)
        elif value.op.kind in (Kind.MATRIX, Kind.RANDOM):
            self._matrix(value)
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
        stage, own = self.level[operand], _KERNEL_LEVEL[level]
        self.level[value] = stage + 1
        made = node(value.op, self._inside(operand), own)
        found = next((r for r in self.reduces.get(stage, ()) if r.value is made), None)
        if found is None:
            name = value_name(self.program, value, f"{value.op.symbol}_{level}", self.taken)
            found = Result(name, made, axes_of_level(own, self._axes(operand)))
            self.reduces.setdefault(stage, []).append(found)
        result = node(Op.RESULT, found.name)
        self.between[value] = result if own == level else node(value.op, result, level)

    def _matrix(self, value: Node) -> None:
        operands = []
        for operand in value.args:
            if operand in self.between:
                operands.append(self.between[operand])
            else:
                operands.append(self._materialised(operand))
                self.level[value] = max(self.level[value], self.level[operand] + 1)
        self.between[value] = node(value.op, *operands, value.arg)

    def _materialised(self, value: Node) -> Node:
        """A value of the parameter's shape as memory that a matrix function can read."""
        stage, inside = self.level[value], self.kernel[value]
        stores = self.spilled.setdefault(stage, [])
        found = next((s.buffer for s in stores if s.value is inside), None)
        if found is None:
            found = value_name(self.program, value, "operand", self.taken)
            self.buffers.append(Buffer(found, "scratch", ELEMENT))
            stores.append(Store(found, inside))
        return node(Op.LOAD, found)

    # The two sides

    def _outside(self, value: Node) -> Node:
        return self.between[value] if value in self.between else self._materialised(value)

    def _inside(self, value: Node) -> Node:
        """The value as a kernel has it: computed there, or read from the table or a vector."""
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
            self.vectors[outside] = Result(name, outside, self._axes(value))
        return node(Op.RESULT, self.vectors[outside].name)
