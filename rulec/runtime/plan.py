"""What is to be worked out between the stages of a program, and in what order: found once, followed at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Axes, Program, Stage
from rulec.language.node import Kind, Node, Op, walk
from rulec.runtime.projection import Projection, Search

#: What gives memory of something else: it must be copied before that is written.
VIEWS = (Op.LOAD, Op.TRANSPOSE)


@dataclass(frozen=True)
class Gap:
    """The values worked out before a stage, or after the last one: each after those it is made of.

    `over` has, for a value, those that nothing needs once it is there. Where there is a `projection`, it is worked out
    tile by tile.
    """

    values: tuple[Node, ...]
    over: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    projection: Projection | None = None


class Plan:
    """The gaps of a program, one before each stage and one after the last, and the axes of everything in them.

    What is stored after the last stage is worked out before it wherever it can be: the stage's kernel overwrites what
    it is made of, and what fails should fail before anything is written. What it reads beside the last stage's
    reductions is worked out before, too; of this, `held` is what must be copied before the kernel runs.

    `alone` says that a tensor's update needs no other tensor's, so that a bucket can be updated part by part.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        inference = AxisInference(program)
        done: set[Node] = set()
        gaps = []
        for stage in program.stages:
            wanted = [program.columns[i].value for i in stage.columns]
            wanted += [program.result(name).value for name in stage.vectors]
            if stage is program.stages[-1]:
                wanted += [program.skip] if program.skip is not None else []
                wanted += _before([s.value for s in program.finish], stage)
            gaps.append(_gap(program, wanted, done))
        self.gaps = (*gaps, _gap(program, [s.value for s in program.finish], done))
        #: What is worked out after the last stage.
        self.after = frozenset(self.gaps[-1].values)
        self.held = [n for n in _before([s.value for s in program.finish], program.stages[-1]) if n.op in VIEWS]
        self.axes: dict[Node, Axes] = {value: inference.axes(value) for value in done}
        self.gaps = self._followed()
        #: The states that get their new values in a gap, and not at the end of the step.
        self.stored_early = frozenset(name for g in self.gaps if g.projection for name in g.projection.stored)
        self.joins = [n for gap in self.gaps for n in gap.values if n in program.joins]
        self.alone = not self.joins
        #: Whether late columns are of groups and the model: then tensors that share a row still do.
        self.late_alike = all(set(self.axes[c.value].letters) <= {"k"} for c in program.late)
        self.scratch = [b.name for b in program.buffers if b.role == "scratch"]
        #: Whether anything as large as a parameter is made that is gone after the step.
        self.large = bool(self.scratch) or any(v.axes.elementwise for v in program.vectors)
        #: Whether there is more to a step than one kernel call.
        self.staged = not program.elementwise or program.skip is not None or any(
            b.role == "input" for b in program.buffers
        )  # fmt: skip

    def _followed(self) -> tuple[Gap, ...]:
        """The gaps, with what is known of a value only when all of them are."""
        program, every = self.program, [value for gap in self.gaps for value in gap.values]
        users: dict[Node, list[Node]] = {value: [] for value in every}
        for value in every:
            for operand in value.args:
                users[operand].append(value)
        roots = [program.columns[i].value for stage in program.stages for i in stage.columns]
        roots += [v.value for v in program.vectors] + self.held + ([] if program.skip is None else [program.skip])
        kept = {*roots, *(s.value for s in program.finish)}
        last = {v: users[v][-1] for v in every if users[v] and v not in kept}
        over: dict[Node, tuple[Node, ...]] = {}
        for value, user in last.items():
            over[user] = (*over.get(user, ()), value)
        search = Search(program, self.axes, users, roots)
        return tuple(replace(gap, over=over, projection=search.find(gap.values)) for gap in self.gaps)


def _before(roots: Sequence[Node], stage: Stage) -> list[Node]:
    """These values, or what of them is not made of a reduction of this stage."""
    names = {r.name for r in stage.reduces}
    late: set[Node] = set()
    for value in walk(roots):
        if (value.op is Op.RESULT and value.arg in names) or not late.isdisjoint(value.args):
            late.add(value)
    found = [*roots, *(a for value in walk(roots) if value in late for a in value.args)]
    return list(dict.fromkeys(value for value in found if value not in late))


def _gap(program: Program, wanted: Sequence[Node], done: set[Node]) -> Gap:
    """A gap, its joins in the order of their sites: all programs of a rule come to them in that order."""
    needed = set(walk(wanted, done))
    values = tuple(walk([*(n for n in program.joins if n in needed), *wanted], done))
    done.update(values)
    return Gap(values)


def needs_matrix(program: Program) -> str | None:
    """The first matrix function that a program applies to something of the parameter's shape; None without one."""
    roots = [c.value for c in program.late] + [v.value for v in program.vectors] + [s.value for s in program.finish]
    wide = {b.name for b in program.buffers if b.axes.elementwise}
    for value in walk(roots):
        reads = any(a.op is Op.LOAD and a.arg in wide for a in value.args)
        if value.op.kind is Kind.MATRIX and reads:
            return value.op.symbol
    return None
