"""The plan of a program, for every step: the values to compute between its stages (gaps), and their order.

Some gaps project a parameter to fewer rows, and are computed tile by tile. A rule such as Apollo multiplies gradients
by a narrow random matrix, and stores and reduces values of the product's shape. Each element of such a value follows
from the same element of the product. So one tile at a time is computed, used and dropped: the projection, the gradient
in another dtype and the product are never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rulec.compiler.axes import AxisInference, over_repeated
from rulec.compiler.ir import Axes, Program, Stage, Store
from rulec.language.expr.node import Kind, Node, Op, is_boolean, walk
from rulec.language.expr.static import ALONG, ORDERS
from rulec.language.statistics import PREFIX
from rulec.runtime.buckets.flat import axes_in_flat
from rulec.runtime.buckets.rounds import in_rounds, rounds
from rulec.runtime.distributed.owner_plan import OwnerPlan, OwnerTask

#: Operations with a result in their operand's memory: it must be copied before the operand is written.
VIEWS = (Op.LOAD, Op.TRANSPOSE)


@dataclass(frozen=True)
class Gap:
    """The values computed before a stage, or after the last one, each after its operands.

    `over` maps a value to the values with their last use in it. A `projection`, if any, is computed tile by tile. For
    sharded matrices, `owner_plan` are the tasks of their owner ranks.
    """

    values: tuple[Node, ...]
    over: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    projection: Projection | None = None
    owner_plan: tuple[OwnerTask, ...] = ()


class Plan:
    """The gaps of a program, one before each stage and one after the last, and the axes of their values.

    Values stored at the end of the step are computed before the last stage wherever possible: its kernel overwrites
    their operands, and an error should come before anything is written. A value after the last stage follows from its
    reductions and from operands computed before it. `held` are the operands that must be copied before the kernel runs.

    `alone` is True where no tensor's update needs another tensor's value; then a bucket can be updated part by part.
    If `halved`, matrices are sharded, and `owner_plan` is the owner plan; else it is None. If `defers`, numbers
    among the statistics are computed when somebody asks, and the reductions of a shard for them are local.
    """

    def __init__(self, program: Program, halved: bool = False, defers: bool = False) -> None:
        self.program = program
        inference = AxisInference(program)
        done: set[Node] = set()
        #: The statistics that are computed once somebody asks, and the other stores after the last stage.
        self.asked, self.finish = _asked_later(program, inference) if defers else ((), program.finish)
        gaps = []
        for index, stage in enumerate(program.stages):
            wanted = program.wanted_before(index)
            if index == len(program.stages) - 1:
                waiting = _out_of_order(program, stage, wanted, done, [s.value for s in self.finish])
                wanted += _before([s.value for s in self.finish], stage, waiting)
            gaps.append(_gap(program, wanted, done))
        gaps.append(_gap(program, [s.value for s in self.finish], done))
        #: The values computed after the last stage.
        self.after = frozenset(gaps[-1].values)
        early = _before([s.value for s in self.finish], program.stages[-1], waiting)
        self.held = [n for n in early if n.op in VIEWS]
        self._leave(done)
        self.axes: dict[Node, Axes] = {value: inference.axes(value) for value in (*done, *self.later)}
        #: The values that are numbers of tensors, groups or the model.
        self.numbers = frozenset(value for value, axes in self.axes.items() if axes.number)
        #: The values that are numbers for each row and column; and by operands, whether numbers beside them are narrow.
        self.matrices = frozenset(v for v, axes in self.axes.items() if _is_matrix(axes) and not is_boolean(v))
        self.beside: dict[tuple[Node, ...], bool] = {}
        #: The buffers with arrays that are read between stages, where values may be views of them.
        self.arrays_read = tuple({str(v.arg) for v in done if v.op is Op.LOAD and v not in self.numbers})
        #: The axes of values in flat arrays; None for values that are never in one.
        self.in_flat = {value: axes_in_flat(axes) for value, axes in self.axes.items()}
        self.gaps = tuple(replace(gap, values=in_rounds(gap.values, self.in_flat, {*program.joins})) for gap in gaps)
        self._rounds: dict[tuple[Node, ...], list[tuple[Node, ...]]] = {}
        #: The reductions of values kept once for all matrices of a batch.
        self.over_repeated = over_repeated((value for gap in self.gaps for value in gap.values), self.axes)
        self.owner_plan: OwnerPlan | None = None
        self.gaps = self._delegated() if halved else self._followed()
        #: The states that get their new values in a gap, and not at the end of the step.
        self.stored_early = frozenset(name for g in self.gaps if g.projection for name in g.projection.stored)
        #: For each stage, the reductions that the step itself takes.
        self.taken = tuple(tuple(r for r in s.reduces if r.name not in self.unread) for s in program.stages)
        #: The statistics that the step itself computes: the name of each by its buffer.
        names = {b.name for b in program.statistics}
        self.measured = {s.buffer: s.buffer.removeprefix(PREFIX) for s in self.finish if s.buffer in names}
        #: Whether the last stage, or a gap after it, may wait for other ranks.
        self.ends_later = bool(self.taken[-1]) or any(
            n.op.kind is Kind.REDUCE or n.op.kind is Kind.MATRIX for n in self.gaps[-1].values
        )
        #: The reductions over several tensors of the step itself, in its order.
        self.joins = tuple(n for n in program.joins if n in done)
        self.alone = not self.joins
        before = program.stages[: self._stages_before_joins()]
        #: The buffers that are stored before the first of `joins`; in a plan without joins, before the last stage.
        self.stored_before_joins = frozenset(store.buffer for stage in before for store in stage.stores)
        #: Whether `newton_schulz` is computed, whose stacks have a size of their own.
        self.orthogonalizes = any(value.op is Op.NEWTON_SCHULZ for value in done)
        #: Whether the step itself reduces anything.
        self.reduces = any(self.taken) or any(n.op.kind is Kind.REDUCE for n in done)
        #: Whether late columns are of groups and the model: then tensors that share a row still do.
        self.late_alike = all(set(self.axes[c.value].letters) <= {"k"} for c in program.late)
        self._note_memory(program)

    def _stages_before_joins(self) -> int:
        """The number of stages before the first reduction over several tensors, without the last stage."""
        last = len(self.program.stages) - 1
        joins = {*self.joins}
        return min(last, next((k for k, gap in enumerate(self.gaps) if not joins.isdisjoint(gap.values)), last))

    def _note_memory(self, program: Program) -> None:
        """Notes which columns, vectors and scratch a step has, beside its gaps."""
        #: The columns of the table with one number for each group, and those of the tensors' shapes alone.
        self.columns_of_groups = _columns_of(program, _of_group)
        self.columns_of_facts = _columns_of(program, lambda leaf, program: leaf.op in (Op.CONST, Op.FACT))
        #: The states that gaps read or write as vectors, with their axes; and those of them that gaps read.
        self.vector_states = _vector_states(program)
        self.vectors_read = [str(n.arg) for g in self.gaps for n in g.values if n.op is Op.LOAD]
        self.vectors_read = [name for name in dict.fromkeys(self.vectors_read) if name in self.vector_states]
        self.scratch = [b.name for b in program.buffers if b.role == "scratch"]
        #: Whether anything as large as a parameter is made that is gone after the step.
        self.large = bool(self.scratch) or any(v.axes.elementwise for v in program.vectors)
        in_one = len(program.stages) == 1 and not (program.vectors or program.late or self.finish)
        #: Whether there is more to a step than one kernel call.
        self.staged = not in_one or program.skip is not None or any(
            b.role == "input" for b in program.buffers
        )  # fmt: skip

    def _leave(self, done: set[Node]) -> None:
        """Notes what a step leaves for statistics, beside the values `done` in gaps."""
        wanted = {*walk(s.value for s in self.asked)}
        joins = [n for n in self.program.joins if n in wanted]
        #: The values of the statistics asked for later, and their operands; reductions over tensors in their order.
        self.later = tuple(walk([*joins, *(s.value for s in self.asked)], set(done)))
        self.left = _left_for(self.asked, self.later, done)
        #: The reductions that nothing but such statistics needs, by name.
        self.unread = _results(self.later) - _results(done)

    def rounds(self, values: tuple[Node, ...]) -> list[tuple[Node, ...]]:
        """The values, one after the other, or several in one call."""
        if values not in self._rounds:
            self._rounds[values] = rounds(values, self.in_flat, {*self.program.joins})
        return self._rounds[values]

    def _followed(self) -> tuple[Gap, ...]:
        """The gaps, with the last uses of values and with projections; both need all gaps."""
        program, every = self.program, [value for gap in self.gaps for value in gap.values]
        users: dict[Node, list[Node]] = {value: [] for value in every}
        for value in every:
            for operand in value.args:
                users[operand].append(value)
        roots = self._roots() + self.held
        kept = {*roots, *self.left, *(s.value for s in self.finish)}
        last = {v: users[v][-1] for v in every if users[v] and v not in kept}
        over: dict[Node, tuple[Node, ...]] = {}
        for value, user in last.items():
            over[user] = (*over.get(user, ()), value)
        search = Search(program, self.axes, users, roots)
        return tuple(replace(gap, over=over, projection=search.find(gap.values)) for gap in self.gaps)

    def _roots(self) -> list[Node]:
        """The values that kernels use, and `skip`."""
        program = self.program
        roots = [program.columns[i].value for stage in program.stages for i in stage.columns]
        return roots + [v.value for v in program.vectors] + ([] if program.skip is None else [program.skip])

    def _delegated(self) -> tuple[Gap, ...]:
        """The gaps with their owner tasks."""
        kept = frozenset({*self._roots(), *self.left, *(s.value for s in self.finish)})
        self.owner_plan = OwnerPlan(self.program, [gap.values for gap in self.gaps], self.axes, kept)
        return tuple(
            replace(gap, owner_plan=tuple(cuts)) for gap, cuts in zip(self.gaps, self.owner_plan.gaps, strict=True)
        )


def _asked_later(
    program: Program, inference: AxisInference
) -> tuple[tuple[Store, ...], tuple[Store, ...]]:  # fmt: skip
    """The statistics of numbers of tensors, groups and the model, with no state among them; and the other stores."""
    names = {b.name for b in program.statistics}

    def is_later(store: Store) -> bool:
        values = [*walk([store.value])]
        return store.buffer in names and all(
            inference.axes(v).number and v.op is not Op.LOAD and (v.op.kind in _OF_NUMBERS or v in program.joins)
            for v in values
        )

    if program.skip is not None:
        return (), program.finish
    asked = tuple(store for store in program.finish if is_later(store))
    return asked, tuple(store for store in program.finish if store not in asked)


def _left_for(asked: Sequence[Store], later: Sequence[Node], done: Container[Node]) -> tuple[Node, ...]:
    """The values of a step that statistics asked for later read: computed in gaps, or columns of the scalar table."""
    read = [*(s.value for s in asked), *(a for value in later for a in value.args)]
    return tuple(dict.fromkeys(value for value in read if value in done or value.op is Op.SCALAR))


def _results(values: Iterable[Node]) -> frozenset[str]:
    """The names of the reductions among some values."""
    return frozenset(str(value.arg) for value in values if value.op is Op.RESULT)


def _is_matrix(axes: Axes) -> bool:
    return {"i", "j"} <= set(axes.letters)


def _columns_of(program: Program, chosen: Callable[[Node, Program], bool]) -> list[int]:
    """The columns known before a step whose leaves are all chosen."""
    columns = enumerate(column.value for column in program.scalars.columns)
    return [index for index, value in columns if all(chosen(n, program) for n in walk([value]) if not n.args)]


def _of_group(leaf: Node, program: Program) -> bool:
    """Whether a leaf has one number for each group."""
    if leaf.op is Op.LOAD:
        return "n" not in program.buffer(str(leaf.arg)).axes.letters
    return leaf.op in (Op.CONST, Op.HYPER, Op.MODEL_HYPER) or (leaf.op is Op.STEP and leaf.arg is not None)


def _vector_states(program: Program) -> dict[str, str]:
    """The states of rows, columns or matrices, with their axes in flat arrays."""
    axes = {b.name: axes_in_flat(b.axes) for b in program.states if b.name not in program.memory.unbiased}
    return {name: letters for name, letters in axes.items() if letters}


def _out_of_order(
    program: Program, stage: Stage, wanted: Sequence[Node], done: set[Node], finish: Sequence[Node]
) -> frozenset[Node]:  # fmt: skip
    """The joins that must not be computed before the last stage, as one before them waits for its reductions."""
    needed = set(walk(wanted, done))
    early = set(walk([*wanted, *_before(finish, stage)], done))
    later = [n for n in program.joins if n not in done]
    missing = next((place for place, n in enumerate(later) if n not in early), len(later))
    return frozenset(n for n in later[missing:] if n in early and n not in needed)


def _before(roots: Sequence[Node], stage: Stage, waiting: Container[Node] = ()) -> list[Node]:
    """The roots that do not depend on reductions of the stage or on `waiting`, and such operands of the others."""
    names = {r.name for r in stage.reduces}
    late: set[Node] = set()
    for value in walk(roots):
        reduced = value.op is Op.RESULT and value.arg in names
        if reduced or value in waiting or not late.isdisjoint(value.args):
            late.add(value)
    candidates = [*roots, *(a for value in walk(roots) if value in late for a in value.args)]
    return list(dict.fromkeys(value for value in candidates if value not in late))


def _gap(program: Program, wanted: Sequence[Node], done: set[Node]) -> Gap:
    """A gap: the joins in their order, up to the last that is needed, and the values wanted."""
    needed = set(walk(wanted, done))
    count = max((place for place, n in enumerate(program.joins, 1) if n in needed), default=0)
    values = tuple(walk([*program.joins[:count], *wanted], done))
    done.update(values)
    return Gap(values)


def needs_matrix(program: Program) -> str | None:
    """The first function of matrices alone that a program applies to an array of a parameter's shape; None without."""
    roots = program.between
    wide = {b.name for b in program.buffers if b.axes.elementwise}
    for value in walk(roots):
        reads = any(a.op is Op.LOAD and a.arg in wide for a in value.args)
        if value.op.kind is Kind.MATRIX and value.op not in (*ORDERS, *ALONG) and reads:
            return value.op.symbol
    return None


