"""Gaps between stages that project a parameter to fewer rows, for computation tile by tile.

A rule such as Apollo multiplies gradients by a narrow random matrix, and stores and reduces values of the product's
shape. Each element of such a value follows from the same element of the product. So one tile at a time is computed,
used and dropped: the projection, the gradient in another dtype and the product are never whole in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rulec.compiler.ir import Axes, Program, Store
from rulec.language.expr.node import Kind, Node, Op, walk

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
        if not (
            self._can_be_cut(product, left, right, derived)
            and self._stay_inside(parts, {*parts, *reductions})
            and all({"n"} <= set(self.axes[r].letters) and not self._is_matrix(r) for r in reductions)
            and not any(a in late for v in parts for a in v.args)
        ):
            return None
        stores = [s for s in self.program.finish if s.value in parts]
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
            and set(left).isdisjoint(right)
            and all(v.op.kind in _LEFT and self._of_numbers(v, left) for v in left)
            and all(v.op is Op.LOAD or v.op.kind in _OTHER for v in (*right, *alike))
            and all(self.axes[v] == axes for v in alike)
            and all(self.axes[v] == self.axes[product.args[1]] for v in right)
        )

    def _of_numbers(self, value: Node, parts: Sequence[Node]) -> bool:
        """Whether all operands of a value are numbers or among `parts`."""
        return all(a in parts or self.axes[a].number for a in value.args)

    def _stay_inside(self, parts: set[Node], inside: set[Node]) -> bool:
        """Whether only values `inside` use the parts, and the states stored from them are read nowhere else."""
        stores = [s for s in self.program.finish if s.value in parts]
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
