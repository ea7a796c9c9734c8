"""The layout of a kernel: the storage dtype of each buffer, and how a later stage gets a value of an earlier one.

Both are fixed when the kernel is made. The path of a value is chosen by the bytes moved. The later stage may compute it
again from its operands; read a new state back, stored by the earlier stage; or read a spilled value from scratch
memory. A state is read back only where it is stored in the dtype of arithmetic: otherwise it would come back rounded.
If a step may be skipped or refused late, no state is stored before the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from rulec.compiler.decoded import decoded_between
from rulec.compiler.ir import Buffer, Program, Stage, Store, verify
from rulec.compiler.names import free_name
from rulec.compiler.stages import ELEMENT, with_late_statistics, with_reads, without_statistics
from rulec.compiler.weights import part_dtypes, without_rounding
from rulec.formats import UNBIASED, Format
from rulec.language.expr.node import Kind, Node, Op, name, node, rewrite, walk

#: Storage dtype of an element, by our name -> its size in bytes. Integers are for parts of weights.
ITEM_SIZE: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}

#: The storage dtypes of parameters, gradients and states.
FLOATS = ("float32", "float64", "bfloat16", "float16")

#: The words for the storage of a state that name no format of codes.
PLAIN_STORAGE = (*FLOATS, UNBIASED)


def scale_name(state: str) -> str:
    """The name of the scales of a state in codes, beside the name of its codes, the state's own."""
    return f"{state}::scale"


@dataclass(frozen=True)
class Layout:
    """The storage dtype of each buffer, in the program's order of buffers.

    A state in `formats` is stored in codes: a kernel decodes it to its dtype, float32, and encodes the new value. With
    `maximize`, gradients point uphill and are negated as they are loaded. With `transposed`, the rows of the
    rule's matrices are the columns in memory. `results` are the vectors that are not in the dtype of arithmetic.
    """

    dtypes: tuple[tuple[str, str], ...]
    maximize: bool = False
    transposed: bool = False
    formats: tuple[tuple[str, Format], ...] = ()
    results: tuple[tuple[str, str], ...] = ()

    def result(self, name: str) -> str:
        """The dtype of a vector in memory."""
        return dict(self.results).get(name, self.compute)

    def dtype(self, buffer: str) -> str:
        """The storage dtype of a buffer."""
        return dict(self.dtypes)[buffer]

    def format(self, buffer: str) -> Format | None:
        """The format of a state stored in codes; None for any other buffer."""
        return dict(self.formats).get(buffer)

    def size(self, buffer: str) -> float:
        """The bytes of an element of a buffer in memory; for a state in codes with its share of the scale."""
        form = self.format(buffer)
        return ITEM_SIZE[self.dtype(buffer)] if form is None else form.bits / 8 + ITEM_SIZE["float32"] / form.block

    @property
    def decoded(self) -> Layout:
        """The same layout with all states decoded."""
        return replace(self, formats=())

    @cached_property
    def compute(self) -> str:
        """The dtype of arithmetic, scratch and vectors: float64 where any buffer has it, otherwise float32."""
        return "float64" if any(d == "float64" for _, d in self.dtypes) else "float32"

    def of(self, program: Program) -> Layout:
        """The layout of another version of the program: with the same states, and scratch of its own."""
        known = dict(self.dtypes)
        dtypes = tuple((b.name, known.get(b.name, self.compute)) for b in array_buffers(program))
        return replace(self, dtypes=dtypes, results=())

    def text(self) -> str:
        """The layout in one line, for messages and file names."""
        short = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int16": "i16", "int8": "i8"}
        words = [f"{b}:{form.key if (form := self.format(b)) else short[d]}" for b, d in (*self.dtypes, *self.results)]
        return " ".join(words + ["maximize"] * self.maximize + ["transposed"] * self.transposed)


def layout_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
    transposed: bool = False,
    formats: Mapping[str, Format] | None = None,
) -> Layout:
    """The layout for parameters of dtype `param`: gradients, states and inputs have the same unless said otherwise.

    Inputs of a shape of their own are in the dtype of arithmetic.

    States in `formats` are stored in codes.
    """
    formats = formats or {}
    chosen = {"p": param, "g": grad or param, **(states or {}), **dict.fromkeys(formats, "float32")}
    chosen |= part_dtypes(program)
    stored = [b for b in array_buffers(program) if b.role != "scratch"]
    of_a_shape = [b.name for b in stored if b.role == "input" and not b.axes.elementwise]
    dtypes = [(b.name, chosen.get(b.name, param)) for b in stored if b.name not in of_a_shape]
    compute = Layout(tuple(dtypes)).compute
    dtypes += [(name, compute) for name in of_a_shape]
    dtypes += [(b.name, compute) for b in kernel_buffers(program) if b.role == "scratch"]
    return Layout(tuple(dtypes), maximize, transposed, tuple(formats.items()))