#: The kinds of operations on numbers of tensors that statistics may wait for.
_OF_NUMBERS = (Kind.LEAF, Kind.ARITHMETIC, Kind.COMPARE, Kind.LOGIC, Kind.FUNCTION)

#: The kinds of values in tiles: of the left operand, and of all others.
_LEFT = (Kind.RANDOM, Kind.ARITHMETIC, Kind.FUNCTION)
_OTHER = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.COMPARE, Kind.LOGIC)


@dataclass(frozen=True)
class Step:
    """One value of a tile, the stores to do after it, and the values with their last use in it."""

    value: Node
    stores: tuple[Store, ...]
    over: tuple[Node, ...]


@dataclass(frozen=True)
class Projection:
    """The one product of a gap, and the values of the same axes that follow from it.

    `left` leads to its left operand, row by row, and `right` to its right one, column by column, each value after its
    operands. `steps` are the values after the product, with their reductions. `before` and `after` are the gap's other
    values, computed before and after the projection.
    """

    product: Node
    axes: Axes
    left: tuple[Step, ...]
    right: tuple[Step, ...]
    steps: tuple[Step, ...]
    before: tuple[Node, ...]
    after: tuple[Node, ...]

    @property
    def reductions(self) -> tuple[Node, ...]:
        """The reductions over all tiles."""
        return tuple(step.value for step in self.steps if step.value.op.kind is Kind.REDUCE)

    @property
    def stored(self) -> frozenset[str]:
        """The states written during the projection."""
        return frozenset(store.buffer for step in self.steps for store in step.stores)


