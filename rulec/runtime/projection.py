"""Gaps between stages that project a parameter to fewer rows, and can be worked out tile by tile.

A rule such as Apollo multiplies gradients by a narrow random matrix, and keeps and reduces what it makes of the
product. Each element of all that follows from the same element of the product: a tile of it can be made, used and
forgotten before the next, so that neither the projection, nor the gradient in another dtype, nor the product is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rulec.compiler.ir import Axes, Program, Store
from rulec.language.node import Kind, Node, Op, walk

#: What a part of a tile may be, beside arithmetic: of the left operand, and of everything else.
_LEFT = (Kind.RANDOM, Kind.ARITHMETIC, Kind.FUNCTION)
_OTHER = (Kind.ARITHMETIC, Kind.FUNCTION, Kind.COMPARE, Kind.LOGIC)


@dataclass(frozen=True)
class Step:
    """One value of a tile, what is stored once it is there, and the values that nothing needs from then on."""

    value: Node
    stores: tuple[Store, ...]
    over: tuple[Node, ...]


@dataclass(frozen=True)
class Projection:
    """The one product of a gap, and what is made of it, of the same axes.

    `left` leads to its left operand, row by row, and `right` to its right one, column by column, each value after those
    it is made of. `steps` are the values that follow, reductions among them. `before` and `after` are the gap's other
    values, worked out before and after all that.
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
        """What is left of all tiles."""
        return tuple(step.value for step in self.steps if step.value.op.kind is Kind.REDUCE)

    @property
    def stored(self) -> frozenset[str]:
        """The states that get their new values on the way."""
        return frozenset(store.buffer for step in self.steps for store in step.stores)


class Search:
    """Looks for the projection of a gap.

    `users` has the values that each value of the program's gaps is an operand of; `roots` are those used beside gaps,
    but for what is stored at the end of the step.
    """

    def __init__(
        self, program: Program, axes: Mapping[Node, Axes], users: Mapping[Node, Sequence[Node]], roots: Sequence[Node]
    ) -> None:
        self.program, self.axes, self.users, self.roots = program, axes, users, frozenset(roots)

    def find(self, values: Sequence[Node]) -> Projection | None:
        """The projection of a gap of these values; None where there is none, or something of it is needed whole."""
        products = [v for v in values if v.op is Op.MATMUL]
        if len(products) != 1 or self.program.skip is not None or self.program.joins:
            return None
        (product,) = products
        matrices = [v for v in values if self._is_matrix(v)]
        left, right = ([v for v in walk([operand]) if v in matrices] for operand in product.args)
        made = [v for v in matrices if v not in left and v not in right]
        reductions = [v for v in values if v.op.kind is Kind.REDUCE and v.args[0] in made]
        late = _following(values, reductions)
        parts = {*left, *right, *made}
        if not (
            self._can_be_cut(product, left, right, made)
            and self._stay_inside(parts, {*parts, *reductions})
            and all({"n"} <= set(self.axes[r].letters) and not self._is_matrix(r) for r in reductions)
            and not any(a in late for v in parts for a in v.args)
        ):
            return None
        stores = [s for s in self.program.finish if s.value in parts]
        order = [v for v in values if (v in made and v is not product) or v in reductions]
        others = [v for v in values if v not in parts and v not in reductions]
        return Projection(
            product, self.axes[product], _steps(left), _steps(right), _steps(order, stores, product),
            tuple(v for v in others if v not in late), tuple(v for v in others if v in late),
        )  # fmt: skip

    def _is_matrix(self, value: Node) -> bool:
        return {"i", "j"} <= set(self.axes[value].letters)

    def _can_be_cut(self, product: Node, left: Sequence[Node], right: Sequence[Node], made: Sequence[Node]) -> bool:
        """Whether a tile of every value follows from the same tile of others."""
        axes = self.axes[product]
        alike = [v for v in made if v is not product]
        return (
            not axes.elementwise
            and set(left).isdisjoint(right)
            and all(v.op.kind in _LEFT and self._of_numbers(v, left) for v in left)
            and all(v.op is Op.LOAD or v.op.kind in _OTHER for v in (*right, *alike))
            and all(self.axes[v] == axes for v in alike)
            and all(self.axes[v] == self.axes[product.args[1]] for v in right)
        )

    def _of_numbers(self, value: Node, parts: Sequence[Node]) -> bool:
        """Whether a value is made of these and of numbers alone."""
        return all(a in parts or set(self.axes[a].letters) <= {"k", "n"} for a in value.args)

    def _stay_inside(self, parts: set[Node], inside: set[Node]) -> bool:
        """Whether nothing else needs one of these, but for states that nothing else reads or makes."""
        stores = [s for s in self.program.finish if s.value in parts]
        loads = {str(v.arg) for v in self.users if v.op is Op.LOAD and v not in parts}
        return (
            all(u in inside for v in parts for u in self.users.get(v, ()))
            and self.roots.isdisjoint(parts)
            and all(s.value.op not in (Op.LOAD, Op.MATMUL) and s.buffer not in loads for s in stores)
        )


def _following(values: Sequence[Node], first: Sequence[Node]) -> set[Node]:
    """What is made of these, however far on."""
    found: set[Node] = set(first)
    for value in values:
        if not found.isdisjoint(value.args):
            found.add(value)
    return found


def _steps(order: Sequence[Node], stores: Sequence[Store] = (), given: Node | None = None) -> tuple[Step, ...]:
    """Steps in this order: what each stores, once nothing reads the old value any more, and leaves behind."""
    place = {value: number for number, value in enumerate(order)}
    last = dict(place)
    for number, value in enumerate(order):
        last.update((a, number) for a in value.args if a in place or a is given)
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
