"""The program a rule compiles to: buffers, a scalar program, and stages.

Every value has axes, letters in the order of `AXES`: `k` group, `n` tensor (with `n` always comes `k`), `b` leading
batch, `i` row, `j` column. A parameter is `knbij`, a per-tensor norm `kn`, a model-wide value has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rulec.language.counts import Count
from rulec.language.node import Node, Op, node
from rulec.language.rule import Hyper, Rule
from rulec.language.source import Span

AXES = "knbij"

#: Which line of a rule a reduction over several tensors stands in, and which of them it is: only to be compared.
Site = tuple[str | int, ...]

#: What remains of a value at each level of the language.
LEVEL_AXES: Mapping[str, str] = {
    "element": "knbij", "row": "knbi", "col": "knbj", "matrix": "knb", "tensor": "kn", "group": "k", "model": "",
}  # fmt: skip

ROWS, COLS = node(Op.FACT, "rows"), node(Op.FACT, "cols")


@dataclass(frozen=True)
class Axes:
    """The axes of a value, and the extents of its rows and columns where it has them.

    The extents are expressions of shape facts and static hyper-parameters: `rows` and `cols` for what has the
    parameter's own shape, others for a low-rank state.
    """

    letters: str = ""
    rows: Node | None = None
    cols: Node | None = None

    def __str__(self) -> str:
        return self.letters or "none"

    @property
    def elementwise(self) -> bool:
        """Whether there is one value per element of the parameter."""
        return self.letters == AXES and self.rows is ROWS and self.cols is COLS


def axes_of_letters(letters: str) -> Axes:
    """Axes with the parameter's own extents."""
    return Axes(letters, ROWS if "i" in letters else None, COLS if "j" in letters else None)


@dataclass(frozen=True)
class Buffer:
    """Memory that stages load from and store to.

    `role` is `param`, `grad`, `state`, `input`, or `scratch`: what one stage leaves for later ones. Its dtype is the
    layout's to choose; `init` is a state's first value as an expression of hyper-parameters, shape facts and the
    parameter `p`.
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
    """A value that is read as `RESULT name`: a reduction that a kernel makes, or what one reads beside its buffers."""

    name: str
    value: Node
    axes: Axes


@dataclass(frozen=True)
class Column:
    """One column of the scalar table: a value per tensor that kernels read and never compute."""

    name: str
    value: Node


@dataclass(frozen=True)
class Stage:
    """One pass of a kernel over the tensors, and what must be known before it.

    `stores` write buffers of the parameter's shape; `reduces` are sums, minima and maxima of such values, per tensor,
    row or column. `columns` are the late columns of the scalar table (their places in it) and `vectors` the names of
    the results that are worked out before this stage and not before an earlier one; `reads` are the names of all
    results that its kernel reads.
    """

    stores: tuple[Store, ...] = ()
    reduces: tuple[Result, ...] = ()
    columns: tuple[int, ...] = ()
    vectors: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def roots(self) -> list[Node]:
        """Every expression that the stage computes for each element."""
        return [*(s.value for s in self.stores), *(r.value.args[0] for r in self.reduces)]


@dataclass(frozen=True)
class ScalarProgram:
    """What depends on hyper-parameters, `t` and shape facts alone, in float64, once per distinct (group, t).

    `stores` are the states that belong here entirely, such as NAdam's product of momenta.
    """

    columns: tuple[Column, ...] = ()
    stores: tuple[Store, ...] = ()


@dataclass(frozen=True)
class Program:
    """A compiled rule: what a backend prints and the runtime runs.

    The scalar table has the columns of `scalars`, known before a step, and then those of `late`, which follow from
    reductions. `vectors` are values of rows, columns and matrices that kernels read, and results of matrix functions
    of the parameter's shape. `finish` are the stores of all that is narrower than the parameter, or of another shape,
    once the last stage is done. None of these is a kernel's work: the runtime does it between the stages.

    `labels` are the author's names for values, kept for readable output, and `places` the lines that last assigned
    each name, kept for errors. `skip` is true where a step is to leave everything as it is. `predicates` are the
    conditions of its branches that are known before a step, by their place among the rule's branches: both arms are in
    this program, and a variant of it has one. Two compilations of one rule for one set of decisions are the same
    object. `joins` are the reductions over several tensors, in the order of their `sites`, the lines of the rule that
    they come from: programs of one rule for tensors of different shapes match theirs by these. `counts` are what must
    be whole numbers, for each shape that the program is for.
    """

    name: str
    rule: Rule
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
    decisions: tuple[str, ...] = ()

    def buffer(self, buffer_name: str) -> Buffer:
        """The buffer of this name."""
        return next(b for b in self.buffers if b.name == buffer_name)

    @property
    def states(self) -> tuple[Buffer, ...]:
        """The buffers a rule remembers between steps."""
        return tuple(b for b in self.buffers if b.role == "state")

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns of the scalar table: those known before a step, then the late ones."""
        return (*self.scalars.columns, *self.late)

    def result(self, result_name: str) -> Result:
        """The vector or reduction of this name."""
        reduces = (r for s in self.stages for r in s.reduces)
        return next(r for r in (*self.vectors, *reduces) if r.name == result_name)

    @property
    def elementwise(self) -> bool:
        """Whether one kernel call does it all: one stage, with nothing to work out before or after it."""
        return len(self.stages) == 1 and not (self.stages[0].reduces or self.vectors or self.late or self.finish)

    __hash__ = object.__hash__