class Search:
    """Looks for the projection of a gap.

    `users` maps each value of the program's gaps to the values with it as an operand. `roots` are the values used
    outside gaps, except those stored at the end of the step.
    """

    def __init__(
        self, program: Program, axes: Mapping[Node, Axes], users: Mapping[Node, Sequence[Node]], roots: Sequence[Node]
    ) -> None:
        self.program, self.axes, self.users, self.roots = program, axes, users, frozenset(roots)

    def find(self, values: Sequence[Node]) -> Projection | None:
        """The projection of a gap of these values; None where there is none, or a value of it is needed whole."""
        products = [v for v in values if v.op is Op.MATMUL]
        if len(products) != 1 or self.program.skip is not None or self.program.joins:
            return None
        (product,) = products
        matrices = [v for v in values if self._is_matrix(v)]
        left, right = ([v for v in walk([operand]) if v in matrices] for operand in product.args)
        derived = [v for v in matrices if v not in left and v not in right]
        reductions = [v for v in values if v.op.kind is Kind.REDUCE and v.args[0] in derived]
        late = _following(values, reductions)
        parts = {*left, *right, *derived}
        stores = [s for s in self.program.finish if s.value in parts]
        if not (
            self._can_be_cut(product, left, right, derived)
            and self._stay_inside(parts, {*parts, *reductions}, stores)
            and all(s.value in derived for s in stores)
            and all({"n"} <= set(self.axes[r].letters) and not self._is_matrix(r) for r in reductions)
            and not any(a in late for v in parts for a in v.args)
        ):
            return None
        order = [v for v in values if (v in derived and v is not product) or v in reductions]
        others = [v for v in values if v not in parts and v not in reductions]
        return Projection(
            product, self.axes[product], _steps(left), _steps(right), _steps(order, stores, product),
            tuple(v for v in others if v not in late), tuple(v for v in others if v in late),
        )  # fmt: skip

    def _is_matrix(self, value: Node) -> bool:
        return {"i", "j"} <= set(self.axes[value].letters)

    def _can_be_cut(self, product: Node, left: Sequence[Node], right: Sequence[Node], derived: Sequence[Node]) -> bool:
        """Whether a tile of every value follows from the same tile of its operands."""
        axes = self.axes[product]
        alike = [v for v in derived if v is not product]
        return (
            not axes.elementwise
            and product.args[0] in left
            and product.args[1] in right
            and set(left).isdisjoint(right)
            and all(v.op.kind in _LEFT and self._of_numbers(v, left) for v in left)
            and all(v.op is Op.LOAD or v.op.kind in _OTHER for v in (*right, *alike))
            and all(self.axes[v] == axes for v in alike)
            and all(self.axes[v] == self.axes[product.args[1]] for v in right)
        )

    def _of_numbers(self, value: Node, parts: Sequence[Node]) -> bool:
        """Whether all operands of a value are numbers or among `parts`."""
        return all(a in parts or self.axes[a].number for a in value.args)

    def _stay_inside(self, parts: set[Node], inside: set[Node], stores: Sequence[Store]) -> bool:
        """Whether only values `inside` use the parts, and the states stored from them are read nowhere else."""
        loads = {str(v.arg) for v in self.users if v.op is Op.LOAD and v not in parts}
        return (
            all(u in inside for v in parts for u in self.users.get(v, ()))
            and self.roots.isdisjoint(parts)
            and all(s.value.op not in (Op.LOAD, Op.MATMUL) and s.buffer not in loads for s in stores)
        )


def _following(values: Sequence[Node], first: Sequence[Node]) -> set[Node]:
    """The values that depend on `first`, directly or not, and `first`."""
    derived: set[Node] = set(first)
    for value in values:
        if not derived.isdisjoint(value.args):
            derived.add(value)
    return derived


def _steps(order: Sequence[Node], stores: Sequence[Store] = (), product: Node | None = None) -> tuple[Step, ...]:
    """The values in this order as steps. A state is stored after the last read of its old value."""
    place = {value: number for number, value in enumerate(order)}
    last = dict(place)
    for number, value in enumerate(order):
        last.update((a, number) for a in value.args if a in place or a is product)
    read = {str(v.arg): last[v] for v in order if v.op is Op.LOAD}
    at = {s.buffer: max(place[s.value], read.get(s.buffer, 0)) for s in stores}
    last.update((s.value, max(last[s.value], at[s.buffer])) for s in stores)
    return tuple(
        Step(
            value,
            tuple(s for s in stores if at[s.buffer] == number),
            tuple(v for v, until in last.items() if until == number),
        )
        for number, value in enumerate(order)
    )