class Kernel(NamedTuple):
    """A program that moves the fewest bytes in its layout, and the layout with its scratch buffers."""

    program: Program
    layout: Layout


def scheduled(program: Program, layout: Layout, early: bool = True) -> Kernel:
    """The program after the passes that depend on the layout; `early` is for `choose_rereads`."""
    program = verify(decoded_between(program, dict(layout.formats)), "decoded_between")
    if layout.dtype("p") == layout.compute:
        program = verify(without_rounding(program), "without_rounding")
    sizes = {buffer: layout.size(buffer) for buffer, _ in layout.dtypes}
    best = verify(choose_rereads(program, sizes, ITEM_SIZE[layout.compute], early), "choose_rereads")
    return Kernel(best, layout.of(best))


def kernel_for(
    program: Program,
    param: str,
    grad: str | None = None,
    states: Mapping[str, str] | None = None,
    maximize: bool = False,
    transposed: bool = False,
) -> Kernel:
    """The program and layout for parameters of dtype `param`: see `layout_for`."""
    return scheduled(program, layout_for(program, param, grad, states, maximize, transposed))


def traffic(program: Program, layout: Layout) -> tuple[float, float]:
    """The bytes read and written for each element over all stages: the measure of a kernel's speed."""
    read: float = 0
    written: float = 0
    pointers = {b.name for b in kernel_buffers(program)}
    for stage in program.stages:
        loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        read += sum(layout.size(b) for b in loads & pointers)
        read += sum(ITEM_SIZE[layout.result(name)] for name in stage.reads if program.result(name).axes.elementwise)
        written += sum(layout.size(s.buffer) for s in stage.stores)
    return read, written


def reads_parameter(program: Program) -> bool:
    """Whether a step reads the parameter: in a stage, or in a value between stages."""
    values = [*(root for stage in program.stages for root in stage.roots), *program.between]
    values += [] if program.skip is None else [program.skip]
    return any(n.op is Op.LOAD and n.arg == "p" for n in walk(values))


def stores_parameter(program: Program) -> int | None:
    """The last stage that writes the parameter; None where no stage does."""
    stages = [k for k, stage in enumerate(program.stages) for store in stage.stores if store.buffer == "p"]
    return max(stages, default=None)


def kernel_buffers(program: Program) -> list[Buffer]:
    """The buffers with a pointer in a kernel, in order: those of the parameter's shape."""
    return [b for b in program.buffers if b.axes.elementwise]


def array_buffers(program: Program) -> list[Buffer]:
    """The buffers with an array for each tensor: of its shape, of its rows or columns, or of a shape of their own.

    The other buffers are single numbers for a tensor, a group or the model.
    """
    return [b for b in program.buffers if not b.axes.number and b.role != "statistic"]


def is_viewed(program: Program) -> bool:
    """Whether a program sees tensors as matrices, or the places of elements: then they must be contiguous in memory."""
    kept = any(not b.axes.elementwise for b in array_buffers(program))
    scratch = any(b.role == "scratch" for b in program.buffers)
    return bool(kept or scratch or program.vectors) or is_shaped(program) or has_chance(program)


def has_chance(program: Program) -> bool:
    """Whether random bits of an element follow from its place in its tensor."""
    values = [*(root for stage in program.stages for root in stage.roots), *program.between]
    return any(n.op is Op.CHANCE for n in walk(values))


def is_shaped(program: Program) -> bool:
    """Whether a kernel must know the row and column of an element."""
    reduced = [r.axes for stage in program.stages for r in stage.reduces]
    read = [v.axes for v in program.vectors if not v.axes.elementwise]
    return any(not axes.number for axes in reduced + read)


#: Most states to store early, and most values to spill: all their combinations are tried.
_MOST = 6

#: The size of an element of a buffer, in bytes.
Sizes = Mapping[str, float]


