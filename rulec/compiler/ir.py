"""The compiled form of a rule, the program: buffers, a scalar program, and stages.

Every value has axes, letters in the order of `AXES`: `k` group, `n` tensor (with `n` always comes `k`), `b` leading
batch, `i` row, `j` column. A parameter is `knbij`, a per-tensor norm `kn`, a model-wide value has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rulec.errors import InternalError
from rulec.language.expr.counts import Count
from rulec.language.expr.node import Kind, Node, Op, node, walk
from rulec.language.hyper import Hyper
from rulec.language.rule_data import RuleData
from rulec.language.source import Span
from rulec.language.statistics import Watched

AXES = "knbij"

#: The segments of a batch that is several axes of a tensor: a value of one of them has its letter in place of `b`.
PARTS = "0123456789"

#: The letters of axes in their order.
LETTERS = f"kn{PARTS}bij"

#: The line of a reduction over several tensors, and its number in that line: only to be compared.
Site = tuple[str | int, ...]

#: Level of the language -> axes of a value at this level.
LEVEL_AXES: Mapping[str, str] = {
    "element": "knbij", "row": "knbi", "col": "knbj", "matrix": "knb", "tensor": "kn", "group": "k", "model": "",
    # `axis(i)` of more than two segments of axes: rows or columns of all matrices, or a part of the batch.
    "axis_i": "kni", "axis_j": "knj", **{f"axis_{part}": f"kn{part}" for part in PARTS},
}  # fmt: skip


def part_extent(part: str) -> Node:
    """The fact of the extent of a segment of the batch: no rule can write it."""
    return node(Op.FACT, f"part{part}")


ROWS, COLS = node(Op.FACT, "rows"), node(Op.FACT, "cols")


#: The place of a value's first line, and its expression there.
Written = tuple[Span | None, Node]


@dataclass(frozen=True)
class Axes:
    """The axes of a value, and the extents of its rows and columns where it has them.

    The extents are expressions of shape facts and static hyper-parameters: `rows` and `cols` for values of the
    parameter's shape, others for a low-rank state.
    """

    letters: str = ""
    rows: Node | None = None
    cols: Node | None = None

    def __str__(self) -> str:
        return self.letters or "none"

    @property
    def number(self) -> bool:
        """Whether the value is one number for a tensor, for a group or for the model."""
        return set(self.letters) <= {"k", "n"}

    @property
    def elementwise(self) -> bool:
        """Whether the value has one element for each element of the parameter."""
        return self.letters == AXES and self.rows is ROWS and self.cols is COLS


def axes_of_letters(letters: str) -> Axes:
    """Axes with the parameter's own extents."""
    return Axes(letters, ROWS if "i" in letters else None, COLS if "j" in letters else None)


def axes_of_level(level: str, operand: Axes) -> Axes:
    """The axes of a value with the axes `operand` after its reduction to a level."""
    having = {*operand.letters, *(PARTS if "b" in operand.letters else "")}
    letters = "".join(c for c in LETTERS if c in having and c in LEVEL_AXES[level])
    return Axes(letters, operand.rows if "i" in letters else None, operand.cols if "j" in letters else None)


@dataclass(frozen=True)
class Buffer:
    """Memory that stages load from and store to. Its dtype is in the layout.

    `role` is `param`, `grad`, `state`, `input`, `scratch` or `statistic`; one stage stores scratch and later stages
    load it. A statistic has no memory: the runtime takes its value after the last stage. `init` is a state's first
    value, as an expression of hyper-parameters, shape facts and the parameter `p`.
    """

    name: str
    role: str
    axes: Axes
    init: Node | None = None


@dataclass(frozen=True)
class Store:
    """`buffer` takes this value, rounded to the buffer's dtype."""

    buffer: str
    value: Node


@dataclass(frozen=True)
class Result:
    """A value with a name, read as `RESULT name`: a reduction by a kernel, or a vector read by a kernel."""

    name: str
    value: Node
    axes: Axes


@dataclass(frozen=True)
class Column:
    """One column of the scalar table, with one value per tensor. Kernels read it and never compute it."""

    name: str
    value: Node


@dataclass(frozen=True)
class Stage:
    """One pass of a kernel over the tensors, and the values to compute before it.

    `stores` write buffers of the parameter's shape; `reduces` are sums, minima and maxima of values of this shape, per
    tensor, row or column. `columns` (places in the scalar table) and `vectors` (names of results) are the values that
    this stage is the first to need. `reads` are the names of all results read by its kernel.
    """

    stores: tuple[Store, ...] = ()
    reduces: tuple[Result, ...] = ()
    columns: tuple[int, ...] = ()
    vectors: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def roots(self) -> list[Node]:
        """The expressions computed for each element."""
        return [*(s.value for s in self.stores), *(r.value.args[0] for r in self.reduces)]

    @property
    def divisors(self) -> list[int]:
        """The columns of the scalar table that divide: each divides a value of every element of a tensor."""
        divided = {n.args[1] for n in walk(self.roots) if n.op is Op.DIV and n.args[1].op is Op.SCALAR}
        return sorted(int(n.arg) for n in divided)  # type: ignore[call-overload]


