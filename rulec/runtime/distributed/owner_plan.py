"""The plan of the values that owner ranks compute: global matrices, where every rank has a shard of each.

A value needs a global matrix where it is a matrix function, a random matrix of a shape of its own, a state of such a
shape, or follows from such a value. Every rank computes all other values for its shards. Operands of owners' values
travel to the owner of the matrix. The results travel back for kernels, states and reductions over tensors.

Used by `rulec.runtime.stages.owner_values`, and by `rulec.torch.memory_profile` for forecasts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rulec.array_api.newton_schulz import is_bound
from rulec.compiler.indices import is_of_elements
from rulec.compiler.ir import COLS, ROWS, Axes, Program
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.view import MatrixView
from rulec.language.expr.newton_schulz import multiplications
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.expr.static import DIRECT, NORM, inside, settings, statics
from rulec.runtime.distributed.owners import Share, Work


@dataclass(frozen=True)
class OwnerTask:
    """A task of owner ranks in a gap: ranks compute `local` and send `sent`, owners compute `whole` and return results.

    `sent` are values of shards, and states of a shape of their own. `returned` are the results, values of global
    tensors; a reduction over several tensors among them stands for the reduction within each. `over` are the local
    values with their last use in this task. `done` maps an owners' value to the values with their last use by owners in
    it, and `gone` are the values with no use by owners after the task.
    """

    local: tuple[Node, ...]
    sent: tuple[Node, ...]
    whole: tuple[Node, ...]
    returned: tuple[Node, ...]
    over: tuple[Node, ...] = ()
    done: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    gone: tuple[Node, ...] = ()


class OwnerPlan:
    """The owner tasks of a program, for each of its gaps; `gaps` are the values of gaps, and `axes` the axes of all.

    `kept` are values used outside gaps.
    """

    def __init__(
        self, program: Program, gaps: Sequence[Sequence[Node]], axes: Mapping[Node, Axes], kept: frozenset[Node]
    ) -> None:
        self.program, self._axes, self._kept = program, axes, kept
        self._users: dict[Node, list[Node]] = {}
        for value in (value for gap in gaps for value in gap):
            for operand in value.args:
                self._users.setdefault(operand, []).append(value)
        #: The values that owners compute.
        self.whole: dict[Node, None] = {}
        self._sent: set[Node] = set()
        cuts = [self._cut(gap) for gap in gaps]
        self.gaps = self._with_last_uses([[self._delegation(*cut) for cut in gap] for gap in cuts])

    def is_number(self, value: Node) -> bool:
        """Whether a value is a number of each tensor, of each group or of the model."""
        return self._axes[value].number

    def letters(self, value: Node) -> str:
        """The axes of a value."""
        return self._axes[value].letters

    def is_join(self, value: Node) -> bool:
        """Whether a value is reduced over several tensors."""
        return value.op.kind is Kind.REDUCE and "n" not in self._axes[value].letters

    def is_factor(self, value: Node) -> bool:
        """Whether a value has rows and columns, and not the parameter's shape."""
        return {"i", "j"} <= set(self._axes[value].letters) and not self._axes[value].elementwise

    def is_given(self, value: Node) -> bool:
        """Whether a value is an input with a shape of its own, which every rank is given whole."""
        return self.is_factor(value) and value.op is Op.LOAD and self.program.buffer(str(value.arg)).role == "input"

    def _is_whole(self, value: Node) -> bool:
        if value.op is Op.LOAD or value.op.kind is Kind.RANDOM:
            return self.is_factor(value)
        if is_of_elements(value):
            return False
        axes = self._axes[value]
        if value.op is Op.WIDEN and (axes.rows not in (None, ROWS) or axes.cols not in (None, COLS)):
            return True
        return value.op.kind is Kind.MATRIX or (any(a in self.whole for a in value.args) and not self.is_join(value))

    def _cut(self, values: Sequence[Node]) -> list[tuple[list[Node], list[Node]]]:
        """The local values and the owners' values of each owner task of a gap, in as few tasks as possible.

        Reductions over several tensors keep their order: unsharded tensors of the same rule compute theirs in it.
        """
        levels: dict[Node, int] = {}
        joined = 0
        for value in values:
            if self._is_whole(value):
                self.whole[value] = None
            waits = value not in self.whole
            levels[value] = max((levels[a] + (waits and a in self.whole) for a in value.args if a in levels), default=0)
            if self.is_join(value):
                levels[value] = joined = max(levels[value], joined)
        cuts: list[tuple[list[Node], list[Node]]] = [([], []) for _ in range(max(levels.values(), default=-1) + 1)]
        for value, level in levels.items():
            cuts[level][value in self.whole].append(value)
        return cuts

    def _delegation(self, local: Sequence[Node], whole: Sequence[Node]) -> OwnerTask:
        needed = [a for v in whole for a in v.args if a not in self.whole and not self.is_number(a)]
        needed += [v for v in whole if v.op is Op.LOAD and not self.is_given(v)]
        sent = tuple(v for v in dict.fromkeys(needed) if v not in self._sent)
        self._sent.update(sent)
        returned = tuple(dict.fromkeys(back for v in whole for back in self._returned(v)))
        return OwnerTask(tuple(local), sent, tuple(whole), returned)

    def _with_last_uses(self, gaps: Sequence[Sequence[OwnerTask]]) -> list[list[OwnerTask]]:
        """The same owner tasks with the values of which each has the last use."""
        local: dict[Node, int] = {}
        whole: dict[Node, tuple[int, Node | None]] = {}
        every = [d for gap in gaps for d in gap]
        for number, d in enumerate(every):
            used = [a for v in (*d.local, *d.whole) for a in v.args if a not in self.whole]
            local |= dict.fromkeys([*d.local, *used, *d.sent], number)
            whole |= {x: (number, v) for v in d.whole for x in (v, *v.args)}
            whole |= dict.fromkeys([x for v in d.returned for x in (v, *v.args)], (number, None))
        last = []
        for number, d in enumerate(every):
            over = tuple(v for v, at in local.items() if at == number and v not in self._kept)
            done = {v: tuple(x for x, at in whole.items() if at == (number, v)) for v in d.whole}
            last.append(
                replace(d, over=over, done=done, gone=tuple(x for x, at in whole.items() if at == (number, None)))
            )
        ends = itertools.accumulate(len(gap) for gap in gaps)
        return [last[end - len(gap) : end] for gap, end in zip(gaps, ends, strict=True)]

    def _returned(self, value: Node) -> list[Node]:
        outside = [user for user in self._users.get(value, ()) if user not in self.whole]
        back = [value] if value in self._kept or (outside and self.is_number(value)) else []
        return back + ([] if self.is_number(value) else outside)

    def stored_in(self, value: Node) -> str:
        """The buffer that a value is loaded from, or stored to as a state of a shape of its own; else empty."""
        if value.op is Op.LOAD:
            return str(value.arg)
        factor = self.is_factor(value)
        return next((s.buffer for s in self.program.finish if factor and s.value is value), "")

    @cached_property
    def shared(self) -> Node | None:
        """The Newton-Schulz node if it is the only work of owners, so that ranks can split it; otherwise None."""
        working = [d for gap in self.gaps for d in gap if d.sent or d.whole or d.returned]
        if len(working) != 1 or len(working[0].whole) != 1:
            return None
        ((value,), (d,)) = working[0].whole, working
        plain = value.op is Op.NEWTON_SCHULZ and d.sent == value.args[:1] and d.returned == (value,)
        return value if plain else None

    def share(self, hyper: Mapping[str, float], view: MatrixView, layout: Layout) -> Share | None:
        """The share of a single owner in the work on a tensor with this view; None where ranks may not split it."""
        if self.shared is None or view.batch != 1 or len(view.shape) != 2:
            return None
        keywords, steps = settings(self.shared), int(self._iterations(self.shared, hyper))
        if is_bound(keywords.get("normalize", NORM)):
            return None
        dtype = keywords.pop("dtype") or layout.compute
        return Share(min(view.rows, view.cols), steps, dtype, square=view.rows == view.cols, **keywords)

    def moved(self, layout: Layout) -> tuple[int, int]:
        """The bytes of an element of a tensor on its way to the owner, and of an element of the result."""
        every = [d for gap in self.gaps for d in gap]

        def size(values: Sequence[Node]) -> int:
            plain = [v for v in values if {"i", "j"} <= set(self.letters(v)) and not self.is_factor(v)]
            return sum(ITEM_SIZE[self.dtypes(v, layout)[0]] for v in plain)

        return sum(size(d.sent) for d in every), sum(size(d.returned) for d in every)

    def dtypes(self, value: Node, layout: Layout, scaled: bool = False) -> tuple[str, str]:
        """The dtype of a value in messages, and outside of them. If `scaled`, gradients are scaled when read."""
        if not {"i", "j"} <= set(self._axes[value].letters):
            return "float64", "float64"
        buffers = {str(value.arg)} if value.op is Op.LOAD else set()
        if self.is_factor(value) and value in self.whole:
            buffers |= {s.buffer for s in self.program.finish if s.value is value}
        kept = {layout.compute if scaled and b == "g" else layout.dtype(b) for b in buffers}
        return self._rounded_to(value) or (kept.pop() if len(kept) == 1 else layout.compute), layout.compute

    def _rounded_to(self, value: Node) -> str:
        """The dtype that a value is rounded to wherever owners use it, or where it is computed; empty without one."""
        places = [value] if value in self.whole else [u for u in self._users.get(value, ()) if u in self.whole]
        dtypes = {str(settings(v).get("dtype") or "") for v in places}
        return dtypes.pop() if len(dtypes) == 1 else ""

    @cached_property
    def hyper_names(self) -> tuple[str, ...]:
        """The hyper-parameters that the work on a tensor follows from."""
        sides = [side for v in self.whole for a in (v, *v.args) for side in (self._axes[a].rows, self._axes[a].cols)]
        steps = [self._steps(value) for value in self.whole if inside(value).op is Op.NEWTON_SCHULZ]
        sizes = [size for value in self.whole if value.op is Op.IN_BLOCKS for size in statics(value)]
        parts = walk([x for x in (*sides, *steps, *sizes) if x is not None])
        return tuple(sorted({str(part.arg) for part in parts if part.op is Op.HYPER}))

    def work(self, facts: Mapping[str, float], hyper: Mapping[str, float], view: MatrixView, layout: Layout) -> Work:
        """The work on a tensor with these facts, static numbers and view."""
        cost = self._multiplications(facts, hyper, view.batch)
        return Work(cost, *self.moved(layout), self.share(hyper, view, layout))

    def _multiplications(self, facts: Mapping[str, float], hyper: Mapping[str, float], matrices: int) -> float:
        """The multiplications of all owners' values of a tensor."""

        def sides(value: Node) -> tuple[float, float]:
            axes = self._axes[value]
            return tuple(1.0 if x is None else evaluate_once(x, hyper, facts, {}) for x in (axes.rows, axes.cols))  # type: ignore[return-value]

        def work(value: Node) -> float:
            every = [sides(a) for a in (value, *value.args)]
            if value.op is not Op.IN_BLOCKS:
                return _work(value, every, self._iterations(value, hyper))
            blocks = every[1][0] / evaluate_once(statics(value)[0], hyper, facts, {})
            of_block = [(rows / blocks, cols) for rows, cols in every]
            return blocks * _work(inside(value), of_block, self._iterations(value, hyper)) if blocks else 0.0

        return matrices * sum(map(work, self.whole))

    def _iterations(self, value: Node, hyper: Mapping[str, float]) -> float:
        """The number of iterations of `newton_schulz`; five where only a step knows it."""
        if inside(value).op is not Op.NEWTON_SCHULZ:
            return 0.0
        steps = self._steps(value)
        known = all(n.op is not Op.HYPER or n.arg in hyper for n in walk([steps]))
        return float(evaluate_once(steps, hyper, {}, {})) if known else 5.0

    def _steps(self, value: Node) -> Node:
        """The number of iterations of a `newton_schulz`, as an expression."""
        steps = value.args[1]
        return self.program.columns[int(steps.arg)].value if steps.op is Op.SCALAR else steps  # type: ignore[call-overload]


def _work(value: Node, sides: Sequence[tuple[float, float]], iterations: float) -> float:
    """An estimate of the multiplications of a value; `sides` has its rows and columns, then those of its operands."""
    (rows, cols), *operands = sides
    if value.op.kind is not Kind.MATRIX:
        return 0.0
    first = operands[0] if operands else (rows, cols)
    short, long = sorted(first)
    return {
        Op.SOLVE: rows * rows * (cols + 2 * rows),
        Op.CHOLESKY: 12 * rows**3,
        Op.MATMUL: rows * first[1] * cols,
        Op.MODE_PRODUCT: rows * cols * (operands[1][0] if value.op is Op.MODE_PRODUCT else 0),
        Op.GRAM: rows * first[0] * first[1],
        Op.NEWTON_SCHULZ: multiplications(short, long, iterations, str(settings(value).get("form", DIRECT))),
        Op.QR: 4 * short * short * long,
        Op.EIGH: 9 * rows**3,
        Op.SINGULAR_VECTORS: 4 * short * short * long + 8 * short**3,
        Op.INVERSE_ROOT: 10 * rows**3,
    }.get(value.op, 0.0)