@dataclass(frozen=True)
class _Choice:
    """States stored by an earlier stage, and a value spilled, each with the number of its stage."""

    early: tuple[tuple[Store, int], ...] = ()
    spill: tuple[Node, int] | None = None


def choose_rereads(program: Program, sizes: Sizes, compute: int, early: bool = True) -> Program:
    """The program that moves the fewest bytes, with the choice and its reason in `decisions`.

    `sizes` are the stored sizes of the buffers' elements, and `compute` is the size of the dtype of arithmetic, in
    bytes. Without `early`, no state is stored before the last stage. Statistics leave the choice as it is without
    them, so that reductions of the rule have the same bits, unless it overwrites a value of a statistic.
    """
    if len(program.stages) == 1:
        return program
    chosen = _chosen(without_statistics(program), sizes, compute, early)
    best = _apply(program, chosen)
    if best is None:
        chosen = _chosen(program, sizes, compute, early)
        best = _apply(program, chosen)
    assert best is not None
    before, after = (with_late_statistics(each) for each in (program, best))
    why = _reason(program, chosen, moved(before, sizes, compute), moved(after, sizes, compute))
    return replace(after, decisions=(why,))


def _chosen(program: Program, sizes: Sizes, compute: int, early: bool) -> _Choice:
    """The choice that moves the fewest bytes."""
    least, chosen = moved(program, sizes, compute), _Choice()
    for choice in _choices(program, sizes, compute, early):
        candidate = _apply(program, choice)
        if candidate is not None and (cost := moved(candidate, sizes, compute)) < least:
            least, chosen = cost, choice
    return chosen


def moved(program: Program, sizes: Sizes, compute: int) -> float:
    """The bytes read and written by all stages for each element."""
    total: float = 0
    for stage in program.stages:
        loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        total += sum(sizes.get(b, compute) for b in loads | {s.buffer for s in stage.stores})
        total += sum(sizes.get(b, compute) for b in loads & {s.buffer for s in stage.stores})
        total += compute * sum(program.result(r).axes.elementwise for r in stage.reads)
    return total


def _choices(program: Program, sizes: Sizes, compute: int, early: bool = True) -> Iterator[_Choice]:
    states = _storable(program, sizes, compute)[:_MOST] if early else []
    sets = [combination for count in range(len(states) + 1) for combination in combinations(states, count)]
    spillable = _spillable(program)
    for stored in sets:
        yield _Choice(stored)
        for spill in spillable:
            yield _Choice(stored, spill)


def _computed(stage: Stage) -> set[Node]:
    return set(walk(stage.roots))


def _at_hand(program: Program, index: int) -> set[Node]:
    """The leaves in reach of a stage without further loads: its buffers, columns known by then, and vectors."""
    known = len(program.scalars.columns)
    late = {column for stage in program.stages[: index + 1] for column in stage.columns}
    vectors = {name for stage in program.stages[: index + 1] for name in stage.vectors}
    loaded = {n for n in _computed(program.stages[index]) if n.op is Op.LOAD}
    scalars = {node(Op.SCALAR, i) for i in (*range(known), *late)}
    reads = {n for n in _computed(program.stages[index]) if n.op is Op.RESULT}
    return loaded | scalars | reads | {node(Op.RESULT, v) for v in vectors if not program.result(v).axes.elementwise}


def _computable(roots: Sequence[Node], leaves: set[Node]) -> set[Node]:
    """The values under `roots` over the given leaves and constants alone."""
    computable: set[Node] = set()
    for value in walk(roots):
        if value in leaves or value.op is Op.CONST if value.op.kind is Kind.LEAF else computable.issuperset(value.args):
            computable.add(value)
    return computable


def _loading(roots: Sequence[Node]) -> set[Node]:
    """The values under `roots` that a buffer stands in."""
    loading: set[Node] = set()
    for value in walk(roots):
        if value.op is Op.LOAD or not loading.isdisjoint(value.args):
            loading.add(value)
    return loading


def _storable(program: Program, sizes: Sizes, compute: int) -> list[tuple[Store, int]]:
    """The states with a new value that an earlier stage can compute, each with the last such stage."""
    last = program.stages[-1]
    storable: list[tuple[Store, int]] = []
    if program.skip is not None:
        return storable
    computable = [_computable(last.roots, _at_hand(program, i)) for i in range(len(program.stages) - 1)]
    read_between = {n.arg for n in walk(program.between) if n.op is Op.LOAD}
    for store in last.stores:
        earlier = [i for i, values in enumerate(computable) if store.value in values]
        same = sizes.get(store.buffer) == compute
        if earlier and same and store.buffer not in read_between and store.value.op.kind is not Kind.LEAF:
            storable.append((store, earlier[-1]))
    return storable