@dataclass(frozen=True)
class ScalarProgram:
    """The values that depend on hyper-parameters, `t` and shape facts alone: in float64, once per distinct (group, t).

    `stores` are the states with such a value, for example NAdam's product of momenta.
    """

    columns: tuple[Column, ...] = ()
    stores: tuple[Store, ...] = ()


@dataclass(frozen=True)
class Memory:
    """How a program stores its values, where this is more than a dtype: see `rulec.compiler.weights`.

    `weights` is the kind of the parameter; empty for a plain one. `unbiased` are the states that are rounded at random.
    `places` are the facts of a part of a tensor that the place of an element follows from, `RANGE` or `ROWS`; none for
    a whole tensor. If `exclusive`, steps alone write the parameter: a master copy counts without a look at it.
    """

    weights: str = ""
    unbiased: frozenset[str] = frozenset()
    places: tuple[str, ...] = ()
    exclusive: bool = False

    @property
    def random(self) -> bool:
        """Whether a step rounds at random."""
        return self.weights == "stochastic" or bool(self.unbiased)


#: The memory of a program whose values have dtypes alone.
PLAIN = Memory()


@dataclass(frozen=True)
class Program:
    """A compiled rule. Backends print it, and the runtime runs it.

    The scalar table has the columns of `scalars`, known before a step, then those of `late`, computed from reductions.
    `vectors` are the rows, columns and matrices read by kernels, and the results of matrix functions of the parameter's
    shape. `finish` are the stores of values narrower than the parameter, or of another shape, after the last stage.
    Kernels compute none of these: the runtime does, between the stages.

    `parts` is the number of segments of the batch, where it has several.

    `labels` are the author's names for values, for readable output; `places` are the lines that last assigned each
    name, for errors. `skip` is true for a step that changes nothing. `predicates` are the conditions of branches known
    before a step, by their place among the rule's branches: this program has both arms, and a variant of it has one.
    `meant` has the axes over both arms of the names that such a branch assigns.
    `joins` are the reductions over several tensors, in the order in which a step takes them, and `sites` their lines
    in the rule, in its order. Programs of one rule for different shapes match their joins by site.
    `counts` are the values that must be whole numbers. `memory` says how the parameter and states are stored, beyond
    their dtypes. `static` are the values of static hyper-parameters.
    `written` has the author's line and expression of each value, for errors. `watch` are the statistics it measures.

    Two compilations of one rule for one set of decisions are the same object.
    """

    name: str
    rule: RuleData
    buffers: tuple[Buffer, ...]
    hyper: Mapping[str, Hyper]
    stages: tuple[Stage, ...]
    scalars: ScalarProgram = field(default_factory=ScalarProgram)
    late: tuple[Column, ...] = ()
    vectors: tuple[Result, ...] = ()
    finish: tuple[Store, ...] = ()
    labels: Mapping[Node, str] = field(default_factory=dict)
    skip: Node | None = None
    evaluate: Node | None = None
    places: Mapping[str, Span] = field(default_factory=dict)
    predicates: tuple[tuple[int, Node], ...] = ()
    sites: Mapping[Node, Site] = field(default_factory=dict)
    joins: tuple[Node, ...] = ()
    counts: tuple[Count, ...] = ()
    memory: Memory = PLAIN
    decisions: tuple[str, ...] = ()
    reduced: frozenset[str] = frozenset()
    parts: int = 0
    meant: Mapping[int, Mapping[str, Axes]] = field(default_factory=dict)
    static: Mapping[str, float] = field(default_factory=dict)
    written: Mapping[Node, Written] = field(default_factory=dict)
    watch: Watched = ()

    def buffer(self, buffer_name: str) -> Buffer:
        """The buffer of this name."""
        return self._by_name[buffer_name]

    @cached_property
    def _by_name(self) -> Mapping[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @property
    def states(self) -> tuple[Buffer, ...]:
        """The buffers of the rule's states."""
        return tuple(b for b in self.buffers if b.role == "state")

    @property
    def statistics(self) -> tuple[Buffer, ...]:
        """The statistics that a step measures, as buffers without memory."""
        return tuple(b for b in self.buffers if b.role == "statistic")

    @cached_property
    def finished(self) -> frozenset[str]:
        """The buffers that are stored after the last stage."""
        return frozenset(s.buffer for s in self.finish)

    @property
    def measured(self) -> frozenset[str]:
        """The reductions that statistics alone read, by name."""
        names = {b.name for b in self.statistics}
        others = [*(c.value for c in self.late), *(v.value for v in self.vectors)]
        others += [s.value for s in self.finish if s.buffer not in names] + ([] if self.skip is None else [self.skip])
        read = {str(n.arg) for n in walk(others) if n.op is Op.RESULT}
        return frozenset(r.name for stage in self.stages for r in stage.reduces) - read

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns of the scalar table: those known before a step, then the late ones."""
        return (*self.scalars.columns, *self.late)

    @property
    def between(self) -> list[Node]:
        """The values computed outside of kernels after the first stage: late columns, vectors, and last stores."""
        return [*(c.value for c in self.late), *(v.value for v in self.vectors), *(s.value for s in self.finish)]

    def wanted_before(self, index: int) -> list[Node]:
        """The values outside of kernels that a stage needs, and before the last stage `skip` too."""
        stage = self.stages[index]
        wanted = [self.columns[i].value for i in stage.columns]
        wanted += [self.result(name).value for name in stage.vectors]
        return wanted + ([self.skip] if self.skip is not None and index == len(self.stages) - 1 else [])

    @property
    def gaps(self) -> list[list[Node]]:
        """The values to compute before each stage at the latest, with those of `finish` before the last."""
        wanted = [self.wanted_before(index) for index in range(len(self.stages))]
        return [*wanted[:-1], [*wanted[-1], *(s.value for s in self.finish)]]

    @property
    def shares_in_branches(self) -> bool:
        """Whether a branch known before a step assigns a state of a group or of the model.

        Its value follows from the count of that level, and not from a tensor's.
        """
        states = {key for names in self.meant.values() for key in names} & self.rule.state.keys()
        return any(self.rule.state[key].per in ("group", "model") for key in states)

    def result(self, result_name: str) -> Result:
        """The vector or reduction of this name."""
        return self._results[result_name]

    @cached_property
    def _results(self) -> Mapping[str, Result]:
        return {r.name: r for r in (*self.vectors, *(r for s in self.stages for r in s.reduces))}

    @property
    def elementwise(self) -> bool:
        """Whether one kernel call is the whole step: one stage, with nothing to compute before or after it."""
        return len(self.stages) == 1 and not (self.stages[0].reduces or self.vectors or self.late or self.finish)

    __hash__ = object.__hash__


def verify(program: Program, after: str) -> Program:
    """The same program; InternalError, naming the pass, where an invariant does not hold."""
    buffers = {b.name for b in program.buffers}
    between = program.between
    results = {v.name for v in program.vectors}
    cut = len(program.stages) > 1 or bool(between)
    written: set[str] = set()

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InternalError(f"after {after}, {program.name}: {message}")

    for stage in program.stages:
        for value in walk(stage.roots):
            require(value.op is not Op.NAME, f"the name {value.arg!r} is unresolved")
            if value.op is Op.LOAD:
                require(value.arg in buffers, f"loads {value.arg!r}, which is no buffer")
            if value.op is Op.SCALAR:
                require(int(value.arg) < len(program.columns), "reads past the scalar table")  # type: ignore[call-overload]
            if value.op is Op.RESULT:
                require(value.arg in results, f"a kernel reads {value.arg!r}, which is no vector")
            if cut:
                inside = value.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM)
                require(not inside, f"{value.op.symbol} stands inside a stage")
        stores = [s.buffer for s in stage.stores]
        require(len(stores) == len(set(stores)), "a buffer is stored twice in one stage")
        require(set(stores) <= buffers and "g" not in stores, "a store goes where it must not")
        require(not written & set(stores), "two stages store one buffer")
        written |= set(stores)
    results |= {r.name for stage in program.stages for r in stage.reduces}
    for value in walk(between):
        if value.op is Op.RESULT:
            require(value.arg in results, f"reads {value.arg!r}, which nothing makes")
    _verify_scratch(program, require)
    return program


def _verify_scratch(program: Program, require: Callable[[bool, str], None]) -> None:
    """Scratch memory is written by a stage before any value outside of kernels reads it."""
    unwritten = {b.name for b in program.buffers if b.role == "scratch"}
    for stage, wanted in zip(program.stages, program.gaps if unwritten else (), strict=False):
        for value in walk(wanted):
            early = value.op is Op.LOAD and value.arg in unwritten
            require(not early, f"reads the scratch memory {value.arg!r} before a stage writes it")
        unwritten -= {s.buffer for s in stage.stores}