def _spillable(program: Program) -> list[tuple[Node, int]]:
    """Values of the last stage that an earlier stage can compute, the largest first."""
    roots = program.stages[-1].roots
    last = {n for n in _loading(roots) if n.op.kind is not Kind.LEAF and not n.boolean}
    stage_of: dict[Node, int] = {}
    for index in range(len(program.stages) - 1):
        stage_of |= dict.fromkeys(last & _computable(roots, _at_hand(program, index)), index)
    return sorted(stage_of.items(), key=lambda pair: (-pair[0].size, repr(pair[0])))[: 2 * _MOST]


def _apply(program: Program, choice: _Choice) -> Program | None:
    """The program with this choice; None where a later stage needs an overwritten value."""
    stages = list(program.stages)
    labels = dict(program.labels)
    buffers: tuple[Buffer, ...] = program.buffers
    if choice.spill is not None:
        value, at = choice.spill
        buffer = free_name(program.labels.get(value) or "spilled", {b.name for b in buffers} | _names(program))
        buffers = (*buffers, Buffer(buffer, "scratch", ELEMENT))
        stages = [
            stage if index <= at else _with_roots(stage, {value: node(Op.LOAD, buffer)}, labels)
            for index, stage in enumerate(stages)
        ]
        stages[at] = replace(stages[at], stores=(*stages[at].stores, Store(buffer, value)))
    for store, at in choice.early:
        moved_stages = _stored_early(stages, store, at, labels)
        if moved_stages is None:
            return None
        stages = moved_stages
    return replace(program, buffers=buffers, stages=with_reads(program, stages), labels=labels)


def _names(program: Program) -> set[str]:
    reduces = {r.name for s in program.stages for r in s.reduces}
    return reduces | {c.name for c in program.columns} | {v.name for v in program.vectors}


def _stored_early(stages: Sequence[Stage], store: Store, at: int, labels: dict[Node, str]) -> list[Stage] | None:
    marker = name(f"\0{store.buffer}")
    done = list(stages)
    for index in range(at + 1, len(stages)):
        kept = replace(stages[index], stores=tuple(s for s in stages[index].stores if s.buffer != store.buffer))
        changed = _with_roots(kept, {store.value: marker}, labels)
        if any(n.op is Op.LOAD and n.arg == store.buffer for n in walk(changed.roots)):
            return None
        done[index] = _with_roots(changed, {marker: node(Op.LOAD, store.buffer)}, labels)
    done[at] = replace(done[at], stores=(*done[at].stores, store))
    return done


def _with_roots(stage: Stage, memo: Mapping[Node, Node], labels: dict[Node, str]) -> Stage:
    """The stage with values replaced; expressions of them keep their labels."""
    known = dict(memo)
    stores = tuple(Store(s.buffer, rewrite([s.value], lambda n: n, known)[0]) for s in stage.stores)
    reduces = tuple(
        replace(r, value=node(r.value.op, *rewrite(r.value.args, lambda n: n, known), r.value.arg))
        for r in stage.reduces
    )
    for value, replaced in known.items():
        if value in labels and replaced.op.kind is not Kind.LEAF:
            labels.setdefault(replaced, labels[value])
    return replace(stage, stores=stores, reduces=reduces)


def _reason(program: Program, choice: _Choice, before: float, after: float) -> str:
    last = len(program.stages) - 1
    words = []
    if choice.early:
        states = " and ".join(store.buffer for store, _ in choice.early)
        words.append(f"stage {choice.early[0][1]} stores {states}, which later stages read back")
    if choice.spill is not None:
        value, at = choice.spill
        words.append(f"stage {at} spills {program.labels.get(value) or 'a value'} for stage {last}")
    if words:
        return f"{' and '.join(words)}: {after:g} bytes an element, {before:g} where all is computed again"
    shared = set().union(*(_computed(s) for s in program.stages[:-1])) & _computed(program.stages[-1])
    if not any(n.op.kind is not Kind.LEAF for n in shared):
        return f"no stage computes what another has: {before:g} bytes an element"
    return f"stage {last} computes again what earlier ones did: {before:g} bytes an element, and no way moves fewer"
